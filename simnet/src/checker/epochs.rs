//! No work of an old epoch is accepted, epochs only grow, and no life of a node tells an epoch of an earlier one again.
use crate::faults::Fault;
use crate::host::HostId;
use crate::world::Observer;
use node_core::codec;
use node_core::id::{Epoch, JobId, LoadId};
use node_core::input::Input;
use node_core::message::Message;
use node_core::output::Output;
use node_core::time::Instant;
use std::cell::RefCell;
use std::collections::BTreeMap;
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
    /// How many times each host has died, and in which of its lives it told an epoch of its own.
    deaths: BTreeMap<HostId, u64>,
    told: BTreeMap<(HostId, JobId, Epoch), u64>,
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
        if let Input::Loaded { job, load, result: Ok(_) } = input
            && let Some((_, awaited, resident)) = self.seen.borrow_mut().stages.get_mut(&(host, *job))
        {
            *resident |= awaited == load;
        }
    }

    /// The generation goes with the disk. The clock takes its place, which counts seconds: what a life of the same second
    /// told is not held against the next.
    fn fault(&mut self, _at: Instant, fault: &Fault) {
        let lost = match fault {
            Fault::Restart { host, keep_disk: false } => std::slice::from_ref(host),
            Fault::Outage { hosts, keep_disk: false, .. } => hosts.as_slice(),
            _ => &[],
        };
        self.seen.borrow_mut().told.retain(|(host, ..), _| !lost.contains(host));
    }

    fn died(&mut self, _at: Instant, host: HostId) {
        self.forget(host);
        *self.seen.borrow_mut().deaths.entry(host).or_default() += 1;
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let mut seen = self.seen.borrow_mut();
        let wrong = match output {
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
                Some((held, ..)) if *held != header.epoch && header.part > 0 => {
                    Some(format!("sends a frame of {:?}, holds {held:?}", header.epoch))
                }
                _ => None,
            },
            Output::SendMessage { bytes, .. } => match codec::decode_message(bytes) {
                Ok(Message::Prepare { job, epoch, .. } | Message::Go { job, epoch, .. }) => {
                    let life = seen.deaths.get(&host).copied().unwrap_or(0);
                    let before = *seen.told.entry((host, job, epoch)).or_insert(life);
                    (before != life)
                        .then(|| format!("tells {epoch:?} of job {:x}, as an earlier life of it did", job.0))
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
