//! Invalid questions and forged plans: each gets a clear error, none a panic.
mod fleets;

use fleets::{Random, fleet, id, options, work};
use partitioner::plan::{REASONS_MAX, Stage};
use partitioner::{
    Device, Fleet, Goal, InvalidPlan, Layer, Link, Options, Plan, PlanError, Work, explain, plan, repair,
};
use std::collections::BTreeMap;

/// Three equal devices that each hold two of four layers, all linked.
fn even() -> (Work, Fleet, Options) {
    let mut random = Random::new(1);
    let layer = Layer { flops_per_token: 0, weight_bytes: 100, kv_bytes_per_token: 0, window: None, experts: None };
    let work = Work {
        layers: vec![layer; 4],
        embed_bytes: 0,
        head_bytes: 0,
        tied: false,
        head_flops: 0,
        activation_bytes: 10,
        coarser_bytes: Vec::new(),
        context: 0,
        sequences: 1,
        scratch_bytes: 0,
    };
    let mut fleet = fleet(&mut random, 3);
    fleet.links = BTreeMap::new();
    fleet.default_link = Link { rtt_ns: 1_000, bytes_per_second: 1_000_000 };
    for device in &mut fleet.devices {
        (device.memory, device.bytes_per_second, device.excluded) = (225, 1_000, false);
        (device.step_ns, device.layer_ns, device.cache_bytes_per_second) = (0, 0, 0);
    }
    (work, fleet, options(Goal::Latency))
}

#[test]
fn a_model_larger_than_the_fleet_names_the_missing_bytes() {
    let (mut work, fleet, options) = even();
    work.layers = vec![work.layers[0]; 10];
    // Ten layers of 100 bytes; three nodes of 225 bytes.
    let error = plan(&work, &fleet, &options).expect_err("it cannot fit");
    assert_eq!(error, PlanError::Memory { need: 1_000, offered: 675, ram: 0, missing: 325 });
    assert!(error.to_string().contains("325 B are missing"), "{error}");
}

#[test]
fn a_layer_larger_than_any_node_is_named() {
    let (mut work, fleet, options) = even();
    work.layers[2].weight_bytes = 300;
    let error = plan(&work, &fleet, &options).expect_err("one layer fits nowhere");
    assert_eq!(error, PlanError::LayerTooLarge { layer: 2, need: 300, largest: 225, ram: 0, missing: 75, more_ram: 0 });
}

#[test]
fn layers_that_pack_badly_are_distinguished_from_missing_memory() {
    let (mut work, mut fleet, options) = even();
    work.layers = vec![Layer { weight_bytes: 150, ..work.layers[0] }; 4];
    let error = plan(&work, &fleet, &options).expect_err("three nodes hold one layer each");
    assert_eq!(error, PlanError::Packing { need: 600, offered: 675, placed: 3, layers: 4, missing: 150 });
    fleet.default_link.bytes_per_second = 0;
    fleet.devices[0].memory = 400;
    assert_eq!(plan(&work, &fleet, &options), Err(PlanError::Unlinked), "memory suffices, no link is usable");
}

#[test]
fn a_fleet_without_usable_nodes_is_an_error() {
    let (work, mut fleet, options) = even();
    for device in &mut fleet.devices {
        device.excluded = true;
    }
    assert_eq!(plan(&work, &fleet, &options), Err(PlanError::NoDevices));
    for device in &mut fleet.devices {
        (device.excluded, device.bytes_per_second) = (false, 0);
    }
    assert_eq!(plan(&work, &fleet, &options), Err(PlanError::NoDevices), "zero means unmeasured");
    fleet.devices.clear();
    assert_eq!(plan(&work, &fleet, &options), Err(PlanError::NoDevices));
}

#[test]
fn invalid_questions_are_rejected() {
    let (work, fleet, options) = even();
    let rejection = |work: &Work, fleet: &Fleet, options: &Options| match plan(work, fleet, options) {
        Err(PlanError::Invalid(reason)) => reason,
        other => panic!("expected a rejection, got {other:?}"),
    };
    let none = Work { layers: Vec::new(), ..work.clone() };
    assert!(rejection(&none, &fleet, &options).contains("no layers"));
    let many = Work { layers: vec![work.layers[0]; 1_025], ..work.clone() };
    assert!(rejection(&many, &fleet, &options).contains("1025 layers"));
    let huge = Layer {
        weight_bytes: u64::MAX,
        flops_per_token: u64::MAX,
        kv_bytes_per_token: u64::MAX,
        window: None,
        experts: None,
    };
    let heavy = Work { layers: vec![huge; 4], context: u32::MAX, sequences: u32::MAX, ..work.clone() };
    assert!(rejection(&heavy, &fleet, &options).contains("1 EiB"));
    let scratch = Work { scratch_bytes: u64::MAX, ..work.clone() };
    assert!(rejection(&scratch, &fleet, &options).contains("1 EiB"));
    let mut twins = fleet.clone();
    twins.devices[1].id = twins.devices[0].id;
    assert!(rejection(&work, &twins, &options).contains("same id"));
}

#[test]
fn extreme_devices_and_links_do_not_break_the_sums() {
    let (work, mut fleet, options) = even();
    fleet.devices[0].memory = u64::MAX;
    fleet.devices[0].bytes_per_second = u64::MAX;
    fleet.devices[0].step_ns = u64::MAX;
    fleet.devices[0].layer_ns = u64::MAX;
    fleet.devices[2].cache_bytes_per_second = 1;
    fleet.devices[1].flops_per_second = u64::MAX;
    fleet.devices[2].bytes_per_second = 1;
    fleet.default_link = Link { rtt_ns: u64::MAX, bytes_per_second: 1 };
    for goal in [Goal::Latency, Goal::Throughput] {
        let options = Options { goal, losses: true, ..options.clone() };
        let plan = plan(&work, &fleet, &options).expect("one node has memory for all");
        assert_eq!(plan.check(&work, &fleet, &options), Ok(()));
    }
}

#[test]
fn large_fleets_and_deep_models_get_valid_plans() {
    for (seed, devices, layers) in [(1, 11, 80), (2, 64, 80), (3, 200, 40), (4, 10, 1_024), (5, 64, 300)] {
        let mut random = Random::new(seed);
        let (work, mut fleet) = (work(&mut random, layers), fleet(&mut random, devices));
        for device in &mut fleet.devices {
            device.memory *= (2 * layers / devices).max(1) as u64;
        }
        for goal in [Goal::Latency, Goal::Throughput] {
            let options = options(goal);
            let plan = plan(&work, &fleet, &options).unwrap_or_else(|error| panic!("{devices} × {layers}: {error}"));
            assert!(!plan.exact(), "{devices} × {layers} is a beam search, and is marked as one");
            assert_eq!(plan.check(&work, &fleet, &options), Ok(()));
            assert_eq!(plan.reasons().len(), devices);
            let mut left = fleet.clone();
            left.devices.retain(|device| device.id != plan.stages()[0].device);
            let repaired = repair(&plan, &work, &left, &options).expect("one node fewer still suffices");
            assert_eq!(repaired.check(&work, &left, &options), Ok(()));
        }
    }
}

/// Nodes without any part of a job do not prevent a plan.
#[test]
fn a_fleet_of_more_nodes_than_reasons_is_planned() {
    let (work, mut fleet, options) = even();
    let spare = fleet.devices[2].clone();
    let more = (3..REASONS_MAX + 2).map(|n| Device { id: id(n), excluded: n % 7 == 0, ..spare.clone() });
    fleet.devices.extend(more);
    assert_eq!(fleet.devices.len(), REASONS_MAX + 2);
    let plan = plan(&work, &fleet, &options).expect("two nodes suffice");
    assert_eq!(plan.reasons().len(), REASONS_MAX);
    assert!(plan.stages().iter().all(|stage| plan.reasons().iter().any(|(id, _)| *id == stage.device)));
}

/// Three neighbours of the coordinator, and 130 slightly faster nodes at 150 ms round trip.
#[test]
fn the_shortlist_keeps_near_nodes() {
    let near = Link { rtt_ns: 300_000, bytes_per_second: 112_000_000 };
    let far = Link { rtt_ns: 150_000_000, bytes_per_second: 12_000_000 };
    let (mut work, mut fleet, options) = even();
    let layer = Layer {
        flops_per_token: 1_711_000_000,
        weight_bytes: 513_500_000,
        kv_bytes_per_token: 8192,
        window: None,
        experts: None,
    };
    (work.layers, work.activation_bytes, work.context) = (vec![layer; 80], 32_768, 2048);
    let node = |n: usize| Device {
        id: id(n),
        memory: if n == 0 { 1 << 30 } else { 18 << 30 },
        bytes_per_second: if n < 4 { 700_000_000_000 } else { 780_000_000_000 },
        ..fleet.devices[0].clone()
    };
    let devices: Vec<Device> = (0..134).map(node).collect();
    let pairs = (0..4).flat_map(|a| (0..4).map(move |b| (a, b))).filter(|(a, b)| a != b);
    fleet = Fleet { devices, links: pairs.map(|(a, b)| ((id(a).node, id(b).node), near)).collect(), default_link: far };
    let plan = plan(&work, &fleet, &options).expect("it fits");
    assert!(plan.stages().iter().all(|stage| (0..4).any(|n| stage.device == id(n))), "{:?}", plan.stages());
    assert!(plan.token_ns() < 70_000_000, "{}", plan.token_ns());
}

#[test]
fn the_constructor_rejects_every_broken_rule() {
    let (work, mut fleet, options) = even();
    let new = |stages: &[(usize, std::ops::Range<u32>)], fleet: &Fleet| {
        let stages: Vec<_> = stages.iter().map(|(device, layers)| (id(*device), layers.clone())).collect();
        Plan::new(&stages, &work, fleet, &options).map(|plan| plan.stages().len())
    };
    assert_eq!(new(&[(0, 0..2), (1, 2..4)], &fleet), Ok(2));
    assert_eq!(new(&[], &fleet), Err(InvalidPlan::Empty));
    assert_eq!(new(&[(0, 0..2)], &fleet), Err(InvalidPlan::Uncovered { covered: 2, layers: 4 }));
    assert_eq!(new(&[(0, 0..2), (1, 3..4)], &fleet), Err(InvalidPlan::Layers { stage: 1, start: 3, end: 4 }));
    assert_eq!(
        new(&[(0, 0..2), (1, 1..4)], &fleet),
        Err(InvalidPlan::Memory { stage: 1, need: 300, offered: 225, ram: 0 })
    );
    assert_eq!(new(&[(0, 0..2), (1, 1..3)], &fleet), Err(InvalidPlan::Layers { stage: 1, start: 1, end: 3 }));
    assert_eq!(new(&[(0, 0..0)], &fleet), Err(InvalidPlan::Layers { stage: 0, start: 0, end: 0 }));
    assert_eq!(new(&[(0, 0..u32::MAX)], &fleet), Err(InvalidPlan::Layers { stage: 0, start: 0, end: u32::MAX }));
    assert_eq!(new(&[(0, 0..2), (0, 2..4)], &fleet), Err(InvalidPlan::DeviceTwice { stage: 1 }));
    assert_eq!(new(&[(9, 0..2)], &fleet), Err(InvalidPlan::UnknownDevice { stage: 0 }));
    fleet.devices.iter_mut().find(|device| device.id == id(1)).expect("it exists").excluded = true;
    assert_eq!(new(&[(0, 0..2), (1, 2..4)], &fleet), Err(InvalidPlan::Excluded { stage: 1 }));
}

#[test]
fn a_plan_survives_the_wire_and_a_forged_one_does_not() {
    let (work, fleet, options) = even();
    let options = Options { losses: true, ..options };
    let plan = plan(&work, &fleet, &options).expect("two of three nodes suffice");
    assert!(plan.losses().iter().any(|loss| loss.plan.is_ok()));
    let sent = serde_json::to_value(&plan).expect("plans serialise");
    assert_eq!(serde_json::from_value::<Plan>(sent.clone()).expect("as sent"), plan);
    // A standby that already had a stage took over another one: successors receive such a plan.
    let second = Stage { device: plan.stages()[0].device, ..plan.stages()[1].clone() };
    let both = plan.with_stage(1, second).expect("the same layers");
    let received = serde_json::from_value::<Plan>(serde_json::to_value(&both).expect("plans serialise"));
    assert_eq!(received.expect("as sent"), both);

    type Forgery = fn(&mut serde_json::Value);
    let forgeries: [(&str, Forgery); 5] = [
        ("at least one stage", |plan| plan["stages"] = serde_json::json!([])),
        ("adjoins the one before", |plan| plan["stages"][1]["layers"]["start"] = 1.into()),
        ("adjoins the one before", |plan| plan["stages"][1]["layers"]["end"] = 1_000_000.into()),
        ("less than its stages' steps", |plan| plan["token_ns"] = 1.into()),
        ("loss plans", |plan| {
            let loss = plan["losses"][0].clone();
            plan["losses"] = serde_json::Value::Array(vec![loss; 50]);
        }),
    ];
    for (complaint, forge) in forgeries {
        let mut forged = sent.clone();
        forge(&mut forged);
        let error = serde_json::from_value::<Plan>(forged).expect_err(complaint);
        assert!(error.to_string().contains(complaint), "{error}");
    }
    let mut nested = sent.clone();
    nested["losses"][0]["plan"]["Ok"]["stages"][0]["layers"]["start"] = 1.into();
    assert!(serde_json::from_value::<Plan>(nested).is_err(), "loss plans are checked too");
}

#[test]
fn the_explanation_names_every_node() {
    let (work, mut fleet, options) = even();
    fleet.devices[2].excluded = true;
    let options = Options { losses: true, ..options };
    let plan = plan(&work, &fleet, &options).expect("two nodes suffice");
    assert_eq!(plan.reasons().len(), 3);
    let table = explain::table(&plan, &fleet);
    for expected in ["node-0", "0-1", "2-3", "draining", "exact search", "is lost: the model needs"] {
        assert!(table.contains(expected), "no {expected:?} in:\n{table}");
    }
}
