//! Measures what each matrix does to the results if it alone has the fewest bits.
//!
//! A short text is computed layer by layer, each layer once as it is, and once for each of its matrices with that one quantised. The
//! measure is the mean over the rows of |difference|² / |output|² of the layer's output: the residual stream, or the logits after the
//! last layer. All later layers read that stream through norms, so to first order an equal relative error anywhere is an equal relative
//! error of the logits. That makes layers comparable at the cost of one layer's products, while the divergence of the model's own
//! distribution would need all later layers for each matrix. The error of the weights alone would not do: it is about the same
//! for all matrices, whatever their inputs are. One layer is in memory at a time.
use std::collections::BTreeMap;
use std::sync::Arc;

use kernels::threads::Threads;

use super::encode::{blocks, finite};
use super::{QuantizeError, QuantizeProgress, formats};
use crate::model::load_cpu_stage;
use crate::stage::{Activations, RequestedOutput, Rows, RowsIn, RowsOut, StageError, StageOptions};
use crate::weights::{ModelFile, TensorInfo};

/// The text: some sentences, code, numbers and other scripts.
const TEXT: &str = include_str!("calibration.txt");
/// Sequences of the text, and their length: each gives one row of logits.
const SEQUENCES: usize = 6;
const POSITIONS: usize = 24;

/// The measure of each matrix that has a choice.
///
/// # Errors
/// The source cannot be read or computed, or a weight is not finite.
pub(super) fn measure(
    file: &Arc<ModelFile>,
    threads: usize,
    progress: &dyn QuantizeProgress,
) -> Result<BTreeMap<String, f64>, QuantizeError> {
    let layers = file.config().layers;
    let mut pool = Threads::new(threads).map_err(|source| QuantizeError::Measure {
        what: "the model".to_owned(),
        source: StageError::Device(format!("{threads} compute threads: {source}")),
    })?;
    let total = file.tensors().iter().filter(|tensor| formats::fewest(tensor).is_some()).map(bytes).sum();
    progress.start("measuring", 0, total);
    let (mut sensitivities, mut done) = (BTreeMap::new(), 0);
    let mut input = Input::Tokens(tokens(file));
    for layer in 0..layers {
        let row_len =
            if file.config().has_head(&(layer..layer + 1)) { file.config().vocab } else { file.config().width };
        let exact = run(file, layer, &input, &mut pool).map_err(|source| failed(&format!("layer {layer}"), source))?;
        for tensor in file.tensors() {
            let Some(kind) =
                formats::fewest(tensor).filter(|_| file.config().belongs_to(&tensor.name, &(layer..layer + 1)))
            else {
                continue;
            };
            let view = file.tensor(&tensor.name).expect("a tensor of the file");
            // Rows at a time: their f32 are several times as large as the blocks.
            let mut quantised = Vec::new();
            for first in (0..tensor.rows).step_by(ROWS_EACH) {
                quantised.extend(blocks(kind, &finite(&view, first..tensor.rows.min(first + ROWS_EACH))?));
            }
            let variant = file.replacing(&tensor.name, kind, quantised.into());
            let other = run(&variant, layer, &input, &mut pool).map_err(|source| failed(&tensor.name, source))?;
            // A tied embedding is measured as both.
            *sensitivities.entry(tensor.name.clone()).or_insert(0.0) += distance(&exact, &other, row_len);
            done += bytes(tensor);
            progress.at(done.min(total));
        }
        input = Input::Hidden(exact);
    }
    Ok(sensitivities)
}

/// Rows that are quantised at a time.
const ROWS_EACH: usize = 256;

fn failed(what: &str, source: StageError) -> QuantizeError {
    QuantizeError::Measure { what: what.to_owned(), source }
}

fn bytes(tensor: &TensorInfo) -> u64 {
    tensor.range.end - tensor.range.start
}

/// What a layer reads, of each sequence.
enum Input {
    Tokens(Vec<Vec<u32>>),
    Hidden(Vec<Vec<f32>>),
}

/// The text in tokens, as far as the model's context and the text reach; pseudo-random tokens without a vocabulary.
fn tokens(file: &ModelFile) -> Vec<Vec<u32>> {
    let vocabulary = file.config().vocab as u32;
    let words = file.tokenizer().ok().and_then(|tokenizer| tokenizer.encode(TEXT, true).ok()).unwrap_or_default();
    let length = POSITIONS.min(file.config().context);
    let token = |at: usize| {
        let made = (at as u32).wrapping_mul(2_654_435_761) % vocabulary;
        words.get(at).copied().filter(|token| *token < vocabulary).unwrap_or(made)
    };
    (0..SEQUENCES).map(|sequence| (0..length).map(|position| token(sequence * length + position)).collect()).collect()
}

/// The output of a layer, of each sequence: all hidden rows, or the last row's logits.
fn run(file: &Arc<ModelFile>, layer: usize, input: &Input, threads: &mut Threads) -> Result<Vec<Vec<f32>>, StageError> {
    let options = StageOptions {
        layers: layer..layer + 1,
        sequences: SEQUENCES,
        context: POSITIONS.min(file.config().context),
        activations: Activations::F32,
        ram: 0,
        threads: threads.count(),
    };
    let mut stage = load_cpu_stage(file.clone(), options)?;
    let rows: Vec<RowsIn<'_>> = match input {
        Input::Tokens(tokens) => tokens.iter().map(|tokens| RowsIn::Tokens(tokens)).collect(),
        Input::Hidden(hidden) => hidden.iter().map(|hidden| RowsIn::hidden(hidden)).collect(),
    };
    let batch =
        (0..).zip(rows).map(|(sequence, input)| Rows { sequence, position: 0, input, output: RequestedOutput::Logits });
    let numbers = |out: RowsOut| match out {
        RowsOut::Hidden(rows) => Ok(rows.to_vec()),
        RowsOut::Logits(numbers) | RowsOut::Embedding(numbers) => Ok(numbers),
        RowsOut::Encoded(_) | RowsOut::Token(_) | RowsOut::Tokens(_) | RowsOut::Nothing => {
            Err(StageError::Input("the layer gave no numbers".to_owned()))
        }
    };
    let batch: Vec<Rows<'_>> = batch.collect();
    stage.forward(threads, &batch)?.into_iter().map(numbers).collect()
}

/// Mean over the rows of |difference|² / |exact|². Each row counts the same: the first ones of a text may be far larger than others.
fn distance(exact: &[Vec<f32>], other: &[Vec<f32>], row_len: usize) -> f64 {
    let square = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
    let (mut sum, mut rows) = (0.0, 0);
    for (exact, other) in exact.iter().zip(other) {
        for (exact, other) in exact.chunks(row_len).zip(other.chunks(row_len)) {
            let difference = square(&mut exact.iter().zip(other).map(|(a, b)| f64::from(*a) - f64::from(*b)));
            sum += difference / square(&mut exact.iter().map(|a| f64::from(*a))).max(f64::MIN_POSITIVE);
            rows += 1;
        }
    }
    sum / f64::from(rows.max(1))
}
