//! Configuration of a node: flags override `MESHNODE_*` variables, which override `meshnode.toml` and the defaults.
//! Also the default directories.
//!
//! Next: `cli.rs`, which fills these from the command line.
mod memory;

use kernels::device::DeviceId;
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

pub use memory::MemoryLimits;

/// Default port P of a node: TCP P for peer discovery, UDP P for gossip, UDP P + 1 for data.
pub const PORT_DEFAULT: u16 = 9471;
/// Default address of the local API.
pub const API_DEFAULT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9470);

/// Options of `node::start`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpOptions {
    /// Display name.
    pub name: String,
    /// Failure domain of the machine; `None` means unknown.
    pub zone: Option<Zone>,
    /// Identity, credentials and store; used by one node at a time.
    pub data_dir: PathBuf,
    /// Downloaded models; shared by all nodes of a user.
    pub models_dir: PathBuf,
    /// Disk limit for weights fetched from peers, stored beside the models; `None` means a share of the disk.
    pub cache_bytes: Option<u64>,
    /// Address to listen on for peers.
    pub listen: IpAddr,
    /// Port P: TCP P, UDP P and UDP P + 1. 0 chooses free ports.
    pub port: u16,
    /// Addresses advertised to peers; if empty, the machine's own addresses.
    pub advertise: Vec<Advertised>,
    /// "auto", or "cpu", "cuda[:i]" and "vulkan[:i]" with commas between them.
    pub device: String,
    /// Memory limit of each device for weights, cache and scratch; `None` derives it from the free memory.
    pub memory: Option<u64>,
    /// The same for single devices; it outranks `memory`.
    pub memory_of: Vec<(DeviceId, u64)>,
    /// RAM for cached conversations that the device has no room for; `None` means a quarter of the free RAM beside a GPU.
    pub spill: Option<u64>,
    /// RAM that experts of mixtures may take beside GPUs with memory of their own; `None` means half of the free RAM, or none
    /// if the processor is one of the node's devices.
    pub expert_ram: Option<u64>,
    /// Compute threads; `None` means one per core.
    pub threads: Option<usize>,
    /// How long a served model stays loaded without requests; `None`: until it is stopped.
    pub idle_unload: Option<Duration>,
    /// Discover peers on the local network.
    pub mdns: bool,
    /// Admit every machine of the local network that asks.
    pub open: bool,
    /// Tickets and multiaddrs to join with; if empty, the node founds a mesh (or rejoins the one in `data_dir`).
    pub join: Vec<String>,
    /// Node for one command, in the command's process: connects to no peers.
    pub solo: bool,
    /// File to record the node's inputs to, for `simnet replay`.
    pub record: Option<PathBuf>,
}

impl UpOptions {
    /// A node without peers, for `run`, `serve` and `plan` if no node is running. `data_dir` should be a new temporary
    /// directory, because the identity is used once.
    pub fn solo(data_dir: PathBuf, models_dir: PathBuf) -> Self {
        Self {
            name: hostname(),
            zone: None,
            data_dir,
            models_dir,
            cache_bytes: None,
            listen: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 0,
            advertise: Vec::new(),
            device: "auto".into(),
            memory: None,
            memory_of: Vec::new(),
            spill: None,
            expert_ram: None,
            threads: None,
            idle_unload: None,
            mdns: false,
            open: false,
            join: Vec::new(),
            solo: true,
            record: None,
        }
    }
}

/// `meshnode.toml`: the same names as the flags; all are optional.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ConfigFile {
    /// See [`UpOptions::name`].
    pub name: Option<String>,
    /// See [`UpOptions::zone`].
    pub zone: Option<Zone>,
    /// See [`UpOptions::data_dir`].
    pub data_dir: Option<PathBuf>,
    /// Directory for downloaded models and shards.
    pub cache_dir: Option<PathBuf>,
    /// See [`UpOptions::cache_bytes`]; as "20GiB".
    pub cache_size: Option<Size>,
    /// See [`UpOptions::listen`].
    pub listen: Option<IpAddr>,
    /// See [`UpOptions::port`].
    pub port: Option<u16>,
    /// See [`UpOptions::advertise`].
    pub advertise: Option<Vec<Advertised>>,
    /// See [`UpOptions::device`].
    pub device: Option<String>,
    /// See [`UpOptions::memory`] and [`UpOptions::memory_of`]; as "4GiB", or as "cuda:0=12G,cpu=8G".
    pub memory: Option<MemoryLimits>,
    /// See [`UpOptions::spill`]; as "8GiB".
    pub spill: Option<Size>,
    /// See [`UpOptions::expert_ram`]; as "32GiB".
    pub expert_ram: Option<Size>,
    /// See [`UpOptions::threads`].
    pub threads: Option<usize>,
    /// See [`UpOptions::idle_unload`]; as "30m".
    #[serde(default, deserialize_with = "span")]
    pub idle_unload: Option<Duration>,
    /// Address of the local API.
    pub api: Option<SocketAddr>,
    /// Key that callers of the API must send.
    pub api_key: Option<String>,
    /// File with the key that commands send.
    pub api_key_file: Option<PathBuf>,
    /// Folders below which submitted simulations may write.
    pub output_dirs: Option<Vec<PathBuf>>,
    /// `true`: do not discover peers on the local network.
    pub no_mdns: Option<bool>,
    /// See [`UpOptions::open`].
    pub open: Option<bool>,
}

impl ConfigFile {
    /// Reads `explicit`, or else `$XDG_CONFIG_HOME/meshnode/meshnode.toml` if it exists. Also returns the path that was
    /// read. The current directory is not searched: its files may belong to another user.
    ///
    /// # Errors
    /// An explicit file does not exist, or a file does not parse (with line and field).
    pub fn load(explicit: Option<&Path>) -> Result<(Self, Option<PathBuf>), ConfigError> {
        let path = match explicit {
            Some(path) => path.to_owned(),
            None => match config_file_default() {
                path if path.exists() => path,
                _ => return Ok((Self::default(), None)),
            },
        };
        Ok((Self::read(&path)?, Some(path)))
    }

    fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
        toml::from_str(&text).map_err(|error| ConfigError::Invalid {
            path: path.to_owned(),
            what: error.to_string().trim_end().to_owned(),
        })
    }
}

/// Why the configuration cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}: {source}; choose another with --config", path = .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file does not parse.
    #[error("the configuration file {path} is not valid:\n{what}", path = .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Position and reason.
        what: String,
    },
}

/// Name of a failure domain (a room, a site, a power circuit): machines of one zone may fail together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Zone(String);

impl Zone {
    /// The name, as advertised.
    pub fn name(&self) -> &str {
        &self.0
    }
}

impl FromStr for Zone {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, bytes_max) = (text.trim(), node_core::limits::ZONE_BYTES_MAX);
        let bad = |why: String| {
            Err(format!("{why}: expected 1 to {bytes_max} bytes of printable text, as in attic or rack-7"))
        };
        if name.is_empty() {
            bad("the zone has no name".into())
        } else if name.len() > bytes_max {
            bad(format!("the name of the zone has {} bytes", name.len()))
        } else if transport::printable(name, bytes_max) != name {
            bad("the name of the zone has unprintable characters".into())
        } else {
            Ok(Zone(name.into()))
        }
    }
}

impl<'de> Deserialize<'de> for Zone {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Address advertised to peers instead of the listen address: behind port forwarding, the public `IP:PORT`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Advertised {
    ip: IpAddr,
    port: Option<u16>,
}

impl Advertised {
    /// The gossip address of a node whose own port P is `port`. The data plane uses the next port.
    pub fn gossip(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip, self.port.unwrap_or(port))
    }
}

impl FromStr for Advertised {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let bad =
            |why: &str| format!("`{text}` {why}: expected IP or IP:PORT, as in 203.0.113.5:9471 or [2001:db8::5]:9471");
        let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
        let parsed = match bare.parse::<IpAddr>() {
            Ok(ip) => Self { ip, port: None },
            Err(_) => {
                let addr: SocketAddr = text.parse().map_err(|_| bad("is not an address"))?;
                Self { ip: addr.ip(), port: Some(addr.port()) }
            }
        };
        match (parsed.ip.is_unspecified() || parsed.ip.is_multicast(), parsed.port) {
            (true, _) => Err(bad("is not an address that peers can reach")),
            (false, Some(0 | u16::MAX)) => Err(bad("has a port that cannot be P (P+1 is the data port)")),
            (false, _) => Ok(parsed),
        }
    }
}

impl<'de> Deserialize<'de> for Advertised {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A number of bytes, parsed from and shown as text. `K M G T` and `KiB MiB GiB TiB` are powers of 1024, `kB MB GB TB`
/// of 1000.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("`{text}` is not a size: expected a number with K, M, G or T, as in 200MiB or 4G");
        let text = text.trim();
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let unit: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(bad()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(unit).map(Size).ok_or_else(|| format!("`{text}` is more than 2^64 bytes"));
        }
        let value: f64 = number.parse().map_err(|_| bad())?;
        let bytes = value * unit as f64;
        if bytes.is_finite() && bytes < u64::MAX as f64 { Ok(Size(bytes as u64)) } else { Err(bad()) }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < units.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {}", units[unit]) }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Bytes(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Bytes(bytes) => Ok(Size(bytes)),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

fn span<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_duration(&text).map(Some).map_err(serde::de::Error::custom)
}

/// Parses a time span: `90s`, `15m`, `1h`, `7d`, `500ms`; a plain number is in seconds.
///
/// # Errors
/// The text is not a time span; the message names the expected format.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("`{text}` is not a time span: expected a number with ms, s, m, h or d, as in 90s or 1h");
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    if unit.trim() == "ms" {
        return number.parse().map(Duration::from_millis).map_err(|_| bad());
    }
    let seconds = match unit.trim() {
        "" | "s" => 1,
        "m" | "min" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(bad()),
    };
    let number: u64 = number.parse().map_err(|_| bad())?;
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(bad)
}

/// Default directory for a node's identity and state: `$XDG_DATA_HOME/meshnode`.
pub fn data_dir_default() -> PathBuf {
    xdg("XDG_DATA_HOME", ".local/share")
}

/// Default directory for files that can be downloaded again: `$XDG_CACHE_HOME/meshnode`; models are in `models` below
/// it.
pub fn cache_dir_default() -> PathBuf {
    xdg("XDG_CACHE_HOME", ".cache")
}

/// Default configuration file: `$XDG_CONFIG_HOME/meshnode/meshnode.toml`.
pub fn config_file_default() -> PathBuf {
    xdg("XDG_CONFIG_HOME", ".config").join("meshnode.toml")
}

/// Directory for state of this user on this machine: `$XDG_STATE_HOME/meshnode`; `None` without a home directory.
pub fn state_dir() -> Option<PathBuf> {
    let dir = xdg("XDG_STATE_HOME", ".local/state");
    dir.is_absolute().then_some(dir)
}

/// This machine's name, or "node".
pub fn hostname() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().trim().to_owned();
    if name.is_empty() { "node".into() } else { name }
}

/// `$VARIABLE/meshnode`, or `~/FALLBACK/meshnode`, or (without a home directory) `./.meshnode`. The XDG specification
/// requires that relative values are ignored.
fn xdg(variable: &str, fallback: &str) -> PathBuf {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    match (absolute(variable), absolute("HOME")) {
        (Some(dir), _) => dir.join("meshnode"),
        (None, Some(home)) => home.join(fallback).join("meshnode"),
        (None, None) => PathBuf::from(".meshnode"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_with_common_units() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("200MiB", 200 << 20),
            ("4G", 4 << 30),
            ("4 GiB", 4 << 30),
            ("1.5g", 3 << 29),
            ("98MB", 98_000_000),
            ("16k", 16 << 10),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "G", "4X", "-1", "1e9", "99999999999T", "1..5G", "4GG"] {
            assert!(text.parse::<Size>().is_err(), "{text} was accepted");
        }
    }

    #[test]
    fn sizes_are_shown_with_one_unit() {
        assert_eq!(Size(512).to_string(), "512 B");
        assert_eq!(Size(98_362_432).to_string(), "93.8 MiB");
    }

    #[test]
    fn advertised_addresses_default_to_the_nodes_own_port() {
        let at = |text: &str| text.parse::<Advertised>().unwrap().gossip(9471).to_string();
        assert_eq!(at("203.0.113.5"), "203.0.113.5:9471");
        assert_eq!(at(" 203.0.113.5:7000"), "203.0.113.5:7000");
        assert_eq!(at("2001:db8::5"), "[2001:db8::5]:9471");
        assert_eq!(at("[2001:db8::5]"), "[2001:db8::5]:9471");
        assert_eq!(at("[2001:db8::5]:7000"), "[2001:db8::5]:7000");
        for text in ["", "example.org", "0.0.0.0:9471", "[::]", "224.0.0.1", "1.2.3.4:0", "1.2.3.4:65535", "1.2.3.4:"] {
            assert!(text.parse::<Advertised>().is_err(), "{text} was accepted");
        }
    }

    #[test]
    fn zones_have_short_printable_names() {
        assert_eq!(" rack-7 ".parse::<Zone>().unwrap().name(), "rack-7");
        for text in ["", "  ", "a\nb", "\u{1b}[31m", &"x".repeat(33), &"ü".repeat(17)] {
            let error = text.parse::<Zone>().unwrap_err();
            assert!(error.contains("1 to 32 bytes"), "{text}: {error}");
        }
        let file: ConfigFile = toml::from_str("zone = \"attic\"").unwrap();
        assert_eq!(file.zone, Some("attic".parse().unwrap()));
        assert!(toml::from_str::<ConfigFile>("zone = \"\"").unwrap_err().to_string().contains("no name"));
    }

    #[test]
    fn durations_are_parsed_with_common_units() {
        assert_eq!(parse_duration("1h").unwrap().as_secs(), 3600);
        assert_eq!(parse_duration("90").unwrap().as_secs(), 90);
        assert!(parse_duration("h").is_err());
        assert!(parse_duration("1y").is_err());
        assert!(parse_duration("99999999999999999999d").is_err());
    }

    #[test]
    fn a_config_file_is_parsed_and_a_wrong_field_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("meshnode.toml");
        std::fs::write(
            &path,
            "name = \"desk\"\nidle-unload = \"30m\"\nmemory = \"4G\"\nspill = \"8G\"\nexpert-ram = \"32G\"\n\
             api = \"127.0.0.1:9000\"\nno-mdns = true\ncache-size = \"20G\"\n\
             advertise = [\"203.0.113.5:7000\"]\n",
        )
        .unwrap();
        let (file, read) = ConfigFile::load(Some(&path)).unwrap();
        assert_eq!(read.as_deref(), Some(path.as_path()));
        assert_eq!(file.name.as_deref(), Some("desk"));
        assert_eq!((file.memory, file.spill), (Some(MemoryLimits::each(4 << 30)), Some(Size(8 << 30))));
        assert_eq!(file.expert_ram, Some(Size(32 << 30)));
        assert_eq!(file.idle_unload, Some(Duration::from_secs(1800)));
        assert_eq!((file.no_mdns, file.cache_size), (Some(true), Some(Size(20 << 30))));
        assert_eq!(file.advertise, Some(vec!["203.0.113.5:7000".parse().unwrap()]));
        std::fs::write(&path, "memroy = \"4G\"\n").unwrap();
        let error = ConfigFile::load(Some(&path)).unwrap_err().to_string();
        assert!(error.contains("memroy") && error.contains("memory"), "{error}");
        let error = ConfigFile::load(Some(&dir.path().join("absent.toml"))).unwrap_err().to_string();
        assert!(error.contains("absent.toml"), "{error}");
    }
}
