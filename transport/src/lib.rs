//! Peer-to-peer transport: identity, discovery, encrypted gossip, QUIC streams. It does not depend on models or
//! membership.
//!
//! Read in this order: [`Identity`] and certificates (who may connect), [`Ticket`] and joining (how a node becomes a
//! member), [`Endpoint`] (the data plane) with frames and lanes, gossip, discovery.

pub mod buffer_pool;
pub mod bulk;
pub mod certificate;
mod close;
pub mod compress;
pub mod discovery;
mod event;
pub mod frame;
#[cfg(test)]
mod fuzz;
pub mod gossip;
pub mod identity;
pub mod join;
mod lane;
mod probe;
pub mod quic;
pub mod revocation;
mod socket;
mod throttle;
pub mod ticket;
mod version;
mod wire;

pub use bulk::{Reply, RequestError, Response, Serve};
pub use certificate::{CertificateError, Chain, MeshCredentials, MeshId, Roles};
pub use close::{CloseCode, DialError, Disconnect};
pub use event::{Credit, Event, Received, Sink};
pub use frame::{Codec, Dtype, Epoch, Expectation, FrameError, Route, WireHeader};
pub use gossip::{GossipError, GossipSocket, GossipStats};
pub use identity::{Identity, IdentityError, NodeId, PeerId, node_id, verify};
pub use join::{Admission, JoinRejection, JoinRequest};
pub use probe::Link;
pub use quic::{Endpoint, JoinError, Limits, MESSAGE_BYTES_MAX, Options, PeerStats, Priority, SendError};
pub use revocation::Revocation;
pub use socket::{BindError, Buffers};
pub use ticket::{Ticket, TicketError, ticket_id};
pub use version::PROTOCOL_NAME;
pub use wire::printable;
