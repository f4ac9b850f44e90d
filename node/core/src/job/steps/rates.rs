//! Rebalancing of a grid: measured rates of the job's nodes with its rule, and a better partition where it pays off.
//!
//! Plans assume what nodes measured when they started. Running tiles show how fast the rule is on each node beside
//! other work. Links change, and nodes join. The coordinator adopts a better partition if the gain soon makes up for
//! rolling back to the last checkpoint (early on: to the initial state).
use super::Steps;
use crate::job::output::JobQuestion;
use crate::job::part::Part;
use crate::limits::{RATES_EVERY, RATES_SETTLE, RATES_WARM_UP, RATES_WINDOW};
use crate::place::PlaceSet;
use crate::time::{Duration, Instant};
use crate::work::PredictedChange;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use partitioner::DeviceId;
use partitioner::tiles::{GridPlan, RuleRates};

/// Measured rates of a job's devices.
#[derive(Debug, Default)]
pub(super) struct Rates {
    paces: BTreeMap<DeviceId, u32>,
    /// Steps completed and nanoseconds computed by each tile when the measurement began.
    marks: Vec<(u32, u64)>,
    marked_at: Instant,
    at: Option<Instant>,
    placed_at: Instant,
    loading: Duration,
    /// The present partition stays until then.
    not_before: Instant,
    /// Number of rebalances so far.
    times: u32,
    /// The mesh changed after the present partition was planned.
    changed: bool,
    /// Nodes and devices that the job lost. Rebalancing does not move it back to them.
    lost: PlaceSet,
}

impl Rates {
    /// A new placement begins.
    pub(super) fn placed(&mut self, now: Instant) {
        self.marks.clear();
        (self.at, self.placed_at) = (None, now);
    }

    /// A plan is asked for on the present mesh.
    pub(super) fn planned(&mut self) {
        self.changed = false;
    }

    /// A node joined or left, or its capacity changed.
    pub(super) fn fleet_changed(&mut self, now: Instant) {
        self.changed = true;
        // Links are measured first, and several nodes may join together.
        self.at = self.at.or(Some(now + RATES_SETTLE));
    }

    pub(super) fn lost(&mut self, lost: &PlaceSet) {
        self.lost.extend(lost.iter());
    }

    /// The tiles run. `loaded`: they were loaded for this placement. The first steps are slower than later ones, so the
    /// measurement waits.
    pub(super) fn running(&mut self, now: Instant, loaded: bool) {
        if loaded {
            self.loading = now.since(self.placed_at);
        }
        self.at = Some(now + RATES_WARM_UP);
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        self.at.map(|at| (at, "job: a better partition may exist"))
    }

    /// Rates for the planner. Nodes without a measurement get the mean of the others.
    pub(super) fn paces(&self) -> RuleRates {
        let sum: u64 = self.paces.values().map(|&pace| u64::from(pace)).sum();
        let others = sum.checked_div(self.paces.len() as u64).map_or(RuleRates::AS_PREDICTED, |mean| mean as u32);
        RuleRates { measured: self.paces.iter().map(|(&device, &pace)| (device, pace)).collect(), unmeasured: others }
    }
}

impl Steps {
    /// The mesh changed.
    pub(in crate::job) fn fleet_changed(&mut self, now: Instant) {
        self.rates.fleet_changed(now);
    }

    /// The question for a better partition, if it is due.
    pub(in crate::job) fn ask_better(&mut self, now: Instant, running: bool, parts: &[Part]) -> Option<JobQuestion> {
        if self.rates.at.is_none_or(|at| now < at) {
            return None;
        }
        self.rates.at = None;
        let alone = self.tiles.len() < 2 && !self.rates.changed;
        if !running || alone || self.computed {
            return None;
        }
        if self.rates.marks.is_empty() {
            let begun = self.tiles.iter().all(|tile| tile.figures.compute_ns > 0);
            if begun {
                self.mark(now);
            }
            let wait = if begun { RATES_WINDOW } else { RATES_WARM_UP };
            self.rates.at = Some(now + wait);
            return None;
        }
        if !self.measure(parts) {
            // Large tiles complete few steps.
            self.rates.at = Some(now + RATES_WINDOW);
            return None;
        }
        let measured = parts.iter().all(|part| self.rates.paces.contains_key(&part.place()));
        measured.then(|| self.what(Some((self.owners(parts), self.depth))))
    }

    /// The same right after a checkpoint, when rolling back costs least.
    pub(in crate::job) fn ask_better_now(
        &mut self,
        now: Instant,
        running: bool,
        parts: &[Part],
    ) -> Option<JobQuestion> {
        let measured = !self.rates.marks.is_empty() && now.since(self.rates.marked_at) >= RATES_WINDOW;
        if !measured || self.rates.at.is_some_and(|at| now >= at) || now < self.rates.not_before {
            return None;
        }
        self.rates.at = Some(now);
        let asks = self.ask_better(now, running, parts);
        if asks.is_some() {
            self.mark(now);
        }
        asks
    }

    /// Nodes that a better partition must not use, because the job lost them.
    pub(in crate::job) fn distrusted(&self) -> PlaceSet {
        self.rates.lost.clone()
    }

    fn mark(&mut self, now: Instant) {
        self.rates.marks = self.tiles.iter().map(|tile| (tile.step, tile.figures.compute_ns)).collect();
        self.rates.marked_at = now;
    }

    /// Measures the rate of each tile's node since the marks. Returns false if a tile has completed too few steps.
    fn measure(&mut self, parts: &[Part]) -> bool {
        let mut paces = Vec::new();
        for ((tile, part), &(step, spent)) in self.tiles.iter().zip(parts).zip(&self.rates.marks) {
            let steps = tile.step.saturating_sub(step);
            let took = tile.figures.compute_ns.saturating_sub(spent) / u64::from(steps.max(1));
            if steps < self.depth.max(2) * 2 || took == 0 {
                return false;
            }
            if tile.rate == 0 {
                // A promoted standby: the tile was not planned for this node.
                continue;
            }
            let pace = u128::from(tile.rate) * u128::from(part.step_ns) / u128::from(took);
            paces.push((part.place(), u32::try_from(pace).unwrap_or(u32::MAX).clamp(PACE_LEAST, PACE_MOST)));
        }
        self.rates.paces.extend(paces);
        true
    }

    /// Predicted effect of a better partition, if it is worth a rollback.
    pub(in crate::job) fn gains(&mut self, now: Instant, plan: &GridPlan, parts: &[Part]) -> Option<PredictedChange> {
        let before = plan.before_ns().filter(|_| !self.computed)?;
        let after = plan.step_ns();
        let takes_part = |device: DeviceId| parts.iter().any(|part| part.place() == device);
        let joins = plan.tiles().iter().any(|tile| !takes_part(tile.device));
        let percent = if joins { GAIN_JOINS_PERCENT } else { GAIN_PERCENT };
        if after.saturating_mul(100) > before.saturating_mul(100 - percent) {
            return None;
        }
        let steps = |count: u32, ns: u64| u128::from(count) * u128::from(ns);
        let gained = steps(self.spec.schedule.steps.saturating_sub(self.step()), before - after);
        let again = steps(self.step().saturating_sub(self.checkpoint.unwrap_or(0)), before);
        if gained < GAIN_TIMES * (again + self.rates.loading.as_nanos()) {
            return None;
        }
        let back = self.checkpoint.unwrap_or(0);
        if now < self.rates.not_before || self.collected.waits_for_outputs(back) {
            // Frames from before the checkpoint that are still being fetched would not be computed again.
            self.rates.at = Some(self.rates.not_before.max(now + RATES_WINDOW));
            return None;
        }
        self.rates.not_before = now + RATES_EVERY * (1 << self.rates.times.min(6));
        self.rates.times += 1;
        self.rates.planned();
        Some(PredictedChange { before_ns: before, after_ns: after, bytes: 0 })
    }
}

/// Least gain in percent of the step time. Measurements are no more accurate than that.
const GAIN_PERCENT: u64 = 8;
/// Least gain in percent if new nodes take part: their rates with this rule are not measured.
const GAIN_JOINS_PERCENT: u64 = 20;
/// The gain until the end must be this many times the time to replay and to load.
const GAIN_TIMES: u128 = 3;
/// Bounds of a measured rate, in thousandths of the predicted one.
const PACE_LEAST: u32 = 10;
/// See `PACE_LEAST`.
const PACE_MOST: u32 = 100_000;
