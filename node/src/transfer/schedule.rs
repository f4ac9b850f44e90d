//! Decides which holder is asked for which chunk next: all holders in parallel, the rarest chunk first, slow holders
//! for fewer.
//!
//! Without clock or network: `fetch.rs` sends the requests, verifies the chunks and reports the results.
use node_core::id::NodeId;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// A request for one chunk from one holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ask {
    pub(super) node: NodeId,
    pub(super) chunk: usize,
}

/// The chunks still to be fetched, and their holders.
///
/// Report holders and the result of each `Ask`; after each report, and whenever `next_wakeup` is due, call `poll` until
/// `None`. The schedule ends with `is_done`, or with a chunk that no remaining holder has (`unavailable`).
#[derive(Debug)]
pub(super) struct Schedule {
    /// Chunks not fetched yet.
    missing: BTreeMap<usize, Missing>,
    holders: BTreeMap<NodeId, Holder>,
    in_flight: usize,
    pace: Option<Pace>,
}

#[derive(Debug)]
struct Missing {
    bytes: u64,
    /// Holders that are being asked for it.
    asked: Vec<NodeId>,
    /// Number of holders that have it.
    rarity: usize,
}

#[derive(Debug)]
struct Holder {
    has: Vec<bool>,
    /// Most concurrent requests.
    window: usize,
    in_flight: BTreeMap<usize, Instant>,
    /// Chunks that it has and that no holder is asked for: rarest first, then in file order.
    queue: BTreeSet<(usize, usize)>,
    /// Smoothed time per chunk.
    took: Option<Duration>,
    /// Chunks that it announced but does not have.
    lacked: u32,
    /// Consecutive failures.
    failures: u32,
    last_failed: Option<Instant>,
    /// Not asked before this time.
    rests_until: Option<Instant>,
}

/// Limits all holders together to a share of this node's link.
#[derive(Debug)]
struct Pace {
    bytes_per_second: u64,
    /// When all requests so far will have been answered at this rate.
    clear: Option<Instant>,
}

impl Schedule {
    /// A schedule for these chunks (number, bytes).
    pub(super) fn new(chunks: impl IntoIterator<Item = (usize, u64)>) -> Self {
        let missing = |(chunk, bytes)| (chunk, Missing { bytes, asked: Vec::new(), rarity: 0 });
        Self { missing: chunks.into_iter().map(missing).collect(), holders: BTreeMap::new(), in_flight: 0, pace: None }
    }

    /// Sets the bytes per second that all responses together may bring from now on.
    pub(super) fn handle_pace(&mut self, bytes_per_second: Option<u64>) {
        let clear = self.pace.as_ref().and_then(|pace| pace.clear);
        self.pace = bytes_per_second.map(|rate| Pace { bytes_per_second: rate.max(1), clear });
    }

    /// Adds a holder and the chunks it has. An untrusted one gets one request at a time at first.
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

    /// A chunk arrived intact. Returns the other requests for it, which are no longer needed.
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

    /// A chunk is on disk, from any source. Returns all requests for it.
    pub(super) fn handle_present(&mut self, chunk: usize) -> Vec<Ask> {
        let Some(missing) = self.missing.remove(&chunk) else { return Vec::new() };
        let asks: Vec<Ask> = missing.asked.iter().map(|&node| Ask { node, chunk }).collect();
        for holder in self.holders.values_mut() {
            self.in_flight -= usize::from(holder.in_flight.remove(&chunk).is_some());
            holder.queue.remove(&(missing.rarity, chunk));
        }
        asks
    }

    /// The holder does not have this chunk after all.
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

    /// A request could not be sent, or its response broke off or is overdue. The holder pauses; after a few failures it
    /// is dropped.
    pub(super) fn handle_failed(&mut self, now: Instant, ask: Ask) {
        let asked = self.give_back(ask);
        let Some(holder) = self.holders.get_mut(&ask.node) else { return };
        // Requests sent before the last failure failed with it: a broken connection is one failure.
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

    /// Drops a holder. Returns the requests in flight to it.
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

    /// Overdue requests: the caller stops waiting for them, and reports each with `handle_failed`.
    pub(super) fn overdue(&self, now: Instant) -> Vec<Ask> {
        let late = |asked: &Instant| now.saturating_duration_since(*asked) >= ANSWER_MAX;
        let of = |(node, holder): (&NodeId, &Holder)| {
            let late = holder.in_flight.iter().filter(|(_, asked)| late(asked));
            late.map(|(chunk, _)| Ask { node: *node, chunk: *chunk }).collect::<Vec<_>>()
        };
        self.holders.iter().flat_map(of).collect()
    }

    /// The next request to send.
    pub(super) fn poll(&mut self, now: Instant) -> Option<Ask> {
        if self.in_flight >= IN_FLIGHT_MAX || self.pace.as_ref().is_some_and(|pace| pace.waits_until(now).is_some()) {
            return None;
        }
        let ask = self.first_time(now).or_else(|| self.second_time(now))?;
        let missing = self.missing.get_mut(&ask.chunk)?;
        for holder in self.holders.values_mut() {
            holder.queue.remove(&(missing.rarity, ask.chunk));
        }
        missing.asked.push(ask.node);
        if let Some(pace) = &mut self.pace {
            pace.take(now, missing.bytes);
        }
        self.holders.get_mut(&ask.node)?.in_flight.insert(ask.chunk, now);
        self.in_flight += 1;
        Some(ask)
    }

    /// A chunk that no holder is asked for yet, from the holder with the fewest requests in flight; the fastest breaks
    /// ties.
    fn first_time(&self, now: Instant) -> Option<Ask> {
        let ready = self.holders.iter().filter(|(_, h)| h.is_ready(now) && !h.queue.is_empty());
        let (node, holder) = ready.min_by_key(|(node, h)| (h.in_flight.len(), h.took.unwrap_or(FAST), **node))?;
        holder.queue.first().map(|(_, chunk)| Ask { node: *node, chunk: *chunk })
    }

    /// End game: an idle holder is asked for a chunk that another holder has not delivered for too long.
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
            let once = self.missing.get(&chunk).is_some_and(|missing| missing.asked.len() == 1);
            let other = idle.iter().find(|(_, h)| once && h.has(chunk) && !h.in_flight.contains_key(&chunk));
            other.map(|(node, _)| Ask { node: **node, chunk })
        })
    }

    /// When to call `poll` again if nothing is reported before.
    pub(super) fn next_wakeup(&self, now: Instant) -> Option<Instant> {
        let rests = self.holders.values().filter_map(|h| h.rests_until);
        let late = self.holders.values().flat_map(|h| h.in_flight.values().map(|asked| h.late_at(*asked)));
        let overdue = self.holders.values().flat_map(|h| h.in_flight.values().map(|asked| *asked + ANSWER_MAX));
        let pace = self.pace.as_ref().and_then(|pace| pace.waits_until(now));
        rests.chain(late).chain(pace).filter(|at| *at > now).chain(overdue).min()
    }

    /// Whether all chunks have been fetched.
    pub(super) fn is_done(&self) -> bool {
        self.missing.is_empty()
    }

    /// Whether the chunk has not been fetched yet.
    pub(super) fn is_missing(&self, chunk: usize) -> bool {
        self.missing.contains_key(&chunk)
    }

    /// A chunk that no remaining holder has.
    pub(super) fn unavailable(&self) -> Option<usize> {
        self.missing
            .iter()
            .find(|(_, missing)| missing.rarity == 0 && missing.asked.is_empty())
            .map(|(chunk, _)| *chunk)
    }

    /// Ends a request that did not bring the chunk. Returns when it was sent.
    fn give_back(&mut self, ask: Ask) -> Option<Instant> {
        let asked = self.holders.get_mut(&ask.node)?.in_flight.remove(&ask.chunk)?;
        self.in_flight -= 1;
        if let Some(missing) = self.missing.get_mut(&ask.chunk) {
            missing.asked.retain(|node| *node != ask.node);
            if missing.asked.is_empty() {
                for holder in self.holders.values_mut().filter(|h| h.has(ask.chunk)) {
                    holder.queue.insert((missing.rarity, ask.chunk));
                }
            }
        }
        Some(asked)
    }

    /// Recounts the holders of each chunk after a holder was added or dropped.
    fn recount(&mut self) {
        self.holders.values_mut().for_each(|h| h.queue.clear());
        for (&chunk, missing) in &mut self.missing {
            missing.rarity = self.holders.values().filter(|h| h.has(chunk)).count();
            if missing.asked.is_empty() {
                for holder in self.holders.values_mut().filter(|h| h.has(chunk)) {
                    holder.queue.insert((missing.rarity, chunk));
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

    /// When another holder may be asked for the same chunk.
    fn late_at(&self, asked: Instant) -> Instant {
        asked + self.took.map_or(LATE_MIN, |took| (took * 2).max(LATE_MIN))
    }
}

impl Pace {
    /// Requests may be sent a tenth of a second ahead, so that no round trip is lost.
    fn waits_until(&self, now: Instant) -> Option<Instant> {
        self.clear.filter(|clear| *clear > now + AHEAD).map(|clear| clear - AHEAD)
    }

    fn take(&mut self, now: Instant, bytes: u64) {
        let time = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        self.clear = Some(self.clear.filter(|clear| *clear > now).unwrap_or(now) + time);
    }
}

/// Concurrent requests to a new holder: one chunk travels while another is read from the holder's disk.
const WINDOW_FIRST: usize = 2;
/// Most concurrent requests to one holder: fills a link of 1 Gbit/s at 60 ms with chunks of 1 MiB.
const WINDOW_MAX: usize = 8;
/// Most chunks in flight from all holders; bounds the memory they take on this node to this many MiB.
const IN_FLIGHT_MAX: usize = 32;
/// A holder faster than this per chunk gets one more concurrent request.
const FAST: Duration = Duration::from_secs(1);
/// A holder slower than this per chunk gets half the concurrent requests.
const SLOW: Duration = Duration::from_secs(3);
/// Earliest time to ask a second holder for the same chunk.
const LATE_MIN: Duration = Duration::from_millis(500);
/// Longest wait for a chunk: corresponds to 17 KB/s. QUIC detects a dead peer far sooner.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Base pause of a failed holder; doubles with each failure.
const REST: Duration = Duration::from_millis(125);
/// A holder is dropped after this many consecutive failures, about a second in all: the coordinator that waits for this
/// stage may do better with another node.
const FAILURES_MAX: u32 = 4;
/// A holder is dropped after it lacks this many of the chunks it announced: a few at the edges of its share may be
/// missing.
const LACKED_MAX: u32 = 64;
/// How far ahead of the pace requests may be sent.
const AHEAD: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
