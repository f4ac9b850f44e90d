//! Tests of one simulation's results: the order of frames with and without a loss, tilings, failed writes, the end.
use super::*;
use crate::submissions::testing::{JOB, ME, SIZE, ended, heat, placed, rows, simulation, steps, submission, values};
use partitioner::tiles::Block;

mod told;

const CELLS: usize = SIZE[0] * SIZE[1];
const OTHER: NodeId = NodeId([2; 16]);

/// A run with outputs.
struct Run {
    out: tempfile::TempDir,
    submission: Submission,
}

/// A run of one tile.
fn run() -> Run {
    run_of(&[rows(0, SIZE[1])])
}

fn run_of(tiles: &[Block]) -> Run {
    let out = tempfile::tempdir().unwrap();
    let submission = submission(JOB, heat(1000), Some(out.path().to_owned()));
    submission.handle_event(&placed(JOB, ME, tiles));
    Run { out, submission }
}

fn output(number: u16, part: u16, step: u32) -> StateName {
    StateName { job: JOB, part: PartId(part), step, kind: SaveKind::Output(number) }
}

impl Run {
    /// A tile's part of a frame arrives.
    fn part(&self, part: u16, step: u32, rows: usize) -> Result<(), String> {
        self.submission.take(output(0, part, step), &values(SIZE[0] * rows, 1.0))
    }

    /// A whole frame of the only tile arrives.
    fn frame(&self, step: u32) {
        self.part(0, step, SIZE[1]).unwrap();
    }

    fn folder(&self) -> PathBuf {
        self.out.path().join("temperature-png")
    }

    fn file(&self, step: u32) -> PathBuf {
        self.folder().join(format!("temperature_{step:010}.png"))
    }

    /// Steps of the pictures on disk.
    fn written(&self) -> Vec<u32> {
        let entries = std::fs::read_dir(self.folder()).into_iter().flatten().flatten();
        let step = |entry: std::fs::DirEntry| {
            let name = entry.file_name().into_string().unwrap();
            name.strip_prefix("temperature_")?.strip_suffix(".png")?.parse::<u32>().ok()
        };
        let mut steps: Vec<u32> = entries.filter_map(step).collect();
        steps.sort_unstable();
        steps
    }

    /// Frames from step 10 on arrive, one more than are held after a loss; the frame of step 0 is missing.
    fn overfill(&self) -> Vec<u32> {
        let steps: Vec<u32> = (1..=FRAMES_HELD[0] as u32 + 1).map(|number| 10 * number).collect();
        steps.iter().for_each(|step| self.frame(*step));
        steps
    }
}

#[test]
fn frames_are_written_in_order_up_to_a_gap() {
    let run = run();
    run.frame(0);
    run.frame(20);
    run.frame(30);
    assert_eq!(run.written(), [0], "the frame of step 10 may still arrive");
    run.frame(10);
    assert_eq!(run.written(), [0, 10, 20, 30]);
}

#[test]
fn without_a_loss_a_gap_is_never_passed() {
    let run = run();
    let mut steps = run.overfill();
    assert_eq!(run.written(), [0; 0]);
    run.frame(0);
    steps.insert(0, 0);
    assert_eq!(run.written(), steps);
}

#[test]
fn after_a_loss_a_gap_is_passed_when_too_many_frames_wait() {
    let run = run();
    run.submission.lost(Duration::ZERO);
    let held = FRAMES_HELD[0] as u32;
    (1..=held).for_each(|number| run.frame(10 * number));
    assert_eq!(run.written(), [0; 0], "{held} frames are held");
    run.frame(10 * (held + 1));
    assert_eq!(run.written().len() as u32, held + 1);
    assert!(run.submission.results().unwritten.is_empty());
}

#[test]
fn a_run_that_was_placed_again_or_inherited_passes_gaps_too() {
    let again = run();
    again.submission.handle_event(&steps(JOB, StepsEvent::Runs { step: 0 }));
    again.submission.handle_event(&placed(JOB, OTHER, &[rows(0, SIZE[1])]));
    let steps = again.overfill();
    assert_eq!(again.written(), steps);
    let inherited = run();
    inherited.submission.telling().inherited_from = Some(OTHER);
    inherited.overfill();
    assert_eq!(inherited.written(), steps);
}

#[test]
fn a_frame_that_arrives_after_its_gap_was_passed_is_dropped() {
    let run = run();
    run.submission.lost(Duration::ZERO);
    let steps = run.overfill();
    run.frame(0);
    assert_eq!(run.written(), steps, "an animation would go back in time");
    assert!(run.submission.results().mosaics.is_empty());
    let next = steps.last().unwrap() + 10;
    run.frame(next);
    assert_eq!(run.written().last(), Some(&next), "the run goes on");
}

#[test]
fn a_frame_repeated_after_a_rollback_leaves_the_file_as_it_is() {
    let run = run();
    run.frame(0);
    run.frame(10);
    std::fs::write(run.file(0), "as written before").unwrap();
    run.submission.lost(Duration::ZERO);
    run.submission.handle_event(&steps(JOB, StepsEvent::Runs { step: 0 }));
    run.frame(0);
    assert_eq!(std::fs::read(run.file(0)).unwrap(), b"as written before");
    run.frame(10);
    run.frame(20);
    assert_eq!(run.written(), [0, 10, 20]);
}

#[test]
fn a_resumed_run_begins_with_the_first_frame_after_its_checkpoint() {
    let run = run();
    run.submission.handle_event(&steps(JOB, StepsEvent::Runs { step: 25 }));
    run.frame(40);
    assert_eq!(run.written(), [0; 0]);
    run.frame(30);
    assert_eq!(run.written(), [30, 40], "the frames of steps 0 to 20 are not awaited");
}

#[test]
fn a_run_resumed_at_the_step_of_a_frame_begins_with_that_frame() {
    let run = run();
    run.submission.handle_event(&steps(JOB, StepsEvent::Runs { step: 20 }));
    run.frame(30);
    assert_eq!(run.written(), [0; 0]);
    run.frame(20);
    assert_eq!(run.written(), [20, 30]);
}

#[test]
fn a_failed_write_is_repeated_by_the_next_frame() {
    let run = run();
    std::fs::write(run.folder(), "a file is where the folder should be").unwrap();
    let error = run.part(0, 0, SIZE[1]).unwrap_err();
    assert!(error.contains("temperature-png"), "{error}");
    std::fs::remove_file(run.folder()).unwrap();
    run.frame(10);
    assert_eq!(run.written(), [0, 10]);
}

#[test]
fn a_part_sent_again_after_a_failed_write_repeats_the_write() {
    let run = run_of(&[rows(0, 8), rows(8, SIZE[1])]);
    std::fs::write(run.folder(), "a file is where the folder should be").unwrap();
    run.part(0, 0, 8).unwrap();
    run.part(1, 0, 8).unwrap_err();
    std::fs::remove_file(run.folder()).unwrap();
    run.part(1, 0, 8).unwrap();
    assert_eq!(run.written(), [0], "the first part need not arrive again");
}

#[test]
fn a_frame_needs_the_parts_of_all_tiles() {
    let run = run_of(&[rows(0, 8), rows(8, SIZE[1])]);
    run.part(1, 0, 8).unwrap();
    run.part(1, 0, 8).unwrap();
    assert_eq!(run.written(), [0; 0], "the same part twice");
    run.part(0, 0, 8).unwrap();
    assert_eq!(run.written(), [0]);
}

#[test]
fn parts_of_two_tilings_do_not_make_a_frame() {
    let run = run_of(&[rows(0, 8), rows(8, SIZE[1])]);
    run.part(0, 0, 8).unwrap();
    run.submission.handle_event(&placed(JOB, OTHER, &[rows(0, 4), rows(4, SIZE[1])]));
    run.part(1, 0, SIZE[1] - 4).unwrap();
    assert_eq!(run.written(), [0; 0]);
    run.part(0, 0, 4).unwrap();
    assert_eq!(run.written(), [0]);
}

#[test]
fn parts_stay_valid_if_the_tiling_stays_and_the_nodes_change() {
    let tiles = [rows(0, 8), rows(8, SIZE[1])];
    let run = run_of(&tiles);
    run.part(0, 0, 8).unwrap();
    run.submission.handle_event(&placed(JOB, OTHER, &tiles));
    run.part(1, 0, 8).unwrap();
    assert_eq!(run.written(), [0]);
}

#[test]
fn complete_frames_survive_a_new_tiling() {
    let run = run();
    run.frame(10);
    run.submission.handle_event(&placed(JOB, OTHER, &[rows(0, 4), rows(4, SIZE[1])]));
    run.part(0, 0, 4).unwrap();
    run.part(1, 0, SIZE[1] - 4).unwrap();
    assert_eq!(run.written(), [0, 10]);
}

#[test]
fn a_part_of_the_wrong_size_is_rejected_and_may_be_sent_again() {
    let run = run();
    for rows in [1, SIZE[1] - 1, SIZE[1] + 1] {
        run.part(0, 0, rows).unwrap_err();
        assert_eq!(run.written(), [0; 0]);
    }
    run.frame(0);
    assert_eq!(run.written(), [0]);
}

#[test]
fn a_part_of_a_tile_that_is_not_placed_is_rejected() {
    let run = run();
    let error = run.part(1, 0, SIZE[1]).unwrap_err();
    assert!(error.contains("present tiling"), "{error}");
    assert!(run.submission.frame_bytes(output(0, 1, 0)).is_err());
    assert!(run.submission.begin_part(StateName { kind: SaveKind::Checkpoint, ..output(0, 1, 0) }).is_err());
}

#[test]
fn the_end_writes_the_frames_that_wait() {
    for completed in [true, false] {
        let run = run();
        run.frame(20);
        run.frame(30);
        assert_eq!(run.written(), [0; 0]);
        run.submission.close(completed);
        assert_eq!(run.written(), [20, 30], "completed: {completed}");
    }
}

#[test]
fn an_ended_run_takes_no_results() {
    let run = run();
    run.frame(0);
    run.submission.close(true);
    assert_eq!(run.part(0, 10, SIZE[1]), Err(CLOSED.to_owned()));
    let part = StateName { kind: SaveKind::Checkpoint, ..output(0, 0, 20) };
    assert_eq!(run.submission.begin_part(part).err().as_deref(), Some(CLOSED));
    assert_eq!(run.written(), [0], "the folder may belong to another run by now");
}

#[test]
fn the_live_view_shows_the_values_and_does_not_go_back() {
    let run = run_of(&[rows(0, 8), rows(8, SIZE[1])]);
    let show = |step: u32, upper: f32| {
        run.submission.take(output(1, 0, step), &values(SIZE[0] * 8, 1.0)).unwrap();
        run.submission.take(output(1, 1, step), &values(SIZE[0] * 8, upper)).unwrap();
        run.submission.view().unwrap()
    };
    assert!(run.submission.view().is_none());
    let view = show(20, 2.0);
    assert_eq!((view.step, view.field.values.len()), (20, CELLS));
    assert_eq!((view.field.values[0], view.field.values[CELLS - 1]), (1.0, 2.0));
    assert_eq!(show(10, 3.0).step, 20, "a late picture");
    assert_eq!(show(20, 4.0).field.values[CELLS - 1], 4.0, "the same step again");
    assert_eq!(run.written(), [0; 0], "it is not an output of the job");
}

#[test]
fn a_new_picture_wakes_viewers() {
    let run = run();
    let changes = run.submission.changes();
    run.submission.take(output(1, 0, 10), &values(CELLS, 1.0)).unwrap();
    assert!(changes.has_changed().unwrap());
}

#[test]
fn pictures_need_a_live_view() {
    let run = run();
    assert!(run.submission.picture().is_none() && run.submission.text(80, 24).is_none());
    run.submission.take(output(1, 0, 10), &values(CELLS, 1.0)).unwrap();
    let (step, png) = run.submission.picture().unwrap();
    assert!(step == 10 && png.starts_with(b"\x89PNG"));
    let (step, text) = run.submission.text(16, 8).unwrap();
    assert_eq!(step, 10);
    assert!(text.lines().all(|line| line.matches('▀').count() <= 16), "{text}");
}

#[test]
fn the_bytes_of_a_frame_are_those_of_the_shown_cells() {
    let run = run_of(&[rows(0, 4), rows(4, SIZE[1])]);
    let bytes = |name| run.submission.frame_bytes(name);
    assert_eq!(bytes(output(0, 0, 0)), Ok((SIZE[0] * 4 * 4) as u64));
    assert_eq!(bytes(output(0, 1, 0)), Ok((SIZE[0] * 12 * 4) as u64));
    assert_eq!(bytes(output(9, 1, 0)), bytes(output(0, 1, 0)), "further numbers are for live viewers");
    for kind in [SaveKind::Checkpoint, SaveKind::Snapshot] {
        assert!(bytes(StateName { kind, ..output(0, 0, 0) }).is_err(), "{kind:?}");
    }
}

#[test]
fn a_tile_outside_the_shown_layer_sends_nothing_and_is_still_awaited() {
    let text = "name = \"box\"\nsteps = 100\n[grid]\nsize = [8, 4, 6]\n[rule]\nname = \"heat\"\nrate = 0.1\n\
                [[output]]\nkind = \"png\"\nevery = 10\nlayer = 1\n";
    let out = tempfile::tempdir().unwrap();
    let submission = submission(JOB, simulation(text), Some(out.path().to_owned()));
    let layers = |from, to| Block { from: [0, 0, from], to: [8, 4, to] };
    submission.handle_event(&placed(JOB, ME, &[layers(0, 3), layers(3, 6)]));
    assert_eq!(submission.frame_bytes(output(0, 0, 0)), Ok(8 * 4 * 4), "one layer");
    assert_eq!(submission.frame_bytes(output(0, 1, 0)), Ok(0));
    submission.take(output(0, 0, 0), &values(8 * 4, 1.0)).unwrap();
    let picture = out.path().join("temperature-png/temperature_0000000000.png");
    assert!(!picture.exists());
    submission.take(output(0, 1, 0), &Bytes::new()).unwrap();
    assert!(picture.exists());
}

#[test]
fn a_quantity_made_of_two_has_twice_the_bytes() {
    let text = "name = \"flow\"\nsteps = 100\n[grid]\nsize = [64, 8]\n[rule]\nname = \"d2q9\"\ntau = 0.8\n\
                [[output]]\nkind = \"png\"\nquantity = \"vorticity\"\nevery = 10\n";
    let submission = submission(JOB, simulation(text), None);
    submission.handle_event(&placed(JOB, ME, &[Block { from: [0; 3], to: [64, 8, 1] }]));
    assert_eq!(submission.frame_bytes(output(0, 0, 0)), Ok(2 * 64 * 8 * 4));
}

#[test]
fn a_run_without_a_folder_saves_no_checkpoints() {
    let submission = submission(JOB, heat(100), None);
    submission.handle_event(&placed(JOB, ME, &[rows(0, SIZE[1])]));
    let part = StateName { kind: SaveKind::Checkpoint, ..output(0, 0, 20) };
    assert!(submission.begin_part(part).unwrap().is_none());
    assert!(submission.checkpoint(20).is_err());
}

#[test]
fn an_ended_run_keeps_its_last_picture() {
    let run = run();
    run.submission.take(output(1, 0, 10), &values(CELLS, 1.0)).unwrap();
    run.submission.close(true);
    run.submission.handle_event(&ended(JOB, Ending::Completed));
    assert_eq!(run.submission.picture().map(|(step, _)| step), Some(10));
}
