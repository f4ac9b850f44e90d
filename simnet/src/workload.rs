//! Callers of a mesh: a symbolic model served by one host, requests and cancellations, and their results.
//!
//! A workload uses `Input`s and `Event`s only, as the HTTP API does. Next: `checker/requests.rs`.
use crate::host::HostId;
use crate::world::{Notification, World};
use node_core::id::{CallId, ContentId, Epoch, JobId};
use node_core::input::Input;
use node_core::output::Event;
use node_core::time::{Duration, Instant};
use node_core::work::JobSpec;
use node_core::work::serve::{DoneReason, ModelSpec, Priority, Request, RequestKey, Sampled, Sampling};
use partitioner::{Experts, Layer, Work};
use std::collections::BTreeMap;

/// A model whose stages compute with hashes: `layers` blocks of `layer_bytes` each.
pub fn symbolic_model(layers: u32, layer_bytes: u64) -> ModelSpec {
    wide_model(layers, layer_bytes, WIDTH)
}

/// The same with three quarters of each layer in 16 experts, of which a row uses 2.
pub fn symbolic_mixture(layers: u32, layer_bytes: u64) -> ModelSpec {
    let mut model = symbolic_model(layers, layer_bytes);
    for layer in &mut model.work.layers {
        layer.experts = Some(Experts { bytes: layer_bytes / 4 * 3, count: 16, used: 2 });
    }
    model
}

/// The same as [`symbolic_model`] with rows of `width` elements.
pub fn wide_model(layers: u32, layer_bytes: u64, width: u32) -> ModelSpec {
    let layer = Layer {
        flops_per_token: 2 * layer_bytes,
        weight_bytes: layer_bytes,
        kv_bytes_per_token: crate::compute::POSITION_BYTES,
        window: None,
        experts: None,
    };
    ModelSpec {
        content: ContentId([0x5A; 32]),
        name: "symbolic".into(),
        work: Work {
            layers: vec![layer; layers as usize],
            embed_bytes: layer_bytes / 2,
            head_bytes: layer_bytes / 2,
            tied: false,
            head_flops: layer_bytes,
            activation_bytes: 4 * u64::from(width),
            coarser_bytes: Vec::new(),
            context: 4096,
            sequences: 8,
            scratch_bytes: 1 << 20,
        },
        width,
        boundary: Vec::new(),
        int8: true,
        eos: vec![crate::compute::VOCABULARY],
        replicas: 1,
        draft: None,
    }
}

/// One request and all events about it.
#[derive(Clone, Debug)]
pub struct Call {
    /// The request.
    pub request: Request,
    /// When it was sent.
    pub submitted: Instant,
    /// All tokens in order of arrival: (time, position, token).
    pub tokens: Vec<(Instant, u32, u32)>,
    /// All ends; the checker requires exactly one.
    pub ends: Vec<(Instant, DoneReason)>,
    /// The caller disconnected.
    pub cancelled: bool,
}

impl Call {
    /// Whether its caller's connection to the host broke or was closed: no later event reaches the caller.
    pub fn is_broken(&self) -> bool {
        matches!(self.ends.first(), Some((_, DoneReason::Failed(why))) if why == ENTRY_DIED)
    }

    /// The caller's longest wait for a token, the first one included.
    pub fn longest_pause(&self) -> Duration {
        let times = std::iter::once(self.submitted).chain(self.tokens.iter().map(|(at, ..)| *at));
        let next = self.tokens.iter().map(|(at, ..)| *at);
        times.zip(next).map(|(before, after)| after.since(before)).max().unwrap_or_default()
    }
}

/// One served model and its callers.
pub struct Workload {
    /// The entry node.
    pub entry: HostId,
    /// The model.
    pub model: ModelSpec,
    /// The job, once it was ready.
    pub job: Option<JobId>,
    /// The epoch that was last reported ready.
    pub epoch: Option<Epoch>,
    /// Requests by call.
    pub calls: BTreeMap<CallId, Call>,
    /// All other events of the entry node, for the messages of failing tests.
    pub notes: Vec<Notification>,
    /// The call that asked for the model last.
    deploy: CallId,
    /// The job that this call waits for, if it cannot be served yet.
    waits_for: Option<JobId>,
    next: u64,
}

impl Workload {
    /// Asks a host to serve the model.
    pub fn deploy(world: &mut World, head: HostId, model: ModelSpec) -> Self {
        let mut workload = Workload::of(head, model);
        workload.turn_to(world, head);
        workload
    }

    /// A model that is not served yet.
    pub fn of(head: HostId, model: ModelSpec) -> Self {
        Workload::of_entry(0, head, model)
    }

    /// The same for one of several entry nodes: their calls have different numbers.
    pub fn of_entry(entry: u32, head: HostId, model: ModelSpec) -> Self {
        let next = DEPLOY - 1 + u64::from(entry) * CALLS_OF_ENTRY;
        let (calls, notes) = (BTreeMap::new(), Vec::new());
        Workload {
            entry: head,
            model,
            job: None,
            epoch: None,
            calls,
            notes,
            deploy: CallId(next),
            waits_for: None,
            next,
        }
    }

    /// Runs until the model is served; `false` if that takes longer than `limit`.
    pub fn run_until_ready(&mut self, world: &mut World, limit: Duration) -> bool {
        self.run(world, limit, |workload, _| workload.job.is_some())
    }

    /// The entry node died, or its callers fail over: their connections are closed. Ends and returns all open calls.
    pub fn entry_died(&mut self, at: Instant) -> Vec<CallId> {
        (self.job, self.epoch, self.waits_for) = (None, None, None);
        let open = self.calls.iter_mut().filter(|(_, call)| call.ends.is_empty());
        open.map(|(id, call)| {
            call.ends.push((at, DoneReason::Failed(ENTRY_DIED.into())));
            *id
        })
        .collect()
    }

    /// Uses the job at the host that coordinates it now.
    pub fn follow(&mut self, head: HostId, job: JobId, epoch: Epoch) {
        (self.entry, self.job, self.epoch, self.waits_for) = (head, Some(job), Some(epoch), None);
    }

    /// Asks another host (or the same in a new life) to serve the model from now on.
    pub fn turn_to(&mut self, world: &mut World, head: HostId) {
        self.next += 1;
        self.entry = head;
        self.deploy = CallId(self.next);
        // A host serves only models whose files it has.
        world.give_model(head, self.model.content, self.model.work.layers.len() as u32);
        let (call, model) = (CallId(self.next), self.model.clone());
        world.inject(head, Input::Start { call, job: Box::new(JobSpec::Serve(model)) });
    }

    /// Sends a request under a new key.
    pub fn submit(&mut self, world: &mut World, request: Request) -> CallId {
        let key = RequestKey(u128::from(self.next + 1).to_be_bytes());
        self.submit_again(world, Request { key, ..request })
    }

    /// Sends a request again under its key: if it is still running, its result answers this call.
    pub fn submit_again(&mut self, world: &mut World, request: Request) -> CallId {
        self.next += 1;
        let call = CallId(self.next);
        let job = self.job.expect("requests are sent when the job is ready");
        let record =
            Call { request: request.clone(), submitted: world.now(), tokens: vec![], ends: vec![], cancelled: false };
        self.calls.insert(call, record);
        world.inject(self.entry, Input::Submit { call, job, request: Box::new(request) });
        call
    }

    /// The caller disconnects.
    pub fn cancel(&mut self, world: &mut World, call: CallId) {
        if let Some(record) = self.calls.get_mut(&call) {
            record.cancelled = true;
        }
        world.inject(self.entry, Input::Cancel { call });
    }

    /// Runs until `done`, checked each millisecond; `false` if that takes longer than `limit`.
    pub fn run(&mut self, world: &mut World, limit: Duration, mut done: impl FnMut(&Workload, &World) -> bool) -> bool {
        let end = world.now() + limit;
        loop {
            self.absorb(world);
            if done(self, world) {
                return true;
            }
            if world.now() >= end {
                return false;
            }
            world.run_for(LOOK);
        }
    }

    /// Runs until every request has ended.
    pub fn run_until_done(&mut self, world: &mut World, limit: Duration) -> bool {
        self.run(world, limit, |workload, _| workload.calls.values().all(|call| !call.ends.is_empty()))
    }

    /// The hosts of the stages, first to last.
    pub fn stages(&self, world: &World) -> Vec<HostId> {
        let node = world.host(self.entry).node.as_ref();
        let view = node.and_then(|node| node.jobs().find(|view| Some(view.job) == self.job));
        view.iter().flat_map(|view| &view.parts).filter_map(|part| world.host_of(part.owner)).collect()
    }

    /// Processes the events that nodes reported.
    pub fn absorb(&mut self, world: &mut World) {
        self.hear(world.take_notifications());
    }

    /// Processes reported events, where several workloads share a world.
    pub fn hear(&mut self, told: impl IntoIterator<Item = Notification>) {
        for told in told {
            if told.host != self.entry {
                continue;
            }
            match &told.event {
                Event::JobReady { call, job, epoch } => {
                    let known = self.job.or(self.waits_for) == Some(*job);
                    if known || *call == Some(self.deploy) {
                        (self.job, self.epoch) = (Some(*job), Some(*epoch));
                    }
                    self.notes.push(told);
                }
                Event::JobDegraded { call, job, .. } => {
                    if *call == Some(self.deploy) {
                        self.waits_for = Some(*job);
                    }
                    self.notes.push(told);
                }
                Event::Token { call, position, sampled: Sampled { token, .. } } => {
                    let (position, token) = (*position, *token);
                    if let Some(call) = self.calls.get_mut(call).filter(|call| !call.is_broken()) {
                        call.tokens.push((told.at, position, token));
                    }
                }
                Event::Done { call, reason } => {
                    if let Some(call) = self.calls.get_mut(call).filter(|call| !call.is_broken()) {
                        call.ends.push((told.at, reason.clone()));
                    }
                }
                Event::Begun { .. }
                | Event::PeerUp { .. }
                | Event::PeerDown { .. }
                | Event::PlanReady { .. }
                | Event::Fleet { .. }
                | Event::JobPlaced { .. }
                | Event::JobEnded { .. }
                | Event::Lost { .. }
                | Event::Standby { .. }
                | Event::Promoted { .. }
                | Event::JobMoves { .. }
                | Event::JobInherited { .. }
                | Event::Measured { .. }
                | Event::Steps { .. }
                | Event::Preempted { .. }
                | Event::GridPlan { .. }
                | Event::Rejected { .. } => self.notes.push(told),
            }
        }
    }
}

/// A greedy request whose prompt is drawn from `seed`.
pub fn request(seed: u64, prompt: u32, max_tokens: u32) -> Request {
    let prompt = (0..u64::from(prompt)).map(|i| {
        let mixed = (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(i.wrapping_mul(0xBF58_476D_1CE4_E5B9));
        (mixed >> 33) as u32 % crate::compute::VOCABULARY
    });
    let key = RequestKey([0; 16]);
    Request {
        prompt: prompt.collect(),
        max_tokens,
        sampling: Sampling::GREEDY,
        ignore_eos: false,
        priority: Priority::Interactive,
        key,
    }
}

/// The reason of calls that ended with their host.
pub const ENTRY_DIED: &str = "the node that took the request died";
/// Row width of symbolic models: rows as large on the wire as a small model's.
pub const WIDTH: u32 = 576;
/// The call of `deploy`; requests are numbered from it.
pub(crate) const DEPLOY: u64 = 1000;
/// Numbers for the calls of one entry node.
const CALLS_OF_ENTRY: u64 = 10_000;
/// Check interval.
const LOOK: Duration = Duration::from_millis(1);
