//! Prompts of a stage while streams run: when they wait for decode steps, and for how long.
use super::*;

const MS: Duration = Duration::from_millis(1);

/// A stage whose batches take 8 ms and one more for each row after the first.
struct Paced {
    parts: Parts,
    now: Instant,
}

impl Paced {
    /// Runs the next batch, if one starts. Returns the rows of its items.
    fn batch(&mut self) -> Option<Vec<u32>> {
        let run = start_run(&mut self.parts, self.now)?;
        let rows: Vec<u32> = items(&run).iter().map(|item| item.count).collect();
        let took = MS * (7 + rows.iter().sum::<u32>());
        self.now = self.now + took;
        let results = rows.iter().map(|_| ItemResult::Hidden).collect();
        let compute_ns = u64::try_from(took.as_nanos()).expect("milliseconds");
        self.parts.handle_ran(self.now, PartId(0), run.work, Ok(RunResult::Batch { results, compute_ns }));
        Some(rows)
    }

    /// Computes a step of each stream, and rows of the prompt with each.
    fn steps(&mut self, streams: &[u64], position: u32) {
        streams.iter().for_each(|&stream| self.feed(frame(stream, position, 1, true)));
        for _ in streams {
            let rows = self.batch().expect("a step and rows of the prompt");
            assert!(rows[0] == 1 && rows.len() <= 2, "one step: {rows:?}");
        }
    }

    fn feed(&mut self, header: FrameHeader) {
        self.parts.handle_frame(self.now, COORDINATOR, header, Payload::Tensor(TensorId::Arrived(1)));
    }
}

/// A stage with two streams, 7 and 9, or with the first of them. Their steps return 20 ms after the last one left, and twenty of each
/// were computed beside a prompt. Returns the position of the streams, too.
fn beside_a_prompt(streams: &[u64]) -> (Paced, u32) {
    let mut paced = Paced { parts: stage(Some(NEXT)), now: NOW };
    streams.iter().for_each(|&stream| paced.feed(frame(stream, 0, 4, true)));
    while paced.batch().is_some() {}
    for position in 4..8 {
        streams.iter().for_each(|&stream| paced.feed(frame(stream, position, 1, true)));
        streams.iter().for_each(|_| assert_eq!(paced.batch(), Some(Vec::from([1]))));
        paced.now = paced.now + MS * 20;
    }
    for chunk in 0..3 {
        paced.feed(frame(8, 512 * chunk, 512, false));
    }
    for position in 8..28 {
        paced.steps(streams, position);
        let arrive = paced.now + MS * 20;
        while paced.now < arrive && paced.batch().is_some() {}
        paced.now = paced.now.max(arrive);
    }
    (paced, 28)
}

#[test]
fn rows_between_steps_end_before_the_next_one_arrives() {
    for streams in [&[7][..], &[7, 9]] {
        let (mut paced, position) = beside_a_prompt(streams);
        paced.steps(streams, position);
        let left = paced.now;
        let between = paced.batch().expect("a batch of the prompt");
        let took = paced.now.since(left);
        assert!(between.len() == 1 && (MS * 15..=MS * 21).contains(&took), "{between:?} in {took:?}");
    }
}

#[test]
fn prompts_wait_for_a_step_until_it_is_overdue() {
    let (mut paced, position) = beside_a_prompt(&[7]);
    paced.steps(&[7], position);
    paced.now = paced.now + MS * 15;
    assert_eq!(paced.batch(), None, "a batch would end after the next step arrives");
    let (at, why) = paced.parts.next_wakeup().expect("a time");
    assert!(at > paced.now && at < paced.now + MS * 60, "{why}");
    paced.feed(frame(7, position + 1, 1, true));
    assert_eq!(paced.batch().map(|rows| rows.len()), Some(2), "the step arrives, and rows go with it");
    paced.now = paced.now + MS * 15;
    assert_eq!(paced.batch(), None);
    let starts = |parts: &Parts| parts.next_wakeup().is_some_and(|(_, why)| why.contains("wait for decode steps"));
    while starts(&paced.parts) {
        let (at, _) = paced.parts.next_wakeup().expect("a time");
        paced.now = at;
        if let Some(rows) = paced.batch() {
            assert_eq!(rows.len(), 1, "only rows of the prompt");
            return;
        }
    }
    panic!("the prompt waits for a step that does not arrive");
}

#[test]
fn prompts_wait_for_a_step_that_was_measured_alone() {
    let (mut paced, mut position) = beside_a_prompt(&[7]);
    for _ in 0..20 {
        paced.feed(frame(7, position, 1, true));
        let step = paced.batch().expect("a step");
        let left = paced.now;
        let between = paced.batch();
        assert_eq!(between.is_none(), step.len() == 1, "{step:?}, then {between:?}");
        if between.is_none() {
            return;
        }
        (paced.now, position) = (paced.now.max(left + MS * 20), position + 1);
    }
    panic!("no step was measured alone");
}

#[test]
fn prompts_wait_for_no_stream_that_ended() {
    let (mut paced, position) = beside_a_prompt(&[7]);
    paced.steps(&[7], position);
    paced.now = paced.now + MS * 15;
    assert_eq!(paced.batch(), None);
    close(&mut paced.parts, 7);
    assert!(paced.batch().is_some_and(|rows| rows[0] > 100), "the prompt has the device for itself");
}

#[test]
fn several_prompts_wait_for_no_step_and_take_more_rows() {
    let rows_beside = |prompts: u64| {
        let (mut paced, position) = beside_a_prompt(&[7]);
        (1..prompts).for_each(|n| paced.feed(frame(20 + n, 0, 512, false)));
        paced.feed(frame(7, position, 1, true));
        let step = paced.batch().expect("a step and rows of the prompts");
        paced.now = paced.now + MS * 15;
        (step.iter().sum::<u32>() - 1, paced.batch().is_some())
    };
    let (alone, goes) = rows_beside(1);
    assert!(!goes, "the only prompt waits");
    let (two, goes) = rows_beside(2);
    assert!(goes && two.abs_diff(2 * alone) <= 2, "{two} rows of two prompts, {alone} of one");
    assert_eq!(rows_beside(4), rows_beside(9), "the time is bounded");
}
