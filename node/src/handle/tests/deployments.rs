//! Tests of deployments of one node: what it remembers for a restart, temporary models, stopping, and other members.
use super::*;

impl Bench {
    fn remembered(&self) -> Vec<String> {
        self.node.inner.remembered.all().into_iter().map(|entry| entry.name).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_permanent_model_is_served_again_after_a_restart() {
    let bench = bench().await;
    let run = bench.node.deploy_temporarily(bench.model.clone(), options(64)).await.unwrap();
    assert!(run.uses.is_temporary() && bench.remembered().is_empty());
    let served = bench.serve(options(64)).await.unwrap();
    assert_eq!((served.job, bench.remembered()), (run.job, vec!["tiny".to_owned()]));
    assert!(!served.uses.is_temporary());
    let again = bench.node.deploy_temporarily(bench.model.clone(), options(64)).await.unwrap();
    assert!(again.job == served.job && !again.uses.is_temporary(), "a run does not make it temporary again");
    assert_eq!(bench.remembered(), ["tiny"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_stopped_under_one_name_is_forgotten_under_all() {
    let bench = bench().await;
    bench.serve(options(64)).await.unwrap();
    let other = bench._dir.path().join("other.gguf");
    std::fs::copy(&bench.model.0, &other).unwrap();
    bench.node.deploy(ModelRef(other.to_string_lossy().into_owned()), ModelOptions::default()).await.unwrap();
    assert_eq!(bench.remembered(), ["tiny", "other"]);
    bench.node.undeploy("other").await.unwrap();
    assert!(bench.remembered().is_empty() && bench.node.models().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_no_model_is_rejected_and_changes_nothing() {
    let bench = bench().await;
    bench.serve(options(64)).await.unwrap();
    let noise = bench._dir.path().join("noise.gguf");
    std::fs::write(&noise, [7; 999]).unwrap();
    let noise = ModelRef(noise.to_string_lossy().into_owned());
    let error = bench.node.deploy(noise.clone(), options(64)).await.err().expect("no model");
    assert!(matches!(error, NodeError::Invalid(_)), "{error:?}");
    assert!(bench.node.plan(noise, options(64)).await.is_err());
    let error = bench.node.deploy(ModelRef("nosuch".into()), options(64)).await.err().expect("no file");
    assert!(matches!(error, NodeError::NotFound(_)), "{error:?}");
    assert_eq!(bench.remembered(), ["tiny"]);
    assert_eq!(bench.seen().await.0.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_plan_of_a_served_model_moves_no_weights() {
    let bench = bench().await;
    let plan = async || bench.node.plan(bench.model.clone(), ModelOptions::default()).await.unwrap();
    assert!(plan().await.change.is_none(), "it is not served");
    assert_eq!(bench.seen().await, (vec![], MEMORY), "a plan loads nothing");
    bench.serve(options(64)).await.unwrap();
    assert_eq!(plan().await.change.map(|change| change.moved_bytes), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_leaves_accepts_no_models_and_no_requests() {
    let bench = bench().await;
    let served = bench.serve(options(64)).await.unwrap();
    bench.node.inner.leaving.store(true, Ordering::Relaxed);
    let error = bench.serve(options(128)).await.err().expect("it leaves").to_string();
    assert!(error.contains("leaving the mesh"), "{error}");
    let prompt = served.words.tokenizer.encode_prompt("hello").unwrap();
    let key = node_core::work::serve::RequestKey(rand_key());
    let request = GenerateRequest {
        prompt,
        max_tokens: 1,
        sampling: Sampling::GREEDY,
        ignore_eos: true,
        priority: node_core::work::serve::Priority::Interactive,
        key,
    };
    assert!(bench.node.submit(&served, request).await.is_err());
    assert_eq!(bench.node.served("tiny").map(|model| model.job), Some(served.job), "running requests may finish");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_of_another_member_is_found_by_name_or_file() {
    let (a, b, _b_running) = pair(MEMORY).await;
    let connected = |state: &StateView| state.peers.iter().any(|p| !p.this_node && p.connected && p.state == "alive");
    until(&b, "b is connected to a", connected).await;
    assert!(b.attach("tiny").await.unwrap().is_none(), "no member serves it yet");
    let served = a.serve(options(64)).await.unwrap();
    for name in ["tiny", "tiny.gguf", "/home/me/models/tiny.gguf"] {
        let found = attached(&b, name).await;
        assert_eq!((found.name.as_str(), found.context), ("tiny", 64), "{name}");
        assert_eq!(found.elsewhere, Some(RemoteModel { node: a.node.inner.node, job: served.job }), "{name}");
    }
    assert!(b.attach("other").await.unwrap().is_none());
    a.node.undeploy("tiny").await.unwrap();
    assert!(b.attach("tiny").await.unwrap().is_none(), "it was stopped");
}

/// The model of that name at another member, which may be slow to answer.
async fn attached(node: &NodeHandle, name: &str) -> crate::api::engine::Served {
    for _ in 0..60 {
        if let Some(found) = node.attach(name).await.unwrap() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("no member serves {name}");
}

/// Memory of an idle model is free for others, and its name stays usable, with the options it was served with.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_model_is_unloaded_and_loaded_by_the_next_request() {
    let bench = bench_with(Some(Duration::from_secs(1))).await;
    let served = bench.serve(options(64)).await.unwrap();
    let long = bench.ask(&served, 20).await;
    assert_eq!(end(long).await, (20, DoneReason::Length));
    until(&bench.node, "the model is unloaded", |state| state.jobs.is_empty()).await;
    assert_eq!((bench.seen().await.1, bench.node.models().len()), (MEMORY, 0));
    assert_eq!(bench.node.unloaded_models(), [("tiny".to_owned(), 64)]);
    assert!(bench.node.has("tiny"));
    let again = bench.node.serve_on_demand("tiny").await.unwrap();
    assert_eq!((again.context, end(bench.ask(&again, 3).await).await), (64, (3, DoneReason::Length)));
    until(&bench.node, "it is unloaded again", |state| state.jobs.is_empty()).await;
    bench.node.undeploy("tiny").await.unwrap();
    assert_eq!(bench.node.unloaded_models(), [], "a stopped model is forgotten");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draft_model_is_served_first_and_stays_when_the_model_ends() {
    let bench = bench().await;
    let small = bench._dir.path().join("small.gguf");
    std::fs::write(&small, TinyModel { layers: 1, seed: 2, ..TinyModel::default() }.writer().write()).unwrap();
    let with = |draft: &str| ModelOptions { sequences: Some(2), draft: Some(draft.to_owned()), ..options(64) };
    let served = bench.serve(with(&small.to_string_lossy())).await.unwrap();
    let draft = bench.node.served("small").expect("it is served");
    assert_eq!((served.spec.draft, draft.context), (Some(draft.spec.content), 64));
    assert_eq!(bench.remembered(), ["tiny"], "the draft model is remembered with the model");
    let again = bench.serve(ModelOptions::default()).await.unwrap();
    assert_eq!(again.job, served.job, "it keeps its draft model");
    assert_eq!(end(bench.ask(&again, 20).await).await, (20, DoneReason::Length));
    let error = bench.serve(with(&bench.model.0)).await.err().expect("it is the model itself").to_string();
    assert!(error.contains("expected a smaller model"), "{error}");
    assert_eq!(bench.serve(with("")).await.unwrap().spec.draft, None);
    bench.node.undeploy("tiny").await.unwrap();
    assert!(bench.node.served("small").is_some(), "another model may use it");
}
