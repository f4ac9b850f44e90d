//! Nodes without the model fetch their share of the weights from several nodes in parallel, even if one copy is
//! damaged.
use crate::client::{seed, solo, watch};
use crate::harness::{JOIN_MAX, Mesh, deploy, generate, greedy, model, require, tokens_of};
use meshnode::cluster::LocalNode;
use rustix::process::Signal;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use system_tests::relay::Link;

/// Adverts reach all members within this time.
const GOSSIP: Duration = Duration::from_secs(4);

/// Three nodes have the model, one of them with flipped bits. A fourth node has no weights and fetches its share from
/// several of them. It rejects damaged chunks and fetches them from another node, and the tokens are those of one node.
/// After a kill and restart it fetches nothing more.
#[test]
fn a_share_comes_from_several_holders_and_a_damaged_one_is_detected() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    let solo = mesh.solo(&model);
    let reference = tokens_of(&generate(&mesh.nodes[solo], &greedy(&model, 30)));
    let bytes = mesh.model_bytes(&model);
    drop(mesh);

    let mut mesh = Mesh::new();
    // Only the coordinator and the node without weights have room for a stage.
    let half = Some((bytes as f64 * 0.8) as u64);
    mesh.start("coordinator", half);
    for (i, holder) in ["damaged", "sound"].into_iter().enumerate() {
        let copy = own_copy(mesh.cache_of(holder), &model);
        mesh.start(holder, Some(1 << 20));
        // Its index is built while the file is intact.
        mesh.nodes[1 + i].post("/api/v1/plan", &deploy(&copy)).expect_err("there is no room yet");
        if holder == "damaged" {
            flip_bits(&copy);
        }
    }
    mesh.start("empty", half);
    mesh.wait_members(4);
    std::thread::sleep(GOSSIP);
    mesh.deploy(0, &model);
    assert_eq!(tokens_of(&generate(&mesh.nodes[0], &greedy(&model, 30))), reference);

    let log = mesh.nodes[3].log();
    assert!(from_peers(&mesh.nodes[3], "refused") > 0, "the damaged holder was not asked:\n{log}");
    let gave = holders(&mesh.nodes[3]);
    assert!(gave >= 2, "{gave} holders sent data:\n{log}");
    for words in ["not asked for this model for 10 minutes", "expected", "iB/s", "rejected"] {
        assert!(log.contains(words), "{words}:\n{log}");
    }
    let fetched = from_peers(&mesh.nodes[3], "bytes");
    assert!(fetched > bytes / 4 && fetched < bytes, "its share: {fetched} of {bytes}");
    let metrics = mesh.nodes[3].text("/metrics").expect("metrics");
    assert!(metrics.contains("meshnode_weights_fetched_bytes_total{peer="), "{metrics}");

    mesh.nodes[3].kill();
    mesh.restart(3);
    mesh.nodes[0]
        .wait_state(Duration::from_secs(60), |state| {
            state["jobs"][0]["state"] == "ready" && state["jobs"][0]["stages"].as_array().is_some_and(|s| s.len() == 2)
        })
        .expect("the node holds its stage again");
    assert_eq!(tokens_of(&generate(&mesh.nodes[0], &greedy(&model, 30))), reference);
    assert_eq!(from_peers(&mesh.nodes[3], "bytes"), 0, "fetched weights are retained:\n{}", mesh.nodes[3].log());
}

/// A node is killed while it fetches its share over a slow link. After a restart it hashes the data it has and fetches
/// only the rest; then the model runs.
#[test]
fn a_node_killed_while_fetching_resumes_where_it_stopped() {
    let Some(solo) = solo() else { return };
    let mut mesh = Mesh::relayed(seed("a_node_killed_while_fetching_resumes_where_it_stopped"));
    mesh.start("coordinator", Some(solo.memory(0.8)));
    mesh.start("empty", Some(solo.memory(0.8)));
    mesh.wait_members(2);
    let link = |link| mesh.relay.as_ref().expect("a relay").link(0, 1, link);
    link(Link { bytes_per_second: Some(4_000_000), ..Link::PLAIN });
    let kept = std::thread::scope(|scope| {
        let deployed = scope.spawn(|| mesh.nodes[0].post("/api/v1/deploy", &deploy(&solo.model)));
        let state = mesh.nodes[1].wait_state(JOIN_MAX, |state| {
            let transfer = &state["weights"]["transfers"][0];
            transfer["bytes_done"].as_u64().is_some_and(|done| done > 8 << 20)
        });
        let transfer = state.expect("the node fetches")["weights"]["transfers"][0].clone();
        mesh.nodes[1].signal(Signal::KILL);
        assert!(transfer["bytes_done"].as_u64() < transfer["bytes_total"].as_u64(), "in the middle: {transfer}");
        deployed.join().expect("no panic").expect_err("one node alone has no room for the model");
        transfer["bytes_done"].as_u64().expect("a count")
    });
    link(Link::PLAIN);
    mesh.nodes[1].kill();
    mesh.restart(1);
    mesh.wait_members(2);
    mesh.deploy(0, &solo.model);
    let view = watch(&mesh.nodes[0], &solo.model, 30, |_| {});
    assert_eq!(view.tokens, solo.tokens(30));
    let there = mesh.nodes[1].get("/api/v1/state").expect("a state")["weights"]["cache_used"].as_u64();
    let (fetched, there) = (from_peers(&mesh.nodes[1], "bytes"), there.expect("a count"));
    eprintln!("{kept} bytes before the SIGKILL, {fetched} after it: {there} in the cache");
    assert!(fetched > 0 && kept + fetched <= there, "nothing is fetched twice:\n{}", mesh.nodes[1].log());
}

/// A counter over all peers from which this node fetched weights, summed.
fn from_peers(node: &LocalNode, figure: &str) -> u64 {
    let state = node.get("/api/v1/state").expect("a state");
    state["weights"]["peers"].as_array().into_iter().flatten().filter_map(|p| p[figure].as_u64()).sum()
}

/// Number of peers that sent chunks.
fn holders(node: &LocalNode) -> usize {
    let state = node.get("/api/v1/state").expect("a state");
    state["weights"]["peers"].as_array().into_iter().flatten().filter(|p| p["chunks"].as_u64() > Some(0)).count()
}

/// A copy of the model in a node's own cache.
fn own_copy(cache: PathBuf, model: &Path) -> PathBuf {
    let models = cache.join("models");
    std::fs::create_dir_all(&models).expect("a folder");
    let copy = models.join(model.file_name().expect("a name"));
    std::fs::copy(model, &copy).expect("a copy");
    copy
}

/// Flips a bit in every 64 KiB after the header, so that every chunk is damaged.
fn flip_bits(path: &Path) {
    let file = std::fs::File::options().read(true).write(true).open(path).expect("the copy");
    let written = file.metadata().and_then(|about| about.modified()).expect("its time");
    for at in (4 << 20..file.metadata().expect("its size").len()).step_by(64 << 10) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("a byte");
        file.write_all_at(&[byte[0] ^ 1], at).expect("a byte");
    }
    // A failing disk does not change the modification time. A newer time would make the node stop offering the file.
    file.set_modified(written).expect("its time again");
}
