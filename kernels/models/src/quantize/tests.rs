//! Tests of writing `.mesh` files: equal results, resumption, formats, and what is rejected.
use kernels::quant::QuantType;
use kernels::threads::Threads;

use super::*;
use crate::stage::{Activations, RequestedOutput, Rows, RowsIn, RowsOut, StageOptions};
use crate::weights::Architecture;
use crate::weights::testing::TinyModel;

struct Silent;

impl QuantizeProgress for Silent {
    fn start(&self, _what: &str, _done: u64, _total: u64) {}
    fn at(&self, _done: u64) {}
}

fn with(bits: Bits) -> QuantizeOptions {
    QuantizeOptions { bits, force: false, threads: 2 }
}

fn write(file: &Arc<ModelFile>, out: &Path, bits: Bits) -> Result<Written, QuantizeError> {
    prepare(file, out, &with(bits), &Silent)?.write(&Silent)
}

/// Bits of the last row's logits.
fn logits(file: &Arc<ModelFile>, activations: Activations) -> Vec<u32> {
    let layers = 0..file.config().layers;
    let options = StageOptions { layers, sequences: 1, context: 16, activations, ram: 0, threads: 2 };
    let mut stage = crate::load_cpu_stage(file.clone(), options).unwrap();
    let tokens = [5, 77, 260, 3, 9, 41];
    let rows = Rows { sequence: 1, position: 0, input: RowsIn::Tokens(&tokens), output: RequestedOutput::Logits };
    let out = stage.forward(&mut Threads::new(2).unwrap(), &[rows]).unwrap().remove(0);
    let RowsOut::Logits(logits) = out else { panic!("found {out:?}") };
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn format_of<'a>(written: &'a Written, name: &str) -> &'a str {
    written.tensors.iter().find(|tensor| tensor.name == name).expect(name).format
}

/// Every architecture and every format, loaded from the file and from a `.mesh` file of a `.mesh` file.
#[test]
fn kept_weights_give_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let [out, again] = ["a.mesh", "b.mesh"].map(|name| dir.path().join(name));
    let mut models: Vec<TinyModel> =
        Architecture::ALL.map(|architecture| TinyModel { architecture, layers: 1, ..TinyModel::default() }).into();
    models.extend(kernels::quant::QUANT_TYPES.map(|quant| TinyModel {
        quant,
        layers: 1,
        tied: false,
        ..TinyModel::default()
    }));
    for (number, tiny) in models.into_iter().enumerate() {
        let source = tiny.open();
        let options = QuantizeOptions { force: true, ..with(Bits::Keep) };
        let written = prepare(&source, &out, &options, &Silent).unwrap().write(&Silent).unwrap();
        let file = ModelFile::open(&out).unwrap();
        assert!(written.tensors.iter().all(|tensor| tensor.relative_error == Some(0.0)), "{tiny:?}");
        let activations = if number % 2 == 0 { Activations::Int8 } else { Activations::F32 };
        assert!(logits(&file, activations) == logits(&source, activations), "{tiny:?}");
        assert_eq!(file.costs(activations), source.costs(activations));
        let twice = prepare(&file, &again, &options, &Silent).unwrap().write(&Silent).unwrap();
        assert_eq!(twice.content, written.content, "{tiny:?}");
        assert!(std::fs::read(&again).unwrap() == std::fs::read(&out).unwrap(), "{tiny:?}");
    }
}

/// A stage is one range of bytes, and needs nothing else: a file of zeros elsewhere gives the same rows.
#[test]
fn a_stage_reads_only_its_range() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a.mesh");
    let source = TinyModel { architecture: Architecture::Qwen3Moe, layers: 3, ..TinyModel::default() }.open();
    write(&source, &out, Bits::Keep).unwrap();
    let file = ModelFile::open(&out).unwrap();
    let ranges = file.stage_ranges(1..2);
    assert_eq!(ranges.len(), 1);
    assert!(ranges[0].end - ranges[0].start < file.file_len() / 2);
    let bytes = std::fs::read(&out).unwrap();
    let mut sparse = vec![0; bytes.len()];
    for range in ranges.into_iter().chain([file.header_range()]) {
        let range = range.start as usize..range.end as usize;
        sparse[range.clone()].copy_from_slice(&bytes[range]);
    }
    let part = dir.path().join("part.mesh");
    std::fs::write(&part, sparse).unwrap();
    let hidden: Vec<f32> = (0..3 * 256).map(|i| (i as f32 * 0.7).sin()).collect();
    let run = |file: Arc<ModelFile>| {
        let options =
            StageOptions { layers: 1..2, sequences: 1, context: 8, activations: Activations::Int8, ram: 0, threads: 1 };
        let mut stage = crate::load_cpu_stage(file, options).unwrap();
        let rows = Rows { sequence: 1, position: 0, input: RowsIn::hidden(&hidden), output: RequestedOutput::Nothing };
        stage.forward(&mut Threads::new(1).unwrap(), &[rows]).unwrap()
    };
    assert_eq!(run(ModelFile::open_partial(&part).unwrap()), run(source));
}

/// Ends the write by a panic once some bytes are written, as a lost process would.
struct Interrupt(u64, AtomicU64);

impl QuantizeProgress for Interrupt {
    fn start(&self, _what: &str, done: u64, _total: u64) {
        self.1.store(done, Ordering::Relaxed);
    }

    fn at(&self, done: u64) {
        assert!(done < self.0, "interrupted");
    }
}

#[test]
fn an_interrupted_file_is_continued() {
    let dir = tempfile::tempdir().unwrap();
    let [out, whole, part] = ["a.mesh", "whole.mesh", "a.mesh.part"].map(|name| dir.path().join(name));
    let source = TinyModel { quant: QuantType::F16, layers: 2, ..TinyModel::default() }.open();
    let expected = write(&source, &whole, Bits::Eight).unwrap();
    let interrupted = |bytes: u64| {
        let run =
            || prepare(&source, &out, &with(Bits::Eight), &Silent).unwrap().write(&Interrupt(bytes, AtomicU64::new(0)));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
        assert!(part.exists() && !out.exists());
    };
    interrupted(expected.file_bytes / 2);
    assert!(ModelFile::open(&part).unwrap_err().to_string().contains("not complete"));
    interrupted(expected.file_bytes * 3 / 4);
    let prepared = prepare(&source, &out, &with(Bits::Eight), &Silent).unwrap();
    assert!(prepared.bytes_left() < prepared.file_bytes() / 2, "{} left", prepared.bytes_left());
    let progress = Interrupt(u64::MAX, AtomicU64::new(0));
    let written = prepared.write(&progress).unwrap();
    assert!(progress.1.into_inner() > expected.file_bytes / 2, "continued where it ended");
    assert!(written.resumed > 5 && written.resumed < written.tensors.len(), "{}", written.resumed);
    assert_eq!(written.content, expected.content);
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&whole).unwrap() && !part.exists());
    // A damaged tensor is written again, and so are all after it.
    std::fs::remove_file(&out).unwrap();
    interrupted(expected.file_bytes / 2);
    let place = ModelFile::open(&whole).unwrap().tensors()[3].range.start;
    let file = std::fs::File::options().write(true).open(&part).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xee; 40], place).unwrap();
    drop(file);
    let written = write(&source, &out, Bits::Eight).unwrap();
    assert_eq!((written.resumed, written.content), (3, expected.content.clone()));
    // Other bits or another source begin again.
    std::fs::remove_file(&out).unwrap();
    interrupted(expected.file_bytes / 2);
    assert_eq!(write(&source, &out, Bits::Keep).unwrap().resumed, 0);
    std::fs::remove_file(&out).unwrap();
    interrupted(expected.file_bytes / 2);
    let other = TinyModel { quant: QuantType::F16, layers: 2, seed: 9, ..TinyModel::default() }.open();
    assert_eq!(write(&other, &out, Bits::Eight).unwrap().resumed, 0);
    // Garbage under the name of an unfinished file is replaced.
    std::fs::remove_file(&out).unwrap();
    std::fs::write(&part, vec![0x5a; 5000]).unwrap();
    assert_eq!(write(&source, &out, Bits::Eight).unwrap().content, expected.content);
}

#[test]
fn formats_follow_the_bits() {
    let dir = tempfile::tempdir().unwrap();
    let small = TinyModel { heads: 1, kv_heads: 1, ffn: 256, layers: 1, ..TinyModel::default() };
    let experts =
        TinyModel { architecture: Architecture::Qwen3Moe, experts: Some([2, 1]), quant: QuantType::F32, ..small };
    let source = experts.open();
    for (bits, format, error) in [
        (Bits::Four, "Q4_Z", 0.12),
        (Bits::Eight, "Q8_0", 0.01),
        (Bits::Sixteen, "F16", 1e-3),
        (Bits::Keep, "F32", 0.0),
    ] {
        let out = dir.path().join(format!("{format}.mesh"));
        let written = write(&source, &out, bits).unwrap();
        assert_eq!(format_of(&written, "blk.0.ffn_up_exps.weight"), format);
        assert_eq!(format_of(&written, "token_embd.weight"), format);
        assert_eq!(format_of(&written, "blk.0.ffn_gate_inp.weight"), "F32", "routers stay");
        assert_eq!(format_of(&written, "blk.0.attn_norm.weight"), "F32");
        for tensor in &written.tensors {
            let found = tensor.relative_error.unwrap();
            assert!(found <= error, "{bits:?}: {tensor:?}");
            assert!(tensor.format != format || format == "F32" || found > 0.0 || tensor.format == "F16", "{tensor:?}");
        }
        // What is written is what the file holds.
        let (a, b) = (source.tensor("blk.0.attn_q.weight").unwrap(), ModelFile::open(&out).unwrap());
        let (a, b) = (a.to_f32().unwrap(), b.tensor("blk.0.attn_q.weight").unwrap().to_f32().unwrap());
        let (mut off, mut all) = (0.0, 0.0);
        a.iter().zip(&b).for_each(|(a, b)| {
            off += f64::from(a - b).powi(2);
            all += f64::from(*a).powi(2);
        });
        let stated = written.tensors.iter().find(|tensor| tensor.name == "blk.0.attn_q.weight").unwrap();
        assert!(((off / all).sqrt() - stated.relative_error.unwrap()).abs() < 1e-6);
    }
    // Rows of 320 are no whole super-blocks, which Q4_Z does not have; a tensor with fewer bits than asked for stays.
    let odd = TinyModel { width: 320, quant: QuantType::F16, ..small }.open();
    let written = write(&odd, &dir.path().join("odd.mesh"), Bits::Four).unwrap();
    assert_eq!(format_of(&written, "blk.0.attn_q.weight"), "Q4_Z");
    let few = TinyModel { quant: QuantType::Q4_0, ..small }.open();
    let written = write(&few, &dir.path().join("few.mesh"), Bits::Eight).unwrap();
    assert_eq!(format_of(&written, "blk.0.attn_q.weight"), "Q4_0");
    assert!((written.bits_per_weight - 4.5).abs() < 0.1, "{}", written.bits_per_weight);
}

/// A weight beyond F16 in one matrix.
#[test]
fn large_weights_become_bf16() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = TinyModel { quant: QuantType::F32, layers: 1, ffn: 256, ..TinyModel::default() };
    let mut writer = tiny.writer();
    let tensor = writer.tensors_mut().iter_mut().find(|tensor| tensor.name == "blk.0.attn_k.weight").unwrap();
    tensor.bytes[400..404].copy_from_slice(&1e6f32.to_le_bytes());
    let source = ModelFile::from_bytes(writer.write().into()).unwrap();
    let written = write(&source, &dir.path().join("a.mesh"), Bits::Sixteen).unwrap();
    assert_eq!(format_of(&written, "blk.0.attn_k.weight"), "BF16");
    assert_eq!(format_of(&written, "blk.0.attn_q.weight"), "F16");
}

#[test]
fn more_bits_go_where_the_error_is() {
    let dir = tempfile::tempdir().unwrap();
    let narrow = TinyModel { width: 64, heads: 1, kv_heads: 1, ffn: 256, layers: 2, ..TinyModel::default() };
    let mut writer = TinyModel { quant: QuantType::F16, ..narrow }.writer();
    // The output of this matrix hardly counts.
    let tensor = writer.tensors_mut().iter_mut().find(|tensor| tensor.name == "blk.1.ffn_down.weight").unwrap();
    for weight in tensor.bytes.chunks_exact_mut(2) {
        let number = half::f16::from_le_bytes([weight[0], weight[1]]).to_f32();
        weight.copy_from_slice(&half::f16::from_f32(number / 1000.0).to_le_bytes());
    }
    let source = ModelFile::from_bytes(writer.write().into()).unwrap();
    let mut previous = 0.0;
    for target in [4.6, 6.0, 17.0] {
        let written = write(&source, &dir.path().join(format!("{target}.mesh")), Bits::Auto { target }).unwrap();
        assert!(written.bits_per_weight <= target + 0.01, "{target}: {}", written.bits_per_weight);
        assert!(written.bits_per_weight > target - 1.0, "{target}: {}", written.bits_per_weight);
        assert!(written.bits_per_weight > previous);
        previous = written.bits_per_weight;
        let sensitivity = |name: &str| written.tensors.iter().find(|tensor| tensor.name == name).unwrap().sensitivity;
        let [least, other] =
            ["blk.1.ffn_down.weight", "blk.1.attn_output.weight"].map(|name| sensitivity(name).unwrap());
        assert!(least > 0.0 && least < other / 10.0, "{least} {other}");
        assert_eq!(sensitivity("blk.1.attn_norm.weight"), None);
        if target == 6.0 {
            assert_eq!(format_of(&written, "blk.1.ffn_down.weight"), "Q4_Z", "{written:?}");
            assert!(written.tensors.iter().any(|tensor| tensor.format == "Q8_0"), "{written:?}");
        }
        // Tiles pad the rows of the vocabulary, so the source has a little more than 16 bits.
        if target == 17.0 {
            assert!(written.tensors.iter().all(|tensor| tensor.relative_error == Some(0.0)));
        }
    }
    let error = write(&source, &dir.path().join("less.mesh"), Bits::Auto { target: 3.0 }).unwrap_err().to_string();
    assert!(error.contains("at least 4.5") && error.contains("3.00"), "{error}");
}

#[test]
fn weights_that_are_not_finite_are_rejected_by_name_and_place() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a.mesh");
    for (name, column, row, number) in [
        ("blk.0.ffn_up.weight", 70, 200, f32::NAN),
        ("blk.0.ffn_up.weight", 3, 0, f32::INFINITY),
        ("blk.0.attn_norm.weight", 9, 0, f32::NEG_INFINITY),
    ] {
        let tiny =
            TinyModel { quant: QuantType::F32, layers: 1, heads: 1, kv_heads: 1, ffn: 256, ..TinyModel::default() };
        let mut writer = tiny.writer();
        let tensor = writer.tensors_mut().iter_mut().find(|tensor| tensor.name == name).unwrap();
        tensor.bytes[4 * (row * 256 + column)..][..4].copy_from_slice(&number.to_le_bytes());
        let source = ModelFile::from_bytes(writer.write().into()).unwrap();
        for bits in [Bits::Keep, Bits::Four, Bits::Eight, Bits::Sixteen, Bits::Auto { target: 5.0 }] {
            let error = write(&source, &out, bits).unwrap_err().to_string();
            let place = error.contains(&format!("row {row}, column")) && error.contains(&column.to_string());
            assert!(error.contains(name) && place || error.contains("layer 0"), "{bits:?}: {error}");
            assert!(!out.exists());
        }
    }
}

#[test]
fn a_file_that_exists_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let [gguf, out] = ["a.gguf", "a.mesh"].map(|name| dir.path().join(name));
    std::fs::write(&gguf, TinyModel { layers: 1, ..TinyModel::default() }.writer().write()).unwrap();
    let source = ModelFile::open(&gguf).unwrap();
    let error = |out: &Path, force: bool| {
        prepare(&source, out, &QuantizeOptions { force, ..with(Bits::Keep) }, &Silent)
            .err()
            .map(|error| error.to_string())
    };
    let same = error(&gguf, true).expect("one file");
    assert!(same.contains("is the model that is read"), "{same}");
    std::os::unix::fs::symlink(&gguf, dir.path().join("link.mesh")).unwrap();
    assert!(error(&dir.path().join("link.mesh"), true).unwrap().contains("is the model that is read"));
    std::fs::write(&out, b"something").unwrap();
    let exists = error(&out, false).expect("a file");
    assert!(exists.contains("exists") && exists.contains("--force"), "{exists}");
    assert_eq!(std::fs::read(&out).unwrap(), b"something");
    assert_eq!(error(&out, true), None);
    let missing = error(&dir.path().join("no/such/folder.mesh"), false).unwrap();
    assert!(missing.contains("cannot write") && missing.contains("folder.mesh.part"), "{missing}");
    // While one process writes, no other does.
    std::fs::remove_file(dir.path().join("a.mesh.part")).unwrap();
    let _first = prepare(&source, &out, &QuantizeOptions { force: true, ..with(Bits::Keep) }, &Silent).unwrap();
    assert!(error(&out, true).unwrap().contains("another process"));
}

#[test]
fn a_damaged_source_is_rejected_by_its_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let [from, out] = ["a.mesh", "b.mesh"].map(|name| dir.path().join(name));
    write(&TinyModel { layers: 1, ..TinyModel::default() }.open(), &from, Bits::Keep).unwrap();
    let mut bytes = std::fs::read(&from).unwrap();
    let place = ModelFile::open(&from).unwrap().tensors()[2].clone();
    bytes[place.range.start as usize + 9] ^= 4;
    std::fs::write(&from, bytes).unwrap();
    let error = write(&ModelFile::open(&from).unwrap(), &out, Bits::Keep).unwrap_err().to_string();
    assert!(error.contains(&place.name) && error.contains("does not match its hash"), "{error}");
    assert!(!out.exists());
}

#[test]
fn a_full_disk_says_what_to_do() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let source = std::os::unix::fs::FileExt::write_all_at(&full, &[1; 4096], 0).unwrap_err();
    let error = QuantizeError::write(Path::new("a.mesh.part"), source);
    assert!(matches!(error, QuantizeError::DiskFull { .. }), "{error}");
    assert!(error.to_string().contains("free some space and run the same command again"), "{error}");
}

/// The real model, if there is one: every way to write it gives a file that answers, and the error of the logits falls with the bits.
#[test]
fn a_real_model_keeps_its_answers() {
    let Some(path) = crate::weights::testing::real_model_path() else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("real.mesh");
    let source = ModelFile::open(&path).unwrap();
    let written = write(&source, &out, Bits::Keep).unwrap();
    let file = ModelFile::open(&out).unwrap();
    assert!(logits(&file, Activations::Int8) == logits(&source, Activations::Int8));
    assert_eq!(
        file.tokenizer().unwrap().encode("Why is the sky blue?", true).unwrap(),
        source.tokenizer().unwrap().encode("Why is the sky blue?", true).unwrap()
    );
    let index = ShardIndex::build(&file, |_| ()).unwrap();
    assert_eq!(blake3::Hash::from_bytes(index.content_id()).to_hex().to_string(), written.content);
}
