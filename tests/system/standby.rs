//! A hot standby costs the running job nothing on the token path: it is sent a copy of what its stage is sent, and when it
//! stands still or cannot be reached fast enough, the answer goes on without it and it catches up later.
use crate::client::{Solo, seed, solo, watch};
use crate::harness::{Mesh, deploy};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use system_tests::relay::{Link, Plane, Random};

/// A standby fetches its share, loads it and catches up.
const HOT_MAX: Duration = Duration::from_secs(180);
const TOKENS: u32 = 64;
const NODES: usize = 4;
/// Numbers in a row of SmolLM2-135M, each as long as a token id.
const WIDTH: u64 = 576;

/// Four nodes behind a relay, of which any two hold the model: two stages, and two nodes to spare. The first serves it.
fn formed(solo: &Solo, seed: u64) -> Mesh {
    let mut mesh = Mesh::relayed(seed);
    for i in 0..NODES {
        mesh.start(&format!("n{i}"), Some(solo.memory(0.8)));
    }
    mesh.wait_members(NODES);
    mesh.deploy(0, &solo.model);
    mesh
}

/// A job with its standbys that are current, of which one at least is not the head. Nodes by their place in the mesh.
#[derive(Debug, PartialEq, Eq)]
struct Hot {
    epoch: u64,
    /// Its last move by itself to where it runs better: that is no fault of a standby.
    moved: Value,
    owners: Vec<usize>,
    /// By stage.
    standbys: BTreeMap<usize, usize>,
}

fn hot(mesh: &Mesh) -> Hot {
    let current = |standby: &Value| standby["state"] == "current";
    // Where a node was measured while the machine stood still, a standby may be warm, or have no room.
    let ready = |job: &Value| {
        let standbys = || job["standbys"].as_array().into_iter().flatten();
        let loading = standbys().any(|standby| standby["state"] == "loading");
        // Of a stage of another node than the coordinator's, and fed over the network.
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
    /// Who sends a stage its rows: the one before it, or the head.
    fn feeder(&self, stage: usize) -> usize {
        stage.checked_sub(1).map_or(0, |before| self.owners[before])
    }

    /// A stage of another node than the coordinator's whose standby is fed over the network, and that standby.
    fn beside_the_head(&self) -> (usize, usize) {
        let apart =
            |stage: usize, standby: usize| self.owners[stage] != 0 && standby != 0 && standby != self.feeder(stage);
        let found = self.standbys.iter().find(|(stage, standby)| apart(**stage, **standby));
        found.map(|(&stage, &standby)| (stage, standby)).unwrap_or_else(|| panic!("no such standby: {self:?}"))
    }

    /// The loss of a standby re-places nothing.
    fn still_stand(&self, job: &Value) -> Result<(), String> {
        let same = job["moved"] != self.moved || job["epoch"] == self.epoch;
        if same { Ok(()) } else { Err(format!("{job}, before {self:?}")) }
    }

    /// The same standbys stand by again.
    fn come_back(&self, mesh: &Mesh) -> Result<Hot, String> {
        let again = hot(mesh);
        let same = again.moved != self.moved || again == *self;
        if same { Ok(again) } else { Err(format!("{again:?}, before {self:?}")) }
    }

    /// Nobody but the present standbys may stand by.
    fn drain_others(&self, mesh: &Mesh) {
        let idle = |node: &usize| !self.owners.contains(node) && !self.standbys.values().any(|s| s == node);
        for node in (1..mesh.nodes.len()).filter(idle) {
            mesh.nodes[node].post("/api/v1/drain", &json!({"on": true})).expect("it drains");
        }
    }
}

/// Tries a test in a few rounds until one ends without a re-placement. Where the machine itself stands still for longer than a
/// lease, live nodes are given up, and such a round says nothing about standbys; a defect shows in every round.
fn in_a_steady_round<T>(seed: u64, round: impl Fn(u64) -> Result<T, String>) -> T {
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

/// Bytes of frames that all nodes gave to stages of others, and to standbys.
fn given(mesh: &Mesh) -> (u64, u64) {
    let count = |what: &str| {
        let states = mesh.nodes.iter().map(|node| node.get("/api/v1/state").expect("a state"));
        states.map(|state| state["boundary"][what].as_u64().expect("a count")).sum()
    };
    assert_eq!(count("copies_left_out"), 0, "nothing is left out on an easy way");
    (count("stage_bytes"), count("standby_bytes"))
}

/// Byte for byte what the stage is sent, and no more.
#[test]
fn a_standby_is_sent_what_its_stage_is_sent() {
    let Some(solo) = solo() else { return };
    let seed = seed("a_standby_is_sent_what_its_stage_is_sent");
    let mesh = formed(solo, seed);
    let (roles, view, before, after) = in_a_steady_round(seed, |_| {
        let (roles, before) = (hot(&mesh), given(&mesh));
        let view = watch(&mesh.nodes[0], &solo.model, TOKENS, |_| {});
        assert_eq!(view.tokens, solo.tokens(TOKENS));
        let (after, then) = (given(&mesh), hot(&mesh));
        if then == roles { Ok((roles, view, before, after)) } else { Err(format!("{then:?}, before {roles:?}")) }
    });
    let (stages, standbys) = (after.0 - before.0, after.1 - before.1);
    // What stays on one node is no frame. Of each position a first stage gets a token id, the others a row.
    let row = |stage: usize| if stage == 0 { 1 } else { WIDTH };
    let fed = |stage: usize, to: usize| if roles.feeder(stage) == to { 0 } else { row(stage) };
    let per_position: u64 = roles.owners.iter().enumerate().map(|(stage, &owner)| fed(stage, owner)).sum();
    let copies_per_position: u64 = roles.standbys.iter().map(|(&stage, &standby)| fed(stage, standby)).sum();
    eprintln!("{view}; {stages} bytes for the stages, {standbys} for the standbys of {roles:?}");
    assert!(standbys > 0 && copies_per_position > 0);
    // A frame is counted when it leaves, so that none is on its way.
    assert_eq!(standbys * per_position, stages * copies_per_position);
    let metrics = mesh.nodes[0].text("/metrics").expect("metrics");
    assert!(metrics.contains("meshnode_frame_bytes_total{to=\"standby\"}"), "{metrics}");
}

/// Their memory is taken, so a plan made now would choose others: what runs is shown as it is.
///
/// Nodes that share a busy machine measure different speeds from minute to minute. A placement that is by now a little slower than
/// the best stays, and every plan then proposes a move: then the mesh is formed again.
#[test]
fn a_plan_of_what_runs_names_the_standbys_that_it_has() {
    const ATTEMPTS: usize = 4;
    let Some(solo) = solo() else { return };
    let settled = (0..ATTEMPTS).any(|_| {
        let mesh = formed(solo, seed("a_plan_of_what_runs_names_the_standbys_that_it_has"));
        let end = Instant::now() + HOT_MAX / 3;
        std::iter::from_fn(|| (Instant::now() < end).then(|| a_plan_names_its_standbys(&mesh, solo))).any(|named| named)
    });
    assert!(settled, "every plan proposed a move, in {ATTEMPTS} meshes");
}

/// `false` if the plan is of a move, or one was made meanwhile: it has standbys of its own.
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

/// It is stopped in the middle of an answer and goes on only when the answer is over: whoever waited for it would never
/// have finished. Then it stands by again.
#[test]
fn an_answer_does_not_wait_for_a_standby_that_is_stopped() {
    let Some(solo) = solo() else { return };
    in_a_steady_round(seed("an_answer_does_not_wait_for_a_standby_that_is_stopped"), |seed| stopped(solo, seed));
}

fn stopped(solo: &Solo, seed: u64) -> Result<(), String> {
    let mesh = formed(solo, seed);
    let roles = hot(&mesh);
    roles.drain_others(&mesh);
    let (_, standby) = roles.beside_the_head();
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
    roles.still_stand(&jobs[0])?;
    mesh.wait_members(NODES);
    roles.come_back(&mesh)?;
    Ok(())
}

/// The way to it is narrower than what the copies take: they are late or left out, the answer is not. When the way is
/// wide again it catches up, and takes the stage over as if nothing had been.
#[test]
fn an_answer_does_not_wait_for_a_standby_behind_a_narrow_link() {
    let Some(solo) = solo() else { return };
    let seed = seed("an_answer_does_not_wait_for_a_standby_behind_a_narrow_link");
    in_a_steady_round(seed, |seed| behind_a_narrow_link(solo, seed));
}

fn behind_a_narrow_link(solo: &Solo, seed: u64) -> Result<(), String> {
    let mesh = formed(solo, seed);
    let relay = mesh.relay.as_ref().expect("a relay");
    let roles = hot(&mesh);
    roles.drain_others(&mesh);
    let (stage, standby) = roles.beside_the_head();
    let feeder = roles.feeder(stage);
    let moment = 4 + Random(seed).below(TOKENS as usize / 2);
    // Less than what the copies take; a short queue, so that signs of life get through now and then.
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
    roles.still_stand(&jobs[0])?;
    mesh.wait_members(NODES);
    let again = roles.come_back(&mesh)?;
    let owner = again.owners[again.beside_the_head().0];
    let view = watch(&mesh.nodes[0], &solo.model, TOKENS, |count| {
        if count == moment {
            mesh.nodes[owner].signal(Signal::KILL);
        }
    });
    eprintln!("then SIGKILL of its stage n{owner}: {view}");
    assert_eq!(view.tokens, solo.tokens(TOKENS));
    Ok(())
}
