//! Pages of running and ended requests: who keeps them, who gives them up, and when stages free them.
use super::super::stream::{Caller, Stream};
use super::{Requests, begun};
use crate::id::RequestId;
use crate::job::output::{JobOutput, Out};
use crate::limits::{REFRESH_AFTER, SEQUENCES_MAX};
use crate::message::ToStage;
use crate::output::Event;
use crate::time::Instant;
use crate::work::serve::{DoneReason, Position, Request, RequestKey, Sampling};
use alloc::vec::Vec;

impl Requests {
    /// Begins the next requests in the queue, as many as there are pages for.
    pub(super) fn fill_slots(&mut self, now: Instant, out: &mut Out) {
        while self.running.len() < SEQUENCES_MAX as usize && self.track.is_some() {
            let Some(stream) = self.waiting.front() else { return };
            let (id, positions) = (stream.id, stream.len().saturating_add(1));
            let running = self.running.values().map(|stream| (stream.id, stream.acked_tokens()));
            let base = self.cache.longest(stream.tokens(), running);
            let (spare, mut evicted) = (self.sharers(), Vec::new());
            let admitted = self.cache.admit(id, positions, spare, base, &mut evicted);
            let first = self.waiting.pop_front_if(|_| admitted);
            let goes_on = first.is_some();
            if let Some(mut stream) = first {
                stream.begin(now, base);
                begun(stream.caller, base.map_or(0, |(_, shared)| shared).min(stream.prompt_len()), out);
                self.running.insert(id, stream);
            }
            self.close_evicted(evicted, out);
            if !goes_on {
                return;
            }
            self.open(id, out);
            self.pump(id, out);
        }
    }

    /// Keeps the caches of an ended request for later ones, if every stage has them and they are worth it.
    pub(super) fn rest_or_close(&mut self, stream: &Stream, reason: &DoneReason, out: &mut Out) {
        let (id, mut evicted) = (stream.id, Vec::new());
        let whole = match reason {
            DoneReason::Stop | DoneReason::Length | DoneReason::Cancelled => stream.cached_tokens(),
            DoneReason::Busy | DoneReason::Invalid(_) | DoneReason::Failed(_) => None,
        };
        let tokens = whole.filter(|_| self.track.is_some());
        if tokens.is_some_and(|tokens| self.cache.rest(id, tokens, &mut evicted)) {
            if stream.caller == Caller::Refresh {
                self.cache.mark_refreshed(id);
            }
            self.to_all_holders(|request| ToStage::Rest { request }, id, out);
        } else {
            self.cache.forget(id);
            self.close(id, out);
        }
        if stream.closes_base {
            evicted.extend(stream.awaited_base());
        }
        self.close_evicted(evicted, out);
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

    /// A running request has more positions than before. If there are no pages for them, the requests that came last give up
    /// theirs.
    pub(super) fn grow(&mut self, now: Instant, id: RequestId, out: &mut Out) {
        while let Some(stream) = self.running.get(&id) {
            let mut evicted = Vec::new();
            let grown = self.cache.grow(id, stream.len(), &mut evicted);
            self.close_evicted(evicted, out);
            if grown {
                return;
            }
            let last = self.running.values().max_by_key(|stream| stream.rank).map(|stream| stream.id);
            if let Some(last) = last {
                out.push_back(JobOutput::Notify(Event::Preempted { job: self.job, request: last }));
                self.preempt(now, last, out);
            }
        }
    }

    /// A running request gives up its pages, and waits to be computed again.
    pub(super) fn preempt(&mut self, now: Instant, id: RequestId, out: &mut Out) {
        let Some(mut stream) = self.running.remove(&id) else { return };
        self.cache.forget(id);
        self.close(id, out);
        if stream.closes_base {
            self.close_evicted(stream.awaited_base().into_iter().collect(), out);
        }
        self.log_over(&stream);
        stream.preempt(self.next_id());
        self.waiting.push_front(stream);
        self.log_soon(now);
    }

    /// Every stage has continued the request that this one continues. If that gave up its pages, it is closed.
    pub(super) fn settle_base(&mut self, id: RequestId, awaited: Option<RequestId>, out: &mut Out) {
        let Some(stream) = self.running.get_mut(&id).filter(|stream| stream.awaited_base().is_none()) else { return };
        if core::mem::take(&mut stream.closes_base) {
            self.close_evicted(awaited.into_iter().collect(), out);
        }
    }

    // ---- standbys that lack what rests

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

    /// Computes a resting request again that a standby lacks, if no other request runs: the next request that continues
    /// it would lose much time if the stage was lost. `lacks`: whether a standby has fewer positions of a request.
    pub(in crate::job) fn refresh(&mut self, now: Instant, lacks: impl Fn(RequestId, u32) -> bool, out: &mut Out) {
        if self.track.is_none() || self.refresh_at.is_none_or(|at| at > now) {
            return;
        }
        self.refresh_at = None;
        let stale = if self.is_empty() { self.cache.take_stale(lacks) } else { None };
        let Some(prompt) = stale else { return };
        let id = self.next_id();
        let key = RequestKey([0; 16]);
        let request = Request { prompt, max_tokens: 1, sampling: Sampling::GREEDY, ignore_eos: true, key };
        let mut stream = Stream::new(now, id, Caller::Refresh, request);
        if self.cache.grow(id, stream.len().saturating_add(1), &mut Vec::new()) {
            stream.begin(now, None);
            self.running.insert(id, stream);
            self.open(id, out);
            self.pump(id, out);
        }
    }

    /// A caller's request goes first, and a new standby lacks what was computed before it joined.
    pub(super) fn stop_refresh(&mut self, out: &mut Out) {
        let refresh = self.running.values().find(|stream| stream.caller == Caller::Refresh).map(|stream| stream.id);
        if let Some(id) = refresh {
            self.running.remove(&id);
            self.cache.forget(id);
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
