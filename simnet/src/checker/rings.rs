//! A stage's replay ring holds everything that the stage may have to resend: from the lowest position that its successors,
//! the next owner and its standby, reported.
//!
//! Checked when a stage reports its ring to its coordinator, on a new placement. Cases must be small enough that no ring is
//! full.
use crate::host::HostId;
use crate::world::Observer;
use node_core::codec;
use node_core::id::{JobId, NodeId, PartId, RequestId};
use node_core::input::Input;
use node_core::message::{Message, ToCoordinator, ToParticipant, ToStage};
use node_core::output::{Event, Output};
use node_core::time::Instant;
use node_core::work::serve::Position;
use node_core::work::{Cursors, PartState, PartWork, Placement};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Watches the rings of stages. Clones share what they saw.
#[derive(Clone, Default)]
pub struct Rings {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// The parts that a node owns or is the standby of, in its coordinator's last orders.
    part_of: BTreeMap<(JobId, NodeId), BTreeSet<PartId>>,
    /// The stages of each host, and the positions that successors reported since the stage was placed.
    stages: BTreeMap<(HostId, JobId, PartId), Successors>,
    /// Requests that rest at a host: it keeps no rows of them.
    resting: BTreeSet<(HostId, JobId, RequestId)>,
    /// Positions at which requests began at a host, because they continue others: it computed no rows before them.
    begun: BTreeMap<(HostId, JobId, RequestId), u32>,
    violations: Vec<String>,
}

/// The positions that nodes reported for each request.
type Successors = BTreeMap<NodeId, BTreeMap<RequestId, u32>>;

impl Rings {
    /// All violations.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }
}

impl Seen {
    fn hear(&mut self, host: HostId, from: NodeId, (job, part, to): (JobId, PartId, PartId), held: Vec<(u64, u32)>) {
        let holds = self.part_of.get(&(job, from)).is_some_and(|parts| parts.contains(&part));
        if let Some(stage) = self.stages.get_mut(&(host, job, to)).filter(|_| holds && to.after() == part) {
            stage.insert(from, held.into_iter().map(|(request, have)| (RequestId(request), have)).collect());
        }
    }

    /// A stage is placed again and reports its ring; from then on it may have other successors.
    fn keeps(&mut self, host: HostId, job: JobId, part: PartId, positions: &[Position]) -> Option<String> {
        let held = std::mem::take(self.stages.get_mut(&(host, job, part))?);
        let resting = |position: &&Position| self.resting.contains(&(host, job, position.request));
        for position in positions.iter().filter(|position| !resting(position)) {
            let said = held.iter().filter_map(|(node, held)| Some((held.get(&position.request)?, node)));
            let begun = self.begun.get(&(host, job, position.request)).copied().unwrap_or(0);
            if let Some((&have, node)) = said.min().filter(|(have, _)| (**have).max(begun) < position.kept_from) {
                let (request, from) = (position.request.0, position.kept_from);
                return Some(format!("keeps request {request} from {from} on, {node} holds only {have} positions"));
            }
        }
        None
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker handles few of many variants")]
impl Observer for Rings {
    fn input(&mut self, _at: Instant, host: HostId, input: &Input) {
        let Input::Message { from, bytes } = input else { return };
        let Ok(Message::ToParticipant { job, say, .. }) = codec::decode_message(bytes) else { return };
        match say {
            ToParticipant::Held { part, to, cursors: Cursors::Each(held), .. } => {
                self.seen.borrow_mut().hear(host, *from, (job, part, to), held);
            }
            ToParticipant::Stage(ToStage::Rest { request, .. }) => {
                self.seen.borrow_mut().resting.insert((host, job, request));
            }
            _ => {}
        }
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let mut seen = self.seen.borrow_mut();
        let wrong = match output {
            Output::Load { job, order, replaces, .. } => {
                replaces.iter().for_each(|part| drop(seen.stages.remove(&(host, *job, *part))));
                if matches!(order.work, PartWork::Stage(_)) {
                    seen.stages.insert((host, *job, order.part), Successors::new());
                }
                None
            }
            Output::Fork { job, to, positions, .. } => {
                seen.begun.insert((host, *job, *to), *positions);
                None
            }
            Output::Drop { job, part } => {
                seen.stages.remove(&(host, *job, *part));
                None
            }
            Output::Unload { job } => {
                seen.stages.retain(|(holder, of, _), _| (*holder, *of) != (host, *job));
                None
            }
            Output::Notify(Event::JobPlaced { job, placement, .. }) => {
                if let Placement::Stages(stages) = &**placement {
                    seen.part_of.retain(|(of, _), _| of != job);
                    for (at, (device, _)) in stages.iter().enumerate() {
                        seen.part_of.entry((*job, (*device).into())).or_default().insert(PartId::of(at));
                    }
                }
                None
            }
            Output::SendMessage { to, bytes } => match codec::decode_message(bytes) {
                Ok(Message::ToParticipant { job, say: ToParticipant::Prepare(order), .. }) => {
                    seen.part_of.entry((job, *to)).or_default().insert(order.part);
                    None
                }
                // What the coordinator says to its own stage is no message.
                Ok(Message::ToParticipant {
                    job, say: ToParticipant::Stage(ToStage::Rest { request, .. }), ..
                }) => {
                    seen.resting.insert((host, job, request));
                    None
                }
                Ok(Message::ToCoordinator {
                    job, say: ToCoordinator::Prepared { part, result: Ok(ready) }, ..
                }) => match &ready.has {
                    PartState::Stage(positions) => seen.keeps(host, job, part, positions),
                    PartState::Tile { .. } => None,
                },
                _ => None,
            },
            _ => None,
        };
        if let Some(what) = wrong {
            seen.violations.push(format!("{} ms, host {}: {what}", at.0 / 1_000_000, host.0));
        }
    }

    fn died(&mut self, _at: Instant, host: HostId) {
        self.seen.borrow_mut().stages.retain(|(holder, ..), _| *holder != host);
    }
}
