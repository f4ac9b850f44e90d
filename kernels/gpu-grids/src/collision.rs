//! Collision of a pair of opposite populations on GPUs, shared by the lattices; the formulas of
//! `kernels/grids/src/lbm/collision.rs`. A thread computes a group of adjacent cells, one per vector lane, that fills a full-width
//! memory access.
use cubecl::prelude::*;
use kernels_grids::lbm::{D2Q9, D3Q19};

use crate::place::{Boundary, Ends, next_to};

/// Scale factor of 16-bit storage: populations minus their weights are small, and keep their precision when enlarged.
pub(super) const ENLARGED: f32 = 32_768.0;

/// Variant of the step kernel: a compile-time parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Form {
    /// Relaxation rates per cell.
    pub(super) field: bool,
    /// With a body force.
    pub(super) force: bool,
    /// Some cells have solid cells or resting walls beside them.
    pub(super) linked: bool,
    /// Numbers are stored scaled, with 16 bits.
    pub(super) enlarged: bool,
    /// Only periodic wrap-around matters here.
    pub(super) ends: Ends,
}

/// Multiples of a direction's weight: two, six, nine.
pub(super) type Weights = (f32, f32, f32);

/// Collision coefficients: those for uniform rates without force, half the relaxation rates, and the force.
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

/// Launch arguments; `numbers` in the order of the fields of [`Numbers`].
pub(super) fn launched<R: Runtime>(numbers: &[f32; 15]) -> NumbersLaunch<R> {
    let [a, b, c, d, e, f, g, h, i, j, even, odd, x, y, z] = *numbers;
    NumbersLaunch::new(a, b, c, d, e, f, g, h, i, j, even, odd, x, y, z)
}

/// Values of `N` adjacent cells.
pub(super) type Cells<N> = Vector<f32, N>;

/// The even part, common to both populations of a pair, and the odd part, added to the first and subtracted from the
/// second.
#[cube]
pub(super) fn relax_plain<N: Size>(
    numbers: &Numbers,
    sum: Cells<N>,
    difference: Cells<N>,
    j: Cells<N>,
    u: Cells<N>,
    shared: Cells<N>,
    #[comptime] diagonal: bool,
) -> (Cells<N>, Cells<N>) {
    let (energy, odd) = if comptime!(diagonal) {
        (numbers.energy_diagonal, numbers.odd_diagonal)
    } else {
        (numbers.energy_straight, numbers.odd_straight)
    };
    let moving = fma(Cells::<N>::new(energy) * j, u, shared);
    let even = fma(Cells::<N>::new(numbers.keep_even), sum, moving);
    (even, fma(Cells::<N>::new(numbers.keep_odd), difference, Cells::<N>::new(odd) * j))
}

/// Terms shared by all pairs of a cell.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Shared<N: Size> {
    /// Half the relaxation rates.
    pub(super) even: Cells<N>,
    pub(super) odd: Cells<N>,
    /// Density minus 1, minus 3/2 of j·u.
    pub(super) rest: Cells<N>,
    /// u·F.
    pub(super) work: Cells<N>,
}

/// The rest population after the collision; `weight` is its weight.
#[cube]
pub(super) fn rest<N: Size>(
    shared: &Shared<N>,
    f0: Cells<N>,
    #[comptime] weight: f32,
    #[comptime] forced: bool,
) -> Cells<N> {
    let mut next = fma(shared.even + shared.even, Cells::<N>::new(weight) * shared.rest - f0, f0);
    if comptime!(forced) {
        let left = shared.even - Cells::<N>::new(1.0f32);
        next = fma(left * Cells::<N>::new(comptime!(3.0f32 * weight)), shared.work, next);
    }
    next
}

/// What a pair loses in the collision: the even part, and the odd part, which the second population gains.
#[cube]
pub(super) fn relax<N: Size>(
    shared: &Shared<N>,
    sum: Cells<N>,
    difference: Cells<N>,
    j: Cells<N>,
    u: Cells<N>,
    force: f32,
    #[comptime] weights: Weights,
    #[comptime] forced: bool,
) -> (Cells<N>, Cells<N>) {
    let (two, six, nine) = comptime!((weights.0, weights.1, weights.2));
    let even = sum - fma(Cells::<N>::new(nine) * j, u, Cells::<N>::new(two) * shared.rest);
    let odd = difference - Cells::<N>::new(six) * j;
    let mut a = shared.even * even;
    let mut b = shared.odd * odd;
    if comptime!(forced) {
        let one = Cells::<N>::new(1.0f32);
        let work = Cells::<N>::new(comptime!(-1.5f32 * weights.0)) * shared.work;
        let source = fma(Cells::<N>::new(nine) * u, Cells::<N>::new(force), work);
        a = fma(shared.even - one, source, a);
        b = fma(shared.odd - one, Cells::<N>::new(comptime!(0.5f32 * weights.1) * force), b);
    }
    (a, b)
}

/// Positions of a group of cells in its row, and of the groups pulled from on its left and right, in groups of `N`
/// cells.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Columns {
    pub(super) here: usize,
    left: usize,
    right: usize,
}

/// `x`: the first of the cells; `left` and `right`: the first and the last owned cell.
#[cube]
pub(super) fn columns<N: Size>(x: u32, left: u32, right: u32, #[comptime] ends: [Boundary; 2]) -> Columns {
    let each = N::value() as u32;
    let (x, left, right) = (x / each, left / each, right / each);
    let here = x as usize;
    Columns {
        here,
        left: next_to(here, x, left, right, 1usize, comptime!(ends[0]), false),
        right: next_to(here, x, left, right, 1usize, comptime!(ends[1]), true),
    }
}

/// Pulls a population from the row that begins at cell `line`; `c` is its velocity along x.
#[cube]
pub(super) fn pulled<S: Float, N: Size>(
    from: &Array<Vector<S, N>>,
    line: usize,
    columns: &Columns,
    #[comptime] c: i8,
    #[comptime] enlarged: bool,
) -> Cells<N> {
    let each = N::value();
    let line = line / each;
    if comptime!(c == 0) {
        get::<S, N>(from, line + columns.here, enlarged)
    } else {
        let other = if comptime!(c > 0) { columns.left } else { columns.right };
        let beside = get::<S, N>(from, line + other, enlarged);
        if comptime!(each == 1) {
            beside
        } else {
            let here = get::<S, N>(from, line + columns.here, enlarged);
            let mut shifted = Cells::<N>::empty();
            #[unroll]
            for i in 0..each {
                let outside = comptime!(if c > 0 { i == 0 } else { i + 1 == each });
                let lane = comptime!(if c > 0 { (i + each - 1) % each } else { (i + 1) % each });
                shifted[i] = if outside { beside[lane] } else { here[lane] };
            }
            shifted
        }
    }
}

/// Half-way bounce-back: replaces pulled populations by the cell's own opposite ones where the upstream neighbour is
/// solid and at rest. `links`: per 32 cells of a plane, a bit mask of the cells with such neighbours and the index of
/// their first entry; an entry is a bit mask of the directions that bounce back, without rest. `at`: the first cell.
#[cube]
pub(super) fn bounced<S: Float, N: Size>(
    from: &Array<Vector<S, N>>,
    links: &Array<u32>,
    came: &Sequence<Cells<N>>,
    at: usize,
    plane: usize,
    #[comptime] three: bool,
    #[comptime] enlarged: bool,
) -> Sequence<Cells<N>> {
    let count = comptime!(if three { 19usize } else { 9usize });
    let each = N::value();
    let mut all = Array::<Cells<N>>::new(count);
    #[unroll]
    for i in 0..count {
        all[i] = *came.index(i);
    }
    let (word, bit) = (at / 32, u32::cast_from(at % 32));
    let cells = links[2 * word];
    let linked = (cells >> bit) & comptime!((1u32 << each) - 1);
    if linked != 0u32 {
        let mut told = links[2 * word + 1] + u32::count_ones(cells & ((1u32 << bit) - 1u32));
        let mut turned = Array::<u32>::new(each);
        #[unroll]
        for lane in 0..each {
            turned[lane] = 0u32;
            if (linked & comptime!(1u32 << lane)) != 0u32 {
                turned[lane] = links[told as usize];
                told += 1u32;
            }
        }
        #[unroll]
        for i in 1..count {
            let back = get::<S, N>(from, (comptime!(opposite(three, i)) * plane + at) / each, enlarged);
            let direction = comptime!(1u32 << (i - 1));
            if comptime!(each == 1) {
                all[i] = select((turned[0] & direction) != 0u32, back, all[i]);
            } else {
                let old = all[i];
                let mut mixed = Cells::<N>::empty();
                #[unroll]
                for lane in 0..each {
                    mixed[lane] = select((turned[lane] & direction) != 0u32, back[lane], old[lane]);
                }
                all[i] = mixed;
            }
        }
    }
    let mut found = Sequence::<Cells<N>>::new();
    #[unroll]
    for i in 0..count {
        found.push(all[i]);
    }
    found
}

/// Index of the opposite direction.
fn opposite(three: bool, i: usize) -> usize {
    let directions = if three { &D3Q19 } else { &D2Q9 };
    directions.opposite[i]
}

#[cube]
fn get<S: Float, N: Size>(from: &Array<Vector<S, N>>, at: usize, #[comptime] enlarged: bool) -> Cells<N> {
    let value = Cells::<N>::cast_from(from[at]);
    if comptime!(enlarged) { value * Cells::<N>::new(comptime!(1.0f32 / ENLARGED)) } else { value }
}

/// Stores a population; `at` in cells.
#[cube]
pub(super) fn put<S: Float, N: Size>(
    to: &mut Array<Vector<S, N>>,
    at: usize,
    value: Cells<N>,
    #[comptime] enlarged: bool,
) {
    let value = if comptime!(enlarged) { value * Cells::<N>::new(ENLARGED) } else { value };
    to[at / N::value()] = Vector::<S, N>::cast_from(value);
}
