//! Times each step of a layer.
use std::time::Instant;

use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::POSITIONS;
use kernels_models::decoder::RowAt;
use kernels_models::stage::{SequenceId, StageError};

use super::steps::Steps;
use super::{GpuEngine, STEPS, Step};
use crate::attention::Places;
use crate::error::{failed, guarded, input};
use crate::platform::Platform;

impl<R: Platform> GpuEngine<R> {
    /// Median seconds of each step, averaged over all layers, for `count` rows of one sequence, the first at `position`.
    ///
    /// # Errors
    /// The device failed.
    pub fn step_times(&mut self, count: usize, position: usize) -> Result<Vec<(Step, f64)>, StageError> {
        const SEQUENCE: SequenceId = SequenceId::MAX;
        const REPEATS: usize = 5;
        let reserved = self.pool.reserve(&[(SEQUENCE, position + count)]);
        reserved.map_err(|missing| {
            input(format!("measuring needs {missing} pages, but fewer are free; end a sequence first"))
        })?;
        let rows: Vec<RowAt> =
            (position..position + count).map(|position| RowAt { sequence: SEQUENCE, position }).collect();
        let mut steps = self.steps.take();
        let times = guarded(|| {
            let (table, tables) = self.tables(&rows, None);
            let places = Places {
                count,
                rows: self.upload(bytemuck::cast_slice(&table)),
                tables: self.upload(bytemuck::cast_slice(&tables)),
                tables_len: tables.len(),
                blocks: (position + count).div_ceil(POSITIONS),
            };
            let hidden = self.scratch.hidden.clone();
            let sync = || {
                self.client.flush().map_err(failed)?;
                let synced = cubecl::future::block_on(self.client.sync());
                synced.map_err(failed)
            };
            let mut times = Vec::new();
            // Models without experts launch nothing to choose them.
            let routes = self.config.experts.is_some();
            for step in STEPS.into_iter().filter(|step| routes || *step != Step::Route) {
                let mut took = Vec::with_capacity(REPEATS);
                let graph = steps.as_mut().map(|steps| {
                    sync()?;
                    steps.graphs.record(|client| self.all_layers(client, step, &places, &hidden))
                });
                let graph = graph.transpose()?;
                for _ in 0..=REPEATS {
                    sync()?;
                    let start = Instant::now();
                    match (&graph, &mut steps) {
                        (Some(graph), Some(Steps { graphs, .. })) => graphs.replay(graph)?,
                        _ => self.all_layers(&self.client, step, &places, &hidden),
                    }
                    sync()?;
                    took.push(start.elapsed().as_secs_f64() / self.layers.len() as f64);
                }
                took.remove(0); // includes compilation
                took.sort_by(f64::total_cmp);
                times.push((step, took[REPEATS / 2]));
            }
            Ok(times)
        });
        self.steps = steps;
        self.pool.release(SEQUENCE);
        times
    }

    /// Launches one step of all layers.
    fn all_layers<L: Platform>(&self, client: &ComputeClient<L>, step: Step, places: &Places, hidden: &Handle) {
        (0..self.layers.len()).for_each(|index| self.layer_steps(client, index, &[step], places, hidden));
    }
}
