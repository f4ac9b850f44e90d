//! Who is let into the mesh by this node, and the credentials this node holds itself.
//!
//! The decision is `node_core::admission`'s; proofs and signatures are the transport's; this keeps the files.
use crate::store::{Store, StoreError};
use node_core::admission::{Claim, Invite, InviteBook, Refusal};
use node_core::id::NodeId;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;
use transport::certificate::{Chain, Roles};
use transport::join::{JoinRefusal, JoinRequest};
use transport::{Identity, MeshCredentials, MeshId, PeerId, Ticket};

/// How long a membership lasts, though never longer than its issuer's: nobody owns the mesh, so it should not end because
/// its founder's machine is gone. `renewal.rs` extends it.
pub const MEMBERSHIP: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Addresses in a ticket: the first that answers is used.
const TICKET_ADDRS_MAX: usize = 4;

/// The guest list and the keys of the house.
pub struct Admission {
    identity: Identity,
    /// Replaced as a whole when they are renewed.
    credentials: RwLock<Arc<MeshCredentials>>,
    book: Mutex<InviteBook>,
    /// Secrets by the id that a joiner names.
    secrets: Mutex<BTreeMap<[u8; 16], [u8; 16]>>,
    /// PeerIds behind the nodes that wait, for people.
    strangers: Mutex<BTreeMap<NodeId, PeerId>>,
    addrs: Vec<SocketAddr>,
    store: Arc<Store>,
}

/// Why an admission matter did not work.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AdmissionError {
    /// No such peer waits.
    #[error("{0}")]
    Unknown(String),
    /// Not allowed.
    #[error("{0}")]
    Refused(String),
    /// The disk refused.
    #[error("{0}")]
    Storage(String),
}

impl From<StoreError> for AdmissionError {
    fn from(error: StoreError) -> Self {
        AdmissionError::Storage(error.to_string())
    }
}

impl Admission {
    /// The guest list of a member that is reachable at `addrs` (data plane).
    pub fn new(
        identity: Identity,
        credentials: MeshCredentials,
        store: Arc<Store>,
        addrs: Vec<SocketAddr>,
        open: bool,
    ) -> Self {
        let book = InviteBook::new(store.invites(), open);
        let secrets =
            store.invites().into_iter().map(|(secret, _)| (transport::ticket::ticket_id(&secret), secret)).collect();
        Self {
            identity,
            credentials: RwLock::new(Arc::new(credentials)),
            book: Mutex::new(book),
            secrets: Mutex::new(secrets),
            strangers: Mutex::new(BTreeMap::new()),
            addrs,
            store,
        }
    }

    /// What makes this node a member, as it stands.
    pub fn credentials(&self) -> Arc<MeshCredentials> {
        self.credentials.read().expect("no panics under this lock").clone()
    }

    /// From now on these.
    pub fn set_credentials(&self, credentials: MeshCredentials) {
        *self.credentials.write().expect("no panics under this lock") = Arc::new(credentials);
    }

    /// This node's key.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// First eight digits of the mesh id, for people.
    pub fn mesh_name(&self) -> String {
        self.credentials().mesh.0[..4].iter().map(|b| format!("{b:02x}")).collect()
    }

    /// A ticket good for `uses` admissions within `ttl`.
    ///
    /// # Errors
    /// This node may not invite, or the store cannot be written.
    pub fn invite(&self, ttl: Duration, uses: u32) -> Result<String, AdmissionError> {
        let credentials = self.credentials();
        if !credentials.chain.own().is_some_and(|own| own.roles.may_invite()) {
            return Err(AdmissionError::Refused("this node was admitted without the right to invite others".into()));
        }
        let mut secret = [0; 16];
        getrandom::fill(&mut secret).map_err(|e| AdmissionError::Storage(format!("no randomness: {e}")))?;
        let expiry = crate::handle::unix_seconds() + ttl.as_secs();
        let invites = {
            let mut book = self.book();
            book.issue(secret, Invite { expiry, uses_left: uses });
            book.invites()
        };
        self.store.put_invites(&invites)?;
        {
            let mut secrets = self.secrets.lock().expect("no panics under this lock");
            secrets.retain(|_, kept| invites.iter().any(|(issued, _)| issued == kept));
            secrets.insert(transport::ticket::ticket_id(&secret), secret);
        }
        let ticket = Ticket {
            mesh: credentials.mesh,
            inviter: self.identity.peer_id(),
            addrs: self.addrs.iter().copied().take(TICKET_ADDRS_MAX).collect(),
            secret,
            expiry_unix: expiry,
        };
        Ok(ticket.to_string())
    }

    /// Lets a waiting peer in the next time it asks: by PeerId, or a part of it that only one waiting peer has.
    ///
    /// # Errors
    /// No such peer waits, or several match.
    pub fn approve(&self, peer: &str) -> Result<(), AdmissionError> {
        if let Ok(peer_id) = peer.parse::<PeerId>() {
            self.book().approve(NodeId(transport::node_id(&peer_id)));
            return Ok(());
        }
        let waiting: Vec<(NodeId, String)> = {
            let strangers = self.strangers.lock().expect("no panics under this lock");
            self.book().waiting().filter_map(|n| Some((n, strangers.get(&n)?.to_string()))).collect()
        };
        let matching: Vec<_> = waiting.iter().filter(|(_, id)| !peer.is_empty() && id.contains(peer)).collect();
        match matching.as_slice() {
            [(node, _)] => {
                self.book().approve(*node);
                Ok(())
            }
            [] => Err(AdmissionError::Unknown(format!(
                "no peer `{peer}` waits to join; waiting: {}",
                if waiting.is_empty() { "none".into() } else { names(&waiting) }
            ))),
            several => Err(AdmissionError::Unknown(format!(
                "`{peer}` matches {} waiting peers: give more of the id",
                several.len()
            ))),
        }
    }

    /// PeerIds that asked without a ticket.
    pub fn waiting(&self) -> Vec<String> {
        let strangers = self.strangers.lock().expect("no panics under this lock");
        self.book().waiting().filter_map(|n| Some(strangers.get(&n)?.to_string())).collect()
    }

    /// Decides about a joiner; an admitted one gets its credentials and the members this node knows.
    pub fn answer(&self, request: JoinRequest, members: Vec<u8>) {
        let claim = match request.ticket {
            None => Claim::Nothing,
            Some(id) => match self.secrets.lock().expect("no panics under this lock").get(&id) {
                Some(secret) if request.proves(secret) => Claim::Secret(*secret),
                _ => Claim::UnknownSecret,
            },
        };
        match self.decide(request.peer_id, claim) {
            Ok(chain) => {
                tracing::info!("{} ({}) joins through this node", request.peer_id, request.name);
                request.admit(transport::join::Admission {
                    chain,
                    mesh_key: self.credentials().mesh_key,
                    members: members.into(),
                });
            }
            Err(refusal) => {
                tracing::info!("{} ({}) at {} may not join: {refusal}", request.peer_id, request.name, request.addr);
                if refusal == JoinRefusal::NotApproved {
                    tracing::info!("let it in with: meshnode approve {}", request.peer_id);
                }
                request.refuse(refusal);
            }
        }
    }

    fn decide(&self, peer: PeerId, claim: Claim) -> Result<Chain, JoinRefusal> {
        let node = NodeId(transport::node_id(&peer));
        let (verdict, invites) = {
            let mut book = self.book();
            (book.decide(node, claim, crate::handle::unix_seconds()), book.invites())
        };
        verdict.map_err(|refusal| match refusal {
            Refusal::Unknown => JoinRefusal::Unknown,
            Refusal::Expired => JoinRefusal::Expired,
            Refusal::UsedUp => JoinRefusal::UsedUp,
            Refusal::NotApproved => {
                self.remember_stranger(node, peer);
                JoinRefusal::NotApproved
            }
        })?;
        // A use is spent before it is granted: a full disk must not make tickets last for ever.
        self.store.put_invites(&invites).map_err(|e| {
            tracing::error!("nobody can be admitted: {e}");
            JoinRefusal::Busy
        })?;
        let expiry = crate::handle::unix_seconds() + MEMBERSHIP.as_secs();
        self.credentials().issue(&self.identity, peer, Roles::INVITER, expiry).map_err(|e| {
            tracing::error!("nobody can be admitted: {e}");
            JoinRefusal::Busy
        })
    }

    /// Only of those who wait: anybody may ask, so the list of them is bounded, and this with it.
    fn remember_stranger(&self, node: NodeId, peer: PeerId) {
        let waiting: Vec<NodeId> = self.book().waiting().collect();
        let mut strangers = self.strangers.lock().expect("no panics under this lock");
        strangers.insert(node, peer);
        strangers.retain(|stranger, _| waiting.contains(stranger));
    }

    fn book(&self) -> std::sync::MutexGuard<'_, InviteBook> {
        self.book.lock().expect("no panics under this lock")
    }
}

fn names(waiting: &[(NodeId, String)]) -> String {
    waiting.iter().map(|(_, id)| id.as_str()).collect::<Vec<_>>().join(", ")
}

/// The file with this node's membership.
fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("membership")
}

/// The membership of a former life, if there is one.
///
/// # Errors
/// The file is there but damaged: it is not silently replaced, because the mesh would be lost.
pub fn load(data_dir: &Path) -> Result<Option<MeshCredentials>, AdmissionError> {
    let path = path(data_dir);
    match std::fs::read(&path) {
        Ok(bytes) => MeshCredentials::decode(&bytes).map(Some).map_err(|e| {
            AdmissionError::Storage(format!(
                "{} is damaged ({e}): remove it and join again by a ticket",
                path.display()
            ))
        }),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(AdmissionError::Storage(format!("{}: {e}", path.display()))),
    }
}

/// Keeps the membership, readable by this user only.
///
/// # Errors
/// The disk refused.
pub fn save(data_dir: &Path, credentials: &MeshCredentials) -> Result<(), AdmissionError> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let (path, beside) = (path(data_dir), data_dir.join("membership.new"));
    let mut options = std::fs::File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    options
        .open(&beside)
        .and_then(|mut file| file.write_all(&credentials.encode()).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&beside, &path))
        .map_err(|e| {
            let _ = std::fs::remove_file(&beside);
            let why = crate::disk::explain(&e, crate::disk::FREE_DATA);
            AdmissionError::Storage(format!("the membership cannot be written to {}: {why}", path.display()))
        })
}

/// Begins a mesh: this node is its first member.
pub fn found(identity: &Identity) -> MeshCredentials {
    MeshCredentials::found(identity, crate::handle::unix_seconds() + MEMBERSHIP.as_secs())
}

/// Two meshes do not mix by accident.
///
/// # Errors
/// The data directory belongs to another mesh than the ticket.
pub fn same_mesh(held: &MeshCredentials, ticket: MeshId, data_dir: &Path) -> Result<(), AdmissionError> {
    if held.mesh == ticket {
        return Ok(());
    }
    Err(AdmissionError::Refused(format!(
        "{} belongs to another mesh than this ticket: use a fresh --data-dir, or remove {} to leave the old mesh for good",
        data_dir.display(),
        path(data_dir).display()
    )))
}
