//! The thread that computes tiles of simulations: it owns them, and makes the steps that the core asks for, in order.
use crate::device::Compute;
use crate::driver::DriverHandle;
use crate::residency::Residency;
use crate::tensors::{Tensor, Tensors};
use bytes::Bytes;
use kernels::grid::any_tile::GridTile;
use kernels::grid::simulation::Simulation;
use kernels::grid::tile::Threads;
use kernels::grid::{Link, Region};
use node_core::id::{JobId, LoadId};
use node_core::input::{GridInput, Input};
use node_core::tiles::order::{Report, SaveKind, Stop, StopKind, TileOrder, TileStart};
use node_core::tiles::{TileLoaded, TileMade, TileWork};
use partitioner::tiles::Block;
use states::{StateName, States};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::time::Instant;
use transport::frame::Dtype;

pub mod states;

/// Something for the tiles' thread.
pub enum Command {
    /// Make a tile; `cells` is the state of a checkpoint, if it starts from one.
    Load {
        /// Its job.
        job: JobId,
        /// The order that is answered.
        load: LoadId,
        /// What it is.
        order: Box<TileOrder>,
        /// Its state.
        cells: Option<Bytes>,
    },
    /// Give a tile the cells of a snapshot among the states.
    Restore {
        /// Its job.
        job: JobId,
        /// The order that is answered.
        load: LoadId,
        /// Which tile.
        tile: u16,
        /// The snapshot's step.
        step: u32,
    },
    /// Compute.
    Run(Box<TileWork>),
    /// Drop a tile.
    Drop {
        /// Its job.
        job: JobId,
        /// Which tile.
        tile: u16,
    },
    /// Drop all tiles of a job.
    Unload {
        /// The job.
        job: JobId,
    },
}

/// What the thread needs.
pub struct Hands {
    /// Strips.
    pub tensors: Arc<Tensors>,
    /// States that were put aside.
    pub states: Arc<States>,
    /// Memory taken.
    pub residency: Arc<Residency>,
    /// The node.
    pub driver: DriverHandle,
    /// What computes.
    pub device: Arc<Compute>,
}

/// Starts the thread. It ends when the sender is dropped.
///
/// # Errors
/// The operating system refuses a thread.
pub fn spawn(hands: Hands) -> std::io::Result<mpsc::Sender<Command>> {
    let (sender, commands) = mpsc::channel();
    let tiles = Tiles { tiles: HashMap::new(), threads: None, hands };
    std::thread::Builder::new().name("tiles".into()).spawn(move || tiles.run(&commands))?;
    Ok(sender)
}

struct Tiles {
    tiles: HashMap<(JobId, u16), Held>,
    /// Started with the first tile.
    threads: Option<Threads>,
    hands: Hands,
}

struct Held {
    simulation: Arc<Simulation>,
    order: Box<TileOrder>,
    /// None at a warm standby.
    tile: Option<Box<dyn GridTile>>,
}

impl Tiles {
    fn run(mut self, commands: &mpsc::Receiver<Command>) {
        while let Ok(command) = commands.recv() {
            match command {
                Command::Load { job, load, order, cells } => {
                    let tile = order.tile;
                    let loaded = guarded(|| self.load(job, order, cells.as_deref()));
                    self.answer(GridInput::Loaded { job, tile, load, result: loaded });
                }
                Command::Restore { job, load, tile, step } => {
                    let result = guarded(|| self.restore(job, tile, step));
                    self.answer(GridInput::Loaded { job, tile, load, result });
                }
                Command::Run(work) => {
                    let (job, tile, id) = (work.job, work.tile, work.work);
                    let result = guarded(|| self.compute(&work));
                    self.answer(GridInput::Made { job, tile, work: id, result });
                }
                Command::Drop { job, tile } => {
                    self.tiles.remove(&(job, tile));
                    self.hands.states.drop_tile(job, tile);
                    self.taken(job);
                }
                Command::Unload { job } => {
                    let before = self.tiles.len();
                    self.tiles.retain(|(of, _), _| *of != job);
                    self.hands.states.drop_job(job);
                    if self.tiles.len() < before {
                        self.taken(job);
                    }
                }
            }
        }
    }

    fn answer(&self, input: GridInput) {
        self.hands.driver.input(Input::Grid(input));
    }

    /// Tells how much the tiles of a job take here.
    fn taken(&self, job: JobId) {
        let held = self.tiles.iter().filter(|((of, _), _)| *of == job);
        let bytes: u64 = held.map(|(_, held)| held.order.bytes_max).sum();
        let capacity = self.hands.residency.resident(job, (bytes > 0).then_some(bytes));
        self.hands.driver.input(Input::CapacityChanged(capacity));
    }

    fn load(&mut self, job: JobId, order: Box<TileOrder>, cells: Option<&[u8]>) -> Result<TileLoaded, String> {
        let key = (job, order.tile);
        self.tiles.remove(&key);
        let known = self.tiles.iter().find(|((of, _), held)| *of == job && held.order.simulation == order.simulation);
        let simulation = match known {
            Some((_, held)) => held.simulation.clone(),
            None => Arc::new(Simulation::from_bytes(&order.simulation).map_err(|e| e.to_string())?),
        };
        let mut held = Held { simulation, order, tile: None };
        let mut step = None;
        let warm = held.order.standby == Some(node_core::tiles::order::Tier::Warm);
        if !warm {
            let mut tile = held.make(&self.hands.device)?;
            step = match held.order.start {
                TileStart::Initial => {
                    held.simulation.load(&mut *tile).map_err(|e| e.to_string())?;
                    Some(0)
                }
                TileStart::Checkpoint { step } => {
                    let cells = cells.ok_or("the checkpoint's cells did not come")?;
                    tile.restore(tile.region(), cells).map_err(|e| e.to_string())?;
                    tile.resume(step.into());
                    Some(step)
                }
                TileStart::Continue | TileStart::Snapshot => None,
            };
            held.tile = Some(tile);
        }
        let bytes = held.order.bytes_max;
        self.tiles.insert(key, held);
        self.taken(job);
        Ok(TileLoaded { bytes, step })
    }

    fn restore(&mut self, job: JobId, tile: u16, step: u32) -> Result<TileLoaded, String> {
        let name = StateName { job, tile, step, kind: SaveKind::Snapshot };
        let cells = self.hands.states.take(&name).ok_or("the snapshot is gone")?;
        let held = self.tiles.get_mut(&(job, tile)).ok_or("the tile is gone")?;
        let mut restored = match held.tile.take() {
            Some(tile) => tile,
            None => held.make(&self.hands.device)?,
        };
        restored.restore(restored.region(), &cells).map_err(|e| e.to_string())?;
        restored.resume(step.into());
        held.tile = Some(restored);
        Ok(TileLoaded { bytes: held.order.bytes_max, step: Some(step) })
    }

    fn compute(&mut self, work: &TileWork) -> Result<TileMade, String> {
        let began = Instant::now();
        let strips: Vec<(u16, Option<Tensor>)> =
            work.strips_in.iter().map(|&(link, id)| (link, self.hands.tensors.take(id))).collect();
        let held = self.tiles.get_mut(&(work.job, work.tile)).ok_or("the tile is not here")?;
        let tile = held.tile.as_mut().ok_or("the tile has no cells")?;
        let threads = match &mut self.threads {
            Some(threads) => threads,
            none => none.insert(Threads::new(self.hands.device.threads).map_err(|e| format!("no threads: {e}"))?),
        };
        if tile.steps() != u64::from(work.from) {
            return Err(format!("the tile has made {} steps, not {}", tile.steps(), work.from));
        }
        for (link, strip) in strips {
            let Some(Tensor::Strip { bytes, .. }) = strip else {
                return Err("a strip is gone before it was used".into());
            };
            let expected = tile.bytes_in(link.into()).map_err(|e| e.to_string())?;
            if expected > 0 {
                tile.unpack(link.into(), &bytes).map_err(|e| e.to_string())?;
            }
        }
        let mut making = Making { work, hands: &self.hands, simulation: &held.simulation, made: TileMade::default() };
        making.steps(&mut **tile, threads)?;
        tile.wait().map_err(|e| e.to_string())?;
        making.made.compute_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Ok(making.made)
    }
}

impl Held {
    fn make(&self, device: &Compute) -> Result<Box<dyn GridTile>, String> {
        let (simulation, order) = (&self.simulation, &self.order);
        let depth = order.depth as usize;
        let (grid, rule) = (simulation.grid(), simulation.rule());
        let mut tile = device.tile(grid, rule, region(order.block()), depth).map_err(|e| e.to_string())?;
        let links: Vec<Link> = order
            .links(order.tile)
            .iter()
            .map(|link| Link { region: region(&order.tiles[usize::from(link.peer)].1), shift: link.shift })
            .collect();
        tile.link(&links).map_err(|e| e.to_string())?;
        Ok(tile)
    }
}

/// A run of steps as it is made.
struct Making<'a> {
    work: &'a TileWork,
    hands: &'a Hands,
    simulation: &'a Simulation,
    made: TileMade,
}

impl Making<'_> {
    fn steps(&mut self, tile: &mut dyn GridTile, threads: &mut Threads) -> Result<(), String> {
        let work = self.work;
        let (mut step, mut stops) = (work.from, work.stops.iter().peekable());
        if work.from == work.to {
            self.pack(tile)?;
        }
        loop {
            while let Some(stop) = stops.next_if(|stop| stop.step <= step) {
                self.stop(tile, threads, stop)?;
            }
            if step >= work.to {
                return Ok(());
            }
            // As far as the next stop; the last step by itself, where somebody waits for its strips.
            let alone = !work.strips_out.is_empty();
            let until = stops.peek().map_or(work.to, |stop| stop.step).min(work.to);
            let until = if alone && until == work.to && step + 1 < work.to { work.to - 1 } else { until };
            if alone && step + 1 == work.to && tile.left() == 1 {
                tile.strips(threads).map_err(|e| e.to_string())?;
                if tile.is_detached() {
                    tile.interior(threads).map_err(|e| e.to_string())?;
                    self.pack(tile)?;
                } else {
                    self.pack(tile)?;
                    tile.interior(threads).map_err(|e| e.to_string())?;
                }
            } else {
                tile.advance(threads, (until - step) as usize).map_err(|e| e.to_string())?;
                if alone && until == work.to {
                    self.pack(tile)?;
                }
            }
            step = until.max(step + 1);
        }
    }

    /// Strips for the neighbours; the core sends them.
    fn pack(&mut self, tile: &mut dyn GridTile) -> Result<(), String> {
        let dtype = dtype(self.simulation.rule().costs().cell_bits);
        let mut sizes = Vec::with_capacity(self.work.strips_out.len());
        for &(link, id) in &self.work.strips_out {
            let mut strip = tile.pack(link.into()).map_err(|e| e.to_string())?;
            if strip.is_empty() {
                // Nothing crosses there, but the neighbour waits for the step: a frame has at least one element.
                strip.resize(dtype.bytes() as usize, 0);
            }
            let bytes = strip.len() as u64;
            sizes.push(((bytes / dtype.bytes()) as u32, bytes));
            self.hands.tensors.put(id, Tensor::Strip { bytes: strip.into(), dtype });
        }
        if !sizes.is_empty() {
            let (job, tile, work) = (self.work.job, self.work.tile, self.work.work);
            self.hands.driver.input(Input::Grid(GridInput::Strips { job, tile, work, sizes }));
        }
        Ok(())
    }

    fn stop(&mut self, tile: &dyn GridTile, threads: &mut Threads, stop: &Stop) -> Result<(), String> {
        match stop.what {
            StopKind::Report { hash } => {
                let report = report(self.simulation, tile, threads, hash).map_err(|e| e.to_string())?;
                self.made.reports.push((stop.step, report));
            }
            StopKind::Save(kind) => {
                let bytes: Bytes = match kind {
                    SaveKind::Checkpoint | SaveKind::Snapshot => {
                        tile.save(tile.region()).map_err(|e| e.to_string())?.into()
                    }
                    SaveKind::Output(number) => self.output(tile, number)?,
                };
                self.made.saves.push((stop.step, kind, bytes.len() as u64));
                let name = StateName { job: self.work.job, tile: self.work.tile, step: stop.step, kind };
                self.hands.states.put(name, bytes);
            }
        }
        Ok(())
    }

    /// What an output shows of the tile: the values that it needs, one quantity after the other.
    fn output(&self, tile: &dyn GridTile, number: u16) -> Result<Bytes, String> {
        let outputs = self.simulation.outputs();
        let (quantity, (shown, stride)) = match outputs.get(usize::from(number)) {
            Some(output) => (output.quantity.as_str(), self.simulation.shown(output)),
            // One more than the job names: for whoever watches.
            None if usize::from(number) == outputs.len() => {
                (self.simulation.default_quantity(), crate::submissions::view(self.simulation))
            }
            None => return Err("there is no such output".into()),
        };
        let mut bytes = Vec::new();
        if let Some(part) = common(&shown, &tile.region()) {
            for quantity in self.simulation.needs(quantity) {
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
) -> Result<Report, kernels::grid::GridError> {
    let totals = simulation.totals_of(tile)?;
    let hash = if hash { Some(tile.state_hash(threads)?) } else { None };
    let found = tile.first_not_finite()?;
    let not_finite = found.map(|(cell, field)| (cell.map(|at| at as u64), field as u16));
    Ok(Report { totals, hash, not_finite })
}

/// A block as the kernels name it.
pub fn region(block: &Block) -> Region {
    Region { start: block.from.map(|at| at as usize), end: block.to.map(|at| at as usize) }
}

/// The cells that both have.
pub fn common(a: &Region, b: &Region) -> Option<Region> {
    let start: [usize; 3] = std::array::from_fn(|axis| a.start[axis].max(b.start[axis]));
    let end: [usize; 3] = std::array::from_fn(|axis| a.end[axis].min(b.end[axis]));
    (0..3).all(|axis| start[axis] < end[axis]).then_some(Region { start, end })
}

/// How strips of a rule whose cells have so many bits lie in a frame.
pub fn dtype(cell_bits: u64) -> Dtype {
    match cell_bits {
        bits if bits.is_multiple_of(32) => Dtype::Cells,
        // A fluid's cells have an odd number of fields.
        bits if bits.is_multiple_of(16) => Dtype::HalfCells,
        _ => Dtype::Bits,
    }
}

fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(format!("a kernel panicked: {}", text.unwrap_or("no message")))
    })
}
