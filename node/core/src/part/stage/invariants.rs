//! What holds of a stage between two inputs.
use super::StageRun;
use crate::id::RequestId;
use crate::limits::{CACHES_MAX, CLOSED_REQUESTS_MAX, PARKED_FRAMES_MAX, SEQUENCES_MAX, STAGE_QUEUE_MAX};

impl StageRun {
    /// Asserts what holds between two inputs.
    pub(in crate::part) fn assert_invariants(&self) {
        self.sent.assert_invariants();
        self.assert_bounds();
        let parked = self.requests.values().flat_map(|held| &held.parked);
        for header in self.waiting.iter().chain(parked).map(|waiting| &waiting.header) {
            assert!(self.requests.contains_key(&header.request()), "a queued frame without a cache: {header:?}");
            assert_eq!(self.misfit(self.route.previous, header), None, "a queued frame does not fit: {header:?}");
        }
        for header in self.outside.iter().map(|waiting| &waiting.header) {
            assert_eq!(self.misfit(self.route.previous, header), None, "a queued frame does not fit: {header:?}");
        }
        let mut known = self.requests.keys().chain(self.opened.keys());
        let closed = known.find(|request| self.closed.contains(*request));
        assert!(closed.is_none(), "{closed:?} is closed, and has a cache or is open");
        let mut channels = self.sent.channels().map(RequestId);
        let gone = channels.find(|request| !self.requests.contains_key(request));
        assert!(gone.is_none(), "rows of {gone:?} are kept, which has no cache");
    }

    fn assert_bounds(&self) {
        let (caches, outside) = (self.requests.len(), self.outside.len());
        let parked: usize = self.requests.values().map(|held| held.parked.len()).sum();
        let queued = self.waiting.len() + parked + outside;
        assert!(caches <= CACHES_MAX, "{caches} caches");
        self.pages.assert_invariants();
        let unknown = self.pages.requests().find(|request| !self.requests.contains_key(request));
        assert!(unknown.is_none(), "{unknown:?} has pages and no cache");
        assert!(self.opened.len() <= 2 * SEQUENCES_MAX as usize, "{} open requests", self.opened.len());
        assert!(self.closed.len() <= CLOSED_REQUESTS_MAX, "{} closed requests", self.closed.len());
        assert!(self.refused.len() <= CACHES_MAX, "frames of {} requests refused", self.refused.len());
        assert!(self.asked.len() <= CACHES_MAX + 1, "asked for {} requests", self.asked.len());
        assert!(parked <= PARKED_FRAMES_MAX && outside <= PARKED_FRAMES_MAX, "{parked} and {outside} parked frames");
        assert!(queued <= STAGE_QUEUE_MAX + 2 * PARKED_FRAMES_MAX, "{queued} queued frames");
    }
}
