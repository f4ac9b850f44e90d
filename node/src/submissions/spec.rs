//! Describes a simulation for the planner and the core.
use super::view::LiveView;
use kernels_simulations::Simulation;
use node_core::id::{ContentId, JobId};
use node_core::work::steps::{GridSpec, Schedule, SimulationId};
use partitioner::Tier;
use partitioner::tiles::GridWork;

/// The costs of a simulation for the planner.
pub(crate) fn work(simulation: &Simulation) -> GridWork {
    let (grid, costs) = (simulation.grid(), simulation.rule().costs());
    let periodic =
        std::array::from_fn(|axis| axis < grid.dimensions() && grid.faces(axis)[0] == kernels_grids::Face::Periodic);
    let standby = simulation.standby() != kernels_simulations::StandbyTier::None;
    // One saved state of each kind is retained; each is half of the two states that a step needs.
    let kept = u64::from(standby) + u64::from(simulation.checkpoint_every().is_some());
    GridWork {
        size: grid.size().map(|cells| cells as u64),
        periodic,
        radius: simulation.rule().radius() as u32,
        state_bits: costs.state_bits + kept * costs.state_bits / 2,
        traffic_bits: costs.traffic_bits,
        face_bits: costs.face_bits,
        cell_bits: costs.cell_bits,
        align_x: kernels_grids::RUN as u64,
        // The packed job files, and their parsed form.
        scratch_bytes: SCRATCH_BYTES + 2 * simulation.packed_len() as u64,
        pass_steps: simulation.rule().pass_steps(grid) as u32,
    }
}

/// Memory of a tile besides its cells and the job's files: halos, frames, checkpoints on their way to disk.
const SCRATCH_BYTES: u64 = 16 << 20;

/// The job spec for the core.
pub(super) fn spec(job: JobId, simulation: &Simulation, id: SimulationId, kept: bool, resume: Option<u32>) -> GridSpec {
    let whole = |steps: u64| u32::try_from(steps).unwrap_or(u32::MAX);
    let mut outputs: Vec<u32> = simulation.outputs().iter().map(|output| whole(output.every)).collect();
    if !kept {
        // Without an output folder no outputs are computed.
        outputs.iter_mut().for_each(|every| *every = 0);
    }
    // Pictures for live viewers: at intervals, and after the last step.
    let every = whole(LiveView::of(simulation).every(simulation));
    outputs
        .extend([every, if whole(simulation.steps()).is_multiple_of(every) { 0 } else { whole(simulation.steps()) }]);
    GridSpec {
        job,
        name: simulation.name().to_owned(),
        simulation: id,
        work: work(simulation),
        depth: simulation.depth().map(|depth| depth as u32),
        schedule: Schedule {
            steps: whole(simulation.steps()),
            report_every: whole(simulation.check_every()),
            checkpoint_every: simulation.checkpoint_every().filter(|_| kept).map(whole),
            outputs,
            looks: None,
        },
        tier: match simulation.standby() {
            kernels_simulations::StandbyTier::None => Tier::None,
            kernels_simulations::StandbyTier::Warm => Tier::Warm,
            kernels_simulations::StandbyTier::Hot => Tier::Hot,
        },
        resume,
    }
}

/// The content id and size of a simulation.
pub(super) fn content_id(simulation: &Simulation) -> SimulationId {
    let (mut hasher, mut bytes) = (blake3::Hasher::new(), 0);
    simulation.pack(&mut |part| {
        hasher.update(part);
        bytes += part.len() as u64;
        true
    });
    SimulationId { content: ContentId(*hasher.finalize().as_bytes()), bytes }
}
