//! The resources that a node may use, as options of the commands that start one.
use crate::config::MemoryLimits;
use kernels::device::{DeviceChoice, DeviceId, DeviceList};

/// Resources of a node. `run`, `serve` and `plan` use them only if they start a node themselves.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct ComputeArgs {
    /// Compute devices: auto, or cpu, cuda[:i] and vulkan[:i] with commas between them, where i is the number of the GPU;
    /// auto is all GPUs, or the CPU if there is none [default: auto]
    #[arg(long, value_name = "DEVICES", env = "MESHNODE_DEVICE", value_parser = device)]
    pub(super) device: Option<String>,
    /// Memory limit of each device for weights, caches and scratch, as in 200MiB or 4G, or by device, as in
    /// cuda:0=12G,cpu=8G [default: three quarters of the machine's free
    /// memory, or all but 1 GiB of a GPU's]
    #[arg(long, value_name = "SIZE", env = "MESHNODE_MEMORY")]
    pub(super) memory: Option<MemoryLimits>,
    /// Compute threads [default: one per core]
    #[arg(long, value_name = "N", env = "MESHNODE_THREADS", value_parser = threads)]
    pub(super) threads: Option<usize>,
}

impl ComputeArgs {
    /// The flags that were given for a node to start.
    pub(super) fn given(&self) -> impl Iterator<Item = &'static str> {
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

impl ComputeArgs {
    /// The memory limits, given here or in the configuration file: of each device, and of single devices.
    pub(super) fn limits(&self, file: Option<&MemoryLimits>) -> (Option<u64>, Vec<(DeviceId, u64)>) {
        let limits = self.memory.clone().or_else(|| file.cloned()).unwrap_or_default();
        (limits.each, limits.of)
    }
}

/// Checks the syntax; whether the devices exist is checked at the start of the node.
pub(super) fn device(text: &str) -> Result<String, String> {
    text.parse::<DeviceList>().map(|_| text.to_owned()).map_err(|e| e.to_string())
}

/// The same for a single device.
pub(super) fn one_device(text: &str) -> Result<String, String> {
    text.parse::<DeviceChoice>().map(|_| text.to_owned()).map_err(|e| e.to_string())
}

pub(super) fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=1024) => Ok(threads),
        Ok(_) | Err(_) => Err("expected 1 to 1024".into()),
    }
}
