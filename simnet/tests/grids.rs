//! Simulations under faults: the state hash always equals that of a run in one piece.
#![expect(clippy::wildcard_enum_match_arm, reason = "a test handles few of many outputs")]
use node_core::codec;
use node_core::id::{CallId, Epoch, JobId, NodeId, PartId};
use node_core::input::Input;
use node_core::job::{PartView, WhatView};
use node_core::message::{Message, ToParticipant};
use node_core::output::{Event, Output};
use node_core::time::{Duration, Instant};
use node_core::work::steps::{GridSpec, Schedule, StepsEvent, TileOrder, TileStart};
use node_core::work::{Ending, JobSpec, Order, PartWork, Placement};
use partitioner::Tier;
use partitioner::tiles::GridWork;
use simnet::checker::membership;
use simnet::grids::{UNSTABLE, simulation, solo, unstable};
use simnet::{Fault, HostId, HostSpec, Observer, Options, World};
use std::cell::RefCell;
use std::rc::Rc;

const SUBMITTER: HostId = HostId(0);
const JOB: JobId = JobId(0x6172);
const STEPS: u32 = 300;
const SIZE: [u64; 3] = [24, 40, 1];
const PERIODIC: [bool; 3] = [true, false, false];

struct Room {
    world: World,
    /// The submitter, or its successor.
    coordinator: HostId,
    seed: u64,
    report: Option<u128>,
    ended: Option<Result<(), String>>,
    /// Reported progress: when, and which step.
    progress: Vec<(Instant, u32)>,
    owners: Vec<HostId>,
    /// The start step of the current placement.
    from: u32,
    checkpoints: Vec<u32>,
    standbys: usize,
    notes: Vec<String>,
}

fn result(ending: Ending) -> Result<(), String> {
    match ending {
        Ending::Completed => Ok(()),
        Ending::Cancelled => Err("it was cancelled".into()),
        Ending::Moved(reason) | Ending::Failed(reason) => Err(reason),
    }
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn spec(tier: Tier, depth: Option<u32>, checkpoint: Option<u32>, seed: u64) -> GridSpec {
    GridSpec {
        job: JOB,
        name: "mixing".into(),
        simulation: simulation(seed),
        work: GridWork {
            size: SIZE,
            periodic: PERIODIC,
            radius: 1,
            state_bits: 1 << 16,
            traffic_bits: 1 << 16,
            face_bits: 64,
            cell_bits: 64,
            align_x: 1,
            scratch_bytes: 1 << 20,
            pass_steps: 1,
        },
        depth,
        schedule: Schedule {
            steps: STEPS,
            report_every: 50,
            checkpoint_every: checkpoint,
            outputs: vec![25],
            looks: None,
        },
        tier,
        resume: None,
    }
}

fn add(world: &mut World) {
    let mut spec = HostSpec::default();
    spec.capacity.devices[0].copy_bytes_per_second = 100_000_000;
    let id = world.add_hosts(1, &spec)[0];
    world.start(id);
    if id != SUBMITTER {
        world.introduce(id, SUBMITTER);
    }
}

impl Room {
    /// Hosts slow enough that distributing a small grid pays off.
    fn of(hosts: usize, options: Options, seed: u64) -> Room {
        let mut world = World::new(options);
        (0..hosts).for_each(|_| add(&mut world));
        let settled = world.run_while_not(ms(20_000), ms(50), |world| membership::informed(world, &[]));
        assert!(settled, "the hosts find each other");
        world.run_for(ms(500));
        Room {
            world,
            coordinator: SUBMITTER,
            seed,
            report: None,
            ended: None,
            progress: Vec::new(),
            owners: Vec::new(),
            from: 0,
            checkpoints: Vec::new(),
            standbys: 0,
            notes: Vec::new(),
        }
    }

    fn join(&mut self) {
        add(&mut self.world);
    }

    fn submit(&mut self, spec: GridSpec) {
        let job = Box::new(JobSpec::Steps(spec));
        self.world.inject(SUBMITTER, Input::Start { call: CallId(1), job });
    }

    fn hear(&mut self) {
        for told in self.world.take_notifications() {
            if let Event::JobInherited { from, .. } = &told.event {
                self.notes.push(format!("{:?} {:?} inherits from {from}", told.at, told.host));
                self.coordinator = told.host;
            }
            // Two coordinators may overlap for a while: one of them may finish before it learns of the other.
            if told.host != self.coordinator {
                self.hear_other(told.event);
                continue;
            }
            if let Event::Standby { current: true, .. } = told.event {
                self.standbys += 1;
            }
            match told.event {
                Event::JobPlaced { epoch, placement, .. } => {
                    let Placement::Tiles { tiles, step, .. } = *placement else { continue };
                    self.notes.push(format!("{:?} places epoch {} from {step}: {tiles:?}", told.at, epoch.counter));
                    self.owners = tiles.iter().filter_map(|(node, _)| self.world.host_of(*node)).collect();
                    self.from = step;
                }
                Event::JobReady { epoch, .. } => {
                    self.notes.push(format!("{:?} runs epoch {} from {}", told.at, epoch.counter, self.from));
                }
                Event::JobEnded { ending, .. } => self.ended = Some(result(ending)),
                Event::Steps { event, .. } => match event {
                    StepsEvent::Runs { .. } => {}
                    StepsEvent::Progress { step } => self.progress.push((told.at, step)),
                    StepsEvent::Report { report, .. } => self.report = report.hash.or(self.report),
                    StepsEvent::Checkpoint { step } => self.checkpoints.push(step),
                    StepsEvent::Waiting { reason } => self.notes.push(reason),
                },
                event => self.notes.push(format!("{:?} {event:?}", told.at)),
            }
        }
    }

    fn hear_other(&mut self, event: Event) {
        if let Event::JobEnded { ending: Ending::Completed, .. } = event {
            self.ended = Some(Ok(()));
        } else if let Event::Steps { event: StepsEvent::Report { report, .. }, .. } = event {
            self.report = report.hash.or(self.report);
        }
    }

    fn run(&mut self, limit: Duration, mut done: impl FnMut(&Room) -> bool) -> bool {
        let end = self.world.now() + limit;
        while self.world.now() < end {
            self.world.run_for(ms(5));
            self.hear();
            if done(self) {
                return true;
            }
        }
        false
    }

    fn step(&self) -> u32 {
        self.progress.last().map_or(0, |(_, step)| *step)
    }

    /// Runs to the end, and checks the hash.
    fn finishes(&mut self, limit: Duration) {
        let ended = self.run(limit, |room| room.ended.is_some());
        let told = || self.notes[self.notes.len().saturating_sub(25)..].join("\n");
        assert!(ended, "it has not ended: step {}, owners {:?}\n{}", self.step(), self.owners, told());
        assert_eq!(self.ended, Some(Ok(())), "{}", told());
        assert_eq!(self.report, Some(solo(self.seed, SIZE, PERIODIC, STEPS)), "{}", told());
    }

    /// The longest time without reported progress after `from`.
    fn longest_pause(&self, from: Instant) -> Duration {
        let later = self.progress.windows(2).filter(|pair| pair[1].0 >= from);
        later.map(|pair| pair[1].0.since(pair[0].0)).max().unwrap_or_default()
    }
}

#[test]
fn any_number_of_nodes_and_any_halo_depth_give_the_same_hash() {
    for (hosts, depth) in [(1, None), (2, Some(1)), (3, Some(4)), (5, Some(3)), (5, None)] {
        let mut room = Room::of(hosts, Options::lan(3), 7);
        room.submit(spec(Tier::None, depth, Some(100), 7));
        room.finishes(ms(120_000));
        assert_eq!(room.owners.len(), hosts, "all of them take part");
        assert_eq!(room.checkpoints, [100, 200, 300]);
    }
}

#[test]
fn a_slow_node_gets_fewer_cells_after_a_rebalance() {
    // Without checkpoints a rebalance restarts the run, early on; with them it rolls back to the last one.
    for checkpoint in [None, Some(200)] {
        let mut room = Room::of(3, Options::lan(5), 7);
        room.world.strike(Fault::Slow { host: HostId(2), percent: 400, lasts: ms(10_000_000) });
        let steps = 4000;
        let mut spec = spec(Tier::None, Some(2), checkpoint, 7);
        spec.schedule.steps = steps;
        room.submit(spec);
        let rows = |room: &Room| -> Vec<u64> {
            let coordinator = room.world.host(SUBMITTER).node.as_ref().expect("it lives");
            let parts = coordinator.jobs().next().map_or_else(Vec::new, |job| job.parts);
            let cells = |part: &PartView| match &part.what {
                WhatView::Tile { block, .. } => block.cells(),
                WhatView::Stage(_) => 0,
            };
            parts.iter().map(cells).collect()
        };
        assert!(room.run(ms(60_000), |room| room.step() >= 10));
        let before = rows(&room);
        assert!(before.iter().max() < before.iter().min().map(|least| least * 2).as_ref(), "{before:?}");
        assert!(
            room.run(ms(60_000), |room| room.notes.iter().any(|note| note.contains("runs epoch 2"))),
            "{:?}",
            room.notes
        );
        let after = rows(&room);
        assert!(after.iter().max() > after.iter().min().map(|least| least * 2).as_ref(), "{after:?}");
        assert!(room.run(ms(600_000), |room| room.ended.is_some()));
        assert_eq!(room.ended, Some(Ok(())));
        assert_eq!(room.report, Some(solo(7, SIZE, PERIODIC, steps)));
    }
}

#[test]
fn a_node_too_slow_to_help_loses_its_tile() {
    let mut room = Room::of(3, Options::lan(8), 7);
    room.world.strike(Fault::Slow { host: HostId(2), percent: 5_000, lasts: ms(10_000_000) });
    let mut spec = spec(Tier::None, Some(1), None, 7);
    spec.schedule.steps = 2000;
    room.submit(spec);
    assert!(room.run(ms(120_000), |room| room.owners.len() == 3 && room.step() >= 4));
    assert!(room.run(ms(120_000), |room| room.owners.len() == 2), "{:?}", room.notes);
    room.world.run_for(ms(2000));
    let held = room.world.host(HostId(2)).node.as_ref().map(|node| node.parts().count());
    assert_eq!(held, Some(0), "it holds no tile");
    assert!(room.run(ms(600_000), |room| room.ended.is_some()));
    assert_eq!((room.ended, room.report), (Some(Ok(())), Some(solo(7, SIZE, PERIODIC, 2000))));
}

#[test]
fn the_submitter_may_die_during_a_rebalance() {
    let steps = 2000;
    let submitted = |checkpoint: Option<u32>| {
        let mut room = Room::of(4, Options::lan(5), 7);
        room.world.strike(Fault::Slow { host: HostId(2), percent: 400, lasts: ms(10_000_000) });
        let mut spec = spec(Tier::None, Some(2), checkpoint, 7);
        spec.schedule.steps = steps;
        room.submit(spec);
        room
    };
    for checkpoint in [None, Some(100)] {
        let mut room = submitted(checkpoint);
        assert!(room.run(ms(60_000), |room| room.notes.iter().any(|note| note.contains("runs epoch 2"))));
        let again = room.world.now();
        for before in (0..120).step_by(20) {
            let mut room = submitted(checkpoint);
            let until = again + ms(20) - ms(before);
            while room.world.now() < until {
                room.world.run_for(ms(1));
                room.hear();
            }
            room.world.strike(Fault::Crash(SUBMITTER));
            let ended = room.run(ms(600_000), |room| room.ended.is_some());
            assert!(ended, "{before} ms before: {:?}", &room.notes[room.notes.len().saturating_sub(12)..]);
            assert_eq!((room.ended, room.report), (Some(Ok(())), Some(solo(7, SIZE, PERIODIC, steps))), "{before}");
        }
    }
}

#[test]
fn nodes_that_join_get_tiles() {
    let mut room = Room::of(1, Options::lan(6), 7);
    let steps = 6000;
    let mut spec = spec(Tier::None, Some(2), Some(100), 7);
    spec.schedule.steps = steps;
    room.submit(spec);
    assert!(room.run(ms(60_000), |room| room.step() >= 50));
    assert_eq!(room.owners.len(), 1);
    for _ in 0..2 {
        room.join();
    }
    assert!(room.run(ms(60_000), |room| room.owners.len() == 3), "{:?}", room.notes);
    // One of them dies, and the remaining nodes take over its cells.
    let victim = *room.owners.iter().find(|owner| **owner != SUBMITTER).expect("others take part");
    room.world.strike(Fault::Crash(victim));
    assert!(room.run(ms(60_000), |room| room.owners.len() == 2), "{:?}", room.notes);
    assert!(room.run(ms(600_000), |room| room.ended.is_some()));
    assert_eq!(room.ended, Some(Ok(())));
    assert_eq!(room.report, Some(solo(7, SIZE, PERIODIC, steps)));
}

#[test]
fn the_first_step_with_a_nan_is_found() {
    // Fields are checked every 50 steps, and at checkpoints.
    let cases = [(123, None), (123, Some(40)), (101, Some(70)), (50, None), (1, None), (160, Some(80)), (110, None)];
    for (depth, (after, checkpoint)) in [1, 3, 8].into_iter().flat_map(|depth| cases.map(|case| (depth, case))) {
        let mut room = Room::of(3, Options::lan(4), 7);
        let mut spec = spec(Tier::Hot, Some(depth), checkpoint, 7);
        spec.simulation = unstable(7, after);
        room.submit(spec);
        assert!(room.run(ms(120_000), |room| room.ended.is_some()), "{after}: {:?}", room.notes);
        let Some(Err(reason)) = &room.ended else { panic!("{after}: it ended without an error") };
        let [x, y, z] = UNSTABLE;
        let expected = format!("after step {after}, not before, field 0 of the cell {x}, {y}, {z} (tile ");
        assert!(reason.starts_with(&expected), "{after}: {reason}");
        assert!(room.checkpoints.iter().all(|step| *step < after), "{:?}", room.checkpoints);
    }
    // A node is lost after the NaN appeared and before it was detected.
    let mut room = Room::of(4, Options::lan(4), 7);
    let mut spec = spec(Tier::Hot, Some(2), None, 7);
    (spec.simulation, spec.schedule.report_every) = (unstable(7, 120), 200);
    room.submit(spec);
    assert!(room.run(ms(60_000), |room| room.standbys >= 4 && room.step() >= 150));
    let victim = *room.owners.iter().find(|owner| **owner != SUBMITTER).expect("others take part");
    room.world.strike(Fault::Crash(victim));
    assert!(room.run(ms(120_000), |room| room.ended.is_some()), "{:?}", room.notes);
    let Some(Err(reason)) = &room.ended else { panic!("it ended without an error") };
    assert!(reason.starts_with("after step 120, not before, field 0 of the cell 5, 20, 0 "), "{reason}");
}

#[test]
fn a_hot_standby_takes_over_within_a_second_and_a_half() {
    for at in [20, 77, 150, 290] {
        let mut room = Room::of(4, Options::lan(at.into()), 1);
        room.submit(spec(Tier::Hot, Some(2), None, 1));
        assert!(room.run(ms(60_000), |room| room.standbys >= 4 && room.step() >= at || room.ended.is_some()));
        assert!(room.ended.is_none(), "it ended too early for this test");
        let victim = *room.owners.iter().find(|owner| **owner != SUBMITTER).expect("others take part");
        let struck = room.world.now();
        room.world.strike(Fault::Crash(victim));
        room.finishes(ms(60_000));
        assert!(room.longest_pause(struck) < ms(1500), "{:?}", room.longest_pause(struck));
        assert!(room.notes.iter().any(|note| note.contains("Promoted")), "{:?}", room.notes);
    }
}

#[test]
fn a_warm_standby_replays_the_steps_since_its_snapshot() {
    let mut room = Room::of(4, Options::lan(2), 5);
    room.submit(spec(Tier::Warm, Some(2), None, 5));
    assert!(room.run(ms(60_000), |room| room.standbys >= 4 && room.step() >= 120));
    let victim = *room.owners.iter().find(|owner| **owner != SUBMITTER).expect("others take part");
    room.world.strike(Fault::Crash(victim));
    room.finishes(ms(60_000));
    assert!(room.notes.iter().any(|note| note.contains("Promoted")), "{:?}", room.notes);
}

#[test]
fn without_standbys_all_tiles_roll_back_to_a_checkpoint_or_the_start() {
    for checkpoint in [Some(60), None] {
        let mut room = Room::of(3, Options::lan(9), 2);
        room.submit(spec(Tier::None, Some(3), checkpoint, 2));
        assert!(room.run(ms(60_000), |room| room.step() >= 150));
        let victim = *room.owners.iter().find(|owner| **owner != SUBMITTER).expect("others take part");
        room.world.strike(Fault::Crash(victim));
        room.finishes(ms(120_000));
        let from = if checkpoint.is_some() { "from 120" } else { "from 0" };
        assert!(room.notes.iter().filter(|note| note.contains(from)).count() >= 1, "{:?}", room.notes);
    }
}

#[test]
fn a_successor_continues_when_the_submitter_dies() {
    for (tier, at) in [(Tier::Hot, 20), (Tier::Hot, 290), (Tier::Warm, 150), (Tier::None, 150)] {
        let mut room = Room::of(4, Options::lan(at.into()), 3);
        room.submit(spec(tier, Some(2), Some(60), 3));
        let standbys = if tier == Tier::None { 0 } else { 4 };
        assert!(room.run(ms(60_000), |room| room.standbys >= standbys && room.step() >= at || room.ended.is_some()));
        assert!(room.ended.is_none(), "it ended too early for this test");
        let struck = room.world.now();
        room.world.strike(Fault::Crash(SUBMITTER));
        room.finishes(ms(120_000));
        assert_ne!(room.coordinator, SUBMITTER);
        let pause = room.longest_pause(struck);
        assert!(tier != Tier::Hot || pause < ms(1500), "{pause:?}: {:?}", room.notes);
        if tier == Tier::None {
            // From a checkpoint that the successor has a copy of: the last one may still have been in transfer.
            let resumed = |note: &String| note.ends_with("from 120") || note.ends_with("from 60");
            assert!(room.notes.iter().any(resumed), "{:?}", room.notes);
        }
    }
}

#[test]
fn successors_take_over_in_order_and_a_minority_does_not() {
    // The submitter and its first successor die: three of five remain to vote.
    let mut room = Room::of(5, Options::lan(11), 4);
    room.submit(spec(Tier::None, Some(2), Some(50), 4));
    assert!(room.run(ms(60_000), |room| room.step() >= 120));
    let successor = room.owners.iter().copied().find(|owner| *owner != SUBMITTER).expect("others take part");
    room.world.strike(Fault::Crash(SUBMITTER));
    room.world.strike(Fault::Crash(successor));
    room.finishes(ms(120_000));
    assert!(room.coordinator != SUBMITTER && room.coordinator != successor);

    // One of two is no majority: the run does not continue, and its tiles are freed.
    let mut room = Room::of(2, Options::lan(12), 4);
    room.submit(spec(Tier::None, Some(2), None, 4));
    assert!(room.run(ms(60_000), |room| room.step() >= 120));
    room.world.strike(Fault::Crash(SUBMITTER));
    assert!(!room.run(ms(20_000), |room| room.ended.is_some()));
    assert_eq!(room.coordinator, SUBMITTER);
    assert_eq!(room.world.host(HostId(1)).node.as_ref().map(|node| node.parts().count()), Some(0));
}

#[test]
fn a_submitter_that_leaves_hands_its_simulations_over() {
    let mut room = Room::of(4, Options::lan(31), 8);
    room.submit(spec(Tier::Hot, Some(2), None, 8));
    assert!(room.run(ms(60_000), |room| room.standbys >= 4 && room.step() >= 100));
    let struck = room.world.now();
    room.world.strike(Fault::Leave(SUBMITTER));
    assert!(room.run(ms(10_000), |room| room.coordinator != SUBMITTER));
    room.ended = None;
    room.finishes(ms(60_000));
    assert!(room.longest_pause(struck) < ms(1500), "{:?}", room.notes);
}

/// A drain replays no step: the standby has the same step as the owner.
#[test]
fn a_node_that_drains_hands_its_tiles_over_without_replaying_steps() {
    let mut room = Room::of(5, Options::lan(23), 6);
    let mut spec = spec(Tier::Hot, Some(2), None, 6);
    spec.schedule.steps = 1000;
    room.submit(spec);
    assert!(room.run(ms(60_000), |room| room.standbys >= 5 && room.step() >= 60));
    let leaver = *room.owners.iter().find(|owner| **owner != SUBMITTER).expect("others take part");
    let struck = room.world.now();
    room.world.inject(leaver, Input::Drain(true));
    assert!(room.run(ms(10_000), |room| !room.owners.contains(&leaver)), "{:?}", room.notes);
    assert!(room.run(ms(120_000), |room| room.ended.is_some()));
    assert_eq!((room.ended.clone(), room.report), (Some(Ok(())), Some(solo(6, SIZE, PERIODIC, 1000))));
    let back = room.progress.windows(2).find(|pair| pair[1].1 < pair[0].1);
    assert_eq!(back, None, "no tile rolls back: {:?}", room.notes);
    assert!(room.longest_pause(struck) < ms(1000), "{:?}", room.longest_pause(struck));
}

#[test]
fn a_submitter_that_was_only_paused_stands_down() {
    let mut room = Room::of(4, Options::lan(21), 6);
    room.submit(spec(Tier::Hot, Some(2), None, 6));
    assert!(room.run(ms(60_000), |room| room.standbys >= 4 && room.step() >= 60));
    room.world.strike(Fault::Pause { host: SUBMITTER, lasts: ms(900) });
    room.finishes(ms(60_000));
    assert_ne!(room.coordinator, SUBMITTER);
    room.world.run_for(ms(3000));
    let grids = room.world.host(SUBMITTER).node.as_ref().map(|node| node.jobs().count());
    assert_eq!(grids, Some(0), "the successor has its job");
}

/// Coordinators on the two sides of a partition both continue, until one of them orders a tile from the other's node.
#[test]
fn a_coordinator_whose_node_gets_a_tile_of_another_one_stands_down() {
    for lasts in [1500, 3000] {
        let mut room = Room::of(5, Options::lan(22), 6);
        let mut spec = spec(Tier::Hot, Some(2), Some(50), 6);
        spec.schedule.steps = 1500;
        room.submit(spec);
        assert!(room.run(ms(60_000), |room| room.standbys >= 5 && room.step() >= 60));
        let (from, to) = ([0, 1].map(HostId).to_vec(), [2, 3, 4].map(HostId).to_vec());
        room.world.strike(Fault::Cut { from, to, both: true, lasts: ms(lasts) });
        assert!(room.run(ms(60_000), |room| room.ended == Some(Ok(()))), "{:?}", room.notes);
        assert_eq!(room.report, Some(solo(6, SIZE, PERIODIC, 1500)));
        room.world.run_for(ms(30_000));
        for host in 0..5 {
            let node = room.world.host(HostId(host)).node.as_ref().expect("it lives");
            assert_eq!((node.jobs().count(), node.parts().count()), (0, 0), "host {host}, cut for {lasts} ms");
        }
    }
}

/// A member claims epochs that no coordinator issued: to the coordinator as a non-participant and as the owner of a tile,
/// to the owners as a successor. A non-participant changes nothing; an owner may cause a rollback, but not the end of the
/// job.
#[test]
fn claimed_epochs_end_no_simulation() {
    let mut room = Room::of(4, Options::lan(41), 9);
    let orders = Orders::default();
    room.world.observe(Box::new(orders.clone()));
    room.submit(spec(Tier::None, Some(2), Some(50), 9));
    assert!(room.run(ms(60_000), |room| room.step() >= 60));
    let node = |room: &Room, host: HostId| room.world.host(host).node_id;
    let coordinator = node(&room, SUBMITTER);
    let owner = room.owners.iter().copied().find(|owner| *owner != SUBMITTER).expect("others take part");
    let (owner, stranger) = (node(&room, owner), NodeId([0xEE; 16]));
    let last = Epoch { counter: u32::MAX, issuer: coordinator };
    let counter = orders.0.borrow().as_ref().map(|(epoch, _)| epoch.counter).expect("tiles were ordered");
    let next = Epoch { counter: counter + 1, issuer: coordinator };
    let epoch = |room: &Room| {
        let grid = room.world.host(SUBMITTER).node.as_ref().and_then(|node| node.jobs().next());
        grid.expect("it still has a coordinator").epoch
    };
    let before = epoch(&room);
    let claims = [
        (stranger, last),
        (stranger, next),
        (stranger, Epoch { counter: counter + 5, issuer: owner }),
        (owner, last),
        (owner, Epoch { counter: u32::MAX, issuer: owner }),
        (owner, Epoch { counter: counter + 5, issuer: stranger }),
    ];
    for (from, mine) in claims {
        let bytes = codec::encode_message(&Message::Stale { job: JOB, mine }).unwrap();
        room.world.inject(SUBMITTER, Input::Message { from, bytes });
        room.run(ms(20), |_| false);
        assert_eq!(epoch(&room), before, "{from} claims {mine:?}");
    }
    // A false successor takes over the job under the highest epoch there is, so that none is left for the next one.
    let stolen = Epoch { counter: u32::MAX, issuer: owner };
    let (_, order) = orders.0.borrow().clone().unwrap();
    for host in room.owners.clone() {
        let tile = room.owners.iter().position(|owner| *owner == host).unwrap() as u16;
        let PartWork::Tile(work) = order.work.clone() else { panic!("a tile's order") };
        let work = PartWork::Tile(TileOrder { start: TileStart::Continue, ..work });
        let order = Box::new(Order { part: PartId(tile), work, ..(*order).clone() });
        let say = ToParticipant::Prepare(order);
        let bytes = codec::encode_message(&Message::ToParticipant { job: JOB, epoch: stolen, say }).unwrap();
        room.world.inject(host, Input::Message { from: owner, bytes });
    }
    room.run(ms(100), |_| false);
    assert_eq!(epoch(&room), before, "no owner follows");
    // One epoch ahead may be one that was forgotten: the tiles are ordered again, and the run continues.
    let bytes = codec::encode_message(&Message::Stale { job: JOB, mine: next }).unwrap();
    room.world.inject(SUBMITTER, Input::Message { from: owner, bytes });
    room.finishes(ms(120_000));
}

/// The last order that a coordinator sent.
#[derive(Clone, Default)]
struct Orders(Rc<RefCell<Option<Ordered>>>);

/// An order and its epoch.
type Ordered = (Epoch, Box<Order>);

impl Observer for Orders {
    fn output(&mut self, _at: Instant, _host: HostId, output: &Output) {
        if let Output::SendMessage { bytes, .. } = output
            && let Ok(Message::ToParticipant { epoch, say: ToParticipant::Prepare(order), .. }) =
                codec::decode_message(bytes)
        {
            *self.0.borrow_mut() = Some((epoch, order));
        }
    }
}

/// Small pseudo-random numbers.
fn dice(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut chance = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move |below| {
        chance ^= chance << 13;
        chance ^= chance >> 7;
        chance ^= chance << 17;
        chance % below
    }
}

/// Seeds to try: `GRID_SEEDS` of them from `GRID_FIRST` on.
fn seeds(usual: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let first = number("GRID_FIRST").unwrap_or(0);
    first..first + number("GRID_SEEDS").unwrap_or(usual)
}

#[test]
fn faults_of_the_submitter_do_not_change_the_hash() {
    for seed in seeds(12) {
        let mut draw = dice(seed + 1000);
        let hosts = 4 + draw(3) as usize;
        let tier = [Tier::None, Tier::Warm, Tier::Hot][draw(3) as usize];
        let depth = [None, Some(1), Some(3)][draw(3) as usize];
        let checkpoint = [None, Some(40), Some(100)][draw(3) as usize];
        let mut room = Room::of(hosts, Options::lan(seed), seed);
        room.submit(spec(tier, depth, checkpoint, seed));
        room.run(ms(draw(6000)), |room| room.ended.is_some());
        // Others have transient faults too, but remain to vote.
        for _ in 0..draw(3) {
            let (host, lasts) = (HostId(1 + draw(hosts as u64 - 1) as u32), ms(50 + draw(2000)));
            let fault = match draw(3) {
                0 => Fault::Pause { host, lasts },
                1 => Fault::Stall { host, lasts },
                _ => Fault::Device { host, failures: 1 },
            };
            room.notes.push(format!("{:?} {fault:?}", room.world.now()));
            room.world.strike(fault);
            room.run(ms(draw(1500)), |room| room.ended.is_some());
        }
        // Two of three must remain to vote.
        let enough = room.owners.len() >= 3;
        let fault = match draw(4) {
            0 => Fault::Pause { host: SUBMITTER, lasts: ms(400 + draw(6000)) },
            // Without a possible successor the run may be lost.
            _ if !enough => Fault::Pause { host: SUBMITTER, lasts: ms(100) },
            1 => Fault::Outage { hosts: vec![SUBMITTER], lasts: ms(200 + draw(4000)), keep_disk: draw(2) == 0 },
            _ => Fault::Crash(SUBMITTER),
        };
        room.notes.push(format!("{:?} {fault:?}", room.world.now()));
        eprintln!("seed {seed}: {hosts} hosts, {tier:?}, depth {depth:?}, checkpoints {checkpoint:?}, {fault:?}");
        if room.ended.is_none() {
            room.world.strike(fault);
        }
        room.finishes(ms(240_000));
    }
}

#[test]
fn random_faults_do_not_change_the_hash() {
    for seed in seeds(24) {
        let mut draw = dice(seed);
        let hosts = 2 + draw(4) as usize;
        let tier = [Tier::None, Tier::Warm, Tier::Hot, Tier::Hot][draw(4) as usize];
        let depth = [None, Some(1), Some(2), Some(5)][draw(4) as usize];
        let checkpoint = [None, Some(40), Some(100)][draw(3) as usize];
        let mut room = Room::of(hosts, Options::lan(seed), seed);
        room.submit(spec(tier, depth, checkpoint, seed));
        for _ in 0..1 + draw(4) {
            let (pause, victim) = (draw(4000), HostId(1 + draw(hosts as u64 - 1) as u32));
            if room.run(ms(pause), |room| room.ended.is_some()) {
                break;
            }
            let lasts = ms(50 + draw(3000));
            let fault = match draw(6) {
                0 | 1 => Fault::Outage { hosts: vec![victim], lasts, keep_disk: true },
                2 => Fault::Pause { host: victim, lasts },
                3 => Fault::Stall { host: victim, lasts },
                4 => Fault::Device { host: victim, failures: 1 },
                _ => Fault::Slow { host: victim, percent: 400, lasts },
            };
            room.notes.push(format!("{:?} {fault:?}", room.world.now()));
            room.world.strike(fault);
        }
        eprintln!("seed {seed}: {hosts} hosts, {tier:?}, depth {depth:?}, checkpoints {checkpoint:?}");
        room.finishes(ms(240_000));
    }
}
