//! Runs one case: serve, let things go wrong, mend, and look whether everything ends well. All checkers watch.
use crate::case::{Ask, Case};
use crate::checker::bounds::{Bounds, leaks};
use crate::checker::epochs::Epochs;
use crate::checker::frames::Frames;
use crate::checker::owners::Owners;
use crate::checker::pauses::{LIMIT, Pauses};
use crate::checker::rings::Rings;
use crate::checker::survival::Survival;
use crate::checker::{membership, requests, rest, standbys};
use crate::faults::Fault;
use crate::host::{HostId, HostSpec};
use crate::timeline::{Line, Timeline, name, pauses};
use crate::workload::{Call, HEAD_DIED, WIDTH, Workload, request, wide_model};
use crate::world::{Told, World};
use crate::{Options, Timed, units};
use node_core::id::CallId;
use node_core::output::Event;
use node_core::time::{Duration, Instant};
use node_core::work::serve::{DoneReason, Sampling};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What became of a case.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Outcome {
    /// Its seed.
    pub seed: u64,
    /// The run's fingerprint: the same case has the same.
    pub trace: String,
    /// Events that reached nodes.
    pub events: u64,
    /// Virtual milliseconds in all.
    pub virtual_ms: u64,
    /// What must not be; empty if all is well.
    pub violations: Vec<String>,
    /// Ends of requests, by kind.
    pub ends: BTreeMap<String, u32>,
    /// Longest wait between two tokens of a request.
    pub pause_ms_max: u64,
    /// Losses after which requests must go on within a second.
    pub losses: u32,
    /// Longest wait of a request for its next token after one of them.
    pub loss_ms_max: u64,
    /// Longest wait of a request for its next token, or its end, after everything was mended.
    pub stall_ms_max: u64,
    /// From everything mended to everything at rest.
    pub settled_ms: u64,
    /// The highest epoch any head reached.
    pub epochs: u32,
    /// What happened, for people.
    #[serde(skip)]
    pub timeline: Vec<Line>,
}

/// Runs it.
pub fn run(case: &Case) -> Outcome {
    run_telling(case, Timeline::default())
}

/// Runs it with a timeline of the caller's choice.
pub fn run_telling(case: &Case, timeline: Timeline) -> Outcome {
    let mut run = Run::new(case, timeline);
    if run.serve() {
        run.go_wrong();
        run.end_well();
    }
    run.outcome()
}

struct Run<'a> {
    case: &'a Case,
    world: World,
    work: Workload,
    checks: Checks,
    timeline: Timeline,
    /// When the model was first served.
    origin: Instant,
    mended: Option<Instant>,
    asks: VecDeque<Ask>,
    cancels: Vec<(Instant, CallId)>,
    /// When the callers of calls that have not ended yet went away.
    gone: BTreeMap<CallId, Instant>,
    /// When the callers' host was last paused.
    stopped: Option<Instant>,
    /// Failed calls that were checked.
    failed: BTreeSet<CallId>,
    /// Calls that broke with their host and are asked again.
    again: VecDeque<CallId>,
    /// The life of the host that the callers use, and when they may look for another.
    head_life: u32,
    turn_at: Option<Instant>,
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
}

impl Checks {
    /// `full`: replay rings may be full in this world.
    fn violations(&self, full: bool) -> Vec<String> {
        let all = [
            self.epochs.violations(),
            self.bounds.violations(),
            self.frames.violations(),
            self.owners.violations(),
            if full { Vec::new() } else { self.rings.violations() },
        ];
        all.into_iter().flatten().collect()
    }
}

impl<'a> Run<'a> {
    fn new(case: &'a Case, timeline: Timeline) -> Self {
        let mut world = World::new(Options { seed: case.seed, ..case.network.clone() });
        let checks = Checks::default();
        world.observe(Box::new(checks.epochs.clone()));
        world.observe(Box::new(checks.bounds.clone()));
        world.observe(Box::new(checks.frames.clone()));
        world.observe(Box::new(checks.owners.clone()));
        world.observe(Box::new(checks.rings.clone()));
        world.observe(Box::new(checks.survival.clone()));
        world.observe(Box::new(checks.pauses.clone()));
        let mut spec = HostSpec::default();
        spec.capacity.memory_total = case.mesh.memory_mib << 20;
        spec.capacity.memory_free = case.mesh.memory_mib << 20;
        for index in 0..case.mesh.hosts as usize {
            spec.region = case.mesh.regions.get(index).copied().unwrap_or(0);
            let spec = if case.mesh.mixed { spec.clone().of_kind(index) } else { spec.clone() };
            let host = world.add_host(spec);
            world.start(host);
        }
        for host in 1..case.mesh.hosts {
            world.introduce(HostId(host), HEAD);
        }
        world.discover(DISCOVERY);
        let mut asks = case.requests.clone();
        asks.sort_by_key(|ask| ask.at);
        Run {
            case,
            work: Workload::of(HEAD, wide_model(case.mesh.layers, LAYER_BYTES, case.mesh.width)),
            checks,
            timeline,
            world,
            origin: Instant(0),
            mended: None,
            asks: asks.into(),
            cancels: Vec::new(),
            gone: BTreeMap::new(),
            stopped: None,
            failed: BTreeSet::new(),
            again: VecDeque::new(),
            head_life: 1,
            turn_at: None,
            violations: Vec::new(),
        }
    }

    /// Everybody meets, and the model is served for the first time.
    fn serve(&mut self) -> bool {
        let met = self.world.run_while_not(SETUP_MAX, LOOK, |world| membership::informed(world, &[]));
        if !met {
            self.violations
                .push(format!("hosts do not find each other: {:?}", membership::divergences(&self.world, &[])));
            return false;
        }
        self.world.run_for(Duration::from_millis(500)); // connections stand
        self.world.observe(Box::new(self.timeline.clone()));
        self.work.turn_to(&mut self.world, HEAD);
        let ready = self.work.run_until_ready(&mut self.world, SETUP_MAX);
        self.origin = self.world.now();
        if !ready {
            self.violations.push(format!("the model is not served: {:?}", self.work.notes.last()));
        }
        ready
    }

    /// Faults strike while requests come and go.
    fn go_wrong(&mut self) {
        let since = self.origin.since(Instant(0));
        let later = |timed: &Timed| Timed { at: timed.at + since, fault: timed.fault.clone() };
        self.world.schedule(self.case.faults.iter().map(later).collect());
        let end = self.origin + self.case.lasts;
        while self.world.now() < end {
            self.step(end);
        }
    }

    /// Everything works again, so everything ends.
    fn end_well(&mut self) {
        self.world.strike(Fault::Mend);
        let mended = self.world.now();
        self.mended = Some(mended);
        // The mending ends the process of a host that was leaving: callers see that before they ask anything else.
        self.step(mended + LOOK);
        let limit = mended + SETTLE_MAX;
        let ended = self.until(limit, |run| run.all_ended() && run.turn_at.is_none() && run.work.job.is_some());
        if !ended {
            let open = self.work.calls.iter().filter(|(_, call)| call.ends.is_empty()).map(|(id, _)| name(*id));
            let open: Vec<u64> = open.collect();
            let (asks, job) = (self.asks.len() + self.again.len(), self.work.job);
            let told = self.work.notes.last().map(|told| format!("{:?}", told.event));
            self.violations.push(format!(
                "{} after everything was mended calls {open:?} are open, {asks} not asked, job {job:?}, told last: {told:?}",
                units::text(SETTLE_MAX)
            ));
            return;
        }
        self.until(limit, |run| standbys::missing(&run.world, run.work.head).is_empty());
        self.violations.extend(standbys::missing(&self.world, self.work.head));
        let last = self.last_request(limit);
        let end = self.work.calls[&last].ends.first().map(|(_, reason)| reason);
        if !matches!(end, Some(DoneReason::Length | DoneReason::Stop)) {
            self.violations.push(format!("a request after everything was mended ends with {end:?}"));
        }
        if !self.until(limit, |run| membership::informed(&run.world, &[])) {
            let wrong = membership::divergences(&self.world, &[]);
            self.violations.push(format!("{} after the mending: {wrong:?}", units::text(SETTLE_MAX)));
        }
        self.until(limit, |run| leaks(&run.world).is_empty() && rest::orphans(&run.world).is_empty());
        self.violations.extend(leaks(&self.world));
        self.violations.extend(rest::orphans(&self.world));
    }

    /// Sends one more request, which standbys have to follow, and waits for its end.
    fn last_request(&mut self, limit: Instant) -> CallId {
        let (current, epoch) = (standbys::current(&self.world, self.work.head), self.work.epoch);
        let last = self.submit(Ask { prompt: 40, tokens: LAST_TOKENS, ..Ask::default() });
        self.timeline.note(self.world.now(), format!("final check request: call {}", name(last)));
        let ended = |run: &Self| !run.work.calls[&last].ends.is_empty();
        let behind = |run: &Self| {
            let now = standbys::current(&run.world, run.work.head);
            current.difference(&now).copied().collect::<Vec<_>>()
        };
        self.until(limit, |run| ended(run) || run.work.calls[&last].tokens.len() as u32 > FOLLOWED);
        if !ended(self) {
            self.until(limit, |run| ended(run) || behind(run).is_empty());
            let asked = self.work.calls[&last].submitted;
            let sought = |told: &Told| told.at >= asked && matches!(told.event, Event::Standby { current: false, .. });
            let stayed = self.work.epoch == epoch && !self.work.notes.iter().any(sought);
            if stayed && !behind(self).is_empty() {
                let behind = behind(self);
                self.violations.push(format!("standbys fall behind while one request runs: {behind:?}"));
            }
        }
        self.until(limit, ended);
        last
    }

    /// Checks what depends on the present state of the world.
    fn judge(&mut self) {
        let (now, head) = (self.world.now(), self.work.head);
        if self.world.host(head).paused_until.is_some() {
            self.stopped = Some(now);
        }
        self.checks.survival.look(&self.world, head, self.model_bytes());
        self.checks.owners.look(&self.world, head);
        let survival = &self.checks.survival;
        for (id, call) in &self.work.calls {
            let Some((at, reason)) = call.ends.first() else { continue };
            if let DoneReason::Failed(why) = reason
                && why != HEAD_DIED
                && self.failed.insert(*id)
                && let Some(doubt) = survival.doubt(*at, head)
            {
                self.violations.push(format!("call {} fails ({why}), {doubt}", name(*id)));
            }
            if let Some(cancelled) = self.gone.remove(id)
                && *at > cancelled + CANCEL_MAX
                && self.stopped.is_none_or(|stopped| stopped < cancelled)
            {
                let after = at.since(cancelled).as_millis();
                self.violations
                    .push(format!("call {} ends {after} ms after its caller went away: {reason:?}", name(*id)));
            }
        }
    }

    /// Bytes of weights and caches.
    fn model_bytes(&self) -> u64 {
        let work = &self.work.model.work;
        let positions = u64::from(work.context) * u64::from(work.sequences);
        let layers: u64 =
            work.layers.iter().map(|layer| layer.weight_bytes + layer.kv_bytes_per_token * positions).sum();
        layers + work.embed_bytes + work.head_bytes
    }

    fn all_ended(&self) -> bool {
        self.asks.is_empty() && self.again.is_empty() && self.work.calls.values().all(|call| !call.ends.is_empty())
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

    /// Lets a little time pass, and does what callers do.
    fn step(&mut self, end: Instant) {
        self.world.run_until((self.world.now() + LOOK).min(end));
        self.work.absorb(&mut self.world);
        self.judge();
        self.look_after_head();
        let now = self.world.now();
        if self.work.job.is_some() && self.turn_at.is_none() {
            while let Some(ask) = self.asks.pop_front_if(|ask| self.origin + ask.at.since(Instant(0)) <= now) {
                self.submit(ask);
            }
            while let Some(call) = self.again.pop_front() {
                let request = self.work.calls[&call].request.clone();
                self.work.submit(&mut self.world, request);
            }
        }
        let due: Vec<CallId> = self.cancels.extract_if(.., |(at, _)| *at <= now).map(|(_, call)| call).collect();
        for call in due {
            // A caller whose host is gone has nobody to tell.
            if self.work.calls.get(&call).is_some_and(|call| call.ends.is_empty()) && self.turn_at.is_none() {
                self.work.cancel(&mut self.world, call);
                self.gone.insert(call, now);
            }
        }
    }

    fn submit(&mut self, ask: Ask) -> CallId {
        let number = self.work.calls.len() as u64;
        let mut request = request(self.case.seed.wrapping_mul(1000).wrapping_add(number), ask.prompt, ask.tokens);
        if number % 3 == 2 {
            request.sampling = Sampling { temperature_e6: 800_000, seed: number, ..Sampling::GREEDY };
        }
        let call = self.work.submit(&mut self.world, request);
        self.cancels.extend(ask.cancel_after.map(|after| (self.world.now() + after, call)));
        call
    }

    /// Callers whose host died get an error, and turn to another host a while later.
    fn look_after_head(&mut self) {
        let now = self.world.now();
        let head = self.world.host(self.work.head);
        let gone = !head.runs() || head.life != self.head_life;
        if gone && self.turn_at.is_none() {
            let broken = self.work.head_died(now);
            self.timeline.note(now, format!("{} calls broke with host {}", broken.len(), self.work.head.0));
            self.again.extend(broken.into_iter().filter(|call| !self.work.calls[call].cancelled));
            self.turn_at = Some(now + TURN);
        }
        if self.turn_at.is_some_and(|at| at <= now) {
            let here = self.work.head.0;
            let count = self.case.mesh.hosts;
            let others = (1..=count).map(|step| HostId((here + step) % count));
            let usable = |host: &HostId| {
                let host = self.world.host(*host);
                host.runs() && host.paused_until.is_none() && !host.leaves
            };
            let Some(next) = others.into_iter().find(usable) else { return };
            self.turn_at = None;
            self.head_life = self.world.host(next).life;
            self.work.turn_to(&mut self.world, next);
            self.timeline.note(now, format!("callers turn to host {}", next.0));
        }
    }

    /// The longest time after the mending in which a request that was running got no further.
    fn stall(&self) -> Duration {
        let Some(mended) = self.mended else { return Duration::ZERO };
        let longest = |call: &Call| {
            let ended = call.ends.iter().map(|(at, _)| *at);
            let times = call.tokens.iter().map(|(at, ..)| *at).chain(ended).filter(|at| *at > mended);
            let mut last = mended.max(call.tokens.first().map_or(call.submitted, |(at, ..)| *at));
            times.map(|at| at.since(std::mem::replace(&mut last, at))).max().unwrap_or_default()
        };
        self.work.calls.values().map(longest).max().unwrap_or_default()
    }

    fn outcome(mut self) -> Outcome {
        // A full ring may lack the rows that a standby needs: they are computed again, which takes longer.
        let full = self.case.mesh.width > WIDTH;
        self.violations.extend(self.checks.violations(full));
        let losses = self.checks.pauses.losses(|host| self.world.host(host).node_id);
        let losses = if full { Vec::new() } else { losses };
        let waited = losses.iter().map(|loss| loss.waited).max().unwrap_or_default();
        let late = losses.iter().filter(|loss| loss.waited > LIMIT).map(|loss| {
            let (at, owners, waited) = (loss.at.0 / 1_000_000, loss.owners, loss.waited.as_millis());
            format!("{at} ms: {owners} stages are lost whose standbys were current, and a request waits {waited} ms")
        });
        self.violations.extend(late);
        if self.mended.is_some() {
            self.violations.extend(requests::violations(&self.work));
        }
        let mut ends = BTreeMap::new();
        for call in self.work.calls.values() {
            let kind = match call.ends.first() {
                None => "none",
                Some((_, DoneReason::Stop | DoneReason::Length)) => "done",
                Some((_, DoneReason::Cancelled)) => "cancelled",
                Some((_, DoneReason::Busy | DoneReason::Invalid(_))) => "refused",
                Some((_, DoneReason::Failed(reason))) if reason == HEAD_DIED => "broken",
                Some((_, DoneReason::Failed(reason))) => {
                    let reason: String = reason.chars().filter(|c| !c.is_ascii_digit()).take(60).collect();
                    *ends.entry(format!("failed ({reason})")).or_insert(0) += 1;
                    continue;
                }
            };
            *ends.entry(kind.to_string()).or_insert(0) += 1;
        }
        let longest = self.work.calls.values().flat_map(pauses).map(|(.., pause)| pause).max().unwrap_or_default();
        let now = self.world.now();
        let heads = self.world.hosts().filter_map(|host| host.node.as_ref());
        Outcome {
            seed: self.case.seed,
            trace: self.world.trace().hash(),
            events: self.world.trace().events(),
            virtual_ms: now.0 / 1_000_000,
            epochs: heads.flat_map(|node| node.jobs()).map(|view| view.epoch.counter).max().unwrap_or(0),
            ends,
            losses: losses.len() as u32,
            loss_ms_max: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
            pause_ms_max: longest.as_millis() as u64,
            stall_ms_max: self.stall().as_millis() as u64,
            settled_ms: self.mended.map_or(0, |mended| now.since(mended).as_millis() as u64),
            timeline: self.timeline.lines(&self.world, &self.work, self.origin),
            violations: self.violations,
        }
    }
}

/// The callers' first host.
const HEAD: HostId = HostId(0);
/// Weights of one layer, as `compute.rs` takes its time.
const LAYER_BYTES: u64 = 20 << 20;
/// Hosts meet and the model is served within this time, or something is wrong.
const SETUP_MAX: Duration = Duration::from_secs(20);
/// Everything that had gone wrong is over within this time after all is mended: a job whose hosts are suspected waits for
/// them, and a stage without a head is kept for ten seconds.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// How often callers look. What was told has its own time.
const LOOK: Duration = Duration::from_millis(20);
/// Callers whose host is gone look for another after this.
const TURN: Duration = Duration::from_millis(500);
/// A cancelled call ends within this time.
const CANCEL_MAX: Duration = Duration::from_secs(1);
/// Tokens of the last request, and the number after which a standby that receives no rows has fallen behind.
const LAST_TOKENS: u32 = 200;
const FOLLOWED: u32 = 100;
/// How often hosts find each other.
const DISCOVERY: Duration = Duration::from_secs(5);
