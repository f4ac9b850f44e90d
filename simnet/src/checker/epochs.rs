//! No work of an old epoch is accepted, epochs only grow, and no life of a node announces an epoch of an earlier one again.
use crate::faults::Fault;
use crate::host::HostId;
use crate::world::Observer;
use node_core::codec;
use node_core::id::{Epoch, JobId, LoadId, PartId};
use node_core::input::Input;
use node_core::message::{Message, ToParticipant};
use node_core::output::{Event, Output};
use node_core::time::Instant;
use node_core::work::Ending;
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
    /// The parts that each host loads or holds, their epochs, and the load that is awaited before a part is resident.
    parts: BTreeMap<(HostId, JobId, PartId), (Epoch, Option<LoadId>)>,
    /// Parts whose coordinator, on the same host, handed the job over: no successor has ordered them yet.
    left: BTreeSet<(HostId, JobId, PartId)>,
    /// The number of deaths of each host; and in which of its lives it announced an epoch of its own.
    deaths: BTreeMap<HostId, u64>,
    announced: BTreeMap<(HostId, JobId, Epoch), u64>,
    violations: Vec<String>,
}

impl Epochs {
    /// All violations.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }

    /// A process died: all its parts are lost.
    pub fn forget(&self, host: HostId) {
        self.seen.borrow_mut().parts.retain(|(holder, ..), _| *holder != host);
    }
}

impl Seen {
    /// A coordinator announces an epoch of its own.
    fn announce(&mut self, host: HostId, job: JobId, epoch: Epoch) -> Option<String> {
        let life = self.deaths.get(&host).copied().unwrap_or(0);
        let before = *self.announced.entry((host, job, epoch)).or_insert(life);
        (before != life).then(|| format!("announces {epoch:?} of job {:x}, as an earlier life of it did", job.0))
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker handles few of many variants")]
impl Observer for Epochs {
    fn input(&mut self, _at: Instant, host: HostId, input: &Input) {
        if let Input::Loaded { job, part, load, result: Ok(_) } = input
            && let Some((_, awaited)) = self.seen.borrow_mut().parts.get_mut(&(host, *job, *part))
        {
            awaited.take_if(|awaited| awaited == load);
        }
    }

    /// The generation is lost with the disk. The clock, which counts seconds, replaces it: a life of the same second may
    /// announce an epoch again.
    fn fault(&mut self, _at: Instant, fault: &Fault) {
        let lost = match fault {
            Fault::Restart { host, keep_disk: false } => std::slice::from_ref(host),
            Fault::Outage { hosts, keep_disk: false, .. } => hosts.as_slice(),
            _ => &[],
        };
        self.seen.borrow_mut().announced.retain(|(host, ..), _| !lost.contains(host));
    }

    fn died(&mut self, _at: Instant, host: HostId) {
        self.forget(host);
        *self.seen.borrow_mut().deaths.entry(host).or_default() += 1;
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let seen = &mut *self.seen.borrow_mut();
        let wrong = match output {
            Output::Load { job, epoch, load, order, replaces, .. } => {
                for part in replaces {
                    seen.parts.remove(&(host, *job, *part));
                }
                let before = seen.parts.insert((host, *job, order.part), (*epoch, Some(*load)));
                before.filter(|(held, _)| held >= epoch).map(|(held, _)| format!("loads {epoch:?} after {held:?}"))
            }
            Output::Continue { job, epoch, order } => match seen.parts.get_mut(&(host, *job, order.part)) {
                Some((held, _)) if *held > *epoch && !seen.left.contains(&(host, *job, order.part)) => {
                    Some(format!("keeps under {epoch:?} after {held:?}"))
                }
                Some((held, _)) => {
                    *held = *epoch;
                    seen.left.remove(&(host, *job, order.part));
                    None
                }
                None => Some(format!("keeps part {} of {epoch:?}, which it does not hold", order.part)),
            },
            Output::Restore { job, load, part, .. } => {
                if let Some((_, awaited)) = seen.parts.get_mut(&(host, *job, *part)) {
                    *awaited = Some(*load);
                }
                None
            }
            Output::Drop { job, part } => {
                seen.parts.remove(&(host, *job, *part));
                None
            }
            Output::Unload { job } => {
                seen.parts.retain(|(holder, of, _), _| (*holder, *of) != (host, *job));
                None
            }
            Output::Notify(Event::JobEnded { job, ending: Ending::Moved(_), .. }) => {
                // Its parts obey any epoch of the successor's, and standbys continue with what they have until the
                // successor orders them.
                let of = seen.parts.keys().filter(|(holder, of, _)| (*holder, *of) == (host, *job));
                let left: Vec<_> = of.copied().collect();
                seen.left.extend(left);
                None
            }
            Output::Run(run) => match seen.parts.get(&(host, run.job, run.part)) {
                Some((held, None)) if *held == run.epoch => None,
                Some((_, None)) if run.epoch.counter == 0 && seen.left.contains(&(host, run.job, run.part)) => None,
                other => Some(format!("computes under {:?}, holds {other:?}", run.epoch)),
            },
            Output::SendFrame { header, .. } => {
                let mut held = seen.parts.iter().filter(|((holder, job, _), _)| (*holder, *job) == (host, header.job));
                let outdated = held.all(|(_, (held, _))| *held != header.epoch);
                let holds = seen.parts.keys().any(|(holder, job, _)| (*holder, *job) == (host, header.job));
                (outdated && holds && header.part.0 > 0).then(|| format!("sends a frame of {:?}", header.epoch))
            }
            Output::SendMessage { bytes, .. } => match codec::decode_message(bytes) {
                Ok(Message::ToParticipant {
                    job,
                    epoch,
                    say: ToParticipant::Prepare(_) | ToParticipant::Go { .. },
                }) => seen.announce(host, job, epoch),
                _ => None,
            },
            _ => None,
        };
        if let Some(what) = wrong {
            seen.violations.push(format!("{} ms, host {}: {what}", at.0 / 1_000_000, host.0));
        }
    }
}
