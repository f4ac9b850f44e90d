//! The planner: given measured devices and a job's costs, finds the placement with the least predicted time, and the reasons
//! for it.
//!
//! Pure: no clock, no I/O, no randomness; costs are integer nanoseconds and bytes, so a plan can be reproduced anywhere. Read
//! `work` and `fleet` (the question), `plan` (the answer, which cannot be built invalid), then `cost` and `layers`. Next:
//! `work.rs`.
#![no_std]
extern crate alloc;

pub mod work;

pub mod fleet;

pub mod plan;

pub mod cost;

mod layers;

mod repair;

mod standby;

mod halves;

pub mod zones;

mod fit;

mod question;

pub mod tiles;

pub mod explain;

pub use cost::ram::Room;
pub use fit::{CONTEXT_MIN, Fit, largest_fit};
pub use fleet::{Device, DeviceId, Endpoint, Fleet, IN_PROCESS, Link, NodeKey};
pub use layers::plan;
pub use plan::{Goal, InvalidPlan, LossPlan, Options, Plan, PlanError, Stage};
pub use question::{
    Answer, GridStandbysQuestion, ModelAnswer, ModelQuestion, ModelStandbysQuestion, Question, pays_to_move,
};
pub use repair::{moved_bytes, repair};
pub use standby::{Standby, Tier, standbys};
pub use work::{Experts, Layer, Work};
