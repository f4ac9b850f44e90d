//! The tiles of simulations that this node computes, of its own jobs and of others': steps, halos, states put aside.
//!
//! Steps are counted, and everything names the step it belongs to. Between two exchanges a tile computes a cycle: it begins
//! when the strips of all neighbours for its present step are here, makes its own strips first, and keeps them until nobody
//! can ask for them any more. Whoever takes a tile over begins at the step of its copy and is sent what followed. One rule
//! serves losses, standbys and broken connections: who receives says which step it holds, who sends goes on from there.
//! A standby runs the same tile in the shadow, or holds a snapshot. Next: `work/steps.rs`, `tiles/run.rs`, `tiles/log.rs`,
//! then `tiles/grids.rs`, the coordinator's side.
mod grids;
mod log;
pub mod message;
mod run;
mod shadow;
mod succession;

pub use grids::{GridJobView, GridOutput, GridState, Grids, TileView};

use crate::id::{Epoch, JobId, LoadId, NodeId, TensorId, WorkId};
use crate::limits::{EPOCHS_FORGOTTEN_MAX, JOBS_MAX, ORPHAN_MAX, TILE_BEGINS, TILE_HELD, TILE_PROGRESS};
use crate::message::{FrameHeader, Message};
use crate::time::{Duration, Instant};
use crate::work::steps::{Inheritance, SaveKind, SimulationId, TileLoaded, TileMade, TileOrder, TileStart, TileWork};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{boxed::Box, format, string::String, vec::Vec};
use log::Feed;
use message::TileMessage;
use partitioner::tiles::Block;
use run::{Names, State, TILES_TAG, TileRun};
use succession::Succession;

/// What the tiles want done.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TilesOutput {
    /// Make a tile, with cells as its order says (answer: `handle_loaded`).
    Load { job: JobId, epoch: Epoch, load: LoadId, order: Box<TileOrder> },
    /// Give a tile the cells of a snapshot that was collected (answer: `handle_loaded`).
    Restore { job: JobId, load: LoadId, tile: u16, step: u32 },
    /// The tile goes on under another epoch.
    Keep { job: JobId, epoch: Epoch, tile: u16 },
    /// Compute, within `budget` (answers: `handle_strips`, `handle_made`).
    Run { run: Box<TileWork>, budget: Duration },
    /// A run came back.
    Returned { job: JobId },
    /// Fetch a state that another node put aside (answer: `handle_collected`).
    Collect { job: JobId, from: NodeId, tile: u16, step: u32, kind: SaveKind, bytes: u64 },
    /// A state that was put aside, or collected, is of no use any more.
    Forget { job: JobId, tile: u16, step: u32, kind: SaveKind },
    /// A tile is given up.
    Drop { job: JobId, tile: u16 },
    /// All tiles of a job are.
    Unload { job: JobId },
    /// A strip for a neighbour, or a copy for its standby.
    Frame { to: NodeId, header: FrameHeader, tensor: TensorId, copy: bool },
    /// Drop a strip.
    Discard { tensor: TensorId },
    /// The coordinator is silent, and this node's turn has come: take the job over.
    Succeed(Box<Inheritance>),
    /// Fetch the coordinator's checkpoint, in these parts of at most so many bytes (answer: `handle_mirrored`).
    Mirror { job: JobId, from: NodeId, step: u32, parts: Vec<(Block, u64)>, simulation: SimulationId },
    /// A message under an epoch.
    Message { to: NodeId, job: JobId, epoch: Epoch, say: TileMessage },
    /// Somebody's epoch is out of date.
    Stale { to: NodeId, job: JobId, mine: Epoch },
    /// Exchange heartbeats with these.
    Watch { job: JobId, epoch: Epoch, nodes: Vec<NodeId> },
    /// No more.
    Unwatch { job: JobId },
    /// For the log.
    Refused { from: NodeId, what: String },
}

/// All tiles of this node.
#[derive(Debug)]
pub struct Tiles {
    me: NodeId,
    jobs: BTreeMap<JobId, Held>,
    loads: u64,
    works: u64,
    tensors: u64,
    draining: bool,
    /// When standbys and owners say next how far they are.
    held_at: Instant,
    progress_at: Instant,
    out: VecDeque<TilesOutput>,
}

/// The tiles of one job.
#[derive(Debug)]
struct Held {
    epoch: Epoch,
    /// Until when progress is told often: it has just begun, or goes on after a loss.
    begins_until: Instant,
    coordinator_heard: Instant,
    succession: Succession,
    runs: BTreeMap<u16, TileRun>,
}

impl Held {
    fn new(now: Instant, epoch: Epoch) -> Self {
        let (succession, runs) = (Succession::default(), BTreeMap::new());
        Held { epoch, begins_until: now, coordinator_heard: now, succession, runs }
    }

    /// The coordinator gave a sign of life.
    fn heard(&mut self, now: Instant) {
        self.coordinator_heard = now;
        self.succession.heard();
    }

    /// Whether a node may mint epochs of the job, as far as its tiles here know.
    fn obeys(&self, node: NodeId) -> bool {
        self.epoch.minter == node || self.runs.values().any(|run| run.order.names(node))
    }
}

/// Whether a successor claims an epoch that no coordinator can have minted meanwhile: it would leave none to the next.
fn leaps(mine: Epoch, theirs: Epoch) -> bool {
    theirs.counter.saturating_sub(mine.counter) > EPOCHS_FORGOTTEN_MAX
}

/// A tile as it is held, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldTile {
    /// Whose.
    pub job: JobId,
    /// Its name.
    pub name: String,
    /// Under which placement.
    pub epoch: Epoch,
    /// Which tile.
    pub tile: u16,
    /// This node stands by for it.
    pub standby: bool,
    /// Steps made.
    pub step: u32,
    /// Steps in all.
    pub steps: u32,
    /// Bytes it takes.
    pub bytes: u64,
}

impl Tiles {
    /// None yet.
    pub fn new(me: NodeId) -> Self {
        Tiles {
            me,
            jobs: BTreeMap::new(),
            loads: 0,
            works: 0,
            tensors: 0,
            draining: false,
            held_at: Instant::default(),
            progress_at: Instant::default(),
            out: VecDeque::new(),
        }
    }

    /// What this node holds.
    pub fn held(&self) -> impl Iterator<Item = HeldTile> + '_ {
        self.jobs.iter().flat_map(|(&job, held)| {
            held.runs.values().map(move |run| HeldTile {
                job,
                name: run.order.name.clone(),
                epoch: held.epoch,
                tile: run.tile(),
                standby: run.is_shadow(),
                step: run.step,
                steps: run.order.schedule.steps,
                bytes: run.bytes,
            })
        })
    }

    /// The coordinator of a job this node holds tiles of, and the epoch.
    pub fn coordinator_of(&self, job: JobId) -> Option<(NodeId, Epoch)> {
        self.jobs.get(&job).map(|held| (held.epoch.minter, held.epoch))
    }

    /// Takes no new tiles while set.
    pub fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<TilesOutput> {
        self.out.pop_front()
    }

    // ---- what the coordinator says

    /// A message about a job of which this node may hold tiles.
    pub fn handle_message(&mut self, now: Instant, from: NodeId, job: JobId, epoch: Epoch, say: TileMessage) {
        match say {
            TileMessage::Prepare(order) => return self.prepare(now, from, job, epoch, order),
            TileMessage::End => return self.ended(from, job, epoch),
            TileMessage::Go { .. }
            | TileMessage::Held { .. }
            | TileMessage::Gap { .. }
            | TileMessage::WantSnapshot { .. }
            | TileMessage::Saved { .. }
            | TileMessage::Taken { .. }
            | TileMessage::Release { .. }
            | TileMessage::Will(_)
            | TileMessage::Orphaned => {}
            // For the coordinator, which the router asks first.
            TileMessage::Prepared { .. }
            | TileMessage::Progress { .. }
            | TileMessage::Report { .. }
            | TileMessage::Failed { .. } => return,
        }
        if !self.is_admitted(now, from, job, epoch) {
            return;
        }
        match say {
            TileMessage::Go { at } => self.go(now, from, job, &at),
            TileMessage::Held { tile, to, step, live, again } => {
                self.neighbour_held(from, job, Feeding { tile, to, step, live, again });
            }
            TileMessage::Gap { tile, from: _ } => self.gap(now, job, tile),
            TileMessage::WantSnapshot { tile } => {
                if let Some(run) = self.run(job, tile).filter(|run| !run.is_shadow() && run.wanted_by.len() < 4) {
                    run.wanted_by.insert(from);
                }
            }
            TileMessage::Saved { tile, step, kind, bytes } => self.snapshot_made(job, from, tile, step, kind, bytes),
            TileMessage::Taken { tile, step, kind } => {
                if let Some(run) = self.jobs.get_mut(&job).and_then(|held| held.runs.get_mut(&tile)) {
                    run.taken(job, step, kind, &mut self.out);
                }
                self.go_on(now, job);
            }
            TileMessage::Release { tile } if from == epoch.minter => self.release(job, tile),
            TileMessage::Release { .. } => {}
            TileMessage::Will(will) => self.willed(now, from, job, will),
            TileMessage::Orphaned => self.voiced(now, from, job),
            TileMessage::Prepare(_)
            | TileMessage::End
            | TileMessage::Prepared { .. }
            | TileMessage::Progress { .. }
            | TileMessage::Report { .. }
            | TileMessage::Failed { .. } => {}
        }
    }

    /// Whether a message or frame of this epoch may act on the job's tiles; a lower epoch is told the present one.
    fn is_admitted(&mut self, now: Instant, from: NodeId, job: JobId, epoch: Epoch) -> bool {
        match self.jobs.get_mut(&job) {
            Some(held) if held.epoch == epoch => {
                if from == epoch.minter {
                    held.heard(now);
                }
                true
            }
            Some(held) if epoch < held.epoch => {
                self.out.push_back(TilesOutput::Stale { to: from, job, mine: held.epoch });
                false
            }
            Some(_) | None => false,
        }
    }

    fn prepare(&mut self, now: Instant, from: NodeId, job: JobId, epoch: Epoch, order: Box<TileOrder>) {
        let tile = order.tile;
        let known = self.jobs.get(&job).map(|held| held.epoch);
        if let Some(mine) = known.filter(|mine| epoch < *mine) {
            return self.out.push_back(TilesOutput::Stale { to: from, job, mine });
        }
        let refusal = if from != epoch.minter {
            Some(format!("epoch minted by {} but sent by {from}", epoch.minter))
        } else if self.jobs.get(&job).is_some_and(|held| !held.obeys(epoch.minter)) {
            Some(format!("{from} is not among those who may coordinate job {:016x}", job.0))
        } else if known.is_some_and(|mine| mine.minter != from && leaps(mine, epoch)) {
            Some(format!("epoch {} of job {:016x} cannot have been reached", epoch.counter, job.0))
        } else if known.is_none() && self.draining {
            Some(format!("node {} takes no new work", self.me))
        } else if known.is_none() && self.jobs.len() >= JOBS_MAX {
            Some(format!("already part of {JOBS_MAX} simulations"))
        } else {
            order.unsound(self.me)
        };
        if let Some(what) = refusal {
            self.out.push_back(TilesOutput::Refused { from, what: what.clone() });
            return self.say(epoch.minter, job, epoch, TileMessage::Prepared { tile, result: Err(what) });
        }
        let held = self.jobs.entry(job).or_insert_with(|| Held::new(now, epoch));
        held.heard(now);
        if held.epoch < epoch {
            held.epoch = epoch;
            held.succession.replaced();
            held.runs.values_mut().for_each(|run| run.pause(&mut self.out));
            // All begin anew: what was held under the cut before would take the room of what comes.
            if matches!(order.start, TileStart::Initial | TileStart::Checkpoint { .. }) {
                for (tile, mut run) in core::mem::take(&mut held.runs) {
                    run.end(job, &mut self.out);
                    self.out.push_back(TilesOutput::Drop { job, tile });
                }
            }
        }
        let nodes = if epoch.minter == self.me { Vec::new() } else { alloc::vec![epoch.minter] };
        if epoch.minter != self.me {
            self.out.push_back(TilesOutput::Watch { job, epoch, nodes });
        }
        let before = held.runs.remove(&tile);
        match before {
            // Asked again: the answer was lost, or there is none yet.
            Some(mut run) if run.epoch == epoch && run.order == order => {
                run.answer_due = true;
                held.runs.insert(tile, run);
                self.answer(job, tile);
            }
            Some(run) if matches!(order.start, TileStart::Continue | TileStart::Snapshot) && may_stay(&run, &order) => {
                self.keep(now, job, epoch, run, order);
            }
            before => {
                if let Some(mut run) = before {
                    // With what a run that is under way puts aside.
                    run.end(job, &mut self.out);
                    self.out.push_back(TilesOutput::Drop { job, tile });
                }
                if order.start == TileStart::Continue {
                    let what = String::from("this node does not have the tile");
                    self.out.push_back(TilesOutput::Drop { job, tile });
                    return self.say(epoch.minter, job, epoch, TileMessage::Prepared { tile, result: Err(what) });
                }
                self.loads += 1;
                let load = LoadId(self.loads);
                let mut run = TileRun::new(now, epoch, order.clone(), State::Loading(load));
                run.answer_due = true;
                if let Some(held) = self.jobs.get_mut(&job) {
                    held.runs.insert(tile, run);
                }
                self.out.push_back(TilesOutput::Load { job, epoch, load, order });
            }
        }
    }

    /// A tile that is here is asked for under another epoch, or in another role.
    fn keep(&mut self, now: Instant, job: JobId, epoch: Epoch, mut run: TileRun, order: Box<TileOrder>) {
        let tile = order.tile;
        let promoted = run.is_shadow() && order.standby.is_none();
        (run.order, run.epoch, run.answer_due) = (order, epoch, true);
        self.out.push_back(TilesOutput::Keep { job, epoch, tile });
        match run.state {
            State::Holding { step, .. } if promoted => {
                self.loads += 1;
                let load = LoadId(self.loads);
                run.state = State::Loading(load);
                self.out.push_back(TilesOutput::Restore { job, load, tile, step });
            }
            State::Wanting { .. } => run.state = State::Wanting { since: now },
            State::Holding { .. }
            | State::Fetching { .. }
            | State::Loading(_)
            | State::Ready
            | State::Running
            | State::Failed(_) => {}
        }
        if let Some(held) = self.jobs.get_mut(&job) {
            held.runs.insert(tile, run);
        }
        self.answer(job, tile);
    }

    /// Says what a tile has, if it can be said now.
    fn answer(&mut self, job: JobId, tile: u16) {
        let Some(run) = self.jobs.get_mut(&job).and_then(|held| held.runs.get_mut(&tile)) else { return };
        let result = match &run.state {
            State::Loading(_) => return,
            State::Ready | State::Running if run.is_busy() => return,
            State::Failed(reason) => Err(reason.clone()),
            State::Ready | State::Running | State::Wanting { .. } | State::Fetching { .. } | State::Holding { .. } => {
                Ok(run.ready())
            }
        };
        if !core::mem::take(&mut run.answer_due) {
            return;
        }
        let epoch = run.epoch;
        let shadow = run.is_shadow();
        self.say(epoch.minter, job, epoch, TileMessage::Prepared { tile, result });
        if shadow {
            self.take_up_shadow(job, tile);
        }
    }

    fn go(&mut self, now: Instant, from: NodeId, job: JobId, at: &[u32]) {
        let Some(held) = self.jobs.get_mut(&job).filter(|held| held.epoch.minter == from) else { return };
        let epoch = held.epoch;
        held.begins_until = now + TILE_BEGINS;
        // What was not asked for again is not wanted.
        let over: Vec<u16> = held.runs.iter().filter(|(_, run)| run.epoch != epoch).map(|(&tile, _)| tile).collect();
        for tile in over {
            if let Some(mut run) = held.runs.remove(&tile) {
                run.end(job, &mut self.out);
                self.out.push_back(TilesOutput::Drop { job, tile });
            }
        }
        let mut nodes = BTreeSet::from([epoch.minter]);
        for run in held.runs.values_mut().filter(|run| !run.is_shadow()) {
            if run.state == State::Ready {
                run.state = State::Running;
                run.feed_owners(at);
                run.tell_all(job, &mut self.out);
                run.pump(job, &mut self.out);
            }
            nodes.extend(run.peers().into_iter().filter_map(|tile| run.order.owner(tile)));
        }
        nodes.remove(&self.me);
        if epoch.minter != self.me {
            self.out.push_back(TilesOutput::Watch { job, epoch, nodes: nodes.into_iter().collect() });
        }
        self.go_on(now, job);
    }

    fn ended(&mut self, from: NodeId, job: JobId, epoch: Epoch) {
        if self.jobs.get(&job).is_some_and(|held| held.epoch.minter == from && epoch >= held.epoch) {
            self.drop_job(job);
        }
    }

    /// A tile is stood by for by another node.
    fn release(&mut self, job: JobId, tile: u16) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        let Some(mut run) = held.runs.remove(&tile) else { return };
        if !run.is_shadow() {
            held.runs.insert(tile, run);
            return;
        }
        run.end(job, &mut self.out);
        self.out.push_back(TilesOutput::Drop { job, tile });
        if held.runs.is_empty() {
            self.drop_job(job);
        }
    }

    fn drop_job(&mut self, job: JobId) {
        let Some(mut held) = self.jobs.remove(&job) else { return };
        held.runs.values_mut().for_each(|run| run.end(job, &mut self.out));
        if held.epoch.minter != self.me {
            self.out.push_back(TilesOutput::Unwatch { job });
        }
        self.out.push_back(TilesOutput::Unload { job });
    }

    // ---- what neighbours and standbys say

    fn neighbour_held(&mut self, from: NodeId, job: JobId, said: Feeding) {
        let Feeding { tile, to, step, live, again } = said;
        let Some(held) = self.jobs.get_mut(&job) else { return };
        let epoch = held.epoch;
        let Some(run) = held.runs.get_mut(&to).filter(|run| !run.is_shadow() && run.peers().contains(&tile)) else {
            return;
        };
        let owner = run.order.owner(tile) == Some(from);
        if !owner && live && !run.log.reaches(step) {
            let say = TileMessage::Gap { tile, from: to };
            return self.say(from, job, epoch, say);
        }
        run.log.feed(Feed { tile, node: from, owner, live: live || owner, held: step, next: step }, again);
        run.pump(job, &mut self.out);
    }

    /// A frame with a strip; whether it is kept.
    pub fn handle_strip(&mut self, now: Instant, from: NodeId, header: FrameHeader, tensor: TensorId) {
        let job = header.job;
        let admitted = self.is_admitted(now, from, job, header.epoch);
        let run = self.run(job, header.part).filter(|_| admitted);
        if run.is_some_and(|run| run.strip(from, &header, tensor)) {
            self.go_on(now, job);
        } else {
            self.out.push_back(TilesOutput::Discard { tensor });
        }
    }

    /// A name for a strip.
    pub fn name(&mut self) -> TensorId {
        self.tensors += 1;
        TensorId(TILES_TAG | self.tensors)
    }

    /// Whether this node holds tiles of a job: its frames are theirs.
    pub fn has(&self, job: JobId) -> bool {
        self.jobs.contains_key(&job)
    }

    /// A connection stands again after it had broken: what was on the way is lost.
    pub fn handle_reconnected(&mut self, node: NodeId) {
        let mut lost = Vec::new();
        for (&job, held) in &self.jobs {
            for run in held.runs.values().filter(|run| run.has_cells()) {
                let peers = run.peers().into_iter().filter(|&peer| run.order.owner(peer) == Some(node));
                lost.extend(peers.map(|to| (job, held.epoch, run.tile(), to, run.step)));
            }
        }
        for (job, epoch, tile, to, step) in lost {
            self.say(node, job, epoch, TileMessage::Held { tile, to, step, live: true, again: true });
        }
        // A tile waits at its next checkpoint until the coordinator has taken the one before.
        for (&job, held) in self.jobs.iter().filter(|(_, held)| held.epoch.minter == node) {
            for run in held.runs.values().filter(|run| !run.is_shadow()) {
                run.tell_all(job, &mut self.out);
            }
        }
    }

    // ---- what the shell says

    /// A tile is there with its cells (or, for a standby, without), or could not be made.
    pub fn handle_loaded(
        &mut self,
        now: Instant,
        job: JobId,
        tile: u16,
        load: LoadId,
        result: Result<TileLoaded, String>,
    ) {
        let Some(run) = self.jobs.get_mut(&job).and_then(|held| held.runs.get_mut(&tile)) else { return };
        if run.state != State::Loading(load) {
            return;
        }
        let answered = !run.answer_due;
        match result {
            Ok(TileLoaded { bytes, step: Some(step) }) => run.loaded(job, step, bytes, &mut self.out),
            Ok(TileLoaded { bytes, step: None }) => {
                (run.bytes, run.state) = (bytes, State::Wanting { since: now });
            }
            Err(reason) => run.state = State::Failed(reason),
        }
        if answered && run.is_shadow() {
            self.take_up_shadow(job, tile);
        } else {
            self.answer(job, tile);
        }
        self.go_on(now, job);
    }

    /// The strips of a run are made.
    pub fn handle_strips(&mut self, now: Instant, job: JobId, tile: u16, work: WorkId, sizes: &[(u32, u64)]) {
        if let Some(run) = self.jobs.get_mut(&job).and_then(|held| held.runs.get_mut(&tile)) {
            run.strips_made(now, job, work, sizes, &mut self.out);
        }
    }

    /// A run is done, or failed.
    pub fn handle_made(&mut self, now: Instant, job: JobId, tile: u16, work: WorkId, result: Result<TileMade, String>) {
        let Some(run) = self.jobs.get_mut(&job).and_then(|held| held.runs.get_mut(&tile)) else { return };
        let epoch = run.epoch;
        match result {
            Ok(made) => {
                let ran = run.made(now, job, work, made, &mut self.out);
                if ran && run.step >= run.order.schedule.steps {
                    self.tell_progress(job);
                }
            }
            Err(reason) => {
                if run.broke(job, work, reason.clone(), &mut self.out) {
                    self.say(epoch.minter, job, epoch, TileMessage::Failed { tile, reason });
                }
            }
        }
        self.answer(job, tile);
        self.go_on(now, job);
    }

    /// The coordinator gave a sign of life.
    pub fn coordinator_heard(&mut self, now: Instant, from: NodeId, job: JobId) {
        if let Some(held) = self.jobs.get_mut(&job).filter(|held| held.epoch.minter == from) {
            held.heard(now);
        }
    }

    /// The clock.
    pub fn handle_wakeup(&mut self, now: Instant) {
        let orphaned = |held: &Held| held.epoch.minter != self.me && now.since(held.coordinator_heard) >= ORPHAN_MAX;
        let orphans: Vec<JobId> = self.jobs.iter().filter(|(_, held)| orphaned(held)).map(|(&job, _)| job).collect();
        orphans.into_iter().for_each(|job| self.drop_job(job));
        let jobs: Vec<JobId> = self.jobs.keys().copied().collect();
        if now >= self.held_at && !jobs.is_empty() {
            self.held_at = now + TILE_HELD;
            jobs.iter().for_each(|&job| self.tell_held(now, job));
            let begins = |job: &&JobId| self.jobs.get(job).is_some_and(|held| now < held.begins_until);
            let begin: Vec<JobId> = jobs.iter().filter(begins).copied().collect();
            begin.into_iter().for_each(|job| self.tell_progress(job));
        }
        if now >= self.progress_at && !jobs.is_empty() {
            self.progress_at = now + TILE_PROGRESS;
            jobs.iter().for_each(|&job| self.tell_progress(job));
            jobs.iter().for_each(|&job| self.succession_wakeup(now, job));
            jobs.iter().for_each(|&job| self.ask_again(now, job));
        }
    }

    /// When to come back, and who asked.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let shadows = self.jobs.values().flat_map(|held| held.runs.values()).any(TileRun::is_shadow);
        let begin = self.jobs.values().any(|held| self.held_at < held.begins_until);
        let held = (shadows || begin).then_some((self.held_at, "tiles: standbys say what they hold"));
        let progress = (!self.jobs.is_empty()).then_some((self.progress_at, "tiles: progress is told"));
        held.into_iter().chain(progress).min()
    }

    /// Owners that wait for strips for too long say what they hold: who sends goes on from there.
    fn ask_again(&mut self, now: Instant, job: JobId) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        let mut say = Vec::new();
        for run in held.runs.values_mut() {
            let late = run.late(now);
            let (tile, step, epoch) = (run.tile(), run.step, run.epoch);
            let owners = late.into_iter().filter_map(|to| Some((run.order.owner(to)?, to)));
            say.extend(
                owners.map(|(node, to)| (node, epoch, TileMessage::Held { tile, to, step, live: true, again: true })),
            );
        }
        say.into_iter().for_each(|(to, epoch, message)| self.say(to, job, epoch, message));
    }

    fn tell_progress(&mut self, job: JobId) {
        let Some(held) = self.jobs.get(&job) else { return };
        let has = |run: &&TileRun| run.has_cells() || matches!(run.state, State::Holding { .. });
        let told: Vec<(Epoch, TileMessage)> = held
            .runs
            .values()
            .filter(has)
            .map(|run| {
                let (tile, step, figures) = (run.tile(), run.step, run.figures);
                (run.epoch, TileMessage::Progress { tile, step, figures })
            })
            .collect();
        for (epoch, message) in told {
            self.say(epoch.minter, job, epoch, message);
        }
    }

    /// Begins what can begin.
    fn go_on(&mut self, now: Instant, job: JobId) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        let mut names = Names { work: &mut self.works, tensor: &mut self.tensors };
        held.runs.values_mut().for_each(|run| run.start(now, job, &mut names, &mut self.out));
    }

    fn run(&mut self, job: JobId, tile: u16) -> Option<&mut TileRun> {
        self.jobs.get_mut(&job)?.runs.get_mut(&tile)
    }

    fn say(&mut self, to: NodeId, job: JobId, epoch: Epoch, say: TileMessage) {
        self.out.push_back(TilesOutput::Message { to, job, epoch, say });
    }
}

/// What somebody said it holds.
struct Feeding {
    tile: u16,
    to: u16,
    step: u32,
    live: bool,
    again: bool,
}

/// Whether a tile may stay as it is under another order.
fn may_stay(run: &TileRun, order: &TileOrder) -> bool {
    let failed = matches!(run.state, State::Failed(_));
    let same_role = run.is_shadow() == order.standby.is_some();
    let promoted = run.is_shadow() && order.standby.is_none();
    let has = run.has_cells() || matches!(run.state, State::Holding { .. });
    // A standby of one tier does not become one of the other.
    let tier = !same_role || run.order.standby == order.standby || order.standby.is_none();
    !failed && run.order.is_same_tile(order) && tier && (same_role || (promoted && has))
}

/// Message as it goes over the wire.
pub(crate) fn message(job: JobId, epoch: Epoch, say: TileMessage) -> Message {
    Message::Tile { job, epoch, say: Box::new(say) }
}
