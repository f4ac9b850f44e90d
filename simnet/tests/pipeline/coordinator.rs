//! Coordinators that restart, are paused, or whose own executor stalls.
use super::*;
use node_core::limits::{LEASE, SERVE_SUCCESSION};

/// No epoch is stored on disk: a job's id contains the coordinator's generation, and no two lives have the same one.
#[test]
fn a_restarted_coordinator_never_reuses_an_epoch_of_an_earlier_life() {
    let mut room = Room::serving(Options::lan(1), 5);
    let mut jobs = vec![room.work.job];
    for life in 1..=3 {
        // Within the same second, so that the clock alone would give the same generation.
        room.strike(Fault::Crash(COORDINATOR));
        room.world.run_for(ms(5));
        room.strike(Fault::Restart { host: COORDINATOR, keep_disk: true });
        let settled = room.world.run_while_not(ms(20_000), ms(50), |world| membership::informed(world, &[]));
        assert!(settled, "life {life}: {:?}", membership::divergences(&room.world, &[]));
        room.world.run_for(ms(2_000));
        // A successor serves the model: its user ends that job.
        let successors: Vec<(HostId, JobId)> = room
            .world
            .hosts()
            .filter_map(|host| host.node.as_ref()?.jobs().next().map(|view| (host.id, view.job)))
            .collect();
        successors.into_iter().for_each(|(host, job)| room.world.inject(host, node_core::input::Input::End { job }));
        room.world.run_for(ms(1_000));
        room.world.take_notifications();
        room.work = Workload::deploy(&mut room.world, COORDINATOR, symbolic_model(LAYERS, LAYER_BYTES));
        assert!(room.work.run_until_ready(&mut room.world, ms(20_000)), "life {life}: {:?}", room.work.notes);
        assert!(!jobs.contains(&room.work.job), "life {life}: {jobs:?}");
        jobs.push(room.work.job);
        assert_eq!(room.epochs.violations(), Vec::<String>::new());
    }
    room.submit(1, 50, 40);
    room.check("the fourth life").assert_all_finished("the fourth life");
}

#[test]
fn a_coordinator_whose_own_executor_stalls_moves_its_stage() {
    for seed in seeds(10) {
        let what = format!("the coordinator's executor stalls, seed {seed}");
        let mut draw = chance(seed, "the head's executor hangs");
        let mut room = Room::serving(Options::swarm(seed), 6);
        assert!(room.work.stages(&room.world).contains(&COORDINATOR), "{what}: it holds a stage");
        room.submit(seed, draw.random_range(1..400), 200);
        room.run_for(ms(draw.random_range(1_000..2_500)));
        room.strike(Fault::Stall { host: COORDINATOR, lasts: ms(8_000) });
        room.run_for(ms(9_000)); // its old stage is freed once it answers
        let room = room.check(&what);
        room.assert_all_finished(&what);
        assert!(room.longest_pause() < ms(3_000), "{what}: the caller waited {:?}", room.longest_pause());
    }
}

#[test]
fn a_coordinator_waits_for_its_own_executor_if_no_other_host_has_memory() {
    let mut room = Room::serving(Options::lan(2), 3);
    room.submit(2, 100, 200);
    room.run_for(ms(1_500));
    let epoch = room.work.epoch;
    room.strike(Fault::Stall { host: COORDINATOR, lasts: ms(4_000) });
    let room = room.check("no other host has memory");
    room.assert_all_finished("no other host has memory");
    assert!(room.longest_pause() < ms(5_000), "the caller waited {:?}", room.longest_pause());
    assert_eq!(room.work.epoch, epoch, "the job was not placed again");
}

#[test]
fn a_coordinator_that_was_paused_takes_no_executor_for_stalled() {
    for seed in seeds(10) {
        let what = format!("a paused coordinator, seed {seed}");
        let mut draw = chance(seed, "a head that stood still");
        let mut room = Room::serving(Options::swarm(seed), 6);
        room.submit(seed, draw.random_range(1..400), 200);
        room.run_for(Duration::from_micros(draw.random_range(1_000_000..1_500_000)));
        let lasts = ms(draw.random_range(900..7_000));
        room.strike(Fault::Pause { host: COORDINATOR, lasts });
        let room = room.check(&what);
        room.assert_all_finished(&what);
        let succeeded = room
            .world
            .hosts()
            .any(|host| host.id != COORDINATOR && host.node.as_ref().is_some_and(|n| n.jobs().count() > 0));
        let stays = room.work.stages(&room.world).contains(&COORDINATOR);
        assert!(succeeded || stays, "{what}: its own stage stays where it is");
        assert!(stays || lasts > LEASE + SERVE_SUCCESSION, "{what}: successors wait long enough");
        assert!(room.longest_pause() < lasts + ms(2_000), "{what}: the caller waited {:?}", room.longest_pause());
    }
}
