//! Simulations by content hash: a job file, with the files it names, is sent once to each node that computes it, on the
//! bulk streams of weights, and is parsed off the driver thread.
use super::Submissions;
use crate::bulk::GridRequest;
use kernels_simulations::Simulation;
use node_core::id::{ContentId, JobId, NodeId};
use node_core::work::steps::SimulationId;
use std::sync::Arc;

impl Submissions {
    /// The simulation of that content, from a job submitted here or a tile on this node.
    pub(crate) fn simulation_of(&self, content: ContentId) -> Option<Arc<Simulation>> {
        let held = self.held.lock();
        let held = held.values().find(|(of, _)| *of == content).map(|(_, simulation)| simulation.clone());
        held.or_else(|| {
            let jobs = self.lock();
            jobs.iter().find(|job| job.id.content == content).map(|job| job.simulation.clone())
        })
    }

    /// Retains a simulation for a job's tiles until `forget_simulation`, if this node has it.
    pub(crate) fn hold_simulation(&self, job: JobId, content: ContentId) -> Option<Arc<Simulation>> {
        let found = self.simulation_of(content)?;
        self.held.lock().insert(job, (content, found.clone()));
        Some(found)
    }

    /// Releases the simulation of a job that has no more tiles here.
    pub(crate) fn forget_simulation(&self, job: JobId) {
        self.held.lock().remove(&job);
    }

    /// A job's simulation: from this node, or from the first of `sources` that has it. Blocks.
    ///
    /// # Errors
    /// No source has it, or it is invalid; with the last error.
    pub(crate) fn fetch_simulation(
        &self,
        runtime: &tokio::runtime::Handle,
        job: JobId,
        id: SimulationId,
        sources: &[NodeId],
    ) -> Result<Arc<Simulation>, String> {
        let turn = self.fetching.lock().entry(id.content).or_default().clone();
        let fetched = {
            // A panic while parsing reaches this caller; the next caller tries again.
            let _turn = turn.lock();
            self.fetch_in_turn(runtime, job, id, sources)
        };
        let mut fetching = self.fetching.lock();
        // Two references remain: the table's and this one.
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
        let mut why = String::from("no known member has it");
        for from in sources.iter().filter(|from| **from != self.node) {
            match self.fetch_from(runtime, *from, id) {
                Ok(simulation) => {
                    let simulation = Arc::new(simulation);
                    let kept = (id.content, simulation.clone());
                    self.held.lock().insert(job, kept);
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
            return Err("it sent bytes with another hash".into());
        }
        Simulation::from_bytes(&bytes).map_err(|e| e.to_string())
    }
}
