//! The planner compared with every possible placement, on fleets small enough to enumerate them.
mod fleets;

use fleets::{Random, fleet, id, options, with_experts, with_ram, work};
use partitioner::{
    Answer, Device, DeviceId, Fleet, Goal, Layer, Link, ModelQuestion, NodeKey, Options, Plan, PlanError, Question,
    Work,
};
use partitioner::{cost, moved_bytes, pays_to_move, plan, repair, standbys};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

type Placement = Vec<(DeviceId, Range<u32>)>;

/// More devices than a fleet of the tests has.
const DEVICES_MAX: usize = 64;

/// The same devices, two in each node and machine. Links are between nodes.
fn boxes(mut fleet: Fleet) -> Fleet {
    let place = |old: DeviceId| {
        let number = (0..DEVICES_MAX).find(|&n| id(n) == old).expect("a device of `fleet`");
        (number / 2, (number % 2) as u8)
    };
    let links = fleet.links.iter().filter_map(|((from, to), link)| {
        let node = |node: &NodeKey| id(place(DeviceId { node: *node, index: 0 }).0).node;
        let (from, to) = (node(from), node(to));
        (from != to).then_some(((from, to), *link))
    });
    fleet.links = links.collect();
    for device in &mut fleet.devices {
        let (node, index) = place(device.id);
        device.id = DeviceId { node: id(node).node, index };
        (device.machine, device.label) = (node as u64, format!("gpu:{index}"));
    }
    fleet
}

/// Every valid placement: all orders of all subsets, all splits, kept if the constructor accepts them.
fn every_plan(work: &Work, fleet: &Fleet, options: &Options) -> Vec<Plan> {
    let mut found = Vec::new();
    extend(work, fleet, options, &mut Vec::new(), &mut found);
    found
}

fn extend(work: &Work, fleet: &Fleet, options: &Options, so_far: &mut Placement, found: &mut Vec<Plan>) {
    let layers = work.layers.len() as u32;
    let start = so_far.last().map_or(0, |(_, range)| range.end);
    if start == layers {
        found.extend(Plan::new(so_far, work, fleet, options));
        return;
    }
    for device in &fleet.devices {
        if so_far.iter().any(|(used, _)| *used == device.id) {
            continue;
        }
        for end in start + 1..=layers {
            so_far.push((device.id, start..end));
            extend(work, fleet, options, so_far, found);
            so_far.pop();
        }
    }
}

/// The tie-break after the goal: time, stages, whether the coordinator is not first.
fn order(plan: &Plan, options: &Options) -> (u64, usize, bool) {
    (plan.token_ns(), plan.stages().len(), plan.stages()[0].device.node != options.head)
}

fn slowest(plan: &Plan, work: &Work, fleet: &Fleet, options: &Options) -> u64 {
    cost::bottleneck_ns(work, fleet, options.head, &plan.placement()).expect("a plan has predictions")
}

/// The devices in stage order.
fn nodes_of(plan: &Plan) -> Vec<DeviceId> {
    plan.stages().iter().map(|stage| stage.device).collect()
}

/// Checks the figures of a failed plan, given that no placement exists.
fn check_shortage(error: &PlanError, seed: u64) {
    match error {
        PlanError::Memory { need, offered, missing, .. } => assert_eq!(*missing, need - offered, "seed {seed}"),
        PlanError::LayerTooLarge { need, largest, ram, missing, .. } => {
            assert_eq!(*missing, need - largest - ram, "seed {seed}");
        }
        PlanError::Packing { placed, layers, missing, .. } => assert!(placed < layers && *missing > 0, "seed {seed}"),
        PlanError::NoDevices | PlanError::Unlinked => {}
        PlanError::Invalid(reason) => panic!("seed {seed}: {reason}"),
    }
}

#[test]
fn plans_equal_the_best_of_all_placements() {
    let (mut planned, mut split, mut rejected, mut balanced, mut boxed) = (0, 0, 0, 0, 0);
    let (mut in_ram, mut split_in_ram) = (0, 0);
    let kinds = [(false, false), (true, false), (false, true)];
    for (seed, (of_boxes, of_experts)) in kinds.into_iter().flat_map(|kind| (0..600).map(move |seed| (seed, kind))) {
        let mut random = Random::new(seed);
        let (devices, layers) = (1 + random.below(4) as usize, 1 + random.below(5) as usize);
        let (mut work, mut fleet) = (work(&mut random, layers), fleet(&mut random, devices));
        if of_boxes {
            fleet = boxes(fleet);
        }
        if of_experts {
            (work, fleet) = (with_experts(&mut random, work), with_ram(&mut random, fleet));
        }
        if seed % 3 == 0 {
            // Equal devices, so that many splits take the same time.
            for device in &mut fleet.devices {
                (device.bytes_per_second, device.flops_per_second, device.step_ns) = (1_000, 0, 1_000_000);
                (device.layer_ns, device.cache_bytes_per_second) = (100_000, 100);
            }
        }
        for goal in [Goal::Latency, Goal::Throughput] {
            let options = options(goal);
            let all = every_plan(&work, &fleet, &options);
            let key = |plan: &Plan| {
                let first = match goal {
                    Goal::Latency => 0,
                    Goal::Throughput => slowest(plan, &work, &fleet, &options),
                };
                (first, order(plan, &options))
            };
            match (plan(&work, &fleet, &options), all.iter().min_by_key(|plan| key(plan))) {
                (Ok(found), Some(best)) => {
                    match goal {
                        Goal::Throughput => {
                            assert_eq!(key(&found), key(best), "seed {seed}: found {found:?}, best {best:?}");
                        }
                        // Among the splits over these devices in this order within one percent of the best time: the one with
                        // the least slowest stage, and then the least time.
                        Goal::Latency => {
                            let limit = best.token_ns() + best.token_ns() / 100;
                            let alike = || all.iter().filter(|plan| nodes_of(plan) == nodes_of(&found));
                            assert_eq!(alike().map(key).min(), Some(key(best)), "seed {seed}: found {found:?}");
                            let cuts = alike().filter(|plan| plan.token_ns() <= limit);
                            let cuts: Vec<_> = cuts.map(|plan| (plan.slowest_step_ns(), plan.token_ns())).collect();
                            let this = (found.slowest_step_ns(), found.token_ns());
                            assert_eq!(Some(&this), cuts.iter().min(), "seed {seed}: found {found:?}");
                            balanced += usize::from(cuts.iter().any(|(slowest_ns, _)| *slowest_ns > this.0));
                        }
                    }
                    assert!(found.exact());
                    assert_eq!(found.check(&work, &fleet, &options), Ok(()));
                    planned += 1;
                    split += usize::from(found.stages().len() > 1);
                    let nodes = nodes_of(&found);
                    let both = nodes.iter().any(|a| nodes.iter().any(|b| a.node == b.node && a.index != b.index));
                    boxed += usize::from(both);
                    let ram = found.stages().iter().any(|stage| stage.ram > 0);
                    in_ram += usize::from(ram);
                    split_in_ram += usize::from(ram && found.stages().len() > 1);
                }
                (Err(error), None) => {
                    check_shortage(&error, seed);
                    rejected += 1;
                }
                (found, best) => panic!("seed {seed}, {goal:?}: found {found:?}, best {best:?}"),
            }
        }
    }
    assert!(planned > 600 && split > 200 && rejected > 200, "{planned} planned, {split} split, {rejected} rejected");
    assert!(balanced > 20 && boxed > 50, "{balanced} had a worse split with an equal time, {boxed} use a whole box");
    assert!(in_ram > 100 && split_in_ram > 50, "{in_ram} with experts in RAM, {split_in_ram} of them split");
}

/// A regression: ties went to the first placement found, and three equal nodes got 20, 31 and 29 layers.
#[test]
fn among_equal_token_times_the_least_bottleneck_is_planned() {
    let device = |n: usize| Device {
        id: id(n),
        name: format!("3090-{n}"),
        label: String::new(),
        machine: n as u64,
        zone: String::new(),
        memory: 18 << 30,
        bytes_per_second: 700_000_000_000,
        flops_per_second: 50_000_000_000_000,
        copy_bytes_per_second: 700_000_000_000,
        step_ns: 400_000,
        layer_ns: 0,
        cache_bytes_per_second: 0,
        ram: 0,
        ram_bytes_per_second: 0,
        ram_flops_per_second: 0,
        numerics: 1,
        pass_steps: 1,
        excluded: false,
    };
    let layer = Layer {
        flops_per_token: 1_711_000_000,
        weight_bytes: 513_500_000,
        kv_bytes_per_token: 8192,
        window: None,
        experts: None,
    };
    let work = Work {
        layers: vec![layer; 80],
        embed_bytes: 600_000_000,
        head_bytes: 862_000_000,
        tied: false,
        head_flops: 2_100_000_000,
        activation_bytes: 32_768,
        coarser_bytes: Vec::new(),
        context: 2048,
        sequences: 4,
        scratch_bytes: 80 << 20,
    };
    let default_link = Link { rtt_ns: 300_000, bytes_per_second: 112_000_000 };
    let fleet = Fleet { devices: (0..3).map(device).collect(), links: BTreeMap::new(), default_link };
    let plan = plan(&work, &fleet, &options(Goal::Latency)).expect("it fits");
    let layers: Vec<u32> = plan.stages().iter().map(|stage| stage.layers.end - stage.layers.start).collect();
    assert_eq!(layers, [27, 27, 26], "the last one has the output head as well");
    let even = [(id(0), 0..27), (id(1), 27..54), (id(2), 54..80)];
    let even = Plan::new(&even, &work, &fleet, &options(Goal::Latency)).expect("it is a plan");
    assert_eq!((plan.token_ns(), plan.slowest_step_ns()), (even.token_ns(), even.slowest_step_ns()));
}

/// Two devices, neither with memory for all layers: one reads weights faster, the other keys and values.
#[test]
fn a_long_context_moves_layers_to_the_device_with_the_faster_cache() {
    let layer =
        Layer { flops_per_token: 0, weight_bytes: 500_000_000, kv_bytes_per_token: 4096, window: None, experts: None };
    let work = |context: u32, window: Option<u32>| Work {
        layers: vec![Layer { window, ..layer }; 80],
        embed_bytes: 0,
        head_bytes: 0,
        tied: false,
        head_flops: 0,
        activation_bytes: 32_768,
        coarser_bytes: Vec::new(),
        context,
        sequences: 1,
        scratch_bytes: 0,
    };
    let device = |n: usize, memory: u64, weights: u64, cache: u64| Device {
        id: id(n),
        name: format!("node-{n}"),
        label: String::new(),
        machine: n as u64,
        zone: String::new(),
        memory,
        bytes_per_second: weights * 1_000_000_000,
        flops_per_second: 0,
        copy_bytes_per_second: 0,
        step_ns: 100_000,
        layer_ns: 10_000,
        cache_bytes_per_second: cache * 1_000_000_000,
        ram: 0,
        ram_bytes_per_second: 0,
        ram_flops_per_second: 0,
        numerics: 1,
        pass_steps: 1,
        excluded: false,
    };
    // Layers on the first device, where each has memory for 60 of the 80; the splits are balanced within one percent of the
    // time.
    let share = |context: u32, window: Option<u32>, caches: [u64; 2]| {
        let work = work(context, window);
        let memory = cost::stage_bytes(&work, &(0..60));
        let devices = vec![device(0, memory, 800, caches[0]), device(1, memory, 600, caches[1])];
        let default_link = Link { rtt_ns: 100_000, bytes_per_second: 1_000_000_000 };
        let fleet = Fleet { devices, links: BTreeMap::new(), default_link };
        let plan = plan(&work, &fleet, &options(Goal::Latency)).expect("it fits");
        plan.stage_of(id(0)).map_or(0, |stage| stage.layers.end - stage.layers.start)
    };
    let (short, long) = (2048, 131_072);
    let (most, few) = (55..=60, 20..=25);
    assert!(most.contains(&share(short, None, [100, 500])), "weights dominate");
    assert!(few.contains(&share(long, None, [100, 500])), "the cache dominates");
    assert!(
        most.contains(&share(long, Some(1024), [100, 500])),
        "a row attends to 1024 positions, whatever the context"
    );
    assert!(most.contains(&share(long, None, [0, 0])), "an unmeasured cache moves no layers");
}

#[test]
fn repairs_move_the_fewest_bytes_of_all_placements() {
    let (mut repaired, mut moved_some, mut in_ram) = (0, 0, 0);
    for (seed, of_experts) in (0..600).map(|seed| (seed, false)).chain((0..600).map(|seed| (seed, true))) {
        let mut random = Random::new(seed);
        let (devices, layers) = (2 + random.below(3) as usize, 2 + random.below(4) as usize);
        let (mut work, mut before) = (work(&mut random, layers), fleet(&mut random, devices));
        if of_experts {
            (work, before) = (with_experts(&mut random, work), with_ram(&mut random, before));
        }
        let options = options(Goal::Latency);
        let Ok(current) = plan(&work, &before, &options) else {
            continue;
        };
        let mut after = before.clone();
        let lost = current.stages()[random.below(current.stages().len() as u64) as usize].device;
        after.devices.retain(|device| device.id != lost);
        let key = |plan: &Plan| (moved_bytes(&current, plan, &work), order(plan, &options));
        let all = every_plan(&work, &after, &options);
        match (repair(&current, &work, &after, &options), all.iter().min_by_key(|plan| key(plan))) {
            (Ok(found), Some(best)) => {
                assert_eq!(key(&found), key(best), "seed {seed}: found {found:?}, best {best:?}, was {current:?}");
                repaired += 1;
                moved_some += usize::from(moved_bytes(&current, &found, &work) > 0);
                in_ram += usize::from(found.stages().iter().any(|stage| stage.ram > 0));
            }
            (Err(error), None) => check_shortage(&error, seed),
            (found, best) => panic!("seed {seed}: found {found:?}, best {best:?}"),
        }
        let same = repair(&current, &work, &before, &options).expect("the plan itself is a repair");
        assert_eq!(moved_bytes(&current, &same, &work), 0, "seed {seed}: without a loss nothing moves");
    }
    assert!(repaired > 100 && moved_some > 90, "{repaired} repaired, {moved_some} moved something");
    assert!(in_ram > 20, "{in_ram} with experts in RAM");
}

#[test]
fn every_used_node_but_the_coordinator_has_a_plan_for_its_loss() {
    let mut survivable = 0;
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let (work, mut fleet) = (work(&mut random, 5), fleet(&mut random, 5));
        if seed % 2 == 1 {
            fleet = boxes(fleet);
        }
        let options = Options { losses: true, ..options(Goal::Latency) };
        let Ok(plan) = plan(&work, &fleet, &options) else {
            continue;
        };
        let used: BTreeSet<NodeKey> =
            plan.stages().iter().map(|stage| stage.device.node).filter(|&used| used != id(0).node).collect();
        let lost: Vec<NodeKey> = plan.losses().iter().map(|loss| loss.lost).collect();
        assert_eq!(used, lost.iter().copied().collect(), "seed {seed}");
        assert_eq!(used.len(), lost.len(), "seed {seed}: a node is lost once, with all its devices");
        for loss in plan.losses() {
            let mut left = fleet.clone();
            left.devices.retain(|device| device.id.node != loss.lost);
            let alone = Options { losses: false, ..options.clone() };
            assert_eq!(loss.plan, repair(&plan, &work, &left, &alone), "seed {seed}");
            survivable += usize::from(loss.plan.is_ok());
        }
    }
    assert!(survivable > 100, "{survivable}");
}

/// Speeds are measured again and again: a running job stays where it is unless another placement pays.
#[test]
fn a_present_placement_stays_unless_another_pays() {
    let (mut kept, mut better, mut replaced) = (0, 0, 0);
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let (work, mut fleet, options) = (work(&mut random, 6), fleet(&mut random, 4), options(Goal::Latency));
        let placed = |fleet: &Fleet, present: Option<&Plan>| {
            let (work, fleet, options) = (work.clone(), fleet.clone(), options.clone());
            let present = present.cloned();
            let question = ModelQuestion { work, fleet, options, repair: None, present, standbys: false };
            let Answer::Model(answer) = Question::Model(Box::new(question)).answer() else { panic!("of another kind") };
            answer
        };
        let Ok(present) = placed(&fleet, None).map(|answer| answer.plan) else { continue };
        for device in &mut fleet.devices {
            device.bytes_per_second = device.bytes_per_second * (20 + random.below(160)) / 100;
        }
        let before_ns = cost::token_ns(&work, &fleet, options.head, &present.placement()).expect("the same devices");
        let best = placed(&fleet, None).expect("the same memory").plan;
        let pays = pays_to_move(before_ns, best.token_ns());
        let answer = placed(&fleet, Some(&present)).expect("the same memory");
        let expected = if pays { &best } else { &present };
        assert_eq!(answer.plan.placement(), expected.placement(), "seed {seed}");
        assert_eq!(answer.before_ns, Some(before_ns), "seed {seed}");
        if pays {
            replaced += 1;
        } else {
            assert_eq!((answer.plan.token_ns(), answer.moved_bytes), (before_ns, 0), "seed {seed}");
            kept += 1;
            better += usize::from(best.placement() != present.placement());
        }
    }
    assert!(
        kept > 50 && better > 20 && replaced > 5,
        "{kept} kept, {better} although others were better, {replaced} replaced"
    );
}

/// Another device of the owner's node would be lost with it.
#[test]
fn no_standby_is_on_its_owners_node() {
    let (mut covered, mut beside) = (0, 0);
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let work = work(&mut random, 5);
        let mut fleet = boxes(fleet(&mut random, 6));
        fleet.devices.iter_mut().for_each(|device| device.memory *= 2);
        let options = options(Goal::Latency);
        let Ok(plan) = plan(&work, &fleet, &options) else { continue };
        for standby in standbys(&plan, &work, &fleet, &options, &[]) {
            let owner = plan.stages()[usize::from(standby.stage)].device;
            let Some(place) = standby.place else { continue };
            assert_ne!(place.device.node, owner.node, "seed {seed}");
            covered += 1;
            beside += usize::from(plan.stages().iter().any(|stage| stage.device.node == place.device.node));
        }
    }
    assert!(covered > 100 && beside > 20, "{covered} standbys, {beside} on nodes that own another stage");
}

/// Rows of 2,304 bytes between two devices of which neither holds the model: coarser ones are chosen where the link is the
/// bottleneck of a prompt, and only as coarse as that takes.
#[test]
fn coarser_rows_are_chosen_where_the_link_is_the_bottleneck() {
    let chosen = |bytes_per_second: u64| {
        let (mut work, mut fleet) = (work(&mut Random::new(1), 4), fleet(&mut Random::new(1), 2));
        let layer = Layer {
            flops_per_token: 1_000_000,
            weight_bytes: 1 << 20,
            kv_bytes_per_token: 0,
            window: None,
            experts: None,
        };
        work.layers.fill(layer);
        (work.embed_bytes, work.head_bytes, work.head_flops, work.scratch_bytes) = (0, 0, 0, 0);
        (work.activation_bytes, work.coarser_bytes) = (2304, vec![1154, 636, 323]);
        for device in &mut fleet.devices {
            // A row of a prompt takes 0.2 ms on each.
            (device.memory, device.bytes_per_second, device.flops_per_second) =
                (3 << 20, 10_000_000_000, 10_000_000_000);
            (device.step_ns, device.layer_ns, device.cache_bytes_per_second, device.excluded) = (0, 0, 0, false);
        }
        fleet.links.clear();
        fleet.default_link = Link { rtt_ns: 1_000_000, bytes_per_second };
        let question = ModelQuestion {
            work,
            fleet,
            options: options(Goal::Latency),
            repair: None,
            present: None,
            standbys: false,
        };
        let Answer::Model(Ok(answer)) = Question::Model(Box::new(question)).answer() else { panic!("no plan") };
        answer.plan.row_bytes()
    };
    assert_eq!(chosen(1_000_000_000), 2304, "a fast link");
    assert_eq!(chosen(8_000_000), 1154, "half the bytes are enough");
    assert_eq!(chosen(100_000), 323, "any byte counts");
}
