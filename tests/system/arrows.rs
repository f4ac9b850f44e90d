//! Architecture rules: allowed dependencies between packages, purity, and the one home of each third-party crate. A
//! failure here means that a change breaks a rule; ARCHITECTURE.md gives the reason for it.
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};
use system_tests::repository;

/// The workspace packages that each package may depend on, for builds and tests alike.
const ARROWS: &[(&str, &[&str])] = &[
    ("partitioner", &[]),
    ("node-core", &["partitioner"]),
    ("simnet", &["partitioner", "node-core"]),
    ("transport", &[]),
    ("kernels", &[]),
    ("kernels-models", &["kernels"]),
    ("kernels-grids", &["kernels"]),
    ("kernels-simulations", &["kernels", "kernels-grids"]),
    ("kernels-gpu-grids", &["kernels", "kernels-grids"]),
    ("kernels-gpu", &["kernels", "kernels-models", "kernels-grids", "kernels-gpu-grids"]),
    ("kernels-burn", &["kernels", "kernels-models", "kernels-grids"]),
    (
        "meshnode",
        &[
            "partitioner",
            "node-core",
            "transport",
            "kernels",
            "kernels-models",
            "kernels-grids",
            "kernels-simulations",
            "kernels-gpu",
        ],
    ),
    (
        "system-tests",
        &[
            "partitioner",
            "node-core",
            "transport",
            "kernels",
            "kernels-models",
            "kernels-simulations",
            "kernels-gpu",
            "meshnode",
            "simnet",
        ],
    ),
];

/// Third-party crates that the pure crates may use: none with access to a clock, file, socket or thread.
const PURE: &[(&str, &str, &[&str])] = &[
    ("partitioner", "partitioner/src/lib.rs", &["serde", "thiserror"]),
    (
        "node-core",
        "node/core/src/lib.rs",
        &["serde", "thiserror", "foca", "bincode", "bytes", "rand", "rand_chacha", "blake3"],
    ),
];

/// The packages that may use a runtime of GPUs, and these runtimes. What the other packages compile, no change to a runtime
/// recompiles; and they run where there is none.
const GPU_PACKAGES: &[&str] = &["kernels-gpu-grids", "kernels-gpu"];
const GPU_RUNTIMES: &[&str] = &["cubecl", "cubecl-runtime", "cudarc", "ash"];

/// Third-party crates with one home: the package that depends on each, and the paths in which its name may appear.
const HOMES: &[(&str, &str, &[&str])] = &[
    ("libp2p", "transport", &["transport/src/discovery"]),
    ("quinn", "transport", &["transport/src/quic"]),
    ("zstd", "transport", &["transport/src/compress.rs"]),
    ("bincode", "node-core", &["node/core/src/codec.rs"]),
    ("foca", "node-core", &["node/core/src/membership", "node/core/src/codec"]),
    ("sled", "meshnode", &["node/src/store.rs"]),
    ("axum", "meshnode", &["node/src/api"]),
    ("hyper_util", "meshnode", &["node/src/api"]),
    ("http_body", "meshnode", &["node/src/api"]),
    ("gif", "meshnode", &["node/src/output"]),
    ("flate2", "meshnode", &["node/src/output"]),
    ("burn", "kernels-burn", &["kernels/burn/"]),
];

#[test]
fn packages_depend_only_along_the_arrows() {
    let packages = packages();
    let known: BTreeSet<&str> = ARROWS.iter().map(|(name, _)| *name).collect();
    let found: BTreeSet<&str> = packages.keys().map(String::as_str).collect();
    assert_eq!(found, known, "the workspace's packages and the arrows drawn here");
    for (name, allowed) in ARROWS {
        for dependency in packages[*name].iter().filter(|dependency| known.contains(dependency.as_str())) {
            assert!(
                allowed.contains(&dependency.as_str()),
                "{name} may not depend on {dependency}, only on {allowed:?}"
            );
        }
    }
}

#[test]
fn only_gpu_packages_use_gpu_runtimes() {
    for (package, dependencies) in packages().iter().filter(|(name, _)| !GPU_PACKAGES.contains(&name.as_str())) {
        for runtime in GPU_RUNTIMES {
            assert!(
                !dependencies.contains(*runtime),
                "{package} may not depend on {runtime}: only {GPU_PACKAGES:?} may"
            );
        }
    }
}

#[test]
fn deciding_crates_are_pure() {
    let packages = packages();
    let ours: BTreeSet<&str> = ARROWS.iter().map(|(name, _)| *name).collect();
    for (name, root, allowed) in PURE {
        let text = read(&repository().join(root));
        assert!(text.lines().any(|line| line.trim() == "#![no_std]"), "{root} must say #![no_std]");
        let std_lines = lines_naming(&text, "std");
        assert!(std_lines.is_empty(), "{root} names std in lines {std_lines:?}");
        let manifest = normal_dependencies(name);
        for dependency in manifest.iter().filter(|dependency| !ours.contains(dependency.as_str())) {
            assert!(allowed.contains(&dependency.as_str()), "{name} is pure: {dependency} is not among {allowed:?}");
        }
        assert!(packages.contains_key(*name));
    }
}

/// Planted bugs are for the simulator's tests. `meshnode` asserts at compile time that it has none. This test asserts
/// that no other package turns them on, by default or through a dependency.
#[test]
fn only_the_simulator_plants_bugs() {
    for package in array(&metadata()["packages"]) {
        let name = string(&package["name"]);
        let features = package["features"].as_object().expect("features in cargo's metadata");
        for (feature, turns_on) in features {
            let plants = array(turns_on).iter().any(|on| string(on).contains("planted"));
            assert!(!plants || (name == "simnet" && feature == "planted"), "{name}'s feature {feature} plants bugs");
        }
        for dependency in array(&package["dependencies"]) {
            let on: Vec<String> = array(&dependency["features"]).iter().map(string).collect();
            assert!(!on.contains(&"planted".into()), "{name} plants bugs in {}", string(&dependency["name"]));
        }
    }
    let shell = read(&repository().join("node/src/lib.rs"));
    assert!(
        shell.contains("assert!(!node_core::PLANTED"),
        "node/src/lib.rs must assert that its core has no planted bugs"
    );
}

#[test]
fn third_party_crates_stay_in_their_homes() {
    let packages = packages();
    let sources = sources();
    let mut strays = Vec::new();
    for (dependency, owner, homes) in HOMES {
        for (package, dependencies) in &packages {
            let has = dependencies.contains(&dependency.replace('_', "-")) || dependencies.contains(*dependency);
            assert!(!has || package == owner, "{dependency} lives in {owner}; {package} may not depend on it");
        }
        for (path, text) in &sources {
            if homes.iter().any(|home| path.starts_with(home)) {
                continue;
            }
            let lines = lines_naming(text, dependency);
            if !lines.is_empty() {
                strays.push(format!("{path}, lines {lines:?}: only {homes:?} may name {dependency}"));
            }
        }
    }
    assert!(strays.is_empty(), "{}", strays.join("\n"));
}

#[test]
fn every_file_begins_with_why_it_exists() {
    let silent = |(path, text): &(String, String)| {
        let first = text.lines().find(|line| !line.trim().is_empty() && !line.starts_with("#!["));
        let why = first.and_then(|line| line.strip_prefix("//! "));
        let says = why.is_some_and(|why| why.len() > 4 && why != "Placeholder.");
        (!says).then(|| format!("{path} begins with {first:?}"))
    };
    let silent: Vec<String> = sources().iter().filter_map(silent).collect();
    assert!(silent.is_empty(), "each must begin with a `//!` line that says why it exists:\n{}", silent.join("\n"));
}

#[test]
fn naming_a_crate_differs_from_mentioning_it() {
    let text = "use ledger::Db;\n// ledger::Db is gone\nlet a = my_ledger::open();\nlet b = ::ledger::open(); // x\nlet c = \"ledger\";\n\
                use ledger as store;\nlet ledger_dir = 1;\nledger::open(\"http://x\")\n//! [`ledger::Db`]\npub use ledger;\n";
    assert_eq!(lines_naming(text, "ledger"), [1, 4, 6, 8, 10]);
}

/// The workspace packages with all their dependencies (normal, build, test), by name.
fn packages() -> BTreeMap<String, BTreeSet<String>> {
    let dependencies = |package: &Value| {
        array(&package["dependencies"]).iter().map(|dependency| string(&dependency["name"])).collect()
    };
    array(&metadata()["packages"]).iter().map(|package| (string(&package["name"]), dependencies(package))).collect()
}

/// A package's dependencies except dev-dependencies.
fn normal_dependencies(name: &str) -> BTreeSet<String> {
    let metadata = metadata();
    let package = array(&metadata["packages"]).iter().find(|package| package["name"] == name);
    let package = package.unwrap_or_else(|| panic!("no package {name}"));
    let dependencies = array(&package["dependencies"]).iter().filter(|dependency| dependency["kind"] != "dev");
    dependencies.map(|dependency| string(&dependency["name"])).collect()
}

fn metadata() -> Value {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let run = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(repository())
        .output()
        .expect("cargo runs");
    assert!(run.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&run.stderr));
    serde_json::from_slice(&run.stdout).expect("cargo metadata is JSON")
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).expect("a list in cargo's metadata")
}

fn string(value: &Value) -> String {
    value.as_str().expect("a string in cargo's metadata").to_string()
}

/// All Rust files of the repository, by path from the root.
fn sources() -> Vec<(String, String)> {
    let root = repository();
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("a folder that can be read").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push((from_root(&root, &path), read(&path)));
            }
        }
    }
    assert!(found.len() > 20, "the walk found the sources");
    found.sort();
    found
}

fn from_root(root: &Path, path: &Path) -> String {
    let inner: PathBuf = path.strip_prefix(root).expect("inside the repository").to_path_buf();
    inner.to_string_lossy().replace('\\', "/")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Line numbers (from 1) of lines whose code, without comments, names a crate: `name::…`, `use name…`, `extern crate
/// name`.
fn lines_naming(text: &str, name: &str) -> Vec<usize> {
    let names = |line: &str| {
        let code = line.split_once("//").map_or(line, |(code, _)| code);
        code.match_indices(name).any(|(at, _)| {
            let (before, after) = (&code[..at], &code[at + name.len()..]);
            let whole = !before.ends_with(is_word) && !after.starts_with(is_word);
            let imported =
                ["use", "crate"].contains(&before.trim_start_matches("::").trim().rsplit(' ').next().unwrap_or(""));
            let qualified = after.starts_with("::") && (!before.ends_with("::") || starts_path(before));
            whole && (qualified || imported)
        })
    };
    text.lines().enumerate().filter(|(_, line)| names(line)).map(|(index, _)| index + 1).collect()
}

/// Whether a trailing `::` begins a path (`::sled`) rather than continuing one (`crate::sled`).
fn starts_path(before: &str) -> bool {
    !before.trim_end_matches("::").ends_with(|c: char| is_word(c) || c == '>')
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
