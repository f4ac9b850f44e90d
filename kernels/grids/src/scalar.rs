//! Scalar field rules with a von Neumann stencil: heat, wave and Gray-Scott, in two and three dimensions.
//!
//! A rule is a function of [`Around`], written once. The loop over rows, the ghost cells and the dispatch on the number
//! of dimensions are shared. Next: the three rules at the end.
use kernels::cpu::Isa;
use kernels::cpu::simd::{Kernel, Simd};
use kernels::planes::{Planes, Shared};

use crate::error::GridError;
use crate::frame::Frame;
use crate::ghosts;
use crate::grid::{Face, Grid};
use crate::stepper::{Rows, Stepper, aligned_frame};

/// States larger than this many bytes are written with non-temporal stores.
const STREAM: usize = 16 << 20;
/// Software prefetch distance, in cells: the hardware prefetcher stops at page boundaries.
const AHEAD: isize = 256;

/// The heat equation, forward Euler: u + rate · ∇²u.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heat {
    /// Diffusivity in cells² per step; unstable above 1 / (2 · dimensions).
    pub rate: f32,
}

/// The wave equation, leapfrog: 2u - before + speed² · ∇²u. Field 0 is the current step, field 1 the previous one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wave {
    /// Cells per step; unstable above 1 / √dimensions.
    pub speed: f32,
}

/// The Gray-Scott reaction of u (field 0, fed) and v (field 1, killed).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GrayScott {
    /// Diffusivities of u and of v, in cells² per step.
    pub diffusion: [f32; 2],
    /// Feed rate of u; both substances drain at the same rate.
    pub feed: f32,
    /// Additional removal rate of v.
    pub kill: f32,
}

/// The stencil around 16 cells.
struct Around<'a, S: Simd, const THREE: bool> {
    planes: &'a [*const f32; 2],
    at: isize,
    strides: [isize; 2],
    lanes: std::marker::PhantomData<S>,
}

impl<S: Simd, const THREE: bool> Around<'_, S, THREE> {
    #[inline(always)]
    unsafe fn cell(&self, field: usize) -> S::F {
        // SAFETY: the contract of `Stepper::rows`.
        unsafe { S::load(self.planes[field].offset(self.at)) }
    }

    #[inline(always)]
    unsafe fn pair(&self, field: usize, stride: isize) -> S::F {
        // SAFETY: the contract of `Stepper::rows`.
        unsafe {
            let at = self.planes[field].offset(self.at);
            S::add(S::load(at.offset(-stride)), S::load(at.offset(stride)))
        }
    }

    /// The sum of the neighbours minus the cell times their number.
    #[inline(always)]
    unsafe fn laplacian(&self, field: usize) -> S::F {
        // SAFETY: the contract of `Stepper::rows`.
        unsafe {
            let mut sum = S::add(self.pair(field, 1), self.pair(field, self.strides[0]));
            if THREE {
                sum = S::add(sum, self.pair(field, self.strides[1]));
            }
            S::fma(S::splat(if THREE { -6.0 } else { -4.0 }), self.cell(field), sum)
        }
    }
}

/// A rule of one or two fields.
pub(crate) trait Local: Copy + Send + Sync + 'static {
    const NAME: &'static str;
    const FIELDS: usize;
    /// Fields that a step reads only at the cell itself.
    const ALONE: &'static [usize] = &[];

    /// The next fields of 16 cells; entries past `FIELDS` are ignored.
    #[allow(private_interfaces)]
    unsafe fn next<S: Simd, const THREE: bool>(self, around: &Around<'_, S, THREE>) -> [S::F; 2];

    /// An error text if the parameters are invalid.
    fn wrong(&self) -> Option<String>;

    fn check(&self, grid: &Grid) -> Result<(), GridError> {
        if let Some(what) = self.wrong() {
            return Err(GridError::Parameter { rule: Self::NAME, what });
        }
        check_faces(grid, Self::NAME)
    }
}

/// Checks that scalar rules support the boundary conditions.
pub(crate) fn check_faces(grid: &Grid, rule: &'static str) -> Result<(), GridError> {
    for axis in 0..grid.dimensions() {
        for (side, face) in grid.faces(axis).into_iter().enumerate() {
            match face {
                Face::Periodic | Face::Wall => {}
                Face::Fixed(values) if values.iter().all(|value| value.is_finite()) => {}
                Face::Fixed(_) | Face::Moving { .. } | Face::Inlet { .. } | Face::Outlet { .. } => {
                    let expected = "\"periodic\", \"wall\" (no flux) or { fixed = VALUE } (finite)";
                    return Err(grid.bad_face(rule, axis, side, expected));
                }
            }
        }
    }
    Ok(())
}

/// A scalar rule bound to one tile.
pub(crate) struct Scalar<R> {
    rule: R,
    three: bool,
    stream: bool,
}

impl<R: Local> Scalar<R> {
    pub(crate) fn new(rule: R, frame: &Frame) -> Self {
        let stream = 2 * R::FIELDS * frame.plane_bytes() > STREAM;
        Self { rule, three: frame.grid.dimensions() == 3, stream }
    }
}

impl<R: Local> Stepper for Scalar<R> {
    fn fill(&self, frame: &Frame, state: &mut Planes, _steps: usize) {
        for field in (0..R::FIELDS).filter(|field| !R::ALONE.contains(field)) {
            ghosts::fill(frame, state.plane_mut::<f32>(field), field, false);
        }
    }

    unsafe fn rows(&self, isa: Isa, frame: &Frame, state: &Planes, next: Shared<'_>, rows: &Rows) {
        let (start, end) = (rows.x.start.div_euclid(16) * 16, (rows.x.end + 15).div_euclid(16) * 16);
        let at = frame.at([start, rows.y.start, rows.z]);
        let field = |i: usize| i.min(R::FIELDS - 1);
        let part = Part {
            from: std::array::from_fn(|i| state.plane::<f32>(field(i)).as_ptr().wrapping_add(at)),
            to: std::array::from_fn(|i| next.start::<f32>(field(i)).wrapping_add(at)),
            strides: frame.strides(),
            rows: rows.y.len(),
            cells: (end - start) as usize,
        };
        let rule = self.rule;
        // SAFETY: by the caller's contract and the padding of rows, the blocks and one cell around them lie in the
        // planes; the instruction set was detected.
        unsafe {
            match (self.three, self.stream) {
                (false, false) => isa.run(Walk::<R, false, false> { part, rule }),
                (false, true) => isa.run(Walk::<R, false, true> { part, rule }),
                (true, false) => isa.run(Walk::<R, true, false> { part, rule }),
                (true, true) => isa.run(Walk::<R, true, true> { part, rule }),
            }
        }
    }

    fn streaming_direction(&self, field: usize) -> Option<[i8; 3]> {
        // A field read only at the cell itself is needed only where cells are computed, as if it stayed in place.
        R::ALONE.contains(&field).then_some([0; 3])
    }
}

struct Part {
    from: [*const f32; 2],
    to: [*mut f32; 2],
    strides: [isize; 2],
    rows: usize,
    cells: usize,
}

struct Walk<R, const THREE: bool, const STREAM: bool> {
    part: Part,
    rule: R,
}

impl<R: Local, const THREE: bool, const STREAM: bool> Kernel for Walk<R, THREE, STREAM> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { part, rule } = self;
        aligned_frame();
        // SAFETY: the contract of `Stepper::rows` holds here too.
        unsafe {
            for y in 0..part.rows as isize {
                for x in (0..part.cells as isize).step_by(16) {
                    let (at, lanes) = (y * part.strides[0] + x, std::marker::PhantomData);
                    if STREAM {
                        // The row that this walk has not read yet.
                        let new = at + part.strides[usize::from(THREE)] + AHEAD;
                        S::prefetch(part.from[0].wrapping_offset(new).cast());
                        if R::FIELDS == 2 {
                            S::prefetch(part.from[1].wrapping_offset(new).cast());
                        }
                    }
                    let around = Around::<S, THREE> { planes: &part.from, at, strides: part.strides, lanes };
                    let next = rule.next(&around);
                    put::<S, STREAM>(next[0], part.to[0].offset(at));
                    if R::FIELDS == 2 {
                        put::<S, STREAM>(next[1], part.to[1].offset(at));
                    }
                }
            }
            if STREAM {
                S::fence();
            }
        }
    }
}

#[inline(always)]
unsafe fn put<S: Simd, const STREAM: bool>(v: S::F, to: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe { if STREAM { S::stream(v, to) } else { S::store(v, to) } }
}

impl Local for Heat {
    const NAME: &'static str = "heat";
    const FIELDS: usize = 1;

    #[inline(always)]
    #[allow(private_interfaces)]
    unsafe fn next<S: Simd, const THREE: bool>(self, around: &Around<'_, S, THREE>) -> [S::F; 2] {
        // SAFETY: the caller's contract.
        unsafe { [S::fma(S::splat(self.rate), around.laplacian(0), around.cell(0)); 2] }
    }

    fn wrong(&self) -> Option<String> {
        let fits = self.rate >= 0.0 && self.rate.is_finite();
        (!fits).then(|| format!("rate = {}: expected a finite number; it must not be negative", self.rate))
    }
}

impl Local for Wave {
    const NAME: &'static str = "wave";
    const FIELDS: usize = 2;
    const ALONE: &'static [usize] = &[1];

    #[inline(always)]
    #[allow(private_interfaces)]
    unsafe fn next<S: Simd, const THREE: bool>(self, around: &Around<'_, S, THREE>) -> [S::F; 2] {
        // SAFETY: the caller's contract.
        unsafe {
            let now = around.cell(0);
            let onwards = S::sub(S::add(now, now), around.cell(1));
            [S::fma(S::splat(self.speed * self.speed), around.laplacian(0), onwards), now]
        }
    }

    fn wrong(&self) -> Option<String> {
        (!self.speed.is_finite()).then(|| format!("speed = {}: expected a finite number", self.speed))
    }
}

impl Local for GrayScott {
    const NAME: &'static str = "gray-scott";
    const FIELDS: usize = 2;

    #[inline(always)]
    #[allow(private_interfaces)]
    unsafe fn next<S: Simd, const THREE: bool>(self, around: &Around<'_, S, THREE>) -> [S::F; 2] {
        // SAFETY: the caller's contract.
        unsafe {
            let (u, v) = (around.cell(0), around.cell(1));
            let reaction = S::mul(u, S::mul(v, v));
            let fed = S::fma(S::splat(self.feed), S::sub(S::splat(1.0), u), S::sub(S::splat(0.0), reaction));
            let lost = S::fma(S::splat(-(self.feed + self.kill)), v, reaction);
            [
                S::add(u, S::fma(S::splat(self.diffusion[0]), around.laplacian(0), fed)),
                S::add(v, S::fma(S::splat(self.diffusion[1]), around.laplacian(1), lost)),
            ]
        }
    }

    fn wrong(&self) -> Option<String> {
        let all = [self.diffusion[0], self.diffusion[1], self.feed, self.kill];
        let fits = all.iter().all(|part| *part >= 0.0 && part.is_finite());
        (!fits).then(|| {
            let Self { diffusion: [du, dv], feed, kill } = self;
            format!("du = {du}, dv = {dv}, feed = {feed}, kill = {kill}: expected finite numbers, none negative")
        })
    }
}
