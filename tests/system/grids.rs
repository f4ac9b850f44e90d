//! Simulations on real processes: the state hash of a run does not depend on how many nodes compute it, on who of them dies,
//! or on where it was taken up again.
use crate::harness::{Mesh, meshnode};
use meshnode::cluster::LocalNode;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use system_tests::relay::Link;

const JOIN_MAX: Duration = Duration::from_secs(20);
const RUN_MAX: Duration = Duration::from_secs(240);
/// Nodes so small that a grid of `SIZE` takes two of them, and so large that the largest tile of an uneven cut fits beside the
/// smallest.
const MEMORY: u64 = 88 << 20;
/// And so that it takes three.
const THIRD: u64 = 50 << 20;
const SIZE: u32 = 832;

/// A decaying vortex, long enough to be interrupted.
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

/// `meshnode submit --wait --json`, at a node or (with none) alone.
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
    /// The report at which something holds; the last one if that never comes.
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
        panic!("it does not come to that: {last}");
    }

    /// The summary.
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

/// Names of owners whose tiles have standbys with cells.
fn guarded(report: &Value) -> Vec<&str> {
    let tiles = report["tiles"].as_array().into_iter().flatten();
    tiles.filter(|tile| tile["standby"]["step"].is_u64()).filter_map(|tile| tile["name"].as_str()).collect()
}

/// The hash of a run on one node with all the memory it wants.
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
    mesh.wait_members(nodes, JOIN_MAX);
    mesh
}

/// Pictures of a run, by name.
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
fn a_run_survives_its_nodes_and_ends_with_the_hash_of_one_that_met_nothing() {
    let folder = Folder::new();
    // More kills of longer runs, other tiers: to measure with.
    let number = |name: &str, usual: u32| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    let (kills, steps) = (number("GRID_KILLS", 2), number("GRID_STEPS", 1200));
    let tier = std::env::var("GRID_STANDBY").unwrap_or_else(|_| "hot".into());
    let alone = solo(&folder, steps);
    for kill in 0..kills {
        let mut mesh = mesh(4, MEMORY);
        let text = job(steps, &format!("standby = {tier:?}"));
        let file = folder.job(&text);
        let api = mesh.nodes[0].api.to_string();
        let plan = Command::new(meshnode()).arg("plan").arg(&file).args(["--json", "--api", &api]).output();
        let plan: Value = serde_json::from_slice(&plan.expect("the program runs").stdout).expect("a plan");
        let out = folder.out(&format!("hot{kill}"));
        let run = submit(Some(&mesh.nodes[0]), &file, &out, &[]);
        // Somewhere in the run, once standbys are there.
        let at = u64::from(steps / 4 + kill * 37 * (steps / 600) % (steps / 2));
        let owns = |names: &[&str], node: &LocalNode| names.contains(&node.name.as_str());
        // On a machine with much else to do they may come late, or nobody has the memory: then all begin anew.
        let late = u64::from(steps / 4 * 3);
        let report = run.until(|report| {
            let (step, guarded) = (report["step"].as_u64(), guarded(report));
            let beside = guarded.iter().any(|name| *name != "n0");
            step >= Some(at) && beside || step >= Some(late) || report["state"] == "failed"
        });
        let all: Vec<&str> =
            report["tiles"].as_array().into_iter().flatten().filter_map(|tile| tile["name"].as_str()).collect();
        assert!(all.len() > 1, "two nodes are needed: {report}");
        let guarded = guarded(&report);
        let best = mesh.nodes.iter().skip(1).position(|node| owns(&guarded, node));
        let any = mesh.nodes.iter().skip(1).position(|node| owns(&all, node));
        let victim = &mut mesh.nodes[1 + best.or(any).expect("an owner beside the submitter")];
        victim.kill();
        let lost = all.iter().position(|name| *name == victim.name).expect("its tile");
        let predicted = plan["standbys"].as_array().and_then(|all| all.iter().find(|standby| standby["tile"] == lost));
        let predicted = predicted.map_or(Value::Null, |standby| standby["stall_ms"].clone());
        if predicted.is_null() {
            eprintln!("nobody was to stand by for it: {plan}");
        }
        let report = run.finish();
        assert_eq!(hash(&report), hash(&alone), "{report}");
        assert_eq!(report["losses"], 1, "{report}");
        eprintln!("killed at step {at}: {} ms without a step, {predicted} predicted", report["longest_stall_ms"]);
        assert_eq!(pictures(&out), pictures(&folder.out("solo")), "every picture is there, and the same");
    }
}

#[test]
fn a_run_is_taken_up_from_its_checkpoint_by_another_number_of_nodes() {
    let folder = Folder::new();
    let alone = solo(&folder, 400);
    let out = folder.out("run");
    let file = folder.job(&job(400, "checkpoint_every = 100"));
    {
        let mesh = mesh(3, MEMORY);
        let run = submit(Some(&mesh.nodes[0]), &file, &out, &[]);
        run.until(|report| report["checkpoint"].as_u64() >= Some(100) || report["state"] == "failed");
        // The mesh is gone with all its nodes, in the middle of it.
    }
    let mut other = Mesh::new();
    other.start("other", None);
    let report = submit(Some(&other.nodes[0]), &file, &out, &["--resume"]).finish();
    assert!(report["from_step"].as_u64() >= Some(100), "{report}");
    assert_eq!(hash(&report), hash(&alone), "{report}");
    assert_eq!(pictures(&out), pictures(&folder.out("solo")));

    // A checkpoint of another simulation, and one that is cut short, are refused by name.
    let text = job(400, "checkpoint_every = 100").replace("0.02", "0.03");
    let file = folder.job(&text);
    let refused = |file: &Path| {
        let output = Command::new(meshnode())
            .args(["submit", "--wait", "--resume", "--api", &other.nodes[0].api.to_string(), "--out"])
            .arg(&out)
            .arg(file)
            .output()
            .expect("the program runs");
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&file).contains("another simulation"), "{}", refused(&file));
}

/// Across an ocean of 1 Gbit/s and 20 ms, two nodes of a thread each are told beside one of two threads. `GRID_SIZE` says how
/// large the grid is, to measure with: the hash has to be the same, how fast it is depends on the machine.
#[test]
fn over_a_slow_link_halos_are_as_deep_as_it_takes() {
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
    mesh.wait_members(2, JOIN_MAX);
    // Round trips are measured before anything is planned with them.
    std::thread::sleep(Duration::from_secs(3));
    let report = submit(Some(&mesh.nodes[0]), &file, &folder.out("two"), &[]).finish();
    assert_eq!(report["tiles"].as_array().map(Vec::len), Some(2), "{report}");
    assert_eq!(hash(&report), hash(&alone), "{report}");
    let (two, one) = (report["mlups"].as_f64(), alone["mlups"].as_f64());
    let ratio = two.zip(one).map(|(two, one)| two / one);
    eprintln!("{size}²: {one:?} MLUPS on one node, {two:?} on two, {ratio:?}, with halos of {} steps", report["depth"]);
}

/// A simulation as one of these nodes tells it, which goes on with it or did.
fn inherited(nodes: &[LocalNode], limit: Duration, done: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + limit;
    let mut last = Value::Null;
    while Instant::now() < end {
        for node in nodes {
            let Ok(list) = node.get("/api/v1/grids") else { continue };
            let Some(job) = list.as_array().and_then(|jobs| jobs.first()) else { continue };
            // Of two that went on with it for a moment, one ends it.
            if last.is_null() || job["state"] != "failed" {
                last = job.clone();
            }
        }
        if done(&last) {
            return last;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("it does not come to that: {last}");
}

/// Whether a node has a copy of another's checkpoint.
fn mirrors(node: &LocalNode) -> bool {
    let folders = |folder: PathBuf| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let steps = folders(node.data_dir.join("simulations")).flat_map(|job| folders(job.join("checkpoints")));
    steps.into_iter().any(|step| step.join("manifest.json").is_file())
}

#[test]
fn a_run_survives_the_node_that_it_was_submitted_to() {
    let folder = Folder::new();
    let alone = solo(&folder, 1500);
    // More than half of those who take part have to agree: of three tiles' owners two are left.
    for (standby, checkpoints, memory) in [("hot", "", MEMORY), ("none", "checkpoint_every = 200", THIRD)] {
        let mut mesh = mesh(4, memory);
        let file = folder.job(&job(1500, &format!("standby = {standby:?}\n{checkpoints}")));
        let run = submit(Some(&mesh.nodes[0]), &file, &folder.out(standby), &[]);
        let report = run.until(|report| {
            let owns = |tile: &Value| tile["name"] == "n0" && !guarded(report).contains(&"n0");
            let ready = standby == "none" || !report["tiles"].as_array().into_iter().flatten().any(owns);
            report["step"].as_u64() >= Some(200) && ready || report["state"] == "failed"
        });
        assert_eq!(report["state"], "running", "it was over before its tile had a standby: {report}");
        let tiles = report["tiles"].as_array().map_or(0, Vec::len);
        assert!(tiles >= if standby == "hot" { 2 } else { 3 }, "{report}");
        let end = Instant::now() + JOIN_MAX;
        while standby == "none" && !mesh.nodes[1..].iter().any(mirrors) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        mesh.nodes[0].kill();
        let report = inherited(&mesh.nodes[1..], RUN_MAX, |job| job["state"] == "done" || job["state"] == "failed");
        assert_eq!(report["state"], "done", "{report}");
        assert_eq!(hash(&report), hash(&alone), "{report}");
        assert!(report["from_step"].as_u64() >= Some(100), "{standby}: it did not begin anew: {report}");
        let out = report["out"].as_str().expect("it keeps what it makes");
        let pictures = pictures(Path::new(out));
        let (name, last) = pictures.last().expect("pictures");
        let expected = self::pictures(&folder.out("solo"));
        assert!(expected.iter().any(|(at, picture)| at == name && picture == last), "{name}");
        eprintln!("{standby}: from step {}, {} ms without one", report["from_step"], report["longest_stall_ms"]);
    }
}
