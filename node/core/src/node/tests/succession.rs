//! A served model whose coordinator is lost: a successor continues it and its requests, and callers find them by their
//! keys.
use super::*;

const AGAIN: CallId = CallId(2);

fn started(mesh: &mut Mesh, prompt: &[u32], max_tokens: u32, after: usize) -> JobId {
    let job = mesh.deploy();
    mesh.run_for(Duration::from_secs(3)); // standbys follow
    mesh.submit(CALL, job, prompt.to_vec(), max_tokens);
    let end = mesh.now + Duration::from_secs(5);
    mesh.run_while(end, |mesh| mesh.told(CALL).len() < after);
    job
}

fn successor(mesh: &Mesh) -> Option<NodeId> {
    mesh.events.iter().find_map(|(node, event)| matches!(event, Event::JobInherited { .. }).then_some(*node))
}

fn await_successor(mesh: &mut Mesh) -> NodeId {
    let end = mesh.now + Duration::from_secs(5);
    mesh.run_while(end, |mesh| successor(mesh).is_none());
    successor(mesh).expect("a successor takes the job over")
}

#[test]
fn a_request_continues_at_the_successor_and_its_caller_finds_it_by_its_key() {
    for after in [0, 1, 30] {
        let mut mesh = Mesh::new(&[225; 6]);
        let prompt: Vec<u32> = (0..700).collect();
        let job = started(&mut mesh, &prompt, 60, after);
        mesh.nodes.get_mut(&id(1)).unwrap().down = true;
        let successor = await_successor(&mut mesh);
        // Its caller needs a while to get there. The request continues meanwhile.
        mesh.run_for(Duration::from_secs(1));
        mesh.events.clear();
        let again = Request { key: request(CALL, Vec::new(), 0).key, ..request(AGAIN, prompt.clone(), 60) };
        mesh.give(successor, Input::Submit { call: AGAIN, job, request: Box::new(again) });
        assert_eq!(mesh.finish(AGAIN, Duration::from_secs(20)), DoneReason::Length, "killed after {after}");
        assert_eq!(mesh.told(AGAIN), solo(&prompt, 60));
        mesh.assert_clean();
    }
}

#[test]
fn another_member_asks_for_its_callers_token_by_token() {
    let mut mesh = Mesh::new(&[225; 6]);
    let job = started(&mut mesh, &[1, 2, 3], 60, 10);
    mesh.nodes.get_mut(&id(1)).unwrap().down = true;
    let successor = await_successor(&mut mesh);
    let member = (2..=6).map(id).find(|node| *node != successor).unwrap();
    mesh.events.clear();
    let again = Request { key: request(CALL, Vec::new(), 0).key, ..request(AGAIN, vec![1, 2, 3], 60) };
    mesh.give(member, Input::Ask { call: AGAIN, to: successor, job, request: Box::new(again) });
    assert_eq!(mesh.finish(AGAIN, Duration::from_secs(20)), DoneReason::Length);
    assert_eq!(mesh.told(AGAIN), solo(&[1, 2, 3], 60));
    // A new request, and one that is cancelled.
    mesh.events.clear();
    let ask = |call, tokens| Input::Ask { call, to: successor, job, request: Box::new(request(call, vec![4], tokens)) };
    mesh.give(member, ask(CallId(3), 9));
    mesh.give(member, ask(CallId(4), 4000));
    mesh.run_for(Duration::from_millis(100));
    mesh.give(member, Input::Cancel { call: CallId(4) });
    assert_eq!(mesh.finish(CallId(3), Duration::from_secs(5)), DoneReason::Length);
    assert_eq!(mesh.told(CallId(3)), solo(&[4], 9));
    mesh.give(member, ask(CallId(5), 0));
    assert_eq!(mesh.finish(CallId(5), Duration::from_secs(5)), DoneReason::Length);
    let unknown = Input::Ask { call: CallId(6), to: member, job, request: Box::new(request(CallId(6), vec![4], 1)) };
    mesh.give(successor, unknown);
    let end = mesh.finish(CallId(6), Duration::from_secs(5));
    assert!(matches!(&end, DoneReason::Failed(why) if why.contains("serves the model no more")), "{end:?}");
    mesh.assert_clean();
}

/// A member that only has the caller learns the successors from the coordinator.
#[test]
fn a_caller_at_another_member_is_served_from_the_successor() {
    for after in [0, 10] {
        let mut mesh = Mesh::new(&[225; 6]);
        let job = mesh.deploy();
        mesh.run_for(Duration::from_secs(3));
        let stages = mesh.stages();
        let member = (2..=6).map(id).find(|node| !stages.contains(node)).expect("a node without a stage");
        let ask = Input::Ask { call: CALL, to: id(1), job, request: Box::new(request(CALL, vec![1, 2, 3], 60)) };
        mesh.give(member, ask);
        mesh.run_for(Duration::from_millis(100));
        let end = mesh.now + Duration::from_secs(5);
        mesh.run_while(end, |mesh| mesh.told(CALL).len() < after);
        mesh.nodes.get_mut(&id(1)).unwrap().down = true;

        assert_eq!(mesh.finish(CALL, Duration::from_secs(20)), DoneReason::Length, "killed after {after}");
        assert_eq!(mesh.told(CALL), solo(&[1, 2, 3], 60));
        mesh.assert_clean();
    }
}

/// One of two owners is left: the standbys' votes make the majority.
#[test]
fn standbys_elect_the_successor_of_two_owners() {
    let mut mesh = Mesh::new(&[450; 4]);
    started(&mut mesh, &[1, 2, 3], 60, 10);
    assert_eq!(mesh.stages().len(), 2);
    mesh.nodes.get_mut(&id(1)).unwrap().down = true;
    await_successor(&mut mesh);
}

/// A caller that lost messages asks a leaving coordinator again. It still gets the rest of what was accepted; a new request is
/// rejected.
#[test]
fn a_leaving_coordinator_answers_what_it_has_accepted() {
    let mut mesh = Mesh::new(&[225; 6]);
    let job = mesh.deploy();
    mesh.run_for(Duration::from_secs(3));
    let stages = mesh.stages();
    let member = (2..=6).map(id).find(|node| !stages.contains(node)).expect("a node without a stage");
    let ask = |call, tokens| {
        let request = Box::new(request(call, vec![1, 2, 3], tokens));
        Input::Ask { call, to: id(1), job, request }
    };
    mesh.give(member, ask(CALL, 60));
    let end = mesh.now + Duration::from_secs(5);
    mesh.run_while(end, |mesh| mesh.told(CALL).len() < 10);
    mesh.cut.insert((id(1), member));
    mesh.give(id(1), Input::Leave);
    mesh.run_for(Duration::from_millis(30));
    mesh.cut.clear();
    mesh.give(member, ask(AGAIN, 9));
    assert_eq!(mesh.finish(CALL, Duration::from_secs(5)), DoneReason::Length);
    assert_eq!(mesh.told(CALL), solo(&[1, 2, 3], 60));
    let reason = mesh.finish(AGAIN, Duration::from_secs(5));
    assert!(matches!(&reason, DoneReason::Failed(why) if why.contains("leaving the mesh")), "{reason:?}");
}

/// A coordinator that only stood still hands its callers over to its successor. Each receives every token once.
#[test]
fn callers_of_a_coordinator_that_comes_back_are_answered_by_its_successor() {
    let mut mesh = Mesh::new(&[225; 6]);
    let job = started(&mut mesh, &[1, 2, 3], 600, 10);
    let others = [2, 3, 4, 5, 6].map(id);
    mesh.cut.extend(others.map(|other| (id(1), other)));
    mesh.cut.extend(others.map(|other| (other, id(1))));
    await_successor(&mut mesh);
    mesh.run_for(Duration::from_millis(300));
    mesh.cut.clear();
    assert_eq!(mesh.finish(CALL, Duration::from_secs(60)), DoneReason::Length);
    assert_eq!(mesh.told(CALL), solo(&[1, 2, 3], 600));
    assert_eq!(mesh.nodes[&id(1)].node.jobs().count(), 0, "it has stood down");
    // Later requests go there, too.
    mesh.submit(AGAIN, job, vec![5], 9);
    assert_eq!(mesh.finish(AGAIN, Duration::from_secs(5)), DoneReason::Length);
    assert_eq!(mesh.told(AGAIN), solo(&[5], 9));
    mesh.assert_clean();
}

#[test]
fn a_job_that_was_taken_over_and_is_not_used_ends() {
    let mut mesh = Mesh::new(&[225; 6]);
    started(&mut mesh, &[1, 2, 3], 3000, 10);
    mesh.nodes.get_mut(&id(1)).unwrap().down = true;
    await_successor(&mut mesh);
    mesh.run_for(Duration::from_millis(300));
    assert!(!mesh.caches().is_empty(), "it continues");
    mesh.run_for(crate::limits::DETACHED_MAX + Duration::from_secs(5));
    assert!(mesh.caches().is_empty());
    mesh.run_for(crate::limits::UNUSED_MAX);
    assert!(mesh.nodes.values().filter(|host| !host.down).all(|host| host.stage.is_empty()));
}

/// A node without a majority holds nothing for long: the memory is needed where the model is served next.
#[test]
fn the_stage_of_a_lost_coordinator_of_two_is_dropped_when_the_node_is_declared_down() {
    let mut mesh = Mesh::new(&[325, 325]);
    mesh.deploy();
    assert_eq!(mesh.stages().len(), 2);
    mesh.nodes.get_mut(&id(1)).unwrap().down = true;
    mesh.run_for(crate::limits::ORPHAN_MAX / 3);
    assert!(mesh.nodes.values().filter(|host| !host.down).all(|host| host.stage.is_empty()));
}

/// Votes that come late on busy machines do not restart the wait of a successor.
#[test]
fn votes_that_come_late_delay_no_successor() {
    let mut mesh = Mesh::new(&[225; 3]);
    mesh.deploy();
    mesh.nodes.get_mut(&id(1)).unwrap().down = true;
    let end = mesh.now + crate::limits::SERVE_SUCCESSION_COLD + Duration::from_secs(3);
    mesh.run_for(Duration::from_secs(3));
    mesh.cut.extend([(id(2), id(3)), (id(3), id(2))]);
    mesh.run_for(Duration::from_secs(1));
    mesh.cut.clear();
    mesh.run_while(end, |mesh| successor(mesh).is_none());
    assert!(successor(&mesh).is_some());
}

/// A standby that was ordered but never received the order does not count for the majority that elects a successor.
#[test]
fn a_standby_that_never_answered_prevents_no_successor() {
    let mut calm = Mesh::new(&[225; 4]);
    calm.deploy();
    let stages = calm.stages();
    let spare = (1..=4).map(id).find(|node| !stages.contains(node)).expect("a spare node");
    let mut mesh = Mesh::new(&[225; 4]);
    mesh.cut.insert((id(1), spare));
    mesh.deploy();
    assert_eq!((stages.len(), mesh.stages()), (3, stages));
    mesh.run_for(Duration::from_secs(1));
    mesh.nodes.get_mut(&id(1)).unwrap().down = true;
    let end = mesh.now + Duration::from_secs(15);
    mesh.run_while(end, |mesh| successor(mesh).is_none());
    assert!(successor(&mesh).is_some());
}
