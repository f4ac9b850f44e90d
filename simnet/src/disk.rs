//! A host's disk: what was synced survives a crash; a write whose sync is still to come may be lost, kept, or torn.
//!
//! Real records carry checksums, so a torn one reads as absent and never as something else. Next: `world/weights.rs`.
use crate::compute::LAYER_BYTES;
use crate::grids::Saved;
use node_core::id::{ContentId, JobId};
use node_core::work::Contact;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// What one host wrote.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    peers: Vec<Contact>,
    /// Writes of this life whose sync is still to come, oldest first.
    waiting: VecDeque<Record>,
    /// Highest generation a node on this disk ever had.
    generation: u64,
    /// Pieces of models, readable from the write on.
    weights: BTreeSet<(ContentId, Piece)>,
    /// Complete checkpoints of simulations: the last two steps of each job.
    checkpoints: BTreeMap<(JobId, u32), Saved>,
    /// Nothing can be written.
    pub(crate) full: bool,
    /// This number of further writes fails.
    pub(crate) failures: u32,
}

/// A piece of a part of a model. Parts are the embedding (0), the layers (1 to n) and the output head (n + 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    /// Which part.
    pub part: u32,
    /// Which of its pieces, counted from 0.
    pub number: u32,
    /// Its size.
    pub bytes: u64,
}

/// One write.
#[derive(Clone, Debug)]
pub enum Record {
    /// The peers to find again after a restart, in place of those written before.
    Peers(Vec<Contact>),
    /// A piece of a model.
    Weights(ContentId, Piece),
    /// A complete checkpoint.
    Checkpoint((JobId, u32), Saved),
}

/// What a crash makes of a write that was not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Nothing of it reached the disk.
    Lost,
    /// All of it did.
    Kept,
    /// A part of it did.
    Torn,
}

impl Disk {
    /// Writes a record, which is safe after the next [`Disk::sync`] that is due for it.
    ///
    /// # Errors
    /// The disk is full, or fails.
    pub fn write(&mut self, record: Record) -> Result<(), String> {
        self.writable()?;
        if let Record::Weights(content, piece) = &record {
            self.weights.insert((*content, *piece));
        }
        self.waiting.push_back(record);
        Ok(())
    }

    /// Whether a write of no record that is modelled would succeed.
    ///
    /// # Errors
    /// The disk is full, or fails.
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

    /// The oldest write that waits is safe now.
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

    /// The process ends, and the machine with it: each write that was not synced meets a fate.
    pub fn crash(&mut self, mut fate: impl FnMut() -> Fate) {
        for record in std::mem::take(&mut self.waiting) {
            match (fate(), record) {
                (Fate::Kept, record) => self.keep(record),
                (Fate::Lost | Fate::Torn, Record::Weights(content, piece)) => {
                    self.weights.remove(&(content, piece));
                }
                (Fate::Torn, Record::Peers(_)) => self.peers.clear(),
                // The manifest is written last: without a whole one there is no checkpoint.
                (Fate::Lost, Record::Peers(_)) | (Fate::Lost | Fate::Torn, Record::Checkpoint(..)) => {}
            }
        }
    }

    /// Gives the disk a whole model.
    pub fn give(&mut self, content: ContentId, layers_total: u32) {
        self.weights.extend(pieces(&(0..layers_total), layers_total).map(|piece| (content, piece)));
    }

    /// Whether a piece of a model is here.
    pub fn has(&self, content: ContentId, piece: Piece) -> bool {
        self.weights.contains(&(content, piece))
    }

    /// Pieces of a model that are here.
    pub fn pieces(&self, content: ContentId) -> BTreeSet<Piece> {
        self.weights.iter().filter(|(of, _)| *of == content).map(|(_, piece)| *piece).collect()
    }

    /// Models of which something is here.
    pub fn contents(&self) -> Vec<ContentId> {
        let mut contents: Vec<ContentId> = self.weights.iter().map(|(content, _)| *content).collect();
        contents.dedup();
        contents
    }

    /// Complete checkpoints: of which job, and after which step.
    pub fn checkpoints(&self) -> impl Iterator<Item = (&(JobId, u32), &Saved)> {
        self.checkpoints.iter()
    }

    /// A person gives a job the checkpoint of another one.
    pub fn adopt_checkpoint(&mut self, from: JobId, to: JobId, step: u32) -> bool {
        let Some(cells) = self.checkpoint(from, step).cloned() else { return false };
        self.keep(Record::Checkpoint((to, step), cells));
        true
    }

    /// A complete checkpoint.
    pub fn checkpoint(&self, job: JobId, step: u32) -> Option<&Saved> {
        self.checkpoints.get(&(job, step))
    }

    /// The peers that a restarted node reads.
    pub fn peers(&self) -> &[Contact] {
        &self.peers
    }

    /// The generation of the next life: above every earlier one, and never below the clock, so that a lost disk makes
    /// no ghost. It is on the disk before the node speaks.
    pub fn next_generation(&mut self, unix_seconds: u64) -> u64 {
        self.generation = (self.generation + 1).max(unix_seconds);
        self.generation
    }
}

/// The pieces of these layers; the first layer brings the embedding, the last one the output head.
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
/// Checkpoints of a job that stay, as in `node/src/submissions/checkpoints.rs`.
const CHECKPOINTS_KEPT: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use node_core::id::NodeId;

    fn peer(id: u8) -> Contact {
        Contact { node: NodeId([id; 16]), peer_id: vec![id], gossip: Vec::new(), data: Vec::new() }
    }

    #[test]
    fn a_crash_takes_what_was_not_synced() {
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
    fn pieces_are_whole_layers_with_the_ends_of_the_model() {
        let bytes = |layers: Range<u32>| pieces(&layers, 12).map(|piece| piece.bytes).sum::<u64>();
        assert_eq!(bytes(4..8), 4 * LAYER_BYTES);
        assert_eq!(bytes(6..12), 6 * LAYER_BYTES + LAYER_BYTES / 2);
        assert_eq!(bytes(0..12), 13 * LAYER_BYTES);
    }

    #[test]
    fn a_piece_that_was_not_synced_may_be_gone_and_never_is_another() {
        let model = ContentId([1; 32]);
        let all: Vec<Piece> = pieces(&(0..2), 2).collect();
        for fate in [Fate::Lost, Fate::Kept, Fate::Torn] {
            let mut disk = Disk::default();
            disk.write(Record::Weights(model, all[0])).unwrap();
            disk.sync();
            disk.write(Record::Weights(model, all[1])).unwrap();
            assert!(disk.has(model, all[1]), "readable at once");
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
    fn a_full_disk_takes_nothing_and_a_failing_one_recovers() {
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
