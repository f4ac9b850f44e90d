//! A mixture of experts on the CPU: routes each row to a few experts, computes the rows of each expert together, and adds the
//! outputs of a row in the order of its experts. So the result does not depend on which rows are computed together.
use std::ops::Range;

use kernels::cpu::activations::Rows;
use kernels::cpu::product::Product;
use kernels::cpu::rows::{Combine, Shares, Sigmoids};
use kernels::order::experts::{Choice, Gating, USED_MAX, weigh, whole};
use kernels::order::{reciprocal, sigmoid};
use kernels::pool::Pool;

use super::{BlockScratch, GRAIN, Run, Shared, add_bias, each_row, gate_rows, products};
use crate::model::load::{Bank, Experts, Matrix};

/// Scratch of a mixture.
#[derive(Default)]
pub(super) struct Mixture {
    /// `[rows, experts]`
    scores: Vec<f32>,
    /// Factors of all experts for one row, and what they are chosen by.
    shares: Vec<f32>,
    keys: Vec<f32>,
    /// Of one row.
    choices: Vec<Choice>,
    /// Of all rows.
    routes: Vec<Route>,
    /// Of each expert: the number of its rows, then its place among the groups.
    counts: Vec<usize>,
    /// Experts that compute a row, ascending.
    groups: Vec<Group>,
    /// Input rows of each group.
    x: Vec<Rows>,
    gated: Vec<Rows>,
    /// Outputs of all groups, one after another.
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
    /// The gate and the output of the shared expert.
    shared: [Vec<f32>; 2],
}

/// An expert of a row.
#[derive(Clone, Copy)]
struct Route {
    row: usize,
    choice: Choice,
    /// Index of the row among the rows of all groups.
    place: usize,
}

/// An expert and its rows: `first..first + count` of the rows of all groups.
#[derive(Clone, Copy)]
struct Group {
    expert: usize,
    first: usize,
    count: usize,
}

impl Mixture {
    /// out = the sum of the outputs of each row's experts times their factors, then that of the shared expert.
    pub(super) fn compute(
        &mut self,
        pool: &mut Pool,
        run: Run,
        x: &Rows,
        weights: &Experts,
        block: &mut BlockScratch,
        out: &mut Vec<f32>,
    ) {
        products(run.isa, pool, x, run.integers, &[weights.router.tiles()], [&mut self.scores]);
        add_bias(&mut self.scores, weights.router_bias.as_deref());
        self.route(run, weights, x.count());
        self.run_experts(pool, run, x, &weights.bank);
        let [gate, shared] = &mut self.shared;
        if let Some(weights) = &weights.shared {
            if let Some(matrix) = &weights.gate {
                products(run.isa, pool, x, run.integers, &[matrix.tiles()], [gate]);
            }
            block.compute(pool, run, x, &weights.expert, shared);
        }
        self.combine(pool, run, weights, x, out);
    }

    /// Computes the outputs of experts for rows of `x`: for each of `pairs` the row, the expert, and the factor. See
    /// [`Self::output`].
    pub(super) fn compute_pairs(
        &mut self,
        pool: &mut Pool,
        run: Run,
        x: &Rows,
        bank: &Bank,
        pairs: impl Iterator<Item = (usize, Choice)>,
    ) {
        self.routes.clear();
        self.routes.extend(pairs.map(|(row, choice)| Route { row, choice, place: 0 }));
        self.run_experts(pool, run, x, bank);
    }

    /// The output of the pair with this index in [`Self::compute_pairs`], without its factor unless that applies to the input.
    pub(super) fn output(&self, index: usize, width: usize) -> &[f32] {
        &self.down[self.routes[index].place * width..][..width]
    }

    /// Chooses the experts of each row.
    fn route(&mut self, run: Run, weights: &Experts, rows: usize) {
        let Self { scores, shares, keys, choices, routes, .. } = self;
        routes.clear();
        for (row, scores) in scores.chunks_exact(weights.bank.count).enumerate() {
            shares.clear();
            shares.extend_from_slice(scores);
            let mut by = scores;
            let factor = match weights.routing.gating {
                // SAFETY: the instruction set was detected.
                Gating::Softmax => reciprocal(unsafe { run.isa.run(Shares { scores: shares }) }),
                Gating::Sigmoid => {
                    // SAFETY: the instruction set was detected.
                    unsafe { run.isa.run(Sigmoids { numbers: shares }) };
                    if let Some(corrections) = &weights.corrections {
                        keys.clear();
                        keys.extend(shares.iter().zip(corrections).map(|(share, more)| share + more));
                        by = keys;
                    }
                    whole(scores)
                }
            };
            choices.clear();
            weigh(by, shares, factor, weights.routing, choices);
            routes.extend(choices.iter().map(|&choice| Route { row, choice, place: 0 }));
        }
        debug_assert_eq!(routes.len(), rows * weights.routing.used);
    }

    /// Gives each route a place: the rows of an expert lie together.
    fn group(&mut self, experts: usize) {
        let Self { routes, counts, groups, .. } = self;
        counts.clear();
        counts.resize(experts, 0);
        for route in routes.iter_mut() {
            route.place = counts[route.choice.expert];
            counts[route.choice.expert] += 1;
        }
        groups.clear();
        let mut first = 0;
        for (expert, count) in counts.iter_mut().enumerate() {
            let rows = std::mem::replace(count, groups.len());
            if rows > 0 {
                groups.push(Group { expert, first, count: rows });
            }
            first += rows;
        }
        routes.iter_mut().for_each(|route| route.place += groups[counts[route.choice.expert]].first);
    }

    /// Copies the rows of each group together.
    fn gather(&mut self, x: &Rows) {
        let Self { routes, counts, groups, x: gathered, .. } = self;
        gathered.resize_with(gathered.len().max(groups.len()), Rows::default);
        for (rows, group) in gathered.iter_mut().zip(&*groups) {
            rows.shape(group.count, x.cols());
        }
        for route in &*routes {
            let group = counts[route.choice.expert];
            // SAFETY: no row is borrowed.
            unsafe { gathered[group].rows_mut().copy(route.place - groups[group].first, x, route.row) }
        }
    }

    /// Computes the output of each route.
    fn run_experts(&mut self, pool: &mut Pool, run: Run, x: &Rows, weights: &Bank) {
        self.group(weights.count);
        self.gather(x);
        let Self { routes, groups, x, gated, gate, up, down, .. } = self;
        let [gates, ups] = &weights.experts.inputs;
        let ffn = gates.tiles().rows() / weights.count;
        let (x, groups) = (&x[..groups.len()], &groups[..]);
        let inputs = Grouped { run, x, groups, experts: weights.count };
        inputs.products(pool, &[gates, ups], [gate, up]);
        let biases = weights.biases.as_ref().map(|biases| biases.each_ref());
        if let Some([gates, ups, _]) = biases {
            add_biases(groups, gate, gates, ffn);
            add_biases(groups, up, ups, ffn);
        }
        if weights.on_input {
            // Gate and up are linear: a factor of their input is one of their output.
            for Route { choice, place, .. } in &*routes {
                for rows in [&mut *gate, &mut *up] {
                    rows[place * ffn..(place + 1) * ffn].iter_mut().for_each(|number| *number *= choice.weight);
                }
            }
        }
        gated.resize_with(gated.len().max(groups.len()), Rows::default);
        for (rows, group) in gated.iter_mut().zip(groups) {
            rows.shape(group.count, ffn);
            let part = group.first * ffn..(group.first + group.count) * ffn;
            gate_rows(pool, run, &gate[part.clone()], &up[part], rows);
        }
        let gated = Grouped { x: &gated[..groups.len()], ..inputs };
        gated.products(pool, &[&weights.experts.down], [down]);
        if let Some([.., downs]) = biases {
            add_biases(groups, down, downs, weights.experts.down.tiles().rows() / weights.count);
        }
    }

    fn combine(&self, pool: &mut Pool, run: Run, weights: &Experts, x: &Rows, out: &mut Vec<f32>) {
        let Self { routes, down, shared: [gate, shared], .. } = self;
        let (width, used) = (x.cols(), weights.routing.used);
        out.resize(x.count() * width, 0.0); // every element is written below
        let out = Shared::of(out);
        each_row(pool, x.count(), (used + 1) * width, &|i| {
            let mut parts: [(f32, &[f32]); USED_MAX + 1] = [(0.0, &[]); USED_MAX + 1];
            for (part, route) in parts.iter_mut().zip(&routes[i * used..][..used]) {
                let factor = if weights.bank.on_input { 1.0 } else { route.choice.weight };
                *part = (factor, &down[route.place * width..][..width]);
            }
            let mut count = used;
            if let Some(weights) = &weights.shared {
                let factor = if weights.gate.is_some() { sigmoid(gate[i]) } else { 1.0 };
                parts[count] = (factor, &shared[i * width..][..width]);
                count += 1;
            }
            // SAFETY: each row is visited once; the instruction set was detected.
            unsafe { run.isa.run(Combine { parts: &parts[..count], out: out.slice(i * width..(i + 1) * width) }) };
        });
    }

    /// Allocated bytes.
    pub(super) fn bytes(&self) -> usize {
        let [shared_gate, shared] = &self.shared;
        let floats = [&self.scores, &self.shares, &self.keys, &self.gate, &self.up, &self.down, shared_gate, shared];
        let floats: usize = floats.into_iter().map(|v| v.capacity() * size_of::<f32>()).sum();
        let rows: usize = self.x.iter().chain(&self.gated).map(Rows::bytes).sum();
        let routes = self.routes.capacity() * size_of::<Route>() + self.counts.capacity() * size_of::<usize>();
        floats + rows + routes
    }
}

/// Adds each expert's row of `biases` to the rows of its group.
fn add_biases(groups: &[Group], rows: &mut [f32], biases: &[f32], width: usize) {
    for Group { expert, first, count } in groups {
        let bias = &biases[expert * width..(expert + 1) * width];
        add_bias(&mut rows[first * width..(first + count) * width], Some(bias));
    }
}

/// Rows of all groups, each computed by its group's expert.
struct Grouped<'a> {
    run: Run,
    /// One for each group.
    x: &'a [Rows],
    groups: &'a [Group],
    /// Number of experts.
    experts: usize,
}

impl Grouped<'_> {
    /// The products of each group's rows with its expert's part of each matrix, `[rows of all groups, rows of an expert]`. All
    /// groups are split among the threads together.
    fn products<const N: usize>(&self, pool: &mut Pool, matrices: &[&Matrix; N], out: [&mut Vec<f32>; N]) {
        let Self { run, x, groups, experts } = *self;
        let tiles = matrices.map(Matrix::tiles);
        // All matrices have the same number of rows, a multiple of the grain.
        let each = tiles[0].rows() / experts;
        let rows: usize = groups.iter().map(|group| group.count).sum();
        let out: [Shared<'_, f32>; N] = out.map(|out| {
            out.resize(rows * each, 0.0); // every element is written below
            Shared::of(out)
        });
        pool.run(groups.len() * N * each, GRAIN, &|_, mine| {
            let mut from = mine.start;
            while from < mine.end {
                let (unit, end) = (from / each, mine.end.min((from / each + 1) * each));
                let part: Range<usize> = from - unit * each..end - unit * each;
                let (group, matrix) = (unit / N, unit % N);
                let Group { expert, first, count } = groups[group];
                let weights = tiles[matrix].part(expert * each..(expert + 1) * each);
                debug_assert!(first + count <= rows, "the output has a row for each row of the group");
                // SAFETY: ranges do not overlap, so no element is written twice; the instruction set was detected.
                unsafe {
                    let out = out[matrix].start.add(first * each);
                    Product { weights, x: &x[group], rows: part, integers: run.integers, out }.run(run.isa);
                }
                from = end;
            }
        });
    }
}
