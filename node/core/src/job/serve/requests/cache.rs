//! Pages of running and ended requests: who keeps them, who gives them up, and when stages free them.
use super::super::stream::{Caller, Stream};
use super::{Requests, begun, done, message};
use crate::id::RequestId;
use crate::job::output::{JobOutput, Out};
use crate::limits::{REFRESH_AFTER, SEQUENCES_MAX};
use crate::message::ToStage;
use crate::output::Event;
use crate::planted::{self, Planted};
use crate::time::Instant;
use crate::work::serve::{DoneReason, Position, Priority, Request, RequestKey, Sampling};
use alloc::boxed::Box;
use alloc::vec::Vec;

impl Requests {
    /// Adds a request to the queue: in order of arrival, but before those of a lower priority.
    pub(super) fn enqueue(&mut self, stream: Stream) {
        let at = self.waiting.partition_point(|waiting| waiting.order() < stream.order());
        self.waiting.insert(at, stream);
    }

    /// Rejects the last waiting request of a lower priority, unless its caller has received a part of the answer. Returns
    /// whether there was one.
    pub(super) fn reject_lower(&mut self, priority: Priority, out: &mut Out) -> bool {
        let lower = |waiting: &Stream| waiting.request.priority > priority && waiting.is_untouched();
        let last = self.waiting.iter().rposition(lower).and_then(|at| self.waiting.remove(at));
        if let Some(stream) = &last {
            self.log_over(stream);
            done(stream.caller, DoneReason::Busy, 0, out);
        }
        last.is_some()
    }

    /// Begins the next requests in the queue, as many as there are pages for. They take the pages of running requests of a
    /// lower priority.
    pub(super) fn fill_slots(&mut self, now: Instant, out: &mut Out) {
        while let Some(priority) = self.waiting.front().map(|stream| stream.request.priority)
            && self.track.is_some()
        {
            if self.running.len() < SEQUENCES_MAX as usize && self.begin_next(now, out) {
                continue;
            }
            let lowest = self.running.values().max_by_key(|stream| stream.order());
            let Some(lowest) = lowest.filter(|stream| stream.class() > (priority, false)).map(|stream| stream.id)
            else {
                return;
            };
            self.make_wait(now, lowest, out);
        }
    }

    /// Begins the first request in the queue. Returns whether there were pages for it.
    fn begin_next(&mut self, now: Instant, out: &mut Out) -> bool {
        let next = self.waiting.pop_front().map(|stream| self.begin(now, stream, out));
        match next {
            Some(Err(stream)) => {
                self.waiting.push_front(*stream);
                false
            }
            Some(Ok(())) => true,
            None => false,
        }
    }

    /// Begins a request.
    ///
    /// # Errors
    /// There are no pages for it, which is returned.
    pub(super) fn begin(&mut self, now: Instant, mut stream: Stream, out: &mut Out) -> Result<(), Box<Stream>> {
        let (id, positions) = (stream.id, stream.len().saturating_add(1));
        let running = self.running.values().map(|stream| (stream.id, stream.acked_tokens()));
        let base = self.cache.longest(stream.tokens(), running);
        let (spare, mut evicted) = (self.sharers(), Vec::new());
        let admitted = self.cache.admit(id, positions, spare, base, &mut evicted);
        if !admitted {
            self.close_evicted(evicted, out);
            return Err(Box::new(stream));
        }
        stream.begin(now, base);
        begun(stream.caller, base.map_or(0, |(_, shared)| shared).min(stream.prompt_len()), out);
        self.run(now, stream);
        self.close_evicted(evicted, out);
        self.open(id, out);
        self.pump(now, id, out);
        Ok(())
    }

    /// Keeps the caches of an ended request for later ones, if every stage has them and they are worth it.
    pub(super) fn rest_or_close(&mut self, stream: &Stream, reason: &DoneReason, out: &mut Out) {
        let (id, mut evicted) = (stream.id, Vec::new());
        let whole = match reason {
            DoneReason::Stop | DoneReason::Length | DoneReason::Cancelled => stream.cached_tokens(),
            DoneReason::Busy | DoneReason::Invalid(_) | DoneReason::Failed(_) => None,
        };
        let rests = whole.filter(|(tokens, _)| self.track.is_some() && self.cache.rest(id, tokens, &mut evicted));
        if let Some((_, drafts)) = rests {
            if stream.caller == Caller::Refresh {
                self.cache.mark_refreshed(id);
            }
            self.to_all_holders(|request| ToStage::Rest { request, drafts }, id, out);
        } else {
            self.cache.forget(id);
            self.close(id, out);
        }
        if stream.closes_base {
            evicted.extend(stream.awaited_base());
        }
        self.close_evicted(evicted, out);
    }

    /// Frees a request's caches on every stage and standby. Without a track `start` frees them later.
    pub(super) fn close(&mut self, request: RequestId, out: &mut Out) {
        if self.track.is_none() {
            return;
        }
        self.to_all_holders(|request| ToStage::Close { request }, request, out);
        self.closed.push_back(request);
        if self.closed.len() > SEQUENCES_MAX as usize {
            self.closed.pop_front();
        }
    }

    /// Sends a message on a request to every stage and standby.
    pub(super) fn to_all_holders(&self, say: impl Fn(RequestId) -> ToStage, request: RequestId, out: &mut Out) {
        let Some(track) = &self.track else { return };
        let standbys = track.standbys.iter().map(|(_, node)| node);
        let standbys = standbys.filter(|_| !planted::has(Planted::CloseNotToStandby));
        let all = track.stages.iter().chain(standbys);
        out.extend(all.map(|&to| message(to, self.job, track.epoch, say(request))));
    }

    /// Frees the caches of requests that no longer rest. One that a running request is about to continue stays until then.
    pub(super) fn close_evicted(&mut self, evicted: Vec<RequestId>, out: &mut Out) {
        for id in evicted {
            let mut awaiting = self.running.values_mut().filter(|stream| stream.awaited_base() == Some(id)).peekable();
            if awaiting.peek().is_some() {
                awaiting.for_each(|stream| stream.closes_base = true);
            } else {
                self.close(id, out);
            }
        }
    }

    /// A running request has more positions than before. If there are no pages for them, the requests of the lowest priority
    /// that came last give up theirs.
    pub(super) fn grow(&mut self, now: Instant, id: RequestId, out: &mut Out) {
        while let Some(stream) = self.running.get(&id) {
            let mut evicted = Vec::new();
            let grown = self.cache.grow(id, stream.len(), &mut evicted);
            self.close_evicted(evicted, out);
            if grown {
                return;
            }
            let last = self.running.values().max_by_key(|stream| stream.order()).map(|stream| stream.id);
            last.into_iter().for_each(|last| self.make_wait(now, last, out));
        }
    }

    /// The cache is full, so a running request waits for pages.
    fn make_wait(&mut self, now: Instant, id: RequestId, out: &mut Out) {
        if self.is_steered(id) {
            return self.end_steered(id, out);
        }
        out.push_back(JobOutput::Notify(Event::Preempted { job: self.job, request: id }));
        // What every stage has may stay in RAM until it runs again.
        if self.cache.ram() > 0
            && let Some(stream) = self.running.get(&id)
            && let Some((tokens, drafts)) = stream.cached_tokens()
        {
            let mut evicted = Vec::new();
            if self.cache.rest(id, tokens, &mut evicted) {
                self.to_all_holders(|request| ToStage::Rest { request, drafts }, id, out);
                self.close_evicted(evicted, out);
                return self.wait_again(now, id, out);
            }
        }
        self.preempt(now, id, out);
    }

    /// A running request gives up its pages, and waits to be computed again.
    pub(super) fn preempt(&mut self, now: Instant, id: RequestId, out: &mut Out) {
        if self.is_steered(id) {
            return self.end_steered(id, out);
        }
        if self.running.contains_key(&id) {
            self.cache.forget(id);
            self.close(id, out);
            self.wait_again(now, id, out);
        }
    }

    /// A running request waits under a new id.
    fn wait_again(&mut self, now: Instant, id: RequestId, out: &mut Out) {
        let Some(mut stream) = self.running.remove(&id) else { return };
        self.leave_drafts(&mut stream, out);
        if stream.closes_base {
            self.close_evicted(stream.awaited_base().into_iter().collect(), out);
        }
        self.log_over(&stream);
        stream.preempt(self.next_id());
        self.enqueue(stream);
        self.log_soon(now);
    }

    /// Every stage has continued the request that this one continues. If that gave up its pages, it is closed.
    pub(super) fn settle_base(&mut self, id: RequestId, awaited: Option<RequestId>, out: &mut Out) {
        let Some(stream) = self.running.get_mut(&id).filter(|stream| stream.awaited_base().is_none()) else { return };
        if core::mem::take(&mut stream.closes_base) {
            self.close_evicted(awaited.into_iter().collect(), out);
        }
    }

    // ---- stages and standbys that lack what rests

    /// A standby is ready under the present epoch. It may lack what rests.
    pub(in crate::job) fn handle_standby(&mut self, now: Instant, out: &mut Out) {
        self.stop_refresh(out);
        self.cache.forget_refreshes();
        self.refresh_soon(now);
    }

    pub(super) fn refresh_soon(&mut self, now: Instant) {
        if self.is_empty() {
            self.refresh_at = Some(now + REFRESH_AFTER);
        }
    }

    /// Computes a resting request again that a new stage or a standby lacks, if no other request runs: a request that
    /// continues it would take much longer, now or after a loss. `lacks`: whether a standby has fewer positions of a request.
    pub(in crate::job) fn refresh(&mut self, now: Instant, lacks: impl Fn(RequestId, u32) -> bool, out: &mut Out) {
        if self.track.is_none() || self.refresh_at.is_none_or(|at| at > now) {
            return;
        }
        self.refresh_at = None;
        let stale = if self.is_empty() { self.cache.take_stale(lacks) } else { None };
        let Some(prompt) = stale else { return };
        let id = self.next_id();
        let key = RequestKey([0; 16]);
        let (sampling, priority) = (Sampling::GREEDY, Priority::Idle);
        let request = Request { prompt, max_tokens: 1, sampling, ignore_eos: true, priority, key };
        let mut stream = Stream::new(now, id, Caller::Refresh, request);
        if self.cache.grow(id, stream.len().saturating_add(1), &mut Vec::new()) {
            stream.begin(now, None);
            self.run(now, stream);
            self.open(id, out);
            self.pump(now, id, out);
        }
    }

    /// A caller's request goes first, and a new standby lacks what was computed before it joined.
    pub(super) fn stop_refresh(&mut self, out: &mut Out) {
        let refresh = self.running.values().find(|stream| stream.caller == Caller::Refresh).map(|stream| stream.id);
        if let Some(stream) = refresh.and_then(|id| self.running.remove(&id)) {
            let id = stream.id;
            self.cache.forget(id);
            self.cache.lose(stream.request.prompt);
            self.cache.forget_refreshes();
            self.close(id, out);
        }
    }

    /// Whether a running request continues another one that a standby lacks. `have`: the standby's positions.
    pub(in crate::job) fn leave_behind(&self, now: Instant, have: impl Fn(RequestId) -> u32) -> bool {
        self.running.values().any(|stream| stream.leaves_behind(now, have(stream.id)))
    }

    /// Resting requests.
    pub(in crate::job) fn resting(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.cache.resting()
    }

    /// Sets the number of pages that stages and standbys have in RAM.
    pub(in crate::job) fn set_ram(&mut self, pages: u32, out: &mut Out) {
        if self.cache.ram() != pages {
            let mut evicted = Vec::new();
            self.cache.set_ram(pages, &mut evicted);
            self.close_evicted(evicted, out);
        }
    }

    /// Free pages of the cache, and all of them.
    pub(in crate::job) fn pages(&self) -> (u32, u32) {
        self.cache.free_of()
    }

    /// Resting requests stay cached as far as every stage has them.
    pub(super) fn resume_resting(&mut self, held: &[&[Position]], resume: &mut [Vec<(RequestId, u32)>]) {
        let resting: Vec<RequestId> = self.cache.resting().collect();
        for id in resting {
            let positions = |stage: &&[Position]| {
                stage.iter().find(|position| position.request == id).map_or(0, |position| position.have)
            };
            let stages: Vec<u32> = held.iter().map(positions).collect();
            if self.cache.shorten(id, stages.iter().copied().min().unwrap_or(0)) {
                for (stage, next) in resume.iter_mut().zip(stages.iter().skip(1)) {
                    stage.push((id, *next));
                }
            }
        }
    }
}
