//! Last kernel of sampling: finds the bucket in which the drawn cumulative weight falls, then orders its tokens to find the token.
//!
//! One cube per row. Next: `engine/steps.rs`.
use cubecl::prelude::*;
use kernels_models::sampler::order::{BUCKETS, OCTAVES_MIN, ORIGIN};

use super::{
    COUNTERS, DECIDED, DRAWN_MAX, DRAWN_WORDS, INFINITE, LEAST, LIMB_BITS, LIMBS, ORIGIN_BITS, PARAMETERS,
    bucket_shift, extremes, key, number_of, place, weight, wide,
};
use crate::arithmetic::Features;
use crate::inline::{await_previous, release_next};

/// Largest `top_k` that the device supports: a cube orders this number of tokens.
pub(super) const TOP_K_MAX: u32 = MEMBERS as u32;

/// Units of the cube.
pub(super) const CHOOSERS: usize = 256;
/// Steps of a tree reduction over them.
const CHOOSER_STEPS: u32 = CHOOSERS.trailing_zeros();
/// Vectors of buckets that a unit loads per batch.
const VECTORS: usize = 2;
/// Buckets per unit.
const EACH: usize = BUCKETS / CHOOSERS;
/// Maximum tokens that the cube orders: with the buckets' sums they take 28 of the 32 KiB of shared memory that every device has.
const MEMBERS: usize = 512;
/// Shared memory of `choose`.
#[derive(CubeType)]
struct Choice {
    /// Inclusive prefix sums of the buckets' weights.
    sums: SharedMemory<u64>,
    /// One value per unit, for scans and reductions.
    parts: SharedMemory<u64>,
    keys: SharedMemory<i32>,
    ids: SharedMemory<u32>,
    weights: SharedMemory<u64>,
    /// A search result for all units: a bucket and the sum before it, or a token and the sum including it.
    found: SharedMemory<u64>,
    /// Total weight of the tokens that may be drawn.
    limit: SharedMemory<u64>,
    /// The number of collected tokens, and whether any collection overflowed.
    count: SharedMemory<u32>,
}

/// Draws the token of a row.
#[cube(launch_unchecked)]
pub(super) fn choose_kernel(
    logits: &Array<f32>,
    choices: &Array<u32>,
    survey: &Array<u32>,
    powers: &Array<u64>,
    sums: &mut Array<Atomic<u32>>,
    buckets: &Array<Vector<u32, Const<4>>>,
    tokens: &mut Array<u32>,
    drawn: &mut Array<u32>,
    vocab: u32,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (row, unit) = (CUBE_POS_X as usize, UNIT_POS_X as usize);
    let vocab = vocab as usize;
    let at = row * comptime!(PARAMETERS);
    let (high, id, low) = extremes(survey, row, unit);
    let sound = high < INFINITE && high > LEAST && low >= LEAST;
    let mut token = id;
    let mut decided = sound;
    // All units take the same branches: conditions depend only on settings, and overflowing collections are truncated and flagged.
    if choices[at] > 0u32 {
        let greatest = f64::cast_from(number_of(high));
        let octaves = f64::reinterpret(wide(choices[at + 4], choices[at + 5]));
        let mut choice = Choice {
            sums: SharedMemory::<u64>::new(comptime!(BUCKETS)),
            parts: SharedMemory::<u64>::new(comptime!(CHOOSERS)),
            keys: SharedMemory::<i32>::new(comptime!(MEMBERS)),
            ids: SharedMemory::<u32>::new(comptime!(MEMBERS)),
            weights: SharedMemory::<u64>::new(comptime!(MEMBERS)),
            found: SharedMemory::<u64>::new(2usize),
            limit: SharedMemory::<u64>::new(1usize),
            count: SharedMemory::<u32>::new(2usize),
        };
        if unit == 0 {
            choice.count[1] = 0u32;
        }
        add_up(sums, &mut choice, row, unit);
        let random = wide(choices[at + 2], choices[at + 3]);
        let top_p = f64::reinterpret(wide(choices[at + 6], choices[at + 7]));
        let min_p = f64::reinterpret(wide(choices[at + 8], choices[at + 9]));
        let most = weight(place(number_of(high), greatest, octaves), powers);
        let top_k = choices[at + 1];
        if top_k > 0u32 {
            // Collect the k most likely tokens with their weights: top-p, min-p and the draw then use only these.
            let last = u64::cast_from(top_k - 1u32);
            let bucket = locate(&mut choice, last, unit);
            let before = choice.found[1];
            collect(buckets, sums, &mut choice, bucket, bucket, vocab, row, 0usize, unit);
            weigh(logits, &mut choice, greatest, octaves, powers, true, vocab, row);
            find(&mut choice, before, last);
            let last_id = min(u32::cast_from(choice.found[0]), vocab as u32 - 1);
            sync_cube();
            collect(buckets, sums, &mut choice, 0usize, bucket, vocab, row, 1usize, unit);
            weigh(logits, &mut choice, greatest, octaves, powers, false, vocab, row);
            leave_out(&mut choice, key(logits[row * vocab + last_id as usize]), last_id);
            total_from(&mut choice, 0u64.runtime(), unit);
            let limit = choice.parts[0];
            limit_to(&mut choice, limit, unit);
        } else {
            let limit = choice.sums[comptime!(BUCKETS - 1)];
            limit_to(&mut choice, limit, unit);
        }
        if top_p < 1.0f64 {
            let target = share(choice.limit[0], top_p) - 1u64;
            if top_k == 0u32 {
                let bucket = locate(&mut choice, target, unit);
                let before = choice.found[1];
                collect(buckets, sums, &mut choice, bucket, bucket, vocab, row, 2usize, unit);
                weigh(logits, &mut choice, greatest, octaves, powers, false, vocab, row);
                find(&mut choice, before, target);
            } else {
                find(&mut choice, 0u64.runtime(), target);
            }
            let limit = choice.found[1];
            limit_to(&mut choice, limit, unit);
        }
        if min_p > 0.0f64 {
            let least = share(most, min_p);
            if top_k == 0u32 {
                let shift = bucket_shift(number_of(low), greatest, octaves);
                let bucket = first_below(&mut choice, least, shift, powers, unit);
                let before = select(bucket > 0, choice.sums[max(bucket, 1usize) - 1], 0u64);
                collect(buckets, sums, &mut choice, bucket, bucket, vocab, row, 3usize, unit);
                weigh(logits, &mut choice, greatest, octaves, powers, false, vocab, row);
                total_from(&mut choice, least, unit);
                let limit = min(choice.limit[0], before + choice.parts[0]);
                limit_to(&mut choice, limit, unit);
            } else {
                total_from(&mut choice, least, unit);
                let limit = min(choice.limit[0], choice.parts[0]);
                limit_to(&mut choice, limit, unit);
            }
        }
        let target = high_product(random, choice.limit[0]);
        if top_k == 0u32 {
            let bucket = locate(&mut choice, target, unit);
            let before = choice.found[1];
            collect(buckets, sums, &mut choice, bucket, bucket, vocab, row, 4usize, unit);
            weigh(logits, &mut choice, greatest, octaves, powers, false, vocab, row);
            find(&mut choice, before, target);
        } else {
            find(&mut choice, 0u64.runtime(), target);
        }
        token = min(u32::cast_from(choice.found[0]), vocab as u32 - 1);
        decided = sound && choice.count[1] == 0u32;
    }
    if unit == 0 {
        tokens[row] = token;
        drawn[row * comptime!(DRAWN_WORDS)] = token;
        drawn[row * comptime!(DRAWN_WORDS) + 1] = select(decided, DECIDED, 0u32);
    }
}

/// Reads the sums of the buckets and computes their prefix sums.
#[cube]
fn add_up(sums: &mut Array<Atomic<u32>>, choice: &mut Choice, row: usize, unit: usize) {
    let mut sum = 0u64.runtime();
    for i in 0..EACH {
        let bucket = unit * EACH + i;
        let at = (row * comptime!(BUCKETS) + bucket) * comptime!(LIMBS);
        #[unroll]
        for limb in 0..LIMBS {
            let shift = comptime!(limb as u64 * LIMB_BITS as u64).runtime();
            sum += u64::cast_from(sums[at + limb].load()) << shift;
        }
        choice.sums[bucket] = sum;
    }
    choice.parts[unit] = sum;
    sync_cube();
    #[unroll]
    for step in 0..CHOOSER_STEPS {
        let apart = comptime!(1usize << step);
        let mut other = 0u64.runtime();
        if unit >= apart {
            other = choice.parts[unit - apart];
        }
        sync_cube();
        let all = choice.parts[unit] + other;
        choice.parts[unit] = all;
        sync_cube();
    }
    let mut before = 0u64.runtime();
    if unit > 0 {
        before = choice.parts[unit - 1];
    }
    for i in 0..EACH {
        let sum = choice.sums[unit * EACH + i] + before;
        choice.sums[unit * EACH + i] = sum;
    }
    sync_cube();
}

/// The first bucket whose prefix sum exceeds `target`. Writes the sum before it to `found[1]`.
#[cube]
fn locate(choice: &mut Choice, target: u64, unit: usize) -> usize {
    for i in 0..EACH {
        let bucket = unit * EACH + i;
        let mut before = 0u64.runtime();
        if bucket > 0 {
            before = choice.sums[bucket - 1];
        }
        if before <= target && target < choice.sums[bucket] {
            choice.found[0] = u64::cast_from(bucket);
            choice.found[1] = before;
        }
    }
    sync_cube();
    let bucket = usize::cast_from(choice.found[0]);
    min(bucket, comptime!(BUCKETS - 1))
}

/// Number of collected tokens that fit.
#[cube]
fn members(choice: &Choice) -> usize {
    min(choice.count[0] as usize, comptime!(MEMBERS))
}

/// Sets the total weight of the tokens that may be drawn.
#[cube]
fn limit_to(choice: &mut Choice, limit: u64, unit: usize) {
    sync_cube();
    if unit == 0 {
        choice.limit[0] = limit;
    }
    sync_cube();
}

/// The first bucket that may hold tokens with a weight below `least`.
#[cube]
fn first_below(choice: &mut Choice, least: u64, shift: u64, powers: &Array<u64>, unit: usize) -> usize {
    let mut first = comptime!(BUCKETS as u64 - 1).runtime();
    for i in 0..EACH {
        let bucket = u64::cast_from(unit * EACH + i);
        // The least place of the bucket.
        let place = comptime!(ORIGIN_BITS + 1).runtime() - ((bucket + 1u64) << shift);
        let lowest = comptime!((OCTAVES_MIN + ORIGIN).to_bits()).runtime();
        if weight(max(place, lowest), powers) < least {
            first = min(first, bucket);
        }
    }
    choice.parts[unit] = first;
    sync_cube();
    #[unroll]
    for step in 1..comptime!(CHOOSER_STEPS + 1) {
        let apart = comptime!(CHOOSERS >> step);
        if unit < apart {
            choice.parts[unit] = min(choice.parts[unit], choice.parts[unit + apart]);
        }
        sync_cube();
    }
    let bucket = usize::cast_from(choice.parts[0]);
    sync_cube();
    bucket
}

/// Collects the ids of the tokens in buckets `from` to `to`, in any order; those above [`MEMBERS`] are dropped and flagged.
#[cube]
fn collect(
    buckets: &Array<Vector<u32, Const<4>>>,
    sums: &mut Array<Atomic<u32>>,
    choice: &mut Choice,
    from: usize,
    to: usize,
    vocab: usize,
    row: usize,
    #[comptime] counter: usize,
    unit: usize,
) {
    let counter = comptime!(DRAWN_MAX * BUCKETS * LIMBS + counter) + row * comptime!(COUNTERS);
    let fours = vocab.div_ceil(4usize);
    let mut vectors = Array::<Vector<u32, Const<4>>>::new(VECTORS);
    let mut i = UNIT_POS_X as usize;
    while i < fours {
        #[unroll]
        for k in 0..VECTORS {
            vectors[k] = buckets[row * fours + min(i + k * CHOOSERS, fours - 1)];
        }
        #[unroll]
        for k in 0..VECTORS {
            #[unroll]
            for j in 0..4usize {
                let bucket = vectors[k][j] as usize;
                if bucket >= from && bucket <= to && i + k * CHOOSERS < fours {
                    let at = sums[counter].fetch_add(1u32) as usize;
                    if at < comptime!(MEMBERS) {
                        choice.ids[at] = (4 * (i + k * CHOOSERS) + j) as u32;
                    }
                }
            }
        }
        i += comptime!(VECTORS * CHOOSERS);
    }
    sync_storage();
    sync_cube();
    if unit == 0 {
        let count = sums[counter].load();
        choice.count[0] = count;
        if count > comptime!(MEMBERS as u32) {
            choice.count[1] = 1u32;
        }
    }
    sync_cube();
}

/// Computes the keys and weights of the collected tokens; `counted`: each weight is 1.
#[cube]
fn weigh(
    logits: &Array<f32>,
    choice: &mut Choice,
    greatest: f64,
    octaves: f64,
    powers: &Array<u64>,
    #[comptime] counted: bool,
    vocab: usize,
    row: usize,
) {
    let mut i = UNIT_POS_X as usize;
    while i < members(choice) {
        let logit = logits[row * vocab + choice.ids[i] as usize];
        choice.keys[i] = key(logit);
        if comptime!(counted) {
            choice.weights[i] = 1u64.runtime();
        } else {
            choice.weights[i] = weight(place(logit, greatest, octaves), powers);
        }
        i += comptime!(CHOOSERS);
    }
    sync_cube();
}

/// Whether a token comes before another: more likely, or equally likely with a lower id.
#[cube]
fn is_before(key: i32, id: u32, other_key: i32, other_id: u32) -> bool {
    key > other_key || (key == other_key && id < other_id)
}

/// Sets the weight of tokens after the last kept one to 0.
#[cube]
fn leave_out(choice: &mut Choice, last_key: i32, last_id: u32) {
    let mut i = UNIT_POS_X as usize;
    while i < members(choice) {
        if is_before(last_key, last_id, choice.keys[i], choice.ids[i]) {
            choice.weights[i] = 0u64.runtime();
        }
        i += comptime!(CHOOSERS);
    }
    sync_cube();
}

/// Finds the collected token at which the cumulative weight, in order, first exceeds `target`. Writes its id to `found[0]` and the
/// sum including it to `found[1]`. `before`: the weight before the first collected token.
#[cube]
fn find(choice: &mut Choice, before: u64, target: u64) {
    let count = members(choice);
    sync_cube();
    let mut i = UNIT_POS_X as usize;
    while i < count {
        let (mine, id) = (choice.keys[i], choice.ids[i]);
        let mut sum = 0u64.runtime();
        for other in 0..count {
            if is_before(choice.keys[other], choice.ids[other], mine, id) {
                sum += choice.weights[other];
            }
        }
        let start = before + sum;
        if start <= target && target < start + choice.weights[i] {
            choice.found[0] = u64::cast_from(id);
            choice.found[1] = start + choice.weights[i];
        }
        i += comptime!(CHOOSERS);
    }
    sync_cube();
}

/// Sums the collected tokens' weights that are at least `least` into `parts[0]`.
#[cube]
fn total_from(choice: &mut Choice, least: u64, unit: usize) {
    let mut sum = 0u64.runtime();
    let mut i = UNIT_POS_X as usize;
    while i < members(choice) {
        if choice.weights[i] >= least {
            sum += choice.weights[i];
        }
        i += comptime!(CHOOSERS);
    }
    choice.parts[unit] = sum;
    sync_cube();
    #[unroll]
    for step in 1..comptime!(CHOOSER_STEPS + 1) {
        let apart = comptime!(CHOOSERS >> step);
        if unit < apart {
            let sum = choice.parts[unit] + choice.parts[unit + apart];
            choice.parts[unit] = sum;
        }
        sync_cube();
    }
}

/// `part` of a sum, rounded up and clamped to 1 ..= sum.
#[cube]
fn share(of: u64, part: f64) -> u64 {
    let amount = u64::cast_from(f64::ceil(f64::cast_from(of) * part));
    max(min(amount, of), 1u64)
}

/// The high 64 bits of a product.
#[cube]
pub(crate) fn high_product(a: u64, b: u64) -> u64 {
    let low = 0xffff_ffffu64;
    let (a0, a1) = (a & low, a >> 32u64);
    let (b0, b1) = (b & low, b >> 32u64);
    let middle = a1 * b0 + ((a0 * b0) >> 32u64);
    let other = a0 * b1 + (middle & low);
    a1 * b1 + (middle >> 32u64) + (other >> 32u64)
}
