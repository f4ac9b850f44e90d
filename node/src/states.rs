//! Saved states of tiles, by name: until the node that wants them has fetched them.
use crate::residency::Key;
use bytes::Bytes;
use node_core::id::{JobId, PartId};
use node_core::work::steps::SaveKind;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

/// Names a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateName {
    /// Whose.
    pub job: JobId,
    /// Which tile.
    pub part: PartId,
    /// After which step.
    pub step: u32,
    /// What it is.
    pub kind: SaveKind,
}

/// All of this node's. Bounded by the core: a tile waits while too many are not fetched.
#[derive(Debug, Default)]
pub struct States(Mutex<HashMap<StateName, Bytes>>);

impl States {
    /// Keeps one.
    pub fn put(&self, name: StateName, bytes: Bytes) {
        self.lock().insert(name, bytes);
    }

    /// One, which stays.
    pub fn get(&self, name: &StateName) -> Option<Bytes> {
        self.lock().get(name).cloned()
    }

    /// One, which is given up.
    pub fn take(&self, name: &StateName) -> Option<Bytes> {
        self.lock().remove(name)
    }

    /// All of a tile are given up.
    pub fn drop_part(&self, (job, part): Key) {
        self.lock().retain(|name, _| (name.job, name.part) != (job, part));
    }

    /// All of a job are.
    pub fn drop_job(&self, job: JobId) {
        self.lock().retain(|name, _| name.job != job);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<StateName, Bytes>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
