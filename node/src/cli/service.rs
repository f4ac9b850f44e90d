//! The node that a command uses: the one that runs already, or one that the command starts in its own process.
use super::compute::ComputeArgs;
use super::failure::Failure;
use super::global::{Global, is_local};
use super::interrupt::{GLANCE, Interrupts, remove_at_end};
use super::model::{ModelArgs, fetch};
use super::print::remark;
use crate::api::Api;
use crate::api_key::{Announcement, ApiKey};
use crate::client::{Client, ClientError, Key};
use crate::config::UpOptions;
use crate::folders::Folders;
use crate::metrics::Metrics;
use serde::de::DeserializeOwned;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

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
    _announced: Option<Announcement>,
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
    pub(super) fn ask<T: DeserializeOwned + Send + 'static>(
        interrupts: &Interrupts,
        global: &Global,
        args: &ModelArgs,
        own_address: Option<SocketAddr>,
        (path, temporary): (&'static str, bool),
    ) -> Result<(Self, T), Failure> {
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
                Err(TryRecvError::Closed) => return Err(Failure::failed(BROKEN)),
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
        (options.memory, options.memory_of) = compute.limits(file.memory.as_ref());
        options.threads = compute.threads.or(file.threads);
        let runtime = runtime()?;
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
        let announced = public.then(|| Announcement::new(address, data_dir.path())).flatten();
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

/// The async runtime of a node in this process.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::failed(format!("cannot start threads: {e}")))
}

/// The node's thread has panicked; its message is in the log.
pub(super) const BROKEN: &str = "internal error: the node stopped. This is a bug: report it with the log above";
