//! The submitter's side of simulations: cut, epoch, `Prepare`, `Go`, what comes of it, and who steps in.
//!
//! Only the coordinator mints epochs of its jobs. A lost tile is taken over by its standby where there is one that has it, and
//! all go on from where they are; else all go back to the last checkpoint, under a new cut. Next: `tiles/grids/job.rs`.
mod collect;
mod job;
#[cfg(test)]
mod tests;

use super::message::TileMessage;
use crate::id::{CallId, Epoch, Ids, JobId, NodeId};
use crate::limits::{EPOCHS_FORGOTTEN_MAX, JOBS_MAX};
use crate::output::Event;
use crate::time::Instant;
use crate::work::steps::{CANCELLED, GridEvent, GridSpec, Inheritance, SaveKind};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{boxed::Box, format, string::String, vec::Vec};
use job::GridJob;
pub use job::{GridJobView, GridState, TileView};
use partitioner::DeviceId;
use partitioner::tiles::{Block, GridError, GridPlan, GridWork, Paces, TileStandby};

/// Top byte of this machine's plan tokens.
const GRID_TAG: u64 = 3 << 56;

/// What the coordinator wants done.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GridOutput {
    /// Cut the grid for the present mesh, without these nodes; `resident` bytes of a node are the job's own (none for a caller
    /// who only wants to know).
    Plan {
        token: u64,
        job: Option<JobId>,
        work: Box<GridWork>,
        depth: Option<u32>,
        resident: Vec<(NodeId, u64)>,
        without: BTreeSet<NodeId>,
        /// What its nodes were measured at.
        paces: Paces,
        /// The cut as it is, where a better one is looked for.
        present: Option<(Vec<(DeviceId, Block)>, u32)>,
    },
    /// Tell the caller what was found, and who would stand by.
    PlanFound { call: CallId, result: Result<Box<GridPlan>, GridError>, work: Box<GridWork>, guarded: bool },
    /// A message to a participant.
    Message { to: NodeId, job: JobId, epoch: Epoch, say: TileMessage },
    /// These take part under this epoch.
    Watch { job: JobId, epoch: Epoch, nodes: Vec<NodeId>, standbys: Vec<NodeId> },
    /// Choose standbys for these tiles, besides those there are.
    Standbys {
        job: JobId,
        work: Box<GridWork>,
        owners: Vec<(DeviceId, Block)>,
        depth: u32,
        /// Predicted nanoseconds of a step.
        step_ns: u64,
        kept: Vec<(u16, DeviceId)>,
        /// What nodes hold of the job.
        resident: Vec<(NodeId, u64)>,
        /// Nodes that could not stand by.
        without: BTreeSet<NodeId>,
    },
    /// Fetch what an owner put aside (answer: `handle_collected`).
    Collect { job: JobId, from: NodeId, tile: u16, step: u32, kind: SaveKind, bytes: u64 },
    /// All tiles' parts of a checkpoint are on disk: make it the one to go back to (answer: `handle_kept`).
    KeepCheckpoint { job: JobId, step: u32 },
    /// The job is over.
    Unwatch { job: JobId },
    /// For callers and logs.
    Notify(Event),
}

/// All grid jobs of which this node is the coordinator.
#[derive(Debug)]
pub struct Grids {
    me: NodeId,
    jobs: BTreeMap<JobId, GridJob>,
    plan_calls: BTreeMap<u64, (CallId, Box<GridWork>, bool)>,
    ids: Ids,
    leaving: bool,
    out: VecDeque<GridOutput>,
}

impl Grids {
    /// None yet.
    pub fn new(me: NodeId) -> Self {
        Grids {
            me,
            jobs: BTreeMap::new(),
            plan_calls: BTreeMap::new(),
            ids: Ids::new(GRID_TAG),
            leaving: false,
            out: VecDeque::new(),
        }
    }

    /// A caller wants to know how a grid would be cut.
    pub fn handle_plan(&mut self, call: CallId, work: GridWork, depth: Option<u32>, guarded: bool) {
        let token = self.ids.next();
        self.plan_calls.insert(token, (call, Box::new(work.clone()), guarded));
        let (resident, without) = (Vec::new(), BTreeSet::new());
        let (work, paces, present) = (Box::new(work), Paces::default(), None);
        self.out.push_back(GridOutput::Plan { token, job: None, work, depth, resident, without, paces, present });
    }

    /// A caller submits a simulation.
    pub fn handle_submit(&mut self, spec: GridSpec) {
        let job = spec.job;
        let refusal = if self.leaving {
            Some(String::from("this node is leaving the mesh: submit to another"))
        } else if self.jobs.len() >= JOBS_MAX || self.jobs.contains_key(&job) {
            Some(format!("{JOBS_MAX} simulations run here already"))
        } else {
            None
        };
        if let Some(reason) = refusal {
            let event = GridEvent::Ended { result: Err(reason), figures: Vec::new() };
            return self.out.push_back(GridOutput::Notify(Event::Grid { job, event: Box::new(event) }));
        }
        let mut grid = GridJob::new(self.me, spec);
        grid.plan(&BTreeSet::new(), &mut self.ids, &mut self.out);
        self.jobs.insert(job, grid);
    }

    /// A caller ends a job.
    pub fn handle_cancel(&mut self, job: JobId) {
        if let Some(mut grid) = self.jobs.remove(&job) {
            grid.end(Err(String::from(CANCELLED)), &mut self.out);
        }
    }

    /// This node leaves: its jobs go on where there is a majority to succeed it. Else they end; their checkpoints stay.
    pub fn handle_leave(&mut self) {
        self.leaving = true;
        for (_, mut grid) in core::mem::take(&mut self.jobs) {
            if grid.can_be_left() {
                grid.leave(&mut self.out);
                continue;
            }
            grid.end(Err(String::from("the submitter's node left the mesh: submit with --resume")), &mut self.out);
        }
    }

    /// The planner answered.
    pub fn handle_planned(&mut self, now: Instant, token: u64, result: Result<Box<GridPlan>, GridError>) {
        if let Some((call, work, guarded)) = self.plan_calls.remove(&token) {
            return self.out.push_back(GridOutput::PlanFound { call, result, work, guarded });
        }
        if let Some(grid) = self.jobs.values_mut().find(|grid| grid.waits_for_plan(token)) {
            if grid.waits_for_better(token) {
                grid.handle_better(now, result, &mut self.out);
            } else {
                grid.handle_planned(now, result, &mut self.out);
            }
        }
        self.sweep();
    }

    /// A participant says something; whether it was for the coordinator.
    pub fn handle_message(
        &mut self,
        now: Instant,
        from: NodeId,
        job: JobId,
        epoch: Epoch,
        say: &TileMessage,
    ) -> Option<Unprepared> {
        let grid = self.jobs.get_mut(&job).filter(|grid| grid.epoch() == epoch)?;
        let mut failed = None;
        match say {
            TileMessage::Prepared { tile, result: Ok(ready) } => {
                grid.handle_prepared(now, from, *tile, ready, &mut self.ids, &mut self.out);
            }
            TileMessage::Prepared { tile, result: Err(reason) } => {
                failed = grid.handle_unprepared(from, *tile, reason);
            }
            TileMessage::Progress { tile, step, figures } => {
                grid.handle_progress(now, from, *tile, *step, *figures, &mut self.out);
            }
            TileMessage::Report { tile, step, report } => {
                grid.handle_report(now, from, *tile, *step, report, &mut self.ids, &mut self.out);
            }
            TileMessage::Saved { tile, step, kind, bytes } if *kind != SaveKind::Snapshot => {
                failed = grid.handle_saved(from, *tile, *step, *kind, *bytes, &mut self.out);
            }
            TileMessage::Failed { tile: _, reason } => {
                failed = Some(Unprepared { reason: reason.clone(), failed: true })
            }
            TileMessage::Prepare(_)
            | TileMessage::Go { .. }
            | TileMessage::Held { .. }
            | TileMessage::Gap { .. }
            | TileMessage::WantSnapshot { .. }
            | TileMessage::Saved { .. }
            | TileMessage::Taken { .. }
            | TileMessage::Release { .. }
            | TileMessage::End
            | TileMessage::Will(_)
            | TileMessage::Orphaned => {}
        }
        self.sweep();
        failed
    }

    /// What was to be fetched has been, or why not.
    pub fn handle_collected(
        &mut self,
        now: Instant,
        job: JobId,
        tile: u16,
        step: u32,
        kind: SaveKind,
        result: Result<(), String>,
    ) {
        if let Some(grid) = self.jobs.get_mut(&job) {
            grid.handle_collected(now, tile, step, kind, result, &mut self.out);
        }
        self.sweep();
    }

    /// The checkpoint is the one to go back to now, or could not be made that.
    pub fn handle_kept(&mut self, now: Instant, job: JobId, step: u32, result: Result<(), String>) {
        if let Some(grid) = self.jobs.get_mut(&job) {
            grid.handle_kept(now, step, result, &mut self.ids, &mut self.out);
        }
        self.sweep();
    }

    /// Standbys were chosen.
    pub fn handle_standbys(&mut self, now: Instant, job: JobId, chosen: &[TileStandby]) {
        if let Some(grid) = self.jobs.get_mut(&job) {
            grid.handle_standbys(now, chosen, &mut self.out);
        }
    }

    /// A standby is lost.
    pub fn handle_standby_lost(&mut self, now: Instant, job: JobId, node: NodeId) {
        if let Some(grid) = self.jobs.get_mut(&job) {
            grid.handle_standby_lost(now, node, &mut self.out);
        }
    }

    /// Something of the present placement is lost.
    pub fn handle_replan(&mut self, now: Instant, job: JobId, lost: &BTreeSet<NodeId>) {
        if let Some(grid) = self.jobs.get_mut(&job) {
            grid.replan(now, lost, &mut self.ids, &mut self.out);
        }
        self.sweep();
    }

    /// This node takes a job over; whether it had not done so before.
    pub fn handle_inherited(&mut self, inheritance: Inheritance) -> bool {
        let job = inheritance.spec.job;
        if self.leaving || self.jobs.contains_key(&job) {
            return false;
        }
        let grid = GridJob::inherited(self.me, inheritance, &mut self.out);
        self.jobs.insert(job, grid);
        true
    }

    /// A node knows a higher epoch of a job than this coordinator: one of its own that it has forgotten, or that of a
    /// successor. Only nodes that were asked to take part are believed, and only epochs that can have been minted meanwhile.
    pub fn handle_stale(&mut self, now: Instant, from: NodeId, job: JobId, theirs: Epoch) {
        let me = self.me;
        let believed = |grid: &&mut GridJob| {
            let ahead = theirs.counter.saturating_sub(grid.epoch().counter);
            grid.epoch() < theirs && ahead <= EPOCHS_FORGOTTEN_MAX && grid.has_asked(from)
        };
        let Some(grid) = self.jobs.get_mut(&job).filter(believed) else { return };
        if theirs.minter == me {
            grid.skip_epochs(theirs);
            grid.replan(now, &BTreeSet::new(), &mut self.ids, &mut self.out);
        } else if grid.may_succeed(theirs.minter) {
            grid.stand_down(theirs.minter, &mut self.out);
        }
        self.sweep();
    }

    /// The mesh changed: jobs that wait for room look again.
    pub fn handle_fleet_changed(&mut self, now: Instant) {
        for grid in self.jobs.values_mut() {
            grid.handle_fleet_changed(now, &mut self.ids, &mut self.out);
        }
    }

    /// The epoch of a job coordinated here.
    pub fn epoch_of(&self, job: JobId) -> Option<Epoch> {
        self.jobs.get(&job).map(GridJob::epoch)
    }

    /// The jobs, for people.
    pub fn views(&self) -> impl Iterator<Item = GridJobView> + '_ {
        self.jobs.values().map(GridJob::view)
    }

    /// The clock.
    pub fn handle_wakeup(&mut self, now: Instant) {
        for grid in self.jobs.values_mut() {
            grid.handle_wakeup(now, &mut self.ids, &mut self.out);
        }
        self.sweep();
    }

    /// When to come back, and who asked.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        self.jobs.values().filter_map(GridJob::next_wakeup).min()
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<GridOutput> {
        self.out.pop_front()
    }

    /// Jobs that are over.
    fn sweep(&mut self) {
        let out = &mut self.out;
        self.jobs.retain(|_, grid| match grid.outcome() {
            None => true,
            Some(result) => {
                grid.end(result, out);
                false
            }
        });
    }
}

/// A participant could not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unprepared {
    /// Why.
    pub reason: String,
    /// While it ran.
    pub failed: bool,
}
