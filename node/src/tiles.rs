//! The thread that computes tiles of simulations: it owns them, and makes the steps that the core asks for, in order.
use crate::device::Compute;
use crate::driver::DriverHandle;
use crate::residency::Residency;
use crate::submissions::Watched;
use crate::tensors::{Tensor, Tensors};
use bytes::Bytes;
use kernels::grid::any_tile::{GridTile, Mark};
use kernels::grid::simulation::Simulation;
use kernels::grid::tile::Threads;
use kernels::grid::{Link, Look, Region};
use node_core::id::{JobId, LoadId, WorkId};
use node_core::input::{GridInput, Input};
use node_core::work::steps::{Report, SaveKind, Stop, StopKind, TileLoaded, TileMade, TileOrder, TileStart, TileWork};
use partitioner::tiles::Block;
use states::{StateName, States};
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use transport::frame::Dtype;
use transport::spare::Buffer;

pub mod states;
#[cfg(test)]
mod tests;

/// Something for the tiles' thread.
pub enum Command {
    /// Make a tile.
    Load {
        /// Its job.
        job: JobId,
        /// The order that is answered.
        load: LoadId,
        /// What it is.
        order: Box<TileOrder>,
        /// What is computed.
        simulation: Arc<Simulation>,
        /// Gives the cells of a checkpoint, if it starts from one.
        checkpoint: Option<CellSource>,
    },
    /// Some cells that a tile starts with, made or fetched meanwhile.
    Cells {
        /// Its job.
        job: JobId,
        /// The order that they are for.
        load: LoadId,
        /// Which tile.
        tile: u16,
        /// Where they are.
        part: Region,
        /// As a saved state has them.
        cells: Vec<u8>,
    },
    /// All of them came, or why not.
    CellsEnd {
        /// Its job.
        job: JobId,
        /// The order that is answered.
        load: LoadId,
        /// Which tile.
        tile: u16,
        /// Why not.
        result: Result<(), String>,
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

/// Gives the cells of a box, as a saved state has them. Blocks.
pub type CellSource = Box<dyn Fn(Region) -> Result<Vec<u8>, String> + Send>;

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

/// How the thread is told something.
pub type Commands = Arc<mpsc::Sender<Command>>;

/// Starts the thread. It ends when the last sender is dropped.
///
/// # Errors
/// The operating system refuses a thread.
pub fn spawn(hands: Hands) -> std::io::Result<(Commands, JoinHandle<()>)> {
    let (sender, commands) = mpsc::channel();
    let sender = Arc::new(sender);
    let own = Arc::downgrade(&sender);
    let tiles = Tiles { tiles: HashMap::new(), threads: None, pending: VecDeque::new(), watch: None, own, hands };
    let thread = std::thread::Builder::new().name("tiles".into()).spawn(move || tiles.run(&commands))?;
    Ok((sender, thread))
}

struct Tiles {
    tiles: HashMap<(JobId, u16), Held>,
    /// Started with the first tile.
    threads: Option<Threads>,
    /// Runs that a GPU is at, in its order: at most one of each tile, since the core waits for the answer.
    pending: VecDeque<Pending>,
    /// Who waits for devices, started with the first run that one is told.
    watch: Option<mpsc::Sender<(Mark, Arc<End>)>>,
    /// For those who make initial states.
    own: Weak<mpsc::Sender<Command>>,
    hands: Hands,
}

struct Held {
    simulation: Arc<Simulation>,
    order: Box<TileOrder>,
    /// None at a warm standby.
    tile: Option<Box<dyn GridTile>>,
    /// The state that it starts with is being made or fetched.
    loading: Option<Loading>,
    /// The last run that a device was told.
    last: Option<Launched>,
}

struct Loading {
    load: LoadId,
    /// One for each part of the state that waits here.
    waiting: mpsc::Receiver<()>,
}

/// When a run was done, or why not.
type End = OnceLock<Result<Instant, String>>;

/// A run that a device was told.
#[derive(Clone)]
struct Launched {
    began: Instant,
    end: Arc<End>,
    /// That of the run before, which it waits for.
    after: Option<Arc<End>>,
    answered: Arc<OnceLock<Instant>>,
}

impl Launched {
    /// Waits for it, and says when it was done and for how many nanoseconds the device was at it.
    fn wait(&self) -> Result<(Instant, u64), String> {
        let end = self.end.wait().clone()?;
        let free = self.after.as_ref().and_then(|before| before.get()?.clone().ok());
        let begin = free.map_or(self.began, |free| free.max(self.began));
        Ok((end, nanos(end.saturating_duration_since(begin))))
    }
}

/// A run that is to be answered: while the device is at it, when the one before is done, so that the device has its next one
/// before it ends this; the last one of all when it is done itself.
struct Pending {
    job: JobId,
    tile: u16,
    work: WorkId,
    before: Option<Launched>,
    this: Launched,
    last: bool,
    made: TileMade,
}

impl Tiles {
    fn run(mut self, commands: &mpsc::Receiver<Command>) {
        loop {
            // While a GPU is at one tile another one's run is launched; then the first is waited for.
            let launched = !self.pending.is_empty();
            let command = if launched { commands.try_recv() } else { commands.recv().map_err(Into::into) };
            match command {
                Ok(command) => self.carry_out(command),
                Err(mpsc::TryRecvError::Empty) => {}
                Err(mpsc::TryRecvError::Disconnected) => return,
            }
            if launched && let Some(first) = self.pending.pop_front() {
                self.finish(first);
            }
        }
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Load { job, load, order, simulation, checkpoint } => {
                let tile = order.tile;
                if let Some(loaded) = guarded(|| self.load(job, load, order, simulation, checkpoint)).transpose() {
                    self.answer(GridInput::Loaded { job, tile, load, result: loaded });
                }
            }
            Command::Cells { job, load, tile, part, cells } => {
                if let Err(reason) = guarded(|| self.put(job, load, tile, part, &cells)) {
                    self.loaded(job, load, tile, Err(reason));
                }
            }
            Command::CellsEnd { job, load, tile, result } => self.loaded(job, load, tile, result),
            Command::Restore { job, load, tile, step } => {
                let result = guarded(|| self.restore(job, tile, step));
                self.answer(GridInput::Loaded { job, tile, load, result });
            }
            Command::Run(work) => {
                let (job, tile, id, began) = (work.job, work.tile, work.work, Instant::now());
                match guarded(|| self.compute(&work)) {
                    Ok((mut made, mark)) if mark.is_reached() => {
                        made.compute_ns = nanos(began.elapsed());
                        self.answer(GridInput::Made { job, tile, work: id, result: Ok(made) });
                    }
                    Ok((made, mark)) => match self.launched(&work, began, mark, made) {
                        Ok(run) => self.pending.push_back(run),
                        Err(reason) => self.answer(GridInput::Made { job, tile, work: id, result: Err(reason) }),
                    },
                    Err(reason) => self.answer(GridInput::Made { job, tile, work: id, result: Err(reason) }),
                }
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

    /// Answers a run when it is made.
    fn finish(&self, run: Pending) {
        let Pending { job, tile, work, before, this, last, mut made } = run;
        let wait = || {
            if let Some(before) = before {
                let (end, took) = before.wait()?;
                made.compute_ns = took;
                if let Some(answered) = before.answered.get() {
                    made.overlap_ns = nanos(end.min(this.began).saturating_duration_since(*answered));
                }
            }
            if last {
                made.compute_ns += this.wait()?.1;
            }
            Ok(())
        };
        let result = wait().map(|()| made);
        let _ = this.answered.set(Instant::now());
        self.answer(GridInput::Made { job, tile, work, result });
    }

    /// A device was told a run, and is at it until the mark.
    fn launched(&mut self, work: &TileWork, began: Instant, mark: Mark, made: TileMade) -> Result<Pending, String> {
        let (job, tile) = (work.job, work.tile);
        let held = self.tiles.get_mut(&(job, tile)).ok_or("the tile is not here")?;
        let before = held.last.take();
        let after = before.as_ref().map(|before| before.end.clone());
        let this = Launched { began, end: Arc::default(), after, answered: Arc::default() };
        let last = work.to == held.order.schedule.steps;
        let watch = match &self.watch {
            Some(watch) => watch,
            None => self.watch.insert(watcher()?),
        };
        watch.send((mark, this.end.clone())).map_err(|_| "nobody waits for the device any more")?;
        // Now somebody will say when it ends.
        held.last = Some(this.clone());
        Ok(Pending { job, tile, work: work.work, before, this, last, made })
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

    /// Makes a tile. None: the state that it starts with follows.
    fn load(
        &mut self,
        job: JobId,
        load: LoadId,
        order: Box<TileOrder>,
        simulation: Arc<Simulation>,
        checkpoint: Option<CellSource>,
    ) -> Result<Option<TileLoaded>, String> {
        let key = (job, order.tile);
        self.tiles.remove(&key);
        let mut held = Held { simulation, order, tile: None, loading: None, last: None };
        let warm = held.order.standby == Some(node_core::work::steps::Tier::Warm);
        if !warm {
            held.tile = Some(held.make(&self.hands.device)?);
            held.loading = match held.order.start {
                TileStart::Initial => Some(self.begin(job, load, &held, None)?),
                TileStart::Checkpoint { .. } => {
                    let source = checkpoint.ok_or("the checkpoint cannot be asked for")?;
                    Some(self.begin(job, load, &held, Some(source))?)
                }
                TileStart::Continue | TileStart::Snapshot => None,
            };
        }
        let (bytes, loading) = (held.order.bytes_max, held.loading.is_some());
        self.tiles.insert(key, held);
        self.taken(job);
        Ok((!loading).then_some(TileLoaded { bytes, step: None }))
    }

    /// Begins to make the state that a tile starts with, or to fetch it: beside this thread, which goes on with other tiles,
    /// and in parts, of which two are in memory.
    fn begin(&self, job: JobId, load: LoadId, held: &Held, source: Option<CellSource>) -> Result<Loading, String> {
        let commands = self.own.upgrade().ok_or("the node is about to end")?;
        // One part waits while the next is made.
        let (ready, waiting) = mpsc::sync_channel(1);
        let (simulation, threads) = (held.simulation.clone(), self.hands.device.threads);
        let (tile, parts) = (held.order.tile, simulation.initial_parts(region(held.order.block())));
        let make = move || {
            let result = guarded(|| {
                for part in parts {
                    let cells = match &source {
                        None => simulation.initial(part, threads),
                        Some(source) => source(part)?,
                    };
                    if ready.send(()).is_err() {
                        // The tile is not wanted any more.
                        break;
                    }
                    let _ = commands.send(Command::Cells { job, load, tile, part, cells });
                }
                Ok(())
            });
            let _ = commands.send(Command::CellsEnd { job, load, tile, result });
        };
        let thread = std::thread::Builder::new().name("initial".into()).spawn(make);
        thread.map_err(|e| format!("no thread: {e}"))?;
        Ok(Loading { load, waiting })
    }

    /// Cells of a tile that is being made.
    fn put(&mut self, job: JobId, load: LoadId, tile: u16, part: Region, cells: &[u8]) -> Result<(), String> {
        let held = self.tiles.get_mut(&(job, tile));
        let Some(Held { tile: Some(tile), loading: Some(loading), .. }) = held else { return Ok(()) };
        if loading.load != load {
            return Ok(());
        }
        let put = tile.restore(part, cells).map_err(|e| e.to_string());
        let _ = loading.waiting.recv();
        put
    }

    /// The state that a tile starts with is whole, or cannot be had.
    fn loaded(&mut self, job: JobId, load: LoadId, tile: u16, result: Result<(), String>) {
        let Some(held) = self.tiles.get_mut(&(job, tile)) else { return };
        if held.loading.take_if(|loading| loading.load == load).is_none() {
            return;
        }
        let step = match held.order.start {
            TileStart::Checkpoint { step } => step,
            TileStart::Initial | TileStart::Continue | TileStart::Snapshot => 0,
        };
        if let Some(tile) = &mut held.tile {
            tile.resume(step.into());
        }
        let result = result.map(|()| TileLoaded { bytes: held.order.bytes_max, step: Some(step) });
        self.answer(GridInput::Loaded { job, tile, load, result });
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

    /// Makes a run, or tells the device to. It is made when the mark is reached.
    ///
    /// A tile without neighbours is told to go on before that: while the device is at one piece the next is there already, and
    /// no more than that, so that it can be stopped within two.
    fn compute(&mut self, work: &TileWork) -> Result<(TileMade, Mark), String> {
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
        Ok((making.made, tile.mark()))
    }
}

/// Starts whoever waits for devices; ends with the sender. What waits here is bounded: two runs of each tile.
fn watcher() -> Result<mpsc::Sender<(Mark, Arc<End>)>, String> {
    let (sender, marks) = mpsc::channel::<(Mark, Arc<End>)>();
    let watch = move || {
        for (mark, end) in marks {
            let result = guarded(|| mark.wait().map_err(|e| e.to_string()));
            let _ = end.set(result.map(|()| Instant::now()));
        }
    };
    std::thread::Builder::new().name("device".into()).spawn(watch).map_err(|e| format!("no thread: {e}"))?;
    Ok(sender)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
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
            // As far as the next stop; the last pass by itself, where somebody waits for its strips.
            let (alone, tail) = (!work.strips_out.is_empty(), tile.tail() as u32);
            let until = stops.peek().map_or(work.to, |stop| stop.step).min(work.to);
            let until = if alone && until == work.to && work.to - step > tail { work.to - tail } else { until };
            if alone && until == work.to && tile.left() == (work.to - step) as usize {
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
            step = until;
        }
    }

    /// Strips for the neighbours; the core sends them.
    fn pack(&mut self, tile: &mut dyn GridTile) -> Result<(), String> {
        let dtype = dtype(self.simulation.rule().costs().cell_bits);
        let mut sizes = Vec::with_capacity(self.work.strips_out.len());
        for &(link, id) in &self.work.strips_out {
            let room = tile.bytes_out(link.into()).map_err(|e| e.to_string())?;
            let mut strip = Buffer::with_room(room);
            tile.pack_into(link.into(), &mut strip).map_err(|e| e.to_string())?;
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
            // More than the job names: for whoever watches.
            None => {
                let watched = Watched::of(self.simulation);
                (watched.quantity, watched.shown)
            }
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
    let Look { totals, not_finite } = simulation.look(tile, threads)?;
    let hash = if hash { Some(tile.state_hash(threads)?) } else { None };
    let not_finite = not_finite.map(|(cell, field)| (cell.map(|at| at as u64), field as u16));
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
