//! Each stage has a standby if a host has memory for one, and standbys that are current stay current while a request runs.
//! The same holds for the tiles of a simulation with standbys, whenever no fault is active.
use crate::case::StandbyTier;
use crate::checker::survival::Survival;
use crate::host::Host;
use crate::submissions::{Submission, Submissions};
use crate::workload::Workload;
use crate::world::World;
use node_core::id::{Epoch, JobId, NodeId, PartId};
use node_core::job::{JobState, JobView, PartView, ProgramView, WhatView};
use node_core::time::{Duration, Instant};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Watches the standbys of tiles. Clones share what they saw.
#[derive(Clone, Default)]
pub struct TileStandbys {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// The standby of each tile under a placement, and since when.
    standbys: BTreeMap<(JobId, Epoch, PartId), (TileStandby, Instant)>,
    reported: BTreeSet<JobId>,
    violations: Vec<String>,
}

/// The standby of a tile, and the step of its state.
type TileStandby = Option<(NodeId, Option<u32>)>;

impl TileStandbys {
    /// All violations.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }

    /// Records a tile that has no standby for long although a host has memory, and a standby that does not follow its tile.
    pub fn look(&self, world: &World, submissions: &Submissions, survival: &Survival) {
        let mut seen = self.seen.borrow_mut();
        let guarded =
            |submission: &&Submission| submission.simulation.tier != StandbyTier::None && submission.end.is_none();
        for submission in submissions.all.iter().filter(guarded) {
            let node = world.host(submission.coordinator).node.as_ref();
            let view = node.and_then(|node| node.jobs().find(|view| view.job == submission.job()));
            // No standby is assigned in the last steps.
            let Some(view) = view.filter(|view| view.state == JobState::Running && !ends_soon(view)) else { continue };
            for (at, tile) in view.parts.iter().enumerate() {
                let wrong = seen.look_at_tile(world, &view, PartId::of(at), tile, survival);
                if let Some(wrong) = wrong.filter(|_| seen.reported.insert(view.job)) {
                    seen.violations.push(format!("{}: {wrong}", submission.name()));
                }
            }
        }
    }
}

fn ends_soon(view: &JobView) -> bool {
    match view.program {
        ProgramView::Steps { step, steps, .. } => step + LAST >= steps,
        ProgramView::Serve { .. } => false,
    }
}

impl Seen {
    fn look_at_tile(
        &mut self,
        world: &World,
        view: &JobView,
        number: PartId,
        tile: &PartView,
        survival: &Survival,
    ) -> Option<String> {
        let now = world.now();
        let WhatView::Tile { step: made, .. } = tile.what else { return None };
        let standby: TileStandby = tile.standby.as_ref().and_then(|standby| Some((standby.node?, standby.step)));
        let (before, since) = self.standbys.entry((view.job, view.epoch, number)).or_insert((standby, now));
        if *before != standby {
            (*before, *since) = (standby, now);
        }
        if *since + FOLLOWS > now || !survival.is_calm(*since, now) {
            return None;
        }
        let room = |host: &Host| {
            let usable = host.runs() && !host.leaves && host.node_id != tile.owner;
            let bytes = tile.bytes.unwrap_or(tile.bytes_max);
            usable && host.executor.largest_free() >= bytes + bytes / MARGIN
        };
        let ms = now.since(*since).as_millis();
        match standby {
            None if world.hosts().any(room) => {
                Some(format!("tile {number} has no standby for {ms} ms, though a host has room"))
            }
            Some((node, step)) if step.is_none_or(|step| step + LAST < made) => {
                let step = step.unwrap_or(0);
                Some(format!(
                    "the standby {node} of tile {number} stays at step {step} for {ms} ms, its owner is at {made}"
                ))
            }
            None | Some(_) => None,
        }
    }
}

/// Stages without a standby although a host other than their owner has memory for one. Empty while the job is not running.
pub fn missing(world: &World, work: &Workload) -> Vec<String> {
    let Some(view) = job(world, work) else { return Vec::new() };
    let idle = |owner: NodeId, bytes: u64| {
        let free = world.hosts().filter(|host| host.runs() && !host.leaves && host.node_id != owner);
        free.map(|host| host.executor.largest_free()).any(|free| free >= bytes + bytes / MARGIN)
    };
    let covered =
        |part: &PartView| part.standby.as_ref().is_some_and(|standby| standby.node.is_some() && standby.resident);
    let open = view.parts.iter().enumerate().filter(|(_, part)| !covered(part));
    let lacks = open.filter(|(_, part)| part.bytes.is_some_and(|bytes| idle(part.owner, bytes)));
    lacks.map(|(at, part)| format!("part {at}, {:?}, has no standby, though a host has room", part.what)).collect()
}

/// The standbys that are current, by stage.
pub fn current(world: &World, work: &Workload) -> BTreeSet<(u16, NodeId)> {
    let view = job(world, work);
    let parts = view.iter().flat_map(|view| &view.parts).zip(0..);
    parts.filter_map(|(part, at)| Some((at, part.standby.as_ref().filter(|s| s.current)?.node?))).collect()
}

fn job(world: &World, work: &Workload) -> Option<JobView> {
    let mut jobs = world.host(work.entry).node.as_ref()?.jobs();
    jobs.find(|view| Some(view.job) == work.job && view.state == JobState::Running)
}

/// A tile has a standby, and the standby advances, within this time without faults: a rejection is retried after five
/// seconds, and a node that failed is used again after ten.
const FOLLOWS: Duration = Duration::from_secs(8);
/// Steps that a standby may lag behind, and last steps of a simulation, in which no standby is assigned.
const LAST: u32 = 20;
/// The planner keeps a part of each host's memory free: a tenth plus rounding.
const MARGIN: u64 = 4;
