//! Stencil simulations on a dense grid: the global grid, the tiles that partition it, and the rules that advance its
//! cells.
//!
//! A [`Grid`] gives the size of the domain and its boundary conditions. A [`Tile`](tile::Tile) owns a box of the grid,
//! keeps a halo of its neighbours' cells around it and advances step by step. Its results are bit-identical for any
//! partition, halo depth and number of threads. A [`Rule`](rule::Rule) computes the next state of a cell. Next:
//! `tile.rs`, `any_tile.rs`, `rule.rs`, then `life.rs` for the shortest rule.

pub mod any_tile;
pub mod bench;
pub mod expression;
pub mod lbm;
pub mod life;
pub mod rule;
pub mod rule_file;
pub mod scalar;
pub mod stepper;
#[doc(hidden)]
pub mod testing;
pub mod tile;

pub mod frame;
pub mod halo;
pub mod hash;
pub mod number;
pub mod state;

mod error;
mod fused;
mod ghosts;
mod grid;
mod region;
#[cfg(test)]
mod tests;

pub use error::GridError;
pub use grid::{Face, Grid};
pub use halo::links;
pub use region::{AXES, CellMap, Link, RUN, Region, SIZE_MAX};
pub use state::FieldCheck;
