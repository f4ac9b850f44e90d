//! When the coordinator of a simulation falls silent: who may take it over, in which order, and who has to agree.
//!
//! Every participant that no longer hears the coordinator says so to its successors, which are named in the order of each
//! tile. One of them acts only when more than half of the participants say the same, and leaves a turn to each that stands
//! before it. It goes on under an epoch of its own; whoever comes too late is told so (`Stale`). There is no consensus: two
//! that are cut off from each other may both go on for a while, and make the same, since steps are deterministic.
use super::message::TileMessage;
use super::{Tiles, TilesOutput};
use crate::id::{JobId, NodeId};
use crate::limits::{FORMERS_MAX, MIRROR_NEWER, MIRROR_RETRY, SUCCESSION_TURN, VOICE_MAX};
use crate::time::Instant;
use crate::work::steps::{GridSpec, Inheritance, Will, participants};
use alloc::collections::BTreeMap;
use alloc::{boxed::Box, string::String, vec::Vec};
use partitioner::tiles::TILES_MAX;

/// What a participant knows for the case that the coordinator falls silent.
#[derive(Debug, Default)]
pub(super) struct Succession {
    will: Option<Box<Will>>,
    /// This node's own lease on the coordinator ran out.
    silent: bool,
    /// Who said the same, and when last.
    voices: BTreeMap<NodeId, Instant>,
    majority_since: Option<Instant>,
    mirror: Mirror,
}

/// The coordinator's checkpoint, at its first successor.
#[derive(Debug, Default)]
struct Mirror {
    have: Option<u32>,
    under_way: Option<u32>,
    again: Instant,
}

impl Succession {
    /// The coordinator gave a sign of life, or there is another one.
    pub(super) fn heard(&mut self) {
        if self.silent || !self.voices.is_empty() {
            self.silent = false;
            self.voices.clear();
            self.majority_since = None;
        }
    }

    /// A new placement: what was willed before is out of date; the checkpoint is not.
    pub(super) fn replaced(&mut self) {
        self.heard();
        self.will = None;
    }
}

impl Tiles {
    /// This node's lease on a job's coordinator ran out.
    pub fn handle_coordinator_silent(&mut self, now: Instant, job: JobId, node: NodeId) {
        if node == self.me {
            return;
        }
        let Some(held) = self.jobs.get_mut(&job).filter(|held| held.epoch.minter == node) else { return };
        held.succession.silent = true;
        self.voice(now, job);
    }

    /// A member of the mesh has left, or is gone as far as SWIM knows: nobody coordinates its jobs now.
    pub fn handle_coordinator_gone(&mut self, now: Instant, node: NodeId) {
        let jobs: Vec<JobId> =
            self.jobs.iter().filter(|(_, held)| held.epoch.minter == node).map(|(&job, _)| job).collect();
        jobs.into_iter().for_each(|job| self.handle_coordinator_silent(now, job, node));
    }

    /// Says to all who may succeed that the coordinator is silent.
    fn voice(&mut self, now: Instant, job: JobId) {
        let me = self.me;
        let Some(held) = self.jobs.get_mut(&job).filter(|held| held.succession.silent) else { return };
        let epoch = held.epoch;
        let Some(run) = held.runs.values().find(|run| run.epoch == epoch) else { return };
        let heirs = run.order.successors.clone();
        held.succession.voices.insert(me, now);
        for heir in heirs.into_iter().filter(|&heir| heir != me) {
            self.say(heir, job, epoch, TileMessage::Orphaned);
        }
        self.succeed_if_due(now, job);
    }

    /// Another participant does not hear the coordinator either.
    pub(super) fn voiced(&mut self, now: Instant, from: NodeId, job: JobId) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        let Some(run) = held.runs.values().next() else { return };
        let Some(will) = &held.succession.will else { return };
        if participants(&run.order.tiles, will).contains(&from) {
            held.succession.voices.insert(from, now);
            self.succeed_if_due(now, job);
        }
    }

    /// What the coordinator leaves to its successors.
    pub(super) fn willed(&mut self, now: Instant, from: NodeId, job: JobId, will: Box<Will>) {
        let Some(held) = self.jobs.get_mut(&job).filter(|held| held.epoch.minter == from) else { return };
        let tiles = held.runs.values().next().map_or(0, |run| run.order.tiles.len());
        if will.tiles.len() == tiles && tiles <= TILES_MAX {
            held.succession.will = Some(will);
            self.mirror(now, job);
        }
    }

    /// The first successor keeps a copy of the coordinator's checkpoint.
    fn mirror(&mut self, now: Instant, job: JobId) {
        let me = self.me;
        let Some(held) = self.jobs.get_mut(&job).filter(|held| held.epoch.minter != me) else { return };
        let mirror = &mut held.succession.mirror;
        let Some(will) = &held.succession.will else { return };
        let Some(run) = held.runs.values().find(|run| run.order.successors.first() == Some(&me)) else { return };
        let Some(step) = will.checkpoint.filter(|step| mirror.have.is_none_or(|have| have < *step)) else { return };
        if mirror.under_way.is_some() || now < mirror.again {
            return;
        }
        mirror.under_way = Some(step);
        let parts = run.order.tiles.iter().zip(&will.tiles).map(|((_, block), tile)| (*block, tile.bytes)).collect();
        let (from, simulation) = (held.epoch.minter, run.order.simulation);
        self.out.push_back(TilesOutput::Mirror { job, from, step, parts, simulation });
    }

    /// The checkpoint is here, or cannot be had.
    pub fn handle_mirrored(&mut self, now: Instant, job: JobId, step: u32, result: &Result<(), String>) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        let mirror = &mut held.succession.mirror;
        if mirror.under_way != Some(step) {
            return;
        }
        mirror.under_way = None;
        match result {
            Ok(()) => mirror.have = Some(step),
            Err(_) => {
                // A newer one has taken its place while it was copied: that one is there for as long again.
                let newer = held.succession.will.as_ref().is_some_and(|will| will.checkpoint > Some(step));
                mirror.again = now + if newer { MIRROR_NEWER } else { MIRROR_RETRY };
            }
        }
        self.mirror(now, job);
    }

    /// The clock: what was said is said again, turns come.
    pub(super) fn succession_wakeup(&mut self, now: Instant, job: JobId) {
        self.voice(now, job);
        self.mirror(now, job);
    }

    /// Takes the job over if it is this node's turn.
    fn succeed_if_due(&mut self, now: Instant, job: JobId) {
        let me = self.me;
        let Some(held) = self.jobs.get_mut(&job).filter(|held| held.epoch.minter != me) else { return };
        let epoch = held.epoch;
        let succession = &mut held.succession;
        let Some(will) = succession.will.as_ref().filter(|_| succession.silent) else { return };
        let Some(run) = held.runs.values().find(|run| run.epoch == epoch) else { return };
        let Some(turn) = run.order.successors.iter().position(|&heir| heir == me) else { return };
        succession.voices.retain(|_, heard| now.since(*heard) < VOICE_MAX);
        let all = participants(&run.order.tiles, will);
        let voices = succession.voices.keys().filter(|node| all.contains(node)).count();
        if 2 * voices <= all.len() {
            succession.majority_since = None;
            return;
        }
        let since = *succession.majority_since.get_or_insert(now);
        if now.since(since) < SUCCESSION_TURN * turn as u32 {
            return;
        }
        let order = &run.order;
        let inheritance = Inheritance {
            spec: GridSpec {
                job,
                name: order.name.clone(),
                simulation: order.simulation,
                work: order.work.clone(),
                depth: will.depth,
                schedule: order.schedule.clone(),
                tier: will.tier,
                resume: succession.mirror.have,
            },
            epoch,
            depth: order.depth,
            owners: order.tiles.clone(),
            formers: core::iter::once(epoch.minter).chain(order.formers.iter().copied()).take(FORMERS_MAX).collect(),
            will: (**will).clone(),
        };
        // Once: from now on it is for the job to see that it goes on.
        succession.heard();
        self.out.push_back(TilesOutput::Succeed(Box::new(inheritance)));
    }
}
