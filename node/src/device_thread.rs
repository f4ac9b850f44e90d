//! The thread that computes on one device: it owns every part there, stages and tiles, and the compute threads that they
//! share. The devices of a node compute beside each other.
//!
//! Commands arrive on one queue (`device_thread/queue.rs`). While a GPU computes for one part, the next command is
//! carried out (`device_thread/pending.rs`). `device_thread/stages.rs` and `tiles.rs` have what is specific to a kind
//! of part.
use crate::device::Compute;
use crate::panics::guarded;
use crate::residency::Key;
use command::{Command, Commands, NewPart};
use constraints::Constraints;
use kernels::boundary::Codec;
use kernels::threads::Threads;
use kernels_grids::any_tile::Mark;
use kernels_models::stage::RowsOut;
use node_core::id::{Epoch, LoadId, WorkId};
use node_core::input::Input;
use node_core::limits::PAGE_POSITIONS;
use node_core::work::serve::Item;
use node_core::work::steps::TileStart;
use node_core::work::{Loaded, Run, RunResult, Task};
use partitioner::{Room, Tier};
use pending::{Begun, Pending, PendingWork, Watcher, nanos};
use queue::{Queue, Work};
use shared::Shared;
use stages::Inputs;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tiles::{Progress, TileRun};

pub(crate) mod command;
mod constraints;
mod pending;
mod queue;
pub(crate) mod shared;
mod stages;
pub(crate) mod tiles;

#[cfg(test)]
mod tests;

/// Starts the thread. It ends when the last sender is dropped.
///
/// # Errors
/// The operating system cannot start a thread.
pub(crate) fn spawn(shared: Shared) -> std::io::Result<(Commands, JoinHandle<()>)> {
    let (sender, commands) = mpsc::channel();
    let sender = Arc::new(sender);
    let thread = DeviceThread {
        parts: HashMap::new(),
        threads: None,
        queue: Queue::default(),
        pending: VecDeque::new(),
        watcher: Watcher::new(Arc::downgrade(&sender)),
        batch_at: None,
        batch_ended: None,
        own: Arc::downgrade(&sender),
        shared,
    };
    let thread = std::thread::Builder::new().name("device".into()).spawn(move || thread.run(&commands))?;
    Ok((sender, thread))
}

struct DeviceThread {
    parts: HashMap<Key, Part>,
    /// Started with the first work.
    threads: Option<Threads>,
    queue: Queue,
    /// Work that a device is computing, in launch order: at most one run per part, because the core waits for each
    /// answer. Whatever is due first is answered first: a batch does not wait for the end of a tile's run.
    pending: VecDeque<Pending>,
    watcher: Watcher,
    /// When a batch of a stage was last submitted or answered.
    batch_at: Option<Instant>,
    /// When a batch of a stage was last computed.
    batch_ended: Option<Instant>,
    /// For the threads that compute or fetch initial states.
    own: Weak<mpsc::Sender<Command>>,
    shared: Shared,
}

enum Part {
    Stage(Box<stages::LoadedStage>),
    Tile(Box<tiles::LoadedTile>),
}

/// A stage takes at most this multiple of its cache on the device as RAM for it: other stages need some, too.
const SPILL_OF_STAGE: u64 = 8;

/// A model counts as in use for this long after a batch. Meanwhile tile runs let batches pass every
/// [`node_core::limits::TILE_PIECE`].
const IN_USE: Duration = Duration::from_secs(2);

/// Target of the log events that say how long rows waited on this node for their stage: `MESHNODE_LOG=handover=trace`.
const HANDOVER: &str = "handover";

/// Target of the log events that say how long a device computes each batch of a stage: `MESHNODE_LOG=batches=trace`.
const BATCHES: &str = "batches";

impl DeviceThread {
    fn run(mut self, commands: &mpsc::Receiver<Command>) {
        loop {
            // Drain the channel before choosing the next command.
            loop {
                let idle = self.queue.is_empty() && !self.pending.iter().any(Pending::is_due);
                match if idle { commands.recv().map_err(Into::into) } else { commands.try_recv() } {
                    Ok(Command::MarkReached) => {}
                    Ok(command) => self.queue.push(command),
                    Err(mpsc::TryRecvError::Empty) => break,
                    Err(mpsc::TryRecvError::Disconnected) => return,
                }
            }
            // While a device computes for one part, launch work of another; then answer the first that is due.
            let launched = self.pending.len();
            match self.queue.next() {
                Some(Work::Command(command)) => self.carry_out(command),
                Some(Work::Rest(run)) => self.steps(*run),
                None => {}
            }
            let due = self.pending.iter().take(launched).position(Pending::is_due);
            if let Some(due) = due.and_then(|at| self.pending.remove(at)) {
                self.finish(due);
            }
        }
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Load { key, epoch, load, bytes_max, part } => {
                self.settle(|held| held == key);
                let loaded = guarded(|| self.load((key, epoch, load), bytes_max, part));
                if let Some(result) = loaded.transpose() {
                    self.answer_load(key, load, result);
                }
            }
            Command::Cells { key, load, part, cells } => {
                let put = guarded(|| self.tile(key).map_or(Ok(()), |tile| tile.put(load, part, &cells)));
                if let Err(reason) = put {
                    self.cells_end(key, load, Err(reason));
                }
            }
            Command::CellsEnd { key, load, result } => self.cells_end(key, load, result),
            Command::Restore { key: (job, part), load, step } => {
                let result = guarded(|| self.restore((job, part), step));
                self.shared.driver.input(Input::Loaded { job, part, load, result });
            }
            Command::Keep { key, epoch, rows } => {
                self.settle(|held| held == key);
                if let Some(Part::Stage(held)) = self.parts.get_mut(&key) {
                    held.keep(epoch, rows);
                }
            }
            Command::Run(run) => {
                let Run { work, job, epoch, part, device: _, task } = *run;
                let key = (job, part);
                match task {
                    Task::Batch(items) => self.batch(work, key, epoch, items),
                    Task::Steps(task) => self.steps(TileRun::new(work, key, task, &self.shared.tensors)),
                }
            }
            Command::Release { key, request } => {
                self.settle(|held| held == key);
                // A broken stage reports its error at its next batch.
                if let Some(Part::Stage(held)) = self.parts.get_mut(&key) {
                    let _ = catch_unwind(AssertUnwindSafe(|| held.release(request.0)));
                }
            }
            Command::Fork { key, from, to, positions } => {
                self.settle(|held| held == key);
                if let Some(Part::Stage(held)) = self.parts.get_mut(&key) {
                    let forked = guarded(|| {
                        held.stage.share(from.0, to.0, positions as usize).map_err(|error| error.to_string())
                    });
                    if let Err(error) = forked {
                        // The next batch of the request reports the missing positions.
                        tracing::error!("job {:016x} part {}: {error}", key.0.0, key.1);
                    }
                }
            }
            Command::Challenge { key: (job, part), epoch, nonce } => {
                self.settle(|held| held == (job, part));
                let result = guarded(|| {
                    let (held, threads) = self.stage((job, part))?;
                    stages::challenge(held.of(epoch)?, threads, nonce)
                });
                self.shared.driver.input(Input::Challenged { job, epoch, part, nonce, result });
            }
            Command::Drop { key } => {
                self.shared.states.drop_part(key);
                self.drop_parts(|held| held == key);
            }
            Command::Vacate { key } => self.drop_parts(|held| held == key),
            Command::Unload { job, alone } => {
                if alone {
                    self.shared.states.drop_job(job);
                } else {
                    let held = self.parts.keys().filter(|(of, _)| *of == job);
                    held.for_each(|key| self.shared.states.drop_part(*key));
                }
                self.drop_parts(|(of, _)| of == job);
            }
            Command::MarkReached => {}
        }
    }

    /// Holds a part. `None`: the initial state of a tile follows.
    fn load(
        &mut self,
        (key, epoch, load): (Key, Epoch, LoadId),
        bytes_max: u64,
        part: NewPart,
    ) -> Result<Option<Loaded>, String> {
        self.parts.remove(&key);
        let (mut ram_pages, mut experts) = (0, 0);
        let (part, bytes, is_loading) = match part {
            NewPart::Stage { mut stage, file, rows, ram } => {
                experts = ram;
                stage.encode_rows(rows);
                let now = stage.resident_bytes();
                let constraints = Constraints::new(file);
                let spill = self.shared.device.spill(SPILL_OF_STAGE.saturating_mul(now.working));
                let pages = stage.use_ram(spill.bytes) / PAGE_POSITIONS as usize;
                ram_pages = u32::try_from(pages).unwrap_or(u32::MAX);
                let held = Box::new(stages::LoadedStage { epoch, stage, rows, constraints, _spill: spill });
                (Part::Stage(held), bytes_max.max(now.weights + now.working), false)
            }
            NewPart::Tile { order, standby, simulation, checkpoint } => {
                let mut held = Box::new(tiles::LoadedTile::new((key, bytes_max), *order, simulation));
                let commands = || self.own.upgrade().ok_or("the node is shutting down");
                if standby != Some(Tier::Warm) {
                    held.make(&self.shared.device)?;
                    match held.order.start {
                        TileStart::Initial => held.begin(load, None, commands()?, self.shared.device.threads)?,
                        TileStart::Checkpoint { .. } => {
                            let source = Some(checkpoint.ok_or("there is no source for the checkpoint's cells")?);
                            held.begin(load, source, commands()?, self.shared.device.threads)?;
                        }
                        TileStart::Continue | TileStart::Snapshot => {}
                    }
                }
                let is_loading = held.is_loading();
                (Part::Tile(held), bytes_max, is_loading)
            }
        };
        self.parts.insert(key, part);
        // Report the capacity before the answer: a plan computed once the job is ready must count this part's memory.
        let room = Room { memory: bytes, ram: experts };
        self.shared.residency.loaded(self.shared.device.index, key, load, room);
        Ok((!is_loading).then_some(Loaded { bytes, ram: experts, ram_pages, step: None }))
    }

    /// The initial state of a tile is complete, or failed.
    fn cells_end(&mut self, key: Key, load: LoadId, result: Result<(), String>) {
        if let Some(loaded) = self.tile(key).and_then(|tile| tile.started(load)) {
            self.answer_load(key, load, result.map(|()| loaded));
        }
    }

    fn restore(&mut self, (job, part): Key, step: u32) -> Result<Loaded, String> {
        let cells = tiles::snapshot(&self.shared.states, (job, part), step)?;
        match self.parts.get_mut(&(job, part)) {
            Some(Part::Tile(held)) => held.restore(&self.shared.device, &cells, step),
            Some(Part::Stage(_)) | None => Err("the tile is not loaded".into()),
        }
    }

    /// Answers a load. A part that failed to load takes no memory.
    fn answer_load(&mut self, key: Key, load: LoadId, result: Result<Loaded, String>) {
        let Shared { residency, driver, .. } = &self.shared;
        if result.is_err() {
            self.shared.suspect();
            if self.parts.remove(&key).is_some() {
                residency.dropped(self.shared.device.index, key);
            }
            residency.fail(key, load, || {});
        }
        let (job, part) = key;
        driver.input(Input::Loaded { job, part, load, result });
    }

    fn drop_parts(&mut self, is_gone: impl Fn(Key) -> bool) {
        self.settle(&is_gone);
        for (key, part) in self.parts.extract_if(|key, _| is_gone(*key)) {
            drop(part);
            self.shared.residency.dropped(self.shared.device.index, key);
        }
    }

    /// Submits a batch to a stage, and answers it if it is already computed.
    fn batch(&mut self, work: WorkId, key: Key, epoch: Epoch, items: Vec<Item>) {
        self.settle(|held| held == key);
        self.batch_at = Some(Instant::now());
        if tracing::enabled!(target: HANDOVER, tracing::Level::TRACE) {
            for age in items.iter().filter_map(|item| stages::age(&self.shared.tensors, item)) {
                tracing::trace!(target: HANDOVER, us = age.as_micros() as u64, "rows for part {} of a job", key.1);
            }
        }
        let mut inputs = Inputs::default();
        let began = self.watcher.begun();
        // A panic must not end the node: the stage is reported as failed and loaded again.
        let submitted = guarded(|| {
            inputs = Inputs::new(stages::rows_of(&self.shared.tensors, &items));
            let (held, threads) = self.stage(key)?;
            stages::submit(held.of(epoch)?, threads, &items, &mut inputs)
        });
        match submitted {
            Ok(None) => {
                self.pending.push_back(Pending { key, work, what: PendingWork::Batch { items, inputs, began } })
            }
            Ok(Some(outputs)) => self.answer_batch((key, work), began, &items, Ok(outputs)),
            Err(reason) => self.answer_batch((key, work), began, &items, Err(reason)),
        }
    }

    fn answer_batch(
        &mut self,
        (key, work): (Key, WorkId),
        began: Begun,
        items: &[Item],
        outputs: Result<Vec<RowsOut>, String>,
    ) {
        let codec = match self.parts.get(&key) {
            Some(Part::Stage(held)) => held.rows,
            Some(Part::Tile(_)) | None => Codec::Lossless,
        };
        let results = outputs.map(|outputs| stages::results(&self.shared.tensors, items, outputs, codec));
        let compute_ns = began.compute_ns(self.batch_ended);
        if tracing::enabled!(target: BATCHES, tracing::Level::TRACE) {
            let rows: Vec<(u32, u32)> = items.iter().map(|item| (item.position, item.count)).collect();
            tracing::trace!(target: BATCHES, us = compute_ns / 1000, "part {} of a job, (position, rows): {rows:?}", key.1);
        }
        self.batch_at = Some(Instant::now());
        self.batch_ended = self.batch_at;
        self.answer(key, work, results.map(|results| RunResult::Batch { results, compute_ns }));
    }

    /// Computes steps of a tile, or launches them on the device. While a model is in use, a batch may run in between.
    fn steps(&mut self, mut run: TileRun) {
        let yields = self.batch_at.is_some_and(|at| at.elapsed() < IN_USE);
        let began = Instant::now();
        let progress = guarded(|| {
            let threads = threads(&mut self.threads, &self.shared.device)?;
            match self.parts.get_mut(&run.key) {
                Some(Part::Tile(held)) => held.advance(&mut run, threads, &self.shared, yields),
                Some(Part::Stage(_)) | None => Err("the tile is not loaded".into()),
            }
        });
        run.took += began.elapsed();
        let (key, work) = (run.key, run.work);
        match progress {
            Ok(Progress::Yields) => self.queue.push_rest(run),
            Ok(Progress::Given(mark)) if mark.is_reached() => {
                run.made.compute_ns = nanos(run.took);
                self.answer(key, work, Ok(RunResult::Steps(run.made)));
            }
            Ok(Progress::Given(mark)) => match self.launched(run, began, mark) {
                Ok(pending) => self.pending.push_back(pending),
                Err(reason) => self.answer(key, work, Err(reason)),
            },
            Err(reason) => self.answer(key, work, Err(reason)),
        }
    }

    /// Registers a run that the device has not completed before `mark`.
    fn launched(&mut self, run: TileRun, began: Instant, mark: Mark) -> Result<Pending, String> {
        let TileRun { key, work, task, made, .. } = run;
        let Some(Part::Tile(held)) = self.parts.get_mut(&key) else { return Err("the tile is not loaded".into()) };
        let (before, this) = self.watcher.watch(&mut held.last, began, mark)?;
        let last = task.to == held.order.schedule.steps;
        Ok(Pending { key, work, what: PendingWork::Steps { before, this, last, made } })
    }

    /// Answers launched work; waits for it if it is a batch.
    fn finish(&mut self, pending: Pending) {
        let Pending { key, work, what } = pending;
        match what {
            PendingWork::Batch { items, inputs, began } => {
                let outputs = guarded(|| {
                    let (held, threads) = self.stage(key)?;
                    stages::finish(&mut *held.stage, threads, &items, &inputs)
                });
                self.answer_batch((key, work), began, &items, outputs);
            }
            PendingWork::Steps { before, this, last, made } => {
                let result = this.made(before.as_ref(), last, made);
                this.answered();
                self.answer(key, work, result.map(RunResult::Steps));
            }
        }
    }

    /// Finishes pending batches of the stages that `of` selects: a stage accepts no other call until then.
    fn settle(&mut self, of: impl Fn(Key) -> bool) {
        let at = |pending: &Pending| pending.is_batch() && of(pending.key);
        while let Some(batch) = self.pending.iter().position(at).and_then(|at| self.pending.remove(at)) {
            self.finish(batch);
        }
    }

    fn answer(&self, (job, part): Key, work: WorkId, result: Result<RunResult, String>) {
        if result.is_err() {
            self.shared.suspect();
        }
        self.shared.driver.input(Input::Ran { job, part, work, result });
    }

    /// The stage of a key, and the compute threads.
    fn stage(&mut self, key: Key) -> Result<(&mut stages::LoadedStage, &mut Threads), String> {
        match self.parts.get_mut(&key) {
            Some(Part::Stage(held)) => Ok((held, threads(&mut self.threads, &self.shared.device)?)),
            Some(Part::Tile(_)) | None => Err("this stage of the job is not loaded".into()),
        }
    }

    fn tile(&mut self, key: Key) -> Option<&mut tiles::LoadedTile> {
        match self.parts.get_mut(&key) {
            Some(Part::Tile(held)) => Some(held),
            Some(Part::Stage(_)) | None => None,
        }
    }
}

/// The node's compute threads; starts them on first use.
fn threads<'a>(threads: &'a mut Option<Threads>, device: &Compute) -> Result<&'a mut Threads, String> {
    match threads {
        Some(threads) => Ok(threads),
        none => Ok(none
            .insert(Threads::new(device.threads).map_err(|e| format!("compute threads could not be started: {e}"))?)),
    }
}
