//! A mixture of experts in a split file: nodes with less than half of its memory each run it, a stage is killed, and the answers are
//! those of one undisturbed node.
use crate::client::{covered_owners, watch};
use crate::harness::{Mesh, Turn, deploy};
use kernels::quant::QuantType;
use kernels_models::weights::Architecture;
use kernels_models::weights::testing::TinyModel;
use rustix::process::Signal;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

const TOKENS: u32 = 96;
/// Part of the model's memory of each node where three of them must work together.
const THIRD: f64 = 0.4;
/// The same where two of four nodes are enough, so that the others are standbys.
const HALF: f64 = 0.6;
/// Time for standbys to fetch their shares, load them and catch up, on a machine with fewer cores than nodes.
const HOT_MAX: Duration = Duration::from_secs(120);
/// Longest acceptable pause for a client; it includes a lease of 340 ms.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Writes a model with 16 experts of which a row uses 4, in three parts; returns the second one. With its 270 MB the fixed memory
/// of a stage matters little.
fn write_parts(folder: &Path) -> PathBuf {
    let model = TinyModel {
        architecture: Architecture::Qwen3Moe,
        quant: QuantType::Q8_0,
        layers: 20,
        width: 512,
        heads: 8,
        ffn: 512,
        experts: Some([16, 4]),
        ..TinyModel::default()
    };
    let mut writer = model.writer();
    writer.text("tokenizer.chat_template", "{% for message in messages %}{{ message.content }}{% endfor %}");
    let path = |number: usize| folder.join(format!("mixture-{number:05}-of-00003.gguf"));
    for (part, number) in writer.split(3).iter().zip(1..) {
        std::fs::write(path(number), part.write()).expect("written");
    }
    path(2)
}

fn formed(model: &Path, nodes: usize, memory: u64) -> Mesh {
    let mut mesh = Mesh::new();
    for i in 0..nodes {
        mesh.start(&format!("n{i}"), Some(memory));
    }
    mesh.wait_members(nodes);
    mesh.deploy(0, model);
    mesh
}

#[test]
fn experts_on_several_nodes_give_the_tokens_of_one() {
    let _turn = Turn::take();
    let folder = tempfile::tempdir().expect("a folder");
    let model = write_parts(folder.path());
    let (bytes, expected) = {
        let mut mesh = Mesh::new();
        mesh.start("solo", None);
        let plan = mesh.nodes[0].post("/api/v1/plan", &deploy(&model)).expect("a plan");
        mesh.deploy(0, &model);
        (plan["stages"][0]["bytes"].as_u64().expect("bytes"), watch(&mesh.nodes[0], &model, TOKENS, |_| {}).tokens)
    };
    let memory = |share: f64| (bytes as f64 * share) as u64;

    let mesh = formed(&model, 3, memory(THIRD));
    assert_eq!(mesh.remote_stages(0).len(), 2, "three stages");
    let view = watch(&mesh.nodes[0], &model, TOKENS, |_| {});
    eprintln!("three stages: {view}");
    assert_eq!(view.tokens, expected);
    drop(mesh);

    let mesh = formed(&model, 4, memory(HALF));
    let hot =
        |state: &Value| state["jobs"][0]["state"] == "ready" && !covered_owners(&mesh.nodes[1..], state).is_empty();
    let state = mesh.nodes[0].wait_state(HOT_MAX, hot).expect("a stage of another node has a current standby");
    let victim = covered_owners(&mesh.nodes[1..], &state)[0] + 1;
    let nodes = &mesh.nodes;
    let view = watch(&nodes[0], &model, TOKENS, |count| {
        if count == TOKENS as usize / 3 {
            nodes[victim].signal(Signal::KILL);
        }
    });
    eprintln!("SIGKILL of n{victim}: {view}");
    assert_eq!(view.tokens, expected);
    assert!(view.longest_pause() < PAUSE_MAX, "{view}");
}
