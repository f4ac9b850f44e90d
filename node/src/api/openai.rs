//! OpenAI-compatible `/v1/…` endpoints: models, chat completions and completions, streaming or not.
use super::answer::{Answer, END_TEXT, Finished, SentEvent, Shape, event, is_new};
use super::app::App;
use super::body::{body_bytes, off_thread};
use super::engine::{Engine, Served, Tokens};
use super::error::ApiError;
use super::fields;
use super::generation::{Figures, Generation, Order, Step};
use super::guard;
use super::idempotency::{self, Begun, Fingerprint, Key, Turn, last_event};
use super::output::{OutputReader, Reading};
use super::request::{self, Body};
use crate::handle::HELD_MAX;
use crate::pull::name_in_request;
use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::HeaderValue;
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Interval of SSE comments while no token arrives (a long prefill, a stage being replaced), so that clients and
/// proxies do not time out.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How long a client that resumes a stream waits for a successor of its entry node: the first successor takes over
/// after two to eight seconds, each further one a second later.
const SUCCESSOR_MAX: Duration = Duration::from_secs(10);
/// Interval between attempts to find the successor.
const LOOK: Duration = Duration::from_millis(250);

pub(crate) async fn models<E: Engine>(State(app): State<App<E>>) -> Json<Value> {
    Json(json!({"object": "list", "data": listed(&app).await}))
}

pub(crate) async fn model<E: Engine>(
    State(app): State<App<E>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    // A served model may be named by the path of its file.
    let name = find(&app, Some(&name)).map(|model| model.name).or_else(|error| {
        let starting = app.engine.starting().into_iter().any(|model| model.name == name);
        if starting { Ok(name) } else { Err(error) }
    })?;
    let view = listed(&app).await.into_iter().find(|view| view["id"] == name.as_str());
    view.map(Json).ok_or_else(|| ApiError::not_found("model_not_found", format!("`{name}` has just been stopped")))
}

/// Models that a request can name: those served, and after a restart those still to be placed (a request for one
/// waits).
async fn listed<E: Engine>(app: &App<E>) -> Vec<Value> {
    let jobs = app.engine.state().await.jobs;
    let state = |name: &str| jobs.iter().find(|job| job.head && job.model == name).map(|job| job.state.clone());
    // A job lists only the first name of its model; other names of the same model count as ready.
    let served = app.engine.models().into_iter().map(|model| {
        model_view(&model.name, model.context, model.created, &state(&model.name).unwrap_or_else(|| "ready".into()))
    });
    let starting = app.engine.starting().into_iter().map(|model| {
        model_view(&model.name, model.context, 0, &state(&model.name).unwrap_or_else(|| "starting".into()))
    });
    served.chain(starting).collect()
}

pub(crate) async fn chat<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Response, ApiError> {
    generate(app, request, Shape::Chat).await
}

pub(crate) async fn completion<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Response, ApiError> {
    generate(app, request, Shape::Completion).await
}

/// The served model of that name, or of that path or hub reference of its file.
pub(crate) fn find<E: Engine>(app: &App<E>, name: Option<&str>) -> Result<Served, ApiError> {
    let name = name.filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ApiError::invalid("model", "`model` is missing or empty: name a model"))?;
    let models = app.engine.models();
    if let Some(model) = models.iter().find(|m| m.name == name || m.name == name_in_request(name)) {
        return Ok(model.clone());
    }
    let names: Vec<&str> = models.iter().map(|m| m.name.as_str()).collect();
    let served = match names.as_slice() {
        [] => "it serves none; add one with `meshnode serve MODEL`".into(),
        names => format!("it serves {}; add another with `meshnode serve MODEL`", names.join(", ")),
    };
    Err(ApiError::no_model(format!("the model `{name}` is not served by this node: {served}")))
}

/// As [`find`], but also uses a model that another member serves, or starts serving it here if this node has its file.
/// So any member can take over the requests of a lost node. While a successor of the model's coordinator may come, the
/// request waits for it: a second job would compete with the first for memory. A client that `resumes` waits for a
/// successor of its entry node even if no member has a part of the job.
pub(crate) async fn find_or_serve<E: Engine>(
    app: &App<E>,
    name: Option<&str>,
    resumes: bool,
) -> Result<Served, ApiError> {
    let start = Instant::now();
    loop {
        let (error, name) = match (find(app, name), name) {
            (Err(error), Some(name)) => (error, name),
            (found, _) => return found,
        };
        if let Some(found) = app.engine.attach(name).await? {
            return Ok(found);
        }
        let wait_max = if app.engine.is_held(name).await {
            HELD_MAX
        } else if resumes {
            SUCCESSOR_MAX
        } else {
            Duration::ZERO
        };
        if start.elapsed() < wait_max {
            tokio::time::sleep(LOOK).await;
        } else if app.engine.has(name) {
            return Ok(app.engine.serve_on_demand(name).await?);
        } else {
            return Err(error);
        }
    }
}

async fn generate<E: Engine>(app: App<E>, request: Request, shape: Shape) -> Result<Response, ApiError> {
    let (key, after) = (Key::of(request.headers())?, last_event(request.headers())?);
    let secret = guard::bearer(request.headers()).unwrap_or_default().to_owned();
    let bytes = body_bytes(request).await?;
    let mut body: Body = fields::read(&bytes, request::BODY)?;
    let (streaming, include_usage) = (body.stream.unwrap_or(false), body.include_usage());
    let mut record = Record::default();
    let id = key.clone().map_or_else(Key::random, Ok)?;
    let name = id.request_key(&secret);
    if key.is_some() {
        match app.answers.begin(name, Fingerprint::of(shape.path(), &bytes), after.is_some())? {
            Begun::Again(finished) => {
                let mut response = finished.replay(streaming.then_some(include_usage), after);
                response.headers_mut().insert(idempotency::REPLAYED, HeaderValue::from_static("true"));
                return Ok(response);
            }
            Begun::New(turn) => record.turn = Some(turn),
        }
    }
    body.seed_or(id.seed());
    let model = find_or_serve(&app, body.model.as_deref(), after.is_some()).await?;
    let for_order = model.clone();
    let (order, reading): (Order, Reading) = off_thread(move || match shape {
        Shape::Chat => body.chat(&for_order),
        Shape::Completion => body.completion(&for_order),
    })
    .await?;
    let answer = Answer::new(shape, id.seed(), &model.name, reading);
    let generation = Generation::start(&app.engine, model, order, name, &app.metrics).await?;
    let reader = OutputReader::new(reading);
    let running = Running { generation, answer, reader, record, after };
    let mut response = if streaming { stream_answer(running, include_usage) } else { whole_answer(running).await? };
    if let Ok(id) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert(idempotency::REQUEST_ID, id);
    }
    Ok(response)
}

/// An answer being generated.
struct Running<T> {
    generation: Generation<T>,
    answer: Answer,
    reader: OutputReader,
    record: Record,
    /// The last event that the client has received.
    after: Option<u64>,
}

/// The text so far of an answer with an idempotency key; empty without a key.
#[derive(Default)]
struct Record {
    turn: Option<Turn>,
    text: String,
    /// Event ids, and the length of the text (bytes) after each.
    marks: Vec<(u64, usize)>,
}

impl Record {
    fn push(&mut self, event: u64, text: &str) {
        if self.turn.is_some() {
            self.text.push_str(text);
            self.marks.push((event, self.text.len()));
        }
    }

    fn finish(self, answer: Answer, finish: &'static str, figures: &Figures) {
        if let Some(turn) = self.turn {
            let (text, marks) = (self.text, self.marks);
            turn.finish(Finished { answer, text, marks, finish, figures: figures.clone() });
        }
    }
}

async fn whole_answer<T: Tokens>(running: Running<T>) -> Result<Response, ApiError> {
    let Running { mut generation, answer, mut record, .. } = running;
    let mut whole = String::new();
    loop {
        match generation.next().await {
            Step::Token { text, .. } => whole.push_str(&text),
            Step::End { text, finish } => {
                whole.push_str(&text);
                let response = Json(answer.whole(&whole, finish, generation.figures())).into_response();
                record.push(u64::from(generation.figures().tokens), &whole);
                record.finish(answer, finish, generation.figures());
                return Ok(response);
            }
            Step::Failed(error) => return Err(error),
        }
    }
}

/// The state of a stream.
enum Phase<T> {
    Running(Box<Running<T>>),
    /// The events left to send.
    Ending(std::vec::IntoIter<SentEvent>),
}

fn stream_answer<T: Tokens>(running: Running<T>, include_usage: bool) -> Response {
    let after = running.after;
    let begin = stream::iter(running.answer.begin(include_usage));
    let rest = stream::unfold(Phase::Running(Box::new(running)), move |phase| async move {
        match phase {
            Phase::Running(running) => Some(advance(running, include_usage).await),
            Phase::Ending(mut rest) => Some((rest.next()?, Phase::Ending(rest))),
        }
    });
    let new = begin.chain(rest).filter(move |sent| std::future::ready(is_new(sent, after)));
    Sse::new(new.map(event)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE).text("waiting")).into_response()
}

/// The next event with news, the end, or the error.
async fn advance<T: Tokens>(mut running: Box<Running<T>>, include_usage: bool) -> (SentEvent, Phase<T>) {
    loop {
        match running.generation.next().await {
            Step::Token { text, .. } => {
                let id = u64::from(running.generation.figures().tokens);
                running.record.push(id, &text);
                let delta = running.reader.push(&text);
                if !delta.is_empty() {
                    let data = running.answer.chunk(&delta, None, include_usage);
                    return ((id, data), Phase::Running(running));
                }
            }
            Step::End { text, finish } => {
                let Running { generation, answer, mut reader, mut record, .. } = *running;
                let figures = generation.figures();
                let mut rest = answer.end(&mut reader, &text, finish, figures, include_usage).into_iter();
                record.push(u64::from(figures.tokens) + END_TEXT, &text);
                record.finish(answer, finish, figures);
                return (rest.next().unwrap_or_default(), Phase::Ending(rest));
            }
            Step::Failed(error) => {
                let id = u64::from(running.generation.figures().tokens);
                return ((id, error.body().to_string()), Phase::Ending(Vec::new().into_iter()));
            }
        }
    }
}

fn model_view(name: &str, context: u32, created: u64, state: &str) -> Value {
    json!({
        "id": name, "object": "model", "created": created, "owned_by": "meshnode", "context_length": context,
        "state": state,
    })
}
