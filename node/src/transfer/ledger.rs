//! Records what peers sent and received, which of them sent wrong bytes, and the transfers in progress.
use super::view::{PeerWeights, TransferView};
use crate::config::Size;
use crate::views::count;
use node_core::id::{ContentId, NodeId};
use parking_lot::{Mutex, MutexGuard};
use partitioner::explain;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How long a peer that sent a wrong chunk is excluded for that content: its disk may be replaced meanwhile.
const EXCLUDED_FOR: Duration = Duration::from_secs(600);
/// Most peers recorded: more than a node works with in any mesh.
const PEERS_MAX: usize = 1024;

/// Exists as long as its library.
#[derive(Default)]
pub(super) struct Ledger {
    peers: Mutex<BTreeMap<NodeId, PeerRecord>>,
    transfers: Mutex<BTreeMap<u64, Arc<Progress>>>,
    next_transfer: AtomicU64,
    served_bytes: AtomicU64,
    served_chunks: AtomicU64,
}

#[derive(Default)]
struct PeerRecord {
    chunks: u64,
    bytes: u64,
    refused: u64,
    /// Contents of which it sent wrong bytes, and until when it is excluded for each.
    rests: BTreeMap<ContentId, Instant>,
}

/// The state of a transfer in progress.
pub(super) struct Progress {
    pub(super) content: ContentId,
    pub(super) started: Instant,
    model: String,
    layers: std::ops::Range<usize>,
    total: AtomicU64,
    done: AtomicU64,
    peers: Mutex<BTreeSet<NodeId>>,
    refused: AtomicU64,
}

impl Progress {
    /// Adds missing bytes.
    pub(super) fn needs(&self, bytes: u64) {
        self.total.fetch_add(bytes, Relaxed);
    }

    /// Counts a chunk as fetched: from `from`, or by another transfer of the same content.
    pub(super) fn arrived(&self, from: Option<NodeId>, bytes: u64) {
        self.done.fetch_add(bytes, Relaxed);
        lock(&self.peers).extend(from);
    }

    /// Bytes still to be written.
    pub(super) fn left(&self) -> u64 {
        self.total.load(Relaxed).saturating_sub(self.done.load(Relaxed))
    }

    fn view(&self) -> TransferView {
        TransferView {
            model: self.model.clone(),
            first_layer: self.layers.start,
            end_layer: self.layers.end,
            bytes_total: self.total.load(Relaxed),
            bytes_done: self.done.load(Relaxed),
            peers: lock(&self.peers).len(),
        }
    }

    /// A line for the log; `None` if nothing was missing.
    pub(super) fn summary(&self, now: Instant) -> Option<String> {
        let (view, seconds) = (self.view(), now.saturating_duration_since(self.started).as_secs_f64());
        (view.bytes_total > 0).then(|| {
            format!(
                "fetched {} of {}, layers {}, from {} in {seconds:.1} s ({}/s), {} rejected",
                Size(view.bytes_done),
                view.model,
                explain::layers(&(view.first_layer as u32..view.end_layer as u32)),
                count(view.peers, "peer"),
                Size((view.bytes_done as f64 / seconds.max(1e-3)) as u64),
                count(self.refused.load(Relaxed) as usize, "chunk"),
            )
        })
    }
}

/// Registers a transfer while this exists.
pub(super) struct Ongoing {
    pub(super) progress: Arc<Progress>,
    ledger: Arc<Ledger>,
    number: u64,
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        lock(&self.ledger.transfers).remove(&self.number);
    }
}

impl Ledger {
    pub(super) fn begin(self: &Arc<Self>, content: ContentId, name: &str, layers: std::ops::Range<usize>) -> Ongoing {
        let progress = Arc::new(Progress {
            content,
            started: Instant::now(),
            model: name.to_owned(),
            layers,
            total: AtomicU64::new(0),
            done: AtomicU64::new(0),
            peers: Mutex::default(),
            refused: AtomicU64::new(0),
        });
        let number = self.next_transfer.fetch_add(1, Relaxed);
        lock(&self.transfers).insert(number, progress.clone());
        Ongoing { progress, ledger: self.clone(), number }
    }

    /// Whether a transfer of the content is in progress.
    pub(super) fn is_fetched(&self, content: ContentId) -> bool {
        lock(&self.transfers).values().any(|t| t.content == content)
    }

    /// Bytes that the transfers in progress will still write.
    pub(super) fn reserved(&self) -> u64 {
        lock(&self.transfers).values().map(|t| t.left()).sum()
    }

    pub(super) fn took(&self, node: NodeId, bytes: u64) {
        self.record(node, |record| {
            record.chunks += 1;
            record.bytes += bytes;
        });
    }

    /// Records that a peer sent data with a wrong hash.
    pub(super) fn sent_wrong_bytes(&self, now: Instant, node: NodeId, progress: &Progress) {
        progress.refused.fetch_add(1, Relaxed);
        self.record(node, |record| {
            record.refused += 1;
            record.rests.retain(|_, until| *until > now);
            record.rests.insert(progress.content, now + EXCLUDED_FOR);
        });
    }

    /// Whether a peer may be asked for this content.
    pub(super) fn may_be_asked(&self, now: Instant, node: NodeId, content: ContentId) -> bool {
        lock(&self.peers).get(&node).and_then(|r| r.rests.get(&content)).is_none_or(|until| *until <= now)
    }

    /// Whether the peer never sent wrong data.
    pub(super) fn is_trusted(&self, node: NodeId) -> bool {
        lock(&self.peers).get(&node).is_none_or(|record| record.refused == 0)
    }

    pub(super) fn served(&self, bytes: u64) {
        self.served_chunks.fetch_add(1, Relaxed);
        self.served_bytes.fetch_add(bytes, Relaxed);
    }

    /// Chunks served to peers, and their bytes.
    pub(super) fn given(&self) -> (u64, u64) {
        (self.served_chunks.load(Relaxed), self.served_bytes.load(Relaxed))
    }

    pub(super) fn peers(&self) -> Vec<PeerWeights> {
        let view = |(node, r): (&NodeId, &PeerRecord)| PeerWeights {
            node: crate::views::hex(node),
            chunks: r.chunks,
            bytes: r.bytes,
            refused: r.refused,
        };
        lock(&self.peers).iter().map(view).collect()
    }

    pub(super) fn transfers(&self) -> Vec<TransferView> {
        lock(&self.transfers).values().map(|t| t.view()).collect()
    }

    fn record(&self, node: NodeId, change: impl FnOnce(&mut PeerRecord)) {
        let mut peers = lock(&self.peers);
        if peers.len() < PEERS_MAX || peers.contains_key(&node) {
            change(peers.entry(node).or_default());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
