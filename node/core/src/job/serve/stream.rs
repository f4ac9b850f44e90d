//! One request at the coordinator: its token log, what is in flight, and when to resend. Next: `stream/steered.rs`.
mod steered;

use super::drafter::{Drafter, ModelDrafts};
use super::drafts::{Accuracy, StepTimes, guess};
use super::prefixes::Base;
use crate::id::{CallId, Epoch, JobId, NodeId, PartId, RequestId};
use crate::limits::{
    CHUNK_POSITIONS_MAX, CHUNKS_IN_FLIGHT_MAX, DRAFTS_MAX, HELD_EVERY, LOG_TOKENS_MAX, WATCHDOG_MIN, chunk_positions,
    chunks_in_flight,
};
use crate::message::{Drafts, FrameHeader};
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::serve::{DoneReason, Logged, Priority, Request};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use steered::Steered;

/// A request, queued or in a slot.
///
/// Invariants: `acked <= sent <= tokens.len()`; every token after the prompt was sent to the caller once, when it was
/// pushed.
#[derive(Debug)]
pub(in crate::job) struct Stream {
    pub(super) id: RequestId,
    pub(super) caller: Caller,
    pub(super) request: Request,
    /// The prompt, then the generated tokens: all that is needed to continue anywhere.
    tokens: Vec<u32>,
    /// Positions `0..sent` are in the pipeline under the present epoch.
    sent: u32,
    /// Positions `0..acked` are in every stage's cache.
    acked: u32,
    /// Positions after these that every stage computed as drafts. The next frame says that they are kept.
    ahead: u32,
    /// The drafts that were sent last.
    drafts: Vec<u32>,
    /// Number of frames with drafts so far.
    round: u32,
    /// The guessed next token.
    guessed: Option<u32>,
    accuracy: Accuracy,
    /// What it has of the draft model.
    model: ModelDrafts,
    /// The drafts that were sent last are those of the draft model.
    of_model: bool,
    /// It runs for a request of another job, which steers it.
    steered: Option<Steered>,
    /// When the last decode step was sent.
    step_at: Option<Instant>,
    /// Ends of unsampled chunks that were sent and not acknowledged.
    chunks: VecDeque<u32>,
    /// The last gap that was answered: when, and the positions that the stage held.
    gap: Option<(Instant, u32)>,
    /// When it last made progress.
    progress_at: Instant,
    /// Number of resends since then.
    pub(super) resends: u32,
    /// Number of failed placements since its last token.
    pub(super) strikes: u32,
    /// Number of tokens that successors were sent. `None` if they do not know of the request.
    logged: Option<u32>,
    /// Order of arrival. It stays if the request is preempted, where the id changes.
    pub(super) rank: u64,
    /// The request whose cache it continues.
    base: Option<Base>,
    /// That request gave up its pages, and is closed once every stage has continued it.
    pub(super) closes_base: bool,
    /// When it began to run.
    began: Instant,
    /// When it was last sent again from its shared positions on, because a stage lacked them.
    forked_again: Option<Instant>,
}

/// What limits the drafts of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftLimits<'a> {
    pub(super) times: &'a StepTimes,
    /// Positions that its pages and the context have room for.
    pub(super) positions: u32,
    /// Requests that share the stages.
    pub(super) sharers: u32,
}

/// What to do about a stage that lacks shared positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForkAgain {
    /// Send from this position on, the first one that is not shared.
    From(u32),
    /// It was sent again a moment ago.
    Awaited,
    /// The stage has dropped what others have kept.
    Failed,
}

/// Receiver of a request's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::job) enum Caller {
    /// A caller of this node.
    Here(CallId),
    /// A caller of another node.
    Away(NodeId, CallId),
    /// None since then. The caller may ask again.
    Gone(Instant),
    /// This coordinator: it computes a resting request again for a new standby.
    Refresh,
    /// A request of another job of this coordinator, whose draft model this is.
    Draft(JobId, RequestId),
}

/// Meaning of a token from the last stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// New: send it to the caller, and continue.
    Next,
    /// New, and the last one: send it to the caller, then this.
    Last(DoneReason),
    /// Sent before (an answer to something that was sent twice).
    Known,
    /// Sent before, and different: the numerics contract is broken somewhere.
    Differs { sent: u32 },
    /// For a position that was not asked for.
    Unasked,
}

impl Stream {
    pub(super) fn new(now: Instant, id: RequestId, caller: Caller, request: Request) -> Self {
        Stream {
            id,
            caller,
            tokens: request.prompt.clone(),
            request,
            sent: 0,
            acked: 0,
            ahead: 0,
            drafts: Vec::new(),
            round: 0,
            guessed: None,
            accuracy: Accuracy::default(),
            model: ModelDrafts::default(),
            of_model: false,
            steered: None,
            step_at: None,
            chunks: VecDeque::new(),
            gap: None,
            progress_at: now,
            resends: 0,
            strikes: 0,
            logged: None,
            rank: id.0,
            base: None,
            closes_base: false,
            began: now,
            forked_again: None,
        }
    }

    /// A request that another coordinator ran, as far as the token log has it.
    pub(super) fn inherited(now: Instant, id: RequestId, request: Request, answer: &[u32], eos: &[u32]) -> Self {
        let mut stream = Stream::new(now, id, Caller::Gone(now), request);
        let ends = |token: &u32| eos.contains(token) && !stream.request.ignore_eos;
        let whole = answer.len() >= stream.request.max_tokens as usize || answer.last().is_some_and(ends);
        // The last token of a whole answer is computed again, so that the request ends like any other.
        let known = answer.len().saturating_sub(usize::from(whole));
        stream.tokens.extend_from_slice(&answer[..known]);
        stream
    }

    /// The request runs from now on, after the positions that it shares with another one.
    pub(super) fn begin(&mut self, now: Instant, base: Option<Base>) {
        (self.progress_at, self.began) = (now, now);
        self.base = base;
        let shared = base.map_or(0, |(_, shared)| shared).min(self.len().saturating_sub(1));
        (self.sent, self.acked) = (shared, shared);
    }

    /// The request gives up its cache, and waits under a new id: stages ignore what belongs to the old one.
    pub(super) fn preempt(&mut self, id: RequestId) {
        self.id = id;
        (self.sent, self.acked) = (0, 0);
        self.forget_drafts();
        self.chunks.clear();
        (self.gap, self.base, self.logged, self.forked_again) = (None, None, None, None);
        (self.resends, self.closes_base) = (0, false);
    }

    /// The request that it continues, until every stage has done so.
    pub(super) fn awaited_base(&self) -> Option<RequestId> {
        self.base.filter(|(_, shared)| self.acked <= *shared).map(|(from, _)| from)
    }

    /// The request that it continues, if a stage has so few positions that it would have to compute shared ones again.
    /// Shared pages are never written: the request has to begin under a new id, with pages of its own.
    pub(super) fn broken_base(&self, have: u32) -> Option<RequestId> {
        self.base.filter(|(_, shared)| have < *shared).map(|(from, _)| from)
    }

    /// Whether a standby that reports `have` positions lacks those that this request shares with another one. It cannot
    /// compute what follows.
    pub(super) fn leaves_behind(&self, now: Instant, have: u32) -> bool {
        let shared = self.base.map_or(0, |(_, shared)| shared);
        have == 0 && shared > 0 && self.acked > shared && now.since(self.began) >= FORK_REPORTED
    }

    /// A stage has fewer positions than the request shares with another one. A frame that continues the other one may be
    /// lost, so it is sent again, once. Returns the position to send from, or whether the answer is still awaited.
    pub(super) fn fork_again(&mut self, now: Instant) -> ForkAgain {
        match (self.forked_again, self.base) {
            (None, Some((_, shared))) => {
                self.forked_again = Some(now);
                ForkAgain::From(shared)
            }
            (Some(at), _) if now.since(at) < GAP_QUIET => ForkAgain::Awaited,
            (Some(_), _) | (None, None) => ForkAgain::Failed,
        }
    }

    /// Tokens of the positions that every stage has, and which of the last drafts are among them. `None` if more is in flight
    /// than the last position: a stage may drop that only with the whole request.
    pub(super) fn cached_tokens(&self) -> Option<(&[u32], Drafts)> {
        let in_flight = self.sent.saturating_sub(self.acked + self.ahead);
        // A step that follows drafts may have arrived or not.
        let ahead = if in_flight == 0 { self.ahead } else { 0 };
        let drafts = Drafts { round: self.round, rows: 0, kept: u8::try_from(ahead).unwrap_or(0) };
        let tokens = self.tokens.get(..(self.acked + ahead) as usize)?;
        (in_flight <= 1 && self.awaited_base().is_none()).then_some((tokens, drafts))
    }

    /// Tokens of the positions that every stage has for certain, and keeps.
    pub(super) fn acked_tokens(&self) -> &[u32] {
        let sure = if self.awaited_base().is_some() { 0 } else { self.acked };
        // A steered request may be led away from what it added.
        let kept = if self.steered.is_some() { self.prompt_len() } else { self.len() };
        &self.tokens[..sure.min(kept) as usize]
    }

    /// Tokens with their positions, for a caller: from `from` on, without the prompt.
    pub(super) fn tokens_from(&self, from: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        (0..).zip(self.tokens.iter().copied()).skip(from.max(self.prompt_len()) as usize)
    }

    /// Position of the caller's next token.
    pub(super) fn next_position(&self) -> u32 {
        self.len()
    }

    /// Successors need the whole request again.
    pub(super) fn forget_logged(&mut self) {
        self.logged = None;
    }

    /// Whether successors hear of it.
    pub(super) fn is_logged(&self) -> bool {
        match self.caller {
            Caller::Here(_) | Caller::Away(..) | Caller::Gone(_) => true,
            Caller::Refresh | Caller::Draft(..) => false,
        }
    }

    /// Whether successors lack any of it.
    pub(super) fn has_news(&self) -> bool {
        self.logged != Some(self.len())
    }

    /// The next log entry for successors.
    pub(super) fn news(&mut self) -> Option<Logged> {
        let Some(from) = self.logged else {
            self.logged = Some(0);
            let Request { max_tokens, ref sampling, ignore_eos, priority, key, .. } = self.request;
            return Some(Logged::Opened {
                key,
                prompt: self.prompt_len(),
                max_tokens,
                sampling: sampling.clone(),
                ignore_eos,
                priority,
            });
        };
        let rest = self.tokens.get(from as usize..).filter(|rest| !rest.is_empty())?;
        let tokens = rest[..rest.len().min(LOG_TOKENS_MAX)].to_vec();
        self.logged = Some(from + u32::try_from(tokens.len()).unwrap_or(u32::MAX));
        Some(Logged::Tokens { from, tokens })
    }

    /// Order in which requests give up their pages, and the reverse of that in which they get them.
    pub(super) fn order(&self) -> ((Priority, bool), u64) {
        (self.class(), self.rank)
    }

    /// The first part of the order: its priority, and whether it only makes drafts.
    pub(super) fn class(&self) -> (Priority, bool) {
        (self.request.priority, self.steered.is_some())
    }

    /// Whether its caller has received nothing yet.
    pub(super) fn is_untouched(&self) -> bool {
        self.len() == self.prompt_len()
    }

    /// All tokens so far, for `Open`.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    /// Marks what was sent at or after `position` as not sent, so that it is sent again.
    pub(super) fn rewind(&mut self, now: Instant, position: u32) {
        // Every cache may hold every position while a token is still awaited: then the last position is computed again.
        let position = position.min(self.len().saturating_sub(1));
        self.sent = self.sent.min(position);
        self.acked = self.acked.min(position);
        self.forget_drafts();
        while self.chunks.back().is_some_and(|&end| end > position) {
            self.chunks.pop_back();
        }
        self.progress_at = now;
    }

    /// Stages may lack the drafts that were sent, or have other ones.
    fn forget_drafts(&mut self) {
        self.ahead = 0;
        self.drafts.clear();
        (self.guessed, self.step_at) = (None, None);
        self.model.stop_waiting();
    }

    /// The acknowledgements of chunks may be lost.
    pub(super) fn forget_in_flight(&mut self) {
        self.chunks.clear();
    }

    /// Plans the replay for a new placement. `stages[i]` is (positions cached, first position whose rows are still in
    /// the stage's send log), first to last. Returns, for each stage but the last, the number of positions that the
    /// next stage holds.
    ///
    /// From the last stage backwards: a stage whose send log reaches back far enough resends what the next stage lacks,
    /// and needs no position again that it holds. A stage whose log does not reach back must compute those positions
    /// again. What the first stage needs comes from the token log.
    pub(super) fn resume(&mut self, now: Instant, stages: &[(u32, u32)]) -> Vec<u32> {
        let len = self.len();
        let Some(((last, _), before)) = stages.split_last() else { return Vec::new() };
        // The token after the last position is awaited, so at least the last stage computes that position again.
        let mut need = (*last).min(len.saturating_sub(1));
        let mut least = need;
        let mut next_holds = Vec::from_iter(before.iter().map(|_| 0));
        for (holds, &(have, kept_from)) in next_holds.iter_mut().zip(before).rev() {
            let have = have.min(len);
            *holds = need + u32::from(planted::has(Planted::ResumeOneAhead));
            need = if have > need && kept_from <= need { have } else { have.min(need) };
            least = least.min(have);
        }
        self.rewind(now, need);
        self.sent = need; // all positions, if a send log serves
        self.acked = least;
        while self.chunks.front().is_some_and(|&end| end <= least) {
            self.chunks.pop_front();
        }
        self.resends = 0;
        self.gap = None;
        next_holds
    }

    /// Frames with what was sent from `position` on, for a standby of the first stage.
    pub(super) fn sent_since(&self, position: u32, job: JobId, epoch: Epoch) -> Vec<(FrameHeader, Vec<u32>)> {
        let starts = (position..self.sent).step_by(CHUNK_POSITIONS_MAX as usize);
        let frame = |position: u32| {
            let count = (self.sent - position).min(CHUNK_POSITIONS_MAX);
            // A standby samples no token, but its rows may be resent once it is promoted.
            let sample = position + count >= self.prompt_len();
            let header = self.header((job, epoch), position, count, sample);
            (header, self.tokens[position as usize..(position + count) as usize].to_vec())
        };
        starts.map(frame).collect()
    }

    /// Position up to which every stage is known to be.
    pub(super) fn acked(&self) -> u32 {
        self.acked
    }

    /// Whether to resend to a stage that holds `have` positions: it lacks something that was sent, and this is not a
    /// report of the same gap by another frame in flight.
    pub(super) fn takes_gap(&mut self, now: Instant, have: u32) -> bool {
        let known = self.gap.is_some_and(|(at, held)| held == have && now.since(at) < GAP_QUIET);
        if !self.has_gap(have) || known {
            return false;
        }
        self.gap = Some((now, have));
        true
    }

    /// Whether a stage that holds `have` positions lacks something that was sent.
    pub(super) fn has_gap(&self, have: u32) -> bool {
        have < self.sent
    }

    /// The next frame for the first stage of a pipeline of `stages` stages, if one may be sent now. A decode step has drafts
    /// if that pays.
    pub(super) fn next_frame(
        &mut self,
        now: Instant,
        (job, epoch): (JobId, Epoch),
        stages: u32,
        drafts: DraftLimits<'_>,
    ) -> Option<(FrameHeader, Vec<u32>)> {
        let (position, len) = (self.sent, self.len());
        // A caller's request waits for at most one chunk of what rests, and so does a slow standby.
        let in_flight = if self.caller == Caller::Refresh { 1 } else { chunks_in_flight(stages) };
        let waits = self.is_paused() || self.step_is_due() && self.model.waits_until().is_some();
        if position >= len || self.chunks.len() >= in_flight as usize || waits {
            return None;
        }
        let count = (len - position).min(chunk_positions(stages));
        let end = position + count;
        let sample = end == len;
        if !sample {
            self.chunks.push_back(end);
        }
        self.sent = end;
        let mut header = self.header((job, epoch), position, count, sample);
        let kept = if position == self.acked + self.ahead { self.ahead } else { 0 };
        header.drafts = Drafts { round: self.round, rows: 0, kept: u8::try_from(kept).unwrap_or(0) };
        let mut tokens = self.tokens[position as usize..end as usize].to_vec();
        if header.is_decode() && sample {
            self.draft(now, drafts);
            let rows = self.drafts.len() as u32;
            (header.count, header.drafts.rows) = (1 + rows, self.drafts.len() as u8);
            self.round += rows.min(1);
            tokens.extend(&self.drafts);
        }
        Some((header, tokens))
    }

    /// Whether the next frame is a decode step.
    fn step_is_due(&self) -> bool {
        self.sent.saturating_add(1) == self.len()
    }

    /// The most drafts of a decode step.
    fn drafts_max(&self, limits: DraftLimits<'_>) -> u32 {
        // Each draft that is right is a token of the answer, and one more follows the last of them.
        let end = self.prompt_len().saturating_add(self.request.max_tokens);
        let left = end.saturating_sub(self.len().saturating_add(1));
        let most = self.request.sampling.drafts.min(DRAFTS_MAX);
        let most = left.min(limits.positions.saturating_sub(self.len())).min(most.into());
        if self.request.sampling.allows_drafts() { most } else { 0 }
    }

    /// Chooses the drafts of a decode step: those of the draft model if it was asked and has answered.
    fn draft(&mut self, now: Instant, limits: DraftLimits<'_>) {
        self.drafts.clear();
        (self.guessed, self.step_at) = (None, Some(now));
        let most = self.drafts_max(limits) as usize;
        let mut drafts = guess(&self.tokens, most);
        self.guessed = drafts.first().copied();
        let mut of_model = core::mem::take(&mut self.model.ready);
        self.of_model = !of_model.is_empty() && most > 0;
        if self.of_model {
            of_model.truncate(most);
            self.drafts = of_model;
        } else {
            drafts.truncate(limits.times.best(self.accuracy, drafts.len(), limits.sharers, 0).drafts);
            self.drafts = drafts;
        }
    }

    /// The first token after a decode step has arrived: learns what it says about guesses and times.
    pub(super) fn learn(&mut self, now: Instant, token: u32, times: &mut StepTimes, drafter: Option<&mut Drafter>) {
        if let Some(guessed) = self.guessed.take_if(|_| self.drafts.is_empty() || self.of_model) {
            self.accuracy.learn(guessed == token);
        }
        if let Some(at) = self.step_at.take() {
            times.learn(self.drafts.len() as u32, now.since(at));
            if let Some(drafter) = drafter.filter(|_| self.of_model) {
                drafter.counts.0 += self.drafts.len() as u64;
            }
        }
    }

    /// Whether the draft at `index` of a round was right: the token that was taken last. Then all stages have the position of
    /// that token.
    pub(super) fn keeps(&mut self, round: u32, index: usize, drafter: Option<&mut Drafter>) -> bool {
        if self.round != round.saturating_add(1) || self.sent + 1 != self.len() {
            return false;
        }
        let Some(draft) = self.drafts.get(index) else { return false };
        let right = self.tokens.last() == Some(draft);
        match drafter.filter(|_| self.of_model) {
            Some(drafter) => {
                self.model.learn(right, drafter);
                drafter.counts.1 += u64::from(right);
            }
            None => self.accuracy.learn(right),
        }
        if right {
            self.sent += 1;
            self.ahead += 1;
        }
        right
    }

    fn header(&self, (job, epoch): (JobId, Epoch), cursor: u32, count: u32, last: bool) -> FrameHeader {
        let continues = self.base.filter(|(_, shared)| *shared == cursor).map(|(from, _)| from.0);
        let drafts = Drafts { round: self.round, ..Drafts::default() };
        FrameHeader { job, epoch, part: PartId(0), channel: self.id.0, cursor, count, last, continues, drafts }
    }

    /// Positions before `position` are in every cache. Returns true if these are all positions and no token was sampled
    /// for the next one: the frame did not ask for a token, so one has to.
    pub(super) fn handle_progress(&mut self, now: Instant, position: u32) -> bool {
        if position > self.sent || position <= self.acked {
            return false;
        }
        self.advance(now, position);
        position == self.len()
    }

    /// The last stage sampled `token` for `position`.
    pub(super) fn handle_token(&mut self, now: Instant, position: u32, token: u32, eos: &[u32], context: u32) -> Taken {
        if let Some(&sent) = self.tokens.get(position as usize) {
            return if sent == token || position < self.prompt_len() { Taken::Known } else { Taken::Differs { sent } };
        }
        if position != self.len() || self.sent != position {
            return Taken::Unasked;
        }
        self.advance(now, position);
        self.take(token, eos, context)
    }

    /// Takes the token that follows a draft which was kept.
    pub(super) fn take(&mut self, token: u32, eos: &[u32], context: u32) -> Taken {
        self.tokens.push(token);
        self.strikes = 0;
        let generated = self.len() - self.prompt_len();
        if eos.contains(&token) && !self.request.ignore_eos {
            Taken::Last(DoneReason::Stop)
        } else if generated >= self.request.max_tokens || self.len() >= context {
            Taken::Last(DoneReason::Length)
        } else {
            Taken::Next
        }
    }

    pub(super) fn prompt_len(&self) -> u32 {
        u32::try_from(self.request.prompt.len()).unwrap_or(u32::MAX)
    }

    fn advance(&mut self, now: Instant, position: u32) {
        self.acked = position;
        self.ahead = 0;
        while self.chunks.front().is_some_and(|&end| end <= position) {
            self.chunks.pop_front();
        }
        self.progress_at = now;
        self.resends = 0;
        self.forked_again = None;
    }

    /// Asserts what holds between two inputs.
    pub(super) fn assert_invariants(&self) {
        let (id, acked, sent, len) = (self.id, self.acked, self.sent, self.len());
        assert!(acked <= sent && sent <= len, "{id:?}: {acked} positions acknowledged, {sent} sent, {len} known");
        assert!(len >= self.prompt_len(), "{id:?} has lost a part of its prompt");
        assert!(!self.is_paused() || sent < len, "{id:?} is paused, and a token is awaited");
        assert!(self.logged.is_none_or(|logged| logged <= len), "{id:?}: successors know more tokens than there are");
        let (chunks, count) = (&self.chunks, self.chunks.len());
        assert!(count <= CHUNKS_IN_FLIGHT_MAX as usize, "{id:?}: {count} chunks in flight");
        assert!(chunks.iter().is_sorted_by(|before, after| before < after), "{id:?}: {chunks:?} are out of order");
        let within = chunks.iter().all(|end| (acked + 1..=sent).contains(end));
        assert!(within, "{id:?}: chunks {chunks:?} are in flight, of positions {acked} to {sent}");
    }

    /// When to resend if nothing comes back; `None` if nothing is awaited. `step_ns` is the time of one decode step beside all
    /// requests that share the stages. Doubles with each attempt, so that resends do not slow a slow mesh down further.
    pub(super) fn resend_at(&self, step_ns: u64) -> Option<Instant> {
        // Progress is reported per chunk. Its rows share a pass over the weights, so each costs far less than a decode
        // step.
        let rows = u64::from((self.sent - self.acked).clamp(1, CHUNK_POSITIONS_MAX));
        let steps = if rows == 1 { 8 } else { 8 + rows / 2 };
        let patience = WATCHDOG_MIN.max(Duration::from_nanos(step_ns.saturating_mul(steps)));
        let at = self.progress_at + patience.saturating_mul(1 << self.resends.min(8));
        (!self.is_paused()).then_some(at)
    }
}

/// Time in which a standby reports a request that it continues: three of its reports.
const FORK_REPORTED: Duration = HELD_EVERY.saturating_mul(3);
/// Least time between two answers to the same gap: all chunks in flight meet it, one after the other.
const GAP_QUIET: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests;
