//! Grid kernels for GPUs, in CubeCL: one source for CUDA and Vulkan. A tile in GPU memory has the same life cycle as
//! [`kernels_grids::tile::Tile`]. Model kernels for GPUs are in the crate `kernels-gpu`.
//!
//! The tile is double-buffered: two states, each one buffer with all fields and halos around the cells. A step is one kernel
//! launch. It evaluates boundary conditions by index arithmetic, so no ghost cells are stored. Halo strips and interior run the
//! same kernel on different cells, so their bits are the same. GPUs of different vendors may round floats differently: do not
//! mix their tiles in one grid.
//!
//! Next: `place.rs`, then `scalar.rs` for the shortest rule.
use cubecl::prelude::*;
use kernels_grids::any_tile::Mark;
use kernels_grids::frame::{Format, Frame, Span};
use kernels_grids::rule::Rule;
use kernels_grids::stepper::Stepper;
use kernels_grids::{Grid, GridError, Link, Region, halo};

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
mod transfer;

pub use open::{cuda_tile, vulkan_tile};
pub use transfer::{PendingRead, copy, submit_read};

/// A region of a grid on a GPU, with its halo.
///
/// Invariants: as those of [`kernels_grids::tile::Tile`]. After a call failed with [`GridError::Device`], the contents of the
/// tile are undefined and it must be dropped.
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
    /// A few words that are read back only to observe the progress of the device.
    stamp: Buffer,
    /// Bitmask of the owned cells that the rule hides (they read as 0).
    hidden: Option<Buffer>,
    half: bool,
    fresh: usize,
    step: u64,
}

impl<R: Runtime> GpuTile<R> {
    /// Creates a tile that owns `region`, all cells zero. `depth`: halo depth in steps per exchange. `free`: bytes of device
    /// memory that the tile may use.
    ///
    /// # Errors
    /// The rule does not fit the grid or the device, the region is not in the grid, the halo is deeper than the tile, or the
    /// tile exceeds `free`.
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
            let what = "this GPU does not support 16-bit storage: set storage = \"f32\"".into();
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

    /// Warms up: compiles all kernels that a run needs, so that its first step takes no longer than any other.
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

    /// Bytes of device memory for the cells and masks of such a tile.
    ///
    /// # Errors
    /// As [`Self::new`], except for memory.
    pub fn bytes(grid: &Grid, rule: &Rule, region: Region, depth: usize) -> Result<usize, GridError> {
        let frame = Frame::new(grid, region, depth, rule.radius(), rule.format())?;
        Ok(2 * rule.fields() * frame.plane_bytes() + Motion::bytes(rule, &frame))
    }

    /// The owned cells.
    pub fn region(&self) -> Region {
        self.frame.owned
    }

    /// Steps completed since the cells were loaded.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Fields per cell.
    pub fn fields(&self) -> usize {
        self.fields
    }

    /// Steps that can be computed before the next halo exchange.
    pub fn left(&self) -> usize {
        self.fresh
    }

    /// Queues `steps` steps on the device; they may still be running when this returns.
    ///
    /// # Errors
    /// The halo does not last for `steps`, a step is half computed, or the device failed.
    pub fn advance(&mut self, steps: usize) -> Result<(), GridError> {
        self.whole()?;
        if steps > self.fresh {
            return Err(GridError::HaloStale { steps, left: self.fresh });
        }
        for _ in 0..steps {
            let after = if self.has_no_halo() { 0 } else { self.fresh - 1 };
            self.motion.prepare(&self.client, &self.state, &self.memory);
            self.compute(&self.frame.span(after));
            self.finish();
        }
        check(&self.client)
    }

    /// Computes the first part of the last step of a cycle: the halo strips that neighbours wait for. [`Self::pack_into`] then
    /// packs them, and [`Self::interior`] must follow, best before packing: the halo strips are then copied while the device
    /// computes.
    ///
    /// # Errors
    /// It is not the last step of the cycle, its halo strips are already computed, or the device failed.
    pub fn strips(&mut self) -> Result<(), GridError> {
        self.whole()?;
        if self.fresh != 1 {
            return Err(GridError::NotLastPass { left: self.fresh });
        }
        self.motion.prepare(&self.client, &self.state, &self.memory);
        let (strips, _) = self.frame.cut();
        strips.iter().for_each(|strip| self.compute(strip));
        self.exchange.fetch(&self.client, &self.next, &self.memory);
        self.half = true;
        check(&self.client)
    }

    /// Computes the second part, the interior, which completes the step.
    ///
    /// # Errors
    /// The first part is not computed, or the device failed.
    pub fn interior(&mut self) -> Result<(), GridError> {
        if !self.half {
            return Err(GridError::NotLastPass { left: self.fresh });
        }
        let (_, interior) = self.frame.cut();
        self.compute(&interior);
        self.half = false;
        let packed = std::mem::replace(&mut self.exchange.packed, exchange::Packed::Nothing);
        self.finish();
        // The fetched halo strips belong to the state that is now current.
        self.exchange.packed = packed;
        check(&self.client)
    }

    /// Sets the neighbours. Halo data from previous neighbours becomes invalid.
    ///
    /// # Errors
    /// The neighbours do not cover each cell of the halo exactly once, one is out of reach of the halo, a step is half
    /// complete, or the device has no memory for the lists. Nothing is changed then.
    pub fn link(&mut self, links: &[Link]) -> Result<(), GridError> {
        self.whole()?;
        let travels: Vec<_> = (0..self.fields).map(|field| self.stepper.streaming_direction(field)).collect();
        let strips = halo::strips(&self.frame, &travels, links)?;
        self.exchange = Exchange::new(&self.client, &self.frame, &self.memory, strips)?;
        // As in `warm`, this compiles the kernels; the inserted zeros are overwritten before the halo counts as fresh.
        self.exchange.fetch(&self.client, &self.state, &self.memory);
        for link in 0..self.exchange.strips.len() {
            let nothing = vec![0; self.exchange.strips[link].bytes_in];
            self.exchange.insert(&self.client, link, &nothing, &self.state, &self.memory);
        }
        self.await_halo();
        check(&self.client)
    }

    /// The neighbours set by [`Self::link`].
    pub fn links(&self) -> impl ExactSizeIterator<Item = &Link> {
        self.exchange.strips.iter().map(|strips| &strips.link)
    }

    /// Bytes of the halo strip to a neighbour. An empty one need not be sent.
    ///
    /// # Errors
    /// There is no such link.
    pub fn bytes_out(&self, link: usize) -> Result<usize, GridError> {
        Ok(self.strips_at(link)?.bytes_out)
    }

    /// Bytes of the halo strip from a neighbour. An empty one is not waited for.
    ///
    /// # Errors
    /// There is no such link.
    pub fn bytes_in(&self, link: usize) -> Result<usize, GridError> {
        Ok(self.strips_at(link)?.bytes_in)
    }

    /// Appends to `strip` the halo strip that a neighbour needs for its next cycle. The first call fetches those of all
    /// neighbours. While a step is half computed, they belong to the new state.
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

    /// Inserts the halo strip that a neighbour packed after the same step. After the last one, the halo is fresh.
    ///
    /// # Errors
    /// There is no such link, the halo strip has the wrong length, or a step is half computed. Nothing is changed then.
    pub fn unpack(&mut self, link: usize, strip: &[u8]) -> Result<(), GridError> {
        self.whole()?;
        let expected = self.bytes_in(link)?;
        if strip.len() != expected {
            return Err(GridError::StripLength { link, expected, found: strip.len() });
        }
        self.exchange.insert(&self.client, link, strip, &self.state, &self.memory);
        let strips = &mut self.exchange.strips;
        strips[link].arrived = true;
        if strips.iter().all(|strips| strips.arrived || strips.bytes_in == 0) {
            self.fresh = self.frame.depth;
        }
        Ok(())
    }

    /// Waits until the device has executed everything queued.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait(&self) -> Result<(), GridError> {
        check(&self.client)?;
        cubecl::future::block_on(self.client.sync()).map_err(memory::failed)
    }

    /// Marks the end of the work queued so far.
    pub fn mark(&self) -> Mark {
        // The device executes in order, so when a read queued now completes, everything before it has completed.
        let coming = transfer::submit_read(self.client.clone(), self.stamp.handle.clone());
        Mark::new(move || cubecl::future::block_on(coming).map(drop).map_err(memory::failed))
    }

    fn strips_at(&self, link: usize) -> Result<&halo::HaloStrips, GridError> {
        let strips = &self.exchange.strips;
        strips.get(link).ok_or(GridError::NoLink { link, links: strips.len() })
    }

    /// Index type of kernels for elements of the state.
    fn address(&self) -> AddressType {
        address(&self.client, self.state.len * self.memory.of_word)
    }

    fn whole(&self) -> Result<(), GridError> {
        if self.half { Err(GridError::HalfComputed) } else { Ok(()) }
    }

    fn has_no_halo(&self) -> bool {
        self.frame.halo == [[0; 2]; 3]
    }

    /// Requires a halo exchange before the next step.
    fn await_halo(&mut self) {
        self.exchange.forget();
        self.exchange.strips.iter_mut().for_each(|strips| strips.arrived = false);
        self.fresh = if self.has_no_halo() { usize::MAX } else { 0 };
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
        if !self.has_no_halo() {
            self.fresh -= 1;
            self.exchange.strips.iter_mut().for_each(|strips| strips.arrived = false);
        }
    }
}
