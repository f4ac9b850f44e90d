//! Calls of this node's callers whose requests another node coordinates. The gateway asks that node, repeats the
//! question if an answer is lost, and answers the caller once and in order.
use super::output::{JobOutput, Out};
use crate::id::{CallId, JobId, NodeId};
use crate::limits::{CALLS_AWAY_MAX, JOBS_MAX, TOKEN_RETRY};
use crate::output::Event;
use crate::time::{Duration, Instant};
use crate::work::serve::{DoneReason, FromCaller, Request, ToCaller};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::format;
use alloc::vec::Vec;

/// Calls at other coordinators.
///
/// Invariants: at most [`CALLS_AWAY_MAX`] calls; each gets exactly one `Done`, as its last event.
#[derive(Debug, Default)]
pub(super) struct Gateway {
    calls: BTreeMap<CallId, RemoteCall>,
    /// Jobs that this node coordinated before; the last [`JOBS_MAX`].
    moved: BTreeMap<JobId, Moved>,
}

#[derive(Debug)]
struct Moved {
    at: Instant,
    /// The present coordinator.
    to: NodeId,
    /// Nodes that may coordinate it after that one; at most [`CANDIDATES_MAX`].
    others: VecDeque<NodeId>,
}

#[derive(Debug)]
struct RemoteCall {
    to: NodeId,
    job: JobId,
    request: Request,
    /// Position of the next token for the caller.
    next: u32,
    /// When the other node last answered, or was asked.
    heard: Instant,
    /// When a gap was last reported.
    gap: Option<Instant>,
    /// Candidates that may continue it, as the coordinator named them, and since when they are asked in turn: the node
    /// asked before is down, or does not know the job.
    others: VecDeque<NodeId>,
    lost: Option<Instant>,
    /// The question was sent to this candidate.
    asked: bool,
}

impl Gateway {
    /// Another node coordinates the job now.
    pub(super) fn note_moved(&mut self, now: Instant, job: JobId, to: NodeId, others: BTreeSet<NodeId>) {
        let others = others.into_iter().filter(|node| *node != to).take(CANDIDATES_MAX).collect();
        self.moved.insert(job, Moved { at: now, to, others });
        if self.moved.len() > JOBS_MAX
            && let Some(oldest) = self.moved.iter().min_by_key(|(_, moved)| moved.at).map(|(&job, _)| job)
        {
            self.moved.remove(&oldest);
        }
    }

    /// The coordinator of a job that this node coordinated before.
    pub(super) fn moved_to(&self, job: JobId) -> Option<NodeId> {
        self.moved.get(&job).map(|moved| moved.to)
    }

    /// Asks another node for a call's tokens, from position `from` on.
    pub(super) fn ask(
        &mut self,
        now: Instant,
        call: CallId,
        (to, job): (NodeId, JobId),
        (request, from): (Request, u32),
        out: &mut Out,
    ) {
        if self.calls.len() >= CALLS_AWAY_MAX {
            return done(call, DoneReason::Busy, out);
        }
        let next = from.max(u32::try_from(request.prompt.len()).unwrap_or(u32::MAX));
        let others = self.moved.get(&job).map(|moved| moved.others.clone()).unwrap_or_default();
        let away = RemoteCall { to, job, request, next, heard: now, gap: None, others, lost: None, asked: true };
        away.send(call, out);
        self.calls.insert(call, away);
    }

    /// The coordinator of a call's request answers.
    pub(super) fn handle_answer(&mut self, now: Instant, from: NodeId, call: CallId, say: ToCaller, out: &mut Out) {
        let Some(away) = self.calls.get_mut(&call).filter(|away| away.to == from) else { return };
        away.heard = now;
        if say != ToCaller::Unknown {
            away.lost = None;
        }
        match say {
            ToCaller::Token { position, sampled } if position == away.next => {
                away.next += 1;
                out.push_back(JobOutput::Notify(Event::Token { call, position, sampled }));
            }
            // All tokens after a lost one meet the same gap.
            ToCaller::Token { position: beyond, .. }
            | ToCaller::Done { end: beyond, reason: DoneReason::Length | DoneReason::Stop }
                if beyond > away.next =>
            {
                if away.gap.is_none_or(|at| now.since(at) >= GAP_QUIET) {
                    away.gap = Some(now);
                    away.send(call, out);
                }
            }
            ToCaller::Token { .. } => {}
            ToCaller::Begun { cached } => out.push_back(JobOutput::Notify(Event::Begun { call, cached })),
            ToCaller::Done { reason, .. } => {
                self.calls.remove(&call);
                done(call, reason, out);
            }
            ToCaller::Moved(to) => {
                away.to = to;
                away.send(call, out);
                if let Some(moved) = self.moved.get_mut(&away.job) {
                    moved.to = to;
                }
            }
            ToCaller::RunsIn { job, successors } => {
                let known = |node: &NodeId| *node != away.to;
                away.others = successors.into_iter().filter(known).take(CANDIDATES_MAX).collect();
                away.job = job;
            }
            ToCaller::Unknown => {
                if !away.try_next_candidate(now) {
                    self.give_up(call, out);
                }
            }
        }
    }

    /// No node continues a call's request.
    fn give_up(&mut self, call: CallId, out: &mut Out) {
        if let Some(away) = self.calls.remove(&call) {
            let what = format!(
                "node {}, which ran this request, is gone or serves the model no more: send it again with the same \
                 Idempotency-Key",
                away.to
            );
            done(call, DoneReason::Failed(what), out);
        }
    }

    /// A caller of this node cancelled or disconnected.
    pub(super) fn cancel(&mut self, call: CallId, out: &mut Out) {
        if let Some(RemoteCall { to, job, .. }) = self.calls.remove(&call) {
            out.push_back(JobOutput::Call { to, job, call, say: FromCaller::Cancel });
            done(call, DoneReason::Cancelled, out);
        }
    }

    /// A member is down. Candidates are asked for the calls that it answered.
    pub(super) fn handle_gone(&mut self, now: Instant, node: NodeId, out: &mut Out) {
        let lost = self.calls.iter_mut().filter(|(_, away)| away.to == node);
        let over: Vec<CallId> =
            lost.filter_map(|(&call, away)| (!away.try_next_candidate(now)).then_some(call)).collect();
        over.into_iter().for_each(|call| self.give_up(call, out));
    }

    /// Repeats questions that were not answered. A candidate that does not answer is not asked twice in a row: it may be
    /// down, too.
    pub(super) fn handle_wakeup(&mut self, now: Instant, out: &mut Out) {
        let mut over = Vec::new();
        for (&call, away) in self.calls.iter_mut().filter(|(_, away)| now.since(away.heard) >= TOKEN_RETRY) {
            if away.lost.is_none() || !core::mem::replace(&mut away.asked, true) {
                away.heard = now;
                away.send(call, out);
            } else if !away.try_next_candidate(now) {
                over.push(call);
            }
        }
        over.into_iter().for_each(|call| self.give_up(call, out));
    }

    /// Asserts what holds between two inputs.
    pub(super) fn assert_invariants(&self) {
        assert!(self.calls.len() <= CALLS_AWAY_MAX, "{} calls at other coordinators", self.calls.len());
        assert!(self.moved.len() <= JOBS_MAX, "{} jobs that moved", self.moved.len());
        let asked = self.calls.values().map(|away| &away.others);
        let mut candidates = asked.chain(self.moved.values().map(|moved| &moved.others));
        assert!(candidates.all(|others| others.len() <= CANDIDATES_MAX), "too many candidates");
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let heard = self.calls.values().map(|away| away.heard).min()?;
        Some((heard + TOKEN_RETRY, "gateway: another coordinator does not answer"))
    }
}

impl RemoteCall {
    /// Switches to the next candidate, which is asked soon. Returns false if there is none, or the time is up.
    fn try_next_candidate(&mut self, now: Instant) -> bool {
        let since = *self.lost.get_or_insert(now);
        let Some(next) = self.others.pop_front().filter(|_| now.since(since) < LOST_MAX) else { return false };
        self.others.push_back(core::mem::replace(&mut self.to, next));
        self.asked = false;
        // Makes the next wakeup of this call due after `TURN`.
        self.heard = now + TURN - TOKEN_RETRY;
        true
    }

    fn send(&self, call: CallId, out: &mut Out) {
        let say = FromCaller::Ask { request: Box::new(self.request.clone()), from: self.next };
        out.push_back(JobOutput::Call { to: self.to, job: self.job, call, say });
    }
}

fn done(call: CallId, reason: DoneReason, out: &mut Out) {
    out.push_back(JobOutput::Notify(Event::Done { call, reason }));
}

/// Candidates of a job: nodes of a placement and of the ones before it.
const CANDIDATES_MAX: usize = 16;
/// How soon the next candidate is asked.
const TURN: Duration = Duration::from_millis(300);
/// How long candidates are asked: several successors have had their turns by then.
const LOST_MAX: Duration = Duration::from_secs(15);
/// Least time between two reports of the same gap.
const GAP_QUIET: Duration = Duration::from_millis(200);

#[cfg(test)]
#[expect(clippy::wildcard_enum_match_arm, reason = "a test looks at few of many outputs")]
mod tests {
    use super::*;
    use crate::work::serve::{Priority, RequestKey, Sampling};
    use alloc::vec;

    const OTHER: NodeId = NodeId([2; 16]);
    const THIRD: NodeId = NodeId([3; 16]);
    const CALL: CallId = CallId(5);

    fn asked() -> (Gateway, Out) {
        let key = RequestKey([1; 16]);
        let prompt = vec![1, 2, 3];
        let request = Request {
            prompt,
            max_tokens: 4,
            sampling: Sampling::GREEDY,
            ignore_eos: false,
            priority: Priority::Interactive,
            key,
        };
        let (mut gateway, mut out) = (Gateway::default(), VecDeque::new());
        gateway.ask(Instant(0), CALL, (OTHER, JobId(1)), (request, 0), &mut out);
        (gateway, out)
    }

    fn token(position: u32) -> ToCaller {
        ToCaller::Token { position, sampled: position.into() }
    }

    fn finished(end: u32) -> ToCaller {
        ToCaller::Done { reason: DoneReason::Length, end }
    }

    /// Positions that the caller got, and positions asked from with the node asked.
    fn seen(out: &mut Out) -> (Vec<u32>, Vec<(NodeId, u32)>) {
        let (mut delivered, mut asks) = (Vec::new(), Vec::new());
        for output in out.drain(..) {
            match output {
                JobOutput::Notify(Event::Token { position, .. }) => delivered.push(position),
                JobOutput::Notify(Event::Done { .. }) => delivered.push(u32::MAX),
                JobOutput::Call { to, say: FromCaller::Ask { from, .. }, .. } => asks.push((to, from)),
                other => panic!("{other:?}"),
            }
        }
        (delivered, asks)
    }

    #[test]
    fn tokens_are_delivered_once_and_in_order_despite_losses() {
        let (mut gateway, mut out) = asked();
        let mut at = 0;
        let mut hear = |gateway: &mut Gateway, from, say, out: &mut Out| {
            at += 1;
            gateway.handle_answer(Instant(at), from, CALL, say, out);
        };
        for position in [3, 3, 5, 6] {
            hear(&mut gateway, OTHER, token(position), &mut out);
        }
        hear(&mut gateway, OTHER, finished(6), &mut out);
        for position in [4, 5] {
            hear(&mut gateway, OTHER, token(position), &mut out);
        }
        hear(&mut gateway, THIRD, token(6), &mut out);
        assert_eq!(seen(&mut out), (vec![3, 4, 5], vec![(OTHER, 3), (OTHER, 4)]), "one gap, one question");
        hear(&mut gateway, OTHER, ToCaller::Moved(THIRD), &mut out);
        hear(&mut gateway, OTHER, token(6), &mut out);
        hear(&mut gateway, THIRD, token(6), &mut out);
        hear(&mut gateway, THIRD, finished(7), &mut out);
        hear(&mut gateway, THIRD, finished(7), &mut out);
        assert_eq!(seen(&mut out), (vec![6, u32::MAX], vec![(THIRD, 6)]));
    }

    #[test]
    fn a_silent_node_is_asked_again_and_a_lost_one_ends_its_calls() {
        let (mut gateway, mut out) = asked();
        gateway.handle_wakeup(Instant(0) + TOKEN_RETRY, &mut out);
        gateway.handle_gone(Instant(0), THIRD, &mut out);
        assert_eq!(seen(&mut out), (vec![], vec![(OTHER, 3), (OTHER, 3)]));
        gateway.handle_gone(Instant(0), OTHER, &mut out);
        assert_eq!((seen(&mut out), gateway.next_wakeup()), ((vec![u32::MAX], vec![]), None));
    }

    #[test]
    fn successors_that_the_coordinator_named_are_asked_once_it_is_down() {
        let (mut gateway, mut out) = asked();
        let now = Instant(0) + TOKEN_RETRY;
        let runs_in = |successors| ToCaller::RunsIn { job: JobId(1), successors };
        gateway.handle_answer(now, OTHER, CALL, runs_in(vec![OTHER, THIRD]), &mut out);
        gateway.handle_answer(now, THIRD, CALL, runs_in(vec![]), &mut out);
        gateway.handle_answer(now, OTHER, CALL, token(3), &mut out);
        gateway.handle_gone(now, OTHER, &mut out);
        gateway.handle_wakeup(now + TURN, &mut out);
        assert_eq!(seen(&mut out), (vec![3], vec![(OTHER, 3), (THIRD, 4)]));
    }

    #[test]
    fn candidates_are_asked_in_turn_for_a_while() {
        let (mut gateway, mut out) = (Gateway::default(), VecDeque::new());
        gateway.note_moved(Instant(0), JobId(1), OTHER, [OTHER, THIRD].into());
        let key = RequestKey([1; 16]);
        let request = Request {
            prompt: vec![1],
            max_tokens: 4,
            sampling: Sampling::GREEDY,
            ignore_eos: false,
            priority: Priority::Interactive,
            key,
        };
        gateway.ask(Instant(0), CALL, (OTHER, JobId(1)), (request, 0), &mut out);
        let mut now = Instant(0) + TOKEN_RETRY;
        for to in [OTHER, THIRD, OTHER] {
            assert_eq!(seen(&mut out), (vec![], vec![(to, 1)]));
            gateway.handle_answer(now, to, CALL, ToCaller::Unknown, &mut out);
            now = now + TURN;
            gateway.handle_wakeup(now, &mut out);
        }
        assert_eq!(seen(&mut out), (vec![], vec![(THIRD, 1)]));
        gateway.handle_answer(now, THIRD, CALL, token(1), &mut out);
        gateway.handle_answer(now, THIRD, CALL, ToCaller::Unknown, &mut out);
        gateway.handle_answer(now + LOST_MAX, OTHER, CALL, ToCaller::Unknown, &mut out);
        assert_eq!(seen(&mut out), (vec![1, u32::MAX], vec![]));
    }
}
