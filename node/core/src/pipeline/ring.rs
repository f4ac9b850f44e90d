//! The hidden rows a stage has sent, kept so that they can be sent again by position: to a standby that joins or fell
//! behind, and to whoever takes the next stage's place.
//!
//! Everything is kept while there is room. Beyond that go first the rows that all who follow have acknowledged, the
//! stage after this one and its standby; then the oldest, and whoever still needed those has to be fed from the head's log.
use crate::id::{NodeId, RequestId, TensorId};
use crate::limits::RING_FRAMES_MAX;
use crate::message::FrameHeader;
use crate::planted::{self, Planted};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

/// Kept rows of all open requests of one stage.
///
/// Invariant: a request's frames are ordered by position, and each begins no later than the one before it ends.
#[derive(Debug)]
pub(super) struct Ring {
    rows_max: u64,
    rows: u64,
    count: usize,
    frames: BTreeMap<RequestId, VecDeque<(FrameHeader, TensorId)>>,
    /// Who may ask for rows again: the next stage and its standby.
    followers: Vec<NodeId>,
    /// What they said they hold.
    acks: BTreeMap<NodeId, BTreeMap<RequestId, u32>>,
}

impl Ring {
    /// Room for so many rows.
    pub(super) fn new(rows_max: u64) -> Self {
        Ring { rows_max, rows: 0, count: 0, frames: BTreeMap::new(), followers: Vec::new(), acks: BTreeMap::new() }
    }

    /// Keeps a frame that was just made, in the place of what it overwrites. Returns what is not kept any more.
    pub(super) fn push(&mut self, header: FrameHeader, tensor: TensorId) -> Vec<TensorId> {
        let mut gone = self.cut(header.request(), header.cursor);
        let kept = self.frames.entry(header.request()).or_default();
        let adjoins = kept.back().is_none_or(|(last, _)| last.end() >= header.cursor);
        if !adjoins {
            // Cannot be: a stage computes positions in order. Rows with a hole before them are of no use to anybody.
            gone.extend(self.forget(header.request()));
        }
        self.frames.entry(header.request()).or_default().push_back((header, tensor));
        self.rows += u64::from(header.count);
        self.count += 1;
        self.trim(&mut gone);
        gone
    }

    /// Drops frames of a request that begin at or after a position.
    fn cut(&mut self, request: RequestId, position: u32) -> Vec<TensorId> {
        let mut gone = Vec::new();
        while let Some(kept) = self.frames.get_mut(&request)
            && kept.back().is_some_and(|(last, _)| last.cursor >= position)
        {
            gone.extend(self.pop(request, false));
        }
        gone
    }

    fn pop(&mut self, request: RequestId, oldest: bool) -> Option<TensorId> {
        let kept = self.frames.get_mut(&request)?;
        let (header, tensor) = if oldest { kept.pop_front()? } else { kept.pop_back()? };
        if kept.is_empty() {
            self.frames.remove(&request);
        }
        self.rows -= u64::from(header.count);
        self.count -= 1;
        Some(tensor)
    }

    fn is_over(&self) -> bool {
        self.rows > self.rows_max || self.count > RING_FRAMES_MAX
    }

    fn trim(&mut self, gone: &mut Vec<TensorId>) {
        if planted::has(Planted::RingTrimmedEarly) {
            self.trim_early(gone);
        }
        if !self.is_over() {
            return;
        }
        let requests: Vec<RequestId> = self.frames.keys().copied().collect();
        for request in requests {
            let floor = self.floor(request);
            while self.is_over() && self.front_end(request).is_some_and(|end| end <= floor) {
                gone.extend(self.pop(request, true));
            }
        }
        while self.is_over() {
            let longest = self.frames.iter().max_by_key(|(_, kept)| kept.len()).map(|(&request, _)| request);
            match longest.and_then(|request| self.pop(request, true)) {
                Some(tensor) => gone.push(tensor),
                None => return,
            }
        }
    }

    /// The bug: what one of those who follow holds is dropped, though the other may ask for it.
    fn trim_early(&mut self, gone: &mut Vec<TensorId>) {
        let requests: Vec<RequestId> = self.frames.keys().copied().collect();
        for request in requests {
            let held = |node: &NodeId| self.acks.get(node).and_then(|held| held.get(&request)).copied();
            let most = self.followers.iter().filter_map(held).max().unwrap_or(0);
            while self.front_end(request).is_some_and(|end| end <= most) {
                gone.extend(self.pop(request, true));
            }
        }
    }

    /// Positions that everybody who follows holds.
    fn floor(&self, request: RequestId) -> u32 {
        let held = |node: &NodeId| self.acks.get(node).and_then(|held| held.get(&request)).copied().unwrap_or(0);
        self.followers.iter().map(held).min().unwrap_or(u32::MAX)
    }

    fn front_end(&self, request: RequestId) -> Option<u32> {
        let (first, _) = self.frames.get(&request)?.front()?;
        Some(first.end())
    }

    /// A follower said what it holds.
    pub(super) fn handle_held(&mut self, from: NodeId, held: Vec<(RequestId, u32)>) {
        if self.followers.contains(&from) {
            let open = held.into_iter().filter(|(request, _)| self.frames.contains_key(request));
            self.acks.insert(from, open.collect());
        }
    }

    /// Requests kept, and how many positions of each a follower said it holds.
    pub(super) fn acked_by(&self, node: NodeId) -> Vec<(RequestId, u32)> {
        let held = |request| self.acks.get(&node).and_then(|held| held.get(request)).copied().unwrap_or(0);
        self.frames.keys().map(|request| (*request, held(request))).collect()
    }

    /// Only these follow from now on.
    pub(super) fn set_followers(&mut self, followers: Vec<NodeId>) {
        self.acks.retain(|node, _| followers.contains(node));
        self.followers = followers;
    }

    /// The first position from which on everything made of a request is kept.
    pub(super) fn kept_from(&self, request: RequestId) -> Option<u32> {
        Some(self.frames.get(&request)?.front()?.0.cursor)
    }

    /// The kept frames that hold anything from `position` on; nothing if the ring does not reach back that far.
    pub(super) fn replay(&self, request: RequestId, position: u32) -> Vec<(FrameHeader, TensorId)> {
        if self.kept_from(request).is_none_or(|from| from > position) {
            return Vec::new();
        }
        let kept = self.frames.get(&request).into_iter().flatten();
        kept.filter(|(header, _)| header.end() > position).copied().collect()
    }

    /// A request is over.
    pub(super) fn forget(&mut self, request: RequestId) -> Vec<TensorId> {
        for held in self.acks.values_mut() {
            held.remove(&request);
        }
        self.cut(request, 0)
    }

    /// All requests are over.
    pub(super) fn clear(&mut self) -> Vec<TensorId> {
        let requests: Vec<RequestId> = self.frames.keys().copied().collect();
        requests.into_iter().flat_map(|request| self.forget(request)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Epoch, JobId};
    use alloc::vec;

    const NEXT: NodeId = NodeId([1; 16]);
    const STANDBY: NodeId = NodeId([2; 16]);
    const BOTH: [NodeId; 2] = [NEXT, STANDBY];
    const REQUEST: RequestId = RequestId(1);

    fn frame(position: u32, count: u32) -> FrameHeader {
        let epoch = Epoch { counter: 1, minter: NEXT };
        FrameHeader { job: JobId(1), epoch, part: 1, channel: REQUEST.0, cursor: position, count, last: false }
    }

    fn ring(rows_max: u64) -> Ring {
        let mut ring = Ring::new(rows_max);
        ring.set_followers(Vec::from(BOTH));
        ring
    }

    fn filled(rows_max: u64, frames: u32) -> (Ring, Vec<TensorId>) {
        let mut ring = ring(rows_max);
        let gone = (0..frames).flat_map(|at| ring.push(frame(at * 10, 10), TensorId(at.into()))).collect();
        (ring, gone)
    }

    fn of(request: u64, position: u32) -> FrameHeader {
        FrameHeader { channel: request, ..frame(position, 10) }
    }

    /// Full, with one frame each of requests 1 and 2.
    fn of_two_requests() -> Ring {
        let mut ring = ring(20);
        ring.push(of(1, 0), TensorId(1));
        ring.push(of(2, 0), TensorId(2));
        ring
    }

    #[test]
    fn rows_are_sent_again_by_position_and_overwritten_ones_are_gone() {
        let (mut ring, gone) = filled(100, 4);
        assert_eq!(gone, vec![]);
        let positions =
            |ring: &Ring, from| ring.replay(REQUEST, from).iter().map(|(h, _)| h.cursor).collect::<Vec<_>>();
        assert_eq!(positions(&ring, 0), vec![0, 10, 20, 30]);
        assert_eq!(positions(&ring, 15), vec![10, 20, 30], "a frame that begins earlier is sent whole");
        assert_eq!(positions(&ring, 40), vec![]);
        assert_eq!(ring.push(frame(15, 5), TensorId(9)), vec![TensorId(3), TensorId(2)]);
        assert_eq!(positions(&ring, 0), vec![0, 10, 15]);
        assert_eq!(ring.forget(REQUEST).len(), 3);
        assert_eq!((ring.rows, ring.count), (0, 0));
    }

    #[test]
    fn what_both_hold_goes_first_and_what_one_still_needs_last() {
        let (mut ring, _) = filled(30, 3);
        ring.handle_held(NEXT, vec![(REQUEST, 30)]);
        ring.handle_held(STANDBY, vec![(REQUEST, 10)]);
        assert_eq!(ring.push(frame(30, 10), TensorId(3)), vec![TensorId(0)]);
        assert_eq!(ring.kept_from(REQUEST), Some(10));
        // The standby did not get further: it falls off, but the bound holds.
        assert_eq!(ring.push(frame(40, 10), TensorId(4)), vec![TensorId(1)]);
        assert_eq!(ring.replay(REQUEST, 10), vec![], "the ring does not reach back");
    }

    #[test]
    fn what_only_one_of_both_holds_stays_while_another_request_has_rows_that_both_hold() {
        let mut ring = of_two_requests();
        ring.handle_held(NEXT, vec![(RequestId(1), 10), (RequestId(2), 10)]);
        ring.handle_held(STANDBY, vec![(RequestId(2), 10)]);
        assert_eq!(ring.push(of(3, 0), TensorId(3)), vec![TensorId(2)]);
    }

    #[test]
    fn one_request_that_is_acknowledged_makes_room_for_another_that_is_not() {
        let mut ring = of_two_requests();
        for node in BOTH {
            ring.handle_held(node, vec![(RequestId(2), 10)]);
        }
        assert_eq!(ring.push(of(1, 10), TensorId(3)), vec![TensorId(2)]);
    }
}
