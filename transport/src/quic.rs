//! The data plane: certified QUIC connections between members. This module and its files are the only users of quinn.
//!
//! `Endpoint` is what a node holds; every method that sends may be called from any thread and never blocks. What happens
//! comes back through the [`Sink`].
use crate::bulk::{self, RequestError, Response, Serve};
use crate::certificate::{Chain, MeshCredentials};
use crate::event::{Event, Sink};
use crate::frame::{Expectation, FrameHead, PAYLOAD_BYTES_MAX, Route};
use crate::identity::{Identity, NodeId, PeerId, node_id};
use crate::lane::LaneError;
use crate::probe::{self, Link};
use crate::revocation::Revocation;
use crate::socket::{self, BindError, Buffers};
use bytes::Bytes;
use config::Configs;
use peer::Peer;
use slots::{Outgoing, Slots};
use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use thiserror::Error;
use tokio::io::AsyncWriteExt;
use tokio::runtime::Handle;

pub use close::{CloseCode, DialError, Disconnect};
pub use join::JoinError;
pub use peer::{Limits, PeerStats, Priority};
pub use receive::MESSAGE_BYTES_MAX;

mod accept;
mod close;
mod config;
mod dial;
mod hello;
mod join;
mod peer;
mod receive;
mod slots;
#[cfg(test)]
mod tests;
mod tls;

/// The data plane of a node. Clones share it.
#[derive(Clone)]
pub struct Endpoint(Arc<Inner>);

/// What an endpoint is made from.
pub struct Options {
    /// Where to listen: the node's address and UDP P + 1.
    pub listen: SocketAddr,
    /// The node's key.
    pub identity: Identity,
    /// Its certificates, unless it is still to join.
    pub credentials: Option<MeshCredentials>,
    /// Bounds.
    pub limits: Limits,
}

struct Inner {
    endpoint: quinn::Endpoint,
    configs: Configs,
    identity: Identity,
    credentials: RwLock<Option<Arc<MeshCredentials>>>,
    limits: Limits,
    sink: Arc<dyn Sink>,
    server: Arc<dyn Serve>,
    runtime: Handle,
    buffers: Buffers,
    /// Random: tells this life of the endpoint from the last.
    instance: u64,
    slots: Mutex<Slots>,
    /// Nobody of these is let in, nor a member that one of them certified; each with the revocation that says so.
    banned: RwLock<BTreeMap<PeerId, Revocation>>,
    /// Strangers being greeted, by where they come from.
    handshakes: Arc<accept::Handshakes>,
    expectations: RwLock<BTreeMap<u64, BTreeMap<Route, Expectation>>>,
    /// The task that accepts connections.
    accepting: OnceLock<tokio::task::AbortHandle>,
}

impl Endpoint {
    /// Binds the socket and starts accepting, on the tokio runtime that it is called on.
    ///
    /// # Errors
    /// The port is taken, or the address is not one of this machine.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn bind(options: Options, sink: impl Sink, server: impl Serve) -> Result<Self, BindError> {
        let addr = options.listen;
        let other = |text: String| BindError::Io { addr, error: io::Error::other(text) };
        let (socket, buffers) = socket::bind_udp(addr)?;
        let configs = Configs::new(&options.identity).map_err(other)?;
        let mut instance = [0; 8];
        getrandom::fill(&mut instance).map_err(|e| other(e.to_string()))?;
        let server_config = configs.server(None);
        let runtime = Arc::new(quinn::TokioRuntime);
        let endpoint = quinn::Endpoint::new(config::endpoint(), Some(server_config), socket, runtime)
            .map_err(|error| BindError::new(addr, error))?;
        let inner = Arc::new(Inner {
            endpoint,
            configs,
            identity: options.identity,
            credentials: RwLock::new(options.credentials.map(Arc::new)),
            limits: options.limits,
            sink: Arc::new(sink),
            server: Arc::new(server),
            runtime: Handle::current(),
            buffers,
            instance: u64::from_le_bytes(instance),
            slots: Mutex::default(),
            banned: RwLock::default(),
            handshakes: Arc::default(),
            expectations: RwLock::default(),
            accepting: OnceLock::new(),
        });
        if let Some(advice) = inner.buffers.advice() {
            tracing::warn!("{advice}");
        }
        let accepting = inner.runtime.spawn(accept::run(inner.clone()));
        // Nothing else sets it.
        let _ = inner.accepting.set(accepting.abort_handle());
        Ok(Self(inner))
    }

    /// Whether new connections are accepted: that ends before the endpoint is closed only by a panic.
    pub fn accepts(&self) -> bool {
        self.0.accepting.get().is_some_and(|accepting| !accepting.is_finished())
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        // The socket is bound; asking for its name cannot fail on a system that bound it.
        self.0.endpoint.local_addr().unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)))
    }

    /// Kernel buffers of its socket.
    pub fn buffers(&self) -> Buffers {
        self.0.buffers
    }

    /// Membership of this node, once it has one (or a newer one).
    pub fn set_credentials(&self, credentials: MeshCredentials) {
        *self.0.credentials.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(credentials));
    }

    /// From now on these are banned, and every member that one of them certified: their connections end, and no other is
    /// made. A banned node that dials receives the revocation.
    pub fn ban(&self, banned: BTreeMap<PeerId, Revocation>) {
        *self.0.banned.write().unwrap_or_else(PoisonError::into_inner) = banned;
        let peers: Vec<_> = self.0.slots().peers().cloned().collect();
        for peer in peers {
            if let Some(banned) = self.0.banned_of(peer.through.iter().copied().chain([peer.peer_id])) {
                peer.close(CloseCode::Banned, &format!("{banned} was banned"));
            }
        }
    }

    /// Connected peers whose membership runs through this one: they would be out with it.
    pub fn certified_by(&self, peer_id: PeerId) -> Vec<PeerId> {
        let through = |peer: &Arc<Peer>| peer.peer_id != peer_id && peer.through.contains(&peer_id);
        self.0.slots().peers().filter(|peer| through(peer)).map(|peer| peer.peer_id).collect()
    }

    /// Remembers where a peer may be reached, for the next `connect` or message to it.
    pub fn learn(&self, peer_id: PeerId, addrs: Vec<SocketAddr>) {
        self.0.slots().learn(peer_id, addrs);
    }

    /// Sees to a connection; answered by [`Event::Connected`] or [`Event::Disconnected`].
    pub fn connect(&self, peer_id: PeerId, addrs: Vec<SocketAddr>) {
        self.0.slots().learn(peer_id, addrs);
        dial::connect(&self.0, node_id(&peer_id));
    }

    /// Drops the connection to a peer and what is known of it.
    pub fn disconnect(&self, node: NodeId) {
        if let Some(peer) = self.0.slots().forget(&node) {
            peer.close(CloseCode::Removed, "dropped by the other node");
        }
    }

    /// Sends a control message, in order; connects first if need be.
    ///
    /// # Errors
    /// Nothing is known of the node, the message is too long, or the peer is too slow (its connection is reset).
    pub fn send_message(&self, node: NodeId, bytes: Bytes) -> Result<(), SendError> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(SendError::TooLong { bytes: bytes.len(), most: MESSAGE_BYTES_MAX });
        }
        match self.0.peer(&node) {
            Some(peer) => peer.send_message(bytes).map_err(SendError::from),
            None => self.0.send_later(node, Outgoing::Message(bytes)),
        }
    }

    /// Sends a frame on the stream of its route; connects first if need be. Frames of one route and priority arrive in
    /// order; prompts' chunks share one stream because a chunk that overtakes another would only be asked for again.
    ///
    /// # Errors
    /// Nothing is known of the node, the payload does not fit the head, or the peer is too slow: a copy is left out, anything
    /// else resets its connection.
    pub fn send_frame(
        &self,
        node: NodeId,
        head: FrameHead,
        payload: Bytes,
        priority: Priority,
    ) -> Result<(), SendError> {
        if payload.len() as u64 != head.raw_bytes() {
            return Err(SendError::Shape { bytes: payload.len(), expected: head.raw_bytes() });
        }
        if payload.len() > PAYLOAD_BYTES_MAX {
            return Err(SendError::TooLong { bytes: payload.len(), most: PAYLOAD_BYTES_MAX });
        }
        match self.0.peer(&node) {
            Some(peer) if priority == Priority::Copy && peer.is_behind() => Err(SendError::LeftOut),
            Some(peer) => peer.send_frame(head, payload, priority).map_err(SendError::from),
            None => self.0.send_later(node, Outgoing::Frame(head, payload, priority)),
        }
    }

    /// From now on, frames of `route` that fit `expectation` are taken. Others of it cost the sender its connection;
    /// frames of routes that nobody expects are stopped.
    pub fn expect(&self, route: Route, expectation: Expectation) {
        let mut expectations = self.0.expectations.write().unwrap_or_else(PoisonError::into_inner);
        let routes = expectations.entry(route.job).or_default();
        routes.insert(route, expectation);
        while routes.len() > ROUTES_PER_JOB_MAX {
            routes.pop_first();
        }
    }

    /// The job is over: its frames are not expected any more, its streams end.
    pub fn forget(&self, job: u64) {
        self.0.expectations.write().unwrap_or_else(PoisonError::into_inner).remove(&job);
        self.0.slots().peers().for_each(|peer| peer.forget(job));
    }

    /// Asks a connected peer's [`Serve`]; at weights' priority and pace.
    ///
    /// # Errors
    /// Not connected, the request is too long, or the connection ends.
    pub async fn request(&self, node: NodeId, request: Bytes) -> Result<Response, RequestError> {
        let (send, recv) = self.open_bulk(&node, receive::REQUEST).await?;
        bulk::ask(send, &request).await?;
        Ok(Response::new(recv))
    }

    /// Measures the link to a connected peer; from then on weights to it keep to 70 % of what was found, and the codec
    /// of large frames is chosen by it.
    ///
    /// # Errors
    /// Not connected, or the connection ends.
    pub async fn measure(&self, node: NodeId) -> Result<Link, RequestError> {
        let (send, recv) = self.open_bulk(&node, receive::PROBE).await?;
        let link = probe::measure(send, recv).await.map_err(|_| RequestError::Cut)?;
        if let Some(peer) = self.0.peer(&node) {
            peer.learn_link(link.bytes_per_second);
        }
        Ok(link)
    }

    /// How the connections do.
    pub fn peers(&self) -> Vec<PeerStats> {
        self.0.slots().peers().map(|peer| peer.stats()).collect()
    }

    /// Says goodbye to all peers, lets what was sent arrive (for half a second at most), and closes.
    pub async fn shutdown(&self) {
        let peers: Vec<_> = self.0.slots().peers().cloned().collect();
        self.0.endpoint.set_server_config(None);
        futures::future::join_all(peers.iter().map(|peer| peer.say_goodbye())).await;
        self.0.endpoint.close(peer::code(CloseCode::Bye), b"");
        let _ = tokio::time::timeout(SHUTDOWN_MAX, self.0.endpoint.wait_idle()).await;
    }

    async fn open_bulk(&self, node: &NodeId, kind: u8) -> Result<(quinn::SendStream, quinn::RecvStream), RequestError> {
        let peer = self.0.peer(node).ok_or(RequestError::NotConnected)?;
        let (mut send, recv) = peer.connection.open_bi().await.map_err(|_| RequestError::Cut)?;
        let _ = send.set_priority(peer::BULK);
        send.write_u8(kind).await.map_err(|_| RequestError::Cut)?;
        Ok((send, recv))
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({} at {})", self.0.identity.peer_id(), self.local_addr())
    }
}

impl Inner {
    fn slots(&self) -> MutexGuard<'_, Slots> {
        // Every change of the table is made in one step, so it is whole even after a panic elsewhere.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peer(&self, node: &NodeId) -> Option<Arc<Peer>> {
        self.slots().peer(node)
    }

    fn credentials(&self) -> Option<Arc<MeshCredentials>> {
        self.credentials.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn chain(&self) -> Option<Chain> {
        self.credentials().map(|c| c.chain.clone())
    }

    /// The first of these that is banned.
    fn banned_of(&self, peers: impl IntoIterator<Item = PeerId>) -> Option<PeerId> {
        let banned = self.banned.read().unwrap_or_else(PoisonError::into_inner);
        peers.into_iter().find(|peer| banned.contains_key(peer))
    }

    fn revocation_of(&self, peer: &PeerId) -> Option<Revocation> {
        self.banned.read().unwrap_or_else(PoisonError::into_inner).get(peer).cloned()
    }

    fn expected(&self, route: &Route) -> Option<Expectation> {
        let expectations = self.expectations.read().unwrap_or_else(PoisonError::into_inner);
        expectations.get(&route.job)?.get(route).cloned()
    }

    fn send_later(self: &Arc<Self>, node: NodeId, outgoing: Outgoing) -> Result<(), SendError> {
        let peer = self.slots().wait(&node, outgoing)?;
        match peer {
            // It connected in the meantime.
            Some((peer, outgoing)) => slots::send(&peer, outgoing).map_err(SendError::from),
            None => {
                dial::connect(self, node);
                Ok(())
            }
        }
    }

    fn refused(&self, from: Option<PeerId>, addr: SocketAddr, why: impl Into<String>) {
        self.sink.event(Event::Refused { from, addr, why: why.into() });
    }
}

/// Wall clock, for the ends of certificates.
fn now_unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Epochs and edges of one job; the oldest epoch goes first.
const ROUTES_PER_JOB_MAX: usize = 256;
/// After the goodbyes.
const SHUTDOWN_MAX: Duration = Duration::from_millis(500);

/// Why something was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SendError {
    /// No connection and no address.
    #[error("nothing is known of this node: connect to it first")]
    Unknown,
    /// The peer's queue is full; its connection is being reset.
    #[error("the peer is too slow: its queue is full")]
    Slow,
    /// A copy for a standby that does not take what it was sent before.
    #[error("a copy is left out: the standby is too slow, its queue is full")]
    LeftOut,
    /// The peer does not want this stream, or the connection is ending.
    #[error("the stream to the peer has ended")]
    Ended,
    /// More than may be sent.
    #[error("{bytes} bytes, at most {most} may be sent")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The bound.
        most: usize,
    },
    /// The payload is not what the head says.
    #[error("a payload of {bytes} bytes, its head says {expected}")]
    Shape {
        /// Its length.
        bytes: usize,
        /// From count, width and dtype.
        expected: u64,
    },
}

impl From<LaneError> for SendError {
    fn from(error: LaneError) -> Self {
        match error {
            LaneError::Full => SendError::Slow,
            LaneError::Ended(_) => SendError::Ended,
        }
    }
}
