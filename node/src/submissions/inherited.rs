//! Simulations that other nodes coordinate and this node may take over, or has: their checkpoints and later results.
use super::Submissions;
use super::checkpoints::Checkpoints;
use super::forces::Forces;
use super::run_folder::RunFolder;
use super::submission::{Progress, Results, Submission};
use crate::bulk::GridRequest;
use crate::regions::region;
use node_core::id::{JobId, NodeId};
use node_core::limits::LEASE;
use node_core::work::steps::{Schedule, SimulationId};
use parking_lot::Mutex;
use partitioner::tiles::Block;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;

/// Their folder in the data directory, with one folder per job.
const FOLDER: &str = "simulations";
/// Marks the folder of a job that another node coordinates: it holds no results for a user.
const MARK: &str = "another-node-coordinates-this";

/// The folder in the data directory; removes copies from before the restart that are still marked.
pub(crate) fn folder(data_dir: &Path) -> PathBuf {
    let folder = data_dir.join(FOLDER);
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        forget(&entry.path());
    }
    folder
}

fn forget(job: &Path) {
    if job.join(MARK).is_file()
        && let Err(error) = fs::remove_dir_all(job)
    {
        tracing::warn!("{}: {error}", job.display());
    }
}

impl Submissions {
    fn job_folder(&self, job: JobId) -> PathBuf {
        self.folder.join(format!("{:016x}", job.0))
    }

    /// Stores a copy of another coordinator's checkpoint. Blocks.
    ///
    /// # Errors
    /// It cannot be fetched or written.
    pub(crate) fn mirror(
        &self,
        runtime: &tokio::runtime::Handle,
        from: NodeId,
        (job, step): (JobId, u32),
        parts: &[(Block, u64)],
        simulation: SimulationId,
    ) -> Result<(), String> {
        if self.find(job).is_some() {
            return Err("this node already coordinates the job".into());
        }
        let simulation = self.fetch_simulation(runtime, job, simulation, &[from])?;
        let folder = self.job_folder(job);
        let mut checkpoints = Checkpoints::open(&folder, &simulation)?;
        let mark = folder.join(MARK);
        fs::write(&mark, []).map_err(|e| format!("{}: {e}", mark.display()))?;
        let mut regions = Vec::with_capacity(parts.len());
        for region in parts.iter().map(|(block, _)| region(block)) {
            let mut part = checkpoints.begin(step, region)?;
            self.stream(runtime, from, GridRequest::checkpoint(job, step, region), |block| part.write(block))?;
            checkpoints.add(part.complete()?);
            regions.push(region);
        }
        checkpoints.complete(step, &regions)
    }

    /// Removes the copied checkpoints of a job in which this node has no part any more.
    pub(crate) fn forget_mirror(&self, job: JobId) {
        if self.find(job).is_none() {
            forget(&self.job_folder(job));
        }
    }

    /// Takes over a simulation that was submitted to `from`.
    pub(super) fn inherit(&self, job: JobId, from: NodeId, id: SimulationId, schedule: &Schedule) {
        // A successor computes a tile of the job, so it has the parsed simulation.
        let Some(simulation) = self.simulation_of(id.content) else {
            return tracing::warn!("job {:016x}: this node no longer has its simulation", job.0);
        };
        // Outputs past those of the job are for live viewers.
        let mut outputs = schedule.outputs.iter().take(simulation.outputs().len());
        let kept = schedule.checkpoint_every.is_some() || outputs.any(|&every| every > 0);
        let folder = self.job_folder(job);
        let place = if kept { format!("results go to {}", folder.display()) } else { "it writes no results".into() };
        tracing::warn!("job {:016x}: its coordinator {from} is lost, and this node takes it over; {place}", job.0);
        let mark = folder.join(MARK);
        let now = Instant::now();
        // The coordinator has been silent for at least a lease.
        let stalled = Some((now.checked_sub(LEASE).unwrap_or(now), 0));
        let told = Progress { inherited_from: Some(from), losses: 1, stalled, ..Progress::default() };
        let submission = Arc::new(Submission {
            job,
            simulation,
            id,
            out: kept.then_some(folder),
            told: Mutex::new(told),
            view: Mutex::default(),
            forces: Mutex::default(),
            results: Mutex::new(Results::default()),
            changed: watch::channel(0).0,
        });
        self.lock().push(submission.clone());
        // Disk writes do not belong on the driver thread.
        std::thread::spawn(move || {
            let _ = fs::remove_file(mark);
            let Some(out) = &submission.out else { return };
            match RunFolder::inherit(out, &submission.simulation, job) {
                Ok(folder) => submission.results().folder = Some(folder),
                Err(error) => tracing::warn!("{error}"),
            }
            match Forces::open(out, &submission.simulation, 0) {
                Ok(forces) => *submission.forces.lock() = forces,
                Err(error) => tracing::warn!("{error}"),
            }
        });
    }
}
