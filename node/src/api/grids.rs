//! Simulations: submit, look, end.
use super::engine::Engine;
use super::error::ApiError;
use super::{App, body, off_thread};
use crate::handle::{StateView, hex};
use crate::submissions::{Submission, Submissions, Submit, Watched};
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use data_encoding::BASE64;
use futures::stream;
use kernels::grid::Region;
use kernels::grid::simulation::Simulation;
use kernels::grid::tile::Tile;
use node_core::id::{JobId, NodeId};
use node_core::tiles::{CANCELLED, GridJobView};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How often a stream of events says something new, at most.
const EVENTS_EVERY: Duration = Duration::from_millis(100);

#[derive(Deserialize)]
struct SubmitBody {
    /// A packed simulation, in base64.
    simulation: String,
    #[serde(default)]
    out: Option<PathBuf>,
    #[serde(default)]
    resume: bool,
}

async fn unpack(text: String) -> Result<Simulation, ApiError> {
    off_thread(move || {
        let bytes = BASE64
            .decode(text.as_bytes())
            .map_err(|e| ApiError::invalid("simulation", format!("expected base64 of a packed simulation: {e}")))?;
        Simulation::from_bytes(&bytes).map_err(|e| ApiError::invalid("simulation", e.to_string()))
    })
    .await
}

fn here<E: Engine>(app: &App<E>) -> Result<Arc<Submissions>, ApiError> {
    app.engine.submissions().ok_or_else(|| ApiError::not_found("no_simulations", "no simulations are run here"))
}

fn find<E: Engine>(app: &App<E>, job: &str) -> Result<(Arc<Submissions>, Arc<Submission>), ApiError> {
    let all = here(app)?;
    let known = u64::from_str_radix(job, 16).ok().and_then(|job| all.find(JobId(job)));
    let found = known.or_else(|| {
        let begins = |known: &Arc<Submission>| !job.is_empty() && format!("{:016x}", known.job.0).starts_with(job);
        let mut found: Vec<_> = all.all().into_iter().filter(begins).collect();
        if found.len() == 1 { found.pop() } else { None }
    });
    let found = found.ok_or_else(|| {
        ApiError::not_found(
            "unknown_job",
            format!("no simulation `{job}` was submitted to this node: see `meshnode jobs`"),
        )
    })?;
    Ok((all, found))
}

pub(crate) async fn submit<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Json<Value>, ApiError> {
    let wanted: SubmitBody = body(request).await?;
    let all = here(&app)?;
    let simulation = unpack(wanted.simulation).await?;
    let submission = off_thread(move || {
        all.submit(Submit { simulation, out: wanted.out, resume: wanted.resume })
            .map_err(|what| ApiError::invalid(None, what))
    })
    .await?;
    Ok(Json(json!({"job": format!("{:016x}", submission.job.0), "from_step": submission.told().begun_at})))
}

pub(crate) async fn plan<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Json<Value>, ApiError> {
    let wanted: SubmitBody = body(request).await?;
    Ok(Json(app.engine.plan_grid(unpack(wanted.simulation).await?).await?))
}

pub(crate) async fn list<E: Engine>(State(app): State<App<E>>) -> Result<Json<Value>, ApiError> {
    let around = Around::of(&app).await;
    let all: Vec<Value> = here(&app)?.all().iter().map(|submission| report(submission, &around)).collect();
    Ok(Json(json!(all)))
}

pub(crate) async fn view<E: Engine>(
    State(app): State<App<E>>,
    Path(job): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let (_, submission) = find(&app, &job)?;
    Ok(Json(report(&submission, &Around::of(&app).await)))
}

pub(crate) async fn cancel<E: Engine>(
    State(app): State<App<E>>,
    Path(job): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let (all, submission) = find(&app, &job)?;
    if let Some(result) = submission.told().ended {
        let how = result.err().unwrap_or_else(|| "it is done".into());
        return Err(ApiError::over(format!("the simulation `{job}` has ended: {how}")));
    }
    all.cancel(submission.job);
    Ok(Json(json!({"job": format!("{:016x}", submission.job.0), "cancelled": true})))
}

/// JSON lines: how it stands, whenever that has changed, until it is over.
pub(crate) async fn events<E: Engine>(
    State(app): State<App<E>>,
    Path(job): Path<String>,
) -> Result<Response, ApiError> {
    let (_, submission) = find(&app, &job)?;
    let changes = submission.changes();
    let lines = stream::unfold(Some((submission, changes, true)), move |state| {
        let app = app.clone();
        async move {
            let (submission, mut changes, first) = state?;
            if !first {
                tokio::time::sleep(EVENTS_EVERY).await;
                if submission.told().ended.is_none() {
                    let _ = changes.changed().await;
                }
            }
            let _ = changes.borrow_and_update();
            let line = report(&submission, &Around::of(&app).await);
            // Of this very report: the last line is the one that says how it ended.
            let over = ["done", "failed", "cancelled"].iter().any(|state| line["state"] == *state);
            let next = if over { None } else { Some((submission, changes, false)) };
            Some((Ok::<_, Infallible>(format!("{line}\n")), next))
        }
    });
    Ok(([(header::CONTENT_TYPE, "application/jsonl")], Body::from_stream(lines)).into_response())
}

/// What the simulation looks like now: a PNG; its step is in a header.
pub(crate) async fn picture<E: Engine>(
    State(app): State<App<E>>,
    Path(job): Path<String>,
) -> Result<Response, ApiError> {
    let (_, submission) = find(&app, &job)?;
    let (step, png) = off_thread(move || submission.picture().ok_or_else(nothing_yet)).await?;
    let headers = [
        (header::CONTENT_TYPE, "image/png".to_owned()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
        (STEP, step.to_string()),
    ];
    Ok((headers, png).into_response())
}

/// A header with the step of a picture.
const STEP: header::HeaderName = header::HeaderName::from_static("x-step");

fn nothing_yet() -> ApiError {
    ApiError::not_found("no_picture_yet", "no picture of this simulation has come yet: ask again in a moment")
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

/// The same as half blocks of colour, for a terminal.
pub(crate) async fn text<E: Engine>(
    State(app): State<App<E>>,
    Path(job): Path<String>,
    Query(size): Query<Terminal>,
) -> Result<Response, ApiError> {
    let (_, submission) = find(&app, &job)?;
    let (columns, lines) = (size.columns.clamp(8, 1000), size.lines.clamp(4, 500));
    let (step, text) = off_thread(move || submission.text(columns, lines).ok_or_else(nothing_yet)).await?;
    let headers = [(header::CONTENT_TYPE, "text/plain; charset=utf-8".to_owned()), (STEP, step.to_string())];
    Ok((headers, text).into_response())
}

/// The page that shows what runs here.
pub(crate) async fn overview() -> Response {
    html(include_str!("overview.html"))
}

/// The page that shows a simulation while it runs.
pub(crate) async fn page() -> Response {
    html(include_str!("watch.html"))
}

fn html(page: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        // The page needs nothing from anywhere else.
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'self'; img-src 'self' blob: data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
        ),
    ];
    (headers, page).into_response()
}

/// What is told of a simulation beside what came of it here.
pub(crate) struct Around {
    /// Names of nodes, and how fast each found its memory when it started: of a processor reading weights, of a GPU copying.
    nodes: BTreeMap<String, (String, u64)>,
    grids: Vec<GridJobView>,
}

impl Around {
    /// As it is now.
    async fn of<E: Engine>(app: &App<E>) -> Self {
        let StateView { peers, grids, .. } = app.engine.state().await;
        Self { nodes: peers.into_iter().map(|peer| (peer.node, (peer.name, peer.bytes_per_second))).collect(), grids }
    }

    fn name(&self, node: &str) -> Option<&String> {
        self.nodes.get(node).map(|(name, _)| name)
    }
}

/// How a simulation stands, or how it ended.
pub(crate) fn report(submission: &Submission, around: &Around) -> Value {
    let (mut told, simulation) = (submission.told(), &submission.simulation);
    // While it runs the thread that decides knows what tiles have spent, and who stands by.
    let running = around.grids.iter().find(|grid| grid.job == submission.job && told.ended.is_none());
    let running = running.map(|grid| grid.tiles.as_slice()).unwrap_or_default();
    if told.ended.is_none() {
        told.figures = running.iter().map(|tile| tile.figures).collect();
    }
    let cells = simulation.grid().region().cells() as f64;
    let steps = f64::from(told.step.saturating_sub(told.begun_at));
    let end = told.computed.unwrap_or_else(std::time::Instant::now);
    let seconds = told.running_since.map_or(0.0, |since| (end - since).as_secs_f64());
    let rate = if seconds > 0.0 { steps / seconds } else { 0.0 };
    let now = if told.ended.is_some() { None } else { told.pace.steps_per_s(std::time::Instant::now(), told.step) };
    let left = (simulation.steps() as f64 - f64::from(told.step)).max(0.0);
    let traffic = simulation.rule().costs().traffic_bits as f64 / 8.0;
    let sum = |value: fn(&node_core::tiles::order::TileFigures) -> u64| told.figures.iter().map(value).sum::<u64>();
    let (halo_ns, wait_ns) = (sum(|f| f.halo_ns), sum(|f| f.wait_ns));
    let hidden = (halo_ns > 0).then(|| 1.0 - wait_ns as f64 / halo_ns as f64);
    let state = match (&told.ended, told.running_since) {
        (Some(Ok(())), _) => "done",
        (Some(Err(reason)), _) if reason == CANCELLED => "cancelled",
        (Some(Err(_)), _) => "failed",
        (None, Some(_)) if told.waiting.is_some() => "waiting",
        (None, Some(_)) => "running",
        (None, None) => "starting",
    };
    let number = |totals: &[i128], fields: &[usize]| {
        let sum =
            fields.iter().filter_map(|field| totals.get(*field)).fold(0i128, |sum, total| sum.wrapping_add(*total));
        Tile::total_value(sum)
    };
    let totals: Vec<Value> = simulation
        .totals()
        .iter()
        .map(|(name, fields)| {
            let first = told.first_totals.as_deref().map(|totals| number(totals, fields));
            let last = told.totals.as_ref().map(|(_, totals)| number(totals, fields));
            json!({"name": name, "first": first, "last": last})
        })
        .collect();
    let force = told.totals.as_ref().and_then(|(step, totals)| {
        let force = simulation.force_of(totals)?;
        Some(json!({"step": step, "force": force.force, "coefficients": force.coefficients}))
    });
    let tiles: Vec<Value> = told
        .tiles
        .iter()
        .enumerate()
        .map(|(number, (node, Region { start, end }))| {
            let node = hex(&NodeId(node.0));
            let figures = told.figures.get(number).copied().unwrap_or_default();
            let standby = running.get(number).and_then(|tile| tile.standby).map(|(node, step)| {
                let node = hex(&node);
                json!({"name": around.name(&node), "node": node, "step": step})
            });
            json!({
                "name": around.name(&node), "node": node, "from": start, "to": end, "standby": standby,
                "compute_s": figures.compute_ns as f64 / 1e9, "wait_s": figures.wait_ns as f64 / 1e9,
                "halo_bytes": figures.sent_bytes,
            })
        })
        .collect();
    let computing: BTreeSet<String> = told.tiles.iter().map(|(node, _)| hex(&NodeId(node.0))).collect();
    let read = computing.iter().map(|node| around.nodes.get(node).map(|(_, read)| *read));
    let read = read.sum::<Option<u64>>().filter(|read| *read > 0);
    let share = read.filter(|_| rate > 0.0).map(|read| rate * cells * traffic / read as f64);
    let quantity = Watched::of(simulation).quantity;
    let picture = submission.view().map(|view| json!({"step": view.step, "quantity": quantity, "range": view.range}));
    let pace = now.unwrap_or(rate);
    json!({
        "job": format!("{:016x}", submission.job.0), "name": simulation.name(), "rule": simulation.rule().name(),
        "size": &simulation.grid().size()[..simulation.grid().dimensions()], "state": state,
        "error": told.ended.as_ref().and_then(|result| result.as_ref().err()), "waiting": told.waiting,
        "step": told.step, "steps": simulation.steps(), "from_step": told.begun_at, "depth": told.depth,
        "seconds": seconds, "seconds_left": (pace > 0.0).then(|| left / pace), "steps_per_s": rate, "steps_per_s_now": now,
        "predicted_steps_per_s": (told.step_ns > 0).then(|| 1e9 / told.step_ns as f64),
        "mlups": rate * cells / 1e6, "cells_per_s": rate * cells, "t_eff_gb_s": rate * cells * traffic / 1e9, "share_of_node_bandwidth": share,
        "halo_bytes": sum(|f| f.sent_bytes), "standby_bytes": sum(|f| f.copied_bytes), "communication_hidden": hidden,
        "losses": told.losses, "longest_stall_ms": told.longest_stall.as_secs_f64() * 1e3, "totals": totals,
        "force": force,
        "checkpoint": told.checkpoint, "out": submission.out, "tiles": tiles,
        "taken_over_from": told.inherited_from.map(|node| node.to_string()),
        "picture": picture, "state_hash": told.hash.map(|hash| format!("{hash:032x}")),
    })
}
