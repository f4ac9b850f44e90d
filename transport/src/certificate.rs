//! Membership of a mesh: certificate chains signed from the mesh's root key down to each member.
//!
//! A mesh is identified by its root key: `MeshId` is the Ed25519 public key, whose secret half only the founder holds.
//! The root certifies the founder, the founder certifies the nodes it invites, and these certify the nodes they invite
//! in turn.
use crate::identity::{self, Identity, PeerId};
use crate::wire::{Reader, put_long, put_short};
use libp2p_identity::ed25519;
use std::fmt;
use thiserror::Error;

/// Maximum invitations in a chain: deep enough for any mesh of friends, short enough for one or two packets.
pub const DEPTH_MAX: usize = 8;
/// A `PeerId` of an Ed25519 key has 38 bytes; others are never longer than this.
const PEER_BYTES_MAX: usize = 64;
/// Largest encoded chain: `DEPTH_MAX` certificates with two peers each.
pub const CHAIN_BYTES_MAX: usize = 1 + DEPTH_MAX * (CERTIFICATE_BYTES_MAX + 1);
const CERTIFICATE_BYTES_MAX: usize = 1 + 32 + 2 * (1 + PEER_BYTES_MAX) + 1 + 8 + 64;

/// Identifies a mesh: its root public key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MeshId(pub [u8; 32]);

impl fmt::Display for MeshId {
    /// Twelve hex digits, enough to distinguish meshes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..6].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for MeshId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MeshId({self})")
    }
}

/// Permissions of a member.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Roles(pub u8);

impl Roles {
    /// May participate.
    pub const MEMBER: Roles = Roles(1);
    /// May participate and certify others.
    pub const INVITER: Roles = Roles(1 | 2);

    /// Whether the member may certify others.
    pub fn may_invite(self) -> bool {
        self.0 & 2 != 0
    }
}

/// One link of a chain: `issuer` certifies that `subject` belongs to `mesh` until `expiry`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The mesh.
    pub mesh: MeshId,
    /// The certified member.
    pub subject: PeerId,
    /// The signer; `None` is the mesh's root key.
    pub issuer: Option<PeerId>,
    /// Permissions of the subject.
    pub roles: Roles,
    /// Unix seconds.
    pub expiry: u64,
    /// Ed25519 signature of the issuer over all fields above.
    signature: [u8; 64],
}

/// A certificate chain, from the one signed by the root to the presenter's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain(Vec<Certificate>);

impl Chain {
    /// Verifies every link and returns the presenter's roles.
    ///
    /// # Errors
    /// The first invalid link, from the root down.
    pub fn verify(&self, mesh: MeshId, presenter: PeerId, now_unix: u64) -> Result<Roles, CertificateError> {
        let mut issuer: Option<(PeerId, Roles)> = None;
        for (depth, certificate) in self.0.iter().enumerate() {
            if certificate.mesh != mesh {
                return Err(CertificateError::OtherMesh { expected: mesh, found: certificate.mesh });
            }
            if certificate.issuer != issuer.map(|(peer, _)| peer) || !certificate.is_signed() {
                return Err(CertificateError::Forged { depth });
            }
            if issuer.is_some_and(|(_, roles)| !roles.may_invite()) {
                return Err(CertificateError::MayNotInvite { depth });
            }
            if now_unix >= certificate.expiry {
                return Err(CertificateError::Expired { seconds: now_unix - certificate.expiry });
            }
            issuer = Some((certificate.subject, certificate.roles));
        }
        match issuer {
            Some((subject, roles)) if subject == presenter => Ok(roles),
            Some((subject, _)) => {
                Err(CertificateError::OtherPeer { expected: presenter.into(), found: subject.into() })
            }
            None => Err(CertificateError::Malformed),
        }
    }

    /// All issuers and subjects in the chain.
    pub fn peers(&self) -> impl Iterator<Item = PeerId> + '_ {
        self.0.iter().flat_map(|certificate| certificate.issuer.into_iter().chain([certificate.subject]))
    }

    /// The presenter's own certificate.
    pub fn own(&self) -> Option<&Certificate> {
        self.0.last()
    }

    /// The mesh of the chain.
    pub fn mesh(&self) -> Option<MeshId> {
        self.0.first().map(|c| c.mesh)
    }

    /// The earliest expiry in the chain, unix seconds.
    pub fn expiry(&self) -> u64 {
        self.0.iter().map(|c| c.expiry).min().unwrap_or(0)
    }

    /// Wire and disk encoding, at most [`CHAIN_BYTES_MAX`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![u8::try_from(self.0.len()).unwrap_or(u8::MAX)];
        for certificate in &self.0 {
            put_short(&mut out, &certificate.encode());
        }
        out
    }

    /// Decodes the output of `encode`. Verifies nothing.
    ///
    /// # Errors
    /// Anything but a well-formed chain of 1 to [`DEPTH_MAX`] certificates.
    pub fn decode(bytes: &[u8]) -> Result<Self, CertificateError> {
        let mut reader = Reader::new(bytes);
        Self::read(&mut reader).filter(|_| reader.end().is_some()).ok_or(CertificateError::Malformed)
    }

    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let depth = usize::from(reader.u8()?);
        if !(1..=DEPTH_MAX).contains(&depth) {
            return None;
        }
        (0..depth).map(|_| Certificate::decode(reader.short(CERTIFICATE_BYTES_MAX)?)).collect::<Option<_>>().map(Self)
    }
}

impl Certificate {
    fn issued_by_root(root: &ed25519::Keypair, subject: PeerId, roles: Roles, expiry: u64) -> Self {
        let mesh = MeshId(root.public().to_bytes());
        let mut certificate = Self { mesh, subject, issuer: None, roles, expiry, signature: [0; 64] };
        certificate.signature = to_signature(&root.sign(&certificate.signed_bytes()));
        certificate
    }

    fn issued_by(issuer: &Identity, mesh: MeshId, subject: PeerId, roles: Roles, expiry: u64) -> Self {
        let issuer_peer = Some(issuer.peer_id());
        let mut certificate = Self { mesh, subject, issuer: issuer_peer, roles, expiry, signature: [0; 64] };
        certificate.signature = to_signature(&issuer.sign(&certificate.signed_bytes()));
        certificate
    }

    fn is_signed(&self) -> bool {
        match &self.issuer {
            None => ed25519::PublicKey::try_from_bytes(&self.mesh.0)
                .is_ok_and(|root| root.verify(&self.signed_bytes(), &self.signature)),
            Some(peer) => identity::verify(&peer.to_bytes(), &self.signed_bytes(), &self.signature),
        }
    }

    /// The signed bytes. Their unique prefix keeps other signed data from being passed off as a certificate.
    fn signed_bytes(&self) -> Vec<u8> {
        let mut out = b"meshnode certificate\0".to_vec();
        self.put_body(&mut out);
        out
    }

    fn put_body(&self, out: &mut Vec<u8>) {
        out.push(VERSION);
        out.extend_from_slice(&self.mesh.0);
        put_short(out, &self.subject.to_bytes());
        put_short(out, &self.issuer.map(PeerId::to_bytes).unwrap_or_default());
        out.push(self.roles.0);
        out.extend_from_slice(&self.expiry.to_le_bytes());
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(CERTIFICATE_BYTES_MAX);
        self.put_body(&mut out);
        out.extend_from_slice(&self.signature);
        out
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader::new(bytes);
        if r.u8()? != VERSION {
            return None;
        }
        let mesh = MeshId(r.array()?);
        let subject = PeerId::from_bytes(r.short(PEER_BYTES_MAX)?).ok()?;
        let issuer = match r.short(PEER_BYTES_MAX)? {
            [] => None,
            bytes => Some(PeerId::from_bytes(bytes).ok()?),
        };
        let certificate =
            Self { mesh, subject, issuer, roles: Roles(r.u8()?), expiry: r.u64()?, signature: r.array()? };
        r.end().map(|()| certificate)
    }
}

/// What makes this node a member: its certificate chain and the mesh key.
#[derive(Clone)]
pub struct MeshCredentials {
    /// The mesh.
    pub mesh: MeshId,
    /// This node's certificate chain.
    pub chain: Chain,
    /// Gossip keys of all members are derived from it.
    pub mesh_key: [u8; 32],
    /// The secret half of the mesh's root key; only the founder has it.
    pub root_secret: Option<[u8; 32]>,
}

impl MeshCredentials {
    /// Founds a mesh: generates a root key and certifies `founder` until `expiry_unix`.
    pub fn found(founder: &Identity, expiry_unix: u64) -> Self {
        let root = ed25519::Keypair::generate();
        let mut root_secret = [0; 32];
        root_secret.copy_from_slice(root.secret().as_ref());
        let own = Certificate::issued_by_root(&root, founder.peer_id(), Roles::INVITER, expiry_unix);
        // A second, unrelated secret: every member receives the mesh key, none receives the root secret.
        let mut mesh_key = [0; 32];
        mesh_key.copy_from_slice(ed25519::SecretKey::generate().as_ref());
        Self {
            mesh: MeshId(root.public().to_bytes()),
            chain: Chain(vec![own]),
            mesh_key,
            root_secret: Some(root_secret),
        }
    }

    /// Certifies another peer, at most until this node's own chain expires. The founder certifies with the root key, so
    /// that chains stay short.
    ///
    /// # Errors
    /// This node may not invite, or its chain has the maximum depth.
    pub fn issue(
        &self,
        issuer: &Identity,
        subject: PeerId,
        roles: Roles,
        expiry_unix: u64,
    ) -> Result<Chain, CertificateError> {
        let expiry = expiry_unix.min(self.chain.expiry());
        if let Some(root) = self.root() {
            return Ok(Chain(vec![Certificate::issued_by_root(&root, subject, roles, expiry)]));
        }
        let depth = self.chain.0.len();
        if !self.chain.own().is_some_and(|own| own.roles.may_invite()) {
            return Err(CertificateError::MayNotInvite { depth });
        }
        if depth >= DEPTH_MAX {
            return Err(CertificateError::TooDeep);
        }
        let mut chain = self.chain.clone();
        chain.0.push(Certificate::issued_by(issuer, self.mesh, subject, roles, expiry));
        Ok(chain)
    }

    /// Renews the founder's own certificate until `expiry_unix`; `None` on any other node.
    pub fn renew_founder(&self, founder: &Identity, expiry_unix: u64) -> Option<Self> {
        let own = Certificate::issued_by_root(&self.root()?, founder.peer_id(), Roles::INVITER, expiry_unix);
        Some(Self { chain: Chain(vec![own]), ..self.clone() })
    }

    pub(crate) fn root(&self) -> Option<ed25519::Keypair> {
        let mut secret = self.root_secret?;
        ed25519::SecretKey::try_from_bytes(&mut secret).ok().map(ed25519::Keypair::from)
    }

    /// Encoding for a private file.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend_from_slice(&self.mesh.0);
        out.extend_from_slice(&self.mesh_key);
        put_short(&mut out, self.root_secret.as_ref().map_or(&[][..], |s| &s[..]));
        put_long(&mut out, &self.chain.encode());
        out
    }

    /// Decodes the output of `encode`.
    ///
    /// # Errors
    /// Any other input.
    pub fn decode(bytes: &[u8]) -> Result<Self, CertificateError> {
        let mut r = Reader::new(bytes);
        Self::read(&mut r).filter(|_| r.end().is_some()).ok_or(CertificateError::Malformed)
    }

    fn read(r: &mut Reader<'_>) -> Option<Self> {
        if r.u8()? != VERSION {
            return None;
        }
        let mesh = MeshId(r.array()?);
        let mesh_key = r.array()?;
        let root_secret = match r.short(32)? {
            [] => None,
            bytes => Some(bytes.try_into().ok()?),
        };
        let chain = Chain::decode(r.long(CHAIN_BYTES_MAX)?).ok()?;
        Some(Self { mesh, chain, mesh_key, root_secret })
    }
}

impl fmt::Debug for MeshCredentials {
    /// Prints the mesh, never the secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MeshCredentials({}, founder: {})", self.mesh, self.root_secret.is_some())
    }
}

/// Ed25519 signatures are 64 bytes; an empty one (see `Identity::sign`) becomes zeros, which never verify.
fn to_signature(bytes: &[u8]) -> [u8; 64] {
    bytes.try_into().unwrap_or([0; 64])
}

/// Format version of certificates and credential files.
const VERSION: u8 = 1;

/// Why a certificate chain is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CertificateError {
    /// Not a well-formed chain.
    #[error("the certificate chain is malformed")]
    Malformed,
    /// The chain is for another mesh.
    #[error("the certificate is for mesh {found}, expected mesh {expected}")]
    OtherMesh {
        /// This node's mesh.
        expected: MeshId,
        /// The chain's mesh.
        found: MeshId,
    },
    /// The chain belongs to another peer.
    #[error("the certificate belongs to {found}, it was presented by {expected}")]
    OtherPeer {
        /// The peer that presented it.
        expected: Box<PeerId>,
        /// The peer it was issued to.
        found: Box<PeerId>,
    },
    /// A link does not follow from the one above it.
    #[error("the certificate at depth {depth} is forged: its signature or issuer does not fit the one above it")]
    Forged {
        /// 0 is the root's certificate.
        depth: usize,
    },
    /// The issuer lacks the inviter role.
    #[error("the issuer of the certificate at depth {depth} may not invite")]
    MayNotInvite {
        /// 0 is the root's certificate.
        depth: usize,
    },
    /// A certificate has expired.
    #[error("the certificate expired {seconds} s ago; join again with a new ticket")]
    Expired {
        /// Seconds since the expiry.
        seconds: u64,
    },
    /// The presenter, or a peer in its chain, was banned.
    #[error(
        "{peer} was banned from this mesh; the certificates that it issued are void too. To admit its machine again, invite it, and let it join with a new --data-dir"
    )]
    Banned {
        /// The banned peer.
        peer: Box<PeerId>,
    },
    /// One more link would exceed [`DEPTH_MAX`].
    #[error(
        "this node's own certificate is already {DEPTH_MAX} invitations from the founder; invite from another member"
    )]
    TooDeep,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::Noise;

    const NOW: u64 = 1_000;
    const LATER: u64 = 2_000;

    /// founder → a → b.
    fn three() -> (MeshCredentials, Identity, Identity, Chain) {
        let (founder, a, b) = (Identity::generate(), Identity::generate(), Identity::generate());
        let mut mesh = MeshCredentials::found(&founder, LATER);
        mesh.root_secret = None; // delegation by chain, not by root
        let chain_a = mesh.issue(&founder, a.peer_id(), Roles::INVITER, LATER).unwrap();
        let credentials_a = MeshCredentials { chain: chain_a, ..mesh.clone() };
        let chain_b = credentials_a.issue(&a, b.peer_id(), Roles::MEMBER, LATER).unwrap();
        (credentials_a, a, b, chain_b)
    }

    #[test]
    fn a_chain_of_invitations_verifies() {
        let (mesh, _, b, chain) = three();
        assert_eq!(chain.0.len(), 3);
        assert_eq!(chain.verify(mesh.mesh, b.peer_id(), NOW), Ok(Roles::MEMBER));
        assert_eq!(Chain::decode(&chain.encode()).unwrap(), chain);
        assert!(chain.encode().len() <= CHAIN_BYTES_MAX);
    }

    #[test]
    fn the_founder_issues_from_the_root() {
        let (founder, a) = (Identity::generate(), Identity::generate());
        let mesh = MeshCredentials::found(&founder, LATER);
        assert_eq!(mesh.chain.verify(mesh.mesh, founder.peer_id(), NOW), Ok(Roles::INVITER));
        let chain = mesh.issue(&founder, a.peer_id(), Roles::MEMBER, u64::MAX).unwrap();
        assert_eq!(chain.0.len(), 1);
        assert_eq!(chain.expiry(), LATER, "never longer than the issuer's own");
        assert_eq!(chain.verify(mesh.mesh, a.peer_id(), NOW), Ok(Roles::MEMBER));
    }

    #[test]
    fn only_the_founder_can_renew_its_own_certificate() {
        let (founder, a) = (Identity::generate(), Identity::generate());
        let mesh = MeshCredentials::found(&founder, NOW);
        assert!(mesh.chain.verify(mesh.mesh, founder.peer_id(), NOW).is_err(), "expired");
        let renewed = mesh.renew_founder(&founder, LATER).unwrap();
        assert_eq!(renewed.chain.verify(mesh.mesh, founder.peer_id(), NOW), Ok(Roles::INVITER));
        assert_eq!((renewed.chain.expiry(), renewed.mesh_key), (LATER, mesh.mesh_key));
        let chain = renewed.issue(&founder, a.peer_id(), Roles::INVITER, LATER).unwrap();
        let member = MeshCredentials { chain, root_secret: None, ..mesh };
        assert!(member.renew_founder(&a, LATER + 1).is_none());
    }

    #[test]
    fn each_invalid_chain_has_its_own_error() {
        let (mesh, a, b, chain) = three();
        let stranger = Identity::generate();
        let verify = |c: &Chain, peer: PeerId, now| c.verify(mesh.mesh, peer, now);
        assert!(matches!(verify(&chain, a.peer_id(), NOW), Err(CertificateError::OtherPeer { .. })));
        assert_eq!(verify(&chain, b.peer_id(), LATER + 5), Err(CertificateError::Expired { seconds: 5 }));
        let other = MeshCredentials::found(&stranger, LATER);
        assert!(matches!(chain.verify(other.mesh, b.peer_id(), NOW), Err(CertificateError::OtherMesh { .. })));

        let mut self_made = Certificate::issued_by(&stranger, mesh.mesh, stranger.peer_id(), Roles::INVITER, LATER);
        let forged = Chain(vec![chain.0[0].clone(), self_made.clone()]);
        assert_eq!(verify(&forged, stranger.peer_id(), NOW), Err(CertificateError::Forged { depth: 1 }));
        self_made.issuer = None;
        assert_eq!(
            verify(&Chain(vec![self_made]), stranger.peer_id(), NOW),
            Err(CertificateError::Forged { depth: 0 })
        );
        let mut promoted = chain.clone();
        promoted.0[2].roles = Roles::INVITER;
        assert_eq!(verify(&promoted, b.peer_id(), NOW), Err(CertificateError::Forged { depth: 2 }));

        let by_member = MeshCredentials { chain: chain.clone(), ..mesh.clone() };
        assert!(matches!(
            by_member.issue(&b, stranger.peer_id(), Roles::MEMBER, LATER),
            Err(CertificateError::MayNotInvite { .. })
        ));
        let mut unauthorized = chain.clone();
        unauthorized.0.push(Certificate::issued_by(&b, mesh.mesh, stranger.peer_id(), Roles::MEMBER, LATER));
        assert_eq!(verify(&unauthorized, stranger.peer_id(), NOW), Err(CertificateError::MayNotInvite { depth: 3 }));
    }

    #[test]
    fn chains_end_at_the_depth_limit() {
        let mut issuer = Identity::generate();
        let mut mesh = MeshCredentials::found(&issuer, LATER);
        mesh.root_secret = None;
        for _ in 1..DEPTH_MAX {
            let next = Identity::generate();
            mesh.chain = mesh.issue(&issuer, next.peer_id(), Roles::INVITER, LATER).unwrap();
            issuer = next;
        }
        assert_eq!(mesh.chain.verify(mesh.mesh, issuer.peer_id(), NOW), Ok(Roles::INVITER));
        assert_eq!(mesh.issue(&issuer, issuer.peer_id(), Roles::MEMBER, LATER), Err(CertificateError::TooDeep));
        let mut deep = mesh.chain.encode();
        deep[0] += 1;
        assert_eq!(Chain::decode(&deep), Err(CertificateError::Malformed));
    }

    #[test]
    fn credentials_round_trip() {
        let mesh = MeshCredentials::found(&Identity::generate(), LATER);
        let back = MeshCredentials::decode(&mesh.encode()).unwrap();
        assert_eq!((back.mesh, &back.chain, back.mesh_key), (mesh.mesh, &mesh.chain, mesh.mesh_key));
        assert_eq!(back.root_secret, mesh.root_secret);
        assert!(!format!("{mesh:?}").contains(&format!("{:?}", mesh.mesh_key)));
        assert!(MeshCredentials::decode(&mesh.encode()[1..]).is_err());
    }

    #[test]
    fn any_flipped_bit_is_detected() {
        let (mesh, _, b, chain) = three();
        let good = chain.encode();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let verified = Chain::decode(&bad).and_then(|c| c.verify(mesh.mesh, b.peer_id(), NOW));
            assert!(verified.is_err(), "bit {bit}");
        }
    }

    #[test]
    fn noise_never_panics() {
        let (_, _, _, chain) = three();
        let mut noise = Noise::new(1);
        for _ in 0..20_000 {
            let bytes = noise.mangle(&chain.encode());
            if let Ok(decoded) = Chain::decode(&bytes) {
                assert_eq!(decoded.encode(), bytes);
            }
            let _ = MeshCredentials::decode(&bytes);
        }
    }
}
