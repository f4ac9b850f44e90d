//! The decisions of a mesh node, as one state machine without clock, I/O or threads.
//!
//! Start with `input` (everything that can happen to a node) and `output` (everything it can do). `node` routes between the
//! child machines, which do not know each other. `node/src/driver.rs` runs this in the real world, `simnet` in a simulated one.
//! Next: `input.rs`.
#![no_std]
extern crate alloc;

pub mod admission;
pub mod codec;
pub mod config;
pub mod failover;
pub mod id;
pub mod input;
pub mod job;
pub mod limits;
mod links;
pub mod liveness;
pub mod membership;
pub mod message;
pub mod node;
pub mod output;
pub mod part;
pub mod place;
pub mod planted;
pub mod record;
mod speeds;
pub mod time;
pub mod work;

pub use node::Node;
pub use planted::PLANTED;
