//! The callers of one entry node: they send requests, cancel them, and fail over to another host if theirs is lost.
use crate::case::{Ask, Case};
use crate::checker::survival::Survival;
use crate::compute::{DRAFTED, DRAFTING};
use crate::host::{Host, HostId};
use crate::timeline::{Timeline, name};
use crate::workload::{Call, ENTRY_DIED, Workload, request, wide_model};
use crate::world::{Notification, World};
use node_core::id::{CallId, ContentId, Epoch, JobId};
use node_core::input::Input;
use node_core::time::{Duration, Instant};
use node_core::work::serve::{DoneReason, Priority, Request, Sampling};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub(super) struct Callers {
    pub(super) work: Workload,
    /// The draft model, which no caller asks.
    draft: Option<Workload>,
    /// The entry node's number in the case: 0 is the first.
    entry: u32,
    asks: VecDeque<Ask>,
    cancels: Vec<(Instant, CallId)>,
    /// When the callers of calls that have not ended disconnected.
    gone: BTreeMap<CallId, Instant>,
    /// When the callers' host was last seen paused.
    stopped: Option<Instant>,
    /// Failed calls that were checked.
    failed: BTreeSet<CallId>,
    /// Calls that broke with their host and must be sent again.
    again: VecDeque<CallId>,
    /// The life of the host in use, and when the callers may fail over.
    life: u32,
    turn_at: Option<Instant>,
    /// The job that their host coordinated, and until when they wait for its successor.
    before: Option<(JobId, Instant)>,
}

impl Callers {
    /// The callers of each entry node of a case.
    pub(super) fn of(case: &Case) -> Vec<Callers> {
        let nodes = case.entry_nodes();
        nodes.into_iter().zip(0..).map(|((head, layers), entry)| Callers::of_entry(case, entry, head, layers)).collect()
    }

    fn of_entry(case: &Case, entry: u32, head: HostId, layers: Option<u32>) -> Callers {
        let mut model = wide_model(layers.unwrap_or(case.mesh.layers), LAYER_BYTES, case.mesh.width);
        model.replicas = case.mesh.replicas;
        if case.seed % 4 == 1 {
            // So little cache that requests wait for pages, and are preempted.
            model.work.sequences = 1;
        }
        if layers.is_some() {
            model.content = ContentId([0x5A + entry as u8; 32]);
        }
        let draft = case.mesh.draft.filter(|_| entry == 0).map(|layers| {
            let same = layers as usize == model.work.layers.len();
            let mut draft = wide_model(layers, LAYER_BYTES, case.mesh.width);
            draft.name = "draft".into();
            draft.content = if same { DRAFTED } else { DRAFTING };
            (model.content, model.draft) = (DRAFTED, Some(draft.content));
            Workload::of_entry(DRAFT_CALLS, head, draft)
        });
        let mut asks: Vec<Ask> = case.requests.iter().filter(|ask| ask.entry == entry).cloned().collect();
        asks.sort_by_key(|ask| ask.at);
        Callers {
            work: Workload::of_entry(entry, head, model),
            draft,
            entry,
            asks: asks.into(),
            cancels: Vec::new(),
            gone: BTreeMap::new(),
            stopped: None,
            failed: BTreeSet::new(),
            again: VecDeque::new(),
            life: 1,
            turn_at: None,
            before: None,
        }
    }

    pub(super) fn hear(&mut self, told: &[Notification]) {
        let head = self.work.entry;
        self.work.hear(told.iter().filter(|told| told.host == head).cloned());
        if let Some(draft) = &mut self.draft {
            draft.hear(told.iter().filter(|told| told.host == head).cloned());
        }
    }

    /// Has the models served for the first time, the draft model first. Returns whether that succeeds.
    pub(super) fn serve(&mut self, world: &mut World, limit: Duration) -> bool {
        let head = self.work.entry;
        let ready = self.draft.as_mut().is_none_or(|draft| {
            draft.turn_to(world, head);
            draft.run_until_ready(world, limit)
        });
        self.work.turn_to(world, head);
        ready && self.work.run_until_ready(world, limit)
    }

    /// Has a host serve the draft model.
    fn serve_draft(&mut self, world: &mut World, host: HostId) {
        if let Some(draft) = &mut self.draft {
            draft.entry_died(world.now());
            draft.turn_to(world, host);
        }
    }

    /// Whether every request has been sent and has ended.
    pub(super) fn all_ended(&self) -> bool {
        self.asks.is_empty() && self.again.is_empty() && self.work.calls.values().all(|call| !call.ends.is_empty())
    }

    /// Whether the callers use a host that serves the model.
    pub(super) fn is_served(&self) -> bool {
        self.turn_at.is_none() && self.work.job.is_some()
    }

    /// What has not ended, for violations.
    pub(super) fn open(&self) -> String {
        let open = self.work.calls.iter().filter(|(_, call)| call.ends.is_empty()).map(|(id, _)| name(*id));
        let open: Vec<u64> = open.collect();
        let (asks, job) = (self.asks.len() + self.again.len(), self.work.job);
        let last = self.work.notes.last().map(|told| format!("{:?}", told.event));
        format!("calls {open:?} are open, {asks} requests are not sent, job {job:?}, last event {last:?}")
    }

    /// Checks the current state of the world. `bytes`: memory for all weights, caches and tiles.
    pub(super) fn judge(&mut self, world: &World, survival: &Survival, bytes: u64, violations: &mut Vec<String>) {
        let head = self.work.entry;
        if world.host(head).paused_until.is_some() {
            self.stopped = Some(world.now());
        }
        survival.look(world, head, bytes);
        for (id, call) in &self.work.calls {
            let Some((at, reason)) = call.ends.first() else { continue };
            if let DoneReason::Failed(why) = reason
                && why != ENTRY_DIED
                && !is_lost_elsewhere(reason)
                && self.failed.insert(*id)
                && let Some(doubt) = survival.doubt(*at, head)
            {
                violations.push(format!("call {} fails ({why}), {doubt}", name(*id)));
            }
            if let Some(cancelled) = self.gone.remove(id)
                && *at > cancelled + CANCEL_MAX
                && self.stopped.is_none_or(|stopped| stopped < cancelled)
            {
                let after = at.since(cancelled).as_millis();
                violations.push(format!("call {} ends {after} ms after its caller went away: {reason:?}", name(*id)));
            }
        }
    }

    /// Sends and cancels what is due.
    pub(super) fn step(&mut self, world: &mut World, origin: Instant, seed: u64) {
        let now = world.now();
        if self.is_served() {
            while let Some(ask) = self.asks.pop_front_if(|ask| origin + ask.at.since(Instant(0)) <= now) {
                self.submit(world, ask, seed);
            }
            while let Some(call) = self.again.pop_front() {
                let request = self.work.calls[&call].request.clone();
                self.work.submit_again(world, request);
            }
        }
        let due: Vec<CallId> = self.cancels.extract_if(.., |(at, _)| *at <= now).map(|(_, call)| call).collect();
        for call in due {
            // If the host is lost, no node can be asked to cancel.
            if self.work.calls.get(&call).is_some_and(|call| call.ends.is_empty()) && self.turn_at.is_none() {
                self.work.cancel(world, call);
                self.gone.insert(call, now);
            }
        }
    }

    pub(super) fn submit(&mut self, world: &mut World, ask: Ask, seed: u64) -> CallId {
        let number = self.work.calls.len() as u64;
        let of_seed = seed.wrapping_mul(1000).wrapping_add(number + 300 * u64::from(self.entry));
        let mut request = request(of_seed, ask.prompt, ask.tokens);
        if number % 2 == 1 {
            self.next_turn_of_a_conversation(&mut request);
        }
        if number % 3 == 2 {
            request.sampling = Sampling { temperature_e6: 800_000, seed: number, ..Sampling::GREEDY };
        }
        request.priority =
            [Priority::Interactive, Priority::Interactive, Priority::Batch, Priority::Idle][number as usize % 4];
        let call = self.work.submit(world, request);
        self.cancels.extend(ask.cancel_after.map(|after| (world.now() + after, call)));
        call
    }

    /// Puts the conversation of the last call that was answered before the prompt, if there is room for it.
    fn next_turn_of_a_conversation(&self, request: &mut Request) {
        let answered = |call: &&Call| matches!(call.ends.first(), Some((_, DoneReason::Stop | DoneReason::Length)));
        let Some(before) = self.work.calls.values().rev().find(answered) else { return };
        let mut tokens = before.request.prompt.clone();
        let answer: BTreeMap<u32, u32> = before.tokens.iter().map(|&(_, position, token)| (position, token)).collect();
        tokens.extend(answer.into_values());
        tokens.append(&mut request.prompt.clone());
        if tokens.len() + request.max_tokens as usize <= CONVERSATION_MAX {
            request.prompt = tokens;
        }
    }

    /// Callers whose host died get an error, and fail over to another host a while later: to one of the first `count`, and
    /// not to one of `others` if another one is usable.
    pub(super) fn fail_over(&mut self, world: &mut World, count: u32, others: &[HostId], timeline: &Timeline) {
        let now = world.now();
        let head = world.host(self.work.entry);
        let lost = |call: &Call| call.ends.first().is_some_and(|(_, reason)| is_lost_elsewhere(reason));
        let elsewhere = self.work.calls.values().any(lost);
        let gone = !head.runs() || head.life != self.life || elsewhere;
        if gone && self.turn_at.is_none() {
            self.before = self.work.job.map(|job| (job, now + SUCCESSOR_MAX));
            // The node to which the host forwarded them is lost: for their callers the same.
            for call in self.work.calls.values_mut().filter(|call| lost(call)) {
                call.ends.clear();
            }
            let broken = self.work.entry_died(now);
            let head = world.host(self.work.entry);
            if head.runs() && head.life == self.life {
                // A live node notices that its callers close their connections.
                broken.iter().for_each(|call| world.inject(self.work.entry, Input::Cancel { call: *call }));
            }
            timeline.note(now, format!("{} calls broke with host {}", broken.len(), self.work.entry.0));
            self.again.extend(broken.into_iter().filter(|call| !self.work.calls[call].cancelled));
            self.turn_at = Some(now + TURN);
        }
        if self.turn_at.is_some_and(|at| at <= now) {
            if let Some((job, until)) = self.before {
                if let Some((host, epoch)) = coordinator(world, job) {
                    (self.turn_at, self.before) = (None, None);
                    self.life = world.host(host).life;
                    self.work.follow(host, job, epoch);
                    self.serve_draft(world, host);
                    return timeline
                        .note(now, format!("callers fail over to host {}, which took over the job", host.0));
                }
                let held =
                    |host: &Host| host.node.as_ref().is_some_and(|node| node.parts().any(|held| held.job == job));
                if now < until && world.hosts().any(held) {
                    return;
                }
            }
            self.before = None;
            let here = self.work.entry.0;
            let all = (1..=count).map(|step| HostId((here + step) % count));
            let usable: Vec<HostId> = all.filter(|host| is_usable(world, *host)).collect();
            let free = usable.iter().find(|host| !others.contains(host));
            let Some(next) = free.or(usable.first()).copied() else { return };
            self.turn_at = None;
            self.life = world.host(next).life;
            self.serve_draft(world, next);
            self.work.turn_to(world, next);
            timeline.note(now, format!("callers fail over to host {}", next.0));
        }
    }

    /// The owner of the model restores its file if no disk has all of its pieces any more.
    pub(super) fn restore_model(&self, world: &mut World) {
        for work in [&self.work].into_iter().chain(&self.draft) {
            let (content, layers) = (work.model.content, work.model.work.layers.len() as u32);
            if !world.has_all_of(content, layers) {
                world.give_model(work.entry, content, layers);
            }
        }
    }

    /// Memory for the weights and caches of the model and its draft model.
    pub(super) fn model_bytes(&self) -> u64 {
        let bytes = |of: &Workload| {
            let work = &of.model.work;
            let positions = u64::from(work.context) * u64::from(work.sequences);
            let layers = work.layers.iter().map(|layer| layer.weight_bytes + layer.kv_bytes_per_token * positions);
            layers.sum::<u64>() + work.embed_bytes + work.head_bytes
        };
        bytes(&self.work) + self.draft.as_ref().map_or(0, bytes)
    }
}

/// The host that coordinates a job, if its node accepts requests.
fn coordinator(world: &World, job: JobId) -> Option<(HostId, Epoch)> {
    let hosts = world.hosts().filter(|host| is_usable(world, host.id));
    let jobs = hosts.filter_map(|host| Some((host.id, host.node.as_ref()?.jobs().find(|view| view.job == job)?.epoch)));
    jobs.max_by_key(|(_, epoch)| *epoch)
}

/// Whether a call ended because the node to which its host forwarded it is lost, or no longer serves the model.
fn is_lost_elsewhere(reason: &DoneReason) -> bool {
    match reason {
        DoneReason::Failed(why) => why.contains("which ran this request, is gone or serves"),
        DoneReason::Invalid(why) => why.contains("is not served by"),
        DoneReason::Stop | DoneReason::Length | DoneReason::Cancelled | DoneReason::Busy => false,
    }
}

/// Whether the node of this host accepts requests.
pub(super) fn is_usable(world: &World, host: HostId) -> bool {
    let host = world.host(host);
    host.runs() && host.paused_until.is_none() && !host.leaves
}

/// The entry node in whose name the draft model is asked for: none has this number.
const DRAFT_CALLS: u32 = 100;
/// Weights of one layer, as in `compute.rs`.
const LAYER_BYTES: u64 = 20 << 20;
/// Tokens of the longest conversation: less than a context.
const CONVERSATION_MAX: usize = 3000;
/// Failover delay of callers whose host is lost.
const TURN: Duration = Duration::from_millis(500);
/// How long they wait for its successor while parts of the job are held.
const SUCCESSOR_MAX: Duration = Duration::from_secs(8);
/// A cancelled call ends within this time.
pub(super) const CANCEL_MAX: Duration = Duration::from_secs(1);
