//! Weighted selection: finds the token at a given share of the total weight without sorting the vocabulary.
//!
//! A weight is an integer: 2^(logit difference in octaves), scaled so that the greatest is 2^43. Integer sums are exact, so
//! neither the vector width nor the bucket boundaries change a result. One pass adds the weights into buckets by logit; the
//! cut-off or the draw falls into one bucket, and only its members are collected and partly sorted.
use std::cmp::Ordering;

use kernels::cpu::Isa;
use kernels::cpu::simd::{Kernel, Simd};

/// Maximum number of logits: the sum of their weights stays below 2^64.
pub const LOGITS_MAX: usize = 1 << 20;
/// log2 of the most likely token's weight. A token less than 2^-44 as likely has weight zero.
const GREATEST_WEIGHT_BITS: u32 = 43;
/// Lower clamp of log2(relative weight): below the smallest weight that does not round to zero, with a margin.
pub const OCTAVES_MIN: f64 = -46.0;
/// Adding this to octaves between [`OCTAVES_MIN`] and 0 gives a number between 128 and 256: fixed point in steps of 2^-45.
pub const ORIGIN: f64 = 192.0;
/// Bits of a place below its octave. The 52 mantissa bits hold whole octaves above 128, then 1/512 octaves, then the rest.
pub const OCTAVE_SHIFT: u32 = 45;
/// Bits of a place below its step (1/512 octave).
pub const STEP_SHIFT: u32 = OCTAVE_SHIFT - STEPS.trailing_zeros();
/// Steps per octave in [`POWERS`].
pub const STEPS: usize = 512;
/// 16 KiB of sums: half of a small L1 cache.
pub const BUCKETS: usize = 2048;
/// Larger sets of candidates are bisected before they are sorted.
const SORTED_MAX: usize = 64;

/// Maps logits to weights, at a temperature and relative to the greatest logit.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    greatest: f64,
    /// Octaves of weight per unit of logit.
    octaves: f64,
}

impl Scale {
    /// `greatest` is the greatest logit, `temperature` above 0.
    #[must_use]
    pub fn new(greatest: f32, temperature: f32) -> Self {
        Self { greatest: f64::from(greatest), octaves: std::f64::consts::LOG2_E / f64::from(temperature) }
    }

    /// The weight of a logit; monotonic in the logit.
    #[must_use]
    pub fn weight(self, logit: f32) -> u64 {
        weight(self.fixed_point_octaves(logit))
    }

    /// The bits of [`ORIGIN`] + log2(relative weight): an integer that grows with the logit.
    #[inline(always)]
    #[must_use]
    pub fn fixed_point_octaves(self, logit: f32) -> u64 {
        let octaves = (f64::from(logit) - self.greatest) * self.octaves;
        // A comparison, because `f64::max` spends instructions on NaN.
        let octaves = if octaves > OCTAVES_MIN { octaves } else { OCTAVES_MIN };
        (octaves + ORIGIN).to_bits()
    }
}

/// 2^(place - ORIGIN + 43), rounded to an integer. The cubic's relative error is below 2^-46 and equal at both ends of a step,
/// and neighbouring places differ by 2^-45 octaves. That exceeds the rounding errors, so the weight is monotonic.
#[inline(always)]
fn weight(place: u64) -> u64 {
    const LN2: f64 = std::f64::consts::LN_2;
    const STEP_MASK: u64 = (1 << STEP_SHIFT) - 1;
    let middle = f64::from_bits((place & !STEP_MASK) | (1 << (STEP_SHIFT - 1)));
    let r = f64::from_bits(place) - middle;
    let power = 1.0 + r * (LN2 + r * (LN2 * LN2 / 2.0 + r * (LN2 * LN2 * LN2 / 6.0)));
    let step = (place >> STEP_SHIFT) as usize % STEPS;
    let octave = (place >> OCTAVE_SHIFT) & 127;
    let scaled = f64::from_bits(POWERS[step] + (octave << 52)) * power;
    // Adding 2^52 rounds to the nearest integer, ties to even, and leaves it in the low bits.
    const ROUND: f64 = (1u64 << 52) as f64;
    (scaled + ROUND).to_bits() - ROUND.to_bits()
}

/// The bits of 2^(43 - 64 + (step + 1/2) / 512).
pub const POWERS: [u64; STEPS] = {
    let mut powers = [0; STEPS];
    let mut step = 0;
    while step < STEPS {
        let x = (step as f64 + 0.5) / STEPS as f64 * std::f64::consts::LN_2;
        // Taylor: 0.7^20 / 20! < 2^-70.
        let (mut sum, mut n) = (1.0, 20);
        while n > 0 {
            sum = 1.0 + sum * x / n as f64;
            n -= 1;
        }
        let octaves_less = ORIGIN as u64 - 128 - GREATEST_WEIGHT_BITS as u64;
        powers[step] = f64::to_bits(sum) - (octaves_less << 52);
        step += 1;
    }
    powers
};

/// A token with its logit and weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) id: u32,
    pub(super) logit: f32,
    weight: u64,
}

impl Candidate {
    /// Most likely first; among equals the lowest id. Logits are never NaN, and -0 equals 0.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        other.logit.partial_cmp(&self.logit).unwrap_or(Ordering::Equal).then(self.id.cmp(&other.id))
    }
}

/// The quantity that an [`Order`] sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Measure {
    /// Number of tokens.
    Count,
    /// Token weights.
    Weight,
}

/// Scratch memory of [`Order`].
#[derive(Debug)]
pub(super) struct Scratch {
    isa: Isa,
    sums: Box<[u64; BUCKETS]>,
    near: Vec<Candidate>,
}

impl Scratch {
    /// `isa` comes from [`Isa::detect`] or [`Isa::all`].
    pub(super) fn new(isa: Isa) -> Self {
        Self { isa, sums: Box::new([0; BUCKETS]), near: Vec::new() }
    }

    /// Reads all logits once; there must be at least one.
    pub(super) fn survey(&self, logits: &[f32]) -> Survey {
        // SAFETY: `isa` comes from `Isa::detect` or `Isa::all`, so the machine supports it.
        unsafe { self.isa.run(ReadAll { logits }) }
    }
}

/// The logits in the order of [`Candidate::order`], with bucket sums of a measure.
pub(super) struct Order<'a> {
    logits: &'a [f32],
    scale: Scale,
    measure: Measure,
    /// Right shift that maps the distance of a place from the greatest to a bucket number below [`BUCKETS`].
    shift: u32,
    greatest: f32,
    scratch: &'a mut Scratch,
}

impl<'a> Order<'a> {
    /// Sums `logits` into buckets. Expects their least and greatest value, and 1 to [`LOGITS_MAX`] logits: no NaN, no +∞, not
    /// all -∞.
    pub(super) fn new(
        logits: &'a [f32],
        (least, greatest): (f32, f32),
        scale: Scale,
        measure: Measure,
        scratch: &'a mut Scratch,
    ) -> Self {
        let widest = ORIGIN.to_bits() - scale.fixed_point_octaves(least);
        let shift = (u64::BITS - widest.leading_zeros()).saturating_sub(BUCKETS.trailing_zeros());
        scratch.sums.fill(0);
        // SAFETY: as in `survey`.
        unsafe { scratch.isa.run(AddUp { logits, scale, shift, measure, sums: &mut scratch.sums }) };
        Self { logits, scale, measure, shift, greatest, scratch }
    }

    /// The sum over all tokens.
    pub(super) fn total(&self) -> u64 {
        self.scratch.sums.iter().sum()
    }

    /// The token at which the prefix sum first exceeds `target` (which is below the total), and the sum up to and including it.
    pub(super) fn find(&mut self, target: u64) -> (Candidate, u64) {
        let (mut bucket, mut before) = (0, 0);
        while bucket + 1 < BUCKETS && before + self.scratch.sums[bucket] <= target {
            before += self.scratch.sums[bucket];
            bucket += 1;
        }
        self.collect(bucket);
        let measure = self.measure;
        let of = |c: &Candidate| match measure {
            Measure::Count => 1,
            Measure::Weight => c.weight,
        };
        let mut near = &mut self.scratch.near[..];
        // Bisection by halves instead of pivots: linear time for any input.
        while near.len() > SORTED_MAX {
            let middle = near.len() / 2;
            near.select_nth_unstable_by(middle, Candidate::order);
            let (first, second) = near.split_at_mut(middle);
            let sum: u64 = first.iter().map(of).sum();
            if target < before + sum {
                near = first;
            } else {
                before += sum;
                near = second;
            }
        }
        near.sort_unstable_by(Candidate::order);
        for candidate in near.iter() {
            before += of(candidate);
            if target < before {
                return (*candidate, before);
            }
        }
        unreachable!("a target below the total falls into a bucket")
    }

    /// The sum over the tokens with weight at least `least` (1 to the greatest weight).
    pub(super) fn sum_from(&mut self, least: u64) -> u64 {
        let scale = self.scale;
        let logit = least_logit(self.greatest, |logit| scale.weight(logit) >= least);
        let bucket = self.bucket(logit);
        self.collect(bucket);
        let near = self.scratch.near.iter().filter(|c| c.weight >= least);
        let inside: u64 = match self.measure {
            Measure::Count => near.count() as u64,
            Measure::Weight => near.map(|c| c.weight).sum(),
        };
        self.scratch.sums[..bucket].iter().sum::<u64>() + inside
    }

    /// The bucket of a logit; values below the least logit fall into the last bucket.
    fn bucket(&self, logit: f32) -> usize {
        bucket(self.scale.fixed_point_octaves(logit), self.shift).min(BUCKETS - 1)
    }

    /// Collects the members of a bucket into `near`.
    fn collect(&mut self, number: usize) {
        let low = least_logit(self.greatest, |logit| self.bucket(logit) <= number);
        let high = match number.checked_sub(1) {
            Some(above) => least_logit(self.greatest, |logit| self.bucket(logit) <= above),
            None => f32::INFINITY,
        };
        self.scratch.near.clear();
        let (logits, near, scale) = (self.logits, &mut self.scratch.near, self.scale);
        // SAFETY: as in `survey`.
        unsafe { self.scratch.isa.run(Collect { logits, range: (low, high), scale, near }) };
    }
}

#[inline(always)]
fn bucket(place: u64, shift: u32) -> usize {
    ((ORIGIN.to_bits() - place) >> shift) as usize
}

/// Binary search for the least logit from -∞ to `greatest` for which `holds`. `holds` must be monotonic and true for
/// `greatest`.
fn least_logit(greatest: f32, holds: impl Fn(f32) -> bool) -> f32 {
    let (mut low, mut high) = (key(f32::NEG_INFINITY), key(greatest));
    while low < high {
        let middle = ((i64::from(low) + i64::from(high)) >> 1) as i32;
        if holds(number_of(middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    number_of(high)
}

/// Sums the measure into the buckets.
struct AddUp<'a> {
    logits: &'a [f32],
    scale: Scale,
    shift: u32,
    measure: Measure,
    sums: &'a mut [u64; BUCKETS],
}

impl Kernel for AddUp<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { logits, scale, shift, measure, sums } = self;
        match measure {
            Measure::Count => add_up(logits, sums, scale, shift, |_| 1),
            Measure::Weight => add_up(logits, sums, scale, shift, weight),
        }
    }
}

#[inline(always)]
fn add_up(logits: &[f32], sums: &mut [u64; BUCKETS], scale: Scale, shift: u32, of: impl Fn(u64) -> u64) {
    const LANES: usize = 16;
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        let (mut buckets, mut values) = ([0; LANES], [0; LANES]);
        for ((into, value), &logit) in buckets.iter_mut().zip(&mut values).zip(chunk) {
            let place = scale.fixed_point_octaves(logit);
            // No logit is below the least, so the remainder changes nothing; it avoids a bounds check.
            (*into, *value) = (bucket(place, shift) % BUCKETS, of(place));
        }
        for (bucket, value) in buckets.into_iter().zip(values) {
            sums[bucket] += value;
        }
    }
    for &logit in rest {
        let place = scale.fixed_point_octaves(logit);
        sums[bucket(place, shift) % BUCKETS] += of(place);
    }
}

/// Collects the logits with `range.0 <= logit < range.1`.
struct Collect<'a> {
    logits: &'a [f32],
    range: (f32, f32),
    scale: Scale,
    near: &'a mut Vec<Candidate>,
}

impl Kernel for Collect<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (low, high) = self.range;
        for (number, chunk) in self.logits.chunks(64).enumerate() {
            if !chunk.iter().fold(false, |any, &l| any | ((low <= l) & (l < high))) {
                continue;
            }
            for (i, &logit) in chunk.iter().enumerate() {
                if low <= logit && logit < high {
                    self.near.push(Candidate { id: (64 * number + i) as u32, logit, weight: self.scale.weight(logit) });
                }
            }
        }
    }
}

/// Result of one pass over the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Survey {
    /// The least and the greatest logit. If any logit is NaN, one of the two is.
    pub(super) extremes: (f32, f32),
    /// The lowest id with the greatest logit.
    pub(super) first: usize,
}

struct ReadAll<'a> {
    logits: &'a [f32],
}

impl Kernel for ReadAll<'_> {
    type Output = Survey;

    /// Compares [`key`]s: NaNs sort outside the infinities, so the extremes reveal them.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Survey {
        const LANES: usize = 32;
        const CHUNK: usize = 4096;
        let (mut least, mut greatest, mut chunk_of_greatest) = (i32::MAX, i32::MIN, 0);
        for (number, chunk) in self.logits.chunks(CHUNK).enumerate() {
            let (mut low, mut high) = ([i32::MAX; LANES], [i32::MIN; LANES]);
            let (vectors, rest) = chunk.as_chunks::<LANES>();
            for vector in vectors {
                for ((low, high), &logit) in low.iter_mut().zip(&mut high).zip(vector) {
                    let key = key(logit);
                    (*low, *high) = ((*low).min(key), (*high).max(key));
                }
            }
            let low = low.into_iter().chain(rest.iter().map(|&l| key(l))).fold(least, i32::min);
            let high = high.into_iter().chain(rest.iter().map(|&l| key(l))).fold(i32::MIN, i32::max);
            least = low;
            // 0 in a later chunk is not greater than -0.
            if high > greatest && number_of(high) != number_of(greatest) {
                (greatest, chunk_of_greatest) = (high, number);
            }
        }
        let extremes = (number_of(least), number_of(greatest));
        let chunk = self.logits.chunks(CHUNK).nth(chunk_of_greatest).unwrap_or_default();
        let within = chunk.iter().position(|&l| l == extremes.1).unwrap_or(0);
        Survey { extremes, first: CHUNK * chunk_of_greatest + within }
    }
}

/// Maps a float to an integer of the same order: negative NaNs, -∞ to -0, 0 to +∞, NaNs.
#[inline(always)]
fn key(number: f32) -> i32 {
    let bits = number.to_bits() as i32;
    bits ^ ((bits >> 31) as u32 >> 1) as i32
}

/// Inverse of [`key`].
fn number_of(key: i32) -> f32 {
    f32::from_bits((key ^ ((key >> 31) as u32 >> 1) as i32) as u32)
}
