//! The thread that computes tiles of simulations: it owns them, and makes the steps that the core asks for, in order.
use crate::device::Compute;
use crate::driver::DriverHandle;
use crate::residency::{Key, Residency};
use crate::submissions::Watched;
use crate::tensors::{Tensor, Tensors};
use bytes::Bytes;
use kernels::grid::any_tile::{GridTile, Mark};
use kernels::grid::simulation::Simulation;
use kernels::grid::tile::Threads;
use kernels::grid::{Link, Look, Region};
use node_core::id::{JobId, LoadId, PartId, WorkId};
use node_core::input::Input;
use node_core::work::steps::{Report, SaveKind, Stop, StopKind, TileMade, TileOrder, TileStart, TileWork};
use node_core::work::{Loaded, Made};
use partitioner::Tier;
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
        /// The order that is answered.
        load: LoadId,
        /// What it is.
        spec: Box<TileSpec>,
        /// What is computed.
        simulation: Arc<Simulation>,
        /// Gives the cells of a checkpoint, if it starts from one.
        checkpoint: Option<CellSource>,
    },
    /// Some cells that a tile starts with, made or fetched meanwhile.
    Cells {
        /// Which tile.
        key: Key,
        /// The order that they are for.
        load: LoadId,
        /// Where they are.
        part: Region,
        /// As a saved state has them.
        cells: Vec<u8>,
    },
    /// All of them came, or why not.
    CellsEnd {
        /// Which tile.
        key: Key,
        /// The order that is answered.
        load: LoadId,
        /// Why not.
        result: Result<(), String>,
    },
    /// Give a tile the cells of a snapshot among the states.
    Restore {
        /// Which tile.
        key: Key,
        /// The order that is answered.
        load: LoadId,
        /// The snapshot's step.
        step: u32,
    },
    /// Compute.
    Run {
        /// Named in the answers.
        work: WorkId,
        /// Which tile.
        key: Key,
        /// What to do.
        task: TileWork,
    },
    /// Drop a tile and its states, if it is here.
    Drop {
        /// Which tile.
        key: Key,
    },
    /// Drop all tiles of a job.
    Unload {
        /// The job.
        job: JobId,
    },
}

/// A tile as it is ordered.
pub struct TileSpec {
    /// Names it.
    pub key: Key,
    /// It is a standby of this tier.
    pub standby: Option<Tier>,
    /// What the plan allows it.
    pub bytes_max: u64,
    /// The rest of its order.
    pub order: TileOrder,
}

/// Gives the cells of a box, as a saved state has them. Blocks.
pub type CellSource = Box<dyn Fn(Region) -> Result<Vec<u8>, String> + Send>;

/// What the thread needs.
pub struct Hands {
    /// Halos.
    pub tensors: Arc<Tensors>,
    /// States that were saved.
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
    tiles: HashMap<Key, Held>,
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
    spec: Box<TileSpec>,
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
    key: Key,
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
            Command::Load { load, spec, simulation, checkpoint } => {
                let key = spec.key;
                if let Some(result) = guarded(|| self.load(load, spec, simulation, checkpoint)).transpose() {
                    self.answer_load(key, load, result);
                }
            }
            Command::Cells { key, load, part, cells } => {
                if let Err(reason) = guarded(|| self.put(key, load, part, &cells)) {
                    self.loaded(key, load, Err(reason));
                }
            }
            Command::CellsEnd { key, load, result } => self.loaded(key, load, result),
            Command::Restore { key: (job, part), load, step } => {
                let result = guarded(|| self.restore((job, part), step));
                self.hands.driver.input(Input::Loaded { job, part, load, result });
            }
            Command::Run { work, key, task } => {
                let began = Instant::now();
                match guarded(|| self.compute(work, key, &task)) {
                    Ok((mut made, mark)) if mark.is_reached() => {
                        made.compute_ns = nanos(began.elapsed());
                        self.answer_run(key, work, Ok(made));
                    }
                    Ok((made, mark)) => match self.launched((work, key, &task), began, mark, made) {
                        Ok(run) => self.pending.push_back(run),
                        Err(reason) => self.answer_run(key, work, Err(reason)),
                    },
                    Err(reason) => self.answer_run(key, work, Err(reason)),
                }
            }
            Command::Drop { key } => {
                self.hands.states.drop_part(key);
                self.drop_tiles(|held| held == key);
            }
            Command::Unload { job } => {
                self.hands.states.drop_job(job);
                self.drop_tiles(|(of, _)| of == job);
            }
        }
    }

    fn drop_tiles(&mut self, is_gone: impl Fn(Key) -> bool) {
        for (key, tile) in self.tiles.extract_if(|key, _| is_gone(*key)) {
            drop(tile);
            self.hands.driver.input(Input::CapacityChanged(self.hands.residency.resident(key, None)));
        }
    }

    /// Answers a run when it is made.
    fn finish(&self, run: Pending) {
        let Pending { key, work, before, this, last, mut made } = run;
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
        self.answer_run(key, work, result);
    }

    /// A device has a run to make, and is at it until the mark.
    fn launched(
        &mut self,
        (work, key, task): (WorkId, Key, &TileWork),
        began: Instant,
        mark: Mark,
        made: TileMade,
    ) -> Result<Pending, String> {
        let held = self.tiles.get_mut(&key).ok_or("the tile is not here")?;
        let before = held.last.take();
        let after = before.as_ref().map(|before| before.end.clone());
        let this = Launched { began, end: Arc::default(), after, answered: Arc::default() };
        let last = task.to == held.spec.order.schedule.steps;
        let watch = match &self.watch {
            Some(watch) => watch,
            None => self.watch.insert(watcher()?),
        };
        watch.send((mark, this.end.clone())).map_err(|_| "the thread that waits for devices has ended")?;
        // From here on its end is reported.
        held.last = Some(this.clone());
        Ok(Pending { key, work, before, this, last, made })
    }

    fn answer_run(&self, (job, part): Key, work: WorkId, result: Result<TileMade, String>) {
        self.hands.driver.input(Input::Ran { job, part, work, result: result.map(Made::Steps) });
    }

    /// Answers a load. What could not be loaded takes nothing.
    fn answer_load(&mut self, key: Key, load: LoadId, result: Result<Loaded, String>) {
        let Hands { residency, driver, .. } = &self.hands;
        if result.is_err() {
            let (_, offered) = residency.fail(key, load, || {});
            let dropped = self.tiles.remove(&key).map(|_| residency.resident(key, None));
            if let Some(capacity) = dropped.or(offered) {
                driver.input(Input::CapacityChanged(capacity));
            }
        }
        let (job, part) = key;
        driver.input(Input::Loaded { job, part, load, result });
    }

    /// Makes a tile. None: the state that it starts with follows.
    fn load(
        &mut self,
        load: LoadId,
        spec: Box<TileSpec>,
        simulation: Arc<Simulation>,
        checkpoint: Option<CellSource>,
    ) -> Result<Option<Loaded>, String> {
        let (key, bytes) = (spec.key, spec.bytes_max);
        self.tiles.remove(&key);
        let mut held = Held { simulation, spec, tile: None, loading: None, last: None };
        if held.spec.standby != Some(Tier::Warm) {
            held.tile = Some(held.make(&self.hands.device)?);
            held.loading = match held.spec.order.start {
                TileStart::Initial => Some(self.begin(load, &held, None)?),
                TileStart::Checkpoint { .. } => {
                    let source = checkpoint.ok_or("the checkpoint cannot be asked for")?;
                    Some(self.begin(load, &held, Some(source))?)
                }
                TileStart::Continue | TileStart::Snapshot => None,
            };
        }
        let loading = held.loading.is_some();
        self.tiles.insert(key, held);
        self.hands.driver.input(Input::CapacityChanged(self.hands.residency.resident(key, Some(bytes))));
        Ok((!loading).then_some(Loaded { bytes, step: None }))
    }

    /// Begins to make the state that a tile starts with, or to fetch it: beside this thread, which goes on with other tiles,
    /// and in parts, of which two are in memory.
    fn begin(&self, load: LoadId, held: &Held, source: Option<CellSource>) -> Result<Loading, String> {
        let commands = self.own.upgrade().ok_or("the node is about to end")?;
        // One part waits while the next is made.
        let (ready, waiting) = mpsc::sync_channel(1);
        let (simulation, threads) = (held.simulation.clone(), self.hands.device.threads);
        let (key, parts) = (held.spec.key, simulation.initial_parts(held.region()));
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
                    let _ = commands.send(Command::Cells { key, load, part, cells });
                }
                Ok(())
            });
            let _ = commands.send(Command::CellsEnd { key, load, result });
        };
        let thread = std::thread::Builder::new().name("initial".into()).spawn(make);
        thread.map_err(|e| format!("no thread: {e}"))?;
        Ok(Loading { load, waiting })
    }

    /// Cells of a tile that is being made.
    fn put(&mut self, key: Key, load: LoadId, part: Region, cells: &[u8]) -> Result<(), String> {
        let held = self.tiles.get_mut(&key);
        let Some(Held { tile: Some(tile), loading: Some(loading), .. }) = held else { return Ok(()) };
        if loading.load != load {
            return Ok(());
        }
        let put = tile.restore(part, cells).map_err(|e| e.to_string());
        let _ = loading.waiting.recv();
        put
    }

    /// The state that a tile starts with is whole, or cannot be had.
    fn loaded(&mut self, key: Key, load: LoadId, result: Result<(), String>) {
        let Some(held) = self.tiles.get_mut(&key) else { return };
        if held.loading.take_if(|loading| loading.load == load).is_none() {
            return;
        }
        let step = match held.spec.order.start {
            TileStart::Checkpoint { step } => step,
            TileStart::Initial | TileStart::Continue | TileStart::Snapshot => 0,
        };
        if let Some(tile) = &mut held.tile {
            tile.resume(step.into());
        }
        let result = result.map(|()| Loaded { bytes: held.spec.bytes_max, step: Some(step) });
        self.answer_load(key, load, result);
    }

    fn restore(&mut self, (job, part): Key, step: u32) -> Result<Loaded, String> {
        let name = StateName { job, part, step, kind: SaveKind::Snapshot };
        let cells = self.hands.states.take(&name).ok_or("the snapshot is gone")?;
        let held = self.tiles.get_mut(&(job, part)).ok_or("the tile is gone")?;
        let mut restored = match held.tile.take() {
            Some(tile) => tile,
            None => held.make(&self.hands.device)?,
        };
        restored.restore(restored.region(), &cells).map_err(|e| e.to_string())?;
        restored.resume(step.into());
        held.tile = Some(restored);
        Ok(Loaded { bytes: held.spec.bytes_max, step: Some(step) })
    }

    /// Makes a run, or gives it to the device. It is made when the mark is reached.
    ///
    /// A tile without neighbours is given the next run before that: while the device is at one piece the next is there already, and
    /// no more than that, so that it can be stopped within two.
    fn compute(&mut self, work: WorkId, key: Key, task: &TileWork) -> Result<(TileMade, Mark), String> {
        let halos: Vec<(u16, Option<Tensor>)> =
            task.halos_in.iter().map(|&(link, id)| (link, self.hands.tensors.take(id))).collect();
        let held = self.tiles.get_mut(&key).ok_or("the tile is not here")?;
        let tile = held.tile.as_mut().ok_or("the tile has no cells")?;
        let threads = match &mut self.threads {
            Some(threads) => threads,
            none => none.insert(Threads::new(self.hands.device.threads).map_err(|e| format!("no threads: {e}"))?),
        };
        if tile.steps() != u64::from(task.from) {
            return Err(format!("the tile has made {} steps, not {}", tile.steps(), task.from));
        }
        for (link, halo) in halos {
            let Some(Tensor::Halo { bytes, .. }) = halo else {
                return Err("a halo is gone before it was used".into());
            };
            let expected = tile.bytes_in(link.into()).map_err(|e| e.to_string())?;
            if expected > 0 {
                tile.unpack(link.into(), &bytes).map_err(|e| e.to_string())?;
            }
        }
        let (hands, simulation) = (&self.hands, &*held.simulation);
        let mut making = Making { work, key, task, hands, simulation, made: TileMade::default() };
        making.steps(&mut **tile, threads)?;
        Ok((making.made, tile.mark()))
    }
}

/// Starts the thread that waits for devices; it ends with the sender. What waits here is bounded: two runs of each tile.
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
    fn region(&self) -> Region {
        region(self.spec.order.block(self.spec.key.1))
    }

    fn make(&self, device: &Compute) -> Result<Box<dyn GridTile>, String> {
        let (simulation, order) = (&self.simulation, &self.spec.order);
        let depth = order.depth as usize;
        let (grid, rule) = (simulation.grid(), simulation.rule());
        let mut tile = device.tile(grid, rule, self.region(), depth).map_err(|e| e.to_string())?;
        let links: Vec<Link> = order
            .links(self.spec.key.1)
            .iter()
            .map(|link| Link { region: region(order.block(PartId(link.peer))), shift: link.shift })
            .collect();
        tile.link(&links).map_err(|e| e.to_string())?;
        Ok(tile)
    }
}

/// A run of steps as it is made.
struct Making<'a> {
    work: WorkId,
    key: Key,
    task: &'a TileWork,
    hands: &'a Hands,
    simulation: &'a Simulation,
    made: TileMade,
}

impl Making<'_> {
    fn steps(&mut self, tile: &mut dyn GridTile, threads: &mut Threads) -> Result<(), String> {
        let task = self.task;
        let (mut step, mut stops) = (task.from, task.stops.iter().peekable());
        if task.from == task.to {
            self.pack(tile)?;
        }
        loop {
            while let Some(stop) = stops.next_if(|stop| stop.step <= step) {
                self.stop(tile, threads, stop)?;
            }
            if step >= task.to {
                return Ok(());
            }
            // As far as the next stop; the last pass by itself, where neighbours wait for its halos.
            let (alone, tail) = (!task.halos_out.is_empty(), tile.tail() as u32);
            let until = stops.peek().map_or(task.to, |stop| stop.step).min(task.to);
            let until = if alone && until == task.to && task.to - step > tail { task.to - tail } else { until };
            if alone && until == task.to && tile.left() == (task.to - step) as usize {
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
                if alone && until == task.to {
                    self.pack(tile)?;
                }
            }
            step = until;
        }
    }

    /// Halos for the neighbours; the core sends them.
    fn pack(&mut self, tile: &mut dyn GridTile) -> Result<(), String> {
        let dtype = dtype(self.simulation.rule().costs().cell_bits);
        let mut sizes = Vec::with_capacity(self.task.halos_out.len());
        for &(link, id) in &self.task.halos_out {
            let room = tile.bytes_out(link.into()).map_err(|e| e.to_string())?;
            let mut halo = Buffer::with_room(room);
            tile.pack_into(link.into(), &mut halo).map_err(|e| e.to_string())?;
            if halo.is_empty() {
                // Nothing crosses there, but the neighbour waits for the step: a frame has at least one element.
                halo.resize(dtype.bytes() as usize, 0);
            }
            let bytes = halo.len() as u64;
            sizes.push(((bytes / dtype.bytes()) as u32, bytes));
            self.hands.tensors.put(id, Tensor::Halo { bytes: halo.into(), dtype });
        }
        if !sizes.is_empty() {
            let ((job, part), work) = (self.key, self.work);
            self.hands.driver.input(Input::Halos { job, part, work, sizes });
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
                let (job, part) = self.key;
                self.hands.states.put(StateName { job, part, step: stop.step, kind }, bytes);
            }
        }
        Ok(())
    }

    /// What an output shows of the tile: the values that it needs, one quantity after the other.
    fn output(&self, tile: &dyn GridTile, number: u16) -> Result<Bytes, String> {
        let outputs = self.simulation.outputs();
        let (quantity, (shown, stride)) = match outputs.get(usize::from(number)) {
            Some(output) => (output.quantity.as_str(), self.simulation.shown(output)),
            // More than the job names: for watchers.
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

/// How halos of a rule whose cells have this number of bits lie in a frame.
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
