//! The state of all jobs up to an event, and whether a loss at the event must be recovered within the limit.
use super::{Entry, LIMIT, Loss, Seen};
use crate::host::HostId;
use node_core::id::{CallId, JobId, NodeId};
use node_core::time::{Duration, Instant};
use std::collections::{BTreeMap, BTreeSet};

/// All jobs.
pub(super) struct Stories<'a> {
    jobs: BTreeMap<JobId, Story>,
    /// Number of steps of the jobs that are simulations.
    simulations: &'a BTreeMap<JobId, u32>,
    /// Jobs that calls name. The other jobs of models are replicas (or draft models) of those at the same coordinator, and
    /// run requests whose calls name the first job.
    named: BTreeSet<JobId>,
    /// Until when another fault is active.
    trouble: Option<Instant>,
    /// When a request or simulation last arrived or was cancelled.
    changed: Option<Instant>,
}

/// One job.
#[derive(Default)]
struct Story {
    /// The coordinator.
    coordinator: Option<HostId>,
    owners: Vec<NodeId>,
    ready: bool,
    /// Standbys by part, and those of them that are current.
    standbys: BTreeMap<u16, NodeId>,
    current: BTreeMap<u16, NodeId>,
    /// When each running request had its last token, and the mean time between its recent ones.
    tokens: BTreeMap<CallId, (Instant, Duration)>,
    /// Simulations: when each step was reported, under the present placement and those that continued it.
    steps: Vec<(Instant, u32)>,
    /// Steps that owners and standbys of tiles last reported, under the present placement.
    held: BTreeMap<(u16, NodeId), u32>,
    /// When a request last gave up its pages.
    preempted: Option<Instant>,
}

impl<'a> Stories<'a> {
    pub(super) fn new(simulations: &'a BTreeMap<JobId, u32>, named: BTreeSet<JobId>) -> Self {
        Stories { jobs: BTreeMap::new(), simulations, named, trouble: None, changed: None }
    }

    fn is_replica(&self, job: JobId) -> bool {
        !self.named.contains(&job) && !self.simulations.contains_key(&job)
    }

    /// The job and its replicas.
    fn group<'b>(&'b self, job: JobId, story: &'b Story) -> impl Iterator<Item = (JobId, &'b Story)> {
        let is_model = !self.simulations.contains_key(&job);
        let replica = move |(id, other): &(&JobId, &Story)| {
            is_model && self.is_replica(**id) && **id != job && other.coordinator == story.coordinator
        };
        core::iter::once((job, story)).chain(self.jobs.iter().filter(replica).map(|(id, story)| (*id, story)))
    }

    pub(super) fn apply(&mut self, at: Instant, host: HostId, entry: &Seen, node: &impl Fn(HostId) -> NodeId) {
        match entry {
            Seen::Loss(hosts) => {
                self.trouble = self.trouble.max(Some(at));
                let dead: BTreeSet<NodeId> = hosts.iter().map(|host| node(*host)).collect();
                for (job, story) in &mut self.jobs {
                    if story.coordinator.is_some_and(|coordinator| hosts.contains(&coordinator))
                        && !self.simulations.contains_key(job)
                    {
                        *story = Story::default();
                    }
                    story.current.retain(|_, standby| !dead.contains(standby));
                    story.standbys.retain(|_, standby| !dead.contains(standby));
                }
            }
            Seen::Broken => self.trouble = self.trouble.max(Some(at)),
            Seen::Trouble(until) => self.trouble = self.trouble.max(Some(*until)),
            Seen::Changed => self.changed = Some(at),
            Seen::Over(job) => {
                // If another host has taken over, the former coordinator's end comes too late.
                if self.jobs.get(job).is_some_and(|story| story.coordinator == Some(host)) {
                    self.jobs.remove(job);
                }
            }
            Seen::Placed(job, ..)
            | Seen::Ready(job)
            | Seen::Standby(job, ..)
            | Seen::Token(job, _)
            | Seen::Ended(job, _)
            | Seen::Inherited(job)
            | Seen::Running(job, _)
            | Seen::Progress(job, _)
            | Seen::Moves(job)
            | Seen::Preempted(job)
            | Seen::Held(job, ..) => {
                self.jobs.entry(*job).or_default().apply(at, node(host), host, entry);
                // Which of the calls run in a replica is not recorded.
                if matches!(entry, Seen::Placed(..)) && self.is_replica(*job) {
                    let led = |story: &&mut Story| story.coordinator == Some(host);
                    self.jobs.values_mut().filter(led).for_each(|story| story.tokens.clear());
                }
            }
        }
    }

    /// The losses at this time that the limit applies to, one per job, together with a second loss that may follow.
    pub(super) fn losses(
        &self,
        at: Instant,
        dead: &[NodeId],
        after: &[Entry],
        node: &impl Fn(HostId) -> NodeId,
    ) -> Vec<Loss> {
        let quiet = self.trouble.is_none_or(|until| until + QUIET < at)
            && self.changed.is_none_or(|changed| changed + SETTLES < at);
        let Some((all, last)) = quiet.then(|| together(at, dead, after, node)).flatten() else { return Vec::new() };
        let of = |(job, story): (&JobId, &Story)| {
            let steps = self.simulations.get(job);
            let (simulation, died) = (steps.is_some(), !all.is_empty());
            let group: Vec<(JobId, &Story)> = self.group(*job, story).collect();
            let lost: Vec<Vec<u16>> =
                group.iter().map(|(_, story)| story.lost(&all, simulation, node)).collect::<Option<_>>()?;
            let lost = lost.concat();
            let led = story.coordinator.map(node)?;
            if lost.is_empty() && !dead.is_empty() && !(simulation && all.contains(&led)) {
                return None; // this job noticed nothing
            }
            let slack = if simulation { story.cycle() * CYCLES } else { story.token_time() };
            let (waited, back) = match steps {
                Some(steps) => story.resumed((*job, *steps), &lost, (at, last), died, after)?,
                None => {
                    let jobs: Vec<JobId> = group.iter().map(|(job, _)| *job).collect();
                    let preempted = group.iter().filter_map(|(_, story)| story.preempted).max();
                    (story.waited(&jobs, preempted, at, last, after)?, None)
                }
            };
            Some(Loss { at, last, simulation, owners: lost.len(), waited, slack, back })
        };
        self.jobs.iter().filter_map(of).collect()
    }
}

/// All nodes that die in this loss and in a second one that may follow, and when the last one does; `None` if there is
/// another fault.
fn together(
    at: Instant,
    dead: &[NodeId],
    after: &[Entry],
    node: &impl Fn(HostId) -> NodeId,
) -> Option<(Vec<NodeId>, Instant)> {
    let (mut all, mut last) = (dead.to_vec(), at);
    for (then, _, entry) in after {
        if *then > last + LIMIT {
            break;
        }
        match entry {
            // After a broken connection a loss is another fault.
            Seen::Loss(_) if dead.is_empty() => return None,
            Seen::Loss(hosts) => {
                all.extend(hosts.iter().map(|host| node(*host)));
                last = *then;
            }
            Seen::Trouble(_) => return None,
            Seen::Broken if dead.is_empty() => {}
            Seen::Broken => return None,
            Seen::Changed
            | Seen::Placed(..)
            | Seen::Ready(_)
            | Seen::Standby(..)
            | Seen::Token(..)
            | Seen::Ended(..)
            | Seen::Inherited(_)
            | Seen::Running(..)
            | Seen::Progress(..)
            | Seen::Held(..)
            | Seen::Moves(_)
            | Seen::Preempted(_)
            | Seen::Over(_) => {}
        }
    }
    Some((all, last))
}

impl Story {
    fn apply(&mut self, at: Instant, node: NodeId, host: HostId, entry: &Seen) {
        match entry {
            Seen::Placed(_, owners) => {
                (self.coordinator, self.owners, self.ready) = (Some(host), owners.clone(), false);
                self.current.clear();
                self.standbys.clear();
                self.held.clear();
                // A request runs once it has a token under this placement: what was computed may have to be computed again.
                self.tokens.clear();
            }
            Seen::Inherited(_) => self.coordinator = Some(host),
            Seen::Ready(_) => self.ready = true,
            Seen::Standby(_, stage, standby, current) => {
                self.standbys.insert(*stage, *standby);
                if *current {
                    self.current.insert(*stage, *standby);
                } else {
                    self.current.remove(stage);
                }
            }
            Seen::Token(_, call) => {
                let (last, gap) = self.tokens.get(call).copied().unwrap_or((at, Duration::ZERO));
                self.tokens.insert(*call, (at, (gap * 3 + at.since(last)) / 4));
            }
            Seen::Ended(_, call) => _ = self.tokens.remove(call),
            Seen::Running(_, step) => {
                self.ready = true;
                self.steps.retain(|(_, told)| told <= step);
                self.steps.push((at, *step));
            }
            Seen::Progress(_, step) => self.steps.push((at, *step)),
            Seen::Held(_, tile, step) => _ = self.held.insert((*tile, node), *step),
            Seen::Preempted(_) => self.preempted = Some(at),
            Seen::Loss(_) | Seen::Broken | Seen::Trouble(_) | Seen::Changed | Seen::Moves(_) | Seen::Over(_) => {}
        }
    }

    /// The longest mean time between tokens of a request, including the time of tiles on the same devices.
    fn token_time(&self) -> Duration {
        self.tokens.values().map(|(_, gap)| *gap).max().unwrap_or_default()
    }

    /// The mean time between the last progress reports of a simulation.
    fn cycle(&self) -> Duration {
        let last = &self.steps[self.steps.len().saturating_sub(CYCLES_SEEN)..];
        let (Some((first, _)), Some((end, _))) = (last.first(), last.last()) else { return Duration::ZERO };
        end.since(*first) / last.len() as u32
    }

    /// The lost stages or tiles, which may be none; `None` if the job need not continue without a pause.
    fn lost(&self, all: &[NodeId], simulation: bool, node: &impl Fn(HostId) -> NodeId) -> Option<Vec<u16>> {
        let coordinator = self.coordinator.map(node).filter(|_| self.ready)?;
        let lost: Vec<u16> =
            (0..).zip(&self.owners).filter(|(_, owner)| all.contains(owner)).map(|(at, _)| at).collect();
        let covered = |stage: &u16| self.current.get(stage).is_some_and(|standby| !all.contains(standby));
        let coordinator_lost = all.contains(&coordinator);
        // The standbys of two neighbouring tiles retain no halo strips for each other: if both are lost, all tiles may roll
        // back.
        let few = !simulation || lost.len() <= 1;
        let led = !coordinator_lost || simulation && self.has_majority(all, coordinator);
        (led && few && all.len() <= 2 && lost.iter().all(covered)).then_some(lost)
    }

    /// Whether more than half of a simulation's participants live, and one of them may succeed the coordinator.
    fn has_majority(&self, dead: &[NodeId], coordinator: NodeId) -> bool {
        let participants: BTreeSet<NodeId> = self.owners.iter().chain(self.standbys.values()).copied().collect();
        let live = participants.iter().filter(|node| !dead.contains(node)).count();
        let successors = || self.owners.iter().filter(|owner| **owner != coordinator);
        // A dead successor delays the takeover by its turn of a second.
        2 * live > participants.len() && successors().next().is_some() && !successors().any(|node| dead.contains(node))
    }

    /// The longest wait of a running request of these jobs, a first job and its replicas; `None` if no request was running, or
    /// if one waits for pages meanwhile. `preempted`: when one last did.
    fn waited(
        &self,
        jobs: &[JobId],
        preempted: Option<Instant>,
        at: Instant,
        last: Instant,
        after: &[Entry],
    ) -> Option<Duration> {
        let mut soon = after.iter().take_while(|(then, ..)| *then <= last + LIMIT);
        let waits = soon.any(|(_, _, entry)| matches!(entry, Seen::Preempted(of) if jobs.contains(of)));
        if waits || preempted.is_some_and(|preempted| preempted + RUNNING > at) {
            return None;
        }
        // A request that ended before the last loss did not wait for it.
        let over = |call: &CallId| {
            let mut between = after.iter().take_while(|(then, ..)| *then <= last);
            between.any(|(_, _, entry)| matches!(entry, Seen::Ended(_, of) if of == call))
        };
        let running = self.tokens.iter().filter(|(_, (token, _))| *token + RUNNING > at).map(|(call, _)| *call);
        let running = running.filter(|call| !over(call));
        running
            .map(|call| {
                // A new request takes its share of the stages, so a wait counts up to its arrival.
                let next = after.iter().find(|(then, _, entry)| {
                    let of = matches!(entry, Seen::Token(job_of, of) | Seen::Ended(job_of, of) if jobs.contains(job_of) && *of == call);
                    *then > last && (of || matches!(entry, Seen::Changed))
                });
                next.map_or(Duration::MAX, |(then, ..)| then.since(last))
            })
            .max()
    }

    /// How long a running simulation waits for its next step and, after a death, the step that it rolls back to and the one
    /// that all remaining participants had reported. `None` if it was not running, or is rebalanced meanwhile.
    #[expect(clippy::wildcard_enum_match_arm, reason = "the search is for one of many entries")]
    fn resumed(
        &self,
        (job, steps): (JobId, u32),
        lost: &[u16],
        (at, last): (Instant, Instant),
        died: bool,
        after: &[Entry],
    ) -> Option<(Duration, Option<(u32, u32)>)> {
        let (_, told) = self.steps.last().filter(|(told, _)| *told + RUNNING > at)?;
        let reported = |tile: &u16| self.held.get(&(*tile, *self.current.get(tile)?)).copied().or(Some(0));
        let kept = lost.iter().filter_map(reported).min().unwrap_or(*told).min(*told);
        let later = || after.iter().filter(|(then, ..)| *then > last);
        // A simulation that is rebalanced replays steps, but not because of the loss.
        if after
            .iter()
            .take_while(|(then, ..)| *then <= last + LIMIT)
            .any(|(_, _, entry)| matches!(entry, Seen::Moves(of) if *of == job))
        {
            return None;
        }
        let over = later().find(|(_, _, entry)| matches!(entry, Seen::Over(of) if *of == job)).map(|(then, ..)| *then);
        // It may resume before the last loss, if that concerns another job; or several times, if each loss concerns it.
        let runs: Vec<(Instant, u32)> = after
            .iter()
            .filter_map(|(then, _, entry)| match entry {
                Seen::Running(of, step) if died && *of == job => Some((*then, *step)),
                _ => None,
            })
            .collect();
        let runs = runs.iter().rfind(|(then, _)| *then <= last + LIMIT).or(runs.first()).copied();
        // If no process died, it continues from its step.
        let (from, back) = if died { runs.map(|(then, step)| (then.max(last), step))? } else { (last, *told) };
        let goes_on = later().find_map(|(then, _, entry)| match entry {
            Seen::Progress(of, step) if *of == job && *then > from && *step > back => Some(*then),
            _ => None,
        });
        let goes_on = if back >= steps { Some(from) } else { goes_on };
        let first = goes_on.into_iter().chain(over).min();
        Some((first.map_or(Duration::MAX, |then| then.since(last)), died.then_some((back, kept))))
    }
}

/// Time without another fault before a loss.
const QUIET: Duration = Duration::from_secs(5);
/// Time without a new or cancelled request before a loss: standbys follow a long prompt with some delay.
const SETTLES: Duration = Duration::from_secs(1);
/// Additional time of a simulation: its slowest tile catches up while its node computes two tiles.
const CYCLES: u32 = 3;
/// Number of progress reports that the mean covers.
const CYCLES_SEEN: usize = 8;
/// A request counts as running if its last token is no older than this, a simulation if its last step was reported as lately.
const RUNNING: Duration = Duration::from_secs(1);
