//! Simulation endpoints: submit, plan, observe and cancel.
use super::app::App;
use super::body::{self, off_thread};
use super::engine::Engine;
use super::error::ApiError;
use super::fields::{self, Field};
use super::guard::Caller;
use crate::report::{Cancelled, SimulationPlan, SimulationReport, Submitted};
use crate::submissions::answers::Answerer;
use crate::submissions::look::{QueryKind, SimulationQuery, with_step};
use crate::submissions::report::ReportContext;
use crate::submissions::run_folder::Existing;
use crate::submissions::{Submissions, Submit};
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use data_encoding::BASE64;
use futures::stream;
use kernels_simulations::{SIMULATION_MAX, Simulation};
use serde::Deserialize;
use std::borrow::Cow;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Minimum interval between reports of an event stream.
const EVENTS_EVERY: Duration = Duration::from_millis(100);
/// Interval for polling the coordinator of a simulation on another member.
const FOLLOWED_EVERY: Duration = Duration::from_millis(500);

/// Fields of [`SubmitBody`].
pub(crate) const SUBMIT: &[Field] = &[
    Field::text("simulation").required().about("The packed job in base64"),
    Field::text("out").about("A folder on the node's machine for the outputs"),
    Field::text("claim").about("Name of a file in `out` that proves that the caller may write there"),
    Field::bool("resume").about("Continue a run in `out`"),
    Field::bool("overwrite").about("Replace a run in `out`"),
];

#[derive(Deserialize)]
struct SubmitBody<'a> {
    /// A packed simulation in base64. Borrowed, because it may have 86 MiB.
    #[serde(borrow)]
    simulation: Cow<'a, str>,
    #[serde(default)]
    out: Option<PathBuf>,
    /// Name of a file in `out` that proves that the caller may write there, see [`crate::folders`].
    #[serde(default)]
    claim: Option<String>,
    #[serde(default)]
    resume: bool,
    #[serde(default)]
    overwrite: bool,
}

impl SubmitBody<'_> {
    fn existing(&self) -> Result<Existing, ApiError> {
        match (self.resume, self.overwrite) {
            (true, true) => Err(ApiError::invalid("overwrite", "expected `resume` or `overwrite`, found both")),
            (true, false) => Ok(Existing::Resume),
            (false, true) => Ok(Existing::Overwrite),
            (false, false) => Ok(Existing::Refuse),
        }
    }
}

/// Largest body: the largest simulation in base64, plus the other fields.
const BODY_BYTES_MAX: usize = SIMULATION_MAX.div_ceil(3) * 4 + (64 << 10);

/// Allow one body at a time above [`body::BODY_BYTES_MAX`], separately for callers without (0) and with (1) the key,
/// so that a slow upload without the key cannot block one with it.
static LARGE: [Semaphore; 2] = [Semaphore::const_new(1), Semaphore::const_new(1)];

/// A parsed submission.
struct Unpacked {
    simulation: Simulation,
    out: Option<PathBuf>,
    claim: Option<String>,
    existing: Existing,
}

async fn unpack(request: Request) -> Result<Unpacked, ApiError> {
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|text| text.to_str().ok()?.parse().ok());
    let large = length.is_none_or(|bytes: usize| bytes > body::BODY_BYTES_MAX);
    let has_key = request.extensions().get::<Caller>().is_some_and(|caller| caller.has_key);
    let _turn = if large { LARGE[usize::from(has_key)].acquire().await.ok() } else { None };
    let bytes = body::body_bytes_up_to(request, if large { BODY_BYTES_MAX } else { body::BODY_BYTES_MAX }).await?;
    off_thread(move || {
        // The check improves error messages, but doubles the memory, so it is skipped for a large body.
        if !large {
            fields::checked(&bytes, SUBMIT)?;
        }
        let requested: SubmitBody<'_> = body::parse(&bytes)?;
        let existing = requested.existing()?;
        let packed = BASE64
            .decode(requested.simulation.as_bytes())
            .map_err(|e| ApiError::invalid("simulation", format!("expected base64 of a packed simulation: {e}")))?;
        let (out, claim) = (requested.out, requested.claim);
        drop(requested.simulation);
        drop(bytes);
        let simulation = Simulation::from_bytes(&packed).map_err(|e| ApiError::invalid("simulation", e.to_string()))?;
        Ok(Unpacked { simulation, out, claim, existing })
    })
    .await
}

fn here<E: Engine>(app: &App<E>) -> Result<Arc<Submissions>, ApiError> {
    app.engine.submissions().ok_or_else(|| ApiError::not_found("no_simulations", "this node runs no simulations"))
}

/// Finds a simulation by job id, whichever member coordinates it.
async fn find<E: Engine>(
    app: &App<E>,
    job: &str,
    sight: QueryKind,
) -> Result<(Arc<Submissions>, ReportContext, Answerer), ApiError> {
    let all = here(app)?;
    let around = all.around().await;
    let found = match SimulationQuery::new(job, sight) {
        Some(look) => all.look(&look, &around).await,
        None => None,
    };
    match found {
        Some(found) => Ok((all, around, found)),
        None => Err(ApiError::not_found(
            "unknown_job",
            format!("no simulation `{job}` on this node or on any member it can reach: list them with `meshnode jobs`"),
        )),
    }
}

/// Another member's report.
fn parsed(answer: &Bytes) -> Result<SimulationReport, ApiError> {
    serde_json::from_slice(answer)
        .map_err(|e| ApiError::failed(format!("the coordinator's report cannot be read: {e}")))
}

pub(crate) async fn submit<E: Engine>(
    State(app): State<App<E>>,
    request: Request,
) -> Result<Json<Submitted>, ApiError> {
    let all = here(&app)?;
    let Unpacked { simulation, out, claim, existing } = unpack(request).await?;
    let folders = app.folders.clone();
    let submission = off_thread(move || {
        let out = out.map(|out| folders.admit(&out, claim.as_deref())).transpose();
        let out = out.map_err(|refused| ApiError::invalid("out", refused.to_string()))?;
        all.submit(Submit { simulation, out, existing }).map_err(|what| ApiError::invalid("out", what))
    })
    .await?;
    Ok(Json(Submitted { job: format!("{:016x}", submission.job.0), from_step: submission.told().begun_at }))
}

pub(crate) async fn plan<E: Engine>(
    State(app): State<App<E>>,
    request: Request,
) -> Result<Json<SimulationPlan>, ApiError> {
    Ok(Json(app.engine.plan_grid(unpack(request).await?.simulation).await?))
}

pub(crate) async fn list<E: Engine>(State(app): State<App<E>>) -> Result<Json<Vec<SimulationReport>>, ApiError> {
    let all = here(&app)?;
    let around = all.around().await;
    Ok(Json(all.reports(&around).await))
}

pub(crate) async fn view<E: Engine>(
    State(app): State<App<E>>,
    Path(job): Path<String>,
) -> Result<Json<SimulationReport>, ApiError> {
    match find(&app, &job, QueryKind::Report).await? {
        (all, around, Answerer::Here(submission)) => Ok(Json(all.report(&submission, &around))),
        (_, _, Answerer::There(answer)) => Ok(Json(parsed(&answer)?)),
    }
}

pub(crate) async fn cancel<E: Engine>(
    State(app): State<App<E>>,
    Path(job): Path<String>,
) -> Result<Json<Cancelled>, ApiError> {
    let (all, submission) = match find(&app, &job, QueryKind::Report).await? {
        (all, _, Answerer::Here(submission)) => (all, submission),
        (_, _, Answerer::There(answer)) => {
            let report = parsed(&answer)?;
            let who = report.coordinator().and_then(|node| node.name.as_deref()).unwrap_or("another node");
            return Err(ApiError::over(format!("{who} coordinates the simulation `{job}`: cancel it there")));
        }
    };
    let run = submission.told();
    if run.ended.is_some() {
        let how = run.error().unwrap_or("it is done");
        return Err(ApiError::over(format!("the simulation `{job}` has ended: {how}")));
    }
    all.cancel(submission.job);
    Ok(Json(Cancelled { job: format!("{:016x}", submission.job.0), cancelled: true }))
}

/// JSON lines: a report after every change, until the simulation ends.
pub(crate) async fn events<E: Engine>(
    State(app): State<App<E>>,
    Path(job): Path<String>,
) -> Result<Response, ApiError> {
    let (all, submission) = match find(&app, &job, QueryKind::Report).await? {
        (all, _, Answerer::Here(submission)) => (all, submission),
        (_, _, Answerer::There(_)) => return Ok(followed(app, job)),
    };
    let changes = submission.changes();
    let lines = stream::unfold(Some((submission, changes, true)), move |state| {
        let all = all.clone();
        async move {
            let (submission, mut changes, first) = state?;
            if !first {
                tokio::time::sleep(EVENTS_EVERY).await;
                if submission.told().ended.is_none() {
                    let _ = changes.changed().await;
                }
            }
            let _ = changes.borrow_and_update();
            let report = all.report(&submission, &all.around().await);
            // Decided by the report just sent, so that the last line contains the final state.
            let next = if report.state().is_over() { None } else { Some((submission, changes, false)) };
            Some((Ok::<_, Infallible>(report.to_json() + "\n"), next))
        }
    });
    Ok(([(header::CONTENT_TYPE, "application/jsonl")], Body::from_stream(lines)).into_response())
}

/// The events of a simulation on another member, by polling its coordinator. Ends when no member answers.
fn followed<E: Engine>(app: App<E>, job: String) -> Response {
    let lines = stream::unfold(Some((app, job, true)), move |state| async move {
        let (app, job, first) = state?;
        if !first {
            tokio::time::sleep(FOLLOWED_EVERY).await;
        }
        let report = match find(&app, &job, QueryKind::Report).await.ok()? {
            (all, around, Answerer::Here(submission)) => all.report(&submission, &around),
            (_, _, Answerer::There(answer)) => parsed(&answer).ok()?,
        };
        let next = if report.state().is_over() { None } else { Some((app, job, false)) };
        Some((Ok::<_, Infallible>(report.to_json() + "\n"), next))
    });
    ([(header::CONTENT_TYPE, "application/jsonl")], Body::from_stream(lines)).into_response()
}

/// The current picture of the simulation as PNG; a header contains its step.
pub(crate) async fn picture<E: Engine>(
    State(app): State<App<E>>,
    Path(job): Path<String>,
) -> Result<Response, ApiError> {
    let (step, png) = match find(&app, &job, QueryKind::Picture).await? {
        (_, _, Answerer::Here(submission)) => {
            let (step, png) = off_thread(move || submission.picture().ok_or_else(nothing_yet)).await?;
            (step, Bytes::from(png))
        }
        (_, _, Answerer::There(answer)) => with_step(&answer).ok_or_else(nothing_yet)?,
    };
    let headers = [
        (header::CONTENT_TYPE, "image/png".to_owned()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
        (STEP, step.to_string()),
    ];
    Ok((headers, png).into_response())
}

/// Header with the step of a picture.
const STEP: header::HeaderName = header::HeaderName::from_static("x-step");

fn nothing_yet() -> ApiError {
    ApiError::not_found("no_picture_yet", "there is no picture of this simulation yet: try again in a moment")
}

#[derive(Deserialize)]
pub(crate) struct Terminal {
    #[serde(default = "columns_default")]
    columns: usize,
    #[serde(default = "lines_default")]
    lines: usize,
}

fn columns_default() -> usize {
    80
}

fn lines_default() -> usize {
    24
}

/// The current picture as coloured half blocks for a terminal.
pub(crate) async fn text<E: Engine>(
    State(app): State<App<E>>,
    Path(job): Path<String>,
    Query(size): Query<Terminal>,
) -> Result<Response, ApiError> {
    let (columns, lines) = (size.columns.clamp(8, 1000), size.lines.clamp(4, 500));
    let (step, text) = match find(&app, &job, QueryKind::Text(columns as u16, lines as u16)).await? {
        (_, _, Answerer::Here(submission)) => {
            let (step, text) = off_thread(move || submission.text(columns, lines).ok_or_else(nothing_yet)).await?;
            (step, Bytes::from(text))
        }
        (_, _, Answerer::There(answer)) => with_step(&answer).ok_or_else(nothing_yet)?,
    };
    let headers = [(header::CONTENT_TYPE, "text/plain; charset=utf-8".to_owned()), (STEP, step.to_string())];
    Ok((headers, text).into_response())
}

/// The HTML page with the nodes, models and simulations.
pub(crate) async fn overview() -> Response {
    html(include_str!("overview.html"))
}

/// The HTML page of one simulation.
pub(crate) async fn page() -> Response {
    html(include_str!("watch.html"))
}

fn html(page: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        // The page loads nothing from other origins.
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'self'; img-src 'self' blob: data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
        ),
    ];
    (headers, page).into_response()
}
