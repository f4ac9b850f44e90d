//! One neighbour's lease in one job: when the neighbour was last heard, how regular its heartbeats are, and its present
//! operation.
use super::LivenessOutput;
use crate::id::{JobId, NodeId};
use crate::limits::{HEARTBEAT, LEASE};
use crate::message::Heartbeat;
use crate::time::{Duration, Instant};

/// A lease. Invariant: `silent` and `stalled` record what was reported, so that each change is reported once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lease {
    /// Start of the silence: the last sign of life, moved on by this node's own lateness.
    counted_from: Instant,
    /// When the last heartbeat arrived, even one out of order.
    beat_at: Option<Instant>,
    /// The latest heartbeat in the order of its work.
    news: Option<Heartbeat>,
    /// Until when the first sign of life is awaited; `None` after it.
    awaited_until: Option<Instant>,
    /// Running mean of the heartbeat interval, and of each interval's deviation from it.
    interval: Duration,
    deviation: Duration,
    /// The next gap says more about this node than about the path.
    excused: bool,
    silent: bool,
    stalled: bool,
}

/// A change of a lease to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Silent(Duration),
    Stalled(Duration),
    Back,
}

impl Change {
    pub(super) fn output(self, job: JobId, node: NodeId) -> LivenessOutput {
        match self {
            Change::Silent(silent) => LivenessOutput::Silent { job, node, silent },
            Change::Stalled(elapsed) => LivenessOutput::Stalled { job, node, elapsed },
            Change::Back => LivenessOutput::Back { job, node },
        }
    }
}

impl Lease {
    pub(super) fn new(awaited_until: Instant) -> Self {
        Lease {
            counted_from: awaited_until - LEASE,
            beat_at: None,
            news: None,
            awaited_until: Some(awaited_until),
            interval: HEARTBEAT,
            deviation: Duration::ZERO,
            excused: false,
            silent: false,
            stalled: false,
        }
    }

    pub(super) fn last(&self) -> Option<(Instant, Heartbeat)> {
        self.beat_at.zip(self.news)
    }

    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        self.beat_at.is_some() && !self.silent && now < self.end()
    }

    /// When the lease expires; `None` once that was reported.
    pub(super) fn ends(&self) -> Option<Instant> {
        (!self.silent).then(|| self.end())
    }

    pub(super) fn handle_heartbeat(&mut self, now: Instant, heartbeat: Heartbeat) -> Option<Change> {
        // Datagrams may be reordered: an older one is a sign of life, but says nothing new about the work.
        let older = self.news.is_some_and(|news| (heartbeat.epoch, heartbeat.done) < (news.epoch, news.done));
        let excused = core::mem::take(&mut self.excused);
        if let Some(at) = self.beat_at.filter(|_| !self.silent && !excused) {
            let gap = now.since(at);
            // The usual smoothing in integers: an eighth for the mean, a quarter for the deviation.
            self.deviation = (self.deviation * 3 + self.interval.abs_diff(gap)) / 4;
            self.interval = (self.interval * 7 + gap) / 8;
        }
        self.beat_at = Some(now);
        let back = self.handle_heard(now);
        if older {
            return back;
        }
        self.news = Some(heartbeat);
        let elapsed = Duration::from_micros(heartbeat.op_elapsed_us.into());
        let allowed = STALLED_MIN.max(Duration::from_micros(heartbeat.op_budget_us.into()) * STALLED_FACTOR);
        match (elapsed > allowed, self.stalled) {
            (true, false) => {
                self.stalled = true;
                Some(Change::Stalled(elapsed))
            }
            (false, true) => {
                self.stalled = false;
                Some(Change::Back)
            }
            (true, true) | (false, false) => back,
        }
    }

    pub(super) fn handle_heard(&mut self, now: Instant) -> Option<Change> {
        self.counted_from = now;
        self.awaited_until = None;
        core::mem::take(&mut self.silent).then_some(Change::Back)
    }

    pub(super) fn handle_time(&mut self, now: Instant) -> Option<Change> {
        if self.silent || now < self.end() {
            return None;
        }
        self.silent = true;
        // The actual silence, including what this node excused.
        Some(Change::Silent(now.since(self.beat_at.unwrap_or(self.counted_from))))
    }

    /// This node itself was late: extend the lease by that time, and leave time to read queued heartbeats.
    pub(super) fn excuse(&mut self, now: Instant, late: Duration) {
        self.excused = true;
        let read = HEARTBEAT * 2;
        self.counted_from = (self.counted_from + late).min(now).max((now + read) - self.allowed());
    }

    /// Asserts what holds between two inputs.
    pub(super) fn assert_invariants(&self) {
        let awaited = self.awaited_until.is_none() || self.beat_at.is_none();
        assert!(awaited, "a neighbour that was heard is awaited: {self:?}");
        assert_eq!(self.beat_at.is_some(), self.news.is_some(), "{self:?}");
        assert!(!self.stalled || self.news.is_some(), "stalled, without a heartbeat that says so: {self:?}");
    }

    fn end(&self) -> Instant {
        self.awaited_until.unwrap_or(self.counted_from + self.allowed()).max(self.counted_from)
    }

    /// Lease time: about six heartbeats, and more on a path measured to be irregular; bounded, so that a crash is always
    /// detected.
    fn allowed(&self) -> Duration {
        (self.interval * 2 + self.deviation * 6).clamp(LEASE, LEASE * 4)
    }
}

/// An operation shorter than this is never stalled, whatever was predicted.
const STALLED_MIN: Duration = Duration::from_secs(1);
/// Multiple of its predicted time after which an operation is stalled.
pub(super) const STALLED_FACTOR: u32 = 4;
