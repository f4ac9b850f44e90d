//! One simulation from its submission to its last step.
mod guard;
mod keep;
mod recut;
mod search;
mod succession;
mod view;

use super::super::message::TileMessage;
use super::collect::Collected;
use super::{GridOutput, Ids, Unprepared};
use crate::id::{Epoch, NodeId};
use crate::limits::{DEGRADED_RETRY, PREPARE_RETRY, STANDBY_RETRY};
use crate::output::Event;
use crate::time::{Duration, Instant};
use crate::work::steps::{GridEvent, GridSpec, Report, SaveKind, Tier, TileFigures, TileOrder, TileReady, TileStart};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{boxed::Box, format, string::String, vec::Vec};
use partitioner::DeviceId;
use partitioner::tiles::{Block, GridError, GridPlan};
use recut::Recut;
use search::Search;

pub use view::{GridJobView, GridState, TileView};

/// A simulation that this node coordinates.
#[derive(Debug)]
pub(super) struct GridJob {
    me: NodeId,
    spec: GridSpec,
    epoch: Epoch,
    phase: Phase,
    tiles: Vec<Tile>,
    depth: u32,
    step_ns: u64,
    /// Where the tiles of the next placement start.
    start: TileStart,
    /// The last checkpoint that is whole and on disk.
    checkpoint: Option<u32>,
    collected: Collected,
    /// What is being fetched, and what is to be tried again.
    fetching: BTreeMap<(u16, u32, SaveKind), Fetch>,
    /// A checkpoint is being made the one to go back to.
    keeping: Option<u32>,
    told_step: u32,
    outcome: Option<Result<(), String>>,
    /// All steps are made and reported.
    computed: bool,
    standbys_at: Option<Instant>,
    waiting: bool,
    /// Nodes that could not stand by, under the present placement.
    unfit: BTreeSet<NodeId>,
    /// All is computed, but something that was put aside has not come: it is not waited for for ever.
    lingers: Option<Instant>,
    /// Who coordinated it before, the last one first.
    formers: Vec<NodeId>,
    /// It was taken over, and not placed since.
    inherited: bool,
    recut: Recut,
    /// When the present placement began to run, and after which step.
    begun_at: (Instant, u32),
    search: Option<Search>,
    /// Who took part in placements before the one that is being made.
    left_out: BTreeSet<NodeId>,
    /// Every node that was asked for a tile, under any placement.
    asked: BTreeSet<NodeId>,
    /// Every node that was named a successor, under any placement: no other can have taken the job over.
    named: BTreeSet<NodeId>,
}

#[derive(Debug)]
struct Fetch {
    from: NodeId,
    bytes: u64,
    state: FetchState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FetchState {
    /// For its turn.
    Waiting,
    /// The shell fetches it.
    UnderWay,
    /// It failed, and is fetched again then.
    Failed(Instant),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Planning {
        token: u64,
    },
    Preparing {
        again: Instant,
    },
    Running,
    /// No plan: looked for again then.
    Degraded {
        retry: Instant,
        reason: String,
    },
}

/// A tile of the present placement.
#[derive(Clone, Debug)]
struct Tile {
    block: Block,
    owner: NodeId,
    bytes: u64,
    step_ns: u64,
    /// Thousandths of the speed of its node by which `step_ns` was predicted; 0: it was planned for another node.
    pace: u32,
    ready: Option<TileReady>,
    /// Its owner has the memory for it already.
    held: bool,
    step: u32,
    figures: TileFigures,
    standby: Option<Standby>,
}

#[derive(Clone, Copy, Debug)]
struct Standby {
    node: NodeId,
    prepared: bool,
    /// It has cells, as of this step.
    step: Option<u32>,
    asked: Instant,
    told: bool,
    /// Milliseconds from one snapshot to the next.
    snapshot_ms: u32,
}

impl GridJob {
    pub(super) fn new(me: NodeId, spec: GridSpec) -> Self {
        let start = spec.resume.map_or(TileStart::Initial, |step| TileStart::Checkpoint { step });
        GridJob {
            me,
            epoch: Epoch { counter: 0, minter: me },
            phase: Phase::Planning { token: 0 },
            tiles: Vec::new(),
            depth: 1,
            step_ns: 0,
            start,
            checkpoint: spec.resume,
            collected: Collected::default(),
            fetching: BTreeMap::new(),
            keeping: None,
            told_step: 0,
            outcome: None,
            computed: false,
            standbys_at: None,
            waiting: false,
            unfit: BTreeSet::new(),
            lingers: None,
            formers: Vec::new(),
            inherited: false,
            recut: Recut::default(),
            begun_at: (Instant::default(), 0),
            search: None,
            left_out: BTreeSet::new(),
            asked: BTreeSet::new(),
            named: BTreeSet::new(),
            spec,
        }
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub(super) fn waits_for_plan(&self, token: u64) -> bool {
        self.phase == Phase::Planning { token } || self.recut.waits_for(token)
    }

    pub(super) fn waits_for_better(&self, token: u64) -> bool {
        self.recut.waits_for(token)
    }

    pub(super) fn outcome(&mut self) -> Option<Result<(), String>> {
        self.outcome.take()
    }

    pub(super) fn skip_epochs(&mut self, theirs: Epoch) {
        self.epoch.counter = self.epoch.counter.max(theirs.counter);
    }

    /// Steps that all tiles have made.
    fn step(&self) -> u32 {
        self.tiles.iter().map(|tile| tile.step).min().unwrap_or(0)
    }

    fn tell(&self, event: GridEvent, out: &mut VecDeque<GridOutput>) {
        out.push_back(GridOutput::Notify(Event::Grid { job: self.spec.job, event: Box::new(event) }));
    }

    fn say(&self, to: NodeId, say: TileMessage, out: &mut VecDeque<GridOutput>) {
        out.push_back(GridOutput::Message { to, job: self.spec.job, epoch: self.epoch, say });
    }

    // ---- placement

    /// Looks for a cut of the mesh without these nodes.
    pub(super) fn plan(&mut self, without: &BTreeSet<NodeId>, ids: &mut Ids, out: &mut VecDeque<GridOutput>) {
        let token = ids.next();
        self.phase = Phase::Planning { token };
        self.recut.planned();
        self.ask_for_plan(token, without.clone(), None, out);
    }

    /// Asks for the best cut by what is known of the nodes, to be compared with the present one where that is given.
    fn ask_for_plan(
        &self,
        token: u64,
        without: BTreeSet<NodeId>,
        present: Option<(Vec<(DeviceId, Block)>, u32)>,
        out: &mut VecDeque<GridOutput>,
    ) {
        out.push_back(GridOutput::Plan {
            token,
            job: Some(self.spec.job),
            work: Box::new(self.spec.work.clone()),
            depth: self.spec.depth,
            resident: self.resident(),
            without,
            paces: self.recut.paces(),
            present,
        });
    }

    /// Owners and standbys.
    fn participants(&self) -> BTreeSet<NodeId> {
        let standbys = self.tiles.iter().filter_map(|tile| tile.standby).map(|standby| standby.node);
        self.tiles.iter().map(|tile| tile.owner).chain(standbys).collect()
    }

    /// Bytes that nodes hold of the job.
    fn resident(&self) -> Vec<(NodeId, u64)> {
        let mut resident: BTreeMap<NodeId, u64> = BTreeMap::new();
        for tile in &self.tiles {
            let standby = tile.standby.filter(|standby| standby.prepared).map(|standby| standby.node);
            for node in tile.held.then_some(tile.owner).into_iter().chain(standby) {
                *resident.entry(node).or_default() += tile.bytes;
            }
        }
        resident.into_iter().collect()
    }

    pub(super) fn handle_planned(
        &mut self,
        now: Instant,
        result: Result<Box<GridPlan>, GridError>,
        out: &mut VecDeque<GridOutput>,
    ) {
        let plan = match result {
            Ok(plan) => plan,
            // What can never be is told once; what others may make possible is waited for.
            Err(error @ (GridError::Invalid(_) | GridError::Depth { .. })) => {
                self.outcome = Some(Err(format!("{error}")));
                return;
            }
            Err(error) if self.tiles.is_empty() => {
                self.outcome = Some(Err(format!("{error}")));
                return;
            }
            Err(error) => return self.degrade(now, &format!("{error}"), out),
        };
        self.depth = plan.depth();
        self.step_ns = plan.step_ns();
        let (step, paces) = (self.start_step(), self.recut.paces());
        let tile = |tile: &partitioner::tiles::GridTile| Tile {
            block: tile.block,
            owner: tile.device.into(),
            bytes: tile.bytes,
            step_ns: tile.compute_ns,
            pace: paces.of(tile.device),
            ready: None,
            held: false,
            step,
            figures: TileFigures::default(),
            standby: None,
        };
        self.left_out.extend(self.participants());
        self.tiles = plan.tiles().iter().map(tile).collect();
        self.collected.restart();
        self.fetching.clear();
        self.place(now, out);
    }

    fn start_step(&self) -> u32 {
        match self.start {
            TileStart::Checkpoint { step } => step,
            TileStart::Initial | TileStart::Continue | TileStart::Snapshot => 0,
        }
    }

    /// Mints the next epoch and asks every owner for its tile.
    fn place(&mut self, now: Instant, out: &mut VecDeque<GridOutput>) {
        let Some(next) = self.epoch.counter.checked_add(1) else {
            self.outcome = Some(Err("all epochs of this job are used up: submit it again, with --resume".into()));
            return;
        };
        self.epoch.counter = next;
        self.unfit.clear();
        self.remember_asked();
        self.phase = Phase::Preparing { again: now + PREPARE_RETRY };
        let tiles = self.tiles.iter().map(|tile| (tile.owner, tile.block)).collect();
        let step = if self.start == TileStart::Continue { self.step() } else { self.start_step() };
        self.tell(GridEvent::Placed { epoch: self.epoch, depth: self.depth, step_ns: self.step_ns, tiles, step }, out);
        self.inherited = false;
        self.recut.placed(now);
        self.watch(out);
        // Who takes no part any more has nothing to keep.
        let participants = self.participants();
        for node in core::mem::take(&mut self.left_out).into_iter().filter(|node| !participants.contains(node)) {
            self.say(node, TileMessage::End, out);
        }
        self.prepare(out);
        self.bequeath(out);
    }

    fn watch(&self, out: &mut VecDeque<GridOutput>) {
        let nodes: BTreeSet<NodeId> = self.tiles.iter().map(|tile| tile.owner).collect();
        let standbys = self.tiles.iter().filter_map(|tile| tile.standby).map(|standby| standby.node);
        let standbys: BTreeSet<NodeId> = standbys.filter(|node| !nodes.contains(node)).collect();
        out.push_back(GridOutput::Watch {
            job: self.spec.job,
            epoch: self.epoch,
            nodes: nodes.into_iter().collect(),
            standbys: standbys.into_iter().collect(),
        });
    }

    fn order(&self, tile: usize, standby: Option<Tier>, start: TileStart) -> Box<TileOrder> {
        Box::new(TileOrder {
            name: self.spec.name.clone(),
            simulation: self.spec.simulation,
            work: self.spec.work.clone(),
            depth: self.depth,
            schedule: self.schedule(),
            tiles: self.tiles.iter().map(|tile| (tile.owner, tile.block)).collect(),
            tile: tile as u16,
            standby,
            start,
            bytes_max: self.tiles[tile].bytes,
            step_ns: self.tiles[tile].step_ns,
            snapshot_ms: self.tiles[tile].standby.map_or(0, |standby| standby.snapshot_ms),
            successors: self.successors(),
            formers: self.formers.clone(),
        })
    }

    /// Asks owners that have not answered.
    fn prepare(&self, out: &mut VecDeque<GridOutput>) {
        for (number, tile) in self.tiles.iter().enumerate().filter(|(_, tile)| tile.ready.is_none()) {
            self.say(tile.owner, TileMessage::Prepare(self.order(number, None, self.start)), out);
        }
    }

    pub(super) fn handle_prepared(
        &mut self,
        now: Instant,
        from: NodeId,
        tile: u16,
        ready: &TileReady,
        ids: &mut Ids,
        out: &mut VecDeque<GridOutput>,
    ) {
        let Some(known) = self.tiles.get_mut(usize::from(tile)) else { return };
        if let Some(standby) = known.standby.as_mut().filter(|standby| standby.node == from) {
            standby.prepared = true;
            return;
        }
        known.held |= known.owner == from;
        if known.owner != from || !matches!(self.phase, Phase::Preparing { .. }) {
            return;
        }
        (known.step, known.ready) = (ready.step, Some(ready.clone()));
        if self.tiles.iter().any(|tile| tile.ready.is_none()) {
            return;
        }
        if !self.can_go() {
            // What a tile needs is kept by nobody.
            return self.go_back(&BTreeSet::new(), ids, out);
        }
        let loaded = self.start != TileStart::Continue;
        self.phase = Phase::Running;
        self.recut.running(now, loaded);
        self.start = TileStart::Continue;
        self.begun_at = (now, self.step());
        let at: Vec<u32> = self.tiles.iter().map(|tile| tile.step).collect();
        let owners: BTreeSet<NodeId> = self.tiles.iter().map(|tile| tile.owner).collect();
        for owner in owners {
            self.say(owner, TileMessage::Go { at: at.clone() }, out);
        }
        self.tell(GridEvent::Running { epoch: self.epoch, step: self.step() }, out);
        self.bequeath(out);
        for number in 0..self.tiles.len() {
            self.ask_standby(now, number, out);
        }
        if loaded && self.epoch.counter > 1 && self.lacks_standbys() {
            // What nodes say of their memory still counts what they had before.
            self.standbys_at = Some(now + STANDBY_RETRY);
        } else {
            self.look_for_standbys(now, out);
        }
    }

    /// Whether each tile's neighbours still have the strips that it needs.
    fn can_go(&self) -> bool {
        let order = self.order(0, None, self.start);
        (0..self.tiles.len()).all(|number| {
            let step = self.tiles[number].step;
            let peers = order.links(number as u16).into_iter().map(|link| usize::from(link.peer));
            // A neighbour that begins at the same step makes its strips first.
            peers.filter_map(|peer| self.tiles[peer].ready.as_ref()).all(|ready| ready.kept_from <= step)
        })
    }

    pub(super) fn handle_unprepared(&mut self, from: NodeId, tile: u16, reason: &str) -> Option<Unprepared> {
        let known = self.tiles.get_mut(usize::from(tile))?;
        if known.standby.is_some_and(|standby| standby.node == from) {
            known.standby = None;
            self.unfit.insert(from);
            return None;
        }
        (known.owner == from).then(|| Unprepared { reason: reason.into(), failed: false })
    }

    /// Something is lost: standbys step in, or all go back.
    pub(super) fn replan(
        &mut self,
        now: Instant,
        lost: &BTreeSet<NodeId>,
        ids: &mut Ids,
        out: &mut VecDeque<GridOutput>,
    ) {
        self.recut.lost(lost);
        if matches!(self.phase, Phase::Planning { .. }) {
            return self.plan(lost, ids, out);
        }
        let stands = |tile: &Tile| tile.standby.filter(|s| s.step.is_some() && !lost.contains(&s.node));
        let gone = |tile: &Tile| lost.contains(&tile.owner);
        let goes_on = self.start == TileStart::Continue && (self.inherited || self.tiles.iter().any(gone));
        if !goes_on || self.tiles.iter().any(|tile| gone(tile) && stands(tile).is_none()) {
            return self.go_back(lost, ids, out);
        }
        let epoch = Epoch { counter: self.epoch.counter.saturating_add(1), minter: self.me };
        for (number, tile) in self.tiles.iter_mut().enumerate() {
            tile.ready = None;
            if tile.standby.is_some_and(|standby| lost.contains(&standby.node)) {
                tile.standby = None;
            }
            if let Some(standby) = tile.standby.filter(|_| lost.contains(&tile.owner)) {
                (tile.owner, tile.standby, tile.pace) = (standby.node, None, 0);
                let (job, stage, node) = (self.spec.job, number as u16, standby.node);
                out.push_back(GridOutput::Notify(Event::Promoted { job, epoch, stage, node }));
            }
            if let Some(standby) = &mut tile.standby {
                (standby.prepared, standby.step) = (false, None);
            }
        }
        // Those who cannot be asked any more do not answer for what they put aside; it comes again.
        self.fetching.retain(|_, fetch| !lost.contains(&fetch.from));
        self.fetch_next(out);
        self.place(now, out);
    }

    /// All tiles start anew, from the last checkpoint or from the beginning.
    fn go_back(&mut self, lost: &BTreeSet<NodeId>, ids: &mut Ids, out: &mut VecDeque<GridOutput>) {
        self.return_to_checkpoint();
        self.plan(lost, ids, out);
    }

    fn return_to_checkpoint(&mut self) {
        self.start = self.checkpoint.map_or(TileStart::Initial, |step| TileStart::Checkpoint { step });
        self.computed = false;
        self.lingers = None;
        self.keeping = None;
    }

    pub(super) fn degrade(&mut self, now: Instant, reason: &str, out: &mut VecDeque<GridOutput>) {
        self.phase = Phase::Degraded { retry: now + DEGRADED_RETRY, reason: reason.into() };
        let (call, job, reason) = (None, self.spec.job, String::from(reason));
        self.tell(GridEvent::Waiting { reason: reason.clone() }, out);
        out.push_back(GridOutput::Notify(Event::JobDegraded { call, job, reason }));
    }

    pub(super) fn handle_fleet_changed(&mut self, now: Instant, ids: &mut Ids, out: &mut VecDeque<GridOutput>) {
        if matches!(self.phase, Phase::Degraded { .. }) {
            self.go_back(&BTreeSet::new(), ids, out);
            return;
        }
        self.recut.fleet_changed(now);
        if self.phase == Phase::Running && self.lacks_standbys() {
            // Somebody may have the room now, or was not known when it was looked for.
            let soon = now + STANDBY_RETRY;
            self.standbys_at = Some(self.standbys_at.map_or(soon, |at| at.min(soon)));
        }
    }

    // ---- what participants say

    pub(super) fn handle_progress(
        &mut self,
        now: Instant,
        from: NodeId,
        tile: u16,
        step: u32,
        figures: TileFigures,
        out: &mut VecDeque<GridOutput>,
    ) {
        let job = self.spec.job;
        let Some(known) = self.tiles.get_mut(usize::from(tile)) else { return };
        if known.owner == from {
            (known.step, known.figures) = (step, figures);
        } else if let Some(standby) = known.standby.as_mut().filter(|standby| standby.node == from) {
            standby.step = Some(step);
            if !core::mem::replace(&mut standby.told, true) {
                let node = standby.node;
                out.push_back(GridOutput::Notify(Event::Standby { job, stage: tile, node, current: true }));
                self.bequeath(out);
            }
        }
        let all = self.step();
        if all > self.told_step || (all < self.told_step && self.phase == Phase::Running) {
            self.told_step = all;
            self.tell(GridEvent::Progress { step: all }, out);
        }
        self.lingers = self.lingers.or(self.computed.then_some(now + LINGER));
        self.look_whether_over();
    }

    #[expect(clippy::too_many_arguments, reason = "one caller")]
    pub(super) fn handle_report(
        &mut self,
        now: Instant,
        from: NodeId,
        tile: u16,
        step: u32,
        report: &Report,
        ids: &mut Ids,
        out: &mut VecDeque<GridOutput>,
    ) {
        if self.tiles.get(usize::from(tile)).is_none_or(|known| known.owner != from) {
            return;
        }
        let before = self.collected.reported();
        if let Some(whole) = self.collected.report(self.tiles.len(), tile, step, report) {
            if let Some(at) = whole.not_finite {
                return self.handle_not_finite(now, (step, before), at, ids, out);
            }
            self.computed |= step == self.spec.schedule.steps;
            if self.spec.schedule.is_reported(step) || step == self.begun_at.1 {
                self.tell(GridEvent::Report { step, report: whole }, out);
            }
            self.look_whether_found(step, out);
        }
        self.look_whether_over();
    }

    /// Ends it everywhere.
    pub(super) fn end(&mut self, result: Result<(), String>, out: &mut VecDeque<GridOutput>) {
        for node in self.participants() {
            self.say(node, TileMessage::End, out);
        }
        out.push_back(GridOutput::Unwatch { job: self.spec.job });
        let figures = self.tiles.iter().map(|tile| tile.figures).collect();
        self.tell(GridEvent::Ended { result, figures }, out);
    }

    // ---- time

    pub(super) fn handle_wakeup(&mut self, now: Instant, ids: &mut Ids, out: &mut VecDeque<GridOutput>) {
        match self.phase.clone() {
            Phase::Preparing { again } if now >= again => {
                self.phase = Phase::Preparing { again: now + PREPARE_RETRY };
                self.prepare(out);
            }
            Phase::Degraded { retry, .. } if now >= retry => self.go_back(&BTreeSet::new(), ids, out),
            Phase::Preparing { .. } | Phase::Degraded { .. } | Phase::Planning { .. } | Phase::Running => {}
        }
        self.look_at_paces(now, ids, out);
        if self.standbys_at.is_some_and(|at| now >= at) {
            self.look_for_standbys(now, out);
        }
        if self.phase == Phase::Running {
            for tile in 0..self.tiles.len() {
                let late = |s: &Standby| !s.prepared && now.since(s.asked) >= PREPARE_RETRY;
                if self.tiles[tile].standby.as_ref().is_some_and(late) {
                    self.ask_standby(now, tile, out);
                }
            }
        }
        self.fetch_again(now, out);
        if self.waiting && self.keeping.is_none() {
            self.keep_checkpoint(out);
        }
        if self.lingers.is_some_and(|at| now >= at) && self.fetching.is_empty() && self.keeping.is_none() {
            self.outcome = Some(Ok(()));
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let phase = match &self.phase {
            Phase::Preparing { again } => Some((*again, "grid: a tile is asked for again")),
            Phase::Degraded { retry, .. } => Some((*retry, "grid: a cut is looked for again")),
            Phase::Planning { .. } | Phase::Running => None,
        };
        let standbys = self.standbys_at.map(|at| (at, "grid: standbys are looked for"));
        let unprepared = self.tiles.iter().filter_map(|tile| tile.standby).filter(|standby| !standby.prepared);
        let asked = unprepared.map(|s| s.asked + PREPARE_RETRY).min().filter(|_| self.phase == Phase::Running);
        let asked = asked.map(|at| (at, "grid: a standby is asked again"));
        let failed = |fetch: &Fetch| if let FetchState::Failed(again) = fetch.state { Some(again) } else { None };
        let fetch = self.fetching.values().filter_map(failed).min();
        let fetch = fetch.map(|at| (at, "grid: what could not be fetched is"));
        let lingers = self.lingers.map(|at| (at, "grid: what is missing does not come"));
        let lingers = lingers.filter(|_| self.fetching.is_empty() && self.keeping.is_none());
        [phase, standbys, asked, fetch, lingers, self.recut.next_wakeup()].into_iter().flatten().min()
    }
}

/// How long a job that has made all steps waits for outputs whose maker was lost.
const LINGER: Duration = Duration::from_secs(5);
