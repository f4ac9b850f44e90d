//! Tests of libraries that fetch from peers whose responses are counted and may fail, be corrupt or never arrive.
use super::*;
use crate::bulk::BulkRequest;
use kernels::threads::Threads;
use kernels_models::stage::{Activations, RequestedOutput, Rows, RowsIn, Stage, StageError, StageOptions};
use kernels_models::weights::testing::TinyModel;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

mod sources;

/// A peer: its library, and its faults.
struct Source {
    library: Arc<Library>,
    /// Responses left before it becomes unreachable.
    left: AtomicUsize,
    /// Once unreachable, it does not respond at all instead of with an error.
    is_silent: bool,
    /// Flips a bit of every chunk.
    corrupts: bool,
    delay: Duration,
    /// Chunks requested from it.
    asked: Mutex<Vec<usize>>,
}

impl Source {
    fn chunks(&self) -> usize {
        self.asked.lock().len()
    }
}

struct Net(BTreeMap<NodeId, Source>);

impl Ask for Net {
    async fn ask(&self, node: NodeId, request: Vec<u8>, _: usize) -> Result<Vec<u8>, String> {
        let Some(source) = self.0.get(&node) else { return Err("not connected to that node".into()) };
        if source.left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_err() {
            if source.is_silent {
                std::future::pending::<()>().await;
            }
            return Err("out of reach".to_owned());
        }
        tokio::time::sleep(source.delay).await;
        let Some(BulkRequest::Weights(content, what)) = BulkRequest::decode(&request) else {
            return Err("expected a request for weights".into());
        };
        let mut answer = source.library.answer(content, what);
        if let WeightsRequest::Chunk(chunk) = what {
            source.asked.lock().push(chunk as usize);
            if source.corrupts
                && let Some(last) = answer.last_mut()
            {
                *last ^= 1;
            }
        }
        Ok(answer)
    }
}

struct Bench {
    net: Arc<Net>,
    content: ContentId,
    chunks: usize,
    dir: tempfile::TempDir,
}

const LAYERS: usize = 24;

fn peer(n: u8) -> NodeId {
    NodeId([n; 16])
}

fn library(dir: &Path, limit: u64) -> Arc<Library> {
    Arc::new(Library::open(Cache::at(dir, Some(limit)), &dir.join("models")).unwrap())
}

/// A model whose name, and so its content id, depends on `layers`.
fn model(dir: &Path, layers: usize) -> PathBuf {
    let path = dir.join(format!("model{layers}.gguf"));
    std::fs::write(&path, TinyModel { layers, ..TinyModel::default() }.writer().write()).unwrap();
    path
}

/// Peers with the whole model, one per change, each with its change applied.
fn bench(changes: &[fn(&mut Source)]) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), LAYERS);
    let (mut net, mut known) = (BTreeMap::new(), None);
    for (n, change) in changes.iter().enumerate() {
        let library = library(&dir.path().join(format!("peer{n}")), 1 << 30);
        let held = library.add(&path).unwrap();
        let chunks = library.lock()[&held.content].index.chunks().len();
        known = Some((held.content, chunks));
        let left = AtomicUsize::new(usize::MAX);
        let mut source =
            Source { library, left, is_silent: false, corrupts: false, delay: Duration::ZERO, asked: Mutex::default() };
        change(&mut source);
        net.insert(peer(n as u8), source);
    }
    let (content, chunks) = known.unwrap();
    assert!(chunks > 20, "{chunks} chunks");
    Bench { net: Arc::new(Net(net)), content, chunks, dir }
}

impl Bench {
    /// The library of a node that has only what its earlier runs fetched.
    fn fetcher(&self) -> Arc<Library> {
        library(&self.dir.path().join("fetcher"), 1 << 30)
    }

    async fn share(&self, library: &Arc<Library>, layers: Range<usize>) -> Result<LocalModel, TransferError> {
        let sources: Vec<NodeId> = self.net.0.keys().copied().collect();
        library.share(self.content, "tiny", layers, &sources, &self.net).await
    }

    fn source(&self, n: u8) -> &Source {
        &self.net.0[&peer(n)]
    }

    /// Number of chunks requested from all peers.
    fn asked(&self) -> usize {
        self.net.0.values().map(Source::chunks).sum()
    }
}

#[tokio::test]
async fn an_interrupted_share_is_resumed() {
    let bench = bench(&[|s| s.left = 12.into()]);
    let error = bench.share(&bench.fetcher(), 0..LAYERS).await.err().expect("out of reach").to_string();
    assert!(error.contains("out of reach"), "{error}");
    let before = bench.asked();
    assert!(before >= 8, "{before}");
    bench.source(0).left.store(1000, SeqCst);
    let held = bench.share(&bench.fetcher(), 0..LAYERS).await.expect("the rest");
    assert_eq!(bench.asked(), bench.chunks, "no chunk is fetched twice");
    held.file.tokenizer().expect("the whole model");
}

#[tokio::test]
async fn chunks_fetched_before_a_kill_are_not_fetched_again() {
    let bench = bench(&[|s| (s.left, s.is_silent) = (12.into(), true)]);
    let life = bench.fetcher();
    let sharing = tokio::time::timeout(Duration::from_millis(500), bench.share(&life, 0..LAYERS));
    assert!(sharing.await.is_err(), "it is dropped in mid-transfer, with requests in flight");
    drop(life);
    let before = bench.asked();
    assert!((8..bench.chunks).contains(&before), "{before}");
    bench.source(0).left.store(1000, SeqCst);
    bench.share(&bench.fetcher(), 0..LAYERS).await.expect("the rest");
    assert_eq!(bench.asked(), bench.chunks, "no chunk is fetched twice");
}

#[tokio::test]
async fn only_damaged_chunks_are_fetched_again() {
    let bench = bench(&[|_| {}]);
    let life = bench.fetcher();
    bench.share(&life, 0..LAYERS).await.unwrap();
    let path = life.cache.weights(bench.content);
    drop(life);
    let mut bytes = std::fs::read(&path).unwrap();
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let next = bench.fetcher();
    let last = bench.chunks - 1;
    assert_eq!(next.answer(bench.content, WeightsRequest::Chunk(last as u32)), [0], "nor is it served to peers");
    bench.share(&next, 0..LAYERS).await.unwrap();
    assert_eq!(bench.asked(), bench.chunks + 1);
    assert_eq!(bench.source(0).asked.lock().last(), Some(&last));
}

#[tokio::test]
async fn only_what_the_layers_need_is_fetched_and_more_when_they_move() {
    let bench = bench(&[|_| {}]);
    let library = bench.fetcher();
    bench.share(&library, 0..4).await.unwrap();
    let first = bench.asked();
    assert!(first < bench.chunks, "{first} of {}", bench.chunks);
    bench.share(&library, 0..4).await.unwrap();
    assert_eq!(bench.asked(), first, "nothing is fetched twice");
    bench.share(&library, 4..LAYERS).await.unwrap();
    assert_eq!(bench.asked(), bench.chunks);
}

#[tokio::test]
async fn holders_send_in_parallel_and_the_slow_one_less() {
    let slow: fn(&mut Source) = |s| s.delay = Duration::from_millis(100);
    let quick: fn(&mut Source) = |s| s.delay = Duration::from_millis(20);
    let bench = bench(&[quick, slow, quick]);
    let library = bench.fetcher();
    bench.share(&library, 0..LAYERS).await.unwrap();
    assert!(bench.asked() <= bench.chunks + 2, "{} of {}", bench.asked(), bench.chunks);
    let given = [0, 1, 2].map(|n| bench.source(n).chunks());
    assert!(given[0] > given[1] && given[2] > given[1] && given[1] > 0, "{given:?}");
    let seen = library.view();
    assert_eq!(seen.peers.iter().map(|p| p.chunks).sum::<u64>(), bench.chunks as u64);
    assert!(seen.transfers.is_empty() && seen.cache_used > 0, "{seen:?}");
}

#[tokio::test]
async fn nodes_with_a_share_each_are_together_a_source_of_the_whole_model() {
    let bench = bench(&[|_| {}]);
    let (front, back) = (library(&bench.dir.path().join("a"), 1 << 30), library(&bench.dir.path().join("b"), 1 << 30));
    bench.share(&front, 0..LAYERS / 2).await.unwrap();
    bench.share(&back, LAYERS / 2..LAYERS).await.unwrap();
    assert_eq!((front.contents(), back.contents()), (vec![bench.content], vec![bench.content]));
    // Chunks fetched by an earlier run are served from the start too.
    drop(back);
    let back = library(&bench.dir.path().join("b"), 1 << 30);
    assert_eq!(back.contents(), [bench.content]);
    let source = |library| Source {
        library,
        left: AtomicUsize::new(usize::MAX),
        is_silent: false,
        corrupts: false,
        delay: Duration::ZERO,
        asked: Mutex::default(),
    };
    let net = Arc::new(Net([(peer(1), source(front)), (peer(2), source(back))].into()));
    let library = bench.fetcher();
    let held = library.share(bench.content, "tiny", 0..LAYERS, &[peer(1), peer(2)], &net).await.expect("from both");
    assert!(net.0[&peer(1)].chunks() > 5 && net.0[&peer(2)].chunks() > 5);
    held.file.tokenizer().expect("the whole model");
}

#[tokio::test]
async fn the_users_own_file_is_used_instead_of_peers_if_its_content_is_the_same() {
    let bench = bench(&[|_| {}]);
    let (library, models) = (bench.fetcher(), bench.dir.path().join("fetcher/models"));
    std::fs::create_dir_all(&models).unwrap();
    // Another model of that name is no substitute.
    std::fs::rename(model(&models, 2), models.join("tiny.gguf")).unwrap();
    let held = bench.share(&library, 0..2).await.expect("from the peer");
    assert!(held.content == bench.content && bench.asked() > 0);

    let asked = bench.asked();
    std::fs::rename(model(&models, LAYERS), models.join("tiny.gguf")).unwrap();
    let held = bench.share(&library, 0..LAYERS).await.expect("from the file");
    assert_eq!((held.content, held.fetched_bytes, bench.asked()), (bench.content, 0, asked));
    let error = library.share(bench.content, "../models/tiny", 0..LAYERS, &[], &bench.net).await;
    assert!(error.is_ok(), "the file is open now: its name no longer matters");
    let alone = self::library(&bench.dir.path().join("alone"), 1 << 30);
    let path = models.join("tiny.gguf").display().to_string();
    let error = alone.share(bench.content, &path, 0..LAYERS, &[], &bench.net).await.err().expect("no path counts");
    assert!(error.to_string().contains("there is no source"), "{error}");
}

#[tokio::test]
async fn a_source_of_wrong_bytes_is_excluded_and_another_is_used() {
    let bench = bench(&[|s| s.corrupts = true, |_| {}]);
    let library = bench.fetcher();
    let held = bench.share(&library, 0..LAYERS).await.expect("the other source has it");
    held.file.tokenizer().expect("the right bytes");
    let requests = bench.source(0).chunks();
    assert!((1..=2).contains(&requests), "two requests in parallel: {requests}");
    let seen = library.view();
    let refused: Vec<u64> = seen.peers.iter().map(|p| p.refused).collect();
    assert_eq!(refused[0], 1, "{seen:?}");
    // It stays excluded for this model for ten minutes.
    std::fs::remove_file(library.cache.weights(bench.content)).unwrap();
    bench.share(&library, 0..LAYERS).await.expect("from the other source alone");
    assert_eq!(bench.source(0).chunks(), requests);
}

#[tokio::test]
async fn wrong_bytes_are_rejected() {
    let bench = bench(&[|s| s.corrupts = true]);
    let error = bench.share(&bench.fetcher(), 0..4).await.err().expect("wrong bytes").to_string();
    assert!(error.contains("hash is wrong"), "{error}");
}

#[tokio::test]
async fn a_lost_source_is_replaced_by_another() {
    let bench = bench(&[|s| s.left = 6.into(), |s| s.delay = Duration::from_millis(1)]);
    bench.share(&bench.fetcher(), 0..LAYERS).await.expect("from the other source");
    assert_eq!(bench.asked(), bench.chunks);
}

#[tokio::test]
async fn the_least_recently_used_model_is_evicted_unless_it_is_in_use() {
    let bench = bench(&[|_| {}]);
    let source = &bench.source(0).library;
    let others: Vec<ContentId> =
        [20, 22].map(|layers| source.add(&model(bench.dir.path(), layers)).unwrap().content).into();
    let unlimited = bench.fetcher();
    for content in others.iter().chain([&bench.content]) {
        unlimited.share(*content, "tiny", 0..20, &[peer(0)], &bench.net).await.unwrap();
    }
    let one = unlimited.view().cache_used / 3;
    let library = library(&bench.dir.path().join("small"), one * 5 / 2);
    let share = async |content: ContentId| library.share(content, "tiny", 0..20, &[peer(0)], &bench.net).await;
    let first = share(others[0]).await.expect("room for two");
    drop(share(others[1]).await.expect("room for two"));
    let third = share(bench.content).await.expect("the second is evicted: it is not in use");
    assert_eq!(library.contents().len(), 2);
    assert!(!library.contents().contains(&others[1]));
    let error = share(others[1]).await.err().expect("both others are in use").to_string();
    assert!(error.contains("--cache-size") && error.contains(".gguf") && error.contains("needed"), "{error}");
    drop(first);
    share(others[1]).await.expect("now the first can be evicted");
    assert!(!library.contents().contains(&others[0]) && library.contents().contains(&bench.content));
    assert!(library.view().cache_used <= library.view().cache_limit);
    drop(third);
}

/// The file of a serving node is truncated: the loaded stage keeps working, nothing more is loaded from the file or
/// served to peers, and nothing crashes.
#[tokio::test]
async fn a_truncated_file_is_neither_loaded_nor_served_to_peers() {
    let bench = bench(&[|_| {}]);
    let (library, path) = (&bench.source(0).library, bench.dir.path().join(format!("model{LAYERS}.gguf")));
    let held = library.share(bench.content, "tiny", 0..LAYERS, &[], &bench.net).await.expect("it is on disk");
    let mut stage = stage(&held).expect("loads");
    let expected = logits(&mut *stage);
    let last = WeightsRequest::Chunk(bench.chunks as u32 - 1);
    assert_eq!(library.answer(bench.content, last)[0], 1);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(held.file.file_len() / 2).unwrap();

    assert_eq!(logits(&mut *stage), expected, "the loaded stage keeps working");
    let error = stage_error(&held);
    for part in ["model24.gguf", "expected", "found", "by a rename"] {
        assert!(error.contains(part), "{error}");
    }
    for _ in 0..2 {
        let again = library.share(bench.content, "tiny", 0..LAYERS, &[], &bench.net).await;
        let error = again.err().expect("truncated").to_string();
        assert!(error.contains("changed after it was opened") && error.contains("no peer could provide"), "{error}");
    }
    assert_eq!(library.contents(), []);
    for chunk in [WeightsRequest::Chunk(0), last] {
        assert_eq!(library.answer(bench.content, chunk), [0], "even chunks before the truncation");
    }
    assert!(library.answer(bench.content, WeightsRequest::Have)[1..].iter().all(|byte| *byte == 0));
    assert!(library.add(&path).is_err());

    // With an intact file of the same content, the node is a source again.
    let beside = bench.dir.path().join("beside");
    std::fs::create_dir(&beside).unwrap();
    std::fs::rename(model(&beside, LAYERS), &path).unwrap();
    assert_eq!(library.add(&path).unwrap().content, bench.content);
    assert_eq!((library.contents(), library.answer(bench.content, last)[0]), (vec![bench.content], 1));
    assert_eq!(logits(&mut *self::stage(&library.add(&path).unwrap()).expect("loads")), expected);
}

/// A node whose own file was truncated fetches its share from peers that have it.
#[tokio::test]
async fn a_truncated_file_is_replaced_by_a_share_from_peers() {
    let bench = bench(&[|_| {}]);
    let own = bench.dir.path().join("own");
    std::fs::create_dir(&own).unwrap();
    let (path, library) = (model(&own, LAYERS), bench.fetcher());
    let whole = library.add(&path).unwrap();
    let expected = logits(&mut *stage(&whole).expect("loads"));
    std::fs::write(&path, b"GGUF").unwrap();
    let fetched = bench.share(&library, 0..LAYERS).await.expect("from the peer");
    assert!(fetched.fetched_bytes > 0 && bench.asked() == bench.chunks);
    assert_eq!(logits(&mut *stage(&fetched).expect("loads")), expected);
    assert_eq!(library.contents(), [bench.content]);
}

/// A truncated cache file is replaced under its name; a stage that has the old one open keeps working.
#[tokio::test]
async fn a_truncated_cache_file_is_fetched_again() {
    let bench = bench(&[|_| {}]);
    let library = bench.fetcher();
    let held = bench.share(&library, 0..LAYERS).await.unwrap();
    let mut stage = stage(&held).expect("loads");
    let expected = logits(&mut *stage);
    let path = library.cache.weights(bench.content);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    assert!(stage_error(&held).contains("changed after it was opened"));
    let last = WeightsRequest::Chunk(bench.chunks as u32 - 1);
    assert_eq!(library.answer(bench.content, last), [0]);
    let again = bench.share(&library, 0..LAYERS).await.expect("fetched again");
    assert_eq!(bench.asked(), 2 * bench.chunks);
    assert_eq!(logits(&mut *self::stage(&again).expect("loads")), expected);
    assert_eq!(logits(&mut *stage), expected, "the stage loaded before keeps working");
}

fn stage(held: &LocalModel) -> Result<Box<dyn Stage>, StageError> {
    let (layers, activations) = (0..held.file.config().layers, Activations::Int8);
    let options = StageOptions { layers, sequences: 1, context: 16, activations, ram: 0, threads: 1 };
    kernels_models::load_cpu_stage(held.file.clone(), options)
}

fn stage_error(held: &LocalModel) -> String {
    stage(held).err().expect("an error").to_string()
}

fn logits(stage: &mut dyn Stage) -> String {
    let input = RowsIn::Tokens(&[4, 200, 31]);
    let rows = Rows { sequence: 0, position: 0, input, output: RequestedOutput::Logits };
    format!("{:?}", stage.forward(&mut Threads::new(1).unwrap(), &[rows]).expect("computes"))
}

#[test]
fn a_full_disk_is_named_with_what_to_do() {
    let cause = std::io::Error::from(std::io::ErrorKind::StorageFull);
    let error = TransferError::Disk { path: "/full/x.gguf".into(), cause }.to_string();
    assert!(error.contains("/full/x.gguf") && error.contains("--cache-dir"), "{error}");
    let need = disk::require(Some(10), 1 << 20, "weights from peers", Path::new("/full"), disk::FREE_CACHE);
    let error = TransferError::from(need.unwrap_err()).to_string();
    assert!(error.contains("1.0 MiB needed, 10 B free") && error.contains("/full"), "{error}");
}
