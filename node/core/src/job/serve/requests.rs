//! Requests of one served model at its coordinator: a bounded queue, those that run, and the traffic to the first and the
//! last stage. Next: `prefixes.rs` (the cache that they share).
mod cache;
mod drafting;
mod resends;
mod routing;
mod tokens;

use super::drafter::Drafter;
use super::drafts::StepTimes;
use super::occupancy::Occupancy;
use super::prefixes::Prefixes;
use super::stream::{Caller, DraftLimits, Stream};
use crate::id::{CallId, ContentId, Epoch, JobId, NodeId, PartId, RequestId};
use crate::job::output::{Drafting, JobOutput, Out};
use crate::limits::{DETACHED_MAX, LOG_EVERY, LOG_TOKENS_MAX, QUEUE_MAX, REQUEST_STRIKES_MAX, SEQUENCES_MAX};
use crate::message::{Drafts, ToParticipant, ToStage};
use crate::output::Event;
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::log::TokenLog;
use crate::work::serve::{DoneReason, GRAMMAR_BYTES_MAX, Logged, Position, Request, Sampled, ToCaller};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::{format, string::String, vec::Vec};

/// Route of the frames while the job runs.
#[derive(Clone, Debug)]
pub(in crate::job) struct Route {
    pub(in crate::job) epoch: Epoch,
    /// Nodes of the stages, first to last; never empty.
    pub(in crate::job) stages: Vec<NodeId>,
    /// Predicted nanoseconds per token, for the watchdog.
    pub(in crate::job) token_ns: u64,
    /// Standbys that receive copies, with their stages.
    pub(in crate::job) standbys: Vec<(PartId, NodeId)>,
}

impl Route {
    fn first(&self) -> NodeId {
        self.stages[0]
    }
    /// The first stage's standby, which the coordinator feeds.
    fn first_standby(&self) -> Option<NodeId> {
        self.standbys.iter().find(|(stage, _)| *stage == PartId(0)).map(|&(_, node)| node)
    }
    fn depth(&self) -> u32 {
        u32::try_from(self.stages.len()).unwrap_or(u32::MAX)
    }
    fn last(&self) -> NodeId {
        self.stages[self.stages.len() - 1]
    }
}

/// Queued and running requests.
///
/// Invariants: at most `SEQUENCES_MAX` streams run and `QUEUE_MAX` wait; each running stream has pages for its positions;
/// every submitted call gets exactly one `Done`, as its last event; request ids grow.
#[derive(Debug)]
pub(in crate::job) struct Requests {
    job: JobId,
    context: u32,
    cache: Prefixes,
    eos: Vec<u32>,
    times: StepTimes,
    /// The draft model, if this one has one.
    drafter: Option<Drafter>,
    occupancy: Occupancy,
    next: u64,
    waiting: VecDeque<Stream>,
    running: BTreeMap<RequestId, Stream>,
    /// Ended requests whose caller is at another node or gone, and may ask for them; at most [`SEQUENCES_MAX`].
    ended: VecDeque<(Instant, Stream, DoneReason)>,
    /// Ended requests that successors do not know of yet.
    over: Vec<RequestId>,
    /// When successors are sent the log entries that they lack.
    log_at: Option<Instant>,
    /// When resting requests that standbys lack are computed again, if nothing runs then.
    refresh_at: Option<Instant>,
    /// A connection was broken.
    reconnected: Option<resends::Reconnected>,
    /// The requests closed last: a `Close` that was lost with a connection is repeated when the connection is up again.
    closed: VecDeque<RequestId>,
    /// `None` while the job is being placed.
    track: Option<Route>,
}

impl Requests {
    /// No requests. `draft`: the draft model.
    pub(in crate::job) fn new(
        job: JobId,
        sequences: u32,
        context: u32,
        eos: Vec<u32>,
        draft: Option<ContentId>,
    ) -> Self {
        Requests {
            job,
            context,
            cache: Prefixes::new(sequences, context),
            eos,
            times: StepTimes::default(),
            drafter: draft.map(Drafter::new),
            occupancy: Occupancy::default(),
            next: 0,
            waiting: VecDeque::new(),
            running: BTreeMap::new(),
            ended: VecDeque::new(),
            over: Vec::new(),
            log_at: None,
            refresh_at: None,
            reconnected: None,
            closed: VecDeque::new(),
            track: None,
        }
    }

    pub(in crate::job) fn counts(&self) -> (usize, usize) {
        let running = self.running.values().filter(|stream| stream.is_logged());
        (running.count(), self.waiting.len())
    }

    /// Draft tokens so far, and those of them that were right.
    pub(in crate::job) fn drafts(&self) -> (u64, u64) {
        self.times.counts()
    }

    /// Those of a draft model among them.
    pub(in crate::job) fn model_drafts(&self) -> (u64, u64) {
        self.drafter.as_ref().map_or((0, 0), |drafter| drafter.counts)
    }

    /// Share of the time that a stage computed of late while requests ran, of 1000.
    pub(in crate::job) fn occupancy(&self, part: PartId) -> Option<u32> {
        self.occupancy.share(part)
    }

    pub(in crate::job) fn handle_busy(&mut self, now: Instant, part: PartId, busy_us: u64) {
        self.occupancy.take(now, part, Duration::from_micros(busy_us));
    }

    fn run(&mut self, now: Instant, stream: Stream) {
        if self.running.is_empty() {
            self.occupancy.begin(now);
        }
        self.running.insert(stream.id, stream);
    }

    /// While no request runs: a number that changes with each new request. `None` otherwise.
    pub(in crate::job) fn quiet(&self) -> Option<u64> {
        self.running.is_empty().then_some(self.next)
    }

    pub(in crate::job) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Takes over the requests of a silent coordinator. Those that run keep their ids, because the stages' caches are named
    /// by them. Those that wait get new ones: their caches are closed. `first` is above all ids that the old coordinator can
    /// have issued.
    pub(in crate::job) fn inherit(&mut self, now: Instant, first: u64, log: TokenLog) {
        let mut waiting = Vec::new();
        for (id, request, answer) in log.into_requests() {
            self.next = id.0.saturating_add(1);
            let stream = Stream::inherited(now, id, request, &answer, &self.eos);
            let positions = stream.len().saturating_add(1);
            let room = self.running.len() < SEQUENCES_MAX as usize && waiting.is_empty();
            if room && self.cache.admit(stream.id, positions, 0, None, &mut Vec::new()) {
                self.run(now, stream);
            } else {
                waiting.push(stream);
            }
        }
        self.next = self.next.max(first);
        for mut stream in waiting {
            stream.preempt(self.next_id());
            self.enqueue(stream);
        }
    }

    fn next_id(&mut self) -> RequestId {
        let id = RequestId(self.next);
        self.next += 1;
        id
    }

    /// Accepts a request, attaches its caller if the same request is known, or rejects it with a reason. The caller
    /// gets the tokens from position `from` on.
    pub(in crate::job) fn submit(
        &mut self,
        now: Instant,
        caller: Caller,
        request: Request,
        from: u32,
        out: &mut Out,
    ) -> Submitted {
        let Some(request) = self.attach(caller, request, from, out) else { return Submitted::Taken };
        let prompt_max = self.context.saturating_sub(1);
        let refusal = if request.prompt.is_empty() {
            DoneReason::Invalid("the prompt is empty: send at least one token".into())
        } else if request.prompt.len() > prompt_max as usize {
            DoneReason::Invalid(format!(
                "the prompt has {} tokens, the context of this model is {}: at most {prompt_max} tokens leave room for \
                 an answer; shorten the prompt or serve the model with a larger context",
                request.prompt.len(),
                self.context
            ))
        } else if let Some(grammar) = request.sampling.grammar.as_ref().filter(|text| text.len() > GRAMMAR_BYTES_MAX) {
            DoneReason::Invalid(format!(
                "the grammar has {} bytes, at most {GRAMMAR_BYTES_MAX} are allowed: shorten the schema",
                grammar.len()
            ))
        } else if request.max_tokens == 0 {
            DoneReason::Length
        } else if self.waiting.len() >= QUEUE_MAX && !self.reject_lower(request.priority, out) {
            DoneReason::Busy
        } else {
            self.stop_refresh(out);
            let id = self.next_id();
            self.enqueue(Stream::new(now, id, caller, request));
            self.log_soon(now);
            self.fill_slots(now, out);
            return Submitted::Taken;
        };
        done(caller, refusal, 0, out);
        Submitted::Refused
    }

    /// Attaches a caller to the same request (key included) that runs, waits or has just ended: it gets the tokens that
    /// it lacks. Returns a request that is not known.
    pub(in crate::job) fn attach(
        &mut self,
        caller: Caller,
        request: Request,
        from: u32,
        out: &mut Out,
    ) -> Option<Request> {
        let known = |stream: &Stream| stream.request == request && stream.is_logged();
        if let Some(stream) = self.running.values_mut().chain(&mut self.waiting).find(|stream| known(stream)) {
            let before = core::mem::replace(&mut stream.caller, caller);
            if before != caller {
                let reason = "the same request was sent again, and is answered there";
                done(before, DoneReason::Failed(reason.into()), 0, out);
            }
            stream.tokens_from(from).for_each(|(position, token)| tell(caller, position, token.into(), out));
            return None;
        }
        let Some(at) = self.ended.iter().position(|(_, stream, _)| known(stream)) else { return Some(request) };
        if let Some((_, stream, reason)) = self.ended.remove(at) {
            stream.tokens_from(from).for_each(|(position, token)| tell(caller, position, token.into(), out));
            done(caller, reason, stream.next_position(), out);
        }
        None
    }

    /// A caller cancelled its request.
    pub(in crate::job) fn cancel(&mut self, now: Instant, caller: Caller, out: &mut Out) {
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.caller == caller) {
            if let Some(stream) = self.waiting.remove(at) {
                self.log_over(&stream);
            }
            done(caller, DoneReason::Cancelled, 0, out);
        } else if let Some(id) = self.running.values().find(|stream| stream.caller == caller).map(|stream| stream.id)
            && !planted::has(Planted::CancelDropped)
        {
            self.finish(now, id, DoneReason::Cancelled, out);
        }
    }

    /// A node that has callers is down. Their requests continue, because the callers may ask again at another node.
    pub(in crate::job) fn handle_gone(&mut self, now: Instant, node: NodeId) {
        for stream in self.running.values_mut().chain(&mut self.waiting) {
            if matches!(stream.caller, Caller::Away(at, _) if at == node) {
                stream.caller = Caller::Gone(now);
            }
        }
    }

    /// Whether any running or waiting request has a caller, or makes drafts for one that has.
    pub(in crate::job) fn has_callers(&self) -> bool {
        let mut all = self.running.values().chain(&self.waiting);
        all.any(|stream| matches!(stream.caller, Caller::Here(_) | Caller::Away(..) | Caller::Draft(..)))
    }

    /// Calls of other nodes' callers.
    pub(in crate::job) fn calls_of_others(&self) -> impl Iterator<Item = (NodeId, CallId)> + '_ {
        self.running.values().chain(&self.waiting).filter_map(|stream| match stream.caller {
            Caller::Away(node, call) => Some((node, call)),
            Caller::Here(_) | Caller::Gone(_) | Caller::Refresh | Caller::Draft(..) => None,
        })
    }

    /// Another node coordinates the job. Returns the calls of this node's callers, each with its request and the
    /// position of its next token.
    pub(in crate::job) fn hand_over(&mut self, out: &mut Out) -> Vec<(CallId, Request, u32)> {
        self.end_drafting(out);
        let all = core::mem::take(&mut self.running).into_values().chain(core::mem::take(&mut self.waiting));
        let here = |stream: Stream| match stream.caller {
            Caller::Here(call) => Some((call, stream.next_position(), stream.request)),
            Caller::Away(..) | Caller::Gone(_) | Caller::Refresh | Caller::Draft(..) => None,
        };
        all.filter_map(here).map(|(call, next, request)| (call, request, next)).collect()
    }

    /// Ends a running request. Its caches rest or are freed, and the next requests in the queue begin.
    fn finish(&mut self, now: Instant, id: RequestId, reason: DoneReason, out: &mut Out) {
        let Some(mut stream) = self.running.remove(&id) else { return };
        self.leave_drafts(&mut stream, out);
        self.rest_or_close(&stream, &reason, out);
        self.log_over(&stream);
        self.log_soon(now);
        done(stream.caller, reason.clone(), stream.next_position(), out);
        // Messages to another node may be lost, and its caller may ask again.
        if matches!(stream.caller, Caller::Away(..) | Caller::Gone(_)) {
            self.ended.push_back((now, stream, reason));
            if self.ended.len() > SEQUENCES_MAX as usize {
                self.ended.pop_front();
            }
        }
        self.fill_slots(now, out);
        self.refresh_soon(now);
    }

    // ---- the token log

    /// Successors lack the whole log: they are new, or messages to them may be lost.
    pub(in crate::job) fn log_again(&mut self, now: Instant) {
        self.running.values_mut().chain(&mut self.waiting).for_each(Stream::forget_logged);
        self.log_at = Some(now);
    }

    fn log_soon(&mut self, now: Instant) {
        self.log_at = self.log_at.or(Some(now + LOG_EVERY));
    }

    /// A request ended. While the job is being placed this is not logged: successors begin a new log with each epoch.
    fn log_over(&mut self, stream: &Stream) {
        if self.track.is_some() && stream.is_logged() {
            self.over.push(stream.id);
        }
    }

    /// The log entries that successors are sent now, if they are due.
    pub(in crate::job) fn take_log(&mut self, now: Instant) -> Vec<(RequestId, Logged)> {
        if self.log_at.is_none_or(|at| at > now) {
            return Vec::new();
        }
        let mut news: Vec<_> = self.over.drain(..).map(|id| (id, Logged::Over)).collect();
        let mut tokens = 0;
        for stream in self.running.values_mut().chain(&mut self.waiting).filter(|stream| stream.is_logged()) {
            while tokens < LOG_TOKENS_MAX
                && let Some(what) = stream.news()
            {
                tokens += match &what {
                    Logged::Tokens { tokens: new, .. } => new.len(),
                    // A message counts four bytes a token.
                    Logged::Opened { sampling, .. } => sampling.grammar.as_ref().map_or(0, String::len).div_ceil(4),
                    Logged::Over => 0,
                };
                news.push((stream.id, what));
            }
        }
        let left = self.running.values().chain(&self.waiting).any(|stream| stream.is_logged() && stream.has_news());
        self.log_at = left.then_some(now);
        news
    }

    /// There are no successors.
    pub(in crate::job) fn drop_log(&mut self) {
        self.over.clear();
        self.log_at = None;
    }

    /// The job is ready under a new epoch. `held` is what the stages' caches still hold. Returns, for each stage and
    /// each request of which the stage or the next one holds something, the number of positions that the next stage
    /// holds.
    pub(in crate::job) fn resume(
        &mut self,
        now: Instant,
        track: Route,
        held: &[&[Position]],
    ) -> Vec<Vec<(RequestId, u32)>> {
        self.occupancy.clear();
        let mut resume = Vec::from_iter(track.stages.iter().map(|_| Vec::new()));
        for (&id, stream) in &mut self.running {
            let position = |stage: &&[Position]| {
                stage.iter().find(|position| position.request == id).map_or((0, 0), |p| (p.have, p.kept_from))
            };
            let stages: Vec<(u32, u32)> = held.iter().map(position).collect();
            for (stage, next_holds) in stream.resume(now, &stages).into_iter().enumerate() {
                if next_holds > 0 || stages[stage].0 > 0 {
                    resume[stage].push((id, next_holds));
                }
            }
        }
        self.resume_resting(held, &mut resume);
        self.track = Some(track);
        self.times.placed_again();
        self.closed.clear();
        resume
    }

    /// Every running request continues from its token log. Frees what stages hold of ended requests.
    pub(in crate::job) fn start(&mut self, now: Instant, held: &[(NodeId, &[Position])], out: &mut Out) {
        held.iter().for_each(|&(node, positions)| self.close_ended(node, positions, out));
        let ids: Vec<RequestId> = self.running.keys().copied().collect();
        for id in ids {
            let broken = |stream: &Stream| stream.broken_base(stream.acked()).is_some();
            if self.running.get(&id).is_some_and(broken) {
                self.preempt(now, id, out);
            }
            self.open(id, out);
            self.pump(now, id, out);
        }
        self.fill_slots(now, out);
        self.refresh_soon(now);
    }

    /// Frees what a node holds of ended requests, or says that they rest. The first message about that went to the
    /// participants of that time.
    pub(in crate::job) fn close_ended(&self, to: NodeId, positions: &[Position], out: &mut Out) {
        let Some(track) = &self.track else { return };
        let (job, epoch) = (self.job, track.epoch);
        let kept = |request: &RequestId| self.running.contains_key(request) || self.cache.rests(*request);
        let over = positions.iter().map(|p| p.request).filter(|request| !kept(request));
        let close = |request| message(to, job, epoch, ToStage::Close { request });
        out.extend(over.map(close));
        let resting = positions.iter().map(|p| p.request).filter(|request| self.cache.rests(*request));
        out.extend(resting.map(|request| rest(to, job, epoch, request)));
    }

    /// Sets the standbys that receive copies.
    pub(in crate::job) fn set_standbys(&mut self, standbys: Vec<(PartId, NodeId)>) {
        if let Some(track) = &mut self.track {
            track.standbys = standbys;
        }
    }

    /// Whether a node is the first stage's standby, which the coordinator feeds.
    pub(in crate::job) fn feeds(&self, from: NodeId, epoch: Epoch) -> bool {
        self.track.as_ref().is_some_and(|track| track.epoch == epoch && track.first_standby() == Some(from))
    }

    /// The first stage's standby holds `have` positions. It is sent what follows, up to what the first stage was sent.
    pub(in crate::job) fn handle_resume(&mut self, to: NodeId, id: RequestId, have: u32, out: &mut Out) {
        let (Some(track), Some(stream)) = (&self.track, self.running.get(&id)) else { return };
        let frames = stream.sent_since(have, self.job, track.epoch);
        out.extend(frames.into_iter().map(|(header, tokens)| JobOutput::Frame { to, header, tokens, copy: true }));
    }

    /// For each running request, the position up to which every stage is known to be.
    pub(in crate::job) fn acked(&self) -> BTreeMap<RequestId, u32> {
        self.running.iter().map(|(&id, stream)| (id, stream.acked())).collect()
    }

    /// The job is placed again. Nothing is sent until `start`.
    pub(in crate::job) fn stop(&mut self, out: &mut Out) {
        self.drop_steered(out);
        self.over.clear();
        self.reconnected = None;
        self.track = None;
    }

    /// The executor failed under the running requests. A request that was there too often is given up, because it may
    /// be the cause.
    pub(in crate::job) fn strike(&mut self, now: Instant, reason: &str, out: &mut Out) {
        let mut out_of_patience = Vec::new();
        for stream in self.running.values_mut() {
            stream.strikes += 1;
            if stream.strikes >= REQUEST_STRIKES_MAX {
                out_of_patience.push(stream.id);
            }
        }
        for id in out_of_patience {
            let reason = format!("placed {REQUEST_STRIKES_MAX} times, failed each time: {reason}");
            self.finish(now, id, DoneReason::Failed(reason), out);
        }
    }

    /// Ends all requests with this reason.
    pub(in crate::job) fn fail_all(&mut self, reason: &DoneReason, out: &mut Out) {
        self.end_drafting(out);
        for id in self.cache.clear() {
            self.close(id, out);
        }
        for (id, stream) in core::mem::take(&mut self.running) {
            self.close(id, out);
            self.log_over(&stream);
            done(stream.caller, reason.clone(), 0, out);
        }
        for stream in core::mem::take(&mut self.waiting) {
            self.log_over(&stream);
            done(stream.caller, reason.clone(), 0, out);
        }
        self.ended.clear();
    }

    fn open(&self, id: RequestId, out: &mut Out) {
        let (Some(track), Some(stream)) = (&self.track, self.running.get(&id)) else { return };
        let sampling = stream.request.sampling.clone();
        let open = ToStage::Open {
            request: id,
            tokens: if sampling.uses_history() { stream.tokens().to_vec() } else { Vec::new() },
            prompt: stream.prompt_len(),
            sampling,
        };
        out.push_back(message(track.last(), self.job, track.epoch, open));
    }

    fn pump(&mut self, now: Instant, id: RequestId, out: &mut Out) {
        let sharers = self.sharers();
        let (Some(track), Some(stream)) = (&self.track, self.running.get_mut(&id)) else { return };
        let positions = self.cache.positions_max(id).min(self.context);
        let drafts = DraftLimits { times: &self.times, positions, sharers };
        if let Some(drafter) = &mut self.drafter
            && let Some(steering) = stream.ask(now, drafts, drafter)
        {
            let (job, content) = (self.job, drafter.content);
            out.push_back(JobOutput::Drafting(Drafting::Steer { job, request: id, content, steering }));
        }
        while let Some((header, tokens)) = stream.next_frame(now, (self.job, track.epoch), track.depth(), drafts) {
            let copy =
                track.first_standby().map(|to| JobOutput::Frame { to, header, tokens: tokens.clone(), copy: true });
            out.push_back(JobOutput::Frame { to: track.first(), header, tokens, copy: false });
            out.extend(copy); // after the owner, which the answer depends on
        }
    }

    /// Whether a node is the last stage of the present track, under its epoch.
    pub(in crate::job) fn is_last_stage(&self, from: NodeId, epoch: Epoch) -> bool {
        self.track.as_ref().is_some_and(|track| track.epoch == epoch && track.last() == from)
    }

    /// Whether a node is any stage of the present track, under its epoch.
    pub(in crate::job) fn is_stage(&self, from: NodeId, epoch: Epoch) -> bool {
        self.track.as_ref().is_some_and(|track| track.epoch == epoch && track.stages.contains(&from))
    }

    /// Whether a node owns this part in this epoch.
    pub(in crate::job) fn is_owner(&self, part: PartId, from: NodeId, epoch: Epoch) -> bool {
        let owner =
            self.track.as_ref().filter(|track| track.epoch == epoch).map(|track| track.stages.get(part.index()));
        owner.flatten() == Some(&from)
    }

    /// Resends what was lost or has no answer. Returns a reason to place the job again if that did not help.
    pub(in crate::job) fn handle_wakeup(&mut self, now: Instant, out: &mut Out) -> Option<String> {
        self.give_up_detached(now, out);
        self.track.as_ref()?;
        self.stop_waiting(now, out);
        self.resend_lost(now, out);
        self.resend_unanswered(now, out)
    }

    /// Drops requests that no caller has asked for again within [`DETACHED_MAX`].
    fn give_up_detached(&mut self, now: Instant, out: &mut Out) {
        self.ended.retain(|(since, ..)| now.since(*since) < DETACHED_MAX);
        let late = |stream: &Stream| matches!(stream.caller, Caller::Gone(at) if now.since(at) >= DETACHED_MAX);
        let (over, waiting) = core::mem::take(&mut self.waiting).into_iter().partition(late);
        self.waiting = waiting;
        let over: VecDeque<Stream> = over;
        over.iter().for_each(|stream| self.log_over(stream));
        let running: Vec<RequestId> = self.running.values().filter(|stream| late(stream)).map(|s| s.id).collect();
        for id in running {
            self.finish(now, id, DoneReason::Cancelled, out);
        }
        self.ended.retain(|(_, _, reason)| *reason != DoneReason::Cancelled);
    }

    pub(in crate::job) fn next_wakeup(&self) -> Option<Instant> {
        self.track.as_ref()?;
        let detached = self.running.values().chain(&self.waiting).filter_map(|stream| match stream.caller {
            Caller::Gone(at) => Some(at + DETACHED_MAX),
            Caller::Here(_) | Caller::Away(..) | Caller::Refresh | Caller::Draft(..) => None,
        });
        let drafts = self.running.values().filter_map(Stream::waits_until);
        [self.resend_at(), detached.min(), drafts.min(), self.log_at, self.refresh_at].into_iter().flatten().min()
    }

    /// Asserts what holds between two inputs.
    pub(in crate::job) fn assert_invariants(&self) {
        let (running, waiting) = (self.running.len(), self.waiting.len());
        assert!(running <= SEQUENCES_MAX as usize, "{running} requests run");
        // A successor may inherit more than it would accept: all requests of the token log. Preempted ones wait, too.
        assert!(waiting <= QUEUE_MAX + SEQUENCES_MAX as usize, "{waiting} requests wait");
        assert!(self.track.is_none() || waiting == 0 || running > 0, "{waiting} requests wait, and none runs");
        self.cache.assert_invariants(|id| self.running.contains_key(&id));
        for stream in self.running.values() {
            let positions = self.cache.positions_max(stream.id);
            assert!(
                positions >= stream.len(),
                "{:?} has pages for {positions} of {} positions",
                stream.id,
                stream.len()
            );
        }
        assert!(self.ended.len() <= SEQUENCES_MAX as usize, "{} ended requests", self.ended.len());
        assert!(self.closed.len() <= SEQUENCES_MAX as usize, "{} closed requests", self.closed.len());
        assert!(self.running.iter().all(|(id, stream)| *id == stream.id), "a request under the id of another one");
        assert!(self.track.is_some() || self.steered().next().is_none(), "drafts are made while the job is placed");
        for stream in self.running.values().chain(&self.waiting) {
            assert!(stream.id.0 < self.next, "{:?} was not issued: the next one is {}", stream.id, self.next);
            stream.assert_invariants();
        }
    }

    fn sharers(&self) -> u32 {
        u32::try_from(self.running.len()).unwrap_or(u32::MAX)
    }
}

fn message(to: NodeId, job: JobId, epoch: Epoch, say: ToStage) -> JobOutput {
    JobOutput::Message { to, job, epoch, say: ToParticipant::Stage(say) }
}

/// Repeats that a request rests.
fn rest(to: NodeId, job: JobId, epoch: Epoch, request: RequestId) -> JobOutput {
    message(to, job, epoch, ToStage::Rest { request, drafts: Drafts::default() })
}

/// Outcome of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::job) enum Submitted {
    /// The request runs, waits, or was answered.
    Taken,
    /// The request was rejected, and its caller was sent the reason.
    Refused,
}

/// Sends a caller the token of a position.
fn tell(caller: Caller, position: u32, sampled: Sampled, out: &mut Out) {
    match caller {
        Caller::Here(call) => out.push_back(JobOutput::Notify(Event::Token { call, position, sampled })),
        Caller::Away(to, call) => {
            out.push_back(JobOutput::Tell { to, call, say: ToCaller::Token { position, sampled } });
        }
        // It receives all drafts together.
        Caller::Draft(..) => {}
        Caller::Gone(_) | Caller::Refresh => {}
    }
}

/// Sends a caller the number of cached prompt tokens.
fn begun(caller: Caller, cached: u32, out: &mut Out) {
    match caller {
        Caller::Here(call) => out.push_back(JobOutput::Notify(Event::Begun { call, cached })),
        Caller::Away(to, call) => out.push_back(JobOutput::Tell { to, call, say: ToCaller::Begun { cached } }),
        Caller::Gone(_) | Caller::Refresh | Caller::Draft(..) => {}
    }
}

/// Sends a caller the end of its request. The last token is before position `end`.
fn done(caller: Caller, reason: DoneReason, end: u32, out: &mut Out) {
    match caller {
        Caller::Here(call) => out.push_back(JobOutput::Notify(Event::Done { call, reason })),
        Caller::Away(to, call) => out.push_back(JobOutput::Tell { to, call, say: ToCaller::Done { reason, end } }),
        Caller::Draft(job, request) => {
            out.push_back(JobOutput::Drafting(Drafting::Answer { job, request, drafts: None }));
        }
        Caller::Gone(_) | Caller::Refresh => {}
    }
}
