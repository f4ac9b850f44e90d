//! A question to the planner of grids: what is to be cut, for whom, and what is known of them by now.
use super::{Block, GridError, GridPlan, GridWork, Hand, Planner, cut, hands, validate};
use crate::fleet::{Device, DeviceId, Fleet};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// How a grid is to be cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GridQuestion {
    /// The simulation.
    pub work: GridWork,
    /// The machines and links as measured.
    pub fleet: Fleet,
    /// What the rule has shown of the machines.
    pub paces: Paces,
    /// Steps between two exchanges, as asked for; chosen where it is not.
    pub depth: Option<u32>,
    /// The cut as it is, and its depth, where it is to be compared with.
    pub present: Option<(Vec<(DeviceId, Block)>, u32)>,
}

/// What devices reach with a rule, in thousandths of what is predicted by their memory bandwidth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paces {
    /// Measured while they computed it.
    pub measured: Vec<(DeviceId, u32)>,
    /// All others.
    pub others: u32,
}

impl Default for Paces {
    /// Nothing was measured.
    fn default() -> Self {
        Paces { measured: Vec::new(), others: Paces::AS_PREDICTED }
    }
}

impl Paces {
    /// As fast as predicted.
    pub const AS_PREDICTED: u32 = 1000;

    /// That of a device.
    pub fn of(&self, device: DeviceId) -> u32 {
        self.measured.iter().find(|(id, _)| *id == device).map_or(self.others, |&(_, pace)| pace)
    }
}

impl GridQuestion {
    /// The best cut there is. Where there is one to compare with, the plan says what that takes.
    ///
    /// # Errors
    /// A grid that is not sound, that fits nowhere, or a depth that is deeper than a tile.
    pub fn answer(&self) -> Result<GridPlan, GridError> {
        let mut plan = cut(&self.work, &self.fleet, &self.paces, self.depth)?;
        plan.before_ns = self.present.as_ref().and_then(|(tiles, depth)| self.predict(tiles, *depth));
        Ok(plan)
    }

    /// Predicted nanoseconds per step of tiles where they are; none if one of the devices is gone.
    fn predict(&self, tiles: &[(DeviceId, Block)], depth: u32) -> Option<u64> {
        validate(&self.work).ok()?;
        // Whoever has a tile has the room, and goes on with it while it takes no new work.
        let mut fleet = self.fleet.clone();
        fleet.devices.iter_mut().for_each(|device| (device.memory, device.excluded) = (u64::MAX, false));
        let hands = hands(&self.work, &fleet, &self.paces);
        let hand = |id: &DeviceId| hands.iter().find(|hand| hand.device.id == *id);
        let owners: Option<Vec<&Hand<'_>>> = tiles.iter().map(|(id, _)| hand(id)).collect();
        let blocks: Vec<Block> = tiles.iter().map(|(_, block)| *block).collect();
        let planner = Planner { work: &self.work, fleet: &fleet, depth: Some(depth) };
        let plan = planner.charge(&owners?, &blocks, depth.max(1)).ok()?;
        // Who has taken over for another computes one tile after the other.
        let mut spent: BTreeMap<DeviceId, u64> = BTreeMap::new();
        for tile in &plan.tiles {
            let spent = spent.entry(tile.device).or_default();
            *spent = spent.saturating_add(tile.compute_ns);
        }
        spent.into_values().chain([plan.step_ns]).max()
    }
}

/// Cells a second of each device, in their order.
///
/// What differs between devices of one machine and one arithmetic is mostly when they were measured: those that are close to
/// each other are taken for equal, as far as the rule itself has not shown what they are.
pub(super) fn speeds(work: &GridWork, devices: &[Device], paces: &Paces) -> Vec<u64> {
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
