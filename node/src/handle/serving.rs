//! Which models are served, and by which job: what is asked for again is reused, what is asked for otherwise is replaced,
//! and no job is left behind that nobody can reach.
use super::{ModelHandle, NodeError};
use crate::driver::DriverHandle;
use crate::hub::{CallEvent, Hub};
use crate::views::{JobView, PeerView, Views};
use node_core::id::{ContentId, JobId};
use node_core::input::Input;
use node_core::output::Event;
use node_core::work::JobSpec;
use node_core::work::serve::{DoneReason, ModelSpec};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Longest wait for a model to be placed and loaded on every stage: a slow peer may have to fetch its share first.
const DEPLOY_MAX: Duration = Duration::from_secs(600);
/// Longest wait for peers to tell that the memory of an ended job is free: adverts are told once a second.
const FREED_MAX: Duration = Duration::from_secs(3);
/// How often that is looked at.
const GLANCE: Duration = Duration::from_millis(20);

/// Served models by every name they were asked for; several names may mean one job.
pub(crate) type ServedModels = Arc<Mutex<BTreeMap<String, ModelHandle>>>;

/// A model is not served as asked for.
pub(super) struct Unserved {
    pub(super) error: NodeError,
    /// What became of the model that was served before.
    pub(super) then: Option<&'static str>,
}

/// The served models of one node.
///
/// Invariant: every job deployed through this is in `models`, or its deployment is under way, or it was ended.
pub(crate) struct Serving {
    driver: DriverHandle,
    hub: Arc<Hub>,
    models: ServedModels,
    /// One change at a time: two clients that ask for the same model get the same job.
    turn: tokio::sync::Mutex<()>,
}

impl Serving {
    /// Serves into `models`, of which there are none yet.
    pub(crate) fn new(driver: DriverHandle, hub: Arc<Hub>, models: ServedModels) -> Self {
        Self { driver, hub, models, turn: tokio::sync::Mutex::new(()) }
    }

    /// To be held while what is served is changed.
    pub(super) async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Served models by name; a job with several names comes once for each.
    pub(super) fn all(&self) -> Vec<ModelHandle> {
        let models = self.lock();
        models.iter().map(|(name, model)| ModelHandle { name: name.clone(), ..model.clone() }).collect()
    }

    /// The model of that name, or the only one there is when `name` is "default".
    pub(super) fn by_name(&self, name: &str) -> Option<ModelHandle> {
        let models = self.lock();
        let mut jobs = models.values();
        let only = || jobs.next().filter(|first| models.values().all(|m| m.job == first.job)).cloned();
        models.get(name).cloned().or_else(|| (name == "default").then(only)?)
    }

    /// The model served under that name, or else the same weights under another.
    pub(super) fn find(&self, name: &str, content: ContentId) -> Option<ModelHandle> {
        let models = self.lock();
        models.get(name).or_else(|| models.values().find(|m| m.spec.content == content)).cloned()
    }

    /// Sees to it that `model` is served under its name, instead of `before`. Its job is in the answer.
    ///
    /// A model that is served already as asked for keeps its job. Otherwise the old job ends first, so that its memory can
    /// be used; if the new one cannot be placed, the old one is placed again.
    ///
    /// # Errors
    /// The mesh cannot hold it, a stage could not load, or the node stopped.
    pub(super) async fn serve(&self, model: ModelHandle, before: Option<ModelHandle>) -> Result<ModelHandle, Unserved> {
        let unserved = |error| Unserved { error, then: None };
        let placed = match before {
            Some(before) if before.spec == model.spec => {
                before.uses.wanted(model.uses.is_temporary());
                let job = self.place(&model.spec, false).await.map_err(unserved)?;
                ModelHandle { job, created: before.created, uses: before.uses, ..model }
            }
            Some(before) => {
                // A run neither ends nor shortens the life of what is served for good.
                model.uses.wanted(before.uses.is_temporary() && model.uses.is_temporary());
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

    /// Ends a job and waits until it is gone and its memory is free; returns the names it had. Its requests end with an
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

    /// A replacement could not be placed: what was there before is better than nothing.
    async fn restore(&self, names: Vec<String>, before: ModelHandle, error: NodeError) -> Unserved {
        let then = match self.place(&before.spec, true).await {
            Ok(job) => {
                let model = ModelHandle { job, ..before };
                names.into_iter().for_each(|name| self.insert(name, &model));
                "the model is served as before"
            }
            Err(_) => "the model is not served now; serve it again with the options that it had",
        };
        Unserved { error, then: Some(then) }
    }

    /// Asks the core for the job of a model and waits until it is ready. A job that is `new` and does not become ready is
    /// ended; one that was there before stays and goes on trying.
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
                    break Err(NodeError::Failed(format!("not ready after {seconds} s: see the nodes' logs")));
                }
                Ok(None) => break Err(NodeError::Failed("the node stopped".into())),
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

    /// Nobody told the id of a job that did not become ready: it is the one of that name that no served model has.
    async fn end_unfinished(&self, spec: &ModelSpec, new: bool) {
        let jobs = self.driver.views().await.jobs;
        let known: Vec<String> = self.lock().values().map(|m| name_of(m.job)).collect();
        for job in jobs.iter().filter(|j| new && j.head && j.model == spec.name && !known.contains(&j.job)) {
            if let Ok(id) = u64::from_str_radix(&job.job, 16) {
                self.driver.input(Input::End { job: JobId(id) });
            }
        }
    }

    /// A job that this node took over serves this model from now on, unless another one is served under that name.
    pub(super) fn adopt(&self, model: ModelHandle) {
        self.lock().entry(model.name.clone()).or_insert(model);
    }

    /// A job is over here: its models are not served any more.
    pub(super) fn forget(&self, job: JobId) {
        self.lock().retain(|_, model| model.job != job);
    }

    fn insert(&self, name: String, model: &ModelHandle) {
        self.lock().insert(name.clone(), ModelHandle { name, ..model.clone() });
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, ModelHandle>> {
        self.models.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A node that holds a stage of a job that is about to end, and what it had free before.
struct Holder {
    node: String,
    free: u64,
}

impl Holder {
    /// It told that it has more free now; or there is nothing to wait for: it is gone, or hardly anything of it is taken.
    fn is_free(&self, peers: &[PeerView]) -> bool {
        peers.iter().find(|p| p.node == self.node && p.state == "alive").is_none_or(|p| {
            p.memory_free > self.free || p.memory_total.saturating_sub(p.memory_free) < p.memory_total / UNTOLD
        })
    }
}

/// Changes below this share of a node's memory are told late: not worth waiting for.
const UNTOLD: u64 = 16;

fn holders(peers: &[PeerView], jobs: &[JobView], job: JobId) -> Vec<Holder> {
    let stages = jobs.iter().filter(|j| j.head && j.job == name_of(job)).flat_map(|j| &j.stages);
    stages
        .filter_map(|s| peers.iter().find(|p| p.node == s.node))
        .map(|p| Holder { node: p.node.clone(), free: p.memory_free })
        .collect()
}

/// A job's id as the views show it.
pub(super) fn name_of(job: JobId) -> String {
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
