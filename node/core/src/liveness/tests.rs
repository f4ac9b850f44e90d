//! Leases under silence, forgery and gaps of this node's own clock.
use super::*;
use crate::limits::LEASE;

const JOB: JobId = JobId(1);
const A: NodeId = NodeId([1; 16]);
const B: NodeId = NodeId([2; 16]);
const EPOCH: Epoch = Epoch { counter: 1, issuer: A };

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// One `Liveness` with a manual clock.
struct Bench {
    liveness: Liveness,
    now: Instant,
    seen: Vec<LivenessOutput>,
}

impl Bench {
    fn watching(nodes: &[NodeId]) -> Self {
        let mut liveness = Liveness::new();
        liveness.handle_watch(Instant(0), JOB, EPOCH, nodes);
        let mut bench = Bench { liveness, now: Instant(0), seen: Vec::new() };
        bench.drain();
        bench
    }

    fn drain(&mut self) {
        while let Some(output) = self.liveness.poll_output() {
            if !matches!(output, LivenessOutput::SendHeartbeat { .. }) {
                self.seen.push(output);
            }
        }
    }

    /// Lets time pass with timely wakeups.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some((at, _)) = self.liveness.next_wakeup().filter(|(at, _)| *at <= end) {
            self.now = self.now.max(at);
            self.liveness.handle_wakeup(self.now);
            self.drain();
        }
        self.now = end;
    }

    fn hear(&mut self, from: NodeId, done: u64, op_elapsed_ms: u32, op_budget_ms: u32) {
        let heartbeat = Heartbeat {
            job: JOB,
            epoch: EPOCH,
            done,
            op_elapsed_us: op_elapsed_ms * 1000,
            op_budget_us: op_budget_ms * 1000,
        };
        self.liveness.handle_heartbeat(self.now, from, heartbeat);
        self.drain();
    }

    fn regular(&mut self, from: NodeId, beats: u64) {
        for beat in 0..beats {
            self.hear(from, beat, 0, 0);
            self.pass(HEARTBEAT);
        }
    }
}

#[test]
fn silence_is_reported_once_after_the_lease() {
    let mut bench = Bench::watching(&[B]);
    bench.regular(B, 40);
    assert!(bench.seen.is_empty());
    assert!(bench.liveness.is_fresh(bench.now, B));
    // The last heartbeat came 50 ms ago.
    bench.pass(LEASE - HEARTBEAT - ms(1));
    assert!(bench.seen.is_empty(), "not before the lease ends");
    bench.pass(ms(30));
    let [LivenessOutput::Silent { job: JOB, node: B, silent }] = bench.seen[..] else { panic!("{:?}", bench.seen) };
    assert!(silent >= LEASE && silent < LEASE + ms(30), "{silent:?}");
    assert!(!bench.liveness.is_fresh(bench.now, B));
    bench.pass(ms(5000));
    assert_eq!(bench.seen.len(), 1, "reported once");
    bench.hear(B, 41, 0, 0);
    assert_eq!(bench.seen[1], LivenessOutput::Back { job: JOB, node: B });
    assert!(bench.liveness.is_fresh(bench.now, B));
}

#[test]
fn a_new_neighbour_gets_time_to_learn_of_the_job() {
    let mut bench = Bench::watching(&[B]);
    bench.pass(ms(1900));
    assert!(bench.seen.is_empty());
    assert!(!bench.liveness.is_fresh(bench.now, B), "never heard is not fresh");
    bench.pass(ms(200));
    assert!(matches!(bench.seen[..], [LivenessOutput::Silent { .. }]), "{:?}", bench.seen);
}

#[test]
fn an_irregular_path_widens_the_lease() {
    let mut bench = Bench::watching(&[B]);
    for beat in 0..40 {
        bench.hear(B, beat, 0, 0);
        bench.pass(ms(if beat % 2 == 0 { 20 } else { 190 }));
    }
    assert!(bench.seen.is_empty());
    bench.pass(ms(200));
    assert!(bench.seen.is_empty(), "390 ms of silence are normal on this path");
    bench.pass(LEASE * 4);
    assert!(matches!(bench.seen[..], [LivenessOutput::Silent { .. }]), "but a crash is still seen");
}

#[test]
fn a_node_that_was_late_itself_reports_no_neighbour() {
    let mut bench = Bench::watching(&[B]);
    bench.regular(B, 20);
    // Paused for two seconds: the wakeup comes late, heartbeats of B still wait in the queue.
    bench.now = bench.now + ms(2000);
    bench.liveness.handle_wakeup(bench.now);
    bench.drain();
    assert!(bench.seen.is_empty(), "{:?}", bench.seen);
    bench.pass(ms(20));
    bench.hear(B, 21, 0, 0);
    bench.regular(B, 10);
    assert!(bench.seen.is_empty(), "{:?}", bench.seen);
    // If B really crashed meanwhile, that is detected soon after.
    bench.now = bench.now + ms(2000);
    bench.pass(LEASE + ms(50));
    assert!(matches!(bench.seen[..], [LivenessOutput::Silent { .. }]), "{:?}", bench.seen);
}

#[test]
fn slow_is_not_stalled() {
    let mut bench = Bench::watching(&[B]);
    // A prefill predicted to take 2 s may take up to 8 s.
    for beat in 1..160 {
        bench.hear(B, 5, beat * 50, 2000);
        bench.pass(HEARTBEAT);
    }
    assert!(bench.seen.is_empty(), "{:?}", bench.seen);
    bench.hear(B, 5, 8001, 2000);
    bench.hear(B, 5, 8051, 2000);
    let [LivenessOutput::Stalled { job: JOB, node: B, elapsed }] = bench.seen[..] else { panic!("{:?}", bench.seen) };
    assert_eq!(elapsed, ms(8001));
    bench.hear(B, 6, 10, 2000);
    assert_eq!(bench.seen[1], LivenessOutput::Back { job: JOB, node: B });
    // A decode step predicted at 10 ms is stalled after a second, not after 40 ms.
    bench.hear(B, 7, 900, 10);
    assert_eq!(bench.seen.len(), 2);
    bench.hear(B, 7, 1001, 10);
    assert!(matches!(bench.seen[2], LivenessOutput::Stalled { .. }));
}

#[test]
fn heartbeats_report_the_running_operation() {
    let mut liveness = Liveness::new();
    liveness.handle_watch(Instant(0), JOB, EPOCH, &[A, B]);
    liveness.handle_work_started(Instant(0), JOB, 0, ms(30));
    liveness.handle_work_started(Instant(0), JOB, 0, ms(40));
    let now = Instant(0) + ms(10);
    liveness.handle_work_done(now, JOB, 0);
    let now = now + ms(15);
    liveness.handle_wakeup(now);
    let sent: Vec<_> = core::iter::from_fn(|| liveness.poll_output()).collect();
    let [LivenessOutput::SendHeartbeat { to: A, heartbeat }, LivenessOutput::SendHeartbeat { to: B, .. }] = sent[..]
    else {
        panic!("{sent:?}")
    };
    assert_eq!((heartbeat.done, heartbeat.op_elapsed_us, heartbeat.op_budget_us), (1, 15_000, 40_000));
    assert_eq!(liveness.next_wakeup().map(|(at, _)| at), Some(now + HEARTBEAT));
    liveness.handle_unwatch(JOB);
    assert_eq!(liveness.next_wakeup(), None);
}

#[test]
fn work_that_waits_for_another_jobs_work_is_not_late() {
    const OTHER: JobId = JobId(9);
    let mut liveness = Liveness::new();
    liveness.handle_watch(Instant(0), JOB, EPOCH, &[A]);
    liveness.handle_watch(Instant(0), OTHER, EPOCH, &[B]);
    liveness.handle_work_started(Instant(0), JOB, 0, ms(2000));
    liveness.handle_work_started(Instant(0), OTHER, 0, ms(20));
    let reported = |liveness: &mut Liveness, now| {
        liveness.handle_wakeup(now);
        let all = core::iter::from_fn(|| liveness.poll_output());
        let all = all.filter_map(|output| {
            let LivenessOutput::SendHeartbeat { to: B, heartbeat } = output else { return None };
            Some(heartbeat)
        });
        all.last().map(|heartbeat| (heartbeat.op_elapsed_us, heartbeat.op_budget_us)).expect("a heartbeat")
    };
    assert_eq!(reported(&mut liveness, Instant(0) + ms(1900)), (1_900_000, 2_000_000));
    liveness.handle_work_done(Instant(0) + ms(1950), JOB, 0);
    assert_eq!(reported(&mut liveness, Instant(0) + ms(1960)), (10_000, 20_000));
}

#[test]
fn devices_are_busy_beside_each_other() {
    let mut liveness = Liveness::new();
    liveness.handle_watch(Instant(0), JOB, EPOCH, &[A]);
    liveness.handle_work_started(Instant(0), JOB, 0, ms(2000));
    let reported = |liveness: &mut Liveness, now| {
        liveness.handle_wakeup(now);
        let all = core::iter::from_fn(|| liveness.poll_output());
        let all = all.filter_map(|output| {
            let LivenessOutput::SendHeartbeat { heartbeat, .. } = output else { return None };
            Some((heartbeat.op_elapsed_us, heartbeat.op_budget_us))
        });
        all.last().expect("a heartbeat")
    };
    for step in 0..80 {
        liveness.handle_work_started(Instant(0) + ms(step * 20), JOB, 1, ms(20));
        liveness.handle_work_done(Instant(0) + ms(step * 20 + 20), JOB, 1);
    }
    let now = Instant(0) + ms(1700);
    assert_eq!(reported(&mut liveness, now), (1_700_000, 2_000_000), "short runs on another device change nothing");
    liveness.handle_work_started(now, JOB, 1, ms(20));
    assert_eq!(reported(&mut liveness, now + ms(1500)), (1_500_000, 20_000), "the device that is most overdue");
    liveness.handle_work_done(now + ms(1600), JOB, 1);
    assert_eq!(reported(&mut liveness, now + ms(1650)), (3_350_000, 2_000_000));
}

#[test]
fn leases_outlive_a_new_epoch() {
    let mut bench = Bench::watching(&[A, B]);
    bench.regular(B, 4);
    let next = Epoch { counter: 2, issuer: A };
    bench.liveness.handle_watch(bench.now, JOB, next, &[B]);
    assert!(bench.liveness.is_fresh(bench.now, B), "B's lease continues");
    assert!(bench.liveness.last_heard(JOB, A).is_none(), "A is no longer a neighbour");
    bench.pass(LEASE * 2);
    assert!(matches!(bench.seen[..], [LivenessOutput::Silent { node: B, .. }]), "{:?}", bench.seen);
}
