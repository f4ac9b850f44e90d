//! Several steps of a tile in one pass over its memory, for rules whose arithmetic waits for memory.
//!
//! Each thread takes a block of the result, some rows of some columns, and walks along y with all steps at once, each a row
//! behind the one before: a row of step n needs three rows of step n - 1, so between the first and the last step only
//! three rows of each are kept, in a ring that stays in the thread's own cache. Around its block a thread computes cells
//! that its neighbours compute too, one less to each side with each step; nobody waits for anybody. A cell's arithmetic
//! is the same as in single steps.
use std::ops::Range;

use super::GridError;
use super::frame::Frame;
use super::planes::{Planes, Shared};
use crate::cpu::Isa;

/// Most steps of a pass: beyond it there is little left to gain, and more is computed twice.
pub(crate) const STEPS_MAX: usize = 8;
/// Most planes of a state that is passed over like this.
pub(crate) const PLANES_MAX: usize = 9;
/// A thread takes so many rows for each step, where there are enough: of s steps, (s - 1) / rows is computed twice.
const ROWS: usize = 16;
/// Columns of a block: rows of all steps then fit a second-level cache.
const COLUMNS: isize = 1024;
/// States smaller than this stay in a core's cache from one step to the next anyway.
const SMALL: usize = 1 << 20;
/// Cells that are computed together.
pub(crate) const BLOCK: isize = 16;
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

/// Cells of a row of a tile in two dimensions.
pub(crate) struct Cells {
    pub(crate) x: Range<isize>,
    pub(crate) y: isize,
}

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
/// Of both methods: the cells and a block of 16 around them are in the rows, and nobody else reads or writes those that are
/// written.
pub(crate) trait RowWise: Sync {
    /// Writes what cells of a row look at where no cells are: beyond faces, and in masks. Cells before the first and after
    /// the last one of a periodic axis that is owned whole are those at the other end.
    unsafe fn before(&self, frame: &Frame, cells: &Cells, near: &Near);

    /// Computes cells of a row, and at most the rest of their blocks.
    unsafe fn row(&self, isa: Isa, frame: &Frame, cells: &Cells, near: &Near, to: RowAt, manner: Manner);
}

/// Most steps that one pass makes of a state of so many planes.
pub(crate) fn steps(frame: &Frame, planes: usize) -> usize {
    let flat = frame.grid.dimensions() == 2 && frame.radius == 1 && planes <= PLANES_MAX;
    let [width, height, _] = frame.size;
    let large = 2 * planes * frame.plane_bytes() > SMALL && width >= 4 * BLOCK && height >= 2 * ROWS as isize;
    if flat && large { STEPS_MAX } else { 1 }
}

/// So many of them are worth it for so many rows and threads.
pub(crate) fn steps_for(height: usize, threads: usize) -> usize {
    height / (ROWS * threads)
}

/// Rows that a thread takes at a time.
pub(crate) fn grain(height: usize, steps: usize, threads: usize) -> usize {
    (ROWS * steps).min(height.div_ceil(threads)).max(1)
}

/// Blocks of columns next to each other.
pub(crate) fn columns(x: &Range<isize>) -> Vec<Range<isize>> {
    let count = (x.end - x.start + COLUMNS / 2).div_euclid(COLUMNS).max(1);
    let bound = |i: isize| x.start + (x.end - x.start) * i / count;
    let bound = |i: isize| if i == 0 || i == count { bound(i) } else { bound(i).div_euclid(BLOCK) * BLOCK };
    (0..count).map(|i| bound(i)..bound(i + 1)).collect()
}

/// What a thread keeps between the steps of a pass.
pub(crate) struct Ring {
    planes: Planes,
}

impl Ring {
    /// Of so many bytes.
    pub(crate) fn new(bytes: usize) -> Result<Self, GridError> {
        Ok(Self { planes: Planes::new(1, bytes)? })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.planes.plane::<u8>(0).len()
    }

    pub(crate) fn shared(&mut self) -> Shared<'_> {
        self.planes.shared()
    }
}

/// How rows lie in a ring.
#[derive(Clone, Copy)]
struct Layout {
    /// Bytes from a row to the next: lines, an odd number of them, so that rows begin in different sets of a cache.
    pitch: usize,
    /// Bytes from where a row begins to its cell x = 0.
    first: isize,
}

impl Layout {
    fn new(frame: &Frame, x: &Range<isize>, steps: usize) -> Self {
        let (start, end) = blocks(&(x.start - steps as isize..x.end + steps as isize));
        let bytes = frame.format.bytes();
        // Blocks look a cell further.
        let (start, end) = (start - BLOCK, end + BLOCK);
        let lines = ((end - start) as usize * bytes).div_ceil(LINE);
        Self { pitch: (lines | 1) * LINE, first: -start * bytes as isize }
    }
}

/// The blocks that cells are in: where the first one begins and the last one ends.
pub(crate) fn blocks(x: &Range<isize>) -> (isize, isize) {
    (x.start.div_euclid(BLOCK) * BLOCK, (x.end + BLOCK - 1).div_euclid(BLOCK) * BLOCK)
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
    /// Bytes of a ring that serves for such columns.
    pub(crate) fn ring_bytes(&self, x: &[Range<isize>]) -> usize {
        let pitch = x.iter().map(|x| Layout::new(self.frame, x, self.steps).pitch).max().unwrap_or(0);
        (self.steps - 1) * 3 * self.planes * pitch
    }

    /// Computes a block.
    ///
    /// # Safety
    /// The block, grown by as many cells as there are steps, is within what the halo serves. Nobody else reads or writes these
    /// cells of `next`, nor the ring, which is large enough.
    pub(crate) unsafe fn block(&self, x: &Range<isize>, y: &Range<isize>, ring: Shared<'_>) {
        let (steps, last) = (self.steps as isize, self.steps);
        let layout = Layout::new(self.frame, x, last);
        let needed: Vec<[Range<isize>; 2]> = (1..=steps).map(|step| self.needed([x, y], steps - step)).collect();
        let kept = |step: usize, y: isize| {
            let row = 3 * self.planes * (step - 1) + y.rem_euclid(3) as usize;
            let start = ring.start::<u8>(0).wrapping_add(row * layout.pitch).wrapping_offset(layout.first);
            RowAt { start, stride: 3 * layout.pitch }
        };
        for front in needed[0][1].start..y.end + steps - 1 {
            for (step, [x, rows]) in (1..).zip(&needed) {
                let y = front - (step as isize - 1);
                if !rows.contains(&y) {
                    continue;
                }
                // Across the ends of a periodic axis rows go on in memory from the other one; beyond them are ghosts.
                let own = if self.frame.wraps[1] { y.rem_euclid(self.frame.size[1]) } else { y };
                let up = [-1, 0, 1];
                let near = if step == 1 {
                    up.map(|up| self.memory(self.state.shared_to_read(), own + up))
                } else {
                    up.map(|up| kept(step - 1, y + up))
                };
                let to = if step == last { self.memory(self.next, y) } else { kept(step, y) };
                let manner = Manner { reads_memory: step == 1, writes_memory: step == last };
                let cells = Cells { x: x.clone(), y: own };
                // SAFETY: the rows are in the planes or in the ring, with a block to each side; by the caller's contract nobody
                // else has them.
                unsafe {
                    if step > 1 {
                        self.rule.before(self.frame, &cells, &near);
                    }
                    self.rule.row(self.isa, self.frame, &cells, &near, to, manner);
                }
            }
        }
    }

    /// The cells of a step, so many before the last, that a block of the last one needs: not beyond faces.
    fn needed(&self, block: [&Range<isize>; 2], before: isize) -> [Range<isize>; 2] {
        std::array::from_fn(|axis| {
            let goes_on = |side: usize| self.frame.halo[axis][side] > 0 || self.frame.wraps[axis];
            let (start, end) = (block[axis].start - before, block[axis].end + before);
            let start = if goes_on(0) { start } else { start.max(0) };
            start..if goes_on(1) { end } else { end.min(self.frame.size[axis]) }
        })
    }

    fn memory(&self, planes: Shared<'_>, y: isize) -> RowAt {
        let at = self.frame.at([0, y, 0]) * self.frame.format.bytes();
        RowAt { start: planes.start::<u8>(0).wrapping_add(at), stride: planes.stride() }
    }
}
