//! Files and folders with access for their owner only: keys, credentials, recordings.
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Entries that identify a node's data directory. The mode of any other non-empty folder is not changed.
const OF_A_NODE: [&str; 4] = ["identity.key", "membership", "store", crate::api_key::FILE];
/// Permission bits of group and others.
const OTHERS: u32 = 0o077;

/// Why a file or folder cannot be used for secrets. Nothing was changed on disk.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrivateError {
    /// A system call failed.
    #[error("{path} cannot be used: {source}; check the path, its permissions and the free space", path = .path.display())]
    System {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It belongs to another user, who could read everything in it.
    #[error(
        "{path} belongs to the user with id {owner}, but this process runs as user {user}: run it as that user, or choose another folder with --data-dir",
        path = .path.display()
    )]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// This process's user.
        user: u32,
    },
    /// Other users have access.
    #[error(
        "{path} has mode {mode:03o}, which gives other users access; run: chmod {expected:03o} {path}",
        path = .path.display()
    )]
    Open {
        /// The file or folder.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// The expected permission bits.
        expected: u32,
    },
}

/// Creates a folder with mode 0700. If it exists and gives other users access, its mode is changed if it is empty or a
/// node's data directory; otherwise it is rejected, because its mode may be intended.
///
/// # Errors
/// [`PrivateError`].
pub(crate) fn folder(path: &Path) -> Result<(), PrivateError> {
    let system = |source| PrivateError::System { path: path.to_owned(), source };
    let meta = match fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(system);
        }
        Err(e) => return Err(system(e)),
    };
    let (owner, user) = (meta.uid(), rustix::process::geteuid().as_raw());
    if owner != user {
        return Err(PrivateError::Foreign { path: path.to_owned(), owner, user });
    }
    let mode = meta.permissions().mode() & 0o777;
    if mode & OTHERS == 0 {
        return Ok(());
    }
    let empty = || fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    if OF_A_NODE.iter().any(|name| path.join(name).exists()) || empty() {
        tracing::info!("changed the mode of {} from {mode:03o} to 700, because it contains keys", path.display());
        return fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(system);
    }
    Err(PrivateError::Open { path: path.to_owned(), mode, expected: 0o700 })
}

/// Writes a file with mode 0600 atomically: to a temporary file, then by a rename.
///
/// # Errors
/// The system's error.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".new-{}", std::process::id()));
    let beside = path.with_file_name(name);
    let written = create(&beside).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&beside, path)
    });
    written.inspect_err(|_| drop(fs::remove_file(&beside)))
}

/// Creates a file with mode 0600, or truncates an existing one and sets its mode.
///
/// # Errors
/// The system's error.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    Ok(file)
}

/// Reads a text file of at most `bytes_max` bytes to which other users have no access.
///
/// # Errors
/// [`PrivateError`]; a missing file is [`PrivateError::System`].
pub(crate) fn read(path: &Path, bytes_max: u64) -> Result<String, PrivateError> {
    let system = |source| PrivateError::System { path: path.to_owned(), source };
    let file = File::open(path).map_err(system)?;
    let mode = file.metadata().map_err(system)?.permissions().mode() & 0o777;
    if mode & OTHERS != 0 {
        return Err(PrivateError::Open { path: path.to_owned(), mode, expected: 0o600 });
    }
    let mut text = String::new();
    file.take(bytes_max + 1).read_to_string(&mut text).map_err(system)?;
    if text.len() as u64 > bytes_max {
        return Err(system(io::Error::other(format!("longer than {bytes_max} bytes"))));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn make(path: &Path, mode: u32) {
        fs::create_dir(path).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_data_directory_is_closed_to_other_users() {
        let dir = tempfile::tempdir().unwrap();
        let fresh = dir.path().join("deep/fresh");
        folder(&fresh).unwrap();
        assert_eq!(mode(&fresh), 0o700);
        let empty = dir.path().join("empty");
        make(&empty, 0o777);
        folder(&empty).unwrap();
        assert_eq!(mode(&empty), 0o700);
        let before = dir.path().join("before");
        make(&before, 0o755);
        fs::write(before.join("identity.key"), b"key").unwrap();
        folder(&before).unwrap();
        assert_eq!(mode(&before), 0o700, "from an earlier version");
    }

    #[test]
    fn a_folder_with_other_files_keeps_its_mode_and_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("home");
        make(&home, 0o755);
        fs::write(home.join("letter.txt"), b"Dear").unwrap();
        let error = folder(&home).unwrap_err().to_string();
        assert!(error.contains("755") && error.contains("chmod 700"), "{error}");
        assert_eq!(mode(&home), 0o755);
    }

    #[test]
    fn secrets_are_written_and_read_by_their_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        fs::write(&path, b"old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = read(&path, 100).unwrap_err().to_string();
        assert!(error.contains("644") && error.contains("chmod 600"), "{error}");
        write(&path, b"new").unwrap();
        assert_eq!((mode(&path), read(&path, 3).unwrap().as_str()), (0o600, "new"));
        assert!(read(&path, 2).unwrap_err().to_string().contains("longer than 2 bytes"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        drop(create(&path).unwrap());
        assert_eq!((mode(&path), fs::read(&path).unwrap().len()), (0o600, 0));
    }
}
