//! A generation continues through failures of nodes and network: the tokens are those of one undisturbed node, each
//! exactly once. Place and time of each fault are drawn from a seed; the client's view is printed.
use crate::client::{Solo, View, seed, solo, watch};
use crate::harness::Mesh;
use rustix::process::Signal;
use std::time::Duration;
use system_tests::relay::{Link, Plane, Random};

/// Tokens of one answer: a few seconds on one thread.
const TOKENS: u32 = 64;

/// Nodes behind a relay, each with room for `share` of the model; the first is the coordinator.
fn formed(solo: &Solo, nodes: usize, share: f64, seed: u64) -> Mesh {
    let mut mesh = Mesh::relayed(seed);
    for i in 0..nodes {
        mesh.start(&format!("n{i}"), Some(solo.memory(share)));
    }
    mesh.wait_members(nodes);
    mesh.deploy(0, &solo.model);
    mesh
}

/// Generates one answer on the coordinator and runs `fault` concurrently from token `moment` on. Checks that the tokens
/// are those of one undisturbed node.
fn answer_with_fault(mesh: &Mesh, solo: &Solo, what: &str, moment: usize, fault: impl FnOnce() + Send) -> View {
    let mut fault = Some(fault);
    let view = std::thread::scope(|scope| {
        watch(&mesh.nodes[0], &solo.model, TOKENS, |count| {
            if let Some(fault) = fault.take_if(|_| count == moment) {
                scope.spawn(fault);
            }
        })
    });
    eprintln!("{what} at token {moment}: {view}");
    assert_eq!(view.tokens, solo.tokens(TOKENS), "{what}");
    view
}

/// A random token with tokens before and after it.
fn moment(random: &mut Random) -> usize {
    4 + random.below(TOKENS as usize - 8)
}

#[test]
fn a_killed_stage_costs_no_token() {
    let Some(solo) = solo() else { return };
    let seed = seed("a_killed_stage_costs_no_token");
    let (mesh, mut random) = (formed(solo, 4, 0.8, seed), Random(seed));
    let relay = mesh.relay.as_ref().expect("a relay");
    for _ in 0..2 {
        let (held, before) = (mesh.remote_stages(0), relay.passed_in_all(Plane::Data));
        let victim = held[random.below(held.len())];
        answer_with_fault(&mesh, solo, &format!("SIGKILL of n{victim}"), moment(&mut random), || {
            mesh.nodes[victim].signal(Signal::KILL);
        });
        let moved = relay.passed_in_all(Plane::Data).bytes - before.bytes;
        eprintln!("  {:.1} MiB passed between the nodes during the answer", moved as f64 / f64::from(1 << 20));
    }
}

/// A paused node is replaced, learns that it was, and can be used again.
#[test]
fn a_paused_stage_comes_back_and_is_used_again() {
    let Some(solo) = solo() else { return };
    let seed = seed("a_paused_stage_comes_back_and_is_used_again");
    let (mesh, mut random) = (formed(solo, 3, 0.8, seed), Random(seed));
    let paused = mesh.remote_stages(0)[0];
    answer_with_fault(&mesh, solo, &format!("SIGSTOP of n{paused} for 2 s"), moment(&mut random), || {
        mesh.nodes[paused].signal(Signal::STOP);
        std::thread::sleep(Duration::from_secs(2));
        mesh.nodes[paused].signal(Signal::CONT);
    });
    mesh.wait_members(3);
    let held = mesh.remote_stages(0);
    if let Some(&other) = held.iter().find(|i| **i != paused) {
        // Now only the coordinator and the formerly paused node are left.
        answer_with_fault(&mesh, solo, &format!("SIGKILL of n{other}"), moment(&mut random), || {
            mesh.nodes[other].signal(Signal::KILL);
        });
    }
    assert_eq!(mesh.remote_stages(0), [paused]);
}

#[test]
fn a_network_that_fails_costs_no_token() {
    let Some(solo) = solo() else { return };
    let seed = seed("a_network_that_fails_costs_no_token");
    let (mesh, mut random) = (formed(solo, 3, 0.8, seed), Random(seed));
    let relay = mesh.relay.as_ref().expect("a relay");
    let cut_time = Duration::from_secs(3);

    let cut = mesh.remote_stages(0)[0];
    answer_with_fault(&mesh, solo, &format!("n{cut} cut off for 3 s"), moment(&mut random), || {
        relay.isolate(cut, true);
        std::thread::sleep(cut_time);
        relay.isolate(cut, false);
    });
    mesh.wait_members(3);

    let deaf = mesh.remote_stages(0)[0];
    answer_with_fault(&mesh, solo, &format!("nothing from n0 to n{deaf} for 3 s"), moment(&mut random), || {
        relay.cut(0, deaf, true);
        std::thread::sleep(cut_time);
        relay.cut(0, deaf, false);
    });
    mesh.wait_members(3);

    let mute = mesh.remote_stages(0)[0];
    answer_with_fault(&mesh, solo, &format!("nothing from n{mute} to n0 for 3 s"), moment(&mut random), || {
        relay.cut(mute, 0, true);
        std::thread::sleep(cut_time);
        relay.cut(mute, 0, false);
    });
    mesh.wait_members(3);
}

#[test]
fn a_poor_network_costs_no_token() {
    let Some(solo) = solo() else { return };
    let seed = seed("a_poor_network_costs_no_token");
    let (mesh, mut random) = (formed(solo, 3, 0.8, seed), Random(seed));
    let relay = mesh.relay.as_ref().expect("a relay");
    answer_with_fault(&mesh, solo, "nothing", 1, || {});

    relay.links(Link { latency: Duration::from_millis(20), loss: 0.02, ..Link::PLAIN });
    answer_with_fault(&mesh, solo, "2 % loss and 20 ms everywhere, from the start", 1, || {});
    relay.links(Link::PLAIN);

    let narrow = mesh.remote_stages(0)[0];
    answer_with_fault(&mesh, solo, &format!("1 Mbit/s from n0 to n{narrow}"), moment(&mut random), || {
        relay.link(0, narrow, Link { bytes_per_second: Some(125_000), ..Link::PLAIN });
    });
}

/// Three answers, each with one random fault on a random node at a random time.
#[test]
fn eight_nodes_survive_random_faults() {
    let Some(solo) = solo() else { return };
    let seed = seed("eight_nodes_survive_random_faults");
    let (mesh, mut random) = (formed(solo, 8, 0.45, seed), Random(seed));
    let relay = mesh.relay.as_ref().expect("a relay");
    for _ in 0..3 {
        let held = mesh.remote_stages(0);
        let (victim, moment) = (held[random.below(held.len())], moment(&mut random));
        let node = &mesh.nodes[victim];
        let time = Duration::from_millis(500 + 500 * random.below(6) as u64);
        let of = format!("of n{victim}, one of {} stages outside the coordinator", held.len());
        match random.below(4) {
            0 => answer_with_fault(&mesh, solo, &format!("SIGKILL {of}"), moment, || node.signal(Signal::KILL)),
            1 => answer_with_fault(&mesh, solo, &format!("SIGSTOP for {time:?} {of}"), moment, || {
                node.signal(Signal::STOP);
                std::thread::sleep(time);
                node.signal(Signal::CONT);
            }),
            2 => answer_with_fault(&mesh, solo, &format!("cut for {time:?} {of}"), moment, || {
                relay.isolate(victim, true);
                std::thread::sleep(time);
                relay.isolate(victim, false);
            }),
            _ => answer_with_fault(
                &mesh,
                solo,
                &format!("1 Mbit/s and 5 % loss from the coordinator for {time:?} {of}"),
                moment,
                || {
                    relay.link(0, victim, Link { bytes_per_second: Some(125_000), loss: 0.05, ..Link::PLAIN });
                    std::thread::sleep(time);
                    relay.link(0, victim, Link::PLAIN);
                },
            ),
        };
    }
}
