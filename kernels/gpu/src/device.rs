//! Device discovery: the GPUs of this machine, and why a GPU cannot be used.
//!
//! A driver can hang, crash or panic, and CUDA keeps a context for the life of a process. So each driver is probed in a child
//! process, which answers with one line: a broken driver costs its own devices and nothing else. A program must call
//! [`use_cache`] and then [`answer_probe`] before anything else.
use std::io::{BufRead, BufReader, Read, Write};
use std::panic::catch_unwind;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use kernels::device::{Device, cpu};

use crate::error::panic_text;

pub(crate) mod cuda;
mod report;
pub(crate) mod toolkit;
mod vulkan;

use report::Kind;
pub use report::{Fault, Probe};
pub(crate) use vulkan::wgpu_device;

/// Caches compiled kernels in `dir/kernels`, and also searches `dir/cuda` for the CUDA compiler. Call it first in `main`, because
/// it may set `CUDA_PATH`: see `device/toolkit.rs`. A relative `dir` is ignored.
pub fn use_cache(dir: &Path) {
    if dir.is_absolute() {
        toolkit::use_cache(dir);
        crate::compile::keep_in(&dir.join("kernels"));
    }
}

/// Environment variable that tells a child process which driver to probe.
const PROBE_KEY: &str = "MESHNODE_PROBE_DEVICES";
/// Prefix of the answer line: drivers print to stdout too.
const ANSWER: &[u8] = b"meshnode-devices:";
/// Longer than any driver takes to start; after this the driver counts as stalled.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum size of an answer: room for dozens of devices.
const ANSWER_BYTES_MAX: u64 = 1 << 16;

static ANSWERS: AtomicBool = AtomicBool::new(false);

impl Kind {
    fn probe(self) -> Probe {
        let probe = match self {
            Self::Cuda => cuda::probe,
            Self::Vulkan => vulkan::probe,
        };
        catch_unwind(probe).unwrap_or_else(|panic| self.broken(&panic_text(panic.as_ref())))
    }
}

/// Answers and exits if this process was started to probe a driver. Call it in `main`, after [`use_cache`].
pub fn answer_probe() {
    ANSWERS.store(true, Ordering::Relaxed);
    let Some(asked) = std::env::var_os(PROBE_KEY) else { return };
    let kind = Kind::ALL.into_iter().find(|kind| asked == kind.name());
    let answer = serde_json::to_vec(&kind.map(Kind::probe).unwrap_or_default()).unwrap_or_default();
    // If this fails, the parent has stopped reading or sees no answer.
    let _ = std::io::stdout().write_all(&[b"\n", ANSWER, &answer, b"\n"].concat());
    std::process::exit(0);
}

/// The devices of this machine, the CPU first.
#[must_use]
pub fn probe() -> Vec<Device> {
    probe_report().devices
}

/// The devices of this machine, and why other devices are missing or cannot be used.
#[must_use]
pub fn probe_report() -> Probe {
    let ask_child = |kind: Kind| {
        let program = std::env::current_exe().map_err(|error| error.to_string());
        let found = program.and_then(|program| ask(Command::new(program).env(PROBE_KEY, kind.name()), PROBE_TIMEOUT));
        found.unwrap_or_else(|why| kind.broken(&why))
    };
    // A program that never calls `answer_probe`, such as a test binary, would run itself again.
    let probe = |kind: Kind| if ANSWERS.load(Ordering::Relaxed) { ask_child(kind) } else { kind.probe() };
    let found = std::thread::scope(|scope| {
        let probes = Kind::ALL.map(|kind| scope.spawn(move || probe(kind)));
        probes.map(|probe| probe.join().unwrap_or_default())
    });
    let mut all = Probe { devices: vec![cpu()], ..Probe::default() };
    for probe in found {
        all.devices.extend(probe.devices);
        all.notes.extend(probe.notes);
        all.faults.extend(probe.faults);
    }
    all
}

/// Runs a probe process and gives up after `limit`. A process whose driver hangs in the OS kernel cannot be killed, so nothing
/// waits for it to exit.
fn ask(command: &mut Command, limit: Duration) -> Result<Probe, String> {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("cannot start the probe process: {error}"))?;
    let stdout = child.stdout.take().ok_or("no pipe")?;
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        let lines = BufReader::new(stdout.take(ANSWER_BYTES_MAX)).split(b'\n').map_while(Result::ok);
        let answer = lines.filter_map(|line| line.strip_prefix(ANSWER).map(<[u8]>::to_vec)).next();
        // If this fails, the receiver has timed out.
        let _ = sender.send(answer);
    });
    let found = match receiver.recv_timeout(limit) {
        Ok(Some(answer)) => {
            serde_json::from_slice(&answer).map_err(|error| format!("its answer cannot be parsed: {error}"))
        }
        Ok(None) => Err(match ended(&mut child) {
            Some(status) => format!("it terminated the probe process: {status}"),
            None => "it closed the output of the probe process".into(),
        }),
        Err(RecvTimeoutError::Timeout) => Err(format!("it did not answer within {} s", limit.as_secs_f32())),
        Err(RecvTimeoutError::Disconnected) => Err("its answer could not be read".into()),
    };
    // The answer is complete, and drivers may also hang or crash at exit.
    let _ = child.kill();
    std::thread::spawn(move || child.wait());
    found
}

/// The exit status of a process that has closed its pipe, usually by exiting; `None` if it still runs after 0.5 s.
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
