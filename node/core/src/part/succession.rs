//! Succession at the participants: which nodes may take a job over when its coordinator falls silent, in which order,
//! and how many participants must agree.
//!
//! Every participant that no longer hears the coordinator votes: it reports this to the successors, which the order of
//! each part names. A successor acts only when more than half of the participants have voted. It leaves a turn to each
//! successor that has a newer copy of the checkpoint or is named earlier. It continues the job under an epoch of its
//! own; a coordinator or successor that comes too late is answered with `Stale`. There is no consensus: two
//! coordinators that are cut off from each other may both continue for a while. They compute the same, because jobs are
//! deterministic.
use super::{HeldJob, Load, LocalPart, PartOutput, Parts};
use crate::id::{Epoch, JobId, NodeId, RequestId};
use crate::limits::{
    DEFERRED_MAX, MIRROR_NEWER, MIRROR_RETRY, MIRRORS, ORPHAN_MAX, ORPHAN_SUCCEEDED_MAX, PARTS_MAX, SERVE_SUCCESSION,
    SERVE_SUCCESSION_COLD, SUCCESSION_TURN, VOTE_MAX, VOTE_MAX_COLD,
};
use crate::message::ToParticipant;
use crate::output::Output;
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::log::TokenLog;
use crate::work::serve::Logged;
use crate::work::{Order, PartWork, ProgramRecord, Record, Takeover};
use alloc::collections::BTreeMap;
use alloc::{boxed::Box, string::String, vec::Vec};

/// A participant's state for succession.
#[derive(Debug, Default)]
pub(super) struct Succession {
    record: Option<Box<Record>>,
    /// This node's own lease on the coordinator ran out.
    silent: bool,
    /// The coordinator announced that it leaves. What it still sends is no sign that it coordinates.
    left: bool,
    /// Votes of participants that do not hear the coordinator either.
    votes: BTreeMap<NodeId, Vote>,
    majority_since: Option<Instant>,
    mirror: Mirror,
    /// Token log of a served model.
    log: TokenLog,
    /// Orders of a successor. They count once the coordinator is silent. At most [`PARTS_MAX`], of one epoch.
    deferred: Vec<(Instant, NodeId, Epoch, Box<Order>)>,
}

#[derive(Clone, Copy, Debug)]
struct Vote {
    /// When it last arrived.
    at: Instant,
    /// Step of the participant's copy of the checkpoint.
    checkpoint: Option<u32>,
}

/// The copy of the coordinator's checkpoint, at its first successors.
#[derive(Debug, Default)]
struct Mirror {
    have: Option<u32>,
    under_way: Option<u32>,
    again: Instant,
}

impl Succession {
    /// The coordinator gave a sign of life, or was replaced.
    pub(super) fn heard(&mut self) {
        if !self.left && (self.silent || !self.votes.is_empty()) {
            self.silent = false;
            self.votes.clear();
            self.majority_since = None;
        }
    }

    /// A successor orders a part while this node still hears the coordinator.
    pub(super) fn defer(&mut self, now: Instant, from: NodeId, epoch: Epoch, order: Box<Order>) {
        self.deferred.retain(|(at, ..)| now.since(*at) < DEFERRED_MAX);
        if self.deferred.iter().any(|(_, _, known, _)| *known > epoch) {
            return;
        }
        self.deferred.retain(|(_, _, known, other)| *known == epoch && other.part != order.part);
        if self.deferred.len() < PARTS_MAX {
            self.deferred.push((now, from, epoch, order));
        }
    }

    /// A new placement. The record is out of date; the copy of the checkpoint is not.
    pub(super) fn replaced(&mut self) {
        self.left = false;
        self.heard();
        self.record = None;
        self.log = TokenLog::default();
        self.deferred.clear();
    }

    /// Asserts what holds between two inputs.
    pub(super) fn assert_invariants(&self) {
        let deferred = &self.deferred;
        assert!(deferred.len() <= PARTS_MAX, "{} deferred orders", deferred.len());
        assert!(deferred.windows(2).all(|pair| pair[0].2 == pair[1].2), "deferred orders of several epochs");
        assert!(self.silent || self.majority_since.is_none(), "a majority counts, and the coordinator is heard");
        let Mirror { have, under_way, .. } = self.mirror;
        let newer = under_way.is_none_or(|step| have.is_none_or(|have| have < step));
        assert!(newer, "the checkpoint of step {under_way:?} is copied again, {have:?} is here");
        self.log.assert_invariants();
    }

    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }

    /// Number of successors that go before this node: those that claim a newer copy of the checkpoint, or an equal one
    /// and are named earlier. A successor that has not voted goes first if it is named earlier. It also does if it may
    /// have the last checkpoint and this node does not: it keeps copies, and the job needs them, because not all of the
    /// coordinator's parts are guarded by standbys.
    fn ahead(&self, me: NodeId, successors: &[NodeId], record: &Record, guarded: bool) -> usize {
        let last = record.program.checkpoint();
        let mine = self.mirror.have;
        let turn = successors.iter().position(|node| *node == me).unwrap_or(successors.len());
        let ahead = |&(position, node): &(usize, &NodeId)| match self.votes.get(node) {
            // No copy is newer than the last checkpoint, whatever the vote claims.
            Some(vote) => {
                let theirs = vote.checkpoint.min(last);
                theirs > mine || (theirs == mine && position < turn)
            }
            None => position < turn || (mine < last && position < MIRRORS && !guarded),
        };
        successors.iter().enumerate().filter(|(_, node)| **node != me).filter(ahead).count()
    }
}

impl HeldJob {
    /// Whether a successor may still take over. Otherwise the memory held here may be needed elsewhere. A simulation stays
    /// for [`ORPHAN_MAX`] even without a majority.
    fn may_be_succeeded(&self, coordinator: NodeId) -> bool {
        let steps = |record: &Record| matches!(record.program, ProgramRecord::Steps(_));
        let named = self.order().is_some_and(|order| !order.successors.is_empty());
        self.may_elect(coordinator) || named && self.succession.record.as_deref().is_some_and(steps)
    }

    /// Whether there are successors, and enough voters are left to elect one, as far as this node knows.
    fn may_elect(&self, coordinator: NodeId) -> bool {
        let Some(order) = self.order().filter(|order| !order.successors.is_empty()) else { return false };
        // Only successors have the record. A standby votes for them.
        let Some(record) = &self.succession.record else { return true };
        let all = record.voters(&order.owners);
        2 * all.iter().filter(|node| **node != coordinator).count() > all.len()
    }

    /// How long the parts stay without a coordinator.
    pub(super) fn orphan_max(&self, coordinator: NodeId) -> Duration {
        if self.may_elect(coordinator) { ORPHAN_SUCCEEDED_MAX } else { ORPHAN_MAX }
    }

    /// The order of a part under the present epoch. A part that failed does not count.
    fn order(&self) -> Option<&Order> {
        let is_held = |held: &&LocalPart| held.epoch == self.epoch && !matches!(held.load, Load::Failed(_));
        self.parts.values().find(is_held).map(|held| &*held.order)
    }
}

impl Parts {
    /// This node's lease on a job's coordinator ran out.
    pub fn handle_coordinator_silent(&mut self, now: Instant, job: JobId, node: NodeId) {
        if node == self.me {
            return;
        }
        let Some(held) = self.jobs.get_mut(&job).filter(|held| held.epoch.issuer == node) else { return };
        held.succession.silent = true;
        self.vote(now, job);
        self.obey_deferred(now, job);
    }

    /// The coordinator is not heard any more: obeys orders that a successor has sent already.
    pub(super) fn obey_deferred(&mut self, now: Instant, job: JobId) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        for (at, from, epoch, order) in core::mem::take(&mut held.succession.deferred) {
            if now.since(at) < DEFERRED_MAX {
                self.prepare(now, from, job, epoch, order);
            }
        }
    }

    /// The coordinator dismisses this node. Follows the successor whose order was deferred, whatever its epoch. Returns false if there
    /// is none.
    pub(super) fn follow_deferred(&mut self, now: Instant, job: JobId) -> bool {
        let Some(held) = self.jobs.get_mut(&job) else { return false };
        let Some(issuer) = held.succession.deferred.last().map(|(_, from, ..)| *from) else { return false };
        held.obey(issuer, &mut self.out);
        self.watch(job);
        self.obey_deferred(now, job);
        true
    }

    /// A member left, or SWIM declared it down. The jobs that it coordinated have no coordinator. Those that no node
    /// can take over are dropped, because the next coordinator needs the memory.
    pub fn handle_coordinator_gone(&mut self, now: Instant, node: NodeId, left: bool) {
        if planted::has(Planted::OrphansStay) {
            return;
        }
        self.fetches.retain(|_, fetch| fetch.epoch.issuer != node);
        let jobs: Vec<JobId> =
            self.jobs.iter().filter(|(_, held)| held.epoch.issuer == node).map(|(&job, _)| job).collect();
        for job in jobs {
            let succeeded = self.jobs.get_mut(&job).filter(|held| held.may_be_succeeded(node));
            if let Some(held) = succeeded {
                held.succession.left |= left;
                self.handle_coordinator_silent(now, job, node);
            } else {
                self.drop_job(job);
            }
        }
    }

    /// Reports to all successors that the coordinator is silent.
    fn vote(&mut self, now: Instant, job: JobId) {
        let me = self.me;
        let Some(held) = self.jobs.get_mut(&job).filter(|held| held.succession.silent) else { return };
        let epoch = held.epoch;
        let Some(successors) = held.order().map(|order| order.successors.clone()) else { return };
        let checkpoint = held.succession.mirror.have;
        held.succession.votes.insert(me, Vote { at: now, checkpoint });
        for to in successors.into_iter().filter(|&to| to != me) {
            let say = ToParticipant::CoordinatorSilent { checkpoint };
            self.out.push_back(PartOutput::Message { to, job, epoch, say });
        }
        self.succeed_if_due(now, job);
    }

    /// The vote of another participant, which does not hear the coordinator either.
    pub(super) fn handle_vote(&mut self, now: Instant, from: NodeId, job: JobId, checkpoint: Option<u32>) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        let (Some(order), Some(record)) = (held.order(), &held.succession.record) else { return };
        if record.participants(&order.owners).contains(&from) {
            held.succession.votes.insert(from, Vote { at: now, checkpoint });
            self.succeed_if_due(now, job);
        }
    }

    /// The coordinator publishes its succession record.
    pub(super) fn handle_record(&mut self, now: Instant, job: JobId, record: Box<Record>) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        if held.order().is_some_and(|order| order.owners.len() == record.parts.len()) {
            held.succession.record = Some(record);
            self.mirror(now, job);
        }
    }

    /// The coordinator sends entries of the token log.
    pub(super) fn handle_log(&mut self, job: JobId, news: Vec<(RequestId, Logged)>) {
        if let Some(held) = self.jobs.get_mut(&job) {
            held.succession.log.add(news);
        }
    }

    /// The first [`MIRRORS`] successors copy the coordinator's checkpoint.
    fn mirror(&mut self, now: Instant, job: JobId) {
        let me = self.me;
        let Some(held) = self.jobs.get_mut(&job).filter(|held| held.epoch.issuer != me) else { return };
        let Some(order) = held.order().filter(|order| order.successors.iter().take(MIRRORS).any(|node| *node == me))
        else {
            return;
        };
        let PartWork::Tile(tile) = &order.work else { return };
        let Some(record) = &held.succession.record else { return };
        let ProgramRecord::Steps(steps) = &record.program else { return };
        let mirror = &held.succession.mirror;
        let Some(step) = steps.checkpoint.filter(|step| mirror.have.is_none_or(|have| have < *step)) else { return };
        if mirror.under_way.is_some() || now < mirror.again {
            return;
        }
        let parts = tile.blocks.iter().zip(&record.parts).map(|(block, part)| (*block, part.bytes)).collect();
        let (from, simulation) = (held.epoch.issuer, tile.simulation);
        held.succession.mirror.under_way = Some(step);
        self.out.push_back(PartOutput::Shell(Output::Mirror { job, from, step, parts, simulation }));
    }

    /// The checkpoint was copied, or could not be.
    pub fn handle_mirrored(&mut self, now: Instant, job: JobId, step: u32, result: &Result<(), String>) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        let succession = &mut held.succession;
        if succession.mirror.under_way != Some(step) {
            return;
        }
        succession.mirror.under_way = None;
        match result {
            Ok(()) => succession.mirror.have = Some(step),
            Err(_) => {
                // A newer checkpoint replaced this one while it was copied. That one stays for as long again.
                let newer = succession.record.as_ref().is_some_and(|record| record.program.checkpoint() > Some(step));
                succession.mirror.again = now + if newer { MIRROR_NEWER } else { MIRROR_RETRY };
            }
        }
        self.mirror(now, job);
    }

    /// Timers: votes are repeated, and turns come.
    pub(super) fn succession_wakeup(&mut self, now: Instant, job: JobId) {
        self.vote(now, job);
        self.mirror(now, job);
    }

    /// Takes the job over if it is this node's turn.
    fn succeed_if_due(&mut self, now: Instant, job: JobId) {
        let me = self.me;
        let Some(held) = self.jobs.get_mut(&job).filter(|held| held.epoch.issuer != me) else { return };
        let epoch = held.epoch;
        let Some(order) = held.order().cloned() else { return };
        let succession = &mut held.succession;
        let Some(record) = succession.record.clone().filter(|_| succession.silent) else { return };
        if !order.successors.contains(&me) {
            return;
        }
        let guarded = guarded(&record, &order.owners, epoch.issuer);
        let (wait, vote_max) = match &record.program {
            ProgramRecord::Serve(_) if guarded => (SERVE_SUCCESSION, VOTE_MAX),
            ProgramRecord::Serve(_) => (SERVE_SUCCESSION_COLD, VOTE_MAX_COLD),
            ProgramRecord::Steps(_) => (Duration::ZERO, VOTE_MAX),
        };
        succession.votes.retain(|_, vote| now.since(vote.at) < vote_max);
        let all = record.voters(&order.owners);
        let votes = succession.votes.keys().filter(|node| all.contains(node)).count();
        if 2 * votes <= all.len() && !planted::has(Planted::SuccessionWithoutMajority) {
            succession.majority_since = None;
            return;
        }
        let since = *succession.majority_since.get_or_insert(now);
        let turn = succession.ahead(me, &order.successors, &record, guarded);
        if now.since(since) < wait + SUCCESSION_TURN * turn as u32 {
            return;
        }
        let (checkpoint, log) = (succession.mirror.have, succession.log.clone());
        // Only once: from now on this node's coordinator is responsible for the job.
        succession.heard();
        let inheritance = Takeover { job, epoch, order: Box::new(order), record, checkpoint, log };
        self.out.push_back(PartOutput::Succeed(Box::new(inheritance)));
    }
}

/// Whether each part that a node owns could continue at its standby.
fn guarded(record: &Record, owners: &[NodeId], node: NodeId) -> bool {
    let mut own = owners.iter().zip(&record.parts).filter(|(owner, _)| **owner == node);
    own.all(|(_, part)| part.standby.is_some_and(|standby| standby.ready))
}
