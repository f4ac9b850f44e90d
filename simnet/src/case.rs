//! One simulated run as data: hosts, links, requests, simulations and faults. A scenario file is a case; so is a minimised
//! failing seed. Next: `case/simulation.rs`, then `run.rs`.
mod simulation;

use crate::faults::Schedule;
use crate::host::HostId;
use crate::options::Options;
use crate::units;
use crate::workload::WIDTH;
use node_core::limits::{DEVICES_MAX, RAM_PAGES_MAX, REPLICAS_MAX};
use node_core::time::{Duration, Instant};
use serde::{Deserialize, Serialize};
use std::path::Path;

pub use simulation::{Simulation, StandbyTier};

/// A case. Times count from the moment when all models are first served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Case {
    /// A description of what the case tests.
    pub about: String,
    /// Seed of all random streams of the run.
    pub seed: u64,
    /// How long faults and requests continue. Then all faults are healed, and the run must settle.
    #[serde(with = "units")]
    pub lasts: Duration,
    /// The hosts.
    pub mesh: Mesh,
    /// The links.
    pub network: Options,
    /// Further entry nodes; host 0 is the first.
    #[serde(rename = "entry", skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<EntryNode>,
    /// Requests of callers.
    #[serde(rename = "request")]
    pub requests: Vec<Ask>,
    /// Simulations that are submitted.
    #[serde(rename = "simulation", skip_serializing_if = "Vec::is_empty")]
    pub simulations: Vec<Simulation>,
    /// Faults.
    #[serde(rename = "fault")]
    pub faults: Schedule,
}

/// Hosts and the model they serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Mesh {
    /// Number of hosts. Host 0 is the first entry node.
    pub hosts: u32,
    /// Memory of each host for weights and caches.
    pub memory_mib: u64,
    /// Layers of the model, 20 MiB each; 0: no model is served.
    pub layers: u32,
    /// Region of each host, from host 0 on; the rest are in region 0.
    pub regions: Vec<u32>,
    /// Number of devices of each host, from host 0 on; the rest have one. Each has the memory of a host.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<u32>,
    /// Hosts of three kinds: nominal, three times as fast with 1.5 times the memory, and 40 % as fast with 90 % of the
    /// memory.
    pub mixed: bool,
    /// Elements per row of activations. A stage's replay ring is bounded in bytes, so it holds fewer wide rows.
    pub width: u32,
    /// Pages that stages have in RAM beside those of their devices.
    #[serde(skip_serializing_if = "is_zero")]
    pub ram_pages: u32,
    /// Most pipelines that serve each model.
    #[serde(skip_serializing_if = "is_one")]
    pub replicas: u32,
    /// Layers of a draft model that host 0 also serves. With as many as the model has it is the same model under another name,
    /// which agrees with it always.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft: Option<u32>,
}

/// A further entry node, which coordinates its own job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct EntryNode {
    /// Its host.
    pub host: u32,
    /// Layers of the model that it serves; if absent, the model of host 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<u32>,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Ask {
    /// When it is sent.
    #[serde(with = "units::moment")]
    pub at: Instant,
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens to generate.
    pub tokens: u32,
    /// The caller disconnects after this time.
    #[serde(with = "units::optional", skip_serializing_if = "Option::is_none")]
    pub cancel_after: Option<Duration>,
    /// The entry node: 0 is host 0, 1 the first of the case's further entry nodes.
    #[serde(skip_serializing_if = "is_zero")]
    pub entry: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde requires this signature")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde requires this signature")]
fn is_one(number: &u32) -> bool {
    *number == 1
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
    /// Each host holds at most five of twelve layers.
    fn default() -> Self {
        Mesh {
            hosts: 8,
            memory_mib: 297,
            layers: 12,
            regions: Vec::new(),
            devices: Vec::new(),
            mixed: false,
            width: WIDTH,
            ram_pages: 0,
            replicas: 1,
            draft: None,
        }
    }
}

impl Default for EntryNode {
    fn default() -> Self {
        EntryNode { host: 1, layers: None }
    }
}

impl Default for Ask {
    fn default() -> Self {
        Ask { at: Instant(0), prompt: 100, tokens: 50, cancel_after: None, entry: 0 }
    }
}

/// Why a scenario file is rejected.
#[derive(Debug, thiserror::Error)]
pub enum CaseError {
    /// It cannot be read.
    #[error("cannot read {path}: {why}")]
    Read {
        /// The file.
        path: String,
        /// The error of the operating system.
        why: std::io::Error,
    },
    /// It is not TOML, or has unknown keys.
    #[error("{path} is not a valid scenario: {why}")]
    Toml {
        /// The file.
        path: String,
        /// Position and cause.
        why: toml::de::Error,
    },
    /// A value is out of bounds.
    #[error("{path}: {what}")]
    Wrong {
        /// The file.
        path: String,
        /// What was expected, and what was found.
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

    /// The case as the text of a scenario file.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| format!("# cannot be written: {error}\n"))
    }

    /// Checks all values against their bounds.
    pub fn check(&self) -> Result<(), String> {
        let hosts = self.mesh.hosts;
        if hosts == 0 || hosts > HOSTS_MAX {
            return Err(format!("expected 1 to {HOSTS_MAX} hosts, found {hosts}"));
        }
        let other = self.entries.iter().filter_map(|entry| entry.layers);
        let all = other.chain([self.mesh.layers.max(1)]).chain(self.mesh.draft);
        if let Some(layers) = all.into_iter().find(|layers| !(1..=LAYERS_MAX).contains(layers)) {
            return Err(format!("expected 1 to {LAYERS_MAX} layers, found {layers}"));
        }
        if self.mesh.layers == 0 && !(self.requests.is_empty() && self.entries.is_empty()) {
            return Err("expected no requests and no entry nodes where no model is served (0 layers)".into());
        }
        if self.mesh.memory_mib > MEMORY_MIB_MAX || self.mesh.regions.iter().any(|region| *region > REGIONS_MAX) {
            return Err(format!("expected at most {MEMORY_MIB_MAX} MiB of memory and regions 0 to {REGIONS_MAX}"));
        }
        if self.mesh.devices.iter().any(|count| !(1..=DEVICES_MAX as u32).contains(count)) {
            return Err(format!("expected 1 to {DEVICES_MAX} devices of each host, found {:?}", self.mesh.devices));
        }
        if self.mesh.width == 0 || self.mesh.width > WIDTH_MAX {
            return Err(format!("expected rows of 1 to {WIDTH_MAX} elements, found {}", self.mesh.width));
        }
        if self.mesh.ram_pages > RAM_PAGES_MAX {
            return Err(format!("expected at most {RAM_PAGES_MAX} pages in RAM, found {}", self.mesh.ram_pages));
        }
        if !(1..=REPLICAS_MAX).contains(&self.mesh.replicas) {
            return Err(format!("expected 1 to {REPLICAS_MAX} replicas, found {}", self.mesh.replicas));
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

    /// The same case without its last entry node; `None` if there is none, or a request uses it.
    pub(crate) fn without_last_entry(&self) -> Option<Case> {
        let mut case = self.clone();
        case.entries.pop()?;
        let names = |ask: &Ask| ask.entry as usize > case.entries.len();
        (!case.requests.iter().any(names)).then_some(case)
    }

    /// The host of each entry node, and the layers of its model; `None`: the model of host 0.
    pub fn entry_nodes(&self) -> Vec<(HostId, Option<u32>)> {
        let first = (self.mesh.layers > 0).then_some((HostId(0), None));
        first.into_iter().chain(self.entries.iter().map(|entry| (HostId(entry.host), entry.layers))).collect()
    }
}

/// Each entry node serves a model.
const ENTRIES_MAX: usize = 4;
/// The checkers compute each simulation once more.
const SIMULATIONS_MAX: usize = 8;
/// Larger meshes take too long to simulate.
const HOSTS_MAX: u32 = 4096;
/// More than published models have.
const LAYERS_MAX: u32 = 256;
/// 1 TiB.
const MEMORY_MIB_MAX: u64 = 1 << 20;
/// More than enough for hosts around the world.
const REGIONS_MAX: u32 = 64;
/// Ten times the widest model.
const WIDTH_MAX: u32 = 1 << 20;
/// One virtual day.
const LASTS_MAX: Duration = Duration::from_secs(86_400);
/// The context of the symbolic model.
const PROMPT_MAX: u32 = 4096;
