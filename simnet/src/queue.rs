//! Event queue ordered by virtual time, ties broken by insertion order.
use node_core::time::Instant;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A heap of events ordered by (time, sequence), so that ties are deterministic.
#[derive(Debug)]
pub struct Queue<E> {
    heap: BinaryHeap<Reverse<QueuedEvent<E>>>,
    sequence: u64,
}

#[derive(Debug)]
struct QueuedEvent<E> {
    at: Instant,
    sequence: u64,
    event: E,
}

impl<E> Queue<E> {
    /// An empty queue.
    pub fn new() -> Self {
        Queue { heap: BinaryHeap::new(), sequence: 0 }
    }

    /// Schedules an event.
    pub fn push(&mut self, at: Instant, event: E) {
        self.sequence += 1;
        self.heap.push(Reverse(QueuedEvent { at, sequence: self.sequence, event }));
    }

    /// The next event, if it is due by `until`.
    pub fn pop_until(&mut self, until: Instant) -> Option<(Instant, E)> {
        if self.heap.peek().is_none_or(|Reverse(entry)| entry.at > until) {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.event))
    }

    /// Removes every event for which `which` holds, and returns them with their times, in order.
    pub fn extract(&mut self, which: impl Fn(&E) -> bool) -> Vec<(Instant, E)> {
        let all = std::mem::take(&mut self.heap).into_vec();
        let (mut taken, kept): (Vec<_>, Vec<_>) = all.into_iter().partition(|Reverse(entry)| which(&entry.event));
        self.heap = kept.into();
        taken.sort_unstable_by(|Reverse(a), Reverse(b)| a.cmp(b));
        taken.into_iter().map(|Reverse(entry)| (entry.at, entry.event)).collect()
    }

    /// Number of queued events.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether no event is queued.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Queue::new()
    }
}

impl<E> PartialEq for QueuedEvent<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.sequence) == (other.at, other.sequence)
    }
}

impl<E> Eq for QueuedEvent<E> {}

impl<E> PartialOrd for QueuedEvent<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for QueuedEvent<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extracted_events_keep_their_order() {
        let mut queue = Queue::new();
        for (at, name) in [(5, 'c'), (3, 'a'), (5, 'd'), (4, 'b')] {
            queue.push(Instant(at), name);
        }
        let taken: String = queue.extract(|name| *name != 'b').into_iter().map(|(_, name)| name).collect();
        assert_eq!(taken, "acd");
        assert_eq!(queue.pop_until(Instant(9)), Some((Instant(4), 'b')));
        assert!(queue.is_empty());
    }

    #[test]
    fn equal_times_keep_their_order() {
        let mut queue = Queue::new();
        for (at, name) in [(5, 'c'), (3, 'a'), (5, 'd'), (4, 'b')] {
            queue.push(Instant(at), name);
        }
        let order: String = std::iter::from_fn(|| queue.pop_until(Instant(5))).map(|(_, name)| name).collect();
        assert_eq!(order, "abcd");
        queue.push(Instant(9), 'e');
        assert_eq!(queue.pop_until(Instant(8)), None);
        assert_eq!(queue.len(), 1);
    }
}
