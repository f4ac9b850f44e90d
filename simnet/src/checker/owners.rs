//! Each stage or tile has one owner per epoch, which is not its own standby. A device has one stage (or both halves of one)
//! besides those that its node took over. A node that was reported lost gets no part before it is heard again, a banned node none
//! at all. A successor takes a simulation over only if more than half of its participants ask for it.
use crate::host::HostId;
use crate::world::{Observer, World};
use node_core::codec;
use node_core::id::{Epoch, JobId, NodeId, PartId};
use node_core::input::Input;
use node_core::job::JobState;
use node_core::limits::{EXCLUDED, VOTE_MAX};
use node_core::message::{Message, ToParticipant};
use node_core::output::{Event, Output};
use node_core::time::{Duration, Instant};
use node_core::work::{Order, PartWork, Placement};
use partitioner::DeviceId;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Watches placements. Clones share what they saw.
#[derive(Clone, Default)]
pub struct Owners {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// Owners of the stages of a job under an epoch, as its coordinator announced them.
    owners: BTreeMap<(JobId, Epoch), BTreeMap<PartId, DeviceId>>,
    /// Standbys of stages. Such a node may own several stages once it has taken over.
    standbys: BTreeSet<(JobId, PartId, NodeId)>,
    /// Owners of tiles. A node may own several: those that it was the standby of.
    tiles: BTreeMap<(JobId, Epoch), Vec<NodeId>>,
    /// The owners of a simulation as a participant last received them from each coordinator; and the votes: which nodes
    /// reported to it that the coordinator is silent.
    owners_known: BTreeMap<(HostId, JobId, NodeId), BTreeSet<NodeId>>,
    votes: BTreeMap<(HostId, JobId), BTreeMap<NodeId, Instant>>,
    /// The ban list that a coordinator received, and when.
    banned: BTreeMap<HostId, (Instant, Vec<NodeId>)>,
    /// Nodes that a coordinator reported lost for one of its jobs and has not heard since. Another job of the same
    /// coordinator may still ask a node once: it has its own leases.
    lost: BTreeMap<(HostId, NodeId), BTreeMap<JobId, Instant>>,
    /// When a host last heard a node: inputs handled at the same moment may report the node lost and find it again.
    heard: BTreeMap<(HostId, NodeId), Instant>,
    violations: Vec<String>,
}

impl Owners {
    /// All violations.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }

    /// Records each coordinator that still computes on a node some time after it received the ban.
    pub fn look(&self, world: &World) {
        let mut seen = self.seen.borrow_mut();
        let banned = std::mem::take(&mut seen.banned);
        for (coordinator, (since, out)) in banned {
            let uses = (since + LET_GO < world.now()).then(|| seen.uses(world, coordinator, &out)).flatten();
            match uses {
                Some(owner) => seen.violations.push(format!(
                    "{} ms, host {}: computes on {owner}, banned since {} ms",
                    world.now().0 / 1_000_000,
                    coordinator.0,
                    since.0 / 1_000_000
                )),
                // Reported once.
                None => _ = seen.banned.insert(coordinator, (since, out)),
            }
        }
    }
}

impl Seen {
    /// A node of this list that runs a part for a coordinator.
    fn uses(&self, world: &World, coordinator: HostId, out: &[NodeId]) -> Option<NodeId> {
        let node = world.host(coordinator).node.as_ref()?;
        let running = node.jobs().filter(|view| view.state == JobState::Running);
        running.flat_map(|view| view.parts).map(|part| part.owner).find(|owner| out.contains(owner))
    }

    /// A tile is ordered from its owner or its standby.
    fn own_tile(&mut self, job: JobId, epoch: Epoch, order: &Order, to: NodeId) -> Option<String> {
        let owners = &order.owners;
        let known = self.tiles.entry((job, epoch)).or_insert_with(|| owners.clone());
        if known != owners {
            return Some(format!("tiles of {epoch:?} have the owners {known:?} and {owners:?}"));
        }
        let owns = order.owner(order.part) == Some(to);
        let tile = order.part;
        (owns == order.standby.is_some())
            .then(|| format!("orders tile {tile} from {to} with standby tier {:?}, owners {owners:?}", order.standby))
    }

    /// A participant of a simulation receives a message.
    fn receive(&mut self, at: Instant, host: HostId, from: NodeId, job: JobId, say: ToParticipant) {
        if let ToParticipant::Prepare(order) = say {
            if matches!(order.work, PartWork::Tile(_)) {
                self.owners_known.insert((host, job, from), order.owners.into_iter().collect());
            }
        } else if matches!(say, ToParticipant::CoordinatorSilent { .. }) {
            self.votes.entry((host, job)).or_default().insert(from, at);
        }
    }

    /// A host takes a simulation over from a coordinator: the participants that ask for it must be more than half of the
    /// owners.
    fn succeed(&self, at: Instant, host: HostId, job: JobId, from: NodeId) -> Option<String> {
        let votes = self.votes.get(&(host, job)).into_iter().flatten().filter(|(_, vote)| at <= **vote + VOTE_MAX);
        let (votes, owners) = (1 + votes.count(), self.owners_known.get(&(host, job, from))?.len());
        (2 * votes <= owners).then(|| {
            format!("takes over a simulation, though only {votes} participants ask for it and {owners} own tiles")
        })
    }

    /// Why a coordinator may not place work on a node now; `None` if it may.
    fn unfit(&self, at: Instant, coordinator: HostId, job: JobId, node: NodeId) -> Option<&'static str> {
        let banned = self.banned.get(&coordinator).is_some_and(|(_, out)| out.contains(&node));
        let lost = self.lost.get(&(coordinator, node)).and_then(|jobs| jobs.get(&job));
        let lost = lost.is_some_and(|since| at < *since + EXCLUDED);
        if banned { Some("which is banned") } else { lost.then_some("reported lost and not heard since") }
    }

    /// A host hears a node.
    #[expect(clippy::wildcard_enum_match_arm, reason = "few inputs come from a node")]
    fn hear(&mut self, at: Instant, host: HostId, input: &Input) {
        let from = match input {
            Input::Datagram { from, .. } | Input::Message { from, .. } | Input::Frame { from, .. } => from,
            Input::Connected { node, .. } => node,
            _ => return,
        };
        self.lost.remove(&(host, *from));
        self.heard.insert((host, *from), at);
    }

    fn own(&mut self, job: JobId, epoch: Epoch, part: PartId, device: DeviceId) -> Option<String> {
        let (owners, node) = (self.owners.entry((job, epoch)).or_default(), NodeId::from(device));
        let before = owners.insert(part, device).filter(|before| *before != device);
        if let Some(before) = before {
            return Some(format!("{device:?} and {before:?} own part {part} under {epoch:?}"));
        }
        let took_over = |at: &PartId| self.standbys.contains(&(job, *at, node));
        // A stage that is split for two standbys is two parts of its owner, one after the other.
        let halves = |at: PartId| at == part.after() || Some(at) == part.before();
        let apart = |at: PartId| at != part && !halves(at) && !took_over(&at);
        let other = owners.iter().find(|(at, owner)| **owner == device && apart(**at));
        let both = |(at, _)| format!("device {} of {node} owns parts {part} and {at} under {epoch:?}", device.index);
        other.filter(|_| !took_over(&part)).map(both)
    }

    fn add_standby(&mut self, job: JobId, epoch: Epoch, part: PartId, node: NodeId) -> Option<String> {
        self.standbys.insert((job, part, node));
        let owner = self.owners.get(&(job, epoch))?.get(&part)?;
        (NodeId::from(*owner) == node)
            .then(|| format!("{node} is listed as standby of part {part} and owns it under {epoch:?}"))
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker handles few of many variants")]
impl Observer for Owners {
    fn input(&mut self, at: Instant, host: HostId, input: &Input) {
        if let Input::Banned(nodes) = input {
            self.seen.borrow_mut().banned.insert(host, (at, nodes.clone()));
        }
        if let Input::Message { from, bytes } = input
            && let Ok(Message::ToParticipant { job, say, .. }) = codec::decode_message(bytes)
        {
            self.seen.borrow_mut().receive(at, host, *from, job, say);
        }
        self.seen.borrow_mut().hear(at, host, input);
    }

    // A forged message proves only that its sender lives.
    fn forged(&mut self, at: Instant, host: HostId, input: &Input) {
        self.seen.borrow_mut().hear(at, host, input);
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let mut seen = self.seen.borrow_mut();
        let wrong = match output {
            Output::SendMessage { to, bytes } => match codec::decode_message(bytes) {
                Ok(Message::ToParticipant { job, epoch, say: ToParticipant::Prepare(order) }) => {
                    match (&order.work, order.standby) {
                        (PartWork::Tile(_), _) => seen.own_tile(job, epoch, &order, *to),
                        (PartWork::Stage(_), Some(_)) => seen.add_standby(job, epoch, order.part, *to),
                        (PartWork::Stage(_), None) => seen.own(job, epoch, order.part, to.device(order.device)),
                    }
                }
                Ok(Message::ToParticipant { job, epoch, say: ToParticipant::Standby { part, node: Some(node) } }) => {
                    seen.add_standby(job, epoch, part, node)
                }
                _ => None,
            },
            Output::Notify(Event::Lost { node, .. }) if seen.heard.get(&(host, *node)) == Some(&at) => None,
            Output::Notify(Event::Lost { job, node, .. }) => {
                seen.lost.entry((host, *node)).or_default().insert(*job, at);
                None
            }
            // Other nodes heard it: a report of membership counts as well.
            Output::Notify(Event::PeerUp { node }) => {
                seen.lost.remove(&(host, *node));
                None
            }
            Output::Notify(Event::JobPlaced { job, epoch, placement, .. }) => {
                let stages: &[_] = match &**placement {
                    Placement::Stages(stages) => stages,
                    Placement::Tiles { .. } => &[],
                };
                let nodes: Vec<NodeId> = match &**placement {
                    Placement::Stages(stages) => stages.iter().map(|(device, _)| (*device).into()).collect(),
                    Placement::Tiles { tiles, .. } => tiles.iter().map(|(node, _)| *node).collect(),
                };
                let mut parts = stages.iter().zip(0..);
                let owned = parts.find_map(|((device, _), at)| seen.own(*job, *epoch, PartId(at), *device));
                let unfit = nodes.iter().find_map(|node| Some((*node, seen.unfit(at, host, *job, *node)?)));
                owned.or(unfit.map(|(node, why)| format!("places {epoch:?} on {node}, {why}")))
            }
            // A coordinator that is a standby itself sends itself no order.
            Output::Notify(Event::Standby { job, part, node, .. }) => {
                seen.standbys.insert((*job, *part, *node));
                None
            }
            Output::Notify(Event::JobInherited { job, from, .. }) => seen.succeed(at, host, *job, *from),
            _ => None,
        };
        if let Some(what) = wrong {
            seen.violations.push(format!("{} ms, host {}: {what}", at.0 / 1_000_000, host.0));
        }
    }

    fn died(&mut self, _at: Instant, host: HostId) {
        let mut seen = self.seen.borrow_mut();
        seen.lost.retain(|(coordinator, _), _| *coordinator != host);
        seen.banned.remove(&host);
        seen.owners_known.retain(|(of, ..), _| *of != host);
        seen.votes.retain(|(of, _), _| *of != host);
    }
}

/// A job leaves a banned node within this time: a plan, and weights for the node that replaces it.
const LET_GO: Duration = Duration::from_secs(5);
