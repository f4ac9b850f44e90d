//! Frames, acknowledgements, resends and drafts of one request.
use super::*;
use crate::work::serve::{RequestKey, Sampling};
use alloc::vec;

const EPOCH: Epoch = Epoch { counter: 1, issuer: NodeId([1; 16]) };

fn stream(prompt: u32, max_tokens: u32) -> Stream {
    let prompt = (0..prompt).collect();
    let key = RequestKey([7; 16]);
    let request = Request {
        prompt,
        max_tokens,
        sampling: Sampling::GREEDY,
        ignore_eos: false,
        priority: Priority::Interactive,
        key,
    };
    Stream::new(Instant(0), RequestId(1), Caller::Here(CallId(1)), request)
}

fn frames(stream: &mut Stream) -> Vec<(u32, u32, bool)> {
    frames_through(stream, 2)
}

fn frames_through(stream: &mut Stream, stages: u32) -> Vec<(u32, u32, bool)> {
    let limits = DraftLimits { times: &StepTimes::default(), positions: u32::MAX, sharers: 1 };
    core::iter::from_fn(|| stream.next_frame(Instant(0), (JobId(1), EPOCH), stages, limits))
        .map(|(header, tokens)| {
            assert_eq!(header.count as usize, tokens.len());
            (header.cursor, header.count, header.last)
        })
        .collect()
}

#[test]
fn a_long_prompt_goes_out_in_chunks_with_four_outstanding() {
    let mut stream = stream(512 * 5 + 10, 4);
    assert_eq!(frames(&mut stream), vec![(0, 512, false), (512, 512, false), (1024, 512, false), (1536, 512, false)]);
    stream.handle_progress(Instant(1), 1024);
    assert_eq!(frames(&mut stream), vec![(2048, 512, false), (2560, 10, true)]);
}

#[test]
fn chunks_follow_the_number_of_stages() {
    let first = |stages: u32| {
        let sent = frames_through(&mut stream(1 << 16, 4), stages);
        (sent.len(), sent[0].1)
    };
    assert_eq!([1, 2, 4, 5, 12, 24].map(first), [(3, 512), (4, 512), (6, 512), (7, 256), (14, 170), (26, 85)]);
    assert_eq!(first(1000), (64, 16), "at any depth");
}

#[test]
fn a_token_is_taken_once_and_in_order() {
    let mut stream = stream(3, 3);
    assert_eq!(frames(&mut stream), vec![(0, 3, true)]);
    assert_eq!(stream.handle_token(Instant(1), 4, 9, &[], 100), Taken::Unasked);
    assert_eq!(stream.handle_token(Instant(1), 3, 9, &[], 100), Taken::Next);
    assert_eq!(stream.handle_token(Instant(1), 3, 9, &[], 100), Taken::Known);
    assert_eq!(stream.handle_token(Instant(1), 3, 8, &[], 100), Taken::Differs { sent: 9 });
    assert_eq!(stream.handle_token(Instant(1), 4, 9, &[], 100), Taken::Unasked, "position 3 was not sent yet");
    assert_eq!(frames(&mut stream), vec![(3, 1, true)]);
    assert_eq!(stream.handle_token(Instant(1), 4, 7, &[], 100), Taken::Next);
    assert_eq!(frames(&mut stream), vec![(4, 1, true)]);
    assert_eq!(stream.handle_token(Instant(1), 5, 7, &[], 100), Taken::Last(DoneReason::Length));
}

#[test]
fn stages_that_hold_nothing_are_sent_prompt_and_answer_as_one_prefill() {
    let mut stream = stream(3, 9);
    frames(&mut stream);
    stream.handle_token(Instant(1), 3, 9, &[], 100);
    frames(&mut stream);
    assert_eq!(stream.resume(Instant(2), &[(0, 0), (0, 0)]), vec![0]);
    assert_eq!(frames(&mut stream), vec![(0, 4, true)]);
}

#[test]
fn what_stages_hold_is_not_computed_again() {
    let resumed = |stages: &[(u32, u32)]| {
        let mut stream = stream(100, 9);
        frames(&mut stream);
        stream.handle_token(Instant(1), 100, 9, &[], 500);
        frames(&mut stream);
        (stream.resume(Instant(2), stages), frames(&mut stream))
    };
    // 101 positions. All stages hold all of them, and the token was lost with the last stage: the send log before
    // it serves.
    assert_eq!(resumed(&[(101, 0), (101, 0), (101, 0)]), (vec![101, 100], vec![]));
    // A standby that is two positions behind: the send log of the stage before it serves.
    assert_eq!(resumed(&[(101, 0), (99, 0), (100, 0)]), (vec![99, 100], vec![]));
    // A new stage in the middle, after a send log that has everything: the first stage computes nothing again.
    assert_eq!(resumed(&[(101, 0), (0, 0), (100, 0)]), (vec![0, 100], vec![]));
    // The send log does not reach back: the token log serves.
    assert_eq!(resumed(&[(101, 50), (0, 0), (100, 0)]), (vec![0, 100], vec![(0, 101, true)]));
    // The first stage is new: it computes everything, the other stages what they lack.
    assert_eq!(resumed(&[(0, 0), (101, 0), (100, 0)]), (vec![101, 100], vec![(0, 101, true)]));
    // The last stage is new, and only the token log has everything.
    assert_eq!(resumed(&[(100, 90), (100, 90), (0, 0)]), (vec![0, 0], vec![(0, 101, true)]));
}

#[test]
fn when_all_is_held_and_no_token_comes_the_last_position_is_asked_for() {
    let mut stream = stream(3, 9);
    frames(&mut stream);
    assert!(stream.handle_progress(Instant(1), 3), "a send log resent it without asking for a token");
    stream.rewind(Instant(1), 3);
    assert_eq!(frames(&mut stream), vec![(2, 1, true)]);
}

#[test]
fn the_context_ends_an_answer() {
    let mut stream = stream(3, 9);
    frames(&mut stream);
    assert_eq!(stream.handle_token(Instant(1), 3, 9, &[], 4), Taken::Last(DoneReason::Length));
}

#[test]
fn a_successor_goes_on_where_the_log_ends() {
    let mut before = stream(3, 9);
    frames(&mut before);
    before.handle_token(Instant(1), 3, 9, &[], 100);
    let mut log = crate::work::log::TokenLog::default();
    log.add(core::iter::from_fn(|| before.news()).map(|news| (RequestId(1), news)).collect());
    assert!(!before.has_news());
    let (_, request, answer) = log.into_requests().next().unwrap();
    assert_eq!((&request, &answer), (&before.request, &vec![9]));
    let mut after = Stream::inherited(Instant(2), RequestId(5), request.clone(), &answer, &[]);
    assert_eq!(after.tokens_from(0).collect::<Vec<_>>(), [(3, 9)]);
    // The stages are ahead of the token log: they compute again what it lacks.
    assert_eq!(after.resume(Instant(2), &[(5, 0), (5, 0)]), vec![3]);
    let whole = Stream::inherited(Instant(2), RequestId(5), request, &[9, 8], &[8]);
    assert_eq!(whole.tokens_from(4).count(), 0, "its last token is computed again");
}

// ---- drafts

/// A request that repeats itself, after its prefill and one decode step, and times with which drafts pay.
fn repeating(max_tokens: u32) -> (Stream, StepTimes) {
    let mut stream = stream(0, max_tokens);
    stream.request.prompt = vec![1, 2, 3, 1, 2, 3, 1, 2];
    stream.tokens = stream.request.prompt.clone();
    frames(&mut stream);
    let mut times = StepTimes::default();
    times.learn(0, Duration::from_millis(10));
    times.learn(1, Duration::from_millis(10));
    stream.handle_token(Instant(1), 8, 3, &[], 100);
    (stream, times)
}

fn decode(stream: &mut Stream, times: &StepTimes, positions: u32) -> (FrameHeader, Vec<u32>) {
    let limits = DraftLimits { times, positions, sharers: 1 };
    let frame = stream.next_frame(Instant(9), (JobId(1), EPOCH), 2, limits).unwrap();
    stream.assert_invariants();
    frame
}

#[test]
fn right_drafts_are_kept_and_the_next_step_follows_them() {
    let (mut stream, times) = repeating(50);
    let (header, tokens) = decode(&mut stream, &times, 100);
    assert_eq!(tokens, [3, 1, 2, 3, 1, 2, 3, 1]);
    assert_eq!((header.cursor, header.count, header.drafts), (8, 8, Drafts { round: 0, rows: 7, kept: 0 }));
    // Two drafts are right, then comes another token.
    assert_eq!(stream.handle_token(Instant(10), 9, 1, &[], 100), Taken::Next);
    for (index, token) in [2, 9].into_iter().enumerate() {
        assert!(stream.keeps(0, index, None));
        assert_eq!(stream.take(token, &[], 100), Taken::Next);
    }
    assert!(!stream.keeps(0, 2, None));
    stream.assert_invariants();
    assert_eq!(stream.acked(), 9, "stages count drafts once the next frame says that they are kept");
    let cached = |stream: &Stream| stream.cached_tokens().map(|(tokens, drafts)| (tokens.len(), drafts.kept));
    assert_eq!(cached(&stream), Some((11, 2)), "if the request rests, stages keep them");
    let (header, tokens) = decode(&mut stream, &times, 100);
    assert_eq!((header.cursor, header.drafts.round, header.drafts.kept, tokens[0]), (11, 1, 2, 9));
    assert_eq!(cached(&stream), Some((9, 0)), "a stage may have the next frame or not");
    assert_eq!(stream.handle_token(Instant(11), 12, 7, &[], 100), Taken::Next);
    assert_eq!((stream.acked(), decode(&mut stream, &times, 100).0.drafts.kept), (12, 0));
}

#[test]
fn a_gap_after_drafts_is_sent_without_them() {
    let (mut stream, times) = repeating(50);
    decode(&mut stream, &times, 100);
    stream.handle_token(Instant(10), 9, 1, &[], 100);
    assert!(stream.keeps(0, 0, None));
    stream.take(2, &[], 100);
    decode(&mut stream, &times, 100);
    assert!(stream.takes_gap(Instant(11), 9), "the frame that keeps the draft was lost");
    stream.rewind(Instant(11), 9);
    let (header, tokens) = decode(&mut stream, &times, 100);
    assert_eq!(
        (header.cursor, header.count, header.drafts.rows, header.drafts.kept, &tokens[..]),
        (9, 2, 0, 0, &[1, 2][..])
    );
    assert!(!stream.keeps(0, 1, None), "drafts of a round that is over");
}

#[test]
fn drafts_have_room() {
    let drafts = |max_tokens, positions| {
        let (mut stream, times) = repeating(max_tokens);
        decode(&mut stream, &times, positions).0.drafts.rows
    };
    assert_eq!([drafts(50, 100), drafts(50, 12), drafts(50, 9), drafts(4, 100), drafts(2, 100)], [7, 3, 0, 2, 0]);
    let (mut stream, times) = repeating(50);
    stream.request.sampling.presence_penalty_e6 = 1;
    assert_eq!(decode(&mut stream, &times, 100).0.drafts.rows, 0);
    let (mut stream, _) = repeating(50);
    assert_eq!(decode(&mut stream, &StepTimes::default(), 100).0.drafts.rows, 0, "times are not known");
}
