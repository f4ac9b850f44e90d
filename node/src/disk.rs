//! Room on disks: how much there is, and what people are told when it is not enough.
use crate::config::Size;
use std::io;
use std::path::{Path, PathBuf};

/// Bytes that may be written where `path` is, or will be; `None` where the system does not say.
pub fn free_bytes(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|p| p.exists())?;
    let stat = rustix::fs::statvfs(existing).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Something was not written because the disk is too full for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room for {what} in {path}: {need} needed, {free} free; {advice}", path = .path.display())]
pub struct NoRoom {
    /// What was to be written.
    pub what: String,
    /// Where.
    pub path: PathBuf,
    /// Bytes it takes.
    pub need: Size,
    /// Bytes there are.
    pub free: Size,
    /// What to do.
    pub advice: &'static str,
}

/// Refuses what cannot end well, before anything is written. Where the free space is unknown, writing will tell.
///
/// # Errors
/// There are fewer than `need` bytes.
pub fn require(free: Option<u64>, need: u64, what: &str, path: &Path, advice: &'static str) -> Result<(), NoRoom> {
    match free {
        Some(free) if free < need => {
            Err(NoRoom { what: what.to_owned(), path: path.to_owned(), need: Size(need), free: Size(free), advice })
        }
        Some(_) | None => Ok(()),
    }
}

/// The system's words, and what to do about them.
#[expect(clippy::wildcard_enum_match_arm, reason = "ErrorKind is open; all else explains itself")]
pub fn explain(error: &io::Error, advice: &str) -> String {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => format!("{error}; {advice}"),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            format!("{error}; make it writable for this user, or choose another place")
        }
        _ => error.to_string(),
    }
}

/// What to do about a full data directory.
pub const FREE_DATA: &str = "free some space there, or choose another --data-dir";
/// What to do about a full cache.
pub const FREE_CACHE: &str = "free some space there, or choose another --cache-dir";
