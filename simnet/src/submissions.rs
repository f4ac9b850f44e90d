//! Simulations as submitters see them: submission, cancellation, resubmission after the loss of a coordinator, and reported
//! results.
//!
//! A submitter uses `Input`s and `Event`s only. If a simulation is lost with its coordinator, its submitter resumes it from
//! that coordinator's last checkpoint, as `submit --resume` does. Next: `checker/reports.rs`.
use crate::case::{Case, Simulation};
use crate::compute::mix;
use crate::host::{Host, HostId};
use crate::world::{Notification, World};
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
    /// All steps are completed.
    Done,
    /// Its submitter cancelled it.
    Cancelled,
    /// It failed, with the coordinator's reason.
    Failed(String),
    /// Lost with its coordinator: no successor continued it, and there is no checkpoint to resume from.
    Broken,
}

/// A report of a coordinator.
#[derive(Clone, Debug)]
pub struct Reported {
    /// When it was reported.
    pub at: Instant,
    /// The job, a new one after each resumption from a checkpoint.
    pub job: JobId,
    /// The coordinator.
    pub host: HostId,
    /// The life of the coordinator's host.
    pub life: u32,
    /// The epoch that the coordinator ran it under.
    pub epoch: Option<Epoch>,
    /// The step that it describes.
    pub step: u32,
    /// Sums and hash of that step.
    pub report: Report,
}

/// One simulation and everything reported about it.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The request.
    pub simulation: Simulation,
    /// Seed of the initial state.
    pub seed: u64,
    /// Its jobs: the first, then one for each resumption from a checkpoint.
    pub jobs: Vec<JobId>,
    /// When the current job was submitted.
    pub submitted: Option<Instant>,
    /// The last known coordinator.
    pub coordinator: HostId,
    /// When its submitter cancelled it.
    pub cancelled: Option<Instant>,
    /// All reports, in order of arrival.
    pub reports: Vec<Reported>,
    /// Checkpoints that coordinators reported as written: (job, step).
    pub checkpoints: Vec<(JobId, u32)>,
    /// All reported progress: (time, coordinator, step).
    pub progress: Vec<(Instant, HostId, u32)>,
    /// When and how it ended.
    pub end: Option<(Instant, End)>,
    /// Failures that a coordinator reported while another one continued: (time, host, reason).
    pub others: Vec<(Instant, HostId, String)>,
    /// Number of takeovers by a successor and of resubmissions.
    pub successions: u32,
    /// The start step of each coordinator's last placement.
    placed: BTreeMap<HostId, u32>,
    /// The epoch of each coordinator's run; two coordinators may overlap for a while.
    runs: BTreeMap<HostId, Epoch>,
    /// Lost with its coordinator: it is resubmitted from the checkpoint of this step once that host runs.
    resume: Option<u32>,
}

/// All simulations of a case.
#[derive(Clone, Debug, Default)]
pub struct Submissions {
    /// In the order of the case.
    pub all: Vec<Submission>,
}

impl Submissions {
    /// The simulations of a case, none submitted yet.
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

    /// Processes events that nodes reported.
    pub fn hear(&mut self, world: &World, told: &[Notification]) {
        for told in told {
            for submission in &mut self.all {
                submission.hear(world, told.at, told.host, &told.event);
            }
        }
    }

    /// Submits, cancels and resumes simulations that are due. `usable`: whether the node of a host accepts requests.
    pub fn step(&mut self, world: &mut World, origin: Instant, usable: impl Fn(&World, HostId) -> bool) {
        for submission in &mut self.all {
            submission.step(world, origin, &usable);
        }
    }

    /// Whether all have ended.
    pub fn all_ended(&self) -> bool {
        self.all.iter().all(|submission| submission.end.is_some())
    }

    /// Memory of all simulations that have not ended: cells, and the scratch memory of one tile on each of `hosts`.
    pub fn bytes(&self, hosts: u64) -> u64 {
        let open = self.all.iter().filter(|submission| submission.end.is_none());
        open.map(|submission| submission.bytes(hosts)).sum()
    }
}

impl Submission {
    /// The current job.
    pub fn job(&self) -> JobId {
        self.jobs[self.jobs.len() - 1]
    }

    /// Whether it was lost with its coordinator and is not resubmitted yet.
    pub fn is_lost(&self) -> bool {
        self.resume.is_some() || matches!(self.end, Some((_, End::Broken)))
    }

    /// Its name in violations.
    pub fn name(&self) -> String {
        format!("simulation {:016x}", self.job().0)
    }

    /// Memory of its grid and its standbys, with one tile on each of `hosts`.
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
        self.detect_loss(world);
        if let Some(step) = self.resume
            && usable(world, self.coordinator)
        {
            self.resubmit(world, step);
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

    /// Detects a lost simulation: no running node coordinates it or holds a tile. Ends it, or schedules its resumption from
    /// the coordinator's checkpoint.
    fn detect_loss(&mut self, world: &World) {
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

    fn resubmit(&mut self, world: &mut World, step: u32) {
        let before = self.job();
        self.jobs.push(JobId(mix(before.0, u64::from(step))));
        self.successions += 1;
        let (job, host) = (self.job(), self.coordinator);
        let resume = world.host_mut(host).disk.adopt_checkpoint(before, job, step).then_some(step);
        self.submit(world, host, resume);
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "a submitter handles few of many events")]
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
            Event::Steps { job: of, event } if *of == job => self.handle_steps(world, at, host, event),
            _ => {}
        }
    }

    fn handle_steps(&mut self, world: &World, at: Instant, host: HostId, event: &StepsEvent) {
        match event {
            StepsEvent::Progress { step } => self.progress.push((at, host, *step)),
            StepsEvent::Report { step, report } => {
                let epoch = self.runs.get(&host).copied();
                let (life, step, report) = (world.host(host).life, *step, report.clone());
                self.reports.push(Reported { at, job: self.job(), host, life, epoch, step, report });
            }
            StepsEvent::Checkpoint { step } => self.checkpoints.push((self.job(), *step)),
            StepsEvent::Runs { .. } | StepsEvent::Waiting { .. } => {}
        }
    }

    fn ended(&mut self, world: &World, at: Instant, host: HostId, ending: &Ending) {
        let end = match ending {
            Ending::Completed => End::Done,
            Ending::Cancelled if self.cancelled.is_some() => End::Cancelled,
            Ending::Cancelled => End::Failed("cancelled, though its submitter did not ask for it".into()),
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

/// Separates the job ids of simulations from other values drawn from a seed.
const JOBS: u64 = 0x51D0_1A71_0000_0000;
/// Upper bound: a tile with its halos takes at most this many times the bytes of its cells.
const HALO_TIMES: u64 = 4;
/// Upper bound for one host to compute all steps, and to replay a part of them, after all faults are healed.
pub fn settle_max(simulation: &Simulation) -> Duration {
    Duration::from_nanos(u64::from(simulation.steps) * simulation.cells() * CASE_CELL_NS * 3)
}

/// Nanoseconds per cell and step on a host of a case with simulations.
pub const CASE_CELL_NS: u64 = 400_000;
