//! No work of an old epoch is accepted, epochs only grow, and none is told before it is on disk.
use crate::host::HostId;
use crate::world::Observer;
use node_core::codec;
use node_core::id::{Epoch, JobId, LoadId};
use node_core::input::Input;
use node_core::message::Message;
use node_core::output::{Output, Record};
use node_core::time::Instant;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Watches placements on every host. Clones share what they saw.
#[derive(Clone, Default)]
pub struct Epochs {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// The stage each host loads or holds of a job, and whether it is resident.
    stages: BTreeMap<(HostId, JobId), (Epoch, LoadId, bool)>,
    /// Epoch records being written, and the epochs that are safe.
    writing: BTreeMap<(HostId, u64), (JobId, Epoch)>,
    safe: BTreeSet<(HostId, JobId, Epoch)>,
    violations: Vec<String>,
}

impl Epochs {
    /// What was seen that must not be.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }

    /// A process died: what it held is gone, and its next life begins anew.
    pub fn forget(&self, host: HostId) {
        self.seen.borrow_mut().stages.retain(|(holder, _), _| *holder != host);
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker looks at few of many things")]
impl Observer for Epochs {
    fn input(&mut self, _at: Instant, host: HostId, input: &Input) {
        let mut seen = self.seen.borrow_mut();
        match input {
            Input::Persisted { seq } => {
                if let Some((job, epoch)) = seen.writing.remove(&(host, *seq)) {
                    seen.safe.insert((host, job, epoch));
                }
            }
            Input::Loaded { job, load, result: Ok(_) } => {
                if let Some((_, awaited, resident)) = seen.stages.get_mut(&(host, *job)) {
                    *resident |= awaited == load;
                }
            }
            _ => {}
        }
    }

    fn died(&mut self, _at: Instant, host: HostId) {
        self.forget(host);
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let mut seen = self.seen.borrow_mut();
        let wrong = match output {
            Output::Persist { seq, record: Record::Epoch { job, epoch } } => {
                seen.writing.insert((host, *seq), (*job, *epoch));
                None
            }
            Output::Load { job, epoch, load, .. } | Output::Keep { job, epoch, load, .. } => {
                let before = seen.stages.insert((host, *job), (*epoch, *load, false));
                before.filter(|(held, ..)| held >= epoch).map(|(held, ..)| format!("loads {epoch:?} after {held:?}"))
            }
            Output::Unload { job } => {
                seen.stages.remove(&(host, *job));
                None
            }
            Output::Compute { job, epoch, .. } => match seen.stages.get(&(host, *job)) {
                Some((held, _, true)) if held == epoch => None,
                other => Some(format!("computes under {epoch:?}, holds {other:?}")),
            },
            Output::SendFrame { header, .. } => match seen.stages.get(&(host, header.job)) {
                Some((held, ..)) if *held != header.epoch && header.edge > 0 => {
                    Some(format!("sends a frame of {:?}, holds {held:?}", header.epoch))
                }
                _ => None,
            },
            Output::SendMessage { bytes, .. } => match codec::decode_message(bytes) {
                Ok(Message::Prepare { job, epoch, .. } | Message::Go { job, epoch, .. })
                    if !seen.safe.contains(&(host, job, epoch)) =>
                {
                    Some(format!("tells {epoch:?} before it is on disk"))
                }
                _ => None,
            },
            _ => None,
        };
        if let Some(what) = wrong {
            seen.violations.push(format!("{} ms, host {}: {what}", at.0 / 1_000_000, host.0));
        }
    }
}
