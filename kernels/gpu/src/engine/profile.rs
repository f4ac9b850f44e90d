//! What a loaded stage shows of itself to those who measure it.
use std::time::Duration;

use cubecl::prelude::*;
use kernels::decoder::Decoder;
use kernels::order::POSITIONS;
use kernels::stage::{Stage, StageError};

use super::{GpuEngine, STEPS, Step};
use crate::Platform;
use crate::attention::Places;
use crate::graph::{self, Recorder};
use crate::load::{LoadPhases, Part};

/// A stage on a GPU that can be measured.
pub trait Profiled: Stage {
    /// Median seconds of each step of a layer, for `rows` rows of one sequence of which the first is at `position`.
    ///
    /// # Errors
    /// The device failed, or the stage has no pages left for that many positions.
    fn step_times(&mut self, rows: usize, position: usize) -> Result<Vec<(Step, f64)>, StageError>;

    /// Launches of a step of one row at the end of the context.
    fn launches(&self) -> Launches;

    /// How long the host has waited for steps in all.
    fn waited(&self) -> Duration;

    /// Where the time of loading went.
    fn load_phases(&self) -> LoadPhases;

    /// Bytes of matrices that a step of one row reads: those of all layers and of the head. Keys, values and norms come on top.
    fn bytes_per_token(&self) -> u64;
}

/// Kernels that a step launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launches {
    /// Of the first layer.
    pub per_layer: usize,
    /// Of all layers with the embedding and the head, where the stage has them.
    pub per_step: usize,
}

impl<R: Platform> GpuEngine<R> {
    /// Adds the seconds that it took to get file, device and client before the load began.
    pub(crate) fn opened(&mut self, seconds: f64) {
        self.phases.open_s += seconds;
        self.phases.total_s += seconds;
    }

    /// Counts what the functions launch that are recorded as a step.
    fn launches(&self) -> Launches {
        let any = &self.scratch.hidden; // a launch that is only noted reads no buffer
        let blocks = self.options.context.div_ceil(POSITIONS);
        let places = Places { count: 1, rows: any.clone(), tables: any.clone(), tables_len: blocks, blocks };
        let (recipe, layer) = (&self.recipe.layers[self.options.layers.start], &self.layers[0]);
        let count = |launch: &dyn Fn(&ComputeClient<Recorder>)| graph::launches(self.client.properties(), launch);
        let per_layer =
            count(&|client| STEPS.iter().for_each(|step| self.step(client, *step, recipe, layer, &places, any)));
        let per_step = count(&|client| {
            self.layers(client, self.table.as_ref().map(|_| any), &places, any);
            self.logits(client, any, any, 1, any);
        });
        Launches { per_layer, per_step }
    }

    fn bytes_per_token(&self) -> u64 {
        let layers = self.layers.iter().flat_map(|l| [&l.inputs, &l.output, &l.gated, &l.down]);
        let parts = layers.chain(self.head.iter().map(|head| &head.matrix)).flatten();
        parts.map(|Part { matrix, .. }| 4 * matrix.words() as u64).sum()
    }
}

impl<R: Platform> Profiled for Decoder<GpuEngine<R>> {
    fn step_times(&mut self, rows: usize, position: usize) -> Result<Vec<(Step, f64)>, StageError> {
        self.engine_mut()?.step_times(rows, position)
    }

    fn launches(&self) -> Launches {
        self.engine().launches()
    }

    fn waited(&self) -> Duration {
        self.engine().steps.as_ref().map_or(Duration::ZERO, |steps| steps.waited)
    }

    fn load_phases(&self) -> LoadPhases {
        self.engine().phases
    }

    fn bytes_per_token(&self) -> u64 {
        self.engine().bytes_per_token()
    }
}
