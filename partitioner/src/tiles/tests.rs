//! Partitions of random grids on random fleets, and halo depths compared with figures worked out by hand.
use super::guards::snapshot_every_ns;
use super::*;
use crate::fleet::Link;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec;

/// D2Q9 in FP32: two copies of nine populations, three of which cross a face.
fn d2q9(width: u64, height: u64) -> GridWork {
    GridWork {
        size: [width, height, 1],
        periodic: [true, true, false],
        radius: 1,
        state_bits: 2 * 9 * 32,
        traffic_bits: 72 * 8,
        face_bits: 3 * 32,
        cell_bits: 9 * 32,
        align_x: 64,
        scratch_bytes: 1 << 20,
        pass_steps: 1,
    }
}

fn device(id: u8, gigabytes: u64, memory: u64) -> Device {
    Device {
        id: DeviceId::first([id; 16]),
        name: String::new(),
        label: String::new(),
        machine: id.into(),
        zone: String::new(),
        memory,
        bytes_per_second: gigabytes * 1_000_000_000,
        flops_per_second: 0,
        copy_bytes_per_second: gigabytes * 1_000_000_000,
        step_ns: 0,
        layer_ns: 0,
        cache_bytes_per_second: 0,
        ram: 0,
        ram_bytes_per_second: 0,
        ram_flops_per_second: 0,
        numerics: 0,
        pass_steps: 1,
        excluded: false,
    }
}

fn fleet(devices: Vec<Device>, rtt_ms: u64, bytes_per_second: u64) -> Fleet {
    Fleet { devices, links: BTreeMap::new(), default_link: Link { rtt_ns: rtt_ms * 1_000_000, bytes_per_second } }
}

fn blocks(plan: &GridPlan) -> Vec<Block> {
    plan.tiles().iter().map(|tile| tile.block).collect()
}

/// A fixed sequence of numbers that look random.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % end
    }
}

#[test]
fn every_partition_covers_the_grid_once_within_memory_and_aligned() {
    let mut draw = Draw(1);
    let mut several = 0;
    for seed in 0..400 {
        let three = draw.below(3) == 0;
        let axis = |draw: &mut Draw| 1 + draw.below(if three { 200 } else { 3000 });
        let mut work = d2q9(axis(&mut draw), axis(&mut draw));
        if three {
            work.size[2] = axis(&mut draw);
        }
        work.periodic = core::array::from_fn(|_| draw.below(2) == 0);
        let count = 1 + draw.below(9) as u8;
        let devices = (1..=count).map(|id| device(id, 1 + draw.below(50), (64 << 20) + draw.below(1 << 30))).collect();
        let fleet = fleet(devices, draw.below(5), 1_000_000_000 + draw.below(100_000_000_000));
        let plan = match cut(&work, &fleet, &RuleRates::default(), None) {
            Ok(plan) => plan,
            Err(GridError::Memory { need, offered, missing }) => {
                assert_eq!(missing, need - offered, "seed {seed}");
                continue;
            }
            Err(GridError::Packing { .. }) => continue,
            Err(other) => panic!("seed {seed}: {other}"),
        };
        let blocks = blocks(&plan);
        assert!(covers(work.size, &blocks), "seed {seed}: {blocks:?}");
        several += usize::from(blocks.len() > 1);
        for tile in plan.tiles() {
            let offered = fleet.device(tile.device).unwrap().memory;
            assert!(tile.bytes <= offered, "seed {seed}");
            assert!(tile.block.from[0] % 64 == 0, "seed {seed}");
            for axis in (0..3).filter(|&axis| tile.block.extent(axis) < work.size[axis]) {
                assert!(u64::from(plan.depth()) <= tile.block.extent(axis), "seed {seed}");
            }
        }
        assert_eq!(
            cut(&work, &fleet, &RuleRates::default(), None),
            Ok(plan),
            "seed {seed}: the same question, the same answer"
        );
    }
    assert!(several > 100, "{several} of 400 were split");
}

#[test]
fn a_fast_machine_without_memory_is_left_out() {
    let work = d2q9(18, 16);
    // Room for the scratch memory and one cell.
    let full = device(1, 900, work.scratch_bytes + 100);
    for others in [1, 5] {
        let devices = (2..2 + others).map(|id| device(id, 10, 1 << 30));
        let fleet = fleet([full.clone()].into_iter().chain(devices).collect(), 1, 1_000_000_000);
        let plan = cut(&work, &fleet, &RuleRates::default(), None).unwrap();
        assert!(plan.tiles().iter().all(|tile| tile.device != full.id), "{plan:?}");
    }
}

#[test]
fn tiles_are_as_large_as_their_machines_are_fast() {
    let fleet = fleet(vec![device(1, 10, 8 << 30), device(2, 30, 8 << 30)], 0, 10_000_000_000);
    let plan = cut(&d2q9(2048, 4096), &fleet, &RuleRates::default(), None).unwrap();
    let cells: Vec<u64> = plan.tiles().iter().map(|tile| tile.block.cells()).collect();
    assert_eq!(cells, vec![2048 * 1024, 2048 * 3072]);
    let [a, b] = plan.tiles() else { panic!("two tiles") };
    assert!(a.compute_ns.abs_diff(b.compute_ns) * 100 < a.compute_ns, "equal times");
    // Measured with the rule itself, the first device is the faster one.
    let measured = vec![(DeviceId::first([1; 16]), 900), (DeviceId::first([2; 16]), 100)];
    let plan = cut(&d2q9(2048, 4096), &fleet, &RuleRates { measured, unmeasured: 500 }, None).unwrap();
    assert_eq!(plan.tiles()[0].block.cells(), 2048 * 3072);
}

#[test]
fn a_machine_that_does_not_help_is_not_used() {
    let mut slow = device(2, 1, 8 << 30);
    slow.step_ns = 50_000_000;
    let fleet = fleet(vec![device(1, 30, 8 << 30), slow], 1, 100_000_000);
    let plan = cut(&d2q9(2048, 2048), &fleet, &RuleRates::default(), None).unwrap();
    assert_eq!(plan.tiles().len(), 1);
    assert_eq!((plan.depth(), plan.busy_percent()), (1, 100));
}

#[test]
fn memory_comes_before_speed() {
    let small = 100 << 20;
    let fleet = fleet(vec![device(1, 100, small), device(2, 1, 8 << 30)], 0, 10_000_000_000);
    let work = d2q9(2048, 2048);
    let plan = cut(&work, &fleet, &RuleRates::default(), None).unwrap();
    let tile = plan.tiles().iter().find(|tile| tile.device == DeviceId::first([1; 16])).unwrap();
    assert!(tile.bytes <= small && tile.bytes > small / 2, "{}", tile.bytes);
    let none = Fleet { devices: vec![device(1, 100, small)], ..fleet };
    assert!(matches!(cut(&work, &none, &RuleRates::default(), None), Err(GridError::Memory { .. })));
}

/// A wide-area case: 20 ms one way and 1 Gbit/s between machines of 20 GB/s.
#[test]
fn the_halo_is_as_deep_as_the_network_needs() {
    let wan = |width, height| {
        let pair = vec![device(1, 20, 64 << 30), device(2, 20, 64 << 30)];
        cut(&d2q9(width, height), &fleet(pair, 40, 125_000_000), &RuleRates::default(), None).unwrap()
    };
    // A tile of 1024²: 3.8 ms per step. 20 ms of latency over 3.8 ms less 0.2 ms of transfer: six or seven steps.
    let plan = wan(1024, 2048);
    assert!((6..=9).contains(&plan.depth()), "{}", plan.depth());
    assert!(plan.busy_percent() >= 97, "{}", plan.busy_percent());
    // A tile of 4096²: steps of 60 ms hide the latency without a deeper halo.
    assert_eq!(wan(4096, 8192).depth(), 1);
    // On a fast network no cells are computed twice.
    let pair = vec![device(1, 20, 64 << 30), device(2, 20, 64 << 30)];
    let near = cut(&d2q9(1024, 2048), &fleet(pair, 0, 10_000_000_000), &RuleRates::default(), None).unwrap();
    assert_eq!(near.depth(), 1);
}

#[test]
fn a_depth_that_does_not_fit_is_rejected_with_the_maximum() {
    let pair = vec![device(1, 20, 64 << 30), device(2, 20, 64 << 30)];
    let fleet = fleet(pair, 0, 1_000_000_000_000);
    let work = GridWork { periodic: [false; 3], ..d2q9(4096, 20) };
    assert_eq!(cut(&work, &fleet, &RuleRates::default(), Some(3)).unwrap().depth(), 3);
    // A single tile has no halo, so any depth "fits"; but depth 0 does not.
    assert!(matches!(cut(&work, &fleet, &RuleRates::default(), Some(0)), Err(GridError::Depth { .. })));
    let flat = GridWork { size: [64, 20, 1], ..work };
    let plan = cut(&flat, &fleet, &RuleRates::default(), Some(10));
    assert!(plan.is_ok(), "{plan:?}");
}

#[test]
fn invalid_grids_are_rejected_by_name() {
    let fleet = fleet(vec![device(1, 20, 64 << 30)], 0, 1_000_000_000);
    for work in [
        GridWork { size: [0, 1, 1], ..d2q9(1, 1) },
        GridWork { size: [1 << 30, 1 << 30, 1 << 30], ..d2q9(1, 1) },
        GridWork { radius: 0, ..d2q9(64, 64) },
        GridWork { state_bits: 0, ..d2q9(64, 64) },
    ] {
        assert!(matches!(cut(&work, &fleet, &RuleRates::default(), None), Err(GridError::Invalid(_))), "{work:?}");
    }
    let empty = Fleet { devices: vec![], ..fleet };
    assert_eq!(cut(&d2q9(64, 64), &empty, &RuleRates::default(), None), Err(GridError::NoDevices));
}

#[test]
fn links_are_mirrored_and_cover_the_halo() {
    // A k-d partition: one tile spans a periodic axis, two tiles share the rest.
    let block = |from: [u64; 3], to: [u64; 3]| Block { from, to };
    let blocks = [block([0, 0, 0], [128, 40, 1]), block([0, 40, 0], [64, 100, 1]), block([64, 40, 0], [128, 100, 1])];
    let (size, periodic, reach) = ([128, 100, 1], [true, true, false], 3);
    let all: Vec<Vec<TileLink>> = (0..3).map(|me| links(size, periodic, &blocks, me, reach)).collect();
    for (me, own) in all.iter().enumerate() {
        for link in own {
            let mirror = TileLink {
                peer: me as u16,
                shift: link.shift.map(|shift| -shift),
                takes: link.gives,
                gives: link.takes,
            };
            assert!(all[usize::from(link.peer)].contains(&mirror), "{me}: {link:?}");
        }
        // Every cell of the halo is in exactly one shifted neighbour.
        let b = &blocks[me];
        let ring = |axis: usize| if b.extent(axis) < size[axis] { reach as i64 } else { 0 };
        for y in b.from[1] as i64 - ring(1)..b.to[1] as i64 + ring(1) {
            for x in b.from[0] as i64 - ring(0)..b.to[0] as i64 + ring(0) {
                let within = |block: &Block, shift: [i8; 3]| {
                    let at = [x - i64::from(shift[0]) * 128, y - i64::from(shift[1]) * 100];
                    (0..2).all(|axis| (block.from[axis] as i64..block.to[axis] as i64).contains(&at[axis]))
                };
                if within(b, [0; 3]) {
                    continue;
                }
                let owners =
                    own.iter().filter(|link| link.takes && within(&blocks[usize::from(link.peer)], link.shift));
                assert_eq!(owners.count(), 1, "tile {me}, cell {x}, {y}");
            }
        }
    }
    assert!(all[0].iter().any(|link| link.gives && !link.takes), "a tile that wraps gives without taking");
}

#[test]
fn tiles_and_their_standbys_have_the_same_numerics() {
    let mut devices: Vec<Device> = (1..=6).map(|id| device(id, 20, 8 << 30)).collect();
    // Three devices with other numerics, and faster.
    for odd in &mut devices[3..] {
        (odd.numerics, odd.copy_bytes_per_second) = (9, 60_000_000_000);
    }
    let (fleet, work) = (fleet(devices, 0, 10_000_000_000), d2q9(4096, 4096));
    let plan = cut(&work, &fleet, &RuleRates::default(), None).unwrap();
    let kind = |id: DeviceId| fleet.device(id).unwrap().numerics;
    assert!(plan.tiles().len() > 1 && plan.tiles().iter().all(|tile| kind(tile.device) == 9), "{plan:?}");
    let owners: Vec<_> = plan.tiles().iter().map(|tile| (tile.device, tile.block)).collect();
    let found = standbys(&work, &owners, plan.depth(), &fleet, &[]);
    assert_eq!(found.len(), owners.len());
    for TileStandby { tile, device, snapshot_every_ns } in found {
        assert!(kind(device) == 9 && device != owners[usize::from(tile)].0);
        assert!((1_000_000_000..=30_000_000_000).contains(&snapshot_every_ns));
    }
}

#[test]
fn snapshots_take_a_tenth_of_the_link() {
    let work = d2q9(4096, 4096);
    let block = Block { from: [0; 3], to: [4096, 2048, 1] };
    let every = |bytes_per_second| snapshot_every_ns(&work, &block, &Link { rtt_ns: 1_000_000, bytes_per_second });
    // 302 MB over 1 Gbit/s take 2.4 s.
    let gigabit = every(125_000_000);
    assert!(gigabit.abs_diff(24_159_191_040) < 10, "{gigabit}");
    assert_eq!(every(100_000_000_000), 1_000_000_000);
    assert_eq!(every(0), 30_000_000_000);
    // A small tile may use a fifth: 6 MB every quarter of a second.
    let small = Block { from: [0; 3], to: [416, 416, 1] };
    let link = Link { rtt_ns: 1_000_000, bytes_per_second: 125_000_000 };
    assert_eq!(snapshot_every_ns(&work, &small, &link), 250_000_000);
}

#[test]
fn retained_halos_reach_back_in_proportion_to_their_bytes() {
    // Two rows of 8192 cells above and below, twelve bytes each per step, every 2 ms.
    let work = d2q9(8192, 8192);
    let block = Block { from: [0, 2048, 0], to: [8192, 4096, 1] };
    let last = retained_halo_ns(&work, &block, 1, 2_000_000, 256 << 20);
    assert_eq!(last, (256 << 20) / (2 * 8192 * 12) * 2_000_000);
    // A tile without neighbours receives no halo.
    let whole = Block { from: [0; 3], to: [8192, 8192, 1] };
    assert_eq!(retained_halo_ns(&work, &whole, 1, u64::MAX, 256 << 20), u64::MAX);
}

#[test]
fn a_warm_standby_replays_half_of_the_steps_between_snapshots() {
    let fleet = fleet(vec![device(1, 20, 8 << 30)], 0, 1 << 30);
    let work = d2q9(2048, 2048);
    let plan = cut(&work, &fleet, &RuleRates::default(), None).unwrap();
    let hot = takeover_ns(&work, &plan, 0, None);
    let warm = takeover_ns(&work, &plan, 0, Some(4_000_000_000));
    // A single tile is as fast as the mesh: replaying two seconds takes two seconds, plus the copy.
    let copy = tile_bytes(&work, &plan.tiles()[0].block, 1) / 2;
    let expected = hot + 2_000_000_000 + copy;
    assert!(warm.abs_diff(expected) < expected / 50, "{warm}, expected {expected}");
}

#[test]
fn the_halo_depth_follows_the_steps_per_pass() {
    let work = GridWork { pass_steps: 8, ..d2q9(2048, 2048) };
    let planned = |count: u8, pass_steps: u32| {
        let devices = (1..=count).map(|id| Device { pass_steps, ..device(id, 25, 1 << 34) }).collect();
        // A network that costs nothing: only the saving of a pass makes a deeper halo worthwhile.
        cut(&work, &fleet(devices, 0, 5_000_000_000), &RuleRates::default(), None).unwrap()
    };
    let ratio = |count: u8| planned(count, 8).step_ns() as f64 / planned(count, 1).step_ns() as f64;
    assert_eq!((planned(2, 1).depth(), planned(2, 8).depth()), (1, 8));
    assert!((0.55..0.60).contains(&ratio(2)), "{}", ratio(2));
    // A single tile has no halo, and its passes have the maximum length.
    assert!((ratio(1) - 9.0 / 16.0).abs() < 1e-3, "{}", ratio(1));
}

#[test]
fn similar_speeds_measured_on_one_machine_are_averaged() {
    let of_machine = |id, gigabytes, machine| {
        let mut device = device(id, gigabytes, 8 << 30);
        device.machine = machine;
        device
    };
    let rows = |devices: Vec<Device>, paces: &RuleRates| {
        let plan = cut(&d2q9(2048, 2048), &fleet(devices, 0, 10_000_000_000), paces, None).unwrap();
        plan.tiles().iter().map(|tile| tile.block.extent(1)).collect::<Vec<_>>()
    };
    let paces = RuleRates::default();
    assert_eq!(rows(vec![of_machine(1, 12, 5), of_machine(2, 15, 5)], &paces), [1024, 1024]);
    // Other machines, or speeds too far apart, stay as measured.
    assert_eq!(rows(vec![of_machine(1, 10, 5), of_machine(2, 15, 6)], &paces), [819, 1229]);
    assert_eq!(rows(vec![of_machine(1, 10, 5), of_machine(2, 30, 5)], &paces), [512, 1536]);
    // Once rates are measured with the rule, they apply.
    let measured = vec![(DeviceId::first([1; 16]), 1000), (DeviceId::first([2; 16]), 1600)];
    let paces = RuleRates { measured, unmeasured: 1300 };
    assert_eq!(rows(vec![of_machine(1, 12, 5), of_machine(2, 15, 5)], &paces), [788, 1260]);
}

#[test]
fn a_partition_is_compared_with_a_better_one() {
    let fleet = fleet(vec![device(1, 20, 8 << 30), device(2, 20, 8 << 30)], 0, 10_000_000_000);
    let question = |measured: Vec<(DeviceId, u32)>, present| GridQuestion {
        work: d2q9(2048, 2048),
        fleet: fleet.clone(),
        rates: RuleRates { measured, unmeasured: 1000 },
        depth: None,
        present,
    };
    let even = question(Vec::new(), None).answer().unwrap();
    assert_eq!(even.before_ns(), None);
    let owners: Vec<_> = even.tiles().iter().map(|tile| (tile.device, tile.block)).collect();
    let present = Some((owners.clone(), even.depth()));
    let same = question(Vec::new(), present.clone()).answer().unwrap();
    assert_eq!(same.before_ns(), Some(same.step_ns()), "compared with itself");
    // One device turns out to be half as fast: the better partition takes two thirds of the time.
    let slow = vec![(owners[0].0, 500), (owners[1].0, 1000)];
    let better = question(slow, present).answer().unwrap();
    let (before, after) = (better.before_ns().unwrap(), better.step_ns());
    assert!((after * 3).abs_diff(before * 2) < before / 20, "{before} and {after}");
    // An owner of both tiles takes twice as long.
    let both = owners.iter().map(|(_, block)| (owners[0].0, *block)).collect();
    let shared = question(Vec::new(), Some((both, even.depth()))).answer().unwrap();
    assert!(shared.before_ns().unwrap().abs_diff(2 * even.step_ns()) < even.step_ns() / 10, "{shared:?}");
    let mut gone = owners;
    gone[1].0 = DeviceId::first([9; 16]);
    assert_eq!(question(Vec::new(), Some((gone, 1))).answer().unwrap().before_ns(), None);
}

/// Each of four nodes has memory for one tile besides its own: in whatever order the tiles are assigned, no node may be left
/// with only its own tile to choose.
#[test]
fn each_tile_has_a_standby_if_memory_allows() {
    let work = d2q9(832, 832);
    let whole = Block { from: [0; 3], to: work.size };
    let tile = tile_bytes(&work, &Block { to: [832, 208, 1], ..whole }, 8);
    for order in 0..256u64 {
        // The speeds decide the order of preference.
        let speed = |id: u64| 10 + (order >> (2 * id) & 3);
        let devices = (0..4).map(|id| device(id as u8 + 1, speed(id), tile * 26 / 9)).collect();
        let fleet = fleet(devices, 0, 10_000_000_000);
        let rows = |id: u64| Block { from: [0, 208 * id, 0], to: [832, 208 * (id + 1), 1] };
        let owners: Vec<_> = (0..4).map(|id| (DeviceId::first([id as u8 + 1; 16]), rows(id))).collect();
        let room = fleet.devices[0].memory;
        assert!((2 * tile..3 * tile).contains(&room), "{room} for tiles of {tile}");
        let found = standbys(&work, &owners, 8, &fleet, &[]);
        assert_eq!(found.len(), 4, "{order}: {found:?}");
        let devices: BTreeSet<DeviceId> = found.iter().map(|standby| standby.device).collect();
        assert_eq!(devices.len(), 4, "{order}: each has memory for one");
        assert!(found.iter().all(|standby| standby.device != owners[usize::from(standby.tile)].0));
        // Three nodes that are each other's standbys leave the fourth tile to its own owner: one assignment must change.
        let kept = [0, 1, 2].map(|tile: u8| (u16::from(tile), DeviceId::first([(tile + 1) % 3 + 1; 16])));
        let found = standbys(&work, &owners, 8, &fleet, &kept);
        let [changed, last] = found[..] else { panic!("{found:?}") };
        assert_eq!((last.tile, changed.device), (3, owners[3].0), "{found:?}");
        assert!(kept.contains(&(changed.tile, last.device)), "{found:?}");
    }
}

#[test]
fn standbys_of_tiles_are_in_another_zone_if_memory_allows() {
    let work = d2q9(2048, 2048);
    let zones = ["attic", "attic", "cellar", "cellar", ""];
    for count in 2..=5 {
        let devices = (0..count).map(|at| {
            let zone = String::from(zones[at]);
            Device { zone, ..device(at as u8 + 1, 10 + at as u64, 1 << 34) }
        });
        let fleet = fleet(devices.collect(), 1, 1_000_000_000);
        let owners: Vec<(DeviceId, Block)> = cut(&work, &fleet, &RuleRates::default(), Some(8))
            .unwrap()
            .tiles()
            .iter()
            .map(|t| (t.device, t.block))
            .collect();
        let found = standbys(&work, &owners, 8, &fleet, &[]);
        assert_eq!(found.len(), owners.len());
        let shares = |standby: &&TileStandby| {
            let owner = fleet.device(owners[usize::from(standby.tile)].0).unwrap();
            owner.shares_zone(fleet.device(standby.device).unwrap())
        };
        let same = found.iter().filter(shares).count();
        assert_eq!(same, if count == 2 { 2 } else { 0 }, "{count}: {found:?}");
    }
}
