//! The send log of a part: what it has sent, kept so that it can be resent by cursor: to a standby that joins or falls
//! behind, and to the next owner of a lost part.
//!
//! One rule serves losses, standbys and broken connections: the receiver reports its cursor, and the sender continues
//! from there. A follower is sent each entry of its channels once, in order, until it reports that some may be lost.
use super::queue::Split;
use crate::id::{NodeId, PartId, TensorId};
use crate::message::{Drafts, FrameHeader};
use crate::planted::{self, Planted};
use crate::work::Cursors;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

/// An entry. The shell stores its payload under `tensor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LogEntry {
    pub(super) cursor: u32,
    /// The cursor of a receiver that holds it.
    pub(super) end: u32,
    /// Rows or elements.
    pub(super) count: u32,
    pub(super) last: bool,
    /// Only a channel's last entry has rows of drafts.
    pub(super) drafts: Drafts,
    pub(super) tensor: TensorId,
    pub(super) bytes: u64,
}

/// Bounds of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) bytes: u64,
    pub(super) entries: usize,
    /// Bytes sent to a standby beyond what it reports to hold.
    pub(super) window: u64,
    /// Rows of adjacent entries that are joined when they are resent; 0 if entries are not joined.
    pub(super) joined: u32,
}

/// Which entries are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// All that fit. Over the bounds, those that all followers hold are dropped first, and the oldest next: a follower
    /// that still needs these has to be fed from elsewhere.
    WhileRoom,
    /// Those that a follower may need. Over the bounds only those that owners need: a standby that is too far behind
    /// starts again.
    WhileNeeded,
}

/// A node that receives what is sent to one part.
#[derive(Clone, Debug)]
struct Follower {
    part: PartId,
    node: NodeId,
    /// Whether it is the part's owner, which is sent everything. Otherwise it is the standby, which is sent a window.
    owner: bool,
    /// Whether entries are sent to it. Otherwise they are only kept for it.
    live: bool,
    /// Cursors that it reports.
    held: CursorMap,
    /// Cursors up to which entries were sent to it.
    next: CursorMap,
    /// Channels that it is sent again, and has not been yet. Its older reports do not know of these. What is kept of them may be
    /// older than what is computed again, which comes first.
    rewound: BTreeSet<u64>,
}

/// A cursor per channel: `all`, if the channel is not in `each`.
#[derive(Clone, Debug, Default)]
struct CursorMap {
    all: u32,
    each: BTreeMap<u64, u32>,
}

impl CursorMap {
    fn of(&self, channel: u64) -> u32 {
        self.each.get(&channel).copied().unwrap_or(self.all)
    }

    fn raise(&mut self, channel: u64, to: u32) {
        if to > self.of(channel) {
            self.each.insert(channel, to);
        }
    }

    fn lower(&mut self, channel: u64, to: u32) {
        if to < self.of(channel) {
            self.each.insert(channel, to);
        }
    }
}

/// A frame to send. Several tensors are adjacent entries, to be concatenated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OutgoingFrame {
    pub(super) to: NodeId,
    pub(super) channel: u64,
    pub(super) cursor: u32,
    pub(super) count: u32,
    pub(super) last: bool,
    pub(super) drafts: Drafts,
    pub(super) tensors: Vec<TensorId>,
    pub(super) bytes: u64,
    pub(super) copy: bool,
}

/// The send log of one part, over all its channels.
///
/// Invariant: a channel's entries are ordered by cursor. Rows, which may be joined, have no gaps: each entry begins no
/// later than the previous one ends. Cursors of halos have gaps, because tiles exchange every few steps.
#[derive(Debug)]
pub(super) struct Sent {
    bounds: Bounds,
    keep: Keep,
    bytes: u64,
    count: usize,
    channels: BTreeMap<u64, VecDeque<LogEntry>>,
    followers: Vec<Follower>,
}

impl Sent {
    pub(super) fn new(keep: Keep, bounds: Bounds) -> Self {
        Sent { bounds, keep, bytes: 0, count: 0, channels: BTreeMap::new(), followers: Vec::new() }
    }

    // ---- entries

    /// Adds an entry, in place of those that it overwrites. Returns the payloads that are dropped.
    pub(super) fn push(&mut self, channel: u64, entry: LogEntry) -> Vec<TensorId> {
        let mut gone = self.cut(channel, entry.cursor);
        let adjoins = self.channels.get(&channel).and_then(VecDeque::back).is_none_or(|last| last.end >= entry.cursor);
        if !adjoins && self.bounds.joined > 0 {
            // A stage computes its rows in order. Rows with a gap between them are useless.
            gone.extend(self.cut(channel, 0));
        }
        if !gone.is_empty() || !self.channels.contains_key(&channel) {
            // This is computed again. A follower that needs earlier rows has to be fed from elsewhere.
            let lacks = |known: &&mut Follower| known.next.of(channel) < entry.cursor;
            self.followers.iter_mut().filter(lacks).for_each(|known| _ = known.rewound.remove(&channel));
        }
        self.bytes += entry.bytes;
        self.count += 1;
        self.channels.entry(channel).or_default().push_back(entry);
        gone
    }

    /// Of the drafts at the end of a channel, keeps those before the cursor of the next frame. `split` splits a payload of
    /// rows: `(payload, rows of the first part, all rows)`. Returns the payload of the others.
    pub(super) fn settle(&mut self, next: FrameHeader, split: &mut Split<'_>) -> Option<TensorId> {
        let entry = self.channels.get_mut(&next.channel)?.back_mut()?;
        let drafts = u32::from(core::mem::take(&mut entry.drafts.rows));
        if drafts == 0 {
            return None;
        }
        let (before, kept) = (entry.end, next.cursor.saturating_sub(entry.end).min(drafts));
        let (rows, all) = (entry.count - drafts + kept, entry.count);
        (entry.end, entry.count) = (before + kept, rows);
        for known in &mut self.followers {
            if known.next.of(next.channel) == before {
                known.next.raise(next.channel, before + kept); // it was sent the drafts, or will be once it asks again
            }
        }
        if rows == all {
            return None;
        }
        let bytes = entry.bytes / u64::from(all) * u64::from(rows);
        self.bytes -= entry.bytes - bytes;
        let [kept, wrong] = split(entry.tensor, rows, all);
        (entry.bytes, entry.tensor) = (bytes, kept);
        Some(wrong)
    }

    /// Another coordinator counts rounds from 0: what becomes of the drafts that are kept here will not be known.
    pub(super) fn forget_rounds(&mut self) {
        for entry in self.channels.values_mut().filter_map(VecDeque::back_mut) {
            entry.drafts.round = u32::MAX;
        }
    }

    /// Drops the entries of a channel that begin at or after a cursor.
    fn cut(&mut self, channel: u64, cursor: u32) -> Vec<TensorId> {
        let mut gone = Vec::new();
        while self.channels.get(&channel).and_then(VecDeque::back).is_some_and(|last| last.cursor >= cursor) {
            gone.extend(self.pop(channel, false));
        }
        gone
    }

    fn pop(&mut self, channel: u64, oldest: bool) -> Option<TensorId> {
        let entries = self.channels.get_mut(&channel)?;
        let entry = if oldest { entries.pop_front()? } else { entries.pop_back()? };
        if entries.is_empty() {
            self.channels.remove(&channel);
        }
        self.bytes -= entry.bytes;
        self.count -= 1;
        Some(entry.tensor)
    }

    /// The cursor from which on a channel is kept without a gap. `None` if nothing of it is kept.
    pub(super) fn kept_from(&self, channel: u64) -> Option<u32> {
        Some(self.channels.get(&channel)?.front()?.cursor)
    }

    /// A new channel begins at a cursor: what comes before it is not sent.
    pub(super) fn begin(&mut self, channel: u64, cursor: u32) {
        self.followers.iter_mut().for_each(|known| known.next.raise(channel, cursor));
    }

    /// A channel is over. Drops its entries, and what followers reported of it.
    pub(super) fn forget(&mut self, channel: u64) -> Vec<TensorId> {
        for follower in &mut self.followers {
            follower.held.each.remove(&channel);
            follower.next.each.remove(&channel);
            follower.rewound.remove(&channel);
        }
        self.cut(channel, 0)
    }

    /// All channels are over.
    pub(super) fn clear(&mut self) -> Vec<TensorId> {
        let channels: Vec<u64> = self.channels.keys().copied().collect();
        channels.into_iter().flat_map(|channel| self.forget(channel)).collect()
    }

    // ---- followers

    /// Removes all followers, for a new placement.
    pub(super) fn clear_followers(&mut self) {
        self.followers.clear();
    }

    /// A node follows as a part's owner or standby, in place of the previous one. It is sent what is added from now on.
    pub(super) fn follow(&mut self, part: PartId, node: NodeId, owner: bool, live: bool) {
        let ends = self.channels.iter().filter_map(|(&channel, entries)| Some((channel, entries.back()?.end)));
        let next = CursorMap { all: 0, each: ends.collect() };
        self.followers.retain(|known| known.part != part || known.owner != owner);
        self.followers.push(Follower {
            part,
            node,
            owner,
            live,
            held: CursorMap::default(),
            next,
            rewound: BTreeSet::new(),
        });
    }

    /// Removes a part's standby.
    pub(super) fn unfollow(&mut self, part: PartId) {
        self.followers.retain(|known| known.part != part || known.owner);
    }

    /// Whether a node follows for a part.
    pub(super) fn follows(&self, part: PartId, node: NodeId) -> bool {
        self.followers.iter().any(|known| known.part == part && known.node == node)
    }

    /// A follower reports its progress. `again`: what was sent after that may be lost, and is resent.
    pub(super) fn held(&mut self, part: PartId, node: NodeId, cursors: &Cursors, live: bool, again: bool) {
        let open = |channel: &u64| self.channels.contains_key(channel);
        let named: Option<BTreeMap<u64, u32>> = match cursors {
            Cursors::All(_) => None,
            Cursors::Each(each) => Some(each.iter().copied().filter(|(channel, _)| again || open(channel)).collect()),
        };
        let Some(known) = self.followers.iter_mut().find(|known| known.part == part && known.node == node) else {
            return;
        };
        if !known.owner {
            known.live = live;
        }
        match (cursors, named) {
            (Cursors::All(at), _) => {
                let at = if again { *at } else { known.held.all.max(*at) };
                known.held = CursorMap { all: at, each: BTreeMap::new() };
                if again {
                    known.next = CursorMap { all: at, each: BTreeMap::new() };
                } else {
                    known.next.all = known.next.all.max(at);
                    known.next.each.retain(|_, next| *next > at);
                }
            }
            (Cursors::Each(_), Some(named)) if again => {
                for (channel, at) in named {
                    known.held.each.insert(channel, at);
                    let most = if known.rewound.contains(&channel) { known.next.of(channel) } else { at };
                    known.next.each.insert(channel, at.min(most));
                }
            }
            (Cursors::Each(_), named) => known.held.each = named.unwrap_or_default(),
        }
    }

    /// The owner of a part has reached this cursor, as its own frames show.
    pub(super) fn reached(&mut self, part: PartId, node: NodeId, at: u32) {
        let known = self.followers.iter_mut().find(|known| known.part == part && known.node == node && known.owner);
        if let Some(known) = known {
            known.held.all = known.held.all.max(at);
            known.held.each.retain(|_, held| *held > at);
        }
    }

    /// A channel is computed again from a cursor on, because a later part lost it. It is sent again, too.
    pub(super) fn rewind(&mut self, channel: u64, cursor: u32) {
        for known in self.followers.iter_mut().filter(|known| known.next.of(channel) > cursor) {
            known.next.lower(channel, cursor);
            known.rewound.insert(channel);
        }
    }

    /// Whether the given channels are all kept from a cursor on. A channel without entries counts as kept.
    pub(super) fn reaches(&self, channels: impl IntoIterator<Item = u64>, cursor: u32) -> bool {
        channels.into_iter().all(|channel| self.kept_from(channel).is_none_or(|from| from <= cursor))
    }

    /// A follower's reported cursor on each kept channel.
    pub(super) fn reported(&self, part: PartId, node: NodeId) -> Vec<(u64, u32)> {
        let known = self.followers.iter().find(|known| known.part == part && known.node == node);
        let of = |channel: u64| known.map_or(0, |known| known.held.of(channel));
        self.channels.keys().map(|&channel| (channel, of(channel))).collect()
    }

    // ---- sending

    /// Frames to send now, owners first. `peer` maps a channel to the part that receives it.
    pub(super) fn due(&mut self, peer: impl Fn(u64) -> PartId) -> Vec<OutgoingFrame> {
        let mut due: Vec<OutgoingFrame> = Vec::new();
        self.followers.sort_by_key(|known| !known.owner);
        for known in self.followers.iter_mut().filter(|known| known.live) {
            if !known.owner && planted::has(Planted::StandbyNeverFed) {
                continue;
            }
            for (&channel, entries) in &self.channels {
                if peer(channel) == known.part {
                    send(known, channel, entries, self.bounds, &mut due);
                }
            }
        }
        due
    }

    // ---- room

    /// Drops entries that need not be kept. Entries from cursor `now` on always stay.
    pub(super) fn trim(&mut self, now: u32, peer: impl Fn(u64) -> PartId) -> Vec<TensorId> {
        let mut gone = Vec::new();
        let channels: Vec<u64> = self.channels.keys().copied().collect();
        for &channel in &channels {
            let part = peer(channel);
            while let Some(first) = self.channels.get(&channel).and_then(|entries| entries.front()) {
                let (all, owners) = (self.needed(channel, part, false), self.needed(channel, part, true));
                let early = planted::has(Planted::RingTrimmedEarly) && first.end <= self.most(channel, part);
                let over = match self.keep {
                    Keep::WhileRoom => self.is_over() && first.end <= all.unwrap_or(u32::MAX),
                    Keep::WhileNeeded if self.is_over() => owners.is_some_and(|needed| first.end <= needed),
                    Keep::WhileNeeded => all.is_some_and(|needed| first.end <= needed),
                };
                if !(over || early) || first.cursor >= now {
                    break;
                }
                gone.extend(self.pop(channel, true));
            }
        }
        while self.keep == Keep::WhileRoom && self.is_over() {
            let longest = self.channels.iter().max_by_key(|(_, entries)| entries.len()).map(|(&channel, _)| channel);
            match longest.and_then(|channel| self.pop(channel, true)) {
                Some(tensor) => gone.push(tensor),
                None => break,
            }
        }
        gone
    }

    /// Channels of which entries are kept.
    pub(super) fn channels(&self) -> impl Iterator<Item = u64> + '_ {
        self.channels.keys().copied()
    }

    /// Asserts what holds between two inputs.
    pub(super) fn assert_invariants(&self) {
        let (mut bytes, mut count) = (0, 0);
        for (channel, entries) in &self.channels {
            assert!(!entries.is_empty(), "channel {channel} has no entries");
            count += entries.len();
            bytes += entries.iter().map(|entry| entry.bytes).sum::<u64>();
            for (before, after) in entries.iter().zip(entries.iter().skip(1)) {
                assert!(before.cursor < after.cursor, "channel {channel}: {before:?} precedes {after:?}");
                let adjoins = self.bounds.joined == 0 || after.cursor <= before.end;
                assert!(adjoins, "channel {channel}: a gap between {before:?} and {after:?}");
            }
        }
        assert_eq!((bytes, count), (self.bytes, self.count), "bytes and number of all entries");
        assert!(self.keep == Keep::WhileNeeded || !self.is_over(), "{bytes} bytes in {count} entries are kept");
        for (at, known) in self.followers.iter().enumerate() {
            let mut before = self.followers[..at].iter();
            let twice = before.any(|other| (other.part, other.owner) == (known.part, known.owner));
            assert!(!twice, "two nodes follow for part {} (owner: {})", known.part, known.owner);
        }
    }

    fn is_over(&self) -> bool {
        self.bytes > self.bounds.bytes || self.count > self.bounds.entries
    }

    /// The cursor that all followers of a channel (with `owners`, only owners) report to have reached. `None` without
    /// followers.
    fn needed(&self, channel: u64, part: PartId, owners: bool) -> Option<u32> {
        let follow = self.followers.iter().filter(|known| known.part == part && (known.owner || !owners));
        follow.map(|known| known.held.of(channel)).min()
    }

    fn most(&self, channel: u64, part: PartId) -> u32 {
        let follow = self.followers.iter().filter(|known| known.part == part);
        follow.map(|known| known.held.of(channel)).max().unwrap_or(0)
    }
}

/// Adds the frames of one channel that are due to one follower, with adjacent entries joined.
fn send(
    known: &mut Follower,
    channel: u64,
    entries: &VecDeque<LogEntry>,
    bounds: Bounds,
    due: &mut Vec<OutgoingFrame>,
) {
    let (from, held) = (known.next.of(channel), known.held.of(channel));
    let (Some(first), Some(last)) = (entries.front(), entries.back()) else { return };
    if last.end <= from {
        return;
    }
    if first.cursor > from && bounds.joined > 0 {
        // The next entries that it needs are not kept. They are computed again, or it has to be fed from elsewhere and is sent new
        // entries only.
        if !known.rewound.contains(&channel) {
            known.next.raise(channel, last.end);
        }
        return;
    }
    let start = covering(entries, from);
    let mut ahead: u64 = 0;
    if !known.owner {
        ahead = entries.range(covering(entries, held).min(start)..start).map(|entry| entry.bytes).sum();
    }
    for entry in entries.range(start..) {
        // Always at least one entry, however large it is.
        if !known.owner && ahead > 0 && ahead.saturating_add(entry.bytes) > bounds.window {
            return;
        }
        ahead = ahead.saturating_add(entry.bytes);
        known.next.raise(channel, entry.end);
        known.rewound.remove(&channel);
        let join = due.last_mut().filter(|sending| {
            let adjoins = sending.cursor.saturating_add(sending.count) == entry.cursor;
            let same = sending.to == known.node && sending.channel == channel;
            let sure = sending.drafts.rows == 0 && entry.drafts.rows == 0;
            same && adjoins && sure && sending.count.saturating_add(entry.count) <= bounds.joined
        });
        match join {
            Some(sending) => {
                sending.count += entry.count;
                (sending.last, sending.bytes) = (entry.last, sending.bytes + entry.bytes);
                sending.tensors.push(entry.tensor);
            }
            None => due.push(OutgoingFrame {
                to: known.node,
                channel,
                cursor: entry.cursor,
                count: entry.count,
                last: entry.last,
                drafts: entry.drafts,
                tensors: Vec::from([entry.tensor]),
                bytes: entry.bytes,
                copy: !known.owner,
            }),
        }
    }
}

/// The entry with which to continue at a cursor: the last one that begins no later, if it extends beyond the cursor;
/// otherwise the next one.
fn covering(entries: &VecDeque<LogEntry>, cursor: u32) -> usize {
    let after = entries.partition_point(|entry| entry.cursor <= cursor);
    let before = after.checked_sub(1).filter(|&at| entries[at].end > cursor);
    before.unwrap_or(after)
}

#[cfg(test)]
mod tests;
