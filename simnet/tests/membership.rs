//! Membership at scale: joins, crashes, partitions that heal, and reproducible runs.
#![expect(clippy::disallowed_methods, reason = "measures how fast the simulator itself runs")]
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
#![expect(clippy::wildcard_enum_match_arm, reason = "a test handles few of many events")]
use node_core::codec;
use node_core::output::{Event, Output};
use node_core::time::{Duration, Instant};
use simnet::checker::membership::{converged, divergences, informed};
use simnet::{Fault, HostId, HostSpec, Observer, Options, World, faults};
use std::cell::RefCell;
use std::rc::Rc;

/// `n` nodes that all know the first one's address.
fn mesh(options: Options, n: usize) -> (World, Vec<HostId>) {
    let mut world = World::new(options);
    let hosts = world.add_hosts(n, &HostSpec::default());
    for &host in &hosts {
        world.start(host);
    }
    for &host in &hosts[1..] {
        world.introduce(host, hosts[0]);
    }
    (world, hosts)
}

fn converge(world: &mut World, limit_s: u64, gone: &[HostId], what: &str) -> Instant {
    let step = Duration::from_millis(100);
    let reached = world.run_while_not(Duration::from_secs(limit_s), step, |world| converged(world, gone));
    let wrong = divergences(world, gone);
    assert!(reached, "{what}: {} views differ after {limit_s} s, the first: {:?}", wrong.len(), wrong.first());
    world.now()
}

#[test]
fn a_hundred_join_and_ten_die() {
    let began = std::time::Instant::now();
    let (mut world, hosts) = mesh(Options::lan(1), 100);
    let joined = converge(&mut world, 20, &[], "100 join");
    assert!(world.run_while_not(Duration::from_secs(20), Duration::from_millis(100), |w| informed(w, &[])), "adverts");
    let informed_at = world.now();
    world.run_until(Instant(20_000_000_000).max(informed_at));
    let died_at = world.now();
    for &host in &hosts[40..50] {
        world.strike(Fault::Crash(host));
    }
    world.run_for(Duration::from_millis(100));
    let noticed = converge(&mut world, 10, &[], "10 die");
    world.run_until(Instant(60_000_000_000));
    assert!(converged(&world, &[]), "views stay as they are: {:?}", divergences(&world, &[]).first());
    let real = began.elapsed();
    println!(
        "100 nodes: all joined after {:?}, informed after {:?}, 10 deaths known to all after {:?}; \
         60 virtual seconds in {real:.2?} = {:.1} times real time, {} events, trace {}",
        joined.since(Instant(0)),
        informed_at.since(Instant(0)),
        noticed.since(died_at),
        60.0 / real.as_secs_f64(),
        world.trace().events(),
        world.trace().hash(),
    );
}

/// 200 nodes by default; the full size: `MESHNODE_NODES=1000 cargo test --release -p simnet --test membership thousand --
/// --nocapture`.
#[test]
fn a_thousand_nodes_detect_ten_deaths_faster_than_real_time() {
    let n: usize = std::env::var("MESHNODE_NODES").ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    let began = std::time::Instant::now();
    let (mut world, hosts) = mesh(Options::lan(6), n);
    let joined = converge(&mut world, 60, &[], "all join");
    world.run_for(Duration::from_secs(20)); // initial adverts and push-pulls
    let bootstrapped = began.elapsed();
    let (began, from, events) = (std::time::Instant::now(), world.now(), world.trace().events());
    let tenth = n / 11;
    let dead: Vec<HostId> = (1..=10).map(|i| hosts[i * tenth]).collect();
    dead.iter().for_each(|&host| world.strike(Fault::Crash(host)));
    world.run_for(Duration::from_millis(100));
    let noticed = converge(&mut world, 20, &[], "10 die");
    world.run_until(from + Duration::from_secs(60));
    assert!(converged(&world, &[]), "views stay as they are: {:?}", divergences(&world, &[]).first());
    let real = began.elapsed();
    println!(
        "{n} nodes: all joined after {:?} (bootstrapped in {bootstrapped:.1?}), 10 deaths known to all after {:?}; \
         60 virtual seconds in {real:.2?}, {} events",
        joined.since(Instant(0)),
        noticed.since(from),
        world.trace().events() - events,
    );
}

/// Bytes that hosts send, with the seal and the UDP and IP headers, and the number of suspicions.
#[derive(Clone, Default)]
struct Traffic(Rc<RefCell<(u64, u64)>>);

impl Observer for Traffic {
    fn output(&mut self, _at: Instant, _host: HostId, output: &Output) {
        let mut seen = self.0.borrow_mut();
        match output {
            Output::SendDatagram { bytes, .. } => {
                seen.0 += bytes.len() as u64 + SEAL_AND_HEADERS;
                seen.1 += u64::from(matches!(codec::decode_datagram(bytes), Ok(codec::Datagram::Suspected { .. })));
            }
            Output::SendMessage { bytes, .. } => seen.0 += bytes.len() as u64,
            _ => {}
        }
    }
}

const SEAL_AND_HEADERS: u64 = 49 + 28;

/// Hosts in two regions with this round trip between them, `far` of them in the second.
fn regions(round_trip_ms: u64, near: usize, far: usize) -> (World, Vec<HostId>) {
    let options =
        Options { latency_per_region: Duration::from_micros(round_trip_ms * 500), ..Options::lan(round_trip_ms) };
    let mut world = World::new(options);
    let region = |n: usize| u32::from(n >= near);
    let add = |n: usize| world.add_host(HostSpec { region: region(n), ..HostSpec::default() });
    let hosts: Vec<HostId> = (0..near + far).map(add).collect();
    hosts.iter().for_each(|&host| world.start(host));
    hosts[1..].iter().for_each(|&host| world.introduce(host, hosts[0]));
    converge(&mut world, 60, &[], "two regions");
    assert!(world.run_while_not(Duration::from_secs(30), Duration::from_millis(100), |w| informed(w, &[])), "adverts");
    world.run_for(Duration::from_secs(20));
    (world, hosts)
}

/// Crashes a host. Returns when the first live host, and when all of them, have detected it.
fn death(world: &mut World, host: HostId) -> (Duration, Duration) {
    world.take_notifications();
    let died = world.now();
    let node = world.host(host).node_id;
    world.strike(Fault::Crash(host));
    world.run_for(Duration::from_millis(100));
    let all = converge(world, 20, &[], "a death").since(died);
    let down = |told: &simnet::Notification| matches!(told.event, Event::PeerDown { node: down, .. } if down == node);
    let first = world.take_notifications().into_iter().find(down).expect("a host reports it");
    (first.at.since(died), all)
}

#[test]
fn distant_regions_cause_no_suspicions() {
    for round_trip_ms in [0, 100, 200, 300] {
        let (mut world, hosts) = regions(round_trip_ms, 16, 16);
        let traffic = Traffic::default();
        world.observe(Box::new(traffic.clone()));
        world.take_notifications();
        world.run_for(Duration::from_secs(30));
        let (bytes, suspicions) = *traffic.0.borrow();
        let bytes_per_second = bytes / 30 / hosts.len() as u64;
        let (first, all) = death(&mut world, hosts[20]);
        println!(
            "32 nodes, two regions, round trip {round_trip_ms} ms: {bytes_per_second} B/s per node, {suspicions} suspicions in \
             30 s; a death is detected first after {first:?}, by all after {all:?}"
        );
        assert_eq!(suspicions, 0, "round trip {round_trip_ms} ms: no false suspicion");
        assert!(bytes_per_second <= 6000, "round trip {round_trip_ms} ms: {bytes_per_second} B/s per node");
        // Hosts in its region detect it as fast as in one region; the news takes half a round trip.
        assert!(first <= Duration::from_millis(1000), "round trip {round_trip_ms} ms: {first:?}");
        let bound = Duration::from_millis(1500 + round_trip_ms);
        assert!(all <= bound, "round trip {round_trip_ms} ms: {all:?}, expected within {bound:?}");
    }
}

/// A member that only distant ones can probe: a direct answer, an indirect one and a refutation take two round trips each.
#[test]
fn a_single_distant_member_is_detected_within_six_round_trips_and_a_second() {
    for round_trip_ms in [100, 200, 300] {
        let (mut world, hosts) = regions(round_trip_ms, 8, 1);
        let (first, all) = death(&mut world, hosts[8]);
        println!("one node {round_trip_ms} ms away from eight: detected after {first:?}, by all after {all:?}");
        let bound = Duration::from_millis(1000 + 6 * round_trip_ms);
        assert!(first <= bound, "round trip {round_trip_ms} ms: {first:?}, expected within {bound:?}");
    }
}

#[test]
fn two_partitions_heal() {
    let (mut world, hosts) = mesh(Options::lan(2), 40);
    converge(&mut world, 20, &[], "40 join");
    let (left, right) = hosts.split_at(17);
    world.strike(Fault::Partition { from: left.to_vec(), to: right.to_vec(), both: true });
    world.run_for(Duration::from_secs(15));
    let alive =
        |host: HostId, world: &World| world.host(host).node.as_ref().map(|node| node.membership().alive().count());
    assert_eq!(alive(left[3], &world), Some(left.len() - 1), "the left half knows only itself");
    assert_eq!(alive(right[3], &world), Some(right.len() - 1), "the right half knows only itself");
    world.strike(Fault::Heal);
    let healed_at = world.now();
    world.run_for(Duration::from_millis(100));
    let whole = converge(&mut world, 60, &[], "two halves heal");
    world.run_for(Duration::from_secs(10));
    assert!(converged(&world, &[]), "and stay healed: {:?}", divergences(&world, &[]).first());
    println!("40 nodes, 17 and 23 apart for 15 s: whole again {:?} after the cut ended", whole.since(healed_at));
}

#[test]
fn the_same_seed_runs_the_same() {
    let run = |seed: u64| {
        let (mut world, hosts) = mesh(Options::swarm(seed), 12);
        world.run_for(Duration::from_secs(3));
        world.strike(Fault::Crash(hosts[5]));
        world.strike(Fault::Pause { host: hosts[7], lasts: Duration::from_millis(700) });
        world.run_for(Duration::from_secs(5));
        world.strike(Fault::Restart { host: hosts[5], keep_disk: true });
        world.run_for(Duration::from_secs(5));
        (world.trace().hash(), world.trace().events())
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7).0, run(8).0);
}

#[test]
fn a_restarted_node_rejoins_without_a_ghost_member() {
    for keep_disk in [true, false] {
        let (mut world, hosts) = mesh(Options::lan(3), 8);
        converge(&mut world, 20, &[], "8 join");
        world.run_for(Duration::from_secs(10));
        world.strike(Fault::Crash(hosts[4]));
        world.run_for(Duration::from_secs(3));
        assert!(converged(&world, &[]), "the death is known");
        world.strike(Fault::Restart { host: hosts[4], keep_disk });
        world.run_for(Duration::from_millis(10));
        if !keep_disk {
            world.introduce(hosts[4], hosts[2]);
        }
        converge(&mut world, 15, &[], "the restarted node is a member again");
        assert!(world.run_while_not(Duration::from_secs(10), Duration::from_millis(100), |w| informed(w, &[])));
    }
}

/// A pause (SIGSTOP, a laptop lid) longer than the failure timeout, and longer than the time after which dead members are
/// forgotten.
#[test]
fn a_paused_node_rejoins_by_itself() {
    for seconds in [2, 90, 20 * 60] {
        let (mut world, hosts) = mesh(Options::lan(7), 8);
        converge(&mut world, 20, &[], "8 join");
        world.run_for(Duration::from_secs(5));
        world.take_notifications();
        world.strike(Fault::Pause { host: hosts[3], lasts: Duration::from_secs(seconds) });
        world.run_for(Duration::from_secs(seconds));
        let woke = converge(&mut world, 30, &[], "it wakes");
        assert!(world.run_while_not(Duration::from_secs(40), Duration::from_millis(100), |w| informed(w, &[])));
        let sleeper = world.host(hosts[3]).node_id;
        let others = world.take_notifications().into_iter().filter(|told| told.host != hosts[3]);
        let wrong = others.filter(|told| match told.event {
            node_core::output::Event::PeerDown { node, .. } => node != sleeper,
            _ => false,
        });
        assert_eq!(wrong.count(), 0, "no other node is reported down");
        println!("8 nodes, one paused for {seconds} s: views are equal {:?} after it resumed", woke.since(Instant(0)));
    }
}

/// Both halves have forgotten each other as members, but not their addresses.
#[test]
fn halves_that_forgot_each_other_rejoin() {
    let (mut world, hosts) = mesh(Options::lan(8), 12);
    converge(&mut world, 20, &[], "12 join");
    world.run_for(Duration::from_secs(5));
    let (left, right) = hosts.split_at(5);
    world.strike(Fault::Partition { from: left.to_vec(), to: right.to_vec(), both: true });
    world.run_for(Duration::from_secs(20 * 60));
    let members = |host: HostId, world: &World| world.host(host).node.as_ref().map(|node| node.members().count());
    assert_eq!(
        (members(left[1], &world), members(right[1], &world)),
        (Some(4), Some(6)),
        "the other half is forgotten"
    );
    world.strike(Fault::Heal);
    let healed = world.now();
    world.run_for(Duration::from_millis(1));
    let whole = converge(&mut world, 60, &[], "the halves meet");
    println!("12 nodes, 5 and 7 apart for 20 minutes: whole again after {:?}", whole.since(healed));
}

#[test]
fn a_leave_spreads_at_once() {
    let (mut world, hosts) = mesh(Options::lan(4), 30);
    converge(&mut world, 20, &[], "30 join");
    world.run_for(Duration::from_secs(5));
    world.take_notifications();
    world.strike(Fault::Leave(hosts[9]));
    world.run_for(Duration::from_millis(20));
    assert!(converged(&world, &[hosts[9]]), "{:?}", divergences(&world, &[hosts[9]]).first());
    let left = world.take_notifications().into_iter().filter(|told| {
        matches!(told.event, node_core::output::Event::PeerDown { reason: node_core::work::DownReason::Left, .. })
    });
    // A member that learns of it from another one first cannot distinguish a leave from a crash.
    let aware = left.count();
    assert!((27..=29).contains(&aware), "{aware} of 29 know that it left");
}

#[test]
fn short_stalls_cause_no_false_deaths() {
    let (mut world, hosts) = mesh(Options::lan(5), 16);
    converge(&mut world, 20, &[], "16 join");
    world.run_for(Duration::from_secs(2));
    world.take_notifications();
    for round in 0..40 {
        world.strike(Fault::Pause { host: hosts[round % 16], lasts: Duration::from_millis(250) });
        world.run_for(Duration::from_millis(500));
    }
    let downs: Vec<_> = world
        .take_notifications()
        .into_iter()
        .filter(|told| matches!(told.event, node_core::output::Event::PeerDown { .. }))
        .collect();
    assert!(downs.is_empty(), "a stall of 250 ms is no death: {:?}", downs.first());
}

/// Safety: no panic. Liveness: all views are equal after the last fault.
#[test]
fn random_faults_end_in_one_view() {
    // More seeds: `MESHNODE_SEEDS=2000 cargo test --release -p simnet random_faults_end`.
    let seeds = std::env::var("MESHNODE_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(40);
    let mut slowest = (Duration::ZERO, 0);
    for seed in 0..seeds {
        let (mut world, hosts) = mesh(Options::swarm(seed), 8);
        world.run_for(Duration::from_secs(5));
        let schedule = faults::swarm(seed, &hosts, world.now(), Duration::from_secs(20));
        world.schedule(schedule.clone());
        world.run_for(Duration::from_secs(20));
        world.schedule(faults::mend(&hosts, world.now()));
        world.run_for(Duration::from_millis(1));
        for &host in &hosts[1..] {
            world.introduce(host, hosts[0]); // discovery always finds the first host
        }
        let mended = world.now();
        let reached =
            world.run_while_not(Duration::from_secs(60), Duration::from_millis(100), |world| converged(world, &[]));
        let wrong = divergences(&world, &[]);
        assert!(reached, "seed {seed}: {:?}\n{:?}\n{schedule:#?}", world.options(), wrong);
        slowest = slowest.max((world.now().since(mended), seed));
    }
    println!(
        "{seeds} random schedules, all views equal at most {:?} after the last fault (seed {})",
        slowest.0, slowest.1
    );
}
