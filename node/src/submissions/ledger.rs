//! Remembers the simulations submitted here across a restart of this node: a successor may have taken them over.
use super::files::whole_file;
use super::submission::Submission;
use crate::report::SimulationReport;
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The file, beside the folders of simulations of other nodes.
const FILE: &str = "submitted.json";
/// Most runs listed: users ask for recent ones.
const KEPT: usize = 16;
/// Largest file: a list of paths.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// How long other members' answers are cached: a page polls every second.
const ANSWER_HOLDS: Duration = Duration::from_secs(5);

/// A run in the list.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ListedRun {
    pub(super) job: String,
    pub(super) name: String,
    pub(super) out: Option<PathBuf>,
}

/// The list of runs that were submitted here and have not ended here.
pub(super) struct Ledger {
    path: PathBuf,
    entries: Mutex<Vec<ListedRun>>,
    /// Other members' last answers about them.
    answers: Mutex<HashMap<String, (Instant, SimulationReport)>>,
}

impl Ledger {
    pub(super) fn open(folder: &Path) -> Self {
        let path = folder.join(FILE);
        let mut text = String::new();
        let read = File::open(&path).and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text));
        let entries = read.ok().and_then(|_| serde_json::from_str(&text).ok()).unwrap_or_default();
        Self { path, entries: Mutex::new(entries), answers: Mutex::default() }
    }

    /// Adds a submitted simulation.
    pub(super) fn add(&self, submission: &Submission) {
        let entry = ListedRun {
            job: format!("{:016x}", submission.job.0),
            name: submission.simulation.name().into(),
            out: submission.out.clone(),
        };
        let mut entries = self.lock();
        entries.push(entry);
        let over = entries.len().saturating_sub(KEPT);
        entries.drain(..over);
        self.write(&entries);
    }

    /// Removes a simulation that ended here: there is nothing to find after a restart.
    pub(super) fn remove(&self, submission: &Submission) {
        let job = format!("{:016x}", submission.job.0);
        let mut entries = self.lock();
        entries.retain(|entry| entry.job != job);
        self.write(&entries);
    }

    fn write(&self, entries: &[ListedRun]) {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let text = serde_json::to_vec_pretty(entries).unwrap_or_default();
        let written = std::fs::create_dir_all(folder).map_err(|e| e.to_string());
        // The list only helps a restarted node; the simulation does not depend on it.
        if let Err(error) = written.and_then(|()| whole_file(&self.path, &text)) {
            tracing::warn!("{error}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ListedRun>> {
        self.entries.lock()
    }

    /// The listed runs.
    pub(super) fn entries(&self) -> Vec<ListedRun> {
        self.lock().clone()
    }

    /// A recent answer about a run.
    pub(super) fn answered(&self, job: &str) -> Option<SimulationReport> {
        let answers = self.answers.lock();
        answers.get(job).filter(|(at, _)| at.elapsed() < ANSWER_HOLDS).map(|(_, answer)| answer.clone())
    }

    /// Keeps an answer for the next queries.
    pub(super) fn keep_answer(&self, job: String, answer: SimulationReport) {
        let mut answers = self.answers.lock();
        answers.retain(|_, (at, _)| at.elapsed() < ANSWER_HOLDS);
        answers.insert(job, (Instant::now(), answer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_submissions_are_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("simulations");
        let ledger = Ledger::open(&place);
        let entry = |number: usize| ListedRun { job: format!("{number:016x}"), name: "a".into(), out: None };
        *ledger.lock() = (0..3).map(entry).collect();
        ledger.write(&ledger.lock());
        let again = Ledger::open(&place);
        assert_eq!(
            again.lock().iter().map(|entry| entry.job.clone()).collect::<Vec<_>>(),
            ["0", "1", "2"].map(|n| format!("{n:0>16}"))
        );
        std::fs::write(place.join(FILE), "nonsense").unwrap();
        assert!(Ledger::open(&place).lock().is_empty());
    }
}
