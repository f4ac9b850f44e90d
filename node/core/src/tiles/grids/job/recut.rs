//! Whether the tiles lie well: how fast their nodes turn out to be with this rule, and a better cut where that pays.
//!
//! Plans count with what nodes are measured at when they start. Once tiles run it is known what they make of it and what else
//! goes on there; links change, and nodes join. A better cut is taken where going back to the last checkpoint (early on: to
//! the beginning) is soon made up for.
use super::super::GridOutput;
use super::{GridJob, Ids, Phase};
use crate::id::NodeId;
use crate::limits::{RECUT_EVERY, RECUT_SETTLES, RECUT_WARM, RECUT_WINDOW};
use crate::time::{Duration, Instant};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{boxed::Box, vec::Vec};
use partitioner::tiles::{GridError, GridPlan, Paces};

/// What is known of the pace of a job's nodes.
#[derive(Debug, Default)]
pub(super) struct Recut {
    paces: BTreeMap<NodeId, u32>,
    /// Steps made and nanoseconds spent by each tile when it began to be measured.
    marks: Vec<(u32, u64)>,
    marked_at: Instant,
    at: Option<Instant>,
    token: Option<u64>,
    placed_at: Instant,
    loading: Duration,
    /// The present cut stays until then.
    not_before: Instant,
    /// So often it was changed.
    times: u32,
    /// The mesh has changed since the present cut was made.
    changed: bool,
    /// Nodes that were lost under this job: it does not move back to them of its own accord.
    lost: BTreeSet<NodeId>,
}

impl Recut {
    /// A new placement is asked for.
    pub(super) fn placed(&mut self, now: Instant) {
        self.marks.clear();
        (self.at, self.token, self.placed_at) = (None, None, now);
    }

    /// The mesh is looked at as it is now.
    pub(super) fn planned(&mut self) {
        self.changed = false;
    }

    /// Somebody joined, left, or can do more or less than before.
    pub(super) fn fleet_changed(&mut self, now: Instant) {
        self.changed = true;
        // Links are measured first, and several may come at once.
        self.at = self.at.or(Some(now + RECUT_SETTLES));
    }

    pub(super) fn lost(&mut self, nodes: &BTreeSet<NodeId>) {
        self.lost.extend(nodes);
    }

    /// It runs, with tiles that were `loaded` for it or were there: first steps are slower than others.
    pub(super) fn running(&mut self, now: Instant, loaded: bool) {
        if loaded {
            self.loading = now.since(self.placed_at);
        }
        self.at = Some(now + RECUT_WARM);
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        self.at.map(|at| (at, "grid: it is looked whether tiles lie well"))
    }

    pub(super) fn waits_for(&self, token: u64) -> bool {
        self.token == Some(token)
    }

    /// What plans are to count with. Nodes of which nothing is known yet are taken for what the others are on average.
    pub(super) fn paces(&self) -> Paces {
        let sum: u64 = self.paces.values().map(|&pace| u64::from(pace)).sum();
        let others = sum.checked_div(self.paces.len() as u64).map_or(Paces::AS_PREDICTED, |mean| mean as u32);
        Paces { measured: self.paces.iter().map(|(&node, &pace)| (node.into(), pace)).collect(), others }
    }
}

impl GridJob {
    /// Time to look, if it is.
    pub(super) fn look_at_paces(&mut self, now: Instant, ids: &mut Ids, out: &mut VecDeque<GridOutput>) {
        if self.recut.at.is_none_or(|at| now < at) {
            return;
        }
        self.recut.at = None;
        let alone = self.tiles.len() < 2 && !self.recut.changed;
        if self.phase != Phase::Running || alone || self.computed {
            return;
        }
        if self.recut.marks.is_empty() {
            let begun = self.tiles.iter().all(|tile| tile.figures.compute_ns > 0);
            if begun {
                self.mark(now);
            }
            let wait = if begun { RECUT_WINDOW } else { RECUT_WARM };
            self.recut.at = Some(now + wait);
            return;
        }
        if !self.measure() {
            // Large tiles make few steps.
            self.recut.at = Some(now + RECUT_WINDOW);
        } else if self.tiles.iter().all(|tile| self.recut.paces.contains_key(&tile.owner)) {
            self.ask_for_better(ids, out);
        }
    }

    /// A checkpoint is on disk: going back to it costs least now.
    pub(super) fn look_at_paces_now(&mut self, now: Instant, ids: &mut Ids, out: &mut VecDeque<GridOutput>) {
        let measured = !self.recut.marks.is_empty() && now.since(self.recut.marked_at) >= RECUT_WINDOW;
        if measured
            && self.recut.at.is_none_or(|at| now < at)
            && self.recut.token.is_none()
            && now >= self.recut.not_before
        {
            self.recut.at = Some(now);
            self.look_at_paces(now, ids, out);
            if self.recut.token.is_some() {
                self.mark(now);
            }
        }
    }

    fn mark(&mut self, now: Instant) {
        self.recut.marks = self.tiles.iter().map(|tile| (tile.step, tile.figures.compute_ns)).collect();
        self.recut.marked_at = now;
    }

    /// The pace of each tile's node since the marks, if all have made enough steps.
    fn measure(&mut self) -> bool {
        let mut paces = Vec::new();
        for (tile, &(step, spent)) in self.tiles.iter().zip(&self.recut.marks) {
            let steps = tile.step.saturating_sub(step);
            let took = tile.figures.compute_ns.saturating_sub(spent) / u64::from(steps.max(1));
            if steps < self.depth.max(2) * 2 || took == 0 {
                return false;
            }
            if tile.pace == 0 {
                // Whoever took a tile over was not planned for it.
                continue;
            }
            let pace = u128::from(tile.pace) * u128::from(tile.step_ns) / u128::from(took);
            paces.push((tile.owner, u32::try_from(pace).unwrap_or(u32::MAX).clamp(PACE_LEAST, PACE_MOST)));
        }
        self.recut.paces.extend(paces);
        true
    }

    fn ask_for_better(&mut self, ids: &mut Ids, out: &mut VecDeque<GridOutput>) {
        let token = ids.next();
        self.recut.token = Some(token);
        let present = self.tiles.iter().map(|tile| (tile.owner.into(), tile.block)).collect();
        self.ask_for_plan(token, self.recut.lost.clone(), Some((present, self.depth)), out);
    }

    /// The best cut there is now: it is taken where it pays.
    pub(in crate::tiles::grids) fn handle_better(
        &mut self,
        now: Instant,
        result: Result<Box<GridPlan>, GridError>,
        out: &mut VecDeque<GridOutput>,
    ) {
        self.recut.token = None;
        let Ok(plan) = result else { return };
        let Some(before) = plan.before_ns().filter(|_| self.phase == Phase::Running && !self.computed) else { return };
        let after = plan.step_ns();
        let takes_part = |node: NodeId| self.tiles.iter().any(|tile| tile.owner == node);
        let joins = plan.tiles().iter().any(|tile| !takes_part(tile.device.into()));
        let percent = if joins { GAIN_JOINS_PERCENT } else { GAIN_PERCENT };
        if after.saturating_mul(100) > before.saturating_mul(100 - percent) {
            return;
        }
        let steps = |count: u32, ns: u64| u128::from(count) * u128::from(ns);
        let gained = steps(self.spec.schedule.steps.saturating_sub(self.step()), before - after);
        let again = steps(self.step().saturating_sub(self.checkpoint.unwrap_or(0)), before);
        if gained < GAIN_TIMES * (again + self.recut.loading.as_nanos()) {
            return;
        }
        let back = self.checkpoint.unwrap_or(0);
        if now < self.recut.not_before || self.collected.waits_for_outputs(back) {
            // Frames that are on their way would not come again.
            self.recut.at = Some(self.recut.not_before.max(now + RECUT_WINDOW));
            return;
        }
        self.recut.not_before = now + RECUT_EVERY * (1 << self.recut.times.min(6));
        self.recut.times += 1;
        self.recut.planned();
        self.return_to_checkpoint();
        self.handle_planned(now, Ok(plan), out);
    }
}

/// A step has to get so much shorter: measurements are not better than that.
const GAIN_PERCENT: u64 = 8;
/// And so much where nodes take part that did not: what they can do is not measured with this rule.
const GAIN_JOINS_PERCENT: u64 = 20;
/// What is gained until the end has to be so many times what is made again and loaded.
const GAIN_TIMES: u128 = 3;
/// Thousandths of the predicted speed that are believed.
const PACE_LEAST: u32 = 10;
/// See `PACE_LEAST`.
const PACE_MOST: u32 = 100_000;
