//! The numerics contract of whole models: results are bit-identical for any layer partition, batch, prefill chunking,
//! number of threads and replay; invalid input to a stage is rejected without side effects.
use std::ops::Range;
use std::sync::Arc;

use kernels::quant::{QUANT_TYPES, QuantType};
use kernels::threads::Threads;
use kernels_models::sampler::{LogitChanges, SamplerSettings};
use kernels_models::stage::{
    Activations, Draw, RequestedOutput, Rows, RowsIn, RowsOut, Stage, StageError, StageOptions,
};
use kernels_models::weights::testing::{TinyModel, real_model_path};
use kernels_models::weights::{Architecture, ModelFile};

const BOTH: [Activations; 2] = [Activations::Int8, Activations::F32];

fn load(file: &Arc<ModelFile>, layers: Range<usize>, activations: Activations, threads: usize) -> Loaded {
    let options = StageOptions { layers, sequences: 8, context: 600, activations, ram: 0, threads };
    let stage = kernels_models::load_cpu_stage(Arc::clone(file), options).unwrap();
    Loaded { stage, threads: Threads::new(threads).unwrap() }
}

/// A stage with the threads that compute it.
struct Loaded {
    stage: Box<dyn Stage>,
    threads: Threads,
}

impl Loaded {
    fn forward(&mut self, batch: &[Rows<'_>]) -> Result<Vec<RowsOut>, StageError> {
        self.stage.forward(&mut self.threads, batch)
    }
}

fn whole(file: &Arc<ModelFile>, activations: Activations, threads: usize) -> Loaded {
    load(file, 0..file.config().layers, activations, threads)
}

/// Pseudo-random tokens, different per sequence.
fn tokens(file: &ModelFile, sequence: u64, count: usize) -> Vec<u32> {
    let vocab = file.config().vocab as u64;
    (0..count as u64).map(|i| ((i * 7919 + sequence * 104_729 + i * i * 31) % vocab) as u32).collect()
}

/// Runs rows of one sequence through a chain of stages; returns the logits of the last row as bits.
fn through(stages: &mut [Loaded], sequence: u64, position: usize, tokens: &[u32]) -> Vec<u32> {
    let (first, rest) = stages.split_first_mut().unwrap();
    let step = |stage: &mut Loaded, input: RowsIn<'_>| {
        stage.forward(&[Rows { sequence, position, input, output: RequestedOutput::Logits }]).unwrap().remove(0)
    };
    let mut out = step(first, RowsIn::Tokens(tokens));
    for stage in rest {
        let RowsOut::Hidden(hidden) = out else { panic!("expected hidden rows") };
        out = step(stage, RowsIn::hidden(&hidden));
    }
    bits(&out)
}

fn bits(out: &RowsOut) -> Vec<u32> {
    let (RowsOut::Logits(logits) | RowsOut::Embedding(logits)) = out else { panic!("found {out:?}") };
    assert!(logits.iter().all(|l| l.is_finite()));
    logits.iter().map(|l| l.to_bits()).collect()
}

/// Logits of a single-stage run: after the whole prompt, then after each token.
fn solo(file: &Arc<ModelFile>, activations: Activations, sequence: u64, prompt: usize, more: usize) -> Vec<Vec<u32>> {
    let all = tokens(file, sequence, prompt + more);
    let mut stage = [whole(file, activations, 1)];
    let mut logits = vec![through(&mut stage, sequence, 0, &all[..prompt])];
    logits.extend((prompt..prompt + more).map(|i| through(&mut stage, sequence, i, &all[i..=i])));
    logits
}

/// Small models of each architecture and format, and the real model if available.
fn models() -> Vec<(String, Arc<ModelFile>)> {
    let mut models = Vec::new();
    for architecture in Architecture::ALL {
        models.push((architecture.name().into(), TinyModel::of(architecture).open()));
    }
    models.push(("biased llama".into(), TinyModel { biases: true, ..TinyModel::default() }.open()));
    for tied in [false, true] {
        let tiny = TinyModel { architecture: Architecture::Qwen3, pooled: true, tied, ..TinyModel::default() };
        models.push((format!("embeddings, tied: {tied}"), tiny.open()));
    }
    for quant in QUANT_TYPES {
        let tied = quant == QuantType::Q8_0;
        let tiny = TinyModel { architecture: Architecture::Qwen3, quant, tied, ffn: 768, ..TinyModel::default() };
        models.push((quant.name().into(), tiny.open()));
    }
    models.extend(real_model_path().map(|path| ("SmolLM2".into(), ModelFile::open(&path).unwrap())));
    models
}

#[test]
fn any_layer_partition_gives_the_same_bits() {
    for (name, file) in models() {
        let layers = file.config().layers;
        for activations in BOTH {
            let expected = solo(&file, activations, 3, 21, 3);
            // Two stages, cut at every layer, and a stage for each layer.
            let pairs = (1..layers).map(|cut| vec![0, cut, layers]);
            for cuts in pairs.chain([(0..=layers).collect()]) {
                let mut stages: Vec<_> =
                    cuts.windows(2).map(|pair| load(&file, pair[0]..pair[1], activations, 1)).collect();
                let all = tokens(&file, 3, 24);
                let mut found = vec![through(&mut stages, 3, 0, &all[..21])];
                found.extend((21..24).map(|i| through(&mut stages, 3, i, &all[i..=i])));
                assert!(found == expected, "{name} {activations:?} cut at {cuts:?}");
            }
        }
    }
}

#[test]
fn any_batch_gives_the_same_bits() {
    for (name, file) in models() {
        for activations in BOTH {
            let mut stage = whole(&file, activations, 2);
            // Eight sequences with prompts of different lengths, then one token each at their own positions.
            let all: Vec<_> = (0..8).map(|s| tokens(&file, s, 12 + s as usize)).collect();
            let expected: Vec<_> = (0..8).map(|s| solo(&file, activations, s as u64, 10 + s, 2)).collect();
            for part in [0, 1, 2] {
                let range = |s: usize| match part {
                    0 => 0..10 + s,
                    1 => 10 + s..11 + s,
                    _ => 11 + s..12 + s,
                };
                let batch: Vec<_> = (0..8)
                    .map(|s| {
                        let input = RowsIn::Tokens(&all[s][range(s)]);
                        Rows { sequence: s as u64, position: range(s).start, input, output: RequestedOutput::Logits }
                    })
                    .collect();
                for (s, out) in stage.forward(&batch).unwrap().iter().enumerate() {
                    assert!(bits(out) == expected[s][part], "{name} {activations:?} sequence {s} part {part}");
                }
            }
        }
    }
}

#[test]
fn tokens_after_drafts_are_those_of_single_steps() {
    // A model for embeddings has no tokens.
    for (name, file) in models().into_iter().filter(|(name, _)| !name.starts_with("embeddings")) {
        let prompt = tokens(&file, 1, 10);
        let settings = SamplerSettings { temperature: 0.9, seed: 3, ..SamplerSettings::greedy() };
        let draw = |position: usize| Draw {
            settings,
            position: position as u32,
            changes: LogitChanges::default(),
            logprobs: None,
        };
        let run = |stage: &mut Loaded, position, tokens: &[u32], output| {
            let out = stage.forward(&[Rows { sequence: 1, position, input: RowsIn::Tokens(tokens), output }]);
            match out.unwrap().remove(0) {
                RowsOut::Token(drawn) => vec![drawn.token],
                RowsOut::Tokens(tokens) => tokens,
                other @ (RowsOut::Hidden(_)
                | RowsOut::Encoded(_)
                | RowsOut::Logits(_)
                | RowsOut::Embedding(_)
                | RowsOut::Nothing) => {
                    panic!("{name}: {other:?}")
                }
            }
        };
        let mut stage = whole(&file, Activations::Int8, 2);
        let mut expected = run(&mut stage, 0, &prompt, RequestedOutput::Token(draw(10)));
        for position in 10..18 {
            let last = [expected[position - 10]];
            expected.extend(run(&mut stage, position, &last, RequestedOutput::Token(draw(position + 1))));
        }
        let mut stage = whole(&file, Activations::Int8, 2);
        assert_eq!(run(&mut stage, 0, &prompt, RequestedOutput::Token(draw(10))), expected[..1]);
        let drafts = |position: usize, drafts| RequestedOutput::Tokens { draw: draw(position + 1), drafts };
        assert_eq!(run(&mut stage, 10, &expected[..4], drafts(10, 3)), expected[1..5], "{name}: all are right");
        let wrong = [expected[4], expected[5], (expected[6] + 1) % file.config().vocab as u32, 0];
        assert_eq!(run(&mut stage, 14, &wrong, drafts(14, 3))[..2], expected[5..7], "{name}: one is right");
        assert_eq!(run(&mut stage, 16, &expected[6..8], drafts(16, 1)), expected[7..9], "{name}: after wrong ones");
        let too_many = Rows { sequence: 1, position: 18, input: RowsIn::Tokens(&expected[..2]), output: drafts(18, 2) };
        assert!(matches!(stage.forward(&[too_many]), Err(StageError::Input(_))), "a row before the drafts");
    }
}

#[test]
fn any_chunking_and_number_of_threads_gives_the_same_bits() {
    for (name, file) in models() {
        for activations in BOTH {
            // The f32 path of the real model is slow; small models cover long chunks.
            let count = if name == "SmolLM2" && activations == Activations::F32 { 40 } else { 530 };
            let all = tokens(&file, 5, count);
            let expected = through(&mut [whole(&file, activations, 1)], 5, 0, &all);
            for (chunk, threads) in [(1, 1), (7, 2), (129, 3), (512, 2)] {
                let mut stage = [whole(&file, activations, threads)];
                let mut last = Vec::new();
                for (i, part) in all.chunks(chunk).enumerate() {
                    last = through(&mut stage, 5, i * chunk, part);
                }
                assert!(last == expected, "{name} {activations:?} chunks of {chunk}, {threads} threads");
            }
        }
    }
}

#[test]
fn rewriting_positions_gives_the_same_bits() {
    for (name, file) in models() {
        for activations in BOTH {
            let all = tokens(&file, 1, 50);
            let other = tokens(&file, 2, 50);
            let expected = solo(&file, activations, 1, 40, 3);
            let mut stage = [whole(&file, activations, 1)];
            through(&mut stage, 1, 0, &all[..40]);
            // The same prompt again, then other tokens that are rolled back, then a replay from the middle of a block.
            through(&mut stage, 1, 0, &all[..40]);
            through(&mut stage, 1, 35, &other[..9]);
            assert_eq!(stage[0].stage.cached_positions(1), 44);
            assert!(through(&mut stage, 1, 30, &all[30..40]) == expected[0], "{name} {activations:?}");
            assert_eq!(stage[0].stage.cached_positions(1), 40);
            for i in 40..43 {
                through(&mut stage, 1, i, &other[i..=i]);
                assert!(through(&mut stage, 1, i, &all[i..=i]) == expected[i - 39], "{name} {activations:?}");
            }
            stage[0].stage.release(1);
            assert_eq!(stage[0].stage.cached_positions(1), 0);
        }
    }
}

#[test]
fn invalid_batches_are_rejected_and_change_nothing() {
    let file = TinyModel::default().open();
    let mut first = load(&file, 0..2, Activations::Int8, 1);
    let mut last = load(&file, 2..3, Activations::Int8, 1);
    let width = file.config().width;
    let rows = |sequence, position, input| Rows { sequence, position, input, output: RequestedOutput::Logits };
    first.forward(&[rows(1, 0, RowsIn::Tokens(&[5, 6, 7]))]).unwrap();

    let hidden = vec![0.5; width];
    let long = vec![1; 601];
    let beyond = [file.config().vocab as u32];
    let wrong: Vec<(Vec<Rows<'_>>, &str)> = vec![
        (vec![rows(1, 0, RowsIn::hidden(&hidden))], "hidden rows"),
        (vec![rows(1, 0, RowsIn::Tokens(&beyond))], "token id below"),
        (vec![rows(1, 4, RowsIn::Tokens(&[1]))], "3 are cached"),
        (vec![rows(2, 1, RowsIn::Tokens(&[1]))], "0 are cached"),
        (vec![rows(2, 0, RowsIn::Tokens(&long))], "context"),
        (vec![rows(2, 0, RowsIn::Tokens(&[]))], "no rows"),
        (vec![rows(1, 3, RowsIn::Tokens(&[1])), rows(1, 4, RowsIn::Tokens(&[1]))], "twice"),
        // Eight contexts of 600 positions in whole pages, and one page more: 164 pages of 32 positions.
        ((2..170).map(|s| rows(s, 0, RowsIn::Tokens(&[1]))).collect(), "more pages"),
    ];
    for (batch, expected) in wrong {
        let Err(StageError::Input(message)) = first.forward(&batch) else { panic!("{expected}: accepted") };
        assert!(message.contains(expected), "expected {expected:?} in {message:?}");
        assert_eq!((first.stage.cached_positions(1), first.stage.cached_positions(2)), (3, 0));
    }
    assert!(last.forward(&[rows(1, 0, RowsIn::Tokens(&[1]))]).is_err());
    assert!(last.forward(&[rows(1, 0, RowsIn::hidden(&hidden[1..]))]).is_err());
    assert!(last.forward(&[rows(1, 0, RowsIn::hidden(&hidden))]).is_ok());

    for (layers, sequences, context, threads) in [(0..4, 1, 1, 1), (1..1, 1, 1, 1), (0..3, 0, 1, 1), (0..3, 1, 1, 0)] {
        let options = StageOptions { layers, sequences, context, activations: Activations::Int8, ram: 0, threads };
        assert!(kernels_models::load_cpu_stage(Arc::clone(&file), options.clone()).is_err(), "{options:?}");
    }
}

#[test]
fn rows_without_logits_requested_get_none() {
    let file = TinyModel::default().open();
    let mut stage = whole(&file, Activations::Int8, 1);
    let rows = |sequence, want| Rows { sequence, position: 0, input: RowsIn::Tokens(&[3, 4]), output: want };
    let out = stage.forward(&[rows(1, RequestedOutput::Nothing), rows(2, RequestedOutput::Logits)]).unwrap();
    assert_eq!(out[0], RowsOut::Nothing);
    let vocab = file.config().vocab;
    assert!(matches!(&out[1], RowsOut::Logits(l) if l.len() == vocab));
}
