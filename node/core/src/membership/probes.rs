//! Round trips to members, measured by their answers to probes, and the probes of members that are too distant for foca.
//!
//! foca gives every probe the same time. This table takes over the probe of a member whose answers take longer: foca counts it
//! as answered, and the table waits for the real answer, asks other members after twice the round trip, and suspects the member
//! after the same time again. So a distant member is suspected as rarely as one in the same room.
use super::swim::{EXCUSES_MAX, Life};
use crate::id::NodeId;
use crate::time::{Duration, Instant};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::ops::Bound;

/// Known paths to members: at most one entry per member of SWIM's table.
#[derive(Debug, Default)]
pub(super) struct Probes {
    paths: BTreeMap<NodeId, Path>,
    late: BTreeMap<NodeId, LateProbe>,
    /// Members that have not answered yet: each gets one extra ping, so that its round trip is known before foca probes it.
    unmeasured: BTreeSet<NodeId>,
    /// The member pinged last, and when to ping the next.
    measured_last: Option<NodeId>,
    measure_at: Instant,
}

#[derive(Clone, Copy, Debug, Default)]
struct Path {
    /// The last two round trips, of which the faster one counts: one delayed answer makes no member distant.
    round_trips: [Option<Duration>; 2],
    /// The unanswered ping that is being timed.
    ping: Option<(u8, Instant)>,
}

/// A probe in flight that foca does not wait for.
#[derive(Clone, Debug)]
pub(super) struct LateProbe {
    pub(super) life: Life,
    pub(super) incarnation: u16,
    pub(super) number: u8,
    /// How long an answer may take.
    pub(super) patience: Duration,
    /// Members asked for an indirect probe; `None` before that.
    asked: Option<Vec<NodeId>>,
    due: Instant,
    /// How often it was postponed because this thread was late.
    excuses: u8,
}

/// A late probe whose time is over.
pub(super) enum Due {
    /// Ask other members for an indirect probe, then call `asked`.
    Indirect(LateProbe),
    /// No member reached the target.
    Suspect(LateProbe),
}

impl Probes {
    /// How long a member's answer may take, if that is longer than foca waits.
    pub(super) fn patience(&self, node: NodeId) -> Option<Duration> {
        let round_trips = self.paths.get(&node).into_iter().flat_map(|path| path.round_trips).flatten();
        match round_trips.min() {
            None => Some(PATIENCE_MAX),
            Some(round_trip) => {
                let patience = round_trip.saturating_mul(2);
                (patience > PROBE_RTT).then(|| patience.min(PATIENCE_MAX))
            }
        }
    }

    /// A member is up.
    pub(super) fn joined(&mut self, node: NodeId) {
        if self.paths.get(&node).is_none_or(|path| path.round_trips[0].is_none()) {
            self.unmeasured.insert(node);
        }
    }

    /// A member is down: drop its probes.
    pub(super) fn gone(&mut self, node: NodeId) {
        self.late.remove(&node);
        self.unmeasured.remove(&node);
    }

    /// Drops everything about a member.
    pub(super) fn forget(&mut self, node: NodeId) {
        self.gone(node);
        self.paths.remove(&node);
    }

    /// A ping with this number was sent.
    pub(super) fn sent(&mut self, now: Instant, node: NodeId, number: u8) {
        let path = self.paths.entry(node).or_default();
        // Of several pings in flight the first one is timed: its answer arrives first.
        if path.ping.is_none_or(|(_, at)| now.since(at) >= PATIENCE_MAX) {
            path.ping = Some((number, now));
        }
    }

    /// Starts a probe that foca does not wait for.
    pub(super) fn begin(&mut self, now: Instant, life: Life, incarnation: u16, number: u8, patience: Duration) {
        let probe = LateProbe { life, incarnation, number, patience, asked: None, due: now + patience, excuses: 0 };
        let known = self.late.entry(life.node).or_insert_with(|| probe.clone());
        if known.life != life {
            *known = probe;
        }
    }

    /// A member answered a ping. Returns whether a late probe was waiting for the answer.
    pub(super) fn answered(&mut self, now: Instant, node: NodeId, number: u8) -> bool {
        if let Some(path) = self.paths.get_mut(&node)
            && let Some((_, at)) = path.ping.take_if(|(sent, _)| *sent == number)
        {
            path.round_trips = [Some(now.since(at)), path.round_trips[0]];
            self.unmeasured.remove(&node);
        }
        self.late.remove(&node).is_some()
    }

    /// These members were asked for an indirect probe.
    pub(super) fn asked(&mut self, node: NodeId, asked: Vec<NodeId>) {
        if let Some(probe) = self.late.get_mut(&node) {
            probe.asked = Some(asked);
        }
    }

    /// A member asked for an indirect probe reached the target.
    pub(super) fn vouched(&mut self, by: NodeId, node: NodeId, number: u8) {
        let asked = |probe: &LateProbe| probe.number == number && probe.asked.as_ref().is_some_and(|a| a.contains(&by));
        if self.late.get(&node).is_some_and(asked) {
            self.late.remove(&node);
        }
    }

    /// The next member to ping only to measure its round trip.
    pub(super) fn next_unmeasured(&mut self, now: Instant) -> Option<NodeId> {
        if self.measure_at > now || self.unmeasured.is_empty() {
            return None;
        }
        self.measure_at = now + MEASURE_EVERY;
        // In turn, starting at a different place on each node: a member that joins is not pinged by all nodes together.
        let after = self.measured_last.map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.unmeasured.range((after, Bound::Unbounded)).next().or(self.unmeasured.first()).copied();
        self.unmeasured.remove(&next?);
        self.measured_last = next;
        next
    }

    /// Sets where this node's turn of measuring pings begins.
    pub(super) fn measure_from(&mut self, node: NodeId) {
        self.measured_last = Some(node);
    }

    /// The probes whose time is over.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<Due> {
        let mut due = Vec::new();
        let over: Vec<NodeId> = self.late.iter().filter(|(_, probe)| probe.due <= now).map(|(&node, _)| node).collect();
        for node in over {
            let Some(probe) = self.late.get_mut(&node) else { continue };
            if probe.asked.is_none() {
                probe.asked = Some(Vec::new());
                probe.due = now + probe.patience.max(INDIRECT_MIN);
                due.push(Due::Indirect(probe.clone()));
            } else if let Some(probe) = self.late.remove(&node) {
                due.push(Due::Suspect(probe));
            }
        }
        due
    }

    /// This thread was late: the answers may have arrived and be unread.
    pub(super) fn delay(&mut self, late: Duration) {
        for probe in self.late.values_mut().filter(|probe| probe.excuses < EXCUSES_MAX) {
            probe.due = probe.due + late;
            probe.excuses += 1;
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let late = self.late.values().map(|probe| probe.due).min().map(|at| (at, "membership: a distant member"));
        let measure = (!self.unmeasured.is_empty()).then_some((self.measure_at, "membership: a round trip to measure"));
        late.into_iter().chain(measure).min()
    }
}

/// How long foca waits for an answer before it asks other members.
pub(super) const PROBE_RTT: Duration = Duration::from_millis(30);
/// Twice the longest round trip on Earth without satellites. A member that delays its answers is suspected later by no more
/// than this.
pub(super) const PATIENCE_MAX: Duration = Duration::from_millis(800);
/// Minimum time for an indirect probe: as long as foca gives it.
const INDIRECT_MIN: Duration = Duration::from_millis(70);
/// Interval of measuring pings: 64 members that join together are measured in 1.3 s.
const MEASURE_EVERY: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Generation;

    const A: NodeId = NodeId([1; 16]);
    const B: NodeId = NodeId([2; 16]);

    fn at(ms: u64) -> Instant {
        Instant(0) + Duration::from_millis(ms)
    }

    fn answers_after(probes: &mut Probes, ms: u64) {
        probes.sent(at(0), A, 7);
        probes.answered(at(ms), A, 7);
    }

    #[test]
    fn a_member_in_the_same_room_is_left_to_foca() {
        let mut probes = Probes::default();
        assert_eq!(probes.patience(A), Some(PATIENCE_MAX), "not measured yet");
        answers_after(&mut probes, 1);
        assert_eq!(probes.patience(A), None);
        answers_after(&mut probes, 250);
        assert_eq!(probes.patience(A), None, "one delayed answer makes no member distant");
        answers_after(&mut probes, 240);
        assert_eq!(probes.patience(A), Some(Duration::from_millis(480)));
    }

    #[test]
    fn a_member_that_delays_its_answers_gains_no_more_than_the_bound() {
        let mut probes = Probes::default();
        answers_after(&mut probes, 60_000);
        answers_after(&mut probes, 60_000);
        assert_eq!(probes.patience(A), Some(PATIENCE_MAX));
    }

    #[test]
    fn a_late_probe_asks_others_and_then_suspects() {
        let mut probes = Probes::default();
        let life = Life { node: A, generation: Generation(1), addr: None };
        probes.begin(at(0), life, 3, 7, Duration::from_millis(400));
        assert_eq!(probes.next_wakeup().map(|(at, _)| at), Some(at(400)));
        assert!(probes.take_due(at(399)).is_empty());
        assert!(matches!(probes.take_due(at(400))[..], [Due::Indirect(_)]));
        probes.asked(A, alloc::vec![B]);
        probes.delay(Duration::from_millis(50));
        assert!(probes.take_due(at(849)).is_empty(), "this node's own stall does not count against the member");
        assert!(matches!(probes.take_due(at(850))[..], [Due::Suspect(LateProbe { incarnation: 3, .. })]));
        assert!(probes.next_wakeup().is_none());
    }

    #[test]
    fn only_a_member_that_was_asked_vouches_for_another() {
        let mut probes = Probes::default();
        let life = Life { node: A, generation: Generation(1), addr: None };
        probes.begin(at(0), life, 3, 7, Duration::from_millis(400));
        probes.vouched(B, A, 7);
        assert_eq!(probes.take_due(at(400)).len(), 1, "B was not asked");
        probes.asked(A, alloc::vec![B]);
        probes.vouched(B, A, 7);
        assert!(probes.next_wakeup().is_none());
    }

    #[test]
    fn members_that_join_are_measured_in_turn() {
        let mut probes = Probes::default();
        probes.measure_from(A);
        [A, B].into_iter().for_each(|node| probes.joined(node));
        assert_eq!(probes.next_unmeasured(at(1)), Some(B));
        assert_eq!(probes.next_unmeasured(at(2)), None);
        assert_eq!(probes.next_unmeasured(at(21)), Some(A));
        assert!(probes.next_wakeup().is_none());
        answers_after(&mut probes, 1);
        probes.joined(A);
        assert!(probes.next_wakeup().is_none(), "already measured");
    }
}
