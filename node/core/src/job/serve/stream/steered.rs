//! Requests that make drafts for those of another job, and what these have of it.
use super::{Caller, DraftLimits, Drafter, Stream, guess};
use crate::id::{JobId, RequestId};
use crate::job::output::Steering;
use crate::time::Instant;
use crate::work::serve::{Priority, Request, RequestKey, Sampling};
use alloc::vec::Vec;

/// How far a steered request goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steered {
    /// Position of its first draft.
    from: u32,
    /// It pauses when it has this many tokens.
    until: u32,
}

impl Stream {
    // ---- the request that makes drafts

    /// A request that continues these tokens. It runs in the pages that no caller needs.
    pub(in crate::job::serve) fn steered(
        now: Instant,
        id: RequestId,
        for_whom: (JobId, RequestId),
        say: Steering,
    ) -> Self {
        let Steering { from: _, tokens, more, sampling } = say;
        let (max_tokens, key) = (u32::MAX, RequestKey([0; 16]));
        let sampling = Sampling { drafts: 0, ..sampling };
        let request = Request { prompt: tokens, max_tokens, sampling, ignore_eos: true, priority: Priority::Idle, key };
        let mut stream = Stream::new(now, id, Caller::Draft(for_whom.0, for_whom.1), request);
        stream.steered = Some(Steered { from: stream.len(), until: stream.len().saturating_add(more) });
        stream
    }

    /// It follows these tokens. What it added stays as far as it is the same; stages overwrite the rest. Returns false if it
    /// lacks tokens before them.
    pub(in crate::job::serve) fn steer(&mut self, now: Instant, from: u32, tokens: &[u32], more: u32) -> bool {
        let from = from as usize;
        let Some(known) = self.tokens.get(from..).filter(|_| from >= self.request.prompt.len()) else { return false };
        let same = known.iter().zip(tokens).take_while(|(mine, theirs)| mine == theirs).count();
        if same < tokens.len() {
            self.tokens.truncate(from + same);
            let common = self.len();
            self.tokens.extend_from_slice(&tokens[same..]);
            (self.sent, self.acked) = (self.sent.min(common), self.acked.min(common));
            while self.chunks.back().is_some_and(|&end| end > common) {
                self.chunks.pop_back();
            }
        }
        let from = u32::try_from(from + tokens.len()).unwrap_or(u32::MAX);
        self.steered = Some(Steered { from, until: from.saturating_add(more) });
        (self.progress_at, self.resends, self.gap) = (now, 0, None);
        true
    }

    /// Whether it has all drafts that it was asked for.
    pub(super) fn is_paused(&self) -> bool {
        self.steered.is_some_and(|steered| self.len() >= steered.until)
    }

    /// The drafts that it was asked for, if it has all of them.
    pub(in crate::job::serve) fn answer(&self) -> Option<(JobId, RequestId, Vec<u32>)> {
        let (Caller::Draft(job, request), Some(steered)) = (self.caller, self.steered) else { return None };
        let drafts = self.tokens.get(steered.from as usize..steered.until as usize)?;
        Some((job, request, drafts.to_vec()))
    }

    // ---- the request that needs drafts

    /// The question to the draft model before a decode step, if one is due.
    pub(in crate::job::serve) fn ask(
        &mut self,
        now: Instant,
        limits: DraftLimits<'_>,
        drafter: &mut Drafter,
    ) -> Option<Steering> {
        let asks = self.model.asked.is_none() && self.model.ready.is_empty() && self.is_logged();
        if !asks || !self.step_is_due() {
            return None;
        }
        let most = self.drafts_max(limits);
        let repeats = guess(&self.tokens, most as usize).len();
        let instead = limits.times.best(self.accuracy, repeats, limits.sharers, 0);
        let len = self.len();
        let (from, more) = self.model.ask(now, len, drafter, limits.times, (most, limits.sharers), instead)?;
        let tokens = self.tokens.get(from as usize..).unwrap_or_default().to_vec();
        Some(Steering { from, tokens, more, sampling: self.request.sampling.clone() })
    }

    /// The draft model answered. Returns whether the next step waited for that.
    pub(in crate::job::serve) fn handle_drafts(
        &mut self,
        now: Instant,
        drafts: Option<Vec<u32>>,
        drafter: &mut Drafter,
    ) -> bool {
        self.model.handle_answer(now, &self.tokens, drafts, drafter)
    }

    /// Until when the next step waits for drafts.
    pub(in crate::job::serve) fn waits_until(&self) -> Option<Instant> {
        self.model.waits_until()
    }

    /// It has waited for drafts long enough.
    pub(in crate::job::serve) fn stop_waiting(&mut self) {
        self.model.stop_waiting();
    }

    /// It needs no drafts any more. Returns whether a request of the draft model makes some for it.
    pub(in crate::job::serve) fn leave_drafts(&mut self) -> bool {
        self.model.leave()
    }
}

#[cfg(test)]
mod tests;
