//! Where in the order of likelihood a share of the total weight lies, found without sorting the vocabulary.
//!
//! A weight is an integer: 2^(logit difference in octaves) in units of 2^-43 of the greatest. Integer sums are exact, so
//! neither the width of vectors nor the division into buckets changes a result. One pass adds the weights into buckets by
//! logit; the cut-off or the draw falls into one of them, and only its members are collected and partly sorted.
use std::cmp::Ordering;

use crate::cpu::Isa;
use crate::cpu::simd::{Kernel, Simd};

/// Most logits whose weights add up to less than 2^64.
pub const LOGITS_MAX: usize = 1 << 20;
/// The weight of the most likely token. A token less than 2^-44 as likely weighs nothing.
const GREATEST_WEIGHT_BITS: u32 = 43;
/// log2 of the least weight told from nothing, rounded down, and somewhat beneath it.
pub const OCTAVES_MIN: f64 = -46.0;
/// Adding it to octaves between [`OCTAVES_MIN`] and 0 leaves a number between 128 and 256: fixed point in steps of 2^-45.
pub const ORIGIN: f64 = 192.0;
/// Of the 52 bits behind the point: octaves above 128, then 1/512 octaves, then the rest.
/// Bits of a place below its octave.
pub const OCTAVE_SHIFT: u32 = 45;
/// Bits of a place below its step.
pub const STEP_SHIFT: u32 = OCTAVE_SHIFT - STEPS.trailing_zeros();
/// Steps of an octave in [`POWERS`].
pub const STEPS: usize = 512;
/// 16 KiB of sums: half of a small first-level cache.
pub const BUCKETS: usize = 2048;
/// Fewer are sorted.
const SORTED_MAX: usize = 64;

/// The weights of a step: from logits to shares of the greatest weight.
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

    /// The weight of a logit; never less for a greater logit.
    #[must_use]
    pub fn weight(self, logit: f32) -> u64 {
        weight(self.place(logit))
    }

    /// The bits of [`ORIGIN`] + log2(weight): an integer that grows with the logit.
    #[inline(always)]
    #[must_use]
    pub fn place(self, logit: f32) -> u64 {
        let octaves = (f64::from(logit) - self.greatest) * self.octaves;
        // A comparison, not `f64::max`, which spends instructions on NaN.
        let octaves = if octaves > OCTAVES_MIN { octaves } else { OCTAVES_MIN };
        (octaves + ORIGIN).to_bits()
    }
}

/// 2^(place - ORIGIN + 43), rounded to an integer. The cubic's error is below 2^-46 of the weight and equal at both ends of a
/// step, and neighbouring places differ by 2^-45 octaves: more than rounding errors, so that the weight never falls.
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

/// A token with its place in the order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) id: u32,
    pub(super) logit: f32,
    weight: u64,
}

impl Candidate {
    /// Most likely first, of equals the lowest id. Logits are no NaN, and -0 equals 0.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        other.logit.partial_cmp(&self.logit).unwrap_or(Ordering::Equal).then(self.id.cmp(&other.id))
    }
}

/// What the sums of an [`Order`] add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Measure {
    /// Tokens.
    Count,
    /// Their weights.
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

    /// Reads all logits once; there is at least one.
    pub(super) fn survey(&self, logits: &[f32]) -> Survey {
        // SAFETY: the machine has the instruction set.
        unsafe { self.isa.run(ReadAll { logits }) }
    }
}

/// Logits in the order of [`Candidate::order`], with sums of a measure.
pub(super) struct Order<'a> {
    logits: &'a [f32],
    scale: Scale,
    measure: Measure,
    /// Places below the greatest, shifted by this, are bucket numbers below [`BUCKETS`].
    shift: u32,
    greatest: f32,
    scratch: &'a mut Scratch,
}

impl<'a> Order<'a> {
    /// With the least and the greatest of the logits, of which there are 1 to [`LOGITS_MAX`]: no NaN, none +∞, not all -∞.
    pub(super) fn new(
        logits: &'a [f32],
        (least, greatest): (f32, f32),
        scale: Scale,
        measure: Measure,
        scratch: &'a mut Scratch,
    ) -> Self {
        let widest = ORIGIN.to_bits() - scale.place(least);
        let shift = (u64::BITS - widest.leading_zeros()).saturating_sub(BUCKETS.trailing_zeros());
        scratch.sums.fill(0);
        // SAFETY: the machine has the instruction set.
        unsafe { scratch.isa.run(AddUp { logits, scale, shift, measure, sums: &mut scratch.sums }) };
        Self { logits, scale, measure, shift, greatest, scratch }
    }

    /// The sum over all.
    pub(super) fn total(&self) -> u64 {
        self.scratch.sums.iter().sum()
    }

    /// The token at which the sum, in order, first exceeds `target` (below the total), and the sum up to and with it.
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
        // Halves, not pivots: linear whatever the logits are.
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
        unreachable!("a target below the total lies in a bucket")
    }

    /// The sum over the tokens of weight at least `least` (1 to the greatest).
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

    /// Where a logit belongs, also below the least that there is.
    fn bucket(&self, logit: f32) -> usize {
        bucket(self.scale.place(logit), self.shift).min(BUCKETS - 1)
    }

    /// The members of a bucket, to `near`.
    fn collect(&mut self, number: usize) {
        let low = least_logit(self.greatest, |logit| self.bucket(logit) <= number);
        let high = match number.checked_sub(1) {
            Some(above) => least_logit(self.greatest, |logit| self.bucket(logit) <= above),
            None => f32::INFINITY,
        };
        self.scratch.near.clear();
        let (logits, near, scale) = (self.logits, &mut self.scratch.near, self.scale);
        // SAFETY: the machine has the instruction set.
        unsafe { self.scratch.isa.run(Collect { logits, range: (low, high), scale, near }) };
    }
}

#[inline(always)]
fn bucket(place: u64, shift: u32) -> usize {
    ((ORIGIN.to_bits() - place) >> shift) as usize
}

/// The least logit from -∞ to `greatest` for which `holds`; it holds for `greatest` and for all above the result.
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

/// Adds what is measured into the buckets.
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
            let place = scale.place(logit);
            // No logit lies below the least: the remainder changes nothing and spares a check.
            (*into, *value) = (bucket(place, shift) % BUCKETS, of(place));
        }
        for (bucket, value) in buckets.into_iter().zip(values) {
            sums[bucket] += value;
        }
    }
    for &logit in rest {
        let place = scale.place(logit);
        sums[bucket(place, shift) % BUCKETS] += of(place);
    }
}

/// Collects the logits of `range.0 <= logit < range.1`.
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

/// What one pass over the logits tells.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Survey {
    /// The least logit and the greatest; where one is NaN, one of the two is.
    pub(super) extremes: (f32, f32),
    /// The lowest id with the greatest.
    pub(super) first: usize,
}

struct ReadAll<'a> {
    logits: &'a [f32],
}

impl Kernel for ReadAll<'_> {
    type Output = Survey;

    /// Compares [`key`]s: NaNs lie outside the infinities, so that the extremes show them.
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
            // 0 in a later chunk is no greater than -0.
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

/// An integer in the order of the numbers: negative NaNs, -∞ to -0, 0 to +∞, NaNs.
#[inline(always)]
fn key(number: f32) -> i32 {
    let bits = number.to_bits() as i32;
    bits ^ ((bits >> 31) as u32 >> 1) as i32
}

/// The number of a [`key`].
fn number_of(key: i32) -> f32 {
    f32::from_bits((key ^ ((key >> 31) as u32 >> 1) as i32) as u32)
}
