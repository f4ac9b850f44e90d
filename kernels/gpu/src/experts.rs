//! Mixtures of experts on a device: chooses the experts of each row, and adds their outputs to the residual stream. The products
//! are in `product/experts.rs`.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::experts::{Gating, Routing, USED_MAX};
use kernels::order::{CHUNKS, LANES};
use kernels::tile::ROWS as TILE_ROWS;

use crate::arithmetic::{Features, exp, fused, opaque_float, reciprocal, sigmoid};
use crate::inline::{await_previous, release_next};
use crate::platform::{Platform, array};
use crate::rows::UNITS;

/// The experts of rows, and the factors of their outputs: `[rows, used]`, experts ascending.
#[derive(Clone, Debug)]
pub(crate) struct Choices {
    /// Numbers of the experts.
    pub(crate) experts: Handle,
    /// Factors.
    pub(crate) weights: Handle,
    /// Experts of a row.
    pub(crate) used: usize,
}

/// Scores of rows.
pub(crate) struct Scores<'a> {
    /// `[rows, experts]`, or `[rows, chunks, experts]` with the experts padded to whole tile rows.
    pub(crate) numbers: &'a Handle,
    /// The scores are sums of chunks, and a bias per expert is added to them if there is one.
    pub(crate) chunked: bool,
    pub(crate) bias: Option<&'a Handle>,
}

/// Chooses the experts of `rows` rows of `count` scores, and by corrections if there are any: see
/// [`kernels::order::experts::route`].
pub(crate) fn route<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    scores: &Scores<'_>,
    corrections: Option<&Handle>,
    count: usize,
    routing: Routing,
    rows: usize,
    choices: &Choices,
) {
    let used = choices.used;
    let Scores { numbers, chunked, bias } = *scores;
    let chunks = if chunked { CHUNKS } else { 1 };
    let stride = if chunked { count.next_multiple_of(TILE_ROWS) } else { count };
    // SAFETY: a cube stays within its row; lanes past the last expert do not read.
    unsafe {
        route_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(rows as u32, 1, 1),
            CubeDim::new_1d(LANES as u32),
            array(numbers, rows * chunks * stride),
            array(bias.unwrap_or(numbers), count),
            array(corrections.unwrap_or(numbers), count),
            array(&choices.experts, rows * used),
            array(&choices.weights, rows * used),
            count as u32,
            stride as u32,
            used as u32,
            routing.scale,
            chunks,
            bias.is_some(),
            count.div_ceil(LANES),
            routing.gating,
            corrections.is_some(),
            routing.normalised,
            able,
        );
    }
}

/// The bits of minus infinity.
const LOWEST: u32 = 0xff80_0000;

/// A number that sorts like a score. NaN sorts like minus infinity, and both zeros are equal. Above 0.
#[cube]
fn key_of(score: f32) -> u32 {
    let bits = select(score == 0.0f32, 0u32, u32::reinterpret(score));
    let bits = select((bits & 0x7fff_ffffu32) > 0x7f80_0000u32, LOWEST, bits);
    select((bits >> 31u32) == 1u32, !bits, bits | 0x8000_0000u32)
}

/// The largest number of all lanes.
#[cube]
fn highest(mine: u32, shared: &mut SharedMemory<u32>, #[comptime] able: Features) -> u32 {
    let mut all = mine;
    if comptime!(able.matrices) {
        #[unroll]
        for step in 0..5u32 {
            all = max(all, plane_shuffle_xor(all, comptime!(1 << step)));
        }
    } else {
        shared[UNIT_POS_X as usize] = mine;
        sync_cube();
        for lane in 0..LANES {
            all = max(all, shared[lane]);
        }
        sync_cube();
    }
    all
}

/// The sum of all lanes: see [`kernels::order::butterfly_sum`].
#[cube]
fn sum_of_lanes(mine: f32, shared: &mut SharedMemory<f32>, #[comptime] able: Features) -> f32 {
    let mut all = mine;
    if comptime!(able.matrices) {
        #[unroll]
        for step in 0..5u32 {
            all += plane_shuffle_xor(all, comptime!((LANES as u32 / 2) >> step));
        }
    } else {
        let lane = UNIT_POS_X as usize;
        shared[lane] = mine;
        sync_cube();
        #[unroll]
        for step in 0..5u32 {
            let apart = comptime!((LANES / 2) >> step);
            if lane < apart {
                let other = shared[lane + apart];
                shared[lane] += other;
            }
            sync_cube();
        }
        all = shared[0];
    }
    all
}

#[cube(launch_unchecked)]
fn route_kernel(
    scores: &Array<f32>,
    bias: &Array<f32>,
    corrections: &Array<f32>,
    experts: &mut Array<u32>,
    weights: &mut Array<f32>,
    count: u32,
    stride: u32,
    used: u32,
    scale: f32,
    #[comptime] chunks: usize,
    #[comptime] biased: bool,
    #[comptime] per_lane: usize,
    #[comptime] gating: Gating,
    #[comptime] corrected: bool,
    #[comptime] normalised: bool,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (lane, row) = (UNIT_POS_X as usize, CUBE_POS_X as usize);
    let (count, used) = (count as usize, used as usize);
    let mut values = Array::<f32>::new(per_lane);
    let mut keys = Array::<u32>::new(per_lane);
    let sigmoids = comptime!(gating == Gating::Sigmoid);
    // 1 if a score is not finite; a softmax is NaN then.
    let mut bad = 0u32;
    #[unroll]
    for i in 0..per_lane {
        let expert = comptime!(i * LANES) + lane;
        values[i] = 0.0f32;
        keys[i] = 0u32;
        if expert < count {
            let mut score = 0.0f32;
            if comptime!(chunks == 1) {
                score = scores[row * stride as usize + expert];
            } else {
                #[unroll]
                for chunk in 0..chunks {
                    score += scores[(row * chunks + chunk) * stride as usize + expert];
                }
            }
            if comptime!(biased) {
                score += bias[expert];
            }
            values[i] = score;
            let mut key = score;
            if comptime!(sigmoids) {
                bad = select((u32::reinterpret(score) & 0x7f80_0000u32) == 0x7f80_0000u32, 1u32, bad);
                values[i] = opaque_float(sigmoid(score, able));
                if comptime!(corrected) {
                    key = values[i] + corrections[expert];
                }
            }
            keys[i] = key_of(key);
        }
    }
    let mut shared_keys = SharedMemory::<u32>::new(comptime!(LANES));
    let mut shared_sums = SharedMemory::<f32>::new(comptime!(LANES));
    let mut chosen = SharedMemory::<u32>::new(comptime!(USED_MAX));
    let mut chosen_scores = SharedMemory::<f32>::new(comptime!(USED_MAX));
    let mut ordered = SharedMemory::<f32>::new(comptime!(USED_MAX));
    let mut largest = 0u32;
    for place in 0..used {
        let mut best = 0u32;
        let mut at = 0u32;
        #[unroll]
        for i in 0..per_lane {
            if keys[i] > best {
                best = keys[i];
                at = comptime!((i * LANES) as u32) + UNIT_POS_X;
            }
        }
        let top = highest(best, &mut shared_keys, able);
        if place == 0 {
            largest = top;
        }
        // Of equal scores the first wins: the highest complement of an index.
        let first = !highest(select(best == top, !at, 0u32), &mut shared_keys, able);
        #[unroll]
        for i in 0..per_lane {
            if comptime!((i * LANES) as u32) + UNIT_POS_X == first {
                keys[i] = 0u32;
                chosen[place] = first;
                chosen_scores[place] = values[i];
            }
        }
    }
    let bits = select((largest >> 31u32) == 1u32, largest & 0x7fff_ffffu32, !largest);
    let largest = f32::reinterpret(bits);
    // Factor of all shares: 1, or NaN.
    let mut any = 0u32;
    if comptime!(sigmoids) {
        any = highest(bad, &mut shared_keys, able);
    }
    let mut inverse = f32::reinterpret(select(any == 1u32, 0x7fc0_0000u32, 0x3f80_0000u32));
    if comptime!(!sigmoids) {
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..per_lane {
            if comptime!(i * LANES) + lane < count {
                sum += opaque_float(exp(values[i] - largest, able));
            }
        }
        inverse = reciprocal(sum_of_lanes(sum, &mut shared_sums, able), able);
    }
    sync_cube();
    let mut place = 0usize;
    if lane < used {
        for other in 0..used {
            if chosen[other] < chosen[lane] {
                place += 1;
            }
        }
        let mut share = chosen_scores[lane];
        if comptime!(!sigmoids) {
            share = opaque_float(exp(share - largest, able));
        }
        ordered[place] = share * inverse;
    }
    sync_cube();
    if lane < used {
        let mut factor = ordered[place];
        if comptime!(normalised) {
            let mut total = 0.0f32;
            for other in 0..used {
                total += ordered[other];
            }
            factor *= reciprocal(total, able);
        }
        experts[row * used + place] = chosen[lane];
        weights[row * used + place] = factor * scale;
    }
}

/// Writes the slot of each chosen expert; `slots` has one for each of `experts` experts.
pub(crate) fn look_up<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    slots: &Handle,
    experts: usize,
    chosen: &Handle,
    pairs: usize,
    found: &Handle,
) {
    // SAFETY: units past the last pair do nothing; chosen experts are below their number.
    unsafe {
        look_up_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(pairs.div_ceil(UNITS as usize) as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            array(slots, experts),
            array(chosen, pairs),
            array(found, pairs),
            pairs as u32,
            able,
        );
    }
}

#[cube(launch_unchecked)]
fn look_up_kernel(
    slots: &Array<u32>,
    chosen: &Array<u32>,
    found: &mut Array<u32>,
    pairs: u32,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let pair = ABSOLUTE_POS;
    if pair < pairs as usize {
        found[pair] = slots[chosen[pair] as usize];
    }
}

/// Replaces the outputs of some pairs. Row i of `rows[count, cols]` is the output of pair `numbers[i]`, or of none if that is not
/// below `pairs`.
pub(crate) fn put_rows<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    numbers: &Handle,
    rows: &Handle,
    count: usize,
    cols: usize,
    outputs: &Handle,
    pairs: usize,
) {
    // SAFETY: units past the end of a row do nothing, and neither do those of other pairs.
    unsafe {
        put_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(cols.div_ceil(UNITS as usize) as u32, count as u32, 1),
            CubeDim::new_1d(UNITS),
            array(numbers, count),
            array(rows, count * cols),
            array(outputs, pairs * cols),
            cols as u32,
            pairs as u32,
            able,
        );
    }
}

#[cube(launch_unchecked)]
fn put_kernel(
    numbers: &Array<u32>,
    rows: &Array<f32>,
    outputs: &mut Array<f32>,
    cols: u32,
    pairs: u32,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let row = CUBE_POS_Y as usize;
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let pair = numbers[row];
    if column < cols && pair < pairs {
        outputs[(pair * cols + column) as usize] = rows[row * cols as usize + column as usize];
    }
}

/// Multiplies each row of `rows[count, cols]` by its factor.
pub(crate) fn scale_rows<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    rows: &Handle,
    factors: &Handle,
    count: usize,
    cols: usize,
) {
    // SAFETY: units past the end of a row do nothing.
    unsafe {
        scale_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(cols.div_ceil(UNITS as usize) as u32, count as u32, 1),
            CubeDim::new_1d(UNITS),
            array(rows, count * cols),
            array(factors, count),
            cols as u32,
            able,
        );
    }
}

#[cube(launch_unchecked)]
fn scale_kernel(rows: &mut Array<f32>, factors: &Array<f32>, cols: u32, #[comptime] able: Features) {
    release_next(able);
    await_previous(able);
    let (cols, row) = (cols as usize, CUBE_POS_Y as usize);
    let column = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X) as usize;
    if column < cols {
        let number = rows[row * cols + column];
        rows[row * cols + column] = number * factors[row];
    }
}

/// The expert that computes every row: its outputs `[rows, cols]`, and the numbers `[rows]` whose sigmoids multiply them, if any.
pub(crate) struct SharedOutput<'a> {
    pub(crate) gates: Option<&'a Handle>,
    pub(crate) outputs: &'a Handle,
}

/// Adds the outputs `[rows, used, cols]` of each row's experts, times their factors if `weighted`, and that of the shared expert to
/// `hidden`: see [`kernels::order::experts::combine`].
pub(crate) fn combine<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    outputs: &Handle,
    choices: &Choices,
    weighted: bool,
    shared: Option<&SharedOutput<'_>>,
    rows: usize,
    cols: usize,
    hidden: &Handle,
) {
    let used = choices.used;
    let gates = shared.and_then(|shared| shared.gates);
    let shared_outputs = shared.map_or(outputs, |shared| shared.outputs);
    // SAFETY: units past the end of a row do nothing.
    unsafe {
        combine_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(cols.div_ceil(UNITS as usize) as u32, rows as u32, 1),
            CubeDim::new_1d(UNITS),
            array(outputs, rows * used * cols),
            array(&choices.weights, rows * used),
            array(gates.unwrap_or(&choices.weights), rows),
            array(shared_outputs, rows * cols),
            array(hidden, rows * cols),
            cols as u32,
            used as u32,
            weighted,
            shared.is_some(),
            gates.is_some(),
            able,
        );
    }
}

#[cube(launch_unchecked)]
fn combine_kernel(
    outputs: &Array<f32>,
    weights: &Array<f32>,
    gates: &Array<f32>,
    shared_outputs: &Array<f32>,
    hidden: &mut Array<f32>,
    cols: u32,
    used: u32,
    #[comptime] weighted: bool,
    #[comptime] shared: bool,
    #[comptime] gated: bool,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (cols, used, row) = (cols as usize, used as usize, CUBE_POS_Y as usize);
    let column = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X) as usize;
    if column < cols {
        let mut sum = 0.0f32;
        for place in 0..used {
            let output = row * used + place;
            let mut factor = 1.0f32;
            if comptime!(weighted) {
                factor = weights[output];
            }
            sum = fused(factor, outputs[output * cols + column], sum, able);
        }
        if comptime!(shared) {
            let mut factor = 1.0f32;
            if comptime!(gated) {
                factor = sigmoid(gates[row], able);
            }
            sum = fused(factor, shared_outputs[row * cols + column], sum, able);
        }
        hidden[row * cols + column] += sum;
    }
}
