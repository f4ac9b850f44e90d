//! The tile interface ([`GridTile`]) that the rest of the program uses, for tiles on the CPU and on GPUs alike.
use kernels::threads::Threads;

use crate::error::GridError;
use crate::frame::Format;
use crate::number::{Half, Number};
use crate::region::{Link, Region};
use crate::state::FieldCheck;
use crate::stepper::Stepper;
use crate::tile::Tile;

/// Receives [y, z] of a row, and the row's values for each requested field.
pub type RowFn<'a> = &'a mut dyn FnMut([usize; 2], &[Vec<f32>]);

/// Read access to cells.
pub trait Fields {
    /// The cells available here.
    fn region(&self) -> Region;

    /// Values per cell.
    fn fields(&self) -> usize;

    /// Calls `row([y, z], values)` for every row of `region` with `y % every == 0`, in z-major order. `values[i]` holds
    /// field `fields[i]`, sampled at `x % every == 0`. Bits read as 0 and 1, cells hidden by the rule as 0.
    ///
    /// # Errors
    /// The region is not available, the rule has no such field, a step is half computed, or the device failed.
    fn rows(&self, fields: &[usize], region: Region, every: usize, row: RowFn<'_>) -> Result<(), GridError>;

    /// Counts the non-zero cells of the first field per block ([`blocks`]) that the region touches, x innermost. Cells
    /// outside the region do not count.
    ///
    /// # Errors
    /// As [`Self::rows`].
    fn living(&self, region: Region, stride: usize) -> Result<Vec<f32>, GridError> {
        count(&mut |row| self.rows(&[0], region, 1, row), region, stride)
    }
}

/// [`Fields::living`] by reading all rows of the region.
///
/// # Errors
/// Those of `rows`.
pub fn count(
    rows: &mut dyn FnMut(RowFn<'_>) -> Result<(), GridError>,
    region: Region,
    stride: usize,
) -> Result<Vec<f32>, GridError> {
    let to = blocks(region, stride);
    let [width, height, _] = to.size();
    let mut counts = vec![0.0; to.cells()];
    rows(&mut |[y, z], rows| {
        let mut block = ((z - to.start[2]) * height + y / stride - to.start[1]) * width;
        let mut left = stride - region.start[0] % stride;
        for alive in rows.iter().flatten() {
            if left == 0 {
                (block, left) = (block + 1, stride);
            }
            counts[block] += if *alive == 0.0 { 0.0 } else { 1.0 };
            left -= 1;
        }
    })?;
    Ok(counts)
}

/// The blocks of `stride` × `stride` cells along x and y that a region touches, in block coordinates from the grid's
/// origin. Not downsampled along z.
pub fn blocks(region: Region, stride: usize) -> Region {
    let stride = stride.max(1);
    let ([x, y, z], [right, top, up]) = (region.start, region.end);
    Region { start: [x / stride, y / stride, z], end: [right.div_ceil(stride), top.div_ceil(stride), up] }
}

/// A tile on the CPU or on a GPU. Methods have the contracts of those of [`Tile`]. After [`GridError::Device`] the
/// tile's cells are lost. CPU tiles compute on `threads`.
pub trait GridTile: Fields + Send {
    /// The current step: steps computed since [`Self::load`], or as set by [`Self::resume`].
    fn steps(&self) -> u64;

    /// Steps that can be computed before the next halo exchange.
    fn steps_left(&self) -> usize;

    /// Whether steps run asynchronously. Then the interior is enqueued before halo strips are packed, so that sending
    /// overlaps with computing, and [`Self::wait`] waits for completion.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Waits until all submitted work is complete.
    ///
    /// # Errors
    /// The device failed.
    fn wait(&self) -> Result<(), GridError> {
        Ok(())
    }

    /// Marks the end of the work submitted so far.
    fn mark(&self) -> Mark {
        Mark::reached()
    }

    /// Sets all owned cells; `cell` receives global coordinates and writes the fields.
    ///
    /// # Errors
    /// The device failed.
    fn load(&mut self, cell: &mut dyn FnMut([usize; 3], &mut [f32])) -> Result<(), GridError>;

    /// Computes `steps` steps; a GPU may still be computing when this returns.
    ///
    /// # Errors
    /// The halo is not valid for that many steps, a step is half computed, or the device failed.
    fn advance(&mut self, threads: &mut Threads, steps: usize) -> Result<(), GridError>;

    /// Maximum steps of the split pass at the end of a cycle ([`Self::compute_halo_strips`], [`Self::interior`]): one, or the fused
    /// steps of one pass.
    fn split_steps_max(&self) -> usize {
        1
    }

    /// Computes the boundary strips of the last pass of a cycle.
    ///
    /// # Errors
    /// More steps are left than [`Self::split_steps_max`] or none, the boundary strips are already computed, or the device failed.
    fn compute_halo_strips(&mut self, threads: &mut Threads) -> Result<(), GridError>;

    /// Computes the interior of that pass.
    ///
    /// # Errors
    /// The boundary strips are not computed, or the device failed.
    fn interior(&mut self, threads: &mut Threads) -> Result<(), GridError>;

    /// Sets the neighbours.
    ///
    /// # Errors
    /// The links do not cover the halo, a step is half computed, or the device has no memory for them.
    fn link(&mut self, links: &[Link]) -> Result<(), GridError>;

    /// Bytes of the halo strip sent to a neighbour.
    ///
    /// # Errors
    /// There is no such link.
    fn bytes_out(&self, link: usize) -> Result<usize, GridError>;

    /// Bytes of the halo strip received from a neighbour.
    ///
    /// # Errors
    /// There is no such link.
    fn bytes_in(&self, link: usize) -> Result<usize, GridError>;

    /// Appends the cells that a neighbour needs for its next cycle to `strip`.
    ///
    /// # Errors
    /// There is no such link, or the device failed.
    fn pack_into(&mut self, link: usize, strip: &mut Vec<u8>) -> Result<(), GridError>;

    /// Stores a halo strip that the neighbour packed after the same step.
    ///
    /// # Errors
    /// There is no such link, the halo strip's length is wrong, or a step is half computed.
    fn unpack(&mut self, link: usize, strip: &[u8]) -> Result<(), GridError>;

    /// Serializes a region of owned cells; the bytes do not depend on the partition or the device.
    ///
    /// # Errors
    /// The tile does not own the region, a step is half computed, or the device failed.
    fn save(&self, region: Region) -> Result<Vec<u8>, GridError>;

    /// Restores a region from the bytes of [`Self::save`].
    ///
    /// # Errors
    /// The tile does not own the region, the length is wrong, a step is half computed, or the device failed.
    fn restore(&mut self, region: Region, bytes: &[u8]) -> Result<(), GridError>;

    /// Sets the step of the cells, after they were loaded or restored.
    fn resume(&mut self, step: u64);

    /// This tile's part of the grid's state hash.
    ///
    /// # Errors
    /// A step is half computed, or the device failed.
    fn state_hash(&self, threads: &mut Threads) -> Result<u128, GridError>;

    /// The sum of a field over the owned cells, in units of 2^-40.
    ///
    /// # Errors
    /// No such field, a step is half computed, or the device failed.
    fn total(&self, field: usize) -> Result<i128, GridError>;

    /// The sums of all fields.
    ///
    /// # Errors
    /// A step is half computed, or the device failed.
    fn totals(&self) -> Result<Vec<i128>, GridError> {
        (0..self.fields()).map(|field| self.total(field)).collect()
    }

    /// Drag and lift: this tile's share of the momentum per step that the fluid transfers to its mask, in units of
    /// 2^-40.
    ///
    /// # Errors
    /// The rule is no fluid, a step is half computed, or the device failed.
    fn force(&self) -> Result<[i128; 3], GridError>;

    /// The first owned cell with a NaN or infinite field, and that field.
    ///
    /// # Errors
    /// A step is half computed, or the device failed.
    fn first_not_finite(&self) -> Result<Option<([usize; 3], usize)>, GridError>;

    /// [`Self::totals`] and [`Self::first_not_finite`] in one call, which may be faster.
    ///
    /// # Errors
    /// A step is half computed, or the device failed.
    fn field_check(&self, threads: &mut Threads) -> Result<FieldCheck, GridError> {
        let _ = threads;
        Ok(FieldCheck { totals: self.totals()?, not_finite: self.first_not_finite()? })
    }
}

/// A completion marker in a tile's queue of submitted work. Dropping one waits for it.
pub struct Mark(Option<Wait>);

type Wait = Box<dyn FnOnce() -> Result<(), GridError> + Send>;

impl Mark {
    /// A marker that is already complete.
    pub fn reached() -> Self {
        Self(None)
    }

    /// A marker that completes when `wait` returns.
    pub fn new(wait: impl FnOnce() -> Result<(), GridError> + Send + 'static) -> Self {
        Self(Some(Box::new(wait)))
    }

    /// Whether [`Self::wait`] returns without waiting.
    pub fn is_reached(&self) -> bool {
        self.0.is_none()
    }

    /// Waits for completion.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait(mut self) -> Result<(), GridError> {
        self.0.take().map_or(Ok(()), |wait| wait())
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Some(wait) = self.0.take() {
            // The result does not matter to a caller that dropped the marker.
            let _ = wait();
        }
    }
}

impl Fields for Tile {
    fn region(&self) -> Region {
        self.region()
    }

    fn fields(&self) -> usize {
        self.fields()
    }

    fn rows(&self, fields: &[usize], region: Region, every: usize, call: RowFn<'_>) -> Result<(), GridError> {
        self.whole()?;
        self.own(region)?;
        if let Some(&field) = fields.iter().find(|field| **field >= self.fields()) {
            return Err(GridError::Field { field, fields: self.fields() });
        }
        let mut rows = vec![Vec::new(); fields.len()];
        for z in region.start[2]..region.end[2] {
            for y in (region.start[1].next_multiple_of(every)..region.end[1]).step_by(every) {
                for (field, row) in fields.iter().zip(&mut rows) {
                    read(self, *field, region, [y, z], row);
                    thin(row, region.start[0], every);
                }
                call([y, z], &rows);
            }
        }
        Ok(())
    }
}

/// Reads one field of a row of `region`, hidden cells as 0. Same values as [`Tile::read`], but by row instead of by
/// cell.
pub(super) fn read(tile: &Tile, field: usize, region: Region, [y, z]: [usize; 2], row: &mut Vec<f32>) {
    let (start, end) = (region.start[0], region.end[0]);
    let at = tile.frame.local([start, y, z]);
    let first = tile.frame.at(at);
    row.clear();
    match tile.frame.format {
        Format::Float => row.extend_from_slice(&tile.state.plane::<f32>(field)[first..first + end - start]),
        Format::Half => {
            let cells = &tile.state.plane::<Half>(field)[first..first + end - start];
            row.extend(cells.iter().map(|cell| cell.value()));
        }
        Format::Bit => {
            let words = &tile.state.plane::<u64>(field)[first..];
            let skipped = at[0].rem_euclid(64) as usize;
            row.extend((skipped..skipped + end - start).map(|bit| (words[bit / 64] >> (bit % 64) & 1) as f32));
        }
    }
    hide(&*tile.stepper, region, [y, z], row);
}

/// Keeps the cells whose x is a multiple of `every`; `row` begins at x = `start`.
fn thin(row: &mut Vec<f32>, start: usize, every: usize) {
    if every > 1 {
        let first = start.next_multiple_of(every) - start;
        let kept = row.len().saturating_sub(first).div_ceil(every);
        (0..kept).for_each(|at| row[at] = row[first + at * every]);
        row.truncate(kept);
    }
}

/// Sets the hidden cells of a region's row to 0.
fn hide(stepper: &dyn Stepper, region: Region, [y, z]: [usize; 2], row: &mut [f32]) {
    let (start, end) = (region.start[0], region.end[0]);
    for word in start / 64..end.div_ceil(64) {
        let hidden = stepper.hidden([64 * word, y, z]);
        if hidden != 0 {
            let cells = (64 * word).max(start)..(64 * word + 64).min(end);
            cells.filter(|x| hidden >> (x % 64) & 1 == 1).for_each(|x| row[x - start] = 0.0);
        }
    }
}

impl GridTile for Tile {
    fn steps(&self) -> u64 {
        self.steps()
    }

    fn steps_left(&self) -> usize {
        self.left()
    }

    fn load(&mut self, cell: &mut dyn FnMut([usize; 3], &mut [f32])) -> Result<(), GridError> {
        self.load(cell);
        Ok(())
    }

    fn advance(&mut self, threads: &mut Threads, steps: usize) -> Result<(), GridError> {
        self.advance(threads, steps)
    }

    fn split_steps_max(&self) -> usize {
        self.tail()
    }

    fn compute_halo_strips(&mut self, threads: &mut Threads) -> Result<(), GridError> {
        self.strips(threads)
    }

    fn interior(&mut self, threads: &mut Threads) -> Result<(), GridError> {
        self.interior(threads)
    }

    fn link(&mut self, links: &[Link]) -> Result<(), GridError> {
        self.link(links)
    }

    fn bytes_out(&self, link: usize) -> Result<usize, GridError> {
        self.bytes_out(link)
    }

    fn bytes_in(&self, link: usize) -> Result<usize, GridError> {
        self.bytes_in(link)
    }

    fn pack_into(&mut self, link: usize, strip: &mut Vec<u8>) -> Result<(), GridError> {
        Tile::pack_into(self, link, strip)
    }

    fn unpack(&mut self, link: usize, strip: &[u8]) -> Result<(), GridError> {
        self.unpack(link, strip)
    }

    fn save(&self, region: Region) -> Result<Vec<u8>, GridError> {
        self.save(region)
    }

    fn restore(&mut self, region: Region, bytes: &[u8]) -> Result<(), GridError> {
        self.restore(region, bytes)
    }

    fn resume(&mut self, step: u64) {
        self.resume(step);
    }

    fn state_hash(&self, threads: &mut Threads) -> Result<u128, GridError> {
        self.state_hash(threads)
    }

    fn total(&self, field: usize) -> Result<i128, GridError> {
        self.total(field)
    }

    fn field_check(&self, threads: &mut Threads) -> Result<FieldCheck, GridError> {
        self.look(threads)
    }

    fn force(&self) -> Result<[i128; 3], GridError> {
        self.force()
    }

    fn first_not_finite(&self) -> Result<Option<([usize; 3], usize)>, GridError> {
        self.first_not_finite()
    }
}
