//! One stage between frames and executor: positions, gaps, replays and bounds.
#![expect(clippy::wildcard_enum_match_arm, reason = "a test looks at few of many outputs")]
use super::*;
use crate::work::serve::Sampling;
use alloc::{string::ToString, vec};

const JOB: JobId = JobId(1);
const HEAD: NodeId = NodeId([1; 16]);
const NEXT: NodeId = NodeId([3; 16]);
const EPOCH: Epoch = Epoch { counter: 4, minter: HEAD };
const NOW: Instant = Instant(0);

fn route(next: Option<NodeId>) -> Route {
    Route {
        epoch: EPOCH,
        head: HEAD,
        stage: 0,
        previous: HEAD,
        next,
        sequences: 2,
        context: 2048,
        stages: 2,
        ring_rows: 1024,
        shadow: false,
    }
}

/// A stage between the head and `next`, with two caches.
fn stage(next: Option<NodeId>) -> Pipeline {
    let mut pipeline = Pipeline::default();
    pipeline.install(JOB, route(next));
    pipeline.go(NOW, JOB, &[]);
    pipeline
}

fn frame(request: u64, position: u32, count: u32, sample: bool) -> FrameHeader {
    FrameHeader { job: JOB, epoch: EPOCH, part: 0, channel: request, cursor: position, count, last: sample }
}

/// Gives a frame whose tensor is named by request and position.
fn give(pipeline: &mut Pipeline, header: FrameHeader) {
    let tensor = TensorId(1 << 63 | header.request().0 << 32 | u64::from(header.cursor));
    pipeline.handle_frame(NOW, HEAD, header, Payload::Tensor(tensor));
}

fn outputs(pipeline: &mut Pipeline) -> Vec<PipelineOutput> {
    core::iter::from_fn(|| pipeline.poll_output()).collect()
}

fn discards(outputs: &[PipelineOutput]) -> usize {
    outputs.iter().filter(|output| matches!(output, PipelineOutput::Discard { .. })).count()
}

/// Starts what may start: (work, request and first position of each item).
fn start(pipeline: &mut Pipeline) -> Option<(WorkId, Vec<(u64, u32)>)> {
    match pipeline.poll_compute(NOW)? {
        PipelineOutput::Compute { work, items, .. } => {
            Some((work, items.iter().map(|item| (item.request.0, item.position)).collect()))
        }
        other => panic!("expected a batch, found {other:?}"),
    }
}

fn finish(pipeline: &mut Pipeline, work: WorkId, results: Vec<ItemResult>) -> Vec<PipelineOutput> {
    pipeline.handle_computed(NOW, work, Ok(results));
    outputs(pipeline)
}

fn gap(request: u64, have: u32) -> PipelineOutput {
    let message = Message::Gap { job: JOB, epoch: EPOCH, request: RequestId(request), have };
    PipelineOutput::Message { to: HEAD, message }
}

#[test]
fn less_answers_a_gap_and_more_is_overwritten() {
    let mut pipeline = stage(Some(NEXT));
    give(&mut pipeline, frame(7, 5, 1, true));
    let told = outputs(&mut pipeline);
    assert_eq!((told.contains(&gap(7, 0)), discards(&told)), (true, 1));
    give(&mut pipeline, frame(7, 0, 5, false));
    give(&mut pipeline, frame(7, 2, 3, false));
    give(&mut pipeline, frame(7, 6, 1, true));
    assert!(outputs(&mut pipeline).contains(&gap(7, 5)), "what waits counts as held");
    let (work, items) = start(&mut pipeline).unwrap();
    assert_eq!(items, vec![(7, 0)], "one item per request");
    finish(&mut pipeline, work, vec![ItemResult::Hidden]);
    assert_eq!(start(&mut pipeline).unwrap().1, vec![(7, 2)]);
}

#[test]
fn decode_steps_meet_in_one_batch_and_take_turns_with_prefill() {
    let mut pipeline = stage(Some(NEXT));
    give(&mut pipeline, frame(1, 0, 512, false));
    let (first, items) = start(&mut pipeline).unwrap();
    assert_eq!(items, vec![(1, 0)]);
    assert_eq!(start(&mut pipeline), None, "one batch at a time");
    give(&mut pipeline, frame(1, 512, 512, false));
    give(&mut pipeline, frame(2, 0, 1, true));
    finish(&mut pipeline, first, vec![ItemResult::Hidden]);
    let (second, items) = start(&mut pipeline).unwrap();
    assert_eq!(items, vec![(2, 0)], "decode goes first after a prefill");
    give(&mut pipeline, frame(2, 1, 1, true));
    finish(&mut pipeline, second, vec![ItemResult::Hidden]);
    assert_eq!(start(&mut pipeline).unwrap().1, vec![(1, 512)], "then the chunk's turn comes");
}

#[test]
fn a_sampled_frame_waits_for_open_at_the_last_stage() {
    let mut pipeline = stage(None);
    give(&mut pipeline, frame(1, 0, 512, false));
    give(&mut pipeline, frame(1, 512, 3, true));
    let (work, _) = start(&mut pipeline).unwrap();
    let told = finish(&mut pipeline, work, vec![ItemResult::Nothing]);
    let progress = Message::Progress { job: JOB, epoch: EPOCH, request: RequestId(1), position: 512 };
    assert!(told.contains(&PipelineOutput::Message { to: HEAD, message: progress }));
    assert_eq!(start(&mut pipeline), None);
    pipeline.handle_open(JOB, RequestId(1), Sampling::GREEDY, Vec::new(), 0);
    let (work, items) = start(&mut pipeline).unwrap();
    assert_eq!(items, vec![(1, 512)]);
    let told = finish(&mut pipeline, work, vec![ItemResult::Token { token: 9 }]);
    let token = Message::Token { job: JOB, epoch: EPOCH, request: RequestId(1), position: 515, token: 9 };
    assert!(told.contains(&PipelineOutput::Message { to: HEAD, message: token }));
}

#[test]
fn history_goes_with_a_sample_only_where_the_sampling_looks_back() {
    let mut pipeline = stage(None);
    let penalised = Sampling { repetition_penalty_e6: 1_100_000, ..Sampling::GREEDY };
    pipeline.handle_open(JOB, RequestId(1), penalised, vec![5, 6], 2);
    pipeline.handle_open(JOB, RequestId(2), Sampling::GREEDY, Vec::new(), 0);
    give(&mut pipeline, frame(1, 0, 2, true));
    give(&mut pipeline, frame(2, 0, 2, true));
    let histories = |pipeline: &mut Pipeline| match pipeline.poll_compute(NOW) {
        Some(PipelineOutput::Compute { work, items, .. }) => {
            let histories = items.iter().map(|item| item.sample.clone().unwrap().history).collect::<Vec<_>>();
            (work, histories)
        }
        other => panic!("expected a batch, found {other:?}"),
    };
    let (work, told) = histories(&mut pipeline);
    assert_eq!(told, vec![vec![5, 6], vec![]]);
    finish(&mut pipeline, work, vec![ItemResult::Token { token: 7 }, ItemResult::Token { token: 8 }]);
    give(&mut pipeline, frame(1, 2, 1, true));
    assert_eq!(histories(&mut pipeline).1, vec![vec![5, 6, 7]]);
}

#[test]
fn late_frames_of_a_closed_request_open_no_cache() {
    let mut pipeline = stage(Some(NEXT));
    give(&mut pipeline, frame(1, 0, 5, false));
    let (work, _) = start(&mut pipeline).unwrap();
    give(&mut pipeline, frame(1, 5, 1, true));
    pipeline.handle_close(JOB, RequestId(1));
    let told = outputs(&mut pipeline);
    assert!(told.contains(&PipelineOutput::Release { job: JOB, request: RequestId(1) }));
    assert_eq!(discards(&told), 1, "what waited");
    assert_eq!(discards(&finish(&mut pipeline, work, vec![ItemResult::Hidden])), 1, "what ran");
    give(&mut pipeline, frame(1, 0, 5, false));
    assert_eq!(discards(&outputs(&mut pipeline)), 1, "what came late");
    assert_eq!(start(&mut pipeline), None);
}

#[test]
fn a_third_request_waits_for_a_close_and_evicts_only_when_sent_again() {
    let mut pipeline = stage(Some(NEXT));
    for request in [1, 2, 3] {
        give(&mut pipeline, frame(request, 0, 5, true));
    }
    let (work, items) = start(&mut pipeline).unwrap();
    assert_eq!(items, vec![(1, 0), (2, 0)]);
    finish(&mut pipeline, work, vec![ItemResult::Hidden, ItemResult::Hidden]);
    assert_eq!(start(&mut pipeline), None);
    pipeline.handle_close(JOB, RequestId(2));
    outputs(&mut pipeline);
    let (work, items) = start(&mut pipeline).unwrap();
    assert_eq!(items, vec![(3, 0)]);
    finish(&mut pipeline, work, vec![ItemResult::Hidden]);

    give(&mut pipeline, frame(4, 0, 5, true));
    assert_eq!(start(&mut pipeline), None);
    give(&mut pipeline, frame(4, 0, 5, true));
    let told = outputs(&mut pipeline);
    assert!(told.contains(&PipelineOutput::Release { job: JOB, request: RequestId(1) }), "the one unused for longest");
    assert_eq!(discards(&told), 2, "the first copy, and the ring's rows of the one that went");
    assert_eq!(start(&mut pipeline).unwrap().1, vec![(4, 0)]);
}

#[test]
fn a_fence_leaves_nothing_behind() {
    let mut pipeline = stage(Some(NEXT));
    give(&mut pipeline, frame(1, 0, 5, false));
    give(&mut pipeline, frame(2, 0, 5, false));
    give(&mut pipeline, frame(3, 0, 5, false));
    let (work, _) = start(&mut pipeline).unwrap();
    give(&mut pipeline, frame(1, 5, 5, false));
    pipeline.fence(JOB);
    let told = outputs(&mut pipeline);
    assert_eq!(discards(&told), 2, "one waited, one had no cache");
    let hidden = vec![ItemResult::Hidden, ItemResult::Hidden];
    assert_eq!(discards(&finish(&mut pipeline, work, hidden)), 2);
    give(&mut pipeline, frame(1, 0, 5, false));
    assert_eq!(discards(&outputs(&mut pipeline)), 1);
}

#[test]
fn a_failed_batch_fails_the_stage_and_every_later_frame_says_so() {
    let mut pipeline = stage(Some(NEXT));
    give(&mut pipeline, frame(1, 0, 5, false));
    let (work, _) = start(&mut pipeline).unwrap();
    pipeline.handle_computed(NOW, work, Err("device lost".to_string()));
    let failed = PipelineOutput::Failed { job: JOB, epoch: EPOCH, reason: "device lost".to_string() };
    assert!(outputs(&mut pipeline).contains(&failed));
    give(&mut pipeline, frame(1, 0, 5, false));
    let told = outputs(&mut pipeline);
    assert_eq!((told.contains(&failed), discards(&told)), (true, 1));
}

#[test]
fn frames_that_do_not_fit_are_refused() {
    let mut pipeline = stage(Some(NEXT));
    let misfits = [
        FrameHeader { part: 1, ..frame(1, 0, 5, false) },
        frame(1, 0, 0, false),
        frame(1, 0, 513, false),
        frame(1, 2048, 1, false),
        frame(1, u32::MAX, 2, false),
    ];
    for misfit in misfits {
        give(&mut pipeline, misfit);
        let told = outputs(&mut pipeline);
        assert_eq!(discards(&told), 1);
        assert!(told.iter().any(|output| matches!(output, PipelineOutput::Refused { .. })), "{misfit:?}");
    }
    pipeline.handle_frame(NOW, NEXT, frame(1, 0, 5, false), Payload::Tokens(vec![0; 5]));
    assert!(matches!(outputs(&mut pipeline)[..], [PipelineOutput::Refused { from: NEXT, .. }]));
}

#[test]
fn an_executor_that_never_answers_is_seen() {
    let mut pipeline = stage(Some(NEXT));
    give(&mut pipeline, frame(1, 0, 5, false));
    start(&mut pipeline).unwrap();
    assert_eq!(pipeline.wedged(Instant(60_000_000_000)), None, "nothing is known of its speed yet");
    assert!(pipeline.wedged(Instant(121_000_000_000)).is_some());
}

// ---- standbys, rings, another route

const STANDBY: NodeId = NodeId([4; 16]);

/// (receiver, first position, count) of the frames among outputs.
fn frames(outputs: &[PipelineOutput]) -> Vec<(NodeId, u32, u32)> {
    let frames = outputs.iter().filter_map(|output| match output {
        PipelineOutput::Frame { to, header, .. } => Some((*to, header.cursor, header.count)),
        _ => None,
    });
    frames.collect()
}

/// Gives a frame and computes it.
fn run(pipeline: &mut Pipeline, header: FrameHeader) -> Vec<PipelineOutput> {
    give(pipeline, header);
    let (work, _) = start(pipeline).unwrap();
    finish(pipeline, work, vec![ItemResult::Hidden])
}

#[test]
fn a_standby_gets_a_copy_and_the_next_stage_is_served_first() {
    let mut pipeline = stage(Some(NEXT));
    pipeline.handle_standby(JOB, 1, Some(STANDBY));
    let told = run(&mut pipeline, frame(1, 0, 5, false));
    assert_eq!(frames(&told), vec![(NEXT, 0, 5), (STANDBY, 0, 5)]);
    let marked = |output: &PipelineOutput| match output {
        PipelineOutput::Frame { to, copy, .. } => *copy == (*to == STANDBY),
        _ => true,
    };
    assert!(told.iter().all(marked), "the copy, and only that, may be left out on the way");
    run(&mut pipeline, frame(1, 5, 1, true));
    // It lost something: the ring has it. Nobody else may ask.
    pipeline.handle_resume(STANDBY, JOB, RequestId(1), 5);
    pipeline.handle_resume(HEAD, JOB, RequestId(1), 0);
    assert_eq!(frames(&outputs(&mut pipeline)), vec![(STANDBY, 5, 1)]);
    pipeline.handle_standby(JOB, 1, None);
    assert_eq!(frames(&run(&mut pipeline, frame(1, 6, 1, true))), vec![(NEXT, 6, 1)]);
}

#[test]
fn a_shadow_computes_and_tells_nobody_until_it_is_promoted() {
    let mut pipeline = Pipeline::default();
    let previous = NodeId([2; 16]);
    let shadow = Route { stage: 1, previous, shadow: true, ..route(Some(NEXT)) };
    pipeline.install(JOB, shadow.clone());
    pipeline.go(NOW, JOB, &[]);
    let at_stage_1 = |position, count, sample| FrameHeader { part: 1, ..frame(1, position, count, sample) };
    let feed = |pipeline: &mut Pipeline, header: FrameHeader| {
        let tensor = TensorId(1 << 63 | u64::from(header.cursor));
        pipeline.handle_frame(NOW, previous, header, Payload::Tensor(tensor));
    };
    feed(&mut pipeline, at_stage_1(5, 1, true));
    let resume = Message::Resume { job: JOB, epoch: EPOCH, request: RequestId(1), have: 0 };
    let told = outputs(&mut pipeline);
    assert!(told.contains(&PipelineOutput::Message { to: previous, message: resume }), "it asks whoever feeds it");
    for (position, count) in [(0, 4), (4, 1), (5, 1)] {
        feed(&mut pipeline, at_stage_1(position, count, true));
    }
    let (work, items) = start(&mut pipeline).unwrap();
    assert_eq!(items, vec![(1, 0)], "what waits is joined");
    assert_eq!(frames(&finish(&mut pipeline, work, vec![ItemResult::Hidden])), vec![]);
    let held = Position { request: RequestId(1), have: 6, kept_from: 0 };
    assert_eq!(pipeline.positions(JOB), vec![held]);
    // Promoted: the next stage holds four positions, so it is sent the frame that the others came in, and what follows.
    let epoch = Epoch { counter: 5, ..EPOCH };
    pipeline.quiesce(JOB);
    pipeline.reroute(JOB, Route { epoch, shadow: false, ..shadow });
    assert_eq!(pipeline.positions(JOB), vec![held]);
    pipeline.go(NOW, JOB, &[(RequestId(1), 4)]);
    let told = outputs(&mut pipeline);
    assert_eq!(frames(&told), vec![(NEXT, 0, 6)]);
    let new_epoch = |output: &PipelineOutput| match output {
        PipelineOutput::Frame { header, .. } => header.epoch == epoch && header.part == 2,
        _ => true,
    };
    assert!(told.iter().all(new_epoch));
}

#[test]
fn another_route_keeps_what_was_computed_and_drops_what_waited() {
    let mut pipeline = stage(Some(NEXT));
    run(&mut pipeline, frame(1, 0, 5, false));
    give(&mut pipeline, frame(1, 5, 1, true));
    let (work, _) = start(&mut pipeline).unwrap();
    give(&mut pipeline, frame(1, 6, 1, true));
    pipeline.quiesce(JOB);
    assert_eq!(discards(&outputs(&mut pipeline)), 1, "what waited");
    let told = finish(&mut pipeline, work, vec![ItemResult::Hidden]);
    assert_eq!(frames(&told), vec![], "nothing leaves under the old epoch");
    let epoch = Epoch { counter: 5, ..EPOCH };
    pipeline.reroute(JOB, Route { epoch, ..route(Some(STANDBY)) });
    assert_eq!(pipeline.positions(JOB), vec![Position { request: RequestId(1), have: 6, kept_from: 0 }]);
    // Frames of the new epoch wait for everybody to be ready.
    give(&mut pipeline, frame(1, 6, 1, true));
    assert_eq!(start(&mut pipeline), None);
    // The next stage holds more than this one made: nothing is sent until this one is beyond it.
    pipeline.go(NOW, JOB, &[(RequestId(1), 7)]);
    let (work, items) = start(&mut pipeline).unwrap();
    assert_eq!(items, vec![(1, 6)]);
    assert_eq!(frames(&finish(&mut pipeline, work, vec![ItemResult::Hidden])), vec![]);
    assert_eq!(frames(&run(&mut pipeline, frame(1, 7, 1, true))), vec![(STANDBY, 7, 1)]);
    // Sent once more from further back: it is wanted now.
    assert_eq!(frames(&run(&mut pipeline, frame(1, 3, 5, true))), vec![(STANDBY, 3, 5)]);
}

#[test]
fn those_before_are_told_what_is_held_when_it_is_news() {
    let mut pipeline = Pipeline::default();
    let previous = NodeId([2; 16]);
    pipeline.install(JOB, Route { stage: 1, previous, ..route(None) });
    pipeline.go(NOW, JOB, &[]);
    let header = FrameHeader { part: 1, ..frame(1, 0, 5, false) };
    pipeline.handle_frame(NOW, previous, header, Payload::Tensor(TensorId(1 << 63)));
    let (work, _) = start(&mut pipeline).unwrap();
    finish(&mut pipeline, work, vec![ItemResult::Nothing]);
    let (due, _) = pipeline.next_wakeup().unwrap();
    pipeline.handle_wakeup(due);
    let message = Message::Held { job: JOB, epoch: EPOCH, held: vec![(RequestId(1), 5)] };
    assert_eq!(outputs(&mut pipeline), vec![PipelineOutput::Message { to: previous, message }]);
    let (due, _) = pipeline.next_wakeup().unwrap();
    pipeline.handle_wakeup(due);
    assert_eq!(outputs(&mut pipeline), vec![], "no news");
}
