//! The program of a job, and the questions that its life cycle asks of it: what to plan, what a part is ordered, where to go on,
//! whether a standby is current, what a loss means, what a move gains, and when it is over.
use super::output::{Out, What};
use super::part::{Part, Standby};
use super::serve::Serve;
use super::steps::Steps;
use crate::id::{Epoch, NodeId, PartId};
use crate::time::Instant;
use crate::work::{Has, PartWork, Placement, ProgramRecord, Resume};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use partitioner::{DeviceId, Plan};

/// What a job computes. A new kind of job is a new variant.
#[derive(Debug)]
pub(super) enum Workload {
    /// It serves a model.
    Serve(Serve),
    /// It steps a grid.
    Steps(Steps),
}

/// A placement that the planner found and the job has not taken yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Model(Plan),
    Grid(alloc::boxed::Box<partitioner::tiles::GridPlan>),
}

impl Workload {
    /// The question for a placement. `present`: one that goes on from what is there, else from what was ready last.
    pub(super) fn ask(&mut self, present: bool) -> What {
        match self {
            Workload::Serve(serve) => serve.ask(present),
            Workload::Steps(steps) => steps.ask(),
        }
    }

    /// The question for standbys beside those kept.
    pub(super) fn ask_standbys(&self, parts: &[Part], kept: Vec<(u16, DeviceId)>) -> Option<What> {
        match self {
            Workload::Serve(serve) => serve.ask_standbys(kept),
            Workload::Steps(steps) => Some(steps.ask_standbys(parts, kept)),
        }
    }

    /// Whether a part of the placement found is what the part of this number is now, so that its standby may stay.
    pub(super) fn is_same_part(&self, found: &Found, part: PartId) -> bool {
        match (self, found) {
            (Workload::Serve(serve), Found::Model(plan)) => serve.is_same_part(plan, part),
            (Workload::Serve(_), Found::Grid(_)) | (Workload::Steps(_), _) => false,
        }
    }

    /// Takes a placement. Returns its parts; none if it has none.
    pub(super) fn adopt(&mut self, found: Found) -> Vec<Part> {
        match (self, found) {
            (Workload::Serve(serve), Found::Model(plan)) => serve.adopt(plan),
            (Workload::Steps(steps), Found::Grid(plan)) => steps.adopt(&plan),
            (Workload::Serve(_), Found::Grid(_)) | (Workload::Steps(_), Found::Model(_)) => Vec::new(),
        }
    }

    /// What a part is ordered to be.
    pub(super) fn work(&self, part: PartId, step_ns: u64, standby: Option<&Standby>) -> PartWork {
        match self {
            Workload::Serve(serve) => serve.work(),
            Workload::Steps(steps) => steps.work(part, step_ns, standby),
        }
    }

    pub(super) fn placement(&self, parts: &[Part]) -> Placement {
        match self {
            Workload::Serve(serve) => serve.placement(),
            Workload::Steps(steps) => steps.placement(parts),
        }
    }

    /// Predicted nanoseconds of a token or of a step.
    pub(super) fn step_ns(&self) -> u64 {
        match self {
            Workload::Serve(serve) => serve.step_ns(),
            Workload::Steps(steps) => steps.step_ns(),
        }
    }

    /// Nothing is sent until the job runs again.
    pub(super) fn stop(&mut self) {
        match self {
            Workload::Serve(serve) => serve.requests.stop(),
            Workload::Steps(_) => {}
        }
    }

    /// Whether parts whose owners are lost may go on at their standbys. Else all parts start again.
    pub(super) fn continues(&self) -> bool {
        match self {
            Workload::Serve(_) => true,
            Workload::Steps(steps) => steps.continues(),
        }
    }

    /// The parts that are lost have no standbys: what has to be done once more is what was done since the last state that the
    /// coordinator has. A model's state is its token log.
    pub(super) fn roll_back(&mut self) {
        match self {
            Workload::Serve(_) => {}
            Workload::Steps(steps) => steps.roll_back(),
        }
    }

    /// These nodes are lost.
    pub(super) fn lost(&mut self, nodes: &BTreeSet<NodeId>, out: &mut Out) {
        match self {
            Workload::Serve(_) => {}
            Workload::Steps(steps) => steps.lost(nodes, out),
        }
    }

    /// A standby has become the owner of a part.
    pub(super) fn promoted(&mut self, part: PartId, standby: &Standby) {
        match self {
            Workload::Serve(serve) => serve.promoted(part, standby),
            Workload::Steps(steps) => steps.promoted(part),
        }
    }

    /// The job has a new placement.
    pub(super) fn placed(&mut self, now: Instant) {
        match self {
            Workload::Serve(_) => {}
            Workload::Steps(steps) => steps.placed(now),
        }
    }

    /// An owner has its part.
    pub(super) fn prepared(&mut self, part: PartId, has: &Has) {
        match self {
            Workload::Serve(_) => {}
            Workload::Steps(steps) => steps.prepared(part, has),
        }
    }

    /// All parts are ready: of each, where it goes on; none if one lacks what no other keeps.
    pub(super) fn resume(&mut self, now: Instant, epoch: Epoch, parts: &[Part]) -> Option<Vec<Resume>> {
        match self {
            Workload::Serve(serve) => Some(serve.resume(now, epoch, parts)),
            Workload::Steps(steps) => steps.resume(now, parts),
        }
    }

    /// All parts run.
    pub(super) fn begin(&mut self, now: Instant, parts: &[Part], out: &mut Out) {
        match self {
            Workload::Serve(serve) => serve.begin(now, parts, out),
            Workload::Steps(_) => {}
        }
    }

    /// Whether a standby can take its part over with nothing done again.
    pub(super) fn is_current(&self, standby: &Standby) -> bool {
        match self {
            Workload::Serve(serve) => serve.is_current(standby),
            Workload::Steps(_) => Steps::is_current(standby),
        }
    }

    /// Whether a standby that has answered can take its part over.
    pub(super) fn ready_when_prepared(&self) -> bool {
        match self {
            Workload::Serve(_) => true,
            Workload::Steps(_) => false,
        }
    }

    /// Whether the parts are to have standbys.
    pub(super) fn wants_standbys(&self) -> bool {
        match self {
            Workload::Serve(_) => true,
            Workload::Steps(steps) => steps.wants_standbys(),
        }
    }

    pub(super) fn record(&self) -> ProgramRecord {
        match self {
            Workload::Serve(serve) => serve.record(),
            Workload::Steps(steps) => steps.record(),
        }
    }
}
