//! Disks that are full, fail, or lose and tear unsynced writes: work moves to other hosts, and acknowledged writes survive.
#![expect(clippy::wildcard_enum_match_arm, reason = "a test handles few of many events")]
use node_core::id::{CallId, JobId};
use node_core::input::Input;
use node_core::output::Event;
use node_core::time::Duration;
use node_core::work::serve::DoneReason;
use node_core::work::steps::{GridSpec, Schedule, StepsEvent};
use node_core::work::{Ending, JobSpec, Placement};
use partitioner::Tier;
use partitioner::tiles::GridWork;
use simnet::checker::membership::informed;
use simnet::grids::{simulation, solo};
use simnet::workload::{request, symbolic_model};
use simnet::{Fault, HostId, HostSpec, Options, Workload, World};
use std::collections::BTreeSet;

const COORDINATOR: HostId = HostId(0);
const JOB: JobId = JobId(0x6172);
const SIZE: [u64; 3] = [24, 40, 1];
const STEPS: u32 = 300;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Hosts that have joined, with disks that keep, lose and tear unsynced writes.
fn mesh(seed: u64, n: usize, spec: &HostSpec) -> World {
    let options = Options { unsynced_lost_percent: 40, unsynced_torn_percent: 30, ..Options::lan(seed) };
    let mut world = World::new(options);
    let hosts = world.add_hosts(n, spec);
    hosts.iter().for_each(|&host| world.start(host));
    hosts[1..].iter().for_each(|&host| world.introduce(host, COORDINATOR));
    world.discover(ms(5_000));
    assert!(world.run_while_not(ms(20_000), ms(50), |world| informed(world, &[])), "hosts find each other");
    world.run_for(ms(500));
    world
}

#[test]
fn a_host_whose_disk_is_full_holds_no_stage_and_others_serve_the_model() {
    let mut spec = HostSpec::default();
    (spec.capacity.devices[0].memory_total, spec.capacity.devices[0].memory_free) = (297 << 20, 297 << 20);
    let mut world = mesh(1, 6, &spec);
    for host in [1, 2] {
        world.strike(Fault::DiskFull { host: HostId(host), lasts: ms(60_000) });
    }
    let mut work = Workload::deploy(&mut world, COORDINATOR, symbolic_model(12, 20 << 20));
    assert!(work.run_until_ready(&mut world, ms(20_000)), "{:?}", work.notes);
    let stages = work.stages(&world);
    assert!(!stages.contains(&HostId(1)) && !stages.contains(&HostId(2)), "{stages:?}");
    let call = work.submit(&mut world, request(1, 50, 100));
    assert!(work.run_until_done(&mut world, ms(60_000)));
    assert_eq!(work.calls[&call].ends[0].1, DoneReason::Length);
    let told = |told: &simnet::Notification| matches!(&told.event, Event::Rejected { what, .. } if what.contains("no space left"));
    assert!(work.notes.iter().any(told), "the reason is reported: {:?}", work.notes);
}

/// A coordinator whose disk rejects writes for a while continues without new checkpoints, or waits; the successor of one
/// that dies has a checkpoint that was acknowledged.
#[test]
fn a_simulation_survives_full_disks_and_crashes_that_tear_writes() {
    let mut resumed = BTreeSet::new();
    for seed in 0..12 {
        let mut spec = HostSpec::default();
        spec.capacity.devices[0].copy_bytes_per_second = 100_000_000;
        let mut world = mesh(seed, 4, &spec);
        world.inject(COORDINATOR, Input::Start { call: CallId(1), job: Box::new(JobSpec::Steps(grid(seed))) });
        world.run_for(ms(250 + 40 * seed));
        world.strike(match seed % 3 {
            0 => Fault::DiskFull { host: COORDINATOR, lasts: ms(400) },
            1 => Fault::DiskFails { host: COORDINATOR, writes: 3 },
            _ => Fault::DiskFails { host: HostId(1), writes: 2 },
        });
        if seed % 2 == 0 {
            world.run_for(ms(137 + 31 * seed));
            world.strike(Fault::Crash(COORDINATOR));
        }
        world.run_for(ms(60_000));
        let (mut hash, mut ended) = (None, false);
        for told in world.take_notifications() {
            match told.event {
                Event::Steps { event: StepsEvent::Report { step: STEPS, report }, .. } => hash = report.hash.or(hash),
                Event::JobEnded { ending, .. } => ended |= ending == Ending::Completed,
                Event::JobPlaced { placement, .. } => {
                    if let Placement::Tiles { step, .. } = *placement {
                        resumed.insert(step);
                    }
                }
                _ => {}
            }
        }
        assert!(ended, "seed {seed}: it ends");
        assert_eq!(hash, Some(solo(seed, SIZE, [true, false, false], STEPS)), "seed {seed}");
    }
    assert!(resumed.len() > 1, "some resume from a checkpoint: {resumed:?}");
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
        // Without standbys a loss replays the steps since the checkpoint.
        tier: if seed % 4 < 2 { Tier::Warm } else { Tier::None },
        resume: None,
    }
}
