//! Connections that broke and do not stand again. A stage may be heard by datagrams all the time and still get nothing of what
//! is sent to it: a link that flaps lets heartbeats through, but no connection lasts.
use crate::id::NodeId;
use crate::limits::LINK_BROKEN;
use crate::time::{Duration, Instant};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// Peers whose connection broke and does not stand again yet.
#[derive(Debug, Default)]
pub(crate) struct Links {
    broken: BTreeMap<NodeId, Broken>,
}

#[derive(Debug, Default)]
struct Broken {
    /// Since when running work has waited for it; none while none does.
    missed: Option<Missed>,
}

#[derive(Debug)]
struct Missed {
    since: Instant,
    /// When to look at it next: to dial again, and to tell.
    due: Instant,
    told: bool,
}

impl Links {
    /// A connection broke, or an attempt at one failed. True if it stood before, as far as is known.
    pub(crate) fn handle_disconnected(&mut self, node: NodeId) -> bool {
        let new = !self.broken.contains_key(&node);
        self.broken.entry(node).or_default();
        new
    }

    /// It stands. Whether it had broken, and if so, whether that was told to anybody.
    pub(crate) fn handle_connected(&mut self, node: NodeId) -> Option<bool> {
        self.broken.remove(&node).map(|broken| broken.missed.is_some_and(|missed| missed.told))
    }

    /// It is not wanted any more.
    pub(crate) fn forget(&mut self, node: NodeId) {
        self.broken.remove(&node);
    }

    /// Whether it was told that this connection does not stand.
    pub(crate) fn is_told(&self, node: NodeId) -> bool {
        self.broken.get(&node).and_then(|broken| broken.missed.as_ref()).is_some_and(|missed| missed.told)
    }

    /// Of the peers that running work needs, those that are to be dialled again now, and for how long it has missed them: from
    /// `LINK_BROKEN` on that is to be told. How long a connection was broken while nobody needed it says nothing.
    pub(crate) fn take_due(&mut self, now: Instant, matters: impl Fn(NodeId) -> bool) -> Vec<(NodeId, Duration)> {
        let mut due = Vec::new();
        for (&node, broken) in &mut self.broken {
            if !matters(node) {
                broken.missed = None;
                continue;
            }
            let new = broken.missed.is_none();
            let missed = broken.missed.get_or_insert(Missed { since: now, due: now, told: false });
            if missed.due <= now {
                (missed.told, missed.due) = (!new, now + LINK_BROKEN);
                due.push((node, now.since(missed.since)));
            }
        }
        due
    }

    /// When the next of those that matter is due.
    pub(crate) fn next_wakeup(&self, matters: impl Fn(NodeId) -> bool) -> Option<(Instant, &'static str)> {
        let missed =
            self.broken.iter().filter(|(node, _)| matters(**node)).filter_map(|(_, broken)| broken.missed.as_ref());
        missed.map(|missed| missed.due).min().map(|at| (at, "links: a connection does not stand again"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    const A: NodeId = NodeId([1; 16]);
    const B: NodeId = NodeId([2; 16]);

    fn at(ms: u64) -> Instant {
        Instant(0) + Duration::from_millis(ms)
    }

    #[test]
    fn what_is_missed_is_told_again_and_again_until_it_stands() {
        let mut links = Links::default();
        let matters = |node: NodeId| node == A;
        assert!(links.handle_disconnected(A) && !links.handle_disconnected(A), "an attempt that failed");
        links.handle_disconnected(B);
        assert_eq!(links.take_due(at(0), matters), vec![(A, Duration::ZERO)], "to be dialled");
        assert!(!links.is_told(A));
        assert_eq!(links.next_wakeup(matters).map(|(at, _)| at), Some(at(500)));
        assert_eq!(links.take_due(at(499), matters), vec![]);
        assert_eq!(links.take_due(at(500), matters), vec![(A, Duration::from_millis(500))]);
        assert!(links.is_told(A) && !links.is_told(B));
        assert_eq!(links.take_due(at(1000), matters), vec![(A, Duration::from_millis(1000))]);
        assert_eq!((links.handle_connected(A), links.handle_connected(B)), (Some(true), Some(false)));
        assert_eq!(links.handle_connected(A), None);
        assert_eq!(links.next_wakeup(matters), None);
    }

    #[test]
    fn what_was_broken_while_nobody_needed_it_is_dialled_before_it_is_blamed() {
        let mut links = Links::default();
        links.handle_disconnected(A);
        assert_eq!(links.take_due(at(0), |_| false), vec![]);
        assert_eq!(links.take_due(at(14_000), |_| true), vec![(A, Duration::ZERO)]);
        assert_eq!(links.take_due(at(14_100), |_| true), vec![]);
        assert_eq!(links.take_due(at(14_200), |_| false), vec![], "given up meanwhile");
        assert_eq!(links.take_due(at(20_000), |_| true), vec![(A, Duration::ZERO)]);
    }
}
