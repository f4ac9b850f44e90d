//! Several steps of a tile in one pass over its memory, for rules whose arithmetic waits for memory.
//!
//! Each thread takes some rows of the result and walks along y with all steps at once, each a row behind the one before: a
//! row of step n needs three rows of step n - 1, so between the first and the last step only three rows of each are kept,
//! in a ring that stays in the thread's own cache. At the ends of its rows a thread computes cells that its neighbour
//! computes too, one row less with each step; nobody waits for anybody. A cell's arithmetic is the same as in single steps.
use std::ops::Range;

use super::GridError;
use super::frame::{Frame, Span};
use super::planes::{Planes, Shared};
use crate::cpu::Isa;

/// Rings of a thread take at most so much: about what of a second-level cache is left beside the rows that come and go.
const RING: usize = 1 << 20;
/// Most steps of a pass: beyond it there is little left to gain, and more is computed twice.
pub(crate) const STEPS_MAX: usize = 8;
/// Most planes of a state that is passed over like this.
pub(crate) const PLANES_MAX: usize = 9;
/// A thread takes so many rows for each step at least: of s steps, (s - 1) / rows is computed twice.
pub(crate) const ROWS: usize = 16;
const LINE: usize = 64;

/// A row of all planes of a state.
#[derive(Clone, Copy)]
pub(crate) struct RowAt {
    /// Where the cell x = 0 of the first plane is.
    start: *mut u8,
    /// Bytes from a plane to the next.
    stride: usize,
}

impl RowAt {
    /// Where the cell x = 0 of a plane is.
    #[inline(always)]
    pub(crate) fn plane<T>(&self, plane: usize) -> *mut T {
        self.start.wrapping_add(plane * self.stride).cast()
    }
}

/// The rows below, at, and above one.
pub(crate) type Near = [RowAt; 3];

/// How a row is to be read and written.
#[derive(Clone, Copy)]
pub(crate) struct Manner {
    /// From memory: the machine is told what comes.
    pub(crate) reads_memory: bool,
    /// To memory: past the caches where the state is too large for them.
    pub(crate) writes_memory: bool,
}

/// A rule of radius 1 in two dimensions that computes single rows, wherever they are. Rows are numbered as the tile numbers
/// them; across an end of a periodic axis they go on from the other one.
///
/// # Safety
/// Of all methods: the rows are as long as those of the frame, and nobody else reads or writes those that are written.
pub(crate) trait RowWise: Sync {
    /// Writes what is beyond both ends of a row that was computed.
    unsafe fn close(&self, frame: &Frame, row: RowAt);

    /// Writes what the row `y` looks at where no cells are: beyond faces, and in masks.
    unsafe fn before(&self, frame: &Frame, y: isize, near: &Near);

    /// Computes cells of the row `y`, and at most the rest of their blocks.
    unsafe fn row(
        &self,
        isa: Isa,
        frame: &Frame,
        at: (isize, &Range<isize>),
        near: &Near,
        to: RowAt,
        manner: Manner,
    );
}

/// Steps that one pass makes of a state of so many planes.
pub(crate) fn steps(frame: &Frame, planes: usize) -> usize {
    let flat = frame.grid.dimensions() == 2 && frame.radius == 1 && planes <= PLANES_MAX;
    // Of a row there is nothing to keep if all rows fit.
    if !flat || frame.size[1] < 2 * ROWS as isize {
        return 1;
    }
    (1 + RING / (3 * planes * pitch(frame))).min(STEPS_MAX)
}

/// Bytes from a row to the next: lines, an odd number of them, so that rows begin in different sets of a cache.
fn pitch(frame: &Frame) -> usize {
    (frame.strides()[0] as usize * frame.format.bytes()).div_ceil(LINE) / 2 * 2 * LINE + LINE
}

/// What a thread keeps between the steps of a pass.
pub(crate) struct Ring {
    planes: Planes,
}

impl Ring {
    /// For passes of so many steps.
    pub(crate) fn new(frame: &Frame, planes: usize, steps: usize) -> Result<Self, GridError> {
        Ok(Self { planes: Planes::new(1, Self::bytes(frame, planes, steps))? })
    }

    fn bytes(frame: &Frame, planes: usize, steps: usize) -> usize {
        (steps - 1) * 3 * planes * pitch(frame)
    }

    /// Whether it is large enough.
    pub(crate) fn serves(&self, frame: &Frame, planes: usize, steps: usize) -> bool {
        self.planes.plane::<u8>(0).len() >= Self::bytes(frame, planes, steps)
    }

    pub(crate) fn shared(&mut self) -> Shared<'_> {
        self.planes.shared()
    }
}

/// One pass: from `state`, whose ghosts are made, to `next`.
pub(crate) struct Pass<'a> {
    pub(crate) isa: Isa,
    pub(crate) frame: &'a Frame,
    pub(crate) rule: &'a dyn RowWise,
    pub(crate) planes: usize,
    /// At least two.
    pub(crate) steps: usize,
    pub(crate) state: &'a Planes,
    pub(crate) next: Shared<'a>,
}

impl Pass<'_> {
    /// Computes the rows `y` of `span`, which is of the last step.
    ///
    /// # Safety
    /// The span, grown by as many cells as there are steps, is within what the halo serves; it is as long as the grid along x
    /// where that is a periodic axis owned whole. Nobody else reads or writes these rows of `next`, nor the ring.
    pub(crate) unsafe fn rows(&self, span: &Span, y: Range<isize>, ring: Shared<'_>) {
        let (steps, last) = (self.steps as isize, self.steps);
        let boxes: Vec<[Range<isize>; 2]> = (1..=steps).map(|step| self.needed(span, &y, steps - step)).collect();
        let (first, end) = (boxes[0][1].start, y.end + steps - 1);
        for front in first..end {
            for (step, [columns, rows]) in (1..).zip(&boxes) {
                let y = front - (step as isize - 1);
                if !rows.contains(&y) {
                    continue;
                }
                let near = self.near(step - 1, y, ring);
                let own = self.wrapped(y);
                let to = if step == last { self.memory(self.next, y) } else { self.kept(step, y, ring) };
                let manner = Manner { reads_memory: step == 1, writes_memory: step == last };
                // SAFETY: the rows are in the planes or in the ring, whose rows are as long; by the caller's contract nobody
                // else has them.
                unsafe {
                    if step > 1 {
                        self.rule.before(self.frame, own, &near);
                    }
                    self.rule.row(self.isa, self.frame, (own, columns), &near, to, manner);
                    if step < last {
                        self.rule.close(self.frame, to);
                    }
                }
            }
        }
    }

    /// The cells of a step, so many before the last, that the rows `y` of the last one need.
    fn needed(&self, span: &Span, y: &Range<isize>, before: isize) -> [Range<isize>; 2] {
        let grown = |axis: usize, range: &Range<isize>| {
            let (size, [low, high], wraps) =
                (self.frame.size[axis], self.frame.halo[axis], axis == 1 && self.frame.wraps[axis]);
            let (start, end) = (range.start - before, range.end + before);
            let start = if low > 0 || wraps { start } else { start.max(0) };
            start..if high > 0 || wraps { end } else { end.min(size) }
        };
        [grown(0, &span.0[0]), grown(1, y)]
    }

    /// The same row where memory has it.
    fn wrapped(&self, y: isize) -> isize {
        if self.frame.wraps[1] { y.rem_euclid(self.frame.size[1]) } else { y }
    }

    fn near(&self, step: usize, y: isize, ring: Shared<'_>) -> Near {
        // In memory the rows beyond the ends are ghosts.
        let own = self.wrapped(y);
        [-1, 0, 1].map(|up| {
            if step == 0 { self.memory(self.state.shared_to_read(), own + up) } else { self.kept(step, y + up, ring) }
        })
    }

    fn memory(&self, planes: Shared<'_>, y: isize) -> RowAt {
        let at = self.frame.at([0, y, 0]) * self.frame.format.bytes();
        RowAt { start: planes.start::<u8>(0).wrapping_add(at), stride: planes.stride() }
    }

    /// A row of a step's result in the ring.
    fn kept(&self, step: usize, y: isize, ring: Shared<'_>) -> RowAt {
        let row = 3 * self.planes * (step - 1) + y.rem_euclid(3) as usize;
        let first = self.frame.at([0; 3]) % self.frame.strides()[0] as usize * self.frame.format.bytes();
        let pitch = pitch(self.frame);
        RowAt { start: ring.start::<u8>(0).wrapping_add(row * pitch + first), stride: 3 * pitch }
    }
}
