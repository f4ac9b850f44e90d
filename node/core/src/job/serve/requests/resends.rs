//! What stages lack, and what is sent to them again: after a gap, after a broken connection, and without an answer.
use super::super::stream::{ForkAgain, Stream};
use super::{Requests, message, rest};
use crate::id::{NodeId, RequestId};
use crate::job::output::Out;
use crate::limits::{RECONNECT_SETTLES, RESENDS_MAX};
use crate::message::ToStage;
use crate::time::Instant;
use alloc::collections::BTreeMap;
use alloc::{format, string::String, vec::Vec};

/// A connection to the owner of a stage is up again: messages may be lost in both directions. Other connections may follow,
/// and the stages report what they have.
#[derive(Debug)]
pub(super) struct Reconnected {
    pub(super) resend_at: Instant,
    reports: BTreeMap<RequestId, Reported>,
}

/// Positions of a request at stages, including queued ones.
#[derive(Clone, Copy, Debug)]
struct Reported {
    /// At the first stage, if it reported.
    first: Option<u32>,
    /// The fewest of all that reported.
    least: u32,
}

impl Requests {
    /// A stage holds only `have` positions of what was sent, or reports them after a broken connection. Resends from there.
    pub(in crate::job) fn handle_gap(&mut self, now: Instant, from: NodeId, id: RequestId, have: u32, out: &mut Out) {
        let is_first = self.track.as_ref().is_some_and(|track| track.first() == from);
        let Some(stream) = self.running.get_mut(&id) else { return };
        if let Some(base) = stream.broken_base(have) {
            let kept = self.cache.rests(base) || self.running.contains_key(&base);
            return self.continue_again(now, id, base, kept, out);
        }
        if let Some(reconnected) = &mut self.reconnected {
            let report = reconnected.reports.entry(id).or_insert(Reported { first: None, least: have });
            report.least = report.least.min(have);
            if is_first {
                report.first = Some(have);
            }
        } else if stream.has_gap(have) && stream.takes_gap(now, have) {
            self.resend(now, id, have, out);
        }
    }

    /// A stage lacks the positions that a request shares with `base`. `kept`: other stages still have those.
    fn continue_again(&mut self, now: Instant, id: RequestId, base: RequestId, kept: bool, out: &mut Out) {
        let Some(stream) = self.running.get_mut(&id) else { return };
        let again = if kept { stream.fork_again(now) } else { ForkAgain::Failed };
        match again {
            ForkAgain::From(shared) => self.resend(now, id, shared, out),
            ForkAgain::Awaited => {}
            ForkAgain::Failed => {
                if self.cache.rests(base) {
                    self.cache.forget(base);
                    self.close_evicted(Vec::from([base]), out);
                }
                self.preempt(now, id, out);
                self.fill_slots(now, out);
            }
        }
    }

    /// A broken connection to a stage is up again.
    pub(in crate::job) fn handle_reconnected(&mut self, now: Instant, node: NodeId, out: &mut Out) {
        let Some(track) = &self.track else { return };
        let owns = track.stages.contains(&node);
        let follows = track.standbys.iter().any(|(_, standby)| *standby == node);
        if !owns && !follows {
            return;
        }
        let (job, epoch) = (self.job, track.epoch);
        out.extend(self.closed.iter().map(|&request| message(node, job, epoch, ToStage::Close { request })));
        out.extend(self.cache.resting().map(|request| rest(node, job, epoch, request)));
        if owns {
            // A stage that has positions beyond those of a lost frame would not miss it.
            self.drop_steered(out);
        }
        if owns && !self.running.is_empty() {
            let resend_at = now + RECONNECT_SETTLES;
            self.reconnected.get_or_insert(Reconnected { resend_at, reports: BTreeMap::new() });
        }
    }

    /// Sends again what may be lost, once for all connections that were broken together. Rows between stages are resent by
    /// these.
    pub(super) fn resend_lost(&mut self, now: Instant, out: &mut Out) {
        let due = |reconnected: &mut Reconnected| reconnected.resend_at <= now;
        let Some(Reconnected { reports, .. }) = self.reconnected.take_if(due) else { return };
        let from = |(&id, stream): (&RequestId, &Stream)| (id, reports.get(&id).copied(), stream.acked());
        let running: Vec<(RequestId, Option<Reported>, u32)> = self.running.iter().map(from).collect();
        for (id, report, acked) in running {
            let Some(stream) = self.running.get_mut(&id) else { continue };
            stream.forget_in_flight();
            let sent = |have: u32| !stream.has_gap(have);
            let position = match report {
                None => Some(acked),
                Some(Reported { first: Some(have), .. }) if !sent(have) => Some(have),
                // The last token may be lost.
                Some(Reported { least, .. }) if sent(least) => Some(least),
                // The stages work on it.
                Some(_) => None,
            };
            if let Some(position) = position {
                self.resend(now, id, position, out);
            } else {
                self.open(id, out);
                self.pump(now, id, out);
            }
        }
    }

    pub(super) fn resend(&mut self, now: Instant, id: RequestId, position: u32, out: &mut Out) {
        if let Some(stream) = self.running.get_mut(&id) {
            stream.rewind(now, position);
        }
        self.open(id, out);
        self.pump(now, id, out);
    }

    /// Resends requests that made no progress for too long. Returns a reason to place the job again if that did not
    /// help.
    pub(super) fn resend_unanswered(&mut self, now: Instant, out: &mut Out) -> Option<String> {
        let step_ns = self.slowest_step_ns()?;
        let mut again = Vec::new();
        let due = |stream: &Stream| stream.resend_at(step_ns).is_some_and(|at| at <= now);
        for stream in self.running.values_mut().filter(|stream| due(stream)) {
            if stream.resends >= RESENDS_MAX {
                return Some(format!("request {} was sent {RESENDS_MAX} times without an answer", stream.id.0));
            }
            stream.resends += 1;
            again.push((stream.id, stream.acked()));
        }
        for (id, acked) in again {
            self.resend(now, id, acked, out);
        }
        None
    }

    /// Time of a decode step among all that run: as planned, if each waits for the others, or as measured if that is longer because
    /// the devices also compute for other jobs.
    fn slowest_step_ns(&self) -> Option<u64> {
        let planned = self.track.as_ref()?.token_ns.saturating_mul(u64::from(self.sharers().max(1)));
        Some(planned.max(self.times.measured()))
    }

    /// When a request that makes no progress is resent.
    pub(super) fn resend_at(&self) -> Option<Instant> {
        let step_ns = self.slowest_step_ns()?;
        let unanswered = self.running.values().filter_map(|stream| stream.resend_at(step_ns)).min();
        let lost = self.reconnected.as_ref().map(|reconnected| reconnected.resend_at);
        [unanswered, lost].into_iter().flatten().min()
    }
}
