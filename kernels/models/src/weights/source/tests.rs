//! Tests of files that another program locks, modifies or truncates while they are open.
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kernels::threads::Threads;

use crate::stage::{Activations, RequestedOutput, Rows, RowsIn, Stage, StageError, StageOptions};
use crate::weights::testing::TinyModel;
use crate::weights::{ModelFile, ShardIndex, WeightsError};

struct Bench {
    dir: tempfile::TempDir,
    path: PathBuf,
    file: Arc<ModelFile>,
}

fn tiny() -> TinyModel {
    TinyModel { layers: 3, ..TinyModel::default() }
}

fn bench() -> Bench {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("tiny.gguf");
    std::fs::write(&path, tiny().writer().write()).expect("written");
    let file = ModelFile::open(&path).expect("opens");
    Bench { dir, path, file }
}

fn load(file: &Arc<ModelFile>) -> Result<Box<dyn Stage>, StageError> {
    let options =
        StageOptions { layers: 0..3, sequences: 2, context: 64, activations: Activations::Int8, ram: 0, threads: 2 };
    crate::load_cpu_stage(Arc::clone(file), options)
}

fn cut(path: &Path, len: u64) {
    File::options().write(true).open(path).and_then(|file| file.set_len(len)).expect("cut");
}

fn logits(stage: &mut dyn Stage) -> String {
    let rows = Rows { sequence: 1, position: 0, input: RowsIn::Tokens(&[4, 200, 31]), output: RequestedOutput::Logits };
    format!("{:?}", stage.forward(&mut Threads::new(2).unwrap(), &[rows]).expect("computes"))
}

/// Checks that the error gives what was expected, what was found and what to do.
fn assert_changed(error: &dyn std::fmt::Display, path: &Path, before: u64, now: u64) {
    let error = error.to_string();
    let path = path.display().to_string();
    let expected = format!("expected {before} bytes, written on ");
    for part in [path.as_str(), &expected, &format!("found {now} bytes"), "by a rename"] {
        assert!(error.contains(part), "expected {part:?} in {error:?}");
    }
}

#[test]
fn a_truncated_file_is_rejected_at_every_length_and_loaded_stages_keep_working() {
    let Bench { dir: _dir, path, file } = bench();
    let whole = file.file_len();
    let mut stage = load(&file).expect("loads");
    let expected = logits(&mut *stage);
    let boundaries: Vec<u64> = file.tensors().iter().map(|t| t.range.end - 1).collect();
    for len in boundaries.into_iter().rev().chain([file.header_range().end, 100, 0]) {
        cut(&path, len);
        assert_changed(&load(&file).err().expect("cut"), &path, whole, len);
        let last = file.tensors().last().expect("tensors");
        let error = file.tensor(&last.name).expect("listed").read(last.rows - 1..last.rows).expect_err("cut");
        assert_changed(&error, &path, whole, len);
        assert!(ShardIndex::build(&file, |_| ()).is_err(), "cut to {len}");
        assert!(file.tokenizer().is_ok(), "the header was read when the file was opened");
    }
    assert_eq!(logits(&mut *stage), expected);
    let error = ModelFile::open(&path).expect_err("empty").to_string();
    assert!(error.contains("truncated"), "{error}");
}

/// Truncation during a load gives an error, never a crash.
#[test]
fn truncation_while_reading_fails_the_load() {
    let Bench { dir: _dir, path, file } = bench();
    let name = &file.tensors()[file.tensors().len() / 2].name;
    let tensor = file.tensor(name).expect("listed");
    assert!(tensor.read(0..1).is_ok());
    cut(&path, file.tensors()[1].range.end);
    let mut out = vec![0; kernels::tile::Layout::of(tensor.quant).matrix_bytes(tensor.rows, tensor.cols)];
    let error = tensor.read_tiles(0..tensor.rows, &mut out).expect_err("past the end");
    assert!(matches!(error, WeightsError::Changed { .. }), "{error}");
}

#[test]
fn a_file_modified_in_place_is_rejected_and_one_replaced_by_a_rename_is_not() {
    let Bench { dir, path, file } = bench();
    // The same length, a different modification time.
    let mut other = File::options().write(true).open(&path).expect("opens");
    other.seek(SeekFrom::End(-1)).and_then(|_| other.write_all(&[1])).expect("written");
    other.set_modified(SystemTime::now() + Duration::from_secs(7)).expect("a time");
    let error = load(&file).err().expect("written");
    assert_changed(&error, &path, file.file_len(), file.file_len());
    // Reopened in its current state, it loads. A file renamed onto its path has no effect.
    let again = ModelFile::open(&path).expect("opens");
    let expected = logits(&mut *load(&again).expect("loads"));
    let beside = dir.path().join("beside");
    std::fs::write(&beside, b"another model").and_then(|()| std::fs::rename(&beside, &path)).expect("replaced");
    assert!(again.check_unchanged().is_ok());
    assert_eq!(logits(&mut *load(&again).expect("loads")), expected);
}

/// Chunks from peers change the modification time of a file being filled; its length must stay the same.
#[test]
fn a_file_being_filled_may_be_modified_but_not_truncated() {
    let Bench { dir: _dir, path, file } = bench();
    let filling = ModelFile::open_partial(&path).expect("opens");
    let written = File::options().write(true).open(&path).expect("opens");
    written.set_modified(SystemTime::now() + Duration::from_secs(7)).expect("a time");
    assert!(load(&filling).is_ok());
    cut(&path, file.file_len() - 1);
    let error = load(&filling).err().expect("cut").to_string();
    let (before, now) = (file.file_len(), file.file_len() - 1);
    assert!(error.contains(&format!("expected {before} bytes; found {now} bytes")), "{error}");
}

#[test]
fn an_open_model_file_is_locked_against_writers() {
    let Bench { dir: _dir, path, file } = bench();
    let writer = File::options().write(true).open(&path).expect("opens");
    assert!(matches!(writer.try_lock(), Err(std::fs::TryLockError::WouldBlock)), "a model that is open is locked");
    let second = ModelFile::open(&path).expect("readers share it");
    drop((file, second));
    writer.try_lock().expect("no reader is left");
    let error = ModelFile::open(&path).expect_err("being written").to_string();
    assert!(error.contains("locked by a program that is writing it") && error.contains("try again"), "{error}");
    writer.unlock().expect("unlocked");
    assert!(ModelFile::open(&path).is_ok());
}

/// A header longer than the first read: reading continues until it is complete.
#[test]
fn a_long_header_is_read_to_its_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("long.gguf");
    let mut writer = tiny().writer();
    let licence = "x".repeat(15 << 20);
    writer.text("general.license", &licence);
    std::fs::write(&path, writer.write()).expect("written");
    let file = ModelFile::open(&path).expect("opens");
    assert!(file.header_range().end > 15 << 20);
    assert_eq!(file.metadata().text("general.license").expect("a string").map(str::len), Some(licence.len()));
    assert_eq!(logits(&mut *load(&file).expect("loads")), logits(&mut *load(&tiny().open()).expect("loads")));
    // Truncation inside the header is reported as such.
    cut(&path, 9 << 20);
    let error = ModelFile::open(&path).expect_err("cut");
    assert!(matches!(error, WeightsError::Truncated { have, .. } if have == 9 << 20), "{error}");
    // A header that claims to be huge is not read entirely: the rest of this file is a hole.
    let claims = [b"GGUF".as_slice(), &3u32.to_le_bytes(), &0u64.to_le_bytes(), &1u64.to_le_bytes()].concat();
    let array = [&1u64.to_le_bytes()[..], b"k", &9u32.to_le_bytes(), &0u32.to_le_bytes(), &(1u64 << 40).to_le_bytes()];
    std::fs::write(&path, [claims, array.concat()].concat()).expect("written");
    File::options().write(true).open(&path).and_then(|file| file.set_len(2 << 40)).expect("a sparse file");
    let error = ModelFile::open(&path).expect_err("a header of a terabyte").to_string();
    assert!(error.contains("a header of at most 268435456 bytes"), "{error}");
}
