//! The table of peers: addresses, data queued for a connection, and the choice between two crossing connections.
use super::outgoing::{Outgoing, SendError};
use super::peer::Peer;
use crate::close::CloseCode;
use crate::identity::{NodeId, PeerId, node_id};
use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

/// Maximum peers remembered: members of the mesh and a few former ones.
const SLOTS_MAX: usize = 8192;
/// Maximum addresses per peer.
const ADDRS_MAX: usize = 16;
/// Maximum bytes queued for a connection that is not established yet.
const WAITING_BYTES_MAX: usize = 32 << 20;

#[derive(Default)]
pub(super) struct Slots(BTreeMap<NodeId, Slot>);

struct Slot {
    peer_id: PeerId,
    addrs: Vec<SocketAddr>,
    /// At most one dial per peer.
    dialing: bool,
    /// Sent when connected, dropped if the dial fails.
    waiting: Vec<Outgoing>,
    peer: Option<Arc<Peer>>,
}

/// Outcome of placing a new connection.
pub(super) enum Placed {
    /// The new connection is kept; an older one is closed.
    Stays { replaced: Option<Arc<Peer>> },
    /// The older connection is kept.
    Duplicate,
}

impl Slots {
    pub(super) fn learn(&mut self, peer_id: PeerId, addrs: Vec<SocketAddr>) {
        let slot = self.slot(peer_id);
        if !addrs.is_empty() {
            slot.addrs = addrs;
            slot.addrs.truncate(ADDRS_MAX);
        }
    }

    /// Like `learn`, but keeps addresses that are already known.
    pub(super) fn learn_first(&mut self, peer_id: PeerId, addr: SocketAddr) {
        let slot = self.slot(peer_id);
        if slot.addrs.is_empty() {
            slot.addrs.push(addr);
        }
    }

    pub(super) fn peer(&self, node: &NodeId) -> Option<Arc<Peer>> {
        self.0.get(node)?.peer.clone()
    }

    pub(super) fn peers(&self) -> impl Iterator<Item = &Arc<Peer>> {
        self.0.values().filter_map(|slot| slot.peer.as_ref())
    }

    /// Drops a node's addresses and queued data. Returns its connection, which the caller closes; its end is reported
    /// as usual.
    pub(super) fn forget(&mut self, node: &NodeId) -> Option<Arc<Peer>> {
        let slot = self.0.get_mut(node)?;
        slot.waiting.clear();
        slot.addrs.clear();
        slot.peer.clone()
    }

    /// Queues data until the node is connected. If it is connected by now, returns the data with the connection.
    pub(super) fn wait(
        &mut self,
        node: &NodeId,
        outgoing: Outgoing,
    ) -> Result<Option<(Arc<Peer>, Outgoing)>, SendError> {
        let slot = self.0.get_mut(node).ok_or(SendError::Unknown)?;
        if let Some(peer) = &slot.peer {
            return Ok(Some((peer.clone(), outgoing)));
        }
        if slot.addrs.is_empty() && !slot.dialing {
            return Err(SendError::Unknown);
        }
        let held: usize = slot.waiting.iter().map(Outgoing::bytes).sum();
        if held + outgoing.bytes() > WAITING_BYTES_MAX {
            return Err(SendError::Slow);
        }
        slot.waiting.push(outgoing);
        Ok(None)
    }

    /// Claims the right to dial, unless a connection exists or another dial is in progress.
    pub(super) fn begin_dial(&mut self, node: &NodeId) -> Dial {
        let Some(slot) = self.0.get_mut(node) else { return Dial::Running };
        match &slot.peer {
            Some(peer) if peer.connection.close_reason().is_none() => Dial::Connected(peer.clone()),
            Some(_) | None if slot.dialing => Dial::Running,
            Some(_) | None => {
                slot.dialing = true;
                Dial::Begin(slot.peer_id, slot.addrs.clone())
            }
        }
    }

    /// Ends a dial. Returns `true`, and drops queued data, if there is no connection.
    pub(super) fn end_dial(&mut self, node: &NodeId) -> bool {
        let Some(slot) = self.0.get_mut(node) else { return false };
        slot.dialing = false;
        if slot.peer.is_none() {
            slot.waiting.clear();
        }
        slot.peer.is_none()
    }

    pub(super) fn is_dialing(&self, node: &NodeId) -> bool {
        self.0.get(node).is_some_and(|slot| slot.dialing)
    }

    /// Puts a new connection into the table, unless the existing one is kept: of two crossing connections both sides
    /// keep the one dialed by the lower `PeerId`; a new connection of a restarted peer always replaces the old one.
    /// `greet` runs before anything else is sent on it, then the queued data is sent.
    pub(super) fn place(&mut self, peer: &Arc<Peer>, greet: impl FnOnce()) -> Placed {
        let slot = self.slot(peer.peer_id);
        if slot.peer.as_ref().is_some_and(|old| stays(old, peer)) {
            return Placed::Duplicate;
        }
        let replaced = slot.peer.replace(peer.clone());
        greet();
        for outgoing in slot.waiting.drain(..) {
            // A failure here closes the connection, which is reported like any other end.
            let _ = outgoing.send(peer);
        }
        if let Some(old) = &replaced {
            old.close(CloseCode::Duplicate, "replaced by another connection");
        }
        Placed::Stays { replaced }
    }

    /// Removes an ended connection; `false` if it was already replaced.
    pub(super) fn remove(&mut self, peer: &Arc<Peer>) -> bool {
        let Some(slot) = self.0.get_mut(&peer.node) else { return false };
        let current = slot.peer.as_ref().is_some_and(|p| Arc::ptr_eq(p, peer));
        if current {
            slot.peer = None;
        }
        current
    }

    fn slot(&mut self, peer_id: PeerId) -> &mut Slot {
        let node = node_id(&peer_id);
        if self.0.len() >= SLOTS_MAX && !self.0.contains_key(&node) {
            let idle = self.0.iter().find(|(_, s)| s.peer.is_none() && !s.dialing).map(|(node, _)| *node);
            idle.map(|node| self.0.remove(&node));
        }
        self.0.entry(node).or_insert_with(|| Slot {
            peer_id,
            addrs: Vec::new(),
            dialing: false,
            waiting: Vec::new(),
            peer: None,
        })
    }
}

/// Result of [`Slots::begin_dial`].
pub(super) enum Dial {
    Begin(PeerId, Vec<SocketAddr>),
    Running,
    Connected(Arc<Peer>),
}

/// Whether `old` is kept although `new` has been established.
fn stays(old: &Peer, new: &Peer) -> bool {
    let lives = old.connection.close_reason().is_none() && old.instance == new.instance;
    lives && old.dialer < new.dialer
}
