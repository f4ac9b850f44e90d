//! Ctrl-C and SIGTERM in commands that wait: the first signal ends the command gracefully, a second one immediately.
//! Both remove temporary directories.
use super::failure::Failure;
use super::print::remark;
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Polling interval for interrupts and other events.
pub(super) const GLANCE: Duration = Duration::from_millis(50);

/// Time for interrupted work to clean up after its nodes were killed.
const TIDY_MAX: Duration = Duration::from_secs(2);

/// Directories to remove if the process ends without unwinding.
static TEMPORARY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Receives a message at the first signal.
pub(super) struct Interrupts(Receiver<()>);

impl Interrupts {
    /// Installs the handlers: from now on the first signal does not end the process.
    pub(super) fn listen() -> Result<Self, Failure> {
        let (sender, receiver) = channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| Failure::failed(format!("cannot wait for signals: {e}")))?;
        let mut signals = runtime.block_on(async { Signals::listen() })?;
        std::thread::spawn(move || {
            runtime.block_on(async {
                signals.next().await;
                let _ = sender.send(());
                signals.next().await;
                crate::cluster::kill_all();
                remove_temporary();
                std::process::exit(i32::from(Failure::INTERRUPTED));
            });
        });
        Ok(Self(receiver))
    }

    /// Whether a signal has arrived since the last call.
    pub(super) fn came(&self) -> bool {
        self.0.try_recv().is_ok()
    }

    /// Runs long work until it ends or a signal arrives. After a signal the work is abandoned, because the process is
    /// about to end.
    pub(super) fn during<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let (sender, done) = channel();
        std::thread::spawn(move || drop(sender.send(work())));
        loop {
            match done.recv_timeout(GLANCE) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::failed(
                        "internal error: the command panicked. This is a bug: report it with the messages above",
                    ));
                }
            }
            if self.came() {
                remark("interrupted");
                if crate::cluster::kill_all() > 0 {
                    // The work sees its nodes end and cleans up.
                    let _ = done.recv_timeout(TIDY_MAX);
                }
                remove_temporary();
                return Err(Failure::quiet(Failure::INTERRUPTED));
            }
        }
    }
}

/// Removes `dir` when the process ends, however it ends (except by SIGKILL).
pub(super) fn remove_at_end(dir: &Path) {
    TEMPORARY.lock().push(dir.to_owned());
}

fn remove_temporary() {
    for dir in TEMPORARY.lock().drain(..) {
        let _ = std::fs::remove_dir_all(dir);
    }
}

/// Ctrl-C and SIGTERM, caught from `listen` on: a signal before the call of `next` is not lost.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Must be called within a runtime.
    pub(super) fn listen() -> Result<Self, Failure> {
        let kind = |kind| signal(kind).map_err(|e| Failure::failed(format!("cannot wait for signals: {e}")));
        Ok(Self { interrupt: kind(SignalKind::interrupt())?, terminate: kind(SignalKind::terminate())? })
    }

    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
