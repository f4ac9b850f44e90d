//! Grid simulations on real processes: the state hash of a run depends neither on the number of nodes, nor on lost
//! nodes, nor on the checkpoint that it resumed from.
use crate::harness::{JOIN_MAX, Mesh, meshnode};
use meshnode::cluster::LocalNode;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use system_tests::relay::Link;

const RUN_MAX: Duration = Duration::from_secs(240);
/// Memory of a node that is too small for a grid of `SIZE` (48 MiB of cells without standbys, and 16 MiB per tile).
const MEMORY: u64 = 64 << 20;
/// The same with hot standbys, which need half as much again: 87 MiB on one node. However four such nodes share the
/// grid, every tile's standby fits: a node has room for two thirds of the cells, in two tiles.
const WITH_STANDBYS: u64 = 86 << 20;
/// Memory of a node so small that the grid needs three nodes.
const THIRD: u64 = 45 << 20;
const SIZE: u32 = 832;

/// A decaying vortex, long enough for a fault during the run.
fn job(steps: u32, more: &str) -> String {
    format!(
        r#"name = "vortices"
steps = {steps}
check_every = 50
{more}
[grid]
size = [{SIZE}, {SIZE}]

[rule]
name = "d2q9"
viscosity = 0.02

[initial]
velocity = ["0.04*cos(2*pi*x/nx)*sin(2*pi*y/ny)", "-0.04*sin(2*pi*x/nx)*cos(2*pi*y/ny)"]

[[output]]
kind = "png"
quantity = "vorticity"
every = 100
size_max = 64
"#
    )
}

struct Run {
    child: Child,
    lines: std::sync::mpsc::Receiver<Value>,
}

/// `meshnode submit --wait --json`, on a node or (with `None`) in the submitting process.
fn submit(node: Option<&LocalNode>, file: &Path, out: &Path, flags: &[&str]) -> Run {
    let api = node.map_or_else(|| "127.0.0.1:1".to_owned(), |node| node.api.to_string());
    let mut child = Command::new(meshnode())
        .args(["submit", "--wait", "--json", "--api", &api, "--out"])
        .arg(out)
        .args(flags)
        .arg(file)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("the program runs");
    let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
    let (sender, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in stdout.lines().map_while(Result::ok) {
            let line = serde_json::from_str(&line).expect("JSON lines");
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    Run { child, lines }
}

impl Run {
    /// The first report that satisfies `what`; the last report if the output ends before.
    fn until(&self, what: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + RUN_MAX;
        let mut last = Value::Null;
        while Instant::now() < end {
            match self.lines.recv_timeout(Duration::from_millis(200)) {
                Ok(report) if what(&report) => return report,
                Ok(report) => last = report,
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return last,
            }
        }
        panic!("no such report within {RUN_MAX:?}; the last one: {last}");
    }

    /// The final report.
    fn finish(mut self) -> Value {
        let report = self.until(|report| report["state"] == "done" || report["state"] == "failed");
        let status = self.child.wait().expect("it ends");
        assert!(status.success() && report["state"] == "done", "{report}");
        report
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn hash(report: &Value) -> String {
    report["state_hash"].as_str().expect("a hash").to_owned()
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn job(&self, text: &str) -> PathBuf {
        let path = self.0.path().join("job.toml");
        std::fs::write(&path, text).expect("a file");
        path
    }

    fn out(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// Owners of tiles that have a standby with cells.
fn with_standby(report: &Value) -> Vec<&str> {
    let tiles = report["tiles"].as_array().into_iter().flatten();
    tiles.filter(|tile| tile["standby"]["step"].is_u64()).filter_map(|tile| tile["name"].as_str()).collect()
}

/// Whether a run survives the loss of its coordinator: a tile on the coordinator, if any, has a standby with cells, and
/// the other participants are a majority.
fn survives_loss_of(report: &Value, coordinator: &str) -> bool {
    let tiles = || report["tiles"].as_array().into_iter().flatten();
    let names = tiles().flat_map(|tile| [&tile["name"], &tile["standby"]["name"]]).filter_map(Value::as_str);
    let all: BTreeSet<&str> = names.collect();
    let others = all.iter().filter(|name| **name != coordinator).count();
    let owns = tiles().any(|tile| tile["name"] == coordinator);
    2 * others > all.len() && (!owns || with_standby(report).contains(&coordinator))
}

/// The report of a run on one node with unlimited memory.
fn solo(folder: &Folder, steps: u32) -> Value {
    let mut mesh = Mesh::new();
    mesh.start("solo", None);
    let report = submit(Some(&mesh.nodes[0]), &folder.job(&job(steps, "")), &folder.out("solo"), &[]).finish();
    assert_eq!(report["tiles"].as_array().map(Vec::len), Some(1), "{report}");
    report
}

fn mesh(nodes: usize, memory: u64) -> Mesh {
    let mut mesh = Mesh::new();
    for i in 0..nodes {
        mesh.start(&format!("n{i}"), Some(memory));
    }
    mesh.wait_members(nodes);
    mesh
}

/// The pictures of a run, with their names.
fn pictures(out: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![out.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "png") {
                let name = path.file_name().expect("a name").to_string_lossy().into_owned();
                found.push((name, std::fs::read(&path).expect("a picture")));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn a_run_survives_lost_nodes_with_the_hash_of_an_undisturbed_run() {
    let folder = Folder::new();
    // For measurements: more kills, longer runs, other standby tiers.
    let number = |name: &str, usual: u32| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    let (kills, steps) = (number("GRID_KILLS", 2), number("GRID_STEPS", 1200));
    let tier = std::env::var("GRID_STANDBY").unwrap_or_else(|_| "hot".into());
    let alone = solo(&folder, steps);
    for kill in 0..kills {
        let mut mesh = mesh(4, WITH_STANDBYS);
        let text = job(steps, &format!("standby = {tier:?}"));
        let file = folder.job(&text);
        let api = mesh.nodes[0].api.to_string();
        let plan = Command::new(meshnode()).arg("plan").arg(&file).args(["--json", "--api", &api]).output();
        let plan: Value = serde_json::from_slice(&plan.expect("the program runs").stdout).expect("a plan");
        let out = folder.out(&format!("hot{kill}"));
        let run = submit(Some(&mesh.nodes[0]), &file, &out, &[]);
        // In the middle of the run, once standbys are current.
        let at = u64::from(steps / 4 + kill * 37 * (steps / 600) % (steps / 2));
        let owns = |names: &[&str], node: &LocalNode| names.contains(&node.name.as_str());
        // On a busy machine standbys may be late, or no node may have memory for them; then the run restarts.
        let late = u64::from(steps / 4 * 3);
        let report = run.until(|report| {
            let (step, with_standby) = (report["step"].as_u64(), with_standby(report));
            let beside = with_standby.iter().any(|name| *name != "n0");
            step >= Some(at) && beside || step >= Some(late) || report["state"] == "failed"
        });
        let all: Vec<&str> =
            report["tiles"].as_array().into_iter().flatten().filter_map(|tile| tile["name"].as_str()).collect();
        assert!(all.len() > 1, "two nodes are needed: {report}");
        let with_standby = with_standby(&report);
        let best = mesh.nodes.iter().skip(1).position(|node| owns(&with_standby, node));
        let any = mesh.nodes.iter().skip(1).position(|node| owns(&all, node));
        let victim = &mut mesh.nodes[1 + best.or(any).expect("an owner beside the submitter")];
        victim.kill();
        let lost = all.iter().position(|name| *name == victim.name).expect("its tile");
        let predicted = plan["standbys"].as_array().and_then(|all| all.iter().find(|standby| standby["tile"] == lost));
        let predicted = predicted.map_or(Value::Null, |standby| standby["stall_ms"].clone());
        if predicted.is_null() {
            eprintln!("no standby was planned for this tile: {plan}");
        }
        let report = run.finish();
        assert_eq!(hash(&report), hash(&alone), "{report}");
        // More than one if the machine stalls for longer than a lease.
        assert!(report["losses"].as_u64() >= Some(1), "{report}");
        eprintln!("killed at step {at}: {} ms without a step, {predicted} predicted", report["longest_stall_ms"]);
        assert_eq!(pictures(&out), pictures(&folder.out("solo")), "all pictures exist and are equal");
    }
}

#[test]
fn a_run_resumes_from_its_checkpoint_on_another_number_of_nodes() {
    let folder = Folder::new();
    let alone = solo(&folder, 400);
    let out = folder.out("run");
    let file = folder.job(&job(400, "checkpoint_every = 100"));
    {
        let mesh = mesh(3, MEMORY);
        let run = submit(Some(&mesh.nodes[0]), &file, &out, &[]);
        run.until(|report| report["checkpoint"].as_u64() >= Some(100) || report["state"] == "failed");
        // All nodes of the mesh are killed in the middle of the run.
    }
    let mut other = Mesh::new();
    other.start("other", None);
    let report = submit(Some(&other.nodes[0]), &file, &out, &["--resume"]).finish();
    assert!(report["from_step"].as_u64() >= Some(100), "{report}");
    assert_eq!(hash(&report), hash(&alone), "{report}");
    assert_eq!(pictures(&out), pictures(&folder.out("solo")));

    // A checkpoint of another simulation is rejected by name.
    let text = job(400, "checkpoint_every = 100").replace("0.02", "0.03");
    let file = folder.job(&text);
    let rejected = |file: &Path| {
        let output = Command::new(meshnode())
            .args(["submit", "--wait", "--resume", "--api", &other.nodes[0].api.to_string(), "--out"])
            .arg(&out)
            .arg(file)
            .output()
            .expect("the program runs");
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(rejected(&file).contains("another simulation"), "{}", rejected(&file));
}

/// Over a link of 1 Gbit/s and 20 ms round trip, compares two nodes of one thread each with one node of two threads.
/// For measurements, `GRID_SIZE` sets the grid size: the hashes must agree, the speed depends on the machine.
#[test]
fn over_a_slow_link_the_hash_is_the_same() {
    let folder = Folder::new();
    let size = std::env::var("GRID_SIZE").ok().and_then(|text| text.parse().ok()).unwrap_or(SIZE);
    let steps = if size == SIZE { 300 } else { 2000 };
    let text = job(steps, "").replace(&format!("[{SIZE}, {SIZE}]"), &format!("[{size}, {size}]"));
    let file = folder.job(&text.replace("every = 100", &format!("every = {steps}")));
    let alone = submit(None, &file, &folder.out("alone"), &["--threads", "2", "--device", "cpu"]).finish();
    let mut mesh = Mesh::relayed(1);
    let narrow = Link { latency: Duration::from_millis(10), bytes_per_second: Some(125_000_000), ..Link::PLAIN };
    mesh.relay.as_ref().expect("a relay").links(narrow);
    let memory = if size == SIZE { Some(MEMORY) } else { None };
    for i in 0..2 {
        mesh.start(&format!("n{i}"), memory);
    }
    mesh.wait_members(2);
    // The round trip is measured before it is used for planning.
    std::thread::sleep(Duration::from_secs(3));
    let report = submit(Some(&mesh.nodes[0]), &file, &folder.out("two"), &[]).finish();
    assert_eq!(report["tiles"].as_array().map(Vec::len), Some(2), "{report}");
    assert_eq!(hash(&report), hash(&alone), "{report}");
    let (two, one) = (report["mlups"].as_f64(), alone["mlups"].as_f64());
    let ratio = two.zip(one).map(|(two, one)| two / one);
    eprintln!("{size}²: {one:?} MLUPS on one node, {two:?} on two, {ratio:?}, halo depth {} steps", report["depth"]);
}

/// The report of a run's successor coordinator among `nodes`, once `done` holds.
fn successor_report(nodes: &[LocalNode], limit: Duration, done: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + limit;
    let (mut last, mut lists) = (Value::Null, Vec::new());
    while Instant::now() < end {
        lists.clear();
        for node in nodes {
            let Ok(list) = node.get("/api/v1/grids") else { continue };
            let coordinated = |job: &&Value| job["role"] == "coordinator";
            // Two nodes may coordinate it for a moment; one of them then ends its run.
            let goes_on = |job: &&Value| last.is_null() || job["state"] != "failed";
            if let Some(job) = list.as_array().and_then(|jobs| jobs.iter().find(coordinated)).filter(goes_on) {
                last = job.clone();
            }
            lists.push(list);
        }
        if done(&last) {
            return last;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("no such report within {limit:?}; the last one: {last}; the nodes list {lists:?}");
}

/// Whether a node has a replica of another node's checkpoint.
fn mirrors(node: &LocalNode) -> bool {
    let folders = |folder: PathBuf| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let steps = folders(node.data_dir.join("simulations")).flat_map(|job| folders(job.join("checkpoints")));
    steps.into_iter().any(|step| step.join("manifest.json").is_file())
}

/// More steps than any test waits for: such a run only ends by being cancelled, however fast the machine is.
const ENDLESS: u32 = 1_000_000;

/// A job that also writes its whole field, to files that [`fields`] lists.
fn job_with_fields(steps: u32, more: &str) -> String {
    job(steps, more) + "\n[[output]]\nkind = \"vtk\"\nquantity = \"vorticity\"\nevery = 250\n"
}

/// The field files that a run wrote after a step, with their steps.
fn fields(out: &Path, after: u64) -> Vec<(u64, PathBuf)> {
    let mut found = Vec::new();
    let mut folders = vec![out.to_owned()];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "vti") {
                let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
                let digits = name.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
                found.extend(digits.parse().ok().filter(|step| *step > after).map(|step| (step, path)));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn a_run_survives_the_loss_of_its_coordinator() {
    let folder = Folder::new();
    // A coordinator is replaced only if a majority of the participants agrees: of three tile owners two are left.
    for (standby, checkpoints, memory) in [("hot", "", WITH_STANDBYS), ("none", "checkpoint_every = 200", THIRD)] {
        let mut mesh = mesh(4, memory);
        let file = folder.job(&job_with_fields(ENDLESS, &format!("standby = {standby:?}\n{checkpoints}")));
        let run = submit(Some(&mesh.nodes[0]), &file, &folder.out(standby), &[]);
        let report = run.until(|report| {
            let ready = standby == "none" || survives_loss_of(report, "n0");
            report["step"].as_u64() >= Some(200) && ready || report["state"] == "failed"
        });
        assert_eq!(report["state"], "running", "{report}");
        let tiles = report["tiles"].as_array().map_or(0, Vec::len);
        assert!(tiles >= if standby == "hot" { 2 } else { 3 }, "{report}");
        let end = Instant::now() + JOIN_MAX;
        while standby == "none" && !mesh.nodes[1..].iter().any(mirrors) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        mesh.nodes[0].kill();
        // The last file may be incomplete: wait for two files and compare the first.
        let written = |job: &Value| match (job["out"].as_str(), job["from_step"].as_u64()) {
            (Some(out), Some(from)) => fields(Path::new(out), from),
            _ => Vec::new(),
        };
        let report =
            successor_report(&mesh.nodes[1..], RUN_MAX, |job| written(job).len() >= 2 || job["state"] == "failed");
        assert_eq!(report["state"], "running", "{report}");
        assert!(report["from_step"].as_u64() >= Some(100), "{standby}: the run restarted from step 0: {report}");
        let (step, field) = written(&report).swap_remove(0);
        let field = std::fs::read(field).expect("a field");
        drop(mesh);
        let solo = folder.out(&format!("solo {standby}"));
        let mut alone = Mesh::new();
        alone.start("solo", None);
        let file = folder.job(&job_with_fields(u32::try_from(step).expect("a step"), ""));
        submit(Some(&alone.nodes[0]), &file, &solo, &[]).finish();
        let (last, expected) = fields(&solo, 0).pop().expect("fields");
        assert_eq!(last, step);
        assert!(
            field == std::fs::read(expected).expect("a field"),
            "step {step} differs from a run on one node: {report}"
        );
        eprintln!("{standby}: from step {}, {} ms without a step", report["from_step"], report["longest_stall_ms"]);
    }
}

/// The exit code and the stderr of a submission that ends immediately.
fn answer(node: &LocalNode, file: &Path, out: &Path, flags: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(meshnode())
        .args(["submit", "--wait", "--api", &node.api.to_string(), "--out"])
        .arg(out)
        .args(flags)
        .arg(file)
        .output()
        .expect("the program runs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_finished_run_is_replaced_only_on_request_and_restored_if_the_replacement_is_interrupted() {
    let folder = Folder::new();
    let mut mesh = Mesh::new();
    mesh.start("solo", None);
    let (node, out) = (&mesh.nodes[0], folder.out("run"));
    let file = folder.job(&job(200, "checkpoint_every = 100"));
    submit(Some(node), &file, &out, &[]).finish();
    let before = pictures(&out);
    let (code, said) = answer(node, &file, &out, &[]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("a finished run of 200 steps (vortices)"), "{said}");
    assert!(said.contains("--resume") && said.contains("--overwrite"), "{said}");
    // The rejected submission created no job.
    let listed = node.get("/api/v1/grids").expect("a list");
    assert_eq!(listed.as_array().map(Vec::len), Some(1), "{listed}");
    assert_eq!(pictures(&out), before);

    // Ctrl-C before the first checkpoint of the new run.
    let long = folder.job(&job(1_000_000, "checkpoint_every = 500000"));
    let mut run = submit(Some(node), &long, &out, &["--overwrite"]);
    run.until(|report| report["step"].as_u64() >= Some(100) || report["state"] == "failed");
    let interrupted = Command::new("kill").args(["-INT", &run.child.id().to_string()]).status();
    assert!(interrupted.expect("kill runs").success());
    assert_eq!(run.child.wait().expect("it ends").code(), Some(130));
    let file = folder.job(&job(200, "checkpoint_every = 100"));
    let (code, said) = answer(node, &file, &out, &[]);
    assert!(code == Some(2) && said.contains("the run that it was to replace: a finished run of 200 steps"), "{said}");
    let (code, said) = answer(node, &file, &out, &["--resume"]);
    assert!(code == Some(2) && said.contains("the checkpoint is of step 200, and the job has 200 steps"), "{said}");
    assert_eq!(pictures(&out), before, "all pictures are restored");
    // The restored run can be resumed.
    let more = folder.job(&job(300, "checkpoint_every = 100"));
    let report = submit(Some(node), &more, &out, &["--resume"]).finish();
    assert_eq!(report["from_step"], 200, "{report}");
    assert_eq!(pictures(&out).len(), before.len() + 1);
    // With `--overwrite` the run is replaced.
    submit(Some(node), &folder.job(&job(100, "")), &out, &["--overwrite"]).finish();
    assert_eq!(pictures(&out).len(), 2);
    assert!(!out.join("replaced.run").exists() && !out.join("checkpoints").exists());
}

/// Peak resident memory of a node process, in MiB.
fn resident_peak(node: &LocalNode) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.pid())).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("its peak");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") >> 10
}

/// `GRID_CHECKPOINT_MIB=512 cargo test --release -p system-tests within_its_memory` runs it at full size.
#[test]
fn a_coordinator_takes_checkpoints_of_a_grid_many_times_its_memory_within_its_memory() {
    let folder = Folder::new();
    let mib: u64 = std::env::var("GRID_CHECKPOINT_MIB").ok().and_then(|text| text.parse().ok()).unwrap_or(160);
    // Nine floats per cell.
    let side = (((mib << 20) / 36) as f64).sqrt() as u64 / 64 * 64;
    let text = |steps: u32| {
        let text =
            job(steps, "checkpoint_every = 4").replace(&format!("[{SIZE}, {SIZE}]"), &format!("[{side}, {side}]"));
        text[..text.find("[[output]]").expect("an output")].to_owned()
    };
    let mut mesh = Mesh::new();
    mesh.start("n0", Some(100 << 20));
    // Each of the two nodes could compute the whole grid: two states of a step, and a saved one.
    for name in ["n1", "n2"] {
        mesh.start(name, Some(4 * (mib << 20) + (64 << 20)));
    }
    mesh.wait_members(3);
    let (file, out) = (folder.job(&text(100_000)), folder.out("run"));
    let run = submit(Some(&mesh.nodes[0]), &file, &out, &[]);
    let report = run.until(|report| report["checkpoint"].as_u64() >= Some(4) || report["state"] == "failed");
    let owners: Vec<&str> =
        report["tiles"].as_array().into_iter().flatten().filter_map(|t| t["name"].as_str()).collect();
    assert!(owners.iter().any(|name| *name != "n0"), "other nodes compute most of the grid: {report}");
    let lost = if owners.contains(&"n2") { 2 } else { 1 };
    mesh.nodes[lost].kill();
    let report = run.until(|report| {
        let on = report["losses"].as_u64() >= Some(1) && report["checkpoint"].as_u64() >= Some(12);
        on || report["state"] == "failed"
    });
    assert_ne!(report["state"], "failed", "{report}");
    let id = report["job"].as_str().expect("an id").to_owned();
    mesh.nodes[0].delete(&format!("/api/v1/grids/{id}")).expect("it is cancelled");
    run.until(|report| report["state"] == "cancelled");
    drop(run);
    let parts = std::fs::read_dir(out.join("checkpoints")).expect("checkpoints").flatten();
    for step in parts.map(|entry| entry.path()).filter(|step| step.join("manifest.json").is_file()) {
        let manifest = std::fs::read_to_string(step.join("manifest.json")).expect("a manifest");
        let manifest: Value = serde_json::from_str(&manifest).expect("JSON");
        let named = manifest["parts"].as_array().map_or(0, Vec::len);
        let there = std::fs::read_dir(&step).expect("a folder").flatten();
        let cells = there.filter(|entry| entry.file_name().to_string_lossy().ends_with(".cells")).count();
        assert!(cells == named, "{cells} files of {named} parts in {}", step.display());
    }
    let from = report["checkpoint"].as_u64().expect("a checkpoint") as u32;
    // Plans use the free memory that members advertise. Adverts lag behind: that of the tile that the survivor has just
    // dropped may come after the plan, and the run is refused.
    let end = Instant::now() + JOIN_MAX;
    let report = loop {
        let run = submit(Some(&mesh.nodes[0]), &folder.job(&text(from + 12)), &out, &["--resume"]);
        let report = run.until(|report| report["state"] == "done" || report["state"] == "failed");
        let refused = report["error"].as_str().is_some_and(|error| error.contains("are missing"));
        if !refused || Instant::now() >= end {
            break report;
        }
        std::thread::sleep(Duration::from_millis(500));
    };
    assert!(report["state"] == "done" && report["from_step"] == from, "{report}");
    let peak = resident_peak(&mesh.nodes[0]);
    eprintln!("a grid of {mib} MiB: the coordinator had {peak} MiB at most; {report}");
    // An idle node that offers 100 MiB has used 82 MiB; with the whole grid it would have used 160 MiB more.
    assert!(peak <= 220, "the coordinator may use 100 MiB for the grid and had {peak} MiB");
}

#[test]
fn members_list_and_show_a_run_and_a_restarted_submitter_finds_its_new_coordinator() {
    let folder = Folder::new();
    let mut mesh = mesh(4, WITH_STANDBYS);
    let file = folder.job(&job(ENDLESS, "standby = \"hot\""));
    let run = submit(Some(&mesh.nodes[0]), &file, &folder.out("run"), &[]);
    let report = run.until(|report| {
        report["step"].as_u64() >= Some(100) && survives_loss_of(report, "n0") || report["state"] == "failed"
    });
    let id = report["job"].as_str().expect("an id").to_owned();
    let part = |of: &Value, name: &str| {
        let tiles = of["tiles"].as_array().into_iter().flatten();
        tiles.flat_map(|tile| [&tile["name"], &tile["standby"]["name"]]).any(|known| known == name)
    };
    let mut members = 0;
    for node in &mesh.nodes[1..] {
        // Both change while the run is rebalanced to faster nodes: retry until they agree.
        let end = Instant::now() + Duration::from_secs(20);
        let known = loop {
            let report = mesh.nodes[0].get(&format!("/api/v1/grids/{id}")).expect("a report");
            let listed = node.get("/api/v1/grids").expect("a list");
            let known = listed.as_array().into_iter().flatten().find(|job| job["job"] == id.as_str());
            match (part(&report, &node.name), known) {
                (false, _) => break None,
                (true, Some(known)) => break Some(known.clone()),
                (true, None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(100)),
                (true, None) => panic!("{} computes it and does not list it: {listed}, {report}", node.name),
            }
        };
        if let Some(known) = known {
            assert_eq!(known["coordinator"]["name"], "n0", "{known}");
            assert!(
                known["role"].as_str().is_some_and(|role| role.contains("owner") || role.contains("standby")),
                "{known}"
            );
            members += 1;
        }
        // A node that has no part in the run answers with the coordinator's report.
        let seen = node.get(&format!("/api/v1/grids/{}", &id[..8])).expect("a report");
        assert!(
            seen["role"] == "coordinator" && seen["coordinator"]["name"] == "n0" && seen["steps"] == ENDLESS,
            "{seen}"
        );
        let text = node.text(&format!("/api/v1/grids/{id}/text?columns=20&lines=8")).expect("a picture");
        assert!(text.contains('▀'), "{text:?}");
    }
    assert!(members >= 1, "{report}");
    mesh.nodes[0].kill();
    let report = successor_report(&mesh.nodes[1..], RUN_MAX, |job| job["state"] == "running");
    let successor = report["coordinator"]["name"].as_str().expect("a name").to_owned();
    assert_ne!(successor, "n0", "{report}");
    mesh.restart(0);
    mesh.wait_members(4);
    let end = Instant::now() + JOIN_MAX;
    loop {
        let seen = mesh.nodes[0].get(&format!("/api/v1/grids/{id}"));
        if seen.as_ref().is_ok_and(|seen| seen["coordinator"]["name"] == successor.as_str()) {
            let listed = mesh.nodes[0].get("/api/v1/grids").expect("a list");
            let known = listed.as_array().into_iter().flatten().find(|job| job["job"] == id.as_str());
            let known = known.unwrap_or_else(|| panic!("the submitter does not list the run: {listed}"));
            assert_eq!(known["coordinator"]["name"], successor.as_str(), "{known}");
            break;
        }
        assert!(Instant::now() < end, "the submitter does not report the new coordinator: {seen:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn a_job_of_many_megabytes_reaches_the_nodes_that_compute_it() {
    let folder = Folder::new();
    // Incompressible cells as text: larger than a control message may be.
    let mut text = String::from("x = 4096, y = 2048\n");
    let mut random = 7u64;
    for _ in 0..2048 {
        for _ in 0..4096 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            text.push(if random >> 63 == 1 { 'o' } else { 'b' });
        }
        text.push_str("$\n");
    }
    text.push('!');
    assert!(text.len() > 8 << 20);
    std::fs::write(folder.out("cells.rle"), text).expect("a file");
    let file = folder.job(
        "name = \"large\"\nsteps = 400\nstandby = \"hot\"\n[grid]\nsize = [4096, 2048]\n[rule]\nname = \"life\"\n\
         [initial]\npattern = { file = \"cells.rle\" }\n",
    );
    let alone = submit(None, &file, &folder.out("alone"), &["--threads", "1", "--device", "cpu"]).finish();
    let mesh = mesh(2, 256 << 20);
    let run = submit(Some(&mesh.nodes[0]), &file, &folder.out("two"), &[]);
    let shared = run.until(|report| {
        let names = report["tiles"].as_array().into_iter().flatten();
        let both = names.filter(|tile| tile["name"] == "n1").count() > 0;
        both || !with_standby(report).is_empty() || report["state"] == "done" || report["state"] == "failed"
    });
    assert_ne!(shared["state"], "failed", "{shared}");
    let done = |report: &Value| report["state"] == "done" || report["state"] == "failed";
    // The plan may name n1 before n1 has received the job.
    let listed = |report: &Value| {
        let n1 = mesh.nodes[1].get("/api/v1/grids").expect("a list");
        n1.as_array().is_some_and(|jobs| !jobs.is_empty()) || done(report)
    };
    let shared = if done(&shared) { shared } else { run.until(listed) };
    let report = if done(&shared) { shared } else { run.finish() };
    assert_eq!(hash(&report), hash(&alone), "{report}");
}
