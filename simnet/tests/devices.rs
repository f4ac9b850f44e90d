//! Nodes with several devices: stages side by side in one node, the loss of the node, and a device that disappears.
use node_core::job::{JobState, JobView, PartView};
use node_core::time::Duration;
use node_core::work::serve::DoneReason;
use simnet::checker::bounds::Bounds;
use simnet::checker::epochs::Epochs;
use simnet::checker::{membership, requests};
use simnet::workload::{request, symbolic_model};
use simnet::{Fault, HostId, HostSpec, Options, Workload, World};

const LAYERS: u32 = 12;
const LAYER_BYTES: u64 = 20 << 20;
/// Five of the layers.
const DEVICE_MEMORY: u64 = 297 << 20;
const COORDINATOR: HostId = HostId(0);

struct Room {
    world: World,
    work: Workload,
    epochs: Epochs,
    bounds: Bounds,
}

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

impl Room {
    /// Hosts with these numbers of devices, the first of which serves a model.
    fn serving(seed: u64, devices: &[usize]) -> Room {
        let mut world = World::new(Options::lan(seed));
        let (epochs, bounds) = (Epochs::default(), Bounds::default());
        world.observe(Box::new(epochs.clone()));
        world.observe(Box::new(bounds.clone()));
        for &count in devices {
            let spec = HostSpec::default().with_memory(DEVICE_MEMORY).with_devices(count);
            let id = world.add_host(spec);
            world.start(id);
            if id != COORDINATOR {
                world.introduce(id, COORDINATOR);
            }
        }
        let settled = world.run_while_not(ms(20_000), ms(50), |world| membership::informed(world, &[]));
        assert!(settled, "the hosts find each other");
        world.run_for(ms(1000));
        let mut work = Workload::deploy(&mut world, COORDINATOR, symbolic_model(LAYERS, LAYER_BYTES));
        assert!(work.run_until_ready(&mut world, ms(10_000)), "the model is served: {:?}", work.notes);
        let mut room = Room { world, work, epochs, bounds };
        room.run_for(ms(3000));
        room
    }

    fn run_for(&mut self, time: Duration) {
        self.work.run(&mut self.world, time, |_, _| false);
    }

    fn job(&self) -> JobView {
        let jobs = self.world.host(COORDINATOR).node.as_ref().into_iter().flat_map(|node| node.jobs());
        jobs.into_iter().find(|job| Some(job.job) == self.work.job).expect("the job")
    }

    /// Host and device of each stage.
    fn places(&self) -> Vec<(u32, u8)> {
        let place = |part: &PartView| (self.world.host_of(part.owner).map_or(u32::MAX, |host| host.0), part.device);
        self.job().parts.iter().map(place).collect()
    }

    /// All requests end with the right tokens, and no checker complains.
    fn finish(&mut self, what: &str) {
        assert!(self.work.run_until_done(&mut self.world, ms(120_000)), "{what}: all requests end");
        let whole = |end: &DoneReason| matches!(end, DoneReason::Length | DoneReason::Stop);
        let failed: Vec<_> = self.work.calls.values().filter(|call| !whole(&call.ends[0].1)).map(|c| &c.ends).collect();
        assert!(failed.is_empty(), "{what}: {failed:?}");
        let mut wrong = requests::violations(&self.work);
        wrong.extend(self.epochs.violations());
        wrong.extend(self.bounds.violations());
        assert!(wrong.is_empty(), "{what}: {wrong:#?}");
    }

    fn submit(&mut self, count: u64, tokens: u32) {
        for n in 0..count {
            self.work.submit(&mut self.world, request(n, 40 + 7 * n as u32, tokens));
        }
    }
}

/// Three devices hold the twelve layers, and they are as near to each other as threads.
#[test]
fn a_box_serves_a_model_on_its_devices_alone_and_its_standbys_are_elsewhere() {
    let mut room = Room::serving(1, &[3, 1, 1, 1, 1]);
    let mut places = room.places();
    assert!(places.iter().all(|(host, _)| *host == 0), "no row crosses the network: {places:?}");
    places.sort_unstable();
    places.dedup();
    assert!(places.len() >= 3, "each stage on a device of its own: {places:?}");
    room.submit(6, 40);
    room.finish("a box");
    let job = room.job();
    for part in &job.parts {
        let standby = part.standby.as_ref().and_then(|standby| standby.node).expect("another host has memory for it");
        assert_ne!(standby, part.owner, "a standby on another device of the owner's node is lost with it");
    }
}

/// Two devices of one node hold two stages, which both go to standbys when the node dies.
#[test]
fn all_stages_of_a_lost_box_continue_at_their_standbys() {
    for seed in 0..8 {
        let what = format!("seed {seed}");
        // The coordinator holds what the box lacks; the other hosts have memory for the standbys.
        let mut room = Room::serving(seed, &[1, 2, 1, 1, 1]);
        let places = room.places();
        let on_box = places.iter().filter(|(host, _)| *host == 1).count();
        assert_eq!(on_box, 2, "{what}: two stages side by side: {places:?}");
        room.submit(4, 60);
        room.run_for(ms(100 + 37 * seed));
        room.epochs.forget(HostId(1));
        room.bounds.forget(HostId(1));
        room.world.strike(Fault::Crash(HostId(1)));
        room.finish(&what);
        assert!(room.places().iter().all(|(host, _)| *host != 1), "{what}");
    }
}

/// The layers of the device move, those of its sibling stay, and the node keeps its place in the mesh.
#[test]
fn the_layers_of_a_device_that_disappears_move_and_its_node_stays() {
    for seed in 0..8 {
        let what = format!("seed {seed}");
        let mut room = Room::serving(seed, &[1, 2, 1, 1, 1]);
        let before = room.places();
        assert_eq!(before.iter().filter(|(host, _)| *host == 1).count(), 2, "{what}: {before:?}");
        room.submit(4, 60);
        room.run_for(ms(100 + 37 * seed));
        room.world.strike(Fault::DeviceGone { host: HostId(1), device: 1 });
        room.finish(&what);
        room.run_for(ms(15_000));
        let (job, after) = (room.job(), room.places());
        assert_eq!(job.state, JobState::Running, "{what}");
        assert!(!after.contains(&(1, 1)), "{what}: {after:?}");
        assert!(after.contains(&(1, 0)), "{what}: the other device of the node keeps its stage: {after:?}");
        room.submit(2, 20);
        room.finish(&what);
    }
}

/// A device that stays there but fails again and again loses its stage to another device, of the same node if need be.
#[test]
fn a_device_that_is_gone_leaves_its_layers_to_its_siblings() {
    let mut room = Room::serving(3, &[4]);
    let before = room.places();
    let (_, gone) = before[0];
    room.submit(3, 60);
    room.run_for(ms(200));
    room.world.strike(Fault::DeviceGone { host: COORDINATOR, device: gone });
    room.finish("one box alone");
    let after = room.places();
    assert!(after.iter().all(|(host, device)| *host == 0 && *device != gone), "{before:?}, then {after:?}");
}
