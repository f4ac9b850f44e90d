//! `meshnode demo --chaos`: kills a stage during each of many generations, and measures the client's stalls.
use super::{Demo, JOIN_MAX, Run, mib};
use crate::cluster::LocalNode;
use crate::views::{JobView, StageView, StandbyView, StateView};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::cell::Cell;
use std::io::{Error, Result};
use std::time::{Duration, Instant};

/// Timeout for a hot standby after a loss: another node fetches, loads and catches up, on a machine that may be busy.
const STANDBY_MAX: Duration = Duration::from_secs(180);
/// With no request running, a standby that is not current this long after it was loaded is a warm one: too slow to keep
/// up.
const WARM_AFTER: Duration = Duration::from_secs(10);
/// A stage that has no standby this long after its job is ready gets none: the coordinator looks for one at once and again
/// when a member joins.
const SPARE_MAX: Duration = Duration::from_secs(3);
/// Pairs of generations, one with and one without standbys, whose speeds are compared. Both of a pair run within
/// seconds, so that other load on the machine affects both.
const PAIRS: usize = 5;
/// No further pair starts after this time.
const PAIRS_MAX: Duration = Duration::from_secs(20);
/// Times that the job may move during this comparison before it is left out.
const MOVES_MAX: u32 = 3;
/// Tokens at the start and the end of a generation without a kill, so that the client observes the stall.
const MARGIN: u64 = 4;

/// The last line of `--chaos --json`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ChaosSummary {
    /// Stages killed, each during a generation.
    pub kills: usize,
    /// Requests that did not complete.
    pub requests_lost: usize,
    /// Every generation produced the same tokens as one undisturbed node.
    pub tokens_equal_solo: bool,
    /// Longest gap between two tokens after a kill, as seen by the client, milliseconds: the median.
    pub stall_ms_p50: f64,
    /// The 99th percentile.
    pub stall_ms_p99: f64,
    /// The maximum.
    pub stall_ms_max: f64,
    /// Number of stalls above one second.
    pub stalls_above_1s: usize,
    /// Node processes.
    pub nodes: usize,
    /// `--seed` of the random choices.
    pub seed: u64,
    /// Tokens per second with hot standbys, the median of a few generations.
    pub tokens_per_s: f64,
    /// The same without standbys, alternating with those above: the standby nodes drain meanwhile. Not measured if the job
    /// kept moving, as it may on a busy machine.
    pub tokens_per_s_without_standbys: Option<f64>,
    /// Slowdown by the standbys, the median of the pairs. On a machine with fewer cores than nodes, standbys compete
    /// with the stages for the cores.
    pub standby_cost_percent: Option<f64>,
    /// Number of coordinator kills after the stage kills, each during an answer.
    pub coordinator_kills: usize,
    /// Time from a coordinator kill to the client's next event, from another node, milliseconds: the median.
    pub coordinator_pause_ms_p50: f64,
    /// The maximum.
    pub coordinator_pause_ms_max: f64,
}

/// Number of nodes to kill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kills {
    /// Nodes with a stage, other than the coordinator.
    pub stages: usize,
    /// The coordinator, which is also the client's entry node.
    pub coordinators: usize,
}

/// Nodes of the mesh: two hold the model, one is a standby, and one may be restarting.
const NAMES: [&str; 4] = ["ada", "bea", "cem", "dov"];

impl Demo {
    /// Kills one node in each generation.
    pub(super) fn chaos(&self, kills: Kills, seed: u64) -> Result<ChaosSummary> {
        let Kills { stages: kills, coordinators } = kills;
        let solo = self.solo()?;
        // As for three nodes: any two hold the model, so that two remain as standby or restarting.
        let memory = solo.bytes * 8 / 10;
        self.screen.say("four", &format!("four nodes with {} each; one is killed in each generation", mib(memory)));
        let mut mesh = Mesh { demo: self, memory, ticket: None, nodes: Vec::new() };
        // Start two nodes first, so that both have a stage and the later nodes become standbys.
        let (first, spares) = NAMES.split_at(2);
        first.iter().try_for_each(|name| mesh.add(name))?;
        mesh.nodes[0].wait_members(first.len(), JOIN_MAX)?;
        self.place(&mesh.nodes)?;
        spares.iter().try_for_each(|name| mesh.add(name))?;
        let speeds = mesh.speeds()?;
        self.screen.event("speeds", &json!({"with_standbys": speeds.with, "without_standbys": speeds.without}));
        let bar = self.screen.progress((kills + coordinators) as u64);
        let mut dice = Dice(seed);
        let (mut stalls, mut lost, mut equal) = (Vec::with_capacity(kills), 0, true);
        for _ in 0..kills {
            let stages = mesh.wait_hot()?;
            let victim = stages[(dice.next() % stages.len() as u64) as usize];
            let last = u64::from(self.options.tokens).saturating_sub(2 * MARGIN).max(1);
            let moment = MARGIN + dice.next() % last;
            let (run, killed) = mesh.generation(victim, moment as usize)?;
            lost += usize::from(!run.complete);
            equal &= run.tokens == solo.run.tokens;
            let stall = run.stall_after(killed).as_secs_f64() * 1e3;
            stalls.push(stall);
            self.screen.event(
                "kill",
                &json!({
                    "name": mesh.nodes[victim].name, "at_token": moment, "stall_ms": stall,
                    "tokens_equal_solo": run.tokens == solo.run.tokens,
                }),
            );
            mesh.restart(victim)?;
            bar.inc(1);
        }
        let mut pauses = Vec::with_capacity(coordinators);
        for number in 0..coordinators {
            let (coordinator, job) = mesh.wait_covered()?;
            let moment = MARGIN + dice.next() % u64::from(self.options.tokens / 2).max(1);
            let key = format!("demo-{seed}-{number}");
            let resumed = self.resumed(&mut mesh.nodes, coordinator, moment as usize, &job.model, &key)?;
            let same = resumed.text == solo.run.text;
            lost += usize::from(!resumed.complete);
            equal &= same;
            pauses.push(resumed.pause.as_secs_f64() * 1e3);
            self.screen.event(
                "coordinator_kill",
                &json!({
                    "name": mesh.nodes[coordinator].name, "at_token": moment, "pause_ms": resumed.pause.as_secs_f64() * 1e3,
                    "complete": resumed.complete, "text_equal_solo": same,
                }),
            );
            mesh.restart(coordinator)?;
            bar.inc(1);
        }
        bar.finish_and_clear();
        pauses.sort_by(f64::total_cmp);
        stalls.sort_by(f64::total_cmp);
        let of_100 = |percent: usize| {
            let at = (stalls.len() * percent).div_ceil(100).max(1) - 1;
            stalls.get(at).copied().unwrap_or_default()
        };
        let measured = !speeds.without.is_empty();
        Ok(ChaosSummary {
            kills,
            requests_lost: lost,
            tokens_equal_solo: equal,
            stall_ms_p50: of_100(50),
            stall_ms_p99: of_100(99),
            stall_ms_max: of_100(100),
            stalls_above_1s: stalls.iter().filter(|ms| **ms > 1e3).count(),
            nodes: NAMES.len(),
            seed,
            tokens_per_s: middle(&speeds.with),
            tokens_per_s_without_standbys: measured.then(|| middle(&speeds.without)),
            standby_cost_percent: measured.then(|| speeds.cost_percent()),
            coordinator_kills: coordinators,
            coordinator_pause_ms_p50: middle(&pauses),
            coordinator_pause_ms_max: pauses.last().copied().unwrap_or_default(),
        })
    }
}

struct Mesh<'a> {
    demo: &'a Demo,
    memory: u64,
    ticket: Option<String>,
    nodes: Vec<LocalNode>,
}

impl Mesh<'_> {
    fn add(&mut self, name: &str) -> Result<()> {
        let node = self.demo.start(name, Some(self.memory), self.ticket.clone())?;
        self.ticket.get_or_insert_with(|| node.ticket.clone());
        self.nodes.push(node);
        Ok(())
    }

    /// Waits until all nodes are members and the standbys have settled. Returns the nodes whose stages have a current
    /// standby, or, if there are none, all nodes with stages. A job that has moved to more nodes may have a stage for
    /// which no standby node is left.
    fn wait_hot(&self) -> Result<Vec<usize>> {
        let coordinator = &self.nodes[0];
        let current = |standby: &StandbyView| standby.state == "current";
        let loaded_since = Cell::new(None::<Instant>);
        let settled = |job: &JobView| {
            // The coordinator's own stage gets a standby only if other stages leave one, so it is not waited for.
            let own = |standby: &StandbyView| {
                job.stages.get(usize::from(standby.stage)).is_some_and(|stage| stage.name == coordinator.name)
            };
            let standbys = || job.standbys.iter().filter(|standby| !own(standby));
            if job.state != "ready" || standbys().any(|standby| standby.state == "loading") {
                loaded_since.set(None);
                return false;
            }
            let since = loaded_since.get().unwrap_or_else(Instant::now);
            loaded_since.set(Some(since));
            let final_state = |standby: &StandbyView| current(standby) || standby.state == "none";
            standbys().any(current) && standbys().all(final_state) || since.elapsed() > WARM_AFTER
        };
        let is_hot = |state: &StateView| {
            let job = state.jobs.first();
            if job.is_none() {
                loaded_since.set(None);
            }
            all_alive(state) && job.is_some_and(settled)
        };
        let state = coordinator
            .wait_state(STANDBY_MAX, |state| StateView::deserialize(state).is_ok_and(|state| is_hot(&state)))?;
        let state = StateView::deserialize(&state)?;
        let (stages, standbys) =
            state.jobs.first().map(|job| (job.stages.as_slice(), job.standbys.as_slice())).unwrap_or_default();
        let covered: Vec<&StageView> = standbys
            .iter()
            .filter(|standby| current(standby))
            .filter_map(|standby| stages.get(usize::from(standby.stage)))
            .filter(|stage| stage.name != coordinator.name)
            .collect();
        let stages = if covered.is_empty() { stages.iter().collect() } else { covered };
        let holds = |name: &str| stages.iter().any(|stage| stage.name == name);
        let victims: Vec<usize> = (1..self.nodes.len()).filter(|&at| holds(&self.nodes[at].name)).collect();
        if victims.is_empty() {
            let jobs = json!(state.jobs);
            return Err(Error::other(format!("expected a stage on another node than the coordinator: {jobs}")));
        }
        Ok(victims)
    }

    /// Waits until the job runs, every standby is current, and every node is a member. Stages for which no standby node
    /// is found within [`SPARE_MAX`] are not waited for. Returns the coordinator and the job.
    fn wait_covered(&self) -> Result<(usize, JobView)> {
        let end = Instant::now() + STANDBY_MAX;
        let mut settled_since = None;
        loop {
            let mut settled = false;
            for at in 0..self.nodes.len() {
                let Ok(state) = self.nodes[at].get("/api/v1/state") else { continue };
                let state = StateView::deserialize(&state)?;
                let job = state.jobs.iter().find(|job| job.head && job.state == "ready");
                let Some(job) = job.filter(|_| all_alive(&state)) else { continue };
                let is = |standby: &StandbyView, names: &[&str]| names.contains(&standby.state.as_str());
                if job.standbys.iter().all(|standby| is(standby, &["current", "none"])) {
                    settled = true;
                    let since = settled_since.get_or_insert_with(Instant::now);
                    if job.standbys.iter().all(|standby| is(standby, &["current"])) || since.elapsed() > SPARE_MAX {
                        return Ok((at, job.clone()));
                    }
                }
            }
            if !settled {
                settled_since = None;
            }
            if Instant::now() > end {
                let jobs: Vec<_> = self.nodes.iter().map(|node| node.get("/api/v1/jobs").unwrap_or_default()).collect();
                return Err(Error::other(format!("no node coordinates the job with current standbys: {jobs:?}")));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Undisturbed generations in pairs, one with hot standbys and one without. The spare nodes run all the time, and
    /// drain for the measurement without standbys. The order alternates from pair to pair.
    fn speeds(&self) -> Result<Speeds> {
        let (mut speeds, end) = (Speeds::default(), Instant::now() + PAIRS_MAX);
        let speed = || self.demo.generate(&self.nodes[0], &mut |_, _| Ok(())).map(|run| run.tokens_per_s);
        self.wait_hot()?;
        let warm_up = speed()?;
        let mut moves = 0;
        while speeds.with.len() < PAIRS && (speeds.with.len() < 2 || Instant::now() < end) {
            speeds.with.push(speed()?);
            let Some(spares) = self.drain_spares()? else {
                speeds.with.pop();
                self.wait_hot()?;
                moves += 1;
                if moves > MOVES_MAX {
                    if speeds.with.is_empty() {
                        speeds.with.push(warm_up);
                    }
                    break;
                }
                continue;
            };
            speeds.without.push(speed()?);
            if speeds.with.len() < PAIRS && Instant::now() < end {
                speeds.without.push(speed()?);
            }
            spares.iter().try_for_each(|spare| drain(spare, false))?;
            self.wait_hot()?;
            if speeds.with.len() < speeds.without.len() {
                speeds.with.push(speed()?);
            }
        }
        Ok(speeds)
    }

    /// Drains the nodes without a stage; returns them once no stage has a standby. `None` if the job moved to other nodes
    /// meanwhile, as it may on a busy machine: then all accept work again.
    fn drain_spares(&self) -> Result<Option<Vec<&LocalNode>>> {
        self.wait_hot()?;
        let holders = |jobs: &[JobView]| -> Vec<String> {
            jobs.iter().take(1).flat_map(|job| &job.stages).map(|stage| stage.name.clone()).collect()
        };
        let stages = holders(&Vec::<JobView>::deserialize(self.nodes[0].get("/api/v1/jobs")?)?);
        let spares: Vec<&LocalNode> = self.nodes[1..].iter().filter(|node| !stages.contains(&node.name)).collect();
        spares.iter().try_for_each(|spare| drain(spare, true))?;
        let moved = Cell::new(false);
        let none = |state: StateView| {
            moved.set(holders(&state.jobs) != stages);
            moved.get()
                || state.jobs.first().is_none_or(|job| job.standbys.iter().all(|standby| standby.name.is_none()))
        };
        self.nodes[0].wait_state(STANDBY_MAX, |state| StateView::deserialize(state).is_ok_and(none))?;
        if moved.get() {
            spares.iter().try_for_each(|spare| drain(spare, false))?;
            return Ok(None);
        }
        Ok(Some(spares))
    }

    /// One generation; kills a node after `moment` tokens.
    fn generation(&mut self, victim: usize, moment: usize) -> Result<(Run, Instant)> {
        let (coordinator, others) = self.nodes.split_first_mut().ok_or_else(|| Error::other("no nodes"))?;
        let victim = &mut others[victim - 1];
        let mut killed = Instant::now();
        let run = self.demo.generate(coordinator, &mut |so_far, _| {
            if so_far == moment {
                killed = Instant::now();
                victim.kill();
            }
            Ok(())
        })?;
        Ok((run, killed))
    }

    /// Restarts a node with its data directory; it rejoins its mesh automatically.
    fn restart(&mut self, at: usize) -> Result<()> {
        let name = self.nodes[at].name.clone();
        self.nodes[at] = self.demo.start(&name, Some(self.memory), self.ticket.clone())?;
        Ok(())
    }
}

fn all_alive(state: &StateView) -> bool {
    state.peers.iter().filter(|peer| peer.state == "alive").count() == NAMES.len()
}

fn drain(node: &LocalNode, on: bool) -> Result<()> {
    node.post("/api/v1/drain", &json!({"on": on})).map(|_| ())
}

/// Tokens per second; values of the same index form a pair.
#[derive(Debug, Default)]
struct Speeds {
    with: Vec<f64>,
    without: Vec<f64>,
}

impl Speeds {
    /// The median slowdown of the pairs with standbys, in percent.
    fn cost_percent(&self) -> f64 {
        let costs: Vec<f64> =
            self.with.iter().zip(&self.without).map(|(with, without)| 100.0 * (1.0 - with / without)).collect();
        middle(&costs)
    }
}

/// The median.
fn middle(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        even if even % 2 == 0 => f64::midpoint(sorted[half - 1], sorted[half]),
        _ => sorted[half],
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): the same seed kills at the same tokens.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}
