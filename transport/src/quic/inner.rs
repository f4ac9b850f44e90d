//! The state that the tasks of one endpoint share: its socket, its credentials, the table of peers, bans and expectations.
use super::config::Configs;
use super::handshakes::Handshakes;
use super::peer::{Limits, Peer};
use super::slots::Slots;
use crate::bulk::Serve;
use crate::certificate::{Chain, MeshCredentials};
use crate::event::{Event, Sink};
use crate::frame::{Expectation, Route};
use crate::identity::{Identity, NodeId, PeerId};
use crate::revocation::Revocation;
use crate::socket::Buffers;
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::{SystemTime, UNIX_EPOCH},
};
use tokio::runtime::Handle;

/// The state of an endpoint, shared by its tasks.
pub(super) struct Inner {
    pub(super) endpoint: quinn::Endpoint,
    pub(super) configs: Configs,
    pub(super) identity: Identity,
    pub(super) credentials: RwLock<Option<Arc<MeshCredentials>>>,
    pub(super) limits: Limits,
    pub(super) sink: Arc<dyn Sink>,
    pub(super) server: Arc<dyn Serve>,
    pub(super) runtime: Handle,
    pub(super) buffers: Buffers,
    /// Random: distinguishes this incarnation of the endpoint from earlier ones.
    pub(super) instance: u64,
    pub(super) slots: Mutex<Slots>,
    /// Banned peers, each with its revocation. They and all members with one of them in their certificate chain are
    /// rejected.
    pub(super) banned: RwLock<BTreeMap<PeerId, Revocation>>,
    /// Handshakes in progress with unauthenticated peers, by source address.
    pub(super) handshakes: Arc<Handshakes>,
    pub(super) expectations: RwLock<BTreeMap<u64, BTreeMap<Route, Expectation>>>,
    /// The task that accepts connections.
    pub(super) accepting: OnceLock<tokio::task::AbortHandle>,
}

impl Inner {
    pub(super) fn slots(&self) -> MutexGuard<'_, Slots> {
        // Every change of the table is a single step, so the table is consistent even after a panic.
        self.slots.lock()
    }

    pub(super) fn peer(&self, node: &NodeId) -> Option<Arc<Peer>> {
        self.slots().peer(node)
    }

    pub(super) fn credentials(&self) -> Option<Arc<MeshCredentials>> {
        self.credentials.read().clone()
    }

    pub(super) fn chain(&self) -> Option<Chain> {
        self.credentials().map(|c| c.chain.clone())
    }

    /// The first banned peer among `peers`.
    pub(super) fn banned_of(&self, peers: impl IntoIterator<Item = PeerId>) -> Option<PeerId> {
        let banned = self.banned.read();
        peers.into_iter().find(|peer| banned.contains_key(peer))
    }

    pub(super) fn revocation_of(&self, peer: &PeerId) -> Option<Revocation> {
        self.banned.read().get(peer).cloned()
    }

    pub(super) fn expected(&self, route: &Route) -> Option<Expectation> {
        let expectations = self.expectations.read();
        expectations.get(&route.job)?.get(route).cloned()
    }

    pub(super) fn refused(&self, from: Option<PeerId>, addr: SocketAddr, why: impl Into<String>) {
        self.sink.event(Event::Rejected { from, addr, why: why.into() });
    }
}

/// Wall clock in unix seconds, for certificate expiry.
pub(super) fn now_unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
