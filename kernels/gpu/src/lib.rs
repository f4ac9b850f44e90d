//! LLM inference on GPUs: CubeCL kernels with the operation order of [`kernels::order`], and the engine built on them.
//!
//! CUDA and Vulkan share one source. Devices with 8-bit matrix instructions use them; others use integer multiplies and get the
//! same bits. Names are CubeCL's: a unit is a thread, a plane a warp, a cube a thread block.
//! Next: `arithmetic.rs`, then `tiles.rs`; `open.rs` is the public API.
#![allow(clippy::too_many_arguments, reason = "a launch names its buffers and sizes one by one")]

mod arithmetic;
mod attention;
mod boundary;
mod cache;
mod compile;
mod device;
mod draw;
mod engine;
mod error;
mod experts;
mod graph;
mod inline;
mod load;
mod open;
mod pages;
mod peers;
mod platform;
mod product;
mod rows;
mod selftest;
mod shapes;
mod speed;
mod tiles;
mod upload;
mod window;

pub use arithmetic::Features;
pub use compile::kernel_cache_usage;
pub use device::{Fault, Probe, answer_probe, probe, probe_report, use_cache};
pub use engine::memory::stage_bytes;
pub use engine::profile::{Launches, Profiled};
pub use engine::{GpuEngine, Step, load};
pub use load::LoadPhases;
pub use open::{GpuRates, grid_tile, load_profiled, load_random, load_stage, measure_gpu, selftest};
pub use platform::Platform;
pub use selftest::Check;
pub use shapes::{SHAPES, Shape};

#[cfg(test)]
mod tests;
