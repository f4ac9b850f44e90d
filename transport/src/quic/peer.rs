//! One certified connection to one member: its lanes, its byte budgets, and its end.
use super::config;
use crate::close::{CloseCode, Disconnect};
use crate::compress::{self, Chooser};
use crate::event::{Event, Sink};
use crate::frame::{self, Codec, Route, WireHeader};
use crate::identity::{NodeId, PeerId};
use crate::lane::{Budget, Item, Lane, LaneError, OnStopped, Opener, Pipe, PipeError};
use crate::throttle::Throttle;
use bytes::Bytes;
use futures::FutureExt;
use parking_lot::Mutex;
use quinn::{Connection, ConnectionError, SendStream, VarInt, WriteError};
use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio::{runtime::Handle, sync::Semaphore};

/// Send priority of frames on a busy link. Control messages precede all of them, weights follow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Priority {
    /// A step of running requests, or a halo: on the critical path.
    Decode,
    /// Prompt chunks and KV.
    Prefill,
    /// Input of a standby, off the critical path. Dropped while [`Limits::standby_queue_bytes`] or more are queued.
    Standby,
}

/// QUIC stream priorities: few levels, as quinn advises.
const CONTROL: i32 = 4;
pub(super) const BULK: i32 = 0;

impl Priority {
    fn level(self) -> i32 {
        match self {
            Priority::Decode => 3,
            Priority::Prefill => 2,
            Priority::Standby => 1,
        }
    }
}

/// Queue bounds per peer, in bytes. A peer that exceeds them is too slow and its connection is reset.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum connections over all peers.
    pub connections_max: usize,
    /// Bytes of control messages queued for sending; also the bound of received ones that the node still holds: a few
    /// full push-pulls.
    pub message_queue_bytes: usize,
    /// Bytes of frames queued for sending: a few prefill chunks of each of several requests.
    pub frame_queue_bytes: usize,
    /// At this many queued frame bytes, copies for a standby are dropped; it requests the missing ones when it reads
    /// again.
    pub standby_queue_bytes: usize,
    /// Bytes of received frames that this node still holds; beyond this the peer has to wait.
    pub arrived_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 1024,
            message_queue_bytes: 16 << 20,
            frame_queue_bytes: 256 << 20,
            standby_queue_bytes: 4 << 20,
            arrived_bytes: 256 << 20,
        }
    }
}

pub(super) struct Peer {
    pub(super) node: NodeId,
    pub(super) peer_id: PeerId,
    pub(super) connection: Connection,
    /// The dialing side, which decides between two crossing connections.
    pub(super) dialer: PeerId,
    /// The peer's instance: changes when it restarts.
    pub(super) instance: u64,
    pub(super) throttle: Throttle,
    /// Expiry of its certificate chain, unix seconds.
    pub(super) expiry: u64,
    /// All peers in its certificate chain.
    pub(super) through: Vec<PeerId>,
    /// Credit for received frames, released when the node drops them.
    pub(super) frames_arrived: Arc<Semaphore>,
    /// Credit for received messages, separate so that they never wait for frames.
    pub(super) messages_arrived: Arc<Semaphore>,
    since: Instant,
    /// Time of the last frame in either direction.
    last_frame: Mutex<Option<Instant>>,
    control: Lane<QuicPipe>,
    frames: Mutex<BTreeMap<(Route, Priority), Lane<QuicPipe>>>,
    messages_held: Arc<Budget>,
    frames_held: Arc<Budget>,
    copy_queue_bytes: usize,
    link: Mutex<LinkState>,
    closed_here: Mutex<Option<(CloseCode, String)>>,
    sink: Arc<dyn Sink>,
    runtime: Handle,
}

#[derive(Default)]
struct LinkState {
    bytes_per_second: Option<u64>,
    /// Rate in the other direction, as the peer measured it.
    bytes_per_second_in: Option<u64>,
    chooser: Chooser,
}

/// Arguments of [`Peer::new`].
pub(super) struct Parts {
    pub(super) connection: Connection,
    pub(super) peer_id: PeerId,
    pub(super) dialer: PeerId,
    pub(super) instance: u64,
    pub(super) expiry: u64,
    /// All peers in its certificate chain.
    pub(super) through: Vec<PeerId>,
    pub(super) control: SendStream,
}

impl Peer {
    pub(super) fn new(parts: Parts, limits: &Limits, sink: Arc<dyn Sink>, runtime: Handle) -> Self {
        let Parts { connection, peer_id, dialer, instance, expiry, through, control } = parts;
        // Fails only on a closed stream, which the first write will detect.
        let _ = control.set_priority(CONTROL);
        let messages_held = Arc::new(Budget::new(limits.message_queue_bytes));
        let never: Opener<QuicPipe> = Box::new(|| Box::pin(async { Err(PipeError::Gone) }));
        let ended: OnStopped = {
            let connection = connection.clone();
            Box::new(move || connection.close(code(CloseCode::Bye), b"control stream stopped"))
        };
        let control = Lane::new(Some(QuicPipe(control)), never, ended, messages_held.clone(), runtime.clone());
        // A certified member may open its streams and gets full-size windows.
        connection.set_max_concurrent_uni_streams(VarInt::from_u32(config::UNI_STREAMS));
        connection.set_max_concurrent_bi_streams(VarInt::from_u32(config::BI_STREAMS));
        connection.set_receive_window(VarInt::from_u32(config::CONNECTION_WINDOW));
        Self {
            node: crate::identity::node_id(&peer_id),
            peer_id,
            connection,
            dialer,
            instance,
            throttle: Throttle::default(),
            expiry,
            through,
            frames_arrived: Arc::new(Semaphore::new(limits.arrived_bytes)),
            messages_arrived: Arc::new(Semaphore::new(limits.message_queue_bytes)),
            since: Instant::now(),
            last_frame: Mutex::default(),
            control,
            frames: Mutex::default(),
            messages_held,
            frames_held: Arc::new(Budget::new(limits.frame_queue_bytes)),
            copy_queue_bytes: limits.standby_queue_bytes,
            link: Mutex::default(),
            closed_here: Mutex::default(),
            sink,
            runtime,
        }
    }

    /// Sends bytes on the control stream. On an accepted connection, the greeting comes first.
    pub(super) fn send_control(&self, front: Bytes, body: Bytes) -> Result<(), LaneError> {
        let sent = self.control.send(Item::Ready([front, body]));
        self.reset_if_slow(sent)
    }

    pub(super) fn send_message(&self, bytes: Bytes) -> Result<(), LaneError> {
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.send_control(Bytes::copy_from_slice(&length.to_le_bytes()), bytes)
    }

    pub(super) fn send_frame(
        self: &Arc<Self>,
        head: WireHeader,
        payload: Bytes,
        priority: Priority,
    ) -> Result<(), LaneError> {
        self.frame_passed();
        let item = match self.choose(payload.len()) {
            Codec::Raw => raw_item(&head, payload),
            codec @ Codec::ShuffledZstd => {
                let peer = self.clone();
                let bytes = frame::HEADER_BYTES + payload.len();
                Item::Later(bytes, Box::new(move || peer.pack(codec, &head, payload)))
            }
        };
        let sent = self.lane(head.route, priority).send(item);
        self.reset_if_slow(sent)
    }

    /// Whether enough bytes are queued that copies for a standby are dropped.
    pub(super) fn is_behind(&self) -> bool {
        self.frames_held.held() >= self.copy_queue_bytes
    }

    /// Ends the streams of a job.
    pub(super) fn forget(&self, job: u64) {
        let mut frames = lock(&self.frames);
        frames.retain(|(route, _), lane| {
            if route.job == job {
                lane.finish();
            }
            route.job != job
        });
    }

    /// Records that a frame was sent or received: the link is in use.
    pub(super) fn frame_passed(&self) {
        *lock(&self.last_frame) = Some(Instant::now());
    }

    pub(super) fn learn_link(&self, bytes_per_second: u64) {
        let mut link = lock(&self.link);
        // A measurement can only be too low (a busy machine). QUIC's congestion control handles a link that became
        // slower.
        let best = link.bytes_per_second.map_or(bytes_per_second, |before| before.max(bytes_per_second));
        link.bytes_per_second = Some(best);
        self.throttle.set(weights_rate(self.connection.remote_address().ip(), best));
    }

    /// Records the peer's measurement of the link to this node.
    pub(super) fn learn_link_in(&self, bytes_per_second: u64) {
        let best = &mut lock(&self.link).bytes_per_second_in;
        *best = Some(best.map_or(bytes_per_second, |before| before.max(bytes_per_second)));
    }

    pub(super) fn close(&self, reason: CloseCode, text: &str) {
        if self.connection.close_reason().is_none() {
            lock(&self.closed_here).get_or_insert((reason, text.to_owned()));
        }
        self.connection.close(code(reason), text.as_bytes());
    }

    /// Ends the control stream, waits for the peer to close, then closes.
    pub(super) async fn say_goodbye(&self) {
        self.control.finish();
        // The peer closes the connection when the control stream ends.
        let _ = tokio::time::timeout(GOODBYE_MAX, self.connection.closed()).await;
        self.close(CloseCode::Bye, "");
    }

    /// The reason why the connection closed.
    pub(super) fn reason(&self, error: ConnectionError) -> Disconnect {
        if let Some((code, text)) = lock(&self.closed_here).clone() {
            return Disconnect::Here { code, text };
        }
        reason(error)
    }

    pub(super) fn stats(&self) -> PeerStats {
        let stats = self.connection.stats();
        let (bytes_per_second, bytes_per_second_in) = {
            let link = lock(&self.link);
            (link.bytes_per_second, link.bytes_per_second_in)
        };
        PeerStats {
            node: self.node,
            peer_id: self.peer_id,
            addr: self.connection.remote_address(),
            rtt: self.connection.rtt(),
            bytes_per_second,
            bytes_per_second_in,
            since_last_frame: lock(&self.last_frame).map(|at| at.elapsed()),
            bytes_sent: stats.udp_tx.bytes,
            bytes_received: stats.udp_rx.bytes,
            packets_lost: stats.path.lost_packets,
            mtu: stats.path.current_mtu,
            queued_bytes: self.messages_held.held() + self.frames_held.held(),
            connected_for: self.since.elapsed(),
            dialed_here: self.dialer != self.peer_id,
        }
    }

    fn reset_if_slow(&self, sent: Result<(), LaneError>) -> Result<(), LaneError> {
        if sent == Err(LaneError::Full) {
            self.close(CloseCode::TooSlow, "the peer reads too slowly: its queue here is full");
        }
        sent
    }

    fn choose(&self, bytes: usize) -> Codec {
        if bytes < compress::PACK_BYTES_MIN {
            return Codec::Raw;
        }
        let link = lock(&self.link);
        link.chooser.choose(bytes, link.bytes_per_second)
    }

    /// Runs on a blocking thread.
    fn pack(&self, codec: Codec, head: &WireHeader, payload: Bytes) -> [Bytes; 2] {
        let start = Instant::now();
        let packed = compress::pack(codec, head.dtype, &payload);
        let length = packed.as_ref().map_or(payload.len(), Vec::len);
        lock(&self.link).chooser.learn(payload.len(), length, start.elapsed().as_secs_f64());
        match packed {
            Some(packed) => {
                let header = frame::encode_header(head, codec, &packed);
                [Bytes::copy_from_slice(&header), packed.into()]
            }
            None => [Bytes::copy_from_slice(&frame::encode_header(head, Codec::Raw, &payload)), payload],
        }
    }

    /// The lane of a route; a newer epoch resets the lanes of older epochs to the same part.
    fn lane(&self, route: Route, priority: Priority) -> Lane<QuicPipe> {
        let mut frames = lock(&self.frames);
        if let Some(lane) = frames.get(&(route, priority)) {
            return lane.clone();
        }
        frames.retain(|(old, _), lane| {
            let stale = old.job == route.job && old.part == route.part && old.epoch < route.epoch;
            if stale {
                lane.reset();
            }
            !stale
        });
        let lane = self.open_lane(route, priority);
        frames.insert((route, priority), lane.clone());
        lane
    }

    fn open_lane(&self, route: Route, priority: Priority) -> Lane<QuicPipe> {
        let connection = self.connection.clone();
        let open = move || {
            let connection = connection.clone();
            async move {
                let stream = connection.open_uni().await.map_err(|_| PipeError::Gone)?;
                let _ = stream.set_priority(priority.level());
                Ok(QuicPipe(stream))
            }
        };
        // Opens immediately if the peer's stream limit is known and not reached, as it is except in the first
        // milliseconds.
        let pipe = open().now_or_never().and_then(Result::ok);
        let (sink, node) = (self.sink.clone(), self.node);
        let on_stopped: OnStopped = Box::new(move || sink.event(Event::StreamStopped { node, route }));
        Lane::new(pipe, Box::new(move || open().boxed()), on_stopped, self.frames_held.clone(), self.runtime.clone())
    }
}

/// Rate limit of weights on a measured link, in bytes per second.
fn weights_rate(peer: IpAddr, bytes_per_second: u64) -> Option<u64> {
    // A loopback connection has no link to share.
    (!peer.to_canonical().is_loopback()).then_some(bytes_per_second / 10 * 7)
}

fn raw_item(head: &WireHeader, payload: Bytes) -> Item {
    Item::Ready([Bytes::copy_from_slice(&frame::encode_header(head, Codec::Raw, &payload)), payload])
}

/// Statistics of a connection to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerStats {
    /// The peer.
    pub node: NodeId,
    /// Its public key.
    pub peer_id: PeerId,
    /// Its address.
    pub addr: SocketAddr,
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Throughput to the peer, once measured.
    pub bytes_per_second: Option<u64>,
    /// Throughput from the peer, once the peer has measured it.
    pub bytes_per_second_in: Option<u64>,
    /// Time since the last frame in either direction; `None` before the first.
    pub since_last_frame: Option<Duration>,
    /// Bytes on the wire, including headers.
    pub bytes_sent: u64,
    /// Bytes on the wire, including headers.
    pub bytes_received: u64,
    /// Packets lost so far.
    pub packets_lost: u64,
    /// Largest datagram that the path is known to carry.
    pub mtu: u16,
    /// Bytes queued here because the peer or the path is slow.
    pub queued_bytes: usize,
    /// Age of the connection.
    pub connected_for: Duration,
    /// Whether this node dialed.
    pub dialed_here: bool,
}

/// Maps quinn's connection error.
pub(super) fn reason(error: ConnectionError) -> Disconnect {
    match error {
        ConnectionError::ApplicationClosed(close) => Disconnect::ByPeer {
            code: CloseCode::from_wire(close.error_code.into_inner()).unwrap_or(CloseCode::Bye),
            text: text(&close.reason),
        },
        ConnectionError::TimedOut | ConnectionError::Reset => Disconnect::Lost,
        ConnectionError::LocallyClosed => {
            Disconnect::Here { code: CloseCode::Bye, text: "this node is shutting down".into() }
        }
        error @ (ConnectionError::VersionMismatch
        | ConnectionError::TransportError(_)
        | ConnectionError::ConnectionClosed(_)
        | ConnectionError::CidsExhausted) => Disconnect::Broken(error.to_string()),
    }
}

/// A peer's close text made safe for a log: short and printable.
pub(super) fn text(bytes: &[u8]) -> String {
    crate::wire::printable(&String::from_utf8_lossy(&bytes[..bytes.len().min(256)]), 256)
}

pub(super) fn code(code: CloseCode) -> VarInt {
    VarInt::from_u32(code as u32)
}

/// Longest wait for a graceful close.
const GOODBYE_MAX: Duration = Duration::from_millis(500);

fn lock<T>(mutex: &Mutex<T>) -> parking_lot::MutexGuard<'_, T> {
    mutex.lock()
}

/// quinn's sending half as a lane's pipe.
pub(super) struct QuicPipe(SendStream);

impl Pipe for QuicPipe {
    fn poll_write(&mut self, cx: &mut Context<'_>, bufs: &mut [Bytes]) -> Poll<Result<(), PipeError>> {
        pin!(self.0.write_chunks(bufs)).poll(cx).map(|written| match written {
            Ok(_) => Ok(()),
            Err(WriteError::Stopped(_)) => Err(PipeError::Stopped),
            Err(WriteError::ConnectionLost(_) | WriteError::ClosedStream | WriteError::ZeroRttRejected) => {
                Err(PipeError::Gone)
            }
        })
    }

    fn finish(&mut self) {
        let _ = self.0.finish();
    }

    fn reset(&mut self) {
        let _ = self.0.reset(VarInt::from_u32(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_have_the_lowest_priority() {
        let levels = [CONTROL, Priority::Decode.level(), Priority::Prefill.level(), BULK];
        assert!(levels.is_sorted_by(|first, then| first > then), "{levels:?}");
    }

    #[test]
    fn weights_get_seven_tenths_of_a_real_link() {
        let rate = |ip: &str| weights_rate(ip.parse().unwrap(), 125_000_000);
        assert_eq!(rate("10.0.0.7"), Some(87_500_000));
        assert_eq!(rate("fd00::7"), Some(87_500_000));
        assert_eq!([rate("127.0.0.1"), rate("::1"), rate("::ffff:127.0.0.1")], [None; 3]);
    }
}
