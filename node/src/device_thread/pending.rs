//! Work that a device is at while the thread goes on: what is known of it, and who waits for its end.
use super::{Command, guarded, nanos};
use crate::residency::Key;
use crate::tensors::Tensor;
use kernels::grid::any_tile::Mark;
use node_core::id::WorkId;
use node_core::work::serve::Item;
use node_core::work::steps::TileMade;
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::time::Instant;

/// Work that is to be answered.
pub(super) struct Pending {
    pub(super) key: Key,
    pub(super) work: WorkId,
    pub(super) what: PendingWork,
}

impl Pending {
    /// Whether it is a stage's.
    pub(super) fn is_batch(&self) -> bool {
        matches!(self.what, PendingWork::Batch { .. })
    }

    /// Whether it can be answered now, or is a batch: that is waited for, since the next is made of what it gives.
    pub(super) fn is_due(&self) -> bool {
        match &self.what {
            PendingWork::Batch { .. } => true,
            PendingWork::Steps { before, this, last, .. } => {
                before.as_ref().is_none_or(Launched::is_done) && (!last || this.is_done())
            }
        }
    }
}

/// What is to be answered when.
pub(super) enum PendingWork {
    /// A batch of a stage: when it is done.
    Batch {
        items: Vec<Item>,
        /// One per item.
        inputs: Vec<Option<Tensor>>,
    },
    /// Steps of a tile: while the device is at them, when the run before is done, so that the device has its next one before it
    /// ends this; the last run of all when it is done itself.
    Steps { before: Option<Launched>, this: Launched, last: bool, made: TileMade },
}

/// When a run was done, or why not.
type End = OnceLock<Result<Instant, String>>;

/// A run of a tile that a device was given.
#[derive(Clone)]
pub(super) struct Launched {
    began: Instant,
    end: Arc<End>,
    /// That of the run before, which it waits for.
    after: Option<Arc<End>>,
    answered: Arc<OnceLock<Instant>>,
}

impl Launched {
    fn is_done(&self) -> bool {
        self.end.get().is_some()
    }

    /// Waits for it, and says when it was done and for how many nanoseconds the device was at it.
    fn wait(&self) -> Result<(Instant, u64), String> {
        let end = self.end.wait().clone()?;
        let free = self.after.as_ref().and_then(|before| before.get()?.clone().ok());
        let begin = free.map_or(self.began, |free| free.max(self.began));
        Ok((end, nanos(end.saturating_duration_since(begin))))
    }

    /// Waits until the run can be answered, and adds how long the device took.
    pub(super) fn made(&self, before: Option<&Launched>, last: bool, mut made: TileMade) -> Result<TileMade, String> {
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

    /// The answer is given now.
    pub(super) fn answered(&self) {
        let _ = self.answered.set(Instant::now());
    }
}

/// The thread that waits for devices, started with the first run that one is given; it ends with this. What waits here is
/// bounded: two runs of each tile.
pub(super) struct Watcher {
    marks: Option<mpsc::Sender<(Mark, Arc<End>)>>,
    /// The device thread, which is woken at each mark.
    thread: Weak<mpsc::Sender<Command>>,
}

impl Watcher {
    /// One that wakes this thread.
    pub(super) fn new(thread: Weak<mpsc::Sender<Command>>) -> Self {
        Self { marks: None, thread }
    }

    /// A device is at a run until the mark. `last`: the run of this tile that was launched last, which this one replaces. Gives
    /// both.
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
        marks.send((mark, this.end.clone())).map_err(|_| "the thread that waits for devices has ended")?;
        // From here on its end is reported.
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
                let _ = thread.send(Command::Reached);
            }
        }
    };
    std::thread::Builder::new().name("watcher".into()).spawn(watch).map_err(|e| format!("no thread: {e}"))?;
    Ok(sender)
}
