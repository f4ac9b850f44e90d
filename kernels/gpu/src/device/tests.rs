//! Broken drivers, built by the tests: each costs its own devices and is reported.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::*;

/// The probe process: this test binary, which answers like a program if [`PROBE_KEY`] is set.
#[test]
fn child() {
    if std::env::var_os(PROBE_KEY).is_some() {
        answer_probe();
    }
}

/// Probes CUDA in a child process whose loader searches `folder` first.
fn ask_with(folder: &Path, limit: Duration) -> Result<Probe, String> {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--exact", "device::tests::child", "--nocapture"]);
    ask(command.env(PROBE_KEY, Kind::Cuda.name()).env("LD_LIBRARY_PATH", folder), limit)
}

/// Builds a driver from C source. `None` if there is no C compiler.
fn driver(folder: &Path, text: &str) -> Option<PathBuf> {
    let (source, library) = (folder.join("driver.c"), folder.join(toolkit::DRIVER));
    std::fs::write(&source, text).expect("a file");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    if !built.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: no C compiler (cc) to build a driver with");
        return None;
    }
    // cudarc looks for this name first, and a machine with a driver may have it in another folder.
    std::fs::copy(&library, folder.join("libcuda.so")).expect("a copy");
    Some(library)
}

const VERSION: &str = "int cuDriverGetVersion(int *version) { *version = 12040; return 0; }\n";
/// More than a busy machine needs to start a process.
const PATIENT: Duration = Duration::from_secs(60);

#[test]
fn a_driver_that_crashes_is_reported_by_its_signal() {
    let folder = tempfile::tempdir().unwrap();
    let text = format!("{VERSION}#include <stdlib.h>\nint cuInit(unsigned flags) {{ abort(); }}");
    if driver(folder.path(), &text).is_some() {
        let why = ask_with(folder.path(), PATIENT).unwrap_err();
        assert!(why.contains("SIGABRT"), "{why}");
        let fault = &Kind::Cuda.broken(&why).faults[0];
        assert!(fault.seen.contains("SIGABRT") && fault.advice.contains("nvidia-smi"), "{fault}");
    }
}

#[test]
fn a_driver_that_hangs_times_out() {
    let folder = tempfile::tempdir().unwrap();
    let text = format!("{VERSION}#include <unistd.h>\nint cuInit(unsigned flags) {{ for (;;) pause(); }}");
    if driver(folder.path(), &text).is_some() {
        let why = ask_with(folder.path(), Duration::from_millis(500)).unwrap_err();
        assert!(why.contains("did not answer within 0.5 s"), "{why}");
    }
}

#[test]
fn a_driver_that_hangs_at_exit_does_not_block_the_probe() {
    let folder = tempfile::tempdir().unwrap();
    let hang = "static void end(void) { for (;;) pause(); }\n";
    let init = "int cuInit(unsigned flags) { atexit(end); return 100; }";
    let text = format!("#include <stdlib.h>\n#include <unistd.h>\n{VERSION}{hang}{init}");
    if driver(folder.path(), &text).is_some() {
        let probe = ask_with(folder.path(), PATIENT).unwrap();
        assert_eq!(probe.notes, ["cuda: the driver finds no device"]);
    }
}

#[test]
fn a_driver_error_is_reported_with_advice() {
    let folder = tempfile::tempdir().unwrap();
    let error = "int cuGetErrorString(int error, const char **text) { *text = \"mismatch\"; return 0; }\n\
                 int cuGetErrorName(int error, const char **text) { *text = \"MISMATCH\"; return 0; }\n";
    let text = format!("{VERSION}{error}int cuInit(unsigned flags) {{ return 803; }}");
    if driver(folder.path(), &text).is_some() {
        let probe = ask_with(folder.path(), PATIENT).unwrap();
        assert!(probe.devices.is_empty() && probe.notes.is_empty(), "{probe:?}");
        assert!(probe.faults[0].advice.contains("restart the machine"), "{probe:?}");
    }
}

#[test]
fn a_driver_that_lacks_functions_is_a_fault_and_no_crash() {
    let folder = tempfile::tempdir().unwrap();
    if driver(folder.path(), "int nothing;").is_some() {
        let probe = ask_with(folder.path(), PATIENT).unwrap();
        assert!(probe.devices.is_empty() && probe.faults.len() == 1, "{probe:?}");
    }
}

#[test]
fn a_file_that_is_not_a_library_is_not_used_as_a_driver() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", toolkit::DRIVER] {
        std::fs::write(folder.path().join(name), b"not a library").unwrap();
    }
    let probe = ask_with(folder.path(), PATIENT).unwrap();
    // A machine with a driver in another folder finds that one.
    let elsewhere = !probe.devices.is_empty() || probe.faults.iter().any(|fault| fault.seen.contains("NVRTC"));
    assert!(elsewhere || format!("{probe:?}").contains(toolkit::DRIVER), "{probe:?}");
}

#[test]
fn a_process_with_an_invalid_answer_is_a_fault() {
    let mut command = Command::new("sh");
    command.args(["-c", "printf 'noise\\377\\nmeshnode-devices:{\\n'"]);
    let why = ask(&mut command, PATIENT).unwrap_err();
    assert!(why.contains("cannot be parsed"), "{why}");
    let why = ask(Command::new("sh").args(["-c", "exit 3"]), PATIENT).unwrap_err();
    assert!(why.contains("exit status: 3"), "{why}");
}
