//! The views of a node for users and programs: members, jobs and plans, derived from the core's state.
pub(crate) mod peers;

use crate::report::{ZoneThen, ZoneView};
use crate::rows;
use node_core::id::NodeId;
use node_core::job::{self, JobState, ProgramView, WhatView};
use node_core::limits;
use node_core::message::Advert;
use node_core::node::Node;
use node_core::work::serve::ModelSpec;
use node_core::work::{HeldPart, HeldWork, PredictedChange};
use partitioner::zones::{Outcome, ZoneLoss};
use partitioner::{DeviceId, NodeKey, Plan, Standby, Tier};
pub(crate) use peers::PeerView;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// A plan, as shown by the API and the command line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PlanReport {
    /// Model name.
    pub model: String,
    /// Tokens of context per request.
    pub context: u32,
    /// Whole contexts that the cache has room for.
    pub sequences: u32,
    /// Predicted milliseconds per token of one request.
    pub token_ms: f64,
    /// Encoding of the rows between the stages.
    pub boundary: String,
    /// Bytes of a row between two stages.
    pub row_bytes: u64,
    /// Whether the search was exact.
    pub exact: bool,
    /// Stages, first to last.
    pub stages: Vec<StageView>,
    /// Why each node is or is not used.
    pub reasons: Vec<ReasonView>,
    /// The planned standby of each stage not held by the coordinator.
    pub standbys: Vec<StandbyView>,
    /// The plan after the loss of each node.
    pub losses: Vec<LossView>,
    /// The effect of losing each zone; empty if no zone is known.
    pub zones: Vec<ZoneView>,
    /// If the model is already served: the change from its current placement to this plan.
    pub change: Option<ChangeView>,
}

/// A change from one placement to another.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ChangeView {
    /// Predicted milliseconds per token with the current placement, on the current mesh.
    pub before_ms: f64,
    /// Predicted milliseconds per token with the new placement.
    pub after_ms: f64,
    /// Bytes of weights that nodes would have to load in addition to what they hold now.
    pub moved_bytes: u64,
}

impl From<PredictedChange> for ChangeView {
    fn from(change: PredictedChange) -> Self {
        Self {
            before_ms: change.before_ns as f64 / 1e6,
            after_ms: change.after_ns as f64 / 1e6,
            moved_bytes: change.bytes,
        }
    }
}

/// The last migration of a job to a better placement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MoveView {
    /// The planned change.
    #[serde(flatten)]
    pub change: ChangeView,
    /// Bytes of weights fetched from peers for it; nodes loaded the rest from their disks.
    pub fetched_bytes: u64,
}

/// One stage of a plan or a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StageView {
    /// Node id, hex.
    pub node: String,
    /// Its name.
    pub name: String,
    /// The node's device, such as "cuda:1", if it has several.
    pub device: String,
    /// First layer.
    pub first_layer: u32,
    /// One past the last layer.
    pub end_layer: u32,
    /// Memory in bytes; 0 until it is loaded.
    pub bytes: u64,
    /// Bytes of its experts that lie in RAM besides; 0 until it is loaded.
    pub ram: u64,
    /// Predicted milliseconds per token; `None` for a stage of another node's job, whose coordinator has the
    /// prediction.
    pub step_ms: Option<f64>,
}

/// Why a node is or is not used.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ReasonView {
    /// Its name.
    pub node: String,
    /// The reason.
    pub reason: String,
}

/// The plan after the loss of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LossView {
    /// The lost node.
    pub node: String,
    /// Stages of the new plan; empty if there is no plan.
    pub stages: Vec<StageView>,
    /// Why there is no plan.
    pub error: Option<String>,
}

impl From<ZoneLoss> for ZoneView {
    fn from(loss: ZoneLoss) -> Self {
        let (then, stall_ns, error) = match loss.outcome {
            Outcome::Untouched => (ZoneThen::Untouched, None, None),
            Outcome::Standbys { stall_ns } => (ZoneThen::Standbys, stall_ns, None),
            Outcome::Placed { stall_ns } => (ZoneThen::Placed, stall_ns, None),
            Outcome::Ends { why } => (ZoneThen::Ends, None, Some(why)),
        };
        let stall_ms = stall_ns.map(|ns| limits::LEASE.as_secs_f64() * 1e3 + ns as f64 / 1e6);
        let (zone, coordinator, parts) = (shown(&loss.zone), loss.coordinator, loss.parts);
        ZoneView { zone, coordinator, parts, then, stall_ms, error }
    }
}

/// The standby of a stage.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StandbyView {
    /// Index of the stage.
    pub stage: u16,
    /// Name of the standby node; `None` if no node has the memory.
    pub name: Option<String>,
    /// The standby's device, such as "cuda:1", if the node has several.
    pub device: String,
    /// "hot", "warm", "cold" or "none". In a running job, a hot standby has current caches.
    pub tier: String,
    /// "none", "loading", "catching up" or "current"; in a plan "planned".
    pub state: String,
    /// Predicted milliseconds without a token if the stage's node is lost, including the time to detect the loss.
    pub stall_ms: Option<f64>,
}

impl StandbyView {
    fn new(stage: u16, place: Option<(String, String)>, tier: Tier, state: &str, stall_ns: Option<u64>) -> Self {
        let detection_ms = limits::LEASE.as_secs_f64() * 1e3;
        let tier = match tier {
            Tier::Hot => "hot",
            Tier::Warm => "warm",
            Tier::Cold => "cold",
            Tier::None => "none",
        };
        let stall_ms = stall_ns.map(|ns| detection_ms + ns as f64 / 1e6);
        let (name, device) = place.unzip();
        let device = device.unwrap_or_default();
        StandbyView { stage, name, device, tier: tier.to_owned(), state: state.to_owned(), stall_ms }
    }
}

/// The state of a node, as shown by the API.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct StateView {
    /// Id of this node, hex.
    pub node: String,
    /// Its name.
    pub name: String,
    /// Its libp2p PeerId.
    pub peer_id: String,
    /// Its mesh.
    pub mesh: String,
    /// All known members, including this node.
    pub peers: Vec<PeerView>,
    /// Jobs that this node coordinates or takes part in.
    pub jobs: Vec<JobView>,
    /// Expiry of its membership, unix seconds.
    pub membership_ends: u64,
    /// Set if this node, or a member that its certificate depends on, was banned: the issuer of the ban, the date, and
    /// the next step.
    pub banned: Option<String>,
    /// PeerIds that asked to join without a ticket; `meshnode approve PEER` admits them.
    pub waiting: Vec<String>,
    /// The cache of weights from peers, bytes per peer, and running transfers.
    pub weights: crate::transfer::view::WeightsView,
    /// Bytes of rows sent to other stages and to standbys.
    pub boundary: crate::boundary::BoundaryView,
}

/// A job.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct JobView {
    /// Job id, hex.
    pub job: String,
    /// Model name.
    pub model: String,
    /// "planning", "loading", "ready" or "degraded"; "starting" after a restart until it is placed; "loading",
    /// "holding" or "standby" for a stage of another node's job.
    pub state: String,
    /// Why it is degraded.
    pub reason: Option<String>,
    /// The first job of its model, if this one is a replica.
    pub replica_of: Option<String>,
    /// Whether this node is its coordinator.
    pub head: bool,
    /// Name of its coordinator.
    pub coordinator: String,
    /// Epoch counter.
    pub epoch: u32,
    /// Predicted milliseconds per token.
    pub token_ms: f64,
    /// Stages, first to last.
    pub stages: Vec<StageView>,
    /// The standbys of its stages.
    pub standbys: Vec<StandbyView>,
    /// Its last migration to a better placement.
    pub moved: Option<MoveView>,
    /// Tokens of context per request; `None` for a stage of another node's job.
    pub context: Option<u32>,
    /// Whole contexts that the cache has room for; `None` for a stage of another node's job.
    pub sequences: Option<u32>,
    /// Encoding of the rows between the stages; `None` for a stage of another node's job.
    pub boundary: Option<String>,
    /// Bytes of a row between two stages; `None` for a stage of another node's job.
    pub row_bytes: Option<u32>,
    /// Pages of the cache; 0 for a stage of another node's job.
    pub pages: u32,
    /// Those of them that are free.
    pub pages_free: u32,
    /// Ended requests that stay cached for requests that begin with the same tokens.
    pub cached_requests: u32,
    /// Draft tokens since the model is served.
    pub draft_tokens: u64,
    /// Those of them that were right.
    pub draft_tokens_right: u64,
    /// Draft tokens that came from the draft model.
    pub model_draft_tokens: u64,
    /// Those of them that were right.
    pub model_draft_tokens_right: u64,
    /// Share of the last second in which the stages did not compute, on average. Present while requests run.
    pub bubble: Option<f64>,
    /// The share that the plan predicts for this number of requests, if their steps take the predicted times.
    pub bubble_predicted: Option<f64>,
    /// Running requests.
    pub running: u32,
    /// Queued requests.
    pub queued: u32,
}

/// Snapshot of the core's state for the API, taken on the driver's thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Views {
    /// See [`StateView`].
    pub peers: Vec<PeerView>,
    /// See [`StateView`].
    pub jobs: Vec<JobView>,
    /// Simulations that this node coordinates.
    pub grids: Vec<job::JobView>,
    /// Tiles that it holds, of its own simulations and of other nodes' simulations.
    pub tiles: Vec<HeldPart>,
}

impl Views {
    /// Names of the models of which this node holds parts for other nodes' jobs.
    pub(crate) fn held_models(&self) -> impl Iterator<Item = &str> {
        self.jobs.iter().filter(|job| !job.head).map(|job| job.model.as_str())
    }

    /// Requests that run or wait in a job that this node coordinates, and in its replicas.
    pub(crate) fn requests_of(&self, job: &str) -> u32 {
        let counts = |view: &&JobView| view.head && (view.job == job || view.replica_of.as_deref() == Some(job));
        self.jobs.iter().filter(counts).map(|view| view.running + view.queued).sum()
    }

    /// Takes the snapshot.
    pub(crate) fn of(node: &Node) -> Self {
        Self {
            peers: peers::peer_views(node),
            jobs: job_views(node),
            grids: node.jobs().filter(|job| matches!(job.program, ProgramView::Steps { .. })).collect(),
            tiles: node.parts().filter(|part| matches!(part.what, HeldWork::Tile { .. })).collect(),
        }
    }
}

/// Served models for the API: the jobs that this node coordinates, then the stages that it holds for other nodes' jobs.
fn job_views(node: &Node) -> Vec<JobView> {
    let own = node.membership().own();
    let names = Names::of(node);
    let mut jobs: Vec<JobView> = node.jobs().filter_map(|job| served_view(job, &own.name, &names)).collect();
    // The first job of a model speaks for it.
    jobs.sort_by_key(|job| job.replica_of.is_some());
    for part in node.parts().filter(|part| part.epoch.issuer != own.node) {
        let Some(held) = held_view(part, own.node, &names) else { continue };
        // The parts of a job are consecutive.
        match jobs.last_mut().filter(|last| !last.head && last.job == held.job) {
            Some(last) => {
                last.stages.extend(held.stages);
                let both = [last.state.as_str(), held.state.as_str()];
                let state = ["loading", "holding"].into_iter().find(|state| both.contains(state));
                last.state = state.unwrap_or("standby").to_owned();
            }
            None => jobs.push(held),
        }
    }
    jobs
}

/// A job that this node coordinates, if it serves a model.
fn served_view(job: job::JobView, own_name: &str, names: &Names) -> Option<JobView> {
    let ProgramView::Serve {
        moved,
        context,
        sequences,
        row,
        pages,
        ref resting,
        drafts,
        model_drafts,
        running,
        waiting,
        content: _,
    } = job.program
    else {
        return None;
    };
    let stages = job.parts.iter().filter_map(|part| match &part.what {
        WhatView::Stage(layers) => {
            Some(held_stage((part.owner, part.device), layers, (part.bytes, part.ram), Some(part.step_ns), names))
        }
        WhatView::Tile { .. } => None,
    });
    let standbys = job.parts.iter().zip(0..).filter_map(|(part, stage)| {
        let standby = part.standby.as_ref()?;
        let state = match (standby.node, standby.resident, standby.current) {
            (None, ..) => "none",
            (_, _, true) => "current",
            (_, true, false) => "catching up",
            (_, false, false) => "loading",
        };
        let name = standby.node.map(|node| (names.get(node), names.label(node, standby.device)));
        Some(StandbyView::new(stage, name, standby.tier, state, standby.stall_ns))
    });
    let (bubble, bubble_predicted) = if running > 0 { bubbles(&job, running) } else { (None, None) };
    Some(JobView {
        job: format!("{:016x}", job.job.0),
        state: job_state(job.state).to_owned(),
        reason: job.reason.map(|reason| names.in_text(&reason)),
        replica_of: job.replica_of.map(|first| format!("{:016x}", first.0)),
        head: true,
        coordinator: own_name.to_owned(),
        epoch: job.epoch.counter,
        token_ms: job.step_ns as f64 / 1e6,
        stages: stages.collect(),
        standbys: standbys.collect(),
        moved: moved.map(|moved| MoveView { change: moved.change.into(), fetched_bytes: moved.fetched_bytes }),
        context: Some(context),
        sequences: Some(sequences),
        boundary: Some(rows::codec(row.codec).name().to_owned()),
        row_bytes: Some(row.bytes),
        pages: pages.1,
        pages_free: pages.0,
        cached_requests: resting.len() as u32,
        draft_tokens: drafts.0,
        draft_tokens_right: drafts.1,
        model_draft_tokens: model_drafts.0,
        model_draft_tokens_right: model_drafts.1,
        bubble,
        bubble_predicted,
        running: running as u32,
        queued: waiting as u32,
        model: job.name,
    })
}

/// The share of time in which stages do not compute, measured and predicted. Each stage has one of at most as many groups of
/// requests as there are stages, so a step of a stage recurs after the step of the slowest one, or after one token of the
/// groups in flight.
fn bubbles(job: &job::JobView, running: usize) -> (Option<f64>, Option<f64>) {
    let (stages, token_ns) = (job.parts.len(), job.step_ns as f64);
    let mean = |busy: f64| (1.0 - busy / stages as f64).clamp(0.0, 1.0);
    let measured: Option<u32> = job.parts.iter().map(|part| part.busy).sum();
    let (slowest, all) = job.parts.iter().fold((0.0, 0.0), |(slowest, all): (f64, f64), part| {
        (slowest.max(part.step_ns as f64), all + part.step_ns as f64)
    });
    let period = slowest.max(token_ns / running.min(stages).max(1) as f64);
    let predicted = (period > 0.0).then(|| mean(all / period));
    (measured.filter(|_| stages > 0).map(|busy| mean(f64::from(busy) / 1000.0)), predicted)
}

/// A stage that this node holds for another node's job.
fn held_view(part: HeldPart, me: NodeId, names: &Names) -> Option<JobView> {
    let HeldWork::Stage { layers } = part.what else { return None };
    let state = match (part.bytes.is_some(), part.standby) {
        (false, _) => "loading",
        (true, false) => "holding",
        (true, true) => "standby",
    };
    Some(JobView {
        job: format!("{:016x}", part.job.0),
        state: state.to_owned(),
        coordinator: names.get(part.epoch.issuer),
        epoch: part.epoch.counter,
        stages: vec![held_stage((me, part.device), &layers, (part.bytes, part.ram), None, names)],
        model: part.name,
        ..JobView::default()
    })
}

fn held_stage(
    (node, device): (NodeId, u8),
    layers: &Range<u32>,
    (bytes, ram): (Option<u64>, u64),
    step_ns: Option<u64>,
    names: &Names,
) -> StageView {
    StageView {
        node: hex(&node),
        name: names.get(node),
        device: names.label(node, device),
        first_layer: layers.start,
        end_layer: layers.end,
        bytes: bytes.unwrap_or(0),
        ram: bytes.map_or(0, |_| ram),
        step_ms: step_ns.map(|ns| ns as f64 / 1e6),
    }
}

/// Longest displayed name of another node, in characters.
const NAME_CHARS_MAX: usize = 128;

/// A peer's text, made safe for terminals and logs.
fn shown(name: &str) -> String {
    transport::printable(name, NAME_CHARS_MAX)
}

fn job_state(state: JobState) -> &'static str {
    match state {
        JobState::Planning => "planning",
        JobState::Loading => "loading",
        JobState::Running => "ready",
        JobState::Degraded => "degraded",
    }
}

pub(crate) fn plan_report(
    model: String,
    spec: &ModelSpec,
    plan: &Plan,
    standbys: &[Standby],
    change: Option<PredictedChange>,
    names: &BTreeMap<String, String>,
) -> PlanReport {
    let name = |id: NodeKey| {
        let node = hex(&id.into());
        names.get(&node).cloned().unwrap_or(node)
    };
    let label = |id: DeviceId| names.get(&label_key(&hex(&id.into()), id.index)).cloned().unwrap_or_default();
    let both = |id: DeviceId| format!("{} {}", name(id.node), label(id)).trim_end().to_owned();
    let stage = |stage: &partitioner::Stage| stage_view(stage, name(stage.device.node), label(stage.device));
    let stages = |plan: &Plan| plan.stages().iter().map(stage).collect::<Vec<_>>();
    PlanReport {
        model,
        context: spec.work.context,
        sequences: spec.work.sequences,
        boundary: rows::codec(spec.row_of(plan).codec).name().to_owned(),
        row_bytes: plan.row_bytes(),
        change: change.map(ChangeView::from),
        zones: Vec::new(),
        token_ms: plan.token_ns() as f64 / 1e6,
        exact: plan.exact(),
        stages: stages(plan),
        reasons: plan
            .reasons()
            .iter()
            .map(|(id, reason)| ReasonView { node: both(*id), reason: reason.clone() })
            .collect(),
        standbys: standbys
            .iter()
            .map(|standby| {
                let who = standby.place.as_ref().map(|place| (name(place.device.node), label(place.device)));
                StandbyView::new(standby.stage, who, standby.tier, "planned", standby.stall_ns)
            })
            .collect(),
        losses: plan
            .losses()
            .iter()
            .map(|l| LossView {
                node: name(l.lost),
                stages: l.plan.as_ref().map(&stages).unwrap_or_default(),
                error: l.plan.as_ref().err().map(ToString::to_string),
            })
            .collect(),
    }
}

fn stage_view(stage: &partitioner::Stage, name: String, device: String) -> StageView {
    StageView {
        node: hex(&stage.device.into()),
        name,
        device,
        first_layer: stage.layers.start,
        end_layer: stage.layers.end,
        bytes: stage.bytes,
        ram: stage.ram,
        step_ms: Some(stage.step_ns as f64 / 1e6),
    }
}

/// The key of a device's label among the names of members.
pub(crate) fn label_key(node: &str, index: u8) -> String {
    format!("{node}/{index}")
}

/// Names of the members, to replace the id prefixes in the core's texts.
pub(crate) struct Names {
    nodes: BTreeMap<NodeId, String>,
    /// Labels of the devices of nodes that have several.
    devices: BTreeMap<(NodeId, u8), String>,
}

impl Names {
    /// The current names.
    pub(crate) fn of(node: &Node) -> Self {
        let adverts = || node.members().filter_map(|member| member.advert).chain([node.membership().own()]);
        let devices = |advert: &Advert| {
            let (node, several) = (advert.node, advert.capacity.devices.len() > 1);
            let labels = advert.capacity.devices.iter().filter(|_| several).map(|device| shown(device.label()));
            (0..).zip(labels).map(|(index, label)| ((node, index), label)).collect::<Vec<_>>()
        };
        Self {
            nodes: adverts().map(|advert| (advert.node, shown(&advert.name))).collect(),
            devices: adverts().flat_map(devices).collect(),
        }
    }

    /// The label of a device, if its node has several.
    pub(crate) fn label(&self, node: NodeId, device: u8) -> String {
        self.devices.get(&(node, device)).cloned().unwrap_or_default()
    }

    /// The name of a node, or a prefix of its id if the name is unknown.
    pub(crate) fn get(&self, node: NodeId) -> String {
        self.nodes.get(&node).cloned().unwrap_or_else(|| node.to_string())
    }

    /// A text of the core with ids replaced by names.
    pub(crate) fn in_text(&self, text: &str) -> String {
        let short: BTreeMap<String, &String> = self.nodes.iter().map(|(node, name)| (node.to_string(), name)).collect();
        let mut out = String::with_capacity(text.len());
        for piece in text.split_inclusive(|c: char| !c.is_ascii_alphanumeric()) {
            let end = piece.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).len();
            let (word, rest) = piece.split_at(end);
            out.push_str(short.get(word).map_or(word, |name| name.as_str()));
            out.push_str(rest);
        }
        out
    }
}

/// `1 node`, `2 nodes`.
pub(crate) fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// A full node id in hex, as shown by the API.
pub(crate) fn hex(node: &NodeId) -> String {
    node.0.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_in_a_text_are_replaced_by_names() {
        let node = |byte: u8| NodeId([byte; 16]);
        let names = Names {
            nodes: BTreeMap::from([(node(0x60), "desk".to_owned()), (node(0xab), "lab 2".to_owned())]),
            devices: BTreeMap::new(),
        };
        let text = "60606060 is excluded: no memory; job 6060606060606060, abababab, (abababab) and cdcdcdcd";
        let named = "desk is excluded: no memory; job 6060606060606060, lab 2, (lab 2) and cdcdcdcd";
        assert_eq!(names.in_text(text), named);
        assert_eq!((names.get(node(0x60)), names.get(node(0xcd))), ("desk".to_owned(), "cdcdcdcd".to_owned()));
    }

    #[test]
    fn one_is_singular() {
        assert_eq!(
            [count(0, "thread"), count(1, "thread"), count(2, "thread")],
            ["0 threads", "1 thread", "2 threads"]
        );
    }
}
