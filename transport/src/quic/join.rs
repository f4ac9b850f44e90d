//! Joining over the data plane: the joiner's side, and the inviter's up to the node's decision.
use super::close::{CloseCode, DialError};
use super::dial::{self, DIAL_MAX};
use super::hello::{Hello, Purpose};
use super::peer;
use super::{Endpoint, Inner};
use crate::certificate::{CertificateError, MeshId};
use crate::event::Event;
use crate::identity::PeerId;
use crate::join::{self, ANSWER_BYTES_MAX, Admission, Ask, Binding, JoinRefusal, JoinRequest};
use crate::ticket::Ticket;
use quinn::{Connection, SendStream};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::{sync::oneshot, time::timeout};

/// How long the inviter's node may think.
const DECISION_MAX: Duration = Duration::from_secs(10);
/// How long the joiner may take to read the answer.
const READ_MAX: Duration = Duration::from_secs(5);
/// What the exporter's output is for.
const LABEL: &[u8] = b"EXPORTER-meshnode-join";

impl Endpoint {
    /// Joins the ticket's mesh through its inviter. The endpoint's own credentials stay as they are: the caller keeps
    /// the admission and calls [`Endpoint::set_credentials`].
    ///
    /// # Errors
    /// The inviter cannot be reached, is somebody else, or refuses; the text says what to do.
    pub async fn join(&self, ticket: &Ticket, name: &str) -> Result<Admission, JoinError> {
        if ticket.is_expired(super::now_unix()) {
            return Err(self.refused(JoinRefusal::Expired));
        }
        let (admission, _) = self.ask(&ticket.addrs, Some(ticket.inviter), name, Some(ticket)).await?;
        Ok(admission)
    }

    /// Asks to join through a node at `addrs`, without a ticket: it answers with an admission if its mesh is open or the
    /// node was approved. Returns the admission and which node answered, as its connection proves. The certificate does not
    /// name it: the founder certifies with the root key.
    ///
    /// # Errors
    /// As `join`; [`JoinRefusal::NotApproved`] until a member approves this node: ask again later.
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
        admission.chain.verify(expected, inner.identity.peer_id(), super::now_unix())?;
        Ok((admission, inviter))
    }

    fn refused(&self, refusal: JoinRefusal) -> JoinError {
        JoinError::Refused { refusal, me: self.0.identity.peer_id() }
    }
}

async fn exchange(
    inner: &Arc<Inner>,
    connection: &Connection,
    addr: SocketAddr,
    ask: Ask,
) -> Result<Result<Admission, JoinRefusal>, JoinError> {
    let closed = |connection: &Connection| match connection.close_reason() {
        Some(error) => JoinError::Dial(dial::dial_error(error, addr)),
        None => JoinError::Answer { addr },
    };
    let (mut send, mut recv) = connection.open_bi().await.map_err(|_| closed(connection))?;
    let hello = Hello { instance: inner.instance, purpose: Purpose::Join(ask) };
    send.write_all(&hello.encode()).await.map_err(|_| closed(connection))?;
    let Ok(length) = recv.read_u32_le().await else {
        // The reason of a close may be a moment behind the cut stream.
        let _ = timeout(Duration::from_millis(100), connection.closed()).await;
        return Err(closed(connection));
    };
    if length as usize > ANSWER_BYTES_MAX {
        return Err(JoinError::Answer { addr });
    }
    // Read as it comes: nothing is allocated on the word of a node that is not yet trusted.
    let mut body = Vec::new();
    let mut limited = recv.take(u64::from(length));
    let read = limited.read_to_end(&mut body).await;
    match read {
        Ok(read) if read == length as usize => join::decode_answer(&body).ok_or(JoinError::Answer { addr }),
        Ok(_) | Err(_) => Err(closed(connection)),
    }
}

/// The inviter's side: asks the node, answers, and lets the joiner hang up.
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
    // A joiner that grants no flow control would hold this place of a handshake for ever.
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
) -> Result<Admission, JoinRefusal> {
    let mesh = inner.credentials().ok_or(JoinRefusal::NotAMember)?.mesh;
    if inner.banned_of([peer_id]).is_some() {
        return Err(JoinRefusal::Banned);
    }
    if ask.ticket.is_some_and(|(theirs, _, _)| theirs != mesh) {
        return Err(JoinRefusal::OtherMesh);
    }
    let ticket_mesh = ask.ticket.map(|(mesh, _, _)| mesh);
    let binding = bind(connection, ticket_mesh, peer_id, inner.identity.peer_id()).ok_or(JoinRefusal::Busy)?;
    let (tell, told) = oneshot::channel();
    let (ticket, proof) = ask.ticket.map_or((None, [0; 32]), |(_, id, proof)| (Some(id), proof));
    let request = JoinRequest { peer_id, addr, name: ask.name, ticket, proof, binding, answer: tell };
    inner.sink.event(Event::Join(request));
    match timeout(DECISION_MAX, told).await {
        Ok(Ok(answer)) => answer,
        // Nobody decided in time, or the request was dropped.
        Ok(Err(_)) | Err(_) => Err(JoinRefusal::Busy),
    }
}

/// Both ends of one TLS channel compute the same; nobody in between can.
fn bind(connection: &Connection, mesh: Option<MeshId>, joiner: PeerId, inviter: PeerId) -> Option<Binding> {
    let mut context = mesh.map_or(Vec::new(), |mesh| mesh.0.to_vec());
    context.extend_from_slice(&joiner.to_bytes());
    context.extend_from_slice(&inviter.to_bytes());
    let mut binding = [0; 32];
    connection.export_keying_material(&mut binding, LABEL, &context).ok()?;
    Some(binding)
}

/// Why a node did not join.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum JoinError {
    /// The inviter was not reached.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The inviter said no.
    #[error("{refusal}{}", advice(*refusal, *me))]
    Refused {
        /// Why.
        refusal: JoinRefusal,
        /// This node.
        me: PeerId,
    },
    /// The certificate that came does not make this node a member.
    #[error("the inviter's answer is not usable: {0}")]
    Certificate(#[from] CertificateError),
    /// The answer is nonsense.
    #[error("{addr} did not answer like a meshnode")]
    Answer {
        /// Who.
        addr: SocketAddr,
    },
}

/// What a person can do about a refusal, where it depends on who is asking.
fn advice(refusal: JoinRefusal, me: PeerId) -> String {
    if refusal == JoinRefusal::NotApproved {
        return format!(": on a member run `meshnode approve {me}`, or ask for a ticket (`meshnode invite`)");
    }
    String::new()
}
