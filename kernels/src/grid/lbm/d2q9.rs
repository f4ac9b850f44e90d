//! Stream and collide in two dimensions: nine populations pulled, relaxed in opposite pairs, and stored, 16 cells at once.
use super::edges::Edges;
use super::{C, Fluid};
use crate::cpu::Isa;
use crate::cpu::simd::{Kernel, Simd};
use crate::grid::GridError;
use crate::grid::frame::Frame;
use crate::grid::planes::{Planes, Shared};
use crate::grid::rule::{Rows, Stepper, aligned_frame};

/// States larger than this are written past the caches: they would not be there any more when the next step reads them.
const STREAM: usize = 16 << 20;
/// Cells that are fetched so much before they are needed.
const AHEAD: isize = 128;

/// The method on one tile.
pub(crate) struct D2q9 {
    edges: Edges,
    /// Half the rates of the even and of the odd parts.
    half: [f32; 2],
    plain: Plain,
    /// Rates by cell.
    halves: Option<Planes>,
    force: [f32; 2],
    frame: Frame,
    stream: bool,
}

impl D2q9 {
    pub(crate) fn new(fluid: &Fluid, frame: &Frame) -> Result<Self, GridError> {
        let halves = match &fluid.omega {
            None => None,
            Some(omega) => {
                let mut planes = Planes::new(2, frame.plane_bytes())?;
                let whole = frame.whole();
                for (y, z) in whole.rows() {
                    for x in whole.0[0].clone() {
                        let Some(global) = frame.global([x, y, z]) else { continue };
                        let omega = f64::from(omega(global));
                        if !(omega > 0.0 && omega < 2.0) {
                            let what = format!("omega = {omega} at {global:?}: between 0 and 2 is possible");
                            return Err(GridError::Parameter { rule: super::NAME, what });
                        }
                        let [even, odd] = fluid.rates(1.0 / omega);
                        planes.plane_mut::<f32>(0)[frame.at([x, y, z])] = (0.5 * even) as f32;
                        planes.plane_mut::<f32>(1)[frame.at([x, y, z])] = (0.5 * odd) as f32;
                    }
                }
                Some(planes)
            }
        };
        Ok(Self {
            edges: Edges::new(fluid, frame),
            half: fluid.rates(fluid.tau).map(|rate| (0.5 * rate) as f32),
            plain: Plain::new(fluid.rates(fluid.tau)),
            halves,
            force: fluid.force,
            stream: 2 * 9 * frame.plane_bytes() > STREAM,
            frame: frame.clone(),
        })
    }
}

impl Stepper for D2q9 {
    fn fill(&self, frame: &Frame, state: &mut Planes) {
        self.edges.fill(frame, state);
    }

    unsafe fn rows(&self, isa: Isa, frame: &Frame, state: &Planes, next: Shared<'_>, rows: &Rows) {
        // Whole blocks of 16, counted from the first owned cell.
        let (start, end) = (rows.x.start.div_euclid(16) * 16, (rows.x.end + 15).div_euclid(16) * 16);
        let at = frame.at([start, rows.y.start, 0]);
        let row = frame.strides()[0];
        let part = Part {
            from: std::array::from_fn(|i| {
                let back = isize::from(C[i][0]) + isize::from(C[i][1]) * row;
                state.plane::<f32>(i).as_ptr().wrapping_add(at).wrapping_offset(-back)
            }),
            to: std::array::from_fn(|i| next.start::<f32>(i).wrapping_add(at)),
            halves: match &self.halves {
                Some(halves) => std::array::from_fn(|i| halves.plane::<f32>(i).as_ptr().wrapping_add(at)),
                None => [std::ptr::null(); 2],
            },
            half: self.half,
            plain: self.plain,
            force: self.force,
            row,
            rows: rows.y.len(),
            cells: (end - start) as usize,
        };
        let forced = self.force != [0.0; 2];
        // SAFETY: blocks and a cell around them are in the planes by the caller's contract and the padding of rows; the
        // instruction set was detected.
        unsafe {
            match (self.halves.is_some(), forced, self.stream) {
                (false, false, false) => isa.run(Collide::<false, false, false>(part)),
                (false, false, true) => isa.run(Collide::<false, false, true>(part)),
                (false, true, false) => isa.run(Collide::<false, true, false>(part)),
                (false, true, true) => isa.run(Collide::<false, true, true>(part)),
                (true, false, false) => isa.run(Collide::<true, false, false>(part)),
                (true, false, true) => isa.run(Collide::<true, false, true>(part)),
                (true, true, false) => isa.run(Collide::<true, true, false>(part)),
                (true, true, true) => isa.run(Collide::<true, true, true>(part)),
            }
        }
    }

    fn travels(&self, field: usize) -> Option<[i8; 3]> {
        Some(C[field])
    }

    fn hidden(&self, at: [usize; 3]) -> u64 {
        self.edges.solid(&self.frame, self.frame.local(at))
    }
}

struct Part {
    /// Where the first cell pulls each population from.
    from: [*const f32; 9],
    to: [*mut f32; 9],
    halves: [*const f32; 2],
    half: [f32; 2],
    plain: Plain,
    force: [f32; 2],
    row: isize,
    rows: usize,
    cells: usize,
}

/// `FIELD`: rates by cell. `FORCE`: there is one. `STREAM`: past the caches.
struct Collide<const FIELD: bool, const FORCE: bool, const STREAM: bool>(Part);

impl<const FIELD: bool, const FORCE: bool, const STREAM: bool> Kernel for Collide<FIELD, FORCE, STREAM> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let part = self.0;
        aligned_frame();
        // SAFETY: the contract of `Stepper::rows`, passed on.
        unsafe {
            for y in 0..part.rows as isize {
                for x in (0..part.cells as isize).step_by(16) {
                    let at = y * part.row + x;
                    if STREAM {
                        // Rows are pages apart, and what reads ahead in the machine stops at the end of a page.
                        for plane in &part.from {
                            S::prefetch(plane.wrapping_offset(at + AHEAD).cast());
                        }
                    }
                    if FIELD || FORCE {
                        block::<S, FIELD, FORCE, STREAM>(&part, at);
                    } else {
                        plain_block::<S, STREAM>(&part, at);
                    }
                }
            }
            if STREAM {
                S::fence();
            }
        }
    }
}

/// Coefficients of the collision where rates are the same everywhere and no force acts. Those of mass and of momentum add
/// up exactly, like the weights below.
#[derive(Clone, Copy)]
struct Plain {
    /// Of the rest population and of the shared rest in it.
    keep_rest: f32,
    rest: f32,
    /// Of sums: themselves, the shared rest (straight, diagonal), j·u (straight, diagonal).
    keep_even: f32,
    even: [f32; 2],
    energy: [f32; 2],
    /// Of differences: themselves, and j (straight, diagonal).
    keep_odd: f32,
    odd: [f32; 2],
}

impl Plain {
    fn new([even, odd]: [f64; 2]) -> Self {
        // Below 1 a multiple of 2^-24 is an `f32`; its half, too, where it is below 1/2.
        let to = |value: f64, bits: i32| (value * f64::powi(2.0, bits)).round() / f64::powi(2.0, bits);
        let (even, odd) = (to(0.5 * even, 24), to(0.5 * odd, 24));
        let (straight, diagonal) = (to(even * 2.0 / 9.0, 25), to(even / 18.0, 25));
        let momentum = to(odd * 2.0 / 3.0, 24);
        Self {
            keep_rest: (1.0 - 2.0 * even) as f32,
            rest: (2.0 * even - 4.0 * straight - 4.0 * diagonal) as f32,
            keep_even: (0.5 - even) as f32,
            even: [straight as f32, diagonal as f32],
            energy: [even as f32, (0.25 * even) as f32],
            keep_odd: (0.5 - odd) as f32,
            odd: [momentum as f32, (0.5 * (odd - momentum)) as f32],
        }
    }
}

/// The collision without rates by cell and without a force, in fewer operations.
#[inline(always)]
unsafe fn plain_block<S: Simd, const STREAM: bool>(part: &Part, at: isize) {
    // SAFETY: the contract of `Stepper::rows`.
    unsafe {
        let (p, with) = (&part.from, &part.plain);
        let (f0, f1, f3) = (load::<S>(p[0], at), load::<S>(p[1], at), load::<S>(p[3], at));
        let (s1, d1) = (S::add(f1, f3), S::sub(f1, f3));
        let (f2, f4) = (load::<S>(p[2], at), load::<S>(p[4], at));
        let (s2, d2) = (S::add(f2, f4), S::sub(f2, f4));
        let (f5, f7) = (load::<S>(p[5], at), load::<S>(p[7], at));
        let (s5, d5) = (S::add(f5, f7), S::sub(f5, f7));
        let (f6, f8) = (load::<S>(p[6], at), load::<S>(p[8], at));
        let (s6, d6) = (S::add(f6, f8), S::sub(f6, f8));
        let excess = S::add(f0, S::add(S::add(s1, s2), S::add(s5, s6)));
        let (jx, jy) = (S::add(d1, S::sub(d5, d6)), S::add(d2, S::add(d5, d6)));
        let one = S::splat(1.0);
        let per_density = S::div(one, S::add(one, excess));
        let (ux, uy) = (S::mul(jx, per_density), S::mul(jy, per_density));
        let rest = S::fma(S::splat(-1.5), S::fma(uy, jy, S::mul(ux, jx)), excess);
        put::<S, STREAM>(part, 0, at, S::fma(S::splat(with.keep_rest), f0, S::mul(S::splat(with.rest), rest)));
        let shared = S::mul(S::splat(with.even[0]), rest);
        let (a, b) = with.relax::<S>(s1, d1, jx, ux, shared, 0);
        put::<S, STREAM>(part, 1, at, S::add(a, b));
        put::<S, STREAM>(part, 3, at, S::sub(a, b));
        let (a, b) = with.relax::<S>(s2, d2, jy, uy, shared, 0);
        put::<S, STREAM>(part, 2, at, S::add(a, b));
        put::<S, STREAM>(part, 4, at, S::sub(a, b));
        let shared = S::mul(S::splat(with.even[1]), rest);
        let (a, b) = with.relax::<S>(s5, d5, S::add(jx, jy), S::add(ux, uy), shared, 1);
        put::<S, STREAM>(part, 5, at, S::add(a, b));
        put::<S, STREAM>(part, 7, at, S::sub(a, b));
        let (a, b) = with.relax::<S>(s6, d6, S::sub(jy, jx), S::sub(uy, ux), shared, 1);
        put::<S, STREAM>(part, 6, at, S::add(a, b));
        put::<S, STREAM>(part, 8, at, S::sub(a, b));
    }
}

impl Plain {
    /// What both of a pair become, and what the first has more and the second less. `kind`: straight or diagonal.
    #[inline(always)]
    unsafe fn relax<S: Simd>(
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

/// Multiples of a direction's weight.
struct Weights {
    two: f32,
    six: f32,
    nine: f32,
}

/// Weights whose sums are exact in `f32`: else each step would lose a little of the mass and of the momentum, always in
/// the same sense. 2^-27 is what all multiples of 1/9 near 1/9 can be written in.
const STRAIGHT: Weights = Weights { two: 2.0 * (14_913_081.0 / (1 << 27) as f32), six: 2.0 / 3.0, nine: 1.0 };
const DIAGONAL: Weights =
    Weights { two: 2.0 * (3_728_270.0 / (1 << 27) as f32), six: (1.0 - STRAIGHT.six) / 2.0, nine: 0.25 };
const REST: f32 = 4.0 * (14_913_081.0 / (1 << 27) as f32);

/// What all pairs of a block share. Functions and not closures: those would not be compiled for the instruction set.
struct Block<S: Simd> {
    /// Half the rates.
    even: S::F,
    odd: S::F,
    /// The excess of density less 3/2 of the energy.
    rest: S::F,
    /// u·F, and what half the rates leave of 1, negative.
    work: S::F,
    left_even: S::F,
    left_odd: S::F,
}

#[inline(always)]
unsafe fn block<S: Simd, const FIELD: bool, const FORCE: bool, const STREAM: bool>(part: &Part, at: isize) {
    // SAFETY: the contract of `Stepper::rows`.
    unsafe {
        let p = &part.from;
        // Pairs of opposites.
        let (f0, f1, f3) = (load::<S>(p[0], at), load::<S>(p[1], at), load::<S>(p[3], at));
        let (f2, f4) = (load::<S>(p[2], at), load::<S>(p[4], at));
        let (f5, f7) = (load::<S>(p[5], at), load::<S>(p[7], at));
        let (f6, f8) = (load::<S>(p[6], at), load::<S>(p[8], at));
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
        let (even, odd) = if FIELD {
            (load::<S>(part.halves[0], at), load::<S>(part.halves[1], at))
        } else {
            (S::splat(part.half[0]), S::splat(part.half[1]))
        };
        let shared = Block::<S> {
            even,
            odd,
            rest: S::fma(S::splat(-1.5), energy, excess),
            work: S::fma(uy, fy, S::mul(ux, fx)),
            left_even: S::sub(even, one),
            left_odd: S::sub(odd, one),
        };
        let mut n0 = S::fma(S::add(even, even), S::sub(S::mul(S::splat(REST), shared.rest), f0), f0);
        if FORCE {
            n0 = S::fma(S::mul(shared.left_even, S::splat(4.0 / 3.0)), shared.work, n0);
        }
        put::<S, STREAM>(part, 0, at, n0);
        let (a, b) = shared.relax::<FORCE>(s1, d1, jx, ux, fx, &STRAIGHT);
        put::<S, STREAM>(part, 1, at, S::sub(f1, S::add(a, b)));
        put::<S, STREAM>(part, 3, at, S::sub(f3, S::sub(a, b)));
        let (a, b) = shared.relax::<FORCE>(s2, d2, jy, uy, fy, &STRAIGHT);
        put::<S, STREAM>(part, 2, at, S::sub(f2, S::add(a, b)));
        put::<S, STREAM>(part, 4, at, S::sub(f4, S::sub(a, b)));
        let (a, b) = shared.relax::<FORCE>(s5, d5, S::add(jx, jy), S::add(ux, uy), S::add(fx, fy), &DIAGONAL);
        put::<S, STREAM>(part, 5, at, S::sub(f5, S::add(a, b)));
        put::<S, STREAM>(part, 7, at, S::sub(f7, S::sub(a, b)));
        let (a, b) = shared.relax::<FORCE>(s6, d6, S::sub(jy, jx), S::sub(uy, ux), S::sub(fy, fx), &DIAGONAL);
        put::<S, STREAM>(part, 6, at, S::sub(f6, S::add(a, b)));
        put::<S, STREAM>(part, 8, at, S::sub(f8, S::sub(a, b)));
    }
}

impl<S: Simd> Block<S> {
    /// What a pair loses: the part that both do, and the part that the first does and the second gains. `j`, `u` and
    /// `force` are along the pair's direction.
    #[inline(always)]
    unsafe fn relax<const FORCE: bool>(
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

#[inline(always)]
unsafe fn load<S: Simd>(plane: *const f32, at: isize) -> S::F {
    // SAFETY: the caller's contract.
    unsafe { S::load(plane.offset(at)) }
}

#[inline(always)]
unsafe fn put<S: Simd, const STREAM: bool>(part: &Part, i: usize, at: isize, v: S::F) {
    // SAFETY: the caller's contract.
    unsafe {
        let to = part.to[i].offset(at);
        if STREAM { S::stream(v, to) } else { S::store(v, to) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let plain = Plain::new(rates);
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
