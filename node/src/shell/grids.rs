//! Carries out what the core decides about simulations.
use super::{Shell, answered, route};
use crate::tiles::states::{StateName, States};
use crate::tiles::{CellSource, Command, Commands};
use crate::views::{Names, count};
use node_core::id::{Epoch, JobId, LoadId, NodeId};
use node_core::input::{GridInput, Input};
use node_core::output::GridCommand;
use node_core::work::steps::{GridEvent, TileOrder, TileStart};
use partitioner::tiles::{Block, GridError};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use transport::frame::{Expectation, PAYLOAD_BYTES_MAX};

/// The shell's own bookkeeping of tiles.
pub(crate) struct TileShell {
    commands: Commands,
    states: Arc<States>,
    /// What is held here: bytes, and the strips that come for it.
    held: BTreeMap<(JobId, u16), (u64, Expectation)>,
    wanted: Wanted,
}

/// The last load of each tile that is wanted. Held while the tiles' thread is sent a load or a drop, so that a load whose
/// simulation came late does not follow the drop of its tile.
#[derive(Clone, Default)]
struct Wanted(Arc<Mutex<BTreeMap<(JobId, u16), LoadId>>>);

impl Wanted {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(JobId, u16), LoadId>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl TileShell {
    pub(crate) fn new(commands: Commands, states: Arc<States>) -> Self {
        Self { commands, states, held: BTreeMap::new(), wanted: Wanted::default() }
    }

    fn send(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    /// Bytes of all tiles of a job.
    fn bytes_of(&self, job: JobId) -> u64 {
        self.held.iter().filter(|((of, _), _)| *of == job).map(|(_, (bytes, _))| bytes).sum()
    }
}

impl Shell {
    pub(super) fn carry_out_grid(&mut self, command: GridCommand) {
        match command {
            GridCommand::Plan { token, question } => {
                let planned = move |result| Input::Grid(GridInput::Planned { token, result });
                self.off_thread(
                    move || planned(question.answer().map(Box::new)),
                    move |why| planned(Err(GridError::Invalid(why))),
                );
            }
            GridCommand::Load { job, epoch, load, order } => self.load_tile(job, epoch, load, order),
            GridCommand::Restore { job, load, tile, step } => {
                self.tiles.send(Command::Restore { job, load, tile, step });
            }
            GridCommand::Keep { job, epoch, tile } => {
                if let Some((_, expected)) = self.tiles.held.get(&(job, tile)) {
                    self.endpoint.expect(route(job, epoch, tile), expected.clone());
                }
            }
            GridCommand::Run(work) => self.tiles.send(Command::Run(work)),
            GridCommand::Share { tensor, also } => {
                if let Some(strip) = self.tensors.get(tensor) {
                    self.tensors.put(also, strip);
                }
            }
            GridCommand::Collect { job, from, tile, step, kind, bytes } => {
                let (submissions, runtime) = (self.submissions.clone(), self.runtime.clone());
                let collected = move |result| Input::Grid(GridInput::Collected { job, tile, step, kind, result });
                let collect = move || {
                    let name = StateName { job, tile, step, kind };
                    let result = submissions.collect(&runtime, from, name, bytes);
                    if let Err(reason) = &result {
                        tracing::debug!("job {:016x}, tile {tile}, step {step}: {reason}", job.0);
                    }
                    collected(result)
                };
                self.off_thread(collect, move |why| collected(Err(why)));
            }
            GridCommand::Forget { job, tile, step, kind } => {
                drop(self.tiles.states.take(&StateName { job, tile, step, kind }));
            }
            GridCommand::Drop { job, tile } => {
                self.tiles.held.remove(&(job, tile));
                let mut wanted = self.tiles.wanted.lock();
                wanted.remove(&(job, tile));
                self.tiles.send(Command::Drop { job, tile });
            }
            GridCommand::Mirror { job, from, step, parts, simulation } => {
                let (submissions, runtime) = (self.submissions.clone(), self.runtime.clone());
                let mirrored = move |result| Input::Grid(GridInput::Mirrored { job, step, result });
                let mirror = move || {
                    let result = submissions.mirror(&runtime, from, (job, step), &parts, simulation);
                    if let Err(reason) = &result {
                        tracing::warn!("job {:016x}: the checkpoint of step {step} cannot be copied: {reason}", job.0);
                    }
                    mirrored(result)
                };
                self.off_thread(mirror, move |why| mirrored(Err(why)));
            }
            GridCommand::KeepCheckpoint { job, step } => {
                let submissions = self.submissions.clone();
                let kept = move |result| Input::Grid(GridInput::Kept { job, step, result });
                self.off_thread(move || kept(submissions.keep_checkpoint(job, step)), move |why| kept(Err(why)));
            }
        }
    }

    pub(super) fn unload_tiles(&mut self, job: JobId) {
        let submissions = self.submissions.clone();
        self.runtime.spawn_blocking(move || submissions.forget_mirror(job));
        self.submissions.forget_simulation(job);
        self.tiles.held.retain(|(of, _), _| *of != job);
        let mut wanted = self.tiles.wanted.lock();
        wanted.retain(|(of, _), _| *of != job);
        self.tiles.send(Command::Unload { job });
    }

    fn load_tile(&mut self, job: JobId, epoch: Epoch, load: LoadId, order: Box<TileOrder>) {
        let (tile, bytes) = (order.tile, order.bytes_max);
        let expected = strips(&order);
        self.endpoint.expect(route(job, epoch, tile), expected.clone());
        self.tiles.held.insert((job, tile), (bytes, expected));
        if let Err(reason) = self.residency.begin(job, load, self.tiles.bytes_of(job)) {
            self.tiles.held.remove(&(job, tile));
            self.tiles.wanted.lock().remove(&(job, tile));
            self.tiles.send(Command::Drop { job, tile });
            return self.driver.input(Input::Grid(GridInput::Loaded { job, tile, load, result: Err(reason) }));
        }
        self.tiles.wanted.lock().insert((job, tile), load);
        let checkpoint = match order.start {
            TileStart::Checkpoint { step } => Some(self.cells_of(epoch.minter, job, step)),
            TileStart::Initial | TileStart::Continue | TileStart::Snapshot => None,
        };
        let id = order.simulation;
        if let Some(simulation) = self.submissions.hold_simulation(job, id.content) {
            return self.tiles.send(Command::Load { job, load, order, simulation, checkpoint });
        }
        // It comes from the coordinator, or from an owner that has it already.
        let owners = order.tiles.iter().map(|(owner, _)| *owner);
        let mut sources: Vec<NodeId> = std::iter::once(epoch.minter).chain(owners).collect();
        sources.dedup();
        sources.truncate(node_core::limits::SOURCES_MAX);
        let (submissions, runtime, driver) = (self.submissions.clone(), self.runtime.clone(), self.driver.clone());
        let (commands, wanted) = (self.tiles.commands.clone(), self.tiles.wanted.clone());
        self.runtime.spawn_blocking(move || {
            let fetched = answered(|| submissions.fetch_simulation(&runtime, job, id, &sources), Err);
            let wanted = wanted.lock();
            if wanted.get(&(job, tile)) != Some(&load) {
                if !wanted.keys().any(|(of, _)| *of == job) {
                    submissions.forget_simulation(job);
                }
                return;
            }
            match fetched {
                Ok(simulation) => {
                    let _ = commands.send(Command::Load { job, load, order, simulation, checkpoint });
                }
                Err(reason) => driver.input(Input::Grid(GridInput::Loaded { job, tile, load, result: Err(reason) })),
            }
        });
    }

    /// The cells of a coordinator's checkpoint, to be fetched in parts.
    fn cells_of(&self, coordinator: NodeId, job: JobId, step: u32) -> CellSource {
        let (submissions, runtime) = (self.submissions.clone(), self.runtime.clone());
        Box::new(move |part| answered(|| submissions.checkpoint(&runtime, coordinator, (job, step), part), Err))
    }
}

/// The largest strip that can come: all of the halo, or what a frame holds.
fn strips(order: &TileOrder) -> Expectation {
    let reach = u64::from(order.depth) * u64::from(order.work.radius);
    let block: &Block = order.block();
    let grown = (0..3).fold(1u128, |cells, axis| {
        let extent = block.extent(axis);
        let ring = if extent < order.work.size[axis] { 2 * reach } else { 0 };
        cells * u128::from(extent + ring)
    });
    let halo = grown - u128::from(block.cells());
    // Rows of bits begin with a whole byte.
    let bits = order.work.cell_bits.max(8);
    let bytes = (halo * u128::from(bits) / 8).clamp(64, PAYLOAD_BYTES_MAX as u128) as u32;
    let dtype = crate::tiles::dtype(order.work.cell_bits);
    Expectation::strips(dtype, bytes / dtype.bytes() as u32)
}

/// What a person would want to know.
pub(super) fn log(job: JobId, event: &GridEvent, names: &Names) {
    let job = job.0;
    match event {
        GridEvent::Placed { epoch, depth, tiles, step, .. } => {
            let tiles: Vec<String> =
                tiles.iter().map(|(node, block)| format!("{} {}", names.get(*node), extent(block))).collect();
            let counter = epoch.counter;
            let (tiles, depth) = (tiles.join(", "), count(*depth as usize, "step"));
            tracing::info!("job {job:016x} epoch {counter} from step {step}: {tiles}; halo depth {depth}");
        }
        GridEvent::Running { epoch, step } => {
            tracing::info!("job {job:016x} epoch {} runs from step {step}", epoch.counter);
        }
        GridEvent::Checkpoint { step } => tracing::info!("job {job:016x}: checkpoint of step {step}"),
        GridEvent::Waiting { reason } => tracing::warn!("job {job:016x} waits: {reason}"),
        GridEvent::Ended { result: Ok(()), .. } => tracing::info!("job {job:016x} is done"),
        GridEvent::Ended { result: Err(reason), .. } => tracing::warn!("job {job:016x} ended: {reason}"),
        // Told where it is known where its results go.
        GridEvent::Inherited { .. } | GridEvent::Moved | GridEvent::Progress { .. } | GridEvent::Report { .. } => {}
    }
}

/// A block as people read it.
pub(crate) fn extent(block: &Block) -> String {
    let axes = (0..3).filter(|&axis| axis < 2 || block.to[axis] > 1);
    axes.map(|axis| format!("{}-{}", block.from[axis], block.to[axis].saturating_sub(1)))
        .collect::<Vec<_>>()
        .join(" x ")
}
