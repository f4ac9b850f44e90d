//! Questions to the planner and its answers, for both kinds of jobs, so that a caller can have them answered on another thread.
use crate::cost;
use crate::fleet::{DeviceId, Fleet, NodeKey};
use crate::halves::split_for_standbys;
use crate::layers::plan;
use crate::plan::{Options, Plan, PlanError};
use crate::repair::{moved_bytes, repair};
use crate::standby::{Standby, standbys};
use crate::tiles::{self, Block, GridError, GridPlan, GridQuestion, GridWork, TileStandby};
use crate::work::Work;
use alloc::boxed::Box;
use alloc::string::ToString;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// A question to the planner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// Place a model's layers.
    Model(Box<ModelQuestion>),
    /// Choose standbys for the stages of a plan, besides those kept.
    ModelStandbys(Box<ModelStandbysQuestion>),
    /// Partition a grid.
    Grid(Box<GridQuestion>),
    /// Choose standbys for tiles, besides those kept.
    GridStandbys(Box<GridStandbysQuestion>),
}

/// See [`Question::Model`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelQuestion {
    /// The model's costs.
    pub work: Work,
    /// The measured machines and links.
    pub fleet: Fleet,
    /// The planner's options.
    pub options: Options,
    /// A plan to repair by moving the fewest bytes; without one a new plan is made.
    pub repair: Option<Plan>,
    /// The present placement: the answer predicts its time on the same fleet. Without `repair`, it stays unless another one
    /// [pays](pays_to_move).
    pub present: Option<Plan>,
    /// Also choose standbys for the resulting plan.
    pub standbys: bool,
}

/// See [`Question::ModelStandbys`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelStandbysQuestion {
    /// The model's costs.
    pub work: Work,
    /// The measured machines and links.
    pub fleet: Fleet,
    /// The planner's options.
    pub options: Options,
    /// The placement.
    pub plan: Plan,
    /// Stages that already have a standby, with its device.
    pub kept: Vec<(u16, DeviceId)>,
}

/// See [`Question::GridStandbys`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GridStandbysQuestion {
    /// The simulation's costs.
    pub work: GridWork,
    /// The measured machines and links.
    pub fleet: Fleet,
    /// Owner and block of each tile.
    pub owners: Vec<(DeviceId, Block)>,
    /// Steps between two halo exchanges.
    pub depth: u32,
    /// Predicted nanoseconds per step.
    pub step_ns: u64,
    /// Bytes of halos that neighbours retain for a standby: bounds the interval between its snapshots.
    pub halo_bytes: u64,
    /// The shortest interval between snapshots, in nanoseconds.
    pub snapshot_ns_min: u64,
    /// Tiles that already have a standby, with its device.
    pub kept: Vec<(u16, DeviceId)>,
}

/// The planner's answer, of the same kind as the question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To [`Question::Model`].
    Model(Result<Box<ModelAnswer>, PlanError>),
    /// To [`Question::ModelStandbys`].
    ModelStandbys(Vec<Standby>),
    /// To [`Question::Grid`].
    Grid(Result<Box<GridPlan>, GridError>),
    /// To [`Question::GridStandbys`].
    GridStandbys(Vec<TileStandby>),
}

/// A placement of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelAnswer {
    /// The placement.
    pub plan: Plan,
    /// Predicted nanoseconds per token of the present placement, if there is one and the fleet still has its devices.
    pub before_ns: Option<u64>,
    /// Weight bytes that devices hold in the plan but not in the present placement; 0 without a present placement.
    pub moved_bytes: u64,
    /// Standbys of the plan's stages, if requested.
    pub standbys: Vec<Standby>,
}

impl Question {
    /// The answer. It takes milliseconds on large fleets: call it from a thread that may block.
    pub fn answer(&self) -> Answer {
        match self {
            Question::Model(question) => Answer::Model(question.answer().map(Box::new)),
            Question::ModelStandbys(question) => {
                let ModelStandbysQuestion { work, fleet, options, plan, kept } = &**question;
                Answer::ModelStandbys(standbys(plan, work, fleet, options, kept))
            }
            Question::Grid(question) => Answer::Grid(question.answer().map(Box::new)),
            Question::GridStandbys(question) => Answer::GridStandbys(question.answer()),
        }
    }

    /// The answer if the planner failed, with the reason.
    pub fn failed(&self, why: &str) -> Answer {
        match self {
            Question::Model(_) => Answer::Model(Err(PlanError::Invalid(why.into()))),
            Question::ModelStandbys(_) => Answer::ModelStandbys(Vec::new()),
            Question::Grid(_) => Answer::Grid(Err(GridError::Invalid(why.to_string()))),
            Question::GridStandbys(_) => Answer::GridStandbys(Vec::new()),
        }
    }
}

impl ModelQuestion {
    fn answer(&self) -> Result<ModelAnswer, PlanError> {
        let ModelQuestion { work, fleet, options, repair: current, present, standbys: with_standbys } = self;
        let placed = |current: &Option<Plan>| -> Result<Plan, PlanError> {
            let plan = chosen_rows(work, fleet, options.head, |work| match current {
                Some(current) => repair(current, work, fleet, options),
                None => plan(work, fleet, options),
            })?;
            let work = work.with_rows_of(plan.row_bytes());
            Ok(split_for_standbys(plan, &work, fleet, options))
        };
        let mut plan = placed(current)?;
        let before_ns = present.as_ref().and_then(|present| {
            cost::token_ns(&work.with_rows_of(plan.row_bytes()), fleet, options.head, &present.placement())
        });
        if current.is_none()
            && before_ns.is_some_and(|before_ns| !pays_to_move(before_ns, plan.token_ns()))
            && let Ok(kept) = placed(present)
            && present.as_ref().is_some_and(|present| kept.placement() == present.placement())
        {
            plan = kept;
        }
        let work = &work.with_rows_of(plan.row_bytes());
        let moved_bytes = present.as_ref().map_or(0, |present| moved_bytes(present, &plan, work));
        let standbys = if *with_standbys { standbys(&plan, work, fleet, options, &[]) } else { Vec::new() };
        Ok(ModelAnswer { plan, before_ns, moved_bytes, standbys })
    }
}

/// Percent of its time per token that a placement must gain to replace the present one: smaller gains are within measurement
/// noise.
const MOVE_GAIN_PERCENT: u64 = 20;

/// Whether a predicted gain in time per token is worth moving a running job.
#[must_use]
pub fn pays_to_move(before_ns: u64, after_ns: u64) -> bool {
    after_ns.saturating_mul(100) <= before_ns.saturating_mul(100 - MOVE_GAIN_PERCENT)
}

/// The plan with the most precise rows, or with coarser ones if they pay: if a token, or a row of a long prompt, then takes
/// less than [`PAYS`] of the time. Rows that are no bottleneck stay precise.
fn chosen_rows(
    work: &Work,
    fleet: &Fleet,
    head: NodeKey,
    plan: impl Fn(&Work) -> Result<Plan, PlanError>,
) -> Result<Plan, PlanError> {
    let times = |work: &Work, plan: &Plan| {
        let stages = plan.placement();
        Some([cost::token_ns(work, fleet, head, &stages)?, cost::prompt_row_ns(work, fleet, &stages)?])
    };
    let precise = work.with_rows_of(work.activation_bytes);
    let mut best = plan(&precise)?;
    let mut best_times = times(&precise, &best);
    for &bytes in &work.coarser_bytes {
        let work = work.with_rows_of(bytes);
        let next = plan(&work)?;
        let next_times = times(&work, &next);
        let pays = |(next, best): (u64, u64)| u128::from(next) * PAYS[1] < u128::from(best) * PAYS[0];
        if let (Some(next_times), Some(times)) = (next_times, best_times)
            && next_times.into_iter().zip(times).any(pays)
        {
            (best, best_times) = (next, Some(next_times));
        }
    }
    Ok(best)
}

/// Coarser rows pay below this fraction of the time. A prediction is hardly better than this, and coarser rows change tokens.
const PAYS: [u128; 2] = [4, 5];

impl GridStandbysQuestion {
    fn answer(&self) -> Vec<TileStandby> {
        let mut chosen = tiles::standbys(&self.work, &self.owners, self.depth, &self.fleet, &self.kept);
        for standby in &mut chosen {
            let block = &self.owners[usize::from(standby.tile)].1;
            let last = tiles::retained_halo_ns(&self.work, block, self.depth, self.step_ns, self.halo_bytes);
            standby.snapshot_every_ns = standby.snapshot_every_ns.min(last.max(self.snapshot_ns_min));
        }
        chosen
    }
}
