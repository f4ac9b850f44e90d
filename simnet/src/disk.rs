//! A simulated disk: synced records survive a crash; an unsynced write may be lost, kept or torn.
//!
//! Real records carry checksums, so a torn record reads as absent, never as another record. Next: `world/weights.rs`.
use crate::compute::LAYER_BYTES;
use crate::grids::Saved;
use node_core::id::{ContentId, JobId};
use node_core::work::Contact;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// The disk of one host.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    peers: Vec<Contact>,
    /// Unsynced writes of the current process, oldest first.
    waiting: VecDeque<Record>,
    /// The highest generation that any process on this disk has used.
    generation: u64,
    /// Model pieces; readable as soon as they are written, before the sync.
    weights: BTreeSet<(ContentId, Piece)>,
    /// Complete simulation checkpoints: cells by job and step, the last two steps of each job.
    checkpoints: BTreeMap<(JobId, u32), Saved>,
    /// Every write fails: no space left.
    pub(crate) full: bool,
    /// Number of upcoming writes that fail.
    pub(crate) failures: u32,
}

/// A piece of one part of a model. Part 0 is the embedding, parts 1 to n are the layers, part n + 1 is the output head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    /// Part number.
    pub part: u32,
    /// Piece number within the part, from 0.
    pub number: u32,
    /// Size.
    pub bytes: u64,
}

/// One write.
#[derive(Clone, Debug)]
pub enum Record {
    /// The peers to contact after a restart; replaces the previous list.
    Peers(Vec<Contact>),
    /// A piece of a model.
    Weights(ContentId, Piece),
    /// A complete checkpoint: its job and step, and all cells.
    Checkpoint((JobId, u32), Saved),
}

/// What a crash does to an unsynced write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Nothing of it reached the disk.
    Lost,
    /// The whole record reached the disk.
    Kept,
    /// A part of the record reached the disk.
    Torn,
}

impl Disk {
    /// Queues a record; the [`Disk::sync`] that follows it makes it durable.
    ///
    /// # Errors
    /// If the disk is full or fails.
    pub fn write(&mut self, record: Record) -> Result<(), String> {
        self.writable()?;
        if let Record::Weights(content, piece) = &record {
            self.weights.insert((*content, *piece));
        }
        self.waiting.push_back(record);
        Ok(())
    }

    /// Checks whether a write succeeds, for data whose durability is not modelled.
    ///
    /// # Errors
    /// If the disk is full or fails.
    pub fn writable(&mut self) -> Result<(), String> {
        if self.full {
            return Err("no space left on the disk".into());
        }
        if self.failures > 0 {
            self.failures -= 1;
            return Err("the disk failed (input/output error)".into());
        }
        Ok(())
    }

    /// Makes the oldest unsynced write durable.
    pub fn sync(&mut self) {
        if let Some(record) = self.waiting.pop_front() {
            self.keep(record);
        }
    }

    fn keep(&mut self, record: Record) {
        match record {
            Record::Peers(peers) => self.peers = peers,
            Record::Weights(content, piece) => _ = self.weights.insert((content, piece)),
            Record::Checkpoint((job, step), cells) => {
                self.checkpoints.insert((job, step), cells);
                let steps: Vec<u32> = self.checkpoints.range((job, 0)..=(job, u32::MAX)).map(|(at, _)| at.1).collect();
                for &step in steps.iter().rev().skip(CHECKPOINTS_KEPT) {
                    self.checkpoints.remove(&(job, step));
                }
            }
        }
    }

    /// The machine crashes: `fate` decides about each unsynced write.
    pub fn crash(&mut self, mut fate: impl FnMut() -> Fate) {
        for record in std::mem::take(&mut self.waiting) {
            match (fate(), record) {
                (Fate::Kept, record) => self.keep(record),
                (Fate::Lost | Fate::Torn, Record::Weights(content, piece)) => {
                    self.weights.remove(&(content, piece));
                }
                (Fate::Torn, Record::Peers(_)) => self.peers.clear(),
                // The manifest is written last: if it is lost or torn, there is no checkpoint.
                (Fate::Lost, Record::Peers(_)) | (Fate::Lost | Fate::Torn, Record::Checkpoint(..)) => {}
            }
        }
    }

    /// Stores all pieces of a model.
    pub fn give(&mut self, content: ContentId, layers_total: u32) {
        self.weights.extend(pieces(&(0..layers_total), layers_total).map(|piece| (content, piece)));
    }

    /// Whether a piece of a model is stored.
    pub fn has(&self, content: ContentId, piece: Piece) -> bool {
        self.weights.contains(&(content, piece))
    }

    /// The stored pieces of a model.
    pub fn pieces(&self, content: ContentId) -> BTreeSet<Piece> {
        self.weights.iter().filter(|(of, _)| *of == content).map(|(_, piece)| *piece).collect()
    }

    /// Models with at least one stored piece.
    pub fn contents(&self) -> Vec<ContentId> {
        let mut contents: Vec<ContentId> = self.weights.iter().map(|(content, _)| *content).collect();
        contents.dedup();
        contents
    }

    /// Complete checkpoints by (job, step).
    pub fn checkpoints(&self) -> impl Iterator<Item = (&(JobId, u32), &Saved)> {
        self.checkpoints.iter()
    }

    /// Copies a checkpoint to another job, as an operator does. False if there is none.
    pub fn adopt_checkpoint(&mut self, from: JobId, to: JobId, step: u32) -> bool {
        let Some(cells) = self.checkpoint(from, step).cloned() else { return false };
        self.keep(Record::Checkpoint((to, step), cells));
        true
    }

    /// The checkpoint of a job after this step, if it is complete.
    pub fn checkpoint(&self, job: JobId, step: u32) -> Option<&Saved> {
        self.checkpoints.get(&(job, step))
    }

    /// The peers that a restarted node contacts.
    pub fn peers(&self) -> &[Contact] {
        &self.peers
    }

    /// The generation of the next process: above all earlier ones, and at least the clock, so that a node that lost its
    /// disk does not reuse one. It is durable before the node sends anything.
    pub fn next_generation(&mut self, unix_seconds: u64) -> u64 {
        self.generation = (self.generation + 1).max(unix_seconds);
        self.generation
    }
}

/// The pieces of these layers. The first layer includes the embedding, the last one the output head.
pub fn pieces(layers: &Range<u32>, layers_total: u32) -> impl Iterator<Item = Piece> + use<> {
    let embedding = (layers.start == 0).then_some((0, LAYER_BYTES / 2));
    let head = (layers.end == layers_total).then_some((layers_total + 1, LAYER_BYTES / 2));
    let blocks = layers.clone().map(|layer| (layer + 1, LAYER_BYTES));
    embedding.into_iter().chain(blocks).chain(head).flat_map(|(part, bytes)| {
        (0..bytes.div_ceil(PIECE_BYTES)).map(move |number| {
            let bytes = PIECE_BYTES.min(bytes - number * PIECE_BYTES);
            Piece { part, number: u32::try_from(number).unwrap_or(u32::MAX), bytes }
        })
    })
}

/// Largest piece.
const PIECE_BYTES: u64 = 4 << 20;
/// Checkpoints kept per job, as in `node/src/submissions/checkpoints.rs`.
const CHECKPOINTS_KEPT: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use node_core::id::NodeId;

    fn peer(id: u8) -> Contact {
        Contact { node: NodeId([id; 16]), peer_id: vec![id], gossip: Vec::new(), data: Vec::new() }
    }

    #[test]
    fn a_crash_decides_the_fate_of_unsynced_writes() {
        let mut disk = Disk::default();
        disk.write(Record::Peers(vec![peer(1)])).unwrap();
        disk.sync();
        disk.write(Record::Peers(vec![peer(2)])).unwrap();
        disk.crash(|| Fate::Lost);
        disk.sync();
        assert_eq!(disk.peers(), [peer(1)]);
        disk.write(Record::Peers(vec![peer(3)])).unwrap();
        disk.crash(|| Fate::Kept);
        assert_eq!(disk.peers(), [peer(3)]);
        disk.write(Record::Peers(vec![peer(4)])).unwrap();
        disk.crash(|| Fate::Torn);
        assert_eq!(disk.peers(), [], "a torn record reads as absent");
    }

    #[test]
    fn pieces_cover_layers_embedding_and_output_head() {
        let bytes = |layers: Range<u32>| pieces(&layers, 12).map(|piece| piece.bytes).sum::<u64>();
        assert_eq!(bytes(4..8), 4 * LAYER_BYTES);
        assert_eq!(bytes(6..12), 6 * LAYER_BYTES + LAYER_BYTES / 2);
        assert_eq!(bytes(0..12), 13 * LAYER_BYTES);
    }

    #[test]
    fn an_unsynced_piece_is_lost_or_kept_never_corrupt() {
        let model = ContentId([1; 32]);
        let all: Vec<Piece> = pieces(&(0..2), 2).collect();
        for fate in [Fate::Lost, Fate::Kept, Fate::Torn] {
            let mut disk = Disk::default();
            disk.write(Record::Weights(model, all[0])).unwrap();
            disk.sync();
            disk.write(Record::Weights(model, all[1])).unwrap();
            assert!(disk.has(model, all[1]), "readable before the sync");
            disk.crash(|| fate);
            assert_eq!((disk.has(model, all[0]), disk.has(model, all[1])), (true, fate == Fate::Kept), "{fate:?}");
        }
    }

    #[test]
    fn an_acknowledged_checkpoint_survives_and_two_are_kept() {
        let mut disk = Disk::default();
        let job = JobId(7);
        for step in [100, 200, 300] {
            disk.write(Record::Checkpoint((job, step), Saved::new())).unwrap();
            disk.sync();
        }
        disk.write(Record::Checkpoint((job, 400), Saved::new())).unwrap();
        disk.crash(|| Fate::Torn);
        let there: Vec<u32> = (1..5).map(|n| n * 100).filter(|step| disk.checkpoint(job, *step).is_some()).collect();
        assert_eq!(there, [200, 300]);
    }

    #[test]
    fn a_full_disk_rejects_writes_and_a_failing_one_recovers() {
        let mut disk = Disk { full: true, ..Disk::default() };
        assert!(disk.write(Record::Peers(vec![peer(1)])).is_err());
        (disk.full, disk.failures) = (false, 1);
        assert!(disk.write(Record::Peers(vec![peer(1)])).is_err());
        assert!(disk.write(Record::Peers(vec![peer(1)])).is_ok());
    }

    #[test]
    fn generations_grow_even_without_a_disk() {
        let mut disk = Disk::default();
        assert_eq!(disk.next_generation(100), 100);
        assert_eq!(disk.next_generation(100), 101);
        assert_eq!(Disk::default().next_generation(102), 102);
    }
}
