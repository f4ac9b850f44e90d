//! When the coordinator of a job falls silent: who may take it over, in which order, and who has to agree.
//!
//! Every participant that no longer hears the coordinator tells the successors, which are named in the order of each part. One
//! of them acts only when more than half of the participants say the same, and leaves a turn to each that has a newer copy of the
//! checkpoint or is named before it. It goes on under an epoch of its own; one that comes too late learns so (`Stale`). There is no
//! consensus: two that are cut off from each other may both go on for a while, and make the same, since what jobs compute is
//! deterministic.
use super::{Held, HeldJob, Load, PartOutput, Parts};
use crate::id::{Epoch, JobId, NodeId, RequestId};
use crate::limits::{
    DEFERRED_MAX, MIRROR_NEWER, MIRROR_RETRY, MIRRORS, PARTS_MAX, SERVE_SUCCESSION, SERVE_SUCCESSION_COLD,
    SUCCESSION_TURN, VOTE_MAX,
};
use crate::message::ToParticipant;
use crate::output::Output;
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::log::TokenLog;
use crate::work::serve::Logged;
use crate::work::{Inheritance, Order, PartWork, ProgramRecord, Record};
use alloc::collections::BTreeMap;
use alloc::{boxed::Box, string::String, vec::Vec};

/// What a participant knows for the case that the coordinator falls silent.
#[derive(Debug, Default)]
pub(super) struct Succession {
    record: Option<Box<Record>>,
    /// This node's own lease on the coordinator ran out.
    silent: bool,
    /// The coordinator said that it leaves: what it still sends is no sign that it coordinates.
    left: bool,
    /// The participants that do not hear the coordinator either.
    votes: BTreeMap<NodeId, Vote>,
    majority_since: Option<Instant>,
    mirror: Mirror,
    /// The requests of a served model.
    log: TokenLog,
    /// Orders of a successor, which count once the coordinator is silent; at most [`PARTS_MAX`], of one epoch.
    deferred: Vec<(Instant, NodeId, Epoch, Box<Order>)>,
}

#[derive(Clone, Copy, Debug)]
struct Vote {
    /// When it came last.
    at: Instant,
    /// The step of the checkpoint that this participant has a copy of.
    checkpoint: Option<u32>,
}

/// The coordinator's checkpoint, at its first successors.
#[derive(Debug, Default)]
struct Mirror {
    have: Option<u32>,
    under_way: Option<u32>,
    again: Instant,
}

impl Succession {
    /// The coordinator gave a sign of life, or there is another one.
    pub(super) fn heard(&mut self) {
        if !self.left && (self.silent || !self.votes.is_empty()) {
            self.silent = false;
            self.votes.clear();
            self.majority_since = None;
        }
    }

    /// A successor orders a part, and this node still hears the coordinator.
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

    /// A new placement: the record is out of date; the copy of the checkpoint is not.
    pub(super) fn replaced(&mut self) {
        self.left = false;
        self.heard();
        self.record = None;
        self.log = TokenLog::default();
        self.deferred.clear();
    }

    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }

    /// How many successors go before this node: those that say they have a newer copy of the checkpoint, or one as new and are named
    /// before. One that has said nothing yet may have the last checkpoint where this node does not, if it copies them and the
    /// job needs them: some of the coordinator's parts are not guarded.
    fn ahead(&self, me: NodeId, successors: &[NodeId], record: &Record, guarded: bool) -> usize {
        let last = record.program.checkpoint();
        let mine = self.mirror.have;
        let turn = successors.iter().position(|node| *node == me).unwrap_or(successors.len());
        let ahead = |&(position, node): &(usize, &NodeId)| match self.votes.get(node) {
            // No copy is newer than the last checkpoint, whatever is claimed.
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
    /// Whether a successor may still come: there are some, and of a served model enough participants are left for a majority, as far as
    /// this node knows them. What it holds may be needed elsewhere.
    fn may_be_succeeded(&self, coordinator: NodeId) -> bool {
        let Some(order) = self.order().filter(|order| !order.successors.is_empty()) else { return false };
        let Some(record) = &self.succession.record else { return true };
        let all = record.participants(&order.owners);
        let left = all.iter().filter(|node| **node != coordinator).count();
        matches!(record.program, ProgramRecord::Steps(_)) || 2 * left > all.len()
    }

    /// The order of a part under the present epoch. A part that this node could not hold is not its own.
    fn order(&self) -> Option<&Order> {
        let is_held = |held: &&Held| held.epoch == self.epoch && !matches!(held.load, Load::Failed(_));
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

    /// The coordinator is not heard any more: a successor may have sent its orders already.
    pub(super) fn obey_deferred(&mut self, now: Instant, job: JobId) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        for (at, from, epoch, order) in core::mem::take(&mut held.succession.deferred) {
            if now.since(at) < DEFERRED_MAX {
                self.prepare(now, from, job, epoch, order);
            }
        }
    }

    /// A member of the mesh has left, or is gone as far as SWIM knows. Jobs that it coordinated are silent, and those that no
    /// node can take over are dropped: the next coordinator needs the memory.
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

    /// Tells all successors that the coordinator is silent.
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

    /// Another participant does not hear the coordinator either.
    pub(super) fn handle_vote(&mut self, now: Instant, from: NodeId, job: JobId, checkpoint: Option<u32>) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        let (Some(order), Some(record)) = (held.order(), &held.succession.record) else { return };
        if record.participants(&order.owners).contains(&from) {
            held.succession.votes.insert(from, Vote { at: now, checkpoint });
            self.succeed_if_due(now, job);
        }
    }

    /// What the coordinator leaves to its successors.
    pub(super) fn handle_record(&mut self, now: Instant, job: JobId, record: Box<Record>) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        if held.order().is_some_and(|order| order.owners.len() == record.parts.len()) {
            held.succession.record = Some(record);
            self.mirror(now, job);
        }
    }

    /// What happened to the requests of a served model.
    pub(super) fn handle_log(&mut self, job: JobId, news: Vec<(RequestId, Logged)>) {
        if let Some(held) = self.jobs.get_mut(&job) {
            held.succession.log.add(news);
        }
    }

    /// The first [`MIRRORS`] successors keep a copy of the coordinator's checkpoint.
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

    /// The checkpoint is here, or cannot be had.
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
                // A newer one has taken its place while it was copied: that one is there for as long again.
                let newer = succession.record.as_ref().is_some_and(|record| record.program.checkpoint() > Some(step));
                succession.mirror.again = now + if newer { MIRROR_NEWER } else { MIRROR_RETRY };
            }
        }
        self.mirror(now, job);
    }

    /// The clock: votes are sent again, turns come.
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
        succession.votes.retain(|_, vote| now.since(vote.at) < VOTE_MAX);
        let all = record.participants(&order.owners);
        let votes = succession.votes.keys().filter(|node| all.contains(node)).count();
        if 2 * votes <= all.len() && !planted::has(Planted::SuccessionWithoutMajority) {
            succession.majority_since = None;
            return;
        }
        let since = *succession.majority_since.get_or_insert(now);
        let guarded = guarded(&record, &order.owners, epoch.issuer);
        let wait = match &record.program {
            ProgramRecord::Serve(_) if guarded => SERVE_SUCCESSION,
            ProgramRecord::Serve(_) => SERVE_SUCCESSION_COLD,
            ProgramRecord::Steps(_) => Duration::ZERO,
        };
        let turn = succession.ahead(me, &order.successors, &record, guarded);
        if now.since(since) < wait + SUCCESSION_TURN * turn as u32 {
            return;
        }
        let (checkpoint, log) = (succession.mirror.have, succession.log.clone());
        // Once: from now on it is for the job to see that it goes on.
        succession.heard();
        let inheritance = Inheritance { job, epoch, order: Box::new(order), record, checkpoint, log };
        self.out.push_back(PartOutput::Succeed(Box::new(inheritance)));
    }
}

/// Whether each part that a node has could go on at its standby.
fn guarded(record: &Record, owners: &[NodeId], node: NodeId) -> bool {
    let mut own = owners.iter().zip(&record.parts).filter(|(owner, _)| **owner == node);
    own.all(|(_, part)| part.standby.is_some_and(|standby| standby.ready))
}
