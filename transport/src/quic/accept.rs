//! Being reached: handshake, greeting, certificate. Until the certificate is checked a stranger has one stream and 64 KiB.
use super::Inner;
use super::close::CloseCode;
use super::dial::{self, DIAL_MAX, Refusal};
use super::hello::{Hello, HelloError, Purpose};
use super::join;
use super::peer::{self, Parts};
use crate::certificate::CertificateError;
use crate::identity::{NodeId, PeerId, node_id};
use crate::revocation::Revocation;
use crate::version::Mismatch;
use quinn::{Connection, ConnectionError, Incoming, RecvStream, SendStream};
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

/// Handshakes at once before callers must prove their address (a flood from forged addresses cannot).
const HANDSHAKES_FREE: usize = 32;
/// Handshakes at once.
const HANDSHAKES_MAX: usize = 256;
/// Of these, from one machine (of IPv6, one network of 64 bits, which one machine can fill). More than `HANDSHAKES_FREE`, so
/// that forged addresses cannot use up another machine's share; enough for a rack of nodes behind one address.
const HANDSHAKES_PER_SOURCE: usize = 64;
/// From the end of the handshake to the greeting, which the caller sends at once: a lost packet and its repetition.
const HELLO_MAX: Duration = Duration::from_secs(2);
/// How long a banned caller may take to read why.
const READ_MAX: Duration = Duration::from_secs(2);
/// How long our own dial to a caller may hold up the caller's.
const OWN_DIAL_MAX: Duration = Duration::from_millis(500);

/// Accepts until the endpoint closes.
pub(super) async fn run(inner: Arc<Inner>) {
    while let Some(incoming) = inner.endpoint.accept().await {
        // Connections that are being made from here do not count: strangers' addresses must not close the door.
        if inner.slots().peers().count() >= inner.limits.connections_max {
            incoming.refuse();
            continue;
        }
        if inner.handshakes.running() >= HANDSHAKES_FREE && !incoming.remote_address_validated() {
            // Only fails if it may not be retried, which an unvalidated address always may.
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

/// Callers being greeted, by source. A slot is given back when its guard is dropped, however the task ends.
#[derive(Debug, Default)]
pub(super) struct Handshakes(Mutex<BTreeMap<IpAddr, usize>>);

#[derive(Debug)]
struct Handshake {
    table: Arc<Handshakes>,
    source: IpAddr,
}

impl Handshakes {
    fn running(&self) -> usize {
        self.table().values().sum()
    }

    /// `None` while there are too many, in all or from there.
    fn begin(table: &Arc<Self>, from: IpAddr) -> Option<Handshake> {
        let source = source(from);
        let mut running = table.table();
        let (all, here) = (running.values().sum::<usize>(), running.get(&source).copied().unwrap_or(0));
        if all >= HANDSHAKES_MAX || here >= HANDSHAKES_PER_SOURCE {
            return None;
        }
        running.insert(source, here + 1);
        Some(Handshake { table: table.clone(), source })
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        // Every change is made in one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let mut running = self.table.table();
        match running.get_mut(&self.source) {
            Some(here) if *here > 1 => *here -= 1,
            Some(_) | None => drop(running.remove(&self.source)),
        }
    }
}

/// What one machine cannot change about its address.
fn source(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
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
        // The caller hung up: it tried several addresses, or found what it wanted.
        Ok(Err(HelloError::Malformed)) if connection.close_reason().is_some() => {}
        Ok(Err(error)) => close(inner, &connection, addr, peer, dial::refusal(&error)),
        Err(_) => close(inner, &connection, addr, peer, Refusal::new(CloseCode::BadHello, "no greeting came")),
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
        return refuse(CloseCode::NotAMember, "this node is in no mesh yet");
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
    // A duplicate was closed with that reason; the caller knows what to do.
    let _ = dial::establish(inner, parts, recv, Some(greeting));
}

/// Sends a banned caller the revocation, which it can check: it was a member, and its user should know.
async fn show_revocation(inner: &Inner, connection: &Connection, mut control: SendStream, revocation: Revocation) {
    let hello = Hello { instance: inner.instance, purpose: Purpose::Banned(revocation.into()) };
    let _ = timeout(READ_MAX, async {
        if control.write_all(&hello.encode()).await.is_ok() && control.shutdown().await.is_ok() {
            connection.closed().await;
        }
    })
    .await;
}

/// If this node is the lower one and is dialing the caller at this moment, its own dial stays: let it arrive first, so
/// that no connection is told to the node and then replaced.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_address_cannot_take_all_handshake_slots() {
        let table = Arc::new(Handshakes::default());
        let mut held: Vec<Handshake> =
            std::iter::from_fn(|| Handshakes::begin(&table, ip("192.0.2.1"))).take(HANDSHAKES_MAX).collect();
        assert_eq!(held.len(), HANDSHAKES_PER_SOURCE);
        assert!(Handshakes::begin(&table, ip("::ffff:192.0.2.1")).is_none(), "the same machine");
        held.extend(
            (1..=HANDSHAKES_PER_SOURCE).map(|i| {
                Handshakes::begin(&table, ip(&format!("2001:db8::{i:x}"))).expect("another machine is let in")
            }),
        );
        assert!(Handshakes::begin(&table, ip("2001:db8::ffff")).is_none(), "one network of 64 bits is one source");
        held.push(Handshakes::begin(&table, ip("2001:db8:0:1::1")).expect("another network"));
        held.clear();
        assert!(table.running() == 0 && table.table().is_empty(), "nothing is kept of sources that are gone");
    }

    #[test]
    fn a_greeting_that_panics_gives_its_slot_back() {
        let table = Arc::new(Handshakes::default());
        let slot = Handshakes::begin(&table, ip("192.0.2.1")).unwrap();
        let panicked = std::thread::spawn(move || {
            let _slot = slot;
            panic!("planned");
        });
        assert!(panicked.join().is_err());
        assert_eq!(table.running(), 0);
    }
}
