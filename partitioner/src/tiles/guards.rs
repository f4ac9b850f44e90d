//! Assignment of standbys to tiles, and the predicted cost of losing a tile.
use super::{Block, GridPlan, GridWork, bytes_of, halo_bits, tile_bytes};
use crate::fleet::{DeviceId, Fleet, Link};
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// Predicted nanoseconds from the detected loss of a tile's node to the next step: agreeing on the next placement, and for a
/// warm standby, with a snapshot every `snapshot_every_ns`, copying the snapshot and replaying the steps since then. On average
/// these are half of the steps between two snapshots; the replay waits for no other tile.
pub fn takeover_ns(work: &GridWork, plan: &GridPlan, tile: usize, snapshot_every_ns: Option<u64>) -> u64 {
    let again = plan.tiles.get(tile).zip(snapshot_every_ns).map_or(0, |(tile, every)| {
        let steps = every / 2 / plan.step_ns.max(1);
        let copied = u128::from(tile_bytes(work, &tile.block, plan.depth)) * 1_000_000_000 / COPY_BYTES_PER_SECOND;
        steps.saturating_mul(tile.compute_ns).saturating_add(u64::try_from(copied).unwrap_or(u64::MAX))
    });
    AGREE_NS.saturating_add(again)
}

/// Time to agree on an epoch on a local network: 10 to 50 ms were measured.
const AGREE_NS: u64 = 30_000_000;
/// Minimum rate at which a snapshot is copied into place, within a machine's memory.
const COPY_BYTES_PER_SECOND: u128 = 2_000_000_000;

/// The standby of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileStandby {
    /// The tile.
    pub tile: u16,
    /// The standby's device.
    pub device: DeviceId,
    /// Nanoseconds between two snapshots of a warm standby.
    pub snapshot_every_ns: u64,
}

/// Nanoseconds between two snapshots of a tile: fetching them takes a tenth of the link's bandwidth, or up to a quarter if that
/// keeps the replay short relative to the time to agree on an epoch.
pub(super) fn snapshot_every_ns(work: &GridWork, block: &Block, link: &Link) -> u64 {
    let cells = u128::from(block.cells()) * u128::from(work.cell_bits) / 8;
    let fetched = cells * 1_000_000_000 / u128::from(link.bytes_per_second.max(1));
    let copied = u64::try_from(cells * 1_000_000_000 / COPY_BYTES_PER_SECOND * 50).unwrap_or(u64::MAX);
    let least = copied.clamp(SNAPSHOT_LEAST_NS, SNAPSHOT_COPIED_NS);
    let quick = u128::from(SNAPSHOT_QUICK_NS);
    let every = if fetched * 4 <= quick { quick.min(fetched * 10) } else { fetched * 10 };
    u64::try_from(every).unwrap_or(u64::MAX).clamp(least, SNAPSHOT_MOST_NS)
}

/// Nanoseconds in which a tile's neighbours send it `bytes` of halos: the halos that they retain must reach back to a snapshot.
pub fn retained_halo_ns(work: &GridWork, block: &Block, depth: u32, step_ns: u64, bytes: u64) -> u64 {
    let scratchless = GridWork { state_bits: halo_bits(work, depth), scratch_bytes: 0, ..work.clone() };
    let halo = tile_bytes(&scratchless, block, depth).saturating_sub(bytes_of(block.cells(), scratchless.state_bits));
    let cycles = u128::from(bytes) / u128::from(halo.max(1));
    u64::try_from(cycles * u128::from(depth) * u128::from(step_ns)).unwrap_or(u64::MAX)
}

/// Shorter intervals gain nothing: agreeing on a placement takes longer than the replay.
const SNAPSHOT_LEAST_NS: u64 = 200_000_000;
/// Longest interval for which fetching may use more than a tenth of the link.
const SNAPSHOT_QUICK_NS: u64 = 250_000_000;
/// The owner copies a snapshot within its memory too, which delays steps: at most a fiftieth of the time, but once per second
/// is always allowed.
const SNAPSHOT_COPIED_NS: u64 = 1_000_000_000;
/// Longest interval: a replay takes as long as the steps took at first.
const SNAPSHOT_MOST_NS: u64 = 30_000_000_000;

/// Assigns a standby to each tile without one in `kept`: a node other than the owner, with enough memory and the same
/// numerics. Prefers another machine, then another zone (or an unknown one), then the fewest tiles, then the highest bandwidth.
/// If only its owner is left for a tile, another tile's standby is reassigned to it, at worst one of `kept`. `fleet` is the
/// mesh as if no node held any part of the job.
pub fn standbys(
    work: &GridWork,
    owners: &[(DeviceId, Block)],
    depth: u32,
    fleet: &Fleet,
    kept: &[(u16, DeviceId)],
) -> Vec<TileStandby> {
    let assignment = Assignment { work, owners, depth, fleet };
    let mut chosen: Vec<(u16, DeviceId)> = kept.to_vec();
    let mut left = Vec::new();
    for tile in (0..owners.len() as u16).filter(|tile| kept.iter().all(|(of, _)| of != tile)) {
        match assignment.best(tile, &chosen) {
            Some(device) => chosen.push((tile, device)),
            None => left.push(tile),
        }
    }
    for tile in left {
        // New assignments are tried before those of `kept`.
        let changed = (0..chosen.len()).rev().find_map(|at| {
            let mut others = chosen.clone();
            let (other, device) = others.remove(at);
            others.push((tile, assignment.allows(tile, device, &others).then_some(device)?));
            others.push((other, assignment.best(other, &others)?));
            Some(others)
        });
        chosen = changed.unwrap_or(chosen);
    }
    chosen.retain(|standby| !kept.contains(standby));
    chosen.sort_unstable();
    let found = chosen.into_iter().map(|(tile, device)| {
        let (owner, block) = &owners[usize::from(tile)];
        let snapshot_every_ns = snapshot_every_ns(work, block, fleet.link(*owner, device));
        TileStandby { tile, device, snapshot_every_ns }
    });
    found.collect()
}

struct Assignment<'a> {
    work: &'a GridWork,
    owners: &'a [(DeviceId, Block)],
    depth: u32,
    fleet: &'a Fleet,
}

impl Assignment<'_> {
    /// The best device that may be the tile's standby, given the assignments so far.
    fn best(&self, tile: u16, chosen: &[(u16, DeviceId)]) -> Option<DeviceId> {
        let owner = self.owners[usize::from(tile)].0;
        let owner = self.fleet.device(owner);
        let tiles_of = |id: DeviceId| {
            let owned = self.owners.iter().filter(|(owner, _)| *owner == id).count();
            owned + chosen.iter().filter(|(_, by)| *by == id).count()
        };
        let may = self.fleet.devices.iter().filter(|device| self.allows(tile, device.id, chosen));
        let best = may.min_by_key(|device| {
            let same_machine = owner.is_some_and(|owner| owner.machine == device.machine);
            let same_zone = owner.is_some_and(|owner| owner.shares_zone(device));
            (same_machine, same_zone, tiles_of(device.id), core::cmp::Reverse(device.copy_bytes_per_second), device.id)
        });
        best.map(|device| device.id)
    }

    /// Whether a device may be the standby of a tile and has memory for it besides its other tiles of the job.
    fn allows(&self, tile: u16, device: DeviceId, chosen: &[(u16, DeviceId)]) -> bool {
        let (owner, block) = &self.owners[usize::from(tile)];
        let Some(device) = self.fleet.device(device) else { return false };
        let bytes = |block: &Block| tile_bytes(self.work, block, self.depth);
        let owned = self.owners.iter().filter(|(owner, _)| *owner == device.id).map(|(_, block)| block);
        let assigned = chosen.iter().filter(|(_, by)| *by == device.id);
        let assigned = assigned.filter_map(|(of, _)| self.owners.get(usize::from(*of))).map(|(_, block)| block);
        // The fleet's memory is as it would be without the job.
        let taken = owned.chain(assigned).map(bytes).fold(0, u64::saturating_add);
        let room = device.memory.saturating_sub(taken);
        let same = self.fleet.device(*owner).map(|owner| owner.numerics) == Some(device.numerics);
        !device.excluded
            && device.id.node != owner.node
            && same
            && device.copy_bytes_per_second > 0
            && room >= bytes(block)
    }
}
