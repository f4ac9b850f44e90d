//! Sixteen conversations at once in a cache that is too small for them, while owners of stages are killed: requests wait,
//! share their prefixes and give up their pages, and every answer is that of one undisturbed node. To repeat it many times:
//! `MESHNODE_KILLS=100 cargo test --release --workspace crowd -- --ignored --nocapture`
use crate::client::{covered_owners, kills, seed};
use crate::harness::{JOIN_MAX, Mesh, generate, model, require, tokens_of};
use meshnode::cluster::LocalNode;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use system_tests::relay::Random;

const CLIENTS: u64 = 16;
const TURNS: u64 = 3;
/// New tokens of each turn.
const NEW: u64 = 120;
const ANSWER: u64 = 40;
/// Room for four whole conversations.
const CONTEXT: u64 = 1024;
const SEQUENCES: u64 = 2;
const NODES: usize = 4;
/// Kills in every test run.
const KILLS: usize = 2;
/// Time for standbys to load and to follow, on a machine with fewer cores than nodes.
const HOT_MAX: Duration = Duration::from_secs(120);

fn serve(mesh: &Mesh, model: &Path) {
    let options = json!({"int8": true, "context": CONTEXT, "sequences": SEQUENCES});
    mesh.nodes[0].post("/api/v1/deploy", &json!({"model": model, "options": options})).expect("it is served");
}

/// The answers to a client's conversation.
fn converse(node: &LocalNode, model: &Path, client: u64) -> Vec<Vec<u64>> {
    let (mut text, mut answers) = (Vec::new(), Vec::new());
    for turn in 0..TURNS {
        text.extend((0..NEW).map(|at| 1000 + (at * 37 + 211 * turn + 1009 * client) % 20_000));
        let request = json!({
            "model": model, "prompt": text, "raw": true, "max_tokens": ANSWER, "temperature": 0.8, "seed": client,
            "ignore_eos": true,
        });
        let answer = tokens_of(&generate(node, &request));
        text.extend(&answer);
        answers.push(answer);
    }
    answers
}

/// Kills an owner, other than the coordinator, of a stage with a current standby. Returns its place in `others`.
fn kill_one(coordinator: &LocalNode, others: &mut [LocalNode], random: &mut Random) -> usize {
    let covered = |state: &Value| state["jobs"][0]["state"] == "ready" && !covered_owners(others, state).is_empty();
    let state = coordinator.wait_state(HOT_MAX, covered).expect("a stage has a current standby");
    let owners = covered_owners(others, &state);
    let victim = owners[random.below(owners.len())];
    others[victim].kill();
    victim
}

/// Ends the conversations, also if no node could be killed.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
#[ignore = "several minutes: run it when the cache or succession changes"]
fn a_crowd_in_a_small_cache_loses_no_token_to_kills() {
    let Some(model) = require(model()) else { return };
    let mut alone = Mesh::new();
    alone.start("solo", None);
    serve(&alone, &model);
    let reference: Vec<Vec<Vec<u64>>> = (0..CLIENTS).map(|client| converse(&alone.nodes[0], &model, client)).collect();
    drop(alone);

    let mut mesh = Mesh::new();
    let bytes = mesh.model_bytes(&model);
    for i in 0..NODES {
        // Two nodes fit the model and its cache, one does not; the others have room for their standbys.
        mesh.start(&format!("n{i}"), Some((bytes as f64 * 0.8) as u64 + (48 << 20)));
    }
    mesh.wait_members(NODES);
    serve(&mesh, &model);
    let mut random = Random(seed("a_crowd_in_a_small_cache_loses_no_token_to_kills"));
    let (over, talks) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (coordinator, mut others) = mesh.split();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (model, reference, over, talks) = (&model, &reference[client as usize], &over, &talks);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    assert_eq!(&converse(coordinator, model, client), reference, "client {client}");
                    talks.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let _ends = Ends(&over); // each client ends its conversation
        for kill in 0..kills(KILLS) {
            std::thread::sleep(Duration::from_millis(1000 + random.below(4000) as u64));
            let victim = kill_one(coordinator, others.nodes, &mut random);
            let conversations = talks.load(Ordering::Relaxed);
            eprintln!("{kill}: {} killed; {conversations} conversations so far", others.nodes[victim].name);
            others.restart(victim);
            coordinator.wait_members(NODES, JOIN_MAX).expect("the killed node is back");
        }
    });
    eprintln!("{} conversations, all equal", talks.load(Ordering::Relaxed));
}
