//! D3Q19 stream-collide kernel: pulls nineteen populations, relaxes them in opposite pairs and stores them, 16 cells at
//! a time. The populations do not fit in the registers, so each pair is loaded twice: for the sums, and for the
//! relaxation.
use kernels::cpu::simd::Simd;

use super::collision::{Part, Weights, load, put, share};
use super::{D3Q19, Directions, Fluid3, Lattice};
use crate::number::Number;

/// Of the straight directions.
pub const STRAIGHT: Weights =
    Weights { two: 2.0 * (3728270.0 / (1 << 26) as f32), six: 5592405.0 / (1 << 24) as f32, nine: 0.5 };
/// Of the diagonal directions.
pub const DIAGONAL: Weights =
    Weights { two: 2.0 * (3728270.0 / (1 << 27) as f32), six: (1.0 - STRAIGHT.six) / 4.0, nine: 0.25 };
/// The weight of the rest population: 1 minus the sum of the other weights.
pub const REST: f32 = 11184812.0 / (1 << 25) as f32;

/// Sum and difference of the pair that begins with direction `i`.
#[inline(always)]
unsafe fn pair<S: Simd, N: Number>(part: &Part<N>, i: usize, at: isize) -> (S::F, S::F) {
    // SAFETY: the contract of `Stepper::rows`.
    unsafe {
        let (a, b) = (load::<S, N>(part, i, at), load::<S, N>(part, i + 1, at));
        (S::add(a, b), S::sub(a, b))
    }
}

/// Density minus 1, momentum, and the rest population.
#[inline(always)]
unsafe fn sums<S: Simd, N: Number>(part: &Part<N>, at: isize) -> (S::F, [S::F; 3], S::F) {
    // SAFETY: the contract of `Stepper::rows`.
    unsafe {
        let f0 = load::<S, N>(part, 0, at);
        let ((s1, d1), (s3, d3), (s5, d5)) =
            (pair::<S, N>(part, 1, at), pair::<S, N>(part, 3, at), pair::<S, N>(part, 5, at));
        let ((s7, d7), (s13, d13)) = (pair::<S, N>(part, 7, at), pair::<S, N>(part, 13, at));
        let ((s9, d9), (s15, d15)) = (pair::<S, N>(part, 9, at), pair::<S, N>(part, 15, at));
        let ((s11, d11), (s17, d17)) = (pair::<S, N>(part, 11, at), pair::<S, N>(part, 17, at));
        let straight = S::add(S::add(s1, s3), s5);
        let diagonal = S::add(S::add(S::add(s7, s13), S::add(s9, s15)), S::add(s11, s17));
        let jx = S::add(d1, S::add(S::add(d7, d13), S::add(d9, d15)));
        let jy = S::add(d3, S::add(S::sub(d7, d13), S::add(d11, d17)));
        let jz = S::add(d5, S::add(S::sub(d9, d15), S::sub(d11, d17)));
        (S::add(f0, S::add(straight, diagonal)), [jx, jy, jz], f0)
    }
}

/// Components of a vector along the directions 1, 3, 5, … 17.
#[inline(always)]
unsafe fn along<S: Simd>([x, y, z]: [S::F; 3]) -> [S::F; 9] {
    // SAFETY: the caller ensures that the CPU has the instruction set.
    unsafe { [x, y, z, S::add(x, y), S::add(x, z), S::add(y, z), S::sub(x, y), S::sub(x, z), S::sub(y, z)] }
}

impl Lattice for Fluid3 {
    const DIRECTIONS: &'static Directions = &D3Q19;

    #[inline(always)]
    unsafe fn plain_block<S: Simd, N: Number, const STREAM: bool>(part: &Part<N>, at: isize) {
        // SAFETY: the contract of `Stepper::rows`.
        unsafe {
            let with = &part.plain;
            let (excess, [jx, jy, jz], f0) = sums::<S, N>(part, at);
            let one = S::splat(1.0);
            let per_density = S::div(one, S::add(one, excess));
            let u = [S::mul(jx, per_density), S::mul(jy, per_density), S::mul(jz, per_density)];
            let energy = S::fma(u[2], jz, S::fma(u[1], jy, S::mul(u[0], jx)));
            let rest = S::fma(S::splat(-1.5), energy, excess);
            put::<S, N, STREAM>(part, 0, at, S::fma(S::splat(with.keep_rest), f0, S::mul(S::splat(with.rest), rest)));
            let shared = [S::mul(S::splat(with.even[0]), rest), S::mul(S::splat(with.even[1]), rest)];
            let (j, u) = (along::<S>([jx, jy, jz]), along::<S>(u));
            for pair_number in 0..9 {
                let (i, kind) = (2 * pair_number + 1, if pair_number < 3 { 0 } else { 1 });
                let (sum, difference) = pair::<S, N>(part, i, at);
                let (a, b) = with.relax::<S>(sum, difference, j[pair_number], u[pair_number], shared[kind], kind);
                put::<S, N, STREAM>(part, i, at, S::add(a, b));
                put::<S, N, STREAM>(part, i + 1, at, S::sub(a, b));
            }
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd, N: Number, const FIELD: bool, const FORCE: bool, const STREAM: bool>(
        part: &Part<N>,
        at: isize,
    ) {
        // SAFETY: the contract of `Stepper::rows`.
        unsafe {
            let (excess, [mut jx, mut jy, mut jz], f0) = sums::<S, N>(part, at);
            let [fx, fy, fz] = [S::splat(part.force[0]), S::splat(part.force[1]), S::splat(part.force[2])];
            if FORCE {
                let half = S::splat(0.5);
                (jx, jy, jz) = (S::fma(half, fx, jx), S::fma(half, fy, jy), S::fma(half, fz, jz));
            }
            let one = S::splat(1.0);
            let per_density = S::div(one, S::add(one, excess));
            let u = [S::mul(jx, per_density), S::mul(jy, per_density), S::mul(jz, per_density)];
            let energy = S::fma(u[2], jz, S::fma(u[1], jy, S::mul(u[0], jx)));
            let work = S::fma(u[2], fz, S::fma(u[1], fy, S::mul(u[0], fx)));
            let shared = share::<S, N, FIELD>(part, at, excess, energy, work);
            put::<S, N, STREAM>(part, 0, at, shared.rest::<FORCE>(f0, REST));
            let (j, u, force) = (along::<S>([jx, jy, jz]), along::<S>(u), along::<S>([fx, fy, fz]));
            for pair_number in 0..9 {
                let (i, n) = (2 * pair_number + 1, pair_number);
                let weights = if pair_number < 3 { &STRAIGHT } else { &DIAGONAL };
                let (sum, difference) = pair::<S, N>(part, i, at);
                let (a, b) = shared.relax::<FORCE>(sum, difference, j[n], u[n], force[n], weights);
                put::<S, N, STREAM>(part, i, at, S::sub(load::<S, N>(part, i, at), S::add(a, b)));
                put::<S, N, STREAM>(part, i + 1, at, S::sub(load::<S, N>(part, i + 1, at), S::sub(a, b)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lbm::collision::Plain;

    #[test]
    fn weights_add_up_exactly() {
        let [rest, straight, diagonal] = [REST, STRAIGHT.two / 2.0, DIAGONAL.two / 2.0].map(f64::from);
        assert_eq!(rest + 6.0 * straight + 12.0 * diagonal, 1.0);
        assert_eq!(f64::from(STRAIGHT.six) + 4.0 * f64::from(DIAGONAL.six), 1.0);
        for (found, exact) in [(rest, 1.0 / 3.0), (straight, 1.0 / 18.0), (diagonal, 1.0 / 36.0)] {
            assert!((found / exact - 1.0).abs() < 2e-7, "{found}, {exact}");
        }
        for tau in [0.50001, 0.51, 0.6, 0.8, 1.0, 1.7, 30.0] {
            let rates = [1.0 / tau, 1.0 / (0.1875 / (tau - 0.5) + 0.5)];
            let plain = Plain::new(3, rates);
            let f = f64::from;
            let even = 0.5 - f(plain.keep_even);
            assert_eq!(1.0 - f(plain.keep_rest), 2.0 * even);
            assert_eq!(f(plain.rest) + 6.0 * f(plain.even[0]) + 12.0 * f(plain.even[1]), 2.0 * even, "tau {tau}");
            assert_eq!(2.0 * f(plain.energy[0]) + 8.0 * f(plain.energy[1]), 3.0 * even, "tau {tau}");
            let odd = 0.5 - f(plain.keep_odd);
            assert_eq!(f(plain.odd[0]) + 4.0 * f(plain.odd[1]), odd, "tau {tau}");
            assert!((2.0 * even - rates[0]).abs() < 1.3e-7 && (2.0 * odd - rates[1]).abs() < 1.3e-7);
        }
    }
}
