//! Data for a peer, which may not be connected yet, and why it was not sent.
use super::peer::{Peer, Priority};
use crate::frame::WireHeader;
use crate::lane::LaneError;
use bytes::Bytes;
use std::sync::Arc;
use thiserror::Error;

/// Data to send once the peer is connected.
pub(super) enum Outgoing {
    Message(Bytes),
    Frame(WireHeader, Bytes, Priority),
}

impl Outgoing {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Outgoing::Message(bytes) | Outgoing::Frame(_, bytes, _) => bytes.len(),
        }
    }

    pub(super) fn send(self, peer: &Arc<Peer>) -> Result<(), LaneError> {
        match self {
            Outgoing::Message(bytes) => peer.send_message(bytes),
            Outgoing::Frame(head, payload, priority) => peer.send_frame(head, payload, priority),
        }
    }
}

/// Why a message or frame was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SendError {
    /// No connection and no address.
    #[error("no connection to this node and no address of it: connect to it first")]
    Unknown,
    /// The peer's queue is full; its connection is being reset.
    #[error("the peer is too slow: its queue is full")]
    Slow,
    /// A frame for a standby that has not read the earlier ones.
    #[error("copy for a standby dropped: the standby is too slow, its queue is full")]
    CopyDropped,
    /// The peer stopped this stream, or the connection is ending.
    #[error("the stream to the peer has ended")]
    Ended,
    /// Larger than the bound.
    #[error("{bytes} bytes, at most {most} may be sent")]
    TooLong {
        /// Size of the message or payload.
        bytes: usize,
        /// The bound.
        most: usize,
    },
    /// The payload does not match its header.
    #[error("a payload of {bytes} bytes, its header declares {expected}")]
    Shape {
        /// Size of the payload.
        bytes: usize,
        /// Size implied by count, width and dtype.
        expected: u64,
    },
}

impl From<LaneError> for SendError {
    fn from(error: LaneError) -> Self {
        match error {
            LaneError::Full => SendError::Slow,
            LaneError::Ended(_) => SendError::Ended,
        }
    }
}
