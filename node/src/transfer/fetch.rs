//! Gets chunks from peers as `schedule.rs` decides: asks, hashes what comes, writes it in its place.
use super::holding::Holding;
use super::ledger::{Ledger, Progress};
use super::request::{WeightsRequest, decode_bitmap};
use super::schedule::{Ask as Wish, Schedule};
use super::{Ask, CHUNK_BYTES_MAX, INDEX_BYTES_MAX, TransferError, interrupted};
use crate::bulk::BulkRequest;
use kernels::weights::ShardIndex;
use node_core::id::{ContentId, NodeId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use tokio::task::{AbortHandle, JoinSet};

/// Everybody who may have a content, and how to ask them.
pub(super) struct Swarm<A> {
    pub(super) content: ContentId,
    pub(super) sources: Vec<NodeId>,
    pub(super) ask: Arc<A>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) progress: Arc<Progress>,
    /// Sources not asked because of what they gave before.
    distrusted: usize,
    /// What each said it has.
    has: BTreeMap<NodeId, Vec<bool>>,
}

/// What came of a question.
enum Answer {
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

    /// The index, from whoever gives one whose hash is the content's id.
    pub(super) async fn index(&mut self) -> Result<ShardIndex, TransferError> {
        let mut last = self.nobody();
        for source in self.sources.clone() {
            match self
                .ask
                .ask(source, BulkRequest::Weights(self.content, WeightsRequest::Index).encode(), INDEX_BYTES_MAX)
                .await
            {
                Ok(answer) => match answer.split_first() {
                    Some((1, bytes)) => match ShardIndex::decode(bytes) {
                        Ok(index) if index.content_id() == self.content.0 => return Ok(index),
                        Ok(_) => last = self.lied(source, "another model's index".to_owned()),
                        Err(e) => last = self.lied(source, format!("a damaged index ({e})")),
                    },
                    _ => last = format!("{source} does not hold it"),
                },
                Err(e) => last = format!("{source}: {e}"),
            }
        }
        Err(TransferError::Peers { what: format!("the index of model {:?}", self.content), last })
    }

    /// A source gave something that is not what its hash says: it is not asked again for now. Returns what it did.
    fn lied(&mut self, node: NodeId, what: String) -> String {
        let model = blake3::Hash::from_bytes(self.content.0).to_hex();
        tracing::warn!(
            "{node} gave {what} of model {model}: it is not asked for this model for 10 minutes; others are"
        );
        self.ledger.lied(Instant::now(), node, &self.progress);
        self.sources.retain(|source| *source != node);
        format!("{node} gave {what}")
    }

    /// Why there is no answer, where nobody could be asked.
    fn nobody(&self) -> String {
        match self.distrusted {
            0 => "there is no source".to_owned(),
            n => format!("{n} gave wrong bytes lately and {} not asked", if n == 1 { "is" } else { "are" }),
        }
    }

    /// Fetches these chunks from all holders at once. What arrived stays, whatever happens.
    pub(super) async fn fetch(&mut self, holding: &Arc<Holding>, chunks: &[usize]) -> Result<(), TransferError> {
        let sized = chunks.iter().map(|&chunk| (chunk, holding.bytes(&[chunk])));
        let mut fetching = Fetching {
            schedule: Schedule::new(sized),
            running: JoinSet::new(),
            aborts: BTreeMap::new(),
            unheard: 0,
            last: self.nobody(),
        };
        for &node in &self.sources {
            match self.has.get(&node) {
                Some(has) => fetching.schedule.handle_holder(node, has.clone(), self.ledger.is_trusted(node)),
                None => fetching.ask_what_it_has(self, node, holding),
            }
        }
        loop {
            fetching.schedule.handle_pace(self.ask.bytes_per_second());
            fetching.ask_for_more(self, holding);
            if fetching.schedule.is_done() {
                return Ok(());
            }
            if let (0, Some(chunk)) = (fetching.unheard, fetching.schedule.stuck()) {
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
                    Ok(answer) => fetching.hear(self, holding, answer)?,
                    Err(e) if e.is_cancelled() => {} // another was faster
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
    running: JoinSet<Answer>,
    aborts: BTreeMap<Wish, AbortHandle>,
    /// Sources that have not yet said what they have.
    unheard: usize,
    /// What the last one that could not give something said.
    last: String,
}

impl Fetching {
    fn ask_what_it_has(&mut self, swarm: &Swarm<impl Ask>, node: NodeId, holding: &Arc<Holding>) {
        let (ask, request) = (swarm.ask.clone(), BulkRequest::Weights(swarm.content, WeightsRequest::Have).encode());
        let count = holding.index.chunks().len();
        self.unheard += 1;
        self.running.spawn(async move {
            let answer = ask.ask(node, request, 1 + count.div_ceil(8)).await;
            Answer::Have(
                node,
                answer.and_then(|answer| match answer.split_first() {
                    Some((1, bits)) => {
                        decode_bitmap(bits, count).ok_or_else(|| format!("{} bytes for {count} chunks", bits.len()))
                    }
                    Some(_) | None => Err("does not hold it".to_owned()),
                }),
            )
        });
    }

    fn ask_for_more(&mut self, swarm: &Swarm<impl Ask>, holding: &Arc<Holding>) {
        while let Some(wish) = self.schedule.poll(Instant::now()) {
            if holding.is_intact(wish.chunk) {
                // Another transfer of the same content, for other layers, brought it.
                swarm.progress.arrived(None, holding.bytes(&[wish.chunk]));
                let asked = self.schedule.handle_present(wish.chunk);
                self.forget(asked);
                continue;
            }
            let (ask, holding) = (swarm.ask.clone(), holding.clone());
            let request = BulkRequest::Weights(swarm.content, WeightsRequest::Chunk(wish.chunk as u32)).encode();
            let abort =
                self.running.spawn(async move { Answer::Chunk(wish, chunk(&*ask, wish, request, holding).await) });
            self.aborts.insert(wish, abort);
        }
    }

    fn hear(&mut self, swarm: &mut Swarm<impl Ask>, holding: &Holding, answer: Answer) -> Result<(), TransferError> {
        let now = Instant::now();
        match answer {
            Answer::Have(node, Ok(has)) => {
                self.unheard -= 1;
                swarm.has.insert(node, has.clone());
                self.schedule.handle_holder(node, has, swarm.ledger.is_trusted(node));
            }
            Answer::Have(node, Err(why)) => {
                self.unheard -= 1;
                self.last = format!("{node}: {why}");
            }
            Answer::Chunk(wish, came) => {
                self.aborts.remove(&wish);
                match came? {
                    Chunk::Kept(bytes) => {
                        swarm.ledger.took(wish.node, bytes);
                        if self.schedule.wants(wish.chunk) {
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
                        self.last = swarm.lied(wish.node, what);
                        let asked = self.schedule.handle_gone(wish.node);
                        self.forget(asked);
                    }
                    Chunk::Lacking => {
                        self.last = format!("{} does not hold it", wish.node);
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
            self.last = format!("{} does not answer", wish.node);
            self.schedule.handle_failed(now, wish);
            self.forget(vec![wish]);
        }
    }

    /// These need not be sent any more.
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
