//! The answer: contiguous stages on distinct devices. Fields are private where an invalid value could be built.
use crate::fleet::DeviceId;
use alloc::{boxed::Box, string::String, vec::Vec};
use core::ops::Range;
use serde::{Deserialize, Serialize};

/// What is to be least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Goal {
    /// Time per token of one request.
    Latency,
    /// The slowest stage, for many requests at once.
    Throughput,
}

/// What the caller asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// What is to be least.
    pub goal: Goal,
    /// The node whose API took the request: tokens enter and leave the pipeline there.
    pub head: DeviceId,
    /// Share of a device's memory left free, in percent (10 to 20).
    pub headroom_percent: u8,
    /// Also plan for the loss of each node used.
    pub losses: bool,
}

/// One contiguous range of layers on one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Where.
    pub device: DeviceId,
    /// Layers `start..end`.
    pub layers: Range<u32>,
    /// Bytes it will take there: weights, cache, scratch.
    pub bytes: u64,
    /// Predicted nanoseconds per decoded token.
    pub step_ns: u64,
}

/// What would be done if one node were lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossPlan {
    /// The node lost.
    pub lost: DeviceId,
    /// The plan on the nodes left, or why there is none.
    pub plan: Result<Plan, PlanError>,
}

/// A valid placement: stages cover all layers once, in order, on distinct devices, within memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    pub(crate) stages: Vec<Stage>,
    pub(crate) token_ns: u64,
    pub(crate) exact: bool,
    pub(crate) reasons: Vec<(DeviceId, String)>,
    pub(crate) losses: Vec<LossPlan>,
}

impl Plan {
    /// The stages, first to last.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }
    /// Predicted nanoseconds per token for one request, links included.
    pub fn token_ns(&self) -> u64 {
        self.token_ns
    }
    /// Whether the search was exact (otherwise beam search).
    pub fn exact(&self) -> bool {
        self.exact
    }
    /// For each device of the fleet, why it is or is not used.
    pub fn reasons(&self) -> &[(DeviceId, String)] {
        &self.reasons
    }
    /// Plans for the loss of each node used (empty unless asked for).
    pub fn losses(&self) -> &[LossPlan] {
        &self.losses
    }
}

/// Why there is no plan, with the shortfall.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum PlanError {
    /// No device may be used at all.
    #[error("no node of the mesh may take work: join one, or end a drain")]
    NoDevices,
    /// Weights, cache and scratch exceed what all devices together offer.
    #[error(
        "the model needs {need} bytes with its cache, the mesh offers {offered}: {missing} bytes are missing; join another node, raise --memory, or lower the context"
    )]
    Memory {
        /// Bytes needed.
        need: u64,
        /// Bytes offered after headroom.
        offered: u64,
        /// The difference.
        missing: u64,
    },
    /// In sum it fits, but one layer (with what its stage must hold besides) fits on no device.
    #[error(
        "layer {layer} needs {need} bytes in one place, the largest node offers {largest}: {missing} bytes are missing there"
    )]
    LayerTooLarge {
        /// The layer.
        layer: u32,
        /// Bytes it needs with its fixed share.
        need: u64,
        /// Bytes of the largest device after headroom.
        largest: u64,
        /// The difference.
        missing: u64,
    },
    /// The job itself is not sound (no layers, sums that overflow).
    #[error("the job cannot be planned: {0}")]
    Invalid(Box<str>),
}
