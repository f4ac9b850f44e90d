//! One tile that this node computes, as its owner or in the shadow: what it waits for, what runs, what it owes to others.
use super::TilesOutput;
use super::log::{Feed, HaloLog, Strip};
use super::message::TileMessage;
use crate::id::{Epoch, JobId, LoadId, NodeId, TensorId, WorkId};
use crate::limits::{REPORTS_KEPT, SAVES_WAITING_MAX, STRIPS_WAITING_MAX, TILE_PASS, TILE_PIECE};
use crate::message::FrameHeader;
use crate::time::{Duration, Instant};
use crate::work::steps::{
    Report, SaveKind, Stop, StopKind, Tier, TileFigures, TileMade, TileOrder, TileReady, TileWork,
};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{boxed::Box, string::String, vec::Vec};
use partitioner::tiles::TileLink;

/// A tile at this node.
#[derive(Debug)]
pub(super) struct TileRun {
    pub(super) order: Box<TileOrder>,
    /// Under which placement it was asked for last.
    pub(super) epoch: Epoch,
    pub(super) state: State,
    /// Steps made.
    pub(super) step: u32,
    pub(super) bytes: u64,
    pub(super) links: Vec<LinkRun>,
    pub(super) log: HaloLog,
    /// Strips here, by step and link.
    received: BTreeMap<(u32, u16), TensorId>,
    busy: Option<Busy>,
    /// The coordinator waits for an answer that has to wait for what runs.
    pub(super) answer_due: bool,
    /// States put aside and not fetched yet.
    saves: BTreeMap<(u32, SaveKind), u64>,
    reports: VecDeque<(u32, Report)>,
    /// Standbys that want a snapshot.
    pub(super) wanted_by: BTreeSet<NodeId>,
    pub(super) figures: TileFigures,
    /// When the strips of the present step were ready, and when the step was made.
    strips_at: Instant,
    made_at: Instant,
    /// Measured nanoseconds of a step, for budgets.
    step_ns: u64,
    /// What was to be made at the step where it began has been.
    begun: bool,
    /// When strips that do not come are asked for again, and how long to wait after that.
    ask_at: Instant,
    patience: Duration,
}

/// What a tile is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The shell gets or makes its cells.
    Loading(LoadId),
    /// A standby: the owner's snapshot is wanted, `since` then.
    Wanting { since: Instant },
    /// A standby: the snapshot of this step is on its way.
    Fetching { step: u32 },
    /// A warm standby with the snapshot of this step.
    Holding { step: u32, at: Instant, asked: bool },
    /// It has its cells; the others are waited for.
    Ready,
    /// It computes; until all is computed.
    Running,
    /// The executor failed.
    Failed(String),
}

/// A neighbour at one place.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkRun {
    pub(super) link: TileLink,
    /// The number of the same link at the neighbour.
    mirror: u16,
}

#[derive(Debug)]
struct Busy {
    work: WorkId,
    to: u32,
    /// Names of the strips that it makes, by link.
    strips: Vec<(u16, TensorId)>,
    /// Steps of it.
    steps: u32,
    since: Instant,
}

/// Names for what a run makes.
pub(super) struct Names<'a> {
    pub(super) work: &'a mut u64,
    pub(super) tensor: &'a mut u64,
}

/// Set in work and tensor ids minted here: the pipeline counts its own.
pub(super) const TILES_TAG: u64 = 1 << 62;

impl TileRun {
    pub(super) fn new(now: Instant, epoch: Epoch, order: Box<TileOrder>, state: State) -> Self {
        let links = order.links(order.tile);
        let mirror = |link: &TileLink| {
            let theirs = order.links(link.peer);
            let shift = link.shift.map(|shift| -shift);
            let found = theirs.iter().position(|theirs| theirs.peer == order.tile && theirs.shift == shift);
            found.unwrap_or(usize::from(u16::MAX)) as u16
        };
        let links = links.iter().map(|link| LinkRun { link: *link, mirror: mirror(link) }).collect();
        TileRun {
            epoch,
            state,
            step: 0,
            bytes: 0,
            links,
            log: HaloLog::default(),
            received: BTreeMap::new(),
            busy: None,
            answer_due: false,
            saves: BTreeMap::new(),
            reports: VecDeque::new(),
            wanted_by: BTreeSet::new(),
            figures: TileFigures::default(),
            strips_at: now,
            made_at: now,
            step_ns: order.step_ns,
            begun: false,
            ask_at: now + STRIPS_LATE,
            patience: STRIPS_LATE,
            order,
        }
    }

    pub(super) fn tile(&self) -> u16 {
        self.order.tile
    }

    pub(super) fn is_shadow(&self) -> bool {
        self.order.standby.is_some()
    }

    pub(super) fn is_warm(&self) -> bool {
        self.order.standby == Some(Tier::Warm)
    }

    pub(super) fn is_busy(&self) -> bool {
        self.busy.is_some()
    }

    /// Whether it has cells that steps can be made of.
    pub(super) fn has_cells(&self) -> bool {
        matches!(self.state, State::Ready | State::Running)
    }

    /// The tiles beside it.
    pub(super) fn peers(&self) -> BTreeSet<u16> {
        self.links.iter().map(|link| link.link.peer).collect()
    }

    pub(super) fn ready(&self) -> TileReady {
        TileReady { bytes: self.bytes, step: self.step, kept_from: self.log.first(self.step) }
    }

    /// It has the cells of that step, from wherever.
    pub(super) fn loaded(&mut self, job: JobId, step: u32, bytes: u64, out: &mut VecDeque<TilesOutput>) {
        self.forget_strips(out);
        self.forget_saves(job, out);
        out.extend(self.log.clear().into_iter().map(|tensor| TilesOutput::Discard { tensor }));
        (self.step, self.bytes, self.state, self.begun) = (step, bytes, State::Ready, false);
    }

    /// What ran under an earlier placement ends: nothing is begun, nothing is sent, until the coordinator says so.
    pub(super) fn pause(&mut self, out: &mut VecDeque<TilesOutput>) {
        if self.state == State::Running {
            self.state = State::Ready;
        }
        self.forget_strips(out);
        self.log.clear_feeds();
        self.wanted_by.clear();
    }

    /// Everything of it is given up.
    pub(super) fn end(&mut self, job: JobId, out: &mut VecDeque<TilesOutput>) {
        self.forget_strips(out);
        self.forget_saves(job, out);
        out.extend(self.log.clear().into_iter().map(|tensor| TilesOutput::Discard { tensor }));
        if let Some(busy) = self.busy.take() {
            out.extend(busy.strips.iter().map(|&(_, tensor)| TilesOutput::Discard { tensor }));
            out.push_back(TilesOutput::Returned { job });
        }
    }

    fn forget_strips(&mut self, out: &mut VecDeque<TilesOutput>) {
        let strips = core::mem::take(&mut self.received);
        out.extend(strips.into_values().map(|tensor| TilesOutput::Discard { tensor }));
    }

    fn forget_saves(&mut self, job: JobId, out: &mut VecDeque<TilesOutput>) {
        let tile = self.tile();
        let saves = core::mem::take(&mut self.saves);
        out.extend(saves.into_keys().map(|(step, kind)| TilesOutput::Forget { job, tile, step, kind }));
    }

    /// A strip came. Whether it is wanted.
    pub(super) fn strip(&mut self, from: NodeId, header: &FrameHeader, tensor: TensorId) -> bool {
        let link = usize::try_from(header.channel).ok().and_then(|number| self.links.get(number));
        let Some(peer) = link.filter(|link| link.link.takes).map(|link| link.link.peer) else { return false };
        if self.order.owner(peer) != Some(from) || !self.has_cells() {
            return false;
        }
        self.log.held(peer, from, header.cursor);
        let key = (header.cursor, header.channel as u16);
        if header.cursor < self.step || self.received.len() >= STRIPS_WAITING_MAX || self.received.contains_key(&key) {
            return false;
        }
        // What is being consumed has left `received` already.
        if self.busy.as_ref().is_some_and(|busy| busy.steps > 0 && header.cursor < busy.to) {
            return false;
        }
        self.received.insert(key, tensor);
        true
    }

    /// Sends what is due to those who are fed, and lets go of what nobody needs.
    pub(super) fn pump(&mut self, job: JobId, out: &mut VecDeque<TilesOutput>) {
        let links = &self.links;
        let due = self.log.due(|link| links.get(usize::from(link)).map_or(u16::MAX, |link| link.link.peer));
        for sending in due {
            let link = &self.links[usize::from(sending.strip.link)];
            let header = FrameHeader {
                job,
                epoch: self.epoch,
                part: link.link.peer,
                channel: link.mirror.into(),
                cursor: sending.step,
                count: sending.strip.count,
                last: false,
            };
            let bytes = if sending.copy { &mut self.figures.copied_bytes } else { &mut self.figures.sent_bytes };
            *bytes += sending.strip.bytes;
            let (to, tensor, copy) = (sending.to, sending.strip.tensor, sending.copy);
            out.push_back(TilesOutput::Frame { to, header, tensor, copy });
        }
        // While a run still makes strips the last ones are those of the step before it.
        out.extend(self.log.trim(self.step).into_iter().map(|tensor| TilesOutput::Discard { tensor }));
    }

    /// Where the cycle after `step` ends: at the next multiple of the depth.
    fn next_exchange(&self, step: u32) -> u32 {
        let depth = self.order.depth;
        let next = (step / depth).saturating_add(1).saturating_mul(depth);
        next.min(self.order.schedule.steps)
    }

    /// Begins what can begin.
    pub(super) fn start(&mut self, now: Instant, job: JobId, names: &mut Names<'_>, out: &mut VecDeque<TilesOutput>) {
        let steps = self.order.schedule.steps;
        if self.state != State::Running || self.busy.is_some() || self.answer_due || self.saves_wait() {
            return;
        }
        if !self.begun {
            // Its strips are not made yet, nor what is to be made of the cells as they are.
            let stops = self.order.schedule.stops(self.step, self.step, true);
            return self.run(now, job, self.step, stops, Vec::new(), names, out);
        }
        if self.step >= steps {
            return;
        }
        let here = |link: &u16| self.received.contains_key(&(self.step, *link));
        let takes: Vec<u16> =
            (0..self.links.len() as u16).filter(|&link| self.links[usize::from(link)].link.takes).collect();
        if !takes.iter().all(here) {
            return;
        }
        let to = if self.links.is_empty() { self.piece(steps) } else { self.next_exchange(self.step) };
        let mut stops = self.order.schedule.stops(self.step, to, false);
        // Of checkpoints closer to each other than exchanges the last: all tiles have the same exchanges, and leave out the same.
        let checkpoint = |stop: &&Stop| stop.what == StopKind::Save(SaveKind::Checkpoint);
        let last = stops.iter().rev().find(checkpoint).map(|stop| stop.step);
        stops.retain(|stop| !checkpoint(&stop) || last == Some(stop.step));
        if last.is_some() && !self.makes_room(job, SaveKind::Checkpoint, out) {
            return;
        }
        let strips = takes.iter().filter_map(|&link| Some((link, self.received.remove(&(self.step, link))?))).collect();
        if !takes.is_empty() {
            self.figures.halo_ns += nanos(now.since(self.strips_at));
            self.figures.wait_ns += nanos(now.since(self.made_at));
        }
        if !self.is_shadow() && !self.wanted_by.is_empty() {
            self.makes_room(job, SaveKind::Snapshot, out);
            stops.push(Stop { step: to, what: StopKind::Save(SaveKind::Snapshot) });
        }
        self.run(now, job, to, stops, strips, names, out);
    }

    /// A tile without neighbours runs in pieces, of one checkpoint at most.
    fn piece(&self, steps: u32) -> u32 {
        let every = self.order.schedule.checkpoint_every.unwrap_or(u32::MAX).max(1);
        let checkpoint = (self.step / every).saturating_add(1).saturating_mul(every);
        let fit = (nanos(TILE_PIECE) / self.step_ns.max(1)).clamp(1, 4096) as u32;
        // Whole passes of several steps, if one does not take too long.
        let pass = (nanos(TILE_PASS) / self.step_ns.max(1)).clamp(1, self.order.work.pass_steps.max(1).into()) as u32;
        self.step.saturating_add((fit / pass).max(1) * pass).min(checkpoint).min(steps)
    }

    /// Whether too many frames wait to be fetched for another one to be computed. A standby leaves that to the tile's owner.
    fn saves_wait(&self) -> bool {
        let waiting =
            |kind: SaveKind| self.saves.keys().filter(|(_, saved)| *saved == kind).count() >= SAVES_WAITING_MAX;
        let kinds: BTreeSet<SaveKind> = self.saves.keys().map(|(_, kind)| *kind).collect();
        !self.is_shadow() && kinds.into_iter().any(waiting)
    }

    /// Of full states, each as large as the tile's cells, one of a kind is kept: whether another may be made now. A checkpoint
    /// has to be fetched first; a snapshot, and what a standby keeps for its owner's death, give way to the newer one.
    fn makes_room(&mut self, job: JobId, kind: SaveKind, out: &mut VecDeque<TilesOutput>) -> bool {
        let older: Vec<u32> = self.saves.keys().filter(|(_, saved)| *saved == kind).map(|(step, _)| *step).collect();
        if kind == SaveKind::Checkpoint && !self.is_shadow() {
            return older.is_empty();
        }
        older.into_iter().for_each(|step| self.taken(job, step, kind, out));
        true
    }

    #[expect(clippy::too_many_arguments, reason = "one caller a line")]
    fn run(
        &mut self,
        now: Instant,
        job: JobId,
        to: u32,
        stops: Vec<Stop>,
        strips_in: Vec<(u16, TensorId)>,
        names: &mut Names<'_>,
        out: &mut VecDeque<TilesOutput>,
    ) {
        *names.work += 1;
        let work = WorkId(TILES_TAG | *names.work);
        let ends = to >= self.order.schedule.steps;
        let gives = self.links.iter().enumerate().filter(|(_, link)| link.link.gives && !ends);
        let strips: Vec<(u16, TensorId)> = gives
            .map(|(link, _)| {
                *names.tensor += 1;
                (link as u16, TensorId(TILES_TAG | *names.tensor))
            })
            .collect();
        let steps = to - self.step;
        let budget =
            if self.begun { Duration::from_nanos(self.step_ns.saturating_mul(u64::from(steps) + 1)) } else { FIRST };
        let (tile, from) = (self.tile(), self.step);
        self.busy = Some(Busy { work, to, strips: strips.clone(), steps, since: now });
        let run = TileWork { work, job, tile, from, to, strips_in, strips_out: strips, stops };
        out.push_back(TilesOutput::Run { run: Box::new(run), budget });
    }

    /// The strips of what runs are made: so many elements and bytes each.
    pub(super) fn strips_made(
        &mut self,
        now: Instant,
        job: JobId,
        work: WorkId,
        sizes: &[(u32, u64)],
        out: &mut VecDeque<TilesOutput>,
    ) {
        let Some(busy) = self.busy.as_mut().filter(|busy| busy.work == work) else { return };
        let strips = core::mem::take(&mut busy.strips);
        let strip =
            |(&(link, tensor), &(count, bytes)): (&(u16, TensorId), &(u32, u64))| Strip { link, tensor, count, bytes };
        if sizes.len() == strips.len() && !strips.is_empty() {
            self.log.push(busy.to, strips.iter().zip(sizes).map(strip).collect());
        } else {
            out.extend(strips.into_iter().map(|(_, tensor)| TilesOutput::Discard { tensor }));
        }
        self.strips_at = now;
        self.pump(job, out);
    }

    /// What ran is done. Messages for the coordinator and for standbys come with it.
    pub(super) fn made(
        &mut self,
        now: Instant,
        job: JobId,
        work: WorkId,
        made: TileMade,
        out: &mut VecDeque<TilesOutput>,
    ) -> bool {
        let Some(busy) = self.busy.take_if(|busy| busy.work == work) else { return false };
        out.push_back(TilesOutput::Returned { job });
        out.extend(busy.strips.iter().map(|&(_, tensor)| TilesOutput::Discard { tensor }));
        (self.step, self.begun, self.made_at) = (busy.to, true, now);
        (self.ask_at, self.patience) = (now + STRIPS_LATE, STRIPS_LATE);
        if busy.steps > 0 {
            // The slower of what was lately seen: a budget is what a step takes at most.
            let took = nanos(now.since(busy.since)) / u64::from(busy.steps);
            self.step_ns = took.max(self.step_ns - self.step_ns / 8);
        }
        self.figures.compute_ns += made.compute_ns;
        self.figures.wait_ns = self.figures.wait_ns.saturating_sub(made.overlap_ns);
        for (step, kind, bytes) in made.saves {
            if kind == SaveKind::Snapshot {
                for to in core::mem::take(&mut self.wanted_by) {
                    let say = TileMessage::Saved { tile: self.tile(), step, kind, bytes };
                    out.push_back(TilesOutput::Message { to, job, epoch: self.epoch, say });
                }
            }
            self.saves.insert((step, kind), bytes);
            self.forget_old(job, kind, out);
            if !self.is_shadow() && kind != SaveKind::Snapshot {
                self.tell_saved(job, step, kind, bytes, out);
            }
        }
        for (step, report) in made.reports {
            if !self.is_shadow() {
                self.tell_report(job, step, report.clone(), out);
            }
            self.reports.push_back((step, report));
            while self.reports.len() > REPORTS_KEPT {
                self.reports.pop_front();
            }
        }
        self.pump(job, out);
        true
    }

    /// The owner waits while too many frames are not fetched; its standby keeps as many, and a few more.
    fn forget_old(&mut self, job: JobId, kind: SaveKind, out: &mut VecDeque<TilesOutput>) {
        let kept: Vec<u32> = self.saves.keys().filter(|(_, saved)| *saved == kind).map(|(step, _)| *step).collect();
        let over = if self.is_shadow() { kept.len().saturating_sub(2 * SAVES_WAITING_MAX) } else { 0 };
        for &step in &kept[..over] {
            self.taken(job, step, kind, out);
        }
    }

    /// What ran failed.
    pub(super) fn broke(&mut self, job: JobId, work: WorkId, reason: String, out: &mut VecDeque<TilesOutput>) -> bool {
        let Some(busy) = self.busy.take_if(|busy| busy.work == work) else { return false };
        out.push_back(TilesOutput::Returned { job });
        out.extend(busy.strips.iter().map(|&(_, tensor)| TilesOutput::Discard { tensor }));
        self.state = State::Failed(reason);
        true
    }

    /// Says again what the coordinator may not have heard: it may have come from the owner before, too late.
    pub(super) fn tell_all(&self, job: JobId, out: &mut VecDeque<TilesOutput>) {
        for (&(step, kind), &bytes) in self.saves.iter().filter(|((_, kind), _)| *kind != SaveKind::Snapshot) {
            self.tell_saved(job, step, kind, bytes, out);
        }
        for (step, report) in &self.reports {
            self.tell_report(job, *step, report.clone(), out);
        }
    }

    fn tell_saved(&self, job: JobId, step: u32, kind: SaveKind, bytes: u64, out: &mut VecDeque<TilesOutput>) {
        let say = TileMessage::Saved { tile: self.tile(), step, kind, bytes };
        out.push_back(TilesOutput::Message { to: self.epoch.minter, job, epoch: self.epoch, say });
    }

    fn tell_report(&self, job: JobId, step: u32, report: Report, out: &mut VecDeque<TilesOutput>) {
        let say = TileMessage::Report { tile: self.tile(), step, report };
        out.push_back(TilesOutput::Message { to: self.epoch.minter, job, epoch: self.epoch, say });
    }

    /// A state that was put aside has been fetched.
    pub(super) fn taken(&mut self, job: JobId, step: u32, kind: SaveKind, out: &mut VecDeque<TilesOutput>) {
        if self.saves.remove(&(step, kind)).is_some() {
            out.push_back(TilesOutput::Forget { job, tile: self.tile(), step, kind });
        }
    }

    /// Neighbours whose strips have been waited for for so long that they may be lost.
    pub(super) fn late(&mut self, now: Instant) -> BTreeSet<u16> {
        let waits = self.state == State::Running && self.busy.is_none() && self.begun && !self.is_shadow();
        if !waits || self.step >= self.order.schedule.steps || now < self.ask_at || self.saves_wait() {
            return BTreeSet::new();
        }
        self.patience = (self.patience * 2).min(STRIPS_LATE * 8);
        self.ask_at = now + self.patience;
        let lacks = |(number, _): &(usize, &LinkRun)| !self.received.contains_key(&(self.step, *number as u16));
        let takes = self.links.iter().enumerate().filter(|(_, link)| link.link.takes);
        takes.filter(lacks).map(|(_, link)| link.link.peer).collect()
    }

    /// Feeds the owners of the neighbours, which are so far.
    pub(super) fn feed_owners(&mut self, at: &[u32]) {
        for tile in self.peers() {
            let (Some(node), Some(&held)) = (self.order.owner(tile), at.get(usize::from(tile))) else { continue };
            self.log.feed(Feed { tile, node, owner: true, live: true, held, next: held }, true);
        }
    }

    /// Keeps what the owners of the neighbours would need if this one took over.
    pub(super) fn shadow_owners(&mut self) {
        for tile in self.peers() {
            let Some(node) = self.order.owner(tile) else { continue };
            let held = self.log.first(self.step);
            self.log.feed(Feed { tile, node, owner: true, live: false, held, next: held }, false);
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// What the first run may take: caches are cold, kernels may have to be compiled.
const FIRST: Duration = Duration::from_secs(30);

/// How long strips may take before they are asked for again: frames are lost with a connection that breaks, or that does not
/// stand yet.
const STRIPS_LATE: Duration = Duration::from_secs(1);
