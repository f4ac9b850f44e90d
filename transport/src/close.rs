//! Why connections end: close codes on the wire, and their explanation for the users on both sides.
use crate::certificate::CertificateError;
use crate::identity::PeerId;
use std::{fmt, net::SocketAddr, time::Duration};
use thiserror::Error;

/// Close code sent to the peer. The numbers are part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum CloseCode {
    /// The node is shutting down, or no longer needs the connection.
    Bye = 0,
    /// Another connection between the two nodes is kept.
    Duplicate = 1,
    /// The greeting carried no certificate.
    NoCertificate = 2,
    /// The certificate does not verify.
    BadCertificate = 3,
    /// The certificate has expired.
    CertificateExpired = 4,
    /// The certificate is for another mesh.
    OtherMesh = 5,
    /// Another protocol version.
    OtherVersion = 6,
    /// The greeting is malformed or late.
    BadHello = 7,
    /// A frame did not match its job's expectation.
    BadFrame = 8,
    /// A control message is too long.
    BadMessage = 9,
    /// The peer reads too slowly: the queue to it is full.
    TooSlow = 10,
    /// The node dropped the peer.
    Removed = 11,
    /// Connection limit reached.
    Busy = 12,
    /// The dialed address has another key than expected.
    WrongPeer = 13,
    /// The dialed node is not in a mesh.
    NotAMember = 14,
    /// The peer, or a peer in its certificate chain, was banned from the mesh.
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

    /// What the side whose connection was closed should know and do.
    fn advice(self) -> &'static str {
        match self {
            CloseCode::Bye => "the peer closed the connection",
            CloseCode::Duplicate => "another connection to the same peer is kept",
            CloseCode::NoCertificate => {
                "this node has no certificate of that mesh: join it first (`meshnode join TICKET`)"
            }
            CloseCode::BadCertificate => {
                "the peer does not accept this node's certificate: join again with a new ticket"
            }
            CloseCode::CertificateExpired => "this node's certificate has expired: join again with a new ticket",
            CloseCode::OtherMesh => "the peer belongs to another mesh: join that mesh with a ticket for it",
            CloseCode::OtherVersion => "the peer speaks another protocol version: update meshnode on the older side",
            CloseCode::BadHello => "the peer did not understand this node's greeting",
            CloseCode::BadFrame => "the peer rejected a frame of this node",
            CloseCode::BadMessage => "the peer rejected a control message of this node",
            CloseCode::TooSlow => "this node read too slowly for the peer",
            CloseCode::Removed => "the peer dropped this node",
            CloseCode::Busy => "the peer has too many connections: try again",
            CloseCode::WrongPeer => "the peer expected another node at this address",
            CloseCode::Banned => {
                "this node, or the member that invited it, was banned from the mesh: get a ticket from a member and join \
                 with a new identity (`meshnode join TICKET --data-dir NEW`)"
            }
            CloseCode::NotAMember => "that node is not in a mesh itself yet",
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

/// Why there is no connection, or no longer one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disconnect {
    /// The peer closed it.
    ByPeer {
        /// The peer's close code.
        code: CloseCode,
        /// The peer's explanation.
        text: String,
    },
    /// This node closed it.
    Here {
        /// This node's close code.
        code: CloseCode,
        /// The explanation sent to the peer.
        text: String,
    },
    /// Timeout: the peer or the path is down.
    Lost,
    /// The QUIC connection failed.
    Broken(String),
    /// The dial failed.
    Dial(DialError),
}

impl fmt::Display for Disconnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Disconnect::ByPeer { code, text } if text.is_empty() => f.write_str(code.advice()),
            Disconnect::ByPeer { code, text } => write!(f, "{} ({text})", code.advice()),
            Disconnect::Here { text, .. } => write!(f, "closed here: {text}"),
            Disconnect::Lost => f.write_str("the peer stopped responding"),
            Disconnect::Broken(why) => write!(f, "the connection failed: {why}"),
            Disconnect::Dial(error) => error.fmt(f),
        }
    }
}

/// Why a dial failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DialError {
    /// No address is known.
    #[error("no address is known for {peer}")]
    NoAddress {
        /// The peer to dial.
        peer: Box<PeerId>,
    },
    /// No address answered.
    #[error("no answer from {} within {} s: check that the node is up and that no firewall blocks UDP", list(addrs), after.as_secs())]
    Unreachable {
        /// The addresses tried.
        addrs: Vec<SocketAddr>,
        /// Timeout.
        after: Duration,
    },
    /// A node with another key answered.
    #[error("{addr} is {found}, expected {expected}: the address now belongs to another node")]
    WrongPeer {
        /// The address.
        addr: SocketAddr,
        /// The expected key.
        expected: Box<PeerId>,
        /// The key found.
        found: Box<PeerId>,
    },
    /// The peer speaks another protocol version.
    #[error("{addr} {what}")]
    OtherVersion {
        /// The address.
        addr: SocketAddr,
        /// The version, and which side to update.
        what: String,
    },
    /// The peer rejected this node.
    #[error("{}{}", code.advice(), if text.is_empty() { String::new() } else { format!(" ({text})") })]
    Refused {
        /// The peer's close code.
        code: CloseCode,
        /// The peer's explanation.
        text: String,
    },
    /// This node rejected the peer's certificate.
    #[error("the certificate of {peer} was rejected: {error}")]
    BadCertificate {
        /// The peer.
        peer: Box<PeerId>,
        /// Why the certificate is invalid.
        error: CertificateError,
    },
    /// This node is not in a mesh.
    #[error("this node is not in a mesh yet: start one with `meshnode up`, or join one with `meshnode join TICKET`")]
    NoCredentials,
    /// The address is this node's own.
    #[error("{addr} is this node itself")]
    Myself {
        /// The address.
        addr: SocketAddr,
    },
    /// The peer violated the protocol.
    #[error("{addr} did not answer like a meshnode: {why}")]
    Broken {
        /// The address.
        addr: SocketAddr,
        /// The cause.
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
    fn codes_round_trip_and_have_advice() {
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
