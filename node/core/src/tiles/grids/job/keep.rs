//! What comes of a simulation on its way to the submitter's disk: who has put something aside is asked for it.
use super::super::super::message::TileMessage;
use super::super::super::order::SaveKind;
use super::super::{GridEvent, GridOutput};
use super::{Fetch, GridJob, Ids};
use crate::id::NodeId;
use crate::limits::COLLECT_RETRY;
use crate::time::Instant;
use alloc::collections::VecDeque;
use alloc::string::String;

impl GridJob {
    pub(in crate::tiles::grids) fn handle_saved(
        &mut self,
        from: NodeId,
        tile: u16,
        step: u32,
        kind: SaveKind,
        bytes: u64,
        out: &mut VecDeque<GridOutput>,
    ) {
        if self.tiles.get(usize::from(tile)).is_none_or(|known| known.owner != from) {
            return;
        }
        if !self.collected.wants(tile, step, kind) {
            return self.say(from, TileMessage::Taken { tile, step, kind }, out);
        }
        if self.fetching.get(&(tile, step, kind)).is_some_and(|fetch| fetch.from == from) {
            return;
        }
        self.fetching.insert((tile, step, kind), Fetch { from, bytes, retry: None });
        out.push_back(GridOutput::Collect { job: self.spec.job, from, tile, step, kind, bytes });
    }

    pub(in crate::tiles::grids) fn handle_collected(
        &mut self,
        now: Instant,
        tile: u16,
        step: u32,
        kind: SaveKind,
        result: Result<(), String>,
        out: &mut VecDeque<GridOutput>,
    ) {
        let Some(fetch) = self.fetching.get_mut(&(tile, step, kind)) else { return };
        if let Err(reason) = result {
            fetch.retry = Some(now + COLLECT_RETRY);
            return self.wait(reason, out);
        }
        self.fetching.remove(&(tile, step, kind));
        self.waiting = false;
        let Some(known) = self.tiles.get(usize::from(tile)) else { return };
        for node in core::iter::once(known.owner).chain(known.standby.map(|standby| standby.node)) {
            self.say(node, TileMessage::Taken { tile, step, kind }, out);
        }
        if self.collected.part(self.tiles.len(), tile, step, kind) {
            match kind {
                SaveKind::Checkpoint => self.keep_checkpoint(out),
                SaveKind::Output(_) | SaveKind::Snapshot => self.collected.whole(step, kind),
            }
        }
        self.look_whether_over();
    }

    pub(super) fn wait(&mut self, reason: String, out: &mut VecDeque<GridOutput>) {
        if !core::mem::replace(&mut self.waiting, true) {
            self.tell(GridEvent::Waiting { reason }, out);
        }
    }

    pub(super) fn keep_checkpoint(&mut self, out: &mut VecDeque<GridOutput>) {
        let newest = self.collected.complete(self.tiles.len(), SaveKind::Checkpoint).pop();
        let sound = |step: &u32| self.search.is_none_or(|search| search.has(*step));
        if let Some(step) = newest.filter(|_| self.keeping.is_none()).filter(sound) {
            self.keeping = Some(step);
            out.push_back(GridOutput::KeepCheckpoint { job: self.spec.job, step });
        }
    }

    pub(in crate::tiles::grids) fn handle_kept(
        &mut self,
        now: Instant,
        step: u32,
        result: Result<(), String>,
        ids: &mut Ids,
        out: &mut VecDeque<GridOutput>,
    ) {
        if self.keeping != Some(step) {
            return;
        }
        self.keeping = None;
        match result {
            Ok(()) => {
                self.checkpoint = Some(step);
                self.waiting = false;
                self.collected.whole(step, SaveKind::Checkpoint);
                self.tell(GridEvent::Checkpoint { step }, out);
                self.bequeath(out);
                self.keep_checkpoint(out);
                self.look_at_paces_now(now, ids, out);
            }
            // It is looked at again with the next wakeup.
            Err(reason) => self.wait(reason, out),
        }
        self.look_whether_over();
    }

    /// Over when all steps are made and everything that was made is on the submitter's disk.
    pub(super) fn look_whether_over(&mut self) {
        if self.computed && self.fetching.is_empty() && self.keeping.is_none() && self.collected.is_idle() {
            self.outcome = Some(Ok(()));
        }
    }
}
