//! State that survives a restart: the node's generation, known peers and invitations. The only user of sled.
//!
//! Everything here can be rebuilt. A store that does not open is renamed and replaced by an empty one; keys and weights
//! are separate files. sled handles a full disk badly (some of its paths panic), so nothing is written when space is
//! short, and a panic inside sled becomes an error.
use crate::disk::{self, NoRoom};
use node_core::admission::Invite;
use node_core::id::{Generation, NodeId};
use node_core::work::Contact;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Changes when records change format. The previous schema is migrated; an older store is emptied.
const SCHEMA: &[u8] = b"meshnode store 3";
/// The previous schema, whose peers are arrays without field names.
const SCHEMA_BEFORE: &[u8] = b"meshnode store 2";

/// Free space required before a write: sled grows by segments of 512 KiB and rewrites old ones.
const ROOM_BYTES_MIN: u64 = 2 << 20;

/// Why the store could not be opened or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// Another process uses it.
    #[error("another node uses the data directory {0}: stop it, or give this one its own --data-dir")]
    InUse(PathBuf),
    /// The disk is too full. Nothing was written; stored records are intact.
    #[error(transparent)]
    Full(#[from] NoRoom),
    /// The disk reported an error. The store may accept no more writes until the node restarts.
    #[error("the node's state in {path} cannot be written: {cause}; {advice}", advice = disk::FREE_DATA)]
    Disk {
        /// The store's path.
        path: PathBuf,
        /// The system's error text.
        cause: String,
    },
}

/// An open store.
pub(crate) struct Store {
    db: sled::Db,
    path: PathBuf,
    free_bytes: fn(&Path) -> Option<u64>,
}

impl Store {
    /// Opens or creates the store under `data_dir`.
    ///
    /// # Errors
    /// Another process uses it, or it is not writable.
    pub(crate) fn open(data_dir: &Path) -> Result<Self, StoreError> {
        Self::open_with(data_dir, disk::free_bytes)
    }

    fn open_with(data_dir: &Path, free_bytes: fn(&Path) -> Option<u64>) -> Result<Self, StoreError> {
        let path = data_dir.join("store");
        let disk = |e: &dyn std::fmt::Display| StoreError::Disk { path: path.clone(), cause: e.to_string() };
        std::fs::create_dir_all(data_dir).map_err(|e| disk(&e))?;
        disk::require(free_bytes(data_dir), ROOM_BYTES_MIN, STATE, data_dir, disk::FREE_DATA)?;
        let open = || sled::Config::new().path(&path).cache_capacity(4 << 20).flush_every_ms(None).open();
        let open = || quietly(open).unwrap_or_else(|panic| Err(sled::Error::Unsupported(panic)));
        let db = match open() {
            Ok(db) => db,
            Err(sled::Error::Io(e))
                if e.kind() == std::io::ErrorKind::Other || e.kind() == std::io::ErrorKind::WouldBlock =>
            {
                return Err(StoreError::InUse(data_dir.to_owned()));
            }
            Err(sled::Error::Io(e)) => return Err(disk(&e)),
            Err(damaged) => {
                let aside = data_dir.join(format!("store.damaged-{}", crate::clock::unix_seconds()));
                tracing::warn!(
                    "the store is damaged ({damaged}): renamed to {}, starting with an empty one",
                    aside.display()
                );
                std::fs::rename(&path, &aside).map_err(|e| disk(&e))?;
                open().map_err(|e| disk(&e))?
            }
        };
        let store = Self { db, path, free_bytes };
        let schema = store.get(b"schema");
        if schema.as_deref() == Some(SCHEMA_BEFORE) {
            store.name_fields()?;
        } else if schema.as_deref() != Some(SCHEMA) {
            let generation = store.get(b"generation");
            store.write(|| store.db.clear())?;
            if let Some(generation) = generation {
                store.put(b"generation", &generation)?;
            }
            store.put(b"schema", SCHEMA)?;
        }
        store.forget_secrets()?;
        Ok(store)
    }

    /// A new generation, higher than every earlier one, even if the store was lost (it is at least the Unix time). It
    /// is on disk when this returns. Job ids are made from it, so no run of the node issues an epoch for a job of an
    /// earlier run, and epochs need not be stored.
    ///
    /// # Errors
    /// It could not be written; then the node must not send anything.
    pub(crate) fn next_generation(&self) -> Result<Generation, StoreError> {
        let stored = self.get(b"generation").and_then(|b| Some(u64::from_le_bytes(b.try_into().ok()?))).unwrap_or(0);
        let generation = (stored + 1).max(crate::clock::unix_seconds());
        self.put(b"generation", &generation.to_le_bytes())?;
        Ok(Generation(generation))
    }

    /// Writes the peers to contact after a restart, and syncs.
    ///
    /// # Errors
    /// The disk is full or reported an error.
    pub(crate) fn put_peers(&self, peers: &[Contact]) -> Result<(), StoreError> {
        self.put_json(PEERS, &peers)
    }

    /// Removes the secrets of tickets that earlier versions stored, readable by other users: those tickets are revoked.
    fn forget_secrets(&self) -> Result<(), StoreError> {
        if self.get(SECRETS).is_none() {
            return Ok(());
        }
        tracing::info!("tickets of an earlier version are revoked: create new ones with `meshnode invite`");
        self.write(|| self.db.remove(SECRETS).map(drop))
    }

    /// Migrates the peers of the previous schema: node, key, gossip and data addresses in that order.
    fn name_fields(&self) -> Result<(), StoreError> {
        type Unnamed = (NodeId, Vec<u8>, Vec<SocketAddr>, Vec<SocketAddr>);
        let unnamed: Vec<Unnamed> = self.get_json(PEERS).unwrap_or_default();
        let contact = |(node, peer_id, gossip, data)| Contact { node, peer_id, gossip, data };
        self.put_peers(&unnamed.into_iter().map(contact).collect::<Vec<_>>())?;
        self.put(b"schema", SCHEMA)
    }

    /// The peers stored by an earlier run.
    pub(crate) fn peers(&self) -> Vec<Contact> {
        self.get_json(PEERS).unwrap_or_default()
    }

    /// Writes the invitations, by id, and syncs.
    ///
    /// # Errors
    /// The disk is full or reported an error.
    pub(crate) fn put_invites(&self, invites: &[([u8; 16], Invite)]) -> Result<(), StoreError> {
        self.put_json(INVITES, &invites)
    }

    /// The invitations stored by an earlier run.
    pub(crate) fn invites(&self) -> Vec<([u8; 16], Invite)> {
        self.get_json(INVITES).unwrap_or_default()
    }

    fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.db.get(key).ok().flatten().map(|v| v.to_vec())
    }

    fn get_json<T: serde::de::DeserializeOwned>(&self, key: &[u8]) -> Option<T> {
        serde_json::from_slice(&self.get(key)?).ok()
    }

    fn put_json(&self, key: &[u8], value: &impl serde::Serialize) -> Result<(), StoreError> {
        self.put(key, &serde_json::to_vec(value).map_err(|e| self.disk(&e))?)
    }

    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), StoreError> {
        self.write(|| self.db.insert(key, value).map(drop))
    }

    /// Makes a change and syncs, if there is enough space.
    fn write(&self, change: impl FnOnce() -> sled::Result<()>) -> Result<(), StoreError> {
        disk::require((self.free_bytes)(&self.path), ROOM_BYTES_MIN, STATE, &self.path, disk::FREE_DATA)?;
        match quietly(|| change().and_then(|()| self.db.flush().map(drop))) {
            Ok(written) => written.map_err(|e| self.disk(&e)),
            Err(panic) => Err(self.disk(&panic)),
        }
    }

    fn disk(&self, cause: &dyn std::fmt::Display) -> StoreError {
        StoreError::Disk { path: self.path.clone(), cause: cause.to_string() }
    }
}

/// Human-readable name of the stored data.
const STATE: &str = "the node's state";
/// Key of the peers to contact after a restart.
const PEERS: &[u8] = b"peers";
/// Key of the invitations.
const INVITES: &[u8] = b"invitations";
/// Key under which earlier versions stored the secrets of tickets.
const SECRETS: &[u8] = b"invites";

/// Runs sled code; a panic in it becomes an error text.
fn quietly<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        text.unwrap_or("the database panicked without a message").to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_grow_over_restarts_and_a_damaged_store_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let first = Store::open(dir.path()).unwrap().next_generation().unwrap();
        let second = Store::open(dir.path()).unwrap().next_generation().unwrap();
        assert!(second > first);
        std::fs::write(dir.path().join("store/conf"), b"not a store").unwrap();
        let third = Store::open(dir.path()).unwrap().next_generation().unwrap();
        assert!(third >= first);
    }

    /// Simulates a crash right after a generation is returned, by copying the directory.
    #[test]
    fn a_generation_is_on_disk_before_it_is_returned() {
        let (dir, crashed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let store = Store::open(dir.path()).unwrap();
        // Far ahead of the clock; otherwise the clock would hide a generation that was not stored.
        store.put(b"generation", &(1u64 << 40).to_le_bytes()).unwrap();
        let first = store.next_generation().unwrap();
        assert_eq!(first.0, (1 << 40) + 1);
        copy(&dir.path().join("store"), &crashed.path().join("store"));
        let second = Store::open(crashed.path()).unwrap().next_generation().unwrap();
        assert_eq!(second.0, first.0 + 1);
    }

    fn copy(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
            let target = to.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                copy(&entry.path(), &target);
            } else {
                std::fs::copy(entry.path(), target).unwrap();
            }
        }
    }

    #[test]
    fn peers_and_invites_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let peers = vec![peer(1)];
        let invites = vec![([4; 16], Invite { expiry: 9, uses_left: 2, issued: 1 })];
        {
            let store = Store::open(dir.path()).unwrap();
            store.put_peers(&peers).unwrap();
            store.put_invites(&invites).unwrap();
        }
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(store.peers(), peers);
        assert_eq!(store.invites(), invites);
    }

    fn peer(id: u8) -> Contact {
        let gossip = vec!["10.0.0.1:1".parse().unwrap()];
        Contact { node: NodeId([id; 16]), peer_id: vec![id], gossip, data: Vec::new() }
    }

    #[test]
    fn peers_of_the_previous_schema_are_migrated() {
        let dir = tempfile::tempdir().unwrap();
        let invites = vec![([4; 16], Invite { expiry: 9, uses_left: 2, issued: 1 })];
        {
            let store = Store::open(dir.path()).unwrap();
            let Contact { node, peer_id, gossip, data } = peer(1);
            store.put_json(PEERS, &[(node, peer_id, gossip, data)]).unwrap();
            store.put_invites(&invites).unwrap();
            store.put(b"schema", SCHEMA_BEFORE).unwrap();
        }
        let store = Store::open(dir.path()).unwrap();
        assert_eq!((store.peers(), store.invites()), (vec![peer(1)], invites));
    }

    #[test]
    fn ticket_secrets_of_earlier_versions_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        Store::open(dir.path())
            .unwrap()
            .put_json(SECRETS, &[([4u8; 16], Invite { expiry: 9, uses_left: 2, issued: 1 })])
            .unwrap();
        let store = Store::open(dir.path()).unwrap();
        assert_eq!((store.get(SECRETS), store.invites()), (None, vec![]));
    }

    #[test]
    fn a_full_disk_is_reported_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let error = Store::open_with(dir.path(), |_| Some(300 << 10)).err().expect("no room").to_string();
        for words in [dir.path().to_str().unwrap(), "2.0 MiB needed", "300.0 KiB free", "--data-dir"] {
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

        static FULL: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
        use std::sync::atomic::Ordering::SeqCst;
        let store = Store::open_with(dir.path(), |_| Some(if FULL.load(SeqCst) { 0 } else { 1 << 30 })).unwrap();
        store.put_peers(&[peer(1)]).unwrap();
        FULL.store(true, SeqCst);
        assert!(matches!(store.put_peers(&[peer(2)]), Err(StoreError::Full(_))));
        assert_eq!(store.peers(), [peer(1)], "stored records are intact");
        FULL.store(false, SeqCst);
        store.put_peers(&[peer(2)]).expect("writes work again with enough space");
    }

    #[test]
    fn a_directory_in_use_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let _held = Store::open(dir.path()).unwrap();
        let second = Store::open(dir.path());
        assert!(matches!(second, Err(StoreError::InUse(_))), "{:?}", second.err());
    }
}
