//! A request fails only if its coordinator is lost or leaves, if devices fail under it repeatedly, or if the mesh lacks
//! memory for the model for a long time. A simulation fails only if its coordinator leaves or the mesh lacks memory for it;
//! it is lost only with its coordinator and half of its participants.
use crate::faults::Fault;
use crate::host::{Host, HostId};
use crate::submissions::{End, Submission, Submissions};
use crate::world::{Observer, World};
use node_core::id::{Epoch, JobId};
use node_core::input::Input;
use node_core::job::JobState;
use node_core::limits::{DEGRADED_MAX, EXCLUDED, REQUEST_STRIKES_MAX};
use node_core::time::{Duration, Instant};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Records possible causes of failed requests and simulations. Clones share the record.
#[derive(Clone, Default)]
pub struct Survival {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// When a batch failed on a device, or a stage or tile could not be loaded.
    strikes: Vec<Instant>,
    /// When a node was asked to leave.
    leaves: Vec<(Instant, HostId)>,
    /// Every fault but restarts: when it struck, and until when it was active.
    faults: Vec<(Instant, Instant)>,
    /// Per coordinator: since when its usable hosts have had memory for all work without interruption, and when that was
    /// last checked.
    room: BTreeMap<HostId, (Instant, Instant)>,
    /// The same for free memory and the grid of a simulation.
    grid_room: BTreeMap<JobId, Instant>,
    /// The placement of each running simulation.
    standing: BTreeMap<JobId, Standing>,
    /// Jobs whose end was checked.
    judged: BTreeSet<JobId>,
    violations: Vec<String>,
}

/// A simulation's placement as its coordinator last had it.
struct Standing {
    coordinator: HostId,
    life: u32,
    epoch: Epoch,
    /// Since when it has run under this epoch.
    since: Instant,
    /// Owners and standbys.
    participants: BTreeSet<HostId>,
    /// Owners other than the coordinator: any of them may succeed it.
    successors: BTreeSet<HostId>,
    /// When the coordinator's process was found dead.
    dead: Option<Instant>,
    /// Participants that have run without interruption since then.
    sound: BTreeSet<HostId>,
}

impl Survival {
    /// All violations.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }

    /// Whether no fault was active from some seconds before `from` until `to`.
    pub fn is_calm(&self, from: Instant, to: Instant) -> bool {
        self.seen.borrow().faults_within(from, to) == 0
    }

    /// Records whether the hosts that a coordinator can use have memory for `bytes` together.
    pub fn look(&self, world: &World, coordinator: HostId, bytes: u64) {
        let of = |host: &Host| {
            let there = host.spec.capacity.devices.iter().zip(&host.executor.units).filter(|(_, unit)| !unit.gone);
            there.map(|(device, _)| device.memory_free).sum::<u64>()
        };
        let room: u64 = usable(world, coordinator).map(of).sum();
        let mut seen = self.seen.borrow_mut();
        let now = world.now();
        let before = seen.room.remove(&coordinator).filter(|(_, last)| *last + LOOKED > now);
        if room >= bytes * PLENTY {
            seen.room.insert(coordinator, (before.map_or(now, |(since, _)| since), now));
        }
    }

    /// Why a request to `coordinator` must not have failed at this time; `None` if it may have.
    pub fn doubt(&self, at: Instant, coordinator: HostId) -> Option<String> {
        let seen = self.seen.borrow();
        if seen.strikes.iter().filter(|strike| **strike <= at).count() >= REQUEST_STRIKES_MAX as usize {
            return None;
        }
        if seen.left(at, coordinator) {
            return None;
        }
        let (room, _) = seen.room.get(&coordinator).filter(|(since, _)| *since + (EXCLUDED + GRACE) < at)?;
        Some(format!(
            "though its coordinator lives, no device failed {REQUEST_STRIKES_MAX} times, and for {} ms (of {} that a job \
             waits) hosts had {PLENTY} times the memory of the model",
            at.since(*room).as_millis(),
            DEGRADED_MAX.as_millis()
        ))
    }

    /// Checks the end of each simulation, and records what may explain later ends. `hosts`: number of hosts in the mesh.
    pub fn look_at_simulations(&self, world: &World, submissions: &Submissions, hosts: u64) {
        let mut seen = self.seen.borrow_mut();
        for submission in submissions.all.iter().filter(|submission| submission.submitted.is_some()) {
            let job = submission.job();
            if submission.is_lost() {
                seen.lost(world.now(), submission);
            }
            match &submission.end {
                None => {
                    seen.measure_room(world, submission, hosts);
                    seen.record_placement(world, submission);
                }
                Some((at, End::Failed(why))) if seen.judged.insert(job) => {
                    let since = seen.grid_room.get(&job).filter(|since| **since + GRACE < *at).copied();
                    if let Some(since) = since.filter(|_| !seen.left(*at, submission.coordinator)) {
                        let (name, ms) = (submission.name(), at.since(since).as_millis());
                        seen.violations
                            .push(format!("{name} fails ({why}), though hosts had memory for it for {ms} ms"));
                    }
                }
                Some((_, End::Done | End::Cancelled | End::Broken | End::Failed(_))) => {}
            }
        }
    }
}

impl Seen {
    fn left(&self, at: Instant, host: HostId) -> bool {
        self.leaves.iter().any(|(left, of)| *of == host && *left <= at)
    }

    fn faults_within(&self, from: Instant, to: Instant) -> usize {
        self.faults.iter().filter(|(struck, until)| *until + QUIET > from && *struck <= to).count()
    }

    fn measure_room(&mut self, world: &World, submission: &Submission, hosts: u64) {
        let free: u64 = usable(world, submission.coordinator).map(|host| host.executor.memory_free()).sum();
        if free >= submission.bytes(hosts) {
            self.grid_room.entry(submission.job()).or_insert(world.now());
        } else {
            self.grid_room.remove(&submission.job());
        }
    }

    /// Records the placement, and the participants that are left once the coordinator is dead.
    fn record_placement(&mut self, world: &World, submission: &Submission) {
        let (job, now) = (submission.job(), world.now());
        let host = world.host(submission.coordinator);
        let view = host.node.as_ref().and_then(|node| node.jobs().find(|view| view.job == job));
        let before = self
            .standing
            .get(&job)
            .map(|standing| (standing.coordinator, standing.life, standing.epoch, standing.since));
        if let Some(view) = view {
            if view.state != JobState::Running {
                self.standing.remove(&job);
                return;
            }
            let owners: BTreeSet<HostId> = view.parts.iter().filter_map(|part| world.host_of(part.owner)).collect();
            let standbys = view.parts.iter().filter_map(|part| world.host_of(part.standby.as_ref()?.node?));
            let participants = owners.iter().copied().chain(standbys).collect();
            let same = before.filter(|(by, life, epoch, _)| (*by, *life, *epoch) == (host.id, host.life, view.epoch));
            let since = same.map_or(now, |(.., since)| since);
            let successors = owners.into_iter().filter(|owner| *owner != host.id).collect();
            let (coordinator, life, epoch) = (host.id, host.life, view.epoch);
            let (dead, sound) = (None, BTreeSet::new());
            let standing = Standing { coordinator, life, epoch, since, participants, successors, dead, sound };
            self.standing.insert(job, standing);
        } else if let Some(standing) = self.standing.get_mut(&job) {
            let died =
                world.host(standing.coordinator).life != standing.life || !world.host(standing.coordinator).runs();
            if died && standing.dead.is_none() {
                standing.dead = Some(now);
                standing.sound = standing.participants.clone();
                standing.sound.remove(&standing.coordinator);
            }
            standing.sound.retain(|host| is_sound(world, *host));
        }
    }

    /// A simulation was lost with its coordinator: checks whether a successor had to take it over.
    fn lost(&mut self, now: Instant, submission: &Submission) {
        let Some(standing) = self.standing.remove(&submission.job()) else { return };
        let Some(dead) = standing.dead.filter(|dead| standing.since + SETTLES < *dead) else { return };
        let (left, all) = (standing.sound.len(), standing.participants.len());
        let succeeds = standing.successors.iter().any(|host| standing.sound.contains(host));
        // The loss itself is one fault.
        if 2 * left > all && succeeds && self.faults_within(dead, (dead + SUCCEEDS).min(now)) <= 1 {
            let name = submission.name();
            self.violations
                .push(format!("{name} is lost with its coordinator, though {left} of {all} participants lived"));
        }
    }
}

fn is_sound(world: &World, host: HostId) -> bool {
    let host = world.host(host);
    host.runs() && host.paused_until.is_none() && !host.leaves
}

/// Hosts that a coordinator can use.
fn usable(world: &World, coordinator: HostId) -> impl Iterator<Item = &Host> {
    world.hosts().filter(move |host| {
        let linked =
            host.id == coordinator || (world.reaches(host.id, coordinator) && world.reaches(coordinator, host.id));
        host.runs() && host.paused_until.is_none() && !host.leaves && linked
    })
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker handles few of many variants")]
impl Observer for Survival {
    fn input(&mut self, at: Instant, host: HostId, input: &Input) {
        let mut seen = self.seen.borrow_mut();
        match input {
            Input::Ran { result: Err(_), .. } | Input::Loaded { result: Err(_), .. } => seen.strikes.push(at),
            Input::Leave => seen.leaves.push((at, host)),
            _ => {}
        }
    }

    fn fault(&mut self, at: Instant, fault: &Fault) {
        // An ambush is recorded as the outage that it causes.
        if !matches!(fault, Fault::Restart { .. } | Fault::Ambush { .. }) {
            let lasts = if matches!(fault, Fault::Outage { .. }) { Duration::ZERO } else { fault.lasts() };
            self.seen.borrow_mut().faults.push((at, at + lasts));
        }
    }
}

/// Layers do not fill hosts to the last byte, and a stage needs consecutive layers.
const PLENTY: u64 = 2;
/// From a host becoming usable again to a plan with it.
const GRACE: Duration = Duration::from_secs(3);
/// Checks without interruption follow each other within this time.
const LOOKED: Duration = Duration::from_millis(100);
/// Time after a fault in which its consequences may delay work.
const QUIET: Duration = Duration::from_secs(5);
/// From the start of a placement until all successors know it and the standbys of its tiles.
const SETTLES: Duration = Duration::from_secs(2);
/// From the loss of a coordinator to the takeover, with a turn for each earlier successor.
const SUCCEEDS: Duration = Duration::from_secs(6);
