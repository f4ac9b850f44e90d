//! The part of the device thread specific to tiles of simulations: their initial state, and steps computed in pieces.
use super::command::{CellSource, Command, Commands};
use super::pending::Launched;
use super::shared::Shared;
use crate::device::Compute;
use crate::panics::guarded;
use crate::regions::{common, region};
use crate::residency::Key;
use crate::states::{StateName, States};
use crate::submissions::view::LiveView;
use crate::tensors::{Tensor, TensorStore};
use bytes::Bytes;
use kernels::threads::Threads;
use kernels_grids::any_tile::{GridTile, Mark};
use kernels_grids::{FieldCheck, Link, Region};
use kernels_simulations::Simulation;
use node_core::id::{LoadId, PartId, WorkId};
use node_core::input::Input;
use node_core::limits::TILE_PIECE;
use node_core::work::Loaded;
use node_core::work::steps::{Action, ActionKind, Report, SaveKind, TileOrder, TileResult, TileStart, TileWork};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use transport::buffer_pool::Buffer;
use transport::frame::Dtype;

/// A tile of this node.
pub(super) struct LoadedTile {
    key: Key,
    bytes_max: u64,
    pub(super) order: TileOrder,
    simulation: Arc<Simulation>,
    /// `None` at a warm standby.
    tile: Option<Box<dyn GridTile>>,
    /// The initial state is being computed or fetched.
    loading: Option<Loading>,
    /// The last run launched on a device.
    pub(super) last: Option<Launched>,
    /// Recent time of one step on the CPU.
    step: Duration,
}

struct Loading {
    load: LoadId,
    /// Receives one message per piece of the state that is queued for the device thread.
    waiting: mpsc::Receiver<()>,
}

/// A run in progress.
pub(super) struct TileRun {
    pub(super) key: Key,
    pub(super) work: WorkId,
    pub(super) task: TileWork,
    pub(super) made: TileResult,
    /// Time spent on it so far.
    pub(super) took: Duration,
    /// Halos that the tile has not received yet, by link.
    halos: Vec<(u16, Option<Tensor>)>,
    /// The step it has reached.
    step: u32,
    /// Number of stops completed.
    stopped: usize,
}

impl TileRun {
    /// A run that has not begun. Takes its halos out of `tensors`.
    pub(super) fn new(work: WorkId, key: Key, task: TileWork, tensors: &TensorStore) -> Self {
        let halos = task.halos_in.iter().map(|&(link, id)| (link, tensors.take(id))).collect();
        let step = task.from;
        Self { key, work, task, made: TileResult::default(), took: Duration::ZERO, halos, step, stopped: 0 }
    }
}

/// The progress of a run.
pub(super) enum Progress {
    /// A piece is done: other work may run before the next.
    Yields,
    /// All steps are computed, or launched on the device, which completes them at the mark.
    Given(Mark),
}

impl LoadedTile {
    /// A tile without cells.
    pub(super) fn new((key, bytes_max): (Key, u64), order: TileOrder, simulation: Arc<Simulation>) -> Self {
        let step = Duration::from_nanos(order.step_ns);
        Self { key, bytes_max, order, simulation, tile: None, loading: None, last: None, step }
    }

    fn region(&self) -> Region {
        region(self.order.block(self.key.1))
    }

    /// Allocates its cells, all zero.
    pub(super) fn make(&mut self, device: &Compute) -> Result<(), String> {
        let (simulation, order) = (&self.simulation, &self.order);
        let depth = order.depth as usize;
        let (grid, rule) = (simulation.grid(), simulation.rule());
        let mut tile = device.tile(grid, rule, self.region(), depth).map_err(|e| e.to_string())?;
        let links: Vec<Link> = order
            .links(self.key.1)
            .iter()
            .map(|link| Link { region: region(order.block(PartId(link.peer))), shift: link.shift })
            .collect();
        tile.link(&links).map_err(|e| e.to_string())?;
        self.tile = Some(tile);
        Ok(())
    }

    /// Starts to compute or fetch the initial state, on another thread so that the device thread serves other parts
    /// meanwhile. It arrives in pieces; two are in memory at a time.
    pub(super) fn begin(
        &mut self,
        load: LoadId,
        source: Option<CellSource>,
        commands: Commands,
        threads: usize,
    ) -> Result<(), String> {
        // One piece is queued while the next is computed.
        let (ready, waiting) = mpsc::sync_channel(1);
        let simulation = self.simulation.clone();
        let (key, parts) = (self.key, simulation.initial_parts(self.region()));
        let make = move || {
            let result = guarded(|| {
                for part in parts {
                    let cells = match &source {
                        None => simulation.initial(part, threads),
                        Some(source) => source(part)?,
                    };
                    if ready.send(()).is_err() {
                        // The tile was dropped.
                        break;
                    }
                    let _ = commands.send(Command::Cells { key, load, part, cells });
                }
                Ok(())
            });
            let _ = commands.send(Command::CellsEnd { key, load, result });
        };
        std::thread::Builder::new()
            .name("initial".into())
            .spawn(make)
            .map_err(|e| format!("the thread for the initial state could not be started: {e}"))?;
        self.loading = Some(Loading { load, waiting });
        Ok(())
    }

    /// Whether the initial state is incomplete.
    pub(super) fn is_loading(&self) -> bool {
        self.loading.is_some()
    }

    /// Stores some cells of the initial state.
    pub(super) fn put(&mut self, load: LoadId, part: Region, cells: &[u8]) -> Result<(), String> {
        let (Some(tile), Some(loading)) = (&mut self.tile, &self.loading) else { return Ok(()) };
        if loading.load != load {
            return Ok(());
        }
        let put = tile.restore(part, cells).map_err(|e| e.to_string());
        let _ = loading.waiting.recv();
        put
    }

    /// The initial state is complete, or failed. Returns the answer to the load, unless `load` was superseded.
    pub(super) fn started(&mut self, load: LoadId) -> Option<Loaded> {
        self.loading.take_if(|loading| loading.load == load)?;
        let step = match self.order.start {
            TileStart::Checkpoint { step } => step,
            TileStart::Initial | TileStart::Continue | TileStart::Snapshot => 0,
        };
        if let Some(tile) = &mut self.tile {
            tile.resume(step.into());
        }
        Some(Loaded { bytes: self.bytes_max, ram: 0, ram_pages: 0, step: Some(step) })
    }

    /// Restores the tile from the cells of a snapshot.
    pub(super) fn restore(&mut self, device: &Compute, cells: &[u8], step: u32) -> Result<Loaded, String> {
        if self.tile.is_none() {
            self.make(device)?;
        }
        // A failure below leaves the tile without cells.
        let mut tile = self.tile.take().ok_or("the tile has no cells")?;
        tile.restore(tile.region(), cells).map_err(|e| e.to_string())?;
        tile.resume(step.into());
        self.tile = Some(tile);
        Ok(Loaded { bytes: self.bytes_max, ram: 0, ram_pages: 0, step: Some(step) })
    }

    /// Computes a run, or launches it on the device. With `yields`, the CPU computes it in pieces of about
    /// [`TILE_PIECE`] and stops after each; a step is never split.
    ///
    /// A tile without neighbours gets its next run before the mark of this one: while the device computes one piece,
    /// the next is already queued. No more than one is queued, so that the tile can be stopped within two pieces.
    pub(super) fn advance(
        &mut self,
        run: &mut TileRun,
        threads: &mut Threads,
        shared: &Shared,
        yields: bool,
    ) -> Result<Progress, String> {
        let tile = self.tile.as_mut().ok_or("the tile has no cells")?;
        let from = run.step;
        if tile.steps() != u64::from(from) {
            return Err(format!("the tile is at step {}, not {from}", tile.steps()));
        }
        for (link, halo) in std::mem::take(&mut run.halos) {
            let Some(Tensor::Halo { bytes, .. }) = halo else {
                return Err("a halo was dropped before it was used".into());
            };
            let expected = tile.bytes_in(link.into()).map_err(|e| e.to_string())?;
            if expected > 0 {
                tile.unpack(link.into(), &bytes).map_err(|e| e.to_string())?;
            }
        }
        let yields = yields && !tile.is_asynchronous();
        let piece = if yields { TILE_PIECE.as_nanos() / self.step.as_nanos().max(1) } else { u128::MAX };
        let piece = u32::try_from(piece).unwrap_or(u32::MAX).max(1);
        let began = Instant::now();
        let mut making = Making { run, shared, simulation: &self.simulation, piece, computed: Duration::ZERO };
        let done = making.steps(&mut **tile, threads, || yields && began.elapsed() >= TILE_PIECE)?;
        let computed = making.computed;
        let made = run.step - from;
        if made > 0 {
            self.step = computed / made;
        }
        Ok(if done { Progress::Given(tile.mark()) } else { Progress::Yields })
    }
}

/// Takes the cells of a snapshot out of `states`.
pub(super) fn snapshot(states: &States, (job, part): Key, step: u32) -> Result<Bytes, String> {
    let name = StateName { job, part, step, kind: SaveKind::Snapshot };
    states.take(&name).ok_or_else(|| "the snapshot is no longer stored".into())
}

/// A piece of a run in progress.
struct Making<'a> {
    run: &'a mut TileRun,
    shared: &'a Shared,
    simulation: &'a Simulation,
    /// Most steps computed in one call.
    piece: u32,
    /// Time that the steps took, without the stops.
    computed: Duration,
}

impl Making<'_> {
    /// Computes steps until all are done or `is_late`; returns whether all are done.
    fn steps(
        &mut self,
        tile: &mut dyn GridTile,
        threads: &mut Threads,
        is_late: impl Fn() -> bool,
    ) -> Result<bool, String> {
        let (to, mut step) = (self.run.task.to, self.run.step);
        if self.run.task.from == to {
            self.pack(tile)?;
        }
        loop {
            while let Some(stop) = self.run.task.stops.get(self.run.stopped).filter(|stop| stop.step <= step).cloned() {
                self.stop(tile, threads, &stop)?;
                self.run.stopped += 1;
            }
            if step >= to {
                return Ok(true);
            }
            if is_late() {
                return Ok(false);
            }
            // Continue to the next stop. If neighbours wait for its halos, the last pass is computed separately.
            let alone = !self.run.task.halos_out.is_empty();
            let tail = (tile.split_steps_max() as u32).min(self.piece);
            let until = self.run.task.stops.get(self.run.stopped).map_or(to, |stop| stop.step).min(to);
            let until = if alone && until == to && to - step > tail { to - tail } else { until };
            let until = until.min(step.saturating_add(self.piece));
            let began = Instant::now();
            if alone && until == to && tile.steps_left() == (to - step) as usize {
                tile.compute_halo_strips(threads).map_err(|e| e.to_string())?;
                if tile.is_asynchronous() {
                    tile.interior(threads).map_err(|e| e.to_string())?;
                    self.pack(tile)?;
                } else {
                    self.pack(tile)?;
                    tile.interior(threads).map_err(|e| e.to_string())?;
                }
            } else {
                tile.advance(threads, (until - step) as usize).map_err(|e| e.to_string())?;
                if alone && until == to {
                    self.pack(tile)?;
                }
            }
            self.computed += began.elapsed();
            step = until;
            self.run.step = step;
        }
    }

    /// Packs halos for the neighbours; the core sends them.
    fn pack(&mut self, tile: &mut dyn GridTile) -> Result<(), String> {
        let dtype = dtype(self.simulation.rule().costs().cell_bits);
        let mut sizes = Vec::with_capacity(self.run.task.halos_out.len());
        for &(link, id) in &self.run.task.halos_out {
            let room = tile.bytes_out(link.into()).map_err(|e| e.to_string())?;
            let mut halo = Buffer::with_capacity(room);
            tile.pack_into(link.into(), &mut halo).map_err(|e| e.to_string())?;
            if halo.is_empty() {
                // No population crosses this link, but the neighbour waits for the step: a frame has at least one
                // element.
                halo.resize(dtype.bytes() as usize, 0);
            }
            let bytes = halo.len() as u64;
            sizes.push(((bytes / dtype.bytes()) as u32, bytes));
            self.shared.tensors.put(id, Tensor::Halo { bytes: halo.into(), dtype });
        }
        if !sizes.is_empty() {
            let ((job, part), work) = (self.run.key, self.run.work);
            self.shared.driver.input(Input::Halos { job, part, work, sizes });
        }
        Ok(())
    }

    fn stop(&mut self, tile: &dyn GridTile, threads: &mut Threads, stop: &Action) -> Result<(), String> {
        match stop.what {
            ActionKind::Report { hash } => {
                let report = report(self.simulation, tile, threads, hash).map_err(|e| e.to_string())?;
                self.run.made.reports.push((stop.step, report));
            }
            ActionKind::Save(kind) => {
                let bytes: Bytes = match kind {
                    SaveKind::Checkpoint | SaveKind::Snapshot => {
                        tile.save(tile.region()).map_err(|e| e.to_string())?.into()
                    }
                    SaveKind::Output(number) => self.output(tile, number)?,
                };
                self.run.made.saves.push((stop.step, kind, bytes.len() as u64));
                let (job, part) = self.run.key;
                self.shared.states.put(StateName { job, part, step: stop.step, kind }, bytes);
            }
        }
        Ok(())
    }

    /// The values that an output needs from this tile, one quantity after another.
    fn output(&self, tile: &dyn GridTile, number: u16) -> Result<Bytes, String> {
        let outputs = self.simulation.outputs();
        let (quantity, (shown, stride)) = match outputs.get(usize::from(number)) {
            Some(output) => (output.quantity.as_str(), self.simulation.output_view(output)),
            // Numbers past the job's own outputs are for live viewers.
            None => {
                let watched = LiveView::of(self.simulation);
                (watched.quantity, watched.shown)
            }
        };
        let mut bytes = Vec::new();
        if let Some(part) = common(&shown, &tile.region()) {
            for quantity in self.simulation.source_quantities(quantity) {
                let values = self.simulation.sample(tile, quantity, part, stride).map_err(|e| e.to_string())?;
                bytes.extend_from_slice(&transport::frame::from_f32(&values));
            }
        }
        Ok(bytes.into())
    }
}

fn report(
    simulation: &Simulation,
    tile: &dyn GridTile,
    threads: &mut Threads,
    hash: bool,
) -> Result<Report, kernels_grids::GridError> {
    let FieldCheck { totals, not_finite } = simulation.check_fields(tile, threads)?;
    let hash = if hash { Some(tile.state_hash(threads)?) } else { None };
    let not_finite = not_finite.map(|(cell, field)| (cell.map(|at| at as u64), field as u16));
    Ok(Report { totals, hash, not_finite })
}

/// The frame layout of halos for a rule with this number of bits per cell.
pub(crate) fn dtype(cell_bits: u64) -> Dtype {
    match cell_bits {
        bits if bits.is_multiple_of(32) => Dtype::Cells,
        // A fluid's cell has an odd number of fields.
        bits if bits.is_multiple_of(16) => Dtype::HalfCells,
        _ => Dtype::Bits,
    }
}
