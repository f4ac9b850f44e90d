//! Which holder is asked for which chunk next: all of them at once, the rarest chunk first, a slow one for less.
//!
//! No clock, no network: `fetch.rs` asks, waits and hashes, and tells what came of it.
use node_core::id::NodeId;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// One chunk to be asked of one holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ask {
    pub(super) node: NodeId,
    pub(super) chunk: usize,
}

/// What is still to be fetched, and from whom.
///
/// Tell it of holders and of what came of each `Ask`; call `poll` until `None` after each of these and whenever
/// `next_wakeup` is due. It ends with `is_done`, or with a chunk that nobody is left to give (`stuck`).
#[derive(Debug)]
pub(super) struct Schedule {
    /// Chunks not here yet.
    wanted: BTreeMap<usize, Wanted>,
    holders: BTreeMap<NodeId, Holder>,
    in_flight: usize,
    pace: Option<Pace>,
}

#[derive(Debug)]
struct Wanted {
    bytes: u64,
    /// Holders asked for it at present.
    asked: Vec<NodeId>,
    /// Holders that have it.
    rarity: usize,
}

#[derive(Debug)]
struct Holder {
    has: Vec<bool>,
    /// Chunks asked at once.
    window: usize,
    in_flight: BTreeMap<usize, Instant>,
    /// Chunks that it has and nobody was asked for: rarest first, then in the order of the file.
    queue: BTreeSet<(usize, usize)>,
    /// How long a chunk takes, smoothed.
    took: Option<Duration>,
    /// Chunks that it said it has, and has not.
    lacked: u32,
    /// Failures without a success between them.
    failures: u32,
    last_failed: Option<Instant>,
    /// Not asked before then.
    rests_until: Option<Instant>,
}

/// Keeps all holders together below what the link here can take.
#[derive(Debug)]
struct Pace {
    bytes_per_second: u64,
    /// When what was asked for so far will have arrived.
    clear: Option<Instant>,
}

impl Schedule {
    /// These chunks (number, bytes) are to be had.
    pub(super) fn new(chunks: impl IntoIterator<Item = (usize, u64)>) -> Self {
        let wanted = |(chunk, bytes)| (chunk, Wanted { bytes, asked: Vec::new(), rarity: 0 });
        Self { wanted: chunks.into_iter().map(wanted).collect(), holders: BTreeMap::new(), in_flight: 0, pace: None }
    }

    /// All answers together may bring so many bytes a second from now on.
    pub(super) fn handle_pace(&mut self, bytes_per_second: Option<u64>) {
        let clear = self.pace.as_ref().and_then(|pace| pace.clear);
        self.pace = bytes_per_second.map(|rate| Pace { bytes_per_second: rate.max(1), clear });
    }

    /// A node says which chunks it has. One that is not trusted much is asked for one at a time at first.
    pub(super) fn handle_holder(&mut self, node: NodeId, has: Vec<bool>, trusted: bool) {
        let holder = Holder {
            has,
            window: if trusted { WINDOW_FIRST } else { 1 },
            in_flight: BTreeMap::new(),
            queue: BTreeSet::new(),
            took: None,
            lacked: 0,
            failures: 0,
            last_failed: None,
            rests_until: None,
        };
        self.holders.entry(node).or_insert(holder);
        self.recount();
    }

    /// A chunk is here, intact. Returns who else was asked for it and need not send it any more.
    pub(super) fn handle_arrived(&mut self, now: Instant, ask: Ask) -> Vec<Ask> {
        if let Some(holder) = self.holders.get_mut(&ask.node)
            && let Some(asked) = holder.in_flight.get(&ask.chunk)
        {
            let took = now.saturating_duration_since(*asked);
            holder.took = Some(holder.took.map_or(took, |before| (before * 3 + took) / 4));
            (holder.failures, holder.last_failed) = (0, None);
            if took < FAST {
                holder.window = (holder.window + 1).min(WINDOW_MAX);
            } else if took > SLOW {
                holder.window = (holder.window / 2).max(1);
            }
        }
        self.handle_present(ask.chunk).into_iter().filter(|other| *other != ask).collect()
    }

    /// A chunk is here, wherever it came from. Returns who was asked for it.
    pub(super) fn handle_present(&mut self, chunk: usize) -> Vec<Ask> {
        let Some(wanted) = self.wanted.remove(&chunk) else { return Vec::new() };
        let asks: Vec<Ask> = wanted.asked.iter().map(|&node| Ask { node, chunk }).collect();
        for holder in self.holders.values_mut() {
            self.in_flight -= usize::from(holder.in_flight.remove(&chunk).is_some());
            holder.queue.remove(&(wanted.rarity, chunk));
        }
        asks
    }

    /// The holder does not have that chunk after all.
    pub(super) fn handle_lacking(&mut self, ask: Ask) {
        self.give_back(ask);
        let Some(holder) = self.holders.get_mut(&ask.node) else { return };
        holder.lacked += 1;
        if let Some(has) = holder.has.get_mut(ask.chunk) {
            *has = false;
        }
        if holder.lacked >= LACKED_MAX {
            self.handle_gone(ask.node);
        } else {
            self.recount();
        }
    }

    /// The holder could not be asked, or its answer broke off or is overdue. It rests; after a few times it is given up.
    pub(super) fn handle_failed(&mut self, now: Instant, ask: Ask) {
        let asked = self.give_back(ask);
        let Some(holder) = self.holders.get_mut(&ask.node) else { return };
        // What was asked before the last failure failed with it: a connection that breaks is one failure.
        if asked.is_some_and(|asked| holder.last_failed.is_none_or(|last| asked >= last)) {
            holder.failures += 1;
            holder.last_failed = Some(now);
            holder.rests_until = Some(now + REST * (1 << holder.failures.min(8)));
            holder.window = 1;
        }
        if holder.failures >= FAILURES_MAX {
            self.handle_gone(ask.node);
        }
    }

    /// The holder is not asked for anything any more. Returns what it was asked for.
    pub(super) fn handle_gone(&mut self, node: NodeId) -> Vec<Ask> {
        let chunks: Vec<usize> =
            self.holders.get(&node).map(|h| h.in_flight.keys().copied().collect()).unwrap_or_default();
        let asks: Vec<Ask> = chunks.into_iter().map(|chunk| Ask { node, chunk }).collect();
        for ask in &asks {
            self.give_back(*ask);
        }
        self.holders.remove(&node);
        self.recount();
        asks
    }

    /// Answers that are overdue: whoever asked stops waiting, and says so with `handle_failed`.
    pub(super) fn overdue(&self, now: Instant) -> Vec<Ask> {
        let late = |asked: &Instant| now.saturating_duration_since(*asked) >= ANSWER_MAX;
        let of = |(node, holder): (&NodeId, &Holder)| {
            let late = holder.in_flight.iter().filter(|(_, asked)| late(asked));
            late.map(|(chunk, _)| Ask { node: *node, chunk: *chunk }).collect::<Vec<_>>()
        };
        self.holders.iter().flat_map(of).collect()
    }

    /// Whom to ask for what now.
    pub(super) fn poll(&mut self, now: Instant) -> Option<Ask> {
        if self.in_flight >= IN_FLIGHT_MAX || self.pace.as_ref().is_some_and(|pace| pace.waits_until(now).is_some()) {
            return None;
        }
        let ask = self.first_time(now).or_else(|| self.second_time(now))?;
        let wanted = self.wanted.get_mut(&ask.chunk)?;
        for holder in self.holders.values_mut() {
            holder.queue.remove(&(wanted.rarity, ask.chunk));
        }
        wanted.asked.push(ask.node);
        if let Some(pace) = &mut self.pace {
            pace.take(now, wanted.bytes);
        }
        self.holders.get_mut(&ask.node)?.in_flight.insert(ask.chunk, now);
        self.in_flight += 1;
        Some(ask)
    }

    /// The holder with the least to do of those that have something nobody was asked for; the fastest of these.
    fn first_time(&self, now: Instant) -> Option<Ask> {
        let ready = self.holders.iter().filter(|(_, h)| h.is_ready(now) && !h.queue.is_empty());
        let (node, holder) = ready.min_by_key(|(node, h)| (h.in_flight.len(), h.took.unwrap_or(FAST), **node))?;
        holder.queue.first().map(|(_, chunk)| Ask { node: *node, chunk: *chunk })
    }

    /// The end game: who has nothing else to do is asked for what has been awaited from another for too long.
    fn second_time(&self, now: Instant) -> Option<Ask> {
        let idle = self.holders.iter().filter(|(_, h)| h.is_ready(now) && h.queue.is_empty() && h.in_flight.is_empty());
        let idle: Vec<(&NodeId, &Holder)> = idle.collect();
        let late = |(node, holder): (&NodeId, &Holder)| {
            let at = |(chunk, asked): (&usize, &Instant)| (holder.late_at(*asked), *chunk, *node);
            holder.in_flight.iter().map(at).collect::<Vec<_>>()
        };
        let mut late: Vec<(Instant, usize, NodeId)> =
            self.holders.iter().flat_map(late).filter(|(late, ..)| *late <= now).collect();
        late.sort_unstable();
        late.into_iter().find_map(|(_, chunk, _)| {
            let once = self.wanted.get(&chunk).is_some_and(|wanted| wanted.asked.len() == 1);
            let other = idle.iter().find(|(_, h)| once && h.has(chunk) && !h.in_flight.contains_key(&chunk));
            other.map(|(node, _)| Ask { node: **node, chunk })
        })
    }

    /// When to come back if nothing is told before then.
    pub(super) fn next_wakeup(&self, now: Instant) -> Option<Instant> {
        let rests = self.holders.values().filter_map(|h| h.rests_until);
        let late = self.holders.values().flat_map(|h| h.in_flight.values().map(|asked| h.late_at(*asked)));
        let overdue = self.holders.values().flat_map(|h| h.in_flight.values().map(|asked| *asked + ANSWER_MAX));
        let pace = self.pace.as_ref().and_then(|pace| pace.waits_until(now));
        rests.chain(late).chain(pace).filter(|at| *at > now).chain(overdue).min()
    }

    /// Everything is here.
    pub(super) fn is_done(&self) -> bool {
        self.wanted.is_empty()
    }

    /// The chunk is not here yet.
    pub(super) fn wants(&self, chunk: usize) -> bool {
        self.wanted.contains_key(&chunk)
    }

    /// A chunk that nobody is left to give.
    pub(super) fn stuck(&self) -> Option<usize> {
        self.wanted.iter().find(|(_, wanted)| wanted.rarity == 0 && wanted.asked.is_empty()).map(|(chunk, _)| *chunk)
    }

    /// The holder was asked, and this did not bring the chunk. Returns when it was asked.
    fn give_back(&mut self, ask: Ask) -> Option<Instant> {
        let asked = self.holders.get_mut(&ask.node)?.in_flight.remove(&ask.chunk)?;
        self.in_flight -= 1;
        if let Some(wanted) = self.wanted.get_mut(&ask.chunk) {
            wanted.asked.retain(|node| *node != ask.node);
            if wanted.asked.is_empty() {
                for holder in self.holders.values_mut().filter(|h| h.has(ask.chunk)) {
                    holder.queue.insert((wanted.rarity, ask.chunk));
                }
            }
        }
        Some(asked)
    }

    /// Counts anew who has what: a holder came or went.
    fn recount(&mut self) {
        self.holders.values_mut().for_each(|h| h.queue.clear());
        for (&chunk, wanted) in &mut self.wanted {
            wanted.rarity = self.holders.values().filter(|h| h.has(chunk)).count();
            if wanted.asked.is_empty() {
                for holder in self.holders.values_mut().filter(|h| h.has(chunk)) {
                    holder.queue.insert((wanted.rarity, chunk));
                }
            }
        }
    }
}

impl Holder {
    fn has(&self, chunk: usize) -> bool {
        self.has.get(chunk).copied().unwrap_or(false)
    }

    fn is_ready(&self, now: Instant) -> bool {
        self.in_flight.len() < self.window && self.rests_until.is_none_or(|until| until <= now)
    }

    /// When another holder may be asked for the same.
    fn late_at(&self, asked: Instant) -> Instant {
        asked + self.took.map_or(LATE_MIN, |took| (took * 2).max(LATE_MIN))
    }
}

impl Pace {
    /// A tenth of a second may be asked for ahead, so that no round trip is lost.
    fn waits_until(&self, now: Instant) -> Option<Instant> {
        self.clear.filter(|clear| *clear > now + AHEAD).map(|clear| clear - AHEAD)
    }

    fn take(&mut self, now: Instant, bytes: u64) {
        let time = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        self.clear = Some(self.clear.filter(|clear| *clear > now).unwrap_or(now) + time);
    }
}

/// Chunks asked of a new holder at once: one is on its way while the other is read from its disk.
const WINDOW_FIRST: usize = 2;
/// Most chunks asked of one holder at once: fills a link of 1 Gbit/s at 60 ms with chunks of 1 MiB.
const WINDOW_MAX: usize = 8;
/// Most chunks under way from all holders: what they may take of this node's memory, in MiB.
const IN_FLIGHT_MAX: usize = 32;
/// A holder that takes less than this for a chunk is asked for one more at a time,
const FAST: Duration = Duration::from_secs(1);
/// one that takes more than this for half as many.
const SLOW: Duration = Duration::from_secs(3);
/// No chunk is asked of a second holder before this.
const LATE_MIN: Duration = Duration::from_millis(500);
/// Longest wait for a chunk: 17 KB/s. QUIC notices a dead peer far sooner.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// A holder that failed rests this long, twice as long each time.
const REST: Duration = Duration::from_millis(125);
/// So many failures in a row, and a holder is given up: after a second in all, because the head that waits for this
/// stage may do better with another node.
const FAILURES_MAX: u32 = 4;
/// Who lacks so many of the chunks it named is not asked any more: a few at the edges of what it has may be amiss.
const LACKED_MAX: u32 = 64;
/// What may be asked for ahead of the pace.
const AHEAD: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
