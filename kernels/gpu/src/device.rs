//! GPUs of this machine: found in processes of their own, named as people name them, and why one is not offered.
//!
//! A driver can hang, crash or panic when touched, and CUDA keeps a context for the life of a process. So a child process asks each kind
//! of driver and answers in one line: a driver that does not work costs its own devices and nothing else. A program takes part by
//! calling [`use_cache`] and [`answer_probe`] before anything else.
use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::panic::catch_unwind;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use kernels::device::{Device, cpu};
use serde::{Deserialize, Serialize};

use crate::engine::panic_text;

pub(crate) mod cuda;
pub(crate) mod toolkit;
mod vulkan;

pub(crate) use vulkan::wgpu_device;

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The processor first, then CUDA devices, then Vulkan devices with the likeliest fast one first.
    pub devices: Vec<Device>,
    /// What this machine does not have, one line each: `cuda: what is not here`.
    pub notes: Vec<String>,
    /// What is here and cannot be used.
    pub faults: Vec<Fault>,
}

/// A driver or a device that is here and cannot be used.
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

/// Keeps what GPUs need again in a folder of this user's: compiled kernels in `dir/kernels`. CUDA's compiler is looked for in
/// `dir/cuda` too. Call it first in `main`, for it may set `CUDA_PATH`: see `device/toolkit.rs`. A relative folder is not used.
pub fn use_cache(dir: &Path) {
    if dir.is_absolute() {
        toolkit::use_cache(dir);
        crate::compile::keep_in(&dir.join("kernels"));
    }
}

/// Names, in the environment of a process that looks, the drivers that it asks.
const PROBE_KEY: &str = "MESHNODE_PROBE_DEVICES";
/// Begins the line of the answer: drivers print to stdout too.
const ANSWER: &[u8] = b"meshnode-devices:";
/// Longer than any driver takes to start; a hung one is given up.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes of an answer at most: some dozens of devices.
const ANSWER_BYTES_MAX: u64 = 1 << 16;

static ANSWERS: AtomicBool = AtomicBool::new(false);

/// Kinds of drivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Cuda,
    Vulkan,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Cuda, Self::Vulkan];

    fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Vulkan => "vulkan",
        }
    }

    fn look(self) -> Probe {
        let look = match self {
            Self::Cuda => cuda::look,
            Self::Vulkan => vulkan::look,
        };
        catch_unwind(look).unwrap_or_else(|panic| self.broken(&panic_text(panic.as_ref())))
    }

    fn fault(self, seen: impl Into<String>, advice: impl Into<String>) -> Fault {
        Fault { driver: self.name().into(), seen: seen.into(), advice: advice.into() }
    }

    /// The driver took its process with it, or all of its time.
    fn broken(self, what: &str) -> Probe {
        let advice = match self {
            Self::Cuda => {
                "`nvidia-smi` tells more; restart the machine if the driver was just updated, else install it again"
            }
            Self::Vulkan => "`vulkaninfo` tells more; update the GPU's driver",
        };
        let fault = self.fault(format!("the driver does not work and its GPUs are not used: {what}"), advice);
        Probe { faults: vec![fault], ..Probe::default() }
    }
}

/// If this process was started to look for devices: answers and exits. Call it in `main`, after [`use_cache`].
pub fn answer_probe() {
    ANSWERS.store(true, Ordering::Relaxed);
    let Some(asked) = std::env::var_os(PROBE_KEY) else { return };
    let kind = Kind::ALL.into_iter().find(|kind| asked == kind.name());
    let answer = serde_json::to_vec(&kind.map(Kind::look).unwrap_or_default()).unwrap_or_default();
    // Nobody reads it if this fails, and the parent sees no answer.
    let _ = std::io::stdout().write_all(&[b"\n", ANSWER, &answer, b"\n"].concat());
    std::process::exit(0);
}

/// The devices of this machine, the processor first.
#[must_use]
pub fn probe() -> Vec<Device> {
    probe_report().devices
}

/// The devices of this machine, and what it lacks for others.
#[must_use]
pub fn probe_report() -> Probe {
    let ask_child = |kind: Kind| {
        let program = std::env::current_exe().map_err(|error| error.to_string());
        let found = program.and_then(|program| ask(Command::new(program).env(PROBE_KEY, kind.name()), PROBE_TIMEOUT));
        found.unwrap_or_else(|why| kind.broken(&why))
    };
    // A test's binary would run its tests again.
    let look = |kind: Kind| if ANSWERS.load(Ordering::Relaxed) { ask_child(kind) } else { kind.look() };
    let found = std::thread::scope(|scope| {
        let looks = Kind::ALL.map(|kind| scope.spawn(move || look(kind)));
        looks.map(|look| look.join().unwrap_or_default())
    });
    let mut all = Probe { devices: vec![cpu()], ..Probe::default() };
    for probe in found {
        all.devices.extend(probe.devices);
        all.notes.extend(probe.notes);
        all.faults.extend(probe.faults);
    }
    all
}

/// Runs a process that answers, and gives it up after `limit`. A process whose driver hangs in the kernel cannot even be killed, so
/// nothing waits for its end.
fn ask(command: &mut Command, limit: Duration) -> Result<Probe, String> {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("cannot ask: {error}"))?;
    let stdout = child.stdout.take().ok_or("no pipe")?;
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let lines = BufReader::new(stdout.take(ANSWER_BYTES_MAX)).split(b'\n').map_while(Result::ok);
        let answer = lines.filter_map(|line| line.strip_prefix(ANSWER).map(<[u8]>::to_vec)).next();
        // Nobody waits any more if this fails.
        let _ = sender.send(answer);
    });
    let found = match receiver.recv_timeout(limit) {
        Ok(Some(answer)) => {
            serde_json::from_slice(&answer).map_err(|error| format!("its answer is not understood: {error}"))
        }
        Ok(None) => Err(match ended(&mut child) {
            Some(status) => format!("it ended the process that asked, {status}"),
            None => "it closed the pipe of the process that asked".into(),
        }),
        Err(RecvTimeoutError::Timeout) => Err(format!("it did not answer in {} s", limit.as_secs_f32())),
        Err(RecvTimeoutError::Disconnected) => Err("its answer could not be read".into()),
    };
    // It has nothing more to say, and drivers may hang or crash at the end, too.
    let _ = child.kill();
    std::thread::spawn(move || child.wait());
    found
}

/// How a process ended that has closed its pipe, which it does when it ends.
fn ended(child: &mut std::process::Child) -> Option<ExitStatus> {
    for _ in 0..100 {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

#[cfg(test)]
mod tests;
