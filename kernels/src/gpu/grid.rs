//! A tile of a grid on a device: the same life as [`crate::grid::tile::Tile`], its cells in the device's memory.
//!
//! Two states of the whole tile, each one buffer with all fields, halos around the cells; a step is one launch, which finds
//! what is beyond the tile's ends by arithmetic, so no ghosts are made. Strips and interior are the same kernel over other
//! cells, hence the same bits. Between devices of different makers floats may round differently: their tiles do not mix.
//!
//! Next: `gpu/grid/place.rs`, then `gpu/grid/scalar.rs` for the shortest rule.
use cubecl::prelude::*;

use crate::grid::any_tile::Mark;
use crate::grid::frame::{Format, Frame, Span};
use crate::grid::rule::{Rule, Stepper};
use crate::grid::{Grid, GridError, Link, Region, halo};
use exchange::Exchange;
use memory::{Buffer, address, check, has_halves};
use motion::Motion;
use place::Memory;

mod any_tile;
pub mod bench;
pub mod check;
mod collision;
mod d2q9;
mod d3q19;
mod edges;
mod exchange;
mod flow;
mod hash;
mod life;
mod look;
mod memory;
mod motion;
mod open;
mod place;
mod scalar;
mod state;
mod sums;
#[cfg(test)]
mod tests;
mod text;
mod totals;

pub use open::{cuda_tile, vulkan_tile};

/// A box of a grid on a device and what is known around it.
///
/// Invariants: as those of [`crate::grid::tile::Tile`]; once a call failed with [`GridError::Device`], nothing that the
/// device says of this tile can be trusted, and the tile must be dropped.
pub struct GpuTile<R: Runtime> {
    client: ComputeClient<R>,
    frame: Frame,
    memory: Memory,
    fields: usize,
    stepper: Box<dyn Stepper>,
    motion: Motion,
    state: Buffer,
    next: Buffer,
    exchange: Exchange,
    /// A few words that are read only to learn how far the device is.
    stamp: Buffer,
    /// Bits of the owned cells that the rule hides.
    hidden: Option<Buffer>,
    half: bool,
    fresh: usize,
    step: u64,
}

impl<R: Runtime> GpuTile<R> {
    /// A tile that owns `region`, all cells zero. `depth`: steps that one exchange of halos serves. `free`: bytes of the
    /// device's memory that it may take.
    ///
    /// # Errors
    /// The rule does not fit the grid or the device, the tile not in the grid, the halo not in the tile, or the tile not into
    /// the memory.
    pub fn new(
        client: &ComputeClient<R>,
        grid: &Grid,
        rule: &Rule,
        region: Region,
        depth: usize,
        free: usize,
    ) -> Result<Self, GridError> {
        rule.check(grid)?;
        if rule.format() == Format::Half && !has_halves(client) {
            let what = "this GPU keeps no numbers of 16 bits: use storage = \"f32\" on it".into();
            return Err(GridError::Parameter { rule: rule.name(), what });
        }
        let frame = Frame::new(grid, region, depth, rule.radius(), rule.format())?;
        let memory = Memory::new(&frame);
        let needed = Self::bytes(grid, rule, region, depth)?;
        if needed > free {
            return Err(GridError::DeviceMemory { needed, free });
        }
        if memory.plane > u32::MAX as usize {
            let each = 4 / memory.of_word;
            return Err(GridError::Buffer { bytes: each * memory.plane, most: each * u32::MAX as usize });
        }
        let fields = rule.fields();
        let (motion, stepper) = Motion::new(client, rule, &frame, &memory)?;
        let words = fields * memory.plane / memory.of_word;
        let state = Buffer::new(client, words)?;
        let next = Buffer::new(client, words)?;
        let (exchange, stamp) = (Exchange::none(frame.format), Buffer::from_elements(client, &[0; 4])?);
        let (client, half, fresh, step) = (client.clone(), false, 0, 0);
        let mut tile = Self {
            client,
            frame,
            memory,
            fields,
            stepper,
            motion,
            state,
            next,
            exchange,
            stamp,
            hidden: None,
            half,
            fresh,
            step,
        };
        tile.hidden = tile.hidden_bits()?;
        tile.warm()?;
        tile.await_halo();
        Ok(tile)
    }

    /// Compiles what a run needs: a step of nothing and a look at it, so that its first step takes no longer than any other.
    fn warm(&self) -> Result<(), GridError> {
        self.motion.prepare(&self.client, &self.state, &self.memory);
        self.compute(&self.frame.span(0));
        self.totals()?;
        self.any_not_finite()?;
        self.state_hash()?;
        let Region { start, end } = self.region();
        let row = Region { start, end: [end[0], start[1] + 1, start[2] + 1] };
        self.read_rows(&[0], row, 1, &mut |_, _| {})?;
        self.read_living(row, 1)?;
        [&self.state, &self.next].into_iter().for_each(|state| state.fill(&self.client, 0, 0..state.len));
        check(&self.client)
    }

    /// Bytes of the device's memory that such a tile takes for its cells and masks.
    ///
    /// # Errors
    /// As [`Self::new`], memory excepted.
    pub fn bytes(grid: &Grid, rule: &Rule, region: Region, depth: usize) -> Result<usize, GridError> {
        let frame = Frame::new(grid, region, depth, rule.radius(), rule.format())?;
        Ok(2 * rule.fields() * frame.plane_bytes() + Motion::bytes(rule, &frame))
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
        self.fields
    }

    /// Steps that can be made before halos must be exchanged.
    pub fn left(&self) -> usize {
        self.fresh
    }

    /// Makes so many steps, or rather tells the device to: it is still at work when this returns.
    ///
    /// # Errors
    /// The halo does not last for them, a step is half made, or the device failed.
    pub fn advance(&mut self, steps: usize) -> Result<(), GridError> {
        self.whole()?;
        if steps > self.fresh {
            return Err(GridError::Stale { steps, left: self.fresh });
        }
        for _ in 0..steps {
            let after = if self.lonely() { 0 } else { self.fresh - 1 };
            self.motion.prepare(&self.client, &self.state, &self.memory);
            self.compute(&self.frame.span(after));
            self.finish();
        }
        check(&self.client)
    }

    /// The first part of the last step of a cycle: what neighbours wait for. [`Self::pack`] then packs it, and
    /// [`Self::interior`] must follow, best before that: strips travel from the device while it computes.
    ///
    /// # Errors
    /// It is not the last step, its strips are made already, or the device failed.
    pub fn strips(&mut self) -> Result<(), GridError> {
        self.whole()?;
        if self.fresh != 1 {
            return Err(GridError::Parts { left: self.fresh });
        }
        self.motion.prepare(&self.client, &self.state, &self.memory);
        let (strips, _) = self.frame.cut();
        strips.iter().for_each(|strip| self.compute(strip));
        self.exchange.fetch(&self.client, &self.next, &self.memory);
        self.half = true;
        check(&self.client)
    }

    /// The second part: everything else. Then the step is made.
    ///
    /// # Errors
    /// The first part is not made, or the device failed.
    pub fn interior(&mut self) -> Result<(), GridError> {
        if !self.half {
            return Err(GridError::Parts { left: self.fresh });
        }
        let (_, interior) = self.frame.cut();
        self.compute(&interior);
        self.half = false;
        let packed = std::mem::replace(&mut self.exchange.packed, exchange::Packed::Nothing);
        self.finish();
        // What was fetched is of the state that is now the whole one.
        self.exchange.packed = packed;
        check(&self.client)
    }

    /// Says who the neighbours are. What it knew of neighbours before is void.
    ///
    /// # Errors
    /// They do not cover the halo, each cell of it once, or one is out of its reach, or a step is half made, or the device has
    /// no memory for the lists. Nothing is changed then.
    pub fn link(&mut self, links: &[Link]) -> Result<(), GridError> {
        self.whole()?;
        let travels: Vec<_> = (0..self.fields).map(|field| self.stepper.travels(field)).collect();
        let strips = halo::strips(&self.frame, &travels, links)?;
        self.exchange = Exchange::new(&self.client, &self.frame, &self.memory, strips)?;
        // As in `warm`: what is put into the halo is replaced before it counts.
        self.exchange.fetch(&self.client, &self.state, &self.memory);
        for link in 0..self.exchange.strips.len() {
            let nothing = vec![0; self.exchange.strips[link].bytes_in];
            self.exchange.insert(&self.client, link, &nothing, &self.state, &self.memory);
        }
        self.await_halo();
        check(&self.client)
    }

    /// The neighbours, as [`Self::link`] was told.
    pub fn links(&self) -> impl ExactSizeIterator<Item = &Link> {
        self.exchange.strips.iter().map(|strips| &strips.link)
    }

    /// Bytes of the strip to a neighbour. One of none need not be sent.
    ///
    /// # Errors
    /// There is no such link.
    pub fn bytes_out(&self, link: usize) -> Result<usize, GridError> {
        Ok(self.strips_at(link)?.bytes_out)
    }

    /// Bytes of the strip from a neighbour. One of none is not waited for.
    ///
    /// # Errors
    /// There is no such link.
    pub fn bytes_in(&self, link: usize) -> Result<usize, GridError> {
        Ok(self.strips_at(link)?.bytes_in)
    }

    /// Adds what a neighbour needs for its next cycle to `strip`, fetched from the device for all neighbours at once. While a
    /// step is half made: of the new state.
    ///
    /// # Errors
    /// There is no such link, or the device failed.
    pub fn pack_into(&mut self, link: usize, strip: &mut Vec<u8>) -> Result<(), GridError> {
        self.strips_at(link)?;
        if !self.exchange.is_fetched() {
            let state = if self.half { &self.next } else { &self.state };
            self.exchange.fetch(&self.client, state, &self.memory);
            check(&self.client)?;
        }
        self.exchange.packed(link, strip)
    }

    /// Takes the strip that a neighbour packed after the same step. When the last one is here, the halo is fresh.
    ///
    /// # Errors
    /// There is no such link, the strip has another length than it must have, or a step is half made. Nothing is changed
    /// then.
    pub fn unpack(&mut self, link: usize, strip: &[u8]) -> Result<(), GridError> {
        self.whole()?;
        let expected = self.bytes_in(link)?;
        if strip.len() != expected {
            return Err(GridError::Strip { link, expected, found: strip.len() });
        }
        self.exchange.insert(&self.client, link, strip, &self.state, &self.memory);
        let strips = &mut self.exchange.strips;
        strips[link].arrived = true;
        if strips.iter().all(|strips| strips.arrived || strips.bytes_in == 0) {
            self.fresh = self.frame.depth;
        }
        Ok(())
    }

    /// Waits until the device has done everything it was told.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait(&self) -> Result<(), GridError> {
        check(&self.client)?;
        cubecl::future::block_on(self.client.sync()).map_err(memory::failed)
    }

    /// Marks the end of what the device was told so far.
    pub fn mark(&self) -> Mark {
        // A read is done in its turn, so one that is with the device already tells when that has come.
        let coming = crate::gpu::submitted(self.client.clone(), self.stamp.handle.clone());
        Mark::new(move || cubecl::future::block_on(coming).map(drop).map_err(memory::failed))
    }

    fn strips_at(&self, link: usize) -> Result<&halo::Strips, GridError> {
        let strips = &self.exchange.strips;
        strips.get(link).ok_or(GridError::NoLink { link, links: strips.len() })
    }

    /// How kernels count elements of the state.
    fn address(&self) -> AddressType {
        address(&self.client, self.state.len * self.memory.of_word)
    }

    fn whole(&self) -> Result<(), GridError> {
        if self.half { Err(GridError::Half) } else { Ok(()) }
    }

    fn lonely(&self) -> bool {
        self.frame.halo == [[0; 2]; 3]
    }

    /// Halos have to come before the next step.
    fn await_halo(&mut self) {
        self.exchange.forget();
        self.exchange.strips.iter_mut().for_each(|strips| strips.arrived = false);
        self.fresh = if self.lonely() { usize::MAX } else { 0 };
    }

    fn compute(&self, span: &Span) {
        if !span.is_empty() {
            self.motion.launch(&self.client, &self.memory, span, [&self.state, &self.next]);
        }
    }

    fn finish(&mut self) {
        std::mem::swap(&mut self.state, &mut self.next);
        self.step += 1;
        self.exchange.forget();
        if !self.lonely() {
            self.fresh -= 1;
            self.exchange.strips.iter_mut().for_each(|strips| strips.arrived = false);
        }
    }
}
