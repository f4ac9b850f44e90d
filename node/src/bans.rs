//! Members that are out: what was said about whom, passed on to everybody, and a new key of the mesh that they are not told.
//!
//! What holds of all that was said is `node_core::admission`'s to decide; signatures are the transport's. Members tell each
//! other over their certified connections: at once when something changes, when they connect, and now and then one picks
//! another. The key goes the same way and not through the core, whose inputs may be recorded.
use crate::admission::{self, Admission};
use crate::driver::DriverHandle;
use crate::handle::{NodeError, unix_seconds};
use crate::tags::BANS as TAG;
use node_core::admission::{Revoked, in_force};
use node_core::id::NodeId;
use node_core::input::Input;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use transport::revocation::REVOCATION_BYTES_MAX;
use transport::{Endpoint, GossipSocket, MeshCredentials, PeerId, Revocation, node_id};

/// Bans kept: people ban by hand. Members can fill it; the founder's words and the oldest stay.
const BANS_MAX: usize = 256;
/// How long everybody has to learn of a new key before it seals: a round trip to each member.
const SEAL_AFTER: Duration = Duration::from_secs(1);
/// How often one member that is connected is asked what it knows.
const AGAIN: Duration = Duration::from_secs(30);
const STATE_BYTES_MAX: usize = 64 + BANS_MAX * (REVOCATION_BYTES_MAX + 4);

/// Who is out of the mesh, as far as this node knows.
pub struct Bans {
    endpoint: Arc<Endpoint>,
    admission: Arc<Admission>,
    gossip: Arc<GossipSocket>,
    driver: DriverHandle,
    runtime: tokio::runtime::Handle,
    data_dir: PathBuf,
    state: Mutex<State>,
}

/// What members tell each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct State {
    /// How often the key was changed: of two keys the one with the higher number holds, then the larger.
    number: u64,
    key: [u8; 32],
    said: Vec<Revocation>,
}

impl Bans {
    /// What this node knew in its last life holds at once.
    ///
    /// # Errors
    /// The file is there but damaged: it is not silently forgotten who is out.
    pub fn open(
        endpoint: Arc<Endpoint>,
        admission: Arc<Admission>,
        gossip: Arc<GossipSocket>,
        driver: DriverHandle,
        data_dir: PathBuf,
    ) -> Result<Arc<Self>, NodeError> {
        let held = admission.credentials();
        let path = data_dir.join(FILE);
        let mut state = State { key: held.mesh_key, ..State::default() };
        match std::fs::read(&path) {
            Ok(bytes) => {
                let read = State::decode(&bytes).ok_or_else(|| {
                    NodeError::Failed(format!(
                        "{} is damaged: remove it, and the other members tell this node again who is banned",
                        path.display()
                    ))
                })?;
                state = State { key: held.mesh_key, ..read };
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(NodeError::Failed(format!("{}: {e}", path.display()))),
        }
        let runtime = tokio::runtime::Handle::current();
        let bans = Self { endpoint, admission, gossip, driver, runtime, data_dir, state: Mutex::new(state) };
        bans.enforce();
        Ok(Arc::new(bans))
    }

    /// Asks a connected member now and then, until the node ends.
    pub fn watch(self: &Arc<Self>) -> tokio::task::JoinHandle<()> {
        let bans = self.clone();
        self.runtime.spawn(async move {
            for turn in 0.. {
                tokio::time::sleep(AGAIN).await;
                let peers = bans.endpoint.peers();
                if let Some(peer) = peers.get(turn % peers.len().max(1)) {
                    bans.exchange(peer.node).await;
                }
            }
        })
    }

    /// Takes back a membership, changes the key of the mesh, and tells everybody. Returns who is out with it.
    ///
    /// # Errors
    /// It is this node, this node has no right to, or the disk refused.
    pub fn ban(self: &Arc<Self>, peer: PeerId) -> Result<Vec<PeerId>, NodeError> {
        let me = self.admission.identity();
        if peer == me.peer_id() {
            return Err(NodeError::Invalid("a node does not ban itself: `meshnode leave` ends it".into()));
        }
        let held = self.admission.credentials();
        let revocation = Revocation::issue(&held, me, peer, unix_seconds())
            .map_err(|e| NodeError::Unauthorised(format!("this node may not ban others: {e}")))?;
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|e| NodeError::Failed(format!("no randomness: {e}")))?;
        let with_it = self.endpoint.certified_by(peer);
        let number = self.state().number + 1;
        if self.merge(State { number, key, said: vec![revocation] })? {
            self.tell_everybody();
        }
        Ok(with_it)
    }

    /// A connection stands: one of the two may have missed something.
    pub fn connected(self: &Arc<Self>, node: transport::NodeId) {
        if *self.state() != (State { key: self.admission.credentials().mesh_key, ..State::default() }) {
            let bans = self.clone();
            self.runtime.spawn(async move { bans.exchange(node).await });
        }
    }

    /// Answers a member that tells what it knows with what is known here.
    pub fn answer(self: &Arc<Self>, request: &[u8]) -> Vec<u8> {
        self.hear(request.strip_prefix(&[TAG]).unwrap_or_default());
        self.state().encode()
    }

    async fn exchange(self: &Arc<Self>, node: transport::NodeId) {
        let request = [&[TAG], self.state().encode().as_slice()].concat();
        let Ok(response) = self.endpoint.request(node, request.into()).await else { return };
        if let Ok(answer) = response.all(STATE_BYTES_MAX).await {
            let bans = self.clone();
            // It writes to the disk.
            let _ = tokio::task::spawn_blocking(move || bans.hear(&answer)).await;
        }
    }

    fn hear(self: &Arc<Self>, bytes: &[u8]) {
        let heard = State::decode(bytes);
        match heard.map_or(Ok(false), |heard| self.merge(heard)) {
            Ok(true) => self.tell_everybody(),
            Ok(false) => {}
            Err(e) => tracing::error!("what was heard about banned members is not kept: {e}"),
        }
    }

    fn tell_everybody(self: &Arc<Self>) {
        for peer in self.endpoint.peers() {
            let bans = self.clone();
            self.runtime.spawn(async move { bans.exchange(peer.node).await });
        }
    }

    /// Takes over what is new and sound; returns whether anything was.
    fn merge(&self, heard: State) -> Result<bool, NodeError> {
        let mesh = self.admission.credentials().mesh;
        let mut state = self.state();
        let before = state.clone();
        let merged = before.clone().merged(heard, |said| said.verify(mesh, unix_seconds()).is_ok());
        if merged == before {
            return Ok(false);
        }
        let rekeyed = merged.key != before.key;
        // On disk first: a node that forgets a ban in a crash would let the banned in again.
        self.keep(&merged, rekeyed)?;
        *state = merged;
        let key = state.key;
        drop(state);
        self.enforce();
        if rekeyed {
            self.gossip.open_with(&key);
            let gossip = self.gossip.clone();
            self.runtime.spawn(async move {
                tokio::time::sleep(SEAL_AFTER).await;
                gossip.seal_with(&key);
            });
            tracing::info!("the key of the mesh was changed");
        }
        Ok(true)
    }

    fn keep(&self, state: &State, rekeyed: bool) -> Result<(), NodeError> {
        let failed = |e: std::io::Error| NodeError::Failed(format!("{}: {e}", self.data_dir.join(FILE).display()));
        let beside = self.data_dir.join("bans.new");
        // The key is kept with the membership, in a private file.
        std::fs::write(&beside, State { key: [0; 32], ..state.clone() }.encode()).map_err(failed)?;
        std::fs::rename(&beside, self.data_dir.join(FILE)).map_err(failed)?;
        if rekeyed {
            let held = MeshCredentials { mesh_key: state.key, ..(*self.admission.credentials()).clone() };
            admission::save(&self.data_dir, &held)?;
            self.endpoint.set_credentials(held.clone());
            self.admission.set_credentials(held);
        }
        Ok(())
    }

    /// Connections of those who are out end, and the core forgets them.
    fn enforce(&self) {
        let mesh = self.admission.credentials().mesh;
        let out = self.state().out(|said| said.verify(mesh, unix_seconds()).ok());
        let me = self.admission.identity().peer_id();
        if out.contains(&me) {
            tracing::error!("this node was banned from the mesh: nobody talks to it any more");
        }
        let others: BTreeSet<PeerId> = out.into_iter().filter(|peer| *peer != me).collect();
        let nodes: Vec<NodeId> = others.iter().map(|peer| NodeId(node_id(peer))).collect();
        self.endpoint.ban(others);
        self.driver.input(Input::Banned(nodes));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panics under this lock")
    }
}

/// Whether a request over the data plane is one about bans.
pub fn is_request(request: &[u8]) -> bool {
    request.first() == Some(&TAG)
}

/// The file under the data directory.
const FILE: &str = "bans";

impl State {
    /// This and what was heard, as far as it is sound.
    fn merged(mut self, heard: State, sound: impl Fn(&Revocation) -> bool) -> State {
        if (heard.number, heard.key) > (self.number, self.key) && heard.number <= self.number + NUMBER_LEAP_MAX {
            (self.number, self.key) = (heard.number, heard.key);
        }
        for said in heard.said {
            if !self.said.contains(&said) && sound(&said) {
                self.said.push(said);
            }
        }
        // The same order and the same ones left out everywhere.
        self.said.sort_by_key(|said| (said.is_members(), said.at, said.encode()));
        self.said.truncate(BANS_MAX);
        self
    }

    /// Who is out of all that was said; `by` tells whose word each is.
    fn out(&self, by: impl Fn(&Revocation) -> Option<Option<PeerId>>) -> BTreeSet<PeerId> {
        let named = |peer: PeerId| NodeId(node_id(&peer));
        let said = self
            .said
            .iter()
            .filter_map(|said| Some(Revoked { by: by(said)?.map(named), at: said.at, banned: named(said.banned) }));
        let out = in_force(said);
        self.said.iter().map(|said| said.banned).filter(|peer| out.contains(&named(*peer))).collect()
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = self.number.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.key);
        for said in &self.said {
            let said = said.encode();
            bytes.extend_from_slice(&u32::try_from(said.len()).unwrap_or(u32::MAX).to_le_bytes());
            bytes.extend_from_slice(&said);
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk::<8>()?;
        let (key, mut rest) = rest.split_first_chunk::<32>()?;
        let mut said = Vec::new();
        while let Some((length, after)) = rest.split_first_chunk::<4>() {
            let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
            let (one, after) = after.split_at_checked(length)?;
            said.push(Revocation::decode(one).ok().filter(|_| said.len() < BANS_MAX)?);
            rest = after;
        }
        rest.is_empty().then_some(Self { number: u64::from_le_bytes(*number), key: *key, said })
    }
}

/// By how many changes another member may be ahead: nobody can use up the numbers.
const NUMBER_LEAP_MAX: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use transport::{Identity, Roles};

    struct Mesh {
        held: MeshCredentials,
        founder: Identity,
        members: Vec<(Identity, MeshCredentials)>,
    }

    fn mesh() -> Mesh {
        let founder = Identity::generate();
        let held = MeshCredentials::found(&founder, unix_seconds() + 1000);
        let members = (0..3).map(|_| {
            let member = Identity::generate();
            let chain = held.issue(&founder, member.peer_id(), Roles::INVITER, unix_seconds() + 1000).unwrap();
            (member, MeshCredentials { chain, root_secret: None, ..held.clone() })
        });
        Mesh { members: members.collect(), founder, held }
    }

    impl Mesh {
        fn says(&self, by: usize, banned: usize, at: u64) -> State {
            let (me, held) = &self.members[by];
            let said = Revocation::issue(held, me, self.members[banned].0.peer_id(), at).unwrap();
            State { said: vec![said], ..State::default() }
        }

        fn heard(&self, states: &[State]) -> State {
            let sound = |said: &Revocation| said.verify(self.held.mesh, unix_seconds()).is_ok();
            states.iter().cloned().fold(State::default(), |all, one| all.merged(one, sound))
        }

        fn out(&self, state: &State) -> BTreeSet<PeerId> {
            state.out(|said| said.verify(self.held.mesh, unix_seconds()).ok())
        }
    }

    #[test]
    fn whoever_heard_the_same_agrees_on_who_is_out() {
        let mesh = mesh();
        let said = [mesh.says(0, 1, 5), mesh.says(1, 0, 6), mesh.says(1, 2, 7)];
        let back: Vec<State> = said.iter().rev().cloned().collect();
        let (one, other) = (mesh.heard(&said), mesh.heard(&back));
        assert_eq!(one, other);
        assert_eq!(mesh.out(&one), [mesh.members[1].0.peer_id()].into());
        assert_eq!(mesh.heard(&[one.clone(), other]), one, "nothing is heard twice");
        let root = Revocation::issue(&mesh.held, &mesh.founder, mesh.members[0].0.peer_id(), 9).unwrap();
        let root = State { said: vec![root], ..State::default() };
        let out = mesh.out(&mesh.heard(&[one, root]));
        assert_eq!(out, [mesh.members[0].0.peer_id(), mesh.members[2].0.peer_id()].into(), "the founder's word first");
        assert_eq!(State::decode(&said[0].encode()), Some(said[0].clone()));
    }

    #[test]
    fn forgeries_and_floods_change_nothing() {
        let (mesh, other) = (mesh(), mesh_of_others());
        assert_eq!(mesh.heard(&[other.says(0, 1, 5)]), State::default());
        let flood: Vec<State> = (0..2 * BANS_MAX as u64).map(|at| mesh.says(0, 1, 1000 + at)).collect();
        let first = mesh.says(0, 2, 5);
        let all = mesh.heard(&[flood.as_slice(), &[first]].concat());
        assert_eq!(all.said.len(), BANS_MAX);
        assert!(mesh.out(&all).contains(&mesh.members[2].0.peer_id()), "the oldest stay");
        assert!(all.encode().len() <= STATE_BYTES_MAX);
        for cut in 1..60 {
            let bytes = all.encode();
            let _ = State::decode(&bytes[..cut]);
        }
    }

    fn mesh_of_others() -> Mesh {
        mesh()
    }

    #[test]
    fn the_newer_key_holds_and_numbers_cannot_be_used_up() {
        let state = |number, key| State { number, key: [key; 32], said: Vec::new() };
        let sound = |_: &Revocation| true;
        assert_eq!(state(1, 5).merged(state(2, 1), sound), state(2, 1));
        assert_eq!(state(2, 1).merged(state(1, 5), sound), state(2, 1));
        assert_eq!(state(2, 1).merged(state(2, 5), sound), state(2, 5), "two at once: the same one everywhere");
        assert_eq!(state(2, 1).merged(state(u64::MAX, 5), sound), state(2, 1));
    }
}
