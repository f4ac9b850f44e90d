//! Unloads models that are unused: temporary ones, which were loaded for one command (`meshnode run`), after a few seconds;
//! others after the node's `--idle-unload`. The next request for one of those loads it again.
use super::NodeHandle;
use super::model::ModelHandle;
use super::serving::name_of;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Poll interval.
const GLANCE: Duration = Duration::from_millis(500);

impl NodeHandle {
    /// Starts to unload unused models. Call once, within a runtime.
    pub(crate) fn watch_usage(&self) {
        let node = self.clone();
        tokio::spawn(async move {
            while !node.inner.leaving.load(Ordering::Relaxed) {
                tokio::time::sleep(GLANCE).await;
                node.unload_unused().await;
            }
        });
    }

    async fn unload_unused(&self) {
        let idle = self.inner.idle_unload;
        let expires = |model: &ModelHandle| model.uses.is_temporary() || idle.is_some();
        // A job with several names is looked at once.
        let served = self.inner.serving.all().into_iter().filter(expires).map(|model| (model.job, model));
        let served: BTreeMap<_, _> = served.collect();
        if served.is_empty() {
            return;
        }
        // A draft model is in use as long as a model that asks it is served.
        let all = self.inner.serving.all();
        let makes_drafts = |model: &ModelHandle| all.iter().any(|other| other.spec.draft == Some(model.spec.content));
        let views = self.inner.driver.views().await;
        for (job, model) in served {
            if makes_drafts(&model) || views.requests_of(&name_of(job)) > 0 {
                model.uses.requested();
            }
            if !model.uses.is_over(Instant::now(), idle) {
                continue;
            }
            // A command that used it meanwhile has claimed it by the time this has its turn.
            let _turn = self.inner.serving.turn().await;
            let is_served = self.inner.serving.all().iter().any(|served| served.job == job);
            if is_served && model.uses.is_over(Instant::now(), idle) {
                let names = self.inner.serving.end(job).await.join(", ");
                match model.uses.is_temporary() {
                    true => tracing::info!("{names} was loaded for one run and is unused: unloaded"),
                    false => tracing::info!("{names} is unused: unloaded until the next request for it"),
                }
            }
        }
    }

    /// Names and contexts of the models that the next request loads again.
    pub(crate) fn unloaded_models(&self) -> Vec<(String, u32)> {
        let starting = self.inner.remembered.starting();
        let (served, remembered) = (self.inner.serving.all(), self.inner.remembered.all().into_iter());
        let unloaded = remembered.filter(|entry| {
            let is_starting = starting.iter().any(|starting| starting.entry.name == entry.name);
            !is_starting && served.iter().all(|model| model.name != entry.name)
        });
        unloaded.map(|entry| (entry.name, entry.options.context.unwrap_or_default())).collect()
    }
}
