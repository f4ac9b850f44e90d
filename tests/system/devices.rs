//! A node with several devices: a model split over its processor and a (software) Vulkan device gives the tokens of one device.
use crate::client::{solo, watch};
use crate::harness::{Mesh, deploy, meshnode};
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::time::Duration;

const TOKENS: u32 = 48;
/// Part of the model's memory on each device, so that neither holds all of it.
const SHARE: f64 = 0.7;
/// Time in which a software driver compiles the kernels of a stage.
const READY_MAX: Duration = Duration::from_secs(300);

/// Whether the machine has a Vulkan device. Prints a skip if not, which `MESHNODE_REQUIRE=vulkan` turns into a failure.
fn has_vulkan() -> bool {
    let report = Command::new(meshnode()).args(["doctor", "--json", "--port", "0"]).stdin(Stdio::null()).output();
    let report: Value = serde_json::from_slice(&report.expect("the program runs").stdout).expect("JSON");
    let there = report["findings"].as_array().is_some_and(|all| all.iter().any(|f| f["subject"] == "vulkan:0"));
    if !there {
        let required = std::env::var("MESHNODE_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|name| name == "vulkan"), "no Vulkan device: {report}");
        eprintln!("SKIPPED: no Vulkan device");
    }
    there
}

fn devices_of(stages: &Value) -> Vec<String> {
    let stages = stages.as_array().into_iter().flatten();
    stages.map(|stage| stage["device"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn a_model_on_two_devices_of_one_node_gives_the_tokens_of_one() {
    let Some(solo) = solo() else { return };
    if !has_vulkan() {
        return;
    }
    let mut mesh = Mesh::new();
    mesh.start_on("box", "cpu,vulkan:0", Some(solo.memory(SHARE)));
    let node = &mesh.nodes[0];
    let own = node.get("/api/v1/state").expect("a state")["peers"][0].clone();
    let labels: Vec<&str> =
        own["devices"].as_array().into_iter().flatten().filter_map(|d| d["label"].as_str()).collect();
    assert_eq!(labels, ["cpu", "vulkan:0"], "{own}");
    let both: BTreeSet<String> = ["cpu", "vulkan:0"].map(str::to_owned).into();
    let plan = node.post("/api/v1/plan", &deploy(&solo.model)).expect("a plan");
    assert_eq!(devices_of(&plan["stages"]).into_iter().collect::<BTreeSet<_>>(), both, "{plan}");
    mesh.deploy(0, &solo.model);
    let ready = |state: &Value| state["jobs"][0]["state"] == "ready";
    let state = mesh.nodes[0].wait_state(READY_MAX, ready).expect("the model is served");
    let stages = &state["jobs"][0]["stages"];
    assert_eq!(devices_of(stages).into_iter().collect::<BTreeSet<_>>(), both, "{stages}");
    let names: BTreeSet<&str> = stages.as_array().into_iter().flatten().filter_map(|s| s["name"].as_str()).collect();
    assert_eq!(names, BTreeSet::from(["box"]), "one node holds both stages");
    let view = watch(&mesh.nodes[0], &solo.model, TOKENS, |_| {});
    assert_eq!(view.tokens, solo.tokens(TOKENS), "equal bits on a processor and on a GPU");
    let sent = &mesh.nodes[0].get("/api/v1/state").expect("a state")["boundary"];
    let bytes: u64 = sent.as_object().into_iter().flat_map(|all| all.values()).filter_map(Value::as_u64).sum();
    assert_eq!(bytes, 0, "rows between devices of one node do not cross the network: {sent}");
}
