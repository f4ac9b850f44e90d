//! Administration of a node: allowed to its user, by the key in the data directory, and to no other user of the
//! machine.
use crate::harness::{Mesh, meshnode};
use meshnode::cluster::LocalNode;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const GRID: &str = "name = \"wave\"\nsteps = 4\n[grid]\nsize = [16, 16]\n[rule]\nname = \"wave\"\nspeed = 0.5\n\
                    [[output]]\nkind = \"png\"\nquantity = \"height\"\nevery = 2\n";

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).permissions().mode() & 0o777
}

/// Runs the program as a user without access to the node's files: another home.
fn stranger(home: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(meshnode());
    command.args(arguments).stdin(Stdio::null()).env("HOME", home);
    for variable in ["XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "MESHNODE_API", "MESHNODE_DATA_DIR"] {
        command.env_remove(variable);
    }
    command.output().expect("the program runs")
}

fn owner(arguments: &[&str]) -> Output {
    Command::new(meshnode()).args(arguments).stdin(Stdio::null()).output().expect("the program runs")
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A request without the API key.
fn without_key(node: &LocalNode, path: &str, body: &Value) -> (u16, String) {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let answer = agent.post(format!("http://{}{path}", node.api)).send_json(body).expect("an answer");
    let status = answer.status().as_u16();
    (status, answer.into_body().read_to_string().expect("a body"))
}

#[test]
fn another_user_of_the_machine_cannot_administer_a_node_nor_read_its_secrets() {
    let mut mesh = Mesh::new();
    mesh.start("mine", None);
    let node = &mesh.nodes[0];
    for (path, body) in [
        ("/api/v1/invite", json!({"ttl_s": 604_800, "uses": 100})),
        ("/api/v1/approve", json!({"peer": "12D3KooWx"})),
        ("/api/v1/ban", json!({"peer": "mine"})),
        ("/api/v1/deploy", json!({"model": "/etc/passwd"})),
        ("/api/v1/grids", json!({"simulation": "", "out": "/tmp/x"})),
        ("/api/v1/drain", json!({"on": true})),
        ("/api/v1/leave", json!({})),
        ("/api/v1/open", json!({})),
    ] {
        let (status, text) = without_key(node, path, &body);
        assert_eq!(status, 401, "{path}: {text}");
    }
    assert_eq!(mode(&node.data_dir), 0o700);
    for file in ["api.key", "identity.key", "membership"] {
        assert_eq!(mode(&node.data_dir.join(file)), 0o600, "{file}");
    }

    let home = tempfile::tempdir().expect("a folder");
    let api = node.api.to_string();
    let reads = stranger(home.path(), &["status", "--api", &api]);
    assert!(reads.status.success(), "{}", said(&reads));
    let refused = stranger(home.path(), &["invite", "--api", &api]);
    assert_eq!(refused.status.code(), Some(4), "{}", said(&refused));
    for words in ["--api-key-file", "--api-key", "api.key is not there"] {
        assert!(said(&refused).contains(words), "{words}: {}", said(&refused));
    }
    let key_file = node.data_dir.join("api.key");
    let with_file = ["invite", "--api", &api, "--api-key-file", &key_file.to_string_lossy()].map(str::to_owned);
    let invited = stranger(home.path(), &with_file.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(invited.status.success() && said(&invited).contains("mesh1"), "{}", said(&invited));

    // The node's user needs no flag, whichever of several nodes is addressed.
    let invited = owner(&["invite", "--api", &api]);
    assert!(invited.status.success() && said(&invited).contains("mesh1"), "{}", said(&invited));
    let link = owner(&["open", "--api", &api]);
    assert!(link.status.success() && said(&link).contains(&format!("http://{api}/#token=")), "{}", said(&link));
}

/// Submits over the API with the key, but without proof of the caller's access to the output folder.
fn submit_raw(node: &LocalNode, simulation: &str, out: &Path) -> Result<Value, String> {
    node.post("/api/v1/grids", &json!({"simulation": simulation, "out": out})).map_err(|e| e.to_string())
}

#[test]
fn outputs_go_below_the_nodes_folders_or_into_the_callers_own() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("sim.toml");
    std::fs::write(&file, GRID).expect("a job file");
    let packed = kernels_simulations::Simulation::read(&file).expect("a simulation").to_bytes();
    let simulation = data_encoding::BASE64.encode(&packed);
    let mut mesh = Mesh::new();
    mesh.start("mine", None);
    let node = &mesh.nodes[0];

    let precious = dir.path().join("precious");
    std::fs::create_dir_all(precious.join("checkpoints/step-7")).expect("a folder");
    let refused = submit_raw(node, &simulation, &precious).expect_err("the folder is not the node's");
    assert!(
        refused.contains("400") && refused.contains("--output-dir") && refused.contains("\"param\":\"out\""),
        "{refused}"
    );
    assert!(precious.join("checkpoints/step-7").is_dir());
    let outside =
        submit_raw(node, &simulation, Path::new("../outside")).expect_err("the path leaves the output folder");
    assert!(outside.contains("without `..`"), "{outside}");
    submit_raw(node, &simulation, Path::new("below/run")).expect("below the data directory");
    assert!(node.data_dir.join("outputs/below/run").is_dir());

    let out: PathBuf = dir.path().join("new/run");
    let api = node.api.to_string();
    let arguments = ["submit", "--wait", "--api", &api, "--out", &out.to_string_lossy(), &file.to_string_lossy()]
        .map(str::to_owned);
    let done = owner(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(done.status.success(), "{}", said(&done));
    let names = std::fs::read_dir(&out).expect("the folder").map(|entry| entry.expect("an entry").file_name());
    let names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    assert!(!names.is_empty() && names.iter().all(|name| !name.contains("claim")), "{names:?}");
}

#[test]
fn leave_returns_when_the_process_has_ended() {
    let mut mesh = Mesh::new();
    mesh.start("mine", None);
    let left = owner(&["leave", "--api", &mesh.nodes[0].api.to_string()]);
    assert!(left.status.success() && said(&left).contains("process has ended"), "{}", said(&left));
    assert!(!mesh.nodes[0].alive(), "{}", mesh.nodes[0].log());
    // Its data directory and its port are free for a restart.
    mesh.restart(0);
}

#[test]
fn the_configuration_file_applies_to_every_command() {
    let mut mesh = Mesh::new();
    mesh.start("mine", None);
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    std::fs::write(path("good.toml"), format!("api = \"{}\"\n", mesh.nodes[0].api)).expect("a file");
    std::fs::write(path("bad.toml"), "api = 5\n").expect("a file");
    let commands: &[&[&str]] = &[
        &["status"],
        &["peers"],
        &["jobs"],
        &["invite"],
        &["drain", "--off"],
        &["plan", "no-such-model"],
        &["pull", "no-such-model"],
        &["serve", "x", "--stop"],
        &["cancel", "12"],
        &["watch", "12"],
        &["doctor"],
        &["completions", "bash"],
        &["up"],
        &["leave"],
    ];
    for command in commands {
        for (file, words) in [("bad.toml", "bad.toml is not valid"), ("none.toml", "none.toml")] {
            let output = owner(&[*command, &["--config", &path(file)][..]].concat());
            assert_eq!(output.status.code(), Some(2), "{command:?}: {}", said(&output));
            assert!(said(&output).contains(words), "{command:?}: {}", said(&output));
        }
    }
    let with = |flags: &[&str]| {
        let mut command = Command::new(meshnode());
        command.args(flags).args(["--config", &path("good.toml")]).env_remove("MESHNODE_API").stdin(Stdio::null());
        command.output().expect("the program runs")
    };
    for command in [&["status"][..], &["peers"], &["jobs"], &["drain", "--off"], &["invite"]] {
        let output = with(command);
        assert!(output.status.success(), "{command:?}: {}", said(&output));
    }
    // A flag overrides the file.
    assert_eq!(with(&["status", "--api", "127.0.0.1:1"]).status.code(), Some(3));
    // A file in the current folder is ignored.
    std::fs::write(path("meshnode.toml"), format!("api = \"{}\"\nopen = true\n", mesh.nodes[0].api)).expect("a file");
    let mut here = Command::new(meshnode());
    here.arg("status").current_dir(dir.path()).env("HOME", dir.path()).env_remove("MESHNODE_API");
    let output = here.env_remove("XDG_CONFIG_HOME").output().expect("the program runs");
    assert!(said(&output).contains("--config meshnode.toml"), "{}", said(&output));
    assert!(!said(&output).contains("mine"), "{}", said(&output));
}
