//! Two coordinators that serve the same request on the two sides of a partition, and stages that continue under an epoch
//! without their coordinator: once the network heals each caller has each token once, both have the same ones, and
//! superseded work reports nothing and leaves nothing.
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
#![expect(clippy::wildcard_enum_match_arm, reason = "a test handles few of many messages")]
use node_core::codec;
use node_core::id::{CallId, Epoch, JobId};
use node_core::input::Input;
use node_core::message::{FromStage, Message, ToCoordinator};
use node_core::output::{Event, Output};
use node_core::time::{Duration, Instant};
use node_core::work::serve::{DoneReason, Sampling};
use rand::RngExt;
use simnet::checker::bounds::{Bounds, leaks};
use simnet::checker::epochs::Epochs;
use simnet::checker::frames::Frames;
use simnet::checker::owners::Owners;
use simnet::checker::rings::Rings;
use simnet::checker::{membership, requests, rest};
use simnet::options::chance;
use simnet::workload::{request, symbolic_model};
use simnet::world::Observer;
use simnet::{Fault, HostId, HostSpec, Options, Workload, World};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

const LAYERS: u32 = 12;
const LAYER_BYTES: u64 = 20 << 20;
/// Memory for five of the twelve layers.
const MEMORY: u64 = 297 << 20;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Hosts that have joined, and the checkers that observe them.
struct Room {
    world: World,
    hosts: Vec<HostId>,
    epochs: Epochs,
    frames: Frames,
    owners: Owners,
    rings: Rings,
    bounds: Bounds,
    late: Late,
}

impl Room {
    fn new(options: Options, n: usize, memory: u64) -> Room {
        let mut world = World::new(options);
        let mut spec = HostSpec::default();
        (spec.capacity.devices[0].memory_total, spec.capacity.devices[0].memory_free) = (memory, memory);
        let hosts = world.add_hosts(n, &spec);
        hosts.iter().for_each(|&host| world.start(host));
        hosts[1..].iter().for_each(|&host| world.introduce(host, hosts[0]));
        world.discover(ms(5_000));
        let settled = world.run_while_not(ms(20_000), ms(50), |world| membership::informed(world, &[]));
        assert!(settled, "{n} hosts find each other: {:?}", membership::divergences(&world, &[]));
        world.run_for(ms(1_000)); // connections are established
        let room = Room {
            world,
            hosts,
            epochs: Epochs::default(),
            frames: Frames::default(),
            owners: Owners::default(),
            rings: Rings::default(),
            bounds: Bounds::default(),
            late: Late::default(),
        };
        room.watched()
    }

    fn watched(mut self) -> Room {
        self.world.observe(Box::new(self.epochs.clone()));
        self.world.observe(Box::new(self.frames.clone()));
        self.world.observe(Box::new(self.owners.clone()));
        self.world.observe(Box::new(self.rings.clone()));
        self.world.observe(Box::new(self.bounds.clone()));
        self.world.observe(Box::new(self.late.clone()));
        self
    }

    /// Runs until `done` holds for the callers; `false` if that takes longer than `limit`.
    fn run(&mut self, callers: &mut [Workload], limit: Duration, done: impl Fn(&[Workload], &World) -> bool) -> bool {
        let end = self.world.now() + limit;
        loop {
            let told = self.world.take_notifications();
            callers.iter_mut().for_each(|caller| caller.hear(told.iter().cloned()));
            if done(callers, &self.world) {
                return true;
            }
            if self.world.now() >= end {
                return false;
            }
            self.world.run_for(ms(1));
        }
    }

    /// Asserts that no checker has a violation and nothing leaks.
    fn assert_sound(&mut self, callers: &[Workload], what: &str) {
        let rested = |world: &World| leaks(world).is_empty() && rest::orphans(world).is_empty();
        self.world.run_while_not(ms(30_000), ms(50), rested);
        let seen = [
            self.epochs.violations(),
            self.frames.violations(),
            self.owners.violations(),
            self.rings.violations(),
            self.bounds.violations(),
            self.late.violations(),
            leaks(&self.world),
            rest::orphans(&self.world),
        ];
        let wrong: Vec<String> =
            seen.into_iter().flatten().chain(callers.iter().flat_map(requests::violations)).collect();
        assert!(wrong.is_empty(), "{what}: {wrong:#?}");
    }
}

/// Watches answers of superseded epochs: how many reach a coordinator, and that it passes none to a caller.
#[derive(Clone, Default)]
struct Late {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    placed: BTreeMap<(HostId, JobId), Epoch>,
    /// The epoch of the answer that is being handled, if it is lower than the one placed.
    handled: BTreeMap<HostId, Epoch>,
    count: usize,
    violations: Vec<String>,
}

impl Late {
    fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }

    fn count(&self) -> usize {
        self.seen.borrow().count
    }
}

impl Observer for Late {
    fn input(&mut self, _at: Instant, host: HostId, input: &Input) {
        let mut seen = self.seen.borrow_mut();
        seen.handled.remove(&host);
        let Input::Message { bytes, .. } = input else { return };
        let Ok(Message::ToCoordinator { job, epoch, say: ToCoordinator::Stage(FromStage::Token { .. }) }) =
            codec::decode_message(bytes)
        else {
            return;
        };
        if seen.placed.get(&(host, job)).is_some_and(|placed| epoch < *placed) {
            seen.handled.insert(host, epoch);
            seen.count += 1;
        }
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let mut seen = self.seen.borrow_mut();
        match output {
            Output::Notify(Event::JobPlaced { job, epoch, .. }) => {
                seen.placed.insert((host, *job), *epoch);
            }
            Output::Notify(event @ (Event::Token { .. } | Event::Done { .. })) => {
                let Some(epoch) = seen.handled.get(&host).copied() else { return };
                seen.violations.push(format!(
                    "{} ms, host {}: {event:?} reported under {epoch:?}",
                    at.0 / 1_000_000,
                    host.0
                ));
            }
            _ => {}
        }
    }
}

/// A client that lost its connection sends its request to another node under the same key: both coordinators serve it with
/// the same seed, each with a job and epochs of its own, and need the same nodes when the network heals.
#[test]
fn two_coordinators_of_one_request_report_the_same_tokens_once() {
    let (mut both, mut waited) = (0, 0);
    for seed in 0..40 {
        let what = format!("two coordinators, seed {seed}");
        let mut draw = chance(seed, "two heads");
        let memory = if draw.random_bool(0.5) { MEMORY } else { 2 * MEMORY };
        let mut room = Room::new(Options::swarm(seed), 8, memory);
        let model = symbolic_model(LAYERS, LAYER_BYTES);
        let (a, b) = (room.hosts[0], room.hosts[1]);
        let mut callers = [Workload::of(a, model.clone()), Workload::of(b, model)];
        callers[0].turn_to(&mut room.world, a);
        assert!(room.run(&mut callers, ms(20_000), |callers, _| callers[0].job.is_some()), "{what}: served");
        let mut asked = request(seed, draw.random_range(1..600), draw.random_range(100..250));
        asked.sampling = Sampling { temperature_e6: 800_000, seed: draw.random(), ..Sampling::GREEDY };
        callers[0].submit(&mut room.world, asked.clone());
        room.run(&mut callers, ms(draw.random_range(0..1_500)), |_, _| false);
        // Some of the other hosts stay with the first coordinator: perhaps all its stages, so that it continues; perhaps none.
        let stages = callers[0].stages(&room.world);
        let keeps = draw.random_range(0..3);
        let stays = |host: &&HostId| match keeps {
            0 => false,
            1 => stages.contains(host),
            _ => (host.0 ^ seed as u32) & 1 == 0,
        };
        let mine: Vec<HostId> =
            room.hosts.iter().filter(|host| **host == a || (**host != b && stays(host))).copied().collect();
        let theirs: Vec<HostId> = room.hosts.iter().filter(|host| !mine.contains(host)).copied().collect();
        room.world.strike(Fault::Partition { from: mine, to: theirs, both: draw.random_bool(0.7) });
        room.run(&mut callers, ms(draw.random_range(300..2_000)), |_, _| false);
        callers[1].turn_to(&mut room.world, b);
        let heals = room.world.now() + ms(draw.random_range(500..12_000));
        room.run(&mut callers, heals.since(room.world.now()), |callers, _| callers[1].job.is_some());
        let served = callers[1].job.is_some();
        if served {
            callers[1].submit(&mut room.world, asked.clone());
        }
        room.run(&mut callers, heals.since(room.world.now()), |_, _| false);
        room.world.strike(Fault::Heal);
        room.world.run_for(ms(1));
        if !served {
            assert!(room.run(&mut callers, ms(60_000), |callers, _| callers[1].job.is_some()), "{what}: never served");
            callers[1].submit(&mut room.world, asked);
        }
        let ended = |callers: &[Workload], _: &World| {
            callers.iter().flat_map(|caller| caller.calls.values()).all(|call| !call.ends.is_empty())
        };
        assert!(room.run(&mut callers, ms(60_000), ended), "{what}: both end: {:?}", callers[0].notes.last());
        let end = |caller: &Workload| {
            let call = &caller.calls[caller.calls.keys().next().expect("one call")];
            let tokens: Vec<u32> = call.tokens.iter().map(|(.., token)| *token).collect();
            (tokens, call.ends[0].1.clone())
        };
        let [(first, first_end), (second, second_end)] = [end(&callers[0]), end(&callers[1])];
        assert!(matches!(second_end, DoneReason::Length | DoneReason::Stop), "{what}: {second_end:?}");
        match first_end {
            DoneReason::Length | DoneReason::Stop => {
                assert_eq!(first, second, "{what}");
                both += 1;
            }
            _ => {
                assert!(second.starts_with(&first), "{what}");
                waited += 1;
            }
        }
        room.assert_sound(&callers, &what);
    }
    println!("two coordinators of one request: {both} times both answered, {waited} times only the second");
    assert!(both > 0);
}

/// The coordinator is cut off from some or all of its stages, which still reach each other: they continue under their epoch
/// until it is superseded, and their answers after that are dropped.
#[test]
fn answers_of_a_superseded_epoch_reach_no_caller() {
    let mut late = 0;
    for seed in 0..40 {
        let what = format!("stages without a coordinator, seed {seed}");
        let mut draw = chance(seed, "stages without a head");
        let mut room = Room::new(Options { latency: ms(draw.random_range(0..30)), ..Options::swarm(seed) }, 8, MEMORY);
        let coordinator = room.hosts[0];
        let mut callers = [Workload::of(coordinator, symbolic_model(LAYERS, LAYER_BYTES))];
        callers[0].turn_to(&mut room.world, coordinator);
        assert!(room.run(&mut callers, ms(20_000), |callers, _| callers[0].job.is_some()), "{what}: served");
        let calls: Vec<CallId> = (0..4)
            .map(|n| {
                let asked = request(seed * 10 + n, draw.random_range(1..1500), draw.random_range(50..200));
                callers[0].submit(&mut room.world, asked)
            })
            .collect();
        room.run(&mut callers, Duration::from_micros(draw.random_range(100_000..2_500_000)), |_, _| false);
        let mut stages = callers[0].stages(&room.world);
        stages.retain(|host| *host != coordinator);
        if draw.random_bool(0.5) {
            stages.truncate(1); // the last one stays connected
        }
        let rest: Vec<HostId> = room.hosts.iter().filter(|host| !stages.contains(host)).copied().collect();
        // In one direction only: the coordinator's messages arrive, while the stages' answers wait until the network heals.
        let both = draw.random_bool(0.5);
        room.world.strike(Fault::Partition { from: stages, to: rest, both });
        room.run(&mut callers, ms(draw.random_range(350..3_000)), |_, _| false);
        room.world.strike(Fault::Heal);
        let ended = |callers: &[Workload], _: &World| callers[0].calls.values().all(|call| !call.ends.is_empty());
        assert!(room.run(&mut callers, ms(60_000), ended), "{what}: {:?}", callers[0].notes.last());
        for call in calls {
            let end = &callers[0].calls[&call].ends[0].1;
            assert!(matches!(end, DoneReason::Length | DoneReason::Stop), "{what}: call {}: {end:?}", call.0);
        }
        room.assert_sound(&callers, &what);
        late += room.late.count();
    }
    println!("stages without a coordinator: {late} answers of superseded epochs reached it, none reached a caller");
    assert!(late > 0, "expected some late answers");
}
