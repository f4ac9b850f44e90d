//! A broken GPU driver costs the GPU, not the node: the node starts on the CPU and reports what is wrong.
use crate::harness::{Turn, meshnode};
use meshnode::cluster::free_port;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// Builds in `folder` a CUDA driver that aborts every process that initializes it. `None` without a C compiler.
fn crashing_driver(folder: &Path) -> Option<()> {
    let source = folder.join("driver.c");
    let text = "#include <stdlib.h>\n\
                int cuDriverGetVersion(int *version) { *version = 13000; return 0; }\n\
                int cuInit(unsigned flags) { abort(); }\n";
    std::fs::write(&source, text).expect("a file");
    // A machine with a driver has the second name in another folder; the one built here takes precedence.
    for name in ["libcuda.so.1", "libcuda.so"] {
        let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(folder.join(name)).arg(&source).status();
        if !built.is_ok_and(|status| status.success()) {
            eprintln!("SKIPPED: no C compiler (cc) to build a driver with");
            return None;
        }
    }
    Some(())
}

/// The program with the CUDA driver in `folder` and no Vulkan driver.
fn with_driver(folder: &Path) -> Command {
    let mut command = Command::new(meshnode());
    command.env("LD_LIBRARY_PATH", folder).stdin(Stdio::null());
    for variable in ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"] {
        command.env(variable, folder.join("none.json"));
    }
    command
}

#[test]
fn a_node_starts_on_the_cpu_if_the_driver_crashes() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(()) = crashing_driver(folder.path()) else { return };
    let _turn = Turn::take();
    let data = folder.path().join("data");
    let data = data.to_string_lossy();
    let port = free_port().expect("a free port").to_string();
    let common = ["--device", "auto", "--no-mdns", "--listen", "127.0.0.1", "--data-dir", &data];
    let report = with_driver(folder.path()).args(["doctor", "--json", "--port", "0"]).args(common).output();
    let report: Value = serde_json::from_slice(&report.expect("the program runs").stdout).expect("JSON");
    let find = |subject: &str| report["findings"].as_array()?.iter().find(|f| f["subject"] == subject).cloned();
    let cuda = find("cuda").unwrap_or_else(|| panic!("nothing about cuda in {report}"));
    assert_eq!(cuda["verdict"], "warn");
    assert!(cuda["seen"].as_str().is_some_and(|seen| seen.contains("SIGABRT")), "{cuda}");
    assert!(cuda["advice"].as_str().is_some_and(|advice| advice.contains("nvidia-smi")), "{cuda}");
    assert!(find("device").is_some_and(|d| d["verdict"] == "ok" && d["seen"].to_string().contains("cpu")), "{report}");

    let log = folder.path().join("log");
    let mut node = with_driver(folder.path())
        .args(["up", "--api", "127.0.0.1:0", "--threads", "1", "--port", &port])
        .args(common)
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&log).expect("a log"))
        .spawn()
        .expect("the program runs");
    let mut ticket = String::new();
    let _ = BufReader::new(node.stdout.take().expect("piped")).read_line(&mut ticket); // empty if the node failed
    node.kill().expect("a process");
    node.wait().expect("its end");
    let log = std::fs::read_to_string(&log).expect("a log");
    assert!(ticket.starts_with("mesh1"), "{ticket}: {log}");
    assert!(log.contains("SIGABRT") && log.contains("its GPUs are not used"), "{log}");
}
