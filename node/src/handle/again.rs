//! After a restart, serves the models that were served before it, and shows their state meanwhile.
use super::NodeHandle;
use super::demand::{DeployMode, HELD_MAX};
use super::model::ModelRef;
use super::opened::Opened;
use super::remembered::{RememberedModel, Starting};
use crate::error::NodeError;
use crate::views::JobView;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// First and longest delay between attempts to place a model: other members may still be starting.
const AGAIN: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(5)];

impl NodeHandle {
    /// Starts to serve the models that this node served before it stopped. Call once, within a runtime.
    pub(crate) fn serve_again(&self) {
        let entries = self.inner.remembered.all();
        entries.iter().for_each(|entry| self.inner.remembered.set_starting(&entry.name, None));
        if entries.is_empty() {
            return;
        }
        let node = self.clone();
        tokio::spawn(async move {
            // One after another, in the order in which they were first served, so that they find the same free memory.
            let (mut wait, start) = (AGAIN[0], Instant::now());
            while !node.inner.remembered.starting().is_empty() && !node.inner.leaving.load(Ordering::Relaxed) {
                for Starting { entry, .. } in node.inner.remembered.starting() {
                    node.start_again(&entry, start).await;
                }
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(AGAIN[1]);
            }
        });
    }

    async fn start_again(&self, entry: &RememberedModel, start: Instant) {
        // A successor has taken the job over: requests are forwarded there, and a second copy would waste memory.
        if let Some(member) = self.serving_members(&entry.name).await.into_iter().next() {
            let reason =
                format!("{} took the model over while this node was down; requests are forwarded there", member.name);
            return self.inner.remembered.set_starting(&entry.name, Some(reason));
        }
        // The memory is for the successor first.
        if start.elapsed() < HELD_MAX && self.is_held(&entry.name).await {
            let reason = "another node coordinated it while this node was down and is lost: its successor is awaited";
            return self.inner.remembered.set_starting(&entry.name, Some(reason.to_owned()));
        }
        match self.deploy_in_turn(ModelRef(entry.name.clone()), DeployMode::AfterRestart).await {
            Ok(_) => {
                self.inner.remembered.set_started(&entry.name);
                tracing::info!("{} is served again after the restart", entry.name);
            }
            Err(error) => {
                let reason = error.to_string();
                let known = self.inner.remembered.starting().into_iter().find(|known| known.entry.name == entry.name);
                // It was stopped meanwhile.
                let Some(known) = known else { return };
                if known.reason.as_ref() != Some(&reason) {
                    tracing::warn!("{} was served before the restart and cannot be served yet: {reason}", entry.name);
                }
                self.inner.remembered.set_starting(&entry.name, Some(reason));
            }
        }
    }

    /// Opens the model of an entry, if its file still exists.
    pub(super) async fn open_remembered(&self, entry: &RememberedModel) -> Result<Opened, NodeError> {
        if !entry.path.is_file() {
            return Err(NodeError::NotFound(format!(
                "its file {} is gone: restore it, or stop the model with `meshnode serve {} --stop`",
                entry.path.display(),
                entry.name
            )));
        }
        self.open_file(entry.path.clone(), entry.name.clone()).await
    }

    /// Names and contexts of the models that are still to be served again.
    pub(crate) fn starting_models(&self) -> Vec<(String, u32)> {
        let context = |entry: &RememberedModel| entry.options.context.unwrap_or_default();
        let served = |name: &str| self.inner.serving.all().iter().any(|model| model.name == name);
        let starting = self.inner.remembered.starting().into_iter().map(|starting| starting.entry);
        starting.filter(|entry| !served(&entry.name)).map(|entry| (entry.name.clone(), context(&entry))).collect()
    }

    /// Inserts models that are still to be served again before the core's jobs: "starting" until the first attempt to
    /// place them has failed, then "degraded", with the reason.
    pub(super) fn with_starting(&self, mut jobs: Vec<JobView>) -> Vec<JobView> {
        for Starting { entry, reason } in self.inner.remembered.starting() {
            let state = if reason.is_none() { "starting" } else { "degraded" };
            let placing = jobs.iter_mut().find(|job| job.head && job.model == entry.name);
            match placing {
                Some(job) if matches!(job.state.as_str(), "planning" | "loading") => job.state = "starting".into(),
                Some(_) => {}
                None => jobs.insert(
                    0,
                    JobView {
                        model: entry.name,
                        state: state.into(),
                        reason,
                        head: true,
                        coordinator: self.inner.name.clone(),
                        context: entry.options.context,
                        sequences: entry.options.sequences,
                        ..JobView::default()
                    },
                ),
            }
        }
        jobs
    }
}
