//! Saved states of tiles by name, retained until the requesting node has fetched them.
use crate::residency::Key;
use bytes::Bytes;
use node_core::id::{JobId, PartId};
use node_core::work::steps::SaveKind;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;

/// The name of a saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StateName {
    /// The job.
    pub job: JobId,
    /// The tile.
    pub part: PartId,
    /// The step after which it was saved.
    pub step: u32,
    /// Its kind.
    pub kind: SaveKind,
}

/// All saved states of this node. The core bounds them: a tile pauses while too many have not been fetched.
#[derive(Debug, Default)]
pub(crate) struct States(Mutex<HashMap<StateName, Bytes>>);

impl States {
    /// Stores a state.
    pub(crate) fn put(&self, name: StateName, bytes: Bytes) {
        self.lock().insert(name, bytes);
    }

    /// Returns a state and keeps it.
    pub(crate) fn get(&self, name: &StateName) -> Option<Bytes> {
        self.lock().get(name).cloned()
    }

    /// Removes a state and returns it.
    pub(crate) fn take(&self, name: &StateName) -> Option<Bytes> {
        self.lock().remove(name)
    }

    /// Removes all states of a tile.
    pub(crate) fn drop_part(&self, (job, part): Key) {
        self.lock().retain(|name, _| (name.job, name.part) != (job, part));
    }

    /// Removes all states of a job.
    pub(crate) fn drop_job(&self, job: JobId) {
        self.lock().retain(|name, _| name.job != job);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<StateName, Bytes>> {
        self.0.lock()
    }
}
