//! Who is let into the mesh by this node, and the credentials this node holds itself.
//!
//! The decision is `node_core::admission`'s; proofs and signatures are the transport's; this keeps the files.
use crate::quiet::Quiet;
use crate::store::{Store, StoreError};
use node_core::admission::{Admitted, Claim, Invite, InviteBook, Refusal};
use node_core::id::NodeId;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
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
    /// What a ticket's secret is computed with, from its number. The store holds numbers only: who reads it, or a copy of it,
    /// has no ticket.
    secret_key: [u8; 32],
    /// Numbers of invitations by the id that a joiner names.
    numbers: Mutex<BTreeMap<[u8; 16], [u8; 16]>>,
    /// PeerIds behind the nodes that wait, for people.
    strangers: Mutex<BTreeMap<NodeId, PeerId>>,
    addrs: Vec<SocketAddr>,
    store: Arc<Store>,
    open: bool,
    quiet: Quiet,
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
        let secret_key = identity.derived_key("meshnode 2026 secrets of tickets");
        let id = |number| transport::ticket::ticket_id(&secret_of(&secret_key, &number));
        let numbers = store.invites().into_iter().map(|(number, _)| (id(number), number)).collect();
        Self {
            identity,
            credentials: RwLock::new(Arc::new(credentials)),
            book: Mutex::new(book),
            secret_key,
            numbers: Mutex::new(numbers),
            strangers: Mutex::new(BTreeMap::new()),
            addrs,
            store,
            open,
            quiet: Quiet::default(),
        }
    }

    /// Whether every machine of the local network that asks is admitted.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Whether this node was given the right to let others in.
    pub fn may_invite(&self) -> bool {
        self.credentials().chain.own().is_some_and(|own| own.roles.may_invite())
    }

    /// What makes this node a member, as it stands.
    pub fn credentials(&self) -> Arc<MeshCredentials> {
        self.credentials.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// From now on these.
    pub fn set_credentials(&self, credentials: MeshCredentials) {
        *self.credentials.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Arc::new(credentials);
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
        if !self.may_invite() {
            return Err(AdmissionError::Refused(
                "this node was admitted without the right to invite others (it joined an open mesh): run `meshnode invite` on \
                 another member"
                    .into(),
            ));
        }
        let mut number = [0; 16];
        getrandom::fill(&mut number).map_err(|e| AdmissionError::Storage(format!("no randomness: {e}")))?;
        let issued = crate::handle::unix_seconds();
        let expiry = issued + ttl.as_secs();
        let invites = {
            let mut book = self.book();
            book.issue(number, Invite { expiry, uses_left: uses, issued });
            book.invites()
        };
        self.store.put_invites(&invites)?;
        let secret = secret_of(&self.secret_key, &number);
        {
            let mut numbers = self.numbers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            numbers.retain(|_, kept| invites.iter().any(|(issued, _)| issued == kept));
            numbers.insert(transport::ticket::ticket_id(&secret), number);
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

    /// Revokes the tickets made until `issued`: a banned node may know their secrets. Returns those that would still have
    /// admitted a node.
    ///
    /// # Errors
    /// The store cannot be written: they are void until the next start only.
    pub fn void_invites(&self, issued: u64) -> Result<Vec<Invite>, AdmissionError> {
        let (void, left) = {
            let mut book = self.book();
            let before = book.invites().len();
            let void = book.void(issued, crate::handle::unix_seconds());
            let left = book.invites();
            if left.len() == before {
                return Ok(void);
            }
            (void, left)
        };
        self.numbers
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .retain(|_, kept| left.iter().any(|(id, _)| id == kept));
        self.store.put_invites(&left)?;
        Ok(void)
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
            let strangers = self.strangers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
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
        let strangers = self.strangers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.book().waiting().filter_map(|n| Some(strangers.get(&n)?.to_string())).collect()
    }

    /// Decides about a joiner; an admitted one gets its credentials and the members this node knows.
    pub fn answer(&self, request: JoinRequest, members: Vec<u8>) {
        let claim = match request.ticket {
            None => Claim::Nothing,
            Some(id) => match self.numbers.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get(&id) {
                Some(number) if request.proves(&secret_of(&self.secret_key, number)) => Claim::Secret(*number),
                _ => Claim::UnknownSecret,
            },
        };
        match self.decide(request.peer_id, request.addr.ip(), claim) {
            Ok(chain) => {
                tracing::info!("{} ({}) joins through this node", request.peer_id, request.name);
                request.admit(transport::join::Admission {
                    chain,
                    mesh_key: self.credentials().mesh_key,
                    members: members.into(),
                });
            }
            Err(refusal) => {
                if let Some(more) = self.quiet.admit() {
                    let (peer, name, addr) = (request.peer_id, &request.name, request.addr);
                    let advice = match refusal {
                        JoinRefusal::NotApproved => format!("; let it in with: meshnode approve {peer}"),
                        JoinRefusal::Unknown
                        | JoinRefusal::Expired
                        | JoinRefusal::UsedUp
                        | JoinRefusal::OtherMesh
                        | JoinRefusal::NotAMember
                        | JoinRefusal::Busy
                        | JoinRefusal::Banned => String::new(),
                    };
                    tracing::info!("{peer} ({name}) at {addr} may not join: {refusal}{advice}{more}");
                }
                request.refuse(refusal);
            }
        }
    }

    fn decide(&self, peer: PeerId, from: IpAddr, claim: Claim) -> Result<Chain, JoinRefusal> {
        let node = NodeId(transport::node_id(&peer));
        let local = self.open && is_local(from);
        let (verdict, invites) = {
            let mut book = self.book();
            (book.decide(node, claim, local, crate::handle::unix_seconds()), book.invites())
        };
        let admitted: Admitted = verdict.map_err(|refusal| match refusal {
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
        let roles = if admitted.may_invite() { Roles::INVITER } else { Roles::MEMBER };
        self.credentials().issue(&self.identity, peer, roles, expiry).map_err(|e| {
            tracing::error!("nobody can be admitted: {e}");
            JoinRefusal::Busy
        })
    }

    /// Only of those who wait: anybody may ask, so the list of them is bounded, and this with it.
    fn remember_stranger(&self, node: NodeId, peer: PeerId) {
        let waiting: Vec<NodeId> = self.book().waiting().collect();
        let mut strangers = self.strangers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        strangers.insert(node, peer);
        strangers.retain(|stranger, _| waiting.contains(stranger));
    }

    fn book(&self) -> std::sync::MutexGuard<'_, InviteBook> {
        self.book.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The secret in the ticket of this number.
fn secret_of(key: &[u8; 32], number: &[u8; 16]) -> [u8; 16] {
    let mut secret = [0; 16];
    secret.copy_from_slice(&blake3::keyed_hash(key, number).as_bytes()[..16]);
    secret
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
    let path = path(data_dir);
    transport::identity::write_private(&path, &credentials.encode()).map_err(|e| {
        let why = crate::disk::explain(&e, crate::disk::FREE_DATA);
        AdmissionError::Storage(format!("the membership cannot be written to {}: {why}", path.display()))
    })
}

/// Whether an address is this machine's or of its local network: loopback, private, link-local, or in the same subnet as one
/// of this machine's own addresses.
fn is_local(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    let private = match ip {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_private() || ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local(),
    };
    private || if_addrs::get_if_addrs().unwrap_or_default().iter().any(|interface| is_on_link(&interface.addr, ip))
}

fn is_on_link(interface: &if_addrs::IfAddr, ip: IpAddr) -> bool {
    let same = |a: u128, b: u128, mask: u128| mask != 0 && a & mask == b & mask;
    match (interface, ip) {
        (if_addrs::IfAddr::V4(own), IpAddr::V4(ip)) => {
            same(own.ip.to_bits().into(), ip.to_bits().into(), own.netmask.to_bits().into())
        }
        (if_addrs::IfAddr::V6(own), IpAddr::V6(ip)) => same(own.ip.to_bits(), ip.to_bits(), own.netmask.to_bits()),
        (if_addrs::IfAddr::V4(_) | if_addrs::IfAddr::V6(_), _) => false,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn guests(open: bool) -> (tempfile::TempDir, Identity, Admission) {
        let (dir, me) = (tempfile::tempdir().unwrap(), Identity::generate());
        let store = Arc::new(Store::open(dir.path()).unwrap());
        let guests = Admission::new(me.clone(), found(&me), store, vec![], open);
        (dir, me, guests)
    }

    #[test]
    fn an_open_mesh_admits_its_own_network_only_and_nobody_it_admits_may_invite() {
        let (_dir, _, guests) = guests(true);
        let decide = |from: &str| {
            let peer = Identity::generate().peer_id();
            guests.decide(peer, from.parse().unwrap(), Claim::Nothing).map(|chain| chain.own().unwrap().roles)
        };
        for local in ["127.0.0.1", "10.1.2.3", "172.16.0.9", "192.168.7.7", "169.254.3.3", "fd00::7", "fe80::1", "::1"]
        {
            assert_eq!(decide(local), Ok(Roles::MEMBER), "{local}");
        }
        assert_eq!(decide("::ffff:192.168.7.7"), Ok(Roles::MEMBER));
        for far in ["8.8.8.8", "100.64.0.1", "203.0.113.9", "2606:4700::1111", "::ffff:8.8.8.8"] {
            assert_eq!(decide(far), Err(JoinRefusal::NotApproved), "{far}");
        }
    }

    #[test]
    fn the_subnet_of_an_own_address_is_local() {
        let interface = |ip: &str, netmask: &str| {
            let (ip, netmask) = (ip.parse().unwrap(), netmask.parse().unwrap());
            if_addrs::IfAddr::V4(if_addrs::Ifv4Addr { ip, netmask, prefixlen: 24, broadcast: None })
        };
        let own = interface("203.0.113.5", "255.255.255.0");
        assert!(is_on_link(&own, "203.0.113.77".parse().unwrap()));
        assert!(!is_on_link(&own, "203.0.114.77".parse().unwrap()));
        assert!(
            !is_on_link(&interface("203.0.113.5", "0.0.0.0"), "8.8.8.8".parse().unwrap()),
            "a mask that holds everybody"
        );
    }

    #[test]
    fn tickets_made_before_a_ban_admit_nobody_in_this_life_and_the_next() {
        let (dir, me, guests) = guests(false);
        let ticket: Ticket = guests.invite(Duration::from_secs(60), 3).unwrap().parse().unwrap();
        let claim = Claim::Secret(guests.numbers.lock().unwrap()[&ticket.id()]);
        let ask = |guests: &Admission| {
            guests.decide(Identity::generate().peer_id(), "127.0.0.1".parse().unwrap(), claim).map(drop)
        };
        assert_eq!(ask(&guests), Ok(()));
        let void = guests.void_invites(crate::handle::unix_seconds()).unwrap();
        assert_eq!(void.iter().map(|invite| invite.uses_left).collect::<Vec<_>>(), [2]);
        assert_eq!(ask(&guests), Err(JoinRefusal::Unknown));
        drop(guests);
        let again = Admission::new(me.clone(), found(&me), Arc::new(Store::open(dir.path()).unwrap()), vec![], false);
        assert_eq!(ask(&again), Err(JoinRefusal::Unknown));
    }

    #[test]
    fn the_store_holds_no_ticket_secret_and_tickets_outlive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity::load_or_create(dir.path()).unwrap();
        let open = || {
            let store = Arc::new(Store::open(dir.path()).unwrap());
            Admission::new(identity.clone(), found(&identity), store, Vec::new(), false)
        };
        let guests = open();
        let ticket: Ticket = guests.invite(Duration::from_secs(60), 2).unwrap().parse().unwrap();
        assert!(guests.numbers.lock().unwrap().contains_key(&ticket.id()));
        drop(guests);
        let as_json = serde_json::to_string(&ticket.secret).unwrap().into_bytes();
        for entry in std::fs::read_dir(dir.path().join("store")).unwrap().map(|entry| entry.unwrap().path()) {
            let bytes = if entry.is_file() { std::fs::read(&entry).unwrap() } else { continue };
            for secret in [ticket.secret.as_slice(), &as_json] {
                assert!(!bytes.windows(secret.len()).any(|part| part == secret), "{}", entry.display());
            }
        }
        let guests = open();
        let number = guests.numbers.lock().unwrap()[&ticket.id()];
        assert_eq!(secret_of(&guests.secret_key, &number), ticket.secret);
        assert!(guests.book().invites().iter().any(|(issued, _)| *issued == number));
    }
}
