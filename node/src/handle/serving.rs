//! Which models are served, and by which job. Reuses a job that runs with the requested options, replaces one with
//! other options, and leaves no job without a name behind.
use super::model::ModelHandle;
use crate::driver::queue::DriverHandle;
use crate::error::NodeError;
use crate::hub::{CallEvent, EventRouter};
use crate::views::{JobView, PeerView, Views};
use node_core::id::{ContentId, JobId};
use node_core::input::Input;
use node_core::output::Event;
use node_core::work::JobSpec;
use node_core::work::serve::{DoneReason, ModelSpec};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait until a model is placed and loaded on every stage: a slow peer may have to fetch its share first.
const DEPLOY_MAX: Duration = Duration::from_secs(600);
/// Longest wait for adverts to show that the memory of an ended job is free: they are sent once per second.
const FREED_MAX: Duration = Duration::from_secs(3);
/// Poll interval.
const GLANCE: Duration = Duration::from_millis(20);

/// Served models by every name they were requested under; several names may share one job.
pub(crate) type ServedModels = Arc<Mutex<BTreeMap<String, ModelHandle>>>;

/// A deployment that failed.
pub(super) struct Unserved {
    pub(super) error: NodeError,
    /// The state of the model that was served before.
    pub(super) then: Option<&'static str>,
}

/// The served models of one node.
///
/// Invariant: every job deployed through this is in `models`, or is being deployed, or has been ended.
pub(crate) struct Serving {
    driver: DriverHandle,
    hub: Arc<EventRouter>,
    models: ServedModels,
    /// Serialises changes: two clients that request the same model get the same job.
    turn: tokio::sync::Mutex<()>,
}

impl Serving {
    /// Registers served models in `models`, which is empty.
    pub(crate) fn new(driver: DriverHandle, hub: Arc<EventRouter>, models: ServedModels) -> Self {
        Self { driver, hub, models, turn: tokio::sync::Mutex::new(()) }
    }

    /// Hold this guard while changing what is served.
    pub(super) async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Served models by name; a job with several names appears once per name.
    pub(super) fn all(&self) -> Vec<ModelHandle> {
        let models = self.lock();
        models.iter().map(|(name, model)| ModelHandle { name: name.clone(), ..model.clone() }).collect()
    }

    /// The model of that name; `default` is the only served model, if there is one only.
    pub(super) fn by_name(&self, name: &str) -> Option<ModelHandle> {
        let models = self.lock();
        let mut jobs = models.values();
        let only = || jobs.next().filter(|first| models.values().all(|m| m.job == first.job)).cloned();
        models.get(name).cloned().or_else(|| (name == "default").then(only)?)
    }

    /// The model served under that name, or else the same weights under another name.
    pub(super) fn find(&self, name: &str, content: ContentId) -> Option<ModelHandle> {
        let models = self.lock();
        models.get(name).or_else(|| models.values().find(|m| m.spec.content == content)).cloned()
    }

    /// Serves `model` under its name, instead of `before`. Returns it with its job.
    ///
    /// A model already served with these options keeps its job. Otherwise the old job ends first, so that its memory
    /// can be used; if the new one cannot be placed, the old one is placed again.
    ///
    /// # Errors
    /// The mesh cannot hold it, a stage failed to load, or the node stopped.
    pub(super) async fn serve(&self, model: ModelHandle, before: Option<ModelHandle>) -> Result<ModelHandle, Unserved> {
        let unserved = |error| Unserved { error, then: None };
        let placed = match before {
            Some(before) if before.spec == model.spec => {
                before.uses.claim(model.uses.is_temporary());
                let job = self.place(&model.spec, false).await.map_err(unserved)?;
                ModelHandle { job, created: before.created, uses: before.uses, ..model }
            }
            Some(before) => {
                // A temporary run neither ends a permanently served model nor makes it temporary.
                model.uses.claim(before.uses.is_temporary() && model.uses.is_temporary());
                let names = self.end(before.job).await;
                match self.place(&model.spec, true).await {
                    Ok(job) => {
                        let model = ModelHandle { job, ..model };
                        names.into_iter().for_each(|name| self.insert(name, &model));
                        model
                    }
                    Err(error) => return Err(self.restore(names, before, error).await),
                }
            }
            None => {
                let job = self.place(&model.spec, true).await.map_err(unserved)?;
                ModelHandle { job, ..model }
            }
        };
        self.insert(placed.name.clone(), &placed);
        Ok(placed)
    }

    /// Ends a job and waits until it is removed and its memory is free; returns its names. Its requests end with an
    /// error.
    pub(super) async fn end(&self, job: JobId) -> Vec<String> {
        let names: Vec<String> = {
            let mut models = self.lock();
            let names = models.iter().filter(|(_, m)| m.job == job).map(|(name, _)| name.clone()).collect();
            models.retain(|_, m| m.job != job);
            names
        };
        let Views { peers, jobs, .. } = self.driver.views().await;
        let holders = holders(&peers, &jobs, job);
        self.driver.input(Input::End { job });
        let start = Instant::now();
        while start.elapsed() < FREED_MAX {
            let Views { peers, jobs, .. } = self.driver.views().await;
            if jobs.iter().all(|j| j.job != name_of(job)) && holders.iter().all(|h| h.is_free(&peers)) {
                break;
            }
            tokio::time::sleep(GLANCE).await;
        }
        names
    }

    /// A replacement could not be placed: places the previous model again.
    async fn restore(&self, names: Vec<String>, before: ModelHandle, error: NodeError) -> Unserved {
        let then = match self.place(&before.spec, true).await {
            Ok(job) => {
                let model = ModelHandle { job, ..before };
                names.into_iter().for_each(|name| self.insert(name, &model));
                "the model is still served with its previous options"
            }
            Err(_) => "the model is no longer served; serve it again with its previous options",
        };
        Unserved { error, then: Some(then) }
    }

    /// Requests a job for a model and waits until it is ready. A `new` job that fails to become ready is ended; an
    /// existing one stays and keeps trying.
    async fn place(&self, spec: &ModelSpec, new: bool) -> Result<JobId, NodeError> {
        let (call, mut events) = self.hub.open(8);
        self.driver.input(Input::Start { call, job: Box::new(JobSpec::Serve(spec.clone())) });
        let end = tokio::time::Instant::now() + DEPLOY_MAX;
        let placed = loop {
            match tokio::time::timeout_at(end, events.recv()).await {
                Err(_) => {
                    self.driver.input(Input::Cancel { call });
                    self.end_unfinished(spec, new).await;
                    let seconds = DEPLOY_MAX.as_secs();
                    break Err(NodeError::Failed(format!(
                        "the model was not ready after {seconds} s: see the nodes' logs"
                    )));
                }
                Ok(None) => {
                    break Err(NodeError::Failed("the node has stopped: send the request to another node".into()));
                }
                Ok(Some(CallEvent::Node(Event::JobReady { job, .. }))) => break Ok(job),
                Ok(Some(CallEvent::Node(Event::JobDegraded { job, reason, .. }))) => {
                    if new {
                        self.driver.input(Input::End { job });
                    }
                    break Err(NodeError::Failed(reason));
                }
                Ok(Some(CallEvent::Node(Event::PlanReady { result: Err(error), .. }))) => {
                    break Err(NodeError::Plan(error.to_string()));
                }
                Ok(Some(CallEvent::Node(Event::Done { reason, .. }))) => break Err(done_error(reason)),
                Ok(Some(CallEvent::Node(_))) => {}
            }
        };
        self.hub.forget(call);
        placed
    }

    /// Ends a new job that did not become ready. Its id was never reported: it is the job of that name that no served
    /// model has.
    async fn end_unfinished(&self, spec: &ModelSpec, new: bool) {
        let jobs = self.driver.views().await.jobs;
        let known: Vec<String> = self.lock().values().map(|m| name_of(m.job)).collect();
        for job in jobs.iter().filter(|j| new && j.head && j.model == spec.name && !known.contains(&j.job)) {
            if let Ok(id) = u64::from_str_radix(&job.job, 16) {
                self.driver.input(Input::End { job: JobId(id) });
            }
        }
    }

    /// Serves this model with a job that this node inherited, unless another model is served under that name.
    pub(super) fn adopt(&self, model: ModelHandle) {
        self.lock().entry(model.name.clone()).or_insert(model);
    }

    /// Removes the models of a job that has ended.
    pub(super) fn forget(&self, job: JobId) {
        self.lock().retain(|_, model| model.job != job);
    }

    fn insert(&self, name: String, model: &ModelHandle) {
        self.lock().insert(name.clone(), ModelHandle { name, ..model.clone() });
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, ModelHandle>> {
        self.models.lock()
    }
}

/// A node that holds a stage of a job being ended, and its free memory before.
struct Holder {
    node: String,
    free: u64,
}

impl Holder {
    /// Whether it advertised more free memory; also true if there is nothing to wait for: it is down, or little of it
    /// is taken.
    fn is_free(&self, peers: &[PeerView]) -> bool {
        peers.iter().find(|p| p.node == self.node && p.state == "alive").is_none_or(|p| {
            p.memory_free > self.free || p.memory_total.saturating_sub(p.memory_free) < p.memory_total / UNTOLD
        })
    }
}

/// Changes below this share of a node's memory are advertised late, so they are not awaited.
const UNTOLD: u64 = 16;

fn holders(peers: &[PeerView], jobs: &[JobView], job: JobId) -> Vec<Holder> {
    let stages = jobs.iter().filter(|j| j.head && j.job == name_of(job)).flat_map(|j| &j.stages);
    stages
        .filter_map(|s| peers.iter().find(|p| p.node == s.node))
        .map(|p| Holder { node: p.node.clone(), free: p.memory_free })
        .collect()
}

/// A job's id in the format of the views.
pub(crate) fn name_of(job: JobId) -> String {
    format!("{:016x}", job.0)
}

fn done_error(reason: DoneReason) -> NodeError {
    match reason {
        DoneReason::Busy => NodeError::Busy,
        DoneReason::Invalid(what) => NodeError::Invalid(what),
        DoneReason::Failed(what) => NodeError::Failed(what),
        DoneReason::Stop | DoneReason::Length | DoneReason::Cancelled => NodeError::Failed("cancelled".into()),
    }
}

#[cfg(test)]
mod tests;
