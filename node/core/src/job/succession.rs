//! Succession at the coordinator: publishes the succession record, takes over jobs of silent coordinators, and decides
//! between two coordinators of one job.
use super::domains::SharedDomain;
use super::lifecycle::{Job, Phase};
use super::output::{JobOutput, Out};
use super::part::{Part, Standby};
use super::serve::Serve;
use super::steps::Steps;
use super::workload::Workload;
use crate::id::{Epoch, NodeId, PartId};
use crate::limits::{PREVIOUS_COORDINATORS_MAX, SUCCESSORS_MAX, UNUSED_MAX};
use crate::message::ToParticipant;
use crate::output::Event;
use crate::time::{Duration, Instant};
use crate::work::serve::ToCaller;
use crate::work::{Ending, Inherited, PartRecord, PartWork, ProgramRecord, Record, StandbyRecord, Takeover};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::{boxed::Box, format, vec::Vec};
use partitioner::{DeviceId, Room};

impl Job {
    /// Successors under the present epoch, in order.
    pub(super) fn successors(&self) -> Vec<NodeId> {
        self.successors.clone()
    }

    /// Chooses the successors for a new epoch: the owners, then the standbys. Nodes that survive the loss of this
    /// node's machine or zone come first. The successors stay until the next epoch, because participants obey no
    /// others.
    pub(super) fn choose_successors(&mut self) {
        let mut successors = Vec::new();
        for owner in self.owners().into_iter().chain(self.standby_nodes()) {
            if owner != self.me && !successors.contains(&owner) {
                successors.push(owner);
            }
        }
        successors.sort_by_key(|owner| SharedDomain::among(&self.domains, *owner));
        successors.truncate(SUCCESSORS_MAX);
        self.named.extend(successors.iter().copied());
        self.successors = successors;
    }

    /// Sends the successors to nodes that have callers of this job, which ask them if they lose this node.
    pub(super) fn announce_successors(&self, out: &mut Out) {
        let Workload::Serve(serve) = &self.workload else { return };
        for (to, call) in serve.requests.calls_of_others() {
            let say = ToCaller::RunsIn { job: self.id, successors: self.successors() };
            out.push_back(JobOutput::Tell { to, call, say });
        }
    }

    /// Nodes that may coordinate the job at some time after this one.
    pub(super) fn may_go_on(&self) -> BTreeSet<NodeId> {
        self.participants().into_iter().chain(self.named.iter().copied()).filter(|node| *node != self.me).collect()
    }

    /// Whether a node may have taken the job over from this one: a named successor, or a previous coordinator.
    pub(super) fn may_succeed(&self, node: NodeId) -> bool {
        self.previous.contains(&node) || self.named.contains(&node)
    }

    /// Whether a node is a previous coordinator of the job.
    pub(super) fn succeeded(&self, node: NodeId) -> bool {
        self.previous.contains(&node)
    }

    /// Publishes the succession record to the successors.
    pub(super) fn publish_record(&self, out: &mut Out) {
        let successors = self.successors();
        if successors.is_empty() || self.parts.is_empty() {
            return;
        }
        let record = self.record();
        for to in successors {
            self.send(to, ToParticipant::Record(Box::new(record.clone())), out);
        }
    }

    fn record(&self) -> Record {
        Record { parts: self.parts.iter().map(part_record).collect(), program: self.workload.record() }
    }

    /// Sends the successors the token log entries since the last call.
    pub(super) fn publish_log(&mut self, now: Instant, out: &mut Out) {
        let successors = self.successors();
        let Workload::Serve(serve) = &mut self.workload else { return };
        if successors.is_empty() {
            return serve.requests.drop_log();
        }
        let news = serve.requests.take_log(now);
        if !news.is_empty() {
            for to in successors {
                self.send(to, ToParticipant::Log(news.clone()), out);
            }
        }
    }

    /// Ends an inherited model job that has had no callers for [`UNUSED_MAX`]. Its first coordinator may serve the
    /// model again.
    pub(super) fn end_unused(&mut self, now: Instant) {
        let Workload::Serve(serve) = &self.workload else { return };
        if self.previous.is_empty() || serve.requests.has_callers() {
            self.unused_since = None;
        } else if serve.model.replicas == 0 && serve.requests.is_empty() {
            // Entry nodes ask the successor of the first job, and a node may need the memory for that.
            self.ending = Some(Ending::Completed);
        } else if now.since(*self.unused_since.get_or_insert(now)) >= UNUSED_MAX {
            self.ending = Some(Ending::Completed);
        }
    }

    /// Takes over a job whose coordinator is silent. Nothing is asked of any node yet.
    pub(super) fn inherited(me: NodeId, inheritance: Takeover, out: &mut Out) -> Option<Self> {
        let Takeover { job: id, epoch, order, record, checkpoint, log } = inheritance;
        // One counter is skipped: the next epoch of a coordinator that was only paused is then lower than this node's
        // first one.
        let counter = epoch.counter.saturating_add(1);
        let (workload, inherited) = match (&order.work, &record.program) {
            (PartWork::Tile(tile), ProgramRecord::Steps(steps)) => {
                let inherited = Inherited::Steps { simulation: tile.simulation, schedule: tile.schedule.clone() };
                let steps = Steps::inherited(me, (order.name.clone(), id, checkpoint), tile, steps);
                (Workload::Steps(steps), inherited)
            }
            (PartWork::Stage(stage), ProgramRecord::Serve(serve)) => {
                if serve.model.content != stage.content {
                    return None;
                }
                let inherited = Inherited::Serve { model: serve.model.clone() };
                let owners = order.owners.iter().zip(&record.parts);
                let owners: Vec<DeviceId> = owners.map(|(owner, record)| owner.device(record.device)).collect();
                (Workload::Serve(Serve::inherited(id, counter, (stage, &owners), (**serve).clone(), log)), inherited)
            }
            (PartWork::Tile(_), ProgramRecord::Serve(_)) | (PartWork::Stage(_), ProgramRecord::Steps(_)) => {
                return None;
            }
        };
        let mut job = Job::new(id, me, order.name.clone(), workload, None);
        job.epoch = Epoch { counter, issuer: me };
        job.phase = Phase::Running;
        let previous = core::iter::once(epoch.issuer).chain(order.previous.iter().copied());
        job.previous = previous.take(PREVIOUS_COORDINATORS_MAX).collect();
        job.inherited = true;
        job.parts = order.owners.iter().zip(&record.parts).map(|(&owner, record)| part(owner, record)).collect();
        for node in job.participants() {
            job.asked.insert(node);
            job.note_asked(node);
        }
        // The next placement may use the memory that the participants hold, if it gives them other parts.
        for (at, record) in record.parts.iter().enumerate() {
            let owner = order.owners.get(at).map(|owner| (owner.device(record.device), record.room()));
            let standby = record.standby.map(|standby| (standby.place(), standby.room(record)));
            for (device, room) in owner.into_iter().chain(standby) {
                job.note_resident(device, PartId::of(at), room);
            }
        }
        let (from, inherited) = (epoch.issuer, Box::new(inherited));
        out.push_back(JobOutput::Notify(Event::JobInherited { job: id, from, inherited }));
        Some(job)
    }

    /// Whether a majority of the participants remains without this node, so that a successor can take over.
    pub(super) fn can_be_left(&self) -> bool {
        let all = self.participants();
        let others = all.iter().filter(|node| **node != self.me).count();
        self.is_running() && !self.successors().is_empty() && 2 * others > all.len()
    }

    /// This node leaves the mesh. A successor takes the job over.
    pub(super) fn leave(&mut self, out: &mut Out) {
        self.end(
            Ending::Moved(format!(
                "this node left the mesh, and another node continues the job: `meshnode jobs` there shows it, with id {:016x}",
                self.id.0
            )),
            out,
        );
    }

    /// A node reports another coordinator of the job: one that it obeys, or itself. This node believes the claim and
    /// stands down if
    /// - it was absent, and two nodes that were ordered to take part claim the same coordinator,
    /// - more than half of the participants claim the same epoch (a takeover needs a majority), or
    /// - it has no placement, and the claimant is the other coordinator.
    ///
    /// Otherwise it queries the participants that have claimed nothing.
    ///
    /// If two coordinators of the job reach each other, the earlier one alone decides which stands down, because
    /// otherwise both might. If it does not believe the claim, it sends its epoch and stays, and the successor stands
    /// down when it receives the epoch. A coordinator that was absent first waits [`CONFIRMED`] for a second claim.
    pub(super) fn handle_claim(&mut self, now: Instant, from: NodeId, theirs: Epoch, out: &mut Out) {
        let participants = self.participants();
        if self.succeeded(theirs.issuer) {
            if self.claims.asked.is_none_or(|at| now.since(at) >= CLAIMS_QUIET) {
                self.claims.asked = Some(now);
                self.say_epoch(theirs.issuer, out);
            }
            return;
        }
        let (_, by) = self.claims.of.entry(theirs.issuer).or_insert_with(|| (now, BTreeSet::new()));
        by.insert(from);
        let by = by.clone();
        let votes = by.intersection(&participants).count();
        let coordinates = from == theirs.issuer;
        // Even if this node was absent since.
        let stays = self.claims.stays.is_some_and(|(claim, until)| theirs <= claim && now < until);
        // A coordinator without a placement has nothing to lose.
        let believed = self.was_absent && by.len() >= 2 || coordinates && self.is_degraded();
        if (believed || 2 * votes > participants.len()) && !stays {
            return self.stand_down(theirs.issuer);
        }
        if coordinates && !stays && !self.doubts(now) {
            self.claims.stays = Some((theirs, now + STAYS));
            self.claims.of.remove(&from);
            self.say_epoch(from, out);
            if !participants.contains(&from) {
                self.send(from, ToParticipant::End, out); // it may hold parts that no placement needs
            }
            return;
        }
        if self.claims.asked.is_none_or(|at| now.since(at) >= CLAIMS_QUIET) {
            self.claims.asked = Some(now);
            // The record is only a query. Nodes that do not succeed this one have no use for it. Nodes that obey
            // another coordinator answer with its epoch.
            let record = self.record();
            let before = self.known.iter().filter(|_| self.was_absent);
            let asked: BTreeSet<NodeId> = participants.iter().chain(before).copied().collect();
            for to in asked.into_iter().filter(|node| *node != self.me && !by.contains(node)) {
                self.send(to, ToParticipant::Record(Box::new(record.clone())), out);
            }
        }
    }

    /// Whether this node was away, and one node, but no second one, has said lately that another coordinates the job.
    pub(super) fn doubts(&self, now: Instant) -> bool {
        let unconfirmed = |(since, by): &(Instant, BTreeSet<NodeId>)| by.len() == 1 && now.since(*since) < CONFIRMED;
        self.was_absent && self.claims.of.values().any(unconfirmed)
    }

    /// Sends this node's epoch to another coordinator of the job.
    fn say_epoch(&self, to: NodeId, out: &mut Out) {
        out.push_back(JobOutput::Stale { to, job: self.id, mine: self.epoch });
    }

    /// Another node coordinates the job now.
    pub(super) fn stand_down(&mut self, successor: NodeId) {
        self.successor = Some(successor);
        let why = if self.succeeded(successor) {
            "it coordinated the job before and is back"
        } else {
            "this node was silent for too long"
        };
        self.ending = Some(Ending::Moved(format!(
            "node {successor} continues the job, because {why}: later results are stored there; \
             `meshnode jobs` and `meshnode watch {:016x}` there show it",
            self.id.0
        )));
    }
}

/// Claims of other nodes that another coordinator has the job.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Claims by the coordinator they name: since when, and by which nodes. Only previous coordinators and named successors
    /// are counted, so there are few.
    of: BTreeMap<NodeId, (Instant, BTreeSet<NodeId>)>,
    /// When the participants, or the previous coordinator, were last queried.
    asked: Option<Instant>,
    /// Until this time the node does not stand down for claims up to this epoch: the successor was sent this node's
    /// epoch and stands down.
    stays: Option<(Epoch, Instant)>,
}

/// How long a coordinator that sent a successor its epoch does not stand down. The epoch may be lost; it is sent again
/// afterwards.
const STAYS: Duration = Duration::from_secs(5);
/// How long a coordinator that was absent waits for a second node to confirm a claim.
const CONFIRMED: Duration = Duration::from_secs(2);
/// Least time between two queries.
const CLAIMS_QUIET: Duration = Duration::from_millis(500);

fn part_record(part: &Part) -> PartRecord {
    let standby = part.standby.as_ref().map(|standby| StandbyRecord {
        node: standby.node,
        device: standby.device,
        ram: standby.room.ram,
        tier: standby.tier,
        ready: standby.ready,
        snapshot_ms: standby.snapshot_ms,
    });
    let Room { memory: bytes, ram } = part.room;
    PartRecord { device: part.device, bytes, ram, step_ns: part.step_ns, standby }
}

fn part(owner: NodeId, record: &PartRecord) -> Part {
    let mut part = Part::new(owner.device(record.device), record.room(), record.step_ns);
    part.standby = record.standby.map(|known| {
        let costs = (known.room(record), record.step_ns);
        let standby = Standby::new(Instant::default(), known.place(), known.tier, costs);
        Standby { ready: known.ready, snapshot_ms: known.snapshot_ms, ..standby }
    });
    part
}
