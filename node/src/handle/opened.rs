//! Opens a model for serving: its file, the costs that the planner needs, and the name under which it is served.
use super::NodeHandle;
use super::model::{ModelHandle, ModelOptions, ModelRef, TextCodec};
use crate::error::NodeError;
use crate::rows::{self, Boundary, Gate};
use crate::transfer::{Library, LocalModel};
use kernels_models::recipe::Recipe;
use kernels_models::stage::Activations;
use kernels_models::tokenizer::TokenizerError;
use kernels_models::weights::{ModelFile, parts};
use node_core::id::JobId;
use node_core::input::Input;
use node_core::limits::{REPLICAS_MAX, RING_BYTES_MAX, SEQUENCES_MAX};
use node_core::work::serve::ModelSpec;
use std::path::{Path, PathBuf};

impl NodeHandle {
    /// Opens a model file off the async threads: hashing a large file for the first time takes seconds.
    pub(super) async fn open(&self, model: &ModelRef) -> Result<Opened, NodeError> {
        let served = || {
            let served = self.inner.serving.all().into_iter().find(|served| served.name == model.0)?;
            self.inner.library.path_of(served.spec.content)
        };
        let path = crate::pull::locate(&model.0, &self.inner.models_dir).or_else(served).ok_or_else(|| {
            if Path::new(&model.0).is_dir() {
                return NodeError::NotFound(crate::pull::PullError::Folder(model.0.clone()).to_string());
            }
            NodeError::NotFound(format!(
                "no model `{}` here: give the path of a .gguf or .mesh file or of a folder with safetensors, or fetch it with `meshnode pull {}`",
                model.0, model.0
            ))
        })?;
        self.open_file(path, model_name(&model.0)).await
    }

    pub(super) async fn open_file(&self, path: PathBuf, name: String) -> Result<Opened, NodeError> {
        let library = self.inner.library.clone();
        let opened = tokio::task::spawn_blocking(move || open_model(&library, &path, name))
            .await
            .map_err(|e| NodeError::Failed(format!("opening the model was interrupted: {e}")))??;
        self.inner.driver.input(Input::Holdings(self.inner.library.contents()));
        Ok(opened)
    }
}

/// An open model file, and its name.
pub(super) struct Opened {
    pub(super) name: String,
    /// Absolute.
    pub(super) path: PathBuf,
    pub(super) held: LocalModel,
    words: TextCodec,
}

impl Opened {
    /// A model to serve, without a job yet.
    pub(super) fn handle(&self, spec: ModelSpec, temporary: bool) -> ModelHandle {
        ModelHandle { name: self.name.clone(), ..ModelHandle::new(JobId(0), self.words.clone(), spec, temporary) }
    }

    /// The default context for `free` bytes of memory on all nodes: the model's own, or a power of two. At least
    /// [`CONTEXT_DEFAULT`], if the model has that, and at most [`CONTEXT_USUAL_MAX`].
    pub(super) fn context_for(&self, free: u64) -> u32 {
        let trained = u32::try_from(self.held.file.config().context).unwrap_or(u32::MAX).min(CONTEXT_USUAL_MAX);
        let costs = self.held.file.costs(Activations::Int8);
        let weights: u64 = costs.layers.iter().map(|layer| layer.weight_bytes).sum::<u64>() + costs.head_bytes;
        let each: u64 = costs.layers.iter().map(|layer| layer.kv_bytes_per_token).sum();
        context_within(trained, free.saturating_sub(2 * weights) / CONTEXT_SHARE / each.max(1))
    }

    /// What is served. `models`: the folder of cached models, with the measurements that `--boundary auto` needs.
    ///
    /// # Errors
    /// There is no usable measurement.
    pub(super) fn spec(&self, options: &ModelOptions, models: &Path) -> Result<ModelSpec, NodeError> {
        let boundary = options.boundary.unwrap_or(Boundary::Lossless);
        let codecs = boundary.codecs(|| Gate::read(models, self.held.content, &self.name).map(|gate| gate.codecs()));
        let mut spec = ModelSpec {
            content: self.held.content,
            name: self.name.clone(),
            work: work(&self.held.file, options),
            width: self.held.file.config().width as u32,
            boundary: Vec::new(),
            int8: options.is_int8(),
            eos: self.words.tokenizer.eos().to_vec(),
            replicas: options.replicas.unwrap_or(1).clamp(1, REPLICAS_MAX),
            draft: None,
        };
        rows::offer(&mut spec, &codecs.map_err(|e| NodeError::Invalid(e.to_string()))?);
        Ok(spec)
    }

    /// Checks that another model can make drafts for this one.
    ///
    /// # Errors
    /// It is the same model, or has another vocabulary.
    pub(super) fn check_draft(&self, draft: &Opened) -> Result<(), NodeError> {
        let (name, small) = (&self.name, &draft.name);
        let wrong = |what: String| {
            let next = "choose a smaller model of the same family";
            Err(NodeError::Invalid(format!("{small} cannot make drafts for {name}: {what}; {next}")))
        };
        if draft.held.content == self.held.content {
            return wrong(format!("expected a smaller model, found the weights of {name}"));
        }
        if small == name {
            return Err(NodeError::Invalid(format!(
                "expected a draft model of another name, found `{small}` for both: rename one of the two files"
            )));
        }
        let (words, theirs) = (&self.words.tokenizer, &draft.words.tokenizer);
        if words.len() != theirs.len() {
            let (expected, found) = (words.len(), theirs.len());
            return wrong(format!("expected a vocabulary of {expected} tokens, found {found} tokens"));
        }
        let mut ids = 0..u32::try_from(words.len()).unwrap_or(u32::MAX);
        match ids.find(|&id| words.token_bytes(id) != theirs.token_bytes(id)) {
            Some(id) => {
                let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
                let (expected, found) = (text(words.token_bytes(id)), text(theirs.token_bytes(id)));
                wrong(format!("expected the same vocabulary, found {found:?} instead of {expected:?} as token {id}"))
            }
            None => Ok(()),
        }
    }
}

fn open_model(library: &Library, path: &Path, name: String) -> Result<Opened, NodeError> {
    let invalid = |e: &dyn std::fmt::Display| NodeError::Invalid(format!("{}: {e}", path.display()));
    // The library may hold equal weights from another folder; take the vocabulary from the one that was named.
    let named = ModelFile::open(path).map_err(|e| invalid(&e))?;
    let names_itself = |e: &TokenizerError| matches!(e, TokenizerError::NoFile { .. });
    let no_words = |e| if names_itself(&e) { NodeError::Invalid(e.to_string()) } else { invalid(&e) };
    let words = TextCodec::of(&named).map_err(no_words)?;
    let held = library.add(path).map_err(|e| invalid(&e))?;
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    Ok(Opened { name, path, held, words })
}

/// The default context, if nothing is known of the mesh's memory: a long conversation. All requests share this room.
pub(super) const CONTEXT_DEFAULT: u32 = 8192;
/// Of the memory beside a model's weights and those of its standbys, the default context may use this fraction: after the
/// loss of some nodes the model still fits.
const CONTEXT_SHARE: u64 = 8;
/// The longest default context: plans assume that half of it is filled, and few requests fill half of more.
const CONTEXT_USUAL_MAX: u32 = 32_768;

/// The default context of a model that was trained with `trained` positions, where `room` fit.
fn context_within(trained: u32, room: u64) -> u32 {
    if u64::from(trained) <= room {
        return trained;
    }
    let power = 1u64 << room.max(1).ilog2();
    u32::try_from(power).unwrap_or(u32::MAX).max(CONTEXT_DEFAULT).min(trained)
}

/// The costs of a model for the planner.
pub(super) fn work(file: &ModelFile, options: &ModelOptions) -> partitioner::Work {
    let activations = if options.is_int8() { Activations::Int8 } else { Activations::F32 };
    let costs = file.costs(activations);
    let recipe = Recipe::of(file.config());
    let trained = u32::try_from(file.config().context).unwrap_or(u32::MAX);
    let context = options.context.unwrap_or(CONTEXT_DEFAULT).min(trained).max(1);
    let sequences = options.sequences.unwrap_or(CONTEXT_DEFAULT / context).clamp(1, SEQUENCES_MAX);
    let row_bytes = file.config().width as u64 * 4;
    // A stage retains rows to resend: all rows of all sequences, up to the bound.
    let ring_bytes = RING_BYTES_MAX.min(row_bytes * u64::from(context) * u64::from(sequences));
    partitioner::Work {
        layers: costs
            .layers
            .iter()
            .zip(&recipe.layers)
            .map(|(l, recipe)| partitioner::Layer {
                flops_per_token: l.flops_per_token,
                weight_bytes: l.weight_bytes,
                kv_bytes_per_token: l.kv_bytes_per_token,
                window: recipe.window.map(|window| u32::try_from(window.positions()).unwrap_or(u32::MAX)),
                experts: recipe.experts.map(|experts| partitioner::Experts {
                    bytes: l.expert_bytes,
                    count: u32::try_from(experts.count).unwrap_or(u32::MAX),
                    used: u32::try_from(experts.used).unwrap_or(u32::MAX),
                }),
            })
            .collect(),
        embed_bytes: costs.embed_bytes,
        head_bytes: costs.head_bytes,
        tied: costs.tied,
        head_flops: costs.head_flops,
        activation_bytes: row_bytes,
        coarser_bytes: Vec::new(),
        context,
        sequences,
        scratch_bytes: crate::device::SCRATCH_BYTES + ring_bytes,
    }
}

/// The name under which a model is served: `dir/SmolLM2-135M-Instruct.Q4_1.gguf` becomes `SmolLM2-135M-Instruct.Q4_1`,
/// `dir/X.mesh` and `dir/X-00001-of-00003.gguf` become `X`, a folder of weights its folder name, and a cached name stays as it is.
fn model_name(reference: &str) -> String {
    let path = Path::new(reference);
    let is_inside = [parts::FOLDER_WEIGHTS, parts::FOLDER_INDEX].iter().any(|name| path.ends_with(name));
    let folder = if is_inside { path.parent() } else { Some(path) };
    if let Some(folder) = folder.filter(|folder| parts::weights_in(folder).is_some())
        && let Some(name) = folder.file_name()
    {
        return name.to_string_lossy().into_owned();
    }
    match path.extension() {
        Some(extension) if extension == "gguf" || extension == "mesh" => parts::split_stem(path)
            .map_or_else(|| path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), str::to_owned),
        // Of the hub, the repository or a directory of it.
        _ => match reference.strip_prefix("hf:") {
            Some(folder) => folder.rsplit('/').next().unwrap_or(folder).to_owned(),
            None => reference.to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_models() {
        for (reference, name) in [
            ("dir/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
            ("/x/Big-00002-of-00003.gguf", "Big"),
            ("dir/Big.Q4.mesh", "Big.Q4"),
            ("hf:owner/repo/dir/Big-00001-of-00003.gguf", "Big"),
            ("hf:Qwen/Qwen3-4B", "Qwen3-4B"),
            ("smollm2-135m", "smollm2-135m"),
        ] {
            assert_eq!(model_name(reference), name);
        }
    }

    #[test]
    fn the_default_context_follows_the_memory() {
        assert_eq!(context_within(2048, 0), 2048, "a short context is always whole");
        assert_eq!(context_within(32_768, 0), CONTEXT_DEFAULT);
        assert_eq!(context_within(32_768, 20_000), 16_384);
        assert_eq!(context_within(32_768, 40_000), 32_768);
        assert_eq!(context_within(10_000, 50_000), 10_000, "the model's own need not be a power of two");
    }
}
