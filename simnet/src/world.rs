//! The simulated world: hosts driven by an event queue, with the real driver's loop around each node.
//!
//! The loop is `world/driver.rs`: handle the inputs that have arrived, carry out outputs until there are none, arm the next
//! wakeup. Next: `network.rs`.
mod connections;
mod driver;
mod faults;
mod forgery;
mod grids;
mod links;
mod weights;

use crate::disk::Record;
use crate::faults::{Fault, Schedule};
use crate::host::{Arrival, Host, HostId, HostSpec};
use crate::network::{Network, Pair, Parcel};
use crate::options::{Options, chance};
use crate::queue::Queue;
use crate::trace::Trace;
use faults::{Ambush, End};
use forgery::Known;
use links::{GLANCE, Links};
use node_core::id::{JobId, NodeId, PartId};
use node_core::input::Input;
use node_core::node::Node;
use node_core::output::{Event as Notice, Output};
use node_core::record;
use node_core::time::{Duration, Instant};
use node_core::work::steps::SaveKind;
use node_core::work::{Contact, PartWork, Run, Task};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use weights::{Purpose, Transfers};

/// An event that a node reported to its user.
#[derive(Clone, Debug)]
pub struct Notification {
    /// When.
    pub at: Instant,
    /// The host of the node.
    pub host: HostId,
    /// The event.
    pub event: Notice,
}

/// Observes all inputs and outputs of nodes, for checkers.
pub trait Observer {
    /// An input is about to be handled.
    fn input(&mut self, _at: Instant, _host: HostId, _input: &Input) {}
    /// A forged message or frame is about to be handled.
    fn forged(&mut self, _at: Instant, _host: HostId, _input: &Input) {}
    /// An output is about to be carried out.
    fn output(&mut self, _at: Instant, _host: HostId, _output: &Output) {}
    /// All outputs of the preceding inputs have been carried out.
    fn polled(&mut self, _at: Instant, _host: HostId) {}
    /// A fault is about to strike.
    fn fault(&mut self, _at: Instant, _fault: &Fault) {}
    /// A host's process has died.
    fn died(&mut self, _at: Instant, _host: HostId) {}
}

/// A world: its clock, its hosts, its network and its event queue.
pub struct World {
    options: Options,
    now: Instant,
    queue: Queue<Happening>,
    hosts: Vec<Host>,
    by_node: BTreeMap<NodeId, HostId>,
    by_addr: BTreeMap<SocketAddr, HostId>,
    network: Network,
    trace: Trace,
    told: Vec<Notification>,
    observers: Vec<Box<dyn Observer>>,
    ambushes: Vec<Ambush>,
    transfers: Transfers,
    links: Links,
    /// What misreporting members forge messages from, and their random stream.
    known: Known,
    forgery_chance: ChaCha8Rng,
    /// Random stream for the fate of unsynced writes in a crash.
    disk_chance: ChaCha8Rng,
    /// Events for the shells of paused hosts, delivered when they resume.
    stopped: Vec<(HostId, Happening)>,
    /// Banned nodes.
    banned: BTreeSet<NodeId>,
    /// Number of `Fault::Mend`s. Faults, and ends of faults, scheduled in an earlier era are dropped.
    era: u32,
    /// The discovery interval, if discovery is enabled.
    discovery: Option<Duration>,
    /// Reused, so that a step allocates nothing.
    outputs: Vec<Output>,
}

/// A queued event. Large payloads are boxed: the heap moves entries.
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
    /// A host's driver drains its inbox.
    Turn {
        host: HostId,
        life: u32,
    },
    /// The answer to a request of this life of the host.
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
        parcel: Box<Parcel>,
    },
    /// Idle timeout: checks whether a connection is broken.
    Idle {
        pair: Pair,
        id: u64,
    },
    Synced {
        host: HostId,
        life: u32,
    },
    /// A saved tile state arrives.
    Collect {
        host: HostId,
        life: u32,
        from: NodeId,
        state: (JobId, PartId, u32, SaveKind),
    },
    /// A checkpoint arrives from another coordinator.
    Mirror {
        host: HostId,
        life: u32,
        from: NodeId,
        name: (JobId, u32),
    },
    /// Periodic check of a weight transfer.
    Transfer {
        id: u64,
    },
    /// Periodic check whether link measurements are due.
    Glance,
    /// A link measurement ends.
    Measured {
        host: HostId,
        life: u32,
        other: HostId,
        connection: u64,
    },
    /// A misreporting member forges a message.
    Forge {
        era: u32,
        host: HostId,
    },
    /// A forged message arrives.
    Forged {
        host: HostId,
        life: u32,
        input: Box<Input>,
    },
    /// Dropped if it has an era and that is over.
    Fault {
        era: Option<u32>,
        fault: Box<Fault>,
    },
    End {
        era: u32,
        end: End,
    },
    Discovery,
}

impl World {
    /// An empty world.
    pub fn new(options: Options) -> Self {
        let mut queue = Queue::new();
        queue.push(Instant(0) + GLANCE, Happening::Glance);
        World {
            network: Network::new(options.clone()),
            links: Links::default(),
            known: Known::default(),
            forgery_chance: chance(options.seed, "lies"),
            disk_chance: chance(options.seed, "unsynced writes"),
            options,
            now: Instant(0),
            queue,
            hosts: Vec::new(),
            by_node: BTreeMap::new(),
            by_addr: BTreeMap::new(),
            trace: Trace::default(),
            told: Vec::new(),
            observers: Vec::new(),
            ambushes: Vec::new(),
            transfers: Transfers::default(),
            stopped: Vec::new(),
            banned: BTreeSet::new(),
            era: 0,
            discovery: None,
            outputs: Vec::new(),
        }
    }

    // ---- building

    /// Adds a machine, not started yet.
    pub fn add_host(&mut self, spec: HostSpec) -> HostId {
        let id = HostId(u32::try_from(self.hosts.len()).expect("fewer than 2^32 hosts"));
        self.network.add_host(spec.region);
        let host = Host::new(id, spec);
        self.by_node.insert(host.node_id, id);
        self.by_addr.insert(host.gossip_addr, id);
        self.hosts.push(host);
        id
    }

    /// Adds `n` machines of one kind.
    pub fn add_hosts(&mut self, n: usize, spec: &HostSpec) -> Vec<HostId> {
        (0..n).map(|_| self.add_host(spec.clone())).collect()
    }

    /// Starts a host's process, with the peers stored on its disk.
    pub fn start(&mut self, id: HostId) {
        let seed = self.options.seed ^ (u64::from(id.0) << 32 | u64::from(self.hosts[id.index()].life) << 16);
        let now = self.now;
        let host = &mut self.hosts[id.index()];
        if host.runs() {
            return;
        }
        if host.disk.full {
            // The generation cannot be made durable, so the node must not send anything; the service manager retries.
            return self.later(START_AGAIN, Fault::Restart { host: id, keep_disk: true });
        }
        host.life += 1;
        host.leaves = false;
        host.paused_until = None;
        host.inbox.clear();
        (host.wake_at, host.turn_at, host.busy_until) = (None, None, now);
        host.executor.reset(&host.spec);
        let config = host.config(now);
        if let Some(recording) = &mut host.recording {
            *recording = record::begin(&config, seed, concat!("simnet ", env!("CARGO_PKG_VERSION")));
        }
        host.node = Some(Node::new(config, seed));
        let remembered: Vec<Input> = host.disk.peers().iter().cloned().map(found_again).collect();
        for input in remembered {
            self.inject(id, input);
        }
        self.announce_holdings(id);
        let own = self.hosts[id.index()].node_id;
        let banned: Vec<NodeId> = self.banned.iter().copied().filter(|node| *node != own).collect();
        if !banned.is_empty() {
            self.inject(id, Input::Banned(banned));
        }
        self.inject(id, Input::Wakeup);
    }

    /// Makes a host find another one, as a ticket or discovery does.
    pub fn introduce(&mut self, id: HostId, to: HostId) {
        let other = &self.hosts[to.index()];
        let input = Input::PeerFound {
            node: other.node_id,
            peer_id: other.peer_id.clone(),
            gossip: vec![other.gossip_addr],
            data: vec![other.data_addr],
            remembered: true,
        };
        self.inject(id, input);
    }

    /// Records a host's inputs from its next start on, as `meshnode up --record` does.
    pub fn record(&mut self, id: HostId) {
        self.hosts[id.index()].recording = Some(Vec::new());
    }

    /// Enables periodic discovery, as multicast and tickets provide it: no host stays isolated for long.
    pub fn discover(&mut self, every: Duration) {
        if self.discovery.replace(every).is_none() {
            self.queue.push(self.now + every, Happening::Discovery);
        }
    }

    fn find_each_other(&mut self) {
        let Some(every) = self.discovery else { return };
        for index in 1..self.hosts.len() {
            // Each host finds another one in rotation, so that two groups that forgot each other rejoin.
            let (a, b) = (HostId(index as u32), HostId((self.now.0 / 1_000_000_000 % index as u64) as u32));
            let both = self.hosts[a.index()].runs() && self.hosts[b.index()].runs();
            if both && self.reaches(b, a) && self.reaches(a, b) {
                self.introduce(a, b);
                self.introduce(b, a);
            }
        }
        self.queue.push(self.now + every, Happening::Discovery);
    }

    /// Attaches an observer.
    pub fn observe(&mut self, observer: Box<dyn Observer>) {
        self.observers.push(observer);
    }

    /// Schedules faults.
    pub fn schedule(&mut self, schedule: Schedule) {
        for timed in schedule {
            self.queue.push(timed.at.max(self.now), Happening::Fault { era: None, fault: Box::new(timed.fault) });
        }
    }

    /// Injects a fault now.
    pub fn strike(&mut self, fault: Fault) {
        self.queue.push(self.now, Happening::Fault { era: None, fault: Box::new(fault) });
    }

    /// Delivers an input to a host now, if it runs.
    pub fn inject(&mut self, id: HostId, input: Input) {
        self.answer(id, Duration::ZERO, input);
    }

    // ---- accessors

    /// The virtual clock.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// The world's parameters.
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

    /// One host, for device faults.
    pub fn host_mut(&mut self, id: HostId) -> &mut Host {
        &mut self.hosts[id.index()]
    }

    /// Which host a node runs on.
    pub fn host_of(&self, node: NodeId) -> Option<HostId> {
        self.by_node.get(&node).copied()
    }

    /// Whether traffic from one host to another gets through now.
    pub fn reaches(&self, from: HostId, to: HostId) -> bool {
        self.network.reaches(from, to)
    }

    /// Takes the events that nodes reported since the last call.
    pub fn take_notifications(&mut self) -> Vec<Notification> {
        std::mem::take(&mut self.told)
    }

    /// The trace of the run.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    // ---- running

    /// Runs the world for this time.
    pub fn run_for(&mut self, time: Duration) {
        self.run_until(self.now + time);
    }

    /// Runs the world up to this time.
    pub fn run_until(&mut self, until: Instant) {
        while let Some((at, happening)) = self.queue.pop_until(until) {
            self.now = at;
            self.happen(happening);
        }
        self.now = self.now.max(until);
    }

    /// Runs until `done` holds, checked every `step`; `false` if `limit` passes first.
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
            Happening::Turn { host, life } => self.turn(host, life),
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
            Happening::Parcel { pair, id, from, number, parcel } => self.arrive(pair, id, from, number, *parcel),
            Happening::Idle { pair, id } => self.idle(pair, id),
            Happening::Synced { host, life } => {
                if self.hosts[host.index()].life == life {
                    self.hosts[host.index()].disk.sync();
                }
            }
            Happening::Collect { host, life, from, state } => {
                if self.hosts[host.index()].life == life && self.hosts[host.index()].runs() {
                    self.collected(host, from, state);
                }
            }
            Happening::Mirror { host, life, from, name } => {
                if self.hosts[host.index()].life == life && self.hosts[host.index()].runs() {
                    self.mirror(host, from, name);
                }
            }
            Happening::Transfer { id } => self.transfer(id),
            Happening::Glance => self.glance_at_links(),
            Happening::Measured { host, life, other, connection } => {
                if self.hosts[host.index()].life == life {
                    self.measured(host, other, connection);
                }
            }
            Happening::Forge { era, host } => self.forge(era, host),
            Happening::Forged { host, life, input } => {
                if self.hosts[host.index()].life == life {
                    self.arrives(host, Arrival { input: *input, forged: true });
                }
            }
            Happening::Fault { era, fault } => {
                if era.is_none_or(|era| era == self.era) {
                    self.fault(*fault);
                }
            }
            Happening::End { era, end } => self.end(era, end),
            Happening::Discovery => self.find_each_other(),
        }
    }

    /// Queues the answer to a request of the host's current life.
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
        self.known.note(&output);
        let host = &mut self.hosts[id.index()];
        match output {
            Output::SendDatagram { to: _, addr, bytes } => self.send_datagram(id, addr, bytes),
            Output::SendMessage { to, bytes } => self.send_parcel(id, to, Parcel::Message(bytes)),
            Output::SendFrame { to, header, payload, copy } => match host.executor.give(payload) {
                Some(cargo) => self.send_parcel(id, to, Parcel::Frame(header, cargo, copy)),
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
            Output::Plan { asked, question } => {
                let answer = question.answer();
                self.answer(id, self.options.plan, Input::Planned { asked, answer });
            }
            Output::Load { job, epoch, load, order, replaces, sources } => match &order.work {
                PartWork::Stage(_) => {
                    match host.executor.reserve(now, job, epoch, load, &order, &replaces) {
                        Ok(()) => {
                            self.begin_transfer(id, Purpose::Load { job, part: order.part, load }, &order, &sources);
                        }
                        Err(refusal) => self.answer_at(id, *refusal),
                    }
                    self.measure_memory(id);
                }
                PartWork::Tile(_) => {
                    replaces.iter().for_each(|&part| host.executor.drop_part(job, part));
                    self.load_tile(id, (job, epoch), load, &order);
                }
            },
            Output::Restore { job, load, part, step } => self.restore_tile(id, (job, part), load, step),
            Output::Continue { job, epoch, order } => host.executor.keep(job, epoch, order.part),
            Output::Fetch { job, epoch, order, sources } => {
                self.begin_transfer(id, Purpose::Fetch { job, epoch, part: order.part }, &order, &sources);
            }
            Output::Challenge { job, epoch, part, nonce } => {
                if let Some(answer) = host.executor.challenge(now, (job, part), epoch, nonce) {
                    self.answer_at(id, answer);
                }
            }
            Output::Drop { job, part } => {
                host.executor.drop_part(job, part);
                self.measure_memory(id);
            }
            Output::Unload { job } => {
                host.executor.unload(job);
                self.measure_memory(id);
            }
            Output::Run(run) => self.run(id, *run),
            Output::Release { job, part, request } => host.executor.release(job, part, request),
            Output::Fork { job, part, from, to, positions } => host.executor.fork(job, part, from, to, positions),
            Output::Discard { tensor } => host.executor.discard(tensor),
            Output::Split { tensor, at, of: _, into } => host.executor.split(tensor, at, into),
            Output::Share { tensor, also } => host.executor.share(tensor, also),
            Output::Collect { job, from, part, step, kind, bytes } => {
                self.collect_state(id, from, (job, part, step, kind), bytes);
            }
            Output::Forget { job, part, step, kind } => host.executor.grids.forget(job, part, step, kind),
            Output::KeepCheckpoint { job, step } => self.keep_checkpoint(id, job, step),
            Output::Mirror { job, from, step, parts, simulation: _ } => {
                let bytes = parts.iter().map(|(_, bytes)| bytes).sum();
                self.mirror_checkpoint(id, from, (job, step), bytes);
            }
            Output::Remember { peers } => {
                // Best effort: the core does not wait for this write.
                let _ = self.write(id, Record::Peers(peers));
            }
            Output::Notify(event) => self.told.push(Notification { at: now, host: id, event }),
        }
    }

    /// `Output::Run`.
    fn run(&mut self, id: HostId, mut run: Run) {
        let (now, job, part, work) = (self.now, run.job, run.part, run.work);
        match std::mem::replace(&mut run.task, Task::Batch(Vec::new())) {
            Task::Batch(items) => {
                if let Some(answer) = self.hosts[id.index()].executor.compute(now, &run, items) {
                    self.answer_at(id, answer);
                }
            }
            Task::Steps(steps) => {
                let Some(times) = self.hosts[id.index()].executor.run_tile(now, &run, &steps) else { return };
                let sizes = times.sizes;
                if !sizes.is_empty() {
                    self.answer(id, times.halos_ready.since(now), Input::Halos { job, part, work, sizes });
                }
                self.answer(id, times.ends.since(now), times.done);
            }
        }
    }

    /// Writes to a host's disk; the sync follows.
    fn write(&mut self, id: HostId, record: Record) -> Result<(), String> {
        let host = &mut self.hosts[id.index()];
        host.disk.write(record)?;
        self.queue.push(self.now + self.options.sync, Happening::Synced { host: id, life: host.life });
        Ok(())
    }

    /// The shell reports the free memory of its devices, and which of them are gone, after a delay.
    pub(super) fn measure_memory(&mut self, id: HostId) {
        let host = &self.hosts[id.index()];
        let capacity = host.executor.capacity(&host.spec);
        self.answer(id, MEASURE, Input::CapacityChanged(capacity));
    }

    fn send_datagram(&mut self, from: HostId, addr: SocketAddr, bytes: Vec<u8>) {
        assert!(bytes.len() <= node_core::limits::DATAGRAM_BYTES_MAX, "a datagram of {} bytes", bytes.len());
        let Some(to) = self.by_addr.get(&addr).copied() else { return };
        let [first, second] = self.network.datagram(self.now, from, to, bytes.len());
        if let Some(at) = second {
            self.queue.push(at, Happening::Datagram { from, to, bytes: bytes.clone() });
        }
        if let Some(at) = first {
            let bytes = self.network.corrupted(bytes);
            self.queue.push(at, Happening::Datagram { from, to, bytes });
        }
    }
}

/// A restarted node finds the peers on its disk.
fn found_again(Contact { node, peer_id, gossip, data }: Contact) -> Input {
    Input::PeerFound { node, peer_id, gossip, data, remembered: true }
}

/// A signature that fits only its key and its bytes. No simulated member forges one; tests that need an invalid one change
/// a byte.
fn sign(peer_id: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new_derive_key("simnet signature");
    hasher.update(peer_id);
    hasher.update(bytes);
    hasher.finalize().as_bytes().to_vec()
}

/// Restart delay of a process that could not start.
const START_AGAIN: Duration = Duration::from_secs(1);
/// Delay until a change of free memory is noticed.
const MEASURE: Duration = Duration::from_millis(10);
