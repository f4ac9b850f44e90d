//! Tests of sources: none, of another model, damaged, and of nodes that were excluded.
use super::*;
use crate::transfer::request::INDEX_BYTES_MAX;

/// Answers requests for the index with these bytes, and nothing else.
struct Fixed(Vec<u8>);

impl Ask for Fixed {
    async fn ask(&self, _: NodeId, request: Vec<u8>, max: usize) -> Result<Vec<u8>, String> {
        match BulkRequest::decode(&request) {
            Some(BulkRequest::Weights(_, WeightsRequest::Index)) => {
                assert_eq!(max, INDEX_BYTES_MAX);
                Ok(self.0.clone())
            }
            _ => Err("only the index".into()),
        }
    }
}

async fn shared(bench: &Bench, library: &Arc<Library>, answer: Vec<u8>, sources: &[NodeId]) -> String {
    let net = Arc::new(Fixed(answer));
    let shared = library.share(bench.content, "tiny", 0..4, sources, &net).await;
    shared.err().expect("no source has it").to_string()
}

#[tokio::test]
async fn without_sources_the_error_says_so() {
    let bench = bench(&[|_| {}]);
    let error = shared(&bench, &bench.fetcher(), Vec::new(), &[]).await;
    assert!(error.contains("there is no source") && error.contains("the index"), "{error}");
}

#[tokio::test]
async fn the_index_of_another_model_is_rejected_and_its_sender_excluded() {
    let bench = bench(&[|_| {}]);
    let source = &bench.source(0).library;
    let other = source.add(&model(bench.dir.path(), 20)).unwrap().content;
    let (answer, library) = (source.answer(other, WeightsRequest::Index), bench.fetcher());
    let error = shared(&bench, &library, answer.clone(), &[peer(1)]).await;
    assert!(error.contains("another model's index"), "{error}");
    let error = shared(&bench, &library, answer, &[peer(1)]).await;
    assert!(error.contains("1 sent wrong bytes recently and is excluded"), "{error}");
    assert_eq!(library.view().peers.iter().map(|peer| peer.refused).collect::<Vec<_>>(), [1]);
}

#[tokio::test]
async fn a_damaged_or_empty_index_is_no_index() {
    let bench = bench(&[|_| {}]);
    let index = bench.source(0).library.answer(bench.content, WeightsRequest::Index);
    for (answer, words) in [
        (index[..index.len() - 1].to_vec(), "a damaged index"),
        (vec![1], "a damaged index"),
        (vec![0], "does not have it"),
        (vec![], "does not have it"),
        (vec![2, 3], "does not have it"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let error = shared(&bench, &library(dir.path(), 1 << 30), answer.clone(), &[peer(1)]).await;
        assert!(error.contains(words), "{answer:?}: {error}");
    }
}

#[tokio::test]
async fn an_index_that_was_fetched_is_kept_for_the_next_attempt() {
    let bench = bench(&[|_| {}]);
    let index = bench.source(0).library.answer(bench.content, WeightsRequest::Index);
    let library = bench.fetcher();
    let error = shared(&bench, &library, index, &[peer(1)]).await;
    assert!(error.contains("chunk"), "the chunks are not there: {error}");
    let error = shared(&bench, &library, vec![0], &[peer(1)]).await;
    assert!(error.contains("chunk"), "the index is not requested again: {error}");
}

#[tokio::test]
async fn a_model_that_is_here_needs_no_source() {
    let bench = bench(&[|_| {}]);
    let library = bench.fetcher();
    bench.share(&library, 0..LAYERS).await.unwrap();
    let net = Arc::new(Fixed(Vec::new()));
    let held = library.share(bench.content, "tiny", 0..LAYERS, &[], &net).await.expect("it is complete");
    assert_eq!(held.fetched_bytes, 0);
}

#[tokio::test]
async fn two_transfers_of_one_model_at_the_same_time_bring_all_chunks() {
    let bench = bench(&[|source| source.delay = Duration::from_millis(1)]);
    let library = bench.fetcher();
    let (front, back) = tokio::join!(bench.share(&library, 0..LAYERS / 2), bench.share(&library, LAYERS / 2..LAYERS));
    front.unwrap_or_else(|error| panic!("{error}"));
    back.unwrap_or_else(|error| panic!("{error}"));
    let mut asked = bench.source(0).asked.lock().clone();
    asked.sort_unstable();
    asked.dedup();
    assert_eq!(asked.len(), bench.chunks, "all chunks are here");
    assert!(library.view().transfers.is_empty());
}

#[tokio::test]
async fn a_failed_transfer_is_not_shown_as_running() {
    let bench = bench(&[|source| source.left = 4.into()]);
    let library = bench.fetcher();
    assert!(bench.share(&library, 0..LAYERS).await.is_err());
    let seen = library.view();
    assert!(seen.transfers.is_empty(), "{seen:?}");
}
