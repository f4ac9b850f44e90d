//! Mixtures of experts that exceed the memory of the devices: part of their experts lies in RAM, on standbys as well.
use node_core::job::{JobView, PartView};
use node_core::time::Duration;
use node_core::work::serve::DoneReason;
use simnet::checker::{membership, requests};
use simnet::workload::{request, symbolic_mixture};
use simnet::{Fault, HostId, HostSpec, Options, Workload, World};

const LAYERS: u32 = 12;
const LAYER_BYTES: u64 = 20 << 20;
/// Five of the layers, of which three quarters are experts: more than seven with most experts in RAM.
const MEMORY: u64 = 297 << 20;
/// Experts of four of the layers.
const RAM: u64 = 60 << 20;
const COORDINATOR: HostId = HostId(0);

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Hosts with this much RAM for experts, the first of which serves a mixture. `None`: it does not fit.
fn serving(hosts: usize, ram: u64) -> Option<(World, Workload)> {
    let mut world = World::new(Options::lan(3));
    for _ in 0..hosts {
        let id = world.add_host(HostSpec::default().with_memory(MEMORY).with_ram(ram));
        world.start(id);
        if id != COORDINATOR {
            world.introduce(id, COORDINATOR);
        }
    }
    let settled = world.run_while_not(ms(20_000), ms(50), |world| membership::informed(world, &[]));
    assert!(settled, "the hosts find each other");
    world.run_for(ms(1000));
    let mut work = Workload::deploy(&mut world, COORDINATOR, symbolic_mixture(LAYERS, LAYER_BYTES));
    let ready = work.run_until_ready(&mut world, ms(10_000));
    work.run(&mut world, ms(4000), |_, _| false);
    ready.then_some((world, work))
}

fn job(world: &World, work: &Workload) -> JobView {
    let jobs = world.host(COORDINATOR).node.as_ref().into_iter().flat_map(|node| node.jobs());
    jobs.into_iter().find(|job| Some(job.job) == work.job).expect("the job")
}

/// RAM for experts that a host advertises as free.
fn ram_free(world: &World, host: u32) -> u64 {
    let host = world.host(HostId(host));
    let capacity = host.node.as_ref().and_then(|node| node.membership().capacity(host.node_id).cloned());
    capacity.expect("its own advert").ram_free()
}

#[test]
fn two_hosts_serve_with_ram_what_three_would_without() {
    assert!(serving(2, 0).is_none(), "twelve layers, and memory for ten");
    let (mut world, mut work) = serving(2, RAM).expect("RAM for the experts of the others");
    let ram: u64 = job(&world, &work).parts.iter().map(|part| part.ram).sum();
    assert!(ram >= 2 * LAYER_BYTES, "{ram}");
    let taken: u64 = (0..2).map(|host| RAM - ram_free(&world, host)).sum();
    assert_eq!(taken, ram, "what the stages take is not free");
    for n in 0..4 {
        work.submit(&mut world, request(n, 40, 30));
    }
    assert!(work.run_until_done(&mut world, ms(60_000)));
    assert_eq!(requests::violations(&work), Vec::<String>::new());
}

#[test]
fn a_lost_owner_with_experts_in_ram_is_replaced() {
    let (mut world, mut work) = serving(4, 2 * RAM).expect("it fits");
    for n in 0..4 {
        work.submit(&mut world, request(n, 40, 60));
    }
    work.run(&mut world, ms(300), |_, _| false);
    let of = |part: &PartView| world.host_of(part.owner).filter(|host| *host != COORDINATOR);
    let lost = job(&world, &work).parts.iter().find_map(of).expect("an owner besides the coordinator");
    world.strike(Fault::Crash(lost));
    assert!(work.run_until_done(&mut world, ms(120_000)));
    let whole = |end: &DoneReason| matches!(end, DoneReason::Length | DoneReason::Stop);
    assert!(work.calls.values().all(|call| whole(&call.ends[0].1)), "requests survive the loss");
    assert_eq!(requests::violations(&work), Vec::<String>::new());
}
