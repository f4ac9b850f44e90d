//! When entries are sent, and how long they are kept.
use super::*;
use alloc::vec;

const OWNER: NodeId = NodeId([1; 16]);
const STANDBY: NodeId = NodeId([2; 16]);
const NEXT: PartId = PartId(3);
const REQUEST: u64 = 1;

fn rows(bytes: u64) -> Sent {
    let bounds = Bounds { bytes, entries: 1000, window: u64::MAX, joined: 512 };
    let mut sent = Sent::new(Keep::WhileRoom, bounds);
    sent.follow(NEXT, OWNER, true, true);
    sent.follow(NEXT, STANDBY, false, false);
    sent
}

fn entry(cursor: u32, count: u32, tensor: u64) -> LogEntry {
    let tensor = TensorId::Produced(tensor);
    LogEntry { cursor, end: cursor + count, count, last: false, drafts: Drafts::default(), tensor, bytes: count.into() }
}

/// Adds an entry of ten rows. Returns the payloads that are dropped.
fn push(sent: &mut Sent, channel: u64, cursor: u32, tensor: u64) -> Vec<u64> {
    let mut gone = sent.push(channel, entry(cursor, 10, tensor));
    gone.extend(sent.trim(u32::MAX, |_| NEXT));
    numbers(&gone)
}

fn numbers(tensors: &[TensorId]) -> Vec<u64> {
    let number = |tensor: &TensorId| match tensor {
        TensorId::Produced(number) | TensorId::Arrived(number) => *number,
    };
    tensors.iter().map(number).collect()
}

fn each(channel: u64, at: u32) -> Cursors {
    Cursors::Each(vec![(channel, at)])
}

/// Cursors and counts that are due to a node now.
fn due(sent: &mut Sent, node: NodeId) -> Vec<(u32, u32)> {
    sent.due(|_| NEXT).iter().filter(|sending| sending.to == node).map(|s| (s.cursor, s.count)).collect()
}

#[test]
fn rows_are_resent_by_cursor_and_overwritten_ones_are_dropped() {
    let mut sent = rows(100);
    for at in 0..4 {
        assert_eq!(push(&mut sent, REQUEST, at * 10, at.into()), []);
    }
    sent.held(NEXT, STANDBY, &each(REQUEST, 0), true, true);
    assert_eq!(due(&mut sent, STANDBY), [(0, 40)], "joined");
    assert_eq!(due(&mut sent, STANDBY), []);
    sent.held(NEXT, STANDBY, &each(REQUEST, 15), true, true);
    assert_eq!(due(&mut sent, STANDBY), [(10, 30)], "an entry that begins earlier is sent whole");
    assert_eq!(numbers(&sent.push(REQUEST, entry(15, 5, 9))), [3, 2]);
    assert_eq!(sent.kept_from(REQUEST), Some(0));
    assert_eq!(sent.forget(REQUEST).len(), 3);
    assert_eq!((sent.bytes, sent.count), (0, 0));
}

#[test]
fn an_owner_is_sent_what_it_lacks_and_what_is_computed_again() {
    let mut sent = rows(1000);
    sent.held(NEXT, OWNER, &each(REQUEST, 10), true, true);
    push(&mut sent, REQUEST, 0, 0);
    assert_eq!(due(&mut sent, OWNER), [], "it has those already");
    push(&mut sent, REQUEST, 10, 1);
    assert_eq!(due(&mut sent, OWNER), [(10, 10)]);
    sent.rewind(REQUEST, 0);
    push(&mut sent, REQUEST, 0, 2);
    assert_eq!(due(&mut sent, OWNER), [(0, 10)]);
}

/// The log reaches back to row 20 only. The owner, which has nothing, is sent what is computed again from row 0 on, however often the
/// log is asked in between, and not the rows of before.
#[test]
fn what_is_computed_again_is_awaited_while_older_rows_are_kept() {
    let mut sent = rows(20);
    for at in 0..4 {
        push(&mut sent, REQUEST, at * 10, at.into());
    }
    sent.held(NEXT, OWNER, &each(REQUEST, 0), true, true);
    assert_eq!((due(&mut sent, OWNER), sent.kept_from(REQUEST)), (vec![], Some(20)));
    sent.rewind(REQUEST, 0);
    assert_eq!(due(&mut sent, OWNER), []);
    push(&mut sent, REQUEST, 0, 4);
    assert_eq!(due(&mut sent, OWNER), [(0, 10)]);
    // What is computed again begins later than asked for: the owner reports that it lacks the rows before.
    sent.rewind(REQUEST, 0);
    push(&mut sent, REQUEST, 20, 5);
    assert_eq!(due(&mut sent, OWNER), []);
    push(&mut sent, REQUEST, 30, 6);
    assert_eq!(due(&mut sent, OWNER), [(30, 10)]);
}

#[test]
fn an_older_report_of_an_owner_does_not_keep_back_what_is_computed_again() {
    let mut sent = rows(1000);
    push(&mut sent, REQUEST, 0, 0);
    assert_eq!(due(&mut sent, OWNER), [(0, 10)]);
    sent.rewind(REQUEST, 0);
    sent.held(NEXT, OWNER, &each(REQUEST, 10), true, true);
    assert_eq!(due(&mut sent, OWNER), [(0, 10)], "the answer to these rows was lost, not the rows");
    sent.held(NEXT, OWNER, &each(REQUEST, 10), true, true);
    assert_eq!(due(&mut sent, OWNER), []);
}

#[test]
fn entries_that_all_followers_hold_are_dropped_first() {
    let mut sent = rows(30);
    for at in 0..3 {
        push(&mut sent, REQUEST, at * 10, at.into());
    }
    sent.held(NEXT, OWNER, &each(REQUEST, 30), true, false);
    sent.held(NEXT, STANDBY, &each(REQUEST, 10), true, false);
    assert_eq!(push(&mut sent, REQUEST, 30, 3), [0]);
    assert_eq!(sent.kept_from(REQUEST), Some(10));
    // The standby made no progress: it falls off the log, but the bound holds.
    assert_eq!(push(&mut sent, REQUEST, 40, 4), [1]);
    sent.held(NEXT, STANDBY, &each(REQUEST, 10), true, true);
    assert_eq!(due(&mut sent, STANDBY), [], "what it lacks is not kept");
    push(&mut sent, REQUEST, 50, 5);
    assert_eq!(due(&mut sent, STANDBY), [(50, 10)], "so it notices");
}

#[test]
fn entries_that_a_follower_lacks_stay_while_other_channels_have_droppable_ones() {
    let mut sent = rows(20);
    push(&mut sent, 1, 0, 1);
    push(&mut sent, 2, 0, 2);
    sent.held(NEXT, OWNER, &Cursors::Each(vec![(1, 10), (2, 10)]), true, false);
    sent.held(NEXT, STANDBY, &each(2, 10), true, false);
    assert_eq!(push(&mut sent, 3, 0, 3), [2]);
}

fn halos(steps: u32, bytes: u64, keep: u64) -> Sent {
    let bounds = Bounds { bytes: keep, entries: 1000, window: 100, joined: 0 };
    let mut sent = Sent::new(Keep::WhileNeeded, bounds);
    for step in 0..steps {
        let tensor = TensorId::Produced(step.into());
        sent.push(
            0,
            LogEntry { cursor: step, end: step + 1, count: 1, last: false, drafts: Drafts::default(), tensor, bytes },
        );
    }
    sent
}

fn steps(sent: &mut Sent) -> Vec<u32> {
    sent.due(|_| NEXT).iter().map(|sending| sending.cursor).collect()
}

#[test]
fn an_owner_is_sent_all_halos_from_its_step_once() {
    let mut sent = halos(5, 8, 1000);
    sent.follow(NEXT, OWNER, true, true);
    sent.held(NEXT, OWNER, &Cursors::All(2), true, true);
    assert_eq!(steps(&mut sent), [2, 3, 4]);
    assert_eq!(steps(&mut sent), []);
    sent.held(NEXT, OWNER, &Cursors::All(3), true, true);
    assert_eq!(steps(&mut sent), [3, 4], "a connection broke: what it does not have is sent again");
}

#[test]
fn a_standby_is_sent_a_window_and_more_when_it_reports() {
    let mut sent = halos(6, 50, 1000);
    sent.follow(NEXT, STANDBY, false, true);
    sent.held(NEXT, STANDBY, &Cursors::All(0), true, true);
    assert_eq!(steps(&mut sent), [0, 1]);
    assert_eq!(steps(&mut sent), []);
    sent.held(NEXT, STANDBY, &Cursors::All(1), true, false);
    assert_eq!(steps(&mut sent), [2]);
}

#[test]
fn entries_that_a_standby_needs_stay_until_they_exceed_the_bounds() {
    let mut kept = halos(6, 8, 1000);
    kept.follow(NEXT, OWNER, true, true);
    kept.held(NEXT, OWNER, &Cursors::All(5), true, false);
    kept.follow(NEXT, STANDBY, false, false);
    kept.held(NEXT, STANDBY, &Cursors::All(2), false, false);
    assert_eq!(kept.trim(6, |_| NEXT).len(), 2);
    assert_eq!(kept.kept_from(0), Some(2));
    assert!(kept.reaches([0], 2) && !kept.reaches([0], 1));
    let mut large = halos(6, 25, 100);
    large.follow(NEXT, OWNER, true, true);
    large.held(NEXT, OWNER, &Cursors::All(5), true, false);
    large.follow(NEXT, STANDBY, false, true);
    large.trim(6, |_| NEXT);
    assert_eq!(large.kept_from(0), Some(2), "the bound leaves room for four");
}

/// A tile exchanges halos every few steps. Their cursors have gaps, and no entry is missing.
#[test]
fn halos_of_every_eighth_step_are_all_kept_for_a_standby() {
    let bounds = Bounds { bytes: u64::MAX, entries: 1000, window: u64::MAX, joined: 0 };
    let mut sent = Sent::new(Keep::WhileNeeded, bounds);
    sent.follow(NEXT, OWNER, true, true);
    sent.follow(NEXT, STANDBY, false, false);
    for step in [0, 8, 16, 24] {
        let entry = LogEntry { end: step + 1, ..entry(step, 10, step.into()) };
        assert_eq!(numbers(&sent.push(REQUEST, entry)), []);
        sent.reached(NEXT, OWNER, step);
        assert_eq!(sent.trim(step, |_| NEXT), []);
    }
    assert!(sent.reaches([REQUEST], 0));
    sent.held(NEXT, STANDBY, &Cursors::All(8), true, true);
    assert_eq!(due(&mut sent, STANDBY), [(8, 10), (16, 10), (24, 10)]);
    assert_eq!(numbers(&sent.trim(24, |_| NEXT)), [0]);
}
