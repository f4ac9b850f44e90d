//! Real node processes on loopback, for tests.
use meshnode::cluster::{LocalNode, LocalNodeOptions, free_port};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;
use system_tests::relay::Relay;

/// Longest wait for the members of a mesh to find each other, or for their adverts to arrive, on a busy machine.
pub(crate) const JOIN_MAX: Duration = Duration::from_secs(60);
/// Context of all deployments: small, so that the weights determine what fits.
pub(crate) const CONTEXT: u32 = 512;

/// The node program. `cargo test --workspace` builds it for the tests of its own package. `-p system-tests` alone uses
/// an existing one, or builds it with the features of the whole workspace, so that nothing is compiled twice.
pub(crate) fn meshnode() -> &'static Path {
    static EXE: OnceLock<PathBuf> = OnceLock::new();
    EXE.get_or_init(|| {
        let mut dir = std::env::current_exe().expect("the test has a path");
        dir.pop();
        if dir.ends_with("deps") {
            dir.pop();
        }
        let exe = dir.join("meshnode");
        if !exe.exists() {
            let status = std::process::Command::new(env!("CARGO"))
                .args(["build", "--release", "--workspace", "--bin", "meshnode"])
                .status()
                .expect("cargo runs");
            assert!(status.success(), "the node program does not build");
        }
        exe
    })
}

/// The model file, or why it is not available. Downloaded once into the user's cache.
pub(crate) fn model() -> Result<PathBuf, String> {
    static MODEL: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    MODEL
        .get_or_init(|| {
            let output = std::process::Command::new(meshnode())
                .args(["pull", "smollm2-135m", "--json"])
                .output()
                .map_err(|e| e.to_string())?;
            let text = String::from_utf8_lossy(&output.stdout);
            let path = text.lines().last().and_then(|l| serde_json::from_str::<Value>(l).ok());
            path.and_then(|v| v["path"].as_str().map(PathBuf::from))
                .ok_or_else(|| String::from_utf8_lossy(&output.stderr).into_owned())
        })
        .clone()
}

/// The model file, or `None` after printing a skip, which `MESHNODE_REQUIRE=model` turns into a failure.
pub(crate) fn require(model: Result<PathBuf, String>) -> Option<PathBuf> {
    match model {
        Ok(path) => Some(path),
        Err(why) => {
            let required = std::env::var("MESHNODE_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|r| r == "model"), "the model is required: {why}");
            eprintln!("SKIPPED: no model: {why}");
            None
        }
    }
}

/// A greedy generation request.
pub(crate) fn greedy(model: &Path, tokens: u32) -> Value {
    json!({
        "model": model, "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "max_tokens": tokens, "temperature": 0.0, "ignore_eos": true,
    })
}

/// A deployment request.
pub(crate) fn deploy(model: &Path) -> Value {
    json!({"model": model, "options": {"int8": true, "context": CONTEXT, "sequences": 1}})
}

/// All events of a request.
pub(crate) fn generate(node: &LocalNode, request: &Value) -> Vec<Value> {
    let lines = node.post_lines("/api/v1/generate", request).expect("a stream");
    lines.map(|l| serde_json::from_str(&l.expect("the stream is intact")).expect("JSON lines")).collect()
}

/// The token ids of the events.
pub(crate) fn tokens_of(events: &[Value]) -> Vec<u64> {
    events.iter().filter_map(|e| e["token"].as_u64()).collect()
}

/// Permission to run nodes. One test holds it at a time, reentrantly: on two cores, the nodes of two tests would delay
/// each other until leases expire.
pub(crate) struct Turn(PhantomData<MutexGuard<'static, ()>>);

thread_local! {
    /// The number of turns that this thread's test holds, and the lock behind them.
    static TURNS: RefCell<(usize, Option<MutexGuard<'static, ()>>)> = const { RefCell::new((0, None)) };
}

impl Turn {
    /// Waits until no other test runs nodes.
    pub(crate) fn take() -> Self {
        static RUNNING: Mutex<()> = Mutex::new(());
        TURNS.with_borrow_mut(|(count, held)| {
            // A poisoned lock is usable: a failed test has killed its nodes, too.
            held.get_or_insert_with(|| RUNNING.lock());
            *count += 1;
        });
        Self(PhantomData)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        TURNS.with_borrow_mut(|(count, held)| {
            *count -= 1;
            if *count == 0 {
                *held = None;
            }
        });
    }
}

/// The nodes of one mesh, with their data under one folder.
pub(crate) struct Mesh {
    /// In the order they were started.
    pub(crate) nodes: Vec<LocalNode>,
    /// Options and port of each node, also for a restart.
    options: Vec<(LocalNodeOptions, u16)>,
    /// The relay between the nodes, with the same indices.
    pub(crate) relay: Option<Relay>,
    /// Compute threads of each node that [`Self::start`] starts: one, or as `MESHNODE_THREADS` says.
    threads: usize,
    dir: tempfile::TempDir,
    /// Last field: dropped when the nodes have ended.
    _turn: Turn,
}

impl Mesh {
    pub(crate) fn new() -> Self {
        let (nodes, options, turn) = (Vec::new(), Vec::new(), Turn::take());
        let threads = std::env::var("MESHNODE_THREADS").map_or(1, |text| text.parse().expect("a number of threads"));
        Self { nodes, options, relay: None, threads, dir: tempfile::tempdir().expect("a folder"), _turn: turn }
    }

    /// A mesh whose nodes reach each other only through a relay; `seed` determines which datagrams are lost.
    pub(crate) fn relayed(seed: u64) -> Self {
        let mut mesh = Self::new();
        mesh.relay = Some(Relay::start(seed).expect("a relay"));
        mesh
    }

    /// Starts a node on the processor, or on the device that `MESHNODE_DEVICE` names. All but the first join the first one's mesh.
    /// Only the first one uses the user's model cache.
    pub(crate) fn start(&mut self, name: &str, memory: Option<u64>) {
        let device = std::env::var("MESHNODE_DEVICE").unwrap_or_else(|_| "cpu".to_owned());
        self.start_on(name, &device, memory);
    }

    /// The same on these devices, each with this much memory, and no RAM for experts beside it: a node with a GPU could hold a
    /// model in RAM that is meant to be too large for it.
    pub(crate) fn start_on(&mut self, name: &str, devices: &str, memory: Option<u64>) {
        let join = self.nodes.first().map(|first| {
            let answer = first.post("/api/v1/invite", &json!({"ttl_s": 600, "uses": 1})).expect("an invitation");
            answer["ticket"].as_str().expect("a ticket").to_owned()
        });
        let cache = join.is_some().then(|| self.cache_of(name));
        let flags: &[&str] = if memory.is_some() { &["--expert-ram", "0"] } else { &[] };
        self.spawn(LocalNodeOptions {
            name: name.to_owned(),
            device: Some(devices.to_owned()),
            memory,
            threads: Some(self.threads),
            join,
            cache_dir: cache,
            flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
        });
    }

    /// Cache folder (models and weights) of a node other than the first.
    pub(crate) fn cache_of(&self, name: &str) -> PathBuf {
        self.dir.path().join(name).join("cache")
    }

    /// Starts the first node, of a mesh that admits neighbours without a ticket.
    pub(crate) fn open(&mut self, name: &str) {
        let flags = vec!["--open".to_owned()];
        self.spawn(LocalNodeOptions { name: name.to_owned(), threads: Some(1), flags, ..LocalNodeOptions::default() });
    }

    /// Starts a node that joins with a ticket, or at an address.
    pub(crate) fn join(&mut self, name: &str, ticket: &str) {
        let options = LocalNodeOptions {
            name: name.to_owned(),
            threads: Some(1),
            join: Some(ticket.to_owned()),
            ..LocalNodeOptions::default()
        };
        self.spawn(options);
    }

    /// Starts one node with unlimited memory and deploys the model on it.
    pub(crate) fn solo(&mut self, model: &Path) -> usize {
        self.start("solo", None);
        self.deploy(self.nodes.len() - 1, model);
        self.nodes.len() - 1
    }

    /// Memory of the model on one node, in bytes.
    pub(crate) fn model_bytes(&mut self, model: &Path) -> u64 {
        let mut other = Mesh::new();
        other.start("measure", None);
        let plan = other.nodes[0].post("/api/v1/plan", &deploy(model)).expect("a plan");
        plan["stages"][0]["bytes"].as_u64().expect("bytes")
    }

    pub(crate) fn deploy(&self, node: usize, model: &Path) {
        self.nodes[node].post("/api/v1/deploy", &deploy(model)).expect("the model is served");
    }

    pub(crate) fn wait_members(&self, count: usize) {
        for node in &self.nodes {
            node.wait_members(count, JOIN_MAX).expect("every node sees all members");
        }
    }

    /// The nodes other than `coordinator` that hold a stage of the coordinator's first job.
    pub(crate) fn remote_stages(&self, coordinator: usize) -> Vec<usize> {
        let state = self.nodes[coordinator].get("/api/v1/state").expect("a state");
        let stages = state["jobs"][0]["stages"].as_array().cloned().unwrap_or_default();
        let holds = |i: &usize| *i != coordinator && stages.iter().any(|s| s["name"] == self.nodes[*i].name.as_str());
        let found: Vec<usize> = (0..self.nodes.len()).filter(holds).collect();
        assert!(!found.is_empty(), "no other node holds a stage: {state}");
        found
    }

    /// Sends SIGKILL to a live node other than `coordinator` that holds a stage of the coordinator's first job.
    pub(crate) fn kill_stage_of(&mut self, coordinator: usize) {
        let held = self.remote_stages(coordinator);
        let victim = held.into_iter().find(|i| self.nodes[*i].alive());
        self.nodes[victim.expect("a live node other than the coordinator")].kill();
    }

    /// Links the model's file into the cache of a node that is not started yet.
    pub(crate) fn give_model(&self, name: &str, model: &Path) {
        let models = self.dir.path().join(name).join("cache/models");
        std::fs::create_dir_all(&models).expect("a folder");
        let file = models.join(model.file_name().expect("a file"));
        std::os::unix::fs::symlink(model, file).expect("a link");
    }

    /// Restarts a killed node with its data directory.
    pub(crate) fn restart(&mut self, index: usize) {
        self.nodes[index] = restarted(self.dir.path(), &self.options[index]);
    }

    /// The first node, for the threads that call it, and the others, which can be killed and restarted meanwhile.
    pub(crate) fn split(&mut self) -> (&LocalNode, Others<'_>) {
        let (first, nodes) = self.nodes.split_first_mut().expect("a node");
        (first, Others { nodes, options: &self.options[1..], dir: self.dir.path() })
    }

    fn spawn(&mut self, mut options: LocalNodeOptions) {
        let port = free_port().expect("a free port");
        if let Some(relay) = &mut self.relay {
            let (_, front) = relay.add(port).expect("a front");
            options.flags.extend(["--advertise".to_owned(), front.to_string()]);
        }
        let node = LocalNode::spawn_on(meshnode(), self.dir.path(), &options, port);
        self.nodes.push(node.expect("the node starts"));
        self.options.push((options, port));
    }
}

/// All nodes of a mesh but the first.
pub(crate) struct Others<'a> {
    pub(crate) nodes: &'a mut [LocalNode],
    options: &'a [(LocalNodeOptions, u16)],
    dir: &'a Path,
}

impl Others<'_> {
    /// As [`Mesh::restart`]; `index` counts these nodes.
    pub(crate) fn restart(&mut self, index: usize) {
        self.nodes[index] = restarted(self.dir, &self.options[index]);
    }
}

fn restarted(dir: &Path, (options, port): &(LocalNodeOptions, u16)) -> LocalNode {
    LocalNode::spawn_on(meshnode(), dir, options, *port).expect("the node starts again")
}
