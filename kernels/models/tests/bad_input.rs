//! Invalid model files are rejected with the name of the tensor; edge-case contexts and non-finite numbers are handled.
use std::ops::Range;
use std::sync::Arc;

use kernels::quant::QuantType;
use kernels::threads::Threads;
use kernels_models::sampler::{LogitChanges, SamplerSettings};
use kernels_models::stage::{
    Activations, Draw, RequestedOutput, Rows, RowsIn, RowsOut, Stage, StageError, StageOptions,
};
use kernels_models::weights::testing::{GgufWriter, TinyModel};
use kernels_models::weights::{Architecture, ModelFile};

const BOTH: [Activations; 2] = [Activations::Int8, Activations::F32];

fn open(writer: &GgufWriter) -> Arc<ModelFile> {
    ModelFile::from_bytes(writer.write().into()).unwrap()
}

fn load(
    file: &Arc<ModelFile>,
    layers: Range<usize>,
    context: usize,
    activations: Activations,
) -> Result<Box<dyn Stage>, StageError> {
    kernels_models::load_cpu_stage(
        Arc::clone(file),
        StageOptions { layers, sequences: 4, context, activations, ram: 0, threads: 2 },
    )
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 37 + 11) % 250).collect()
}

/// A model with every tensor that an architecture can have, including biases and an output matrix.
fn complete(architecture: Architecture) -> GgufWriter {
    TinyModel { architecture, layers: 2, tied: false, biases: true, ..TinyModel::default() }.writer()
}

#[test]
fn a_missing_or_misshapen_tensor_is_named() {
    for architecture in Architecture::ALL {
        let names: Vec<String> = complete(architecture).tensors_mut().iter().map(|t| t.name.clone()).collect();
        for (index, name) in names.iter().enumerate() {
            // Without these the file is another valid model: with a tied output head, or without biases.
            let optional = name == "output.weight" || name.ends_with("attn_output.bias") && name.starts_with("blk.0.");
            let mut missing = complete(architecture);
            missing.tensors_mut().remove(index);
            match ModelFile::from_bytes(missing.write().into()) {
                Err(error) if ["blk.0.attn_q.bias", "blk.0.ffn_gate_inp.bias"].contains(&name.as_str()) => {
                    // Without this one the other biases are unexpected, and named instead.
                    assert!(error.to_string().contains("bias"), "{architecture:?}: {error}");
                }
                // The same holds for GLM-4.5's norms of heads, and for Phi-3's factors.
                Err(error) if name == "blk.0.attn_q_norm.weight" => {
                    assert!(error.to_string().contains("attn_"), "{architecture:?}: {error}");
                }
                Err(error) if name.starts_with("rope_factors_") => {
                    assert!(error.to_string().contains("rope_factors_"), "{architecture:?}: {error}");
                }
                Err(error) if !optional => {
                    assert!(error.to_string().contains(name.as_str()), "{architecture:?}: {error}")
                }
                Err(error) => {
                    assert!(error.to_string().contains("attn_output.bias"), "{architecture:?} {name}: {error}")
                }
                Ok(_) => assert!(optional, "{architecture:?} without {name}"),
            }
            let mut misshapen = complete(architecture);
            let tensor = &mut misshapen.tensors_mut()[index];
            tensor.dims[0] += 32; // whole blocks: the row is too long, and reaches into the next tensor
            let rows: u64 = tensor.dims.iter().skip(1).product();
            let block = tensor.bytes.len() / ((tensor.dims[0] - 32) * rows) as usize;
            tensor.bytes.resize(tensor.bytes.len() + 32 * rows as usize * block.max(1), 0);
            let error = ModelFile::from_bytes(misshapen.write().into()).unwrap_err().to_string();
            // The embedding defines the model width if the metadata agrees.
            assert!(error.contains(name.as_str()) && error.contains("expected"), "{architecture:?} {name}: {error}");
        }
    }
}

#[test]
fn a_non_finite_weight_or_scale_is_named() {
    for architecture in Architecture::ALL {
        let count = complete(architecture).tensors_mut().len();
        for index in 0..count {
            for bits in [0x7fc0_0000u32, 0x7f80_0000, 0xff80_0000] {
                let mut writer = complete(architecture);
                let tensor = &mut writer.tensors_mut()[index];
                let (name, plain) = (tensor.name.clone(), tensor.kind == QuantType::F32.ggml_id());
                // The last number of an unquantised tensor, the scale of the last block of others (f16, Q4_1).
                let end = tensor.bytes.len();
                if name == "rope_factors_long.weight" {
                    continue; // a stage of 64 positions has the other factors
                }
                if plain {
                    tensor.bytes[end - 4..].copy_from_slice(&bits.to_le_bytes());
                } else {
                    tensor.bytes[end - 20..end - 18].copy_from_slice(&((bits >> 16) as u16 | 0x7c00).to_le_bytes());
                }
                let file = open(&writer);
                let error = load(&file, 0..2, 64, Activations::Int8).err().expect("rejected").to_string();
                // The last rows of a joined matrix belong to its last part.
                let name = name.replace("attn_qkv", "attn_v");
                let damaged = error.contains("damaged") || name.starts_with("rope_factors_");
                assert!(error.contains(&name) && damaged, "{architecture:?} {name}: {error}");
            }
        }
    }
}

/// A context may end within a page (32 positions) and within an attention block (128): its last position is
/// bit-identical to that of a longer context, and the next position is rejected.
#[test]
fn a_context_may_end_inside_a_page() {
    let file = TinyModel::default().open();
    let all = tokens(512);
    for activations in BOTH {
        let mut reference = load(&file, 0..3, 512, activations).unwrap();
        for context in [1, 31, 32, 33, 45, 127, 129, 200] {
            let mut stage = load(&file, 0..3, context, activations).unwrap();
            let last = |stage: &mut dyn Stage| {
                let rows = |position, tokens| Rows {
                    sequence: 1,
                    position,
                    input: RowsIn::Tokens(tokens),
                    output: RequestedOutput::Logits,
                };
                let mut out =
                    stage.forward(&mut Threads::new(2).unwrap(), &[rows(0, &all[..context.div_ceil(2)])]).unwrap();
                if context > 1 {
                    out = stage
                        .forward(&mut Threads::new(2).unwrap(), &[rows(context / 2, &all[context / 2..context])])
                        .unwrap();
                }
                let Some(RowsOut::Logits(logits)) = out.pop() else { panic!("expected logits") };
                assert!(logits.iter().all(|logit| logit.is_finite()));
                logits.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
            };
            assert!(last(&mut *stage) == last(&mut *reference), "{activations:?}: a context of {context}");
            let over =
                Rows { sequence: 1, position: context, input: RowsIn::Tokens(&[1]), output: RequestedOutput::Logits };
            let error = stage.forward(&mut Threads::new(2).unwrap(), &[over]).unwrap_err();
            assert!(matches!(&error, StageError::Input(what) if what.contains("context")), "{error}");
            assert_eq!(stage.cached_positions(1), context, "a rejected batch changes nothing");
        }
    }
}

/// The model with one huge embedding row, in F32 while its matrices stay quantised: norms of that row overflow.
fn with_embedding_row(architecture: Architecture, token: usize, number: f32) -> Arc<ModelFile> {
    let tiny = TinyModel { architecture, layers: 4, tied: false, ..TinyModel::default() };
    let numbers = TinyModel { quant: QuantType::F32, ..tiny }.writer().tensors_mut()[0].clone();
    let mut writer = tiny.writer();
    let table = &mut writer.tensors_mut()[0];
    (table.kind, table.bytes) = (numbers.kind, numbers.bytes);
    let row_bytes = 4 * tiny.width;
    table.bytes[token * row_bytes..][..row_bytes].copy_from_slice(&number.to_le_bytes().repeat(tiny.width));
    open(&writer)
}

/// A non-finite number in any row visible to the last one reaches the logits, through integers, caches and later
/// stages; the error names the layers of the sampling stage and the position.
#[test]
fn no_token_is_drawn_from_non_finite_logits() {
    const BAD: usize = 77;
    for architecture in Architecture::ALL {
        for number in [1e30, f32::MAX] {
            let file = with_embedding_row(architecture, BAD, number);
            for activations in BOTH {
                for cut in [None, Some(1), Some(3)] {
                    let mut stages: Vec<Box<dyn Stage>> = match cut {
                        None => vec![load(&file, 0..4, 64, activations).unwrap()],
                        Some(cut) => {
                            [0..cut, cut..4].map(|layers| load(&file, layers, 64, activations).unwrap()).into()
                        }
                    };
                    let from = cut.unwrap_or(0);
                    // The bad row is the last one, or visible to it (also within the small Gemma's attention window).
                    for bad_at in [9, 7] {
                        let mut prompt = tokens(10);
                        assert!(through(&mut stages, 1, &prompt).is_ok(), "{architecture:?} {activations:?}");
                        prompt[bad_at] = BAD as u32;
                        let error = through(&mut stages, 2, &prompt).unwrap_err();
                        assert!(
                            matches!(&error, StageError::Logits { layers, position: 9, .. } if *layers == (from..4)),
                            "{architecture:?} {number} {activations:?} {cut:?}: {error}"
                        );
                        let text = error.to_string();
                        assert!(text.starts_with(&format!("layers {from}-3, position 9: ")), "{text}");
                        // Other sequences, concurrent or later, are unaffected.
                        assert!(through(&mut stages, 1, &tokens(10)).is_ok());
                    }
                }
            }
        }
    }
}

/// Draws the token after a prompt.
fn through(stages: &mut [Box<dyn Stage>], sequence: u64, prompt: &[u32]) -> Result<RowsOut, StageError> {
    let draw = Draw {
        settings: SamplerSettings::greedy(),
        position: prompt.len() as u32,
        changes: LogitChanges::default(),
        logprobs: None,
    };
    let step = |stage: &mut Box<dyn Stage>, input: RowsIn<'_>| {
        Ok::<_, StageError>(
            stage
                .forward(
                    &mut Threads::new(2).unwrap(),
                    &[Rows { sequence, position: 0, input, output: RequestedOutput::Token(draw) }],
                )?
                .remove(0),
        )
    };
    let (first, rest) = stages.split_first_mut().unwrap();
    let mut out = step(first, RowsIn::Tokens(prompt))?;
    for stage in rest {
        let RowsOut::Hidden(hidden) = out else { panic!("expected hidden rows, found {out:?}") };
        out = step(stage, RowsIn::hidden(&hidden))?;
    }
    assert!(matches!(out, RowsOut::Token(_)), "{out:?}");
    Ok(out)
}

/// Non-finite hidden rows from a peer are detected by the stage that samples.
#[test]
fn non_finite_hidden_rows_are_detected_when_sampling() {
    let file = TinyModel::default().open();
    for activations in BOTH {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut stage = load(&file, 1..3, 64, activations).unwrap();
            let mut hidden = vec![0.25; 3 * file.config().width];
            hidden[2 * file.config().width + 100] = bad;
            let draw = Draw {
                settings: SamplerSettings::greedy(),
                position: 3,
                changes: LogitChanges::default(),
                logprobs: None,
            };
            let rows =
                Rows { sequence: 1, position: 0, input: RowsIn::hidden(&hidden), output: RequestedOutput::Token(draw) };
            let error = stage.forward(&mut Threads::new(2).unwrap(), &[rows]).unwrap_err().to_string();
            assert!(error.starts_with("layers 1-2, position 2: "), "{bad} {activations:?}: {error}");
        }
    }
}
