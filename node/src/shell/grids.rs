//! Carries out the core's decisions about tiles: fetches their simulation, creates them, and transfers their saved
//! states.
use super::{Ordered, Shell};
use crate::device_thread::command::{CellSource, Command, NewPart};
use crate::panics::answered;
use crate::residency::Key;
use crate::states::StateName;
use node_core::id::{Epoch, JobId, NodeId};
use node_core::input::Input;
use node_core::work::steps::{SaveKind, SimulationId, TileOrder, TileStart};
use partitioner::Tier;
use partitioner::tiles::Block;

impl Shell {
    /// Fetches the simulation, then creates the tile with the initial state that its order names.
    pub(super) fn load_tile(&self, ordered: Ordered, bytes_max: u64, standby: Option<Tier>, order: Box<TileOrder>) {
        let Ordered { key: (job, part), epoch, load, sources, device } = ordered;
        let key = (job, part);
        let checkpoint = match order.start {
            TileStart::Checkpoint { step } => Some(self.cells_of(epoch.issuer, job, step)),
            TileStart::Initial | TileStart::Continue | TileStart::Snapshot => None,
        };
        let id = order.simulation;
        let load_command = move |simulation| {
            let part = NewPart::Tile { order, standby, simulation, checkpoint };
            Command::Load { key, epoch, load, bytes_max, part }
        };
        if let Some(simulation) = self.submissions.hold_simulation(job, id.content) {
            return self.submit(key, load_command(simulation));
        }
        let (submissions, runtime, driver) = (self.submissions.clone(), self.runtime.clone(), self.driver.clone());
        let (commands, residency) = (device.commands, self.residency.clone());
        self.runtime.spawn_blocking(move || {
            let is_current = match answered(|| submissions.fetch_simulation(&runtime, job, id, &sources), Err) {
                Ok(simulation) => residency.install(key, load, || {
                    let _ = commands.send(load_command(simulation));
                }),
                Err(reason) => {
                    let is_current = residency.fail(key, load, || {
                        let _ = commands.send(Command::Drop { key });
                    });
                    if is_current {
                        driver.input(Input::Loaded { job, part, load, result: Err(reason) });
                    }
                    is_current
                }
            };
            if !is_current && !residency.has_job(job) {
                submissions.forget_simulation(job);
            }
        });
    }

    /// Fetches the simulation of a tile that is not to be created yet.
    pub(super) fn fetch_simulation(&self, (job, part): Key, epoch: Epoch, id: SimulationId, sources: Vec<NodeId>) {
        let (submissions, runtime) = (self.submissions.clone(), self.runtime.clone());
        let fetched = move |result| Input::Fetched { job, epoch, part, result };
        let fetch = move || {
            let known = submissions.simulation_of(id.content).is_some();
            let result = submissions.fetch_simulation(&runtime, job, id, &sources);
            fetched(result.map(|_| if known { 0 } else { id.bytes }))
        };
        self.off_thread(fetch, move |why| fetched(Err(why)));
    }

    /// Fetches the cells of the coordinator's checkpoint, box by box.
    fn cells_of(&self, coordinator: NodeId, job: JobId, step: u32) -> CellSource {
        let (submissions, runtime) = (self.submissions.clone(), self.runtime.clone());
        Box::new(move |part| answered(|| submissions.checkpoint(&runtime, coordinator, (job, step), part), Err))
    }

    pub(super) fn collect(&self, (job, part): Key, from: NodeId, step: u32, kind: SaveKind, bytes: u64) {
        let (submissions, runtime) = (self.submissions.clone(), self.runtime.clone());
        let collected = move |result| Input::Collected { job, part, step, kind, result };
        let collect = move || {
            let name = StateName { job, part, step, kind };
            let result = submissions.collect(&runtime, from, name, bytes);
            if let Err(reason) = &result {
                tracing::debug!("job {:016x}, tile {part}, step {step}: {reason}", job.0);
            }
            collected(result)
        };
        self.off_thread(collect, move |why| collected(Err(why)));
    }

    pub(super) fn forget_state(&self, (job, part): Key, step: u32, kind: SaveKind) {
        drop(self.states.take(&StateName { job, part, step, kind }));
    }

    pub(super) fn keep_checkpoint(&self, job: JobId, step: u32) {
        let submissions = self.submissions.clone();
        let kept = move |result| Input::CheckpointKept { job, step, result };
        self.off_thread(move || kept(submissions.keep_checkpoint(job, step)), move |why| kept(Err(why)));
    }

    pub(super) fn mirror(
        &self,
        (job, step): (JobId, u32),
        from: NodeId,
        parts: Vec<(Block, u64)>,
        simulation: SimulationId,
    ) {
        let (submissions, runtime) = (self.submissions.clone(), self.runtime.clone());
        let mirrored = move |result| Input::Mirrored { job, step, result };
        let mirror = move || {
            let result = submissions.mirror(&runtime, from, (job, step), &parts, simulation);
            if let Err(reason) = &result {
                tracing::warn!("job {:016x}: the checkpoint of step {step} cannot be copied: {reason}", job.0);
            }
            mirrored(result)
        };
        self.off_thread(mirror, move |why| mirrored(Err(why)));
    }
}
