//! Whole models and the rules of grids in plain burn operations, on any backend: what the engines are compared with.
//!
//! Nothing here is fast, and nothing of it is part of the program. Next: `model.rs`, then `grid.rs`.
pub mod grid;
pub mod model;
