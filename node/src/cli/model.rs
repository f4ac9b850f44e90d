//! `meshnode pull`, and the options that name a model in other commands: where its file is, how it is served.
use super::compute::ComputeArgs;
use super::failure::Failure;
use super::global::{Global, answer};
use super::progress::{Bar, Spinner};
use crate::client::{Client, ClientError};
use crate::pull::{self, Sources};
use crate::rows::Boundary;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode pull smollm2-135m
  meshnode pull hf:QuantFactory/SmolLM2-360M-Instruct-GGUF/SmolLM2-360M-Instruct.Q4_1.gguf
  meshnode pull hf:Qwen/Qwen3-4B

Of a split .gguf file name any part: all are fetched, several at once. Of a repository with safetensors, the model's folder is fetched.
An interrupted download resumes where it stopped. Set HF_TOKEN for private files, and HF_ENDPOINT for a mirror.")]
pub(super) struct PullArgs {
    /// smollm2-135m, hf:OWNER/REPO/FILE, hf:OWNER/REPO, or the path of a .gguf or .mesh file or of a folder with safetensors
    model: String,
}

pub(super) fn pull(global: &Global, args: &PullArgs) -> Result<(), Failure> {
    let path = fetch(global, &args.model)?;
    let bytes = pull::bytes(&path);
    answer(global, &json!({"model": args.model, "path": path, "bytes": bytes}), |_| path.display().to_string());
    Ok(())
}

/// The file of a model, downloaded if necessary.
pub(super) fn fetch(global: &Global, model: &str) -> Result<PathBuf, Failure> {
    let models_dir = global.models_dir();
    if let Some(path) = pull::locate(model, &models_dir) {
        return Ok(path);
    }
    Ok(pull::fetch(model, &models_dir, &Sources::from_env(), &Bar::new("fetching"))?)
}

/// A model and its options.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct ModelArgs {
    /// smollm2-135m, hf:OWNER/REPO/FILE, hf:OWNER/REPO, or the path of a .gguf or .mesh file or of a folder with safetensors
    pub(super) model: String,
    /// Type of the activations in matrix products on CPUs: int8 is faster, f32 more accurate [default: as served, else
    /// int8]
    #[arg(long, value_enum, value_name = "KIND")]
    activations: Option<Activations>,
    /// Encoding of activations between nodes: all but lossless change tokens; auto is what pays, of those that `meshnode gate`
    /// allows [default: as served, else lossless]
    #[arg(long, value_enum, value_name = "CODEC")]
    boundary: Option<Boundary>,
    /// Tokens of context per request [default: as served, else as long as the model and the memory of the mesh allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Whole contexts that the cache has room for; up to 64 requests share it [default: as served, else 8192 tokens in total]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    sequences: Option<u32>,
    /// Most pipelines that serve the model, each on nodes of its own: further ones are placed where there is room, and each
    /// request goes to the one with the least to do [default: as served, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    replicas: Option<u32>,
    /// A smaller model with the same vocabulary, served too, whose guesses the model verifies: the same answers, faster; `none`
    /// for no such model [default: as served, else none]
    #[arg(long, value_name = "MODEL")]
    draft: Option<String>,
    #[command(flatten)]
    pub(super) compute: ComputeArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Activations {
    Int8,
    F32,
}

impl ModelArgs {
    /// The options for the node. A missing option leaves the setting of a served model unchanged. `draft`: the draft model as
    /// the node finds it.
    fn options(&self, draft: Option<&str>) -> Value {
        json!({
            "int8": self.activations.map(|kind| kind == Activations::Int8), "context": self.context,
            "sequences": self.sequences, "replicas": self.replicas, "draft": draft,
            "boundary": self.boundary,
        })
    }

    /// POSTs the model to `path` (`plan` or `deploy`). The node looks up the name among its served models and in its
    /// own cache. If it finds none, this command downloads the model, and sends the path of the file if the caches
    /// differ.
    pub(super) fn post<T: DeserializeOwned>(
        &self,
        global: &Global,
        client: &Client,
        path: &str,
        temporary: bool,
    ) -> Result<T, Failure> {
        let by_path = is_path(&self.model);
        // The node may run in another folder.
        let draft = self.draft.as_deref().map(|draft| match draft {
            "none" => String::new(),
            path if is_path(path) => absolute(path),
            name => name.to_owned(),
        });
        let body = |model: &str, draft: Option<&str>| json!({"model": model, "options": self.options(draft), "temporary": temporary});
        let post = |model: &str| {
            let _spinner = Spinner::new(format!("{} {}", path.rsplit('/').next().unwrap_or(path), self.model));
            match client.post_as::<T>(path, &body(model, draft.as_deref())) {
                Err(ClientError::Refused { status: 404, .. }) => Ok(None),
                other => other.map(Some),
            }
        };
        if !by_path && let Some(answer) = post(&self.model)? {
            return Ok(answer);
        }
        let file = absolute(&fetch(global, &self.model)?.to_string_lossy());
        let draft_file = match draft.as_deref() {
            None | Some("") => draft.clone(),
            Some(draft) => Some(absolute(&fetch(global, draft)?.to_string_lossy())),
        };
        if !by_path && let Some(answer) = post(&self.model)? {
            return Ok(answer);
        }
        Ok(client.post_as(path, &body(&file, draft_file.as_deref()))?)
    }
}

/// Whether a model is given by its path, not by a name.
fn is_path(model: &str) -> bool {
    model.contains('/') && !model.starts_with("hf:") || model.ends_with(".gguf") || model.ends_with(".mesh")
}

fn absolute(path: &str) -> String {
    std::path::absolute(path).map_or_else(|_| path.to_owned(), |absolute| absolute.to_string_lossy().into_owned())
}

/// The display name of a model: its path without directories.
pub(super) fn display_name(model: &str) -> String {
    Path::new(model).file_name().map_or_else(|| model.to_owned(), |n| n.to_string_lossy().into_owned())
}
