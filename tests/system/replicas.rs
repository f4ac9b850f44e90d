//! Two pipelines that serve one model: requests are spread over them, and none is lost with a node of one of them.
use crate::harness::{Mesh, model, require};
use meshnode::cluster::LocalNode;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

const REQUESTS: u64 = 6;
const TOKENS: usize = 200;
/// Placing a further pipeline waits for standbys and adverts.
const PLACED_MAX: Duration = Duration::from_secs(60);

fn request(name: &Value, n: u64) -> Value {
    let prompt: Vec<u64> = (0..40).map(|at| 1000 + (at * 37 + n * 211) % 20_000).collect();
    json!({
        "model": name, "prompt": prompt, "raw": true, "max_tokens": TOKENS, "temperature": 0.8, "seed": n, "ignore_eos": true,
    })
}

fn tokens(node: &LocalNode, request: &Value) -> Vec<u64> {
    let lines = node.post_lines("/api/v1/generate", request).expect("a stream");
    let event =
        |line: std::io::Result<String>| serde_json::from_str::<Value>(&line.expect("a line")).expect("JSON lines");
    lines.filter_map(|line| event(line)["token"].as_u64()).collect()
}

fn jobs(state: &Value) -> Vec<&Value> {
    state["jobs"].as_array().into_iter().flatten().filter(|job| job["head"] == true).collect()
}

/// Names of the nodes that own stages of a job.
fn owners(job: &Value) -> BTreeSet<String> {
    let stages = job["stages"].as_array().into_iter().flatten();
    stages.filter_map(|stage| stage["name"].as_str()).map(str::to_owned).collect()
}

/// Sends all requests at once, and calls `meanwhile` while they run. Returns the answers.
fn answers(mesh: &Mesh, name: &Value, meanwhile: impl FnOnce()) -> Vec<Vec<u64>> {
    let node = &mesh.nodes[0];
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..REQUESTS).map(|n| scope.spawn(move || tokens(node, &request(name, n)))).collect();
        meanwhile();
        threads.into_iter().map(|thread| thread.join().expect("an answer")).collect()
    })
}

#[test]
fn requests_are_spread_over_two_pipelines_and_survive_a_loss() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    let memory = 3 * mesh.model_bytes(&model) + (300 << 20);
    for i in 0..3 {
        mesh.start(&format!("n{i}"), Some(memory));
    }
    mesh.wait_members(3);
    let options = json!({"int8": true, "context": 1024, "sequences": 8, "replicas": 2});
    let served =
        mesh.nodes[0].post("/api/v1/deploy", &json!({"model": model, "options": options})).expect("it is served");
    let name = &served["model"];
    let expected: Vec<Vec<u64>> = (0..REQUESTS).map(|n| tokens(&mesh.nodes[0], &request(name, n))).collect();
    assert!(expected.iter().all(|answer| answer.len() == TOKENS));

    let two = |state: &Value| jobs(state).iter().filter(|job| job["state"] == "ready").count() == 2;
    let state = mesh.nodes[0].wait_state(PLACED_MAX, two).expect("two pipelines");
    let both = jobs(&state);
    assert_eq!(
        (&both[0]["replica_of"], &both[1]["replica_of"]),
        (&Value::Null, &both[0]["job"]),
        "the first job comes first"
    );
    let (first, second) = (owners(both[0]), owners(both[1]));
    assert!(!second.is_empty() && first.is_disjoint(&second), "{first:?} and {second:?}");

    let spread = |state: &Value| jobs(state).iter().all(|job| job["running"].as_u64() > Some(0));
    let got = answers(&mesh, name, || {
        mesh.nodes[0].wait_state(PLACED_MAX, spread).expect("requests in both pipelines");
    });
    assert_eq!(got, expected);

    // The coordinator has the callers, so it stays.
    let victim = second.iter().chain(&first).find(|name| *name != "n0").expect("another node").clone();
    let at = mesh.nodes.iter().position(|node| node.name == victim).expect("the node");
    let pid = mesh.nodes[at].pid();
    let got = answers(&mesh, name, || {
        mesh.nodes[0].wait_state(PLACED_MAX, spread).expect("requests in both pipelines");
        std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().expect("kill");
    });
    assert_eq!(got, expected, "after the loss of {victim}");

    mesh.nodes[0].delete(&format!("/api/v1/models/{}", name.as_str().expect("a name"))).expect("the model is stopped");
    mesh.nodes[0].wait_state(PLACED_MAX, |state| jobs(state).is_empty()).expect("both pipelines end");
}
