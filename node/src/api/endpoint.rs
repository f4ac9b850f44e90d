//! The endpoints that generate text, in the form of several APIs: from the body of a request to its answer, streaming or not.
use super::answer::{Answer, Dialect};
use super::anthropic::{self, MessagesBody};
use super::app::App;
use super::body::{body_bytes, off_thread};
use super::choices::{Pending, Running};
use super::engine::{Engine, Served};
use super::error::ApiError;
use super::events::Head;
use super::fields;
use super::generation::Order;
use super::guard;
use super::idempotency::{self, Begun, Fingerprint, Key, last_event};
use super::models::find_or_serve;
use super::output::Reading;
use super::request::{self, Body};
use super::responses::{self, ResponsesBody};
use axum::Json;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) async fn chat<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Response, ApiError> {
    generate(app, request, Endpoint::Chat).await
}

pub(crate) async fn completion<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Response, ApiError> {
    generate(app, request, Endpoint::Completion).await
}

pub(crate) async fn messages<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Response, ApiError> {
    generate(app, request, Endpoint::Messages).await
}

pub(crate) async fn responses<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Response, ApiError> {
    generate(app, request, Endpoint::Responses).await
}

/// The number of tokens of a request to `/v1/messages`.
pub(crate) async fn count_tokens<E: Engine>(
    State(app): State<App<E>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let asked: MessagesBody = fields::read(&body_bytes(request).await?, anthropic::COUNT_TOKENS)?;
    let body = asked.chat_body()?;
    let model = find_or_serve(&app, body.model.as_deref(), false).await?;
    let tokens = off_thread(move || body.prompt(&model).map_err(anthropic::in_its_words)).await?.len();
    Ok(Json(json!({"input_tokens": tokens})))
}

/// An endpoint that generates text.
#[derive(Clone, Copy)]
enum Endpoint {
    Chat,
    Completion,
    Messages,
    Responses,
}

impl Endpoint {
    fn path(self) -> &'static str {
        match self {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completion => "/v1/completions",
            Endpoint::Messages => "/v1/messages",
            Endpoint::Responses => "/v1/responses",
        }
    }

    /// Reads the body of a request. All APIs become a request of OpenAI's chat or completions.
    fn read(self, bytes: &[u8]) -> Result<(Body, Dialect), ApiError> {
        match self {
            Endpoint::Chat | Endpoint::Completion => {
                let body: Body = fields::read(bytes, request::BODY)?;
                let include_usage = body.include_usage();
                let chats = matches!(self, Endpoint::Chat);
                let dialect =
                    if chats { Dialect::Chat { include_usage } } else { Dialect::Completion { include_usage } };
                Ok((body, dialect))
            }
            Endpoint::Messages => {
                let asked: MessagesBody = fields::read(bytes, anthropic::MESSAGES)?;
                Ok((asked.chat_body()?, Dialect::Messages))
            }
            Endpoint::Responses => {
                let asked: ResponsesBody = fields::read(bytes, responses::RESPONSES)?;
                let repeated = Arc::new(asked.repeated());
                Ok((asked.chat_body()?, Dialect::Responses(repeated)))
            }
        }
    }

    /// What is to be generated for a request, and how to read it.
    fn order(self, body: Body, model: &Served) -> Result<(Order, Reading), ApiError> {
        match self {
            Endpoint::Chat => body.chat(model),
            Endpoint::Completion => body.completion(model),
            Endpoint::Messages => body.chat(model).map_err(anthropic::in_its_words),
            Endpoint::Responses => body.chat(model).map_err(responses::in_its_words),
        }
    }
}

async fn generate<E: Engine>(app: App<E>, request: Request, endpoint: Endpoint) -> Result<Response, ApiError> {
    let (key, after) = (Key::of(request.headers())?, last_event(request.headers())?);
    let secret = guard::keys(request.headers()).next().unwrap_or_default().to_owned();
    let bytes = body_bytes(request).await?;
    let (mut body, dialect) = endpoint.read(&bytes)?;
    let streaming = body.stream.unwrap_or(false);
    let choices = body.choices()?;
    let mut turn = None;
    let id = key.clone().map_or_else(Key::random, Ok)?;
    let name = id.request_key(&secret);
    if key.is_some() {
        match app.answers.begin(name, Fingerprint::of(endpoint.path(), &bytes), after.is_some())? {
            Begun::Again(finished) => {
                let mut response = finished.replay(&dialect, streaming, after);
                response.headers_mut().insert(idempotency::REPLAYED, HeaderValue::from_static("true"));
                return Ok(response);
            }
            Begun::New(new) => turn = Some(new),
        }
    }
    body.seed_or(id.seed());
    let model = find_or_serve(&app, body.model.as_deref(), after.is_some()).await?;
    let for_order = model.clone();
    let (order, reading) = off_thread(move || endpoint.order(body, &for_order)).await?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let head =
        Head { seed: id.seed(), choice: 0, created, model: model.name.clone(), prompt_tokens: order.prompt.len() };
    let write = |choice| Answer::new(&dialect, Head { choice, ..head.clone() }, reading);
    let pending = Pending::start(&app, &model, &order, name, (0..choices).map(write)).await?;
    let running = Running { choices: pending, turn, after };
    let mut response = if streaming { running.stream(&dialect) } else { running.whole().await? };
    if let Ok(id) = HeaderValue::from_str(id.as_str()) {
        if matches!(endpoint, Endpoint::Messages) {
            response.headers_mut().insert(idempotency::REQUEST_ID_OF_ANTHROPIC, id.clone());
        }
        response.headers_mut().insert(idempotency::REQUEST_ID, id);
    }
    Ok(response)
}
