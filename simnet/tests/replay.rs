//! A replay of a recorded life of a node makes the same decisions.
use node_core::output::Output;
use node_core::time::{Duration, Instant};
use simnet::replay::{Digest, replay};
use simnet::workload::{request, symbolic_model};
use simnet::{Fault, HostId, HostSpec, Observer, Options, Workload, World};
use std::cell::RefCell;
use std::rc::Rc;

/// Hashes the outputs of each host in its current life.
#[derive(Clone, Default)]
struct Done(Rc<RefCell<std::collections::BTreeMap<HostId, Digest>>>);

impl Observer for Done {
    fn output(&mut self, _at: Instant, host: HostId, output: &Output) {
        self.0.borrow_mut().entry(host).or_default().add(output);
    }
    fn died(&mut self, _at: Instant, host: HostId) {
        self.0.borrow_mut().remove(&host);
    }
}

#[test]
fn a_replayed_life_makes_the_same_decisions() {
    let ms = Duration::from_millis;
    let mut world = World::new(Options { loss_ppm: 10_000, ..Options::lan(11) });
    let mut spec = HostSpec::default();
    (spec.capacity.devices[0].memory_total, spec.capacity.devices[0].memory_free) = (297 << 20, 297 << 20);
    let hosts = world.add_hosts(6, &spec);
    let done = Done::default();
    world.observe(Box::new(done.clone()));
    hosts.iter().for_each(|&host| world.record(host));
    hosts.iter().for_each(|&host| world.start(host));
    hosts[1..].iter().for_each(|&host| world.introduce(host, hosts[0]));
    world.run_for(ms(3000));
    let mut work = Workload::deploy(&mut world, hosts[0], symbolic_model(12, 20 << 20));
    assert!(work.run_until_ready(&mut world, ms(10_000)));
    for n in 0..4 {
        work.submit(&mut world, request(n, 20 + 200 * n as u32, 40));
    }
    work.run(&mut world, ms(700), |_, _| false);
    let stage = work.stages(&world).into_iter().find(|&host| host != hosts[0]).expect("a stage on another host");
    world.strike(Fault::Outage { hosts: vec![stage], lasts: ms(2000), keep_disk: true });
    world.strike(Fault::Drift { host: hosts[0], ppm: 300 });
    assert!(work.run_until_done(&mut world, ms(60_000)));
    work.run(&mut world, ms(5000), |_, _| false);
    for &host in &hosts {
        let recording = world.host(host).recording.as_ref().expect("recording is enabled");
        let replayed = replay(recording).unwrap_or_else(|error| panic!("host {}: {error}", host.0));
        assert!(replayed.cut.is_none() && replayed.outputs > 100, "host {}: {:?}", host.0, replayed.cut);
        assert_eq!(replayed.hash, done.0.borrow()[&host].hash(), "host {}", host.0);
        for line in &replayed.timeline {
            let debug = [" { ", "NodeId(", "JobId(", "Some(", "CallId("].iter().find(|mark| line.what.contains(**mark));
            assert!(debug.is_none(), "expected text, found Debug output: {}", line.what);
        }
        assert!(replayed.timeline.len() >= 5, "host {}: {:?}", host.0, replayed.timeline);
        // As after a kill: everything before the cut is replayed.
        let cut = replay(&recording[..recording.len() - 3]).expect("its header is whole");
        assert!(cut.cut.is_some() && cut.inputs + 1 >= replayed.inputs, "host {}", host.0);
    }
    assert!(replay(b"what is this").is_err());
}
