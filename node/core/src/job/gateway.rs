//! Calls of this node's callers whose requests another node coordinates: asked there, asked again where an answer is lost, and
//! answered here once and in order.
use super::output::{JobOutput, Out};
use crate::id::{CallId, JobId, NodeId};
use crate::limits::{ASK_AGAIN, CALLS_AWAY_MAX, JOBS_MAX};
use crate::output::Event;
use crate::time::{Duration, Instant};
use crate::work::serve::{DoneReason, FromCaller, Request, ToCaller};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::format;

/// All of them.
///
/// Invariants: at most [`CALLS_AWAY_MAX`] calls; each gets exactly one `Done`, the last thing told about it.
#[derive(Debug, Default)]
pub(super) struct Gateway {
    calls: BTreeMap<CallId, Away>,
    /// Jobs that this node coordinated, and which node does so now; the last [`JOBS_MAX`].
    moved: BTreeMap<JobId, (Instant, NodeId)>,
}

#[derive(Debug)]
struct Away {
    to: NodeId,
    job: JobId,
    request: Request,
    /// The position of the token that the caller is told next.
    next: u32,
    /// When the other node was heard of it, or asked, last.
    heard: Instant,
    /// When a gap was last reported.
    gap: Option<Instant>,
}

impl Gateway {
    /// A job has another coordinator from now on.
    pub(super) fn note_moved(&mut self, now: Instant, job: JobId, to: NodeId) {
        self.moved.insert(job, (now, to));
        if self.moved.len() > JOBS_MAX
            && let Some(oldest) = self.moved.iter().min_by_key(|(_, (at, _))| *at).map(|(&job, _)| job)
        {
            self.moved.remove(&oldest);
        }
    }

    /// The node that a job of this one moved to.
    pub(super) fn moved_to(&self, job: JobId) -> Option<NodeId> {
        self.moved.get(&job).map(|&(_, to)| to)
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
        let away = Away { to, job, request, next, heard: now, gap: None };
        away.send(call, out);
        self.calls.insert(call, away);
    }

    /// A node answers.
    pub(super) fn handle_said(&mut self, now: Instant, from: NodeId, call: CallId, say: ToCaller, out: &mut Out) {
        let Some(away) = self.calls.get_mut(&call).filter(|away| away.to == from) else { return };
        away.heard = now;
        match say {
            ToCaller::Token { position, token } if position == away.next => {
                away.next += 1;
                out.push_back(JobOutput::Notify(Event::Token { call, position, token }));
            }
            ToCaller::Token { position, .. } if position > away.next => {
                // All that follow meet the same gap.
                if away.gap.is_none_or(|at| now.since(at) >= GAP_QUIET) {
                    away.gap = Some(now);
                    away.send(call, out);
                }
            }
            ToCaller::Token { .. } => {}
            ToCaller::Done(reason) => {
                self.calls.remove(&call);
                done(call, reason, out);
            }
            ToCaller::Moved(to) => {
                let job = away.job;
                away.to = to;
                away.send(call, out);
                if self.moved.contains_key(&job) {
                    self.note_moved(now, job, to);
                }
            }
        }
    }

    /// A caller of this node went away.
    pub(super) fn cancel(&mut self, call: CallId, out: &mut Out) {
        if let Some(Away { to, job, .. }) = self.calls.remove(&call) {
            out.push_back(JobOutput::Call { to, job, call, say: FromCaller::Cancel });
            done(call, DoneReason::Cancelled, out);
        }
    }

    /// A member is gone. Its successor is not known here; the callers may find it.
    pub(super) fn handle_gone(&mut self, node: NodeId, out: &mut Out) {
        self.moved.retain(|_, (_, to)| *to != node);
        let calls = self.calls.extract_if(.., |_, away| away.to == node).map(|(call, _)| call);
        for call in calls {
            let what =
                format!("node {node}, which ran this request, is gone: send it again with the same Idempotency-Key");
            done(call, DoneReason::Failed(what), out);
        }
    }

    /// Asks again where nothing comes.
    pub(super) fn handle_wakeup(&mut self, now: Instant, out: &mut Out) {
        for (&call, away) in self.calls.iter_mut().filter(|(_, away)| now.since(away.heard) >= ASK_AGAIN) {
            away.heard = now;
            away.send(call, out);
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let heard = self.calls.values().map(|away| away.heard).min()?;
        Some((heard + ASK_AGAIN, "gateway: another coordinator does not answer"))
    }
}

impl Away {
    fn send(&self, call: CallId, out: &mut Out) {
        let say = FromCaller::Ask { request: Box::new(self.request.clone()), from: self.next };
        out.push_back(JobOutput::Call { to: self.to, job: self.job, call, say });
    }
}

fn done(call: CallId, reason: DoneReason, out: &mut Out) {
    out.push_back(JobOutput::Notify(Event::Done { call, reason }));
}

/// How long the same gap is not reported twice.
const GAP_QUIET: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::serve::{RequestKey, Sampling};
    use alloc::vec::Vec;
    use alloc::{collections::VecDeque, vec};

    const OTHER: NodeId = NodeId([2; 16]);
    const THIRD: NodeId = NodeId([3; 16]);
    const CALL: CallId = CallId(5);

    fn asked() -> (Gateway, Out) {
        let key = RequestKey([1; 16]);
        let prompt = vec![1, 2, 3];
        let request = Request { prompt, max_tokens: 4, sampling: Sampling::GREEDY, ignore_eos: false, key };
        let (mut gateway, mut out) = (Gateway::default(), VecDeque::new());
        gateway.ask(Instant(0), CALL, (OTHER, JobId(1)), (request, 0), &mut out);
        (gateway, out)
    }

    fn token(position: u32) -> ToCaller {
        ToCaller::Token { position, token: position }
    }

    /// Positions told, and positions asked from with the node asked.
    fn seen(out: &mut Out) -> (Vec<u32>, Vec<(NodeId, u32)>) {
        let (mut told, mut asks) = (Vec::new(), Vec::new());
        for output in out.drain(..) {
            match output {
                JobOutput::Notify(Event::Token { position, .. }) => told.push(position),
                JobOutput::Notify(Event::Done { .. }) => told.push(u32::MAX),
                JobOutput::Call { to, say: FromCaller::Ask { from, .. }, .. } => asks.push((to, from)),
                other => panic!("{other:?}"),
            }
        }
        (told, asks)
    }

    #[test]
    fn tokens_are_told_once_and_in_order_whatever_is_lost() {
        let (mut gateway, mut out) = asked();
        let mut at = 0;
        let mut hear = |gateway: &mut Gateway, from, say, out: &mut Out| {
            at += 1;
            gateway.handle_said(Instant(at), from, CALL, say, out);
        };
        for position in [3, 3, 5, 6, 4, 5] {
            hear(&mut gateway, OTHER, token(position), &mut out);
        }
        hear(&mut gateway, THIRD, token(6), &mut out);
        assert_eq!(seen(&mut out), (vec![3, 4, 5], vec![(OTHER, 3), (OTHER, 4)]), "one gap, one question");
        hear(&mut gateway, OTHER, ToCaller::Moved(THIRD), &mut out);
        hear(&mut gateway, OTHER, token(6), &mut out);
        hear(&mut gateway, THIRD, token(6), &mut out);
        hear(&mut gateway, THIRD, ToCaller::Done(DoneReason::Length), &mut out);
        hear(&mut gateway, THIRD, ToCaller::Done(DoneReason::Length), &mut out);
        assert_eq!(seen(&mut out), (vec![6, u32::MAX], vec![(THIRD, 6)]));
    }

    #[test]
    fn a_silent_node_is_asked_again_and_a_lost_one_ends_its_calls() {
        let (mut gateway, mut out) = asked();
        gateway.handle_wakeup(Instant(0) + ASK_AGAIN, &mut out);
        gateway.handle_gone(THIRD, &mut out);
        assert_eq!(seen(&mut out), (vec![], vec![(OTHER, 3), (OTHER, 3)]));
        gateway.handle_gone(OTHER, &mut out);
        assert_eq!((seen(&mut out), gateway.next_wakeup()), ((vec![u32::MAX], vec![]), None));
    }
}
