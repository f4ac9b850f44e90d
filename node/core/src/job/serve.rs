//! Serving a model: what the coordinator does for model jobs only. Next: `serve/requests.rs`.
mod calibration;
mod drafter;
mod drafts;
mod occupancy;
mod prefixes;
mod requests;
mod stream;

use super::output::{JobOutput, JobQuestion, Measured, Out};
use super::part::{Part, Standby};
use crate::id::{Epoch, JobId, NodeId, PartId, RequestId};
use crate::limits::{CONTEXT_MAX, PAGE_POSITIONS, RAM_PAGES_MAX, SEQUENCES_MAX, STANDBY_LAG_MAX};
use crate::message::{FromStage, ToParticipant};
use crate::time::Instant;
use crate::work::log::TokenLog;
use crate::work::serve::{DoneReason, ModelSpec, Position, RowFormat, ServeRecord, StageOrder};
use crate::work::{PartState, PartWork, Placement, PredictedChange, ProgramRecord, Resume};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::{string::String, vec::Vec};
use calibration::{Calibration, MeasuredSpeed};
use core::ops::Range;
use partitioner::{DeviceId, ModelAnswer, Plan, Room, Stage, Tier};
use requests::Route;
pub(in crate::job) use requests::{Requests, Submitted};
pub(in crate::job) use stream::Caller;

/// A model that is served, or that is being placed.
#[derive(Debug)]
pub(super) struct Serve {
    job: JobId,
    pub(super) model: Box<ModelSpec>,
    /// The present placement, if there is one.
    plan: Option<Box<Plan>>,
    /// The last placement that was ready. The planner repairs it for the next one.
    last_ready: Option<Box<Plan>>,
    pub(super) requests: Requests,
    calibration: Calibration,
    /// The planner's answer on each part's standby, also for parts that have none: tier and predicted stall in
    /// nanoseconds.
    tiers: BTreeMap<PartId, (Tier, Option<u64>)>,
}

impl Serve {
    pub(super) fn new(job: JobId, model: ModelSpec) -> Self {
        let sequences = model.work.sequences.clamp(1, SEQUENCES_MAX);
        let context = model.work.context.clamp(1, CONTEXT_MAX);
        Serve {
            job,
            requests: Requests::new(job, sequences, context, model.eos.clone(), model.draft),
            model: Box::new(model),
            plan: None,
            last_ready: None,
            calibration: Calibration::default(),
            tiers: BTreeMap::new(),
        }
    }

    /// A model that another node served, with its requests. New request ids are at least `counter` (that of this node's
    /// epoch) times 2^32, which is above all earlier ones. The plan of the record is used only if it agrees with the
    /// orders.
    pub(super) fn inherited(
        job: JobId,
        counter: u32,
        (order, owners): (&StageOrder, &[DeviceId]),
        record: ServeRecord,
        log: TokenLog,
    ) -> Self {
        let ServeRecord { model, plan } = record;
        let ordered = |plan: &Plan| {
            let placed = plan.stages().iter().map(|stage| (stage.device, stage.layers.clone()));
            placed.eq(owners.iter().copied().zip(order.layers.iter().cloned()))
        };
        let plan = plan.filter(|plan| ordered(plan));
        let mut serve = Serve { last_ready: plan.clone(), plan, ..Serve::new(job, model) };
        serve.requests.inherit(Instant::default(), u64::from(counter) << 32, log);
        serve
    }

    /// The placement, if this job serves the given model.
    pub(super) fn present(&self, model: &ModelSpec) -> Option<&Plan> {
        let same = |plan: &&Plan| plan.layers() as usize == model.work.layers.len();
        self.plan.as_deref().filter(|_| self.model.content == model.content).filter(same)
    }

    /// Predicted nanoseconds per token; 0 while there is no placement.
    pub(super) fn step_ns(&self) -> u64 {
        self.plan.as_deref().map_or(0, Plan::token_ns)
    }

    pub(super) fn plan(&self) -> Option<&Plan> {
        self.plan.as_deref()
    }

    // ---- placement

    /// The question for a placement: a repair of the present one, or of the last one that was ready.
    pub(super) fn ask(&self, present: bool) -> JobQuestion {
        let repair = if present { self.plan.clone() } else { self.last_ready.clone() };
        JobQuestion::Model { work: self.model.work.clone(), repair, present: None, caller: false }
    }

    /// The question for a better placement. `repair`: one that moves little, because an owner drains.
    pub(super) fn ask_better(&self, repair: bool) -> JobQuestion {
        let repair = self.plan.clone().filter(|_| repair);
        JobQuestion::Model { work: self.model.work.clone(), repair, present: self.plan.clone(), caller: false }
    }

    pub(super) fn ask_standbys(&self, kept: Vec<(u16, DeviceId)>) -> Option<JobQuestion> {
        let plan = self.plan.clone()?;
        Some(JobQuestion::ModelStandbys { work: self.model.work.clone(), plan, kept })
    }

    /// Adopts a plan. Returns its parts.
    pub(super) fn adopt(&mut self, plan: Plan) -> Vec<Part> {
        let part = |stage: &Stage| Part::new(stage.device, stage.room(), stage.step_ns);
        let parts: Vec<Part> = plan.stages().iter().map(part).collect();
        self.tiers.retain(|part, _| part.index() < parts.len());
        // From the first rows that pass between nodes on, the encoding stays: another one would change the tokens.
        if parts.iter().any(|part| part.owner != parts[0].owner) {
            self.model.fix_row(plan.row_bytes());
        }
        self.plan = Some(Box::new(plan));
        parts
    }

    /// Whether a part has the same layers in a plan as in the present placement.
    pub(super) fn is_same_part(&self, plan: &Plan, part: PartId) -> bool {
        let layers = |plan: &Plan| plan.stages().get(part.index()).map(|stage| stage.layers.clone());
        self.plan.as_deref().and_then(layers).is_some_and(|mine| layers(plan) == Some(mine))
    }

    /// A standby was promoted to a part's owner.
    pub(super) fn promoted(&mut self, part: PartId, standby: &Standby) {
        let Some(plan) = &self.plan else { return };
        let Some(layers) = plan.stages().get(part.index()).map(|stage| stage.layers.clone()) else { return };
        let (Room { memory: bytes, ram }, step_ns) = (standby.room, standby.step_ns);
        let stage = Stage { device: standby.place(), layers, bytes, ram, step_ns };
        if let Ok(next) = plan.clone().with_stage(part.index(), stage) {
            self.plan = Some(Box::new(next));
        }
    }

    pub(super) fn work(&self) -> PartWork {
        self.stages_of(self.plan.as_deref())
    }

    fn stages_of(&self, plan: Option<&Plan>) -> PartWork {
        let stages = plan.map(Plan::stages).unwrap_or_default();
        PartWork::Stage(StageOrder {
            content: self.model.content,
            layers: stages.iter().map(|stage| stage.layers.clone()).collect(),
            sequences: self.model.work.sequences.clamp(1, SEQUENCES_MAX),
            context: self.model.work.context.clamp(1, CONTEXT_MAX),
            width: self.model.width,
            row: plan.map_or(self.model.row(), |plan| self.model.row_of(plan)),
            int8: self.model.int8,
        })
    }

    /// The encoding of the rows between the stages.
    pub(super) fn row(&self) -> RowFormat {
        self.plan.as_deref().map_or(self.model.row(), |plan| self.model.row_of(plan))
    }

    /// The stages of a plan that is not adopted yet.
    pub(super) fn work_of(&self, plan: &Plan) -> PartWork {
        self.stages_of(Some(plan))
    }

    pub(super) fn placement(&self) -> Placement {
        let stages = self.plan.as_deref().map(Plan::stages).unwrap_or_default();
        Placement::Stages(stages.iter().map(|stage| (stage.device, stage.layers.clone())).collect())
    }

    /// There is no placement, and the job no longer waits for one.
    pub(super) fn give_up(&mut self, reason: &DoneReason, out: &mut Out) {
        self.requests.fail_all(reason, out);
        (self.plan, self.last_ready) = (None, None);
        self.tiers.clear();
    }

    pub(super) fn record(&self) -> ProgramRecord {
        ProgramRecord::Serve(Box::new(ServeRecord { model: (*self.model).clone(), plan: self.plan.clone() }))
    }

    // ---- running

    /// All stages are ready. Returns where each of them resumes.
    pub(super) fn resume(&mut self, now: Instant, epoch: Epoch, parts: &[Part]) -> Vec<Resume> {
        let stages: Vec<NodeId> = parts.iter().map(|part| part.owner).collect();
        let track = Route { epoch, stages, token_ns: self.step_ns(), standbys: Vec::new() };
        let held: Vec<&[Position]> = parts.iter().map(positions).collect();
        self.last_ready.clone_from(&self.plan);
        self.requests.resume(now, track, &held).into_iter().map(Resume::Stage).collect()
    }

    /// The stages run, and requests continue.
    pub(super) fn begin(&mut self, now: Instant, parts: &[Part], out: &mut Out) {
        self.count_ram(parts, out);
        let held: Vec<(NodeId, &[Position])> = parts.iter().map(|part| (part.owner, positions(part))).collect();
        self.requests.start(now, &held, out);
        // Standbys that have answered already may hold ended requests as well.
        for standby in parts.iter().filter_map(|part| part.standby.as_ref()) {
            if let Ok(has) = &standby.prepared {
                self.requests.close_ended(standby.node, standby_positions(has), out);
            }
        }
    }

    /// A stage reports.
    pub(super) fn handle_report(&mut self, now: Instant, from: NodeId, epoch: Epoch, say: FromStage, out: &mut Out) {
        let requests = &mut self.requests;
        match say {
            FromStage::Token { request, position, sampled } if requests.is_last_stage(from, epoch) => {
                requests.handle_tokens(now, request, position, sampled, (0, &[]), out);
            }
            FromStage::Tokens { request, position, round, tokens } if requests.is_last_stage(from, epoch) => {
                if let Some((&first, after_drafts)) = tokens.split_first() {
                    requests.handle_tokens(now, request, position, first.into(), (round, after_drafts), out);
                }
            }
            FromStage::Progress { request, position } if requests.is_last_stage(from, epoch) => {
                requests.handle_progress(now, request, position, out);
            }
            FromStage::Gap { request, have } if requests.is_stage(from, epoch) => {
                requests.handle_gap(now, from, request, have, out);
            }
            FromStage::Resume { request, have } if requests.feeds(from, epoch) => {
                requests.handle_resume(from, request, have, out);
            }
            FromStage::Busy { part, busy_us } if requests.is_owner(part, from, epoch) => {
                requests.handle_busy(now, part, busy_us);
            }
            FromStage::Token { .. }
            | FromStage::Tokens { .. }
            | FromStage::Progress { .. }
            | FromStage::Gap { .. }
            | FromStage::Resume { .. }
            | FromStage::Busy { .. } => {}
        }
    }

    // ---- standbys

    /// Counts the pages that every stage has in RAM, and every standby, which will continue with them.
    pub(super) fn count_ram(&mut self, parts: &[Part], out: &mut Out) {
        let owners = parts.iter().map(|part| part.ready.as_ref().map_or(0, |ready| ready.ram_pages));
        let standbys = parts.iter().filter_map(|part| part.standby.as_ref()).filter(|standby| standby.is_prepared());
        let least = owners.chain(standbys.map(|standby| standby.ram_pages)).min();
        self.requests.set_ram(least.unwrap_or(0).min(RAM_PAGES_MAX), out);
    }

    /// Whether a standby is hot and behind its stage by at most [`STANDBY_LAG_MAX`] positions of each request.
    pub(super) fn is_current(&self, standby: &Standby) -> bool {
        let follows = standby.is_prepared() && standby.tier == Tier::Hot;
        let acked = self.requests.acked();
        follows && acked.iter().all(|(id, &acked)| standby.at(id.0).saturating_add(STANDBY_LAG_MAX) >= acked)
    }

    /// Whether a standby cannot follow a running request, because it lacks the one that this continues.
    pub(super) fn is_left_behind(&self, now: Instant, standby: &Standby) -> bool {
        standby.is_prepared() && self.requests.leave_behind(now, |request| standby.at(request.0))
    }

    /// Computes what rests again for standbys that lack it, while nothing else runs.
    pub(super) fn refresh(&mut self, now: Instant, parts: &[Part], out: &mut Out) {
        let standbys = || parts.iter().filter_map(|part| part.standby.as_ref());
        let has = |standby: &Standby, request: RequestId| {
            let known = standby.prepared.as_ref().map_or(&[][..], standby_positions);
            let known = known.iter().find(|position| position.request == request).map_or(0, |position| position.have);
            known.max(standby.at(request.0))
        };
        let lacks = |request, positions: u32| {
            let pages = positions / PAGE_POSITIONS * PAGE_POSITIONS;
            standbys().any(|standby| standby.is_prepared() && has(standby, request) < pages)
        };
        self.requests.refresh(now, lacks, out);
    }

    /// Records the planner's answer on a part's standby.
    pub(super) fn set_tier(&mut self, part: PartId, tier: Tier, stall_ns: Option<u64>) {
        self.tiers.insert(part, (tier, stall_ns));
    }

    pub(super) fn tiers(&self) -> &BTreeMap<PartId, (Tier, Option<u64>)> {
        &self.tiers
    }

    // ---- calibration

    /// Challenges the next device that is due, those of this node included, to measure its speed.
    pub(super) fn challenge(&mut self, now: Instant, epoch: Epoch, parts: &[Part], out: &mut Out) {
        let Some(plan) = &self.plan else { return };
        let layers = |index: usize| plan.stages().get(index).map(|stage| stage.layers.clone());
        let mut holders = Vec::new();
        let mut numbers = BTreeMap::new();
        for (index, part) in parts.iter().enumerate() {
            let standby = part.standby.as_ref().filter(|standby| standby.is_prepared()).map(Standby::place);
            for device in core::iter::once(part.place()).chain(standby) {
                if let Some(layers) = layers(index).filter(|_| !numbers.contains_key(&device)) {
                    numbers.insert(device, PartId::of(index));
                    holders.push((device, layers));
                }
            }
        }
        if let Some((to, nonce)) = self.calibration.next(now, self.job, &holders, self.requests.quiet())
            && let Some(&part) = numbers.get(&to)
        {
            out.push_back(JobOutput::Message {
                to: to.into(),
                job: self.job,
                epoch,
                say: ToParticipant::Challenge { part, nonce },
            });
        }
    }

    /// A node answered a challenge.
    pub(super) fn handle_challenged(
        &mut self,
        now: Instant,
        node: NodeId,
        nonce: u64,
        result: Result<u64, String>,
        parts: &[Part],
        out: &mut Out,
    ) {
        let quiet = self.requests.quiet();
        let Some(found) = self.calibration.handle_answer(now, node, nonce, result.is_ok(), quiet) else { return };
        let MeasuredSpeed { device, layers, took, quiet, nonce } = found;
        let measured = Measured { took, quiet, nonce, digest: result.unwrap_or_default() };
        let (job, work) = (self.job, Box::new(self.model.work.clone()));
        let ram = self.ram_of(device, &layers, parts);
        out.push_back(JobOutput::Measured { job, device, work, layers, ram, measured });
    }

    /// Bytes in RAM of the stage with these layers on a device, as its owner or standby.
    fn ram_of(&self, device: DeviceId, layers: &Range<u32>, parts: &[Part]) -> u64 {
        let stages = self.plan.as_deref().map(Plan::stages).unwrap_or_default();
        let same = stages.iter().zip(parts).filter(|(stage, _)| stage.layers == *layers).map(|(_, part)| part);
        let of = |part: &Part| {
            let owner = (part.place() == device).then(|| part.ready.as_ref().map_or(part.room.ram, |ready| ready.ram));
            owner.or_else(|| part.standby.as_ref().filter(|s| s.place() == device).map(|standby| standby.room.ram))
        };
        same.filter_map(of).next().unwrap_or(0)
    }

    /// Measures all nodes again.
    pub(super) fn measure_again(&mut self, now: Instant) {
        self.calibration.repeat(now);
    }

    pub(super) fn next_challenge(&self) -> Option<Instant> {
        self.calibration.next_wakeup()
    }

    // ---- a better placement

    /// Predicted effect of moving to another placement. `None` if it is the present one.
    pub(super) fn change(&self, answer: &ModelAnswer) -> Option<PredictedChange> {
        let present = self.plan.as_deref()?;
        if answer.plan.placement() == present.placement() {
            return None;
        }
        let bytes = answer.moved_bytes;
        Some(PredictedChange { before_ns: answer.before_ns?, after_ns: answer.plan.token_ns(), bytes })
    }

    /// Stages of a plan whose nodes do not own the same layers now.
    pub(super) fn moved<'a>(&'a self, plan: &'a Plan) -> impl Iterator<Item = (PartId, &'a Stage)> + 'a {
        let stays = |stage: &Stage| {
            let mut held = self.plan.as_deref().into_iter().flat_map(|present| present.stages_of(stage.device));
            held.any(|held| held.layers == stage.layers)
        };
        plan.stages().iter().enumerate().filter(move |(_, stage)| !stays(stage)).map(|(at, s)| (PartId::of(at), s))
    }
}

/// Cached positions of a part's owner.
fn positions(part: &Part) -> &[Position] {
    part.ready.as_ref().map_or(&[], |ready| ready.has.positions())
}

/// Cached positions of a standby, as it reported them.
pub(super) fn standby_positions(has: &PartState) -> &[Position] {
    has.positions()
}
