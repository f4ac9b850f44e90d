//! A generation goes on while its nodes or its network fail: the tokens of one undisturbed node, each once. Where and
//! when it strikes is drawn from a seed; what the client saw is printed.
use crate::client::{Solo, View, seed, solo, watch};
use crate::harness::Mesh;
use rustix::process::Signal;
use std::time::Duration;
use system_tests::relay::{Link, Plane, Random};

const JOIN_MAX: Duration = Duration::from_secs(20);
/// Tokens of one answer: some seconds on one thread.
const TOKENS: u32 = 64;

/// Nodes behind a relay, two of which are needed and enough for the model, which the first serves.
fn formed(solo: &Solo, nodes: usize, seed: u64) -> Mesh {
    let mut mesh = Mesh::relayed(seed);
    for i in 0..nodes {
        mesh.start(&format!("n{i}"), Some(solo.memory()));
    }
    mesh.wait_members(nodes, JOIN_MAX);
    mesh.deploy(0, &solo.model);
    mesh
}

/// Where the stages are that the head does not compute itself.
fn stages(mesh: &Mesh) -> Vec<usize> {
    let state = mesh.nodes[0].get("/api/v1/state").expect("a state");
    let stages = state["jobs"][0]["stages"].as_array().cloned().unwrap_or_default();
    let holds = |i: &usize| stages.iter().any(|s| s["name"] == mesh.nodes[*i].name.as_str());
    let found: Vec<usize> = (1..mesh.nodes.len()).filter(holds).collect();
    assert!(!found.is_empty(), "the job uses no node but the head: {state}");
    found
}

/// One answer of the head, and `fault` beside it from token `moment` on. The answer is that of one undisturbed node.
fn struck(mesh: &Mesh, solo: &Solo, what: &str, moment: usize, fault: impl FnOnce() + Send) -> View {
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

/// A moment with tokens before and after it.
fn moment(random: &mut Random) -> usize {
    4 + random.below(TOKENS as usize - 8)
}

#[test]
fn a_killed_stage_costs_no_token() {
    let Some(solo) = solo() else { return };
    let seed = seed("a_killed_stage_costs_no_token");
    let (mesh, mut random) = (formed(solo, 4, seed), Random(seed));
    let relay = mesh.relay.as_ref().expect("a relay");
    for _ in 0..2 {
        let (held, before) = (stages(&mesh), relay.passed_in_all(Plane::Data));
        let victim = held[random.below(held.len())];
        struck(&mesh, solo, &format!("SIGKILL of n{victim}"), moment(&mut random), || {
            mesh.nodes[victim].signal(Signal::KILL);
        });
        let moved = relay.passed_in_all(Plane::Data).bytes - before.bytes;
        eprintln!("  {:.1} MiB passed between the nodes meanwhile", moved as f64 / f64::from(1 << 20));
    }
}

/// A node that stood still is replaced, finds out that it was, and is good for the next work.
#[test]
fn a_paused_stage_comes_back_and_is_used_again() {
    let Some(solo) = solo() else { return };
    let seed = seed("a_paused_stage_comes_back_and_is_used_again");
    let (mesh, mut random) = (formed(solo, 3, seed), Random(seed));
    let paused = stages(&mesh)[0];
    struck(&mesh, solo, &format!("SIGSTOP of n{paused} for 2 s"), moment(&mut random), || {
        mesh.nodes[paused].signal(Signal::STOP);
        std::thread::sleep(Duration::from_secs(2));
        mesh.nodes[paused].signal(Signal::CONT);
    });
    mesh.wait_members(3, JOIN_MAX);
    let held = stages(&mesh);
    if let Some(&other) = held.iter().find(|i| **i != paused) {
        // Now only the head and the node that was paused are left.
        struck(&mesh, solo, &format!("SIGKILL of n{other}"), moment(&mut random), || {
            mesh.nodes[other].signal(Signal::KILL);
        });
    }
    assert_eq!(stages(&mesh), [paused]);
}

#[test]
fn a_network_that_fails_costs_no_token() {
    let Some(solo) = solo() else { return };
    let seed = seed("a_network_that_fails_costs_no_token");
    let (mesh, mut random) = (formed(solo, 3, seed), Random(seed));
    let relay = mesh.relay.as_ref().expect("a relay");
    let cut_time = Duration::from_secs(3);

    let cut = stages(&mesh)[0];
    struck(&mesh, solo, &format!("n{cut} cut off for 3 s"), moment(&mut random), || {
        relay.isolate(cut, true);
        std::thread::sleep(cut_time);
        relay.isolate(cut, false);
    });
    mesh.wait_members(3, JOIN_MAX);

    let deaf = stages(&mesh)[0];
    struck(&mesh, solo, &format!("nothing from n0 to n{deaf} for 3 s"), moment(&mut random), || {
        relay.cut(0, deaf, true);
        std::thread::sleep(cut_time);
        relay.cut(0, deaf, false);
    });
    mesh.wait_members(3, JOIN_MAX);

    let mute = stages(&mesh)[0];
    struck(&mesh, solo, &format!("nothing from n{mute} to n0 for 3 s"), moment(&mut random), || {
        relay.cut(mute, 0, true);
        std::thread::sleep(cut_time);
        relay.cut(mute, 0, false);
    });
    mesh.wait_members(3, JOIN_MAX);
}

#[test]
fn a_poor_network_costs_no_token() {
    let Some(solo) = solo() else { return };
    let seed = seed("a_poor_network_costs_no_token");
    let (mesh, mut random) = (formed(solo, 3, seed), Random(seed));
    let relay = mesh.relay.as_ref().expect("a relay");
    struck(&mesh, solo, "nothing", 1, || {});

    relay.links(Link { latency: Duration::from_millis(20), loss: 0.02, ..Link::PLAIN });
    struck(&mesh, solo, "2 % loss and 20 ms everywhere, from the start", 1, || {});
    relay.links(Link::PLAIN);

    let narrow = stages(&mesh)[0];
    struck(&mesh, solo, &format!("1 Mbit/s from n0 to n{narrow}"), moment(&mut random), || {
        relay.link(0, narrow, Link { bytes_per_second: Some(125_000), ..Link::PLAIN });
    });
}
