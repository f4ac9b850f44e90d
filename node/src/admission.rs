//! Admission of new members by this node, and the node's own credentials.
//!
//! `node_core::admission` decides, the transport verifies and signs, and this module stores.
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

/// Lifetime of a certificate, bounded by its issuer's. It is long, so that a mesh survives the loss of its founder.
/// `renewal.rs` extends it.
pub const MEMBERSHIP: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Most addresses in a ticket. A joiner uses the first that answers.
const TICKET_ADDRS_MAX: usize = 4;

/// The node's credentials and tickets, and the peers that wait for approval.
pub struct Admission {
    identity: Identity,
    /// Replaced as a whole when they are renewed.
    credentials: RwLock<Arc<MeshCredentials>>,
    book: Mutex<InviteBook>,
    /// Key to derive a ticket's secret from its number. The store contains only numbers, so that a copy of it reveals
    /// no tickets.
    secret_key: [u8; 32],
    /// Ticket numbers by the ticket id that a joiner sends.
    numbers: Mutex<BTreeMap<[u8; 16], [u8; 16]>>,
    /// PeerIds of the waiting nodes, for display.
    strangers: Mutex<BTreeMap<NodeId, PeerId>>,
    addrs: Vec<SocketAddr>,
    store: Arc<Store>,
    open: bool,
    quiet: Quiet,
}

/// Why an operation on tickets, approvals or credentials failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AdmissionError {
    /// No waiting peer matches.
    #[error("{0}")]
    Unknown(String),
    /// This node may not do it.
    #[error("{0}")]
    Refused(String),
    /// The disk or the random number generator failed.
    #[error("{0}")]
    Storage(String),
}

impl From<StoreError> for AdmissionError {
    fn from(error: StoreError) -> Self {
        AdmissionError::Storage(error.to_string())
    }
}

impl Admission {
    /// Creates it with the tickets in the store. `addrs`: the data-plane addresses of this node, for tickets.
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

    /// Whether this node admits every machine of the local network that asks.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Whether this node has the right to invite.
    pub fn may_invite(&self) -> bool {
        self.credentials().chain.own().is_some_and(|own| own.roles.may_invite())
    }

    /// The node's current credentials.
    pub fn credentials(&self) -> Arc<MeshCredentials> {
        self.credentials.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Replaces the node's credentials.
    pub fn set_credentials(&self, credentials: MeshCredentials) {
        *self.credentials.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Arc::new(credentials);
    }

    /// This node's identity key.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Display name of the mesh: the first eight hex digits of its id.
    pub fn mesh_name(&self) -> String {
        self.credentials().mesh.0[..4].iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Creates a ticket for `uses` admissions within `ttl`.
    ///
    /// # Errors
    /// This node may not invite, or the store cannot be written.
    pub fn invite(&self, ttl: Duration, uses: u32) -> Result<String, AdmissionError> {
        let credentials = self.credentials();
        if !self.may_invite() {
            return Err(AdmissionError::Refused(
                "this node was admitted without the right to invite others, because it joined an open mesh: run `meshnode invite` \
                 on another member"
                    .into(),
            ));
        }
        let mut number = [0; 16];
        getrandom::fill(&mut number)
            .map_err(|e| AdmissionError::Storage(format!("cannot generate a random ticket: {e}")))?;
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

    /// Voids all tickets created until `issued`, because a banned node may have their secrets. Returns those that were
    /// still valid.
    ///
    /// # Errors
    /// The store cannot be written: the tickets are void only until the next start.
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

    /// Admits a waiting peer the next time it asks. `peer`: its PeerId, or a part that matches only one waiting peer.
    ///
    /// # Errors
    /// No waiting peer matches, or several do.
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
                "`{peer}` matches {} waiting peers: use more characters of the id",
                several.len()
            ))),
        }
    }

    /// PeerIds that asked to join without a ticket.
    pub fn waiting(&self) -> Vec<String> {
        let strangers = self.strangers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.book().waiting().filter_map(|n| Some(strangers.get(&n)?.to_string())).collect()
    }

    /// Answers a join request. An admitted peer gets its certificate, the mesh key and the known members.
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
                tracing::info!("admitted {} ({}) to the mesh", request.peer_id, request.name);
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
                        JoinRefusal::NotApproved => format!("; to admit it: meshnode approve {peer}"),
                        JoinRefusal::Unknown
                        | JoinRefusal::Expired
                        | JoinRefusal::UsedUp
                        | JoinRefusal::OtherMesh
                        | JoinRefusal::NotAMember
                        | JoinRefusal::Busy
                        | JoinRefusal::Banned => String::new(),
                    };
                    tracing::info!("rejected a join request of {peer} ({name}) at {addr}: {refusal}{advice}{more}");
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
        // Save the use before granting it, so that a full disk cannot make tickets unlimited.
        self.store.put_invites(&invites).map_err(|e| {
            tracing::error!("cannot admit new members: {e}");
            JoinRefusal::Busy
        })?;
        let expiry = crate::handle::unix_seconds() + MEMBERSHIP.as_secs();
        let roles = if admitted.may_invite() { Roles::INVITER } else { Roles::MEMBER };
        self.credentials().issue(&self.identity, peer, roles, expiry).map_err(|e| {
            tracing::error!("cannot admit new members: {e}");
            JoinRefusal::Busy
        })
    }

    /// Remembers the PeerId of a waiting node. Any peer may ask, so the list of waiting nodes is bounded, and this map
    /// too.
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

/// Derives the secret of a ticket from its number.
fn secret_of(key: &[u8; 32], number: &[u8; 16]) -> [u8; 16] {
    let mut secret = [0; 16];
    secret.copy_from_slice(&blake3::keyed_hash(key, number).as_bytes()[..16]);
    secret
}

fn names(waiting: &[(NodeId, String)]) -> String {
    waiting.iter().map(|(_, id)| id.as_str()).collect::<Vec<_>>().join(", ")
}

/// The file with this node's credentials.
fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("membership")
}

/// Loads the saved credentials, if there are any.
///
/// # Errors
/// The file cannot be read or is damaged. It is not replaced silently, because the node would lose its mesh.
pub fn load(data_dir: &Path) -> Result<Option<MeshCredentials>, AdmissionError> {
    let path = path(data_dir);
    match std::fs::read(&path) {
        Ok(bytes) => MeshCredentials::decode(&bytes).map(Some).map_err(|e| {
            AdmissionError::Storage(format!(
                "{} is damaged ({e}): remove it and join again with a ticket",
                path.display()
            ))
        }),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(AdmissionError::Storage(format!("cannot read {}: {e}", path.display()))),
    }
}

/// Saves the credentials, readable only by this user.
///
/// # Errors
/// The file cannot be written.
pub fn save(data_dir: &Path, credentials: &MeshCredentials) -> Result<(), AdmissionError> {
    let path = path(data_dir);
    transport::identity::write_private(&path, &credentials.encode()).map_err(|e| {
        let why = crate::disk::explain(&e, crate::disk::FREE_DATA);
        AdmissionError::Storage(format!("cannot write the membership to {}: {why}", path.display()))
    })
}

/// Whether an address belongs to this machine or its local network: loopback, private, link-local, or in the same
/// subnet as one of this machine's addresses.
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

/// Founds a mesh with this node as its first member.
pub fn found(identity: &Identity) -> MeshCredentials {
    MeshCredentials::found(identity, crate::handle::unix_seconds() + MEMBERSHIP.as_secs())
}

/// Checks that a ticket is for the mesh that the data directory belongs to.
///
/// # Errors
/// It is for another mesh.
pub fn same_mesh(held: &MeshCredentials, ticket: MeshId, data_dir: &Path) -> Result<(), AdmissionError> {
    if held.mesh == ticket {
        return Ok(());
    }
    Err(AdmissionError::Refused(format!(
        "{} belongs to another mesh than this ticket: use a new --data-dir, or remove {} to leave the old mesh permanently",
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
    fn an_open_mesh_admits_only_the_local_network_without_the_right_to_invite() {
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
    fn the_subnets_of_this_machine_are_local() {
        let interface = |ip: &str, netmask: &str| {
            let (ip, netmask) = (ip.parse().unwrap(), netmask.parse().unwrap());
            if_addrs::IfAddr::V4(if_addrs::Ifv4Addr { ip, netmask, prefixlen: 24, broadcast: None })
        };
        let own = interface("203.0.113.5", "255.255.255.0");
        assert!(is_on_link(&own, "203.0.113.77".parse().unwrap()));
        assert!(!is_on_link(&own, "203.0.114.77".parse().unwrap()));
        assert!(
            !is_on_link(&interface("203.0.113.5", "0.0.0.0"), "8.8.8.8".parse().unwrap()),
            "a mask that matches every address"
        );
    }

    #[test]
    fn tickets_created_before_a_ban_stay_void_after_a_restart() {
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
    fn the_store_has_no_ticket_secrets_and_tickets_survive_a_restart() {
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
