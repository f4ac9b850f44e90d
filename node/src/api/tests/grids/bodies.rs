//! Tests of the bodies of submissions and plans: missing and wrong fields, sizes, invalid jobs, forbidden folders.
use super::*;
use kernels_simulations::SIMULATION_MAX;
use std::path::{Path, PathBuf};

impl Grids {
    /// Status and error of a submission.
    fn rejected(&self, body: Value) -> (u16, Value) {
        let (status, answer) = self.server.post("/api/v1/grids", body);
        (status, answer["error"].clone())
    }

    /// Submits a simulation with these further fields.
    fn submit_with(&self, fields: Value) -> (u16, Value) {
        let mut body = json!({"simulation": packed()});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        self.server.post("/api/v1/grids", body)
    }

    fn results(&self) -> PathBuf {
        self.home.path().canonicalize().unwrap().join("results")
    }

    fn assert_idle(&self) {
        assert!(self.bench.inputs().is_empty() && self.list().is_empty(), "no job was begun");
    }
}

/// The folder of a submission's outputs, as a field of a body.
fn out(path: &Path) -> Value {
    json!(path.to_str().unwrap())
}

/// A job file as it travels between nodes, valid or not.
fn pack(text: &str) -> String {
    let name = b"job.toml";
    let mut bytes = b"meshsim\x01".to_vec();
    for part in [name.as_slice(), text.as_bytes()] {
        bytes.extend((part.len() as u32).to_le_bytes());
        bytes.extend(part);
    }
    BASE64.encode(&bytes)
}

#[test]
fn a_wrong_field_is_named_and_starts_no_job() {
    let grids = grids();
    let simulation = packed();
    for (body, param, words) in [
        (json!({}), "simulation", "missing"),
        (json!({"out": "a"}), "simulation", "missing"),
        (json!({"simulation": null}), "simulation", "a string"),
        (json!({"simulation": 5}), "simulation", "a string, not 5"),
        (json!({"simulation": {"grid": [8, 8]}}), "simulation", "not an object"),
        (json!({"simulation": "%%%"}), "simulation", "base64"),
        (json!({"simulation": ""}), "simulation", "magic number"),
        (json!({"simulation": BASE64.encode(b"name = 'a'")}), "simulation", "magic number"),
        (json!({"simulation": simulation, "out": 7}), "out", "a string"),
        (json!({"simulation": simulation, "out": ["a"]}), "out", "a string"),
        (json!({"simulation": simulation, "claim": true}), "claim", "a string"),
        (json!({"simulation": simulation, "resume": "yes"}), "resume", "true or false"),
        (json!({"simulation": simulation, "overwrite": 1}), "overwrite", "true or false"),
        (json!({"simulation": simulation, "resume": true, "overwrite": true}), "overwrite", "found both"),
        (json!({"simulation": simulation, "resume": true}), "out", "--out"),
    ] {
        let shown = body.to_string();
        let (status, error) = grids.rejected(body);
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{shown} gave {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{shown} gave {error}");
    }
    grids.assert_idle();
}

#[test]
fn null_is_the_same_as_a_missing_field() {
    let grids = grids();
    let (status, answer) = grids.submit_with(json!({"out": null, "claim": null}));
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn an_invalid_job_is_rejected_with_its_place() {
    let grids = grids();
    for (text, words) in [
        ("name = \"a\"\nsteps = = 9\n", "line 2"),
        ("name = \"a\"\nsteps = 9\n", "grid"),
        ("name = \"a\"\nsteps = 9\n[grid]\nsize = [8]\n[rule]\nname = \"heat\"\nrate = 0.1\n", "line 4"),
        ("name = \"a\"\nsteps = 9\n[grid]\nsize = [8, 8]\n[rule]\nname = \"cold\"\n", "line 6"),
        ("name = \"a\"\nsteps = 9\ntypo = 1\n[grid]\nsize = [8, 8]\n[rule]\nname = \"life\"\n", "typo"),
    ] {
        let (status, error) = grids.rejected(json!({"simulation": pack(text)}));
        assert_eq!((status, &error["param"]), (400, &json!("simulation")), "{text:?} gave {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{text:?} gave {error}");
    }
    let sound = "name = \"a\"\nsteps = 9\n[grid]\nsize = [64, 8]\n[rule]\nname = \"life\"\n";
    grids.assert_idle();
    let (status, answer) = grids.server.post("/api/v1/grids", json!({"simulation": pack(sound)}));
    assert_eq!(status, 200, "the test packs as the program does: {answer}");
}

#[test]
fn a_job_of_another_version_is_rejected() {
    let grids = grids();
    let mut bytes = heat(100).to_bytes();
    bytes[7] += 1;
    let (status, error) = grids.rejected(json!({"simulation": BASE64.encode(&bytes)}));
    assert!(status == 400 && error["message"].as_str().unwrap().contains("update both nodes"), "{error}");
    let bytes = heat(100).to_bytes();
    for length in [8, 20, bytes.len() - 1] {
        let (status, error) = grids.rejected(json!({"simulation": BASE64.encode(&bytes[..length])}));
        assert_eq!(status, 400, "truncated at {length}: {error}");
    }
    grids.assert_idle();
}

#[test]
fn bodies_that_are_no_json_objects_are_rejected() {
    let grids = grids();
    for (body, expected) in [("{\"simulation\": ", 400), ("[]", 400), ("\"text\"", 400), ("", 400)] {
        assert_eq!(grids.server.call("POST /api/v1/grids", body).0, expected, "{body}");
    }
    let body = json!({"simulation": packed()}).to_string();
    let (status, _, text) = grids.server.call("POST /api/v1/grids\r\nContent-Type: application/toml\r\n", &body);
    assert_eq!(status, 415, "{text}");
    grids.assert_idle();
}

#[test]
fn a_body_larger_than_the_largest_simulation_is_rejected() {
    let grids = grids();
    let most = SIMULATION_MAX.div_ceil(3) * 4 + (64 << 10);
    let (start, end) = ("{\"simulation\":\"", "\"}");
    let body = format!("{start}{}{end}", "A".repeat(most));
    let (status, _, text) = grids.server.call("POST /api/v1/grids", &body);
    assert!(status == 413 && text.contains("body_too_large"), "{status} {text}");
    grids.assert_idle();
}

#[test]
fn a_large_body_is_accepted() {
    let grids = grids();
    let (status, answer) = grids.submit_with(json!({"padding": "x".repeat(BODY_BYTES_MAX)}));
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = grids.submit_with(json!({"resume": "yes", "padding": "x".repeat(BODY_BYTES_MAX)}));
    assert_eq!(status, 400, "its fields have types too: {answer}");
}

#[test]
fn outputs_go_below_the_nodes_folders() {
    let grids = grids();
    let (status, answer) = grids.submit_with(json!({"out": "plate/1"}));
    assert_eq!(status, 200, "{answer}");
    assert!(grids.home.path().join("data/outputs/plate/1").is_dir());
    let place = grids.results().join("2");
    let (status, answer) = grids.submit_with(json!({"out": out(&place)}));
    assert_eq!(status, 200, "{answer}");
    assert!(place.is_dir());
    let Some(run) = grids.report(answer["job"].as_str().unwrap()).run().cloned() else { panic!("a run") };
    assert_eq!(run.out.as_deref(), place.to_str());
}

#[test]
fn outputs_go_nowhere_else() {
    let grids = grids();
    let home = grids.home.path().canonicalize().unwrap();
    for place in [home.join("elsewhere"), home.join("results"), home.join("data/store"), PathBuf::from("/")] {
        let (status, answer) = grids.submit_with(json!({"out": out(&place)}));
        let error = &answer["error"];
        assert_eq!((status, &error["param"]), (400, &json!("out")), "{} gave {answer}", place.display());
        assert!(error["message"].as_str().unwrap().contains("--output-dir"), "{error}");
    }
    for place in ["", "..", "../elsewhere", "plate/../../../elsewhere"] {
        let (status, answer) = grids.submit_with(json!({"out": place}));
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("out")), "{place} gave {answer}");
    }
    assert!(!home.join("elsewhere").exists() && !home.join("data/store").exists());
    grids.assert_idle();
}

#[test]
fn a_claim_must_be_a_file_in_the_folder() {
    let grids = grids();
    let place = grids.home.path().canonicalize().unwrap().join("mine");
    std::fs::create_dir(&place).unwrap();
    let absent = format!(".meshnode-claim-{}", "a".repeat(32));
    for claim in ["notes.txt", "../results/x", absent.as_str()] {
        let (status, answer) = grids.submit_with(json!({"out": out(&place), "claim": claim}));
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("out")), "{claim} gave {answer}");
    }
    grids.assert_idle();
    std::fs::write(place.join(&absent), "").unwrap();
    let (status, answer) = grids.submit_with(json!({"out": out(&place), "claim": absent}));
    assert_eq!(status, 200, "{answer}");
    assert!(!place.join(&absent).exists(), "a claim holds once");
}

#[test]
fn a_folder_with_other_files_is_rejected_untouched() {
    let grids = grids();
    let place = grids.results().join("old");
    std::fs::create_dir(&place).unwrap();
    std::fs::write(place.join("notes.txt"), "mine").unwrap();
    for extra in [json!({}), json!({"resume": true}), json!({"overwrite": true})] {
        let mut fields = json!({"out": out(&place)});
        fields.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let (status, answer) = grids.submit_with(fields);
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("out")), "{extra} gave {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("notes.txt"), "{answer}");
    }
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1);
    grids.assert_idle();
}

#[test]
fn a_folder_in_use_is_rejected_with_the_job_that_uses_it() {
    let grids = grids();
    let fields = || json!({"out": out(Path::new("shared"))});
    let (_, first) = grids.submit_with(fields());
    let (status, answer) = grids.submit_with(fields());
    assert_eq!(status, 400, "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains(first["job"].as_str().unwrap()), "{message}");
    assert_eq!(grids.list().len(), 1);
}

#[test]
fn a_run_without_a_checkpoint_cannot_be_resumed() {
    let grids = grids();
    let (status, answer) = grids.submit_with(json!({"out": "fresh", "resume": true}));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("out")), "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("no checkpoint"), "{answer}");
    grids.assert_idle();
}

#[test]
fn a_plan_needs_a_valid_job_and_begins_none() {
    let grids = grids();
    for body in [json!({}), json!({"simulation": "%%%"}), json!({"simulation": pack("steps = 1")})] {
        let (status, answer) = grids.server.post("/api/v1/grids/plan", body.clone());
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("simulation")), "{body} gave {answer}");
    }
    // This engine has no planner: the request reaches it, also without the key.
    let body = json!({"simulation": packed()}).to_string();
    let (status, _, text) = grids.server.call(&format!("POST /api/v1/grids/plan\r\n{NO_KEY}"), &body);
    assert!(status == 404 && text.contains("runs no simulations"), "{status} {text}");
    grids.assert_idle();
}
