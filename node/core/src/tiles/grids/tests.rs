//! What a coordinator does with the states that owners announce.
use super::*;
use crate::work::steps::{Schedule, SimulationId, Tier, TileStart, Will, WilledTile};
use alloc::vec;

const ME: NodeId = NodeId([1; 16]);
const JOB: JobId = JobId(7);
const STEP: u32 = 10;
/// Of a tile's cells: 64 by 16, 8 bytes each.
const BYTES: u64 = 8 * 64 * 16;

fn owner(tile: u16) -> NodeId {
    NodeId([2 + tile as u8; 16])
}

/// A job of four tiles that this node coordinates, and its epoch.
fn running() -> (Grids, Epoch) {
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
    let simulation = SimulationId { content: crate::id::ContentId([9; 32]), bytes: 1 };
    let spec = GridSpec {
        job: JOB,
        name: "a".into(),
        simulation,
        work,
        depth: None,
        schedule,
        tier: Tier::None,
        resume: None,
    };
    let block = |tile: u64| Block { from: [0, 16 * tile, 0], to: [64, 16 * tile + 16, 1] };
    let willed = WilledTile { bytes: 1 << 20, step_ns: 1, pace: 0, standby: None, snapshot_ms: 0 };
    let tiles = vec![willed; 4];
    let start = TileStart::Continue;
    let will = Will { tier: Tier::None, depth: None, step_ns: 1, start, checkpoint: None, tiles };
    let inheritance = Inheritance {
        spec,
        epoch: Epoch { counter: 1, minter: NodeId([99; 16]) },
        depth: 1,
        owners: (0..4).map(|tile| (owner(tile), block(tile.into()))).collect(),
        formers: Vec::new(),
        will,
    };
    let mut grids = Grids::new(ME);
    assert!(grids.handle_inherited(inheritance));
    let epoch = grids.epoch_of(JOB).unwrap();
    assert_eq!(epoch.minter, ME);
    (grids, epoch)
}

/// A tile's owner announces a state.
fn saved(grids: &mut Grids, epoch: Epoch, tile: u16, kind: SaveKind, bytes: u64) -> Option<Unprepared> {
    let say = TileMessage::Saved { tile, step: STEP, kind, bytes };
    grids.handle_message(Instant::default(), owner(tile), JOB, epoch, &say)
}

/// Tiles whose states are fetched from now on.
fn fetched(grids: &mut Grids) -> Vec<u16> {
    let mut tiles = Vec::new();
    while let Some(output) = grids.poll_output() {
        if let GridOutput::Collect { tile, .. } = output {
            tiles.push(tile);
        }
    }
    tiles
}

#[test]
fn two_parts_of_a_checkpoint_are_fetched_at_once() {
    let (mut grids, epoch) = running();
    let now = Instant::default();
    for tile in [3, 1, 0, 2] {
        assert_eq!(saved(&mut grids, epoch, tile, SaveKind::Checkpoint, BYTES), None);
    }
    assert_eq!(fetched(&mut grids), [3, 1]);
    // Frames do not wait for them.
    assert_eq!(saved(&mut grids, epoch, 2, SaveKind::Output(0), 99), None);
    assert_eq!(fetched(&mut grids), [2]);
    grids.handle_collected(now, JOB, 3, STEP, SaveKind::Checkpoint, Ok(()));
    assert_eq!(fetched(&mut grids), [0]);
    // One that failed leaves its turn to the next, and gets another.
    grids.handle_collected(now, JOB, 1, STEP, SaveKind::Checkpoint, Err("the disk is full".into()));
    assert_eq!(fetched(&mut grids), [2]);
    grids.handle_collected(now, JOB, 0, STEP, SaveKind::Checkpoint, Ok(()));
    assert_eq!(fetched(&mut grids), [0; 0]);
    grids.handle_wakeup(now + crate::limits::COLLECT_RETRY);
    assert_eq!(fetched(&mut grids), [1]);
}

#[test]
fn an_owner_that_announces_more_than_its_tile_has_is_not_believed() {
    let (mut grids, epoch) = running();
    let refused = saved(&mut grids, epoch, 1, SaveKind::Checkpoint, BYTES + 1).expect("it is refused");
    assert!(refused.failed && refused.reason.contains("8193 bytes, its cells have 8192"), "{refused:?}");
    assert_eq!(fetched(&mut grids), [0; 0]);
    assert_eq!(saved(&mut grids, epoch, 1, SaveKind::Checkpoint, BYTES), None);
    assert_eq!(fetched(&mut grids), [1]);
}
