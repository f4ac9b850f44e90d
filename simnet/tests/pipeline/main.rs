//! A model served by symbolic stages while hosts crash, pause, or lose their connections or devices: callers receive the
//! tokens of a run on one host, each once and in order, and nothing leaks.
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
#![expect(clippy::wildcard_enum_match_arm, reason = "a test handles few of many events")]
use node_core::id::{CallId, JobId};
use node_core::job::PartView;
use node_core::limits::DETACHED_MAX;
use node_core::output::Event;
use node_core::time::Duration;
use node_core::work::serve::DoneReason;
use rand::RngExt;
use simnet::checker::bounds::{Bounds, leaks};
use simnet::checker::epochs::Epochs;
use simnet::checker::{membership, requests};
use simnet::options::chance;
use simnet::workload::{request, symbolic_model};
use simnet::{Fault, HostId, HostSpec, Options, Workload, World, faults};

mod bubble;
mod cache;
mod coordinator;
mod drafting;
mod fairness;

/// A mesh that serves a model of which each host holds at most five of twelve layers.
struct Room {
    world: World,
    hosts: Vec<HostId>,
    work: Workload,
    epochs: Epochs,
    bounds: Bounds,
}

const LAYERS: u32 = 12;
const LAYER_BYTES: u64 = 20 << 20;
const HOST_MEMORY: u64 = 297 << 20;
const COORDINATOR: HostId = HostId(0);

/// A host whose device has this memory, in bytes.
fn with_memory(bytes: u64) -> HostSpec {
    let mut spec = HostSpec::default();
    (spec.capacity.devices[0].memory_total, spec.capacity.devices[0].memory_free) = (bytes, bytes);
    spec
}

impl Room {
    /// `n` hosts that have joined, without a model.
    fn empty(options: Options, n: usize, spec: &HostSpec) -> (World, Vec<HostId>) {
        let mut world = World::new(options);
        let hosts = world.add_hosts(n, spec);
        hosts.iter().for_each(|&host| world.start(host));
        hosts[1..].iter().for_each(|&host| world.introduce(host, hosts[0]));
        let settled = world.run_while_not(ms(20_000), ms(50), |world| membership::informed(world, &[]));
        assert!(settled, "{n} hosts find each other: {:?}", membership::divergences(&world, &[]));
        world.run_for(ms(1000)); // connections are established
        (world, hosts)
    }

    fn serving(options: Options, n: usize) -> Room {
        let mut room = Room::deploying(options, n);
        let ready = room.work.run_until_ready(&mut room.world, ms(10_000));
        assert!(ready, "the model is served: {:?}", room.work.notes);
        room
    }

    /// The same where every host has the whole model on its disk.
    fn serving_stored(options: Options, n: usize) -> Room {
        let mut room = Room::deploying_stored(options, n, true);
        let ready = room.work.run_until_ready(&mut room.world, ms(10_000));
        assert!(ready, "the model is served: {:?}", room.work.notes);
        room
    }

    fn deploying(options: Options, n: usize) -> Room {
        Room::deploying_stored(options, n, false)
    }

    fn deploying_stored(options: Options, n: usize, stored: bool) -> Room {
        let (mut world, hosts) = Room::empty(options, n, &with_memory(HOST_MEMORY));
        let model = symbolic_model(LAYERS, LAYER_BYTES);
        hosts.iter().filter(|_| stored).for_each(|&host| world.give_model(host, model.content, LAYERS));
        let (epochs, bounds) = (Epochs::default(), Bounds::default());
        world.observe(Box::new(epochs.clone()));
        world.observe(Box::new(bounds.clone()));
        let work = Workload::deploy(&mut world, COORDINATOR, model);
        Room { world, hosts, work, epochs, bounds }
    }

    fn submit(&mut self, seed: u64, prompt: u32, max_tokens: u32) -> CallId {
        self.work.submit(&mut self.world, request(seed, prompt, max_tokens))
    }

    fn strike(&mut self, fault: Fault) {
        if let Fault::Crash(host) = fault {
            self.epochs.forget(host);
            self.bounds.forget(host);
        }
        self.world.strike(fault);
    }

    fn run_for(&mut self, time: Duration) {
        self.work.run(&mut self.world, time, |_, _| false);
    }

    /// A host that holds a stage now and is not the coordinator.
    fn some_stage(&self, draw: u64) -> Option<HostId> {
        let others: Vec<HostId> =
            self.work.stages(&self.world).into_iter().filter(|&host| host != COORDINATOR).collect();
        (!others.is_empty()).then(|| others[draw as usize % others.len()])
    }

    /// The host that loads or holds the stage of `owner` as its standby.
    fn standby_of(&self, owner: HostId) -> Option<HostId> {
        let stage = self.work.stages(&self.world).iter().position(|&host| host == owner)?;
        let job = self.world.host(COORDINATOR).node.as_ref()?.jobs().next()?;
        let standby = job.parts.get(stage)?.standby.clone()?;
        self.world.host_of(standby.node?)
    }

    /// Runs until all requests have ended and the mesh is at rest, and checks the invariants.
    fn check(mut self, what: &str) -> Room {
        let mut ended = self.work.run_until_done(&mut self.world, ms(120_000));
        // Their host was away, and the successor that took over the job is lost: callers send these again.
        let lost = |call: &simnet::workload::Call| matches!(call.ends.first(), Some((_, DoneReason::Failed(why))) if why.contains("serves the model no more"));
        for _ in 0..8 {
            let again: Vec<_> = self.work.calls.extract_if(.., |_, call| lost(call)).collect();
            if again.is_empty() {
                break;
            }
            self.work.job = None;
            self.work.turn_to(&mut self.world, COORDINATOR);
            assert!(self.work.run_until_ready(&mut self.world, ms(60_000)), "{what}: {:?}", self.work.notes.last());
            for (_, call) in again {
                self.work.submit_again(&mut self.world, call.request);
            }
            ended = self.work.run_until_done(&mut self.world, ms(120_000));
        }
        self.run_for(ms(3_000));
        // A successor continues requests for a while even if no caller asks for them.
        let end = self.world.now() + DETACHED_MAX + ms(5_000);
        while !leaks(&self.world).is_empty() && self.world.now() < end {
            self.run_for(ms(500));
        }
        let mut wrong = requests::violations(&self.work);
        wrong.extend(self.epochs.violations());
        wrong.extend(self.bounds.violations());
        wrong.extend(leaks(&self.world));
        let differs = |told: &&simnet::Notification| matches!(&told.event, Event::Rejected { what, .. } if what.contains("same bits"));
        wrong.extend(self.work.notes.iter().find(differs).map(|event| format!("{event:?}")));
        let notes: Vec<String> =
            self.work.notes.iter().map(|told| format!("{} {:?}", told.at.0 / 1_000_000, told.event)).collect();
        assert!(ended && wrong.is_empty(), "{what}: {wrong:#?}\n{}", notes.join("\n"));
        self
    }

    fn assert_all_finished(&self, what: &str) {
        for (id, call) in &self.work.calls {
            let finished = call.cancelled || matches!(call.ends[0].1, DoneReason::Length | DoneReason::Stop);
            assert!(finished, "{what}: call {} ended with {:?}", id.0, call.ends);
        }
    }

    fn longest_pause(&self) -> Duration {
        self.work.calls.values().map(|call| call.longest_pause()).max().unwrap_or_default()
    }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Seeds to try: few by default, `SIMNET_SEEDS` of them, or only `SIMNET_SEED`.
fn seeds(default: u64) -> std::ops::Range<u64> {
    let read = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    match read("SIMNET_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..read("SIMNET_SEEDS").unwrap_or(default),
    }
}

#[test]
fn a_quiet_mesh_answers_as_one_host() {
    let mut room = Room::serving(Options::lan(1), 5);
    assert!(room.work.stages(&room.world).len() >= 3);
    for n in 0..8 {
        room.submit(n, 20 + 150 * n as u32, 40);
    }
    let room = room.check("quiet");
    room.assert_all_finished("quiet");
}

#[test]
fn the_loss_of_one_stage_at_any_moment_changes_no_answer() {
    let mut longest = Duration::ZERO;
    for seed in seeds(40) {
        let what = format!("one death, seed {seed}");
        let mut draw = chance(seed, "one death");
        let mut room = Room::serving(Options::swarm(seed), 6);
        for n in 0..draw.random_range(1..4u64) {
            room.submit(seed * 10 + n, draw.random_range(1..1800), draw.random_range(5..60));
        }
        room.run_for(Duration::from_micros(draw.random_range(0..2_500_000)));
        if let Some(victim) = room.some_stage(draw.random_range(0..100)) {
            room.strike(Fault::Crash(victim));
        }
        let room = room.check(&what);
        room.assert_all_finished(&what);
        longest = longest.max(room.longest_pause());
    }
    println!("one death: longest pause seen by a caller {longest:?}");
}

/// Virtual time, so the results are the same on any machine; their components are printed as well.
#[test]
fn a_dead_stage_with_a_standby_stalls_generation_only_until_it_is_detected() {
    let (mut stalls, mut noticed, mut placed) = (Vec::new(), Vec::new(), Vec::new());
    for seed in seeds(100) {
        let what = format!("stall, seed {seed}");
        let mut draw = chance(seed, "stall");
        let mut room = Room::serving(Options { loss_ppm: 10_000, ..Options::lan(seed) }, 6);
        settle(&mut room);
        let call = room.submit(seed, draw.random_range(1..400), 400);
        room.work.run(&mut room.world, ms(5_000), |work, _| work.calls[&call].tokens.len() > 20);
        room.run_for(Duration::from_micros(draw.random_range(0..200_000)));
        let victim = room.some_stage(draw.random_range(0..100)).expect("a stage that is not the coordinator's");
        let killed = room.world.now();
        room.strike(Fault::Crash(victim));
        let room = room.check(&what);
        room.assert_all_finished(&what);
        let told = |what: fn(&Event) -> bool| {
            let notes = room.work.notes.iter().filter(|told| told.at >= killed);
            notes.filter(|told| what(&told.event)).map(|told| told.at.since(killed)).min()
        };
        noticed.extend(told(|event| matches!(event, Event::Lost { .. })));
        placed.extend(told(|event| matches!(event, Event::JobReady { .. })));
        let tokens = &room.work.calls[&call].tokens;
        // Tokens in flight still arrive: the stall is the longest wait from the crash on.
        let waits = tokens.windows(2).map(|pair| (pair[0].0.max(killed), pair[1].0)).filter(|(_, to)| *to > killed);
        stalls.push(waits.map(|(from, to)| to.since(from)).max().unwrap_or_default());
    }
    [&mut stalls, &mut noticed, &mut placed].into_iter().for_each(|times| times.sort());
    let of_100 = |sorted: &[Duration], percent: usize| sorted[(sorted.len() * percent).div_ceil(100) - 1];
    println!(
        "{} generations of which a stage dies: the coordinator detects it after {:?} (median), {:?} (99th percentile); \
         the job is placed again after {:?}, {:?}; the next token arrives after {:?}, {:?}, at most {:?}",
        stalls.len(),
        of_100(&noticed, 50),
        of_100(&noticed, 99),
        of_100(&placed, 50),
        of_100(&placed, 99),
        of_100(&stalls, 50),
        of_100(&stalls, 99),
        of_100(&stalls, 100),
    );
    assert!(of_100(&noticed, 99) < ms(400), "{:?}", noticed.last());
    assert!(of_100(&stalls, 50) < ms(450) && of_100(&stalls, 99) < ms(1000), "{:?}", stalls.last());
}

/// Runs until every stage but the coordinator's has a current standby.
fn settle(room: &mut Room) {
    let covered = |_: &Workload, world: &World| {
        let job = world.host(COORDINATOR).node.as_ref().and_then(|node| node.jobs().next());
        job.is_some_and(|job| {
            let current = |part: &PartView| part.standby.as_ref().is_some_and(|standby| standby.current);
            let current = job.parts.iter().filter(|part| current(part)).count();
            current > 0
                && current == job.parts.iter().filter(|part| part.owner != world.host(COORDINATOR).node_id).count()
        })
    };
    assert!(room.work.run(&mut room.world, ms(10_000), covered), "all stages have standbys: {:?}", room.work.notes);
}

/// The second loss occurs before the standbys have answered under the epoch that followed the first one.
#[test]
fn two_owners_lost_within_a_lease_cost_no_more_than_one() {
    for apart in [0, 5, 20, 50, 100, 200, 300, 340] {
        let mut pauses = Vec::new();
        for seed in 1..=5 {
            let mut room = Room::serving(Options::lan(seed), 8);
            room.submit(seed, 300, 1500);
            settle(&mut room);
            room.run_for(ms(2000));
            let stages = room.work.stages(&room.world);
            room.strike(Fault::Crash(stages[1]));
            room.run_for(ms(apart));
            room.strike(Fault::Crash(stages[2]));
            let what = format!("{apart} ms apart, seed {seed}");
            let room = room.check(&what);
            room.assert_all_finished(&what);
            assert!(room.longest_pause() <= ms(700), "{what}: {:?}: {:#?}", room.longest_pause(), room.work.notes);
            pauses.push(room.longest_pause().as_millis());
        }
        println!("two owners lost {apart} ms apart: pauses {pauses:?} ms");
    }
}

/// A standby counts as resident until it reports otherwise. After a restart it is not: it loads the stage, or another node
/// does, and the answer is the same.
#[test]
fn a_standby_that_restarted_unnoticed_costs_time_but_no_answer() {
    for before in [0, 20, 100, 300] {
        let mut room = Room::serving(Options::lan(before), 8);
        room.submit(before, 300, 1500);
        settle(&mut room);
        let stages = room.work.stages(&room.world);
        let standby = room.standby_of(stages[2]).expect("all stages have standbys");
        room.strike(Fault::Crash(stages[1]));
        room.run_for(ms(150));
        room.strike(Fault::Crash(standby));
        room.strike(Fault::Restart { host: standby, keep_disk: true });
        room.run_for(ms(before));
        room.strike(Fault::Crash(stages[2]));
        let what = format!("a standby restarted {before} ms before it is needed");
        let room = room.check(&what);
        room.assert_all_finished(&what);
    }
}

#[test]
fn a_stage_that_drains_hands_over_while_it_serves() {
    for seed in seeds(10) {
        let what = format!("drain, seed {seed}");
        let mut draw = chance(seed, "drain");
        let mut room = Room::serving(Options::lan(seed), 6);
        room.run_for(ms(1_500)); // standbys load
        let call = room.submit(seed, draw.random_range(1..400), 300);
        room.work.run(&mut room.world, ms(5_000), |work, _| work.calls[&call].tokens.len() > 20);
        let leaver = room.some_stage(draw.random_range(0..100)).expect("a stage that is not the coordinator's");
        room.world.inject(leaver, node_core::input::Input::Drain(true));
        room.run_for(ms(2_000));
        let node = room.world.host(leaver).node.as_ref().expect("it runs");
        assert_eq!(node.parts().count(), 0, "{what}: it holds no part any more");
        let room = room.check(&what);
        room.assert_all_finished(&what);
        let tokens = &room.work.calls[&call].tokens;
        let stall = tokens.windows(2).map(|pair| pair[1].0.since(pair[0].0)).max().unwrap_or_default();
        assert!(stall < ms(150), "{what}: the caller waited {stall:?}");
    }
}

#[test]
fn two_deaths_and_a_death_while_loading() {
    for seed in seeds(30) {
        let what = format!("two deaths, seed {seed}");
        let mut draw = chance(seed, "two deaths");
        let mut room = Room::deploying(Options::swarm(seed), 7);
        room.run_for(Duration::from_micros(draw.random_range(0..400_000)));
        if let Some(victim) = room.some_stage(draw.random_range(0..100)).or(Some(room.hosts[1])) {
            room.strike(Fault::Crash(victim));
        }
        assert!(room.work.run_until_ready(&mut room.world, ms(20_000)), "{what}: served: {:?}", room.work.notes);
        for n in 0..3 {
            room.submit(seed * 10 + n, draw.random_range(1..1000), draw.random_range(5..40));
        }
        room.run_for(Duration::from_micros(draw.random_range(0..1_500_000)));
        if let Some(victim) = room.some_stage(draw.random_range(0..100)) {
            room.strike(Fault::Crash(victim));
        }
        let room = room.check(&what);
        room.assert_all_finished(&what);
    }
}

#[test]
fn a_stage_that_pauses_beyond_its_lease_is_fenced_when_it_wakes() {
    for seed in seeds(30) {
        let what = format!("pause, seed {seed}");
        let mut draw = chance(seed, "pause");
        let mut room = Room::serving(Options::swarm(seed), 6);
        for n in 0..3 {
            room.submit(seed * 10 + n, draw.random_range(1..1000), draw.random_range(20..60));
        }
        room.run_for(Duration::from_micros(draw.random_range(0..1_000_000)));
        if let Some(victim) = room.some_stage(draw.random_range(0..100)) {
            let lasts = ms(draw.random_range(100..4000));
            room.strike(Fault::Pause { host: victim, lasts });
        }
        let room = room.check(&what);
        room.assert_all_finished(&what);
    }
}

#[test]
fn broken_connections_lose_messages_and_nothing_else() {
    for seed in seeds(30) {
        let what = format!("breaks, seed {seed}");
        let mut draw = chance(seed, "breaks");
        let mut room = Room::serving(Options::swarm(seed), 5);
        for n in 0..4 {
            room.submit(seed * 10 + n, draw.random_range(1..1500), draw.random_range(20..60));
        }
        for _ in 0..draw.random_range(1..6) {
            room.run_for(Duration::from_micros(draw.random_range(0..600_000)));
            let mut route = room.work.stages(&room.world);
            route.insert(0, COORDINATOR);
            let at = draw.random_range(0..route.len());
            let (a, b) = (route[at], route[(at + 1) % route.len()]);
            if a != b {
                room.strike(Fault::Break(a, b));
            }
        }
        let room = room.check(&what);
        room.assert_all_finished(&what);
    }
}

#[test]
fn a_partition_that_heals_disturbs_no_answer() {
    for seed in seeds(30) {
        let what = format!("partition, seed {seed}");
        let mut draw = chance(seed, "partition");
        let mut room = Room::serving(Options::swarm(seed), 6);
        for n in 0..3 {
            room.submit(seed * 10 + n, draw.random_range(1..1500), draw.random_range(20..60));
        }
        room.run_for(Duration::from_micros(draw.random_range(0..800_000)));
        if let Some(victim) = room.some_stage(draw.random_range(0..100)) {
            let rest = room.hosts.iter().copied().filter(|&host| host != victim).collect();
            room.strike(Fault::Partition { from: vec![victim], to: rest, both: draw.random_bool(0.5) });
            room.run_for(ms(draw.random_range(100..5000)));
            room.strike(Fault::Heal);
        }
        let room = room.check(&what);
        room.assert_all_finished(&what);
    }
}

#[test]
fn a_cut_between_two_stages_alone_is_routed_around() {
    for seed in seeds(10) {
        let what = format!("cut, seed {seed}");
        let mut draw = chance(seed, "cut");
        let mut room = Room::serving(Options::lan(seed), 6);
        room.submit(seed, draw.random_range(1..500), 60);
        room.run_for(Duration::from_micros(draw.random_range(0..500_000)));
        let others: Vec<HostId> =
            room.work.stages(&room.world).into_iter().filter(|&host| host != COORDINATOR).collect();
        room.strike(Fault::Partition { from: vec![others[0]], to: vec![others[1]], both: true });
        let room = room.check(&what);
        room.assert_all_finished(&what);
    }
}

/// Heartbeats get through often enough, but no connection lasts: the link is as good as cut.
#[test]
fn a_link_that_flaps_so_that_no_connection_lasts_is_routed_around() {
    for (n, period) in [200, 500, 700, 800, 1_000, 1_400].into_iter().enumerate() {
        let what = format!("flapping every {period} ms");
        let mut room = Room::serving(Options::lan(n as u64), 6);
        room.submit(n as u64, 300, 300);
        room.run_for(ms(1_500));
        let stages: Vec<HostId> =
            room.work.stages(&room.world).into_iter().filter(|&host| host != COORDINATOR).collect();
        room.strike(Fault::Flap { between: (stages[0], stages[1]), period: ms(period), lasts: ms(10_000) });
        let room = room.check(&what);
        room.assert_all_finished(&what);
        assert!(room.longest_pause() < ms(2_000), "{what}: the caller waited {:?}", room.longest_pause());
    }
}

#[test]
fn a_device_that_fails_is_loaded_again_or_excluded() {
    for seed in seeds(15) {
        let what = format!("device, seed {seed}");
        let mut draw = chance(seed, "device");
        let mut room = Room::serving(Options::swarm(seed), 6);
        for n in 0..3 {
            room.submit(seed * 10 + n, draw.random_range(1..1000), draw.random_range(20..60));
        }
        room.run_for(Duration::from_micros(draw.random_range(0..800_000)));
        let victim = room.some_stage(draw.random_range(0..100)).unwrap_or(COORDINATOR);
        room.strike(Fault::Device { host: victim, failures: draw.random_range(1..3) });
        let room = room.check(&what);
        room.assert_all_finished(&what);
    }
}

#[test]
fn a_stalled_executor_loses_its_stage_though_its_node_lives() {
    for seed in seeds(10) {
        let what = format!("stalled executor, seed {seed}");
        let mut draw = chance(seed, "hang");
        let mut room = Room::serving(Options::swarm(seed), 6);
        room.submit(seed, 300, 20);
        assert!(room.work.run_until_done(&mut room.world, ms(10_000)), "{what}");
        for n in 0..3 {
            room.submit(seed * 10 + n, draw.random_range(1..1000), draw.random_range(20..60));
        }
        room.run_for(Duration::from_micros(draw.random_range(0..800_000)));
        let victim = room.some_stage(draw.random_range(0..100)).unwrap_or(COORDINATOR);
        room.world.host_mut(victim).executor.dead = true;
        assert!(room.work.run_until_done(&mut room.world, ms(60_000)), "{what}: {:?}", room.work.notes);
        room.strike(Fault::Crash(victim)); // frees what it still holds
        let room = room.check(&what);
        room.assert_all_finished(&what);
    }
}

#[test]
fn a_stage_that_is_never_ready_though_its_node_lives_is_placed_on_another_one() {
    let mut stalled = 0;
    for seed in seeds(10) {
        let what = format!("a load that stalls, seed {seed}");
        let mut draw = chance(seed, "a load that hangs");
        let mut room = Room::serving_stored(Options::swarm(seed), 6);
        let call = room.submit(seed, draw.random_range(1..100), 200);
        room.run_for(ms(50)); // standbys are chosen
        let before = room.work.stages(&room.world);
        // Its standby dies with it, so that a node that has not begun to load the stage has to. All such nodes but one are
        // stalled.
        let victim = room.some_stage(draw.random_range(0..100)).expect("a stage that is not the coordinator's");
        let standby = room.standby_of(victim);
        let mut spare: Vec<HostId> = (0..6).map(HostId).filter(|host| !before.contains(host)).collect();
        spare.retain(|host| Some(*host) != standby);
        spare.remove(draw.random_range(0..spare.len()));
        for &host in &spare {
            room.strike(Fault::Stall { host, lasts: ms(60_000) });
        }
        for host in [Some(victim), standby].into_iter().flatten() {
            room.strike(Fault::Crash(host));
        }
        let placed =
            |work: &Workload, world: &World| work.stages(world).iter().find(|host| !before.contains(host)).copied();
        assert!(room.work.run(&mut room.world, ms(2_000), |work, world| placed(work, world).is_some()), "{what}");
        stalled += usize::from(placed(&room.work, &room.world).is_some_and(|host| spare.contains(&host)));
        assert!(room.work.run_until_done(&mut room.world, ms(20_000)), "{what}: {:?}", room.work.notes);
        assert!(room.longest_pause() < ms(6_000), "{what}: the caller waited {:?}", room.longest_pause());
        assert!(matches!(room.work.calls[&call].ends[0].1, DoneReason::Length | DoneReason::Stop), "{what}");
    }
    assert!(stalled > 0, "no placement used a stalled host");
}

#[test]
fn cancelling_at_any_moment_frees_everything() {
    for seed in seeds(30) {
        let what = format!("cancel, seed {seed}");
        let mut draw = chance(seed, "cancel");
        let mut room = Room::serving(Options::swarm(seed), 5);
        let calls: Vec<CallId> =
            (0..12).map(|n| room.submit(seed * 20 + n, draw.random_range(1..2000), draw.random_range(5..60))).collect();
        for call in calls {
            room.run_for(Duration::from_micros(draw.random_range(0..300_000)));
            if draw.random_bool(0.7) {
                room.work.cancel(&mut room.world, call);
            }
        }
        room.check(&what);
    }
}

#[test]
fn missing_memory_is_reported_until_a_host_joins() {
    let (mut world, _) = Room::empty(Options::lan(3), 2, &with_memory(HOST_MEMORY));
    let mut work = Workload::deploy(&mut world, COORDINATOR, symbolic_model(LAYERS, LAYER_BYTES));
    assert!(!work.run_until_ready(&mut world, ms(2_000)));
    let reason = work.notes.iter().find_map(|told| match &told.event {
        Event::JobDegraded { call: Some(_), reason, .. } => Some(reason.clone()),
        _ => None,
    });
    assert!(reason.as_ref().is_some_and(|reason| reason.contains("are missing")), "{reason:?}");
    let mut spec = HostSpec::default();
    (spec.capacity.devices[0].memory_total, spec.capacity.devices[0].memory_free) = (HOST_MEMORY, HOST_MEMORY);
    let third = world.add_host(spec);
    world.start(third);
    world.introduce(third, COORDINATOR);
    assert!(work.run_until_ready(&mut world, ms(10_000)), "{:?}", work.notes);
}

#[test]
fn a_mesh_too_small_after_a_loss_fails_requests_unless_the_host_returns() {
    for back in [false, true] {
        let mut room = Room::serving(Options::lan(4), 3);
        room.submit(1, 100, 200);
        room.run_for(ms(500));
        let victim = room.some_stage(0).unwrap();
        room.strike(Fault::Crash(victim));
        if back {
            room.run_for(ms(5_000));
            room.strike(Fault::Restart { host: victim, keep_disk: true });
        }
        let room = room.check("too small");
        match &room.work.calls.values().next().unwrap().ends[0].1 {
            DoneReason::Length if back => {}
            DoneReason::Failed(reason) if !back => assert!(reason.contains("are missing"), "{reason}"),
            other => panic!("back {back}: ended with {other:?}"),
        }
    }
}

#[test]
fn a_pause_without_a_replacement_costs_no_more_than_its_duration() {
    for seed in seeds(10) {
        let what = format!("pause of one of three, seed {seed}");
        let mut draw = chance(seed, "pause of one of three");
        let mut room = Room::serving(Options::swarm(seed), 3);
        room.submit(seed, draw.random_range(1..200), 200);
        room.run_for(ms(draw.random_range(100..800)));
        let victim = room.some_stage(draw.random_range(0..100)).unwrap();
        let lasts = ms(draw.random_range(400..12_000));
        room.strike(Fault::Pause { host: victim, lasts });
        let room = room.check(&what);
        room.assert_all_finished(&what);
        assert!(room.longest_pause() < lasts + ms(4000), "{what}: {lasts:?} became {:?}", room.longest_pause());
    }
}

/// Random faults, as in `random_faults_end_in_one_view` of the membership tests: no request is lost, duplicated or stalled.
#[test]
fn random_faults_change_no_answer() {
    for seed in seeds(30) {
        let what = format!("random faults, seed {seed}");
        let mut draw = chance(seed, "bad time");
        let mut room = Room::serving(Options::swarm(seed), 6);
        let (hosts, now) = (room.hosts.clone(), room.world.now());
        let schedule = faults::swarm(seed, &hosts, now, ms(12_000));
        for (n, timed) in schedule.iter().enumerate() {
            let wait = timed.at.since(room.world.now());
            room.run_for(wait);
            room.strike(timed.fault.clone());
            room.submit(seed * 100 + n as u64, draw.random_range(1..1200), draw.random_range(5..200));
        }
        room.run_for(ms(2_000));
        for timed in faults::mend(&hosts, room.world.now()) {
            room.strike(timed.fault);
        }
        room.run_for(ms(1));
        hosts[1..].iter().for_each(|&host| room.world.introduce(host, COORDINATOR));
        let room = room.check(&what);
        room.assert_all_finished(&what);
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = || {
        let mut room = Room::serving(Options::swarm(9), 5);
        room.submit(1, 700, 30);
        room.run_for(ms(300));
        let victim = room.some_stage(1).unwrap();
        room.strike(Fault::Crash(victim));
        let room = room.check("same seed");
        (room.world.trace().hash(), room.world.trace().events())
    };
    assert_eq!(run(), run());
}

/// Time to the first token of a prompt of 4000 tokens in a pipeline of `stages` stages of one layer each.
fn first_token_after(stages: usize) -> Duration {
    let (mut world, _) = Room::empty(Options::lan(5), stages, &with_memory(80 << 20));
    let mut work = Workload::deploy(&mut world, COORDINATOR, symbolic_model(stages as u32, LAYER_BYTES));
    assert!(work.run_until_ready(&mut world, ms(20_000)), "{:?}", work.notes);
    assert_eq!(work.stages(&world).len(), stages);
    let call = work.submit(&mut world, request(1, 4000, 4));
    assert!(work.run_until_done(&mut world, ms(60_000)));
    let wrong = requests::violations(&work);
    assert!(wrong.is_empty(), "smaller chunks change no token: {wrong:?}");
    let call = &work.calls[&call];
    let (at, ..) = *call.tokens.first().expect("a token");
    at.since(call.submitted)
}

/// It took 1710 ms and 3293 ms with chunks of 512 positions and four in flight at any depth.
#[test]
fn a_long_prompt_fills_a_deep_pipeline() {
    let took = [2, 4, 12, 24].map(|stages| (stages, first_token_after(stages)));
    println!("4000 tokens of prompt, stages and time to the first token: {took:?}");
    let [(_, two), (_, four), (_, twelve), (_, twenty_four)] = took;
    assert!(two <= ms(600) && four <= ms(700), "{two:?} {four:?}");
    assert!(twelve <= ms(800) && twenty_four <= ms(950), "{twelve:?} {twenty_four:?}");
}
