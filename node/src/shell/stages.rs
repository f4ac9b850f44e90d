//! Carries out the core's decisions about model stages: fetches their weights, then loads and warms them.
use super::{Ordered, Shell};
use crate::device_thread::command::{Command, NewPart};
use crate::residency::Key;
use crate::rows;
use crate::transfer::endpoint::EndpointAsk;
use kernels::threads::Threads;
use kernels_models::sampler::{LogitChanges, SamplerSettings};
use kernels_models::stage::{Activations, Draw, RequestedOutput, Rows, RowsIn, Stage, StageError, StageOptions};
use node_core::id::{Epoch, NodeId, PartId};
use node_core::input::Input;
use node_core::work::serve::StageOrder;
use partitioner::explain;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Shell {
    /// Fetches the weights, loads the stage, warms it up, and hands it to the device thread.
    pub(super) fn load_stage(&self, ordered: Ordered, name: String, (bytes_max, ram): (u64, u64), order: StageOrder) {
        let Ordered { key: (job, part), epoch, load, sources, device } = ordered;
        let key = (job, part);
        self.last_options.note(&order);
        let (library, ask) = (self.library.clone(), Arc::new(EndpointAsk(self.endpoint.clone())));
        let (driver, commands, device) = (self.driver.clone(), device.commands, device.compute);
        let residency = self.residency.clone();
        let failed = {
            let (residency, driver) = (residency.clone(), driver.clone());
            move |reason: String| {
                // The device thread does not have it yet.
                residency.fail(key, load, || {});
                driver.input(Input::Loaded { job, part, load, result: Err(reason) });
            }
        };
        let panicked = failed.clone();
        let loading = async move {
            let layers = order.layers_of(part);
            let ordered_at = Instant::now();
            let held = library.share(order.content, &name, indices(&layers), &sources, &ask).await;
            let held = held.map_err(|e| e.to_string());
            let got = ordered_at.elapsed();
            // Peers may now fetch these weights from this node.
            driver.input(Input::Holdings(library.contents()));
            let loaded = tokio::task::spawn_blocking(move || {
                held.and_then(|held| {
                    rows::check(order.row, order.width)?;
                    let stage = load_stage(&device, held.file.clone(), (&name, &order, part, ram), got)?;
                    let draws_tokens = part.index() + 1 == order.layers.len();
                    Ok((stage, draws_tokens.then(|| held.file.clone()), rows::codec(order.row.codec)))
                })
            })
            .await;
            match loaded.unwrap_or_else(|e| Err(format!("loading was interrupted: {e}"))) {
                // The device thread answers. A stage whose order was superseded is dropped here.
                Ok((stage, file, rows)) => {
                    residency.install(key, load, || {
                        let part = NewPart::Stage { stage, file, rows, ram };
                        let _ = commands.send(Command::Load { key, epoch, load, bytes_max, part });
                    });
                }
                Err(reason) => {
                    tracing::warn!("cannot hold layers {} of job {:016x}: {reason}", explain::layers(&layers), job.0);
                    failed(reason);
                }
            }
        };
        self.spawn(loading, panicked);
    }

    /// Fetches the weights of a stage that is not to be loaded yet.
    pub(super) fn fetch_stage(
        &self,
        (job, part): Key,
        epoch: Epoch,
        name: String,
        order: StageOrder,
        sources: Vec<NodeId>,
    ) {
        let (library, ask) = (self.library.clone(), Arc::new(EndpointAsk(self.endpoint.clone())));
        let (driver, failing) = (self.driver.clone(), self.driver.clone());
        let fetching = async move {
            let layers = indices(&order.layers_of(part));
            let held = library.share(order.content, &name, layers, &sources, &ask).await;
            driver.input(Input::Holdings(library.contents()));
            let result = held.map(|held| held.fetched_bytes).map_err(|e| e.to_string());
            driver.input(Input::Fetched { job, epoch, part, result });
        };
        self.spawn(fetching, move |reason| failing.input(Input::Fetched { job, epoch, part, result: Err(reason) }));
    }
}

fn indices(layers: &Range<u32>) -> Range<usize> {
    layers.start as usize..layers.end as usize
}

/// `ram`: bytes of experts that lie in RAM. `got`: the time it took to fetch the weights.
fn load_stage(
    device: &crate::device::Compute,
    file: Arc<kernels_models::weights::ModelFile>,
    (name, order, part, ram): (&str, &StageOrder, PartId, u64),
    got: Duration,
) -> Result<Box<dyn Stage>, String> {
    let layers = order.layers_of(part);
    let options = StageOptions {
        layers: indices(&layers),
        sequences: order.sequences as usize,
        context: order.context as usize,
        activations: if order.int8 { Activations::Int8 } else { Activations::F32 },
        ram,
        threads: device.threads,
    };
    let begun = Instant::now();
    let mut stage = device.load(file, options).map_err(|e| e.to_string())?;
    let loaded = begun.elapsed();
    warm(stage.as_mut(), device.threads, layers.start == 0).map_err(|e| e.to_string())?;
    let [got, loaded, first] = [got, loaded, begun.elapsed() - loaded].map(|took| took.as_secs_f64());
    let (layers, total) = (explain::layers(&layers), got + loaded + first);
    tracing::info!(
        "layers {layers} of {name} took {total:.2} s: {got:.2} to get the weights, {loaded:.2} to load them, {first:.2} for a step"
    );
    Ok(stage)
}

/// Runs one step without a request, so that the first real one does not wait for page faults or kernel compilation.
fn warm(stage: &mut dyn Stage, threads: usize, is_first: bool) -> Result<(), StageError> {
    // Separate threads: the device thread uses the node's own at the same time.
    let mut threads = Threads::new(threads).map_err(|e| StageError::Device(format!("{threads} threads: {e}")))?;
    let zeros = vec![0.0; stage.width()];
    let input = if is_first { RowsIn::Tokens(&[0]) } else { RowsIn::hidden(&zeros) };
    let draw =
        Draw { settings: SamplerSettings::greedy(), position: 1, changes: LogitChanges::default(), logprobs: None };
    let row = Rows { sequence: u64::MAX, position: 0, input, output: RequestedOutput::Token(draw) };
    stage.forward(&mut threads, &[row])?;
    stage.release(u64::MAX);
    Ok(())
}
