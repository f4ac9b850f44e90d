//! Test oracles for the engines: whole models and grid rules in plain burn operations, on any backend.
//!
//! Slow, and not part of the program. Next: `model.rs`, then `grid.rs`.
pub mod grid;
pub mod model;
