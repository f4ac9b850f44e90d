//! A fault-injecting network between the nodes of one machine: latency, loss, bandwidth limits and partitions on
//! command. Seeded, with traffic counters.
//!
//! Every node has a *front*: two ports (gossip P, data P + 1) that it advertises instead of its own. The relay forwards
//! a datagram sent to a front from the sender's front. So each node sees every other node at its advertised address,
//! answers pass through the relay, and the source address identifies the direction of a datagram.
use parking_lot::{Condvar, Mutex, MutexGuard};
use path::{Fate, Path};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use path::{Link, Passed, Random};

mod path;

/// One of a node's two ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Plane {
    /// P.
    Gossip,
    /// P + 1.
    Data,
}

const PLANES: [Plane; 2] = [Plane::Gossip, Plane::Data];

/// Index of a node in the relay, in the order of `add`.
pub type Place = usize;

/// The relay. Dropping it stops its threads.
pub struct Relay {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Signals that a datagram is due earlier than before, or that the relay stops.
    sooner: Condvar,
}

struct State {
    seed: u64,
    nodes: Vec<Node>,
    /// By sender and receiver.
    paths: BTreeMap<(Place, Place), Direction>,
    /// Nodes disconnected from all others.
    isolated: BTreeSet<Place>,
    waiting: BinaryHeap<Parcel>,
    /// Parcels ever queued; a parcel's number breaks ties in the heap.
    parcels: u64,
    stopped: bool,
}

struct Node {
    /// Gossip port P of the process.
    port: u16,
    front: [Arc<UdpSocket>; 2],
}

struct Direction {
    path: Path,
    /// By plane.
    passed: [Passed; 2],
    /// Parcels of this direction in the heap: while there are any, no datagram may overtake them.
    waiting: usize,
}

/// A delayed datagram.
struct Parcel {
    due: Instant,
    number: u64,
    direction: (Place, Place),
    socket: Arc<UdpSocket>,
    to: SocketAddr,
    bytes: Vec<u8>,
}

impl Relay {
    /// A relay without nodes; `seed` determines which datagrams are lost.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(seed: u64) -> io::Result<Self> {
        let state = State {
            seed,
            nodes: Vec::new(),
            paths: BTreeMap::new(),
            isolated: BTreeSet::new(),
            waiting: BinaryHeap::new(),
            parcels: 0,
            stopped: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), sooner: Condvar::new() });
        let clock = shared.clone();
        let thread = std::thread::Builder::new().name("relay clock".into()).spawn(move || clock.deliver())?;
        Ok(Self { shared, threads: vec![thread] })
    }

    /// Adds a node that will listen on 127.0.0.1, UDP `port` and `port + 1`. Call it before the node starts, because
    /// the node joins through the relay. Returns its index and the address to advertise.
    ///
    /// # Errors
    /// No free ports, or no thread can be started.
    pub fn add(&mut self, port: u16) -> io::Result<(Place, SocketAddr)> {
        let (gossip, data) = front()?;
        let addr = gossip.local_addr()?;
        let front = [Arc::new(gossip), Arc::new(data)];
        let place = {
            let mut state = self.shared.lock();
            state.nodes.push(Node { port, front: front.clone() });
            let (new, seed) = (state.nodes.len() - 1, state.seed);
            for other in 0..new {
                for (from, to) in [(other, new), (new, other)] {
                    let own = Random(seed ^ ((from as u64) << 32 | to as u64)).bits();
                    let path = Path::new(Link::PLAIN, own);
                    state.paths.insert((from, to), Direction { path, passed: [Passed::default(); 2], waiting: 0 });
                }
            }
            new
        };
        for (plane, socket) in PLANES.into_iter().zip(front) {
            socket.set_read_timeout(Some(STOP_CHECK))?;
            let shared = self.shared.clone();
            let name = format!("relay {place} {plane:?}");
            self.threads
                .push(std::thread::Builder::new().name(name).spawn(move || shared.receive(place, plane, &socket))?);
        }
        Ok((place, addr))
    }

    /// Sets the link from one node to another.
    pub fn link(&self, from: Place, to: Place, link: Link) {
        self.shared.with_path(from, to, |path| path.link = link);
    }

    /// Sets the links of all directions.
    pub fn links(&self, link: Link) {
        self.shared.lock().paths.values_mut().for_each(|d| d.path.link = link);
    }

    /// Cuts or restores the direction from one node to another.
    pub fn cut(&self, from: Place, to: Place, cut: bool) {
        self.shared.with_path(from, to, |path| path.cut = cut);
    }

    /// Cuts or restores all traffic to and from a node.
    pub fn isolate(&self, node: Place, cut: bool) {
        let mut state = self.shared.lock();
        let State { isolated, .. } = &mut *state;
        if cut {
            isolated.insert(node)
        } else {
            isolated.remove(&node)
        };
    }

    /// Traffic from one node to another on one plane.
    pub fn passed(&self, from: Place, to: Place, plane: Plane) -> Passed {
        self.shared.lock().paths.get(&(from, to)).map(|d| d.passed[plane as usize]).unwrap_or_default()
    }

    /// Traffic between all nodes on one plane.
    pub fn passed_in_all(&self, plane: Plane) -> Passed {
        self.shared.lock().paths.values().map(|d| d.passed[plane as usize]).fold(Passed::default(), |a, b| a + b)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.lock().stopped = true;
        self.shared.sooner.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// How often a thread checks whether to stop.
const STOP_CHECK: Duration = Duration::from_millis(100);
/// Larger than any datagram.
const DATAGRAM_BYTES_MAX: usize = 64 << 10;

impl Shared {
    /// Receives the datagrams that other nodes send to the front of `to`.
    fn receive(&self, to: Place, plane: Plane, socket: &UdpSocket) {
        let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
        loop {
            let received = socket.recv_from(&mut buffer);
            let mut state = self.lock();
            if state.stopped {
                return;
            }
            // A timeout, or the ICMP error of a closed port.
            let Ok((length, source)) = received else { continue };
            let Some(ready) = state.take(to, plane, source, &buffer[..length]) else { continue };
            match ready {
                Ready::Now(socket, to) => {
                    drop(state);
                    let _ = socket.send_to(&buffer[..length], to);
                }
                Ready::Later { first: true } => {
                    self.sooner.notify_one();
                }
                Ready::Later { first: false } => {}
            }
        }
    }

    /// Forwards datagrams that are due, until the relay stops.
    fn deliver(&self) {
        let mut state = self.lock();
        while !state.stopped {
            let now = Instant::now();
            let wait = match state.waiting.peek() {
                Some(parcel) if parcel.due <= now => {
                    if let Some(parcel) = state.waiting.pop() {
                        // Under the lock, so that no datagram of this direction overtakes it.
                        let _ = parcel.socket.send_to(&parcel.bytes, parcel.to);
                        if let Some(direction) = state.paths.get_mut(&parcel.direction) {
                            direction.waiting -= 1;
                        }
                    }
                    continue;
                }
                Some(parcel) => parcel.due - now,
                None => STOP_CHECK,
            };
            self.sooner.wait_for(&mut state, wait);
        }
    }

    fn with_path(&self, from: Place, to: Place, change: impl FnOnce(&mut Path)) {
        let mut state = self.lock();
        change(&mut state.paths.get_mut(&(from, to)).expect("two different nodes of this relay").path);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// A datagram that is not dropped.
enum Ready {
    /// To be sent immediately.
    Now(Arc<UdpSocket>, SocketAddr),
    /// Queued in the heap; `first`: it is due before all others.
    Later { first: bool },
}

impl State {
    /// `None` if the datagram is dropped.
    fn take(&mut self, to: Place, plane: Plane, source: SocketAddr, bytes: &[u8]) -> Option<Ready> {
        let port = |node: &Node| node.port + plane as u16;
        let from = self.nodes.iter().position(|node| port(node) == source.port())?;
        let (now, isolated) = (Instant::now(), self.isolated.contains(&from) || self.isolated.contains(&to));
        let direction = self.paths.get_mut(&(from, to))?;
        let passed = &mut direction.passed[plane as usize];
        let due = match direction.path.take(now, bytes.len()) {
            Fate::Cut => return note(&mut passed.cut),
            Fate::Arrives(_) if isolated => return note(&mut passed.cut),
            Fate::Lost => return note(&mut passed.lost),
            Fate::Overflowed => return note(&mut passed.overflowed),
            Fate::Arrives(due) => due,
        };
        passed.datagrams += 1;
        passed.bytes += bytes.len() as u64;
        let socket = self.nodes[from].front[plane as usize].clone();
        let to_addr = SocketAddr::from((Ipv4Addr::LOCALHOST, port(&self.nodes[to])));
        if due <= now && direction.waiting == 0 {
            return Some(Ready::Now(socket, to_addr));
        }
        direction.waiting += 1;
        let first = self.waiting.peek().is_none_or(|parcel| due < parcel.due);
        let (number, direction, bytes) = (self.parcels, (from, to), bytes.to_vec());
        self.parcels += 1;
        self.waiting.push(Parcel { due, number, direction, socket, to: to_addr, bytes });
        Some(Ready::Later { first })
    }
}

fn note(counter: &mut u64) -> Option<Ready> {
    *counter += 1;
    None
}

/// Two free consecutive ports.
fn front() -> io::Result<(UdpSocket, UdpSocket)> {
    for _ in 0..100 {
        let gossip = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = gossip.local_addr()?.port();
        if let Some(Ok(data)) = port.checked_add(1).map(|next| UdpSocket::bind((Ipv4Addr::LOCALHOST, next))) {
            return Ok((gossip, data));
        }
    }
    Err(io::Error::other("no free ports on 127.0.0.1"))
}

/// Reversed, so that the heap's maximum is the parcel due first.
impl Ord for Parcel {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.due, other.number).cmp(&(self.due, self.number))
    }
}

impl PartialOrd for Parcel {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Parcel {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Parcel {}

#[cfg(test)]
mod tests;
