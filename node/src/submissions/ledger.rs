//! Remembers the simulations submitted here across a restart of this node: a successor may have taken them over.
use super::checkpoints::{newest_step, whole_file};
use super::look::{Found, Look, Sight};
use super::report::Around;
use super::{Submission, Submissions};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The file, beside the folders of simulations of other nodes.
const FILE: &str = "submitted.json";
/// Most runs listed: users ask for recent ones.
const KEPT: usize = 16;
/// Largest file: a list of paths.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// How long other members' answers are cached: a page polls every second.
const ANSWER_HOLDS: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    job: String,
    name: String,
    out: Option<PathBuf>,
}

/// The list of runs that were submitted here and have not ended here.
pub(super) struct Ledger {
    path: PathBuf,
    entries: Mutex<Vec<Entry>>,
    /// Other members' last answers about them.
    answers: Mutex<HashMap<String, (Instant, Value)>>,
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
        let entry = Entry {
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

    fn write(&self, entries: &[Entry]) {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let text = serde_json::to_vec_pretty(entries).unwrap_or_default();
        let written = std::fs::create_dir_all(folder).map_err(|e| e.to_string());
        // The list only helps a restarted node; the simulation does not depend on it.
        if let Err(error) = written.and_then(|()| whole_file(&self.path, &text)) {
            tracing::warn!("{error}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn answered(&self, job: &str) -> Option<Value> {
        let answers = self.answers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        answers.get(job).filter(|(at, _)| at.elapsed() < ANSWER_HOLDS).map(|(_, answer)| answer.clone())
    }
}

impl Submissions {
    /// Reports on simulations submitted here before a restart, from the members that may have taken them over.
    pub(super) async fn submitted_before(&self, around: &Around) -> Vec<Value> {
        let entries = self.ledger.lock().clone();
        let mut found = Vec::new();
        for entry in entries {
            if self.named(&entry.job).is_some() || around.holds(&entry.job) {
                continue;
            }
            let answer = match self.ledger.answered(&entry.job) {
                Some(answer) => answer,
                None => {
                    let answer = self.successor_report(&entry, around).await;
                    let mut answers = self.ledger.answers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    answers.retain(|_, (at, _)| at.elapsed() < ANSWER_HOLDS);
                    answers.insert(entry.job, (Instant::now(), answer.clone()));
                    answer
                }
            };
            found.push(answer);
        }
        found
    }

    async fn successor_report(&self, entry: &Entry, around: &Around) -> Value {
        let asked = match Look::new(&entry.job, Sight::Report) {
            Some(look) => self.look(&look, around).await,
            None => None,
        };
        let there = match asked {
            Some(Found::There(answer)) => serde_json::from_slice::<Value>(&answer).ok(),
            Some(Found::Here(_)) | None => None,
        };
        if let Some(mut report) = there.filter(Value::is_object) {
            report["role"] = json!("submitter");
            return report;
        }
        let checkpoint = entry.out.as_deref().and_then(newest_step);
        let next = match checkpoint {
            Some(step) => format!("`submit --resume` continues from the checkpoint of step {step}"),
            None => "there is no checkpoint to resume from".into(),
        };
        json!({
            "job": entry.job, "name": entry.name, "state": "lost", "role": "submitter", "out": entry.out,
            "checkpoint": checkpoint,
            "error": format!("this node restarted while it coordinated the job, and no reachable member has taken it over: {next}"),
        })
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
        let entry = |number: usize| Entry { job: format!("{number:016x}"), name: "a".into(), out: None };
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
