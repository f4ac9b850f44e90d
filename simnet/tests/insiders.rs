//! Misreporting members cost a running job nothing: forged deaths, and memory that does not exist. Also: false suspicions
//! under loss, and how soon a job detects a member that is really dead.
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
#![expect(clippy::wildcard_enum_match_arm, reason = "a test handles few of many events")]
use node_core::codec;
use node_core::id::{CallId, Generation, NodeId};
use node_core::input::Input;
use node_core::message::Message;
use node_core::output::Event;
use node_core::time::Duration;
use node_core::work::serve::DoneReason;
use rand::RngExt;
use simnet::checker::membership::{converged, divergences, informed};
use simnet::checker::requests;
use simnet::options::chance;
use simnet::workload::{request, symbolic_model};
use simnet::{Fault, HostId, HostSpec, Options, Workload, World};
use std::collections::{BTreeMap, BTreeSet};

const LAYERS: u32 = 12;
const LAYER_BYTES: u64 = 20 << 20;
/// Memory for five of the twelve layers.
const MEMORY: u64 = 297 << 20;
const COORDINATOR: HostId = HostId(0);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn spec(memory: u64) -> HostSpec {
    let mut spec = HostSpec::default();
    (spec.capacity.devices[0].memory_total, spec.capacity.devices[0].memory_free) = (memory, memory);
    spec
}

/// Hosts that have joined.
fn mesh(options: Options, specs: &[HostSpec]) -> (World, Vec<HostId>) {
    let mut world = World::new(options);
    let hosts: Vec<HostId> = specs.iter().map(|spec| world.add_host(spec.clone())).collect();
    hosts.iter().for_each(|&host| world.start(host));
    hosts[1..].iter().for_each(|&host| world.introduce(host, hosts[0]));
    let settled = world.run_while_not(ms(20_000), ms(50), |world| informed(world, &[]));
    assert!(settled, "{} hosts find each other: {:?}", hosts.len(), divergences(&world, &[]).first());
    world.run_for(ms(1000)); // connections are established
    (world, hosts)
}

fn serve(world: &mut World) -> Workload {
    let mut work = Workload::deploy(world, COORDINATOR, symbolic_model(LAYERS, LAYER_BYTES));
    assert!(work.run_until_ready(world, ms(20_000)), "the model is served: {:?}", work.notes);
    work
}

fn run_for(work: &mut Workload, world: &mut World, time: Duration) {
    work.run(world, time, |_, _| false);
}

/// Asserts that the answers are those of a run on one host.
fn assert_answered(work: &mut Workload, world: &mut World, what: &str) {
    assert!(work.run_until_done(world, ms(120_000)), "{what}: everything ends");
    let wrong = requests::violations(work);
    assert!(wrong.is_empty(), "{what}: {wrong:#?}");
    for (CallId(id), call) in &work.calls {
        assert!(matches!(call.ends[0].1, DoneReason::Length | DoneReason::Stop), "{what}: call {id}: {:?}", call.ends);
    }
}

/// The host of a stage, other than the coordinator.
fn some_stage(work: &Workload, world: &World, draw: u64) -> HostId {
    let others: Vec<HostId> = work.stages(world).into_iter().filter(|&host| host != COORDINATOR).collect();
    others[draw as usize % others.len()]
}

fn losses(work: &Workload) -> Vec<&Event> {
    let lost = |event: &&Event| matches!(event, Event::Lost { .. });
    work.notes.iter().map(|told| &told.event).filter(lost).collect()
}

/// A member list with one entry: this life of this node is down. Encoded by hand, because only the core can build such
/// lists: number of entries; node, generation (32 bits), no address; incarnation; state 2.
fn forged_death(world: &World, victim: HostId, incarnation: u16) -> Vec<u8> {
    let node = world.host(victim).node_id;
    let witness = world.hosts().find(|host| host.id != victim).and_then(|host| host.node.as_ref()).unwrap();
    let generation = u32::try_from(witness.membership().member(node).unwrap().generation.0).unwrap();
    let mut members = vec![1, 16];
    members.extend_from_slice(&node.0);
    members.push(252);
    members.extend_from_slice(&generation.to_le_bytes());
    members.extend_from_slice(&[0, 251]);
    members.extend_from_slice(&incarnation.to_le_bytes());
    members.push(2);
    let message = Message::PushPull { members, heard: Vec::new(), adverts: Vec::new(), reply: false };
    codec::encode_message(&message).unwrap()
}

/// Delivers a member's message to all hosts at once.
fn forge(world: &mut World, hosts: &[HostId], from: NodeId, bytes: &[u8]) {
    for &host in hosts {
        world.inject(host, Input::Message { from, bytes: bytes.to_vec() });
    }
}

/// 64 nodes at 5 % loss. All nodes accept each forged death at once, which is worse than any false positive of the
/// protocol.
#[test]
fn a_false_death_heals_within_two_seconds_and_disturbs_no_job() {
    let (mut world, hosts) = mesh(Options::lan(71), &vec![spec(MEMORY); 64]);
    world.strike(Fault::Loss(50_000));
    let mut work = serve(&mut world);
    let epoch = work.epoch;
    let forger = world.host(hosts[40]).node_id;
    let mut healed = Vec::new();
    for round in 0..30u16 {
        work.submit(&mut world, request(u64::from(round), 50, 60));
        run_for(&mut work, &mut world, ms(137));
        let victim = some_stage(&work, &world, u64::from(round));
        let others: Vec<HostId> = hosts.iter().copied().filter(|host| *host != victim).collect();
        // Higher than any it has had; every tenth one is the highest, as if it had left: only a new life refutes that.
        let incarnation = if round % 10 == 9 { u16::MAX } else { 300 + 40 * round };
        let bytes = forged_death(&world, victim, incarnation);
        forge(&mut world, &others, forger, &bytes);
        let forged_at = world.now();
        run_for(&mut work, &mut world, ms(1));
        let believed = others.iter().filter(|host| {
            let node = world.host(**host).node.as_ref().unwrap();
            !node.membership().is_alive(world.host(victim).node_id)
        });
        // Participants of its job hear it, so they do not accept it.
        assert!(believed.count() >= 57, "round {round}: the forged death is accepted at first");
        let whole = work.run(&mut world, ms(10_000), |_, world| converged(world, &[]));
        assert!(whole, "round {round}: {:?}", divergences(&world, &[]).first());
        healed.push(world.now().since(forged_at));
        run_for(&mut work, &mut world, ms(500));
    }
    healed.sort();
    println!(
        "64 nodes, 5 % loss, 30 forged deaths of a running job's stages, accepted by all: all see it alive again after \
         {:?} (median), {:?} (maximum)",
        healed[15], healed[29]
    );
    assert!(healed[29] <= ms(2000), "{healed:?}");
    assert_answered(&mut work, &mut world, "forged deaths");
    assert!(losses(&work).is_empty() && work.epoch == epoch, "the job stayed where it was: {:?}", losses(&work));
}

/// A burst of loss so heavy that many nodes report many live ones down, while one does die: two seconds after its end all
/// live nodes are members again, under the identities they had, and all views have the dead one as down. In some of these
/// worlds only a few nodes heard the last refutation of the one that dies. It outranks the `Down` that all others have, so
/// all must learn of it before its sender can be down everywhere.
#[test]
fn a_burst_of_loss_heals_within_two_seconds_of_its_end() {
    let mut healed = Vec::new();
    let (mut believed, mut victims) = (0, 0);
    for seed in 0..30 {
        let (mut world, hosts) = mesh(Options::lan(500 + seed), &vec![spec(MEMORY); 64]);
        let before = generations(&world);
        world.strike(Fault::Loss(950_000));
        world.run_for(ms(1000));
        let dead = hosts[7 + 11 * (seed as usize % 5)];
        world.strike(Fault::Crash(dead));
        world.run_for(ms(2000));
        world.strike(Fault::Loss(50_000));
        world.run_for(ms(1));
        // What must heal: live nodes that are missing from views.
        let wrong = divergences(&world, &[dead]);
        let missed: BTreeSet<NodeId> = wrong.iter().flat_map(|view| view.missing.iter().copied()).collect();
        let beliefs: usize = wrong.iter().map(|view| view.missing.len()).sum();
        assert!(
            missed.len() >= 32 && beliefs >= 300,
            "seed {seed}: the burst is too weak: {} nodes missing from {beliefs} views",
            missed.len()
        );
        (believed, victims) = (believed + beliefs, victims + missed.len());
        let ended = world.now();
        let whole = world.run_while_not(ms(20_000), ms(20), |world| converged(world, &[dead]));
        assert!(whole, "seed {seed}: {:?}", divergences(&world, &[dead]).first());
        healed.push((world.now().since(ended), seed));
        let renewed = generations(&world).into_iter().filter(|(node, life)| before[node] != *life).count();
        assert_eq!(renewed, 0, "seed {seed}: no live node changes its identity");
        world.run_for(ms(3000));
        assert!(
            converged(&world, &[dead]),
            "seed {seed}: views stay equal: {:?}",
            divergences(&world, &[dead]).first()
        );
    }
    healed.sort();
    println!(
        "64 nodes, 95 % loss for 3 s, 30 times: {victims} live nodes reported down, missing from {believed} views; views are \
         equal after {:?} (median), {:?} (maximum)",
        healed[15].0, healed[29].0
    );
    assert!(healed[29].0 <= ms(2000), "time and seed: {:?}", &healed[20..]);
}

/// The newest known life of each node.
fn generations(world: &World) -> BTreeMap<NodeId, Generation> {
    let mut newest = BTreeMap::new();
    for member in world.hosts().filter_map(|host| host.node.as_ref()).flat_map(|node| node.members()) {
        let known = newest.entry(member.node).or_insert(member.generation);
        *known = member.generation.max(*known);
    }
    newest
}

/// Virtual time, so the result is the same on any machine.
#[test]
fn a_job_detects_a_dead_member_within_400_ms() {
    let mut noticed = Vec::new();
    for seed in 0..100 {
        let options = Options { loss_ppm: 10_000, ..Options::lan(seed) };
        let (mut world, _) = mesh(options, &vec![spec(MEMORY); 6]);
        let mut draw = chance(seed, "lease");
        let mut work = serve(&mut world);
        work.submit(&mut world, request(seed, 50, 400));
        run_for(&mut work, &mut world, Duration::from_micros(draw.random_range(500_000..900_000)));
        let victim = some_stage(&work, &world, draw.random_range(0..100));
        let killed = world.now();
        world.strike(Fault::Crash(victim));
        work.run(&mut world, ms(5_000), |work, _| !losses(work).is_empty());
        let lost =
            work.notes.iter().find(|told| matches!(told.event, Event::Lost { .. })).expect("its loss is reported");
        noticed.push(lost.at.since(killed));
    }
    noticed.sort();
    println!(
        "100 deaths of a stage at 1 % loss: the coordinator detects it after {:?} (median), {:?} (99th percentile)",
        noticed[49], noticed[98]
    );
    assert!(noticed[98] < ms(400), "{:?}", noticed[98]);
}

/// The lease is 340 ms and heartbeats are sent every 50 ms: a stall of 250 ms leaves 40 ms for the network.
#[test]
fn a_stall_of_250_ms_costs_no_job_a_stage() {
    let (mut world, _) = mesh(Options::lan(72), &vec![spec(MEMORY); 8]);
    let mut work = serve(&mut world);
    let epoch = work.epoch;
    for round in 0..60 {
        work.submit(&mut world, request(round, 50, 40));
        run_for(&mut work, &mut world, ms(211));
        let host = some_stage(&work, &world, round);
        world.strike(Fault::Pause { host, lasts: ms(250) });
        run_for(&mut work, &mut world, ms(600));
    }
    assert_answered(&mut work, &mut world, "stalls");
    assert!(losses(&work).is_empty() && work.epoch == epoch, "{:?}", losses(&work));
}

/// Its advert claims 8 GB; its executor rejects every stage.
#[test]
fn a_job_avoids_a_host_that_overstates_its_memory() {
    let mut specs = vec![spec(MEMORY); 6];
    specs[3] = spec(8 << 30);
    let (mut world, hosts) = mesh(Options::lan(73), &specs);
    world.host_mut(hosts[3]).executor.units[0].memory = 10 << 20;
    let mut work = serve(&mut world);
    assert!(
        !work.stages(&world).contains(&hosts[3]),
        "the misreporting host holds no stage: {:?}",
        work.stages(&world)
    );
    let tried = work.notes.iter().any(|told| match &told.event {
        Event::Rejected { from, what } => *from == Some(world.host(hosts[3]).node_id) && what.contains("cannot hold"),
        _ => false,
    });
    assert!(tried, "it was asked first: {:?}", work.notes);
    let placed = work.epoch;
    for n in 0..4 {
        work.submit(&mut world, request(n, 50, 40));
    }
    assert_answered(&mut work, &mut world, "overstated memory");
    assert_eq!(work.epoch, placed, "it was not asked again while requests ran");
}
