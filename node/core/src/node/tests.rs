//! Whole nodes side by side: instant disks, a network with one fixed delay, and stages that compute hashes, so that a
//! wrong position, token or cache shows in the answer.
#![expect(clippy::wildcard_enum_match_arm, reason = "a test looks at few of many events")]
use super::*;
use crate::config::{Capacity, DeviceCapacity};
use crate::id::{CallId, ContentId, Epoch, Generation, PartId, RequestId, TensorId};
use crate::job::{ProgramView, WhatView};
use crate::message::ToParticipant;
use crate::work::serve::{
    DoneReason, Item, ItemResult, ModelSpec, Priority, Request, RequestKey, Sampling, StageOrder,
};
use crate::work::{JobSpec, Loaded, Order, PartWork, Run, RunResult, Task};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use partitioner::{Layer, Work};

mod boundary;
mod epochs;
mod prefixes;
mod succession;

const CALL: CallId = CallId(1);
const LAYERS: u32 = 6;
const LAYER_BYTES: u64 = 100;
const CONTEXT: u32 = 4096;

/// Nodes, wires, executors, and a manual clock.
struct Mesh {
    now: Instant,
    nodes: BTreeMap<NodeId, Host>,
    queue: BTreeMap<(Instant, u64), (NodeId, Input)>,
    sequence: u64,
    events: Vec<(NodeId, Event)>,
    /// Nothing arrives from the first node at the second.
    cut: BTreeSet<(NodeId, NodeId)>,
    tensors_next: u64,
    /// Pages that each stage has in RAM.
    ram_pages: u32,
}

struct Host {
    node: Node,
    down: bool,
    wakeup: Option<Instant>,
    memory: u64,
    stage: BTreeMap<(JobId, PartId), Executor>,
    /// Sources of the part that was loaded last.
    sources: Vec<NodeId>,
    tensors: BTreeMap<TensorId, Vec<u64>>,
}

#[derive(Default)]
struct Executor {
    layers: core::ops::Range<u32>,
    total: u32,
    caches: BTreeMap<RequestId, Vec<u64>>,
    /// Rows computed so far.
    computed: u64,
}

/// One symbolic layer: the state after each position depends on everything before it.
fn step(cache: &[u64], layer: u64, position: u32, input: u64) -> u64 {
    let before = position.checked_sub(1).map_or(layer, |p| cache[p as usize]);
    let mut hasher = blake3::Hasher::new();
    hasher.update(&before.to_le_bytes()).update(&position.to_le_bytes()).update(&input.to_le_bytes());
    u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().unwrap())
}

fn choose(hidden: u64, position: u32) -> u32 {
    (hidden ^ u64::from(position)) as u32 % 1000
}

/// The answer of a single machine.
fn solo(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    let mut caches = vec![Vec::new(); LAYERS as usize];
    for position in 0..prompt.len() + count - 1 {
        let mut row = u64::from(tokens[position]);
        for (layer, cache) in caches.iter_mut().enumerate() {
            row = step(cache, layer as u64, position as u32, row);
            cache.push(row);
        }
        if position + 1 >= prompt.len() {
            tokens.push(choose(row, position as u32 + 1));
        }
    }
    tokens.split_off(prompt.len())
}

impl Executor {
    fn run(&mut self, item: &Item, rows: Vec<u64>) -> (ItemResult, Vec<u64>) {
        let mut rows_out = Vec::new();
        let mut cache_rows = Vec::new();
        assert_eq!(rows.len(), item.count as usize);
        self.computed += rows.len() as u64;
        let width = self.layers.len();
        let cache = self.caches.entry(item.request).or_default();
        assert!(cache.len() >= item.position as usize * width, "a gap in the cache");
        cache.truncate(item.position as usize * width);
        for (i, row) in rows.into_iter().enumerate() {
            let position = item.position + i as u32;
            let mut row = row;
            for (at, layer) in self.layers.clone().enumerate() {
                let column: Vec<u64> = cache.iter().skip(at).step_by(width).copied().collect();
                row = step(&column, u64::from(layer), position, row);
                cache_rows.push(row);
            }
            cache.append(&mut cache_rows);
            rows_out.push(row);
        }
        let sampled = &rows_out[rows_out.len() - 1 - item.drafts as usize..];
        match (&item.sample, self.layers.end == self.total) {
            (_, false) => (ItemResult::Hidden, rows_out),
            (Some(sample), true) if item.drafts == 0 => {
                (ItemResult::Token(choose(sampled[0], sample.position).into()), Vec::new())
            }
            (Some(sample), true) => {
                let tokens = sampled.iter().zip(sample.position..).map(|(row, position)| choose(*row, position));
                (ItemResult::Tokens(tokens.collect()), Vec::new())
            }
            (None, true) => (ItemResult::Nothing, Vec::new()),
        }
    }
}

fn id(n: u8) -> NodeId {
    NodeId::of_peer(&[n])
}

fn addr(n: u8) -> core::net::SocketAddr {
    core::net::SocketAddr::from(([10, 0, 0, n], 9000))
}

impl Mesh {
    fn new(memories: &[u64]) -> Self {
        let mut mesh = Mesh {
            now: Instant(1_000_000_000),
            nodes: BTreeMap::new(),
            queue: BTreeMap::new(),
            sequence: 0,
            events: Vec::new(),
            cut: BTreeSet::new(),
            tensors_next: 0,
            ram_pages: 0,
        };
        for (i, &memory) in memories.iter().enumerate() {
            mesh.add(i as u8 + 1, memory);
        }
        mesh.run_for(Duration::from_secs(5));
        mesh
    }

    fn add(&mut self, n: u8, memory: u64) {
        let capacity = Capacity {
            machine: n.into(),
            zone: String::new(),
            devices: vec![DeviceCapacity {
                device: "cpu".into(),
                memory_total: memory,
                memory_free: memory,
                bytes_per_second: 1_000_000,
                flops_per_second: 1_000_000,
                copy_bytes_per_second: 1_000_000,
                step_ns: 1000,
                layer_ns: 0,
                cache_bytes_per_second: 0,
                ram_total: 0,
                ram_free: 0,
                ram_bytes_per_second: 0,
                ram_flops_per_second: 0,
                numerics: 1,
                pass_steps: 1,
                gone: false,
            }],
        };
        let config = Config {
            node: id(n),
            generation: Generation(1),
            peer_id: vec![n],
            name: format!("node {n}"),
            gossip_addrs: vec![addr(n)],
            data_addrs: vec![addr(n)],
            capacity,
        };
        let node = Node::new(config, n.into());
        let (stage, tensors) = (BTreeMap::new(), BTreeMap::new());
        let host = Host { node, down: false, wakeup: None, memory, stage, sources: Vec::new(), tensors };
        self.nodes.insert(id(n), host);
        self.give(id(n), Input::Wakeup);
        if n > 1 {
            let found = Input::PeerFound {
                node: id(1),
                peer_id: vec![1],
                gossip: vec![addr(1)],
                data: vec![addr(1)],
                remembered: true,
            };
            self.give(id(n), found);
        }
    }

    fn post(&mut self, after: Duration, to: NodeId, input: Input) {
        self.sequence += 1;
        self.queue.insert((self.now + after, self.sequence), (to, input));
    }

    fn give(&mut self, to: NodeId, input: Input) {
        let Some(host) = self.nodes.get_mut(&to).filter(|host| !host.down) else { return };
        host.node.handle(self.now, input);
        loop {
            let host = self.nodes.get_mut(&to).unwrap();
            let Some(output) = host.node.poll() else { break };
            self.carry_out(to, output);
        }
        let wakeup = self.nodes[&to].node.next_wakeup().map(|(at, _)| at);
        self.nodes.get_mut(&to).unwrap().wakeup = wakeup;
    }

    fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        self.run_while(end, |_| true);
    }

    fn run_while(&mut self, end: Instant, mut go_on: impl FnMut(&Mesh) -> bool) {
        while go_on(self) {
            let queued = self.queue.first_key_value().map(|(&(at, _), _)| at);
            let live = self.nodes.iter().filter(|(_, host)| !host.down);
            let wakeup = live.filter_map(|(&id, host)| Some((host.wakeup?, id))).min();
            match (queued, wakeup) {
                (Some(at), woken) if woken.is_none_or(|(w, _)| at <= w) => {
                    if at > end {
                        break;
                    }
                    self.now = self.now.max(at);
                    let (_, (to, input)) = self.queue.pop_first().unwrap();
                    self.give(to, input);
                }
                (_, Some((at, to))) => {
                    if at > end {
                        break;
                    }
                    self.now = self.now.max(at);
                    self.give(to, Input::Wakeup);
                }
                (Some(_) | None, None) => break,
            }
        }
        if go_on(self) {
            self.now = end;
        }
    }

    fn carry_out(&mut self, me: NodeId, output: Output) {
        let delay = Duration::from_millis(1);
        match output {
            Output::SendDatagram { to, .. } | Output::SendMessage { to, .. } | Output::SendFrame { to, .. }
                if self.cut.contains(&(me, to)) => {}
            Output::SendDatagram { to, bytes, .. } => {
                let n = self.nodes[&me].node.membership().own().gossip_addrs[0];
                self.post(delay, to, Input::Datagram { from: me, source: n, bytes });
            }
            Output::SendMessage { to, bytes } => self.post(delay, to, Input::Message { from: me, bytes }),
            Output::SendFrame { to, header, payload, copy: _ } => {
                let host = self.nodes.get_mut(&me).unwrap();
                let rows = match payload {
                    Payload::Tensor(tensor) => host.tensors.get(&tensor).expect("a tensor that is there").clone(),
                    Payload::Tensors(all) => all.iter().flat_map(|tensor| host.tensors[tensor].clone()).collect(),
                    Payload::Tokens(tokens) => tokens.into_iter().map(u64::from).collect(),
                };
                let tensor = TensorId::Arrived(self.tensors_next);
                self.tensors_next += 1;
                if let Some(peer) = self.nodes.get_mut(&to).filter(|peer| !peer.down) {
                    peer.tensors.insert(tensor, rows);
                }
                self.post(delay, to, Input::Frame { from: me, header, tensor });
            }
            Output::Connect { node, .. } => self.post(delay, me, Input::Connected { node, rtt_ns: 2_000_000 }),
            Output::Disconnect { .. } => {}
            Output::Sign { token, .. } => self.post(Duration::ZERO, me, Input::Signed { token, signature: vec![1] }),
            Output::Verify { token, .. } => self.post(Duration::ZERO, me, Input::Verified { token, valid: true }),
            Output::Plan { asked, question } => {
                let answer = question.answer();
                self.post(Duration::ZERO, me, Input::Planned { asked, answer });
            }
            Output::Load { job, load: id, order, sources, replaces, .. } => {
                let part = order.part;
                let bytes = stage(&order).layers_of(part).len() as u64 * LAYER_BYTES;
                let host = self.nodes.get_mut(&me).unwrap();
                let result = if bytes > host.memory {
                    Err("too large".into())
                } else {
                    Ok(Loaded { bytes, ram: 0, ram_pages: self.ram_pages, step: None })
                };
                replaces.iter().for_each(|part| drop(host.stage.remove(&(job, *part))));
                load(host, job, &order);
                host.sources = sources;
                self.post(Duration::from_millis(20), me, Input::Loaded { job, part, load: id, result });
                self.tell_capacity(me);
            }
            Output::Continue { job, order, .. } => assert!(self.nodes[&me].stage.contains_key(&(job, order.part))),
            Output::Fetch { job, epoch, order, .. } => {
                let part = order.part;
                let result = Ok(stage(&order).layers_of(part).len() as u64 * LAYER_BYTES);
                self.post(Duration::from_millis(50), me, Input::Fetched { job, epoch, part, result });
            }
            Output::Challenge { job, epoch, part, nonce } => {
                let challenged = Input::Challenged { job, epoch, part, nonce, result: Ok(nonce) };
                self.post(Duration::from_millis(8), me, challenged);
            }
            Output::Drop { job, part } => {
                self.nodes.get_mut(&me).unwrap().stage.remove(&(job, part));
                self.tell_capacity(me);
            }
            Output::Unload { job } => {
                self.nodes.get_mut(&me).unwrap().stage.retain(|(of, _), _| *of != job);
                self.tell_capacity(me);
            }
            Output::Run(run) => {
                let Run { work, job, part, task, .. } = *run;
                let Task::Batch(items) = task else { panic!("no simulation was submitted here") };
                let results = compute(self.nodes.get_mut(&me).unwrap(), (job, part), items);
                let ran =
                    Input::Ran { job, part, work, result: Ok(RunResult::Batch { results, compute_ns: 2_000_000 }) };
                self.post(Duration::from_millis(2), me, ran);
            }
            Output::Release { job, part, request } => {
                if let Some(stage) = self.nodes.get_mut(&me).unwrap().stage.get_mut(&(job, part)) {
                    stage.caches.remove(&request);
                }
            }
            Output::Fork { job, part, from, to, positions } => {
                let stage = self.nodes.get_mut(&me).unwrap().stage.get_mut(&(job, part)).expect("a loaded stage");
                let mut cache = stage.caches[&from].clone();
                assert!(cache.len() >= positions as usize * stage.layers.len(), "fewer positions than are shared");
                cache.truncate(positions as usize * stage.layers.len());
                stage.caches.insert(to, cache);
            }
            Output::Discard { tensor } => {
                self.nodes.get_mut(&me).unwrap().tensors.remove(&tensor).expect("discarded once");
            }
            Output::Split { tensor, at, of: _, into } => {
                let tensors = &mut self.nodes.get_mut(&me).unwrap().tensors;
                let mut first = tensors.remove(&tensor).expect("a tensor that is there");
                let rest = first.split_off(at as usize);
                tensors.extend(into.into_iter().zip([first, rest]));
            }
            other @ (Output::Restore { .. }
            | Output::Share { .. }
            | Output::Collect { .. }
            | Output::Forget { .. }
            | Output::KeepCheckpoint { .. }
            | Output::Mirror { .. }) => panic!("no simulation was submitted here: {other:?}"),
            Output::Remember { .. } => {}
            Output::Notify(event) => self.events.push((me, event)),
        }
    }

    fn tell_capacity(&mut self, me: NodeId) {
        let host = &self.nodes[&me];
        let taken: u64 = host.stage.values().map(|stage| stage.layers.len() as u64 * LAYER_BYTES).sum();
        let mut capacity = host.node.membership().own().capacity.clone();
        capacity.devices[0].memory_free = host.memory.saturating_sub(taken);
        self.post(Duration::ZERO, me, Input::CapacityChanged(capacity));
    }

    fn deploy(&mut self) -> JobId {
        self.deploy_model(model())
    }

    fn deploy_model(&mut self, model: ModelSpec) -> JobId {
        self.give(id(1), Input::Start { call: CallId(0), job: Box::new(JobSpec::Serve(model)) });
        let end = self.now + Duration::from_secs(5);
        self.run_while(end, |mesh| mesh.ready().is_none());
        self.ready().expect("the job becomes ready")
    }

    fn ready(&self) -> Option<JobId> {
        self.events.iter().find_map(|(_, event)| match event {
            Event::JobReady { job, .. } => Some(*job),
            _ => None,
        })
    }

    fn submit(&mut self, call: CallId, job: JobId, prompt: Vec<u32>, max_tokens: u32) {
        self.give(id(1), Input::Submit { call, job, request: Box::new(request(call, prompt, max_tokens)) });
    }

    /// Tokens delivered to a call. Checks that each arrives once and in order.
    fn told(&self, call: CallId) -> Vec<u32> {
        let mut next = None;
        let tokens = self.events.iter().filter_map(|(_, event)| match event {
            Event::Token { call: c, position, sampled } if *c == call => Some((*position, sampled.token)),
            _ => None,
        });
        tokens
            .map(|(position, token)| {
                assert!(next.is_none_or(|next| next == position), "position {position} out of order");
                next = Some(position + 1);
                token
            })
            .collect()
    }

    fn done(&self, call: CallId) -> Option<DoneReason> {
        let mut ends = self.events.iter().filter_map(|(_, event)| match event {
            Event::Done { call: c, reason } if *c == call => Some(reason.clone()),
            _ => None,
        });
        let end = ends.next();
        assert_eq!(ends.next(), None, "a call ends once");
        end
    }

    fn finish(&mut self, call: CallId, within: Duration) -> DoneReason {
        let end = self.now + within;
        self.run_while(end, |mesh| mesh.done(call).is_none());
        self.done(call).unwrap_or_else(|| panic!("call ends; got {} tokens; {:?}", self.told(call).len(), self.events))
    }

    /// Checks that nothing is left behind once everything has come to rest.
    fn assert_clean(&mut self) {
        self.run_for(Duration::from_secs(1));
        for host in self.nodes.values().filter(|host| !host.down) {
            assert!(host.tensors.is_empty(), "{} tensors leaked", host.tensors.len());
        }
        let caches = self.caches();
        assert!(caches.is_empty(), "caches leaked: {caches:?}");
    }

    /// Requests with a cache that do not rest.
    fn caches(&self) -> Vec<RequestId> {
        let views = self.nodes.values().filter(|host| !host.down).flat_map(|host| host.node.jobs());
        let resting: Vec<RequestId> = views
            .flat_map(|view| match view.program {
                ProgramView::Serve { resting, .. } => resting,
                ProgramView::Steps { .. } => Vec::new(),
            })
            .collect();
        let live = self.nodes.values().filter(|host| !host.down);
        let caches = live.flat_map(|host| host.stage.values()).flat_map(|stage| stage.caches.keys().copied());
        caches.filter(|request| !resting.contains(request)).collect()
    }

    fn stages(&self) -> Vec<NodeId> {
        self.nodes[&id(1)].node.jobs().next().unwrap().parts.iter().map(|part| part.owner).collect()
    }
}

/// A request with a key derived from the call.
fn request(call: CallId, prompt: Vec<u32>, max_tokens: u32) -> Request {
    let key = RequestKey(u128::from(call.0).to_be_bytes());
    Request { prompt, max_tokens, sampling: Sampling::GREEDY, ignore_eos: false, priority: Priority::Interactive, key }
}

fn stage(order: &Order) -> &StageOrder {
    match &order.work {
        PartWork::Stage(stage) => stage,
        PartWork::Tile(_) => panic!("no simulation was submitted here"),
    }
}

fn load(host: &mut Host, job: JobId, order: &Order) {
    let stage = stage(order);
    let (layers, total) = (stage.layers_of(order.part), stage.layers_total());
    host.stage.insert((job, order.part), Executor { layers, total, caches: BTreeMap::new(), computed: 0 });
}

fn compute(host: &mut Host, part: (JobId, PartId), items: Vec<Item>) -> Vec<ItemResult> {
    let Host { stage, tensors, .. } = host;
    let stage = stage.get_mut(&part).expect("a stage to run");
    let run = |item: Item| {
        let rows = match &item.input {
            Payload::Tensor(tensor) => tensors.remove(tensor).expect("an input that is there"),
            Payload::Tensors(all) => {
                all.iter().flat_map(|tensor| tensors.remove(tensor).expect("an input that is there")).collect()
            }
            Payload::Tokens(tokens) => tokens.iter().copied().map(u64::from).collect(),
        };
        let (result, rows) = stage.run(&item, rows);
        if result == ItemResult::Hidden {
            tensors.insert(item.output, rows);
        }
        result
    };
    items.into_iter().map(run).collect()
}

fn model() -> ModelSpec {
    let layer =
        Layer { flops_per_token: 1, weight_bytes: LAYER_BYTES, kv_bytes_per_token: 0, window: None, experts: None };
    ModelSpec {
        content: ContentId([7; 32]),
        name: "symbolic".into(),
        work: Work {
            layers: vec![layer; LAYERS as usize],
            embed_bytes: 0,
            head_bytes: 0,
            tied: false,
            head_flops: 0,
            activation_bytes: 8,
            coarser_bytes: Vec::new(),
            context: CONTEXT,
            sequences: 8,
            scratch_bytes: 0,
        },
        width: 1,
        boundary: Vec::new(),
        int8: false,
        eos: vec![100_000],
        replicas: 1,
        draft: None,
    }
}

#[test]
fn three_nodes_answer_as_one_would() {
    let mut mesh = Mesh::new(&[225, 225, 225]);
    let job = mesh.deploy();
    assert_eq!(mesh.stages().len(), 3);
    let prompt: Vec<u32> = (0..1300).collect();
    mesh.submit(CALL, job, prompt.clone(), 20);
    assert_eq!(mesh.finish(CALL, Duration::from_secs(20)), DoneReason::Length);
    assert_eq!(mesh.told(CALL), solo(&prompt, 20));
    mesh.assert_clean();
}

#[test]
fn the_coordinator_shows_what_stages_on_other_nodes_hold_and_how_fast_they_are() {
    let mut mesh = Mesh::new(&[250, 250, 250]);
    mesh.deploy();
    let job = mesh.nodes[&id(1)].node.jobs().next().expect("a job");
    assert_eq!(job.parts.len(), 3);
    for part in &job.parts {
        let WhatView::Stage(layers) = &part.what else { panic!("{part:?}") };
        assert_eq!(part.bytes, Some(layers.len() as u64 * LAYER_BYTES), "{part:?}");
        assert!(part.step_ns > 0, "{part:?}");
    }
    let ProgramView::Serve { context, sequences, .. } = job.program else { panic!("{job:?}") };
    assert_eq!((context, sequences), (CONTEXT, 8));
}

#[test]
fn a_survey_counts_what_a_job_holds_as_free_for_that_job() {
    let mut mesh = Mesh::new(&[250, 250, 250]);
    let job = mesh.deploy();
    mesh.run_for(Duration::from_secs(2));
    let mut free = |call, job| {
        mesh.give(id(1), Input::Survey { call, job });
        mesh.run_for(Duration::from_millis(10));
        let fleet = mesh.events.iter().find_map(|(_, event)| match event {
            Event::Fleet { call: of, fleet, .. } if *of == call => Some(fleet.clone()),
            _ => None,
        });
        fleet.expect("an answer").devices.iter().map(|device| device.memory).sum::<u64>()
    };
    let taken = u64::from(LAYERS) * LAYER_BYTES;
    assert_eq!(free(CallId(101), None), 750 - taken);
    assert_eq!(free(CallId(102), Some(job)), 750);
}

#[test]
fn eight_requests_at_once_answer_as_each_alone() {
    let mut mesh = Mesh::new(&[225, 225, 225]);
    let job = mesh.deploy();
    let prompt = |n: u32| -> Vec<u32> { (n..n + 5 + n * 97).collect() };
    for n in 0..12 {
        mesh.submit(CallId(10 + u64::from(n)), job, prompt(n), 16);
    }
    for n in 0..12 {
        let call = CallId(10 + u64::from(n));
        assert_eq!(mesh.finish(call, Duration::from_secs(20)), DoneReason::Length);
        assert_eq!(mesh.told(call), solo(&prompt(n), 16));
    }
    mesh.assert_clean();
}

#[test]
fn the_loss_of_a_stage_does_not_change_the_answer() {
    for at_token in [0, 1, 7, 15] {
        let mut mesh = Mesh::new(&[225, 225, 225, 225]);
        let job = mesh.deploy();
        let prompt: Vec<u32> = (0..700).collect();
        mesh.submit(CALL, job, prompt.clone(), 20);
        let end = mesh.now + Duration::from_secs(5);
        mesh.run_while(end, |mesh| mesh.told(CALL).len() < at_token);
        let victim = *mesh.stages().iter().rev().find(|&&node| node != id(1)).unwrap();
        mesh.nodes.get_mut(&victim).unwrap().down = true;
        assert_eq!(mesh.finish(CALL, Duration::from_secs(20)), DoneReason::Length);
        assert_eq!(mesh.told(CALL), solo(&prompt, 20), "killed after token {at_token}");
        mesh.assert_clean();
    }
}

/// Weights are fetched from the coordinator, the other owners, and each node that advertises some of them; once each.
#[test]
fn a_stage_is_fetched_from_every_node_that_has_some_of_it() {
    let mut mesh = Mesh::new(&[360, 360, 9]);
    for n in [2, 3] {
        mesh.give(id(n), Input::Holdings(vec![ContentId([9; 32]), model().content]));
    }
    mesh.run_for(Duration::from_secs(3));
    mesh.deploy();
    let sources = |n: u8| mesh.nodes[&id(n)].sources.clone();
    assert_eq!(sources(2), [id(1), id(3)], "the coordinator, and a node without a stage; not itself");
    assert!(mesh.nodes[&id(3)].stage.is_empty());
}

/// A stage that does not hear the coordinator any more, although the coordinator hears it.
#[test]
fn a_stage_behind_a_one_way_cut_is_replaced_before_the_watchdog_fires() {
    let mut mesh = Mesh::new(&[225, 225, 225, 225]);
    let job = mesh.deploy();
    mesh.submit(CALL, job, vec![1, 2, 3], 20);
    let end = mesh.now + Duration::from_secs(5);
    mesh.run_while(end, |mesh| mesh.told(CALL).len() < 7);
    let deaf = *mesh.stages().iter().find(|&&node| node != id(1)).unwrap(); // gets its rows from the coordinator
    mesh.cut.insert((id(1), deaf));
    assert_eq!(mesh.finish(CALL, crate::limits::WATCHDOG_MIN), DoneReason::Length);
    assert_eq!(mesh.told(CALL), solo(&[1, 2, 3], 20));
    assert!(!mesh.stages().contains(&deaf));
}

/// A coordinator that stood still for a moment is heard by no node meanwhile, and loses none for it.
#[test]
fn a_coordinator_that_stood_still_keeps_its_stages() {
    let mut mesh = Mesh::new(&[225, 225, 225, 225]);
    let job = mesh.deploy();
    mesh.submit(CALL, job, vec![1, 2, 3], 20);
    let end = mesh.now + Duration::from_secs(5);
    mesh.run_while(end, |mesh| mesh.told(CALL).len() < 7);
    let (stages, others) = (mesh.stages(), [2, 3, 4].map(id));
    mesh.cut.extend(others.map(|other| (id(1), other)));
    // Leases expire, but SWIM, which takes 350 ms at least, has declared no node down.
    mesh.run_for(LEASE + Duration::from_millis(5));
    mesh.cut.clear();
    assert_eq!(mesh.finish(CALL, Duration::from_secs(20)), DoneReason::Length);
    assert_eq!(mesh.told(CALL), solo(&[1, 2, 3], 20));
    assert_eq!(mesh.stages(), stages);
    mesh.assert_clean();
}

#[test]
fn too_little_memory_is_reported_with_the_bytes_that_are_missing() {
    let mut mesh = Mesh::new(&[225, 225]);
    mesh.give(id(1), Input::Start { call: CALL, job: Box::new(JobSpec::Serve(model())) });
    mesh.run_for(Duration::from_secs(1));
    let reason = mesh.events.iter().find_map(|(_, event)| match event {
        Event::JobDegraded { call: Some(CALL), reason, .. } => Some(reason.clone()),
        _ => None,
    });
    assert!(reason.is_some_and(|reason| reason.contains("150 B are missing")));
    assert!(mesh.ready().is_none());
    mesh.add(3, 225);
    mesh.run_for(Duration::from_secs(5));
    assert!(mesh.ready().is_some(), "a node that joins makes it possible: {:?}", mesh.events);
}

#[test]
fn a_cancelled_request_leaves_nothing_behind() {
    let mut mesh = Mesh::new(&[225, 225, 225]);
    let job = mesh.deploy();
    for pause_ms in [0, 1, 2, 3, 5, 8, 13, 21, 34, 55] {
        let call = CallId(100 + pause_ms);
        mesh.submit(call, job, (0..2000).collect(), 1000);
        mesh.run_for(Duration::from_millis(pause_ms));
        mesh.give(id(1), Input::Cancel { call });
        assert_eq!(mesh.done(call), Some(DoneReason::Cancelled));
        mesh.assert_clean();
    }
}

#[test]
fn a_prompt_longer_than_the_context_is_rejected_with_both_numbers() {
    let mut mesh = Mesh::new(&[900]);
    let job = mesh.deploy();
    mesh.submit(CALL, job, vec![1; CONTEXT as usize], 1);
    match mesh.done(CALL) {
        Some(DoneReason::Invalid(why)) => assert!(why.contains("4096 tokens") && why.contains("4095"), "{why}"),
        other => panic!("expected a rejection, found {other:?}"),
    }
}
