//! Sealed datagrams between members, on a socket and a thread of their own, so that they never wait behind weights.
use crate::identity::NodeId;
use crate::socket::{self, BindError, Buffers};
use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use thiserror::Error;

pub use seal::{Opener, SealError, Sealer, Unsealed};

mod seal;

/// Largest packet on the wire: fits any path without fragmentation (IPv6's minimum of 1280 less its headers).
pub const PACKET_BYTES_MAX: usize = 1200;
/// Largest payload of one: the packet less what the seal adds.
pub const PAYLOAD_BYTES_MAX: usize = PACKET_BYTES_MAX - seal::OVERHEAD;

/// The gossip socket of a node. Dropping it stops its thread.
pub struct GossipSocket {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    local_addr: SocketAddr,
    buffers: Buffers,
}

struct Shared {
    socket: UdpSocket,
    sealer: RwLock<Sealer>,
    /// Keys that this life sealed with before, by their hash, and how many nonces each has used.
    retired: Mutex<BTreeMap<[u8; 32], u64>>,
    /// Whose life the seals are of.
    node: NodeId,
    generation: u64,
    /// A key that the thread is to open with from now on.
    next_key: Mutex<Option<[u8; 32]>>,
    rekeyed: AtomicBool,
    stop: AtomicBool,
    sent: AtomicU64,
    received: AtomicU64,
    refused: AtomicU64,
}

/// What passed so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GossipStats {
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams opened.
    pub received: u64,
    /// Datagrams that were not sealed by a member for us, or replayed.
    pub refused: u64,
}

impl GossipSocket {
    /// Binds `addr` and starts the thread that gives every opened datagram to `incoming` as (sender, address, payload).
    /// `incoming` should hand over and return: while it runs, nothing is received.
    ///
    /// # Errors
    /// The port is taken, or the address is not one of this machine.
    pub fn spawn(
        addr: SocketAddr,
        node: NodeId,
        generation: u64,
        mesh_key: &[u8; 32],
        incoming: impl Fn(NodeId, SocketAddr, Vec<u8>) + Send + 'static,
    ) -> Result<Self, BindError> {
        let (socket, buffers) = socket::bind_udp(addr)?;
        let io = |error| BindError::Io { addr, error };
        socket.set_read_timeout(Some(STOP_CHECK)).map_err(io)?;
        // A full send buffer drops the datagram (gossip may be lost) instead of holding up the caller.
        socket.set_write_timeout(Some(SEND_WAIT_MAX)).map_err(io)?;
        let local_addr = socket.local_addr().map_err(io)?;
        let sealer = Sealer::new(mesh_key, node, generation);
        let counters = || AtomicU64::new(0);
        let (sent, received, refused) = (counters(), counters(), counters());
        let shared = Arc::new(Shared {
            socket,
            sealer: RwLock::new(sealer),
            retired: Mutex::default(),
            node,
            generation,
            next_key: Mutex::default(),
            rekeyed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sent,
            received,
            refused,
        });
        let opener = Opener::new(mesh_key, node);
        let worker = shared.clone();
        let thread =
            thread::Builder::new().name("gossip".into()).spawn(move || worker.receive(opener, incoming)).map_err(io)?;
        Ok(Self { shared, thread: Some(thread), local_addr, buffers })
    }

    /// Seals `payload` for `to` and sends it to `addr`. Never blocks for longer than a millisecond.
    ///
    /// # Errors
    /// The payload is too long, or the system refused the datagram.
    pub fn send(&self, to: &NodeId, addr: SocketAddr, payload: &[u8]) -> Result<(), GossipError> {
        if payload.len() > PAYLOAD_BYTES_MAX {
            return Err(GossipError::TooLong { bytes: payload.len() });
        }
        let sealed = self.shared.sealer.read().unwrap_or_else(PoisonError::into_inner).seal(to, payload);
        let packet = sealed.ok_or(GossipError::Spent)?;
        self.shared.socket.send_to(&packet, self.reachable(addr)).map_err(|error| GossipError::Io { addr, error })?;
        self.shared.sent.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Opens what is sealed with this key of the mesh from now on, and for [`OVERLAP`] still what is sealed with the last.
    pub fn open_with(&self, mesh_key: &[u8; 32]) {
        *self.shared.next_key.lock().unwrap_or_else(PoisonError::into_inner) = Some(*mesh_key);
        self.shared.rekeyed.store(true, Ordering::Release);
    }

    /// Seals with this key of the mesh from now on: once the others can be expected to have it too.
    /// A key that comes back goes on with its nonces, so that none seals twice.
    pub fn seal_with(&self, mesh_key: &[u8; 32]) {
        let mut sealer = self.shared.sealer.write().unwrap_or_else(PoisonError::into_inner);
        let next = Sealer::new(mesh_key, self.shared.node, self.shared.generation);
        if next.key_hash() == sealer.key_hash() {
            return;
        }
        let mut retired = self.shared.retired.lock().unwrap_or_else(PoisonError::into_inner);
        if retired.len() < RETIRED_MAX || retired.contains_key(&sealer.key_hash()) {
            retired.insert(sealer.key_hash(), sealer.used());
            let used = retired.get(&next.key_hash()).copied().unwrap_or(0);
            *sealer = next.after(used);
        }
    }

    /// An IPv6 socket reaches IPv4 peers by their mapped address.
    fn reachable(&self, addr: SocketAddr) -> SocketAddr {
        match (self.local_addr, addr.ip()) {
            (SocketAddr::V6(_), IpAddr::V4(ip)) => SocketAddr::new(ip.to_ipv6_mapped().into(), addr.port()),
            (SocketAddr::V6(_) | SocketAddr::V4(_), _) => addr,
        }
    }

    /// Whether its thread still receives: it ends early only by a panic, also one of what it hands packets to.
    pub fn runs(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Kernel buffers, as asked for and as granted.
    pub fn buffers(&self) -> Buffers {
        self.buffers
    }

    /// What passed so far.
    pub fn stats(&self) -> GossipStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let shared = &self.shared;
        GossipStats { sent: load(&shared.sent), received: load(&shared.received), refused: load(&shared.refused) }
    }
}

impl Drop for GossipSocket {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn receive(&self, mut opener: Opener, incoming: impl Fn(NodeId, SocketAddr, Vec<u8>)) {
        // One byte more than allowed, so that a longer packet is seen to be longer.
        let mut packet = [0; PACKET_BYTES_MAX + 1];
        let mut last: Option<(Opener, Instant)> = None;
        while !self.stop.load(Ordering::Acquire) {
            let (length, source) = match self.socket.recv_from(&mut packet) {
                Ok(received) => received,
                // The timeout for the stop check; or the ICMP answer to an earlier send, which SWIM finds out itself.
                Err(error) if is_passing(&error) => continue,
                Err(error) => {
                    tracing::warn!(%error, "gossip socket");
                    thread::sleep(STOP_CHECK);
                    continue;
                }
            };
            if self.rekeyed.swap(false, Ordering::AcqRel)
                && let Some(key) = self.next_key.lock().unwrap_or_else(PoisonError::into_inner).take()
            {
                last = Some((std::mem::replace(&mut opener, Opener::new(&key, self.node)), Instant::now()));
            }
            let opened = match (opener.open(&packet[..length]), &mut last) {
                (Err(SealError::Forged), Some((last, since))) if since.elapsed() < OVERLAP => {
                    last.open(&packet[..length])
                }
                (opened, _) => opened,
            };
            match opened {
                Ok(Unsealed { from, payload }) => {
                    self.received.fetch_add(1, Ordering::Relaxed);
                    incoming(from, SocketAddr::new(source.ip().to_canonical(), source.port()), payload);
                }
                Err(error) => {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    tracing::trace!(%source, %error, "gossip datagram refused");
                }
            }
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, Interrupted, TimedOut, WouldBlock};
    [WouldBlock, TimedOut, ConnectionRefused, ConnectionReset, Interrupted].contains(&error.kind())
}

/// How long the last key of the mesh still opens: everybody has the new one by then, or asks for it.
pub const OVERLAP: Duration = Duration::from_secs(10);
/// Keys remembered; one more change is not sealed with, because which nonces it used would be forgotten.
const RETIRED_MAX: usize = 65_536;
/// How often the thread looks whether it should stop.
const STOP_CHECK: Duration = Duration::from_millis(50);
/// Longest wait for room in the kernel's send buffer.
const SEND_WAIT_MAX: Duration = Duration::from_millis(1);

/// Why a datagram was not sent.
#[derive(Debug, Error)]
pub enum GossipError {
    /// It would not fit a packet.
    #[error("a datagram of {bytes} bytes, at most {PAYLOAD_BYTES_MAX} fit a packet")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// 2^64 datagrams were sent in one life.
    #[error("this generation's nonces are spent; restart the node")]
    Spent,
    /// The system refused it.
    #[error("cannot send to {addr}: {error}")]
    Io {
        /// Where to.
        addr: SocketAddr,
        /// What it said.
        error: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const KEY: [u8; 32] = [3; 32];

    fn local() -> SocketAddr {
        "127.0.0.1:0".parse().unwrap()
    }

    #[test]
    fn datagrams_arrive_and_strangers_are_counted() {
        let (tell, told) = mpsc::channel();
        let a = GossipSocket::spawn(local(), [1; 16], 1, &KEY, move |from, source, payload| {
            tell.send((from, source, payload)).unwrap();
        })
        .unwrap();
        let b = GossipSocket::spawn(local(), [2; 16], 1, &KEY, |_, _, _| {}).unwrap();
        let largest = vec![7; PAYLOAD_BYTES_MAX];
        b.send(&[1; 16], a.local_addr(), &largest).unwrap();
        assert_eq!(told.recv().unwrap(), ([2; 16], b.local_addr(), largest));
        let longer = vec![7; PAYLOAD_BYTES_MAX + 1];
        assert!(matches!(b.send(&[1; 16], a.local_addr(), &longer), Err(GossipError::TooLong { .. })));

        // A stranger's key, a datagram for somebody else, and no seal at all; then one that shows all were seen.
        let stranger = GossipSocket::spawn(local(), [2; 16], 2, &[4; 32], |_, _, _| {}).unwrap();
        stranger.send(&[1; 16], a.local_addr(), b"let me in").unwrap();
        b.send(&[9; 16], a.local_addr(), b"not for you").unwrap();
        let plain = UdpSocket::bind(local()).unwrap();
        plain.send_to(&[0; 2000], a.local_addr()).unwrap();
        b.send(&[1; 16], a.local_addr(), b"still here").unwrap();
        assert_eq!(told.recv().unwrap().2, b"still here");
        assert_eq!(a.stats(), GossipStats { sent: 0, received: 2, refused: 3 });
    }

    #[test]
    fn a_socket_whose_thread_has_panicked_says_so() {
        let a = GossipSocket::spawn(local(), [1; 16], 1, &KEY, |_, _, _| panic!("on purpose")).unwrap();
        let b = GossipSocket::spawn(local(), [2; 16], 1, &KEY, |_, _, _| {}).unwrap();
        assert!(a.runs());
        while a.runs() {
            b.send(&[1; 16], a.local_addr(), b"hello").unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        assert!(b.runs());
    }

    #[test]
    fn a_new_key_is_taken_over_without_a_gap() {
        const NEXT: [u8; 32] = [9; 32];
        let (tell, told) = mpsc::channel();
        let a =
            GossipSocket::spawn(local(), [1; 16], 1, &KEY, move |_, _, payload| tell.send(payload).unwrap()).unwrap();
        let b = GossipSocket::spawn(local(), [2; 16], 1, &KEY, |_, _, _| {}).unwrap();
        let banned = GossipSocket::spawn(local(), [3; 16], 1, &KEY, |_, _, _| {}).unwrap();
        let say = |from: &GossipSocket, what: &[u8]| from.send(&[1; 16], a.local_addr(), what).unwrap();
        say(&b, b"old");
        assert_eq!(told.recv().unwrap(), b"old");
        a.open_with(&NEXT);
        say(&b, b"still old");
        assert_eq!(told.recv().unwrap(), b"still old");
        b.seal_with(&NEXT);
        say(&b, b"new");
        assert_eq!(told.recv().unwrap(), b"new");
        // Another change: two keys ago is too long ago.
        a.open_with(&[10; 32]);
        b.seal_with(&[10; 32]);
        say(&banned, b"let me in");
        say(&b, b"newer");
        assert_eq!(told.recv().unwrap(), b"newer");
        assert_eq!(a.stats().refused, 1);
    }

    #[test]
    fn a_key_that_comes_back_reuses_no_nonce() {
        let (tell, told) = mpsc::channel();
        let a =
            GossipSocket::spawn(local(), [1; 16], 1, &KEY, move |_, _, payload| tell.send(payload).unwrap()).unwrap();
        let b = GossipSocket::spawn(local(), [2; 16], 1, &KEY, |_, _, _| {}).unwrap();
        let say = |what: &[u8]| b.send(&[1; 16], a.local_addr(), what).unwrap();
        say(b"first");
        assert_eq!(told.recv().unwrap(), b"first");
        b.seal_with(&KEY);
        b.seal_with(&[9; 32]);
        b.seal_with(&KEY);
        // A nonce used twice would be taken for a replay.
        say(b"second");
        assert_eq!(told.recv().unwrap(), b"second");
    }

    #[test]
    fn a_socket_for_both_families_reaches_both() {
        let Ok(both) = GossipSocket::spawn("[::]:0".parse().unwrap(), [2; 16], 1, &KEY, |_, _, _| {}) else {
            eprintln!("SKIPPED: no IPv6 here");
            return;
        };
        let (tell, told) = mpsc::channel();
        let v4 = GossipSocket::spawn(local(), [1; 16], 1, &KEY, move |_, source, payload| {
            tell.send((source, payload)).unwrap();
        })
        .unwrap();
        both.send(&[1; 16], v4.local_addr(), b"mapped").unwrap();
        let (source, payload) = told.recv().unwrap();
        assert!(source.is_ipv4() && payload == b"mapped", "{source}");
    }

    #[test]
    fn a_taken_port_is_named_with_the_flag() {
        let a = GossipSocket::spawn(local(), [1; 16], 1, &KEY, |_, _, _| {}).unwrap();
        let error = GossipSocket::spawn(a.local_addr(), [1; 16], 1, &KEY, |_, _, _| {}).err().unwrap().to_string();
        assert!(error.contains("--port") && error.contains(&a.local_addr().port().to_string()), "{error}");
    }
}
