//! One world to try, as data: hosts, links, requests, simulations and faults. Scenario files are cases, and so is what a failing
//! seed was reduced to. Next: `case/simulation.rs`, then `run.rs`.
mod simulation;

use crate::faults::Schedule;
use crate::host::HostId;
use crate::options::Options;
use crate::units;
use crate::workload::WIDTH;
use node_core::time::{Duration, Instant};
use serde::{Deserialize, Serialize};
use std::path::Path;

pub use simulation::{Guarded, Simulation};

/// A case. Times count from the moment at which all models are first served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Case {
    /// For people: what is tried.
    pub about: String,
    /// Root of all chance that is left.
    pub seed: u64,
    /// How long faults and requests go on. Then everything is mended, and has to end well.
    #[serde(with = "units")]
    pub lasts: Duration,
    /// The hosts, all of one kind.
    pub mesh: Mesh,
    /// The links.
    pub network: Options,
    /// Further entry nodes; host 0 is the first one.
    #[serde(rename = "entry", skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<Entry>,
    /// What callers ask.
    #[serde(rename = "request")]
    pub requests: Vec<Ask>,
    /// What they submit besides.
    #[serde(rename = "simulation", skip_serializing_if = "Vec::is_empty")]
    pub simulations: Vec<Simulation>,
    /// What goes wrong.
    #[serde(rename = "fault")]
    pub faults: Schedule,
}

/// Hosts and the model they serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Mesh {
    /// How many. The callers are at the first one, host 0.
    pub hosts: u32,
    /// What each has for weights and caches.
    pub memory_mib: u64,
    /// Layers of the model, each of 20 MiB; 0: no model is served.
    pub layers: u32,
    /// Where hosts stand, from the first on; the rest are in region 0.
    pub regions: Vec<u32>,
    /// Hosts are of three kinds: the usual one, one three times as fast with more memory, and one less than half as fast with less.
    pub mixed: bool,
    /// Elements of the model's rows. A stage's replay ring is bounded in bytes: it keeps fewer wide rows.
    pub width: u32,
}

/// A further entry node, which coordinates a job of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Entry {
    /// Which host.
    pub host: u32,
    /// It serves a model of this number of layers; without it, the model that host 0 serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<u32>,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Ask {
    /// When.
    #[serde(with = "units::moment")]
    pub at: Instant,
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Tokens wanted.
    pub tokens: u32,
    /// The caller goes away after this time.
    #[serde(with = "units::optional", skip_serializing_if = "Option::is_none")]
    pub cancel_after: Option<Duration>,
    /// The entry node: 0 is host 0, from 1 on the case's further ones.
    #[serde(skip_serializing_if = "is_zero")]
    pub entry: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants it so")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Default for Case {
    fn default() -> Self {
        Case {
            about: String::new(),
            seed: 0,
            lasts: Duration::from_secs(20),
            mesh: Mesh::default(),
            network: Options::lan(0),
            entries: Vec::new(),
            requests: Vec::new(),
            simulations: Vec::new(),
            faults: Vec::new(),
        }
    }
}

impl Default for Mesh {
    /// Each holds at most five of twelve layers.
    fn default() -> Self {
        Mesh { hosts: 8, memory_mib: 297, layers: 12, regions: Vec::new(), mixed: false, width: WIDTH }
    }
}

impl Default for Entry {
    fn default() -> Self {
        Entry { host: 1, layers: None }
    }
}

impl Default for Ask {
    fn default() -> Self {
        Ask { at: Instant(0), prompt: 100, tokens: 50, cancel_after: None, entry: 0 }
    }
}

/// Why a file is not a case.
#[derive(Debug, thiserror::Error)]
pub enum CaseError {
    /// It cannot be read.
    #[error("cannot read {path}: {why}")]
    Read {
        /// Which file.
        path: String,
        /// The system's words.
        why: std::io::Error,
    },
    /// It is not TOML, or names what does not exist.
    #[error("{path} is no scenario: {why}")]
    Toml {
        /// Which file.
        path: String,
        /// Where and why.
        why: toml::de::Error,
    },
    /// It asks for what cannot be.
    #[error("{path}: {what}")]
    Wrong {
        /// Which file.
        path: String,
        /// What.
        what: String,
    },
}

impl Case {
    /// Reads a scenario file.
    pub fn load(path: &Path) -> Result<Case, CaseError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|why| CaseError::Read { path: name.clone(), why })?;
        let case: Case = toml::from_str(&text).map_err(|why| CaseError::Toml { path: name.clone(), why })?;
        case.check().map_err(|what| CaseError::Wrong { path: name, what })?;
        Ok(case)
    }

    /// The case as a scenario file.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| format!("# cannot be written: {error}\n"))
    }

    /// Whether it can be tried at all.
    pub fn check(&self) -> Result<(), String> {
        let hosts = self.mesh.hosts;
        if hosts == 0 || hosts > HOSTS_MAX {
            return Err(format!("expected 1 to {HOSTS_MAX} hosts, found {hosts}"));
        }
        let other = self.entries.iter().filter_map(|entry| entry.layers);
        if let Some(layers) = other.chain([self.mesh.layers.max(1)]).find(|layers| !(1..=LAYERS_MAX).contains(layers)) {
            return Err(format!("expected 1 to {LAYERS_MAX} layers, found {layers}"));
        }
        if self.mesh.layers == 0 && !(self.requests.is_empty() && self.entries.is_empty()) {
            return Err("expected no requests and no entry nodes where no model is served (0 layers)".into());
        }
        if self.mesh.memory_mib > MEMORY_MIB_MAX || self.mesh.regions.iter().any(|region| *region > REGIONS_MAX) {
            return Err(format!("expected at most {MEMORY_MIB_MAX} MiB of memory and regions 0 to {REGIONS_MAX}"));
        }
        if self.mesh.width == 0 || self.mesh.width > WIDTH_MAX {
            return Err(format!("expected rows of 1 to {WIDTH_MAX} elements, found {}", self.mesh.width));
        }
        if self.lasts > LASTS_MAX {
            return Err(format!(
                "expected at most {} of faults, found {}",
                units::text(LASTS_MAX),
                units::text(self.lasts)
            ));
        }
        for timed in &self.faults {
            if let Some(host) = timed.fault.hosts().into_iter().find(|host| host.0 >= hosts) {
                return Err(format!("`{}` names host {}, there are {hosts}, counted from 0", timed.fault, host.0));
            }
        }
        self.check_callers()
    }

    fn check_callers(&self) -> Result<(), String> {
        let hosts = self.mesh.hosts;
        if let Some(entry) = self.entries.iter().find(|entry| entry.host == 0 || entry.host >= hosts) {
            return Err(format!("expected an entry node from host 1 to {}, found {}", hosts - 1, entry.host));
        }
        if self.entries.len() > ENTRIES_MAX || self.simulations.len() > SIMULATIONS_MAX {
            return Err(format!("expected at most {ENTRIES_MAX} entry nodes and {SIMULATIONS_MAX} simulations"));
        }
        for simulation in &self.simulations {
            simulation.check(hosts)?;
        }
        for ask in &self.requests {
            if ask.prompt == 0 || ask.prompt > PROMPT_MAX || ask.tokens > PROMPT_MAX {
                return Err(format!("expected a prompt of 1 to {PROMPT_MAX} tokens, found {}", ask.prompt));
            }
            if ask.entry as usize > self.entries.len() {
                return Err(format!("a request names entry node {}, there are {}", ask.entry, self.entries.len()));
            }
        }
        Ok(())
    }

    /// The same without its last entry node, if there are further ones and no request names that.
    pub(crate) fn without_last_entry(&self) -> Option<Case> {
        let mut case = self.clone();
        case.entries.pop()?;
        let names = |ask: &Ask| ask.entry as usize > case.entries.len();
        (!case.requests.iter().any(names)).then_some(case)
    }

    /// The host of each entry node, and the layers of the model that it serves; `None`: the model of host 0.
    pub fn entry_nodes(&self) -> Vec<(HostId, Option<u32>)> {
        let first = (self.mesh.layers > 0).then_some((HostId(0), None));
        first.into_iter().chain(self.entries.iter().map(|entry| (HostId(entry.host), entry.layers))).collect()
    }
}

/// Each serves a model.
const ENTRIES_MAX: usize = 4;
/// Each is computed by the checkers, too.
const SIMULATIONS_MAX: usize = 8;
/// More than this takes longer than anybody waits.
const HOSTS_MAX: u32 = 4096;
/// As many as models have.
const LAYERS_MAX: u32 = 256;
/// A terabyte.
const MEMORY_MIB_MAX: u64 = 1 << 20;
/// Around the world.
const REGIONS_MAX: u32 = 64;
/// Ten times the widest model.
const WIDTH_MAX: u32 = 1 << 20;
/// A virtual day.
const LASTS_MAX: Duration = Duration::from_secs(86_400);
/// The symbolic model's context.
const PROMPT_MAX: u32 = 4096;
