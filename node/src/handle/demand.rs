//! Serves a requested model that this node has on disk but does not serve, with the options the mesh last used. So any
//! member can take over the requests of a lost coordinator.
use super::{ModelHandle, ModelOptions, ModelRef, NodeError, NodeHandle};
use node_core::id::ContentId;
use node_core::limits::JOBS_MAX;
use node_core::work::serve::StageOrder;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// How long to retry a model that cannot be placed: memory used by a lost coordinator's job counts until the loss is
/// detected.
const PLACE_MAX: Duration = Duration::from_secs(5);
/// Retry interval: adverts of free memory are sent once per second.
const AGAIN: Duration = Duration::from_millis(500);

/// Most reductions if memory is short: down to one concurrent request with an eighth of the context.
const SMALLER_MAX: u32 = 4;

/// How to deploy a model.
pub(super) enum DeployMode {
    /// With the options a user gave.
    Requested {
        options: ModelOptions,
        /// Unload the model when it is no longer used.
        temporary: bool,
    },
    /// With the options of its last run, or reduced ones.
    OnDemand {
        /// 0: no reduction; 1: one concurrent request; each further one halves the context.
        smaller: u32,
    },
    /// Again after a restart, as it was served before.
    AfterRestart,
}

impl DeployMode {
    pub(super) fn is_temporary(&self) -> bool {
        matches!(self, Self::Requested { temporary: true, .. })
    }

    /// No smaller attempt follows, so a failure must be explained to the user.
    pub(super) fn is_last(&self) -> bool {
        match self {
            Self::Requested { .. } | Self::AfterRestart => true,
            Self::OnDemand { smaller } => *smaller >= SMALLER_MAX,
        }
    }
}

impl ModelOptions {
    /// Reduces the options by a number of steps; `context` is the context if none is set.
    pub(super) fn smaller(self, steps: u32, context: u32) -> Self {
        match steps.checked_sub(1) {
            None => self,
            Some(halves) => {
                let context = (self.context.unwrap_or(context) >> halves.min(SMALLER_MAX)).max(1);
                Self { sequences: Some(1), context: Some(context), ..self }
            }
        }
    }
}

/// The last options of the models that this node took part in, latest last, and which of them its user stopped.
#[derive(Default)]
pub(crate) struct LastOptions(Mutex<VecDeque<(ContentId, Memory)>>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Memory {
    options: ModelOptions,
    stopped: bool,
}

impl LastOptions {
    /// Records the options of a stage that this node is ordered to hold.
    pub(crate) fn note(&self, stage: &StageOrder) {
        let options =
            ModelOptions { int8: Some(stage.int8), context: Some(stage.context), sequences: Some(stage.sequences) };
        self.put(stage.content, Memory { options, stopped: false });
    }

    /// Records that the user stopped the model.
    pub(super) fn stop(&self, content: ContentId) {
        let options = self.get(content).options;
        self.put(content, Memory { options, stopped: true });
    }

    /// The options of the last run; the defaults if the model is unknown.
    ///
    /// # Errors
    /// The user stopped the model here.
    pub(super) fn options(&self, content: ContentId) -> Result<ModelOptions, NodeError> {
        match self.get(content) {
            Memory { stopped: true, .. } => {
                Err(NodeError::NotFound("the model was stopped on this node: serve it with `meshnode serve`".into()))
            }
            Memory { options, stopped: false } => Ok(options),
        }
    }

    fn get(&self, content: ContentId) -> Memory {
        self.lock().iter().find(|(known, _)| *known == content).map(|(_, memory)| memory.clone()).unwrap_or_default()
    }

    fn put(&self, content: ContentId, memory: Memory) {
        let mut known = self.lock();
        known.retain(|(other, _)| *other != content);
        known.push_back((content, memory));
        // A node can take part in this many jobs at a time.
        if known.len() > JOBS_MAX {
            known.pop_front();
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(ContentId, Memory)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeHandle {
    /// Whether this node could serve a model of that name: from its own cache, or because it served it before a
    /// restart. Paths are not accepted: a request must not reveal which files exist.
    pub fn has(&self, name: &str) -> bool {
        crate::pull::is_cached(name, &self.inner.models_dir) || self.inner.remembered.get(name).is_some()
    }

    /// Serves a model that a request names, with the options of its last run as far as this node has them. If memory
    /// stays short for `PLACE_MAX`, allows fewer and shorter requests rather than none. Concurrent requests for the
    /// model share one job.
    ///
    /// # Errors
    /// Those of [`NodeHandle::deploy`]; or the user stopped the model here.
    pub async fn serve_on_demand(&self, name: &str) -> Result<ModelHandle, NodeError> {
        let (node, model, end) = (self.clone(), ModelRef(name.to_owned()), Instant::now() + PLACE_MAX);
        let deploying = tokio::spawn(async move {
            let mut smaller = 0;
            loop {
                // The command or the restart may have served it meanwhile.
                if let Some(served) = node.inner.serving.by_name(&model.0).filter(|served| served.name == model.0) {
                    return Ok(served);
                }
                match node.deploy_in_turn(model.clone(), DeployMode::OnDemand { smaller }).await {
                    Err(NodeError::Failed(_) | NodeError::Plan(_)) if Instant::now() < end => {
                        tokio::time::sleep(AGAIN).await;
                    }
                    Err(NodeError::Failed(_) | NodeError::Plan(_)) if smaller < SMALLER_MAX => smaller += 1,
                    answer => return answer,
                }
            }
        });
        deploying.await.unwrap_or_else(|e| Err(NodeError::Failed(format!("serving the model was interrupted: {e}"))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(content: u8, context: u32) -> StageOrder {
        let (content, layers) = (ContentId([content; 32]), vec![0..1, 1..2]);
        StageOrder { content, layers, sequences: 3, context, width: 8, int8: false }
    }

    #[test]
    fn reduced_options_halve_the_context() {
        let usual = ModelOptions { int8: Some(false), context: None, sequences: None };
        assert_eq!(usual.clone().smaller(0, 2048), usual);
        let sizes = |steps| {
            let less = usual.clone().smaller(steps, 2048);
            assert_eq!(less.int8, Some(false), "other arithmetic would choose other tokens");
            (less.sequences, less.context)
        };
        assert_eq!(sizes(1), (Some(1), Some(2048)));
        assert_eq!(sizes(SMALLER_MAX), (Some(1), Some(256)));
    }

    #[test]
    fn the_last_options_are_kept_until_the_model_is_stopped() {
        let (last_options, tiny) = (LastOptions::default(), ContentId([1; 32]));
        assert_eq!(last_options.options(tiny).unwrap(), ModelOptions::default());
        last_options.note(&stage(1, 64));
        last_options.note(&stage(1, 128));
        let last = ModelOptions { int8: Some(false), context: Some(128), sequences: Some(3) };
        assert_eq!(last_options.options(tiny).unwrap(), last);
        last_options.stop(tiny);
        assert!(matches!(last_options.options(tiny), Err(NodeError::NotFound(_))));
        last_options.note(&stage(1, 64));
        assert_eq!(last_options.options(tiny).unwrap().context, Some(64));
        (2..2 + JOBS_MAX as u8).for_each(|other| last_options.note(&stage(other, 64)));
        assert_eq!(last_options.options(tiny).unwrap(), ModelOptions::default(), "only the latest JOBS_MAX are kept");
    }
}
