//! Dialing a peer: all its addresses in parallel with a small stagger, a check of its key, then the greetings.
use super::config::SERVER_NAME;
use super::hello::{Hello, HelloError, Purpose};
use super::inner::{Inner, now_unix};
use super::peer::{self, Parts, Peer};
use super::receive;
use super::slots::{Dial, Placed};
use crate::certificate::CertificateError;
use crate::close::{CloseCode, DialError, Disconnect};
use crate::event::Event;
use crate::identity::{NodeId, PeerId};
use crate::revocation::Revocation;
use crate::version::{self, Mismatch};
use bytes::Bytes;
use futures::{StreamExt, stream::FuturesUnordered};
use quinn::{Connection, ConnectionError, RecvStream, TransportErrorCode, crypto::rustls::HandshakeData};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::time::{Instant, sleep, timeout};

/// Dial timeout. A handshake over the longest path takes less than two seconds.
pub(super) const DIAL_MAX: Duration = Duration::from_secs(5);
/// Delay between the addresses of one peer: the first usually answers before the second is tried.
const STAGGER: Duration = Duration::from_millis(50);
/// Delay before a peer that closed a connection because of a ban is dialed again.
const REDIAL_BANNED: Duration = Duration::from_secs(1);
/// Time for an older node to reject this node's greeting: more than the longest path needs.
const REFUSAL_MAX: Duration = Duration::from_secs(1);
/// Time for the crossing dial of the peer with the lower `PeerId` to arrive.
const CROSSING_MAX: Duration = Duration::from_secs(1);

/// Dials unless a connection exists or a dial is in progress.
pub(super) fn connect(inner: &Arc<Inner>, node: NodeId) {
    let dial = inner.slots().begin_dial(&node);
    match dial {
        Dial::Running => {}
        Dial::Connected(peer) => inner.sink.event(connected(&peer)),
        Dial::Begin(peer_id, addrs) => {
            let inner = inner.clone();
            inner.runtime.clone().spawn(async move {
                let result = reach(&inner, peer_id, &addrs).await;
                if let Err(DialError::Refused { code: CloseCode::Duplicate, .. }) = &result {
                    // The peer's own dial is on its way and takes precedence.
                    wait_until(CROSSING_MAX, || inner.peer(&node).is_some()).await;
                }
                let alone = inner.slots().end_dial(&node);
                if let (Err(error), true) = (result, alone) {
                    inner.sink.event(Event::Disconnected { node, reason: Disconnect::Dial(error) });
                }
            });
        }
    }
}

async fn reach(inner: &Arc<Inner>, peer_id: PeerId, addrs: &[SocketAddr]) -> Result<(), DialError> {
    let Some(chain) = inner.chain() else { return Err(DialError::NoCredentials) };
    if let Some(banned) = inner.banned_of([peer_id]) {
        let error = CertificateError::Banned { peer: banned.into() };
        return Err(DialError::BadCertificate { peer: peer_id.into(), error });
    }
    if addrs.is_empty() {
        return Err(DialError::NoAddress { peer: peer_id.into() });
    }
    let (connection, addr) = open(inner, Some(peer_id), addrs).await?;
    let greeting = greet(inner, &connection, addr, peer_id, Purpose::Member(Some(chain)));
    let (control, recv, theirs) = match timeout(DIAL_MAX, greeting).await {
        Ok(greeted) => greeted?,
        Err(_) => return Err(DialError::Unreachable { addrs: vec![addr], after: DIAL_MAX }),
    };
    if let Purpose::Banned(revocation) = theirs.purpose {
        connection.close(peer::code(CloseCode::Bye), b"");
        return Err(refused_as_banned(inner, revocation));
    }
    let (expiry, through) = match check_member(inner, &theirs, peer_id) {
        Ok(checked) => checked,
        Err(error) => {
            connection.close(peer::code((&error).into()), error.to_string().as_bytes());
            return Err(DialError::BadCertificate { peer: peer_id.into(), error });
        }
    };
    let (dialer, instance) = (inner.identity.peer_id(), theirs.instance);
    let parts = Parts { connection, peer_id, dialer, instance, expiry, through, control };
    match establish(inner, parts, recv, None) {
        Ok(()) => Ok(()),
        Err(code) => Err(DialError::Refused { code, text: String::new() }),
    }
}

/// Handles a peer's claim that this node is banned. The claim counts only if the revocation verifies and concerns this
/// node or a member in its certificate chain.
fn refused_as_banned(inner: &Inner, revocation: Box<Revocation>) -> DialError {
    let about_us = inner.credentials().is_some_and(|held| {
        let ours = held.chain.peers().any(|peer| peer == revocation.banned);
        ours && revocation.verify(held.mesh).is_ok()
    });
    if !about_us {
        return DialError::Refused { code: CloseCode::Banned, text: "its revocation is invalid".into() };
    }
    let text = format!("{} is banned", revocation.banned);
    inner.sink.event(Event::Banned(revocation));
    DialError::Refused { code: CloseCode::Banned, text }
}

/// Connects to the first address that answers with the expected key.
pub(super) async fn open(
    inner: &Arc<Inner>,
    expected: Option<PeerId>,
    addrs: &[SocketAddr],
) -> Result<(Connection, SocketAddr), DialError> {
    let start = Instant::now();
    // An IPv4 socket cannot reach IPv6 addresses; an IPv6 socket reaches both.
    let v6 = inner.endpoint.local_addr().is_ok_and(|local| local.is_ipv6());
    let addrs: Vec<_> = addrs.iter().copied().filter(|addr| v6 || addr.is_ipv4()).collect();
    let mut attempts: FuturesUnordered<_> = addrs
        .iter()
        .enumerate()
        .map(|(i, addr)| async move {
            tokio::time::sleep_until(start + STAGGER * i as u32).await;
            timeout(DIAL_MAX, handshake(inner, expected, *addr)).await.ok()
        })
        .collect();
    let mut worst = DialError::Unreachable { addrs: addrs.clone(), after: DIAL_MAX };
    while let Some(attempt) = attempts.next().await {
        match attempt {
            Some(Ok(connection)) => return Ok(connection),
            Some(Err(DialError::Unreachable { .. })) | None => {}
            // An answer from the wrong peer is more informative than a timeout.
            Some(Err(error)) => worst = error,
        }
    }
    Err(worst)
}

async fn handshake(
    inner: &Inner,
    expected: Option<PeerId>,
    addr: SocketAddr,
) -> Result<(Connection, SocketAddr), DialError> {
    let config = inner.configs.client(addr);
    let broken = |why: String| DialError::Broken { addr, why };
    let connecting = inner.endpoint.connect_with(config, addr, SERVER_NAME).map_err(|e| broken(e.to_string()))?;
    let connection = connecting.await.map_err(|error| dial_error(error, addr))?;
    if let Some(name) = older(&connection) {
        return Err(leave_older(inner, &connection, addr, name).await);
    }
    let found = remote_peer(&connection).ok_or_else(|| broken("it presented no key".into()))?;
    if found == inner.identity.peer_id() {
        return Err(DialError::Myself { addr });
    }
    if let Some(expected) = expected.filter(|e| *e != found) {
        connection.close(peer::code(CloseCode::WrongPeer), b"");
        return Err(DialError::WrongPeer { addr, expected: expected.into(), found: found.into() });
    }
    Ok((connection, addr))
}

/// The name of the older version that the handshake negotiated; `None` if the peer speaks this node's version.
pub(super) fn older(connection: &Connection) -> Option<&'static str> {
    let data = connection.handshake_data()?.downcast::<HandshakeData>().ok()?;
    let name = data.protocol?;
    version::EARLIER.into_iter().find(|earlier| earlier.as_bytes() == name)
}

/// Closes a connection that was dialed to an older node. A greeting is sent first: the older node reads its number and
/// logs the rejection, which it would not do for a close alone.
async fn leave_older(inner: &Inner, connection: &Connection, addr: SocketAddr, name: &str) -> DialError {
    let Refusal { code, here, there } = Refusal::version(name);
    let greeting = Hello { instance: inner.instance, purpose: Purpose::Member(None) }.encode();
    let _ = timeout(REFUSAL_MAX, async {
        let (mut send, _recv) = connection.open_bi().await.ok()?;
        send.write_all(&greeting).await.ok()?;
        connection.closed().await;
        Some(())
    })
    .await;
    connection.close(peer::code(code), there.as_bytes());
    DialError::OtherVersion { addr, what: here }
}

/// Sends this node's greeting on the first stream and reads the peer's.
pub(super) async fn greet(
    inner: &Inner,
    connection: &Connection,
    addr: SocketAddr,
    peer: PeerId,
    purpose: Purpose,
) -> Result<(quinn::SendStream, RecvStream, Hello), DialError> {
    let gone = |error: ConnectionError| dial_error(error, addr);
    let (mut send, mut recv) = connection.open_bi().await.map_err(gone)?;
    let hello = Hello { instance: inner.instance, purpose };
    let written = send.write_all(&hello.encode()).await;
    let read = match written {
        Ok(()) => Hello::read(&mut recv).await,
        Err(_) => Err(HelloError::Malformed),
    };
    match read {
        Ok(theirs) => Ok((send, recv, theirs)),
        Err(error) => {
            // A close reason is more informative than the stream error that it causes, and may arrive a moment later.
            let closed = timeout(Duration::from_millis(100), connection.closed()).await;
            if let Ok(reason) = closed {
                return Err(dial_error(reason, addr));
            }
            let Refusal { code, here, there } = refusal(&error);
            connection.close(peer::code(code), there.as_bytes());
            Err(match error {
                HelloError::Version { .. } => DialError::OtherVersion { addr, what: here },
                HelloError::BadChain => {
                    DialError::BadCertificate { peer: peer.into(), error: CertificateError::Malformed }
                }
                HelloError::Malformed => DialError::Broken { addr, why: "its greeting is malformed".into() },
            })
        }
    }
}

/// Why a greeting is rejected.
pub(super) struct Refusal {
    pub(super) code: CloseCode,
    /// Message for this node's log.
    pub(super) here: String,
    /// Message for the peer.
    pub(super) there: String,
}

impl Refusal {
    /// The same message for both.
    pub(super) fn new(code: CloseCode, why: &str) -> Self {
        Self { code, here: why.into(), there: why.into() }
    }

    /// The peer speaks protocol version `name`.
    pub(super) fn version(name: &str) -> Self {
        let Mismatch { here, there } = Mismatch::with(name);
        Self { code: CloseCode::OtherVersion, here, there }
    }
}

pub(super) fn refusal(error: &HelloError) -> Refusal {
    match error {
        HelloError::Malformed => Refusal::new(CloseCode::BadHello, "malformed greeting"),
        HelloError::Version { found } => Refusal::version(&format!("meshnode/{}", found.saturating_sub(1))),
        HelloError::BadChain => Refusal::new(CloseCode::BadCertificate, &CertificateError::Malformed.to_string()),
    }
}

/// Checks whether a greeting proves membership of this node's mesh; returns the expiry and the peers in the chain.
pub(super) fn check_member(inner: &Inner, hello: &Hello, peer: PeerId) -> Result<(u64, Vec<PeerId>), CertificateError> {
    let Some(credentials) = inner.credentials() else { return Err(CertificateError::Malformed) };
    match &hello.purpose {
        Purpose::Member(Some(chain)) => {
            chain.verify(credentials.mesh, peer, now_unix())?;
            match inner.banned_of(chain.peers().chain([peer])) {
                Some(banned) => Err(CertificateError::Banned { peer: banned.into() }),
                None => Ok((chain.expiry(), chain.peers().collect())),
            }
        }
        Purpose::Member(None) | Purpose::Join(_) | Purpose::Banned(_) => Err(CertificateError::Malformed),
    }
}

/// Registers a checked connection as the peer's connection, reports it to the node, and starts reading. `greeting` is
/// sent first.
///
/// # Errors
/// The code with which the connection was closed because another one is kept.
pub(super) fn establish(
    inner: &Arc<Inner>,
    parts: Parts,
    recv: RecvStream,
    greeting: Option<Vec<u8>>,
) -> Result<(), CloseCode> {
    let peer = Arc::new(Peer::new(parts, &inner.limits, inner.sink.clone(), inner.runtime.clone()));
    let greet = || {
        if let Some(greeting) = greeting {
            let _ = peer.send_control(greeting.into(), Bytes::new());
        }
    };
    let placed = inner.slots().place(&peer, greet);
    let replaced = match placed {
        Placed::Stays { replaced } => replaced,
        Placed::Duplicate => {
            peer.close(CloseCode::Duplicate, "another connection is kept");
            return Err(CloseCode::Duplicate);
        }
    };
    if let Some(old) = replaced {
        let reason = old.connection.close_reason().map_or(Disconnect::Lost, |error| old.reason(error));
        inner.sink.event(Event::Disconnected { node: old.node, reason });
    }
    // A ban that was set while this connection was being checked did not close it.
    if inner.banned_of(peer.through.iter().copied().chain([peer.peer_id])).is_some() {
        peer.close(CloseCode::Banned, "banned");
    }
    inner.sink.event(connected(&peer));
    receive::spawn(inner, &peer, recv);
    inner.runtime.spawn(watch(inner.clone(), peer));
    Ok(())
}

/// Closes a connection when its certificate expires. Reports its end once, unless a replacement already reported it.
async fn watch(inner: Arc<Inner>, peer: Arc<Peer>) {
    let certified = Duration::from_secs(peer.expiry.saturating_sub(now_unix()));
    let error = match timeout(certified, peer.connection.closed()).await {
        Ok(error) => error,
        Err(_) => {
            peer.close(CloseCode::CertificateExpired, "the certificate has expired");
            peer.connection.closed().await
        }
    };
    let reason = peer.reason(error);
    let banned = matches!(reason, Disconnect::ByPeer { code: CloseCode::Banned, .. });
    if inner.slots().remove(&peer) {
        inner.sink.event(Event::Disconnected { node: peer.node, reason });
    }
    if banned {
        // The peer sends the revocation to a node that dials it. Its listening port is the port of this connection.
        inner.slots().learn_first(peer.peer_id, peer.connection.remote_address());
        // Bounds the rate of dials to a member that keeps closing with this reason.
        tokio::time::sleep(REDIAL_BANNED).await;
        connect(&inner, peer.node);
    }
}

fn connected(peer: &Peer) -> Event {
    Event::Connected {
        node: peer.node,
        peer_id: peer.peer_id,
        addr: peer.connection.remote_address(),
        rtt: peer.connection.rtt(),
    }
}

/// The key behind a connection; TLS has verified that the peer holds it.
pub(super) fn remote_peer(connection: &Connection) -> Option<PeerId> {
    let identity = connection.peer_identity()?;
    let certificates = identity.downcast::<Vec<rustls::pki_types::CertificateDer<'static>>>().ok()?;
    libp2p_tls::certificate::parse(certificates.first()?).ok().map(|certificate| certificate.peer_id())
}

/// TLS alert 120: no common protocol name.
pub(super) fn no_protocol() -> TransportErrorCode {
    TransportErrorCode::crypto(120)
}

pub(super) fn dial_error(error: ConnectionError, addr: SocketAddr) -> DialError {
    let no_protocol = no_protocol();
    let unknown = || DialError::OtherVersion { addr, what: Mismatch::unknown_answer() };
    match &error {
        ConnectionError::TimedOut => DialError::Unreachable { addrs: vec![addr], after: DIAL_MAX },
        ConnectionError::VersionMismatch => unknown(),
        ConnectionError::ConnectionClosed(close) if close.error_code == no_protocol => unknown(),
        ConnectionError::TransportError(error) if error.code == no_protocol => unknown(),
        ConnectionError::ApplicationClosed(close)
            if close.error_code == peer::code(CloseCode::OtherVersion) && !close.reason.is_empty() =>
        {
            let what = format!("refuses this node's protocol version: {}", peer::text(&close.reason));
            DialError::OtherVersion { addr, what }
        }
        ConnectionError::ApplicationClosed(close) => DialError::Refused {
            code: CloseCode::from_wire(close.error_code.into_inner()).unwrap_or(CloseCode::Bye),
            text: peer::text(&close.reason),
        },
        ConnectionError::ConnectionClosed(close) if close.error_code == TransportErrorCode::CONNECTION_REFUSED => {
            DialError::Refused { code: CloseCode::Busy, text: String::new() }
        }
        ConnectionError::TransportError(_)
        | ConnectionError::ConnectionClosed(_)
        | ConnectionError::Reset
        | ConnectionError::LocallyClosed
        | ConnectionError::CidsExhausted => DialError::Broken { addr, why: error.to_string() },
    }
}

/// Polls a condition that another task fulfils.
pub(super) async fn wait_until(most: Duration, met: impl Fn() -> bool) {
    let end = Instant::now() + most;
    while !met() && Instant::now() < end {
        sleep(Duration::from_millis(5)).await;
    }
}
