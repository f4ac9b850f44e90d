//! Rebalancing of a running model job: it moves when a node joins that helps, when a node without a standby leaves, and
//! when one is slower than advertised. A link or a machine that degrades for seconds moves nothing.
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
#![expect(clippy::wildcard_enum_match_arm, reason = "a test handles few of many events")]
use node_core::id::CallId;
use node_core::input::Input;
use node_core::job::{PartView, ProgramView, WhatView};
use node_core::output::Event;
use node_core::time::Duration;
use node_core::work::PredictedChange;
use node_core::work::serve::DoneReason;
use simnet::checker::epochs::Epochs;
use simnet::checker::{membership, requests};
use simnet::workload::{request, symbolic_model};
use simnet::{HostId, HostSpec, Options, Workload, World};

const LAYERS: u32 = 12;
const LAYER_BYTES: u64 = 20 << 20;
const COORDINATOR: HostId = HostId(0);

struct Room {
    world: World,
    work: Workload,
    epochs: Epochs,
}

/// A host that reads weights at this many GB/s and offers this many MiB.
fn spec(gigabytes: u64, memory_mib: u64) -> HostSpec {
    let mut spec = HostSpec::default();
    spec.capacity.devices[0].bytes_per_second = gigabytes * 1_000_000_000;
    (spec.capacity.devices[0].memory_total, spec.capacity.devices[0].memory_free) =
        (memory_mib << 20, memory_mib << 20);
    spec
}

impl Room {
    fn serving(hosts: &[HostSpec]) -> Room {
        let mut world = World::new(Options::lan(1));
        for host in hosts {
            let id = world.add_hosts(1, host)[0];
            world.start(id);
            if id != COORDINATOR {
                world.introduce(id, COORDINATOR);
            }
        }
        let settled = world.run_while_not(ms(20_000), ms(50), |world| membership::informed(world, &[]));
        assert!(settled, "the hosts find each other");
        world.run_for(ms(1000));
        let epochs = Epochs::default();
        world.observe(Box::new(epochs.clone()));
        let mut work = Workload::deploy(&mut world, COORDINATOR, symbolic_model(LAYERS, LAYER_BYTES));
        assert!(work.run_until_ready(&mut world, ms(10_000)), "the model is served: {:?}", work.notes);
        Room { world, work, epochs }
    }

    fn join(&mut self, spec: &HostSpec) -> HostId {
        let id = self.world.add_hosts(1, spec)[0];
        self.world.start(id);
        self.world.introduce(id, COORDINATOR);
        id
    }

    /// Sends requests for this long, two at a time.
    fn load_for(&mut self, time: Duration) {
        let end = self.world.now() + time;
        let mut n = 0;
        let mut open: Vec<CallId> = Vec::new();
        while self.world.now() < end {
            open.retain(|call| self.work.calls[call].ends.is_empty());
            while open.len() < 2 {
                n += 1;
                open.push(self.work.submit(&mut self.world, request(n, 30 + n as u32 % 50, 40)));
            }
            self.work.run(&mut self.world, ms(50), |_, _| false);
        }
        assert!(self.work.run_until_done(&mut self.world, ms(60_000)), "all requests end");
    }

    fn stages(&self) -> Vec<HostId> {
        self.work.stages(&self.world)
    }

    fn layers_of(&self, host: HostId) -> u32 {
        let node = self.world.host(host).node_id;
        let jobs = self.world.host(COORDINATOR).node.as_ref().and_then(|head| head.jobs().next());
        let parts = jobs.map(|job| job.parts).unwrap_or_default();
        let layers = |part: &PartView| match &part.what {
            WhatView::Stage(layers) => layers.end - layers.start,
            WhatView::Tile { .. } => 0,
        };
        parts.iter().filter(|part| part.owner == node).map(layers).sum()
    }

    fn moves(&self) -> Vec<PredictedChange> {
        let change = |told: &simnet::Notification| match &told.event {
            Event::JobMoves { change, .. } => Some(*change),
            _ => None,
        };
        self.work.notes.iter().filter_map(change).collect()
    }

    fn fetched(&self) -> Option<u64> {
        let node = self.world.host(COORDINATOR).node.as_ref()?;
        match node.jobs().next()?.program {
            ProgramView::Serve { moved, .. } => moved.map(|moved| moved.fetched_bytes),
            ProgramView::Steps { .. } => None,
        }
    }

    fn epochs_ready(&self) -> usize {
        self.work.notes.iter().filter(|told| matches!(told.event, Event::JobReady { .. })).count()
    }

    /// Asserts that every request ended with the tokens of a run on one host.
    fn check(&self) {
        let mut wrong = requests::violations(&self.work);
        wrong.extend(self.epochs.violations());
        for (id, call) in &self.work.calls {
            let whole = matches!(call.ends[0].1, DoneReason::Length | DoneReason::Stop);
            wrong.extend((!whole).then(|| format!("call {} ended with {:?}", id.0, call.ends)));
        }
        let notes: Vec<String> =
            self.work.notes.iter().map(|told| format!("{} {:?}", told.at.0 / 1_000_000, told.event)).collect();
        assert!(wrong.is_empty(), "{wrong:#?}\n{}", notes.join("\n"));
    }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn a_node_that_joins_under_load_takes_work_and_no_request_fails() {
    let slow = spec(5, 297);
    let mut room = Room::serving(&[slow.clone(), slow.clone(), slow]);
    assert_eq!(room.stages().len(), 3);
    room.load_for(ms(5_000));
    // Too small to be the standby of a stage, so that it has no weights on its disk.
    let joiner = room.join(&spec(40, 202));
    room.load_for(ms(40_000));
    assert!(room.stages().contains(&joiner), "{:?}", room.work.notes);
    let moves = room.moves();
    assert_eq!(moves.len(), 1, "{moves:?}");
    assert!(moves[0].after_ns * 100 <= moves[0].before_ns * 80);
    assert_eq!(room.fetched(), Some(moves[0].bytes), "what was moved is what was planned");
    assert_eq!(room.epochs_ready(), 2, "{:?}", room.work.notes);
    room.check();
}

#[test]
fn a_node_that_joins_and_does_not_help_moves_nothing() {
    let mut room = Room::serving(&[spec(20, 297), spec(20, 297), spec(20, 297)]);
    room.join(&spec(22, 297));
    room.load_for(ms(60_000));
    assert_eq!(room.moves(), vec![]);
    assert_eq!(room.epochs_ready(), 1);
    room.check();
}

/// For eight of every twenty seconds the link to a stage drops below a hundredth of its bandwidth, with a hundred times its
/// round-trip time, and an idle machine seems ten times as fast as it is.
#[test]
fn a_change_of_a_few_seconds_moves_nothing() {
    let mut room = Room::serving(&[spec(20, 297), spec(20, 297), spec(20, 297), spec(20, 297)]);
    let spare = (0..4).map(HostId).find(|host| !room.stages().contains(host)).expect("three hosts hold the model");
    let stage = *room.stages().iter().find(|host| **host != COORDINATOR).expect("a stage on another host");
    let node = room.world.host(stage).node_id;
    let capacity = room.world.host(spare).spec.capacity.clone();
    for _ in 0..6 {
        let mut fast = capacity.clone();
        fast.devices[0].bytes_per_second *= 10;
        room.world.inject(COORDINATOR, Input::LinkMeasured { node, rtt_ns: 50_000_000, bytes_per_second: 1_000_000 });
        room.world.inject(spare, Input::CapacityChanged(fast));
        room.load_for(ms(8_000));
        room.world.inject(COORDINATOR, Input::LinkMeasured { node, rtt_ns: 500_000, bytes_per_second: 125_000_000 });
        room.world.inject(spare, Input::CapacityChanged(capacity.clone()));
        room.load_for(ms(12_000));
    }
    assert_eq!(room.moves(), vec![]);
    assert_eq!(room.epochs_ready(), 1);
    room.check();
}

/// A node that advertises high speed gets work, is challenged, and loses the work again.
#[test]
fn a_node_that_overstates_its_speed_loses_its_work() {
    let honest = spec(10, 297);
    let slow = HostSpec { skew_percent: 2_000, ..spec(40, 297) };
    let mut room = Room::serving(&[honest.clone(), slow, honest.clone(), honest]);
    let slow = HostId(1);
    assert!(room.stages().contains(&slow), "its advert is trusted at first");
    room.load_for(ms(90_000));
    assert!(!room.stages().contains(&slow), "{:?}", room.work.notes);
    let measured =
        |told: &&simnet::Notification| matches!(told.event, Event::Measured { percent, .. } if percent > 1_000);
    assert_eq!(room.work.notes.iter().filter(measured).count(), 1, "{:?}", room.work.notes);
    room.check();
}

/// One node is four times as fast as it advertises, one takes 2.9 times as long: once stages are timed, measured times
/// replace both adverts. A node need not be three times slower to lose work that another one does faster.
#[test]
fn work_follows_measured_stage_times_in_both_directions() {
    let modest = HostSpec { skew_percent: 25, ..spec(8, 700) };
    let mut room = Room::serving(&[spec(20, 297), spec(20, 297), modest]);
    let before = room.layers_of(HostId(2));
    assert!(before <= 2, "{before} layers on the node that advertises low speed");
    room.load_for(ms(40_000));
    let after = room.layers_of(HostId(2));
    println!("a node four times as fast as advertised: {before} of {LAYERS} layers, {after} once measured");
    assert!(after > 6, "{after}: {:?}", room.work.notes);
    room.check();

    let boastful = HostSpec { skew_percent: 290, ..spec(40, 700) };
    let mut room = Room::serving(&[spec(30, 297), boastful, spec(30, 297), spec(30, 297)]);
    let before = room.layers_of(HostId(1));
    assert_eq!(before, LAYERS, "its advert is trusted at first");
    room.work.run(&mut room.world, ms(40_000), |_, _| false);
    let after = room.layers_of(HostId(1));
    println!("a node that takes 2.9 times as long as advertised: {before} of {LAYERS} layers, {after} once measured");
    assert!(after < 6, "{after}: {:?}", room.work.notes);
    room.load_for(ms(5_000));
    room.check();
}

/// Plans assume attention over half of a context, which takes twice as long here as the weights. The rows of a challenge
/// attend to a few positions: a node that answers within their time is as fast as advertised.
#[test]
fn a_challenge_is_compared_with_the_time_of_its_few_positions() {
    let mut host = spec(20, 297);
    host.capacity.devices[0].cache_bytes_per_second = 1_000_000_000;
    let mut room = Room::serving(&vec![host; 4]);
    room.work.run(&mut room.world, ms(40_000), |_, _| false);
    let measured = |told: &&simnet::Notification| matches!(told.event, Event::Measured { .. });
    assert_eq!(room.work.notes.iter().find(measured).map(|told| &told.event), None);
    room.check();
}

/// It has no standby, but two other hosts have memory for half of its layers each.
#[test]
fn a_stage_without_a_standby_is_moved_before_its_node_leaves() {
    let mut room =
        Room::serving(&[spec(20, 297), spec(20, 297), spec(20, 297), spec(20, 117), spec(20, 117), spec(20, 117)]);
    let leaving = *room.stages().iter().find(|host| **host != COORDINATOR).expect("a stage on another host");
    room.load_for(ms(3_000));
    room.world.inject(leaving, Input::Drain(true));
    room.load_for(ms(9_000));
    assert!(!room.stages().contains(&leaving), "{:?}", room.work.notes);
    room.check();
}
