//! `/api/v1/…` endpoints for the command line, and `/healthz`, `/readyz`, `/metrics` for monitoring.
use super::app::App;
use super::body::{body, off_thread};
use super::chat::{Form, chat};
use super::engine::Engine;
use super::error::ApiError;
use super::fields::Field;
use super::generation::{Figures, Generation, Order, Step};
use super::guard::Caller;
use super::idempotency::Key;
use super::models::{find, find_or_serve};
use super::request::{self, MessageBody, Prompt, Settings};
use crate::handle::{ModelOptions, ModelRef};
use crate::metrics;
use axum::Extension;
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::time::Duration;

/// Longest lifetime of a ticket, so that a forgotten one expires.
pub(crate) const INVITE_TTL_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// Most uses of one ticket: a rack of machines.
const INVITE_USES_MAX: u32 = 1000;

pub(crate) async fn health() -> &'static str {
    "ok\n"
}

/// 503 while a job that this node takes part in is being planned, loading or degraded; else 200. A node that holds its
/// part of another node's job is ready.
pub(crate) async fn ready<E: Engine>(State(app): State<App<E>>) -> Response {
    let state = app.engine.state().await;
    let waiting: Vec<Value> = state
        .jobs
        .iter()
        .filter(|job| matches!(job.state.as_str(), "starting" | "planning" | "loading" | "degraded"))
        .map(|job| json!({"job": job.job, "model": job.model, "state": job.state}))
        .collect();
    let status = if waiting.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({"ready": waiting.is_empty(), "waiting": waiting}))).into_response()
}

pub(crate) async fn metrics<E: Engine>(State(app): State<App<E>>) -> Response {
    let state = app.engine.state().await;
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], app.metrics.render(&state)).into_response()
}

pub(crate) async fn state<E: Engine>(State(app): State<App<E>>) -> Response {
    Json(app.engine.state().await).into_response()
}

pub(crate) async fn peers<E: Engine>(State(app): State<App<E>>) -> Response {
    Json(app.engine.state().await.peers).into_response()
}

pub(crate) async fn jobs<E: Engine>(State(app): State<App<E>>) -> Response {
    Json(app.engine.state().await.jobs).into_response()
}

/// Fields of [`ModelBody`].
pub(crate) const MODEL: &[Field] = &[
    Field::text("model").required().about("A name, an `hf:` reference, or a path on the node's machine"),
    Field::object("options").about("`context`, `sequences`, `replicas`, `int8`, `draft` and `boundary`, all optional"),
    Field::bool("temporary").about("Unload the model when it is no longer in use"),
];
/// Fields of [`InviteBody`].
pub(crate) const INVITE: &[Field] = &[
    Field::long("ttl_s").required().about("Seconds until the ticket expires, 1 to 2,592,000"),
    Field::count("uses").required().about("Members that it admits, 1 to 1000"),
];
/// Fields of [`PeerBody`].
pub(crate) const PEER: &[Field] =
    &[Field::text("peer").required().about("A peer id, or a part of it; to ban also a name")];
/// Fields of [`DrainBody`].
pub(crate) const DRAIN: &[Field] = &[Field::bool("on").required().about("Whether the node drains")];
/// The field of [`GenerateBody`] that others do not have.
pub(crate) const RAW: &[Field] = &[Field::bool("raw").about("Use the prompt without the chat template")];

#[derive(Deserialize)]
struct ModelBody {
    model: String,
    #[serde(default)]
    options: ModelOptions,
    /// For `deploy`: unload the model when it is no longer in use.
    #[serde(default)]
    temporary: bool,
}

pub(crate) async fn plan<E: Engine>(
    State(app): State<App<E>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let requested: ModelBody = body(request, MODEL).await?;
    // Otherwise another user of this machine could probe which files the node's user has.
    if requested.model.contains('/') && !requested.model.starts_with("hf:") && !caller.has_key {
        return Err(ApiError::unauthorised(format!(
            "`{}` is a path, and planning a file requires the node's key: send the key, or use a model's name",
            requested.model
        )));
    }
    Ok(Json(app.engine.plan(ModelRef(requested.model), requested.options).await?).into_response())
}

pub(crate) async fn deploy<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Response, ApiError> {
    let requested: ModelBody = body(request, MODEL).await?;
    let model = ModelRef(requested.model);
    if requested.temporary {
        let served = app.engine.deploy_temporarily(model, requested.options).await?;
        return Ok(Json(json!({"model": served.name, "context": served.context})).into_response());
    }
    let served = app.engine.deploy(model, requested.options).await?;
    let others = app.engine.also_served_by(&served.name).await;
    Ok(Json(json!({"model": served.name, "context": served.context, "also_served_by": others})).into_response())
}

pub(crate) async fn undeploy<E: Engine>(
    State(app): State<App<E>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let not_loaded = || app.engine.not_loaded().into_iter().find(|model| model.name == name).map(|model| model.name);
    let model = find(&app, Some(&name))
        .map(|model| model.name)
        .or_else(|_| not_loaded().ok_or_else(|| nothing_to_stop(&app, &name)))?;
    app.engine.undeploy(&model).await?;
    Ok(Json(json!({"model": model, "served": false})))
}

fn nothing_to_stop<E: Engine>(app: &App<E>, name: &str) -> ApiError {
    let models = app.engine.models();
    let names: Vec<&str> = models.iter().map(|m| m.name.as_str()).collect();
    let served = if names.is_empty() { "no model".to_owned() } else { names.join(", ") };
    ApiError::no_model(format!("nothing to stop: `{name}` is not served by this node, which serves {served}"))
}

#[derive(Deserialize)]
struct InviteBody {
    ttl_s: u64,
    uses: u32,
}

pub(crate) async fn invite<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Json<Value>, ApiError> {
    let requested: InviteBody = body(request, INVITE).await?;
    let ttl = Duration::from_secs(requested.ttl_s);
    if ttl.is_zero() || ttl > INVITE_TTL_MAX {
        let days = INVITE_TTL_MAX.as_secs() / 86_400;
        return Err(ApiError::invalid("ttl_s", format!("`ttl_s` must be from 1 second to {days} days, in seconds")));
    }
    if !(1..=INVITE_USES_MAX).contains(&requested.uses) {
        return Err(ApiError::invalid("uses", format!("`uses` must be from 1 to {INVITE_USES_MAX}")));
    }
    let ticket = app.engine.invite(ttl, requested.uses).await?;
    Ok(Json(json!({"ticket": ticket, "ttl_s": requested.ttl_s, "uses": requested.uses})))
}

#[derive(Deserialize)]
struct PeerBody {
    peer: String,
}

pub(crate) async fn ban<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Json<Value>, ApiError> {
    let requested: PeerBody = body(request, PEER).await?;
    Ok(Json(json!(app.engine.ban(requested.peer).await?)))
}

pub(crate) async fn approve<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Json<Value>, ApiError> {
    let requested: PeerBody = body(request, PEER).await?;
    app.engine.approve(requested.peer.clone()).await?;
    Ok(Json(json!({"approved": requested.peer})))
}

#[derive(Deserialize)]
struct DrainBody {
    on: bool,
}

pub(crate) async fn drain<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Json<Value>, ApiError> {
    let requested: DrainBody = body(request, DRAIN).await?;
    app.engine.drain(requested.on);
    Ok(Json(json!({"draining": requested.on})))
}

pub(crate) async fn leave<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Json<Value>, ApiError> {
    let _: Value = body(request, &[]).await?; // require JSON here too: an HTML form cannot send it
    app.engine.leave().await;
    Ok(Json(json!({"left": true, "process": crate::process::own()})))
}

/// `messages`, or `prompt` (text or token ids). Unless `raw`, a prompt becomes one user message if the model has a chat
/// template.
#[derive(Deserialize)]
struct GenerateBody {
    model: String,
    messages: Option<Vec<MessageBody>>,
    prompt: Option<Prompt>,
    #[serde(default)]
    raw: bool,
    #[serde(flatten)]
    settings: Settings,
}

/// Answers in JSON lines: one for the start, one per token, one for the end or the error.
pub(crate) async fn generate<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Response, ApiError> {
    let requested: GenerateBody = body(request, &[request::BODY, RAW].concat()).await?;
    let model = find_or_serve(&app, Some(&requested.model), false).await?;
    let for_order = model.clone();
    let (order, templated): (Order, bool) = off_thread(move || {
        let templated = !requested.raw && for_order.text.chats();
        let prompt = match (requested.messages, requested.prompt) {
            (Some(messages), None) => chat(messages, &Form::default(), &for_order)?.prompt,
            (None, Some(Prompt::Text(text))) if templated => {
                chat(vec![MessageBody::user(text)], &Form::default(), &for_order)?.prompt
            }
            (None, Some(prompt)) => prompt.tokens(&for_order)?,
            (Some(_), Some(_)) | (None, None) => {
                return Err(ApiError::invalid("prompt", "expected exactly one of `prompt` and `messages`"));
            }
        };
        Ok((requested.settings.order(prompt, None, &for_order)?, templated))
    })
    .await?;
    let begin = json!({
        "model": model.name, "templated": templated, "prompt_token_ids": order.prompt, "max_tokens": order.max_tokens,
        "seed": order.sampling.seed,
    });
    let key = Key::random()?.request_key("");
    let generation = Generation::start(&app.engine, model, order, key, &app.metrics).await?;
    let lines = stream::unfold((Some(begin), Some(generation)), |(begin, generation)| async move {
        let mut generation = generation?;
        let (line, left) = match begin {
            Some(begin) => (begin, Some(generation)),
            None => match generation.next().await {
                Step::Token { position, token, text, .. } => {
                    (json!({"position": position, "token": token, "text": text}), Some(generation))
                }
                Step::End { text, finish } => (end_line(&text, finish.word(), generation.figures()), None),
                Step::Failed(error) => (error.body(), None),
            },
        };
        Some((Ok::<_, Infallible>(format!("{line}\n")), (None, left)))
    });
    Ok(([(header::CONTENT_TYPE, "application/jsonl")], Body::from_stream(lines)).into_response())
}

fn end_line(text: &str, finish: &str, figures: &Figures) -> Value {
    json!({
        "done": finish, "text": text, "prompt_tokens": figures.prompt_tokens,
        "cached_tokens": figures.cached_tokens, "tokens": figures.tokens,
        "first_token_ms": figures.first_token().map(|t| t.as_secs_f64() * 1e3),
        "tokens_per_s": figures.tokens_per_second(),
    })
}
