//! Requests that continue what others left in the caches, and requests that share too few pages.
use super::*;
use crate::limits::PAGE_POSITIONS;

impl Mesh {
    /// Answers a request with `count` tokens, checks it, and returns the rows that each live stage computed for it.
    fn ask(&mut self, call: CallId, job: JobId, prompt: &[u32], count: usize) -> (Vec<u32>, Vec<u64>) {
        self.nodes.values_mut().flat_map(|host| host.stage.values_mut()).for_each(|stage| stage.computed = 0);
        self.submit(call, job, prompt.to_vec(), count as u32);
        assert_eq!(self.finish(call, Duration::from_secs(30)), DoneReason::Length);
        let answer = self.told(call);
        assert_eq!(answer, solo(prompt, count));
        let stages = self.nodes[&id(1)].node.jobs().next().expect("the job").parts;
        let computed = |(part, view): (usize, &crate::job::PartView)| {
            self.nodes[&view.owner].stage[&(job, PartId::of(part))].computed
        };
        (answer, stages.iter().enumerate().map(computed).collect())
    }
}

/// Asks three questions in one conversation, and calls `between` before the last one.
fn converse(mesh: &mut Mesh, between: impl FnOnce(&mut Mesh)) {
    let job = mesh.deploy();
    mesh.run_for(Duration::from_secs(3)); // standbys follow
    let mut conversation: Vec<u32> = (0..500).collect();
    let mut between = Some(between);
    for (turn, new) in [(1, 0), (2, 200), (3, 200)] {
        if turn == 3 {
            between.take().into_iter().for_each(|between| between(mesh));
        }
        conversation.extend((0..new).map(|token| 1000 * turn + token));
        let before = conversation.len() as u64;
        let (answer, computed) = mesh.ask(CallId(100 + u64::from(turn)), job, &conversation, 30);
        conversation.extend(answer);
        // The last answer token was not cached, and the last one of this answer is not computed.
        let most = if turn == 1 { before + 29 } else { u64::from(new) + u64::from(PAGE_POSITIONS) + 30 };
        assert!(computed.iter().all(|rows| *rows <= most), "turn {turn}: {computed:?} rows, at most {most}");
    }
    mesh.assert_clean();
}

#[test]
fn a_conversation_computes_only_what_is_new() {
    converse(&mut Mesh::new(&[225, 225, 225]), |_| {});
}

#[test]
fn a_conversation_goes_on_at_the_standby_of_a_lost_stage() {
    converse(&mut Mesh::new(&[225; 6]), |mesh| {
        let lost = *mesh.stages().iter().find(|node| **node != id(1)).expect("a stage elsewhere");
        mesh.nodes.get_mut(&lost).unwrap().down = true;
        mesh.run_for(Duration::from_secs(3));
        assert!(!mesh.stages().contains(&lost));
    });
}

#[test]
fn a_new_stage_computes_a_conversation_again_before_its_next_turn() {
    converse(&mut Mesh::new(&[225; 6]), |mesh| {
        let lost = mesh.nodes[&id(1)].node.jobs().next().expect("the job").parts;
        let (owner, standby) = lost
            .iter()
            .filter_map(|part| Some((part.owner, part.standby.as_ref()?.node?)))
            .find(|(owner, standby)| *owner != id(1) && *standby != id(1))
            .expect("a stage and its standby elsewhere");
        for node in [owner, standby] {
            mesh.nodes.get_mut(&node).unwrap().down = true;
        }
        mesh.run_for(Duration::from_secs(20));
        assert!(!mesh.stages().contains(&owner) && !mesh.stages().contains(&standby));
    });
}

#[test]
fn a_stage_that_lost_its_cache_is_given_the_whole_conversation() {
    converse_without_bound(&mut Mesh::new(&[225, 225, 225, 225]), |mesh| {
        let lost = *mesh.stages().iter().find(|node| **node != id(1)).expect("a stage elsewhere");
        mesh.nodes.get_mut(&lost).unwrap().down = true;
        mesh.run_for(Duration::from_secs(3));
    });
}

fn converse_without_bound(mesh: &mut Mesh, between: impl FnOnce(&mut Mesh)) {
    let job = mesh.deploy();
    let mut conversation: Vec<u32> = (0..500).collect();
    conversation.extend(mesh.ask(CallId(101), job, &conversation, 30).0);
    between(mesh);
    conversation.extend(1000..1200);
    mesh.ask(CallId(102), job, &conversation, 30);
    mesh.assert_clean();
}

/// A conversation between whose turns another request needs all pages of the devices. Returns the rows computed for its last turn.
fn interrupted(ram_pages: u32) -> u64 {
    let (mut mesh, job) = tight(ram_pages);
    let mut conversation: Vec<u32> = (0..1000).collect();
    conversation.extend(mesh.ask(CallId(101), job, &conversation, 30).0);
    let other: Vec<u32> = (5000..5000 + CONTEXT - 20).collect();
    mesh.ask(CallId(102), job, &other, 10);
    conversation.extend(9000..9100);
    let (_, computed) = mesh.ask(CallId(103), job, &conversation, 30);
    mesh.assert_clean();
    computed.into_iter().max().expect("a stage")
}

#[test]
fn a_conversation_stays_in_ram_while_another_request_has_the_devices() {
    assert_eq!(interrupted(0), 1000 + 30 + 100 + 29, "all of it again");
    assert!(interrupted(16) <= 100 + u64::from(PAGE_POSITIONS) + 30, "what is new and a page");
}

#[test]
fn requests_that_give_up_their_pages_rest_in_ram() {
    let computed = |ram_pages| {
        let (mut mesh, job) = tight(ram_pages);
        let prompt = |n: u32| -> Vec<u32> { (5000 * n..5000 * n + 100).collect() };
        let tokens = CONTEXT / 3;
        (0..6).for_each(|n| mesh.submit(CallId(10 + u64::from(n)), job, prompt(n), tokens));
        for n in 0..6 {
            let call = CallId(10 + u64::from(n));
            assert_eq!(mesh.finish(call, Duration::from_secs(300)), DoneReason::Length);
            assert_eq!(mesh.told(call), solo(&prompt(n), tokens as usize));
        }
        mesh.assert_clean();
        mesh.nodes.values().flat_map(|host| host.stage.values()).map(|stage| stage.computed).max().expect("a stage")
    };
    let (without, with) = (computed(0), computed(64));
    assert!(with < without, "{with} rows with RAM, {without} without");
}

/// A mesh that serves the model with one context of cache on its devices.
fn tight(ram_pages: u32) -> (Mesh, JobId) {
    let mut mesh = Mesh { ram_pages, ..Mesh::new(&[225, 225, 225]) };
    let mut model = model();
    model.work.sequences = 1;
    mesh.give(id(1), Input::Start { call: CallId(0), job: Box::new(JobSpec::Serve(model)) });
    let end = mesh.now + Duration::from_secs(5);
    mesh.run_while(end, |mesh| mesh.ready().is_none());
    let job = mesh.ready().expect("the job becomes ready");
    (mesh, job)
}

#[test]
fn requests_that_outgrow_the_cache_are_preempted_and_answered() {
    let (mut mesh, job) = tight(0);
    // Each begins with a page of its own, and needs a quarter of the cache and more in the end.
    let prompt = |n: u32| -> Vec<u32> { (5000 * n..5000 * n + 100).collect() };
    let tokens = CONTEXT / 3;
    for n in 0..6 {
        mesh.submit(CallId(10 + u64::from(n)), job, prompt(n), tokens);
    }
    mesh.run_for(Duration::from_millis(100));
    let ProgramView::Serve { running, .. } = mesh.nodes[&id(1)].node.jobs().next().unwrap().program else { panic!() };
    assert_eq!(running, 6, "all of them begin");
    for n in 0..6 {
        let call = CallId(10 + u64::from(n));
        assert_eq!(mesh.finish(call, Duration::from_secs(300)), DoneReason::Length);
        assert_eq!(mesh.told(call), solo(&prompt(n), tokens as usize));
    }
    mesh.assert_clean();
}

#[test]
fn requests_wait_for_pages_and_rested_ones_make_room() {
    let (mut mesh, job) = tight(0);
    let prompt = |n: u32| -> Vec<u32> { (5000 * n..5000 * n + CONTEXT / 2).collect() };
    for n in 0..5 {
        mesh.submit(CallId(10 + u64::from(n)), job, prompt(n), 5);
    }
    for n in 0..5 {
        let call = CallId(10 + u64::from(n));
        assert_eq!(mesh.finish(call, Duration::from_secs(60)), DoneReason::Length);
        assert_eq!(mesh.told(call), solo(&prompt(n), 5));
    }
    let ProgramView::Serve { pages, resting, .. } = mesh.nodes[&id(1)].node.jobs().next().unwrap().program else {
        panic!()
    };
    assert_eq!((pages.1, resting.len()), (CONTEXT / PAGE_POSITIONS, 1), "one half is free, {} pages", pages.0);
    mesh.assert_clean();
}

fn submit_as(mesh: &mut Mesh, priority: Priority, call: CallId, job: JobId, prompt: Vec<u32>) {
    let request = Request { priority, ..request(call, prompt, 60) };
    mesh.give(id(1), Input::Submit { call, job, request: Box::new(request) });
}

#[test]
fn requests_take_the_pages_of_those_of_a_lower_priority() {
    let (mut mesh, job) = tight(0);
    let prompt = |n: u32| -> Vec<u32> { (5000 * n..5000 * n + CONTEXT / 4).collect() };
    for n in 0..3 {
        submit_as(&mut mesh, Priority::Idle, CallId(10 + u64::from(n)), job, prompt(n));
    }
    mesh.run_for(Duration::from_millis(300));
    submit_as(&mut mesh, Priority::Batch, CallId(20), job, prompt(3));
    mesh.submit(CallId(21), job, prompt(4), 60);
    for (call, n) in [(21, 4), (20, 3), (10, 0), (11, 1), (12, 2)] {
        assert_eq!(mesh.finish(CallId(call), Duration::from_secs(60)), DoneReason::Length);
        assert_eq!(mesh.told(CallId(call)), solo(&prompt(n), 60), "call {call}");
    }
    let place =
        |call| mesh.events.iter().position(|(_, e)| matches!(e, Event::Done { call: of, .. } if *of == CallId(call)));
    assert!(place(20) < place(12) && place(21) < place(12), "the last one gave up its pages to both");
    let preempted = mesh.events.iter().filter(|(_, event)| matches!(event, Event::Preempted { .. })).count();
    assert!(preempted > 0, "they gave up their pages");
    mesh.assert_clean();
}
