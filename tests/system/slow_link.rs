//! Two nodes with half of a model each, and 20 Mbit/s between them: how long a prompt of 500 tokens takes with rows as
//! they are, and with rows of 4.5 bits per element, which `meshnode gate` allows for SmolLM2. Prints the times:
//! `cargo test --release -p system-tests slow_link -- --nocapture`
//!
//! On few cores SmolLM2 takes longer to compute than to send. A model of wide rows with little to compute shows a link
//! that is the bottleneck, as between faster machines.
use crate::client::solo;
use crate::harness::{CONTEXT, Mesh, Turn, generate, tokens_of};
use kernels::boundary::Codec;
use kernels::quant::QuantType;
use kernels_models::weights::Architecture;
use kernels_models::weights::testing::TinyModel;
use meshnode::cluster::LocalNode;
use serde_json::{Value, json};
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;
use system_tests::relay::{Link, Plane, Random};

const PROMPT: usize = 500;
const TOKENS: u32 = 4;
const _: () = assert!(PROMPT + TOKENS as usize <= CONTEXT as usize);
/// Prompts per encoding and link; the median counts.
const ROUNDS: usize = 3;
const SLOW: Link = Link { bytes_per_second: Some(2_500_000), ..Link::PLAIN };
const CODECS: [Codec; 2] = [Codec::Lossless, Codec::Q4];
/// Rows after the prompt, with those of wrong drafts: at most eight per token.
const AFTER: u64 = 8 * TOKENS as u64;
/// Bytes of a token id in a frame for the first stage.
const ID_BYTES: u64 = 4;
/// Bytes on the link besides rows and a quarter of them: acknowledgements, control messages, tokens.
const BESIDES: u64 = 64 << 10;
/// Longest wait for a placement.
const READY_MAX: Duration = Duration::from_secs(120);

/// A model, and the nodes that it is cut for.
struct Case<'a> {
    name: &'a str,
    model: &'a Path,
    width: usize,
    /// Ids of ordinary tokens.
    ids: Range<usize>,
    /// Memory of each of two nodes: one is too small.
    memory: u64,
}

#[test]
fn a_prompt_over_a_slow_link_needs_fewer_bytes_with_coded_rows() {
    let Some(solo) = solo() else { return };
    compare(&Case {
        name: "SmolLM2-135M",
        model: &solo.model,
        width: 576,
        ids: 1000..41_000,
        memory: solo.memory(0.8),
    });
}

#[test]
fn wide_rows_over_a_slow_link_need_fewer_bytes_when_coded() {
    let _turn = Turn::take();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("wide.gguf");
    // Experts that few rows use make it too large for a node without making it slow.
    let model = TinyModel {
        architecture: Architecture::Qwen3Moe,
        quant: QuantType::Q8_0,
        layers: 4,
        width: 2048,
        heads: 8,
        ffn: 256,
        experts: Some([32, 2]),
        ..TinyModel::default()
    };
    std::fs::write(&path, model.writer().write()).expect("written");
    let memory = (Mesh::new().model_bytes(&path) as f64 * 0.7) as u64;
    compare(&Case { name: "a model of wide rows", model: &path, width: model.width, ids: 3..250, memory });
}

/// A prompt that begins as no other, so that nothing of it is cached.
fn prompt(random: &mut Random, ids: &Range<usize>) -> Vec<u64> {
    (0..PROMPT).map(|_| (ids.start + random.below(ids.len())) as u64).collect()
}

fn ask(mesh: &Mesh, model: &Path, prompt: &[u64]) -> Vec<Value> {
    let request = json!({
        "model": model, "prompt": prompt, "raw": true, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": true,
    });
    generate(&mesh.nodes[0], &request)
}

/// What was measured with one encoding over one link.
struct Measured {
    /// Median time to the first token.
    first_ms: f64,
    /// Least bytes between the nodes during a request, in both directions: a measurement of the link adds to some.
    bytes: u64,
    /// Least bytes of rows and token ids that stages sent to the next one, before compression: after a lost connection they send
    /// some again.
    frame_bytes: u64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} ms to the first token, {} bytes between the nodes", self.first_ms, self.bytes)
    }
}

fn measure(mesh: &Mesh, model: &Path, prompts: &[Vec<u64>], check: impl Fn(&[u64], &[u64])) -> Measured {
    let relay = mesh.relay.as_ref().expect("a relay");
    let (mut times, mut bytes, mut frame_bytes) = (Vec::new(), u64::MAX, u64::MAX);
    for prompt in prompts {
        let (before, frames_before) = (relay.passed_in_all(Plane::Data).bytes, sent(mesh));
        let events = ask(mesh, model, prompt);
        bytes = bytes.min(relay.passed_in_all(Plane::Data).bytes - before);
        frame_bytes = frame_bytes.min(sent(mesh) - frames_before);
        let end = events.last().expect("an end");
        assert_eq!(end["cached_tokens"], 0, "a fresh prompt: {end}");
        times.push(end["first_token_ms"].as_f64().unwrap_or_else(|| panic!("an answer: {end}")));
        check(prompt, &tokens_of(&events));
    }
    times.sort_by(f64::total_cmp);
    Measured { first_ms: times[times.len() / 2], bytes, frame_bytes }
}

/// Bytes of frames that the stages of all nodes sent so far to the next one.
fn sent(mesh: &Mesh) -> u64 {
    let of = |node: &LocalNode| node.get("/api/v1/state").expect("a state")["boundary"]["stage_bytes"].as_u64();
    mesh.nodes.iter().map(|node| of(node).expect("a counter")).sum()
}

/// Serves the model in two stages with this encoding of the rows between them.
fn served(mesh: &Mesh, model: &Path, encoding: &str) {
    let options = json!({"int8": true, "context": CONTEXT, "sequences": 1, "boundary": encoding});
    mesh.nodes[0].post("/api/v1/deploy", &json!({"model": model, "options": options})).expect("served");
    let placed = |state: &Value| {
        let job = &state["jobs"][0];
        job["state"] == "ready" && job["boundary"] == encoding
    };
    let state = mesh.nodes[0].wait_state(READY_MAX, placed).expect("ready");
    assert_eq!(state["jobs"][0]["stages"].as_array().map(Vec::len), Some(2), "{state}");
}

fn compare(case: &Case) {
    let model = case.model;
    let mut random = Random(20);
    let mut prompts = || -> Vec<Vec<u64>> { (0..ROUNDS).map(|_| prompt(&mut random, &case.ids)).collect() };
    // Of each encoding, those over a fast link and those over a slow one.
    let [exact, coded] = [[prompts(), prompts()], [prompts(), prompts()]];
    let expected: Vec<(Vec<u64>, Vec<u64>)> = {
        let mut mesh = Mesh::new();
        mesh.solo(model);
        let answer = |prompt: &Vec<u64>| (prompt.clone(), tokens_of(&ask(&mesh, model, prompt)));
        exact.iter().flatten().map(answer).collect()
    };
    let check = |codec: Codec, prompt: &[u64], tokens: &[u64]| {
        let found = expected.iter().find(|(asked, _)| codec == Codec::Lossless && asked == prompt);
        match found {
            Some((_, expected)) => assert_eq!(tokens, expected, "lossless rows give the tokens of one node"),
            None => assert_eq!(tokens.len(), TOKENS as usize),
        }
    };

    let mut mesh = Mesh::relayed(20);
    // Each node has the file, so that only rows pass between them.
    mesh.give_model("n1", model);
    ["n0", "n1"].into_iter().for_each(|name| mesh.start(name, Some(case.memory)));
    mesh.wait_members(2);
    let mut measured = Vec::new();
    for (codec, prompts) in CODECS.into_iter().zip([exact, coded]) {
        let row_bytes = codec.row_bytes(case.width).expect("a width that stages have") as u64;
        mesh.relay.as_ref().expect("a relay").links(Link::PLAIN);
        served(&mesh, model, codec.name());
        for (link, prompts) in [Link::PLAIN, SLOW].into_iter().zip(prompts) {
            mesh.relay.as_ref().expect("a relay").links(link);
            let one = measure(&mesh, model, &prompts, |prompt, tokens| check(codec, prompt, tokens));
            let rate = link.bytes_per_second.map_or("a fast link".to_owned(), |b| format!("{} Mbit/s", b / 125_000));
            eprintln!("{}, {} over {rate}: {one}", case.name, codec.name());
            let rows = PROMPT as u64 * row_bytes;
            let frames = rows..rows + AFTER * row_bytes + ID_BYTES * (PROMPT as u64 + AFTER);
            let found = one.frame_bytes;
            // Over a slow link, stages may send again what has not arrived in time.
            let expected = frames.contains(&found) || link.bytes_per_second.is_some() && found >= rows;
            assert!(expected, "{codec:?}: {found} bytes of frames, expected {frames:?}");
            let most = rows * 5 / 4 + BESIDES;
            assert!(one.bytes <= most, "{codec:?}: {} bytes of {PROMPT} rows, at most {most}", one.bytes);
            measured.push(one);
        }
    }
    let [exact_fast, exact, coded_fast, coded] = &measured[..] else { panic!("two encodings, two links") };
    // Lossless rows may be compressed, by a tenth or so; encoded ones take a seventh.
    assert!(exact.bytes > 4 * coded.bytes, "{} bytes as they are, {} encoded", exact.bytes, coded.bytes);
    let link_ms = |slow: &Measured, fast: &Measured| slow.first_ms - fast.first_ms;
    eprintln!(
        "{}: {PROMPT} tokens over 20 Mbit/s take {:.0} ms lossless and {:.0} ms as q4, {:.2} times as fast; {:.0} and {:.0} ms \
         longer than over a fast link",
        case.name,
        exact.first_ms,
        coded.first_ms,
        exact.first_ms / coded.first_ms,
        link_ms(exact, exact_fast),
        link_ms(coded, coded_fast),
    );
}
