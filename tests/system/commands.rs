//! The commands as a user or a script runs them: stdout, stderr and exit codes.
use crate::harness::{Mesh, Turn, meshnode, model, require};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use system_tests::repository;

/// The program, with no running node at its default API address.
fn command(arguments: &[&str]) -> Command {
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("an address");
    let mut command = Command::new(meshnode());
    command.args(arguments).env("MESHNODE_API", free.to_string()).stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the program runs")
}

fn stdout(output: &Output) -> String {
    let [text, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{:?}: {errors}\n{text}", output.status);
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn json(output: &Output) -> Value {
    let text = stdout(output);
    assert_eq!(text.lines().count(), 1, "one object on stdout: {text}");
    serde_json::from_str(&text).expect("JSON")
}

/// One node, strict arithmetic: the tokens of the oracle, as far as its margins are decisive.
#[test]
fn a_prompt_on_one_node_gives_the_oracles_tokens() {
    let Some(model) = require(model()) else { return };
    let text = std::fs::read(repository().join("tests/oracles/smollm2_greedy.json")).expect("the oracle");
    let oracle: Value = serde_json::from_slice(&text).expect("JSON");
    let prompt = &oracle["prompts"][0];
    let model = model.to_string_lossy();
    let text = prompt["text"].as_str().expect("a prompt");
    let flags = ["--raw", "--activations", "f32", "--greedy", "--ignore-eos", "--max-tokens", "24", "--json"];
    let output = run(&[&["run", &model, "--prompt", text][..], &flags].concat());
    assert!(String::from_utf8_lossy(&output.stderr).contains("starting one in this process"), "stderr announces it");
    let answer = json(&output);
    assert_eq!(answer["prompt_token_ids"], prompt["ids"]);
    let margins = prompt["numpy_f32"]["margins"].as_array().expect("margins");
    let binding = margins.iter().take(24).take_while(|m| m.as_f64().is_some_and(|m| m > 0.01)).count();
    let (ours, theirs) =
        (answer["token_ids"].as_array().expect("tokens"), prompt["numpy_f32"]["greedy_ids"].as_array());
    assert_eq!(ours[..binding], theirs.expect("tokens")[..binding]);
    assert_eq!((answer["tokens"].as_u64(), answer["finish_reason"].as_str()), (Some(24), Some("length")));
    assert!(answer["tokens_per_s"].as_f64().is_some_and(|speed| speed > 0.0), "{answer}");
}

/// Stdout contains the answer only; the prompt may come from stdin; the same seed gives the same answer.
#[test]
fn a_prompt_on_stdin_is_answered_on_stdout() {
    let Some(model) = require(model()) else { return };
    let model = model.to_string_lossy();
    let ask = |json: &[&str]| {
        let flags = ["run", &model, "--max-tokens", "12", "--seed", "7"];
        let mut child = command(&[&flags[..], json].concat())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program runs");
        child.stdin.take().expect("piped").write_all(b"Say hello.\n").expect("a prompt");
        child.wait_with_output().expect("an end")
    };
    let answer = json(&ask(&["--json"]));
    let text = stdout(&ask(&[]));
    assert_eq!(text.trim_end_matches('\n'), answer["text"].as_str().expect("text").trim_end_matches('\n'));
}

#[test]
fn without_a_node_commands_say_how_to_start_one() {
    for arguments in [&["status"][..], &["peers", "--json"], &["invite"], &["approve", "x"], &["leave"]] {
        let output = run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {said}");
        assert!(said.contains("meshnode up"), "{said}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn mistakes_are_usage_errors() {
    for (arguments, word) in [
        (&["run", "no-such-model", "--prompt", "x"][..], "no-such-model"),
        (&["pull", "hf:../x/y"], "hf:OWNER/REPO/FILE"),
        (&["up", "--memory", "much"], "200MiB"),
        (&["up", "--api", "0.0.0.0:0"], "--api-key"),
        (&["up", "--advertise", "0.0.0.0:9471"], "IP:PORT"),
    ] {
        let output = run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(2 | 5)), "{arguments:?}: {:?} {said}", output.status);
        assert!(said.contains(word), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_damaged_model_is_rejected_with_its_name() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("broken.gguf");
    std::fs::write(&path, b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff").expect("a file");
    let output = run(&["run", &path.to_string_lossy(), "--prompt", "x"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(said.contains("broken.gguf"), "{said}");
}

/// The same weights as tiles give the same tokens; fewer bits give a smaller file that still answers.
#[test]
fn a_mesh_file_gives_the_same_tokens() {
    let Some(model) = require(model()) else { return };
    let dir = tempfile::tempdir().expect("a folder");
    let model = model.to_string_lossy();
    let [kept, small] = ["kept.mesh", "small.mesh"].map(|name| dir.path().join(name).to_string_lossy().into_owned());
    let written = json(&run(&["quantize", &model, &kept, "--json"]));
    let seen = json(&run(&["inspect", &kept, "--hash", "--json"]));
    assert_eq!(seen["content"], written["content"]);
    assert_eq!((seen["tiles"].as_bool(), seen["verified"].as_bool()), (Some(true), Some(true)));
    let tokens = |model: &str| {
        let flags = ["--prompt", "Why is the sky blue?", "--greedy", "--max-tokens", "12", "--json"];
        json(&run(&[&["run", model][..], &flags].concat()))["token_ids"].clone()
    };
    assert_eq!(tokens(&kept), tokens(&model));
    let output = run(&["quantize", &model, &kept]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("--force"), "{said}");
    let auto = json(&run(&["quantize", &kept, &small, "--bits", "auto", "--target-bpw", "4.7", "--json"]));
    assert!(auto["file_bytes"].as_u64() < written["file_bytes"].as_u64(), "{auto}");
    assert_eq!(tokens(&small).as_array().map(Vec::len), Some(12));
}

#[test]
fn a_model_larger_than_the_mesh_says_how_much_is_missing() {
    let Some(model) = require(model()) else { return };
    let output = run(&["plan", &model.to_string_lossy(), "--memory", "20MiB", "--device", "cpu"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(said.contains("missing"), "{said}");
}

/// The context that an error proposes makes the command work.
#[test]
fn a_shortage_of_memory_proposes_a_context_that_fits() {
    let Some(model) = require(model()) else { return };
    let model = model.to_string_lossy();
    let base: [&str; 6] = ["plan", &model, "--memory", "160MiB", "--device", "cpu"];
    let plan = |more: &[&str]| run(&[&base[..], more].concat());
    let output = plan(&[]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(said.contains("MiB") && said.contains("free on 1 node") && !said.contains("bytes"), "{said}");
    let proposed = said.lines().find_map(|line| line.trim().strip_prefix("it fits with: ")).expect("a proposal");
    let flags: Vec<&str> = proposed.split(' ').collect();
    let output = plan(&flags);
    assert_eq!(output.status.code(), Some(0), "{proposed}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn plans_and_doctor_answer() {
    let doctor = run(&["doctor", "--json", "--port", "0"]);
    let report: Value = serde_json::from_slice(&doctor.stdout).expect("JSON");
    assert!(report["findings"].as_array().is_some_and(|f| f.len() >= 8), "{report}");
    let Some(model) = require(model()) else { return };
    let plan = json(&run(&["plan", &model.to_string_lossy(), "--json", "--device", "cpu"]));
    assert_eq!(plan["stages"].as_array().map(Vec::len), Some(1), "{plan}");
    let table = stdout(&run(&["plan", &model.to_string_lossy(), "--device", "cpu"]));
    assert!(table.contains("LAYERS") && table.contains("0-29"), "{table}");
}

/// With a running node, `serve` deploys on it, `run` sends it requests, and `leave` ends it.
#[test]
fn commands_use_the_running_node() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    mesh.start("solo", None);
    let api = mesh.nodes[0].api.to_string();
    let model = model.to_string_lossy();
    let at = |arguments: &[&str]| run(&[arguments, &["--api", &api]].concat());
    let served = json(&at(&["serve", &model, "--context", "256", "--json"]));
    assert_eq!(served["own_node"], false);
    assert!(served["base_url"].as_str().is_some_and(|u| u.contains(&api)), "{served}");
    let answer =
        json(&at(&["run", &model, "--context", "256", "--greedy", "--max-tokens", "4", "--json", "--prompt", "Hi"]));
    assert_eq!(answer["tokens"], 4);
    let status = stdout(&at(&["status"]));
    assert!(status.contains("solo") && status.contains("this node"), "{status}");
    let jobs = stdout(&at(&["jobs"]));
    assert!(jobs.contains("ready"), "{jobs}");
    // Also under the file's name, from another path; and with the options it is served with.
    let dir = tempfile::tempdir().expect("a folder");
    let elsewhere = dir.path().join("elsewhere.gguf");
    std::os::unix::fs::symlink(&*model, &elsewhere).expect("a link");
    json(&at(&["serve", &elsewhere.to_string_lossy(), "--context", "200", "--json"]));
    let answer = json(&at(&["run", "elsewhere", "--greedy", "--max-tokens", "4", "--json", "--prompt", "Hi"]));
    assert_eq!(answer["tokens"], 4);
    let state = mesh.nodes[0].get("/api/v1/state").expect("a state");
    assert_eq!(state["jobs"].as_array().map(Vec::len), Some(1), "the job with the other options has ended: {state}");
    stdout(&at(&["leave"]));
    assert!(mesh.nodes[0].wait(Duration::from_secs(15)).is_some_and(|s| s.success()), "{}", mesh.nodes[0].log());
}

/// Three processes share the model and one is killed while it answers: the text is unchanged and no request is lost.
#[test]
fn the_demo_survives_a_killed_stage() {
    if require(model()).is_none() {
        return;
    }
    let _turn = Turn::take();
    let output = run(&["demo", "--json"]);
    let text = stdout(&output);
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON lines")).collect();
    let killed = lines.iter().position(|line| line["event"] == "kill").expect("a stage was killed");
    let found = lines.iter().position(|line| line["text"].as_str().is_some_and(|text| text.contains("sky")));
    assert!(found.is_some_and(|found| found > killed), "the text continues after the kill: {text}");
    let summary = lines.last().expect("a summary");
    assert_eq!((&summary["nodes"], &summary["requests_lost"]), (&Value::from(3), &Value::from(0)), "{summary}");
    assert_eq!(summary["tokens_equal_solo"], true, "{summary}");
    for figure in ["stall_ms", "tokens_per_s", "solo_tokens_per_s"] {
        assert!(summary[figure].as_f64().is_some_and(|value| value > 0.0), "{figure}: {summary}");
    }
}

/// Stages are killed at random tokens: every answer equals that of one undisturbed node, and none is lost.
#[test]
fn five_kills_lose_no_request_and_no_token() {
    if require(model()).is_none() {
        return;
    }
    let seed = crate::client::seed("five_kills_lose_no_request_and_no_token").to_string();
    let _turn = Turn::take();
    let output = run(&["demo", "--chaos", "--kills", "5", "--seed", &seed, "--json"]);
    let text = stdout(&output);
    let summary: Value = text.lines().last().and_then(|l| serde_json::from_str(l).ok()).expect("a summary");
    eprintln!("{summary}");
    assert_eq!((&summary["kills"], &summary["requests_lost"]), (&Value::from(5), &Value::from(0)), "{summary}");
    assert_eq!(summary["tokens_equal_solo"], true, "{summary}");
    assert!(summary["standby_cost_percent"].is_number(), "{summary}");
    assert_eq!(summary["coordinator_kills"], 1, "{summary}");
    assert!(summary["coordinator_pause_ms_max"].as_f64().is_some_and(|ms| ms < 20_000.0), "{summary}");
}

/// `serve` without a node starts one, which runs until a signal.
#[test]
fn serve_alone_serves_until_a_signal() {
    let Some(model) = require(model()) else { return };
    let mut child = command(&["serve", &model.to_string_lossy(), "--context", "256", "--json", "--device", "cpu"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program runs");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    let served: Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(served["own_node"], true);
    let url = format!("{}/models", served["base_url"].as_str().expect("a URL"));
    let models: Value = ureq::get(&url).call().expect("an answer").body_mut().read_json().expect("JSON");
    assert_eq!(models["data"][0]["id"], served["model"]);
    let pid = rustix::process::Pid::from_raw(child.id().cast_signed()).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
    assert!(child.wait().expect("an end").success());
}
