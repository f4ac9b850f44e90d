//! The API key that administering a node requires: created at the first start, stored in the data directory, and found
//! there by the commands.
//!
//! A command has the address of an API, not the data directory behind it. So a node announces itself in a folder of the
//! user: a file named after the address contains the path of the key file. It contains no secret, and a stale one does
//! no harm: before a command sends a key, the node must prove that it knows the key.
use crate::private::{self, PrivateError};
use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

/// Name of the key file in a data directory.
pub(crate) const FILE: &str = "api.key";
/// Longest key file; users may write it by hand.
const FILE_BYTES_MAX: u64 = 1024;
/// Shortest key in it: 128 bits cannot be guessed. Generated keys have 256.
const KEY_BYTES_MIN: usize = 16;
/// Most announcements in the user's folder: all nodes of one machine, and stale files of killed nodes.
const ANNOUNCED_MAX: usize = 256;

/// A key of an API.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct ApiKey(String);

impl ApiKey {
    /// A new key of 256 bits.
    ///
    /// # Errors
    /// The system's random number generator fails.
    pub(crate) fn random() -> Result<Self, String> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|e| format!("cannot generate a random key: {e}"))?;
        Ok(Self(data_encoding::HEXLOWER.encode(&bytes)))
    }

    /// A key given by the user.
    pub(crate) fn given(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Reads the key in `data_dir`, or creates it. Also creates the folder and denies other users access to it.
    ///
    /// # Errors
    /// The folder or the file cannot be written, or other users may read it; the message includes the fix.
    pub(crate) fn load_or_create(data_dir: &Path) -> Result<Self, String> {
        private::folder(data_dir).map_err(|e| format!("the data directory {e}"))?;
        let path = data_dir.join(FILE);
        match Self::read(&path) {
            Ok(Some(key)) => Ok(key),
            Ok(None) => {
                let key = Self::random()?;
                private::write(&path, format!("{}\n", key.0).as_bytes()).map_err(|e| {
                    let why = crate::disk::explain(&e, crate::disk::FREE_DATA);
                    format!("the API's key cannot be written to {}: {why}", path.display())
                })?;
                Ok(key)
            }
            Err(why) => Err(why),
        }
    }

    /// The key in a file; `None` if there is no such file.
    ///
    /// # Errors
    /// The file cannot be read, other users may read it, or it contains no key.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>, String> {
        let text = match private::read(path, FILE_BYTES_MAX) {
            Ok(text) => text,
            Err(PrivateError::System { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Ok(None);
            }
            Err(e) => return Err(format!("the API's key {e}")),
        };
        let key = text.trim();
        if key.len() < KEY_BYTES_MIN || key.contains(|c: char| !c.is_ascii_graphic()) {
            return Err(format!(
                "{} holds no API key (expected one line of at least {KEY_BYTES_MIN} characters without spaces): remove the file, and \
                 the node creates a new one when it starts",
                path.display()
            ));
        }
        Ok(Some(Self(key.to_owned())))
    }

    /// The key as text.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether `given` is this key. Compares hashes, so that the time taken reveals nothing about the key.
    pub(crate) fn is(&self, given: &str) -> bool {
        blake3::hash(given.as_bytes()) == blake3::hash(self.0.as_bytes())
    }

    /// Proves to a caller, for its `nonce`, that the node that it reached at `address` knows the key. The address is
    /// part of the proof, so that another user's program on another port cannot relay the challenge.
    pub(crate) fn proof(&self, address: SocketAddr, nonce: &str) -> String {
        let key = blake3::derive_key("meshnode 2026 api server proof", self.0.as_bytes());
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        blake3::keyed_hash(&key, format!("{address} {nonce}").as_bytes()).to_hex().to_string()
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

/// A node's entry in the user's folder, removed on drop.
#[derive(Debug)]
pub(crate) struct Announcement {
    file: PathBuf,
    key_file: PathBuf,
}

impl Announcement {
    /// Announces where the key of the API on `address` is. If the folder cannot be written, the node still starts;
    /// commands then need `--api-key-file`.
    pub(crate) fn new(address: SocketAddr, data_dir: &Path) -> Option<Self> {
        Self::in_folder(&folder()?, address, data_dir)
    }

    fn in_folder(folder: &Path, address: SocketAddr, data_dir: &Path) -> Option<Self> {
        let key_file = std::path::absolute(data_dir.join(FILE)).ok()?;
        let file = folder.join(name(address));
        let written = private::folder(folder).map_err(|e| e.to_string()).and_then(|()| {
            forget_stale(folder);
            private::write(&file, key_file.as_os_str().as_encoded_bytes()).map_err(|e| e.to_string())
        });
        match written {
            Ok(()) => Some(Self { file, key_file }),
            Err(why) => {
                tracing::warn!("cannot announce this node's API key, so commands need --api-key-file: {why}");
                None
            }
        }
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        // Another node may have taken over the address since.
        if announced(&self.file).as_ref() == Some(&self.key_file) {
            let _ = fs::remove_file(&self.file);
        }
    }
}

/// Files that may hold the key of the API on `address` (`HOST:PORT`), most likely first: those announced by nodes of
/// this user, then the one in the data directory.
pub(crate) fn candidates(address: &str, data_dir: &Path) -> Vec<PathBuf> {
    let announced = folder().map(|folder| candidates_in(&folder, address)).unwrap_or_default();
    let mut all: Vec<PathBuf> = announced;
    let default = data_dir.join(FILE);
    if !all.contains(&default) {
        all.push(default);
    }
    all
}

fn candidates_in(folder: &Path, address: &str) -> Vec<PathBuf> {
    let Ok(address) = address.replace("localhost:", "127.0.0.1:").parse::<SocketAddr>() else { return Vec::new() };
    // A node that listens on all addresses is reachable at any of them.
    let everywhere = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let everywhere = everywhere.map(|ip: IpAddr| SocketAddr::new(ip, address.port()));
    let all = std::iter::once(address).chain(everywhere);
    all.filter_map(|address| announced(&folder.join(name(address)))).collect()
}

/// `$XDG_STATE_HOME/meshnode/api`; `None` without a home directory.
fn folder() -> Option<PathBuf> {
    crate::config::state_dir().map(|dir| dir.join("api"))
}

fn name(address: SocketAddr) -> String {
    address.to_string()
}

/// The path of the key file in an announcement.
fn announced(file: &Path) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    let bytes = fs::read(file).ok().filter(|bytes| !bytes.is_empty() && bytes.len() < 4096)?;
    Some(std::ffi::OsString::from_vec(bytes).into())
}

/// Removes announcements whose key file is missing, and the oldest ones above [`ANNOUNCED_MAX`].
fn forget_stale(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut alive = Vec::new();
    for entry in entries.filter_map(Result::ok) {
        let path = entry.path();
        if path.extension().is_some_and(|ending| ending.as_encoded_bytes().starts_with(b"new-")) {
            continue; // another node is writing it
        }
        if announced(&path).is_some_and(|key| key.is_file()) {
            alive.push((entry.metadata().and_then(|meta| meta.modified()).ok(), path));
        } else {
            let _ = fs::remove_file(path);
        }
    }
    alive.sort();
    let surplus = alive.len().saturating_sub(ANNOUNCED_MAX - 1);
    alive.iter().take(surplus).for_each(|(_, path)| drop(fs::remove_file(path)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_is_created_once_and_readable_by_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let first = ApiKey::load_or_create(&data).unwrap();
        assert_eq!(ApiKey::load_or_create(&data).unwrap(), first);
        assert!(first.is(first.as_str()) && !first.is("other") && first.as_str().len() == 64);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&data), mode(&data.join(FILE))), (0o700, 0o600));
        assert!(!format!("{first:?}").contains(first.as_str()));
        fs::set_permissions(data.join(FILE), fs::Permissions::from_mode(0o640)).unwrap();
        let error = ApiKey::load_or_create(&data).unwrap_err();
        assert!(error.contains("640") && error.contains("chmod 600"), "{error}");
        fs::remove_file(data.join(FILE)).unwrap();
        private::write(&data.join(FILE), b"short\n").unwrap();
        let error = ApiKey::load_or_create(&data).unwrap_err();
        assert!(error.contains("holds no API key"), "{error}");
    }

    #[test]
    fn a_proof_depends_on_key_address_and_nonce() {
        let [a, b] = [ApiKey::random().unwrap(), ApiKey::random().unwrap()];
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let proof = a.proof(at("127.0.0.1:1"), "n");
        assert_eq!(
            proof,
            a.proof(at("[::ffff:127.0.0.1]:1"), "n"),
            "a node that listens on [::] sees the address like this"
        );
        for other in [b.proof(at("127.0.0.1:1"), "n"), a.proof(at("127.0.0.1:2"), "n"), a.proof(at("127.0.0.1:1"), "m")]
        {
            assert_ne!(proof, other);
        }
        assert!(!proof.contains(a.as_str()));
    }

    #[test]
    fn a_key_is_found_by_the_address_and_stale_announcements_do_no_harm() {
        let dir = tempfile::tempdir().unwrap();
        let (state, data, other) = (dir.path().join("state/api"), dir.path().join("data"), dir.path().join("other"));
        ApiKey::load_or_create(&data).unwrap();
        ApiKey::load_or_create(&other).unwrap();
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let found = |address: &str| candidates_in(&state, address);
        let one = Announcement::in_folder(&state, at("127.0.0.1:9480"), &data).unwrap();
        assert_eq!(found("127.0.0.1:9480"), [data.join(FILE)]);
        assert_eq!(found("localhost:9480"), [data.join(FILE)]);
        assert!(found("127.0.0.1:9481").is_empty() && found("nonsense").is_empty());
        let everywhere = Announcement::in_folder(&state, at("0.0.0.0:9482"), &other).unwrap();
        assert_eq!(found("192.168.0.7:9482"), [other.join(FILE)]);
        // Another node on the same address: its announcement survives the end of the first node.
        let second = Announcement::in_folder(&state, at("127.0.0.1:9480"), &other).unwrap();
        drop(one);
        assert_eq!(found("127.0.0.1:9480"), [other.join(FILE)]);
        drop((second, everywhere));
        assert_eq!(fs::read_dir(&state).unwrap().count(), 0);
        // A killed node leaves its announcement behind: the next node removes it once the data directory is deleted.
        std::mem::forget(Announcement::in_folder(&state, at("127.0.0.1:1"), &other).unwrap());
        fs::remove_dir_all(&other).unwrap();
        let _third = Announcement::in_folder(&state, at("127.0.0.1:2"), &data).unwrap();
        assert_eq!(fs::read_dir(&state).unwrap().count(), 1);
    }
}
