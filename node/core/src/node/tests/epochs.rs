//! Members that report epochs that were never issued, or that act in the name of a coordinator.
use super::*;
use crate::work::serve::RowFormat;

/// A member that holds no part of a job sends messages about it: as its new coordinator, and about epochs that were
/// never issued.
#[test]
fn a_stranger_to_a_job_moves_neither_its_stages_nor_its_epoch() {
    let mut mesh = Mesh::new(&[225, 225, 225, 225]);
    let job = mesh.deploy();
    let stages = mesh.stages();
    let stranger = (1..=4).map(id).find(|node| !stages.contains(node) && *node != id(1)).unwrap();
    let stage = *stages.iter().find(|&&node| node != id(1)).unwrap();
    let before = mesh.nodes[&id(1)].node.jobs().next().unwrap().epoch;
    mesh.submit(CALL, job, vec![1, 2, 3], 40);
    mesh.run_for(Duration::from_millis(50));
    let stolen = Epoch { counter: u32::MAX, issuer: stranger };
    let work = StageOrder {
        content: ContentId([7; 32]),
        layers: vec![0..LAYERS],
        sequences: 1,
        context: 16,
        width: 1,
        row: RowFormat::lossless(1),
        int8: false,
    };
    let order = Order {
        name: "stolen".into(),
        part: PartId(0),
        owners: vec![stage],
        device: 0,
        standby: None,
        bytes_max: 1,
        ram: 0,
        successors: Vec::new(),
        other_parts: Vec::new(),
        previous: Vec::new(),
        work: PartWork::Stage(work),
    };
    let prepare = Message::ToParticipant { job, epoch: stolen, say: ToParticipant::Prepare(Box::new(order)) };
    let last = Epoch { counter: u32::MAX, issuer: id(1) };
    for (to, message) in [
        (stage, prepare),
        (stage, Message::Stale { job, mine: stolen }),
        (stage, Message::Stale { job, mine: last }),
        (id(1), Message::Stale { job, mine: stolen }),
        (id(1), Message::Stale { job, mine: last }),
    ] {
        let bytes = codec::encode_message(&message).unwrap();
        mesh.give(to, Input::Message { from: stranger, bytes });
        mesh.run_for(Duration::from_millis(20));
    }
    // A misreporting stage of the job can cost the job its placement, but not its epochs.
    let bytes = codec::encode_message(&Message::Stale { job, mine: last }).unwrap();
    assert_eq!(mesh.nodes[&id(1)].node.jobs().next().unwrap().epoch, before);
    mesh.give(id(1), Input::Message { from: stage, bytes });
    assert_eq!(mesh.finish(CALL, Duration::from_secs(1)), DoneReason::Length);
    assert_eq!(mesh.told(CALL), solo(&[1, 2, 3], 40));
    assert_eq!(mesh.stages(), stages);
    mesh.assert_clean();
}

/// A stage that misreports epochs to its neighbour delays it by a heartbeat of the coordinator, which knows the epochs.
#[test]
fn a_neighbour_that_misreports_epochs_stops_no_stage() {
    let mut mesh = Mesh::new(&[225, 225, 225, 225]);
    let job = mesh.deploy();
    let others: Vec<NodeId> = mesh.stages().into_iter().filter(|&node| node != id(1)).collect();
    mesh.submit(CALL, job, vec![1, 2, 3], 40);
    mesh.run_for(Duration::from_millis(50));
    let before = mesh.nodes[&id(1)].node.jobs().next().unwrap().epoch;
    for counter in [before.counter + 1, u32::MAX] {
        let mine = Epoch { counter, issuer: id(1) };
        let bytes = codec::encode_message(&Message::Stale { job, mine }).unwrap();
        mesh.give(others[0], Input::Message { from: others[1], bytes });
        mesh.run_for(Duration::from_millis(20));
    }
    assert_eq!(mesh.finish(CALL, Duration::from_secs(1)), DoneReason::Length, "sooner than the watchdog");
    assert_eq!(mesh.told(CALL), solo(&[1, 2, 3], 40));
    assert_eq!(mesh.nodes[&id(1)].node.jobs().next().unwrap().epoch, before);
    mesh.assert_clean();
}

/// While a job runs, no stage can know a higher epoch than the coordinator, which alone issues them.
#[test]
fn a_stage_that_misreports_epochs_moves_no_job_that_runs() {
    let mut mesh = Mesh::new(&[225, 225, 225, 225]);
    let job = mesh.deploy();
    let stage = mesh.stages().into_iter().find(|&node| node != id(1)).unwrap();
    let before = mesh.nodes[&id(1)].node.jobs().next().unwrap().epoch;
    let mine = Epoch { counter: before.counter + 1, issuer: id(1) };
    let bytes = codec::encode_message(&Message::Stale { job, mine }).unwrap();
    mesh.give(id(1), Input::Message { from: stage, bytes });
    mesh.run_for(Duration::from_millis(100));
    assert_eq!(mesh.nodes[&id(1)].node.jobs().next().unwrap().epoch, before);
}

/// A successor claims a job whose coordinator was never absent. The coordinator sends its epoch, and continues.
#[test]
fn a_successor_that_claims_a_job_displaces_no_coordinator_that_was_not_absent() {
    let mut mesh = Mesh::new(&[225, 225, 225, 225]);
    let job = mesh.deploy();
    let successor = mesh.stages().into_iter().find(|&node| node != id(1)).unwrap();
    mesh.submit(CALL, job, vec![1, 2, 3], 60);
    mesh.run_for(Duration::from_millis(50));
    let before = mesh.nodes[&id(1)].node.jobs().next().unwrap().epoch;
    let claimed = Epoch { counter: before.counter + 2, issuer: successor };
    let bytes = codec::encode_message(&Message::Stale { job, mine: claimed }).unwrap();
    for _ in 0..3 {
        mesh.give(id(1), Input::Message { from: successor, bytes: bytes.clone() });
        mesh.run_for(Duration::from_millis(20));
    }
    assert_eq!(mesh.nodes[&id(1)].node.jobs().next().unwrap().epoch, before);
    assert_eq!(mesh.finish(CALL, Duration::from_secs(2)), DoneReason::Length);
    assert_eq!(mesh.told(CALL), solo(&[1, 2, 3], 60));
    mesh.assert_clean();
}

/// The previous coordinator was not absent as far as it knows, and still coordinates the job.
#[test]
fn a_successor_ends_its_job_when_the_previous_coordinator_still_coordinates_it() {
    for ahead in [false, true] {
        let mut mesh = Mesh::new(&[225; 6]);
        let job = mesh.deploy();
        mesh.run_for(Duration::from_secs(3));
        mesh.nodes.get_mut(&id(1)).unwrap().down = true;
        let inherited = |mesh: &Mesh| {
            mesh.events.iter().find_map(|(node, event)| matches!(event, Event::JobInherited { .. }).then_some(*node))
        };
        let end = mesh.now + Duration::from_secs(5);
        mesh.run_while(end, |mesh| inherited(mesh).is_none());
        let successor = inherited(&mesh).expect("a successor");
        mesh.run_for(Duration::from_secs(1));
        let mine = mesh.nodes[&successor].node.jobs().next().unwrap().epoch;
        let counter = if ahead { mine.counter + 1 } else { mine.counter - 1 };
        let say = |issuer| codec::encode_message(&Message::Stale { job, mine: Epoch { counter, issuer } }).unwrap();
        // In the name of the previous coordinator, from another node: ignored.
        let other = (2..=6).map(id).find(|node| *node != successor).unwrap();
        mesh.give(successor, Input::Message { from: other, bytes: say(id(1)) });
        mesh.run_for(Duration::from_millis(20));
        assert!(mesh.nodes[&successor].node.jobs().next().is_some());
        mesh.give(successor, Input::Message { from: id(1), bytes: say(id(1)) });
        mesh.run_for(Duration::from_millis(20));
        assert!(mesh.nodes[&successor].node.jobs().next().is_none());
    }
}
