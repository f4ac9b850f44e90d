//! Liveness of the neighbours of running work (alive, stalled or silent): leases, renewed by a heartbeat every 50 ms.
//!
//! SWIM maintains the mesh's membership; this module watches the participants of jobs. It reports silence and never acts on it.
//! Calling contract: after any `handle_*` call `poll_output` until `None`, and call `handle_wakeup` at `next_wakeup`. Next:
//! `failover.rs`.
use crate::id::{Epoch, JobId, NodeId};
use crate::limits::HEARTBEAT;
use crate::message::Heartbeat;
use crate::time::{Duration, Instant};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use lease::Lease;

mod lease;

/// An action or a report of liveness.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LivenessOutput {
    /// Send this as a datagram.
    SendHeartbeat { to: NodeId, heartbeat: Heartbeat },
    /// A neighbour's lease expired: it crashed, was cut off or paused. Reported once per silence.
    Silent { job: JobId, node: NodeId, silent: Duration },
    /// A neighbour lives, but its present operation takes far longer than predicted. Reported once per operation.
    Stalled { job: JobId, node: NodeId, elapsed: Duration },
    /// A neighbour reported silent or stalled is heard again, or its operation ended.
    Back { job: JobId, node: NodeId },
}

/// The lease machine of one node.
#[derive(Default)]
pub struct Liveness {
    jobs: BTreeMap<JobId, Watch>,
    next_beat: Option<Instant>,
    /// When each device last completed work of any job: all jobs share its executor.
    answered: BTreeMap<u8, Instant>,
    output: VecDeque<LivenessOutput>,
}

/// One job this node shares with neighbours.
struct Watch {
    epoch: Epoch,
    leases: BTreeMap<NodeId, Lease>,
    done: u64,
    /// By device.
    running: BTreeMap<u8, Operations>,
}

/// Work of one job on one device.
struct Operations {
    /// Predicted times of the operations given to the executor and not completed, oldest first.
    budgets: VecDeque<Duration>,
    /// When the oldest of them started, or the last completion.
    since: Instant,
}

impl Liveness {
    /// A node that shares no work yet.
    pub fn new() -> Self {
        Liveness::default()
    }

    /// Whether a neighbour was heard within its lease, in any job: this outranks a `Down` from SWIM.
    pub fn is_fresh(&self, now: Instant, node: NodeId) -> bool {
        self.jobs.values().filter_map(|watch| watch.leases.get(&node)).any(|lease| lease.is_fresh(now))
    }

    /// Jobs that this node shares with a neighbour.
    pub fn jobs_with(&self, node: NodeId) -> impl Iterator<Item = JobId> + '_ {
        self.jobs.iter().filter(move |(_, watch)| watch.leases.contains_key(&node)).map(|(&job, _)| job)
    }

    /// A neighbour's last heartbeat for a job, and when it arrived.
    pub fn last_heard(&self, job: JobId, node: NodeId) -> Option<(Instant, Heartbeat)> {
        self.jobs.get(&job)?.leases.get(&node)?.last()
    }

    /// This node takes part in a job under this epoch, together with these nodes. Leases of remaining nodes continue; a new
    /// node has `FIRST` to be heard at all.
    pub fn handle_watch(&mut self, now: Instant, job: JobId, epoch: Epoch, neighbours: &[NodeId]) {
        let watch = self.jobs.entry(job).or_insert_with(|| Watch {
            epoch,
            leases: BTreeMap::new(),
            done: 0,
            running: BTreeMap::new(),
        });
        watch.epoch = epoch;
        watch.leases.retain(|node, _| neighbours.contains(node));
        for node in neighbours {
            watch.leases.entry(*node).or_insert_with(|| Lease::new(now + FIRST));
        }
        self.next_beat.get_or_insert(now);
    }

    /// The job ended, or this node no longer takes part in it.
    pub fn handle_unwatch(&mut self, job: JobId) {
        self.jobs.remove(&job);
        if self.jobs.is_empty() {
            self.next_beat = None;
        }
    }

    /// The executor of a device received work that should take `budget`.
    pub fn handle_work_started(&mut self, now: Instant, job: JobId, device: u8, budget: Duration) {
        let Some(watch) = self.jobs.get_mut(&job) else { return };
        let idle = || Operations { budgets: VecDeque::new(), since: now };
        let running = watch.running.entry(device).or_insert_with(idle);
        if running.budgets.is_empty() {
            running.since = now;
        }
        // The executor works in order, so only the oldest operation is running; a longer queue means that the executor stalled.
        if running.budgets.len() < RUNNING_MAX {
            running.budgets.push_back(budget);
        }
    }

    /// The executor of a device completed its oldest work.
    pub fn handle_work_done(&mut self, now: Instant, job: JobId, device: u8) {
        let Some(watch) = self.jobs.get_mut(&job) else { return };
        if let Some(running) = watch.running.get_mut(&device) {
            running.budgets.pop_front();
            running.since = now;
        }
        watch.done += 1;
        self.answered.insert(device, now);
    }

    /// A heartbeat arrived; its seal authenticates `from`. Nodes outside the job are ignored.
    pub fn handle_heartbeat(&mut self, now: Instant, from: NodeId, heartbeat: Heartbeat) {
        let job = heartbeat.job;
        let Some(lease) = self.jobs.get_mut(&job).and_then(|watch| watch.leases.get_mut(&from)) else { return };
        self.output.extend(lease.handle_heartbeat(now, heartbeat).map(|change| change.output(job, from)));
    }

    /// Any other message or frame arrived from a node: it is alive, which says nothing about its work.
    pub fn handle_heard(&mut self, now: Instant, from: NodeId) {
        for (job, watch) in &mut self.jobs {
            let change = watch.leases.get_mut(&from).and_then(|lease| lease.handle_heard(now));
            self.output.extend(change.map(|change| change.output(*job, from)));
        }
    }

    /// The clock reached `next_wakeup`.
    pub fn handle_wakeup(&mut self, now: Instant) {
        self.excuse_lateness(now);
        if self.next_beat.is_some_and(|at| at <= now) {
            self.beat(now);
        }
        for (job, watch) in &mut self.jobs {
            for (node, lease) in &mut watch.leases {
                self.output.extend(lease.handle_time(now).map(|change| change.output(*job, *node)));
            }
        }
    }

    /// What to do next; call until `None`.
    pub fn poll_output(&mut self) -> Option<LivenessOutput> {
        self.output.pop_front()
    }

    /// When to call `handle_wakeup` next, and for which timer.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let leases = self.jobs.values().flat_map(|watch| watch.leases.values()).filter_map(Lease::ends).min();
        let beat = self.next_beat.map(|at| (at, "heartbeat"));
        beat.into_iter().chain(leases.map(|at| (at, "lease"))).min()
    }

    /// Asserts what holds between two inputs.
    ///
    /// # Panics
    /// An invariant is violated.
    pub fn assert_invariants(&self) {
        assert!(self.output.is_empty(), "{} outputs of liveness are not routed", self.output.len());
        assert_eq!(self.next_beat.is_some(), !self.jobs.is_empty(), "heartbeats are sent while a job is shared");
        for (job, watch) in &self.jobs {
            let most = watch.running.values().map(|running| running.budgets.len()).max().unwrap_or(0);
            assert!(most <= RUNNING_MAX, "{most} operations of {job:?} run");
            watch.leases.values().for_each(Lease::assert_invariants);
        }
    }

    /// The heartbeat is due every 50 ms, so it shows how late this thread is. A late thread must not blame its peers: their
    /// messages may still wait in its queue.
    fn excuse_lateness(&mut self, now: Instant) {
        let Some(late) = self.next_beat.map(|at| now.since(at)).filter(|late| *late > LATE) else { return };
        for lease in self.jobs.values_mut().flat_map(|watch| watch.leases.values_mut()) {
            lease.excuse(now, late);
        }
    }

    /// Work of one job may wait for that of another. So the elapsed time counts from the last completion on the device, and
    /// the budget is the longest of all operations that run there. Of several devices, the most overdue one is reported.
    fn beat(&mut self, now: Instant) {
        let mut longest: BTreeMap<u8, Duration> = BTreeMap::new();
        for (&device, running) in self.jobs.values().flat_map(|watch| &watch.running) {
            if let Some(&budget) = running.budgets.front() {
                let longest = longest.entry(device).or_insert(budget);
                *longest = budget.max(*longest);
            }
        }
        for (job, watch) in &self.jobs {
            let busy = watch.running.iter().filter(|(_, running)| !running.budgets.is_empty());
            let operations = busy.filter_map(|(device, running)| {
                let answered = self.answered.get(device).copied().unwrap_or_default();
                Some((now.since(running.since.max(answered)), *longest.get(device)?))
            });
            let late = |&(elapsed, budget): &(Duration, Duration)| {
                i128::from(micros(elapsed)) - i128::from(lease::STALLED_FACTOR) * i128::from(micros(budget))
            };
            let worst = operations.max_by_key(late);
            let heartbeat = Heartbeat {
                job: *job,
                epoch: watch.epoch,
                done: watch.done,
                op_elapsed_us: worst.map_or(0, |(elapsed, _)| micros(elapsed)),
                op_budget_us: worst.map_or(0, |(_, budget)| micros(budget)),
            };
            let to: Vec<NodeId> = watch.leases.keys().copied().collect();
            self.output.extend(to.into_iter().map(|to| LivenessOutput::SendHeartbeat { to, heartbeat }));
        }
        self.next_beat = (!self.jobs.is_empty()).then_some(now + HEARTBEAT);
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

/// How long a new neighbour may take to be heard for the first time: it must learn of the job first.
const FIRST: Duration = Duration::from_secs(2);
/// A wakeup later than this says more about this thread than about its peers.
const LATE: Duration = Duration::from_millis(25);
/// Predicted times retained for queued operations: bounds the memory of a stalled executor's queue.
const RUNNING_MAX: usize = 256;

#[cfg(test)]
mod tests;
