//! What a coordinator leaves to its successors, and how one of them goes on.
use super::domains::Apart;
use super::lifecycle::{Job, Phase};
use super::output::{JobOutput, Out};
use super::part::{Part, Standby};
use super::steps::Steps;
use super::workload::Workload;
use crate::id::{Epoch, NodeId, PartId};
use crate::limits::{PREVIOUS_COORDINATORS_MAX, SUCCESSORS_MAX};
use crate::message::ToParticipant;
use crate::output::Event;
use crate::time::Instant;
use crate::work::{Ending, Inheritance, Inherited, PartRecord, PartWork, ProgramRecord, Record, StandbyRecord};
use alloc::{boxed::Box, format, vec::Vec};

impl Job {
    /// Nodes that may take the job over, in order: its owners, which have its data; those first that the loss of this node's
    /// machine or zone leaves.
    pub(super) fn successors(&self) -> Vec<NodeId> {
        let mut successors = Vec::new();
        if !self.workload.has_successors() {
            return successors;
        }
        for owner in self.owners() {
            if owner != self.me && !successors.contains(&owner) {
                successors.push(owner);
            }
        }
        successors.sort_by_key(|owner| Apart::among(&self.domains, *owner));
        successors.truncate(SUCCESSORS_MAX);
        successors
    }

    /// Whether a node may have taken the job over from this one: a successor that was named, or a previous coordinator.
    pub(super) fn may_succeed(&self, node: NodeId) -> bool {
        self.previous.contains(&node) || self.named.contains(&node)
    }

    /// Sends the successors what they would need.
    pub(super) fn publish_record(&self, out: &mut Out) {
        let successors = self.successors();
        if successors.is_empty() || self.parts.is_empty() {
            return;
        }
        let record = Record { parts: self.parts.iter().map(part_record).collect(), program: self.workload.record() };
        for to in successors {
            self.send(to, ToParticipant::Record(Box::new(record.clone())), out);
        }
    }

    /// A job whose coordinator is silent, as this node goes on with it. Nothing is asked of any node yet.
    pub(super) fn inherited(me: NodeId, inheritance: Inheritance, out: &mut Out) -> Option<Self> {
        let Inheritance { job: id, epoch, order, record, checkpoint } = inheritance;
        let (PartWork::Tile(tile), ProgramRecord::Steps(steps)) = (&order.work, &record.program) else { return None };
        let inherited = Inherited::Steps { simulation: tile.simulation, schedule: tile.schedule.clone() };
        let workload = Workload::Steps(Steps::inherited(me, (order.name.clone(), id, checkpoint), tile, steps));
        let mut job = Job::new(id, me, order.name.clone(), workload, None);
        // One number is left out, so that a coordinator that was only paused comes too late instead of taking it back.
        job.epoch = Epoch { counter: epoch.counter.saturating_add(1), issuer: me };
        job.phase = Phase::Running;
        let previous = core::iter::once(epoch.issuer).chain(order.previous.iter().copied());
        job.previous = previous.take(PREVIOUS_COORDINATORS_MAX).collect();
        job.inherited = true;
        job.parts = order.owners.iter().zip(&record.parts).map(|(&owner, record)| part(owner, record)).collect();
        for node in job.participants() {
            job.asked.insert(node);
            job.note_asked(node);
        }
        // What they hold is free for the next placement, should they not go on with it.
        for (at, record) in record.parts.iter().enumerate() {
            let nodes = order.owners.get(at).copied().into_iter().chain(record.standby.map(|standby| standby.node));
            for node in nodes {
                job.note_resident(node, PartId::of(at), record.bytes);
            }
        }
        let (from, inherited) = (epoch.issuer, Box::new(inherited));
        out.push_back(JobOutput::Notify(Event::JobInherited { job: id, from, inherited }));
        Some(job)
    }

    /// Whether enough of the participants stay to take it over.
    pub(super) fn can_be_left(&self) -> bool {
        let all = self.participants();
        let others = all.iter().filter(|node| **node != self.me).count();
        self.is_running() && !self.successors().is_empty() && 2 * others > all.len()
    }

    /// This node leaves the mesh, and the others see to the job.
    pub(super) fn leave(&mut self, out: &mut Out) {
        self.end(
            Ending::Moved(format!(
                "this node left the mesh, and another goes on with the job: `meshnode jobs` there shows it; its id is {:016x}",
                self.id.0
            )),
            out,
        );
    }

    /// Another node goes on with it.
    pub(super) fn stand_down(&mut self, successor: NodeId) {
        self.ending = Some(Ending::Moved(format!(
            "this node was silent for too long, and node {successor} has taken the job over: results from now on are kept there; \
             `meshnode jobs` and `meshnode watch {:016x}` there show it",
            self.id.0
        )));
    }
}

fn part_record(part: &Part) -> PartRecord {
    let standby = part.standby.as_ref().map(|standby| StandbyRecord {
        node: standby.node,
        tier: standby.tier,
        ready: standby.ready,
        snapshot_ms: standby.snapshot_ms,
    });
    PartRecord { bytes: part.bytes, step_ns: part.step_ns, standby }
}

fn part(owner: NodeId, record: &PartRecord) -> Part {
    let mut part = Part::new(owner, record.bytes, record.step_ns);
    part.standby = record.standby.map(|known| {
        let standby = Standby::new(Instant::default(), known.node, known.tier, (record.bytes, record.step_ns));
        Standby { ready: known.ready, snapshot_ms: known.snapshot_ms, ..standby }
    });
    part
}
