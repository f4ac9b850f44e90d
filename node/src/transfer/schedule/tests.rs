//! Tests of the schedule with holders of different speed and honesty, on a manual clock.
use super::*;

mod edges;

const MIB: u64 = 1 << 20;

fn node(n: u8) -> NodeId {
    NodeId([n; 16])
}

/// A fake holder that sends its chunks one after another, each in `chunk_time`.
struct Link {
    chunk_time: Duration,
    free: Instant,
    fails_after: Option<usize>,
    given: usize,
}

/// The result of running a schedule to its end: chunks per holder, redundant responses, the time taken, and the chunk
/// that no holder could provide.
struct Run {
    given: BTreeMap<u8, usize>,
    in_vain: usize,
    took: Duration,
    unavailable: Option<usize>,
}

fn run(schedule: &mut Schedule, links: &[(u8, u64, Option<usize>)]) -> Run {
    let start = Instant::now();
    let mut links: BTreeMap<NodeId, Link> = links
        .iter()
        .map(|&(n, ms, fails_after)| {
            (node(n), Link { chunk_time: Duration::from_millis(ms), free: start, fails_after, given: 0 })
        })
        .collect();
    let mut events: BTreeMap<(Instant, Ask), bool> = BTreeMap::new();
    let (mut now, mut given, mut in_vain) = (start, BTreeMap::new(), 0);
    loop {
        while let Some(ask) = schedule.poll(now) {
            let link = links.get_mut(&ask.node).expect("a holder");
            let fails = link.fails_after.is_some_and(|most| link.given >= most);
            link.given += 1;
            link.free = link.free.max(now) + link.chunk_time;
            events.insert((if fails { now } else { link.free }, ask), !fails);
        }
        if schedule.is_done() || schedule.unavailable().is_some() {
            let unavailable = schedule.unavailable();
            return Run { given, in_vain, took: now - start, unavailable };
        }
        let wakeup = schedule.next_wakeup(now);
        let event = events.first_key_value().map(|((at, _), _)| *at);
        now = [event, wakeup].into_iter().flatten().min().expect("a next event").max(now);
        for ask in schedule.overdue(now) {
            schedule.handle_failed(now, ask);
        }
        if event.is_some_and(|at| at <= now) {
            let ((_, ask), ok) = events.pop_first().expect("an event");
            if ok {
                *given.entry(ask.node.0[0]).or_default() += 1;
                for other in schedule.handle_arrived(now, ask) {
                    in_vain += 1;
                    events.retain(|(_, ask), _| *ask != other);
                }
            } else {
                schedule.handle_failed(now, ask);
            }
        }
    }
}

fn schedule(chunks: usize, holders: &[u8]) -> Schedule {
    let mut schedule = Schedule::new((0..chunks).map(|c| (c, MIB)));
    for n in holders {
        schedule.handle_holder(node(*n), vec![true; chunks], true);
    }
    schedule
}

#[test]
fn equal_holders_send_equal_shares_and_nothing_twice() {
    let mut schedule = schedule(90, &[1, 2, 3]);
    let run = run(&mut schedule, &[(1, 20, None), (2, 20, None), (3, 20, None)]);
    assert_eq!((run.given.values().sum::<usize>(), run.in_vain, run.unavailable), (90, 0, None));
    assert!(run.given.values().all(|given| (28..=32).contains(given)), "{:?}", run.given);
    assert!(run.took < Duration::from_millis(33 * 20), "three in parallel: {:?}", run.took);
}

#[test]
fn a_slow_holder_sends_less_and_its_last_chunk_is_requested_elsewhere() {
    let mut schedule = schedule(100, &[1, 2]);
    let run = run(&mut schedule, &[(1, 20, None), (2, 4000, None)]);
    assert!(run.given[&1] >= 98, "{:?}", run.given);
    assert!(run.in_vain >= 1, "the fast holder sent its chunk");
    assert!(run.took < Duration::from_secs(4), "the slow holder did not delay the end: {:?}", run.took);
}

#[test]
fn the_rarest_chunk_is_requested_first() {
    let mut schedule = Schedule::new((0..10).map(|c| (c, MIB)));
    schedule.handle_holder(node(1), vec![true; 10], true);
    schedule.handle_holder(node(2), (0..10).map(|c| c != 7).collect(), true);
    let now = Instant::now();
    let first: Vec<Ask> = std::iter::from_fn(|| schedule.poll(now)).collect();
    assert_eq!(first.len(), 2 * WINDOW_FIRST);
    assert_eq!(first[0], Ask { node: node(1), chunk: 7 });
    assert_eq!(first[1], Ask { node: node(2), chunk: 0 });
}

#[test]
fn the_remaining_holders_send_the_chunks_of_a_lost_one() {
    let mut schedule = schedule(40, &[1, 2]);
    let run = run(&mut schedule, &[(1, 20, Some(5)), (2, 20, None)]);
    assert_eq!((run.given[&1], run.given[&2], run.unavailable), (5, 35, None));
}

#[test]
fn chunks_that_only_a_lost_holder_had_are_reported() {
    let mut schedule = Schedule::new((0..4).map(|c| (c, MIB)));
    schedule.handle_holder(node(1), vec![true; 4], true);
    schedule.handle_holder(node(2), vec![true, true, false, false], true);
    let run = run(&mut schedule, &[(1, 20, Some(0)), (2, 20, None)]);
    assert_eq!(run.unavailable, Some(2));
    assert!(run.took < Duration::from_secs(3), "given up early: {:?}", run.took);
}

#[test]
fn a_dropped_holder_is_not_asked_again() {
    let mut schedule = schedule(10, &[1, 2]);
    let now = Instant::now();
    let asked: Vec<Ask> = std::iter::from_fn(|| schedule.poll(now)).collect();
    let of_first: Vec<Ask> = asked.iter().copied().filter(|ask| ask.node == node(1)).collect();
    assert_eq!(of_first.len(), WINDOW_FIRST);
    assert_eq!(schedule.handle_gone(node(1)), of_first);
    let run = run(&mut schedule, &[(2, 1, None)]);
    assert_eq!(run.unavailable, None);
    assert!(!run.given.contains_key(&1));
}

#[test]
fn a_connection_that_breaks_is_one_failure() {
    let mut schedule = schedule(20, &[1]);
    let mut now = Instant::now();
    for _ in 0..6 {
        let asked = schedule.poll(now).expect("a request");
        now += Duration::from_millis(1);
        schedule.handle_arrived(now, asked);
    }
    let asked: Vec<Ask> = std::iter::from_fn(|| schedule.poll(now)).collect();
    assert_eq!(asked.len(), WINDOW_MAX, "a fast holder gets more requests");
    now += Duration::from_millis(1);
    asked.into_iter().for_each(|ask| schedule.handle_failed(now, ask));
    assert_eq!(schedule.poll(now), None, "it pauses");
    let again = schedule.next_wakeup(now).expect("a retry");
    assert!(schedule.poll(again).is_some() && schedule.unavailable().is_none());
}

#[test]
fn a_response_that_never_arrives_times_out() {
    let mut schedule = schedule(1, &[1]);
    let mut now = Instant::now();
    for _ in 0..FAILURES_MAX {
        let ask = schedule.poll(now).expect("a retry");
        now += ANSWER_MAX;
        assert_eq!(schedule.overdue(now), [ask]);
        schedule.handle_failed(now, ask);
        now += Duration::from_secs(10);
    }
    assert_eq!(schedule.unavailable(), Some(0));
}

#[test]
fn all_holders_together_keep_within_the_rate() {
    let mut schedule = Schedule::new((0..50).map(|c| (c, MIB)));
    schedule.handle_pace(Some(10 * MIB));
    for n in 1..=4 {
        schedule.handle_holder(node(n), vec![true; 50], true);
    }
    let run = run(&mut schedule, &[(1, 1, None), (2, 1, None), (3, 1, None), (4, 1, None)]);
    let seconds = run.took.as_secs_f64();
    assert!((4.7..5.2).contains(&seconds), "50 MiB at 10 MiB/s took {seconds} s");
}

#[test]
fn a_missing_chunk_is_requested_from_another_holder() {
    let mut schedule = schedule(1, &[1, 2]);
    let now = Instant::now();
    let first = schedule.poll(now).expect("a request");
    schedule.handle_lacking(first);
    let second = schedule.poll(now).expect("a request to the other");
    assert_ne!(first.node, second.node);
    schedule.handle_lacking(second);
    assert!(schedule.unavailable() == Some(0) && schedule.is_missing(0));
}
