//! Tests of one real node with a small model: serve, replace and stop it, and the memory that this takes.
use super::opened::work;
use super::*;
use crate::config::UpOptions;
use crate::node::Running;
use kernels_models::weights::Architecture;
use kernels_models::weights::testing::TinyModel;
use node_core::id::JobId;
use node_core::work::serve::DoneReason;

mod bad_files;
mod deployments;

struct Bench {
    node: NodeHandle,
    model: ModelRef,
    _running: Running,
    _dir: tempfile::TempDir,
}

const MEMORY: u64 = 64 << 20;

async fn bench() -> Bench {
    bench_with(None).await
}

async fn bench_with(idle_unload: Option<Duration>) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    std::fs::write(&path, TinyModel::default().writer().write()).unwrap();
    let mut options = UpOptions::solo(dir.path().join("data"), dir.path().join("cache/models"));
    (options.device, options.memory, options.threads) = ("cpu".into(), Some(MEMORY), Some(1));
    options.idle_unload = idle_unload;
    let (node, running) = crate::node::start(options).await.unwrap();
    Bench { node, model: ModelRef(path.to_string_lossy().into_owned()), _running: running, _dir: dir }
}

fn options(context: u32) -> ModelOptions {
    ModelOptions { context: Some(context), ..ModelOptions::default() }
}

impl Bench {
    async fn serve(&self, options: ModelOptions) -> Result<ModelHandle, NodeError> {
        self.node.deploy(self.model.clone(), options).await
    }

    /// Ids of all jobs, and the free memory.
    async fn seen(&self) -> (Vec<String>, u64) {
        let state = self.node.state().await;
        (state.jobs.into_iter().map(|j| j.job).collect(), state.peers[0].memory_free)
    }

    async fn ask(&self, model: &ModelHandle, max_tokens: u32) -> TokenStream {
        let prompt = model.words.tokenizer.encode_prompt("hello world").unwrap();
        let key = node_core::work::serve::RequestKey(rand_key());
        let request = GenerateRequest {
            prompt,
            max_tokens,
            sampling: Sampling::GREEDY,
            ignore_eos: true,
            priority: node_core::work::serve::Priority::Interactive,
            key,
        };
        self.node.submit(model, request).await.unwrap()
    }
}

async fn end(mut stream: TokenStream) -> (usize, DoneReason) {
    let mut tokens = 0;
    loop {
        match stream.next().await.expect("an event") {
            TokenEvent::Token { .. } => tokens += 1,
            TokenEvent::Done { reason } => return (tokens, reason),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_served_with_other_options_is_replaced_and_frees_its_memory() {
    let bench = bench().await;
    let first = bench.serve(options(128)).await.unwrap();
    let (jobs, free) = bench.seen().await;
    assert_eq!(jobs.len(), 1);
    assert!(free < MEMORY, "the memory of a stage is not offered");
    let stream = bench.ask(&first, 100_000).await;

    let again = bench.serve(ModelOptions::default()).await.unwrap();
    assert_eq!((again.job, again.context), (first.job, 128), "unset options keep their values");

    let second = bench.serve(options(256)).await.unwrap();
    assert_ne!(second.job, first.job);
    let (jobs, free_then) = bench.seen().await;
    assert_eq!(jobs, [format!("{:016x}", second.job.0)], "the first job has ended");
    assert!(free_then < free, "the larger caches take more: {free_then} of {free}");
    let (_, reason) = end(stream).await;
    // 128 positions are soon full; a request that still ran reports why it ended.
    assert!(
        matches!(&reason, DoneReason::Failed(why) if why.contains("restarted with other options: retry"))
            || reason == DoneReason::Length
    );
    assert_eq!(end(bench.ask(&second, 5).await).await, (5, DoneReason::Length));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_model_frees_its_memory_and_its_name() {
    let bench = bench().await;
    let served = bench.serve(options(64)).await.unwrap();
    assert_eq!(bench.node.served("default").map(|m| m.job), Some(served.job));
    bench.node.undeploy("tiny").await.unwrap();
    assert_eq!(bench.seen().await, (vec![], MEMORY));
    assert!(bench.node.served("tiny").is_none() && bench.node.models().is_empty());
    let error = bench.node.undeploy("tiny").await.unwrap_err();
    assert!(matches!(error, NodeError::NotFound(_)), "{error}");
    let (_, reason) = end(bench.ask(&served, 1).await).await;
    assert!(matches!(reason, DoneReason::Invalid(_)), "{reason:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replacement_that_does_not_fit_leaves_the_model_served_as_before() {
    let bench = bench().await;
    bench.serve(options(64)).await.unwrap();
    let huge = ModelOptions { context: Some(512), sequences: Some(64), int8: None, draft: None };
    let error = bench.serve(huge).await.err().expect("does not fit").to_string();
    assert!(error.contains("missing") && error.contains("still served"), "{error}");
    let served = bench.node.served("tiny").expect("still served");
    assert_eq!(served.context, 64);
    assert_eq!(end(bench.ask(&served, 3).await).await, (3, DoneReason::Length));
    assert_eq!(bench.seen().await.0.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_weights_under_another_name_are_the_same_job() {
    let bench = bench().await;
    let first = bench.serve(options(64)).await.unwrap();
    let other = bench._dir.path().join("other.gguf");
    std::fs::copy(&bench.model.0, &other).unwrap();
    let second =
        bench.node.deploy(ModelRef(other.to_string_lossy().into_owned()), ModelOptions::default()).await.unwrap();
    assert_eq!((second.name.as_str(), second.job), ("other", first.job));
    assert_eq!(bench.seen().await.0.len(), 1);
    bench.node.undeploy("tiny").await.unwrap();
    assert!(bench.node.served("other").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_aborted_deployment_leaves_no_unknown_job() {
    let bench = bench().await;
    let waiting = tokio::time::timeout(Duration::from_millis(1), bench.serve(options(64))).await;
    assert!(waiting.is_err(), "deploying takes longer than that");
    let served = bench.serve(options(100)).await.unwrap();
    assert_eq!(bench.seen().await.0, [format!("{:016x}", served.job.0)]);
}

/// Two nodes of one mesh, each with `memory` bytes; only the first has the model.
async fn pair(memory: u64) -> (Bench, NodeHandle, Running) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    std::fs::write(&path, TinyModel::default().writer().write()).unwrap();
    let options = |name: &str, join: Vec<String>| {
        let home = dir.path().join(name);
        let mut options = UpOptions::solo(home.join("data"), home.join("cache/models"));
        (options.device, options.memory, options.threads) = ("cpu".into(), Some(memory), Some(1));
        (options.name, options.solo, options.join) = (name.into(), false, join);
        options
    };
    let (a, a_running) = crate::node::start(options("a", vec![])).await.unwrap();
    let (b, b_running) = crate::node::start(options("b", vec![a_running.ticket.clone().unwrap()])).await.unwrap();
    let model = ModelRef(path.to_string_lossy().into_owned());
    (Bench { node: a, model, _running: a_running, _dir: dir }, b, b_running)
}

async fn until(node: &NodeHandle, what: &str, met: impl Fn(&StateView) -> bool) {
    for _ in 0..600 {
        if met(&node.state().await) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{what}: {:?}", node.state().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_link_to_a_peer_is_measured_and_reported() {
    let (a, b, _b_running) = pair(MEMORY).await;
    let measured = |state: &StateView| {
        let peer = state.peers.iter().find(|p| !p.this_node && p.connected);
        peer.is_some_and(|p| p.rtt_ms.is_some_and(|rtt| rtt > 0.0) && p.link_bytes_per_second.is_some())
    };
    until(&a.node, "a measures", measured).await;
    until(&b, "b measures", measured).await;
}

#[test]
fn a_plan_counts_the_memory_of_caches_and_retained_rows() {
    let file = TinyModel::default().open();
    let with = |sequences, int8| {
        let options = ModelOptions { context: Some(64), sequences: Some(sequences), int8: Some(int8), draft: None };
        work(&file, &options)
    };
    let cache = |int8| with(1, int8).layers[0].kv_bytes_per_token;
    assert_eq!(cache(false), 2 * cache(true), "the cache is f16 with 8-bit activations");
    // Rows retained for resending: of all sequences at full length, up to the bound.
    let ring = |sequences| with(sequences, true).scratch_bytes - crate::device::SCRATCH_BYTES;
    assert_eq!(ring(3), 3 * 64 * with(1, true).activation_bytes);
    let windows = |architecture| {
        let file = TinyModel { architecture, ..TinyModel::default() }.open();
        work(&file, &ModelOptions::default()).layers.iter().map(|layer| layer.window).collect::<Vec<_>>()
    };
    assert_eq!(
        windows(Architecture::Gemma3),
        [Some(9), Some(9), None],
        "attention is charged up to the layer's window"
    );
    assert_eq!(windows(Architecture::Llama), [None; 3]);
    let long = ModelOptions { context: Some(u32::MAX), sequences: Some(u32::MAX), int8: None, draft: None };
    assert!(work(&file, &long).scratch_bytes <= crate::device::SCRATCH_BYTES + node_core::limits::RING_BYTES_MAX);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_on_two_nodes_is_replaced_on_both() {
    let wide = |context| ModelOptions { context: Some(context), sequences: Some(16), int8: None, draft: None };
    let work = work(&TinyModel::default().open(), &wide(500));
    let caches = u64::from(work.context) * u64::from(work.sequences);
    let layers: u64 = work.layers.iter().map(|l| l.weight_bytes + l.kv_bytes_per_token * caches).sum();
    // A tenth less than the whole model needs.
    let (a, b, _b_running) = pair((layers + work.embed_bytes + work.scratch_bytes) / 10 * 9).await;
    let both = |state: &StateView| state.peers.iter().filter(|p| p.state == "alive" && p.memory_total > 0).count() == 2;
    until(&a.node, "a sees b", both).await;
    let held =
        |job: JobId| move |state: &StateView| state.jobs.len() == 1 && state.jobs[0].job == format!("{:016x}", job.0);
    let mut last = None;
    for context in [500, 498, 500] {
        let served = a.serve(wide(context)).await.unwrap();
        assert_ne!(Some(served.job), last);
        let state = a.node.state().await;
        assert_eq!((state.jobs.len(), state.jobs[0].stages.len()), (1, 2), "{state:?}");
        until(&b, "b holds its part only", held(served.job)).await;
        assert_eq!(end(a.ask(&served, 3).await).await, (3, DoneReason::Length));
        last = Some(served.job);
    }
    a.node.undeploy("tiny").await.unwrap();
    until(&b, "b is free again", |state| {
        state.jobs.is_empty() && state.peers[0].memory_free == state.peers[0].memory_total
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_in_the_cache_is_served_on_demand_until_it_is_stopped() {
    let bench = bench().await;
    let models = bench._dir.path().join("cache/models");
    std::fs::create_dir_all(&models).unwrap();
    std::fs::copy(&bench.model.0, models.join("tiny.gguf")).unwrap();
    assert!(bench.node.has("tiny") && !bench.node.has(&bench.model.0) && !bench.node.has("other"));
    let (first, second) = tokio::join!(bench.node.serve_on_demand("tiny"), bench.node.serve_on_demand("tiny"));
    assert_eq!(first.unwrap().job, second.unwrap().job);
    bench.node.undeploy("tiny").await.unwrap();
    let error = bench.node.serve_on_demand("tiny").await.err().expect("the user stopped it").to_string();
    assert!(error.contains("meshnode serve"), "{error}");
    bench.serve(options(64)).await.unwrap();
    let again = bench.node.serve_on_demand("tiny").await.unwrap();
    assert_eq!(again.context, 64, "the running job");
}

/// Peers that claim to be members advertise addresses where no node listens. The node dials each a few times, a few in
/// parallel, and admits newcomers meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fake_addresses_neither_block_a_newcomer_nor_get_endless_traffic() {
    let (a, b, _b_running) = pair(MEMORY).await;
    let members =
        |count: usize| move |state: &StateView| state.peers.iter().filter(|p| p.state == "alive").count() == count;
    until(&a.node, "a sees b", members(2)).await;
    let silent = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let addr = silent.local_addr().unwrap();
    for _ in 0..400 {
        let peer_id = transport::Identity::generate().peer_id();
        let (node, peer_id) = (NodeId(transport::node_id(&peer_id)), peer_id.to_bytes());
        let found = Input::PeerFound { node, peer_id, gossip: vec![addr], data: vec![addr], remembered: false };
        a.node.inner.driver.input(found);
    }
    // A newcomer joins with a ticket right away.
    let ticket = a.node.invite(Duration::from_secs(60), 1).await.unwrap();
    let mut options = UpOptions::solo(a._dir.path().join("c/data"), a._dir.path().join("c/cache/models"));
    (options.device, options.memory, options.threads) = ("cpu".into(), Some(MEMORY), Some(1));
    (options.name, options.solo, options.join) = ("c".into(), false, vec![ticket]);
    let (_c, _c_running) = crate::node::start(options).await.unwrap();
    until(&a.node, "a sees the newcomer", members(3)).await;
    until(&b, "b sees the newcomer", members(3)).await;
    // The dials end after 5 s; afterwards a contact is tried only occasionally.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let mut packet = [0; 2000];
    while silent.try_recv_from(&mut packet).is_ok() {}
    tokio::time::sleep(Duration::from_secs(5)).await;
    let mut datagrams = 0;
    while silent.try_recv_from(&mut packet).is_ok() {
        datagrams += 1;
    }
    assert!(datagrams <= 20, "{datagrams} datagrams in 5 s to an address that never answered");
}

/// A random key, since each request in the tests is sent once.
fn rand_key() -> [u8; 16] {
    let mut key = [0; 16];
    getrandom::fill(&mut key).unwrap();
    key
}
