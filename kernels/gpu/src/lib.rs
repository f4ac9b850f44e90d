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
mod device;
mod engine;
mod graph;
mod load;
mod open;
mod pages;
mod product;
mod rows;
mod selftest;
mod shapes;
mod speed;
mod tiles;

pub use arithmetic::Abilities;
pub use device::{Probe, answer_probe, probe, probe_report};
pub use engine::{GpuEngine, Step, load};
pub use open::{GpuSpeed, gpu_speed, grid_tile, load_stage, selftest};
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
}

impl Platform for WgpuRuntime {}

impl Platform for CudaRuntime {
    #[allow(private_interfaces)]
    fn graphs(client: &ComputeClient<Self>, number: usize) -> Result<Option<graph::Graphs>, StageError> {
        graph::Graphs::new(client, number).map(Some)
    }
}

/// An array of the device as one launch sees it; `len` in numbers of 32 bits.
fn array<R: Platform>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: every caller passes at most the length that the handle was allocated with, and kernels stay below it.
    unsafe { ArrayArg::from_raw_parts(R::bind(handle), len) }
}

#[cfg(test)]
mod tests;
