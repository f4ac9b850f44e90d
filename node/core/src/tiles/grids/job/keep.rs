//! What comes of a simulation on its way to the submitter's disk: who has put something aside is asked for it.
use super::super::super::message::TileMessage;
use super::super::{GridOutput, Unprepared};
use super::{Fetch, FetchState, GridJob, Ids};
use crate::id::NodeId;
use crate::limits::{CHECKPOINT_PARTS_AT_ONCE, COLLECT_RETRY};
use crate::time::Instant;
use crate::work::steps::{GridEvent, SaveKind};
use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;

impl GridJob {
    /// An owner announces a saved state. Its word on the size is bounded by what a tile's state can have.
    pub(in crate::tiles::grids) fn handle_saved(
        &mut self,
        from: NodeId,
        tile: u16,
        step: u32,
        kind: SaveKind,
        bytes: u64,
        out: &mut VecDeque<GridOutput>,
    ) -> Option<Unprepared> {
        let known = self.tiles.get(usize::from(tile)).filter(|known| known.owner == from)?;
        let most = self.spec.work.saved_bytes(&known.block);
        if kind == SaveKind::Checkpoint && bytes > most {
            let reason = format!("tile {tile} announces a checkpoint of {bytes} bytes, its cells have {most}");
            return Some(Unprepared { reason, failed: true });
        }
        if !self.collected.wants(tile, step, kind) {
            self.say(from, TileMessage::Taken { tile, step, kind }, out);
        } else if self.fetching.get(&(tile, step, kind)).is_none_or(|fetch| fetch.from != from) {
            self.fetching.insert((tile, step, kind), Fetch { from, bytes, state: FetchState::Waiting });
            self.fetch_next(out);
        }
        None
    }

    /// Fetches what waits: of checkpoints a few parts at once, so that they take a bounded share of the memory and of the links.
    pub(super) fn fetch_next(&mut self, out: &mut VecDeque<GridOutput>) {
        let busy = |(key, fetch): &(&(u16, u32, SaveKind), &Fetch)| {
            key.2 == SaveKind::Checkpoint && fetch.state == FetchState::UnderWay
        };
        let mut busy = self.fetching.iter().filter(busy).count();
        let job = self.spec.job;
        for (&(tile, step, kind), fetch) in &mut self.fetching {
            let part = kind == SaveKind::Checkpoint;
            if fetch.state != FetchState::Waiting || part && busy >= CHECKPOINT_PARTS_AT_ONCE {
                continue;
            }
            fetch.state = FetchState::UnderWay;
            busy += usize::from(part);
            let (from, bytes) = (fetch.from, fetch.bytes);
            out.push_back(GridOutput::Collect { job, from, tile, step, kind, bytes });
        }
    }

    /// Fetches again what failed long enough ago.
    pub(super) fn fetch_again(&mut self, now: Instant, out: &mut VecDeque<GridOutput>) {
        for fetch in self.fetching.values_mut() {
            if matches!(fetch.state, FetchState::Failed(again) if now >= again) {
                fetch.state = FetchState::Waiting;
            }
        }
        self.fetch_next(out);
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
            fetch.state = FetchState::Failed(now + COLLECT_RETRY);
            self.fetch_next(out);
            return self.wait(reason, out);
        }
        self.fetching.remove(&(tile, step, kind));
        self.fetch_next(out);
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
