//! D2Q9 stream-collide kernel: pulls nine populations, relaxes them in opposite pairs and stores them, 16 cells at a
//! time.
use kernels::cpu::simd::Simd;

use super::collision::{Part, Weights, load, put, share};
use super::{D2Q9, Directions, Fluid, Lattice};
use crate::number::Number;

/// Of the straight directions. All multiples of 1/9 near 1/9 are rounded to multiples of 2^-27.
pub const STRAIGHT: Weights = Weights { two: 2.0 * (14_913_081.0 / (1 << 27) as f32), six: 2.0 / 3.0, nine: 1.0 };
/// Of the diagonal directions.
pub const DIAGONAL: Weights =
    Weights { two: 2.0 * (3_728_270.0 / (1 << 27) as f32), six: (1.0 - STRAIGHT.six) / 2.0, nine: 0.25 };
/// The weight of the rest population.
pub const REST: f32 = 4.0 * (14_913_081.0 / (1 << 27) as f32);

impl Lattice for Fluid {
    const DIRECTIONS: &'static Directions = &D2Q9;

    #[inline(always)]
    unsafe fn plain_block<S: Simd, N: Number, const STREAM: bool>(part: &Part<N>, at: isize) {
        // SAFETY: the contract of `Stepper::rows`.
        unsafe {
            let with = &part.plain;
            let (f0, f1, f3) = (load::<S, N>(part, 0, at), load::<S, N>(part, 1, at), load::<S, N>(part, 3, at));
            let (s1, d1) = (S::add(f1, f3), S::sub(f1, f3));
            let (f2, f4) = (load::<S, N>(part, 2, at), load::<S, N>(part, 4, at));
            let (s2, d2) = (S::add(f2, f4), S::sub(f2, f4));
            let (f5, f7) = (load::<S, N>(part, 5, at), load::<S, N>(part, 7, at));
            let (s5, d5) = (S::add(f5, f7), S::sub(f5, f7));
            let (f6, f8) = (load::<S, N>(part, 6, at), load::<S, N>(part, 8, at));
            let (s6, d6) = (S::add(f6, f8), S::sub(f6, f8));
            let excess = S::add(f0, S::add(S::add(s1, s2), S::add(s5, s6)));
            let (jx, jy) = (S::add(d1, S::sub(d5, d6)), S::add(d2, S::add(d5, d6)));
            let one = S::splat(1.0);
            let per_density = S::div(one, S::add(one, excess));
            let (ux, uy) = (S::mul(jx, per_density), S::mul(jy, per_density));
            let rest = S::fma(S::splat(-1.5), S::fma(uy, jy, S::mul(ux, jx)), excess);
            put::<S, N, STREAM>(part, 0, at, S::fma(S::splat(with.keep_rest), f0, S::mul(S::splat(with.rest), rest)));
            let shared = S::mul(S::splat(with.even[0]), rest);
            let (a, b) = with.relax::<S>(s1, d1, jx, ux, shared, 0);
            put::<S, N, STREAM>(part, 1, at, S::add(a, b));
            put::<S, N, STREAM>(part, 3, at, S::sub(a, b));
            let (a, b) = with.relax::<S>(s2, d2, jy, uy, shared, 0);
            put::<S, N, STREAM>(part, 2, at, S::add(a, b));
            put::<S, N, STREAM>(part, 4, at, S::sub(a, b));
            let shared = S::mul(S::splat(with.even[1]), rest);
            let (a, b) = with.relax::<S>(s5, d5, S::add(jx, jy), S::add(ux, uy), shared, 1);
            put::<S, N, STREAM>(part, 5, at, S::add(a, b));
            put::<S, N, STREAM>(part, 7, at, S::sub(a, b));
            let (a, b) = with.relax::<S>(s6, d6, S::sub(jy, jx), S::sub(uy, ux), shared, 1);
            put::<S, N, STREAM>(part, 6, at, S::add(a, b));
            put::<S, N, STREAM>(part, 8, at, S::sub(a, b));
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd, N: Number, const FIELD: bool, const FORCE: bool, const STREAM: bool>(
        part: &Part<N>,
        at: isize,
    ) {
        // SAFETY: the contract of `Stepper::rows`.
        unsafe {
            // Pairs of opposite populations.
            let (f0, f1, f3) = (load::<S, N>(part, 0, at), load::<S, N>(part, 1, at), load::<S, N>(part, 3, at));
            let (f2, f4) = (load::<S, N>(part, 2, at), load::<S, N>(part, 4, at));
            let (f5, f7) = (load::<S, N>(part, 5, at), load::<S, N>(part, 7, at));
            let (f6, f8) = (load::<S, N>(part, 6, at), load::<S, N>(part, 8, at));
            let (s1, d1) = (S::add(f1, f3), S::sub(f1, f3));
            let (s2, d2) = (S::add(f2, f4), S::sub(f2, f4));
            let (s5, d5) = (S::add(f5, f7), S::sub(f5, f7));
            let (s6, d6) = (S::add(f6, f8), S::sub(f6, f8));
            let excess = S::add(f0, S::add(S::add(s1, s2), S::add(s5, s6)));
            let (mut jx, mut jy) = (S::add(d1, S::sub(d5, d6)), S::add(d2, S::add(d5, d6)));
            let (fx, fy) = (S::splat(part.force[0]), S::splat(part.force[1]));
            if FORCE {
                let half = S::splat(0.5);
                (jx, jy) = (S::fma(half, fx, jx), S::fma(half, fy, jy));
            }
            let one = S::splat(1.0);
            let per_density = S::div(one, S::add(one, excess));
            let (ux, uy) = (S::mul(jx, per_density), S::mul(jy, per_density));
            let energy = S::fma(uy, jy, S::mul(ux, jx));
            let shared = share::<S, N, FIELD>(part, at, excess, energy, S::fma(uy, fy, S::mul(ux, fx)));
            put::<S, N, STREAM>(part, 0, at, shared.rest::<FORCE>(f0, REST));
            let (a, b) = shared.relax::<FORCE>(s1, d1, jx, ux, fx, &STRAIGHT);
            put::<S, N, STREAM>(part, 1, at, S::sub(f1, S::add(a, b)));
            put::<S, N, STREAM>(part, 3, at, S::sub(f3, S::sub(a, b)));
            let (a, b) = shared.relax::<FORCE>(s2, d2, jy, uy, fy, &STRAIGHT);
            put::<S, N, STREAM>(part, 2, at, S::sub(f2, S::add(a, b)));
            put::<S, N, STREAM>(part, 4, at, S::sub(f4, S::sub(a, b)));
            let (a, b) = shared.relax::<FORCE>(s5, d5, S::add(jx, jy), S::add(ux, uy), S::add(fx, fy), &DIAGONAL);
            put::<S, N, STREAM>(part, 5, at, S::sub(f5, S::add(a, b)));
            put::<S, N, STREAM>(part, 7, at, S::sub(f7, S::sub(a, b)));
            let (a, b) = shared.relax::<FORCE>(s6, d6, S::sub(jy, jx), S::sub(uy, ux), S::sub(fy, fx), &DIAGONAL);
            put::<S, N, STREAM>(part, 6, at, S::sub(f6, S::add(a, b)));
            put::<S, N, STREAM>(part, 8, at, S::sub(f8, S::sub(a, b)));
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
        assert_eq!(rest + 4.0 * straight + 4.0 * diagonal, 1.0);
        assert_eq!(f64::from(STRAIGHT.six) + 2.0 * f64::from(DIAGONAL.six), 1.0);
        for (found, exact) in [(rest, 4.0 / 9.0), (straight, 1.0 / 9.0), (diagonal, 1.0 / 36.0)] {
            assert!((found / exact - 1.0).abs() < 2e-7, "{found}, {exact}");
        }
        for tau in [0.50001, 0.51, 0.6, 0.8, 1.0, 1.7, 30.0] {
            let rates = [1.0 / tau, 1.0 / (0.1875 / (tau - 0.5) + 0.5)];
            let plain = Plain::new(2, rates);
            let f = f64::from;
            let even = 0.5 - f(plain.keep_even);
            assert_eq!(1.0 - f(plain.keep_rest), 2.0 * even);
            assert_eq!(f(plain.rest) + 4.0 * f(plain.even[0]) + 4.0 * f(plain.even[1]), 2.0 * even, "tau {tau}");
            assert_eq!(2.0 * f(plain.energy[0]) + 4.0 * f(plain.energy[1]), 3.0 * even, "tau {tau}");
            let odd = 0.5 - f(plain.keep_odd);
            assert_eq!(f(plain.odd[0]) + 2.0 * f(plain.odd[1]), odd, "tau {tau}");
            assert!((2.0 * even - rates[0]).abs() < 1.3e-7 && (2.0 * odd - rates[1]).abs() < 1.3e-7);
        }
    }
}
