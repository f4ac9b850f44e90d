//! How fast a job's nodes turn out to be with its rule, and a better cut where that pays.
//!
//! Plans count with what nodes are measured at when they start. Once tiles run it is known what they make of it and what else
//! goes on there; links change, and nodes join. A better cut is taken where rolling back to the last checkpoint (early on: to
//! the beginning) is soon made up for.
use super::Steps;
use crate::id::NodeId;
use crate::job::output::What;
use crate::job::part::Part;
use crate::limits::{RATES_EVERY, RATES_SETTLES, RATES_WARM, RATES_WINDOW};
use crate::time::{Duration, Instant};
use crate::work::Change;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use partitioner::tiles::{GridPlan, Paces};

/// What is known of the rates of a job's nodes.
#[derive(Debug, Default)]
pub(super) struct Rates {
    paces: BTreeMap<NodeId, u32>,
    /// Steps made and nanoseconds spent by each tile when it began to be measured.
    marks: Vec<(u32, u64)>,
    marked_at: Instant,
    at: Option<Instant>,
    placed_at: Instant,
    loading: Duration,
    /// The present cut stays until then.
    not_before: Instant,
    /// How often it was changed.
    times: u32,
    /// The mesh has changed since the present cut was made.
    changed: bool,
    /// Nodes that were lost under this job: it does not move back to them of its own accord.
    lost: BTreeSet<NodeId>,
}

impl Rates {
    /// A new placement is asked for.
    pub(super) fn placed(&mut self, now: Instant) {
        self.marks.clear();
        (self.at, self.placed_at) = (None, now);
    }

    /// A plan is made of the mesh as it is now.
    pub(super) fn planned(&mut self) {
        self.changed = false;
    }

    /// A node joined, left, or can do more or less than before.
    pub(super) fn fleet_changed(&mut self, now: Instant) {
        self.changed = true;
        // Links are measured first, and several may come at once.
        self.at = self.at.or(Some(now + RATES_SETTLES));
    }

    pub(super) fn lost(&mut self, nodes: &BTreeSet<NodeId>) {
        self.lost.extend(nodes);
    }

    /// It runs, with tiles that were `loaded` for it or were there: first steps are slower than others.
    pub(super) fn running(&mut self, now: Instant, loaded: bool) {
        if loaded {
            self.loading = now.since(self.placed_at);
        }
        self.at = Some(now + RATES_WARM);
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        self.at.map(|at| (at, "job: is there a better cut"))
    }

    /// What plans are to count with. Nodes of which nothing is known yet are taken for what the others are on average.
    pub(super) fn paces(&self) -> Paces {
        let sum: u64 = self.paces.values().map(|&pace| u64::from(pace)).sum();
        let others = sum.checked_div(self.paces.len() as u64).map_or(Paces::AS_PREDICTED, |mean| mean as u32);
        Paces { measured: self.paces.iter().map(|(&node, &pace)| (node.into(), pace)).collect(), others }
    }
}

impl Steps {
    /// The mesh has changed.
    pub(in crate::job) fn fleet_changed(&mut self, now: Instant) {
        self.rates.fleet_changed(now);
    }

    /// The question for a better cut, if it is time to ask it.
    pub(in crate::job) fn ask_better(&mut self, now: Instant, running: bool, parts: &[Part]) -> Option<What> {
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
            let wait = if begun { RATES_WINDOW } else { RATES_WARM };
            self.rates.at = Some(now + wait);
            return None;
        }
        if !self.measure(parts) {
            // Large tiles make few steps.
            self.rates.at = Some(now + RATES_WINDOW);
            return None;
        }
        let measured = parts.iter().all(|part| self.rates.paces.contains_key(&part.owner));
        measured.then(|| self.what(Some((self.owners(parts), self.depth))))
    }

    /// The same, when a checkpoint is on disk: rolling back to it costs least now.
    pub(in crate::job) fn ask_better_now(&mut self, now: Instant, running: bool, parts: &[Part]) -> Option<What> {
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

    /// Nodes that a better cut must not use: the job does not move back to those it lost of its own accord.
    pub(in crate::job) fn distrusted(&self) -> BTreeSet<NodeId> {
        self.rates.lost.clone()
    }

    fn mark(&mut self, now: Instant) {
        self.rates.marks = self.tiles.iter().map(|tile| (tile.step, tile.figures.compute_ns)).collect();
        self.rates.marked_at = now;
    }

    /// The rate of each tile's node since the marks, if all have made enough steps.
    fn measure(&mut self, parts: &[Part]) -> bool {
        let mut paces = Vec::new();
        for ((tile, part), &(step, spent)) in self.tiles.iter().zip(parts).zip(&self.rates.marks) {
            let steps = tile.step.saturating_sub(step);
            let took = tile.figures.compute_ns.saturating_sub(spent) / u64::from(steps.max(1));
            if steps < self.depth.max(2) * 2 || took == 0 {
                return false;
            }
            if tile.rate == 0 {
                // A standby that took the tile over: it was not planned for that node.
                continue;
            }
            let pace = u128::from(tile.rate) * u128::from(part.step_ns) / u128::from(took);
            paces.push((part.owner, u32::try_from(pace).unwrap_or(u32::MAX).clamp(PACE_LEAST, PACE_MOST)));
        }
        self.rates.paces.extend(paces);
        true
    }

    /// What the best cut there is now gains, if it is worth rolling back for.
    pub(in crate::job) fn gains(&mut self, now: Instant, plan: &GridPlan, parts: &[Part]) -> Option<Change> {
        let before = plan.before_ns().filter(|_| !self.computed)?;
        let after = plan.step_ns();
        let takes_part = |node: NodeId| parts.iter().any(|part| part.owner == node);
        let joins = plan.tiles().iter().any(|tile| !takes_part(tile.device.into()));
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
            // Frames that are on their way would not come again.
            self.rates.at = Some(self.rates.not_before.max(now + RATES_WINDOW));
            return None;
        }
        self.rates.not_before = now + RATES_EVERY * (1 << self.rates.times.min(6));
        self.rates.times += 1;
        self.rates.planned();
        Some(Change { before_ns: before, after_ns: after, bytes: 0 })
    }
}

/// Percent that a step has to get shorter: measurements are not better than that.
const GAIN_PERCENT: u64 = 8;
/// And where nodes take part that did not: what they can do is not measured with this rule.
const GAIN_JOINS_PERCENT: u64 = 20;
/// How many times what is replayed and loaded has to be gained until the end.
const GAIN_TIMES: u128 = 3;
/// Thousandths of the predicted speed that are believed.
const PACE_LEAST: u32 = 10;
/// See `PACE_LEAST`.
const PACE_MOST: u32 = 100_000;
