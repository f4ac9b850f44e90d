//! Broken data-plane connections to nodes that running work needs. A flapping link lets heartbeat datagrams through while no
//! connection lasts, so that a stage looks alive but receives none of the frames sent to it.
use crate::id::NodeId;
use crate::limits::LINK_BROKEN;
use crate::time::{Duration, Instant};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// Peers whose connection broke and is not re-established yet.
#[derive(Debug, Default)]
pub(crate) struct Links {
    broken: BTreeMap<NodeId, Broken>,
}

#[derive(Debug, Default)]
struct Broken {
    /// Since when running work has needed it; `None` while no work does.
    missed: Option<Missed>,
}

#[derive(Debug)]
struct Missed {
    since: Instant,
    /// When to dial and report again.
    due: Instant,
    reported: bool,
}

impl Links {
    /// A connection broke, or an attempt at one failed. Returns true if it was not known as broken.
    pub(crate) fn handle_disconnected(&mut self, node: NodeId) -> bool {
        let new = !self.broken.contains_key(&node);
        self.broken.entry(node).or_default();
        new
    }

    /// The connection is re-established. Returns whether it had broken, and if so, whether that was reported.
    pub(crate) fn handle_connected(&mut self, node: NodeId) -> Option<bool> {
        self.broken.remove(&node).map(|broken| broken.missed.is_some_and(|missed| missed.reported))
    }

    /// The connection is no longer needed.
    pub(crate) fn forget(&mut self, node: NodeId) {
        self.broken.remove(&node);
    }

    /// Whether this broken connection was reported.
    pub(crate) fn is_reported(&self, node: NodeId) -> bool {
        self.broken.get(&node).and_then(|broken| broken.missed.as_ref()).is_some_and(|missed| missed.reported)
    }

    /// Peers that running work needs and that must be dialled again now, with how long work has needed them: from `LINK_BROKEN`
    /// on the caller reports that. Time during which no work needed the connection does not count.
    pub(crate) fn take_due(&mut self, now: Instant, matters: impl Fn(NodeId) -> bool) -> Vec<(NodeId, Duration)> {
        let mut due = Vec::new();
        for (&node, broken) in &mut self.broken {
            if !matters(node) {
                broken.missed = None;
                continue;
            }
            let new = broken.missed.is_none();
            let missed = broken.missed.get_or_insert(Missed { since: now, due: now, reported: false });
            if missed.due <= now {
                (missed.reported, missed.due) = (!new, now + LINK_BROKEN);
                due.push((node, now.since(missed.since)));
            }
        }
        due
    }

    /// When the next needed connection is due.
    pub(crate) fn next_wakeup(&self, matters: impl Fn(NodeId) -> bool) -> Option<(Instant, &'static str)> {
        let missed =
            self.broken.iter().filter(|(node, _)| matters(**node)).filter_map(|(_, broken)| broken.missed.as_ref());
        missed.map(|missed| missed.due).min().map(|at| (at, "links: a broken connection"))
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
    fn a_needed_connection_is_reported_repeatedly_until_it_recovers() {
        let mut links = Links::default();
        let matters = |node: NodeId| node == A;
        assert!(links.handle_disconnected(A) && !links.handle_disconnected(A), "an attempt that failed");
        links.handle_disconnected(B);
        assert_eq!(links.take_due(at(0), matters), vec![(A, Duration::ZERO)], "to be dialled");
        assert!(!links.is_reported(A));
        assert_eq!(links.next_wakeup(matters).map(|(at, _)| at), Some(at(500)));
        assert_eq!(links.take_due(at(499), matters), vec![]);
        assert_eq!(links.take_due(at(500), matters), vec![(A, Duration::from_millis(500))]);
        assert!(links.is_reported(A) && !links.is_reported(B));
        assert_eq!(links.take_due(at(1000), matters), vec![(A, Duration::from_millis(1000))]);
        assert_eq!((links.handle_connected(A), links.handle_connected(B)), (Some(true), Some(false)));
        assert_eq!(links.handle_connected(A), None);
        assert_eq!(links.next_wakeup(matters), None);
    }

    #[test]
    fn a_connection_broken_while_unneeded_is_dialled_before_it_is_reported() {
        let mut links = Links::default();
        links.handle_disconnected(A);
        assert_eq!(links.take_due(at(0), |_| false), vec![]);
        assert_eq!(links.take_due(at(14_000), |_| true), vec![(A, Duration::ZERO)]);
        assert_eq!(links.take_due(at(14_100), |_| true), vec![]);
        assert_eq!(links.take_due(at(14_200), |_| false), vec![], "given up meanwhile");
        assert_eq!(links.take_due(at(20_000), |_| true), vec![(A, Duration::ZERO)]);
    }
}
