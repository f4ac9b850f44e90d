//! A request waits at most one second for its next token after the loss of a stage with a current standby, of two such
//! stages, or of all connections, if there is no other fault meanwhile. A simulation waits as long for its next step
//! after the loss of a tile with a current standby, or of its coordinator if most participants live; it rolls back no
//! further than to what its standbys had reported.
//!
//! Events are recorded as they happen and evaluated at the end: a loss counts only if the time around it was quiet.
mod story;

use crate::faults::Fault;
use crate::host::HostId;
use crate::units;
use crate::world::Observer;
use node_core::codec;
use node_core::id::{CallId, JobId, NodeId};
use node_core::input::Input;
use node_core::message::{FromTile, Message, ToCoordinator};
use node_core::output::{Event, Output};
use node_core::time::{Duration, Instant};
use node_core::work::steps::StepsEvent;
use node_core::work::{JobSpec, Placement};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use story::Stories;

/// Records losses, standbys, tokens and steps. Clones share the record.
#[derive(Clone, Default)]
pub struct Pauses {
    seen: Rc<RefCell<Record>>,
}

#[derive(Default)]
struct Record {
    entries: Vec<Entry>,
    /// The job of each call of a host.
    calls: BTreeMap<(HostId, CallId), JobId>,
    /// Number of steps of each simulation.
    simulations: BTreeMap<JobId, u32>,
}

impl Record {
    fn message(&mut self, at: Instant, host: HostId, message: &Message) {
        if let Message::ToCoordinator { job, say: ToCoordinator::Tile(FromTile::Progress { part, step, .. }), .. } =
            message
        {
            self.entries.push((at, host, Seen::Held(*job, part.0, *step)));
        }
    }
}

type Entry = (Instant, HostId, Seen);

enum Seen {
    /// Processes died.
    Loss(Vec<HostId>),
    /// A connection broke.
    Broken,
    /// Another fault is active until then.
    Trouble(Instant),
    /// Owners of the stages, first to last, or of the tiles.
    Placed(JobId, Vec<NodeId>),
    Ready(JobId),
    /// The standby of a stage or tile, and whether it is current.
    Standby(JobId, u16, NodeId, bool),
    Token(JobId, CallId),
    Ended(JobId, CallId),
    /// A caller disconnected, or a request or simulation arrived.
    Changed,
    /// A successor took a simulation over.
    Inherited(JobId),
    /// It runs again from this step.
    Running(JobId, u32),
    /// All tiles have completed this step.
    Progress(JobId, u32),
    /// An owner or standby of a tile reports this step.
    Held(JobId, u16, u32),
    /// The job is rebalanced.
    Moves(JobId),
    /// A request of the job waits for pages.
    Preempted(JobId),
    /// The job has ended, or another host continues it.
    Over(JobId),
}

/// A loss after which requests and simulations must continue within [`LIMIT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// When the first process died.
    pub at: Instant,
    /// When the last one did.
    pub last: Instant,
    /// Whether the job is a simulation.
    pub simulation: bool,
    /// Lost stages or tiles; 0 if only connections broke.
    pub owners: usize,
    /// Longest wait of a running request for its next token, or of the simulation for its next step, from the last death on.
    pub waited: Duration,
    /// Time allowed in addition to the limit, where tokens or steps take long.
    pub slack: Duration,
    /// The step that the simulation rolled back to, and the one that it had to keep.
    pub back: Option<(u32, u32)>,
}

impl Loss {
    /// The violation, if there is one.
    pub fn violation(&self, limit: Duration) -> Option<String> {
        let (ms, owners, waited) = (self.at.0 / 1_000_000, self.owners, units::text(self.waited));
        let (parts, waits) = if self.simulation { ("tiles", "a simulation") } else { ("stages", "a request") };
        if self.waited > limit + self.slack {
            let waited = if self.waited == Duration::MAX { "forever".into() } else { waited };
            return Some(format!(
                "{ms} ms: {owners} {parts} with current standbys are lost, and {waits} waits {waited}"
            ));
        }
        let (back, kept) = self.back.filter(|(back, kept)| back < kept)?;
        Some(format!(
            "{ms} ms: {owners} {parts} with current standbys are lost, and {waits} rolls back to step {back}, though all \
             remaining participants had reported step {kept}"
        ))
    }
}

impl Pauses {
    /// All losses that [`LIMIT`] applies to. `node` maps hosts to nodes.
    pub fn losses(&self, node: impl Fn(HostId) -> NodeId) -> Vec<Loss> {
        let seen = self.seen.borrow();
        let mut stories = Stories::new(&seen.simulations, seen.calls.values().copied().collect());
        let mut losses = Vec::new();
        for (index, (at, host, entry)) in seen.entries.iter().enumerate() {
            let dead: Option<Vec<NodeId>> = match entry {
                Seen::Loss(hosts) => Some(hosts.iter().map(|host| node(*host)).collect()),
                Seen::Broken => Some(Vec::new()),
                Seen::Trouble(_)
                | Seen::Placed(..)
                | Seen::Ready(_)
                | Seen::Standby(..)
                | Seen::Token(..)
                | Seen::Ended(..)
                | Seen::Changed
                | Seen::Inherited(_)
                | Seen::Running(..)
                | Seen::Progress(..)
                | Seen::Held(..)
                | Seen::Moves(_)
                | Seen::Preempted(_)
                | Seen::Over(_) => None,
            };
            if let Some(dead) = dead {
                losses.extend(stories.losses(*at, &dead, &seen.entries[index + 1..], &node));
            }
            stories.apply(*at, *host, entry, &node);
        }
        losses
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker handles few of many variants")]
impl Observer for Pauses {
    fn input(&mut self, at: Instant, host: HostId, input: &Input) {
        let mut seen = self.seen.borrow_mut();
        match input {
            Input::Submit { call, job, .. } => _ = seen.calls.insert((host, *call), *job),
            Input::Start { job, .. } => match &**job {
                JobSpec::Steps(spec) => _ = seen.simulations.insert(spec.job, spec.schedule.steps),
                JobSpec::Serve(_) => return,
            },
            Input::Cancel { .. } | Input::End { .. } => {}
            _ => return,
        }
        seen.entries.push((at, host, Seen::Changed));
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        if let Output::SendMessage { bytes, .. } = output
            && let Ok(message) = codec::decode_message(bytes)
        {
            self.seen.borrow_mut().message(at, host, &message);
        }
        let Output::Notify(event) = output else { return };
        let mut seen = self.seen.borrow_mut();
        let job_of = |seen: &Record, call: &CallId| seen.calls.get(&(host, *call)).copied();
        let entry = match event {
            Event::JobPlaced { job, placement, .. } => Some(match &**placement {
                Placement::Stages(stages) => Seen::Placed(*job, stages.iter().map(|(node, _)| *node).collect()),
                Placement::Tiles { tiles, .. } => Seen::Placed(*job, tiles.iter().map(|(node, _)| *node).collect()),
            }),
            Event::JobReady { job, .. } if seen.simulations.contains_key(job) => None,
            Event::JobReady { job, .. } => Some(Seen::Ready(*job)),
            Event::Steps { job, event: StepsEvent::Runs { step } } => Some(Seen::Running(*job, *step)),
            Event::Standby { job, part, node, current } => Some(Seen::Standby(*job, part.0, *node, *current)),
            Event::Token { call, .. } => job_of(&seen, call).map(|job| Seen::Token(job, *call)),
            // Other checkers check the reason.
            Event::Done { call, .. } => job_of(&seen, call).map(|job| Seen::Ended(job, *call)),
            Event::JobInherited { job, .. } => Some(Seen::Inherited(*job)),
            Event::Steps { job, event: StepsEvent::Progress { step } } => Some(Seen::Progress(*job, *step)),
            Event::JobMoves { job, .. } => Some(Seen::Moves(*job)),
            Event::Preempted { job, .. } => Some(Seen::Preempted(*job)),
            Event::JobEnded { job, .. } => Some(Seen::Over(*job)),
            _ => None,
        };
        seen.entries.extend(entry.map(|entry| (at, host, entry)));
    }

    fn fault(&mut self, at: Instant, fault: &Fault) {
        let entry = match fault {
            Fault::Crash(host) => Seen::Loss(vec![*host]),
            Fault::Outage { hosts, .. } => Seen::Loss(hosts.clone()),
            Fault::Break(..) => Seen::Broken,
            // Forged messages must delay no request, a restart does not, and an ambush is recorded as the outage that it
            // causes.
            Fault::Restart { .. } | Fault::Ambush { .. } | Fault::Lies { .. } => return,
            // A coordinator does not notice that its own tile's executor has stalled, and a drain or a node that leaves may
            // cause a new placement: those count as other faults.
            other => Seen::Trouble(at + other.lasts()),
        };
        self.seen.borrow_mut().entries.push((at, HostId(0), entry));
    }
}

/// Longest wait: a lease of 340 ms, a promotion, and the positions that the standby is behind.
pub const LIMIT: Duration = Duration::from_secs(1);
