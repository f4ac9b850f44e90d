//! One tile of a simulation at this node: received halos, the running cycle, the send log, saved states and reports.
//!
//! Steps are counted, and everything names its step. Between two exchanges a tile computes a cycle of steps. A cycle
//! starts when the halos of all neighbours for the present step are here. It computes its own halos first, and they are
//! kept as long as another node can ask for them. Next: `tile/standby.rs`.
mod standby;

use super::output::{Names, Out, PartOutput, Started, discard};
use super::sent::{Bounds, Keep, LogEntry, OutgoingFrame, Sent};
use crate::id::{Epoch, JobId, NodeId, PartId, TensorId, WorkId};
use crate::limits::{
    HALO_ENTRIES_MAX, HALO_LOG_BYTES_MAX, HALO_STRIPS_QUEUED_MAX, HALO_WINDOW_BYTES, REPORTS_KEPT, SAVES_WAITING_MAX,
    TILE_PASS, TILE_PIECE,
};
use crate::message::{Drafts, FrameHeader, FromTile, ToCoordinator, ToParticipant, ToTile};
use crate::output::Output;
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::steps::{
    Action, ActionKind, Report, SaveKind, Schedule, TileFigures, TileOrder, TileResult, TileWork,
};
use crate::work::{Cursors, Order, PartState, Payload, Task};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use partitioner::Tier;
use partitioner::tiles::TileLink;
pub(super) use standby::AfterSnapshot;

/// A tile at its owner or at its standby. A standby computes as well (hot) or holds a snapshot (warm).
#[derive(Debug)]
pub(super) struct TileRun {
    job: JobId,
    place: Place,
    state: TileState,
    /// Steps completed.
    step: u32,
    sent: Sent,
    /// Received halos, by step and link.
    received: BTreeMap<(u32, u16), TensorId>,
    busy: Option<Busy>,
    /// Saved states that are not fetched yet, and their bytes.
    saves: BTreeMap<(u32, SaveKind), u64>,
    reports: VecDeque<(u32, Report)>,
    /// Standbys that asked for a snapshot.
    wanted_by: BTreeSet<NodeId>,
    figures: TileFigures,
    /// When the halos of the present step were computed, and when the step was completed.
    halos_at: Instant,
    made_at: Instant,
    /// Measured nanoseconds per step, for budgets.
    step_ns: u64,
    /// The first run is done, which computes the halos of the first step and the actions due there.
    begun: bool,
    /// This node was the tile's standby before.
    promoted: bool,
    /// When late halos are asked for again, and how long to wait after that.
    ask_at: Instant,
    patience: Duration,
}

/// What a tile needs to know of its order.
#[derive(Debug)]
struct Place {
    epoch: Epoch,
    part: PartId,
    owners: Vec<NodeId>,
    standby: Option<Tier>,
    depth: u32,
    schedule: Schedule,
    pass_steps: u32,
    bytes_max: u64,
    snapshot: Duration,
    links: Vec<Link>,
}

/// A link to a neighbour.
#[derive(Clone, Copy, Debug)]
struct Link {
    link: TileLink,
    /// Number of the same link at the neighbour.
    mirror: u16,
}

/// State of a tile.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TileState {
    /// A standby without cells. It has waited for the owner's snapshot since then.
    Empty { since: Instant },
    /// A standby that is fetching the snapshot of this step.
    Fetching { step: u32 },
    /// A standby with the snapshot of this step. `asked`: the next one was asked for. `at`: when it was, or when this
    /// one arrived.
    Snapshot { step: u32, at: Instant, asked: bool },
    /// It has cells, and waits for all parts to be ready.
    Ready,
    /// It computes, or has computed all steps.
    Running,
}

#[derive(Debug)]
struct Busy {
    work: WorkId,
    to: u32,
    /// Ids of the halos that it computes, by link.
    halos: Vec<(u16, TensorId)>,
    /// Number of steps.
    steps: u32,
    since: Instant,
}

impl Place {
    fn new(epoch: Epoch, order: &Order, tile: &TileOrder) -> Self {
        let part = order.part;
        let mirror = |link: &TileLink| {
            let shift = link.shift.map(|shift| -shift);
            let theirs = tile.links(PartId(link.peer));
            let found = theirs.iter().position(|theirs| theirs.peer == part.0 && theirs.shift == shift);
            found.unwrap_or(usize::from(u16::MAX)) as u16
        };
        Place {
            epoch,
            part,
            owners: order.owners.clone(),
            standby: order.standby,
            depth: tile.depth,
            schedule: tile.schedule.clone(),
            pass_steps: tile.work.pass_steps,
            bytes_max: order.bytes_max,
            snapshot: Duration::from_millis(tile.snapshot_ms.into()),
            links: tile.links(part).iter().map(|link| Link { link: *link, mirror: mirror(link) }).collect(),
        }
    }

    fn owner(&self, part: PartId) -> Option<NodeId> {
        self.owners.get(part.index()).copied()
    }

    /// The neighbour behind a channel of this tile, which is a link.
    fn peer(&self, channel: u64) -> PartId {
        let link = usize::try_from(channel).ok().and_then(|link| self.links.get(link));
        PartId(link.map_or(u16::MAX, |link| link.link.peer))
    }

    /// Neighbouring tiles.
    fn peers(&self) -> BTreeSet<PartId> {
        self.links.iter().map(|link| PartId(link.link.peer)).collect()
    }

    /// Neighbouring tiles and their owners.
    fn neighbours(&self) -> Vec<(PartId, NodeId)> {
        self.peers().into_iter().filter_map(|peer| Some((peer, self.owner(peer)?))).collect()
    }
}

impl TileRun {
    /// A tile that is being loaded.
    pub(super) fn new(now: Instant, job: JobId, epoch: Epoch, order: &Order, tile: &TileOrder) -> Self {
        let bounds =
            Bounds { bytes: HALO_LOG_BYTES_MAX, entries: HALO_ENTRIES_MAX, window: HALO_WINDOW_BYTES, joined: 0 };
        TileRun {
            job,
            place: Place::new(epoch, order, tile),
            state: TileState::Empty { since: now },
            step: 0,
            sent: Sent::new(Keep::WhileNeeded, bounds),
            received: BTreeMap::new(),
            busy: None,
            saves: BTreeMap::new(),
            reports: VecDeque::new(),
            wanted_by: BTreeSet::new(),
            figures: TileFigures::default(),
            halos_at: now,
            made_at: now,
            step_ns: tile.step_ns,
            begun: false,
            promoted: false,
            ask_at: now + HALOS_LATE,
            patience: HALOS_LATE,
        }
    }

    fn is_shadow(&self) -> bool {
        self.place.standby.is_some()
    }

    pub(super) fn is_busy(&self) -> bool {
        self.busy.is_some()
    }

    /// Whether it has cells to compute with.
    fn has_cells(&self) -> bool {
        matches!(self.state, TileState::Ready | TileState::Running)
    }

    /// Steps completed, and the total number of steps.
    pub(super) fn steps(&self) -> (u32, u32) {
        (self.step, self.place.schedule.steps)
    }

    /// Its state, for the coordinator.
    pub(super) fn has(&self) -> PartState {
        let from = |peer: PartId| {
            let links = (0..self.place.links.len() as u64).filter(|&link| self.place.peer(link) == peer);
            links.filter_map(|link| self.sent.kept_from(link)).max().unwrap_or(self.step)
        };
        let kept = self.place.peers().into_iter().map(|peer| (peer, from(peer))).collect();
        let ahead = u32::from(self.promoted && planted::has(Planted::TileOneAhead));
        PartState::Tile { step: self.step + ahead, kept }
    }

    /// Asserts what holds between two inputs.
    pub(super) fn assert_invariants(&self) {
        self.sent.assert_invariants();
        let (received, reports) = (self.received.len(), self.reports.len());
        assert!(received <= HALO_STRIPS_QUEUED_MAX, "{received} halos wait");
        assert!(reports <= REPORTS_KEPT, "{reports} reports are kept");
        if let Some(busy) = &self.busy {
            assert!(self.has_cells(), "a tile without cells runs: {:?}", self.state);
            assert_eq!(self.step + busy.steps, busy.to, "the step moved during a run");
        }
    }

    fn report(&self, say: FromTile, out: &mut Out) {
        out.push_back(PartOutput::Report { job: self.job, epoch: self.place.epoch, say: ToCoordinator::Tile(say) });
    }

    fn message(&self, to: NodeId, say: ToParticipant, out: &mut Out) {
        out.push_back(PartOutput::Message { to, job: self.job, epoch: self.place.epoch, say });
    }

    // ---- placement

    /// It has the cells of this step, from any source.
    pub(super) fn loaded(&mut self, step: u32, out: &mut Out) {
        self.forget_all(out);
        (self.step, self.state, self.begun) = (step, TileState::Ready, false);
    }

    /// Pauses what runs under an earlier placement: nothing is started or sent until the coordinator lets the tile run
    /// again.
    pub(super) fn pause(&mut self, out: &mut Out) {
        if self.state == TileState::Running {
            self.state = TileState::Ready;
        }
        self.forget_received(out);
        self.sent.clear_followers();
        self.wanted_by.clear();
    }

    /// The same tile under another epoch, perhaps as owner instead of standby. Returns the step of the snapshot that it
    /// must be restored from first, if it has no other cells.
    pub(super) fn keep(&mut self, now: Instant, epoch: Epoch, order: &Order, tile: &TileOrder) -> Option<u32> {
        let promoted = self.is_shadow() && order.standby.is_none();
        self.place = Place::new(epoch, order, tile);
        self.promoted = promoted;
        if let TileState::Empty { since } = &mut self.state {
            *since = now;
        }
        match self.state {
            TileState::Snapshot { step, .. } if promoted => Some(step),
            TileState::Snapshot { .. }
            | TileState::Empty { .. }
            | TileState::Fetching { .. }
            | TileState::Ready
            | TileState::Running => None,
        }
    }

    /// Whether it can stay as it is under another order for the same part.
    pub(super) fn may_stay(&self, order: &Order) -> bool {
        let same_role = self.is_shadow() == order.standby.is_some();
        let promoted = self.is_shadow() && order.standby.is_none();
        let has = self.has_cells() || matches!(self.state, TileState::Snapshot { .. });
        // A standby of one tier does not become a standby of the other.
        let tier = !same_role || self.place.standby == order.standby || order.standby.is_none();
        tier && (same_role || (promoted && has))
    }

    /// Drops all its state. Halos that a run computes are discarded when it returns.
    pub(super) fn end(&mut self, out: &mut Out) {
        self.forget_all(out);
        self.busy = None;
    }

    fn forget_all(&mut self, out: &mut Out) {
        self.forget_received(out);
        let (job, part) = (self.job, self.place.part);
        let saves = core::mem::take(&mut self.saves);
        out.extend(saves.into_keys().map(|(step, kind)| PartOutput::Shell(Output::Forget { job, part, step, kind })));
        out.extend(self.sent.clear().into_iter().map(discard));
    }

    fn forget_received(&mut self, out: &mut Out) {
        out.extend(core::mem::take(&mut self.received).into_values().map(discard));
    }

    /// All parts are ready. `at`: the steps completed by each tile.
    pub(super) fn go(&mut self, at: &[u32], out: &mut Out) {
        if self.state != TileState::Ready || self.is_shadow() {
            return;
        }
        self.state = TileState::Running;
        for (peer, node) in self.place.neighbours() {
            let Some(&held) = at.get(peer.index()) else { continue };
            self.sent.follow(peer, node, true, true);
            self.sent.held(peer, node, &Cursors::All(held), true, true);
        }
        self.report_all(out);
        self.pump(out);
    }

    // ---- halos

    /// A halo arrived. Returns whether it is used.
    pub(super) fn handle_halo(&mut self, from: NodeId, header: &FrameHeader, tensor: TensorId) -> bool {
        let link = usize::try_from(header.channel).ok().and_then(|number| self.place.links.get(number));
        let Some(peer) = link.filter(|link| link.link.takes).map(|link| PartId(link.link.peer)) else { return false };
        if self.place.owner(peer) != Some(from) || !self.has_cells() {
            return false;
        }
        self.sent.reached(peer, from, header.cursor);
        let key = (header.cursor, header.channel as u16);
        let full = self.received.len() >= HALO_STRIPS_QUEUED_MAX;
        if header.cursor < self.step || full || self.received.contains_key(&key) {
            return false;
        }
        // Halos that are being consumed have left `received` already.
        if self.busy.as_ref().is_some_and(|busy| busy.steps > 0 && header.cursor < busy.to) {
            return false;
        }
        self.received.insert(key, tensor);
        true
    }

    /// A holder of the neighbouring tile `part` reports its progress.
    pub(super) fn handle_held(
        &mut self,
        from: NodeId,
        part: PartId,
        cursors: &Cursors,
        (live, again): (bool, bool),
        out: &mut Out,
    ) {
        let Cursors::All(step) = cursors else { return };
        if self.is_shadow() || !self.sent.follows(part, from) {
            return;
        }
        let owner = self.place.owner(part) == Some(from);
        let links = (0..self.place.links.len() as u64).filter(|&link| self.place.peer(link) == part);
        if !owner && live && !self.sent.reaches(links, *step) {
            let say = ToParticipant::Gap { part, from: self.place.part };
            return self.message(from, say, out);
        }
        self.sent.held(part, from, cursors, live, again);
        self.pump(out);
    }

    /// The coordinator named the standby of a neighbour, or removed it.
    pub(super) fn handle_standby(&mut self, part: PartId, node: Option<NodeId>) {
        if !self.place.peers().contains(&part) {
            return;
        }
        match node {
            // Until it reports, halos from now on are kept for it.
            Some(node) if !self.sent.follows(part, node) => {
                self.sent.follow(part, node, false, false);
                self.sent.held(part, node, &Cursors::All(self.step), false, true);
            }
            Some(_) => {}
            None => self.sent.unfollow(part),
        }
    }

    /// Sends what is due to followers, and drops what no node needs.
    fn pump(&mut self, out: &mut Out) {
        let (job, epoch) = (self.job, self.place.epoch);
        for sending in self.sent.due(|channel| self.place.peer(channel)) {
            let OutgoingFrame { to, channel, cursor, count, tensors, bytes, copy, last, drafts } = sending;
            let Some(link) = usize::try_from(channel).ok().and_then(|link| self.place.links.get(link)) else {
                continue;
            };
            let (part, channel) = (PartId(link.link.peer), link.mirror.into());
            *(if copy { &mut self.figures.copied_bytes } else { &mut self.figures.sent_bytes }) += bytes;
            for tensor in tensors {
                let continues = None;
                let header = FrameHeader { job, epoch, part, channel, cursor, count, last, continues, drafts };
                out.push_back(PartOutput::Frame { to, header, payload: Payload::Tensor(tensor), copy });
            }
        }
        if matches!(self.state, TileState::Ready) {
            // Before `Go` it is not known what each node will ask for: a standby that learned of the placement earlier
            // may be far ahead of an owner.
            return;
        }
        // While a run still computes halos, the last ones in the log are those of the step before it.
        let gone = self.sent.trim(self.step, |channel| self.place.peer(channel));
        out.extend(gone.into_iter().map(discard));
    }

    /// A broken connection is up again: messages that were in flight are lost.
    pub(super) fn handle_reconnected(&mut self, node: NodeId, out: &mut Out) {
        if self.has_cells() {
            let (part, step) = (self.place.part, self.step);
            for (to, owner) in self.place.neighbours() {
                if owner == node {
                    let cursors = Cursors::All(step);
                    self.message(node, ToParticipant::Held { part, to, cursors, live: true, again: true }, out);
                }
            }
        }
        // A tile waits at its next checkpoint until the coordinator has fetched the previous one.
        if node == self.place.epoch.issuer && !self.is_shadow() {
            self.report_all(out);
        }
    }

    /// An owner that waits too long for halos reports its step, and the senders continue from there.
    pub(super) fn ask_again(&mut self, now: Instant, out: &mut Out) {
        let waits = self.state == TileState::Running && self.busy.is_none() && self.begun && !self.is_shadow();
        if !waits || self.step >= self.place.schedule.steps || now < self.ask_at || self.saves_wait() {
            return;
        }
        self.patience = (self.patience * 2).min(HALOS_LATE * 8);
        self.ask_at = now + self.patience;
        let lacks = |(number, _): &(usize, &Link)| !self.received.contains_key(&(self.step, *number as u16));
        let takes = self.place.links.iter().enumerate().filter(|(_, link)| link.link.takes);
        let late: BTreeSet<PartId> = takes.filter(lacks).map(|(_, link)| PartId(link.link.peer)).collect();
        let part = self.place.part;
        for to in late {
            if let Some(owner) = self.place.owner(to) {
                let cursors = Cursors::All(self.step);
                self.message(owner, ToParticipant::Held { part, to, cursors, live: true, again: true }, out);
            }
        }
    }

    // ---- runs

    /// Where the cycle after `step` ends: at the next multiple of the halo depth.
    fn next_exchange(&self, step: u32) -> u32 {
        let depth = self.place.depth;
        let next = (step / depth).saturating_add(1).saturating_mul(depth);
        next.min(self.place.schedule.steps)
    }

    /// Starts the next run, if it can. `paused`: the coordinator waits for an answer first.
    pub(super) fn start(&mut self, now: Instant, paused: bool, names: &mut Names, out: &mut Out) -> Option<Started> {
        let steps = self.place.schedule.steps;
        if self.state != TileState::Running || self.busy.is_some() || paused || self.saves_wait() {
            return None;
        }
        if !self.begun {
            // The first run computes the halos of the present step, and the actions due for the cells as they are.
            let stops = self.place.schedule.stops(self.step, self.step, true);
            return Some(self.run(now, self.step, stops, Vec::new(), names));
        }
        if self.step >= steps {
            return None;
        }
        let here = |link: &u16| self.received.contains_key(&(self.step, *link));
        let links = self.place.links.iter().enumerate().filter(|(_, link)| link.link.takes);
        let takes: Vec<u16> = links.map(|(number, _)| number as u16).collect();
        if !takes.iter().all(here) {
            return None;
        }
        let to = if self.place.links.is_empty() { self.piece(steps) } else { self.next_exchange(self.step) };
        let mut stops = self.place.schedule.stops(self.step, to, false);
        // If several checkpoints are due between two exchanges, only the last is saved. All tiles have the same
        // exchanges, so they leave out the same checkpoints.
        let checkpoint = |stop: &&Action| stop.what == ActionKind::Save(SaveKind::Checkpoint);
        let last = stops.iter().rev().find(checkpoint).map(|stop| stop.step);
        stops.retain(|stop| !checkpoint(&stop) || last == Some(stop.step));
        if last.is_some() && !self.makes_room(SaveKind::Checkpoint, out) {
            return None;
        }
        let halos = takes.iter().filter_map(|&link| Some((link, self.received.remove(&(self.step, link))?))).collect();
        if !takes.is_empty() {
            self.figures.halo_ns += nanos(now.since(self.halos_at));
            self.figures.wait_ns += nanos(now.since(self.made_at));
        }
        if !self.is_shadow() && !self.wanted_by.is_empty() {
            self.makes_room(SaveKind::Snapshot, out);
            stops.push(Action { step: to, what: ActionKind::Save(SaveKind::Snapshot) });
        }
        Some(self.run(now, to, stops, halos, names))
    }

    /// Where the next run of a tile without neighbours ends: after a bounded time, and at the next checkpoint at the
    /// latest.
    fn piece(&self, steps: u32) -> u32 {
        let every = self.place.schedule.checkpoint_every.unwrap_or(u32::MAX).max(1);
        let checkpoint = (self.step / every).saturating_add(1).saturating_mul(every);
        let fit = (nanos(TILE_PIECE) / self.step_ns.max(1)).clamp(1, 4096) as u32;
        // Whole passes of several steps, if a pass does not take too long.
        let pass = (nanos(TILE_PASS) / self.step_ns.max(1)).clamp(1, self.place.pass_steps.max(1).into()) as u32;
        self.step.saturating_add((fit / pass).max(1) * pass).min(checkpoint).min(steps)
    }

    /// Whether too many frames wait to be fetched for another one to be computed. A standby leaves this to the owner.
    fn saves_wait(&self) -> bool {
        let waiting =
            |kind: SaveKind| self.saves.keys().filter(|(_, saved)| *saved == kind).count() >= SAVES_WAITING_MAX;
        let kinds: BTreeSet<SaveKind> = self.saves.keys().map(|(_, kind)| *kind).collect();
        !self.is_shadow() && kinds.into_iter().any(waiting)
    }

    /// Makes room for a full state, which is as large as the tile's cells: one of each kind is kept. Returns whether it
    /// may be saved now. An owner's checkpoint has to be fetched first. A snapshot, and what a standby keeps in case
    /// its owner is lost, is replaced by the newer one.
    fn makes_room(&mut self, kind: SaveKind, out: &mut Out) -> bool {
        let older: Vec<u32> = self.saves.keys().filter(|(_, saved)| *saved == kind).map(|(step, _)| *step).collect();
        if kind == SaveKind::Checkpoint && !self.is_shadow() {
            return older.is_empty();
        }
        older.into_iter().for_each(|step| self.handle_taken(step, kind, out));
        true
    }

    fn run(
        &mut self,
        now: Instant,
        to: u32,
        stops: Vec<Action>,
        halos_in: Vec<(u16, TensorId)>,
        names: &mut Names,
    ) -> Started {
        let work = names.work();
        let ends = to >= self.place.schedule.steps;
        let gives = self.place.links.iter().enumerate().filter(|(_, link)| link.link.gives && !ends);
        let halos: Vec<(u16, TensorId)> = gives.map(|(link, _)| (link as u16, names.tensor())).collect();
        let steps = to - self.step;
        let budget =
            if self.begun { Duration::from_nanos(self.step_ns.saturating_mul(u64::from(steps) + 1)) } else { FIRST };
        let makes = halos.iter().map(|&(_, tensor)| tensor).collect();
        self.busy = Some(Busy { work, to, halos: halos.clone(), steps, since: now });
        let task = Task::Steps(TileWork { from: self.step, to, halos_in, halos_out: halos, stops });
        Started { work, task, budget, before: Vec::new(), makes }
    }

    /// Whether this is the running work.
    pub(super) fn runs(&self, work: WorkId) -> bool {
        self.busy.as_ref().is_some_and(|busy| busy.work == work)
    }

    /// The running work has computed its halos. `sizes`: elements and bytes of each.
    pub(super) fn handle_halos(&mut self, now: Instant, sizes: &[(u32, u64)], out: &mut Out) {
        let Some(busy) = &mut self.busy else { return };
        let (halos, cursor) = (core::mem::take(&mut busy.halos), busy.to);
        if sizes.len() == halos.len() {
            for ((link, tensor), &(count, bytes)) in halos.into_iter().zip(sizes) {
                let (end, last, drafts) = (cursor.saturating_add(1), false, Drafts::default());
                let entry = LogEntry { cursor, end, count, last, drafts, tensor, bytes };
                let gone = self.sent.push(link.into(), entry);
                out.extend(gone.into_iter().map(discard));
            }
        } else {
            out.extend(halos.into_iter().map(|(_, tensor)| discard(tensor)));
        }
        self.halos_at = now;
        self.pump(out);
    }

    /// The running work is done. Sends its reports to the coordinator, and announces its snapshot to standbys. Returns
    /// whether the last step is completed.
    pub(super) fn ran(&mut self, now: Instant, made: TileResult, out: &mut Out) -> bool {
        let Some(busy) = self.busy.take() else { return false };
        out.extend(busy.halos.iter().map(|&(_, tensor)| discard(tensor)));
        (self.step, self.begun, self.made_at) = (busy.to, true, now);
        (self.ask_at, self.patience) = (now + HALOS_LATE, HALOS_LATE);
        if busy.steps > 0 {
            // The slower of recent measurements: a budget is an upper bound.
            let took = nanos(now.since(busy.since)) / u64::from(busy.steps);
            self.step_ns = took.max(self.step_ns - self.step_ns / 8);
        }
        self.figures.compute_ns += made.compute_ns;
        self.figures.wait_ns = self.figures.wait_ns.saturating_sub(made.overlap_ns);
        let part = self.place.part;
        for (step, kind, bytes) in made.saves {
            if kind == SaveKind::Snapshot {
                for to in core::mem::take(&mut self.wanted_by) {
                    self.message(to, ToParticipant::Tile(ToTile::Saved { part, step, bytes }), out);
                }
            }
            self.saves.insert((step, kind), bytes);
            self.forget_old(kind, out);
            if !self.is_shadow() && kind != SaveKind::Snapshot {
                self.report(FromTile::Saved { part, step, kind, bytes }, out);
            }
        }
        for (step, report) in made.reports {
            if !self.is_shadow() {
                self.report(FromTile::Report { part, step, report: report.clone() }, out);
            }
            self.reports.push_back((step, report));
            while self.reports.len() > REPORTS_KEPT {
                self.reports.pop_front();
            }
        }
        self.pump(out);
        self.step >= self.place.schedule.steps
    }

    /// The running work failed.
    pub(super) fn failed(&mut self, out: &mut Out) {
        if let Some(busy) = self.busy.take() {
            out.extend(busy.halos.iter().map(|&(_, tensor)| discard(tensor)));
        }
    }

    // ---- saved states and reports

    /// Drops old saved states of a standby. The owner waits while too many frames are not fetched; its standby keeps
    /// twice that number.
    fn forget_old(&mut self, kind: SaveKind, out: &mut Out) {
        let kept: Vec<u32> = self.saves.keys().filter(|(_, saved)| *saved == kind).map(|(step, _)| *step).collect();
        let over = if self.is_shadow() { kept.len().saturating_sub(2 * SAVES_WAITING_MAX) } else { 0 };
        kept[..over].iter().for_each(|&step| self.handle_taken(step, kind, out));
    }

    /// A saved state has been fetched, or is not needed any more.
    pub(super) fn handle_taken(&mut self, step: u32, kind: SaveKind, out: &mut Out) {
        if self.saves.remove(&(step, kind)).is_some() {
            let (job, part) = (self.job, self.place.part);
            out.push_back(PartOutput::Shell(Output::Forget { job, part, step, kind }));
        }
    }

    /// Reports again what the coordinator may lack: the previous owner may have reported it too late.
    fn report_all(&self, out: &mut Out) {
        let part = self.place.part;
        for (&(step, kind), &bytes) in self.saves.iter().filter(|((_, kind), _)| *kind != SaveKind::Snapshot) {
            self.report(FromTile::Saved { part, step, kind, bytes }, out);
        }
        for (step, report) in &self.reports {
            self.report(FromTile::Report { part, step: *step, report: report.clone() }, out);
        }
    }

    /// Reports its progress, if it has cells or a snapshot.
    pub(super) fn report_progress(&self, out: &mut Out) {
        if self.has_cells() || matches!(self.state, TileState::Snapshot { .. }) {
            let (part, step, figures) = (self.place.part, self.step, self.figures);
            self.report(FromTile::Progress { part, step, figures }, out);
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Budget of the first run: caches are cold, kernels may have to be compiled.
const FIRST: Duration = Duration::from_secs(30);
/// How long halos may take before they are asked for again. Frames are lost when a connection breaks, or before it is
/// up.
const HALOS_LATE: Duration = Duration::from_secs(1);
