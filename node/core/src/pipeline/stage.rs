//! One stage of one job under one epoch: what each request holds here, what waits, what runs.
use super::pace::Pace;
use super::queue::{Waiting, choose, join};
use super::ring::Ring;
use super::{PipelineOutput, Route, discard};
use crate::id::{Epoch, JobId, NodeId, RequestId, TensorId, WorkId};
use crate::limits::{
    CHUNK_POSITIONS_MAX, CLOSED_REQUESTS_MAX, HELD_EVERY, PARKED_FRAMES_MAX, RESUME_QUIET, SEQUENCES_MAX,
    STAGE_QUEUE_MAX, STAGE_QUEUE_POSITIONS_MAX,
};
use crate::message::{FrameHeader, Message};
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::Payload;
use crate::work::serve::{Item, ItemResult, Position, SampleSpec, Sampling};
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
    /// Rows sent, to be sent again.
    ring: Ring,
    /// The next stage's standby: gets a copy of every frame.
    standby: Option<NodeId>,
    /// The standby of the stage before: is told what is held here, as that stage is.
    before: Option<NodeId>,
    /// Every stage is ready: work may run.
    started: bool,
    /// This node was paused, and what it knows may be out of date: what it makes waits here until the head is heard.
    withheld: Option<Out>,
    /// Of these requests the next stage holds so many positions already: no need to send them.
    send_from: BTreeMap<RequestId, u32>,
    /// What a standby asked for: when, so that it does not ask again at once.
    asked: BTreeMap<RequestId, Instant>,
    /// What was reported last, and when.
    reported: Vec<(RequestId, u32)>,
    reported_at: Instant,
}

/// What is known of one request here.
#[derive(Debug, Default)]
struct Held {
    /// Positions `0..have` are in the cache or will be once what waits has run.
    have: u32,
    /// Positions `0..computed` are in the cache.
    computed: u32,
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
    /// How many of them are the prompt's.
    prompt: u32,
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
            ring: Ring::new(route.ring_rows), // followers come with `go`
            standby: None,
            before: None,
            started: false,
            withheld: None,
            send_from: BTreeMap::new(),
            asked: BTreeMap::new(),
            reported: Vec::new(),
            reported_at: Instant::default(),
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

    pub(super) fn head(&self) -> NodeId {
        self.route.head
    }

    fn tell_head(&self, message: Message, out: &mut Out) {
        out.push_back(PipelineOutput::Message { to: self.route.head, message });
    }

    pub(super) fn handle_frame(
        &mut self,
        now: Instant,
        from: NodeId,
        header: FrameHeader,
        payload: Payload,
        out: &mut Out,
    ) {
        if let Some(reason) = &self.failed {
            out.push_back(self.failure(reason.clone()));
            return discard(payload, out);
        }
        if let Some(what) = self.misfit(from, &header) {
            out.push_back(PipelineOutput::Refused { from, what });
            return discard(payload, out);
        }
        if self.closed.contains(&header.request()) {
            return discard(payload, out);
        }
        let have = self.have(header.request());
        let positions: u64 = self.waiting.iter().map(|waiting| u64::from(waiting.header.count)).sum();
        let full = self.waiting.len() >= STAGE_QUEUE_MAX || positions >= STAGE_QUEUE_POSITIONS_MAX;
        if header.cursor > have || full {
            if !full && self.route.shadow {
                self.ask(now, header.request(), have, out);
            } else if !full {
                self.tell_gap(header.request(), have, out);
            }
            return discard(payload, out);
        }
        let waiting = Waiting { header, payload };
        if self.requests.contains_key(&header.request()) || self.requests.len() < self.route.sequences as usize {
            self.accept(waiting, out);
        } else {
            self.keep_outside(waiting, out);
        }
    }

    /// Positions held of a request, counting what waits.
    fn have(&self, request: RequestId) -> u32 {
        let outside = || self.outside.iter().rev().find(|waiting| waiting.header.request() == request);
        let inside = self.requests.get(&request).map(|held| held.have);
        inside.unwrap_or_else(|| outside().map_or(0, |waiting| waiting.header.end()))
    }

    /// Why a frame does not fit this stage, if it does not.
    fn misfit(&self, from: NodeId, header: &FrameHeader) -> Option<String> {
        let end = header.cursor.checked_add(header.count);
        if header.part != self.route.stage {
            return Some(format!("frame for part {}, this is stage {}", header.part, self.route.stage));
        }
        if from != self.route.previous {
            return Some(format!("frame from {from}, stage {} listens to {}", self.route.stage, self.route.previous));
        }
        if header.count == 0 || header.count > CHUNK_POSITIONS_MAX || end.is_none_or(|end| end > self.route.context) {
            return Some(format!(
                "frame of {} positions from {}, expected 1 to {CHUNK_POSITIONS_MAX} within a context of {}",
                header.count, header.cursor, self.route.context
            ));
        }
        None
    }

    fn accept(&mut self, waiting: Waiting, out: &mut Out) {
        let header = waiting.header;
        let parked: usize = self.requests.values().map(|held| held.parked.len()).sum();
        self.touched += 1;
        // A shadow chooses no tokens, so it needs not know how.
        let unopened = self.route.next.is_none() && !self.route.shadow && !self.opened.contains_key(&header.request());
        let held = self.requests.entry(header.request()).or_default();
        held.touched = self.touched;
        let waits_for_open = unopened && (header.last || !held.parked.is_empty());
        if waits_for_open && parked >= PARKED_FRAMES_MAX {
            // The head's watchdog sends it again, with `Open` first.
            return discard(waiting.payload, out);
        }
        if header.cursor < held.have {
            // It is computed again because somebody further on lost it.
            self.send_from.remove(&header.request());
        }
        held.have = header.end();
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
        let request = waiting.header.request();
        let again = |old: &Waiting| old.header.request() == request && old.header.cursor >= waiting.header.cursor;
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
            let Some(request) = self.outside.front().map(|waiting| waiting.header.request()) else { return };
            let (mine, others) = self.outside.drain(..).partition(|waiting| waiting.header.request() == request);
            self.outside = others;
            let mine: VecDeque<Waiting> = mine;
            mine.into_iter().for_each(|waiting| self.accept(waiting, out));
        }
    }

    pub(super) fn handle_open(&mut self, request: RequestId, sampling: Sampling, tokens: Vec<u32>, prompt: u32) {
        if self.route.next.is_some() || self.failed.is_some() || self.closed.contains(&request) {
            return;
        }
        // More than can be open: the `Close` of the oldest was lost.
        while self.opened.len() >= 2 * self.route.sequences as usize {
            self.opened.pop_first();
        }
        self.opened.insert(request, Opened { sampling, history: tokens, prompt });
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
        out.extend(self.ring.forget(request).into_iter().map(|tensor| PipelineOutput::Discard { tensor }));
        self.send_from.remove(&request);
        self.asked.remove(&request);
        let Some(held) = self.requests.remove(&request) else { return };
        self.drop_waiting(request, out);
        held.parked.into_iter().for_each(|waiting| discard(waiting.payload, out));
        out.push_back(PipelineOutput::Release { job: self.job, request });
    }

    fn drop_waiting(&mut self, request: RequestId, out: &mut Out) {
        for queue in [&mut self.waiting, &mut self.outside] {
            let (gone, kept) = queue.drain(..).partition(|waiting| waiting.header.request() == request);
            *queue = kept;
            let gone: VecDeque<Waiting> = gone;
            gone.into_iter().for_each(|waiting| discard(waiting.payload, out));
        }
    }

    pub(super) fn drop_everything(&mut self, out: &mut Out) {
        self.release(false, out);
        self.opened.clear();
        self.outside.drain(..).for_each(|waiting| discard(waiting.payload, out));
        out.extend(self.ring.clear().into_iter().map(|tensor| PipelineOutput::Discard { tensor }));
        while let Some((&request, _)) = self.requests.first_key_value() {
            self.drop_request(request, out);
        }
    }

    pub(super) fn handle_reconnected(&mut self, node: NodeId, out: &mut Out) {
        if self.route.next == Some(node) && self.started && !self.route.shadow {
            // It cannot ask for a request of which it never saw a row.
            for (request, have) in self.ring.acked_by(node) {
                self.replay(node, request, have, out);
            }
        }
        if (self.route.previous != node && self.route.head != node) || self.route.shadow {
            return; // what a shadow misses it notices at the next frame
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
        if self.running.is_some() || self.waiting.is_empty() || !self.started || self.withheld.is_some() {
            return None;
        }
        let chosen = choose(&mut self.waiting, self.prefill_turn, self.route.stages);
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

    fn item(&self, waiting: Waiting, output: TensorId) -> Item {
        let Waiting { header, payload } = waiting;
        let position = header.end();
        let sample = self.opened.get(&header.request()).filter(|_| header.last).map(|opened| SampleSpec {
            sampling: opened.sampling.clone(),
            prompt: opened.prompt,
            position: if planted::has(Planted::SeedByFirstPosition) { header.cursor + 1 } else { position },
            history: opened.history.get(..position as usize).unwrap_or(&opened.history).to_vec(),
        });
        Item { request: header.request(), position: header.cursor, count: header.count, input: payload, output, sample }
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
        for (header, _) in &batch.items {
            if let Some(held) = self.requests.get_mut(&header.request()) {
                held.computed = header.end();
            }
        }
        self.pace.learn(batch.items.iter().map(|(header, _)| u64::from(header.count)).sum(), now.since(batch.started));
        let mut withheld = self.withheld.take();
        let to = withheld.as_mut().unwrap_or(out);
        for (&(header, output), result) in batch.items.iter().zip(results.unwrap_or_default()) {
            self.deliver(header, output, result, to);
        }
        self.withheld = withheld;
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

    /// Sends one item's result on its way: the one place where rows leave a stage, and where the standby's copy branches
    /// off. The next stage is served first; nothing waits for either.
    fn deliver(&mut self, header: FrameHeader, output: TensorId, result: ItemResult, out: &mut Out) {
        let (job, epoch, request) = (self.job, self.route.epoch, header.request());
        let position = header.end();
        let open = self.requests.contains_key(&request);
        let speaks = open && self.started && !self.route.shadow;
        match (result, self.route.next) {
            (ItemResult::Hidden, Some(next)) if open => {
                let header = FrameHeader { part: self.route.stage + 1, epoch, ..header };
                if speaks {
                    let known = self.send_from.get(&request).is_some_and(|&from| position <= from);
                    let next = (!known).then_some((next, false));
                    let fed = self.standby.filter(|_| !planted::has(Planted::StandbyNeverFed));
                    let to = next.into_iter().chain(fed.map(|standby| (standby, true)));
                    let frame =
                        |(to, copy)| PipelineOutput::Frame { to, header, payload: Payload::Tensor(output), copy };
                    out.extend(to.map(frame));
                }
                let gone = self.ring.push(header, output);
                out.extend(gone.into_iter().map(|tensor| PipelineOutput::Discard { tensor }));
            }
            (ItemResult::Hidden, _) => out.push_back(PipelineOutput::Discard { tensor: output }),
            (ItemResult::Token { token }, _) if speaks => {
                self.remember(request, position, token);
                self.tell_head(Message::Token { job, epoch, request, position, token }, out);
            }
            (ItemResult::Nothing, None) if speaks => {
                self.tell_head(Message::Progress { job, epoch, request, position }, out);
            }
            (ItemResult::Token { .. } | ItemResult::Nothing, _) => {}
        }
    }

    /// Who may ask for rows again: the next stage and its standby.
    fn followers(&self) -> Vec<NodeId> {
        self.route.next.into_iter().chain(self.standby).collect()
    }

    // ---- another route, standbys, and what is sent again

    /// Nothing leaves until `release`.
    pub(super) fn withhold(&mut self) {
        self.withheld.get_or_insert_with(Out::new);
    }

    /// The head was heard under the same epoch: what was withheld may leave. Or it is out of date: only what cleans up is done.
    pub(super) fn release(&mut self, valid: bool, out: &mut Out) {
        let outward =
            |output: &PipelineOutput| matches!(output, PipelineOutput::Frame { .. } | PipelineOutput::Message { .. });
        let withheld = self.withheld.take().unwrap_or_default();
        out.extend(withheld.into_iter().filter(|output| valid || !outward(output)));
    }

    /// Nothing more runs or leaves; what was computed stays.
    pub(super) fn quiesce(&mut self, out: &mut Out) {
        self.started = false;
        self.release(false, out);
        self.opened.clear();
        let waiting = self.waiting.drain(..).chain(self.outside.drain(..));
        waiting.for_each(|waiting| discard(waiting.payload, out));
        for held in self.requests.values_mut() {
            held.parked.drain(..).for_each(|waiting| discard(waiting.payload, out));
            held.have = held.computed;
        }
    }

    /// The same stage under another epoch, perhaps with other neighbours, perhaps out of the shadow.
    pub(super) fn reroute(&mut self, route: Route, out: &mut Out) {
        self.quiesce(out);
        if self.failed.take().is_some() {
            self.drop_everything(out);
        }
        self.route = route;
        (self.standby, self.before) = (None, None);
        self.closed.clear();
        self.send_from.clear();
        self.asked.clear();
        self.reported.clear();
        let empty: Vec<RequestId> =
            self.requests.iter().filter(|(_, held)| held.computed == 0).map(|(&request, _)| request).collect();
        empty.into_iter().for_each(|request| self.drop_request(request, out));
        // What the batch that ran last wrote.
        self.requests.values_mut().for_each(|held| held.have = held.computed);
    }

    /// Every stage is ready: send the next one what follows the positions it holds.
    pub(super) fn go(&mut self, now: Instant, resume: &[(RequestId, u32)], out: &mut Out) {
        self.started = true;
        self.reported_at = now;
        self.ring.set_followers(self.followers());
        let Some(next) = self.route.next.filter(|_| !self.route.shadow) else { return };
        for &(request, have) in resume.iter().take(2 * SEQUENCES_MAX as usize) {
            self.send_from.insert(request, have);
            self.replay(next, request, have, out);
        }
    }

    /// Sends the ring's rows from `have` on, in chunks as large as they may be.
    fn replay(&self, to: NodeId, request: RequestId, have: u32, out: &mut Out) {
        let copy = self.route.next != Some(to);
        let (epoch, part) = (self.route.epoch, self.route.stage + 1);
        let mut joined: Option<Waiting> = None;
        for (header, tensor) in self.ring.replay(request, have) {
            let next = Waiting { header: FrameHeader { epoch, part, ..header }, payload: Payload::Tensor(tensor) };
            let adjoins = joined.as_ref().is_some_and(|Waiting { header, .. }| {
                let rows = header.count + next.header.count;
                header.end() == next.header.cursor && rows <= CHUNK_POSITIONS_MAX
            });
            let whole = if adjoins { None } else { joined.take() };
            out.extend(whole.map(|Waiting { header, payload }| PipelineOutput::Frame { to, header, payload, copy }));
            joined = Some(join(joined.take(), next));
        }
        out.extend(joined.map(|Waiting { header, payload }| PipelineOutput::Frame { to, header, payload, copy }));
    }

    pub(super) fn positions(&self) -> Vec<Position> {
        let kept_from = |request, have| self.ring.kept_from(request).map_or(have, |from| from.min(have));
        let held = self.requests.iter();
        held.map(|(&request, held)| Position {
            request,
            have: held.computed,
            kept_from: kept_from(request, held.computed),
        })
        .collect()
    }

    pub(super) fn handle_standby(&mut self, stage: u16, node: Option<NodeId>) {
        if stage == self.route.stage + 1 {
            self.standby = node;
            self.ring.set_followers(self.followers());
        } else if Some(stage) == self.route.stage.checked_sub(1) {
            self.before = node;
        }
    }

    pub(super) fn handle_resume(&mut self, from: NodeId, request: RequestId, have: u32, out: &mut Out) {
        if self.standby == Some(from) && self.started && !self.route.shadow {
            self.replay(from, request, have, out);
        }
    }

    pub(super) fn handle_held(&mut self, from: NodeId, held: Vec<(RequestId, u32)>) {
        if held.len() <= 2 * SEQUENCES_MAX as usize {
            self.ring.handle_held(from, held);
        }
    }

    /// A shadow misses rows: whoever feeds it has them, perhaps.
    fn ask(&mut self, now: Instant, request: RequestId, have: u32, out: &mut Out) {
        if self.asked.get(&request).is_some_and(|&at| now.since(at) < RESUME_QUIET) {
            return;
        }
        if self.asked.len() > 2 * SEQUENCES_MAX as usize {
            self.asked.clear();
        }
        self.asked.insert(request, now);
        let message = Message::Resume { job: self.job, epoch: self.route.epoch, request, have };
        out.push_back(PipelineOutput::Message { to: self.route.previous, message });
    }

    /// Tells those before, and of a shadow the head, what is held, if that is news. A shadow tells the next stage too: so
    /// their connection stands before it is needed.
    pub(super) fn report(&mut self, now: Instant, out: &mut Out) {
        if self.withheld.is_some() || self.report_at().is_none_or(|at| at > now) {
            return;
        }
        self.reported_at = now;
        let held: Vec<(RequestId, u32)> =
            self.requests.iter().map(|(&request, held)| (request, held.computed)).collect();
        if held == self.reported {
            return;
        }
        self.reported.clone_from(&held);
        let (job, epoch) = (self.job, self.route.epoch);
        let shadow = [Some(self.route.head), self.route.next].into_iter().flatten().filter(|_| self.route.shadow);
        let mut to: Vec<NodeId> = self.hearers().chain(shadow).collect();
        to.sort_unstable();
        to.dedup();
        out.extend(to.into_iter().map(|to| {
            let held = held.clone();
            PipelineOutput::Message { to, message: Message::Held { job, epoch, held } }
        }));
    }

    /// Those before this stage who keep rows for it.
    fn hearers(&self) -> impl Iterator<Item = NodeId> {
        let previous = (self.route.stage > 0).then_some(self.route.previous);
        previous.into_iter().chain(self.before)
    }

    /// When to report next, if anybody wants to hear it.
    pub(super) fn report_at(&self) -> Option<Instant> {
        let heard = self.started && self.withheld.is_none() && (self.route.shadow || self.hearers().next().is_some());
        heard.then(|| self.reported_at + HELD_EVERY)
    }

    /// Adds a chosen token to the history that penalties look at.
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
