//! Models that are loaded for one command, `meshnode run`: they are unloaded once nothing has used them for a moment.
use super::NodeHandle;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long after its last request such a model is kept: a script that runs one prompt after the other loads it once.
const IDLE_MAX: Duration = Duration::from_secs(3);
/// How long it is kept for the first request: the command sends it at once, unless it was killed.
const UNUSED_MAX: Duration = Duration::from_secs(30);
/// How often that is looked at.
const GLANCE: Duration = Duration::from_millis(500);

/// How a served job is used; shared by all names of it.
#[derive(Debug)]
pub(crate) struct Uses(Mutex<Use>);

#[derive(Debug)]
struct Use {
    temporary: bool,
    /// When it was last requested.
    at: Instant,
    /// That was a request, and not only the command that loaded it.
    requested: bool,
}

impl Uses {
    /// Of a job that is served from now on; `temporary`: until nothing uses it.
    pub(super) fn new(temporary: bool) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Use { temporary, at: Instant::now(), requested: false })))
    }

    /// A command wants it: one that only runs it keeps it as it is, one that serves it keeps it for good.
    pub(super) fn wanted(&self, temporary: bool) {
        let mut state = self.lock();
        *state = Use { temporary: state.temporary && temporary, at: Instant::now(), requested: false };
    }

    /// A request begins, or still runs.
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
    /// Unloads a model once nothing uses it; returns when it is gone, or served for good.
    pub(super) async fn end_when_unused(self, uses: Arc<Uses>) {
        let serving = &self.inner.serving;
        let job = || serving.all().into_iter().find(|model| Arc::ptr_eq(&model.uses, &uses)).map(|model| model.job);
        loop {
            tokio::time::sleep(GLANCE).await;
            let Some(placed) = job() else {
                // It may be replaced just now, and restored if that fails.
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
                tracing::info!("{} was loaded for one run, and is unloaded: nothing uses it", names.join(", "));
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_for_one_run_is_over_soon_after_its_last_request_and_a_served_one_never() {
        let uses = Uses::new(true);
        let after = |seconds| Instant::now() + Duration::from_secs(seconds);
        assert!(!uses.is_over(after(10)) && uses.is_over(after(31)), "the command was killed before it asked");
        uses.requested();
        assert!(!uses.is_over(after(1)) && uses.is_over(after(4)));
        uses.wanted(true);
        assert!(!uses.is_over(after(10)), "another run begins");
        uses.wanted(false);
        uses.requested();
        assert!(!uses.is_over(after(1_000_000)), "served meanwhile");
        uses.wanted(true);
        assert!(!uses.is_temporary(), "a run does not end what is served");
    }
}
