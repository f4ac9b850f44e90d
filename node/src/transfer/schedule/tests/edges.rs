//! Tests of the schedule at its edges: no chunks, no holders, bounds, late and unknown reports.
use super::*;

fn polled(schedule: &mut Schedule, now: Instant) -> Vec<Ask> {
    std::iter::from_fn(|| schedule.poll(now)).collect()
}

#[test]
fn nothing_to_fetch_is_done_at_once() {
    let mut schedule = schedule(0, &[1]);
    assert!(schedule.is_done() && schedule.unavailable().is_none());
    assert_eq!((schedule.poll(Instant::now()), schedule.next_wakeup(Instant::now())), (None, None));
}

#[test]
fn without_holders_every_chunk_is_unavailable() {
    let mut schedule = schedule(3, &[]);
    assert_eq!((schedule.unavailable(), schedule.poll(Instant::now())), (Some(0), None));
    assert!(!schedule.is_done() && schedule.is_missing(2) && !schedule.is_missing(3));
}

#[test]
fn a_holder_that_sent_wrong_bytes_before_begins_with_one_request() {
    let mut schedule = Schedule::new((0..9).map(|chunk| (chunk, MIB)));
    schedule.handle_holder(node(1), vec![true; 9], false);
    schedule.handle_holder(node(2), vec![true; 9], true);
    let asked = polled(&mut schedule, Instant::now());
    let of = |n: u8| asked.iter().filter(|ask| ask.node == node(n)).count();
    assert_eq!((of(1), of(2)), (1, WINDOW_FIRST));
}

#[test]
fn a_holder_that_is_announced_twice_keeps_its_requests() {
    let mut schedule = schedule(9, &[1]);
    let now = Instant::now();
    let asked = polled(&mut schedule, now);
    schedule.handle_holder(node(1), vec![true; 9], true);
    assert_eq!(polled(&mut schedule, now), []);
    schedule.handle_arrived(now, asked[0]);
    assert!(!schedule.is_missing(asked[0].chunk) && schedule.poll(now).is_some());
}

#[test]
fn a_bitmap_shorter_than_the_chunks_lacks_the_rest() {
    let mut schedule = Schedule::new((0..4).map(|chunk| (chunk, MIB)));
    schedule.handle_holder(node(1), vec![true; 2], true);
    assert_eq!(schedule.unavailable(), Some(2));
    assert!(polled(&mut schedule, Instant::now()).iter().all(|ask| ask.chunk < 2));
}

#[test]
fn the_chunks_in_flight_are_bounded() {
    let holders: Vec<u8> = (1..=40).collect();
    let mut schedule = schedule(200, &holders);
    let now = Instant::now();
    let asked = polled(&mut schedule, now);
    assert_eq!(asked.len(), IN_FLIGHT_MAX);
    schedule.handle_arrived(now, asked[0]);
    assert_eq!(polled(&mut schedule, now).len(), 1, "one at a time from then on");
}

#[test]
fn no_chunk_is_requested_twice_while_its_holder_is_in_time() {
    let mut schedule = schedule(3, &[1, 2, 3]);
    let start = Instant::now();
    let mut chunks: Vec<usize> = polled(&mut schedule, start).iter().map(|ask| ask.chunk).collect();
    chunks.sort_unstable();
    assert_eq!(chunks, [0, 1, 2]);
    assert_eq!(schedule.poll(start + LATE_MIN / 2), None);
}

#[test]
fn a_late_chunk_is_requested_from_one_other_holder_only() {
    let mut schedule = schedule(1, &[1, 2, 3]);
    let start = Instant::now();
    let first = schedule.poll(start).expect("a request");
    assert_eq!(schedule.next_wakeup(start), Some(start + LATE_MIN));
    let second = schedule.poll(start + LATE_MIN).expect("another holder");
    assert_ne!(first.node, second.node);
    assert_eq!(schedule.poll(start + 4 * LATE_MIN), None, "two are enough");
    assert_eq!(schedule.handle_arrived(start + 4 * LATE_MIN, first), [second], "the other is no longer needed");
    assert!(schedule.is_done());
}

#[test]
fn a_chunk_from_another_transfer_ends_all_requests_for_it() {
    let mut schedule = schedule(2, &[1]);
    let now = Instant::now();
    let asked = polled(&mut schedule, now);
    assert_eq!(schedule.handle_present(asked[0].chunk), [asked[0]]);
    assert_eq!(schedule.handle_present(asked[0].chunk), [], "it is reported twice");
    assert_eq!(schedule.handle_present(99), [], "it was not missing");
    schedule.handle_present(asked[1].chunk);
    assert!(schedule.is_done());
}

#[test]
fn late_reports_of_a_dropped_holder_are_harmless() {
    let mut schedule = schedule(4, &[1, 2]);
    let now = Instant::now();
    let asked: Vec<Ask> = polled(&mut schedule, now).into_iter().filter(|ask| ask.node == node(1)).collect();
    schedule.handle_gone(node(1));
    schedule.handle_failed(now, asked[0]);
    schedule.handle_lacking(asked[0]);
    assert_eq!(schedule.handle_gone(node(1)), [], "it is dropped once");
    schedule.handle_arrived(now, asked[1]);
    assert!(!schedule.is_missing(asked[1].chunk), "its bytes were right all the same");
    let run = run(&mut schedule, &[(2, 1, None)]);
    assert_eq!((run.unavailable, run.given.contains_key(&1)), (None, false));
}

#[test]
fn a_slow_holder_gets_fewer_requests() {
    let mut schedule = schedule(50, &[1]);
    let mut now = Instant::now();
    for _ in 0..WINDOW_MAX {
        let ask = schedule.poll(now).expect("a request");
        now += FAST / 2;
        schedule.handle_arrived(now, ask);
    }
    let asked = polled(&mut schedule, now);
    assert_eq!(asked.len(), WINDOW_MAX);
    now += SLOW + Duration::from_millis(1);
    schedule.handle_arrived(now, asked[0]);
    schedule.handle_arrived(now, asked[1]);
    // Six are in flight, two are allowed.
    assert_eq!(schedule.poll(now), None);
}

#[test]
fn a_holder_pauses_longer_after_each_failure_and_recovers_with_a_chunk() {
    let mut schedule = schedule(9, &[1]);
    let mut now = Instant::now();
    let mut pauses = Vec::new();
    for _ in 1..FAILURES_MAX {
        let ask = schedule.poll(now).expect("a request");
        schedule.handle_failed(now, ask);
        assert_eq!(schedule.poll(now), None, "it pauses");
        let again = schedule.next_wakeup(now).expect("an end of the pause");
        pauses.push(again - now);
        now = again;
    }
    assert_eq!(pauses, [2 * REST, 4 * REST, 8 * REST]);
    let ask = schedule.poll(now).expect("a request");
    schedule.handle_arrived(now, ask);
    let ask = schedule.poll(now).expect("a request");
    schedule.handle_failed(now, ask);
    assert_eq!(schedule.unavailable(), None, "the failures before are forgiven");
}

#[test]
fn a_holder_that_lacks_what_it_announced_is_dropped() {
    let chunks = LACKED_MAX as usize + 1;
    let mut schedule = schedule(chunks, &[1]);
    let now = Instant::now();
    for _ in 1..LACKED_MAX {
        let ask = schedule.poll(now).expect("it may still have others");
        schedule.handle_lacking(ask);
    }
    let ask = schedule.poll(now).expect("the last chance");
    schedule.handle_lacking(ask);
    assert_eq!(schedule.poll(now), None);
    assert_eq!(schedule.unavailable(), Some(0));
}

#[test]
fn a_limit_that_is_lifted_no_longer_delays() {
    let mut schedule = schedule(20, &[1, 2]);
    let now = Instant::now();
    schedule.handle_pace(Some(MIB));
    assert_eq!(polled(&mut schedule, now).len(), 1, "a mebibyte per second");
    let wakeup = schedule.next_wakeup(now).expect("the next request");
    assert!(wakeup > now && wakeup <= now + Duration::from_secs(1));
    schedule.handle_pace(None);
    assert_eq!(polled(&mut schedule, now).len(), 2 * WINDOW_FIRST - 1);
}

#[test]
fn a_limit_of_zero_is_slow_instead_of_a_division_by_zero() {
    let mut schedule = Schedule::new([(0, 1), (1, 1)]);
    schedule.handle_holder(node(1), vec![true; 2], true);
    schedule.handle_pace(Some(0));
    let now = Instant::now();
    assert_eq!(polled(&mut schedule, now).len(), 1);
}

#[test]
fn an_overdue_request_wakes_the_caller() {
    let mut schedule = schedule(1, &[1]);
    let start = Instant::now();
    let ask = schedule.poll(start).expect("a request");
    let late = start + LATE_MIN * 2;
    assert_eq!(schedule.next_wakeup(late), Some(start + ANSWER_MAX));
    assert_eq!(schedule.overdue(start + ANSWER_MAX - Duration::from_millis(1)), []);
    assert_eq!(schedule.overdue(start + ANSWER_MAX), [ask]);
}
