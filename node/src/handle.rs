//! The node's interface for the API and the commands: serve a model, submit requests to it, inspect the mesh.
use crate::admission::Admission;
use crate::bans::Bans;
use crate::boundary::Boundary;

use crate::driver::DriverHandle;
use crate::hub::{CallEvent, Hub};
use crate::submissions::Submissions;
use crate::transfer::Library;
use crate::views::{Views, plan_report};
use node_core::id::{CallId, JobId, NodeId};
use node_core::input::Input;
use node_core::output::Event;
use node_core::work::PlanSpec;
use node_core::work::serve::{DoneReason, ModelSpec, Request, RequestKey, Sampling};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

pub use crate::views::{JobView, LossView, PeerView, PlanReport, ReasonView, StageView, StateView, hex};
use demand::DeployMode;
pub(crate) use demand::LastOptions;
pub(crate) use members::Vocabularies;
use opened::{CONTEXT_DEFAULT, Opened, work};
use remembered::Entry;
pub(crate) use remembered::Remembered;
use serving::Unserved;
pub(crate) use serving::{ServedModels, Serving};
use temporary::Uses;

mod again;
mod demand;
mod grids;
mod members;
mod opened;
mod remembered;
mod serving;
mod shortage;
mod temporary;

/// Longest wait for a plan: the planner is bounded to well below a second.
const PLAN_MAX: Duration = Duration::from_secs(20);

/// Longest wait for running requests when the node leaves.
const FINISH_MAX: Duration = Duration::from_secs(8);

/// A running node, cheap to clone.
#[derive(Clone)]
pub struct NodeHandle {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) node: NodeId,
    pub(crate) peer_id: String,
    pub(crate) name: String,
    pub(crate) driver: DriverHandle,
    pub(crate) hub: Arc<Hub>,
    pub(crate) library: Arc<Library>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) bans: Arc<Bans>,
    pub(crate) models_dir: PathBuf,
    pub(crate) serving: Serving,
    pub(crate) last_options: Arc<LastOptions>,
    pub(crate) remembered: Remembered,
    pub(crate) endpoint: Arc<transport::Endpoint>,
    pub(crate) boundary: Arc<Boundary>,
    pub(crate) submissions: Arc<Submissions>,
    /// Vocabularies of models that other nodes serve.
    pub(crate) vocabularies: Vocabularies,
    /// The node is about to leave the mesh: it accepts no new work.
    pub(crate) leaving: AtomicBool,
}

/// A model given by path, or by the name under which `meshnode pull` cached it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ModelRef(pub String);

/// How to run a model. An unset option keeps the value of the running job, or else takes its default.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct ModelOptions {
    /// 8-bit activations (fast, the default) or f32 (strict).
    pub int8: Option<bool>,
    /// Tokens of context per request; at most the model's trained context, by default at most 2048.
    pub context: Option<u32>,
    /// Concurrent requests; 4 by default.
    pub sequences: Option<u32>,
}

impl ModelOptions {
    fn is_int8(&self) -> bool {
        self.int8.unwrap_or(true)
    }

    /// Fills unset options from `other`.
    fn or(&self, other: &Self) -> Self {
        Self {
            int8: self.int8.or(other.int8),
            context: self.context.or(other.context),
            sequences: self.sequences.or(other.sequences),
        }
    }

    /// The options of a served model.
    fn of(served: &ModelSpec) -> Self {
        Self { int8: Some(served.int8), context: Some(served.work.context), sequences: Some(served.work.sequences) }
    }
}

/// A model that is being served.
#[derive(Clone)]
pub struct ModelHandle {
    /// Name for the API.
    pub name: String,
    /// The job behind it.
    pub job: JobId,
    /// Tokenizer and chat template.
    pub words: Words,
    /// Tokens of context per request.
    pub context: u32,
    /// Unix seconds when it became ready.
    pub created: u64,
    pub(crate) spec: Arc<ModelSpec>,
    pub(crate) uses: Arc<Uses>,
}

/// The tokenizer and chat template of a model.
#[derive(Clone)]
pub struct Words {
    /// Its tokenizer.
    pub tokenizer: Arc<kernels::tokenizer::Tokenizer>,
    /// The chat template, if the model has one.
    pub template: Option<Arc<kernels::chat_template::ChatTemplate>>,
}

/// A served model that another node coordinates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elsewhere {
    pub(crate) node: NodeId,
    pub(crate) job: JobId,
}

/// One generation request, in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenerateRequest {
    /// Prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Continue after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Its key, unique in the mesh.
    pub key: RequestKey,
}

/// An event of a running request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenEvent {
    /// The next token.
    Token {
        /// Its position in the sequence, counting the prompt.
        position: u32,
        /// Its id.
        token: u32,
    },
    /// No more tokens.
    Done {
        /// The reason.
        reason: DoneReason,
    },
}

/// The tokens of one request. Dropping it cancels the request.
pub struct TokenStream {
    events: mpsc::Receiver<TokenEvent>,
    call: CallId,
    driver: DriverHandle,
    hub: Arc<Hub>,
    done: bool,
}

impl TokenStream {
    /// The next event; `None` after `Done`, or when the node stopped.
    pub async fn next(&mut self) -> Option<TokenEvent> {
        let event = self.events.recv().await;
        if matches!(event, None | Some(TokenEvent::Done { .. })) {
            self.done = true;
        }
        event
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if !self.done {
            self.driver.input(Input::Cancel { call: self.call });
        }
        self.hub.forget(self.call);
    }
}

/// Why a node could not carry out an operation.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NodeError {
    /// The queue is full.
    #[error("the queue of this model is full: try again in a moment")]
    Busy,
    /// No such model, peer or job.
    #[error("{0}")]
    NotFound(String),
    /// The request cannot be served as it is.
    #[error("{0}")]
    Invalid(String),
    /// The model does not fit into the mesh; the text says how much is missing and what to do.
    #[error("{0}")]
    Plan(String),
    /// Access denied.
    #[error("{0}")]
    Unauthorised(String),
    /// The node does not respond.
    #[error("{0}")]
    Unreachable(String),
    /// Any other failure.
    #[error("{0}")]
    Failed(String),
}

/// The effects of a ban.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct BanReport {
    /// The banned PeerId.
    pub banned: String,
    /// PeerIds of connected members that it had invited; they are revoked transitively.
    pub with_it: Vec<String>,
    /// Tickets of this node that are revoked because the banned member may have them.
    pub void_tickets: Vec<String>,
    /// A reason why the ban is not effective, if there is one.
    pub warning: Option<String>,
}

impl BanReport {
    fn new(banned: String, done: &crate::bans::Banned, open: bool) -> Self {
        let ticket = |invite: &node_core::admission::Invite| {
            let until = crate::calendar::date_time(invite.expiry);
            format!("a ticket for {} more, good until {until}", invite.uses_left)
        };
        let warning = open.then(|| {
            "this node was started with --open: the banned machine can rejoin under a new key; restart without --open"
                .to_owned()
        });
        Self {
            banned,
            with_it: done.with_it.iter().map(ToString::to_string).collect(),
            void_tickets: done.void.iter().map(ticket).collect(),
            warning,
        }
    }
}

impl NodeError {
    /// The same error, followed by the state of the model that was served before.
    fn and_then(self, then: Option<&str>) -> Self {
        match then {
            Some(then) => Self::Failed(format!("{self}; {then}")),
            None => self,
        }
    }
}

impl NodeHandle {
    /// Serves a model: plans, places and loads it, and waits until every stage is ready. A job that already runs the
    /// model with these options is reused; one with other options is replaced, and its requests end with an error.
    /// Dropping the returned future does not stop the deployment. After a restart the node serves the model again,
    /// until [`Self::undeploy`].
    ///
    /// # Errors
    /// An unknown or damaged model, a mesh too small for it (with what would fit), or a stage that failed to load.
    pub async fn deploy(&self, model: ModelRef, options: ModelOptions) -> Result<ModelHandle, NodeError> {
        self.deploy_for(model, options, false).await
    }

    /// Like [`Self::deploy`], but the model is unloaded a few seconds after its last request ends, and is not served
    /// again after a restart. A permanently served model stays permanent.
    ///
    /// # Errors
    /// As for [`Self::deploy`].
    pub async fn deploy_temporarily(&self, model: ModelRef, options: ModelOptions) -> Result<ModelHandle, NodeError> {
        self.deploy_for(model, options, true).await
    }

    async fn deploy_for(
        &self,
        model: ModelRef,
        options: ModelOptions,
        temporary: bool,
    ) -> Result<ModelHandle, NodeError> {
        let node = self.clone();
        let deploying =
            tokio::spawn(async move { node.deploy_in_turn(model, DeployMode::Requested { options, temporary }).await });
        deploying.await.unwrap_or_else(|e| Err(NodeError::Failed(format!("serving the model was interrupted: {e}"))))
    }

    async fn deploy_in_turn(&self, model: ModelRef, mode: DeployMode) -> Result<ModelHandle, NodeError> {
        self.takes_work()?;
        let serving = &self.inner.serving;
        let _turn = serving.turn().await;
        let entry = match mode {
            DeployMode::Requested { .. } => None,
            DeployMode::OnDemand { .. } | DeployMode::AfterRestart => self.inner.remembered.get(&model.0),
        };
        if matches!(mode, DeployMode::AfterRestart)
            && let Some(served) = serving.by_name(&model.0)
        {
            return Ok(served);
        }
        let opened = match &entry {
            Some(entry) => self.open_remembered(entry).await?,
            // It was undeployed while this call waited for its turn.
            None if matches!(mode, DeployMode::AfterRestart) => {
                return Err(NodeError::NotFound(format!(
                    "{} was stopped and is not served again after the restart",
                    model.0
                )));
            }
            None => self.open(&model).await?,
        };
        let before = serving.find(&opened.name, opened.held.content);
        let options = self.options(&mode, entry.as_ref(), &opened)?;
        let options = before.as_ref().map_or(options.clone(), |before| options.or(&ModelOptions::of(&before.spec)));
        let mut spec = opened.spec(&options);
        if let Some(before) = before.as_ref().filter(|before| is_same(&before.spec, &spec)) {
            spec.clone_from(&before.spec); // the running job's spec, so that `serve` reuses the job
        }
        let handle = opened.handle(spec, mode.is_temporary());
        let (spec, job_before) = (handle.spec.clone(), before.as_ref().map(|before| before.job));
        match serving.serve(handle, before).await {
            Ok(served) => {
                self.note_served(&served, job_before, &opened, &mode);
                Ok(served)
            }
            Err(Unserved { error, then }) => {
                let now = serving.by_name(&opened.name).map(|served| served.job);
                let why = if mode.is_last() { self.explain(&opened, &spec, now).await } else { None };
                Err(why.unwrap_or(error).and_then(then))
            }
        }
    }

    fn options(&self, mode: &DeployMode, entry: Option<&Entry>, opened: &Opened) -> Result<ModelOptions, NodeError> {
        let remembered = entry.map(|entry| entry.options.clone()).unwrap_or_default();
        Ok(match mode {
            DeployMode::Requested { options, .. } => options.clone(),
            DeployMode::OnDemand { smaller } => {
                let last = self.inner.last_options.options(opened.held.content)?;
                last.or(&remembered).smaller(*smaller, CONTEXT_DEFAULT)
            }
            DeployMode::AfterRestart => remembered,
        })
    }

    /// Records a successful deployment: a permanent model is remembered, a temporary one is watched.
    fn note_served(&self, served: &ModelHandle, job_before: Option<JobId>, opened: &Opened, mode: &DeployMode) {
        let Inner { serving, remembered, .. } = &*self.inner;
        if served.uses.is_temporary() && job_before != Some(served.job) {
            let (node, uses) = (self.clone(), served.uses.clone());
            tokio::spawn(async move { node.end_when_unused(uses).await });
        }
        remembered.set_started(&served.name);
        if matches!(mode, DeployMode::Requested { temporary: false, .. }) {
            let options = ModelOptions::of(&served.spec);
            // The other names of the job now have these options too.
            let others = remembered.all().into_iter().filter(|entry| {
                entry.name != served.name && serving.by_name(&entry.name).is_some_and(|other| other.job == served.job)
            });
            let mut entries: Vec<Entry> = others.map(|entry| Entry { options: options.clone(), ..entry }).collect();
            entries.push(Entry { name: served.name.clone(), path: opened.path.clone(), options });
            remembered.put(entries);
        }
    }

    /// Stops serving a model: its requests end with an error, and its memory is freed on every node. Also cancels a
    /// model that is still to be served again after a restart.
    ///
    /// # Errors
    /// No such model is served.
    pub async fn undeploy(&self, name: &str) -> Result<(), NodeError> {
        let _turn = self.inner.serving.turn().await;
        let mut names = vec![name.to_owned()];
        if let Some(model) = self.served(name) {
            names.extend(self.inner.serving.end(model.job).await);
            self.inner.last_options.stop(model.spec.content);
        } else if self.inner.remembered.get(name).is_none() {
            return Err(NodeError::NotFound(format!("no model `{name}` is served here")));
        }
        self.inner.remembered.remove(&names);
        Ok(())
    }

    /// Plans a model without deploying it. Unset options are taken from the running job, if the model is served.
    ///
    /// # Errors
    /// As for [`Self::deploy`].
    pub async fn plan(&self, model: ModelRef, options: ModelOptions) -> Result<PlanReport, NodeError> {
        let opened = self.open(&model).await?;
        let served = self.inner.serving.find(&opened.name, opened.held.content);
        let options = served.as_ref().map_or(options.clone(), |served| options.or(&ModelOptions::of(&served.spec)));
        let spec = opened.spec(&options);
        let (call, mut events) = self.inner.hub.open(8);
        let what = Box::new(PlanSpec::Model(spec.clone()));
        self.inner.driver.input(Input::Plan { call, what, standbys: true });
        let answer = tokio::time::timeout(PLAN_MAX, async {
            loop {
                match events.recv().await {
                    None => return Err(NodeError::Failed("the node stopped".into())),
                    Some(CallEvent::Node(Event::PlanReady { result, standbys, change, .. })) => {
                        return result.map(|plan| (plan, standbys, change)).map_err(|e| NodeError::Plan(e.to_string()));
                    }
                    Some(CallEvent::Node(_)) => {}
                }
            }
        })
        .await
        .unwrap_or_else(|_| Err(NodeError::Failed("the planner did not respond: retry".into())));
        self.inner.hub.forget(call);
        let job = served.map(|served| served.job);
        let (plan, standbys, change) = match answer {
            Ok(planned) => planned,
            Err(error @ NodeError::Plan(_)) => return Err(self.explain(&opened, &spec, job).await.unwrap_or(error)),
            Err(error) => return Err(error),
        };
        let zones = self.zone_losses(job, {
            let (plan, standbys, work) = (plan.clone(), standbys.clone(), spec.work.clone());
            move |fleet, options| partitioner::zones::model_losses(&plan, &standbys, &work, fleet, options)
        });
        let zones = zones.await;
        let runs_there = change.is_some_and(|change| change.bytes == 0);
        let mut report = plan_report(opened.name, &plan, &standbys, change, &self.names().await);
        report.zones = zones;
        if let Some(job) = job.filter(|_| runs_there) {
            // Show the running job's standbys, which were chosen when other memory was free.
            let views = self.inner.driver.views().await.jobs;
            let running = views.into_iter().find(|view| view.head && view.job == serving::name_of(job));
            report.standbys = running.map_or(report.standbys, |view| view.standbys);
        }
        Ok(report)
    }

    /// Submits a request to a served model.
    ///
    /// # Errors
    /// The node has stopped. Rejections (queue full, prompt too long) arrive as [`TokenEvent::Done`].
    pub async fn submit(&self, model: &ModelHandle, request: GenerateRequest) -> Result<TokenStream, NodeError> {
        self.takes_work()?;
        model.uses.requested();
        Ok(self.call(model.context, request, |call, request| Input::Submit { call, job: model.job, request }))
    }

    /// Submits a request to a model that another node serves.
    ///
    /// # Errors
    /// As for [`Self::submit`].
    pub(crate) fn ask(
        &self,
        Elsewhere { node, job }: Elsewhere,
        context: u32,
        request: GenerateRequest,
    ) -> Result<TokenStream, NodeError> {
        self.takes_work()?;
        Ok(self.call(context, request, |call, request| Input::Ask { call, to: node, job, request }))
    }

    fn call(
        &self,
        context: u32,
        request: GenerateRequest,
        input: impl FnOnce(CallId, Box<Request>) -> Input,
    ) -> TokenStream {
        let GenerateRequest { prompt, max_tokens, sampling, ignore_eos, key } = request;
        let room = (max_tokens.min(context) as usize) + 2;
        let (call, events) = self.inner.hub.open_tokens(room);
        self.inner.driver.input(input(call, Box::new(Request { prompt, max_tokens, sampling, ignore_eos, key })));
        TokenStream { events, call, driver: self.inner.driver.clone(), hub: self.inner.hub.clone(), done: false }
    }

    /// Models being served, by name.
    pub fn models(&self) -> Vec<ModelHandle> {
        self.inner.serving.all()
    }

    /// A served model by name; `default` is the only served model, if there is one only.
    pub fn served(&self, name: &str) -> Option<ModelHandle> {
        self.inner.serving.by_name(name)
    }

    /// The node's view of the mesh.
    pub async fn state(&self) -> StateView {
        let Views { mut peers, jobs, .. } = self.inner.driver.views().await;
        peers.iter_mut().filter(|peer| !peer.this_node).for_each(|peer| self.show_ban(peer));
        let jobs = self.with_starting(jobs);
        StateView {
            node: hex(&self.inner.node),
            name: self.inner.name.clone(),
            peer_id: self.inner.peer_id.clone(),
            mesh: self.inner.admission.mesh_name(),
            membership_ends: self.inner.admission.credentials().chain.expiry(),
            banned: self.inner.bans.notice().map(|notice| notice.to_string()),
            peers,
            jobs,
            waiting: self.inner.admission.waiting(),
            weights: self.inner.library.view(),
            boundary: self.inner.boundary.view(),
        }
    }

    /// Marks a banned member. The core has dropped what the member advertised; the revocation has its name.
    fn show_ban(&self, peer: &mut PeerView) {
        let ban = unhex(&peer.node).and_then(|node| self.inner.bans.of(node));
        if let Some(ban) = ban {
            "banned".clone_into(&mut peer.state);
            peer.peer_id = ban.banned.to_string();
            peer.name = ban.banned_name;
        }
    }

    /// Creates a ticket for joining the mesh.
    ///
    /// # Errors
    /// The store cannot be written.
    pub async fn invite(&self, ttl: Duration, uses: u32) -> Result<String, NodeError> {
        let admission = self.inner.admission.clone();
        let invited = tokio::task::spawn_blocking(move || admission.invite(ttl, uses)); // writes to disk
        Ok(invited.await.map_err(|e| NodeError::Failed(format!("inviting was interrupted: {e}")))??)
    }

    /// Admits a peer that asked to join without a ticket, by its PeerId or a part of it that is unique among the
    /// waiting peers.
    ///
    /// # Errors
    /// No such peer is waiting.
    pub async fn approve(&self, peer: String) -> Result<(), NodeError> {
        Ok(self.inner.admission.approve(&peer)?)
    }

    /// Revokes a member's certificate in the whole mesh, by PeerId, or by a name or id that matches one member only.
    ///
    /// # Errors
    /// No such member, several members of that name, or this node may not ban it.
    pub async fn ban(&self, peer: String) -> Result<BanReport, NodeError> {
        let banned = match peer.parse::<transport::PeerId>() {
            Ok(banned) => banned,
            Err(_) => self.find_peer(&peer).await?,
        };
        let peer_id = banned.to_string();
        let known = self.inner.driver.views().await.peers.into_iter().find(|member| member.peer_id == peer_id);
        let name = known.map(|member| member.name).unwrap_or_default();
        let bans = self.inner.bans.clone();
        // Writes to disk.
        let done = tokio::task::spawn_blocking(move || bans.ban(banned, &name)).await;
        let done = done.map_err(|e| NodeError::Failed(format!("the ban was interrupted: {e}")))??;
        Ok(BanReport::new(peer_id, &done, self.inner.admission.is_open()))
    }

    async fn find_peer(&self, peer: &str) -> Result<transport::PeerId, NodeError> {
        let members = self.inner.driver.views().await.peers;
        let others: Vec<PeerView> = members.into_iter().filter(|member| !member.this_node).collect();
        let exact: Vec<&PeerView> = others.iter().filter(|member| member.name == peer).collect();
        let begins = |member: &&PeerView| !peer.is_empty() && member.node.starts_with(peer);
        let found = if exact.is_empty() { others.iter().filter(begins).collect() } else { exact };
        match found.as_slice() {
            [one] => one.peer_id.parse().map_err(|_| {
                NodeError::NotFound(format!("the key of `{peer}` is not known yet: retry when it is connected"))
            }),
            [] => Err(NodeError::NotFound(format!("no member `{peer}`: `meshnode peers` shows names and ids"))),
            several => Err(NodeError::Invalid(format!("`{peer}` matches {} members: give the PeerId", several.len()))),
        }
    }

    /// Leaves the mesh: accepts no new work, lets running requests finish for up to `FINISH_MAX`, says goodbye; then
    /// the process exits.
    pub async fn leave(&self) {
        if self.inner.leaving.swap(true, Ordering::Relaxed) {
            return;
        }
        self.drain(true);
        let node = self.clone();
        tokio::spawn(async move {
            let end = tokio::time::Instant::now() + FINISH_MAX;
            while tokio::time::Instant::now() < end && node.has_requests().await {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            node.inner.driver.input(Input::Leave);
            node.inner.driver.stop_after(Duration::from_millis(300));
        });
    }

    async fn has_requests(&self) -> bool {
        self.inner.driver.views().await.jobs.iter().any(|job| job.head && job.running + job.queued > 0)
    }

    /// Stops accepting new work (`true`), or accepts it again.
    pub fn drain(&self, draining: bool) {
        self.inner.driver.input(Input::Drain(draining));
    }

    fn takes_work(&self) -> Result<(), NodeError> {
        match self.inner.leaving.load(Ordering::Relaxed) {
            true => Err(NodeError::Failed("this node is leaving the mesh: send the request to another node".into())),
            false => Ok(()),
        }
    }

    pub(crate) async fn names(&self) -> BTreeMap<String, String> {
        self.inner.driver.views().await.peers.into_iter().map(|p| (p.node, p.name)).collect()
    }
}

/// Whether both run the same model with the same options.
fn is_same(a: &ModelSpec, b: &ModelSpec) -> bool {
    let run = |spec: &ModelSpec| (spec.content, spec.int8, spec.work.context, spec.work.sequences);
    run(a) == run(b)
}

/// Parses a node id in the API's format.
fn unhex(text: &str) -> Option<NodeId> {
    u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32).map(|bits| NodeId(bits.to_be_bytes()))
}

pub(crate) fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests;
