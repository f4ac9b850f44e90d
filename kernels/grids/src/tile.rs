//! A tile on the CPU: a box of the grid, its halo, and how it advances.
//!
//! A cycle begins with a halo exchange (`halo.rs`), then up to `depth` steps are computed. Each step computes the
//! owned cells and the part of the halo that later steps read, so the computed region shrinks by the radius per step.
//! Rules that support it compute several steps in one pass over memory (`fused.rs`). The last pass of a cycle can
//! be split: first the boundary strips that neighbours wait for, then, while these are sent, the interior. This only
//! changes which cells are computed when; a cell's arithmetic is always the same.
use std::ops::Range;

use kernels::cpu::Isa;
use kernels::planes::{Planes, Shared};
use kernels::threads::{Ring, Threads};

use crate::error::GridError;
use crate::frame::{Format, Frame, Span};
use crate::fused::{self, Pass};
use crate::grid::Grid;
use crate::halo::HaloStrips;
use crate::number::{Half, Number};
use crate::region::Region;
use crate::rule::Rule;
use crate::stepper::{Rows, Stepper};

/// Maximum steps that a CPU tile computes in one pass over its memory, for any rule.
pub const PASS_STEPS_MAX: usize = fused::STEPS_MAX;

/// A box of the grid and its halo.
///
/// Invariants: `state` holds step `step` of all owned cells and of a halo valid for `fresh` steps. While `half` is not
/// 0, `next` holds the boundary strips of step `step + half`, and `state` is unchanged.
pub struct Tile {
    pub(crate) frame: Frame,
    pub(crate) stepper: Box<dyn Stepper>,
    pub(crate) state: Planes,
    pub(crate) next: Planes,
    /// Steps of the half-computed pass; 0 if there is none.
    pub(crate) half: usize,
    /// Steps for which the halo is valid.
    pub(crate) fresh: usize,
    /// The halo strips to and from each neighbour.
    pub(crate) strips: Vec<HaloStrips>,
    isa: Isa,
    step: u64,
    /// Maximum steps per pass.
    pub(crate) fused: usize,
}

impl Tile {
    /// A tile that owns `region`, all cells zero. `depth`: halo depth in steps.
    ///
    /// # Errors
    /// The rule does not fit the grid, the region is not in the grid, the halo does not fit beside it, or memory is
    /// short.
    pub fn new(grid: &Grid, rule: &Rule, region: Region, depth: usize) -> Result<Self, GridError> {
        Self::with_isa(grid, rule, region, depth, Isa::detect())
    }

    pub(crate) fn with_isa(
        grid: &Grid,
        rule: &Rule,
        region: Region,
        depth: usize,
        isa: Isa,
    ) -> Result<Self, GridError> {
        rule.check(grid)?;
        let frame = Frame::new(grid, region, depth, rule.radius(), rule.format())?;
        let planes = || Planes::new(rule.fields(), frame.plane_bytes());
        let mut tile = Self {
            stepper: rule.stepper(&frame)?,
            state: planes()?,
            next: planes()?,
            half: 0,
            fused: 1,
            fresh: 0,
            strips: Vec::new(),
            isa,
            step: 0,
            frame,
        };
        if tile.stepper.row_wise().is_some() {
            tile.fused = fused::steps(&tile.frame, rule.fields());
        }
        tile.await_halo();
        Ok(tile)
    }

    /// Bytes of cell memory of such a tile.
    ///
    /// # Errors
    /// As [`Self::new`], except for memory.
    pub fn bytes(grid: &Grid, rule: &Rule, region: Region, depth: usize) -> Result<usize, GridError> {
        let frame = Frame::new(grid, region, depth, rule.radius(), rule.format())?;
        Ok(2 * Planes::bytes(rule.fields(), frame.plane_bytes()))
    }

    /// The owned cells.
    pub fn region(&self) -> Region {
        self.frame.owned
    }

    /// The current step: steps computed since [`Self::load`], or as set by [`Self::resume`].
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Values per cell.
    pub fn fields(&self) -> usize {
        self.state.count()
    }

    /// Steps that can be computed before the next halo exchange.
    pub fn left(&self) -> usize {
        self.fresh
    }

    /// Sets all owned cells; `cell` receives global coordinates and writes the fields. Invalidates the halo.
    pub fn load(&mut self, cell: &mut dyn FnMut([usize; 3], &mut [f32])) {
        let fields = self.fields();
        let mut values = vec![0.0; fields];
        for (y, z) in self.frame.span(0).rows() {
            for x in 0..self.frame.size[0] {
                let at = [x, y, z];
                values.fill(0.0);
                cell(self.frame.global(at).expect("owned cells are in the grid"), &mut values);
                for (field, value) in values.iter().enumerate() {
                    put(&self.frame, &mut self.state, field, at, *value);
                }
            }
        }
        (self.step, self.half) = (0, 0);
        self.await_halo();
    }

    /// One field of a region of owned cells, x innermost. Bits read as 0 and 1, cells hidden by the rule as 0.
    ///
    /// # Errors
    /// The tile does not own the region, the rule has no such field, or a step is half computed.
    pub fn read(&self, field: usize, region: Region) -> Result<Vec<f32>, GridError> {
        self.whole()?;
        if field >= self.fields() {
            return Err(GridError::Field { field, fields: self.fields() });
        }
        self.own(region)?;
        let mut values = Vec::with_capacity(region.cells());
        for z in region.start[2]..region.end[2] {
            for y in region.start[1]..region.end[1] {
                for x in region.start[0]..region.end[0] {
                    let hidden = self.stepper.hidden([x / 64 * 64, y, z]) >> (x % 64) & 1 == 1;
                    let value = || get(&self.frame, &self.state, field, self.frame.local([x, y, z]));
                    values.push(if hidden { 0.0 } else { value() });
                }
            }
        }
        Ok(values)
    }

    /// Computes `steps` steps.
    ///
    /// # Errors
    /// The halo is not valid for that many steps, or a step is half computed.
    pub fn advance(&mut self, threads: &mut Threads, steps: usize) -> Result<(), GridError> {
        self.whole()?;
        if steps > self.fresh {
            return Err(GridError::HaloStale { steps, left: self.fresh });
        }
        let mut left = steps;
        while left > 0 {
            let worth = fused::steps_for(self.frame.size[1] as usize, threads.count()).max(1);
            let pass = left.min(self.fused).min(worth);
            self.stepper.fill(&self.frame, &mut self.state, pass);
            let after = if self.has_no_halo() { 0 } else { self.fresh - pass };
            let span = self.frame.span(after);
            self.compute(threads, &span, pass)?;
            self.finish(pass);
            left -= pass;
        }
        Ok(())
    }

    /// Maximum steps of the split pass at the end of a cycle ([`Self::compute_halo_strips`], [`Self::interior`]).
    pub fn tail(&self) -> usize {
        if self.has_no_halo() { 1 } else { self.fused.min(self.frame.depth) }
    }

    /// Computes the boundary strips of the last pass of a cycle (at most [`Self::split_steps_max`] steps), which neighbours wait
    /// for. Then [`Self::pack`] them and call [`Self::interior`].
    ///
    /// # Errors
    /// More steps or none are left, the boundary strips are already computed, or memory is short.
    pub fn strips(&mut self, threads: &mut Threads) -> Result<(), GridError> {
        self.whole()?;
        if self.fresh == 0 || self.fresh > self.tail() {
            return Err(GridError::NotLastPass { left: self.fresh });
        }
        self.stepper.fill(&self.frame, &mut self.state, self.fresh);
        for boundary in self.frame.cut().0 {
            self.compute(threads, &boundary, self.fresh)?;
        }
        self.half = self.fresh;
        Ok(())
    }

    /// Computes the interior of the split pass and completes its steps.
    ///
    /// # Errors
    /// The boundary strips are not computed, or memory is short.
    pub fn interior(&mut self, threads: &mut Threads) -> Result<(), GridError> {
        if self.half == 0 {
            return Err(GridError::NotLastPass { left: self.fresh });
        }
        let interior = self.frame.cut().1;
        self.compute(threads, &interior, self.half)?;
        let steps = std::mem::take(&mut self.half);
        self.finish(steps);
        Ok(())
    }

    /// Sets the step of the cells, after they were loaded or restored.
    pub fn resume(&mut self, step: u64) {
        self.step = step;
    }

    pub(crate) fn own(&self, region: Region) -> Result<(), GridError> {
        let owned = self.frame.owned;
        let empty = region.cells() == 0;
        if empty || !owned.contains(&region) { Err(GridError::Region { region, tile: owned }) } else { Ok(()) }
    }

    pub(crate) fn whole(&self) -> Result<(), GridError> {
        if self.half > 0 { Err(GridError::HalfComputed) } else { Ok(()) }
    }

    /// Invalidates the halo: the next step needs an exchange.
    pub(crate) fn await_halo(&mut self) {
        self.strips.iter_mut().for_each(|strips| strips.arrived = false);
        self.fresh = if self.has_no_halo() { usize::MAX } else { 0 };
    }

    fn has_no_halo(&self) -> bool {
        self.frame.halo == [[0; 2]; 3]
    }

    fn finish(&mut self, steps: usize) {
        std::mem::swap(&mut self.state, &mut self.next);
        self.step += steps as u64;
        if !self.has_no_halo() {
            self.fresh -= steps;
            self.strips.iter_mut().for_each(|strips| strips.arrived = false);
        }
    }

    /// Computes a span of cells `steps` steps ahead, from `state` into `next`.
    fn compute(&mut self, threads: &mut Threads, span: &Span, steps: usize) -> Result<(), GridError> {
        if span.is_empty() {
            return Ok(());
        }
        let (frame, state, stepper, isa) = (&self.frame, &self.state, &*self.stepper, self.isa);
        let planes = state.count();
        let [x, y, z] = span.0.clone();
        let height = y.len();
        if let (Some(rule), 2..) = (stepper.row_wise(), steps) {
            let pass = Pass { isa, frame, rule, planes, steps, state, next: self.next.shared() };
            let columns = fused::columns(&x);
            let grain = fused::grain(height, steps, threads.count());
            let (pool, rings) = threads.with_rings(pass.ring_bytes(&columns))?;
            let rings: Vec<Shared<'_>> = rings.iter_mut().map(Ring::shared).collect();
            pool.run(height * columns.len(), grain, &|worker, range| {
                parts(range, height, &mut |column, rows| {
                    let rows = y.start + rows.start as isize..y.start + rows.end as isize;
                    // SAFETY: the halo is valid for `steps` steps; ranges do not overlap, and each worker has its own
                    // ring.
                    unsafe { pass.block(&columns[column], &rows, rings[worker]) };
                });
            });
            return Ok(());
        }
        let next = self.next.shared();
        let grain = (GRAIN_CELLS * frame.format.cells()).div_ceil(x.len()).clamp(1, height);
        threads.pool().run(height * z.len(), grain, &|_, range| {
            parts(range, height, &mut |layer, rows| {
                let first = y.start + rows.start as isize;
                let rows = Rows { z: z.start + layer as isize, y: first..first + rows.len() as isize, x: x.clone() };
                // SAFETY: spans to compute, grown by the radius, lie within the frame; an item is a row, and each row
                // is in one range only.
                unsafe { stepper.rows(isa, frame, state, next, &rows) };
            });
        });
        Ok(())
    }
}

/// Splits a range of rows, numbered layer by layer with `height` rows each, at layer boundaries.
fn parts(range: Range<usize>, height: usize, part: &mut dyn FnMut(usize, Range<usize>)) {
    let mut unit = range.start;
    while unit < range.end {
        let (layer, row) = (unit / height, unit % height);
        let count = (height - row).min(range.end - unit);
        part(layer, row..row + count);
        unit += count;
    }
}

/// Elements per work item: tens of microseconds of work.
const GRAIN_CELLS: usize = 8192;

/// The value of a cell.
pub(crate) fn get(frame: &Frame, planes: &Planes, field: usize, at: [isize; 3]) -> f32 {
    match frame.format {
        Format::Float => planes.plane::<f32>(field)[frame.at(at)],
        Format::Half => planes.plane::<Half>(field)[frame.at(at)].value(),
        Format::Bit => (planes.plane::<u64>(field)[frame.at(at)] >> at[0].rem_euclid(64) & 1) as f32,
    }
}

fn put(frame: &Frame, planes: &mut Planes, field: usize, at: [isize; 3], value: f32) {
    let index = frame.at(at);
    match frame.format {
        Format::Float => planes.plane_mut::<f32>(field)[index] = value,
        Format::Half => planes.plane_mut::<Half>(field)[index] = Half::of(value),
        Format::Bit => {
            let (word, bit) = (&mut planes.plane_mut::<u64>(field)[index], at[0].rem_euclid(64));
            *word = *word & !(1 << bit) | u64::from(value != 0.0) << bit;
        }
    }
}
