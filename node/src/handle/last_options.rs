//! The options with which models last ran on this node, so that it serves them the same way on demand.
use super::model::ModelOptions;
use crate::error::NodeError;
use crate::rows::Boundary;
use node_core::id::ContentId;
use node_core::limits::JOBS_MAX;
use node_core::work::serve::StageOrder;
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;

/// The largest recent options of the models that this node took part in, latest model last, and which of them its user stopped.
#[derive(Default)]
pub(crate) struct LastOptions(Mutex<VecDeque<(ContentId, Memory)>>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Memory {
    options: ModelOptions,
    stopped: bool,
}

impl LastOptions {
    /// Records the options of a stage that this node is ordered to hold. A stage smaller than the last one may have
    /// been reduced because memory was short, so the larger context and number of requests are kept: reductions must
    /// not add up.
    pub(crate) fn note(&self, stage: &StageOrder) {
        let last = self.get(stage.content).options;
        let ordered = Boundary::from(stage.row.codec);
        // What a plan chose is no choice of the user's, and neither is the default.
        let is_default = last.boundary.is_none() && ordered == Boundary::Lossless;
        let kept = is_default || last.boundary == Some(Boundary::Auto);
        let boundary = if kept { last.boundary } else { Some(ordered) };
        let options = ModelOptions {
            int8: Some(stage.int8),
            context: last.context.max(Some(stage.context)),
            sequences: last.sequences.max(Some(stage.sequences)),
            replicas: last.replicas,
            draft: last.draft,
            boundary,
        };
        self.put(stage.content, Memory { options, stopped: false });
    }

    /// Records the options with which a user of this node serves a model.
    pub(super) fn set(&self, content: ContentId, options: ModelOptions) {
        self.put(content, Memory { options, stopped: false });
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
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(content: u8, context: u32) -> StageOrder {
        let row = node_core::work::serve::RowFormat::lossless(8);
        let (content, layers) = (ContentId([content; 32]), vec![0..1, 1..2]);
        StageOrder { content, layers, sequences: 3, context, width: 8, row, int8: false }
    }

    #[test]
    fn the_last_options_are_kept_until_the_model_is_stopped() {
        let (last_options, tiny) = (LastOptions::default(), ContentId([1; 32]));
        assert_eq!(last_options.options(tiny).unwrap(), ModelOptions::default());
        last_options.note(&stage(1, 64));
        last_options.note(&stage(1, 128));
        let last =
            ModelOptions { int8: Some(false), context: Some(128), sequences: Some(3), ..ModelOptions::default() };
        assert_eq!(last_options.options(tiny).unwrap(), last);
        last_options.stop(tiny);
        assert!(matches!(last_options.options(tiny), Err(NodeError::NotFound(_))));
        last_options.note(&stage(1, 64));
        assert_eq!(last_options.options(tiny).unwrap().context, Some(128), "a smaller stage may be a reduced one");
        let shorter = ModelOptions { context: Some(32), ..last };
        last_options.set(tiny, shorter.clone());
        assert_eq!(last_options.options(tiny).unwrap(), shorter, "what a user asks for counts");
        (2..2 + JOBS_MAX as u8).for_each(|other| last_options.note(&stage(other, 64)));
        assert_eq!(last_options.options(tiny).unwrap(), ModelOptions::default(), "only the latest JOBS_MAX are kept");
    }

    #[test]
    fn a_stopped_model_remembers_its_options_for_the_next_start() {
        let (last_options, tiny) = (LastOptions::default(), ContentId([1; 32]));
        last_options.note(&stage(1, 128));
        last_options.stop(tiny);
        assert_eq!(last_options.get(tiny).options.context, Some(128));
        assert!(last_options.options(ContentId([2; 32])).is_ok(), "other models are not stopped");
    }

    #[test]
    fn a_model_that_never_ran_can_be_stopped() {
        let (last_options, tiny) = (LastOptions::default(), ContentId([1; 32]));
        last_options.stop(tiny);
        let error = last_options.options(tiny).unwrap_err().to_string();
        assert!(error.contains("meshnode serve"), "{error}");
    }

    #[test]
    fn the_model_that_ran_longest_ago_is_forgotten_first() {
        let last_options = LastOptions::default();
        (1..=JOBS_MAX as u8).for_each(|model| last_options.note(&stage(model, 64)));
        last_options.note(&stage(1, 32));
        last_options.note(&stage(JOBS_MAX as u8 + 1, 64));
        let known = |model| last_options.options(ContentId([model; 32])).unwrap() != ModelOptions::default();
        assert!(known(1), "it ran again meanwhile");
        assert!(!known(2) && known(3));
    }
}
