//! The virtual world: hosts in a queue of events, with the same loop around each node that the real driver has.
//!
//! The loop is `World::deliver`: feed an input, carry out outputs until there are none, arm the next wakeup.
//! Next: `network.rs`.
use crate::compute::Cargo;
use crate::faults::{Fault, Schedule};
use crate::host::{Host, HostId, HostSpec};
use crate::network::{Network, Pair, Parcel, pair};
use crate::options::Options;
use crate::queue::Queue;
use crate::trace::Trace;
use node_core::config::Capacity;
use node_core::id::{NodeId, TensorId};
use node_core::input::Input;
use node_core::node::Node;
use node_core::output::{Event as Notice, Output, Record};
use node_core::time::{Duration, Instant};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Something a node told to whoever listens.
#[derive(Clone, Debug)]
pub struct Told {
    /// When.
    pub at: Instant,
    /// By whom.
    pub host: HostId,
    /// What.
    pub event: Notice,
}

/// Watches everything that goes into and out of nodes, for checkers.
pub trait Observer {
    /// An input is about to be handled.
    fn input(&mut self, _at: Instant, _host: HostId, _input: &Input) {}
    /// An output is about to be carried out.
    fn output(&mut self, _at: Instant, _host: HostId, _output: &Output) {}
}

/// A world: its clock, its hosts, and what is going to happen.
pub struct World {
    options: Options,
    now: Instant,
    queue: Queue<Happening>,
    hosts: Vec<Host>,
    by_node: BTreeMap<NodeId, HostId>,
    by_addr: BTreeMap<SocketAddr, HostId>,
    network: Network,
    trace: Trace,
    told: Vec<Told>,
    observers: Vec<Box<dyn Observer>>,
    /// Reused, so that a step allocates nothing.
    outputs: Vec<Output>,
}

/// Something in the queue.
#[derive(Debug)]
enum Happening {
    Wake {
        host: HostId,
        life: u32,
    },
    Resume {
        host: HostId,
        life: u32,
    },
    /// Something this life of the host asked for.
    Answer {
        host: HostId,
        life: u32,
        input: Box<Input>,
    },
    Datagram {
        from: HostId,
        to: HostId,
        bytes: Vec<u8>,
    },
    Handshake {
        pair: Pair,
        id: u64,
    },
    Parcel {
        pair: Pair,
        id: u64,
        from: HostId,
        number: u64,
        parcel: Parcel,
    },
    /// Time to see whether a connection is broken.
    Idle {
        pair: Pair,
        id: u64,
    },
    Synced {
        host: HostId,
        life: u32,
        seq: u64,
    },
    Fault(Fault),
}

impl World {
    /// An empty world.
    pub fn new(options: Options) -> Self {
        World {
            network: Network::new(options.clone()),
            options,
            now: Instant(0),
            queue: Queue::new(),
            hosts: Vec::new(),
            by_node: BTreeMap::new(),
            by_addr: BTreeMap::new(),
            trace: Trace::default(),
            told: Vec::new(),
            observers: Vec::new(),
            outputs: Vec::new(),
        }
    }

    // ---- building

    /// A machine, not started yet.
    pub fn add_host(&mut self, spec: HostSpec) -> HostId {
        let id = HostId(u32::try_from(self.hosts.len()).expect("fewer than 2^32 hosts"));
        self.network.add_host(spec.region);
        let host = Host::new(id, spec);
        self.by_node.insert(host.node_id, id);
        self.by_addr.insert(host.gossip_addr, id);
        self.hosts.push(host);
        id
    }

    /// `n` machines of one kind.
    pub fn add_hosts(&mut self, n: usize, spec: &HostSpec) -> Vec<HostId> {
        (0..n).map(|_| self.add_host(spec.clone())).collect()
    }

    /// Start a host's process, with what its disk remembers.
    pub fn start(&mut self, id: HostId) {
        let seed = self.options.seed ^ (u64::from(id.0) << 32 | u64::from(self.hosts[id.index()].life) << 16);
        let now = self.now;
        let host = &mut self.hosts[id.index()];
        if host.runs() {
            return;
        }
        host.life += 1;
        host.paused_until = None;
        host.inbox.clear();
        host.wake_at = None;
        host.executor.reset(&host.spec);
        let config = host.config(now);
        host.node = Some(Node::new(config, seed));
        let remembered: Vec<Input> = host.disk.records().iter().flat_map(found_again).collect();
        for input in remembered {
            self.inject(id, input);
        }
        self.inject(id, Input::Wakeup);
    }

    /// Tell a host of another, as a ticket or discovery does.
    pub fn introduce(&mut self, id: HostId, to: HostId) {
        let other = &self.hosts[to.index()];
        let input = Input::PeerFound {
            node: other.node_id,
            peer_id: other.peer_id.clone(),
            gossip: vec![other.gossip_addr],
            data: vec![other.data_addr],
        };
        self.inject(id, input);
    }

    /// Watch everything from now on.
    pub fn observe(&mut self, observer: Box<dyn Observer>) {
        self.observers.push(observer);
    }

    /// Let this go wrong later.
    pub fn schedule(&mut self, schedule: Schedule) {
        for timed in schedule {
            self.queue.push(timed.at.max(self.now), Happening::Fault(timed.fault));
        }
    }

    /// Let this go wrong now.
    pub fn strike(&mut self, fault: Fault) {
        self.queue.push(self.now, Happening::Fault(fault));
    }

    /// Let this input reach a host now, if it runs.
    pub fn inject(&mut self, id: HostId, input: Input) {
        self.answer(id, Duration::ZERO, input);
    }

    // ---- looking

    /// The virtual clock.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// The world's figures.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// One host.
    pub fn host(&self, id: HostId) -> &Host {
        &self.hosts[id.index()]
    }

    /// All hosts.
    pub fn hosts(&self) -> impl Iterator<Item = &Host> {
        self.hosts.iter()
    }

    /// A host's executor, for faults of devices.
    pub fn host_mut(&mut self, id: HostId) -> &mut Host {
        &mut self.hosts[id.index()]
    }

    /// Which host a node runs on.
    pub fn host_of(&self, node: NodeId) -> Option<HostId> {
        self.by_node.get(&node).copied()
    }

    /// Whether bytes get from one host to another now.
    pub fn reaches(&self, from: HostId, to: HostId) -> bool {
        self.network.reaches(from, to)
    }

    /// What nodes told since the last call.
    pub fn take_told(&mut self) -> Vec<Told> {
        std::mem::take(&mut self.told)
    }

    /// The run's fingerprint.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    // ---- running

    /// Let everything happen that is due within this time.
    pub fn run_for(&mut self, time: Duration) {
        self.run_until(self.now + time);
    }

    /// Let everything happen up to this time.
    pub fn run_until(&mut self, until: Instant) {
        while let Some((at, happening)) = self.queue.pop_until(until) {
            self.now = at;
            self.happen(happening);
        }
        self.now = self.now.max(until);
    }

    /// Run until `done` says so, looking every `step`; `false` if `limit` passed first.
    pub fn run_while_not(&mut self, limit: Duration, step: Duration, mut done: impl FnMut(&World) -> bool) -> bool {
        let end = self.now + limit;
        while self.now < end {
            if done(self) {
                return true;
            }
            self.run_for(step);
        }
        done(self)
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Wake { host, life } => self.wake(host, life),
            Happening::Resume { host, life } => self.resume(host, life),
            Happening::Answer { host, life, input } => {
                if self.hosts[host.index()].life == life {
                    self.deliver(host, *input);
                }
            }
            Happening::Datagram { from, to, bytes } => {
                let sender = &self.hosts[from.index()];
                let input = Input::Datagram { from: sender.node_id, source: sender.gossip_addr, bytes };
                self.deliver(to, input);
            }
            Happening::Handshake { pair, id } => self.handshake(pair, id),
            Happening::Parcel { pair, id, from, number, parcel } => self.arrive(pair, id, from, number, parcel),
            Happening::Idle { pair, id } => self.idle(pair, id),
            Happening::Synced { host, life, seq } => {
                if self.hosts[host.index()].life == life && self.hosts[host.index()].disk.sync(seq) {
                    self.deliver(host, Input::Persisted { seq });
                }
            }
            Happening::Fault(fault) => self.fault(fault),
        }
    }

    /// The loop: feed an input, carry out outputs until there are none, arm the next wakeup.
    fn deliver(&mut self, id: HostId, input: Input) {
        let now = self.now;
        let host = &mut self.hosts[id.index()];
        let Some(node) = &mut host.node else { return };
        if host.paused_until.is_some() {
            if host.inbox.len() < INBOX_MAX {
                host.inbox.push_back(input);
            }
            return;
        }
        self.trace.input(now, id, &input);
        for observer in &mut self.observers {
            observer.input(now, id, &input);
        }
        node.handle(now, input);
        let mut outputs = std::mem::take(&mut self.outputs);
        outputs.extend(std::iter::from_fn(|| node.poll()));
        for output in outputs.drain(..) {
            for observer in &mut self.observers {
                observer.output(now, id, &output);
            }
            self.carry_out(id, output);
        }
        self.outputs = outputs;
        self.arm(id);
    }

    fn arm(&mut self, id: HostId) {
        let host = &mut self.hosts[id.index()];
        let Some((at, _)) = host.node.as_ref().and_then(Node::next_wakeup) else { return };
        let at = at.max(self.now);
        // An earlier wakeup in the queue finds nothing due and arms again: cheaper than searching the queue.
        if host.wake_at.is_none_or(|armed| at < armed) {
            host.wake_at = Some(at);
            self.queue.push(at, Happening::Wake { host: id, life: host.life });
        }
    }

    fn wake(&mut self, id: HostId, life: u32) {
        let host = &mut self.hosts[id.index()];
        if host.life != life || host.wake_at != Some(self.now) || host.paused_until.is_some() {
            return; // of an earlier life, or no longer the earliest
        }
        host.wake_at = None;
        let due = host.node.as_ref().and_then(Node::next_wakeup).is_some_and(|(at, _)| at <= self.now);
        if due {
            self.deliver(id, Input::Wakeup);
        } else {
            self.arm(id);
        }
    }

    fn resume(&mut self, id: HostId, life: u32) {
        let host = &mut self.hosts[id.index()];
        if host.life != life || host.paused_until.is_none_or(|until| until > self.now) {
            return;
        }
        host.paused_until = None;
        host.wake_at = None;
        // A real driver looks at its clock before its sockets, or after: here the clock, which is the harder case.
        self.deliver(id, Input::Wakeup);
        let inbox = std::mem::take(&mut self.hosts[id.index()].inbox);
        for input in inbox {
            self.deliver(id, input);
        }
    }

    /// An answer to something that this life of the host asked for.
    fn answer(&mut self, id: HostId, after: Duration, input: Input) {
        let life = self.hosts[id.index()].life;
        self.queue.push(self.now + after, Happening::Answer { host: id, life, input: Box::new(input) });
    }

    fn answer_at(&mut self, id: HostId, (at, input): (Instant, Input)) {
        self.answer(id, at.since(self.now), input);
    }

    // ---- carrying out

    fn carry_out(&mut self, id: HostId, output: Output) {
        let now = self.now;
        let host = &mut self.hosts[id.index()];
        match output {
            Output::SendDatagram { to: _, addr, bytes } => self.send_datagram(id, addr, bytes),
            Output::SendMessage { to, bytes } => self.send_parcel(id, to, Parcel::Message(bytes)),
            Output::SendFrame { to, header, payload } => match host.executor.give(payload) {
                Some(cargo) => self.send_parcel(id, to, Parcel::Frame(header, cargo)),
                None => panic!("host {} sends a tensor that it does not hold: {header:?}", id.0),
            },
            Output::Connect { node, .. } => self.connect(id, node, true),
            Output::Disconnect { node } => self.disconnect(id, node),
            Output::Sign { token, bytes } => {
                let signature = sign(&host.peer_id, &bytes);
                self.answer(id, self.options.signature, Input::Signed { token, signature });
            }
            Output::Verify { token, peer_id, bytes, signature } => {
                let valid = sign(&peer_id, &bytes) == signature;
                self.answer(id, self.options.signature, Input::Verified { token, valid });
            }
            Output::Plan { token, work, fleet, options, repair } => {
                let result = match repair {
                    Some(current) => partitioner::repair(&current, &work, &fleet, &options),
                    None => partitioner::plan(&work, &fleet, &options),
                };
                let result = result.map(Box::new);
                self.answer(id, self.options.plan, Input::Planned { token, result });
            }
            Output::Load { job, epoch, load, stage } => {
                let answer = host.executor.load(now, job, epoch, load, *stage);
                self.answer_at(id, answer);
                self.measure_memory(id);
            }
            Output::Keep { job, epoch, load, .. } => {
                let answer = host.executor.keep(now, job, epoch, load);
                self.answer_at(id, answer);
            }
            Output::Unload { job } => {
                host.executor.unload(job);
                self.measure_memory(id);
            }
            Output::Compute { work, job, epoch, items } => {
                if let Some(answer) = host.executor.compute(now, work, job, epoch, items) {
                    self.answer_at(id, answer);
                }
            }
            Output::Release { job, request } => host.executor.release(job, request),
            Output::Discard { tensor } => host.executor.discard(tensor),
            Output::Persist { seq, record } => {
                host.disk.write(seq, record);
                self.queue.push(now + self.options.sync, Happening::Synced { host: id, life: host.life, seq });
            }
            Output::Notify(event) => self.told.push(Told { at: now, host: id, event }),
        }
    }

    /// The shell notices a while later what its device has left.
    fn measure_memory(&mut self, id: HostId) {
        let host = &self.hosts[id.index()];
        let memory_free = host.executor.memory_free();
        let capacity = Capacity { memory_free, ..host.spec.capacity.clone() };
        self.answer(id, MEASURE, Input::CapacityChanged(capacity));
    }

    fn send_datagram(&mut self, from: HostId, addr: SocketAddr, bytes: Vec<u8>) {
        assert!(bytes.len() <= node_core::limits::DATAGRAM_BYTES_MAX, "a datagram of {} bytes", bytes.len());
        let Some(to) = self.by_addr.get(&addr).copied() else { return };
        let [first, second] = self.network.datagram(self.now, from, to);
        if let Some(at) = second {
            self.queue.push(at, Happening::Datagram { from, to, bytes: bytes.clone() });
        }
        if let Some(at) = first {
            self.queue.push(at, Happening::Datagram { from, to, bytes });
        }
    }

    // ---- connections

    /// Dial unless a connection stands or is being made. `wanted` by the core: it hears of one that already stands.
    fn connect(&mut self, from: HostId, node: NodeId, wanted: bool) {
        let Some(to) = self.host_of(node).filter(|to| *to != from) else { return };
        let pair = pair(from, to);
        let lives = (self.hosts[pair.0.index()].life, self.hosts[pair.1.index()].life);
        if let Some(connection) = self.network.connection(pair) {
            if connection.lives == lives {
                if connection.up && wanted {
                    let rtt_ns = self.network.rtt(from, to).as_nanos() as u64;
                    self.answer(from, Duration::ZERO, Input::Connected { node, rtt_ns });
                }
                return;
            }
            self.break_connection(pair);
        }
        let open = self.network.reaches(from, to) && self.network.reaches(to, from) && self.hosts[to.index()].runs();
        let id = self.network.dial(pair, lives);
        let after = if open { self.network.rtt(from, to) * 3 / 2 } else { self.options.connect_timeout };
        self.queue.push(self.now + after, Happening::Handshake { pair, id });
    }

    fn handshake(&mut self, pair: Pair, id: u64) {
        if self.network.connection(pair).is_none_or(|connection| connection.id != id) {
            return;
        }
        if !self.is_sound(pair) {
            self.break_connection(pair);
            return;
        }
        self.network.establish(pair);
        let rtt_ns = self.network.rtt(pair.0, pair.1).as_nanos() as u64;
        for (host, other) in [(pair.0, pair.1), (pair.1, pair.0)] {
            let node = self.hosts[other.index()].node_id;
            self.deliver(host, Input::Connected { node, rtt_ns });
        }
        self.send_held(pair);
    }

    /// Both ends live on as they were and hear each other.
    fn is_sound(&self, pair: Pair) -> bool {
        let (a, b) = (&self.hosts[pair.0.index()], &self.hosts[pair.1.index()]);
        let moves = |host: &Host| host.runs() && host.paused_until.is_none();
        self.network.connection(pair).is_some_and(|connection| connection.lives == (a.life, b.life))
            && moves(a)
            && moves(b)
            && self.network.reaches(pair.0, pair.1)
            && self.network.reaches(pair.1, pair.0)
    }

    fn break_connection(&mut self, pair: Pair) {
        let Some(connection) = self.network.remove(pair) else { return };
        let ends = [(pair.0, pair.1, connection.lives.0), (pair.1, pair.0, connection.lives.1)];
        for (host, other, life) in ends {
            let node = self.hosts[other.index()].node_id;
            if self.hosts[host.index()].life == life {
                self.deliver(host, Input::Disconnected { node });
            }
        }
    }

    fn disconnect(&mut self, from: HostId, node: NodeId) {
        let Some(to) = self.host_of(node) else { return };
        let pair = pair(from, to);
        if self.network.remove(pair).is_some() {
            let node = self.hosts[from.index()].node_id;
            self.answer(to, self.network.rtt(from, to) / 2, Input::Disconnected { node });
        }
    }

    fn send_parcel(&mut self, from: HostId, node: NodeId, parcel: Parcel) {
        let Some(to) = self.host_of(node) else { return };
        assert!(to != from, "a node does not send to itself");
        self.connect(from, node, false);
        self.post(from, to, parcel);
    }

    fn post(&mut self, from: HostId, to: HostId, parcel: Parcel) {
        let pair = pair(from, to);
        let Some(id) = self.network.connection(pair).map(|connection| connection.id) else { return };
        match self.network.send(self.now, from, to, parcel) {
            Some((at, number, parcel)) => self.queue.push(at, Happening::Parcel { pair, id, from, number, parcel }),
            None => self.watch_idle(pair),
        }
    }

    fn arrive(&mut self, pair: Pair, id: u64, from: HostId, number: u64, parcel: Parcel) {
        let to = if pair.0 == from { pair.1 } else { pair.0 };
        let Some(connection) = self.network.connection(pair).filter(|connection| connection.id == id) else { return };
        let life = if to == pair.0 { connection.lives.0 } else { connection.lives.1 };
        if self.hosts[to.index()].life != life || !self.hosts[to.index()].runs() {
            return;
        }
        if !self.network.reaches(from, to) {
            self.network.hold(from, to, number, parcel);
            self.watch_idle(pair);
            return;
        }
        let sender = self.hosts[from.index()].node_id;
        let input = match parcel {
            Parcel::Message(bytes) => Input::Message { from: sender, bytes },
            Parcel::Frame(header, cargo) => {
                let tensor = self.receive(to, cargo);
                Input::Frame { from: sender, header, tensor }
            }
        };
        self.deliver(to, input);
    }

    fn receive(&mut self, host: HostId, cargo: Cargo) -> TensorId {
        self.hosts[host.index()].executor.take(cargo)
    }

    fn watch_idle(&mut self, pair: Pair) {
        if let Some(id) = self.network.connection(pair).filter(|connection| connection.up).map(|c| c.id) {
            self.queue.push(self.now + self.options.idle_timeout, Happening::Idle { pair, id });
        }
    }

    fn idle(&mut self, pair: Pair, id: u64) {
        if self.network.connection(pair).is_some_and(|connection| connection.id == id) {
            if self.is_sound(pair) {
                self.send_held(pair);
            } else {
                self.break_connection(pair);
            }
        }
    }

    fn send_held(&mut self, pair: Pair) {
        for (from, to, parcel) in self.network.take_held(pair) {
            self.post(from, to, parcel);
        }
    }

    // ---- faults

    fn fault(&mut self, fault: Fault) {
        self.trace.fault(self.now, &fault);
        match fault {
            Fault::Crash(id) => {
                let host = &mut self.hosts[id.index()];
                host.node = None;
                host.paused_until = None;
                host.inbox.clear();
                host.disk.crash();
                self.watch_idle_all(self.network.pairs_of(id));
            }
            Fault::Restart { host: id, keep_disk } => {
                if !keep_disk {
                    self.hosts[id.index()].disk = Default::default();
                }
                self.start(id);
            }
            Fault::Pause { host: id, lasts } => {
                let until = self.now + lasts;
                let host = &mut self.hosts[id.index()];
                if host.runs() {
                    host.paused_until = Some(host.paused_until.map_or(until, |old| old.max(until)));
                    self.queue.push(until, Happening::Resume { host: id, life: host.life });
                    self.watch_idle_all(self.network.pairs_of(id));
                }
            }
            Fault::Partition { from, to, both } => {
                self.network.cut(&from, &to);
                if both {
                    self.network.cut(&to, &from);
                }
                self.watch_idle_all(self.network.pairs());
            }
            Fault::Heal => {
                self.network.heal();
                for pair in self.network.pairs() {
                    if self.network.connection(pair).is_some_and(|connection| connection.up) {
                        self.send_held(pair);
                    }
                }
            }
            Fault::Break(a, b) => self.break_connection(pair(a, b)),
            Fault::Device { host, failures } => self.hosts[host.index()].executor.failures += failures,
            Fault::Loss(ppm) => self.network.set_loss(ppm),
            Fault::Leave(id) => self.deliver(id, Input::Leave),
        }
    }

    fn watch_idle_all(&mut self, pairs: Vec<Pair>) {
        for pair in pairs {
            self.watch_idle(pair);
        }
    }
}

/// Peers remembered on disk are found again at start.
fn found_again(record: &Record) -> Vec<Input> {
    match record {
        Record::Peers(peers) => peers
            .iter()
            .cloned()
            .map(|(node, peer_id, gossip, data)| Input::PeerFound { node, peer_id, gossip, data })
            .collect(),
        Record::Epoch { .. } => Vec::new(),
    }
}

/// A signature that only fits its key and its bytes. Nobody in this world forges; tests that do change a byte.
fn sign(peer_id: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new_derive_key("simnet signature");
    hasher.update(peer_id);
    hasher.update(bytes);
    hasher.finalize().as_bytes().to_vec()
}

/// Time until a change of free memory is noticed.
const MEASURE: Duration = Duration::from_millis(10);
/// What a paused host's socket buffers hold; beyond that datagrams are lost.
const INBOX_MAX: usize = 4096;
