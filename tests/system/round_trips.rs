//! Decoding over a link with a long round trip, with and without draft tokens: the same tokens, and how long each takes. Prints:
//! `cargo test --release -p system-tests round_trips -- --ignored --nocapture`
use crate::client::solo;
use crate::drafts::edit;
use crate::harness::Mesh;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use system_tests::relay::Link;

const TOKENS: u32 = 160;
const DRAFTS: u8 = 7;
/// Answers of each kind; the median counts.
const ROUNDS: usize = 3;
/// The first one shows what two nodes and the relay cost without it.
const ROUND_TRIPS: [Duration; 3] = [Duration::ZERO, Duration::from_millis(20), Duration::from_millis(60)];

/// The tokens of an answer, its median step, and the mean time per token after the first, in ms.
fn answer(mesh: &Mesh, model: &Path, temperature: f64, drafts: u8) -> (Vec<u64>, f64, f64) {
    let request = json!({
        "model": model, "prompt": edit(), "raw": true, "max_tokens": TOKENS, "temperature": temperature, "seed": 5,
        "ignore_eos": true, "draft_tokens": drafts,
    });
    let lines = mesh.nodes[0].post_lines("/api/v1/generate", &request).expect("a stream");
    let (mut tokens, mut times) = (Vec::new(), Vec::new());
    for line in lines {
        let event: Value = serde_json::from_str(&line.expect("an intact stream")).expect("JSON lines");
        if let Some(token) = event["token"].as_u64() {
            tokens.push(token);
            times.push(Instant::now());
        }
    }
    assert_eq!(tokens.len(), TOKENS as usize);
    let steps = times.windows(2).map(|pair| ms(pair[1] - pair[0])).collect();
    let whole = ms(times[times.len() - 1] - times[0]) / (times.len() - 1) as f64;
    (tokens, median(steps), whole)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

#[test]
#[ignore = "a minute: run it when drafts or the path of a token change"]
fn long_round_trips_change_no_token_and_drafts_save_most_of_them() {
    let Some(solo) = solo() else { return };
    let (model, options) = (&solo.model, json!({"int8": true, "context": 2048, "sequences": 1}));
    let serve = |mesh: &Mesh| {
        mesh.nodes[0].post("/api/v1/deploy", &json!({"model": model, "options": options})).expect("served");
    };
    let mut alone = Mesh::new();
    alone.start("solo", None);
    serve(&alone);
    let expected = [0.0, 1.0].map(|temperature| answer(&alone, model, temperature, 0));
    let step = median((0..ROUNDS).map(|_| answer(&alone, model, 0.0, 0).1).collect());
    drop(alone);
    eprintln!("one node: {step:.1} ms per token");

    let mut mesh = Mesh::relayed(20);
    mesh.give_model("n1", model);
    // One node is too small for the model and its cache, two are enough.
    ["n0", "n1"].into_iter().for_each(|name| mesh.start(name, Some(solo.memory(0.8) + (48 << 20))));
    mesh.wait_members(2);
    serve(&mesh);
    assert_eq!(mesh.remote_stages(0).len(), 1, "two stages");
    for round_trip in ROUND_TRIPS {
        let link = Link { latency: round_trip / 2, ..Link::PLAIN };
        mesh.relay.as_ref().expect("a relay").links(link);
        let (mut plain, mut drafted) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            for (temperature, (tokens, ..)) in [0.0, 1.0].into_iter().zip(&expected) {
                let without = answer(&mesh, model, temperature, 0);
                let with = answer(&mesh, model, temperature, DRAFTS);
                assert_eq!((&without.0, &with.0), (tokens, tokens), "at {temperature}");
                plain.push(without.1);
                if temperature == 0.0 {
                    drafted.push(with.2);
                }
            }
        }
        let (rtt, plain, drafted) = (ms(round_trip), median(plain), median(drafted));
        eprintln!(
            "round trip of {rtt:.0} ms: {plain:.1} ms per token without drafts, one node and the round trip and {:.1} ms; {drafted:.1} \
             ms per token with drafts",
            plain - step - rtt,
        );
    }
}
