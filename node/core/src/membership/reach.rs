//! How a node finds the members it knows of, and keeps connections to them.
use super::{ANNOUNCE_MAX, FULL_MESH_MAX, Life, Membership, MembershipOutput};
use crate::id::{Generation, NodeId};
use crate::time::{Duration, Instant};
use alloc::vec::Vec;
use rand::RngExt;

impl Membership {
    // ---- finding the mesh

    /// While alone: ask everyone known, ever more slowly. Otherwise: ask contacts that are not members, which heals a
    /// mesh that came apart.
    pub(super) fn announce_tick(&mut self, now: Instant) {
        let alone = self.swim.alone();
        let strangers: Vec<NodeId> = self.contacts.keys().copied().filter(|node| !self.is_alive(*node)).collect();
        let wanted = if alone { ANNOUNCE_ALONE } else { 1 };
        for _ in 0..wanted.min(strangers.len()) {
            let node = strangers[self.rng.random_range(0..strangers.len())];
            self.announce_to(now, node);
            if alone {
                self.connect(now, node);
            }
        }
        self.announce_pause = if alone { (self.announce_pause * 2).min(ANNOUNCE_MAX) } else { ANNOUNCE_MAX };
        self.next_announce = now + self.announce_pause;
        self.redial(now);
    }

    pub(super) fn announce_to(&mut self, now: Instant, node: NodeId) {
        let addrs = self.contacts.get(&node).map(|found| found.gossip.clone()).unwrap_or_default();
        for addr in addrs.into_iter().take(crate::limits::ADVERT_ADDRS_MAX) {
            let mut out = Vec::new();
            self.swim.announce(now, Life { node, generation: Generation(0), addr: Some(addr) }, &mut out);
            self.settle(now, out);
        }
    }

    // ---- connections

    /// Open a connection to a peer if its key and address are known and none was tried lately.
    pub fn connect(&mut self, now: Instant, node: NodeId) {
        let recent = self.dialled.get(&node).is_some_and(|at| now.since(*at) < REDIAL);
        if recent || self.connected.contains_key(&node) {
            return;
        }
        if let Some((peer_id, addrs)) = self.data_contact(node).filter(|(_, addrs)| !addrs.is_empty()) {
            self.dialled.insert(node, now);
            self.output.push_back(MembershipOutput::Connect { node, peer_id, addrs });
        }
    }

    /// The same for a peer that running work needs: it does not matter when it was tried.
    pub fn reconnect(&mut self, now: Instant, node: NodeId) {
        self.dialled.remove(&node);
        self.connect(now, node);
    }

    /// In a small mesh everybody keeps a connection to everybody, so that a re-plan finds them warm; the smaller id
    /// dials.
    pub(super) fn connect_small_mesh(&mut self, now: Instant, node: NodeId) {
        if self.node < node && self.peers.len() <= FULL_MESH_MAX {
            self.connect(now, node);
        }
    }

    fn redial(&mut self, now: Instant) {
        if self.peers.len() <= FULL_MESH_MAX {
            let alive: Vec<NodeId> = self.alive().collect();
            for node in alive {
                // The larger id dials too when the smaller has not come through.
                self.connect(now, node);
            }
        }
    }
}

/// Contacts asked at a time while alone.
const ANNOUNCE_ALONE: usize = 8;
/// Pause between two attempts to connect to one peer.
const REDIAL: Duration = Duration::from_secs(4);
