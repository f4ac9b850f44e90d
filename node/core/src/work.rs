//! The vocabulary of the seam between the core and its shell, and of what nodes ask of each other: jobs, their parts, orders,
//! results and events. It imports no machine.
pub mod serve;
pub mod steps;

use crate::id::{NodeId, TensorId};
use alloc::vec::Vec;
use core::net::SocketAddr;
use serde::{Deserialize, Serialize};

/// A peer to announce to after a restart. The shell stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contact {
    /// Which node.
    pub node: NodeId,
    /// The key behind `node`, to be pinned by the connection.
    pub peer_id: Vec<u8>,
    /// Where its gossip socket was reached.
    pub gossip: Vec<SocketAddr>,
    /// Where its data socket was reached.
    pub data: Vec<SocketAddr>,
}

/// What a frame carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Hidden rows kept by the shell.
    Tensor(TensorId),
    /// Hidden rows of consecutive positions, kept apart: to be read one after the other.
    Tensors(Vec<TensorId>),
    /// Token ids for the first stage.
    Tokens(Vec<u32>),
}

/// From one placement of a job to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Predicted nanoseconds per token as it is, on the mesh as it is now.
    pub before_ns: u64,
    /// And as it would be.
    pub after_ns: u64,
    /// Weight bytes that nodes hold then and do not hold now.
    pub bytes: u64,
}

/// Why a member is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownReason {
    /// It said so.
    Left,
    /// SWIM lost it.
    Failed,
}
