//! The token log: what successors keep of the requests of a served model, so that one of them can go on with each.
use super::serve::{Logged, Request};
use crate::id::RequestId;
use crate::limits::{CONTEXT_MAX, LOG_KEPT_MAX, QUEUE_MAX, SEQUENCES_MAX};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// The requests of one job, as their coordinator reports them.
///
/// Invariants: at most [`REQUESTS_MAX`] requests; `kept` is the sum of their tokens, at most [`LOG_KEPT_MAX`]; the tokens of each
/// have no gap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenLog {
    requests: BTreeMap<RequestId, LoggedRequest>,
    kept: usize,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedRequest {
    /// What was asked. Its prompt is empty: it is at the beginning of `tokens`.
    request: Request,
    prompt: u32,
    tokens: Vec<u32>,
}

/// Requests that run and that wait.
const REQUESTS_MAX: usize = SEQUENCES_MAX as usize + QUEUE_MAX;

impl TokenLog {
    /// Adds what the coordinator reported. What does not adjoin what is there is left out: the coordinator sends all again where
    /// something was lost.
    pub fn add(&mut self, news: Vec<(RequestId, Logged)>) {
        for (id, what) in news {
            match what {
                Logged::Opened { key, prompt, max_tokens, sampling, ignore_eos } => {
                    if self.requests.contains_key(&id) || self.requests.len() >= REQUESTS_MAX || prompt > CONTEXT_MAX {
                        continue;
                    }
                    let request = Request { prompt: Vec::new(), max_tokens, sampling, ignore_eos, key };
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

    /// The requests of which the whole prompt is here, in order, each with the tokens of its answer so far.
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
    use crate::work::serve::{RequestKey, Sampling};
    use alloc::vec;

    fn opened(prompt: u32) -> Logged {
        let key = RequestKey([1; 16]);
        Logged::Opened { key, prompt, max_tokens: 9, sampling: Sampling::GREEDY, ignore_eos: false }
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
        assert_eq!(requests(&log), [], "its prompt is not here yet");
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
