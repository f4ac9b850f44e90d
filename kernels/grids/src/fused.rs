//! Temporal blocking: several steps of a tile in one pass over its memory, for memory-bound rules.
//!
//! Each thread computes a block of the result, some rows of some columns. It sweeps along y with all steps at the same
//! time, each one row behind the previous step. A row of step n reads three rows of step n - 1, so each intermediate
//! step keeps only three rows, in a ring that stays in the core's cache. Around its block a thread also computes cells
//! of the neighbouring blocks, one fewer per side with each step (overlapped tiling), so threads never wait for each
//! other. The arithmetic of a cell is the same as in single steps.
use std::ops::Range;

use kernels::cpu::Isa;
use kernels::planes::{Planes, Shared};

use crate::frame::Frame;
use crate::stepper::{Cells, RowAccess, RowAt, RowWise};

/// Maximum steps per pass: more steps gain little, and more cells are computed twice.
pub(crate) const STEPS_MAX: usize = 8;
/// Maximum number of planes of a state for fused passes.
pub(crate) const PLANES_MAX: usize = 9;
/// Rows of a block per fused step, if the tile is high enough: with s steps, (s - 1) / rows of the work is redundant.
const ROWS: usize = 16;
/// Columns per block: the rows of all steps then fit in the L2 cache.
const COLUMNS: isize = 1024;
/// Smaller states (bytes) stay in a core's cache between steps anyway.
const SMALL: usize = 1 << 20;
/// Cells that are computed together.
pub(crate) const BLOCK: isize = 16;
const LINE: usize = 64;

/// Maximum steps per pass for a state of `planes` planes.
pub(crate) fn steps(frame: &Frame, planes: usize) -> usize {
    let flat = frame.grid.dimensions() == 2 && frame.radius == 1 && planes <= PLANES_MAX;
    let [width, height, _] = frame.size;
    let large = 2 * planes * frame.plane_bytes() > SMALL && width >= 4 * BLOCK && height >= 2 * ROWS as isize;
    if flat && large { STEPS_MAX } else { 1 }
}

/// Number of fused steps that pay off for this many rows and threads.
pub(crate) fn steps_for(height: usize, threads: usize) -> usize {
    height / (ROWS * threads)
}

/// Rows per work item.
pub(crate) fn grain(height: usize, steps: usize, threads: usize) -> usize {
    (ROWS * steps).min(height.div_ceil(threads)).max(1)
}

/// Splits a range of columns into blocks.
pub(crate) fn columns(x: &Range<isize>) -> Vec<Range<isize>> {
    let count = (x.end - x.start + COLUMNS / 2).div_euclid(COLUMNS).max(1);
    let bound = |i: isize| x.start + (x.end - x.start) * i / count;
    let bound = |i: isize| if i == 0 || i == count { bound(i) } else { bound(i).div_euclid(BLOCK) * BLOCK };
    (0..count).map(|i| bound(i)..bound(i + 1)).collect()
}

/// Layout of the rows in a ring.
#[derive(Clone, Copy)]
struct Layout {
    /// Bytes between consecutive rows: an odd number of cache lines, so that rows begin in different cache sets.
    pitch: usize,
    /// Bytes from the start of a row to its cell x = 0.
    first: isize,
}

impl Layout {
    fn new(frame: &Frame, x: &Range<isize>, steps: usize) -> Self {
        let (start, end) = blocks(&(x.start - steps as isize..x.end + steps as isize));
        let bytes = frame.format.bytes();
        // Blocks read one cell further.
        let (start, end) = (start - BLOCK, end + BLOCK);
        let lines = ((end - start) as usize * bytes).div_ceil(LINE);
        Self { pitch: (lines | 1) * LINE, first: -start * bytes as isize }
    }
}

/// The blocks that cells are in: start of the first, end of the last.
pub(crate) fn blocks(x: &Range<isize>) -> (isize, isize) {
    (x.start.div_euclid(BLOCK) * BLOCK, (x.end + BLOCK - 1).div_euclid(BLOCK) * BLOCK)
}

/// One pass from `state`, whose ghost cells are filled, to `next`.
pub(crate) struct Pass<'a> {
    pub(crate) isa: Isa,
    pub(crate) frame: &'a Frame,
    pub(crate) rule: &'a dyn RowWise,
    pub(crate) planes: usize,
    /// At least 2.
    pub(crate) steps: usize,
    pub(crate) state: &'a Planes,
    pub(crate) next: Shared<'a>,
}

impl Pass<'_> {
    /// Bytes of a ring large enough for any of these column ranges.
    pub(crate) fn ring_bytes(&self, x: &[Range<isize>]) -> usize {
        let pitch = x.iter().map(|x| Layout::new(self.frame, x, self.steps).pitch).max().unwrap_or(0);
        (self.steps - 1) * 3 * self.planes * pitch
    }

    /// Computes a block.
    ///
    /// # Safety
    /// The block, grown by one cell per step, is within the valid halo. No other thread reads or writes these cells of
    /// `next` or the ring, and the ring is large enough.
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
                // Rows wrap around at the ends of a periodic axis; outside are ghost rows.
                let own = if self.frame.wraps[1] { y.rem_euclid(self.frame.size[1]) } else { y };
                let up = [-1, 0, 1];
                let near = if step == 1 {
                    up.map(|up| self.memory(self.state.shared_to_read(), own + up))
                } else {
                    up.map(|up| kept(step - 1, y + up))
                };
                let to = if step == last { self.memory(self.next, y) } else { kept(step, y) };
                let manner = RowAccess { reads_memory: step == 1, writes_memory: step == last };
                let cells = Cells { x: x.clone(), y: own };
                // SAFETY: the rows are in the planes or in the ring, with a block to each side; by the caller's
                // contract no other thread accesses them.
                unsafe {
                    if step > 1 {
                        self.rule.before(self.frame, &cells, &near);
                    }
                    self.rule.row(self.isa, self.frame, &cells, &near, to, manner);
                }
            }
        }
    }

    /// The cells, `before` steps before the last one, that a block of the last step needs; clipped at the faces of the
    /// grid.
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
