//! One stage of a model at this node: cached positions, queued frames, the running batch, and the rows that it sends.
//!
//! One rule serves replay, cancellation and resending: a frame names its positions. A stage that has more truncates to
//! them; one that has fewer reports a gap. Positions are counted when work is queued, because the executor runs in
//! order.
mod frames;
mod invariants;

use super::output::{Names, Out, PartOutput, Sharing, Started, discard, discard_payload};
use super::pace::{Pace, UntilSteps};
use super::queue::{BatchLimits, Waiting, choose, is_step};
use super::sent::{Bounds, Keep, LogEntry, OutgoingFrame, Sent};
use crate::id::{Epoch, JobId, NodeId, PartId, RequestId, TensorId, WorkId};
use crate::limits::{
    BUSY_EVERY, CACHES_MAX, CHUNK_POSITIONS_MAX, HELD_EVERY, PREFILL_BESIDE, PREFILL_SHARED, PREFILL_WEIGHT_MAX,
    RESUME_QUIET, RING_BYTES_MAX, RING_FRAMES_MAX, chunk_positions,
};
use crate::message::{Drafts, FrameHeader, FromStage, ToCoordinator, ToParticipant, ToStage};
use crate::output::Output;
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::pages::Pages;
use crate::work::serve::{Item, ItemResult, Position, SampleSpec, Sampling, StageOrder};
use crate::work::{Cursors, Order, Payload, Task};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{format, string::String, vec::Vec};

/// A stage at its owner or at its standby. A standby receives copies of the frames, and sends no rows and no tokens.
#[derive(Debug)]
pub(super) struct StageRun {
    job: JobId,
    route: Route,
    /// Requests that have a cache here, or will have one once queued work has run; at most [`CACHES_MAX`].
    requests: BTreeMap<RequestId, Cache>,
    /// The pages that these caches take, including queued positions.
    pages: Pages,
    /// How to sample at the last stage, from `Open` to `Close`.
    opened: BTreeMap<RequestId, Opened>,
    /// Requests of which frames were discarded for lack of room; at most [`CACHES_MAX`].
    refused: BTreeSet<RequestId>,
    /// Frames, in order, for which no page is free until another request's `Close` arrives.
    outside: VecDeque<Waiting>,
    /// Requests closed under this epoch: their late frames must not open a cache again.
    closed: BTreeSet<RequestId>,
    /// Accepted frames, in the order in which the executor will run them.
    waiting: VecDeque<Waiting>,
    /// The batch at the executor.
    running: Option<Batch>,
    pace: Pace,
    /// When the last decode steps left, if none has waited or run here since.
    steps_left: Option<Instant>,
    /// No rows of prompts went with these steps, so they return earlier than others.
    steps_alone: bool,
    /// Until when rows of prompts wait for the next decode steps, to go with them.
    waits_until: Option<Instant>,
    touched: u64,
    /// Send log of the rows for the next stage.
    sent: Sent,
    /// The standby of the previous stage. Like that stage, it receives reports of what is held here.
    before: Option<NodeId>,
    /// Work may run: all parts are ready, or this is a standby.
    started: bool,
    /// This node was paused and may be out of date. Its output waits here until the coordinator is heard.
    withheld: Option<Out>,
    /// When a standby last asked for rows of a request, so that it does not ask again immediately.
    asked: BTreeMap<RequestId, Instant>,
    /// What was last reported, and when.
    reported: Vec<(u64, u32)>,
    reported_at: Instant,
    /// Total time that batches have run.
    busy: Duration,
    busy_reported_at: Instant,
}

/// What a stage needs to know of its route.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Route {
    epoch: Epoch,
    part: PartId,
    /// The node that sends frames to this stage: the owner of the previous stage, or the coordinator.
    previous: NodeId,
    /// The node that receives its rows. `None` at the last stage.
    next: Option<NodeId>,
    context: u32,
    /// Stages of the route. They determine how many positions of a request are computed in one pass.
    stages: u32,
    /// Bytes per row, as encoded.
    row_bytes: u64,
    /// This node is the stage's standby.
    shadow: bool,
}

impl Route {
    fn new(epoch: Epoch, order: &Order, stage: &StageOrder) -> Self {
        let part = order.part;
        Route {
            epoch,
            part,
            previous: part.before().and_then(|before| order.owner(before)).unwrap_or(epoch.issuer),
            next: order.owner(part.after()),
            context: stage.context,
            stages: u32::try_from(stage.layers.len()).unwrap_or(u32::MAX),
            row_bytes: stage.row.bytes.into(),
            shadow: order.standby.is_some(),
        }
    }
}

/// State of one request.
#[derive(Debug, Default)]
struct Cache {
    /// Positions `0..have` are in the cache, or will be once queued work has run.
    have: u32,
    /// The drafts of the last frame, after these positions.
    drafts: Option<Drafts>,
    /// Positions `0..computed` are in the cache.
    computed: u32,
    /// Frames that wait for `Open`, in order.
    parked: VecDeque<Waiting>,
    /// The request whose cache it continues, and from which position on.
    continues: Option<(u64, u32)>,
    /// Its last frame was one position: it decodes.
    decodes: bool,
    /// The request has ended. Its positions are here for other requests that begin with the same tokens.
    rests: bool,
    /// Counter value of its last use. The least recently used cache is evicted first.
    touched: u64,
}

#[derive(Debug)]
struct Opened {
    sampling: Sampling,
    /// Tokens so far. Kept only if the sampling depends on them.
    history: Vec<u32>,
    /// Number of prompt tokens among them.
    prompt: u32,
}

/// A batch at the executor.
#[derive(Debug)]
struct Batch {
    work: WorkId,
    started: Instant,
    items: Vec<(FrameHeader, TensorId)>,
}

/// The position after those of a frame that count as held.
fn counted_end(header: &FrameHeader) -> u32 {
    if planted::has(Planted::DraftsCounted) { header.end() } else { header.sure_end() }
}

impl StageRun {
    /// The stage is loaded, and has this number of pages in RAM.
    pub(super) fn set_ram_pages(&mut self, pages: u32) {
        self.pages.set_ram(pages);
    }

    pub(super) fn new(job: JobId, epoch: Epoch, order: &Order, stage: &StageOrder) -> Self {
        let bounds = Bounds {
            bytes: RING_BYTES_MAX,
            entries: RING_FRAMES_MAX,
            window: RING_BYTES_MAX,
            joined: CHUNK_POSITIONS_MAX,
        };
        StageRun {
            job,
            route: Route::new(epoch, order, stage),
            requests: BTreeMap::new(),
            pages: Pages::of(stage.sequences, stage.context),
            opened: BTreeMap::new(),
            refused: BTreeSet::new(),
            outside: VecDeque::new(),
            closed: BTreeSet::new(),
            waiting: VecDeque::new(),
            running: None,
            pace: Pace::default(),
            steps_left: None,
            steps_alone: false,
            waits_until: None,
            touched: 0,
            sent: Sent::new(Keep::WhileRoom, bounds),
            before: None,
            started: false,
            withheld: None,
            asked: BTreeMap::new(),
            reported: Vec::new(),
            reported_at: Instant::default(),
            busy: Duration::ZERO,
            busy_reported_at: Instant::default(),
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        self.running.is_some()
    }

    fn report(&self, say: ToCoordinator, out: &mut Out) {
        out.push_back(PartOutput::Report { job: self.job, epoch: self.route.epoch, say });
    }

    fn message(&self, to: NodeId, say: ToParticipant, out: &mut Out) {
        out.push_back(PartOutput::Message { to, job: self.job, epoch: self.route.epoch, say });
    }

    // ---- batches

    /// Takes the next batch from the queue, if the executor is free: decode steps, and prefill rows beside them.
    pub(super) fn start(&mut self, now: Instant, sharing: Sharing, names: &mut Names) -> Option<Started> {
        self.waits_until = None;
        if let Some(left) = self.steps_left.filter(|_| self.step_waits()) {
            self.steps_left = None;
            self.pace.learn_away(now.since(left));
        }
        if self.running.is_some() || self.waiting.is_empty() || !self.started || self.withheld.is_some() {
            return None;
        }
        let limits = self.batch_limits(now, sharing)?;
        let mut before = Vec::new();
        let mut split = |tensor, at, of| {
            let into = [names.tensor(), names.tensor()];
            before.push(Output::Split { tensor, at, of, into });
            into
        };
        let chosen = choose(&mut self.waiting, limits, &mut split);
        // What a frame overwrites is computed, since the executor runs in order.
        let headers = chosen.iter().map(|waiting| waiting.header);
        let wrong: Vec<TensorId> = headers.filter_map(|header| self.sent.settle(header, &mut split)).collect();
        before.extend(wrong.into_iter().map(|tensor| Output::Discard { tensor }));
        let rows = chosen.iter().map(|waiting| u64::from(waiting.header.count)).sum();
        let work = names.work();
        let mut batch = Batch { work, started: now, items: Vec::with_capacity(chosen.len()) };
        let mut items = Vec::with_capacity(chosen.len());
        for waiting in chosen {
            let output = names.tensor();
            batch.items.push((waiting.header, output));
            items.push(self.item(waiting, output));
        }
        let makes = batch.items.iter().map(|&(_, tensor)| tensor).collect();
        self.running = Some(batch);
        Some(Started { work, task: Task::Batch(items), budget: self.pace.predict(rows), before, makes })
    }

    /// The requests that decode are divided into as many groups as there are stages, so that each stage has one while the
    /// others compute theirs. Beside them, prefill takes no more rows than they can wait for, in this batch and in one of each
    /// other part on the device: they wait longer where more requests wait for their first token, because all of these then
    /// decode in the same batches. While all decode steps are away, the only prompt takes no more rows than are computed before
    /// the next step arrives. `None`: it waits for that one.
    fn batch_limits(&mut self, now: Instant, sharing: Sharing) -> Option<BatchLimits> {
        let stages = self.route.stages.max(1);
        let running = self.requests.values().filter(|held| !held.rests).count();
        let decoding = self.requests.values().filter(|held| held.decodes && !held.rests).count();
        let prompts = u32::try_from(running - decoding).unwrap_or(u32::MAX);
        let prefill = if decoding > 0 {
            let beside = PREFILL_BESIDE * prompts.clamp(1, PREFILL_WEIGHT_MAX);
            let most = self.pace.rows_within(beside / stages / sharing.parts.max(1));
            let left = self.steps_left.filter(|_| prompts <= 1);
            match left.map(|left| self.pace.until_steps(now.since(left), self.steps_alone)) {
                Some(UntilSteps::Wait(time)) => {
                    self.waits_until = Some(now + time);
                    return None;
                }
                Some(UntilSteps::Rows(rows)) => most.min(rows),
                Some(UntilSteps::Overdue) | None => most,
            }
        } else if sharing.alone {
            CHUNK_POSITIONS_MAX
        } else {
            self.pace.rows_within(PREFILL_SHARED)
        };
        let decodes = decoding.div_ceil(stages as usize).max(1);
        Some(BatchLimits {
            joined: chunk_positions(stages),
            decodes,
            alone: self.pace.unmeasured_steps(),
            prefill,
            rows: CHUNK_POSITIONS_MAX,
        })
    }

    /// Whether a decode step waits to be computed.
    fn step_waits(&self) -> bool {
        self.waiting.iter().any(|waiting| is_step(&waiting.header))
    }

    /// When prompts go without the decode steps that they wait for.
    pub(super) fn start_at(&self) -> Option<Instant> {
        self.waits_until
    }

    fn item(&self, waiting: Waiting, output: TensorId) -> Item {
        let Waiting { header, payload } = waiting;
        let position = header.sure_end();
        let opened = self.opened.get(&header.request()).filter(|_| header.last);
        // What a draft changes in the history is not known here.
        let opened = opened.filter(|opened| header.drafts.rows == 0 || opened.sampling.allows_drafts());
        let sample = opened.map(|opened| SampleSpec {
            sampling: opened.sampling.clone(),
            prompt: opened.prompt,
            position: if planted::has(Planted::SeedByFirstPosition) { header.cursor + 1 } else { position },
            history: opened.history.get(..position as usize).unwrap_or(&opened.history).to_vec(),
        });
        let (request, drafts) = (header.request(), header.drafts.rows.into());
        Item { request, position: header.cursor, count: header.count, drafts, input: payload, output, sample }
    }

    /// Whether this is the running batch.
    pub(super) fn runs(&self, work: WorkId) -> bool {
        self.running.as_ref().is_some_and(|batch| batch.work == work)
    }

    /// The running batch came back, with the time that the device computed it.
    ///
    /// # Errors
    /// The executor failed. No cache can be trusted, so all state is dropped.
    pub(super) fn ran(
        &mut self,
        now: Instant,
        results: Result<(Vec<ItemResult>, Duration), String>,
        out: &mut Out,
    ) -> Result<(), String> {
        let Some(batch) = self.running.take() else { return Ok(()) };
        let results = results.and_then(|(results, computed)| match results.len() == batch.items.len() {
            true => Ok((results, computed)),
            false => Err(format!("the executor answered {} items, expected {}", results.len(), batch.items.len())),
        });
        let (results, computed) = match results {
            Ok(results) => results,
            Err(reason) => {
                out.extend(batch.items.iter().map(|&(_, tensor)| discard(tensor)));
                self.drop_everything(out);
                return Err(reason);
            }
        };
        for (header, _) in &batch.items {
            if let Some(held) = self.requests.get_mut(&header.request()) {
                held.computed = counted_end(header);
            }
        }
        let took = now.since(batch.started);
        let rows = |steps: bool| {
            let frames = batch.items.iter().map(|(header, _)| header).filter(|header| is_step(header) == steps);
            frames.map(|header| u64::from(header.count)).sum()
        };
        let (steps, prefill) = (rows(true), rows(false));
        self.pace.learn(steps, prefill, (took, computed));
        if steps > 0 && !self.step_waits() {
            (self.steps_left, self.steps_alone) = (Some(now), prefill == 0);
        }
        self.report_busy(now, took, out);
        let mut withheld = self.withheld.take();
        let to = withheld.as_mut().unwrap_or(out);
        for (&(header, output), result) in batch.items.iter().zip(results) {
            self.deliver(header, output, result, to);
        }
        self.request_refused(now, to);
        self.withheld = withheld;
        Ok(())
    }

    /// Reports how long this stage has computed.
    fn report_busy(&mut self, now: Instant, took: Duration, out: &mut Out) {
        self.busy += took;
        let speaks = self.started && !self.route.shadow && self.withheld.is_none();
        if speaks && now.since(self.busy_reported_at) >= BUSY_EVERY {
            self.busy_reported_at = now;
            let (part, busy_us) = (self.route.part, u64::try_from(self.busy.as_micros()).unwrap_or(u64::MAX));
            self.report(ToCoordinator::Stage(FromStage::Busy { part, busy_us }), out);
        }
    }

    /// Forwards the result of one item. Only here do rows leave a stage, and does the standby's copy branch off. The
    /// next stage is served first; nothing waits for either.
    fn deliver(&mut self, header: FrameHeader, output: TensorId, result: ItemResult, out: &mut Out) {
        let request = header.request();
        let position = header.sure_end();
        let open = self.requests.get(&request).is_some_and(|held| !held.rests);
        let speaks = open && self.started && !self.route.shadow;
        match (result, self.route.next) {
            (ItemResult::Hidden, Some(_)) if open => {
                let bytes = self.route.row_bytes.saturating_mul(header.count.into());
                let FrameHeader { cursor, count, last, drafts, .. } = header;
                let entry = LogEntry { cursor, end: position, count, last, drafts, tensor: output, bytes };
                let mut gone = self.sent.push(header.channel, entry);
                self.pump(out);
                let next = self.route.part.after();
                gone.extend(self.sent.trim(u32::MAX, |_| next));
                out.extend(gone.into_iter().map(discard));
            }
            (ItemResult::Hidden, _) => out.push_back(discard(output)),
            (ItemResult::Token(sampled), _) if speaks => {
                self.remember(request, position, sampled.token);
                self.report(ToCoordinator::Stage(FromStage::Token { request, position, sampled }), out);
            }
            (ItemResult::Tokens(tokens), _) if speaks => {
                let round = header.drafts.round;
                self.report(ToCoordinator::Stage(FromStage::Tokens { request, position, round, tokens }), out);
            }
            (ItemResult::Nothing, None) if speaks => {
                self.report(ToCoordinator::Stage(FromStage::Progress { request, position }), out);
            }
            (ItemResult::Token(_) | ItemResult::Tokens(_) | ItemResult::Nothing, _) => {}
        }
    }

    /// Sends what is due to the next stage and its standby.
    fn pump(&mut self, out: &mut Out) {
        if !self.started || self.route.shadow {
            return;
        }
        let (job, epoch, part) = (self.job, self.route.epoch, self.route.part.after());
        for sending in self.sent.due(|_| part) {
            let OutgoingFrame { to, channel, cursor, count, last, drafts, mut tensors, copy, bytes: _ } = sending;
            let held = self.requests.get(&RequestId(channel)).and_then(|held| held.continues);
            let continues = held.filter(|(_, from)| *from == cursor).map(|(from, _)| from);
            let header = FrameHeader { job, epoch, part, channel, cursor, count, last, continues, drafts };
            let payload = match (tensors.pop(), tensors.is_empty()) {
                (Some(tensor), true) => Payload::Tensor(tensor),
                (last, _) => Payload::Tensors(tensors.into_iter().chain(last).collect()),
            };
            out.push_back(PartOutput::Frame { to, header, payload, copy });
        }
    }

    /// Adds a sampled token to the history that penalties depend on.
    fn remember(&mut self, request: RequestId, position: u32, token: u32) {
        let opened = self.opened.get_mut(&request).filter(|opened| opened.sampling.uses_history());
        if let Some(opened) = opened.filter(|opened| opened.history.len() == position as usize) {
            opened.history.push(token);
        }
    }

    // ---- another epoch

    /// This node was paused: nothing leaves until `release`.
    pub(super) fn withhold(&mut self) {
        self.withheld.get_or_insert_with(Out::new);
    }

    /// The coordinator was heard under the same epoch, so withheld output may leave. If the epoch is out of date (not
    /// `valid`), only clean-up is done.
    pub(super) fn release(&mut self, valid: bool, out: &mut Out) {
        let outward = |output: &PartOutput| {
            matches!(output, PartOutput::Frame { .. } | PartOutput::Message { .. } | PartOutput::Report { .. })
        };
        let withheld = self.withheld.take().unwrap_or_default();
        out.extend(withheld.into_iter().filter(|output| valid || !outward(output)));
    }

    /// Nothing more is started or sent. Computed positions stay.
    pub(super) fn pause(&mut self, out: &mut Out) {
        self.started = false;
        (self.steps_left, self.waits_until) = (None, None);
        self.release(false, out);
        self.opened.clear();
        self.refused.clear();
        let waiting = self.waiting.drain(..).chain(self.outside.drain(..));
        waiting.for_each(|waiting| discard_payload(waiting.payload, out));
        for held in self.requests.values_mut() {
            held.parked.drain(..).for_each(|waiting| discard_payload(waiting.payload, out));
            (held.have, held.drafts) = (held.computed, None);
        }
    }

    /// The same stage under another epoch, perhaps with other neighbours, perhaps as owner instead of standby. No batch
    /// runs.
    pub(super) fn keep(&mut self, epoch: Epoch, order: &Order, stage: &StageOrder, out: &mut Out) {
        self.pause(out);
        self.route = Route::new(epoch, order, stage);
        self.before = None;
        self.closed.clear();
        self.asked.clear();
        self.reported.clear();
        self.sent.clear_followers();
        self.sent.forget_rounds();
        let empty: Vec<RequestId> =
            self.requests.iter().filter(|(_, held)| held.computed == 0).map(|(&request, _)| request).collect();
        empty.into_iter().for_each(|request| self.drop_request(request, out));
        for held in self.requests.values_mut() {
            // A successor may not know that a request has ended, and continues it. Otherwise it says so again.
            (held.have, held.rests) = (held.computed, false);
        }
    }

    /// A standby computes from now on, and keeps its rows for the next stage in the send log.
    pub(super) fn start_following(&mut self, now: Instant) {
        (self.started, self.reported_at) = (true, now);
        if let Some(next) = self.route.next {
            self.sent.follow(self.route.part.after(), next, true, false);
        }
    }

    /// All parts are ready. For these requests, the next stage is sent what follows the positions that it holds.
    pub(super) fn go(&mut self, now: Instant, resume: &[(RequestId, u32)], out: &mut Out) {
        if self.route.shadow {
            return;
        }
        let again = core::mem::replace(&mut self.started, true);
        self.reported_at = now;
        let part = self.route.part.after();
        let Some(next) = self.route.next else { return };
        if !again {
            self.sent.follow(part, next, true, true);
        }
        let each = resume.iter().take(CACHES_MAX).map(|&(request, have)| (request.0, have)).collect();
        self.sent.held(part, next, &Cursors::Each(each), true, true);
        self.pump(out);
        // Frames may overtake this message. What they compute again is sent again.
        for header in self.waiting.iter().map(|waiting| &waiting.header) {
            if self.requests.get(&header.request()).is_some_and(|held| header.cursor < held.computed) {
                self.sent.rewind(header.channel, header.cursor);
            }
        }
    }

    pub(super) fn positions(&self) -> Vec<Position> {
        let kept_from = |request: RequestId, have| self.sent.kept_from(request.0).map_or(have, |from| from.min(have));
        let held = self.requests.iter();
        held.map(|(&request, held)| Position {
            request,
            have: held.computed,
            kept_from: kept_from(request, held.computed),
        })
        .collect()
    }

    // ---- neighbours and standbys

    /// The coordinator named the standby of a neighbouring stage, or removed it.
    pub(super) fn handle_standby(&mut self, part: PartId, node: Option<NodeId>) {
        if part == self.route.part.after() {
            match node {
                Some(node) => self.sent.follow(part, node, false, !self.route.shadow),
                None => self.sent.unfollow(part),
            }
        } else if Some(part) == self.route.part.before() {
            self.before = node;
        }
    }

    /// A holder of the next stage reports its progress, and with `again` asks for what follows.
    pub(super) fn handle_held(&mut self, from: NodeId, part: PartId, cursors: &Cursors, again: bool, out: &mut Out) {
        let few = match cursors {
            Cursors::All(_) => false,
            Cursors::Each(each) => each.len() <= CACHES_MAX,
        };
        if few && part == self.route.part.after() {
            self.sent.held(part, from, cursors, !self.route.shadow, again);
            if again {
                self.pump(out);
            }
        }
    }

    /// A broken connection to a peer is up again: messages may be lost in both directions.
    pub(super) fn handle_reconnected(&mut self, node: NodeId, out: &mut Out) {
        if self.route.shadow {
            return; // a standby detects gaps at the next frame
        }
        let part = self.route.part.after();
        if self.route.next == Some(node) && self.started {
            // The next stage says what it has, but cannot ask for a request of which it never received a row.
            let mut unknown = self.sent.reported(part, node);
            unknown.retain(|(_, held)| *held == 0);
            self.sent.held(part, node, &Cursors::Each(unknown), true, true);
            self.pump(out);
        }
        let running = self.requests.iter().filter(|(_, held)| !held.rests);
        let have: Vec<(RequestId, u32)> = running.map(|(&request, held)| (request, held.have)).collect();
        if let (true, Some(to)) = (self.route.previous == node, self.route.part.before()) {
            let each = have.iter().map(|(request, have)| (request.0, *have)).collect();
            let say = ToParticipant::Held {
                part: self.route.part,
                to,
                cursors: Cursors::Each(each),
                live: true,
                again: true,
            };
            self.message(node, say, out);
        }
        if self.route.epoch.issuer == node {
            have.into_iter().for_each(|(request, have)| self.report_gap(request, have, out));
        }
    }

    /// A standby lacks rows, which the previous stage may have.
    fn ask(&mut self, now: Instant, request: RequestId, have: u32, out: &mut Out) {
        if self.asked.get(&request).is_some_and(|&at| now.since(at) < RESUME_QUIET) {
            return;
        }
        if self.asked.len() > CACHES_MAX {
            self.asked.clear();
        }
        self.asked.insert(request, now);
        match self.route.part.before() {
            None => self.report(ToCoordinator::Stage(FromStage::Resume { request, have }), out),
            Some(to) => {
                let (part, cursors) = (self.route.part, Cursors::Each(Vec::from([(request.0, have)])));
                let say = ToParticipant::Held { part, to, cursors, live: true, again: true };
                self.message(self.route.previous, say, out);
            }
        }
    }

    /// Reports progress if it changed: to the holders of the previous stage, which keep rows for this stage, and from a
    /// standby also to the coordinator.
    pub(super) fn report_held(&mut self, now: Instant, out: &mut Out) {
        if self.report_at().is_none_or(|at| at > now) {
            return;
        }
        self.reported_at = now;
        let held: Vec<(u64, u32)> = self.requests.iter().map(|(request, held)| (request.0, held.computed)).collect();
        if held == self.reported {
            return;
        }
        self.reported.clone_from(&held);
        let (part, cursors) = (self.route.part, Cursors::Each(held));
        if self.route.shadow {
            self.report(ToCoordinator::Held { part, cursors: cursors.clone() }, out);
        }
        let Some(to) = part.before() else { return };
        let hearers: BTreeSet<NodeId> = self.hearers().collect();
        for node in hearers {
            let say = ToParticipant::Held { part, to, cursors: cursors.clone(), live: true, again: false };
            self.message(node, say, out);
        }
    }

    /// The owner and the standby of the previous stage.
    fn hearers(&self) -> impl Iterator<Item = NodeId> {
        let previous = self.route.part.before().map(|_| self.route.previous);
        previous.into_iter().chain(self.before)
    }

    /// When the next report is due, if there is a node to report to.
    pub(super) fn report_at(&self) -> Option<Instant> {
        let heard = self.started && self.withheld.is_none() && (self.route.shadow || self.hearers().next().is_some());
        heard.then(|| self.reported_at + HELD_EVERY)
    }

    // ---- messages

    pub(super) fn handle_message(&mut self, say: ToStage, out: &mut Out) {
        match say {
            ToStage::Open { request, sampling, tokens, prompt } => self.handle_open(request, sampling, tokens, prompt),
            ToStage::Rest { request, drafts } => self.handle_rest(request, drafts, out),
            ToStage::Close { request } => self.handle_close(request, out),
        }
    }
}
