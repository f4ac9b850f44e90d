//! Stepping a grid: what the coordinator does for simulations only. Next: `steps/keep.rs`.
mod collect;
mod keep;
mod rates;
mod search;

use super::output::{JobOutput, JobQuestion, Out};
use super::part::{Part, Standby};
use crate::id::{Epoch, JobId, NodeId, PartId};
use crate::message::{FromTile, ToParticipant};
use crate::output::Event;
use crate::place::PlaceSet;
use crate::time::{Duration, Instant};
use crate::work::steps::{GridSpec, Report, SaveKind, StepsEvent, StepsRecord, TileFigures, TileOrder, TileStart};
use crate::work::{PartState, PartWork, Placement, ProgramRecord, Resume};
use alloc::collections::BTreeMap;
use alloc::{string::String, vec::Vec};
use collect::Assembly;
use partitioner::tiles::{Block, GridPlan, GridTile};
use partitioner::{DeviceId, Room, Tier};
use rates::Rates;
use search::Search;

/// A simulation that this node coordinates.
#[derive(Debug)]
pub(super) struct Steps {
    job: JobId,
    me: NodeId,
    pub(super) spec: GridSpec,
    tiles: Vec<Tile>,
    depth: u32,
    step_ns: u64,
    /// Where the tiles of the next placement get their cells.
    start: TileStart,
    /// Step of the last checkpoint that is complete and on disk.
    checkpoint: Option<u32>,
    collected: Assembly,
    /// Saved states that are fetched, or fetched again.
    fetching: BTreeMap<(PartId, u32, SaveKind), Fetch>,
    /// The checkpoint that is being made the one to roll back to.
    keeping: Option<u32>,
    /// The progress that callers know of.
    reported_step: u32,
    ending: Option<Result<(), String>>,
    /// All steps are computed and reported.
    computed: bool,
    /// Callers know of a delay.
    waiting: bool,
    /// All steps are computed, but a saved state has not arrived: when to stop waiting for it.
    lingers: Option<Instant>,
    rates: Rates,
    /// When the present placement began to run, and at which step.
    begun_at: (Instant, u32),
    search: Option<Search>,
}

/// State of a tile, besides its placement.
#[derive(Clone, Debug)]
struct Tile {
    block: Block,
    /// Rate that its predicted time assumes, in thousandths of the node's nominal speed; 0 if it was planned for
    /// another node.
    rate: u32,
    step: u32,
    figures: TileFigures,
}

#[derive(Debug)]
struct Fetch {
    from: NodeId,
    bytes: u64,
    state: FetchState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FetchState {
    /// It waits for its turn.
    Waiting,
    /// The shell fetches it.
    UnderWay,
    /// It failed, and is fetched again at this time.
    Failed(Instant),
}

/// What follows from a report for the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// The job continues.
    GoOn,
    /// All tiles roll back to the last checkpoint.
    RollBack,
}

impl Steps {
    pub(super) fn new(me: NodeId, spec: GridSpec) -> Self {
        let start = spec.resume.map_or(TileStart::Initial, |step| TileStart::Checkpoint { step });
        Steps {
            job: spec.job,
            me,
            tiles: Vec::new(),
            depth: 1,
            step_ns: 0,
            start,
            checkpoint: spec.resume,
            collected: Assembly::default(),
            fetching: BTreeMap::new(),
            keeping: None,
            reported_step: 0,
            ending: None,
            computed: false,
            waiting: false,
            lingers: None,
            rates: Rates::default(),
            begun_at: (Instant::default(), 0),
            search: None,
            spec,
        }
    }

    /// Takes over a simulation whose coordinator is silent.
    pub(super) fn inherited(
        me: NodeId,
        (name, job, checkpoint): (String, JobId, Option<u32>),
        order: &TileOrder,
        record: &StepsRecord,
    ) -> Self {
        let spec = GridSpec {
            job,
            name,
            simulation: order.simulation,
            work: order.work.clone(),
            depth: record.depth,
            schedule: order.schedule.clone(),
            tier: record.tier,
            resume: checkpoint,
        };
        let rate = |at: usize| record.rates.get(at).copied().unwrap_or(0);
        let tile = |(at, block): (usize, &Block)| Tile {
            block: *block,
            rate: rate(at),
            step: 0,
            figures: TileFigures::default(),
        };
        let tiles = order.blocks.iter().enumerate().map(tile).collect();
        let (depth, step_ns, start) = (order.depth, record.step_ns, record.start);
        Steps { tiles, depth, step_ns, start, ..Steps::new(me, spec) }
    }

    /// Steps completed by all tiles.
    pub(super) fn step(&self) -> u32 {
        self.tiles.iter().map(|tile| tile.step).min().unwrap_or(0)
    }

    pub(super) fn step_ns(&self) -> u64 {
        self.step_ns
    }

    pub(super) fn depth(&self) -> u32 {
        self.depth
    }

    pub(super) fn checkpoint(&self) -> Option<u32> {
        self.checkpoint
    }

    /// How it ended, once it has.
    pub(super) fn take_ending(&mut self) -> Option<Result<(), String>> {
        self.ending.take()
    }

    pub(super) fn figures(&self) -> Vec<TileFigures> {
        self.tiles.iter().map(|tile| tile.figures).collect()
    }

    /// Block, step and figures of a tile.
    pub(super) fn tile(&self, part: PartId) -> Option<(Block, u32, TileFigures)> {
        self.tiles.get(part.index()).map(|tile| (tile.block, tile.step, tile.figures))
    }

    fn notify(&self, event: StepsEvent, out: &mut Out) {
        out.push_back(JobOutput::Notify(Event::Steps { job: self.job, event }));
    }

    // ---- placement

    /// The question for a placement.
    pub(super) fn ask(&mut self) -> JobQuestion {
        self.rates.planned();
        self.what(None)
    }

    fn what(&self, present: Option<(Vec<(DeviceId, Block)>, u32)>) -> JobQuestion {
        let rates = self.rates.paces();
        JobQuestion::Grid { work: self.spec.work.clone(), depth: self.spec.depth, rates, present }
    }

    pub(super) fn ask_standbys(&self, parts: &[Part], kept: Vec<(u16, DeviceId)>) -> JobQuestion {
        let owners = self.owners(parts);
        let (work, depth, step_ns) = (self.spec.work.clone(), self.depth, self.step_ns);
        JobQuestion::GridStandbys { work, owners, depth, step_ns, kept }
    }

    fn owners(&self, parts: &[Part]) -> Vec<(DeviceId, Block)> {
        parts.iter().zip(&self.tiles).map(|(part, tile)| (part.place(), tile.block)).collect()
    }

    /// Adopts a partition. Returns its parts.
    pub(super) fn adopt(&mut self, plan: &GridPlan) -> Vec<Part> {
        (self.depth, self.step_ns) = (plan.depth(), plan.step_ns());
        let (step, rates) = (self.start_step(), self.rates.paces());
        let tile = |tile: &GridTile| Tile {
            block: tile.block,
            rate: rates.of(tile.device),
            step,
            figures: TileFigures::default(),
        };
        self.tiles = plan.tiles().iter().map(tile).collect();
        self.collected.restart();
        self.fetching.clear();
        plan.tiles()
            .iter()
            .map(|tile| Part::new(tile.device, Room { memory: tile.bytes, ram: 0 }, tile.compute_ns))
            .collect()
    }

    fn start_step(&self) -> u32 {
        match self.start {
            TileStart::Checkpoint { step } => step,
            TileStart::Initial | TileStart::Continue | TileStart::Snapshot => 0,
        }
    }

    /// The job has a new placement.
    pub(super) fn placed(&mut self, now: Instant) {
        self.rates.placed(now);
    }

    pub(super) fn placement(&self, parts: &[Part]) -> Placement {
        let tiles = parts.iter().zip(&self.tiles).map(|(part, tile)| (part.owner, tile.block)).collect();
        let step = if self.start == TileStart::Continue { self.step() } else { self.start_step() };
        Placement::Tiles { tiles, depth: self.depth, step }
    }

    /// Whether tiles continue with the cells that they have. Otherwise all start again.
    pub(super) fn continues(&self) -> bool {
        self.start == TileStart::Continue
    }

    /// All tiles start again, from the last checkpoint or from the initial state.
    pub(super) fn roll_back(&mut self) {
        self.start = self.checkpoint.map_or(TileStart::Initial, |step| TileStart::Checkpoint { step });
        self.computed = false;
        self.lingers = None;
        self.keeping = None;
    }

    /// A standby was promoted to a tile's owner.
    pub(super) fn promoted(&mut self, part: PartId) {
        if let Some(tile) = self.tiles.get_mut(part.index()) {
            tile.rate = 0;
        }
    }

    /// These nodes and devices are lost. States that they saved are not fetched any more; they are announced again by standbys
    /// or after a rollback.
    pub(super) fn lost(&mut self, lost: &PlaceSet, out: &mut Out) {
        self.rates.lost(lost);
        self.fetching.retain(|_, fetch| !lost.touches(fetch.from));
        self.fetch_next(out);
    }

    pub(super) fn work(&self, part: PartId, step_ns: u64, standby: Option<&Standby>) -> PartWork {
        let _ = part;
        PartWork::Tile(TileOrder {
            simulation: self.spec.simulation,
            work: self.spec.work.clone(),
            depth: self.depth,
            schedule: self.schedule(),
            blocks: self.tiles.iter().map(|tile| tile.block).collect(),
            start: if standby.is_some() { TileStart::Snapshot } else { self.start },
            step_ns,
            snapshot_ms: standby.map_or(0, |standby| standby.snapshot_ms),
        })
    }

    pub(super) fn record(&self) -> ProgramRecord {
        ProgramRecord::Steps(StepsRecord {
            tier: self.spec.tier,
            depth: self.spec.depth,
            step_ns: self.step_ns,
            start: self.start,
            checkpoint: self.checkpoint,
            rates: self.tiles.iter().map(|tile| tile.rate).collect(),
        })
    }

    // ---- running

    /// An owner is ready.
    pub(super) fn prepared(&mut self, part: PartId, has: &PartState) {
        if let (PartState::Tile { step, .. }, Some(tile)) = (has, self.tiles.get_mut(part.index())) {
            tile.step = *step;
        }
    }

    /// All tiles are ready. Returns where each of them resumes; `None` if a tile needs halos that its neighbours no
    /// longer keep.
    pub(super) fn resume(&mut self, now: Instant, parts: &[Part]) -> Option<Vec<Resume>> {
        if !self.can_go(parts) {
            return None;
        }
        self.rates.running(now, self.start != TileStart::Continue);
        self.start = TileStart::Continue;
        self.begun_at = (now, self.step());
        let at: Vec<u32> = self.tiles.iter().map(|tile| tile.step).collect();
        Some(parts.iter().map(|_| Resume::Tile(at.clone())).collect())
    }

    /// All tiles run.
    pub(super) fn begin(&self, out: &mut Out) {
        self.notify(StepsEvent::Runs { step: self.begun_at.1 }, out);
    }

    /// Whether each tile's neighbours still have the halos that it needs.
    fn can_go(&self, parts: &[Part]) -> bool {
        parts.iter().all(|part| {
            let Some(PartState::Tile { kept, .. }) = part.ready.as_ref().map(|ready| &ready.has) else { return false };
            // `from` may be the tile's own step: it computes the halos of that step first.
            kept.iter().all(|(peer, from)| self.tiles.get(peer.index()).is_some_and(|peer| *from <= peer.step))
        })
    }

    /// A tile reports.
    pub(super) fn handle_report(
        &mut self,
        now: Instant,
        from: NodeId,
        (running, epoch): (bool, Epoch),
        say: FromTile,
        parts: &mut [Part],
        out: &mut Out,
    ) -> Result<Then, String> {
        match say {
            FromTile::Progress { part, step, figures } => {
                self.handle_progress(now, from, (part, running), (step, figures), parts, out);
                Ok(Then::GoOn)
            }
            FromTile::Report { part, step, report } => {
                let owner = parts.get(part.index()).is_some_and(|known| known.owner == from);
                if !owner {
                    return Ok(Then::GoOn);
                }
                Ok(self.handle_tile_report(now, running, (part, step), &report, parts, out))
            }
            FromTile::Saved { part, step, kind, bytes } => {
                self.handle_saved(from, epoch, (part, step, kind), bytes, parts, out).map(|()| Then::GoOn)
            }
        }
    }

    fn handle_progress(
        &mut self,
        now: Instant,
        from: NodeId,
        (part, running): (PartId, bool),
        (step, figures): (u32, TileFigures),
        parts: &mut [Part],
        out: &mut Out,
    ) {
        let (Some(known), Some(tile)) = (parts.get_mut(part.index()), self.tiles.get_mut(part.index())) else { return };
        if known.owner == from {
            (tile.step, tile.figures) = (step, figures);
        } else if let Some(standby) = known.standby.as_mut().filter(|standby| standby.node == from) {
            standby.ready = true;
            standby.cursors = crate::work::Cursors::All(step);
        }
        let all = self.step();
        if all > self.reported_step || (all < self.reported_step && running) {
            self.reported_step = all;
            self.notify(StepsEvent::Progress { step: all }, out);
        }
        self.lingers = self.lingers.or(self.computed.then_some(now + LINGER));
        self.end_if_over();
    }

    fn handle_tile_report(
        &mut self,
        now: Instant,
        running: bool,
        (part, step): (PartId, u32),
        report: &Report,
        parts: &[Part],
        out: &mut Out,
    ) -> Then {
        let before = self.collected.reported();
        if let Some(whole) = self.collected.report(self.tiles.len(), part, step, report) {
            if let Some(at) = whole.not_finite {
                return self.handle_not_finite((now, running), (step, before), at, parts, out);
            }
            self.computed |= step == self.spec.schedule.steps;
            if self.spec.schedule.is_reported(step) || step == self.begun_at.1 {
                self.notify(StepsEvent::Report { step, report: whole }, out);
            }
            self.end_search_if_over(step, out);
        }
        self.end_if_over();
        Then::GoOn
    }

    /// Whether a standby can take its tile over.
    pub(super) fn is_current(standby: &Standby) -> bool {
        standby.ready && standby.is_prepared()
    }

    /// Whether its tiles should have standbys.
    pub(super) fn wants_standbys(&self) -> bool {
        matches!(self.spec.tier, Tier::Hot | Tier::Warm) && !self.computed
    }

    // ---- time

    pub(super) fn handle_wakeup(&mut self, now: Instant, out: &mut Out) {
        self.fetch_again(now, out);
        if self.waiting && self.keeping.is_none() {
            self.keep_checkpoint(out);
        }
        if self.lingers.is_some_and(|at| now >= at) && self.fetching.is_empty() && self.keeping.is_none() {
            self.ending = Some(Ok(()));
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let failed = |fetch: &Fetch| match fetch.state {
            FetchState::Failed(again) => Some(again),
            FetchState::Waiting | FetchState::UnderWay => None,
        };
        let fetch = self.fetching.values().filter_map(failed).min();
        let fetch = fetch.map(|at| (at, "job: a failed fetch is repeated"));
        let lingers = self.lingers.map(|at| (at, "job: missing states are not awaited any longer"));
        let lingers = lingers.filter(|_| self.fetching.is_empty() && self.keeping.is_none());
        [fetch, lingers, self.rates.next_wakeup()].into_iter().flatten().min()
    }

    fn message(&self, to: NodeId, epoch: Epoch, say: ToParticipant, out: &mut Out) {
        out.push_back(JobOutput::Message { to, job: self.job, epoch, say });
    }
}

/// How long a job that has completed all steps waits for saved states of lost owners.
const LINGER: Duration = Duration::from_secs(5);
