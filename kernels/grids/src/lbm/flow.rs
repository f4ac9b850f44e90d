//! A lattice Boltzmann fluid bound to one tile: everything around the collision that the lattices share.
use std::marker::PhantomData;

use kernels::cpu::Isa;
use kernels::cpu::simd::{Kernel, Simd};
use kernels::planes::{Planes, Shared};

use super::collision::{POPULATIONS_MAX, Part, Plain};
use super::edges::Edges;
use super::{Directions, LatticeFluid};
use crate::error::GridError;
use crate::frame::Frame;
use crate::fused::{self, STEPS_MAX};
use crate::number::Number;
use crate::stepper::{Cells, Near, RowAccess, RowAt, RowWise, Rows, Stepper, SumOf, aligned_frame};

/// States larger than this many bytes use non-temporal stores: they would be evicted before the next step reads them.
const STREAM: usize = 16 << 20;
/// Software prefetch distance, in cells.
const AHEAD: isize = 128;

/// A lattice: its directions, and its update of a block of 16 cells. Functions, not closures: closures would not be
/// compiled for the instruction set.
///
/// # Safety of all functions
/// The machine has the instruction set of `S`; the pointers of `part` are valid for the block at `at`.
#[allow(clippy::missing_safety_doc)] // above, for all of them
pub trait Lattice: 'static {
    /// The directions.
    const DIRECTIONS: &'static Directions;

    /// The update for uniform rates and no force, with fewer operations.
    unsafe fn plain_block<S: Simd, N: Number, const STREAM: bool>(part: &Part<N>, at: isize);

    /// `FIELD`: rates per cell. `FORCE`: with a body force. `STREAM`: non-temporal stores.
    unsafe fn block<S: Simd, N: Number, const FIELD: bool, const FORCE: bool, const STREAM: bool>(
        part: &Part<N>,
        at: isize,
    );
}

/// A fluid on one tile, populations stored as `N`.
pub struct Flow<const D: usize, N> {
    /// Boundary conditions.
    pub edges: Edges,
    /// Half the relaxation rates, even and odd.
    pub half: [f32; 2],
    /// Coefficients for uniform rates and no force.
    pub plain: Plain,
    /// Half the relaxation rates per cell.
    pub halves: Option<Planes>,
    /// Body force per cell.
    pub force: [f32; 3],
    frame: Frame,
    stream: bool,
    storage: PhantomData<N>,
}

impl<const D: usize, N: Number> Flow<D, N>
where
    LatticeFluid<D>: Lattice,
{
    /// Binds a fluid to the tile of this geometry.
    ///
    /// # Errors
    /// No memory for the relaxation rates per cell.
    pub fn new(fluid: &LatticeFluid<D>, frame: &Frame) -> Result<Self, GridError> {
        let directions = LatticeFluid::<D>::DIRECTIONS;
        let mut force = [0.0; 3];
        force[..D].copy_from_slice(&fluid.force);
        Ok(Self {
            edges: Edges::new(directions, fluid.solid.as_ref(), fluid.force_cells.as_ref(), force, frame),
            half: fluid.rates(fluid.tau).map(|rate| (0.5 * rate) as f32),
            plain: Plain::new(D, fluid.rates(fluid.tau)),
            halves: halves(fluid, frame)?,
            force,
            stream: 2 * directions.c.len() * frame.plane_bytes() > STREAM,
            frame: frame.clone(),
            storage: PhantomData,
        })
    }

    /// `stream`: non-temporal stores.
    unsafe fn run(&self, isa: Isa, part: &Part<N>, stream: bool) {
        // SAFETY: the caller's contract.
        unsafe {
            match (self.halves.is_some(), self.force != [0.0; 3]) {
                (false, false) => Self::run_as::<false, false>(isa, part, stream),
                (false, true) => Self::run_as::<false, true>(isa, part, stream),
                (true, false) => Self::run_as::<true, false>(isa, part, stream),
                (true, true) => Self::run_as::<true, true>(isa, part, stream),
            }
        }
    }

    unsafe fn run_as<const FIELD: bool, const FORCE: bool>(isa: Isa, part: &Part<N>, stream: bool) {
        // SAFETY: the caller's contract.
        unsafe {
            if stream {
                isa.run(Collide::<D, N, FIELD, FORCE, true>(part));
            } else {
                isa.run(Collide::<D, N, FIELD, FORCE, false>(part));
            }
        }
    }

    /// Half the relaxation rates per cell from an element on; null if uniform.
    fn halves_at(&self, at: usize) -> [*const f32; 2] {
        match &self.halves {
            Some(halves) => std::array::from_fn(|i| halves.plane::<f32>(i).as_ptr().wrapping_add(at)),
            None => [std::ptr::null(); 2],
        }
    }
}

/// Half the relaxation rates per cell; `None` if uniform.
fn halves<const D: usize>(fluid: &LatticeFluid<D>, frame: &Frame) -> Result<Option<Planes>, GridError> {
    let Some(omega) = &fluid.omega else { return Ok(None) };
    let mut planes = Planes::new(2, 4 * frame.elements())?;
    let whole = frame.whole();
    // Fused steps read farther across the ends of a periodic axis.
    let beyond = if frame.wraps[0] { STEPS_MAX as isize - 1 } else { 0 };
    for (y, z) in whole.rows() {
        for x in whole.0[0].start - beyond..whole.0[0].end + beyond {
            let Some(global) = frame.global([x, y, z]) else { continue };
            let omega = f64::from(omega(global));
            if !(omega > 0.0 && omega < 2.0) {
                let what = format!("omega = {omega} at {global:?}: expected a value above 0 and below 2");
                return Err(GridError::Parameter { rule: LatticeFluid::<D>::NAME, what });
            }
            let [even, odd] = fluid.rates(1.0 / omega);
            planes.plane_mut::<f32>(0)[frame.at([x, y, z])] = (0.5 * even) as f32;
            planes.plane_mut::<f32>(1)[frame.at([x, y, z])] = (0.5 * odd) as f32;
        }
    }
    Ok(Some(planes))
}

impl<const D: usize, N: Number> Stepper for Flow<D, N>
where
    LatticeFluid<D>: Lattice,
{
    fn fill(&self, frame: &Frame, state: &mut Planes, steps: usize) {
        self.edges.fill::<N>(frame, state, steps);
    }

    unsafe fn rows(&self, isa: Isa, frame: &Frame, state: &Planes, next: Shared<'_>, rows: &Rows) {
        // Whole blocks of 16, counted from the first owned cell.
        let (start, end) = fused::blocks(&rows.x);
        let at = frame.at([start, rows.y.start, rows.z]);
        let [row, layer] = frame.strides();
        let (mut from, mut to) = ([std::ptr::null(); POPULATIONS_MAX], [std::ptr::null_mut(); POPULATIONS_MAX]);
        for (i, [x, y, z]) in LatticeFluid::<D>::DIRECTIONS.c.iter().map(|c| c.map(isize::from)).enumerate() {
            from[i] = state.plane::<N>(i).as_ptr().wrapping_add(at).wrapping_offset(-(x + y * row + z * layer));
            to[i] = next.start::<N>(i).wrapping_add(at);
        }
        let part = Part {
            from,
            to,
            halves: self.halves_at(at),
            half: self.half,
            plain: self.plain,
            force: self.force,
            row,
            rows: rows.y.len(),
            cells: (end - start) as usize,
            ahead: self.stream,
        };
        // SAFETY: by the caller's contract and the padding of rows, the blocks and one cell around them lie in the
        // planes; the instruction set was detected.
        unsafe { self.run(isa, &part, self.stream) }
    }

    fn row_wise(&self) -> Option<&dyn RowWise> {
        (D == 2).then_some(self)
    }

    fn streaming_direction(&self, field: usize) -> Option<[i8; 3]> {
        Some(LatticeFluid::<D>::DIRECTIONS.c[field])
    }

    fn force(&self, sum: SumOf<'_>) -> Result<Option<[i128; 3]>, GridError> {
        self.edges.force(sum).map(Some)
    }

    fn hidden(&self, at: [usize; 3]) -> u64 {
        self.edges.solid(&self.frame, self.frame.local(at))
    }
}

impl<const D: usize, N: Number> RowWise for Flow<D, N>
where
    LatticeFluid<D>: Lattice,
{
    unsafe fn before(&self, frame: &Frame, cells: &Cells, near: &Near) {
        // SAFETY: the caller's contract.
        unsafe { self.edges.before::<N>(frame, cells, near) }
    }

    unsafe fn row(&self, isa: Isa, frame: &Frame, Cells { x, y }: &Cells, near: &Near, to: RowAt, manner: RowAccess) {
        let (start, end) = fused::blocks(x);
        let (mut from, mut into) = ([std::ptr::null(); POPULATIONS_MAX], [std::ptr::null_mut(); POPULATIONS_MAX]);
        for (i, c) in LatticeFluid::<D>::DIRECTIONS.c.iter().enumerate() {
            let row = near[(1 - c[1]) as usize].plane::<N>(i);
            from[i] = row.wrapping_offset(start - isize::from(c[0])).cast_const();
            into[i] = to.plane::<N>(i).wrapping_offset(start);
        }
        let part = Part {
            from,
            to: into,
            halves: self.halves_at(frame.at([start, *y, 0])),
            half: self.half,
            plain: self.plain,
            force: self.force,
            row: 0,
            rows: 1,
            cells: (end - start) as usize,
            ahead: self.stream && manner.reads_memory,
        };
        // SAFETY: by the caller's contract and the padding of rows, the blocks and one cell around them lie in the
        // rows; the instruction set was detected.
        unsafe { self.run(isa, &part, self.stream && manner.writes_memory) }
    }
}

/// Takes its `Part` by reference and copies it once: a few more copies would cost as much as a row.
struct Collide<'a, const D: usize, N, const FIELD: bool, const FORCE: bool, const STREAM: bool>(&'a Part<N>);

impl<const D: usize, N: Number, const FIELD: bool, const FORCE: bool, const STREAM: bool> Kernel
    for Collide<'_, D, N, FIELD, FORCE, STREAM>
where
    LatticeFluid<D>: Lattice,
{
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let part = *self.0; // a local copy, which stores cannot alias
        aligned_frame();
        // SAFETY: the contract of `Stepper::rows` holds here too.
        unsafe {
            for y in 0..part.rows as isize {
                for x in (0..part.cells as isize).step_by(16) {
                    let at = y * part.row + x;
                    if part.ahead {
                        // Rows are pages apart, and the hardware prefetcher stops at page boundaries.
                        for plane in &part.from[..LatticeFluid::<D>::DIRECTIONS.c.len()] {
                            S::prefetch(plane.wrapping_offset(at + AHEAD).cast());
                        }
                    }
                    if FIELD || FORCE {
                        LatticeFluid::<D>::block::<S, N, FIELD, FORCE, STREAM>(&part, at);
                    } else {
                        LatticeFluid::<D>::plain_block::<S, N, STREAM>(&part, at);
                    }
                }
            }
            if STREAM {
                S::fence();
            }
        }
    }
}
