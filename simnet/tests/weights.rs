//! Weight transfers: lost sources are replaced, received pieces are kept, and no frame waits for a transfer.
use node_core::input::Input;
use node_core::output::{Event, Output};
use node_core::time::{Duration, Instant};
use simnet::checker::membership::informed;
use simnet::disk::pieces;
use simnet::workload::{request, symbolic_model};
use simnet::{Fault, HostId, HostSpec, Observer, Options, Workload, World};
use std::cell::RefCell;
use std::rc::Rc;

const LAYERS: u32 = 12;
const LAYER_BYTES: u64 = 20 << 20;
/// Memory for five of the twelve layers.
const MEMORY: u64 = 297 << 20;
const COORDINATOR: HostId = HostId(0);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The load orders of hosts, and their results.
#[derive(Clone, Default)]
struct Loads(Rc<RefCell<Vec<Seen>>>);

/// When, on which host, and the result; `None` for the order.
type Seen = (Instant, HostId, Option<Result<u64, String>>);

impl Observer for Loads {
    fn input(&mut self, at: Instant, host: HostId, input: &Input) {
        if let Input::Loaded { result, .. } = input {
            let result = result.clone().map(|loaded| loaded.bytes);
            self.0.borrow_mut().push((at, host, Some(result)));
        }
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        if let Output::Load { .. } = output {
            self.0.borrow_mut().push((at, host, None));
        }
    }
}

fn mesh(seed: u64, n: usize) -> (World, Loads) {
    let mut world = World::new(Options::lan(seed));
    let mut spec = HostSpec::default();
    (spec.capacity.devices[0].memory_total, spec.capacity.devices[0].memory_free) = (MEMORY, MEMORY);
    let hosts = world.add_hosts(n, &spec);
    hosts.iter().for_each(|&host| world.start(host));
    hosts[1..].iter().for_each(|&host| world.introduce(host, COORDINATOR));
    world.discover(ms(5_000));
    assert!(world.run_while_not(ms(20_000), ms(50), |world| informed(world, &[])), "hosts find each other");
    world.run_for(ms(500)); // connections are established
    let loads = Loads::default();
    world.observe(Box::new(loads.clone()));
    (world, loads)
}

/// Pieces of the model that a host has on its disk.
fn stored(world: &World, host: HostId, work: &Workload) -> usize {
    world.host(host).disk.pieces(work.model.content).len()
}

#[test]
fn a_first_placement_takes_as_long_as_the_network_card_of_the_only_source() {
    let (mut world, loads) = mesh(1, 4);
    let mut work = Workload::deploy(&mut world, COORDINATOR, symbolic_model(LAYERS, LAYER_BYTES));
    let began = world.now();
    assert!(work.run_until_ready(&mut world, ms(20_000)), "{:?}", work.notes);
    let others: Vec<HostId> = work.stages(&world).into_iter().filter(|host| *host != COORDINATOR).collect();
    let bytes: u64 =
        others.iter().flat_map(|host| world.host(*host).disk.pieces(work.model.content)).map(|p| p.bytes).sum();
    let least = Duration::from_nanos(bytes * 1_000_000_000 / world.options().bandwidth);
    let took = world.now().since(began);
    assert!(took >= least && took < least + ms(500), "{took:?}, {bytes} bytes take {least:?}: {:?}", loads.0.borrow());
}

#[test]
fn a_source_that_dies_during_a_transfer_is_replaced_and_received_pieces_are_kept() {
    let (mut world, _) = mesh(2, 6);
    let model = symbolic_model(LAYERS, LAYER_BYTES);
    // All hosts but one have the model, so a stage of that one has several sources.
    let poor = HostId(1);
    world.hosts().map(|host| host.id).filter(|host| *host != poor).collect::<Vec<_>>().into_iter().for_each(|host| {
        world.give_model(host, model.content, LAYERS);
    });
    world.run_for(ms(1_000)); // adverts spread
    let mut work = Workload::deploy(&mut world, COORDINATOR, model);
    assert!(work.run_until_ready(&mut world, ms(20_000)));
    let mut before = stored(&world, poor, &work);
    if before == 0 {
        // It owns no stage: a loss makes it load one.
        let owner = work.stages(&world).into_iter().find(|host| *host != COORDINATOR).expect("a stage on another host");
        world.strike(Fault::Outage { hosts: vec![owner], lasts: ms(60_000), keep_disk: true });
    }
    assert!(
        work.run(&mut world, ms(20_000), |work, world| stored(world, poor, work) > before + 2),
        "it fetches something"
    );
    before = stored(&world, poor, &work);
    let victim = (2..6).map(HostId).find(|host| world.host(*host).runs()).expect("a source");
    world.strike(Fault::Crash(victim));
    assert!(work.run(&mut world, ms(20_000), |work, world| stored(world, poor, work) >= before + 10), "it continues");
    let held = stored(&world, poor, &work);
    world.strike(Fault::Outage { hosts: vec![poor], lasts: ms(1_000), keep_disk: true });
    work.run(&mut world, ms(500), |_, _| false);
    assert!(stored(&world, poor, &work) + 4 >= held, "only unsynced pieces are lost");
}

#[test]
fn a_load_without_a_source_fails_soon_and_reports_why() {
    let (mut world, loads) = mesh(3, 5);
    let mut work = Workload::deploy(&mut world, COORDINATOR, symbolic_model(LAYERS, LAYER_BYTES));
    assert!(work.run(&mut world, ms(5_000), |_, _| loads.0.borrow().iter().any(|(_, host, _)| *host != COORDINATOR)));
    let loader =
        loads.0.borrow().iter().map(|(_, host, _)| *host).find(|host| *host != COORDINATOR).expect("just seen");
    // The loader and the only source do not reach each other any more.
    world.strike(Fault::Cut { from: vec![COORDINATOR], to: vec![loader], both: true, lasts: ms(30_000) });
    let cut = world.now();
    let failed = |loads: &Loads| {
        let loads = loads.0.borrow();
        loads.iter().find_map(|(at, host, result)| match result {
            Some(Err(reason)) if *host == loader => Some((*at, reason.clone())),
            Some(_) | None => None,
        })
    };
    work.run(&mut world, ms(20_000), |_, _| failed(&loads).is_some());
    let (at, reason) = failed(&loads).expect("the load fails");
    assert!(reason.contains("no peer could give") && reason.contains("connection"), "{reason}");
    assert!(at.since(cut) < ms(10_000), "{:?}", at.since(cut));
}

#[test]
fn weight_transfers_delay_no_token() {
    let (mut world, _) = mesh(4, 8);
    let mut work = Workload::deploy(&mut world, COORDINATOR, symbolic_model(LAYERS, LAYER_BYTES));
    assert!(work.run_until_ready(&mut world, ms(20_000)));
    let call = work.submit(&mut world, request(1, 50, 3000));
    let pieces_all = pieces(&(0..LAYERS), LAYERS).count();
    // Standbys now fetch their stages, over the network cards that also carry the rows.
    let fetched = |world: &World, work: &Workload| (1..8).map(|host| stored(world, HostId(host), work)).sum::<usize>();
    let owners = fetched(&world, &work);
    let began = world.now();
    work.run(&mut world, ms(20_000), |work, world| fetched(world, work) >= owners + pieces_all / 2);
    let ended = world.now();
    let ready = work.notes.iter().any(|told| matches!(told.event, Event::Standby { .. }));
    assert!(ready && ended.since(began) > ms(300), "standbys fetch for some time: {:?}", ended.since(began));
    work.run(&mut world, ended.since(began) + ms(3_000), |_, _| false);
    let times: Vec<Instant> = work.calls[&call].tokens.iter().map(|(at, ..)| *at).collect();
    let median_gap = |from: Instant, to: Instant| {
        let mut gaps: Vec<Duration> = times
            .windows(2)
            .filter(|pair| pair[0] >= from && pair[1] <= to)
            .map(|pair| pair[1].since(pair[0]))
            .collect();
        gaps.sort();
        gaps[gaps.len() / 2]
    };
    let (during, after) = (median_gap(began, ended), median_gap(ended + ms(2_000), world.now()));
    assert!(during < after * 11 / 10, "a token takes {during:?} during transfers, {after:?} afterwards");
}
