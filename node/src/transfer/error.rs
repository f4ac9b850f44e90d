//! The error of transfers.
use crate::disk::{self, NoRoom};
use std::path::PathBuf;

/// Why weights could not be fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransferError {
    /// The file is not a readable model.
    #[error("{0}")]
    Model(String),
    /// The disk or the cache is too full for this node's share. Chunks fetched before are kept.
    #[error(transparent)]
    Full(#[from] NoRoom),
    /// The disk reported an error. Chunks fetched before are kept.
    #[error("cannot write {path}: {cause}", path = .path.display(), cause = disk::explain(.cause, disk::FREE_CACHE))]
    Disk {
        /// The file.
        path: PathBuf,
        /// The error.
        cause: std::io::Error,
    },
    /// No peer could provide a chunk or the index. Chunks fetched before are kept.
    #[error("no peer could provide {what}: {last}")]
    Peers {
        /// The chunk or the index.
        what: String,
        /// The last error.
        last: String,
    },
}

/// A task that hashes or writes did not complete: the node is shutting down.
pub(super) fn interrupted(error: tokio::task::JoinError) -> TransferError {
    TransferError::Peers { what: "the weights".into(), last: format!("fetching was interrupted: {error}") }
}
