//! Opens tiles on CUDA and Vulkan devices; the grid kernels are instantiated for both runtimes here.
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::*;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use kernels_grids::any_tile::GridTile;
use kernels_grids::rule::Rule;
use kernels_grids::{Grid, GridError, Region};

use crate::GpuTile;

/// A tile on an NVIDIA GPU, all cells zero. `free`: bytes of device memory that the tile may use.
///
/// # Errors
/// As [`GpuTile::new`].
pub fn cuda_tile(
    number: usize,
    (grid, rule): (&Grid, &Rule),
    region: Region,
    depth: usize,
    free: usize,
) -> Result<Box<dyn GridTile>, GridError> {
    tile::<CudaRuntime>(&CudaDevice::new(number), (grid, rule), region, depth, free)
}

/// A tile on a Vulkan device, all cells zero. `free`: bytes of device memory that the tile may use.
///
/// # Errors
/// As [`GpuTile::new`].
pub fn vulkan_tile(
    device: &WgpuDevice,
    (grid, rule): (&Grid, &Rule),
    region: Region,
    depth: usize,
    free: usize,
) -> Result<Box<dyn GridTile>, GridError> {
    tile::<WgpuRuntime>(device, (grid, rule), region, depth, free)
}

fn tile<R: Runtime>(
    device: &R::Device,
    (grid, rule): (&Grid, &Rule),
    region: Region,
    depth: usize,
    free: usize,
) -> Result<Box<dyn GridTile>, GridError> {
    Ok(Box::new(GpuTile::<R>::new(&R::client(device), grid, rule, region, depth, free)?))
}
