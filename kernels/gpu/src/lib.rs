//! Models on GPUs: kernels that keep the order of arithmetic of [`kernels::order`], and an engine made of them.
//!
//! One source for CUDA and Vulkan. A device with 8-bit matrix instructions uses them; any other multiplies integers, to the same
//! bits. Next: `arithmetic.rs`, then `tiles.rs`; `open.rs` is what a program sees.
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

/// A runtime that models are computed by.
pub trait Platform: Runtime {
    /// The buffer of a launch.
    #[doc(hidden)]
    fn bind(handle: &Handle) -> Handle {
        handle.clone()
    }

    /// What replays steps on device `number`, where the runtime has such a thing.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn graphs(_client: &ComputeClient<Self>, _number: usize) -> Result<Option<graph::Graphs>, StageError> {
        Ok(None)
    }

    /// What copies weights to device `number` in slabs of that many bytes, where the runtime gives access to its memory.
    ///
    /// # Errors
    /// The host has no memory for slabs, or the device failed.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn upload(
        _client: &ComputeClient<Self>,
        _number: usize,
        _slab_bytes: usize,
    ) -> Result<Option<upload::Upload>, StageError> {
        Ok(None)
    }

    /// Bytes that device `number` has free now, where the runtime can say.
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

/// An array of the device as one launch sees it; `len` in numbers of 32 bits.
fn array<R: Platform>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: every caller passes at most the length that the handle was allocated with, and kernels stay below it.
    unsafe { ArrayArg::from_raw_parts(R::bind(handle), len) }
}

#[cfg(test)]
mod tests;
