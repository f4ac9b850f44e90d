//! Revocation of memberships: a member's signed statement that a peer is banned, which every member can verify and
//! relay.
//!
//! Certificates carry no issue date, so a banned peer could keep certifying others. Therefore a ban also revokes,
//! transitively, every member that the banned peer certified. Such a member needs a new invitation from another member.
use crate::certificate::{CHAIN_BYTES_MAX, CertificateError, Chain, MeshCredentials, MeshId};
use crate::identity::{self, Identity, PeerId};
use crate::wire::{Reader, printable, put_long, put_short};
use libp2p_identity::ed25519;

/// A `PeerId` of an Ed25519 key has 38 bytes; others are never longer than this.
const PEER_BYTES_MAX: usize = 64;
/// Longest name.
const NAME_BYTES_MAX: usize = 64;
/// Largest encoded revocation.
pub const REVOCATION_BYTES_MAX: usize =
    1 + 1 + PEER_BYTES_MAX + 8 + 2 * (1 + NAME_BYTES_MAX) + 4 + CHAIN_BYTES_MAX + 64;
/// Maximum clock difference between this node and another that is ahead.
const AHEAD_SECONDS_MAX: u64 = 24 * 3600;
/// Format without names, as the first release wrote it.
const UNNAMED: u8 = 1;
const NAMED: u8 = 2;

/// A revoked membership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revocation {
    /// The banned peer.
    pub banned: PeerId,
    /// Time of the ban, unix seconds. Of two members that ban each other, the earlier ban counts.
    pub at: u64,
    /// Name of the banned node at the time of the ban; empty if unknown.
    pub banned_name: String,
    /// Name of the issuer; empty if unknown.
    pub issuer_name: String,
    /// Certificate chain of the issuer; `None` is the mesh's root key, whose bans take precedence over all others.
    issuer: Option<Chain>,
    signature: [u8; 64],
}

impl Revocation {
    /// Revokes the membership of `banned`; signed with the root key if this node is the founder. `names`:
    /// human-readable names of the banned node and of this one.
    ///
    /// # Errors
    /// This node may not invite, so it may not revoke either.
    pub fn issue(
        held: &MeshCredentials,
        me: &Identity,
        banned: PeerId,
        now: u64,
        names: (&str, &str),
    ) -> Result<Self, CertificateError> {
        let root = held.root();
        if root.is_none() && !held.chain.own().is_some_and(|own| own.roles.may_invite()) {
            return Err(CertificateError::MayNotInvite { depth: 0 });
        }
        let issuer = root.is_none().then(|| held.chain.clone());
        let (banned_name, issuer_name) = (short_name(names.0), short_name(names.1));
        let mut revocation = Self { banned, at: now, banned_name, issuer_name, issuer, signature: [0; 64] };
        let bytes = revocation.signed_bytes(held.mesh);
        let signature = root.map_or_else(|| me.sign(&bytes), |root| root.sign(&bytes));
        revocation.signature = signature.as_slice().try_into().unwrap_or([0; 64]);
        Ok(revocation)
    }

    /// The member that signed the revocation; `None` for the root key. Verifies nothing.
    pub fn issuer(&self) -> Option<PeerId> {
        self.issuer.as_ref().and_then(Chain::own).map(|own| own.subject)
    }

    /// Whether the date is further in the future than clocks may differ. Check it only on first receipt: a clock that
    /// is later set back must not end a ban.
    pub fn is_from_the_future(&self, now: u64) -> bool {
        self.at > now.saturating_add(AHEAD_SECONDS_MAX)
    }

    /// Verifies the signature and the issuer's permission at the time of issue; returns the issuer, `None` for the root
    /// key. The current time does not matter.
    ///
    /// # Errors
    /// Why the revocation is invalid.
    pub fn verify(&self, mesh: MeshId) -> Result<Option<PeerId>, CertificateError> {
        let bytes = self.signed_bytes(mesh);
        let forged = CertificateError::Forged { depth: 0 };
        let Some(chain) = &self.issuer else {
            let root = ed25519::PublicKey::try_from_bytes(&mesh.0);
            let signed = root.is_ok_and(|root| root.verify(&bytes, &self.signature));
            return if signed { Ok(None) } else { Err(forged) };
        };
        let issuer = chain.own().ok_or(CertificateError::Malformed)?.subject;
        if !chain.verify(mesh, issuer, self.at)?.may_invite() {
            return Err(CertificateError::MayNotInvite { depth: 0 });
        }
        if issuer == self.banned || !identity::verify(&issuer.to_bytes(), &bytes, &self.signature) {
            return Err(forged);
        }
        Ok(Some(issuer))
    }

    /// The signed bytes. Their unique prefix keeps other signed data from being passed off as a revocation.
    fn signed_bytes(&self, mesh: MeshId) -> Vec<u8> {
        let mut out = b"meshnode revocation\0".to_vec();
        out.extend_from_slice(&mesh.0);
        put_short(&mut out, &self.banned.to_bytes());
        out.extend_from_slice(&self.at.to_le_bytes());
        put_short(&mut out, &self.issuer().map(PeerId::to_bytes).unwrap_or_default());
        if self.version() == NAMED {
            put_short(&mut out, self.banned_name.as_bytes());
            put_short(&mut out, self.issuer_name.as_bytes());
        }
        out
    }

    fn version(&self) -> u8 {
        if self.banned_name.is_empty() && self.issuer_name.is_empty() { UNNAMED } else { NAMED }
    }

    /// Wire and disk encoding, at most [`REVOCATION_BYTES_MAX`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.version()];
        put_short(&mut out, &self.banned.to_bytes());
        out.extend_from_slice(&self.at.to_le_bytes());
        if self.version() == NAMED {
            put_short(&mut out, self.banned_name.as_bytes());
            put_short(&mut out, self.issuer_name.as_bytes());
        }
        put_long(&mut out, &self.issuer.as_ref().map(Chain::encode).unwrap_or_default());
        out.extend_from_slice(&self.signature);
        out
    }

    /// Decodes the output of `encode`. Verifies nothing.
    ///
    /// # Errors
    /// Any other input.
    pub fn decode(bytes: &[u8]) -> Result<Self, CertificateError> {
        Self::read(bytes).ok_or(CertificateError::Malformed)
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader::new(bytes);
        let version = r.u8().filter(|version| [UNNAMED, NAMED].contains(version))?;
        let banned = PeerId::from_bytes(r.short(PEER_BYTES_MAX)?).ok()?;
        let at = r.u64()?;
        let (banned_name, issuer_name) =
            if version == NAMED { (read_name(&mut r)?, read_name(&mut r)?) } else { (String::new(), String::new()) };
        let issuer = match r.long(CHAIN_BYTES_MAX)? {
            [] => None,
            chain => Some(Chain::decode(chain).ok()?),
        };
        let revocation = Self { banned, at, banned_name, issuer_name, issuer, signature: r.array()? };
        // Each revocation has one encoding: a named format with empty names would be a second one for the same content.
        r.end().filter(|()| revocation.version() == version).map(|()| revocation)
    }
}

/// A name without control characters, truncated to the maximum length.
fn short_name(name: &str) -> String {
    let mut name = printable(name, NAME_BYTES_MAX);
    let end = (0..=name.len().min(NAME_BYTES_MAX)).rev().find(|n| name.is_char_boundary(*n)).unwrap_or(0);
    name.truncate(end);
    name
}

fn read_name(r: &mut Reader<'_>) -> Option<String> {
    let name = std::str::from_utf8(r.short(NAME_BYTES_MAX)?).ok()?;
    (printable(name, NAME_BYTES_MAX) == name).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificate::Roles;
    use crate::fuzz::Noise;

    const NOW: u64 = 1_000_000;
    const NAMES: (&str, &str) = ("the \u{1b}[31mculprit", "the founder");

    /// The founder's credentials, and those of a member with these roles.
    fn two(roles: Roles) -> (Identity, MeshCredentials, Identity, MeshCredentials) {
        let (founder, member) = (Identity::generate(), Identity::generate());
        let mesh = MeshCredentials::found(&founder, NOW + 100);
        let chain = mesh.issue(&founder, member.peer_id(), roles, NOW + 100).unwrap();
        let held = MeshCredentials { chain, root_secret: None, ..mesh.clone() };
        (founder, mesh, member, held)
    }

    #[test]
    fn revocations_by_a_member_and_by_the_root_verify() {
        let (founder, mesh, member, held) = two(Roles::INVITER);
        let out = Identity::generate().peer_id();
        let by_member = Revocation::issue(&held, &member, out, NOW, NAMES).unwrap();
        assert_eq!(by_member.verify(mesh.mesh), Ok(Some(member.peer_id())));
        let by_root = Revocation::issue(&mesh, &founder, out, NOW, NAMES).unwrap();
        assert_eq!(by_root.verify(mesh.mesh), Ok(None));
        for revocation in [by_member, by_root] {
            let bytes = revocation.encode();
            assert!(bytes.len() <= REVOCATION_BYTES_MAX);
            assert_eq!(Revocation::decode(&bytes), Ok(revocation.clone()));
            assert_eq!(
                (revocation.banned_name.as_str(), revocation.issuer_name.as_str()),
                ("the [31mculprit", NAMES.1)
            );
        }
        let unnamed = Revocation::issue(&mesh, &founder, out, NOW, ("", "")).unwrap();
        assert_eq!(
            (unnamed.encode()[0], unnamed.verify(mesh.mesh)),
            (UNNAMED, Ok(None)),
            "as the first release wrote it"
        );
        assert_eq!(Revocation::decode(&unnamed.encode()), Ok(unnamed));
        let long = "ä".repeat(100);
        let long = Revocation::issue(&mesh, &founder, out, NOW, (long.as_str(), long.as_str())).unwrap();
        assert!(long.encode().len() <= REVOCATION_BYTES_MAX && Revocation::decode(&long.encode()) == Ok(long));
    }

    #[test]
    fn invalid_revocations_are_rejected() {
        let (founder, mesh, member, held) = two(Roles::INVITER);
        let out = Identity::generate().peer_id();
        let good = Revocation::issue(&held, &member, out, NOW, NAMES).unwrap();
        let (_, other, _, _) = two(Roles::INVITER);
        assert!(good.verify(other.mesh).is_err(), "for another mesh");
        assert!(Revocation { banned: founder.peer_id(), ..good.clone() }.verify(mesh.mesh).is_err(), "modified");
        assert!(Revocation { at: NOW - 1, ..good.clone() }.verify(mesh.mesh).is_err(), "backdated");
        assert!(Revocation { issuer: None, ..good.clone() }.verify(mesh.mesh).is_err(), "not signed by the root");
        assert!(Revocation { banned_name: "other".into(), ..good.clone() }.verify(mesh.mesh).is_err(), "renamed");
        assert!(good.is_from_the_future(NOW - AHEAD_SECONDS_MAX - 1) && !good.is_from_the_future(NOW - 60));
        let stranger = Identity::generate();
        let by_stranger = Revocation::issue(&held, &stranger, out, NOW, NAMES).unwrap();
        assert!(by_stranger.verify(mesh.mesh).is_err(), "with another node's chain");
        let (_, mesh, guest, held) = two(Roles::MEMBER);
        assert!(Revocation::issue(&held, &guest, out, NOW, NAMES).is_err(), "without the inviter role");
        assert_eq!(mesh.chain.own().unwrap().roles, Roles::INVITER);
    }

    #[test]
    fn noise_never_panics_nor_passes() {
        let (_, mesh, member, held) = two(Roles::INVITER);
        let good = Revocation::issue(&held, &member, Identity::generate().peer_id(), NOW, NAMES).unwrap().encode();
        let mut noise = Noise::new(6);
        for _ in 0..5_000 {
            let bytes = noise.mangle(&good);
            let passed = Revocation::decode(&bytes).is_ok_and(|revocation| revocation.verify(mesh.mesh).is_ok());
            assert!(bytes == good || !passed);
        }
    }
}
