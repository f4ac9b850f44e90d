//! The options that every command accepts, and what follows from them: the configuration, the node's client, the form
//! of the answer.
use super::failure::Failure;
use super::print::{remark, say, say_json};
use crate::api_key::{self, ApiKey};
use crate::client::{Client, Key};
use crate::config::{self, ConfigFile, Size};
use crate::telemetry::LogFormat;
use serde::Serialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Options that every command accepts.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Global options")]
pub(super) struct Global {
    /// Print the answer as one JSON object on stdout (JSON lines for streams)
    #[arg(long, global = true)]
    pub(super) json: bool,
    /// Address of the node's API, HOST:PORT [default: 127.0.0.1:9470]
    #[arg(long, global = true, value_name = "ADDR", env = "MESHNODE_API")]
    pub(super) api: Option<String>,
    /// API key that commands send. A node that is started with it requires it of every caller; mandatory if its API
    /// listens on a non-loopback address
    #[arg(long, global = true, value_name = "KEY", env = "MESHNODE_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// File with the API key of the node [default: found by the node's address, for nodes of this user]
    #[arg(long, global = true, value_name = "FILE", env = "MESHNODE_API_KEY_FILE")]
    api_key_file: Option<PathBuf>,
    /// Configuration file [default: ~/.config/meshnode/meshnode.toml]
    #[arg(long, global = true, value_name = "FILE", env = "MESHNODE_CONFIG")]
    config: Option<PathBuf>,
    /// Cache directory for downloaded models and weights [default: ~/.cache/meshnode]
    #[arg(long, global = true, value_name = "DIR", env = "MESHNODE_CACHE")]
    cache_dir: Option<PathBuf>,
    /// Disk limit for weights fetched from peers, as in 20G; the least recently used are evicted first [default: 50
    /// GiB, or 80 % of the free space if that is less]
    #[arg(long, global = true, value_name = "SIZE", env = "MESHNODE_CACHE_SIZE")]
    cache_size: Option<Size>,
    /// Log more: -v info, -vv debug, -vvv trace; a node logs info without it
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub(super) verbose: u8,
    /// Format of log lines on stderr
    #[arg(long, global = true, value_enum, value_name = "FORMAT", default_value = "text", env = "MESHNODE_LOG_FORMAT")]
    pub(super) log: LogFormat,
    /// The parsed configuration file.
    #[arg(skip)]
    pub(super) file: ConfigFile,
}

impl Global {
    /// Reads the configuration file, for every command.
    pub(super) fn read_config(&mut self) -> Result<(), Failure> {
        let (file, path) = ConfigFile::load(self.config.as_deref())?;
        self.file = file;
        match path {
            Some(path) if self.verbose > 0 => remark(format!("configuration: {}", path.display())),
            None if Path::new("meshnode.toml").exists() => {
                remark("ignoring meshnode.toml in the current folder: to use it, pass --config meshnode.toml");
            }
            Some(_) | None => {}
        }
        Ok(())
    }

    /// The address of the node's API, from the flag or the configuration file.
    pub(super) fn api(&self) -> Option<String> {
        self.api.clone().or_else(|| self.file.api.map(|address| address.to_string()))
    }

    /// The address of `--api`, for a node to listen on.
    pub(super) fn listen_address(&self) -> Result<SocketAddr, Failure> {
        let Some(text) = &self.api else {
            return Ok(self.file.api.unwrap_or(config::API_DEFAULT));
        };
        let bare =
            text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/').replace("localhost:", "127.0.0.1:");
        bare.parse().map_err(|_| Failure::usage(format!("--api {text}: expected an address like 127.0.0.1:9470")))
    }

    /// The key that all callers of a node started here must send.
    pub(super) fn api_key(&self) -> Option<String> {
        self.api_key.clone().or_else(|| self.file.api_key.clone())
    }

    /// A client of the node's API.
    pub(super) fn client(&self) -> Result<Client, Failure> {
        let api = self.api();
        let address = api.as_deref().map_or_else(|| config::API_DEFAULT.to_string(), bare);
        // A key file given by flag or variable overrides a key in the configuration file.
        let set = |key: &Option<String>| key.clone().filter(|key| !key.is_empty());
        let key = match (set(&self.api_key), &self.api_key_file) {
            (Some(key), _) => Key::Given(key),
            (None, Some(path)) => Key::Given(key_file(path)?),
            (None, None) => match (set(&self.file.api_key), &self.file.api_key_file) {
                (Some(key), _) => Key::Given(key),
                (None, Some(path)) => Key::Given(key_file(path)?),
                (None, None) => Key::in_files(api_key::candidates(&address, &self.data_dir())),
            },
        };
        Ok(Client::new(api.as_deref(), key))
    }

    /// The data directory of this user's default node.
    fn data_dir(&self) -> PathBuf {
        let variable = std::env::var_os("MESHNODE_DATA_DIR").map(PathBuf::from);
        variable.or_else(|| self.file.data_dir.clone()).unwrap_or_else(config::data_dir_default)
    }

    /// The folder for downloaded models.
    pub(super) fn models_dir(&self) -> PathBuf {
        let set = self.cache_dir.clone().or_else(|| self.file.cache_dir.clone());
        set.unwrap_or_else(config::cache_dir_default).join("models")
    }

    /// The limit of the weight cache, if one is set.
    pub(super) fn cache_bytes(&self) -> Option<u64> {
        self.cache_size.or(self.file.cache_size).map(|size| size.0)
    }
}

/// `HOST:PORT` of an `--api` value.
fn bare(api: &str) -> String {
    api.strip_prefix("http://").unwrap_or(api).trim_end_matches('/').to_owned()
}

/// The key in the file of `--api-key-file`.
fn key_file(path: &Path) -> Result<String, Failure> {
    match ApiKey::read(path) {
        Ok(Some(key)) => Ok(key.as_str().to_owned()),
        Ok(None) => Err(Failure::usage(format!(
            "--api-key-file {}: file not found; the key of a node is `api.key` in its data directory",
            path.display()
        ))),
        Err(why) => Err(Failure::usage(format!("--api-key-file: {why}"))),
    }
}

/// Whether an `--api` value refers to this machine.
pub(super) fn is_local(api: &str) -> bool {
    let host = api.strip_prefix("http://").unwrap_or(api);
    match host.parse::<SocketAddr>() {
        Ok(address) => address.ip().is_loopback() || address.ip().is_unspecified(),
        Err(_) => host.split(':').next() == Some("localhost"),
    }
}

/// Prints the answer: with `--json` the value, otherwise the output of `text`.
pub(super) fn answer<T: Serialize>(global: &Global, value: &T, text: impl FnOnce(&T) -> String) {
    if global.json { say_json(value) } else { say(text(value).trim_end()) }
}
