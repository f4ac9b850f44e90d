//! The cache of a stage as pages that requests share: which request has which page, and how many are free.
//!
//! The coordinator of a model admits requests by these numbers, and each stage checks them before it queues a frame. Engines
//! keep the contents, in pages of their own that are no larger. Beside its device, a stage may have RAM for pages: its engine
//! moves those of requests that are not computed there, and back. So all pages of running requests must fit the device.
use crate::id::RequestId;
use crate::limits::PAGE_POSITIONS;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// Page tables of requests, with reference counts.
///
/// Invariants: each count is the number of tables with that page; `active` is the number of pages of running requests.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    /// Pages of the device.
    device: u32,
    /// Pages in RAM.
    ram: u32,
    /// The next page number. Numbers are not reused, so they wrap only after 2^64 pages.
    next: u64,
    references: BTreeMap<u64, Count>,
    tables: BTreeMap<RequestId, Table>,
    active: u32,
}

/// Tables that have a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    all: u32,
    /// Those of running requests.
    running: u32,
}

#[derive(Clone, Debug, Default)]
struct Table {
    pages: Vec<u64>,
    /// The request has ended.
    rests: bool,
}

impl Pages {
    /// `device` free pages, and none in RAM.
    pub fn new(device: u32) -> Self {
        Pages { device, ..Pages::default() }
    }

    /// The pages of `sequences` whole contexts.
    pub fn of(sequences: u32, context: u32) -> Self {
        Pages::new(sequences.saturating_mul(pages_of(context)))
    }

    /// Number of pages, in RAM and on the device.
    pub fn all(&self) -> u32 {
        self.device.saturating_add(self.ram)
    }

    /// Number of pages in RAM.
    pub fn ram(&self) -> u32 {
        self.ram
    }

    /// Sets the number of pages in RAM. If more are in use than remain, [`Self::is_over`] holds until enough are freed.
    pub fn set_ram(&mut self, pages: u32) {
        self.ram = pages;
    }

    /// Whether more pages are in use than there are.
    pub fn is_over(&self) -> bool {
        self.used() > self.all()
    }

    /// Number of free pages.
    pub fn free(&self) -> u32 {
        self.all().saturating_sub(self.used())
    }

    /// Number of pages that running requests may still take.
    pub fn free_to_run(&self) -> u32 {
        self.device.saturating_sub(self.active)
    }

    /// Number of pages that a request lacks for this number of positions.
    pub fn lacks(&self, request: RequestId, positions: u32) -> u32 {
        pages_of(positions).saturating_sub(self.held(request))
    }

    fn used(&self) -> u32 {
        u32::try_from(self.references.len()).unwrap_or(u32::MAX)
    }

    /// Sets the number of positions of a request: takes the pages that it lacks, and frees those behind its last position.
    /// Returns whether enough pages are free; otherwise nothing has changed.
    #[must_use]
    pub fn reserve(&mut self, request: RequestId, positions: u32) -> bool {
        let wanted = pages_of(positions);
        let held = self.held(request);
        if wanted.saturating_sub(held) > self.free() {
            return false;
        }
        let table = self.tables.entry(request).or_default();
        let running = u32::from(!table.rests);
        let dropped = table.pages.split_off((wanted as usize).min(table.pages.len()));
        for _ in held..wanted {
            table.pages.push(self.next);
            self.references.insert(self.next, Count { all: 1, running });
            self.next = self.next.wrapping_add(1);
            self.active += running;
        }
        self.drop_references(&dropped, running > 0);
        true
    }

    /// Gives a request the pages of the first `positions` of another, instead of any that it had. The request runs.
    pub fn share(&mut self, from: RequestId, to: RequestId, positions: u32) {
        let count = pages_of(positions) as usize;
        let shared = self.tables.get(&from).map_or(&[][..], |table| &table.pages);
        let pages: Vec<u64> = shared.iter().take(count).copied().collect();
        for page in &pages {
            self.references.entry(*page).or_default().all += 1;
        }
        self.run(&pages);
        self.release(to);
        self.tables.insert(to, Table { pages, rests: false });
    }

    /// A request has ended, and keeps its pages.
    pub fn rest(&mut self, request: RequestId) {
        let Some(table) = self.tables.get_mut(&request).filter(|table| !table.rests) else { return };
        table.rests = true;
        let pages = table.pages.clone();
        self.stop(&pages);
    }

    /// Frees the pages that only this request has.
    pub fn release(&mut self, request: RequestId) {
        if let Some(Table { pages, rests }) = self.tables.remove(&request) {
            self.drop_references(&pages, !rests);
        }
    }

    /// Frees all pages.
    pub fn clear(&mut self) {
        self.references.clear();
        self.tables.clear();
        self.active = 0;
    }

    fn run(&mut self, pages: &[u64]) {
        for page in pages {
            let count = self.references.entry(*page).or_default();
            count.running += 1;
            self.active += u32::from(count.running == 1);
        }
    }

    fn stop(&mut self, pages: &[u64]) {
        for page in pages {
            if let Some(count) = self.references.get_mut(page) {
                count.running -= 1;
                self.active -= u32::from(count.running == 0);
            }
        }
    }

    fn drop_references(&mut self, pages: &[u64], ran: bool) {
        if ran {
            self.stop(pages);
        }
        for page in pages {
            if let Some(count) = self.references.get_mut(page) {
                count.all -= 1;
                if count.all == 0 {
                    self.references.remove(page);
                }
            }
        }
    }

    /// Number of pages of a request.
    pub fn held(&self, request: RequestId) -> u32 {
        self.tables.get(&request).map_or(0, |table| u32::try_from(table.pages.len()).unwrap_or(u32::MAX))
    }

    /// Requests that have a table.
    pub fn requests(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.tables.keys().copied()
    }

    /// Asserts the invariants.
    pub fn assert_invariants(&self) {
        let mut counts: BTreeMap<u64, Count> = BTreeMap::new();
        for table in self.tables.values() {
            for page in &table.pages {
                let count = counts.entry(*page).or_default();
                (count.all, count.running) = (count.all + 1, count.running + u32::from(!table.rests));
            }
        }
        assert_eq!(counts, self.references, "references of pages differ from the tables");
        let active = counts.values().filter(|count| count.running > 0).count();
        assert_eq!(active, self.active as usize, "pages of running requests");
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
    fn running_requests_take_no_pages_in_ram() {
        let mut pages = Pages::new(4);
        pages.set_ram(3);
        assert_eq!((pages.all(), pages.free_to_run()), (7, 4));
        assert!(pages.reserve(A, 3 * PAGE));
        assert_eq!((pages.free(), pages.free_to_run()), (4, 1));
        pages.rest(A);
        pages.rest(A);
        assert_eq!((pages.free(), pages.free_to_run()), (4, 4));
        pages.share(A, B, 2 * PAGE);
        assert_eq!((pages.free(), pages.free_to_run()), (4, 2), "its pages are needed on the device again");
        assert!(pages.reserve(B, 4 * PAGE));
        assert_eq!((pages.free(), pages.free_to_run()), (2, 0));
        pages.assert_invariants();
        pages.set_ram(0);
        assert!(pages.is_over() && pages.free() == 0 && !pages.reserve(C, 1));
        pages.release(A);
        assert!(!pages.is_over());
        pages.release(B);
        assert_eq!((pages.free(), pages.free_to_run()), (4, 4));
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
