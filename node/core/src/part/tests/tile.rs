//! A node that holds tiles, as its coordinator and neighbours see it.
use super::*;
use crate::limits::ORPHAN_SUCCEEDED_MAX;
use crate::limits::SUCCESSION_TURN;
use crate::work::steps::{Schedule, SimulationId, StepsRecord, TileOrder, TileResult, TileStart};
use crate::work::{PartRecord, ProgramRecord, Record};
use partitioner::tiles::{Block, GridWork};

/// A standby of the second tile.
const STANDBY: NodeId = NodeId([20; 16]);

fn owner(tile: u16) -> NodeId {
    NodeId([2 + tile as u8; 16])
}

/// The order of one of three slabs. This node owns the first.
fn tile_order(part: u16, standby: Option<Tier>) -> Box<Order> {
    let block = |tile: u64| Block { from: [0, 8 * tile, 0], to: [8, 8 * tile + 8, 1] };
    let tile = TileOrder {
        simulation: SimulationId { content: ContentId([9; 32]), bytes: 1 },
        work: GridWork {
            size: [8, 24, 1],
            periodic: [false; 3],
            radius: 1,
            state_bits: 128,
            traffic_bits: 128,
            face_bits: 64,
            cell_bits: 64,
            align_x: 1,
            scratch_bytes: 0,
            pass_steps: 1,
        },
        depth: 1,
        schedule: Schedule { steps: 100, report_every: 10, checkpoint_every: None, outputs: vec![], looks: None },
        blocks: (0..3).map(block).collect(),
        start: if standby.is_some() { TileStart::Snapshot } else { TileStart::Initial },
        step_ns: 1,
        snapshot_ms: 0,
    };
    Box::new(Order {
        name: "a".into(),
        part: PartId(part),
        owners: (0..3).map(owner).collect(),
        other_parts: Vec::new(),
        device: 0,
        standby,
        bytes_max: 1 << 20,
        ram: 0,
        successors: Vec::new(),
        previous: Vec::new(),
        work: PartWork::Tile(tile),
    })
}

/// A node that owns the first tile, which is loaded.
fn running() -> Parts {
    let mut parts = Parts::new(ME);
    prepare(&mut parts, EPOCH, tile_order(0, None));
    let load = outputs(&mut parts).into_iter().find_map(|output| match output {
        PartOutput::Load { load, .. } => Some(load),
        _ => None,
    });
    parts.handle_loaded(
        NOW,
        JOB,
        PartId(0),
        load.unwrap(),
        Ok(Loaded { bytes: 1, ram: 0, ram_pages: 0, step: Some(0) }),
    );
    parts
}

fn go_at(parts: &mut Parts, epoch: Epoch, at: [u32; 3]) {
    say(parts, COORDINATOR, epoch, ToParticipant::Go { part: PartId(0), resume: Resume::Tile(at.into()) });
}

/// The nodes that this one exchanges heartbeats with, as last set.
fn watched(parts: &mut Parts) -> Option<Vec<NodeId>> {
    let mut watched = outputs(parts).into_iter().filter_map(|output| match output {
        PartOutput::Watch { nodes, .. } => Some(nodes),
        _ => None,
    });
    watched.next_back()
}

#[test]
fn an_owner_that_becomes_a_standby_too_still_sends_heartbeats_to_its_neighbours() {
    let mut parts = running();
    go_at(&mut parts, EPOCH, [0; 3]);
    assert_eq!(watched(&mut parts), Some(vec![COORDINATOR, owner(1)]));
    prepare(&mut parts, EPOCH, tile_order(2, Some(Tier::Hot)));
    assert_eq!(watched(&mut parts), Some(vec![COORDINATOR, owner(1)]));
}

/// Steps whose halos are sent to a node, and the number of payloads that are discarded.
fn sent_and_dropped(parts: &mut Parts, to: NodeId) -> (Vec<u32>, usize) {
    let (mut sent, mut dropped) = (Vec::new(), 0);
    for output in outputs(parts) {
        match output {
            PartOutput::Frame { to: node, header, .. } if node == to => sent.push(header.cursor),
            PartOutput::Shell(Output::Discard { .. }) => dropped += 1,
            _ => {}
        }
    }
    (sent, dropped)
}

/// Runs a cycle of this node's tile, with its neighbour's halo of the present step.
fn make_cycle(parts: &mut Parts, halo: Option<u32>) {
    if let Some(cursor) = halo {
        let header = FrameHeader {
            job: JOB,
            epoch: EPOCH,
            part: PartId(0),
            channel: 0,
            cursor,
            count: 1,
            last: false,
            continues: None,
            drafts: Drafts::default(),
        };
        parts.handle_frame(NOW, owner(1), header, Payload::Tensor(TensorId::Arrived(u64::from(cursor))));
    }
    let run = outputs(parts).into_iter().find_map(|output| match output {
        PartOutput::Shell(Output::Run(run)) => Some(run),
        _ => None,
    });
    let run = run.expect("it computes");
    let Task::Steps(work) = run.task else { panic!("a tile runs steps") };
    parts.handle_halos(NOW, JOB, PartId(0), run.work, &vec![(1, 8); work.halos_out.len()]);
    parts.handle_ran(NOW, PartId(0), run.work, Ok(RunResult::Steps(TileResult::default())));
}

/// A neighbour's standby is promoted four steps behind. The next standby learns of the new placement before this node
/// does.
#[test]
fn halos_are_kept_until_it_is_known_which_node_needs_them() {
    let mut parts = running();
    go_at(&mut parts, EPOCH, [0; 3]);
    // Halos are kept because a standby of the neighbour may need them.
    let held = |step| ToParticipant::Held {
        part: PartId(1),
        to: PartId(0),
        cursors: Cursors::All(step),
        live: true,
        again: true,
    };
    let standby = |node| ToParticipant::Standby { part: PartId(1), node: Some(node) };
    say(&mut parts, COORDINATOR, EPOCH, standby(STANDBY));
    say(&mut parts, STANDBY, EPOCH, held(0));
    make_cycle(&mut parts, None);
    (0..5).for_each(|step| make_cycle(&mut parts, Some(step)));
    let _ = outputs(&mut parts);
    let mut again = tile_order(0, None);
    again.owners[1] = STANDBY;
    if let PartWork::Tile(tile) = &mut again.work {
        tile.start = TileStart::Continue;
    }
    prepare(&mut parts, LATER, again);
    say(&mut parts, COORDINATOR, LATER, standby(NodeId([21; 16])));
    say(&mut parts, NodeId([21; 16]), LATER, held(5));
    assert_eq!(sent_and_dropped(&mut parts, STANDBY), (vec![], 0));
    go_at(&mut parts, LATER, [5, 1, 5]);
    assert_eq!(sent_and_dropped(&mut parts, STANDBY).0, [1, 2, 3, 4, 5]);
}

/// A coordinator that did not send the order would take the answer for a rejection of this node's tile, and leave this
/// node out.
#[test]
fn a_forged_order_is_rejected_without_a_report_to_the_coordinator() {
    let mut parts = running();
    let _ = outputs(&mut parts);
    say(&mut parts, NodeId([30; 16]), EPOCH, ToParticipant::Prepare(tile_order(0, None)));
    let outputs = outputs(&mut parts);
    assert!(outputs.iter().any(|output| matches!(output, PartOutput::Refused { .. })), "{outputs:?}");
    assert!(!outputs.iter().any(|output| matches!(output, PartOutput::Report { .. })), "{outputs:?}");
    assert_eq!(parts.coordinator_of(JOB), Some((COORDINATOR, EPOCH)));
}

/// This node issued its epochs itself, so there is no coordinator that could fall silent.
#[test]
fn parts_of_a_coordinator_that_stood_down_are_dropped_unless_the_next_one_orders_them() {
    let mine = Epoch { counter: 4, issuer: ME };
    let unloads = |outputs: &[PartOutput]| {
        outputs.iter().any(|output| matches!(output, PartOutput::Shell(Output::Unload { job: JOB })))
    };
    for asked_again in [false, true] {
        let mut parts = Parts::new(ME);
        let mut order = tile_order(0, None);
        order.successors = vec![owner(1)];
        say(&mut parts, ME, mine, ToParticipant::Prepare(order.clone()));
        parts.handle_wakeup(NOW + ORPHAN_SUCCEEDED_MAX * 2);
        assert!(!unloads(&outputs(&mut parts)), "it is coordinated here");
        let left = NOW + ORPHAN_SUCCEEDED_MAX * 3;
        parts.handle_left(left, JOB, None);
        if asked_again {
            let next = Epoch { counter: 6, issuer: owner(1) };
            parts.handle_message(left, owner(1), JOB, next, ToParticipant::Prepare(order));
            assert!(parts.coordinator_of(JOB) == Some((owner(1), next)));
            parts.coordinator_heard(left + ORPHAN_SUCCEEDED_MAX, owner(1), JOB, next);
        }
        parts.handle_wakeup(left + ORPHAN_SUCCEEDED_MAX);
        assert_eq!(unloads(&outputs(&mut parts)), !asked_again);
    }
}

/// Copies of the checkpoint at this node, the first successor, and at the second one.
#[test]
fn the_successor_that_has_the_last_checkpoint_goes_first() {
    let succeeds = |parts: &mut Parts| outputs(parts).iter().any(|output| matches!(output, PartOutput::Succeed(_)));
    let part = PartRecord { device: 0, bytes: 1, ram: 0, step_ns: 1, standby: None };
    let steps = StepsRecord {
        tier: Tier::None,
        depth: None,
        step_ns: 1,
        start: TileStart::Initial,
        checkpoint: Some(40),
        rates: vec![1000; 3],
    };
    let record = Record { parts: vec![part; 3], program: ProgramRecord::Steps(steps) };
    // This node's copy, the vote of the second successor (if it arrives in time), and how many turns this node leaves
    // to it.
    for (mine, second, turns) in [
        (None, Some(Some(40)), 1),
        (None, Some(Some(u32::MAX)), 1),
        (None, None, 1),
        (None, Some(None), 0),
        (Some(40), Some(Some(40)), 0),
        (Some(40), Some(Some(u32::MAX)), 0),
        (Some(40), None, 0),
    ] {
        let mut parts = running();
        let mut order = tile_order(0, None);
        order.owners[2] = COORDINATOR;
        order.successors = vec![ME, owner(1)];
        prepare(&mut parts, LATER, order);
        say(&mut parts, COORDINATOR, LATER, ToParticipant::Record(Box::new(record.clone())));
        let copying = |output: &PartOutput| matches!(output, PartOutput::Shell(Output::Mirror { step: 40, .. }));
        assert!(outputs(&mut parts).iter().any(copying));
        if mine.is_some() {
            parts.handle_mirrored(NOW, JOB, 40, &Ok(()));
        }
        let vote = |parts: &mut Parts, now, from, checkpoint| {
            parts.handle_message(now, from, JOB, LATER, ToParticipant::CoordinatorSilent { checkpoint });
        };
        // Two of three votes are a majority, and one is this node's. If the second successor has not voted, a third
        // node has.
        let from = if second.is_some() { owner(1) } else { COORDINATOR };
        parts.handle_coordinator_silent(NOW, JOB, COORDINATOR);
        vote(&mut parts, NOW, from, second.flatten());
        assert_eq!(succeeds(&mut parts), turns == 0, "{mine:?} {second:?}");
        if turns > 0 {
            for now in (0..4).map(|quarters| NOW + SUCCESSION_TURN * quarters / 4) {
                parts.handle_wakeup(now);
                vote(&mut parts, now, from, second.flatten());
            }
            assert!(!succeeds(&mut parts), "{mine:?} {second:?}");
            parts.handle_wakeup(NOW + SUCCESSION_TURN);
            assert!(succeeds(&mut parts), "{mine:?} {second:?}: the second may be lost");
        }
    }
}
