//! `/v1/…` as OpenAI's clients know it: models, chat completions, completions; streaming and not.
use super::engine::{Engine, Served, Tokens};
use super::error::ApiError;
use super::generation::{Figures, Generation, Order, Step};
use super::request::Body;
use super::{App, body, off_thread};
use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::time::Duration;

/// Comments sent while no token comes (a long prefill, a stage being replaced), so that clients and proxies wait on.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

pub(crate) async fn models<E: Engine>(State(app): State<App<E>>) -> Json<Value> {
    let data: Vec<Value> = app.engine.models().iter().map(model_view).collect();
    Json(json!({"object": "list", "data": data}))
}

pub(crate) async fn model<E: Engine>(
    State(app): State<App<E>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(model_view(&find(&app, Some(&name))?)))
}

pub(crate) async fn chat<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Response, ApiError> {
    generate(app, request, Shape::Chat).await
}

pub(crate) async fn completion<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Response, ApiError> {
    generate(app, request, Shape::Completion).await
}

/// The served model of that name; the path (or hub reference) of its file is as good.
pub(crate) fn find<E: Engine>(app: &App<E>, name: Option<&str>) -> Result<Served, ApiError> {
    let name = name.ok_or_else(|| ApiError::invalid("model", "`model` is missing"))?;
    let models = app.engine.models();
    let stem = name.strip_suffix(".gguf").and_then(|n| n.rsplit('/').next());
    if let Some(model) = models.iter().find(|m| m.name == name || Some(m.name.as_str()) == stem) {
        return Ok(model.clone());
    }
    let names: Vec<&str> = models.iter().map(|m| m.name.as_str()).collect();
    let served = if names.is_empty() { "none is".into() } else { format!("served are: {}", names.join(", ")) };
    Err(ApiError::not_found(
        "model_not_found",
        format!("the model `{name}` is not served here ({served}); serve it with `meshnode serve {name}`"),
    ))
}

#[derive(Clone, Copy)]
enum Shape {
    Chat,
    Completion,
}

async fn generate<E: Engine>(app: App<E>, request: Request, shape: Shape) -> Result<Response, ApiError> {
    let body: Body = body(request).await?;
    let model = find(&app, body.model.as_deref())?;
    let (streaming, include_usage) = (body.stream.unwrap_or(false), body.include_usage());
    let for_order = model.clone();
    let order: Order = off_thread(move || match shape {
        Shape::Chat => body.chat(&for_order),
        Shape::Completion => body.completion(&for_order),
    })
    .await?;
    let answer = Answer::new(shape, &model)?;
    let generation = Generation::start(&app.engine, model, order, &app.metrics).await?;
    if streaming {
        Ok(stream_answer(generation, answer, include_usage))
    } else {
        whole_answer(generation, &answer).await
    }
}

async fn whole_answer<T: Tokens>(mut generation: Generation<T>, answer: &Answer) -> Result<Response, ApiError> {
    let mut whole = String::new();
    loop {
        match generation.next().await {
            Step::Token { text, .. } => whole.push_str(&text),
            Step::End { text, finish } => {
                whole.push_str(&text);
                return Ok(Json(answer.whole(&whole, finish, generation.figures())).into_response());
            }
            Step::Failed(error) => return Err(error),
        }
    }
}

/// Where a stream is.
enum Phase<T> {
    Begin(Generation<T>),
    Running(Generation<T>),
    /// Chunks still to be sent.
    Ending(std::vec::IntoIter<String>),
}

fn stream_answer<T: Tokens>(generation: Generation<T>, answer: Answer, include_usage: bool) -> Response {
    let begin = match answer.shape {
        Shape::Chat => Phase::Begin(generation),
        Shape::Completion => Phase::Running(generation),
    };
    let chunks = stream::unfold((begin, answer), move |(phase, answer)| async move {
        let (data, phase) = match phase {
            Phase::Begin(generation) => (answer.chunk(Some(""), None, include_usage, true), Phase::Running(generation)),
            Phase::Running(generation) => advance(generation, &answer, include_usage).await,
            Phase::Ending(mut rest) => (rest.next()?, Phase::Ending(rest)),
        };
        Some((Ok::<_, Infallible>(Event::default().data(data)), (phase, answer)))
    });
    Sse::new(chunks).keep_alive(KeepAlive::new().interval(KEEP_ALIVE).text("waiting")).into_response()
}

/// The next chunk that has something to say.
async fn advance<T: Tokens>(mut generation: Generation<T>, answer: &Answer, include_usage: bool) -> (String, Phase<T>) {
    loop {
        match generation.next().await {
            Step::Token { text, .. } if text.is_empty() => {}
            Step::Token { text, .. } => {
                return (answer.chunk(Some(&text), None, include_usage, false), Phase::Running(generation));
            }
            Step::End { text, finish } => {
                let mut chunks = Vec::new();
                if !text.is_empty() {
                    chunks.push(answer.chunk(Some(&text), None, include_usage, false));
                }
                chunks.push(answer.chunk(None, Some(finish), include_usage, false));
                if include_usage {
                    chunks.push(answer.usage_chunk(generation.figures()));
                }
                chunks.push("[DONE]".into());
                let mut rest = chunks.into_iter();
                return (rest.next().unwrap_or_default(), Phase::Ending(rest));
            }
            Step::Failed(error) => return (error.body().to_string(), Phase::Ending(Vec::new().into_iter())),
        }
    }
}

/// What all chunks of an answer share.
struct Answer {
    shape: Shape,
    id: String,
    created: u64,
    model: String,
}

impl Answer {
    fn new(shape: Shape, model: &Served) -> Result<Self, ApiError> {
        let random = getrandom::u64().map_err(|e| ApiError::failed(format!("no random id: {e}")))?;
        let prefix = match shape {
            Shape::Chat => "chatcmpl",
            Shape::Completion => "cmpl",
        };
        let created = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Ok(Self { shape, id: format!("{prefix}-{random:016x}"), created, model: model.name.clone() })
    }

    fn whole(&self, text: &str, finish: &str, figures: &Figures) -> Value {
        let (object, choice) = match self.shape {
            Shape::Chat => {
                let message = json!({"role": "assistant", "content": text, "refusal": null});
                ("chat.completion", json!({"index": 0, "message": message, "logprobs": null, "finish_reason": finish}))
            }
            Shape::Completion => {
                ("text_completion", json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish}))
            }
        };
        let mut value = self.envelope(object, vec![choice]);
        value["usage"] = usage(figures);
        value
    }

    fn chunk(&self, text: Option<&str>, finish: Option<&str>, include_usage: bool, begin: bool) -> String {
        let choice = match self.shape {
            Shape::Chat => {
                let delta = match (begin, text) {
                    (true, _) => json!({"role": "assistant", "content": ""}),
                    (false, Some(text)) => json!({"content": text}),
                    (false, None) => json!({}),
                };
                json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish})
            }
            Shape::Completion => {
                json!({"index": 0, "text": text.unwrap_or(""), "logprobs": null, "finish_reason": finish})
            }
        };
        let mut value = self.envelope(self.chunk_object(), vec![choice]);
        if include_usage {
            value["usage"] = Value::Null;
        }
        value.to_string()
    }

    fn usage_chunk(&self, figures: &Figures) -> String {
        let mut value = self.envelope(self.chunk_object(), vec![]);
        value["usage"] = usage(figures);
        value.to_string()
    }

    fn chunk_object(&self) -> &'static str {
        match self.shape {
            Shape::Chat => "chat.completion.chunk",
            Shape::Completion => "text_completion",
        }
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": null, "choices": choices,
        })
    }
}

fn usage(figures: &Figures) -> Value {
    let (prompt, completion) = (figures.prompt_tokens, figures.tokens as usize);
    json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
}

fn model_view(model: &Served) -> Value {
    json!({
        "id": model.name, "object": "model", "created": model.created, "owned_by": "meshnode",
        "context_length": model.context,
    })
}
