//! Encrypted datagrams between members, on their own socket and thread, so that they never queue behind weights.
use crate::identity::NodeId;
use crate::socket::{self, BindError, Buffers};
use parking_lot::{Mutex, RwLock};
use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc,
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
/// Largest payload of a packet: the packet less the encryption overhead.
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
    /// Keys that this generation used for encryption before, by hash, with the number of nonces used of each.
    retired: Mutex<BTreeMap<[u8; 32], u64>>,
    /// Sender and generation of the seals.
    node: NodeId,
    generation: u64,
    /// The next decryption key, to be adopted by the thread.
    next_key: Mutex<Option<[u8; 32]>>,
    rekeyed: AtomicBool,
    stop: AtomicBool,
    sent: AtomicU64,
    received: AtomicU64,
    refused: AtomicU64,
}

/// Datagram counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GossipStats {
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams decrypted.
    pub received: u64,
    /// Datagrams rejected: not encrypted by a member for this node, or replayed.
    pub rejected: u64,
}

impl GossipSocket {
    /// Binds `addr` and starts the thread that passes every decrypted datagram to `incoming` as (sender, address,
    /// payload). `incoming` should hand over and return: while it runs, nothing is received.
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
        // A full send buffer drops the datagram (gossip tolerates loss) instead of blocking the caller.
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

    /// Encrypts `payload` for `to` and sends it to `addr`. Blocks for a millisecond at most.
    ///
    /// # Errors
    /// The payload is too long, the nonces are used up, or the system rejected the datagram.
    pub fn send(&self, to: &NodeId, addr: SocketAddr, payload: &[u8]) -> Result<(), GossipError> {
        if payload.len() > PAYLOAD_BYTES_MAX {
            return Err(GossipError::TooLong { bytes: payload.len() });
        }
        let sealed = self.shared.sealer.read().seal(to, payload);
        let packet = sealed.ok_or(GossipError::Spent)?;
        self.shared.socket.send_to(&packet, self.reachable(addr)).map_err(|error| GossipError::Io { addr, error })?;
        self.shared.sent.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Sets the decryption key. Datagrams under the previous key are still accepted for [`OVERLAP`].
    pub fn set_decryption_key(&self, mesh_key: &[u8; 32]) {
        *self.shared.next_key.lock() = Some(*mesh_key);
        self.shared.rekeyed.store(true, Ordering::Release);
    }

    /// Sets the encryption key; call it once the other members can be expected to have the key. A key that is used
    /// again continues with its nonce counter, so that no nonce is used twice.
    pub fn set_encryption_key(&self, mesh_key: &[u8; 32]) {
        let mut sealer = self.shared.sealer.write();
        let next = Sealer::new(mesh_key, self.shared.node, self.shared.generation);
        if next.key_hash() == sealer.key_hash() {
            return;
        }
        let mut retired = self.shared.retired.lock();
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

    /// Whether the receive thread is running. It ends early only by a panic, including one in `incoming`.
    pub fn runs(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// The bound address.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Kernel buffer sizes, as granted.
    pub fn buffers(&self) -> Buffers {
        self.buffers
    }

    /// Datagram counters.
    pub fn stats(&self) -> GossipStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let shared = &self.shared;
        GossipStats { sent: load(&shared.sent), received: load(&shared.received), rejected: load(&shared.refused) }
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
        // One byte more than allowed, so that an oversized packet is recognized.
        let mut packet = [0; PACKET_BYTES_MAX + 1];
        let mut last: Option<(Opener, Instant)> = None;
        while !self.stop.load(Ordering::Acquire) {
            let (length, source) = match self.socket.recv_from(&mut packet) {
                Ok(received) => received,
                // The timeout for the stop check, or the ICMP answer to an earlier send, whose cause SWIM detects
                // itself.
                Err(error) if is_passing(&error) => continue,
                Err(error) => {
                    tracing::warn!(%error, "gossip socket");
                    thread::sleep(STOP_CHECK);
                    continue;
                }
            };
            if self.rekeyed.swap(false, Ordering::AcqRel)
                && let Some(key) = self.next_key.lock().take()
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
                    tracing::trace!(%source, %error, "gossip datagram rejected");
                }
            }
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, Interrupted, TimedOut, WouldBlock};
    [WouldBlock, TimedOut, ConnectionRefused, ConnectionReset, Interrupted].contains(&error.kind())
}

/// How long the previous key still decrypts. By then every member has the new one or requests it.
pub const OVERLAP: Duration = Duration::from_secs(10);
/// Keys remembered. A further key change is ignored for encryption, because the nonces it used would be forgotten.
const RETIRED_MAX: usize = 65_536;
/// How often the thread checks whether to stop.
const STOP_CHECK: Duration = Duration::from_millis(50);
/// Longest wait for space in the kernel's send buffer.
const SEND_WAIT_MAX: Duration = Duration::from_millis(1);

/// Why a datagram was not sent.
#[derive(Debug, Error)]
pub enum GossipError {
    /// The payload does not fit in a packet.
    #[error("a datagram of {bytes} bytes, at most {PAYLOAD_BYTES_MAX} fit a packet")]
    TooLong {
        /// Length of the payload.
        bytes: usize,
    },
    /// All 2^64 nonces of this generation are used.
    #[error("all nonces of this generation are used; restart the node")]
    Spent,
    /// The system rejected the datagram.
    #[error("cannot send to {addr}: {error}")]
    Io {
        /// The destination.
        addr: SocketAddr,
        /// The system's error.
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
        let (sender, inbox) = mpsc::channel();
        let a = GossipSocket::spawn(local(), [1; 16], 1, &KEY, move |from, source, payload| {
            sender.send((from, source, payload)).unwrap();
        })
        .unwrap();
        let b = GossipSocket::spawn(local(), [2; 16], 1, &KEY, |_, _, _| {}).unwrap();
        let largest = vec![7; PAYLOAD_BYTES_MAX];
        b.send(&[1; 16], a.local_addr(), &largest).unwrap();
        assert_eq!(inbox.recv().unwrap(), ([2; 16], b.local_addr(), largest));
        let longer = vec![7; PAYLOAD_BYTES_MAX + 1];
        assert!(matches!(b.send(&[1; 16], a.local_addr(), &longer), Err(GossipError::TooLong { .. })));

        // A datagram under another mesh's key, one for another node, and an unencrypted one; then a valid one that
        // shows all were received.
        let stranger = GossipSocket::spawn(local(), [2; 16], 2, &[4; 32], |_, _, _| {}).unwrap();
        stranger.send(&[1; 16], a.local_addr(), b"let me in").unwrap();
        b.send(&[9; 16], a.local_addr(), b"not for you").unwrap();
        let plain = UdpSocket::bind(local()).unwrap();
        plain.send_to(&[0; 2000], a.local_addr()).unwrap();
        b.send(&[1; 16], a.local_addr(), b"still here").unwrap();
        assert_eq!(inbox.recv().unwrap().2, b"still here");
        assert_eq!(a.stats(), GossipStats { sent: 0, received: 2, rejected: 3 });
    }

    #[test]
    fn a_panicked_receive_thread_is_reported() {
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
    fn a_key_change_loses_no_datagram() {
        const NEXT: [u8; 32] = [9; 32];
        let (sender, inbox) = mpsc::channel();
        let a =
            GossipSocket::spawn(local(), [1; 16], 1, &KEY, move |_, _, payload| sender.send(payload).unwrap()).unwrap();
        let b = GossipSocket::spawn(local(), [2; 16], 1, &KEY, |_, _, _| {}).unwrap();
        let banned = GossipSocket::spawn(local(), [3; 16], 1, &KEY, |_, _, _| {}).unwrap();
        let say = |from: &GossipSocket, what: &[u8]| from.send(&[1; 16], a.local_addr(), what).unwrap();
        say(&b, b"old");
        assert_eq!(inbox.recv().unwrap(), b"old");
        a.set_decryption_key(&NEXT);
        say(&b, b"still old");
        assert_eq!(inbox.recv().unwrap(), b"still old");
        b.set_encryption_key(&NEXT);
        say(&b, b"new");
        assert_eq!(inbox.recv().unwrap(), b"new");
        // Another change: a key from two changes ago is no longer accepted.
        a.set_decryption_key(&[10; 32]);
        b.set_encryption_key(&[10; 32]);
        say(&banned, b"let me in");
        say(&b, b"newer");
        assert_eq!(inbox.recv().unwrap(), b"newer");
        assert_eq!(a.stats().rejected, 1);
    }

    #[test]
    fn a_key_that_returns_reuses_no_nonce() {
        let (sender, inbox) = mpsc::channel();
        let a =
            GossipSocket::spawn(local(), [1; 16], 1, &KEY, move |_, _, payload| sender.send(payload).unwrap()).unwrap();
        let b = GossipSocket::spawn(local(), [2; 16], 1, &KEY, |_, _, _| {}).unwrap();
        let say = |what: &[u8]| b.send(&[1; 16], a.local_addr(), what).unwrap();
        say(b"first");
        assert_eq!(inbox.recv().unwrap(), b"first");
        b.set_encryption_key(&KEY);
        b.set_encryption_key(&[9; 32]);
        b.set_encryption_key(&KEY);
        // A reused nonce would be rejected as a replay.
        say(b"second");
        assert_eq!(inbox.recv().unwrap(), b"second");
    }

    #[test]
    fn a_socket_for_both_families_reaches_both() {
        let Ok(both) = GossipSocket::spawn("[::]:0".parse().unwrap(), [2; 16], 1, &KEY, |_, _, _| {}) else {
            eprintln!("SKIPPED: no IPv6 here");
            return;
        };
        let (sender, inbox) = mpsc::channel();
        let v4 = GossipSocket::spawn(local(), [1; 16], 1, &KEY, move |_, source, payload| {
            sender.send((source, payload)).unwrap();
        })
        .unwrap();
        both.send(&[1; 16], v4.local_addr(), b"mapped").unwrap();
        let (source, payload) = inbox.recv().unwrap();
        assert!(source.is_ipv4() && payload == b"mapped", "{source}");
    }

    #[test]
    fn a_port_in_use_is_reported_with_the_flag() {
        let a = GossipSocket::spawn(local(), [1; 16], 1, &KEY, |_, _, _| {}).unwrap();
        let error = GossipSocket::spawn(a.local_addr(), [1; 16], 1, &KEY, |_, _, _| {}).err().unwrap().to_string();
        assert!(error.contains("--port") && error.contains(&a.local_addr().port().to_string()), "{error}");
    }
}
