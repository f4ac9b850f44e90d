//! The standbys of one job at its coordinator: which node for which stage, how far its cache is, and which nodes must know.
use super::JobOutput;
use crate::id::{Epoch, JobId, NodeId, RequestId};
use crate::limits::{PREPARE_RETRY, SEQUENCES_MAX, STANDBY_LAG_MAX};
use crate::message::Message;
use crate::output::Event;
use crate::planted::{self, Planted};
use crate::time::Instant;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use partitioner::{Stage, Tier};

type Out = VecDeque<JobOutput>;

/// Standbys by stage.
#[derive(Debug, Default)]
pub(super) struct Standbys {
    by_stage: BTreeMap<u16, Standby>,
    /// What the planner said of each stage, also of those that nobody can cover.
    tiers: BTreeMap<u16, (Tier, Option<u64>)>,
}

#[derive(Debug)]
struct Standby {
    /// The stage on its device.
    place: Stage,
    tier: Tier,
    progress: Progress,
    /// It has answered that its stage is in memory, under this placement or an earlier one with the same layers. It stays
    /// true until the standby reports a failure or is lost, which removes it. It is a hint: promotion asks with `Prepare`,
    /// and a node that holds the stage no more (it was restarted) loads it, or refuses and is replaced.
    resident: bool,
    /// What it said it holds.
    held: BTreeMap<RequestId, u32>,
    /// That it is current was told once under this placement.
    told: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Loading { retry_at: Instant },
    Following,
}

impl Standby {
    fn node(&self) -> NodeId {
        self.place.device.into()
    }

    /// Whether it holds, but for a little, what `acked` says of each request.
    fn holds(&self, acked: &BTreeMap<RequestId, u32>) -> bool {
        let held = |request: &RequestId| self.held.get(request).copied().unwrap_or(0);
        let follows = self.progress == Progress::Following && self.tier == Tier::Hot;
        follows && acked.iter().all(|(id, &acked)| held(id) + STANDBY_LAG_MAX >= acked)
    }
}

/// A standby as status pages show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandbyView {
    /// Which stage.
    pub stage: u16,
    /// Who; none where nobody can.
    pub node: Option<NodeId>,
    /// How ready it is meant to be. Hot is said only of one that is.
    pub tier: Tier,
    /// Weights are in memory there.
    pub resident: bool,
    /// Its caches hold what the stage's hold.
    pub current: bool,
    /// Predicted nanoseconds from the loss being noticed to the next token, if predicted.
    pub stall_ns: Option<u64>,
}

impl Standbys {
    /// All nodes that stand by or are asked to.
    pub(super) fn nodes(&self) -> BTreeSet<NodeId> {
        self.by_stage.values().map(Standby::node).collect()
    }

    /// Who is fed: hot standbys that load no more.
    pub(super) fn fed(&self) -> impl Iterator<Item = (u16, NodeId)> + '_ {
        let fed = |standby: &Standby| standby.tier == Tier::Hot && standby.progress == Progress::Following;
        self.by_stage.iter().filter(move |(_, standby)| fed(standby)).map(|(&stage, standby)| (stage, standby.node()))
    }

    /// Those that have answered under the present placement, and their layers.
    pub(super) fn following(&self) -> impl Iterator<Item = (NodeId, core::ops::Range<u32>)> + '_ {
        let following = self.by_stage.values().filter(|standby| standby.progress == Progress::Following);
        following.map(|standby| (standby.node(), standby.place.layers.clone()))
    }

    /// Stage and device of each, for the planner.
    pub(super) fn kept(&self) -> Vec<(u16, partitioner::DeviceId)> {
        self.by_stage.iter().map(|(&stage, standby)| (stage, standby.place.device)).collect()
    }

    /// The planner chose. Returns the new ones.
    pub(super) fn add(&mut self, now: Instant, chosen: Vec<partitioner::Standby>) -> Vec<(u16, NodeId)> {
        let mut new = Vec::new();
        for standby in chosen {
            self.tiers.insert(standby.stage, (standby.tier, standby.stall_ns));
            let Some(place) = standby.place.filter(|_| !self.by_stage.contains_key(&standby.stage)) else { continue };
            new.push((standby.stage, place.device.into()));
            let progress = Progress::Loading { retry_at: now + PREPARE_RETRY };
            let (tier, held) = (standby.tier, BTreeMap::new());
            let standby = Standby { place, tier, progress, resident: false, held, told: false };
            self.by_stage.insert(new[new.len() - 1].0, standby);
        }
        new
    }

    /// Whether the stage has a standby that is not lost and has its weights in memory. The standby need not have answered under
    /// the present placement: of two stages lost shortly after each other, the second is taken over as fast as the first.
    pub(super) fn can_take(&self, stage: u16, lost: &BTreeSet<NodeId>) -> bool {
        let ready = |standby: &Standby| standby.resident && !lost.contains(&standby.node());
        self.by_stage.get(&stage).is_some_and(ready)
    }

    /// Whoever stands by for a stage, to be its owner. It is no standby any more.
    pub(super) fn take(&mut self, stage: u16) -> Option<Stage> {
        if planted::has(Planted::StandbyPromotedTwice) {
            return self.by_stage.get(&stage).map(|standby| standby.place.clone());
        }
        self.by_stage.remove(&stage).map(|standby| standby.place)
    }

    /// A new placement. Returns the standbys that still fit it, which have to be informed; the others are released. The
    /// coordinator's own stage needs none, also where it was placed there only now.
    pub(super) fn refit(&mut self, now: Instant, stages: &[Stage], head: NodeId) -> Vec<(u16, NodeId)> {
        let covered = |at: u16| stages.get(usize::from(at)).filter(|stage| NodeId::from(stage.device) != head);
        self.by_stage.retain(|&at, standby| {
            let same = covered(at).is_some_and(|stage| stage.layers == standby.place.layers);
            let twice = planted::has(Planted::StandbyPromotedTwice);
            same && (twice || stages.iter().all(|stage| stage.device != standby.place.device))
        });
        self.tiers.retain(|&at, _| covered(at).is_some());
        for standby in self.by_stage.values_mut() {
            standby.progress = Progress::Loading { retry_at: now + PREPARE_RETRY };
            standby.told = false;
        }
        self.by_stage.iter().map(|(&stage, standby)| (stage, standby.node())).collect()
    }

    /// A node is gone, or refused. Returns its stage if it stood by.
    pub(super) fn remove(&mut self, node: NodeId) -> Option<u16> {
        let stage = self.by_stage.iter().find(|(_, standby)| standby.node() == node).map(|(&stage, _)| stage)?;
        self.by_stage.remove(&stage);
        Some(stage)
    }

    /// A standby has its stage in memory. Returns the stage.
    pub(super) fn handle_prepared(&mut self, node: NodeId) -> Option<u16> {
        let (&stage, standby) = self.by_stage.iter_mut().find(|(_, standby)| standby.node() == node)?;
        standby.progress = Progress::Following;
        standby.resident = true;
        Some(stage)
    }

    /// A standby told what it holds.
    pub(super) fn handle_held(&mut self, node: NodeId, held: &[(RequestId, u32)]) {
        if let Some(standby) = self.by_stage.values_mut().find(|standby| standby.node() == node) {
            standby.held = held.iter().take(2 * SEQUENCES_MAX as usize).copied().collect();
        }
    }

    /// Whether a stage has a standby that is current.
    pub(super) fn is_current(&self, stage: u16, acked: &BTreeMap<RequestId, u32>) -> bool {
        self.by_stage.get(&stage).is_some_and(|standby| standby.holds(acked))
    }

    /// Tells of each, once, that it is current.
    pub(super) fn tell(&mut self, job: JobId, acked: &BTreeMap<RequestId, u32>, out: &mut Out) {
        for (&stage, standby) in &mut self.by_stage {
            if !standby.told && standby.holds(acked) {
                standby.told = true;
                let event = Event::Standby { job, stage, node: standby.node(), current: true };
                out.push_back(JobOutput::Notify(event));
            }
        }
    }

    /// Whom to ask again, and when the next of them is due.
    pub(super) fn due(&mut self, now: Instant) -> Vec<(u16, NodeId)> {
        let mut due = Vec::new();
        for (&stage, standby) in &mut self.by_stage {
            if let Progress::Loading { retry_at } = &mut standby.progress
                && *retry_at <= now
            {
                *retry_at = now + PREPARE_RETRY;
                due.push((stage, standby.place.device.into()));
            }
        }
        due
    }

    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        let waiting = self.by_stage.values().filter_map(|standby| match standby.progress {
            Progress::Loading { retry_at } => Some(retry_at),
            Progress::Following => None,
        });
        waiting.min()
    }

    /// Bytes the plan allows the standby of a stage.
    pub(super) fn bytes(&self, stage: u16) -> u64 {
        self.by_stage.get(&stage).map_or(0, |standby| standby.place.bytes)
    }

    /// Tells everybody beside a stage who its standby is.
    pub(super) fn announce(
        &self,
        job: JobId,
        epoch: Epoch,
        stage: u16,
        node: Option<NodeId>,
        owners: &[NodeId],
        out: &mut Out,
    ) {
        let beside = [stage.checked_sub(1), stage.checked_add(1)].into_iter().flatten();
        for at in beside {
            let standby = self.fed().find(|(covered, _)| *covered == at).map(|(_, node)| node);
            for to in owners.get(usize::from(at)).copied().into_iter().chain(standby) {
                out.push_back(JobOutput::Message { to, message: Message::Standby { job, epoch, stage, node } });
            }
        }
    }

    pub(super) fn views(&self, acked: &BTreeMap<RequestId, u32>) -> Vec<StandbyView> {
        let stages: BTreeSet<u16> = self.tiers.keys().chain(self.by_stage.keys()).copied().collect();
        let view = |stage: u16| {
            let (tier, stall_ns) = self.tiers.get(&stage).copied().unwrap_or((Tier::Cold, None));
            let standby = self.by_stage.get(&stage);
            let current = standby.is_some_and(|standby| standby.holds(acked));
            let resident = standby.is_some_and(|standby| standby.resident);
            let tier = match (standby.map(|standby| standby.tier), tier) {
                (Some(_), _) if current => Tier::Hot,
                (Some(_), _) if resident => Tier::Warm,
                (Some(_), _) | (None, Tier::Hot | Tier::Warm | Tier::Cold) => Tier::Cold,
                (None, Tier::None) => Tier::None,
            };
            StandbyView { stage, node: standby.map(Standby::node), tier, resident, current, stall_ns }
        };
        stages.into_iter().map(view).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    const HEAD: NodeId = NodeId([1; 16]);

    fn stage(node: u8, layers: core::ops::Range<u32>) -> Stage {
        Stage { device: NodeId([node; 16]).into(), layers, bytes: 1, step_ns: 1 }
    }

    fn cold(stage: u16) -> partitioner::Standby {
        partitioner::Standby { stage, tier: Tier::Cold, place: None, same_machine: false, stall_ns: None }
    }

    #[test]
    fn a_stage_that_came_to_the_head_lists_no_standby() {
        let mut standbys = Standbys::default();
        // One that still loads, and one that nobody covers.
        let loading = partitioner::Standby { place: Some(stage(4, 4..8)), ..cold(1) };
        standbys.add(Instant(0), vec![loading, cold(2)]);
        let stages =
            |standbys: &Standbys| standbys.views(&BTreeMap::new()).iter().map(|view| view.stage).collect::<Vec<_>>();
        assert_eq!(stages(&standbys), [1, 2]);
        // The node of stage 1 is lost, and the head takes it.
        let kept = standbys.refit(Instant(1), &[stage(2, 0..4), stage(1, 4..8), stage(3, 8..12)], HEAD);
        assert_eq!(kept, [], "the standby of stage 1 is released");
        assert_eq!(stages(&standbys), [2]);
    }
}
