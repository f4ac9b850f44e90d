//! What device discovery reports: devices, what a machine lacks, and faults with advice.
use std::fmt;

use kernels::device::Device;
use serde::{Deserialize, Serialize};

/// Result of device discovery.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The CPU, then CUDA devices, then Vulkan devices; discrete Vulkan devices come first.
    pub devices: Vec<Device>,
    /// What this machine does not have, one line each: `cuda: what is missing`.
    pub notes: Vec<String>,
    /// Drivers and devices that are present but cannot be used.
    pub faults: Vec<Fault>,
}

/// A driver or device that is present but cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// `cuda` or `vulkan`.
    pub driver: String,
    /// What is wrong.
    pub seen: String,
    /// What to do about it.
    pub advice: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.driver, self.seen, self.advice)
    }
}

/// A driver that devices are found through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Cuda,
    Vulkan,
}

impl Kind {
    pub(super) const ALL: [Self; 2] = [Self::Cuda, Self::Vulkan];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Vulkan => "vulkan",
        }
    }

    pub(super) fn fault(self, seen: impl Into<String>, advice: impl Into<String>) -> Fault {
        Fault { driver: self.name().into(), seen: seen.into(), advice: advice.into() }
    }

    /// The result for a driver that crashed its process or timed out.
    pub(super) fn broken(self, what: &str) -> Probe {
        let advice = match self {
            Self::Cuda => {
                "run `nvidia-smi` for details; restart the machine if the driver was just updated, else reinstall it"
            }
            Self::Vulkan => "run `vulkaninfo` for details; update the GPU's driver",
        };
        let fault = self.fault(format!("the driver does not work, so its GPUs are not used: {what}"), advice);
        Probe { faults: vec![fault], ..Probe::default() }
    }
}
