//! Standbys made of two devices: a stage that no other device can hold as a whole is split in two on its own device, so that
//! each half has its own standby. Next: `explain.rs`.
use crate::cost::{
    StageBytes,
    ram::{RamTable, Room},
};
use crate::fleet::{Device, DeviceId, Fleet, NodeKey};
use crate::plan::{Options, Plan, Stage};
use crate::standby::{Standby, standbys};
use crate::work::Work;
use alloc::{collections::BTreeSet, vec::Vec};
use core::ops::Range;

/// Maximum number of stages tried. Each split costs one more choice of standbys, and the owner one more hand-over of rows per
/// token.
const CUTS_MAX: usize = 8;

/// The plan with stages split in two where that gives both halves a standby and takes none from another stage. The
/// coordinator's own stages are not split, and their standbys get the memory that is left: losing them changes the coordinator
/// too.
pub(crate) fn split_for_standbys(plan: Plan, work: &Work, fleet: &Fleet, options: &Options) -> Plan {
    let mut plan = plan;
    let mut chosen = standbys(&plan, work, fleet, options, &[]);
    let mut tried = BTreeSet::new();
    while tried.len() < CUTS_MAX {
        let open = |standby: &&Standby| {
            let layers = &plan.stages()[usize::from(standby.stage)].layers;
            standby.place.is_none() && !tried.contains(&layers.start)
        };
        let Some(at) = others(&plan, &chosen, options.head).find(open).map(|standby| usize::from(standby.stage)) else {
            break;
        };
        tried.insert(plan.stages()[at].layers.start);
        let Some(cut) = middle(&plan, at, (&chosen, options.head), work, fleet) else { continue };
        let Ok(next) = plan.clone().with_split(at, cut, work, fleet) else { continue };
        let next_chosen = standbys(&next, work, fleet, options, &[]);
        if without(&next, &next_chosen, options.head) < without(&plan, &chosen, options.head) {
            (plan, chosen) = (next, next_chosen);
        }
    }
    plan
}

/// Number of stages without a standby, the coordinator's own stages excluded.
fn without(plan: &Plan, chosen: &[Standby], head: NodeKey) -> usize {
    others(plan, chosen, head).filter(|standby| standby.place.is_none()).count()
}

/// The standbys of stages that are not the coordinator's own.
fn others<'a>(plan: &'a Plan, chosen: &'a [Standby], head: NodeKey) -> impl Iterator<Item = &'a Standby> {
    chosen.iter().filter(move |standby| plan.stages()[usize::from(standby.stage)].device.node != head)
}

/// Where to split a stage so that one device has memory for the first half and another for the second: the middle of the
/// possible range. `None`: no two devices on other machines can hold the halves.
fn middle(plan: &Plan, at: usize, (chosen, head): (&[Standby], NodeKey), work: &Work, fleet: &Fleet) -> Option<u32> {
    let stage = &plan.stages()[at];
    let machine = fleet.device(stage.device)?.machine;
    let bytes = StageBytes::new(work);
    let taken = |device: DeviceId| {
        let places = others(plan, chosen, head).filter_map(|standby| standby.place.as_ref());
        let parts = plan.stages().iter().chain(places);
        parts.filter(|part| part.device == device).fold(Room::default(), |sum, part: &Stage| sum.plus(part.room()))
    };
    let (start, end) = (stage.layers.start, stage.layers.end);
    // For each device that can take part: the end of the longest first half that fits, and the start of the longest second
    // half.
    let reach = |device: &Device| {
        let free = Room::of(device).without(taken(device.id));
        let table = RamTable::new(&bytes, device, free);
        let fits = |layers: Range<u32>| table.placed(&layers).is_some();
        let first = (start + 1..end).take_while(|&cut| fits(start..cut)).last();
        let second = (start + 1..end).rev().take_while(|&cut| fits(cut..end)).last();
        (device.id, first, second)
    };
    let elsewhere = fleet
        .devices
        .iter()
        .filter(|device| device.bytes_per_second > 0)
        .filter(|device| !device.excluded && device.machine != machine && device.id.node != stage.device.node);
    let reaches: Vec<_> = elsewhere.map(reach).collect();
    // Two of each suffice: at most one of them is the device that the other half needs.
    let mut firsts: Vec<(u32, DeviceId)> = reaches.iter().filter_map(|&(id, first, _)| Some((first?, id))).collect();
    let mut seconds: Vec<(u32, DeviceId)> = reaches.iter().filter_map(|&(id, _, second)| Some((second?, id))).collect();
    firsts.sort_by(|a, b| b.cmp(a));
    seconds.sort_unstable();
    let firsts = firsts.iter().take(2);
    let pairs = firsts.flat_map(|first| seconds.iter().take(2).map(move |second| (first, second)));
    let fits = pairs.filter(|(first, second)| first.1 != second.1 && second.0 <= first.0);
    let widest = fits.max_by_key(|(first, second)| first.0 - second.0)?;
    let (most, least) = (widest.0.0, widest.1.0);
    Some(least + (most - least) / 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost;
    use crate::plan::Goal;
    use crate::standby::tests;

    const A: DeviceId = DeviceId::first([1; 16]);
    const B: DeviceId = DeviceId::first([2; 16]);
    const C: DeviceId = DeviceId::first([3; 16]);
    const D: DeviceId = DeviceId::first([4; 16]);
    const E: DeviceId = DeviceId::first([5; 16]);
    const F: DeviceId = DeviceId::first([6; 16]);

    fn work() -> Work {
        Work { scratch_bytes: 1 << 10, ..tests::work() }
    }

    /// Each device on its own machine.
    fn fleet(devices: &[(DeviceId, u64)]) -> Fleet {
        tests::fleet(devices.iter().map(|&(id, memory)| tests::device(id, id.node.0[0].into(), memory)))
    }

    /// The coordinator A has layers 0..2 and B has 2..8; the other devices are spare.
    fn cut(fleet: &Fleet, stages: &[(DeviceId, Range<u32>)]) -> Vec<(DeviceId, Range<u32>)> {
        let options = Options { goal: Goal::Latency, head: A.node, losses: false };
        let plan = Plan::new(stages, &work(), fleet, &options).unwrap();
        let cut = split_for_standbys(plan.clone(), &work(), fleet, &options);
        let more = cut.stages().len() - plan.stages().len();
        assert_eq!(cut.token_ns(), plan.token_ns() + more as u64 * 10_000, "what one more stage costs");
        cut.placement()
    }

    fn bytes(layers: Range<u32>) -> u64 {
        cost::stage_bytes(&work(), &layers)
    }

    #[test]
    fn a_stage_too_large_for_any_spare_is_split_between_two_spares() {
        let stages = [(A, 0..2), (B, 2..8)];
        let whole = [(A, 0..2), (B, 2..8)].to_vec();
        let room = 1 << 30;
        let own = bytes(0..2);
        let of = |b: u64, c: u64, d: u64| cut(&fleet(&[(A, own), (B, b), (C, c), (D, d)]), &stages);
        assert_eq!(of(room, bytes(2..5), bytes(5..8)), [(A, 0..2), (B, 2..5), (B, 5..8)]);
        assert_eq!(of(room, bytes(7..8), bytes(2..7)), [(A, 0..2), (B, 2..7), (B, 7..8)], "uneven spares");
        assert_eq!(of(room, bytes(7..8) - 1, bytes(2..7)), whole, "one byte short");
        assert_eq!(of(room, bytes(2..8), bytes(2..5)), whole, "one spare holds the whole stage");
        assert_eq!(of(bytes(2..8), bytes(2..5), bytes(5..8)), whole, "the owner has no scratch memory for two stages");
        assert_eq!(cut(&fleet(&[(A, own), (B, room), (C, bytes(2..7))]), &stages), whole, "one spare is not two");
        let mut same = fleet(&[(A, own), (B, room), (C, bytes(2..5)), (D, bytes(5..8))]);
        same.devices[3].machine = same.devices[1].machine;
        assert_eq!(cut(&same, &stages), whole, "a standby on the owner's machine is lost with it");
    }

    #[test]
    fn the_coordinators_stage_is_not_split_and_no_stage_loses_its_standby() {
        let room = 1 << 30;
        let spares = [(A, room), (B, bytes(6..8)), (C, bytes(0..3)), (D, bytes(3..6))];
        let stages = [(A, 0..6), (B, 6..8)];
        assert_eq!(cut(&fleet(&spares), &stages), stages.to_vec());
        // C could hold half of B's stage, or be the standby of D's stage.
        let stages = [(A, 0..2), (B, 2..6), (D, 6..8)];
        let two = bytes(2..4) + bytes(4..6);
        let spares = |e| fleet(&[(A, bytes(0..2)), (B, two), (C, bytes(6..8)), (D, bytes(6..8)), (E, e)]);
        assert_eq!(cut(&spares(bytes(2..4)), &stages), stages.to_vec());
        let more = [&spares(bytes(2..4)).devices[..], &fleet(&[(F, bytes(4..6))]).devices[..]].concat();
        let fleet = Fleet { devices: more, ..spares(0) };
        assert_eq!(cut(&fleet, &stages), [(A, 0..2), (B, 2..4), (B, 4..6), (D, 6..8)]);
    }
}
