//! A host's disk: what was synced survives a crash, what was not is gone.
use crate::compute::LAYER_BYTES;
use node_core::id::ContentId;
use node_core::output::Record;
use std::collections::BTreeSet;
use std::ops::Range;

/// Records of one host.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    synced: Vec<Record>,
    /// Written in this life, sync still to come.
    waiting: Vec<(u64, Record)>,
    /// Highest generation a node on this disk ever had.
    generation: u64,
    /// Parts of models: embedding, layers, head.
    weights: BTreeSet<(ContentId, u32)>,
}

impl Disk {
    /// A write that is not safe yet.
    pub fn write(&mut self, seq: u64, record: Record) {
        self.waiting.push((seq, record));
    }

    /// The write of this sequence number is safe; `false` if a crash took it.
    pub fn sync(&mut self, seq: u64) -> bool {
        let Some(at) = self.waiting.iter().position(|(waiting, _)| *waiting == seq) else { return false };
        let (_, record) = self.waiting.remove(at);
        // Only the newest list of peers and the newest epoch of a job are ever read.
        self.synced.retain(|old| match (old, &record) {
            (Record::Peers(_), Record::Peers(_)) => false,
            (Record::Epoch { job: a, .. }, Record::Epoch { job: b, .. }) => a != b,
            (Record::Peers(_), Record::Epoch { .. }) | (Record::Epoch { .. }, Record::Peers(_)) => true,
        });
        self.synced.push(record);
        true
    }

    /// Has the weights of these layers; returns the bytes that had to come for that.
    pub fn fetch(&mut self, content: ContentId, layers: &Range<u32>, layers_total: u32) -> u64 {
        let embedding = (layers.start == 0).then_some(0);
        let head = (layers.end == layers_total).then_some(layers_total + 1);
        let ends =
            embedding.into_iter().chain(head).filter(|&part| self.weights.insert((content, part))).count() as u64;
        let blocks = layers.clone().filter(|&layer| self.weights.insert((content, layer + 1))).count() as u64;
        blocks * LAYER_BYTES + ends * (LAYER_BYTES / 2)
    }

    /// The machine stops.
    pub fn crash(&mut self) {
        self.waiting.clear();
    }

    /// What a restarted node reads.
    pub fn records(&self) -> &[Record] {
        &self.synced
    }

    /// The generation of the next life: above every earlier one, and never below the clock, so that a lost disk makes
    /// no ghost.
    pub fn next_generation(&mut self, unix_seconds: u64) -> u64 {
        self.generation = (self.generation + 1).max(unix_seconds);
        self.generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_takes_what_was_not_synced() {
        let mut disk = Disk::default();
        disk.write(1, Record::Peers(Vec::new()));
        assert!(disk.sync(1));
        disk.write(2, Record::Peers(Vec::new()));
        disk.crash();
        assert!(!disk.sync(2));
        assert_eq!(disk.records().len(), 1);
    }

    #[test]
    fn weights_come_once() {
        let mut disk = Disk::default();
        let model = ContentId([1; 32]);
        assert_eq!(disk.fetch(model, &(4..8), 12), 4 * LAYER_BYTES);
        assert_eq!(disk.fetch(model, &(6..12), 12), 4 * LAYER_BYTES + LAYER_BYTES / 2);
        disk.crash();
        assert_eq!(disk.fetch(model, &(0..12), 12), 4 * LAYER_BYTES + LAYER_BYTES / 2);
    }

    #[test]
    fn generations_grow_even_without_a_disk() {
        let mut disk = Disk::default();
        assert_eq!(disk.next_generation(100), 100);
        assert_eq!(disk.next_generation(100), 101);
        assert_eq!(Disk::default().next_generation(102), 102);
    }
}
