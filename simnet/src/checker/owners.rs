//! One owner per stage or tile and epoch, which is not its standby as well, and one stage (or the halves of one) per owner that took
//! none over. A node that was reported lost gets none before it was heard
//! (of) again, and a banned node none at all. A successor takes a simulation over if more than half of its participants ask for it.
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
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Watches who is given what. Clones share what they saw.
#[derive(Clone, Default)]
pub struct Owners {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// Who owns which stage of a job under an epoch, as its head said.
    owners: BTreeMap<(JobId, Epoch), BTreeMap<PartId, NodeId>>,
    /// Who was ordered to be the standby of which stage: it may own several once it has taken over.
    standbys: BTreeSet<(JobId, PartId, NodeId)>,
    /// Who owns which tile: a node may own several, those that it was the standby of.
    tiles: BTreeMap<(JobId, Epoch), Vec<NodeId>>,
    /// The owners of a simulation as a participant received them last from each coordinator, and who told it that the coordinator is
    /// silent.
    owners_known: BTreeMap<(HostId, JobId, NodeId), BTreeSet<NodeId>>,
    votes: BTreeMap<(HostId, JobId), BTreeMap<NodeId, Instant>>,
    /// The list of banned nodes that a coordinator received, and when.
    banned: BTreeMap<HostId, (Instant, Vec<NodeId>)>,
    /// Who a coordinator reported lost by one of its jobs and has not heard since. What one job has lost another one of the same
    /// coordinator may ask once: it has leases of its own.
    lost: BTreeMap<(HostId, NodeId), BTreeMap<JobId, Instant>>,
    /// When a host heard a node last: what it handles at that time may report the node lost and find it back.
    heard: BTreeMap<(HostId, NodeId), Instant>,
    violations: Vec<String>,
}

impl Owners {
    /// What was seen that must not be.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }

    /// Records each coordinator that still computes on a node some time after it received the ban.
    pub fn look(&self, world: &World) {
        let mut seen = self.seen.borrow_mut();
        let banned = std::mem::take(&mut seen.banned);
        for (head, (since, out)) in banned {
            let uses = (since + LET_GO < world.now()).then(|| seen.uses(world, head, &out)).flatten();
            match uses {
                Some(owner) => seen.violations.push(format!(
                    "{} ms, host {}: computes on {owner}, banned since {} ms",
                    world.now().0 / 1_000_000,
                    head.0,
                    since.0 / 1_000_000
                )),
                // Said once.
                None => _ = seen.banned.insert(head, (since, out)),
            }
        }
    }
}

impl Seen {
    /// A node of this list that a coordinator computes on.
    fn uses(&self, world: &World, head: HostId, out: &[NodeId]) -> Option<NodeId> {
        let node = world.host(head).node.as_ref()?;
        let running = node.jobs().filter(|view| view.state == JobState::Running);
        running.flat_map(|view| view.parts).map(|part| part.owner).find(|owner| out.contains(owner))
    }

    /// A tile is asked for, of its owner or its standby.
    fn own_tile(&mut self, job: JobId, epoch: Epoch, order: &Order, to: NodeId) -> Option<String> {
        let owners = &order.owners;
        let known = self.tiles.entry((job, epoch)).or_insert_with(|| owners.clone());
        if known != owners {
            return Some(format!("tiles of {epoch:?} have the owners {known:?} and {owners:?}"));
        }
        let owns = order.owner(order.part) == Some(to);
        let tile = order.part;
        (owns == order.standby.is_some())
            .then(|| format!("asks {to} for tile {tile} as {:?}, owners {owners:?}", order.standby))
    }

    /// What a participant of a simulation receives.
    fn receive(&mut self, at: Instant, host: HostId, from: NodeId, job: JobId, say: ToParticipant) {
        if let ToParticipant::Prepare(order) = say {
            if matches!(order.work, PartWork::Tile(_)) {
                self.owners_known.insert((host, job, from), order.owners.into_iter().collect());
            }
        } else if matches!(say, ToParticipant::CoordinatorSilent { .. }) {
            self.votes.entry((host, job)).or_default().insert(from, at);
        }
    }

    /// A host takes a simulation over from a coordinator: more than half of the participants ask for it, so more than half of the owners' number.
    fn succeed(&self, at: Instant, host: HostId, job: JobId, from: NodeId) -> Option<String> {
        let votes = self.votes.get(&(host, job)).into_iter().flatten().filter(|(_, vote)| at <= **vote + VOTE_MAX);
        let (votes, owners) = (1 + votes.count(), self.owners_known.get(&(host, job, from))?.len());
        (2 * votes <= owners)
            .then(|| format!("takes a simulation over, {votes} participants ask for it, {owners} own tiles"))
    }

    /// Whether a coordinator may not place work on a node now, and why.
    fn unfit(&self, at: Instant, head: HostId, job: JobId, node: NodeId) -> Option<&'static str> {
        let banned = self.banned.get(&head).is_some_and(|(_, out)| out.contains(&node));
        let lost = self.lost.get(&(head, node)).and_then(|jobs| jobs.get(&job));
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

    fn own(&mut self, job: JobId, epoch: Epoch, part: PartId, node: NodeId) -> Option<String> {
        let owners = self.owners.entry((job, epoch)).or_default();
        let before = owners.insert(part, node).filter(|before| *before != node);
        if let Some(before) = before {
            return Some(format!("{node} and {before} own part {part} under {epoch:?}"));
        }
        let took_over = |at: &PartId| self.standbys.contains(&(job, *at, node));
        // A stage that is cut for two standbys is two parts of its owner, one after the other.
        let halves = |at: PartId| at == part.after() || Some(at) == part.before();
        let apart = |at: PartId| at != part && !halves(at) && !took_over(&at);
        let other = owners.iter().find(|(at, owner)| **owner == node && apart(**at));
        other.filter(|_| !took_over(&part)).map(|(at, _)| format!("{node} owns parts {part} and {at} under {epoch:?}"))
    }

    fn stand_by(&mut self, job: JobId, epoch: Epoch, part: PartId, node: NodeId) -> Option<String> {
        self.standbys.insert((job, part, node));
        let owner = self.owners.get(&(job, epoch))?.get(&part)?;
        (*owner == node).then(|| format!("{node} is listed as standby of part {part} and owns it under {epoch:?}"))
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker looks at few of many things")]
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

    // What a liar makes up says nothing, but that it lives.
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
                        (PartWork::Stage(_), Some(_)) => seen.stand_by(job, epoch, order.part, *to),
                        (PartWork::Stage(_), None) => seen.own(job, epoch, order.part, *to),
                    }
                }
                Ok(Message::ToParticipant { job, epoch, say: ToParticipant::Standby { part, node: Some(node) } }) => {
                    seen.stand_by(job, epoch, part, node)
                }
                _ => None,
            },
            Output::Notify(Event::Lost { node, .. }) if seen.heard.get(&(host, *node)) == Some(&at) => None,
            Output::Notify(Event::Lost { job, node, .. }) => {
                seen.lost.entry((host, *node)).or_default().insert(*job, at);
                None
            }
            // Others heard it: membership's word counts as well.
            Output::Notify(Event::PeerUp { node }) => {
                seen.lost.remove(&(host, *node));
                None
            }
            Output::Notify(Event::JobPlaced { job, epoch, placement, .. }) => {
                let (nodes, route): (Vec<NodeId>, bool) = match &**placement {
                    Placement::Stages(stages) => (stages.iter().map(|(node, _)| *node).collect(), true),
                    Placement::Tiles { tiles, .. } => (tiles.iter().map(|(node, _)| *node).collect(), false),
                };
                let mut parts = nodes.iter().zip(0..).filter(|_| route);
                let owned = parts.find_map(|(node, at)| seen.own(*job, *epoch, PartId(at), *node));
                let unfit = nodes.iter().find_map(|node| Some((*node, seen.unfit(at, host, *job, *node)?)));
                owned.or(unfit.map(|(node, why)| format!("places {epoch:?} on {node}, {why}")))
            }
            // A standby of its own sends itself no order.
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
        seen.lost.retain(|(head, _), _| *head != host);
        seen.banned.remove(&host);
        seen.owners_known.retain(|(of, ..), _| *of != host);
        seen.votes.retain(|(of, _), _| *of != host);
    }
}

/// A job leaves a banned node within this time: a plan, and weights for the node that replaces it.
const LET_GO: Duration = Duration::from_secs(5);
