//! Two nodes with half of a model each, and 20 Mbit/s between them: how long a prompt of 500 tokens takes with rows as they are,
//! and with rows of 4.5 bits per element, the encoding that `meshnode gate` allows for this model. Prints the times:
//! `cargo test --release -p system-tests slow_link -- --nocapture`
use crate::client::solo;
use crate::harness::{CONTEXT, Mesh, generate, tokens_of};
use meshnode::cluster::LocalNode;
use serde_json::{Value, json};
use std::fmt;
use std::path::Path;
use std::time::Duration;
use system_tests::relay::{Link, Plane, Random};

const PROMPT: usize = 500;
const TOKENS: u32 = 4;
const _: () = assert!(PROMPT + TOKENS as usize <= CONTEXT as usize);
/// Prompts per encoding and link; the median counts.
const ROUNDS: usize = 3;
/// Share of the model's memory that a node has: see [`crate::client::Solo::memory`].
const SHARE: f64 = 0.8;
const SLOW: Link = Link { bytes_per_second: Some(2_500_000), ..Link::PLAIN };
/// Bytes of the model's rows.
const ROW_BYTES: [(&str, u64); 2] = [("lossless", 2304), ("q4", 323)];
/// Rows after the prompt, with those of wrong drafts: at most eight per token.
const AFTER: u64 = 8 * TOKENS as u64;
/// Bytes of a token id in a frame for the first stage.
const ID_BYTES: u64 = 4;
/// Bytes on the link besides rows and a quarter of them: acknowledgements, control messages, tokens.
const BESIDES: u64 = 64 << 10;
/// Longest wait for a placement.
const READY_MAX: Duration = Duration::from_secs(120);

/// A prompt that begins as no other, so that nothing of it is cached.
fn prompt(random: &mut Random) -> Vec<u64> {
    // Ordinary tokens of the vocabulary of 49,152.
    (0..PROMPT).map(|_| 1000 + random.below(40_000) as u64).collect()
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
    /// Bytes of rows and token ids that stages sent to the next one, before compression.
    frame_bytes: u64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} ms to the first token, {} bytes between the nodes", self.first_ms, self.bytes)
    }
}

fn measure(mesh: &Mesh, model: &Path, prompts: &[Vec<u64>], check: impl Fn(&[u64], Vec<u64>)) -> Measured {
    let relay = mesh.relay.as_ref().expect("a relay");
    let (mut times, mut bytes, mut frame_bytes) = (Vec::new(), u64::MAX, 0);
    for prompt in prompts {
        let (before, frames_before) = (relay.passed_in_all(Plane::Data).bytes, sent(mesh));
        let events = ask(mesh, model, prompt);
        bytes = bytes.min(relay.passed_in_all(Plane::Data).bytes - before);
        frame_bytes = sent(mesh) - frames_before;
        let end = events.last().expect("an end");
        assert_eq!(end["cached_tokens"], 0, "a fresh prompt: {end}");
        times.push(end["first_token_ms"].as_f64().unwrap_or_else(|| panic!("an answer: {end}")));
        check(prompt, tokens_of(&events));
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
        let jobs = state["jobs"].as_array().map_or(&[][..], Vec::as_slice);
        jobs.len() == 1 && jobs[0]["state"] == "ready" && jobs[0]["boundary"] == encoding
    };
    let state = mesh.nodes[0].wait_state(READY_MAX, placed).expect("ready");
    assert_eq!(state["jobs"][0]["stages"].as_array().map(Vec::len), Some(2), "{state}");
}

#[test]
fn a_prompt_over_a_slow_link_waits_for_the_bytes_that_its_encoding_needs() {
    let Some(solo) = solo() else { return };
    let model = &solo.model;
    let mut random = Random(20);
    let mut prompts = || -> Vec<Vec<u64>> { (0..ROUNDS).map(|_| prompt(&mut random)).collect() };
    // Of each encoding, those over a fast link and those over a slow one.
    let [exact, coded] = [0, 1].map(|_| [prompts(), prompts()]);
    let expected: Vec<(Vec<u64>, Vec<u64>)> = {
        let mut mesh = Mesh::new();
        mesh.solo(model);
        let answer = |prompt: &Vec<u64>| (prompt.clone(), tokens_of(&ask(&mesh, model, prompt)));
        exact.as_flattened().iter().map(answer).collect()
    };
    let same = |prompt: &[u64], tokens: Vec<u64>| {
        let found = expected.iter().find(|(asked, _)| asked == prompt).map(|(_, tokens)| tokens);
        assert_eq!(Some(&tokens), found, "lossless rows give the tokens of one node");
    };
    let complete = |_: &[u64], tokens: Vec<u64>| assert_eq!(tokens.len(), TOKENS as usize);

    let mut mesh = Mesh::relayed(20);
    // Each node has the file, so that only rows pass between them.
    mesh.give_model("n1", model);
    ["n0", "n1"].into_iter().for_each(|name| mesh.start(name, Some(solo.memory(SHARE))));
    mesh.wait_members(2);
    let mut measured = Vec::new();
    for ((encoding, row_bytes), prompts) in ROW_BYTES.into_iter().zip([exact, coded]) {
        mesh.relay.as_ref().expect("a relay").links(Link::PLAIN);
        served(&mesh, model, encoding);
        for (link, prompts) in [Link::PLAIN, SLOW].into_iter().zip(prompts) {
            mesh.relay.as_ref().expect("a relay").links(link);
            let one = match encoding {
                "lossless" => measure(&mesh, model, &prompts, same),
                _ => measure(&mesh, model, &prompts, complete),
            };
            let rate = link.bytes_per_second.map_or("a fast link".to_owned(), |b| format!("{} Mbit/s", b / 125_000));
            eprintln!("{encoding} over {rate}: {one}");
            let rows = PROMPT as u64 * row_bytes;
            let frames = rows..rows + AFTER * row_bytes + ID_BYTES * (PROMPT as u64 + AFTER);
            assert!(
                frames.contains(&one.frame_bytes),
                "{encoding}: {} bytes of frames, expected {frames:?}",
                one.frame_bytes
            );
            let most = rows * 5 / 4 + BESIDES;
            assert!(one.bytes <= most, "{encoding}: {} bytes of {PROMPT} rows, at most {most}", one.bytes);
            measured.push(one);
        }
    }
    let [exact_fast, exact, coded_fast, coded] = &measured[..] else { unreachable!("two encodings, two links") };
    // Lossless rows may be compressed, by a tenth or so.
    let least = PROMPT as u64 * ROW_BYTES[0].1 * 3 / 4;
    assert!(exact.bytes >= least, "lossless: {} bytes of {PROMPT} rows, at least {least}", exact.bytes);
    assert!(exact.bytes > 4 * coded.bytes, "{} bytes as they are, {} encoded", exact.bytes, coded.bytes);
    let link_ms = |slow: &Measured, fast: &Measured| slow.first_ms - fast.first_ms;
    eprintln!(
        "{PROMPT} tokens over 20 Mbit/s: {:.0} ms lossless, {:.0} ms as q4, {:.2} times as fast; the link's part {:.0} and {:.0} ms",
        exact.first_ms,
        coded.first_ms,
        exact.first_ms / coded.first_ms,
        link_ms(exact, exact_fast),
        link_ms(coded, coded_fast),
    );
}
