//! Encoded rows between nodes: the loss of a stage with a standby changes no token, and `auto` needs a measurement.
use crate::client::{covered_owners, solo, watch};
use crate::harness::{Mesh, deploy};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::time::Duration;

const TOKENS: u32 = 48;
const NODES: usize = 4;
/// Time for standbys to fetch their shares, load them and catch up.
const HOT_MAX: Duration = Duration::from_secs(180);

#[test]
fn a_killed_stage_changes_no_token_of_a_model_with_eight_bit_rows() {
    let Some(solo) = solo() else { return };
    let mut mesh = Mesh::new();
    for i in 0..NODES {
        mesh.start(&format!("n{i}"), Some(solo.memory(0.8)));
    }
    mesh.wait_members(NODES);
    let with = |boundary: &str| {
        let mut request = deploy(&solo.model);
        request["options"]["boundary"] = json!(boundary);
        request
    };
    let refused = mesh.nodes[0].post("/api/v1/deploy", &with("auto")).expect_err("not measured");
    assert!(refused.to_string().contains("meshnode gate"), "{refused}");
    let plan = mesh.nodes[0].post("/api/v1/plan", &with("q8")).expect("a plan");
    assert_eq!((&plan["boundary"], &plan["row_bytes"]), (&json!("q8"), &json!(636)));
    mesh.nodes[0].post("/api/v1/deploy", &with("q8")).expect("served");
    let hot =
        |state: &Value| state["jobs"][0]["state"] == "ready" && !covered_owners(&mesh.nodes[1..], state).is_empty();
    let state = mesh.nodes[0].wait_state(HOT_MAX, hot).expect("a stage of another node has a current standby");
    let job = &state["jobs"][0];
    assert_eq!((&job["boundary"], &job["row_bytes"]), (&json!("q8"), &json!(636)), "{job}");
    let expected = watch(&mesh.nodes[0], &solo.model, TOKENS, |_| {}).tokens;
    let victim = covered_owners(&mesh.nodes[1..], &state)[0] + 1;
    let nodes = &mesh.nodes;
    let view = watch(&nodes[0], &solo.model, TOKENS, |count| {
        if count == TOKENS as usize / 3 {
            nodes[victim].signal(Signal::KILL);
        }
    });
    eprintln!("SIGKILL of n{victim}: {view}");
    assert_eq!(view.tokens, expected);
}
