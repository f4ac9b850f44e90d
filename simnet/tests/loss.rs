//! Who lives is not taken for dead, whatever the network loses; who dies is missed at once all the same.
use node_core::id::{Generation, NodeId};
use node_core::output::Event;
use node_core::time::{Duration, Instant};
use simnet::checker::membership::{converged, divergences};
use simnet::{Fault, HostId, HostSpec, Options, World};
use std::collections::BTreeMap;

/// `n` members that know each other, on a network that loses `loss_ppm` datagrams of a million.
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
    world.take_told();
    world.strike(Fault::Loss(loss_ppm));
    (world, hosts)
}

/// What went wrong in a time in which nobody died.
#[derive(Default, Debug)]
struct Wrong {
    /// Times a living node was taken for dead by somebody, however many believed it.
    deaths: usize,
    /// Nodes that somebody took for dead, summed over who believed it.
    believed: usize,
    /// Identities given up.
    renewals: u64,
    /// Longest time from the first to believe a false death to one view of all.
    healed_ms: u128,
}

/// Lets time pass in which nobody dies and counts who was taken for dead.
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
    let told = world.take_told().into_iter();
    told.filter_map(|told| match told.event {
        Event::PeerDown { node, .. } => Some((told.at, node)),
        _ => None,
    })
    .collect()
}

/// The newest life of each node that anybody knows.
fn generations(world: &World) -> BTreeMap<NodeId, Generation> {
    let mut newest = BTreeMap::new();
    for member in world.hosts().filter_map(|host| host.node.as_ref()).flat_map(|node| node.members()) {
        let known = newest.entry(member.node).or_insert(member.generation);
        *known = member.generation.max(*known);
    }
    newest
}

/// More at will: `MESHNODE_MINUTES=600 cargo test --release -p simnet --test loss -- --nocapture`.
fn minutes(usual: u64) -> u64 {
    std::env::var("MESHNODE_MINUTES").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

#[test]
fn a_refuted_suspicion_costs_nobody_its_identity() {
    let (mut world, _) = mesh(21, 64, 50_000);
    let began = std::time::Instant::now();
    let minutes = minutes(5);
    let wrong = watch(&mut world, Duration::from_secs(60 * minutes));
    println!("64 nodes, 5 % loss, {minutes} virtual minutes in {:.1?}: {wrong:?}", began.elapsed());
    assert_eq!(wrong.renewals, 0, "{wrong:?}");
    assert_eq!(wrong.deaths, 0, "{wrong:?}");
}
