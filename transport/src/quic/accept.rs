//! Being reached: handshake, greeting, certificate. Until the certificate is checked a stranger has one stream and 64 KiB.
use super::Inner;
use super::close::CloseCode;
use super::dial::{self, DIAL_MAX};
use super::hello::{Hello, HelloError, Purpose};
use super::join;
use super::peer::{self, Parts};
use crate::identity::{NodeId, PeerId, node_id};
use quinn::{Connection, Incoming, RecvStream, SendStream};
use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::time::timeout;

/// Handshakes at once before callers must prove their address (a flood from forged addresses cannot).
const HANDSHAKES_FREE: usize = 32;
/// Handshakes at once.
const HANDSHAKES_MAX: usize = 256;
/// How long our own dial to a caller may hold up the caller's.
const OWN_DIAL_MAX: Duration = Duration::from_millis(500);

/// Accepts until the endpoint closes.
pub(super) async fn run(inner: Arc<Inner>) {
    let handshakes = Arc::new(AtomicUsize::new(0));
    while let Some(incoming) = inner.endpoint.accept().await {
        let running = handshakes.load(Ordering::Relaxed);
        let full = inner.endpoint.open_connections() > inner.limits.connections_max;
        if running >= HANDSHAKES_MAX || full {
            incoming.refuse();
            continue;
        }
        if running >= HANDSHAKES_FREE && !incoming.remote_address_validated() {
            // Only fails if it may not be retried, which an unvalidated address always may.
            let _ = incoming.retry();
            continue;
        }
        handshakes.fetch_add(1, Ordering::Relaxed);
        let (inner, handshakes) = (inner.clone(), handshakes.clone());
        inner.runtime.clone().spawn(async move {
            greet(&inner, incoming).await;
            handshakes.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

async fn greet(inner: &Arc<Inner>, incoming: Incoming) {
    let addr = incoming.remote_address();
    let config = Arc::new(inner.configs.server(Some(addr)));
    let Ok(connecting) = incoming.accept_with(config) else { return };
    let connection = match timeout(DIAL_MAX, connecting).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return inner.refused(None, addr, format!("a handshake failed: {error}")),
        Err(_) => return,
    };
    let Some(peer) = dial::remote_peer(&connection).filter(|p| *p != inner.identity.peer_id()) else {
        return connection.close(peer::code(CloseCode::BadHello), b"no usable key");
    };
    match timeout(DIAL_MAX, read_hello(&connection)).await {
        Ok(Ok((send, recv, hello))) => admit(inner, connection, addr, peer, (send, recv), hello).await,
        // The caller hung up: it tried several addresses, or found what it wanted.
        Ok(Err(HelloError::Malformed)) if connection.close_reason().is_some() => {}
        Ok(Err(error)) => {
            let (code, why) = dial::refusal(&error);
            close(inner, &connection, addr, peer, code, &why);
        }
        Err(_) => close(inner, &connection, addr, peer, CloseCode::BadHello, "no greeting came"),
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
    let refuse = |code, why: &str| close(inner, &connection, addr, peer_id, code, why);
    if let Purpose::Join(ask) = hello.purpose {
        return join::answer(inner, connection, addr, peer_id, control, ask).await;
    }
    let Some(chain) = inner.chain() else {
        return refuse(CloseCode::NotAMember, "this node is in no mesh yet");
    };
    if hello.purpose == Purpose::Member(None) {
        return refuse(CloseCode::NoCertificate, "no certificate was presented");
    }
    let (expiry, through) = match dial::check_member(inner, &hello, peer_id) {
        Ok(checked) => checked,
        Err(error) => return refuse((&error).into(), &error.to_string()),
    };
    yield_to_own_dial(inner, peer_id).await;
    let greeting = Hello { instance: inner.instance, purpose: Purpose::Member(Some(chain)) }.encode();
    let parts = Parts { connection, peer_id, dialer: peer_id, instance: hello.instance, expiry, through, control };
    // A duplicate was closed with that reason; the caller knows what to do.
    let _ = dial::establish(inner, parts, recv, Some(greeting));
}

/// If this node is the lower one and is dialing the caller at this moment, its own dial stays: let it arrive first, so
/// that no connection is told to the node and then replaced.
async fn yield_to_own_dial(inner: &Arc<Inner>, caller: PeerId) {
    let node: NodeId = node_id(&caller);
    if inner.identity.peer_id() < caller {
        dial::wait_until(OWN_DIAL_MAX, || !inner.slots().is_dialing(&node)).await;
    }
}

fn close(inner: &Inner, connection: &Connection, addr: SocketAddr, peer: PeerId, code: CloseCode, why: &str) {
    connection.close(peer::code(code), why.as_bytes());
    inner.refused(Some(peer), addr, why);
}
