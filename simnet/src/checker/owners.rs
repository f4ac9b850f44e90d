//! One owner per shard and epoch, which is not a standby as well. A node that was reported lost gets no stage before it was heard
//! (of) again, and a banned node none at all.
use crate::host::HostId;
use crate::world::{Observer, World};
use node_core::codec;
use node_core::id::{Epoch, JobId, NodeId, PartId};
use node_core::input::Input;
use node_core::job::JobState;
use node_core::limits::EXCLUDED;
use node_core::message::{Message, ToParticipant};
use node_core::output::{Event, Output};
use node_core::time::{Duration, Instant};
use node_core::work::{PartWork, Placement};
use std::cell::RefCell;
use std::collections::BTreeMap;
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
    /// The list of banned nodes that a coordinator received, and when.
    banned: BTreeMap<HostId, (Instant, Vec<NodeId>)>,
    /// Who a head told lost and has not heard since.
    lost: BTreeMap<(HostId, NodeId), Instant>,
    violations: Vec<String>,
}

impl Owners {
    /// What was seen that must not be.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }

    /// Records a coordinator that still computes on a node some time after it received the ban.
    pub fn look(&self, world: &World, head: HostId) {
        let mut seen = self.seen.borrow_mut();
        let Some(node) = &world.host(head).node else { return };
        let Some((since, out)) = seen.banned.get(&head).filter(|(since, _)| *since + LET_GO < world.now()) else {
            return;
        };
        let ready = node.jobs().filter(|view| view.state == JobState::Running);
        let owners = ready.flat_map(|view| view.parts).map(|part| part.owner);
        let uses = owners.filter(|owner| out.contains(owner)).map(|owner| {
            format!(
                "{} ms, host {}: computes on {owner}, banned since {} ms",
                world.now().0 / 1_000_000,
                head.0,
                since.0 / 1_000_000
            )
        });
        if let Some(what) = uses.last() {
            seen.banned.remove(&head); // said once
            seen.violations.push(what);
        }
    }
}

impl Seen {
    fn own(&mut self, job: JobId, epoch: Epoch, part: PartId, node: NodeId) -> Option<String> {
        let owners = self.owners.entry((job, epoch)).or_default();
        let before = owners.insert(part, node).filter(|before| *before != node);
        if let Some(before) = before {
            return Some(format!("{node} and {before} own part {part} under {epoch:?}"));
        }
        let other = owners.iter().find(|(at, owner)| **at != part && **owner == node);
        other.map(|(at, _)| format!("{node} owns parts {part} and {at} under {epoch:?}"))
    }

    fn stand_by(&self, job: JobId, epoch: Epoch, part: PartId, node: NodeId) -> Option<String> {
        let owned = self.owners.get(&(job, epoch))?.iter().find(|(_, owner)| **owner == node);
        owned.map(|(at, _)| format!("{node} is listed as standby of part {part} and owns part {at} under {epoch:?}"))
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker looks at few of many things")]
impl Observer for Owners {
    fn input(&mut self, at: Instant, host: HostId, input: &Input) {
        if let Input::Banned(nodes) = input {
            self.seen.borrow_mut().banned.insert(host, (at, nodes.clone()));
        }
        let heard = match input {
            Input::Datagram { from, .. } | Input::Message { from, .. } | Input::Frame { from, .. } => from,
            Input::Connected { node, .. } => node,
            _ => return,
        };
        let mut seen = self.seen.borrow_mut();
        if !seen.lost.is_empty() {
            seen.lost.remove(&(host, *heard));
        }
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let mut seen = self.seen.borrow_mut();
        let wrong = match output {
            Output::SendMessage { to, bytes } => match codec::decode_message(bytes) {
                Ok(Message::ToParticipant { job, epoch, say: ToParticipant::Prepare(order) }) => {
                    match (&order.work, order.standby) {
                        (PartWork::Tile(_), _) => None,
                        (PartWork::Stage(_), Some(_)) => seen.stand_by(job, epoch, order.part, *to),
                        (PartWork::Stage(_), None) => seen.own(job, epoch, order.part, *to),
                    }
                }
                Ok(Message::ToParticipant { job, epoch, say: ToParticipant::Standby { part, node: Some(node) } }) => {
                    seen.stand_by(job, epoch, part, node)
                }
                _ => None,
            },
            Output::Notify(Event::Lost { node, .. }) => {
                seen.lost.insert((host, *node), at);
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
                let banned =
                    nodes.iter().find(|node| seen.banned.get(&host).is_some_and(|(_, out)| out.contains(node)));
                let banned = banned.map(|node| format!("places {epoch:?} on {node}, which is banned"));
                let lost = |node: &NodeId| seen.lost.get(&(host, *node)).is_some_and(|since| at < *since + EXCLUDED);
                let lost = nodes.into_iter().find(lost);
                owned
                    .or(banned)
                    .or(lost.map(|node| format!("places {epoch:?} on {node}, reported lost and not heard since")))
            }
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
    }
}

/// A job leaves a banned node within this time: a plan, and weights for the node that replaces it.
const LET_GO: Duration = Duration::from_secs(5);
