//! The mesh as plans see it: what members say, corrected by what was measured, with what a job holds counted as free.
use super::Node;
use crate::id::{JobId, NodeId};
use crate::limits::{CHALLENGE_STEPS, SOURCES_MAX};
use crate::output::Event;
use crate::speeds::Timing;
use crate::time::Duration;
use crate::work::serve::StageSpec;
use alloc::vec::Vec;
use core::ops::Range;
use partitioner::{DeviceId, Fleet, Goal, Options, Plan, Work};

impl Node {
    /// The mesh as it says it is, corrected by what was measured.
    pub(super) fn fleet(&self) -> Fleet {
        let mut fleet = self.membership.fleet();
        fleet.devices.iter_mut().for_each(|device| self.speeds.correct(device));
        fleet
    }

    /// What a placement is predicted to take per token.
    pub(super) fn token_ns(&self, plan: &Plan, work: &Work, fleet: &Fleet) -> Option<u64> {
        partitioner::cost::token_ns(work, fleet, self.me.into(), &plan.placement())
    }

    /// A node answered challenges: what it took (the fastest of them, and whether no request ran meanwhile) is held against
    /// what it says about itself.
    pub(super) fn measured(
        &mut self,
        job: JobId,
        node: NodeId,
        work: &Work,
        layers: &Range<u32>,
        (took, quiet): (Duration, bool),
        digest: (u64, u64),
    ) {
        let fleet = self.membership.fleet();
        // Challenges begin at position 0: their rows attend to next to nothing.
        let step_ns = |device| partitioner::cost::stage_ns_at(work, device, layers, 1, 0);
        let expected = fleet.device(node.into()).and_then(step_ns);
        let (Some(step_ns), Some(numerics)) = (expected, self.membership.capacity(node).map(|says| says.numerics))
        else {
            return;
        };
        let way_ns = self.membership.member(node).and_then(|member| member.rtt_ns).unwrap_or(0);
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let expected_ns = step_ns.saturating_mul(CHALLENGE_STEPS.into());
        let news = self.speeds.handle_measured(node, numerics, Timing { took_ns, way_ns, expected_ns, quiet });
        if let Some(percent) = news {
            self.notify(Event::Measured { node, percent });
            self.fleet_changed();
        }
        if let Some(what) = self.speeds.handle_digest(job, layers, node, numerics, digest) {
            self.refused(Some(node), what);
        }
    }

    /// The mesh as a job may use it: members alive, less those that this job lost, and with what the job holds already
    /// counted as free, though never more than a node has in all.
    pub(super) fn fleet_for(&self, job: JobId, resident: &[(NodeId, u64)]) -> Fleet {
        let mut fleet = self.fleet();
        let excluded: Vec<DeviceId> = self.failover.excluded(self.now, job).map(DeviceId::from).collect();
        for device in &mut fleet.devices {
            device.excluded |= excluded.contains(&device.id);
            let own = resident.iter().filter(|(node, _)| DeviceId::from(*node) == device.id).map(|(_, bytes)| bytes);
            let total = self.membership.capacity(device.id.into()).map_or(0, |capacity| capacity.memory_total);
            device.memory = device.memory.saturating_add(own.sum()).min(total.max(device.memory));
        }
        fleet
    }

    pub(super) fn plan_options(&self, losses: bool) -> Options {
        Options { goal: Goal::Latency, head: self.me.into(), losses }
    }

    /// Who may have a stage's weights: the head and the other stages are asked first; then whoever says that it has some.
    pub(super) fn find_sources(&mut self, stage: &mut StageSpec) {
        let holders = self.membership.holders(stage.content, SOURCES_MAX);
        let others: Vec<NodeId> = holders.into_iter().filter(|node| !stage.sources.contains(node)).collect();
        stage.sources.extend(others);
        stage.sources.truncate(SOURCES_MAX);
        for &node in stage.sources.iter().filter(|node| **node != self.me) {
            self.membership.connect(self.now, node);
        }
    }
}
