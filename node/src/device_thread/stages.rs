//! The part of the device thread specific to model stages: batches in, results out, and numerics challenges.
use crate::tensors::{Tensor, TensorStore, join};
use kernels::threads::Threads;
use kernels_models::sampler::{LogitChanges, SamplerSettings};
use kernels_models::stage::{Draw, RequestedOutput, Rows, RowsIn, RowsOut, Stage, StageError, Submitted};
use node_core::id::Epoch;
use node_core::limits::CHALLENGE_STEPS;
use node_core::work::Payload;
use node_core::work::serve::{Item, ItemResult, SampleSpec, Sampling};
use std::sync::Arc;

/// A loaded stage.
pub(super) struct LoadedStage {
    /// The epoch of its batches.
    pub(super) epoch: Epoch,
    pub(super) stage: Box<dyn Stage>,
}

impl LoadedStage {
    /// The stage, if it is loaded for this epoch.
    pub(super) fn of(&mut self, epoch: Epoch) -> Result<&mut dyn Stage, String> {
        if self.epoch != epoch {
            return Err(format!("the stage was loaded for epoch {}, not {}", self.epoch.counter, epoch.counter));
        }
        Ok(&mut *self.stage)
    }
}

/// Takes the input rows of a batch out of `tensors`.
pub(super) fn inputs(tensors: &TensorStore, items: &[Item]) -> Vec<Option<Tensor>> {
    let take = |item: &Item| match &item.input {
        Payload::Tensor(id) => tensors.take(*id),
        Payload::Tensors(ids) => join(ids.iter().map(|id| tensors.take(*id)).collect()),
        Payload::Tokens(tokens) => Some(Tensor::Tokens(tokens.clone())),
    };
    items.iter().map(take).collect()
}

/// Submits a batch. `None`: the device is computing it, and [`finish`] returns the outputs.
pub(super) fn submit(
    stage: &mut dyn Stage,
    threads: &mut Threads,
    items: &[Item],
    inputs: &[Option<Tensor>],
) -> Result<Option<Vec<RowsOut>>, String> {
    match stage.submit(threads, &batch(items, inputs)?).map_err(|e| e.to_string())? {
        Submitted::Done(outputs) => Ok(Some(outputs)),
        Submitted::Queued => Ok(None),
    }
}

/// Waits for a submitted batch.
pub(super) fn finish(
    stage: &mut dyn Stage,
    threads: &mut Threads,
    items: &[Item],
    inputs: &[Option<Tensor>],
) -> Result<Vec<RowsOut>, String> {
    stage.finish(threads, &batch(items, inputs)?).map_err(|e| e.to_string())
}

/// The results of a batch as reported to the core; hidden rows go into `tensors` under the id that the core chose.
pub(super) fn results(tensors: &TensorStore, items: &[Item], outputs: Vec<RowsOut>) -> Vec<ItemResult> {
    let result = |(item, output): (&Item, RowsOut)| match output {
        RowsOut::Hidden(rows) => {
            tensors.put(item.output, Tensor::Hidden(Arc::new(rows)));
            ItemResult::Hidden
        }
        RowsOut::Token(token) => ItemResult::Token { token },
        RowsOut::Logits(_) | RowsOut::Nothing => ItemResult::Nothing,
    };
    items.iter().zip(outputs).map(result).collect()
}

fn batch<'a>(items: &'a [Item], inputs: &'a [Option<Tensor>]) -> Result<Vec<Rows<'a>>, String> {
    items.iter().zip(inputs).map(|(item, input)| rows(item, input)).collect()
}

/// A digest of the stage's outputs for generated rows: equal for equal numerics.
pub(super) fn challenge(stage: &mut dyn Stage, threads: &mut Threads, nonce: u64) -> Result<u64, String> {
    let digest = digest(stage, threads, nonce);
    stage.release(CHALLENGE_SEQUENCE);
    digest.map_err(|e| e.to_string())
}

/// The cache sequence of a challenge; no request has this number.
const CHALLENGE_SEQUENCE: u64 = u64::MAX;

/// Runs [`CHALLENGE_STEPS`] single rows, generated from `nonce`, at consecutive positions, and hashes the output bits.
fn digest(stage: &mut dyn Stage, threads: &mut Threads, nonce: u64) -> Result<u64, StageError> {
    let seed = blake3::derive_key("meshnode 2026 rows of a challenge", &nonce.to_le_bytes());
    let mut bytes = vec![0; stage.width()];
    blake3::Hasher::new_keyed(&seed).finalize_xof().fill(&mut bytes);
    // One byte per element: from -1 to just below 1, as normalised rows are.
    let hidden: Vec<f32> = bytes.iter().map(|&byte| (f32::from(byte) - 128.0) / 128.0).collect();
    let mut digest = blake3::Hasher::new();
    for position in 0..CHALLENGE_STEPS {
        let row = |input| Rows {
            sequence: CHALLENGE_SEQUENCE,
            position: position as usize,
            input,
            output: if position + 1 == CHALLENGE_STEPS { RequestedOutput::Logits } else { RequestedOutput::Nothing },
        };
        // Every vocabulary has at least 256 tokens.
        let token = [u32::from(bytes[position as usize])];
        // A stage that takes tokens rejects hidden rows with `Input`, without changing its state.
        let outputs = match stage.forward(threads, &[row(RowsIn::Hidden(&hidden))]) {
            Err(StageError::Input(_)) => stage.forward(threads, &[row(RowsIn::Tokens(&token))]),
            answer => answer,
        };
        for output in outputs? {
            if let RowsOut::Hidden(values) | RowsOut::Logits(values) = output {
                for value in values {
                    digest.update(&value.to_bits().to_le_bytes());
                }
            }
        }
    }
    Ok(u64::from_le_bytes(digest.finalize().as_bytes()[..8].try_into().unwrap_or_default()))
}

fn rows<'a>(item: &'a Item, input: &'a Option<Tensor>) -> Result<Rows<'a>, String> {
    let input = match input {
        Some(Tensor::Tokens(tokens)) => RowsIn::Tokens(tokens),
        Some(Tensor::Hidden(rows)) => RowsIn::Hidden(rows),
        Some(Tensor::Halo { .. }) => {
            return Err("a stage got cells of a grid as input; expected rows or tokens".into());
        }
        None => return Err("the input rows of a frame were dropped before they were used".into()),
    };
    Ok(Rows {
        sequence: item.request.0,
        position: item.position as usize,
        input,
        output: item.sample.as_ref().map_or(RequestedOutput::Nothing, want),
    })
}

fn want(sample: &SampleSpec) -> RequestedOutput<'_> {
    let changes =
        LogitChanges { history: &sample.history, prompt: sample.prompt as usize, bias: &sample.sampling.logit_bias_e6 };
    RequestedOutput::Token(Draw { settings: settings(&sample.sampling), position: sample.position, changes })
}

fn settings(s: &Sampling) -> SamplerSettings {
    let share = |e6: u32| e6 as f32 / 1e6;
    SamplerSettings {
        temperature: share(s.temperature_e6),
        top_p: share(s.top_p_e6),
        top_k: s.top_k,
        min_p: share(s.min_p_e6),
        repetition_penalty: share(s.repetition_penalty_e6),
        presence_penalty: s.presence_penalty_e6 as f32 / 1e6,
        frequency_penalty: s.frequency_penalty_e6 as f32 / 1e6,
        seed: s.seed,
    }
}
