//! The parts this node is ordered to hold, and their memory: the node advertises what is left for new plans.
use crate::config::Size;
use node_core::config::Capacity;
use node_core::id::{JobId, LoadId, PartId};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;

/// Identifies a part on this node.
pub(crate) type Key = (JobId, PartId);

/// The parts of one node, shared by the driver thread, the loading tasks and the device thread.
pub(crate) struct Residency {
    capacity: Capacity,
    state: Mutex<Residents>,
}

#[derive(Default)]
struct Residents {
    /// Parts that the core has ordered.
    requested: BTreeMap<Key, Requested>,
    /// Bytes of the parts on the device thread; may lag behind the orders.
    resident: BTreeMap<Key, u64>,
}

struct Requested {
    load: LoadId,
    bytes_max: u64,
    /// Bytes of the parts that this one replaces: not offered until the new part is loaded.
    replaced: u64,
}

impl Residency {
    /// An empty node that offers all of `capacity`.
    pub(crate) fn new(capacity: Capacity) -> Self {
        Self { capacity, state: Mutex::default() }
    }

    /// Orders a part that may take `bytes_max`; it supersedes the parts of its job in `replaces`.
    ///
    /// # Errors
    /// It does not fit beside the other parts here: two coordinators planned with the same free memory.
    pub(crate) fn begin(&self, key: Key, load: LoadId, bytes_max: u64, replaces: &[PartId]) -> Result<(), String> {
        let mut state = self.lock();
        let mut replaced = 0;
        for part in replaces.iter().copied().filter(|part| *part != key.1).chain([key.1]) {
            replaced += state.requested.remove(&(key.0, part)).map_or(0, |requested| requested.replaced);
            replaced += state.resident.remove(&(key.0, part)).unwrap_or(0);
        }
        let of =
            |(other, requested): (&Key, &Requested)| state.resident.get(other).copied().unwrap_or(requested.bytes_max);
        let taken: u64 = state.requested.iter().map(of).sum();
        let total = self.capacity.memory_total;
        if taken.saturating_add(bytes_max) > total {
            return Err(format!(
                "no room for a part of {}: this node offers {}, other parts take {}",
                Size(bytes_max),
                Size(total),
                Size(taken)
            ));
        }
        state.requested.insert(key, Requested { load, bytes_max, replaced });
        Ok(())
    }

    /// Calls `hand_over`, which sends the loaded part to the device thread, if the order is current. Atomic: no other
    /// order can intervene. Returns whether the order is current.
    pub(crate) fn install(&self, key: Key, load: LoadId, hand_over: impl FnOnce()) -> bool {
        let state = self.lock();
        let requested = state.requested.get(&key).is_some_and(|requested| requested.load == load);
        if requested {
            hand_over();
        }
        requested
    }

    /// Removes a part that failed to load, and calls `drop_it`, which notifies the device thread, if the order is
    /// current. Returns whether it is, and the capacity to advertise if that changed.
    pub(crate) fn fail(&self, key: Key, load: LoadId, drop_it: impl FnOnce()) -> (bool, Option<Capacity>) {
        let mut state = self.lock();
        if state.requested.get(&key).is_none_or(|requested| requested.load != load) {
            return (false, None);
        }
        let freed = state.requested.remove(&key).is_some_and(|requested| requested.replaced > 0);
        drop_it();
        (true, freed.then(|| self.offered(&state)))
    }

    /// Removes a part and calls `drop_it`, which notifies the device thread. A load that completes later is dropped.
    /// Returns the capacity to advertise, if it changes before the device thread drops the part.
    pub(crate) fn end(&self, key: Key, drop_it: impl FnOnce()) -> Option<Capacity> {
        let mut state = self.lock();
        let freed = state.requested.remove(&key).is_some_and(|requested| requested.replaced > 0);
        drop_it();
        freed.then(|| self.offered(&state))
    }

    /// Removes all parts of a job and calls `drop_them`, which notifies the device thread. Otherwise like
    /// [`Self::end`].
    pub(crate) fn end_job(&self, job: JobId, drop_them: impl FnOnce()) -> Option<Capacity> {
        let mut state = self.lock();
        let freed = state.requested.iter().any(|((of, _), requested)| *of == job && requested.replaced > 0);
        state.requested.retain(|(of, _), _| *of != job);
        drop_them();
        freed.then(|| self.offered(&state))
    }

    /// Whether a part of the job is ordered.
    pub(crate) fn has_job(&self, job: JobId) -> bool {
        self.lock().requested.keys().any(|(of, _)| *of == job)
    }

    /// Records the bytes of a part on the device thread, `None` if it was dropped; returns the capacity to advertise.
    pub(crate) fn resident(&self, key: Key, bytes: Option<u64>) -> Capacity {
        let mut state = self.lock();
        match bytes {
            Some(bytes) => {
                state.resident.insert(key, bytes);
                if let Some(requested) = state.requested.get_mut(&key) {
                    requested.replaced = 0;
                }
            }
            None => drop(state.resident.remove(&key)),
        }
        self.offered(&state)
    }

    /// The capacity to advertise now.
    pub(crate) fn capacity(&self) -> Capacity {
        self.offered(&self.lock())
    }

    fn offered(&self, state: &Residents) -> Capacity {
        let replaced: u64 = state.requested.values().map(|requested| requested.replaced).sum();
        let taken = state.resident.values().sum::<u64>().saturating_add(replaced);
        Capacity { memory_free: self.capacity.memory_total.saturating_sub(taken), ..self.capacity.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, Residents> {
        self.state.lock()
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
    fn held_memory_is_not_offered() {
        let node = residency(100);
        node.begin(FIRST, LoadId(1), 60, &[]).unwrap();
        let refused = node.begin(SECOND, LoadId(1), 50, &[]).unwrap_err();
        assert!(refused.contains("60 B") && refused.contains("100 B"), "{refused}");
        assert_eq!(node.resident(FIRST, Some(40)).memory_free, 60);
        node.begin(SECOND, LoadId(1), 50, &[]).unwrap();
        node.begin(FIRST, LoadId(2), 50, &[PartId(0)]).expect("a part replaces one of the same job");
        assert_eq!(node.resident(FIRST, None).memory_free, 60, "a replaced part counts until the new one is loaded");
        assert_eq!(node.resident(FIRST, Some(50)).memory_free, 50);
        node.end(FIRST, || {});
        node.fail(SECOND, LoadId(1), || {});
        assert_eq!(node.resident(FIRST, None).memory_free, 100);
        node.begin((JobId(3), PartId(0)), LoadId(1), 100, &[]).expect("all memory is free again");
    }

    #[test]
    fn parts_of_a_job_count_separately_and_replaced_parts_once() {
        let node = residency(100);
        let part = |part| (JobId(1), PartId(part));
        for number in [0, 1] {
            node.begin(part(number), LoadId(number.into()), 40, &[]).unwrap();
            node.resident(part(number), Some(40));
        }
        node.begin(part(2), LoadId(2), 40, &[]).expect_err("both parts stay");
        node.begin(part(2), LoadId(2), 90, &[PartId(0), PartId(1)]).expect("both parts are replaced");
        assert_eq!(node.capacity().memory_free, 20);
        // Another order, before that load completes.
        node.begin(part(3), LoadId(3), 50, &[PartId(2)]).unwrap();
        assert_eq!(node.capacity().memory_free, 20);
        assert!(!node.install(part(2), LoadId(2), || panic!("the order was superseded")));
        assert!(node.install(part(3), LoadId(3), || {}));
        assert_eq!(node.resident(part(3), Some(50)).memory_free, 50);
        node.begin(part(4), LoadId(4), 50, &[PartId(3)]).unwrap();
        let (requested, offered) = node.fail(part(4), LoadId(4), || {});
        assert_eq!((requested, offered.map(|now| now.memory_free)), (true, Some(100)));
        assert!(!node.has_job(JobId(1)));
    }

    #[test]
    fn a_load_that_completes_after_its_job_is_dropped() {
        let node = residency(100);
        let installed = Cell::new(0);
        let count = || installed.set(installed.get() + 1);
        node.begin(FIRST, LoadId(1), 10, &[]).unwrap();
        node.begin(FIRST, LoadId(2), 10, &[PartId(0)]).unwrap();
        node.install(FIRST, LoadId(1), count);
        assert_eq!(installed.get(), 0, "a later order superseded it");
        node.install(FIRST, LoadId(2), count);
        assert_eq!(installed.get(), 1);
        node.end_job(JobId(1), || {});
        node.install(FIRST, LoadId(2), count);
        assert_eq!(installed.get(), 1, "the job has ended");
    }

    fn free(offered: Option<Capacity>) -> Option<u64> {
        offered.map(|capacity| capacity.memory_free)
    }

    #[test]
    fn an_order_that_does_not_fit_leaves_other_parts_as_they_are() {
        let node = residency(100);
        node.begin(FIRST, LoadId(1), 60, &[]).unwrap();
        node.resident(FIRST, Some(60));
        node.begin(SECOND, LoadId(1), 41, &[]).unwrap_err();
        assert!(node.has_job(JobId(1)) && !node.has_job(JobId(2)));
        assert_eq!(node.capacity().memory_free, 40);
        node.begin(SECOND, LoadId(2), 40, &[]).expect("exactly what is left");
    }

    #[test]
    fn an_order_that_does_not_fit_still_replaces_the_parts_that_the_shell_drops() {
        let node = residency(100);
        node.begin(FIRST, LoadId(1), 60, &[]).unwrap();
        node.resident(FIRST, Some(60));
        node.begin((JobId(1), PartId(1)), LoadId(2), 200, &[PartId(0)]).unwrap_err();
        assert!(!node.has_job(JobId(1)));
        assert_eq!(node.capacity().memory_free, 100);
    }

    #[test]
    fn a_huge_order_is_rejected_instead_of_wrapping() {
        let node = residency(100);
        node.begin(FIRST, LoadId(1), 60, &[]).unwrap();
        node.begin(SECOND, LoadId(1), u64::MAX, &[]).unwrap_err();
    }

    #[test]
    fn parts_of_other_jobs_with_the_same_number_are_not_replaced() {
        let node = residency(100);
        node.begin(FIRST, LoadId(1), 60, &[]).unwrap();
        node.begin(SECOND, LoadId(1), 60, &[PartId(0)]).unwrap_err();
        assert!(node.has_job(JobId(1)));
    }

    #[test]
    fn a_part_that_failed_under_an_old_order_changes_nothing() {
        let node = residency(100);
        node.begin(FIRST, LoadId(1), 10, &[]).unwrap();
        node.begin(FIRST, LoadId(2), 10, &[PartId(0)]).unwrap();
        let (current, offered) = node.fail(FIRST, LoadId(1), || panic!("the newer order stays"));
        assert!(!current && offered.is_none() && node.has_job(JobId(1)));
        let dropped = Cell::new(false);
        let (current, _) = node.fail(FIRST, LoadId(2), || dropped.set(true));
        assert!(current && dropped.get() && !node.has_job(JobId(1)));
    }

    #[test]
    fn capacity_is_advertised_at_once_only_if_the_device_thread_will_not_report_it() {
        let node = residency(100);
        node.begin(FIRST, LoadId(1), 60, &[]).unwrap();
        node.resident(FIRST, Some(60));
        assert_eq!(free(node.end(FIRST, || {})), None, "the device thread still has the part");
        assert_eq!(node.resident(FIRST, None).memory_free, 100);
        node.begin(FIRST, LoadId(2), 60, &[]).unwrap();
        node.resident(FIRST, Some(60));
        node.begin(FIRST, LoadId(3), 60, &[]).unwrap();
        assert_eq!(free(node.end_job(JobId(2), || {})), None, "another job");
        assert_eq!(free(node.end_job(JobId(1), || {})), Some(100), "the replaced part was reserved until then");
    }

    #[test]
    fn a_part_that_takes_more_than_planned_never_wraps_the_free_memory() {
        let node = residency(100);
        node.begin(FIRST, LoadId(1), 60, &[]).unwrap();
        assert_eq!(node.resident(FIRST, Some(130)).memory_free, 0);
        node.begin(SECOND, LoadId(1), 1, &[]).unwrap_err();
    }
}
