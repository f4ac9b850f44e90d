//! Tests of the `.mesh` container: what it keeps, and what it rejects.
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use kernels::quant::{QUANT_TYPES, QuantType, random_blocks};
use kernels::tile::{Layout, convert};

use super::*;
use crate::quantize::{Bits, QuantizeOptions, QuantizeProgress, prepare};
use crate::weights::metadata::Value;
use crate::weights::testing::{TinyModel, seal_mesh};
use crate::weights::{IndexError, ModelFile, ShardIndex};

struct Silent;

impl QuantizeProgress for Silent {
    fn start(&self, _what: &str, _done: u64, _total: u64) {}
    fn at(&self, _done: u64) {}
}

/// The model as a `.mesh` file.
fn kept(file: &Arc<ModelFile>, out: &Path) -> Vec<u8> {
    let options = QuantizeOptions { bits: Bits::Keep, force: true, threads: 1 };
    prepare(file, out, &options, &Silent).unwrap().write(&Silent).unwrap();
    std::fs::read(out).unwrap()
}

fn small() -> (Arc<ModelFile>, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let tiny = TinyModel { layers: 2, quant: QuantType::Q4K, ..TinyModel::default() };
    let mut writer = tiny.writer();
    writer.text("tokenizer.chat_template", "{{ messages[0].content }}");
    let file = ModelFile::from_bytes(writer.write().into()).unwrap();
    let bytes = kept(&file, &dir.path().join("a.mesh"));
    (file, bytes)
}

fn open(bytes: &[u8]) -> Result<Arc<ModelFile>, WeightsError> {
    ModelFile::from_bytes(Bytes::copy_from_slice(bytes))
}

fn error(bytes: &[u8]) -> String {
    open(bytes).expect_err("a bad file").to_string()
}

/// The layout of tiles is a part of the format: a change of `kernels::tile` needs a new version of it.
#[test]
fn tiles_have_the_bytes_that_the_format_specifies() {
    let mut hasher = blake3::Hasher::new();
    for kind in QUANT_TYPES {
        let (rows, cols) = (20, 512);
        let stored = random_blocks(kind, rows * cols / kind.block_len(), 7);
        let mut tiles = vec![0; Layout::of(kind).matrix_bytes(rows, cols)];
        convert(kind, cols, 0..rows, &stored, &mut tiles).unwrap();
        hasher.update(&tiles);
    }
    assert_eq!((VERSION, &hasher.finalize().to_hex()[..32]), (1, "541f363543aaf4f73991bbe7d48a6873"));
}

#[test]
fn a_file_keeps_everything_of_its_source() {
    let (source, bytes) = small();
    let file = open(&bytes).unwrap();
    assert_eq!(file.config(), source.config());
    let words = |file: &ModelFile| file.tokenizer().unwrap().encode("hello world <|im_end|>", true).unwrap();
    assert_eq!(words(&file), words(&source));
    let template = |file: &ModelFile| file.chat_template().unwrap().render(&[], &[], true).map_err(|e| e.to_string());
    assert_eq!(template(&file), template(&source));
    assert!(!file.chat_template().unwrap().is_fallback());
    assert_eq!(file.metadata().iter().count(), source.metadata().iter().count());
    for (key, value) in source.metadata().iter() {
        let found = file.metadata().get(key);
        if !matches!(value, Value::Array(_)) {
            assert_eq!(found, Some(value), "{key}");
            continue;
        }
        let texts = |file: &ModelFile| {
            let texts = file.metadata().texts(key).ok().flatten();
            texts.map(|texts| texts.map(<[u8]>::to_vec).collect::<Vec<_>>())
        };
        assert_eq!(texts(&file), texts(&source), "{key}");
        assert_eq!(file.metadata().numbers(key).ok(), source.metadata().numbers(key).ok(), "{key}");
    }
    for tensor in source.tensors() {
        let (a, b) = (source.tensor(&tensor.name).unwrap(), file.tensor(&tensor.name).unwrap());
        assert_eq!(a.to_f32().unwrap(), b.to_f32().unwrap(), "{}", tensor.name);
        assert!(
            b.rows == 1 || b.rows_f32(b.rows - 3..b.rows - 1).unwrap() == a.rows_f32(a.rows - 3..a.rows - 1).unwrap()
        );
    }
    for tensor in file.tensors() {
        assert!(tensor.range.start.is_multiple_of(PAGE), "{}", tensor.name);
    }
    // The embedding, the layers in order, the output: every stage is one range of bytes.
    for layers in [0..1, 1..2] {
        assert_eq!(file.stage_ranges(layers.clone()).len(), if layers.start == 0 { 1 } else { 2 }, "{layers:?}");
    }
}

#[test]
fn the_recorded_index_is_that_of_the_bytes() {
    let (_, bytes) = small();
    let file = open(&bytes).unwrap();
    let built = ShardIndex::build(&file, |_| ()).unwrap();
    let recorded = ShardIndex::recorded(&file).unwrap().unwrap();
    assert_eq!(recorded, built);
    assert!(recorded.matches(&file));
    assert_eq!(ShardIndex::decode(&recorded.encode()).unwrap(), recorded);
    assert_eq!(recorded.tensor_ids().len(), file.tensors().len());
    assert_eq!(recorded.content_id(), ShardIndex::recorded(&open(&small().1).unwrap()).unwrap().unwrap().content_id());
    let gguf = TinyModel::default().open();
    assert_eq!(ShardIndex::recorded(&gguf).unwrap(), None);
}

#[test]
fn a_wrong_chunk_is_named() {
    let (_, bytes) = small();
    let place = open(&bytes).unwrap().tensors().iter().find(|t| t.name == "blk.1.ffn_up.weight").unwrap().range.start;
    let mut damaged = bytes.clone();
    damaged[place as usize + 1000] ^= 1;
    let file = open(&damaged).unwrap();
    let found = ShardIndex::build(&file, |_| ()).unwrap_err();
    assert!(matches!(found, IndexError::Damaged { .. }), "{found}");
    let text = found.to_string();
    assert!(text.contains("\"blk.1.ffn_up.weight\", rows 0..") && text.contains("fetch the file again"), "{text}");
    // Padding counts, too.
    let end = bytes.len() - 1;
    damaged = bytes.clone();
    damaged[end] = 1;
    let text = ShardIndex::build(&open(&damaged).unwrap(), |_| ()).unwrap_err().to_string();
    assert!(text.contains("padding"), "{text}");
}

#[test]
fn a_damaged_header_is_rejected() {
    let (_, bytes) = small();
    let header = header_len(&bytes).unwrap() as usize;
    for at in (0..header).step_by(61) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        assert!(open(&damaged).is_err(), "byte {at}");
    }
    let mut damaged = bytes.clone();
    damaged[200] ^= 1;
    assert!(error(&damaged).contains("hash"), "{}", error(&damaged));
}

#[test]
fn a_future_version_is_rejected() {
    let (_, mut bytes) = small();
    bytes[8] = 2;
    seal_mesh(&mut bytes);
    let error = error(&bytes);
    assert!(error.contains("version 2, expected 1") && error.contains("update meshnode"), "{error}");
}

#[test]
fn a_truncated_or_longer_file_is_rejected() {
    let (_, bytes) = small();
    for len in [9, 40, 96, 5000, bytes.len() / 2, bytes.len() - 1] {
        let error = error(&bytes[..len]);
        assert!(error.contains("truncated") && error.contains("fetch it again"), "{len}: {error}");
    }
    let error = error(&[&bytes[..], &[0]].concat());
    assert!(error.contains("length"), "{error}");
}

#[test]
fn an_unfinished_file_is_rejected() {
    let (_, mut bytes) = small();
    bytes[..8].copy_from_slice(&UNFINISHED);
    assert!(error(&bytes).contains("not complete"), "{}", error(&bytes));
}

/// Fields of the tensor table, each changed to what no file has.
#[test]
fn impossible_tensors_are_rejected_by_name() {
    let (_, bytes) = small();
    let after = |name: &str| {
        let found = bytes.windows(name.len()).position(|window| window == name.as_bytes());
        found.expect(name) + name.len()
    };
    let at = after("blk.0.attn_q.weight");
    let first_offset = after("token_embd.weight") + 24;
    let (kind, layout, rows, cols, offset, size) = (at, at + 4, at + 8, at + 16, at + 24, at + 32);
    let changed = |place: usize, value: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[place..place + value.len()].copy_from_slice(value);
        seal_mesh(&mut bytes);
        error(&bytes)
    };
    for (place, value, words) in [
        (kind, &[99u8, 0, 0, 0][..], "ggml type 99"),
        (layout, &[2, 0, 0, 0], "layout 2"),
        (cols, &300u64.to_le_bytes(), "whole blocks of 256"),
        (cols, &u64::MAX.to_le_bytes(), "rows"),
        (rows, &u64::MAX.to_le_bytes(), "rows"),
        (rows, &0u64.to_le_bytes(), "at least 1"),
        (rows, &300u64.to_le_bytes(), "bytes of tensor"),
        (offset, &4097u64.to_le_bytes(), "multiples of 4096"),
        (offset, &0u64.to_le_bytes(), "overlap"),
        (first_offset, &0u64.to_le_bytes(), "after the header"),
        (offset, &(u64::MAX - 4095).to_le_bytes(), "overflow"),
        (size, &1u64.to_le_bytes(), "expected"),
    ] {
        let error = changed(place, value);
        assert!(error.contains(words), "{place} {value:?}: {error}");
    }
    // Counts in the head that the header cannot hold.
    for (place, words) in [(40, "tensors"), (44, "chunks"), (52, "metadata"), (32, "metadata"), (12, "pages")] {
        let error = changed(place, &u32::MAX.to_le_bytes());
        assert!(error.contains(words), "{place}: {error}");
    }
    assert!(changed(16, &(1u64 << 40).to_le_bytes()).contains("expected"), "a header of a terabyte");
}

#[test]
fn a_scale_that_is_not_finite_is_named() {
    let (_, mut bytes) = small();
    let tensor = open(&bytes).unwrap().tensors().iter().find(|t| t.name == "blk.0.ffn_down.weight").unwrap().clone();
    let layout = Layout::of(tensor.quant);
    let at = tensor.range.start as usize + layout.matrix_bytes(16, tensor.cols) + 2 * layout.block_bytes;
    bytes[at..at + 2].copy_from_slice(&[0, 0x7c]);
    let file = open(&bytes).unwrap();
    let options = crate::stage::StageOptions {
        layers: 0..1,
        sequences: 1,
        context: 8,
        activations: crate::stage::Activations::Int8,
        ram: 0,
        threads: 1,
    };
    let error = crate::load_cpu_stage(file, options).err().expect("an infinite scale").to_string();
    assert!(error.contains("blk.0.ffn_down.weight") && error.contains("row 16"), "{error}");
}

#[test]
fn every_byte_of_noise_is_survived() {
    let (_, bytes) = small();
    let mut state = 1u64;
    for _ in 0..300 {
        let mut noisy = bytes[..bytes.len().min(20_000)].to_vec();
        let header = noisy.len() as u64;
        for _ in 0..3 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            noisy[(state >> 33) as usize % header as usize] = (state >> 24) as u8;
        }
        let _ = open(&noisy);
        let mut whole = bytes.clone();
        whole[..noisy.len()].copy_from_slice(&noisy);
        seal_mesh(&mut whole);
        if let Ok(file) = open(&whole) {
            let _ = (file.costs(crate::stage::Activations::Int8), ShardIndex::build(&file, |_| ()));
        }
    }
}
