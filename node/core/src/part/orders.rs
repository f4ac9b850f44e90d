//! Orders to a participant: it rejects, keeps, loads, fetches or drops parts.
use super::program::{Program, continues, is_in, must_be_here};
use super::{Fetch, HeldJob, Load, LocalPart, PartOutput, Parts, leaps};
use crate::id::{Epoch, JobId, NodeId, PartId};
use crate::limits::{JOBS_MAX, PARTS_MAX, RESTART_REPORTING};
use crate::message::ToCoordinator;
use crate::output::Output;
use crate::planted::{self, Planted};
use crate::time::Instant;
use crate::work::{Order, Ready, Resume};
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::{format, string::String, vec::Vec};

impl Parts {
    /// Why this node rejects an order, if it does.
    pub(super) fn refusal(&self, from: NodeId, job: JobId, epoch: Epoch, order: &Order) -> Option<String> {
        let known = self.jobs.get(&job);
        if from != epoch.issuer {
            Some(format!("epoch issued by {} but sent by {from}: only the coordinator places its job", epoch.issuer))
        } else if known.is_some_and(|held| !held.obeys(epoch.issuer)) {
            Some(format!("{from} is neither successor nor previous coordinator of job {:016x}", job.0))
        } else if known.is_some_and(|held| held.epoch.issuer != from && leaps(held.epoch, epoch)) {
            Some(format!("epoch {} of job {:016x} is too high to have been issued", epoch.counter, job.0))
        } else if known.is_none() && self.jobs.len() >= JOBS_MAX {
            Some(format!("this node already takes part in {JOBS_MAX} jobs"))
        } else if known.is_some_and(|held| held.parts.len() >= PARTS_MAX && !held.parts.contains_key(&order.part)) {
            Some(format!("this node already holds {PARTS_MAX} parts of the job"))
        } else {
            order.problem(self.me)
        }
    }

    pub(super) fn prepare(&mut self, now: Instant, from: NodeId, job: JobId, epoch: Epoch, order: Box<Order>) {
        let part = order.part;
        if let Some(mine) = self.jobs.get(&job).map(|held| held.epoch).filter(|mine| epoch < *mine) {
            return self.out.push_back(PartOutput::Stale { to: from, job, mine });
        }
        let refusal = self.refusal(from, job, epoch, &order);
        if refusal.is_none()
            && let Some(held) = self.jobs.get_mut(&job).filter(|held| held.hears_another(self.me, from))
        {
            // A coordinator that was absent learns that it has a successor.
            let mine = held.epoch;
            held.succession.defer(now, from, epoch, order);
            return self.out.push_back(PartOutput::Stale { to: from, job, mine });
        }
        if let Some(what) = refusal {
            self.out.push_back(PartOutput::Refused { from, what: what.clone() });
            // A coordinator that did not send this order would take the answer for a rejection of this node's part.
            if from == epoch.issuer {
                self.report(job, epoch, ToCoordinator::Prepared { part, result: Err(what) });
            }
            return;
        }
        let repeated = |held: &LocalPart| held.epoch == epoch && order.is_repeated(&held.order);
        let asked_again = self.jobs.get(&job).and_then(|held| held.parts.get(&part)).is_some_and(repeated);
        let busy = if self.draining && !self.jobs.contains_key(&job) {
            Some(format!("node {} takes no new work", self.me))
        } else if asked_again {
            None
        } else {
            self.device_stalled(now, order.device).map(|elapsed| {
                format!("the executor is stalled: it has been busy with one run for {} ms", elapsed.as_millis())
            })
        };
        if let Some(what) = busy {
            return self.report(job, epoch, ToCoordinator::Prepared { part, result: Err(what) });
        }
        self.adopt(now, job, epoch, &order);
        let Some(held) = self.jobs.get_mut(&job) else { return };
        match held.parts.get_mut(&part) {
            // A repeated order: the answer was lost, or is still pending.
            Some(known) if asked_again => {
                known.answer_due = true;
                self.answer(now, job, part);
            }
            Some(known) if continues(&order) && known.may_stay(&order) => self.keep(now, job, epoch, order),
            Some(_) | None => self.load(now, job, epoch, order),
        }
    }

    /// The job has this epoch from now on. What runs under a lower epoch pauses.
    pub(super) fn adopt(&mut self, now: Instant, job: JobId, epoch: Epoch, order: &Order) {
        let held = self.jobs.entry(job).or_insert_with(|| HeldJob::new(now, epoch));
        held.heard(now);
        if held.epoch < epoch {
            (held.epoch, held.go_received, held.stood_down) = (epoch, false, false);
            held.succession.replaced();
            if !planted::has(Planted::NoFence) {
                held.parts.values_mut().for_each(|part| part.run.pause(&mut self.out));
            }
            // All parts start again. Those of the old partition would take the memory of the new ones.
            if !continues(order) {
                held.drop_parts(job, |_, _| true, &mut self.out);
            }
        }
        self.fetches.remove(&(job, order.part));
        self.watch(job);
    }

    /// A part that is held is ordered under another epoch, or in another role.
    pub(super) fn keep(&mut self, now: Instant, job: JobId, epoch: Epoch, order: Box<Order>) {
        let part = order.part;
        let Some(held) = self.jobs.get_mut(&job) else { return };
        // Stages of the old placement that the order does not list. A node that is only a standby now gets no `Go` that
        // drops them.
        let left = |known: PartId, held: &LocalPart| {
            known != part && held.epoch < epoch && held.run.gives_way() && !order.other_parts.contains(&known)
        };
        held.drop_parts(job, left, &mut self.out);
        let Some(held) = held.parts.get_mut(&part) else { return };
        (held.epoch, held.answer_due, held.reroute) = (epoch, true, true);
        self.out.push_back(PartOutput::Shell(Output::Continue { job, epoch, order: order.clone() }));
        held.order = order;
        if let Some(step) = held.run.keep(now, epoch, &held.order) {
            let load = self.names.load();
            held.load = Load::Loading(load);
            self.out.push_back(PartOutput::Shell(Output::Restore { job, load, part, step }));
        }
        self.answer(now, job, part);
    }

    pub(super) fn load(&mut self, now: Instant, job: JobId, epoch: Epoch, order: Box<Order>) {
        let part = order.part;
        let Some(held) = self.jobs.get_mut(&job) else { return };
        if must_be_here(&order) {
            held.drop_parts(job, |known, _| known == part, &mut self.out);
            let what = String::from("this node does not hold the tile");
            return self.report(job, epoch, ToCoordinator::Prepared { part, result: Err(what) });
        }
        // Stages of another partition are dropped now, and their data for the same layers is reused.
        let replaced = |known: PartId, held: &LocalPart| {
            known == part || held.run.gives_way() && !(order.other_parts.contains(&known) && is_in(&held.order, &order))
        };
        let mut replaces = Vec::new();
        for (known, mut gone) in held.parts.extract_if(.., |known, held| replaced(*known, held)) {
            gone.run.end(&mut self.out);
            if matches!(gone.load, Load::Failed(_)) {
                // A device that failed has nothing worth reusing.
                self.out.push_back(PartOutput::Shell(Output::Drop { job, part: known }));
            } else {
                replaces.push(known);
            }
        }
        let load = self.names.load();
        let run = Program::new(now, job, epoch, &order);
        let state = Load::Loading(load);
        let known = LocalPart {
            order: order.clone(),
            epoch,
            load: state,
            bytes: 0,
            ram: 0,
            ram_pages: 0,
            answer_due: true,
            reroute: false,
            run,
        };
        held.parts.insert(part, known);
        self.out.push_back(PartOutput::Load { job, epoch, load, order, replaces });
    }

    /// Answers an order, if it can be answered now.
    pub(super) fn answer(&mut self, now: Instant, job: JobId, part: PartId) {
        let Some(held) = self.jobs.get_mut(&job).and_then(|held| held.parts.get_mut(&part)) else { return };
        let (epoch, device) = (held.epoch, held.order.device);
        let (bytes, ram, ram_pages) = (held.bytes, held.ram, held.ram_pages);
        if matches!(held.load, Load::Loading(_)) || held.run.is_busy() || !core::mem::take(&mut held.answer_due) {
            return;
        }
        let shadow = held.order.standby.is_some();
        let reroute = core::mem::take(&mut held.reroute);
        let Some(has) = held.run.answer(now, epoch, &held.order, reroute, &mut self.out) else { return };
        let result = match &held.load {
            Load::Failed(reason) => Err(reason.clone()),
            Load::Loading(_) | Load::Resident => Ok(Ready { device, bytes, ram, ram_pages, has }),
        };
        let failed = result.is_err();
        self.report(job, epoch, ToCoordinator::Prepared { part, result });
        if shadow && !failed {
            self.start_following(job, part);
        }
    }

    /// A standby starts to follow.
    pub(super) fn start_following(&mut self, job: JobId, part: PartId) {
        let Some(held) = self.jobs.get_mut(&job).and_then(|held| held.parts.get_mut(&part)) else { return };
        held.run.start_following(&held.order, part, &mut self.out);
    }

    pub(super) fn go(&mut self, now: Instant, job: JobId, part: PartId, resume: &Resume) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        let epoch = held.epoch;
        if !core::mem::replace(&mut held.go_received, true) {
            held.begins_until = now + RESTART_REPORTING;
        }
        // Parts that were not ordered again are not needed.
        held.drop_parts(job, |_, held| held.epoch != epoch, &mut self.out);
        if let Some(known) = held.parts.get_mut(&part).filter(|known| known.load == Load::Resident) {
            known.run.go(now, resume, &mut self.out);
        }
        self.watch(job);
        self.start(now, job);
    }

    /// Sets the nodes to exchange heartbeats with: the coordinator from the first order on, the owners of neighbouring
    /// parts from `Go` on, because they may not know of the job before that. A node that is the coordinator watches all
    /// participants in that role.
    pub(super) fn watch(&mut self, job: JobId) {
        let Some(held) = self.jobs.get(&job).filter(|held| held.epoch.issuer != self.me) else { return };
        let epoch = held.epoch;
        let mut nodes = BTreeSet::from([epoch.issuer]);
        for (&part, known) in held.parts.iter().filter(|(_, known)| held.go_received && known.order.standby.is_none()) {
            let beside = known.order.upstream(part).into_iter().chain(known.order.downstream(part));
            nodes.extend(beside.filter_map(|part| known.order.owner(part)));
        }
        nodes.remove(&self.me);
        self.out.push_back(PartOutput::Watch { job, epoch, nodes: nodes.into_iter().collect() });
    }

    pub(super) fn release(&mut self, job: JobId, part: PartId) {
        self.drop_part(job, |known, held| known == part && held.order.standby.is_some());
    }

    /// The coordinator does not use a part that waited for its order.
    pub(super) fn release_unordered(&mut self, job: JobId, part: PartId) {
        self.drop_part(job, |known, _| known == part);
    }

    fn drop_part(&mut self, job: JobId, gone: impl Fn(PartId, &LocalPart) -> bool) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        held.drop_parts(job, gone, &mut self.out);
        if held.parts.is_empty() {
            self.drop_job(job);
        }
    }

    pub(super) fn drop_job(&mut self, job: JobId) {
        let Some(mut held) = self.jobs.remove(&job) else { return };
        held.parts.values_mut().for_each(|part| part.run.end(&mut self.out));
        if held.epoch.issuer != self.me {
            self.out.push_back(PartOutput::Unwatch { job });
        }
        self.out.push_back(PartOutput::Shell(Output::Unload { job }));
    }

    // ---- data that is needed soon

    pub(super) fn fetch(&mut self, from: NodeId, job: JobId, epoch: Epoch, order: Box<Order>) {
        let part = order.part;
        let known = self.fetches.get(&(job, part)).filter(|known| known.epoch == epoch && known.order == order);
        if let Some(known) = known {
            if let Some(result) = known.result.clone() {
                // The answer was lost with a connection.
                self.report(job, epoch, ToCoordinator::Fetched { part, result });
            }
            return;
        }
        let mut refusal = self.refusal(from, job, epoch, &order).or_else(|| {
            let stale = self.jobs.get(&job).is_some_and(|held| epoch < held.epoch);
            stale.then(|| format!("epoch {} of the job is out of date", epoch.counter))
        });
        if refusal.is_none() && self.draining {
            refusal = Some(format!("node {} takes no new work", self.me));
        }
        if refusal.is_none() && self.fetches.len() >= JOBS_MAX && !self.fetches.contains_key(&(job, part)) {
            refusal = Some(format!("this node already fetches the data of {JOBS_MAX} parts"));
        }
        if let Some(what) = refusal {
            self.out.push_back(PartOutput::Refused { from, what: what.clone() });
            return self.report(job, epoch, ToCoordinator::Fetched { part, result: Err(what) });
        }
        self.fetches.insert((job, part), Fetch { epoch, order: order.clone(), result: None });
        self.out.push_back(PartOutput::Fetch { job, epoch, order });
    }

    /// The data has been fetched, or cannot be.
    pub fn handle_fetched(&mut self, job: JobId, epoch: Epoch, part: PartId, result: Result<u64, String>) {
        if let Some(fetch) = self.fetches.get_mut(&(job, part)).filter(|fetch| fetch.epoch == epoch) {
            fetch.result = Some(result.clone());
            self.report(job, epoch, ToCoordinator::Fetched { part, result });
        }
    }
}
