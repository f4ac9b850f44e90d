//! Questions about partitioning a grid: the work, the fleet, and the rates measured so far.
use super::{Block, Candidate, GridError, GridPlan, GridWork, Planner, candidates, cut, validate};
use crate::fleet::{Device, DeviceId, Fleet};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// A question about partitioning a grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GridQuestion {
    /// The simulation.
    pub work: GridWork,
    /// The measured machines and links.
    pub fleet: Fleet,
    /// Rates measured with the simulation's rule.
    pub rates: RuleRates,
    /// Requested steps between two exchanges; `None`: the planner chooses.
    pub depth: Option<u32>,
    /// The present partition and its depth, to compare the answer with.
    pub present: Option<(Vec<(DeviceId, Block)>, u32)>,
}

/// Rates that devices reach with a rule, in thousandths of the rate predicted from their memory bandwidth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleRates {
    /// Devices measured while they computed the rule.
    pub measured: Vec<(DeviceId, u32)>,
    /// The rate assumed for all other devices.
    pub unmeasured: u32,
}

impl Default for RuleRates {
    /// Nothing was measured.
    fn default() -> Self {
        RuleRates { measured: Vec::new(), unmeasured: RuleRates::AS_PREDICTED }
    }
}

impl RuleRates {
    /// As fast as predicted.
    pub const AS_PREDICTED: u32 = 1000;

    /// The rate of a device.
    pub fn of(&self, device: DeviceId) -> u32 {
        self.measured.iter().find(|(id, _)| *id == device).map_or(self.unmeasured, |&(_, pace)| pace)
    }
}

impl GridQuestion {
    /// The best partition. If the question names a present partition, the plan includes its predicted time.
    ///
    /// # Errors
    /// The grid is invalid or does not fit, or the depth exceeds a tile.
    pub fn answer(&self) -> Result<GridPlan, GridError> {
        let mut plan = cut(&self.work, &self.fleet, &self.rates, self.depth)?;
        plan.before_ns = self.present.as_ref().and_then(|(tiles, depth)| self.predict(tiles, *depth));
        Ok(plan)
    }

    /// Predicted nanoseconds per step of a present partition; `None` if one of its devices is gone.
    fn predict(&self, tiles: &[(DeviceId, Block)], depth: u32) -> Option<u64> {
        validate(&self.work).ok()?;
        // The owner of a tile has the memory for it, and keeps the tile while it takes no new work.
        let mut fleet = self.fleet.clone();
        fleet.devices.iter_mut().for_each(|device| (device.memory, device.excluded) = (u64::MAX, false));
        let candidates = candidates(&self.work, &fleet, &self.rates);
        let candidate = |id: &DeviceId| candidates.iter().find(|candidate| candidate.device.id == *id);
        let owners: Option<Vec<&Candidate<'_>>> = tiles.iter().map(|(id, _)| candidate(id)).collect();
        let blocks: Vec<Block> = tiles.iter().map(|(_, block)| *block).collect();
        let planner = Planner { work: &self.work, fleet: &fleet, depth: Some(depth) };
        let plan = planner.charge(&owners?, &blocks, depth.max(1)).ok()?;
        // An owner that took over further tiles computes its tiles one after the other.
        let mut spent: BTreeMap<DeviceId, u64> = BTreeMap::new();
        for tile in &plan.tiles {
            let spent = spent.entry(tile.device).or_default();
            *spent = spent.saturating_add(tile.compute_ns);
        }
        spent.into_values().chain([plan.step_ns]).max()
    }
}

/// Cells per second of each device, in their order.
///
/// Measured speeds of devices in one machine with the same numerics differ mostly by when they were measured. Similar ones are
/// averaged, and the rates measured with the rule apply on top.
pub(super) fn speeds(work: &GridWork, devices: &[Device], paces: &RuleRates) -> Vec<u64> {
    let mut alike: BTreeMap<(u64, u64), Vec<u64>> = BTreeMap::new();
    for device in devices.iter().filter(|device| device.copy_bytes_per_second > 0) {
        alike.entry((device.machine, device.numerics)).or_default().push(device.copy_bytes_per_second);
    }
    alike.retain(|_, speeds| {
        let (least, most) = (speeds.iter().min().copied(), speeds.iter().max().copied());
        speeds.len() > 1 && least.zip(most).is_some_and(|(least, most)| most - least <= least / 2)
    });
    let speed = |device: &Device| {
        let of_them = alike.get(&(device.machine, device.numerics)).filter(|_| device.copy_bytes_per_second > 0);
        let bytes = of_them.map_or(u128::from(device.copy_bytes_per_second), |speeds| {
            speeds.iter().map(|&speed| u128::from(speed)).sum::<u128>() / speeds.len() as u128
        });
        let cells = bytes * 8 * u128::from(paces.of(device.id)) / (1000 * u128::from(work.traffic_bits));
        u64::try_from(cells).unwrap_or(u64::MAX)
    };
    devices.iter().map(speed).collect()
}
