//! Joining over the data plane: the joiner's side, and the inviter's side up to the node's decision.
use super::Endpoint;
use super::dial::{self, DIAL_MAX};
use super::hello::{Hello, Purpose};
use super::inner::{Inner, now_unix};
use super::peer;
use crate::certificate::{CertificateError, MeshId};
use crate::close::{CloseCode, DialError};
use crate::event::Event;
use crate::identity::PeerId;
use crate::join::{self, ANSWER_BYTES_MAX, Admission, Ask, Binding, JoinRejection, JoinRequest};
use crate::ticket::Ticket;
use quinn::{Connection, SendStream};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::{sync::oneshot, time::timeout};

/// Time for the inviter's node to decide.
const DECISION_MAX: Duration = Duration::from_secs(10);
/// Time for the joiner to read the answer.
const READ_MAX: Duration = Duration::from_secs(5);
/// TLS exporter label.
const LABEL: &[u8] = b"EXPORTER-meshnode-join";

impl Endpoint {
    /// Joins the ticket's mesh through its inviter. The endpoint's own credentials are unchanged: the caller stores the
    /// admission and calls [`Endpoint::set_credentials`].
    ///
    /// # Errors
    /// The inviter cannot be reached, has another key, or rejects the request; the error text says what to do.
    pub async fn join(&self, ticket: &Ticket, name: &str) -> Result<Admission, JoinError> {
        if ticket.is_expired(now_unix()) {
            return Err(self.refused(JoinRejection::Expired));
        }
        let (admission, _) = self.ask(&ticket.addrs, Some(ticket.inviter), name, Some(ticket)).await?;
        Ok(admission)
    }

    /// Asks to join through a node at `addrs`, without a ticket. The node admits if its mesh is open or this node was
    /// approved. Returns the admission and the key of the answering node, as proved by its connection; the certificate
    /// may not contain it, because the founder certifies with the root key.
    ///
    /// # Errors
    /// As for `join`; [`JoinRejection::NotApproved`] until a member approves this node: ask again later.
    pub async fn join_at(
        &self,
        addrs: &[SocketAddr],
        expected: Option<PeerId>,
        name: &str,
    ) -> Result<(Admission, PeerId), JoinError> {
        self.ask(addrs, expected, name, None).await
    }

    async fn ask(
        &self,
        addrs: &[SocketAddr],
        expected: Option<PeerId>,
        name: &str,
        ticket: Option<&Ticket>,
    ) -> Result<(Admission, PeerId), JoinError> {
        let inner = &self.0;
        let (connection, addr) = dial::open(inner, expected, addrs).await?;
        let inviter = dial::remote_peer(&connection).ok_or(JoinError::Answer { addr })?;
        let ticket = match ticket {
            None => None,
            Some(ticket) => {
                let mesh = Some(ticket.mesh);
                let binding =
                    bind(&connection, mesh, inner.identity.peer_id(), inviter).ok_or(JoinError::Answer { addr })?;
                Some((ticket.mesh, ticket.id(), *join::prove(&ticket.secret, &binding).as_bytes()))
            }
        };
        let mesh = ticket.map(|(mesh, _, _)| mesh);
        let answer =
            timeout(DECISION_MAX + DIAL_MAX, exchange(inner, &connection, addr, Ask { name: name.into(), ticket }))
                .await
                .map_err(|_| DialError::Unreachable { addrs: vec![addr], after: DECISION_MAX + DIAL_MAX })??;
        connection.close(peer::code(CloseCode::Bye), b"");
        let admission = answer.map_err(|refusal| self.refused(refusal))?;
        let expected = mesh.or(admission.chain.mesh()).ok_or(JoinError::Answer { addr })?;
        admission.chain.verify(expected, inner.identity.peer_id(), now_unix())?;
        Ok((admission, inviter))
    }

    fn refused(&self, refusal: JoinRejection) -> JoinError {
        JoinError::Refused { refusal, me: self.0.identity.peer_id() }
    }
}

async fn exchange(
    inner: &Arc<Inner>,
    connection: &Connection,
    addr: SocketAddr,
    ask: Ask,
) -> Result<Result<Admission, JoinRejection>, JoinError> {
    let closed = |connection: &Connection| match connection.close_reason() {
        Some(error) => JoinError::Dial(dial::dial_error(error, addr)),
        None => JoinError::Answer { addr },
    };
    let (mut send, mut recv) = connection.open_bi().await.map_err(|_| closed(connection))?;
    let hello = Hello { instance: inner.instance, purpose: Purpose::Join(ask) };
    send.write_all(&hello.encode()).await.map_err(|_| closed(connection))?;
    let Ok(length) = recv.read_u32_le().await else {
        // The close reason may arrive a moment after the stream error.
        let _ = timeout(Duration::from_millis(100), connection.closed()).await;
        return Err(closed(connection));
    };
    if length as usize > ANSWER_BYTES_MAX {
        return Err(JoinError::Answer { addr });
    }
    // Read incrementally: an untrusted node's length must not cause an allocation.
    let mut body = Vec::new();
    let mut limited = recv.take(u64::from(length));
    let read = limited.read_to_end(&mut body).await;
    match read {
        Ok(read) if read == length as usize => join::decode_answer(&body).ok_or(JoinError::Answer { addr }),
        Ok(_) | Err(_) => Err(closed(connection)),
    }
}

/// The inviter's side: asks the node for a decision, sends the answer, and waits for the joiner to close.
pub(super) async fn answer(
    inner: &Arc<Inner>,
    connection: Connection,
    addr: SocketAddr,
    peer_id: PeerId,
    mut send: SendStream,
    ask: Ask,
) {
    let answer = decide(inner, &connection, addr, peer_id, ask).await;
    if let Err(refusal) = &answer {
        inner.refused(Some(peer_id), addr, format!("a request to join: {refusal}"));
    }
    let body = join::encode_answer(&answer);
    let mut bytes = Vec::with_capacity(4 + body.len());
    crate::wire::put_long(&mut bytes, &body);
    // Without the timeout, a joiner that grants no flow control would occupy its handshake slot forever.
    let _ = timeout(READ_MAX, async {
        if send.write_all(&bytes).await.is_ok() && send.shutdown().await.is_ok() {
            connection.closed().await;
        }
    })
    .await;
    connection.close(peer::code(CloseCode::Bye), b"");
}

async fn decide(
    inner: &Inner,
    connection: &Connection,
    addr: SocketAddr,
    peer_id: PeerId,
    ask: Ask,
) -> Result<Admission, JoinRejection> {
    let mesh = inner.credentials().ok_or(JoinRejection::NotAMember)?.mesh;
    if inner.banned_of([peer_id]).is_some() {
        return Err(JoinRejection::Banned);
    }
    if ask.ticket.is_some_and(|(theirs, _, _)| theirs != mesh) {
        return Err(JoinRejection::OtherMesh);
    }
    let ticket_mesh = ask.ticket.map(|(mesh, _, _)| mesh);
    let binding = bind(connection, ticket_mesh, peer_id, inner.identity.peer_id()).ok_or(JoinRejection::Busy)?;
    let (sender, decision) = oneshot::channel();
    let (ticket, proof) = ask.ticket.map_or((None, [0; 32]), |(_, id, proof)| (Some(id), proof));
    let request = JoinRequest { peer_id, addr, name: ask.name, ticket, proof, binding, answer: sender };
    inner.sink.event(Event::Join(request));
    match timeout(DECISION_MAX, decision).await {
        Ok(Ok(answer)) => answer,
        // No decision in time, or the request was dropped.
        Ok(Err(_)) | Err(_) => Err(JoinRejection::Busy),
    }
}

/// Both ends of a TLS channel compute the same value; a man in the middle cannot.
fn bind(connection: &Connection, mesh: Option<MeshId>, joiner: PeerId, inviter: PeerId) -> Option<Binding> {
    let mut context = mesh.map_or(Vec::new(), |mesh| mesh.0.to_vec());
    context.extend_from_slice(&joiner.to_bytes());
    context.extend_from_slice(&inviter.to_bytes());
    let mut binding = [0; 32];
    connection.export_keying_material(&mut binding, LABEL, &context).ok()?;
    Some(binding)
}

/// Why a join failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum JoinError {
    /// The inviter could not be reached.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The inviter rejected the request.
    #[error("{refusal}{}", advice(*refusal, *me))]
    Refused {
        /// The inviter's reason.
        refusal: JoinRejection,
        /// This node's key.
        me: PeerId,
    },
    /// The received certificate does not make this node a member.
    #[error("the inviter's certificate for this node is invalid: {0}")]
    Certificate(#[from] CertificateError),
    /// The answer is malformed.
    #[error("{addr} did not answer like a meshnode")]
    Answer {
        /// The address of the inviter.
        addr: SocketAddr,
    },
}

/// What the user can do about a rejection, if that depends on the joiner's key.
fn advice(refusal: JoinRejection, me: PeerId) -> String {
    if refusal == JoinRejection::NotApproved {
        return format!(": on a member run `meshnode approve {me}`, or ask for a ticket (`meshnode invite`)");
    }
    String::new()
}
