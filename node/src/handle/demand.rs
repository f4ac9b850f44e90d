//! Serves a requested model that this node has on disk but does not serve, with the options the mesh last used. So any
//! member can take over the requests of a lost coordinator.
use super::NodeHandle;
use super::model::{ModelHandle, ModelOptions, ModelRef};
use crate::error::NodeError;
use partitioner::CONTEXT_MIN;
use std::time::Duration;
use tokio::time::Instant;

/// How long to retry a model that cannot be placed: memory used by a lost coordinator's job counts until the loss is
/// detected.
const PLACE_MAX: Duration = Duration::from_secs(5);
/// Retry interval: adverts of free memory are sent once per second.
const AGAIN: Duration = Duration::from_millis(500);

/// How long to wait for a successor while members hold parts of a lost coordinator's job. A participant keeps them for at
/// most 15 s; after that, their memory is free for another job.
pub(crate) const HELD_MAX: Duration = Duration::from_secs(20);

/// Most reductions if memory is short: down to one context of 1/32 of the usual length.
const SMALLER_MAX: u32 = 5;

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
        /// 0: no reduction; each one halves the context, and leaves room for one.
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
    /// Reduces the options by a number of steps; `context` is the context if none is set. A context is not reduced below
    /// [`CONTEXT_MIN`].
    pub(super) fn smaller(self, steps: u32, context: u32) -> Self {
        if steps == 0 {
            return self;
        }
        let context = self.context.unwrap_or(context);
        let context = (context >> steps.min(SMALLER_MAX)).max(CONTEXT_MIN.min(context));
        Self { sequences: Some(1), context: Some(context), ..self }
    }
}

impl NodeHandle {
    /// Whether this node could serve a model of that name: from its own cache, or because it served it before a
    /// restart. Paths are not accepted: a request must not reveal which files exist.
    pub(crate) fn has(&self, name: &str) -> bool {
        crate::pull::is_cached(name, &self.inner.models_dir) || self.inner.remembered.get(name).is_some()
    }

    /// Serves a model that a request names, with the options of its last run as far as this node has them. If memory
    /// stays short for `PLACE_MAX`, allows fewer and shorter requests rather than none. Concurrent requests for the
    /// model share one job.
    ///
    /// # Errors
    /// Those of [`NodeHandle::deploy`]; or the user stopped the model here.
    pub(crate) async fn serve_on_demand(&self, name: &str) -> Result<ModelHandle, NodeError> {
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

    #[test]
    fn reduced_options_halve_the_context() {
        let usual = ModelOptions { int8: Some(false), context: None, sequences: None, draft: None };
        assert_eq!(usual.clone().smaller(0, 8192), usual);
        let sizes = |steps| {
            let less = usual.clone().smaller(steps, 8192);
            assert_eq!(less.int8, Some(false), "other arithmetic would choose other tokens");
            (less.sequences, less.context)
        };
        assert_eq!(sizes(1), (Some(1), Some(4096)));
        assert_eq!(sizes(SMALLER_MAX), (Some(1), Some(256)));
    }

    #[test]
    fn reductions_keep_a_useful_context() {
        let sizes = |context| {
            let small = ModelOptions { context: Some(context), ..ModelOptions::default() };
            (1..=SMALLER_MAX + 3).map(|steps| small.clone().smaller(steps, 2048).context.unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(sizes(512)[..4], [256, CONTEXT_MIN, CONTEXT_MIN, CONTEXT_MIN]);
        assert!(sizes(3).iter().all(|context| *context == 3), "a context that was short before stays");
    }

    #[test]
    fn a_set_context_is_reduced_instead_of_the_default() {
        let usual = ModelOptions { context: Some(1000), sequences: Some(8), int8: None, draft: None };
        let less = usual.smaller(2, 2048);
        assert_eq!((less.context, less.sequences), (Some(250), Some(1)));
    }

    #[test]
    fn only_the_last_attempt_on_demand_explains_a_failure() {
        let on_demand = |smaller| DeployMode::OnDemand { smaller };
        assert!((0..SMALLER_MAX).all(|smaller| !on_demand(smaller).is_last()));
        assert!(on_demand(SMALLER_MAX).is_last() && DeployMode::AfterRestart.is_last());
        let requested = |temporary| DeployMode::Requested { options: ModelOptions::default(), temporary };
        assert!(requested(true).is_last() && requested(false).is_last());
    }

    #[test]
    fn only_a_run_of_a_command_is_temporary() {
        let requested = |temporary| DeployMode::Requested { options: ModelOptions::default(), temporary };
        assert!(requested(true).is_temporary() && !requested(false).is_temporary());
        assert!(!DeployMode::OnDemand { smaller: 0 }.is_temporary() && !DeployMode::AfterRestart.is_temporary());
    }
}
