//! Embeddings on a mesh: the model's GGUF file, marked as one that pools the last token, gives on two nodes the bits of one,
//! also after the loss of a node.
use crate::harness::{Mesh, model, require};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// GGUF's types of metadata values, from its specification.
const U32: u32 = 4;
const TEXT: u32 = 8;
/// GGUF's default alignment of tensors.
const ALIGNMENT: usize = 32;

/// Copies a GGUF file and sets `llama.pooling_type` to 3, the last token. The tensors keep their places relative to the end of
/// the header: what is inserted is a multiple of the alignment.
pub(crate) fn pooled(model: &Path, folder: &Path) -> PathBuf {
    let file = std::fs::read(model).expect("the model file");
    let (magic, rest) = file.split_at(16);
    let (count, rest) = rest.split_at(8);
    let entries = u64::from_le_bytes(count.try_into().expect("eight bytes")) + 2;
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let pooling = [text("llama.pooling_type"), U32.to_le_bytes().to_vec(), 3u32.to_le_bytes().to_vec()].concat();
    let mut filler = [text("general.comment"), TEXT.to_le_bytes().to_vec()].concat();
    let missing = (ALIGNMENT - (pooling.len() + filler.len() + 8) % ALIGNMENT) % ALIGNMENT;
    filler.extend(text(&" ".repeat(missing)));
    let path = folder.join("pooled.gguf");
    std::fs::write(&path, [magic, &entries.to_le_bytes(), &pooling, &filler, rest].concat()).expect("a copy");
    path
}

const TEXTS: [&str; 4] =
    ["Oslo is the capital of Norway.", "The capital of Norway is Oslo.", "fn main() {}", "The quick brown fox"];

fn embeddings(mesh: &Mesh, model: &str) -> Vec<Value> {
    let body = json!({"model": model, "input": TEXTS, "encoding_format": "base64"});
    let answer = mesh.nodes[0].post("/v1/embeddings", &body).expect("embeddings");
    answer["data"].as_array().expect("a list").iter().map(|entry| entry["embedding"].clone()).collect()
}

fn serve(mesh: &Mesh, model: &Path) -> String {
    let options = json!({"int8": true, "context": 512, "sequences": 4});
    let served = mesh.nodes[0].post("/api/v1/deploy", &json!({"model": model, "options": options}));
    served.expect("it is served")["model"].as_str().expect("a name").to_owned()
}

#[test]
fn two_nodes_give_the_embeddings_of_one_also_after_a_loss() {
    let Some(model) = require(model()) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let model = pooled(&model, folder.path());
    let mut alone = Mesh::new();
    alone.start("solo", None);
    let name = serve(&alone, &model);
    let reference = embeddings(&alone, &name);
    assert!(
        reference.iter().all(|row| row.as_str().is_some_and(|text| text.len() == 576 * 4 * 4 / 3)),
        "{reference:?}"
    );
    assert!(reference.windows(2).all(|pair| pair[0] != pair[1]), "each text has its own");
    let refused = alone.nodes[0].post("/v1/completions", &json!({"model": name, "prompt": "Oslo"}));
    assert!(refused.is_err_and(|error| error.to_string().contains("embeddings")), "it generates no text");
    drop(alone);

    let mut mesh = Mesh::new();
    let bytes = mesh.model_bytes(&model);
    for i in 0..3 {
        mesh.start(&format!("n{i}"), Some((bytes as f64 * 0.75) as u64 + (48 << 20)));
    }
    mesh.wait_members(3);
    serve(&mesh, &model);
    assert_eq!(embeddings(&mesh, &name), reference, "on several nodes");
    let placed = |state: &Value| state["jobs"][0]["stages"].as_array().is_some_and(|stages| stages.len() > 1);
    mesh.nodes[0].wait_state(Duration::from_secs(60), placed).expect("several stages");
    mesh.kill_stage_of(0);
    assert_eq!(embeddings(&mesh, &name), reference, "after the loss of a node");
}
