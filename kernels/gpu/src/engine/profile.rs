//! Profiling interface of a loaded stage.
use std::time::Duration;

use cubecl::prelude::*;
use kernels::order::POSITIONS;
use kernels_models::decoder::Decoder;
use kernels_models::stage::{Stage, StageError};

use super::{GpuEngine, STEPS, Step};
use crate::attention::Places;
use crate::graph::{self, Recorder};
use crate::load::{LoadPhases, Part};
use crate::platform::Platform;

/// A stage on a GPU that can be measured.
pub trait Profiled: Stage {
    /// Median seconds of each step of a layer, for `rows` rows of one sequence, the first at `position`.
    ///
    /// # Errors
    /// The device failed, or too few pages are free for these positions.
    fn step_times(&mut self, rows: usize, position: usize) -> Result<Vec<(Step, f64)>, StageError>;

    /// Kernel launches of a step with one row at the end of the context.
    fn launches(&self) -> Launches;

    /// Total time that the host has waited for steps.
    fn wait_time(&self) -> Duration;

    /// Times of the phases of loading.
    fn load_phases(&self) -> LoadPhases;

    /// Bytes of experts in RAM.
    fn ram_bytes(&self) -> u64;

    /// Number of experts that moved from RAM to the device since the stage was loaded.
    fn experts_moved(&self) -> usize;

    /// Bytes of matrices that a step with one row reads: all layers and the output head, without keys, values and norms.
    fn bytes_per_token(&self) -> u64;
}

/// Number of kernel launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launches {
    /// Launches of the first layer.
    pub per_layer: usize,
    /// Launches of all layers, plus the embedding and the output head if the stage has them.
    pub per_step: usize,
}

impl<R: Platform> GpuEngine<R> {
    /// Adds the seconds spent on opening file, device and client before the load.
    pub(crate) fn opened(&mut self, seconds: f64) {
        self.phases.open_s += seconds;
        self.phases.total_s += seconds;
    }

    /// Counts the launches of the functions that are recorded as a step.
    fn launches(&self) -> Launches {
        let any = &self.scratch.hidden; // a recorded launch reads no buffer
        let blocks = self.options.context.div_ceil(POSITIONS);
        let places = Places { count: 1, rows: any.clone(), tables: any.clone(), tables_len: blocks, blocks };
        let count = |launch: &dyn Fn(&ComputeClient<Recorder>)| graph::launches(self.client.properties(), launch);
        let per_layer = count(&|client| self.layer_steps(client, 0, &STEPS, &places, any));
        let per_step = count(&|client| {
            self.layers(client, self.table.as_ref().map(|_| any), &places, any);
            self.logits(client, any, any, 1, any);
        });
        Launches { per_layer, per_step }
    }

    fn bytes_per_token(&self) -> u64 {
        let layers = self.layers.iter().flat_map(|layer| [&layer.inputs, &layer.output]);
        let parts = layers.chain(self.head.iter().map(|head| &head.matrix)).flatten();
        let parts: u64 = parts.map(|Part { matrix, .. }| 4 * matrix.words() as u64).sum();
        parts + self.layers.iter().map(|layer| layer.feed_forward.bytes_per_row()).sum::<u64>()
    }
}

impl<R: Platform> Profiled for Decoder<GpuEngine<R>> {
    fn step_times(&mut self, rows: usize, position: usize) -> Result<Vec<(Step, f64)>, StageError> {
        self.engine_mut()?.step_times(rows, position)
    }

    fn launches(&self) -> Launches {
        self.engine().launches()
    }

    fn wait_time(&self) -> Duration {
        self.engine().steps.as_ref().map_or(Duration::ZERO, |steps| steps.waited)
    }

    fn load_phases(&self) -> LoadPhases {
        self.engine().phases
    }

    fn ram_bytes(&self) -> u64 {
        self.engine().ram.as_ref().map_or(0, |ram| ram.bytes())
    }

    fn experts_moved(&self) -> usize {
        self.engine().ram.as_ref().map_or(0, |ram| ram.moved)
    }

    fn bytes_per_token(&self) -> u64 {
        self.engine().bytes_per_token()
    }
}
