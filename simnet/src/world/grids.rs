//! Carries out the outputs of nodes that concern simulations.
use super::{Happening, World};
use crate::disk::Record;
use crate::grids::Saved;
use crate::host::{Host, HostId};
use node_core::id::{Epoch, JobId, LoadId, NodeId, PartId};
use node_core::input::Input;
use node_core::time::Duration;
use node_core::work::steps::{SaveKind, TileOrder, TileStart};
use node_core::work::{Order, PartWork};

impl World {
    /// `Output::Load` of a tile.
    pub(super) fn load_tile(&mut self, id: HostId, (job, epoch): (JobId, Epoch), load: LoadId, order: &Order) {
        let part = order.part;
        let PartWork::Tile(tile) = &order.work else { return };
        let cells = match tile.start {
            TileStart::Checkpoint { step } => self.checkpoint(id, epoch.issuer, (job, step), part, tile),
            TileStart::Initial | TileStart::Continue | TileStart::Snapshot => None,
        };
        let result = self.hosts[id.index()].executor.load_tile(job, order, cells);
        self.answer(id, LOAD, Input::Loaded { job, part, load, result });
        self.measure_memory(id);
    }

    /// `Output::Restore`.
    pub(super) fn restore_tile(&mut self, id: HostId, (job, part): (JobId, PartId), load: LoadId, step: u32) {
        let result = self.hosts[id.index()].executor.grids.restore(job, part, step);
        self.answer(id, LOAD, Input::Loaded { job, part, load, result });
    }

    /// `Output::Collect`.
    pub(super) fn collect_state(
        &mut self,
        id: HostId,
        from: NodeId,
        state: (JobId, PartId, u32, SaveKind),
        bytes: u64,
    ) {
        let life = self.hosts[id.index()].life;
        self.queue.push(self.now + travels(bytes), Happening::Collect { host: id, life, from, state });
    }

    /// `Output::Mirror`.
    pub(super) fn mirror_checkpoint(&mut self, id: HostId, from: NodeId, name: (JobId, u32), bytes: u64) {
        let life = self.hosts[id.index()].life;
        self.queue.push(self.now + travels(bytes), Happening::Mirror { host: id, life, from, name });
    }

    /// `Output::KeepCheckpoint`.
    pub(super) fn keep_checkpoint(&mut self, id: HostId, job: JobId, step: u32) {
        let cells = self.hosts[id.index()].parts.remove(&(job, step)).ok_or_else(|| "no part of it arrived".into());
        let result = cells.and_then(|cells| self.write(id, Record::Checkpoint((job, step), cells)));
        self.answer(id, self.options.sync, Input::CheckpointKept { job, step, result });
    }

    /// A checkpoint arrives from another coordinator, if its host still answers.
    pub(super) fn mirror(&mut self, id: HostId, from: NodeId, (job, step): (JobId, u32)) {
        let cells = self.reached(id, from).and_then(|there| there.disk.checkpoint(job, step)).cloned();
        let cells = cells.ok_or_else(|| String::from("checkpoint gone"));
        let result = cells.and_then(|cells| self.write(id, Record::Checkpoint((job, step), cells)));
        self.answer(id, self.options.sync, Input::Mirrored { job, step, result });
    }

    /// A saved state arrives, if the host that saved it still answers.
    pub(super) fn collected(&mut self, id: HostId, from: NodeId, state: (JobId, PartId, u32, SaveKind)) {
        let (job, part, step, kind) = state;
        let result = self.collect(id, from, state);
        self.answer(id, Duration::ZERO, Input::Collected { job, part, step, kind, result });
    }

    fn collect(
        &mut self,
        id: HostId,
        from: NodeId,
        (job, part, step, kind): (JobId, PartId, u32, SaveKind),
    ) -> Result<(), String> {
        let there = self.host_of(from).ok_or("no such host exists")?;
        if there != id && (!self.reaches(there, id) || !self.hosts[there.index()].runs()) {
            return Err("peer not reachable".into());
        }
        let state = self.hosts[there.index()].executor.grids.state(job, part, step, kind);
        let state = state.cloned().ok_or("the state is gone")?;
        let host = &mut self.hosts[id.index()];
        match kind {
            SaveKind::Snapshot => host.executor.grids.keep(job, part, step, state),
            SaveKind::Checkpoint => {
                host.disk.writable()?;
                host.parts.entry((job, step)).or_default().extend(state);
            }
            SaveKind::Output(output) => {
                host.disk.writable()?;
                host.outputs.entry((job, output, step)).or_default().extend(state);
            }
        }
        Ok(())
    }

    /// The host of a node, if it runs and its answers reach `id`.
    fn reached(&self, id: HostId, node: NodeId) -> Option<&Host> {
        let there = self.host_of(node)?;
        let host = &self.hosts[there.index()];
        (host.runs() && (there == id || self.reaches(there, id))).then_some(host)
    }

    fn checkpoint(
        &self,
        id: HostId,
        coordinator: NodeId,
        name: (JobId, u32),
        part: PartId,
        order: &TileOrder,
    ) -> Option<Saved> {
        let host = self.reached(id, coordinator)?;
        let block = order.block(part);
        let inside =
            |at: &[i64; 3]| (0..3).all(|axis| (block.from[axis] as i64..block.to[axis] as i64).contains(&at[axis]));
        let cells = host.disk.checkpoint(name.0, name.1)?;
        Some(cells.iter().filter(|(at, _)| inside(at)).map(|(at, value)| (*at, *value)).collect())
    }
}

/// Transfer time of saved states of this size.
fn travels(bytes: u64) -> Duration {
    Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / STATE_BYTES_PER_SECOND) + LOAD
}

/// Time to load a tile.
const LOAD: Duration = Duration::from_millis(5);
/// Transfer rate of saved states.
const STATE_BYTES_PER_SECOND: u64 = 100_000_000;
