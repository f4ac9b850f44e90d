//! The identity of a node: one Ed25519 key, stored in a file that only its owner can read. `PeerId` and `NodeId` are
//! derived from it.
use libp2p_identity::{Keypair, PublicKey};
use std::{
    fs, io,
    io::Write,
    path::{Path, PathBuf},
};
use thiserror::Error;

pub use libp2p_identity::PeerId;

/// Short name of a node inside a mesh: the first 16 bytes of blake3 over its `PeerId` bytes.
pub type NodeId = [u8; 16];

/// The key of this node.
#[derive(Clone)]
pub struct Identity {
    keypair: Keypair,
    peer_id: PeerId,
}

impl Identity {
    /// Reads `dir/identity.key`, or generates a new key and writes it there with mode 0600.
    ///
    /// # Errors
    /// The file cannot be read or written, other users may read it, or it does not hold an Ed25519 key.
    pub fn load_or_create(dir: &Path) -> Result<Self, IdentityError> {
        let path = dir.join(FILE);
        match fs::read(&path) {
            Ok(bytes) => Self::from_file(&path, &bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let identity = Self::generate();
                identity.write(dir, &path).map_err(|error| IdentityError::Write { path, error })?;
                Ok(identity)
            }
            Err(error) => Err(IdentityError::Read { path, error }),
        }
    }

    /// A new key that is not stored.
    pub fn generate() -> Self {
        Self::from_keypair(Keypair::generate_ed25519())
    }

    /// The libp2p name of this node.
    pub fn peer_id(&self) -> PeerId {
        self.peer_id
    }

    /// The short name of this node.
    pub fn node_id(&self) -> NodeId {
        node_id(&self.peer_id)
    }

    /// Ed25519 signature over `bytes`.
    pub fn sign(&self, bytes: &[u8]) -> Vec<u8> {
        // Ed25519 signing cannot fail; the Result is for other key types, which an Identity never holds. An empty
        // signature never verifies.
        self.keypair.sign(bytes).unwrap_or_default()
    }

    /// A 32-byte key for one purpose, which only the holder of this key can compute.
    pub fn derived_key(&self, context: &str) -> [u8; 32] {
        let keypair = self.keypair.clone().try_into_ed25519().expect("an identity holds Ed25519 keys only");
        blake3::derive_key(context, keypair.secret().as_ref())
    }

    /// The key itself, for the TLS and noise configurations of this crate.
    pub(crate) fn keypair(&self) -> &Keypair {
        &self.keypair
    }

    fn from_keypair(keypair: Keypair) -> Self {
        let peer_id = keypair.public().to_peer_id();
        Self { keypair, peer_id }
    }

    fn from_file(path: &Path, bytes: &[u8]) -> Result<Self, IdentityError> {
        check_private(path)?;
        let malformed = |why: String| IdentityError::Malformed { path: path.to_owned(), why };
        // libp2p's own errors mention its build features.
        let keypair = Keypair::from_protobuf_encoding(bytes).ok().filter(|key| key.clone().try_into_ed25519().is_ok());
        let keypair =
            keypair.ok_or_else(|| malformed("expected an Ed25519 key in libp2p's protobuf encoding".into()))?;
        Ok(Self::from_keypair(keypair))
    }

    fn write(&self, dir: &Path, path: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        write_private(path, &self.keypair.to_protobuf_encoding().map_err(io::Error::other)?)
    }
}

/// Replaces a file that only this user can read. A crash or power loss leaves either the old file or the complete new
/// one.
///
/// # Errors
/// An I/O error; either the old file or the new one is complete.
pub fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let written = options.open(&new).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    let renamed = written.and_then(|()| fs::rename(&new, path));
    if let Err(error) = renamed {
        let _ = fs::remove_file(&new);
        return Err(error);
    }
    // The rename is durable only once the directory is synced.
    #[cfg(unix)]
    fs::File::open(path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(())
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({})", self.peer_id)
    }
}

/// The short name derived from a `PeerId`.
pub fn node_id(peer_id: &PeerId) -> NodeId {
    let hash = blake3::hash(&peer_id.to_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&hash.as_bytes()[..16]);
    id
}

/// Whether `signature` is a signature of `peer_id` over `bytes`. False for malformed input.
pub fn verify(peer_id: &[u8], bytes: &[u8], signature: &[u8]) -> bool {
    public_key(peer_id).is_some_and(|key| key.verify(bytes, signature))
}

/// The Ed25519 key inside a `PeerId`: for short keys the id is the key itself after a two-byte "identity hash" header.
fn public_key(peer_id: &[u8]) -> Option<PublicKey> {
    let encoded = match peer_id {
        [0x00, length, rest @ ..] if usize::from(*length) == rest.len() => rest,
        _ => return None,
    };
    let key = PublicKey::try_decode_protobuf(encoded).ok()?;
    key.clone().try_into_ed25519().is_ok().then_some(key)
}

#[cfg(unix)]
fn check_private(path: &Path) -> Result<(), IdentityError> {
    use std::os::unix::fs::PermissionsExt;
    let meta = fs::metadata(path).map_err(|error| IdentityError::Read { path: path.to_owned(), error })?;
    let mode = meta.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(IdentityError::NotPrivate { path: path.to_owned(), mode });
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_private(_: &Path) -> Result<(), IdentityError> {
    Ok(())
}

/// Key file in the data directory.
const FILE: &str = "identity.key";

/// Why no identity could be loaded. The disk is unchanged.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// The key file exists but cannot be read.
    #[error("cannot read the node's key {}: {error}", path.display())]
    Read {
        /// The key file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// A new key cannot be written.
    #[error("cannot write the node's key {}: {error}; choose another directory with --data-dir", path.display())]
    Write {
        /// The key file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// Other users of the machine may read the key.
    #[error("the node's key {} has mode {mode:o}, so others may read it; run: chmod 600 {}", path.display(), path.display())]
    NotPrivate {
        /// The key file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file holds something other than an Ed25519 key.
    #[error("{} is not an Ed25519 key ({why}); restore it, or move it away to start as a new node", path.display())]
    Malformed {
        /// The key file.
        path: PathBuf,
        /// What was expected.
        why: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_persists_across_restarts_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let first = Identity::load_or_create(dir.path()).unwrap();
        let second = Identity::load_or_create(dir.path()).unwrap();
        assert_eq!(first.peer_id(), second.peer_id());
        assert_eq!(first.node_id(), node_id(&second.peer_id()));
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let path = dir.path().join(FILE);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
            let error = Identity::load_or_create(dir.path()).unwrap_err().to_string();
            assert!(error.contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn a_private_file_is_replaced_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        write_private(&path, b"old").unwrap();
        // Left over from a write that a crash interrupted.
        fs::write(path.with_extension("new"), b"half of something much longer").unwrap();
        write_private(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
        assert!(write_private(&dir.path().join("no such folder/secret"), b"x").is_err());
    }

    #[test]
    fn a_damaged_key_is_rejected_and_left_in_place() {
        let dir = tempfile::tempdir().unwrap();
        Identity::load_or_create(dir.path()).unwrap();
        let path = dir.path().join(FILE);
        let mut bytes = fs::read(&path).unwrap();
        bytes.truncate(10);
        fs::write(&path, &bytes).unwrap();
        let error = Identity::load_or_create(dir.path()).unwrap_err();
        assert!(matches!(error, IdentityError::Malformed { .. }));
        assert!(error.to_string().contains("expected an Ed25519 key"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }

    #[test]
    fn derived_keys_are_stable_and_distinct() {
        let dir = tempfile::tempdir().unwrap();
        let first = Identity::load_or_create(dir.path()).unwrap().derived_key("one");
        assert_eq!(Identity::load_or_create(dir.path()).unwrap().derived_key("one"), first);
        assert_ne!(Identity::load_or_create(dir.path()).unwrap().derived_key("two"), first);
        assert_ne!(Identity::generate().derived_key("one"), first);
    }

    #[test]
    fn signatures_bind_key_and_bytes() {
        let (a, b) = (Identity::generate(), Identity::generate());
        let signature = a.sign(b"hello");
        assert!(verify(&a.peer_id().to_bytes(), b"hello", &signature));
        assert!(!verify(&a.peer_id().to_bytes(), b"hallo", &signature));
        assert!(!verify(&b.peer_id().to_bytes(), b"hello", &signature));
        assert!(!verify(&a.peer_id().to_bytes(), b"hello", &signature[1..]));
        assert!(!verify(&[], b"hello", &signature));
        assert!(!verify(&[0, 3, 1, 2], b"hello", &signature));
    }
}
