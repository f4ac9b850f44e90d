//! Participant side of jobs: the parts that this node holds, the epoch fence around them, loading, running and
//! dropping.
//!
//! A higher epoch is adopted, and everything under the lower epoch pauses first. A lower epoch is answered with
//! `Stale`. A part that is the same under the new epoch keeps its state; any other part is loaded. Every part is fed by
//! channels, keeps a log of what it sent, and reports its progress. Next: `part/program.rs`, `part/sent.rs`,
//! `part/stage.rs`, `part/tile.rs`, then `part/succession.rs`.
mod invariants;
mod messages;
mod orders;
mod output;
mod pace;
mod program;
mod queue;
mod sent;
mod stage;
mod succession;
mod tile;

pub use output::PartOutput;

use crate::id::{Epoch, JobId, LoadId, NodeId, PartId, TensorId, WorkId};
use crate::limits::{EPOCHS_FORGOTTEN_MAX, LEASE, TILE_HELD, TILE_PROGRESS};
use crate::message::ToCoordinator;
use crate::output::Output;
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::steps::SaveKind;
use crate::work::{HeldPart, Loaded, Order, Run, RunResult};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::{string::String, vec::Vec};
use output::{Names, Out, Sharing, Started, discard};
use program::Program;
use succession::Succession;
use tile::{AfterSnapshot, TileRun};

/// All parts of this node.
///
/// Invariants: a job's epoch only grows here, except when this node stands down as its coordinator (`handle_left`);
/// what runs under an epoch is paused before the epoch changes; every payload that arrived is consumed by a run or
/// discarded, and every payload that a run created is sent, kept or discarded; at most one run of a part is at the
/// executor.
#[derive(Debug)]
pub struct Parts {
    me: NodeId,
    jobs: BTreeMap<JobId, HeldJob>,
    /// Data that coordinators ask for here before they move their jobs; at most `JOBS_MAX`.
    fetches: BTreeMap<(JobId, PartId), Fetch>,
    /// Runs at the executor, including those of dropped parts.
    in_flight: BTreeMap<WorkId, Flight>,
    /// When the executor of each device last answered a run.
    answered: BTreeMap<u8, Instant>,
    /// Takes no new work (drain, leave).
    draining: bool,
    names: Names,
    /// When standbys of tiles next report what they hold, and all tiles their progress.
    held_at: Instant,
    progress_at: Instant,
    out: Out,
}

/// The parts of one job.
#[derive(Debug)]
struct HeldJob {
    epoch: Epoch,
    /// `Go` was received: all parts of the job are ready, and neighbours should send heartbeats.
    go_received: bool,
    /// This node issued the epoch, and no longer coordinates the job.
    stood_down: bool,

    /// Until when progress is reported often: the job has just started, or resumed after a loss.
    begins_until: Instant,
    coordinator_heard: Instant,
    succession: Succession,
    parts: BTreeMap<PartId, LocalPart>,
}

/// One part.
#[derive(Debug)]
struct LocalPart {
    order: Box<Order>,
    /// Epoch of its last order.
    epoch: Epoch,
    load: Load,
    bytes: u64,
    /// Bytes of a stage's experts in RAM, as loaded.
    ram: u64,
    ram_pages: u32,
    /// The coordinator waits for an answer, which has to wait for a load or a run.
    answer_due: bool,
    /// A stage that stays adopts its new route once no batch of the old one runs.
    reroute: bool,
    run: Program,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Load {
    Loading(LoadId),
    Resident,
    Failed(String),
}

/// Data to fetch for a part that is not ordered yet.
#[derive(Debug)]
struct Fetch {
    epoch: Epoch,
    order: Box<Order>,
    /// How it ended, once it has.
    result: Option<Result<u64, String>>,
}

/// A run at the executor.
#[derive(Debug)]
struct Flight {
    job: JobId,
    device: u8,
    started: Instant,
    budget: Duration,
    makes: Vec<TensorId>,
}

impl HeldJob {
    fn new(now: Instant, epoch: Epoch) -> Self {
        let (succession, parts) = (Succession::default(), BTreeMap::new());
        HeldJob {
            epoch,
            go_received: false,
            stood_down: false,
            begins_until: now,
            coordinator_heard: now,
            succession,
            parts,
        }
    }

    /// The coordinator gave a sign of life.
    fn heard(&mut self, now: Instant) {
        self.coordinator_heard = now;
        self.succession.heard();
    }

    /// Since when no coordinator has been heard. `None` if this node coordinates the job.
    fn silent_since(&self, me: NodeId) -> Option<Instant> {
        (self.epoch.issuer != me || self.stood_down).then_some(self.coordinator_heard)
    }

    /// Whether this node hears another coordinator than `from`, or is that coordinator. It obeys a successor only if
    /// not: whatever majority the successor claims, this node has not lost the coordinator.
    fn hears_another(&self, me: NodeId, from: NodeId) -> bool {
        let coordinates = self.epoch.issuer == me && !self.stood_down;
        let another = self.epoch.issuer != from && from != me;
        another && (coordinates || self.epoch.issuer != me && !self.succession.is_silent())
    }

    /// Whether a node may issue epochs of the job, according to the orders held here.
    fn obeys(&self, node: NodeId) -> bool {
        self.epoch.issuer == node || self.parts.values().any(|held| held.order.may_coordinate(node))
    }

    /// Pauses all parts until their order from this coordinator comes, whatever its epoch.
    fn obey(&mut self, issuer: NodeId, out: &mut Out) {
        for part in self.parts.values_mut() {
            part.run.pause(out);
            part.epoch.counter = 0;
        }
        self.epoch = Epoch { counter: 0, issuer };
    }

    /// Drops parts.
    fn drop_parts(&mut self, job: JobId, gone: impl Fn(PartId, &LocalPart) -> bool, out: &mut Out) {
        for (part, mut held) in self.parts.extract_if(.., |part, held| gone(*part, held)) {
            held.run.end(out);
            out.push_back(PartOutput::Shell(Output::Drop { job, part }));
        }
    }
}

impl LocalPart {
    /// Whether this part can stay under a new order, whatever its neighbours.
    fn may_stay(&self, order: &Order) -> bool {
        let failed = matches!(self.load, Load::Failed(_));
        !failed && self.run.may_stay(self.load == Load::Resident, order) && self.order.is_same_part(order)
    }

    fn view(&self, job: JobId, part: PartId) -> HeldPart {
        let what = self.run.view(&self.order, part);
        let bytes = (self.load == Load::Resident).then_some(self.bytes);
        let standby = self.order.standby.is_some();
        HeldPart {
            job,
            name: self.order.name.clone(),
            epoch: self.epoch,
            part,
            device: self.order.device,
            standby,
            bytes,
            ram: self.ram,
            what,
        }
    }
}

/// Whether a successor claims an epoch that no coordinator can have issued meanwhile. It would leave no epochs to later
/// coordinators.
fn leaps(mine: Epoch, theirs: Epoch) -> bool {
    theirs.counter.saturating_sub(mine.counter) > EPOCHS_FORGOTTEN_MAX
}

impl Parts {
    /// A node without parts.
    pub fn new(me: NodeId) -> Self {
        Parts {
            me,
            jobs: BTreeMap::new(),
            fetches: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            answered: BTreeMap::new(),
            draining: false,
            names: Names::default(),
            held_at: Instant::default(),
            progress_at: Instant::default(),
            out: VecDeque::new(),
        }
    }

    // ---- views

    /// Parts that this node holds.
    pub fn held(&self) -> impl Iterator<Item = HeldPart> + '_ {
        self.jobs.iter().flat_map(|(&job, held)| held.parts.iter().map(move |(&part, held)| held.view(job, part)))
    }

    /// The coordinator of a job that this node holds parts of, and the epoch.
    pub fn coordinator_of(&self, job: JobId) -> Option<(NodeId, Epoch)> {
        self.jobs.get(&job).map(|held| (held.epoch.issuer, held.epoch))
    }

    /// Takes no new work while set.
    pub fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// A name for a payload that is stored twice.
    pub fn name(&mut self) -> TensorId {
        self.names.tensor()
    }

    /// The next output. Batches are started by `poll_runs`.
    pub fn poll_output(&mut self) -> Option<PartOutput> {
        self.out.pop_front()
    }

    // ---- the fence

    /// Whether a message or frame of this epoch may act on the job. A lower epoch is answered with the present one.
    fn admits(&mut self, from: NodeId, job: JobId, epoch: Epoch) -> bool {
        match self.jobs.get(&job) {
            Some(held) if held.epoch == epoch || (planted::has(Planted::EpochCheckLeftOut) && epoch < held.epoch) => {
                true
            }
            Some(held) if epoch < held.epoch => {
                self.out.push_back(PartOutput::Stale { to: from, job, mine: held.epoch });
                false
            }
            Some(_) | None => false,
        }
    }

    /// Whether the parts here wait for an order of the node that issued this epoch. That node sends other messages first
    /// if it never noticed that this node coordinated the job in between.
    fn awaits_order(&self, job: JobId, epoch: Epoch) -> bool {
        let held = self.jobs.get(&job).map(|held| held.epoch);
        held.is_some_and(|mine| mine.counter == 0 && mine.issuer == epoch.issuer && mine < epoch)
    }

    /// Reports that a part is not held here, so that the coordinator need not wait to find out.
    fn report_missing(&mut self, job: JobId, epoch: Epoch, part: PartId) {
        let reason = String::from("this node holds no such part of the job");
        self.report(job, epoch, ToCoordinator::Failed { part, held: false, reason });
    }

    /// Whether a frame or message may act on a part: its epoch is admitted, and the part is resident. Reports a missing
    /// or failed part.
    fn is_resident(&mut self, from: NodeId, job: JobId, epoch: Epoch, part: PartId) -> bool {
        if !self.jobs.contains_key(&job) || self.awaits_order(job, epoch) {
            self.report_missing(job, epoch, part);
            return false;
        }
        if !self.admits(from, job, epoch) {
            return false;
        }
        let known = self.jobs.get(&job).and_then(|held| held.parts.get(&part));
        match known.map(|held| held.load.clone()) {
            None => self.report_missing(job, epoch, part),
            Some(Load::Failed(reason)) => self.report(job, epoch, ToCoordinator::Failed { part, held: true, reason }),
            Some(Load::Loading(_)) => {}
            Some(Load::Resident) => return true,
        }
        false
    }

    /// The coordinator or another participant reports a higher epoch of the job: what runs here is out of date. All
    /// parts stay until the coordinator orders them again or has been silent for too long. The coordinator's own report
    /// pauses them. Another owner's report may be wrong, so it only withholds their output until the coordinator is
    /// heard under the epoch that is held here.
    pub fn handle_stale(&mut self, from: NodeId, job: JobId, theirs: Epoch) {
        let me = self.me;
        let Some(held) = self.jobs.get_mut(&job) else { return };
        if held.epoch.issuer == me || held.epoch.issuer != theirs.issuer || held.epoch >= theirs {
            return;
        }
        let is_owner = held.parts.values().any(|part| part.order.owners.contains(&from));
        for part in held.parts.values_mut() {
            if from == theirs.issuer {
                part.run.pause(&mut self.out);
            } else if is_owner {
                part.run.withhold();
            }
        }
    }

    // ---- what the shell answers

    /// A part is loaded or restored, or could not be.
    pub fn handle_loaded(
        &mut self,
        now: Instant,
        job: JobId,
        part: PartId,
        load: LoadId,
        result: Result<Loaded, String>,
    ) {
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let epoch = known.epoch;
        let Some(held) = known.parts.get_mut(&part).filter(|held| held.load == Load::Loading(load)) else { return };
        let answered = !held.answer_due;
        match result {
            Ok(Loaded { bytes, ram, ram_pages, step }) => {
                (held.bytes, held.ram, held.ram_pages, held.load) = (bytes, ram, ram_pages, Load::Resident);
                held.run.loaded(now, (ram_pages, step), &mut self.out);
            }
            Err(reason) => held.load = Load::Failed(reason),
        }
        if answered && held.order.standby.is_some() && held.load == Load::Resident {
            // If another part has brought a higher epoch, this standby starts when its own order arrives.
            if epoch <= held.epoch {
                self.start_following(job, part);
            }
        } else {
            self.answer(now, job, part);
        }
        self.start(now, job);
    }

    /// A run has computed its halos.
    pub fn handle_halos(&mut self, now: Instant, job: JobId, part: PartId, work: WorkId, sizes: &[(u32, u64)]) {
        if let Some(tile) = tile(&mut self.jobs, job, part).filter(|tile| tile.runs(work)) {
            tile.handle_halos(now, sizes, &mut self.out);
        }
    }

    /// A run is done, or failed.
    pub fn handle_ran(&mut self, now: Instant, part: PartId, work: WorkId, result: Result<RunResult, String>) {
        let Some(flight) = self.in_flight.remove(&work) else { return };
        let (job, device) = (flight.job, flight.device);
        self.answered.insert(device, now);
        self.out.push_back(PartOutput::WorkDone { job, device });
        let held =
            self.jobs.get_mut(&job).and_then(|held| held.parts.get_mut(&part)).filter(|held| held.run.runs(work));
        let Some(held) = held else {
            return self.out.extend(flight.makes.into_iter().map(discard));
        };
        let epoch = held.epoch;
        match held.run.ran(now, result, &mut self.out) {
            Ok(true) => self.report_progress(job),
            Ok(false) => {}
            Err(reason) => {
                held.load = Load::Failed(reason.clone());
                if !held.answer_due {
                    self.report(job, epoch, ToCoordinator::Failed { part, held: true, reason });
                }
            }
        }
        self.answer(now, job, part);
        self.start(now, job);
    }

    /// A snapshot is here, or could not be fetched.
    pub fn handle_collected(&mut self, now: Instant, job: JobId, part: PartId, step: u32, result: &Result<(), String>) {
        let Some(held) = self.jobs.get_mut(&job).and_then(|held| held.parts.get_mut(&part)) else {
            let kind = SaveKind::Snapshot;
            return self.out.push_back(PartOutput::Shell(Output::Forget { job, part, step, kind }));
        };
        let Some(tile) = held.run.tile() else { return };
        if tile.handle_collected(now, step, result, &mut self.out) == AfterSnapshot::Restore {
            let load = self.names.load();
            held.load = Load::Loading(load);
            self.out.push_back(PartOutput::Shell(Output::Restore { job, load, part, step }));
        }
    }

    // ---- runs

    /// Starts a batch of a part that has work waiting and no run. Called when the shell has reported everything that
    /// happened, so that the decode steps of several requests form one batch.
    pub fn poll_runs(&mut self, now: Instant) -> Option<PartOutput> {
        let alone = self.jobs.len() < 2;
        for (&job, held) in &mut self.jobs {
            let devices: Vec<u8> = held.parts.values().map(|known| known.order.device).collect();
            for (&part, known) in held.parts.iter_mut().filter(|(_, known)| known.load == Load::Resident) {
                let together = devices.iter().filter(|device| **device == known.order.device).count();
                let sharing = Sharing { alone, parts: u32::try_from(together).unwrap_or(u32::MAX) };
                if !known.answer_due
                    && let Some(started) = known.run.start_batch(now, sharing, &mut self.names)
                {
                    let to = (job, held.epoch, part, known.order.device);
                    start(now, to, started, &mut self.in_flight, &mut self.out);
                    return self.out.pop_front();
                }
            }
        }
        None
    }

    /// Starts those runs of a job's parts that need no batching.
    fn start(&mut self, now: Instant, job: JobId) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        for (&part, known) in held.parts.iter_mut().filter(|(_, known)| known.load == Load::Resident) {
            let paused = known.answer_due;
            if let Some(started) = known.run.start(now, paused, &mut self.names, &mut self.out) {
                let to = (job, held.epoch, part, known.order.device);
                start(now, to, started, &mut self.in_flight, &mut self.out);
            }
        }
    }

    /// The devices that compute: since when each has been busy with one run, perhaps of a part that was dropped, and when it
    /// counts as stalled: it is then busy with one run for far longer than predicted for any. Each completes one run after the
    /// other, in an order of its own.
    fn busy(&self) -> BTreeMap<u8, (Instant, Instant)> {
        let mut busy: BTreeMap<u8, (Instant, Duration)> = BTreeMap::new();
        for flight in self.in_flight.values() {
            let (oldest, most) = busy.entry(flight.device).or_insert((flight.started, Duration::ZERO));
            *oldest = flight.started.min(*oldest);
            *most = RUN_MIN.max(flight.budget * 4).max(*most);
        }
        let since = |(device, (oldest, most)): (u8, (Instant, Duration))| {
            let since = self.answered.get(&device).map_or(oldest, |answered| oldest.max(*answered));
            (device, (since, since + most))
        };
        busy.into_iter().map(since).collect()
    }

    /// When the first device counts as stalled.
    pub fn stalled_at(&self) -> Option<Instant> {
        self.busy().into_values().map(|(_, stalled_at)| stalled_at).min()
    }

    /// How long a device has been busy with one run, if one counts as stalled.
    pub fn stalled(&self, now: Instant) -> Option<Duration> {
        let stalled = self.busy().into_values().filter(|(_, at)| *at <= now);
        stalled.map(|(since, _)| now.since(since)).max()
    }

    /// How long this device has been busy with one run, if it counts as stalled.
    fn device_stalled(&self, now: Instant, device: u8) -> Option<Duration> {
        self.busy().get(&device).filter(|(_, at)| *at <= now).map(|(since, _)| now.since(*since))
    }

    /// This node wakes up late: it was stopped, and its executor perhaps too. No run counts as late for that, and an
    /// answer may be waiting to be read.
    pub fn excuse(&mut self, late: Duration) {
        if late >= LEASE {
            self.in_flight.values_mut().for_each(|flight| flight.started = flight.started + late + LEASE);
        }
    }

    /// This node was paused. Stages that other nodes coordinate send nothing until their coordinator is heard.
    pub fn withhold(&mut self) {
        for held in self.jobs.values_mut().filter(|held| held.epoch.issuer != self.me) {
            held.parts.values_mut().for_each(|known| known.run.withhold());
        }
    }

    /// The coordinator of a job gave a sign of life under this epoch.
    pub fn coordinator_heard(&mut self, now: Instant, from: NodeId, job: JobId, epoch: Epoch) {
        // A coordinator that has stood down is a participant like any other.
        let coordinates = |held: &&mut HeldJob| held.epoch.issuer == from && epoch.issuer == from;
        let Some(held) = self.jobs.get_mut(&job).filter(coordinates) else { return };
        held.heard(now);
        if held.epoch == epoch {
            held.parts.values_mut().for_each(|known| known.run.release(&mut self.out));
        }
    }

    /// This node no longer coordinates a job. The parts that it holds under its own epochs stay for a while, because
    /// the next coordinator may order them.
    pub fn handle_left(&mut self, now: Instant, job: JobId, successor: Option<NodeId>) {
        if let Some(held) = self.jobs.get_mut(&job).filter(|held| held.epoch.issuer == self.me) {
            (held.stood_down, held.coordinator_heard) = (true, now);
            if let Some(issuer) = successor {
                // This node may have issued higher epochs while it was absent. Its parts obey any epoch of the
                // successor.
                held.obey(issuer, &mut self.out);
                held.stood_down = false;
                self.watch(job);
            }
        }
        self.obey_deferred(now, job);
    }

    // ---- time

    /// Timers.
    pub fn handle_wakeup(&mut self, now: Instant) {
        let drops = !planted::has(Planted::OrphansStay);
        let orphaned = |held: &HeldJob| self.orphaned_at(held).is_some_and(|at| at <= now);
        let orphans: Vec<JobId> = self.jobs.iter().filter(|(_, held)| orphaned(held)).map(|(&job, _)| job).collect();
        orphans.into_iter().filter(|_| drops).for_each(|job| self.drop_job(job));
        for known in self.jobs.values_mut().flat_map(|held| held.parts.values_mut()) {
            known.run.report_due(now, &mut self.out);
        }
        let jobs: Vec<JobId> = self.jobs.keys().copied().collect();
        if now >= self.held_at && !jobs.is_empty() {
            self.held_at = now + TILE_HELD;
            for held in self.jobs.values_mut() {
                for known in held.parts.values_mut().filter(|known| known.load == Load::Resident) {
                    known.run.report_held(now, &mut self.out);
                }
            }
            let begins = |job: &&JobId| self.jobs.get(job).is_some_and(|held| now < held.begins_until);
            let begin: Vec<JobId> = jobs.iter().filter(begins).copied().collect();
            begin.into_iter().for_each(|job| self.report_progress(job));
        }
        if now >= self.progress_at && !jobs.is_empty() {
            self.progress_at = now + TILE_PROGRESS;
            for &job in &jobs {
                self.report_progress(job);
                self.succession_wakeup(now, job);
                let Some(held) = self.jobs.get_mut(&job) else { continue };
                held.parts.values_mut().for_each(|known| known.run.ask_again(now, &mut self.out));
            }
        }
    }

    /// When the parts of a job are dropped, unless a coordinator is heard before.
    fn orphaned_at(&self, held: &HeldJob) -> Option<Instant> {
        held.silent_since(self.me).map(|since| since + held.orphan_max(held.epoch.issuer))
    }

    /// When to come back, and the reason.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let all = || self.jobs.values().flat_map(|held| held.parts.values());
        let periodic = |held: &LocalPart| held.run.is_periodic();
        let stages =
            all().filter_map(|held| held.run.report_at()).min().map(|at| (at, "parts: a stage reports what it holds"));
        let ready = all().filter(|held| held.load == Load::Resident && !held.answer_due);
        let start = ready.filter_map(|held| held.run.start_at()).min();
        let start = start.map(|at| (at, "parts: prompts no longer wait for decode steps"));
        let shadows = all().any(|held| periodic(held) && held.order.standby.is_some());
        let begin =
            self.jobs.values().any(|held| self.held_at < held.begins_until && held.parts.values().any(periodic));
        let held = (shadows || begin).then_some((self.held_at, "parts: standbys report what they hold"));
        let silent = |held: &HeldJob| held.succession.is_silent();
        let periodic = all().any(periodic) || self.jobs.values().any(silent);
        let progress = periodic.then_some((self.progress_at, "parts: progress is reported"));
        let orphan = self.jobs.values().filter_map(|held| self.orphaned_at(held)).min();
        let orphan = orphan.filter(|_| !planted::has(Planted::OrphansStay));
        let orphan = orphan.map(|at| (at, "parts: a job's coordinator is silent"));
        [stages, start, held, progress, orphan].into_iter().flatten().min()
    }

    fn report_progress(&mut self, job: JobId) {
        let Some(held) = self.jobs.get(&job) else { return };
        for known in held.parts.values().filter(|known| known.load == Load::Resident) {
            known.run.report_progress(&mut self.out);
        }
    }

    fn report(&mut self, job: JobId, epoch: Epoch, say: ToCoordinator) {
        self.out.push_back(PartOutput::Report { job, epoch, say });
    }
}

fn tile(jobs: &mut BTreeMap<JobId, HeldJob>, job: JobId, part: PartId) -> Option<&mut TileRun> {
    jobs.get_mut(&job)?.parts.get_mut(&part)?.run.tile()
}

/// Gives a run to the executor of a device.
fn start(
    now: Instant,
    (job, epoch, part, device): (JobId, Epoch, PartId, u8),
    started: Started,
    in_flight: &mut BTreeMap<WorkId, Flight>,
    out: &mut Out,
) {
    let Started { work, task, budget, before, makes } = started;
    out.extend(before.into_iter().map(PartOutput::Shell));
    in_flight.insert(work, Flight { job, device, started: now, budget, makes });
    out.push_back(PartOutput::WorkStarted { job, device, budget });
    out.push_back(PartOutput::Shell(Output::Run(Box::new(Run { work, job, epoch, part, device, task }))));
}

/// A run shorter than this never counts as stalled, whatever was predicted.
const RUN_MIN: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
