//! The part of the device thread specific to model stages: batches in, results out, and numerics challenges.
use super::constraints::Constraints;
use crate::device::SpillShare;
use crate::tensors::{Tensor, TensorStore, join};
use kernels::boundary::Codec;
use kernels::threads::Threads;
use kernels_models::sampler::{LogitChanges, SamplerSettings};
use kernels_models::stage::{Draw, Drawn, RequestedOutput, Rows, RowsIn, RowsOut, Stage, StageError, Submitted};
use node_core::id::Epoch;
use node_core::limits::CHALLENGE_STEPS;
use node_core::work::Payload;
use node_core::work::serve::{Item, ItemResult, Logprobs, SampleSpec, Sampled, Sampling};
use std::time::Duration;

/// A loaded stage.
pub(super) struct LoadedStage {
    /// The epoch of its batches.
    pub(super) epoch: Epoch,
    pub(super) stage: Box<dyn Stage>,
    /// Encoding of the rows that it makes; the stage knows it too.
    pub(super) rows: Codec,
    pub(super) constraints: Constraints,
    /// Returned when the stage is dropped.
    pub(super) _spill: SpillShare,
}

/// What a batch reads while it is computed: one of each per item.
#[derive(Default)]
pub(super) struct Inputs {
    rows: Vec<Option<Tensor>>,
    /// The tokens that may be drawn, if not all.
    allowed: Vec<Option<Vec<u32>>>,
}

impl LoadedStage {
    /// This stage, if it is loaded for the epoch.
    pub(super) fn of(&mut self, epoch: Epoch) -> Result<&mut Self, String> {
        if self.epoch != epoch {
            return Err(format!("the stage was loaded for epoch {}, not {}", self.epoch.counter, epoch.counter));
        }
        Ok(self)
    }

    /// Keeps the stage under another epoch, in which its rows have this encoding.
    pub(super) fn keep(&mut self, epoch: Epoch, rows: Codec) {
        (self.epoch, self.rows) = (epoch, rows);
        self.stage.encode_rows(rows);
    }

    /// Frees what belongs to a request.
    pub(super) fn release(&mut self, request: u64) {
        self.constraints.release(request);
        self.stage.release(request);
    }
}

/// Takes the input rows of a batch out of `tensors`.
pub(super) fn rows_of(tensors: &TensorStore, items: &[Item]) -> Vec<Option<Tensor>> {
    let take = |item: &Item| match &item.input {
        Payload::Tensor(id) => tensors.take(*id),
        Payload::Tensors(ids) => join(ids.iter().map(|id| tensors.take(*id)).collect()),
        Payload::Tokens(tokens) => Some(Tensor::Tokens(tokens.clone())),
    };
    items.iter().map(take).collect()
}

/// How long the input rows of an item have been in `tensors`, if it has such rows.
pub(super) fn age(tensors: &TensorStore, item: &Item) -> Option<Duration> {
    match &item.input {
        Payload::Tensor(id) => tensors.age(*id),
        Payload::Tensors(ids) => ids.last().and_then(|id| tensors.age(*id)),
        Payload::Tokens(_) => None,
    }
}

/// Submits a batch whose rows are in `inputs`. `None`: the device is computing it, and [`finish`] returns the outputs.
pub(super) fn submit(
    held: &mut LoadedStage,
    threads: &mut Threads,
    items: &[Item],
    inputs: &mut Inputs,
) -> Result<Option<Vec<RowsOut>>, String> {
    inputs.allowed = held.constraints.allowed(items);
    inputs.decode(held.stage.width())?;
    match held.stage.submit(threads, &inputs.batch(items)?).map_err(|e| e.to_string())? {
        Submitted::Done(outputs) => Ok(Some(outputs)),
        Submitted::Queued => Ok(None),
    }
}

/// Waits for a submitted batch.
pub(super) fn finish(
    stage: &mut dyn Stage,
    threads: &mut Threads,
    items: &[Item],
    inputs: &Inputs,
) -> Result<Vec<RowsOut>, String> {
    stage.finish(threads, &inputs.batch(items)?).map_err(|e| e.to_string())
}

impl Inputs {
    /// Of these rows; what may be drawn is not known yet.
    pub(super) fn new(rows: Vec<Option<Tensor>>) -> Self {
        Self { rows, allowed: Vec::new() }
    }

    /// Decodes encoded rows of `width` elements.
    fn decode(&mut self, width: usize) -> Result<(), String> {
        for tensor in self.rows.iter_mut().flatten() {
            if let Tensor::Encoded { codec, rows } = tensor {
                let rows = codec.decode(width, rows).map_err(|e| format!("rows from the stage before: {e}"))?;
                *tensor = Tensor::Hidden(rows.into());
            }
        }
        Ok(())
    }

    fn batch<'a>(&'a self, items: &'a [Item]) -> Result<Vec<Rows<'a>>, String> {
        let of = |(at, item): (usize, &'a Item)| {
            let allowed = self.allowed.get(at).and_then(Option::as_deref);
            rows(item, self.rows.get(at).and_then(Option::as_ref), allowed)
        };
        items.iter().enumerate().map(of).collect()
    }
}

/// The results of a batch as reported to the core; hidden rows go into `tensors` under the id that the core chose, encoded
/// once: every receiver gets the same bits, however often they are sent. `codec` is that of the stage.
pub(super) fn results(tensors: &TensorStore, items: &[Item], outputs: Vec<RowsOut>, codec: Codec) -> Vec<ItemResult> {
    let hidden = |item: &Item, tensor| {
        tensors.put(item.output, tensor);
        ItemResult::Hidden
    };
    let result = |(item, output): (&Item, RowsOut)| match output {
        RowsOut::Hidden(rows) => hidden(item, Tensor::Hidden(rows)),
        RowsOut::Encoded(rows) => hidden(item, Tensor::Encoded { codec, rows: rows.into() }),
        RowsOut::Token(drawn) => ItemResult::Token(sampled(drawn)),
        RowsOut::Tokens(tokens) => ItemResult::Tokens(tokens),
        RowsOut::Embedding(row) => {
            let bits = row.into_iter().map(f32::to_bits).collect();
            ItemResult::Token(Sampled { embedding: Some(bits), ..Sampled::from(0) })
        }
        RowsOut::Logits(_) | RowsOut::Nothing => ItemResult::Nothing,
    };
    items.iter().zip(outputs).map(result).collect()
}

fn sampled(drawn: Drawn) -> Sampled {
    // A float becomes the nearest integer that there is: minus infinity the least one.
    let e6 = |log: f32| (f64::from(log) * 1e6).round() as i32;
    let logprobs = drawn.logprobs.map(|logprobs| {
        let top_e6 = logprobs.top.into_iter().map(|(token, log)| (token, e6(log))).collect();
        Box::new(Logprobs { sampled_e6: e6(logprobs.drawn), top_e6 })
    });
    Sampled { token: drawn.token, logprobs, embedding: None }
}

/// A digest of the stage's outputs for generated rows: equal for equal numerics.
pub(super) fn challenge(held: &mut LoadedStage, threads: &mut Threads, nonce: u64) -> Result<u64, String> {
    let stage = &mut *held.stage;
    // An encoding would hide differences.
    stage.encode_rows(Codec::Lossless);
    let digest = digest(stage, threads, nonce);
    stage.encode_rows(held.rows);
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
        let outputs = match stage.forward(threads, &[row(RowsIn::hidden(&hidden))]) {
            Err(StageError::Input(_)) => stage.forward(threads, &[row(RowsIn::Tokens(&token))]),
            answer => answer,
        };
        for output in outputs? {
            let values = match &output {
                RowsOut::Hidden(rows) => &rows[..],
                RowsOut::Logits(values) | RowsOut::Embedding(values) => values,
                RowsOut::Encoded(_) | RowsOut::Token(_) | RowsOut::Tokens(_) | RowsOut::Nothing => &[],
            };
            for value in values {
                digest.update(&value.to_bits().to_le_bytes());
            }
        }
    }
    Ok(u64::from_le_bytes(digest.finalize().as_bytes()[..8].try_into().unwrap_or_default()))
}

fn rows<'a>(item: &'a Item, input: Option<&'a Tensor>, allowed: Option<&'a [u32]>) -> Result<Rows<'a>, String> {
    let input = match input {
        Some(Tensor::Tokens(tokens)) => RowsIn::Tokens(tokens),
        Some(Tensor::Hidden(rows)) => RowsIn::Hidden(rows.piece()),
        Some(Tensor::Encoded { .. }) => return Err("the rows of a frame were not decoded".into()),
        Some(Tensor::Halo { .. }) => {
            return Err("a stage got cells of a grid as input; expected rows or tokens".into());
        }
        None => return Err("the input rows of a frame were dropped before they were used".into()),
    };
    Ok(Rows {
        sequence: item.request.0,
        position: item.position as usize,
        input,
        output: item.sample.as_ref().map_or(RequestedOutput::Nothing, |sample| {
            let draw = draw(sample, allowed);
            match item.drafts as usize {
                0 => RequestedOutput::Token(draw),
                drafts => RequestedOutput::Tokens { draw, drafts },
            }
        }),
    })
}

fn draw<'a>(sample: &'a SampleSpec, allowed: Option<&'a [u32]>) -> Draw<'a> {
    let bias = &sample.sampling.logit_bias_e6;
    let changes = LogitChanges { history: &sample.history, prompt: sample.prompt as usize, bias, allowed };
    let logprobs = sample.sampling.logprobs.map(usize::from);
    Draw { settings: settings(&sample.sampling), position: sample.position, changes, logprobs }
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
