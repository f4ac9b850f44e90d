//! Tests of a content on disk: which chunks it has, what it accepts, and when its file is no longer valid.
use super::*;
use kernels_models::weights::testing::TinyModel;

struct Bench {
    dir: tempfile::TempDir,
    index: ShardIndex,
    bytes: Vec<u8>,
}

/// A model of a few dozen chunks.
fn bench() -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let bytes = TinyModel { layers: 8, ..TinyModel::default() }.writer().write();
    std::fs::write(&path, &bytes).unwrap();
    let index = ShardIndex::build(&ModelFile::open(&path).unwrap(), |_| {}).unwrap();
    assert!(index.chunks().len() > 4, "{} chunks", index.chunks().len());
    Bench { dir, index, bytes }
}

impl Bench {
    fn path(&self) -> PathBuf {
        self.dir.path().join("sparse.gguf")
    }

    fn sparse(&self) -> Holding {
        Holding::sparse(&self.path(), self.index.clone()).unwrap()
    }

    fn chunk(&self, chunk: usize) -> &[u8] {
        let range = &self.index.chunks()[chunk].range;
        &self.bytes[range.start as usize..range.end as usize]
    }

    fn all(&self) -> Vec<usize> {
        (0..self.index.chunks().len()).collect()
    }
}

#[test]
fn a_new_file_has_the_length_of_the_model_and_no_chunk() {
    let bench = bench();
    let holding = bench.sparse();
    assert_eq!(std::fs::metadata(bench.path()).unwrap().len(), bench.index.file_len());
    assert!(holding.bitmap().iter().all(|has| !has));
    assert_eq!(holding.missing(&bench.all()), bench.all());
    assert!(holding.read(0).is_none() && !holding.is_intact(0) && holding.is_there());
}

#[test]
fn a_chunk_is_kept_only_if_its_hash_is_right() {
    let bench = bench();
    let holding = bench.sparse();
    let mut wrong = bench.chunk(1).to_vec();
    wrong[0] ^= 1;
    for bytes in [wrong.as_slice(), &bench.chunk(1)[1..], &[], bench.chunk(0)] {
        let found = holding.keep(1, bytes).unwrap().unwrap_err();
        assert_eq!(found, blake3::hash(bytes), "the text of the error has it");
    }
    assert!(!holding.bitmap()[1] && holding.read(1).is_none());
    holding.keep(1, bench.chunk(1)).unwrap().unwrap();
    assert!(holding.is_intact(1) && holding.read(1).as_deref() == Some(bench.chunk(1)));
    assert_eq!(holding.missing(&[0, 1, 2]), [0, 2]);
}

#[test]
fn chunks_of_an_earlier_run_are_offered_and_verified_before_they_are_used() {
    let bench = bench();
    let first = bench.sparse();
    first.keep(1, bench.chunk(1)).unwrap().unwrap();
    first.keep(2, bench.chunk(2)).unwrap().unwrap();
    drop(first);
    let mut bytes = std::fs::read(bench.path()).unwrap();
    bytes[bench.index.chunks()[2].range.start as usize] ^= 1;
    std::fs::write(bench.path(), bytes).unwrap();
    let holding = bench.sparse();
    assert!(!holding.is_intact(1), "not verified yet");
    assert!(holding.read(1).is_some() && holding.read(2).is_none(), "a damaged chunk is not served");
    assert_eq!(holding.missing(&[1, 2]), [2]);
    assert!(holding.is_intact(1) && !holding.bitmap()[2]);
}

#[test]
fn a_file_of_another_length_is_replaced_and_an_open_one_keeps_its_content() {
    let bench = bench();
    std::fs::write(bench.path(), b"other").unwrap();
    let open = File::open(bench.path()).unwrap();
    let holding = bench.sparse();
    assert_eq!(std::fs::metadata(bench.path()).unwrap().len(), bench.index.file_len());
    assert_eq!(holding.missing(&[0]), [0]);
    let mut kept = [0; 5];
    open.read_exact_at(&mut kept, 0).unwrap();
    assert_eq!(&kept, b"other");
}

#[test]
fn a_file_that_was_removed_or_replaced_is_no_longer_there() {
    let bench = bench();
    let holding = bench.sparse();
    std::fs::remove_file(bench.path()).unwrap();
    assert!(!holding.is_there());
    std::fs::write(bench.path(), &bench.bytes).unwrap();
    assert!(!holding.is_there(), "another file under the same name");
    assert!(bench.sparse().is_there());
}

#[test]
fn chunks_that_do_not_exist_are_not_served() {
    let bench = bench();
    let holding = bench.sparse();
    let beyond = bench.index.chunks().len();
    assert!(holding.read(beyond).is_none() && holding.read(usize::MAX).is_none() && !holding.is_intact(beyond));
}

#[test]
fn a_file_is_in_use_while_its_model_is_held() {
    let bench = bench();
    let holding = bench.sparse();
    for chunk in bench.all() {
        holding.keep(chunk, bench.chunk(chunk)).unwrap().unwrap();
    }
    assert!(!holding.is_used(), "no model is open");
    let model = holding.open().unwrap();
    assert!(holding.is_used() && Arc::ptr_eq(&model, &holding.open().unwrap()));
    drop(model);
    assert!(!holding.is_used());
}

#[test]
fn the_bytes_of_all_chunks_are_those_of_the_file() {
    let bench = bench();
    let holding = bench.sparse();
    assert_eq!((holding.bytes(&bench.all()), holding.bytes(&[])), (bench.index.file_len(), 0));
    assert_eq!(holding.bytes(&[1]), bench.chunk(1).len() as u64);
}

#[test]
fn a_users_file_has_all_chunks_and_is_never_written() {
    let bench = bench();
    let path = bench.dir.path().join("model.gguf");
    let file = ModelFile::open(&path).unwrap();
    let holding = Holding::whole(&path, Arc::new(bench.index.clone()), file);
    assert!(holding.bitmap().iter().all(|has| *has) && holding.missing(&bench.all()).is_empty());
    assert!(holding.is_used(), "it is not evicted");
    assert_eq!(holding.read(1).as_deref(), Some(bench.chunk(1)));
    holding.keep(1, bench.chunk(1)).unwrap().unwrap();
    assert!(holding.keep(1, b"noise").unwrap().is_err());
    assert_eq!(std::fs::read(&path).unwrap(), bench.bytes);
}
