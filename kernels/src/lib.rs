//! Arithmetic on the CPU, without models or grids: the order of operations, quantised weights, SIMD kernels, threads, devices.
//!
//! Models (`kernels-models`), grids (`kernels-grids`) and their kernels on GPUs are built on it. Next: `order.rs`, `tile.rs`,
//! then `cpu.rs`.

pub mod bench;
pub mod boundary;
pub mod cpu;
pub mod device;
pub mod order;
pub mod planes;
pub mod pool;
pub mod quant;
pub mod threads;
pub mod tile;
