//! Carries out what nodes decide about simulations, in the virtual world.
use super::World;
use crate::grids::Saved;
use crate::host::{Host, HostId};
use node_core::id::NodeId;
use node_core::input::{GridInput, Input};
use node_core::output::GridCommand;
use node_core::time::Duration;
use node_core::work::steps::{SaveKind, TileOrder, TileStart};

impl World {
    pub(super) fn carry_out_grid(&mut self, id: HostId, command: GridCommand) {
        let now = self.now;
        match command {
            GridCommand::Plan { token, question } => {
                let result = question.answer().map(Box::new);
                self.answer(id, self.options.plan, Input::Grid(GridInput::Planned { token, result }));
            }
            GridCommand::Load { job, epoch, load, order } => {
                let tile = order.tile;
                let cells = match order.start {
                    TileStart::Checkpoint { step } => self.checkpoint(id, epoch.minter, (job, step), &order),
                    TileStart::Initial | TileStart::Continue | TileStart::Snapshot => None,
                };
                let result = self.hosts[id.index()].executor.grids.load(job, *order, cells);
                self.answer(id, LOAD, Input::Grid(GridInput::Loaded { job, tile, load, result }));
                self.measure_memory(id);
            }
            GridCommand::Restore { job, load, tile, step } => {
                let result = self.hosts[id.index()].executor.grids.restore(job, tile, step);
                self.answer(id, LOAD, Input::Grid(GridInput::Loaded { job, tile, load, result }));
            }
            GridCommand::Keep { .. } => {}
            GridCommand::Run(run) => {
                let Some(times) = self.hosts[id.index()].executor.run_tile(now, &run) else { return };
                let sizes = times.sizes;
                if !sizes.is_empty() {
                    let (job, tile, work) = (run.job, run.tile, run.work);
                    let input = Input::Grid(GridInput::Strips { job, tile, work, sizes });
                    self.answer(id, times.strips.since(now), input);
                }
                self.answer(id, times.ends.since(now), times.done);
            }
            GridCommand::Share { tensor, also } => self.hosts[id.index()].executor.share(tensor, also),
            GridCommand::Collect { job, from, tile, step, kind, bytes } => {
                let result = self.collect(id, from, (job, tile, step, kind));
                let took = Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / STATE_BYTES_PER_SECOND) + LOAD;
                self.answer(id, took, Input::Grid(GridInput::Collected { job, tile, step, kind, result }));
            }
            GridCommand::Forget { job, tile, step, kind } => {
                self.hosts[id.index()].executor.grids.forget(job, tile, step, kind);
            }
            GridCommand::Drop { job, tile } => {
                self.hosts[id.index()].executor.grids.drop_tile(job, tile);
                self.measure_memory(id);
            }
            GridCommand::Mirror { job, from, step, parts, simulation: _ } => {
                let bytes: u64 = parts.iter().map(|(_, bytes)| bytes).sum();
                let cells = self.reached(id, from).and_then(|there| there.checkpoints.get(&(job, step))).cloned();
                let result = cells.ok_or_else(|| "it is not there".into()).map(|cells| {
                    self.hosts[id.index()].checkpoints.insert((job, step), cells);
                });
                let took = Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / STATE_BYTES_PER_SECOND) + LOAD;
                self.answer(id, took, Input::Grid(GridInput::Mirrored { job, step, result }));
            }
            GridCommand::KeepCheckpoint { job, step } => {
                let host = &mut self.hosts[id.index()];
                let result = match host.parts.remove(&(job, step)) {
                    Some(cells) => {
                        host.checkpoints.insert((job, step), cells);
                        Ok(())
                    }
                    None => Err("no part of it is here".into()),
                };
                self.answer(id, self.options.sync, Input::Grid(GridInput::Kept { job, step, result }));
            }
        }
    }

    fn collect(
        &mut self,
        id: HostId,
        from: NodeId,
        (job, tile, step, kind): (node_core::id::JobId, u16, u32, SaveKind),
    ) -> Result<(), String> {
        let there = self.host_of(from).ok_or("nobody of that name")?;
        if there != id && (!self.reaches(there, id) || !self.hosts[there.index()].runs()) {
            return Err("it does not answer".into());
        }
        let state = self.hosts[there.index()].executor.grids.state(job, tile, step, kind);
        let state = state.cloned().ok_or("the state is gone")?;
        let host = &mut self.hosts[id.index()];
        match kind {
            SaveKind::Snapshot => host.executor.grids.keep(job, tile, step, state),
            SaveKind::Checkpoint => host.parts.entry((job, step)).or_default().extend(state),
            SaveKind::Output(_) => {}
        }
        Ok(())
    }

    /// A host that runs and whose answers come to `id`.
    fn reached(&self, id: HostId, node: NodeId) -> Option<&Host> {
        let there = self.host_of(node)?;
        let host = &self.hosts[there.index()];
        (host.runs() && (there == id || self.reaches(there, id))).then_some(host)
    }

    fn checkpoint(
        &self,
        id: HostId,
        coordinator: NodeId,
        name: (node_core::id::JobId, u32),
        order: &TileOrder,
    ) -> Option<Saved> {
        let host = self.reached(id, coordinator)?;
        let block = order.block();
        let inside =
            |at: &[i64; 3]| (0..3).all(|axis| (block.from[axis] as i64..block.to[axis] as i64).contains(&at[axis]));
        let cells = host.checkpoints.get(&name)?;
        Some(cells.iter().filter(|(at, _)| inside(at)).map(|(at, value)| (*at, *value)).collect())
    }
}

/// What making a tile takes.
const LOAD: Duration = Duration::from_millis(5);
/// How fast states come from peers.
const STATE_BYTES_PER_SECOND: u64 = 100_000_000;
