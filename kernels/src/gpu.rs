//! The model's operations as CubeCL kernels: one source for CUDA and Vulkan, weights read as their quantised blocks.
//!
//! Arithmetic is f32 with explicit fused multiply-adds and one order of accumulation per output element, so a row has
//! the same bits in any batch, and a launch may choose how many rows it takes at once without changing them. Kernels
//! take arrays and scalars, never tensors: the shapes of tensor arguments cost an extra upload per launch on CUDA.
//!
//! Next: `gpu/pack.rs`, then `gpu/matvec.rs`.
use cubecl::prelude::*;
use cubecl::server::Handle;

mod attention;
pub mod bench;
pub mod grid;
mod matvec;
mod pack;
mod rows;

pub use attention::{Attention, attention};
pub use matvec::{Matrix, matvec};
pub use pack::{PackError, Packed, packed_bytes, unpack_row};
pub use rows::{Rotation, add, append, copy, rms_norm, rotate, swiglu};

/// Lanes that share a dot product or an attention row. Fixed, not the device's plane size: it is part of the order of
/// accumulation, hence of the bits of the results.
const LANES: u32 = 32;
/// Units of a cube of the row kernels; part of RMSNorm's order of accumulation.
const UNITS: u32 = 128;
/// Rows that one launch takes: the smallest grid height that Vulkan guarantees is 65,535.
pub const ROWS_MAX: usize = 32_768;
/// Bytes of a number in a device's caches of keys and values: f32, whatever the activations.
pub const CACHE_CELL_BYTES: usize = size_of::<f32>();

/// An array of the device as one launch sees it; `len` in scalars.
fn array<R: Runtime>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: every caller passes the length that the handle was allocated with, and kernels stay below it.
    unsafe { ArrayArg::from_raw_parts(handle.clone(), len) }
}

#[cfg(test)]
mod tests;
