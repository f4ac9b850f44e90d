//! Deterministic simulation testing of the node core: seeded hosts, links, disks and faults in virtual time, and invariant
//! checkers.
//!
//! `world` runs the loop of `node/src/driver.rs` in virtual time; the other modules stand in for the network, disks and
//! devices. The same seed gives the same run, event for event: `World::trace` hashes it. Next: `options.rs`.

pub mod options;
pub mod world;

pub mod host;
pub mod queue;

pub mod compute;
pub mod disk;
pub mod grids;
pub mod network;

pub mod faults;

pub mod submissions;
pub mod workload;

pub mod case;
pub mod minimize;
pub mod run;
pub mod soak;
pub mod timeline;

pub mod replay;
pub mod scale;

pub mod checker;
pub mod trace;

pub mod units;

pub use case::Case;
pub use faults::{Fault, Schedule, Timed};
pub use host::{HostId, HostSpec};
pub use options::Options;
pub use run::{Outcome, run};
pub use workload::Workload;
pub use world::{Notification, Observer, World};
