//! Simulation job files: a TOML description of a grid run, parsed once and sent to every node with the files it names.
//!
//! ```toml
//! name = "Decaying vortices"
//! steps = 2000
//!
//! [grid]
//! size = [256, 256]
//!
//! [rule]
//! name = "d2q9"
//! viscosity = 0.02
//!
//! [initial]
//! velocity = ["0.05*cos(2*pi*x/nx)*sin(2*pi*y/ny)", "-0.05*sin(2*pi*x/nx)*cos(2*pi*y/ny)"]
//!
//! [[output]]
//! kind = "gif"
//! quantity = "vorticity"
//! every = 20
//! ```
//!
//! Nodes with the same bytes have bit-identical grids, rules and initial states. Errors give the file, line and column.
//! Next: `simulation.rs`, `keys.rs`, `physics.rs`, `initial.rs`, `sample.rs`.

mod error;
mod evaluate;
mod expression;
mod files;
mod force;
mod image;
mod initial;
mod keys;
mod output;
mod physics;
mod sample;
mod simulation;
#[cfg(test)]
mod tests;

pub use error::SimulationError;
pub use files::{JOB_TEXT_MAX, SIMULATION_MAX};
pub use force::{Force, ForceSpec};
pub use output::{ANIMATION_FRAMES_MAX, Colours, FRAME_SIZE_MAX, FRAMES_MAX, OUTPUTS_MAX, OutputKind, OutputSpec};
pub use sample::{Field, Mosaic};
pub use simulation::{Simulation, StandbyTier};
