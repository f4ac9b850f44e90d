//! Views of the membership table, for status, routing and planning.
use super::{Membership, UNMEASURED};
use crate::config::{Capacity, DeviceCapacity};
use crate::id::{ContentId, Generation, NodeId};
use crate::message::Advert;
use crate::place::PlaceSet;
use crate::work::DownReason;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::net::SocketAddr;
use partitioner::{Device, Fleet, Link};

/// One member, for status and for routing.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// The node.
    pub node: NodeId,
    /// Its generation.
    pub generation: Generation,
    /// Alive (perhaps suspected), or down and why.
    pub state: MemberState,
    /// Its advert, once received.
    pub advert: Option<&'a Advert>,
    /// Its gossip address.
    pub gossip_addr: Option<SocketAddr>,
    /// A data-plane connection is open.
    pub connected: bool,
    /// Round trip over the connection, once measured.
    pub rtt_ns: Option<u64>,
    /// Throughput of the connection, once measured.
    pub bytes_per_second: Option<u64>,
    /// Number of its messages that were malformed or forged.
    pub refused: u32,
}

/// Whether a member is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// It answers.
    Alive,
    /// It has not answered this node's probe yet.
    Suspect,
    /// It is down.
    Down(DownReason),
}

impl Membership {
    /// This node's own advert.
    pub fn own(&self) -> &Advert {
        self.adverts.own()
    }

    /// All members but this node, alive or recently down, by id.
    pub fn members(&self) -> impl Iterator<Item = Member<'_>> {
        self.peers.keys().filter_map(|node| self.member(*node))
    }

    /// Ids of the members alive, without this node.
    pub fn alive(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.peers.iter().filter(|(_, peer)| peer.down.is_none()).map(|(node, _)| *node)
    }

    /// One member.
    pub fn member(&self, node: NodeId) -> Option<Member<'_>> {
        let peer = self.peers.get(&node)?;
        let state = match peer.down {
            Some(reason) => MemberState::Down(reason),
            None if self.swim.suspects(node) => MemberState::Suspect,
            None => MemberState::Alive,
        };
        Some(Member {
            node,
            generation: peer.life.generation,
            state,
            advert: self.adverts.get(node),
            gossip_addr: self.gossip_addr(node),
            connected: self.connected.contains_key(&node),
            rtt_ns: self.connected.get(&node).map(|link| link.rtt_ns),
            bytes_per_second: self
                .connected
                .get(&node)
                .map(|link| link.bytes_per_second)
                .filter(|bytes| *bytes != UNMEASURED.bytes_per_second),
            refused: peer.refused,
        })
    }

    /// Whether a member is alive according to SWIM.
    pub fn is_alive(&self, node: NodeId) -> bool {
        self.peers.get(&node).is_some_and(|peer| peer.down.is_none())
    }

    /// A node's gossip address: the source of its last datagram; else the addresses from gossip, its advert and discovery in
    /// turn.
    pub fn gossip_addr(&self, node: NodeId) -> Option<SocketAddr> {
        let peer = self.peers.get(&node);
        if let Some(source) = peer.and_then(|peer| peer.source) {
            return Some(source);
        }
        let advertised = self.adverts.get(node).map(|advert| advert.gossip_addrs.as_slice()).unwrap_or_default();
        let found = self.contacts.get(&node).map(|found| found.gossip.as_slice()).unwrap_or_default();
        let hint = peer.and_then(|peer| peer.life.addr);
        let usable = || hint.iter().chain(advertised).chain(found).filter(|addr| !addr.ip().is_unspecified());
        let tries = peer.map_or(0, |peer| peer.tries);
        usable().nth(tries % usable().count().max(1)).copied()
    }

    /// Key and data-plane addresses of a node, as a `Connect` needs them.
    pub fn data_contact(&self, node: NodeId) -> Option<(Vec<u8>, Vec<SocketAddr>)> {
        if let Some(advert) = self.adverts.get(node) {
            let mut addrs = advert.data_addrs.clone();
            if let Some(found) = self.contacts.get(&node) {
                addrs.extend(found.data.iter().filter(|addr| !advert.data_addrs.contains(addr)));
            }
            return Some((advert.peer_id.clone(), addrs));
        }
        self.contacts.get(&node).map(|found| (found.peer_id.clone(), found.data.clone()))
    }

    /// Whether a data-plane connection is open.
    pub fn is_connected(&self, node: NodeId) -> bool {
        self.connected.contains_key(&node)
    }

    /// The measured devices and links, this node's among them. `Device::memory` is what is free now, without the bytes that a
    /// job of this mesh already holds there.
    pub fn fleet(&self) -> Fleet {
        let mut adverts: BTreeMap<NodeId, &Advert> =
            self.alive().filter_map(|node| Some((node, self.adverts.get(node)?))).collect();
        adverts.insert(self.node, self.adverts.own());
        let mut links = BTreeMap::new();
        for (peer, link) in self.connected.iter().filter(|(peer, _)| adverts.contains_key(peer)) {
            links.insert((self.node.into(), (*peer).into()), *link);
            links.insert(((*peer).into(), self.node.into()), *link);
        }
        // Links between other nodes are not measured from here: the slowest of this node's links is a fair guess.
        let default_link = links.values().copied().reduce(slower).unwrap_or(UNMEASURED);
        let devices = adverts.values().flat_map(|advert| self.devices(advert)).collect();
        Fleet { devices, links, default_link }
    }

    /// Live members whose adverts name this content, at most `most`.
    pub fn holders(&self, content: ContentId, most: usize) -> Vec<NodeId> {
        let holds = |node: &NodeId| self.adverts.get(*node).is_some_and(|advert| advert.holds.contains(&content));
        self.alive().filter(holds).take(most).collect()
    }

    /// The capacity of a member, or of this node.
    pub fn capacity(&self, node: NodeId) -> Option<&Capacity> {
        let advert = if node == self.node { Some(self.adverts.own()) } else { self.adverts.get(node) };
        advert.map(|advert| &advert.capacity)
    }

    fn devices(&self, advert: &Advert) -> Vec<Device> {
        let (capacity, several) = (&advert.capacity, advert.capacity.devices.len() > 1);
        let excluded = advert.draining || (advert.node == self.node && self.left);
        let device = |(index, device): (u8, &DeviceCapacity)| Device {
            id: advert.node.device(index),
            name: advert.name.clone(),
            label: if several { device.label().into() } else { String::new() },
            machine: capacity.machine,
            zone: capacity.zone.clone(),
            memory: device.memory_free,
            bytes_per_second: device.bytes_per_second,
            flops_per_second: device.flops_per_second,
            copy_bytes_per_second: device.copy_bytes_per_second,
            step_ns: device.step_ns,
            layer_ns: device.layer_ns,
            cache_bytes_per_second: device.cache_bytes_per_second,
            ram: device.ram_free,
            ram_bytes_per_second: device.ram_bytes_per_second,
            ram_flops_per_second: device.ram_flops_per_second,
            numerics: device.numerics,
            pass_steps: device.pass_steps,
            excluded: excluded || device.gone,
        };
        (0..).zip(&capacity.devices).map(device).collect()
    }

    /// Live nodes, this one included, that take no new work.
    pub fn draining(&self) -> BTreeSet<NodeId> {
        let others = self.alive().filter(|node| self.adverts.get(*node).is_some_and(|advert| advert.draining));
        let own = (self.adverts.own().draining || self.left).then_some(self.node);
        others.chain(own).collect()
    }

    /// Devices that their nodes report as gone.
    pub fn gone(&self) -> PlaceSet {
        let adverts = self.alive().filter_map(|node| self.adverts.get(node)).chain([self.adverts.own()]);
        let gone = adverts.flat_map(|advert| {
            let devices = (0..).zip(&advert.capacity.devices).filter(|(_, device)| device.gone);
            devices.map(|(index, _)| advert.node.device(index))
        });
        gone.collect()
    }
}

fn slower(a: Link, b: Link) -> Link {
    Link { rtt_ns: a.rtt_ns.max(b.rtt_ns), bytes_per_second: a.bytes_per_second.min(b.bytes_per_second) }
}
