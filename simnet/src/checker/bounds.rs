//! Resource bounds: one batch per stage and one run per tile in flight, bounded batches and chunks, and no leaked tensor.
use crate::host::HostId;
use crate::world::{Observer, World};
use node_core::id::{Epoch, JobId, PartId, RequestId, TensorId, WorkId};
use node_core::input::Input;
use node_core::job::ProgramView;
use node_core::limits::{CHUNK_POSITIONS_MAX, SEQUENCES_MAX};
use node_core::output::Output;
use node_core::time::Instant;
use node_core::work::{Run, Task};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Watches batches and runs on every host. Clones share what they saw.
#[derive(Clone, Default)]
pub struct Bounds {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    running: BTreeMap<(HostId, JobId, PartId, Epoch), WorkId>,
    tiles: BTreeMap<(HostId, JobId, PartId), WorkId>,
    violations: Vec<String>,
}

impl Bounds {
    /// All violations.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }

    /// A process died: its batches never complete.
    pub fn forget(&self, host: HostId) {
        let mut seen = self.seen.borrow_mut();
        seen.running.retain(|(holder, ..), _| *holder != host);
        seen.tiles.retain(|(holder, ..), _| *holder != host);
    }
}

impl Observer for Bounds {
    fn input(&mut self, _at: Instant, host: HostId, input: &Input) {
        if let Input::Ran { work, .. } = input {
            let mut seen = self.seen.borrow_mut();
            seen.running.retain(|(holder, ..), running| *holder != host || running != work);
            seen.tiles.retain(|(holder, ..), running| *holder != host || running != work);
        }
    }

    fn died(&mut self, _at: Instant, host: HostId) {
        self.forget(host);
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let mut seen = self.seen.borrow_mut();
        if let Output::Unload { job } = output {
            // The result of its batch is dropped; a stage loaded later may run one of its own.
            seen.running.retain(|(holder, of, ..), _| (*holder, *of) != (host, *job));
            seen.tiles.retain(|(holder, of, _), _| (*holder, *of) != (host, *job));
        }
        if let Output::Drop { job, part } = output {
            seen.running.retain(|(holder, of, number, _), _| (*holder, *of, *number) != (host, *job, *part));
            seen.tiles.remove(&(host, *job, *part));
        }
        if let Output::Load { job, replaces, .. } = output {
            seen.running
                .retain(|(holder, of, number, _), _| (*holder, *of) != (host, *job) || !replaces.contains(number));
        }
        let Output::Run(run) = output else { return };
        let Run { work, job, part, epoch, device: _, task } = &**run;
        let Task::Batch(items) = task else {
            if let Some(running) = seen.tiles.insert((host, *job, *part), *work) {
                let ms = at.0 / 1_000_000;
                seen.violations
                    .push(format!("{ms} ms, host {}: {work:?} of tile {part} while {running:?} runs", host.0));
            }
            return;
        };
        let mut wrong = Vec::new();
        if let Some(running) = seen.running.insert((host, *job, *part, *epoch), *work) {
            wrong.push(format!("{work:?} while {running:?} runs"));
        }
        if items.is_empty() || items.len() > SEQUENCES_MAX as usize {
            wrong.push(format!("a batch of {} items", items.len()));
        }
        let rows: u32 = items.iter().map(|item| item.count).sum();
        if rows > CHUNK_POSITIONS_MAX {
            wrong.push(format!("a batch of {rows} rows"));
        }
        let texts = wrong.into_iter().map(|what| format!("{} ms, host {}: {what}", at.0 / 1_000_000, host.0));
        seen.violations.extend(texts);
    }
}

/// Tensors and caches that live hosts hold in an idle mesh, without the caches of resting requests.
pub fn leaks(world: &World) -> Vec<String> {
    let live = || world.hosts().filter(|host| host.runs());
    let views = live().filter_map(|host| host.node.as_ref()).flat_map(|node| node.jobs());
    let resting: BTreeSet<RequestId> = views
        .flat_map(|view| match view.program {
            ProgramView::Serve { resting, .. } => resting,
            ProgramView::Steps { .. } => Vec::new(),
        })
        .collect();
    live()
        .filter_map(|host| {
            let caches: Vec<u64> = host
                .executor
                .caches_held()
                .filter(|request| !resting.contains(request))
                .map(|request| request.0)
                .collect();
            let tensors = host.executor.tensors_held();
            let made = host.executor.tensor_ids().filter(|tensor| matches!(tensor, TensorId::Produced(_))).count();
            (tensors + caches.len() > 0).then(|| {
                let arrived = tensors - made;
                let host = host.id.0;
                format!("host {host} holds {made} computed tensors, {arrived} received tensors, caches of {caches:?}")
            })
        })
        .collect()
}
