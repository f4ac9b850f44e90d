//! Tests of reports: states, figures, rates that must stay finite, and the parts of nodes that only hold tiles.
use super::*;
use crate::submissions::testing::{JOB, ME, SIZE, ended, heat, placed, rows, steps, submission};
use crate::views::PeerView;
use node_core::id::{Epoch, PartId};
use node_core::job::{JobState, ProgramView, StandbyView};
use node_core::output::Event;
use node_core::work::steps::{Report, StepsEvent};
use partitioner::Tier;
use std::time::Duration;

const OTHER: NodeId = NodeId([2; 16]);

fn peer(node: NodeId, name: &str, bytes_per_second: u64) -> PeerView {
    PeerView { node: hex(&node), name: name.into(), bytes_per_second, ..PeerView::default() }
}

/// A mesh of this node and another.
fn views() -> Views {
    Views { peers: vec![peer(ME, "a", 1000), peer(OTHER, "b", 3000)], ..Views::default() }
}

fn around() -> ReportContext {
    ReportContext::new(ME, views())
}

fn run(submission: &Submission, around: &ReportContext) -> RunReport {
    match report(submission, around) {
        SimulationReport::Run(run) => *run,
        other @ (SimulationReport::Held(_) | SimulationReport::Lost(_)) => panic!("{other:?}"),
    }
}

fn run_state(submission: &Submission) -> RunState {
    run(submission, &around()).state
}

fn plate() -> Submission {
    submission(JOB, heat(1000), None)
}

fn figures(compute_ns: u64, halo_ns: u64, wait_ns: u64) -> TileFigures {
    TileFigures { compute_ns, halo_ns, wait_ns, sent_bytes: 10, copied_bytes: 3 }
}

/// The core's view of the job, with one tile.
fn coordinated(tile: TileFigures, standby: Option<NodeId>) -> JobView {
    let standby = StandbyView {
        node: standby,
        device: 0,
        tier: Tier::Warm,
        resident: true,
        current: true,
        step: Some(8),
        stall_ns: None,
    };
    let part = PartView {
        busy: None,
        owner: OTHER,
        device: 0,
        bytes: Some(1),
        bytes_max: 1,
        ram: 0,
        step_ns: 1,
        what: WhatView::Tile { block: rows(0, SIZE[1]), step: 9, figures: tile },
        standby: Some(standby),
    };
    JobView {
        job: JOB,
        name: "plate".into(),
        replica_of: None,
        epoch: Epoch { counter: 1, issuer: ME },
        state: JobState::Running,
        reason: None,
        step_ns: 1,
        parts: vec![part],
        program: ProgramView::Steps { step: 9, steps: 1000, depth: 1, checkpoint: None },
    }
}

fn held(part: u16, standby: bool, step: u32, bytes: Option<u64>) -> HeldPart {
    let (name, epoch) = ("plate".into(), Epoch { counter: 3, issuer: OTHER });
    HeldPart {
        job: JOB,
        name,
        epoch,
        part: PartId(part),
        device: 0,
        standby,
        bytes,
        ram: 0,
        what: HeldWork::Tile { step, steps: 1000 },
    }
}

fn holding(tiles: Vec<HeldPart>) -> ReportContext {
    ReportContext::new(ME, Views { tiles, ..views() })
}

#[test]
fn the_state_follows_the_events_of_the_job() {
    let (plate, around) = (plate(), around());
    let state = || run(&plate, &around).state;
    assert_eq!(state(), RunState::Starting);
    plate.handle_event(&placed(JOB, ME, &[rows(0, SIZE[1])]));
    assert_eq!(state(), RunState::Starting, "its tiles have no cells yet");
    plate.handle_event(&steps(JOB, StepsEvent::Runs { step: 0 }));
    assert_eq!(state(), RunState::Running);
    plate.handle_event(&steps(JOB, StepsEvent::Waiting { reason: "the disk is full".into() }));
    assert_eq!(state(), RunState::Waiting);
    assert_eq!(run(&plate, &around).waiting.as_deref(), Some("the disk is full"));
    plate.handle_event(&ended(JOB, Ending::Completed));
    assert_eq!(state(), RunState::Done);
}

#[test]
fn each_ending_is_a_state_of_its_own() {
    let end = |ending| {
        let plate = plate();
        plate.handle_event(&ended(JOB, ending));
        let report = run(&plate, &around());
        (report.state, report.error)
    };
    assert_eq!(end(Ending::Completed), (RunState::Done, None));
    assert_eq!(end(Ending::Cancelled), (RunState::Cancelled, Some("it was cancelled".into())));
    assert_eq!(end(Ending::Failed("NaN".into())), (RunState::Failed, Some("NaN".into())));
    assert_eq!(end(Ending::Moved("b has it".into())), (RunState::Failed, Some("b has it".into())));
}

#[test]
fn a_job_that_waits_before_its_first_step_is_starting() {
    let plate = plate();
    plate.handle_event(&Event::JobDegraded { call: None, job: JOB, reason: "no memory".into() });
    let report = run(&plate, &around());
    assert_eq!((report.state, report.waiting.as_deref()), (RunState::Starting, Some("no memory")));
}

#[test]
fn a_report_can_be_read_at_every_moment() {
    let (plate, around) = (plate(), around());
    let read = || {
        let json = report(&plate, &around).to_json();
        let again: SimulationReport = serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json}"));
        assert!(again.run().is_some_and(|run| run.state == run_state(&plate)), "{json}");
    };
    read();
    for event in [
        placed(JOB, ME, &[rows(0, SIZE[1])]),
        steps(JOB, StepsEvent::Runs { step: 0 }),
        steps(JOB, StepsEvent::Progress { step: 9 }),
        steps(JOB, StepsEvent::Report { step: 9, report: Report { totals: vec![5], hash: None, not_finite: None } }),
        ended(JOB, Ending::Cancelled),
    ] {
        plate.handle_event(&event);
        read();
    }
}

#[test]
fn a_run_without_a_step_has_no_rate() {
    let report = run(&plate(), &around());
    assert_eq!((report.seconds, report.steps_per_s, report.mlups), (0.0, 0.0, 0.0));
    assert_eq!((report.seconds_left, report.steps_per_s_now, report.share_of_node_bandwidth), (None, None, None));
    assert_eq!((report.predicted_steps_per_s, report.communication_hidden), (None, None));
}

#[test]
fn the_prediction_is_that_of_the_placement() {
    let plate = plate();
    plate.handle_event(&placed(JOB, ME, &[rows(0, SIZE[1])]));
    assert_eq!(run(&plate, &around()).predicted_steps_per_s, Some(1000.0), "a millisecond per step");
}

#[test]
fn steps_before_a_resumed_run_do_not_count_for_its_rate() {
    let plate = plate();
    plate.handle_event(&steps(JOB, StepsEvent::Runs { step: 500 }));
    let report = run(&plate, &around());
    assert_eq!((report.step, report.from_step, report.steps_per_s), (500, 500, 0.0));
}

#[test]
fn an_ended_run_no_longer_has_a_present_speed() {
    let plate = plate();
    plate.handle_event(&steps(JOB, StepsEvent::Runs { step: 0 }));
    plate.handle_event(&steps(JOB, StepsEvent::Progress { step: 1000 }));
    plate.handle_event(&ended(JOB, Ending::Completed));
    let report = run(&plate, &around());
    assert_eq!(report.steps_per_s_now, None);
    assert!(report.seconds_left.is_none_or(|left| left == 0.0), "{:?}", report.seconds_left);
}

#[test]
fn the_seconds_of_a_run_end_with_its_last_step() {
    let plate = plate();
    plate.handle_event(&steps(JOB, StepsEvent::Runs { step: 0 }));
    let last = Report { totals: vec![5], hash: Some(7), not_finite: None };
    plate.handle_event(&steps(JOB, StepsEvent::Report { step: 1000, report: last }));
    let seconds = || run(&plate, &around()).seconds;
    let first = seconds();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(seconds(), first);
}

#[test]
fn tiles_have_the_names_of_their_nodes_and_standbys() {
    let plate = plate();
    plate.handle_event(&placed(JOB, OTHER, &[rows(0, SIZE[1])]));
    let around = ReportContext::new(ME, Views { grids: vec![coordinated(figures(5, 4, 1), Some(ME))], ..views() });
    let tile = run(&plate, &around).tiles.remove(0);
    assert_eq!((tile.name.as_deref(), tile.node), (Some("b"), hex(&OTHER)));
    assert_eq!((tile.from, tile.to), ([0; 3], [SIZE[0], SIZE[1], 1]));
    let standby = tile.standby.expect("a standby");
    assert_eq!((standby.name.as_deref(), standby.node, standby.step), (Some("a"), hex(&ME), Some(8)));
}

#[test]
fn a_tile_without_a_node_for_its_standby_has_none() {
    let plate = plate();
    plate.handle_event(&placed(JOB, OTHER, &[rows(0, SIZE[1])]));
    let around = ReportContext::new(ME, Views { grids: vec![coordinated(figures(5, 4, 1), None)], ..views() });
    assert!(run(&plate, &around).tiles[0].standby.is_none());
}

#[test]
fn figures_come_from_the_core_until_the_end_and_then_from_the_end() {
    let plate = plate();
    plate.handle_event(&placed(JOB, OTHER, &[rows(0, SIZE[1])]));
    let around =
        ReportContext::new(ME, Views { grids: vec![coordinated(figures(5_000_000_000, 4, 1), None)], ..views() });
    let running = run(&plate, &around);
    assert_eq!((running.tiles[0].compute_s, running.halo_bytes, running.standby_bytes), (5.0, 10, 3));
    assert_eq!(running.communication_hidden, Some(0.75));
    let last = vec![figures(6_000_000_000, 4, 4)];
    plate.handle_event(&Event::JobEnded { job: JOB, ending: Ending::Completed, figures: last });
    let over = run(&plate, &around);
    assert_eq!((over.tiles[0].compute_s, over.communication_hidden), (6.0, Some(0.0)));
}

#[test]
fn figures_of_another_job_are_not_taken() {
    let plate = plate();
    plate.handle_event(&placed(JOB, OTHER, &[rows(0, SIZE[1])]));
    let other = JobView { job: JobId(77), ..coordinated(figures(5, 4, 1), Some(ME)) };
    let around = ReportContext::new(ME, Views { grids: vec![other], ..views() });
    let report = run(&plate, &around);
    assert!(report.halo_bytes == 0 && report.tiles[0].standby.is_none());
}

#[test]
fn the_share_of_the_bandwidth_is_of_all_computing_nodes() {
    let around = around();
    let on = |nodes: &[NodeId]| {
        let tiles = nodes.iter().map(|node| (*node, Region { start: [0; 3], end: [1; 3] })).collect();
        Progress { tiles, ..Progress::default() }
    };
    assert_eq!(share_of_bandwidth(&on(&[ME]), &around, 500.0), Some(0.5));
    assert_eq!(share_of_bandwidth(&on(&[ME, OTHER]), &around, 1000.0), Some(0.25));
    assert_eq!(share_of_bandwidth(&on(&[ME, ME]), &around, 500.0), Some(0.5), "two tiles of a node share it");
    assert_eq!(share_of_bandwidth(&on(&[ME]), &around, 2000.0), None, "in cache");
    assert_eq!(share_of_bandwidth(&on(&[NodeId([9; 16])]), &around, 1.0), None, "an unknown node");
    assert_eq!(share_of_bandwidth(&on(&[]), &around, 1.0), None);
}

#[test]
fn a_node_whose_bandwidth_was_not_measured_gives_no_share() {
    let around = ReportContext::new(ME, Views { peers: vec![peer(ME, "a", 0)], ..Views::default() });
    let told = Progress { tiles: vec![(ME, Region { start: [0; 3], end: [1; 3] })], ..Progress::default() };
    assert_eq!(share_of_bandwidth(&told, &around, 1.0), None);
}

#[test]
fn the_totals_of_a_field_are_its_first_and_its_last() {
    let plate = plate();
    let total = |step, value| {
        let report = Report { totals: vec![value], hash: None, not_finite: None };
        plate.handle_event(&steps(JOB, StepsEvent::Report { step, report }));
    };
    total(0, 3 << 40);
    total(300, 2 << 40);
    let totals = run(&plate, &around()).totals;
    let shown: Vec<_> = totals.iter().map(|total| (total.first, total.last)).collect();
    assert_eq!(shown.len(), plate.simulation.totals().len());
    assert!(shown.iter().all(|shown| *shown == (Some(3.0), Some(2.0))), "{shown:?}");
}

#[test]
fn a_holder_reports_its_own_tiles_and_the_coordinator() {
    let around = holding(vec![held(0, false, 40, Some(100)), held(1, false, 42, None)]);
    let SimulationReport::Held(report) = held_report(JOB, &around) else { panic!("held") };
    assert_eq!((report.role, report.state, report.bytes), (Role::Owner, RunState::Computing, 100));
    assert_eq!((report.step, report.steps, report.name.as_str()), (Some(42), 1000, "plate"));
    let coordinator = report.coordinator.expect("the issuer of the epoch");
    assert_eq!((coordinator.name.as_deref(), coordinator.node), (Some("b"), hex(&OTHER)));
    assert_eq!(report.held.iter().map(|tile| tile.bytes).collect::<Vec<_>>(), [100, 0], "the second one loads");
}

#[test]
fn the_role_of_a_holder_says_whether_it_owns_tiles() {
    let role = |standbys: &[bool]| {
        let tiles = standbys.iter().zip(0..).map(|(standby, part)| held(part, *standby, 1, Some(1))).collect();
        held_report(JOB, &holding(tiles)).role()
    };
    assert_eq!(role(&[false, false]), Role::Owner);
    assert_eq!(role(&[true]), Role::Standby);
    assert_eq!(role(&[true, false]), Role::OwnerAndStandby);
}

#[test]
fn a_holder_does_not_report_tiles_of_other_jobs() {
    let other = HeldPart { job: JobId(1), ..held(0, false, 900, Some(7)) };
    let around = holding(vec![other, held(1, true, 40, Some(100))]);
    let report = held_report(JOB, &around);
    assert_eq!((report.step(), report.tiles(), report.role()), (Some(40), 1, Role::Standby));
    assert_eq!(around.held().into_iter().collect::<Vec<_>>(), [JobId(1), JOB]);
    assert!(around.holds("000000000000002a") && !around.holds("2a") && !around.holds("0000000000000002"));
}
