//! Shared by `pull`, `plan`, `run` and `serve`: naming a model, downloading it, and finding or starting a node.
use super::interrupt::{GLANCE, Interrupts, remove_at_end};
use super::progress::{Bar, Spinner};
use super::{Failure, Global, answer, remark};
use crate::api::Api;
use crate::api_key::{Announced, ApiKey};
use crate::client::{Client, ClientError, Key};
use crate::config::{Size, UpOptions};
use crate::folders::Folders;
use crate::pull::{self, Sources};
use crate::telemetry::Metrics;
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode pull smollm2-135m
  meshnode pull hf:QuantFactory/SmolLM2-360M-Instruct-GGUF/SmolLM2-360M-Instruct.Q4_1.gguf

An interrupted download resumes where it stopped. Set HF_TOKEN for private files, and HF_ENDPOINT for a mirror.")]
pub(super) struct PullArgs {
    /// smollm2-135m, hf:OWNER/REPO/FILE, or the path of a .gguf file or of a folder that contains model.safetensors
    model: String,
}

pub(super) fn pull(global: &Global, args: &PullArgs) -> Result<(), Failure> {
    let path = fetch(global, &args.model)?;
    let bytes = std::fs::metadata(&path).map_or(0, |m| m.len());
    answer(global, &json!({"model": args.model, "path": path, "bytes": bytes}), |_| path.display().to_string());
    Ok(())
}

/// The file of a model, downloaded if necessary.
pub(super) fn fetch(global: &Global, model: &str) -> Result<PathBuf, Failure> {
    let models_dir = global.models_dir();
    if let Some(path) = pull::locate(model, &models_dir) {
        return Ok(path);
    }
    Ok(pull::fetch(model, &models_dir, &Sources::from_env(), &Bar::new())?)
}

/// A model and its options.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct ModelArgs {
    /// smollm2-135m, hf:OWNER/REPO/FILE, or the path of a .gguf file or of a folder that contains model.safetensors
    pub(super) model: String,
    /// Type of the activations in matrix products on CPUs: int8 is faster, f32 more accurate [default: as served, else
    /// int8]
    #[arg(long, value_enum, value_name = "KIND")]
    activations: Option<Activations>,
    /// Encoding of activations between nodes
    #[arg(long, value_enum, value_name = "CODEC", default_value = "lossless")]
    boundary: Boundary,
    /// Tokens of context per request [default: as served, else the model's own, at most 2048]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Number of concurrent requests [default: as served, else 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    sequences: Option<u32>,
    #[command(flatten)]
    pub(super) compute: ComputeArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Activations {
    Int8,
    F32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Boundary {
    Lossless,
}

/// Resources of a node. `run`, `serve` and `plan` use them only if they start a node themselves.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct ComputeArgs {
    /// auto, cpu, cuda[:i] or vulkan[:i] [default: auto]
    #[arg(long, value_name = "DEVICE", env = "MESHNODE_DEVICE", value_parser = device)]
    pub(super) device: Option<String>,
    /// Memory limit for weights, caches and scratch, as in 200MiB or 4G [default: three quarters of the machine's free
    /// memory, or all but 1 GiB of a GPU's]
    #[arg(long, value_name = "SIZE", env = "MESHNODE_MEMORY")]
    pub(super) memory: Option<Size>,
    /// Compute threads [default: one per core]
    #[arg(long, value_name = "N", env = "MESHNODE_THREADS", value_parser = threads)]
    pub(super) threads: Option<usize>,
}

impl ComputeArgs {
    /// The flags that were given for a node to start.
    fn given(&self) -> impl Iterator<Item = &'static str> {
        let given = [
            ("--device", "MESHNODE_DEVICE", self.device.is_some()),
            ("--memory", "MESHNODE_MEMORY", self.memory.is_some()),
            ("--threads", "MESHNODE_THREADS", self.threads.is_some()),
        ];
        // Environment variables are meant for nodes, not for this command.
        let asked = |(_, variable, given): &(&str, &str, bool)| *given && std::env::var_os(variable).is_none();
        given.into_iter().filter(asked).map(|(name, _, _)| name)
    }
}

/// Checks the syntax; whether the device exists is checked at the start of the node.
pub(super) fn device(text: &str) -> Result<String, String> {
    let (kind, index) = text.split_once(':').map_or((text, None), |(kind, index)| (kind, Some(index)));
    let indexed = matches!(kind, "cuda" | "vulkan") && index.is_none_or(|i| i.parse::<u8>().is_ok());
    if indexed || (matches!(kind, "auto" | "cpu") && index.is_none()) {
        Ok(text.to_owned())
    } else {
        Err("expected auto, cpu, cuda[:i] or vulkan[:i]".into())
    }
}

pub(super) fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=1024) => Ok(threads),
        Ok(_) | Err(_) => Err("expected 1 to 1024".into()),
    }
}

impl ModelArgs {
    /// The options for the node. A missing option leaves the setting of a served model unchanged.
    fn options(&self) -> Value {
        let Boundary::Lossless = self.boundary;
        json!({
            "int8": self.activations.map(|kind| kind == Activations::Int8), "context": self.context,
            "sequences": self.sequences,
        })
    }

    /// POSTs the model to `path` (`plan` or `deploy`). The node looks up the name among its served models and in its
    /// own cache. If it finds none, this command downloads the model, and sends the path of the file if the caches
    /// differ.
    pub(super) fn post(&self, global: &Global, client: &Client, path: &str, temporary: bool) -> Result<Value, Failure> {
        let by_path = self.model.contains('/') && !self.model.starts_with("hf:") || self.model.ends_with(".gguf");
        let body = |model: &str| json!({"model": model, "options": self.options(), "temporary": temporary});
        let post = |model: &str| {
            let _spinner = Spinner::new(format!("{} {}", path.rsplit('/').next().unwrap_or(path), self.model));
            match client.post(path, &body(model)) {
                Err(ClientError::Refused { status: 404, .. }) => Ok(None),
                other => other.map(Some),
            }
        };
        if !by_path && let Some(answer) = post(&self.model)? {
            return Ok(answer);
        }
        let file = fetch(global, &self.model)?;
        let file = std::path::absolute(&file).unwrap_or(file);
        if !by_path && let Some(answer) = post(&self.model)? {
            return Ok(answer);
        }
        Ok(client.post(path, &body(&file.to_string_lossy()))?)
    }
}

/// A node: one that is running, or one started in this process.
pub(super) struct Service {
    pub(super) client: Client,
    pub(super) address: String,
    own: Option<OwnNode>,
}

struct OwnNode {
    /// `None` once the node ends.
    runtime: Option<tokio::runtime::Runtime>,
    running: crate::node::Running,
    _announced: Option<Announced>,
    _data_dir: tempfile::TempDir,
}

impl Drop for OwnNode {
    fn drop(&mut self) {
        // Does not wait for hashing or loading.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Service {
    /// Finds or starts a node, and POSTs the model to `path`. `temporary`: for one run. A signal interrupts this at any
    /// time.
    pub(super) fn ask(
        interrupts: &Interrupts,
        global: &Global,
        args: &ModelArgs,
        own_address: Option<SocketAddr>,
        (path, temporary): (&'static str, bool),
    ) -> Result<(Self, Value), Failure> {
        let (global, args) = (global.clone(), args.clone());
        interrupts.during(move || {
            let service = Self::find(&global, &args.compute, own_address, Some(&args.model))?;
            let answer = args.post(&global, &service.client, path, temporary)?;
            Ok((service, answer))
        })
    }

    /// The node that listens on `--api`. If none does and the address is on this machine, starts a solo node in this
    /// process with its API on `own_address` (default: any free loopback port).
    pub(super) fn find(
        global: &Global,
        compute: &ComputeArgs,
        own_address: Option<SocketAddr>,
        model: Option<&str>,
    ) -> Result<Self, Failure> {
        let client = global.client()?;
        if client.listens() {
            for option in compute.given() {
                remark(format!(
                    "{option} is ignored: the node on {} is already running with its own setting",
                    client.base()
                ));
            }
            return Ok(Self { address: client.base().to_owned(), client, own: None });
        }
        let elsewhere = global.api().is_some_and(|api| !is_local(&api));
        if elsewhere {
            return Err(ClientError::Unreachable { base: client.base().to_owned() }.into());
        }
        if let Some(model) = model {
            fetch(global, model)?; // detect a mistyped name before starting a node
        }
        Self::start(global, compute, own_address)
    }

    /// Whether the node was started in this process.
    pub(super) fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// Waits for Ctrl-C, SIGTERM, or the end of the node if it was started in this process.
    pub(super) fn wait_for_end(mut self, interrupts: &Interrupts) -> Result<(), Failure> {
        use tokio::sync::oneshot::error::TryRecvError;
        while let Some(own) = self.own.as_mut().filter(|_| !interrupts.came()) {
            match own.running.stopped.try_recv() {
                Ok(()) => return Ok(()), // `meshnode leave`
                Err(TryRecvError::Closed) => return Err(Failure::failed(super::up::BROKEN)),
                Err(TryRecvError::Empty) => std::thread::sleep(GLANCE),
            }
        }
        Ok(())
    }

    fn start(global: &Global, compute: &ComputeArgs, address: Option<SocketAddr>) -> Result<Self, Failure> {
        remark(format!("no node listens on {}: starting one in this process, without peers", global.client()?.base()));
        let file = &global.file;
        let data_dir = tempfile::Builder::new()
            .prefix("meshnode-solo-")
            .tempdir()
            .map_err(|e| Failure::failed(format!("cannot create a temporary directory: {e}")))?;
        remove_at_end(data_dir.path());
        let mut options = UpOptions::solo(data_dir.path().to_owned(), global.models_dir());
        options.cache_bytes = global.cache_bytes();
        options.device = compute.device.clone().or_else(|| file.device.clone()).unwrap_or(options.device);
        options.memory = compute.memory.or(file.memory).map(|s| s.0);
        options.threads = compute.threads.or(file.threads);
        let runtime = super::up::runtime()?;
        let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
        // The key for all callers protects only a public address, not a private API on a free port.
        let public = address.is_some();
        let everyone = address.and(global.api_key());
        let api = runtime.block_on(Api::bind(address.unwrap_or(any), everyone))?;
        let key = ApiKey::load_or_create(data_dir.path()).map_err(Failure::failed)?;
        let folders = Folders::new(data_dir.path(), file.output_dirs.clone().unwrap_or_default());
        let api = api.administered_with(key.clone()).writing_below(folders);
        let address = api.address().map_err(Failure::failed)?;
        let (handle, running) = runtime.block_on(crate::node::start(options))?;
        runtime.spawn(api.serve(handle, Metrics::default(), std::future::pending()));
        // Lets other commands find a node on a public address.
        let announced = public.then(|| Announced::new(address, data_dir.path())).flatten();
        let client = Client::new(Some(&local(address).to_string()), Key::Given(key.as_str().to_owned()));
        let address = client.base().to_owned();
        let own = OwnNode { runtime: Some(runtime), running, _announced: announced, _data_dir: data_dir };
        Ok(Self { client, address, own: Some(own) })
    }
}

/// The address at which this machine reaches a node that listens on `address`.
fn local(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => std::net::Ipv6Addr::LOCALHOST.into(),
        ip @ (IpAddr::V4(_) | IpAddr::V6(_)) => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// Whether an `--api` value refers to this machine.
pub(super) fn is_local(api: &str) -> bool {
    let host = api.strip_prefix("http://").unwrap_or(api);
    match host.parse::<SocketAddr>() {
        Ok(address) => address.ip().is_loopback() || address.ip().is_unspecified(),
        Err(_) => host.split(':').next() == Some("localhost"),
    }
}

/// The address of `--api`, for a node to listen on.
pub(super) fn listen_address(global: &Global) -> Result<SocketAddr, Failure> {
    let Some(text) = &global.api else {
        return Ok(global.file.api.unwrap_or(crate::config::API_DEFAULT));
    };
    let bare = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/').replace("localhost:", "127.0.0.1:");
    bare.parse().map_err(|_| Failure::usage(format!("--api {text}: expected an address like 127.0.0.1:9470")))
}

/// The display name of a model: its path without directories.
pub(super) fn display_name(model: &str) -> String {
    Path::new(model).file_name().map_or_else(|| model.to_owned(), |n| n.to_string_lossy().into_owned())
}
