//! A certified member that forges messages in the names of others (a Byzantine member): jobs stay where they are, requests
//! are as fast as before, and every token is right.
#![expect(clippy::wildcard_enum_match_arm, reason = "a test handles few of many events")]
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
use node_core::id::{CallId, JobId};
use node_core::input::Input;
use node_core::output::Event;
use node_core::time::Duration;
use node_core::work::serve::DoneReason;
use node_core::work::steps::{GridSpec, Schedule, StepsEvent};
use node_core::work::{Ending, JobSpec};
use partitioner::Tier;
use partitioner::tiles::GridWork;
use simnet::checker::bounds::{Bounds, leaks};
use simnet::checker::epochs::Epochs;
use simnet::checker::frames::Frames;
use simnet::checker::membership::informed;
use simnet::checker::owners::Owners;
use simnet::checker::{requests, rest};
use simnet::grids::{simulation, solo};
use simnet::workload::{request, symbolic_model};
use simnet::{Fault, HostId, HostSpec, Options, Workload, World};
use std::collections::BTreeSet;

const LAYERS: u32 = 12;
const LAYER_BYTES: u64 = 20 << 20;
/// Memory for five of the twelve layers.
const MEMORY: u64 = 297 << 20;
const COORDINATOR: HostId = HostId(0);
const JOB: JobId = JobId(0x6172);
const SIZE: [u64; 3] = [24, 40, 1];
const STEPS: u32 = 300;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

struct Room {
    world: World,
    work: Workload,
    epochs: Epochs,
    frames: Frames,
    owners: Owners,
    bounds: Bounds,
}

impl Room {
    /// A model that is served, and whose stages have standbys.
    fn serving(seed: u64) -> Room {
        let mut world = World::new(Options::lan(seed));
        let mut spec = HostSpec::default();
        (spec.capacity.devices[0].memory_total, spec.capacity.devices[0].memory_free) = (MEMORY, MEMORY);
        let hosts = world.add_hosts(8, &spec);
        hosts.iter().for_each(|&host| world.start(host));
        hosts[1..].iter().for_each(|&host| world.introduce(host, COORDINATOR));
        world.discover(ms(5_000));
        assert!(world.run_while_not(ms(20_000), ms(50), |world| informed(world, &[])), "hosts find each other");
        world.run_for(ms(1_000));
        let (epochs, frames) = (Epochs::default(), Frames::default());
        let (owners, bounds) = (Owners::default(), Bounds::default());
        world.observe(Box::new(epochs.clone()));
        world.observe(Box::new(frames.clone()));
        world.observe(Box::new(owners.clone()));
        world.observe(Box::new(bounds.clone()));
        let mut work = Workload::deploy(&mut world, COORDINATOR, symbolic_model(LAYERS, LAYER_BYTES));
        assert!(work.run_until_ready(&mut world, ms(20_000)), "{:?}", work.notes);
        work.run(&mut world, ms(5_000), |_, _| false);
        Room { world, work, epochs, frames, owners, bounds }
    }

    /// Owners of stages, then their standbys.
    fn holders(&self) -> BTreeSet<HostId> {
        let view = self.world.host(COORDINATOR).node.as_ref().and_then(|node| node.jobs().next()).expect("a job");
        let standbys = view.parts.iter().filter_map(|part| part.standby.as_ref()?.node);
        let nodes = view.parts.iter().map(|part| part.owner).chain(standbys);
        nodes.filter_map(|node| self.world.host_of(node)).collect()
    }

    /// Sends requests while a member forges messages. Returns the longest pause of a request.
    fn forge(&mut self, seed: u64, forger: HostId, messages: u32) -> Duration {
        self.world.strike(Fault::Lies { host: forger, messages, lasts: ms(20_000) });
        for number in 0..20 {
            self.work.submit(&mut self.world, request(seed * 100 + number, 30 + 20 * number as u32, 150));
            self.work.run(&mut self.world, ms(1_000), |_, _| false);
        }
        assert!(self.work.run_until_done(&mut self.world, ms(60_000)), "seed {seed}: everything ends");
        self.work.run(&mut self.world, ms(2_000), |_, _| false);
        let mut wrong = requests::violations(&self.work);
        wrong.extend(self.epochs.violations());
        wrong.extend(self.frames.violations());
        wrong.extend(self.owners.violations());
        wrong.extend(self.bounds.violations());
        wrong.extend(leaks(&self.world));
        wrong.extend(rest::orphans(&self.world));
        for (CallId(id), call) in &self.work.calls {
            if !matches!(call.ends[0].1, DoneReason::Length | DoneReason::Stop) {
                wrong.push(format!("call {id}: {:?}", call.ends));
            }
        }
        assert!(wrong.is_empty(), "seed {seed}: {wrong:#?}");
        self.work.calls.values().map(simnet::workload::Call::longest_pause).max().unwrap_or_default()
    }

    fn moves(&self) -> Vec<String> {
        let moves =
            |event: &&Event| matches!(event, Event::JobPlaced { .. } | Event::Lost { .. } | Event::JobDegraded { .. });
        self.work.notes.iter().map(|told| &told.event).filter(moves).skip(1).map(|event| format!("{event:?}")).collect()
    }
}

#[test]
fn forged_messages_of_a_non_participant_change_nothing() {
    let [mut longest, mut longest_honest] = [Duration::ZERO; 2];
    for seed in 0..12 {
        let mut room = Room::serving(seed);
        let (holders, epoch) = (room.holders(), room.work.epoch);
        let forger = (1..8).map(HostId).find(|host| !holders.contains(host)).expect("a host without a stage");
        longest = longest.max(room.forge(seed, forger, 600));
        assert!(room.work.epoch == epoch && room.moves().is_empty(), "seed {seed}: {:?}", room.moves());
        longest_honest = longest_honest.max(Room::serving(seed).forge(seed, forger, 0));
    }
    // Rows that arrive a little later share other batches, so the pauses of a single seed differ by more, in both directions. A
    // failover takes longer than that.
    assert!(longest < longest_honest + ms(60), "{longest:?}, without forged messages {longest_honest:?}");
    println!("12 non-participants, 600 forged messages each: longest pause {longest:?}");
}

#[test]
fn forged_messages_of_a_participant_cost_no_request_and_no_token() {
    let mut longest = Duration::ZERO;
    for seed in 0..12 {
        let mut room = Room::serving(100 + seed);
        let forger = room
            .work
            .stages(&room.world)
            .into_iter()
            .find(|host| *host != COORDINATOR)
            .expect("a stage on another host");
        let pause = room.forge(seed, forger, 300);
        // Its report about a neighbour is trusted once; then it is excluded itself. Each costs a loss and a placement.
        assert!(room.moves().len() <= 4, "seed {seed}: {:?}", room.moves());
        longest = longest.max(pause);
    }
    println!("12 participants, 300 forged messages each: longest pause {longest:?}");
    assert!(longest < ms(750), "{longest:?}");
}

/// A simulation with standbys: the hash is right, no tile is placed again, and no saved state is lost.
#[test]
fn forged_messages_of_a_non_participant_change_no_simulation() {
    for seed in 0..6 {
        let (honest, _) = simulate(seed, 0);
        let (lied, notes) = simulate(seed, 800);
        assert!(lied < honest + ms(300), "seed {seed}: {lied:?}, without forged messages {honest:?}: {notes:#?}");
    }
}

/// Runs a simulation; returns how long it took, and what was reported of it.
fn simulate(seed: u64, messages: u32) -> (Duration, Vec<String>) {
    let mut world = World::new(Options::lan(seed));
    let mut spec = HostSpec::default();
    spec.capacity.devices[0].copy_bytes_per_second = 100_000_000;
    let hosts = world.add_hosts(4, &spec);
    hosts.iter().for_each(|&host| world.start(host));
    hosts[1..].iter().for_each(|&host| world.introduce(host, COORDINATOR));
    assert!(world.run_while_not(ms(20_000), ms(50), |world| informed(world, &[])), "hosts find each other");
    world.run_for(ms(1_000));
    // A member that drains takes no work: it is a non-participant.
    let forger = world.add_hosts(1, &spec)[0];
    world.start(forger);
    world.introduce(forger, COORDINATOR);
    world.inject(forger, Input::Drain(true));
    world.run_for(ms(3_000));
    let began = world.now();
    world.inject(COORDINATOR, Input::Start { call: CallId(1), job: Box::new(JobSpec::Steps(grid(seed))) });
    world.run_for(ms(200));
    world.strike(Fault::Lies { host: forger, messages, lasts: ms(1_500) });
    let (mut hash, mut ended, mut notes) = (None, None, Vec::new());
    world.run_for(ms(15_000));
    let mut checkpoints = Vec::new();
    for told in world.take_notifications() {
        match told.event {
            Event::Steps { event: StepsEvent::Report { step: STEPS, report }, .. } => hash = report.hash.or(hash),
            Event::Steps { event: StepsEvent::Checkpoint { step }, .. } => checkpoints.push(step),
            Event::Steps { event: StepsEvent::Progress { .. } | StepsEvent::Runs { .. }, .. } => {}
            Event::JobEnded { ending: Ending::Completed, .. } => ended = Some(told.at.since(began)),
            other => notes.push(format!("{:?} {:?} {other:?}", told.at, told.host)),
        }
    }
    assert_eq!(hash, Some(solo(seed, SIZE, [true, false, false], STEPS)), "seed {seed}: {notes:#?}");
    assert_eq!(checkpoints, [60, 120, 180, 240, 300], "seed {seed}: {notes:#?}");
    let placed = notes.iter().filter(|note| note.contains("JobPlaced")).count();
    assert_eq!(placed, 1, "seed {seed}: {notes:#?}");
    (ended.unwrap_or_else(|| panic!("seed {seed}: it has not ended: {notes:#?}")), notes)
}

fn grid(seed: u64) -> GridSpec {
    GridSpec {
        job: JOB,
        name: "mixing".into(),
        simulation: simulation(seed),
        work: GridWork {
            size: SIZE,
            periodic: [true, false, false],
            radius: 1,
            state_bits: 1 << 16,
            traffic_bits: 1 << 16,
            face_bits: 64,
            cell_bits: 64,
            align_x: 1,
            scratch_bytes: 1 << 20,
            pass_steps: 1,
        },
        depth: Some(2),
        schedule: Schedule {
            steps: STEPS,
            report_every: 50,
            checkpoint_every: Some(60),
            outputs: vec![25],
            looks: None,
        },
        tier: Tier::Warm,
        resume: None,
    }
}
