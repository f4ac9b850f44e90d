//! Partitioning of a grid into tiles for machines of different speeds, and the choice of the halo depth.
//!
//! Two partitions are compared by predicted time. Recursive bisection splits the grid repeatedly across its longest axis, in
//! proportion to the cells per second of the machines on either side; the alternative splits it into slabs. A halo of depth k
//! is exchanged every k steps: fewer network waits, but more cells computed twice. Next: `explain.rs`.
use crate::cost;
use crate::explain::bytes;
use crate::fleet::{Device, DeviceId, Fleet};
use alloc::collections::BTreeSet;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;
use serde::{Deserialize, Serialize};

mod guards;
mod question;

pub use guards::{TileStandby, retained_halo_ns, standbys, takeover_ns};
pub use question::{GridQuestion, RuleRates};

/// Maximum number of tiles of a job: each exchanges halos with its neighbours every few steps.
pub const TILES_MAX: usize = 256;
/// Maximum halo depth: beyond this the cells computed twice cost more than any network's latency.
pub const DEPTH_MAX: u32 = 64;
/// Cells along the longest axis: positions fit in 32 bits with room for halos.
pub const AXIS_MAX: u64 = 1 << 30;

/// A simulation as the planner sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GridWork {
    /// Cells along x, y and z; z is 1 in two dimensions.
    pub size: [u64; 3],
    /// Periodic axes.
    pub periodic: [bool; 3],
    /// Cells that a step reads to each side.
    pub radius: u32,
    /// Bits of state per cell in memory, all copies.
    pub state_bits: u64,
    /// Bits read and written per cell and step.
    pub traffic_bits: u64,
    /// Bits per cell in a halo of depth 1: only the values that cross the face.
    pub face_bits: u64,
    /// Bits per cell in a deeper halo: all values that a step reads.
    pub cell_bits: u64,
    /// Splits across x fall on multiples of this (the state hash covers runs of 64 cells).
    pub align_x: u64,
    /// Bytes each tile needs besides its cells.
    pub scratch_bytes: u64,
    /// Steps that one pass over the memory can compute, on devices that support it; 1: each step is a pass.
    pub pass_steps: u32,
}

impl GridWork {
    /// Bytes of a block's cells as saved: each row starts at a whole byte.
    pub fn saved_bytes(&self, block: &Block) -> u64 {
        let row = bytes_of(block.extent(0), self.cell_bits);
        row.saturating_mul(block.extent(1)).saturating_mul(block.extent(2))
    }
}

/// Cells `from..to` along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Block {
    /// First cell.
    pub from: [u64; 3],
    /// One past the last.
    pub to: [u64; 3],
}

/// One tile on one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GridTile {
    /// The device.
    pub device: DeviceId,
    /// The cells it owns.
    pub block: Block,
    /// Bytes it takes there: cells, halo, scratch.
    pub bytes: u64,
    /// Predicted compute nanoseconds per step, halo cells included.
    pub compute_ns: u64,
    /// Predicted nanoseconds per step from the edge being computed until the tile's halo has arrived.
    pub halo_ns: u64,
}

/// A valid partition: its tiles cover each cell once, on distinct devices, and fitted in memory when it was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GridPlan {
    tiles: Vec<GridTile>,
    depth: u32,
    step_ns: u64,
    before_ns: Option<u64>,
}

impl GridPlan {
    /// The tiles, in the order of the partition.
    pub fn tiles(&self) -> &[GridTile] {
        &self.tiles
    }

    /// Steps between two exchanges; the halo is this many times the radius wide.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Predicted nanoseconds per step of the slowest tile, halos included.
    pub fn step_ns(&self) -> u64 {
        self.step_ns
    }

    /// Predicted nanoseconds per step of the present partition by the same measure, if there is one.
    pub fn before_ns(&self) -> Option<u64> {
        self.before_ns
    }

    /// Predicted share of the step in which the slowest tile computes instead of waiting, in percent.
    pub fn busy_percent(&self) -> u64 {
        let compute = self.tiles.iter().map(|tile| tile.compute_ns).max().unwrap_or(0);
        (compute.saturating_mul(100) / self.step_ns.max(1)).min(100)
    }
}

/// Why a grid cannot be partitioned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum GridError {
    /// Sizes or bit counts out of range.
    #[error("the grid cannot be planned: {0}")]
    Invalid(String),
    /// No device may be used.
    #[error("no node of the mesh may take work: join one, or end a drain")]
    NoDevices,
    /// The grid is larger than the memory of all nodes.
    #[error(
        "the grid needs {need}, the mesh offers {offered}: {missing} are missing; join another node, raise --memory of a node, \
         or make the grid smaller",
        need = bytes(*.need), offered = bytes(*.offered), missing = bytes(*.missing)
    )]
    Memory {
        /// Bytes needed.
        need: u64,
        /// Bytes offered.
        offered: u64,
        /// The difference.
        missing: u64,
    },
    /// It fits in total, but not in whole layers of cells.
    #[error(
        "the mesh offers enough in total ({offered} for {need}), but no partition fits its nodes: one tile needs {missing} \
         more; raise --memory there, or exclude the smallest node",
        need = bytes(*.need), offered = bytes(*.offered), missing = bytes(*.missing)
    )]
    Packing {
        /// Bytes needed.
        need: u64,
        /// Bytes offered.
        offered: u64,
        /// What the tile with the worst fit lacks.
        missing: u64,
    },
    /// The requested depth does not fit the tiles.
    #[error(
        "halo depth {depth} exceeds the smallest tile, which has {cells} cells along a split axis: use at most {most}"
    )]
    Depth {
        /// The requested depth.
        depth: u32,
        /// Cells of the smallest tile along a split axis.
        cells: u64,
        /// The maximum depth that fits.
        most: u32,
    },
}

impl Block {
    /// Number of cells.
    pub fn cells(&self) -> u64 {
        (0..3).map(|axis| self.extent(axis)).fold(1, u64::saturating_mul)
    }

    /// Cells along an axis.
    pub fn extent(&self, axis: usize) -> u64 {
        self.to[axis].saturating_sub(self.from[axis])
    }

    fn intersect(&self, other: &Block) -> Option<Block> {
        let from = core::array::from_fn(|axis| self.from[axis].max(other.from[axis]));
        let to: [u64; 3] = core::array::from_fn(|axis| self.to[axis].min(other.to[axis]));
        (0..3).all(|axis| from[axis] < to[axis]).then_some(Block { from, to })
    }
}

/// The partition with the least predicted time per step, from the devices' memory bandwidth and the rates measured with the
/// rule so far (`rates`). `depth`: the requested halo depth; `None` chooses one.
///
/// Devices that do not help are not used. All tiles are on devices with the same numerics, so that the result does not depend
/// on the partition. Ties go to fewer tiles, then to the shallower halo.
///
/// # Errors
/// The grid is invalid or does not fit, or the depth exceeds a tile.
pub fn cut(work: &GridWork, fleet: &Fleet, paces: &RuleRates, depth: Option<u32>) -> Result<GridPlan, GridError> {
    validate(work)?;
    let kinds: BTreeSet<u64> = fleet.devices.iter().filter(|d| !d.excluded).map(|device| device.numerics).collect();
    let of = |kind: u64| cut_for(work, fleet, paces, depth, kind);
    let mut plans: Vec<_> = kinds.into_iter().map(of).collect();
    // The fastest plan; without one, the error with the least missing memory.
    plans.sort_by_key(|plan| match plan {
        Ok(plan) => (0, plan.step_ns),
        Err(GridError::Packing { missing, .. } | GridError::Memory { missing, .. }) => (1, *missing),
        Err(GridError::Invalid(_) | GridError::NoDevices | GridError::Depth { .. }) => (2, 0),
    });
    plans.into_iter().next().unwrap_or(Err(GridError::NoDevices))
}

fn cut_for(
    work: &GridWork,
    fleet: &Fleet,
    paces: &RuleRates,
    depth: Option<u32>,
    numerics: u64,
) -> Result<GridPlan, GridError> {
    let mut candidates = candidates(work, fleet, paces);
    candidates.retain(|candidate| candidate.device.numerics == numerics);
    if candidates.is_empty() {
        // No node has memory for a tile, however small.
        let may_work = |d: &&Device| d.numerics == numerics && !d.excluded && d.copy_bytes_per_second > 0;
        let room = || fleet.devices.iter().filter(may_work).map(|d| d.memory);
        let offered = room().reduce(u64::saturating_add).ok_or(GridError::NoDevices)?;
        let need = bytes_of(cells(work), work.state_bits).saturating_add(work.scratch_bytes);
        if offered >= need {
            // Enough in total, but no device holds the scratch memory of a tile and one cell.
            let missing = work.scratch_bytes.saturating_add(1).saturating_sub(room().max().unwrap_or(0));
            return Err(GridError::Packing { need, offered, missing });
        }
        return Err(GridError::Memory { need, offered, missing: need - offered });
    }
    let planner = Planner { work, fleet, depth };
    let mut failed = None;
    // Where the fastest devices have too little memory, every choice of them fails: then those with the least memory are left
    // out.
    loop {
        let error = match planner.best(&candidates) {
            Ok(plan) => return Ok(plan),
            Err(error) => error,
        };
        if let Some(short) = shortage(work, &candidates) {
            return Err(failed.unwrap_or(short));
        }
        failed.get_or_insert(error);
        for _ in 0..candidates.len().div_ceil(LEFT_OUT) {
            let least = (0..candidates.len()).min_by_key(|&at| candidates[at].usable);
            least.into_iter().for_each(|at| _ = candidates.remove(at));
        }
    }
}

/// A quarter of the devices is left out at a time, at least one.
const LEFT_OUT: usize = 4;

/// Bits per cell of a halo of this depth on the wire, averaged over its layers: the outermost layer carries only what moves
/// inward, the inner layers carry everything.
pub fn halo_bits(work: &GridWork, depth: u32) -> u64 {
    let inner = u64::from(depth.max(1)) - 1;
    (work.face_bits + inner * work.cell_bits).div_ceil(inner + 1)
}

/// Bytes of a tile with its halo.
pub fn tile_bytes(work: &GridWork, block: &Block, depth: u32) -> u64 {
    let halo = u64::from(work.radius) * u64::from(depth);
    let cells = (0..3).filter(|&axis| work.size[axis] > 1).fold(block.cells(), |cells, axis| {
        let extent = block.extent(axis).max(1);
        let grown = if extent < work.size[axis] { extent + 2 * halo } else { extent };
        (u128::from(cells) * u128::from(grown) / u128::from(extent)).try_into().unwrap_or(u64::MAX)
    });
    bytes_of(cells, work.state_bits).saturating_add(work.scratch_bytes)
}

fn bytes_of(cells: u64, bits: u64) -> u64 {
    u64::try_from((u128::from(cells) * u128::from(bits)).div_ceil(8)).unwrap_or(u64::MAX)
}

fn validate(work: &GridWork) -> Result<(), GridError> {
    if work.size.iter().any(|&cells| cells == 0 || cells > AXIS_MAX) {
        return Err(GridError::Invalid("each axis needs 1 to 2^30 cells".into()));
    }
    if work.size.iter().fold(1u128, |cells, &axis| cells * u128::from(axis)) > 1 << 50 {
        return Err(GridError::Invalid("more than 2^50 cells in all".into()));
    }
    let bits = [work.state_bits, work.traffic_bits, work.face_bits, work.cell_bits];
    if bits.iter().any(|&bits| bits == 0 || bits > 1 << 16)
        || work.radius == 0
        || work.radius > 64
        || work.align_x == 0
        || !(1..=DEPTH_MAX).contains(&work.pass_steps)
    {
        return Err(GridError::Invalid(
            "a cell has 1 to 65536 bits and a radius of 1 to 64, and a pass 1 to 64 steps".into(),
        ));
    }
    Ok(())
}

/// A device that may be used.
struct Candidate<'a> {
    device: &'a Device,
    /// Cells per second.
    speed: u64,
    usable: u64,
}

/// The usable devices, fastest first.
fn candidates<'a>(work: &GridWork, fleet: &'a Fleet, paces: &RuleRates) -> Vec<Candidate<'a>> {
    let candidate = |(device, speed): (&'a Device, u64)| Candidate {
        device,
        speed,
        usable: device.memory.saturating_sub(work.scratch_bytes),
    };
    let usable = |candidate: &Candidate<'_>| !candidate.device.excluded && candidate.speed > 0 && candidate.usable > 0;
    let speeds = question::speeds(work, &fleet.devices, paces);
    let mut candidates: Vec<Candidate<'a>> = fleet.devices.iter().zip(speeds).map(candidate).filter(usable).collect();
    candidates.sort_by_key(|candidate| (core::cmp::Reverse(candidate.speed), candidate.device.id));
    candidates.truncate(TILES_MAX);
    candidates
}

fn cells(work: &GridWork) -> u64 {
    work.size.iter().fold(1, |cells, &axis| cells.saturating_mul(axis))
}

/// The error that the grid does not fit in total, if so.
fn shortage(work: &GridWork, candidates: &[Candidate<'_>]) -> Option<GridError> {
    let need = bytes_of(cells(work), work.state_bits);
    let offered = candidates.iter().fold(0u64, |sum, candidate| sum.saturating_add(candidate.usable));
    (need > offered).then(|| GridError::Memory { need, offered, missing: need - offered })
}

struct Planner<'a> {
    work: &'a GridWork,
    fleet: &'a Fleet,
    depth: Option<u32>,
}

impl Planner<'_> {
    /// The best plan on the fastest devices, for every number of these.
    fn best(&self, candidates: &[Candidate<'_>]) -> Result<GridPlan, GridError> {
        let mut best: Option<GridPlan> = None;
        let mut failed = None;
        for count in 1..=candidates.len() {
            // In the order of machines, so that neighbours in the grid are neighbours in the network.
            let mut chosen: Vec<&Candidate<'_>> = candidates[..count].iter().collect();
            chosen.sort_by_key(|candidate| (candidate.device.machine, candidate.device.id));
            for slabs in [false, true] {
                match self.plan(&chosen, slabs) {
                    Ok(plan) if best.as_ref().is_none_or(|best| plan.step_ns < best.step_ns) => best = Some(plan),
                    Ok(_) => {}
                    Err(error) => failed = Some(error),
                }
            }
        }
        best.ok_or(failed.unwrap_or(GridError::NoDevices))
    }

    fn plan(&self, candidates: &[&Candidate<'_>], slabs: bool) -> Result<GridPlan, GridError> {
        let whole = Block { from: [0; 3], to: self.work.size };
        let shares = self.shares(candidates)?;
        let mut blocks = Vec::with_capacity(candidates.len());
        let axis = slabs.then(|| longest(self.work, &whole));
        self.divide(whole, &shares, axis, &mut blocks);
        if blocks.iter().any(|block| block.cells() == 0) {
            return Err(GridError::Invalid("more nodes than layers of cells".into()));
        }
        let most = self.deepest(&blocks);
        let depths: Range<u32> = match self.depth {
            Some(depth) if depth == 0 || depth > most => {
                let cells = blocks.iter().flat_map(|block| self.cut_axes(block).map(|axis| block.extent(axis))).min();
                return Err(GridError::Depth { depth, cells: cells.unwrap_or(0), most });
            }
            Some(depth) => depth..depth + 1,
            None if blocks.len() == 1 => 1..2,
            None => 1..most + 1,
        };
        let mut best: Option<GridPlan> = None;
        let mut failed = None;
        for depth in depths {
            match self.charge(candidates, &blocks, depth) {
                // A deeper halo only where it gains: cells computed twice cost energy.
                Ok(plan) if best.as_ref().is_none_or(|b| plan.step_ns + plan.step_ns / 50 < b.step_ns) => {
                    best = Some(plan);
                }
                Ok(_) => {}
                Err(error) => failed = Some(error),
            }
        }
        best.ok_or(failed.unwrap_or(GridError::NoDevices))
    }

    /// Cells for each device: in proportion to its speed, within its memory.
    fn shares(&self, candidates: &[&Candidate<'_>]) -> Result<Vec<u64>, GridError> {
        let total = cells(self.work);
        let cells_of = |bytes: u64| (u128::from(bytes) * 8 / u128::from(self.work.state_bits)) as u64;
        let mut shares: Vec<Option<u64>> = candidates.iter().map(|_| None).collect();
        loop {
            let taken: u64 = shares.iter().flatten().sum();
            let rest = total.saturating_sub(taken);
            let speed: u128 =
                candidates.iter().zip(&shares).filter(|(_, s)| s.is_none()).map(|(h, _)| u128::from(h.speed)).sum();
            if speed == 0 {
                if rest > 0 {
                    let offered = candidates.iter().fold(0u64, |sum, candidate| sum.saturating_add(candidate.usable));
                    let need = bytes_of(total, self.work.state_bits);
                    return Err(GridError::Packing { need, offered, missing: bytes_of(rest, self.work.state_bits) });
                }
                return Ok(shares.into_iter().map(|share| share.unwrap_or(0)).collect());
            }
            let wanted = |candidate: &Candidate<'_>| (u128::from(rest) * u128::from(candidate.speed) / speed) as u64;
            // Leaves memory for the halo of a block that is not too flat.
            let most = |candidate: &Candidate<'_>| cells_of(candidate.usable - candidate.usable / 16);
            let full =
                (0..candidates.len()).find(|&i| shares[i].is_none() && wanted(candidates[i]) > most(candidates[i]));
            match full {
                Some(i) => shares[i] = Some(most(candidates[i]).min(rest)),
                None => {
                    let wanted: Vec<u64> = candidates.iter().map(|candidate| wanted(candidate)).collect();
                    return Ok(shares.iter().zip(wanted).map(|(share, wanted)| share.unwrap_or(wanted)).collect());
                }
            }
        }
    }

    /// Splits the block and the devices recursively until each block has one device.
    fn divide(&self, block: Block, shares: &[u64], axis: Option<usize>, out: &mut Vec<Block>) {
        if shares.len() <= 1 {
            out.push(block);
            return;
        }
        let total: u128 = shares.iter().map(|&share| u128::from(share)).sum::<u128>().max(1);
        let half = self.middle(shares);
        let first: u128 = shares[..half].iter().map(|&share| u128::from(share)).sum();
        let along = axis.unwrap_or_else(|| longest(self.work, &block));
        let grain = if along == 0 { u128::from(self.work.align_x) } else { 1 };
        let extent = u128::from(block.extent(along));
        let grains = extent.div_ceil(grain);
        // Each side keeps at least one layer per device, if there are enough layers.
        let (least, most) = (half as u128, grains.saturating_sub((shares.len() - half) as u128));
        let ideal = (grains * first + total / 2) / total;
        let at = ideal.min(most).max(least.min(grains)) * grain;
        let plane = block.from[along] + at.min(extent) as u64;
        let (mut low, mut high) = (block, block);
        (low.to[along], high.from[along]) = (plane, plane);
        self.divide(low, &shares[..half], axis, out);
        self.divide(high, &shares[half..], axis, out);
    }

    /// Splits the devices into two groups whose shares are as equal as possible.
    fn middle(&self, shares: &[u64]) -> usize {
        let total: u128 = shares.iter().map(|&share| u128::from(share)).sum();
        let uneven = |at: usize| {
            let first: u128 = shares[..at].iter().map(|&share| u128::from(share)).sum();
            (2 * first).abs_diff(total)
        };
        (1..shares.len()).min_by_key(|&at| uneven(at)).unwrap_or(1)
    }

    /// Axes along which a block is smaller than the grid.
    fn cut_axes<'b>(&'b self, block: &'b Block) -> impl Iterator<Item = usize> + 'b {
        (0..3).filter(move |&axis| block.extent(axis) < self.work.size[axis])
    }

    /// Maximum halo depth: no tile needs cells beyond its direct neighbours.
    fn deepest(&self, blocks: &[Block]) -> u32 {
        let extents = blocks.iter().flat_map(|block| self.cut_axes(block).map(|axis| block.extent(axis)));
        let cells = extents.min().unwrap_or(u64::MAX);
        u32::try_from(cells / u64::from(self.work.radius)).unwrap_or(u32::MAX).min(DEPTH_MAX)
    }

    /// The plan with its predictions, if it fits.
    fn charge(&self, candidates: &[&Candidate<'_>], blocks: &[Block], depth: u32) -> Result<GridPlan, GridError> {
        let mut tiles = Vec::with_capacity(blocks.len());
        for (candidate, block) in candidates.iter().zip(blocks) {
            let bytes = tile_bytes(self.work, block, depth);
            if bytes > candidate.usable.saturating_add(self.work.scratch_bytes) {
                let need = bytes_of(cells(self.work), self.work.state_bits);
                let offered = candidates.iter().fold(0u64, |sum, candidate| sum.saturating_add(candidate.usable));
                return Err(GridError::Packing { need, offered, missing: bytes - candidate.usable });
            }
            let compute_ns = self.compute_ns(candidate, block, depth);
            let halo_ns = self.halo_ns(candidates, blocks, candidate, block, depth);
            tiles.push(GridTile { device: candidate.device.id, block: *block, bytes, compute_ns, halo_ns });
        }
        // The interior is computed while halos are in transit; the tile waits for the rest of the transfer.
        let step = |tile: &GridTile| tile.compute_ns.max(tile.halo_ns);
        let step_ns = tiles.iter().map(step).max().unwrap_or(0);
        Ok(GridPlan { tiles, depth, step_ns, before_ns: None })
    }

    /// Compute nanoseconds per step, averaged over a cycle: the first step also covers the halo except its outermost radius,
    /// later steps less.
    fn compute_ns(&self, candidate: &Candidate<'_>, block: &Block, depth: u32) -> u64 {
        let radius = u64::from(self.work.radius);
        let cells: u128 = (0..u64::from(depth))
            .map(|step| {
                let grown = radius * (u64::from(depth) - 1 - step);
                (0..3usize).fold(1u128, |cells, axis| {
                    let extent = block.extent(axis);
                    let grown = if extent < self.work.size[axis] { extent + 2 * grown } else { extent };
                    cells * u128::from(grown.min(self.work.size[axis]))
                })
            })
            .sum();
        let pass = self.pass(candidate, block, depth);
        let ns = cells * 1_000_000_000 / u128::from(candidate.speed.max(1)) / u128::from(depth);
        let ns = ns * u128::from(pass + 1) / u128::from(2 * pass);
        u64::try_from(ns).unwrap_or(u64::MAX).saturating_add(candidate.device.step_ns)
    }

    /// Steps per pass over the memory. A pass of s steps takes as long as (s + 1) / 2 single steps: half of a step is memory
    /// traffic, which the pass needs once (measured: 0.45 to 0.75 of a step, rising with the threads that share the memory).
    fn pass(&self, candidate: &Candidate<'_>, block: &Block, depth: u32) -> u64 {
        let most = self.work.pass_steps.min(candidate.device.pass_steps).max(1);
        let alone = self.cut_axes(block).next().is_none();
        u64::from(if alone { most } else { most.min(depth) })
    }

    /// Nanoseconds per step from the computed edge to the received halo: latency, and the bytes of all neighbours on this
    /// device's link, once per `depth` steps.
    fn halo_ns(
        &self,
        candidates: &[&Candidate<'_>],
        blocks: &[Block],
        candidate: &Candidate<'_>,
        block: &Block,
        depth: u32,
    ) -> u64 {
        let (mut way, mut wire) = (0u64, 0u64);
        for (other, owned) in candidates.iter().zip(blocks).filter(|(other, _)| other.device.id != candidate.device.id)
        {
            let cells = self.overlap(block, owned, depth);
            if cells == 0 {
                continue;
            }
            let link = self.fleet.link(other.device.id, candidate.device.id);
            let bytes = bytes_of(cells, halo_bits(self.work, depth));
            way = way.max(link.rtt_ns / 2);
            wire = wire.saturating_add(cost::wire_ns(link, bytes).unwrap_or(u64::MAX / 4));
        }
        if way == 0 && wire == 0 {
            return 0;
        }
        // The edge is computed first, and is not hidden: one pass over it.
        let edge = self.edge_ns(candidate, block, depth);
        way.saturating_add(wire).saturating_add(edge).saturating_add(EXCHANGE_NS) / u64::from(depth)
    }

    fn edge_ns(&self, candidate: &Candidate<'_>, block: &Block, depth: u32) -> u64 {
        let halo = u128::from(self.work.radius) * u128::from(depth);
        let all = u128::from(block.cells());
        let inner = self.cut_axes(block).fold(all, |cells, axis| {
            let extent = u128::from(block.extent(axis)).max(1);
            cells * extent.saturating_sub(2 * halo) / extent
        });
        // A pass of several steps also computes cells around the edge: about 50 % more.
        let pass = u128::from(self.pass(candidate, block, depth));
        let steps = if pass > 1 { (pass + 1) * 3 } else { 4 };
        u64::try_from((all - inner) * steps * 250_000_000 / u128::from(candidate.speed.max(1))).unwrap_or(u64::MAX)
    }

    /// Cells of the halo around `block` that `owned` contains, including images across periodic axes.
    fn overlap(&self, block: &Block, owned: &Block, depth: u32) -> u64 {
        let halo = u64::from(self.work.radius) * u64::from(depth);
        let shift = halo; // keeps coordinates non-negative
        let size = self.work.size;
        let ring = |axis: usize| if block.extent(axis) < size[axis] { halo } else { 0 };
        let around = Block {
            from: core::array::from_fn(|axis| block.from[axis] + shift - ring(axis)),
            to: core::array::from_fn(|axis| block.to[axis] + shift + ring(axis)),
        };
        let images = |axis: usize| {
            let wraps = self.work.periodic[axis] && block.extent(axis) < size[axis];
            if wraps { -1..=1i64 } else { 0..=0 }
        };
        let mut cells = 0u64;
        for x in images(0) {
            for y in images(1) {
                for z in images(2) {
                    let at = [x, y, z];
                    let moved = |value: u64, axis: usize| {
                        let place =
                            i128::from(value) + i128::from(shift) + i128::from(at[axis]) * i128::from(size[axis]);
                        u64::try_from(place.max(0)).unwrap_or(u64::MAX)
                    };
                    let image = Block {
                        from: core::array::from_fn(|axis| moved(owned.from[axis], axis)),
                        to: core::array::from_fn(|axis| moved(owned.to[axis], axis)),
                    };
                    cells = cells.saturating_add(around.intersect(&image).map_or(0, |common| common.cells()));
                }
            }
        }
        cells
    }
}

/// The axis to split: the one with the most cells. x only if it can be split at all, and last among equals, because rows along
/// x are contiguous in memory.
fn longest(work: &GridWork, block: &Block) -> usize {
    let extent = |axis: usize| if axis == 0 && block.extent(0) <= work.align_x { 0 } else { block.extent(axis) };
    (0..3).rev().max_by_key(|&axis| (extent(axis), axis)).unwrap_or(1)
}

/// Cost of passing the halo strips from the executor through the node to the network and back on the other side, besides
/// latency and transfer (measured on a loopback: 0.15 to 0.4 ms).
const EXCHANGE_NS: u64 = 250_000;

/// Whether the blocks cover the grid, each cell once.
pub fn covers(size: [u64; 3], blocks: &[Block]) -> bool {
    let inside = |block: &Block| (0..3).all(|axis| block.from[axis] < block.to[axis] && block.to[axis] <= size[axis]);
    let cells: u128 = blocks.iter().map(|block| u128::from(block.cells())).sum();
    let apart = || {
        let mut seen = BTreeSet::new();
        let clash = |a: &Block, b: &Block| a.intersect(b).is_some();
        blocks
            .iter()
            .enumerate()
            .all(|(at, block)| seen.insert(*block) && blocks[at + 1..].iter().all(|other| !clash(block, other)))
    };
    blocks.iter().all(inside) && cells == size.iter().fold(1, |all, &axis| all * u128::from(axis)) && apart()
}

/// One neighbour of a tile: the cells of `peer`, shifted by whole grids along each axis (periodic axes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TileLink {
    /// The neighbour tile.
    pub peer: u16,
    /// Shift in whole grids along x, y and z.
    pub shift: [i8; 3],
    /// This tile's halo contains cells of the peer.
    pub takes: bool,
    /// The peer's halo contains cells of this tile. A tile that spans a periodic axis wraps it itself, so `takes` and `gives`
    /// may differ.
    pub gives: bool,
}

/// All neighbours of the tile `me` within `reach` cells, by peer and then by shift. Each link has a mirror: the peer's link to
/// `me` with the negated shift, which takes what this one gives.
pub fn links(size: [u64; 3], periodic: [bool; 3], blocks: &[Block], me: usize, reach: u64) -> Vec<TileLink> {
    let Some(own) = blocks.get(me) else { return Vec::new() };
    let ring = |block: &Block, axis: usize| if block.extent(axis) < size[axis] { i128::from(reach) } else { 0 };
    let images = |axis: usize, peer: &Block| {
        let cut = own.extent(axis) < size[axis] || peer.extent(axis) < size[axis];
        if periodic[axis] && cut { -1..=1i8 } else { 0..=0 }
    };
    // Whether the shifted peer and this tile overlap along an axis, with one of them extended by its halo.
    let meets = |axis: usize, peer: &Block, shift: i8, ring: i128| {
        let moved = i128::from(shift) * i128::from(size[axis]);
        let (from, to) = (i128::from(peer.from[axis]) + moved, i128::from(peer.to[axis]) + moved);
        from < i128::from(own.to[axis]) + ring && i128::from(own.from[axis]) - ring < to
    };
    let mut found = Vec::new();
    for (number, peer) in blocks.iter().enumerate().filter(|&(number, _)| number != me) {
        for x in images(0, peer) {
            for y in images(1, peer) {
                for z in images(2, peer) {
                    let shift = [x, y, z];
                    let takes = (0..3).all(|axis| meets(axis, peer, shift[axis], ring(own, axis)));
                    let gives = (0..3).all(|axis| meets(axis, peer, shift[axis], ring(peer, axis)));
                    if takes || gives {
                        found.push(TileLink { peer: number as u16, shift, takes, gives });
                    }
                }
            }
        }
    }
    found
}

#[cfg(test)]
mod tests;
