//! Files that are there as a whole or not at all.
use crate::folders;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::OutputError;

/// What a file is called until it is complete.
const PARTIAL: &str = ".partial";
/// Digits of a step in a name, so that names sort as steps do.
const DIGITS: usize = 10;

/// What the system said, and what to do.
#[expect(clippy::wildcard_enum_match_arm, reason = "a few of many kinds of errors are told in plain words")]
pub(super) fn failed(path: &Path, error: &io::Error) -> OutputError {
    let (full, why, advice) = match error.kind() {
        io::ErrorKind::StorageFull => (true, "the disk is full".into(), "free some space, and it goes on by itself"),
        io::ErrorKind::QuotaExceeded => {
            (true, "the disk quota is used up".into(), "free some space or raise the quota, and it goes on by itself")
        }
        io::ErrorKind::FileTooLarge => {
            (false, "the file is too large for this disk".into(), "write less often, or to another disk")
        }
        io::ErrorKind::PermissionDenied => {
            (false, "permission denied".into(), "name another folder with --out, or allow writing to this one")
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            (false, "the file system is read-only".into(), "name another folder with --out")
        }
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => (
            false,
            "a file is where a folder should be, or the other way round".into(),
            "name another folder with --out",
        ),
        _ => (false, error.to_string(), "see that the folder is there and can be written: it is tried again"),
    };
    OutputError::File { path: path.into(), why, advice, full }
}

/// Makes a folder and sees whether it can be written to.
pub(super) fn prepare(folder: &Path) -> Result<(), OutputError> {
    fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    folders::probe(folder).map_err(|error| failed(folder, &error))
}

/// Writes a file beside its place and moves it there.
pub(super) fn replace(path: &Path, parts: &[&[u8]]) -> Result<(), OutputError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(PARTIAL);
    let partial = path.with_file_name(name);
    let written = folders::create_new(&partial).and_then(|mut file| {
        parts.iter().try_for_each(|part| file.write_all(part))?;
        // Some file systems tell only now that there is no space.
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

/// The steps of the files that [`numbered`] names, in order.
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

/// Removes the files of later steps.
pub(super) fn remove_after(folder: &Path, name: &str, ending: &str, last: u64) -> Result<(), OutputError> {
    for step in steps(folder, name, ending)?.into_iter().filter(|step| *step > last) {
        let path = numbered(folder, name, step, ending);
        fs::remove_file(&path).map_err(|error| failed(&path, &error))?;
    }
    Ok(())
}
