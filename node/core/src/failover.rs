//! Which loss means that a job must be placed anew, and which nodes stay out of its next plan.
//!
//! Evidence comes from several places (the head's own leases, neighbours' reports, SWIM, the executor); this machine
//! weighs it for the jobs of which this node is the head. Replay itself is `job`'s: it holds the token log.
//! Next: `job.rs`.
use crate::id::{Epoch, JobId, NodeId};
use crate::limits::{EXCLUDED, LINK_CUT};
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::DownReason;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{format, string::String, vec::Vec};

/// What failover decides.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailoverOutput {
    /// A participant is lost: tell people.
    Lost { job: JobId, node: NodeId, silent_ms: u64 },
    /// Place the job anew without the excluded nodes.
    Replan { job: JobId },
    /// A standby is lost: the job goes on.
    StandbyLost { job: JobId, node: NodeId },
    /// An executor failed under the job's requests.
    Strike { job: JobId, reason: String },
    /// For the log.
    Refused { from: NodeId, what: String },
}

/// The participants of the jobs headed here, and who of them is not to be used.
#[derive(Debug, Default)]
pub struct Failover {
    jobs: BTreeMap<JobId, Guard>,
    out: VecDeque<FailoverOutput>,
}

#[derive(Debug, Default)]
struct Guard {
    /// Under which placement.
    epoch: Option<Epoch>,
    participants: BTreeSet<NodeId>,
    standbys: BTreeSet<NodeId>,
    excluded: BTreeMap<NodeId, Instant>,
    /// Nodes that this head hears but a neighbour does not: which neighbour, and since when.
    reported: BTreeMap<NodeId, (NodeId, Instant)>,
    /// When a node's report cost another one its place last.
    believed: BTreeMap<NodeId, Instant>,
    /// Participants that hold their stage of the present placement no longer, and may still be used.
    emptied: BTreeSet<NodeId>,
    /// Requests were struck for a failure under this placement.
    struck: bool,
    /// When an executor failed last, per node.
    failed: BTreeMap<NodeId, Instant>,
}

impl Guard {
    fn has(&self, node: NodeId) -> bool {
        self.participants.contains(&node) || self.standbys.contains(&node)
    }

    /// Which end of a link that did not heal goes, and for how long the other one was not heard.
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
    /// A job has these standbys from now on.
    pub fn handle_standbys(&mut self, job: JobId, standbys: impl IntoIterator<Item = NodeId>) {
        self.jobs.entry(job).or_default().standbys = standbys.into_iter().collect();
    }

    /// A job has these participants from now on; the same again (with other standbys) is no new placement.
    pub fn handle_placed(&mut self, job: JobId, epoch: Epoch, participants: impl IntoIterator<Item = NodeId>) {
        let guard = self.jobs.entry(job).or_default();
        if guard.epoch.replace(epoch) == Some(epoch) {
            return;
        }
        guard.participants = participants.into_iter().collect();
        guard.reported.clear();
        guard.emptied.clear();
        guard.struck = false;
    }

    /// This node takes a job over from its coordinator, which is silent.
    pub fn handle_inherited(
        &mut self,
        now: Instant,
        job: JobId,
        participants: impl IntoIterator<Item = NodeId>,
        silent: (NodeId, Duration),
    ) {
        let guard = self.jobs.entry(job).or_default();
        guard.participants = participants.into_iter().collect();
        guard.excluded.insert(silent.0, now + EXCLUDED);
        if guard.participants.contains(&silent.0) {
            self.lose(now, job, silent.0, silent.1);
        } else {
            self.replan(job);
        }
    }

    /// A job is over.
    pub fn handle_ended(&mut self, job: JobId) {
        self.jobs.remove(&job);
    }

    /// The head's own lease on a participant ran out.
    pub fn handle_silent(&mut self, now: Instant, job: JobId, node: NodeId, silent: Duration) {
        self.lose(now, job, node, silent);
    }

    /// A participant reports its neighbour silent, or (with no silence) heard again. If this head hears the neighbour
    /// itself (`heard`), only their link may be cut: the neighbour goes if that has not healed after `LINK_CUT`. A node that does
    /// not hear a second neighbour within a minute, though this one hears that one too, goes itself.
    pub fn handle_reported(
        &mut self,
        now: Instant,
        job: JobId,
        by: NodeId,
        node: NodeId,
        silent: Duration,
        heard: bool,
    ) {
        let both = |guard: &&mut Guard| guard.participants.contains(&node) && guard.participants.contains(&by);
        let Some(guard) = self.jobs.get_mut(&job).filter(both) else { return };
        if silent.is_zero() {
            guard.reported.remove(&node);
        } else if heard {
            guard.reported.entry(node).or_insert((by, now));
        } else {
            self.lose(now, job, node, silent);
        }
    }

    /// Links that did not heal.
    pub fn handle_wakeup(&mut self, now: Instant) {
        // One at a time: the ends of a cut link report each other, and losing one end settles it.
        while let Some((job, node, silent)) = self.jobs.iter_mut().find_map(|(&job, guard)| {
            let (node, silent) = guard.cut_off(now)?;
            Some((job, node, silent))
        }) {
            self.lose(now, job, node, silent);
        }
    }

    /// When the next of them is due.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let reported = self.jobs.values().flat_map(|guard| guard.reported.values());
        reported.map(|&(_, since)| since).min().map(|since| (since + LINK_CUT, "failover: a link may be cut"))
    }

    /// SWIM says that a member is gone. A fresh lease (`heard`) outranks it, unless the node said so itself.
    pub fn handle_peer_down(&mut self, now: Instant, node: NodeId, reason: DownReason, heard: bool) {
        if reason == DownReason::Failed && heard {
            return;
        }
        let takes_part = self.jobs.iter().filter(|(_, guard)| guard.has(node));
        let lost: Vec<JobId> = takes_part.map(|(&job, _)| job).collect();
        for job in lost {
            self.lose(now, job, node, Duration::ZERO);
        }
    }

    /// A node joined, or came back: it may be used again.
    pub fn handle_peer_up(&mut self, node: NodeId) {
        if planted::has(Planted::BackIgnored) {
            return;
        }
        for guard in self.jobs.values_mut() {
            guard.excluded.remove(&node);
        }
    }

    /// A participant that was lost is heard again before anything else was placed: it may be used.
    pub fn handle_back(&mut self, job: JobId, node: NodeId) {
        if planted::has(Planted::BackIgnored) {
            return;
        }
        if let Some(guard) = self.jobs.get_mut(&job) {
            guard.excluded.remove(&node);
        }
    }

    /// A participant holds its stage no longer: its executor failed, or (not `held`) the node was restarted or dropped the job. A
    /// standby takes the stage over; without one the stage is loaded again, on the same node too. A second executor failure within
    /// a minute excludes the node. Only an executor failure counts against the running requests.
    pub fn handle_stage_failed(&mut self, now: Instant, job: JobId, node: NodeId, held: bool, reason: String) {
        let Some(guard) = self.jobs.get_mut(&job).filter(|guard| guard.has(node)) else { return };
        if guard.standbys.remove(&node) {
            guard.excluded.insert(node, now + EXCLUDED);
            let what = format!("standby of job {:x} failed: {reason}", job.0);
            self.out.push_back(FailoverOutput::Refused { from: node, what });
            return self.out.push_back(FailoverOutput::StandbyLost { job, node });
        }
        if !guard.emptied.insert(node) {
            return;
        }
        let strikes = held && !core::mem::replace(&mut guard.struck, true);
        let again = held && guard.failed.insert(node, now).is_some_and(|before| now.since(before) < EXCLUDED * 6);
        if again {
            guard.excluded.insert(node, now + EXCLUDED);
        }
        let what = format!("stage of job {:x} failed: {reason}", job.0);
        self.out.push_back(FailoverOutput::Refused { from: node, what });
        if strikes {
            // Once per placement: stages that fail together are one failure of the batch that ran on them.
            self.out.push_back(FailoverOutput::Strike { job, reason });
        }
        self.replan(job);
    }

    /// A participant could not hold its stage.
    pub fn handle_unprepared(&mut self, now: Instant, job: JobId, node: NodeId, reason: &str) {
        let Some(guard) = self.jobs.get_mut(&job).filter(|guard| guard.has(node)) else { return };
        guard.excluded.insert(node, now + EXCLUDED);
        let owns = !guard.standbys.remove(&node);
        let what = format!("cannot hold a stage of job {:x}: {reason}", job.0);
        self.out.push_back(FailoverOutput::Refused { from: node, what });
        if owns {
            self.replan(job);
        }
    }

    fn lose(&mut self, now: Instant, job: JobId, node: NodeId, silent: Duration) {
        let Some(guard) = self.jobs.get_mut(&job) else { return };
        if guard.standbys.remove(&node) {
            guard.excluded.insert(node, now + EXCLUDED);
            return self.out.push_back(FailoverOutput::StandbyLost { job, node });
        }
        if !guard.participants.remove(&node) {
            guard.reported.remove(&node);
            return;
        }
        guard.reported.retain(|&silent, &mut (by, _)| silent != node && by != node);
        if !planted::has(Planted::LostNotExcluded) {
            guard.excluded.insert(node, now + EXCLUDED);
        }
        let silent_ms = u64::try_from(silent.as_millis()).unwrap_or(u64::MAX);
        self.out.push_back(FailoverOutput::Lost { job, node, silent_ms });
        self.replan(job);
    }

    /// Once for all losses noticed together: a second request would find nothing lost in the plan that the first one made.
    fn replan(&mut self, job: JobId) {
        let replan = FailoverOutput::Replan { job };
        self.out.retain(|output| *output != replan);
        self.out.push_back(replan);
    }

    /// Who must not be in the job's next plan.
    pub fn excluded(&self, now: Instant, job: JobId) -> impl Iterator<Item = NodeId> + '_ {
        let excluded = self.jobs.get(&job).into_iter().flat_map(|guard| &guard.excluded);
        let lasts = move |until: Instant| now < until || planted::has(Planted::BackIgnored);
        excluded.filter(move |(_, until)| lasts(**until)).map(|(&node, _)| node)
    }

    /// Nodes whose stages need a standby or another placement: those that are excluded, and those that hold nothing any more.
    pub fn lost(&self, now: Instant, job: JobId) -> impl Iterator<Item = NodeId> + '_ {
        let emptied = self.jobs.get(&job).into_iter().flat_map(|guard| &guard.emptied).copied();
        self.excluded(now, job).chain(emptied)
    }

    /// The next decision.
    pub fn poll_output(&mut self) -> Option<FailoverOutput> {
        self.out.pop_front()
    }
}

/// Within this time a node's reports cost one neighbour its place at most.
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

    fn guarded() -> Failover {
        let mut failover = Failover::default();
        failover.handle_placed(JOB, epoch(1), [A, B]);
        failover
    }

    fn epoch(counter: u32) -> Epoch {
        Epoch { counter, issuer: A }
    }

    #[test]
    fn a_lost_standby_disturbs_nobody() {
        let mut failover = guarded();
        let c = NodeId([3; 16]);
        failover.handle_standbys(JOB, [c]);
        failover.handle_silent(at(0), JOB, c, LEASE);
        assert_eq!(outputs(&mut failover), vec![FailoverOutput::StandbyLost { job: JOB, node: c }]);
        assert_eq!(failover.excluded(at(1), JOB).collect::<Vec<_>>(), vec![c]);
    }

    fn outputs(failover: &mut Failover) -> Vec<FailoverOutput> {
        core::iter::from_fn(|| failover.poll_output()).collect()
    }

    #[test]
    fn a_lost_node_is_lost_once_and_stays_out_until_it_comes_back() {
        let mut failover = guarded();
        failover.handle_silent(at(0), JOB, A, LEASE);
        failover.handle_silent(at(1), JOB, A, LEASE);
        assert_eq!(
            outputs(&mut failover),
            vec![FailoverOutput::Lost { job: JOB, node: A, silent_ms: 340 }, FailoverOutput::Replan { job: JOB }]
        );
        assert_eq!(failover.excluded(at(2), JOB).collect::<Vec<_>>(), vec![A]);
        failover.handle_peer_up(A);
        assert_eq!(failover.excluded(at(3), JOB).count(), 0);
    }

    #[test]
    fn losses_noticed_together_are_replanned_together() {
        let mut failover = guarded();
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
        let mut failover = guarded();
        failover.handle_peer_down(at(0), A, DownReason::Failed, true);
        assert_eq!(outputs(&mut failover), vec![]);
        failover.handle_peer_down(at(0), A, DownReason::Left, true);
        assert_eq!(outputs(&mut failover).len(), 2);
        failover.handle_peer_down(at(0), B, DownReason::Failed, false);
        assert_eq!(outputs(&mut failover).len(), 2);
    }

    #[test]
    fn a_link_that_heals_in_time_costs_nobody_a_place() {
        let mut failover = guarded();
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
    fn a_node_that_reports_one_neighbour_after_the_other_goes_itself() {
        let mut failover = Failover::default();
        let [c, d] = [NodeId([3; 16]), NodeId([4; 16])];
        failover.handle_placed(JOB, epoch(1), [A, B, c, d]);
        let lost = |failover: &mut Failover| {
            let lost = outputs(failover).into_iter().filter_map(|output| match output {
                FailoverOutput::Lost { node, .. } => Some(node),
                FailoverOutput::Replan { .. }
                | FailoverOutput::StandbyLost { .. }
                | FailoverOutput::Strike { .. }
                | FailoverOutput::Refused { .. } => None,
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
        assert_eq!(lost(&mut failover), [c], "what was long ago does not count");
    }

    #[test]
    fn a_standby_whose_device_fails_is_let_go_and_the_job_goes_on() {
        let mut failover = guarded();
        let standby = NodeId([3; 16]);
        failover.handle_standbys(JOB, [standby]);
        failover.handle_stage_failed(at(0), JOB, standby, true, "out of memory".into());
        failover.handle_stage_failed(at(1), JOB, standby, true, "out of memory".into());
        let outputs = outputs(&mut failover);
        assert!(
            matches!(outputs[..], [FailoverOutput::Refused { .. }, FailoverOutput::StandbyLost { .. }]),
            "{outputs:?}"
        );
        assert_eq!(failover.excluded(at(2), JOB).collect::<Vec<_>>(), vec![standby]);
    }

    #[test]
    fn stages_that_fail_together_are_one_strike() {
        let mut failover = guarded();
        for node in [A, B] {
            failover.handle_stage_failed(at(0), JOB, node, true, "device lost".into());
        }
        let strikes = |failover: &mut Failover| {
            outputs(failover).iter().filter(|output| matches!(output, FailoverOutput::Strike { .. })).count()
        };
        assert_eq!(strikes(&mut failover), 1);
        failover.handle_placed(JOB, epoch(2), [A, B]);
        failover.handle_stage_failed(at(1), JOB, B, true, "out of memory".into());
        assert_eq!(strikes(&mut failover), 1, "another placement, another strike");
        failover.handle_placed(JOB, epoch(3), [A, B]);
        failover.handle_stage_failed(at(2), JOB, A, false, "this node holds no stage of the job".into());
        assert_eq!(strikes(&mut failover), 0, "no request did that");
    }

    #[test]
    fn a_restarted_node_has_lost_its_stage_and_may_be_used() {
        let mut failover = guarded();
        failover.handle_stage_failed(at(0), JOB, A, false, "this node holds no stage of the job".into());
        assert!(outputs(&mut failover).contains(&FailoverOutput::Replan { job: JOB }));
        assert_eq!(failover.lost(at(1), JOB).collect::<Vec<_>>(), vec![A]);
        assert_eq!(failover.excluded(at(1), JOB).count(), 0);
        failover.handle_placed(JOB, epoch(2), [A, B]);
        assert_eq!(failover.lost(at(2), JOB).count(), 0);
    }

    #[test]
    fn a_device_that_fails_twice_is_left_out() {
        let mut failover = guarded();
        failover.handle_stage_failed(at(0), JOB, A, true, "out of memory".into());
        assert_eq!(failover.excluded(at(1), JOB).count(), 0);
        failover.handle_stage_failed(at(1), JOB, A, true, "out of memory".into());
        assert_eq!(failover.excluded(at(2), JOB).count(), 0, "the same failure, told twice");
        failover.handle_placed(JOB, epoch(2), [A, B]);
        failover.handle_stage_failed(at(500), JOB, A, true, "out of memory".into());
        assert_eq!(failover.excluded(at(501), JOB).collect::<Vec<_>>(), vec![A]);
    }
}
