//! Accepting connections: handshake, greeting, certificate check. Until that check, a peer has one stream and 64 KiB.
use super::dial::{self, DIAL_MAX, Refusal};
use super::handshakes::{HANDSHAKES_FREE, Handshakes};
use super::hello::{Hello, HelloError, Purpose};
use super::inner::Inner;
use super::join;
use super::peer::{self, Parts};
use crate::certificate::CertificateError;
use crate::close::CloseCode;
use crate::identity::{NodeId, PeerId, node_id};
use crate::revocation::Revocation;
use crate::version::Mismatch;
use quinn::{Connection, ConnectionError, Incoming, RecvStream, SendStream};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

/// Longest wait for the greeting, which callers send right after the handshake: covers one lost packet and its
/// retransmission.
const HELLO_MAX: Duration = Duration::from_secs(2);
/// Time for a banned caller to read the revocation.
const READ_MAX: Duration = Duration::from_secs(2);
/// Longest delay of an incoming connection while this node dials the same peer.
const OWN_DIAL_MAX: Duration = Duration::from_millis(500);

/// Accepts until the endpoint closes.
pub(super) async fn run(inner: Arc<Inner>) {
    while let Some(incoming) = inner.endpoint.accept().await {
        // Outgoing dials do not count: addresses announced by strangers must not block incoming connections.
        if inner.slots().peers().count() >= inner.limits.connections_max {
            incoming.refuse();
            continue;
        }
        if inner.handshakes.running() >= HANDSHAKES_FREE && !incoming.remote_address_validated() {
            // Only fails if a retry is not allowed, and it always is for an unvalidated address.
            let _ = incoming.retry();
            continue;
        }
        let Some(slot) = Handshakes::begin(&inner.handshakes, incoming.remote_address().ip()) else {
            incoming.refuse();
            continue;
        };
        let inner = inner.clone();
        inner.runtime.clone().spawn(async move {
            greet(&inner, incoming).await;
            drop(slot);
        });
    }
}

async fn greet(inner: &Arc<Inner>, incoming: Incoming) {
    let addr = incoming.remote_address();
    let config = Arc::new(inner.configs.server(Some(addr)));
    let Ok(connecting) = incoming.accept_with(config) else { return };
    let connection = match timeout(DIAL_MAX, connecting).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(ConnectionError::TransportError(error))) if error.code == dial::no_protocol() => {
            return inner.refused(None, addr, Mismatch::unknown_caller());
        }
        Ok(Err(error)) => return inner.refused(None, addr, format!("a handshake failed: {error}")),
        Err(_) => return,
    };
    let Some(peer) = dial::remote_peer(&connection).filter(|p| *p != inner.identity.peer_id()) else {
        return connection.close(peer::code(CloseCode::BadHello), b"no usable key");
    };
    if let Some(name) = dial::older(&connection) {
        return close(inner, &connection, addr, peer, Refusal::version(name));
    }
    match timeout(HELLO_MAX, read_hello(&connection)).await {
        Ok(Ok((send, recv, hello))) => admit(inner, connection, addr, peer, (send, recv), hello).await,
        // The caller disconnected: it dials several addresses at once, or needs no answer any more.
        Ok(Err(HelloError::Malformed)) if connection.close_reason().is_some() => {}
        Ok(Err(error)) => close(inner, &connection, addr, peer, dial::refusal(&error)),
        Err(_) => close(inner, &connection, addr, peer, Refusal::new(CloseCode::BadHello, "no greeting arrived")),
    }
}

async fn read_hello(connection: &Connection) -> Result<(SendStream, RecvStream, Hello), HelloError> {
    let (send, mut recv) = connection.accept_bi().await.map_err(|_| HelloError::Malformed)?;
    let hello = Hello::read(&mut recv).await?;
    Ok((send, recv, hello))
}

async fn admit(
    inner: &Arc<Inner>,
    connection: Connection,
    addr: SocketAddr,
    peer_id: PeerId,
    (control, recv): (SendStream, RecvStream),
    hello: Hello,
) {
    let refuse = |code, why: &str| close(inner, &connection, addr, peer_id, Refusal::new(code, why));
    if let Purpose::Join(ask) = hello.purpose {
        return join::answer(inner, connection, addr, peer_id, control, ask).await;
    }
    let Some(chain) = inner.chain() else {
        return refuse(CloseCode::NotAMember, "this node is not in a mesh yet");
    };
    if hello.purpose == Purpose::Member(None) {
        return refuse(CloseCode::NoCertificate, "no certificate was presented");
    }
    let (expiry, through) = match dial::check_member(inner, &hello, peer_id) {
        Ok(checked) => checked,
        Err(error) => {
            let revocation = match &error {
                CertificateError::Banned { peer } => inner.revocation_of(peer),
                CertificateError::Malformed
                | CertificateError::OtherMesh { .. }
                | CertificateError::OtherPeer { .. }
                | CertificateError::Forged { .. }
                | CertificateError::MayNotInvite { .. }
                | CertificateError::Expired { .. }
                | CertificateError::TooDeep => None,
            };
            if let Some(revocation) = revocation {
                show_revocation(inner, &connection, control, revocation).await;
            }
            return refuse((&error).into(), &error.to_string());
        }
    };
    yield_to_own_dial(inner, peer_id).await;
    let greeting = Hello { instance: inner.instance, purpose: Purpose::Member(Some(chain)) }.encode();
    let parts = Parts { connection, peer_id, dialer: peer_id, instance: hello.instance, expiry, through, control };
    // A duplicate has been closed with that code; the caller handles it.
    let _ = dial::establish(inner, parts, recv, Some(greeting));
}

/// Sends the revocation to a banned caller, which can verify it: the caller was a member, and its user should learn of
/// the ban.
async fn show_revocation(inner: &Inner, connection: &Connection, mut control: SendStream, revocation: Revocation) {
    let hello = Hello { instance: inner.instance, purpose: Purpose::Banned(revocation.into()) };
    let _ = timeout(READ_MAX, async {
        if control.write_all(&hello.encode()).await.is_ok() && control.shutdown().await.is_ok() {
            connection.closed().await;
        }
    })
    .await;
}

/// If this node has the lower `PeerId` and is dialing the caller right now, its own dial wins. Waits for that dial, so
/// that no connection is reported to the node and then replaced.
async fn yield_to_own_dial(inner: &Arc<Inner>, caller: PeerId) {
    let node: NodeId = node_id(&caller);
    if inner.identity.peer_id() < caller {
        dial::wait_until(OWN_DIAL_MAX, || !inner.slots().is_dialing(&node)).await;
    }
}

fn close(inner: &Inner, connection: &Connection, addr: SocketAddr, peer: PeerId, refusal: Refusal) {
    let Refusal { code, here, there } = refusal;
    connection.close(peer::code(code), there.as_bytes());
    inner.refused(Some(peer), addr, here);
}
