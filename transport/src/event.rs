//! What the transport tells its node: one closed enum, handed to a callback on the task where it happened.
use crate::frame::{FrameHead, Route};
use crate::identity::{NodeId, PeerId};
use crate::join::JoinRequest;
use crate::quic::Disconnect;
use crate::revocation::Revocation;
use bytes::Bytes;
use std::{net::SocketAddr, ops::Deref, time::Duration};
use tokio::sync::OwnedSemaphorePermit;

/// Where events go. It is called on network tasks, so it should hand over and return.
pub trait Sink: Send + Sync + 'static {
    /// Something happened.
    fn event(&self, event: Event);
}

impl<F: Fn(Event) + Send + Sync + 'static> Sink for F {
    fn event(&self, event: Event) {
        self(event);
    }
}

/// Something happened.
#[derive(Debug)]
pub enum Event {
    /// A certified connection to a member stands. Told again when `connect` finds it standing already.
    Connected {
        /// Who.
        node: NodeId,
        /// Its key.
        peer_id: PeerId,
        /// Where.
        addr: SocketAddr,
        /// Round trip as measured so far.
        rtt: Duration,
    },
    /// The connection is gone, or could not be made. What was on the way may be lost.
    Disconnected {
        /// Who.
        node: NodeId,
        /// Why.
        reason: Disconnect,
    },
    /// A control message of a certified member, in the order it was sent.
    Message {
        /// Sender.
        from: NodeId,
        /// The message.
        bytes: Received,
    },
    /// A frame that was expected; header, shape, length and checksum fit.
    Frame {
        /// Sender.
        from: NodeId,
        /// What it says.
        head: FrameHead,
        /// Its rows, unpacked.
        payload: Received,
    },
    /// The peer does not expect frames of this route and stopped reading them.
    LaneRefused {
        /// Who.
        node: NodeId,
        /// Which frames.
        route: Route,
    },
    /// Somebody wants to join through this node.
    Join(JoinRequest),
    /// A member refused this node because it, or a member that its membership runs through, is banned: the revocation,
    /// whose signatures hold.
    Banned(Box<Revocation>),
    /// Something was refused: for the log, and for people who wonder why a peer does not come up.
    Refused {
        /// Who, where known.
        from: Option<PeerId>,
        /// From where.
        addr: SocketAddr,
        /// What, why, and what to do.
        why: String,
    },
}

/// Bytes that arrived, and the credit they hold: while a node keeps many of them, the peer that sends them has to wait.
#[derive(Debug)]
pub struct Received {
    bytes: Bytes,
    credit: Option<OwnedSemaphorePermit>,
}

impl Received {
    pub(crate) fn new(bytes: impl Into<Bytes>, credit: Option<OwnedSemaphorePermit>) -> Self {
        Self { bytes: bytes.into(), credit }
    }

    /// The bytes alone; gives the credit back now.
    pub fn into_bytes(self) -> Bytes {
        drop(self.credit);
        self.bytes
    }

    /// The bytes, and the credit to be kept until they have been used.
    pub fn split(self) -> (Bytes, Credit) {
        (self.bytes, Credit { _permit: self.credit })
    }

    /// The bytes alone, without a copy where nobody else holds them; gives the credit back now.
    pub fn into_vec(self) -> Vec<u8> {
        self.into_bytes().into()
    }
}

/// The room that arrived bytes take among what their sender may have under way; dropping it gives the room back.
#[derive(Debug)]
pub struct Credit {
    _permit: Option<OwnedSemaphorePermit>,
}

impl Deref for Received {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}
