//! Collision of a pair of opposite populations, shared by the lattices. The coefficients of each conserved sum add up
//! exactly, so rounded coefficients cause no drift of mass or momentum.
use kernels::cpu::simd::Simd;

use crate::number::Number;

/// A block of rows: pull pointers, targets and collision coefficients.
#[derive(Clone, Copy)]
pub struct Part<N> {
    /// Where the first cell pulls each population from; entries past the lattice's populations are unused.
    pub(super) from: [*const N; POPULATIONS_MAX],
    pub(super) to: [*mut N; POPULATIONS_MAX],
    /// Half the relaxation rates per cell, even and odd.
    pub(super) halves: [*const f32; 2],
    pub(super) half: [f32; 2],
    pub(super) plain: Plain,
    pub(super) force: [f32; 3],
    pub(super) row: isize,
    pub(super) rows: usize,
    pub(super) cells: usize,
    /// Prefetch: the rows are in memory, not in a cache.
    pub(super) ahead: bool,
}

/// Populations of the largest lattice.
pub(super) const POPULATIONS_MAX: usize = 19;

/// Collision coefficients for uniform rates and no force. The coefficients of mass and of momentum add up exactly, as
/// the weights below do.
#[derive(Clone, Copy)]
pub struct Plain {
    /// For the rest population: its own factor.
    pub keep_rest: f32,
    /// For the rest population: the factor of the shared rest term.
    pub rest: f32,
    /// For pair sums: their own factor.
    pub keep_even: f32,
    /// For pair sums: the factors of the shared rest term (straight, diagonal).
    pub even: [f32; 2],
    /// For pair sums: the factors of j·u (straight, diagonal).
    pub energy: [f32; 2],
    /// For pair differences: their own factor.
    pub keep_odd: f32,
    /// For pair differences: the factors of j (straight, diagonal).
    pub odd: [f32; 2],
}

impl Plain {
    /// `dimensions`: 2 (D2Q9) or 3 (D3Q19).
    pub(super) fn new(dimensions: usize, [even, odd]: [f64; 2]) -> Self {
        // Multiples of 2^-24 below 1 are exact in `f32`, and so are their halves below 1/2.
        let to = |value: f64, bits: i32| (value * f64::powi(2.0, bits)).round() / f64::powi(2.0, bits);
        let (even, odd) = (to(0.5 * even, 24), to(0.5 * odd, 24));
        // Weight of a straight direction; number of straight and of diagonal directions; diagonal directions per axis
        // and sense.
        let (weight, counts, shared) =
            if dimensions == 2 { (1.0 / 9.0, [4.0, 4.0], 2.0) } else { (1.0 / 18.0, [6.0, 12.0], 4.0) };
        let (straight, diagonal) = (to(even * 2.0 * weight, 25), to(even / 18.0, 25));
        let momentum = to(odd * 6.0 * weight, 24);
        let energy = 9.0 * weight * even;
        Self {
            keep_rest: (1.0 - 2.0 * even) as f32,
            rest: (2.0 * even - counts[0] * straight - counts[1] * diagonal) as f32,
            keep_even: (0.5 - even) as f32,
            even: [straight as f32, diagonal as f32],
            energy: [energy as f32, (0.25 * even) as f32],
            keep_odd: (0.5 - odd) as f32,
            odd: [momentum as f32, ((odd - momentum) / shared) as f32],
        }
    }
}

impl Plain {
    /// The even part, common to both populations of a pair, and the odd part, added to the first and subtracted from
    /// the second. `kind`: 0 straight, 1 diagonal.
    #[inline(always)]
    pub(super) unsafe fn relax<S: Simd>(
        &self,
        sum: S::F,
        difference: S::F,
        j: S::F,
        u: S::F,
        shared: S::F,
        kind: usize,
    ) -> (S::F, S::F) {
        // SAFETY: the caller ensures that the CPU has the instruction set.
        unsafe {
            let moving = S::fma(S::mul(S::splat(self.energy[kind]), j), u, shared);
            let even = S::fma(S::splat(self.keep_even), sum, moving);
            (even, S::fma(S::splat(self.keep_odd), difference, S::mul(S::splat(self.odd[kind]), j)))
        }
    }
}

/// Multiples of a direction's weight whose sums are exact in `f32`: otherwise mass and momentum would drift, a little
/// with each step and always in the same sense.
pub struct Weights {
    /// 2 times the weight.
    pub two: f32,
    /// 6 times the weight.
    pub six: f32,
    /// 9 times the weight.
    pub nine: f32,
}

/// Terms shared by all pairs of a block. Functions, not closures: closures would not be compiled for the instruction
/// set.
pub(super) struct Block<S: Simd> {
    /// Half the relaxation rates.
    pub(super) even: S::F,
    pub(super) odd: S::F,
    /// Density minus 1, minus 3/2 of j·u.
    pub(super) rest: S::F,
    /// u·F; half the rates minus 1.
    pub(super) work: S::F,
    pub(super) left_even: S::F,
    pub(super) left_odd: S::F,
}

#[inline(always)]
pub(super) unsafe fn share<S: Simd, N, const FIELD: bool>(
    part: &Part<N>,
    at: isize,
    excess: S::F,
    energy: S::F,
    work: S::F,
) -> Block<S> {
    // SAFETY: the contract of `Stepper::rows`.
    unsafe {
        let one = S::splat(1.0);
        let (even, odd) = if FIELD {
            (S::load(part.halves[0].offset(at)), S::load(part.halves[1].offset(at)))
        } else {
            (S::splat(part.half[0]), S::splat(part.half[1]))
        };
        let rest = S::fma(S::splat(-1.5), energy, excess);
        Block { even, odd, rest, work, left_even: S::sub(even, one), left_odd: S::sub(odd, one) }
    }
}

impl<S: Simd> Block<S> {
    /// The rest population after the collision; `weight` is its weight.
    #[inline(always)]
    pub(super) unsafe fn rest<const FORCE: bool>(&self, f0: S::F, weight: f32) -> S::F {
        // SAFETY: the caller ensures that the CPU has the instruction set.
        unsafe {
            let next = S::fma(S::add(self.even, self.even), S::sub(S::mul(S::splat(weight), self.rest), f0), f0);
            if FORCE {
                return S::fma(S::mul(self.left_even, S::splat(3.0 * weight)), self.work, next);
            }
            next
        }
    }

    /// What a pair loses in the collision: the even part, and the odd part, which the second population gains. `j`, `u`
    /// and `force` are components along the pair's direction.
    #[inline(always)]
    pub(super) unsafe fn relax<const FORCE: bool>(
        &self,
        sum: S::F,
        difference: S::F,
        j: S::F,
        u: S::F,
        force: S::F,
        w: &Weights,
    ) -> (S::F, S::F) {
        // SAFETY: the caller ensures that the CPU has the instruction set.
        unsafe {
            let nine_w = S::splat(w.nine);
            let even = S::sub(sum, S::fma(S::mul(nine_w, j), u, S::mul(S::splat(w.two), self.rest)));
            let odd = S::sub(difference, S::mul(S::splat(w.six), j));
            let (mut a, mut b) = (S::mul(self.even, even), S::mul(self.odd, odd));
            if FORCE {
                // w (9 (c·u)(c·F) - 3 u·F) and 3 w c·F.
                let source = S::fma(S::mul(nine_w, u), force, S::mul(S::splat(-1.5 * w.two), self.work));
                a = S::fma(self.left_even, source, a);
                b = S::fma(self.left_odd, S::mul(S::splat(0.5 * w.six), force), b);
            }
            (a, b)
        }
    }
}

/// Loads population `i` as pulled by the 16 cells from `at` on.
#[inline(always)]
pub(super) unsafe fn load<S: Simd, N: Number>(part: &Part<N>, i: usize, at: isize) -> S::F {
    // SAFETY: the caller's contract.
    unsafe { N::load::<S>(part.from[i].offset(at)) }
}

#[inline(always)]
pub(super) unsafe fn put<S: Simd, N: Number, const STREAM: bool>(part: &Part<N>, i: usize, at: isize, v: S::F) {
    // SAFETY: the caller's contract.
    unsafe { N::put::<S, STREAM>(v, part.to[i].offset(at)) }
}
