//! The search over numbers only: splits × device orders, level by level (one more stage per level).
//!
//! A state is (set of devices used, device of the last stage), with the least score for each number of layers covered. With all
//! states this is the exact dynamic programme of Held and Karp, combined with the one over splits; with only the most promising
//! states it is a beam search. The beam's width follows from a budget of cells visited, not from a clock, so that the same
//! question has the same answer on every machine. Next: `../repair.rs`.
use alloc::{
    boxed::Box,
    collections::{BTreeMap, VecDeque},
    vec,
    vec::Vec,
};
use core::ops::Range;

/// What is summed or compared: the caller packs its goals into it, the most important in the highest bits.
pub(crate) type Score = i128;

/// Larger than any score: impossible.
pub(crate) const NEVER: Score = i128::MAX / 4;

/// Maximum number of devices in a search: the bits of a set.
pub(crate) const DEVICES_MAX: usize = 128;

/// The search is exact up to this number of devices…
pub(crate) const EXACT_DEVICES: usize = 10;

/// …and up to this number of cells (10 devices × 390 layers): 48 MB of table.
const EXACT_CELLS: usize = 2_000_000;

/// Cells that one search may visit when it is not exact: 10 to 20 ms on a CPU core of 2020.
pub(crate) const BUDGET: u64 = 4_000_000;

/// Maximum width of a beam: a wider beam finds nothing better in the random fleets of the tests.
const WIDTH_MAX: u64 = 64;

/// Weight of a layer without a place in a beam's estimate: more than any time.
const SHORTFALL: Score = 1 << 100;

/// How scores of stages and hops combine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rule {
    /// They add up.
    Sum,
    /// The largest counts.
    Max,
}

/// A beam's estimate for the layers not yet covered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Guide {
    /// The unused devices are filled in order of speed.
    Fill,
    /// Each layer goes where it costs least.
    Cheapest,
}

/// What a stage over layers `start..end` costs besides the sums of [`DeviceCosts`]. Not negative, and a stage that is part of
/// another costs no more in total. For stages that do not fit it is an estimate.
pub(crate) type Extra<'a> = Box<dyn Fn(usize, usize) -> Score + 'a>;

/// Costs of a stage on one device.
pub(crate) struct DeviceCosts<'a> {
    /// `before[i]`: cost of layers `0..i`.
    pub before: Vec<Score>,
    /// Fixed cost of every stage.
    pub open: Score,
    /// Extra cost of a stage that is first but not last (`first`), last but not first (`last`), or both (`whole`).
    pub first: Score,
    /// See `first`.
    pub last: Score,
    /// See `first`.
    pub whole: Score,
    /// `None`: no stage has extra costs.
    pub extra: Option<Extra<'a>>,
    /// `plain[j]`: the least start ≥ `from[j]` of a stage that ends at `j` and has no extra costs, nor has any later one; empty
    /// without `extra`.
    pub plain: Vec<usize>,
    /// `from[j]`: the least start ≥ 1 of a stage that ends at `j` and fits; `j` if none fits.
    pub from: Vec<usize>,
    /// The longest first stage that fits without being last: layers `0..longest_first`.
    pub longest_first: usize,
    /// All layers fit.
    pub fits_whole: bool,
    /// Approximate number of layers that fit.
    pub capacity: usize,
}

impl DeviceCosts<'_> {
    fn extra(&self, start: usize, end: usize) -> Score {
        self.extra.as_ref().map_or(0, |extra| extra(start, end))
    }
}

/// A question.
pub(crate) struct Problem<'a> {
    pub rule: Rule,
    pub guide: Guide,
    pub layers: usize,
    pub devices: Vec<DeviceCosts<'a>>,
    /// Coordinator to first stage, last stage to coordinator, device to device; `NEVER` where no link is usable.
    pub enter: Vec<Score>,
    pub leave: Vec<Score>,
    pub hops: Vec<Vec<Score>>,
    /// Cells to visit when the search is not exact.
    pub budget: u64,
}

/// Device and layers of each stage.
pub(crate) type Placement = Vec<(usize, Range<usize>)>;

/// The answer.
pub(crate) struct Outcome {
    /// Score and stages (device, layers) of the best placement.
    pub best: Option<(Score, Placement)>,
    /// The least score of a placement with each device (among the placements visited).
    pub best_with: Vec<Score>,
    /// The most layers that any placement visited covers.
    pub furthest: usize,
    /// Every placement was considered.
    pub exact: bool,
}

/// Finds the placement with the least score.
pub(crate) fn search(problem: &Problem<'_>) -> Outcome {
    Search::new(problem).run()
}

struct SearchState {
    used: u128,
    last: usize,
    /// Least score with exactly layers `0..j` covered.
    cells: Vec<Score>,
    /// For each cell, the state before the last stage and the first layer of that stage.
    via: Vec<(u32, u32)>,
    /// Estimated score of a complete placement through this state.
    rank: Score,
}

struct Search<'a> {
    problem: &'a Problem<'a>,
    exact: bool,
    states: Vec<SearchState>,
    best: Option<(Score, usize)>,
    best_with: Vec<Score>,
    furthest: usize,
    /// `rest[j]`: a lower bound of what any placement adds to layers `0..j`.
    rest: Vec<Score>,
    /// Devices by speed, for `Guide::Fill`.
    fill: Vec<Fill>,
    visited: u64,
    expansions: u64,
}

/// A device in the beam's estimate.
struct Fill {
    device: usize,
    per_layer: Score,
    open: Score,
    capacity: usize,
}

impl<'a> Search<'a> {
    fn new(problem: &'a Problem<'a>) -> Self {
        let (devices, layers) = (problem.devices.len(), problem.layers);
        debug_assert!(devices <= DEVICES_MAX);
        let exact = devices <= EXACT_DEVICES && (devices << devices.saturating_sub(1)) * (layers + 1) <= EXACT_CELLS;
        Self {
            problem,
            exact,
            states: Vec::new(),
            best: None,
            best_with: vec![NEVER; devices],
            furthest: 0,
            rest: least_rest(problem),
            fill: fill_order(problem),
            visited: 0,
            expansions: 0,
        }
    }

    fn run(mut self) -> Outcome {
        let mut frontier: Vec<usize> = (0..self.problem.devices.len()).filter_map(|d| self.first_stage(d)).collect();
        let levels = self.problem.devices.len().min(self.problem.layers);
        for level in 1..levels {
            if !self.exact {
                self.narrow(&mut frontier, (levels - level) as u64);
            }
            let mut groups: BTreeMap<u128, Vec<usize>> = BTreeMap::new();
            for state in frontier {
                groups.entry(self.states[state].used).or_default().push(state);
            }
            frontier = Vec::new();
            for (used, mut group) in groups {
                group.sort_by_key(|&state| self.states[state].last);
                let unused = (0..self.problem.devices.len()).filter(|device| used >> device & 1 == 0);
                frontier.extend(unused.filter_map(|device| self.next_stage(&group, device)));
            }
            if frontier.is_empty() {
                break;
            }
        }
        let best = self.best.map(|(score, state)| (score, self.trace(state)));
        Outcome { best, best_with: self.best_with, furthest: self.furthest, exact: self.exact }
    }

    /// The state in which `device` holds the first stage.
    fn first_stage(&mut self, device: usize) -> Option<usize> {
        let (problem, costs) = (self.problem, &self.problem.devices[device]);
        let enter = problem.enter[device];
        if enter >= NEVER {
            return None;
        }
        let mut cells = vec![NEVER; problem.layers + 1];
        let stage = |end: usize, ends: Score| costs.before[end] + costs.open + ends + costs.extra(0, end);
        for (end, cell) in cells.iter_mut().enumerate().take(costs.longest_first + 1).skip(1) {
            *cell = self.join(enter, stage(end, costs.first));
        }
        if costs.fits_whole {
            cells[problem.layers] = self.join(enter, stage(problem.layers, costs.whole));
        }
        self.keep(SearchState {
            used: 1 << device,
            last: device,
            via: vec![(u32::MAX, 0); cells.len()],
            cells,
            rank: 0,
        })
    }

    /// The state in which `device` takes the next stage after any state of `group` (all of which used the same devices).
    fn next_stage(&mut self, group: &[usize], device: usize) -> Option<usize> {
        let cells = self.problem.layers + 1;
        let mut arrive = vec![NEVER; cells];
        let mut through = vec![0u32; cells];
        for &state in group {
            let hop = self.problem.hops[self.states[state].last][device];
            if hop >= NEVER {
                continue;
            }
            for (covered, &score) in self.states[state].cells[..cells - 1].iter().enumerate() {
                if score < NEVER && self.join(score, hop) < arrive[covered] {
                    arrive[covered] = self.join(score, hop);
                    through[covered] = state as u32;
                }
            }
        }
        self.expansions += 1;
        self.visited += (cells * (group.len() + 2) + self.fill.len()) as u64;
        let (cells, starts) = match self.problem.rule {
            Rule::Sum => self.extend_sum(&arrive, device),
            Rule::Max => self.extend_max(&arrive, device),
        };
        let via = starts.iter().map(|&start| (through[start as usize], start)).collect();
        self.keep(SearchState { used: self.states[group[0]].used | 1 << device, last: device, cells, via, rank: 0 })
    }

    /// Least sum for each end, with a sliding window over starts: a stage that fits an end starts at `from` or later. Stages with
    /// extra costs are longer than those in the window, and compared one by one.
    fn extend_sum(&mut self, arrive: &[Score], device: usize) -> (Vec<Score>, Vec<u32>) {
        let costs = &self.problem.devices[device];
        let mut cells = vec![NEVER; arrive.len()];
        let mut starts = vec![0u32; arrive.len()];
        let mut window: VecDeque<(Score, usize)> = VecDeque::new();
        for end in 2..arrive.len() {
            let start = end - 1;
            if arrive[start] < NEVER {
                let key = arrive[start] - costs.before[start];
                while window.back().is_some_and(|&(worse, _)| worse > key) {
                    window.pop_back();
                }
                window.push_back((key, start));
            }
            let (from, plain) = (costs.from[end], costs.plain.get(end).copied().unwrap_or(costs.from[end]));
            while window.front().is_some_and(|&(_, start)| start < plain) {
                window.pop_front();
            }
            let last = if end == self.problem.layers { costs.last } else { 0 };
            if let Some(&(key, start)) = window.front() {
                cells[end] = key + costs.before[end] + costs.open + last;
                starts[end] = start as u32;
            }
            self.visited += (plain - from) as u64;
            for start in (from..plain).filter(|&start| arrive[start] < NEVER) {
                let stage = costs.before[end] - costs.before[start] + costs.open + last + costs.extra(start, end);
                if arrive[start] + stage < cells[end] {
                    cells[end] = arrive[start] + stage;
                    starts[end] = start as u32;
                }
            }
        }
        (cells, starts)
    }

    /// Least maximum for each end. A longer stage costs more, so the backward scan stops once the stage alone is too slow.
    fn extend_max(&mut self, arrive: &[Score], device: usize) -> (Vec<Score>, Vec<u32>) {
        let costs = &self.problem.devices[device];
        let mut cells = vec![NEVER; arrive.len()];
        let mut starts = vec![0u32; arrive.len()];
        for end in 2..arrive.len() {
            let last = if end == self.problem.layers { costs.last } else { 0 };
            for start in (costs.from[end]..end).rev() {
                self.visited += 1;
                let stage = costs.before[end] - costs.before[start] + costs.open + last + costs.extra(start, end);
                if stage >= cells[end] {
                    break;
                }
                if arrive[start].max(stage) < cells[end] {
                    cells[end] = arrive[start].max(stage);
                    starts[end] = start as u32;
                }
            }
        }
        (cells, starts)
    }

    /// Records what a state completes, drops cells that cannot become better than the best, and stores the state if it can be
    /// extended.
    fn keep(&mut self, mut state: SearchState) -> Option<usize> {
        let layers = self.problem.layers;
        let furthest = state.cells.iter().rposition(|&score| score < NEVER)?;
        self.furthest = self.furthest.max(furthest);
        let leave = self.problem.leave[state.last];
        let mut improves = false;
        if state.cells[layers] < NEVER && leave < NEVER {
            let score = self.join(state.cells[layers], leave);
            for device in (0..self.best_with.len()).filter(|device| state.used >> device & 1 == 1) {
                self.best_with[device] = self.best_with[device].min(score);
            }
            improves = self.best.is_none_or(|(best, _)| score < best);
            if improves {
                self.best = Some((score, self.states.len()));
            }
        }
        if !self.exact {
            if let Some((best, _)) = self.best {
                for covered in 0..layers {
                    if state.cells[covered] < NEVER && self.join(state.cells[covered], self.rest[covered]) >= best {
                        state.cells[covered] = NEVER;
                    }
                }
            }
            state.rank = self.rank(&state);
        }
        let leads_on = state.cells[..layers].iter().any(|&score| score < NEVER);
        if !leads_on && !improves {
            return None;
        }
        self.states.push(state);
        leads_on.then_some(self.states.len() - 1)
    }

    /// Truncates a beam to the width that the remaining budget allows for the remaining levels.
    fn narrow(&self, frontier: &mut Vec<usize>, levels_left: u64) {
        let each = match self.expansions {
            0 => 4 * (self.problem.layers as u64 + 1),
            expansions => self.visited / expansions,
        };
        let left = self.problem.budget.saturating_sub(self.visited) / levels_left;
        let width = (left / (each * self.problem.devices.len() as u64).max(1)).clamp(1, WIDTH_MAX) as usize;
        frontier.sort_by_key(|&state| (self.states[state].rank, self.states[state].used, self.states[state].last));
        frontier.truncate(width);
    }

    /// The least estimated score of a placement that begins with this state.
    fn rank(&self, state: &SearchState) -> Score {
        let layers = self.problem.layers;
        let mut rank = NEVER;
        let mut filler = Filler::new(self, state.used);
        for covered in (0..layers).rev() {
            let filled = filler.one_more();
            if state.cells[covered] < NEVER {
                rank = rank.min(self.join(state.cells[covered], filled.max(self.rest[covered])));
            }
        }
        rank
    }

    fn join(&self, a: Score, b: Score) -> Score {
        match self.problem.rule {
            Rule::Sum => a + b,
            Rule::Max => a.max(b),
        }
    }

    /// The stages that lead to a complete state.
    fn trace(&self, state: usize) -> Placement {
        let mut stages = Vec::new();
        let (mut at, mut end) = (state, self.problem.layers);
        while end > 0 {
            let (before, start) = self.states[at].via[end];
            stages.push((self.states[at].last, start as usize..end));
            (at, end) = (before as usize, start as usize);
        }
        stages.reverse();
        stages
    }
}

/// Estimated cost of the remaining layers on the unused devices, for one layer, two, three…
struct Filler<'a> {
    search: &'a Search<'a>,
    used: u128,
    next: usize,
    /// Layers that still fit on the device being filled.
    room: usize,
    per_layer: Score,
    sum: Score,
    /// For `Rule::Max`: layers per 2⁴⁰ ns and capacity of all unused devices; layers so far.
    rate: Score,
    room_all: usize,
    count: usize,
}

impl<'a> Filler<'a> {
    fn new(search: &'a Search<'a>, used: u128) -> Self {
        let unused = || search.fill.iter().filter(move |fill| used >> fill.device & 1 == 0);
        let rate = unused().map(|fill| (1 << 40) / fill.per_layer.max(1)).sum();
        let room_all = unused().map(|fill| fill.capacity).sum();
        Self { search, used, next: 0, room: 0, per_layer: SHORTFALL, sum: 0, rate, room_all, count: 0 }
    }

    fn one_more(&mut self) -> Score {
        self.count += 1;
        match (self.search.problem.guide, self.search.problem.rule) {
            (Guide::Cheapest, _) => 0,
            (Guide::Fill, Rule::Sum) => {
                self.advance();
                self.sum += self.per_layer;
                self.room = self.room.saturating_sub(1);
                self.sum
            }
            (Guide::Fill, Rule::Max) => {
                let short = self.count.saturating_sub(self.room_all) as Score;
                ((self.count as Score) << 40) / self.rate.max(1) + short * SHORTFALL
            }
        }
    }

    /// Opens the next unused device when the present one is full.
    fn advance(&mut self) {
        while self.room == 0 && self.next < self.search.fill.len() {
            let fill = &self.search.fill[self.next];
            self.next += 1;
            if self.used >> fill.device & 1 == 0 && fill.capacity > 0 {
                (self.room, self.per_layer) = (fill.capacity, fill.per_layer);
                self.sum += fill.open;
            }
        }
        if self.room == 0 {
            self.per_layer = SHORTFALL;
        }
    }
}

/// For each number of layers covered, a lower bound of what the rest adds: each layer where it costs least, without extra costs.
fn least_rest(problem: &Problem<'_>) -> Vec<Score> {
    let least = |of: &dyn Fn(usize) -> Score| (0..problem.devices.len()).map(of).min().unwrap_or(NEVER);
    let leave = least(&|device| problem.leave[device]).min(NEVER);
    let mut rest = vec![leave; problem.layers + 1];
    if problem.rule == Rule::Max {
        return rest;
    }
    let mut sum = leave + least(&|device| problem.devices[device].open + problem.devices[device].last);
    for layer in (0..problem.layers).rev() {
        sum += least(&|device| problem.devices[device].before[layer + 1] - problem.devices[device].before[layer]);
        rest[layer] = sum.min(NEVER);
    }
    rest
}

/// The devices by their time per layer when full, a typical hop included.
fn fill_order(problem: &Problem<'_>) -> Vec<Fill> {
    let mut order: Vec<Fill> = (0..problem.devices.len())
        .map(|device| {
            let costs = &problem.devices[device];
            let hops: Vec<Score> = problem.hops.iter().map(|row| row[device]).filter(|&hop| hop < NEVER).collect();
            let hop = hops.iter().sum::<Score>() / hops.len().max(1) as Score;
            let mut per_layer = costs.before[problem.layers] / problem.layers.max(1) as Score;
            if let Some(full) = Some(costs.capacity).filter(|&layers| layers > 0) {
                per_layer += costs.extra(0, full) / full as Score;
            }
            Fill { device, per_layer, open: costs.open + hop, capacity: costs.capacity }
        })
        .collect();
    order.sort_by_key(|fill| (fill.per_layer + fill.open / fill.capacity.max(1) as Score, fill.device));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A random problem with `devices` devices of very different speed and capacity, all linked.
    fn question(seed: u64, devices: usize, layers: usize) -> Problem<'static> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut below = |limit: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % limit
        };
        let costs = (0..devices).map(|_| {
            let (speed, room) = (1 + below(20) as Score, 1 + below(layers as u64 / 2) as usize);
            let before: Vec<Score> = (0..=layers as Score).map(|layer| layer * speed * 100).collect();
            let from = (0..=layers).map(|end| end.saturating_sub(room).max(1).min(end)).collect();
            let (longest_first, open, last) = (room.min(layers - 1), 2, 50 * speed);
            DeviceCosts {
                before,
                open,
                first: 0,
                last,
                whole: last,
                extra: None,
                plain: Vec::new(),
                from,
                longest_first,
                fits_whole: room >= layers,
                capacity: room,
            }
        });
        let devices_costs: Vec<DeviceCosts<'_>> = costs.collect();
        let mut hop = || 10 * below(200) as Score;
        let mut row = |_: usize| (0..devices).map(|_| hop()).collect::<Vec<Score>>();
        Problem {
            rule: Rule::Sum,
            guide: Guide::Fill,
            layers,
            enter: row(0),
            leave: row(0),
            hops: (0..devices).map(&mut row).collect(),
            devices: devices_costs,
            budget: BUDGET,
        }
    }

    /// Scores (exact, beam) over many seeds, where a placement exists.
    fn compare(rule: Rule, budget: u64) -> Vec<(Score, Score)> {
        let mut pairs = Vec::new();
        for seed in 0..200 {
            let problem = Problem { rule, budget, ..question(seed, 8, 24) };
            let exact = Search::new(&problem).run();
            let beam = Search { exact: false, ..Search::new(&problem) }.run();
            assert!(exact.exact && !beam.exact);
            match (exact.best, beam.best) {
                (Some((least, _)), Some((found, stages))) => {
                    assert!(found >= least, "seed {seed}: a beam cannot beat the exact search");
                    let covered: usize = stages.iter().map(|(_, layers)| layers.len()).sum();
                    assert_eq!(covered, 24);
                    pairs.push((least, found));
                }
                (None, None) => {}
                (exact, beam) => panic!("seed {seed}: exact {exact:?}, beam {beam:?}"),
            }
        }
        pairs
    }

    #[test]
    fn a_beam_comes_close_to_the_exact_search() {
        for (rule, budget) in [(Rule::Sum, BUDGET), (Rule::Sum, BUDGET / 40), (Rule::Max, BUDGET)] {
            let pairs = compare(rule, budget);
            assert!(pairs.len() > 100, "most questions have an answer");
            let worst = pairs.iter().map(|(least, found)| found * 100 / least).max().unwrap_or(0);
            let mean = pairs.iter().map(|(least, found)| found * 1000 / least).sum::<Score>() / pairs.len() as Score;
            assert!(mean <= 1010 && worst <= 125, "{rule:?} at {budget}: mean {mean} ‰, worst {worst} %");
        }
    }
}
