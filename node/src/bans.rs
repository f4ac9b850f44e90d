//! Bans: distributes revocations to all members, and rotates the mesh key so that banned nodes do not get the new one.
//!
//! `node_core::admission` decides which revocations are in force; the transport signs and verifies them. Members
//! synchronise by push-pull over their certified connections: after every change, when they connect, and every 30 s
//! with one peer. The key is distributed the same way, not through the core, whose inputs may be recorded.
use crate::admission::{self, Admission};
use crate::bulk::BulkRequest;
use crate::clock::unix_seconds;
use crate::driver::queue::DriverHandle;
use crate::error::NodeError;
use exchange::{BACK, Exchange, NEWS};
use node_core::admission::Invite;
use node_core::id::NodeId;
use node_core::input::Input;
use notice::BanNotice;
use parking_lot::{Mutex, MutexGuard};
use state::{BanState, STATE_BYTES_MAX};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use transport::{Endpoint, GossipSocket, MeshCredentials, PeerId, RequestError, Revocation, node_id};

pub(crate) mod exchange;
mod notice;
mod state;
#[cfg(test)]
mod tests;

/// Delay before a new key is used for encryption, so that all members have received it: a round trip to each.
const SEAL_AFTER: Duration = Duration::from_secs(1);
/// Interval of exchanges with one connected member.
const AGAIN: Duration = Duration::from_secs(30);
/// If the wall clock deviates from the elapsed time by more than this, it was set. Then all members are asked again,
/// because revocations may have been rejected as from the future.
const CLOCK_LEAP: Duration = Duration::from_secs(60);

/// This node's knowledge of bans, and their enforcement.
pub(crate) struct Bans {
    endpoint: Arc<Endpoint>,
    admission: Arc<Admission>,
    gossip: Arc<GossipSocket>,
    driver: DriverHandle,
    runtime: tokio::runtime::Handle,
    data_dir: PathBuf,
    /// Display name of this node, for its revocations.
    name: String,
    state: Mutex<BanState>,
    /// Serialises changes while they are written and applied, so that an older key never replaces a newer one. `state`
    /// is never locked during a write.
    changing: Mutex<()>,
    /// Banned nodes, and the notice if this node is banned.
    known: Mutex<Known>,
    /// Members with a running exchange, and whether to repeat it afterwards.
    exchanging: Mutex<BTreeMap<transport::NodeId, bool>>,
    /// The encryption key, for the task [`seal`].
    sealing: watch::Sender<[u8; 32]>,
}

#[derive(Default)]
struct Known {
    banned: BTreeMap<NodeId, Revocation>,
    own: Option<BanNotice>,
}

/// The result of a ban.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Banned {
    /// PeerIds of connected members that the banned node had certified: they are revoked transitively.
    pub with_it: Vec<PeerId>,
    /// Tickets of this node that became void, because banned nodes may have their secrets.
    pub void: Vec<Invite>,
}

impl Bans {
    /// Restores the saved state and enforces it.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn open(
        endpoint: Arc<Endpoint>,
        admission: Arc<Admission>,
        gossip: Arc<GossipSocket>,
        driver: DriverHandle,
        data_dir: PathBuf,
        name: String,
    ) -> Result<Arc<Self>, NodeError> {
        let held = admission.credentials();
        // If the membership was granted just now, its key is at least as new as the saved one.
        let state = BanState { key: held.mesh_key, ..load(&data_dir, &held)? };
        let runtime = tokio::runtime::Handle::current();
        let (sealing, keys) = watch::channel(state.key);
        runtime.spawn(seal(gossip.clone(), keys));
        let bans = Self {
            endpoint,
            admission,
            gossip,
            driver,
            runtime,
            data_dir,
            name,
            state: Mutex::new(state),
            changing: Mutex::default(),
            known: Mutex::default(),
            exchanging: Mutex::default(),
            sealing,
        };
        let state = bans.state().clone();
        bans.enforce(&state);
        Ok(Arc::new(bans))
    }

    /// Spawns the task that exchanges periodically with a connected member, until the node ends.
    pub(crate) fn watch(self: &Arc<Self>) -> tokio::task::JoinHandle<()> {
        let bans = self.clone();
        self.runtime.spawn(async move {
            for turn in 0.. {
                let (begun, clock) = (Instant::now(), unix_seconds());
                tokio::time::sleep(AGAIN).await;
                let passed = begun.elapsed().as_secs();
                if unix_seconds().abs_diff(clock + passed) > CLOCK_LEAP.as_secs() {
                    tracing::info!("the clock was set or the machine was suspended: asking all members for bans again");
                    let state = bans.state().clone();
                    bans.enforce(&state);
                    bans.exchange_with_all();
                    continue;
                }
                let peers = bans.endpoint.peers();
                if let Some(peer) = peers.get(turn % peers.len().max(1)) {
                    bans.exchange(peer.node, NEWS);
                }
            }
        })
    }

    /// Revokes a membership, rotates the mesh key, and notifies all members. `name`: of the banned node, if known.
    ///
    /// # Errors
    /// `peer` is this node, this node may not ban, or the state cannot be written.
    pub(crate) fn ban(self: &Arc<Self>, peer: PeerId, name: &str) -> Result<Banned, NodeError> {
        let me = self.admission.identity();
        if peer == me.peer_id() {
            return Err(NodeError::Invalid("a node cannot ban itself: to leave the mesh, run `meshnode leave`".into()));
        }
        let held = self.admission.credentials();
        let revocation = Revocation::issue(&held, me, peer, unix_seconds(), (name, self.name.as_str()))
            .map_err(|e| NodeError::Unauthorised(format!("this node may not ban other nodes: {e}")))?;
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|e| NodeError::Failed(format!("cannot generate a random mesh key: {e}")))?;
        let with_it = self.endpoint.certified_by(peer);
        let number = self.state().number + 1;
        let merged = self.merge(BanState { number, key, revocations: vec![revocation] })?;
        if merged.is_some() {
            self.exchange_with_all();
        }
        Ok(Banned { with_it, void: merged.unwrap_or_default() })
    }

    /// Handles a new connection: exchanges, because one of the two may have missed a ban.
    pub(crate) fn connected(self: &Arc<Self>, node: transport::NodeId) {
        self.exchange(node, NEWS);
    }

    /// Handles a member that rejected this node with a revocation.
    pub(crate) fn handle_refused(self: &Arc<Self>, revocation: Revocation) {
        let state = self.state();
        let received = BanState { number: state.number, key: state.key, revocations: vec![revocation] };
        drop(state);
        if let Err(e) = self.merge(received) {
            tracing::error!("cannot save the ban of this node: {e}");
        }
    }

    /// Why this node is no longer a member, if it was banned.
    pub(crate) fn notice(&self) -> Option<BanNotice> {
        self.known().own.clone()
    }

    /// The revocation of a node, if it is banned.
    pub(crate) fn of(&self, node: NodeId) -> Option<Revocation> {
        self.known().banned.get(&node).cloned()
    }

    /// Answers an exchange: with nothing if both states are equal, else with this node's state. Writes to the disk.
    pub(crate) fn answer(self: &Arc<Self>, from: transport::NodeId, exchange: Exchange) -> Vec<u8> {
        let Exchange { kind, digest, head } = exchange;
        self.receive(head);
        let state = self.state();
        if state.digest() == digest {
            return Vec::new();
        }
        let answer = state.encode();
        drop(state);
        if kind == NEWS {
            self.exchange(from, BACK);
        }
        answer
    }

    /// Starts an exchange with a member. At most one exchange per member runs at a time; changes meanwhile start
    /// another.
    fn exchange(self: &Arc<Self>, node: transport::NodeId, kind: u8) {
        let mut exchanging = self.exchanging();
        if let Some(again) = exchanging.get_mut(&node) {
            *again = true;
            return;
        }
        exchanging.insert(node, false);
        drop(exchanging);
        let bans = self.clone();
        self.runtime.spawn(async move {
            let mut kind = kind;
            loop {
                if let Err(e) = bans.try_exchange(node, kind).await {
                    report(NodeId(node), &e);
                }
                if !bans.must_repeat(&node) {
                    return;
                }
                kind = NEWS;
            }
        });
    }

    /// Ends an exchange; `true` if another was requested meanwhile, which the caller must run.
    fn must_repeat(&self, node: &transport::NodeId) -> bool {
        let mut exchanging = self.exchanging();
        let again = exchanging.get_mut(node).is_some_and(std::mem::take);
        if !again {
            exchanging.remove(node);
        }
        again
    }

    async fn try_exchange(self: &Arc<Self>, node: transport::NodeId, kind: u8) -> Result<(), RequestError> {
        let request = BulkRequest::Bans(Exchange::new(&self.state(), kind)).encode();
        let answer = self.endpoint.request(node, request.into()).await?.all(STATE_BYTES_MAX).await?;
        if let Some(received) = BanState::decode(&answer) {
            let bans = self.clone();
            // Blocking, because it writes to the disk.
            let _ = tokio::task::spawn_blocking(move || bans.receive(received)).await;
        }
        Ok(())
    }

    fn receive(self: &Arc<Self>, received: BanState) {
        match self.merge(received) {
            Ok(Some(_)) => self.exchange_with_all(),
            Ok(None) => {}
            Err(e) => tracing::error!("cannot save the bans received from a member: {e}"),
        }
    }

    fn exchange_with_all(self: &Arc<Self>) {
        self.endpoint.peers().iter().for_each(|peer| self.exchange(peer.node, NEWS));
    }

    /// Merges valid revocations and a newer key into the state. `None` if nothing changed; else the tickets of this
    /// node that became void.
    fn merge(&self, received: BanState) -> Result<Option<Vec<Invite>>, NodeError> {
        let _one_at_a_time = self.changing.lock();
        let mesh = self.admission.credentials().mesh;
        let now = unix_seconds();
        let before = self.state().clone();
        let is_valid = |revocation: &Revocation| !revocation.is_from_the_future(now) && revocation.verify(mesh).is_ok();
        let merged = before.clone().merged(received, is_valid);
        if merged == before {
            return Ok(None);
        }
        // Write to the disk first: a node that lost a ban in a crash would admit the banned node again.
        merged.save(&self.data_dir, mesh).map_err(|e| {
            let why = crate::disk::explain(&e, crate::disk::FREE_DATA);
            NodeError::Failed(format!("cannot write {}: {why}", self.data_dir.join("bans").display()))
        })?;
        // Disconnect banned nodes before this node can answer with the new key, which they must not get.
        let void = self.enforce(&merged);
        let key = merged.key;
        *self.state() = merged;
        if key != before.key {
            self.take_key(key);
        }
        Ok(Some(void))
    }

    fn take_key(&self, key: [u8; 32]) {
        let held = MeshCredentials { mesh_key: key, ..(*self.admission.credentials()).clone() };
        self.endpoint.set_credentials(held.clone());
        self.admission.set_credentials(held.clone());
        // The bans file takes precedence at the next start. This copy is a fallback in case that file is damaged.
        if let Err(e) = admission::save(&self.data_dir, &held) {
            tracing::warn!("the new mesh key was saved with the bans, but not with the membership: {e}");
        }
        self.gossip.set_decryption_key(&key);
        self.sealing.send_replace(key);
        tracing::info!("the mesh key was rotated");
    }

    /// Closes connections to banned nodes, removes them from the core, and voids the tickets that they may have, which
    /// it returns.
    fn enforce(&self, state: &BanState) -> Vec<Invite> {
        let held = self.admission.credentials();
        let me = self.admission.identity().peer_id();
        let mut by_peer = state.banned(held.mesh);
        let own = BanNotice::of(me, &held, &by_peer);
        by_peer.remove(&me);
        let banned: BTreeMap<NodeId, Revocation> =
            by_peer.iter().map(|(peer, revocation)| (NodeId(node_id(peer)), revocation.clone())).collect();
        let mut known = self.known();
        if own.is_some() && own != known.own {
            own.iter().for_each(|notice| tracing::error!("{notice}"));
        }
        let newest = banned
            .iter()
            .filter(|(node, _)| !known.banned.contains_key(*node))
            .map(|(_, revocation)| revocation.at)
            .max();
        let nodes = banned.keys().copied().collect();
        *known = Known { banned, own };
        drop(known);
        // Before the core drops the connections, so that they are closed with the reason.
        self.endpoint.ban(by_peer);
        self.driver.input(Input::Banned(nodes));
        newest.map(|at| self.void_tickets(at)).unwrap_or_default()
    }

    fn void_tickets(&self, at: u64) -> Vec<Invite> {
        match self.admission.void_invites(at) {
            Ok(void) => {
                if !void.is_empty() {
                    let tickets = crate::views::count(void.len(), "ticket");
                    tracing::warn!("voided {tickets} of this node, because a banned member may have the secrets");
                }
                void
            }
            Err(e) => {
                tracing::error!("cannot void the tickets of this node that a banned member may have: {e}");
                Vec::new()
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, BanState> {
        self.state.lock()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }

    fn exchanging(&self) -> MutexGuard<'_, BTreeMap<transport::NodeId, bool>> {
        self.exchanging.lock()
    }
}

/// At the start of a node: returns its credentials with the saved mesh key, and the notice if the node is banned.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn restore(
    data_dir: &std::path::Path,
    me: PeerId,
    held: MeshCredentials,
) -> Result<(MeshCredentials, Option<BanNotice>), NodeError> {
    let state = load(data_dir, &held)?;
    let notice = BanNotice::of(me, &held, &state.banned(held.mesh));
    Ok((MeshCredentials { mesh_key: state.key, ..held }, notice))
}

fn load(data_dir: &std::path::Path, held: &MeshCredentials) -> Result<BanState, NodeError> {
    BanState::load(data_dir, held)
        .map_err(|e| NodeError::Failed(format!("cannot read {}: {e}", data_dir.join("bans").display())))
}

/// Switches encryption to the newest key after [`SEAL_AFTER`]. A single task, so that an older key never replaces a
/// newer one.
async fn seal(gossip: Arc<GossipSocket>, mut keys: watch::Receiver<[u8; 32]>) {
    while keys.changed().await.is_ok() {
        tokio::time::sleep(SEAL_AFTER).await;
        let key = *keys.borrow_and_update();
        gossip.set_encryption_key(&key);
    }
}

/// Logs why an exchange failed.
fn report(node: NodeId, error: &RequestError) {
    match error {
        // The connection is lost; the next one begins with an exchange.
        RequestError::NotConnected | RequestError::Truncated => {
            tracing::info!("the exchange of bans with {node} failed: {error}; it is repeated when the node reconnects");
        }
        RequestError::TooLong { .. }
        | RequestError::Rejected(_)
        | RequestError::Block { .. }
        | RequestError::Answer { .. } => tracing::warn!(
            "the exchange of bans with {node} failed: {error}; it is repeated within minutes, and the node may miss bans until \
             then"
        ),
    }
}
