//! Device self-test for users: small models of every family and format must match the reference bit by bit.
//!
//! The reference is the CPU engine on its plainest instruction set, which tests compare with float64.
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kernels::quant::{QUANT_TYPES, QuantType};
use kernels::threads::Threads;
use kernels_models::load_plain_stage;
use kernels_models::ram::movable_bytes;
use kernels_models::sampler::{LogitChanges, Sampler, SamplerSettings};
use kernels_models::stage::{
    Activations, Draw, Drawn, RequestedOutput, Rows, RowsIn, RowsOut, Stage, StageError, StageOptions,
};
use kernels_models::weights::testing::TinyModel;
use kernels_models::weights::{Architecture, ModelFile};

use crate::error::panic_text;

mod encodings;
mod products;

pub(crate) use encodings::checks as encoding_checks;
#[cfg(test)]
pub(crate) use encodings::compare as compare_encodings;
pub(crate) use products::checks as product_checks;

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// A summary, or what is wrong.
    pub outcome: Result<String, String>,
}

/// Loads a stage on the device under test.
pub(crate) type Load<'a> = &'a dyn Fn(&Arc<ModelFile>, StageOptions) -> Result<Box<dyn Stage>, StageError>;

/// Sequence, first position and tokens of some rows.
type Entry = (u64, usize, Vec<u32>);

/// Checks of models on a device, each done when it is asked for.
pub(crate) fn checks(load: Load<'_>) -> impl Iterator<Item = Check> {
    let formats = QUANT_TYPES.into_iter().map(|quant| {
        let batches = vec![vec![(1, 0, tokens(20, 1))], vec![(1, 20, tokens(5, 1))], vec![(1, 25, tokens(1, 1))]];
        (TinyModel { quant, layers: 1, ..TinyModel::default() }, batches)
    });
    let families = Architecture::ALL.into_iter().map(|architecture| {
        let biases = architecture == Architecture::Llama;
        (TinyModel { biases, tied: !biases, ..TinyModel::of(architecture) }, conversation())
    });
    let k_quant = TinyModel { quant: QuantType::Q4K, layers: 2, ..TinyModel::default() };
    let embeddings = TinyModel { architecture: Architecture::Qwen3, pooled: true, layers: 2, ..TinyModel::default() };
    let models = families.chain(formats).chain([(k_quant, conversation()), (embeddings, conversation())]);
    models.flat_map(move |(model, batches)| {
        let numerics = [Activations::Int8, Activations::F32].into_iter();
        numerics.map(move |activations| check(&model, &batches, activations, load))
    })
}

/// Prompts, steps of one and of several sequences, rewritten positions, and more rows than one kernel launch takes.
fn conversation() -> Vec<Vec<Entry>> {
    vec![
        vec![(1, 0, tokens(9, 1))],
        vec![(1, 9, tokens(1, 2)), (3, 0, tokens(2, 6))],
        vec![(1, 10, tokens(1, 4)), (3, 2, tokens(20, 9))],
        vec![(1, 11, tokens(1, 4)), (2, 0, tokens(140, 3))],
        vec![(1, 12, tokens(1, 4)), (2, 140, tokens(1, 5)), (3, 22, tokens(2, 6))],
        vec![(2, 100, tokens(3, 7))],
        vec![(1, 13, tokens(20, 8)), (3, 24, tokens(8, 9))],
    ]
}

/// Batches of a conversation that are computed for each share of the experts in RAM: passes of few and of many rows, with one sequence and
/// with several. A software driver needs minutes for the whole conversation.
const BATCHES_PER_SHARE: usize = 3;

fn tokens(count: u32, seed: u32) -> Vec<u32> {
    (0..count).map(|i| (i * 31 + seed * 17 + i * i) % 260).collect()
}

fn check(model: &TinyModel, batches: &[Vec<Entry>], activations: Activations, load: Load<'_>) -> Check {
    let special = if model.pooled {
        " for embeddings"
    } else if model.biases {
        " with biases"
    } else {
        ""
    };
    let (family, format) = (model.architecture.name(), model.quant.name());
    let name = format!("{family} in {format}{special}, {}", activations.numerics());
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let file = model.open();
        let layers = 0..file.config().layers;
        let options = StageOptions { layers, sequences: 3, context: 300, activations, ram: 0, threads: 2 };
        let text = |error: StageError| error.to_string();
        let mut expected = load_plain_stage(Arc::clone(&file), options.clone()).map_err(text)?;
        let mut threads = Threads::new(options.threads).map_err(|error| error.to_string())?;
        let mut results = Vec::with_capacity(batches.len());
        for batch in batches {
            results.push(bits(&mut *expected, &mut threads, batch)?);
        }
        // With all experts on the device, with one in RAM, and with as many as may lie there.
        let movable = movable_bytes(&file, &options).map_err(text)?;
        let shares: &[u64] = if movable > 0 { &[0, 1, movable] } else { &[0] };
        for &ram in shares {
            let mut found = load(&file, StageOptions { ram, ..options.clone() }).map_err(text)?;
            let steps = if ram > 0 { BATCHES_PER_SHARE } else { batches.len() };
            for (step, (batch, expected)) in batches.iter().zip(&results).take(steps).enumerate() {
                let found = bits(&mut *found, &mut threads, batch)?;
                if let Some(at) = (0..expected.len().max(found.len())).find(|&at| expected.get(at) != found.get(at)) {
                    let number = |bits: Option<&u32>| bits.map_or("nothing".into(), |b| f32::from_bits(*b).to_string());
                    let (expected, found) = (number(expected.get(at)), number(found.get(at)));
                    let place = if ram > 0 { format!(" with {ram} bytes of experts in RAM") } else { String::new() };
                    return Err(format!("step {step}{place}: logit {at} is {found}, expected {expected}"));
                }
            }
        }
        // Families draw alike once logits are computed, and a software driver compiles kernels for minutes.
        let draws = matches!(model.architecture, Architecture::Llama | Architecture::Gemma2);
        check_split(&file, &options, &mut threads, &batches[0], draws, load)?;
        let numbers: usize = results.iter().map(Vec::len).sum();
        Ok(format!("{numbers} logits have the bits of the reference"))
    }));
    Check { name, outcome: outcome.unwrap_or_else(|panic| Err(format!("panicked: {}", panic_text(panic.as_ref())))) }
}

/// Checks that two stages in sequence give the results of one, wherever the model is cut; with `draws` also a token that the second
/// one draws.
fn check_split(
    file: &Arc<ModelFile>,
    options: &StageOptions,
    threads: &mut Threads,
    batch: &[Entry],
    draws: bool,
    load: Load<'_>,
) -> Result<(), String> {
    let text = |error: StageError| error.to_string();
    let end = options.layers.end;
    if end < 2 {
        return Ok(());
    }
    let stage = |layers| load(file, StageOptions { layers, ..options.clone() }).map_err(text);
    let mut whole = stage(0..end)?;
    let expected = bits(&mut *whole, threads, batch)?;
    // A step after the batch, whose token the device may draw.
    let Some((sequence, position, prompt)) = batch.first() else { return Ok(()) };
    let next = [(*sequence, position + prompt.len(), tokens(1, 2))];
    let changes = LogitChanges::default();
    let settings = SamplerSettings { temperature: 0.9, seed: 5, ..SamplerSettings::greedy() };
    let draw = Draw { settings, position: next[0].1 as u32 + 1, changes, logprobs: None };
    let sampled = |logits: &[f32]| {
        Sampler::new().sample(logits, &settings, draw.position, &changes).map_err(|error| error.to_string())
    };
    let whole = if draws { whole.forward(threads, &rows(&next)).map_err(text)? } else { Vec::new() };
    let drawn = match whole.first() {
        Some(RowsOut::Logits(logits)) => Some(sampled(logits)?),
        _ => None,
    };
    for cut in 1..end {
        let (mut first, mut second) = (stage(0..cut)?, stage(cut..end)?);
        let hidden = first.forward(threads, &rows(batch)).map_err(text)?;
        let found = second.forward(threads, &continued(batch, &hidden, RequestedOutput::Logits)).map_err(text)?;
        if numbers(found) != expected {
            return Err(format!("two stages in sequence, cut at layer {cut}, give other logits than one"));
        }
        let Some(token) = drawn else { continue };
        let hidden = first.forward(threads, &rows(&next)).map_err(text)?;
        let found = second.forward(threads, &continued(&next, &hidden, RequestedOutput::Token(draw))).map_err(text)?;
        if found != [RowsOut::Token(Drawn { token, logprobs: None })] {
            return Err(format!("cut at layer {cut}, the second stage drew {found:?}, expected token {token}"));
        }
    }
    Ok(())
}

/// The rows of a batch after the layers of a first stage.
fn continued<'a>(batch: &[Entry], hidden: &'a [RowsOut], output: RequestedOutput<'a>) -> Vec<Rows<'a>> {
    let mut all = Vec::with_capacity(batch.len());
    for ((sequence, position, _), out) in batch.iter().zip(hidden) {
        if let RowsOut::Hidden(hidden) = out {
            all.push(Rows { sequence: *sequence, position: *position, input: RowsIn::Hidden(hidden.piece()), output });
        }
    }
    all
}

fn rows(batch: &[Entry]) -> Vec<Rows<'_>> {
    let mut all = Vec::with_capacity(batch.len());
    for (sequence, position, tokens) in batch {
        all.push(Rows {
            sequence: *sequence,
            position: *position,
            input: RowsIn::Tokens(tokens),
            output: RequestedOutput::Logits,
        });
    }
    all
}

fn bits(stage: &mut dyn Stage, threads: &mut Threads, batch: &[Entry]) -> Result<Vec<u32>, String> {
    Ok(numbers(stage.forward(threads, &rows(batch)).map_err(|error| error.to_string())?))
}

fn numbers(out: Vec<RowsOut>) -> Vec<u32> {
    let numbers = |out| match out {
        RowsOut::Logits(numbers) | RowsOut::Embedding(numbers) => numbers,
        RowsOut::Hidden(rows) => rows.to_vec(),
        RowsOut::Encoded(_) | RowsOut::Token(_) | RowsOut::Tokens(_) | RowsOut::Nothing => Vec::new(),
    };
    out.into_iter().flat_map(numbers).map(f32::to_bits).collect()
}
