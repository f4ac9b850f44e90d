//! A library that fetches from another one, whose answers are counted and can fail.
use super::*;
use kernels::weights::testing::TinyModel;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

struct Source {
    library: Library,
    /// Answers still given; then it is out of reach.
    left: AtomicUsize,
    chunks: AtomicUsize,
    /// Flips a bit of every chunk.
    lies: bool,
}

impl Ask for Source {
    async fn ask(&self, _: NodeId, request: Vec<u8>, _: usize) -> Result<Vec<u8>, String> {
        let left = self.left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        left.map_err(|_| "out of reach".to_owned())?;
        let mut answer = self.library.answer(&request);
        if matches!(Request::decode(&request), Some((_, Request::Chunk(_)))) {
            self.chunks.fetch_add(1, SeqCst);
            if self.lies
                && let Some(last) = answer.last_mut()
            {
                *last ^= 1;
            }
        }
        Ok(answer)
    }
}

struct Bench {
    source: Arc<Source>,
    content: ContentId,
    chunks: usize,
    dir: tempfile::TempDir,
}

const PEER: [NodeId; 1] = [NodeId([9; 16])];
const LAYERS: usize = 24;

fn bench(left: usize, lies: bool) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, TinyModel { layers: LAYERS, ..TinyModel::default() }.writer().write()).unwrap();
    let library = Library::open(&dir.path().join("whole")).unwrap();
    let held = library.add(&path).unwrap();
    let source = Source { library, left: left.into(), chunks: 0.into(), lies };
    Bench { source: Arc::new(source), content: held.content, chunks: held.index.chunks().len(), dir }
}

impl Bench {
    fn fetcher(&self) -> Library {
        Library::open(&self.dir.path().join("partial")).unwrap()
    }

    async fn share(&self, library: &Library, layers: Range<usize>) -> Result<Arc<Held>, TransferError> {
        library.share(self.content, layers, &PEER, &self.source).await
    }
}

#[tokio::test]
async fn a_share_that_broke_off_goes_on_where_it_was() {
    let bench = bench(4, false);
    assert!(bench.chunks > 6, "{} chunks", bench.chunks);
    let error = bench.share(&bench.fetcher(), 0..LAYERS).await.err().expect("out of reach").to_string();
    assert!(error.contains("out of reach"), "{error}");
    let before = bench.source.chunks.load(SeqCst);
    assert!(before > 0);
    bench.source.left.store(1000, SeqCst);
    let life = bench.fetcher();
    let held = bench.share(&life, 0..LAYERS).await.expect("the rest");
    assert_eq!(bench.source.chunks.load(SeqCst), bench.chunks, "no chunk came twice");
    assert!(held.have().iter().all(|have| *have));
    held.file.tokenizer().expect("the whole model");
}

#[tokio::test]
async fn only_what_the_layers_need_is_fetched_and_more_when_they_move() {
    let bench = bench(1000, false);
    let library = bench.fetcher();
    bench.share(&library, 0..4).await.unwrap();
    let first = bench.source.chunks.load(SeqCst);
    assert!(first < bench.chunks, "{first} of {}", bench.chunks);
    bench.share(&library, 0..4).await.unwrap();
    assert_eq!(bench.source.chunks.load(SeqCst), first, "nothing twice");
    bench.share(&library, 4..LAYERS).await.unwrap();
    assert_eq!(bench.source.chunks.load(SeqCst), bench.chunks);
}

#[tokio::test]
async fn wrong_bytes_are_not_kept() {
    let bench = bench(1000, true);
    let error = bench.share(&bench.fetcher(), 0..4).await.err().expect("lies").to_string();
    assert!(error.contains("hash is wrong"), "{error}");
}

#[test]
fn a_disk_that_is_full_is_named_with_what_to_do() {
    let cause = std::io::Error::from(std::io::ErrorKind::StorageFull);
    let error = TransferError::Disk { path: "/full/x.gguf".into(), cause }.to_string();
    assert!(error.contains("/full/x.gguf") && error.contains("--cache-dir"), "{error}");
    let need = disk::require(Some(10), 1 << 20, "weights from peers", Path::new("/full"), disk::FREE_CACHE);
    let error = TransferError::from(need.unwrap_err()).to_string();
    assert!(error.contains("1.0 MiB needed, 10 B free") && error.contains("/full"), "{error}");
}
