//! How a node becomes a member: it proves a ticket's secret over the TLS channel to the inviter (or asks without a
//! ticket), the inviter's node decides, and the answer carries a certificate chain and the mesh key.
use crate::certificate::{CHAIN_BYTES_MAX, Chain, MeshCredentials, MeshId};
use crate::identity::PeerId;
use crate::ticket::ticket_id;
use crate::wire::{Reader, printable, put_long, put_short};
use bytes::Bytes;
use std::{fmt, net::SocketAddr};
use thiserror::Error;
use tokio::sync::oneshot;

/// Largest member list in an answer: the push-pull state of a large mesh.
pub const MEMBERS_BYTES_MAX: usize = 4 << 20;
/// Names are human-readable labels.
const NAME_BYTES_MAX: usize = 64;
/// Largest join request.
pub(crate) const ASK_BYTES_MAX: usize = 256;
/// Largest answer.
pub(crate) const ANSWER_BYTES_MAX: usize = 1 + 64 + 4 + CHAIN_BYTES_MAX + 4 + MEMBERS_BYTES_MAX;

/// Binds a proof to one TLS channel: the TLS exporter's output for (mesh, joiner, inviter).
pub(crate) type Binding = [u8; 32];

/// A join request waiting for the node's decision. Dropping it answers [`JoinRejection::Busy`].
pub struct JoinRequest {
    /// The joiner's public key.
    pub peer_id: PeerId,
    /// Its address.
    pub addr: SocketAddr,
    /// The name it chose.
    pub name: String,
    /// [`Ticket::id`](crate::Ticket::id) of the ticket it claims to hold.
    pub ticket: Option<[u8; 16]>,
    pub(crate) proof: [u8; 32],
    pub(crate) binding: Binding,
    pub(crate) answer: oneshot::Sender<Result<Admission, JoinRejection>>,
}

impl JoinRequest {
    /// Whether the joiner proved knowledge of `secret` on this connection.
    pub fn proves(&self, secret: &[u8; 16]) -> bool {
        // blake3::Hash compares in constant time.
        self.ticket == Some(ticket_id(secret)) && prove(secret, &self.binding) == blake3::Hash::from_bytes(self.proof)
    }

    /// Admits the joiner.
    pub fn admit(self, admission: Admission) {
        // The joiner may have disconnected; then the answer is not needed.
        let _ = self.answer.send(Ok(admission));
    }

    /// Rejects the joiner with a reason.
    pub fn reject(self, refusal: JoinRejection) {
        let _ = self.answer.send(Err(refusal));
    }
}

impl fmt::Debug for JoinRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with = if self.ticket.is_some() { "a ticket" } else { "no ticket" };
        write!(f, "JoinRequest({} \"{}\" at {} with {with})", self.peer_id, self.name, self.addr)
    }
}

/// What a new member receives.
#[derive(Clone, PartialEq, Eq)]
pub struct Admission {
    /// Its certificates.
    pub chain: Chain,
    /// The key from which gossip encryption keys are derived.
    pub mesh_key: [u8; 32],
    /// Opaque state from the inviter's core: its member list.
    pub members: Bytes,
}

impl Admission {
    /// The credentials of the new member.
    ///
    /// # Panics
    /// Never: an admission holds a decoded chain, and a chain has at least one certificate.
    pub fn credentials(&self) -> MeshCredentials {
        let mesh = self.chain.mesh().unwrap_or(MeshId([0; 32]));
        MeshCredentials { mesh, chain: self.chain.clone(), mesh_key: self.mesh_key, root_secret: None }
    }
}

impl fmt::Debug for Admission {
    /// Everything but the mesh key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Admission({:?}, {} bytes of members)", self.chain.mesh(), self.members.len())
    }
}

/// Why a joiner was rejected, as the inviter reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[repr(u8)]
pub enum JoinRejection {
    /// The inviter never issued the ticket, or dropped it.
    #[error("the inviter does not know this ticket; get a new one with `meshnode invite` on a member")]
    Unknown = 1,
    /// The ticket has expired.
    #[error("the ticket has expired; get a new one with `meshnode invite` on a member (`--ttl 24h` lasts a day)")]
    Expired = 2,
    /// The ticket has no uses left.
    #[error("the ticket is used up; get a new one with `meshnode invite` on a member (`--uses 5` admits five)")]
    UsedUp = 3,
    /// No ticket was presented, and the peer is not approved yet.
    #[error("this mesh admits by ticket or approval, and this node is not approved yet")]
    NotApproved = 4,
    /// The ticket is for another mesh than the inviter's current one.
    #[error("the ticket is for another mesh than its inviter's current one; get a new one with `meshnode invite`")]
    OtherMesh = 5,
    /// The inviter is not in a mesh.
    #[error("that node is not in a mesh itself yet; start it with `meshnode up`, or ask another member")]
    NotAMember = 6,
    /// Too many requests, or the inviter is shutting down.
    #[error("the inviter is busy or leaving; try again")]
    Busy = 7,
    /// The joiner is banned.
    #[error(
        "this node was banned from the mesh, and the key in its data directory stays banned: get a ticket from a member and \
         join with a new identity (`meshnode join TICKET --data-dir NEW`)"
    )]
    Banned = 8,
}

impl JoinRejection {
    fn from_wire(byte: u8) -> Option<Self> {
        use JoinRejection::{Banned, Busy, Expired, NotAMember, NotApproved, OtherMesh, Unknown, UsedUp};
        [Unknown, Expired, UsedUp, NotApproved, OtherMesh, NotAMember, Busy, Banned]
            .into_iter()
            .find(|r| *r as u8 == byte)
    }
}

/// The proof of a ticket secret on one channel.
pub(crate) fn prove(secret: &[u8; 16], binding: &Binding) -> blake3::Hash {
    blake3::keyed_hash(&blake3::derive_key("meshnode v1 join proof", secret), binding)
}

/// A join request on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) name: String,
    /// Mesh, ticket id and proof.
    pub(crate) ticket: Option<(MeshId, [u8; 16], [u8; 32])>,
}

impl Ask {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let end = (0..=self.name.len().min(NAME_BYTES_MAX)).rev().find(|n| self.name.is_char_boundary(*n)).unwrap_or(0);
        put_short(out, &self.name.as_bytes()[..end]);
        if let Some((mesh, id, proof)) = &self.ticket {
            out.extend_from_slice(&mesh.0);
            out.extend_from_slice(id);
            out.extend_from_slice(proof);
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader::new(bytes);
        let name = printable(&String::from_utf8_lossy(r.short(NAME_BYTES_MAX)?), NAME_BYTES_MAX);
        if r.end().is_some() {
            return Some(Self { name, ticket: None });
        }
        let ticket = Some((MeshId(r.array()?), r.array()?, r.array()?));
        r.end().map(|()| Self { name, ticket })
    }
}

pub(crate) fn encode_answer(answer: &Result<Admission, JoinRejection>) -> Vec<u8> {
    let admission = match answer {
        Ok(admission) => admission,
        Err(refusal) => return vec![*refusal as u8],
    };
    let mut out = vec![0];
    out.extend_from_slice(&admission.mesh_key);
    put_long(&mut out, &admission.chain.encode());
    put_long(&mut out, &admission.members);
    out
}

pub(crate) fn decode_answer(bytes: &[u8]) -> Option<Result<Admission, JoinRejection>> {
    let mut r = Reader::new(bytes);
    match r.u8()? {
        0 => {
            let mesh_key = r.array()?;
            let chain = Chain::decode(r.long(CHAIN_BYTES_MAX)?).ok()?;
            let members = Bytes::copy_from_slice(r.long(MEMBERS_BYTES_MAX)?);
            r.end().map(|()| Ok(Admission { chain, mesh_key, members }))
        }
        code => {
            let refusal = JoinRejection::from_wire(code)?;
            r.end().map(|()| Err(refusal))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::Noise;
    use crate::identity::Identity;

    fn admission() -> Admission {
        let founder = Identity::generate();
        let mesh = MeshCredentials::found(&founder, 1000);
        Admission { chain: mesh.chain, mesh_key: mesh.mesh_key, members: Bytes::from_static(b"members") }
    }

    #[test]
    fn requests_and_answers_round_trip() {
        for ticket in [None, Some((MeshId([1; 32]), [2; 16], [3; 32]))] {
            let ask = Ask { name: "röck".into(), ticket };
            let mut bytes = Vec::new();
            ask.encode(&mut bytes);
            assert_eq!(Ask::decode(&bytes), Some(ask));
        }
        let long = Ask { name: "ö".repeat(100), ticket: None };
        let mut bytes = Vec::new();
        long.encode(&mut bytes);
        assert_eq!(Ask::decode(&bytes).unwrap().name, "ö".repeat(NAME_BYTES_MAX / 2));
        assert_eq!(printable("a\x1b[31mb\n", NAME_BYTES_MAX), "a[31mb");
        for answer in [Ok(admission()), Err(JoinRejection::UsedUp), Err(JoinRejection::NotApproved)] {
            assert_eq!(decode_answer(&encode_answer(&answer)), Some(answer));
        }
        assert_eq!(admission().credentials().root_secret, None);
    }

    #[test]
    fn a_proof_is_valid_for_one_secret_and_one_channel() {
        let (answer, _keep) = oneshot::channel();
        let request = JoinRequest {
            peer_id: Identity::generate().peer_id(),
            addr: "127.0.0.1:1".parse().unwrap(),
            name: String::new(),
            ticket: Some(ticket_id(&[1; 16])),
            proof: *prove(&[1; 16], &[7; 32]).as_bytes(),
            binding: [7; 32],
            answer,
        };
        assert!(request.proves(&[1; 16]));
        assert!(!request.proves(&[2; 16]));
        assert!(!JoinRequest { binding: [8; 32], ..request }.proves(&[1; 16]));
    }

    #[test]
    fn noise_never_panics() {
        let good = encode_answer(&Ok(admission()));
        let mut ask = Vec::new();
        Ask { name: "n".into(), ticket: Some((MeshId([1; 32]), [2; 16], [3; 32])) }.encode(&mut ask);
        let mut noise = Noise::new(9);
        for _ in 0..10_000 {
            let _ = decode_answer(&noise.mangle(&good));
            let _ = Ask::decode(&noise.mangle(&ask));
        }
    }
}
