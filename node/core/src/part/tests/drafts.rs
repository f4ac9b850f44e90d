//! Rows of draft tokens at a stage: which of them it keeps, and what it sends of them later.
use super::*;

/// A decode step at a position, with drafts after it.
fn step(cursor: u32, round: u32, rows: u8, kept: u8) -> FrameHeader {
    let header = frame(1, cursor, 1 + u32::from(rows), true);
    FrameHeader { drafts: Drafts { round, rows, kept }, ..header }
}

/// A stage that has five positions of a request, and three drafts after the sixth.
fn with_drafts() -> Parts {
    let mut parts = stage(Some(NEXT));
    run(&mut parts, frame(1, 0, 5, true));
    assert_eq!(frames(&run(&mut parts, step(5, 0, 3, 0))), vec![(NEXT, 5, 4)]);
    parts
}

#[test]
fn drafts_that_were_right_are_kept_and_the_others_overwritten() {
    let mut parts = with_drafts();
    feed(&mut parts, step(8, 1, 0, 2));
    let mut outputs: Vec<PartOutput> = parts.poll_runs(NOW).into_iter().collect();
    outputs.extend(self::outputs(&mut parts));
    let splits = outputs.iter().filter_map(|output| match output {
        PartOutput::Shell(Output::Split { at, of, .. }) => Some((*at, *of)),
        _ => None,
    });
    assert_eq!((splits.collect::<Vec<_>>(), discards(&outputs)), (vec![(3, 4)], 1), "one draft was wrong");
    let work = outputs.iter().find_map(|output| match output {
        PartOutput::Shell(Output::Run(run)) => Some((run.work, items(run)[0].position)),
        _ => None,
    });
    let (work, position) = work.unwrap();
    assert_eq!(position, 8);
    assert_eq!(frames(&finish(&mut parts, 0, work, vec![ItemResult::Hidden])), vec![(NEXT, 8, 1)]);
    // What is sent later has no trace of drafts.
    standby(&mut parts, EPOCH, 1, Some(STANDBY));
    say(&mut parts, STANDBY, EPOCH, held(1, 0, vec![(1, 6)], true));
    assert_eq!(frames(&self::outputs(&mut parts)), vec![(STANDBY, 5, 4)]);
    feed(&mut parts, frame(1, 10, 1, true));
    assert!(self::outputs(&mut parts).contains(&gap(1, 9)));
}

#[test]
fn drafts_of_another_round_are_not_kept() {
    for wrong in [step(8, 2, 0, 2), step(8, 0, 0, 2), step(7, 1, 0, 2), step(10, 1, 0, 4), step(8, 1, 0, 1)] {
        let mut parts = with_drafts();
        feed(&mut parts, wrong);
        assert!(outputs(&mut parts).contains(&gap(1, 6)), "{wrong:?}");
    }
    let mut parts = with_drafts();
    run(&mut parts, step(6, 1, 0, 0));
    feed(&mut parts, step(9, 1, 0, 2));
    assert!(outputs(&mut parts).contains(&gap(1, 7)), "they were overwritten");
}

#[test]
fn another_epoch_knows_nothing_of_drafts() {
    let mut parts = with_drafts();
    prepare(&mut parts, LATER, order(&[ME, STANDBY], 0, None));
    assert_eq!(prepared(&outputs(&mut parts)), Some(vec![Position { request: RequestId(1), have: 6, kept_from: 0 }]));
    go(&mut parts, LATER, 0, vec![(RequestId(1), 6)]);
    assert_eq!(frames(&outputs(&mut parts)), vec![]);
    let later = |header: FrameHeader| FrameHeader { epoch: LATER, ..header };
    feed(&mut parts, later(step(8, 1, 0, 2)));
    let gap = ToCoordinator::Stage(FromStage::Gap { request: RequestId(1), have: 6 });
    assert!(outputs(&mut parts).contains(&report(LATER, gap)));
    assert_eq!(frames(&run(&mut parts, later(frame(1, 6, 1, true)))), vec![(STANDBY, 6, 1)]);
}

#[test]
fn the_last_stage_samples_after_each_draft() {
    let mut parts = stage(None);
    open(&mut parts, 1, Sampling::GREEDY, Vec::new(), 0);
    feed(&mut parts, frame(1, 0, 5, true));
    let (work, _) = start(&mut parts).unwrap();
    finish(&mut parts, 0, work, vec![ItemResult::Token(9.into())]);
    feed(&mut parts, step(5, 4, 2, 0));
    let run = start_run(&mut parts, NOW).unwrap();
    let [item] = &items(&run)[..] else { panic!("one item") };
    assert_eq!((item.count, item.drafts, item.sample.as_ref().map(|sample| sample.position)), (3, 2, Some(6)));
    let done = finish(&mut parts, 0, run.work, vec![ItemResult::Tokens(vec![7, 8, 9])]);
    let tokens = FromStage::Tokens { request: RequestId(1), position: 6, round: 4, tokens: vec![7, 8, 9] };
    assert!(done.contains(&report(EPOCH, ToCoordinator::Stage(tokens))), "{done:?}");
    // A penalty depends on the tokens before, which the stage does not know.
    let penalised = Sampling { repetition_penalty_e6: 1_100_000, ..Sampling::GREEDY };
    open(&mut parts, 1, penalised, vec![5; 6], 2);
    feed(&mut parts, step(6, 5, 2, 0));
    assert!(items(&start_run(&mut parts, NOW).unwrap()).iter().all(|item| item.sample.is_none()));
}

#[test]
fn frames_have_few_drafts_and_a_row_before_them() {
    let mut parts = stage(Some(NEXT));
    for misfit in [step(0, 0, 8, 0), FrameHeader { count: 3, ..step(0, 0, 3, 0) }] {
        feed(&mut parts, misfit);
        assert!(outputs(&mut parts).iter().any(|output| matches!(output, PartOutput::Refused { .. })), "{misfit:?}");
    }
}

#[test]
fn a_request_that_rests_keeps_its_last_drafts() {
    for (kept, have) in [(Drafts { round: 1, rows: 0, kept: 2 }, 8), (Drafts { round: 2, rows: 0, kept: 2 }, 6)] {
        let mut parts = with_drafts();
        for _ in 0..2 {
            let rest = ToStage::Rest { request: RequestId(1), drafts: kept };
            say(&mut parts, COORDINATOR, EPOCH, ToParticipant::Stage(rest));
        }
        prepare(&mut parts, LATER, order(&[ME, STANDBY], 0, None));
        let prepared = prepared(&outputs(&mut parts)).unwrap();
        assert_eq!(prepared.iter().map(|position| position.have).collect::<Vec<_>>(), [have]);
    }
}
