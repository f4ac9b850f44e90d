//! Free disk space, and error texts that say what to do when there is too little.
use crate::config::Size;
use std::io;
use std::path::{Path, PathBuf};

/// Bytes that can be written at `path`, which need not exist yet; `None` if the system does not report it.
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|p| p.exists())?;
    let stat = rustix::fs::statvfs(existing).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Something was not written because the disk has too little free space.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room for {what} in {path}: {need} needed, {free} free; {advice}", path = .path.display())]
pub(crate) struct NoRoom {
    /// The data to write.
    pub what: String,
    /// Where.
    pub path: PathBuf,
    /// Bytes needed.
    pub need: Size,
    /// Bytes free.
    pub free: Size,
    /// What the user can do.
    pub advice: &'static str,
}

/// Checks the free space before anything is written. If `free` is unknown, the write itself will fail.
///
/// # Errors
/// Fewer than `need` bytes are free.
pub(crate) fn require(
    free: Option<u64>,
    need: u64,
    what: &str,
    path: &Path,
    advice: &'static str,
) -> Result<(), NoRoom> {
    match free {
        Some(free) if free < need => {
            Err(NoRoom { what: what.to_owned(), path: path.to_owned(), need: Size(need), free: Size(free), advice })
        }
        Some(_) | None => Ok(()),
    }
}

/// The operating system's error text, with what to do about it.
#[expect(clippy::wildcard_enum_match_arm, reason = "ErrorKind is non-exhaustive; other errors explain themselves")]
pub(crate) fn explain(error: &io::Error, advice: &str) -> String {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => format!("{error}; {advice}"),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            format!("{error}; make it writable for this user, or choose another place")
        }
        _ => error.to_string(),
    }
}

/// What to do about a full data directory.
pub(crate) const FREE_DATA: &str = "free some space there, or choose another --data-dir";
/// What to do about a full cache.
pub(crate) const FREE_CACHE: &str = "free some space there, or choose another --cache-dir";
