//! Which stages this node is to hold, and the memory that they take: the mesh plans with what is left of it.
use crate::config::Size;
use node_core::config::Capacity;
use node_core::id::{JobId, LoadId};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// The stages of one node, shared by the thread that decides, the tasks that load and the thread that computes.
pub struct Residency {
    capacity: Capacity,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What the core wants held.
    wanted: BTreeMap<JobId, Wanted>,
    /// Bytes of the stages that the executor holds, which may be a step behind.
    resident: BTreeMap<JobId, u64>,
}

struct Wanted {
    load: LoadId,
    bytes_max: u64,
}

impl Residency {
    /// Nothing is held; all of `capacity` is there to be used.
    pub fn new(capacity: Capacity) -> Self {
        Self { capacity, state: Mutex::default() }
    }

    /// A stage is to be loaded and may take `bytes_max`.
    ///
    /// # Errors
    /// There is no room for it beside what other jobs hold here: two heads planned with the same free memory.
    pub fn begin(&self, job: JobId, load: LoadId, bytes_max: u64) -> Result<(), String> {
        let mut state = self.lock();
        let others = state.wanted.iter().filter(|(other, _)| **other != job);
        let taken: u64 = others.map(|(other, w)| state.resident.get(other).copied().unwrap_or(w.bytes_max)).sum();
        let total = self.capacity.memory_total;
        if taken.saturating_add(bytes_max) > total {
            return Err(format!(
                "no room for a stage of {}: this node offers {}, other jobs here take {}",
                Size(bytes_max),
                Size(total),
                Size(taken)
            ));
        }
        state.wanted.insert(job, Wanted { load, bytes_max });
        Ok(())
    }

    /// The stage that is held is asked for anew as it is: `tell` passes that on. A load under way for an earlier order is
    /// dropped when it ends.
    pub fn keep(&self, job: JobId, load: LoadId, bytes_max: u64, tell: impl FnOnce()) {
        self.lock().wanted.insert(job, Wanted { load, bytes_max });
        tell();
    }

    /// Bytes of a job's stage, as the executor said last.
    pub fn held(&self, job: JobId) -> Option<u64> {
        self.lock().resident.get(&job).copied()
    }

    /// A stage is loaded: `hand_over` gives it to the executor, if it is still wanted. Nothing can come between the two.
    pub fn install(&self, job: JobId, load: LoadId, hand_over: impl FnOnce()) {
        let state = self.lock();
        if state.wanted.get(&job).is_some_and(|w| w.load == load) {
            hand_over();
        }
    }

    /// A stage could not be loaded, nor is what was held before of any use: `drop_it` tells the executor.
    pub fn fail(&self, job: JobId, load: LoadId, drop_it: impl FnOnce()) {
        let mut state = self.lock();
        if state.wanted.get(&job).is_some_and(|w| w.load == load) {
            state.wanted.remove(&job);
            drop_it();
        }
    }

    /// A stage is not wanted any more: `drop_it` tells the executor. A load that ends later is dropped.
    pub fn end(&self, job: JobId, drop_it: impl FnOnce()) {
        let mut state = self.lock();
        state.wanted.remove(&job);
        drop_it();
    }

    /// The executor holds a stage of so many bytes now, or none; returns what the node offers from now on.
    pub fn resident(&self, job: JobId, bytes: Option<u64>) -> Capacity {
        let mut state = self.lock();
        match bytes {
            Some(bytes) => state.resident.insert(job, bytes),
            None => state.resident.remove(&job),
        };
        let taken: u64 = state.resident.values().sum();
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

    fn residency(total: u64) -> Residency {
        Residency::new(Capacity {
            machine: 0,
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
        node.begin(JobId(1), LoadId(1), 60).unwrap();
        let refused = node.begin(JobId(2), LoadId(1), 50).unwrap_err();
        assert!(refused.contains("60 B") && refused.contains("100 B"), "{refused}");
        assert_eq!(node.resident(JobId(1), Some(40)).memory_free, 60);
        node.begin(JobId(2), LoadId(1), 50).unwrap();
        node.begin(JobId(1), LoadId(2), 50).expect("a stage takes the place of the same job's");
        assert_eq!(node.resident(JobId(1), None).memory_free, 100);
        node.end(JobId(1), || {});
        node.fail(JobId(2), LoadId(1), || {});
        node.begin(JobId(3), LoadId(1), 100).expect("everything is free again");
    }

    #[test]
    fn a_load_that_ends_after_its_job_is_dropped() {
        let node = residency(100);
        let installed = Cell::new(0);
        let count = || installed.set(installed.get() + 1);
        node.begin(JobId(1), LoadId(1), 10).unwrap();
        node.begin(JobId(1), LoadId(2), 10).unwrap();
        node.install(JobId(1), LoadId(1), count);
        assert_eq!(installed.get(), 0, "a later order is wanted");
        node.install(JobId(1), LoadId(2), count);
        assert_eq!(installed.get(), 1);
        node.end(JobId(1), || {});
        node.install(JobId(1), LoadId(2), count);
        assert_eq!(installed.get(), 1, "nobody wants it");
    }
}
