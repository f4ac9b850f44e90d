//! Models that are asked for here but not served here: a node that has the file serves it, as the mesh did before. So any
//! member takes over the requests of a head that is gone.
use super::{ModelHandle, ModelOptions, ModelRef, NodeError, NodeHandle};
use node_core::id::ContentId;
use node_core::limits::JOBS_MAX;
use node_core::work::serve::StageOrder;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// How long a model that cannot be placed is tried: what a dead head placed takes up memory until the mesh knows of it.
const PLACE_MAX: Duration = Duration::from_secs(5);
/// How often: adverts of free memory are told once a second.
const AGAIN: Duration = Duration::from_millis(500);

/// How often less is asked for where there is no room: to one request at once with an eighth of the context.
const SMALLER_MAX: u32 = 4;

/// How a model is to be served.
pub(super) enum Wanted {
    /// As a user said.
    As {
        options: ModelOptions,
        /// Unloaded when nothing uses it any more.
        temporary: bool,
    },
    /// As it was run last, or with less.
    OnDemand {
        /// 0 is all, 1 is one request at once, each one more halves the context.
        smaller: u32,
    },
    /// As it was served before the node was started again.
    Again,
}

impl Wanted {
    pub(super) fn is_temporary(&self) -> bool {
        matches!(self, Self::As { temporary: true, .. })
    }

    /// Nothing less is tried after this: the user is to know why it failed.
    pub(super) fn is_last(&self) -> bool {
        match self {
            Self::As { .. } | Self::Again => true,
            Self::OnDemand { smaller } => *smaller >= SMALLER_MAX,
        }
    }
}

impl ModelOptions {
    /// Less by a number of steps; `context` is what they would have.
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

/// How models were run that this node had a part in, the latest last, and which of them its user stopped.
#[derive(Default)]
pub(crate) struct Recalled(Mutex<VecDeque<(ContentId, Memory)>>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Memory {
    options: ModelOptions,
    stopped: bool,
}

impl Recalled {
    /// A stage of a model is to be held here.
    pub(crate) fn note(&self, stage: &StageOrder) {
        let options =
            ModelOptions { int8: Some(stage.int8), context: Some(stage.context), sequences: Some(stage.sequences) };
        self.put(stage.content, Memory { options, stopped: false });
    }

    /// The user wants it no more.
    pub(super) fn stop(&self, content: ContentId) {
        let options = self.get(content).options;
        self.put(content, Memory { options, stopped: true });
    }

    /// How it was run last, if it was.
    ///
    /// # Errors
    /// The user stopped it.
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
        // As many as this node can have a part in at once.
        if known.len() > JOBS_MAX {
            known.pop_front();
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(ContentId, Memory)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeHandle {
    /// Whether a model of that name could be served here: from this node's own cache, or as before the node was started again.
    /// Paths are not looked at: a request is not to find out which files there are.
    pub fn has(&self, name: &str) -> bool {
        crate::pull::is_cached(name, &self.inner.models_dir) || self.inner.remembered.get(name).is_some()
    }

    /// Serves a model that a request asks for, with the options it was last run with as far as this node knows. Where the mesh
    /// has not the memory for that, not even after a moment, with room for fewer and shorter requests: better than none.
    /// Several requests that ask for it at once get the same job.
    ///
    /// # Errors
    /// As for [`NodeHandle::deploy`]; or the user stopped it here.
    pub async fn serve_on_demand(&self, name: &str) -> Result<ModelHandle, NodeError> {
        let (node, model, end) = (self.clone(), ModelRef(name.to_owned()), Instant::now() + PLACE_MAX);
        let deploying = tokio::spawn(async move {
            let mut smaller = 0;
            loop {
                // It may be served by now: by the command, or again after a restart.
                if let Some(served) = node.inner.serving.by_name(&model.0).filter(|served| served.name == model.0) {
                    return Ok(served);
                }
                match node.deploy_in_turn(model.clone(), Wanted::OnDemand { smaller }).await {
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
    fn where_there_is_no_room_less_is_asked_for() {
        let usual = ModelOptions { int8: Some(false), context: None, sequences: None };
        assert_eq!(usual.clone().smaller(0, 2048), usual);
        let sizes = |steps| {
            let less = usual.clone().smaller(steps, 2048);
            assert_eq!(less.int8, Some(false), "other arithmetic would be other tokens");
            (less.sequences, less.context)
        };
        assert_eq!(sizes(1), (Some(1), Some(2048)));
        assert_eq!(sizes(SMALLER_MAX), (Some(1), Some(256)));
    }

    #[test]
    fn a_model_is_recalled_as_it_was_run_last_until_it_is_stopped() {
        let (recalled, tiny) = (Recalled::default(), ContentId([1; 32]));
        assert_eq!(recalled.options(tiny).unwrap(), ModelOptions::default());
        recalled.note(&stage(1, 64));
        recalled.note(&stage(1, 128));
        let last = ModelOptions { int8: Some(false), context: Some(128), sequences: Some(3) };
        assert_eq!(recalled.options(tiny).unwrap(), last);
        recalled.stop(tiny);
        assert!(matches!(recalled.options(tiny), Err(NodeError::NotFound(_))));
        recalled.note(&stage(1, 64));
        assert_eq!(recalled.options(tiny).unwrap().context, Some(64));
        (2..2 + JOBS_MAX as u8).for_each(|other| recalled.note(&stage(other, 64)));
        assert_eq!(recalled.options(tiny).unwrap(), ModelOptions::default(), "as many as fit");
    }
}
