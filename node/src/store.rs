//! What survives a restart: the node's generation, epochs minted, peers met, invitations (the only user of sled).
//!
//! Everything here can be rebuilt. A store that does not open is moved aside and begun anew; keys and weights are files
//! of their own.
use node_core::admission::Invite;
use node_core::id::Generation;
use node_core::output::Record;
use std::path::{Path, PathBuf};

/// Changes when records change shape: an older store is then begun anew.
const SCHEMA: &[u8] = b"meshnode store 1";

/// Why a store did not take or give a record.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process holds it.
    #[error("another node uses the data directory {0}: stop it, or give this one its own --data-dir")]
    InUse(PathBuf),
    /// The disk refused.
    #[error("the data directory {path} cannot be written: {cause}; free some space or choose another --data-dir")]
    Disk {
        /// Where.
        path: PathBuf,
        /// The system's words.
        cause: String,
    },
}

/// An open store.
pub struct Store {
    db: sled::Db,
    path: PathBuf,
}

impl Store {
    /// Opens or begins the store under `data_dir`.
    ///
    /// # Errors
    /// Held by another process, or not writable.
    pub fn open(data_dir: &Path) -> Result<Self, StoreError> {
        let path = data_dir.join("store");
        let disk = |e: &dyn std::fmt::Display| StoreError::Disk { path: path.clone(), cause: e.to_string() };
        std::fs::create_dir_all(data_dir).map_err(|e| disk(&e))?;
        let open = || sled::Config::new().path(&path).cache_capacity(4 << 20).flush_every_ms(None).open();
        let db = match open() {
            Ok(db) => db,
            Err(sled::Error::Io(e))
                if e.kind() == std::io::ErrorKind::Other || e.kind() == std::io::ErrorKind::WouldBlock =>
            {
                return Err(StoreError::InUse(data_dir.to_owned()));
            }
            Err(sled::Error::Io(e)) => return Err(disk(&e)),
            Err(damaged) => {
                let aside = data_dir.join(format!("store.damaged-{}", crate::handle::unix_seconds()));
                tracing::warn!("the store is damaged ({damaged}); it is kept as {} and begun anew", aside.display());
                std::fs::rename(&path, &aside).map_err(|e| disk(&e))?;
                open().map_err(|e| disk(&e))?
            }
        };
        let store = Self { db, path };
        if store.get(b"schema").as_deref() != Some(SCHEMA) {
            store.db.clear().map_err(|e| store.disk(&e))?;
            store.put(b"schema", SCHEMA)?;
        }
        Ok(store)
    }

    /// The generation of this life: above every former one, also where the store was lost (unix seconds).
    ///
    /// # Errors
    /// It could not be written: without that the node must not speak.
    pub fn next_generation(&self) -> Result<Generation, StoreError> {
        let stored = self.get(b"generation").and_then(|b| Some(u64::from_le_bytes(b.try_into().ok()?))).unwrap_or(0);
        let generation = (stored + 1).max(crate::handle::unix_seconds());
        self.put(b"generation", &generation.to_le_bytes())?;
        Ok(Generation(generation))
    }

    /// Writes a record of the core and syncs.
    ///
    /// # Errors
    /// The disk refused.
    pub fn persist(&self, record: &Record) -> Result<(), StoreError> {
        let key = match record {
            Record::Epoch { job, .. } => format!("epoch/{:016x}", job.0).into_bytes(),
            Record::Peers(_) => b"peers".to_vec(),
        };
        self.put_json(&key, record)
    }

    /// Peers met in former lives.
    pub fn peers(&self) -> Option<Record> {
        self.get_json(b"peers")
    }

    /// Writes the invitations and syncs.
    ///
    /// # Errors
    /// The disk refused.
    pub fn put_invites(&self, invites: &[([u8; 16], Invite)]) -> Result<(), StoreError> {
        self.put_json(b"invites", &invites)
    }

    /// The invitations of former lives.
    pub fn invites(&self) -> Vec<([u8; 16], Invite)> {
        self.get_json(b"invites").unwrap_or_default()
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
        self.db.insert(key, value).map_err(|e| self.disk(&e))?;
        self.db.flush().map_err(|e| self.disk(&e))?;
        Ok(())
    }

    fn disk(&self, cause: &dyn std::fmt::Display) -> StoreError {
        StoreError::Disk { path: self.path.clone(), cause: cause.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_core::id::{Epoch, JobId, NodeId};

    #[test]
    fn generations_grow_over_restarts_and_a_damaged_store_is_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let first = Store::open(dir.path()).unwrap().next_generation().unwrap();
        let second = Store::open(dir.path()).unwrap().next_generation().unwrap();
        assert!(second > first);
        std::fs::write(dir.path().join("store/conf"), b"not a store").unwrap();
        let third = Store::open(dir.path()).unwrap().next_generation().unwrap();
        assert!(third >= first);
    }

    #[test]
    fn records_and_invites_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record::Epoch { job: JobId(7), epoch: Epoch { counter: 3, minter: NodeId([1; 16]) } };
        let invites = vec![([4; 16], Invite { expiry: 9, uses_left: 2 })];
        {
            let store = Store::open(dir.path()).unwrap();
            store.persist(&record).unwrap();
            store.persist(&Record::Peers(vec![])).unwrap();
            store.put_invites(&invites).unwrap();
        }
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(store.peers(), Some(Record::Peers(vec![])));
        assert_eq!(store.invites(), invites);
    }

    #[test]
    fn a_directory_in_use_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let _held = Store::open(dir.path()).unwrap();
        let second = Store::open(dir.path());
        assert!(matches!(second, Err(StoreError::InUse(_))), "{:?}", second.err());
    }
}
