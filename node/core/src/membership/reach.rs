//! Contacts and connections: how a node finds the members it knows of, and keeps connections to them.
use super::{
    ANNOUNCE_MAX, CONTACTS_MAX, FULL_MESH_MAX, KnownPeer, Life, Membership, MembershipOutput, STRANGER_DIALS_MAX,
};
use crate::id::{Generation, NodeId};
use crate::time::{Duration, Instant};
use alloc::vec::Vec;
use core::net::SocketAddr;
use rand::RngExt;

impl Membership {
    // ---- finding the mesh

    /// While alone: announces to several known contacts, ever more slowly. Otherwise: announces to one contact that is not a
    /// member, which heals a partitioned mesh.
    pub(super) fn announce_tick(&mut self, now: Instant) {
        let alone = self.swim.alone();
        let due = self.contacts.iter().filter(|(node, found)| found.next <= now && !self.is_alive(**node));
        let strangers: Vec<NodeId> = due.map(|(node, _)| *node).collect();
        let wanted = if alone { ANNOUNCE_ALONE } else { 1 };
        for _ in 0..wanted.min(strangers.len()) {
            let node = strangers[self.rng.random_range(0..strangers.len())];
            self.try_contact(now, node, alone);
        }
        self.announce_pause = if alone { (self.announce_pause * 2).min(ANNOUNCE_MAX) } else { ANNOUNCE_MAX };
        self.next_announce = now + self.announce_pause;
        self.redial(now);
    }

    /// Announces to a contact that is not a member, and dials it, unless it was tried recently. A contact that never answers is
    /// tried ever more rarely: its address may be invented.
    pub(super) fn try_contact(&mut self, now: Instant, node: NodeId, dial: bool) {
        let Some(found) = self.contacts.get_mut(&node).filter(|found| found.next <= now) else { return };
        if !found.answered && found.tries >= TRIES_MAX {
            return self.drop_contact(node);
        }
        found.tries = found.tries.saturating_add(1);
        let most = if found.answered { RETRY_ANSWERED_MAX } else { RETRY_MAX };
        found.next = now + (RETRY * (1 << (found.tries - 1).min(RETRY_DOUBLINGS))).min(most);
        let addrs = found.gossip.clone();
        for addr in addrs.into_iter().take(crate::limits::ADVERT_ADDRS_MAX) {
            let mut out = Vec::new();
            self.swim.announce(now, Life { node, generation: Generation(0), addr: Some(addr) }, &mut out);
            self.settle(now, out);
        }
        if dial {
            self.connect(now, node);
        }
    }

    /// Records where a node was found. What is known of its answers stays.
    pub(super) fn keep_contact(
        &mut self,
        at: Instant,
        node: NodeId,
        peer_id: Vec<u8>,
        gossip: Vec<SocketAddr>,
        data: Vec<SocketAddr>,
    ) {
        if !self.contacts.contains_key(&node) && self.contacts.len() >= CONTACTS_MAX {
            // Contacts that never answered are dropped first, the most tried first: those are most likely invented.
            let rank = |found: &KnownPeer| (found.answered, core::cmp::Reverse(found.tries), found.at);
            let worst = self.contacts.iter().min_by_key(|(_, found)| rank(found)).map(|(node, _)| *node);
            worst.into_iter().for_each(|node| self.drop_contact(node));
        }
        let answers = self.is_alive(node) || self.connected.contains_key(&node);
        let (tries, next, answered) =
            self.contacts.get(&node).map_or((0, at, answers), |found| (found.tries, found.next, found.answered));
        self.contacts.insert(node, KnownPeer { peer_id, gossip, data, at, tries, next, answered });
    }

    /// A contact was heard or reached: it may be tried again immediately.
    pub(super) fn contact_answered(&mut self, now: Instant, node: NodeId) {
        self.reaching.remove(&node);
        if let Some(found) = self.contacts.get_mut(&node) {
            (found.tries, found.next, found.answered) = (0, now, true);
        }
    }

    pub(super) fn drop_contact(&mut self, node: NodeId) {
        self.contacts.remove(&node);
        if !self.peers.contains_key(&node) {
            self.dialled.remove(&node);
        }
    }

    // ---- connections

    /// Opens a connection to a peer if its key and address are known and none was tried recently.
    pub fn connect(&mut self, now: Instant, node: NodeId) {
        let recent = self.dialled.get(&node).is_some_and(|at| now.since(*at) < REDIAL);
        if recent || self.connected.contains_key(&node) {
            return;
        }
        if let Some((peer_id, addrs)) = self.data_contact(node).filter(|(_, addrs)| !addrs.is_empty()) {
            if !self.peers.contains_key(&node) && !self.may_reach(now, node) {
                return;
            }
            self.dialled.insert(node, now);
            self.output.push_back(MembershipOutput::Connect { node, peer_id, addrs });
        }
    }

    /// Takes one of the few dials to nodes that are not members; false if none is left.
    fn may_reach(&mut self, now: Instant, node: NodeId) -> bool {
        self.reaching.retain(|_, since| now.since(*since) < REACH_MAX);
        let room = self.reaching.len() < STRANGER_DIALS_MAX;
        if room {
            self.reaching.insert(node, now);
        }
        room
    }

    /// Opens a connection to a peer that running work needs, even if one was tried recently.
    pub fn reconnect(&mut self, now: Instant, node: NodeId) {
        self.dialled.remove(&node);
        self.connect(now, node);
    }

    /// Keeps a small mesh fully connected, so that a new placement finds warm connections; the smaller id dials.
    pub(super) fn connect_small_mesh(&mut self, now: Instant, node: NodeId) {
        if self.node < node && self.peers.len() <= FULL_MESH_MAX {
            self.connect(now, node);
        }
    }

    fn redial(&mut self, now: Instant) {
        if self.peers.len() <= FULL_MESH_MAX {
            let alive: Vec<NodeId> = self.alive().collect();
            for node in alive {
                // The larger id dials too if the smaller one has not got through.
                self.connect(now, node);
            }
        }
    }
}

/// Contacts announced to in one round while alone.
const ANNOUNCE_ALONE: usize = 8;
/// Minimum pause between two attempts to connect to one peer.
const REDIAL: Duration = Duration::from_secs(4);
/// Pause after the first attempt to reach a contact; it doubles with each further attempt…
const RETRY: Duration = Duration::from_millis(500);
/// …at most this number of times…
const RETRY_DOUBLINGS: u32 = 7;
/// …and up to this pause for a contact that never answered…
const RETRY_MAX: Duration = Duration::from_secs(60);
/// …which is dropped after this number of attempts (four minutes), unless discovery finds it again…
const TRIES_MAX: u32 = 10;
/// …or up to this pause for a contact that answered before: a partitioned mesh heals as fast as it announces.
const RETRY_ANSWERED_MAX: Duration = Duration::from_secs(4);
/// Time after which a dial to a contact has ended, even if its end was not reported.
const REACH_MAX: Duration = Duration::from_secs(15);
