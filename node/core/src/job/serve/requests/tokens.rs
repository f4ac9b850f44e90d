//! Tokens and acknowledgements from the last stage.
use super::super::stream::Taken;
use super::{Requests, tell};
use crate::id::RequestId;
use crate::job::output::{JobOutput, Out};
use crate::output::Event;
use crate::time::Instant;
use crate::work::serve::{EMBEDDING_MAX, LOGPROBS_MAX, Sampled};
use alloc::format;

impl Requests {
    /// The last stage sampled a token after a decode step or a prompt, and one after each draft of a round. Those after a
    /// draft that was wrong mean nothing.
    pub(in crate::job) fn handle_tokens(
        &mut self,
        now: Instant,
        id: RequestId,
        position: u32,
        first: Sampled,
        (round, after_drafts): (u32, &[u32]),
        out: &mut Out,
    ) {
        let token = first.token;
        let Some(stream) = self.running.get_mut(&id) else { return };
        // A stage may send more than it was asked for.
        let asked = stream.request.sampling.logprobs.map(|top| usize::from(top.min(LOGPROBS_MAX)));
        let logprobs = first.logprobs.filter(|logprobs| asked.is_some_and(|most| logprobs.top_e6.len() <= most));
        let embedding = first.embedding.filter(|row| row.len() <= EMBEDDING_MAX);
        let awaited = stream.awaited_base();
        let taken = stream.handle_token(now, position, token, &self.eos, self.context);
        if taken == Taken::Next {
            stream.learn(now, token, &mut self.times, self.drafter.as_mut());
        }
        if !self.handle_taken(now, id, position, Sampled { token, logprobs, embedding }, taken, out) {
            return;
        }
        for ((index, &token), position) in after_drafts.iter().enumerate().zip(position.saturating_add(1)..) {
            let Some(stream) = self.running.get_mut(&id) else { return };
            if !stream.keeps(round, index, self.drafter.as_mut()) {
                break;
            }
            self.times.count_right();
            let taken = stream.take(token, &self.eos, self.context);
            if !self.handle_taken(now, id, position, token.into(), taken, out) {
                return;
            }
        }
        self.settle_base(id, awaited, out);
        self.grow(now, id, out);
        self.answer_steered(id, out);
        self.pump(now, id, out);
    }

    /// Tells the caller of a token that is new. Returns whether the request goes on after it.
    fn handle_taken(
        &mut self,
        now: Instant,
        id: RequestId,
        position: u32,
        sampled: Sampled,
        taken: Taken,
        out: &mut Out,
    ) -> bool {
        let Some((caller, logged)) = self.running.get(&id).map(|stream| (stream.caller, stream.is_logged())) else {
            return false;
        };
        let token = sampled.token;
        match taken {
            Taken::Next => {
                tell(caller, position, sampled, out);
                if logged {
                    self.log_soon(now);
                }
                return true;
            }
            Taken::Last(reason) => {
                tell(caller, position, sampled, out);
                self.finish(now, id, reason, out);
            }
            Taken::Known | Taken::Unasked => {}
            // A late answer to what the request has been led away from.
            Taken::Differs { .. } if self.is_steered(id) => {}
            Taken::Differs { sent } => {
                let what = format!(
                    "job {:x} request {} position {position}: the caller has token {sent}, a replay sampled {token}; the \
                     stages do not compute the same bits",
                    self.job.0, id.0
                );
                out.push_back(JobOutput::Notify(Event::Rejected { from: None, what }));
            }
        }
        false
    }

    pub(in crate::job) fn handle_progress(&mut self, now: Instant, id: RequestId, position: u32, out: &mut Out) {
        if let Some(stream) = self.running.get_mut(&id) {
            let awaited = stream.awaited_base();
            let asks_again = stream.handle_progress(now, position);
            self.settle_base(id, awaited, out);
            if asks_again {
                return self.resend(now, id, position, out);
            }
            self.pump(now, id, out);
        }
    }
}
