//! How a served job is used: a temporary one, loaded for one command (`meshnode run`), is unloaded once it is unused; a
//! permanent one after the node's `--idle-unload`, if that is set.
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a temporary model stays after its last request: a script that runs one prompt after another loads it once.
const IDLE_MAX: Duration = Duration::from_secs(3);
/// How long it stays for the first request: the command sends it right away, unless it was killed.
const UNUSED_MAX: Duration = Duration::from_secs(30);

/// The usage of a served job, shared by all of its names.
#[derive(Debug)]
pub(crate) struct Usage(Mutex<Use>);

#[derive(Debug)]
struct Use {
    temporary: bool,
    /// When it was last used.
    at: Instant,
    /// The last use was a request, not only the command that loaded the model.
    requested: bool,
}

impl Usage {
    /// The usage of a new job; `temporary`: unload it when it is unused.
    pub(super) fn new(temporary: bool) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Use { temporary, at: Instant::now(), requested: false })))
    }

    /// A command uses the job: `run` keeps it as it is, `serve` makes it permanent.
    pub(super) fn claim(&self, temporary: bool) {
        let mut state = self.lock();
        *state = Use { temporary: state.temporary && temporary, at: Instant::now(), requested: false };
    }

    /// A request begins, or is still running.
    pub(super) fn requested(&self) {
        let mut state = self.lock();
        (state.at, state.requested) = (Instant::now(), true);
    }

    /// Whether it is unloaded when the command that loaded it has ended.
    pub(super) fn is_temporary(&self) -> bool {
        self.lock().temporary
    }

    /// Whether it was unused for long enough to be unloaded; `idle`: how long a permanent model stays.
    pub(super) fn is_over(&self, now: Instant, idle: Option<Duration>) -> bool {
        let state = self.lock();
        let patience = match (state.temporary, state.requested) {
            (true, true) => Some(IDLE_MAX),
            (true, false) => Some(UNUSED_MAX),
            (false, _) => idle,
        };
        patience.is_some_and(|patience| now.saturating_duration_since(state.at) >= patience)
    }

    fn lock(&self) -> MutexGuard<'_, Use> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(seconds: u64) -> Instant {
        Instant::now() + Duration::from_secs(seconds)
    }

    #[test]
    fn a_temporary_model_expires_after_its_last_request_and_a_served_one_never() {
        let uses = Usage::new(true);
        let is_over = |seconds| uses.is_over(after(seconds), None);
        assert!(!is_over(10) && is_over(31), "the command was killed before its first request");
        uses.requested();
        assert!(!is_over(1) && is_over(4));
        uses.claim(true);
        assert!(!is_over(10), "another run starts");
        uses.claim(false);
        uses.requested();
        assert!(!is_over(1_000_000), "permanent by now");
        uses.claim(true);
        assert!(!uses.is_temporary(), "a run does not make a served model temporary");
    }

    #[test]
    fn a_permanent_model_expires_where_the_node_says_so() {
        let uses = Usage::new(false);
        let idle = Some(Duration::from_secs(600));
        assert!(!uses.is_over(after(599), idle) && uses.is_over(after(601), idle));
        uses.requested();
        assert!(!uses.is_over(after(599), idle));
    }
}
