//! Atomic file writes: a file is complete or absent.
use crate::folders;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::OutputError;

/// Suffix of a file until it is complete.
const PARTIAL: &str = ".partial";
/// Digits of a step in a file name, so that names sort by step.
const DIGITS: usize = 10;

/// Turns an I/O error into a plain text with advice.
#[expect(clippy::wildcard_enum_match_arm, reason = "only a few of many error kinds get a plainer text")]
pub(super) fn failed(path: &Path, error: &io::Error) -> OutputError {
    let (why, advice) = match error.kind() {
        io::ErrorKind::StorageFull => ("the disk is full".into(), "free some space; the run then continues"),
        io::ErrorKind::QuotaExceeded => {
            ("the disk quota is used up".into(), "free some space or raise the quota; the run then continues")
        }
        io::ErrorKind::FileTooLarge => {
            ("the file is too large for this disk".into(), "write less often, or to another disk")
        }
        io::ErrorKind::PermissionDenied => {
            ("permission denied".into(), "name another folder with --out, or allow writing to this one")
        }
        io::ErrorKind::ReadOnlyFilesystem => ("the file system is read-only".into(), "name another folder with --out"),
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => (
            "the path has a file where a folder is expected, or a folder where a file is expected".into(),
            "name another folder with --out",
        ),
        _ => (error.to_string(), "check that the folder exists and is writable; the write is retried"),
    };
    OutputError::File { path: path.into(), why, advice }
}

/// Creates a folder and checks that it is writable.
pub(super) fn prepare(folder: &Path) -> Result<(), OutputError> {
    fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    folders::probe(folder).map_err(|error| failed(folder, &error))
}

/// Writes a temporary file next to `path`, then renames it.
pub(super) fn replace(path: &Path, parts: &[&[u8]]) -> Result<(), OutputError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(PARTIAL);
    let partial = path.with_file_name(name);
    let written = folders::create_new(&partial).and_then(|mut file| {
        parts.iter().try_for_each(|part| file.write_all(part))?;
        // Some file systems report a full disk only here.
        file.flush()?;
        file.sync_data()?;
        drop(file);
        fs::rename(&partial, path)
    });
    written.map_err(|error| {
        let _ = fs::remove_file(&partial);
        failed(path, &error)
    })
}

/// `folder/name_0000001000.ending`.
pub(super) fn numbered(folder: &Path, name: &str, step: u64, ending: &str) -> PathBuf {
    folder.join(format!("{name}_{step:0DIGITS$}{ending}"))
}

/// The steps of the files named by [`numbered`], in ascending order.
pub(super) fn steps(folder: &Path, name: &str, ending: &str) -> Result<Vec<u64>, OutputError> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| failed(folder, &error))? {
        let entry = entry.map_err(|error| failed(folder, &error))?;
        let file = entry.file_name();
        let number = file.to_str().and_then(|file| file.strip_prefix(name)?.strip_prefix('_')?.strip_suffix(ending));
        let digits = number.filter(|digits| digits.len() >= DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit()));
        steps.extend(digits.and_then(|digits| digits.parse::<u64>().ok()));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Removes the files of steps after `last`.
pub(super) fn remove_after(folder: &Path, name: &str, ending: &str, last: u64) -> Result<(), OutputError> {
    for step in steps(folder, name, ending)?.into_iter().filter(|step| *step > last) {
        let path = numbered(folder, name, step, ending);
        fs::remove_file(&path).map_err(|error| failed(&path, &error))?;
    }
    Ok(())
}
