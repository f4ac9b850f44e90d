//! LLM inference on GPUs: CubeCL kernels with the operation order of [`kernels::order`], and the engine built on them.
//!
//! CUDA and Vulkan share one source. Devices with 8-bit matrix instructions use them; others use integer multiplies and get the
//! same bits. Names are CubeCL's: a unit is a thread, a plane a warp, a cube a thread block.
//! Next: `arithmetic.rs`, then `tiles.rs`; `open.rs` is the public API.
#![allow(clippy::too_many_arguments, reason = "a launch names its buffers and sizes one by one")]
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgpu::WgpuRuntime;
use kernels::stage::StageError;

mod arithmetic;
mod attention;
mod cache;
mod compile;
mod device;
mod draw;
mod engine;
mod graph;
mod inline;
mod load;
mod open;
mod pages;
mod product;
mod rows;
mod selftest;
mod shapes;
mod speed;
mod tiles;
mod upload;

pub use arithmetic::Abilities;
pub use compile::kept_kernels;
pub use device::{Fault, Probe, answer_probe, probe, probe_report, use_cache};
pub use engine::{GpuEngine, Launches, Profiled, Step, load};
pub use load::LoadPhases;
pub use open::{GpuSpeed, gpu_speed, grid_tile, load_profiled, load_random, load_stage, selftest};
pub use selftest::Check;
pub use shapes::{SHAPES, Shape};

/// A CubeCL runtime that the engine supports, with its optional features.
pub trait Platform: Runtime {
    /// Binds a buffer to a launch.
    #[doc(hidden)]
    fn bind(handle: &Handle) -> Handle {
        handle.clone()
    }

    /// Records and replays steps on device `number`; `None` if the runtime has no graphs.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn graphs(_client: &ComputeClient<Self>, _number: usize) -> Result<Option<graph::Graphs>, StageError> {
        Ok(None)
    }

    /// Copies weights to device `number` in slabs of `slab_bytes`; `None` if the runtime gives no access to device memory.
    ///
    /// # Errors
    /// The host has no memory for the slabs, or the device failed.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn upload(
        _client: &ComputeClient<Self>,
        _number: usize,
        _slab_bytes: usize,
    ) -> Result<Option<upload::Upload>, StageError> {
        Ok(None)
    }

    /// Free bytes on device `number`; `None` if the runtime does not report them.
    #[doc(hidden)]
    fn memory_free(_number: usize) -> Option<u64> {
        None
    }
}

impl Platform for WgpuRuntime {}

impl Platform for CudaRuntime {
    #[allow(private_interfaces)]
    fn graphs(client: &ComputeClient<Self>, number: usize) -> Result<Option<graph::Graphs>, StageError> {
        graph::Graphs::new(client, number).map(Some)
    }

    #[allow(private_interfaces)]
    fn upload(
        client: &ComputeClient<Self>,
        number: usize,
        slab_bytes: usize,
    ) -> Result<Option<upload::Upload>, StageError> {
        upload::Upload::new(client, number, slab_bytes).map(Some)
    }

    fn memory_free(number: usize) -> Option<u64> {
        upload::memory_free(number)
    }
}

/// A buffer as a kernel argument; `len` counts 32-bit elements.
fn array<R: Platform>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: every caller passes at most the allocated length, and kernels stay below `len`.
    unsafe { ArrayArg::from_raw_parts(R::bind(handle), len) }
}

#[cfg(test)]
mod tests;
