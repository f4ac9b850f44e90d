//! The stage side of placing jobs: which stage this node holds under which epoch, and the fence around it.
//!
//! A higher epoch is adopted, and everything under the lower one stops before its stage is loaded; a lower one is
//! refused with `Stale { mine }`. Only the head of a job mints its epochs, so `epoch.minter` is the head.
//! Next: `pipeline.rs`.
use crate::id::{Epoch, JobId, LoadId, NodeId, RequestId};
use crate::limits::{CONTEXT_MAX, JOBS_MAX, ORPHAN_MAX, RING_BYTES_MAX, SEQUENCES_MAX};
use crate::message::Message;
use crate::pipeline::Route;
use crate::planted::{self, Planted};
use crate::time::Instant;
use crate::work::serve::{LoadedStage, Prepare, StageSpec};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::{format, string::String, vec::Vec};

/// What placement wants done.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacementOutput {
    /// Put this stage in memory.
    Load { job: JobId, epoch: Epoch, load: LoadId, stage: Box<StageSpec> },
    /// The stage stays as it is under this epoch: weights, caches.
    Keep { job: JobId, epoch: Epoch, load: LoadId, stage: Box<StageSpec> },
    /// Have this stage's weights on disk.
    Fetch { job: JobId, epoch: Epoch, stage: Box<StageSpec> },
    /// Drop the job's stage.
    Unload { job: JobId },
    /// Stop the job's pipeline before anything else happens under its old epoch.
    Fence { job: JobId },
    /// Stop the job's pipeline, but keep what it computed.
    Quiesce { job: JobId },
    /// The stage is resident: its pipeline may run.
    Install { job: JobId, route: Route },
    /// The stage that was quiesced is resident still, under another route.
    Reroute { job: JobId, route: Route },
    /// Every stage is ready: the pipeline runs.
    Go { job: JobId, resume: Vec<(RequestId, u32)> },
    /// Tell the head that the stage is resident, and what its caches hold.
    Ready { job: JobId, epoch: Epoch, bytes: u64 },
    /// Exchange heartbeats about the job with these nodes, and no others.
    Watch { job: JobId, epoch: Epoch, nodes: Vec<NodeId> },
    /// No heartbeats about the job any more.
    Unwatch { job: JobId },
    /// A message to a peer.
    Message { to: NodeId, message: Message },
    /// Something was refused, for the log.
    Refused { from: NodeId, what: String },
}

/// Whether a frame or message of some epoch may act on a job's stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Its epoch is ours, and the stage is resident.
    Current,
    /// Its epoch is lower: answer `Stale` with ours.
    Stale(Epoch),
    /// Its epoch is ours or higher, but no stage is ready for it. The head prepares one or finds out.
    NotReady,
    /// This node holds no stage of the job.
    Unknown,
}

/// A stage this node holds, for status pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldStage {
    /// Of which job.
    pub job: JobId,
    /// Under which epoch.
    pub epoch: Epoch,
    /// Model name.
    pub name: String,
    /// Layers `start..end`.
    pub layers: core::ops::Range<u32>,
    /// Held as a standby.
    pub standby: bool,
    /// Bytes resident; none while it loads or after it failed.
    pub bytes: Option<u64>,
}

/// The stages this node was asked to hold, one per job.
///
/// Invariants: a job's epoch only grows here; the pipeline is fenced before the epoch changes; at most `JOBS_MAX` jobs.
#[derive(Debug)]
pub struct Placement {
    me: NodeId,
    held: BTreeMap<JobId, Held>,
    /// Weights that heads want here before they move their jobs; at most `JOBS_MAX`.
    fetches: BTreeMap<JobId, Fetch>,
    /// Takes no new work (drain, leave).
    draining: bool,
    loads: u64,
    out: VecDeque<PlacementOutput>,
}

#[derive(Debug)]
struct Held {
    epoch: Epoch,
    /// The order whose answer is awaited, or came last.
    load: LoadId,
    prepare: Prepare,
    state: State,
    /// Every stage of the route is ready: neighbours may be expected to send heartbeats.
    gone: bool,
    /// When the head was last heard about this job.
    head_heard: Instant,
}

/// Weights to be had for a stage that is not asked for yet.
#[derive(Debug)]
struct Fetch {
    epoch: Epoch,
    prepare: Prepare,
    /// How it ended, once it has.
    result: Option<Result<u64, String>>,
}

#[derive(Debug)]
enum State {
    /// `kept`: resident under a former epoch, and to stay.
    Loading {
        kept: bool,
    },
    Resident {
        bytes: u64,
    },
    Failed {
        reason: String,
    },
}

impl Held {
    /// The job's head: only it mints epochs for a model job.
    fn head(&self) -> NodeId {
        self.epoch.minter
    }

    fn layers(&self) -> core::ops::Range<u32> {
        self.prepare.route[usize::from(self.prepare.stage)].1.clone()
    }

    /// Whether what is resident is what is asked for now: the same layers with the same room, whatever the neighbours.
    fn may_stay(&self, next: &Prepare) -> bool {
        let resident = matches!(self.state, State::Resident { .. } | State::Loading { kept: true });
        let old = &self.prepare;
        let same_room = (old.sequences, old.context, old.width, old.int8, old.content)
            == (next.sequences, next.context, next.width, next.int8, next.content);
        let same_model = old.route.last().map(|(_, layers)| layers.end) == next.route.last().map(|(_, l)| l.end);
        resident && same_room && same_model && self.layers() == next.route[usize::from(next.stage)].1
    }
}

impl Placement {
    /// No stages yet.
    pub fn new(me: NodeId) -> Self {
        Placement {
            me,
            held: BTreeMap::new(),
            fetches: BTreeMap::new(),
            draining: false,
            loads: 0,
            out: VecDeque::new(),
        }
    }

    /// May a frame or message of this epoch act on the job's stage?
    pub fn admit(&self, job: JobId, epoch: Epoch) -> Admission {
        match self.held.get(&job) {
            None => Admission::Unknown,
            Some(held) if epoch < held.epoch && !planted::has(Planted::EpochCheckLeftOut) => {
                Admission::Stale(held.epoch)
            }
            Some(held) if epoch > held.epoch => Admission::NotReady,
            Some(Held { state: State::Resident { .. } | State::Failed { .. }, .. }) => Admission::Current,
            Some(Held { state: State::Loading { .. }, .. }) => Admission::NotReady,
        }
    }

    /// The head asks this node to hold a stage. `wedged` says why the executor would not get to it, if it would not.
    pub fn handle_prepare(
        &mut self,
        now: Instant,
        from: NodeId,
        job: JobId,
        epoch: Epoch,
        prepare: Prepare,
        wedged: Option<String>,
    ) {
        if let Some(what) = self.unsound(from, job, epoch, &prepare) {
            self.out.push_back(PlacementOutput::Refused { from, what: what.clone() });
            return self.answer(from, job, epoch, Err(what));
        }
        let resident_before = match self.held.get_mut(&job) {
            Some(held) if epoch < held.epoch => {
                let message = Message::Stale { job, mine: held.epoch };
                return self.out.push_back(PlacementOutput::Message { to: from, message });
            }
            Some(held) if epoch == held.epoch => {
                held.head_heard = now;
                return self.repeat_answer(job);
            }
            Some(held) => Some((matches!(held.state, State::Failed { .. }), held.may_stay(&prepare))),
            None => None,
        };
        if self.draining && !self.held.contains_key(&job) {
            return self.answer(from, job, epoch, Err(format!("node {} takes no new work", self.me)));
        }
        if let Some(reason) = wedged {
            return self.answer(from, job, epoch, Err(reason));
        }
        let kept = resident_before.is_some_and(|(_, stays)| stays);
        if let Some((failed, stays)) = resident_before {
            if !planted::has(Planted::NoFence) {
                self.out.push_back(if stays {
                    PlacementOutput::Quiesce { job }
                } else {
                    PlacementOutput::Fence { job }
                });
            }
            if failed {
                // A device that failed keeps nothing worth reusing.
                self.out.push_back(PlacementOutput::Unload { job });
            }
        }
        let stage = Box::new(spec(self.me, epoch.minter, &prepare));
        self.loads += 1;
        let load = LoadId(self.loads);
        let held = Held { epoch, load, prepare, state: State::Loading { kept }, gone: false, head_heard: now };
        self.held.insert(job, held);
        self.fetches.remove(&job);
        self.watch(job);
        let output = if kept {
            PlacementOutput::Keep { job, epoch, load, stage }
        } else {
            PlacementOutput::Load { job, epoch, load, stage }
        };
        self.out.push_back(output);
    }

    /// Why a `Prepare` cannot be meant, if it cannot.
    fn unsound(&self, from: NodeId, job: JobId, epoch: Epoch, prepare: &Prepare) -> Option<String> {
        let layers_end = prepare
            .route
            .iter()
            .try_fold(0, |end, (_, layers)| (layers.start == end && layers.end > layers.start).then_some(layers.end));
        let mine = prepare.route.get(usize::from(prepare.stage));
        if from != epoch.minter {
            Some(format!("epoch minted by {} but sent by {from}: only the head places its job", epoch.minter))
        } else if let Some(held) = self.held.get(&job).filter(|held| held.head() != from) {
            Some(format!("{} is the head of this job, not {from}", held.head()))
        } else if layers_end.is_none() || prepare.route.is_empty() {
            Some(String::from("a route whose stages do not cover the layers once, in order"))
        } else if mine.is_none_or(|(node, _)| (*node == self.me) == prepare.standby) {
            Some(format!("stage {} of the route is not this node's to {}", prepare.stage, prepare.task()))
        } else if prepare.sequences == 0 || prepare.sequences > SEQUENCES_MAX {
            Some(format!("{} sequences, expected 1 to {SEQUENCES_MAX}", prepare.sequences))
        } else if prepare.context == 0 || prepare.context > CONTEXT_MAX {
            Some(format!("a context of {}, expected 1 to {CONTEXT_MAX}", prepare.context))
        } else if self.held.len() >= JOBS_MAX && !self.held.contains_key(&job) {
            Some(format!("already part of {JOBS_MAX} jobs"))
        } else {
            None
        }
    }

    fn answer(&mut self, to: NodeId, job: JobId, epoch: Epoch, result: Result<u64, String>) {
        let message = Message::Prepared { job, epoch, result, held: Vec::new() };
        self.out.push_back(PlacementOutput::Message { to, message });
    }

    /// The same `Prepare` again: the answer was lost with a connection, unless there is none yet.
    fn repeat_answer(&mut self, job: JobId) {
        let Some(held) = self.held.get(&job) else { return };
        let (to, epoch) = (held.head(), held.epoch);
        match &held.state {
            State::Loading { .. } => {}
            State::Resident { bytes } => {
                let bytes = *bytes;
                self.out.push_back(PlacementOutput::Ready { job, epoch, bytes });
            }
            State::Failed { reason } => {
                let reason = reason.clone();
                self.answer(to, job, epoch, Err(reason));
            }
        }
    }

    /// The head asks for the weights of a stage that it wants here soon.
    pub fn handle_fetch(&mut self, from: NodeId, job: JobId, epoch: Epoch, prepare: Prepare) {
        if let Some(known) = self.fetches.get(&job).filter(|known| known.epoch == epoch && known.prepare == prepare) {
            if let Some(result) = known.result.clone() {
                self.say_fetched(job, epoch, result); // the answer was lost with a connection
            }
            return;
        }
        let mut refusal = self.unsound(from, job, epoch, &prepare).or_else(|| {
            let stale = self.held.get(&job).is_some_and(|held| epoch < held.epoch);
            stale.then(|| format!("epoch {} of the job is over", epoch.counter))
        });
        if refusal.is_none() && self.draining {
            refusal = Some(format!("node {} takes no new work", self.me));
        }
        if refusal.is_none() && self.fetches.len() >= JOBS_MAX && !self.fetches.contains_key(&job) {
            refusal = Some(format!("already asked for the weights of {JOBS_MAX} jobs"));
        }
        if let Some(what) = refusal {
            self.out.push_back(PlacementOutput::Refused { from, what: what.clone() });
            let message = Message::Fetched { job, epoch, result: Err(what) };
            return self.out.push_back(PlacementOutput::Message { to: from, message });
        }
        let stage = Box::new(spec(self.me, epoch.minter, &prepare));
        self.fetches.insert(job, Fetch { epoch, prepare, result: None });
        self.out.push_back(PlacementOutput::Fetch { job, epoch, stage });
    }

    /// The weights are there, or cannot be had.
    pub fn handle_fetched(&mut self, job: JobId, epoch: Epoch, result: Result<u64, String>) {
        if let Some(fetch) = self.fetches.get_mut(&job).filter(|fetch| fetch.epoch == epoch) {
            fetch.result = Some(result.clone());
            self.say_fetched(job, epoch, result);
        }
    }

    fn say_fetched(&mut self, job: JobId, epoch: Epoch, result: Result<u64, String>) {
        let message = Message::Fetched { job, epoch, result };
        self.out.push_back(PlacementOutput::Message { to: epoch.minter, message });
    }

    /// The executor loaded a stage, or could not.
    pub fn handle_loaded(&mut self, job: JobId, load: LoadId, result: Result<LoadedStage, String>) {
        let Some(held) = self.held.get_mut(&job).filter(|held| held.load == load) else { return };
        let epoch = held.epoch;
        match result {
            Ok(LoadedStage { bytes }) => {
                let stays = matches!(held.state, State::Loading { kept: true });
                held.state = State::Resident { bytes };
                let route = route(self.me, epoch, &held.prepare);
                self.out.push_back(match stays {
                    true => PlacementOutput::Reroute { job, route },
                    false => PlacementOutput::Install { job, route },
                });
            }
            Err(reason) => held.state = State::Failed { reason },
        }
        self.repeat_answer(job);
    }

    /// The executor failed while running: nothing of the stage is to be trusted.
    pub fn handle_stage_failed(&mut self, job: JobId, epoch: Epoch, reason: &str) {
        if let Some(held) = self.held.get_mut(&job).filter(|held| held.epoch == epoch) {
            held.state = State::Failed { reason: reason.into() };
        }
    }

    /// Every stage of the route is ready.
    pub fn handle_go(&mut self, now: Instant, from: NodeId, job: JobId, epoch: Epoch, resume: Vec<(RequestId, u32)>) {
        let Some(held) = self.held.get_mut(&job).filter(|held| held.epoch == epoch && held.head() == from) else {
            return;
        };
        held.head_heard = now;
        held.gone = true;
        self.watch(job);
        self.out.push_back(PlacementOutput::Go { job, resume });
    }

    /// The head ended the job.
    pub fn handle_end(&mut self, from: NodeId, job: JobId, epoch: Epoch) {
        self.fetches.retain(|fetched, fetch| *fetched != job || fetch.epoch.minter != from);
        if self.held.get(&job).is_some_and(|held| held.head() == from && epoch >= held.epoch) {
            self.drop_job(job);
        }
    }

    /// A node said goodbye, or is dead as far as the mesh knows: jobs of which it was the head are over.
    pub fn handle_head_gone(&mut self, node: NodeId) {
        if planted::has(Planted::OrphansStay) {
            return;
        }
        self.fetches.retain(|_, fetch| fetch.epoch.minter != node);
        let jobs: Vec<JobId> = self.held.iter().filter(|(_, held)| held.head() == node).map(|(&job, _)| job).collect();
        jobs.into_iter().for_each(|job| self.drop_job(job));
    }

    /// Another stage knows a higher epoch of the job: what runs here is out of date. The weights stay until the head asks
    /// for them again or has been silent for too long. The head itself knows its epochs best.
    pub fn handle_stale(&mut self, from: NodeId, job: JobId, theirs: Epoch) {
        let outdated = |held: &Held| {
            let takes_part = held.head() == from || held.prepare.route.iter().any(|(node, _)| *node == from);
            takes_part && held.head() != self.me && held.head() == theirs.minter && held.epoch < theirs
        };
        if self.held.get(&job).is_some_and(outdated) {
            self.out.push_back(PlacementOutput::Fence { job });
        }
    }

    /// The head gave a sign of life about the job under this epoch; whether that is the epoch held here.
    pub fn head_heard(&mut self, now: Instant, from: NodeId, job: JobId, epoch: Epoch) -> bool {
        match self.held.get_mut(&job).filter(|held| held.head() == from && held.epoch == epoch) {
            Some(held) => held.head_heard = now,
            None => return false,
        }
        true
    }

    /// Takes no new stages while set.
    pub fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// Drops stages whose head has been silent for too long.
    pub fn handle_wakeup(&mut self, now: Instant) {
        let orphaned = |held: &Held| held.head() != self.me && now.since(held.head_heard) >= ORPHAN_MAX;
        let orphans: Vec<JobId> = self.held.iter().filter(|(_, held)| orphaned(held)).map(|(&job, _)| job).collect();
        for job in orphans.into_iter().filter(|_| !planted::has(Planted::OrphansStay)) {
            self.drop_job(job);
        }
    }

    /// When the next stage would be an orphan.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let drops = |held: &&Held| held.head() != self.me && !planted::has(Planted::OrphansStay);
        let others = self.held.values().filter(drops);
        others.map(|held| held.head_heard + ORPHAN_MAX).min().map(|at| (at, "placement: a job's head is silent"))
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<PlacementOutput> {
        self.out.pop_front()
    }

    /// The head of a job this node holds a stage of, and the epoch.
    pub fn head_of(&self, job: JobId) -> Option<(NodeId, Epoch)> {
        self.held.get(&job).map(|held| (held.head(), held.epoch))
    }

    /// What this node holds.
    pub fn stages(&self) -> impl Iterator<Item = HeldStage> + '_ {
        self.held.iter().map(|(&job, held)| HeldStage {
            job,
            epoch: held.epoch,
            name: held.prepare.name.clone(),
            layers: held.layers(),
            standby: held.prepare.standby,
            bytes: match held.state {
                State::Resident { bytes } => Some(bytes),
                State::Loading { .. } | State::Failed { .. } => None,
            },
        })
    }

    fn drop_job(&mut self, job: JobId) {
        let headed_here = self.held.remove(&job).is_some_and(|held| held.head() == self.me);
        self.out.push_back(PlacementOutput::Fence { job });
        if !headed_here {
            self.out.push_back(PlacementOutput::Unwatch { job });
        }
        self.out.push_back(PlacementOutput::Unload { job });
    }

    /// The head is watched from `Prepare` on; the stages beside this one from `Go` on, because before that they may not
    /// have heard of the job. A node that is the head itself watches all stages as such.
    fn watch(&mut self, job: JobId) {
        let Some(held) = self.held.get(&job).filter(|held| held.head() != self.me) else { return };
        let at = usize::from(held.prepare.stage);
        let beside = [at.checked_sub(1), Some(at + 1)].into_iter().flatten();
        let watches = held.gone && !held.prepare.standby;
        let beside = beside.filter_map(|i| held.prepare.route.get(i)).map(|&(node, _)| node).filter(|_| watches);
        let mut nodes: Vec<NodeId> = core::iter::once(held.head()).chain(beside).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let epoch = held.epoch;
        self.out.push_back(PlacementOutput::Watch { job, epoch, nodes });
    }
}

fn spec(me: NodeId, head: NodeId, prepare: &Prepare) -> StageSpec {
    let others = prepare.route.iter().map(|&(node, _)| node).filter(|&node| node != head && node != me);
    StageSpec {
        content: prepare.content,
        name: prepare.name.clone(),
        layers: prepare.route[usize::from(prepare.stage)].1.clone(),
        layers_total: prepare.route.last().map_or(0, |(_, layers)| layers.end),
        stage: prepare.stage,
        sequences: prepare.sequences,
        context: prepare.context,
        width: prepare.width,
        int8: prepare.int8,
        bytes_max: prepare.bytes_max,
        sources: core::iter::once(head).chain(others).collect(),
    }
}

fn route(me: NodeId, epoch: Epoch, prepare: &Prepare) -> Route {
    let at = usize::from(prepare.stage);
    debug_assert!((prepare.route[at].0 == me) != prepare.standby, "checked when it was prepared");
    Route {
        epoch,
        head: epoch.minter,
        stage: prepare.stage,
        previous: at.checked_sub(1).map_or(epoch.minter, |i| prepare.route[i].0),
        next: prepare.route.get(at + 1).map(|&(node, _)| node),
        sequences: prepare.sequences,
        context: prepare.context,
        stages: u32::try_from(prepare.route.len()).unwrap_or(u32::MAX),
        ring_rows: RING_BYTES_MAX / (4 * u64::from(prepare.width.max(1))),
        shadow: prepare.standby,
    }
}
