//! The resources that a node may use, as options of the commands that start one.
use crate::config::Size;

/// Resources of a node. `run`, `serve` and `plan` use them only if they start a node themselves.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct ComputeArgs {
    /// Compute device: auto, cpu, cuda[:i] or vulkan[:i], where i is the number of the GPU [default: auto]
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
