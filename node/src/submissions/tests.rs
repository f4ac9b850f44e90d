//! Tests of the simulations of one node: their folders, ids and ends, what members may fetch, and how many are kept.
use super::*;
use crate::report::{Role, RunState};
use node_core::id::PartId;
use node_core::work::steps::StepsEvent;
use testing::{Bench, JOB, ME, SIZE, ended, heat, placed, rows, simulation, steps, submission, values};

const OTHER: NodeId = NodeId([2; 16]);
/// Far more than a run takes to end; a stalled test fails after this time.
const PATIENCE: Duration = Duration::from_secs(60);

fn until(what: &str, met: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !met() {
        assert!(begun.elapsed() < PATIENCE, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn submit(bench: &Bench, out: Option<&Path>, existing: Existing) -> Result<Arc<Submission>, String> {
    bench.all.submit(Submit { simulation: heat(100), out: out.map(Path::to_owned), existing })
}

/// Ends a job, and waits until everything is on disk.
fn end(bench: &Bench, job: &Submission, ending: Ending) {
    bench.all.handle_event(&ended(job.job, ending));
    until("the end of the run", || job.told().ended.is_some());
}

/// The job of one tile on this node runs.
fn start(bench: &Bench, job: &Submission) {
    bench.all.handle_event(&placed(job.job, ME, &[rows(0, SIZE[1])]));
    bench.all.handle_event(&steps(job.job, StepsEvent::Runs { step: 0 }));
}

fn state(job: &Submission, step: u32, kind: SaveKind) -> StateName {
    StateName { job: job.job, part: PartId(0), step, kind }
}

/// The job that an input starts.
fn started(input: &Input) -> Option<&JobSpec> {
    if let Input::Start { job, .. } = input { Some(job) } else { None }
}

/// The coordinator saves a checkpoint of the whole grid.
fn save(bench: &Bench, job: &Submission, step: u32) {
    let cells = job.simulation.initial(job.simulation.grid().region(), 1);
    bench.deliver(state(job, step, SaveKind::Checkpoint), cells.into()).unwrap();
    bench.all.keep_checkpoint(job.job, step).unwrap();
}

/// The bytes that a member would get.
fn given(bench: &Bench, request: &GridRequest) -> Result<Vec<u8>, String> {
    let mut all = Vec::new();
    bench.all.give(request, &mut |block| {
        all.extend_from_slice(&block);
        true
    })?;
    Ok(all)
}

#[test]
fn a_submission_starts_a_job_whose_caller_does_not_wait() {
    let bench = Bench::new();
    let job = submit(&bench, None, Existing::Refuse).unwrap();
    let inputs = bench.inputs();
    let [Input::Start { call, job: started }, Input::Cancel { call: cancelled }] = inputs.as_slice() else {
        panic!("{inputs:?}")
    };
    assert_eq!(call, cancelled);
    let JobSpec::Steps(spec) = &**started else { panic!("{started:?}") };
    assert_eq!((spec.job, spec.schedule.steps, spec.resume), (job.job, 100, None));
    assert!(spec.schedule.outputs[0] == 0 && spec.schedule.checkpoint_every.is_none(), "nothing is written");
    assert!(spec.schedule.outputs[1] > 0, "live viewers get pictures");
}

#[test]
fn outputs_and_checkpoints_are_requested_if_there_is_a_folder() {
    let (bench, out) = (Bench::new(), tempfile::tempdir().unwrap());
    submit(&bench, Some(out.path()), Existing::Refuse).unwrap();
    let inputs = bench.inputs();
    let [Input::Start { job, .. }, _] = inputs.as_slice() else { panic!("{inputs:?}") };
    let JobSpec::Steps(spec) = &**job else { panic!("{job:?}") };
    assert_eq!((spec.schedule.outputs[0], spec.schedule.checkpoint_every), (10, Some(20)));
}

#[test]
fn submissions_of_the_same_simulation_are_different_jobs() {
    let bench = Bench::new();
    let jobs = [0; 3].map(|_| submit(&bench, None, Existing::Refuse).unwrap());
    assert!(jobs[0].job != jobs[1].job && jobs[1].job != jobs[2].job && jobs[0].job != jobs[2].job);
    assert_eq!(jobs[0].id, jobs[1].id, "nodes fetch it once");
    let listed: Vec<JobId> = bench.all.all().iter().map(|job| job.job).collect();
    assert_eq!(listed, jobs.map(|job| job.job), "oldest first");
}

#[test]
fn a_run_without_a_folder_cannot_be_resumed() {
    let bench = Bench::new();
    let error = submit(&bench, None, Existing::Resume).err().unwrap();
    assert!(error.contains("--out"), "{error}");
    assert!(bench.all.all().is_empty() && bench.inputs().is_empty());
}

#[test]
fn a_folder_is_for_one_run_at_a_time() {
    let (bench, out) = (Bench::new(), tempfile::tempdir().unwrap());
    let first = submit(&bench, Some(out.path()), Existing::Refuse).unwrap();
    for existing in [Existing::Refuse, Existing::Resume, Existing::Overwrite] {
        let error = submit(&bench, Some(out.path()), existing).err().unwrap();
        let name = format!("{:016x}", first.job.0);
        assert!(error.contains(&name) && error.contains("meshnode cancel"), "{existing:?}: {error}");
    }
    end(&bench, &first, Ending::Cancelled);
    submit(&bench, Some(out.path()), Existing::Refuse).expect("the first run wrote nothing and is over");
}

#[test]
fn foreign_files_are_not_touched() {
    let (bench, out) = (Bench::new(), tempfile::tempdir().unwrap());
    std::fs::write(out.path().join("thesis.tex"), "mine").unwrap();
    for existing in [Existing::Refuse, Existing::Resume, Existing::Overwrite] {
        let error = submit(&bench, Some(out.path()), existing).err().unwrap();
        assert!(error.contains("thesis.tex"), "{existing:?}: {error}");
    }
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 1);
    assert!(bench.all.all().is_empty());
}

#[test]
fn a_run_resumes_at_its_last_checkpoint() {
    let (bench, out) = (Bench::new(), tempfile::tempdir().unwrap());
    let first = submit(&bench, Some(out.path()), Existing::Refuse).unwrap();
    start(&bench, &first);
    save(&bench, &first, 20);
    save(&bench, &first, 40);
    end(&bench, &first, Ending::Failed("the node was stopped".into()));
    let error = submit(&bench, Some(out.path()), Existing::Refuse).err().unwrap();
    assert!(error.contains("--resume"), "{error}");
    let second = submit(&bench, Some(out.path()), Existing::Resume).unwrap();
    let told = second.told();
    assert_eq!((told.begun_at, told.step, told.checkpoint), (40, 40, Some(40)));
    let inputs = bench.inputs();
    let started: Vec<&JobSpec> = inputs.iter().filter_map(started).collect();
    let Some(JobSpec::Steps(spec)) = started.last() else { panic!("{inputs:?}") };
    assert_eq!((spec.job, spec.resume), (second.job, Some(40)));
}

#[test]
fn a_finished_run_is_resumed_only_with_more_steps() {
    let (bench, out) = (Bench::new(), tempfile::tempdir().unwrap());
    let first = submit(&bench, Some(out.path()), Existing::Refuse).unwrap();
    start(&bench, &first);
    save(&bench, &first, 100);
    end(&bench, &first, Ending::Completed);
    let error = submit(&bench, Some(out.path()), Existing::Resume).err().unwrap();
    assert!(error.contains("step 100") && error.contains("raise `steps`"), "{error}");
    let longer = Submit { simulation: heat(200), out: Some(out.path().to_owned()), existing: Existing::Resume };
    assert_eq!(bench.all.submit(longer).unwrap().told().begun_at, 100);
}

#[test]
fn another_simulation_does_not_resume_from_a_foreign_checkpoint() {
    let (bench, out) = (Bench::new(), tempfile::tempdir().unwrap());
    let first = submit(&bench, Some(out.path()), Existing::Refuse).unwrap();
    start(&bench, &first);
    save(&bench, &first, 20);
    end(&bench, &first, Ending::Cancelled);
    let text = "name = \"plate\"\nsteps = 100\n[grid]\nsize = [32, 16]\n[rule]\nname = \"heat\"\nrate = 0.2\n";
    let other = Submit { simulation: simulation(text), out: Some(out.path().to_owned()), existing: Existing::Resume };
    let error = bench.all.submit(other).err().unwrap();
    assert!(error.contains("another simulation"), "{error}");
}

#[test]
fn a_checkpoint_with_a_missing_part_is_not_kept() {
    let (bench, out) = (Bench::new(), tempfile::tempdir().unwrap());
    let job = submit(&bench, Some(out.path()), Existing::Refuse).unwrap();
    bench.all.handle_event(&placed(job.job, ME, &[rows(0, 8), rows(8, SIZE[1])]));
    let cells = job.simulation.initial(crate::regions::region(&rows(0, 8)), 1);
    bench.deliver(state(&job, 20, SaveKind::Checkpoint), cells.into()).unwrap();
    assert!(bench.all.keep_checkpoint(job.job, 20).is_err());
    assert_eq!(checkpoints::newest_step(out.path()), None);
}

#[test]
fn a_checkpoint_of_the_wrong_size_is_rejected() {
    let (bench, out) = (Bench::new(), tempfile::tempdir().unwrap());
    let job = submit(&bench, Some(out.path()), Existing::Refuse).unwrap();
    start(&bench, &job);
    let cells = job.simulation.initial(job.simulation.grid().region(), 1);
    for bytes in [cells[1..].to_vec(), [cells.as_slice(), &[0]].concat()] {
        assert!(bench.deliver(state(&job, 20, SaveKind::Checkpoint), bytes.into()).is_err());
    }
    assert!(bench.all.keep_checkpoint(job.job, 20).is_err());
}

#[test]
fn results_of_an_unknown_job_are_rejected() {
    let bench = Bench::new();
    let stranger = submission(JOB, heat(100), None);
    for kind in [SaveKind::Output(0), SaveKind::Checkpoint] {
        assert!(bench.deliver(state(&stranger, 20, kind), values(SIZE[0] * SIZE[1], 1.0)).is_err(), "{kind:?}");
    }
    assert!(bench.all.keep_checkpoint(JOB, 20).is_err());
}

#[test]
fn an_output_reaches_the_disk_before_the_end_is_visible() {
    let (bench, out) = (Bench::new(), tempfile::tempdir().unwrap());
    let job = submit(&bench, Some(out.path()), Existing::Refuse).unwrap();
    start(&bench, &job);
    // The frame of step 0 is missing, so this one waits for it.
    bench.deliver(state(&job, 10, SaveKind::Output(0)), values(SIZE[0] * SIZE[1], 1.0)).unwrap();
    let picture = out.path().join("temperature-png/temperature_0000000010.png");
    assert!(!picture.exists());
    end(&bench, &job, Ending::Cancelled);
    assert!(picture.exists());
}

#[test]
fn a_cancelled_job_is_ended_by_the_core() {
    let bench = Bench::new();
    let job = submit(&bench, None, Existing::Refuse).unwrap();
    bench.all.cancel(job.job);
    let inputs = bench.inputs();
    assert!(matches!(inputs.last(), Some(Input::End { job: ended }) if *ended == job.job), "{inputs:?}");
    assert_eq!(job.told().ended, None, "it has ended when the core reports it");
}

#[test]
fn a_loss_counts_for_the_job_that_it_struck() {
    let bench = Bench::new();
    let [first, second] = [0; 2].map(|_| submit(&bench, None, Existing::Refuse).unwrap());
    bench.all.handle_event(&Event::Lost { job: first.job, node: OTHER, silent_ms: 100 });
    assert_eq!((first.told().losses, second.told().losses), (1, 0));
    // The loss of the previous coordinator was counted when the job was inherited.
    second.telling().inherited_from = Some(OTHER);
    bench.all.handle_event(&Event::Lost { job: second.job, node: OTHER, silent_ms: 100 });
    assert_eq!(second.told().losses, 0);
    bench.all.handle_event(&Event::Lost { job: second.job, node: ME, silent_ms: 100 });
    assert_eq!(second.told().losses, 1);
}

#[test]
fn events_of_unknown_jobs_are_ignored() {
    let bench = Bench::new();
    let job = submit(&bench, None, Existing::Refuse).unwrap();
    bench.all.handle_event(&steps(JobId(job.job.0 ^ 1), StepsEvent::Progress { step: 9 }));
    bench.all.handle_event(&ended(JobId(job.job.0 ^ 1), Ending::Completed));
    assert_eq!((job.told().step, job.told().ended), (0, None));
}

#[test]
fn a_job_is_found_by_its_id_or_a_unique_prefix() {
    let bench = Bench::new();
    for id in [0x1234_0000_0000_0000, 0x1235_0000_0000_0000, 0x0000_0000_0000_0012] {
        bench.all.lock().push(Arc::new(submission(JobId(id), heat(100), None)));
    }
    let found = |job: &str| bench.all.named(job).map(|job| job.job.0);
    assert_eq!(found("1234000000000000"), Some(0x1234_0000_0000_0000));
    assert_eq!(found("1235"), Some(0x1235_0000_0000_0000));
    assert_eq!(found("123"), None, "two begin so");
    assert_eq!(found("12"), None, "a short number is a prefix, not an id");
    assert_eq!(found("00"), Some(0x12));
    for none in ["", "9", "12340000000000000", "xyz", "-234"] {
        assert_eq!(found(none), None, "{none}");
    }
}

#[test]
fn ended_jobs_are_forgotten_oldest_first_and_running_ones_never() {
    let job = |id: u64, over: bool| {
        let job = submission(JobId(id), heat(100), None);
        job.telling().ended = over.then_some(Ending::Completed);
        Arc::new(job)
    };
    let mut jobs: Vec<_> = (0..40).map(|id| job(id, id % 2 == 0)).collect();
    forget_old(&mut jobs);
    let left = |over: bool| {
        let left = jobs.iter().filter(|job| job.told().ended.is_some() == over);
        left.map(|job| job.job.0).collect::<Vec<_>>()
    };
    assert_eq!(left(false), (0..40).filter(|id| id % 2 == 1).collect::<Vec<_>>());
    assert_eq!(left(true), (8..40).filter(|id| id % 2 == 0).collect::<Vec<_>>(), "the latest {OVER_KEPT}");
}

#[test]
fn large_ended_jobs_are_forgotten_sooner_but_not_the_last() {
    let job = |id: u64| {
        let mut job = submission(JobId(id), heat(100), None);
        job.id.bytes = OVER_BYTES;
        job.telling().ended = Some(Ending::Completed);
        Arc::new(job)
    };
    let mut jobs = vec![job(1), job(2), job(3)];
    forget_old(&mut jobs);
    assert_eq!(jobs.iter().map(|job| job.job.0).collect::<Vec<_>>(), [3]);
}

#[test]
fn a_simulation_is_given_to_members_by_its_content() {
    let bench = Bench::new();
    let job = submit(&bench, None, Existing::Refuse).unwrap();
    let packed = given(&bench, &GridRequest::Simulation(job.id.content)).unwrap();
    assert_eq!((packed.len() as u64, packed), (job.id.bytes, job.simulation.to_bytes()));
    assert!(given(&bench, &GridRequest::Simulation(ContentId([9; 32]))).is_err());
}

#[test]
fn a_simulation_is_held_until_its_job_has_no_tiles_here() {
    let bench = Bench::new();
    let content = submit(&bench, None, Existing::Refuse).unwrap().id.content;
    assert!(bench.all.hold_simulation(JobId(1), content).is_some());
    assert!(bench.all.hold_simulation(JobId(2), content).is_some());
    bench.all.lock().clear();
    bench.all.forget_simulation(JobId(1));
    assert!(bench.all.simulation_of(content).is_some(), "the other job has tiles");
    bench.all.forget_simulation(JobId(2));
    assert!(bench.all.simulation_of(content).is_none());
    assert!(bench.all.hold_simulation(JobId(3), content).is_none());
}

#[test]
fn a_saved_state_is_given_while_it_is_stored() {
    let bench = Bench::new();
    let job = submit(&bench, None, Existing::Refuse).unwrap();
    let name = state(&job, 20, SaveKind::Snapshot);
    assert!(given(&bench, &GridRequest::State(name)).is_err());
    bench.deliver(name, vec![1, 2, 3].into()).unwrap();
    assert_eq!(given(&bench, &GridRequest::State(name)), Ok(vec![1, 2, 3]));
    assert!(given(&bench, &GridRequest::State(StateName { step: 21, ..name })).is_err());
}

#[test]
fn cells_of_a_checkpoint_are_given_for_any_box() {
    let (bench, out) = (Bench::new(), tempfile::tempdir().unwrap());
    let job = submit(&bench, Some(out.path()), Existing::Refuse).unwrap();
    start(&bench, &job);
    save(&bench, &job, 20);
    let region = crate::regions::region(&rows(3, 5));
    let cells = given(&bench, &GridRequest::checkpoint(job.job, 20, region)).unwrap();
    assert_eq!(cells, job.simulation.initial(region, 1));
    assert!(given(&bench, &GridRequest::checkpoint(job.job, 40, region)).is_err(), "there is no such step");
    let outside = Region { start: [0, 0, 0], end: [SIZE[0], SIZE[1] + 1, 1] };
    assert!(given(&bench, &GridRequest::checkpoint(job.job, 20, outside)).is_err());
}

#[tokio::test]
async fn a_run_that_was_submitted_before_a_restart_is_reported_as_lost() {
    let (before, out) = (Bench::new(), tempfile::tempdir().unwrap());
    let job = submit(&before, Some(out.path()), Existing::Refuse).unwrap();
    start(&before, &job);
    let (cells, id) = (job.simulation.initial(job.simulation.grid().region(), 1), job.job);
    let before = tokio::task::spawn_blocking(move || {
        before.deliver(state(&job, 20, SaveKind::Checkpoint), cells.into()).unwrap();
        before.all.keep_checkpoint(job.job, 20).unwrap();
        before
    });
    let after = Bench::in_folder(before.await.unwrap().folder);
    let reports = after.all.reports(&after.all.around().await).await;
    let [report] = reports.as_slice() else { panic!("{reports:?}") };
    assert_eq!((report.state(), report.role(), report.name()), (RunState::Lost, Role::Submitter, "plate"));
    assert_eq!((report.job(), report.checkpoint()), (format!("{:016x}", id.0).as_str(), Some(20)));
    assert!(report.error().is_some_and(|error| error.contains("--resume")), "{report:?}");
}

#[tokio::test]
async fn a_run_that_ended_before_a_restart_is_not_reported() {
    let before = Bench::new();
    let job = submit(&before, None, Existing::Refuse).unwrap();
    before.all.handle_event(&ended(job.job, Ending::Completed));
    let listed = || before.all.ledger.entries().len();
    let begun = std::time::Instant::now();
    while listed() > 0 {
        assert!(begun.elapsed() < PATIENCE, "still listed");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let after = Bench::in_folder(before.folder);
    assert!(after.all.reports(&after.all.around().await).await.is_empty());
}

#[tokio::test]
async fn a_run_that_moved_to_another_node_stays_listed_for_the_restart() {
    let before = Bench::new();
    let job = submit(&before, None, Existing::Refuse).unwrap();
    before.all.handle_event(&ended(job.job, Ending::Moved("b coordinates it now".into())));
    let begun = std::time::Instant::now();
    while job.told().ended.is_none() {
        assert!(begun.elapsed() < PATIENCE, "it does not end");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(job.told().moved);
    assert_eq!(before.all.ledger.entries().len(), 1, "its successor has it");
}
