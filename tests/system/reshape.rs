//! Rebalance under load: a node that joins replaces a distant one. No request fails, no token differs, and the moved
//! bytes are those that `plan` predicted.
use crate::client::{Solo, solo, watch};
use crate::harness::{JOIN_MAX, Mesh, deploy};
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use system_tests::relay::Link;

/// Three placement reviews at intervals of five seconds, and the time to fetch and load weights during a generation.
const MOVE_MAX: Duration = Duration::from_secs(90);
/// Tokens of each answer.
const TOKENS: u32 = 24;

/// A coordinator and a node 30 ms away serve the model, which needs both.
fn far(solo: &Solo) -> Mesh {
    let mut mesh = Mesh::relayed(7);
    let memory = Some(solo.memory(0.8));
    mesh.start("coordinator", memory);
    mesh.start("far", memory);
    mesh.wait_members(2);
    let relay = mesh.relay.as_ref().expect("a relay");
    for (from, to) in [(0, 1), (1, 0)] {
        relay.link(from, to, Link { latency: Duration::from_millis(30), ..Link::PLAIN });
    }
    // A link is measured when its connection is established.
    mesh.nodes[1].kill();
    mesh.nodes[0].wait_members(1, JOIN_MAX).expect("the killed node is gone");
    mesh.restart(1);
    mesh.wait_members(2);
    let far =
        |state: &Value| state["peers"].as_array().is_some_and(|p| p.iter().any(|p| p["rtt_ms"].as_f64() > Some(50.0)));
    mesh.nodes[0].wait_state(JOIN_MAX, far).expect("the round trip is measured");
    mesh.deploy(0, &solo.model);
    mesh
}

#[test]
fn a_node_that_joins_under_load_replaces_a_distant_one() {
    let Some(solo) = solo() else { return };
    let mut mesh = far(solo);
    assert_eq!(mesh.remote_stages(0), [1], "both nodes are needed");
    let ended = AtomicBool::new(false);
    mesh.start("near", Some(solo.memory(0.8)));
    let (answers, planned, job) = std::thread::scope(|scope| {
        let answers = scope.spawn(|| {
            let mut answers = 0;
            while !ended.load(Ordering::Relaxed) {
                let view = watch(&mesh.nodes[0], &solo.model, TOKENS, |_| {});
                assert_eq!(view.tokens, solo.tokens(TOKENS), "answer {answers}");
                answers += 1;
            }
            answers
        });
        let start = Instant::now();
        let mut planned = Vec::new();
        let job = loop {
            assert!(start.elapsed() < MOVE_MAX, "the stage has not moved:\n{}", mesh.nodes[0].log());
            let state = mesh.nodes[0].get("/api/v1/state").expect("a state");
            let job = state["jobs"][0].clone();
            if job["moved"].is_object() && job["state"] == "ready" {
                break job;
            }
            if let Ok(plan) = mesh.nodes[0].post("/api/v1/plan", &deploy(&solo.model)) {
                planned.extend(plan["change"]["moved_bytes"].as_u64());
            }
            std::thread::sleep(Duration::from_millis(300));
        };
        ended.store(true, Ordering::Relaxed);
        (answers.join().expect("no answer is wrong"), planned, job)
    });
    assert_eq!(mesh.remote_stages(0), [2], "{job}");
    let moved = job["moved"]["moved_bytes"].as_u64().expect("bytes");
    eprintln!("{answers} answers during the move; {job}");
    assert!(answers >= 1, "the move happened under load");
    assert!(moved > 0 && planned.contains(&moved), "moved {moved}, planned {planned:?}");

    // The node may have fetched the weights before the move, as a standby for the same layers.
    let fetched = job["moved"]["fetched_bytes"].as_u64().expect("bytes");
    let state = mesh.nodes[2].get("/api/v1/state").expect("a state");
    let came: u64 =
        state["weights"]["peers"].as_array().into_iter().flatten().filter_map(|p| p["bytes"].as_u64()).sum();
    eprintln!("{moved} bytes moved as planned, {fetched} of them fetched for the move, {came} fetched in all");
    assert!(fetched <= moved && moved <= came, "{fetched} <= {moved} <= {came}");
    let view = watch(&mesh.nodes[0], &solo.model, TOKENS, |_| {});
    assert_eq!(view.tokens, solo.tokens(TOKENS));
}
