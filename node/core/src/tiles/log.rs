//! What a tile sent its neighbours, kept until nobody can ask for it any more, and who is sent what of it.
use crate::id::{NodeId, TensorId};
use crate::limits::{FEEDS_MAX, HALO_LOG_BYTES_MAX, HALO_WINDOW_BYTES};
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// A strip, kept by the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strip {
    /// Which of the tile's links it goes over.
    pub(super) link: u16,
    pub(super) tensor: TensorId,
    /// Elements of it.
    pub(super) count: u32,
    pub(super) bytes: u64,
}

/// The strips of a step.
#[derive(Debug)]
struct Entry {
    step: u32,
    strips: Vec<Strip>,
    bytes: u64,
}

/// Somebody who is sent the strips for one neighbour.
#[derive(Clone, Copy, Debug)]
pub(super) struct Feed {
    /// The neighbour's number.
    pub(super) tile: u16,
    pub(super) node: NodeId,
    /// The owner of that tile, which is never far behind; else a standby, which is sent no more than a window ahead.
    pub(super) owner: bool,
    /// Send as soon as there is something.
    pub(super) live: bool,
    /// Steps it has made: what is older it does not need.
    pub(super) held: u32,
    /// What is older has been sent.
    pub(super) next: u32,
}

/// Strips in the order of their steps.
#[derive(Debug, Default)]
pub(super) struct HaloLog {
    entries: VecDeque<Entry>,
    bytes: u64,
    feeds: Vec<Feed>,
}

/// Something to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sending {
    pub(super) to: NodeId,
    pub(super) step: u32,
    pub(super) strip: Strip,
    pub(super) copy: bool,
}

impl HaloLog {
    /// The strips of a step, later than all before.
    pub(super) fn push(&mut self, step: u32, strips: Vec<Strip>) {
        let bytes = strips.iter().map(|strip| strip.bytes).sum();
        self.bytes += bytes;
        self.entries.push_back(Entry { step, strips, bytes });
    }

    /// The first step whose strips are still here; `now` where there are none.
    pub(super) fn first(&self, now: u32) -> u32 {
        self.entries.front().map_or(now, |entry| entry.step)
    }

    /// Who is fed begins anew: a new placement.
    pub(super) fn clear_feeds(&mut self) {
        self.feeds.clear();
    }

    /// Somebody is to be fed from now on, or says how far it is. `again`: what was sent after that may be lost.
    pub(super) fn feed(&mut self, feed: Feed, again: bool) {
        let fed = self.feeds.iter().filter(|known| known.tile == feed.tile).count();
        match self.feeds.iter_mut().find(|known| (known.tile, known.node) == (feed.tile, feed.node)) {
            Some(known) => {
                known.held = if again { feed.held } else { known.held.max(feed.held) };
                known.next = if again { feed.held } else { known.next.max(feed.held) };
                known.live = feed.live;
            }
            None if fed < FEEDS_MAX => self.feeds.push(feed),
            None => {}
        }
    }

    /// An owner has made so many steps.
    pub(super) fn held(&mut self, tile: u16, node: NodeId, step: u32) {
        let known = self.feeds.iter_mut().find(|known| (known.tile, known.node, known.owner) == (tile, node, true));
        if let Some(known) = known {
            known.held = known.held.max(step);
        }
    }

    /// Whether a standby that holds so much can be fed.
    pub(super) fn reaches(&self, step: u32) -> bool {
        self.entries.front().is_none_or(|entry| entry.step <= step)
    }

    /// What is to be sent now. `peer` names the tile behind a link.
    pub(super) fn due(&mut self, peer: impl Fn(u16) -> u16) -> Vec<Sending> {
        let mut due = Vec::new();
        for feed in self.feeds.iter_mut().filter(|feed| feed.live) {
            let for_it = |strip: &&Strip| peer(strip.link) == feed.tile;
            // A standby's window begins with what it has not said to hold.
            let from = if feed.owner { feed.next } else { feed.held };
            let first = self.entries.partition_point(|entry| entry.step < from);
            let mut ahead: u64 = 0;
            for entry in self.entries.range(first..) {
                let bytes: u64 = entry.strips.iter().filter(for_it).map(|strip| strip.bytes).sum();
                // One step always, however large it is.
                if !feed.owner && ahead > 0 && ahead + bytes > HALO_WINDOW_BYTES {
                    break;
                }
                ahead += bytes;
                if entry.step < feed.next {
                    continue;
                }
                let (to, step, copy) = (feed.node, entry.step, !feed.owner);
                due.extend(entry.strips.iter().filter(for_it).map(|&strip| Sending { to, step, strip, copy }));
                feed.next = entry.step + 1;
            }
        }
        due
    }

    /// Strips that nobody needs any more. `now`: steps the tile itself has made; its last strips always stay. Standbys that
    /// fall too far behind are not waited for.
    pub(super) fn trim(&mut self, now: u32) -> Vec<TensorId> {
        let least = |feeds: &[Feed], owners: bool| {
            feeds.iter().filter(|feed| feed.owner || !owners).map(|feed| feed.held).min()
        };
        let (all, owners) = (least(&self.feeds, false), least(&self.feeds, true));
        let mut freed = Vec::new();
        while let Some(entry) = self.entries.front() {
            let needed = |bound: Option<u32>| bound.is_none_or(|bound| entry.step >= bound);
            let stays = if self.bytes > HALO_LOG_BYTES_MAX { needed(owners) } else { needed(all) };
            if stays || entry.step >= now {
                break;
            }
            let Some(entry) = self.entries.pop_front() else { break };
            self.bytes -= entry.bytes;
            freed.extend(entry.strips.iter().map(|strip| strip.tensor));
        }
        freed
    }

    /// All strips, given up.
    pub(super) fn clear(&mut self) -> Vec<TensorId> {
        self.bytes = 0;
        self.feeds.clear();
        self.entries.drain(..).flat_map(|entry| entry.strips).map(|strip| strip.tensor).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = NodeId([1; 16]);

    fn log(steps: u32, bytes: u64) -> HaloLog {
        let mut log = HaloLog::default();
        for step in 0..steps {
            log.push(step, alloc::vec![Strip { link: 0, tensor: TensorId(step.into()), count: 1, bytes }]);
        }
        log
    }

    fn feed(owner: bool, held: u32) -> Feed {
        Feed { tile: 3, node: ME, owner, live: true, held, next: held }
    }

    fn sent(log: &mut HaloLog) -> Vec<u32> {
        log.due(|_| 3).iter().map(|sending| sending.step).collect()
    }

    #[test]
    fn an_owner_is_sent_everything_from_where_it_is_once() {
        let mut log = log(5, 8);
        log.feed(feed(true, 2), false);
        assert_eq!(sent(&mut log), [2, 3, 4]);
        assert_eq!(sent(&mut log), []);
        log.feed(feed(true, 3), true);
        assert_eq!(sent(&mut log), [3, 4], "a connection broke: what it does not hold is sent again");
    }

    #[test]
    fn a_standby_is_sent_a_window_and_more_when_it_says_so() {
        let mut log = log(6, HALO_WINDOW_BYTES / 2);
        log.feed(feed(false, 0), false);
        assert_eq!(sent(&mut log), [0, 1]);
        assert_eq!(sent(&mut log), []);
        log.feed(feed(false, 1), false);
        assert_eq!(sent(&mut log), [2]);
    }

    #[test]
    fn what_a_standby_needs_stays_until_there_is_too_much_of_it() {
        let mut kept = log(6, 8);
        kept.feed(feed(true, 5), false);
        kept.feed(Feed { node: NodeId([2; 16]), live: false, ..feed(false, 2) }, false);
        assert_eq!(kept.trim(6).len(), 2);
        assert_eq!(kept.first(6), 2);
        assert!(kept.reaches(2) && !kept.reaches(1));
        let mut large = log(6, HALO_LOG_BYTES_MAX / 4);
        large.feed(feed(true, 5), false);
        large.feed(Feed { node: NodeId([2; 16]), ..feed(false, 0) }, false);
        large.trim(6);
        assert_eq!(large.first(6), 2, "four of them are as many as are kept");
    }
}
