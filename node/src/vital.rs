//! Watches the threads and tasks that a node needs: if one of them ends before the node does, the node logs an error
//! and stops.
//!
//! A node whose gossip thread, device thread or ban exchange has died unnoticed looks alive but is not. It exits with a
//! failure code instead, so that a supervisor restarts it and the mesh takes over its work.
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

/// How often to check that all parts run.
const GLANCE: Duration = Duration::from_secs(1);

/// Reports the end of a node, once: by the driver thread, or by the watch over the parts.
#[derive(Clone)]
pub(crate) struct End(Arc<Mutex<Option<oneshot::Sender<()>>>>);

impl End {
    /// An unreported end, and a receiver that completes with it: with an error if the node failed.
    pub(crate) fn new() -> (Self, oneshot::Receiver<()>) {
        let (sender, stopped) = oneshot::channel();
        (Self(Arc::new(Mutex::new(Some(sender)))), stopped)
    }

    /// Runs the node. Returning from `node` is a normal stop, a panic is a failure.
    pub(crate) fn after(self, node: impl FnOnce()) {
        let failed = Failed(self);
        node();
        if let Some(sender) = failed.0.take() {
            let _ = sender.send(());
        }
    }

    fn take(&self) -> Option<oneshot::Sender<()>> {
        self.0.lock().take()
    }

    fn is_reported(&self) -> bool {
        self.0.lock().is_none()
    }
}

/// Reports a failure when dropped, unless the end was already reported.
struct Failed(End);

impl Drop for Failed {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// The threads and tasks of a node.
#[derive(Default)]
pub(crate) struct Parts(Vec<Part>);

struct Part {
    name: &'static str,
    runs: Box<dyn Fn() -> bool + Send + Sync>,
}

impl Parts {
    /// Adds a part; `runs` returns whether it still runs.
    pub(crate) fn add(&mut self, name: &'static str, runs: impl Fn() -> bool + Send + Sync + 'static) {
        self.0.push(Part { name, runs: Box::new(runs) });
    }

    /// Adds a task.
    pub(crate) fn add_task(&mut self, name: &'static str, task: AbortHandle) {
        self.add(name, move || !task.is_finished());
    }

    /// Starts the watch, which ends with the node or when it is aborted.
    pub(crate) fn watch(self, end: End) -> AbortHandle {
        self.watch_every(GLANCE, end)
    }

    fn watch_every(self, glance: Duration, end: End) -> AbortHandle {
        let watch = async move {
            loop {
                tokio::time::sleep(glance).await;
                let Some(Part { name, .. }) = self.0.iter().find(|part| !(part.runs)()) else { continue };
                // A node that stops ends its parts before it reports its own end.
                tokio::time::sleep(glance).await;
                if !end.is_reported() {
                    tracing::error!(
                        "expected {name} to run as long as the node, found that it ended; its panic is logged above. The node stops: \
                         start it again, and report this as a bug"
                    );
                    drop(Failed(end));
                }
                return;
            }
        };
        tokio::spawn(watch).abort_handle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(5);

    fn panics() {
        panic!("on purpose");
    }

    #[tokio::test]
    async fn a_part_that_panics_ends_the_node() {
        let (end, stopped) = End::new();
        let thread = std::thread::spawn(panics);
        let mut parts = Parts::default();
        parts.add("the gossip thread", || true);
        parts.add("the device thread", move || !thread.is_finished());
        parts.watch_every(SOON, end);
        assert!(stopped.await.is_err(), "the node has failed");
    }

    #[tokio::test]
    async fn a_task_that_panics_ends_the_node() {
        let (end, stopped) = End::new();
        let mut parts = Parts::default();
        parts.add_task("the ban exchange", tokio::spawn(async { panics() }).abort_handle());
        parts.watch_every(SOON, end);
        assert!(stopped.await.is_err(), "the node has failed");
    }

    #[tokio::test]
    async fn parts_that_end_with_the_node_are_not_a_failure() {
        let (end, stopped) = End::new();
        let mut parts = Parts::default();
        parts.add("the device thread", || false);
        parts.watch_every(SOON, end.clone());
        end.after(|| {});
        assert!(stopped.await.is_ok());
    }

    #[tokio::test]
    async fn a_driver_that_panics_ends_the_node() {
        let (end, stopped) = End::new();
        let (watched, driver) = (end.clone(), std::thread::spawn(move || end.after(panics)));
        assert!(driver.join().is_err());
        assert!(stopped.await.is_err() && watched.is_reported());
    }
}
