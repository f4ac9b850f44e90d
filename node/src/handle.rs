//! What the API and the commands see of a running node: ask for a model, submit to it, look at the mesh.
use crate::admission::Admission;
use crate::bans::Bans;
use crate::boundary::Boundary;
use crate::driver::DriverHandle;
use crate::hub::{CallEvent, Hub};
use crate::submissions::Submissions;
use crate::transfer::{Held, Library};
use crate::views::{Views, plan_report};
use kernels::stage::Activations;
use kernels::weights::ModelFile;
use node_core::id::{JobId, NodeId};
use node_core::input::{Input, ModelSpec, Request};
use node_core::limits::{RING_BYTES_MAX, SEQUENCES_MAX};
use node_core::message::Sampling;
use node_core::output::{DoneReason, Event};
use partitioner::PlanError;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

pub use crate::views::{JobView, LossView, PeerView, PlanReport, ReasonView, StageView, StateView, hex};
pub(crate) use demand::Recalled;
use demand::Wanted;
pub(crate) use serving::Serving;

mod demand;
mod grids;
mod serving;

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
    pub(crate) recalled: Arc<Recalled>,
    pub(crate) boundary: Arc<Boundary>,
    pub(crate) submissions: Arc<Submissions>,
    /// Says goodbye soon: no new work.
    pub(crate) leaving: AtomicBool,
}

/// How to find a model: a path, or a name that `meshnode pull` has put in the cache.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ModelRef(pub String);

/// How a model is to be run. What is not said stays as the model is served already, or else takes its default.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct ModelOptions {
    /// 8-bit activations (fast, the default) or f32 (strict).
    pub int8: Option<bool>,
    /// Tokens of context per request; at most what the model was trained for, by default at most 2048.
    pub context: Option<u32>,
    /// Requests at once; 4 by default.
    pub sequences: Option<u32>,
}

impl ModelOptions {
    fn is_int8(&self) -> bool {
        self.int8.unwrap_or(true)
    }

    /// What is not said here is taken from how a model is served.
    fn or_as(&self, served: &ModelSpec) -> Self {
        Self {
            int8: self.int8.or(Some(served.int8)),
            context: self.context.or(Some(served.work.context)),
            sequences: self.sequences.or(Some(served.work.sequences)),
        }
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
    pub(crate) spec: Arc<ModelSpec>,
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

impl NodeHandle {
    /// Serves a model: plans, places and loads it, and waits until every stage is ready. A model that is served as asked
    /// for is used as it is; one that is served otherwise is replaced, and its requests end with an error. A caller that
    /// goes away does not stop what was begun.
    ///
    /// # Errors
    /// Unknown or damaged model, a mesh too small (with the missing bytes), a stage that could not load.
    pub async fn deploy(&self, model: ModelRef, options: ModelOptions) -> Result<ModelHandle, NodeError> {
        let node = self.clone();
        let deploying = tokio::spawn(async move { node.deploy_in_turn(model, Wanted::As(options)).await });
        deploying.await.unwrap_or_else(|e| Err(NodeError::Failed(format!("serving the model was interrupted: {e}"))))
    }

    async fn deploy_in_turn(&self, model: ModelRef, wanted: Wanted) -> Result<ModelHandle, NodeError> {
        self.takes_work()?;
        let serving = &self.inner.serving;
        let _turn = serving.turn().await;
        let opened = self.open(&model).await?;
        let options = match wanted {
            Wanted::As(options) => options,
            Wanted::OnDemand { smaller } => {
                self.inner.recalled.options(opened.held.content)?.smaller(smaller, CONTEXT_DEFAULT)
            }
        };
        let gpus = self.has_gpus().await;
        let before = serving.find(&opened.name, opened.held.content);
        let options = before.as_ref().map_or_else(|| options.clone(), |before| options.or_as(&before.spec));
        let mut spec = opened.spec(&options, gpus);
        if let Some(before) = before.as_ref().filter(|before| is_same(&before.spec, &spec)) {
            spec.clone_from(&before.spec); // also under another name, and planned for other members
        }
        let model = ModelHandle {
            name: opened.name,
            job: JobId(0), // none yet
            tokenizer: opened.tokenizer,
            template: opened.template,
            context: spec.work.context,
            created: unix_seconds(),
            spec: Arc::new(spec),
        };
        serving.serve(model, before).await
    }

    /// Stops serving a model: its requests end with an error, its memory is freed everywhere.
    ///
    /// # Errors
    /// No such model is served.
    pub async fn undeploy(&self, name: &str) -> Result<(), NodeError> {
        let _turn = self.inner.serving.turn().await;
        let model =
            self.served(name).ok_or_else(|| NodeError::NotFound(format!("no model `{name}` is served here")))?;
        self.inner.serving.end(model.job).await;
        self.inner.recalled.stop(model.spec.content);
        Ok(())
    }

    /// What would be done with a model, without doing it.
    ///
    /// # Errors
    /// As for [`Self::deploy`].
    pub async fn plan(&self, model: ModelRef, options: ModelOptions) -> Result<PlanReport, NodeError> {
        let opened = self.open(&model).await?;
        let spec = opened.spec(&options, self.has_gpus().await);
        let (call, mut events) = self.inner.hub.open(8);
        self.inner.driver.input(Input::Deploy { call, model: Box::new(spec), plan_only: true });
        let answer = tokio::time::timeout(PLAN_MAX, async {
            loop {
                match events.recv().await {
                    None => return Err(NodeError::Failed("the node stopped".into())),
                    Some(CallEvent::Node(Event::PlanReady { result, standbys, change, .. })) => {
                        return result.map(|plan| (plan, standbys, change)).map_err(NodeError::Plan);
                    }
                    Some(CallEvent::Node(_)) => {}
                }
            }
        })
        .await
        .unwrap_or_else(|_| Err(NodeError::Failed("the planner did not answer".into())));
        self.inner.hub.forget(call);
        let names = self.names().await;
        let (plan, standbys, change) = answer?;
        Ok(plan_report(opened.name, &plan, &standbys, change, &names))
    }

    /// Submits a request to a served model.
    ///
    /// # Errors
    /// The node has stopped. Refusals (queue full, prompt too long) come as [`TokenEvent::Done`].
    pub async fn submit(&self, model: &ModelHandle, request: GenerateRequest) -> Result<TokenStream, NodeError> {
        self.takes_work()?;
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
        self.inner.serving.all()
    }

    /// A served model by name, or the only one there is when `name` is "default".
    pub fn served(&self, name: &str) -> Option<ModelHandle> {
        self.inner.serving.by_name(name)
    }

    /// Everything there is to see.
    pub async fn state(&self) -> StateView {
        let Views { peers, jobs, grids } = self.inner.driver.views().await;
        StateView {
            node: hex(&self.inner.node),
            name: self.inner.name.clone(),
            peer_id: self.inner.peer_id.clone(),
            mesh: self.inner.admission.mesh_name(),
            membership_ends: self.inner.admission.credentials().chain.expiry(),
            peers,
            jobs,
            grids,
            waiting: self.inner.admission.waiting(),
            weights: self.inner.library.view(),
            boundary: self.inner.boundary.view(),
        }
    }

    /// A ticket that lets others in.
    ///
    /// # Errors
    /// The store cannot be written.
    pub async fn invite(&self, ttl: Duration, uses: u32) -> Result<String, NodeError> {
        let admission = self.inner.admission.clone();
        let invited = tokio::task::spawn_blocking(move || admission.invite(ttl, uses)); // it waits for the disk
        Ok(invited.await.map_err(|e| NodeError::Failed(format!("inviting was interrupted: {e}")))??)
    }

    /// Lets a peer in that asked to join without a ticket (a PeerId, or a prefix of it that is unique among those who wait).
    ///
    /// # Errors
    /// No such peer waits.
    pub async fn approve(&self, peer: String) -> Result<(), NodeError> {
        Ok(self.inner.admission.approve(&peer)?)
    }

    /// Takes a member's membership back, in the whole mesh: by PeerId, or the name or id that one member has. Returns its
    /// PeerId, and those of connected members that it had invited, who are out with it.
    ///
    /// # Errors
    /// No such member, several of that name, or this node may not.
    pub async fn ban(&self, peer: String) -> Result<(String, Vec<String>), NodeError> {
        let named = match peer.parse::<transport::PeerId>() {
            Ok(named) => named,
            Err(_) => self.find_peer(&peer).await?,
        };
        let bans = self.inner.bans.clone();
        // It waits for the disk.
        let with_it = tokio::task::spawn_blocking(move || bans.ban(named)).await;
        let with_it = with_it.map_err(|e| NodeError::Failed(format!("the ban was interrupted: {e}")))??;
        Ok((named.to_string(), with_it.iter().map(ToString::to_string).collect()))
    }

    async fn find_peer(&self, peer: &str) -> Result<transport::PeerId, NodeError> {
        let members = self.inner.driver.views().await.peers;
        let others: Vec<PeerView> = members.into_iter().filter(|member| !member.this_node).collect();
        let exact: Vec<&PeerView> = others.iter().filter(|member| member.name == peer).collect();
        let begins = |member: &&PeerView| !peer.is_empty() && member.node.starts_with(peer);
        let found = if exact.is_empty() { others.iter().filter(begins).collect() } else { exact };
        match found.as_slice() {
            [one] => {
                one.peer_id.parse().map_err(|_| NodeError::NotFound(format!("the key of `{peer}` is not known yet")))
            }
            [] => Err(NodeError::NotFound(format!("no member `{peer}`: `meshnode peers` shows names and ids"))),
            several => Err(NodeError::Invalid(format!("`{peer}` means {} members: give the PeerId", several.len()))),
        }
    }

    /// Leaves the mesh: takes no new work, lets running requests end for a while, says goodbye; then the process ends.
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

    /// Takes no new work (`true`), or takes it again.
    pub fn drain(&self, draining: bool) {
        self.inner.driver.input(Input::Drain(draining));
    }

    fn takes_work(&self) -> Result<(), NodeError> {
        match self.inner.leaving.load(Ordering::Relaxed) {
            true => Err(NodeError::Failed("this node is leaving the mesh: send the request to another".into())),
            false => Ok(()),
        }
    }

    pub(crate) async fn names(&self) -> BTreeMap<String, String> {
        self.inner.driver.views().await.peers.into_iter().map(|p| (p.node, p.name)).collect()
    }

    /// Whether any member may hold a stage on something else than a processor: caches take more there.
    async fn has_gpus(&self) -> bool {
        let peers = self.inner.driver.views().await.peers;
        peers.iter().any(|peer| !peer.device.is_empty() && peer.device.split(' ').next() != Some("cpu"))
    }

    /// Opens a model file off the async threads: hashing a large file for the first time takes seconds.
    async fn open(&self, model: &ModelRef) -> Result<Opened, NodeError> {
        let served = || {
            let served = self.inner.serving.all().into_iter().find(|served| served.name == model.0)?;
            self.inner.library.path_of(served.spec.content)
        };
        let path = crate::pull::locate(&model.0, &self.inner.models_dir).or_else(served).ok_or_else(|| {
            NodeError::NotFound(format!(
                "no model `{}` here: give a path to a .gguf file, or fetch it with `meshnode pull {}`",
                model.0, model.0
            ))
        })?;
        let library = self.inner.library.clone();
        let name = model_name(&model.0);
        let opened = tokio::task::spawn_blocking(move || open_model(&library, &path, name))
            .await
            .map_err(|e| NodeError::Failed(format!("opening the model was interrupted: {e}")))??;
        self.inner.driver.input(Input::Holdings(self.inner.library.contents()));
        Ok(opened)
    }
}

/// A model file that was read, and what it is called.
struct Opened {
    name: String,
    held: Held,
    tokenizer: Arc<kernels::tokenizer::Tokenizer>,
    template: Option<Arc<kernels::chat_template::ChatTemplate>>,
}

impl Opened {
    fn spec(&self, options: &ModelOptions, gpus: bool) -> ModelSpec {
        ModelSpec {
            content: self.held.content,
            name: self.name.clone(),
            work: work(&self.held.file, options, gpus),
            width: self.held.file.config().width as u32,
            int8: options.is_int8(),
            eos: self.tokenizer.eos().to_vec(),
        }
    }
}

fn open_model(library: &Library, path: &std::path::Path, name: String) -> Result<Opened, NodeError> {
    let invalid = |e: &dyn std::fmt::Display| NodeError::Invalid(format!("{}: {e}", path.display()));
    let held = library.add(path).map_err(|e| invalid(&e))?;
    let tokenizer = Arc::new(held.file.tokenizer().map_err(|e| invalid(&e))?);
    let template = held.file.chat_template().ok().map(Arc::new);
    Ok(Opened { name, held, tokenizer, template })
}

/// The default context: enough for a conversation, small enough that caches of four requests stay below small models'
/// weights.
const CONTEXT_DEFAULT: u32 = 2048;
/// Requests at once unless told otherwise.
const SEQUENCES_DEFAULT: u32 = 4;

/// The same model run the same way.
fn is_same(a: &ModelSpec, b: &ModelSpec) -> bool {
    let run = |spec: &ModelSpec| (spec.content, spec.int8, spec.work.context, spec.work.sequences);
    run(a) == run(b)
}

/// What the planner has to know; `gpus`: some member computes on one.
fn work(file: &ModelFile, options: &ModelOptions, gpus: bool) -> partitioner::Work {
    let activations = if options.is_int8() { Activations::Int8 } else { Activations::F32 };
    let costs = file.costs(activations, gpus);
    let trained = u32::try_from(file.config().context).unwrap_or(u32::MAX);
    let context = options.context.unwrap_or(CONTEXT_DEFAULT).min(trained).max(1);
    let sequences = options.sequences.unwrap_or(SEQUENCES_DEFAULT).clamp(1, SEQUENCES_MAX);
    let row_bytes = file.config().width as u64 * 4;
    // What a stage keeps to send again: all rows of all sequences, up to the bound.
    let ring_bytes = RING_BYTES_MAX.min(row_bytes * u64::from(context) * u64::from(sequences));
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
        activation_bytes: row_bytes,
        context,
        sequences,
        scratch_bytes: crate::executor::SCRATCH_BYTES + ring_bytes,
    }
}

pub(crate) fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// `dir/SmolLM2-135M-Instruct.Q4_1.gguf` is served as `SmolLM2-135M-Instruct.Q4_1`, a folder of weights by its name, and a
/// cached name as itself.
fn model_name(reference: &str) -> String {
    let path = std::path::Path::new(reference);
    let folder = if path.ends_with(crate::pull::FOLDER_WEIGHTS) { path.parent() } else { Some(path) };
    if let Some(folder) = folder.filter(|folder| folder.join(crate::pull::FOLDER_WEIGHTS).is_file())
        && let Some(name) = folder.file_name()
    {
        return name.to_string_lossy().into_owned();
    }
    match path.extension() {
        Some(extension) if extension == "gguf" => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        _ => reference.to_owned(),
    }
}

#[cfg(test)]
mod tests;
