//! The queue of frames for the executor: which frames run next, and which of them are joined.
use crate::id::{RequestId, TensorId};
use crate::limits::{CHUNK_POSITIONS_MAX, chunk_positions};
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

/// Consecutive frames of one request in the queue.
#[derive(Default)]
struct Run {
    indices: Vec<usize>,
    end: u32,
    rows: u32,
    broken: bool,
}

impl Run {
    /// Adds a frame if it continues where the last one ended and fits into a chunk of `most` rows.
    fn take(&mut self, index: usize, header: &FrameHeader, most: u32) {
        let first = self.indices.is_empty();
        self.broken |= header.cursor != self.end || self.rows + header.count > most;
        if first || !self.broken {
            self.indices.push(index);
            self.end = header.end();
            self.rows += header.count;
        }
    }
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

/// Removes the next batch from the queue: each request's first frame, joined with those that continue it, up to the
/// rows of a chunk in a pipeline of `stages` stages (many wait only after a resend). Takes decode steps, or prefill
/// chunks if it is their turn.
pub(super) fn choose(queue: &mut VecDeque<Waiting>, prefill_turn: bool, stages: u32) -> Vec<Waiting> {
    let most = chunk_positions(stages);
    let mut runs: BTreeMap<RequestId, Run> = BTreeMap::new();
    let mut order = Vec::new();
    for (index, waiting) in queue.iter().enumerate() {
        let run = runs.entry(waiting.header.request()).or_insert_with(|| {
            order.push(waiting.header.request());
            Run { end: waiting.header.cursor, ..Run::default() }
        });
        run.take(index, &waiting.header, most);
    }
    let rows_of = |request: &RequestId| runs.get(request).map_or(0, |run| run.rows);
    let has_decode = order.iter().any(|request| rows_of(request) == 1);
    let has_prefill = order.iter().any(|request| rows_of(request) > 1);
    let prefill = has_prefill && (prefill_turn || !has_decode);
    let mut rows = 0;
    let mut chosen: BTreeMap<usize, usize> = BTreeMap::new(); // index in the queue → index in the batch
    let mut batch = 0;
    for request in &order {
        let count = rows_of(request);
        let fits = rows + count <= CHUNK_POSITIONS_MAX || chosen.is_empty();
        if (count > 1) == prefill && fits {
            rows += count;
            chosen.extend(runs.get(request).into_iter().flat_map(|run| &run.indices).map(|&index| (index, batch)));
            batch += 1;
        }
    }
    let mut taken: Vec<Option<Waiting>> = (0..batch).map(|_| None).collect();
    let mut kept = VecDeque::with_capacity(queue.len() - chosen.len());
    for (index, waiting) in queue.drain(..).enumerate() {
        match chosen.get(&index) {
            None => kept.push_back(waiting),
            Some(&place) => taken[place] = Some(join(taken[place].take(), waiting)),
        }
    }
    *queue = kept;
    taken.into_iter().flatten().collect()
}
