//! Tests of weights files: valid files round-trip; truncated, corrupted and malicious ones are rejected with a reason.
use std::io::Write;

use kernels::quant::{QUANT_TYPES, QuantType};

use super::testing::{GgufWriter, TinyModel, real_model_path};
use super::{Architecture, ModelFile, ShardIndex, WeightsError};
use crate::stage::Activations;

fn open(bytes: Vec<u8>) -> Result<std::sync::Arc<ModelFile>, WeightsError> {
    ModelFile::from_bytes(bytes.into())
}

fn rejects(bytes: Vec<u8>, part: &str) {
    let error = open(bytes).expect_err(part).to_string();
    assert!(error.contains(part), "expected {part:?} in {error:?}");
}

/// A model small enough to be opened about ten thousand times.
fn smallest() -> GgufWriter {
    TinyModel { layers: 1, ..TinyModel::default() }.writer()
}

#[test]
fn every_architecture_in_every_format() {
    for architecture in Architecture::ALL {
        for quant in QUANT_TYPES {
            let file = TinyModel { architecture, quant, layers: 1, tied: false, ..TinyModel::default() }.open();
            let (name, rows) = match file.config().experts_of(0) {
                None => ("ffn_up", file.config().ffn),
                Some(experts) => ("ffn_up_exps", 512 * experts.count),
            };
            let up = file.tensor(&format!("blk.0.{name}.weight")).expect("there");
            assert_eq!((up.quant, up.rows, up.cols), (quant, rows, 256));
            assert_eq!(up.read(3..4).expect("in memory").len(), quant.row_bytes(256).expect("whole blocks"));
            assert_eq!(up.to_f32().expect("in memory").len(), rows * 256);
            assert!(file.tensor(&format!("blk.1.{name}.weight")).is_none());
        }
    }
}

#[test]
fn the_real_model_matches_its_model_card() {
    let Some(path) = real_model_path() else { return };
    let file = ModelFile::open(&path).expect("opens");
    let c = file.config();
    assert_eq!((c.layers, c.width, c.heads, c.kv_heads, c.head_dim, c.ffn), (30, 576, 9, 3, 64, 1536));
    assert_eq!((c.vocab, c.context, c.tied, c.rope.base, c.norm_eps), (49152, 8192, true, 100_000.0, 1e-5));
    let costs = file.costs(Activations::Int8);
    assert!(costs.layers.iter().all(|l| l.weight_bytes == 2_216_448));
    assert_eq!(costs.embed_bytes, 49152 * 576 / 32 * 34);
    let cache_bytes = |activations| file.costs(activations).layers[7].kv_bytes_per_token;
    assert_eq!((cache_bytes(Activations::Int8), cache_bytes(Activations::F32)), (2 * 192 * 2, 2 * 192 * 4));
    assert_eq!(costs.head_bytes, costs.embed_bytes + 576 * 4);
    let norms = file.tensor("output_norm.weight").expect("there").to_f32().expect("readable");
    assert!(norms.iter().all(|w| w.is_finite() && w.abs() < 1e3));
}

/// Every partition gives each stage its own tensors only; together the stages hold every byte of every tensor.
#[test]
fn stage_ranges_cover_the_model() {
    for tied in [true, false] {
        let file = TinyModel { layers: 4, tied, ..TinyModel::default() }.open();
        for cut in 1..4 {
            let (front, back) = (file.stage_ranges(0..cut), file.stage_ranges(cut..4));
            for tensor in file.tensors() {
                let holds = |ranges: &[std::ops::Range<u64>]| {
                    ranges.iter().any(|r| r.start <= tensor.range.start && tensor.range.end <= r.end)
                };
                let expected = match tensor.name.as_str() {
                    "token_embd.weight" => (true, tied),
                    "output.weight" | "output_norm.weight" => (false, true),
                    name => {
                        let layer: usize = name.split('.').nth(1).expect("blk.N").parse().expect("a number");
                        (layer < cut, layer >= cut)
                    }
                };
                assert_eq!((holds(&front), holds(&back)), expected, "{} at cut {cut}", tensor.name);
            }
            let bytes = |ranges: &[std::ops::Range<u64>]| ranges.iter().map(|r| r.end - r.start).sum::<u64>();
            let of_front = |tensor: &&super::TensorInfo| file.config().belongs_to(&tensor.name, &(0..cut));
            let stored: u64 = file.tensors().iter().filter(of_front).map(|t| t.range.end - t.range.start).sum();
            let padding = 32 * file.tensors().len() as u64;
            assert!((stored..stored + padding).contains(&bytes(&front)));
        }
        let whole = file.stage_ranges(0..4);
        assert_eq!(whole.len(), 1, "{whole:?}");
        assert_eq!(whole[0].start, file.header_range().end);
        assert!(file.stage_ranges(2..2).is_empty());
    }
}

/// Truncation anywhere in the header or at any tensor boundary gives a clear error.
#[test]
fn a_truncated_file_is_rejected_at_every_length() {
    let whole = smallest().write();
    let header = smallest().header().len();
    let file = open(whole.clone()).expect("sound");
    let boundaries = file.tensors().iter().flat_map(|t| {
        let (start, end) = (t.range.start as usize, t.range.end as usize);
        [start - 1, start, start + 1, end - 1]
    });
    for len in (0..=header).chain(boundaries) {
        match open(whole[..len].to_vec()) {
            Err(WeightsError::Truncated { have, need, .. }) => {
                assert!(have == len as u64 && need > have, "at {len}: {need} of {have}");
            }
            other => panic!("cut at {len}: {other:?}"),
        }
    }
    assert!(open(Vec::new()).expect_err("empty").to_string().contains("truncated"));
}

/// Every header byte is changed in four ways: the file is rejected, or all ranges lie inside it.
#[test]
fn a_corrupted_header_never_panics() {
    let whole = smallest().write();
    let (mut rejections, mut sound) = (0, 0);
    for at in 0..smallest().header().len() {
        for change in [0x01, 0x80, 0xff, 0x10] {
            let mut bytes = whole.clone();
            bytes[at] ^= change;
            match open(bytes) {
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    rejections += 1;
                }
                Ok(file) => {
                    sound += 1;
                    let len = file.file_len();
                    assert!(file.tensors().iter().all(|t| t.range.end <= len && t.range.start < t.range.end));
                    // With changed texts or a broken vocabulary, the later steps may fail but must not panic.
                    if sound % 32 == 0 {
                        let _ = file.tokenizer().map(|t| t.encode("hello <|im_end|> world", true));
                        let _ = file.chat_template();
                        let _ = ShardIndex::build(&file, |_| ()).map(|i| i.content_id());
                    }
                }
            }
        }
    }
    // Most of the header is vocabulary, where a changed character remains a valid character.
    assert!(rejections > 1000, "{rejections} rejected, {sound} accepted");
}

#[test]
fn malicious_headers_give_specific_errors() {
    let header = |tensors: u64, keys: u64, rest: &[u8]| {
        [b"GGUF".as_slice(), &3u32.to_le_bytes(), &tensors.to_le_bytes(), &keys.to_le_bytes(), rest].concat()
    };
    rejects(b"GGML....".to_vec(), "not a GGUF file");
    rejects([b"GGUF".as_slice(), &1u32.to_le_bytes()].concat(), "version 1 is not supported");
    rejects([b"GGUF".as_slice(), &3u32.to_be_bytes()].concat(), "big-endian");
    rejects(header(u64::MAX, 0, &[]), "tensors (18446744073709551615 of them)");
    rejects(header(0, u64::MAX, &[]), "metadata entries (18446744073709551615 of them)");
    rejects(header(0, 1 << 40, &[0; 64]), "truncated");
    rejects(header(1 << 58, 0, &[0; 64]), "truncated");
    let key = |len: u64, rest: &[u8]| header(0, 1, &[&len.to_le_bytes(), rest].concat());
    rejects(key(u64::MAX, &[b'k'; 32]), "metadata key of 1 to 65535 bytes");
    rejects(key(0, &[b'k'; 32]), "metadata key of 1 to 65535 bytes");
    rejects(key(60_000, &[b'k'; 32]), "truncated");
    rejects(key(2, &[0xff, 0xfe, 4, 0, 0, 0, 1, 0, 0, 0]), "in UTF-8");
    let value = |kind: u32, rest: &[u8]| key(1, &[b"k".as_slice(), &kind.to_le_bytes(), rest].concat());
    rejects(value(13, &[0; 8]), "found type 13");
    rejects(value(7, &[2]), "0 or 1");
    rejects(value(8, &u64::MAX.to_le_bytes()), "a string of at most");
    rejects(value(8, &(1u64 << 20).to_le_bytes()), "truncated");
    let array =
        |kind: u32, count: u64, rest: &[u8]| value(9, &[&kind.to_le_bytes()[..], &count.to_le_bytes(), rest].concat());
    rejects(array(9, 1, &[0; 32]), "an array in an array");
    rejects(array(4, u64::MAX, &[0; 32]), "truncated");
    rejects(array(4, u64::MAX / 4 + 2, &[0; 32]), "truncated");
    rejects(array(8, 2, &[&1u64.to_le_bytes()[..], b"x", &u64::MAX.to_le_bytes()].concat()), "truncated");
    let twice = [&1u64.to_le_bytes()[..], b"k", &0u32.to_le_bytes(), &[1]].concat();
    rejects(header(0, 2, &[&twice[..], &twice].concat()), "\"k\" again");
}

#[test]
fn malicious_tensor_tables_give_specific_errors() {
    let corrupted = |change: &dyn Fn(&mut super::testing::TensorSource), part: &str| {
        let mut w = smallest();
        change(&mut w.tensors_mut()[4]);
        rejects(w.write(), part);
    };
    corrupted(&|t| t.dims = vec![], "1 to 4 dimensions");
    corrupted(&|t| t.dims = vec![1; 5], "1 to 4 dimensions");
    corrupted(&|t| t.dims = vec![1; 300], "1 to 4 dimensions");
    corrupted(&|t| t.dims = vec![256, 0], "at least 1");
    corrupted(&|t| t.dims = vec![0, 256], "at least 1");
    corrupted(&|t| t.dims = vec![u64::MAX, 1], "whole blocks");
    corrupted(&|t| t.dims = vec![u64::MAX - 31, 1], "rows of at most");
    corrupted(&|t| t.dims = vec![256, u64::MAX], "fits 64 bit");
    corrupted(&|t| t.dims = vec![256, u64::MAX, 2], "fits 64 bit");
    corrupted(&|t| t.dims = vec![256, 1 << 50], "truncated");
    corrupted(&|t| t.dims = vec![255, 128], "whole blocks");
    corrupted(&|t| t.dims = vec![1 << 25, 1], "rows of at most");
    corrupted(&|t| t.kind = 10, "ggml type 10 (Q2_K); supported: F32");
    corrupted(&|t| t.kind = 34, "(TQ1_0); supported: F32");
    corrupted(&|t| t.kind = 35, "MXFP4; get the file in a supported format, or convert it: llama-quantize");
    corrupted(&|t| t.kind = u32::MAX, "ggml type 4294967295");
    corrupted(&|t| t.offset = Some(u64::MAX - 31), "overflow");
    corrupted(&|t| t.offset = Some(1 << 60), "truncated");
    corrupted(&|t| t.offset = Some(33), "multiples of 32");
    corrupted(&|t| t.offset = Some(0), "overlap");
    corrupted(&|t| t.name = "token_embd.weight".into(), "\"token_embd.weight\" again");
    corrupted(&|t| t.name = String::new(), "tensor name of 1 to");
    corrupted(&|t| t.name = "x".repeat(70_000), "tensor name of 1 to");
    corrupted(&|t| t.dims = vec![256, 64], "expected [128, 256] rows and columns");
    corrupted(&|t| (t.kind, t.dims) = (QuantType::F32.ggml_id(), vec![16, 128]), "rows and columns");
}

#[test]
fn alignment_is_a_power_of_two() {
    for alignment in [0, 1, 3, 4, 33, 1 << 22] {
        let mut w = smallest();
        w.alignment = alignment;
        rejects(w.write(), "general.alignment: expected a power of two");
    }
    for alignment in [8, 64, 4096] {
        let mut w = smallest();
        w.alignment = alignment;
        let file = open(w.write()).expect("sound");
        assert!(file.tensors().iter().all(|t| t.range.start.is_multiple_of(alignment as u64)));
    }
    rejects(smallest().text("general.alignment", "32").write(), "found a string");
}

#[test]
fn files_that_cannot_be_opened() {
    let dir = tempfile::tempdir().expect("a directory");
    let missing = dir.path().join("missing.gguf");
    assert!(ModelFile::open(&missing).expect_err("missing").to_string().contains("missing.gguf"));
    assert!(ModelFile::open(dir.path()).expect_err("a directory").to_string().contains("is a folder without"));
    let empty = dir.path().join("empty.gguf");
    std::fs::write(&empty, b"").expect("written");
    assert!(ModelFile::open(&empty).expect_err("empty").to_string().contains("truncated"));
}

/// A peer's copy: full length, with the header and one stage's ranges filled and holes elsewhere.
#[test]
fn a_sparse_file_holds_a_stage() {
    let source = TinyModel::default().open();
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("part.gguf");
    let mut part = std::fs::File::create(&path).expect("created");
    part.set_len(source.file_len()).expect("sparse");
    for range in source.stage_ranges(1..3).into_iter().chain([source.header_range()]) {
        use std::io::{Seek, SeekFrom};
        part.seek(SeekFrom::Start(range.start)).expect("seeks");
        part.write_all(&source.read(&range).expect("in memory")).expect("writes");
    }
    let file = ModelFile::open_partial(&path).expect("opens");
    assert_eq!(file.config(), source.config());
    for tensor in source.tensors().iter().filter(|t| source.config().belongs_to(&t.name, &(1..3))) {
        let (a, b) = (file.tensor(&tensor.name).expect("there"), source.tensor(&tensor.name).expect("there"));
        assert_eq!(a.read(0..a.rows).expect("readable"), b.read(0..b.rows).expect("readable"), "{}", tensor.name);
    }
    assert!(file.tokenizer().is_ok());
    assert!(ShardIndex::build(&file, |_| ()).is_err(), "a file with holes has no content id");
    // A truncated sparse file is rejected too.
    part.set_len(source.file_len() - 64).expect("cut");
    assert!(matches!(ModelFile::open_partial(&path), Err(WeightsError::Truncated { .. })));
}
