//! Membership: which nodes are in the mesh, their addresses and capacities, in one table that all other modules use.
//!
//! SWIM (`swim`, with foca inside) decides which nodes are alive, signed adverts (`adverts`) carry what they offer, and
//! push-pull repairs what gossip missed. Calling contract: after any `handle_*` call `poll_output` until `None`, and call
//! `handle_wakeup` at `next_wakeup`. Next: `liveness.rs`.
use crate::codec::{self, Datagram};
use crate::config::{Capacity, Config};
use crate::id::{ContentId, Generation, NodeId};
use crate::limits::{MEMBERS_MAX, MESSAGE_BYTES_MAX, PUSH_PULL};
use crate::message::{Message, SignedAdvert};
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::{Contact, DownReason};
use adverts::{AdvertOutput, Adverts, Heard};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::net::SocketAddr;
use partitioner::Link;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use swim::{Life, Swim, SwimOutput};

mod view;

mod adverts;
mod claims;
mod health;
mod invariants;
mod probes;
mod reach;
mod swim;

pub use view::{Member, MemberState};

/// An action or a report of membership.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MembershipOutput {
    /// Send a datagram.
    SendDatagram { to: NodeId, addr: SocketAddr, bytes: Vec<u8> },
    /// Send a control message.
    SendMessage { to: NodeId, message: Message },
    /// Open a data-plane connection and keep it.
    Connect { node: NodeId, peer_id: Vec<u8>, addrs: Vec<SocketAddr> },
    /// A peer is permanently gone.
    Disconnect { node: NodeId },
    /// Sign with the node's key.
    Sign { token: u64, bytes: Vec<u8> },
    /// Verify a peer's signature.
    Verify { token: u64, peer_id: Vec<u8>, bytes: Vec<u8>, signature: Vec<u8> },
    /// A member is alive.
    PeerUp { node: NodeId },
    /// A member is down. `Failed` is a hint: a fresh lease outranks it.
    PeerDown { node: NodeId, reason: DownReason },
    /// A member published a new advert.
    AdvertChanged { node: NodeId },
    /// Peers to announce to after a restart, for persisting.
    Remember { peers: Vec<Contact> },
    /// Something was rejected, for the log.
    Rejected { from: NodeId, what: &'static str },
}

/// The membership machine of one node.
pub struct Membership {
    node: NodeId,
    swim: Swim,
    adverts: Adverts,
    /// Every node that was ever up and is not yet forgotten.
    peers: BTreeMap<NodeId, Peer>,
    /// Nodes found by discovery or remembered, members or not.
    contacts: BTreeMap<NodeId, KnownPeer>,
    connected: BTreeMap<NodeId, Link>,
    /// Banned nodes: nothing from them or about them is accepted.
    banned: BTreeSet<NodeId>,
    /// When this node last tried to connect: to members and contacts only.
    dialled: BTreeMap<NodeId, Instant>,
    /// Dials in flight to contacts that are not members, and since when; at most `STRANGER_DIALS_MAX`.
    reaching: BTreeMap<NodeId, Instant>,
    rng: ChaCha8Rng,
    output: VecDeque<MembershipOutput>,
    next_announce: Instant,
    announce_pause: Duration,
    next_push_pull: Option<Instant>,
    /// When to check whether an advert of a member is still missing…
    next_repair: Option<Instant>,
    /// …or to push-pull in any case: a node that joins together with many others misses some of their gossip.
    repair_anyway: bool,
    next_gossip: Option<Instant>,
    next_remember: Option<Instant>,
    left: bool,
}

#[derive(Clone, Copy)]
struct Peer {
    life: Life,
    down: Option<DownReason>,
    /// Source of its last datagram: authentic, because datagrams are sealed.
    source: Option<SocketAddr>,
    /// Which advertised address to try next while `source` is unknown.
    tries: usize,
    /// Number of its messages that were malformed or forged.
    refused: u32,
}

struct KnownPeer {
    peer_id: Vec<u8>,
    gossip: Vec<SocketAddr>,
    data: Vec<SocketAddr>,
    at: Instant,
    /// Attempts to reach it since it was last heard, or in total if it never was.
    tries: u32,
    /// Earliest time of the next attempt.
    next: Instant,
    /// It was a member, connected, or named by a ticket: its address is more than a stranger's claim.
    answered: bool,
}

impl Membership {
    /// A node that knows no peers yet.
    pub fn new(config: &Config, now: Instant, seed: u64) -> Self {
        let addr = config.gossip_addrs.iter().copied().find(|addr| !addr.ip().is_unspecified());
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(PEER_STREAM);
        Membership {
            node: config.node,
            swim: Swim::new(Life { node: config.node, generation: config.generation, addr }, seed),
            adverts: Adverts::new(config, now),
            peers: BTreeMap::new(),
            contacts: BTreeMap::new(),
            connected: BTreeMap::new(),
            banned: BTreeSet::new(),
            dialled: BTreeMap::new(),
            reaching: BTreeMap::new(),
            rng,
            output: VecDeque::new(),
            next_announce: now,
            announce_pause: ANNOUNCE,
            next_push_pull: None,
            next_repair: None,
            repair_anyway: false,
            next_gossip: None,
            next_remember: None,
            left: false,
        }
    }

    // ---- inputs

    /// Discovery, a ticket or the store names a peer.
    pub fn handle_peer_found(
        &mut self,
        now: Instant,
        node: NodeId,
        peer_id: Vec<u8>,
        gossip: Vec<SocketAddr>,
        data: Vec<SocketAddr>,
    ) {
        if node == self.node || self.left || self.banned.contains(&node) {
            return;
        }
        if NodeId::of_peer(&peer_id) != node {
            return self.refuse(node, "a discovered peer whose key does not match its node id");
        }
        self.keep_contact(now, node, peer_id, gossip, data);
        if self.is_alive(node) {
            if self.connected.len() < FULL_MESH_MAX {
                self.connect(now, node);
            }
        } else {
            self.try_contact(now, node, self.connected.len() < FULL_MESH_MAX);
        }
    }

    /// A peer that was found is known from a ticket or a previous run.
    pub fn handle_remembered(&mut self, now: Instant, node: NodeId) {
        self.contact_answered(now, node);
    }

    /// A membership packet; its seal authenticates `from`.
    pub fn handle_swim(&mut self, now: Instant, from: NodeId, source: SocketAddr, packet: &[u8]) {
        if self.left || self.banned.contains(&from) {
            return;
        }
        self.heard_from(from, source);
        let mut out = Vec::new();
        match self.swim.handle_packet(now, from, packet, &mut out) {
            // A first packet makes its sender a peer, so its source is recorded again afterwards.
            Ok(_) => {
                self.settle(now, out);
                self.heard_from(from, source);
            }
            Err(what) => {
                self.settle(now, out);
                self.refuse(from, what);
            }
        }
    }

    /// A peer suspects this node.
    pub fn handle_suspected(&mut self, now: Instant, from: NodeId, generation: u64, incarnation: u16) {
        if self.left || self.banned.contains(&from) {
            return;
        }
        let by = self.peers.get(&from).map(|peer| peer.life);
        let mut out = Vec::new();
        self.swim.handle_suspected(now, by, generation, incarnation, &mut out);
        self.settle(now, out);
    }

    /// An advert, possibly of a third node.
    pub fn handle_advert(&mut self, from: NodeId, signed: SignedAdvert) {
        if self.banned.contains(&from) {
            return;
        }
        let mut out = Vec::new();
        let result = self.adverts.handle_heard(from, signed, &mut out);
        self.settle_adverts(out);
        if let Err(what) = result {
            self.refuse(from, what);
        }
    }

    /// A peer's members and adverts. If `reply`, this node answers with its own; in any case it sends the adverts that the peer
    /// lacks.
    pub fn handle_push_pull(
        &mut self,
        now: Instant,
        from: NodeId,
        members: &[u8],
        heard: &[u8],
        adverts: Vec<SignedAdvert>,
        reply: bool,
    ) {
        if self.left {
            return;
        }
        let result = self.take_state(now, members, &adverts).and_then(|()| {
            adverts.into_iter().for_each(|signed| self.handle_advert(from, signed));
            self.answer_push_pull(from, heard, reply)
        });
        if let Err(what) = result {
            self.refuse(from, what);
        }
    }

    fn take_state(&mut self, now: Instant, members: &[u8], adverts: &[SignedAdvert]) -> Result<(), &'static str> {
        if adverts.len() > MEMBERS_MAX {
            return Err("a push-pull with too many adverts");
        }
        if members.is_empty() {
            return Ok(()); // the last message of an exchange: adverts only
        }
        let state = codec::decode_part::<Vec<foca::Member<Life>>, MESSAGE_BYTES_MAX>("member list", members);
        let state = state.ok().filter(|state| state.len() <= MEMBERS_MAX);
        let mut state = state.ok_or("a push-pull with a bad member list")?;
        state.retain(|member| !self.banned.contains(&member.id().node));
        let mut out = Vec::new();
        self.swim.handle_state(now, state, &mut out);
        self.settle(now, out);
        Ok(())
    }

    fn answer_push_pull(&mut self, to: NodeId, heard: &[u8], reply: bool) -> Result<(), &'static str> {
        if heard.is_empty() {
            return Ok(());
        }
        let heard = codec::decode_part::<Heard, MESSAGE_BYTES_MAX>("list of adverts", heard);
        let heard = heard.ok().filter(|heard| heard.len() <= MEMBERS_MAX + 1);
        let adverts = self.adverts.newer_than(heard.ok_or("a push-pull with a bad advert list")?, |n| self.is_alive(n));
        if reply {
            self.push_pull(to, adverts, false);
        } else if !adverts.is_empty() {
            let message = Message::PushPull { members: Vec::new(), heard: Vec::new(), adverts, reply: false };
            self.output.push_back(MembershipOutput::SendMessage { to, message });
        }
        Ok(())
    }

    /// The peer announces on its control stream that it leaves. Its datagrams announce it to all members.
    pub fn handle_leaving(&mut self, now: Instant, from: NodeId) {
        let Some(peer) = self.peers.get(&from).copied() else { return };
        let mut out = Vec::new();
        self.swim.handle_departure(now, peer.life, &mut out);
        self.settle(now, out);
    }

    /// Sets the list of banned nodes. A newly banned node counts as having left: its jobs are placed again immediately. Returns
    /// the newly banned nodes that were down already. No `PeerDown` follows for these, but a job may still hold a lease on
    /// them.
    pub fn handle_banned(&mut self, now: Instant, nodes: Vec<NodeId>) -> Vec<NodeId> {
        if planted::has(Planted::BanIgnored) {
            return Vec::new();
        }
        let banned: BTreeSet<NodeId> = nodes.into_iter().filter(|node| *node != self.node).collect();
        let mut dead = Vec::new();
        for node in banned.difference(&core::mem::take(&mut self.banned)) {
            if !self.is_alive(*node) {
                dead.push(*node);
            }
            self.handle_leaving(now, *node);
            self.drop_contact(*node);
            self.adverts.forget(*node);
        }
        self.banned = banned;
        dead
    }

    /// Whether a node is on the list of banned nodes.
    pub fn is_banned(&self, node: NodeId) -> bool {
        self.banned.contains(&node)
    }

    /// A data-plane connection was established.
    pub fn handle_connected(&mut self, now: Instant, node: NodeId, rtt_ns: u64) {
        let bytes_per_second =
            self.connected.get(&node).map_or(UNMEASURED.bytes_per_second, |link| link.bytes_per_second);
        self.connected.insert(node, Link { rtt_ns, bytes_per_second });
        self.contact_answered(now, node);
        if self.adverts.get(node).is_none() && self.is_alive(node) {
            self.arm_repair(now);
        }
    }

    /// The connection broke; it is dialled again later if the peer still counts as alive.
    pub fn handle_disconnected(&mut self, now: Instant, node: NodeId) {
        self.connected.remove(&node);
        self.reaching.remove(&node);
        if self.peers.contains_key(&node) || self.contacts.contains_key(&node) {
            self.dialled.insert(node, now);
        }
    }

    /// A link was measured.
    pub fn handle_link_measured(&mut self, node: NodeId, rtt_ns: u64, bytes_per_second: u64) {
        if let Some(link) = self.connected.get_mut(&node) {
            *link = Link { rtt_ns, bytes_per_second };
        }
    }

    /// This node's own memory or speed changed.
    pub fn handle_capacity(&mut self, now: Instant, capacity: Capacity) {
        self.adverts.handle_capacity(now, capacity);
    }

    /// The contents that this node can give to peers.
    pub fn handle_holdings(&mut self, now: Instant, holds: Vec<ContentId>) {
        self.adverts.handle_holdings(now, holds);
    }

    /// Starts or ends a drain.
    pub fn handle_drain(&mut self, now: Instant, draining: bool) {
        self.adverts.handle_drain(now, draining);
    }

    /// A requested signature.
    pub fn handle_signed(&mut self, now: Instant, token: u64, signature: Vec<u8>) {
        self.adverts.handle_signed(now, token, signature);
        self.arm_gossip(now);
    }

    /// A requested verification.
    pub fn handle_verified(&mut self, now: Instant, token: u64, valid: bool) {
        match self.adverts.handle_verified(now, token, valid) {
            Ok(None) => {}
            Ok(Some(node)) => {
                self.arm_gossip(now);
                self.output.push_back(MembershipOutput::AdvertChanged { node });
                if self.is_alive(node) {
                    self.connect_small_mesh(now, node);
                }
            }
            Err((from, what)) => self.refuse(from, what),
        }
    }

    /// Leaves the mesh: announces it to the members immediately, and stops being a member.
    pub fn handle_leave(&mut self, _now: Instant) {
        if core::mem::replace(&mut self.left, true) {
            return;
        }
        let alive: Vec<NodeId> = self.alive().collect();
        for node in alive.iter().copied().take(GOODBYES_MAX) {
            let Some(peer) = self.peers.get(&node) else { continue };
            let packet = self.swim.goodbye(peer.life);
            self.send(node, &Datagram::Swim(&packet));
        }
        for node in alive.into_iter().filter(|node| self.connected.contains_key(node)) {
            self.output.push_back(MembershipOutput::SendMessage { to: node, message: Message::Leaving });
        }
    }

    /// The clock reached `next_wakeup`.
    pub fn handle_wakeup(&mut self, now: Instant) {
        if self.left {
            return;
        }
        let mut out = Vec::new();
        self.swim.handle_wakeup(now, &mut out);
        self.settle(now, out);
        let mut out = Vec::new();
        self.adverts.handle_wakeup(now, &mut out);
        self.settle_adverts(out);
        if self.next_announce <= now {
            self.announce_tick(now);
        }
        if self.next_gossip.is_some_and(|at| at <= now) {
            self.gossip_tick(now);
        }
        if self.next_repair.take_if(|at| *at <= now).is_some()
            && (core::mem::take(&mut self.repair_anyway) || self.misses_adverts())
        {
            self.next_push_pull = Some(now);
        }
        if self.next_push_pull.is_some_and(|at| at <= now) {
            self.push_pull_tick(now);
        }
        if self.next_remember.take_if(|at| *at <= now).is_some() {
            self.remember();
        }
    }

    /// What to do next; call until `None`.
    pub fn poll_output(&mut self) -> Option<MembershipOutput> {
        self.output.pop_front()
    }

    /// When to call `handle_wakeup` next, and for which timer.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        if self.left {
            return None;
        }
        let own = [
            Some((self.next_announce, "announce")),
            self.next_gossip.map(|at| (at, "advert gossip")),
            self.next_push_pull.map(|at| (at, "push-pull")),
            self.next_repair.map(|at| (at, "missing adverts")),
            self.next_remember.map(|at| (at, "remember peers")),
            self.adverts.next_wakeup().map(|at| (at, "own advert")),
            self.swim.next_wakeup(),
        ];
        own.into_iter().flatten().min()
    }

    // ---- internal

    /// Reports a rejected message of a peer, and counts it.
    fn refuse(&mut self, from: NodeId, what: &'static str) {
        if let Some(peer) = self.peers.get_mut(&from) {
            peer.refused = peer.refused.saturating_add(1);
        }
        self.output.push_back(MembershipOutput::Rejected { from, what });
    }

    fn settle(&mut self, now: Instant, out: Vec<SwimOutput>) {
        for output in out {
            match output {
                SwimOutput::Send(to, packet) => self.send_swim(to, &packet),
                SwimOutput::NotifySuspect(suspect, incarnation) => {
                    self.send(suspect.node, &Datagram::Suspected { generation: suspect.generation.0, incarnation });
                }
                SwimOutput::Up(life) => self.peer_up(now, life),
                SwimOutput::Down(life, left) => {
                    self.peer_down(now, life, if left { DownReason::Left } else { DownReason::Failed });
                }
                SwimOutput::Forgotten(node) => self.forget(node),
                SwimOutput::Active => {
                    self.announce_pause = ANNOUNCE;
                    self.next_push_pull = Some(now);
                    self.repair_anyway = true;
                    self.arm_repair(now);
                }
                SwimOutput::Renewed => self.next_push_pull = Some(now),
                SwimOutput::Recovered => self.catch_up(now),
            }
        }
    }

    fn settle_adverts(&mut self, out: Vec<AdvertOutput>) {
        self.output.extend(out.into_iter().map(|output| match output {
            AdvertOutput::Sign { token, bytes } => MembershipOutput::Sign { token, bytes },
            AdvertOutput::Verify { token, peer_id, bytes, signature } => {
                MembershipOutput::Verify { token, peer_id, bytes, signature }
            }
        }));
    }

    fn peer_up(&mut self, now: Instant, life: Life) {
        if self.banned.contains(&life.node) {
            // A node that has not received the ban yet passed it on.
            let mut out = Vec::new();
            self.swim.handle_departure(now, life, &mut out);
            return;
        }
        let known = self.peers.get(&life.node).copied();
        let source = known.filter(|peer| peer.down.is_none()).and_then(|peer| peer.source);
        let refused = known.map_or(0, |peer| peer.refused);
        self.peers.insert(life.node, Peer { life, down: None, source, tries: 0, refused });
        self.contact_answered(now, life.node);
        if known.is_some_and(|peer| peer.down.is_none()) {
            return; // the same member with a new generation: its leases show what it still holds
        }
        self.output.push_back(MembershipOutput::PeerUp { node: life.node });
        if self.adverts.get(life.node).is_none() {
            self.arm_repair(now);
        }
        if self.next_push_pull.is_none() {
            self.next_push_pull = Some(now + PUSH_PULL);
        }
        self.next_remember.get_or_insert(now + REMEMBER);
        self.connect_small_mesh(now, life.node);
        self.forget_excess();
    }

    fn peer_down(&mut self, now: Instant, life: Life, reason: DownReason) {
        let Some(peer) = self.peers.get_mut(&life.node).filter(|peer| peer.down.is_none()) else { return };
        peer.life = life;
        peer.down = Some(reason);
        self.output.push_back(MembershipOutput::PeerDown { node: life.node, reason });
        match reason {
            DownReason::Left => {
                self.drop_contact(life.node);
                self.output.push_back(MembershipOutput::Disconnect { node: life.node });
            }
            // The connection may still be open; the transport reports when it breaks.
            DownReason::Failed => {}
        }
        self.next_remember.get_or_insert(now + REMEMBER);
    }

    fn heard_from(&mut self, node: NodeId, source: SocketAddr) {
        if let Some(peer) = self.peers.get_mut(&node) {
            peer.source = Some(source);
        }
    }

    /// A member has been down for long: only its addresses are retained, unless it left on its own. They let the two halves of
    /// a partitioned mesh find each other again.
    fn forget(&mut self, node: NodeId) {
        let Some(reason) = self.peers.get(&node).and_then(|peer| peer.down) else { return };
        let (gossip, contact) = (self.gossip_addr(node), self.data_contact(node));
        if let (DownReason::Failed, Some((peer_id, data))) = (reason, contact) {
            let at = self.contacts.get(&node).map_or(Instant(0), |found| found.at);
            self.keep_contact(at, node, peer_id, gossip.into_iter().collect(), data);
            self.contact_answered(at, node);
        }
        self.peers.remove(&node);
        self.adverts.forget(node);
        self.connected.remove(&node);
        self.dialled.remove(&node);
        self.output.push_back(MembershipOutput::Disconnect { node });
    }

    /// Bounds the table of members as SWIM bounds its own.
    fn forget_excess(&mut self) {
        if self.peers.len() <= MEMBERS_MAX {
            return;
        }
        if let Some(node) = self.peers.iter().find(|(_, peer)| peer.down.is_some()).map(|(node, _)| *node) {
            self.forget(node);
        }
        let peers = &self.peers;
        self.adverts.bound(|node| peers.contains_key(&node));
    }

    fn send_swim(&mut self, to: Life, packet: &[u8]) {
        // Generation 0 belongs to no node: an announcement to the address of a contact.
        match to.addr.filter(|_| to.generation == Generation(0)) {
            Some(addr) => {
                let bytes = codec::encode_datagram(&Datagram::Swim(packet));
                self.output.push_back(MembershipOutput::SendDatagram { to: to.node, addr, bytes });
            }
            None => self.send(to.node, &Datagram::Swim(packet)),
        }
    }

    fn send(&mut self, to: NodeId, datagram: &Datagram<'_>) {
        if let Some(addr) = self.gossip_addr(to) {
            let bytes = codec::encode_datagram(datagram);
            self.output.push_back(MembershipOutput::SendDatagram { to, addr, bytes });
        }
        if let Some(peer) = self.peers.get_mut(&to) {
            peer.tries = peer.tries.wrapping_add(1);
        }
    }

    // ---- adverts and push-pull

    fn arm_gossip(&mut self, now: Instant) {
        if self.adverts.has_rumours() {
            self.next_gossip.get_or_insert(now + GOSSIP);
        }
    }

    fn gossip_tick(&mut self, now: Instant) {
        self.next_gossip = None;
        let alive: Vec<NodeId> = self.alive().collect();
        if alive.is_empty() {
            return; // armed again by the first advert after the first member joins
        }
        for signed in self.adverts.next_rumours() {
            for _ in 0..GOSSIP_FANOUT.min(alive.len()) {
                let to = alive[self.rng.random_range(0..alive.len())];
                self.send(to, &Datagram::Advert(signed.clone()));
            }
        }
        self.arm_gossip(now);
    }

    fn misses_adverts(&self) -> bool {
        self.alive().any(|node| self.adverts.get(node).is_none())
    }

    fn arm_repair(&mut self, now: Instant) {
        // Gossip may deliver the advert first; the random spread keeps the nodes of a mesh from asking together.
        let spread = Duration::from_millis(self.rng.random_range(0..1000));
        self.next_repair.get_or_insert(now + MISSING + spread);
    }

    /// This node missed gossip while its datagrams were lost, and others no longer repeat it. Without an exchange two views
    /// differ until one of their nodes happens to probe the member that they differ about.
    fn catch_up(&mut self, now: Instant) {
        // An outage of the whole mesh ends for all nodes together.
        let spread_ms = CATCH_UP_MS * self.alive().count() as u64;
        let at = now + Duration::from_millis(self.rng.random_range(0..=spread_ms));
        self.next_push_pull = Some(self.next_push_pull.map_or(at, |next| next.min(at)));
    }

    fn push_pull_tick(&mut self, now: Instant) {
        self.next_push_pull = Some(now + PUSH_PULL + Duration::from_millis(self.rng.random_range(0..1000)));
        let peers = &self.peers;
        self.adverts.sweep(|node| peers.contains_key(&node));
        if self.misses_adverts() {
            self.arm_repair(now);
        }
        let mut partners: Vec<NodeId> = self.alive().filter(|node| self.connected.contains_key(node)).collect();
        if partners.is_empty() {
            partners = self.alive().filter(|node| self.data_contact(*node).is_some()).collect();
        }
        if partners.is_empty() {
            return;
        }
        let partner = partners[self.rng.random_range(0..partners.len())];
        self.connect(now, partner);
        self.push_pull(partner, Vec::new(), true);
    }

    fn push_pull(&mut self, to: NodeId, adverts: Vec<SignedAdvert>, reply: bool) {
        let members = codec::encode_part(&self.swim.state());
        let heard = codec::encode_part(&self.adverts.heard());
        self.output.push_back(MembershipOutput::SendMessage {
            to,
            message: Message::PushPull { members, heard, adverts, reply },
        });
    }

    fn remember(&mut self) {
        let alive = self.alive().filter_map(|node| {
            let (peer_id, data) = self.data_contact(node)?;
            Some(Contact { node, peer_id, gossip: self.gossip_addr(node).into_iter().collect(), data })
        });
        let peers: Vec<Contact> = alive.take(CONTACTS_MAX).collect();
        if !peers.is_empty() {
            self.output.push_back(MembershipOutput::Remember { peers });
        }
    }
}

/// Random stream of this module: SWIM draws from another stream of the same seed.
const PEER_STREAM: u64 = 257;
/// Assumed figures of an unmeasured link: a gigabit LAN.
const UNMEASURED: Link = Link { rtt_ns: 500_000, bytes_per_second: 110_000_000 };
/// Contacts retained to find the mesh again: a few would suffice.
const CONTACTS_MAX: usize = 256;
/// Dials in flight to contacts that are not members: bounds the cost of an invented address for this node, and for the
/// machine behind it.
const STRANGER_DIALS_MAX: usize = 8;
/// Number of members up to which the connections form a full mesh.
const FULL_MESH_MAX: usize = 16;
/// Members that receive a goodbye directly; gossip informs the rest.
const GOODBYES_MAX: usize = 64;
/// First pause between announcements while alone; it doubles up to `ANNOUNCE_MAX`.
const ANNOUNCE: Duration = Duration::from_millis(500);
const ANNOUNCE_MAX: Duration = Duration::from_secs(5);
/// Advert gossip: as often and as wide as SWIM's.
const GOSSIP: Duration = Duration::from_millis(50);
const GOSSIP_FANOUT: usize = 3;
/// How long an advert may be missing before push-pull fetches it.
const MISSING: Duration = Duration::from_secs(2);
/// Time per member over which a mesh spreads the exchanges after an outage: its nodes may all choose the same partner.
const CATCH_UP_MS: u64 = 8;
/// Delay after which changes of the member list are persisted together.
const REMEMBER: Duration = Duration::from_secs(5);

#[cfg(test)]
mod fleets;
#[cfg(test)]
mod tests;
