//! Simulations on the node they were submitted to: their job files, outputs and checkpoints on disk, and live views.
use crate::bulk::{BulkRequest, GridRequest};
use crate::driver::queue::DriverHandle;
use crate::hub::EventRouter;
use crate::panics::answered;
use crate::states::{StateName, States};
use bytes::Bytes;
use checkpoints::Checkpoints;
use forces::Forces;
use kernels_grids::Region;
use kernels_simulations::Simulation;
use ledger::Ledger;
use node_core::id::{ContentId, JobId, NodeId};
use node_core::input::Input;
use node_core::output::Event;
use node_core::work::steps::SaveKind;
use node_core::work::{Ending, Inherited, JobSpec};
use parking_lot::{Mutex, MutexGuard};
use run_folder::{Existing, Opened};
use spec::{content_id, spec};
use std::collections::HashMap;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use submission::{Progress, Results, Submission};
use tokio::sync::watch;
use transport::{Endpoint, Reply};

pub(crate) mod answers;
pub(crate) mod checkpoints;
mod files;
pub(crate) mod forces;
pub(crate) mod inherited;
mod ledger;
pub(crate) mod look;
pub(crate) mod report;
pub(crate) mod run_folder;
mod simulations;
pub(crate) mod spec;
pub(crate) mod submission;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
pub(crate) mod view;

/// Most ended jobs that stay available for queries.
const OVER_KEPT: usize = 16;
/// Most bytes of their packed simulations together: as much as one of the largest.
const OVER_BYTES: u64 = node_core::limits::SIMULATION_BYTES_MAX;
/// Longest wait for the next block from a member.
const BLOCK_MAX: Duration = Duration::from_secs(20);
/// Bytes per block of a packed simulation.
const PACKED_BLOCK: usize = 256 << 10;

/// All simulations submitted to this node.
pub(crate) struct Submissions {
    node: NodeId,
    seed: u64,
    count: AtomicU64,
    driver: DriverHandle,
    hub: Arc<EventRouter>,
    endpoint: OnceLock<Arc<Endpoint>>,
    states: Arc<States>,
    /// Folder for simulations that this node takes over from other coordinators.
    folder: PathBuf,
    jobs: Mutex<Vec<Arc<Submission>>>,
    ledger: Ledger,
    /// Simulations of the tiles on this node, by job.
    held: Mutex<HashMap<JobId, (ContentId, Arc<Simulation>)>>,
    /// One lock per content, held during a fetch, so that each simulation is fetched once.
    fetching: Mutex<HashMap<ContentId, Arc<Mutex<()>>>>,
}

/// A submission.
#[derive(Debug)]
pub(crate) struct Submit {
    /// The simulation to compute.
    pub simulation: Simulation,
    /// Folder for outputs and checkpoints; if `None`, nothing is written.
    pub out: Option<PathBuf>,
    /// What to do with a run that the folder already holds.
    pub existing: Existing,
}

impl Submissions {
    /// Without submissions. `seed` must differ between runs of the node; `folder` is for simulations taken over from
    /// other nodes.
    pub(crate) fn new(
        node: NodeId,
        seed: u64,
        (driver, hub): (DriverHandle, Arc<EventRouter>),
        states: Arc<States>,
        folder: PathBuf,
    ) -> Self {
        let (count, endpoint, jobs) = (AtomicU64::new(0), OnceLock::new(), Mutex::default());
        let (held, fetching, ledger) = (Mutex::default(), Mutex::default(), Ledger::open(&folder));
        Self { node, seed, count, driver, hub, endpoint, states, folder, jobs, ledger, held, fetching }
    }

    /// Sets the endpoint that reaches other nodes.
    pub(crate) fn connect(&self, endpoint: Arc<Endpoint>) {
        let _ = self.endpoint.set(endpoint);
    }

    /// Accepts a simulation, whose events the caller then polls. Blocks.
    ///
    /// # Errors
    /// The folder cannot be written, or must not be replaced; there is no checkpoint to resume from; the job is too
    /// large.
    pub(crate) fn submit(&self, submit: Submit) -> Result<Arc<Submission>, String> {
        let Submit { simulation, out, existing } = submit;
        let (id, most) = (content_id(&simulation), node_core::limits::SIMULATION_BYTES_MAX);
        if id.bytes > most {
            return Err(format!(
                "the job and its files have {} bytes; at most {most} can be sent: make masks and patterns smaller",
                id.bytes
            ));
        }
        if existing == Existing::Resume && out.is_none() {
            return Err("to resume, name the folder of the checkpoints: --out DIR".into());
        }
        let job = self.new_job_id();
        let (mut folder, mut checkpoints, mut from) = (None, None, None);
        if let Some(out) = &out {
            let opened = Opened::new(out, existing, |out| self.lock_folder(out))?;
            let mut all = Checkpoints::open(out, &simulation)?;
            if existing == Existing::Resume {
                let (step, steps) = (all.newest(&simulation)?.step, simulation.steps());
                if u64::from(step) >= steps {
                    return Err(format!(
                        "the checkpoint is of step {step}, and the job has {steps} steps: to continue, raise `steps` in the job"
                    ));
                }
                from = Some(step);
            }
            (folder, checkpoints) = (Some(opened.begin(&simulation, job)?), Some(all));
        }
        let begun_at = from.unwrap_or(0);
        let forces = match &out {
            None => None,
            Some(out) => match Forces::open(out, &simulation, begun_at) {
                Ok(forces) => forces,
                Err(error) => {
                    if let Some(folder) = folder {
                        folder.finish(begun_at, false);
                    }
                    return Err(error);
                }
            },
        };
        let spec = spec(job, &simulation, id, out.is_some(), from);
        let results = Results { checkpoints, folder, ..Results::default() };
        let told = Progress { begun_at, step: begun_at, checkpoint: from, ..Progress::default() };
        let submission = Arc::new(Submission {
            job,
            simulation: Arc::new(simulation),
            id,
            out,
            told: Mutex::new(told),
            view: Mutex::default(),
            forces: Mutex::new(forces),
            results: Mutex::new(results),
            changed: watch::channel(0).0,
        });
        let mut jobs = self.lock();
        jobs.push(submission.clone());
        forget_old(&mut jobs);
        drop(jobs);
        self.ledger.add(&submission);
        // Results arrive as events of the job, so the call needs no answer.
        let call = self.hub.call();
        self.driver.input(Input::Start { call, job: Box::new(JobSpec::Steps(spec)) });
        self.driver.input(Input::Cancel { call });
        Ok(submission)
    }

    fn new_job_id(&self) -> JobId {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let mut hasher = blake3::Hasher::new_derive_key("meshnode 2026 grid job");
        hasher.update(&self.node.0).update(&self.seed.to_le_bytes()).update(&count.to_le_bytes());
        JobId(u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().unwrap_or_default()))
    }

    /// Locks a folder, so that only one run on this machine writes into it. `None` if the file system has no locks.
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
                    Some(job) => format!("the simulation {:016x} already writes", job.job.0),
                    None => "a simulation of another meshnode on this machine already writes".into(),
                };
                Err(format!("{who} into {}: end it with `meshnode cancel`, or name another folder", out.display()))
            }
        }
    }

    /// Ends a job.
    pub(crate) fn cancel(&self, job: JobId) {
        self.driver.input(Input::End { job });
    }

    /// A job by its id.
    pub(crate) fn find(&self, job: JobId) -> Option<Arc<Submission>> {
        self.lock().iter().find(|known| known.job == job).cloned()
    }

    /// All jobs, oldest first.
    pub(crate) fn all(&self) -> Vec<Arc<Submission>> {
        self.lock().clone()
    }

    /// Handles an event of the core.
    #[expect(clippy::wildcard_enum_match_arm, reason = "only a few events are about simulations")]
    pub(crate) fn handle_event(self: &Arc<Self>, event: &Event) {
        match event {
            Event::JobInherited { job, from, inherited } => match &**inherited {
                Inherited::Steps { simulation, schedule } => self.inherit(*job, *from, *simulation, schedule),
                Inherited::Serve { .. } => {}
            },
            Event::JobPlaced { job, .. }
            | Event::JobReady { job, .. }
            | Event::JobDegraded { job, .. }
            | Event::Steps { job, .. } => {
                if let Some(submission) = self.find(*job) {
                    submission.handle_event(event);
                }
            }
            Event::JobEnded { job, ending, .. } => {
                if let Some(submission) = self.find(*job) {
                    self.end(submission, event.clone(), ending);
                }
            }
            Event::Lost { job, node, silent_ms } => {
                // If the job was inherited, the loss of its previous coordinator is already counted.
                let known = self.find(*job).filter(|known| known.telling().inherited_from != Some(*node));
                if let Some(submission) = known {
                    submission.lost(Duration::from_millis(*silent_ms));
                }
            }
            _ => {}
        }
    }

    /// Ends a simulation on this node. Disk writes run on another thread; everything is on disk before the end is
    /// visible.
    fn end(self: &Arc<Self>, submission: Arc<Submission>, event: Event, ending: &Ending) {
        let (job, submissions, completed) = (submission.job, self.clone(), *ending == Ending::Completed);
        if matches!(ending, Ending::Moved(_)) {
            submission.telling().moved = true;
        }
        std::thread::spawn(move || {
            let finish = || {
                submission.finish_forces();
                submission.close(completed);
                event
            };
            let failed = |why| Event::JobEnded { job, ending: Ending::Failed(why), figures: Vec::new() };
            submission.handle_event(&answered(finish, failed));
            if !submission.moved() {
                submissions.ledger.remove(&submission);
            }
        });
    }

    /// Fetches what an owner saved and stores it according to its kind. Blocks.
    ///
    /// # Errors
    /// It cannot be fetched or written; the call may be repeated.
    pub(crate) fn collect(
        &self,
        runtime: &tokio::runtime::Handle,
        from: NodeId,
        name: StateName,
        bytes: u64,
    ) -> Result<(), String> {
        match name.kind {
            SaveKind::Snapshot => {
                // The core has bounded the size by that of the tile.
                let state = self.whole(runtime, from, GridRequest::State(name), bytes)?;
                self.states.put(name, state);
                Ok(())
            }
            SaveKind::Checkpoint => {
                let submission = self.find(name.job).ok_or("the job has ended")?;
                let Some(mut part) = submission.begin_part(name)? else { return Ok(()) };
                self.stream(runtime, from, GridRequest::State(name), |block| part.write(block))?;
                submission.add_part(part.complete()?);
                Ok(())
            }
            SaveKind::Output(_) => {
                let submission = self.find(name.job).ok_or("the job has ended")?;
                let most = submission.frame_bytes(name)?;
                let state = self.whole(runtime, from, GridRequest::State(name), most)?;
                submission.take(name, &state)
            }
        }
    }

    /// Fetches the cells of a box of a job's checkpoint from its coordinator. Blocks.
    ///
    /// # Errors
    /// They cannot be fetched, or their size is wrong.
    pub(crate) fn checkpoint(
        &self,
        runtime: &tokio::runtime::Handle,
        from: NodeId,
        (job, step): (JobId, u32),
        region: Region,
    ) -> Result<Vec<u8>, String> {
        let held = self.held.lock().get(&job).map(|(_, held)| held.clone());
        let held = held.ok_or("the tile is no longer requested")?;
        let bytes = checkpoints::bytes(&held, region);
        let mut cells = Vec::with_capacity(usize::try_from(bytes).map_err(|e| e.to_string())?);
        let request = GridRequest::checkpoint(job, step, region);
        self.stream(runtime, from, request, |block| {
            if (cells.len() + block.len()) as u64 > bytes {
                return Err(format!("expected {bytes} bytes of {region:?}, received more"));
            }
            cells.extend_from_slice(block);
            Ok(())
        })?;
        match cells.len() as u64 == bytes {
            true => Ok(cells),
            false => Err(format!("expected {bytes} bytes of {region:?}, received {}", cells.len())),
        }
    }

    /// A whole response of at most `most` bytes, from a member or from this node.
    fn whole(
        &self,
        runtime: &tokio::runtime::Handle,
        from: NodeId,
        request: GridRequest,
        most: u64,
    ) -> Result<Bytes, String> {
        if let (true, GridRequest::State(name)) = (from == self.node, &request) {
            return self.states.get(name).ok_or_else(|| "the saved state is no longer stored".into());
        }
        let mut all = Vec::with_capacity(usize::try_from(most).map_err(|e| e.to_string())?);
        self.stream(runtime, from, request, |block| {
            if (all.len() + block.len()) as u64 > most {
                return Err(format!("expected a response of at most {most} bytes, received more"));
            }
            all.extend_from_slice(block);
            Ok(())
        })?;
        Ok(all.into())
    }

    /// Receives a response block by block, from a member or from this node.
    fn stream(
        &self,
        runtime: &tokio::runtime::Handle,
        from: NodeId,
        request: GridRequest,
        mut each: impl FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        if from == self.node {
            let mut taken = Ok(());
            self.give(&request, &mut |block| {
                taken = each(&block);
                taken.is_ok()
            })?;
            return taken;
        }
        let endpoint = self.endpoint.get().ok_or("the node is not connected yet")?.clone();
        let request = BulkRequest::Grid(request).encode().into();
        let late = |_| format!("no data for {BLOCK_MAX:?}");
        runtime.block_on(async move {
            let asked = tokio::time::timeout(BLOCK_MAX, endpoint.request(from.0, request)).await.map_err(late)?;
            let mut answer = asked.map_err(|e| e.to_string())?;
            loop {
                let block = tokio::time::timeout(BLOCK_MAX, answer.block()).await.map_err(late)?;
                match block.map_err(|e| e.to_string())? {
                    Some(block) => each(&block)?,
                    None => return Ok(()),
                }
            }
        })
    }

    /// Answers a member's request block by block. Blocks.
    pub(crate) fn answer(&self, request: &GridRequest, reply: Reply) {
        let given = self.give(request, &mut |block| reply.blocking_send(block));
        match given {
            Ok(()) => reply.finish(),
            Err(why) => reply.fail(why),
        }
    }

    /// Produces a response block by block, until `each` returns false.
    fn give(&self, request: &GridRequest, each: &mut dyn FnMut(Bytes) -> bool) -> Result<(), String> {
        match request {
            GridRequest::State(name) => {
                let state = self.states.get(name).ok_or("this node has no such saved state")?;
                each(state);
                Ok(())
            }
            GridRequest::Checkpoint { job, step, start, end } => {
                let submission = self.find(*job).ok_or("the job was not submitted here")?;
                let region = Region { start: start.map(|at| at as usize), end: end.map(|at| at as usize) };
                submission.checkpoint(*step)?.read(region, each)
            }
            GridRequest::Look(look) => {
                each(self.show(look)?);
                Ok(())
            }
            GridRequest::Simulation(content) => {
                let simulation = self.simulation_of(*content).ok_or("this node does not have the simulation")?;
                simulation.pack(&mut |part| part.chunks(PACKED_BLOCK).all(|block| each(Bytes::copy_from_slice(block))));
                Ok(())
            }
        }
    }

    /// Makes a complete checkpoint the one to resume from. Blocks.
    ///
    /// # Errors
    /// A disk error, or a missing part.
    pub(crate) fn keep_checkpoint(&self, job: JobId, step: u32) -> Result<(), String> {
        let submission = self.find(job).ok_or("the job has ended")?;
        let cut = submission.cut();
        let mut results = submission.results();
        match &mut results.checkpoints {
            Some(checkpoints) => checkpoints.complete(step, &cut)?,
            None => return Ok(()),
        }
        if let Some(folder) = &results.folder {
            folder.has_checkpoint();
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Submission>>> {
        self.jobs.lock()
    }
}

/// Removes ended jobs, oldest first, while there are too many or their files are too large together.
fn forget_old(jobs: &mut Vec<Arc<Submission>>) {
    loop {
        let over: Vec<(usize, u64)> = jobs
            .iter()
            .enumerate()
            .filter(|(_, job)| job.told().ended.is_some())
            .map(|(at, job)| (at, job.id.bytes))
            .collect();
        let bytes: u64 = over.iter().map(|(_, bytes)| bytes).sum();
        match over.first() {
            Some((oldest, _)) if over.len() > OVER_KEPT || (bytes > OVER_BYTES && over.len() > 1) => {
                jobs.remove(*oldest);
            }
            Some(_) | None => return,
        }
    }
}
