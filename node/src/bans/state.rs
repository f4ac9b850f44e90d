//! The replicated state of bans (revocations and mesh key): merging, and its format on the wire and on disk.
use node_core::admission::{Revoked, in_force};
use node_core::id::NodeId;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use transport::bulk::REQUEST_BYTES_MAX;
use transport::revocation::REVOCATION_BYTES_MAX;
use transport::{MeshCredentials, MeshId, PeerId, Revocation, node_id};

/// Most revocations retained; users ban manually. If members fill it, the founder's and the oldest are retained.
pub(super) const BANS_MAX: usize = 256;
/// Largest encoded state.
pub(super) const STATE_BYTES_MAX: usize = 64 + BANS_MAX * (REVOCATION_BYTES_MAX + 4);
/// Largest part of a state in a request, besides the digest.
const HEAD_BYTES_MAX: usize = REQUEST_BYTES_MAX - 1024;
/// Largest accepted jump of the key number, so that no member can exhaust the numbers.
const NUMBER_LEAP_MAX: u64 = 1 << 20;
/// File name in the data directory.
const FILE: &str = "bans";
/// First bytes of the file; then follow the mesh id, the hash of the rest, and the state.
const MAGIC: &[u8; 16] = b"meshnode bans 2\n";

/// Revocations and key of a mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BanState {
    /// Number of key rotations. The key with the higher number wins; of equal numbers, the larger key.
    pub(super) number: u64,
    pub(super) key: [u8; 32],
    pub(super) revocations: Vec<Revocation>,
}

impl BanState {
    /// Loads the saved state, or a state with the key of the credentials if the file is missing or unusable. A damaged
    /// file is moved aside, because members send the revocations again.
    ///
    /// # Errors
    /// The file cannot be read or moved.
    pub(super) fn load(data_dir: &Path, held: &MeshCredentials) -> std::io::Result<Self> {
        let path = data_dir.join(FILE);
        let begin = BanState { key: held.mesh_key, ..BanState::default() };
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
                let aside = data_dir.join(format!("{FILE}.damaged-{}", crate::clock::unix_seconds()));
                std::fs::rename(&path, &aside)?;
                tracing::warn!(
                    "{} was damaged and has been moved to {}: this node has no list of banned nodes until it connects to another \
                     member",
                    path.display(),
                    aside.display()
                );
                Ok(begin)
            }
        }
    }

    fn from_file(bytes: &[u8], held: &MeshCredentials) -> FromFile {
        let Some(rest) = bytes.strip_prefix(MAGIC) else {
            // First version: no magic, no hash, and the key stored with the membership.
            let state =
                if MAGIC.starts_with(&bytes[..bytes.len().min(MAGIC.len())]) { None } else { Self::decode(bytes) };
            return state
                .filter(|state| state.key == [0; 32])
                .map_or(FromFile::Damaged, |state| FromFile::Whole(BanState { key: held.mesh_key, ..state }));
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

    /// Saves the state in one atomic write: after a crash the file has either the old or the new state.
    ///
    /// # Errors
    /// The file cannot be written; the old state is kept.
    pub(super) fn save(&self, data_dir: &Path, mesh: MeshId) -> std::io::Result<()> {
        transport::identity::write_private(&data_dir.join(FILE), &self.to_file(mesh))
    }

    fn to_file(&self, mesh: MeshId) -> Vec<u8> {
        let state = self.encode();
        [&MAGIC[..], &mesh.0[..], &blake3::hash(&state).as_bytes()[..], state.as_slice()].concat()
    }

    /// Merges `received` into this state: the newer key, and the revocations that `is_valid` accepts.
    pub(super) fn merged(mut self, received: BanState, is_valid: impl Fn(&Revocation) -> bool) -> BanState {
        let is_newer = (received.number, received.key) > (self.number, self.key);
        if is_newer && received.number <= self.number + NUMBER_LEAP_MAX {
            (self.number, self.key) = (received.number, received.key);
        }
        for revocation in received.revocations {
            if !self.revocations.contains(&revocation) && is_valid(&revocation) {
                self.revocations.push(revocation);
            }
        }
        // A deterministic order and truncation, the same on all members. Revocations by members that the founder has
        // banned are dropped first: they have no effect, and must not displace effective ones.
        let by_root: BTreeSet<PeerId> = self.roots().map(|revocation| revocation.banned).collect();
        let is_void = |revocation: &Revocation| revocation.issuer().is_some_and(|issuer| by_root.contains(&issuer));
        self.revocations.sort_by_cached_key(|revocation| {
            (revocation.issuer().is_some(), is_void(revocation), revocation.at, revocation.encode())
        });
        self.revocations.truncate(BANS_MAX);
        self
    }

    /// The banned peers, each with the revocation in force.
    pub(super) fn banned(&self, mesh: MeshId) -> BTreeMap<PeerId, Revocation> {
        let named = |peer: PeerId| NodeId(node_id(&peer));
        let read = |revocation: &Revocation| {
            let by = revocation.verify(mesh).ok()?.map(named);
            Some(Revoked { by, at: revocation.at, banned: named(revocation.banned) })
        };
        let read_all: Vec<(Revoked, &Revocation)> =
            self.revocations.iter().filter_map(|revocation| Some((read(revocation)?, revocation))).collect();
        let out = in_force(read_all.iter().map(|(revoked, _)| *revoked));
        let holds = |(revoked, _): &&(Revoked, &Revocation)| out.get(&revoked.banned) == Some(revoked);
        read_all.iter().filter(holds).map(|(_, revocation)| (revocation.banned, (*revocation).clone())).collect()
    }

    fn roots(&self) -> impl Iterator<Item = &Revocation> {
        self.revocations.iter().filter(|revocation| revocation.issuer().is_none())
    }

    /// The founder's newest revocations that fit a request, which are sent first. Without the key: a member that had
    /// the key but not all revocations would send it to banned nodes.
    pub(super) fn head(&self) -> BanState {
        let mut head = BanState::default();
        let mut bytes = 0;
        let roots: Vec<&Revocation> = self.roots().collect();
        for revocation in roots.into_iter().rev() {
            bytes += 4 + revocation.encode().len();
            if bytes > HEAD_BYTES_MAX {
                break;
            }
            head.revocations.push(revocation.clone());
        }
        head
    }

    /// Hash of the encoded state.
    pub(super) fn digest(&self) -> [u8; 32] {
        *blake3::hash(&self.encode()).as_bytes()
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.number.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.key);
        for revocation in &self.revocations {
            let revocation = revocation.encode();
            bytes.extend_from_slice(&u32::try_from(revocation.len()).unwrap_or(u32::MAX).to_le_bytes());
            bytes.extend_from_slice(&revocation);
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk::<8>()?;
        let (key, mut rest) = rest.split_first_chunk::<32>()?;
        let mut revocations = Vec::new();
        while let Some((length, after)) = rest.split_first_chunk::<4>() {
            let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
            let (one, after) = after.split_at_checked(length)?;
            revocations.push(Revocation::decode(one).ok().filter(|_| revocations.len() < BANS_MAX)?);
            rest = after;
        }
        rest.is_empty().then_some(Self { number: u64::from_le_bytes(*number), key: *key, revocations })
    }
}

enum FromFile {
    Whole(BanState),
    OtherMesh,
    Damaged,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::unix_seconds;
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
        fn ban(&self, by: usize, banned: usize, at: u64) -> BanState {
            self.ban_peer(by, self.members[banned].0.peer_id(), at)
        }

        fn ban_peer(&self, by: usize, banned: PeerId, at: u64) -> BanState {
            let (me, held) = &self.members[by];
            let revocation = Revocation::issue(held, me, banned, at, ("banned", "issuer")).unwrap();
            BanState { revocations: vec![revocation], ..BanState::default() }
        }

        fn founder_ban(&self, banned: usize, at: u64) -> BanState {
            let banned = self.members[banned].0.peer_id();
            let revocation = Revocation::issue(&self.held, &self.founder, banned, at, ("banned", "founder")).unwrap();
            BanState { revocations: vec![revocation], ..BanState::default() }
        }

        fn merged(&self, states: &[BanState]) -> BanState {
            let is_valid = |revocation: &Revocation| revocation.verify(self.held.mesh).is_ok();
            states.iter().cloned().fold(BanState::default(), |all, one| all.merged(one, is_valid))
        }

        fn banned(&self, state: &BanState) -> BTreeSet<PeerId> {
            state.banned(self.held.mesh).into_keys().collect()
        }
    }

    #[test]
    fn members_with_the_same_revocations_agree_on_who_is_banned() {
        let mesh = mesh();
        let states = [mesh.ban(0, 1, 5), mesh.ban(1, 0, 6), mesh.ban(1, 2, 7)];
        let back: Vec<BanState> = states.iter().rev().cloned().collect();
        let (one, other) = (mesh.merged(&states), mesh.merged(&back));
        assert_eq!(one, other);
        assert_eq!(mesh.banned(&one), [mesh.members[1].0.peer_id()].into());
        assert_eq!(
            one.banned(mesh.held.mesh)[&mesh.members[1].0.peer_id()],
            states[0].revocations[0],
            "with the revocation"
        );
        assert_eq!(mesh.merged(&[one.clone(), other]), one, "merging is idempotent");
        let out = mesh.banned(&mesh.merged(&[one, mesh.founder_ban(0, 9)]));
        assert_eq!(
            out,
            [mesh.members[0].0.peer_id(), mesh.members[2].0.peer_id()].into(),
            "the founder's revocations take precedence"
        );
        assert_eq!(BanState::decode(&states[0].encode()), Some(states[0].clone()));
    }

    #[test]
    fn forgeries_and_floods_change_nothing() {
        let (mesh, other) = (mesh(), mesh());
        assert_eq!(mesh.merged(&[other.ban(0, 1, 5)]), BanState::default());
        let flood: Vec<BanState> = (0..2 * BANS_MAX as u64).map(|at| mesh.ban(0, 1, 1000 + at)).collect();
        let first = mesh.ban(0, 2, 5);
        let all = mesh.merged(&[flood.as_slice(), &[first]].concat());
        assert_eq!(all.revocations.len(), BANS_MAX);
        assert!(mesh.banned(&all).contains(&mesh.members[2].0.peer_id()), "the oldest are retained");
        assert!(all.encode().len() <= STATE_BYTES_MAX);
        for cut in 1..60 {
            let bytes = all.encode();
            let _ = BanState::decode(&bytes[..cut]);
        }
    }

    #[test]
    fn a_flood_by_a_banned_member_does_not_displace_later_bans() {
        let mesh = mesh();
        let flood: Vec<BanState> =
            (0..BANS_MAX as u64).map(|at| mesh.ban_peer(0, Identity::generate().peer_id(), 1 + at)).collect();
        let all = [flood.as_slice(), &[mesh.founder_ban(0, 2000), mesh.ban(1, 2, 3000)]].concat();
        let state = mesh.merged(&all);
        assert_eq!(mesh.banned(&state), [mesh.members[0].0.peer_id(), mesh.members[2].0.peer_id()].into());
        assert_eq!(state.revocations.len(), BANS_MAX);
    }

    #[test]
    fn the_newer_key_wins_and_numbers_cannot_be_exhausted() {
        let state = |number, key| BanState { number, key: [key; 32], revocations: Vec::new() };
        let is_valid = |_: &Revocation| true;
        assert_eq!(state(1, 5).merged(state(2, 1), is_valid), state(2, 1));
        assert_eq!(state(2, 1).merged(state(1, 5), is_valid), state(2, 1));
        assert_eq!(state(2, 1).merged(state(2, 5), is_valid), state(2, 5), "concurrent rotations converge");
        assert_eq!(state(2, 1).merged(state(u64::MAX, 5), is_valid), state(2, 1));
    }

    #[test]
    fn a_torn_bans_file_is_moved_aside_at_every_length() {
        let (mesh, dir) = (mesh(), tempfile::tempdir().unwrap());
        let path = dir.path().join(FILE);
        let begin = BanState { key: mesh.held.mesh_key, ..BanState::default() };
        assert_eq!(BanState::load(dir.path(), &mesh.held).unwrap(), begin, "a missing file");
        let state = BanState { number: 3, key: [9; 32], ..mesh.merged(&[mesh.ban(0, 1, 5), mesh.founder_ban(2, 6)]) };
        state.save(dir.path(), mesh.held.mesh).unwrap();
        assert_eq!(BanState::load(dir.path(), &mesh.held).unwrap(), state, "key, number and revocations in one file");
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(BanState::load(dir.path(), &mesh.held).unwrap(), begin, "torn at {length}");
            assert!(!path.exists(), "torn at {length}");
        }
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &flipped).unwrap();
        assert_eq!(BanState::load(dir.path(), &mesh.held).unwrap(), begin, "a flipped bit");
        let aside = |name: &str| name.starts_with("bans.damaged-");
        assert!(std::fs::read_dir(dir.path()).unwrap().flatten().any(|f| aside(&f.file_name().to_string_lossy())));
    }

    /// A crash at any moment of a save: before the rename the file has the old state, after it the new one; never a new
    /// number with the old key.
    #[test]
    fn a_crash_during_a_save_leaves_the_old_or_the_new_state() {
        let (mesh, dir) = (mesh(), tempfile::tempdir().unwrap());
        let old = BanState { number: 1, key: [1; 32], ..mesh.merged(&[mesh.ban(0, 1, 5)]) };
        let new = BanState { number: 2, key: [2; 32], ..mesh.merged(&[mesh.ban(0, 1, 5), mesh.ban(0, 2, 6)]) };
        let bytes = new.to_file(mesh.held.mesh);
        for length in 0..=bytes.len() {
            old.save(dir.path(), mesh.held.mesh).unwrap();
            std::fs::write(dir.path().join(FILE).with_extension("new"), &bytes[..length]).unwrap();
            assert_eq!(BanState::load(dir.path(), &mesh.held).unwrap(), old, "not renamed yet, {length} bytes written");
        }
        new.save(dir.path(), mesh.held.mesh).unwrap();
        assert_eq!(BanState::load(dir.path(), &mesh.held).unwrap(), new);
    }

    #[test]
    fn files_of_another_mesh_and_of_the_first_version_are_recognised() {
        let (mesh, other, dir) = (mesh(), mesh(), tempfile::tempdir().unwrap());
        let state = BanState { number: 3, key: [9; 32], ..mesh.merged(&[mesh.ban(0, 1, 5)]) };
        state.save(dir.path(), mesh.held.mesh).unwrap();
        let begin = BanState { key: other.held.mesh_key, ..BanState::default() };
        assert_eq!(BanState::load(dir.path(), &other.held).unwrap(), begin, "the data directory joined another mesh");
        std::fs::write(dir.path().join(FILE), BanState { key: [0; 32], ..state.clone() }.encode()).unwrap();
        let expected = BanState { key: mesh.held.mesh_key, ..state };
        assert_eq!(BanState::load(dir.path(), &mesh.held).unwrap(), expected, "the key was stored with the membership");
    }

    #[test]
    fn the_digest_does_not_depend_on_the_order_of_arrival() {
        let mesh = mesh();
        let states = [mesh.ban(0, 1, 5), mesh.founder_ban(2, 6), mesh.ban(1, 0, 6), mesh.ban(2, 0, 5)];
        let digest = mesh.merged(&states).digest();
        for first in 0..states.len() {
            let mut order = states.clone();
            order.rotate_left(first);
            order.swap(1, 3);
            assert_eq!(mesh.merged(&order).digest(), digest, "beginning with {first}");
        }
        assert_ne!(mesh.merged(&states[1..]).digest(), digest);
    }

    #[test]
    fn the_head_has_the_bans_of_the_founder_newest_first() {
        let mesh = mesh();
        let state = mesh.merged(&[mesh.founder_ban(1, 5), mesh.ban(0, 2, 6), mesh.founder_ban(2, 7)]);
        let state = BanState { number: 9, key: [9; 32], ..state };
        let head = state.head();
        assert_eq!(head.revocations.iter().map(|revocation| revocation.at).collect::<Vec<_>>(), [7, 5]);
        assert_eq!((head.number, head.key), (0, [0; 32]), "the key comes with all revocations only");
    }

    #[test]
    fn a_key_that_is_not_newer_brings_its_revocations_all_the_same() {
        let mesh = mesh();
        let own = BanState { number: 5, key: [5; 32], ..BanState::default() };
        let received = BanState { number: 4, key: [9; 32], ..mesh.ban(0, 1, 5) };
        let merged = own.merged(received, |_| true);
        assert_eq!((merged.number, merged.key, merged.revocations.len()), (5, [5; 32], 1));
    }

    #[test]
    fn the_largest_leap_of_the_key_number_is_accepted() {
        let own = BanState { number: 5, key: [5; 32], ..BanState::default() };
        let key = |number| own.clone().merged(BanState { number, key: [9; 32], ..BanState::default() }, |_| true).key;
        assert_eq!(key(5 + NUMBER_LEAP_MAX), [9; 32]);
        assert_eq!(key(5 + NUMBER_LEAP_MAX + 1), [5; 32]);
    }

    #[test]
    fn a_revocation_that_is_not_valid_is_not_kept() {
        let mesh = mesh();
        let merged = BanState::default().merged(mesh.ban(0, 1, 5), |revocation| revocation.at > 5);
        assert_eq!(merged, BanState::default());
    }
}
