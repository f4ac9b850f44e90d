//! Tests of which job serves which name: reuse, replacement, restoration, and the jobs that are ended.
use super::*;
use crate::driver::queue;
use crate::handle::testing::{spec, words};
use crate::views::StageView;
use node_core::id::{CallId, Epoch, NodeId};
use partitioner::PlanError;

/// What the core answers to a start.
enum Answer {
    Ready(u64),
    Degraded(u64),
    NoPlan,
    Done(DoneReason),
}

impl Answer {
    fn event(self, call: CallId) -> Event {
        let epoch = Epoch { counter: 1, issuer: NodeId([1; 16]) };
        match self {
            Answer::Ready(job) => Event::JobReady { call: Some(call), job: JobId(job), epoch },
            Answer::Degraded(job) => {
                Event::JobDegraded { call: Some(call), job: JobId(job), reason: "a stage failed to load".into() }
            }
            Answer::NoPlan => {
                let result = Err(PlanError::NoDevices);
                Event::PlanReady { call, result, standbys: Vec::new(), change: None }
            }
            Answer::Done(reason) => Event::Done { call, reason },
        }
    }
}

struct Bench {
    serving: Serving,
    log: Arc<Mutex<Vec<String>>>,
}

/// A node whose core gives these answers, one to each start.
fn bench(answers: Vec<Answer>) -> Bench {
    let (driver, queue) = queue::channel();
    let hub = Arc::new(EventRouter::new());
    let log: Arc<Mutex<Vec<String>>> = Arc::default();
    let (events, lines) = (hub.clone(), log.clone());
    let mut answers = answers.into_iter();
    std::thread::spawn(move || {
        queue.serve(&Mutex::default(), |input| {
            if let Input::End { job } = &input {
                lines.lock().push(format!("end {}", job.0));
            }
            if let Input::Start { call, job } = &input
                && let JobSpec::Serve(spec) = &**job
            {
                lines.lock().push(format!("start {}", spec.work.context));
                if let Some(answer) = answers.next() {
                    events.deliver(answer.event(*call));
                }
            }
        });
    });
    Bench { serving: Serving::new(driver, hub, ServedModels::default()), log }
}

impl Bench {
    async fn serve(&self, model: ModelHandle, before: Option<ModelHandle>) -> Result<ModelHandle, Unserved> {
        self.serving.serve(model, before).await
    }

    /// Serves a model that must be placed.
    async fn served(&self, model: ModelHandle) -> ModelHandle {
        self.serve(model, None).await.ok().expect("it is placed")
    }

    /// Names and jobs of the served models.
    fn names(&self) -> Vec<(String, u64)> {
        self.serving.all().into_iter().map(|model| (model.name, model.job.0)).collect()
    }

    /// Starts and ends, in order.
    async fn log(&self) -> Vec<String> {
        // The queue is in order: when the views are answered, all earlier inputs have been handled.
        let _ = self.serving.driver.views().await;
        self.log.lock().clone()
    }
}

fn model(name: &str, context: u32) -> ModelHandle {
    named(name, context, false)
}

fn named(name: &str, context: u32, temporary: bool) -> ModelHandle {
    ModelHandle { name: name.into(), ..ModelHandle::new(JobId(0), words(), spec(1, context), temporary) }
}

#[tokio::test]
async fn a_model_is_served_under_its_name_with_its_job() {
    let bench = bench(vec![Answer::Ready(7)]);
    let served = bench.served(model("tiny", 64)).await;
    assert_eq!((served.name.as_str(), served.job), ("tiny", JobId(7)));
    assert_eq!(bench.names(), [("tiny".to_owned(), 7)]);
    assert_eq!(bench.log().await, ["start 64"]);
}

#[tokio::test]
async fn default_is_the_only_job_also_under_two_names() {
    let bench = bench(vec![]);
    let job = |model: ModelHandle, job| ModelHandle { job: JobId(job), ..model };
    assert!(bench.serving.by_name("default").is_none());
    bench.serving.adopt(job(model("a", 64), 7));
    bench.serving.adopt(job(model("b", 64), 7));
    assert_eq!(bench.serving.by_name("default").map(|model| model.job), Some(JobId(7)));
    bench.serving.adopt(job(model("c", 64), 8));
    assert!(bench.serving.by_name("default").is_none(), "which one?");
    bench.serving.adopt(job(model("default", 64), 9));
    assert_eq!(bench.serving.by_name("default").map(|model| model.job), Some(JobId(9)), "a model of that name");
}

#[tokio::test]
async fn a_name_goes_before_equal_weights() {
    let bench = bench(vec![]);
    let served = |name: &str, content, job| {
        let handle = ModelHandle::new(JobId(job), words(), spec(content, 64), false);
        bench.serving.adopt(ModelHandle { name: name.into(), ..handle });
    };
    served("a", 1, 7);
    served("b", 2, 8);
    let found = |name: &str, content| bench.serving.find(name, ContentId([content; 32])).map(|model| model.job.0);
    assert_eq!(found("b", 1), Some(8));
    assert_eq!(found("c", 1), Some(7), "the same weights under another name");
    assert_eq!(found("c", 3), None);
}

#[tokio::test]
async fn the_same_options_keep_the_job() {
    let bench = bench(vec![Answer::Ready(7), Answer::Ready(7)]);
    let first = bench.served(model("tiny", 64)).await;
    let other = bench.serve(model("other", 64), Some(first.clone())).await.ok().expect("it runs");
    assert_eq!((other.job, other.created), (first.job, first.created));
    assert!(Arc::ptr_eq(&other.uses, &first.uses), "requests under either name keep it");
    assert_eq!(bench.names(), [("other".to_owned(), 7), ("tiny".to_owned(), 7)]);
    assert_eq!(bench.log().await, ["start 64", "start 64"], "no job was ended");
}

#[tokio::test]
async fn other_options_end_the_old_job_first_and_move_all_names() {
    let bench = bench(vec![Answer::Ready(7), Answer::Ready(7), Answer::Ready(8)]);
    let first = bench.served(model("tiny", 64)).await;
    bench.serve(model("other", 64), Some(first.clone())).await.ok().expect("it runs");
    bench.serve(model("tiny", 128), Some(first)).await.ok().expect("it is replaced");
    assert_eq!(bench.names(), [("other".to_owned(), 8), ("tiny".to_owned(), 8)]);
    assert_eq!(bench.serving.by_name("other").map(|model| model.context), Some(128));
    assert_eq!(bench.log().await, ["start 64", "start 64", "end 7", "start 128"], "its memory is used again");
}

#[tokio::test]
async fn a_replacement_that_fails_restores_the_old_model_under_all_names() {
    let bench = bench(vec![Answer::Ready(7), Answer::Ready(7), Answer::NoPlan, Answer::Ready(9)]);
    let first = bench.served(model("tiny", 64)).await;
    bench.serve(model("other", 64), Some(first.clone())).await.ok().expect("it runs");
    let failed = bench.serve(model("tiny", 4096), Some(first)).await.err().expect("no plan");
    assert!(matches!(failed.error, NodeError::Plan(_)), "{}", failed.error);
    assert!(failed.then.is_some_and(|then| then.contains("still served")), "{:?}", failed.then);
    assert_eq!(bench.names(), [("other".to_owned(), 9), ("tiny".to_owned(), 9)]);
    assert_eq!(bench.serving.by_name("tiny").map(|model| model.context), Some(64));
    assert_eq!(bench.log().await, ["start 64", "start 64", "end 7", "start 4096", "start 64"]);
}

#[tokio::test]
async fn a_model_that_cannot_be_restored_is_no_longer_served() {
    let bench = bench(vec![Answer::Ready(7), Answer::NoPlan, Answer::NoPlan]);
    let first = bench.served(model("tiny", 64)).await;
    let failed = bench.serve(model("tiny", 4096), Some(first)).await.err().expect("no plan");
    assert!(failed.then.is_some_and(|then| then.contains("no longer served")), "{:?}", failed.then);
    assert!(bench.names().is_empty(), "no name without a job");
}

#[tokio::test]
async fn a_new_job_that_fails_to_load_is_ended() {
    let bench = bench(vec![Answer::Degraded(7)]);
    let failed = bench.serve(model("tiny", 64), None).await.err().expect("it fails");
    assert!(failed.error.to_string().contains("a stage failed to load") && failed.then.is_none());
    assert!(bench.names().is_empty());
    assert_eq!(bench.log().await, ["start 64", "end 7"], "no job without a name stays behind");
}

#[tokio::test]
async fn a_running_job_that_is_degraded_is_not_ended() {
    let bench = bench(vec![Answer::Ready(7), Answer::Degraded(7)]);
    let first = bench.served(model("tiny", 64)).await;
    assert!(bench.serve(model("tiny", 64), Some(first)).await.is_err());
    assert_eq!(bench.names(), [("tiny".to_owned(), 7)], "it is placed again when the mesh changes");
    assert_eq!(bench.log().await, ["start 64", "start 64"]);
}

#[tokio::test]
async fn the_reason_of_a_rejected_start_is_passed_on() {
    let text = |error: NodeError| match error {
        NodeError::Busy => "busy".to_owned(),
        NodeError::Invalid(what) => format!("invalid: {what}"),
        NodeError::Failed(what) => format!("failed: {what}"),
        other @ (NodeError::NotFound(_)
        | NodeError::Plan(_)
        | NodeError::Unauthorised(_)
        | NodeError::Unreachable(_)) => {
            format!("{other:?}")
        }
    };
    for (reason, expected) in [
        (DoneReason::Busy, "busy"),
        (DoneReason::Invalid("no such model".into()), "invalid: no such model"),
        (DoneReason::Failed("the node leaves".into()), "failed: the node leaves"),
        (DoneReason::Cancelled, "failed: cancelled"),
    ] {
        let bench = bench(vec![Answer::Done(reason)]);
        let failed = bench.serve(model("tiny", 64), None).await.err().expect("rejected");
        assert_eq!(text(failed.error), expected);
        assert!(bench.names().is_empty());
    }
}

#[tokio::test]
async fn ending_a_job_removes_all_of_its_names_and_no_others() {
    let bench = bench(vec![]);
    for (name, job) in [("a", 7), ("b", 8), ("c", 7)] {
        bench.serving.adopt(ModelHandle { job: JobId(job), ..model(name, 64) });
    }
    assert_eq!(bench.serving.end(JobId(7)).await, ["a", "c"]);
    assert_eq!(bench.names(), [("b".to_owned(), 8)]);
    assert_eq!(bench.log().await, ["end 7"]);
}

#[tokio::test]
async fn an_inherited_job_does_not_take_the_name_of_a_served_model() {
    let bench = bench(vec![]);
    bench.serving.adopt(ModelHandle { job: JobId(7), ..model("tiny", 64) });
    bench.serving.adopt(ModelHandle { job: JobId(8), ..model("tiny", 128) });
    assert_eq!(bench.names(), [("tiny".to_owned(), 7)]);
    bench.serving.forget(JobId(8));
    assert_eq!(bench.names().len(), 1, "the end of the other job does not concern it");
    bench.serving.forget(JobId(7));
    assert!(bench.names().is_empty());
}

#[tokio::test]
async fn a_run_with_other_options_does_not_make_a_served_model_temporary() {
    let bench = bench(vec![Answer::Ready(7), Answer::Ready(8), Answer::Ready(9)]);
    let permanent = bench.served(model("tiny", 64)).await;
    let replaced = bench.serve(named("tiny", 128, true), Some(permanent)).await.ok().expect("it is replaced");
    assert!(!replaced.uses.is_temporary());
    let temporary = bench.served(named("other", 64, true)).await;
    assert!(temporary.uses.is_temporary());
}

#[tokio::test]
async fn serving_a_temporary_model_makes_it_permanent() {
    let bench = bench(vec![Answer::Ready(7), Answer::Ready(7)]);
    let temporary = bench.served(named("tiny", 64, true)).await;
    let served = bench.serve(model("tiny", 64), Some(temporary.clone())).await.ok().expect("it runs");
    assert!(!served.uses.is_temporary() && !temporary.uses.is_temporary());
}

fn peer(node: &str, free: u64) -> PeerView {
    PeerView { node: node.into(), state: "alive".into(), memory_total: 1600, memory_free: free, ..PeerView::default() }
}

fn job(id: u64, head: bool, nodes: &[&str]) -> JobView {
    let stage = |node: &&str| StageView {
        node: (*node).into(),
        name: String::new(),
        device: String::new(),
        first_layer: 0,
        end_layer: 1,
        bytes: 1,
        ram: 0,
        step_ms: None,
    };
    JobView { job: name_of(JobId(id)), head, stages: nodes.iter().map(stage).collect(), ..JobView::default() }
}

#[test]
fn the_holders_of_a_job_are_the_known_nodes_of_its_stages() {
    let peers = [peer("a", 100), peer("b", 200)];
    let jobs = [job(7, true, &["b", "gone"]), job(7, false, &["a"]), job(8, true, &["a"])];
    let found: Vec<_> = holders(&peers, &jobs, JobId(7)).into_iter().map(|holder| (holder.node, holder.free)).collect();
    assert_eq!(found, [("b".to_owned(), 200)]);
}

#[test]
fn a_holder_is_awaited_until_it_advertises_more_memory() {
    let holder = Holder { node: "a".into(), free: 400 };
    assert!(!holder.is_free(&[peer("a", 400)]) && !holder.is_free(&[peer("a", 300)]));
    assert!(holder.is_free(&[peer("a", 401)]));
    assert!(holder.is_free(&[peer("b", 0)]), "it left");
    assert!(holder.is_free(&[PeerView { state: "down".into(), ..peer("a", 400) }]));
    // Changes below this share of the memory are advertised late.
    let (almost_free, share) = (Holder { node: "a".into(), free: 1590 }, 1600 / UNTOLD);
    assert!(almost_free.is_free(&[peer("a", 1600 - share + 1)]) && !almost_free.is_free(&[peer("a", 1600 - share)]));
}
