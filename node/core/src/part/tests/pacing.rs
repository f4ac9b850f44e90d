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
        let mut outputs: Vec<PartOutput> = self.parts.poll_runs(self.now).into_iter().collect();
        outputs.extend(self::outputs(&mut self.parts));
        let run = outputs.into_iter().find_map(|output| match output {
            PartOutput::Shell(Output::Run(run)) => Some(run),
            _ => None,
        })?;
        let rows: Vec<u32> = items(&run).iter().map(|item| item.count).collect();
        let took = MS * (7 + rows.iter().sum::<u32>());
        self.now = self.now + took;
        let results = rows.iter().map(|_| ItemResult::Hidden).collect();
        let compute_ns = u64::try_from(took.as_nanos()).expect("milliseconds");
        self.parts.handle_ran(self.now, PartId(0), run.work, Ok(RunResult::Batch { results, compute_ns }));
        Some(rows)
    }

    fn feed(&mut self, header: FrameHeader) {
        self.parts.handle_frame(self.now, COORDINATOR, header, Payload::Tensor(TensorId::Arrived(1)));
    }
}

/// A stage with a stream whose steps return 20 ms after they left, and that has computed twenty of them beside a prompt. Returns
/// the position of the stream, too.
fn beside_a_prompt() -> (Paced, u32) {
    let mut paced = Paced { parts: stage(Some(NEXT)), now: NOW };
    paced.feed(frame(7, 0, 4, true));
    paced.batch();
    for position in 4..8 {
        paced.feed(frame(7, position, 1, true));
        assert_eq!(paced.batch(), Some(Vec::from([1])));
        paced.now = paced.now + MS * 20;
    }
    for chunk in 0..3 {
        paced.feed(frame(8, 512 * chunk, 512, false));
    }
    for position in 8..28 {
        paced.feed(frame(7, position, 1, true));
        paced.batch();
        let arrives = paced.now + MS * 20;
        while paced.now < arrives && paced.batch().is_some() {}
        paced.now = paced.now.max(arrives);
    }
    (paced, 28)
}

#[test]
fn rows_between_steps_end_before_the_next_one_arrives() {
    let (mut paced, position) = beside_a_prompt();
    paced.feed(frame(7, position, 1, true));
    let rows = paced.batch().expect("a batch");
    assert!(rows.len() == 2 && rows[0] == 1, "a step and rows of the prompt: {rows:?}");
    let left = paced.now;
    let between = paced.batch().expect("a batch of the prompt");
    assert!(between.len() == 1 && between[0] > 1 && paced.now <= left + MS * 25, "{between:?}");
}

#[test]
fn prompts_wait_for_a_step_until_it_is_overdue() {
    let (mut paced, position) = beside_a_prompt();
    paced.feed(frame(7, position, 1, true));
    paced.batch().expect("a step and rows of the prompt");
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
fn prompts_wait_for_no_stream_that_ended() {
    let (mut paced, position) = beside_a_prompt();
    paced.feed(frame(7, position, 1, true));
    paced.batch().expect("a step and rows of the prompt");
    paced.now = paced.now + MS * 15;
    assert_eq!(paced.batch(), None);
    close(&mut paced.parts, 7);
    assert!(paced.batch().is_some_and(|rows| rows[0] > 100), "the prompt has the device for itself");
}
