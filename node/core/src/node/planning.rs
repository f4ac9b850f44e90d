//! The mesh as the planner sees it: what members advertise, corrected by measurements, with the memory that a job holds
//! counted as free.
use super::Node;
use crate::id::{CallId, Epoch, JobId, NodeId};
use crate::job::{Domains, JobQuestion, Measured, PlannerQuestion, SharedDomain};
use crate::limits::{CHALLENGE_STEPS, HALO_LOG_BYTES_MAX, SNAPSHOT_EVERY_MIN, SOURCES_MAX};
use crate::membership::Member;
use crate::output::Event;
use crate::speeds::Timing;
use crate::work::Order;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;
use partitioner::tiles::GridQuestion;
use partitioner::{
    DeviceId, Fleet, Goal, GridStandbysQuestion, ModelQuestion, ModelStandbysQuestion, Options, Question, Room, Work,
};

impl Node {
    /// The mesh as it is advertised, corrected by measurements.
    pub(super) fn fleet(&self) -> Fleet {
        let mut fleet = self.membership.fleet();
        fleet.devices.iter_mut().for_each(|device| self.speeds.correct(device));
        fleet
    }

    /// A job's question to the planner, with the present mesh.
    pub(super) fn question(&self, ask: PlannerQuestion) -> Question {
        let PlannerQuestion { job, resident, without, what } = ask;
        let mut fleet = job.map_or_else(|| self.fleet(), |job| self.fleet_for(job, &resident));
        for device in &mut fleet.devices {
            device.excluded |= without.has(device.id);
        }
        match what {
            JobQuestion::Model { work, repair, present, caller } => {
                let (repair, present) = (repair.map(|plan| *plan), present.map(|plan| *plan));
                let options = self.plan_options(caller);
                let question = ModelQuestion { work, fleet, options, repair, present, standbys: caller };
                Question::Model(Box::new(question))
            }
            JobQuestion::ModelStandbys { work, plan, kept } => {
                let (options, plan) = (self.plan_options(false), *plan);
                Question::ModelStandbys(Box::new(ModelStandbysQuestion { work, fleet, options, plan, kept }))
            }
            JobQuestion::Grid { work, depth, rates, present } => {
                Question::Grid(Box::new(GridQuestion { work, fleet, rates, depth, present }))
            }
            JobQuestion::GridStandbys { work, owners, depth, step_ns, kept } => {
                // Snapshots are frequent enough that the halos kept reach back to the last snapshot but one.
                let halo_bytes = HALO_LOG_BYTES_MAX / 2;
                let snapshot_ns_min = SNAPSHOT_EVERY_MIN.as_nanos() as u64;
                Question::GridStandbys(Box::new(GridStandbysQuestion {
                    work,
                    fleet,
                    owners,
                    depth,
                    step_ns,
                    halo_bytes,
                    snapshot_ns_min,
                    kept,
                }))
            }
        }
    }

    /// Failure domains of the members, seen from this node.
    pub(super) fn domains(&self) -> Domains {
        let own = &self.membership.own().capacity;
        let apart = |member: Member<'_>| {
            let capacity = &member.advert?.capacity;
            let apart = SharedDomain::of((own.machine, &own.zone), (capacity.machine, &capacity.zone));
            Some((member.node, apart))
        };
        Domains::new(self.membership.members().filter_map(apart).collect())
    }

    /// A local caller asks for the mesh as the planner sees it.
    pub(super) fn survey(&mut self, call: CallId, job: Option<JobId>) {
        let fleet = job.map_or_else(|| self.fleet(), |job| self.fleet_for(job, &self.jobs.holdings(job)));
        self.notify(Event::Fleet { call, fleet: Box::new(fleet), options: self.plan_options(false) });
    }

    /// A node answered challenges with one of its devices. Its time (the shortest of them, and whether no request ran
    /// meanwhile) is compared with its advert.
    pub(super) fn measured(
        &mut self,
        job: JobId,
        device: DeviceId,
        work: &Work,
        (layers, ram): (&Range<u32>, u64),
        Measured { took, quiet, nonce, digest }: Measured,
    ) {
        let fleet = self.membership.fleet();
        // Challenges begin at position 0, so their rows attend to almost nothing.
        let Some(known) = fleet.device(device) else { return };
        let numerics = known.numerics;
        let Some(step_ns) = partitioner::cost::stage_ns_at(work, known, (layers, ram), 1, 0) else { return };
        let node = NodeId::from(device);
        let way_ns = self.membership.member(node).and_then(|member| member.rtt_ns).unwrap_or(0);
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let expected_ns = step_ns.saturating_mul(CHALLENGE_STEPS.into());
        let news = self.speeds.handle_measured(device, numerics, Timing { took_ns, way_ns, expected_ns, quiet });
        if let Some(percent) = news {
            self.notify(Event::Measured { node, percent });
            self.fleet_changed();
        }
        if let Some(what) = self.speeds.handle_digest(job, layers, device, numerics, (nonce, digest)) {
            self.refused(Some(node), what);
        }
    }

    /// The mesh as a job may use it: members that are alive, without those that the job lost. Memory and RAM that the job
    /// holds count as free, up to the total of a device.
    pub(super) fn fleet_for(&self, job: JobId, resident: &[(DeviceId, Room)]) -> Fleet {
        let mut fleet = self.fleet();
        let excluded = self.failover.excluded(self.now, job);
        for device in &mut fleet.devices {
            device.excluded |= excluded.has(device.id);
            let own = resident.iter().filter(|(held, _)| *held == device.id).map(|(_, room)| *room);
            let own = own.fold(Room::default(), Room::plus);
            let capacity = self.membership.capacity(device.id.into());
            let known = capacity.and_then(|capacity| capacity.device(device.id.index));
            let [memory_total, ram_total] = known.map_or([0, 0], |device| [device.memory_total, device.ram_total]);
            device.memory = device.memory.saturating_add(own.memory).min(memory_total.max(device.memory));
            device.ram = device.ram.saturating_add(own.ram).min(ram_total.max(device.ram));
        }
        fleet
    }

    pub(super) fn plan_options(&self, losses: bool) -> Options {
        Options { goal: Goal::Latency, head: self.me.into(), losses }
    }

    /// Nodes that may have the data of a part: the coordinator and the owners are asked first, then members that
    /// advertise it.
    pub(super) fn sources(&mut self, epoch: Epoch, order: &Order) -> Vec<NodeId> {
        let mut sources: Vec<NodeId> = Vec::from([epoch.issuer]);
        let owners = order.owners.iter().copied().filter(|&node| node != self.me);
        for node in owners.chain(self.membership.holders(order.content(), SOURCES_MAX)) {
            if sources.len() < SOURCES_MAX && !sources.contains(&node) {
                sources.push(node);
            }
        }
        for &node in sources.iter().filter(|node| **node != self.me) {
            self.membership.connect(self.now, node);
        }
        sources
    }
}
