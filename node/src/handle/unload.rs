//! Unloads temporary models, which were loaded for one command (`meshnode run`), once they are unused for a few seconds.
use super::NodeHandle;
use super::serving::name_of;
use super::usage::Usage;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Poll interval.
const GLANCE: Duration = Duration::from_millis(500);

impl NodeHandle {
    /// Unloads a model once it is unused; returns when it is unloaded, or has become permanent.
    pub(super) async fn end_when_unused(self, uses: Arc<Usage>) {
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
            let name = name_of(placed);
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
