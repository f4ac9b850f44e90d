//! No frame of an old epoch is accepted: it is dropped when it is handled, never computed with and never forwarded.
use crate::host::HostId;
use crate::world::Observer;
use node_core::id::{Epoch, JobId, TensorId};
use node_core::input::Input;
use node_core::output::Output;
use node_core::time::Instant;
use node_core::work::{Payload, Task};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Watches frames on every host. Clones share what they saw.
#[derive(Clone, Default)]
pub struct Frames {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// The epoch of each job on each host.
    held: BTreeMap<(HostId, JobId), Epoch>,
    /// Frames that arrived under a lower epoch and are not dropped yet: the frame's epoch, and the host's.
    old: BTreeMap<(HostId, TensorId), (Epoch, Epoch)>,
    violations: Vec<String>,
}

impl Frames {
    /// All violations.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker handles few of many variants")]
impl Observer for Frames {
    fn input(&mut self, _at: Instant, host: HostId, input: &Input) {
        let mut seen = self.seen.borrow_mut();
        if let Input::Frame { header, tensor, .. } = input
            && let Some(&held) = seen.held.get(&(host, header.job))
            && header.epoch < held
        {
            seen.old.insert((host, *tensor), (header.epoch, held));
        }
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let mut seen = self.seen.borrow_mut();
        let used = |seen: &Seen, payload: &Payload| match payload {
            Payload::Tensor(tensor) => seen.old.get(&(host, *tensor)).copied(),
            Payload::Tensors(tensors) => tensors.iter().find_map(|tensor| seen.old.get(&(host, *tensor)).copied()),
            Payload::Tokens(_) => None,
        };
        let wrong = match output {
            Output::Load { job, epoch, .. } | Output::Continue { job, epoch, .. } => {
                seen.held.insert((host, *job), *epoch);
                None
            }
            Output::Unload { job } => {
                seen.held.remove(&(host, *job));
                None
            }
            Output::Discard { tensor } => {
                seen.old.remove(&(host, *tensor));
                None
            }
            Output::Split { tensor, .. } => used(&seen, &Payload::Tensor(*tensor)),
            Output::Run(run) => match &run.task {
                Task::Batch(items) => items.iter().find_map(|item| used(&seen, &item.input)),
                Task::Steps(steps) => {
                    steps.halos_in.iter().find_map(|(_, tensor)| used(&seen, &Payload::Tensor(*tensor)))
                }
            },
            Output::SendFrame { payload, .. } => used(&seen, payload),
            _ => None,
        };
        if let Some((came, held)) = wrong {
            let ms = at.0 / 1_000_000;
            seen.violations.push(format!("{ms} ms, host {}: uses a frame of {came:?}, holds {held:?}", host.0));
        }
    }

    /// Forged frames must be dropped as well.
    fn forged(&mut self, at: Instant, host: HostId, input: &Input) {
        self.input(at, host, input);
    }

    fn polled(&mut self, at: Instant, host: HostId) {
        let mut seen = self.seen.borrow_mut();
        while let Some((&(holder, tensor), &(came, held))) = seen.old.iter().find(|((holder, _), _)| *holder == host) {
            seen.old.remove(&(holder, tensor));
            let ms = at.0 / 1_000_000;
            seen.violations.push(format!("{ms} ms, host {}: keeps a frame of {came:?}, holds {held:?}", host.0));
        }
    }

    fn died(&mut self, _at: Instant, host: HostId) {
        let mut seen = self.seen.borrow_mut();
        seen.held.retain(|(holder, _), _| *holder != host);
        seen.old.retain(|(holder, _), _| *holder != host);
    }
}
