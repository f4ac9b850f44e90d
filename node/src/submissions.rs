//! The submitter's end of simulations: their job files, what comes of them on disk, and what watchers are told.
use crate::driver::DriverHandle;
use crate::output::{Writer, render};
use crate::tiles::states::{StateName, States, Wanted};
use crate::tiles::{common, region};
use bytes::Bytes;
use checkpoints::{Checkpoint, Checkpoints};
use forces::Forces;
use kernels::grid::Region;
use kernels::grid::simulation::{Field, Mosaic, Simulation};
use node_core::id::{JobId, NodeId};
use node_core::input::{GridInput, Input};
use node_core::output::Event;
use node_core::tiles::GridEvent;
use node_core::tiles::order::{SaveKind, TileFigures};
use spec::spec;
pub use spec::work;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use transport::Endpoint;
use view::Pace;
pub use view::{View, Watched};

pub mod checkpoints;
pub mod forces;
pub mod inherited;
mod spec;
pub mod view;

/// Whole frames of an output that wait for an earlier one after a loss, in number and in bytes: then it does not come any
/// more, because who made it is gone. As long as nobody is, and the cut stays, it comes.
const FRAMES_HELD: [usize; 2] = [64, 256 << 20];
/// Jobs that are over and can still be looked at.
const OVER_KEPT: usize = 16;

/// All simulations that were submitted here.
pub struct Submissions {
    node: NodeId,
    seed: u64,
    count: AtomicU64,
    driver: DriverHandle,
    endpoint: OnceLock<Arc<Endpoint>>,
    states: Arc<States>,
    /// Where simulations of other nodes are kept that this one goes on with.
    folder: PathBuf,
    jobs: Mutex<Vec<Arc<Submission>>>,
}

/// What is wanted of a submission.
#[derive(Debug)]
pub struct Submit {
    /// What is computed.
    pub simulation: Simulation,
    /// Where outputs and checkpoints go; nowhere, if none.
    pub out: Option<PathBuf>,
    /// Go on from the last checkpoint there.
    pub resume: bool,
}

/// One simulation.
pub struct Submission {
    /// Its id.
    pub job: JobId,
    /// What is computed.
    pub simulation: Simulation,
    /// Where outputs go.
    pub out: Option<PathBuf>,
    /// Held for moments only: the thread that decides writes into it.
    told: Mutex<Told>,
    view: Mutex<Option<Arc<View>>>,
    /// The table of forces, if one is wanted. Held for moments only.
    forces: Mutex<Option<Forces>>,
    /// Held while the disk is written.
    made: Mutex<Made>,
    /// Changes when something has happened.
    changed: watch::Sender<u64>,
}

/// What comes of a simulation, as far as it is here.
#[derive(Default)]
struct Made {
    /// The cut that the parts are of.
    cut: Vec<Region>,
    /// Outputs of which some tiles are here, by output and step.
    mosaics: BTreeMap<(u16, u32), (Mosaic, BTreeSet<u16>)>,
    /// Frames that are whole and could not be written yet, or wait for earlier ones: a film's are in order.
    unwritten: BTreeMap<(u16, u32), Field>,
    /// The step of the next frame to be written, by output.
    next: BTreeMap<u16, u32>,
    writers: BTreeMap<u16, Writer>,
    checkpoints: Option<Checkpoints>,
    /// Nobody else writes into the folder while this is held.
    #[expect(dead_code, reason = "it is closed with the rest")]
    lock: Option<File>,
}

/// What is known of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// The step that it began with here.
    pub begun_at: u32,
    /// Whose it was before.
    pub inherited_from: Option<NodeId>,
    /// Steps that all tiles have made.
    pub step: u32,
    /// Steps between exchanges.
    pub depth: u32,
    /// Predicted nanoseconds of a step.
    pub step_ns: u64,
    /// Who computes what.
    pub tiles: Vec<(NodeId, Region)>,
    /// When the first step could begin, and when the last was made or the run ended.
    pub running_since: Option<Instant>,
    /// See there.
    pub computed: Option<Instant>,
    /// How fast it has been of late.
    pub pace: Pace,
    /// When it was last interrupted, and for how long at most.
    pub longest_stall: Duration,
    /// Since when, and the step beyond which it has gone on.
    stalled: Option<(Instant, u32)>,
    /// Nodes lost.
    pub losses: u32,
    /// Placed again, after a loss or under another cut.
    cut_anew: bool,
    /// The last totals, by field, in units of 2^-40, with the step.
    pub totals: Option<(u32, Vec<i128>)>,
    /// And the first.
    pub first_totals: Option<Vec<i128>>,
    /// The state hash after the last step.
    pub hash: Option<u128>,
    /// The last checkpoint on disk.
    pub checkpoint: Option<u32>,
    /// Why it waits, if it does.
    pub waiting: Option<String>,
    /// How it ended.
    pub ended: Option<Result<(), String>>,
    /// What the tiles spent.
    pub figures: Vec<TileFigures>,
}

impl Submissions {
    /// None yet. `seed` differs from life to life; `folder` is for simulations of other nodes that this one goes on with.
    pub fn new(node: NodeId, seed: u64, driver: DriverHandle, states: Arc<States>, folder: PathBuf) -> Self {
        let (count, endpoint, jobs) = (AtomicU64::new(0), OnceLock::new(), Mutex::default());
        Self { node, seed, count, driver, endpoint, states, folder, jobs }
    }

    /// How other nodes are reached.
    pub fn connect(&self, endpoint: Arc<Endpoint>) {
        let _ = self.endpoint.set(endpoint);
    }

    /// Takes a simulation on. What becomes of it is told to whoever asks for it.
    ///
    /// # Errors
    /// The folder cannot be written, there is nothing to go on from, or the job is larger than a message.
    pub fn submit(&self, wanted: Submit) -> Result<Arc<Submission>, String> {
        let Submit { simulation, out, resume } = wanted;
        let bytes = simulation.to_bytes();
        let most = node_core::limits::SIMULATION_BYTES_MAX;
        if bytes.len() > most {
            return Err(format!(
                "the job and its files have {} bytes, at most {most} are sent: make masks and patterns smaller",
                bytes.len()
            ));
        }
        let mut checkpoints = match &out {
            Some(out) => Some(Checkpoints::open(out, &simulation)?),
            None => None,
        };
        let lock = match &out {
            Some(out) => self.lock_folder(out)?,
            None => None,
        };
        let from = match (resume, &mut checkpoints) {
            (false, _) => None,
            (true, None) => return Err("to resume, say where the checkpoints are: --out DIR".into()),
            (true, Some(checkpoints)) => Some(checkpoints.newest(&simulation)?),
        };
        let steps = u32::try_from(simulation.steps()).unwrap_or(u32::MAX);
        if let Some(from) = &from
            && from.step >= steps
        {
            return Err(format!("the checkpoint is of step {}, and {steps} steps are wanted in all", from.step));
        }
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let mut hasher = blake3::Hasher::new_derive_key("meshnode 2026 grid job");
        hasher.update(&self.node.0).update(&self.seed.to_le_bytes()).update(&count.to_le_bytes());
        let job = JobId(u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().unwrap_or_default()));
        let begun_at = from.as_ref().map_or(0, |checkpoint| checkpoint.step);
        let forces = match &out {
            Some(out) => Forces::open(out, &simulation, begun_at)?,
            None => None,
        };
        let spec = spec(job, &simulation, bytes, out.is_some(), from.as_ref().map(|checkpoint| checkpoint.step));
        let made = Made { checkpoints, lock, ..Made::default() };
        let submission = Arc::new(Submission {
            job,
            simulation,
            out,
            told: Mutex::new(Told { begun_at, ..Told::default() }),
            view: Mutex::default(),
            forces: Mutex::new(forces),
            made: Mutex::new(made),
            changed: watch::channel(0).0,
        });
        let mut jobs = self.lock();
        jobs.push(submission.clone());
        while jobs.iter().filter(|job| job.told().ended.is_some()).count() > OVER_KEPT {
            let Some(oldest) = jobs.iter().position(|job| job.told().ended.is_some()) else { break };
            jobs.remove(oldest);
        }
        drop(jobs);
        self.driver.input(Input::Grid(GridInput::Submit(Box::new(spec))));
        Ok(submission)
    }

    /// Sees to it that one run at a time writes into a folder, of all that are on this machine. Nothing where folders cannot be
    /// locked.
    fn lock_folder(&self, out: &Path) -> Result<Option<File>, String> {
        let Ok(folder) = File::open(out) else { return Ok(None) };
        match folder.try_lock() {
            Ok(()) => Ok(Some(folder)),
            Err(TryLockError::Error(_)) => Ok(None),
            Err(TryLockError::WouldBlock) => {
                let same = |job: &&Arc<Submission>| {
                    let place = |path: &Path| path.canonicalize().ok();
                    job.told().ended.is_none() && job.out.as_deref().and_then(place) == place(out)
                };
                let who = match self.all().iter().find(same) {
                    Some(job) => format!("the simulation {:016x} writes", job.job.0),
                    None => "a simulation of another meshnode on this machine writes".into(),
                };
                Err(format!(
                    "{who} into {} already: end it with `meshnode cancel`, or name another folder",
                    out.display()
                ))
            }
        }
    }

    /// Ends a job.
    pub fn cancel(&self, job: JobId) {
        self.driver.input(Input::Grid(GridInput::Cancel { job }));
    }

    /// A job by its id.
    pub fn find(&self, job: JobId) -> Option<Arc<Submission>> {
        self.lock().iter().find(|known| known.job == job).cloned()
    }

    /// All of them, the oldest first.
    pub fn all(&self) -> Vec<Arc<Submission>> {
        self.lock().clone()
    }

    /// What the core told.
    #[expect(clippy::wildcard_enum_match_arm, reason = "few of many events are about simulations")]
    pub fn tell(&self, event: &Event) {
        match event {
            Event::Grid { job, event } => {
                if let GridEvent::Inherited { from, simulation, schedule } = &**event {
                    self.inherit(*job, *from, simulation, schedule);
                }
                if let Some(submission) = self.find(*job) {
                    if matches!(**event, GridEvent::Ended { .. }) {
                        // The disk is not for the thread that decides; whoever is told that it is over finds all on it.
                        let event = event.clone();
                        std::thread::spawn(move || {
                            submission.finish_forces();
                            submission.close();
                            submission.tell(&event);
                        });
                    } else {
                        submission.tell(event);
                    }
                }
            }
            Event::Lost { job, node, silent_ms } => {
                // The loss of whom it was inherited from is in it already.
                let known = self.find(*job).filter(|known| known.telling().inherited_from != Some(*node));
                if let Some(submission) = known {
                    submission.lost(Duration::from_millis(*silent_ms));
                }
            }
            _ => {}
        }
    }

    /// Fetches what an owner put aside, and does with it what it is for. Blocks.
    ///
    /// # Errors
    /// It cannot be fetched, or not be written: it may be tried again.
    pub fn collect(
        &self,
        runtime: &tokio::runtime::Handle,
        from: NodeId,
        name: StateName,
        bytes: u64,
    ) -> Result<(), String> {
        let state = if from == self.node {
            self.states.get(&name).ok_or("the state is gone")?
        } else {
            self.fetch(runtime, from, Wanted::State(name), bytes)?
        };
        match name.kind {
            SaveKind::Snapshot => {
                self.states.put(name, state);
                Ok(())
            }
            SaveKind::Checkpoint | SaveKind::Output(_) => {
                let submission = self.find(name.job).ok_or("the job is over")?;
                submission.take(name, &state)
            }
        }
    }

    /// A box of cells of a job's checkpoint, from its coordinator. Blocks.
    ///
    /// # Errors
    /// It cannot be had.
    pub fn checkpoint(
        &self,
        runtime: &tokio::runtime::Handle,
        from: NodeId,
        job: JobId,
        step: u32,
        of: (Region, u64),
    ) -> Result<Bytes, String> {
        let (start, end) = (of.0.start.map(|at| at as u64), of.0.end.map(|at| at as u64));
        let wanted = Wanted::Checkpoint { job, step, start, end };
        if from == self.node {
            return self.answer(&wanted);
        }
        self.fetch(runtime, from, wanted, of.1)
    }

    fn fetch(
        &self,
        runtime: &tokio::runtime::Handle,
        from: NodeId,
        wanted: Wanted,
        bytes: u64,
    ) -> Result<Bytes, String> {
        let endpoint = self.endpoint.get().ok_or("the node is not connected yet")?.clone();
        let most = usize::try_from(bytes).map_err(|_| "the state is larger than this machine's memory".to_owned())?;
        runtime.block_on(async move {
            let answer = endpoint.request(from.0, wanted.encode().into()).await.map_err(|e| e.to_string())?;
            answer.all(most).await.map(Bytes::from).map_err(|e| e.to_string())
        })
    }

    /// What a peer asks for.
    ///
    /// # Errors
    /// It is not here.
    pub fn answer(&self, wanted: &Wanted) -> Result<Bytes, String> {
        match wanted {
            Wanted::State(name) => self.states.get(name).ok_or_else(|| "the state is not here (any more)".into()),
            Wanted::Checkpoint { job, step, start, end } => {
                let submission = self.find(*job).ok_or("the job was not submitted here")?;
                let region = Region { start: start.map(|at| at as usize), end: end.map(|at| at as usize) };
                submission.checkpoint(*step)?.cells(region).map(Bytes::from)
            }
        }
    }

    /// Makes a checkpoint the one to resume from. Blocks.
    ///
    /// # Errors
    /// The disk.
    pub fn keep_checkpoint(&self, job: JobId, step: u32) -> Result<(), String> {
        let submission = self.find(job).ok_or("the job is over")?;
        let cut = submission.cut();
        match &mut submission.made().checkpoints {
            Some(checkpoints) => checkpoints.keep(step, &cut),
            None => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Submission>>> {
        self.jobs.lock().expect("no panics under this lock")
    }
}

impl Submission {
    /// What is known of it.
    pub fn told(&self) -> Told {
        self.telling().clone()
    }

    /// What watchers see: a step, and a quantity thinned to fit a screen.
    pub fn view(&self) -> Option<Arc<View>> {
        self.view.lock().expect("no panics under this lock").clone()
    }

    /// Wakes when something has happened.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn tell(&self, event: &GridEvent) {
        let mut told = self.telling();
        let now = Instant::now();
        match event {
            GridEvent::Placed { depth, step_ns, tiles, .. } => {
                told.tiles = tiles.iter().map(|(node, block)| (*node, region(block))).collect();
                (told.depth, told.step_ns) = (*depth, *step_ns);
                told.cut_anew |= told.running_since.is_some();
            }
            GridEvent::Inherited { .. } => {}
            GridEvent::Running { step, .. } => {
                if told.running_since.is_none() {
                    (told.running_since, told.begun_at) = (Some(now), *step);
                }
                told.waiting = None;
                told.step = *step;
                told.pace.mark(now, *step);
            }
            GridEvent::Progress { step } => {
                // What is made again is not gone on with.
                if let Some((since, _)) = told.stalled.take_if(|(_, at)| *step > *at) {
                    told.longest_stall = told.longest_stall.max(now - since);
                }
                told.step = *step;
                told.pace.mark(now, *step);
            }
            GridEvent::Report { step, report } => {
                told.first_totals.get_or_insert_with(|| report.totals.clone());
                told.totals = Some((*step, report.totals.clone()));
                if let Some(forces) = &*self.forces.lock().expect("no panics under this lock")
                    && let Some(force) = self.simulation.force_of(&report.totals)
                {
                    forces.tell(*step, &force);
                }
                if report.hash.is_some() {
                    told.hash = report.hash;
                    told.computed = Some(now);
                    told.step = *step;
                }
            }
            GridEvent::Checkpoint { step } => {
                told.checkpoint = Some(*step);
                told.waiting = None;
            }
            GridEvent::Waiting { reason } => told.waiting = Some(view::named(&self.simulation, reason.clone())),
            GridEvent::Ended { result, figures } => {
                told.computed.get_or_insert(now);
                told.ended = Some(result.clone().map_err(|reason| view::named(&self.simulation, reason)));
                told.figures.clone_from(figures);
            }
        }
        drop(told);
        self.changed.send_modify(|count| *count += 1);
    }

    /// No more forces come: what was told is on the disk when this returns.
    fn finish_forces(&self) {
        let forces = self.forces.lock().expect("no panics under this lock").take();
        if let Some(forces) = forces {
            forces.finish();
        }
    }

    /// It is over: what needs all frames is written, the rest is let go.
    fn close(&self) {
        let mut made = self.made();
        for number in 0..self.simulation.outputs().len() {
            if let Err(error) = self.write(&mut made, number as u16, true) {
                tracing::warn!("{error}");
            }
        }
        for writer in made.writers.values_mut() {
            if let Err(error) = writer.finish() {
                tracing::warn!("{error}");
            }
        }
        *made = Made::default();
    }

    /// A node is lost that has been silent for so long: what waits for it has waited since then.
    fn lost(&self, silent: Duration) {
        let mut told = self.telling();
        told.losses += 1;
        let (since, step) = (Instant::now(), told.step);
        told.stalled.get_or_insert((since.checked_sub(silent).unwrap_or(since), step));
    }

    fn cut(&self) -> Vec<Region> {
        self.telling().tiles.iter().map(|(_, region)| *region).collect()
    }

    /// A part of a checkpoint or of an output is here.
    fn take(&self, name: StateName, bytes: &Bytes) -> Result<(), String> {
        let StateName { tile, step, kind, .. } = name;
        let cut = self.cut();
        let region = *cut.get(usize::from(tile)).ok_or("the tile is none of the present cut's")?;
        let mut made = self.made();
        if made.cut != cut {
            // Parts under the same cut stay good: they would come again as they were.
            made.mosaics.clear();
            made.cut = cut;
        }
        match kind {
            SaveKind::Snapshot => Ok(()),
            SaveKind::Checkpoint => {
                if let (None, Some(out)) = (&made.checkpoints, &self.out) {
                    made.checkpoints = Some(Checkpoints::open(out, &self.simulation)?);
                }
                match &mut made.checkpoints {
                    Some(checkpoints) => checkpoints.part(step, region, bytes),
                    None => Ok(()),
                }
            }
            SaveKind::Output(number) => self.frame(&mut made, (number, step), (tile, region), bytes),
        }
    }

    /// A tile's part of a frame; when it was the last, the frame is written.
    fn frame(
        &self,
        made: &mut Made,
        key: (u16, u32),
        (tile, region): (u16, Region),
        bytes: &Bytes,
    ) -> Result<(), String> {
        if made.unwritten.contains_key(&key) {
            return self.write(made, key.0, false);
        }
        if made.next.get(&key.0).is_some_and(|next| key.1 < *next) {
            return Ok(());
        }
        let simulation = &self.simulation;
        let output = simulation.outputs().get(usize::from(key.0));
        let (quantity, shown) = match output {
            Some(output) => (output.quantity.as_str(), simulation.shown(output)),
            None => {
                let watched = Watched::of(simulation);
                (watched.quantity, watched.shown)
            }
        };
        let tiles = made.cut.len();
        let entry = match made.mosaics.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let mosaic = Mosaic::new(simulation, quantity, shown).map_err(|e| e.to_string())?;
                entry.insert((mosaic, BTreeSet::new()))
            }
        };
        let part = common(&shown.0, &region).filter(|_| !entry.1.contains(&tile));
        if let Some(part) = part {
            let values = transport::frame::to_f32(bytes);
            let needs = simulation.needs(quantity);
            let each = (values.len() / needs.len().max(1)).max(1);
            for (need, values) in needs.iter().zip(values.chunks_exact(each)) {
                entry.0.add(need, part, values).map_err(|e| e.to_string())?;
            }
        }
        entry.1.insert(tile);
        if entry.1.len() < tiles {
            return Ok(());
        }
        let Some((mosaic, _)) = made.mosaics.remove(&key) else { return Ok(()) };
        let field = mosaic.finish();
        if output.is_some() {
            made.unwritten.insert(key, field);
            return self.write(made, key.0, false);
        }
        let new = View::new(simulation, key.1, field);
        let mut view = self.view.lock().expect("no panics under this lock");
        if view.as_ref().is_none_or(|view| view.step <= new.step) {
            *view = Some(Arc::new(new));
            self.changed.send_modify(|count| *count += 1);
        }
        Ok(())
    }

    /// Writes an output's whole frames in order, as long as none is missing between them, or all of them; what cannot be
    /// written is left to be tried again.
    fn write(&self, made: &mut Made, number: u16, all: bool) -> Result<(), String> {
        let (Some(output), Some(out)) = (self.simulation.outputs().get(usize::from(number)), &self.out) else {
            return Ok(());
        };
        let every = u32::try_from(output.every).unwrap_or(u32::MAX);
        let (begun_at, undisturbed) = {
            let told = self.telling();
            (told.begun_at, told.losses == 0 && !told.cut_anew && told.inherited_from.is_none())
        };
        let first = begun_at.checked_next_multiple_of(every).unwrap_or(u32::MAX);
        loop {
            let mut whole = made.unwritten.range((number, 0)..=(number, u32::MAX));
            let Some((&(_, step), field)) = whole.next() else { return Ok(()) };
            let next = made.next.get(&number).copied().unwrap_or(first);
            let held = FRAMES_HELD[0].min(FRAMES_HELD[1] / (4 * field.values.len()).max(1));
            if step > next && !all && (undisturbed || whole.count() < held) {
                return Ok(());
            }
            let writer = match made.writers.entry(number) {
                Entry::Occupied(writer) => writer.into_mut(),
                Entry::Vacant(entry) => {
                    let writer = Writer::new(&self.simulation, output, out, begun_at.into());
                    entry.insert(writer.map_err(|e| e.to_string())?)
                }
            };
            writer.write(step.into(), field).map_err(|e| e.to_string())?;
            if u64::from(step) + output.every > self.simulation.steps() {
                // The last one: whoever is told that the run is done finds all of it.
                writer.finish().map_err(|e| e.to_string())?;
            }
            made.next.insert(number, step.saturating_add(every));
            made.unwritten.remove(&(number, step));
        }
    }

    /// What watchers see, as a picture: a PNG file.
    pub fn picture(&self) -> Option<(u32, Vec<u8>)> {
        let view = self.view()?;
        Some((view.step, Watched::of(&self.simulation).painter(&self.simulation).paint(&view.field, None).png()))
    }

    /// The same for a terminal of so many columns and lines.
    pub fn text(&self, columns: usize, lines: usize) -> Option<(u32, String)> {
        let view = self.view()?;
        let painter = Watched::of(&self.simulation).painter(&self.simulation);
        Some((view.step, render(&painter, &view.field, columns, lines)))
    }

    fn checkpoint(&self, step: u32) -> Result<Checkpoint, String> {
        let out = self.out.as_deref().ok_or("this job has no checkpoints")?;
        Checkpoint::open(out, step, &self.simulation)
    }

    fn telling(&self) -> MutexGuard<'_, Told> {
        self.told.lock().expect("no panics under this lock")
    }

    fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().expect("no panics under this lock")
    }
}

/// The parts of checkpoints by where their cells are.
pub type Parts = HashMap<String, [u8; 32]>;

/// What `--out` may name: an existing folder, or one that can be made.
///
/// # Errors
/// It is neither.
pub fn folder(out: &Path) -> Result<(), String> {
    std::fs::create_dir_all(out)
        .map_err(|e| format!("cannot write into {}: {e}; name a folder that can be written, with --out", out.display()))
}
