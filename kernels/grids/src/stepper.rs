//! The interface between a rule and a tile: a rule bound to one tile steps its rows.
use std::ops::Range;

use kernels::cpu::Isa;
use kernels::planes::{Planes, Shared};

use crate::error::GridError;
use crate::frame::Frame;

/// A block of rows to compute: one layer, a range of rows, a range of cells in each.
#[derive(Clone, Debug)]
pub struct Rows {
    /// The layer.
    pub z: isize,
    /// The rows.
    pub y: Range<isize>,
    /// The cells of each row.
    pub x: Range<isize>,
}

/// Sums a field of the state over the given elements of its plane, in units of 2^-40.
pub type SumOf<'a> = &'a mut dyn FnMut(usize, &[usize]) -> Result<i128, GridError>;

/// A rule bound to one tile.
pub trait Stepper: Send + Sync {
    /// Fills the ghost cells of `state` before a pass computes `steps` steps from it.
    fn fill(&self, frame: &Frame, state: &mut Planes, steps: usize);

    /// Computes these rows of the next state; may also compute the rest of the blocks that they touch.
    ///
    /// # Safety
    /// `rows`, grown by the radius, lie within the frame. No other thread reads or writes these rows of `next`.
    unsafe fn rows(&self, isa: Isa, frame: &Frame, state: &Planes, next: Shared<'_>, rows: &Rows);

    /// The same rule row by row, for rules that support fused steps.
    fn row_wise(&self) -> Option<&dyn RowWise> {
        None
    }

    /// The direction in which a field streams, if it moves one cell with every step: of the outermost layer of a halo
    /// only fields that move inwards are needed. `None`: the field is always needed.
    fn streaming_direction(&self, _field: usize) -> Option<[i8; 3]> {
        None
    }

    /// Momentum that the next step transfers to hidden solid cells, in units of 2^-40; `None` if the rule has no
    /// forces.
    ///
    /// # Errors
    /// Those of `sum`.
    fn force(&self, _sum: SumOf<'_>) -> Result<Option<[i128; 3]>, GridError> {
        Ok(None)
    }

    /// Bit mask of the cells hidden from the state among the 64 from `at` on (x a multiple of 64), lowest bit first.
    fn hidden(&self, _at: [usize; 3]) -> u64 {
        0
    }
}

/// Aligns the stack frame of the kernel that calls it, so that spilled vector registers do not cross page boundaries:
/// the compiler aligns a frame only if an aligned object is in it before register allocation. Without it a kernel can
/// be three times slower, depending on where the stack happens to be.
#[inline(always)]
pub fn aligned_frame() {
    #[repr(align(64))]
    struct Aligned(#[expect(dead_code, reason = "only its alignment matters")] [u8; 64]);
    std::hint::black_box(&mut Aligned([0; 64]));
}

/// A row in all planes of a state.
#[derive(Clone, Copy)]
pub struct RowAt {
    /// The cell x = 0 in the first plane.
    pub(crate) start: *mut u8,
    /// Bytes between consecutive planes.
    pub(crate) stride: usize,
}

impl RowAt {
    /// The cell x = 0 in a plane.
    #[inline(always)]
    pub fn plane<T>(&self, plane: usize) -> *mut T {
        self.start.wrapping_add(plane * self.stride).cast()
    }
}

/// The rows at y - 1, y and y + 1.
pub type Near = [RowAt; 3];

/// Cells of one row of a two-dimensional tile.
pub struct Cells {
    /// The cells.
    pub x: Range<isize>,
    /// The row.
    pub y: isize,
}

/// Memory access hints for a row.
#[derive(Clone, Copy)]
pub struct RowAccess {
    /// The row is read from memory: prefetch.
    pub reads_memory: bool,
    /// The row is written to memory: use non-temporal stores if the state exceeds the caches.
    pub writes_memory: bool,
}

/// A two-dimensional rule of radius 1 that computes single rows, stored anywhere. Rows are numbered as in the tile and
/// wrap around along a periodic axis.
///
/// # Safety
/// For both methods: the rows contain the cells and one block of 16 on either side, and no other thread reads or writes
/// the cells that are written.
#[allow(clippy::missing_safety_doc)] // above, for both
pub trait RowWise: Sync {
    /// Writes the ghost cells of a row: outside the faces, and in masks. On a periodic axis that the tile owns whole,
    /// the cells before the first and after the last one are copies of the other end.
    unsafe fn before(&self, frame: &Frame, cells: &Cells, near: &Near);

    /// Computes cells of a row; may also compute the rest of the blocks that they touch.
    unsafe fn row(&self, isa: Isa, frame: &Frame, cells: &Cells, near: &Near, to: RowAt, manner: RowAccess);
}
