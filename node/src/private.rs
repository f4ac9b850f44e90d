//! Files and folders that only their owner may open: keys, credentials, recordings.
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What a data directory of a node holds; one with none of these may be anything, and its mode is not changed.
const OF_A_NODE: [&str; 4] = ["identity.key", "membership", "store", crate::api_key::FILE];
/// Bits for everybody but the owner.
const OTHERS: u32 = 0o077;

/// Why a file or folder cannot be used for secrets. Nothing was changed on disk.
#[derive(Debug, thiserror::Error)]
pub enum PrivateError {
    /// The system refused.
    #[error("{path}: {source}", path = .path.display())]
    System {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It belongs to another user, who could read everything in it.
    #[error(
        "{path} belongs to the user with id {owner}, this process runs as {user}: run it as that user, or name another folder with --data-dir",
        path = .path.display()
    )]
    Foreign {
        /// Which.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// This process's user.
        user: u32,
    },
    /// Others may open it.
    #[error(
        "{path} has mode {mode:03o}, so other users may open it; run: chmod {wanted:03o} {path}",
        path = .path.display()
    )]
    Open {
        /// Which.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// What they should be.
        wanted: u32,
    },
}

/// Makes a folder with mode 0700. One that is there and open to others is closed if it is empty or a node's data directory;
/// any other is refused, because its mode may be meant.
///
/// # Errors
/// [`PrivateError`].
pub fn folder(path: &Path) -> Result<(), PrivateError> {
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
        tracing::info!("{} had mode {mode:03o}: it is 700 now, because it holds keys", path.display());
        return fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(system);
    }
    Err(PrivateError::Open { path: path.to_owned(), mode, wanted: 0o700 })
}

/// Writes a file with mode 0600 beside its place and moves it there.
///
/// # Errors
/// The system's.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
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

/// Creates a file with mode 0600, or empties one that is there and gives it this mode.
///
/// # Errors
/// The system's.
pub fn create(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    Ok(file)
}

/// The text of a file of at most `bytes_max` bytes that other users cannot read.
///
/// # Errors
/// [`PrivateError`]; not found is one of the system's.
pub fn read(path: &Path, bytes_max: u64) -> Result<String, PrivateError> {
    let system = |source| PrivateError::System { path: path.to_owned(), source };
    let file = File::open(path).map_err(system)?;
    let mode = file.metadata().map_err(system)?.permissions().mode() & 0o777;
    if mode & OTHERS != 0 {
        return Err(PrivateError::Open { path: path.to_owned(), mode, wanted: 0o600 });
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
        assert_eq!(mode(&before), 0o700, "of an earlier version");
    }

    #[test]
    fn a_folder_with_other_things_keeps_its_mode_and_is_refused() {
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
