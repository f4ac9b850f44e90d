//! Hot standbys cost the running job nothing on the token path: a standby receives a copy of its stage's input. If it
//! stalls or its link is too slow, the answer continues without it, and it catches up later.
use crate::client::{Solo, seed, solo, watch};
use crate::harness::{Mesh, deploy};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use system_tests::relay::{Link, Plane, Random};

/// Time for a standby to fetch its share, load it and catch up.
const HOT_MAX: Duration = Duration::from_secs(180);
const TOKENS: u32 = 64;
const NODES: usize = 4;
/// Elements in a hidden row of SmolLM2-135M; an element has the size of a token id.
const WIDTH: u64 = 576;

/// Four nodes behind a relay. Any two of them fit the model: two stages, and two spare nodes. The first is the
/// coordinator.
fn formed(solo: &Solo, seed: u64) -> Mesh {
    let mut mesh = Mesh::relayed(seed);
    for i in 0..NODES {
        mesh.start(&format!("n{i}"), Some(solo.memory(0.8)));
    }
    mesh.wait_members(NODES);
    mesh.deploy(0, &solo.model);
    mesh
}

/// A job with its current standbys, of which at least one is not on the coordinator. Nodes are indices into the mesh.
#[derive(Debug, PartialEq, Eq)]
struct Hot {
    epoch: u64,
    /// The job's last rebalance: a change of it is not caused by a standby.
    moved: Value,
    owners: Vec<usize>,
    /// By stage.
    standbys: BTreeMap<usize, usize>,
}

fn hot(mesh: &Mesh) -> Hot {
    let current = |standby: &Value| standby["state"] == "current";
    // If a node's calibration coincided with a stall of the machine, a standby may be warm, or have no room.
    let ready = |job: &Value| {
        let standbys = || job["standbys"].as_array().into_iter().flatten();
        let loading = standbys().any(|standby| standby["state"] == "loading");
        // Its stage is not on the coordinator, and it is fed over the network.
        let name = |stage: usize| job["stages"][stage]["name"].clone();
        let beside = |standby: &Value| {
            let stage = standby["stage"].as_u64().and_then(|stage| usize::try_from(stage).ok()).unwrap_or_default();
            let feeder = stage.checked_sub(1).map_or(json!("n0"), name);
            current(standby) && name(stage) != "n0" && standby["name"] != "n0" && standby["name"] != feeder
        };
        job["state"] == "ready" && !loading && standbys().any(beside)
    };
    let state = mesh.nodes[0].wait_state(HOT_MAX, |state| ready(&state["jobs"][0])).expect("hot standbys");
    let job = &state["jobs"][0];
    let place = |at: &Value| mesh.nodes.iter().position(|node| at["name"] == node.name.as_str()).expect("a node");
    let list = |what: &str| job[what].as_array().cloned().unwrap_or_default();
    let stage = |standby: &Value| usize::try_from(standby["stage"].as_u64().expect("a number")).expect("few");
    Hot {
        epoch: job["epoch"].as_u64().expect("an epoch"),
        moved: job["moved"].clone(),
        owners: list("stages").iter().map(place).collect(),
        standbys: list("standbys")
            .iter()
            .filter(|s| current(s))
            .map(|standby| (stage(standby), place(standby)))
            .collect(),
    }
}

impl Hot {
    /// The node that sends a stage its input: the previous stage's owner, or the coordinator.
    fn feeder(&self, stage: usize) -> usize {
        stage.checked_sub(1).map_or(0, |before| self.owners[before])
    }

    /// A stage that is not on the coordinator, with its standby, which is fed over the network.
    fn remote_stage_with_standby(&self) -> (usize, usize) {
        let apart =
            |stage: usize, standby: usize| self.owners[stage] != 0 && standby != 0 && standby != self.feeder(stage);
        let found = self.standbys.iter().find(|(stage, standby)| apart(**stage, **standby));
        found.map(|(&stage, &standby)| (stage, standby)).unwrap_or_else(|| panic!("no such standby: {self:?}"))
    }

    /// Checks that the loss of a standby did not re-place the job.
    fn check_not_replaced(&self, job: &Value) -> Result<(), String> {
        let same = job["moved"] != self.moved || job["epoch"] == self.epoch;
        if same { Ok(()) } else { Err(format!("{job}, before {self:?}")) }
    }

    /// Waits until the same standbys are current again.
    fn wait_restored(&self, mesh: &Mesh) -> Result<Hot, String> {
        let again = hot(mesh);
        let same = again.moved != self.moved || again == *self;
        if same { Ok(again) } else { Err(format!("{again:?}, before {self:?}")) }
    }

    /// Drains all nodes without a role, so that no other node can become a standby.
    fn drain_others(&self, mesh: &Mesh) {
        let idle = |node: &usize| !self.owners.contains(node) && !self.standbys.values().any(|s| s == node);
        for node in (1..mesh.nodes.len()).filter(idle) {
            mesh.nodes[node].post("/api/v1/drain", &json!({"on": true})).expect("it drains");
        }
    }
}

/// Repeats a test until a round ends without a re-placement. If the machine itself stalls for longer than a lease, live
/// nodes are declared down, and such a round says nothing about standbys; a real defect shows in every round.
fn retry_if_replaced<T>(seed: u64, round: impl Fn(u64) -> Result<T, String>) -> T {
    const ROUNDS: usize = 4;
    let mut why = String::new();
    for seed in (seed..).take(ROUNDS) {
        match round(seed) {
            Ok(shown) => return shown,
            Err(said) => why = said,
        }
        eprintln!("re-placed: {why}");
    }
    panic!("every round re-placed something: {why}");
}

/// Frame bytes that all nodes sent to remote stages, and to standbys.
fn given(mesh: &Mesh) -> (u64, u64) {
    let count = |what: &str| {
        let states = mesh.nodes.iter().map(|node| node.get("/api/v1/state").expect("a state"));
        states.map(|state| state["boundary"][what].as_u64().expect("a count")).sum()
    };
    assert_eq!(count("copies_left_out"), 0, "no copy is dropped on a fast link");
    (count("stage_bytes"), count("standby_bytes"))
}

/// The standby receives byte for byte the input of its stage, and no more.
#[test]
fn a_standby_receives_the_input_of_its_stage() {
    let Some(solo) = solo() else { return };
    let seed = seed("a_standby_receives_the_input_of_its_stage");
    let mesh = formed(solo, seed);
    let (roles, view, before, after) = retry_if_replaced(seed, |_| {
        let (roles, before) = (hot(&mesh), given(&mesh));
        let view = watch(&mesh.nodes[0], &solo.model, TOKENS, |_| {});
        assert_eq!(view.tokens, solo.tokens(TOKENS));
        let (after, then) = (given(&mesh), hot(&mesh));
        if then == roles { Ok((roles, view, before, after)) } else { Err(format!("{then:?}, before {roles:?}")) }
    });
    let (stages, standbys) = (after.0 - before.0, after.1 - before.1);
    // Data that stays on one node is not a frame. Per position, a first stage receives a token id and every other stage
    // a row.
    let row = |stage: usize| if stage == 0 { 1 } else { WIDTH };
    let fed = |stage: usize, to: usize| if roles.feeder(stage) == to { 0 } else { row(stage) };
    let per_position: u64 = roles.owners.iter().enumerate().map(|(stage, &owner)| fed(stage, owner)).sum();
    let copies_per_position: u64 = roles.standbys.iter().map(|(&stage, &standby)| fed(stage, standby)).sum();
    eprintln!("{view}; {stages} bytes for the stages, {standbys} for the standbys of {roles:?}");
    assert!(standbys > 0 && copies_per_position > 0);
    // Frames are counted when they are sent, so none is missing in transit.
    assert_eq!(standbys * per_position, stages * copies_per_position);
    let metrics = mesh.nodes[0].text("/metrics").expect("metrics");
    assert!(metrics.contains("meshnode_frame_bytes_total{to=\"standby\"}"), "{metrics}");
}

/// The memory of running standbys is taken, so a new plan would choose others: the plan must show the running ones.
///
/// Nodes that share a busy machine measure varying speeds. A placement that has become slightly slower than the best is
/// kept, and every plan then proposes a move: in this case the test forms a new mesh.
#[test]
fn a_plan_of_a_running_job_names_its_standbys() {
    const ATTEMPTS: usize = 4;
    let Some(solo) = solo() else { return };
    let settled = (0..ATTEMPTS).any(|_| {
        let mesh = formed(solo, seed("a_plan_of_a_running_job_names_its_standbys"));
        let end = Instant::now() + HOT_MAX / 3;
        std::iter::from_fn(|| (Instant::now() < end).then(|| a_plan_names_its_standbys(&mesh, solo))).any(|named| named)
    });
    assert!(settled, "every plan proposed a move, in {ATTEMPTS} meshes");
}

/// `false` if the plan proposes a move, or a move happened meanwhile: such a plan has its own standbys.
fn a_plan_names_its_standbys(mesh: &Mesh, solo: &Solo) -> bool {
    let before = hot(mesh);
    let plan = mesh.nodes[0].post("/api/v1/plan", &deploy(&solo.model)).expect("a plan");
    if plan["change"]["moved_bytes"] != 0 || hot(mesh) != before {
        std::thread::sleep(Duration::from_millis(500));
        return false;
    }
    let jobs = mesh.nodes[0].get("/api/v1/jobs").expect("jobs");
    let names = |of: &Value| {
        let standbys = of["standbys"].as_array().into_iter().flatten();
        standbys.map(|standby| (standby["stage"].clone(), standby["name"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(names(&plan), names(&jobs[0]), "{plan}");
    assert!(plan["standbys"].as_array().is_some_and(|all| all.iter().any(|s| s["state"] == "current")), "{plan}");
    true
}

/// The standby is stopped in the middle of an answer and continues only after its end: waiting for it would never
/// finish. Afterwards it becomes current again.
#[test]
fn an_answer_does_not_wait_for_a_standby_that_is_stopped() {
    let Some(solo) = solo() else { return };
    retry_if_replaced(seed("an_answer_does_not_wait_for_a_standby_that_is_stopped"), |seed| stopped(solo, seed));
}

fn stopped(solo: &Solo, seed: u64) -> Result<(), String> {
    let mesh = formed(solo, seed);
    let roles = hot(&mesh);
    roles.drain_others(&mesh);
    let (_, standby) = roles.remote_stage_with_standby();
    let moment = 4 + Random(seed).below(TOKENS as usize / 2);
    let view = watch(&mesh.nodes[0], &solo.model, TOKENS, |count| {
        if count == moment {
            mesh.nodes[standby].signal(Signal::STOP);
        }
    });
    let jobs = mesh.nodes[0].get("/api/v1/jobs").expect("jobs");
    mesh.nodes[standby].signal(Signal::CONT);
    eprintln!("SIGSTOP of the standby n{standby} at token {moment}: {view}");
    assert_eq!(view.tokens, solo.tokens(TOKENS));
    roles.check_not_replaced(&jobs[0])?;
    mesh.wait_members(NODES);
    roles.wait_restored(&mesh)?;
    Ok(())
}

/// The link to the standby is narrower than the copies need: they are late or dropped, the answer is not delayed. When
/// the link is wide again, the standby catches up and can take over its stage.
#[test]
fn an_answer_does_not_wait_for_a_standby_behind_a_narrow_link() {
    let Some(solo) = solo() else { return };
    let seed = seed("an_answer_does_not_wait_for_a_standby_behind_a_narrow_link");
    retry_if_replaced(seed, |seed| behind_a_narrow_link(solo, seed));
}

fn behind_a_narrow_link(solo: &Solo, seed: u64) -> Result<(), String> {
    let mesh = formed(solo, seed);
    let relay = mesh.relay.as_ref().expect("a relay");
    let roles = hot(&mesh);
    roles.drain_others(&mesh);
    let (stage, standby) = roles.remote_stage_with_standby();
    let feeder = roles.feeder(stage);
    let moment = 4 + Random(seed).below(TOKENS as usize / 2);
    // Less than the copies need; a short queue, so that heartbeats get through now and then.
    let narrow = Link { bytes_per_second: Some(20_000), queue_bytes: 5_000, ..Link::PLAIN };
    let view = watch(&mesh.nodes[0], &solo.model, TOKENS, |count| {
        if count == moment {
            relay.link(feeder, standby, narrow);
        }
    });
    let jobs = mesh.nodes[0].get("/api/v1/jobs").expect("jobs");
    relay.link(feeder, standby, Link::PLAIN);
    let copied = relay.passed(feeder, standby, Plane::Data);
    eprintln!("20 kB/s from n{feeder} to the standby n{standby} from token {moment} on: {view}; {copied:?}");
    assert_eq!(view.tokens, solo.tokens(TOKENS));
    roles.check_not_replaced(&jobs[0])?;
    mesh.wait_members(NODES);
    let again = roles.wait_restored(&mesh)?;
    let owner = again.owners[again.remote_stage_with_standby().0];
    let view = watch(&mesh.nodes[0], &solo.model, TOKENS, |count| {
        if count == moment {
            mesh.nodes[owner].signal(Signal::KILL);
        }
    });
    eprintln!("then SIGKILL of its stage n{owner}: {view}");
    assert_eq!(view.tokens, solo.tokens(TOKENS));
    Ok(())
}
