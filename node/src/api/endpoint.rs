//! The endpoints that generate text, in the form of several APIs: from the body of a request to its answer, streaming or not.
use super::answer::{Answer, Dialect};
use super::anthropic::{self, MessagesBody};
use super::app::App;
use super::body::{body_bytes, off_thread};
use super::engine::{Engine, Served, Tokens};
use super::error::ApiError;
use super::events::{Ending, Head, SentEvent};
use super::fields;
use super::generation::{Generation, Order, SpelledLogprobs, Step};
use super::guard;
use super::idempotency::{self, Begun, Fingerprint, Key, Turn, last_event};
use super::models::find_or_serve;
use super::output::Reading;
use super::request::{self, Body};
use super::responses::{self, ResponsesBody};
use axum::Json;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::response::sse::Sse;
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
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
    let mut record = Record::default();
    let id = key.clone().map_or_else(Key::random, Ok)?;
    let name = id.request_key(&secret);
    if key.is_some() {
        match app.answers.begin(name, Fingerprint::of(endpoint.path(), &bytes), after.is_some())? {
            Begun::Again(finished) => {
                let mut response = finished.replay(&dialect, streaming, after);
                response.headers_mut().insert(idempotency::REPLAYED, HeaderValue::from_static("true"));
                return Ok(response);
            }
            Begun::New(turn) => record.turn = Some(turn),
        }
    }
    body.seed_or(id.seed());
    let model = find_or_serve(&app, body.model.as_deref(), after.is_some()).await?;
    let for_order = model.clone();
    let (order, reading) = off_thread(move || endpoint.order(body, &for_order)).await?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let head = Head { seed: id.seed(), created, model: model.name.clone(), prompt_tokens: order.prompt.len() };
    record.asks_logprobs = order.sampling.logprobs.is_some();
    let generation = Generation::start(&app.engine, model, order, name, &app.metrics).await?;
    let answer = Answer::new(&dialect, head, reading);
    let running = Running { generation, answer, record, after };
    let mut response = if streaming { stream_answer(running, &dialect) } else { whole_answer(running).await? };
    if let Ok(id) = HeaderValue::from_str(id.as_str()) {
        if matches!(endpoint, Endpoint::Messages) {
            response.headers_mut().insert(idempotency::REQUEST_ID_OF_ANTHROPIC, id.clone());
        }
        response.headers_mut().insert(idempotency::REQUEST_ID, id);
    }
    Ok(response)
}

/// An answer being generated.
struct Running<T> {
    generation: Generation<T>,
    answer: Answer,
    record: Record,
    /// The last event that the client has received.
    after: Option<u64>,
}

/// The text so far of an answer with an idempotency key; empty without a key.
#[derive(Default)]
struct Record {
    turn: Option<Turn>,
    text: String,
    /// The length of the text (bytes) after each token.
    ends: Vec<usize>,
    /// The log-probabilities of each token, if the request asks for them.
    logprobs: Vec<Option<SpelledLogprobs>>,
    asks_logprobs: bool,
}

impl Record {
    /// The text of a token.
    fn push(&mut self, text: &str, logprobs: Option<SpelledLogprobs>) {
        if self.turn.is_some() {
            self.text.push_str(text);
            self.ends.push(self.text.len());
            if self.asks_logprobs {
                self.logprobs.push(logprobs);
            }
        }
    }

    /// The end, with the text that was held back.
    fn finish(mut self, answer: Answer, rest: &str, ending: Ending) {
        if let Some(turn) = self.turn {
            self.text.push_str(rest);
            turn.finish(answer.finished(self.text, self.ends, self.logprobs, ending));
        }
    }
}

async fn whole_answer<T: Tokens>(running: Running<T>) -> Result<Response, ApiError> {
    let Running { mut generation, mut answer, mut record, .. } = running;
    loop {
        match generation.next().await {
            Step::Token { text, logprobs, .. } => {
                answer.logprobs(logprobs.as_ref());
                record.push(&text, logprobs);
                answer.read(&text);
            }
            Step::End { text, finish } => {
                let ending = answer.ending(finish, generation.figures().cached_tokens);
                let response = Json(answer.whole(&text, &ending)).into_response();
                record.finish(answer, &text, ending);
                return Ok(response);
            }
            Step::Failed(error) => return Err(error),
        }
    }
}

/// The state of a stream: the events to send, and what generates more of them.
struct Streaming<T> {
    ready: std::vec::IntoIter<SentEvent>,
    running: Option<Box<Running<T>>>,
}

fn stream_answer<T: Tokens>(mut running: Running<T>, dialect: &Dialect) -> Response {
    let after = running.after;
    let ready = running.answer.begin().into_iter();
    let state = Streaming { ready, running: Some(Box::new(running)) };
    let events = stream::unfold(state, |mut state| async move {
        loop {
            if let Some(event) = state.ready.next() {
                return Some((event, state));
            }
            let (events, running) = advance(state.running?).await;
            state = Streaming { ready: events.into_iter(), running };
        }
    });
    let new = events.filter(move |event| std::future::ready(event.is_new(after)));
    Sse::new(new.map(SentEvent::sse)).keep_alive(dialect.keep_alive()).into_response()
}

/// The events of the next token, of the end, or of the failure.
async fn advance<T: Tokens>(mut running: Box<Running<T>>) -> (Vec<SentEvent>, Option<Box<Running<T>>>) {
    match running.generation.next().await {
        Step::Token { text, logprobs, .. } => {
            running.answer.logprobs(logprobs.as_ref());
            running.record.push(&text, logprobs);
            (running.answer.step(&text), Some(running))
        }
        Step::End { text, finish } => {
            let Running { generation, mut answer, record, .. } = *running;
            let ending = answer.ending(finish, generation.figures().cached_tokens);
            let events = answer.end(&text, &ending);
            record.finish(answer, &text, ending);
            (events, None)
        }
        Step::Failed(error) => (running.answer.failed(&error), None),
    }
}
