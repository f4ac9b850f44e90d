//! The queue of frames for the executor: which frames run next, and which of them are joined.
use crate::id::{RequestId, TensorId};
use crate::limits::STEP_ROWS_MAX;
use crate::message::FrameHeader;
use crate::work::Payload;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

/// A frame and its payload.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) header: FrameHeader,
    pub(super) payload: Payload,
}

impl Waiting {
    /// Whether it cannot be split: rows in several tensors, which wait only after a resend, or with drafts.
    fn is_whole(&self) -> bool {
        self.header.drafts.rows > 0 || matches!(self.payload, Payload::Tensors(_))
    }

    /// Rows of it that a batch with room for `left` takes. No single row is taken or left over where that can be avoided: it
    /// would travel with the decode steps, and overtake the rows before it.
    fn rows_within(&self, left: u32, is_first: bool) -> u32 {
        let count = self.header.count;
        if self.is_whole() {
            return if count <= left || is_first { count } else { 0 };
        }
        match count.min(left.max(u32::from(is_first))) {
            rows if rows > 1 && rows + 1 == count => rows - 1,
            1 if count > 1 && !is_first => 0,
            rows => rows,
        }
    }

    /// The fewest rows of it that a batch can take.
    fn least_rows(&self) -> u32 {
        if self.is_whole() { self.header.count } else { 1 }
    }

    /// Splits it after `rows` rows.
    fn split(self, rows: u32, split: &mut Split<'_>) -> (Self, Option<Self>) {
        let Waiting { header, payload } = self;
        if rows >= header.count {
            return (Waiting { header, payload }, None);
        }
        let [now, later] = match payload {
            Payload::Tokens(mut tokens) => {
                let rest = tokens.split_off((rows as usize).min(tokens.len()));
                [tokens, rest].map(Payload::Tokens)
            }
            Payload::Tensor(tensor) => split(tensor, rows, header.count).map(Payload::Tensor),
            Payload::Tensors(_) => return (Waiting { header, payload }, None),
        };
        let rest = FrameHeader { cursor: header.cursor + rows, count: header.count - rows, continues: None, ..header };
        let header = FrameHeader { count: rows, last: false, ..header };
        (Waiting { header, payload: now }, Some(Waiting { header: rest, payload: later }))
    }
}

/// Splits a stored payload of rows or tokens: `(payload, rows of the first part, all rows)`. Returns the ids of both parts.
pub(super) type Split<'a> = dyn FnMut(TensorId, u32, u32) -> [TensorId; 2] + 'a;

/// Consecutive frames of one request in the queue.
#[derive(Default)]
struct Run {
    indices: Vec<usize>,
    end: u32,
    rows: u32,
    /// It goes with the decode steps.
    decodes: bool,
    broken: bool,
}

impl Run {
    /// Adds a frame if it continues where the last one ended and fits into a chunk of `most` rows. Drafts stay alone: the next
    /// frame says which of them are kept.
    fn take(&mut self, index: usize, header: &FrameHeader, most: u32) {
        let first = self.indices.is_empty();
        self.broken |= header.cursor != self.end || self.rows + header.count > most || header.drafts.rows > 0;
        if first || !self.broken {
            self.indices.push(index);
            self.end = header.end();
            self.rows += header.count;
            let rows = FrameHeader { cursor: header.end().saturating_sub(self.rows), count: self.rows, ..*header };
            self.decodes = is_step(&rows);
            self.broken = header.drafts.rows > 0;
        }
    }
}

/// Whether rows go with the decode steps: one is a step, and so are a few that are all that a token waits for, as after a loss.
pub(super) fn is_step(header: &FrameHeader) -> bool {
    header.is_decode() || header.last && header.cursor > 0 && header.count <= STEP_ROWS_MAX
}

/// Joins two consecutive frames. The tokens sampled after the first one are known, or there would be no second.
fn join(first: Option<Waiting>, second: Waiting) -> Waiting {
    let Some(Waiting { header, payload }) = first else { return second };
    let header = FrameHeader { count: header.count + second.header.count, last: second.header.last, ..header };
    let payload = match (payload, second.payload) {
        (Payload::Tokens(mut tokens), Payload::Tokens(more)) => {
            tokens.extend(more);
            Payload::Tokens(tokens)
        }
        (first, second) => Payload::Tensors(tensors(first).chain(tensors(second)).collect()),
    };
    Waiting { header, payload }
}

fn tensors(payload: Payload) -> impl Iterator<Item = TensorId> {
    let tensors = match payload {
        Payload::Tensor(tensor) => Vec::from([tensor]),
        Payload::Tensors(tensors) => tensors,
        Payload::Tokens(_) => Vec::new(),
    };
    tensors.into_iter()
}

/// What one batch may hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchLimits {
    /// Rows of one request. Many frames of a request wait only after a resend.
    pub(super) joined: u32,
    /// Decode steps.
    pub(super) decodes: usize,
    /// Numbers of rows of decode steps that go without prefill rows, to be measured, as classes of powers of two: bit n for
    /// 2^n rows and more.
    pub(super) alone: u64,
    /// Prefill rows of all requests.
    pub(super) prefill: u32,
    /// All rows.
    pub(super) rows: u32,
}

/// Removes the next batch from the queue: decode steps, and prefill rows beside them. Frames that continue each other are
/// joined, and one that exceeds the limit is split. The first prefill frame is always taken, so that decode steps cannot
/// delay it for ever, except beside the few steps that are measured alone. Where one that cannot be split does not fit beside
/// the decode steps, whichever waits longer goes alone.
pub(super) fn choose(queue: &mut VecDeque<Waiting>, limits: BatchLimits, split: &mut Split<'_>) -> Vec<Waiting> {
    let mut runs: BTreeMap<RequestId, Run> = BTreeMap::new();
    let mut order = Vec::new();
    for (index, waiting) in queue.iter().enumerate() {
        let run = runs.entry(waiting.header.request()).or_insert_with(|| {
            order.push(waiting.header.request());
            Run { end: waiting.header.cursor, ..Run::default() }
        });
        run.take(index, &waiting.header, limits.joined);
    }
    let in_order = || order.iter().filter_map(|request| runs.get(request));
    // Index in the queue → index in the batch, and the rows to take.
    let mut chosen: BTreeMap<usize, (usize, u32)> = BTreeMap::new();
    let (mut batch, mut decoded) = (0, 0);
    for run in in_order().filter(|run| run.decodes).take(limits.decodes) {
        if decoded + run.rows > limits.rows {
            break;
        }
        chosen.extend(run.indices.iter().map(|&index| (index, (batch, run.rows))));
        batch += 1;
        decoded += run.rows;
    }
    if decoded.checked_ilog2().is_some_and(|class| limits.alone >> class & 1 == 1) {
        return take(queue, &chosen, batch, split);
    }
    let first = in_order().find(|run| !run.decodes).and_then(|run| run.indices.first().copied());
    if let Some((at, waiting)) = first.and_then(|at| queue.get(at).map(|waiting| (at, waiting)))
        && batch > 0
        && waiting.least_rows() + decoded > limits.rows
    {
        if chosen.keys().all(|&decode| decode > at) {
            chosen.clear();
            (batch, decoded) = (0, 0);
        } else {
            return take(queue, &chosen, batch, split);
        }
    }
    let mut left = limits.prefill.min(limits.rows.saturating_sub(decoded));
    let mut is_first = true;
    for run in in_order().filter(|run| !run.decodes) {
        let mut taken = false;
        for &index in &run.indices {
            let Some(waiting) = queue.get(index) else { break };
            let rows = waiting.rows_within(left, is_first);
            if rows == 0 {
                break;
            }
            chosen.insert(index, (batch, rows));
            // After a part of a frame, the rest comes first.
            left = if rows < waiting.header.count { 0 } else { left.saturating_sub(rows) };
            (is_first, taken) = (false, true);
        }
        batch += usize::from(taken);
        if left == 0 || !taken {
            break;
        }
    }
    take(queue, &chosen, batch, split)
}

/// Removes the chosen rows from the queue. `chosen`: index in the queue → entry of the batch, of `batch` entries, and rows.
fn take(
    queue: &mut VecDeque<Waiting>,
    chosen: &BTreeMap<usize, (usize, u32)>,
    batch: usize,
    split: &mut Split<'_>,
) -> Vec<Waiting> {
    let mut taken: Vec<Option<Waiting>> = (0..batch).map(|_| None).collect();
    let mut kept = VecDeque::with_capacity(queue.len());
    for (index, waiting) in queue.drain(..).enumerate() {
        match chosen.get(&index) {
            None => kept.push_back(waiting),
            Some(&(place, rows)) => {
                let (now, later) = waiting.split(rows, split);
                kept.extend(later);
                taken[place] = Some(join(taken[place].take(), now));
            }
        }
    }
    *queue = kept;
    taken.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Epoch, JobId, NodeId, PartId};
    use crate::message::Drafts;

    const LIMITS: BatchLimits = BatchLimits { joined: 512, decodes: usize::MAX, alone: 0, prefill: 512, rows: 512 };

    fn frame(request: u64, cursor: u32, count: u32, last: bool, tokens: bool) -> Waiting {
        let epoch = Epoch { counter: 1, issuer: NodeId([1; 16]) };
        let header = FrameHeader {
            job: JobId(1),
            epoch,
            part: PartId(0),
            channel: request,
            cursor,
            count,
            last,
            continues: None,
            drafts: Drafts::default(),
        };
        let payload = if tokens {
            Payload::Tokens((cursor..cursor + count).collect())
        } else {
            Payload::Tensor(TensorId::Arrived(9))
        };
        Waiting { header, payload }
    }

    /// (request, cursor, count, last) of each entry.
    fn batch(queue: &mut VecDeque<Waiting>, limits: BatchLimits) -> Vec<(u64, u32, u32, bool)> {
        let mut made = 100;
        let mut split = |_, at, of| {
            assert!(at > 0 && at < of);
            made += 2;
            [TensorId::Produced(made), TensorId::Produced(made + 1)]
        };
        let chosen = choose(queue, limits, &mut split);
        for waiting in &chosen {
            if let Payload::Tokens(tokens) = &waiting.payload {
                let expected = waiting.header.cursor..waiting.header.end();
                assert!(tokens.iter().copied().eq(expected), "the tokens of the rows that were taken");
            }
        }
        chosen.iter().map(|w| (w.header.channel, w.header.cursor, w.header.count, w.header.last)).collect()
    }

    #[test]
    fn decode_steps_and_prefill_share_a_batch() {
        let mut queue =
            VecDeque::from([frame(1, 0, 300, true, true), frame(2, 7, 1, true, true), frame(3, 9, 1, true, true)]);
        let limits = BatchLimits { prefill: 40, ..LIMITS };
        assert_eq!(batch(&mut queue, limits), [(2, 7, 1, true), (3, 9, 1, true), (1, 0, 40, false)]);
        queue.push_back(frame(2, 8, 1, true, true));
        assert_eq!(batch(&mut queue, limits), [(2, 8, 1, true), (1, 40, 40, false)]);
        assert_eq!(batch(&mut queue, LIMITS), [(1, 80, 220, true)], "only the last part asks for a token");
        assert!(queue.is_empty());
    }

    #[test]
    fn what_a_request_lost_does_not_wait_behind_prompts() {
        let limits = BatchLimits { prefill: 40, ..LIMITS };
        let lost = frame(2, 700, STEP_ROWS_MAX, true, true);
        let mut queue = VecDeque::from([frame(1, 0, 300, true, true), lost, frame(3, 0, 4, true, true)]);
        let expected = [(2, 700, STEP_ROWS_MAX, true), (1, 0, 40, false)];
        assert_eq!(batch(&mut queue, limits), expected, "a short prompt is a prompt");
        let more = frame(2, 700, STEP_ROWS_MAX + 1, true, true);
        let mut queue = VecDeque::from([frame(1, 0, 300, true, true), more]);
        assert_eq!(batch(&mut queue, limits), [(1, 0, 40, false)], "more rows wait");
    }

    #[test]
    fn groups_of_decode_steps_leave_others_for_the_next_batch() {
        let mut queue: VecDeque<Waiting> = (1..=5).map(|request| frame(request, 4, 1, true, true)).collect();
        let limits = BatchLimits { decodes: 3, ..LIMITS };
        assert_eq!(batch(&mut queue, limits).iter().map(|(request, ..)| *request).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(batch(&mut queue, limits).iter().map(|(request, ..)| *request).collect::<Vec<_>>(), [4, 5]);
    }

    #[test]
    fn hidden_rows_are_split() {
        let mut queue =
            VecDeque::from([frame(1, 3, 1, true, false), frame(2, 0, 100, true, false), frame(3, 0, 30, true, false)]);
        let limits = BatchLimits { prefill: 40, ..LIMITS };
        assert_eq!(batch(&mut queue, limits), [(1, 3, 1, true), (2, 0, 40, false)]);
        assert!(matches!(queue[0].payload, Payload::Tensor(TensorId::Produced(103))), "{:?}", queue[0]);
        assert_eq!(batch(&mut queue, limits), [(2, 40, 40, false)]);
        assert_eq!(batch(&mut queue, limits), [(2, 80, 20, true), (3, 0, 20, false)]);
        assert_eq!(batch(&mut queue, limits), [(3, 20, 10, true)]);
    }

    #[test]
    fn no_single_row_is_left_over() {
        let limits = BatchLimits { prefill: 40, ..LIMITS };
        let mut queue = VecDeque::from([frame(1, 0, 41, true, true)]);
        assert_eq!(batch(&mut queue, limits), [(1, 0, 39, false)]);
        assert_eq!(batch(&mut queue, limits), [(1, 39, 2, true)]);
        let mut queue = VecDeque::from([frame(1, 0, 41, false, true), frame(1, 41, 30, true, true)]);
        assert_eq!(batch(&mut queue, limits), [(1, 0, 39, false)], "nothing after the rows that are left over");
        assert_eq!(batch(&mut queue, limits), [(1, 39, 32, true)]);
        let mut queue = VecDeque::from([frame(1, 0, 2, true, true)]);
        assert_eq!(
            batch(&mut queue, BatchLimits { prefill: 1, ..LIMITS }),
            [(1, 0, 1, false)],
            "one row is all it may take"
        );
    }

    #[test]
    fn steps_that_have_to_be_measured_go_alone() {
        let frames = || VecDeque::from([frame(1, 3, 1, true, false), frame(2, 0, 20, false, false)]);
        let alone = |alone| batch(&mut frames(), BatchLimits { alone, ..LIMITS });
        assert_eq!(alone(0b1), [(1, 3, 1, true)]);
        assert_eq!(alone(0b10), [(1, 3, 1, true), (2, 0, 20, false)], "steps of two or three rows do");
        let mut prompt = VecDeque::from([frame(2, 0, 20, false, false)]);
        assert_eq!(batch(&mut prompt, BatchLimits { alone: u64::MAX, ..LIMITS }), [(2, 0, 20, false)]);
    }

    #[test]
    fn what_cannot_be_split_never_starves() {
        let several = |request, count| {
            let payload = Payload::Tensors(Vec::from([TensorId::Arrived(1), TensorId::Arrived(2)]));
            Waiting { payload, ..frame(request, 0, count, false, false) }
        };
        let limits = BatchLimits { prefill: 40, ..LIMITS };
        let mut queue = VecDeque::from([frame(1, 3, 1, true, false), several(2, 100), several(3, 100)]);
        assert_eq!(batch(&mut queue, limits), [(1, 3, 1, true), (2, 0, 100, false)]);
        assert_eq!(batch(&mut queue, limits), [(3, 0, 100, false)]);
        let mut queue = VecDeque::from([several(2, 30), several(3, 30)]);
        assert_eq!(batch(&mut queue, limits), [(2, 0, 30, false)], "the second does not fit");
        let mut queue = VecDeque::from([frame(1, 3, 1, true, false), several(2, 512)]);
        assert_eq!(batch(&mut queue, LIMITS), [(1, 3, 1, true)]);
        queue.push_back(frame(1, 4, 1, true, false));
        assert_eq!(batch(&mut queue, LIMITS), [(2, 0, 512, false)], "it waits longer");
        assert_eq!(batch(&mut queue, LIMITS), [(1, 4, 1, true)]);
    }

    #[test]
    fn frames_that_continue_each_other_are_joined() {
        let mut queue =
            VecDeque::from([frame(1, 0, 10, false, true), frame(1, 10, 10, false, true), frame(1, 21, 5, true, true)]);
        assert_eq!(batch(&mut queue, LIMITS), [(1, 0, 20, false)], "there is a gap before the third");
        assert_eq!(batch(&mut queue, LIMITS), [(1, 21, 5, true)]);
        let mut queue = VecDeque::from([frame(1, 0, 10, false, true), frame(1, 10, 10, true, true)]);
        let limits = BatchLimits { prefill: 15, ..LIMITS };
        assert_eq!(batch(&mut queue, limits), [(1, 0, 15, false)]);
        assert_eq!(batch(&mut queue, limits), [(1, 15, 5, true)]);
    }
}
