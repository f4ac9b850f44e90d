//! Which parts of jobs this node is to hold, and the memory that they take: the mesh plans with what is left of it.
use crate::config::Size;
use node_core::config::Capacity;
use node_core::id::{JobId, LoadId, PartId};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// Names a part at this node.
pub type Key = (JobId, PartId);

/// The parts of one node, shared by the thread that decides, the tasks that load and the device thread.
pub struct Residency {
    capacity: Capacity,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What the core wants held.
    wanted: BTreeMap<Key, Wanted>,
    /// Bytes of the parts that the device thread holds, which may be a step behind.
    resident: BTreeMap<Key, u64>,
}

struct Wanted {
    load: LoadId,
    bytes_max: u64,
    /// Bytes of the parts that this one replaces: they are not offered between the old parts' end and the new part's load.
    replaced: u64,
}

impl Residency {
    /// Nothing is held; all of `capacity` is there to be used.
    pub fn new(capacity: Capacity) -> Self {
        Self { capacity, state: Mutex::default() }
    }

    /// A part is to be loaded and may take `bytes_max`; parts of its job that it `replaces` are not wanted any more.
    ///
    /// # Errors
    /// There is no room for it beside the other parts here: two coordinators planned with the same free memory.
    pub fn begin(&self, key: Key, load: LoadId, bytes_max: u64, replaces: &[PartId]) -> Result<(), String> {
        let mut state = self.lock();
        let mut replaced = 0;
        for part in replaces.iter().copied().filter(|part| *part != key.1).chain([key.1]) {
            replaced += state.wanted.remove(&(key.0, part)).map_or(0, |wanted| wanted.replaced);
            replaced += state.resident.remove(&(key.0, part)).unwrap_or(0);
        }
        let of = |(other, wanted): (&Key, &Wanted)| state.resident.get(other).copied().unwrap_or(wanted.bytes_max);
        let taken: u64 = state.wanted.iter().map(of).sum();
        let total = self.capacity.memory_total;
        if taken.saturating_add(bytes_max) > total {
            return Err(format!(
                "no room for a part of {}: this node offers {}, other parts here take {}",
                Size(bytes_max),
                Size(total),
                Size(taken)
            ));
        }
        state.wanted.insert(key, Wanted { load, bytes_max, replaced });
        Ok(())
    }

    /// A part can be handed to the device thread: `hand_over` does that, if the part is still wanted. Nothing can come between the two.
    pub fn install(&self, key: Key, load: LoadId, hand_over: impl FnOnce()) -> bool {
        let state = self.lock();
        let wanted = state.wanted.get(&key).is_some_and(|wanted| wanted.load == load);
        if wanted {
            hand_over();
        }
        wanted
    }

    /// A part could not be loaded: `drop_it` notifies the device thread, if the part is still wanted. Returns whether it is, and what
    /// the node offers from now on, where that changes.
    pub fn fail(&self, key: Key, load: LoadId, drop_it: impl FnOnce()) -> (bool, Option<Capacity>) {
        let mut state = self.lock();
        if state.wanted.get(&key).is_none_or(|wanted| wanted.load != load) {
            return (false, None);
        }
        let freed = state.wanted.remove(&key).is_some_and(|wanted| wanted.replaced > 0);
        drop_it();
        (true, freed.then(|| self.offered(&state)))
    }

    /// A part is not wanted any more: `drop_it` notifies the device thread. A load that ends later is dropped. Returns what the node
    /// offers from now on, where that changes before that drops the part.
    pub fn end(&self, key: Key, drop_it: impl FnOnce()) -> Option<Capacity> {
        let mut state = self.lock();
        let freed = state.wanted.remove(&key).is_some_and(|wanted| wanted.replaced > 0);
        drop_it();
        freed.then(|| self.offered(&state))
    }

    /// No part of a job is wanted any more: `drop_them` notifies the device thread. Otherwise as [`Self::end`].
    pub fn end_job(&self, job: JobId, drop_them: impl FnOnce()) -> Option<Capacity> {
        let mut state = self.lock();
        let freed = state.wanted.iter().any(|((of, _), wanted)| *of == job && wanted.replaced > 0);
        state.wanted.retain(|(of, _), _| *of != job);
        drop_them();
        freed.then(|| self.offered(&state))
    }

    /// Whether a part of a job is wanted.
    pub fn wants(&self, job: JobId) -> bool {
        self.lock().wanted.keys().any(|(of, _)| *of == job)
    }

    /// The device thread holds a part of this number of bytes now, or none; returns what the node offers from now on.
    pub fn resident(&self, key: Key, bytes: Option<u64>) -> Capacity {
        let mut state = self.lock();
        match bytes {
            Some(bytes) => {
                state.resident.insert(key, bytes);
                if let Some(wanted) = state.wanted.get_mut(&key) {
                    wanted.replaced = 0;
                }
            }
            None => drop(state.resident.remove(&key)),
        }
        self.offered(&state)
    }

    /// What the node offers now.
    pub fn capacity(&self) -> Capacity {
        self.offered(&self.lock())
    }

    fn offered(&self, state: &State) -> Capacity {
        let replaced: u64 = state.wanted.values().map(|wanted| wanted.replaced).sum();
        let taken = state.resident.values().sum::<u64>().saturating_add(replaced);
        Capacity { memory_free: self.capacity.memory_total.saturating_sub(taken), ..self.capacity.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const FIRST: Key = (JobId(1), PartId(0));
    const SECOND: Key = (JobId(2), PartId(0));

    fn residency(total: u64) -> Residency {
        Residency::new(Capacity {
            machine: 0,
            zone: String::new(),
            device: "cpu".into(),
            memory_total: total,
            memory_free: total,
            bytes_per_second: 1,
            flops_per_second: 1,
            copy_bytes_per_second: 1,
            step_ns: 1,
            layer_ns: 1,
            cache_bytes_per_second: 1,
            numerics: 1,
            pass_steps: 1,
        })
    }

    #[test]
    fn what_is_held_is_not_offered_twice() {
        let node = residency(100);
        node.begin(FIRST, LoadId(1), 60, &[]).unwrap();
        let refused = node.begin(SECOND, LoadId(1), 50, &[]).unwrap_err();
        assert!(refused.contains("60 B") && refused.contains("100 B"), "{refused}");
        assert_eq!(node.resident(FIRST, Some(40)).memory_free, 60);
        node.begin(SECOND, LoadId(1), 50, &[]).unwrap();
        node.begin(FIRST, LoadId(2), 50, &[PartId(0)]).expect("a part takes the place of the same job's");
        assert_eq!(node.resident(FIRST, None).memory_free, 60, "what is replaced counts until the new part is loaded");
        assert_eq!(node.resident(FIRST, Some(50)).memory_free, 50);
        node.end(FIRST, || {});
        node.fail(SECOND, LoadId(1), || {});
        assert_eq!(node.resident(FIRST, None).memory_free, 100);
        node.begin((JobId(3), PartId(0)), LoadId(1), 100, &[]).expect("everything is free again");
    }

    #[test]
    fn parts_of_one_job_are_counted_each_and_what_is_replaced_only_once() {
        let node = residency(100);
        let part = |part| (JobId(1), PartId(part));
        for number in [0, 1] {
            node.begin(part(number), LoadId(number.into()), 40, &[]).unwrap();
            node.resident(part(number), Some(40));
        }
        node.begin(part(2), LoadId(2), 40, &[]).expect_err("both parts stay");
        node.begin(part(2), LoadId(2), 90, &[PartId(0), PartId(1)]).expect("both parts are replaced");
        assert_eq!(node.capacity().memory_free, 20);
        // Another order, before that load ends.
        node.begin(part(3), LoadId(3), 50, &[PartId(2)]).unwrap();
        assert_eq!(node.capacity().memory_free, 20);
        assert!(!node.install(part(2), LoadId(2), || panic!("it is not wanted any more")));
        assert!(node.install(part(3), LoadId(3), || {}));
        assert_eq!(node.resident(part(3), Some(50)).memory_free, 50);
        node.begin(part(4), LoadId(4), 50, &[PartId(3)]).unwrap();
        let (wanted, offered) = node.fail(part(4), LoadId(4), || {});
        assert_eq!((wanted, offered.map(|now| now.memory_free)), (true, Some(100)));
        assert!(!node.wants(JobId(1)));
    }

    #[test]
    fn a_load_that_ends_after_its_job_is_dropped() {
        let node = residency(100);
        let installed = Cell::new(0);
        let count = || installed.set(installed.get() + 1);
        node.begin(FIRST, LoadId(1), 10, &[]).unwrap();
        node.begin(FIRST, LoadId(2), 10, &[PartId(0)]).unwrap();
        node.install(FIRST, LoadId(1), count);
        assert_eq!(installed.get(), 0, "a later order is wanted");
        node.install(FIRST, LoadId(2), count);
        assert_eq!(installed.get(), 1);
        node.end_job(JobId(1), || {});
        node.install(FIRST, LoadId(2), count);
        assert_eq!(installed.get(), 1, "it is not wanted any more");
    }
}
