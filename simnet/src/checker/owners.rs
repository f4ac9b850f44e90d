//! One owner per shard and epoch; and who was told lost gets no stage before it was heard (of) again.
use crate::host::HostId;
use crate::world::Observer;
use node_core::id::{Epoch, JobId, NodeId};
use node_core::input::Input;
use node_core::limits::EXCLUDED;
use node_core::output::{Event, Output};
use node_core::time::Instant;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// Watches who is given what. Clones share what they saw.
#[derive(Clone, Default)]
pub struct Owners {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// Who was asked to load which layers of a job under an epoch.
    owners: BTreeMap<(JobId, Epoch), Vec<Owner>>,
    /// Who a head told lost and has not heard since.
    lost: BTreeMap<(HostId, NodeId), Instant>,
    violations: Vec<String>,
}

/// A host and its layers.
type Owner = (HostId, Range<u32>);

impl Owners {
    /// What was seen that must not be.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }
}

impl Seen {
    fn own(&mut self, host: HostId, job: JobId, epoch: Epoch, layers: &Range<u32>) -> Option<String> {
        let owners = self.owners.entry((job, epoch)).or_default();
        let overlaps = |other: &Range<u32>| other.start < layers.end && layers.start < other.end;
        let other = owners.iter().find(|(owner, held)| *owner != host && overlaps(held));
        let wrong = other.map(|(owner, held)| {
            format!("loads layers {layers:?} under {epoch:?}, host {} holds {held:?} of them", owner.0)
        });
        owners.push((host, layers.clone()));
        wrong
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker looks at few of many things")]
impl Observer for Owners {
    fn input(&mut self, _at: Instant, host: HostId, input: &Input) {
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
            Output::Load { job, epoch, stage } => seen.own(host, *job, *epoch, &stage.layers),
            Output::Notify(Event::Lost { node, .. }) => {
                seen.lost.insert((host, *node), at);
                None
            }
            // Others heard it: membership's word counts as well.
            Output::Notify(Event::PeerUp { node }) => {
                seen.lost.remove(&(host, *node));
                None
            }
            Output::Notify(Event::JobPlaced { epoch, plan, .. }) => {
                let nodes = plan.stages().iter().map(|stage| NodeId::from(stage.device));
                let lost = |node: &NodeId| seen.lost.get(&(host, *node)).is_some_and(|since| at < *since + EXCLUDED);
                let wrong: Vec<NodeId> = nodes.filter(lost).collect();
                (!wrong.is_empty()).then(|| format!("places {epoch:?} on {wrong:?}, told lost and not heard since"))
            }
            _ => None,
        };
        if let Some(what) = wrong {
            seen.violations.push(format!("{} ms, host {}: {what}", at.0 / 1_000_000, host.0));
        }
    }

    fn died(&mut self, _at: Instant, host: HostId) {
        self.seen.borrow_mut().lost.retain(|(head, _), _| *head != host);
    }
}
