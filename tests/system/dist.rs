//! The contents of `dist/`: the release script's output, and the agreement of unit, image and sample configuration with
//! the program.
use crate::harness::meshnode;
use std::path::Path;
use std::process::{Command, Output};
use system_tests::repository;

fn text(path: &str) -> String {
    let path = repository().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn ran(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn on_path(tool: &str) -> bool {
    let found =
        Command::new("sh").args(["-c", &format!("command -v {tool}")]).output().is_ok_and(|o| o.status.success());
    if !found {
        eprintln!("SKIPPED: no {tool} on this machine");
    }
    found
}

fn build(out: &Path) {
    let script = repository().join("dist/build");
    ran(Command::new("bash").arg(script).arg("--out").arg(out).arg("--binary").arg(meshnode()));
}

/// The release is stripped, runnable and complete, its checksums verify, and a second build is identical.
#[test]
fn a_release_is_stripped_and_its_checksums_verify() {
    if !on_path("strip") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    build(&one);
    ran(Command::new("sha256sum").args(["--check", "--strict", "SHA256SUMS"]).current_dir(&one));
    let sums = std::fs::read_to_string(one.join("SHA256SUMS")).expect("checksums");
    let names: Vec<&str> = sums.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(names.len(), 2, "the binary and the archive: {sums}");
    let binary = one.join(names[0]);
    let version = ran(Command::new(&binary).arg("--version"));
    assert!(String::from_utf8_lossy(&version.stdout).starts_with("meshnode "), "{version:?}");
    let (stripped, whole) = (size(&binary), size(meshnode()));
    assert!(stripped < whole / 2, "{stripped} of {whole} bytes left: the binary still has debug information");

    let list = ran(Command::new("tar").arg("tzf").arg(one.join(names[1])));
    let list = String::from_utf8_lossy(&list.stdout);
    for file in [
        "meshnode",
        "README.md",
        "docs/job-files.md",
        "node/examples/cavity.toml",
        "LICENSE-MIT",
        "meshnode.service",
        "meshnode.toml",
        "completions/meshnode.bash",
    ] {
        assert!(list.lines().any(|line| line.ends_with(&format!("/{file}"))), "{file} is not in the archive: {list}");
    }

    build(&two);
    assert_eq!(sums, std::fs::read_to_string(two.join("SHA256SUMS")).expect("checksums"), "not reproducible");
    let left: Vec<_> = std::fs::read_dir(&one).expect("a folder").flatten().map(|e| e.file_name()).collect();
    assert_eq!(left.len(), 3, "temporary files are left: {left:?}");
}

fn size(path: &Path) -> u64 {
    std::fs::metadata(path).expect("a file").len()
}

#[test]
fn the_release_script_rejects_unknown_arguments() {
    let script = repository().join("dist/build");
    let output = Command::new("bash").arg(&script).arg("--fast").output().expect("bash");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--fast"), "{output:?}");
    let output = Command::new("bash").arg(&script).args(["--binary", "/nowhere"]).output().expect("bash");
    assert_eq!(output.status.code(), Some(5));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nowhere"), "{output:?}");
}

/// The help texts of `up` and of the global options, with their environment variables.
fn options_of_up() -> String {
    let help = |arguments: &[&str]| ran(Command::new(meshnode()).args(arguments)).stdout;
    String::from_utf8_lossy(&[help(&["--help"]), help(&["up", "--help"])].concat()).into_owned()
}

/// systemd accepts the unit without a warning and rates its exposure; the program accepts the unit's command line.
#[test]
fn the_systemd_unit_is_accepted_by_systemd_and_by_the_program() {
    let unit = text("dist/meshnode.service");
    let start =
        unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/meshnode ")).expect("ExecStart");
    let arguments: Vec<&str> = start.split(' ').collect();
    let help = ran(Command::new(meshnode()).args(&arguments[2..]).arg("--help"));
    assert!(String::from_utf8_lossy(&help.stdout).contains("--data-dir"), "`{start}` does not start a node");
    let options = options_of_up();
    for line in unit.lines().filter(|line| line.starts_with("Environment=MESHNODE_")) {
        let variable = line["Environment=".len()..].split('=').next().expect("a name");
        assert!(options.contains(variable), "no option reads {variable}");
    }
    if !on_path("systemd-analyze") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let here = dir.path().join("meshnode.service");
    let (program, there) = (meshnode().display().to_string(), "/usr/local/bin/meshnode");
    std::fs::write(&here, unit.replace(&format!("ExecStart={there}"), &format!("ExecStart={program}")))
        .expect("a unit");
    let verified = ran(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&here));
    let said = String::from_utf8_lossy(&verified.stderr);
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("meshnode.service")).collect();
    assert!(ours.is_empty(), "{ours:?}");
    // 10 is a service without any protection, 0 a service without any permissions.
    ran(Command::new("systemd-analyze").args(["security", "--offline=yes", "--threshold=40"]).arg(&here));
}

/// The program reads every key of the sample and accepts its value.
#[test]
fn the_sample_configuration_is_accepted_with_every_key_turned_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("meshnode.toml");
    let keys = |line: &str| line.strip_prefix("# ").filter(|rest| rest.contains(" = ")).map(str::to_owned);
    let sample = text("dist/meshnode.toml");
    let on: Vec<String> = sample.lines().filter_map(keys).collect();
    assert!(on.len() >= 12, "{on:?}");
    std::fs::write(&path, on.join("\n")).expect("a file");
    let (read, _) = meshnode::config::ConfigFile::load(Some(&path)).expect("the sample is valid");
    assert_eq!((read.port, read.threads), (Some(meshnode::config::PORT_DEFAULT), Some(8)));
}

/// The image is built with the repository's toolchain from existing files, does not run as root, and publishes the
/// ports of a node.
#[test]
fn the_image_agrees_with_the_repository() {
    let file = text("dist/Dockerfile").replace("\\\n", " ");
    let steps: Vec<(&str, &str)> =
        file.lines().filter(|l| !l.starts_with('#')).filter_map(|line| line.split_once(' ')).collect();
    let known = [
        "ARG",
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENV",
        "USER",
        "VOLUME",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    ];
    for (step, rest) in &steps {
        assert!(known.contains(step), "{step} {rest}");
    }
    let toolchain = text("rust-toolchain.toml");
    let channel = toolchain.split('"').nth(1).expect("a channel");
    assert!(file.contains(&format!("FROM rust:{channel}-")), "the image's Rust version is not {channel}");
    let last = |wanted: &str| steps.iter().rposition(|(step, _)| *step == wanted).expect("the step");
    assert!(steps[last("USER")].1 != "root" && last("USER") < last("ENTRYPOINT"), "the image runs as root");
    let port = meshnode::config::PORT_DEFAULT;
    assert_eq!(steps[last("EXPOSE")].1, format!("{port}/tcp {port}/udp {}/udp", port + 1));
    for list in ["VOLUME", "ENTRYPOINT", "CMD"] {
        let parsed: Result<Vec<String>, _> = serde_json::from_str(steps[last(list)].1);
        assert!(parsed.is_ok(), "{list} is not a JSON list: {parsed:?}");
    }
    let environment = steps[last("ENV")].1;
    let options = options_of_up();
    for variable in
        environment.split(' ').filter_map(|pair| pair.split('=').next()).filter(|v| v.starts_with("MESHNODE_"))
    {
        assert!(options.contains(variable), "no option reads {variable}");
    }
    for (_, copied) in steps.iter().filter(|(step, _)| *step == "COPY") {
        let from = copied.split(' ').next().expect("a source");
        assert!(from.starts_with("--from=build") || repository().join(from).exists(), "{copied}");
    }
}
