//! The models that requests can name: `/v1/models`, and how a request finds or serves its model.
use super::app::App;
use super::engine::{Engine, Served};
use super::error::ApiError;
use crate::handle::HELD_MAX;
use crate::pull::name_in_request;
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

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
    let found = find(&app, Some(&name));
    let known = found.as_ref().map_or(name, |model| model.name.clone());
    let view = listed(&app).await.into_iter().find(|view| view["id"] == known.as_str());
    match (view, found) {
        (Some(view), _) => Ok(Json(view)),
        (None, Err(error)) => Err(error),
        (None, Ok(_)) => Err(ApiError::not_found("model_not_found", format!("`{known}` has just been stopped"))),
    }
}

/// Models that a request can name: those served here, those to be placed after a restart or loaded again (a request for one
/// waits), and those that other members serve.
async fn listed<E: Engine>(app: &App<E>) -> Vec<Value> {
    let jobs = app.engine.state().await.jobs;
    let state = |name: &str| jobs.iter().find(|job| job.head && job.model == name).map(|job| job.state.clone());
    // A job lists only the first name of its model; other names of the same model count as ready.
    let served = app.engine.models().into_iter().map(|model| {
        model_view(&model.name, model.context, model.created, &state(&model.name).unwrap_or_else(|| "ready".into()))
    });
    let not_loaded = app.engine.not_loaded().into_iter().map(|model| {
        model_view(&model.name, model.context, 0, &state(&model.name).unwrap_or_else(|| model.state.into()))
    });
    let mut all: Vec<Value> = served.chain(not_loaded).collect();
    for (name, context) in app.engine.models_elsewhere().await {
        if all.iter().all(|known| known["id"] != name.as_str()) {
            all.push(model_view(&name, context, 0, "ready"));
        }
    }
    all
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

fn model_view(name: &str, context: u32, created: u64, state: &str) -> Value {
    json!({
        "id": name, "object": "model", "created": created, "owned_by": "meshnode", "context_length": context,
        "state": state,
    })
}
