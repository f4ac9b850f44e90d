//! Results of a simulation on their way to the coordinator's disk: fetched from the owners that saved them.
use super::{Fetch, FetchState, Steps};
use crate::id::{Epoch, NodeId, PartId};
use crate::job::output::{JobOutput, Out};
use crate::job::part::Part;
use crate::limits::{CHECKPOINT_PARTS_AT_ONCE, COLLECT_RETRY};
use crate::message::{ToParticipant, ToTile};
use crate::output::Output;
use crate::time::Instant;
use crate::work::steps::{SaveKind, StepsEvent};
use alloc::format;
use alloc::string::String;

impl Steps {
    /// An owner announces a saved state. The tile's cells bound the size of a checkpoint.
    ///
    /// # Errors
    /// The owner announces more: it must not be trusted with the tile.
    pub(super) fn handle_saved(
        &mut self,
        from: NodeId,
        epoch: Epoch,
        (part, step, kind): (PartId, u32, SaveKind),
        bytes: u64,
        parts: &[Part],
        out: &mut Out,
    ) -> Result<(), String> {
        let owner = parts.get(part.index()).is_some_and(|known| known.owner == from);
        let Some(tile) = self.tiles.get(part.index()).filter(|_| owner && kind != SaveKind::Snapshot) else {
            return Ok(());
        };
        let most = self.spec.work.saved_bytes(&tile.block);
        if kind == SaveKind::Checkpoint && bytes > most {
            return Err(format!("tile {part} announces a checkpoint of {bytes} bytes, its cells have {most}"));
        }
        if !self.collected.wants(part, step, kind) {
            self.message(from, epoch, ToParticipant::Tile(ToTile::Fetched { part, step, kind }), out);
        } else if self.fetching.get(&(part, step, kind)).is_none_or(|fetch| fetch.from != from) {
            self.fetching.insert((part, step, kind), Fetch { from, bytes, state: FetchState::Waiting });
            self.fetch_next(out);
        }
        Ok(())
    }

    /// Fetches waiting states. Of checkpoints only a few parts at a time, so that they take a bounded share of memory
    /// and links.
    pub(super) fn fetch_next(&mut self, out: &mut Out) {
        let busy = |(key, fetch): &(&(PartId, u32, SaveKind), &Fetch)| {
            key.2 == SaveKind::Checkpoint && fetch.state == FetchState::UnderWay
        };
        let mut busy = self.fetching.iter().filter(busy).count();
        let job = self.job;
        for (&(part, step, kind), fetch) in &mut self.fetching {
            let checkpoint = kind == SaveKind::Checkpoint;
            if fetch.state != FetchState::Waiting || checkpoint && busy >= CHECKPOINT_PARTS_AT_ONCE {
                continue;
            }
            fetch.state = FetchState::UnderWay;
            busy += usize::from(checkpoint);
            let (from, bytes) = (fetch.from, fetch.bytes);
            out.push_back(JobOutput::Shell(Output::Collect { job, from, part, step, kind, bytes }));
        }
    }

    /// Fetches again what failed long enough ago.
    pub(super) fn fetch_again(&mut self, now: Instant, out: &mut Out) {
        for fetch in self.fetching.values_mut() {
            if matches!(fetch.state, FetchState::Failed(again) if now >= again) {
                fetch.state = FetchState::Waiting;
            }
        }
        self.fetch_next(out);
    }

    /// A saved state has been fetched, or could not be.
    pub(in crate::job) fn handle_collected(
        &mut self,
        (now, epoch): (Instant, Epoch),
        (part, step, kind): (PartId, u32, SaveKind),
        result: Result<(), String>,
        parts: &[Part],
        out: &mut Out,
    ) {
        let Some(fetch) = self.fetching.get_mut(&(part, step, kind)) else { return };
        if let Err(reason) = result {
            fetch.state = FetchState::Failed(now + COLLECT_RETRY);
            self.fetch_next(out);
            return self.wait(reason, out);
        }
        self.fetching.remove(&(part, step, kind));
        self.fetch_next(out);
        self.waiting = false;
        let Some(known) = parts.get(part.index()) else { return };
        for node in core::iter::once(known.owner).chain(known.standby.as_ref().map(|standby| standby.node)) {
            self.message(node, epoch, ToParticipant::Tile(ToTile::Fetched { part, step, kind }), out);
        }
        if self.collected.part(self.tiles.len(), part, step, kind) {
            match kind {
                SaveKind::Checkpoint => self.keep_checkpoint(out),
                SaveKind::Output(_) | SaveKind::Snapshot => self.collected.whole(step, kind),
            }
        }
        self.end_if_over();
    }

    /// The job is delayed.
    pub(in crate::job) fn wait(&mut self, reason: String, out: &mut Out) {
        if !core::mem::replace(&mut self.waiting, true) {
            self.notify(StepsEvent::Waiting { reason }, out);
        }
    }

    pub(super) fn keep_checkpoint(&mut self, out: &mut Out) {
        let newest = self.collected.complete(self.tiles.len(), SaveKind::Checkpoint).pop();
        let sound = |step: &u32| self.search.is_none_or(|search| search.has(*step));
        if let Some(step) = newest.filter(|_| self.keeping.is_none()).filter(sound) {
            self.keeping = Some(step);
            out.push_back(JobOutput::Shell(Output::KeepCheckpoint { job: self.job, step }));
        }
    }

    /// The checkpoint is now the one to roll back to, or could not be made that. Returns whether it is.
    pub(in crate::job) fn handle_kept(&mut self, step: u32, result: Result<(), String>, out: &mut Out) -> bool {
        if self.keeping != Some(step) {
            return false;
        }
        self.keeping = None;
        let kept = result.is_ok();
        match result {
            Ok(()) => {
                self.checkpoint = Some(step);
                self.waiting = false;
                self.collected.whole(step, SaveKind::Checkpoint);
                self.notify(StepsEvent::Checkpoint { step }, out);
                self.keep_checkpoint(out);
            }
            // The next wakeup tries again.
            Err(reason) => self.wait(reason, out),
        }
        self.end_if_over();
        kept
    }

    /// The job is over when all steps are computed and everything that was saved is on the coordinator's disk.
    pub(super) fn end_if_over(&mut self) {
        if self.computed && self.fetching.is_empty() && self.keeping.is_none() && self.collected.is_idle() {
            self.ending = Some(Ok(()));
        }
    }
}
