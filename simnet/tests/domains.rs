//! Failure domains: the loss of whole zones, of an owner together with its standby, of owners that are standbys of other
//! stages, and of a coordinator together with its first successor. Such a loss costs a replay, never a request or a run.
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
#![expect(clippy::wildcard_enum_match_arm, reason = "a test handles few of many events")]
use node_core::id::{CallId, JobId, NodeId};
use node_core::input::Input;
use node_core::job::{JobView, PartView};
use node_core::output::Event;
use node_core::time::{Duration, Instant};
use node_core::work::steps::{GridSpec, Schedule, StepsEvent};
use node_core::work::{Ending, JobSpec, Placement};
use partitioner::Tier;
use partitioner::tiles::GridWork;
use simnet::checker::{membership, requests};
use simnet::grids::{simulation, solo};
use simnet::workload::{request, symbolic_model};
use simnet::{Fault, HostId, HostSpec, Options, Workload, World};

const COORDINATOR: HostId = HostId(0);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Hosts that have joined.
fn mesh(options: Options, specs: Vec<HostSpec>) -> World {
    let mut world = World::new(options);
    for spec in specs {
        let id = world.add_host(spec);
        world.start(id);
        if id != COORDINATOR {
            world.introduce(id, COORDINATOR);
        }
    }
    let settled = world.run_while_not(ms(20_000), ms(50), |world| membership::informed(world, &[]));
    assert!(settled, "the hosts find each other: {:?}", membership::divergences(&world, &[]));
    world.run_for(ms(1000));
    world
}

fn zone_of(world: &World, node: NodeId) -> &str {
    world.host_of(node).map_or("", |host| &world.host(host).spec.capacity.zone)
}

fn kill(world: &mut World, hosts: &[HostId]) {
    hosts.iter().for_each(|&host| world.strike(Fault::Crash(host)));
}

// ---- models

/// A mesh that serves a model of twelve layers.
struct Served {
    world: World,
    work: Workload,
}

impl Served {
    fn of(options: Options, specs: Vec<HostSpec>) -> Served {
        let mut world = mesh(options, specs);
        let model = symbolic_model(12, 20 << 20);
        // All hosts have the weights: transfers are not tested here.
        let hosts: Vec<HostId> = world.hosts().map(|host| host.id).collect();
        hosts.into_iter().for_each(|host| world.give_model(host, model.content, 12));
        let mut work = Workload::deploy(&mut world, COORDINATOR, model);
        assert!(work.run_until_ready(&mut world, ms(10_000)), "the model is served: {:?}", work.notes);
        Served { world, work }
    }

    fn view(&self) -> JobView {
        self.world.host(COORDINATOR).node.as_ref().and_then(|node| node.jobs().next()).expect("the job")
    }

    fn host(&self, node: NodeId) -> HostId {
        self.world.host_of(node).expect("a host")
    }

    /// Runs until each stage, except those of the coordinator and of `but`, has a resident standby that is not cold.
    fn settle(&mut self, but: HostId) {
        let without = [COORDINATOR, but].map(|host| self.world.host(host).node_id);
        let ready = |part: &PartView| {
            let standby = part.standby.as_ref();
            without.contains(&part.owner)
                || standby.is_some_and(|s| s.node.is_some() && s.resident && s.tier != Tier::Cold)
        };
        let settled = self.work.run(&mut self.world, ms(15_000), |_, world| {
            let job = world.host(COORDINATOR).node.as_ref().and_then(|node| node.jobs().next());
            job.is_some_and(|job| job.parts.iter().all(ready))
        });
        assert!(settled, "all stages have standbys: {:#?}", self.view().parts);
        self.run_for(ms(2000));
    }

    fn run_for(&mut self, time: Duration) {
        self.work.run(&mut self.world, time, |_, _| false);
    }

    /// Asserts that all requests end as on one host. Returns the longest wait for a token.
    fn check(&mut self, what: &str) -> Duration {
        assert!(self.work.run_until_done(&mut self.world, ms(120_000)), "{what}: {:#?}", self.work.notes);
        assert_eq!(requests::violations(&self.work), Vec::<String>::new(), "{what}");
        self.work.calls.values().map(simnet::workload::Call::longest_pause).max().unwrap_or_default()
    }
}

/// A host with memory for this number of layers.
fn with_room(layers: u64, zone: &str) -> HostSpec {
    let mut spec = HostSpec::default();
    // Weights, caches of 8 requests of 4096 positions, and the embedding and output head.
    let bytes = layers * (20 << 20) + layers * (8 * 4096 * position_bytes()) + (24 << 20);
    (spec.capacity.devices[0].memory_total, spec.capacity.devices[0].memory_free) = (bytes, bytes);
    spec.capacity.zone = zone.into();
    spec
}

fn position_bytes() -> u64 {
    symbolic_model(1, 1).work.layers[0].kv_bytes_per_token
}

#[test]
fn standbys_in_another_zone_take_over_the_stages_of_a_lost_zone() {
    let mut pauses = Vec::new();
    for seed in 0..5 {
        let zones = ["attic", "attic", "cellar", "attic", "cellar", "cellar", "attic", "cellar"];
        let specs = zones.map(|zone| with_room(5, zone)).to_vec();
        let mut served = Served::of(Options::lan(seed), specs);
        served.work.submit(&mut served.world, request(seed, 300, 1500));
        served.settle(COORDINATOR);
        let view = served.view();
        for part in view.parts.iter().filter(|part| served.host(part.owner) != COORDINATOR) {
            let standby = part.standby.as_ref().and_then(|standby| standby.node).expect("a standby");
            assert_ne!(zone_of(&served.world, part.owner), zone_of(&served.world, standby), "{:#?}", view.parts);
        }
        let gone: Vec<HostId> = (0..8).map(HostId).filter(|host| zones[host.index()] == "cellar").collect();
        let lost = view.parts.iter().filter(|part| gone.contains(&served.host(part.owner))).count();
        assert!(lost > 0, "{:#?}", view.parts);
        kill(&mut served.world, &gone);
        let pause = served.check(&format!("a zone dies, seed {seed}"));
        assert!(pause <= ms(1000), "seed {seed}: {pause:?}: {:#?}", served.work.notes);
        pauses.push((lost, pause.as_millis()));
    }
    println!("a zone dies: stages lost and longest pause in ms {pauses:?}");
}

/// Two fast hosts hold five layers each, and a slow one with spare memory the rest: besides its own stage it is the standby
/// of both. If one of them is lost, or both, it owns several stages, adjacent or not.
#[test]
fn the_owner_of_a_stage_takes_over_another_one_and_holds_both() {
    let mut results = Vec::new();
    for (slow, seed) in [(1, 1), (2, 2), (3, 3)] {
        for (victims, apart) in [(1, 0), (2, 0), (2, 20), (2, 300)] {
            for at in 0..2 {
                let specs = (0..4).map(|host| match host {
                    0 => with_room(0, ""),
                    _ if host == slow => {
                        let mut spec = with_room(14, "");
                        spec.capacity.devices[0].bytes_per_second = spec.capacity.devices[0].bytes_per_second * 10 / 16;
                        spec
                    }
                    _ => with_room(5, ""),
                });
                let mut served = Served::of(Options::lan(seed), specs.collect());
                let (host, slow) = (HostId(slow), served.world.host(HostId(slow)).node_id);
                served.work.submit(&mut served.world, request(seed, 300, 1000));
                served.settle(host);
                let view = served.view();
                let standby = |part: &PartView| part.standby.as_ref().and_then(|standby| standby.node);
                let fast: Vec<&PartView> = view.parts.iter().filter(|part| part.owner != slow).collect();
                assert!(view.parts.len() == 3 && fast.len() == 2, "{:#?}", view.parts);
                assert!(fast.iter().all(|part| standby(part) == Some(slow)), "{:#?}", view.parts);
                let tiers: Vec<Tier> = fast.iter().filter_map(|part| Some(part.standby.as_ref()?.tier)).collect();
                let gone: Vec<HostId> =
                    fast.iter().cycle().skip(at).take(victims).map(|part| served.host(part.owner)).collect();
                for victim in &gone {
                    kill(&mut served.world, &[*victim]);
                    served.run_for(ms(apart));
                }
                served.run_for(ms(2000));
                let owned = served.view().parts.iter().filter(|part| part.owner == slow).count();
                assert_eq!(owned, 1 + victims, "{:#?}", served.work.notes);
                let what = format!("{gone:?} die {apart} ms apart");
                let pause = served.check(&what);
                assert!(pause <= ms(3000), "{what}: {pause:?}: {:#?}", served.work.notes);
                results.push((victims, apart, tiers, pause.as_millis()));
            }
        }
    }
    println!("fast owners die, a slow owner takes over: victims, ms apart, tiers, longest pause in ms {results:?}");
}

#[test]
fn an_owner_and_its_standby_lost_at_once_cost_a_replay() {
    let mut pauses = Vec::new();
    for seed in 0..5 {
        let mut served = Served::of(Options::lan(seed), (0..8).map(|_| with_room(5, "")).collect());
        for call in 0..3 {
            served.work.submit(&mut served.world, request(seed * 10 + call, 300, 600));
        }
        served.settle(COORDINATOR);
        let view = served.view();
        let part = view.parts.iter().find(|part| served.host(part.owner) != COORDINATOR).expect("a stage");
        let standby = part.standby.as_ref().and_then(|standby| standby.node).expect("a standby");
        let gone = [served.host(part.owner), served.host(standby)];
        kill(&mut served.world, &gone);
        let pause = served.check(&format!("an owner and its standby, seed {seed}"));
        assert!(pause <= ms(3000), "seed {seed}: {pause:?}: {:#?}", served.work.notes);
        pauses.push(pause.as_millis());
    }
    println!("an owner and its standby die at once: longest pauses {pauses:?} ms");
}

/// One host holds ten of twelve layers, and no other one has memory for ten: two hosts are the standbys of one half each.
#[test]
fn two_standbys_take_over_a_stage_too_large_for_one() {
    let mut pauses = Vec::new();
    for seed in 0..5 {
        let specs = [2, 11, 6, 6].map(|layers| with_room(layers, "")).to_vec();
        let mut served = Served::of(Options::lan(seed), specs);
        served.work.submit(&mut served.world, request(seed, 300, 1000));
        served.settle(COORDINATOR);
        let view = served.view();
        let large = served.world.host(HostId(1)).node_id;
        let halves: Vec<&PartView> = view.parts.iter().filter(|part| part.owner == large).collect();
        let standbys: Vec<HostId> = halves
            .iter()
            .filter_map(|part| Some(served.host(part.standby.as_ref().filter(|standby| standby.current)?.node?)))
            .collect();
        assert!(matches!(standbys[..], [HostId(2), HostId(3)] | [HostId(3), HostId(2)]), "{:#?}", view.parts);
        kill(&mut served.world, &[HostId(1)]);
        let pause = served.check(&format!("the owner of both halves dies, seed {seed}"));
        assert!(pause <= ms(1000), "seed {seed}: {pause:?}: {:#?}", served.work.notes);
        pauses.push(pause.as_millis());
    }
    println!("the owner of both halves dies: longest pauses {pauses:?} ms");
}

// ---- simulations

const JOB: JobId = JobId(0x6172);
const STEPS: u32 = 300;
const SIZE: [u64; 3] = [24, 40, 1];
const PERIODIC: [bool; 3] = [true, false, false];

/// A mesh that computes a simulation.
struct Stepped {
    world: World,
    coordinator: HostId,
    seed: u64,
    standbys: usize,
    progress: Vec<(Instant, u32)>,
    report: Option<u128>,
    ended: Option<Ending>,
    notes: Vec<String>,
}

impl Stepped {
    /// Hosts slow enough that a small grid is worth sharing, in these zones.
    fn of(zones: &[&str], options: Options, (tier, checkpoint, seed): (Tier, Option<u32>, u64)) -> Stepped {
        let spec = |zone: &&str| {
            let mut spec = HostSpec::default();
            (spec.capacity.devices[0].copy_bytes_per_second, spec.capacity.zone) = (100_000_000, (*zone).into());
            spec
        };
        let mut world = mesh(options, zones.iter().map(spec).collect());
        let work = GridWork {
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
        };
        let schedule =
            Schedule { steps: STEPS, report_every: 50, checkpoint_every: checkpoint, outputs: Vec::new(), looks: None };
        let (name, simulation) = ("mixing".into(), simulation(seed));
        let spec = GridSpec { job: JOB, name, simulation, work, depth: Some(2), schedule, tier, resume: None };
        world.inject(COORDINATOR, Input::Start { call: CallId(1), job: Box::new(JobSpec::Steps(spec)) });
        let (progress, notes) = (Vec::new(), Vec::new());
        let (report, ended) = (None, None);
        Stepped { world, coordinator: COORDINATOR, seed, standbys: 0, progress, report, ended, notes }
    }

    fn step(&self) -> u32 {
        self.progress.last().map_or(0, |(_, step)| *step)
    }

    fn view(&self) -> JobView {
        self.world.host(self.coordinator).node.as_ref().and_then(|node| node.jobs().next()).expect("the job")
    }

    fn host(&self, node: NodeId) -> HostId {
        self.world.host_of(node).expect("a host")
    }

    fn hear(&mut self) {
        for told in self.world.take_notifications() {
            if let Event::JobInherited { .. } = &told.event {
                self.coordinator = told.host;
            }
            if told.host != self.coordinator {
                continue;
            }
            match told.event {
                Event::Standby { current: true, .. } => self.standbys += 1,
                Event::JobPlaced { placement, .. } => {
                    if let Placement::Tiles { step, .. } = *placement {
                        self.notes.push(format!("{:?} placed from {step}", told.at));
                    }
                }
                Event::JobEnded { ending, .. } => self.ended = Some(ending),
                Event::Steps { event: StepsEvent::Progress { step }, .. } => self.progress.push((told.at, step)),
                Event::Steps { event: StepsEvent::Report { report, .. }, .. } => {
                    self.report = report.hash.or(self.report);
                }
                event => self.notes.push(format!("{:?} {:?} {event:?}", told.at, told.host)),
            }
        }
    }

    fn run(&mut self, limit: Duration, mut done: impl FnMut(&Stepped) -> bool) -> bool {
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

    /// Runs until all tiles have current standbys and have completed this step.
    fn reach(&mut self, standbys: usize, step: u32) {
        let reached = self.run(ms(60_000), |run| run.standbys >= standbys && run.step() >= step);
        assert!(reached && self.ended.is_none(), "{}: {:#?}", self.step(), self.notes);
    }

    /// Runs to the end, and checks the hash.
    fn finishes(&mut self, what: &str) {
        let ended = self.run(ms(120_000), |run| run.ended.is_some());
        assert!(ended, "{what}: at step {}: {:#?}", self.step(), self.notes);
        assert!(matches!(self.ended, Some(Ending::Completed)), "{what}: {:?}: {:#?}", self.ended, self.notes);
        assert_eq!(self.report, Some(solo(self.seed, SIZE, PERIODIC, STEPS)), "{what}: {:#?}", self.notes);
    }

    /// The lowest step that was reported after `from`.
    fn back_to(&self, from: Instant) -> u32 {
        self.progress.iter().filter(|(at, _)| *at > from).map(|(_, step)| *step).min().unwrap_or(STEPS)
    }

    fn longest_pause(&self, from: Instant) -> Duration {
        let later = self.progress.windows(2).filter(|pair| pair[1].0 >= from);
        later.map(|pair| pair[1].0.since(pair[0].0)).max().unwrap_or_default()
    }

    /// Owner and standby of each tile.
    fn pairs(&self) -> Vec<(HostId, HostId)> {
        let pair = |part: &PartView| {
            let standby = part.standby.as_ref().and_then(|standby| standby.node).expect("a standby");
            (self.host(part.owner), self.host(standby))
        };
        self.view().parts.iter().map(pair).collect()
    }
}

/// The coordinator is in the attic. If that zone is lost, a majority remains in the cellar to vote.
#[test]
fn a_simulation_survives_the_loss_of_a_zone() {
    let mut results = Vec::new();
    for (zones, dies) in [
        (["attic", "cellar", "attic", "cellar", "cellar"], "attic"),
        (["attic", "attic", "cellar", "cellar", "cellar"], "attic"),
        (["attic", "attic", "cellar", "attic", "cellar"], "cellar"),
    ] {
        for seed in 0..3 {
            let mut run = Stepped::of(&zones, Options::lan(seed), (Tier::Hot, None, seed));
            run.reach(5, 60);
            for (owner, standby) in run.pairs() {
                assert_ne!(zones[owner.index()], zones[standby.index()], "{:#?}", run.view().parts);
            }
            let gone: Vec<HostId> = (0..5).map(HostId).filter(|host| zones[host.index()] == dies).collect();
            let struck = run.world.now();
            kill(&mut run.world, &gone);
            run.finishes(&format!("the {dies} of {zones:?} dies, seed {seed}"));
            assert_eq!(run.coordinator != COORDINATOR, dies == "attic");
            assert_ne!(zones[run.coordinator.index()], dies);
            let pause = run.longest_pause(struck);
            assert!(run.back_to(struck) >= 50 && pause < ms(1500), "{pause:?}: {:#?}", run.notes);
            results.push((dies, gone.len(), pause.as_millis()));
        }
    }
    println!("a zone dies under a simulation: zone, hosts lost, longest pause in ms {results:?}");
}

#[test]
fn standbys_take_over_two_tiles_lost_within_a_lease() {
    let mut results = Vec::new();
    for apart in [0, 5, 50, 150, 300] {
        for seed in 0..3 {
            let mut run = Stepped::of(&[""; 6], Options::lan(seed), (Tier::Hot, None, seed));
            run.reach(6, 40);
            let pairs = run.pairs();
            let others = || pairs.iter().filter(|(owner, _)| *owner != COORDINATOR);
            let two = others().find_map(|&(first, standby)| {
                let second = others().find(|(owner, by)| *owner != first && *owner != standby && *by != first)?;
                Some([first, second.0])
            });
            let [first, second] = two.expect("two owners that are not each other's standbys");
            let struck = run.world.now();
            kill(&mut run.world, &[first]);
            run.run(ms(apart), |_| false);
            kill(&mut run.world, &[second]);
            let what = format!("two owners {apart} ms apart, seed {seed}");
            run.finishes(&what);
            let pause = run.longest_pause(struck);
            assert!(run.back_to(struck) >= 30 && pause < ms(1500), "{what}: {:#?}", run.notes);
            results.push((apart, pause.as_millis()));
        }
    }
    println!("two owners of tiles die: ms apart, longest pause in ms {results:?}");
}

#[test]
fn a_tile_lost_with_its_standby_rolls_back_to_the_last_checkpoint() {
    for seed in 0..3 {
        let mut run = Stepped::of(&[""; 5], Options::lan(seed), (Tier::Hot, Some(40), seed));
        run.reach(5, 110);
        let pairs = run.pairs();
        let (owner, standby) = *pairs
            .iter()
            .find(|(owner, standby)| *owner != COORDINATOR && *standby != COORDINATOR)
            .expect("both on other hosts");
        let struck = run.world.now();
        kill(&mut run.world, &[owner, standby]);
        run.finishes(&format!("an owner and its standby, seed {seed}"));
        assert!(run.back_to(struck) >= 40, "{:#?}", run.notes);
    }
}

/// The second successor also has a copy of the checkpoint.
#[test]
fn a_coordinator_and_its_first_successor_lost_at_once_cost_a_replay_since_a_checkpoint() {
    for (zones, seed) in [([""; 5], 1), ([""; 5], 2), (["a", "a", "a", "b", "b"], 3), (["a", "b", "a", "b", "c"], 4)] {
        let mut run = Stepped::of(&zones, Options::lan(seed), (Tier::None, Some(100), seed));
        run.reach(0, 250);
        let mut owners: Vec<HostId> = run.view().parts.iter().map(|part| run.host(part.owner)).collect();
        owners.retain(|owner| *owner != COORDINATOR);
        // As the coordinator orders them: those in another zone first.
        owners.sort_by_key(|owner| zones[owner.index()] == zones[0]);
        let struck = run.world.now();
        kill(&mut run.world, &[COORDINATOR, owners[0]]);
        run.finishes(&format!("{zones:?}, seed {seed}"));
        assert_eq!(run.coordinator, owners[1], "{:#?}", run.notes);
        assert!(run.back_to(struck) >= 100, "{:#?}", run.notes);
    }
}
