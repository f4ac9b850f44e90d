//! Work that a device computes while the device thread continues: its completion, and when it is answered.
use super::command::Command;
use super::stages::Inputs;
use crate::panics::guarded;
use crate::residency::Key;
use kernels_grids::any_tile::Mark;
use node_core::id::WorkId;
use node_core::work::serve::Item;
use node_core::work::steps::TileResult;
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::time::{Duration, Instant};

/// Work whose answer is deferred.
pub(super) struct Pending {
    pub(super) key: Key,
    pub(super) work: WorkId,
    pub(super) what: PendingWork,
}

impl Pending {
    /// Whether it is a stage's batch.
    pub(super) fn is_batch(&self) -> bool {
        matches!(self.what, PendingWork::Batch { .. })
    }

    /// Whether `finish` may be called now. Always for a batch: `finish` waits for it, since the next batch depends on
    /// its result.
    pub(super) fn is_due(&self) -> bool {
        match &self.what {
            PendingWork::Batch { .. } => true,
            PendingWork::Steps { before, this, last, .. } => {
                before.as_ref().is_none_or(Launched::is_done) && (!last || this.is_done())
            }
        }
    }
}

/// The kind of work, which decides when it is answered.
pub(super) enum PendingWork {
    /// A batch of a stage, answered when it completes.
    Batch { items: Vec<Item>, inputs: Inputs, began: Begun },
    /// Steps of a tile. Answered when the *previous* run completes, so that the core sends the next run before the
    /// device goes idle. The last run of a job is answered on its own completion.
    Steps { before: Option<Launched>, this: Launched, last: bool, made: TileResult },
}

/// When a batch was submitted, and the tile run that the device completes before it.
pub(super) struct Begun {
    at: Instant,
    after: Option<Arc<End>>,
}

impl Begun {
    /// Time that the device computed the batch, which completed now, in nanoseconds. `free`: when it completed its last batch.
    pub(super) fn compute_ns(&self, free: Option<Instant>) -> u64 {
        let run = self.after.as_ref().and_then(|run| run.get()?.clone().ok());
        let began = [free, run].into_iter().flatten().fold(self.at, Instant::max);
        nanos(began.elapsed())
    }
}

/// When a run completed, or its error.
type End = OnceLock<Result<Instant, String>>;

/// A run of a tile that was launched on a device.
#[derive(Clone)]
pub(super) struct Launched {
    began: Instant,
    end: Arc<End>,
    /// The end of the previous run of the tile, which the device completes first.
    after: Option<Arc<End>>,
    answered: Arc<OnceLock<Instant>>,
}

impl Launched {
    fn is_done(&self) -> bool {
        self.end.get().is_some()
    }

    /// Waits for the run; returns when it completed, and its time on the device in nanoseconds.
    fn wait(&self) -> Result<(Instant, u64), String> {
        let end = self.end.wait().clone()?;
        let free = self.after.as_ref().and_then(|before| before.get()?.clone().ok());
        let begin = free.map_or(self.began, |free| free.max(self.began));
        Ok((end, nanos(end.saturating_duration_since(begin))))
    }

    /// Waits until the run may be answered, and adds the time that the device took.
    pub(super) fn made(
        &self,
        before: Option<&Launched>,
        last: bool,
        mut made: TileResult,
    ) -> Result<TileResult, String> {
        if let Some(before) = before {
            let (end, took) = before.wait()?;
            made.compute_ns = took;
            if let Some(answered) = before.answered.get() {
                made.overlap_ns = nanos(end.min(self.began).saturating_duration_since(*answered));
            }
        }
        if last {
            made.compute_ns += self.wait()?.1;
        }
        Ok(made)
    }

    /// Records that the answer is sent now.
    pub(super) fn answered(&self) {
        let _ = self.answered.set(Instant::now());
    }
}

/// Waits for devices on a thread of its own, which starts with the first launched run and ends when this is dropped.
/// The channel is bounded by the protocol: two runs per tile.
pub(super) struct Watcher {
    marks: Option<mpsc::Sender<(Mark, Arc<End>)>>,
    /// The end of the run that was launched last.
    last: Option<Arc<End>>,
    /// Wakes the device thread at each mark.
    thread: Weak<mpsc::Sender<Command>>,
}

impl Watcher {
    /// A watcher that wakes `thread`.
    pub(super) fn new(thread: Weak<mpsc::Sender<Command>>) -> Self {
        Self { marks: None, last: None, thread }
    }

    /// The beginning of a batch that is submitted now.
    pub(super) fn begun(&self) -> Begun {
        Begun { at: Instant::now(), after: self.last.clone() }
    }

    /// Watches a launched run until `mark`. `last` is the tile's previous launched run; it is replaced by this one.
    /// Returns the previous run and this one.
    pub(super) fn watch(
        &mut self,
        last: &mut Option<Launched>,
        began: Instant,
        mark: Mark,
    ) -> Result<(Option<Launched>, Launched), String> {
        let before = last.take();
        let after = before.as_ref().map(|before| before.end.clone());
        let this = Launched { began, end: Arc::default(), after, answered: Arc::default() };
        let marks = match &self.marks {
            Some(marks) => marks,
            None => self.marks.insert(watcher(self.thread.clone())?),
        };
        marks.send((mark, this.end.clone())).map_err(|_| "the watcher thread of the device has ended")?;
        // From here on the completion is reported.
        self.last = Some(this.end.clone());
        *last = Some(this.clone());
        Ok((before, this))
    }
}

fn watcher(thread: Weak<mpsc::Sender<Command>>) -> Result<mpsc::Sender<(Mark, Arc<End>)>, String> {
    let (sender, marks) = mpsc::channel::<(Mark, Arc<End>)>();
    let watch = move || {
        for (mark, end) in marks {
            let result = guarded(|| mark.wait().map_err(|e| e.to_string()));
            let _ = end.set(result.map(|()| Instant::now()));
            if let Some(thread) = thread.upgrade() {
                let _ = thread.send(Command::MarkReached);
            }
        }
    };
    std::thread::Builder::new()
        .name("watcher".into())
        .spawn(watch)
        .map_err(|e| format!("the watcher thread could not be started: {e}"))?;
    Ok(sender)
}

/// A duration in the unit of the core's figures.
pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
