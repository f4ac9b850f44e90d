//! What the API and the commands see of a running node: ask for a model, submit to it, look at the mesh.
use crate::admission::Admission;
use crate::driver::DriverHandle;
use crate::hub::{CallEvent, Hub};
use crate::transfer::Library;
use kernels::stage::Activations;
use kernels::weights::ModelFile;
use node_core::id::{JobId, NodeId};
use node_core::input::{Input, ModelSpec, Request};
use node_core::message::Sampling;
use node_core::output::{DoneReason, Event};
use partitioner::{Plan, PlanError};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;

/// Longest wait for a model to be placed and loaded on every stage: a slow peer may have to fetch its share first.
const DEPLOY_MAX: Duration = Duration::from_secs(600);
/// Longest wait for a plan: the planner is bounded to well below a second.
const PLAN_MAX: Duration = Duration::from_secs(20);

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
    pub(crate) models_dir: PathBuf,
    pub(crate) served: Mutex<BTreeMap<String, ModelHandle>>,
    /// One deployment at a time: two clients that ask for the same model get the same job.
    pub(crate) deploying: tokio::sync::Mutex<()>,
}

/// How to find a model: a path, or a name that `meshnode pull` has put in the cache.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ModelRef(pub String);

/// How a model is to be run.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ModelOptions {
    /// 8-bit activations (fast) or f32 (strict).
    pub int8: bool,
    /// Tokens of context per request; `None` takes the model's own, at most 4096.
    pub context: Option<u32>,
    /// Requests at once.
    pub sequences: u32,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self { int8: true, context: None, sequences: 4 }
    }
}

/// A model that is being served.
#[derive(Clone)]
pub struct ModelHandle {
    /// Name for the API.
    pub name: String,
    /// The job behind it.
    pub job: JobId,
    /// Text to tokens and back.
    pub tokenizer: Arc<kernels::tokenizer::Tokenizer>,
    /// How a conversation becomes a prompt, if the model says so.
    pub template: Option<Arc<kernels::chat_template::ChatTemplate>>,
    /// Tokens of context per request.
    pub context: u32,
    /// Unix seconds when it became ready.
    pub created: u64,
    pub(crate) options: ModelOptions,
}

/// One generation request, in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenerateRequest {
    /// Prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// How to choose.
    pub sampling: Sampling,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
}

/// What a running request tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenEvent {
    /// The next token.
    Token {
        /// Its position in the sequence, prompt counted.
        position: u32,
        /// Its id.
        token: u32,
    },
    /// No more tokens.
    Done {
        /// Why.
        reason: DoneReason,
    },
}

/// The tokens of one request. Dropping it stops the work.
pub struct TokenStream {
    events: mpsc::Receiver<TokenEvent>,
    call: node_core::id::CallId,
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

/// Why a node did not do what was asked.
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
    /// The mesh cannot hold it.
    #[error("{0}")]
    Plan(#[from] PlanError),
    /// Not allowed.
    #[error("{0}")]
    Unauthorised(String),
    /// Nobody answers there.
    #[error("{0}")]
    Unreachable(String),
    /// Something failed.
    #[error("{0}")]
    Failed(String),
}

/// A plan for people and programs.
#[derive(Clone, Debug, Serialize)]
pub struct PlanReport {
    /// Model name.
    pub model: String,
    /// Predicted milliseconds per token of one request.
    pub token_ms: f64,
    /// Whether the search was exact.
    pub exact: bool,
    /// Stages, first to last.
    pub stages: Vec<StageView>,
    /// Why each node is or is not used.
    pub reasons: Vec<ReasonView>,
    /// What would happen if a node were lost.
    pub losses: Vec<LossView>,
}

/// One stage of a plan or a job.
#[derive(Clone, Debug, Serialize)]
pub struct StageView {
    /// Node id, hex.
    pub node: String,
    /// Its name.
    pub name: String,
    /// First layer.
    pub first_layer: u32,
    /// One past the last layer.
    pub end_layer: u32,
    /// Bytes it takes.
    pub bytes: u64,
    /// Predicted milliseconds per token.
    pub step_ms: f64,
}

/// Why a node is or is not used.
#[derive(Clone, Debug, Serialize)]
pub struct ReasonView {
    /// Its name.
    pub node: String,
    /// The reason.
    pub reason: String,
}

/// What would happen if a node were lost.
#[derive(Clone, Debug, Serialize)]
pub struct LossView {
    /// The node lost.
    pub node: String,
    /// Stages of the plan that would follow; empty if there is none.
    pub stages: Vec<StageView>,
    /// Why there is none.
    pub error: Option<String>,
}

/// A node as the API shows it.
#[derive(Clone, Debug, Serialize)]
pub struct StateView {
    /// This node.
    pub node: String,
    /// Its name.
    pub name: String,
    /// Its libp2p PeerId.
    pub peer_id: String,
    /// Its mesh.
    pub mesh: String,
    /// Everybody known, this node included.
    pub peers: Vec<PeerView>,
    /// Jobs this node heads or takes part in.
    pub jobs: Vec<JobView>,
    /// PeerIds that asked to join without a ticket: `meshnode approve PEER` lets them in.
    pub waiting: Vec<String>,
}

/// A member.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PeerView {
    /// Node id, hex.
    pub node: String,
    /// Name.
    pub name: String,
    /// PeerId.
    pub peer_id: String,
    /// "alive", "suspect", "left", "down".
    pub state: String,
    /// This node itself.
    pub this_node: bool,
    /// Device description.
    pub device: String,
    /// Bytes offered in all.
    pub memory_total: u64,
    /// Bytes free.
    pub memory_free: u64,
    /// Measured weight bytes per second.
    pub bytes_per_second: u64,
    /// Round trip in milliseconds, if measured.
    pub rtt_ms: Option<f64>,
    /// A data-plane connection stands.
    pub connected: bool,
    /// Takes no new work.
    pub draining: bool,
    /// Data-plane addresses.
    pub addrs: Vec<String>,
}

/// A job.
#[derive(Clone, Debug, Serialize)]
pub struct JobView {
    /// Job id, hex.
    pub job: String,
    /// Model name.
    pub model: String,
    /// "planning", "loading", "ready", "degraded"; "holding" for a stage of another node's job.
    pub state: String,
    /// Why it is degraded.
    pub reason: Option<String>,
    /// This node is its head.
    pub head: bool,
    /// Epoch counter.
    pub epoch: u32,
    /// Predicted milliseconds per token.
    pub token_ms: f64,
    /// Stages, first to last.
    pub stages: Vec<StageView>,
    /// Requests running.
    pub running: u32,
    /// Requests waiting.
    pub queued: u32,
}

impl NodeHandle {
    /// Serves a model: plans, places and loads it, and waits until every stage is ready. The same model with the same
    /// options is served once.
    ///
    /// # Errors
    /// Unknown or damaged model, a mesh too small (with the missing bytes), a stage that could not load.
    pub async fn deploy(&self, model: ModelRef, options: ModelOptions) -> Result<ModelHandle, NodeError> {
        let _one_at_a_time = self.inner.deploying.lock().await;
        let opened = self.open(&model, &options).await?;
        self.inner.driver.input(Input::Holdings(self.inner.library.contents()));
        if let Some(served) = self.served(&opened.spec.name)
            && served.options == options
        {
            return Ok(served);
        }
        let (call, mut events) = self.inner.hub.open(8);
        self.inner.driver.input(Input::Deploy { call, model: Box::new(opened.spec.clone()), plan_only: false });
        let job = loop {
            match tokio::time::timeout(DEPLOY_MAX, events.recv()).await {
                Err(_) => {
                    break Err(NodeError::Failed(format!(
                        "not ready after {} s: see `meshnode jobs`",
                        DEPLOY_MAX.as_secs()
                    )));
                }
                Ok(None) => break Err(NodeError::Failed("the node stopped".into())),
                Ok(Some(CallEvent::Node(Event::JobReady { job, .. }))) => break Ok(job),
                Ok(Some(CallEvent::Node(Event::JobDegraded { job, reason, .. }))) => {
                    self.inner.driver.input(Input::Undeploy { job });
                    break Err(NodeError::Failed(reason));
                }
                Ok(Some(CallEvent::Node(Event::PlanReady { result: Err(error), .. }))) => {
                    break Err(NodeError::Plan(error));
                }
                Ok(Some(CallEvent::Node(Event::Done { reason, .. }))) => break Err(done_error(reason)),
                Ok(Some(CallEvent::Node(_))) => {}
            }
        };
        self.inner.hub.forget(call);
        let served = ModelHandle {
            name: opened.spec.name.clone(),
            job: job?,
            tokenizer: opened.tokenizer,
            template: opened.template,
            context: opened.spec.work.context,
            created: unix_seconds(),
            options,
        };
        self.inner.served.lock().expect("no panics under this lock").insert(served.name.clone(), served.clone());
        Ok(served)
    }

    /// What would be done with a model, without doing it.
    ///
    /// # Errors
    /// As for [`Self::deploy`].
    pub async fn plan(&self, model: ModelRef, options: ModelOptions) -> Result<PlanReport, NodeError> {
        let opened = self.open(&model, &options).await?;
        let name = opened.spec.name.clone();
        let (call, mut events) = self.inner.hub.open(8);
        self.inner.driver.input(Input::Deploy { call, model: Box::new(opened.spec), plan_only: true });
        let answer = tokio::time::timeout(PLAN_MAX, async {
            loop {
                match events.recv().await {
                    None => return Err(NodeError::Failed("the node stopped".into())),
                    Some(CallEvent::Node(Event::PlanReady { result, .. })) => return result.map_err(NodeError::Plan),
                    Some(CallEvent::Node(_)) => {}
                }
            }
        })
        .await
        .unwrap_or_else(|_| Err(NodeError::Failed("the planner did not answer".into())));
        self.inner.hub.forget(call);
        let names = self.names().await;
        Ok(plan_report(name, &*answer?, &names))
    }

    /// Submits a request to a served model.
    ///
    /// # Errors
    /// The node has stopped. Refusals (queue full, prompt too long) come as [`TokenEvent::Done`].
    pub async fn submit(&self, model: &ModelHandle, request: GenerateRequest) -> Result<TokenStream, NodeError> {
        let room = (request.max_tokens.min(model.context) as usize) + 2;
        let (call, events) = self.inner.hub.open_tokens(room);
        let request = Request {
            prompt: request.prompt,
            max_tokens: request.max_tokens,
            sampling: request.sampling,
            ignore_eos: request.ignore_eos,
        };
        self.inner.driver.input(Input::Submit { call, job: model.job, request: Box::new(request) });
        Ok(TokenStream { events, call, driver: self.inner.driver.clone(), hub: self.inner.hub.clone(), done: false })
    }

    /// Models being served, by name.
    pub fn models(&self) -> Vec<ModelHandle> {
        self.inner.served.lock().expect("no panics under this lock").values().cloned().collect()
    }

    /// A served model by name, or the only one there is when `name` is "default".
    pub fn served(&self, name: &str) -> Option<ModelHandle> {
        let served = self.inner.served.lock().expect("no panics under this lock");
        served
            .get(name)
            .cloned()
            .or_else(|| (name == "default" && served.len() == 1).then(|| served.values().next().cloned())?)
    }

    /// Everything there is to see.
    pub async fn state(&self) -> StateView {
        let (peers, jobs) = self.inner.driver.views().await;
        StateView {
            node: hex(&self.inner.node),
            name: self.inner.name.clone(),
            peer_id: self.inner.peer_id.clone(),
            mesh: self.inner.admission.mesh_name(),
            peers,
            jobs,
            waiting: self.inner.admission.waiting(),
        }
    }

    /// A ticket that lets others in.
    ///
    /// # Errors
    /// The store cannot be written.
    pub async fn invite(&self, ttl: Duration, uses: u32) -> Result<String, NodeError> {
        Ok(self.inner.admission.invite(ttl, uses)?)
    }

    /// Lets a peer in that asked to join without a ticket (a PeerId, or a prefix of it that is unique among those who wait).
    ///
    /// # Errors
    /// No such peer waits.
    pub async fn approve(&self, peer: String) -> Result<(), NodeError> {
        Ok(self.inner.admission.approve(&peer)?)
    }

    /// Leaves the mesh: says goodbye, takes no new work, then the process ends.
    pub async fn leave(&self) {
        self.inner.driver.input(Input::Leave);
        self.inner.driver.stop_after(Duration::from_millis(300));
    }

    /// Takes no new work (`true`), or takes it again.
    pub fn drain(&self, draining: bool) {
        self.inner.driver.input(Input::Drain(draining));
    }

    async fn names(&self) -> BTreeMap<String, String> {
        self.inner.driver.views().await.0.into_iter().map(|p| (p.node, p.name)).collect()
    }

    /// Opens a model file off the async threads: hashing a large file for the first time takes seconds.
    async fn open(&self, model: &ModelRef, options: &ModelOptions) -> Result<Opened, NodeError> {
        let path = crate::pull::locate(&model.0, &self.inner.models_dir).ok_or_else(|| {
            NodeError::NotFound(format!(
                "no model `{}` here: give a path to a .gguf file, or fetch it with `meshnode pull {}`",
                model.0, model.0
            ))
        })?;
        let library = self.inner.library.clone();
        let (name, options) = (model_name(&model.0), options.clone());
        tokio::task::spawn_blocking(move || open_model(&library, &path, name, &options))
            .await
            .map_err(|e| NodeError::Failed(format!("opening the model was interrupted: {e}")))?
    }
}

struct Opened {
    spec: ModelSpec,
    tokenizer: Arc<kernels::tokenizer::Tokenizer>,
    template: Option<Arc<kernels::chat_template::ChatTemplate>>,
}

fn open_model(
    library: &Library,
    path: &std::path::Path,
    name: String,
    options: &ModelOptions,
) -> Result<Opened, NodeError> {
    let invalid = |e: &dyn std::fmt::Display| NodeError::Invalid(format!("{}: {e}", path.display()));
    let held = library.add(path).map_err(|e| invalid(&e))?;
    let tokenizer = Arc::new(held.file.tokenizer().map_err(|e| invalid(&e))?);
    let template = held.file.chat_template().ok().map(Arc::new);
    let spec = ModelSpec {
        content: held.content,
        name,
        work: work(&held.file, options),
        width: held.file.config().width as u32,
        int8: options.int8,
        eos: tokenizer.eos().to_vec(),
    };
    Ok(Opened { spec, tokenizer, template })
}

/// The default context: enough for a conversation, small enough that caches of four requests stay below small models'
/// weights.
const CONTEXT_DEFAULT: u32 = 2048;

fn work(file: &ModelFile, options: &ModelOptions) -> partitioner::Work {
    let activations = if options.int8 { Activations::Int8 } else { Activations::F32 };
    // Any node may compute on a GPU.
    let costs = file.costs(activations, true);
    let trained = u32::try_from(file.config().context).unwrap_or(u32::MAX);
    let context = options.context.unwrap_or(CONTEXT_DEFAULT).min(trained).max(1);
    partitioner::Work {
        layers: costs
            .layers
            .iter()
            .map(|l| partitioner::Layer {
                flops_per_token: l.flops_per_token,
                weight_bytes: l.weight_bytes,
                kv_bytes_per_token: l.kv_bytes_per_token,
            })
            .collect(),
        embed_bytes: costs.embed_bytes,
        head_bytes: costs.head_bytes,
        tied: costs.tied,
        head_flops: costs.head_flops,
        activation_bytes: file.config().width as u64 * 4,
        context,
        sequences: options.sequences.clamp(1, node_core::limits::SEQUENCES_MAX),
        scratch_bytes: crate::executor::SCRATCH_BYTES,
    }
}

fn done_error(reason: DoneReason) -> NodeError {
    match reason {
        DoneReason::Busy => NodeError::Busy,
        DoneReason::Invalid(what) => NodeError::Invalid(what),
        DoneReason::Failed(what) => NodeError::Failed(what),
        DoneReason::Stop | DoneReason::Length | DoneReason::Cancelled => NodeError::Failed("cancelled".into()),
    }
}

fn plan_report(model: String, plan: &Plan, names: &BTreeMap<String, String>) -> PlanReport {
    let name = |id: &partitioner::DeviceId| {
        let node = hex(&NodeId(id.0));
        names.get(&node).cloned().unwrap_or(node)
    };
    let stages = |plan: &Plan| plan.stages().iter().map(|s| stage_view(s, name(&s.device))).collect::<Vec<_>>();
    PlanReport {
        model,
        token_ms: plan.token_ns() as f64 / 1e6,
        exact: plan.exact(),
        stages: stages(plan),
        reasons: plan
            .reasons()
            .iter()
            .map(|(id, reason)| ReasonView { node: name(id), reason: reason.clone() })
            .collect(),
        losses: plan
            .losses()
            .iter()
            .map(|l| LossView {
                node: name(&l.lost),
                stages: l.plan.as_ref().map(&stages).unwrap_or_default(),
                error: l.plan.as_ref().err().map(ToString::to_string),
            })
            .collect(),
    }
}

pub(crate) fn stage_view(stage: &partitioner::Stage, name: String) -> StageView {
    StageView {
        node: hex(&NodeId(stage.device.0)),
        name,
        first_layer: stage.layers.start,
        end_layer: stage.layers.end,
        bytes: stage.bytes,
        step_ms: stage.step_ns as f64 / 1e6,
    }
}

/// A node id in full, as the API shows it.
pub fn hex(node: &NodeId) -> String {
    node.0.iter().map(|b| format!("{b:02x}")).collect()
}

pub(crate) fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// `dir/SmolLM2-135M-Instruct.Q4_1.gguf` is served as `SmolLM2-135M-Instruct.Q4_1`; a cached name as itself.
fn model_name(reference: &str) -> String {
    let path = std::path::Path::new(reference);
    match path.extension() {
        Some(extension) if extension == "gguf" => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        _ => reference.to_owned(),
    }
}
