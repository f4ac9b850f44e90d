//! Repair of a plan after the fleet changed: moves the fewest weight bytes, then takes the least time per token.
//!
//! The search is the same as for a new plan. Only the scores differ: the bytes that a device does not hold yet rank above the
//! nanoseconds. Next: `explain.rs`.
use crate::explain::{self, Verdict};
use crate::fleet::{Device, DeviceId, Fleet};
use crate::layers::search::{self, EXACT_DEVICES, Guide, Problem, Score, search};
use crate::layers::{self, Pool};
use crate::plan::{Options, Plan, PlanError};
use crate::work::Work;
use alloc::{boxed::Box, collections::BTreeSet, format, vec::Vec};
use core::cmp::Reverse;
use core::ops::Range;

/// Position of the bytes in a score: above the nanoseconds and tie bits of [`Pool::problem`].
const BYTES_SHIFT: u32 = 64;

/// Spare devices considered when the survivors alone are too many for an exact search.
const SPARES: usize = 4;

/// The valid plan that moves the fewest bytes from `current` to this fleet, whatever the goal; ties go to the least time per
/// token. Nodes of `current` may be missing, draining or smaller, and the fleet may have new nodes.
///
/// New nodes are used only if something must move; [`plan`](crate::plan()) plans without regard to the present placement.
///
/// # Errors
/// As for [`plan`](crate::plan()); [`PlanError::Invalid`] also when `current` is of a model with another layer count.
pub fn repair(current: &Plan, work: &Work, fleet: &Fleet, options: &Options) -> Result<Plan, PlanError> {
    layers::validate(work, fleet)?;
    if current.layers() as usize != work.layers.len() {
        let reason = format!("the plan to repair has {} layers, the job {}", current.layers(), work.layers.len());
        return Err(PlanError::Invalid(Box::from(reason)));
    }
    let mut pool = Pool::new(work, fleet, options);
    pool.retain(&shortlist(&pool, current));
    if pool.candidates.is_empty() {
        return Err(pool.shortage(0));
    }
    let outcome = search(&problem(&pool, current, work));
    let Some((_, stages)) = outcome.best else {
        // Nothing fits on the survivors and the best spares: plan on the whole fleet.
        return layers::plan(work, fleet, &Options { losses: false, ..options.clone() });
    };
    let plan = Plan::new(&pool.name(&stages), work, fleet, options).map_err(layers::unsound)?;
    let exact = outcome.exact && !pool.shortlisted();
    let unused = pool.candidates.iter().map(|device| (device.id, Verdict::MovesMore));
    let verdicts: Vec<_> = pool.verdicts(&[], exact).into_iter().chain(unused).collect();
    let reasons = explain::reasons(work, fleet, options, &plan, &verdicts);
    Ok(plan.explained(exact, reasons))
}

/// Weight bytes that devices must load to change from one plan to the other.
pub fn moved_bytes(current: &Plan, next: &Plan, work: &Work) -> u64 {
    let moved = next.stages().iter().map(|stage| {
        let held = DeviceShare::by(current, stage.device, work);
        let blocks: u64 = stage.layers.clone().map(|layer| held.block_moved(work, layer as usize)).sum();
        let ends = match (stage.layers.start == 0, stage.layers.end as usize == work.layers.len()) {
            (true, true) => held.both_moved(work),
            (true, false) => held.embed_moved(work),
            (false, true) => held.head_moved(work),
            (false, false) => 0,
        };
        blocks + ends
    });
    moved.sum()
}

/// The survivors and the fastest spares: up to the limit of an exact search, but at least [`SPARES`] spares.
fn shortlist(pool: &Pool<'_>, current: &Plan) -> BTreeSet<DeviceId> {
    let (survivors, mut spares): (Vec<&Device>, Vec<&Device>) =
        pool.candidates.iter().partition(|device| current.stage_of(device.id).is_some());
    spares.sort_by_key(|device| (Reverse(device.bytes_per_second), device.id));
    let room = EXACT_DEVICES.saturating_sub(survivors.len()).max(SPARES);
    survivors.iter().chain(spares.iter().take(room)).map(|device| device.id).collect()
}

/// The time problem, with the bytes to move above the time.
fn problem<'a>(pool: &'a Pool<'_>, current: &Plan, work: &Work) -> Problem<'a> {
    let mut problem = pool.problem(None);
    problem.guide = Guide::Cheapest;
    problem.budget = search::BUDGET / 4; // loss plans search once per stage
    for (device, costs) in pool.candidates.iter().zip(&mut problem.devices) {
        let held = DeviceShare::by(current, device.id, work);
        let mut moved: Score = 0;
        for layer in 0..work.layers.len() {
            moved += Score::from(held.block_moved(work, layer)) << BYTES_SHIFT;
            costs.before[layer + 1] += moved;
        }
        costs.first += Score::from(held.embed_moved(work)) << BYTES_SHIFT;
        costs.last += Score::from(held.head_moved(work)) << BYTES_SHIFT;
        costs.whole += Score::from(held.both_moved(work)) << BYTES_SHIFT;
    }
    problem
}

/// What a device holds under a plan.
struct DeviceShare {
    layers: Vec<Range<u32>>,
    embed: bool,
    head: bool,
}

impl DeviceShare {
    fn by(plan: &Plan, device: DeviceId, work: &Work) -> Self {
        let layers: Vec<Range<u32>> = plan.stages_of(device).map(|stage| stage.layers.clone()).collect();
        let embed = layers.iter().any(|layers| layers.start == 0);
        let head = layers.iter().any(|layers| layers.end as usize == work.layers.len());
        Self { layers, embed, head }
    }

    fn block_moved(&self, work: &Work, layer: usize) -> u64 {
        if self.layers.iter().any(|layers| layers.contains(&(layer as u32))) {
            0
        } else {
            work.layers[layer].weight_bytes
        }
    }

    /// A device that holds a tied output head also holds the embedding.
    fn embed_moved(&self, work: &Work) -> u64 {
        let there = if self.head && work.tied { work.head_bytes } else { 0 };
        if self.embed { 0 } else { work.embed_bytes.saturating_sub(there) }
    }

    fn head_moved(&self, work: &Work) -> u64 {
        let there = if self.embed && work.tied { work.embed_bytes } else { 0 };
        if self.head { 0 } else { work.head_bytes.saturating_sub(there) }
    }

    /// Both ends on one device, which holds a tied matrix once.
    fn both_moved(&self, work: &Work) -> u64 {
        if work.tied && !self.embed && !self.head {
            work.embed_bytes.max(work.head_bytes)
        } else {
            self.embed_moved(work) + self.head_moved(work)
        }
    }
}
