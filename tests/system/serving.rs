//! Served models: after a restart of the node that serves them, and requested on a node that does not.
use crate::harness::{JOIN_MAX, Mesh, model, require};
use meshnode::cluster::LocalNode;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest wait for a model to be placed again.
const READY_MAX: Duration = Duration::from_secs(60);

/// The model's entry in a node's model list.
fn listed(node: &LocalNode, name: &str) -> Option<Value> {
    let list = node.get("/v1/models").expect("a list");
    list["data"].as_array()?.iter().find(|model| model["id"] == name).cloned()
}

/// Waits until the model's job has this state; returns the job.
fn job_in(node: &LocalNode, name: &str, state: &str) -> Value {
    let end = Instant::now() + READY_MAX;
    loop {
        let jobs = node.get("/api/v1/jobs").expect("jobs");
        let job = jobs.as_array().into_iter().flatten().find(|job| job["model"] == name).cloned();
        match job {
            Some(job) if job["state"] == state => return job,
            job if Instant::now() >= end => panic!("{name} is not {state}: {job:?}\n{}", node.log()),
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn ask(node: &LocalNode, name: &str) -> (u16, Value) {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let body = json!({
        "model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0.0,
    });
    let url = format!("http://{}/v1/chat/completions", node.api);
    let answer = agent.post(&url).send_json(&body).expect("an answer");
    let status = answer.status().as_u16();
    let text = answer.into_body().read_to_string().expect("a body");
    (status, serde_json::from_str(&text).expect("JSON"))
}

fn serve(node: &LocalNode, model: &Path) -> String {
    let body = json!({"model": model, "options": {"int8": true, "context": 1024, "sequences": 8}});
    let served = node.post("/api/v1/deploy", &body).expect("the model is served");
    served["model"].as_str().expect("a name").to_owned()
}

#[test]
fn served_models_are_restored_with_their_options_after_a_restart() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    mesh.start("n0", None);
    mesh.start("n1", None);
    mesh.wait_members(2);
    // A separate file, because the test moves it away.
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("parrot.gguf");
    std::fs::copy(&model, &file).expect("a copy");
    let name = serve(&mesh.nodes[0], &file);
    assert_eq!(name, "parrot");
    let before = ask(&mesh.nodes[0], &name);
    assert_eq!(before.0, 200, "{before:?}");

    mesh.nodes.iter_mut().for_each(LocalNode::kill);
    mesh.restart(0);
    let entry = listed(&mesh.nodes[0], &name).expect("the model is listed as soon as the API answers");
    assert_eq!(entry["context_length"], 1024, "{entry}");
    mesh.restart(1);
    let job = job_in(&mesh.nodes[0], &name, "ready");
    assert_eq!((&job["context"], &job["sequences"]), (&json!(1024), &json!(8)), "{job}");
    let after = ask(&mesh.nodes[0], &name);
    assert_eq!(after.1["choices"], before.1["choices"], "{after:?}");

    mesh.nodes[0].kill();
    let aside = folder.path().join("elsewhere.gguf");
    std::fs::rename(&file, &aside).expect("renamed");
    mesh.restart(0);
    let job = job_in(&mesh.nodes[0], &name, "degraded");
    assert!(job["reason"].as_str().is_some_and(|why| why.contains("parrot.gguf") && why.contains("gone")), "{job}");
    std::fs::rename(&aside, &file).expect("renamed");
    job_in(&mesh.nodes[0], &name, "ready");

    mesh.nodes[0].delete(&format!("/api/v1/models/{name}")).expect("the model is stopped");
    mesh.nodes[0].kill();
    mesh.restart(0);
    assert_eq!(listed(&mesh.nodes[0], &name), None, "a stopped model is not restored");
}

#[test]
fn a_node_forwards_requests_to_the_member_that_serves_the_model() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    mesh.start("n0", None);
    mesh.start("n1", None);
    mesh.wait_members(2);
    let name = serve(&mesh.nodes[0], &model);
    let connected =
        |state: &Value| state["peers"].as_array().is_some_and(|all| all.iter().any(|p| p["connected"] == true));
    mesh.nodes[1].wait_state(JOIN_MAX, connected).expect("connected");
    let text = |answer: &Value| answer["choices"][0]["message"]["content"].clone();
    let (there, expected) = ask(&mesh.nodes[0], &name);
    let (status, answer) = ask(&mesh.nodes[1], &name);
    assert_eq!((there, status), (200, 200), "{answer}");
    assert_eq!(text(&answer), text(&expected));
    let jobs = mesh.nodes[1].get("/api/v1/jobs").expect("jobs");
    assert!(jobs.as_array().is_some_and(|jobs| jobs.iter().all(|job| job["head"] == false)), "no second job: {jobs}");
    // No member serves this model.
    let (status, answer) = ask(&mesh.nodes[1], "no-such-model");
    assert_eq!(status, 404, "{answer}");
    assert!(!answer.to_string().contains("n0"), "{answer}");
    // A second deployment of the model is accepted and reported.
    let body = json!({"model": model, "options": {"int8": true, "context": 128, "sequences": 1}});
    let served = mesh.nodes[1].post("/api/v1/deploy", &body).expect("a second deployment");
    assert_eq!(served["also_served_by"], json!(["n0"]), "{served}");
}

#[test]
fn a_model_loaded_for_one_run_is_unloaded_after_it() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    mesh.start("n0", None);
    let node = &mesh.nodes[0];
    let run = |keep: bool| {
        let mut command = std::process::Command::new(crate::harness::meshnode());
        command.args(["run", &model.to_string_lossy(), "--api", &node.api.to_string()]);
        command.args(["--prompt", "Hi", "--max-tokens", "4", "--context", "128", "--sequences", "1"]);
        if keep {
            command.arg("--keep");
        }
        let output = command.output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let jobs = || node.get("/api/v1/jobs").expect("jobs").as_array().map_or(0, Vec::len);
    run(false);
    let unloaded = node.wait_state(JOIN_MAX, |state| state["jobs"] == json!([]));
    unloaded.expect("the unused model is unloaded");
    run(true);
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(jobs(), 1, "--keep keeps the model loaded");
    run(false);
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(jobs(), 1, "a run does not unload a kept model");
}
