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

#[derive(Debug)]
struct Broken {
    since: Instant,
    /// When to look at it next: to dial again, and to tell.
    due: Instant,
    told: bool,
}

impl Links {
    /// A connection broke, or an attempt at one failed. True if it stood before, as far as is known.
    pub(crate) fn handle_disconnected(&mut self, now: Instant, node: NodeId) -> bool {
        let new = !self.broken.contains_key(&node);
        self.broken.entry(node).or_insert(Broken { since: now, due: now + LINK_BROKEN, told: false });
        new
    }

    /// It stands. Whether it had broken, and if so, whether that was told to anybody.
    pub(crate) fn handle_connected(&mut self, node: NodeId) -> Option<bool> {
        self.broken.remove(&node).map(|broken| broken.told)
    }

    /// It is not wanted any more.
    pub(crate) fn forget(&mut self, node: NodeId) {
        self.broken.remove(&node);
    }

    /// Whether it was told that this connection does not stand.
    pub(crate) fn is_told(&self, node: NodeId) -> bool {
        self.broken.get(&node).is_some_and(|broken| broken.told)
    }

    /// Of the peers that matter, those that are to be dialled again and told of now, and since when they are out of reach.
    pub(crate) fn take_due(&mut self, now: Instant, matters: impl Fn(NodeId) -> bool) -> Vec<(NodeId, Duration)> {
        let mut due = Vec::new();
        for (&node, broken) in self.broken.iter_mut().filter(|(node, broken)| broken.due <= now && matters(**node)) {
            (broken.told, broken.due) = (true, now + LINK_BROKEN);
            due.push((node, now.since(broken.since)));
        }
        due
    }

    /// When the next of those that matter is due.
    pub(crate) fn next_wakeup(&self, matters: impl Fn(NodeId) -> bool) -> Option<(Instant, &'static str)> {
        let due = self.broken.iter().filter(|(node, _)| matters(**node)).map(|(_, broken)| broken.due).min();
        due.map(|at| (at, "links: a connection does not stand again"))
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
    fn only_what_matters_and_stays_broken_is_told_again_and_again_until_it_stands() {
        let mut links = Links::default();
        assert!(
            links.handle_disconnected(at(0), A) && !links.handle_disconnected(at(100), A),
            "an attempt that failed"
        );
        links.handle_disconnected(at(0), B);
        let matters = |node: NodeId| node == A;
        assert_eq!(links.next_wakeup(matters).map(|(at, _)| at), Some(at(500)));
        assert_eq!(links.take_due(at(499), matters), vec![]);
        assert_eq!(links.take_due(at(500), matters), vec![(A, Duration::from_millis(500))]);
        assert!(links.is_told(A) && !links.is_told(B));
        assert_eq!(links.take_due(at(1000), matters), vec![(A, Duration::from_millis(1000))]);
        assert_eq!((links.handle_connected(A), links.handle_connected(B)), (Some(true), Some(false)));
        assert_eq!(links.handle_connected(A), None);
        assert_eq!(links.next_wakeup(matters), None);
    }
}
