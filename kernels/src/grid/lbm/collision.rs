//! The collision of a pair of opposite populations: what the lattices share. Every step loses and gains exactly as much mass
//! and momentum as it must, for the coefficients of each sum add up exactly.
use crate::cpu::simd::Simd;
use crate::grid::number::Number;

/// Where a block of rows is, what it pulls from, and how it collides.
#[derive(Clone, Copy)]
pub(crate) struct Part<N> {
    /// Where the first cell pulls each population from; as many as the lattice has.
    pub(super) from: [*const N; POPULATIONS_MAX],
    pub(super) to: [*mut N; POPULATIONS_MAX],
    /// Half the rates by cell.
    pub(super) halves: [*const f32; 2],
    pub(super) half: [f32; 2],
    pub(super) plain: Plain,
    pub(super) force: [f32; 3],
    pub(super) row: isize,
    pub(super) rows: usize,
    pub(super) cells: usize,
    /// Fetch what comes next: it is in memory.
    pub(super) ahead: bool,
}

/// Of the largest lattice.
pub(super) const POPULATIONS_MAX: usize = 19;

/// Coefficients of the collision where rates are the same everywhere and no force acts. Those of mass and of momentum add
/// up exactly, like the weights below.
#[derive(Clone, Copy)]
pub(crate) struct Plain {
    /// Of the rest population and of the shared rest in it.
    pub(crate) keep_rest: f32,
    pub(crate) rest: f32,
    /// Of sums: themselves, the shared rest (straight, diagonal), j·u (straight, diagonal).
    pub(crate) keep_even: f32,
    pub(crate) even: [f32; 2],
    pub(crate) energy: [f32; 2],
    /// Of differences: themselves, and j (straight, diagonal).
    pub(crate) keep_odd: f32,
    pub(crate) odd: [f32; 2],
}

impl Plain {
    /// `dimensions`: two with nine directions, three with nineteen.
    pub(super) fn new(dimensions: usize, [even, odd]: [f64; 2]) -> Self {
        // Below 1 a multiple of 2^-24 is an `f32`; its half, too, where it is below 1/2.
        let to = |value: f64, bits: i32| (value * f64::powi(2.0, bits)).round() / f64::powi(2.0, bits);
        let (even, odd) = (to(0.5 * even, 24), to(0.5 * odd, 24));
        // A weight of directions along an axis, how many there are of them and of others, and how many others share an axis.
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
    /// What both of a pair become, and what the first has more and the second less. `kind`: straight or diagonal.
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
        // SAFETY: the instruction set is there.
        unsafe {
            let moving = S::fma(S::mul(S::splat(self.energy[kind]), j), u, shared);
            let even = S::fma(S::splat(self.keep_even), sum, moving);
            (even, S::fma(S::splat(self.keep_odd), difference, S::mul(S::splat(self.odd[kind]), j)))
        }
    }
}

/// Multiples of a direction's weight whose sums are exact in `f32`: else each step would lose a little of the mass and of the
/// momentum, always in the same sense.
pub(crate) struct Weights {
    pub(crate) two: f32,
    pub(crate) six: f32,
    pub(crate) nine: f32,
}

/// What all pairs of a block share. Functions and not closures: those would not be compiled for the instruction set.
pub(super) struct Block<S: Simd> {
    /// Half the rates.
    pub(super) even: S::F,
    pub(super) odd: S::F,
    /// The excess of density less 3/2 of the energy.
    pub(super) rest: S::F,
    /// u·F, and what half the rates leave of 1, negative.
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
    /// What becomes of the population at rest. `weight`: its.
    #[inline(always)]
    pub(super) unsafe fn rest<const FORCE: bool>(&self, f0: S::F, weight: f32) -> S::F {
        // SAFETY: the instruction set is there.
        unsafe {
            let next = S::fma(S::add(self.even, self.even), S::sub(S::mul(S::splat(weight), self.rest), f0), f0);
            if FORCE {
                return S::fma(S::mul(self.left_even, S::splat(3.0 * weight)), self.work, next);
            }
            next
        }
    }

    /// What a pair loses: the part that both do, and the part that the first does and the second gains. `j`, `u` and
    /// `force` are along the pair's direction.
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
        // SAFETY: the instruction set is there.
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

/// 16 of a population that the cells from one on pull.
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
