//! Tests of models in several files: they equal the whole file, for peers too; a missing or foreign part is rejected by name.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{FOLDER_INDEX, index_names, part_names, split_stem};
use crate::weights::testing::{GgufWriter, TinyModel};
use crate::weights::{ModelFile, ShardIndex, WeightsError};

fn whole() -> GgufWriter {
    TinyModel { layers: 3, tied: false, ..TinyModel::default() }.writer()
}

fn write(dir: &Path, number: usize, count: usize, part: &GgufWriter) -> PathBuf {
    let path = dir.join(format!("tiny-{number:05}-of-{count:05}.gguf"));
    std::fs::write(&path, part.write()).expect("written");
    path
}

fn write_all(dir: &Path, writer: &GgufWriter, count: usize) -> Vec<PathBuf> {
    let parts = writer.split(count);
    parts.iter().zip(1..).map(|(part, number)| write(dir, number, count, part)).collect()
}

fn index(file: &ModelFile) -> ShardIndex {
    ShardIndex::build(file, |_| ()).expect("complete")
}

/// A peer's copy, assembled from the chunks alone: padding stays a hole.
fn peers_copy(dir: &Path, file: &ModelFile) -> Arc<ModelFile> {
    let index = index(file);
    let mut bytes = vec![0; index.file_len() as usize];
    for chunk in index.chunks_for(&[0..u64::MAX]) {
        let range = &index.chunks()[chunk].range;
        bytes[range.start as usize..range.end as usize].copy_from_slice(&file.read(range).expect("readable"));
    }
    let path = dir.join("peer");
    std::fs::write(&path, &bytes).expect("written");
    let copy = ModelFile::open_partial(&path).expect("a model");
    assert!(index.matches(&copy));
    copy
}

fn assert_same_tensors(a: &ModelFile, b: &ModelFile) {
    assert_eq!(a.tensors().len(), b.tensors().len());
    for tensor in a.tensors() {
        let (a, b) = (a.tensor(&tensor.name).expect("there"), b.tensor(&tensor.name).expect("there"));
        assert_eq!((a.quant, a.rows, a.cols), (b.quant, b.rows, b.cols), "{}", tensor.name);
        assert_eq!(a.read(0..a.rows).expect("readable"), b.read(0..b.rows).expect("readable"), "{}", tensor.name);
    }
}

#[test]
fn a_split_file_equals_the_whole_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let single = ModelFile::from_bytes(whole().write().into()).expect("opens");
    let ids = |file: &ModelFile| -> std::collections::BTreeMap<String, [u8; 32]> {
        file.tensors().iter().map(|tensor| tensor.name.clone()).zip(index(file).tensor_ids()).collect()
    };
    // The last count leaves a part without tensors.
    for count in [2, 3, 30] {
        for alignment in [32, 4096] {
            let mut writer = whole();
            writer.alignment = alignment;
            let paths = write_all(dir.path(), &writer, count);
            let file = ModelFile::open(&paths[count - 1]).expect("any part names the model");
            assert_eq!(file.path(), Some(paths[0].as_path()));
            assert_eq!(file.config(), single.config());
            assert_same_tensors(&single, &file);
            assert_eq!(ids(&file), ids(&single), "{count} parts");
            assert!(file.metadata().iter().all(|(key, _)| !key.starts_with("split.")));
            assert_same_tensors(&single, &peers_copy(dir.path(), &file));
            let words =
                |file: &ModelFile| file.tokenizer().expect("a tokenizer").encode("hello", true).expect("encodes");
            assert_eq!(words(&file), words(&single));
        }
    }
}

#[test]
fn a_missing_or_foreign_part_is_rejected_by_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let error = |path: &Path| ModelFile::open(path).expect_err("not the model").to_string();
    let paths = write_all(dir.path(), &whole(), 3);
    std::fs::rename(&paths[1], dir.path().join("aside")).expect("renamed");
    assert!(error(&paths[0]).contains("part 2 of 3 of the model is missing"), "{}", error(&paths[0]));
    std::fs::copy(&paths[2], &paths[1]).expect("copied");
    let found = error(&paths[0]);
    assert!(found.contains("expected part 2 of 3, as its name says, found part 3 of 3"), "{found}");
    // A part of a model with fewer tensors.
    let other = TinyModel { layers: 2, tied: false, ..TinyModel::default() }.writer();
    write(dir.path(), 2, 3, &other.split(3)[1]);
    assert!(error(&paths[0]).contains("the parts are not of one model"), "{}", error(&paths[0]));
    std::fs::write(&paths[1], whole().write()).expect("written");
    assert!(error(&paths[0]).contains("found a file that is not split"), "{}", error(&paths[0]));
    // A part whose name does not say so.
    let plain = dir.path().join("model.gguf");
    std::fs::copy(&paths[0], &plain).expect("copied");
    assert!(error(&plain).contains("does not end in -00001-of-00003.gguf"), "{}", error(&plain));
    // A part that was cut off.
    write_all(dir.path(), &whole(), 3);
    let len = std::fs::metadata(&paths[1]).expect("there").len();
    std::fs::File::options().write(true).open(&paths[1]).expect("opens").set_len(len / 2).expect("cut");
    assert!(error(&paths[0]).contains("truncated"), "{}", error(&paths[0]));
}

#[test]
fn a_part_that_changes_is_noticed() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = write_all(dir.path(), &whole(), 2);
    let file = ModelFile::open(&paths[0]).expect("opens");
    let stamp = file.stamp();
    assert_eq!(ModelFile::open(&paths[1]).expect("opens").stamp(), stamp);
    std::fs::File::options().write(true).open(&paths[1]).expect("opens").set_len(100).expect("cut");
    assert!(matches!(file.check_unchanged(), Err(WeightsError::Changed { path, .. }) if path == paths[1]));
}

#[test]
fn names_of_parts() {
    let names = part_names("a/B-00002-of-00003.gguf").expect("a part");
    assert_eq!(names, ["B-00001-of-00003.gguf", "B-00002-of-00003.gguf", "B-00003-of-00003.gguf"]);
    assert_eq!(split_stem(Path::new("x/B-00002-of-00003.gguf")), Some("B"));
    for other in
        ["B.gguf", "B-00004-of-00003.gguf", "B-00000-of-00003.gguf", "B-0001-of-0003.gguf", "B-00001-of-99999.gguf"]
    {
        assert_eq!(part_names(other), None, "{other}");
    }
}

#[test]
fn an_index_names_files_beside_it() {
    let text = |map: &str| format!(r#"{{"metadata": {{"total_size": 1}}, "weight_map": {map}}}"#);
    let names = index_names(text(r#"{"a": "y.safetensors", "b": "x.safetensors", "c": "x.safetensors"}"#).as_bytes());
    assert_eq!(names.expect("an index"), ["x.safetensors", "y.safetensors"]);
    for bad in [r"{}", r#"{"a": "../x.safetensors"}"#, r#"{"a": "/etc/passwd"}"#, r#"{"a": 1}"#, r#"{"a": "x.bin"}"#] {
        let error = index_names(text(bad).as_bytes()).expect_err(bad).to_string();
        assert!(error.contains(FOLDER_INDEX), "{error}");
    }
}
