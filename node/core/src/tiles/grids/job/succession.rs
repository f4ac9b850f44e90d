//! What a coordinator leaves to its successors, and how one of them goes on.
use super::super::super::message::TileMessage;
use super::super::GridOutput;
use super::{GridJob, Phase, Standby, Tile};
use crate::id::{Epoch, NodeId};
use crate::limits::SUCCESSORS_MAX;
use crate::time::Instant;
use crate::work::steps::{GridEvent, Inheritance, TileFigures, Will, WilledTile};
use alloc::collections::VecDeque;
use alloc::{boxed::Box, format, vec::Vec};

impl GridJob {
    /// Who may take the job over, in order: those who compute it, for they have it already.
    pub(super) fn successors(&self) -> Vec<NodeId> {
        let mut successors = Vec::new();
        for owner in self.tiles.iter().map(|tile| tile.owner) {
            if owner != self.me && !successors.contains(&owner) && successors.len() < SUCCESSORS_MAX {
                successors.push(owner);
            }
        }
        successors
    }

    /// Whether a node may have taken the job over from this one: a successor that was named, or a coordinator before this one.
    pub(in crate::tiles::grids) fn may_succeed(&self, node: NodeId) -> bool {
        self.formers.contains(&node) || self.named.contains(&node)
    }

    /// Whether a node was ever asked to take part, or coordinated the job before.
    pub(in crate::tiles::grids) fn has_asked(&self, node: NodeId) -> bool {
        self.asked.contains(&node) || self.formers.contains(&node)
    }

    /// The nodes of the present placement may answer for it as long as the job lasts.
    pub(super) fn remember_asked(&mut self) {
        let (asked, named) = (self.participants(), self.successors());
        self.asked.extend(asked);
        self.named.extend(named);
    }

    /// Tells the successors what they would have to know.
    pub(super) fn bequeath(&self, out: &mut VecDeque<GridOutput>) {
        let will = Will {
            tier: self.spec.tier,
            depth: self.spec.depth,
            step_ns: self.step_ns,
            start: self.start,
            checkpoint: self.checkpoint,
            tiles: self.tiles.iter().map(willed).collect(),
        };
        for successor in self.successors() {
            self.say(successor, TileMessage::Will(Box::new(will.clone())), out);
        }
    }

    /// A job whose coordinator is silent, as this node goes on with it: nothing is asked of anybody yet.
    pub(in crate::tiles::grids) fn inherited(
        me: NodeId,
        inheritance: Inheritance,
        out: &mut VecDeque<GridOutput>,
    ) -> Self {
        let Inheritance { spec, epoch, depth, owners, formers, will } = inheritance;
        let mut job = GridJob::new(me, spec);
        // One number is left out, so that a coordinator that was only paused comes too late instead of taking it back.
        job.epoch = Epoch { counter: epoch.counter.saturating_add(1), minter: me };
        job.phase = Phase::Running;
        (job.depth, job.step_ns, job.start) = (depth, will.step_ns, will.start);
        (job.formers, job.inherited) = (formers, true);
        let tiles = owners.into_iter().zip(&will.tiles);
        let tiles = tiles.map(|((owner, block), willed)| Tile {
            block,
            owner,
            bytes: willed.bytes,
            step_ns: willed.step_ns,
            pace: willed.pace,
            ready: None,
            held: true,
            step: 0,
            figures: TileFigures::default(),
            standby: willed.standby.map(|(node, current)| Standby {
                node,
                prepared: current,
                step: current.then_some(0),
                asked: Instant::default(),
                told: false,
                snapshot_ms: willed.snapshot_ms,
            }),
        });
        job.tiles = tiles.collect();
        job.remember_asked();
        let (simulation, schedule) = (job.spec.simulation, job.spec.schedule.clone());
        job.tell(GridEvent::Inherited { from: epoch.minter, simulation, schedule }, out);
        job
    }

    /// Whether enough of those who take part stay to take it over.
    pub(in crate::tiles::grids) fn can_be_left(&self) -> bool {
        let all = self.participants();
        let others = all.iter().filter(|node| **node != self.me).count();
        self.phase == Phase::Running && !self.successors().is_empty() && 2 * others > all.len()
    }

    /// This node leaves the mesh, which is told so: the others see to it.
    pub(in crate::tiles::grids) fn leave(&self, out: &mut VecDeque<GridOutput>) {
        self.tell(GridEvent::Moved, out);
        out.push_back(GridOutput::Unwatch { job: self.spec.job });
        let result = Err(format!(
            "this node left the mesh, and another goes on with the simulation: `meshnode jobs` there shows it; its id is {:016x}",
            self.spec.job.0
        ));
        let figures = self.tiles.iter().map(|tile| tile.figures).collect();
        self.tell(GridEvent::Ended { result, figures }, out);
    }

    /// Another node goes on with it.
    pub(in crate::tiles::grids) fn stand_down(&mut self, successor: NodeId, out: &mut VecDeque<GridOutput>) {
        self.tell(GridEvent::Moved, out);
        self.outcome = Some(Err(format!(
            "this node was silent for too long, and node {successor} has taken the simulation over: what is made from now on is kept \
             there; `meshnode jobs` and `meshnode watch {:016x}` there show it",
            self.spec.job.0
        )));
    }
}

fn willed(tile: &Tile) -> WilledTile {
    let standby = tile.standby.map(|standby| (standby.node, standby.step.is_some()));
    let snapshot_ms = tile.standby.map_or(0, |standby| standby.snapshot_ms);
    WilledTile { bytes: tile.bytes, step_ns: tile.step_ns, pace: tile.pace, standby, snapshot_ms }
}
