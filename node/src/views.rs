//! What users and programs see of a node: members, jobs and plans, read off the core.
use node_core::id::NodeId;
use node_core::job::{self, JobState, ProgramView, WhatView};
use node_core::limits;
use node_core::membership::MemberState;
use node_core::message::Advert;
use node_core::node::Node;
use node_core::work::{Change, DownReason, HeldPart, HeldWork};
use partitioner::zones::{Then, ZoneLoss};
use partitioner::{Plan, Standby, Tier};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;

/// A plan for people and programs.
#[derive(Clone, Debug, Serialize)]
pub struct PlanReport {
    /// Model name.
    pub model: String,
    /// Predicted milliseconds per token of one request.
    pub token_ms: f64,
    /// Whether the search was exact.
    pub exact: bool,
    /// Stages, first to last.
    pub stages: Vec<StageView>,
    /// Why each node is or is not used.
    pub reasons: Vec<ReasonView>,
    /// Who would step in for each stage that the head does not hold itself.
    pub standbys: Vec<StandbyView>,
    /// What would happen if a node were lost.
    pub losses: Vec<LossView>,
    /// What the loss of each zone would mean; empty where no zone is known.
    pub zones: Vec<ZoneView>,
    /// Where the model is served already: from its present placement to this plan.
    pub change: Option<ChangeView>,
}

/// From one placement to another.
#[derive(Clone, Debug, Serialize)]
pub struct ChangeView {
    /// Predicted milliseconds per token as it is, on the mesh as it is now.
    pub before_ms: f64,
    /// And as it would be.
    pub after_ms: f64,
    /// Weight bytes that nodes hold then and do not hold now.
    pub moved_bytes: u64,
}

impl From<Change> for ChangeView {
    fn from(change: Change) -> Self {
        Self {
            before_ms: change.before_ns as f64 / 1e6,
            after_ms: change.after_ns as f64 / 1e6,
            moved_bytes: change.bytes,
        }
    }
}

/// The last move of a job to a better placement.
#[derive(Clone, Debug, Serialize)]
pub struct MoveView {
    /// As planned.
    #[serde(flatten)]
    pub change: ChangeView,
    /// Weight bytes that came from peers for it; what a node had on its disk did not have to.
    pub fetched_bytes: u64,
}

/// One stage of a plan or a job.
#[derive(Clone, Debug, Serialize)]
pub struct StageView {
    /// Node id, hex.
    pub node: String,
    /// Its name.
    pub name: String,
    /// First layer.
    pub first_layer: u32,
    /// One past the last layer.
    pub end_layer: u32,
    /// Bytes it takes; 0 until it is loaded.
    pub bytes: u64,
    /// Predicted milliseconds per token; none for a stage of another node's job, which that node predicted.
    pub step_ms: Option<f64>,
}

/// Why a node is or is not used.
#[derive(Clone, Debug, Serialize)]
pub struct ReasonView {
    /// Its name.
    pub node: String,
    /// The reason.
    pub reason: String,
}

/// What would happen if a node were lost.
#[derive(Clone, Debug, Serialize)]
pub struct LossView {
    /// The node lost.
    pub node: String,
    /// Stages of the plan that would follow; empty if there is none.
    pub stages: Vec<StageView>,
    /// Why there is none.
    pub error: Option<String>,
}

/// What the loss of a zone would mean.
#[derive(Clone, Debug, Serialize)]
pub struct ZoneView {
    /// Its name.
    pub zone: String,
    /// The job's coordinator is in it.
    pub coordinator: bool,
    /// Stages or tiles in it, counted from 0.
    pub parts: Vec<u16>,
    /// "untouched"; "standbys", where each part goes on at its standby; "placed", where the parts are placed again on the nodes that
    /// are left; "ends".
    pub then: &'static str,
    /// Predicted milliseconds without a token or a step, the time to notice the loss included.
    pub stall_ms: Option<f64>,
    /// Why the job could not go on.
    pub error: Option<String>,
}

impl From<ZoneLoss> for ZoneView {
    fn from(loss: ZoneLoss) -> Self {
        let (then, stall_ns, error) = match loss.then {
            Then::Untouched => ("untouched", None, None),
            Then::Standbys { stall_ns } => ("standbys", stall_ns, None),
            Then::Placed { stall_ns } => ("placed", stall_ns, None),
            Then::Ends { why } => ("ends", None, Some(why)),
        };
        let stall_ms = stall_ns.map(|ns| limits::LEASE.as_secs_f64() * 1e3 + ns as f64 / 1e6);
        let (zone, coordinator, parts) = (shown(&loss.zone), loss.coordinator, loss.parts);
        ZoneView { zone, coordinator, parts, then, stall_ms, error }
    }
}

/// Who steps in for a stage.
#[derive(Clone, Debug, Serialize)]
pub struct StandbyView {
    /// Which stage, counted from 0.
    pub stage: u16,
    /// Its name; none where nobody has the memory.
    pub name: Option<String>,
    /// "hot", "warm", "cold" or "none". Of a job that runs, hot is one whose caches are current.
    pub tier: String,
    /// "none", "loading", "catching up", "current"; of a plan "planned".
    pub state: String,
    /// Predicted milliseconds without a token if the stage's node is lost, the time to notice it included.
    pub stall_ms: Option<f64>,
}

impl StandbyView {
    fn new(stage: u16, name: Option<String>, tier: Tier, state: &str, stall_ns: Option<u64>) -> Self {
        let noticed = limits::LEASE.as_secs_f64() * 1e3;
        let tier = match tier {
            Tier::Hot => "hot",
            Tier::Warm => "warm",
            Tier::Cold => "cold",
            Tier::None => "none",
        };
        let stall_ms = stall_ns.map(|ns| noticed + ns as f64 / 1e6);
        StandbyView { stage, name, tier: tier.to_owned(), state: state.to_owned(), stall_ms }
    }
}

/// A node as the API shows it.
#[derive(Clone, Debug, Serialize)]
pub struct StateView {
    /// This node.
    pub node: String,
    /// Its name.
    pub name: String,
    /// Its libp2p PeerId.
    pub peer_id: String,
    /// Its mesh.
    pub mesh: String,
    /// Everybody known, this node included.
    pub peers: Vec<PeerView>,
    /// Jobs this node heads or takes part in.
    pub jobs: Vec<JobView>,
    /// When its membership ends, unix seconds.
    pub membership_ends: u64,
    /// This node was banned, or the member that issued its certificate: the node that banned it, the date, and what to do.
    pub banned: Option<String>,
    /// PeerIds that asked to join without a ticket: `meshnode approve PEER` lets them in.
    pub waiting: Vec<String>,
    /// The cache of weights from peers, what they gave, and what is being fetched.
    pub weights: crate::transfer::WeightsView,
    /// Rows given to other stages, and copies for standbys.
    pub boundary: crate::boundary::BoundaryView,
}

/// A member.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PeerView {
    /// Node id, hex.
    pub node: String,
    /// Name.
    pub name: String,
    /// PeerId.
    pub peer_id: String,
    /// "alive", "suspect", "left", "down", "banned".
    pub state: String,
    /// This node itself.
    pub this_node: bool,
    /// Device description.
    pub device: String,
    /// Failure domain that its owner named; empty: unknown.
    pub zone: String,
    /// Bytes offered in all.
    pub memory_total: u64,
    /// Bytes free.
    pub memory_free: u64,
    /// Weight bytes per second that the device showed in decode; 0: not measured.
    pub bytes_per_second: u64,
    /// Flops per second that it showed in prefill; 0: not measured.
    pub flops_per_second: u64,
    /// Bytes of keys and values per second that it showed in attention; 0: not measured.
    pub cache_bytes_per_second: u64,
    /// Round trip in milliseconds, if measured.
    pub rtt_ms: Option<f64>,
    /// Bytes a second that the link to it carries, if measured.
    pub link_bytes_per_second: Option<u64>,
    /// A data-plane connection stands.
    pub connected: bool,
    /// Takes no new work.
    pub draining: bool,
    /// Data-plane addresses.
    pub addrs: Vec<String>,
}

/// A job.
#[derive(Clone, Debug, Default, Serialize)]
pub struct JobView {
    /// Job id, hex.
    pub job: String,
    /// Model name.
    pub model: String,
    /// "planning", "loading", "ready", "degraded"; "starting" after a restart until it is placed again; "holding" or
    /// "standby" for a stage of another node's job.
    pub state: String,
    /// Why it is degraded.
    pub reason: Option<String>,
    /// This node is its coordinator.
    pub head: bool,
    /// Name of its coordinator.
    pub coordinator: String,
    /// Epoch counter.
    pub epoch: u32,
    /// Predicted milliseconds per token.
    pub token_ms: f64,
    /// Stages, first to last.
    pub stages: Vec<StageView>,
    /// Who steps in if a stage's node is lost.
    pub standbys: Vec<StandbyView>,
    /// Its last move to a better placement.
    pub moved: Option<MoveView>,
    /// Tokens of context per request; none for a stage of another node's job.
    pub context: Option<u32>,
    /// Requests that can run at once; none for a stage of another node's job.
    pub sequences: Option<u32>,
    /// Requests running.
    pub running: u32,
    /// Requests waiting.
    pub queued: u32,
}

/// Members for the API, with what the transport measured; this node first.
fn peer_views(node: &Node) -> Vec<PeerView> {
    let own = peer_view(node.membership().own(), "alive");
    let own = PeerView { this_node: true, ..own };
    let others = node.members().map(|m| {
        let state = match m.state {
            MemberState::Alive => "alive",
            MemberState::Suspect => "suspect",
            MemberState::Down(DownReason::Left) => "left",
            MemberState::Down(DownReason::Failed) => "down",
        };
        match m.advert {
            Some(advert) => PeerView {
                connected: m.connected,
                rtt_ms: m.rtt_ns.map(|ns| ns as f64 / 1e6),
                link_bytes_per_second: m.bytes_per_second,
                ..peer_view(advert, state)
            },
            None => {
                PeerView { node: hex(&m.node), state: state.to_owned(), connected: m.connected, ..PeerView::default() }
            }
        }
    });
    std::iter::once(own).chain(others).collect()
}

/// All that the thread which decides knows for people.
#[derive(Clone, Debug, Default)]
pub struct Views {
    /// See [`StateView`].
    pub peers: Vec<PeerView>,
    /// See [`StateView`].
    pub jobs: Vec<JobView>,
    /// Simulations that this node coordinates.
    pub grids: Vec<job::JobView>,
    /// Tiles that it holds, of its own simulations and of others'.
    pub tiles: Vec<HeldPart>,
}

impl Views {
    /// As it is now.
    pub fn of(node: &Node) -> Self {
        Self {
            peers: peer_views(node),
            jobs: job_views(node),
            grids: node.jobs().filter(|job| matches!(job.program, ProgramView::Steps { .. })).collect(),
            tiles: node.parts().filter(|part| matches!(part.what, HeldWork::Tile { .. })).collect(),
        }
    }
}

/// Served models for the API: those that this node coordinates, then the stages that it holds of others'.
fn job_views(node: &Node) -> Vec<JobView> {
    let own = node.membership().own();
    let names = Names::of(node);
    let mut jobs: Vec<JobView> = node.jobs().filter_map(|job| served_view(job, &own.name, &names)).collect();
    for part in node.parts().filter(|part| part.epoch.issuer != own.node) {
        let Some(held) = held_view(part, own.node, &names) else { continue };
        // A job's parts come one after the other.
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
    let ProgramView::Serve { moved, context, sequences, running, waiting, .. } = job.program else { return None };
    let stages = job.parts.iter().filter_map(|part| match &part.what {
        WhatView::Stage(layers) => Some(held_stage(part.owner, layers, part.bytes, Some(part.step_ns), names)),
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
        let name = standby.node.map(|node| names.get(node));
        Some(StandbyView::new(stage, name, standby.tier, state, standby.stall_ns))
    });
    Some(JobView {
        job: format!("{:016x}", job.job.0),
        state: job_state(job.state).to_owned(),
        reason: job.reason.map(|reason| names.in_text(&reason)),
        head: true,
        coordinator: own_name.to_owned(),
        epoch: job.epoch.counter,
        token_ms: job.step_ns as f64 / 1e6,
        stages: stages.collect(),
        standbys: standbys.collect(),
        moved: moved.map(|moved| MoveView { change: moved.change.into(), fetched_bytes: moved.fetched_bytes }),
        context: Some(context),
        sequences: Some(sequences),
        running: running as u32,
        queued: waiting as u32,
        model: job.name,
    })
}

/// A stage that this node holds of another node's job.
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
        stages: vec![held_stage(me, &layers, part.bytes, None, names)],
        model: part.name,
        ..JobView::default()
    })
}

fn held_stage(node: NodeId, layers: &Range<u32>, bytes: Option<u64>, step_ns: Option<u64>, names: &Names) -> StageView {
    StageView {
        node: hex(&node),
        name: names.get(node),
        first_layer: layers.start,
        end_layer: layers.end,
        bytes: bytes.unwrap_or(0),
        step_ms: step_ns.map(|ns| ns as f64 / 1e6),
    }
}

/// Longest name shown of another node.
const NAME_CHARS_MAX: usize = 128;

/// What a peer calls itself, as it may reach terminals and logs.
fn shown(name: &str) -> String {
    transport::printable(name, NAME_CHARS_MAX)
}

/// What a member says about itself.
fn peer_view(advert: &Advert, state: &str) -> PeerView {
    PeerView {
        node: hex(&advert.node),
        name: shown(&advert.name),
        peer_id: transport::PeerId::from_bytes(&advert.peer_id).map(|p| p.to_string()).unwrap_or_default(),
        state: state.to_owned(),
        device: shown(&advert.capacity.device),
        zone: shown(&advert.capacity.zone),
        memory_total: advert.capacity.memory_total,
        memory_free: advert.capacity.memory_free,
        bytes_per_second: advert.capacity.bytes_per_second,
        flops_per_second: advert.capacity.flops_per_second,
        cache_bytes_per_second: advert.capacity.cache_bytes_per_second,
        draining: advert.draining,
        addrs: advert.data_addrs.iter().map(ToString::to_string).collect(),
        ..PeerView::default()
    }
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
    plan: &Plan,
    standbys: &[Standby],
    change: Option<Change>,
    names: &BTreeMap<String, String>,
) -> PlanReport {
    let name = |id: &partitioner::DeviceId| {
        let node = hex(&NodeId(id.0));
        names.get(&node).cloned().unwrap_or(node)
    };
    let stages = |plan: &Plan| plan.stages().iter().map(|s| stage_view(s, name(&s.device))).collect::<Vec<_>>();
    PlanReport {
        model,
        change: change.map(ChangeView::from),
        zones: Vec::new(),
        token_ms: plan.token_ns() as f64 / 1e6,
        exact: plan.exact(),
        stages: stages(plan),
        reasons: plan
            .reasons()
            .iter()
            .map(|(id, reason)| ReasonView { node: name(id), reason: reason.clone() })
            .collect(),
        standbys: standbys
            .iter()
            .map(|standby| {
                let who = standby.place.as_ref().map(|place| name(&place.device));
                StandbyView::new(standby.stage, who, standby.tier, "planned", standby.stall_ns)
            })
            .collect(),
        losses: plan
            .losses()
            .iter()
            .map(|l| LossView {
                node: name(&l.lost),
                stages: l.plan.as_ref().map(&stages).unwrap_or_default(),
                error: l.plan.as_ref().err().map(ToString::to_string),
            })
            .collect(),
    }
}

fn stage_view(stage: &partitioner::Stage, name: String) -> StageView {
    StageView {
        node: hex(&NodeId(stage.device.0)),
        name,
        first_layer: stage.layers.start,
        end_layer: stage.layers.end,
        bytes: stage.bytes,
        step_ms: Some(stage.step_ns as f64 / 1e6),
    }
}

/// Names of the members. The core names nodes by the beginning of their ids; users read names.
pub(crate) struct Names(BTreeMap<NodeId, String>);

impl Names {
    /// As the members call themselves now.
    pub(crate) fn of(node: &Node) -> Self {
        let others = node.members().filter_map(|member| Some((member.node, shown(&member.advert?.name))));
        let own = node.membership().own();
        Self(others.chain([(own.node, own.name.clone())]).collect())
    }

    /// A node's name; the beginning of its id, where it is not known.
    pub(crate) fn get(&self, node: NodeId) -> String {
        self.0.get(&node).cloned().unwrap_or_else(|| node.to_string())
    }

    /// A text of the core with names in the place of ids.
    pub(crate) fn in_text(&self, text: &str) -> String {
        let short: BTreeMap<String, &String> = self.0.iter().map(|(node, name)| (node.to_string(), name)).collect();
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

/// A node id in full, as the API shows it.
pub fn hex(node: &NodeId) -> String {
    node.0.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_in_a_text_become_names_and_other_words_stay() {
        let node = |byte: u8| NodeId([byte; 16]);
        let names = Names(BTreeMap::from([(node(0x60), "desk".to_owned()), (node(0xab), "lab 2".to_owned())]));
        let text = "60606060 is left out: no room; job 6060606060606060, abababab, (abababab) and cdcdcdcd";
        let named = "desk is left out: no room; job 6060606060606060, lab 2, (lab 2) and cdcdcdcd";
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
