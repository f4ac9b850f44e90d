//! Tests of a simulation's state, as the events of its job change it.
use super::*;
use node_core::work::steps::Report;

fn fresh() -> Submission {
    submission(JOB, heat(1000), None)
}

impl Submission {
    fn steps(&self, event: StepsEvent) {
        self.handle_event(&steps(JOB, event));
    }

    fn reports(&self, step: u32, totals: &[i128], hash: Option<u128>) {
        self.steps(StepsEvent::Report { step, report: Report { totals: totals.to_vec(), hash, not_finite: None } });
    }
}

#[test]
fn an_interruption_ends_with_the_first_new_step() {
    let run = fresh();
    run.steps(StepsEvent::Runs { step: 0 });
    run.steps(StepsEvent::Progress { step: 50 });
    run.lost(Duration::from_secs(5));
    run.steps(StepsEvent::Runs { step: 20 });
    assert_eq!(run.told().step, 20, "it rolled back");
    for replayed in [30, 50] {
        run.steps(StepsEvent::Progress { step: replayed });
        assert_eq!(run.told().longest_stall, Duration::ZERO, "step {replayed} was computed before");
    }
    run.steps(StepsEvent::Progress { step: 51 });
    let told = run.told();
    assert!(told.longest_stall >= Duration::from_secs(5), "from when the node fell silent: {:?}", told.longest_stall);
    assert_eq!((told.losses, told.stalled), (1, None));
}

#[test]
fn a_second_loss_belongs_to_the_same_interruption() {
    let run = fresh();
    run.steps(StepsEvent::Runs { step: 0 });
    run.steps(StepsEvent::Progress { step: 50 });
    run.lost(Duration::from_secs(30));
    run.lost(Duration::ZERO);
    assert_eq!(run.told().losses, 2);
    run.steps(StepsEvent::Progress { step: 60 });
    assert!(run.told().longest_stall >= Duration::from_secs(30), "since the first loss");
}

#[test]
fn a_short_interruption_does_not_replace_a_longer_one() {
    let run = fresh();
    run.steps(StepsEvent::Runs { step: 0 });
    run.lost(Duration::from_secs(40));
    run.steps(StepsEvent::Progress { step: 1 });
    run.lost(Duration::ZERO);
    run.steps(StepsEvent::Progress { step: 2 });
    assert!(run.told().longest_stall >= Duration::from_secs(40));
}

#[test]
fn a_run_begins_once() {
    let run = fresh();
    run.steps(StepsEvent::Runs { step: 30 });
    let first = run.told();
    run.steps(StepsEvent::Progress { step: 70 });
    run.steps(StepsEvent::Runs { step: 60 });
    let told = run.told();
    assert_eq!((told.begun_at, told.step), (30, 60));
    assert_eq!(told.running_since, first.running_since, "its time goes on over a rollback");
}

#[test]
fn only_a_placement_of_a_running_job_counts_as_another_one() {
    let run = fresh();
    let tiles = [rows(0, SIZE[1])];
    run.handle_event(&placed(JOB, ME, &tiles));
    run.handle_event(&placed(JOB, OTHER, &tiles));
    assert!(!run.told().placed_again, "it has not begun");
    run.steps(StepsEvent::Runs { step: 0 });
    run.handle_event(&placed(JOB, ME, &tiles));
    let told = run.told();
    assert!(told.placed_again);
    assert_eq!((told.depth, told.step_ns, told.tiles.len()), (2, 1_000_000, 1));
}

#[test]
fn the_first_and_the_last_totals_are_kept() {
    let run = fresh();
    run.reports(0, &[7], None);
    run.reports(300, &[8], None);
    let told = run.told();
    assert_eq!((told.first_totals, told.totals), (Some(vec![7]), Some((300, vec![8]))));
    assert_eq!((told.hash, told.computed), (None, None));
}

#[test]
fn the_report_with_the_hash_is_the_last_step() {
    let run = fresh();
    run.steps(StepsEvent::Runs { step: 0 });
    run.steps(StepsEvent::Progress { step: 990 });
    run.reports(1000, &[7], Some(5));
    let told = run.told();
    assert_eq!((told.step, told.hash), (1000, Some(5)));
    let computed = told.computed.expect("all steps are computed");
    run.handle_event(&ended(JOB, Ending::Completed));
    assert_eq!(run.told().computed, Some(computed), "the writing of outputs is no computing time");
}

#[test]
fn a_run_waits_until_it_is_ready_or_has_saved() {
    let run = fresh();
    let wait = || run.steps(StepsEvent::Waiting { reason: "the disk is full".into() });
    wait();
    assert_eq!(run.told().waiting.as_deref(), Some("the disk is full"));
    run.steps(StepsEvent::Progress { step: 3 });
    assert!(run.told().waiting.is_some(), "steps may go on while a result is not written");
    run.steps(StepsEvent::Checkpoint { step: 20 });
    let told = run.told();
    assert_eq!((told.waiting, told.checkpoint), (None, Some(20)));
    run.handle_event(&Event::JobDegraded { call: None, job: JOB, reason: "no node has the memory".into() });
    assert_eq!(run.told().waiting.as_deref(), Some("no node has the memory"));
    let epoch = node_core::id::Epoch { counter: 2, issuer: ME };
    run.handle_event(&Event::JobReady { call: None, job: JOB, epoch });
    assert_eq!(run.told().waiting, None);
}

#[test]
fn errors_name_fields_instead_of_numbers() {
    let text = "name = \"x\"\nsteps = 1\n[grid]\nsize = [8, 8]\n[rule]\nname = \"wave\"\nspeed = 1\n";
    let run = submission(JOB, simulation(text), None);
    run.steps(StepsEvent::Waiting { reason: "field 0 of the cell 1, 2, 0 is NaN".into() });
    assert_eq!(run.told().waiting.as_deref(), Some("`height` of the cell 1, 2, 0 is NaN"));
    run.handle_event(&ended(JOB, Ending::Failed("field 1 of the cell 1, 2, 0 is NaN".into())));
    assert_eq!(run.told().error(), Some("`before` of the cell 1, 2, 0 is NaN"));
}

#[test]
fn each_ending_has_its_words() {
    let error = |ending| {
        let run = fresh();
        run.handle_event(&ended(JOB, ending));
        run.told().error().map(str::to_owned)
    };
    assert_eq!(fresh().told().error(), None, "it runs");
    assert_eq!(error(Ending::Completed), None);
    assert_eq!(error(Ending::Cancelled).as_deref(), Some("it was cancelled"));
    assert_eq!(error(Ending::Moved("b coordinates it".into())).as_deref(), Some("b coordinates it"));
    assert_eq!(error(Ending::Failed("NaN".into())).as_deref(), Some("NaN"));
}

#[test]
fn only_events_of_a_simulation_wake_its_viewers() {
    let run = fresh();
    let mut changes = run.changes();
    run.handle_event(&Event::PeerUp { node: OTHER });
    assert!(!changes.has_changed().unwrap());
    for event in [
        placed(JOB, ME, &[rows(0, SIZE[1])]),
        steps(JOB, StepsEvent::Progress { step: 1 }),
        ended(JOB, Ending::Cancelled),
    ] {
        run.handle_event(&event);
        assert!(changes.has_changed().unwrap(), "{event:?}");
        drop(changes.borrow_and_update());
    }
}

#[test]
fn the_figures_of_the_end_are_kept() {
    let run = fresh();
    let figures = vec![TileFigures { compute_ns: 5, ..TileFigures::default() }];
    run.handle_event(&Event::JobEnded { job: JOB, ending: Ending::Completed, figures: figures.clone() });
    assert_eq!(run.told().figures, figures);
}
