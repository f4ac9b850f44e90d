//! The timed challenges of one job: whether its nodes compute as fast as they say.
//!
//! The head asks for a few steps of the very stage that a node holds and takes the time itself. The fastest of a few
//! answers counts, because one may wait behind a busy executor. What the steps made is compared between a stage and its
//! standby: who answers without computing is found out there.
use crate::id::{JobId, NodeId};
use crate::limits::{CHALLENGE_EVERY, CHALLENGE_MAX, CHALLENGE_SOON, CHALLENGES};
use crate::time::{Duration, Instant};
use alloc::collections::{BTreeMap, VecDeque};
use core::ops::Range;

/// Challenges of one job.
#[derive(Debug, Default)]
pub(super) struct Trials {
    by_node: BTreeMap<NodeId, Trial>,
    running: Option<Running>,
}

#[derive(Debug, Default)]
struct Trial {
    /// What the last ones took, as long as the node holds these layers.
    layers: Range<u32>,
    took: VecDeque<Duration>,
    due: Instant,
}

#[derive(Debug)]
struct Running {
    node: NodeId,
    nonce: u64,
    sent: Instant,
}

impl Trials {
    /// Who is to be challenged now, if anybody is. `holders`: nodes and the layers that they hold in memory.
    pub(super) fn next(&mut self, now: Instant, job: JobId, holders: &[(NodeId, Range<u32>)]) -> Option<(NodeId, u64)> {
        self.by_node.retain(|node, trial| holders.iter().any(|(held, layers)| held == node && *layers == trial.layers));
        for (node, layers) in holders {
            self.by_node.entry(*node).or_insert_with(|| Trial {
                layers: layers.clone(),
                took: VecDeque::new(),
                due: now + CHALLENGE_SOON,
            });
        }
        if let Some(lost) = self.running.take_if(|running| now.since(running.sent) >= CHALLENGE_MAX)
            && let Some(trial) = self.by_node.get_mut(&lost.node)
        {
            trial.due = now + CHALLENGE_MAX;
        }
        if self.running.is_some() {
            return None;
        }
        let (&node, trial) = self.by_node.iter().min_by_key(|(_, trial)| trial.due)?;
        if trial.due > now {
            return None;
        }
        let nonce = nonce_of(job, &trial.layers);
        self.running = Some(Running { node, nonce, sent: now });
        Some((node, nonce))
    }

    /// A node answered. Returns its layers and what it took, once enough is known.
    pub(super) fn handle_answer(
        &mut self,
        now: Instant,
        node: NodeId,
        nonce: u64,
        done: bool,
    ) -> Option<(Range<u32>, Duration)> {
        let running = self.running.take_if(|running| running.node == node && running.nonce == nonce)?;
        let trial = self.by_node.get_mut(&node)?;
        if !done {
            trial.due = now + CHALLENGE_MAX; // it had no room for it: no answer
            return None;
        }
        if trial.took.len() >= CHALLENGES {
            trial.took.pop_front();
        }
        trial.took.push_back(now.since(running.sent));
        let enough = trial.took.len() >= CHALLENGES;
        trial.due = now + if enough { CHALLENGE_EVERY } else { CHALLENGE_SOON };
        let fastest = trial.took.iter().copied().min()?;
        enough.then(|| (trial.layers.clone(), fastest))
    }

    /// When the next of them is due.
    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        match &self.running {
            Some(running) => Some(running.sent + CHALLENGE_MAX),
            None => self.by_node.values().map(|trial| trial.due).min(),
        }
    }
}

/// Equal for all who hold these layers of the job, so that what they make can be compared.
fn nonce_of(job: JobId, layers: &Range<u32>) -> u64 {
    job.0.rotate_left(17) ^ (u64::from(layers.start) << 32 | u64::from(layers.end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const A: NodeId = NodeId([1; 16]);
    const B: NodeId = NodeId([2; 16]);

    #[test]
    fn each_holder_is_challenged_in_turn_and_the_fastest_answer_counts() {
        let mut trials = Trials::default();
        let holders = [(A, 0..4), (B, 0..4)];
        let (mut now, mut asked, mut said) = (Instant(0), Vec::new(), Vec::new());
        for round in 0..600u64 {
            if let Some((node, nonce)) = trials.next(now, JobId(1), &holders) {
                asked.push(node);
                assert_eq!(trials.next(now, JobId(1), &holders), None, "one at a time");
                now = now + Duration::from_millis(10 + round % 7);
                said.extend(trials.handle_answer(now, node, nonce, true).map(|(_, took)| (node, took)));
            }
            now = now + Duration::from_millis(20);
        }
        assert_eq!(asked, [A, B, A, B, A, B], "three each, and then none for a minute");
        assert_eq!(said.len(), 2);
        assert!(said.iter().all(|(_, took)| *took <= Duration::from_millis(14)), "{said:?}");
    }

    #[test]
    fn an_answer_that_does_not_come_blocks_nobody() {
        let mut trials = Trials::default();
        let holders = [(A, 0..4), (B, 4..8)];
        trials.next(Instant(0), JobId(1), &holders);
        let due = trials.next_wakeup().expect("the first is due");
        let (first, nonce) = trials.next(due, JobId(1), &holders).expect("it is challenged");
        let late = trials.next_wakeup().expect("its answer is awaited");
        let (second, other) = trials.next(late, JobId(1), &holders).expect("the other one's turn");
        assert_ne!((first, nonce), (second, other), "other layers, other rows");
        assert_eq!(trials.handle_answer(late, first, nonce, true), None, "too late");
    }
}
