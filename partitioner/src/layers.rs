//! Placement of layers on devices: turns a question into numbers for the search, and the search's answer into a plan.
//!
//! A single node is the placement with one stage, so it wins if it fits and is fastest; a slow device is left out because
//! placements without it score better. Ties go to fewer stages, then to the coordinator as first stage, then to lower ids.
//! Finally the stage boundaries are balanced: token times within one percent count as equal, and the slowest stage is made as
//! fast as that allows. Next: `layers/search.rs`.
pub(crate) mod search;

use crate::cost::ram::{self, RamTable, Room};
use crate::cost::{self, StageBytes};
use crate::explain::{self, Verdict};
use crate::fleet::{Device, DeviceId, Endpoint, Fleet, NodeKey};
use crate::plan::{Goal, InvalidPlan, LAYERS_MAX, LossPlan, Options, Plan, PlanError};
use crate::repair;
use crate::work::Work;
use alloc::{boxed::Box, collections::BTreeSet, format, vec::Vec};
use core::ops::Range;
use search::{DEVICES_MAX, DeviceCosts, Extra, Guide, NEVER, Outcome, Problem, Rule, Score, search};

/// Bits below the nanoseconds in a score: stages × 2 (128 stages at most), and 1 if the first stage is not on the coordinator.
const TIE_BITS: u32 = 10;

/// Score of one more stage, as a tie-break between equal times.
const ONE_STAGE: Score = 2;

/// Score of a first stage off the coordinator, as a tie-break between equal times and stage counts.
const OFF_COORDINATOR: Score = 1;

/// Token times that differ by less than one part in this number count as equal: the speeds behind them vary more between
/// measurements.
const EQUAL_PARTS: u64 = 100;

/// Bytes of the largest job: 1 EiB, so that sums fit in 64 bits.
const WORK_BYTES_MAX: u64 = 1 << 60;

/// The plan with the least predicted time for this work on this fleet, with the reasons. `options.losses` adds a plan for the
/// loss of each node in use but the coordinator, whose loss costs a succession.
///
/// # Errors
/// Names what is short and by how much.
pub fn plan(work: &Work, fleet: &Fleet, options: &Options) -> Result<Plan, PlanError> {
    validate(work, fleet)?;
    let pool = Pool::new(work, fleet, options);
    if pool.candidates.is_empty() {
        return Err(pool.shortage(0));
    }
    let solution = match options.goal {
        Goal::Latency => pool.balanced(solve(&pool.problem(None))),
        Goal::Throughput => least_bottleneck(&pool),
    };
    let Some(stages) = solution.stages else {
        return Err(pool.shortage(solution.furthest));
    };
    let plan = Plan::new(&pool.name(&stages), work, fleet, options).map_err(unsound)?;
    let reasons = explain::reasons(work, fleet, options, &plan, &pool.verdicts(&solution.best_with, solution.exact));
    let plan = plan.explained(solution.exact && !pool.shortlisted(), reasons);
    if !options.losses {
        return Ok(plan);
    }
    let losses = losses(&plan, work, fleet, options);
    Ok(plan.with_losses(losses))
}

/// The plan after the loss of each of the plan's nodes but the coordinator: the repair with the smallest change.
fn losses(plan: &Plan, work: &Work, fleet: &Fleet, options: &Options) -> Vec<LossPlan> {
    let mut used: Vec<NodeKey> = Vec::new();
    for node in plan.stages().iter().map(|stage| stage.device.node) {
        if node != options.head && !used.contains(&node) {
            used.push(node);
        }
    }
    let alone = Options { losses: false, ..options.clone() };
    used.into_iter()
        .map(|lost| {
            let mut left = fleet.clone();
            left.devices.retain(|device| device.id.node != lost);
            LossPlan { lost, plan: repair::repair(plan, work, &left, &alone) }
        })
        .collect()
}

/// Rejects questions that make no sense or whose sums would overflow.
pub(crate) fn validate(work: &Work, fleet: &Fleet) -> Result<(), PlanError> {
    let invalid = |reason: Box<str>| Err(PlanError::Invalid(reason));
    if work.layers.is_empty() {
        return invalid("it has no layers".into());
    }
    if work.layers.len() > LAYERS_MAX {
        return invalid(format!("it has {} layers, at most {LAYERS_MAX} are planned for", work.layers.len()).into());
    }
    let all = 0..work.layers.len() as u32;
    let bytes = cost::stage_bytes(work, &all).saturating_add(work.embed_bytes);
    if bytes > WORK_BYTES_MAX || work.scratch_bytes > WORK_BYTES_MAX / DEVICES_MAX as u64 {
        return invalid("its weights, cache and scratch are more than 1 EiB: a size or count must be wrong".into());
    }
    let ids: BTreeSet<DeviceId> = fleet.devices.iter().map(|device| device.id).collect();
    if ids.len() != fleet.devices.len() {
        return invalid("two devices of the fleet have the same id".into());
    }
    Ok(())
}

/// A placement that the search found and the constructor rejects is a bug in the planner: reported, not hidden.
pub(crate) fn unsound(error: InvalidPlan) -> PlanError {
    PlanError::Invalid(format!("the search found a placement that breaks a rule ({error}); this is a bug").into())
}

/// A solved question.
pub(crate) struct Solution {
    /// Candidate and layers of each stage.
    pub stages: Option<Vec<(usize, Range<usize>)>>,
    /// Per candidate, the least nanoseconds of a placement with it.
    pub best_with: Vec<Option<u64>>,
    pub furthest: usize,
    pub exact: bool,
}

/// Solves a problem whose scores are nanoseconds above the tie bits.
fn solve(problem: &Problem<'_>) -> Solution {
    solution(search(problem), TIE_BITS)
}

fn solution(outcome: Outcome, bits: u32) -> Solution {
    let ns = |score: &Score| (*score < NEVER).then(|| (score >> bits) as u64);
    Solution {
        best_with: outcome.best_with.iter().map(ns).collect(),
        stages: outcome.best.map(|(_, stages)| stages),
        furthest: outcome.furthest,
        exact: outcome.exact,
    }
}

/// The placement with the least time of its slowest stage or link; ties go to the least time per token.
fn least_bottleneck(pool: &Pool<'_>) -> Solution {
    let outcome = search(&pool.bottleneck_problem());
    let bound = outcome.best.as_ref().map(|&(bound, _)| bound);
    let slowest = solution(outcome, 0);
    let Some(bound) = bound else {
        return slowest;
    };
    let within = solve(&pool.problem(Some(bound as u64)));
    // A beam may miss every placement within the bound; then the one already found is used.
    Solution { stages: within.stages.or(slowest.stages), ..slowest }
}

/// The devices that can take part, and their figures.
pub(crate) struct Pool<'a> {
    work: &'a Work,
    fleet: &'a Fleet,
    options: &'a Options,
    bytes: StageBytes<'a>,
    /// By id, so that ties break the same way everywhere.
    pub candidates: Vec<&'a Device>,
    /// The other devices, with the reasons.
    rejected: Vec<(DeviceId, Verdict)>,
}

impl<'a> Pool<'a> {
    pub(crate) fn new(work: &'a Work, fleet: &'a Fleet, options: &'a Options) -> Self {
        let mut pool =
            Self { work, fleet, options, bytes: StageBytes::new(work), candidates: Vec::new(), rejected: Vec::new() };
        let layers = || (0..work.layers.len() as u32).map(|layer| layer..layer + 1);
        let least = layers().map(|layer| pool.bytes.of(&layer)).min();
        let mut devices: Vec<&Device> = fleet.devices.iter().collect();
        devices.sort_by_key(|device| device.id);
        for device in devices {
            let offered = Room::of(device);
            let table = RamTable::new(&pool.bytes, device, offered);
            if device.excluded {
                pool.rejected.push((device.id, Verdict::Excluded));
            } else if device.bytes_per_second == 0 {
                pool.rejected.push((device.id, Verdict::NoSpeed));
            } else if layers().all(|layer| table.placed(&layer).is_none()) {
                pool.rejected.push((device.id, Verdict::TooSmall { need: least.unwrap_or(0), offered }));
            } else {
                pool.candidates.push(device);
            }
        }
        pool.shortlist(DEVICES_MAX);
        pool
    }

    /// Keeps at most `limit` candidates: half by the time per layer, including the hop from the coordinator; half by memory.
    fn shortlist(&mut self, limit: usize) {
        if self.candidates.len() <= limit {
            return;
        }
        let mut order: Vec<(u64, &Device)> =
            self.candidates.iter().map(|&device| (self.layer_share_ns(device), device)).collect();
        order.sort_by_key(|&(share_ns, device)| (share_ns, device.id));
        order[limit / 2..].sort_by_key(|&(_, device)| (core::cmp::Reverse(self.room(device)), device.id));
        self.retain(&order[..limit].iter().map(|(_, device)| device.id).collect());
    }

    /// Bytes that a device has for this model: its memory, and RAM as far as experts may lie there.
    fn room(&self, device: &Device) -> u64 {
        let all = 0..self.work.layers.len() as u32;
        device.memory.saturating_add(ram::usable(self.work, &all, Room::of(device).ram))
    }

    /// Nanoseconds per mean layer on a device filled with layers, with the layer's share of the hop from the coordinator. Layers
    /// count as if all experts were in memory.
    fn layer_share_ns(&self, device: &Device) -> u64 {
        let layers = self.work.layers.len() as u64;
        let all = 0..layers as u32;
        let scratch = self.work.scratch_bytes;
        let mean_bytes = (self.bytes.of(&all) - scratch) / layers;
        let room = (self.room(device).saturating_sub(scratch) / mean_bytes.max(1)).clamp(1, layers);
        let way_ns = cost::between_ns(self.fleet, self.options.head, device.id, self.work.activation_bytes);
        let in_memory = cost::stage_ns_at(self.work, device, (&all, 0), 1, self.work.planned_positions());
        match (in_memory, way_ns) {
            (Some(all_ns), Some(way_ns)) => all_ns / layers + way_ns / room,
            (None, _) | (_, None) => u64::MAX,
        }
    }

    /// The same devices in the same order, with the stage boundaries for which the slowest stage is as fast as possible while a
    /// token takes as long as in `solution`, within one part in [`EQUAL_PARTS`].
    fn balanced(&self, solution: Solution) -> Solution {
        let Some(stages) = &solution.stages else { return solution };
        let order: Vec<usize> = stages.iter().map(|(device, _)| *device).collect();
        let token_ns = |stages: &[(usize, Range<usize>)]| {
            cost::token_ns(self.work, self.fleet, self.options.head, &self.name(stages)).unwrap_or(u64::MAX)
        };
        let slowest_ns = |stages: &[(usize, Range<usize>)]| {
            let steps = stages.iter().map(|(device, layers)| {
                let layers = layers.start as u32..layers.end as u32;
                cost::stage_ns(self.work, self.candidates[*device], &layers, 1)
            });
            steps.max().flatten().unwrap_or(0)
        };
        let least_ns = token_ns(stages);
        let limit_ns = least_ns.saturating_add(least_ns / EQUAL_PARTS);
        let (mut low, mut high) = (0, slowest_ns(stages));
        let mut best = stages.clone();
        while low < high {
            let bound = low + (high - low) / 2;
            let found = search(&self.chain(&order, bound)).best;
            let cut = found.map(|(_, stages)| stages.into_iter().map(|(at, layers)| (order[at], layers)).collect());
            match cut.filter(|cut: &Vec<(usize, Range<usize>)>| token_ns(cut) <= limit_ns) {
                Some(cut) => (high, best) = (slowest_ns(&cut), cut),
                None => low = bound + 1,
            }
        }
        Solution { stages: Some(best), ..solution }
    }

    /// The problem of splitting the layers over these devices in this order, with no stage slower than `bound`.
    fn chain(&self, order: &[usize], bound: u64) -> Problem<'_> {
        let only = |at: usize| (0..order.len()).map(|i| if i == at { 0 } else { NEVER }).collect();
        let costs = |&device: &usize| self.costs(self.candidates[device], TIE_BITS, ONE_STAGE, Some(bound));
        Problem {
            rule: Rule::Sum,
            guide: Guide::Cheapest,
            layers: self.work.layers.len(),
            devices: order.iter().map(costs).collect(),
            // All splits cross the same links.
            enter: only(0),
            leave: only(order.len() - 1),
            hops: (0..order.len()).map(|from| only(from + 1)).collect(),
            budget: search::BUDGET,
        }
    }

    /// Keeps only these candidates.
    pub(crate) fn retain(&mut self, kept: &BTreeSet<DeviceId>) {
        let (stay, go): (Vec<&Device>, Vec<&Device>) =
            self.candidates.iter().partition(|device| kept.contains(&device.id));
        self.candidates = stay;
        self.rejected.extend(go.into_iter().map(|device| (device.id, Verdict::NotShortlisted)));
    }

    /// Whether any candidate was left out before the search.
    pub(crate) fn shortlisted(&self) -> bool {
        self.rejected.iter().any(|(_, verdict)| *verdict == Verdict::NotShortlisted)
    }

    /// Scores are nanoseconds per token, then stages, then whether the coordinator is first; `bound` limits each stage and
    /// link.
    pub(crate) fn problem(&self, bound: Option<u64>) -> Problem<'_> {
        let bounded = |busy: Option<u64>| busy.is_some_and(|ns| bound.is_none_or(|bound| ns <= bound));
        let hop = |from: Endpoint, to: Endpoint, bytes: u64| match cost::between_ns(self.fleet, from, to, bytes) {
            Some(ns) if bounded(cost::busy_ns(self.fleet, from, to, bytes)) => Score::from(ns) << TIE_BITS,
            _ => NEVER,
        };
        let head = self.options.head;
        let mut problem = self.linked(Rule::Sum, &hop);
        for (device, enter) in self.candidates.iter().zip(&mut problem.enter) {
            *enter += if device.id.node == head { 0 } else { OFF_COORDINATOR };
        }
        problem.devices = self.candidates.iter().map(|device| self.costs(device, TIE_BITS, ONE_STAGE, bound)).collect();
        problem
    }

    /// Scores are the nanoseconds of the slowest stage or link.
    fn bottleneck_problem(&self) -> Problem<'_> {
        let busy = |from: Endpoint, to: Endpoint, bytes: u64| {
            cost::busy_ns(self.fleet, from, to, bytes).map_or(NEVER, Score::from)
        };
        let mut problem = self.linked(Rule::Max, &busy);
        problem.devices = self.candidates.iter().map(|device| self.costs(device, 0, 0, None)).collect();
        problem
    }

    /// A problem with its links and no devices yet.
    fn linked(&self, rule: Rule, hop: &dyn Fn(Endpoint, Endpoint, u64) -> Score) -> Problem<'_> {
        let (head, activation) = (Endpoint::from(self.options.head), self.work.activation_bytes);
        let ids: Vec<Endpoint> = self.candidates.iter().map(|device| device.id.into()).collect();
        let row = |from: Endpoint| ids.iter().map(|&to| hop(from, to, activation)).collect();
        Problem {
            rule,
            guide: Guide::Fill,
            layers: self.work.layers.len(),
            devices: Vec::new(),
            enter: ids.iter().map(|&id| hop(head, id, cost::TOKEN_BYTES)).collect(),
            leave: ids.iter().map(|&id| hop(id, head, cost::TOKEN_BYTES)).collect(),
            hops: ids.iter().map(|&id| row(id)).collect(),
            budget: search::BUDGET,
        }
    }

    /// A device's times as scores, and which ranges of layers fit (in memory, and in time if there is a bound).
    fn costs(&self, device: &Device, bits: u32, one_stage: Score, bound: Option<u64>) -> DeviceCosts<'_> {
        let work = self.work;
        let layers = work.layers.len();
        // A candidate has a measured speed, so every prediction exists.
        let ns = |ns: Option<u64>| ns.unwrap_or(cost::NS_MAX);
        let mut before_ns = Vec::with_capacity(layers + 1);
        before_ns.push(0u64);
        for (index, layer) in work.layers.iter().enumerate() {
            before_ns.push(before_ns[index] + ns(cost::layer_ns(device, layer, 1, work.planned_positions())));
        }
        let step_ns = device.step_ns.min(cost::NS_MAX);
        let head_ns = ns(cost::head_ns(work, device, 1));
        let table = RamTable::new(&self.bytes, device, Room::of(device));
        let range = |start: usize, end: usize| start as u32..end as u32;
        let fits = |start: usize, end: usize| {
            let last = if end == layers { head_ns } else { 0 };
            let stage_ns = || before_ns[end] - before_ns[start] + step_ns + last + table.extra_ns(&range(start, end));
            table.placed(&range(start, end)).is_some() && bound.is_none_or(|bound| stage_ns() <= bound)
        };
        let in_memory = |start: usize, end: usize| self.bytes.of(&range(start, end)) <= device.memory;
        let from = first_starts(layers, &fits);
        let plain = if table.has_ram() {
            first_starts(layers, &|start, end| start >= from[end] && in_memory(start, end))
        } else {
            Vec::new()
        };
        let (longest_first, fits_whole) = ((1..layers).take_while(|&end| fits(0, end)).count(), fits(0, layers));
        let scratch = work.scratch_bytes;
        let mean = (self.bytes.of(&(0..layers as u32)) - scratch) / layers as u64;
        let capacity = self.room(device).saturating_sub(scratch) / mean.max(1);
        let score = move |ns: u64| Score::from(ns) << bits;
        DeviceCosts {
            before: before_ns.iter().map(|&ns| score(ns)).collect(),
            open: score(step_ns) + one_stage,
            first: 0,
            last: score(head_ns),
            whole: score(head_ns),
            plain,
            extra: table.has_ram().then(|| -> Extra<'_> {
                Box::new(move |start, end| score(table.extra_ns(&(start as u32..end as u32))))
            }),
            from,
            longest_first,
            fits_whole,
            capacity: usize::try_from(capacity).unwrap_or(usize::MAX).min(layers),
        }
    }

    /// Stages by device id.
    pub(crate) fn name(&self, stages: &[(usize, Range<usize>)]) -> Vec<(DeviceId, Range<u32>)> {
        let named = |(device, layers): &(usize, Range<usize>)| {
            (self.candidates[*device].id, layers.start as u32..layers.end as u32)
        };
        stages.iter().map(named).collect()
    }

    /// Why each device is or is not used: the rejected ones, then the candidates in order.
    pub(crate) fn verdicts(&self, best_with: &[Option<u64>], exact: bool) -> Vec<(DeviceId, Verdict)> {
        let judged = self.candidates.iter().zip(best_with).map(|(device, &best_with)| match best_with {
            Some(ns) => (device.id, Verdict::Considered { best_with_ns: ns, exact }),
            None => (device.id, Verdict::NoPlacement { exact }),
        });
        self.rejected.iter().cloned().chain(judged).collect()
    }

    /// Why no placement was found, with the figure that is short. `furthest`: the most layers that any placement covered.
    pub(crate) fn shortage(&self, furthest: usize) -> PlanError {
        let blocks = self.work.layers.len() as u32;
        let allowed = self.fleet.devices.iter().filter(|device| !device.excluded && device.bytes_per_second > 0);
        let offers: Vec<Room> = allowed.map(Room::of).collect();
        if offers.is_empty() {
            return PlanError::NoDevices;
        }
        let all = offers.iter().fold(Room::default(), |sum, offer| sum.plus(*offer));
        let ram = ram::usable(self.work, &(0..blocks), all.ram);
        let offered = all.memory.saturating_add(ram);
        // Includes the embedding, the output head and the scratch of every stage, at the largest possible number of stages.
        let stages = (self.candidates.len() as u64).max(1);
        let mut need = self.bytes.of(&(0..blocks)).saturating_add(self.work.scratch_bytes.saturating_mul(stages - 1));
        if self.work.tied && stages > 1 {
            need = need.saturating_add(self.work.embed_bytes.min(self.work.head_bytes));
        }
        if need > offered {
            return PlanError::Memory { need, offered, ram, missing: need - offered };
        }
        for layer in 0..blocks {
            let layers = layer..layer + 1;
            let need = self.bytes.of(&layers);
            let usable = |ram: u64| ram::usable(self.work, &layers, ram);
            let room = |offer: &&Room| offer.memory.saturating_add(usable(offer.ram));
            let largest = offers.iter().max_by_key(room).copied().unwrap_or_default();
            let (ram, offered) = (usable(largest.ram), room(&&largest));
            if need > offered {
                // Only a device that offers RAM can offer more of it.
                let more_ram = if largest.ram > 0 { usable(u64::MAX) - ram } else { 0 };
                let (largest, missing) = (largest.memory, need - offered);
                return PlanError::LayerTooLarge { layer, need, largest, ram, missing, more_ram };
            }
        }
        if self.fits_with_any_links() {
            return PlanError::Unlinked;
        }
        let missing = self.bytes.of(&(furthest as u32..blocks));
        PlanError::Packing { need, offered, placed: furthest as u32, layers: blocks, missing }
    }

    /// Whether a placement exists if links are ignored.
    fn fits_with_any_links(&self) -> bool {
        let mut problem = self.linked(Rule::Sum, &|_, _, _| 0);
        problem.devices = self.candidates.iter().map(|device| self.costs(device, 0, 0, None)).collect();
        search(&problem).best.is_some()
    }
}

/// For each end, the least start ≥ 1 of a range with a property that every part of a range with it has; the end if there is none.
fn first_starts(layers: usize, has: &dyn Fn(usize, usize) -> bool) -> Vec<usize> {
    let mut start = 1;
    let starts = (0..=layers).map(|end| {
        while start < end && !has(start, end) {
            start += 1;
        }
        start.min(end)
    });
    starts.collect()
}
