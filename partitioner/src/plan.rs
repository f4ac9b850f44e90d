//! The plan: contiguous stages, each on one device. Fields are private where an invalid value could be built. A plan from the
//! wire passes the same structural checks as one built here, so every `Plan` satisfies them. Next: `cost.rs`.
use crate::cost::{
    self,
    ram::{Room, ram_beside_max},
};
use crate::explain::bytes;
use crate::fleet::{Device, DeviceId, Fleet, NodeKey};
use crate::work::Work;
use alloc::{boxed::Box, collections::BTreeSet, format, string::String, vec::Vec};
use core::ops::Range;
use serde::{Deserialize, Serialize};

/// Maximum number of layers of a job: the deepest published models have about 130, and the bound keeps the search's tables
/// small.
pub const LAYERS_MAX: usize = 1024;

/// Maximum number of reasons in a plan: one per device of the largest fleet (bounds plans from the wire).
pub const REASONS_MAX: usize = 4096;

/// What the planner minimises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Goal {
    /// Time per token of one request.
    Latency,
    /// The slowest stage, for many requests at once.
    Throughput,
}

/// Options of the planner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// What to minimise.
    pub goal: Goal,
    /// The coordinator: tokens enter and leave the pipeline there.
    pub head: NodeKey,
    /// Also plan for the loss of each node in use.
    pub losses: bool,
}

/// One contiguous range of layers on one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// The device.
    pub device: DeviceId,
    /// Layers `start..end`.
    pub layers: Range<u32>,
    /// Bytes it takes in the device's memory: weights, cache, scratch.
    pub bytes: u64,
    /// Bytes it takes in the machine's RAM besides: weights of experts, as many experts of each layer.
    pub ram: u64,
    /// Predicted nanoseconds per decoded token.
    pub step_ns: u64,
}

impl Stage {
    /// A stage on a device that has this room for it; `index` is its place in the plan.
    fn on(device: &Device, layers: &Range<u32>, room: Room, work: &Work, index: usize) -> Result<Self, InvalidPlan> {
        let short = || InvalidPlan::Memory {
            stage: index,
            need: cost::stage_bytes(work, layers),
            offered: room.memory,
            ram: cost::ram::usable(work, layers, room.ram),
        };
        let Room { memory: bytes, ram } = cost::ram::placed(work, layers, room).ok_or_else(short)?;
        let step_ns = cost::stage_ns_at(work, device, (layers, ram), 1, work.planned_positions());
        let step_ns = step_ns.ok_or(InvalidPlan::NoSpeed { stage: index })?;
        Ok(Self { device: device.id, layers: layers.clone(), bytes, ram, step_ns })
    }

    /// What it takes of its device's memory and of RAM.
    pub fn room(&self) -> Room {
        Room { memory: self.bytes, ram: self.ram }
    }
}

/// The plan after the loss of one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossPlan {
    /// The node lost, with all its devices.
    pub lost: NodeKey,
    /// The plan on the remaining nodes (without loss plans of its own), or why there is none.
    pub plan: Result<Plan, PlanError>,
}

/// A valid placement: stages cover all layers once, in order, on distinct devices, and fitted in memory when the plan was made.
/// A device holds several stages only after a standby took over ([`Plan::with_stage`]) or after a stage was split for two
/// standbys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "wire::PlanRecord", into = "wire::PlanRecord")]
pub struct Plan {
    /// Invariants: not empty; ranges not empty, contiguous, from 0; devices distinct except in those two cases.
    stages: Vec<Stage>,
    /// At least the sum of the stages' steps.
    token_ns: u64,
    /// Bytes of a row between two stages.
    row_bytes: u64,
    exact: bool,
    reasons: Vec<(DeviceId, String)>,
    /// Invariant: these plans have no loss plans themselves.
    losses: Vec<LossPlan>,
}

impl Plan {
    /// The plan with these layers on these devices, with its memory and times predicted, or the first rule that it breaks.
    pub fn new(
        stages: &[(DeviceId, Range<u32>)],
        work: &Work,
        fleet: &Fleet,
        options: &Options,
    ) -> Result<Self, InvalidPlan> {
        let mut charged = Vec::with_capacity(stages.len());
        for (index, (id, layers)) in stages.iter().enumerate() {
            let device = fleet.device(*id).ok_or(InvalidPlan::UnknownDevice { stage: index })?;
            if device.excluded {
                return Err(InvalidPlan::Excluded { stage: index });
            }
            if layers.is_empty() || layers.end as usize > work.layers.len() {
                return Err(InvalidPlan::Layers { stage: index, start: layers.start, end: layers.end });
            }
            charged.push(Stage::on(device, layers, Room::of(device), work, index)?);
        }
        check_stages(&charged)?;
        let mut devices = BTreeSet::new();
        if let Some(stage) = charged.iter().position(|stage| !devices.insert(stage.device)) {
            return Err(InvalidPlan::DeviceTwice { stage });
        }
        let covered = charged.last().map_or(0, |stage| stage.layers.end);
        if covered as usize != work.layers.len() {
            return Err(InvalidPlan::Uncovered { covered, layers: work.layers.len() as u32 });
        }
        let token_ns = cost::token_ns(work, fleet, options.head, stages).ok_or(InvalidPlan::Unlinked)?;
        let row_bytes = work.activation_bytes;
        Ok(Self { stages: charged, token_ns, row_bytes, exact: false, reasons: Vec::new(), losses: Vec::new() })
    }

    /// Whether this plan (for instance one from the wire) is valid for this job and fleet, by the same rules as [`Plan::new`].
    pub fn check(&self, work: &Work, fleet: &Fleet, options: &Options) -> Result<(), InvalidPlan> {
        Self::new(&self.placement(), work, fleet, options).map(|_| ())
    }

    /// The device and layers of each stage, without predictions.
    pub fn placement(&self) -> Vec<(DeviceId, Range<u32>)> {
        self.stages.iter().map(|stage| (stage.device, stage.layers.clone())).collect()
    }
    /// The stages, first to last.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }
    /// The stage on a device, if it has one; the first one if it has several.
    pub fn stage_of(&self, device: DeviceId) -> Option<&Stage> {
        self.stages_of(device).next()
    }
    /// The stages on a device.
    pub fn stages_of(&self, device: DeviceId) -> impl Iterator<Item = &Stage> {
        self.stages.iter().filter(move |stage| stage.device == device)
    }
    /// Number of layers covered.
    pub fn layers(&self) -> u32 {
        self.stages.last().map_or(0, |stage| stage.layers.end)
    }
    /// Predicted nanoseconds per token for one request, links included.
    pub fn token_ns(&self) -> u64 {
        self.token_ns
    }
    /// Bytes of a row between two stages: of the encoding that was planned for.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }
    /// Predicted step of the slowest stage: this bounds the throughput of many requests.
    pub fn slowest_step_ns(&self) -> u64 {
        self.stages.iter().map(|stage| stage.step_ns).max().unwrap_or(0)
    }
    /// Whether the search was exact (otherwise a beam search).
    pub fn exact(&self) -> bool {
        self.exact
    }
    /// For each device of the fleet, why it is or is not used.
    pub fn reasons(&self) -> &[(DeviceId, String)] {
        &self.reasons
    }
    /// Plans for the loss of each node in use but the coordinator (empty unless requested).
    pub fn losses(&self) -> &[LossPlan] {
        &self.losses
    }

    /// This plan with one stage, the same layers, on another device: its standby, which may already hold another stage.
    ///
    /// # Errors
    /// [`InvalidPlan::Layers`] when the layers differ or the plan has no such stage.
    pub fn with_stage(&self, index: usize, stage: Stage) -> Result<Self, InvalidPlan> {
        let mut next = Self { losses: Vec::new(), ..self.clone() };
        let misfit = InvalidPlan::Layers { stage: index, start: stage.layers.start, end: stage.layers.end };
        let old = next.stages.get_mut(index).filter(|old| old.layers == stage.layers).ok_or(misfit)?;
        // Links are ignored: the next plan measures them again.
        next.token_ns = (self.token_ns - old.step_ns).saturating_add(stage.step_ns);
        *old = stage;
        Ok(next)
    }

    /// This plan with one stage split in two before layer `cut`, both halves on the stage's device.
    ///
    /// # Errors
    /// [`InvalidPlan::Layers`] when a half would be empty, [`InvalidPlan::Memory`] when the device lacks memory for both halves
    /// besides its other stages, [`InvalidPlan::NoSpeed`] when its speed was not measured.
    pub(crate) fn with_split(
        mut self,
        index: usize,
        cut: u32,
        work: &Work,
        fleet: &Fleet,
    ) -> Result<Self, InvalidPlan> {
        let misfit = InvalidPlan::Layers { stage: index, start: 0, end: cut };
        let old = self.stages.get(index).filter(|old| old.layers.start < cut && cut < old.layers.end).ok_or(misfit)?;
        let device = fleet.device(old.device).ok_or(InvalidPlan::UnknownDevice { stage: index })?;
        // Both halves together have the device's room, each in proportion to its bytes.
        let (first, second) = (old.layers.start..cut, cut..old.layers.end);
        let [ahead, behind] = [&first, &second].map(|layers| u128::from(cost::stage_bytes(work, layers)));
        let room = Room::of(device).without(self.taken_beside(index));
        let share = |bytes: u64| (u128::from(bytes) * ahead / (ahead + behind).max(1)) as u64;
        let part = Room { memory: share(room.memory), ram: room.ram };
        let first = Stage::on(device, &first, part, work, index)?;
        let second = Stage::on(device, &second, room.without(first.room()), work, index)?;
        let halves = [first, second];
        let steps = halves.iter().fold(0u64, |sum, half| sum.saturating_add(half.step_ns));
        self.token_ns = (self.token_ns - old.step_ns).saturating_add(steps);
        self.stages.splice(index..=index, halves);
        Ok(self)
    }

    /// What the other stages on a stage's device take there.
    fn taken_beside(&self, index: usize) -> Room {
        let device = self.stages[index].device;
        let others = self.stages.iter().enumerate().filter(|(at, stage)| *at != index && stage.device == device);
        others.fold(Room::default(), |sum, (_, stage)| sum.plus(stage.room()))
    }

    /// Records how the plan was found, and why each device is or is not used.
    pub(crate) fn explained(mut self, exact: bool, reasons: Vec<(DeviceId, String)>) -> Self {
        self.exact = exact;
        self.reasons = reasons;
        self
    }
    /// Adds the loss plans, which must not have any themselves.
    pub(crate) fn with_losses(mut self, losses: Vec<LossPlan>) -> Self {
        debug_assert!(losses.iter().all(|loss| loss.plan.as_ref().map_or(true, |plan| plan.losses.is_empty())));
        self.losses = losses;
        self
    }
}

/// The rules that depend on neither job nor fleet.
fn check_stages(stages: &[Stage]) -> Result<(), InvalidPlan> {
    if stages.is_empty() {
        return Err(InvalidPlan::Empty);
    }
    let mut next = 0;
    for (index, stage) in stages.iter().enumerate() {
        if stage.layers.start != next || stage.layers.is_empty() || stage.layers.end as usize > LAYERS_MAX {
            return Err(InvalidPlan::Layers { stage: index, start: stage.layers.start, end: stage.layers.end });
        }
        let most = ram_beside_max(stage.bytes);
        if stage.ram > most {
            return Err(InvalidPlan::Ram { stage: index, ram: stage.ram, most });
        }
        next = stage.layers.end;
    }
    Ok(())
}

/// The rule that a placement breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPlan {
    /// No stage at all.
    #[error("a plan needs at least one stage")]
    Empty,
    /// Empty, overlapping, with a gap, or outside the model.
    #[error("stage {stage} has layers {start}..{end}: expected a range that adjoins the one before and is not empty")]
    Layers {
        /// Which stage.
        stage: usize,
        /// Its first layer.
        start: u32,
        /// The layer after its last.
        end: u32,
    },
    /// The last stage ends before the model does.
    #[error("the stages cover {covered} layers of {layers}")]
    Uncovered {
        /// Layers covered.
        covered: u32,
        /// Layers of the model.
        layers: u32,
    },
    /// Two stages on one device, which the planner never assigns.
    #[error("stage {stage} is on a device that already has one")]
    DeviceTwice {
        /// The second stage.
        stage: usize,
    },
    /// Not a member of the fleet.
    #[error("stage {stage} is on a device that the fleet does not have")]
    UnknownDevice {
        /// Which stage.
        stage: usize,
    },
    /// The device takes no new work.
    #[error("stage {stage} is on a device that takes no new work")]
    Excluded {
        /// Which stage.
        stage: usize,
    },
    /// The device's speed is unknown, so nothing can be predicted.
    #[error("stage {stage} is on a device without a measured speed")]
    NoSpeed {
        /// Which stage.
        stage: usize,
    },
    /// More than the device offers.
    #[error(
        "stage {stage} takes {need}, its device offers {offered}{beside}",
        need = bytes(*.need), offered = bytes(*.offered), beside = beside(*.ram)
    )]
    Memory {
        /// Which stage.
        stage: usize,
        /// Bytes it takes.
        need: u64,
        /// Bytes of the device's memory.
        offered: u64,
        /// Bytes of RAM that its experts may take besides.
        ram: u64,
    },
    /// More experts in RAM than a stage may have there.
    #[error("stage {stage} has {ram} of experts in RAM, expected at most {most}", ram = bytes(*.ram), most = bytes(*.most))]
    Ram {
        /// Which stage.
        stage: usize,
        /// Bytes in RAM.
        ram: u64,
        /// The most there may be for its bytes on the device.
        most: u64,
    },
    /// A link of the pipeline is unusable.
    #[error("two neighbours of the pipeline have no usable link between them")]
    Unlinked,
    /// A prediction that contradicts the stages.
    #[error("the plan says {token_ns} ns per token, less than its stages' steps")]
    TokenTime {
        /// The claimed time.
        token_ns: u64,
    },
    /// More reasons or loss plans than a plan can have.
    #[error("the plan carries {found} {what}, at most {limit} are allowed")]
    TooMany {
        /// The kind of entries.
        what: &'static str,
        /// The number found.
        found: usize,
        /// The limit.
        limit: usize,
    },
}

/// Why there is no plan, with the missing amount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum PlanError {
    /// No device may be used at all.
    #[error("no node of the mesh may take work: join one, or end a drain")]
    NoDevices,
    /// Weights, cache and scratch exceed what all devices together offer.
    #[error(
        "the model needs {need} with its caches, the mesh offers {offered}{of_it}: {missing} are missing; join another node, \
         raise --memory{or_ram} of a node, or lower --context or --sequences",
        need = bytes(*.need), offered = bytes(*.offered), missing = bytes(*.missing), of_it = of_it(*.ram),
        or_ram = if *.ram > 0 { " or --expert-ram" } else { "" }
    )]
    Memory {
        /// Bytes needed.
        need: u64,
        /// Bytes offered.
        offered: u64,
        /// Bytes of them that are RAM for experts.
        ram: u64,
        /// The difference.
        missing: u64,
    },
    /// It fits in total, but one layer (with the fixed bytes of its stage) fits on no device.
    #[error(
        "layer {layer} needs {need} on one node, the largest node offers {largest}{beside}: {missing} are missing there; \
         raise its --memory{or_ram}, or lower --context or --sequences",
        need = bytes(*.need), largest = bytes(*.largest), missing = bytes(*.missing), beside = beside(*.ram),
        or_ram = or_ram(*.more_ram)
    )]
    LayerTooLarge {
        /// The layer.
        layer: u32,
        /// Bytes it needs, with the fixed bytes of its stage.
        need: u64,
        /// Bytes of memory of the device that offers most.
        largest: u64,
        /// Bytes of RAM there that the layer's experts may take besides.
        ram: u64,
        /// The difference.
        missing: u64,
        /// Bytes of RAM that the layer's experts could take besides if the device offered them. 0: only memory helps.
        more_ram: u64,
    },
    /// It fits in total and each layer fits on some device, but no placement of whole layers was found.
    #[error(
        "the mesh offers enough in total ({offered} for {need}), but only {placed} of {layers} layers can be placed: the rest \
         needs {missing} on one node; raise --memory of a node, or lower --context or --sequences",
        need = bytes(*.need), offered = bytes(*.offered), missing = bytes(*.missing)
    )]
    Packing {
        /// Bytes needed.
        need: u64,
        /// Bytes offered.
        offered: u64,
        /// The most layers that any tried placement covers.
        placed: u32,
        /// Layers of the job.
        layers: u32,
        /// Bytes of a stage with the remaining layers.
        missing: u64,
    },
    /// Memory suffices, but the required nodes are not linked.
    #[error(
        "memory suffices, but no usable links join the nodes that are needed: their measured bandwidth is zero; see `meshnode peers`"
    )]
    Unlinked,
    /// The job itself is invalid (no layers, sums that overflow).
    #[error("the job cannot be planned: {0}")]
    Invalid(Box<str>),
}

/// RAM besides memory, in a message.
fn beside(ram: u64) -> String {
    if ram > 0 { format!(" and {} of RAM for experts", bytes(ram)) } else { String::new() }
}

/// RAM as a part of what is offered, in a message.
fn of_it(ram: u64) -> String {
    if ram > 0 { format!(", {} of it RAM for experts", bytes(ram)) } else { String::new() }
}

/// A way out besides more memory, in a message.
fn or_ram(more: u64) -> String {
    if more > 0 { format!(", or its --expert-ram by up to {}", bytes(more)) } else { String::new() }
}

/// Plans as records, for the wire and the store. A loss plan has no field for further loss plans, so that no sender can make a
/// reader recurse. Reading checks every rule that depends on neither job nor fleet.
mod wire {
    use super::{DeviceId, InvalidPlan, LossPlan, NodeKey, Plan, PlanError, REASONS_MAX, Stage, check_stages};
    use alloc::{string::String, vec::Vec};
    use serde::{Deserialize, Serialize};

    #[derive(Serialize, Deserialize)]
    pub(super) struct PlanRecord {
        stages: Vec<Stage>,
        token_ns: u64,
        row_bytes: u64,
        exact: bool,
        reasons: Vec<(DeviceId, String)>,
        losses: Vec<LossRecord>,
    }

    #[derive(Serialize, Deserialize)]
    struct LossRecord {
        lost: NodeKey,
        plan: Result<LeafRecord, PlanError>,
    }

    /// A plan inside a loss plan.
    #[derive(Serialize, Deserialize)]
    struct LeafRecord {
        stages: Vec<Stage>,
        token_ns: u64,
        row_bytes: u64,
        exact: bool,
        reasons: Vec<(DeviceId, String)>,
    }

    impl From<Plan> for PlanRecord {
        fn from(plan: Plan) -> Self {
            let losses = plan.losses.into_iter().map(|loss| LossRecord { lost: loss.lost, plan: loss.plan.map(leaf) });
            Self {
                stages: plan.stages,
                token_ns: plan.token_ns,
                row_bytes: plan.row_bytes,
                exact: plan.exact,
                reasons: plan.reasons,
                losses: losses.collect(),
            }
        }
    }

    fn leaf(plan: Plan) -> LeafRecord {
        let Plan { stages, token_ns, row_bytes, exact, reasons, losses: _ } = plan;
        LeafRecord { stages, token_ns, row_bytes, exact, reasons }
    }

    impl TryFrom<PlanRecord> for Plan {
        type Error = InvalidPlan;

        fn try_from(record: PlanRecord) -> Result<Self, InvalidPlan> {
            let PlanRecord { stages, token_ns, row_bytes, exact, reasons, losses: loss_records } = record;
            let plan = Plan::try_from(LeafRecord { stages, token_ns, row_bytes, exact, reasons })?;
            if loss_records.len() > plan.stages.len() {
                let (found, limit) = (loss_records.len(), plan.stages.len());
                return Err(InvalidPlan::TooMany { what: "loss plans", found, limit });
            }
            let mut losses = Vec::with_capacity(loss_records.len());
            for LossRecord { lost, plan } in loss_records {
                let plan = match plan {
                    Ok(leaf) => Ok(Plan::try_from(leaf)?),
                    Err(error) => Err(error),
                };
                losses.push(LossPlan { lost, plan });
            }
            Ok(plan.with_losses(losses))
        }
    }

    impl TryFrom<LeafRecord> for Plan {
        type Error = InvalidPlan;

        fn try_from(record: LeafRecord) -> Result<Self, InvalidPlan> {
            let LeafRecord { stages, token_ns, row_bytes, exact, reasons } = record;
            check_stages(&stages)?;
            if reasons.len() > REASONS_MAX {
                return Err(InvalidPlan::TooMany { what: "reasons", found: reasons.len(), limit: REASONS_MAX });
            }
            let steps = stages.iter().try_fold(0u64, |sum, stage| sum.checked_add(stage.step_ns));
            if steps.is_none_or(|steps| token_ns < steps) {
                return Err(InvalidPlan::TokenTime { token_ns });
            }
            Ok(Plan { stages, token_ns, row_bytes, exact, reasons, losses: Vec::new() })
        }
    }
}
