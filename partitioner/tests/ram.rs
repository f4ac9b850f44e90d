//! Plans whose stages exceed the memory of their devices by experts in RAM.
mod fleets;

use fleets::{Random, fleet, id, options, with_experts, with_ram, work};
use partitioner::cost::{self, ram::Room};
use partitioner::plan::Stage;
use partitioner::{
    Answer, Device, Experts, Fleet, Goal, InvalidPlan, Layer, Link, ModelQuestion, Plan, PlanError, Question, Tier,
    Work, explain, plan, repair, standbys,
};
use std::collections::BTreeMap;

const GIB: u64 = 1 << 30;

/// 16 layers of 4 GiB, of which 3.75 GiB are 64 experts; a row uses 4.
fn mixture() -> Work {
    let experts = Some(Experts { bytes: 15 * GIB / 4, count: 64, used: 4 });
    let layer =
        Layer { flops_per_token: 1_000_000_000, weight_bytes: 4 * GIB, kv_bytes_per_token: 0, window: None, experts };
    Work { layers: vec![layer; 16], ..work(&mut Random::new(1), 1) }
}

/// A GPU, with RAM for experts.
fn card(n: usize, memory: u64, ram: u64) -> Device {
    let some = fleet(&mut Random::new(1), 1).devices.remove(0);
    Device {
        id: id(n),
        name: format!("card-{n}"),
        machine: n as u64,
        memory: memory * GIB,
        bytes_per_second: 800_000_000_000,
        flops_per_second: 100_000_000_000_000,
        step_ns: 400_000,
        layer_ns: 10_000,
        cache_bytes_per_second: 0,
        ram: ram * GIB,
        ram_bytes_per_second: 50_000_000_000,
        ram_flops_per_second: 1_000_000_000_000,
        excluded: false,
        ..some
    }
}

fn of(devices: Vec<Device>) -> Fleet {
    let default_link = Link { rtt_ns: 200_000, bytes_per_second: 1_000_000_000 };
    Fleet { devices, links: BTreeMap::new(), default_link }
}

#[test]
fn one_card_with_ram_holds_what_several_cards_would() {
    let work = mixture();
    let need = cost::stage_bytes(&work, &(0..16));
    let planned = |devices: Vec<Device>| plan(&work, &of(devices), &options(Goal::Latency));
    let alone = planned(vec![card(0, 24, 64)]).expect("the experts lie in RAM");
    let stage = &alone.stages()[0];
    assert_eq!((alone.stages().len(), stage.bytes + stage.ram), (1, need));
    assert!(stage.bytes <= 24 * GIB && stage.ram > 40 * GIB, "{stage:?}");
    // 60 GiB are experts; at most seven eighths of them may lie in RAM.
    assert!(planned(vec![card(0, 13, 64)]).is_ok());
    assert!(planned(vec![card(0, 11, 64)]).is_err());
    let roomy = planned(vec![card(0, 96, 64)]).expect("it fits in memory");
    assert_eq!(roomy.stages()[0].ram, 0, "memory comes first");
    let several = planned((0..3).map(|n| card(n, 25, 64)).collect()).expect("it fits in memory");
    assert!(several.stages().iter().all(|stage| stage.ram == 0), "a network is faster than RAM: {several:?}");
    assert_eq!(several.stages().len(), 3);
    let two = planned((0..2).map(|n| card(n, 24, 64)).collect()).expect("part of it lies in RAM");
    let ram: u64 = two.stages().iter().map(|stage| stage.ram).sum();
    assert!(two.stages().len() == 2 && ram < stage.ram, "two cards leave less to RAM: {two:?}");
    assert!(several.token_ns() < two.token_ns() && two.token_ns() < alone.token_ns());
}

#[test]
fn a_plan_says_what_lies_in_ram() {
    let (work, fleet) = (mixture(), of(vec![card(0, 24, 64)]));
    let plan = plan(&work, &fleet, &options(Goal::Latency)).expect("the experts lie in RAM");
    let (_, reason) = &plan.reasons()[0];
    assert!(reason.contains("of experts in RAM of 64.0 GiB"), "{reason}");
    let table = explain::table(&plan, &fleet);
    assert!(table.contains("of its experts lie in RAM, computed by the processor"), "{table}");
}

#[test]
fn a_shortage_names_memory_and_ram() {
    let work = mixture();
    let error = |devices: Vec<Device>| plan(&work, &of(devices), &options(Goal::Latency)).expect_err("it cannot fit");
    let short = error(vec![card(0, 24, 16)]);
    let PlanError::Memory { need, offered, ram, missing } = short else { panic!("{short}") };
    // Whole experts of 60 MiB of each of 16 layers.
    assert_eq!((offered - ram, need - offered), (24 * GIB, missing));
    assert!(ram <= 16 * GIB && ram > 15 * GIB, "{ram}");
    let text = short.to_string();
    assert!(text.contains("of it RAM for experts") && text.contains("--memory or --expert-ram"), "{text}");
    // Enough in total, but no card holds what may not lie in RAM of one layer, or has the RAM for the others.
    let layer = Work { layers: vec![mixture().layers[0]], ..mixture() };
    let few = |memory: u64, ram: u64| {
        let devices = (0..8).map(|n| Device { memory: memory << 20, ram: ram << 20, ..card(n, 0, 0) }).collect();
        plan(&layer, &of(devices), &options(Goal::Latency)).expect_err("it cannot fit")
    };
    let short = few(600, 4096);
    let PlanError::LayerTooLarge { missing, more_ram: 0, .. } = short else { panic!("{short:?}") };
    assert!(missing > 0 && short.to_string().contains("raise its --memory, or lower"), "{short}");
    let short = few(3000, 512);
    let PlanError::LayerTooLarge { missing, ram, more_ram, .. } = short else { panic!("{short:?}") };
    assert!(missing > 0 && ram <= 512 << 20 && more_ram > missing, "{short:?}");
    assert!(short.to_string().contains("or its --expert-ram by up to"), "{short}");
}

#[test]
fn a_plan_with_too_much_ram_is_rejected() {
    let (work, fleet, options) = (mixture(), of(vec![card(0, 24, 64)]), options(Goal::Latency));
    let plan = plan(&work, &fleet, &options).expect("the experts lie in RAM");
    let sent = serde_json::to_value(&plan).expect("plans serialise");
    assert_eq!(serde_json::from_value::<Plan>(sent.clone()).expect("as sent"), plan);
    let mut forged = sent;
    forged["stages"][0]["ram"] = (plan.stages()[0].bytes * 7 + 1).into();
    let error = serde_json::from_value::<Plan>(forged).expect_err("less than an eighth stays");
    assert!(error.to_string().contains("of experts in RAM, expected at most"), "{error}");
    let small = of(vec![card(0, 24, 30)]);
    let error = Plan::new(&plan.placement(), &work, &small, &options).expect_err("not enough RAM");
    let InvalidPlan::Memory { offered, ram, .. } = error else { panic!("{error}") };
    assert!(offered == 24 * GIB && ram <= 30 * GIB, "{error}");
    assert!(error.to_string().contains("of RAM for experts"), "{error}");
    assert_eq!(plan.check(&work, &fleet, &options), Ok(()));
}

/// Each has what fits on its own device. The first of two on one device takes its memory, the other what is left, and RAM.
#[test]
fn standbys_have_experts_in_ram_as_well() {
    let work = mixture();
    let chosen = |memory: u64, ram: u64| {
        let fleet = of(vec![card(0, 24, 64), card(1, memory, ram)]);
        let placement = [(id(0), 0..16)];
        let plan = Plan::new(&placement, &work, &fleet, &options(Goal::Latency)).expect("it fits");
        standbys(&plan, &work, &fleet, &options(Goal::Latency), &[]).remove(0)
    };
    let place = chosen(32, 64).place.expect("it fits");
    assert!(place.bytes <= 32 * GIB && place.ram < 33 * GIB, "{place:?}");
    assert_eq!(chosen(96, 64).place.expect("it fits").ram, 0);
    assert_eq!(chosen(32, 16).tier, Tier::Cold);
    let shared = |ram: u64| {
        let fleet = of(vec![card(0, 24, 64), card(1, 24, 64), card(2, 40, ram)]);
        let placement = [(id(0), 0..8), (id(1), 8..16)];
        let plan = Plan::new(&placement, &work, &fleet, &options(Goal::Latency)).expect("it fits");
        let all = standbys(&plan, &work, &fleet, &options(Goal::Latency), &[]);
        let places: Vec<Stage> = all.into_iter().filter_map(|s| s.place).filter(|p| p.device == id(2)).collect();
        let taken = places.iter().fold(Room::default(), |sum, place| sum.plus(place.room()));
        assert!(taken.memory <= 40 * GIB && taken.ram <= ram * GIB, "{places:?}");
        let kept: Vec<_> = places.first().map(|_| (1, id(2))).into_iter().collect();
        let more = standbys(&plan, &work, &fleet, &options(Goal::Latency), &kept);
        let more = more.into_iter().filter_map(|s| s.place).find(|place| place.device == id(2));
        (places.len(), more.is_some())
    };
    assert_eq!(shared(64), (2, true));
    assert_eq!(shared(20), (1, false), "RAM for one");
}

/// A stage that no spare holds whole is split where two hold the halves with RAM.
#[test]
fn halves_have_experts_in_ram() {
    let work = mixture();
    let asked = |ram: u64| {
        let head = Device { memory: 0, excluded: true, ..card(0, 0, 0) };
        let fleet = of(vec![head, card(1, 70, 0), card(2, 16, ram), card(3, 16, ram)]);
        let question = ModelQuestion {
            work: work.clone(),
            fleet,
            options: options(Goal::Latency),
            repair: None,
            present: None,
            standbys: true,
        };
        let Answer::Model(Ok(answer)) = Question::Model(Box::new(question)).answer() else { panic!("no plan") };
        let places = answer.standbys.iter().filter_map(|standby| standby.place.clone());
        (answer.plan.stages().len(), places.map(|place| place.ram > 0).collect::<Vec<_>>())
    };
    assert_eq!(asked(0), (1, vec![]));
    assert_eq!(asked(20), (2, vec![true, true]));
}

/// Every plan, repair and standby obeys the constructor's rule and the rooms of the devices.
#[test]
fn random_plans_stay_within_memory_and_ram() {
    let (mut in_ram, mut covered) = (0, 0);
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let (layers, devices) = (4 + random.below(20) as usize, 3 + random.below(12) as usize);
        let (work, mut fleet) = (work(&mut random, layers), fleet(&mut random, devices));
        fleet.devices.iter_mut().for_each(|device| device.memory *= 2);
        let (work, fleet) = (with_experts(&mut random, work), with_ram(&mut random, fleet));
        for goal in [Goal::Latency, Goal::Throughput] {
            let options = options(goal);
            let Ok(plan) = plan(&work, &fleet, &options) else { continue };
            assert_eq!(plan.check(&work, &fleet, &options), Ok(()), "seed {seed}");
            let mut left = fleet.clone();
            left.devices.retain(|device| device.id != plan.stages()[0].device);
            if let Ok(repaired) = repair(&plan, &work, &left, &options) {
                assert_eq!(repaired.check(&work, &left, &options), Ok(()), "seed {seed}");
            }
            in_ram += usize::from(plan.stages().iter().any(|stage| stage.ram > 0));
            let standbys = standbys(&plan, &work, &fleet, &options, &[]);
            let places = standbys.iter().filter_map(|standby| standby.place.as_ref());
            for device in &fleet.devices {
                let parts = plan.stages().iter().chain(places.clone()).filter(|part| part.device == device.id);
                let taken = parts.fold(Room::default(), |sum, part| sum.plus(part.room()));
                let room = Room::of(device);
                assert!(taken.memory <= room.memory && taken.ram <= room.ram, "seed {seed}: {taken:?} of {room:?}");
            }
            covered += places.filter(|place| place.ram > 0).count();
        }
    }
    assert!(in_ram > 20 && covered > 10, "{in_ram} plans, {covered} standbys");
}
