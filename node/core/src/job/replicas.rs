//! Replicas of a served model: further pipelines on nodes that its first one does not use.
//!
//! A replica is a job of its own, with its placement, epochs, standbys and successors. Callers know the first job only, and each
//! request runs in the job of the group that has the least to do. A replica that cannot be placed ends. While a job of the group
//! waits for a placement, another one that runs continues its requests.
use super::Jobs;
use super::lifecycle::{Job, Phase};
use super::output::{JobOutput, JobQuestion, PlannerQuestion, ResidentBytes};
use super::serve::{Caller, Serve, Submitted};
use super::workload::Workload;
use crate::id::{Epoch, JobId, NodeId};
use crate::limits::{JOBS_MAX, REPLICA_GAIN_PERCENT, REPLICAS_MAX, STANDBY_RETRY};
use crate::time::{Duration, Instant};
use crate::work::serve::{ModelSpec, Request};
use crate::work::{Ending, QuestionOrigin};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use partitioner::{Answer, Plan};

/// The replicas at one coordinator.
///
/// Invariants: a first job is no replica; at most [`JOBS_MAX`] ended replicas are remembered.
#[derive(Debug, Default)]
pub(super) struct Replicas {
    /// The first job of each replica. Ended ones stay for a while, because entry nodes may still name them.
    firsts: BTreeMap<JobId, JobId>,
    /// Replicas that wait for their first plan.
    planned: BTreeSet<JobId>,
    /// For each first job, the epoch and the mesh that the last search for room was for.
    searches: BTreeMap<JobId, Search>,
}

#[derive(Debug, Default)]
struct Search {
    epoch: Option<Epoch>,
    /// When to search again. `None` while nothing has changed since the last search.
    due: Option<Instant>,
}

/// How long after a placement, or a change of the mesh, room for a replica is searched: standbys come first, and models that
/// lost a stage.
const SEARCH_AFTER: Duration = STANDBY_RETRY.saturating_mul(8);

/// What became of a request that was submitted to a group of replicas.
pub(super) enum Routed {
    /// It runs, waits or was answered in this job.
    To(JobId),
    /// It was rejected, and its caller was sent the reason.
    Refused,
    /// This node is leaving the mesh, and the request is new.
    Leaving,
    /// This node serves no such job.
    Unknown,
}

impl Replicas {
    /// The first job of a replica.
    pub(super) fn first(&self, job: JobId) -> Option<JobId> {
        self.firsts.get(&job).copied()
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let due = self.searches.values().filter_map(|search| search.due).min()?;
        Some((due, "replicas: a search for room is due"))
    }

    /// The mesh changed: there may be room for replicas that are missing.
    pub(super) fn handle_fleet_changed(&mut self, now: Instant) {
        for search in self.searches.values_mut() {
            search.due.get_or_insert(now + SEARCH_AFTER);
        }
    }

    pub(super) fn assert_invariants(&self, is_job: impl Fn(JobId) -> bool) {
        let ended = self.firsts.keys().filter(|&&job| !is_job(job) && !self.planned.contains(&job));
        assert!(ended.count() <= JOBS_MAX, "too many ended replicas are remembered");
        let nested = self.firsts.values().find(|&first| self.firsts.contains_key(first));
        assert!(nested.is_none(), "{nested:?} has replicas and is one");
    }
}

impl Jobs {
    /// The jobs that answer for `job`: its first job, then the replicas.
    fn group(&self, job: JobId) -> Vec<JobId> {
        let first = self.replicas.first(job).unwrap_or(job);
        let replicas = self.replicas.firsts.iter().filter(|(_, of)| **of == first).map(|(&replica, _)| replica);
        core::iter::once(first).chain(replicas).filter(|job| self.jobs.contains_key(job)).collect()
    }

    /// Submits a request where it runs already, or where it has the least to wait for.
    pub(super) fn route(
        &mut self,
        now: Instant,
        caller: Caller,
        job: JobId,
        mut request: Request,
        from: u32,
    ) -> Routed {
        let group = self.group(job);
        for &id in &group {
            let Some(serve) = self.jobs.get_mut(&id).and_then(Job::serve) else { continue };
            match serve.requests.attach(caller, request, from, &mut self.out) {
                Some(unknown) => request = unknown,
                None => return Routed::To(id),
            }
        }
        // Replicas only finish what they have once the first job is over here.
        if !self.jobs.contains_key(&self.replicas.first(job).unwrap_or(job)) {
            return Routed::Unknown;
        }
        if self.leaving {
            return Routed::Leaving;
        }
        let cost = |id: &JobId| match self.jobs.get(id) {
            Some(Job { workload: Workload::Serve(serve), phase, .. }) => {
                let load = u128::from(serve.requests.load(&request.prompt));
                Some((*phase != Phase::Running, load * u128::from(serve.step_ns().max(1))))
            }
            Some(Job { workload: Workload::Steps(_), .. }) | None => None,
        };
        let least = group.iter().filter_map(|id| Some((cost(id)?, *id))).min_by_key(|(cost, _)| *cost);
        let Some((_, to)) = least else { return Routed::Unknown };
        let Some(serve) = self.jobs.get_mut(&to).and_then(Job::serve) else { return Routed::Unknown };
        match serve.requests.submit(now, caller, request, from, &mut self.out) {
            Submitted::Taken => Routed::To(to),
            Submitted::Refused => Routed::Refused,
        }
    }

    /// A caller of another node cancelled its request.
    pub(super) fn cancel_in_group(&mut self, now: Instant, job: JobId, caller: Caller) {
        for id in self.group(job) {
            if let Some(serve) = self.jobs.get_mut(&id).and_then(Job::serve) {
                serve.requests.cancel(now, caller, &mut self.out);
            }
        }
    }

    /// The replicas of a first job.
    pub(super) fn replicas_of(&self, first: JobId) -> Vec<JobId> {
        self.group(first).into_iter().filter(|&job| self.replicas.first(job) == Some(first)).collect()
    }

    // ---- the life of a group

    /// Continues requests where a pipeline runs, ends replicas that are not needed or cannot be placed, and keeps the
    /// placements of a group apart.
    pub(super) fn tend_replicas(&mut self, now: Instant) {
        self.note_searches(now);
        if self.replicas.firsts.is_empty() {
            return;
        }
        let firsts: BTreeSet<JobId> = self.replicas.firsts.values().copied().collect();
        for first in firsts {
            let group = self.group(first);
            for &id in &group {
                self.relieve(now, id, &group);
            }
            self.end_replicas(first, &group);
            self.keep_apart(&group);
        }
    }

    /// A job that waits for a placement, or has ended, gives its requests to another of the group.
    fn relieve(&mut self, now: Instant, id: JobId, group: &[JobId]) {
        let Some(job) = self.jobs.get(&id) else { return };
        let over = job.ending.is_some() && job.successor.is_none();
        let waits = matches!(job.phase, Phase::Planning { .. } | Phase::Degraded { .. });
        if !over && !waits {
            return;
        }
        // A replica without a placement ends, so a job that still waits for its own is better than none.
        let is_replica = |id: &JobId| self.replicas.first(*id).is_some();
        let ends = over || is_replica(&id) && job.degraded_reason().is_some();
        let able = |other: &&JobId| {
            let other = self.jobs.get(*other).filter(|other| other.id != id && other.ending.is_none());
            let lasts = |other: &Job| !is_replica(&other.id) || other.degraded_reason().is_none();
            other.is_some_and(|other| other.is_running() || ends && lasts(other))
        };
        let runs = |other: &&JobId| self.jobs.get(*other).is_some_and(Job::is_running);
        let able: Vec<&JobId> = group.iter().filter(able).collect();
        let Some(&to) = able.iter().copied().find(runs).or(able.first().copied()) else { return };
        let Some(serve) = self.jobs.get_mut(&id).and_then(Job::serve).filter(|serve| !serve.requests.is_empty()) else {
            return;
        };
        let streams = serve.requests.give_away(&mut self.out);
        let Some(job) = self.jobs.get_mut(&to) else { return };
        if let Some(serve) = job.serve() {
            let calls = serve.requests.take_over(now, streams, &mut self.out);
            self.calls.extend(calls.into_iter().map(|call| (call, to)));
        }
        job.announce_successors(&mut self.out);
    }

    /// Ends replicas that have no placement, and those that are idle once their first job is gone.
    fn end_replicas(&mut self, first: JobId, group: &[JobId]) {
        let is_gone = !self.jobs.contains_key(&first);
        for id in group.iter().filter(|id| **id != first) {
            let Some(job) = self.jobs.get_mut(id).filter(|job| job.ending.is_none()) else { continue };
            let idle = job.serve().is_some_and(|serve| serve.requests.is_empty());
            if is_gone && idle {
                job.ending = Some(Ending::Completed);
            } else if idle && let Some(reason) = job.degraded_reason() {
                job.ending = Some(Ending::Failed(reason));
            }
        }
    }

    /// No node is an owner in two jobs of a group.
    fn keep_apart(&mut self, group: &[JobId]) {
        let owners = |id: &JobId| self.jobs.get(id).map(Job::owners).unwrap_or_default();
        let owners: Vec<(JobId, Vec<NodeId>)> = group.iter().map(|id| (*id, owners(id))).collect();
        for id in group {
            if let Some(job) = self.jobs.get_mut(id) {
                let others = owners.iter().filter(|(other, _)| other != id).flat_map(|(_, owners)| owners);
                job.apart = others.copied().collect();
            }
        }
    }

    /// Forgets the oldest ended replicas.
    pub(super) fn forget_ended_replicas(&mut self) {
        let Replicas { firsts, planned, searches } = &mut self.replicas;
        searches.retain(|first, _| self.jobs.contains_key(first));
        let ended: Vec<JobId> =
            firsts.keys().filter(|job| !self.jobs.contains_key(job) && !planned.contains(job)).copied().collect();
        // Ids are hashes, so "the first ones" are arbitrary ones. Entry nodes name an ended replica for seconds only.
        ended.iter().take(ended.len().saturating_sub(JOBS_MAX)).for_each(|job| {
            firsts.remove(job);
        });
    }

    // ---- more replicas

    /// Whether a first job should have more replicas.
    fn wants_replica(&self, first: JobId) -> Option<&Serve> {
        let job = self.jobs.get(&first).filter(|job| job.is_running() && job.ending.is_none())?;
        // The replicas of a lost coordinator's job have successors of their own.
        let Workload::Serve(serve) = &job.workload else { return None };
        let most = serve.model.replicas.min(REPLICAS_MAX) as usize;
        let is_first = self.replicas.first(first).is_none() && job.previous.is_empty();
        let awaited = self.replicas.planned.iter().any(|job| self.replicas.first(*job) == Some(first));
        (is_first && !awaited && self.group(first).len() < most).then_some(serve)
    }

    /// Room is searched after each placement of a first job.
    fn note_searches(&mut self, now: Instant) {
        let several = |job: &&Job| match &job.workload {
            Workload::Serve(serve) => serve.model.replicas > 1 && job.is_running(),
            Workload::Steps(_) => false,
        };
        for job in self.jobs.values().filter(several) {
            let search = self.replicas.searches.entry(job.id).or_default();
            if search.epoch.replace(job.epoch) != Some(job.epoch) {
                search.due.get_or_insert(now + SEARCH_AFTER);
            }
        }
    }

    /// Asks the planner for one more pipeline of each model that should have one.
    pub(super) fn seek_replicas(&mut self, now: Instant) {
        let due = self.replicas.searches.iter_mut().filter(|(_, search)| search.due.is_some_and(|due| due <= now));
        let due: Vec<JobId> = due.map(|(&first, search)| (first, search.due = None).0).collect();
        for first in due {
            let full = self.full().is_some();
            let Some(serve) = self.wants_replica(first).filter(|_| !full) else { continue };
            let what =
                JobQuestion::Model { work: serve.model.work.clone(), repair: None, present: None, caller: false };
            let without = self.group(first).iter().filter_map(|id| self.jobs.get(id)).flat_map(Job::owners).collect();
            // The first job's exclusions of nodes that it lost count for the replica, too.
            let ask = PlannerQuestion { job: Some(first), resident: ResidentBytes::new(), without, what };
            self.jobs_made += 1;
            let job = self.job_id(self.jobs_made);
            self.replicas.firsts.insert(job, first);
            self.replicas.planned.insert(job);
            let (asked, ask) = (QuestionOrigin::Job { job, question: 0 }, Box::new(ask));
            self.out.push_back(JobOutput::Ask { asked, ask });
        }
    }

    /// The planner answered for a replica. Returns the answer if the question was another one.
    pub(super) fn handle_replica_plan(&mut self, now: Instant, job: JobId, answer: Answer) -> Option<Answer> {
        if !self.replicas.planned.remove(&job) {
            return Some(answer);
        }
        let first = self.replicas.firsts.remove(&job)?;
        let serve = self.wants_replica(first)?;
        let Answer::Model(Ok(found)) = &answer else { return None };
        let present: u64 = self.group(first).iter().filter_map(|id| self.jobs.get(id)).map(rate_of).sum();
        if rate(&found.plan).saturating_mul(100) < present.saturating_mul(REPLICA_GAIN_PERCENT) {
            return None;
        }
        let model = ModelSpec { replicas: 0, ..(*serve.model).clone() };
        let (name, workload) = (model.name.clone(), Workload::Serve(Serve::new(job, model)));
        let mut replica = Job::new(job, self.me, name, workload, None);
        if let Some(first) = self.jobs.get(&first) {
            replica.domains = first.domains.clone();
            replica.draining = first.draining.clone();
        }
        replica.handle_answer(now, 0, answer, &mut self.out);
        self.jobs.insert(job, replica);
        self.replicas.firsts.insert(job, first);
        if let Some(search) = self.replicas.searches.get_mut(&first) {
            search.due.get_or_insert(now + SEARCH_AFTER);
        }
        None
    }
}

fn rate_of(job: &Job) -> u64 {
    match &job.workload {
        Workload::Serve(serve) => serve.plan().map_or(0, rate),
        Workload::Steps(_) => 0,
    }
}

/// Tokens per 1000 seconds that a pipeline computes when it is full.
fn rate(plan: &Plan) -> u64 {
    let slowest = plan.stages().iter().map(|stage| stage.step_ns).max().unwrap_or(0);
    1_000_000_000_000_u64.checked_div(slowest).unwrap_or(0)
}
