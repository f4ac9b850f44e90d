//! Adverts: each node's signed description of itself. The newest version wins; gossip spreads it in a few rounds, and push-pull
//! repairs the rest.
use crate::codec;
use crate::config::{Capacity, Config, DeviceCapacity};
use crate::id::{ContentId, Generation, NodeId};
use crate::limits::{
    ADVERT_ADDRS_MAX, ADVERT_HOLDINGS_MAX, ADVERT_NAME_BYTES_MAX, DEVICES_MAX, MEMBERS_MAX, ZONE_BYTES_MAX,
};
use crate::message::{Advert, SignedAdvert};
use crate::time::{Duration, Instant};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;

/// A request to the shell to sign or verify.
pub(super) enum AdvertOutput {
    Sign { token: u64, bytes: Vec<u8> },
    Verify { token: u64, peer_id: Vec<u8>, bytes: Vec<u8>, signature: Vec<u8> },
}

/// All known adverts, including this node's own.
pub(super) struct Adverts {
    /// Content of this node's next advert.
    own: Advert,
    /// When to sign `own`; set while the shell has not signed its present content.
    dirty: Option<Instant>,
    signing: Option<(u64, Vec<u8>)>,
    last_signed: Option<Instant>,
    /// Verified adverts, and this node's own once signed.
    known: BTreeMap<NodeId, (Advert, SignedAdvert)>,
    /// Adverts being verified, by token, with their senders.
    verifying: BTreeMap<u64, (Advert, SignedAdvert, NodeId)>,
    /// Newest version being verified for each node, so that an advert received ten times is verified once.
    pending: BTreeMap<NodeId, (Generation, u64)>,
    tokens: u64,
    /// Adverts to gossip, with the number of remaining rounds.
    rumours: VecDeque<(NodeId, u32)>,
    /// Nodes with an advert that were not members at the last `sweep`: gossip may deliver the advert before the join.
    strangers: BTreeSet<NodeId>,
}

/// The advert versions that a node has, as sent in a push-pull.
pub(super) type Heard = Vec<(NodeId, Generation, u64)>;

impl Adverts {
    pub(super) fn new(config: &Config, now: Instant) -> Self {
        let own = Advert {
            node: config.node,
            generation: config.generation,
            version: 0,
            peer_id: config.peer_id.clone(),
            name: cut(&config.name, ADVERT_NAME_BYTES_MAX),
            gossip_addrs: config.gossip_addrs.iter().copied().take(ADVERT_ADDRS_MAX).collect(),
            data_addrs: config.data_addrs.iter().copied().take(ADVERT_ADDRS_MAX).collect(),
            capacity: bounded(config.capacity.clone()),
            holds: Vec::new(),
            draining: false,
        };
        Adverts {
            own,
            dirty: Some(now),
            signing: None,
            last_signed: None,
            known: BTreeMap::new(),
            verifying: BTreeMap::new(),
            pending: BTreeMap::new(),
            tokens: 0,
            rumours: VecDeque::new(),
            strangers: BTreeSet::new(),
        }
    }

    /// This node's advert with its present content (perhaps not yet signed).
    pub(super) fn own(&self) -> &Advert {
        &self.own
    }

    /// The advert of another node.
    pub(super) fn get(&self, node: NodeId) -> Option<&Advert> {
        self.known.get(&node).map(|(advert, _)| advert)
    }

    /// The versions known here.
    pub(super) fn heard(&self) -> Heard {
        self.known.values().map(|(advert, _)| (advert.node, advert.generation, advert.version)).collect()
    }

    /// The adverts of `of` nodes, and this node's own, that are newer than the versions in `heard`.
    pub(super) fn newer_than(&self, heard: Heard, of: impl Fn(NodeId) -> bool) -> Vec<SignedAdvert> {
        let heard: BTreeMap<NodeId, _> =
            heard.into_iter().map(|(node, life, version)| (node, (life, version))).collect();
        let newer = |advert: &Advert| heard.get(&advert.node) < Some(&(advert.generation, advert.version));
        let wanted = |advert: &Advert| (advert.node == self.own.node || of(advert.node)) && newer(advert);
        self.known.values().filter(|(advert, _)| wanted(advert)).map(|(_, signed)| signed.clone()).collect()
    }

    /// A node is permanently gone.
    pub(super) fn forget(&mut self, node: NodeId) {
        self.known.remove(&node);
    }

    /// Drops the adverts of nodes that have not been members since the last sweep.
    pub(super) fn sweep(&mut self, is_member: impl Fn(NodeId) -> bool) {
        let own = self.own.node;
        let strangers: BTreeSet<NodeId> =
            self.known.keys().copied().filter(|node| *node != own && !is_member(*node)).collect();
        for node in strangers.intersection(&self.strangers) {
            self.known.remove(node);
        }
        self.strangers = strangers;
    }

    /// Free memory changes with every request, so small changes wait until something more important is published.
    pub(super) fn handle_capacity(&mut self, now: Instant, capacity: Capacity) {
        let old = core::mem::replace(&mut self.own.capacity, bounded(capacity));
        let new = &self.own.capacity;
        let moved = |a: u64, b: u64| a.abs_diff(b) > a.max(b) / 20;
        let changed = |(old, new): (&DeviceCapacity, &DeviceCapacity)| {
            moved(old.memory_free, new.memory_free)
                || moved(old.ram_free, new.ram_free)
                || moved(old.bytes_per_second, new.bytes_per_second)
                || moved(old.flops_per_second, new.flops_per_second)
                || moved(old.copy_bytes_per_second, new.copy_bytes_per_second)
                || moved(old.cache_bytes_per_second, new.cache_bytes_per_second)
                || moved(old.ram_bytes_per_second, new.ram_bytes_per_second)
                || moved(old.ram_flops_per_second, new.ram_flops_per_second)
                || (&old.device, old.memory_total, old.ram_total, old.numerics, old.gone)
                    != (&new.device, new.memory_total, new.ram_total, new.numerics, new.gone)
        };
        let worth_telling = old.devices.iter().zip(&new.devices).any(changed)
            || (old.machine, &old.zone, old.devices.len()) != (new.machine, &new.zone, new.devices.len());
        self.touch(if worth_telling { now } else { now + SMALL_CHANGES });
    }

    pub(super) fn handle_holdings(&mut self, now: Instant, mut holds: Vec<ContentId>) {
        holds.truncate(ADVERT_HOLDINGS_MAX);
        if self.own.holds != holds {
            self.own.holds = holds;
            self.touch(now + HOLDINGS_DELAY);
        }
    }

    pub(super) fn handle_drain(&mut self, now: Instant, draining: bool) {
        if self.own.draining != draining {
            self.own.draining = draining;
            self.touch(now);
        }
    }

    /// An advert received from any node: verified if it is newer than the known one.
    pub(super) fn handle_heard(
        &mut self,
        from: NodeId,
        signed: SignedAdvert,
        out: &mut Vec<AdvertOutput>,
    ) -> Result<(), &'static str> {
        const BAD: &str = "an advert that cannot be decoded";
        // Most adverts arrive several times: the first bytes are enough to recognise a duplicate.
        let (node, generation, version) = codec::decode_advert_age(&signed.bytes).map_err(|_| BAD)?;
        let age = (generation, version);
        let known = self.known.get(&node).map(|(known, _)| (known.generation, known.version));
        if known.max(self.pending.get(&node).copied()) >= Some(age) {
            return Ok(());
        }
        let advert = codec::decode_advert(&signed.bytes).map_err(|_| BAD)?;
        if advert.gossip_addrs.len() > ADVERT_ADDRS_MAX || advert.data_addrs.len() > ADVERT_ADDRS_MAX {
            return Err("an advert with more addresses than allowed");
        }
        if advert.capacity.zone.len() > ZONE_BYTES_MAX {
            return Err("an advert whose zone name is longer than allowed");
        }
        if NodeId::of_peer(&advert.peer_id) != advert.node {
            return Err("an advert whose key does not belong to its node");
        }
        if self.verifying.len() >= MEMBERS_MAX || (known.is_none() && self.known.len() >= MEMBERS_MAX) {
            return Err("an advert beyond the member limit");
        }
        self.tokens += 1;
        self.pending.insert(advert.node, age);
        out.push(AdvertOutput::Verify {
            token: self.tokens,
            peer_id: advert.peer_id.clone(),
            bytes: signed.bytes.clone(),
            signature: signed.signature.clone(),
        });
        self.verifying.insert(self.tokens, (advert, signed, from));
        Ok(())
    }

    /// Returns the node whose advert changed, or the sender of a forgery.
    pub(super) fn handle_verified(
        &mut self,
        now: Instant,
        token: u64,
        valid: bool,
    ) -> Result<Option<NodeId>, (NodeId, &'static str)> {
        let Some((advert, signed, from)) = self.verifying.remove(&token) else { return Ok(None) };
        let (node, age) = (advert.node, (advert.generation, advert.version));
        if self.pending.get(&node) == Some(&age) {
            self.pending.remove(&node);
        }
        if !valid {
            return Err((from, "an advert with a wrong signature"));
        }
        if node == self.own.node {
            // An advert of an earlier lifetime whose store is lost, or of a duplicate node: outrank it.
            if age > (self.own.generation, self.own.version) {
                (self.own.generation, self.own.version) = age;
                self.touch(now);
            }
            return Ok(None);
        }
        if self.known.get(&node).is_some_and(|(known, _)| (known.generation, known.version) >= age) {
            return Ok(None);
        }
        self.known.insert(node, (advert, signed));
        self.spread(node);
        Ok(Some(node))
    }

    pub(super) fn handle_signed(&mut self, now: Instant, token: u64, signature: Vec<u8>) {
        let Some((_, bytes)) = self.signing.take_if(|(signing, _)| *signing == token) else { return };
        self.last_signed = Some(now);
        // The signed content, which may be older than `own` by now.
        if let Ok(advert) = codec::decode_advert(&bytes) {
            let node = advert.node;
            self.known.insert(node, (advert, SignedAdvert { bytes, signature }));
            self.spread(node);
        }
    }

    /// Requests a signature when there is something new to publish, at most once per `OWN_INTERVAL`.
    pub(super) fn handle_wakeup(&mut self, now: Instant, out: &mut Vec<AdvertOutput>) {
        if self.next_wakeup().is_none_or(|at| at > now) {
            return;
        }
        self.dirty = None;
        self.own.version += 1;
        match codec::encode_advert(&self.own) {
            Ok(bytes) => {
                self.tokens += 1;
                self.signing = Some((self.tokens, bytes.clone()));
                out.push(AdvertOutput::Sign { token: self.tokens, bytes });
            }
            // Only the holdings, or many different devices, can make it too long: name, addresses and the other texts are
            // truncated to fit. One device always fits.
            Err(_) => {
                let devices = &mut self.own.capacity.devices;
                let shorter = self.own.holds.pop().is_some() || devices.len() > 1 && devices.pop().is_some();
                self.dirty = shorter.then_some(now);
            }
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        let earliest = self.last_signed.map_or(Instant(0), |last| last + OWN_INTERVAL);
        self.dirty.filter(|_| self.signing.is_none()).map(|at| at.max(earliest))
    }

    /// The adverts to gossip now.
    pub(super) fn next_rumours(&mut self) -> Vec<SignedAdvert> {
        let mut batch = Vec::new();
        for _ in 0..RUMOURS.min(self.rumours.len()) {
            let Some((node, left)) = self.rumours.pop_front() else { break };
            if let Some((_, signed)) = self.known.get(&node) {
                batch.push(signed.clone());
                if left > 1 {
                    self.rumours.push_back((node, left - 1));
                }
            }
        }
        batch
    }

    pub(super) fn has_rumours(&self) -> bool {
        !self.rumours.is_empty()
    }

    /// Drops the adverts of nodes for which `keep` is false once there are more adverts than the member limit.
    pub(super) fn bound(&mut self, keep: impl Fn(NodeId) -> bool) {
        if self.known.len() >= MEMBERS_MAX {
            let own = self.own.node;
            self.known.retain(|node, _| *node == own || keep(*node));
        }
    }

    fn spread(&mut self, node: NodeId) {
        self.rumours.retain(|(rumoured, _)| *rumoured != node);
        self.rumours.push_back((node, ROUNDS));
    }

    fn touch(&mut self, at: Instant) {
        self.dirty = Some(self.dirty.map_or(at, |dirty| dirty.min(at)));
    }
}

/// A capacity whose lists and texts are truncated to fit an advert.
fn bounded(mut capacity: Capacity) -> Capacity {
    capacity.zone = cut(&capacity.zone, ZONE_BYTES_MAX);
    capacity.devices.truncate(DEVICES_MAX);
    for device in &mut capacity.devices {
        device.device = cut(&device.device, ADVERT_NAME_BYTES_MAX);
    }
    capacity
}

/// The longest prefix of whole characters with at most `most` bytes.
fn cut(name: &str, most: usize) -> String {
    let end = (0..=name.len().min(most)).rev().find(|end| name.is_char_boundary(*end));
    String::from(&name[..end.unwrap_or(0)])
}

/// Gossip rounds per advert and node. With three receivers per round this reaches all but one node in 400; push-pull repairs
/// the rest.
const ROUNDS: u32 = 2;
/// Adverts per gossip round: bounds a burst of gossip to a few packets.
const RUMOURS: usize = 8;
/// Shortest interval between this node's own adverts: each one travels through the whole mesh.
const OWN_INTERVAL: Duration = Duration::from_secs(1);
/// Delay of an advert with new holdings: the memory that a stage takes changes a moment later, and both go into one advert.
const HOLDINGS_DELAY: Duration = Duration::from_secs(2);
/// Delay of an advert with a change below 5 %.
const SMALL_CHANGES: Duration = Duration::from_secs(30);
