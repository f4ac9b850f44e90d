//! Placement of one job: ask the planner, adopt a plan, order the parts. Standbys take over lost parts if they can.
use super::{Degraded, Job, NoPlan, Phase, Role, found};
use crate::id::{Epoch, NodeId, PartId};
use crate::job::output::{JobOutput, JobQuestion, Out, PlannerQuestion};
use crate::job::part::{Part, Standby};
use crate::job::workload::NewPlan;
use crate::limits::{DEGRADED_RETRY, HEARTBEAT, PLACE_ATTEMPTS_MAX, PREPARE_RETRY};
use crate::message::ToParticipant;
use crate::output::Event;
use crate::place::{Place, PlaceSet};
use crate::time::{Duration, Instant};
use crate::work::{Ending, Order, QuestionOrigin};
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::{format, string::String, vec::Vec};
use partitioner::tiles::GridError;
use partitioner::{Answer, DeviceId};

impl Job {
    /// Asks the planner. The job must remember the number returned: an answer to any other question is ignored.
    pub(in crate::job) fn ask(&mut self, mut without: PlaceSet, what: JobQuestion, out: &mut Out) -> u32 {
        if matches!(what, JobQuestion::Model { .. }) {
            without.extend(self.apart.iter().copied().map(Place::Node));
        }
        self.questions = self.questions.wrapping_add(1);
        let (job, question) = (self.id, self.questions);
        // Memory held for the job is passed as free: the planner itself subtracts what the parts and standbys of the
        // placement take.
        let ask = Box::new(PlannerQuestion { job: Some(job), resident: self.holdings(), without, what });
        out.push_back(JobOutput::Ask { asked: QuestionOrigin::Job { job, question }, ask });
        question
    }

    /// Asks for a placement.
    pub(in crate::job) fn plan(&mut self, out: &mut Out) {
        self.outdated = false;
        let what = self.workload.ask(false);
        let question = self.ask(PlaceSet::default(), what, out);
        self.phase = Phase::Planning { question };
    }

    /// Parts are lost. Standbys take over, or all parts are placed from scratch.
    pub(in crate::job) fn replan(&mut self, now: Instant, lost: &PlaceSet, out: &mut Out) {
        self.workload.stop(out);
        self.forget_move(now, out);
        self.note_lost(now, lost);
        self.workload.lost(lost, out);
        if self.promote(now, lost, out) {
            return self.place(now, out);
        }
        if !self.is_degraded() {
            self.attempts += 1;
            if self.attempts > PLACE_ATTEMPTS_MAX {
                self.attempts = 0;
                let reason = format!("{PLACE_ATTEMPTS_MAX} placements in a row failed");
                return self.degrade(now, reason, out);
            }
        }
        self.place_from_scratch(out);
    }

    /// Leases expire one after the other, and each loss may lead to another placement. So this counts how many of the
    /// nodes that took part at first are lost within [`LOST_TOGETHER`].
    fn note_lost(&mut self, now: Instant, lost: &PlaceSet) {
        let participants = self.participants();
        let (since, all, gone) = &mut self.lost_lately;
        if *all == 0 || now.since(*since) > LOST_TOGETHER {
            (*since, *all) = (now, participants.len());
            gone.clear();
        }
        gone.extend(participants.into_iter().filter(|node| lost.touches(*node)));
        self.was_absent |= 2 * gone.len() >= (*all).max(2);
    }

    /// The present placement cannot continue.
    pub(in crate::job) fn place_from_scratch(&mut self, out: &mut Out) {
        self.workload.roll_back();
        self.plan(out);
    }

    /// Standbys become the owners of all lost parts, if each lost part has a standby that can. All or none: a promoted
    /// standby is no longer a standby.
    pub(in crate::job) fn promote(&mut self, now: Instant, lost: &PlaceSet, out: &mut Out) -> bool {
        let placed = matches!(self.phase, Phase::Preparing { .. } | Phase::Running);
        let gone = |part: &Part| lost.has(part.place());
        let goes_on = self.inherited || self.parts.iter().any(gone);
        let able = |part: &Part| part.standby.as_ref().is_some_and(|s| s.ready && !lost.has(s.place()));
        if !placed
            || !goes_on
            || !self.workload.can_promote()
            || self.parts.iter().any(|part| gone(part) && !able(part))
        {
            return false;
        }
        let epoch = Epoch { counter: self.epoch.counter.saturating_add(1), ..self.epoch };
        for (index, part) in self.parts.iter_mut().enumerate() {
            let (number, job) = (PartId::of(index), self.id);
            if part.standby.as_ref().is_some_and(|standby| lost.has(standby.place())) {
                part.standby = None;
            }
            if lost.has(part.place())
                && let Some(standby) = part.promote()
            {
                self.workload.promoted(number, &standby);
                let node = standby.node;
                out.push_back(JobOutput::Notify(Event::Promoted { job, epoch, part: number, node }));
            }
            if let Some(standby) = &mut part.standby {
                standby.ask_again(now);
            }
        }
        true
    }

    /// The planner answered one of this job's questions.
    pub(in crate::job) fn handle_answer(&mut self, now: Instant, question: u32, answer: Answer, out: &mut Out) {
        if self.standbys_asked == Some(question) {
            self.standbys_asked = None;
            return match answer {
                Answer::ModelStandbys(chosen) => self.handle_stage_standbys(now, chosen, out),
                Answer::GridStandbys(chosen) => self.handle_tile_standbys(now, &chosen, out),
                Answer::Model(_) | Answer::Grid(_) => {}
            };
        }
        if self.rebalance.awaits(question) {
            return self.handle_better(now, answer, out);
        }
        let fallback = self.timeout.awaits(question) && matches!(self.phase, Phase::Preparing { .. } | Phase::Running);
        if !fallback && self.phase != (Phase::Planning { question }) {
            return;
        }
        self.timeout.end();
        match found(answer) {
            Ok(found) if fallback => {
                self.workload.stop(out);
                self.forget_move(now, out);
                self.workload.roll_back();
                self.adopt(now, found, out);
            }
            Err(_) if fallback => {}
            Err(_) if self.outdated => self.plan(out),
            Ok(found) => self.adopt(now, found, out),
            Err(NoPlan::Never(reason)) => self.ending = Some(Ending::Failed(reason)),
            Err(NoPlan::Grid(error)) if self.epoch.counter == 0 => self.wait_for_adverts(now, &error),
            Err(NoPlan::Grid(error)) => self.degrade(now, format!("{error}"), out),
            Err(NoPlan::Model(error)) => self.degrade(now, self.refusals.explain(&error), out),
        }
    }

    /// Adopts a placement.
    pub(in crate::job) fn adopt(&mut self, now: Instant, found: NewPlan, out: &mut Out) {
        let kept: Vec<bool> =
            (0..self.parts.len()).map(|at| self.workload.is_same_part(&found, PartId::of(at))).collect();
        let before = core::mem::take(&mut self.parts);
        let old_owners: Vec<DeviceId> = before.iter().map(Part::place).collect();
        self.cut = self.cut.wrapping_add(1);
        self.parts = self.workload.adopt(found);
        // Devices that own another part than before need their memory for it, so they do not stay standbys.
        let stays = |(at, owner): (usize, DeviceId)| kept.get(at) == Some(&true) && old_owners.get(at) == Some(&owner);
        let owners = self.parts.iter().map(Part::place).enumerate();
        let moved: BTreeSet<DeviceId> = owners.filter(|owned| !stays(*owned)).map(|(_, owner)| owner).collect();
        // Standbys of unchanged parts stay.
        for ((part, old), _) in self.parts.iter_mut().zip(before).zip(&kept).filter(|(_, kept)| **kept) {
            let owner = part.owner;
            let stays = |standby: &Standby| standby.node != owner && !moved.contains(&standby.place());
            part.standby = old.standby.filter(stays);
            if let Some(standby) = &mut part.standby {
                standby.ask_again(now);
            }
        }
        if self.parts.is_empty() {
            return self.degrade(now, "the planner found no parts".into(), out);
        }
        self.place(now, out);
    }

    /// Issues the next epoch and orders every part.
    pub(in crate::job) fn place(&mut self, now: Instant, out: &mut Out) {
        let Some(next) = self.epoch.counter.checked_add(1) else {
            return self.degrade(now, "all epochs of this job are used up: start it again".into(), out);
        };
        self.epoch.counter = next;
        (self.standbys_asked, self.standbys_due) = (None, None);
        self.unfit.clear();
        self.parts.iter_mut().for_each(|part| part.ready = None);
        let participants = self.participants();
        self.asked.extend(participants.iter().copied());
        self.waiting.extend(participants.iter().copied());
        self.known.extend(participants);
        self.choose_successors();
        self.announce_successors(out);
        let (job, epoch, step_ns) = (self.id, self.epoch, self.workload.step_ns());
        let placement = Box::new(self.workload.placement(&self.parts));
        out.push_back(JobOutput::Notify(Event::JobPlaced { job, epoch, step_ns, placement }));
        self.inherited = false;
        self.workload.placed(now);
        self.watch(out);
        let bytes = self.parts.iter().map(|part| part.room.bytes()).max().unwrap_or(0);
        self.timeout.begin(now, bytes, step_ns);
        self.phase = Phase::Preparing { retry_at: now + PREPARE_RETRY };
        self.send_orders(out);
        for at in 0..self.parts.len() {
            self.order_standby(now, PartId::of(at), out);
        }
        self.publish_record(out);
    }

    /// Takes leases with all participants.
    pub(in crate::job) fn watch(&self, out: &mut Out) {
        let nodes: BTreeSet<NodeId> = self.owners().into_iter().collect();
        let standbys: BTreeSet<NodeId> = self.standby_nodes().difference(&nodes).copied().collect();
        let others = self.waiting.iter().filter(|node| !nodes.contains(node) && !standbys.contains(node)).copied();
        out.push_back(JobOutput::Watch {
            job: self.id,
            epoch: self.epoch,
            others: others.collect(),
            nodes: nodes.into_iter().collect(),
            standbys: standbys.into_iter().collect(),
        });
    }

    /// The order of a part, for its owner or its standby.
    pub(in crate::job) fn order(&self, part: PartId, role: Role) -> Option<Box<Order>> {
        let known = self.parts.get(part.index())?;
        let standby = known.standby.as_ref().filter(|_| role == Role::Standby);
        let node = standby.map_or(known.owner, |standby| standby.node);
        let room = standby.map_or(known.room, |standby| standby.room);
        Some(Box::new(Order {
            name: self.name.clone(),
            part,
            owners: self.owners(),
            device: standby.map_or(known.device, |standby| standby.device),
            other_parts: self.parts_of(node).filter(|&beside| beside != part).collect(),
            standby: standby.map(|standby| standby.tier),
            bytes_max: room.memory,
            ram: room.ram,
            successors: self.successors(),
            previous: self.previous.clone(),
            work: self.workload.work(part, known.step_ns, standby),
        }))
    }

    /// Parts that a node holds, as owner or standby.
    pub(in crate::job) fn parts_of(&self, node: NodeId) -> impl Iterator<Item = PartId> + '_ {
        let has = move |part: &Part| part.owner == node || part.standby.as_ref().is_some_and(|s| s.node == node);
        self.parts.iter().enumerate().filter(move |(_, part)| has(part)).map(|(at, _)| PartId::of(at))
    }

    pub(in crate::job) fn send(&self, to: NodeId, say: ToParticipant, out: &mut Out) {
        out.push_back(JobOutput::Message { to, job: self.id, epoch: self.epoch, say });
    }

    /// Sends orders to the owners that have not answered.
    pub(in crate::job) fn send_orders(&self, out: &mut Out) {
        for (at, part) in self.parts.iter().enumerate().filter(|(_, part)| part.ready.is_none()) {
            if let Some(order) = self.order(PartId::of(at), Role::Owner) {
                self.send(part.owner, ToParticipant::Prepare(order), out);
            }
        }
    }

    /// There is no first plan of a grid. Members that have just freed memory advertise it a moment later. After that there
    /// is nothing to wait for, because nothing has been computed yet.
    fn wait_for_adverts(&mut self, now: Instant, error: &GridError) {
        let reason = format!("{error}");
        let since = self.degraded.as_ref().map_or(now, |degraded| degraded.since);
        let may_be_freed = match error {
            GridError::Memory { .. } | GridError::Packing { .. } => now.since(since) < ADVERTS_LATE,
            GridError::Invalid(_) | GridError::NoDevices | GridError::Depth { .. } => false,
        };
        if may_be_freed {
            self.phase = Phase::Degraded { retry_at: now + ADVERTS_RETRY };
            self.degraded = Some(Degraded { since, reason });
        } else {
            self.ending = Some(Ending::Failed(reason));
        }
    }

    /// There is no plan. Callers of `Start` receive the reason, and requests wait for a while.
    pub(in crate::job) fn degrade(&mut self, now: Instant, reason: String, out: &mut Out) {
        self.workload.stop(out);
        self.phase = Phase::Degraded { retry_at: now + DEGRADED_RETRY };
        let (since, news) = match &self.degraded {
            Some(known) => (known.since, known.reason != reason),
            None => (now, true),
        };
        for call in self.take_callers(news) {
            let event = Event::JobDegraded { call, job: self.id, reason: reason.clone() };
            out.push_back(JobOutput::Notify(event));
        }
        self.degraded = Some(Degraded { since, reason });
    }

    /// A lost participant is heard again. Returns whether the job waits for the other `lost` nodes before it asks for a
    /// plan. If this node itself stood still, they are heard within the next heartbeats, and the parts that they hold
    /// need not be loaded again.
    pub(in crate::job) fn awaits_others(&mut self, now: Instant, lost: &PlaceSet) -> bool {
        let awaited = self.resident.keys().any(|node| lost.touches(*node));
        let Phase::Degraded { retry_at } = &mut self.phase else { return false };
        if awaited {
            *retry_at = (*retry_at).min(now + HEARTBEAT * 2);
        }
        awaited
    }

    /// A peer reports a higher epoch than was issued here. Later epochs are issued above it.
    pub(in crate::job) fn skip_epochs(&mut self, theirs: Epoch) {
        self.epoch.counter = self.epoch.counter.max(theirs.counter);
    }
}

/// By how much adverts may be late: several rounds of gossip.
const ADVERTS_LATE: Duration = Duration::from_secs(3);
/// How often the planner is asked meanwhile.
const ADVERTS_RETRY: Duration = Duration::from_millis(500);
/// A node that is cut off loses the other participants within a few leases of each other.
const LOST_TOGETHER: Duration = Duration::from_secs(2);
