//! The token log: the successors' copy of a served model's requests, from which a successor can continue each of them.
use super::serve::{Logged, Request};
use crate::id::RequestId;
use crate::limits::{CONTEXT_MAX, LOG_KEPT_MAX, QUEUE_MAX, SEQUENCES_MAX};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// Requests of one job, as their coordinator reports them.
///
/// Invariants: at most [`REQUESTS_MAX`] requests; `kept` is the sum of their tokens, at most [`LOG_KEPT_MAX`]; the
/// tokens of each request start at position 0 and have no gap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenLog {
    requests: BTreeMap<RequestId, LoggedRequest>,
    kept: usize,
}

/// A logged request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedRequest {
    /// The request without its prompt, which is at the start of `tokens`.
    request: Request,
    prompt: u32,
    tokens: Vec<u32>,
}

/// Running and queued requests.
const REQUESTS_MAX: usize = SEQUENCES_MAX as usize + QUEUE_MAX;

impl TokenLog {
    /// Applies what the coordinator reported. Drops tokens that would leave a gap: after a loss the coordinator resends
    /// everything.
    pub fn add(&mut self, news: Vec<(RequestId, Logged)>) {
        for (id, what) in news {
            match what {
                Logged::Opened { key, prompt, max_tokens, sampling, ignore_eos, priority } => {
                    if self.requests.contains_key(&id) || self.requests.len() >= REQUESTS_MAX || prompt > CONTEXT_MAX {
                        continue;
                    }
                    let request = Request { prompt: Vec::new(), max_tokens, sampling, ignore_eos, priority, key };
                    self.requests.insert(id, LoggedRequest { request, prompt, tokens: Vec::new() });
                }
                Logged::Tokens { from, tokens } => self.append(id, from as usize, &tokens),
                Logged::Over => {
                    if let Some(over) = self.requests.remove(&id) {
                        self.kept -= over.tokens.len();
                    }
                }
            }
        }
    }

    fn append(&mut self, id: RequestId, from: usize, tokens: &[u32]) {
        let Some(known) = self.requests.get_mut(&id) else { return };
        let have = known.tokens.len();
        let Some(new) = have.checked_sub(from).and_then(|known| tokens.get(known..)) else { return };
        if self.kept + new.len() <= LOG_KEPT_MAX && have + new.len() <= CONTEXT_MAX as usize {
            known.tokens.extend_from_slice(new);
            self.kept += new.len();
        }
    }

    /// Asserts the invariants.
    pub(crate) fn assert_invariants(&self) {
        let tokens: usize = self.requests.values().map(|known| known.tokens.len()).sum();
        assert_eq!(tokens, self.kept, "tokens of all logged requests");
        assert!(self.requests.len() <= REQUESTS_MAX, "{} logged requests", self.requests.len());
        assert!(self.kept <= LOG_KEPT_MAX, "{} logged tokens", self.kept);
    }

    /// Requests whose whole prompt is here, by id, each with the answer's tokens so far.
    pub fn into_requests(self) -> impl Iterator<Item = (RequestId, Request, Vec<u32>)> {
        let whole = |known: &LoggedRequest| known.prompt > 0 && known.tokens.len() >= known.prompt as usize;
        let all = self.requests.into_iter().filter(move |(_, known)| whole(known));
        all.map(|(id, LoggedRequest { request, prompt, mut tokens })| {
            let answer = tokens.split_off(prompt as usize);
            (id, Request { prompt: tokens, ..request }, answer)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::serve::{Priority, RequestKey, Sampling};
    use alloc::vec;

    fn opened(prompt: u32) -> Logged {
        let key = RequestKey([1; 16]);
        Logged::Opened {
            key,
            prompt,
            max_tokens: 9,
            sampling: Sampling::GREEDY,
            ignore_eos: false,
            priority: Priority::Batch,
        }
    }

    fn tokens(from: u32, tokens: &[u32]) -> Logged {
        Logged::Tokens { from, tokens: tokens.to_vec() }
    }

    fn requests(log: &TokenLog) -> Vec<(Vec<u32>, Vec<u32>)> {
        log.clone().into_requests().map(|(_, request, answer)| (request.prompt, answer)).collect()
    }

    #[test]
    fn tokens_are_kept_without_gap_and_once() {
        let (a, b) = (RequestId(1), RequestId(2));
        let mut log = TokenLog::default();
        log.add(vec![(a, opened(3)), (a, tokens(0, &[7, 8]))]);
        assert_eq!(requests(&log), [], "its prompt is incomplete");
        log.add(vec![(a, tokens(2, &[9, 10])), (a, tokens(1, &[8, 9, 10, 11])), (a, tokens(6, &[1]))]);
        log.add(vec![(b, tokens(0, &[1])), (a, opened(1)), (b, opened(1)), (b, tokens(0, &[5]))]);
        assert_eq!(requests(&log), [(vec![7, 8, 9], vec![10, 11]), (vec![5], vec![])]);
        log.add(vec![(a, Logged::Over), (a, Logged::Over)]);
        assert_eq!((requests(&log), log.kept), (vec![(vec![5], vec![])], 1));
    }

    #[test]
    fn the_log_is_bounded() {
        let mut log = TokenLog::default();
        let many = REQUESTS_MAX as u64 + 5;
        log.add((0..many).map(|id| (RequestId(id), opened(1))).collect());
        log.add(vec![(RequestId(many + 1), opened(CONTEXT_MAX + 1))]);
        assert_eq!(log.requests.len(), REQUESTS_MAX);
        let piece = vec![1; 1 << 19];
        for id in 0..20 {
            log.add(vec![(RequestId(id), Logged::Tokens { from: 0, tokens: piece.clone() })]);
        }
        assert_eq!(log.kept, LOG_KEPT_MAX);
    }
}
