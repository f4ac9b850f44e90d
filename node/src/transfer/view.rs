//! The state of the weights on this node's disk, as the API shows it.
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Human-readable state of a library.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WeightsView {
    /// The folder of weights from peers.
    pub cache_dir: PathBuf,
    /// Bytes in it.
    pub cache_used: u64,
    /// Most bytes in it.
    pub cache_limit: u64,
    /// Chunks served to peers since the node started.
    pub given_chunks: u64,
    /// Their bytes.
    pub given_bytes: u64,
    /// Chunks received from each peer since the node started.
    pub peers: Vec<PeerWeights>,
    /// Transfers in progress.
    pub transfers: Vec<TransferView>,
}

/// What a peer sent since the node started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerWeights {
    /// Node id, hex.
    pub node: String,
    /// Chunks received from it.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Chunks whose hash was wrong.
    pub refused: u64,
}

/// A transfer in progress.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TransferView {
    /// The user's name for the model.
    pub model: String,
    /// First layer.
    pub first_layer: usize,
    /// One past the last layer.
    pub end_layer: usize,
    /// Bytes that were missing at the start.
    pub bytes_total: u64,
    /// Bytes of them fetched so far.
    pub bytes_done: u64,
    /// Number of peers that sent some.
    pub peers: usize,
}
