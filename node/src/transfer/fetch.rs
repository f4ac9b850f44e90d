//! Fetches chunks from peers as `schedule.rs` decides: sends requests, verifies hashes, writes chunks to their place.
use super::error::{TransferError, interrupted};
use super::holding::Holding;
use super::ledger::{Ledger, Progress};
use super::request::{Ask, CHUNK_BYTES_MAX, INDEX_BYTES_MAX, WeightsRequest, decode_bitmap};
use super::schedule::{Ask as Wish, Schedule};
use crate::bulk::BulkRequest;
use kernels_models::weights::ShardIndex;
use node_core::id::{ContentId, NodeId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use tokio::task::{AbortHandle, JoinSet};

/// The peers that may have a content, and how to send them requests.
pub(super) struct Swarm<A> {
    pub(super) content: ContentId,
    pub(super) sources: Vec<NodeId>,
    pub(super) ask: Arc<A>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) progress: Arc<Progress>,
    /// Number of sources excluded because they sent wrong bytes before.
    distrusted: usize,
    /// The chunks that each source has.
    has: BTreeMap<NodeId, Vec<bool>>,
}

/// The result of a request.
enum SourceAnswer {
    Have(NodeId, Result<Vec<bool>, String>),
    Chunk(Wish, Result<Chunk, TransferError>),
}

enum Chunk {
    Kept(u64),
    Wrong(blake3::Hash),
    Lacking,
    Failed(String),
}

impl<A: Ask> Swarm<A> {
    pub(super) fn new(
        content: ContentId,
        sources: &[NodeId],
        ask: Arc<A>,
        ledger: Arc<Ledger>,
        progress: Arc<Progress>,
    ) -> Self {
        let now = Instant::now();
        let all = sources.len();
        let sources: Vec<NodeId> =
            sources.iter().copied().filter(|&node| ledger.may_be_asked(now, node, content)).collect();
        let distrusted = all - sources.len();
        Self { content, sources, ask, ledger, progress, distrusted, has: BTreeMap::new() }
    }

    /// The index, from the first source whose index has the content's hash.
    pub(super) async fn index(&mut self) -> Result<ShardIndex, TransferError> {
        let mut last = self.no_source();
        for source in self.sources.clone() {
            match self
                .ask
                .ask(source, BulkRequest::Weights(self.content, WeightsRequest::Index).encode(), INDEX_BYTES_MAX)
                .await
            {
                Ok(answer) => match answer.split_first() {
                    Some((1, bytes)) => match ShardIndex::decode(bytes) {
                        Ok(index) if index.content_id() == self.content.0 => return Ok(index),
                        Ok(_) => last = self.reject(source, "another model's index".to_owned()),
                        Err(e) => last = self.reject(source, format!("a damaged index ({e})")),
                    },
                    _ => last = format!("{source} does not have it"),
                },
                Err(e) => last = format!("{source}: {e}"),
            }
        }
        Err(TransferError::Peers { what: format!("the index of model {:?}", self.content), last })
    }

    /// Excludes a source that sent data with a wrong hash. Returns a description of what it sent.
    fn reject(&mut self, node: NodeId, what: String) -> String {
        let model = blake3::Hash::from_bytes(self.content.0).to_hex();
        tracing::warn!("{node} sent {what} of model {model}: it is not asked for this model for 10 minutes");
        self.ledger.sent_wrong_bytes(Instant::now(), node, &self.progress);
        self.sources.retain(|source| *source != node);
        format!("{node} sent {what}")
    }

    /// The reason why no source can be asked.
    fn no_source(&self) -> String {
        match self.distrusted {
            0 => "there is no source".to_owned(),
            n => format!("{n} sent wrong bytes recently and {} excluded", if n == 1 { "is" } else { "are" }),
        }
    }

    /// Fetches these chunks from all holders in parallel. Chunks that arrived are kept even if this fails.
    pub(super) async fn fetch(&mut self, holding: &Arc<Holding>, chunks: &[usize]) -> Result<(), TransferError> {
        let sized = chunks.iter().map(|&chunk| (chunk, holding.bytes(&[chunk])));
        let mut fetching = Fetching {
            schedule: Schedule::new(sized),
            running: JoinSet::new(),
            aborts: BTreeMap::new(),
            unanswered: 0,
            last: self.no_source(),
        };
        for &node in &self.sources {
            match self.has.get(&node) {
                Some(has) => fetching.schedule.handle_holder(node, has.clone(), self.ledger.is_trusted(node)),
                None => fetching.request_bitmap(self, node, holding),
            }
        }
        loop {
            fetching.schedule.handle_pace(self.ask.bytes_per_second());
            fetching.ask_for_more(self, holding);
            if fetching.schedule.is_done() {
                return Ok(());
            }
            if let (0, Some(chunk)) = (fetching.unanswered, fetching.schedule.unavailable()) {
                let what = format!("chunk {chunk} of {}", holding.index.chunks().len());
                return Err(TransferError::Peers { what, last: fetching.last });
            }
            let wakeup = fetching.schedule.next_wakeup(Instant::now());
            let sleep = async {
                match wakeup {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(joined) = fetching.running.join_next() => match joined {
                    Ok(answer) => fetching.handle_answer(self, holding, answer)?,
                    Err(e) if e.is_cancelled() => {} // another source was faster
                    Err(e) => return Err(interrupted(e)),
                },
                () = sleep => fetching.give_up_overdue(),
            }
        }
    }
}

/// One run of a schedule.
struct Fetching {
    schedule: Schedule,
    running: JoinSet<SourceAnswer>,
    aborts: BTreeMap<Wish, AbortHandle>,
    /// Sources that have not yet answered which chunks they have.
    unanswered: usize,
    /// The last error of a source.
    last: String,
}

impl Fetching {
    fn request_bitmap(&mut self, swarm: &Swarm<impl Ask>, node: NodeId, holding: &Arc<Holding>) {
        let (ask, request) = (swarm.ask.clone(), BulkRequest::Weights(swarm.content, WeightsRequest::Have).encode());
        let count = holding.index.chunks().len();
        self.unanswered += 1;
        self.running.spawn(async move {
            let answer = ask.ask(node, request, 1 + count.div_ceil(8)).await;
            SourceAnswer::Have(
                node,
                answer.and_then(|answer| match answer.split_first() {
                    Some((1, bits)) => {
                        decode_bitmap(bits, count).ok_or_else(|| format!("{} bytes for {count} chunks", bits.len()))
                    }
                    Some(_) | None => Err("does not have it".to_owned()),
                }),
            )
        });
    }

    fn ask_for_more(&mut self, swarm: &Swarm<impl Ask>, holding: &Arc<Holding>) {
        while let Some(wish) = self.schedule.poll(Instant::now()) {
            if holding.is_intact(wish.chunk) {
                // Another transfer of the same content, for other layers, fetched it.
                swarm.progress.arrived(None, holding.bytes(&[wish.chunk]));
                let asked = self.schedule.handle_present(wish.chunk);
                self.forget(asked);
                continue;
            }
            let (ask, holding) = (swarm.ask.clone(), holding.clone());
            let request = BulkRequest::Weights(swarm.content, WeightsRequest::Chunk(wish.chunk as u32)).encode();
            let abort = self
                .running
                .spawn(async move { SourceAnswer::Chunk(wish, chunk(&*ask, wish, request, holding).await) });
            self.aborts.insert(wish, abort);
        }
    }

    fn handle_answer(
        &mut self,
        swarm: &mut Swarm<impl Ask>,
        holding: &Holding,
        answer: SourceAnswer,
    ) -> Result<(), TransferError> {
        let now = Instant::now();
        match answer {
            SourceAnswer::Have(node, Ok(has)) => {
                self.unanswered -= 1;
                swarm.has.insert(node, has.clone());
                self.schedule.handle_holder(node, has, swarm.ledger.is_trusted(node));
            }
            SourceAnswer::Have(node, Err(why)) => {
                self.unanswered -= 1;
                self.last = format!("{node}: {why}");
            }
            SourceAnswer::Chunk(wish, came) => {
                self.aborts.remove(&wish);
                match came? {
                    Chunk::Kept(bytes) => {
                        swarm.ledger.took(wish.node, bytes);
                        if self.schedule.is_missing(wish.chunk) {
                            swarm.progress.arrived(Some(wish.node), bytes);
                        }
                        let others = self.schedule.handle_arrived(now, wish);
                        self.forget(others);
                    }
                    Chunk::Wrong(found) => {
                        let expected = blake3::Hash::from_bytes(holding.index.chunks()[wish.chunk].hash).to_hex();
                        let found = found.to_hex();
                        let what =
                            format!("chunk {} whose hash is wrong (expected {expected}, found {found})", wish.chunk);
                        self.last = swarm.reject(wish.node, what);
                        let asked = self.schedule.handle_gone(wish.node);
                        self.forget(asked);
                    }
                    Chunk::Lacking => {
                        self.last = format!("{} does not have it", wish.node);
                        self.schedule.handle_lacking(wish);
                    }
                    Chunk::Failed(why) => {
                        self.last = format!("{}: {why}", wish.node);
                        self.schedule.handle_failed(now, wish);
                    }
                }
            }
        }
        Ok(())
    }

    fn give_up_overdue(&mut self) {
        let now = Instant::now();
        for wish in self.schedule.overdue(now) {
            self.last = format!("{} did not respond in time", wish.node);
            self.schedule.handle_failed(now, wish);
            self.forget(vec![wish]);
        }
    }

    /// Aborts requests that are no longer needed.
    fn forget(&mut self, asked: Vec<Wish>) {
        asked.iter().filter_map(|wish| self.aborts.remove(wish)).for_each(|abort| abort.abort());
    }
}

async fn chunk(ask: &impl Ask, wish: Wish, request: Vec<u8>, holding: Arc<Holding>) -> Result<Chunk, TransferError> {
    match ask.ask(wish.node, request, CHUNK_BYTES_MAX).await {
        Ok(answer) if answer.first() == Some(&1) => {
            let kept = tokio::task::spawn_blocking(move || {
                let kept = holding.keep(wish.chunk, &answer[1..]);
                kept.map(|kept| kept.map_or_else(Chunk::Wrong, |()| Chunk::Kept(answer.len() as u64 - 1)))
            });
            kept.await.map_err(interrupted)?
        }
        Ok(_) => Ok(Chunk::Lacking),
        Err(why) => Ok(Chunk::Failed(why)),
    }
}
