//! Failure detection under packet loss: no live node is reported down, and crashes are still detected quickly.
#![expect(clippy::disallowed_methods, reason = "measures how fast the simulator itself runs")]
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
#![expect(clippy::wildcard_enum_match_arm, reason = "a test handles few of many events")]
use node_core::id::{Generation, NodeId};
use node_core::output::Event;
use node_core::time::{Duration, Instant};
use simnet::checker::membership::{converged, divergences};
use simnet::{Fault, HostId, HostSpec, Options, World};
use std::collections::BTreeMap;

/// `n` members that have joined, on a network that loses `loss_ppm` datagrams of a million.
fn mesh(seed: u64, n: usize, loss_ppm: u32) -> (World, Vec<HostId>) {
    let mut world = World::new(Options::lan(seed));
    let hosts = world.add_hosts(n, &HostSpec::default());
    for &host in &hosts {
        world.start(host);
    }
    for &host in &hosts[1..] {
        world.introduce(host, hosts[0]);
    }
    world.run_for(Duration::from_secs(10));
    assert!(converged(&world, &[]), "{n} join: {:?}", divergences(&world, &[]).first());
    world.take_notifications();
    world.strike(Fault::Loss(loss_ppm));
    (world, hosts)
}

/// False positives in a period without crashes.
#[derive(Default, Debug)]
struct Wrong {
    /// Live nodes reported down; reports by several nodes count once.
    deaths: usize,
    /// Reports that a live node is down.
    believed: usize,
    /// Generations that live nodes started.
    renewals: u64,
    /// Longest time from the first false report to equal views.
    healed_ms: u128,
}

/// Runs without crashes, and counts false positives.
fn watch(world: &mut World, time: Duration) -> Wrong {
    let before = generations(world);
    let mut wrong = Wrong::default();
    let end = world.now() + time;
    while world.now() < end {
        world.run_for(Duration::from_millis(100));
        let downs: Vec<_> = downs(world);
        let Some(first) = downs.iter().map(|(at, _)| *at).min() else { continue };
        let healed = world.run_while_not(Duration::from_secs(20), Duration::from_millis(20), |w| converged(w, &[]));
        assert!(healed, "a false death heals: {:?}", divergences(world, &[]).first());
        wrong.healed_ms = wrong.healed_ms.max(world.now().since(first).as_millis());
        let more = self::downs(world);
        let all: Vec<_> = downs.into_iter().chain(more).collect();
        let victims: std::collections::BTreeSet<NodeId> = all.iter().map(|(_, node)| *node).collect();
        wrong.deaths += victims.len();
        wrong.believed += all.len();
    }
    let after = generations(world);
    wrong.renewals = after.iter().map(|(node, generation)| generation.0 - before[node].0).sum();
    wrong
}

fn downs(world: &mut World) -> Vec<(Instant, NodeId)> {
    let told = world.take_notifications().into_iter();
    told.filter_map(|told| match told.event {
        Event::PeerDown { node, .. } => Some((told.at, node)),
        _ => None,
    })
    .collect()
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

/// Longer runs and other seeds: `MESHNODE_MINUTES=600 MESHNODE_SEED=7 cargo test --release -p simnet --test loss --
/// --nocapture`.
fn minutes(usual: u64) -> u64 {
    env_number("MESHNODE_MINUTES").unwrap_or(usual)
}

fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|n| n.parse().ok())
}

fn quiet(seed: u64, loss_ppm: u32, usual_minutes: u64) -> Wrong {
    let (mut world, _) = mesh(env_number("MESHNODE_SEED").unwrap_or(seed), 64, loss_ppm);
    let began = std::time::Instant::now();
    let minutes = minutes(usual_minutes);
    let wrong = watch(&mut world, Duration::from_secs(60 * minutes));
    let percent = loss_ppm / 10_000;
    println!("64 nodes, {percent} % loss, {minutes} virtual minutes in {:.1?}: {wrong:?}", began.elapsed());
    wrong
}

#[test]
fn one_percent_loss_causes_no_false_deaths() {
    let wrong = quiet(22, 10_000, 3);
    assert_eq!((wrong.deaths, wrong.believed, wrong.renewals), (0, 0, 0), "{wrong:?}");
}

/// At 5 % loss one false death per node and day is allowed, here one in 22 minutes; a change of identity is not.
#[test]
fn a_refuted_suspicion_changes_no_identity() {
    let wrong = quiet(21, 50_000, 3);
    let days = minutes(3) as usize * 64 / (24 * 60);
    assert!(wrong.deaths <= days && wrong.healed_ms < 2000, "{wrong:?}");
    assert_eq!(wrong.renewals, 0, "{wrong:?}");
}

/// A node that receives nothing reports all others down, while they still reach each other.
#[test]
fn a_deaf_node_causes_no_other_deaths() {
    let (mut world, hosts) = mesh(51, 64, 10_000);
    let before = generations(&world);
    let deaf = hosts[9];
    let node = world.host(deaf).node_id;
    let others: Vec<HostId> = hosts.iter().copied().filter(|host| *host != deaf).collect();
    world.strike(Fault::Partition { from: others, to: vec![deaf], both: false });
    world.run_for(Duration::from_secs(30));
    let told = world.take_notifications().into_iter().filter(|told| told.host != deaf);
    let downs: Vec<_> = told.filter(|told| matches!(told.event, Event::PeerDown { .. })).collect();
    let wrong = downs.iter().find(|told| matches!(told.event, Event::PeerDown { node: down, .. } if down != node));
    assert!(wrong.is_none(), "the other nodes report no further node down: {wrong:?}");
    assert!(downs.len() >= 63, "all others report it down");
    world.strike(Fault::Heal);
    let healed_at = world.now();
    let healed = world.run_while_not(Duration::from_secs(20), Duration::from_millis(50), |w| converged(w, &[]));
    assert!(healed, "{:?}", divergences(&world, &[]).first());
    println!(
        "64 nodes, one of them deaf for 30 s: views are equal {:?} after it received again",
        world.now().since(healed_at)
    );
    assert_eq!(generations(&world), before, "no node changed its identity");
}

/// Detection times of crashes: by the first live node, and by the last.
struct Detection {
    first: Vec<Duration>,
    last: Vec<Duration>,
}

fn detect(seed: u64, loss_ppm: u32, deaths: usize) -> Detection {
    let (mut world, hosts) = mesh(seed, 64, loss_ppm);
    let mut detection = Detection { first: Vec::new(), last: Vec::new() };
    for death in 0..deaths {
        // Any phase of the nodes' probes, not always the same one.
        world.run_for(Duration::from_millis(137 + 61 * (death as u64 % 7)));
        world.take_notifications();
        let host = hosts[1 + death * 7 % 63];
        let node = world.host(host).node_id;
        let died = world.now();
        world.strike(Fault::Crash(host));
        let mut told = Vec::new();
        while told.len() < 63 && world.now().since(died) < Duration::from_secs(10) {
            world.run_for(Duration::from_millis(10));
            told.extend(downs(&mut world));
        }
        assert!(converged(&world, &[]), "death {death} is known: {:?}", divergences(&world, &[]).first());
        assert!(told.iter().all(|(_, down)| *down == node), "no other node is reported down: {told:?}");
        detection.first.extend(told.first().map(|(at, _)| at.since(died)));
        detection.last.extend(told.last().map(|(at, _)| at.since(died)));
        world.strike(Fault::Restart { host, keep_disk: false });
        world.run_for(Duration::from_millis(1));
        world.introduce(host, hosts[0]);
        assert!(world.run_while_not(Duration::from_secs(20), Duration::from_millis(100), |w| converged(w, &[])));
    }
    assert_eq!(detection.first.len(), deaths, "each death was reported");
    detection.first.sort();
    detection.last.sort();
    detection
}

fn of_100(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() * percent).div_ceil(100) - 1]
}

#[test]
fn deaths_are_detected_within_a_second() {
    for (loss_ppm, deaths, most_first, most_last) in
        [(0, 20, 1000, 1500), (10_000, 100, 1000, 1500), (50_000, 20, 2000, 3000)]
    {
        let Detection { first, last } = detect(31, loss_ppm, deaths);
        println!(
            "64 nodes, {} % loss, {deaths} deaths: first detected after {:?} (median), {:?} (99th percentile), \
             by all after {:?}, {:?}",
            loss_ppm / 10_000,
            of_100(&first, 50),
            of_100(&first, 99),
            of_100(&last, 50),
            of_100(&last, 99),
        );
        assert!(of_100(&first, 99) < Duration::from_millis(most_first), "{:?}", first.last());
        assert!(of_100(&last, 99) < Duration::from_millis(most_last), "{:?}", last.last());
    }
}

#[test]
fn a_host_cut_off_for_250_ms_causes_no_false_deaths() {
    let (mut world, hosts) = mesh(41, 64, 10_000);
    for round in 0..120 {
        let one = hosts[round * 5 % 64];
        let others: Vec<HostId> = hosts.iter().copied().filter(|host| *host != one).collect();
        world.strike(Fault::Partition { from: vec![one], to: others, both: true });
        world.run_for(Duration::from_millis(250));
        world.strike(Fault::Heal);
        world.run_for(Duration::from_millis(600));
    }
    let downs = downs(&mut world);
    println!("120 hosts cut off for 250 ms: {} false reports", downs.len());
    assert!(downs.is_empty(), "{:?}", downs.first());
}

#[test]
fn a_stall_of_250_ms_causes_no_false_deaths() {
    let (mut world, hosts) = mesh(42, 64, 10_000);
    for round in 0..120 {
        world.strike(Fault::Pause { host: hosts[round * 5 % 64], lasts: Duration::from_millis(250) });
        world.run_for(Duration::from_millis(600));
    }
    let downs = downs(&mut world);
    println!("120 stalls of 250 ms: {} false reports", downs.len());
    assert!(downs.is_empty(), "{:?}", downs.first());
}
