//! The API as used by OpenAI's own Python client.
use crate::harness::{Mesh, deploy, model, require};
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn openais_own_client_is_served() {
    let Some(model) = require(model()) else { return };
    let python = std::env::var("MESHNODE_PYTHON").unwrap_or_else(|_| "python3".into());
    let client = Command::new(&python).args(["-c", "import openai"]).output();
    if !client.is_ok_and(|o| o.status.success()) {
        let required = std::env::var("MESHNODE_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|r| r == "openai"), "the openai client is required: pip install openai");
        eprintln!("SKIPPED: `{python}` has no openai client: pip install openai");
        return;
    }
    let mut mesh = Mesh::new();
    mesh.start("solo", None);
    let mut request = deploy(&model);
    request["options"]["sequences"] = 4.into();
    let served = mesh.nodes[0].post("/api/v1/deploy", &request).expect("the model is served");
    let name = served["model"].as_str().expect("a name");

    let script = system_tests::repository().join("tests/system/openai_client.py");
    let base = format!("http://{}/v1", mesh.nodes[0].api);
    let output = Command::new(&python).arg(script).args([&base, name]).output().expect("python runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("all ok"), "{said}");

    // The request of the abandoned stream has stopped.
    let end = Instant::now() + Duration::from_secs(20);
    let busy = |jobs: &Value| jobs[0]["running"].as_u64() != Some(0) || jobs[0]["queued"].as_u64() != Some(0);
    while busy(&mesh.nodes[0].get("/api/v1/jobs").expect("jobs")) {
        assert!(Instant::now() < end, "requests still run after their clients are gone");
        std::thread::sleep(Duration::from_millis(50));
    }
}
