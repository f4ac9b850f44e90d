//! Where a device's name meets the tiles of grids. Next: `grid/oracle.rs`, the rules in plain burn operations.
use kernels::device::DeviceId;
use kernels::gpu::grid::{cuda_tile, vulkan_tile};
use kernels::grid::any_tile::GridTile;
use kernels::grid::rule::Rule;
use kernels::grid::tile::Tile;
use kernels::grid::{Grid, GridError, Region};

use crate::device::wgpu_device;

pub mod oracle;

/// A tile on a device of this machine, all cells zero. `depth`: steps that one exchange of halos serves. `free`: bytes of a
/// GPU's memory that the tile may take.
///
/// # Errors
/// The device is not here, the rule does not fit the grid or the device, the tile not in the grid, the halo not in the tile, or
/// the tile not into the memory.
pub fn grid_tile(
    device: DeviceId,
    (grid, rule): (&Grid, &Rule),
    region: Region,
    depth: usize,
    free: usize,
) -> Result<Box<dyn GridTile>, GridError> {
    match device {
        DeviceId::Cpu => Ok(Box::new(Tile::new(grid, rule, region, depth)?)),
        DeviceId::Cuda(number) => cuda_tile(number as usize, (grid, rule), region, depth, free),
        DeviceId::Vulkan(number) => {
            let gone = || GridError::Device { what: format!("there is no vulkan:{number} here") };
            vulkan_tile(&wgpu_device(number).ok_or_else(gone)?, (grid, rule), region, depth, free)
        }
    }
}
