//! The coordinator of a simulation: saved states, losses, standbys and successors.
use super::*;
use crate::id::{ContentId, Generation};
use crate::message::{FromTile, ToParticipant};
use crate::output::Output;
use crate::work::log::TokenLog;
use crate::work::steps::TileFigures;
use crate::work::steps::{Schedule, SimulationId, StepsRecord, TileOrder, TileStart};
use crate::work::{Order, PartRecord, PartState, PartWork, ProgramRecord, Ready, Record, StandbyRecord};
use alloc::vec;
use partitioner::tiles::{Block, GridWork};
use partitioner::{DeviceId, Room, Tier};

const ME: NodeId = NodeId([1; 16]);
const JOB: JobId = JobId(7);
const STEP: u32 = 10;
/// Bytes of a tile's cells: 64 by 16, 8 bytes each.
const BYTES: u64 = 8 * 64 * 16;

fn owner(tile: u16) -> NodeId {
    NodeId([2 + tile as u8; 16])
}

/// A job of four tiles without standbys that this node coordinates, and its epoch.
fn running() -> (Jobs, Epoch) {
    inherited([None; 4])
}

/// The same job with these standbys, which have cells.
fn inherited(standbys: [Option<NodeId>; 4]) -> (Jobs, Epoch) {
    let work = GridWork {
        size: [64, 64, 1],
        periodic: [true, true, false],
        radius: 1,
        state_bits: 128,
        traffic_bits: 128,
        face_bits: 64,
        cell_bits: 64,
        align_x: 64,
        scratch_bytes: 0,
        pass_steps: 1,
    };
    let schedule =
        Schedule { steps: 100, report_every: 10, checkpoint_every: Some(STEP), outputs: vec![10], looks: None };
    let simulation = SimulationId { content: ContentId([9; 32]), bytes: 1 };
    let block = |tile: u64| Block { from: [0, 16 * tile, 0], to: [64, 16 * tile + 16, 1] };
    let tile = TileOrder {
        simulation,
        work,
        depth: 1,
        schedule,
        blocks: (0..4).map(block).collect(),
        start: TileStart::Continue,
        step_ns: 1,
        snapshot_ms: 0,
    };
    let order = Order {
        name: "a".into(),
        part: PartId(0),
        owners: (0..4).map(owner).collect(),
        device: 0,
        standby: None,
        bytes_max: 1 << 20,
        ram: 0,
        successors: vec![owner(0)],
        other_parts: Vec::new(),
        previous: Vec::new(),
        work: PartWork::Tile(tile),
    };
    let parts = standbys.map(|node| {
        let standby =
            node.map(|node| StandbyRecord { node, device: 0, ram: 0, tier: Tier::Hot, ready: true, snapshot_ms: 0 });
        PartRecord { device: 0, bytes: 1 << 20, ram: 0, step_ns: 1, standby }
    });
    let start = TileStart::Continue;
    let steps = StepsRecord { tier: Tier::Hot, depth: None, step_ns: 1, start, checkpoint: None, rates: vec![0; 4] };
    let record = Record { parts: parts.to_vec(), program: ProgramRecord::Steps(steps) };
    let epoch = Epoch { counter: 1, issuer: NodeId([99; 16]) };
    let (order, record) = (Box::new(order), Box::new(record));
    let mut jobs = Jobs::new(ME, Generation(1));
    assert!(jobs.handle_inherited(Takeover {
        job: JOB,
        epoch,
        order,
        record,
        checkpoint: None,
        log: TokenLog::default()
    }));
    let epoch = jobs.epoch_of(JOB).unwrap();
    assert_eq!(epoch.issuer, ME);
    (jobs, epoch)
}

/// A tile's owner announces a state.
fn saved(jobs: &mut Jobs, epoch: Epoch, tile: u16, kind: SaveKind, bytes: u64) -> Option<ParticipantFailure> {
    let say = ToCoordinator::Tile(FromTile::Saved { part: PartId(tile), step: STEP, kind, bytes });
    jobs.handle_message(Instant::default(), owner(tile), JOB, epoch, say)
}

/// Tiles whose states are now fetched.
fn fetched(jobs: &mut Jobs) -> Vec<u16> {
    let mut tiles = Vec::new();
    while let Some(output) = jobs.poll_output(Instant::default()) {
        if let JobOutput::Shell(Output::Collect { part, .. }) = output {
            tiles.push(part.0);
        }
    }
    tiles
}

fn collected(jobs: &mut Jobs, tile: u16, result: Result<(), String>) {
    jobs.handle_collected(Instant::default(), JOB, (PartId(tile), STEP, SaveKind::Checkpoint), result);
}

#[test]
fn two_parts_of_a_checkpoint_are_fetched_at_once() {
    let (mut jobs, epoch) = running();
    for tile in [3, 1, 0, 2] {
        assert_eq!(saved(&mut jobs, epoch, tile, SaveKind::Checkpoint, BYTES), None);
    }
    assert_eq!(fetched(&mut jobs), [3, 1]);
    // Frames do not wait for checkpoints.
    assert_eq!(saved(&mut jobs, epoch, 2, SaveKind::Output(0), 99), None);
    assert_eq!(fetched(&mut jobs), [2]);
    collected(&mut jobs, 3, Ok(()));
    assert_eq!(fetched(&mut jobs), [0]);
    // A fetch that failed leaves its turn to the next one, and is repeated later.
    collected(&mut jobs, 1, Err("the disk is full".into()));
    assert_eq!(fetched(&mut jobs), [2]);
    collected(&mut jobs, 0, Ok(()));
    assert_eq!(fetched(&mut jobs), [0; 0]);
    jobs.handle_wakeup(Instant::default() + crate::limits::COLLECT_RETRY);
    assert_eq!(fetched(&mut jobs), [1]);
}

#[test]
fn an_owner_that_announces_more_than_its_tile_has_is_not_believed() {
    let (mut jobs, epoch) = running();
    let rejected = saved(&mut jobs, epoch, 1, SaveKind::Checkpoint, BYTES + 1).expect("it is rejected");
    let expected = "tile 1 announces a checkpoint of 8193 bytes, its cells have 8192";
    let place = Place::Node(owner(1));
    assert_eq!(rejected, ParticipantFailure::Failed { place, held: true, reason: expected.into() });
    assert_eq!(fetched(&mut jobs), [0; 0]);
    assert_eq!(saved(&mut jobs, epoch, 1, SaveKind::Checkpoint, BYTES), None);
    assert_eq!(fetched(&mut jobs), [1]);
}

/// The owners that are now ordered to hold tiles, and where the cells come from.
fn ordered(jobs: &mut Jobs) -> Vec<(NodeId, TileStart)> {
    let mut ordered = Vec::new();
    while let Some(output) = jobs.poll_output(Instant::default()) {
        if let JobOutput::Message { to, say: ToParticipant::Prepare(order), .. } = output
            && order.standby.is_none()
            && let PartWork::Tile(tile) = &order.work
        {
            ordered.push((to, tile.start));
        }
    }
    ordered
}

/// A standby whose executor failed still holds the tile, and its memory.
#[test]
fn a_standby_that_failed_is_released() {
    let standby = NodeId([20; 16]);
    let (mut jobs, _) = inherited([Some(standby), None, None, None]);
    jobs.handle_standby_lost(Instant::default(), JOB, Place::Node(standby));
    let released = core::iter::from_fn(|| jobs.poll_output(Instant::default())).any(|output| {
        matches!(output, JobOutput::Message { to, say: ToParticipant::Release { part: PartId(0) }, .. } if to == standby)
    });
    assert!(released);
}

/// A second owner is lost before the first one's standby has taken over.
#[test]
fn owners_lost_one_after_the_other_are_both_replaced_by_their_standbys() {
    let standby = |tile: u16| NodeId([20 + tile as u8; 16]);
    let (mut jobs, _) = inherited([0, 1, 2, 3].map(|tile| Some(standby(tile))));
    let now = Instant::default();
    jobs.handle_replan(now, JOB, &PlaceSet::from_iter([owner(1)]));
    assert_eq!(ordered(&mut jobs)[1], (standby(1), TileStart::Continue));
    jobs.handle_replan(now, JOB, &PlaceSet::from_iter([owner(1), owner(2)]));
    let tiles = [owner(0), standby(1), standby(2), owner(3)];
    assert_eq!(ordered(&mut jobs), tiles.map(|node| (node, TileStart::Continue)));
}

/// A standby that was current under an earlier placement is announced and published again, once it reports under the
/// new one.
#[test]
fn standbys_are_announced_again_under_a_new_placement() {
    let (standby, other) = (NodeId([20; 16]), NodeId([21; 16]));
    let (mut jobs, _) = inherited([Some(standby), Some(other), None, None]);
    let now = Instant::default();
    let mut place = |lost: &[NodeId], owners: [NodeId; 4]| {
        jobs.handle_replan(now, JOB, &lost.iter().copied().collect());
        let epoch = jobs.epoch_of(JOB).unwrap();
        let mut say = |from, say| jobs.handle_message(now, from, JOB, epoch, say);
        let prepared = |part| {
            let has = PartState::Tile { step: 0, kept: Vec::new() };
            ToCoordinator::Prepared {
                part: PartId(part),
                result: Ok(Ready { device: 0, bytes: 1, ram: 0, ram_pages: 0, has }),
            }
        };
        for (tile, from) in (0..).zip(owners) {
            say(from, prepared(tile));
        }
        for (tile, from) in [(0, standby), (1, other)].into_iter().filter(|(_, node)| !owners.contains(node)) {
            say(from, prepared(tile));
            let figures = TileFigures::default();
            say(from, ToCoordinator::Tile(FromTile::Progress { part: PartId(tile), step: 1, figures }));
        }
        let (mut announced, mut known) = (false, false);
        while let Some(output) = jobs.poll_output(Instant::default()) {
            if let JobOutput::Message { say: ToParticipant::Record(record), .. } = output {
                known = record.parts[0].standby.is_some_and(|known| known.node == standby && known.ready);
            } else if let JobOutput::Notify(Event::Standby { current: true, .. }) = output {
                announced = true;
            }
        }
        (announced, known)
    };
    assert_eq!(place(&[], [0, 1, 2, 3].map(owner)), (true, true));
    let again = place(&[owner(1)], [owner(0), other, owner(2), owner(3)]);
    assert_eq!(again, (true, true), "a successor would not use it");
}

/// The next placement may use the memory that participants hold. Otherwise a successor would find none for the job that
/// it took over.
#[test]
fn a_successor_that_places_the_tiles_again_counts_what_participants_hold_as_free() {
    let (mut jobs, _) = running();
    jobs.handle_replan(Instant::default(), JOB, &PlaceSet::from_iter([owner(1)]));
    let asked = core::iter::from_fn(|| jobs.poll_output(Instant::default())).find_map(|output| match output {
        JobOutput::Ask { ask, .. } => Some(ask.resident),
        JobOutput::Message { .. }
        | JobOutput::Frame { .. }
        | JobOutput::Stale { .. }
        | JobOutput::Tell { .. }
        | JobOutput::Call { .. }
        | JobOutput::Measured { .. }
        | JobOutput::Drafting(_)
        | JobOutput::Shell(_)
        | JobOutput::Notify(_)
        | JobOutput::Watch { .. }
        | JobOutput::Unwatch { .. } => None,
    });
    let held: Vec<(DeviceId, Room)> = asked.expect("it asks for a placement").into_iter().collect();
    let room = Room { memory: 1 << 20, ram: 0 };
    assert_eq!(held, [0, 1, 2, 3].map(|tile| (owner(tile).device(0), room)));
}

#[test]
fn successors_outside_the_coordinators_zone_come_first() {
    let (mut jobs, _) = running();
    let apart = [
        (owner(0), SharedDomain::SameMachine),
        (owner(1), SharedDomain::SameZone),
        (owner(3), SharedDomain::OtherZone),
    ];
    let job = jobs.jobs.get_mut(&JOB).unwrap();
    job.choose_successors();
    assert_eq!(job.successors(), [0, 1, 2, 3].map(owner), "in the order of their tiles if nothing is known");
    job.domains = Domains::new(apart.into());
    job.choose_successors();
    assert_eq!(job.successors(), [3, 2, 1, 0].map(owner));
    let at = |machine: u64, zone: &'static str| (machine, zone);
    assert_eq!(SharedDomain::of(at(1, "a"), at(1, "b")), SharedDomain::SameMachine);
    assert_eq!(SharedDomain::of(at(1, "a"), at(2, "a")), SharedDomain::SameZone);
    assert_eq!(SharedDomain::of(at(1, "a"), at(2, "b")), SharedDomain::OtherZone);
    assert_eq!(
        [SharedDomain::of(at(1, ""), at(2, "")), SharedDomain::of(at(1, ""), at(2, "b"))],
        [SharedDomain::Unknown; 2]
    );
}
