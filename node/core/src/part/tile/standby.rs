//! A tile's standby: fetches a snapshot of the owner, computes as well or keeps the snapshot, and reports what it has.
use super::{Out, TileRun, TileState};
use crate::id::NodeId;
use crate::limits::{SNAPSHOT_EVERY_MIN, SNAPSHOT_RETRY};
use crate::message::{ToParticipant, ToTile};
use crate::output::Output;
use crate::part::output::PartOutput;
use crate::time::Instant;
use crate::work::Cursors;
use crate::work::steps::SaveKind;
use partitioner::Tier;

/// What follows from a snapshot that was fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::part) enum AfterSnapshot {
    /// Nothing.
    Done,
    /// The tile is restored from it.
    Restore,
}

impl TileRun {
    /// The tile was loaded without cells.
    pub(in crate::part) fn wait_for_snapshot(&mut self, now: Instant) {
        self.state = TileState::Empty { since: now };
    }

    /// The standby starts to follow. It reports its step to the nodes that feed it, and asks for a snapshot if it has
    /// none.
    pub(in crate::part) fn start_following(&mut self, out: &mut Out) {
        let live = self.has_cells();
        if self.state == TileState::Ready {
            self.state = TileState::Running;
            self.keep_for_neighbours();
        }
        let step = match self.state {
            TileState::Snapshot { step, .. } => step,
            TileState::Empty { .. } | TileState::Fetching { .. } | TileState::Ready | TileState::Running => self.step,
        };
        let part = self.place.part;
        for (to, node) in self.place.neighbours() {
            let cursors = Cursors::All(step);
            self.message(node, ToParticipant::Held { part, to, cursors, live, again: true }, out);
        }
        if matches!(self.state, TileState::Empty { .. }) {
            self.ask_for_snapshot(out);
        }
    }

    /// Keeps what the owners of the neighbours would need if this node took the tile over.
    fn keep_for_neighbours(&mut self) {
        for (peer, node) in self.place.neighbours() {
            let links = (0..self.place.links.len() as u64).filter(|&link| self.place.peer(link) == peer);
            let held = links.filter_map(|link| self.sent.kept_from(link)).max().unwrap_or(self.step);
            self.sent.follow(peer, node, true, false);
            self.sent.held(peer, node, &Cursors::All(held), false, false);
        }
    }

    fn ask_for_snapshot(&self, out: &mut Out) {
        let part = self.place.part;
        if let Some(owner) = self.place.owner(part) {
            self.message(owner, ToParticipant::Tile(ToTile::WantSnapshot { part }), out);
        }
    }

    /// A standby asks for a snapshot of this tile.
    pub(in crate::part) fn handle_want_snapshot(&mut self, from: NodeId) {
        if !self.is_shadow() && self.wanted_by.len() < STANDBYS_MAX {
            self.wanted_by.insert(from);
        }
    }

    /// The owner has saved a snapshot.
    pub(in crate::part) fn handle_saved(&mut self, me: NodeId, from: NodeId, step: u32, bytes: u64, out: &mut Out) {
        let (job, part) = (self.job, self.place.part);
        let wanted = matches!(self.state, TileState::Empty { .. } | TileState::Snapshot { .. });
        let owner = self.is_shadow() && self.place.owner(part) == Some(from) && from != me;
        if owner && wanted && bytes <= self.place.bytes_max {
            if matches!(self.state, TileState::Empty { .. }) {
                self.state = TileState::Fetching { step };
            }
            let kind = SaveKind::Snapshot;
            out.push_back(PartOutput::Shell(Output::Collect { job, from, part, step, kind, bytes }));
        }
    }

    /// A snapshot is here, or could not be fetched.
    pub(in crate::part) fn handle_collected(
        &mut self,
        now: Instant,
        step: u32,
        result: &Result<(), alloc::string::String>,
        out: &mut Out,
    ) -> AfterSnapshot {
        let (job, part, kind) = (self.job, self.place.part, SaveKind::Snapshot);
        let warm = self.place.standby == Some(Tier::Warm);
        let forget = |step: u32| PartOutput::Shell(Output::Forget { job, part, step, kind });
        let mut then = AfterSnapshot::Done;
        // A standby that was promoted meanwhile is restored from the snapshot that it had then.
        let follows = self.place.standby.is_some();
        match (&mut self.state, result) {
            (TileState::Fetching { step: wanted }, Ok(())) if *wanted == step => {
                self.state = TileState::Snapshot { step, at: now, asked: false };
                if warm {
                    self.step = step;
                } else {
                    then = AfterSnapshot::Restore;
                }
            }
            (TileState::Snapshot { step: before, asked, .. }, Ok(())) if follows && *before < step => {
                let old = core::mem::replace(before, step);
                *asked = false;
                self.step = step;
                out.push_back(forget(old));
            }
            (TileState::Fetching { .. }, Err(_)) => self.state = TileState::Empty { since: now },
            (TileState::Snapshot { asked, .. }, Err(_)) => *asked = false,
            (_, Ok(())) => out.push_back(forget(step)),
            (_, Err(_)) => {}
        }
        if let Some(owner) = self.place.owner(part) {
            self.message(owner, ToParticipant::Tile(ToTile::Fetched { part, step, kind }), out);
        }
        if warm {
            self.start_following(out);
        }
        then
    }

    /// The neighbours no longer keep the halos that this standby needs: it takes a new snapshot.
    pub(in crate::part) fn handle_gap(&mut self, now: Instant, out: &mut Out) {
        if self.is_shadow() && self.has_cells() && !self.is_busy() {
            self.forget_all(out);
            (self.step, self.begun, self.state) = (0, false, TileState::Empty { since: now });
            self.start_following(out);
        }
    }

    /// A standby reports its progress to the nodes that feed it, and asks for snapshots.
    pub(in crate::part) fn report_held(&mut self, now: Instant, out: &mut Out) {
        if !self.is_shadow() {
            return;
        }
        let (part, every) = (self.place.part, self.place.snapshot.max(SNAPSHOT_EVERY_MIN));
        match &mut self.state {
            TileState::Running => {
                for (to, node) in self.place.neighbours() {
                    let cursors = Cursors::All(self.step);
                    self.message(node, ToParticipant::Held { part, to, cursors, live: true, again: false }, out);
                }
            }
            TileState::Empty { since } if now.since(*since) >= SNAPSHOT_RETRY => {
                *since = now;
                self.ask_for_snapshot(out);
            }
            // The owner keeps its last snapshot only: the next one is asked for when this one is here, or does not
            // arrive.
            TileState::Snapshot { at, asked, .. }
                if now.since(*at) >= if *asked { every.max(SNAPSHOT_RETRY) } else { every } =>
            {
                (*at, *asked) = (now, true);
                self.ask_for_snapshot(out);
            }
            TileState::Empty { .. } | TileState::Snapshot { .. } | TileState::Fetching { .. } | TileState::Ready => {}
        }
    }
}

/// Standbys of one tile that may ask for a snapshot together: the present one and previous ones.
const STANDBYS_MAX: usize = 4;
