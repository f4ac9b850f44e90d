//! The life of one generation request: turns tokens from the mesh into text, and records counts and latencies.
use super::engine::{Engine, Served, Tokens};
use super::error::ApiError;
use super::pieces::Pieces;
use crate::handle::{GenerateRequest, TokenEvent};
use crate::metrics::Metrics;
use kernels_models::constraint::Constraint;
use node_core::work::serve::{DoneReason, Logprobs, Priority, RequestKey, Sampled, Sampling};
use std::time::{Duration, Instant};

/// A validated generation request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_tokens: u32,
    pub(crate) sampling: Sampling,
    pub(crate) ignore_eos: bool,
    pub(crate) priority: Priority,
    pub(crate) stops: Vec<String>,
}

impl Order {
    /// Requires the answer to match a grammar.
    ///
    /// # Errors
    /// The answer must not end where the grammar does.
    pub(crate) fn constrain(&mut self, grammar: Option<String>) -> Result<(), ApiError> {
        if grammar.is_some() && self.ignore_eos {
            let message = "`ignore_eos` continues after the end, where a grammar allows nothing: send one of them";
            return Err(ApiError::invalid("ignore_eos", message));
        }
        self.sampling.grammar = grammar;
        Ok(())
    }
}

/// A running request. Dropping it stops its work.
pub(crate) struct Generation<T> {
    /// `None` once the request has ended.
    tokens: Option<T>,
    /// The first event, received before the HTTP status was decided.
    first: Option<TokenEvent>,
    model: Served,
    pieces: Pieces,
    check: Option<GrammarCheck>,
    figures: Figures,
    metrics: Metrics,
}

/// One event of a generation.
#[derive(Debug)]
pub(crate) enum Step {
    /// A token. Its text is empty while it is held back. Of a model for embeddings: the bits of the row.
    Token { position: u32, token: u32, text: String, logprobs: Option<SpelledLogprobs>, embedding: Option<Vec<u32>> },
    /// The end, with the text that was held back. Nothing follows.
    End { text: String, finish: Finish },
    /// The request failed. Nothing follows.
    Failed(ApiError),
}

/// Log-probabilities of a token and of the most likely ones, with their bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SpelledLogprobs {
    pub(crate) token: (Vec<u8>, f64),
    pub(crate) top: Vec<(Vec<u8>, f64)>,
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model ended it.
    Stop,
    /// This stop string appeared.
    StopString(String),
    /// It has as many tokens as the request or the context allows.
    Length,
}

impl Finish {
    /// The word of OpenAI's API, also in metrics.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Finish::Stop | Finish::StopString(_) => "stop",
            Finish::Length => "length",
        }
    }
}

/// Token counts and latencies of one request.
#[derive(Clone, Debug)]
pub(crate) struct Figures {
    pub(crate) prompt_tokens: usize,
    /// Those of them that were cached.
    pub(crate) cached_tokens: u32,
    pub(crate) tokens: u32,
    started: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Figures {
    /// Time to first token.
    pub(crate) fn first_token(&self) -> Option<Duration> {
        self.first.map(|first| first - self.started)
    }

    /// Decode rate: tokens per second after the first token; `None` for fewer than two tokens.
    pub(crate) fn tokens_per_second(&self) -> Option<f64> {
        let seconds = (self.last? - self.first?).as_secs_f64();
        (self.tokens > 1 && seconds > 0.0).then(|| f64::from(self.tokens - 1) / seconds)
    }
}

impl<T: Tokens> Generation<T> {
    /// Submits the order under `key`, its id in the mesh, and waits for the first event, so that a rejection can set
    /// the HTTP status.
    ///
    /// # Errors
    /// The request is rejected, or fails before the first token.
    pub(crate) async fn start<E: Engine<Tokens = T>>(
        engine: &E,
        model: Served,
        order: Order,
        key: RequestKey,
        metrics: &Metrics,
    ) -> Result<Self, ApiError> {
        let started = Instant::now();
        let prompt_tokens = order.prompt.len();
        let request = GenerateRequest {
            prompt: order.prompt,
            max_tokens: order.max_tokens,
            sampling: order.sampling,
            ignore_eos: order.ignore_eos,
            priority: order.priority,
            key,
        };
        let check = GrammarCheck::new(request.sampling.grammar.as_deref(), &model)?;
        let tokens = engine.submit(&model, request).await?;
        let mut generation = Self {
            tokens: Some(tokens),
            first: None,
            model,
            pieces: Pieces::new(order.stops),
            check,
            figures: Figures { prompt_tokens, cached_tokens: 0, tokens: 0, started, first: None, last: None },
            metrics: metrics.clone(),
        };
        let first = generation.event().await;
        if let TokenEvent::Done { reason } = &first
            && let Some(error) = ApiError::from_reason(reason)
        {
            generation.end("refused");
            return Err(error);
        }
        generation.first = Some(first);
        Ok(generation)
    }

    pub(crate) fn figures(&self) -> &Figures {
        &self.figures
    }

    /// The next step. Cancel-safe: dropping the future loses no event.
    pub(crate) async fn next(&mut self) -> Step {
        if let Some(stop) = self.pieces.stopped_by() {
            return self.ended(Finish::StopString(stop.to_owned()));
        }
        let event = match self.first.take() {
            Some(event) => event,
            None => self.event().await,
        };
        match event {
            TokenEvent::Token { position, sampled: Sampled { token, logprobs, embedding }, cached } => {
                self.count();
                self.figures.cached_tokens = cached;
                if let Some(Err(error)) = self.check.as_mut().map(|check| check.push(token)) {
                    self.end("failed");
                    return Step::Failed(error);
                }
                let text = self.pieces.push(&self.model.text.spelled(token));
                let logprobs = logprobs.map(|logprobs| self.spelled(token, &logprobs));
                Step::Token { position, token, text, logprobs, embedding }
            }
            TokenEvent::Done { reason: DoneReason::Stop } => match self.check.as_mut().map(GrammarCheck::end) {
                Some(Err(error)) => {
                    self.end("failed");
                    Step::Failed(error)
                }
                Some(Ok(())) | None => self.ended(Finish::Stop),
            },
            TokenEvent::Done { reason: DoneReason::Length } => self.ended(Finish::Length),
            TokenEvent::Done { reason } => {
                self.end("failed");
                let error = ApiError::from_reason(&reason)
                    .unwrap_or_else(|| ApiError::failed("the request ended without a reason"));
                Step::Failed(error)
            }
        }
    }

    async fn event(&mut self) -> TokenEvent {
        let event = match &mut self.tokens {
            Some(tokens) => tokens.next().await,
            None => None,
        };
        event.unwrap_or_else(|| TokenEvent::Done { reason: DoneReason::Failed("the node stopped".into()) })
    }

    fn spelled(&self, token: u32, logprobs: &Logprobs) -> SpelledLogprobs {
        let one = |token, log_e6: i32| (self.model.text.spelled(token), f64::from(log_e6) / 1e6);
        let top = logprobs.top_e6.iter().map(|&(token, log_e6)| one(token, log_e6)).collect();
        SpelledLogprobs { token: one(token, logprobs.sampled_e6), top }
    }

    fn count(&mut self) {
        let now = Instant::now();
        let model = self.model.name.as_str();
        if self.figures.first.is_none() {
            self.figures.first = Some(now);
            self.metrics.first_token(model, now - self.figures.started);
        } else {
            self.metrics.token(model, self.figures.last.map(|last| now - last));
        }
        self.figures.last = Some(now);
        self.figures.tokens += 1;
    }

    fn ended(&mut self, finish: Finish) -> Step {
        self.end(finish.word());
        Step::End { text: self.pieces.finish(), finish }
    }

    /// Stops the request if it is running, and counts it once.
    fn end(&mut self, outcome: &'static str) {
        if self.tokens.take().is_some() {
            self.metrics.request_ended(&self.model.name, outcome);
            self.metrics.prompt_tokens(&self.model.name, self.figures.prompt_tokens as u64);
        }
    }
}

/// Checks an answer against its grammar. The node that draws the tokens keeps to it; this one does not rely on that.
struct GrammarCheck {
    constraint: Constraint,
    answer: Vec<u32>,
}

impl GrammarCheck {
    fn new(grammar: Option<&str>, model: &Served) -> Result<Option<Self>, ApiError> {
        let compiled = grammar.map(|grammar| model.text.constrain(grammar)).transpose();
        let compiled = compiled.map_err(|reason| ApiError::invalid(None, reason))?;
        Ok(compiled.map(|constraint| Self { constraint, answer: Vec::new() }))
    }

    fn push(&mut self, token: u32) -> Result<(), ApiError> {
        self.answer.push(token);
        self.constraint.follow(&self.answer).map_err(|error| {
            ApiError::failed(format!(
                "the answer left its grammar ({error}): the node with the model's last layers may lack the vocabulary; \
                 serve the model from a GGUF file"
            ))
        })
    }

    fn end(&mut self) -> Result<(), ApiError> {
        let unfinished = "the answer ended before its grammar did: the grammar became too complex; simplify the schema";
        if self.constraint.is_complete() { Ok(()) } else { Err(ApiError::failed(unfinished)) }
    }
}

impl<T> Drop for Generation<T> {
    fn drop(&mut self) {
        if self.tokens.is_some() {
            self.metrics.request_ended(&self.model.name, "disconnected");
        }
    }
}
