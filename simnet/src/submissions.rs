//! What submitters ask of a mesh: simulations, from their submission over all coordinators to their end, and what was reported.
//!
//! A submitter speaks through `Input`s and `Event`s only. Where a simulation ends with its coordinator, its submitter takes it up
//! again from the coordinator's last checkpoint, as `submit --resume` does. Next: `checker/reports.rs`.
use crate::case::{Case, Simulation};
use crate::compute::mix;
use crate::host::{Host, HostId};
use crate::world::{Told, World};
use node_core::id::{CallId, Epoch, JobId};
use node_core::input::Input;
use node_core::output::Event;
use node_core::time::{Duration, Instant};
use node_core::work::steps::{Report, StepsEvent};
use node_core::work::{Ending, JobSpec, Placement};
use std::collections::BTreeMap;

/// How a simulation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// All steps are made.
    Done,
    /// Its submitter ended it.
    Cancelled,
    /// A coordinator said why.
    Failed(String),
    /// The coordinator was lost, no successor continued it, and there is no checkpoint to take it up from.
    Broken,
}

/// A report as a coordinator told it.
#[derive(Clone, Debug)]
pub struct Reported {
    /// When.
    pub at: Instant,
    /// By which coordinator.
    pub host: HostId,
    /// In which of its lives.
    pub life: u32,
    /// Under which of its epochs.
    pub epoch: Option<Epoch>,
    /// After this step.
    pub step: u32,
    /// What.
    pub report: Report,
}

/// One simulation and everything reported of it.
#[derive(Clone, Debug)]
pub struct Submission {
    /// What was asked for.
    pub simulation: Simulation,
    /// Its first state.
    pub seed: u64,
    /// Its jobs: the first, and one for each time that it was taken up from a checkpoint.
    pub jobs: Vec<JobId>,
    /// When the present job was submitted.
    pub submitted: Option<Instant>,
    /// The last known coordinator.
    pub coordinator: HostId,
    /// When its submitter ended it.
    pub cancelled: Option<Instant>,
    /// All reports, in the order in which they were told.
    pub reports: Vec<Reported>,
    /// Steps of checkpoints on disk, as coordinators told them: of which job, and after which step.
    pub checkpoints: Vec<(JobId, u32)>,
    /// Every step that was reported, of each coordinator: when, by whom, which.
    pub progress: Vec<(Instant, HostId, u32)>,
    /// Its end.
    pub end: Option<(Instant, End)>,
    /// Ends that a coordinator told while another one continued: when, by whom, why.
    pub others: Vec<(Instant, HostId, String)>,
    /// Times that it was taken over, and that it was submitted again.
    pub successions: u32,
    /// From which step the last placement of each coordinator goes on.
    placed: BTreeMap<HostId, u32>,
    /// Under which epoch each coordinator runs it: for a while there may be two.
    runs: BTreeMap<HostId, Epoch>,
    /// Its coordinator is lost with it: it is submitted again from the checkpoint of this step once that host runs.
    resume: Option<u32>,
}

/// All simulations of a case.
#[derive(Clone, Debug, Default)]
pub struct Submissions {
    /// Each of them.
    pub all: Vec<Submission>,
}

impl Submissions {
    /// None submitted yet.
    pub fn of(case: &Case) -> Self {
        let of = |(simulation, index): (&Simulation, u64)| Submission {
            simulation: simulation.clone(),
            seed: mix(case.seed, index),
            jobs: vec![JobId(mix(case.seed ^ JOBS, index))],
            submitted: None,
            coordinator: HostId(simulation.host),
            cancelled: None,
            reports: Vec::new(),
            checkpoints: Vec::new(),
            progress: Vec::new(),
            end: None,
            others: Vec::new(),
            successions: 0,
            placed: BTreeMap::new(),
            runs: BTreeMap::new(),
            resume: None,
        };
        Submissions { all: case.simulations.iter().zip(0..).map(of).collect() }
    }

    /// Takes in what nodes told.
    pub fn hear(&mut self, world: &World, told: &[Told]) {
        for told in told {
            for submission in &mut self.all {
                submission.hear(world, told.at, told.host, &told.event);
            }
        }
    }

    /// Submits, cancels and takes up again what is due. `usable`: whether a person could ask a host's node for something.
    pub fn step(&mut self, world: &mut World, origin: Instant, usable: impl Fn(&World, HostId) -> bool) {
        for submission in &mut self.all {
            submission.step(world, origin, &usable);
        }
    }

    /// Whether all have ended.
    pub fn all_ended(&self) -> bool {
        self.all.iter().all(|submission| submission.end.is_some())
    }

    /// Bytes of the grids that have not ended: cells and what a tile takes besides, as if there were one on each of `hosts`.
    pub fn bytes(&self, hosts: u64) -> u64 {
        let open = self.all.iter().filter(|submission| submission.end.is_none());
        open.map(|submission| submission.bytes(hosts)).sum()
    }
}

impl Submission {
    /// The present job.
    pub fn job(&self) -> JobId {
        self.jobs[self.jobs.len() - 1]
    }

    /// Whether its coordinator was lost with it, and it has not been submitted again.
    pub fn is_lost(&self) -> bool {
        self.resume.is_some() || matches!(self.end, Some((_, End::Broken)))
    }

    /// How people name it.
    pub fn name(&self) -> String {
        format!("simulation {:016x}", self.job().0)
    }

    /// Bytes of its grid and its standbys', as if there were a tile on each of `hosts`.
    pub fn bytes(&self, hosts: u64) -> u64 {
        let work = self.simulation.work();
        2 * (self.simulation.cells() * work.state_bits / 8 * HALO_TIMES + hosts * work.scratch_bytes)
    }

    fn step(&mut self, world: &mut World, origin: Instant, usable: &impl Fn(&World, HostId) -> bool) {
        let now = world.now();
        if self.end.is_some() {
            return;
        }
        let Some(submitted) = self.submitted else {
            let due = origin + self.simulation.at.since(Instant(0)) <= now;
            let hosts = world.hosts().count() as u32;
            let first = self.simulation.host;
            let host = (0..hosts).map(|step| HostId((first + step) % hosts)).find(|host| usable(world, *host));
            if let Some(host) = host.filter(|_| due) {
                self.submit(world, host, None);
            }
            return;
        };
        let due = self.simulation.cancel_after.is_some_and(|after| submitted + after <= now);
        if due && self.cancelled.is_none() && self.jobs.len() == 1 && usable(world, self.coordinator) {
            self.cancelled = Some(now);
            world.inject(self.coordinator, Input::End { job: self.job() });
        }
        self.look_whether_lost(world);
        if let Some(step) = self.resume
            && usable(world, self.coordinator)
        {
            self.take_up(world, step);
        }
    }

    fn submit(&mut self, world: &mut World, host: HostId, resume: Option<u32>) {
        (self.coordinator, self.submitted, self.resume) = (host, Some(world.now()), None);
        self.runs.clear();
        self.placed.clear();
        let spec = self.simulation.spec(self.job(), self.seed, resume);
        let call = CallId(spec.job.0);
        world.inject(host, Input::Start { call, job: Box::new(JobSpec::Steps(spec)) });
    }

    /// Its coordinator is dead and it is held nowhere: it is over, or goes on from the coordinator's checkpoint.
    fn look_whether_lost(&mut self, world: &World) {
        let job = self.job();
        let begun = self.submitted.is_some_and(|submitted| submitted < world.now());
        let paused = world.host(self.coordinator).paused_until.is_some();
        if !begun || paused || self.resume.is_some() || is_known(world, job) {
            return;
        }
        let disk = &world.host(self.coordinator).disk;
        let last = disk.checkpoints().filter(|((of, _), _)| *of == job).map(|((_, step), _)| *step).max();
        match last.filter(|_| self.cancelled.is_none()) {
            Some(step) => self.resume = Some(step),
            None if self.cancelled.is_some() => self.end = Some((world.now(), End::Cancelled)),
            None => self.end = Some((world.now(), End::Broken)),
        }
    }

    fn take_up(&mut self, world: &mut World, step: u32) {
        let before = self.job();
        self.jobs.push(JobId(mix(before.0, u64::from(step))));
        self.successions += 1;
        let (job, host) = (self.job(), self.coordinator);
        let resume = world.host_mut(host).disk.adopt_checkpoint(before, job, step).then_some(step);
        self.submit(world, host, resume);
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "a submitter hears of few of many things")]
    fn hear(&mut self, world: &World, at: Instant, host: HostId, event: &Event) {
        let job = self.job();
        match event {
            Event::JobInherited { job: of, .. } if *of == job => {
                self.coordinator = host;
                self.successions += 1;
            }
            Event::JobPlaced { job: of, placement, .. } if *of == job => {
                if let Placement::Tiles { step, .. } = **placement {
                    self.placed.insert(host, step);
                }
            }
            Event::JobReady { job: of, epoch, .. } if *of == job => {
                self.runs.insert(host, *epoch);
                self.progress.push((at, host, self.placed.get(&host).copied().unwrap_or(0)));
            }
            Event::JobEnded { job: of, ending, .. } if *of == job => self.ended(world, at, host, ending),
            Event::Steps { job: of, event } if *of == job => self.hear_of_steps(world, at, host, event),
            _ => {}
        }
    }

    fn hear_of_steps(&mut self, world: &World, at: Instant, host: HostId, event: &StepsEvent) {
        match event {
            StepsEvent::Progress { step } => self.progress.push((at, host, *step)),
            StepsEvent::Report { step, report } => {
                let epoch = self.runs.get(&host).copied();
                let (life, step, report) = (world.host(host).life, *step, report.clone());
                self.reports.push(Reported { at, host, life, epoch, step, report });
            }
            StepsEvent::Checkpoint { step } => self.checkpoints.push((self.job(), *step)),
            StepsEvent::Runs { .. } | StepsEvent::Waiting { .. } => {}
        }
    }

    fn ended(&mut self, world: &World, at: Instant, host: HostId, ending: &Ending) {
        let end = match ending {
            Ending::Completed => End::Done,
            Ending::Cancelled if self.cancelled.is_some() => End::Cancelled,
            Ending::Cancelled => End::Failed("it was cancelled, though its submitter did not ask for it".into()),
            Ending::Moved(_) => {
                let goes_on = |other: &&Host| other.id != host && coordinates(other.node.as_ref(), self.job());
                if host == self.coordinator {
                    self.coordinator = world.hosts().find(goes_on).map_or(host, |other| other.id);
                }
                return;
            }
            Ending::Failed(reason) => End::Failed(reason.clone()),
        };
        let job = self.job();
        let continues = world.hosts().any(|other| other.id != host && coordinates(other.node.as_ref(), job));
        match end {
            End::Failed(reason) if continues => self.others.push((at, host, reason)),
            end if self.end.is_none() => self.end = Some((at, end)),
            End::Done | End::Cancelled | End::Broken | End::Failed(_) => {}
        }
    }
}

fn coordinates(node: Option<&node_core::node::Node>, job: JobId) -> bool {
    node.is_some_and(|node| node.jobs().any(|view| view.job == job))
}

/// Whether a running node coordinates a simulation or holds a tile of it.
fn is_known(world: &World, job: JobId) -> bool {
    let nodes = || world.hosts().filter_map(|host| host.node.as_ref());
    nodes().any(|node| coordinates(Some(node), job)) || nodes().any(|node| node.parts().any(|held| held.job == job))
}

/// Tells the names of simulations from those of other things drawn from a seed.
const JOBS: u64 = 0x51D0_1A71_0000_0000;
/// Tiles with halos take at most this many times the bytes of their cells.
const HALO_TIMES: u64 = 4;
/// All steps of a simulation on one host, and a part of them again, take at most this long once everything was mended.
pub fn settle_max(simulation: &Simulation) -> Duration {
    Duration::from_nanos(u64::from(simulation.steps) * simulation.cells() * CASE_CELL_NS * 3)
}

/// Nanoseconds that a cell of a case's simulations takes a host for a step.
pub const CASE_CELL_NS: u64 = 400_000;
