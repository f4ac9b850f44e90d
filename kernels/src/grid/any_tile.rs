//! A tile wherever it is computed: what the rest of the program sees of tiles, on the processor and on GPUs alike.
use super::frame::Format;
use super::number::{Half, Number};
use super::rule::Stepper;
use super::state::Look;
use super::tile::Tile;
use super::{GridError, Link, Region};
use crate::threads::Threads;

/// Takes y and z, and what was asked for of the row of each field.
pub type TakeRow<'a> = &'a mut dyn FnMut([usize; 2], &[Vec<f32>]);

/// Cells that can be looked at.
pub trait Fields {
    /// The cells that are here.
    fn region(&self) -> Region;

    /// Numbers of a cell.
    fn fields(&self) -> usize;

    /// Calls with y and z and the row of each of these fields, for each row of a region of these cells whose y is a multiple of
    /// `every`, in the order of z and y: of the row the cells whose x is such a multiple. Bits are 0 and 1, cells that the rule
    /// hides are 0.
    ///
    /// # Errors
    /// The region is not here, the rule has no such field, a step is half made, or the device failed.
    fn rows(&self, fields: &[usize], region: Region, every: usize, row: TakeRow<'_>) -> Result<(), GridError>;

    /// How many cells of the first field are not 0 in each of the blocks that a region of these cells touches, as
    /// [`blocks`] counts them, x innermost: only the region's cells count.
    ///
    /// # Errors
    /// As [`Self::rows`].
    fn living(&self, region: Region, stride: usize) -> Result<Vec<f32>, GridError> {
        count(&mut |row| self.rows(&[0], region, 1, row), region, stride)
    }
}

/// [`Fields::living`] by looking at all rows of the region.
pub(crate) fn count(
    rows: &mut dyn FnMut(TakeRow<'_>) -> Result<(), GridError>,
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

/// The blocks that a region touches, in blocks: `stride` cells along x and y each, counted from the grid's corner. Layers
/// are not thinned.
pub fn blocks(region: Region, stride: usize) -> Region {
    let stride = stride.max(1);
    let ([x, y, z], [right, top, up]) = (region.start, region.end);
    Region { start: [x / stride, y / stride, z], end: [right.div_ceil(stride), top.div_ceil(stride), up] }
}

/// A tile on the processor or on a GPU. The methods are those of [`Tile`], and so are their contracts; whatever fails with
/// [`GridError::Device`] has lost its cells. `threads` compute where the processor does.
pub trait GridTile: Fields + Send {
    /// Steps made since the cells were loaded.
    fn steps(&self) -> u64;

    /// Steps that can be made before halos must be exchanged.
    fn left(&self) -> usize;

    /// Whether it computes while the caller goes on: then the interior is begun before strips are packed, so that they travel
    /// meanwhile, and [`Self::wait`] tells when all is done.
    fn is_detached(&self) -> bool {
        false
    }

    /// Waits until everything is done.
    ///
    /// # Errors
    /// The device failed.
    fn wait(&self) -> Result<(), GridError> {
        Ok(())
    }

    /// Marks the end of what it was told so far.
    fn mark(&self) -> Mark {
        Mark::reached()
    }

    /// Sets all owned cells; `cell` is given global coordinates and writes the fields.
    ///
    /// # Errors
    /// The device failed.
    fn load(&mut self, cell: &mut dyn FnMut([usize; 3], &mut [f32])) -> Result<(), GridError>;

    /// Makes so many steps; a GPU may be still at work when this returns.
    ///
    /// # Errors
    /// The halo does not last for them, a step is half made, or the device failed.
    fn advance(&mut self, threads: &mut Threads, steps: usize) -> Result<(), GridError>;

    /// Steps of a cycle's end that [`Self::strips`] and [`Self::interior`] make: one, or as many as one pass makes.
    fn tail(&self) -> usize {
        1
    }

    /// The first part of the last pass of a cycle.
    ///
    /// # Errors
    /// More steps are left than its, its strips are made already, or the device failed.
    fn strips(&mut self, threads: &mut Threads) -> Result<(), GridError>;

    /// The second part.
    ///
    /// # Errors
    /// The first part is not made, or the device failed.
    fn interior(&mut self, threads: &mut Threads) -> Result<(), GridError>;

    /// Says who the neighbours are.
    ///
    /// # Errors
    /// They do not cover the halo, or a step is half made, or the device has no memory for it.
    fn link(&mut self, links: &[Link]) -> Result<(), GridError>;

    /// Bytes of the strip to a neighbour.
    ///
    /// # Errors
    /// There is no such link.
    fn bytes_out(&self, link: usize) -> Result<usize, GridError>;

    /// Bytes of the strip from a neighbour.
    ///
    /// # Errors
    /// There is no such link.
    fn bytes_in(&self, link: usize) -> Result<usize, GridError>;

    /// Adds what a neighbour needs for its next cycle to `strip`.
    ///
    /// # Errors
    /// There is no such link, or the device failed.
    fn pack_into(&mut self, link: usize, strip: &mut Vec<u8>) -> Result<(), GridError>;

    /// Takes the strip that a neighbour packed after the same step.
    ///
    /// # Errors
    /// There is no such link, the strip has another length than it must have, or a step is half made.
    fn unpack(&mut self, link: usize, strip: &[u8]) -> Result<(), GridError>;

    /// The state of a region of owned cells, the same bytes from whatever tile.
    ///
    /// # Errors
    /// The tile does not own the region, a step is half made, or the device failed.
    fn save(&self, region: Region) -> Result<Vec<u8>, GridError>;

    /// Puts a region back as it was saved.
    ///
    /// # Errors
    /// The tile does not own the region, the bytes are of another length, a step is half made, or the device failed.
    fn restore(&mut self, region: Region, bytes: &[u8]) -> Result<(), GridError>;

    /// Says that its cells, loaded or restored, are those after so many steps.
    fn resume(&mut self, step: u64);

    /// This tile's part of the grid's state hash.
    ///
    /// # Errors
    /// A step is half made, or the device failed.
    fn state_hash(&self, threads: &mut Threads) -> Result<u128, GridError>;

    /// The sum of a field over the owned cells, in units of 2^-40.
    ///
    /// # Errors
    /// No such field, a step is half made, or the device failed.
    fn total(&self, field: usize) -> Result<i128, GridError>;

    /// Those of all fields.
    ///
    /// # Errors
    /// A step is half made, or the device failed.
    fn totals(&self) -> Result<Vec<i128>, GridError> {
        (0..self.fields()).map(|field| self.total(field)).collect()
    }

    /// Drag and lift: this tile's part of what the fluid gives its mask in a step, in units of 2^-40.
    ///
    /// # Errors
    /// The rule is no fluid, a step is half made, or the device failed.
    fn force(&self) -> Result<[i128; 3], GridError>;

    /// The first owned cell one of whose fields is infinite or no number, and that field.
    ///
    /// # Errors
    /// A step is half made, or the device failed.
    fn first_not_finite(&self) -> Result<Option<([usize; 3], usize)>, GridError>;

    /// Both, which may be quicker.
    ///
    /// # Errors
    /// A step is half made, or the device failed.
    fn look(&self, threads: &mut Threads) -> Result<Look, GridError> {
        let _ = threads;
        Ok(Look { totals: self.totals()?, not_finite: self.first_not_finite()? })
    }
}

/// A place in what a tile was told, for whoever wants to know when all before it is done. One that is dropped is waited for.
pub struct Mark(Option<Wait>);

type Wait = Box<dyn FnOnce() -> Result<(), GridError> + Send>;

impl Mark {
    /// Everything is done.
    pub fn reached() -> Self {
        Self(None)
    }

    /// All is done when this returns.
    pub(crate) fn new(wait: impl FnOnce() -> Result<(), GridError> + Send + 'static) -> Self {
        Self(Some(Box::new(wait)))
    }

    /// Whether there is nothing to wait for.
    pub fn is_reached(&self) -> bool {
        self.0.is_none()
    }

    /// Returns when it is reached.
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
            // Whoever dropped it does not care how it ended.
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

    fn rows(&self, fields: &[usize], region: Region, every: usize, call: TakeRow<'_>) -> Result<(), GridError> {
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

/// A field of a region's row; cells that the rule hides are 0. The same as [`Tile::read`], by rows rather than by cells.
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

/// Keeps the cells whose x is a multiple of `every`, of those from `start` on.
fn thin(row: &mut Vec<f32>, start: usize, every: usize) {
    if every > 1 {
        let first = start.next_multiple_of(every) - start;
        let kept = row.len().saturating_sub(first).div_ceil(every);
        (0..kept).for_each(|at| row[at] = row[first + at * every]);
        row.truncate(kept);
    }
}

/// Sets the cells of a region's row that the rule hides to 0.
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

    fn left(&self) -> usize {
        self.left()
    }

    fn load(&mut self, cell: &mut dyn FnMut([usize; 3], &mut [f32])) -> Result<(), GridError> {
        self.load(cell);
        Ok(())
    }

    fn advance(&mut self, threads: &mut Threads, steps: usize) -> Result<(), GridError> {
        self.advance(threads, steps)
    }

    fn tail(&self) -> usize {
        self.tail()
    }

    fn strips(&mut self, threads: &mut Threads) -> Result<(), GridError> {
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

    fn look(&self, threads: &mut Threads) -> Result<Look, GridError> {
        self.look(threads)
    }

    fn force(&self) -> Result<[i128; 3], GridError> {
        self.force()
    }

    fn first_not_finite(&self) -> Result<Option<([usize; 3], usize)>, GridError> {
        self.first_not_finite()
    }
}
