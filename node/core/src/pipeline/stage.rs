//! One stage of one job under one epoch: what each request holds here, what waits, what runs.
use super::{PipelineOutput, Route, discard};
use crate::id::{Epoch, JobId, NodeId, RequestId, TensorId, WorkId};
use crate::input::ItemResult;
use crate::limits::{CHUNK_POSITIONS_MAX, CLOSED_REQUESTS_MAX, PARKED_FRAMES_MAX, STAGE_QUEUE_MAX};
use crate::message::{FrameHeader, Message, Sampling};
use crate::output::{Item, Payload, SampleSpec};
use crate::time::{Duration, Instant};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{format, string::String, vec::Vec};

type Out = VecDeque<PipelineOutput>;

/// A stage at work.
#[derive(Debug)]
pub(super) struct StageRun {
    job: JobId,
    route: Route,
    /// Requests that have (or will have, once what waits has run) a cache here; at most `route.sequences`.
    requests: BTreeMap<RequestId, Held>,
    /// How to sample, at the last stage, from `Open` to `Close`.
    opened: BTreeMap<RequestId, Opened>,
    /// Frames of requests for which there is no cache until another's `Close` arrives, in order.
    outside: VecDeque<Waiting>,
    /// Requests closed under this epoch: their late frames must not open a cache again.
    closed: BTreeSet<RequestId>,
    /// Accepted frames in the order in which the executor will run them.
    waiting: VecDeque<Waiting>,
    /// The batch at the executor.
    running: Option<WorkId>,
    /// The batch before was decode only: the next may be a prefill chunk.
    prefill_turn: bool,
    /// The executor failed; nothing runs until the head places the job anew.
    failed: Option<String>,
    pace: Pace,
    touched: u64,
}

/// What is known of one request here.
#[derive(Debug, Default)]
struct Held {
    /// Positions `0..have` are in the cache or will be once what waits has run.
    have: u32,
    /// Frames that wait for `Open`, in order.
    parked: VecDeque<Waiting>,
    /// When it was last used, on a counter: the one unused for longest goes first.
    touched: u64,
}

#[derive(Debug)]
struct Opened {
    sampling: Sampling,
    /// Tokens so far; kept only where the sampling looks back.
    history: Vec<u32>,
}

#[derive(Debug)]
struct Waiting {
    header: FrameHeader,
    payload: Payload,
}

/// A batch at the executor.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) job: JobId,
    pub(super) epoch: Epoch,
    pub(super) started: Instant,
    /// How long it should take.
    pub(super) budget: Duration,
    items: Vec<(FrameHeader, TensorId)>,
}

impl StageRun {
    pub(super) fn new(job: JobId, route: Route) -> Self {
        StageRun {
            job,
            route,
            requests: BTreeMap::new(),
            opened: BTreeMap::new(),
            outside: VecDeque::new(),
            closed: BTreeSet::new(),
            waiting: VecDeque::new(),
            running: None,
            prefill_turn: true,
            failed: None,
            pace: Pace::default(),
            touched: 0,
        }
    }

    /// Whether this batch is the one it waits for.
    pub(super) fn runs(&self, work: WorkId) -> bool {
        self.running == Some(work)
    }

    fn tell_head(&self, message: Message, out: &mut Out) {
        out.push_back(PipelineOutput::Message { to: self.route.head, message });
    }

    pub(super) fn handle_frame(&mut self, from: NodeId, header: FrameHeader, payload: Payload, out: &mut Out) {
        if let Some(reason) = &self.failed {
            out.push_back(self.failure(reason.clone()));
            return discard(payload, out);
        }
        if let Some(what) = self.misfit(from, &header) {
            out.push_back(PipelineOutput::Refused { from, what });
            return discard(payload, out);
        }
        if self.closed.contains(&header.request) {
            return discard(payload, out);
        }
        let have = self.have(header.request);
        let full = self.waiting.len() >= STAGE_QUEUE_MAX;
        if header.position > have || full {
            if !full {
                self.tell_gap(header.request, have, out);
            }
            return discard(payload, out);
        }
        let waiting = Waiting { header, payload };
        if self.requests.contains_key(&header.request) || self.requests.len() < self.route.sequences as usize {
            self.accept(waiting, out);
        } else {
            self.keep_outside(waiting, out);
        }
    }

    /// Positions held of a request, counting what waits.
    fn have(&self, request: RequestId) -> u32 {
        let outside = || self.outside.iter().rev().find(|waiting| waiting.header.request == request);
        let inside = self.requests.get(&request).map(|held| held.have);
        inside.unwrap_or_else(|| outside().map_or(0, |waiting| waiting.header.position + waiting.header.count))
    }

    /// Why a frame does not fit this stage, if it does not.
    fn misfit(&self, from: NodeId, header: &FrameHeader) -> Option<String> {
        let end = header.position.checked_add(header.count);
        if header.edge != self.route.stage {
            return Some(format!("frame for edge {}, this is stage {}", header.edge, self.route.stage));
        }
        if from != self.route.previous {
            return Some(format!("frame from {from}, stage {} listens to {}", self.route.stage, self.route.previous));
        }
        if header.count == 0 || header.count > CHUNK_POSITIONS_MAX || end.is_none_or(|end| end > self.route.context) {
            return Some(format!(
                "frame of {} positions from {}, expected 1 to {CHUNK_POSITIONS_MAX} within a context of {}",
                header.count, header.position, self.route.context
            ));
        }
        None
    }

    fn accept(&mut self, waiting: Waiting, out: &mut Out) {
        let header = waiting.header;
        let parked: usize = self.requests.values().map(|held| held.parked.len()).sum();
        self.touched += 1;
        let unopened = self.route.next.is_none() && !self.opened.contains_key(&header.request);
        let held = self.requests.entry(header.request).or_default();
        held.touched = self.touched;
        let waits_for_open = unopened && (header.sample || !held.parked.is_empty());
        if waits_for_open && parked >= PARKED_FRAMES_MAX {
            // The head's watchdog sends it again, with `Open` first.
            return discard(waiting.payload, out);
        }
        held.have = header.position + header.count;
        if waits_for_open {
            held.parked.push_back(waiting);
        } else {
            self.waiting.push_back(waiting);
        }
    }

    /// All caches are taken. The head keeps at most `sequences` requests open, so the `Close` of one is on its way, on
    /// another stream; the frame waits for it. Sent a second time it says that the `Close` was lost with a connection:
    /// then the cache unused for longest goes. Were that one alive after all, a `Gap` brings it back.
    fn keep_outside(&mut self, waiting: Waiting, out: &mut Out) {
        let request = waiting.header.request;
        let again = |old: &Waiting| old.header.request == request && old.header.position >= waiting.header.position;
        if !self.outside.iter().any(again) {
            if self.outside.len() >= PARKED_FRAMES_MAX {
                return discard(waiting.payload, out);
            }
            return self.outside.push_back(waiting);
        }
        let oldest = self.requests.iter().min_by_key(|(_, held)| held.touched).map(|(&request, _)| request);
        // Its own frames first, so that the room made is not given to what they were.
        self.drop_waiting(request, out);
        oldest.into_iter().for_each(|oldest| self.drop_request(oldest, out));
        self.accept(waiting, out);
    }

    /// Lets frames in that waited for a cache.
    fn admit_outside(&mut self, out: &mut Out) {
        while self.requests.len() < self.route.sequences as usize {
            let Some(request) = self.outside.front().map(|waiting| waiting.header.request) else { return };
            let (mine, others) = self.outside.drain(..).partition(|waiting| waiting.header.request == request);
            self.outside = others;
            let mine: VecDeque<Waiting> = mine;
            mine.into_iter().for_each(|waiting| self.accept(waiting, out));
        }
    }

    pub(super) fn handle_open(&mut self, request: RequestId, sampling: Sampling, tokens: Vec<u32>) {
        if self.route.next.is_some() || self.failed.is_some() || self.closed.contains(&request) {
            return;
        }
        // More than can be open: the `Close` of the oldest was lost.
        while self.opened.len() >= 2 * self.route.sequences as usize {
            self.opened.pop_first();
        }
        self.opened.insert(request, Opened { sampling, history: tokens });
        if let Some(held) = self.requests.get_mut(&request) {
            self.waiting.append(&mut held.parked);
        }
    }

    pub(super) fn handle_close(&mut self, request: RequestId, out: &mut Out) {
        self.closed.insert(request);
        if self.closed.len() > CLOSED_REQUESTS_MAX {
            self.closed.pop_first();
        }
        self.opened.remove(&request);
        self.drop_waiting(request, out);
        self.drop_request(request, out);
        self.admit_outside(out);
    }

    /// Forgets a request: its cache is freed, what waits for it is discarded.
    fn drop_request(&mut self, request: RequestId, out: &mut Out) {
        let Some(held) = self.requests.remove(&request) else { return };
        self.drop_waiting(request, out);
        held.parked.into_iter().for_each(|waiting| discard(waiting.payload, out));
        out.push_back(PipelineOutput::Release { job: self.job, request });
    }

    fn drop_waiting(&mut self, request: RequestId, out: &mut Out) {
        for queue in [&mut self.waiting, &mut self.outside] {
            let (gone, kept) = queue.drain(..).partition(|waiting| waiting.header.request == request);
            *queue = kept;
            let gone: VecDeque<Waiting> = gone;
            gone.into_iter().for_each(|waiting| discard(waiting.payload, out));
        }
    }

    pub(super) fn drop_everything(&mut self, out: &mut Out) {
        self.opened.clear();
        self.outside.drain(..).for_each(|waiting| discard(waiting.payload, out));
        while let Some((&request, _)) = self.requests.first_key_value() {
            self.drop_request(request, out);
        }
    }

    pub(super) fn handle_reconnected(&mut self, node: NodeId, out: &mut Out) {
        if self.route.previous != node && self.route.head != node {
            return;
        }
        let held: Vec<(RequestId, u32)> = self.requests.iter().map(|(&request, held)| (request, held.have)).collect();
        held.into_iter().for_each(|(request, have)| self.tell_gap(request, have, out));
    }

    fn tell_gap(&self, request: RequestId, have: u32, out: &mut Out) {
        self.tell_head(Message::Gap { job: self.job, epoch: self.route.epoch, request, have }, out);
    }

    /// Takes the next batch off the queue, if the executor is free: either the decode steps of all requests that have
    /// one waiting, or prefill chunks up to one chunk's rows. They take turns, so neither starves, and a decode step
    /// waits for one chunk at most.
    pub(super) fn start_batch(
        &mut self,
        now: Instant,
        work: WorkId,
        tensor_next: &mut u64,
    ) -> Option<(Batch, Vec<Item>)> {
        if self.running.is_some() || self.waiting.is_empty() {
            return None;
        }
        let chosen = self.choose();
        let rows = chosen.iter().map(|waiting| u64::from(waiting.header.count)).sum();
        self.prefill_turn = chosen.iter().all(|waiting| waiting.header.count == 1);
        let mut batch = Batch {
            job: self.job,
            epoch: self.route.epoch,
            started: now,
            budget: self.pace.predict(rows),
            items: Vec::with_capacity(chosen.len()),
        };
        let mut items = Vec::with_capacity(chosen.len());
        for waiting in chosen {
            let output = TensorId(*tensor_next);
            *tensor_next += 1;
            batch.items.push((waiting.header, output));
            items.push(self.item(waiting, output));
        }
        self.running = Some(work);
        Some((batch, items))
    }

    /// Removes from the queue what runs next: at most one frame per request, each request's first.
    fn choose(&mut self) -> Vec<Waiting> {
        let mut seen = BTreeSet::new();
        let firsts: Vec<(usize, u32)> = (self.waiting.iter().enumerate())
            .filter(|(_, waiting)| seen.insert(waiting.header.request))
            .map(|(index, waiting)| (index, waiting.header.count))
            .collect();
        let has_decode = firsts.iter().any(|&(_, count)| count == 1);
        let has_prefill = firsts.iter().any(|&(_, count)| count > 1);
        let prefill = has_prefill && (self.prefill_turn || !has_decode);
        let mut rows = 0;
        let mut chosen = BTreeSet::new();
        for (index, count) in firsts {
            let fits = rows + count <= CHUNK_POSITIONS_MAX || chosen.is_empty();
            if (count > 1) == prefill && fits {
                rows += count;
                chosen.insert(index);
            }
        }
        let mut taken = Vec::with_capacity(chosen.len());
        let mut kept = VecDeque::with_capacity(self.waiting.len() - chosen.len());
        for (index, waiting) in self.waiting.drain(..).enumerate() {
            if chosen.contains(&index) { taken.push(waiting) } else { kept.push_back(waiting) }
        }
        self.waiting = kept;
        taken
    }

    fn item(&self, waiting: Waiting, output: TensorId) -> Item {
        let Waiting { header, payload } = waiting;
        let position = header.position + header.count;
        let sample = self.opened.get(&header.request).filter(|_| header.sample).map(|opened| SampleSpec {
            sampling: opened.sampling,
            position,
            history: opened.history.get(..position as usize).unwrap_or(&opened.history).to_vec(),
        });
        Item { request: header.request, position: header.position, count: header.count, input: payload, output, sample }
    }

    pub(super) fn handle_computed(
        &mut self,
        now: Instant,
        batch: &Batch,
        results: Result<Vec<ItemResult>, String>,
        out: &mut Out,
    ) {
        self.running = None;
        let reason = match &results {
            Err(reason) => Some(reason.clone()),
            Ok(results) if results.len() != batch.items.len() => {
                Some(format!("the executor answered {} of {} items", results.len(), batch.items.len()))
            }
            Ok(_) => None,
        };
        if let Some(reason) = reason {
            batch.discard_results(results, out);
            return self.fail(reason, out);
        }
        self.pace.learn(batch.items.iter().map(|(header, _)| u64::from(header.count)).sum(), now.since(batch.started));
        for (&(header, output), result) in batch.items.iter().zip(results.unwrap_or_default()) {
            self.deliver(header, output, result, out);
        }
    }

    /// The executor failed: no cache is to be trusted. The head places the job anew.
    fn fail(&mut self, reason: String, out: &mut Out) {
        self.drop_everything(out);
        out.push_back(self.failure(reason.clone()));
        self.failed = Some(reason);
    }

    fn failure(&self, reason: String) -> PipelineOutput {
        PipelineOutput::Failed { job: self.job, epoch: self.route.epoch, reason }
    }

    /// Sends one item's result on its way.
    fn deliver(&mut self, header: FrameHeader, output: TensorId, result: ItemResult, out: &mut Out) {
        let (job, epoch, request) = (self.job, self.route.epoch, header.request);
        let position = header.position + header.count;
        let open = self.requests.contains_key(&request);
        match (result, self.route.next) {
            (ItemResult::Hidden, Some(to)) if open => {
                let header = FrameHeader { edge: self.route.stage + 1, ..header };
                out.push_back(PipelineOutput::Frame { to, header, tensor: output });
            }
            (ItemResult::Hidden, _) => out.push_back(PipelineOutput::Discard { tensor: output }),
            (ItemResult::Token { token }, _) if open => {
                self.remember(request, position, token);
                self.tell_head(Message::Token { job, epoch, request, position, token }, out);
            }
            (ItemResult::Nothing, None) if open => {
                self.tell_head(Message::Progress { job, epoch, request, position }, out);
            }
            (ItemResult::Token { .. } | ItemResult::Nothing, _) => {}
        }
    }

    /// Adds a chosen token to the history that the repetition penalty looks at.
    fn remember(&mut self, request: RequestId, position: u32, token: u32) {
        let opened = self.opened.get_mut(&request).filter(|opened| opened.sampling.looks_back());
        if let Some(opened) = opened.filter(|opened| opened.history.len() == position as usize) {
            opened.history.push(token);
        }
    }
}

impl Batch {
    /// Nobody waits for this batch any more: drop what it made.
    pub(super) fn discard_results(&self, results: Result<Vec<ItemResult>, String>, out: &mut Out) {
        for (&(_, tensor), result) in self.items.iter().zip(results.unwrap_or_default()) {
            match result {
                ItemResult::Hidden => out.push_back(PipelineOutput::Discard { tensor }),
                ItemResult::Token { .. } | ItemResult::Nothing => {}
            }
        }
    }
}

/// What batches took so far, to predict the next one.
#[derive(Debug, Default)]
struct Pace {
    /// Slowest recent batch of decode steps.
    decode: Option<Duration>,
    /// Slowest recent nanoseconds per row of a prefill batch.
    prefill_row_ns: Option<u64>,
}

impl Pace {
    /// Before anything has been measured: a first batch on a slow machine under load.
    const UNKNOWN: Duration = Duration::from_secs(30);

    fn predict(&self, rows: u64) -> Duration {
        let prefill = self.prefill_row_ns.map(|ns| Duration::from_nanos(ns.saturating_mul(rows)));
        if rows <= u64::from(crate::limits::SEQUENCES_MAX) {
            self.decode.or(prefill).unwrap_or(Self::UNKNOWN)
        } else {
            prefill.unwrap_or(Self::UNKNOWN)
        }
    }

    /// Takes the slower at once and forgets by an eighth with each faster one.
    fn learn(&mut self, rows: u64, took: Duration) {
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        if rows <= u64::from(crate::limits::SEQUENCES_MAX) {
            let old = self.decode.map_or(took, |old| old - old / 8);
            self.decode = Some(old.max(took));
        } else {
            let row_ns = took_ns / rows.max(1);
            let old = self.prefill_row_ns.map_or(row_ns, |old| old - old / 8);
            self.prefill_row_ns = Some(old.max(row_ns));
        }
    }
}
