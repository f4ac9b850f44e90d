//! What a stage may still be asked for is still in its ring: everything from the least of what its successors, the next
//! owner and its standby, said they hold.
//!
//! Looked at where a stage tells its head what it keeps: when it is placed anew. Worlds must be small enough for no ring
//! to be full.
use crate::host::HostId;
use crate::world::Observer;
use node_core::codec;
use node_core::id::{JobId, NodeId, RequestId};
use node_core::input::Input;
use node_core::message::Message;
use node_core::output::{Event, Output};
use node_core::time::Instant;
use node_core::work::serve::Position;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Watches what stages keep. Clones share what they saw.
#[derive(Clone, Default)]
pub struct Rings {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// Which stage a node owns or stands by for, as its head said last.
    stage_of: BTreeMap<(JobId, NodeId), u16>,
    /// The stage each host holds.
    stages: BTreeMap<(HostId, JobId), Stage>,
    violations: Vec<String>,
}

#[derive(Default)]
struct Stage {
    /// Which one; known from its load on.
    stage: u16,
    /// What successors said they hold since it was placed last.
    held: BTreeMap<NodeId, BTreeMap<RequestId, u32>>,
}

impl Rings {
    /// What was seen that must not be.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }
}

impl Seen {
    fn hear(&mut self, host: HostId, from: NodeId, job: JobId, held: Vec<(RequestId, u32)>) {
        let Some(&theirs) = self.stage_of.get(&(job, from)) else { return };
        if let Some(stage) = self.stages.get_mut(&(host, job)).filter(|stage| stage.stage + 1 == theirs) {
            stage.held.insert(from, held.into_iter().collect());
        }
    }

    /// It is placed anew and says what it keeps; from now on other successors may count.
    fn keeps(&mut self, host: HostId, job: JobId, positions: &[Position]) -> Option<String> {
        let held = std::mem::take(&mut self.stages.get_mut(&(host, job))?.held);
        for position in positions {
            let said = held.iter().filter_map(|(node, held)| Some((held.get(&position.request)?, node)));
            if let Some((&have, node)) = said.min().filter(|(have, _)| **have < position.kept_from) {
                let (request, from) = (position.request.0, position.kept_from);
                return Some(format!("keeps request {request} from {from} on, {node} holds only {have} positions"));
            }
        }
        None
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker looks at few of many things")]
impl Observer for Rings {
    fn input(&mut self, _at: Instant, host: HostId, input: &Input) {
        if let Input::Message { from, bytes } = input
            && let Ok(Message::Held { job, held, .. }) = codec::decode_message(bytes)
        {
            self.seen.borrow_mut().hear(host, *from, job, held);
        }
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let mut seen = self.seen.borrow_mut();
        let wrong = match output {
            Output::Load { job, stage, .. } => {
                seen.stages.insert((host, *job), Stage { stage: stage.stage, ..Stage::default() });
                None
            }
            Output::Unload { job } => {
                seen.stages.remove(&(host, *job));
                None
            }
            Output::Notify(Event::JobPlaced { job, plan, .. }) => {
                let owners = plan.stages().iter().zip(0..);
                seen.stage_of.extend(owners.map(|(stage, at)| ((*job, stage.device.into()), at)));
                None
            }
            Output::SendMessage { to, bytes } => match codec::decode_message(bytes) {
                Ok(Message::Prepare { job, prepare, .. }) => {
                    seen.stage_of.insert((job, *to), prepare.stage);
                    None
                }
                Ok(Message::Prepared { job, result: Ok(_), held, .. }) => seen.keeps(host, job, &held),
                _ => None,
            },
            _ => None,
        };
        if let Some(what) = wrong {
            seen.violations.push(format!("{} ms, host {}: {what}", at.0 / 1_000_000, host.0));
        }
    }

    fn died(&mut self, _at: Instant, host: HostId) {
        self.seen.borrow_mut().stages.retain(|(holder, _), _| *holder != host);
    }
}
