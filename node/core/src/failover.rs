//! Failure decisions: which loss requires a new placement of a job, and which nodes are excluded from its next plan.
//!
//! Evidence comes from several sources (the coordinator's own leases, neighbours' reports, SWIM, the executor). This machine
//! weighs it for the jobs that this node coordinates. `job` does the replay: it holds the token log. Next: `job.rs`.
use crate::id::{Epoch, JobId, NodeId};
use crate::limits::{EXCLUDED, LINK_CUT};
use crate::place::{Place, PlaceSet};
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::DownReason;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{format, string::String, vec::Vec};
use partitioner::DeviceId;

/// A decision of failover.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailoverOutput {
    /// A participant is lost: report it.
    Lost { job: JobId, node: NodeId, silent_ms: u64 },
    /// Place the job again without the excluded nodes.
    Replan { job: JobId },
    /// A standby is lost; the job continues.
    StandbyLost { job: JobId, place: Place },
    /// An executor failed while it ran the job's requests.
    Strike { job: JobId, reason: String },
    /// For the log.
    Rejected { from: NodeId, what: String },
}

/// The participants of the jobs that this node coordinates, and the nodes excluded from each.
#[derive(Debug, Default)]
pub struct Failover {
    jobs: BTreeMap<JobId, Roster>,
    out: VecDeque<FailoverOutput>,
}

#[derive(Debug, Default)]
struct Roster {
    /// The epoch of the placement.
    epoch: Option<Epoch>,
    participants: BTreeSet<NodeId>,
    standbys: BTreeSet<NodeId>,
    excluded: BTreeMap<Place, Instant>,
    /// Nodes that this coordinator hears but a neighbour reports silent: the neighbour, and since when.
    reported: BTreeMap<NodeId, (NodeId, Instant)>,
    /// When a report by this node last cost another node its place.
    believed: BTreeMap<NodeId, Instant>,
    /// Participants, or devices of theirs, that no longer hold their stages of the present placement, but may still be used.
    emptied: PlaceSet,
    /// Requests received a strike for a failure under this placement.
    struck: bool,
    /// When an executor last failed.
    failed: BTreeMap<Place, Instant>,
}

impl Roster {
    fn has(&self, node: NodeId) -> bool {
        self.participants.contains(&node) || self.standbys.contains(&node)
    }

    /// Decides which end of a link that did not recover is lost, and how long the other end was silent.
    fn cut_off(&mut self, now: Instant) -> Option<(NodeId, Duration)> {
        let due = self.reported.iter().find(|&(_, &(_, since))| now.since(since) >= LINK_CUT);
        let (&node, &(by, since)) = due?;
        self.reported.remove(&node);
        self.believed.retain(|_, at| now.since(*at) < BELIEVED_ONCE);
        let again = self.believed.insert(by, now).is_some();
        Some((if again { by } else { node }, now.since(since)))
    }
}

impl Failover {
    /// Sets the standbys of a job.
    pub fn handle_standbys(&mut self, job: JobId, standbys: impl IntoIterator<Item = NodeId>) {
        self.jobs.entry(job).or_default().standbys = standbys.into_iter().collect();
    }

    /// Sets the participants of a job. The same epoch again (with other standbys) is not a new placement.
    pub fn handle_placed(&mut self, job: JobId, epoch: Epoch, participants: impl IntoIterator<Item = NodeId>) {
        let roster = self.jobs.entry(job).or_default();
        if roster.epoch.replace(epoch) == Some(epoch) {
            return;
        }
        roster.participants = participants.into_iter().collect();
        roster.reported.clear();
        roster.emptied.clear();
        roster.struck = false;
    }

    /// This node succeeds the silent coordinator of a job.
    pub fn handle_inherited(
        &mut self,
        now: Instant,
        job: JobId,
        participants: impl IntoIterator<Item = NodeId>,
        silent: (NodeId, Duration),
    ) {
        let roster = self.jobs.entry(job).or_default();
        roster.participants = participants.into_iter().collect();
        roster.excluded.insert(Place::Node(silent.0), now + EXCLUDED);
        if roster.participants.contains(&silent.0) {
            self.lose(now, job, silent.0, silent.1);
        } else {
            self.replan(job);
        }
    }

    /// The job ended.
    pub fn handle_ended(&mut self, job: JobId) {
        self.jobs.remove(&job);
    }

    /// The coordinator's own lease on a participant expired.
    pub fn handle_silent(&mut self, now: Instant, job: JobId, node: NodeId, silent: Duration) {
        self.lose(now, job, node, silent);
    }

    /// A participant reports its neighbour silent, or (with zero silence) heard again. If this coordinator hears the neighbour
    /// itself (`heard`), only their link may be cut: the neighbour counts as lost if the link has not recovered after
    /// `LINK_CUT`. If the reporter then reports a second such neighbour within a minute, the reporter counts as lost instead.
    pub fn handle_reported(
        &mut self,
        now: Instant,
        job: JobId,
        by: NodeId,
        node: NodeId,
        silent: Duration,
        heard: bool,
    ) {
        let both = |roster: &&mut Roster| roster.participants.contains(&node) && roster.participants.contains(&by);
        let Some(roster) = self.jobs.get_mut(&job).filter(both) else { return };
        if silent.is_zero() {
            roster.reported.remove(&node);
        } else if heard {
            roster.reported.entry(node).or_insert((by, now));
        } else {
            self.lose(now, job, node, silent);
        }
    }

    /// Checks for links that did not recover.
    pub fn handle_wakeup(&mut self, now: Instant) {
        // One at a time: the ends of a cut link report each other, and losing one end settles both reports.
        while let Some((job, node, silent)) = self.jobs.iter_mut().find_map(|(&job, roster)| {
            let (node, silent) = roster.cut_off(now)?;
            Some((job, node, silent))
        }) {
            self.lose(now, job, node, silent);
        }
    }

    /// When the next link check is due.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let reported = self.jobs.values().flat_map(|roster| roster.reported.values());
        reported.map(|&(_, since)| since).min().map(|since| (since + LINK_CUT, "failover: a link may be cut"))
    }

    /// SWIM declared a member down. A fresh lease (`heard`) outranks that, unless the node itself announced that it leaves.
    pub fn handle_peer_down(&mut self, now: Instant, node: NodeId, reason: DownReason, heard: bool) {
        if reason == DownReason::Failed && heard {
            return;
        }
        let takes_part = self.jobs.iter().filter(|(_, roster)| roster.has(node));
        let lost: Vec<JobId> = takes_part.map(|(&job, _)| job).collect();
        for job in lost {
            self.lose(now, job, node, Duration::ZERO);
        }
    }

    /// A node joined or rejoined: it may be used again.
    pub fn handle_peer_up(&mut self, node: NodeId) {
        if planted::has(Planted::RejoinIgnored) {
            return;
        }
        for roster in self.jobs.values_mut() {
            roster.excluded.retain(|place, _| place.node() != node);
        }
    }

    /// A lost participant is heard again before a new placement was made: it may be used.
    pub fn handle_back(&mut self, job: JobId, node: NodeId) {
        if planted::has(Planted::RejoinIgnored) {
            return;
        }
        if let Some(roster) = self.jobs.get_mut(&job) {
            roster.excluded.retain(|place, _| place.node() != node);
        }
    }

    /// A participant no longer holds its stages: the executor of a device failed, or (not `held`) the node restarted or
    /// dropped the job. A standby takes the stage over; without one the stage is loaded again, possibly on the same device. A
    /// second executor failure within a minute excludes the device. Only an executor failure counts against the running
    /// requests.
    pub fn handle_stage_failed(&mut self, now: Instant, job: JobId, place: Place, held: bool, reason: String) {
        let node = place.node();
        let Some(roster) = self.jobs.get_mut(&job).filter(|roster| roster.has(node)) else { return };
        if roster.standbys.contains(&node) {
            if roster.excluded.insert(place, now + EXCLUDED).is_some_and(|until| now < until) {
                return;
            }
            let what = format!("standby of job {:x} failed: {reason}", job.0);
            self.out.push_back(FailoverOutput::Rejected { from: node, what });
            return self.out.push_back(FailoverOutput::StandbyLost { job, place });
        }
        if !roster.emptied.insert(place) {
            return;
        }
        let strikes = held && !core::mem::replace(&mut roster.struck, true);
        let again = held && roster.failed.insert(place, now).is_some_and(|before| now.since(before) < EXCLUDED * 6);
        if again {
            roster.excluded.insert(place, now + EXCLUDED);
        }
        let what = format!("stage of job {:x} failed: {reason}", job.0);
        self.out.push_back(FailoverOutput::Rejected { from: node, what });
        if strikes {
            // Once per placement: stages that fail together are one failure of the batch that ran on them.
            self.out.push_back(FailoverOutput::Strike { job, reason });
        }
        self.replan(job);
    }

    /// A device of a participant could not load its stage.
    pub fn handle_unprepared(&mut self, now: Instant, job: JobId, device: DeviceId, reason: &str) {
        let node = NodeId::from(device);
        let Some(roster) = self.jobs.get_mut(&job).filter(|roster| roster.has(node)) else { return };
        roster.excluded.insert(Place::Device(device), now + EXCLUDED);
        let owns = !roster.standbys.contains(&node);
        let what = format!("cannot hold a stage of job {:x}: {reason}", job.0);
        self.out.push_back(FailoverOutput::Rejected { from: node, what });
        if owns {
            self.replan(job);
        }
    }

    fn lose(&mut self, now: Instant, job: JobId, node: NodeId, silent: Duration) {
        let Some(roster) = self.jobs.get_mut(&job) else { return };
        if roster.standbys.remove(&node) {
            roster.excluded.insert(Place::Node(node), now + EXCLUDED);
            return self.out.push_back(FailoverOutput::StandbyLost { job, place: Place::Node(node) });
        }
        if !roster.participants.remove(&node) {
            roster.reported.remove(&node);
            return;
        }
        roster.reported.retain(|&silent, &mut (by, _)| silent != node && by != node);
        if !planted::has(Planted::LostNotExcluded) {
            roster.excluded.insert(Place::Node(node), now + EXCLUDED);
        }
        let silent_ms = u64::try_from(silent.as_millis()).unwrap_or(u64::MAX);
        self.out.push_back(FailoverOutput::Lost { job, node, silent_ms });
        self.replan(job);
    }

    /// One replan for all losses noticed together: a second one would find nothing lost in the plan that the first one
    /// produced.
    fn replan(&mut self, job: JobId) {
        let replan = FailoverOutput::Replan { job };
        self.out.retain(|output| *output != replan);
        self.out.push_back(replan);
    }

    /// Asserts what holds between two inputs. `coordinates`: whether this node coordinates a job.
    ///
    /// # Panics
    /// An invariant is violated.
    pub fn assert_invariants(&self, coordinates: impl Fn(JobId) -> bool) {
        assert!(self.out.is_empty(), "{} outputs of failover are not routed", self.out.len());
        let over = self.jobs.keys().find(|job| !coordinates(**job));
        assert!(over.is_none(), "failover watches {over:?}, which this node does not coordinate");
    }

    /// Nodes and devices that the job's next plan must not use.
    pub fn excluded(&self, now: Instant, job: JobId) -> PlaceSet {
        let excluded = self.jobs.get(&job).into_iter().flat_map(|roster| &roster.excluded);
        let lasts = move |until: Instant| now < until || planted::has(Planted::RejoinIgnored);
        excluded.filter(move |(_, until)| lasts(**until)).map(|(&place, _)| place).collect()
    }

    /// Nodes and devices whose stages need a standby or another placement: the excluded ones, and those that no longer hold
    /// their stages.
    pub fn lost(&self, now: Instant, job: JobId) -> PlaceSet {
        let mut lost = self.excluded(now, job);
        lost.extend(self.jobs.get(&job).into_iter().flat_map(|roster| roster.emptied.iter()));
        lost
    }

    /// The next decision.
    pub fn poll_output(&mut self) -> Option<FailoverOutput> {
        self.out.pop_front()
    }
}

/// A node's reports cost at most one neighbour its place within this time.
const BELIEVED_ONCE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::LEASE;
    use alloc::vec;

    const JOB: JobId = JobId(7);
    const A: NodeId = NodeId([1; 16]);
    const B: NodeId = NodeId([2; 16]);

    fn at(ms: u64) -> Instant {
        Instant(0) + Duration::from_millis(ms)
    }

    fn placed() -> Failover {
        let mut failover = Failover::default();
        failover.handle_placed(JOB, epoch(1), [A, B]);
        failover
    }

    fn epoch(counter: u32) -> Epoch {
        Epoch { counter, issuer: A }
    }

    #[test]
    fn a_lost_standby_does_not_interrupt_the_job() {
        let mut failover = placed();
        let c = NodeId([3; 16]);
        failover.handle_standbys(JOB, [c]);
        failover.handle_silent(at(0), JOB, c, LEASE);
        assert_eq!(outputs(&mut failover), vec![FailoverOutput::StandbyLost { job: JOB, place: Place::Node(c) }]);
        assert_eq!(failover.excluded(at(1), JOB), PlaceSet::from_iter([c]));
    }

    fn outputs(failover: &mut Failover) -> Vec<FailoverOutput> {
        core::iter::from_fn(|| failover.poll_output()).collect()
    }

    #[test]
    fn a_lost_node_is_reported_once_and_excluded_until_it_rejoins() {
        let mut failover = placed();
        failover.handle_silent(at(0), JOB, A, LEASE);
        failover.handle_silent(at(1), JOB, A, LEASE);
        assert_eq!(
            outputs(&mut failover),
            vec![FailoverOutput::Lost { job: JOB, node: A, silent_ms: 340 }, FailoverOutput::Replan { job: JOB }]
        );
        assert_eq!(failover.excluded(at(2), JOB), PlaceSet::from_iter([A]));
        failover.handle_peer_up(A);
        assert!(failover.excluded(at(3), JOB).is_empty());
    }

    #[test]
    fn losses_noticed_together_are_replanned_together() {
        let mut failover = placed();
        failover.handle_silent(at(0), JOB, A, LEASE);
        failover.handle_silent(at(0), JOB, B, LEASE);
        let outputs = outputs(&mut failover);
        assert!(
            matches!(
                outputs[..],
                [
                    FailoverOutput::Lost { node: A, .. },
                    FailoverOutput::Lost { node: B, .. },
                    FailoverOutput::Replan { .. }
                ]
            ),
            "{outputs:?}"
        );
    }

    #[test]
    fn a_fresh_lease_outranks_swim_but_not_a_goodbye() {
        let mut failover = placed();
        failover.handle_peer_down(at(0), A, DownReason::Failed, true);
        assert_eq!(outputs(&mut failover), vec![]);
        failover.handle_peer_down(at(0), A, DownReason::Left, true);
        assert_eq!(outputs(&mut failover).len(), 2);
        failover.handle_peer_down(at(0), B, DownReason::Failed, false);
        assert_eq!(outputs(&mut failover).len(), 2);
    }

    #[test]
    fn a_link_that_recovers_in_time_costs_no_node_its_place() {
        let mut failover = placed();
        failover.handle_reported(at(0), JOB, A, B, LEASE, true);
        failover.handle_reported(at(900), JOB, A, B, Duration::ZERO, true);
        failover.handle_wakeup(at(1000));
        assert_eq!(outputs(&mut failover), vec![]);
        failover.handle_reported(at(2000), JOB, A, B, LEASE, true);
        assert_eq!(failover.next_wakeup().map(|(at, _)| at), Some(at(3000)));
        failover.handle_wakeup(at(3000));
        assert_eq!(outputs(&mut failover).len(), 2);
    }

    #[test]
    fn a_node_that_reports_several_neighbours_is_lost_itself() {
        let mut failover = Failover::default();
        let [c, d] = [NodeId([3; 16]), NodeId([4; 16])];
        failover.handle_placed(JOB, epoch(1), [A, B, c, d]);
        let lost = |failover: &mut Failover| {
            let lost = outputs(failover).into_iter().filter_map(|output| match output {
                FailoverOutput::Lost { node, .. } => Some(node),
                FailoverOutput::Replan { .. }
                | FailoverOutput::StandbyLost { .. }
                | FailoverOutput::Strike { .. }
                | FailoverOutput::Rejected { .. } => None,
            });
            lost.collect::<Vec<_>>()
        };
        failover.handle_reported(at(0), JOB, A, B, LEASE, true);
        failover.handle_wakeup(at(1000));
        assert_eq!(lost(&mut failover), [B], "one link may be cut");
        failover.handle_placed(JOB, epoch(2), [A, c, d]);
        failover.handle_reported(at(2000), JOB, A, c, LEASE, true);
        failover.handle_reported(at(2000), JOB, A, d, LEASE, true);
        failover.handle_wakeup(at(3000));
        assert_eq!(lost(&mut failover), [A]);
        failover.handle_placed(JOB, epoch(3), [A, c, d]);
        failover.handle_reported(at(70_000), JOB, A, c, LEASE, true);
        failover.handle_wakeup(at(71_000));
        assert_eq!(lost(&mut failover), [c], "old reports do not count");
    }

    #[test]
    fn a_standby_whose_device_fails_is_released_and_the_job_continues() {
        let mut failover = placed();
        let standby = NodeId([3; 16]);
        failover.handle_standbys(JOB, [standby]);
        failover.handle_stage_failed(at(0), JOB, Place::Device(standby.device(0)), true, "out of memory".into());
        failover.handle_stage_failed(at(1), JOB, Place::Device(standby.device(0)), true, "out of memory".into());
        let outputs = outputs(&mut failover);
        assert!(
            matches!(outputs[..], [FailoverOutput::Rejected { .. }, FailoverOutput::StandbyLost { .. }]),
            "{outputs:?}"
        );
        assert_eq!(failover.excluded(at(2), JOB), PlaceSet::from_iter([standby.device(0)]));
    }

    #[test]
    fn stages_that_fail_together_are_one_strike() {
        let mut failover = placed();
        for node in [A, B] {
            failover.handle_stage_failed(at(0), JOB, Place::Device(node.device(0)), true, "device lost".into());
        }
        let strikes = |failover: &mut Failover| {
            outputs(failover).iter().filter(|output| matches!(output, FailoverOutput::Strike { .. })).count()
        };
        assert_eq!(strikes(&mut failover), 1);
        failover.handle_placed(JOB, epoch(2), [A, B]);
        failover.handle_stage_failed(at(1), JOB, Place::Device(B.device(0)), true, "out of memory".into());
        assert_eq!(strikes(&mut failover), 1, "another placement, another strike");
        failover.handle_placed(JOB, epoch(3), [A, B]);
        failover.handle_stage_failed(at(2), JOB, Place::Node(A), false, "this node holds no stage of the job".into());
        assert_eq!(strikes(&mut failover), 0, "no request caused it");
    }

    #[test]
    fn a_restarted_node_has_lost_its_stage_and_may_be_used() {
        let mut failover = placed();
        failover.handle_stage_failed(at(0), JOB, Place::Node(A), false, "this node holds no stage of the job".into());
        assert!(outputs(&mut failover).contains(&FailoverOutput::Replan { job: JOB }));
        assert_eq!(failover.lost(at(1), JOB), PlaceSet::from_iter([A]));
        assert!(failover.excluded(at(1), JOB).is_empty());
        failover.handle_placed(JOB, epoch(2), [A, B]);
        assert!(failover.lost(at(2), JOB).is_empty());
    }

    #[test]
    fn a_device_that_fails_twice_is_excluded() {
        let mut failover = placed();
        failover.handle_stage_failed(at(0), JOB, Place::Device(A.device(0)), true, "out of memory".into());
        assert!(failover.excluded(at(1), JOB).is_empty());
        failover.handle_stage_failed(at(1), JOB, Place::Device(A.device(0)), true, "out of memory".into());
        assert!(failover.excluded(at(2), JOB).is_empty(), "the same failure, reported twice");
        failover.handle_placed(JOB, epoch(2), [A, B]);
        failover.handle_stage_failed(at(500), JOB, Place::Device(A.device(0)), true, "out of memory".into());
        assert_eq!(failover.excluded(at(501), JOB), PlaceSet::from_iter([A.device(0)]));
    }

    #[test]
    fn the_failure_of_a_device_does_not_concern_its_siblings() {
        let mut failover = placed();
        for (epoch_number, at_ms) in [(1, 0), (2, 500)] {
            failover.handle_placed(JOB, epoch(epoch_number), [A, B]);
            failover.handle_stage_failed(at(at_ms), JOB, Place::Device(A.device(1)), true, "device lost".into());
        }
        let lost = failover.lost(at(501), JOB);
        assert_eq!([lost.has(A.device(0)), lost.has(A.device(1)), lost.has(B.device(1))], [false, true, false]);
        failover.handle_stage_failed(at(502), JOB, Place::Node(A), false, "this node holds no such part".into());
        assert!(failover.lost(at(503), JOB).has(A.device(0)), "the node restarted");
        failover.handle_peer_up(A);
        assert!(failover.excluded(at(504), JOB).is_empty());
    }
}
