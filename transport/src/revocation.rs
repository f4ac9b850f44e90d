//! Memberships taken back: one member's signed word that another one is out, for everybody to check and pass on.
//!
//! Certificates bear no date of issue, so a peer that is out could go on certifying others: whoever was certified by it,
//! or by one of those, is out with it, and has to be invited anew by somebody else.
use crate::certificate::{CHAIN_BYTES_MAX, CertificateError, Chain, MeshCredentials, MeshId};
use crate::identity::{self, Identity, PeerId};
use crate::wire::{Reader, put_long, put_short};
use libp2p_identity::ed25519;

/// `PeerId` bytes of an Ed25519 key are 38; others are never longer than this.
const PEER_BYTES_MAX: usize = 64;
/// Largest encoded revocation.
pub const REVOCATION_BYTES_MAX: usize = 1 + 1 + PEER_BYTES_MAX + 8 + 4 + CHAIN_BYTES_MAX + 64;
/// How far ahead of this node's clock another's may be.
const AHEAD_SECONDS_MAX: u64 = 24 * 3600;
const VERSION: u8 = 1;

/// A membership taken back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revocation {
    /// Who is out.
    pub banned: PeerId,
    /// Since when, unix seconds: of two members that ban each other the first one's word holds.
    pub at: u64,
    /// What makes the issuer a member; `None` is the mesh's root key itself, whose word comes before all others'.
    issuer: Option<Chain>,
    signature: [u8; 64],
}

impl Revocation {
    /// Takes back the membership of `banned`: with the root key where this node is the founder.
    ///
    /// # Errors
    /// This node may not invite, so it may not take back either.
    pub fn issue(held: &MeshCredentials, me: &Identity, banned: PeerId, now: u64) -> Result<Self, CertificateError> {
        let root = held.root();
        if root.is_none() && !held.chain.own().is_some_and(|own| own.roles.may_invite()) {
            return Err(CertificateError::MayNotInvite { depth: 0 });
        }
        let issuer = root.is_none().then(|| held.chain.clone());
        let mut revocation = Self { banned, at: now, issuer, signature: [0; 64] };
        let bytes = revocation.signed_bytes(held.mesh);
        let signature = root.map_or_else(|| me.sign(&bytes), |root| root.sign(&bytes));
        revocation.signature = signature.as_slice().try_into().unwrap_or([0; 64]);
        Ok(revocation)
    }

    /// Whether it is a member's word, not the root key's.
    pub fn is_members(&self) -> bool {
        self.issuer.is_some()
    }

    /// Checks the signature and the issuer's right, as they were when it was issued; returns the issuer, `None` for the
    /// root key.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn verify(&self, mesh: MeshId, now: u64) -> Result<Option<PeerId>, CertificateError> {
        let bytes = self.signed_bytes(mesh);
        let forged = CertificateError::Forged { depth: 0 };
        if self.at > now.saturating_add(AHEAD_SECONDS_MAX) {
            return Err(forged);
        }
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

    /// A prefix of its own, so that no other signed thing can be passed off as a revocation.
    fn signed_bytes(&self, mesh: MeshId) -> Vec<u8> {
        let mut out = b"meshnode revocation\0".to_vec();
        out.extend_from_slice(&mesh.0);
        put_short(&mut out, &self.banned.to_bytes());
        out.extend_from_slice(&self.at.to_le_bytes());
        let issuer = self.issuer.as_ref().and_then(Chain::own).map(|own| own.subject.to_bytes());
        put_short(&mut out, &issuer.unwrap_or_default());
        out
    }

    /// Bytes for the wire and the disk, at most [`REVOCATION_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        put_short(&mut out, &self.banned.to_bytes());
        out.extend_from_slice(&self.at.to_le_bytes());
        put_long(&mut out, &self.issuer.as_ref().map(Chain::encode).unwrap_or_default());
        out.extend_from_slice(&self.signature);
        out
    }

    /// Reads what `encode` wrote. Nothing is verified yet.
    ///
    /// # Errors
    /// Anything else.
    pub fn decode(bytes: &[u8]) -> Result<Self, CertificateError> {
        Self::read(bytes).ok_or(CertificateError::Malformed)
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader::new(bytes);
        if r.u8()? != VERSION {
            return None;
        }
        let banned = PeerId::from_bytes(r.short(PEER_BYTES_MAX)?).ok()?;
        let at = r.u64()?;
        let issuer = match r.long(CHAIN_BYTES_MAX)? {
            [] => None,
            chain => Some(Chain::decode(chain).ok()?),
        };
        let revocation = Self { banned, at, issuer, signature: r.array()? };
        r.end().map(|()| revocation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificate::Roles;
    use crate::fuzz::Noise;

    const NOW: u64 = 1_000_000;

    /// The founder's credentials, and a member's with these roles.
    fn two(roles: Roles) -> (Identity, MeshCredentials, Identity, MeshCredentials) {
        let (founder, member) = (Identity::generate(), Identity::generate());
        let mesh = MeshCredentials::found(&founder, NOW + 100);
        let chain = mesh.issue(&founder, member.peer_id(), roles, NOW + 100).unwrap();
        let held = MeshCredentials { chain, root_secret: None, ..mesh.clone() };
        (founder, mesh, member, held)
    }

    #[test]
    fn a_members_word_and_the_roots_word_hold() {
        let (founder, mesh, member, held) = two(Roles::INVITER);
        let out = Identity::generate().peer_id();
        let by_member = Revocation::issue(&held, &member, out, NOW).unwrap();
        assert_eq!(by_member.verify(mesh.mesh, NOW), Ok(Some(member.peer_id())));
        assert_eq!(by_member.verify(mesh.mesh, NOW + 1_000_000), Ok(Some(member.peer_id())), "it outlives its issuer");
        let by_root = Revocation::issue(&mesh, &founder, out, NOW).unwrap();
        assert_eq!(by_root.verify(mesh.mesh, NOW), Ok(None));
        for revocation in [by_member, by_root] {
            let bytes = revocation.encode();
            assert!(bytes.len() <= REVOCATION_BYTES_MAX);
            assert_eq!(Revocation::decode(&bytes), Ok(revocation));
        }
    }

    #[test]
    fn what_does_not_hold_is_refused() {
        let (founder, mesh, member, held) = two(Roles::INVITER);
        let out = Identity::generate().peer_id();
        let good = Revocation::issue(&held, &member, out, NOW).unwrap();
        let (_, other, _, _) = two(Roles::INVITER);
        assert!(good.verify(other.mesh, NOW).is_err(), "of another mesh");
        assert!(Revocation { banned: founder.peer_id(), ..good.clone() }.verify(mesh.mesh, NOW).is_err(), "changed");
        assert!(Revocation { at: NOW - 1, ..good.clone() }.verify(mesh.mesh, NOW).is_err(), "dated back");
        assert!(Revocation { issuer: None, ..good.clone() }.verify(mesh.mesh, NOW).is_err(), "not the root's");
        assert!(good.verify(mesh.mesh, NOW - AHEAD_SECONDS_MAX - 1).is_err(), "from the future");
        let stranger = Identity::generate();
        let by_stranger = Revocation::issue(&held, &stranger, out, NOW).unwrap();
        assert!(by_stranger.verify(mesh.mesh, NOW).is_err(), "with another's chain");
        let (_, mesh, guest, held) = two(Roles::MEMBER);
        assert!(Revocation::issue(&held, &guest, out, NOW).is_err(), "without the right");
        assert_eq!(mesh.chain.own().unwrap().roles, Roles::INVITER);
    }

    #[test]
    fn noise_never_panics_nor_passes() {
        let (_, mesh, member, held) = two(Roles::INVITER);
        let good = Revocation::issue(&held, &member, Identity::generate().peer_id(), NOW).unwrap().encode();
        let mut noise = Noise::new(6);
        for _ in 0..5_000 {
            let bytes = noise.mangle(&good);
            let passed = Revocation::decode(&bytes).is_ok_and(|revocation| revocation.verify(mesh.mesh, NOW).is_ok());
            assert!(bytes == good || !passed);
        }
    }
}
