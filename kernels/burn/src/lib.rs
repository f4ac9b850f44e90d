//! The model over burn's backends: plain burn operations as the oracle on every backend, our own kernels where they win.
//!
//! The packages are apart because whoever names burn's `CubeBackend` compiles it: minutes, which the kernels themselves
//! and their tests need not wait for. Next: `backend.rs`, then `stage.rs`.

mod backend;
mod cube;
mod device;
mod flex;
pub mod grid;
mod load;
pub mod oracle;
pub mod reference;
mod stage;
pub mod suite;

pub use backend::{Matrix, MeshBackend};
pub use device::{Probe, answer_probe, probe, probe_report};
pub use grid::grid_tile;
pub use load::{GpuSpeed, bench_gpu, gpu_speed, load_gpu_stage, selftest};
pub use stage::BurnStage;
