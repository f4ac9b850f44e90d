//! Sampling on the device: draws the same tokens as [`kernels_models::sampler`] from the same logits.
//!
//! Three launches for any settings: `survey` finds the extremes of the logits, `weigh` adds the weights of tokens into buckets by
//! logit, `choose` finds the bucket in which a cumulative weight falls and orders its tokens. Weights are the integers of
//! `kernels_models::sampler::order`, so sums are exact in any order. The host draws for rows that the kernels cannot decide: non-finite
//! logits, or more tokens in one bucket than a cube can order.
//!
//! CubeCL may alias a variable initialised from a parameter with the parameter, so loop counters start from `UNIT_POS_X`, not `unit`.
//! Kernel compilers also fuse products and sums of f64, so each product passes through [`opaque`]. Next: `draw/choose.rs`.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels_models::sampler::order::{BUCKETS, OCTAVE_SHIFT, OCTAVES_MIN, ORIGIN, POWERS, STEP_SHIFT, STEPS};
use kernels_models::sampler::{SamplerSettings, random};

use crate::arithmetic::{Features, opaque};
use crate::inline::{await_previous, release_next};
use crate::platform::{Platform, array};

mod choose;

#[cfg(test)]
pub(crate) use choose::high_product;
use choose::{CHOOSERS, TOP_K_MAX, choose_kernel};

/// Maximum rows per draw: one for each request that a stage runs at once.
pub(crate) const DRAWN_MAX: usize = 64;
/// Words of a row's [`parameters`].
pub(crate) const PARAMETERS: usize = 16;
/// Words of a row's result: the token, and whether it is [`DECIDED`].
pub(crate) const DRAWN_WORDS: usize = 2;
/// The device has drawn the token.
pub(crate) const DECIDED: u32 = 1;
/// Cubes that share the logits of a row.
const CUBES: usize = 64;
/// Units per cube.
const UNITS: usize = 256;
/// Words of a cube's result: greatest key, the lowest id with that key, least key.
const SURVEYED: usize = 3;
/// A weight of 44 bits is summed in limbs of 11 bits, so that sums over 2²⁰ tokens fit into 32 bits.
const LIMBS: usize = 4;
const LIMB_BITS: u32 = 11;
/// Counters per row: one for each call of `collect` in `choose`.
const COUNTERS: usize = 5;

/// Scratch memory and tables for sampling.
#[derive(Clone, Debug)]
pub(crate) struct DrawScratch {
    /// `[rows, cubes, 3]`: see [`SURVEYED`].
    pub(crate) survey: Handle,
    /// `[rows, buckets, limbs]`, then `[rows, counters]`.
    pub(crate) sums: Handle,
    /// `[rows, vocabulary]`: the bucket of each token. Rows are padded to multiples of four with an invalid bucket.
    pub(crate) buckets: Handle,
    /// [`POWERS`]
    powers: Handle,
    vocab: usize,
}

impl DrawScratch {
    /// Total bytes.
    pub(crate) const fn bytes(vocab: usize) -> usize {
        let sums = CUBES * SURVEYED + BUCKETS * LIMBS + COUNTERS;
        4 * DRAWN_MAX * (sums + vocab.next_multiple_of(4)) + 8 * STEPS
    }

    /// For tests without a device.
    #[cfg(test)]
    pub(crate) fn of(buffer: fn() -> Handle, vocab: usize) -> Self {
        Self { survey: buffer(), sums: buffer(), buckets: buffer(), powers: buffer(), vocab }
    }

    pub(crate) fn new<R: Platform>(client: &ComputeClient<R>, vocab: usize) -> Self {
        Self {
            survey: client.empty(4 * DRAWN_MAX * CUBES * SURVEYED),
            sums: client.empty(4 * DRAWN_MAX * (BUCKETS * LIMBS + COUNTERS)),
            buckets: client
                .create_from_slice(bytemuck::cast_slice(&vec![u32::MAX; DRAWN_MAX * vocab.next_multiple_of(4)])),
            powers: client.create_from_slice(bytemuck::cast_slice(&POWERS)),
            vocab,
        }
    }
}

/// Whether the device supports these settings; otherwise the host samples.
pub(crate) fn draws(settings: &SamplerSettings, vocab: usize) -> bool {
    let cut = settings.top_k != 0 && (settings.top_k as usize) < vocab;
    settings.temperature == 0.0 || !cut || settings.top_k <= TOP_K_MAX
}

/// A row's settings as `choose` reads them: whether temperature is above 0, top-k (0: off), the 64-bit random number, then as f64
/// the octaves of weight per unit of logit, top-p and min-p.
pub(crate) fn parameters(settings: &SamplerSettings, position: u32, vocab: usize) -> [u32; PARAMETERS] {
    let mut words = [0; PARAMETERS];
    if settings.temperature == 0.0 {
        return words;
    }
    let cut = settings.top_k != 0 && (settings.top_k as usize) < vocab;
    words[0] = 1;
    words[1] = if cut { settings.top_k } else { 0 };
    let octaves = std::f64::consts::LOG2_E / f64::from(settings.temperature);
    let doubles = [octaves, f64::from(settings.top_p), f64::from(settings.min_p)].map(f64::to_bits);
    let wide = [random(settings.seed, position)].into_iter().chain(doubles);
    for (pair, bits) in words[2..].chunks_exact_mut(2).zip(wide) {
        pair.copy_from_slice(&[bits as u32, (bits >> 32) as u32]);
    }
    words
}

/// Draws a token from each row of `logits[rows, vocabulary]` by `settings[rows, PARAMETERS]`. Writes tokens to `tokens[rows]`, the
/// input of the next step, and tokens with their [`DECIDED`] flag to `drawn[rows, DRAWN_WORDS]`.
pub(crate) fn draw<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    scratch: &DrawScratch,
    logits: &Handle,
    settings: &Handle,
    rows: usize,
    tokens: &Handle,
    drawn: &Handle,
) {
    let vocab = scratch.vocab;
    let (cubes, units) = (CubeCount::Static(CUBES as u32, rows as u32, 1), CubeDim::new_1d(UNITS as u32));
    let (survey, sums) = (DRAWN_MAX * CUBES * SURVEYED, DRAWN_MAX * (BUCKETS * LIMBS + COUNTERS));
    // SAFETY: there are at most `DRAWN_MAX` rows; units stay within the vocabulary of their row.
    unsafe {
        survey_kernel::launch_unchecked::<R>(
            client,
            cubes.clone(),
            units,
            array(logits, rows * vocab),
            array(&scratch.survey, survey),
            array(&scratch.sums, sums),
            vocab as u32,
            able,
        );
        weigh_kernel::launch_unchecked::<R>(
            client,
            cubes,
            units,
            array(logits, rows * vocab),
            array(settings, rows * PARAMETERS),
            array(&scratch.survey, survey),
            array(&scratch.powers, STEPS),
            array(&scratch.sums, sums),
            array(&scratch.buckets, rows * vocab.next_multiple_of(4)),
            vocab as u32,
            able,
        );
        choose_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(rows as u32, 1, 1),
            CubeDim::new_1d(CHOOSERS as u32),
            array(logits, rows * vocab),
            array(settings, rows * PARAMETERS),
            array(&scratch.survey, survey),
            array(&scratch.powers, STEPS),
            array(&scratch.sums, sums),
            array(&scratch.buckets, rows * vocab.next_multiple_of(4)),
            array(tokens, rows),
            array(drawn, rows * DRAWN_WORDS),
            vocab as u32,
            able,
        );
    }
}

/// An integer with the sort order of the numbers, from -∞ to +∞ with NaNs outside. Both zeros have one key.
#[cube]
fn key(number: f32) -> i32 {
    let bits = i32::reinterpret(number);
    let ordered = select(bits < 0i32, bits ^ 0x7fff_ffffi32, bits);
    select(number == 0.0f32, 0i32, ordered)
}

/// The inverse of [`key`].
#[cube]
fn number_of(key: i32) -> f32 {
    f32::reinterpret(select(key < 0i32, key ^ 0x7fff_ffffi32, key))
}

/// Keys of the infinities.
const INFINITE: i32 = 0x7f80_0000;
const LEAST: i32 = (0xff80_0000u32 as i32) ^ 0x7fff_ffff;

/// The extremes of a part of a row's logits per cube. Also clears the sums of `weigh`.
#[cube(launch_unchecked)]
fn survey_kernel(
    logits: &Array<f32>,
    survey: &mut Array<u32>,
    sums: &mut Array<Atomic<u32>>,
    vocab: u32,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (cube, row, unit) = (CUBE_POS_X as usize, CUBE_POS_Y as usize, UNIT_POS_X as usize);
    let vocab = vocab as usize;
    let words = comptime!(BUCKETS * LIMBS / CUBES);
    let mut i = UNIT_POS_X as usize;
    while i < words {
        sums[row * comptime!(BUCKETS * LIMBS) + cube * words + i].store(0u32);
        i += comptime!(UNITS);
    }
    if cube == 0 && unit < COUNTERS {
        sums[comptime!(DRAWN_MAX * BUCKETS * LIMBS) + row * comptime!(COUNTERS) + unit].store(0u32);
    }
    let (start, end) = part(vocab, cube);
    let mut high = comptime!(i32::MIN).runtime();
    let mut low = comptime!(i32::MAX).runtime();
    let mut id = 0u32;
    let mut i = start + unit;
    while i < end {
        let k = key(logits[row * vocab + i]);
        if k > high {
            high = k;
            id = i as u32;
        }
        low = min(low, k);
        i += comptime!(UNITS);
    }
    let mut highs = SharedMemory::<i32>::new(comptime!(UNITS));
    let mut ids = SharedMemory::<u32>::new(comptime!(UNITS));
    let mut lows = SharedMemory::<i32>::new(comptime!(UNITS));
    highs[unit] = high;
    ids[unit] = id;
    lows[unit] = low;
    join(&mut highs, &mut ids, &mut lows, unit, UNITS);
    if unit == 0 {
        let at = (row * comptime!(CUBES) + cube) * comptime!(SURVEYED);
        survey[at] = u32::reinterpret(highs[0]);
        survey[at + 1] = ids[0];
        survey[at + 2] = u32::reinterpret(lows[0]);
    }
}

/// The tokens of a cube's part as (start, end).
#[cube]
fn part(vocab: usize, cube: usize) -> (usize, usize) {
    let each = vocab.div_ceil(comptime!(CUBES));
    (min(cube * each, vocab), min((cube + 1) * each, vocab))
}

/// Reduces the extremes of `count` units, a power of two, to the first unit. The lowest id wins among equal maxima.
#[cube]
fn join(
    highs: &mut SharedMemory<i32>,
    ids: &mut SharedMemory<u32>,
    lows: &mut SharedMemory<i32>,
    unit: usize,
    #[comptime] count: usize,
) {
    sync_cube();
    #[unroll]
    for step in 1..comptime!(count.trailing_zeros() + 1) {
        let apart = comptime!(count >> step);
        if unit < apart {
            let other = unit + apart;
            if highs[other] > highs[unit] || (highs[other] == highs[unit] && ids[other] < ids[unit]) {
                highs[unit] = highs[other];
                ids[unit] = ids[other];
            }
            lows[unit] = min(lows[unit], lows[other]);
        }
        sync_cube();
    }
}

/// The extremes over all cubes: key of the greatest logit, its id, key of the least.
#[cube]
fn extremes(survey: &Array<u32>, row: usize, unit: usize) -> (i32, u32, i32) {
    let mut highs = SharedMemory::<i32>::new(comptime!(CUBES));
    let mut ids = SharedMemory::<u32>::new(comptime!(CUBES));
    let mut lows = SharedMemory::<i32>::new(comptime!(CUBES));
    if unit < comptime!(CUBES) {
        let at = (row * comptime!(CUBES) + unit) * comptime!(SURVEYED);
        highs[unit] = i32::reinterpret(survey[at]);
        ids[unit] = survey[at + 1];
        lows[unit] = i32::reinterpret(survey[at + 2]);
    }
    join(&mut highs, &mut ids, &mut lows, unit, CUBES);
    (highs[0], ids[0], lows[0])
}

/// Joins two words into 64 bits.
#[cube]
pub(crate) fn wide(low: u32, high: u32) -> u64 {
    (u64::cast_from(high) << 32u64) | u64::cast_from(low)
}

/// An exact f64 constant. Some kernel compilers emit f64 literals with f32 digits.
#[cube]
fn double(#[comptime] bits: u64) -> f64 {
    let bits = RuntimeCell::<u64>::new(bits.runtime()); // a literal cannot be reinterpreted
    f64::reinterpret(bits.read())
}

/// The place of a logit on the weight scale: see `Scale::fixed_point_octaves` in `kernels_models::sampler::order`.
#[cube]
pub(crate) fn place(logit: f32, greatest: f64, octaves: f64) -> u64 {
    let far = opaque((f64::cast_from(logit) - greatest) * octaves);
    let least = double(comptime!(OCTAVES_MIN.to_bits()));
    let far = select(far > least, far, least);
    u64::reinterpret(far + double(ORIGIN_BITS))
}

/// Bits of [`ORIGIN`].
const ORIGIN_BITS: u64 = ORIGIN.to_bits();
const LN2: f64 = std::f64::consts::LN_2;
const SQUARE: f64 = LN2 * LN2 / 2.0;
const CUBE: f64 = LN2 * LN2 * LN2 / 6.0;
/// Bits of 2^52: adding it rounds a number to an integer and leaves that in the low bits.
const ROUND_BITS: u64 = ((1u64 << 52) as f64).to_bits();
const STEP_MASK: u64 = (1 << STEP_SHIFT) - 1;

/// The weight at a [`place`]: see `weight` in `kernels_models::sampler::order`.
#[cube]
pub(crate) fn weight(place: u64, powers: &Array<u64>) -> u64 {
    let middle =
        f64::reinterpret((place & comptime!(!STEP_MASK).runtime()) | comptime!(1u64 << (STEP_SHIFT - 1)).runtime());
    let r = f64::reinterpret(place) - middle;
    let third = double(comptime!(SQUARE.to_bits())) + opaque(r * double(comptime!(CUBE.to_bits())));
    let second = double(comptime!(LN2.to_bits())) + opaque(r * third);
    let power = double(comptime!(1.0f64.to_bits())) + opaque(r * second);
    let step =
        usize::cast_from((place >> comptime!(STEP_SHIFT as u64).runtime()) & comptime!(STEPS as u64 - 1).runtime());
    let octave = (place >> comptime!(OCTAVE_SHIFT as u64).runtime()) & 127u64;
    let scaled = opaque(f64::reinterpret(powers[step] + (octave << 52u64)) * power);
    u64::reinterpret(scaled + double(ROUND_BITS)) - ROUND_BITS.runtime()
}

/// Right shift that turns the distance of a place from the origin into a bucket index.
#[cube]
fn bucket_shift(least: f32, greatest: f64, octaves: f64) -> u64 {
    let widest = comptime!(ORIGIN_BITS).runtime() - place(least, greatest, octaves);
    let mut shift = 0u64;
    while (widest >> shift) >= comptime!(BUCKETS as u64).runtime() {
        shift += 1u64;
    }
    shift
}

/// Octaves of weight per unit of logit for the buckets. With `top_k` this is for temperature 1, because at a low temperature all but
/// a few tokens would share the last bucket.
#[cube]
fn bucket_octaves(choices: &Array<u32>, row: usize) -> f64 {
    let at = row * comptime!(PARAMETERS);
    let octaves = f64::reinterpret(wide(choices[at + 4], choices[at + 5]));
    select(choices[at + 1] > 0u32, double(comptime!(std::f64::consts::LOG2_E.to_bits())), octaves)
}

/// Adds the weights of a row's tokens into buckets, a part per cube. With `top_k` it counts the tokens instead.
#[cube(launch_unchecked)]
fn weigh_kernel(
    logits: &Array<f32>,
    choices: &Array<u32>,
    survey: &Array<u32>,
    powers: &Array<u64>,
    sums: &mut Array<Atomic<u32>>,
    buckets: &mut Array<u32>,
    vocab: u32,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (cube, row, unit) = (CUBE_POS_X as usize, CUBE_POS_Y as usize, UNIT_POS_X as usize);
    let vocab = vocab as usize;
    if choices[row * comptime!(PARAMETERS)] == 0u32 {
        terminate!();
    }
    let (high, _id, low) = extremes(survey, row, unit);
    let greatest = f64::cast_from(number_of(high));
    let octaves = bucket_octaves(choices, row);
    let counted = choices[row * comptime!(PARAMETERS) + 1] > 0u32;
    let shift = bucket_shift(number_of(low), greatest, octaves);
    let (start, end) = part(vocab, cube);
    let mut i = start + unit;
    while i < end {
        let at = place(logits[row * vocab + i], greatest, octaves);
        let bucket = u32::cast_from((comptime!(ORIGIN_BITS).runtime() - at) >> shift);
        // Non-finite logits may have any place; the host samples such rows.
        let bucket = min(bucket, comptime!(BUCKETS as u32 - 1));
        buckets[row * (vocab.div_ceil(4usize) * 4) + i] = bucket;
        let mut value = 1u64.runtime();
        if !counted {
            value = weight(at, powers);
        }
        let to = (row * comptime!(BUCKETS) + bucket as usize) * comptime!(LIMBS);
        #[unroll]
        for limb in 0..LIMBS {
            let shift = comptime!(limb as u64 * LIMB_BITS as u64).runtime();
            let bits = u32::cast_from(value >> shift) & comptime!((1u32 << LIMB_BITS) - 1);
            if bits > 0u32 {
                sums[to + limb].fetch_add(bits);
            }
        }
        i += comptime!(UNITS);
    }
}
