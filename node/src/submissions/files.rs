//! Files of a run's folder: each is written whole, and errors say what to do.
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

/// Suffix of a file until it is complete.
pub(super) const PARTIAL: &str = "partial";

/// Creates the folder given by `--out` if it does not exist.
///
/// # Errors
/// It cannot be created.
pub(crate) fn folder(out: &Path) -> Result<(), String> {
    fs::create_dir_all(out)
        .map_err(|e| format!("cannot write into {}: {e}; name a folder that can be written, with --out", out.display()))
}

/// Writes a file atomically and durably: after a crash it is the old one or the new one.
///
/// # Errors
/// A disk error; then nothing is changed.
pub(crate) fn whole_file(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let partial = path.with_extension(PARTIAL);
    let write = || {
        let mut file = crate::folders::create_new(&partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&partial, path)?;
        // Sync the folder too, so that the name is durable. Some file systems do not support that.
        if let Some(folder) = path.parent() {
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Ok(())
    };
    write().map_err(|e| {
        let _ = fs::remove_file(&partial);
        io_error(path, &e)
    })
}

/// The error text of a file: its path, the cause, and what to do about a full disk.
pub(super) fn io_error(path: &Path, error: &std::io::Error) -> String {
    let next = if error.kind() == std::io::ErrorKind::StorageFull {
        "; the disk is full: free some space; the run then continues"
    } else {
        ""
    };
    format!("{}: {error}{next}", path.display())
}
