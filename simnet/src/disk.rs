//! A host's disk: what was synced survives a crash, what was not is gone.
use crate::compute::LAYER_BYTES;
use node_core::id::ContentId;
use node_core::work::Contact;
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

/// What one host wrote.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    peers: Vec<Contact>,
    /// Lists of peers written in this life, sync still to come.
    waiting: VecDeque<Vec<Contact>>,
    /// Highest generation a node on this disk ever had.
    generation: u64,
    /// Parts of models: embedding, layers, head.
    weights: BTreeSet<(ContentId, u32)>,
}

impl Disk {
    /// A write that is not safe yet.
    pub fn write(&mut self, peers: Vec<Contact>) {
        self.waiting.push_back(peers);
    }

    /// The oldest write that waits is safe now.
    pub fn sync(&mut self) {
        if let Some(peers) = self.waiting.pop_front() {
            self.peers = peers;
        }
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

    /// The peers that a restarted node reads.
    pub fn peers(&self) -> &[Contact] {
        &self.peers
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
    use node_core::id::NodeId;

    #[test]
    fn a_crash_takes_what_was_not_synced() {
        let peer = |id: u8| Contact { node: NodeId([id; 16]), peer_id: vec![id], gossip: Vec::new(), data: Vec::new() };
        let mut disk = Disk::default();
        disk.write(vec![peer(1)]);
        disk.sync();
        disk.write(vec![peer(2)]);
        disk.crash();
        disk.sync();
        assert_eq!(disk.peers(), [peer(1)]);
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
