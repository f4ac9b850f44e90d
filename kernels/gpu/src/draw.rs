//! Tokens drawn from logits on the device: the same ones as [`kernels::sampler`] draws from the same logits.
//!
//! Three launches whatever the settings: `survey` finds the extremes of the logits, `weigh` adds the weights of tokens into buckets
//! by logit, `choose` finds the bucket that a share of the weight falls into and orders its members. Weights are the integers of
//! `kernels::sampler::order`, so sums are exact in any order. A row that these do not decide (unsound logits, or more tokens in one
//! bucket than a cube orders) is left to the host.
//!
//! In CubeCL a variable that begins as a copy of a parameter may be the parameter itself: loops begin at `UNIT_POS_X`, not at `unit`.
//! Compilers of kernels fuse products and sums of doubles, too: each product passes through [`opaque`]. Next: `engine/steps.rs`.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::sampler::order::{BUCKETS, OCTAVE_SHIFT, OCTAVES_MIN, ORIGIN, POWERS, STEP_SHIFT, STEPS};
use kernels::sampler::{SamplerSettings, random};

use crate::arithmetic::opaque;
use crate::{Platform, array};

/// Rows that are drawn from at once: those of a recorded step.
pub(crate) const DRAWN_MAX: usize = 8;
/// Words of a row's [`parameters`].
pub(crate) const PARAMETERS: usize = 16;
/// Words of a row's result: the token, and whether it is [`DECIDED`].
pub(crate) const DRAWN_WORDS: usize = 2;
/// The device decided the token.
pub(crate) const DECIDED: u32 = 1;
/// Largest `top_k` that the device cuts at: a cube orders that many tokens.
pub(crate) const TOP_K_MAX: u32 = MEMBERS as u32;

/// Cubes that share the logits of a row.
const CUBES: usize = 64;
/// Units of each.
const UNITS: usize = 256;
/// Words of what a cube found: greatest key, its lowest id, least key.
const SURVEYED: usize = 3;
/// Units of the cube that chooses.
const CHOOSERS: usize = 256;
/// Steps of a tree over them.
const CHOOSER_STEPS: u32 = CHOOSERS.trailing_zeros();
/// Vectors of buckets that a unit has asked for at once.
const VECTORS: usize = 4;
/// Buckets that each of them sums up.
const EACH: usize = BUCKETS / CHOOSERS;
/// Tokens that it orders: with the buckets' sums they take 28 of the 32 KiB of shared memory that every device has.
const MEMBERS: usize = 512;
/// Parts of 11 bits that a weight of 44 bits is added in, so that sums over 2²⁰ tokens fit into 32 bits.
const LIMBS: usize = 4;
const LIMB_BITS: u32 = 11;
/// Counters of a row: collections of members that it may need.
const COUNTERS: usize = 5;

/// Scratch memory of draws, and tables.
#[derive(Clone, Debug)]
pub(crate) struct DrawScratch {
    /// `[rows, cubes, 3]`: see [`SURVEYED`].
    pub(crate) survey: Handle,
    /// `[rows, buckets, limbs]`, then `[rows, counters]`.
    pub(crate) sums: Handle,
    /// `[rows, vocabulary]`: the bucket of each token, rows filled to whole vectors of four with what is none.
    pub(crate) buckets: Handle,
    /// [`POWERS`]
    powers: Handle,
    vocab: usize,
}

impl DrawScratch {
    /// Bytes that it takes.
    pub(crate) const fn bytes(vocab: usize) -> usize {
        let sums = CUBES * SURVEYED + BUCKETS * LIMBS + COUNTERS;
        4 * DRAWN_MAX * (sums + vocab.next_multiple_of(4)) + 8 * STEPS
    }

    /// With buffers that stand for those of a device.
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

/// Whether the device draws by these settings; the host does where not.
pub(crate) fn draws(settings: &SamplerSettings, vocab: usize) -> bool {
    let cut = settings.top_k != 0 && (settings.top_k as usize) < vocab;
    settings.temperature == 0.0 || !cut || settings.top_k <= TOP_K_MAX
}

/// A row's settings as `choose` reads them: temperature above 0, top-k (0: no cut), the random number, then as doubles the octaves of
/// weight per unit of logit, top-p and min-p.
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

/// Draws a token from each of `rows` rows of `logits[rows, vocabulary]`, as `settings[rows, PARAMETERS]` say. Tokens go to
/// `tokens[rows]`, where the next step reads them, and with their state to `drawn[rows, DRAWN_WORDS]`.
pub(crate) fn draw<R: Platform>(
    client: &ComputeClient<R>,
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
    // SAFETY: rows are at most those that the scratch was made for; units stay within the vocabulary of their row.
    unsafe {
        survey_kernel::launch_unchecked::<R>(
            client,
            cubes.clone(),
            units,
            array(logits, rows * vocab),
            array(&scratch.survey, survey),
            array(&scratch.sums, sums),
            vocab as u32,
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
        );
    }
}

/// An integer in the order of the numbers: -∞ to +∞, NaNs outside. Both zeros are one.
#[cube]
fn key(number: f32) -> i32 {
    let bits = i32::reinterpret(number);
    let ordered = select(bits < 0i32, bits ^ 0x7fff_ffffi32, bits);
    select(number == 0.0f32, 0i32, ordered)
}

/// The number of a [`key`].
#[cube]
fn number_of(key: i32) -> f32 {
    f32::reinterpret(select(key < 0i32, key ^ 0x7fff_ffffi32, key))
}

/// Keys of the infinities.
const INFINITE: i32 = 0x7f80_0000;
const LEAST: i32 = (0xff80_0000u32 as i32) ^ 0x7fff_ffff;

/// The extremes of a row's logits, a part by each cube. Clears what `weigh` adds into.
#[cube(launch_unchecked)]
fn survey_kernel(logits: &Array<f32>, survey: &mut Array<u32>, sums: &mut Array<Atomic<u32>>, vocab: u32) {
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
    sync_cube();
    #[unroll]
    for step in 1..9u32 {
        let apart = comptime!(UNITS >> step);
        if unit < apart {
            join(&mut highs, &mut ids, &mut lows, unit, unit + apart);
        }
        sync_cube();
    }
    if unit == 0 {
        let at = (row * comptime!(CUBES) + cube) * comptime!(SURVEYED);
        survey[at] = u32::reinterpret(highs[0]);
        survey[at + 1] = ids[0];
        survey[at + 2] = u32::reinterpret(lows[0]);
    }
}

/// The tokens of a cube's part, from the first to behind the last.
#[cube]
fn part(vocab: usize, cube: usize) -> (usize, usize) {
    let each = vocab.div_ceil(comptime!(CUBES));
    (min(cube * each, vocab), min((cube + 1) * each, vocab))
}

/// Takes what another unit found where it is more extreme, the lowest id of equals.
#[cube]
fn join(
    highs: &mut SharedMemory<i32>,
    ids: &mut SharedMemory<u32>,
    lows: &mut SharedMemory<i32>,
    at: usize,
    other: usize,
) {
    if highs[other] > highs[at] || (highs[other] == highs[at] && ids[other] < ids[at]) {
        highs[at] = highs[other];
        ids[at] = ids[other];
    }
    lows[at] = min(lows[at], lows[other]);
}

/// What all cubes found together: key of the greatest logit, its id, key of the least.
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
    sync_cube();
    #[unroll]
    for step in 1..7u32 {
        let apart = comptime!(CUBES >> step);
        if unit < apart {
            join(&mut highs, &mut ids, &mut lows, unit, unit + apart);
        }
        sync_cube();
    }
    (highs[0], ids[0], lows[0])
}

/// Two words as one.
#[cube]
pub(crate) fn wide(low: u32, high: u32) -> u64 {
    (u64::cast_from(high) << 32u64) | u64::cast_from(low)
}

/// A constant as exactly the double that it is: some compilers of kernels print doubles with the digits of floats.
#[cube]
fn double(#[comptime] bits: u64) -> f64 {
    let bits = RuntimeCell::<u64>::new(bits.runtime()); // a literal cannot be reinterpreted
    f64::reinterpret(bits.read())
}

/// Where a logit lies: see `Scale::place` in `kernels::sampler::order`.
#[cube]
pub(crate) fn place(logit: f32, greatest: f64, octaves: f64) -> u64 {
    let far = opaque((f64::cast_from(logit) - greatest) * octaves);
    let least = double(comptime!(OCTAVES_MIN.to_bits()));
    let far = select(far > least, far, least);
    u64::reinterpret(far + double(ORIGIN_BITS))
}

/// Pattern of [`ORIGIN`].
const ORIGIN_BITS: u64 = ORIGIN.to_bits();
const LN2: f64 = std::f64::consts::LN_2;
const SQUARE: f64 = LN2 * LN2 / 2.0;
const CUBE: f64 = LN2 * LN2 * LN2 / 6.0;
/// Pattern of 2^52: adding it rounds to an integer and leaves that in the low bits.
const ROUND_BITS: u64 = ((1u64 << 52) as f64).to_bits();
const STEP_MASK: u64 = (1 << STEP_SHIFT) - 1;

/// The weight at a [`place`]: see `weight` in `kernels::sampler::order`.
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

/// How far places are shifted to be numbers of buckets.
#[cube]
fn bucket_shift(least: f32, greatest: f64, octaves: f64) -> u64 {
    let widest = comptime!(ORIGIN_BITS).runtime() - place(least, greatest, octaves);
    let mut shift = 0u64;
    while (widest >> shift) >= comptime!(BUCKETS as u64).runtime() {
        shift += 1u64;
    }
    shift
}

/// Octaves of weight per unit of logit by which buckets are made: at temperature 1 where `top_k` cuts, for at a low temperature all
/// but a few tokens would share the last bucket.
#[cube]
fn bucket_octaves(choices: &Array<u32>, row: usize) -> f64 {
    let at = row * comptime!(PARAMETERS);
    let octaves = f64::reinterpret(wide(choices[at + 4], choices[at + 5]));
    select(choices[at + 1] > 0u32, double(comptime!(std::f64::consts::LOG2_E.to_bits())), octaves)
}

/// Adds the weights of a row's tokens into buckets (their number where `top_k` cuts), a part by each cube.
#[cube(launch_unchecked)]
fn weigh_kernel(
    logits: &Array<f32>,
    choices: &Array<u32>,
    survey: &Array<u32>,
    powers: &Array<u64>,
    sums: &mut Array<Atomic<u32>>,
    buckets: &mut Array<u32>,
    vocab: u32,
) {
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
        // Unsound logits have any place; they are left to the host.
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

/// What `choose` works on, in shared memory.
#[derive(CubeType)]
struct Choice {
    /// Sum of each bucket, then of those before it as well.
    sums: SharedMemory<u64>,
    /// Sums of the buckets of each unit, while they are added up.
    parts: SharedMemory<u64>,
    keys: SharedMemory<i32>,
    ids: SharedMemory<u32>,
    weights: SharedMemory<u64>,
    /// What one unit found for all: a bucket, then the sum before it; or a token, then the sum up to and with it.
    found: SharedMemory<u64>,
    /// The weight below which a token is drawn.
    limit: SharedMemory<u64>,
    /// How many tokens were collected; whether they were ever too many.
    count: SharedMemory<u32>,
}

/// Draws the token of a row.
#[cube(launch_unchecked)]
fn choose_kernel(
    logits: &Array<f32>,
    choices: &Array<u32>,
    survey: &Array<u32>,
    powers: &Array<u64>,
    sums: &mut Array<Atomic<u32>>,
    buckets: &Array<Vector<u32, Const<4>>>,
    tokens: &mut Array<u32>,
    drawn: &mut Array<u32>,
    vocab: u32,
) {
    let (row, unit) = (CUBE_POS_X as usize, UNIT_POS_X as usize);
    let vocab = vocab as usize;
    let at = row * comptime!(PARAMETERS);
    let (high, id, low) = extremes(survey, row, unit);
    let sound = high < INFINITE && high > LEAST && low >= LEAST;
    let mut token = id;
    let mut decided = sound;
    // Every unit takes the same way: conditions depend on settings alone, and sums that are too large are cut and noted.
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
            // The k most likely tokens, with their weights: all else is done on these.
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

/// Reads the sums of buckets and adds to each those before it.
#[cube]
fn add_up(sums: &mut Array<Atomic<u32>>, choice: &mut Choice, row: usize, unit: usize) {
    let mut sum = 0u64.runtime();
    #[unroll]
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
    #[unroll]
    for i in 0..EACH {
        let sum = choice.sums[unit * EACH + i] + before;
        choice.sums[unit * EACH + i] = sum;
    }
    sync_cube();
}

/// The bucket in which the sum first exceeds `target`; the sum before it goes to `found[1]`.
#[cube]
fn locate(choice: &mut Choice, target: u64, unit: usize) -> usize {
    #[unroll]
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

/// How many of the collected tokens are there.
#[cube]
fn members(choice: &Choice) -> usize {
    min(choice.count[0] as usize, comptime!(MEMBERS))
}

/// Sets the weight below which a token is drawn.
#[cube]
fn limit_to(choice: &mut Choice, limit: u64, unit: usize) {
    sync_cube();
    if unit == 0 {
        choice.limit[0] = limit;
    }
    sync_cube();
}

/// The first bucket with tokens of less weight than `least`.
#[cube]
fn first_below(choice: &mut Choice, least: u64, shift: u64, powers: &Array<u64>, unit: usize) -> usize {
    let mut first = comptime!(BUCKETS as u64 - 1).runtime();
    #[unroll]
    for i in 0..EACH {
        let bucket = u64::cast_from(unit * EACH + comptime!(EACH - 1 - i));
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

/// Collects the ids of the tokens of buckets `from` to `to`, in any order; above [`MEMBERS`] some are missing.
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

/// Keys and weights of the collected tokens; the weight is 1 where they are counted.
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

/// Whether a token comes before another in the order of likelihood.
#[cube]
fn is_before(key: i32, id: u32, other_key: i32, other_id: u32) -> bool {
    key > other_key || (key == other_key && id < other_id)
}

/// Takes the weight of tokens behind the last one that is kept.
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

/// The collected token at which the sum, in order, first exceeds `target`: its id goes to `found[0]`, the sum up to and with it to
/// `found[1]`. `before`: the sum before the first of them.
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

/// The sum over the collected tokens of weight at least `least`, to `parts[0]`.
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

/// A share of a sum, rounded up, from 1 to the sum.
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
