//! Writes the force on a simulation's solid cells as a table in the output folder: one line every `check_every` steps.
//!
//! It is written on a separate thread, so that the sender never waits for the disk. A failed write is retried until it
//! succeeds or the run is over. Steps repeated after a loss have equal forces and are skipped.
use super::files::whole_file;
use kernels_simulations::{Force, Simulation};
use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Its name in the output folder.
pub(crate) const FORCES_FILE: &str = "forces.csv";
/// Delay between two attempts to write a line.
const AGAIN: Duration = Duration::from_secs(1);
/// Attempts after the run is over.
const LAST_TRIES: usize = 3;

/// A table being written.
#[derive(Debug)]
pub(crate) struct Forces {
    lines: Sender<(u32, String)>,
    thread: JoinHandle<()>,
}

impl Forces {
    /// Opens the table of a run that starts or resumes at `from`; lines of later steps, left by an earlier run, are
    /// removed. `None` if the job has no force output.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn open(out: &Path, simulation: &Simulation, from: u32) -> Result<Option<Self>, String> {
        let Some(spec) = simulation.force() else { return Ok(None) };
        let axes = &["x", "y", "z"][..simulation.grid().dimensions()];
        let column = |kind: &str| axes.iter().map(|axis| format!(",{kind}{axis}")).collect::<String>();
        let coefficients = if spec.has_coefficients() { column("c") } else { String::new() };
        let header = format!("step{}{coefficients}\n", column("f"));
        let path = out.join(FORCES_FILE);
        let mut kept = header.clone();
        let mut last = None;
        if from > 0
            && let Some(lines) = fs::read_to_string(&path).ok().as_deref().and_then(|text| text.strip_prefix(&header))
        {
            for line in lines.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
                let Some(step) = line.split(',').next().and_then(|step| step.parse().ok()) else { break };
                if step > from || last.is_some_and(|last| step <= last) {
                    break;
                }
                last = Some(step);
                kept.push_str(line);
            }
        }
        whole_file(&path, kept.as_bytes())?;
        let (lines, receiver) = channel();
        let table = Table { path, len: kept.len() as u64, last };
        let thread = std::thread::Builder::new().name("forces".into()).spawn(move || table.write(&receiver));
        Ok(Some(Self {
            lines,
            thread: thread.map_err(|e| format!("the thread for {FORCES_FILE} could not be started: {e}"))?,
        }))
    }

    /// Appends the force after a step.
    pub(crate) fn append(&self, step: u32, force: &Force) {
        let numbers = force.force.iter().chain(force.coefficients.iter().flatten());
        let line = numbers.fold(step.to_string(), |line, number| format!("{line},{number}"));
        // The receiver lives at least as long as this sender, unless it gave up.
        let _ = self.lines.send((step, line + "\n"));
    }

    /// Waits until all lines are written, or writing is given up. Blocks.
    pub(crate) fn finish(self) {
        drop(self.lines);
        let _ = self.thread.join();
    }
}

struct Table {
    path: PathBuf,
    /// Bytes of complete lines.
    len: u64,
    /// The last step in the table.
    last: Option<u32>,
}

impl Table {
    fn write(mut self, lines: &Receiver<(u32, String)>) {
        let (mut waiting, mut tries) = (VecDeque::new(), 0);
        loop {
            let mut over = false;
            if waiting.is_empty() {
                match lines.recv() {
                    Ok(line) => waiting.push_back(line),
                    Err(_) => return,
                }
            }
            loop {
                match lines.try_recv() {
                    Ok(line) => waiting.push_back(line),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        over = true;
                        break;
                    }
                }
            }
            // Steps repeated after a loss are already in the table.
            waiting.retain(|(step, _)| self.last.is_none_or(|last| *step > last));
            let Some((step, line)) = waiting.front() else { continue };
            match self.append(line) {
                Ok(()) => {
                    (self.last, self.len, tries) = (Some(*step), self.len + line.len() as u64, 0);
                    waiting.pop_front();
                }
                Err(error) => {
                    if tries == 0 {
                        tracing::warn!("{}: {error}; the write is retried", self.path.display());
                    }
                    tries += 1;
                    if over && tries >= LAST_TRIES {
                        tracing::warn!("{} ends before step {step}: {error}", self.path.display());
                        return;
                    }
                    std::thread::sleep(AGAIN);
                }
            }
        }
    }

    /// Appends a line after the last complete one; a torn line is overwritten.
    fn append(&self, line: &str) -> io::Result<()> {
        let mut file: File = OpenOptions::new().write(true).open(&self.path)?;
        file.set_len(self.len)?;
        file.seek(SeekFrom::End(0))?;
        file.write_all(line.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(force: &str) -> Simulation {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.toml");
        let text =
            "name = \"a\"\nsteps = 9\n[grid]\nsize = [64, 8]\n[rule]\nname = \"d2q9\"\ntau = 1\nsolid = \"x < 3\"\n";
        fs::write(&path, format!("{text}{force}")).unwrap();
        Simulation::read(&path).unwrap_or_else(|error| panic!("{error}"))
    }

    fn force(x: f64) -> Force {
        Force { force: vec![x, -0.5], coefficients: Some(vec![2.0 * x, -1.0]) }
    }

    #[test]
    fn a_table_grows_and_is_resumed() {
        let (out, simulation) = (tempfile::tempdir().unwrap(), job("[force]\nvelocity = 1\nlength = 1\n"));
        let table = |from| Forces::open(out.path(), &simulation, from).unwrap().unwrap();
        let text = || fs::read_to_string(out.path().join(FORCES_FILE)).unwrap();
        let first = table(0);
        // A loss: steps are repeated.
        for step in [0, 2, 4, 2, 4, 6] {
            first.append(step, &force(f64::from(step)));
        }
        first.finish();
        let all = "step,fx,fy,cx,cy\n0,0,-0.5,0,-1\n2,2,-0.5,4,-1\n4,4,-0.5,8,-1\n6,6,-0.5,12,-1\n";
        assert_eq!(text(), all);
        // Resumed from step 3, after a crash in the middle of a line.
        fs::write(out.path().join(FORCES_FILE), &all[..all.len() - 3]).unwrap();
        let second = table(3);
        second.append(3, &force(0.25));
        second.finish();
        assert_eq!(text(), "step,fx,fy,cx,cy\n0,0,-0.5,0,-1\n2,2,-0.5,4,-1\n3,0.25,-0.5,0.5,-1\n");
        // A new run.
        table(0).finish();
        assert_eq!(text(), "step,fx,fy,cx,cy\n");
        assert!(Forces::open(out.path(), &job(""), 0).unwrap().is_none());
        assert!(Forces::open(&out.path().join("gone"), &simulation, 0).is_err());
    }

    #[test]
    fn a_failed_write_is_retried() {
        let (out, simulation) = (tempfile::tempdir().unwrap(), job("[force]\n"));
        let table = Forces::open(out.path(), &simulation, 0).unwrap().unwrap();
        let (path, aside) = (out.path().join(FORCES_FILE), out.path().join("aside"));
        fs::rename(&path, &aside).unwrap();
        for step in 0..3 {
            table.append(step, &Force { force: vec![1.0, 2.0], coefficients: None });
        }
        std::thread::sleep(AGAIN / 4);
        fs::rename(&aside, &path).unwrap();
        table.finish();
        assert_eq!(fs::read_to_string(&path).unwrap(), "step,fx,fy\n0,1,2\n1,1,2\n2,1,2\n");
    }
}
