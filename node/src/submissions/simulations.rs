//! Simulations by content: a job file with the files it names travels once to each node that computes it, on the plane of
//! weights, and is parsed off the thread that decides.
use super::Submissions;
use crate::bulk::GridRequest;
use kernels::grid::simulation::Simulation;
use node_core::id::{ContentId, JobId, NodeId};
use node_core::work::steps::SimulationId;
use std::sync::Arc;

/// The name of a simulation for other nodes.
pub(super) fn id(simulation: &Simulation) -> SimulationId {
    let (mut hasher, mut bytes) = (blake3::Hasher::new(), 0);
    simulation.pack(&mut |part| {
        hasher.update(part);
        bytes += part.len() as u64;
        true
    });
    SimulationId { content: ContentId(*hasher.finalize().as_bytes()), bytes }
}

impl Submissions {
    /// A simulation that a job submitted here has, or a tile held here.
    pub fn simulation_of(&self, content: ContentId) -> Option<Arc<Simulation>> {
        let held = self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let held = held.values().find(|(of, _)| *of == content).map(|(_, simulation)| simulation.clone());
        held.or_else(|| {
            let jobs = self.lock();
            jobs.iter().find(|job| job.id.content == content).map(|job| job.simulation.clone())
        })
    }

    /// Keeps a simulation for a job's tiles until `forget_simulation`, if it is here.
    pub fn hold_simulation(&self, job: JobId, content: ContentId) -> Option<Arc<Simulation>> {
        let found = self.simulation_of(content)?;
        self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(job, (content, found.clone()));
        Some(found)
    }

    /// No tile of the job is held any longer.
    pub fn forget_simulation(&self, job: JobId) {
        self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(&job);
    }

    /// A job's simulation: from here, or from the first of these that has it. Blocks.
    ///
    /// # Errors
    /// None of them has it, or it is none; what the last one said.
    pub fn fetch_simulation(
        &self,
        runtime: &tokio::runtime::Handle,
        job: JobId,
        id: SimulationId,
        sources: &[NodeId],
    ) -> Result<Arc<Simulation>, String> {
        let turn = self
            .fetching
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .entry(id.content)
            .or_default()
            .clone();
        let fetched = {
            // A panic while it is parsed reaches the caller that asked; the next caller tries again.
            let _turn = turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            self.fetch_in_turn(runtime, job, id, sources)
        };
        let mut fetching = self.fetching.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Two hold it: the table, and this one.
        if Arc::strong_count(&turn) <= 2 {
            fetching.remove(&id.content);
        }
        fetched
    }

    fn fetch_in_turn(
        &self,
        runtime: &tokio::runtime::Handle,
        job: JobId,
        id: SimulationId,
        sources: &[NodeId],
    ) -> Result<Arc<Simulation>, String> {
        if let Some(found) = self.hold_simulation(job, id.content) {
            return Ok(found);
        }
        let mut why = String::from("no member is known that has it");
        for from in sources.iter().filter(|from| **from != self.node) {
            match self.fetch_from(runtime, *from, id) {
                Ok(simulation) => {
                    let simulation = Arc::new(simulation);
                    let kept = (id.content, simulation.clone());
                    self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(job, kept);
                    return Ok(simulation);
                }
                Err(error) => {
                    tracing::debug!("job {:016x}: its simulation cannot be fetched from {from}: {error}", job.0);
                    why = error;
                }
            }
        }
        Err(format!("the job's simulation ({}) cannot be fetched: {why}", crate::config::Size(id.bytes)))
    }

    fn fetch_from(
        &self,
        runtime: &tokio::runtime::Handle,
        from: NodeId,
        id: SimulationId,
    ) -> Result<Simulation, String> {
        let bytes = self.whole(runtime, from, GridRequest::Simulation(id.content), id.bytes)?;
        if blake3::hash(&bytes).as_bytes() != &id.content.0 {
            return Err("it sent other bytes than it was asked for".into());
        }
        Simulation::from_bytes(&bytes).map_err(|e| e.to_string())
    }
}
