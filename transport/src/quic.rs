//! The data plane: certified QUIC connections between members. This module and its files are the only users of quinn.
//!
//! A node holds one `Endpoint`. Every sending method may be called from any thread and never blocks. Events are
//! reported through the [`Sink`].
use crate::bulk::{self, RequestError, Response, Serve};
use crate::certificate::MeshCredentials;
use crate::close::CloseCode;
use crate::event::Sink;
use crate::frame::{Expectation, PAYLOAD_BYTES_MAX, Route, WireHeader};
use crate::identity::{Identity, NodeId, PeerId, node_id};
use crate::probe::{self, Link};
use crate::revocation::Revocation;
use crate::socket::{self, BindError, Buffers};
use bytes::Bytes;
use config::Configs;
use inner::Inner;
use outgoing::Outgoing;
use parking_lot::{Mutex, RwLock};
use peer::Peer;
use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::io::AsyncWriteExt;
use tokio::runtime::Handle;

pub use join::JoinError;
pub use outgoing::SendError;
pub use peer::{Limits, PeerStats, Priority};
pub use receive::MESSAGE_BYTES_MAX;

mod accept;
mod config;
mod dial;
mod handshakes;
mod hello;
mod inner;
mod join;
mod outgoing;
mod peer;
mod receive;
mod slots;
#[cfg(test)]
mod tests;
mod tls;

/// The data plane of a node. Clones share one endpoint.
#[derive(Clone)]
pub struct Endpoint(Arc<Inner>);

/// Settings of an [`Endpoint`].
pub struct Options {
    /// Listen address: the node's address and UDP P + 1.
    pub listen: SocketAddr,
    /// The node's key.
    pub identity: Identity,
    /// Its credentials; `None` before it has joined a mesh.
    pub credentials: Option<MeshCredentials>,
    /// Resource limits.
    pub limits: Limits,
}

impl Endpoint {
    /// Binds the socket and starts accepting on the current tokio runtime.
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
        // Set only here, so it cannot fail.
        let _ = inner.accepting.set(accepting.abort_handle());
        Ok(Self(inner))
    }

    /// Whether new connections are accepted. Before the endpoint is closed this ends only by a panic.
    pub fn accepts(&self) -> bool {
        self.0.accepting.get().is_some_and(|accepting| !accepting.is_finished())
    }

    /// The bound address.
    pub fn local_addr(&self) -> SocketAddr {
        // The socket is bound, so its address is available.
        self.0.endpoint.local_addr().unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)))
    }

    /// Kernel buffer sizes of the socket.
    pub fn buffers(&self) -> Buffers {
        self.0.buffers
    }

    /// Sets or replaces this node's credentials.
    pub fn set_credentials(&self, credentials: MeshCredentials) {
        *self.0.credentials.write() = Some(Arc::new(credentials));
    }

    /// Replaces the set of banned peers. Closes the connections to them and to every member that one of them certified,
    /// and rejects new ones. A banned node that dials receives the revocation.
    pub fn ban(&self, banned: BTreeMap<PeerId, Revocation>) {
        *self.0.banned.write() = banned;
        let peers: Vec<_> = self.0.slots().peers().cloned().collect();
        for peer in peers {
            if let Some(banned) = self.0.banned_of(peer.through.iter().copied().chain([peer.peer_id])) {
                peer.close(CloseCode::Banned, &format!("{banned} was banned"));
            }
        }
    }

    /// Connected peers with `peer_id` in their certificate chain: a ban of `peer_id` would revoke them, too.
    pub fn certified_by(&self, peer_id: PeerId) -> Vec<PeerId> {
        let through = |peer: &Arc<Peer>| peer.peer_id != peer_id && peer.through.contains(&peer_id);
        self.0.slots().peers().filter(|peer| through(peer)).map(|peer| peer.peer_id).collect()
    }

    /// Stores the addresses of a peer for the next `connect` or message to it.
    pub fn learn(&self, peer_id: PeerId, addrs: Vec<SocketAddr>) {
        self.0.slots().learn(peer_id, addrs);
    }

    /// Connects to a peer unless a connection exists; reports [`Event::Connected`](crate::Event::Connected)
    /// or [`Event::Disconnected`](crate::Event::Disconnected).
    pub fn connect(&self, peer_id: PeerId, addrs: Vec<SocketAddr>) {
        self.0.slots().learn(peer_id, addrs);
        dial::connect(&self.0, node_id(&peer_id));
    }

    /// Closes the connection to a peer and forgets its addresses.
    pub fn disconnect(&self, node: NodeId) {
        if let Some(peer) = self.0.slots().forget(&node) {
            peer.close(CloseCode::Removed, "dropped by the other node");
        }
    }

    /// Sends a control message, in order; connects first if necessary.
    ///
    /// # Errors
    /// No address of the node is known, the message is too long, or the peer is too slow (its connection is reset).
    pub fn send_message(&self, node: NodeId, bytes: Bytes) -> Result<(), SendError> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(SendError::TooLong { bytes: bytes.len(), most: MESSAGE_BYTES_MAX });
        }
        match self.0.peer(&node) {
            Some(peer) => peer.send_message(bytes).map_err(SendError::from),
            None => self.send_later(node, Outgoing::Message(bytes)),
        }
    }

    /// Sends a frame on the stream of its route; connects first if necessary. Frames of one route and priority arrive
    /// in order. All prefill chunks share one stream, because a chunk that overtook another would only be requested
    /// again.
    ///
    /// # Errors
    /// No address of the node is known, the payload does not match the header, or the peer is too slow: then a
    /// standby's copy is dropped, and any other frame resets the connection.
    pub fn send_frame(
        &self,
        node: NodeId,
        head: WireHeader,
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
            Some(peer) if priority == Priority::Standby && peer.is_behind() => Err(SendError::CopyDropped),
            Some(peer) => peer.send_frame(head, payload, priority).map_err(SendError::from),
            None => self.send_later(node, Outgoing::Frame(head, payload, priority)),
        }
    }

    /// Accepts frames of `route` that match `expectation` from now on. A frame of the route that does not match closes
    /// the connection; a stream of a route without expectation is stopped.
    pub fn expect(&self, route: Route, expectation: Expectation) {
        let mut expectations = self.0.expectations.write();
        let routes = expectations.entry(route.job).or_default();
        routes.insert(route, expectation);
        while routes.len() > ROUTES_PER_JOB_MAX {
            routes.pop_first();
        }
    }

    /// Ends a job: removes its expectations and ends its streams.
    pub fn forget(&self, job: u64) {
        self.0.expectations.write().remove(&job);
        self.0.slots().peers().for_each(|peer| peer.forget(job));
    }

    /// Sends a request to a connected peer's [`Serve`], at the priority and rate limit of weights.
    ///
    /// # Errors
    /// Not connected, the request is too long, or the connection ended.
    pub async fn request(&self, node: NodeId, request: Bytes) -> Result<Response, RequestError> {
        let (send, recv) = self.open_bulk(&node, receive::REQUEST).await?;
        bulk::ask(send, &request).await?;
        Ok(Response::new(recv))
    }

    /// Measures the link to a connected peer. Afterwards weights to it are limited to 70 % of the result, and the
    /// result determines the codec of large frames.
    ///
    /// # Errors
    /// Not connected, or the connection ended.
    pub async fn measure(&self, node: NodeId) -> Result<Link, RequestError> {
        let (send, recv) = self.open_bulk(&node, receive::PROBE).await?;
        let link = probe::measure(send, recv).await.map_err(|_| RequestError::Truncated)?;
        if let Some(peer) = self.0.peer(&node) {
            peer.learn_link(link.bytes_per_second);
        }
        Ok(link)
    }

    /// Statistics of all connections.
    pub fn peers(&self) -> Vec<PeerStats> {
        self.0.slots().peers().map(|peer| peer.stats()).collect()
    }

    /// Ends all control streams, gives sent data up to half a second to arrive, and closes the endpoint.
    pub async fn shutdown(&self) {
        let peers: Vec<_> = self.0.slots().peers().cloned().collect();
        self.0.endpoint.set_server_config(None);
        futures::future::join_all(peers.iter().map(|peer| peer.say_goodbye())).await;
        self.0.endpoint.close(peer::code(CloseCode::Bye), b"");
        let _ = tokio::time::timeout(SHUTDOWN_MAX, self.0.endpoint.wait_idle()).await;
    }

    fn send_later(&self, node: NodeId, outgoing: Outgoing) -> Result<(), SendError> {
        let peer = self.0.slots().wait(&node, outgoing)?;
        match peer {
            // The peer has connected in the meantime.
            Some((peer, outgoing)) => outgoing.send(&peer).map_err(SendError::from),
            None => {
                dial::connect(&self.0, node);
                Ok(())
            }
        }
    }

    async fn open_bulk(&self, node: &NodeId, kind: u8) -> Result<(quinn::SendStream, quinn::RecvStream), RequestError> {
        let peer = self.0.peer(node).ok_or(RequestError::NotConnected)?;
        let (mut send, recv) = peer.connection.open_bi().await.map_err(|_| RequestError::Truncated)?;
        let _ = send.set_priority(peer::BULK);
        send.write_u8(kind).await.map_err(|_| RequestError::Truncated)?;
        Ok((send, recv))
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({} at {})", self.0.identity.peer_id(), self.local_addr())
    }
}

/// Maximum routes of one job, over its epochs and edges; the oldest epoch is evicted first.
const ROUTES_PER_JOB_MAX: usize = 256;
/// Longest wait for the endpoint to become idle after the connections are closed.
const SHUTDOWN_MAX: Duration = Duration::from_millis(500);
