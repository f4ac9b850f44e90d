//! A request that makes drafts follows the one that asks for them; that one waits for them, but not for long.
use super::super::{StepTimes, Taken};
use super::*;
use crate::id::{CallId, ContentId, Epoch, NodeId};
use crate::time::Duration;
use alloc::vec;

const EPOCH: Epoch = Epoch { counter: 1, issuer: NodeId([1; 16]) };
const ME: (JobId, RequestId) = (JobId(7), RequestId(3));
const MS: u64 = 1_000_000;

fn steering(from: u32, tokens: &[u32], more: u32) -> Steering {
    Steering { from, tokens: tokens.to_vec(), more, sampling: Sampling { seed: 5, ..Sampling::GREEDY } }
}

/// First positions and tokens of the frames that are sent now.
fn frames(stream: &mut Stream, now: Instant, times: &StepTimes) -> Vec<(u32, Vec<u32>)> {
    let limits = DraftLimits { times, positions: u32::MAX, sharers: 1 };
    let frames = core::iter::from_fn(|| stream.next_frame(now, (JobId(1), EPOCH), 1, limits));
    let frames = frames.map(|(header, tokens)| (header.cursor, tokens)).collect();
    stream.assert_invariants();
    frames
}

fn send(stream: &mut Stream) -> Vec<(u32, Vec<u32>)> {
    frames(stream, Instant(0), &StepTimes::default())
}

fn token(stream: &mut Stream, position: u32, token: u32) -> Taken {
    let taken = stream.handle_token(Instant(0), position, token, &[9], 1000);
    stream.assert_invariants();
    taken
}

#[test]
fn it_adds_tokens_and_pauses() {
    let mut stream = Stream::steered(Instant(0), RequestId(1), ME, steering(0, &[1, 2, 3], 2));
    assert_eq!((stream.request.sampling.seed, stream.request.sampling.drafts), (5, 0));
    assert_eq!(send(&mut stream), [(0, vec![1, 2, 3])]);
    assert!(stream.resend_at(1).is_some() && stream.answer().is_none());
    assert_eq!(token(&mut stream, 3, 9), Taken::Next, "it goes on after the end of an answer");
    assert_eq!(send(&mut stream), [(3, vec![9])]);
    assert_eq!(token(&mut stream, 4, 8), Taken::Next);
    assert_eq!(stream.answer(), Some((JobId(7), RequestId(3), vec![9, 8])));
    assert_eq!((send(&mut stream), stream.resend_at(1)), (vec![], None), "nothing is sent, and nothing awaited");
    // What follows is what it added, and one more token.
    assert!(stream.steer(Instant(0), 3, &[9, 8, 7], 1));
    assert_eq!((stream.answer(), send(&mut stream)), (None, vec![(4, vec![8, 7])]));
    assert_eq!(token(&mut stream, 6, 6), Taken::Next);
    assert_eq!(stream.answer(), Some((JobId(7), RequestId(3), vec![6])));
}

#[test]
fn what_it_added_stays_as_far_as_it_is_right() {
    let added = |tokens: &[u32], more: u32| {
        let mut stream = Stream::steered(Instant(0), RequestId(1), ME, steering(0, &[1, 2, 3], 3));
        send(&mut stream);
        for (position, next) in [(3, 4), (4, 5), (5, 6)] {
            token(&mut stream, position, next);
            send(&mut stream);
        }
        assert!(stream.steer(Instant(0), 3, tokens, more));
        stream.assert_invariants();
        let answer = stream.answer().map(|(.., drafts)| drafts);
        (stream.acked, answer, send(&mut stream))
    };
    assert_eq!(added(&[4, 7], 2), (4, None, vec![(4, vec![7])]), "stages overwrite the second one");
    assert_eq!(added(&[7], 2), (3, None, vec![(3, vec![7])]));
    assert_eq!(added(&[4], 2), (5, Some(vec![5, 6]), vec![]), "it has them already");
    assert_eq!(added(&[4], 3), (5, None, vec![(5, vec![6])]));
    assert_eq!(added(&[4, 5, 6, 7, 8], 1), (5, None, vec![(5, vec![6, 7, 8])]));
    let mut stream = Stream::steered(Instant(0), RequestId(1), ME, steering(0, &[1, 2, 3], 3));
    assert!(!stream.steer(Instant(0), 4, &[5], 1), "it lacks a token");
    assert!(!stream.steer(Instant(0), 0, &[9, 9, 9, 9], 1), "the tokens that it began with never change");
}

#[test]
fn others_continue_only_what_it_began_with() {
    let mut stream = Stream::steered(Instant(0), RequestId(1), ME, steering(0, &[1, 2, 3], 2));
    send(&mut stream);
    token(&mut stream, 3, 4);
    send(&mut stream);
    token(&mut stream, 4, 5);
    assert_eq!((stream.acked, stream.acked_tokens()), (4, &[1, 2, 3][..]));
}

// ---- the request that needs drafts

/// A request that decodes at 10 ms a step, whose draft model takes 1 ms for a draft.
fn asking() -> (Stream, StepTimes, Drafter) {
    let request = Request {
        prompt: vec![1, 2, 3],
        max_tokens: 100,
        sampling: Sampling::GREEDY,
        ignore_eos: false,
        priority: Priority::Interactive,
        key: RequestKey([0; 16]),
    };
    let mut stream = Stream::new(Instant(0), RequestId(3), Caller::Here(CallId(1)), request);
    let mut times = StepTimes::default();
    times.learn(0, Duration::from_millis(10));
    times.learn(1, Duration::from_millis(11));
    let mut drafter = Drafter::new(ContentId([1; 32]));
    frames(&mut stream, Instant(0), &times);
    token(&mut stream, 3, 10);
    let first = ask(&mut stream, Instant(0), &times, &mut drafter).expect("a question");
    assert_eq!((first.from, &first.tokens[..], first.more), (0, &[1, 2, 3, 10][..], 2), "the speed is not known");
    assert!(stream.handle_drafts(Instant(2 * MS), Some(vec![20, 21]), &mut drafter));
    assert_eq!(frames(&mut stream, Instant(2 * MS), &times), [(3, vec![10, 20, 21])]);
    token(&mut stream, 4, 20);
    assert!(stream.keeps(0, 0, Some(&mut drafter)));
    stream.take(21, &[], 1000);
    assert!(stream.keeps(0, 1, Some(&mut drafter)));
    stream.take(22, &[], 1000);
    assert_eq!(drafter.counts.1, 2);
    (stream, times, drafter)
}

fn ask(stream: &mut Stream, now: Instant, times: &StepTimes, drafter: &mut Drafter) -> Option<Steering> {
    let limits = DraftLimits { times, positions: u32::MAX, sharers: 1 };
    stream.ask(now, limits, drafter)
}

#[test]
fn a_step_waits_for_drafts_that_pay() {
    let (mut stream, times, mut drafter) = asking();
    let question = ask(&mut stream, Instant(0), &times, &mut drafter).expect("a question");
    assert_eq!((question.from, &question.tokens[..]), (4, &[20, 21, 22][..]), "what the model lacks");
    assert!(question.more >= 3, "{} drafts", question.more);
    assert_eq!(stream.waits_until(), Some(Instant(10 * MS)), "as long as a step takes");
    assert_eq!(frames(&mut stream, Instant(MS), &times), []);
    assert_eq!(ask(&mut stream, Instant(MS), &times, &mut drafter), None, "one question at a time");
    assert!(stream.handle_drafts(Instant(4 * MS), Some(vec![30, 31, 32]), &mut drafter));
    assert_eq!(ask(&mut stream, Instant(4 * MS), &times, &mut drafter), None);
    assert_eq!(frames(&mut stream, Instant(4 * MS), &times), [(6, vec![22, 30, 31, 32])]);
}

#[test]
fn late_drafts_are_not_sent() {
    let (mut stream, times, mut drafter) = asking();
    ask(&mut stream, Instant(0), &times, &mut drafter).expect("a question");
    stream.stop_waiting();
    assert_eq!(frames(&mut stream, Instant(10 * MS), &times), [(6, vec![22])]);
    token(&mut stream, 7, 30);
    assert_eq!(ask(&mut stream, Instant(11 * MS), &times, &mut drafter), None, "the answer is awaited");
    let before = drafter.accuracy;
    assert!(!stream.handle_drafts(Instant(12 * MS), Some(vec![31, 32, 33]), &mut drafter));
    assert!(drafter.accuracy < before, "what it would have given is measured");
    assert_eq!(frames(&mut stream, Instant(12 * MS), &times), [(7, vec![30])]);
}

#[test]
fn nothing_waits_after_a_loss_or_a_refusal() {
    let (mut stream, times, mut drafter) = asking();
    ask(&mut stream, Instant(0), &times, &mut drafter).expect("a question");
    stream.resume(Instant(MS), &[(6, 0), (6, 0)]);
    assert_eq!(frames(&mut stream, Instant(MS), &times), [(6, vec![22])], "after a loss");
    let (mut stream, times, mut drafter) = asking();
    ask(&mut stream, Instant(0), &times, &mut drafter).expect("a question");
    assert!(stream.handle_drafts(Instant(MS), None, &mut drafter), "the draft model is gone");
    for position in 7..7 + 16 {
        assert_eq!(ask(&mut stream, Instant(MS), &times, &mut drafter), None, "it is not asked for a while");
        assert_eq!(frames(&mut stream, Instant(MS), &times).len(), 1);
        token(&mut stream, position, 100 * position);
    }
    let question = ask(&mut stream, Instant(MS), &times, &mut drafter).expect("a question");
    assert_eq!((question.from, question.tokens.len()), (0, 23), "it knows nothing of the request");
    assert!(stream.leave_drafts() && !stream.leave_drafts());
}

#[test]
fn drafts_that_do_not_pay_are_tried_rarely() {
    let (mut stream, times, mut drafter) = asking();
    let mut asked = 0;
    let mut now = Instant(0);
    for position in 7..2007 {
        if ask(&mut stream, now, &times, &mut drafter).is_some() {
            asked += 1;
            // They come after 9 ms, and are wrong.
            now = Instant(now.0 + 9 * MS);
            stream.handle_drafts(now, Some(vec![0]), &mut drafter);
        }
        assert_eq!(frames(&mut stream, now, &times).len(), 1);
        stream.handle_token(now, position, 1000 + position, &[], 10_000);
        stream.learn(now, 1000 + position, &mut StepTimes::default(), Some(&mut drafter));
        let round = stream.round.saturating_sub(1);
        stream.keeps(round, 0, Some(&mut drafter));
    }
    assert!((3..20).contains(&asked), "{asked} questions in 2000 steps");
}
