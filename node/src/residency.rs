//! The parts this node is ordered to hold, and their memory and RAM: the node advertises what is left for new plans.
use crate::config::Size;
use node_core::config::Capacity;
use node_core::id::{JobId, LoadId, PartId};
use parking_lot::{Mutex, MutexGuard};
use partitioner::Room;
use std::collections::BTreeMap;

/// Identifies a part on this node.
pub(crate) type Key = (JobId, PartId);

/// The parts of one node, shared by the driver thread, the loading tasks and the device thread.
pub(crate) struct Residency {
    capacity: Capacity,
    state: Mutex<Residents>,
    /// Called with the capacity to advertise, under the lock: a later capacity never arrives before an earlier one.
    publish: Box<dyn Fn(Capacity) + Send + Sync>,
}

#[derive(Default)]
struct Residents {
    /// Parts that the core has ordered.
    requested: BTreeMap<Key, Requested>,
    /// Most that the loads take which were handed to the device thread and on which it has not reported. They count even if the
    /// part was dropped meanwhile: the device thread loads the part before it learns of that.
    handed_over: BTreeMap<(Key, LoadId), (u8, Room)>,
    /// What the parts on the device threads take, by device; may lag behind the orders: a part that moved from one device to
    /// another is on both for a while.
    resident: BTreeMap<(u8, Key), Room>,
    /// Devices that this machine no longer has.
    gone: Vec<u8>,
}

struct Requested {
    device: u8,
    load: LoadId,
    most: Room,
    /// What the parts on the device take that this one replaces: not offered until the new part is loaded.
    replaced: Room,
}

impl Residency {
    /// An empty node that offers all of `capacity`, and passes each change of it to `publish`, which must not block.
    pub(crate) fn new(capacity: Capacity, publish: impl Fn(Capacity) + Send + Sync + 'static) -> Self {
        Self { capacity, state: Mutex::default(), publish: Box::new(publish) }
    }

    /// Orders a part that may take `most` on a device; it supersedes the parts of its job in `replaces`.
    ///
    /// # Errors
    /// The node has no such device, or the part does not fit beside the others there: two coordinators planned with the same
    /// free memory.
    pub(crate) fn begin(
        &self,
        key: Key,
        device: u8,
        load: LoadId,
        most: Room,
        replaces: &[PartId],
    ) -> Result<(), String> {
        let mut state = self.lock();
        let mut replaced = Room::default();
        for part in replaces.iter().copied().filter(|part| *part != key.1).chain([key.1]) {
            // Another device drops what it holds when it learns of that.
            let before = state.requested.remove(&(key.0, part)).filter(|before| before.device == device);
            let resident = state.resident.remove(&(device, (key.0, part)));
            replaced = sum([replaced].into_iter().chain(before.map(|requested| requested.replaced)).chain(resident));
        }
        let of = |(other, requested): (&Key, &Requested)| {
            state.resident.get(&(device, *other)).copied().unwrap_or(requested.most)
        };
        let taken = sum(state.requested.iter().filter(|(_, requested)| requested.device == device).map(of));
        let Some(known) = self.capacity.device(device) else {
            self.publish(&state);
            let count = self.capacity.devices.len();
            return Err(format!("no device {device}: this node has {count}, counted from 0"));
        };
        let total = known.memory_total;
        if state.gone.contains(&device) {
            self.publish(&state);
            return Err(format!("{} is gone: this machine no longer has it", known.label()));
        }
        let with_it = taken.plus(most);
        if with_it.memory > total {
            self.publish(&state);
            return Err(format!(
                "no room for a part of {}: this node offers {} of {}, other parts take {}",
                Size(most.memory),
                Size(total),
                known.label(),
                Size(taken.memory)
            ));
        }
        if most.ram > 0 && with_it.ram > known.ram_total {
            self.publish(&state);
            return Err(format!(
                "no RAM for {} of experts: this node offers {} beside {}, other parts take {}",
                Size(most.ram),
                Size(known.ram_total),
                known.label(),
                Size(taken.ram)
            ));
        }
        state.requested.insert(key, Requested { device, load, most, replaced });
        Ok(())
    }

    /// The device that an ordered part is on.
    #[cfg(test)]
    fn device_of(&self, key: Key) -> Option<u8> {
        self.lock().requested.get(&key).map(|requested| requested.device)
    }

    /// This machine no longer has a device: the mesh learns it, and no part is loaded there any more.
    pub(crate) fn gone(&self, device: u8) {
        let mut state = self.lock();
        if !state.gone.contains(&device) {
            state.gone.push(device);
            self.publish(&state);
        }
    }

    /// Calls `hand_over`, which sends the loaded part to the device thread, if the order is current. Atomic: no other
    /// order can intervene. Returns whether the order is current.
    pub(crate) fn install(&self, key: Key, load: LoadId, hand_over: impl FnOnce()) -> bool {
        let mut state = self.lock();
        let Some(requested) = state.requested.get_mut(&key).filter(|requested| requested.load == load) else {
            return false;
        };
        let (most, replaced) = (requested.most, core::mem::take(&mut requested.replaced));
        let most = Room { memory: most.memory.max(replaced.memory), ram: most.ram.max(replaced.ram) };
        let device = requested.device;
        state.handed_over.insert((key, load), (device, most));
        hand_over();
        true
    }

    /// Removes a part that failed to load, and calls `drop_it`, which notifies the device thread, if the order is
    /// current. Returns whether it is.
    pub(crate) fn fail(&self, key: Key, load: LoadId, drop_it: impl FnOnce()) -> bool {
        let mut state = self.lock();
        let mut freed = state.handed_over.remove(&(key, load)).is_some();
        let current = state.requested.get(&key).is_some_and(|requested| requested.load == load);
        if current {
            freed |= state.requested.remove(&key).is_some_and(|requested| requested.replaced != Room::default());
            drop_it();
        }
        if freed {
            self.publish(&state);
        }
        current
    }

    /// Removes a part and calls `drop_it`, which notifies the device thread. A load that completes later is dropped.
    pub(crate) fn end(&self, key: Key, drop_it: impl FnOnce()) {
        self.remove(|other| *other == key, drop_it);
    }

    /// Removes all parts of a job and calls `drop_them`, which notifies the device thread. Otherwise like
    /// [`Self::end`].
    pub(crate) fn end_job(&self, job: JobId, drop_them: impl FnOnce()) {
        self.remove(|(of, _)| *of == job, drop_them);
    }

    /// The device thread reports what it drops. Memory that was reserved for a load which it never received is free at once.
    fn remove(&self, is_gone: impl Fn(&Key) -> bool, notify: impl FnOnce()) {
        let mut state = self.lock();
        let mut freed = false;
        state.requested.retain(|key, requested| {
            let gone = is_gone(key);
            freed |= gone && requested.replaced != Room::default();
            !gone
        });
        notify();
        if freed {
            self.publish(&state);
        }
    }

    /// Whether a part of the job is ordered.
    pub(crate) fn has_job(&self, job: JobId) -> bool {
        self.lock().requested.keys().any(|(of, _)| *of == job)
    }

    /// A device thread has loaded a part, which takes `room`.
    pub(crate) fn loaded(&self, device: u8, key: Key, load: LoadId, room: Room) {
        let mut state = self.lock();
        state.handed_over.remove(&(key, load));
        state.resident.insert((device, key), room);
        self.publish(&state);
    }

    /// A device thread has dropped a part.
    pub(crate) fn dropped(&self, device: u8, key: Key) {
        let mut state = self.lock();
        state.resident.remove(&(device, key));
        self.publish(&state);
    }

    fn publish(&self, state: &Residents) {
        let mut capacity = self.capacity.clone();
        for (index, device) in (0..).zip(&mut capacity.devices) {
            let requested = state.requested.values().filter(|requested| requested.device == index);
            let replaced = requested.map(|requested| requested.replaced);
            let handed_over = state.handed_over.values().filter(|(there, _)| *there == index).map(|(_, room)| *room);
            let resident = state.resident.iter().filter(|((there, _), _)| *there == index).map(|(_, room)| *room);
            let taken = sum(resident.chain(replaced).chain(handed_over));
            device.memory_free = device.memory_total.saturating_sub(taken.memory);
            device.ram_free = device.ram_total.saturating_sub(taken.ram);
            device.gone = state.gone.contains(&index);
        }
        (self.publish)(capacity);
    }

    fn lock(&self) -> MutexGuard<'_, Residents> {
        self.state.lock()
    }
}

fn sum(rooms: impl Iterator<Item = Room>) -> Room {
    rooms.fold(Room::default(), Room::plus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_core::config::DeviceCapacity;
    use std::cell::Cell;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    const FIRST: Key = (JobId(1), PartId(0));
    const SECOND: Key = (JobId(2), PartId(0));

    /// Memory, and no RAM.
    fn memory(bytes: u64) -> Room {
        Room { memory: bytes, ram: 0 }
    }

    /// A node, and the free memory that it advertises.
    struct Node {
        residency: Residency,
        free: Arc<AtomicU64>,
    }

    impl core::ops::Deref for Node {
        type Target = Residency;

        fn deref(&self) -> &Residency {
            &self.residency
        }
    }

    impl Node {
        fn free(&self) -> u64 {
            self.free.load(Ordering::Relaxed)
        }

        /// Orders a part, which the device thread then holds with as many bytes as it may have.
        fn load(&self, key: Key, load: u64, bytes: u64) {
            self.begin(key, 0, LoadId(load), memory(bytes), &[]).expect("it fits");
            assert!(self.install(key, LoadId(load), || {}));
            self.loaded(0, key, LoadId(load), memory(bytes));
        }
    }

    fn node(total: u64) -> Node {
        let free = Arc::new(AtomicU64::new(total));
        let capacity = Capacity {
            machine: 0,
            zone: String::new(),
            devices: vec![DeviceCapacity {
                device: "cpu".into(),
                memory_total: total,
                memory_free: total,
                bytes_per_second: 1,
                flops_per_second: 1,
                copy_bytes_per_second: 1,
                step_ns: 1,
                layer_ns: 1,
                cache_bytes_per_second: 1,
                ram_total: 0,
                ram_free: 0,
                ram_bytes_per_second: 0,
                ram_flops_per_second: 0,
                numerics: 1,
                pass_steps: 1,
                gone: false,
            }],
        };
        let published = free.clone();
        let residency = Residency::new(capacity, move |now| published.store(now.memory_free(), Ordering::Relaxed));
        Node { residency, free }
    }

    #[test]
    fn held_memory_is_not_offered() {
        let node = node(100);
        node.begin(FIRST, 0, LoadId(1), memory(60), &[]).unwrap();
        let refused = node.begin(SECOND, 0, LoadId(1), memory(50), &[]).unwrap_err();
        assert!(refused.contains("60 B") && refused.contains("100 B"), "{refused}");
        node.install(FIRST, LoadId(1), || {});
        node.loaded(0, FIRST, LoadId(1), memory(40));
        assert_eq!(node.free(), 60);
        node.begin(SECOND, 0, LoadId(1), memory(50), &[]).unwrap();
        node.begin(FIRST, 0, LoadId(2), memory(50), &[PartId(0)]).expect("a part replaces one of the same job");
        node.dropped(0, FIRST);
        assert_eq!(node.free(), 60, "a replaced part counts until the new one is loaded");
        node.install(FIRST, LoadId(2), || {});
        node.loaded(0, FIRST, LoadId(2), memory(50));
        assert_eq!(node.free(), 50);
        node.end(FIRST, || {});
        node.fail(SECOND, LoadId(1), || {});
        node.dropped(0, FIRST);
        assert_eq!(node.free(), 100);
        node.begin((JobId(3), PartId(0)), 0, LoadId(1), memory(100), &[]).expect("all memory is free again");
    }

    #[test]
    fn parts_of_a_job_count_separately_and_replaced_parts_once() {
        let node = node(100);
        let part = |part| (JobId(1), PartId(part));
        for number in [0, 1] {
            node.load(part(number), number.into(), 40);
        }
        node.begin(part(2), 0, LoadId(2), memory(40), &[]).expect_err("both parts stay");
        node.begin(part(2), 0, LoadId(2), memory(90), &[PartId(0), PartId(1)]).expect("both parts are replaced");
        assert_eq!(node.free(), 20);
        // Another order, before that load completes.
        node.begin(part(3), 0, LoadId(3), memory(50), &[PartId(2)]).unwrap();
        assert_eq!(node.free(), 20);
        assert!(!node.install(part(2), LoadId(2), || panic!("the order was superseded")));
        assert!(node.install(part(3), LoadId(3), || {}));
        node.loaded(0, part(3), LoadId(3), memory(50));
        assert_eq!(node.free(), 50);
        node.begin(part(4), 0, LoadId(4), memory(50), &[PartId(3)]).unwrap();
        assert!(node.fail(part(4), LoadId(4), || {}));
        assert_eq!(node.free(), 100);
        assert!(!node.has_job(JobId(1)));
    }

    #[test]
    fn a_load_that_completes_after_its_job_is_dropped() {
        let node = node(100);
        let installed = Cell::new(0);
        let count = || installed.set(installed.get() + 1);
        node.begin(FIRST, 0, LoadId(1), memory(10), &[]).unwrap();
        node.begin(FIRST, 0, LoadId(2), memory(10), &[PartId(0)]).unwrap();
        node.install(FIRST, LoadId(1), count);
        assert_eq!(installed.get(), 0, "a later order superseded it");
        node.install(FIRST, LoadId(2), count);
        assert_eq!(installed.get(), 1);
        node.end_job(JobId(1), || {});
        node.install(FIRST, LoadId(2), count);
        assert_eq!(installed.get(), 1, "the job has ended");
    }

    #[test]
    fn memory_is_not_offered_while_the_device_thread_loads_a_part_of_an_ended_job() {
        let node = node(100);
        node.load(FIRST, 1, 60);
        node.begin(FIRST, 0, LoadId(2), memory(70), &[]).unwrap();
        node.install(FIRST, LoadId(2), || {});
        node.end_job(JobId(1), || {});
        assert_eq!(node.free(), 40, "the first part is there, and the second is being loaded");
        node.loaded(0, FIRST, LoadId(2), memory(70));
        assert_eq!(node.free(), 30);
        node.dropped(0, FIRST);
        assert_eq!(node.free(), 100);
        // The same, and the load fails.
        node.begin(FIRST, 0, LoadId(3), memory(70), &[]).unwrap();
        node.install(FIRST, LoadId(3), || {});
        node.end_job(JobId(1), || {});
        node.load(SECOND, 1, 10);
        assert_eq!(node.free(), 20);
        assert!(!node.fail(FIRST, LoadId(3), || panic!("the job has ended")));
        assert_eq!(node.free(), 90);
    }

    #[test]
    fn an_order_that_does_not_fit_leaves_other_parts_as_they_are() {
        let node = node(100);
        node.load(FIRST, 1, 60);
        node.begin(SECOND, 0, LoadId(1), memory(41), &[]).unwrap_err();
        assert!(node.has_job(JobId(1)) && !node.has_job(JobId(2)));
        assert_eq!(node.free(), 40);
        node.begin(SECOND, 0, LoadId(2), memory(40), &[]).expect("exactly what is left");
    }

    #[test]
    fn an_order_that_does_not_fit_still_replaces_the_parts_that_the_shell_drops() {
        let node = node(100);
        node.load(FIRST, 1, 60);
        node.begin((JobId(1), PartId(1)), 0, LoadId(2), memory(200), &[PartId(0)]).unwrap_err();
        assert!(!node.has_job(JobId(1)));
        assert_eq!(node.free(), 100);
    }

    #[test]
    fn a_huge_order_is_rejected_instead_of_wrapping() {
        let node = node(100);
        node.begin(FIRST, 0, LoadId(1), memory(60), &[]).unwrap();
        node.begin(SECOND, 0, LoadId(1), memory(u64::MAX), &[]).unwrap_err();
    }

    #[test]
    fn parts_of_other_jobs_with_the_same_number_are_not_replaced() {
        let node = node(100);
        node.begin(FIRST, 0, LoadId(1), memory(60), &[]).unwrap();
        node.begin(SECOND, 0, LoadId(1), memory(60), &[PartId(0)]).unwrap_err();
        assert!(node.has_job(JobId(1)));
    }

    #[test]
    fn a_part_that_failed_under_an_old_order_changes_nothing() {
        let node = node(100);
        node.begin(FIRST, 0, LoadId(1), memory(10), &[]).unwrap();
        node.begin(FIRST, 0, LoadId(2), memory(10), &[PartId(0)]).unwrap();
        assert!(!node.fail(FIRST, LoadId(1), || panic!("the newer order stays")));
        assert!(node.has_job(JobId(1)));
        let dropped = Cell::new(false);
        assert!(node.fail(FIRST, LoadId(2), || dropped.set(true)));
        assert!(dropped.get() && !node.has_job(JobId(1)));
    }

    #[test]
    fn capacity_is_advertised_at_once_only_if_the_device_thread_will_not_report_it() {
        let node = node(100);
        node.load(FIRST, 1, 60);
        node.end(FIRST, || {});
        assert_eq!(node.free(), 40, "the device thread still has the part");
        node.dropped(0, FIRST);
        assert_eq!(node.free(), 100);
        node.load(FIRST, 2, 60);
        node.begin(FIRST, 0, LoadId(3), memory(60), &[]).unwrap();
        node.end_job(JobId(2), || {});
        assert_eq!(node.free(), 40, "another job");
        node.end_job(JobId(1), || {});
        assert_eq!(node.free(), 100, "the replaced part was reserved until then");
    }

    #[test]
    fn a_part_that_takes_more_than_planned_never_wraps_the_free_memory() {
        let node = node(100);
        node.begin(FIRST, 0, LoadId(1), memory(60), &[]).unwrap();
        node.install(FIRST, LoadId(1), || {});
        node.loaded(0, FIRST, LoadId(1), memory(130));
        assert_eq!(node.free(), 0);
        node.begin(SECOND, 0, LoadId(1), memory(1), &[]).unwrap_err();
    }

    /// Two devices of 100 bytes, and the capacity last advertised.
    fn two() -> (Residency, Arc<Mutex<Capacity>>) {
        let device = DeviceCapacity { device: "cpu".into(), memory_total: 100, memory_free: 100, ..Default::default() };
        let capacity = Capacity { devices: vec![device.clone(), device], ..Capacity::default() };
        let shown = Arc::new(Mutex::new(capacity.clone()));
        let published = shown.clone();
        (Residency::new(capacity, move |now| *published.lock() = now), shown)
    }

    #[test]
    fn each_device_has_its_own_memory_and_a_part_may_move_between_them() {
        let (residency, shown) = two();
        let free = || shown.lock().devices.iter().map(|device| device.memory_free).collect::<Vec<_>>();
        let load = |key, device, load, bytes| {
            residency.begin(key, device, LoadId(load), memory(bytes), &[]).unwrap();
            residency.install(key, LoadId(load), || {});
            residency.loaded(device, key, LoadId(load), memory(bytes));
        };
        load(FIRST, 0, 1, 60);
        load(SECOND, 1, 2, 70);
        assert_eq!(free(), [40, 30]);
        residency.begin((JobId(3), PartId(0)), 0, LoadId(3), memory(50), &[]).unwrap_err();
        residency.begin((JobId(3), PartId(0)), 2, LoadId(3), memory(1), &[]).unwrap_err();
        // The first part moves to the other device, which has no room for it at first.
        residency.begin(FIRST, 1, LoadId(4), memory(60), &[]).unwrap_err();
        residency.end(SECOND, || {});
        residency.dropped(1, SECOND);
        load(FIRST, 1, 5, 60);
        assert_eq!(free(), [40, 40], "the first device has not dropped its copy yet");
        residency.dropped(0, FIRST);
        assert_eq!((free(), residency.device_of(FIRST)), (vec![100, 40], Some(1)));
        residency.gone(0);
        assert!(shown.lock().devices[0].gone && !shown.lock().devices[1].gone);
        let refused = residency.begin(SECOND, 0, LoadId(6), memory(1), &[]).unwrap_err();
        assert!(refused.contains("gone"), "{refused}");
    }
    #[test]
    fn ram_for_experts_is_accounted_like_memory() {
        let device =
            DeviceCapacity { device: "cuda:0".into(), memory_total: 100, memory_free: 100, ..Default::default() };
        let speed = node_core::config::Speed { bytes_per_second: 1, ..Default::default() };
        let capacity = Capacity { devices: vec![device.with_ram(50, speed)], ..Capacity::default() };
        let shown = Arc::new(Mutex::new(capacity.clone()));
        let published = shown.clone();
        let residency = Residency::new(capacity, move |now| *published.lock() = now);
        let room = |memory, ram| Room { memory, ram };
        residency.begin(FIRST, 0, LoadId(1), room(60, 30), &[]).unwrap();
        let refused = residency.begin(SECOND, 0, LoadId(1), room(30, 21), &[]).unwrap_err();
        assert!(
            refused.contains("no RAM for 21 B of experts") && refused.contains("other parts take 30 B"),
            "{refused}"
        );
        residency.install(FIRST, LoadId(1), || {});
        residency.loaded(0, FIRST, LoadId(1), room(60, 30));
        let free = || {
            let now = shown.lock().clone();
            (now.memory_free(), now.ram_free())
        };
        assert_eq!(free(), (40, 20));
        residency.begin(SECOND, 0, LoadId(2), room(30, 20), &[]).expect("exactly what is left");
        residency.end(FIRST, || {});
        residency.dropped(0, FIRST);
        assert_eq!(free(), (100, 50));
    }
}
