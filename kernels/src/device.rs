//! Device names and the choice among devices. Describes the CPU as a device; the crate `kernels-gpu` finds GPUs.
use std::fmt;
use std::str::FromStr;

/// A device that stages can be loaded on.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Device {
    /// Kind and number.
    pub id: DeviceId,
    /// Product name, as its driver or the kernel reports it.
    pub name: String,
    /// Total memory in bytes.
    pub memory_total: u64,
    /// Free memory in bytes.
    pub memory_free: u64,
    /// The device has dedicated memory; otherwise it shares the host's.
    pub own_memory: bool,
}

impl Device {
    /// Whether the device is a software rasterizer (llvmpipe, lavapipe, SwiftShader). It is slower than the CPU kernels.
    fn is_software(&self) -> bool {
        let name = self.name.to_lowercase();
        ["llvmpipe", "lavapipe", "swiftshader"].iter().any(|software| name.contains(software))
    }
}

/// The GPUs among `devices` that stay idle when those `used` compute. A card listed by both CUDA and Vulkan counts once, as CUDA.
#[must_use]
pub fn idle_gpus<'a>(devices: &'a [Device], used: &[&Device]) -> Vec<&'a Device> {
    let listed_by_cuda = |name: &str| devices.iter().any(|d| matches!(d.id, DeviceId::Cuda(_)) && d.name == name);
    let in_use = |used: &Device| match used.id {
        DeviceId::Cpu | DeviceId::Cuda(_) => Some(used.id),
        // The Vulkan number does not identify one of several equal cards; take the first as the one in use.
        DeviceId::Vulkan(_) => devices.iter().find(|d| d.name == used.name && d.id != DeviceId::Cpu).map(|d| d.id),
    };
    let in_use: Vec<DeviceId> = used.iter().filter_map(|used| in_use(used)).collect();
    let named = |id: DeviceId| used.iter().any(|used| used.id == id);
    let idle = |d: &&Device| match d.id {
        DeviceId::Cpu => false,
        DeviceId::Cuda(_) => !in_use.contains(&d.id),
        DeviceId::Vulkan(_) => !d.is_software() && !listed_by_cuda(&d.name) && !named(d.id),
    };
    devices.iter().filter(idle).collect()
}

/// A kind of device and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum DeviceId {
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU by its CUDA number.
    Cuda(u32),
    /// A GPU by its Vulkan number.
    Vulkan(u32),
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceId::Cpu => f.write_str("cpu"),
            DeviceId::Cuda(i) => write!(f, "cuda:{i}"),
            DeviceId::Vulkan(i) => write!(f, "vulkan:{i}"),
        }
    }
}

/// The user's choice: `auto`, `cpu`, `cuda[:i]`, `vulkan[:i]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A hardware GPU if present, else the CPU.
    Auto,
    /// A specific device.
    This(DeviceId),
}

/// Why a choice of device cannot be met.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Not a device name.
    #[error("`{0}` is not a device name: expected auto, cpu, cuda, cuda:1, vulkan, vulkan:1, …")]
    Name(String),
    /// A list that names a device twice, or `auto` beside others.
    #[error("`{list}`: {what}")]
    List {
        /// The list.
        list: String,
        /// What is wrong.
        what: String,
    },
    /// The device does not exist on this machine.
    #[error("device {wanted} not found; found: {there}; run `meshnode doctor` to see what a missing device needs")]
    Missing {
        /// The requested device.
        wanted: DeviceId,
        /// The devices found.
        there: String,
    },
}

impl FromStr for DeviceChoice {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let wrong = || DeviceError::Name(text.to_owned());
        let (kind, number) = text.split_once(':').unwrap_or((text, "0"));
        let number: u32 = number.parse().map_err(|_| wrong())?;
        match (kind, text.contains(':')) {
            ("auto", false) => Ok(DeviceChoice::Auto),
            ("cpu", false) => Ok(DeviceChoice::This(DeviceId::Cpu)),
            ("cuda", _) => Ok(DeviceChoice::This(DeviceId::Cuda(number))),
            ("vulkan", _) => Ok(DeviceChoice::This(DeviceId::Vulkan(number))),
            _ => Err(wrong()),
        }
    }
}

impl DeviceChoice {
    /// Picks the device among `devices` that meets the choice. `devices` must include the CPU.
    ///
    /// # Errors
    /// [`DeviceError::Missing`] if no device meets the choice.
    pub fn pick(self, devices: &[Device]) -> Result<&Device, DeviceError> {
        let wanted = match self {
            DeviceChoice::This(id) => id,
            DeviceChoice::Auto => {
                let cuda = devices.iter().find(|d| matches!(d.id, DeviceId::Cuda(_)));
                let vulkan = devices.iter().find(|d| matches!(d.id, DeviceId::Vulkan(_)) && !d.is_software());
                cuda.or(vulkan).map_or(DeviceId::Cpu, |d| d.id)
            }
        };
        devices.iter().find(|d| d.id == wanted).ok_or_else(|| DeviceError::Missing {
            wanted,
            there: devices.iter().map(|d| d.id.to_string()).collect::<Vec<_>>().join(", "),
        })
    }
}

/// The devices that one node uses: `auto`, or names with commas between them, such as `cuda:0,cuda:1,cpu`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceList(Vec<DeviceChoice>);

impl FromStr for DeviceList {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let mut list = Vec::new();
        let wrong = |what: String| DeviceError::List { list: text.to_owned(), what };
        for name in text.split(',') {
            let choice: DeviceChoice = name.trim().parse()?;
            if list.contains(&choice) {
                return Err(wrong(format!("{} is named twice: name each device once", name.trim())));
            }
            list.push(choice);
        }
        if list.len() > 1 && list.contains(&DeviceChoice::Auto) {
            return Err(wrong("auto chooses the devices itself: name it alone".into()));
        }
        if list.len() > LIST_MAX {
            return Err(wrong(format!("{} devices, expected at most {LIST_MAX}", list.len())));
        }
        Ok(Self(list))
    }
}

/// Devices of one node: the mesh names them by a number below this (`node_core::limits::DEVICES_MAX`).
const LIST_MAX: usize = 16;

impl DeviceList {
    /// The devices among `devices`, in the order of the list. `auto`: all hardware GPUs, a card listed by both CUDA and Vulkan
    /// once, or the CPU if there is none. `devices` must include the CPU.
    ///
    /// # Errors
    /// [`DeviceError::Missing`] if a named device does not exist.
    pub fn pick<'a>(&self, devices: &'a [Device]) -> Result<Vec<&'a Device>, DeviceError> {
        let mut picked: Vec<&Device> = self.0.iter().map(|choice| choice.pick(devices)).collect::<Result<_, _>>()?;
        if self.0 == [DeviceChoice::Auto] && picked.iter().all(|first| first.id != DeviceId::Cpu) {
            let others = picked.first().map(|first| idle_gpus(devices, &[*first])).unwrap_or_default();
            picked.extend(others);
            picked.truncate(LIST_MAX);
        }
        Ok(picked)
    }
}

/// The CPU of this machine, with the memory of the host.
pub fn cpu() -> Device {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |key: &str| {
        let line = meminfo.lines().find(|l| l.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpuinfo
        .lines()
        .find(|l| l.starts_with("model name"))
        .and_then(|l| l.split_once(": "))
        .map_or("processor", |(_, n)| n);
    Device {
        id: DeviceId::Cpu,
        name: name.into(),
        memory_total: kib("MemTotal:").unwrap_or(0) << 10,
        memory_free: kib("MemAvailable:").unwrap_or(0) << 10,
        own_memory: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(id: DeviceId, name: &str) -> Device {
        Device { id, name: name.into(), memory_total: 1, memory_free: 1, own_memory: false }
    }

    #[test]
    fn choices_are_parsed_and_resolved() {
        let here = [device(DeviceId::Cpu, "x"), device(DeviceId::Vulkan(0), "llvmpipe (LLVM 15)")];
        let pick = |text: &str| text.parse::<DeviceChoice>().and_then(|c| c.pick(&here).map(|d| d.id));
        assert_eq!(pick("auto"), Ok(DeviceId::Cpu), "auto skips software rasterizers");
        assert_eq!(pick("vulkan"), Ok(DeviceId::Vulkan(0)));
        assert!(matches!(pick("cuda:1"), Err(DeviceError::Missing { .. })));
        for wrong in ["", "gpu", "cpu:0", "cuda:", "cuda:x", "auto:1", "vulkan:-1"] {
            assert!(matches!(pick(wrong), Err(DeviceError::Name(_))), "{wrong}");
        }
        let real = [device(DeviceId::Cpu, "x"), device(DeviceId::Vulkan(0), "Radeon")];
        assert_eq!(DeviceChoice::Auto.pick(&real).map(|d| d.id), Ok(DeviceId::Vulkan(0)));
    }

    #[test]
    fn each_idle_gpu_is_listed_once() {
        let (cpu, software) = (device(DeviceId::Cpu, "x"), device(DeviceId::Vulkan(2), "llvmpipe (LLVM 15)"));
        let cuda = |number| device(DeviceId::Cuda(number), "RTX 3090");
        let (same, radeon) = (device(DeviceId::Vulkan(0), "RTX 3090"), device(DeviceId::Vulkan(1), "Radeon"));
        let here = [cpu.clone(), cuda(0), cuda(1), same.clone(), radeon.clone(), software];
        let idle = |used: &Device| idle_gpus(&here, &[used]).iter().map(|d| d.id.to_string()).collect::<Vec<_>>();
        assert_eq!(idle(&cuda(0)), ["cuda:1", "vulkan:1"]);
        assert_eq!(idle(&cuda(1)), ["cuda:0", "vulkan:1"]);
        assert_eq!(idle(&same), ["cuda:1", "vulkan:1"], "one of the two cards is in use");
        assert_eq!(idle(&radeon), ["cuda:0", "cuda:1"]);
        assert_eq!(idle(&cpu), ["cuda:0", "cuda:1", "vulkan:1"]);
    }

    #[test]
    fn the_cpu_reports_memory() {
        assert!(cpu().memory_total > 0 && cpu().memory_free <= cpu().memory_total);
    }

    #[test]
    fn lists_name_each_device_once_and_auto_alone() {
        let here = [
            device(DeviceId::Cpu, "x"),
            device(DeviceId::Cuda(0), "H100"),
            device(DeviceId::Cuda(1), "H100"),
            device(DeviceId::Vulkan(0), "H100"),
            device(DeviceId::Vulkan(1), "llvmpipe (LLVM 15)"),
        ];
        let pick = |text: &str| {
            let list = text.parse::<DeviceList>()?;
            list.pick(&here).map(|all| all.iter().map(|d| d.id.to_string()).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(pick("cuda:1,cpu").as_deref(), Ok("cuda:1 cpu"), "in the order of the list");
        assert_eq!(pick("cpu, vulkan:1").as_deref(), Ok("cpu vulkan:1"));
        assert_eq!(pick("auto").as_deref(), Ok("cuda:0 cuda:1"), "all hardware GPUs, without the CPU");
        assert_eq!("auto".parse::<DeviceList>().unwrap().pick(&here[..1]).map(|all| all.len()), Ok(1), "the CPU");
        assert!(matches!(pick("cpu,cpu"), Err(DeviceError::List { what, .. }) if what.contains("twice")));
        assert!(matches!(pick("cuda,cuda:0"), Err(DeviceError::List { .. })), "the same device under two names");
        assert!(matches!(pick("auto,cpu"), Err(DeviceError::List { .. })));
        assert!(matches!(pick("cpu,,cuda:0"), Err(DeviceError::Name(_))));
        assert!(matches!(pick(""), Err(DeviceError::Name(_))));
        assert!(matches!(pick("cpu,cuda:7"), Err(DeviceError::Missing { .. })));
        let many = (0..17).map(|i| format!("cuda:{i}")).collect::<Vec<_>>().join(",");
        assert!(matches!(pick(&many), Err(DeviceError::List { .. })));
    }
}
