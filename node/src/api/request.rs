//! OpenAI's request bodies, parsed strictly: an unsupported parameter is rejected by name, never silently ignored.
use super::chat::{self, Chat, Form};
use super::engine::Served;
use super::error::ApiError;
use super::fields::Field;
use super::generation::Order;
use super::output::Reading;
use super::tools::Tools;
use node_core::limits::{DRAFTS_MAX, SEQUENCES_MAX};
use node_core::work::serve::{LOGIT_BIASES_MAX, LOGPROBS_MAX, Priority, Sampling};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Stop strings per request. OpenAI allows 4; each costs a search per token.
const STOPS_MAX: usize = 16;
/// Bytes of one stop string: the text held back grows with it.
const STOP_BYTES_MAX: usize = 1024;
/// Default `max_tokens` of OpenAI's legacy completions endpoint.
const COMPLETION_TOKENS_DEFAULT: u32 = 16;

/// Fields of [`Body`].
pub(crate) const BODY: &[Field] = &[
    Field::text("model").required().about("Name of the model"),
    Field::messages("messages").about("The conversation"),
    Field::prompt("prompt").about("One text, or one list of token ids"),
    Field::bool("stream").about("Answer with server-sent events"),
    Field::object("stream_options").about("`include_usage`: a stream ends with the token counts"),
    Field::long("n").about("Number of choices, 1 to 64"),
    Field::long("best_of").about("As many as `n`"),
    Field::bool("echo").about("Only false"),
    Field::text("suffix").about("Not supported: only an empty text"),
    Field::any("logprobs")
        .about("Log-probabilities: in a chat true or false; of a text the number of most likely tokens, 0 to 20"),
    Field::long("top_logprobs").about("Most likely tokens with their log-probabilities, 0 to 20; needs `logprobs`"),
    Field::any("functions").about("OpenAI's older form, not supported: send `tools`"),
    Field::texts("modalities").about("Only `text`"),
    Field::objects("tools").about("Functions that the model may call, at most 128"),
    Field::any("tool_choice").about("`none`, `auto`, `required`, or a function"),
    Field::bool("parallel_tool_calls").about("Whether an answer may have several calls"),
    Field::object("response_format").about("Form of the answer: `text`, `json_object` or `json_schema`"),
    Field::text("grammar").about("A Lark grammar for the answer"),
    Field::count("max_tokens").about("Most tokens of the answer"),
    Field::count("max_completion_tokens").about("Most tokens of the answer"),
    Field::number("temperature").about("0 to 2"),
    Field::number("top_p").about("Above 0 to 1"),
    Field::signed("top_k").about("0 or -1: off"),
    Field::number("min_p").about("0 to 1"),
    Field::number("repetition_penalty").about("Above 0 to 10"),
    Field::number("presence_penalty").about("-2 to 2"),
    Field::number("frequency_penalty").about("-2 to 2"),
    Field::object("logit_bias").about("Token ids with -100 to 100"),
    Field::signed("seed").about("Of the sampling; otherwise derived from the request's key"),
    Field::texts("stop").about("Texts that end the answer, at most 16"),
    Field::bool("ignore_eos").about("Continue after the model's end token"),
    Field::count("draft_tokens").about("Most draft tokens of a step, 0 to 7; the answer is the same with any number"),
    Field::text("priority").about("`interactive`, `batch` or `idle`: requests of a higher priority go first"),
    Field::text("service_tier").about("`flex` is the priority `batch`; others have no effect"),
];

/// The body of `/v1/chat/completions` and `/v1/completions`. Other fields (`user`, `store`, `metadata`, …) do not
/// change the answer and are ignored.
#[cfg_attr(test, derive(serde::Serialize))]
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Body {
    pub(crate) model: Option<String>,
    pub(super) messages: Option<Vec<MessageBody>>,
    pub(super) prompt: Option<Prompt>,
    pub(crate) stream: Option<bool>,
    pub(super) stream_options: Option<StreamOptions>,
    #[serde(flatten)]
    pub(super) settings: Settings,
    pub(super) n: Option<u64>,
    pub(super) best_of: Option<u64>,
    pub(super) echo: Option<bool>,
    pub(super) suffix: Option<String>,
    pub(super) logprobs: Option<Value>,
    pub(super) top_logprobs: Option<u64>,
    pub(super) response_format: Option<Value>,
    pub(super) grammar: Option<String>,
    pub(super) tools: Option<Vec<Value>>,
    pub(super) tool_choice: Option<Value>,
    pub(super) parallel_tool_calls: Option<bool>,
    pub(super) functions: Option<Value>,
    pub(super) modalities: Option<Vec<String>>,
}

/// Generation limits and sampling parameters; also part of `/api/v1/generate`.
#[cfg_attr(test, derive(serde::Serialize))]
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Settings {
    pub(super) max_tokens: Option<u32>,
    pub(super) max_completion_tokens: Option<u32>,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) top_k: Option<i64>,
    pub(super) min_p: Option<f64>,
    pub(super) repetition_penalty: Option<f64>,
    pub(super) presence_penalty: Option<f64>,
    pub(super) frequency_penalty: Option<f64>,
    pub(super) logit_bias: Option<BTreeMap<String, Value>>,
    pub(super) seed: Option<i64>,
    pub(super) stop: Option<Stop>,
    pub(super) ignore_eos: Option<bool>,
    pub(super) draft_tokens: Option<u32>,
    pub(super) priority: Option<String>,
    pub(super) service_tier: Option<String>,
}

/// One message of a conversation.
#[cfg_attr(test, derive(serde::Serialize))]
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct MessageBody {
    pub(super) role: String,
    pub(super) content: Option<Content>,
    pub(super) tool_calls: Option<Vec<Value>>,
    pub(super) tool_call_id: Option<String>,
    pub(super) name: Option<String>,
    pub(super) reasoning_content: Option<String>,
}

impl MessageBody {
    /// A message with the role `user`.
    pub(crate) fn user(text: String) -> Self {
        Self { role: "user".into(), content: Some(Content::Text(text)), ..Self::default() }
    }
}

#[cfg_attr(test, derive(serde::Serialize))]
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

impl Content {
    /// The text of all parts.
    ///
    /// # Errors
    /// A part is not text.
    pub(super) fn text(self) -> Result<String, ApiError> {
        let parts = match self {
            Content::Text(text) => return Ok(text),
            Content::Parts(parts) => parts.into_iter(),
        };
        let text = |part: Part| match (part.kind.as_str(), part.text) {
            ("text", Some(text)) => Ok(text),
            (kind, _) => Err(ApiError::unsupported(
                "messages",
                format!("content of type `{kind}` is not supported: expected type `text` with `text`"),
            )),
        };
        parts.map(text).collect()
    }
}

#[cfg_attr(test, derive(serde::Serialize))]
#[derive(Debug, Deserialize)]
pub(super) struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// Text or token ids. Some clients send a list with one prompt.
#[cfg_attr(test, derive(serde::Serialize))]
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Prompt {
    /// One text.
    Text(String),
    /// A list of texts.
    Texts(Vec<String>),
    /// Token ids.
    Ids(Vec<u32>),
    /// Lists of token ids.
    IdLists(Vec<Vec<u32>>),
}

#[cfg_attr(test, derive(serde::Serialize))]
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamOptions {
    include_usage: Option<bool>,
}

/// One or several stop strings.
#[cfg_attr(test, derive(serde::Serialize))]
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Stop {
    One(String),
    Many(Vec<String>),
}

impl Body {
    /// Whether a stream ends with a chunk of token counts.
    pub(crate) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false)
    }

    /// The number of choices.
    ///
    /// # Errors
    /// It is 0, or more than a model serves at once.
    pub(crate) fn choices(&self) -> Result<usize, ApiError> {
        let (n, most) = (self.n.unwrap_or(1), u64::from(SEQUENCES_MAX));
        match usize::try_from(n) {
            Ok(choices) if (1..=most).contains(&n) => Ok(choices),
            Ok(_) | Err(_) => Err(ApiError::invalid("n", format!("`n` is {n}, expected 1 to {most}"))),
        }
    }

    /// Sets the seed, unless the client chose one.
    pub(crate) fn seed_or(&mut self, seed: u64) {
        self.settings.seed.get_or_insert(seed.cast_signed());
    }

    /// The order for a chat request.
    ///
    /// # Errors
    /// Unsupported parameters, or a conversation that the model's chat template rejects.
    pub(crate) fn chat(self, model: &Served) -> Result<(Order, Reading), ApiError> {
        self.check_supported()?;
        if self.prompt.is_some() {
            return Err(ApiError::invalid(
                "prompt",
                "a chat request has `messages`; `prompt` belongs to /v1/completions",
            ));
        }
        let logprobs = self.chat_logprobs()?;
        let (chat, settings) = self.conversation(model)?;
        let mut order = settings.order(chat.prompt, None, model)?;
        order.sampling.logprobs = logprobs;
        order.constrain(chat.grammar)?;
        Ok((order, chat.reading))
    }

    /// The prompt of a chat request, which may be longer than the context.
    ///
    /// # Errors
    /// As [`Self::chat`].
    pub(crate) fn prompt(self, model: &Served) -> Result<Vec<u32>, ApiError> {
        Ok(self.conversation(model)?.0.prompt)
    }

    fn conversation(self, model: &Served) -> Result<(Chat, Settings), ApiError> {
        let messages = self.messages.ok_or_else(|| ApiError::invalid("messages", "`messages` is missing"))?;
        let tools = Tools::read(self.tools, self.tool_choice.as_ref(), self.parallel_tool_calls)?;
        let form = Form { tools, response: self.response_format, grammar: self.grammar };
        Ok((chat::chat(messages, &form, model)?, self.settings))
    }

    /// The order for a completion request.
    ///
    /// # Errors
    /// As [`Self::chat`].
    pub(crate) fn completion(self, model: &Served) -> Result<(Order, Reading), ApiError> {
        self.check_supported()?;
        if self.messages.is_some() {
            return Err(ApiError::invalid("messages", "`messages` belongs to /v1/chat/completions; send `prompt`"));
        }
        if self.tools.is_some_and(|tools| !tools.is_empty()) {
            return Err(ApiError::invalid("tools", "`tools` belongs to /v1/chat/completions"));
        }
        let prompt = self.prompt.ok_or_else(|| ApiError::invalid("prompt", "`prompt` is missing"))?;
        let logprobs = match self.logprobs.as_ref().filter(|logprobs| !logprobs.is_null()) {
            None | Some(Value::Bool(false)) => None,
            Some(most) => Some(top_logprobs("logprobs", most.as_u64())?),
        };
        let form = Form { tools: None, response: self.response_format, grammar: self.grammar };
        let grammar = chat::grammar_of(&form, Reading::default(), &*model.text)?;
        let mut order = self.settings.order(prompt.tokens(model)?, Some(COMPLETION_TOKENS_DEFAULT), model)?;
        order.sampling.logprobs = logprobs;
        order.constrain(grammar)?;
        Ok((order, Reading::default()))
    }

    /// The number of most likely tokens whose log-probabilities a chat request asks for.
    fn chat_logprobs(&self) -> Result<Option<u8>, ApiError> {
        match (self.logprobs.as_ref().filter(|logprobs| !logprobs.is_null()), self.top_logprobs) {
            (Some(Value::Bool(true)), most) => top_logprobs("top_logprobs", Some(most.unwrap_or(0))).map(Some),
            (None | Some(Value::Bool(false)), None | Some(0)) => Ok(None),
            (None | Some(Value::Bool(false)), Some(_)) => {
                Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs`: true"))
            }
            (Some(_), _) => Err(ApiError::invalid("logprobs", "`logprobs` must be true or false in a chat request")),
        }
    }

    fn check_supported(&self) -> Result<(), ApiError> {
        let some = |value: &Option<Value>| {
            value.as_ref().is_some_and(|v| !v.is_null() && *v != Value::Bool(false) && *v != Value::Array(vec![]))
        };
        let text_only = self.modalities.as_ref().is_none_or(|m| m.iter().all(|m| m == "text"));
        let refused = [
            (
                self.best_of.is_some_and(|best| Some(best) != self.n.or(Some(1))),
                "best_of",
                "only as many as `n` is supported",
            ),
            (self.echo == Some(true), "echo", "echo is not supported"),
            (self.suffix.as_ref().is_some_and(|s| !s.is_empty()), "suffix", "suffix is not supported"),
            (some(&self.functions), "functions", "this is OpenAI's older form: send `tools`"),
            (!text_only, "modalities", "only text is supported"),
        ];
        match refused.iter().find(|(wrong, _, _)| *wrong) {
            Some((_, param, message)) => Err(ApiError::unsupported(param, format!("`{param}`: {message}"))),
            None => Ok(()),
        }
    }
}

/// A number of most likely tokens.
fn top_logprobs(field: &'static str, most: Option<u64>) -> Result<u8, ApiError> {
    let most = most.and_then(|most| u8::try_from(most).ok()).filter(|most| *most <= LOGPROBS_MAX);
    most.ok_or_else(|| ApiError::invalid(field, format!("`{field}` must be a number from 0 to {LOGPROBS_MAX}")))
}

impl Prompt {
    /// The number of texts or lists.
    pub(super) fn count(&self) -> usize {
        match self {
            Prompt::Text(_) | Prompt::Ids(_) => 1,
            Prompt::Texts(texts) => texts.len(),
            Prompt::IdLists(lists) => lists.len(),
        }
    }

    /// The token ids of each text or list.
    pub(super) fn each(self, model: &Served, param: &'static str) -> Result<Vec<Vec<u32>>, ApiError> {
        let lists = match self {
            Prompt::Text(text) => vec![encode(&text, model, param)?],
            Prompt::Texts(texts) => {
                texts.iter().map(|text| encode(text, model, param)).collect::<Result<_, ApiError>>()?
            }
            Prompt::Ids(ids) => vec![ids],
            Prompt::IdLists(lists) => lists,
        };
        match lists.iter().flatten().find(|id| **id >= model.text.vocabulary()) {
            Some(id) => Err(ApiError::invalid(
                param,
                format!("token {id} is not in the model's vocabulary: expected ids below {}", model.text.vocabulary()),
            )),
            None => Ok(lists),
        }
    }

    pub(crate) fn tokens(self, model: &Served) -> Result<Vec<u32>, ApiError> {
        if self.count() != 1 {
            return Err(ApiError::unsupported("prompt", "`prompt`: expected exactly one prompt per request"));
        }
        Ok(self.each(model, "prompt")?.into_iter().flatten().collect())
    }
}

fn encode(text: &str, model: &Served, param: &'static str) -> Result<Vec<u32>, ApiError> {
    model.text.encode(text).map_err(|e| ApiError::invalid(param, e))
}

impl Settings {
    /// An order for a prompt. Without a bound from the caller it generates at most `tokens_default` tokens, or, if that
    /// is `None`, up to the end of the context.
    pub(crate) fn order(
        self,
        prompt: Vec<u32>,
        tokens_default: Option<u32>,
        model: &Served,
    ) -> Result<Order, ApiError> {
        if model.text.embedding().is_some() {
            let message = format!("`{}` is made for embeddings and generates no text: use /v1/embeddings", model.name);
            return Err(ApiError::invalid("model", message));
        }
        if prompt.is_empty() {
            return Err(ApiError::invalid("prompt", "the prompt has no tokens"));
        }
        let room = usize::try_from(model.context).unwrap_or(usize::MAX).saturating_sub(prompt.len());
        if room == 0 {
            return Err(ApiError::too_long(prompt.len(), model.context));
        }
        let bound = self.max_completion_tokens.or(self.max_tokens).or(tokens_default);
        if bound == Some(0) {
            return Err(ApiError::invalid("max_tokens", "`max_tokens` must be at least 1"));
        }
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        let sampling = self.sampling(model)?;
        Ok(Order {
            prompt,
            max_tokens: bound.map_or(room, |bound| bound.min(room)),
            sampling,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            priority: self.priority()?,
            stops: self.stops()?,
        })
    }

    fn priority(&self) -> Result<Priority, ApiError> {
        match (self.priority.as_deref(), self.service_tier.as_deref()) {
            (Some("batch"), _) | (None, Some("flex")) => Ok(Priority::Batch),
            (Some("idle"), _) => Ok(Priority::Idle),
            (Some("interactive") | None, _) => Ok(Priority::Interactive),
            (Some(other), _) => Err(ApiError::invalid(
                "priority",
                format!("`priority` must be `interactive`, `batch` or `idle`, found `{other}`"),
            )),
        }
    }

    fn sampling(&self, model: &Served) -> Result<Sampling, ApiError> {
        let seed = match self.seed {
            Some(seed) => seed.cast_unsigned(),
            None => getrandom::u64().map_err(|e| ApiError::failed(format!("cannot choose a random seed: {e}")))?,
        };
        let top_k = match self.top_k.unwrap_or(0) {
            -1 => 0, // vLLM's value for off
            k => u32::try_from(k).map_err(|_| ApiError::invalid("top_k", "`top_k` must be 0 (off) or more"))?,
        };
        Ok(Sampling {
            temperature_e6: millionths("temperature", self.temperature.unwrap_or(1.0), 0.0, 2.0)?,
            top_p_e6: millionths("top_p", self.top_p.unwrap_or(1.0), 0.000_001, 1.0)?,
            top_k,
            min_p_e6: millionths("min_p", self.min_p.unwrap_or(0.0), 0.0, 1.0)?,
            repetition_penalty_e6: millionths(
                "repetition_penalty",
                self.repetition_penalty.unwrap_or(1.0),
                0.000_001,
                10.0,
            )?,
            presence_penalty_e6: penalty("presence_penalty", self.presence_penalty)?,
            frequency_penalty_e6: penalty("frequency_penalty", self.frequency_penalty)?,
            logit_bias_e6: self.logit_bias(model)?,
            grammar: None,
            logprobs: None,
            seed,
            drafts: self
                .draft_tokens
                .and_then(|most| u8::try_from(most).ok())
                .map_or(DRAFTS_MAX, |most| most.min(DRAFTS_MAX)),
        })
    }

    /// Token ids and the millionths added to their logits, sorted by id.
    fn logit_bias(&self, model: &Served) -> Result<Vec<(u32, i32)>, ApiError> {
        let invalid = |message: String| ApiError::invalid("logit_bias", message);
        let requested = self.logit_bias.iter().flatten();
        let vocabulary = model.text.vocabulary();
        let bias = requested.map(|(token, bias)| {
            let id = token.parse().ok().filter(|id| *id < vocabulary);
            let id = id.ok_or_else(|| {
                invalid(format!("`logit_bias` names token {token:?}: expected a token id below {vocabulary}"))
            })?;
            let fits = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
            let wrong = || invalid(format!("`logit_bias` of token {id} is {bias}, expected -100 to 100"));
            fits.map(|bias| (id, (bias * 1e6).round() as i32)).ok_or_else(wrong)
        });
        let mut bias = bias.collect::<Result<Vec<(u32, i32)>, _>>()?;
        if bias.len() > LOGIT_BIASES_MAX {
            return Err(invalid(format!(
                "`logit_bias` has {} tokens, at most {LOGIT_BIASES_MAX} are allowed",
                bias.len()
            )));
        }
        bias.sort_unstable();
        Ok(bias)
    }

    fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => vec![],
            // Some clients send an empty string for no stop string.
            Some(Stop::One(stop)) if stop.is_empty() => vec![],
            Some(Stop::One(stop)) => vec![stop.clone()],
            Some(Stop::Many(stops)) => stops.clone(),
        };
        if stops.len() > STOPS_MAX {
            let message = format!("`stop` has {} strings, at most {STOPS_MAX} are allowed", stops.len());
            return Err(ApiError::invalid("stop", message));
        }
        match stops.iter().position(|s| s.is_empty() || s.len() > STOP_BYTES_MAX) {
            Some(at) => {
                let found = stops[at].len();
                Err(ApiError::invalid(
                    "stop",
                    format!("`stop[{at}]` has {found} bytes, expected 1 to {STOP_BYTES_MAX}"),
                ))
            }
            None => Ok(stops),
        }
    }
}

/// A penalty of OpenAI's API, in millionths.
fn penalty(param: &'static str, value: Option<f64>) -> Result<i32, ApiError> {
    let value = value.unwrap_or(0.0);
    if value.is_finite() && (-2.0..=2.0).contains(&value) {
        Ok((value * 1e6).round() as i32)
    } else {
        Err(ApiError::invalid(param, format!("`{param}` is {value}, expected -2 to 2")))
    }
}

fn millionths(param: &'static str, value: f64, least: f64, most: f64) -> Result<u32, ApiError> {
    if value.is_finite() && (least..=most).contains(&value) {
        Ok((value * 1e6).round() as u32)
    } else {
        Err(ApiError::invalid(param, format!("`{param}` is {value}, expected {least} to {most}")))
    }
}
