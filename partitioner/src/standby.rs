//! Choice of standbys: one per stage, preferably on another machine, then in another zone, then on a node without other parts
//! of the job.
//!
//! A hot standby has the stage in memory and computes all its rows too, so it must keep up, and its link must carry the copy of
//! the rows. If one of the two is impossible it is warm: in memory, but its cache is built at the takeover. Without free memory
//! on any node the stage is cold: a repair moves its weights first. Next: `halves.rs`.
use crate::cost::{
    self,
    ram::{self, Room},
};
use crate::fleet::{Device, DeviceId, Endpoint, Fleet, NodeKey};
use crate::plan::{Options, Plan, Stage};
use crate::work::Work;
use alloc::{collections::BTreeMap, vec::Vec};
use core::cmp::Reverse;
use core::ops::Range;
use serde::{Deserialize, Serialize};

/// How ready a standby is to take over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Weights resident, cache current.
    Hot,
    /// Weights resident, cache built at the takeover.
    Warm,
    /// Weights fetched after the stage is lost.
    Cold,
    /// No plan exists without this stage's node.
    None,
}

/// The standby of one stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standby {
    /// The stage of the plan.
    pub stage: u16,
    /// How ready it is.
    pub tier: Tier,
    /// The same layers on the standby's device; `None` if cold.
    pub place: Option<Stage>,
    /// On the same physical machine as the stage: both are lost with that machine.
    pub same_machine: bool,
    /// In the same known zone as the stage: both are lost with that zone.
    pub same_zone: bool,
    /// Predicted nanoseconds from the detected loss of the stage to the next token; `None` if there is no plan, or if plans for
    /// losses were not requested.
    pub stall_ns: Option<u64>,
}

/// How many times slower than the pipeline a hot standby's step may be: it computes the waiting rows in one pass over its
/// weights, which costs little more than one row.
const SLOWER_MAX: u64 = 8;

/// Share of a link that the copy for a hot standby may use: one part in this number.
const LINK_SHARE: u64 = 4;

/// Bytes per second at which weights are loaded from disk into memory.
const LOAD_BYTES_PER_SECOND: u64 = 1_000_000_000;

/// Chooses standbys for the stages of a plan. `kept`: present standbys (stage, device), which stay; only the other stages are
/// in the result, with one entry for each stage that no device can cover. `fleet` is the mesh as if no device held any part of
/// the job.
///
/// The stage with the most weights, which is the hardest to load again, chooses first. Preferences in order: another machine,
/// another zone (or an unknown one), the fewest parts of the job, the same numerics, the least time per token, the lowest id.
/// So the owner of another stage, with memory for both, becomes a standby only if no device without a stage is as well
/// separated.
pub fn standbys(plan: &Plan, work: &Work, fleet: &Fleet, options: &Options, kept: &[(u16, DeviceId)]) -> Vec<Standby> {
    let mut loads = Loads::default();
    plan.stages().iter().for_each(|stage| loads.add(stage.device, stage.room(), stage.step_ns, true));
    for &(stage, device) in kept {
        let layers = plan.stages().get(usize::from(stage)).map(|stage| &stage.layers);
        let known = fleet.device(device);
        let placed = layers.map(|layers| {
            let room = known.map(|device| Room::of(device).without(loads.of(device.id).room));
            let whole = || Room { memory: cost::stage_bytes(work, layers), ram: 0 };
            room.and_then(|room| ram::placed(work, layers, room)).unwrap_or_else(whole)
        });
        let placed = placed.unwrap_or_default();
        let step_ns = layers.and_then(|layers| step_ns(work, known?, layers, placed.ram));
        loads.add(device, placed, step_ns.unwrap_or(0), false);
    }
    let open = |(at, _): &(usize, &Stage)| kept.iter().all(|&(covered, _)| usize::from(covered) != *at);
    let mut stages: Vec<(usize, &Stage)> = plan.stages().iter().enumerate().filter(open).collect();
    // The coordinator's own stage last: its loss changes the coordinator too.
    let own = |stage: &Stage| stage.device.node == options.head;
    stages.sort_by_key(|(at, stage)| (own(stage), Reverse(cost::weight_bytes(work, &stage.layers)), *at));
    let mut chosen: Vec<Standby> = Vec::with_capacity(stages.len());
    for (at, stage) in stages {
        let question = Question { plan, work, fleet, options, at, stage };
        // Another device of the owner's node is lost with it.
        let candidates = fleet.devices.iter().filter(|device| device.id.node != stage.device.node);
        let asked = candidates.filter_map(|device| question.ask(device, loads.of(device.id)));
        let standby = asked.min_by_key(|(rank, _)| *rank).map_or_else(|| question.cold(), |(_, standby)| standby);
        if let Some(place) = &standby.place {
            loads.add(place.device, place.room(), place.step_ns, false);
        }
        chosen.push(standby);
    }
    chosen.sort_by_key(|standby| standby.stage);
    chosen
}

/// Predicted nanoseconds per decoded token of a stage with this much of it in RAM.
fn step_ns(work: &Work, device: &Device, layers: &Range<u32>, ram: u64) -> Option<u64> {
    cost::stage_ns_at(work, device, (layers, ram), 1, work.planned_positions())
}

type Rank = (bool, bool, u32, bool, Tier, u64, DeviceId);

/// What a device holds of the job.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    parts: u32,
    room: Room,
    step_ns: u64,
    /// It owns one of the parts.
    owns: bool,
}

#[derive(Debug, Default)]
struct Loads(BTreeMap<DeviceId, Load>);

impl Loads {
    fn of(&self, device: DeviceId) -> Load {
        self.0.get(&device).copied().unwrap_or_default()
    }

    fn add(&mut self, device: DeviceId, room: Room, step_ns: u64, owns: bool) {
        let load = self.0.entry(device).or_default();
        load.parts = load.parts.saturating_add(1);
        load.room = load.room.plus(room);
        load.step_ns = load.step_ns.saturating_add(step_ns);
        load.owns |= owns;
    }
}

/// One stage without a standby.
struct Question<'a> {
    plan: &'a Plan,
    work: &'a Work,
    fleet: &'a Fleet,
    options: &'a Options,
    at: usize,
    stage: &'a Stage,
}

impl Question<'_> {
    /// This device as a standby, with its rank; `load` is what it already holds of the job. `None` if it cannot hold the stage
    /// besides that.
    fn ask(&self, device: &Device, load: Load) -> Option<(Rank, Standby)> {
        let (work, layers) = (self.work, &self.stage.layers);
        if device.excluded {
            return None;
        }
        let Room { memory: bytes, ram } = ram::placed(work, layers, Room::of(device).without(load.room))?;
        let step_ns = step_ns(work, device, layers, ram)?;
        let owner = self.fleet.device(self.stage.device);
        let same_machine = owner.is_some_and(|owner| owner.machine == device.machine);
        let same_zone = owner.is_some_and(|owner| owner.shares_zone(device));
        let other_numerics = owner.is_some_and(|owner| owner.numerics != device.numerics);
        let tier = if self.keeps_up(device, load, step_ns)? { Tier::Hot } else { Tier::Warm };
        let place = Stage { device: device.id, layers: layers.clone(), bytes, ram, step_ns };
        let replay = match tier {
            Tier::Hot => 0,
            Tier::Warm | Tier::Cold | Tier::None => replay_ns(self.plan, self.work, self.fleet),
        };
        let switch_ns = switch_ns(self.plan, self.fleet, self.options.head, &[self.stage.device.node], Some(device.id));
        let stall_ns = switch_ns.saturating_add(replay).saturating_add(self.plan.token_ns());
        let rank =
            (same_machine, same_zone, load.parts, other_numerics, tier, stall_ns.saturating_add(step_ns), device.id);
        let stage = u16::try_from(self.at).unwrap_or(u16::MAX);
        let (place, stall_ns) = (Some(place), Some(stall_ns));
        Some((rank, Standby { stage, tier, place, same_machine, same_zone, stall_ns }))
    }

    /// Whether the device can compute the tokens as fast as they arrive, several at a time, and receive a copy of the rows. The
    /// owner of another stage must do both while the other stages compute, so that its own stage is not delayed.
    fn keeps_up(&self, device: &Device, load: Load, step_ns: u64) -> Option<bool> {
        let token_ns = self.plan.token_ns().max(1);
        let (from, bytes) = match self.at.checked_sub(1) {
            Some(before) => (Endpoint::from(self.plan.stages()[before].device), self.work.activation_bytes),
            None => (self.options.head.into(), cost::TOKEN_BYTES),
        };
        let copy_ns = cost::busy_ns(self.fleet, from, device.id, bytes)?;
        let most_ns = if load.owns { token_ns } else { token_ns.saturating_mul(SLOWER_MAX) };
        Some(step_ns.saturating_add(load.step_ns) <= most_ns && copy_ns.saturating_mul(LINK_SHARE) <= token_ns)
    }

    /// No device has the memory: the cost of the plan for the loss of this node, if there is one.
    fn cold(&self) -> Standby {
        let stage = u16::try_from(self.at).unwrap_or(u16::MAX);
        let (same_machine, same_zone) = (false, false);
        let mut standby = Standby { stage, tier: Tier::Cold, place: None, same_machine, same_zone, stall_ns: None };
        match self.plan.losses().iter().find(|loss| loss.lost == self.stage.device.node).map(|loss| &loss.plan) {
            None => {}
            Some(Err(_)) => standby.tier = Tier::None,
            Some(Ok(next)) => {
                let lost = [self.stage.device.node];
                standby.stall_ns = Some(placed_ns(self.plan, next, self.work, self.fleet, (self.options.head, &lost)));
            }
        }
        standby
    }
}

/// Two round trips to the farthest remaining participant: the new epoch is announced and answered, then the first frame
/// travels.
fn switch_ns(plan: &Plan, fleet: &Fleet, head: NodeKey, lost: &[NodeKey], standby: Option<DeviceId>) -> u64 {
    let others = plan.stages().iter().map(|stage| stage.device).filter(|device| !lost.contains(&device.node));
    let asked = others.chain(standby).filter(|&device| device.node != head);
    let slowest = asked.map(|device| fleet.link(head, device).rtt_ns).max().unwrap_or(0);
    slowest.saturating_mul(2)
}

/// Nanoseconds to replay a whole context through these stages, in chunks.
fn replay_ns(plan: &Plan, work: &Work, fleet: &Fleet) -> u64 {
    const CHUNK: u32 = 512;
    let chunks = u64::from(work.context.div_ceil(CHUNK));
    let pass = plan.stages().iter().filter_map(|stage| {
        let device = fleet.device(stage.device)?;
        let (held, rows) = ((&stage.layers, stage.ram), work.context.min(CHUNK));
        cost::stage_ns_at(work, device, held, rows, work.planned_positions())
    });
    pass.fold(0u64, u64::saturating_add).saturating_mul(chunks)
}

/// Predicted nanoseconds from a detected loss to the next token if the lost stages are placed again: their weights are fetched
/// and loaded, and a whole context is replayed through all stages.
pub(crate) fn placed_ns(
    plan: &Plan,
    next: &Plan,
    work: &Work,
    fleet: &Fleet,
    (head, lost): (NodeKey, &[NodeKey]),
) -> u64 {
    let moved = crate::repair::moved_bytes(plan, next, work);
    let slowest = next.stages().iter().map(|stage| fleet.link(head, stage.device));
    let fetch = slowest.filter_map(|link| cost::wire_ns(link, moved)).max().unwrap_or(0);
    let load = moved.saturating_mul(1_000_000_000) / LOAD_BYTES_PER_SECOND;
    let switch = switch_ns(plan, fleet, head, lost, None);
    let stall = [fetch, load, replay_ns(next, work, fleet), switch, next.token_ns()];
    stall.into_iter().fold(0, u64::saturating_add)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::fleet::Link;
    use crate::plan::Goal;
    use crate::work::Layer;
    use alloc::{collections::BTreeSet, string::String, vec};

    const A: DeviceId = DeviceId::first([1; 16]);
    const B: DeviceId = DeviceId::first([2; 16]);
    const C: DeviceId = DeviceId::first([3; 16]);
    const D: DeviceId = DeviceId::first([4; 16]);

    pub(crate) fn work() -> Work {
        Work {
            layers: vec![
                Layer {
                    flops_per_token: 200,
                    weight_bytes: 1 << 20,
                    kv_bytes_per_token: 1 << 10,
                    window: None,
                    experts: None
                };
                8
            ],
            embed_bytes: 1 << 20,
            head_bytes: 1 << 20,
            tied: false,
            head_flops: 2_000,
            activation_bytes: 2_304,
            coarser_bytes: Vec::new(),
            context: 1024,
            sequences: 1,
            scratch_bytes: 0,
        }
    }

    pub(crate) fn device(id: DeviceId, machine: u64, memory: u64) -> Device {
        Device {
            id,
            name: String::new(),
            label: String::new(),
            machine,
            zone: String::new(),
            memory,
            bytes_per_second: 10_000_000_000,
            flops_per_second: 0,
            copy_bytes_per_second: 10_000_000_000,
            step_ns: 10_000,
            layer_ns: 0,
            cache_bytes_per_second: 0,
            ram: 0,
            ram_bytes_per_second: 0,
            ram_flops_per_second: 0,
            numerics: 1,
            pass_steps: 1,
            excluded: false,
        }
    }

    /// Devices by id, machine and memory, on one fast network.
    pub(crate) fn fleet(devices: impl IntoIterator<Item = Device>) -> Fleet {
        let default_link = Link { rtt_ns: 200_000, bytes_per_second: 1_000_000_000 };
        Fleet { devices: devices.into_iter().collect(), links: BTreeMap::new(), default_link }
    }

    fn of(devices: &[(DeviceId, u64, u64)]) -> Fleet {
        fleet(devices.iter().map(|&(id, machine, memory)| device(id, machine, memory)))
    }

    fn options() -> Options {
        Options { goal: Goal::Latency, head: A.node, losses: false }
    }

    fn split(fleet: &Fleet) -> Plan {
        Plan::new(&[(A, 0..4), (B, 4..8)], &work(), fleet, &options()).unwrap()
    }

    #[test]
    fn another_machine_comes_first_and_the_coordinators_own_stage_last() {
        let own = cost::stage_bytes(&work(), &(0..4));
        let fleet = of(&[(A, 1, own), (B, 2, 1 << 30), (C, 2, 1 << 30), (D, 3, 1 << 30)]);
        let found = standbys(&split(&fleet), &work(), &fleet, &options(), &[]);
        assert_eq!(found.iter().map(|standby| standby.stage).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(found[0].place.as_ref().unwrap().device, C, "the remaining device");
        let standby = &found[1];
        assert_eq!((standby.stage, standby.tier, standby.same_machine), (1, Tier::Hot, false));
        assert_eq!(standby.place.as_ref().unwrap().device, D);
        let kept = [(1, C), (0, D)];
        assert_eq!(standbys(&split(&fleet), &work(), &fleet, &options(), &kept), vec![], "each stage has one");
        let mut fleet = fleet;
        fleet.devices.pop();
        let standby = &standbys(&split(&fleet), &work(), &fleet, &options(), &[])[1];
        assert_eq!((standby.place.as_ref().unwrap().device, standby.same_machine), (C, true), "better than none");
    }

    #[test]
    fn another_zone_is_preferred_to_a_faster_node_and_unknown_zones_differ() {
        let own = cost::stage_bytes(&work(), &(0..4));
        let mut fleet = of(&[(A, 1, own), (B, 2, 1 << 30), (C, 3, 1 << 30), (D, 4, 1 << 30)]);
        let chosen = |fleet: &Fleet| {
            let standby = standbys(&split(fleet), &work(), fleet, &options(), &[]).remove(1);
            (standby.place.unwrap().device, standby.same_zone)
        };
        fleet.devices[3].step_ns *= 4;
        assert_eq!(chosen(&fleet), (C, false), "the faster one if no zone is known");
        let mut zone = |at: usize, zone: &str| fleet.devices[at].zone = String::from(zone);
        zone(1, "attic");
        zone(2, "attic");
        let unknown = fleet.clone();
        assert_eq!(chosen(&unknown), (D, false));
        fleet.devices[3].zone = String::from("cellar");
        assert_eq!(chosen(&fleet), (D, false));
        fleet.devices[3].machine = 2;
        assert_eq!(chosen(&fleet), (C, true), "the machine of the owner comes last");
    }

    #[test]
    fn a_link_that_cannot_carry_the_copy_makes_it_warm_and_no_memory_cold() {
        let mut fleet = of(&[(A, 1, 1 << 30), (B, 2, 1 << 30), (C, 3, 1 << 30)]);
        let hot = standbys(&split(&fleet), &work(), &fleet, &options(), &[])[1].clone();
        fleet.links.insert((A.node, C.node), Link { rtt_ns: 200_000, bytes_per_second: 1_000_000 });
        let warm = standbys(&split(&fleet), &work(), &fleet, &options(), &[])[1].clone();
        assert_eq!((hot.tier, warm.tier), (Tier::Hot, Tier::Warm));
        assert!(warm.stall_ns > hot.stall_ns, "{warm:?} {hot:?}");
        fleet.devices[0].memory = cost::stage_bytes(&work(), &(0..4));
        fleet.devices[2].memory = 1 << 20;
        let cold = standbys(&split(&fleet), &work(), &fleet, &options(), &[])[1].clone();
        assert_eq!((cold.tier, cold.place), (Tier::Cold, None));
        let with_losses = crate::plan(&work(), &fleet, &Options { losses: true, ..options() }).unwrap();
        assert!(with_losses.stages().len() == 1, "one device holds all layers");
    }

    /// The largest stage gets the device without a stage; the other stage gets an owner with memory for both, or none.
    #[test]
    fn the_owner_of_another_stage_is_a_standby_if_its_memory_suffices() {
        let stages = [(A, 0..2), (B, 2..4), (C, 4..8)];
        let bytes = |layers| cost::stage_bytes(&work(), &layers);
        let full = bytes(4..8);
        let found = |a: u64, d: u64, kept: &[(u16, DeviceId)]| {
            let fleet = of(&[(A, 1, a), (B, 2, bytes(2..4)), (C, 3, full), (D, 4, d)]);
            let plan = Plan::new(&stages, &work(), &fleet, &options()).unwrap();
            let found = standbys(&plan, &work(), &fleet, &options(), kept);
            let place = |standby: &Standby| standby.place.as_ref().map(|place| place.device);
            // The coordinator's own stage gets the remaining memory.
            let others = found.iter().filter(|standby| standby.stage > 0);
            others.map(|standby| (standby.stage, standby.tier, place(standby))).collect::<Vec<_>>()
        };
        let (both, large) = (bytes(0..2) + bytes(2..4), full + bytes(2..4));
        assert_eq!(found(both, large, &[]), [(1, Tier::Hot, Some(A)), (2, Tier::Hot, Some(D))]);
        assert_eq!(
            found(both - 1, large, &[]),
            [(1, Tier::Hot, Some(D)), (2, Tier::Hot, Some(D))],
            "D has room for both"
        );
        assert_eq!(found(both - 1, large - 1, &[]), [(1, Tier::Cold, None), (2, Tier::Hot, Some(D))]);
        assert_eq!(found(both, large - 1, &[(2, D)]), [(1, Tier::Hot, Some(A))]);
        assert_eq!(found(both, large - 1, &[(1, D)]), [(2, Tier::Cold, None)]);
        let mut fleet = of(&[(A, 1, bytes(0..2)), (B, 2, bytes(2..4)), (C, 3, full)]);
        let plan = Plan::new(&stages, &work(), &fleet, &options()).unwrap();
        let cold = standbys(&plan, &work(), &fleet, &options(), &[]);
        assert!(cold.iter().all(|standby| standby.place.is_none()), "{cold:?}");
        // An owner without time besides its own stage holds only the weights.
        fleet.devices.iter_mut().for_each(|device| device.memory = 1 << 30);
        fleet.devices[0].bytes_per_second /= 100;
        fleet.devices[2].excluded = true;
        let slow = standbys(&plan, &work(), &fleet, &options(), &[]).split_off(1);
        let places: BTreeSet<DeviceId> = slow.iter().filter_map(|s| Some(s.place.as_ref()?.device)).collect();
        assert_eq!((slow[0].tier, slow[0].place.as_ref().unwrap().device), (Tier::Warm, A), "{slow:?}");
        assert_eq!(places.len(), 2, "{slow:?}");
    }
}
