//! Quantises weights to four bits with the least squared error that a search finds.
//!
//! A block's codes follow from its scale and minimum, and the best scale and minimum for given codes are a linear least-squares
//! problem. So the search alternates between the two, from several starting scales, as ggml's `make_qkx2_quants` does. It differs in
//! three ways: the error is not weighted; every start is refined several times; and the factors of a super-block are fitted again to
//! the integers that its scales and minima became.
//!
//! All operations are f32 without fusing, so every instruction set gives the same blocks.
use half::f16;

use super::{BLOCK, IQ4_VALUES, QuantType, SUPER_BLOCK};
use crate::cpu::Isa;
use crate::cpu::simd::{Kernel, Simd};

/// Formats that [`search`] writes.
pub const SEARCHED: [QuantType; 2] = [QuantType::Q4K, QuantType::Iq4Nl];

/// Quantises whole blocks of finite weights. `None` for formats other than [`SEARCHED`].
///
/// # Panics
/// If `weights` is not a whole number of blocks.
#[must_use]
pub fn search(kind: QuantType, isa: Isa, weights: &[f32]) -> Option<Vec<u8>> {
    if !SEARCHED.contains(&kind) {
        return None;
    }
    let mut out = vec![0; kind.row_bytes(weights.len()).expect("a whole number of blocks")];
    // SAFETY: the instruction set was detected; the kernel has no contract of its own.
    unsafe { isa.run(Search { kind, weights, out: &mut out }) };
    Some(out)
}

struct Search<'a> {
    kind: QuantType,
    weights: &'a [f32],
    out: &'a mut [u8],
}

impl Kernel for Search<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let blocks =
            self.weights.chunks_exact(self.kind.block_len()).zip(self.out.chunks_exact_mut(self.kind.block_bytes()));
        if self.kind == QuantType::Q4K {
            blocks.for_each(|(weights, out)| q4_k(weights, out));
        } else {
            blocks.for_each(|(weights, out)| iq4_nl(weights, out));
        }
    }
}

type Group = [f32; BLOCK];

/// Lanes of a sum: the compiler makes vectors of them.
const LANES: usize = BLOCK / 2;

/// The sum of a function of each index of a group, in [`LANES`] partial sums.
#[inline(always)]
fn sum(term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (i, lane) in lanes.iter_mut().enumerate() {
        *lane = term(i) + term(i + LANES);
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Rounds a number of 0 to 15 to an integer, ties to even: the sum has no bits for fractions.
#[inline(always)]
fn round(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 · 2^23
    (x + SHIFT) - SHIFT
}

/// Codes of four bits, as numbers, for `scale · code - minimum`.
#[inline(always)]
fn codes(weights: &Group, scale: f32, minimum: f32) -> Group {
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let mut codes = [0.0; BLOCK];
    for i in 0..BLOCK {
        codes[i] = round(((weights[i] + minimum) * inverse).clamp(0.0, 15.0));
    }
    codes
}

#[inline(always)]
fn error(weights: &Group, codes: &Group, scale: f32, minimum: f32) -> f32 {
    sum(|i| {
        let off = weights[i] - (codes[i] * scale - minimum);
        off * off
    })
}

/// Steps between the least and the greatest weight at which the search starts. With 15 the codes just span them; more clip the
/// greatest.
const STARTS: [f32; 14] = [12.0, 12.7, 13.4, 14.0, 14.6, 15.2, 15.8, 16.4, 17.0, 17.7, 18.4, 19.2, 20.0, 21.0];
/// Refinements of each start.
const REFINEMENTS: usize = 3;

/// The scale and the minimum of a group that give the least error; neither is negative.
#[inline(always)]
fn affine(weights: &Group) -> (f32, f32) {
    let least = weights.iter().fold(0.0f32, |least, w| least.min(*w));
    let greatest = weights.iter().fold(0.0f32, |greatest, w| greatest.max(*w));
    let mut best = (0.0, 0.0, f32::INFINITY);
    for steps in STARTS {
        let (mut scale, mut minimum) = ((greatest - least) / steps, -least);
        for _ in 0..=REFINEMENTS {
            let q = codes(weights, scale, minimum);
            let error = error(weights, &q, scale, minimum);
            if error < best.2 {
                best = (scale, minimum, error);
            }
            let (q1, q2) = (sum(|i| q[i]), sum(|i| q[i] * q[i]));
            let (w, qw) = (sum(|i| weights[i]), sum(|i| q[i] * weights[i]));
            let n = BLOCK as f32;
            let determinant = n * q2 - q1 * q1;
            if determinant <= 0.0 {
                break; // all codes are equal
            }
            scale = (n * qw - q1 * w) / determinant;
            minimum = (scale * q1 - w) / n;
            if minimum < 0.0 {
                (scale, minimum) = (qw / q2, 0.0);
            }
            if scale <= 0.0 {
                break;
            }
        }
    }
    (best.0, best.1)
}

/// Groups of a super-block.
const GROUPS: usize = SUPER_BLOCK / BLOCK;
/// Greatest integer scale or minimum of Q4_K.
const SIX_BITS: f32 = 63.0;
/// How often the factors of a super-block are fitted again.
const FITS: usize = 3;

/// The numbers of a super-block of Q4_K: factors, which are f16, and integers.
#[derive(Clone, Copy)]
struct Scales {
    factors: [f32; 2],
    integers: [[f32; 2]; GROUPS],
}

fn to_half(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

#[inline(always)]
fn q4_k(weights: &[f32], out: &mut [u8]) {
    let groups: [&Group; GROUPS] = std::array::from_fn(|g| weights[g * BLOCK..][..BLOCK].try_into().expect("a group"));
    let wanted: [(f32, f32); GROUPS] = std::array::from_fn(|g| affine(groups[g]));
    let greatest = wanted.iter().fold((0.0f32, 0.0f32), |(s, m), group| (s.max(group.0), m.max(group.1)));
    let mut factors = [to_half(greatest.0 / SIX_BITS), to_half(greatest.1 / SIX_BITS)];
    let mut best = (Scales { factors: [0.0; 2], integers: [[0.0; 2]; GROUPS] }, f32::INFINITY);
    for _ in 0..=FITS {
        let (mut integers, mut total) = ([[0.0; 2]; GROUPS], 0.0);
        for g in 0..GROUPS {
            let (chosen, error) = integers_near(groups[g], factors, wanted[g]);
            integers[g] = chosen;
            total += error;
        }
        if total < best.1 {
            best = (Scales { factors, integers }, total);
        }
        match fit(&groups, factors, &integers) {
            Some(fitted) => factors = fitted.map(to_half),
            None => break,
        }
    }
    pack_q4_k(&groups, &best.0, out);
}

/// The integer scale and minimum with the least error, among those next to the wanted ones.
#[inline(always)]
fn integers_near(weights: &Group, [scale, minimum]: [f32; 2], wanted: (f32, f32)) -> ([f32; 2], f32) {
    let near = |wanted: f32, factor: f32| if factor > 0.0 { round_wide(wanted / factor) } else { 0.0 };
    let (s, m) = (near(wanted.0, scale), near(wanted.1, minimum));
    let mut best = ([0.0; 2], f32::INFINITY);
    for ds in [0.0, -1.0, 1.0] {
        for dm in [0.0, -1.0, 1.0] {
            let integers = [(s + ds).clamp(0.0, SIX_BITS), (m + dm).clamp(0.0, SIX_BITS)];
            let (scale, minimum) = (scale * integers[0], minimum * integers[1]);
            let error = error(weights, &codes(weights, scale, minimum), scale, minimum);
            if error < best.1 {
                best = (integers, error);
            }
        }
    }
    best
}

#[inline(always)]
fn round_wide(x: f32) -> f32 {
    round(x.clamp(0.0, SIX_BITS))
}

/// The factors with the least error for given integers and their codes; `None` if they are not determined.
#[inline(always)]
fn fit(groups: &[&Group; GROUPS], factors: [f32; 2], integers: &[[f32; 2]; GROUPS]) -> Option<[f32; 2]> {
    let (mut ss, mut sm, mut mm, mut sw, mut mw) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (weights, [s, m]) in groups.iter().zip(integers) {
        let q = codes(weights, factors[0] * s, factors[1] * m);
        let q1 = sum(|i| q[i]);
        ss += s * s * sum(|i| q[i] * q[i]);
        sm -= s * m * q1;
        mm += m * m * BLOCK as f32;
        sw += s * sum(|i| q[i] * weights[i]);
        mw -= m * sum(|i| weights[i]);
    }
    if mm == 0.0 {
        return (ss > 0.0).then(|| [(sw / ss).max(0.0), factors[1]]);
    }
    let determinant = ss * mm - sm * sm;
    (determinant > 0.0)
        .then(|| [((sw * mm - mw * sm) / determinant).max(0.0), ((mw * ss - sw * sm) / determinant).max(0.0)])
}

/// The reverse of [`super::k_scale_min`] and of the order of nibbles in `super::q45_k`.
#[inline(always)]
fn pack_q4_k(groups: &[&Group; GROUPS], scales: &Scales, out: &mut [u8]) {
    out.fill(0);
    for (half, factor) in out.chunks_exact_mut(2).zip(scales.factors) {
        half.copy_from_slice(&f16::from_f32(factor).to_le_bytes());
    }
    let integer = |g: usize| scales.integers[g].map(|integer| integer as u8);
    for j in 0..GROUPS / 2 {
        let ([s, m], [upper_s, upper_m]) = (integer(j), integer(j + GROUPS / 2));
        out[4 + j] = s | (upper_s >> 4) << 6;
        out[8 + j] = m | (upper_m >> 4) << 6;
        out[12 + j] = upper_s & 15 | (upper_m & 15) << 4;
    }
    for (g, weights) in groups.iter().enumerate() {
        let [s, m] = scales.integers[g];
        let codes = codes(weights, scales.factors[0] * s, scales.factors[1] * m);
        for (byte, code) in out[16 + g / 2 * BLOCK..][..BLOCK].iter_mut().zip(codes) {
            *byte |= (code as u8) << (4 * (g % 2));
        }
    }
}

const fn iq4_values() -> [f32; 16] {
    let mut values = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        values[i] = IQ4_VALUES[i] as f32;
        i += 1;
    }
    values
}

const VALUES: [f32; 16] = iq4_values();

/// The nearest values of IQ4_NL to weights divided by the scale.
#[inline(always)]
fn nearest(weights: &Group, scale: f32) -> Group {
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let mut values = [VALUES[0]; BLOCK];
    for k in 1..VALUES.len() {
        let (middle, step) = ((VALUES[k - 1] + VALUES[k]) / 2.0, VALUES[k] - VALUES[k - 1]);
        for i in 0..BLOCK {
            values[i] += if weights[i] * inverse > middle { step } else { 0.0 };
        }
    }
    values
}

/// Scales at which the search starts, relative to the one that maps the greatest magnitude to the greatest value.
const IQ4_STARTS: [f32; 10] = [0.82, 0.88, 0.93, 0.98, 1.03, 1.08, 1.13, 1.18, 1.24, 1.3];

#[inline(always)]
fn iq4_nl(weights: &[f32], out: &mut [u8]) {
    let weights: &Group = weights.try_into().expect("a block");
    let greatest = weights.iter().fold(0.0f32, |greatest, w| greatest.max(w.abs()));
    let mut best = (0.0, f32::INFINITY);
    for start in IQ4_STARTS.into_iter().flat_map(|start| [start, -start]) {
        let mut scale = start * greatest / 127.0;
        for _ in 0..3 {
            let values = nearest(weights, scale);
            let error = error(weights, &values, scale, 0.0);
            if error < best.1 {
                best = (scale, error);
            }
            scale = sum(|i| values[i] * weights[i]) / sum(|i| values[i] * values[i]);
        }
    }
    // The f16 on either side may be better, with codes of its own.
    let bits = f16::from_f32(best.0).to_bits();
    let mut chosen = (f16::from_bits(bits), f32::INFINITY);
    for bits in [bits, bits.saturating_sub(1), bits.saturating_add(1)] {
        let scale = f16::from_bits(bits);
        let error = error(weights, &nearest(weights, scale.to_f32()), scale.to_f32(), 0.0);
        if error < chosen.1 {
            chosen = (scale, error);
        }
    }
    out[..2].copy_from_slice(&chosen.0.to_le_bytes());
    let values = nearest(weights, chosen.0.to_f32());
    let code = |i: usize| VALUES.iter().position(|value| *value == values[i]).unwrap_or(0) as u8;
    for (j, byte) in out[2..].iter_mut().enumerate() {
        *byte = code(j) | code(BLOCK / 2 + j) << 4;
    }
}

#[cfg(test)]
mod tests;
