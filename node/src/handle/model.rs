//! Models as users name them and as nodes serve them: their options, their vocabulary, and where they run.
use super::usage::Usage;
use crate::clock::unix_seconds;
use crate::rows::Boundary;
use kernels_models::constraint::{ConstraintError, GrammarVocabulary};
use kernels_models::tokenizer::TokenizerError;
use kernels_models::weights::ModelFile;
use node_core::id::{ContentId, JobId, NodeId};
use node_core::work::serve::ModelSpec;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// A model given by path, or by the name under which `meshnode pull` cached it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ModelRef(pub String);

/// How to run a model. An unset option keeps the value of the running job, or else takes its default.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub(crate) struct ModelOptions {
    /// 8-bit activations (fast, the default) or f32 (strict).
    pub int8: Option<bool>,
    /// Tokens of context per request; at most the model's trained context, by default at most 2048.
    pub context: Option<u32>,
    /// Concurrent requests; 4 by default.
    pub sequences: Option<u32>,
    /// Most pipelines, each on nodes of its own; 1 by default.
    pub replicas: Option<u32>,
    /// A smaller model with the same vocabulary that makes drafts, as a [`ModelRef`]; empty for none, the default.
    pub draft: Option<String>,
    /// Encoding of the rows between stages; lossless by default.
    pub boundary: Option<Boundary>,
}

impl ModelOptions {
    pub(super) fn is_int8(&self) -> bool {
        self.int8.unwrap_or(true)
    }

    /// Fills unset options from `other`.
    pub(super) fn or(&self, other: &Self) -> Self {
        Self {
            int8: self.int8.or(other.int8),
            context: self.context.or(other.context),
            sequences: self.sequences.or(other.sequences),
            replicas: self.replicas.or(other.replicas),
            draft: self.draft.clone().or_else(|| other.draft.clone()),
            boundary: self.boundary.or(other.boundary),
        }
    }
}

/// A model that is being served.
#[derive(Clone)]
pub(crate) struct ModelHandle {
    /// Name for the API.
    pub name: String,
    /// The job behind it.
    pub job: JobId,
    /// Tokenizer and chat template.
    pub words: TextCodec,
    /// Tokens of context per request.
    pub context: u32,
    /// Unix seconds when it became ready.
    pub created: u64,
    /// The draft model that was asked for. Unknown if this node inherited the job.
    pub(super) draft: Option<String>,
    pub(crate) spec: Arc<ModelSpec>,
    pub(crate) uses: Arc<Usage>,
}

impl ModelHandle {
    /// A served model under the name in its spec.
    pub(super) fn new(job: JobId, words: TextCodec, spec: ModelSpec, temporary: bool) -> Self {
        ModelHandle {
            name: spec.name.clone(),
            job,
            words,
            context: spec.work.context,
            created: unix_seconds(),
            draft: None,
            spec: Arc::new(spec),
            uses: Usage::new(temporary),
        }
    }

    /// The options with which it is served.
    pub(super) fn options(&self) -> ModelOptions {
        ModelOptions {
            int8: Some(self.spec.int8),
            context: Some(self.spec.work.context),
            sequences: Some(self.spec.work.sequences),
            replicas: Some(self.spec.replicas),
            draft: self.draft.clone(),
            boundary: Some(Boundary::of(&self.spec)),
        }
    }
}

/// The tokenizer and chat template of a model.
#[derive(Clone)]
pub(crate) struct TextCodec {
    /// Its tokenizer.
    pub tokenizer: Arc<kernels_models::tokenizer::Tokenizer>,
    /// The chat template, if the model has one.
    pub template: Option<Arc<kernels_models::chat_template::ChatTemplate>>,
    /// Elements of an embedding, if the model is made for embeddings.
    pub embedding: Option<u32>,
    /// The vocabulary prepared for grammars, once a request has one.
    pub grammars: Arc<OnceLock<Result<GrammarVocabulary, ConstraintError>>>,
}

impl TextCodec {
    /// Of a model file, without a vocabulary for grammars.
    ///
    /// # Errors
    /// The file has no tokenizer, or an unsupported one.
    pub(crate) fn of(file: &ModelFile) -> Result<Self, TokenizerError> {
        let config = file.config();
        Ok(Self {
            tokenizer: Arc::new(file.tokenizer()?),
            template: file.chat_template().ok().map(Arc::new),
            embedding: config.pooled.then_some(config.width as u32),
            grammars: Arc::default(),
        })
    }
}

/// A served model that another node coordinates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteModel {
    pub(crate) node: NodeId,
    pub(crate) job: JobId,
}

/// Vocabularies of models that other nodes serve: reading one takes a good part of a second.
pub(crate) type Vocabularies = Mutex<BTreeMap<ContentId, TextCodec>>;
