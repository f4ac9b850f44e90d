//! Events that the transport reports to its node: one closed enum, passed to a callback on the task where it occurred.
use crate::close::Disconnect;
use crate::frame::{Route, WireHeader};
use crate::identity::{NodeId, PeerId};
use crate::join::JoinRequest;
use crate::revocation::Revocation;
use bytes::Bytes;
use std::{net::SocketAddr, ops::Deref, time::Duration};
use tokio::sync::OwnedSemaphorePermit;

/// Receives events. Called on network tasks, so it should hand the event over and return.
pub trait Sink: Send + Sync + 'static {
    /// Handles one event.
    fn event(&self, event: Event);
}

impl<F: Fn(Event) + Send + Sync + 'static> Sink for F {
    fn event(&self, event: Event) {
        self(event);
    }
}

/// An event of the transport.
#[derive(Debug)]
pub enum Event {
    /// A certified connection to a member is established. Also reported when `connect` finds one already established.
    Connected {
        /// The member.
        node: NodeId,
        /// Its public key.
        peer_id: PeerId,
        /// Remote address.
        addr: SocketAddr,
        /// Current round-trip estimate.
        rtt: Duration,
    },
    /// The connection has ended, or could not be established. Data in flight may be lost.
    Disconnected {
        /// The member.
        node: NodeId,
        /// The cause.
        reason: Disconnect,
    },
    /// A control message of a certified member. Messages of one sender are in order.
    Message {
        /// Sender.
        from: NodeId,
        /// The message.
        bytes: Received,
    },
    /// An expected frame; header, shape, length and checksum are valid.
    Frame {
        /// Sender.
        from: NodeId,
        /// Its header.
        head: WireHeader,
        /// Its rows, decompressed.
        payload: Received,
    },
    /// The peer does not expect frames of this route and stopped the stream.
    StreamStopped {
        /// The peer.
        node: NodeId,
        /// The route.
        route: Route,
    },
    /// A node asks to join through this node.
    Join(JoinRequest),
    /// A member rejected this node because it, or a member in its certificate chain, is banned. Carries the revocation,
    /// whose signatures are valid.
    Banned(Box<Revocation>),
    /// A peer or its data was rejected: for the log, and for users who look for a missing peer.
    Rejected {
        /// The peer, if known.
        from: Option<PeerId>,
        /// Its address.
        addr: SocketAddr,
        /// What was rejected, why, and what to do.
        why: String,
    },
}

/// Received bytes and their flow-control credit: while the node holds many of them, the sender has to wait.
#[derive(Debug)]
pub struct Received {
    bytes: Bytes,
    credit: Option<OwnedSemaphorePermit>,
}

impl Received {
    pub(crate) fn new(bytes: impl Into<Bytes>, credit: Option<OwnedSemaphorePermit>) -> Self {
        Self { bytes: bytes.into(), credit }
    }

    /// The bytes alone; releases the credit now.
    pub fn into_bytes(self) -> Bytes {
        drop(self.credit);
        self.bytes
    }

    /// The bytes, and the credit to hold until they have been used.
    pub fn split(self) -> (Bytes, Credit) {
        (self.bytes, Credit { _permit: self.credit })
    }

    /// The bytes alone, without a copy if they have no other owner; releases the credit now.
    pub fn into_vec(self) -> Vec<u8> {
        self.into_bytes().into()
    }
}

/// Flow-control credit of received bytes; dropping it lets the sender send the same amount again.
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
