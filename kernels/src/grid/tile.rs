//! A box of the grid on one machine: its cells, a halo around them, and how they advance.
//!
//! A cycle: the halos are exchanged (`grid/halo.rs`), then up to `depth` steps are computed. Each computes the owned
//! cells and as much of the halo as the steps after it will look at, so the computed part shrinks by the radius each
//! time. Where a rule can, several steps are made in one pass over the memory (`grid/fused.rs`). The last pass of a cycle
//! can be made in two parts, strips that neighbours wait for first: while they travel, the interior is computed. All this
//! only chooses which cells are computed when: a cell's arithmetic is the same everywhere.
use std::ops::Range;

use super::frame::{Format, Frame, Span};
use super::fused::{self, Pass, Ring};
use super::halo::Strips;
use super::number::{Half, Number};
use super::planes::{Planes, Shared};
use super::rule::{Rows, Rule, Stepper};
use super::{Grid, GridError, Region};
use crate::cpu::Isa;
use crate::threads::Threads;

/// Most steps that a processor makes in one pass over a tile's memory, whatever the rule.
pub const PASS_STEPS_MAX: usize = fused::STEPS_MAX;

/// A box of a grid and what is known around it.
///
/// Invariants: `state` holds step `step` of all owned cells and of `fresh` steps' worth of halo. While `half` is not 0 the
/// strips of the state so many steps on are in `next`, and `state` is still whole.
pub struct Tile {
    pub(crate) frame: Frame,
    pub(crate) stepper: Box<dyn Stepper>,
    pub(crate) state: Planes,
    pub(crate) next: Planes,
    /// Steps of a pass that is half made.
    pub(crate) half: usize,
    /// Steps that the halo still serves.
    pub(crate) fresh: usize,
    /// What travels to and from each neighbour.
    pub(crate) strips: Vec<Strips>,
    isa: Isa,
    step: u64,
    /// Most steps of a pass.
    pub(crate) fused: usize,
}

impl Tile {
    /// A tile that owns `region`, all cells zero. `depth`: steps that one exchange of halos serves.
    ///
    /// # Errors
    /// The rule does not fit the grid, the tile not in it, the halo not in the tile, or nothing into memory.
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

    /// Bytes that such a tile takes for its cells.
    ///
    /// # Errors
    /// As [`Self::new`], memory excepted.
    pub fn bytes(grid: &Grid, rule: &Rule, region: Region, depth: usize) -> Result<usize, GridError> {
        let frame = Frame::new(grid, region, depth, rule.radius(), rule.format())?;
        Ok(2 * Planes::bytes(rule.fields(), frame.plane_bytes()))
    }

    /// The cells it owns.
    pub fn region(&self) -> Region {
        self.frame.owned
    }

    /// Steps made since the cells were loaded.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Numbers of a cell.
    pub fn fields(&self) -> usize {
        self.state.count()
    }

    /// Steps that can be made before halos must be exchanged.
    pub fn left(&self) -> usize {
        self.fresh
    }

    /// Sets all owned cells; `cell` is given global coordinates and writes the fields. What it knew of its neighbours is
    /// void.
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

    /// One field of a region of owned cells, x innermost; bits are 0 and 1, cells that the rule hides are 0.
    ///
    /// # Errors
    /// The tile does not own the region, the rule has no such field, or a step is half made.
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

    /// Makes so many steps.
    ///
    /// # Errors
    /// The halo does not last for them, or a step is half made.
    pub fn advance(&mut self, threads: &mut Threads, steps: usize) -> Result<(), GridError> {
        self.whole()?;
        if steps > self.fresh {
            return Err(GridError::Stale { steps, left: self.fresh });
        }
        let mut left = steps;
        while left > 0 {
            let worth = fused::steps_for(self.frame.size[1] as usize, threads.count()).max(1);
            let pass = left.min(self.fused).min(worth);
            self.stepper.fill(&self.frame, &mut self.state, pass);
            let after = if self.lonely() { 0 } else { self.fresh - pass };
            let span = self.frame.span(after);
            self.compute(threads, &span, pass)?;
            self.finish(pass);
            left -= pass;
        }
        Ok(())
    }

    /// Steps of a cycle's end that [`Self::strips`] and [`Self::interior`] can make: as many as one pass makes.
    pub fn tail(&self) -> usize {
        if self.lonely() { 1 } else { self.fused.min(self.frame.depth) }
    }

    /// The first part of the last pass of a cycle, [`Self::tail`] steps or fewer: what neighbours wait for. [`Self::pack`]
    /// then packs it, and [`Self::interior`] must follow.
    ///
    /// # Errors
    /// More steps are left, or its strips are made already, or there is no memory.
    pub fn strips(&mut self, threads: &mut Threads) -> Result<(), GridError> {
        self.whole()?;
        if self.fresh == 0 || self.fresh > self.tail() {
            return Err(GridError::Parts { left: self.fresh });
        }
        self.stepper.fill(&self.frame, &mut self.state, self.fresh);
        for strip in self.frame.cut().0 {
            self.compute(threads, &strip, self.fresh)?;
        }
        self.half = self.fresh;
        Ok(())
    }

    /// The second part: everything else. Then the steps are made.
    ///
    /// # Errors
    /// The first part is not made, or there is no memory.
    pub fn interior(&mut self, threads: &mut Threads) -> Result<(), GridError> {
        if self.half == 0 {
            return Err(GridError::Parts { left: self.fresh });
        }
        let interior = self.frame.cut().1;
        self.compute(threads, &interior, self.half)?;
        let steps = std::mem::take(&mut self.half);
        self.finish(steps);
        Ok(())
    }

    /// Says that its cells, loaded or restored, are those after so many steps.
    pub fn resume(&mut self, step: u64) {
        self.step = step;
    }

    pub(crate) fn own(&self, region: Region) -> Result<(), GridError> {
        let owned = self.frame.owned;
        let empty = region.cells() == 0;
        if empty || !owned.contains(&region) { Err(GridError::Region { region, tile: owned }) } else { Ok(()) }
    }

    pub(crate) fn whole(&self) -> Result<(), GridError> {
        if self.half > 0 { Err(GridError::Half) } else { Ok(()) }
    }

    /// Halos have to come before the next step.
    pub(crate) fn await_halo(&mut self) {
        self.strips.iter_mut().for_each(|strips| strips.arrived = false);
        self.fresh = if self.lonely() { usize::MAX } else { 0 };
    }

    fn lonely(&self) -> bool {
        self.frame.halo == [[0; 2]; 3]
    }

    fn finish(&mut self, steps: usize) {
        std::mem::swap(&mut self.state, &mut self.next);
        self.step += steps as u64;
        if !self.lonely() {
            self.fresh -= steps;
            self.strips.iter_mut().for_each(|strips| strips.arrived = false);
        }
    }

    /// Computes cells of the state so many steps on.
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
                    // SAFETY: so many steps are left of the halo; a row of a column is in one range only, and a ring with one
                    // worker.
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
                // SAFETY: spans to compute and a radius around them are within the frame; a unit is a row, and each is in
                // one range only.
                unsafe { stepper.rows(isa, frame, state, next, &rows) };
            });
        });
        Ok(())
    }
}

/// A range of rows of layers of so many each: layer by layer.
fn parts(range: Range<usize>, height: usize, part: &mut dyn FnMut(usize, Range<usize>)) {
    let mut unit = range.start;
    while unit < range.end {
        let (layer, row) = (unit / height, unit % height);
        let count = (height - row).min(range.end - unit);
        part(layer, row..row + count);
        unit += count;
    }
}

/// Threads share rows by so many elements: tens of microseconds of work.
const GRAIN_CELLS: usize = 8192;

/// A cell's value.
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
