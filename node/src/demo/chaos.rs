//! `meshnode demo --chaos`: a stage is killed in the middle of each of many generations, and the client's stalls are measured.
use super::{Demo, JOIN_MAX, Run, mib};
use crate::cluster::LocalNode;
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{Error, Result};
use std::time::{Duration, Instant};

/// Longest wait for a hot standby after a loss: another node fetches, loads and catches up.
const STANDBY_MAX: Duration = Duration::from_secs(60);
/// Generations whose speed is measured.
const SPEED_RUNS: usize = 5;
/// Tokens before which and after which nobody is killed: the client has to see the stall.
const MARGIN: u64 = 4;

/// The last line of `--chaos --json`.
#[derive(Clone, Debug, Serialize)]
pub struct ChaosSummary {
    /// Stages killed, each in the middle of a generation.
    pub kills: usize,
    /// Requests that did not end as they should.
    pub requests_lost: usize,
    /// Every generation gave the tokens of one undisturbed node.
    pub tokens_equal_solo: bool,
    /// Silence between two tokens around a kill as the client saw it, milliseconds: the middle one.
    pub stall_ms_p50: f64,
    /// 99 of 100 were shorter.
    pub stall_ms_p99: f64,
    /// The longest.
    pub stall_ms_max: f64,
    /// How many were above a second.
    pub stalls_above_1s: usize,
    /// Node processes.
    pub nodes: usize,
    /// `--seed` of the random choices.
    pub seed: u64,
    /// Tokens per second while standbys follow, the middle of a few generations.
    pub tokens_per_s: f64,
    /// The same before there were nodes to stand by. On a machine with fewer cores than nodes the standbys take their
    /// computing from the stages.
    pub tokens_per_s_without_standbys: f64,
}

/// Nodes of the mesh: two hold the model, one stands by, and one may be starting again.
const NAMES: [&str; 4] = ["ada", "bea", "cem", "dov"];

impl Demo {
    /// Kills one stage in each of `kills` generations.
    pub(super) fn chaos(&self, kills: usize, seed: u64) -> Result<ChaosSummary> {
        let solo = self.solo()?;
        // As for three nodes: any two hold the model, so that two stand by or start again.
        let memory = solo.bytes * 8 / 9;
        self.screen.say("four", &format!("four nodes with {} each; one is killed in each generation", mib(memory)));
        let mut mesh = Mesh { demo: self, memory, ticket: None, nodes: Vec::new() };
        let (first, spares) = NAMES.split_at(2);
        first.iter().try_for_each(|name| mesh.add(name))?;
        mesh.nodes[0].wait_members(first.len(), JOIN_MAX)?;
        self.place(&mesh.nodes)?;
        let without = mesh.speed()?;
        spares.iter().try_for_each(|name| mesh.add(name))?;
        mesh.wait_hot()?;
        let with = mesh.speed()?;
        let bar = self.screen.progress(kills as u64);
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
        bar.finish_and_clear();
        stalls.sort_by(f64::total_cmp);
        let of_100 = |percent: usize| stalls[(stalls.len() * percent).div_ceil(100).max(1) - 1];
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
            tokens_per_s: with,
            tokens_per_s_without_standbys: without,
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

    /// Waits until everybody is there and every stage but the head's has a standby that is current; returns the nodes that
    /// hold such stages, at least one.
    fn wait_hot(&self) -> Result<Vec<usize>> {
        let hot = |job: &Value| {
            let standbys = job["standbys"].as_array().map(Vec::as_slice).unwrap_or_default();
            job["state"] == "ready" && !standbys.is_empty() && standbys.iter().all(|s| s["state"] == "current")
        };
        let alive = |state: &Value| {
            state["peers"]
                .as_array()
                .is_some_and(|peers| peers.iter().filter(|p| p["state"] == "alive").count() == NAMES.len())
        };
        let state = self.nodes[0].wait_state(STANDBY_MAX, |state| alive(state) && hot(&state["jobs"][0]))?;
        let stages = state["jobs"][0]["stages"].as_array().cloned().unwrap_or_default();
        let holds = |name: &str| stages.iter().any(|stage| stage["name"] == name);
        let victims: Vec<usize> = (1..self.nodes.len()).filter(|&at| holds(&self.nodes[at].name)).collect();
        if victims.is_empty() {
            return Err(Error::other(format!("the job uses no node but the head: {}", state["jobs"])));
        }
        Ok(victims)
    }

    /// Tokens per second of undisturbed generations: the middle one.
    fn speed(&self) -> Result<f64> {
        let runs = (0..SPEED_RUNS).map(|_| self.demo.generate(&self.nodes[0], &mut |_, _| Ok(())));
        let mut speeds = runs.map(|run| run.map(|run| run.tokens_per_s)).collect::<Result<Vec<f64>>>()?;
        speeds.sort_by(f64::total_cmp);
        Ok(speeds[speeds.len() / 2])
    }

    /// One generation; a node is killed when so many tokens have come.
    fn generation(&mut self, victim: usize, moment: usize) -> Result<(Run, Instant)> {
        let (head, others) = self.nodes.split_first_mut().ok_or_else(|| Error::other("no nodes"))?;
        let victim = &mut others[victim - 1];
        let mut killed = Instant::now();
        let run = self.demo.generate(head, &mut |so_far, _| {
            if so_far == moment {
                killed = Instant::now();
                victim.kill();
            }
            Ok(())
        })?;
        Ok((run, killed))
    }

    /// The same node, in its next life: it finds its mesh by itself.
    fn restart(&mut self, at: usize) -> Result<()> {
        let name = self.nodes[at].name.clone();
        self.nodes[at] = self.demo.start(&name, Some(self.memory), self.ticket.clone())?;
        Ok(())
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
