//! Several pipelines that serve one model: requests are spread over them, and continue at another one where a pipeline is lost.
use node_core::job::{JobState, JobView, ProgramView};
use node_core::time::Duration;
use node_core::work::serve::DoneReason;
use simnet::checker::{membership, requests};
use simnet::workload::{request, symbolic_model};
use simnet::{Fault, HostId, HostSpec, Options, Workload, World};
use std::collections::BTreeSet;

const LAYERS: u32 = 12;
const LAYER_BYTES: u64 = 20 << 20;
const COORDINATOR: HostId = HostId(0);
/// More than one pipeline computes in one pass, so that a second one helps.
const REQUESTS: u64 = 40;

struct Room {
    world: World,
    work: Workload,
}

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn host(memory_mib: u64) -> HostSpec {
    let mut spec = HostSpec::default();
    (spec.capacity.devices[0].memory_total, spec.capacity.devices[0].memory_free) =
        (memory_mib << 20, memory_mib << 20);
    spec
}

impl Room {
    fn serving(hosts: u32, memory_mib: u64, replicas: u32) -> Room {
        let mut world = World::new(Options::lan(1));
        for _ in 0..hosts {
            let id = world.add_hosts(1, &host(memory_mib))[0];
            world.start(id);
            if id != COORDINATOR {
                world.introduce(id, COORDINATOR);
            }
        }
        let settled = world.run_while_not(ms(20_000), ms(50), |world| membership::informed(world, &[]));
        assert!(settled, "the hosts find each other");
        world.run_for(ms(1000));
        let mut model = symbolic_model(LAYERS, LAYER_BYTES);
        model.replicas = replicas;
        let mut work = Workload::deploy(&mut world, COORDINATOR, model);
        assert!(work.run_until_ready(&mut world, ms(10_000)), "the model is served: {:?}", work.notes);
        Room { world, work }
    }

    fn jobs(&self) -> Vec<JobView> {
        self.world.host(COORDINATOR).node.as_ref().map(|node| node.jobs().collect()).unwrap_or_default()
    }

    /// The replicas that run.
    fn replicas(&self) -> Vec<JobView> {
        let runs = |job: &JobView| job.replica_of == self.work.job && job.state == JobState::Running;
        self.jobs().into_iter().filter(runs).collect()
    }

    fn first(&self) -> JobView {
        self.jobs().into_iter().find(|job| Some(job.job) == self.work.job).expect("the first job")
    }

    fn await_replicas(&mut self, count: usize) -> bool {
        let end = self.world.now() + ms(30_000);
        while self.world.now() < end && self.replicas().len() != count {
            self.work.run(&mut self.world, ms(50), |_, _| false);
        }
        self.replicas().len() == count
    }

    fn submit(&mut self, count: u64, tokens: u32) {
        for n in 0..count {
            self.work.submit(&mut self.world, request(n, 40 + 7 * n as u32, tokens));
        }
    }

    fn finish(&mut self) -> Duration {
        let began = self.world.now();
        assert!(self.work.run_until_done(&mut self.world, ms(120_000)), "all requests end");
        let wrong = requests::violations(&self.work);
        assert!(wrong.is_empty(), "{wrong:?}");
        let whole = |end: &DoneReason| matches!(end, DoneReason::Length | DoneReason::Stop);
        let failed: Vec<_> = self.work.calls.values().filter(|call| !whole(&call.ends[0].1)).map(|c| &c.ends).collect();
        assert!(failed.is_empty(), "{failed:?}");
        self.world.now().since(began)
    }

    /// Hosts of a job's owners, and of its standbys.
    fn hosts(&self, job: &JobView) -> BTreeSet<HostId> {
        let standbys = job.parts.iter().filter_map(|part| part.standby.as_ref()?.node);
        let nodes = job.parts.iter().map(|part| part.owner).chain(standbys);
        nodes.filter_map(|node| self.world.host_of(node)).collect()
    }
}

fn owners(job: &JobView) -> BTreeSet<node_core::id::NodeId> {
    job.parts.iter().map(|part| part.owner).collect()
}

fn running(job: &JobView) -> usize {
    match job.program {
        ProgramView::Serve { running, .. } => running,
        ProgramView::Steps { .. } => 0,
    }
}

#[test]
fn requests_are_spread_over_pipelines_on_different_nodes() {
    let mut one = Room::serving(8, 900, 1);
    one.submit(REQUESTS, 100);
    let alone = one.finish();
    let mut two = Room::serving(8, 900, 2);
    assert!(two.await_replicas(1), "{:?}", two.jobs());
    assert!(owners(&two.first()).is_disjoint(&owners(&two.replicas()[0])), "{:?}", two.jobs());
    two.submit(REQUESTS, 100);
    two.work.run(&mut two.world, ms(20), |_, _| false);
    let least = running(&two.first()).min(running(&two.replicas()[0]));
    assert!(least >= REQUESTS as usize * 2 / 5, "{least} of {REQUESTS} requests run in one of two pipelines");
    let together = two.finish();
    assert!(together.as_nanos() * 3 < alone.as_nanos() * 2, "{together:?} with two pipelines, {alone:?} with one");
    two.world.run_for(ms(10_000));
    assert_eq!(two.replicas().len(), 1, "no more than asked for");
}

#[test]
fn a_conversation_stays_with_the_pipeline_that_has_it() {
    let mut room = Room::serving(8, 900, 2);
    assert!(room.await_replicas(1), "{:?}", room.jobs());
    let mut turn = request(3, 300, 20);
    for _ in 0..3 {
        let call = room.work.submit(&mut room.world, turn.clone());
        room.finish();
        turn.prompt.extend(room.work.calls[&call].tokens.iter().map(|(.., token)| *token));
        turn.prompt.extend(0..50);
    }
    let rests = |job: &JobView| match &job.program {
        ProgramView::Serve { resting, .. } => resting.len(),
        ProgramView::Steps { .. } => 0,
    };
    assert_eq!(room.jobs().iter().map(rests).sum::<usize>(), 1, "one of them has the whole conversation");
}

#[test]
fn requests_of_a_lost_pipeline_continue_at_the_other_one() {
    let mut room = Room::serving(10, 900, 2);
    assert!(room.await_replicas(1), "{:?}", room.jobs());
    room.world.run_for(ms(3000));
    room.submit(12, 300);
    room.work.run(&mut room.world, ms(300), |_, _| false);
    let first = room.hosts(&room.first());
    let replica = room.replicas().remove(0);
    // All that the replica has, apart from what the first pipeline needs.
    for host in room.hosts(&replica).difference(&first).filter(|host| **host != COORDINATOR) {
        room.world.strike(Fault::Crash(*host));
    }
    room.finish();
    assert!(room.jobs().iter().all(|job| job.job != replica.job || job.state == JobState::Running));
}

#[test]
fn the_end_of_a_model_ends_its_replicas() {
    let mut room = Room::serving(8, 900, 3);
    assert!(room.await_replicas(2), "{:?}", room.jobs());
    let job = room.work.job.expect("the job");
    room.world.inject(COORDINATOR, node_core::input::Input::End { job });
    room.world.run_for(ms(2000));
    assert_eq!(room.jobs(), []);
}
