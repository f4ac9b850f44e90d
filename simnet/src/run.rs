//! Runs one case with all checkers attached: serve and submit, inject faults, heal them, and check that everything settles.
mod callers;

use crate::case::{Ask, Case};
use crate::checker::bounds::{Bounds, leaks};
use crate::checker::epochs::Epochs;
use crate::checker::frames::Frames;
use crate::checker::owners::Owners;
use crate::checker::pauses::{LIMIT, Pauses};
use crate::checker::rings::Rings;
use crate::checker::standbys::TileStandbys;
use crate::checker::survival::Survival;
use crate::checker::{cancels::Cancels, membership, reports, requests, rest, standbys};
use crate::faults::{Fault, Timed};
use crate::host::{Host, HostId, HostSpec};
use crate::options::Options;
use crate::submissions::{CASE_CELL_NS, End, Submissions, settle_max};
use crate::timeline::{Line, Timeline, name, pauses};
use crate::units;
use crate::workload::{Call, WIDTH};
use crate::world::{Notification, World};
use callers::{Callers, is_usable};
use node_core::id::{CallId, NodeId};
use node_core::job::ProgramView;
use node_core::output::Event;
use node_core::time::{Duration, Instant};
use node_core::work::serve::DoneReason;
use std::collections::BTreeMap;

/// The result of a case.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Outcome {
    /// Its seed.
    pub seed: u64,
    /// The trace hash of the run; equal cases have equal hashes.
    pub trace: String,
    /// Number of inputs and faults.
    pub events: u64,
    /// Virtual milliseconds in total.
    pub virtual_ms: u64,
    /// Violated invariants; empty if all hold.
    pub violations: Vec<String>,
    /// Number of requests by kind of end.
    pub ends: BTreeMap<String, u32>,
    /// Number of simulations by kind of end.
    pub simulations: BTreeMap<String, u32>,
    /// Number of times that a successor took a simulation over, or that one was submitted again from a checkpoint.
    pub successions: u32,
    /// Longest wait between two tokens of a request.
    pub pause_ms_max: u64,
    /// Losses after which requests and simulations must continue within a second.
    pub losses: u32,
    /// Longest wait of a request for its next token, or of a simulation for its next step, after such a loss.
    pub loss_ms_max: u64,
    /// Longest wait of a request for its next token, or its end, after all faults were healed.
    pub stall_ms_max: u64,
    /// From healing all faults to the end of the run.
    pub settled_ms: u64,
    /// Drafts of draft models that were right, of the jobs that are served at the end.
    pub model_drafts: u64,
    /// The highest epoch of any coordinator.
    pub epochs: u32,
    /// The human-readable log.
    #[serde(skip)]
    pub timeline: Vec<Line>,
}

/// Runs a case.
pub fn run(case: &Case) -> Outcome {
    run_with_timeline(case, Timeline::default())
}

/// Runs a case with the caller's timeline.
pub fn run_with_timeline(case: &Case, timeline: Timeline) -> Outcome {
    let mut run = Run::new(case, timeline);
    if run.serve() {
        run.inject_faults();
        run.heal_and_settle();
    }
    run.world.hosts().for_each(Host::assert_invariants);
    run.outcome()
}

struct Run<'a> {
    case: &'a Case,
    world: World,
    /// The callers of each entry node.
    callers: Vec<Callers>,
    submissions: Submissions,
    checks: Checks,
    timeline: Timeline,
    /// When all models were first served.
    origin: Instant,
    mended: Option<Instant>,
    violations: Vec<String>,
}

#[derive(Clone, Default)]
struct Checks {
    epochs: Epochs,
    bounds: Bounds,
    frames: Frames,
    owners: Owners,
    rings: Rings,
    survival: Survival,
    pauses: Pauses,
    cancels: Cancels,
    tile_standbys: TileStandbys,
}

impl Checks {
    fn watch(&self, world: &mut World) {
        world.observe(Box::new(self.epochs.clone()));
        world.observe(Box::new(self.bounds.clone()));
        world.observe(Box::new(self.frames.clone()));
        world.observe(Box::new(self.owners.clone()));
        world.observe(Box::new(self.rings.clone()));
        world.observe(Box::new(self.survival.clone()));
        world.observe(Box::new(self.pauses.clone()));
    }

    /// `full`: replay rings may be full in this case.
    fn violations(&self, full: bool) -> Vec<String> {
        let all = [
            self.epochs.violations(),
            self.bounds.violations(),
            self.frames.violations(),
            self.owners.violations(),
            self.survival.violations(),
            self.cancels.violations(),
            self.tile_standbys.violations(),
            if full { Vec::new() } else { self.rings.violations() },
        ];
        all.into_iter().flatten().collect()
    }
}

impl<'a> Run<'a> {
    fn new(case: &'a Case, timeline: Timeline) -> Self {
        let mut world = World::new(Options { seed: case.seed, ..case.network.clone() });
        let checks = Checks::default();
        checks.watch(&mut world);
        let mut spec = HostSpec::default();
        spec = spec.with_memory(case.mesh.memory_mib << 20);
        spec.ram_pages = case.mesh.ram_pages;
        if !case.simulations.is_empty() {
            // Slow enough that distributing a small grid pays off.
            (spec.capacity.devices[0].copy_bytes_per_second, spec.cell_ns) = (COPY_BYTES_PER_SECOND, CASE_CELL_NS);
        }
        for index in 0..case.mesh.hosts as usize {
            spec.region = case.mesh.regions.get(index).copied().unwrap_or(0);
            let spec = if case.mesh.mixed { spec.clone().of_kind(index) } else { spec.clone() };
            let spec = spec.with_devices(case.mesh.devices.get(index).copied().unwrap_or(1) as usize);
            let host = world.add_host(spec);
            world.start(host);
        }
        for host in 1..case.mesh.hosts {
            world.introduce(HostId(host), HostId(0));
        }
        world.discover(DISCOVERY);
        Run {
            case,
            callers: Callers::of(case),
            submissions: Submissions::of(case),
            checks,
            timeline,
            world,
            origin: Instant(0),
            mended: None,
            violations: Vec::new(),
        }
    }

    /// All hosts join, and the models are served for the first time, one after the other.
    fn serve(&mut self) -> bool {
        let met = self.world.run_while_not(SETUP_MAX, LOOK, |world| membership::informed(world, &[]));
        if !met {
            self.violations
                .push(format!("hosts do not find each other: {:?}", membership::divergences(&self.world, &[])));
            return false;
        }
        self.world.run_for(Duration::from_millis(500)); // connections are established
        self.world.observe(Box::new(self.timeline.clone()));
        for callers in &mut self.callers {
            let ready = callers.serve(&mut self.world, SETUP_MAX);
            if !ready {
                self.violations.push(format!("the model is not served: {:?}", callers.work.notes.last()));
                return false;
            }
        }
        self.origin = self.world.now();
        true
    }

    /// Injects the faults while requests and simulations run.
    fn inject_faults(&mut self) {
        let since = self.origin.since(Instant(0));
        let later = |timed: &Timed| Timed { at: timed.at + since, fault: timed.fault.clone() };
        self.world.schedule(self.case.faults.iter().map(later).collect());
        let end = self.origin + self.case.lasts;
        while self.world.now() < end {
            self.step(end);
        }
    }

    /// Heals all faults; then everything must end.
    fn heal_and_settle(&mut self) {
        self.world.strike(Fault::Mend);
        let mended = self.world.now();
        self.mended = Some(mended);
        // Healing ends the process of a host that was leaving: callers notice that before they send anything else.
        self.step(mended + LOOK);
        self.callers.iter().for_each(|callers| callers.restore_model(&mut self.world));
        let computing = self.submissions.all.iter().map(|submission| settle_max(&submission.simulation)).max();
        let limit = mended + SETTLE_MAX + computing.unwrap_or_default();
        let served = |run: &Run<'_>| run.callers.iter().all(|callers| callers.all_ended() && callers.is_served());
        let over = |run: &Run<'_>| served(run) && run.submissions.all_ended();
        // Many requests on a slow mesh take longer. That is allowed while they make progress.
        let last = limit + SETTLE_MAX * 4;
        while !self.until((self.world.now() + SETTLE_MAX).max(limit).min(last), over) {
            if self.world.now() >= last || self.last_token() + GOES_ON < self.world.now() {
                self.report_open(self.world.now().since(mended));
                return;
            }
        }
        let limit = limit.max(self.world.now() + SETTLE_MAX);
        self.until(limit, |run| run.missing().is_empty());
        let missing = self.missing();
        self.violations.extend(missing);
        for index in 0..self.callers.len() {
            let mut last = self.last_request(index, limit);
            let broken = |run: &Self, last: CallId| run.callers[index].work.calls[&last].is_broken();
            // A successor ends a job that is unused for long: its callers have the model served again.
            if broken(self, last) {
                self.until(limit, |run| run.callers[index].is_served() && run.callers[index].all_ended());
                last = self.last_request(index, limit);
            }
            let end = self.callers[index].work.calls[&last].ends.first().map(|(_, reason)| reason);
            if !matches!(end, Some(DoneReason::Length | DoneReason::Stop)) {
                self.violations.push(format!("a request after all faults were healed ends with {end:?}"));
            }
        }
        if !self.until(limit, |run| membership::informed(&run.world, &[])) {
            let wrong = membership::divergences(&self.world, &[]);
            self.violations.push(format!(
                "{} after all faults were healed, views differ: {wrong:?}",
                units::text(limit.since(mended))
            ));
        }
        self.until(limit, |run| leaks(&run.world).is_empty() && rest::orphans(&run.world).is_empty());
        self.violations.extend(leaks(&self.world));
        self.violations.extend(rest::orphans(&self.world));
    }

    /// When a caller last received a token.
    fn last_token(&self) -> Instant {
        self.calls().filter_map(|call| call.tokens.last().map(|(at, ..)| *at)).max().unwrap_or(Instant(0))
    }

    /// Reports what has not ended long after all faults were healed.
    fn report_open(&mut self, after: Duration) {
        let after = units::text(after);
        for callers in self.callers.iter().filter(|callers| !(callers.all_ended() && callers.is_served())) {
            self.violations.push(format!("{after} after all faults were healed: {}", callers.open()));
        }
        for submission in self.submissions.all.iter().filter(|submission| submission.end.is_none()) {
            let (name, last) = (submission.name(), submission.progress.last());
            self.violations.push(format!(
                "{name} has not ended {after} after all faults were healed, last progress {last:?}, submitted {:?}",
                submission.submitted
            ));
        }
    }

    /// Stages without standbys although hosts have memory for them.
    fn missing(&self) -> Vec<String> {
        self.callers.iter().flat_map(|callers| standbys::missing(&self.world, &callers.work)).collect()
    }

    /// Sends one more request, which the standbys must follow, and waits for its end. Sends another one if it ends while a
    /// device is still loading.
    fn last_request(&mut self, index: usize, limit: Instant) -> CallId {
        let mut tries = 1;
        loop {
            let (last, behind) = self.try_last_request(index, limit);
            if behind.is_empty() || tries == LAST_TRIES {
                if !behind.is_empty() {
                    self.violations.push(format!("standbys fall behind while one request runs: {behind:?}"));
                }
                return last;
            }
            tries += 1;
        }
    }

    /// One such request, and the standbys that did not follow it.
    fn try_last_request(&mut self, index: usize, limit: Instant) -> (CallId, Vec<(u16, NodeId)>) {
        let work = &self.callers[index].work;
        let (current, epoch) = (standbys::current(&self.world, work), work.epoch);
        let ask = Ask { prompt: 40, tokens: LAST_TOKENS, ..Ask::default() };
        let last = self.callers[index].submit(&mut self.world, ask, self.case.seed);
        self.timeline.note(self.world.now(), format!("final check request: call {}", name(last)));
        let call = |run: &Self| run.callers[index].work.calls[&last].clone();
        let ended = |run: &Self| !run.callers[index].work.calls[&last].ends.is_empty();
        let behind = |run: &Self| {
            let now = standbys::current(&run.world, &run.callers[index].work);
            current.difference(&now).copied().collect::<Vec<_>>()
        };
        let follows = |run: &Self| run.callers[index].work.calls[&last].tokens.len() as u32 > FOLLOWED;
        self.until(limit, |run| ended(run) || follows(run));
        let mut late = Vec::new();
        if !ended(self) {
            self.until(limit, |run| ended(run) || behind(run).is_empty());
            let asked = call(self).submitted;
            let work = &self.callers[index].work;
            let sought =
                |told: &Notification| told.at >= asked && matches!(told.event, Event::Standby { current: false, .. });
            let stayed = work.epoch == epoch && !work.notes.iter().any(sought);
            if stayed {
                late = behind(self);
            }
        }
        self.until(limit, ended);
        (last, late)
    }

    fn until(&mut self, limit: Instant, done: impl Fn(&Run<'a>) -> bool) -> bool {
        loop {
            if done(self) {
                return true;
            }
            if self.world.now() >= limit {
                return false;
            }
            self.step(limit);
        }
    }

    /// Advances the time by one check interval, then runs callers, submitters and checks.
    fn step(&mut self, end: Instant) {
        self.world.run_until((self.world.now() + LOOK).min(end));
        let told = self.world.take_notifications();
        self.callers.iter_mut().for_each(|callers| callers.hear(&told));
        self.submissions.hear(&self.world, &told);
        self.judge();
        let heads: Vec<HostId> = self.callers.iter().map(|callers| callers.work.entry).collect();
        for callers in &mut self.callers {
            callers.fail_over(&mut self.world, self.case.mesh.hosts, &heads, &self.timeline);
            callers.step(&mut self.world, self.origin, self.case.seed);
        }
        self.submissions.step(&mut self.world, self.origin, is_usable);
    }

    /// Runs the checks that depend on the current state of the world.
    fn judge(&mut self) {
        let models: u64 = self.callers.iter().map(Callers::model_bytes).sum();
        let hosts = self.case.mesh.hosts.into();
        let bytes = models + self.submissions.bytes(hosts);
        for callers in &mut self.callers {
            callers.judge(&self.world, &self.checks.survival, bytes, &mut self.violations);
        }
        self.checks.survival.look_at_simulations(&self.world, &self.submissions, hosts);
        self.checks.owners.look(&self.world);
        self.checks.cancels.look(&self.world, &self.submissions, &self.checks.survival);
        self.checks.tile_standbys.look(&self.world, &self.submissions, &self.checks.survival);
    }

    /// The longest time after healing in which a running request made no progress.
    fn stall(&self) -> Duration {
        let Some(mended) = self.mended else { return Duration::ZERO };
        let longest = |call: &Call| {
            let ended = call.ends.iter().map(|(at, _)| *at);
            let times = call.tokens.iter().map(|(at, ..)| *at).chain(ended).filter(|at| *at > mended);
            let mut last = mended.max(call.tokens.first().map_or(call.submitted, |(at, ..)| *at));
            times.map(|at| at.since(std::mem::replace(&mut last, at))).max().unwrap_or_default()
        };
        self.calls().map(longest).max().unwrap_or_default()
    }

    fn calls(&self) -> impl Iterator<Item = &Call> {
        self.callers.iter().flat_map(|callers| callers.work.calls.values())
    }

    fn outcome(mut self) -> Outcome {
        // A full ring may lack rows that a standby needs: they are recomputed, which takes longer.
        let full = self.case.mesh.width > WIDTH;
        self.violations.extend(self.checks.violations(full));
        let losses = self.checks.pauses.losses(|host| self.world.host(host).node_id);
        let losses = losses.into_iter().filter(|loss| loss.simulation || !full).collect::<Vec<_>>();
        let waited = losses.iter().map(|loss| loss.waited).max().unwrap_or_default();
        self.violations.extend(losses.iter().filter_map(|loss| loss.violation(LIMIT)));
        if self.mended.is_some() {
            self.violations.extend(self.callers.iter().flat_map(|callers| requests::violations(&callers.work)));
        }
        self.violations.extend(reports::violations(&self.world, &self.submissions, self.case.faults.is_empty()));
        let mut ends = BTreeMap::new();
        self.calls().for_each(|call| *ends.entry(kind_of_end(call)).or_insert(0) += 1);
        let mut simulations = BTreeMap::new();
        for submission in &self.submissions.all {
            *simulations.entry(kind_of(submission.end.as_ref().map(|(_, end)| end))).or_insert(0) += 1;
        }
        let longest = self.calls().flat_map(pauses).map(|(.., pause)| pause).max().unwrap_or_default();
        let now = self.world.now();
        let nodes = || self.world.hosts().filter_map(|host| host.node.as_ref());
        let models = nodes().flat_map(|node| node.jobs()).map(|view| view.epoch.counter);
        let drafted = nodes().flat_map(|node| node.jobs()).map(|view| match view.program {
            ProgramView::Serve { model_drafts: (_, right), .. } => right,
            ProgramView::Steps { .. } => 0,
        });
        let works: Vec<_> = self.callers.iter().map(|callers| &callers.work).collect();
        Outcome {
            seed: self.case.seed,
            trace: self.world.trace().hash(),
            events: self.world.trace().events(),
            virtual_ms: now.0 / 1_000_000,
            model_drafts: drafted.sum(),
            epochs: models.max().unwrap_or(0),
            ends,
            simulations,
            successions: self.submissions.all.iter().map(|submission| submission.successions).sum(),
            losses: losses.len() as u32,
            loss_ms_max: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
            pause_ms_max: longest.as_millis() as u64,
            stall_ms_max: self.stall().as_millis() as u64,
            settled_ms: self.mended.map_or(0, |mended| now.since(mended).as_millis() as u64),
            timeline: self.timeline.lines(&self.world, &works, self.origin),
            violations: self.violations,
        }
    }
}

/// The kind of a request's end.
fn kind_of_end(call: &Call) -> String {
    let kind = match call.ends.first() {
        None => "none",
        Some((_, DoneReason::Stop | DoneReason::Length)) => "done",
        Some((_, DoneReason::Cancelled)) => "cancelled",
        Some((_, DoneReason::Busy | DoneReason::Invalid(_))) => "refused",
        Some(_) if call.is_broken() => "broken",
        Some((_, DoneReason::Failed(reason))) => return failed(reason),
    };
    kind.to_string()
}

/// The kind of a simulation's end.
fn kind_of(end: Option<&End>) -> String {
    match end {
        None => "none".into(),
        Some(End::Done) => "done".into(),
        Some(End::Cancelled) => "cancelled".into(),
        Some(End::Broken) => "broken".into(),
        Some(End::Failed(reason)) => failed(reason),
    }
}

fn failed(reason: &str) -> String {
    let reason: String = reason.chars().filter(|c| !c.is_ascii_digit()).take(60).collect();
    format!("failed ({reason})")
}

/// Copy rate of hosts in cases with simulations, bytes per second.
const COPY_BYTES_PER_SECOND: u64 = 100_000_000;
/// Hosts join and the model is served within this time.
const SETUP_MAX: Duration = Duration::from_secs(20);
/// Everything settles within this time after healing: a job waits for hosts that are suspected, and a stage without a
/// coordinator is kept for ten seconds.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// Requests make progress while one of them has received a token within this time.
const GOES_ON: Duration = Duration::from_secs(5);
/// Check interval. Events carry their own times.
const LOOK: Duration = Duration::from_millis(20);
/// Final requests of which the standbys must follow one.
const LAST_TRIES: u32 = 4;
/// Tokens of a final request, and the number after which a standby that receives no rows has fallen behind.
const LAST_TOKENS: u32 = 200;
const FOLLOWED: u32 = 100;
/// Discovery interval.
const DISCOVERY: Duration = Duration::from_secs(5);
