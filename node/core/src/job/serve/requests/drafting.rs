//! Drafts between two jobs: requests that make them for another job, and requests that receive them.
use super::super::stream::{Caller, Stream};
use super::{Requests, done};
use crate::id::{JobId, RequestId};
use crate::job::output::{Drafting, JobOutput, Out, Steering};
use crate::limits::SEQUENCES_MAX;
use crate::time::Instant;
use crate::work::serve::DoneReason;
use alloc::vec::Vec;

impl Requests {
    // ---- making drafts for another job

    /// Whether requests run.
    pub(in crate::job) fn is_placed(&self) -> bool {
        self.track.is_some()
    }

    /// A request of another job asks for drafts.
    pub(in crate::job) fn steer(
        &mut self,
        now: Instant,
        for_whom: (JobId, RequestId),
        steering: Steering,
        out: &mut Out,
    ) {
        let caller = Caller::Draft(for_whom.0, for_whom.1);
        let tokens = u32::try_from(steering.tokens.len()).unwrap_or(u32::MAX);
        let end = steering.from.saturating_add(tokens).saturating_add(steering.more);
        let fits = end < self.context && tokens > 0;
        let known = self.steered().find(|stream| stream.caller == caller).map(|stream| stream.id);
        let follows = known
            .and_then(|id| self.running.get_mut(&id))
            .is_some_and(|stream| fits && stream.steer(now, steering.from, &steering.tokens, steering.more));
        match known {
            Some(id) if follows => {
                self.grow(now, id, out);
                self.answer_steered(id, out);
                self.pump(now, id, out);
            }
            Some(id) => {
                self.end_steered(id, out);
                self.fill_slots(now, out);
            }
            None => {
                let begun = fits && steering.from == 0 && self.begin_steered(now, for_whom, steering, out);
                if !begun {
                    done(caller, DoneReason::Busy, 0, out);
                }
            }
        }
    }

    /// Begins a request that makes drafts, if no other request waits and there are pages for it. It never waits.
    fn begin_steered(&mut self, now: Instant, for_whom: (JobId, RequestId), steering: Steering, out: &mut Out) -> bool {
        let room = self.waiting.is_empty() && self.running.len() < SEQUENCES_MAX as usize;
        if !room || self.track.is_none() {
            return false;
        }
        self.stop_refresh(out);
        let stream = Stream::steered(now, self.next_id(), for_whom, steering);
        self.begin(now, stream, out).is_ok()
    }

    /// A request of another job needs no more drafts.
    pub(in crate::job) fn leave(&mut self, now: Instant, for_whom: (JobId, RequestId), out: &mut Out) {
        let caller = Caller::Draft(for_whom.0, for_whom.1);
        let id = self.steered().find(|stream| stream.caller == caller).map(|stream| stream.id);
        if let Some(id) = id {
            self.end_steered(id, out);
            self.fill_slots(now, out);
            self.refresh_soon(now);
        }
    }

    /// Requests that make drafts.
    pub(super) fn steered(&self) -> impl Iterator<Item = &Stream> {
        self.running.values().filter(|stream| matches!(stream.caller, Caller::Draft(..)))
    }

    pub(super) fn is_steered(&self, id: RequestId) -> bool {
        self.running.get(&id).is_some_and(|stream| matches!(stream.caller, Caller::Draft(..)))
    }

    /// Ends a request that makes drafts. What it added is of no use to others, so its caches do not rest.
    pub(super) fn end_steered(&mut self, id: RequestId, out: &mut Out) {
        let Some(stream) = self.running.remove(&id) else { return };
        self.cache.forget(id);
        let base = stream.awaited_base().filter(|_| stream.closes_base);
        self.close_evicted([id].into_iter().chain(base).collect(), out);
        done(stream.caller, DoneReason::Cancelled, 0, out);
    }

    /// Stages may lose frames of these requests without a gap, because they hold later positions that are overwritten.
    pub(super) fn drop_steered(&mut self, out: &mut Out) {
        let all: Vec<RequestId> = self.steered().map(|stream| stream.id).collect();
        all.into_iter().for_each(|id| self.end_steered(id, out));
    }

    /// Answers the request that steers this one, once it has all drafts.
    pub(super) fn answer_steered(&self, id: RequestId, out: &mut Out) {
        if let Some((job, request, drafts)) = self.running.get(&id).and_then(Stream::answer) {
            out.push_back(JobOutput::Drafting(Drafting::Answer { job, request, drafts: Some(drafts) }));
        }
    }

    // ---- receiving drafts

    /// The job of the draft model answered a request.
    pub(in crate::job) fn handle_drafts(
        &mut self,
        now: Instant,
        id: RequestId,
        drafts: Option<Vec<u32>>,
        out: &mut Out,
    ) {
        let (Some(drafter), Some(stream)) = (&mut self.drafter, self.running.get_mut(&id)) else { return };
        if stream.handle_drafts(now, drafts, drafter) {
            self.pump(now, id, out);
        }
    }

    /// Sends the steps that have waited for drafts long enough.
    pub(super) fn stop_waiting(&mut self, now: Instant, out: &mut Out) {
        let late = |stream: &&mut Stream| stream.waits_until().is_some_and(|until| until <= now);
        let mut all = Vec::new();
        for stream in self.running.values_mut().filter(late) {
            stream.stop_waiting();
            all.push(stream.id);
        }
        all.into_iter().for_each(|id| self.pump(now, id, out));
    }

    /// A request ends or gives up its pages: it needs no drafts.
    pub(super) fn leave_drafts(&self, stream: &mut Stream, out: &mut Out) {
        if let Some(drafter) = self.drafter.as_ref().filter(|_| stream.leave_drafts()) {
            let (job, request, content) = (self.job, stream.id, drafter.content);
            out.push_back(JobOutput::Drafting(Drafting::Leave { job, request, content }));
        }
    }

    /// All requests end, or go on at another node.
    pub(super) fn end_drafting(&mut self, out: &mut Out) {
        self.drop_steered(out);
        let mut running = core::mem::take(&mut self.running);
        running.values_mut().for_each(|stream| self.leave_drafts(stream, out));
        self.running = running;
    }
}

#[cfg(test)]
mod tests;
