//! Many requests of mixed lengths that arrive at random, well below what the mesh can do: no request fails, the nodes' memory
//! stays flat, and the waiting times are printed. For the full length:
//! `MESHNODE_REQUESTS=1000 cargo test --release --workspace requests_that_arrive -- --ignored --nocapture`
//! `MESHNODE_THREADS=4` gives each node 4 threads instead of one: an hour of requests takes a few minutes.
use crate::client::seed;
use crate::harness::{Mesh, generate, model, require, tokens_of};
use meshnode::cluster::LocalNode;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use system_tests::relay::Random;

/// Requests of a run without `MESHNODE_REQUESTS`.
const REQUESTS: usize = 100;
/// Requests that measure what the mesh can do, and how many of them run at once. It is measured until one of the clients finds no
/// request left: after that, a few long answers would count as all that the mesh can do.
const SATURATING: usize = 64;
const SATURATING_AT_ONCE: usize = 16;
/// Rate of the arrivals, as a share of what the mesh can do.
const LOAD: f64 = 0.6;
/// Median tokens of prompts and answers, and the deviation of their logarithms.
const PROMPT: (f64, f64) = (120.0, 0.8);
const ANSWER: (f64, f64) = (150.0, 0.6);
const CONTEXT: u64 = 2048;
/// Whole contexts in the cache.
const SEQUENCES: u64 = 8;
const NODES: usize = 3;
/// How much a node's memory may grow from the first tenth of the requests to the last one.
const GROWTH_MAX: u64 = 32 << 20;

/// Lengths of a request, and the seed of its tokens.
#[derive(Clone, Copy)]
struct Draw {
    prompt: u64,
    answer: u64,
    seed: u64,
}

/// The logarithm of a number above 0, to 1.
fn log_of_one(random: &mut Random) -> f64 {
    (1.0 - random.fraction()).ln()
}

/// A log-normal length, by the method of Box and Muller.
fn length(random: &mut Random, (median, deviation): (f64, f64), most: u64) -> u64 {
    let normal = (-2.0 * log_of_one(random)).sqrt() * (std::f64::consts::TAU * random.fraction()).cos();
    ((median * (deviation * normal).exp()) as u64).clamp(2, most)
}

fn draw(random: &mut Random) -> Draw {
    let (prompt, answer) = (length(random, PROMPT, CONTEXT / 2), length(random, ANSWER, CONTEXT / 2 - 1));
    Draw { prompt, answer, seed: random.bits() >> 32 }
}

fn body(name: &str, Draw { prompt, answer, seed }: Draw) -> Value {
    let text: Vec<u64> = (0..prompt).map(|at| 1000 + (at * 37 + seed * 211) % 20_000).collect();
    json!({
        "model": name, "prompt": text, "raw": true, "max_tokens": answer, "temperature": 0.8, "seed": seed,
        "ignore_eos": true,
    })
}

/// Time to the first token, and the times between tokens.
#[derive(Default)]
struct Times {
    first: Vec<Duration>,
    gaps: Vec<Duration>,
}

/// Sends a request and reads its answer to the end. `tokens` counts what arrives.
fn request(node: &LocalNode, name: &str, draw: Draw, times: &Mutex<Times>, tokens: &AtomicUsize) {
    let mut last = Instant::now();
    let (mut own, mut begun) = (Times::default(), false);
    for line in node.post_lines("/api/v1/generate", &body(name, draw)).expect("a stream") {
        let event: Value = serde_json::from_str(&line.expect("the stream is intact")).expect("JSON lines");
        assert!(event["error"].is_null(), "{event}");
        if event["token"].is_u64() {
            let (now, before) = (Instant::now(), last);
            last = now;
            tokens.fetch_add(1, Ordering::Relaxed);
            if std::mem::replace(&mut begun, true) { own.gaps.push(now - before) } else { own.first.push(now - before) }
        }
    }
    assert_eq!((own.first.len() + own.gaps.len()) as u64, draw.answer, "all tokens of the answer");
    let mut times = times.lock();
    times.first.extend(own.first);
    times.gaps.extend(own.gaps);
}

/// Resident memory of each node, bytes.
fn memory(nodes: &[LocalNode]) -> Vec<u64> {
    let resident = |node: &LocalNode| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", node.pid())).expect("a status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("resident memory");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
    };
    nodes.iter().map(resident).collect()
}

/// The value below which this share of the times is, in ms.
fn share(times: &mut [Duration], share: f64) -> f64 {
    times.sort_unstable();
    times.get((times.len() as f64 * share) as usize).map_or(0.0, |time| time.as_secs_f64() * 1e3)
}

#[test]
#[ignore = "minutes: run it when batching, admission or the cache changes"]
fn requests_that_arrive_at_random_are_answered_in_flat_memory() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    let bytes = mesh.model_bytes(&model);
    for i in 0..NODES {
        // Two nodes fit the model and its cache, one does not; the third has room for a standby.
        mesh.start(&format!("n{i}"), Some((bytes as f64 * 0.8) as u64 + (300 << 20)));
    }
    mesh.wait_members(NODES);
    let options = json!({"int8": true, "context": CONTEXT, "sequences": SEQUENCES});
    let served =
        mesh.nodes[0].post("/api/v1/deploy", &json!({"model": model, "options": options})).expect("it is served");
    let name = served["model"].as_str().expect("a name").to_owned();
    assert!(mesh.remote_stages(0).len() == 1, "two stages");
    let (nodes, name) = (&mesh.nodes, name.as_str());
    let mut random = Random(seed("requests_that_arrive_at_random_are_answered_in_flat_memory"));
    let warm = Draw { prompt: 16, answer: 16, seed: 1 };
    assert_eq!(tokens_of(&generate(&nodes[0], &body(name, warm))).len(), 16);

    // What the mesh can do: each client sends its next request when it has its answer.
    let all: Vec<Draw> = (0..SATURATING).map(|_| draw(&mut random)).collect();
    let (next, tokens, times, busy) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::default(), Mutex::new(None));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..SATURATING_AT_ONCE {
            scope.spawn(|| {
                while let Some(draw) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    request(&nodes[0], name, *draw, &times, &tokens);
                }
                let rate = || tokens.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64();
                busy.lock().get_or_insert_with(rate);
            });
        }
    });
    let rate: f64 = busy.into_inner().expect("a client ended");
    let answer = all.iter().map(|draw| draw.answer).sum::<u64>() as f64 / SATURATING as f64;
    let saturated = rate / answer;
    eprintln!("saturated: {saturated:.2} requests/s of {answer:.0} tokens, {rate:.0} tokens/s");

    let count = std::env::var("MESHNODE_REQUESTS").map_or(REQUESTS, |text| text.parse().expect("a number of requests"));
    let (times, tokens): (Mutex<Times>, _) = (Mutex::default(), AtomicUsize::new(0));
    let (begin, mut at, mut first) = (Instant::now(), Duration::ZERO, Vec::new());
    std::thread::scope(|scope| {
        for number in 0..count {
            at += Duration::from_secs_f64(-log_of_one(&mut random) / (LOAD * saturated));
            let draw = draw(&mut random);
            std::thread::sleep(at.saturating_sub(begin.elapsed()));
            let (times, tokens) = (&times, &tokens);
            // Any node takes requests.
            scope.spawn(move || request(&nodes[number % NODES], name, draw, times, tokens));
            if number == count / 10 {
                first = memory(nodes);
            }
        }
    });
    let (mut times, seconds, last) = (times.into_inner(), begin.elapsed().as_secs_f64(), memory(nodes));
    assert_eq!(times.first.len(), count, "every request was answered");
    eprintln!(
        "{count} requests in {seconds:.0} s, {:.0} tokens/s; first token {:.0} ms (p50), {:.0} ms (p95); between tokens {:.1} ms \
         (p50), {:.1} ms (p95), {:.0} ms (longest)",
        tokens.into_inner() as f64 / seconds,
        share(&mut times.first, 0.5),
        share(&mut times.first, 0.95),
        share(&mut times.gaps, 0.5),
        share(&mut times.gaps, 0.95),
        times.gaps.iter().max().map_or(0.0, |gap| gap.as_secs_f64() * 1e3)
    );
    eprintln!(
        "resident memory in MiB: {:?} after a tenth, {:?} at the end",
        first.iter().map(|b| b >> 20).collect::<Vec<_>>(),
        last.iter().map(|b| b >> 20).collect::<Vec<_>>()
    );
    for (before, after) in first.iter().zip(&last) {
        assert!(*after <= before + GROWTH_MAX, "{first:?} became {last:?}");
    }
}
