//! Temporary models, loaded for one command (`meshnode run`): unloads them once they are unused for a few seconds.
use super::NodeHandle;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a temporary model stays after its last request: a script that runs one prompt after another loads it once.
const IDLE_MAX: Duration = Duration::from_secs(3);
/// How long it stays for the first request: the command sends it right away, unless it was killed.
const UNUSED_MAX: Duration = Duration::from_secs(30);
/// Poll interval.
const GLANCE: Duration = Duration::from_millis(500);

/// The usage of a served job, shared by all of its names.
#[derive(Debug)]
pub(crate) struct Uses(Mutex<Use>);

#[derive(Debug)]
struct Use {
    temporary: bool,
    /// When it was last used.
    at: Instant,
    /// The last use was a request, not only the command that loaded the model.
    requested: bool,
}

impl Uses {
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

    pub(super) fn is_temporary(&self) -> bool {
        self.lock().temporary
    }

    fn is_over(&self, now: Instant) -> bool {
        let state = self.lock();
        let patience = if state.requested { IDLE_MAX } else { UNUSED_MAX };
        state.temporary && now.saturating_duration_since(state.at) >= patience
    }

    fn lock(&self) -> MutexGuard<'_, Use> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeHandle {
    /// Unloads a model once it is unused; returns when it is unloaded, or has become permanent.
    pub(super) async fn end_when_unused(self, uses: Arc<Uses>) {
        let serving = &self.inner.serving;
        let job = || serving.all().into_iter().find(|model| Arc::ptr_eq(&model.uses, &uses)).map(|model| model.job);
        loop {
            tokio::time::sleep(GLANCE).await;
            let Some(placed) = job() else {
                // It may be in replacement, and be restored if that fails.
                let _turn = serving.turn().await;
                if job().is_none() {
                    return;
                }
                continue;
            };
            if !uses.is_temporary() {
                return;
            }
            let name = super::serving::name_of(placed);
            let jobs = self.inner.driver.views().await.jobs;
            if jobs.iter().any(|view| view.job == name && view.running + view.queued > 0) {
                uses.requested();
            }
            if !uses.is_over(Instant::now()) {
                continue;
            }
            let _turn = serving.turn().await;
            if let Some(job) = job().filter(|_| uses.is_over(Instant::now())) {
                let names = serving.end(job).await;
                tracing::info!("{} was loaded for one run and is unused: unloaded", names.join(", "));
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_model_expires_after_its_last_request_and_a_served_one_never() {
        let uses = Uses::new(true);
        let after = |seconds| Instant::now() + Duration::from_secs(seconds);
        assert!(!uses.is_over(after(10)) && uses.is_over(after(31)), "the command was killed before its first request");
        uses.requested();
        assert!(!uses.is_over(after(1)) && uses.is_over(after(4)));
        uses.claim(true);
        assert!(!uses.is_over(after(10)), "another run starts");
        uses.claim(false);
        uses.requested();
        assert!(!uses.is_over(after(1_000_000)), "permanent by now");
        uses.claim(true);
        assert!(!uses.is_temporary(), "a run does not make a served model temporary");
    }
}
