//! The list of models that this node serves, in its data directory: after a restart it serves them again with the same
//! options, until `serve --stop`.
use super::model::ModelOptions;
use crate::disk;
use node_core::limits::JOBS_MAX;
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A model to serve, under the name that its user gave it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RememberedModel {
    /// Name for the API.
    pub(crate) name: String,
    /// Its file, or a folder's weights, as an absolute path.
    pub(crate) path: PathBuf,
    /// Its options; every field but the draft model is set.
    pub(crate) options: ModelOptions,
}

/// The list, and the state of the entries that are not served yet.
pub(crate) struct Remembered {
    path: PathBuf,
    state: Mutex<RememberedModels>,
}

#[derive(Default)]
struct RememberedModels {
    entries: Vec<RememberedModel>,
    /// By name: entries not placed yet since the start, and why the last attempt failed.
    starting: BTreeMap<String, Option<String>>,
}

/// An entry that is not placed yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Starting {
    pub(crate) entry: RememberedModel,
    /// Why the last attempt failed; `None` before the first one ends.
    pub(crate) reason: Option<String>,
}

impl Remembered {
    /// Reads the list. A damaged list is renamed, and an empty one begun: the node must be able to start.
    pub(crate) fn open(data_dir: &Path) -> Self {
        let path = data_dir.join(FILE);
        let entries = match read(&path) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => {
                let aside = path.with_extension("damaged");
                tracing::warn!(
                    "{} is not a list of served models ({e}): it was renamed to {}, and no model is served again",
                    path.display(),
                    aside.display()
                );
                let _ = std::fs::rename(&path, &aside);
                Vec::new()
            }
        };
        Self { path, state: Mutex::new(RememberedModels { entries, starting: BTreeMap::new() }) }
    }

    /// All entries, in the order in which they were first served.
    pub(crate) fn all(&self) -> Vec<RememberedModel> {
        self.lock().entries.clone()
    }

    /// The entry of that name.
    pub(crate) fn get(&self, name: &str) -> Option<RememberedModel> {
        self.lock().entries.iter().find(|entry| entry.name == name).cloned()
    }

    /// Adds entries, replacing those of the same name, and writes the list if it changed. A list that cannot be written
    /// is logged as a disk error; the model is served anyway.
    pub(crate) fn put(&self, new: Vec<RememberedModel>) {
        self.change(|entries| {
            for entry in new {
                match entries.iter_mut().find(|known| known.name == entry.name) {
                    Some(known) => *known = entry,
                    None => entries.push(entry),
                }
            }
            // At most this many jobs can run.
            entries.drain(..entries.len().saturating_sub(JOBS_MAX));
        });
    }

    /// Removes the entries with these names. Returns whether there were any.
    pub(crate) fn remove(&self, names: &[String]) -> bool {
        self.change(|entries| entries.retain(|entry| !names.contains(&entry.name)))
    }

    /// Marks an entry as not placed yet; `reason` is the error of the last attempt.
    pub(crate) fn set_starting(&self, name: &str, reason: Option<String>) {
        self.lock().starting.insert(name.to_owned(), reason);
    }

    /// Unmarks an entry that was placed, or stopped.
    pub(crate) fn set_started(&self, name: &str) {
        self.lock().starting.remove(name);
    }

    /// The entries that are not placed yet.
    pub(crate) fn starting(&self) -> Vec<Starting> {
        let state = self.lock();
        let starting = |entry: &RememberedModel| {
            let reason = state.starting.get(&entry.name)?.clone();
            Some(Starting { entry: entry.clone(), reason })
        };
        state.entries.iter().filter_map(starting).collect()
    }

    fn change(&self, change: impl FnOnce(&mut Vec<RememberedModel>)) -> bool {
        let mut state = self.lock();
        let before = state.entries.clone();
        change(&mut state.entries);
        if state.entries == before {
            return false;
        }
        if let Err(e) = write(&self.path, &state.entries) {
            let why = disk::explain(&e, disk::FREE_DATA);
            tracing::warn!(
                "the list of served models cannot be written to {}: {why}; a restart will use the old list",
                self.path.display()
            );
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, RememberedModels> {
        self.state.lock()
    }
}

/// The file under the data directory.
const FILE: &str = "served.json";
/// A full list of names and paths takes a tenth of this.
const BYTES_MAX: u64 = 1 << 20;

fn read(path: &Path) -> io::Result<Vec<RememberedModel>> {
    let bytes = std::fs::metadata(path)?.len();
    if bytes > BYTES_MAX {
        return Err(io::Error::other(format!("expected at most {BYTES_MAX} bytes, found {bytes}")));
    }
    let mut entries: Vec<RememberedModel> = serde_json::from_slice(&std::fs::read(path)?)?;
    entries.truncate(JOBS_MAX);
    Ok(entries)
}

/// Replaces the list atomically: after a crash it is the old one or the new one.
fn write(path: &Path, entries: &[RememberedModel]) -> io::Result<()> {
    let beside = path.with_extension("new");
    let mut file = std::fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(&serde_json::to_vec_pretty(entries)?).and_then(|()| file.sync_all())?;
    std::fs::rename(&beside, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, context: u32) -> RememberedModel {
        let options = ModelOptions {
            int8: Some(true),
            context: Some(context),
            sequences: Some(8),
            replicas: Some(2),
            draft: Some("small".into()),
            boundary: Some(crate::rows::Boundary::Auto),
        };
        RememberedModel { name: name.into(), path: format!("/models/{name}.gguf").into(), options }
    }

    #[test]
    fn the_served_list_survives_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let list = Remembered::open(dir.path());
        list.put(vec![entry("a", 64), entry("b", 128)]);
        list.put(vec![entry("a", 1024)]);
        assert_eq!(Remembered::open(dir.path()).all(), [entry("a", 1024), entry("b", 128)]);
        assert!(list.remove(&["a".into()]) && !list.remove(&["a".into()]));
        assert_eq!(Remembered::open(dir.path()).all(), [entry("b", 128)]);
        (0..2 * JOBS_MAX).for_each(|n| list.put(vec![entry(&n.to_string(), 64)]));
        assert_eq!(Remembered::open(dir.path()).all().len(), JOBS_MAX, "at most JOBS_MAX entries");
    }

    #[test]
    fn a_damaged_list_is_renamed_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        for damage in ["", "{", "[{\"name\": 3}]", "[1, 2"] {
            std::fs::write(dir.path().join(FILE), damage).unwrap();
            let list = Remembered::open(dir.path());
            assert_eq!(list.all(), []);
            assert_eq!(std::fs::read_to_string(dir.path().join("served.damaged")).unwrap(), damage);
            list.put(vec![entry("a", 64)]);
            assert_eq!(Remembered::open(dir.path()).all(), [entry("a", 64)]);
        }
    }

    #[test]
    fn an_entry_is_starting_until_it_is_placed_or_removed() {
        let dir = tempfile::tempdir().unwrap();
        let list = Remembered::open(dir.path());
        list.put(vec![entry("a", 64), entry("b", 64)]);
        assert_eq!(list.starting(), []);
        list.set_starting("a", None);
        list.set_starting("b", Some("its file is gone".into()));
        let reasons = |list: &Remembered| list.starting().into_iter().map(|s| s.reason).collect::<Vec<_>>();
        assert_eq!(reasons(&list), [None, Some("its file is gone".into())]);
        list.set_started("a");
        list.remove(&["b".into()]);
        assert_eq!(list.starting(), []);
    }
}
