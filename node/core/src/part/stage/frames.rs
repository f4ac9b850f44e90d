//! Frames that arrive at a stage: which fit, which continue another request's cache, and which wait for pages.
use super::{Cache, Opened, StageRun, counted_end};
use crate::id::{NodeId, RequestId};
use crate::limits::{
    CACHES_MAX, CHUNK_POSITIONS_MAX, CLOSED_REQUESTS_MAX, DRAFTS_MAX, PAGE_POSITIONS, PARKED_FRAMES_MAX, SEQUENCES_MAX,
    STAGE_QUEUE_MAX, STAGE_QUEUE_POSITIONS_MAX,
};
use crate::message::{Drafts, FrameHeader, FromStage, ToCoordinator};
use crate::output::Output;
use crate::part::output::{Out, PartOutput, discard, discard_payload};
use crate::part::queue::Waiting;
use crate::time::Instant;
use crate::work::Payload;
use crate::work::serve::Sampling;
use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

impl StageRun {
    pub(in crate::part) fn handle_frame(
        &mut self,
        now: Instant,
        from: NodeId,
        header: FrameHeader,
        payload: Payload,
        out: &mut Out,
    ) {
        if let Some(what) = self.misfit(from, &header) {
            out.push_back(PartOutput::Refused { from, what });
            return discard_payload(payload, out);
        }
        if self.closed.contains(&header.request()) {
            return discard_payload(payload, out);
        }
        if self.is_queued(&header) {
            return discard_payload(payload, out); // a resend: it would only delay what is queued behind it
        }
        self.fork(&header, out);
        let have = self.have(header.request());
        let positions: u64 = self.waiting.iter().map(|waiting| u64::from(waiting.header.count)).sum();
        let full = self.waiting.len() >= STAGE_QUEUE_MAX || positions >= STAGE_QUEUE_POSITIONS_MAX;
        let waiting = Waiting { header, payload };
        if full {
            return self.refuse(waiting, out);
        }
        if !header.follows(have, self.drafts(header.request())) {
            self.report_lack(now, header.request(), out);
            return discard_payload(waiting.payload, out);
        }
        let is_outside = self.outside.iter().any(|waiting| waiting.header.request() == header.request());
        while !is_outside && !self.make_room(&header) && self.evict(header.request(), true, out) {}
        if !is_outside && self.make_room(&header) {
            self.accept(waiting, out);
        } else {
            self.keep_outside(waiting, out);
        }
    }

    /// There is no room for a frame. Once there is, it is requested.
    fn refuse(&mut self, waiting: Waiting, out: &mut Out) {
        if self.refused.len() < CACHES_MAX {
            self.refused.insert(waiting.header.request());
        }
        discard_payload(waiting.payload, out);
    }

    /// Requests frames that were refused, once half of the queue is free.
    pub(super) fn request_refused(&mut self, now: Instant, out: &mut Out) {
        if self.refused.is_empty() || !self.started || self.waiting.len() > STAGE_QUEUE_MAX / 2 {
            return;
        }
        let positions: u64 = self.waiting.iter().map(|waiting| u64::from(waiting.header.count)).sum();
        if positions <= STAGE_QUEUE_POSITIONS_MAX / 2 {
            core::mem::take(&mut self.refused).into_iter().for_each(|request| self.report_lack(now, request, out));
        }
    }

    /// A stage lacks what follows the positions that it has.
    fn report_lack(&mut self, now: Instant, request: RequestId, out: &mut Out) {
        let have = self.have(request);
        if self.route.shadow {
            self.ask(now, request, have, out);
        } else {
            self.report_gap(request, have, out);
        }
    }

    /// Drops the least recently used cache but that of `request`; those that rest go first, or alone. Returns whether there
    /// was one.
    fn evict(&mut self, request: RequestId, only_resting: bool, out: &mut Out) -> bool {
        let others = self.requests.iter().filter(|(other, held)| **other != request && (held.rests || !only_resting));
        let oldest = others.min_by_key(|(_, held)| (!held.rests, held.touched)).map(|(&other, _)| other);
        oldest.into_iter().for_each(|oldest| self.drop_request(oldest, out));
        oldest.is_some()
    }

    /// Positions of a request that this stage has, including queued ones.
    fn have(&self, request: RequestId) -> u32 {
        let outside = self.outside.iter().rev().find(|waiting| waiting.header.request() == request);
        outside.map_or_else(|| self.inside(request), |waiting| waiting.header.sure_end())
    }

    /// The drafts after these positions.
    fn drafts(&self, request: RequestId) -> Option<Drafts> {
        let outside = self.outside.iter().rev().find(|waiting| waiting.header.request() == request);
        outside.map_or_else(|| self.drafts_inside(request), |waiting| Some(waiting.header.drafts))
    }

    fn drafts_inside(&self, request: RequestId) -> Option<Drafts> {
        self.requests.get(&request).and_then(|held| held.drafts)
    }

    /// Whether a frame follows the positions that are in its cache, or will be once queued work has run.
    fn follows_inside(&self, header: &FrameHeader) -> bool {
        header.follows(self.inside(header.request()), self.drafts_inside(header.request()))
    }

    /// Positions of a request that are in its cache, or will be once queued work has run.
    fn inside(&self, request: RequestId) -> u32 {
        self.requests.get(&request).map_or(0, |held| held.have)
    }

    /// Whether all positions of a frame wait here or run, and none of them is computed again after that.
    fn is_queued(&self, header: &FrameHeader) -> bool {
        let request = header.request();
        let Some(held) = self.requests.get(&request).filter(|held| header.cursor < held.have) else {
            return false; // not a resend
        };
        let running = self.running.iter().flat_map(|batch| &batch.items).map(|(header, _)| header);
        let queued = self.waiting.iter().chain(&held.parked).map(|waiting| &waiting.header);
        let mut run = 0..0;
        for frame in running.chain(queued).filter(|frame| frame.request() == request) {
            let start = if run.end == frame.cursor && !run.is_empty() { run.start } else { frame.cursor };
            run = start..frame.sure_end();
        }
        run.contains(&header.cursor) && header.sure_end() <= run.end
    }

    /// A new request gets the cache of the one that it continues, if that is here. Otherwise its first frame is a gap.
    fn fork(&mut self, header: &FrameHeader, out: &mut Out) {
        let (to, positions) = (header.request(), header.cursor);
        let Some(from) = header.continues.map(RequestId).filter(|from| *from != to) else { return };
        let known = self.requests.get(&to);
        let rests = known.is_some_and(|held| held.rests);
        let is_new = self.have(to) == 0 && (known.is_some() || self.requests.len() < CACHES_MAX);
        let Some(source) = self.requests.get_mut(&from).filter(|source| is_new && source.computed >= positions) else {
            return;
        };
        self.touched += 1;
        source.touched = self.touched;
        let continues = Some((from.0, positions));
        let touched = self.touched;
        let held = Cache { have: positions, computed: positions, continues, rests, touched, ..Cache::default() };
        self.requests.insert(to, held);
        self.pages.share(from, to, positions);
        self.sent.begin(to.0, positions);
        let (job, part) = (self.job, self.route.part);
        out.push_back(PartOutput::Shell(Output::Fork { job, part, from, to, positions }));
    }

    /// Takes the pages that a frame needs, if they are free. None are freed where positions are computed again: the cache
    /// shrinks only when that work runs.
    fn make_room(&mut self, header: &FrameHeader) -> bool {
        let (request, known) = (header.request(), self.requests.contains_key(&header.request()));
        let positions = header.end().max(self.inside(request));
        (known || self.requests.len() < CACHES_MAX) && self.pages.reserve(request, positions)
    }

    /// Why a frame does not fit this stage, if it does not.
    pub(super) fn misfit(&self, from: NodeId, header: &FrameHeader) -> Option<String> {
        let end = header.cursor.checked_add(header.count);
        if header.part != self.route.part {
            return Some(format!("frame for part {}, expected part {}", header.part, self.route.part));
        }
        if from != self.route.previous {
            return Some(format!(
                "frame from {from}, stage {} expects frames from {}",
                self.route.part, self.route.previous
            ));
        }
        if header.count == 0 || header.count > CHUNK_POSITIONS_MAX || end.is_none_or(|end| end > self.route.context) {
            return Some(format!(
                "frame of {} positions from {}, expected 1 to {CHUNK_POSITIONS_MAX} within a context of {}",
                header.count, header.cursor, self.route.context
            ));
        }
        if header.drafts.rows > DRAFTS_MAX || u32::from(header.drafts.rows) >= header.count {
            return Some(format!(
                "frame of {} rows, {} of them drafts, expected at most {DRAFTS_MAX} after at least one row",
                header.count, header.drafts.rows
            ));
        }
        if header.continues.is_some() && (header.cursor == 0 || !header.cursor.is_multiple_of(PAGE_POSITIONS)) {
            return Some(format!(
                "frame that continues another request at position {}, expected a multiple of {PAGE_POSITIONS}",
                header.cursor
            ));
        }
        None
    }

    fn accept(&mut self, waiting: Waiting, out: &mut Out) {
        let header = waiting.header;
        let parked: usize = self.requests.values().map(|held| held.parked.len()).sum();
        self.touched += 1;
        // A standby samples no tokens, so it does not need `Open`.
        let unopened = self.route.next.is_none() && !self.route.shadow && !self.opened.contains_key(&header.request());
        let held = self.requests.entry(header.request()).or_default();
        held.touched = self.touched;
        let waits_for_open = unopened && (header.last || !held.parked.is_empty());
        if waits_for_open && (parked >= PARKED_FRAMES_MAX || held.rests) {
            // It is resent, with `Open` first, unless the request has ended.
            return self.refuse(waiting, out);
        }
        if header.cursor < held.have {
            // It is computed again because a later stage lost it.
            self.sent.rewind(header.channel, header.cursor);
        }
        (held.have, held.drafts) = (counted_end(&header), Some(header.drafts));
        held.decodes = header.is_decode();
        if waits_for_open {
            held.parked.push_back(waiting);
        } else {
            self.waiting.push_back(waiting);
        }
    }

    /// No page is free, and nothing rests. The coordinator admits what fits, so the `Close` of another request is in flight
    /// on another stream, and the frame waits for it. If the frame is sent a second time, that `Close` was lost with a
    /// connection: then the least recently used caches are evicted. If their requests are not over after all, a `Gap`
    /// restores them. A standby evicts none: it may lack pages only because it does not share them as the owner does.
    fn keep_outside(&mut self, waiting: Waiting, out: &mut Out) {
        let request = waiting.header.request();
        let again = |old: &Waiting| old.header.request() == request && old.header.cursor >= waiting.header.cursor;
        if !self.outside.iter().any(again) || self.route.shadow {
            if self.outside.len() >= PARKED_FRAMES_MAX {
                return self.refuse(waiting, out);
            }
            return self.outside.push_back(waiting);
        }
        // Its own older frames go first, so that they do not take the pages that are freed.
        discard_of(&mut self.outside, request, out);
        if !self.follows_inside(&waiting.header) {
            self.report_gap(request, self.inside(request), out);
            return discard_payload(waiting.payload, out);
        }
        while !self.make_room(&waiting.header) {
            if !self.evict(request, false, out) {
                return self.refuse(waiting, out);
            }
        }
        self.accept(waiting, out);
    }

    /// Accepts frames that waited for pages.
    fn admit_outside(&mut self, out: &mut Out) {
        while let Some(header) = self.outside.front().map(|waiting| waiting.header) {
            let follows = self.follows_inside(&header);
            if follows && !self.make_room(&header) {
                return;
            }
            let Some(waiting) = self.outside.pop_front() else { return };
            if follows {
                self.accept(waiting, out);
            } else {
                discard_payload(waiting.payload, out); // its cache was evicted: the next frame is a gap
            }
        }
    }

    pub(super) fn handle_open(&mut self, request: RequestId, sampling: Sampling, tokens: Vec<u32>, prompt: u32) {
        if self.route.next.is_some() || self.closed.contains(&request) {
            return;
        }
        // More than can be open: the `Close` of the oldest one was lost.
        while self.opened.len() >= 2 * SEQUENCES_MAX as usize {
            self.opened.pop_first();
        }
        self.opened.insert(request, Opened { sampling, history: tokens, prompt });
        if let Some(held) = self.requests.get_mut(&request) {
            self.waiting.append(&mut held.parked);
        }
    }

    /// A request has ended. `kept`: what becomes of its last drafts.
    pub(super) fn handle_rest(&mut self, request: RequestId, kept: Drafts, out: &mut Out) {
        self.refused.remove(&request);
        self.opened.remove(&request);
        out.extend(self.sent.forget(request.0).into_iter().map(discard));
        if let Some(held) = self.requests.get_mut(&request) {
            held.rests = true;
            let known = held.drafts.is_some_and(|drafts| drafts.round.checked_add(1) == Some(kept.round));
            if known && held.computed == held.have {
                let rows = held.drafts.take().map_or(0, |drafts| drafts.rows.min(kept.kept));
                held.have += u32::from(rows);
                held.computed = held.have;
            }
            held.parked.drain(..).for_each(|waiting| discard_payload(waiting.payload, out));
        } else if self.route.shadow && self.requests.len() < CACHES_MAX {
            // The first frame may still be on its way, since another node sends it.
            self.touched += 1;
            self.requests.insert(request, Cache { rests: true, touched: self.touched, ..Cache::default() });
        } else {
            self.ignore(request);
        }
        discard_of(&mut self.outside, request, out);
        self.admit_outside(out);
    }

    /// Late frames of an ended request must not open a cache.
    fn ignore(&mut self, request: RequestId) {
        self.closed.insert(request);
        if self.closed.len() > CLOSED_REQUESTS_MAX {
            self.closed.pop_first();
        }
    }

    pub(super) fn handle_close(&mut self, request: RequestId, out: &mut Out) {
        self.ignore(request);
        self.refused.remove(&request);
        self.opened.remove(&request);
        self.drop_waiting(request, out);
        self.drop_request(request, out);
        self.admit_outside(out);
    }

    /// Drops a request: frees its cache and discards its frames.
    pub(super) fn drop_request(&mut self, request: RequestId, out: &mut Out) {
        out.extend(self.sent.forget(request.0).into_iter().map(discard));
        self.asked.remove(&request);
        self.refused.remove(&request);
        self.pages.release(request);
        let Some(held) = self.requests.remove(&request) else { return };
        self.drop_waiting(request, out);
        held.parked.into_iter().for_each(|waiting| discard_payload(waiting.payload, out));
        let (job, part) = (self.job, self.route.part);
        out.push_back(PartOutput::Shell(Output::Release { job, part, request }));
    }

    fn drop_waiting(&mut self, request: RequestId, out: &mut Out) {
        discard_of(&mut self.waiting, request, out);
        discard_of(&mut self.outside, request, out);
    }

    pub(in crate::part) fn drop_everything(&mut self, out: &mut Out) {
        self.release(false, out);
        self.opened.clear();
        self.outside.drain(..).for_each(|waiting| discard_payload(waiting.payload, out));
        out.extend(self.sent.clear().into_iter().map(discard));
        while let Some((&request, _)) = self.requests.first_key_value() {
            self.drop_request(request, out);
        }
    }

    pub(super) fn report_gap(&self, request: RequestId, have: u32, out: &mut Out) {
        self.report(ToCoordinator::Stage(FromStage::Gap { request, have }), out);
    }
}

/// Discards the frames of a request in a queue.
fn discard_of(queue: &mut VecDeque<Waiting>, request: RequestId, out: &mut Out) {
    let (gone, kept) = queue.drain(..).partition(|waiting| waiting.header.request() == request);
    *queue = kept;
    let gone: VecDeque<Waiting> = gone;
    gone.into_iter().for_each(|waiting| discard_payload(waiting.payload, out));
}
