//! Why connections end: codes on the wire, and what they mean to a person on either side.
use crate::certificate::CertificateError;
use std::{fmt, net::SocketAddr, time::Duration};
use thiserror::Error;

use crate::identity::PeerId;

/// Told to the peer when a connection is closed. Numbers are part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum CloseCode {
    /// The node goes down, or has no more use for the connection.
    Bye = 0,
    /// Another connection between the two stays.
    Duplicate = 1,
    /// The first frame brought no certificate.
    NoCertificate = 2,
    /// The certificate does not verify.
    BadCertificate = 3,
    /// The certificate ended.
    CertificateExpired = 4,
    /// The certificate is of another mesh.
    OtherMesh = 5,
    /// Another protocol version.
    OtherVersion = 6,
    /// The first frame is malformed or late.
    BadHello = 7,
    /// A frame did not fit what its job may send.
    BadFrame = 8,
    /// A control message is too long.
    BadMessage = 9,
    /// The peer reads too slowly: its queue is full.
    TooSlow = 10,
    /// The node dropped the peer.
    Removed = 11,
    /// Too many connections.
    Busy = 12,
    /// Another key than expected answered.
    WrongPeer = 13,
    /// The node that was asked is in no mesh.
    NotAMember = 14,
    /// The peer, or whoever certified it, was banned from the mesh.
    Banned = 15,
}

impl CloseCode {
    pub(crate) fn from_wire(code: u64) -> Option<Self> {
        use CloseCode::{
            BadCertificate, BadFrame, BadHello, BadMessage, Banned, Busy, Bye, CertificateExpired, Duplicate,
            NoCertificate, NotAMember, OtherMesh, OtherVersion, Removed, TooSlow, WrongPeer,
        };
        const ALL: [CloseCode; 16] = [
            Bye,
            Duplicate,
            NoCertificate,
            BadCertificate,
            CertificateExpired,
            OtherMesh,
            OtherVersion,
            BadHello,
            BadFrame,
            BadMessage,
            TooSlow,
            Removed,
            Busy,
            WrongPeer,
            NotAMember,
            Banned,
        ];
        ALL.into_iter().find(|c| *c as u64 == code)
    }

    /// What the side that got closed should know and do.
    fn advice(self) -> &'static str {
        match self {
            CloseCode::Bye => "the peer said goodbye",
            CloseCode::Duplicate => "another connection to the same peer stays",
            CloseCode::NoCertificate => {
                "this node has no certificate of that mesh: join it first (`meshnode join TICKET`)"
            }
            CloseCode::BadCertificate => {
                "the peer does not accept this node's certificate: join again with a new ticket"
            }
            CloseCode::CertificateExpired => "this node's certificate has expired: join again with a new ticket",
            CloseCode::OtherMesh => "the peer belongs to another mesh: join that one with a ticket of it",
            CloseCode::OtherVersion => "the peer speaks another protocol version: update meshnode on the older side",
            CloseCode::BadHello => "the peer did not understand this node's greeting",
            CloseCode::BadFrame => "the peer refused a frame of this node",
            CloseCode::BadMessage => "the peer refused a control message of this node",
            CloseCode::TooSlow => "this node read too slowly for the peer",
            CloseCode::Removed => "the peer dropped this node",
            CloseCode::Busy => "the peer has too many connections: try again",
            CloseCode::WrongPeer => "the peer expected another node at this address",
            CloseCode::Banned => {
                "this node, or the member that invited it, was banned from the mesh: get a ticket from a member and join \
                 with a new identity (`meshnode join TICKET --data-dir NEW`)"
            }
            CloseCode::NotAMember => "that node is in no mesh itself yet",
        }
    }
}

impl From<&CertificateError> for CloseCode {
    fn from(error: &CertificateError) -> Self {
        match error {
            CertificateError::Expired { .. } => CloseCode::CertificateExpired,
            CertificateError::OtherMesh { .. } => CloseCode::OtherMesh,
            CertificateError::Banned { .. } => CloseCode::Banned,
            CertificateError::Malformed
            | CertificateError::OtherPeer { .. }
            | CertificateError::Forged { .. }
            | CertificateError::MayNotInvite { .. }
            | CertificateError::TooDeep => CloseCode::BadCertificate,
        }
    }
}

/// Why there is no connection (any more).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disconnect {
    /// The peer closed it.
    ByPeer {
        /// Its code.
        code: CloseCode,
        /// Its words.
        text: String,
    },
    /// This node closed it.
    Here {
        /// Our code.
        code: CloseCode,
        /// What we told the peer.
        text: String,
    },
    /// Silence: the peer or the path is gone.
    Lost,
    /// The protocol below failed.
    Broken(String),
    /// It could not be made.
    Dial(DialError),
}

impl fmt::Display for Disconnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Disconnect::ByPeer { code, text } if text.is_empty() => f.write_str(code.advice()),
            Disconnect::ByPeer { code, text } => write!(f, "{} ({text})", code.advice()),
            Disconnect::Here { text, .. } => write!(f, "closed here: {text}"),
            Disconnect::Lost => f.write_str("the peer fell silent"),
            Disconnect::Broken(why) => write!(f, "the connection broke: {why}"),
            Disconnect::Dial(error) => error.fmt(f),
        }
    }
}

/// Why a peer cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DialError {
    /// No address to try.
    #[error("no address is known for {peer}")]
    NoAddress {
        /// Whom.
        peer: Box<PeerId>,
    },
    /// Nothing answered.
    #[error("nothing answers at {} within {} s: is the node up, and may UDP pass?", list(addrs), after.as_secs())]
    Unreachable {
        /// Where.
        addrs: Vec<SocketAddr>,
        /// How long we tried.
        after: Duration,
    },
    /// Somebody else answered.
    #[error("at {addr} answers {found}, expected {expected}: the address belongs to another node now")]
    WrongPeer {
        /// Where.
        addr: SocketAddr,
        /// Whom we wanted.
        expected: Box<PeerId>,
        /// Who it is.
        found: Box<PeerId>,
    },
    /// It speaks another version of the protocol.
    #[error("{addr} {what}")]
    OtherVersion {
        /// Where.
        addr: SocketAddr,
        /// Which one, and which side to update.
        what: String,
    },
    /// It did not let us in.
    #[error("{}{}", code.advice(), if text.is_empty() { String::new() } else { format!(" ({text})") })]
    Refused {
        /// Its code.
        code: CloseCode,
        /// Its words.
        text: String,
    },
    /// We did not accept it.
    #[error("the certificate of {peer} is not accepted: {error}")]
    BadCertificate {
        /// Who.
        peer: Box<PeerId>,
        /// What is wrong.
        error: CertificateError,
    },
    /// This node is in no mesh.
    #[error("this node is in no mesh yet: start one with `meshnode up`, or join one with `meshnode join TICKET`")]
    NoCredentials,
    /// It is this node itself.
    #[error("{addr} is this node itself")]
    Myself {
        /// Where.
        addr: SocketAddr,
    },
    /// The peer answered nonsense.
    #[error("{addr} did not answer like a meshnode: {why}")]
    Broken {
        /// Where.
        addr: SocketAddr,
        /// What happened.
        why: String,
    },
}

fn list(addrs: &[SocketAddr]) -> String {
    addrs.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_survive_the_wire_and_say_what_to_do() {
        for code in 0..16 {
            let known = CloseCode::from_wire(code).unwrap();
            assert_eq!(known as u64, code);
            assert!(!known.advice().is_empty());
        }
        assert_eq!(CloseCode::from_wire(16), None);
        let expired = Disconnect::ByPeer { code: CloseCode::CertificateExpired, text: "3 s ago".into() };
        assert!(expired.to_string().contains("new ticket"), "{expired}");
    }
}
