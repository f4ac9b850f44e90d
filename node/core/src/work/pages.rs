//! The cache of a stage as pages that requests share: which request has which page, and how many are free.
//!
//! The coordinator of a model admits requests by these numbers, and each stage checks them before it queues a frame. Engines
//! keep the contents, in pages of their own that are no larger.
use crate::id::RequestId;
use crate::limits::PAGE_POSITIONS;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// Page tables of requests, with reference counts.
///
/// Invariants: `used` is the number of keys of `references`; each count is the number of tables with that page.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    all: u32,
    /// The next page number. Numbers are not reused, so they wrap only after 2^64 pages.
    next: u64,
    references: BTreeMap<u64, u32>,
    tables: BTreeMap<RequestId, Vec<u64>>,
}

impl Pages {
    /// `all` free pages.
    pub fn new(all: u32) -> Self {
        Pages { all, ..Pages::default() }
    }

    /// The pages of `sequences` whole contexts.
    pub fn of(sequences: u32, context: u32) -> Self {
        Pages::new(sequences.saturating_mul(pages_of(context)))
    }

    /// Number of pages.
    pub fn all(&self) -> u32 {
        self.all
    }

    /// Number of free pages.
    pub fn free(&self) -> u32 {
        self.all.saturating_sub(u32::try_from(self.references.len()).unwrap_or(u32::MAX))
    }

    /// Sets the number of positions of a request: takes the pages that it lacks, and frees those behind its last position.
    /// Returns whether enough pages are free; otherwise nothing has changed.
    #[must_use]
    pub fn reserve(&mut self, request: RequestId, positions: u32) -> bool {
        let wanted = pages_of(positions);
        let held = self.tables.get(&request).map_or(0, Vec::len) as u32;
        if wanted.saturating_sub(held) > self.free() {
            return false;
        }
        let table = self.tables.entry(request).or_default();
        let dropped = table.split_off((wanted as usize).min(table.len()));
        for _ in held..wanted {
            table.push(self.next);
            self.references.insert(self.next, 1);
            self.next = self.next.wrapping_add(1);
        }
        dropped.into_iter().for_each(|page| self.drop_reference(page));
        true
    }

    /// Gives a request the pages of the first `positions` of another, instead of any that it had.
    pub fn share(&mut self, from: RequestId, to: RequestId, positions: u32) {
        let pages = pages_of(positions) as usize;
        let shared: Vec<u64> = self.tables.get(&from).into_iter().flatten().take(pages).copied().collect();
        for page in &shared {
            *self.references.entry(*page).or_default() += 1;
        }
        self.release(to);
        self.tables.insert(to, shared);
    }

    /// Frees the pages that only this request has.
    pub fn release(&mut self, request: RequestId) {
        self.tables.remove(&request).into_iter().flatten().for_each(|page| self.drop_reference(page));
    }

    /// Frees all pages.
    pub fn clear(&mut self) {
        self.references.clear();
        self.tables.clear();
    }

    fn drop_reference(&mut self, page: u64) {
        if let Some(count) = self.references.get_mut(&page) {
            *count -= 1;
            if *count == 0 {
                self.references.remove(&page);
            }
        }
    }

    /// Number of pages of a request.
    pub fn held(&self, request: RequestId) -> u32 {
        self.tables.get(&request).map_or(0, |table| u32::try_from(table.len()).unwrap_or(u32::MAX))
    }

    /// Requests that have a table.
    pub fn requests(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.tables.keys().copied()
    }

    /// Asserts the invariants.
    pub fn assert_invariants(&self) {
        let mut counts: BTreeMap<u64, u32> = BTreeMap::new();
        self.tables.values().flatten().for_each(|&page| *counts.entry(page).or_default() += 1);
        assert_eq!(counts, self.references, "references of pages differ from the tables");
        assert!(self.references.len() <= self.all as usize, "{} of {} pages", self.references.len(), self.all);
    }
}

/// Pages of this many positions.
pub fn pages_of(positions: u32) -> u32 {
    positions.div_ceil(PAGE_POSITIONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: RequestId = RequestId(1);
    const B: RequestId = RequestId(2);
    const C: RequestId = RequestId(3);
    const PAGE: u32 = PAGE_POSITIONS;

    #[test]
    fn pages_are_counted_once_however_many_requests_share_them() {
        let mut pages = Pages::of(2, 2 * PAGE + 1);
        assert_eq!((pages.all(), pages.free()), (6, 6));
        assert!(pages.reserve(A, 3 * PAGE));
        pages.share(A, B, 2 * PAGE);
        assert_eq!(pages.free(), 3);
        assert!(pages.reserve(B, 3 * PAGE));
        assert_eq!(pages.free(), 2);
        assert!(!pages.reserve(C, 3 * PAGE) && pages.free() == 2, "nothing changes if it does not fit");
        pages.release(A);
        assert_eq!(pages.free(), 3, "the shared pages stay");
        pages.assert_invariants();
        pages.release(B);
        pages.release(B);
        assert_eq!(pages.free(), 6);
        pages.assert_invariants();
    }

    #[test]
    fn a_shorter_request_frees_the_pages_behind_its_end() {
        let mut pages = Pages::new(4);
        assert!(pages.reserve(A, 4 * PAGE));
        pages.share(A, B, 4 * PAGE);
        assert!(pages.reserve(A, PAGE + 1));
        assert_eq!(pages.free(), 0, "the other request has them still");
        assert!(pages.reserve(B, PAGE));
        assert_eq!(pages.free(), 2);
        pages.share(A, A, 2 * PAGE);
        assert_eq!(pages.free(), 2, "a request may share with itself");
        pages.share(C, A, PAGE);
        assert_eq!(pages.free(), 3, "the first page is the other request's");
        pages.assert_invariants();
    }
}
