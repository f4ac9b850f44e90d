//! The API as used by the official clients of OpenAI and Anthropic, and by an agent.
use crate::embeddings;
use crate::harness::{Mesh, deploy, model, require};
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn openais_own_client_is_served() {
    let client = Client {
        name: "openai",
        interpreter: &python(),
        probe: &["-c", "import openai"],
        install: "pip install openai",
        script: "openai_client.py",
        base: "/v1",
        pooled: false,
    };
    client.run();
}

#[test]
fn anthropics_own_client_is_served() {
    let client = Client {
        name: "anthropic",
        interpreter: &python(),
        probe: &["-c", "import anthropic"],
        install: "pip install anthropic",
        script: "anthropic_client.py",
        base: "",
        pooled: false,
    };
    client.run();
}

#[test]
fn an_agent_of_langchain_calls_a_tool() {
    let client = Client {
        name: "langchain",
        interpreter: &python(),
        probe: &["-c", "import langchain.agents, langchain_openai"],
        install: "pip install langchain langchain-openai",
        script: "langchain_agent.py",
        base: "/v1",
        pooled: false,
    };
    client.run();
}

#[test]
fn openais_own_client_for_javascript_is_served() {
    let client = Client {
        name: "node",
        interpreter: "node",
        probe: &["-e", "require('openai')"],
        install: "install Node.js, `npm install openai`, and set NODE_PATH to its folder `node_modules`",
        script: "openai_client.cjs",
        base: "/v1",
        pooled: false,
    };
    client.run();
}

#[test]
fn openais_own_client_gets_embeddings() {
    let client = Client {
        name: "openai",
        interpreter: &python(),
        probe: &["-c", "import openai"],
        install: "pip install openai",
        script: "openai_embeddings.py",
        base: "/v1",
        pooled: true,
    };
    client.run();
}

/// The interpreter with the clients for Python.
fn python() -> String {
    std::env::var("MESHNODE_PYTHON").unwrap_or_else(|_| "python3".into())
}

/// A client as a script beside this file, which gets the base URL and the model's name, and prints `all ok` at its end.
struct Client<'a> {
    /// In `MESHNODE_REQUIRE`.
    name: &'a str,
    interpreter: &'a str,
    /// Arguments with which the interpreter succeeds if the client is installed.
    probe: &'a [&'a str],
    install: &'a str,
    script: &'a str,
    /// The path that the client's base URL ends with.
    base: &'a str,
    /// The model is made for embeddings.
    pooled: bool,
}

impl Client<'_> {
    /// Whether the client is there; prints a skip if not, which `MESHNODE_REQUIRE` turns into a failure.
    fn is_installed(&self) -> bool {
        let probed = Command::new(self.interpreter).args(self.probe).output();
        let installed = probed.is_ok_and(|output| output.status.success());
        if !installed {
            let (name, interpreter, install) = (self.name, self.interpreter, self.install);
            let required = std::env::var("MESHNODE_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|one| one == name), "the client `{name}` is required: {install}");
            eprintln!("SKIPPED: `{interpreter}` has no client `{name}`: {install}");
        }
        installed
    }

    /// Runs the client on a node with the model. Afterwards the node has nothing left to do.
    fn run(&self) {
        let Some(model) = require(model()) else { return };
        if !self.is_installed() {
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let model = if self.pooled { embeddings::pooled(&model, folder.path()) } else { model };
        let mut mesh = Mesh::new();
        mesh.start("solo", None);
        let mut request = deploy(&model);
        request["options"]["sequences"] = 4.into();
        let served = mesh.nodes[0].post("/api/v1/deploy", &request).expect("the model is served");
        let name = served["model"].as_str().expect("a name");

        let script = system_tests::repository().join("tests/system").join(self.script);
        let base = format!("http://{}{}", mesh.nodes[0].api, self.base);
        let output = Command::new(self.interpreter).arg(script).args([&base, name]).output().expect("the client runs");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
        assert!(said.contains("all ok"), "{said}");

        // The request of an abandoned stream stops.
        let end = Instant::now() + Duration::from_secs(20);
        let busy = |jobs: &Value| jobs[0]["running"].as_u64() != Some(0) || jobs[0]["queued"].as_u64() != Some(0);
        while busy(&mesh.nodes[0].get("/api/v1/jobs").expect("jobs")) {
            assert!(Instant::now() < end, "requests still run after their clients are gone");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
