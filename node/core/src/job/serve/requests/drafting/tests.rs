//! Requests that make drafts at the coordinator of the draft model: they take only what callers leave.
use super::super::{Route, Submitted};
use super::*;
use crate::id::{CallId, Epoch, NodeId};
use crate::limits::PAGE_POSITIONS;
use crate::message::{ToParticipant, ToStage};
use crate::work::serve::{Priority, Request, RequestKey, Sampling};
use alloc::vec;

const FOR: (JobId, RequestId) = (JobId(7), RequestId(3));
const NOW: Instant = Instant(0);

/// A draft model on one node, with a cache of two pages.
fn serving() -> Requests {
    let mut requests = Requests::new(JobId(1), 1, 2 * PAGE_POSITIONS, vec![9], None);
    let epoch = Epoch { counter: 1, issuer: NodeId([1; 16]) };
    let track = Route { epoch, stages: vec![NodeId([1; 16])], token_ns: 1, standbys: Vec::new() };
    requests.resume(NOW, track, &[&[]]);
    requests.start(NOW, &[], &mut Out::new());
    requests
}

fn steering(from: u32, tokens: u32, more: u32) -> Steering {
    Steering { from, tokens: (from..from + tokens).collect(), more, sampling: Sampling::GREEDY }
}

fn request(prompt: u32, priority: Priority) -> Request {
    let prompt = (5000..5000 + prompt).collect();
    Request {
        prompt,
        max_tokens: 50,
        sampling: Sampling::GREEDY,
        ignore_eos: false,
        priority,
        key: RequestKey([0; 16]),
    }
}

fn submit(requests: &mut Requests, prompt: u32, priority: Priority, out: &mut Out) {
    let submitted = requests.submit(NOW, Caller::Here(CallId(1)), request(prompt, priority), 0, out);
    assert_eq!(submitted, Submitted::Taken);
    requests.assert_invariants();
}

fn steer(requests: &mut Requests, steering: Steering) -> Out {
    let mut out = Out::new();
    requests.steer(NOW, FOR, steering, &mut out);
    requests.assert_invariants();
    out
}

fn answers(out: &Out) -> Vec<Option<Vec<u32>>> {
    let answer = |output: &JobOutput| {
        let JobOutput::Drafting(Drafting::Answer { job, request, drafts }) = output else { return None };
        assert_eq!((*job, *request), FOR);
        Some(drafts.clone())
    };
    out.iter().filter_map(answer).collect()
}

fn frames(out: &Out) -> Vec<(u32, u32)> {
    let frame = |output: &JobOutput| {
        let JobOutput::Frame { header, .. } = output else { return None };
        Some((header.cursor, header.count))
    };
    out.iter().filter_map(frame).collect()
}

fn closes(out: &Out) -> Vec<RequestId> {
    let close = |output: &JobOutput| {
        let JobOutput::Message { say: ToParticipant::Stage(ToStage::Close { request }), .. } = output else {
            return None;
        };
        Some(*request)
    };
    out.iter().filter_map(close).collect()
}

#[test]
fn the_answer_follows_the_last_draft() {
    let mut requests = serving();
    let out = steer(&mut requests, steering(0, 10, 2));
    assert_eq!((frames(&out), answers(&out)), (vec![(0, 10)], vec![]));
    let id = requests.steered().next().unwrap().id;
    let mut out = Out::new();
    requests.handle_tokens(NOW, id, 10, 10.into(), (0, &[]), &mut out);
    assert_eq!((frames(&out), answers(&out)), (vec![(10, 1)], vec![]));
    let mut out = Out::new();
    requests.handle_tokens(NOW, id, 11, 77.into(), (0, &[]), &mut out);
    assert_eq!((frames(&out), answers(&out)), (vec![], vec![Some(vec![10, 77])]));
    assert_eq!((requests.counts(), requests.resend_at()), ((0, 0), None), "it waits for nothing");
    // The second draft was wrong.
    let out = steer(&mut requests, steering(10, 2, 1));
    assert_eq!((frames(&out), answers(&out)), (vec![(11, 1)], vec![]));
    let mut out = Out::new();
    requests.handle_tokens(NOW, id, 11, 55.into(), (0, &[]), &mut out);
    assert_eq!(out.len(), 0, "a late answer to what it was led away from");
    requests.leave(NOW, FOR, &mut out);
    assert_eq!((closes(&out), requests.resting().count()), (vec![id], 0), "it does not rest");
    requests.assert_invariants();
}

#[test]
fn what_cannot_be_answered_is_refused() {
    let mut requests = serving();
    assert_eq!(answers(&steer(&mut requests, steering(10, 2, 1))), [None], "it does not know the request");
    assert_eq!(answers(&steer(&mut requests, steering(0, 2 * PAGE_POSITIONS - 1, 1))), [None], "the context");
    steer(&mut requests, steering(0, 10, 2));
    assert_eq!(answers(&steer(&mut requests, steering(20, 2, 1))), [None], "it lacks tokens before these");
    assert!(requests.is_empty());
    let mut out = Out::new();
    submit(&mut requests, PAGE_POSITIONS + 1, Priority::Idle, &mut out);
    assert_eq!(answers(&steer(&mut requests, steering(0, 10, 2))), [None], "no page is free");
    requests.stop(&mut out);
    assert_eq!(answers(&steer(&mut requests, steering(0, 10, 2))), [None], "the job is placed again");
}

#[test]
fn callers_take_the_pages_of_drafts() {
    let mut requests = serving();
    steer(&mut requests, steering(0, 10, 2));
    let id = requests.steered().next().unwrap().id;
    let mut out = Out::new();
    submit(&mut requests, PAGE_POSITIONS + 1, Priority::Idle, &mut out);
    assert_eq!((answers(&out), closes(&out)), (vec![None], vec![id]));
    assert_eq!(requests.counts(), (1, 0), "the caller's request runs");
}

#[test]
fn drafts_end_with_the_placement_and_with_lost_frames() {
    for connection in [false, true] {
        let mut requests = serving();
        steer(&mut requests, steering(0, 10, 2));
        let mut out = Out::new();
        if connection {
            requests.handle_reconnected(NOW, NodeId([1; 16]), &mut out);
        } else {
            requests.stop(&mut out);
        }
        assert_eq!(answers(&out), [None]);
        assert!(requests.is_empty());
        requests.assert_invariants();
    }
}

#[test]
fn a_request_that_ends_leaves_its_draft_model() {
    let content = crate::id::ContentId([1; 32]);
    let mut requests = Requests::new(JobId(7), 1, 2 * PAGE_POSITIONS, vec![9], Some(content));
    let epoch = Epoch { counter: 1, issuer: NodeId([1; 16]) };
    let track = Route { epoch, stages: vec![NodeId([1; 16])], token_ns: 1, standbys: Vec::new() };
    requests.resume(NOW, track, &[&[]]);
    let mut out = Out::new();
    requests.start(NOW, &[], &mut out);
    submit(&mut requests, 10, Priority::Interactive, &mut out);
    let id = RequestId(0);
    let drafting = |out: &mut Out| {
        let drafting = |output| if let JobOutput::Drafting(drafting) = output { Some(drafting) } else { None };
        out.drain(..).filter_map(drafting).collect::<Vec<Drafting>>()
    };
    requests.handle_tokens(Instant(0), id, 10, 1.into(), (0, &[]), &mut out);
    assert_eq!(drafting(&mut out), [], "the time of a step is measured first");
    requests.handle_tokens(Instant(1_000_000), id, 11, 2.into(), (0, &[]), &mut out);
    let asked = drafting(&mut out);
    assert!(matches!(&asked[..], [Drafting::Steer { request, steering, .. }] if *request == id && steering.from == 0));
    assert_eq!(requests.next_wakeup(), Some(Instant(2_000_000)), "the step waits for the time of a step");
    requests.handle_wakeup(Instant(2_000_000), &mut out);
    assert_eq!(frames(&out), [(11, 1)], "no longer");
    requests.cancel(NOW, Caller::Here(CallId(1)), &mut out);
    assert_eq!(drafting(&mut out), [Drafting::Leave { job: JobId(7), request: id, content }]);
}
