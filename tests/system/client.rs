//! A generation as the client sees it: the tokens, each exactly once, and the delays between them.
use crate::harness::{CONTEXT, Mesh, Turn, deploy, greedy, model, require};
use meshnode::cluster::LocalNode;
use serde_json::Value;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A client that receives nothing for this long considers the mesh stalled.
const HANG: Duration = Duration::from_secs(60);

/// The reference answer of an undisturbed node.
pub(crate) struct Solo {
    pub(crate) model: PathBuf,
    /// Memory of the model on one node, in bytes.
    pub(crate) bytes: u64,
    /// The tokens of the longest answer.
    tokens: Vec<u64>,
}

/// Tokens of the longest answer: prompt and answer together fit the context.
const TOKENS_MAX: u32 = 200;
const _: () = assert!(TOKENS_MAX + 64 < CONTEXT);

impl Solo {
    /// The first `count` tokens of the answer.
    pub(crate) fn tokens(&self, count: u32) -> &[u64] {
        &self.tokens[..count as usize]
    }

    /// Memory of a node that fits this share of the model. Both of two stages hold the shared embedding: with 0.8, one
    /// node is too small and two are enough.
    pub(crate) fn memory(&self, share: f64) -> u64 {
        (self.bytes as f64 * share) as u64
    }
}

/// The reference, generated once for all tests of this binary. `None` (or a failure, if required) without the model.
pub(crate) fn solo() -> Option<&'static Solo> {
    static SOLO: OnceLock<Option<Solo>> = OnceLock::new();
    // Taken before the cell, to keep the lock order: a test that holds the turn may be waiting for the cell.
    let _turn = Turn::take();
    let solo = SOLO.get_or_init(|| {
        let model = require(model())?;
        let mut mesh = Mesh::new();
        mesh.start("solo", None);
        let plan = mesh.nodes[0].post("/api/v1/plan", &deploy(&model)).expect("a plan");
        let bytes = plan["stages"][0]["bytes"].as_u64().expect("bytes");
        mesh.deploy(0, &model);
        let view = watch(&mesh.nodes[0], &model, TOKENS_MAX, |_| {});
        Some(Solo { model, bytes, tokens: view.tokens })
    });
    solo.as_ref()
}

/// A generation as its client observed it.
pub(crate) struct View {
    pub(crate) tokens: Vec<u64>,
    first: Duration,
    /// Times between consecutive tokens.
    pauses: Vec<Duration>,
}

impl View {
    /// The longest time between two consecutive tokens.
    pub(crate) fn longest_pause(&self) -> Duration {
        self.pauses.iter().max().copied().unwrap_or_default()
    }
}

/// Requests a greedy answer and reads it to the end, each token exactly once and in order. Calls `on_token` after each
/// token with the count so far.
pub(crate) fn watch(node: &LocalNode, model: &Path, tokens: u32, mut on_token: impl FnMut(usize)) -> View {
    let (request, start) = (greedy(model, tokens), Instant::now());
    let arrived = listen(node.post_lines("/api/v1/generate", &request).expect("a stream"));
    let mut view = View { tokens: Vec::new(), first: Duration::ZERO, pauses: Vec::new() };
    let (mut last, mut position) = (start, None);
    loop {
        let (at, line) = arrived.recv_timeout(HANG).unwrap_or_else(|why| {
            let (so_far, name) = (view.tokens.len(), &node.name);
            panic!("{why} after {so_far} tokens and {HANG:?}; the log of `{name}`:\n{}", node.log())
        });
        let event: Value = serde_json::from_str(&line.expect("the stream is intact")).expect("JSON lines");
        assert!(event["error"].is_null(), "the request is lost after {} tokens: {event}", view.tokens.len());
        if event["done"].is_string() {
            assert_eq!(view.tokens.len(), tokens as usize, "all tokens of the answer: {event}");
            return view;
        }
        let (Some(token), Some(place)) = (event["token"].as_u64(), event["position"].as_u64()) else { continue };
        assert!(position.is_none_or(|before: u64| place == before + 1), "{place} follows {position:?}");
        position = Some(place);
        match view.tokens.is_empty() {
            true => view.first = at - start,
            false => view.pauses.push(at - last),
        }
        last = at;
        view.tokens.push(token);
        on_token(view.tokens.len());
    }
}

/// Reads lines on a separate thread, with their arrival times, so that the reader can wait with a timeout.
pub(crate) fn listen(
    lines: impl Iterator<Item = io::Result<String>> + Send + 'static,
) -> mpsc::Receiver<(Instant, io::Result<String>)> {
    let (sender, arrived) = mpsc::channel();
    std::thread::spawn(move || {
        for line in lines {
            let ended = line.is_err();
            if sender.send((Instant::now(), line)).is_err() || ended {
                break;
            }
        }
    });
    arrived
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pauses = self.pauses.clone();
        pauses.sort();
        let ms = |d: Option<&Duration>| d.map_or(0.0, |d| d.as_secs_f64() * 1e3);
        let (median, longest) = (ms(pauses.get(pauses.len() / 2)), ms(pauses.last()));
        let (count, first) = (self.tokens.len(), ms(Some(&self.first)));
        write!(
            f,
            "{count} tokens, the first after {first:.0} ms, pauses {median:.1} ms median, {longest:.0} ms longest"
        )
    }
}

/// Places in `nodes` of owners of stages with current standbys, in a state of the coordinator's only job.
pub(crate) fn covered_owners(nodes: &[LocalNode], state: &Value) -> Vec<usize> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let job = &state["jobs"][0];
    let stages = list(&job["stages"]);
    let current = list(&job["standbys"]).into_iter().filter(|standby| standby["state"] == "current");
    let names = current.filter_map(|standby| {
        let stage = stages.get(usize::try_from(standby["stage"].as_u64()?).ok()?)?;
        Some(stage["name"].as_str()?.to_owned())
    });
    names.filter_map(|name| nodes.iter().position(|node| node.name == name)).collect()
}

/// Number of kills of a test: `MESHNODE_KILLS`, or `usual`.
pub(crate) fn kills(usual: usize) -> usize {
    let given = std::env::var("MESHNODE_KILLS").ok();
    given.map_or(usual, |text| {
        text.parse().unwrap_or_else(|_| panic!("MESHNODE_KILLS is `{text}`, expected a number of kills"))
    })
}

/// Seed of a test's random choices: `MESHNODE_TEST_SEED`, or a new one. Printed, so that a failure can be reproduced.
pub(crate) fn seed(test: &str) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    let given = std::env::var("MESHNODE_TEST_SEED").ok();
    let seed = match &given {
        Some(text) => text.parse().unwrap_or_else(|_| panic!("MESHNODE_TEST_SEED is `{text}`, expected a number")),
        None => RandomState::new().hash_one(test) >> 32,
    };
    eprintln!("{test}: MESHNODE_TEST_SEED={seed}");
    seed
}
