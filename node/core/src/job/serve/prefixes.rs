//! The cache of a served model as its coordinator counts it: pages of running requests, and ended requests that later ones
//! may continue.
//!
//! An ended request rests: every stage keeps its positions until their pages are needed. A request that begins with the same
//! tokens shares its full pages, and computes only what follows. Stages compute equal tokens to equal bits, so a shared page
//! is never different from the page that a request would compute for itself.
use crate::id::RequestId;
use crate::limits::{PAGE_POSITIONS, PREFIXES_MAX, STANDBY_LAG_MAX};
use crate::planted::{self, Planted};
use crate::work::pages::Pages;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

/// Pages and resting requests.
#[derive(Debug)]
pub(super) struct Prefixes {
    pages: Pages,
    resting: BTreeMap<RequestId, Resting>,
    /// Texts of requests that rested until a new placement lacked positions of theirs; at most [`PREFIXES_MAX`], in the
    /// order of the losses.
    lost: VecDeque<Vec<u32>>,
    uses: u64,
}

#[derive(Debug)]
struct Resting {
    /// Tokens of the positions that every stage has.
    tokens: Vec<u32>,
    /// Counter value of its last use. The least recently used one is evicted first.
    used: u64,
    /// It was computed again since a standby joined.
    refreshed: bool,
}

/// The request whose cache a new one continues, and the number of positions that they share.
pub(super) type Base = (RequestId, u32);

impl Prefixes {
    /// An empty cache of `sequences` whole contexts.
    pub(super) fn new(sequences: u32, context: u32) -> Self {
        Prefixes { pages: Pages::of(sequences, context), resting: BTreeMap::new(), lost: VecDeque::new(), uses: 0 }
    }

    /// Free pages, and all pages.
    pub(super) fn free_of(&self) -> (u32, u32) {
        (self.pages.free(), self.pages.all())
    }

    /// The resting or running request that shares most full pages with these tokens. At least one position remains to be
    /// computed. `running`: requests with the tokens of the positions that every stage has.
    pub(super) fn longest<'a>(
        &'a self,
        tokens: &[u32],
        running: impl Iterator<Item = (RequestId, &'a [u32])>,
    ) -> Option<Base> {
        let resting = self.resting.iter().map(|(&id, resting)| (id, resting.tokens.as_slice()));
        let shared = |(id, cached): (RequestId, &[u32])| {
            let unchecked = planted::has(Planted::PrefixUnchecked);
            let common = cached.iter().zip(tokens).take_while(|(a, b)| a == b || unchecked).count();
            let positions = u32::try_from(common.min(tokens.len().saturating_sub(1))).unwrap_or(u32::MAX);
            (positions / PAGE_POSITIONS * PAGE_POSITIONS, id)
        };
        let (positions, id) = running.chain(resting).map(shared).max()?;
        (positions > 0).then_some((id, positions))
    }

    /// Reserves pages for a new request, and evicts resting ones for them. `spare` more pages have to be free, so that
    /// running requests can go on. Returns whether the pages are there.
    pub(super) fn admit(
        &mut self,
        id: RequestId,
        positions: u32,
        spare: u32,
        base: Option<Base>,
        evicted: &mut Vec<RequestId>,
    ) -> bool {
        if let Some((from, shared)) = base {
            self.touch(from);
            self.pages.share(from, id, shared);
        }
        // What rests takes no room of those that run.
        if self.pages.lacks(id, positions).saturating_add(spare) > self.pages.free_to_run() {
            self.pages.release(id);
            return false;
        }
        loop {
            if self.pages.reserve(id, positions) {
                if self.pages.free() >= spare {
                    return true;
                }
                // Keep what it shares, until it is known whether the rest fits.
                let shared = base.map_or(0, |(_, shared)| shared);
                let _shrinks = self.pages.reserve(id, shared);
            }
            if !self.evict(evicted) {
                self.pages.release(id);
                return false;
            }
        }
    }

    /// Reserves pages for a running request, and evicts resting ones for them. Returns whether the pages are there.
    pub(super) fn grow(&mut self, id: RequestId, positions: u32, evicted: &mut Vec<RequestId>) -> bool {
        if self.pages.lacks(id, positions) > self.pages.free_to_run() {
            return false;
        }
        loop {
            if self.pages.reserve(id, positions) {
                return true;
            }
            if !self.evict(evicted) {
                return false;
            }
        }
    }

    /// A request has ended; every stage has the positions of `tokens`. Returns whether it rests. Requests of which it has
    /// all full pages are evicted, and the least recently used ones of too many.
    pub(super) fn rest(&mut self, id: RequestId, tokens: &[u32], evicted: &mut Vec<RequestId>) -> bool {
        if tokens.len() < PAGE_POSITIONS as usize {
            return false;
        }
        let covered = |text: &[u32]| tokens.starts_with(full_pages(text));
        let over: Vec<RequestId> =
            self.resting.iter().filter(|(_, resting)| covered(&resting.tokens)).map(|(&id, _)| id).collect();
        over.iter().for_each(|&over| self.forget(over));
        self.lost.retain(|lost| !covered(lost));
        evicted.extend(over);
        while self.resting.len() >= PREFIXES_MAX && self.evict(evicted) {}
        let _shrinks = self.pages.reserve(id, u32::try_from(tokens.len()).unwrap_or(u32::MAX));
        self.pages.rest(id);
        self.resting.insert(id, Resting { tokens: tokens.to_vec(), used: 0, refreshed: false });
        self.touch(id);
        true
    }

    /// Sets the number of pages that every stage and standby has in RAM, and evicts what no longer fits.
    pub(super) fn set_ram(&mut self, pages: u32, evicted: &mut Vec<RequestId>) {
        self.pages.set_ram(pages);
        while self.pages.is_over() && self.evict(evicted) {}
    }

    /// Pages in RAM.
    pub(super) fn ram(&self) -> u32 {
        self.pages.ram()
    }

    /// Every stage has only the first `positions` of a resting request. Returns whether it still rests. If more is missing
    /// than what was in flight to a standby, the text is to be computed again.
    pub(super) fn shorten(&mut self, id: RequestId, positions: u32) -> bool {
        let Some(resting) = self.resting.get_mut(&id) else { return false };
        if (positions.saturating_add(STANDBY_LAG_MAX) as usize) < resting.tokens.len() {
            push_lost(&mut self.lost, resting.tokens.clone());
        }
        if positions < PAGE_POSITIONS {
            self.forget(id);
            return false;
        }
        resting.tokens.truncate(positions as usize);
        self.pages.reserve(id, u32::try_from(resting.tokens.len()).unwrap_or(u32::MAX))
    }

    /// Frees the pages of a request.
    pub(super) fn forget(&mut self, id: RequestId) {
        self.resting.remove(&id);
        self.pages.release(id);
    }

    /// A text was not computed again to its end. It is lost, unless a request rests that has all of its full pages.
    pub(super) fn lose(&mut self, text: Vec<u32>) {
        if self.resting.values().any(|resting| resting.tokens.starts_with(full_pages(&text))) {
            return;
        }
        push_lost(&mut self.lost, text);
    }

    /// Frees all pages. Returns the requests that rested.
    pub(super) fn clear(&mut self) -> Vec<RequestId> {
        self.pages.clear();
        self.lost.clear();
        core::mem::take(&mut self.resting).into_keys().collect()
    }

    /// A text to compute again, if there are pages for it beside all others: the last one that stages lost, else the last
    /// used one that rests and that a standby lacks. What rests is computed again once, until `forget_refreshes`.
    pub(super) fn take_stale(&mut self, lacks: impl Fn(RequestId, u32) -> bool) -> Option<Vec<u32>> {
        let room = self.pages.free().min(self.pages.free_to_run()).saturating_mul(PAGE_POSITIONS) as usize;
        if let Some(at) = self.lost.iter().rposition(|text| text.len() < room) {
            return self.lost.remove(at);
        }
        let stale = self.resting.iter_mut().filter(|(id, resting)| {
            let len = u32::try_from(resting.tokens.len()).unwrap_or(u32::MAX);
            !resting.refreshed && resting.tokens.len() < room && lacks(**id, len)
        });
        let (_, resting) = stale.max_by_key(|(_, resting)| resting.used)?;
        resting.refreshed = true;
        Some(resting.tokens.clone())
    }

    /// A request was computed by every stage and standby.
    pub(super) fn mark_refreshed(&mut self, id: RequestId) {
        if let Some(resting) = self.resting.get_mut(&id) {
            resting.refreshed = true;
        }
    }

    /// Standbys have changed: any of them may lack what rests.
    pub(super) fn forget_refreshes(&mut self) {
        self.resting.values_mut().for_each(|resting| resting.refreshed = false);
    }

    pub(super) fn rests(&self, id: RequestId) -> bool {
        self.resting.contains_key(&id)
    }

    pub(super) fn resting(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.resting.keys().copied()
    }

    /// Positions that the pages of a request have room for.
    pub(super) fn positions_max(&self, id: RequestId) -> u32 {
        self.pages.held(id).saturating_mul(PAGE_POSITIONS)
    }

    fn evict(&mut self, evicted: &mut Vec<RequestId>) -> bool {
        let oldest = self.resting.iter().min_by_key(|(_, resting)| resting.used).map(|(&id, _)| id);
        if let Some(id) = oldest {
            self.forget(id);
            evicted.push(id);
        }
        oldest.is_some()
    }

    fn touch(&mut self, id: RequestId) {
        self.uses += 1;
        if let Some(resting) = self.resting.get_mut(&id) {
            resting.used = self.uses;
        }
    }

    /// Asserts what holds between two inputs. `runs`: whether a request runs.
    pub(super) fn assert_invariants(&self, runs: impl Fn(RequestId) -> bool) {
        self.pages.assert_invariants();
        assert!(self.resting.len() <= PREFIXES_MAX, "{} requests rest", self.resting.len());
        let unknown = self.pages.requests().find(|id| !runs(*id) && !self.rests(*id));
        assert!(unknown.is_none(), "{unknown:?} has pages, and neither runs nor rests");
        let both = self.resting().find(|id| runs(*id));
        assert!(both.is_none(), "{both:?} runs and rests");
    }
}

fn push_lost(lost: &mut VecDeque<Vec<u32>>, text: Vec<u32>) {
    if lost.len() >= PREFIXES_MAX {
        lost.pop_front();
    }
    lost.push_back(text);
}

/// The tokens that fill whole pages.
fn full_pages(text: &[u32]) -> &[u32] {
    &text[..text.len() - text.len() % PAGE_POSITIONS as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u32 = PAGE_POSITIONS;
    const A: RequestId = RequestId(1);
    const B: RequestId = RequestId(2);
    const C: RequestId = RequestId(3);

    fn tokens(pages: u32, more: u32) -> Vec<u32> {
        (0..pages * PAGE + more).collect()
    }

    fn longest(prefixes: &Prefixes, tokens: &[u32]) -> Option<Base> {
        prefixes.longest(tokens, core::iter::empty())
    }

    /// Runs a request to its end.
    fn run(prefixes: &mut Prefixes, id: RequestId, tokens: &[u32]) -> Vec<RequestId> {
        let mut evicted = Vec::new();
        let base = longest(prefixes, tokens);
        assert!(prefixes.admit(id, tokens.len() as u32, 0, base, &mut evicted));
        assert!(prefixes.rest(id, tokens, &mut evicted));
        prefixes.assert_invariants(|_| false);
        evicted
    }

    #[test]
    fn full_pages_are_shared_and_one_position_is_left_to_compute() {
        let mut prefixes = Prefixes::new(2, 8 * PAGE);
        assert_eq!(run(&mut prefixes, A, &tokens(3, 5)), []);
        assert_eq!(longest(&prefixes, &tokens(3, 5)), Some((A, 3 * PAGE)));
        assert_eq!(longest(&prefixes, &tokens(3, 0)), Some((A, 2 * PAGE)), "the last position has to be computed");
        assert_eq!(longest(&prefixes, &tokens(1, 0)), None);
        let other: Vec<u32> = tokens(2, 9).into_iter().chain([7; 500]).collect();
        assert_eq!(longest(&prefixes, &other), Some((A, 2 * PAGE)));
        let running = [(B, other.as_slice())];
        let more: Vec<u32> = other.iter().copied().chain([1]).collect();
        assert_eq!(prefixes.longest(&more, running.into_iter()), Some((B, 5 * PAGE)), "a running request is longer");
    }

    #[test]
    fn a_conversation_keeps_one_entry() {
        let mut prefixes = Prefixes::new(1, 8 * PAGE);
        assert_eq!(run(&mut prefixes, A, &tokens(2, 5)), []);
        assert_eq!(run(&mut prefixes, B, &tokens(4, 1)), [A], "the next turn has all of its full pages");
        assert_eq!(prefixes.free_of(), (3, 8));
        assert_eq!(longest(&prefixes, &tokens(5, 0)), Some((B, 4 * PAGE)));
        assert!(prefixes.shorten(B, 2 * PAGE + 1));
        assert_eq!((prefixes.free_of(), longest(&prefixes, &tokens(5, 0))), ((5, 8), Some((B, 2 * PAGE))));
        assert!(!prefixes.shorten(B, PAGE - 1) && !prefixes.rests(B));
        assert_eq!(prefixes.free_of(), (8, 8));
    }

    #[test]
    fn the_least_recently_used_request_makes_room() {
        let mut prefixes = Prefixes::new(1, 8 * PAGE);
        let other: Vec<u32> = tokens(3, 0).into_iter().map(|token| token + 1).collect();
        run(&mut prefixes, A, &tokens(3, 0));
        run(&mut prefixes, B, &other);
        let mut evicted = Vec::new();
        let base = longest(&prefixes, &tokens(4, 0));
        assert_eq!(base, Some((A, 3 * PAGE)));
        assert!(prefixes.admit(C, 6 * PAGE, 0, base, &mut evicted));
        assert_eq!(evicted, [B], "the one that is continued was used last");
        assert!(prefixes.grow(C, 8 * PAGE, &mut evicted), "all pages of the other one are shared");
        assert_eq!(evicted, [B]);
        assert!(!prefixes.grow(C, 8 * PAGE + 1, &mut evicted));
        prefixes.assert_invariants(|id| id == C);
    }

    #[test]
    fn a_text_that_stages_lost_is_computed_again_until_it_rests() {
        let mut prefixes = Prefixes::new(1, 8 * PAGE);
        let none = |_, _| false;
        run(&mut prefixes, A, &tokens(3, 5));
        assert!(prefixes.shorten(A, 3 * PAGE - 1), "what was in flight to a standby");
        assert_eq!(prefixes.take_stale(none), None);
        assert!(!prefixes.shorten(A, 0));
        let text = prefixes.take_stale(none).expect("the text");
        assert_eq!((text.len() as u32, prefixes.take_stale(none)), (3 * PAGE - 1, None));
        prefixes.lose(text.clone());
        run(&mut prefixes, B, &tokens(1, 9));
        assert_eq!(prefixes.take_stale(none), Some(text.clone()), "a caller's request came first");
        prefixes.lose(text.clone());
        assert_eq!(run(&mut prefixes, C, &tokens(4, 0)), [B]);
        assert_eq!(prefixes.take_stale(none), None, "a request rests that has all of it");
        prefixes.lose(text);
        assert_eq!(prefixes.take_stale(none), None);
    }

    #[test]
    fn what_rests_moves_to_ram() {
        let mut prefixes = Prefixes::new(1, 4 * PAGE);
        prefixes.set_ram(4, &mut Vec::new());
        let other = |n: u32| -> Vec<u32> { tokens(3, 0).into_iter().map(|token| token + n).collect() };
        assert_eq!(run(&mut prefixes, A, &other(1)), []);
        assert_eq!(run(&mut prefixes, B, &other(2)), [], "nothing is evicted");
        assert_eq!(prefixes.free_of(), (2, 8));
        let mut evicted = Vec::new();
        assert!(prefixes.admit(C, 4 * PAGE, 0, None, &mut evicted));
        assert_eq!(evicted, [A], "the last one that was used stays");
        assert!(!prefixes.admit(A, PAGE, 0, None, &mut evicted), "the device is full");
        assert_eq!(evicted, [A], "nothing is evicted in vain");
        assert!(!prefixes.grow(C, 5 * PAGE, &mut evicted));
        prefixes.set_ram(2, &mut evicted);
        assert_eq!((evicted, prefixes.free_of()), (Vec::from([A, B]), (2, 6)));
        prefixes.assert_invariants(|id| id == C);
    }

    #[test]
    fn a_request_is_not_admitted_if_running_ones_could_not_go_on() {
        let mut prefixes = Prefixes::new(1, 4 * PAGE);
        let mut evicted = Vec::new();
        assert!(prefixes.admit(A, 2 * PAGE, 0, None, &mut evicted));
        assert!(!prefixes.admit(B, 2 * PAGE, 1, None, &mut evicted));
        assert_eq!(prefixes.free_of(), (2, 4));
        assert!(prefixes.admit(B, PAGE, 1, None, &mut evicted));
        assert!(!prefixes.rest(B, &tokens(0, 9), &mut evicted), "less than a page");
    }
}
