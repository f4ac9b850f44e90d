//! The workload of a job, behind the questions of its life cycle: what to plan and to order, where to resume, whether a
//! standby is current, what losses and reports mean, when the job ends, what views show, and what a successor needs.
use super::output::{JobQuestion, Out};
use super::part::{Part, Standby};
use super::rebalance::Moved;
use super::serve::Serve;
use super::steps::Steps;
pub(super) use super::steps::Then;
use super::view::{ProgramView, StandbyView, WhatView};
use crate::id::{Epoch, NodeId, PartId};
use crate::message::ToCoordinator;
use crate::place::PlaceSet;
use crate::time::Instant;
use crate::work::steps::{SaveKind, TileFigures};
use crate::work::{Figures, PartState, PartWork, Placement, ProgramRecord, Resume};
use alloc::{string::String, vec::Vec};
use partitioner::tiles::Block;
use partitioner::{DeviceId, Plan, Tier};

/// What a job computes. A new kind of job is a new variant.
#[derive(Debug)]
pub(super) enum Workload {
    /// Serving a model.
    Serve(Serve),
    /// Stepping a grid.
    Steps(Steps),
}

/// A plan that the job has not adopted yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NewPlan {
    Model(Plan),
    Grid(alloc::boxed::Box<partitioner::tiles::GridPlan>),
}

impl Workload {
    /// The question for a placement. `present`: based on the present placement, otherwise on the last one that was
    /// ready.
    pub(super) fn ask(&mut self, present: bool) -> JobQuestion {
        match self {
            Workload::Serve(serve) => serve.ask(present),
            Workload::Steps(steps) => steps.ask(),
        }
    }

    /// The question for standbys in addition to those `kept`.
    pub(super) fn ask_standbys(&self, parts: &[Part], kept: Vec<(u16, DeviceId)>) -> Option<JobQuestion> {
        match self {
            Workload::Serve(serve) => serve.ask_standbys(kept),
            Workload::Steps(steps) => Some(steps.ask_standbys(parts, kept)),
        }
    }

    /// Whether a part is the same in the plan found as now, so that its standby may stay.
    pub(super) fn is_same_part(&self, found: &NewPlan, part: PartId) -> bool {
        match (self, found) {
            (Workload::Serve(serve), NewPlan::Model(plan)) => serve.is_same_part(plan, part),
            (Workload::Serve(_), NewPlan::Grid(_)) | (Workload::Steps(_), _) => false,
        }
    }

    /// Adopts a plan. Returns its parts.
    pub(super) fn adopt(&mut self, found: NewPlan) -> Vec<Part> {
        match (self, found) {
            (Workload::Serve(serve), NewPlan::Model(plan)) => serve.adopt(plan),
            (Workload::Steps(steps), NewPlan::Grid(plan)) => steps.adopt(&plan),
            (Workload::Serve(_), NewPlan::Grid(_)) | (Workload::Steps(_), NewPlan::Model(_)) => Vec::new(),
        }
    }

    /// The work in a part's order.
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

    /// Predicted nanoseconds per token or step.
    pub(super) fn step_ns(&self) -> u64 {
        match self {
            Workload::Serve(serve) => serve.step_ns(),
            Workload::Steps(steps) => steps.step_ns(),
        }
    }

    /// Nothing is sent until the job runs again.
    pub(super) fn stop(&mut self, out: &mut Out) {
        match self {
            Workload::Serve(serve) => serve.requests.stop(out),
            Workload::Steps(_) => {}
        }
    }

    /// Whether lost parts may continue at their standbys. Otherwise all parts start again.
    pub(super) fn can_promote(&self) -> bool {
        match self {
            Workload::Serve(_) => true,
            Workload::Steps(steps) => steps.continues(),
        }
    }

    /// Lost parts have no standbys: rolls back to the last state that the coordinator has. A model has its token log,
    /// and does not roll back.
    pub(super) fn roll_back(&mut self) {
        match self {
            Workload::Serve(_) => {}
            Workload::Steps(steps) => steps.roll_back(),
        }
    }

    /// These nodes and devices are lost.
    pub(super) fn lost(&mut self, lost: &PlaceSet, out: &mut Out) {
        match self {
            Workload::Serve(_) => {}
            Workload::Steps(steps) => steps.lost(lost, out),
        }
    }

    /// A standby was promoted to a part's owner.
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

    /// An owner is ready.
    pub(super) fn prepared(&mut self, part: PartId, has: &PartState) {
        match self {
            Workload::Serve(_) => {}
            Workload::Steps(steps) => steps.prepared(part, has),
        }
    }

    /// All parts are ready. Returns where each of them resumes; `None` if a part needs something that no node keeps.
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
            Workload::Steps(steps) => steps.begin(out),
        }
    }

    /// Whether a standby that was current can no longer follow.
    pub(super) fn is_left_behind(&self, now: Instant, standby: &Standby) -> bool {
        match self {
            Workload::Serve(serve) => serve.is_left_behind(now, standby),
            Workload::Steps(_) => false,
        }
    }

    /// Whether a standby's state counts as current, so that it can take its part over.
    pub(super) fn is_current(&self, standby: &Standby) -> bool {
        match self {
            Workload::Serve(serve) => serve.is_current(standby),
            Workload::Steps(_) => Steps::is_current(standby),
        }
    }

    /// Whether a standby can take its part over as soon as it has answered its order.
    pub(super) fn ready_when_prepared(&self) -> bool {
        match self {
            Workload::Serve(_) => true,
            Workload::Steps(_) => false,
        }
    }

    /// Whether the parts should have standbys.
    pub(super) fn wants_standbys(&self) -> bool {
        match self {
            Workload::Serve(_) => true,
            Workload::Steps(steps) => steps.wants_standbys(),
        }
    }

    /// Whether the job continues when its coordinator leaves. A served model ends there with its last request.
    pub(super) fn survives_coordinator(&self) -> bool {
        match self {
            Workload::Serve(_) => false,
            Workload::Steps(_) => true,
        }
    }

    /// Whether the nodes that feed a part have to know this standby: they send it copies, or keep what it will need.
    pub(super) fn follows(&self, standby: &Standby) -> bool {
        match self {
            Workload::Serve(_) => standby.tier == Tier::Hot,
            Workload::Steps(_) => true,
        }
    }

    // ---- reports

    /// A participant reports something that only concerns the workload. Returns what follows for the job, if anything.
    ///
    /// # Errors
    /// The node must not be trusted with its part.
    pub(super) fn handle_report(
        &mut self,
        now: Instant,
        from: NodeId,
        (running, epoch): (bool, Epoch),
        say: ToCoordinator,
        parts: &mut [Part],
        out: &mut Out,
    ) -> Result<Option<Then>, String> {
        match (self, say) {
            (Workload::Serve(serve), ToCoordinator::Stage(say)) => serve.handle_report(now, from, epoch, say, out),
            (Workload::Serve(serve), ToCoordinator::Challenged { nonce, result, .. }) => {
                serve.handle_challenged(now, from, nonce, result, parts, out);
            }
            (Workload::Steps(steps), ToCoordinator::Tile(say)) => {
                return steps.handle_report(now, from, (running, epoch), say, parts, out).map(Some);
            }
            (Workload::Serve(_) | Workload::Steps(_), _) => {}
        }
        Ok(None)
    }

    /// A saved state (`Output::Collect`) has been fetched, or could not be.
    pub(super) fn handle_collected(
        &mut self,
        (now, epoch): (Instant, Epoch),
        state: (PartId, u32, SaveKind),
        result: Result<(), String>,
        parts: &[Part],
        out: &mut Out,
    ) {
        match self {
            Workload::Serve(_) => {}
            Workload::Steps(steps) => steps.handle_collected((now, epoch), state, result, parts, out),
        }
    }

    /// The checkpoint (`Output::KeepCheckpoint`) is now the one to roll back to, or could not be made that. Returns
    /// whether it is.
    pub(super) fn handle_kept(&mut self, step: u32, result: Result<(), String>, out: &mut Out) -> bool {
        match self {
            Workload::Serve(_) => false,
            Workload::Steps(steps) => steps.handle_kept(step, result, out),
        }
    }

    /// The question for a better placement right after a checkpoint, when rolling back costs least.
    pub(super) fn ask_better_now(&mut self, now: Instant, running: bool, parts: &[Part]) -> Option<JobQuestion> {
        match self {
            Workload::Serve(_) => None,
            Workload::Steps(steps) => steps.ask_better_now(now, running, parts),
        }
    }

    /// How the job ended, if it ended by itself.
    pub(super) fn take_ending(&mut self) -> Option<Result<(), String>> {
        match self {
            Workload::Serve(_) => None,
            Workload::Steps(steps) => steps.take_ending(),
        }
    }

    /// Timers. Returns the question for a better placement, if it is due.
    pub(super) fn handle_wakeup(
        &mut self,
        now: Instant,
        running: bool,
        parts: &[Part],
        out: &mut Out,
    ) -> Option<JobQuestion> {
        match self {
            Workload::Serve(_) => None,
            Workload::Steps(steps) => {
                steps.handle_wakeup(now, out);
                steps.ask_better(now, running, parts)
            }
        }
    }

    /// When its next timer is due.
    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        match self {
            Workload::Serve(_) => None,
            Workload::Steps(steps) => steps.next_wakeup(),
        }
    }

    /// Asserts what holds between two inputs.
    pub(super) fn assert_invariants(&self) {
        match self {
            Workload::Serve(serve) => serve.requests.assert_invariants(),
            Workload::Steps(_) => {}
        }
    }

    /// Execution figures of its parts.
    pub(super) fn figures(&self) -> Figures {
        match self {
            Workload::Serve(_) => Vec::new(),
            Workload::Steps(steps) => steps.figures(),
        }
    }

    /// The served model, if the job serves one.
    pub(super) fn serve(&mut self) -> Option<&mut Serve> {
        match self {
            Workload::Serve(serve) => Some(serve),
            Workload::Steps(_) => None,
        }
    }

    // ---- views

    pub(super) fn view(&self, moved: Option<Moved>) -> ProgramView {
        match self {
            Workload::Serve(serve) => {
                let (running, waiting) = serve.requests.counts();
                let content = serve.model.content;
                let (context, sequences) = (serve.model.work.context, serve.model.work.sequences);
                let (pages, resting) = (serve.requests.pages(), serve.requests.resting().collect());
                let (drafts, model_drafts) = (serve.requests.drafts(), serve.requests.model_drafts());
                ProgramView::Serve {
                    content,
                    moved,
                    context,
                    sequences,
                    row: serve.row(),
                    pages,
                    resting,
                    drafts,
                    model_drafts,
                    running,
                    waiting,
                }
            }
            Workload::Steps(steps) => ProgramView::Steps {
                step: steps.step(),
                steps: steps.spec.schedule.steps,
                depth: steps.depth(),
                checkpoint: steps.checkpoint(),
            },
        }
    }

    pub(super) fn part_view(&self, part: PartId) -> WhatView {
        match self {
            Workload::Serve(serve) => {
                let stage = serve.plan().map(Plan::stages).and_then(|stages| stages.get(part.index()));
                WhatView::Stage(stage.map(|stage| stage.layers.clone()).unwrap_or_default())
            }
            Workload::Steps(steps) => {
                let none = (Block { from: [0; 3], to: [0; 3] }, 0, TileFigures::default());
                let (block, step, figures) = steps.tile(part).unwrap_or(none);
                WhatView::Tile { block, step, figures }
            }
        }
    }

    /// Share of the time that a part computed of late, of 1000, if it is measured.
    pub(super) fn busy(&self, part: PartId) -> Option<u32> {
        match self {
            Workload::Serve(serve) => serve.requests.occupancy(part),
            Workload::Steps(_) => None,
        }
    }

    pub(super) fn standby_view(&self, part: PartId, standby: Option<&Standby>) -> Option<StandbyView> {
        let current = standby.is_some_and(|standby| self.is_current(standby));
        let resident = standby.is_some_and(|standby| standby.ready);
        let (node, device) = (standby.map(|standby| standby.node), standby.map_or(0, |standby| standby.device));
        match self {
            Workload::Serve(serve) => {
                let known = serve.tiers().get(&part).copied();
                let (tier, stall_ns) = known.unwrap_or((Tier::Cold, None));
                let tier = match (node, tier) {
                    (Some(_), _) if current => Tier::Hot,
                    (Some(_), _) if resident => Tier::Warm,
                    (None, Tier::None) => Tier::None,
                    (Some(_), _) | (None, Tier::Hot | Tier::Warm | Tier::Cold) => Tier::Cold,
                };
                let shown = known.is_some() || node.is_some();
                shown.then_some(StandbyView { node, device, tier, resident, current, step: None, stall_ns })
            }
            Workload::Steps(_) => standby.map(|standby| {
                let step = standby.ready.then(|| standby.at(0));
                StandbyView { node, device, tier: standby.tier, resident, current, step, stall_ns: None }
            }),
        }
    }

    // ---- succession

    /// Its state in the succession record.
    pub(super) fn record(&self) -> ProgramRecord {
        match self {
            Workload::Serve(serve) => serve.record(),
            Workload::Steps(steps) => steps.record(),
        }
    }
}
