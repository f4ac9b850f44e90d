//! Stages between frames and executor: positions, gaps, replays, bounds, and the epoch fence.
#![expect(clippy::wildcard_enum_match_arm, reason = "a test looks at few of many outputs")]
mod drafts;
mod pacing;
mod tile;

use super::*;
use crate::id::{ContentId, RequestId};
use crate::limits::PAGE_POSITIONS;
use crate::message::{Drafts, FrameHeader, ToParticipant};
use crate::message::{FromStage, ToStage};
use crate::work::serve::{ItemResult, Position, RowFormat, Sampling, StageOrder};
use crate::work::{Cursors, PartState, PartWork, Payload, Ready, Resume, Task};
use alloc::{string::ToString, vec};
use partitioner::{Room, Tier};

const JOB: JobId = JobId(1);
const COORDINATOR: NodeId = NodeId([1; 16]);
const ME: NodeId = NodeId([2; 16]);
const NEXT: NodeId = NodeId([3; 16]);
const STANDBY: NodeId = NodeId([4; 16]);
const EPOCH: Epoch = Epoch { counter: 4, issuer: COORDINATOR };
const LATER: Epoch = Epoch { counter: 5, issuer: COORDINATOR };
const NOW: Instant = Instant(0);

/// A route with these owners, two layers each.
fn order(owners: &[NodeId], part: u16, standby: Option<Tier>) -> Box<Order> {
    order_of(2048, owners, part, standby)
}

/// The same, with two contexts of this many positions.
fn order_of(context: u32, owners: &[NodeId], part: u16, standby: Option<Tier>) -> Box<Order> {
    let layers = (0..owners.len() as u32).map(|at| 2 * at..2 * at + 2).collect();
    let stage = StageOrder {
        content: ContentId([7; 32]),
        layers,
        sequences: 2,
        context,
        width: 16,
        row: RowFormat::lossless(16),
        int8: false,
    };
    Box::new(Order {
        name: "a model".into(),
        part: PartId(part),
        owners: owners.into(),
        device: 0,
        standby,
        bytes_max: 100,
        ram: 0,
        successors: Vec::new(),
        other_parts: Vec::new(),
        previous: Vec::new(),
        work: PartWork::Stage(stage),
    })
}

fn say(parts: &mut Parts, from: NodeId, epoch: Epoch, message: ToParticipant) {
    parts.handle_message(NOW, from, JOB, epoch, message);
}

fn prepare(parts: &mut Parts, epoch: Epoch, order: Box<Order>) {
    say(parts, COORDINATOR, epoch, ToParticipant::Prepare(order));
}

/// Loads the ordered part. Returns whether there was one.
fn load(parts: &mut Parts) -> bool {
    let mut loads = outputs(parts).into_iter().filter_map(|output| match output {
        PartOutput::Load { load, order, .. } => Some((load, order.part)),
        _ => None,
    });
    let Some((load, part)) = loads.next() else { return false };
    parts.handle_loaded(NOW, JOB, part, load, Ok(Loaded { bytes: 100, ram: 0, ram_pages: 0, step: None }));
    true
}

fn go(parts: &mut Parts, epoch: Epoch, part: u16, resume: Vec<(RequestId, u32)>) {
    let go = ToParticipant::Go { part: PartId(part), resume: Resume::Stage(resume) };
    say(parts, COORDINATOR, epoch, go);
}

/// This node's stage: part 0 of a route that continues at `next`.
fn stage(next: Option<NodeId>) -> Parts {
    stage_of(2048, next)
}

/// The same, with room for two contexts of this many positions.
fn stage_of(context: u32, next: Option<NodeId>) -> Parts {
    let owners: Vec<NodeId> = core::iter::once(ME).chain(next).collect();
    let mut parts = Parts::new(ME);
    prepare(&mut parts, EPOCH, order_of(context, &owners, 0, None));
    assert!(load(&mut parts));
    go(&mut parts, EPOCH, 0, Vec::new());
    outputs(&mut parts);
    parts
}

fn frame(request: u64, cursor: u32, count: u32, last: bool) -> FrameHeader {
    FrameHeader {
        job: JOB,
        epoch: EPOCH,
        part: PartId(0),
        channel: request,
        cursor,
        count,
        last,
        continues: None,
        drafts: Drafts::default(),
    }
}

/// Delivers a frame whose tensor is named by request and position.
fn give(parts: &mut Parts, from: NodeId, header: FrameHeader) {
    let tensor = TensorId::Arrived(header.channel << 32 | u64::from(header.cursor));
    parts.handle_frame(NOW, from, header, Payload::Tensor(tensor));
}

fn feed(parts: &mut Parts, header: FrameHeader) {
    give(parts, COORDINATOR, header);
}

fn outputs(parts: &mut Parts) -> Vec<PartOutput> {
    core::iter::from_fn(|| parts.poll_output()).collect()
}

fn discards(outputs: &[PartOutput]) -> usize {
    outputs.iter().filter(|output| matches!(output, PartOutput::Shell(Output::Discard { .. }))).count()
}

/// Starts what can start.
fn start_run(parts: &mut Parts, now: Instant) -> Option<Box<Run>> {
    let mut outputs: Vec<PartOutput> = parts.poll_runs(now).into_iter().collect();
    outputs.extend(self::outputs(parts));
    outputs.into_iter().find_map(|output| match output {
        PartOutput::Shell(Output::Run(run)) => Some(run),
        _ => None,
    })
}

fn items(run: &Run) -> Vec<crate::work::serve::Item> {
    match &run.task {
        Task::Batch(items) => items.clone(),
        Task::Steps(_) => panic!("expected a batch, found {run:?}"),
    }
}

/// Starts what can start. Returns the work id, and request and first position of each item.
fn start(parts: &mut Parts) -> Option<(WorkId, Vec<(u64, u32)>)> {
    let run = start_run(parts, NOW)?;
    Some((run.work, items(&run).iter().map(|item| (item.request.0, item.position)).collect()))
}

fn finish(parts: &mut Parts, part: u16, work: WorkId, results: Vec<ItemResult>) -> Vec<PartOutput> {
    parts.handle_ran(NOW, PartId(part), work, Ok(RunResult::Batch { results, compute_ns: 0 }));
    outputs(parts)
}

fn report(epoch: Epoch, say: ToCoordinator) -> PartOutput {
    PartOutput::Report { job: JOB, epoch, say }
}

fn gap(request: u64, have: u32) -> PartOutput {
    report(EPOCH, ToCoordinator::Stage(FromStage::Gap { request: RequestId(request), have }))
}

fn open(parts: &mut Parts, request: u64, sampling: Sampling, tokens: Vec<u32>, prompt: u32) {
    let open = ToStage::Open { request: RequestId(request), sampling, tokens, prompt };
    say(parts, COORDINATOR, EPOCH, ToParticipant::Stage(open));
}

fn close(parts: &mut Parts, request: u64) -> Vec<PartOutput> {
    say(parts, COORDINATOR, EPOCH, ToParticipant::Stage(ToStage::Close { request: RequestId(request) }));
    outputs(parts)
}

fn released(request: u64) -> PartOutput {
    PartOutput::Shell(Output::Release { job: JOB, part: PartId(0), request: RequestId(request) })
}

/// What a stage answered to its last order.
fn prepared(outputs: &[PartOutput]) -> Option<Vec<Position>> {
    outputs.iter().rev().find_map(|output| match output {
        PartOutput::Report {
            say: ToCoordinator::Prepared { result: Ok(Ready { has: PartState::Stage(positions), .. }), .. },
            ..
        } => Some(positions.clone()),
        _ => None,
    })
}

#[test]
fn missing_positions_are_a_gap_and_extra_ones_are_overwritten() {
    let mut parts = stage(Some(NEXT));
    feed(&mut parts, frame(7, 5, 1, true));
    let done = outputs(&mut parts);
    assert_eq!((done.contains(&gap(7, 0)), discards(&done)), (true, 1));
    feed(&mut parts, frame(7, 0, 5, false));
    feed(&mut parts, frame(7, 2, 3, false));
    feed(&mut parts, frame(7, 6, 1, true));
    assert!(outputs(&mut parts).contains(&gap(7, 5)), "queued positions count as held");
    let (work, items) = start(&mut parts).unwrap();
    assert_eq!(items, vec![(7, 0)], "one item per request, and a resend of queued positions is discarded");
    finish(&mut parts, 0, work, vec![ItemResult::Hidden]);
    assert_eq!(start(&mut parts), None);
    feed(&mut parts, frame(7, 2, 3, false));
    assert_eq!(start(&mut parts).unwrap().1, vec![(7, 2)], "computed positions are computed again");
}

#[test]
fn decode_steps_meet_in_one_batch_and_prefill_shares_it() {
    let mut parts = stage(Some(NEXT));
    feed(&mut parts, frame(1, 0, 512, false));
    let (first, items) = start(&mut parts).unwrap();
    assert_eq!(items, vec![(1, 0)]);
    assert_eq!(start(&mut parts), None, "one batch at a time");
    feed(&mut parts, frame(1, 512, 300, false));
    feed(&mut parts, frame(2, 0, 1, true));
    finish(&mut parts, 0, first, vec![ItemResult::Hidden]);
    let (alone, items) = start(&mut parts).unwrap();
    assert_eq!(items, vec![(2, 0)], "the first step is measured alone");
    finish(&mut parts, 0, alone, vec![ItemResult::Hidden]);
    feed(&mut parts, frame(2, 1, 1, true));
    assert_eq!(start(&mut parts).unwrap().1, vec![(2, 1), (1, 512)]);
}

#[test]
fn a_sampled_frame_waits_for_open_at_the_last_stage() {
    let mut parts = stage(None);
    feed(&mut parts, frame(1, 0, 512, false));
    feed(&mut parts, frame(1, 512, 3, true));
    let (work, _) = start(&mut parts).unwrap();
    let done = finish(&mut parts, 0, work, vec![ItemResult::Nothing]);
    let progress = FromStage::Progress { request: RequestId(1), position: 512 };
    assert!(done.contains(&report(EPOCH, ToCoordinator::Stage(progress))));
    assert_eq!(start(&mut parts), None);
    open(&mut parts, 1, Sampling::GREEDY, Vec::new(), 0);
    let (work, items) = start(&mut parts).unwrap();
    assert_eq!(items, vec![(1, 512)]);
    let done = finish(&mut parts, 0, work, vec![ItemResult::Token(9.into())]);
    let token = FromStage::Token { request: RequestId(1), position: 515, sampled: 9.into() };
    assert!(done.contains(&report(EPOCH, ToCoordinator::Stage(token))));
}

#[test]
fn history_goes_with_a_sample_only_if_the_sampling_depends_on_it() {
    let mut parts = stage(None);
    let penalised = Sampling { repetition_penalty_e6: 1_100_000, ..Sampling::GREEDY };
    open(&mut parts, 1, penalised, vec![5, 6], 2);
    open(&mut parts, 2, Sampling::GREEDY, Vec::new(), 0);
    feed(&mut parts, frame(1, 0, 2, true));
    feed(&mut parts, frame(2, 0, 2, true));
    let histories = |parts: &mut Parts| {
        let run = start_run(parts, NOW).expect("a batch");
        (run.work, items(&run).iter().map(|item| item.sample.clone().unwrap().history).collect::<Vec<_>>())
    };
    let (work, sampled) = histories(&mut parts);
    assert_eq!(sampled, vec![vec![5, 6], vec![]]);
    finish(&mut parts, 0, work, vec![ItemResult::Token(7.into()), ItemResult::Token(8.into())]);
    feed(&mut parts, frame(1, 2, 1, true));
    assert_eq!(histories(&mut parts).1, vec![vec![5, 6, 7]]);
}

#[test]
fn late_frames_of_a_closed_request_open_no_cache() {
    let mut parts = stage(Some(NEXT));
    feed(&mut parts, frame(1, 0, 5, false));
    let (work, _) = start(&mut parts).unwrap();
    feed(&mut parts, frame(1, 5, 1, true));
    let done = close(&mut parts, 1);
    assert!(done.contains(&released(1)));
    assert_eq!(discards(&done), 1, "the queued frame");
    assert_eq!(discards(&finish(&mut parts, 0, work, vec![ItemResult::Hidden])), 1, "the running item");
    feed(&mut parts, frame(1, 0, 5, false));
    assert_eq!(discards(&outputs(&mut parts)), 1, "the late frame");
    assert_eq!(start(&mut parts), None);
}

#[test]
fn a_third_request_waits_for_a_close_and_evicts_only_when_resent() {
    let mut parts = stage_of(PAGE_POSITIONS, Some(NEXT));
    for request in [1, 2, 3] {
        feed(&mut parts, frame(request, 0, 5, true));
    }
    let (work, items) = start(&mut parts).unwrap();
    assert_eq!(items, vec![(1, 0), (2, 0)]);
    finish(&mut parts, 0, work, vec![ItemResult::Hidden, ItemResult::Hidden]);
    assert_eq!(start(&mut parts), None);
    close(&mut parts, 2);
    let (work, items) = start(&mut parts).unwrap();
    assert_eq!(items, vec![(3, 0)]);
    finish(&mut parts, 0, work, vec![ItemResult::Hidden]);

    feed(&mut parts, frame(4, 0, 5, true));
    assert_eq!(start(&mut parts), None);
    feed(&mut parts, frame(4, 0, 5, true));
    let done = outputs(&mut parts);
    assert!(done.contains(&released(1)), "the least recently used one");
    assert_eq!(discards(&done), 2, "the first copy, and the logged rows of the evicted request");
    assert_eq!(start(&mut parts).unwrap().1, vec![(4, 0)]);
}

/// Says that a request has ended and stays cached.
fn rest(parts: &mut Parts, request: u64) -> Vec<PartOutput> {
    say(
        parts,
        COORDINATOR,
        EPOCH,
        ToParticipant::Stage(ToStage::Rest { request: RequestId(request), drafts: Drafts::default() }),
    );
    outputs(parts)
}

/// Runs the next batch, of `items` items.
fn run_next(parts: &mut Parts, items: usize) -> Vec<PartOutput> {
    let (work, started) = start(parts).expect("a batch");
    assert_eq!(started.len(), items, "{started:?}");
    finish(parts, 0, work, vec![ItemResult::Hidden; items])
}

#[test]
fn a_request_continues_the_cache_of_another_and_its_rows_say_so() {
    let mut parts = stage(Some(NEXT));
    let after = |from: u64, header: FrameHeader| FrameHeader { continues: Some(from), ..header };
    feed(&mut parts, frame(1, 0, 300, true));
    feed(&mut parts, after(1, frame(2, 256, 9, true)));
    assert!(outputs(&mut parts).contains(&gap(2, 0)), "the positions are not computed yet");
    run_next(&mut parts, 1);
    rest(&mut parts, 1);
    feed(&mut parts, after(1, frame(2, 256, 9, true)));
    let fork = Output::Fork { job: JOB, part: PartId(0), from: RequestId(1), to: RequestId(2), positions: 256 };
    assert!(outputs(&mut parts).contains(&PartOutput::Shell(fork)));
    let sent = run_next(&mut parts, 1);
    let frames = sent.iter().filter_map(|output| match output {
        PartOutput::Frame { header, .. } => Some((header.cursor, header.count, header.continues)),
        _ => None,
    });
    assert_eq!(frames.collect::<Vec<_>>(), [(256, 9, Some(1))]);
    feed(&mut parts, frame(2, 265, 1, true));
    assert!(run_next(&mut parts, 1).iter().any(
        |output| matches!(output, PartOutput::Frame { header, .. } if header.continues.is_none() && header.cursor == 265)
    ));
    feed(&mut parts, after(1, frame(3, 200, 9, true)));
    let refused = outputs(&mut parts);
    assert!(refused.iter().any(|output| matches!(output, PartOutput::Refused { .. })), "no whole pages: {refused:?}");
    // A request that is not here, and one that has fewer positions.
    feed(&mut parts, after(9, frame(3, 256, 9, true)));
    assert!(outputs(&mut parts).contains(&gap(3, 0)));
    feed(&mut parts, after(2, frame(3, 384, 9, true)));
    assert!(outputs(&mut parts).contains(&gap(3, 0)));
}

#[test]
fn resting_requests_give_way_and_do_not_count_as_running() {
    let mut parts = stage_of(PAGE_POSITIONS, Some(NEXT));
    feed(&mut parts, frame(1, 0, 5, true));
    feed(&mut parts, frame(2, 0, 5, true));
    run_next(&mut parts, 2);
    rest(&mut parts, 2);
    feed(&mut parts, frame(3, 0, 5, true));
    let done = outputs(&mut parts);
    assert!(done.contains(&released(2)), "it has no `Close` yet, and gives way: {done:?}");
    run_next(&mut parts, 1);
    feed(&mut parts, frame(4, 0, 5, true));
    assert!(!outputs(&mut parts).contains(&released(1)), "it runs, so the frame waits");
}

#[test]
fn another_partition_leaves_nothing_of_the_one_before() {
    let mut parts = stage_of(PAGE_POSITIONS, Some(NEXT));
    for request in [1, 2, 3] {
        feed(&mut parts, frame(request, 0, 5, false));
    }
    let (work, _) = start(&mut parts).unwrap();
    feed(&mut parts, frame(1, 5, 5, false));
    prepare(&mut parts, LATER, order(&[ME, NEXT, STANDBY], 0, None));
    let done = outputs(&mut parts);
    assert_eq!(discards(&done), 2, "one was queued, one had no cache");
    let replaced =
        done.iter().any(|output| matches!(output, PartOutput::Load { replaces, .. } if replaces[..] == [PartId(0)]));
    assert!(replaced, "{done:?}");
    let hidden = vec![ItemResult::Hidden, ItemResult::Hidden];
    assert_eq!(discards(&finish(&mut parts, 0, work, hidden)), 2);
    feed(&mut parts, frame(1, 0, 5, false));
    let done = outputs(&mut parts);
    assert_eq!(discards(&done), 1);
    assert!(done.contains(&PartOutput::Stale { to: COORDINATOR, job: JOB, mine: LATER }));
}

#[test]
fn a_failed_batch_fails_the_stage_and_every_later_frame_reports_it() {
    let mut parts = stage(Some(NEXT));
    feed(&mut parts, frame(1, 0, 5, false));
    let (work, _) = start(&mut parts).unwrap();
    parts.handle_ran(NOW, PartId(0), work, Err("device lost".to_string()));
    let failed = ToCoordinator::Failed { part: PartId(0), held: true, reason: "device lost".to_string() };
    let failed = report(EPOCH, failed);
    assert!(outputs(&mut parts).contains(&failed));
    feed(&mut parts, frame(1, 0, 5, false));
    let done = outputs(&mut parts);
    assert_eq!((done.contains(&failed), discards(&done)), (true, 1));
}

#[test]
fn frames_that_do_not_fit_are_rejected() {
    let mut parts = stage(Some(NEXT));
    let misfits =
        [frame(1, 0, 0, false), frame(1, 0, 513, false), frame(1, 2048, 1, false), frame(1, u32::MAX, 2, false)];
    for misfit in misfits {
        feed(&mut parts, misfit);
        let done = outputs(&mut parts);
        assert_eq!(discards(&done), 1);
        assert!(done.iter().any(|output| matches!(output, PartOutput::Refused { .. })), "{misfit:?}");
    }
    feed(&mut parts, FrameHeader { part: PartId(1), ..frame(1, 0, 5, false) });
    let done = outputs(&mut parts);
    let missing = |output: &PartOutput| {
        matches!(output, PartOutput::Report { say: ToCoordinator::Failed { part: PartId(1), held: false, .. }, .. })
    };
    assert!(done.iter().any(missing) && discards(&done) == 1, "this node holds no part 1: {done:?}");
    parts.handle_frame(NOW, NEXT, frame(1, 0, 5, false), Payload::Tokens(vec![0; 5]));
    assert!(matches!(outputs(&mut parts)[..], [PartOutput::Refused { from: NEXT, .. }]));
}

#[test]
fn an_executor_that_never_answers_is_detected() {
    let mut parts = stage(Some(NEXT));
    feed(&mut parts, frame(1, 0, 5, false));
    start(&mut parts).unwrap();
    assert_eq!(parts.stalled(Instant(60_000_000_000)), None, "nothing is known of its speed yet");
    assert!(parts.stalled(Instant(121_000_000_000)).is_some());
}

// ---- standbys, the send log, another epoch

/// (receiver, first position, count) of the frames among outputs.
fn frames(outputs: &[PartOutput]) -> Vec<(NodeId, u32, u32)> {
    let frames = outputs.iter().filter_map(|output| match output {
        PartOutput::Frame { to, header, .. } => Some((*to, header.cursor, header.count)),
        _ => None,
    });
    frames.collect()
}

/// Delivers a frame and computes it.
fn run(parts: &mut Parts, header: FrameHeader) -> Vec<PartOutput> {
    feed(parts, header);
    let (work, _) = start(parts).unwrap();
    finish(parts, header.part.0, work, vec![ItemResult::Hidden])
}

fn standby(parts: &mut Parts, epoch: Epoch, part: u16, node: Option<NodeId>) {
    say(parts, COORDINATOR, epoch, ToParticipant::Standby { part: PartId(part), node });
}

fn held(part: u16, to: u16, cursors: Vec<(u64, u32)>, again: bool) -> ToParticipant {
    let (part, to, cursors) = (PartId(part), PartId(to), Cursors::Each(cursors));
    ToParticipant::Held { part, to, cursors, live: true, again }
}

#[test]
fn a_standby_gets_a_copy_and_the_next_stage_is_served_first() {
    let mut parts = stage(Some(NEXT));
    standby(&mut parts, EPOCH, 1, Some(STANDBY));
    let done = run(&mut parts, frame(1, 0, 5, false));
    assert_eq!(frames(&done), vec![(NEXT, 0, 5), (STANDBY, 0, 5)]);
    let marked = |output: &PartOutput| match output {
        PartOutput::Frame { to, copy, .. } => *copy == (*to == STANDBY),
        _ => true,
    };
    assert!(done.iter().all(marked), "only the copy may be dropped on the way");
    run(&mut parts, frame(1, 5, 1, true));
    // The standby lost something that is in the send log. No other node may ask for it.
    say(&mut parts, STANDBY, EPOCH, held(1, 0, vec![(1, 5)], true));
    say(&mut parts, COORDINATOR, EPOCH, held(1, 0, vec![(1, 0)], true));
    assert_eq!(frames(&outputs(&mut parts)), vec![(STANDBY, 5, 1)]);
    standby(&mut parts, EPOCH, 1, None);
    assert_eq!(frames(&run(&mut parts, frame(1, 6, 1, true))), vec![(NEXT, 6, 1)]);
}

#[test]
fn a_standby_computes_and_sends_nothing_until_it_is_promoted() {
    let previous = NodeId([5; 16]);
    let owner = NodeId([6; 16]);
    let mut parts = Parts::new(ME);
    prepare(&mut parts, EPOCH, order(&[previous, owner, NEXT], 1, Some(Tier::Hot)));
    assert!(load(&mut parts));
    outputs(&mut parts);
    let at_part_1 = |cursor, count, last| FrameHeader { part: PartId(1), ..frame(1, cursor, count, last) };
    give(&mut parts, previous, at_part_1(5, 1, true));
    let asks = PartOutput::Message { to: previous, job: JOB, epoch: EPOCH, say: held(1, 0, vec![(1, 0)], true) };
    assert!(outputs(&mut parts).contains(&asks), "it asks the node that feeds it");
    for (cursor, count) in [(0, 4), (4, 1), (5, 1)] {
        give(&mut parts, previous, at_part_1(cursor, count, true));
    }
    let (work, items) = start(&mut parts).unwrap();
    assert_eq!(items, vec![(1, 0)], "queued frames are joined");
    assert_eq!(frames(&finish(&mut parts, 1, work, vec![ItemResult::Hidden])), vec![]);
    // Promoted. The next stage holds four positions, so it is sent the whole entry that has the next one.
    prepare(&mut parts, LATER, order(&[previous, ME, NEXT], 1, None));
    let has = Position { request: RequestId(1), have: 6, kept_from: 0 };
    assert_eq!(prepared(&outputs(&mut parts)), Some(vec![has]));
    go(&mut parts, LATER, 1, vec![(RequestId(1), 4)]);
    let done = outputs(&mut parts);
    assert_eq!(frames(&done), vec![(NEXT, 0, 6)]);
    let new_epoch = |output: &PartOutput| match output {
        PartOutput::Frame { header, .. } => header.epoch == LATER && header.part == PartId(2),
        _ => true,
    };
    assert!(done.iter().all(new_epoch));
}

#[test]
fn another_epoch_keeps_what_was_computed_and_drops_what_waited() {
    let mut parts = stage(Some(NEXT));
    run(&mut parts, frame(1, 0, 5, false));
    feed(&mut parts, frame(1, 5, 1, true));
    let (work, _) = start(&mut parts).unwrap();
    feed(&mut parts, frame(1, 6, 1, true));
    prepare(&mut parts, LATER, order(&[ME, STANDBY], 0, None));
    let done = outputs(&mut parts);
    assert_eq!((discards(&done), prepared(&done)), (1, None), "the queued frame; the answer waits for the batch");
    let done = finish(&mut parts, 0, work, vec![ItemResult::Hidden]);
    assert_eq!(frames(&done), vec![], "nothing leaves under the old epoch");
    assert_eq!(prepared(&done), Some(vec![Position { request: RequestId(1), have: 6, kept_from: 0 }]));
    // Frames of the new epoch wait until all parts are ready.
    let later = |cursor, count| FrameHeader { epoch: LATER, ..frame(1, cursor, count, true) };
    feed(&mut parts, later(6, 1));
    assert_eq!(start(&mut parts), None);
    // The next stage holds more than this one computed: nothing is sent until this one is past that.
    go(&mut parts, LATER, 0, vec![(RequestId(1), 7)]);
    let (work, items) = start(&mut parts).unwrap();
    assert_eq!(items, vec![(1, 6)]);
    assert_eq!(frames(&finish(&mut parts, 0, work, vec![ItemResult::Hidden])), vec![]);
    assert_eq!(frames(&run(&mut parts, later(7, 1))), vec![(STANDBY, 7, 1)]);
    // Resent from an earlier position: now the next stage needs it.
    assert_eq!(frames(&run(&mut parts, later(3, 5))), vec![(STANDBY, 3, 5)]);
}

#[test]
fn rows_are_sent_again_if_their_frame_overtakes_the_start_of_the_epoch() {
    let mut parts = stage(Some(NEXT));
    run(&mut parts, frame(1, 0, 5, false));
    prepare(&mut parts, LATER, order(&[ME, STANDBY], 0, None));
    outputs(&mut parts);
    feed(&mut parts, FrameHeader { epoch: LATER, ..frame(1, 0, 5, false) });
    go(&mut parts, LATER, 0, vec![(RequestId(1), 5)]);
    let (work, _) = start(&mut parts).unwrap();
    assert_eq!(frames(&finish(&mut parts, 0, work, vec![ItemResult::Hidden])), vec![(STANDBY, 0, 5)]);
}

#[test]
fn the_previous_stage_receives_progress_when_it_changes() {
    let previous = NodeId([5; 16]);
    let mut parts = Parts::new(ME);
    prepare(&mut parts, EPOCH, order(&[previous, ME], 1, None));
    assert!(load(&mut parts));
    go(&mut parts, EPOCH, 1, Vec::new());
    give(&mut parts, previous, FrameHeader { part: PartId(1), ..frame(1, 0, 5, false) });
    let (work, _) = start(&mut parts).unwrap();
    finish(&mut parts, 1, work, vec![ItemResult::Nothing]);
    let (due, _) = parts.next_wakeup().unwrap();
    parts.handle_wakeup(due);
    let say = held(1, 0, vec![(1, 5)], false);
    assert_eq!(outputs(&mut parts), vec![PartOutput::Message { to: previous, job: JOB, epoch: EPOCH, say }]);
    let (due, _) = parts.next_wakeup().unwrap();
    parts.handle_wakeup(due);
    assert_eq!(outputs(&mut parts), vec![], "no news");
}

/// The coordinator never noticed that this node coordinated the job for a while, and counts on the part it ordered.
#[test]
fn a_part_that_waits_for_its_order_is_reported_and_released() {
    let ordered = Box::new(Order { successors: vec![ME], ..*order(&[NEXT, COORDINATOR], 1, Some(Tier::Hot)) });
    let mut parts = Parts::new(ME);
    prepare(&mut parts, EPOCH, ordered.clone());
    assert!(load(&mut parts));
    let mine = Epoch { counter: 6, issuer: ME };
    let promoted = Box::new(Order { owners: vec![NEXT, ME], standby: None, ..*ordered });
    parts.handle_message(NOW, ME, JOB, mine, ToParticipant::Prepare(promoted));
    parts.handle_left(NOW, JOB, Some(COORDINATOR));
    outputs(&mut parts);
    let header = FrameHeader { part: PartId(1), ..frame(1, 0, 5, false) };
    give(&mut parts, NEXT, header);
    let reported = outputs(&mut parts);
    let missing = |output: &PartOutput| match output {
        PartOutput::Report { epoch, say: ToCoordinator::Failed { held, .. }, .. } => *epoch == EPOCH && !held,
        _ => false,
    };
    assert!(reported.iter().any(missing), "{reported:?}");
    assert_eq!(parts.held().count(), 1, "it may be ordered yet");
    say(&mut parts, NEXT, EPOCH, ToParticipant::Release { part: PartId(1) });
    assert_eq!(parts.held().count(), 1, "only the coordinator releases it");
    say(&mut parts, COORDINATOR, EPOCH, ToParticipant::Release { part: PartId(1) });
    assert_eq!(parts.held().count(), 0);
}

/// A standby does not know the voters. It stays, because its vote may be the one that a successor lacks.
#[test]
fn a_standby_stays_for_the_successor_of_its_coordinator() {
    for (successors, kept) in [(vec![NEXT], true), (vec![], false)] {
        let mut parts = Parts::new(ME);
        let order = Order { successors, ..*order(&[COORDINATOR, NEXT], 0, Some(Tier::Hot)) };
        prepare(&mut parts, EPOCH, Box::new(order));
        assert!(load(&mut parts));
        parts.handle_coordinator_gone(NOW, COORDINATOR, false);
        assert_eq!(parts.held().count() == 1, kept, "a majority may elect a successor, if there is one");
    }
}

/// What a stage has in RAM is reported as it was loaded, also under an order that says otherwise.
#[test]
fn a_stage_keeps_its_experts_in_ram_and_no_order_asks_for_more_than_a_plan_may() {
    let ordered = |ram: u64| Order { ram, ..*order(&[ME, NEXT], 0, None) };
    assert_eq!(ordered(700).problem(ME), None, "seven eighths of the experts");
    assert!(ordered(701).problem(ME).is_some_and(|why| why.contains("expected at most 700")));
    let mut parts = Parts::new(ME);
    prepare(&mut parts, EPOCH, Box::new(ordered(300)));
    let loads = outputs(&mut parts);
    let load = loads.iter().find_map(|output| match output {
        PartOutput::Load { load, .. } => Some(*load),
        _ => None,
    });
    let loaded = Loaded { bytes: 100, ram: 300, ram_pages: 0, step: None };
    parts.handle_loaded(NOW, JOB, PartId(0), load.expect("it is loaded"), Ok(loaded));
    let ready = |parts: &mut Parts| {
        outputs(parts).into_iter().find_map(|output| match output {
            PartOutput::Report { say: ToCoordinator::Prepared { result: Ok(ready), .. }, .. } => Some(ready.room()),
            _ => None,
        })
    };
    assert_eq!(ready(&mut parts), Some(Room { memory: 100, ram: 300 }));
    let next = Epoch { counter: EPOCH.counter + 1, ..EPOCH };
    prepare(&mut parts, next, Box::new(ordered(0)));
    assert_eq!(ready(&mut parts), Some(Room { memory: 100, ram: 300 }), "it stays where it is");
}
