//! Banned members: the revocations, passed on to every member, and a new key of the mesh that the banned do not get.
//!
//! Which revocations hold is `node_core::admission`'s to decide; signatures are the transport's. Members exchange what they
//! know over their certified connections: at once when something changes, when they connect, and every 30 s one picks
//! another. The key goes the same way and not through the core, whose inputs may be recorded.
use crate::admission::{self, Admission};
use crate::bulk::BulkRequest;
use crate::driver::DriverHandle;
use crate::handle::{NodeError, unix_seconds};
use node_core::admission::Invite;
use node_core::id::NodeId;
use node_core::input::Input;
use state::{STATE_BYTES_MAX, State};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use transport::{Endpoint, GossipSocket, MeshCredentials, PeerId, RequestError, Revocation, node_id};

pub(crate) use notice::BanNotice;

mod notice;
mod state;
#[cfg(test)]
mod tests;

/// How long everybody has to learn of a new key before it seals: a round trip to each member.
const SEAL_AFTER: Duration = Duration::from_secs(1);
/// How often one member that is connected is asked what it knows.
const AGAIN: Duration = Duration::from_secs(30);
/// A clock that moved by more than this against the time that passed was set: what it kept out is asked for again.
const CLOCK_LEAP: Duration = Duration::from_secs(60);
/// First byte of an exchange: the other side asks back if it lacks something…
const NEWS: u8 = 1;
/// …or does not, because this is such a question itself.
const BACK: u8 = 0;

/// What a member asks and says about bans: whether to ask back, a digest of all that it knows, and the key with the founder's
/// revocations. So these arrive even where the rest, which goes in the answer, does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exchange {
    kind: u8,
    digest: [u8; 32],
    head: State,
}

impl Exchange {
    fn new(state: &State, kind: u8) -> Self {
        Self { kind, digest: state.digest(), head: state.head() }
    }

    /// As it is sent, after its tag.
    pub fn encode(&self) -> Vec<u8> {
        [&[self.kind][..], &self.digest[..], self.head.encode().as_slice()].concat()
    }

    /// What was sent; none if it is something else.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        let (digest, head) = rest.split_first_chunk::<32>()?;
        Some(Self { kind, digest: *digest, head: State::decode(head)? })
    }
}

/// Who is banned from the mesh, as far as this node knows.
pub struct Bans {
    endpoint: Arc<Endpoint>,
    admission: Arc<Admission>,
    gossip: Arc<GossipSocket>,
    driver: DriverHandle,
    runtime: tokio::runtime::Handle,
    data_dir: PathBuf,
    /// What this node calls itself, for its revocations.
    name: String,
    state: Mutex<State>,
    /// Held while a change is written and applied: one at a time, so that no older key follows a newer one. The state itself
    /// is never locked over a write.
    changing: Mutex<()>,
    /// Banned nodes by their short names, and what concerns this node itself.
    known: Mutex<Known>,
    /// Members being asked, and whether to ask again afterwards.
    exchanging: Mutex<BTreeMap<transport::NodeId, bool>>,
    /// The key to seal with; one task follows it.
    sealing: watch::Sender<[u8; 32]>,
}

#[derive(Default)]
struct Known {
    banned: BTreeMap<NodeId, Revocation>,
    own: Option<BanNotice>,
}

/// What came of a ban.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Banned {
    /// PeerIds of connected members that it had certified: they are banned with it.
    pub with_it: Vec<PeerId>,
    /// Tickets of this node that are revoked: banned nodes may know their secrets.
    pub void: Vec<Invite>,
}

impl Bans {
    /// What this node knew in its last life holds at once.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn open(
        endpoint: Arc<Endpoint>,
        admission: Arc<Admission>,
        gossip: Arc<GossipSocket>,
        driver: DriverHandle,
        data_dir: PathBuf,
        name: String,
    ) -> Result<Arc<Self>, NodeError> {
        let held = admission.credentials();
        // A membership that was granted just now brought its own key, which is at least as new.
        let state = State { key: held.mesh_key, ..load(&data_dir, &held)? };
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

    /// Asks a connected member now and then, until the node ends.
    pub fn watch(self: &Arc<Self>) -> tokio::task::JoinHandle<()> {
        let bans = self.clone();
        self.runtime.spawn(async move {
            for turn in 0.. {
                let (begun, clock) = (Instant::now(), unix_seconds());
                tokio::time::sleep(AGAIN).await;
                let passed = begun.elapsed().as_secs();
                if unix_seconds().abs_diff(clock + passed) > CLOCK_LEAP.as_secs() {
                    tracing::info!("the clock was set, or the machine slept: members are asked again who is banned");
                    let state = bans.state().clone();
                    bans.enforce(&state);
                    bans.tell_everybody();
                    continue;
                }
                let peers = bans.endpoint.peers();
                if let Some(peer) = peers.get(turn % peers.len().max(1)) {
                    bans.exchange(peer.node, NEWS);
                }
            }
        })
    }

    /// Takes back a membership, changes the key of the mesh, and tells every member. `name`: of the banned node, if known.
    ///
    /// # Errors
    /// It is this node, this node has no right to, or the disk refused.
    pub fn ban(self: &Arc<Self>, peer: PeerId, name: &str) -> Result<Banned, NodeError> {
        let me = self.admission.identity();
        if peer == me.peer_id() {
            return Err(NodeError::Invalid("a node does not ban itself: `meshnode leave` ends it".into()));
        }
        let held = self.admission.credentials();
        let revocation = Revocation::issue(&held, me, peer, unix_seconds(), (name, self.name.as_str()))
            .map_err(|e| NodeError::Unauthorised(format!("this node may not ban others: {e}")))?;
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|e| NodeError::Failed(format!("no randomness: {e}")))?;
        let with_it = self.endpoint.certified_by(peer);
        let number = self.state().number + 1;
        let merged = self.merge(State { number, key, said: vec![revocation] })?;
        if merged.is_some() {
            self.tell_everybody();
        }
        Ok(Banned { with_it, void: merged.unwrap_or_default() })
    }

    /// A connection stands: one of the two may have missed something.
    pub fn connected(self: &Arc<Self>, node: transport::NodeId) {
        self.exchange(node, NEWS);
    }

    /// A member refused this node and showed a revocation that concerns it.
    pub fn handle_refused(self: &Arc<Self>, revocation: Revocation) {
        let state = self.state();
        let heard = State { number: state.number, key: state.key, said: vec![revocation] };
        drop(state);
        if let Err(e) = self.merge(heard) {
            tracing::error!("that this node is banned is not kept: {e}");
        }
    }

    /// Why this node is a member no more, if so.
    pub(crate) fn notice(&self) -> Option<BanNotice> {
        self.known().own.clone()
    }

    /// The revocation of a node, if it is banned.
    pub(crate) fn of(&self, node: NodeId) -> Option<Revocation> {
        self.known().banned.get(&node).cloned()
    }

    /// Answers a member: with nothing if both know the same, else with all that is known here. It writes to the disk.
    pub fn answer(self: &Arc<Self>, from: transport::NodeId, exchange: Exchange) -> Vec<u8> {
        let Exchange { kind, digest, head } = exchange;
        self.hear(head);
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

    /// Tells a member the founder's revocations, and asks for what it knows beyond this. One exchange with a
    /// member at a time: the next one carries what changes meanwhile.
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
                if !bans.is_wanted_again(&node) {
                    return;
                }
                kind = NEWS;
            }
        });
    }

    /// Whether something changed during an exchange, which is over now.
    fn is_wanted_again(&self, node: &transport::NodeId) -> bool {
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
        if let Some(heard) = State::decode(&answer) {
            let bans = self.clone();
            // It writes to the disk.
            let _ = tokio::task::spawn_blocking(move || bans.hear(heard)).await;
        }
        Ok(())
    }

    fn hear(self: &Arc<Self>, heard: State) {
        match self.merge(heard) {
            Ok(Some(_)) => self.tell_everybody(),
            Ok(None) => {}
            Err(e) => tracing::error!("what was heard about banned members is not kept: {e}"),
        }
    }

    fn tell_everybody(self: &Arc<Self>) {
        self.endpoint.peers().iter().for_each(|peer| self.exchange(peer.node, NEWS));
    }

    /// Takes over what is new and sound. `None` if nothing was; else the tickets of this node that are void by it.
    fn merge(&self, heard: State) -> Result<Option<Vec<Invite>>, NodeError> {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mesh = self.admission.credentials().mesh;
        let now = unix_seconds();
        let before = self.state().clone();
        let merged = before.clone().merged(heard, |said| !said.is_from_the_future(now) && said.verify(mesh).is_ok());
        if merged == before {
            return Ok(None);
        }
        // On disk first: a node that forgets a ban in a crash would let the banned in again.
        merged.save(&self.data_dir, mesh).map_err(|e| {
            let why = crate::disk::explain(&e, crate::disk::FREE_DATA);
            NodeError::Failed(format!("{}: {why}", self.data_dir.join("bans").display()))
        })?;
        // The banned are cut off before this node can answer with the key that they must not get.
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
        // The file with the bans decides at the next start. This copy is for the day when that one is damaged.
        if let Err(e) = admission::save(&self.data_dir, &held) {
            tracing::warn!("the new key of the mesh is kept with the bans, but not with the membership: {e}");
        }
        self.gossip.open_with(&key);
        self.sealing.send_replace(key);
        tracing::info!("the key of the mesh was changed");
    }

    /// Connections of the banned end, the core forgets them, and tickets that they may know are void: these are returned.
    fn enforce(&self, state: &State) -> Vec<Invite> {
        let held = self.admission.credentials();
        let me = self.admission.identity().peer_id();
        let mut out = state.out(held.mesh);
        let own = BanNotice::of(me, &held, &out);
        out.remove(&me);
        let banned: BTreeMap<NodeId, Revocation> =
            out.iter().map(|(peer, said)| (NodeId(node_id(peer)), said.clone())).collect();
        let mut known = self.known();
        if own.is_some() && own != known.own {
            own.iter().for_each(|notice| tracing::error!("{notice}"));
        }
        let newest = banned.iter().filter(|(node, _)| !known.banned.contains_key(*node)).map(|(_, said)| said.at).max();
        let nodes = banned.keys().copied().collect();
        *known = Known { banned, own };
        drop(known);
        // Before the core drops the connections: they end with the reason.
        self.endpoint.ban(out);
        self.driver.input(Input::Banned(nodes));
        newest.map(|at| self.void_tickets(at)).unwrap_or_default()
    }

    fn void_tickets(&self, at: u64) -> Vec<Invite> {
        match self.admission.void_invites(at) {
            Ok(void) => {
                if !void.is_empty() {
                    tracing::warn!(
                        "a member was banned that may know them: {} tickets of this node are void",
                        void.len()
                    );
                }
                void
            }
            Err(e) => {
                tracing::error!("the tickets of this node that a banned member may know are not void: {e}");
                Vec::new()
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn exchanging(&self) -> MutexGuard<'_, BTreeMap<transport::NodeId, bool>> {
        self.exchanging.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Before a node starts: the key that its last life knew, put into its credentials, and why it is a member no more, if so.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn recall(
    data_dir: &std::path::Path,
    me: PeerId,
    held: MeshCredentials,
) -> Result<(MeshCredentials, Option<BanNotice>), NodeError> {
    let state = load(data_dir, &held)?;
    let notice = BanNotice::of(me, &held, &state.out(held.mesh));
    Ok((MeshCredentials { mesh_key: state.key, ..held }, notice))
}

fn load(data_dir: &std::path::Path, held: &MeshCredentials) -> Result<State, NodeError> {
    State::load(data_dir, held).map_err(|e| NodeError::Failed(format!("{}: {e}", data_dir.join("bans").display())))
}

/// Seals with the newest key once the others can be expected to have it: one task, so that no older key follows a newer one.
async fn seal(gossip: Arc<GossipSocket>, mut keys: watch::Receiver<[u8; 32]>) {
    while keys.changed().await.is_ok() {
        tokio::time::sleep(SEAL_AFTER).await;
        let key = *keys.borrow_and_update();
        gossip.seal_with(&key);
    }
}

/// Logs why an exchange failed.
fn report(node: NodeId, error: &RequestError) {
    match error {
        // Its connection broke: the next one begins with an exchange.
        RequestError::NotConnected | RequestError::Cut => {
            tracing::info!(
                "the exchange about banned members with {node} failed: {error}; it is made again when it connects"
            );
        }
        RequestError::TooLong { .. }
        | RequestError::Refused(_)
        | RequestError::Block { .. }
        | RequestError::Answer { .. } => tracing::warn!(
            "the exchange about banned members with {node} failed: {error}; it is made again within minutes, and bans may not \
             reach it until then"
        ),
    }
}
