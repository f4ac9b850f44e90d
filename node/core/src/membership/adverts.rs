//! What every node tells about itself: signed by its key, newest version wins, passed on a few times and repaired by
//! push-pull.
use crate::codec;
use crate::config::{Capacity, Config};
use crate::id::{ContentId, Generation, NodeId};
use crate::limits::{ADVERT_ADDRS_MAX, ADVERT_HOLDINGS_MAX, ADVERT_NAME_BYTES_MAX, MEMBERS_MAX, ZONE_BYTES_MAX};
use crate::message::{Advert, SignedAdvert};
use crate::time::{Duration, Instant};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;

/// Something to be signed or verified by the shell.
pub(super) enum AdvertOutput {
    Sign { token: u64, bytes: Vec<u8> },
    Verify { token: u64, peer_id: Vec<u8>, bytes: Vec<u8>, signature: Vec<u8> },
}

/// All adverts known, the own one among them.
pub(super) struct Adverts {
    /// Facts for the next own advert.
    own: Advert,
    /// The shell has not signed `own` as it stands.
    dirty: Option<Instant>,
    signing: Option<(u64, Vec<u8>)>,
    last_signed: Option<Instant>,
    /// Verified ones, and the own one once signed.
    known: BTreeMap<NodeId, (Advert, SignedAdvert)>,
    /// Being verified, by token, and who sent it.
    verifying: BTreeMap<u64, (Advert, SignedAdvert, NodeId)>,
    /// Newest version being verified for each node, so that a rumour heard ten times is checked once.
    pending: BTreeMap<NodeId, (Generation, u64)>,
    tokens: u64,
    /// To be passed on, and how many more times.
    rumours: VecDeque<(NodeId, u32)>,
    /// Of no member when `sweep` looked last: their rumour may have come before the one of their being there.
    strangers: BTreeSet<NodeId>,
}

/// Which adverts somebody has heard, as push-pull tells it.
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

    /// What this node says about itself, as it stands now (perhaps not yet signed).
    pub(super) fn own(&self) -> &Advert {
        &self.own
    }

    /// What another node says about itself.
    pub(super) fn get(&self, node: NodeId) -> Option<&Advert> {
        self.known.get(&node).map(|(advert, _)| advert)
    }

    /// Which versions are known here.
    pub(super) fn heard(&self) -> Heard {
        self.known.values().map(|(advert, _)| (advert.node, advert.generation, advert.version)).collect()
    }

    /// What somebody who has heard those lacks of what these nodes say, and of what this one says.
    pub(super) fn beyond(&self, heard: Heard, of: impl Fn(NodeId) -> bool) -> Vec<SignedAdvert> {
        let heard: BTreeMap<NodeId, _> =
            heard.into_iter().map(|(node, life, version)| (node, (life, version))).collect();
        let newer = |advert: &Advert| heard.get(&advert.node) < Some(&(advert.generation, advert.version));
        let wanted = |advert: &Advert| (advert.node == self.own.node || of(advert.node)) && newer(advert);
        self.known.values().filter(|(advert, _)| wanted(advert)).map(|(_, signed)| signed.clone()).collect()
    }

    /// A node is gone for good.
    pub(super) fn forget(&mut self, node: NodeId) {
        self.known.remove(&node);
    }

    /// Forgets what nodes say that have not been members since the last look.
    pub(super) fn sweep(&mut self, is_member: impl Fn(NodeId) -> bool) {
        let own = self.own.node;
        let strangers: BTreeSet<NodeId> =
            self.known.keys().copied().filter(|node| *node != own && !is_member(*node)).collect();
        for node in strangers.intersection(&self.strangers) {
            self.known.remove(node);
        }
        self.strangers = strangers;
    }

    /// Free memory moves with every request, so small moves wait until something else is worth telling.
    pub(super) fn handle_capacity(&mut self, now: Instant, capacity: Capacity) {
        let old = core::mem::replace(&mut self.own.capacity, bounded(capacity));
        let new = &self.own.capacity;
        let moved = |a: u64, b: u64| a.abs_diff(b) > a.max(b) / 20;
        let worth_telling = moved(old.memory_free, new.memory_free)
            || moved(old.bytes_per_second, new.bytes_per_second)
            || moved(old.flops_per_second, new.flops_per_second)
            || moved(old.copy_bytes_per_second, new.copy_bytes_per_second)
            || moved(old.cache_bytes_per_second, new.cache_bytes_per_second)
            || (old.machine, &old.zone, &old.device, old.memory_total, old.numerics)
                != (new.machine, &new.zone, &new.device, new.memory_total, new.numerics);
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

    /// An advert heard from anybody: worth verifying if it is newer than what is known.
    pub(super) fn handle_heard(
        &mut self,
        from: NodeId,
        signed: SignedAdvert,
        out: &mut Vec<AdvertOutput>,
    ) -> Result<(), &'static str> {
        const BAD: &str = "an advert that cannot be decoded";
        // Most are heard several times: their beginning says so.
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
            return Err("an advert with a longer name of a zone than allowed");
        }
        if NodeId::of_peer(&advert.peer_id) != advert.node {
            return Err("an advert whose key does not belong to its node");
        }
        if self.verifying.len() >= MEMBERS_MAX || (known.is_none() && self.known.len() >= MEMBERS_MAX) {
            return Err("more adverts than members are allowed");
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

    /// Returns the node whose advert changed, or who sent the forgery.
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
            // Said in an earlier life whose store is lost, or by a twin: outrank it.
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
        // What was signed, which may be older than `own` by now.
        if let Ok(advert) = codec::decode_advert(&bytes) {
            let node = advert.node;
            self.known.insert(node, (advert, SignedAdvert { bytes, signature }));
            self.spread(node);
        }
    }

    /// Ask for a signature when there is something new to say, at most once in `OWN_INTERVAL`.
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
            // Too long only by its holdings: name, addresses and the rest are cut to fit.
            Err(_) => {
                self.own.holds.pop();
                self.dirty = (!self.own.holds.is_empty()).then_some(now);
            }
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        let earliest = self.last_signed.map_or(Instant(0), |last| last + OWN_INTERVAL);
        self.dirty.filter(|_| self.signing.is_none()).map(|at| at.max(earliest))
    }

    /// Adverts to pass on now.
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

    /// Forget nodes for which `keep` is false once there are more adverts than members are allowed.
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

/// What a node offers, with texts that an advert has room for.
fn bounded(capacity: Capacity) -> Capacity {
    let device = cut(&capacity.device, ADVERT_NAME_BYTES_MAX);
    Capacity { device, zone: cut(&capacity.zone, ZONE_BYTES_MAX), ..capacity }
}

/// The longest prefix of whole characters of at most this number of bytes.
fn cut(name: &str, most: usize) -> String {
    let end = (0..=name.len().min(most)).rev().find(|end| name.is_char_boundary(*end));
    String::from(&name[..end.unwrap_or(0)])
}

/// Rounds of gossip an advert is passed on for by each node that learns it. With three receivers a round that reaches
/// all but one node in 400; push-pull does the rest.
const ROUNDS: u32 = 2;
/// Adverts passed on per round: bounds a burst of gossip to a few packets.
const RUMOURS: usize = 8;
/// Own adverts come no faster: each goes through the whole mesh.
const OWN_INTERVAL: Duration = Duration::from_secs(1);
/// What is held is told with this delay: together with the memory that a stage takes, not just before it and so instead
/// of it.
const HOLDINGS_DELAY: Duration = Duration::from_secs(2);
/// A change below 5 % is told with this delay.
const SMALL_CHANGES: Duration = Duration::from_secs(30);
