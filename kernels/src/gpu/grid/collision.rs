//! The collision of a pair of opposite populations on a device: what the lattices share, as `grid/lbm/collision.rs` has it.
use cubecl::prelude::*;

use super::place::Ends;

/// Populations less their weights are small: so many times larger they keep their digits in 16 bits.
pub(super) const ENLARGED: f32 = 32_768.0;

/// What a step does beyond the plainest: part of the kernel's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Form {
    /// Rates by cell.
    pub(super) field: bool,
    /// A force acts.
    pub(super) force: bool,
    /// Numbers are stored enlarged, with 16 bits.
    pub(super) enlarged: bool,
    /// Only which axes are closed upon themselves counts.
    pub(super) ends: Ends,
}

/// Multiples of a direction's weight: two, six, nine.
pub(super) type Weights = (f32, f32, f32);

/// Coefficients of the collision: those of the plain one, then half the rates and the force.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Numbers {
    pub(super) keep_rest: f32,
    pub(super) rest: f32,
    pub(super) keep_even: f32,
    pub(super) even_straight: f32,
    pub(super) even_diagonal: f32,
    pub(super) energy_straight: f32,
    pub(super) energy_diagonal: f32,
    pub(super) keep_odd: f32,
    pub(super) odd_straight: f32,
    pub(super) odd_diagonal: f32,
    pub(super) half_even: f32,
    pub(super) half_odd: f32,
    pub(super) fx: f32,
    pub(super) fy: f32,
    pub(super) fz: f32,
}

/// In the order of the fields of [`Numbers`].
pub(super) fn launched<R: Runtime>(numbers: &[f32; 15]) -> NumbersLaunch<R> {
    let [a, b, c, d, e, f, g, h, i, j, even, odd, x, y, z] = *numbers;
    NumbersLaunch::new(a, b, c, d, e, f, g, h, i, j, even, odd, x, y, z)
}

/// What both of a pair become, and what the first has more and the second less.
#[cube]
pub(super) fn relax_plain(
    numbers: &Numbers,
    sum: f32,
    difference: f32,
    j: f32,
    u: f32,
    shared: f32,
    #[comptime] diagonal: bool,
) -> (f32, f32) {
    let (energy, odd) = if comptime!(diagonal) {
        (numbers.energy_diagonal, numbers.odd_diagonal)
    } else {
        (numbers.energy_straight, numbers.odd_straight)
    };
    let moving = fma(energy * j, u, shared);
    let even = fma(numbers.keep_even, sum, moving);
    (even, fma(numbers.keep_odd, difference, odd * j))
}

/// What all pairs of a cell share.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Shared {
    /// Half the rates.
    pub(super) even: f32,
    pub(super) odd: f32,
    /// The excess of density less 3/2 of the energy.
    pub(super) rest: f32,
    /// u·F.
    pub(super) work: f32,
}

/// What becomes of the population at rest. `weight`: its.
#[cube]
pub(super) fn rest(shared: &Shared, f0: f32, #[comptime] weight: f32, #[comptime] forced: bool) -> f32 {
    let mut next = fma(shared.even + shared.even, weight * shared.rest - f0, f0);
    if comptime!(forced) {
        next = fma((shared.even - 1.0f32) * comptime!(3.0f32 * weight), shared.work, next);
    }
    next
}

/// What a pair loses: the part that both do, and the part that the first does and the second gains.
#[cube]
pub(super) fn relax(
    shared: &Shared,
    sum: f32,
    difference: f32,
    j: f32,
    u: f32,
    force: f32,
    #[comptime] weights: Weights,
    #[comptime] forced: bool,
) -> (f32, f32) {
    let (two, six, nine) = comptime!((weights.0, weights.1, weights.2));
    let even = sum - fma(nine * j, u, two * shared.rest);
    let odd = difference - six * j;
    let mut a = shared.even * even;
    let mut b = shared.odd * odd;
    if comptime!(forced) {
        let source = fma(nine * u, force, comptime!(-1.5f32 * weights.0) * shared.work);
        a = fma(shared.even - 1.0f32, source, a);
        b = fma(shared.odd - 1.0f32, comptime!(0.5f32 * weights.1) * force, b);
    }
    (a, b)
}

/// A stored number.
#[cube]
pub(super) fn get<S: Float>(from: &Array<S>, at: usize, #[comptime] enlarged: bool) -> f32 {
    let value = f32::cast_from(from[at]);
    if comptime!(enlarged) { value * comptime!(1.0f32 / ENLARGED) } else { value }
}

#[cube]
pub(super) fn put<S: Float>(to: &mut Array<S>, at: usize, value: f32, #[comptime] enlarged: bool) {
    let value = if comptime!(enlarged) { value * comptime!(ENLARGED) } else { value };
    to[at] = S::cast_from(value);
}
