//! What members know of bans: the revocations and the mesh's key, how two states become one, and their bytes on the wire
//! and on the disk.
use node_core::admission::{Revoked, in_force};
use node_core::id::NodeId;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use transport::bulk::REQUEST_BYTES_MAX;
use transport::revocation::REVOCATION_BYTES_MAX;
use transport::{MeshCredentials, MeshId, PeerId, Revocation, node_id};

/// Revocations kept: people ban by hand. Members can fill it; the founder's and the oldest stay.
pub(super) const BANS_MAX: usize = 256;
/// Largest encoded state.
pub(super) const STATE_BYTES_MAX: usize = 64 + BANS_MAX * (REVOCATION_BYTES_MAX + 4);
/// Largest part of a state that goes with a request, beside its digest.
const HEAD_BYTES_MAX: usize = REQUEST_BYTES_MAX - 1024;
/// By how many changes another member may be ahead: nobody can use up the numbers.
const NUMBER_LEAP_MAX: u64 = 1 << 20;
/// The file under the data directory.
const FILE: &str = "bans";
/// Begins the file; what follows is the mesh, the hash of the rest, and the state.
const MAGIC: &[u8; 16] = b"meshnode bans 2\n";

/// Revocations and key of a mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    /// How often the key was changed: of two keys the one with the higher number holds, then the larger.
    pub(super) number: u64,
    pub(super) key: [u8; 32],
    pub(super) said: Vec<Revocation>,
}

impl State {
    /// What this node knew in its last life; what the credentials say where there is nothing, or nothing usable. A damaged
    /// file is moved aside: the other members pass on again what it held.
    ///
    /// # Errors
    /// The disk refused.
    pub(super) fn load(data_dir: &Path, held: &MeshCredentials) -> std::io::Result<Self> {
        let path = data_dir.join(FILE);
        let begin = State { key: held.mesh_key, ..State::default() };
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(begin),
            Err(e) => return Err(e),
        };
        match Self::from_file(&bytes, held) {
            FromFile::Whole(state) => Ok(state),
            // The data directory has joined another mesh since.
            FromFile::OtherMesh => Ok(begin),
            FromFile::Damaged => {
                let aside = data_dir.join(format!("{FILE}.damaged-{}", crate::handle::unix_seconds()));
                std::fs::rename(&path, &aside)?;
                tracing::warn!(
                    "{} was damaged and is kept as {}: until another member is connected, this node does not know who is \
                     banned",
                    path.display(),
                    aside.display()
                );
                Ok(begin)
            }
        }
    }

    fn from_file(bytes: &[u8], held: &MeshCredentials) -> FromFile {
        let Some(rest) = bytes.strip_prefix(MAGIC) else {
            // Of the first version: no mark, no hash, and the key beside the membership.
            let state =
                if MAGIC.starts_with(&bytes[..bytes.len().min(MAGIC.len())]) { None } else { Self::decode(bytes) };
            return state
                .filter(|state| state.key == [0; 32])
                .map_or(FromFile::Damaged, |state| FromFile::Whole(State { key: held.mesh_key, ..state }));
        };
        let parts =
            rest.split_first_chunk::<32>().and_then(|(mesh, rest)| Some((mesh, rest.split_first_chunk::<32>()?)));
        let Some((mesh, (hash, state))) = parts else { return FromFile::Damaged };
        if blake3::hash(state) != blake3::Hash::from_bytes(*hash) {
            return FromFile::Damaged;
        }
        match Self::decode(state) {
            Some(_) if *mesh != held.mesh.0 => FromFile::OtherMesh,
            Some(state) => FromFile::Whole(state),
            None => FromFile::Damaged,
        }
    }

    /// Revocations, key and the key's number in one atomic write: a crash leaves all of the old state or all of the new.
    ///
    /// # Errors
    /// The disk refused; the old state is kept.
    pub(super) fn save(&self, data_dir: &Path, mesh: MeshId) -> std::io::Result<()> {
        transport::identity::write_private(&data_dir.join(FILE), &self.to_file(mesh))
    }

    fn to_file(&self, mesh: MeshId) -> Vec<u8> {
        let state = self.encode();
        [&MAGIC[..], &mesh.0[..], &blake3::hash(&state).as_bytes()[..], state.as_slice()].concat()
    }

    /// This and what was heard, as far as it is sound.
    pub(super) fn merged(mut self, heard: State, sound: impl Fn(&Revocation) -> bool) -> State {
        if (heard.number, heard.key) > (self.number, self.key) && heard.number <= self.number + NUMBER_LEAP_MAX {
            (self.number, self.key) = (heard.number, heard.key);
        }
        for said in heard.said {
            if !self.said.contains(&said) && sound(&said) {
                self.said.push(said);
            }
        }
        // The same order and the same ones left out everywhere. Revocations of members that the founder has banned are left
        // out first: they have no effect, and must not crowd out those that have.
        let by_root: BTreeSet<PeerId> = self.roots().map(|said| said.banned).collect();
        let is_void = |said: &Revocation| said.issuer().is_some_and(|issuer| by_root.contains(&issuer));
        self.said.sort_by_cached_key(|said| (said.issuer().is_some(), is_void(said), said.at, said.encode()));
        self.said.truncate(BANS_MAX);
        self
    }

    /// Each banned peer with the revocation in force.
    pub(super) fn out(&self, mesh: MeshId) -> BTreeMap<PeerId, Revocation> {
        let named = |peer: PeerId| NodeId(node_id(&peer));
        let read = |said: &Revocation| {
            let by = said.verify(mesh).ok()?.map(named);
            Some(Revoked { by, at: said.at, banned: named(said.banned) })
        };
        let said: Vec<(Revoked, &Revocation)> = self.said.iter().filter_map(|said| Some((read(said)?, said))).collect();
        let out = in_force(said.iter().map(|(revoked, _)| *revoked));
        let holds = |(revoked, _): &&(Revoked, &Revocation)| out.get(&revoked.banned) == Some(revoked);
        said.iter().filter(holds).map(|(_, said)| (said.banned, (*said).clone())).collect()
    }

    fn roots(&self) -> impl Iterator<Item = &Revocation> {
        self.said.iter().filter(|said| said.issuer().is_none())
    }

    /// The founder's newest revocations, as many as a request may hold: these go first. Not the key: a member that had it
    /// without all revocations would pass it on to the banned.
    pub(super) fn head(&self) -> State {
        let mut head = State::default();
        let mut bytes = 0;
        let roots: Vec<&Revocation> = self.roots().collect();
        for said in roots.into_iter().rev() {
            bytes += 4 + said.encode().len();
            if bytes > HEAD_BYTES_MAX {
                break;
            }
            head.said.push(said.clone());
        }
        head
    }

    /// Equal for equal states.
    pub(super) fn digest(&self) -> [u8; 32] {
        *blake3::hash(&self.encode()).as_bytes()
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.number.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.key);
        for said in &self.said {
            let said = said.encode();
            bytes.extend_from_slice(&u32::try_from(said.len()).unwrap_or(u32::MAX).to_le_bytes());
            bytes.extend_from_slice(&said);
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
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

enum FromFile {
    Whole(State),
    OtherMesh,
    Damaged,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::unix_seconds;
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
            self.says_of(by, self.members[banned].0.peer_id(), at)
        }

        fn says_of(&self, by: usize, banned: PeerId, at: u64) -> State {
            let (me, held) = &self.members[by];
            let said = Revocation::issue(held, me, banned, at, ("banned", "issuer")).unwrap();
            State { said: vec![said], ..State::default() }
        }

        fn founder_says(&self, banned: usize, at: u64) -> State {
            let banned = self.members[banned].0.peer_id();
            let said = Revocation::issue(&self.held, &self.founder, banned, at, ("banned", "founder")).unwrap();
            State { said: vec![said], ..State::default() }
        }

        fn heard(&self, states: &[State]) -> State {
            let sound = |said: &Revocation| said.verify(self.held.mesh).is_ok();
            states.iter().cloned().fold(State::default(), |all, one| all.merged(one, sound))
        }

        fn out(&self, state: &State) -> BTreeSet<PeerId> {
            state.out(self.held.mesh).into_keys().collect()
        }
    }

    #[test]
    fn members_with_the_same_revocations_agree_on_who_is_banned() {
        let mesh = mesh();
        let said = [mesh.says(0, 1, 5), mesh.says(1, 0, 6), mesh.says(1, 2, 7)];
        let back: Vec<State> = said.iter().rev().cloned().collect();
        let (one, other) = (mesh.heard(&said), mesh.heard(&back));
        assert_eq!(one, other);
        assert_eq!(mesh.out(&one), [mesh.members[1].0.peer_id()].into());
        assert_eq!(one.out(mesh.held.mesh)[&mesh.members[1].0.peer_id()], said[0].said[0], "with the revocation");
        assert_eq!(mesh.heard(&[one.clone(), other]), one, "nothing is heard twice");
        let out = mesh.out(&mesh.heard(&[one, mesh.founder_says(0, 9)]));
        assert_eq!(out, [mesh.members[0].0.peer_id(), mesh.members[2].0.peer_id()].into(), "the founder's word first");
        assert_eq!(State::decode(&said[0].encode()), Some(said[0].clone()));
    }

    #[test]
    fn forgeries_and_floods_change_nothing() {
        let (mesh, other) = (mesh(), mesh());
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

    #[test]
    fn a_flood_by_a_member_that_the_founder_bans_keeps_no_later_ban_out() {
        let mesh = mesh();
        let flood: Vec<State> =
            (0..BANS_MAX as u64).map(|at| mesh.says_of(0, Identity::generate().peer_id(), 1 + at)).collect();
        let all = [flood.as_slice(), &[mesh.founder_says(0, 2000), mesh.says(1, 2, 3000)]].concat();
        let heard = mesh.heard(&all);
        assert_eq!(mesh.out(&heard), [mesh.members[0].0.peer_id(), mesh.members[2].0.peer_id()].into());
        assert_eq!(heard.said.len(), BANS_MAX);
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

    #[test]
    fn a_torn_bans_file_is_moved_aside_at_every_length() {
        let (mesh, dir) = (mesh(), tempfile::tempdir().unwrap());
        let path = dir.path().join(FILE);
        let begin = State { key: mesh.held.mesh_key, ..State::default() };
        assert_eq!(State::load(dir.path(), &mesh.held).unwrap(), begin, "a missing file");
        let state = State { number: 3, key: [9; 32], ..mesh.heard(&[mesh.says(0, 1, 5), mesh.founder_says(2, 6)]) };
        state.save(dir.path(), mesh.held.mesh).unwrap();
        assert_eq!(State::load(dir.path(), &mesh.held).unwrap(), state, "key, number and revocations in one file");
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(State::load(dir.path(), &mesh.held).unwrap(), begin, "torn at {length}");
            assert!(!path.exists(), "torn at {length}");
        }
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &flipped).unwrap();
        assert_eq!(State::load(dir.path(), &mesh.held).unwrap(), begin, "a flipped bit");
        let aside = |name: &str| name.starts_with("bans.damaged-");
        assert!(std::fs::read_dir(dir.path()).unwrap().flatten().any(|f| aside(&f.file_name().to_string_lossy())));
    }

    /// A crash at any moment of a save: before the rename the old state is there, after it the new one; never a new number
    /// with the old key.
    #[test]
    fn a_crash_while_a_ban_is_kept_leaves_the_old_state_or_the_new_one() {
        let (mesh, dir) = (mesh(), tempfile::tempdir().unwrap());
        let old = State { number: 1, key: [1; 32], ..mesh.heard(&[mesh.says(0, 1, 5)]) };
        let new = State { number: 2, key: [2; 32], ..mesh.heard(&[mesh.says(0, 1, 5), mesh.says(0, 2, 6)]) };
        let bytes = new.to_file(mesh.held.mesh);
        for length in 0..=bytes.len() {
            old.save(dir.path(), mesh.held.mesh).unwrap();
            std::fs::write(dir.path().join(FILE).with_extension("new"), &bytes[..length]).unwrap();
            assert_eq!(State::load(dir.path(), &mesh.held).unwrap(), old, "not renamed yet, {length} bytes written");
        }
        new.save(dir.path(), mesh.held.mesh).unwrap();
        assert_eq!(State::load(dir.path(), &mesh.held).unwrap(), new);
    }

    #[test]
    fn files_of_another_mesh_and_of_the_first_version_are_recognised() {
        let (mesh, other, dir) = (mesh(), mesh(), tempfile::tempdir().unwrap());
        let state = State { number: 3, key: [9; 32], ..mesh.heard(&[mesh.says(0, 1, 5)]) };
        state.save(dir.path(), mesh.held.mesh).unwrap();
        let begin = State { key: other.held.mesh_key, ..State::default() };
        assert_eq!(State::load(dir.path(), &other.held).unwrap(), begin, "the data directory joined another mesh");
        std::fs::write(dir.path().join(FILE), State { key: [0; 32], ..state.clone() }.encode()).unwrap();
        let expected = State { key: mesh.held.mesh_key, ..state };
        assert_eq!(State::load(dir.path(), &mesh.held).unwrap(), expected, "the key was beside the membership");
    }
}
