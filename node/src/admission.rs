//! Admission of new members by this node, and the node's own credentials.
//!
//! `node_core::admission` decides, the transport verifies and signs, and this module stores.
use crate::quiet::Quiet;
use crate::store::{Store, StoreError};
use node_core::admission::{Admitted, Claim, Invite, InviteBook, Rejection};
use node_core::id::NodeId;
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use transport::certificate::{Chain, Roles};
use transport::join::{JoinRejection, JoinRequest};
use transport::{Identity, MeshCredentials, MeshId, PeerId, Ticket};

/// Lifetime of a certificate, bounded by its issuer's. It is long, so that a mesh survives the loss of its founder.
/// `renewal.rs` extends it.
pub(crate) const MEMBERSHIP: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Most addresses in a ticket. A joiner uses the first that answers.
const TICKET_ADDRS_MAX: usize = 4;

/// The node's credentials and tickets, and the peers that wait for approval.
pub(crate) struct Admission {
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
pub(crate) enum AdmissionError {
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
    pub(crate) fn new(
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
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Whether this node has the right to invite.
    pub(crate) fn may_invite(&self) -> bool {
        self.credentials().chain.own().is_some_and(|own| own.roles.may_invite())
    }

    /// The node's current credentials.
    pub(crate) fn credentials(&self) -> Arc<MeshCredentials> {
        self.credentials.read().clone()
    }

    /// Replaces the node's credentials.
    pub(crate) fn set_credentials(&self, credentials: MeshCredentials) {
        *self.credentials.write() = Arc::new(credentials);
    }

    /// This node's identity key.
    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Display name of the mesh: the first eight hex digits of its id.
    pub(crate) fn mesh_name(&self) -> String {
        self.credentials().mesh.0[..4].iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Creates a ticket for `uses` admissions within `ttl`.
    ///
    /// # Errors
    /// This node may not invite, or the store cannot be written.
    pub(crate) fn invite(&self, ttl: Duration, uses: u32) -> Result<String, AdmissionError> {
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
        let issued = crate::clock::unix_seconds();
        let expiry = issued + ttl.as_secs();
        let invites = {
            let mut book = self.book();
            book.issue(number, Invite { expiry, uses_left: uses, issued });
            book.invites()
        };
        self.store.put_invites(&invites)?;
        let secret = secret_of(&self.secret_key, &number);
        {
            let mut numbers = self.numbers.lock();
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
    pub(crate) fn void_invites(&self, issued: u64) -> Result<Vec<Invite>, AdmissionError> {
        let (void, left) = {
            let mut book = self.book();
            let before = book.invites().len();
            let void = book.void(issued, crate::clock::unix_seconds());
            let left = book.invites();
            if left.len() == before {
                return Ok(void);
            }
            (void, left)
        };
        self.numbers.lock().retain(|_, kept| left.iter().any(|(id, _)| id == kept));
        self.store.put_invites(&left)?;
        Ok(void)
    }

    /// Admits a waiting peer the next time it asks. `peer`: its PeerId, or a part that matches only one waiting peer.
    ///
    /// # Errors
    /// No waiting peer matches, or several do.
    pub(crate) fn approve(&self, peer: &str) -> Result<(), AdmissionError> {
        if let Ok(peer_id) = peer.parse::<PeerId>() {
            self.book().approve(NodeId(transport::node_id(&peer_id)));
            return Ok(());
        }
        let waiting: Vec<(NodeId, String)> = {
            let strangers = self.strangers.lock();
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
    pub(crate) fn waiting(&self) -> Vec<String> {
        let strangers = self.strangers.lock();
        self.book().waiting().filter_map(|n| Some(strangers.get(&n)?.to_string())).collect()
    }

    /// Answers a join request. An admitted peer gets its certificate, the mesh key and the known members.
    pub(crate) fn answer(&self, request: JoinRequest, members: Vec<u8>) {
        let claim = match request.ticket {
            None => Claim::Nothing,
            Some(id) => match self.numbers.lock().get(&id) {
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
                        JoinRejection::NotApproved => format!("; to admit it: meshnode approve {peer}"),
                        JoinRejection::Unknown
                        | JoinRejection::Expired
                        | JoinRejection::UsedUp
                        | JoinRejection::OtherMesh
                        | JoinRejection::NotAMember
                        | JoinRejection::Busy
                        | JoinRejection::Banned => String::new(),
                    };
                    tracing::info!("rejected a join request of {peer} ({name}) at {addr}: {refusal}{advice}{more}");
                }
                request.reject(refusal);
            }
        }
    }

    fn decide(&self, peer: PeerId, from: IpAddr, claim: Claim) -> Result<Chain, JoinRejection> {
        let node = NodeId(transport::node_id(&peer));
        let local = self.open && is_local(from);
        let (verdict, invites) = {
            let mut book = self.book();
            (book.decide(node, claim, local, crate::clock::unix_seconds()), book.invites())
        };
        let admitted: Admitted = verdict.map_err(|refusal| match refusal {
            Rejection::Unknown => JoinRejection::Unknown,
            Rejection::Expired => JoinRejection::Expired,
            Rejection::UsedUp => JoinRejection::UsedUp,
            Rejection::NotApproved => {
                self.remember_stranger(node, peer);
                JoinRejection::NotApproved
            }
        })?;
        // Save the use before granting it, so that a full disk cannot make tickets unlimited.
        self.store.put_invites(&invites).map_err(|e| {
            tracing::error!("cannot admit new members: {e}");
            JoinRejection::Busy
        })?;
        let expiry = crate::clock::unix_seconds() + MEMBERSHIP.as_secs();
        let roles = if admitted.may_invite() { Roles::INVITER } else { Roles::MEMBER };
        self.credentials().issue(&self.identity, peer, roles, expiry).map_err(|e| {
            tracing::error!("cannot admit new members: {e}");
            JoinRejection::Busy
        })
    }

    /// Remembers the PeerId of a waiting node. Any peer may ask, so the list of waiting nodes is bounded, and this map
    /// too.
    fn remember_stranger(&self, node: NodeId, peer: PeerId) {
        let waiting: Vec<NodeId> = self.book().waiting().collect();
        let mut strangers = self.strangers.lock();
        strangers.insert(node, peer);
        strangers.retain(|stranger, _| waiting.contains(stranger));
    }

    fn book(&self) -> parking_lot::MutexGuard<'_, InviteBook> {
        self.book.lock()
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
pub(crate) fn load(data_dir: &Path) -> Result<Option<MeshCredentials>, AdmissionError> {
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
pub(crate) fn save(data_dir: &Path, credentials: &MeshCredentials) -> Result<(), AdmissionError> {
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
pub(crate) fn found(identity: &Identity) -> MeshCredentials {
    MeshCredentials::found(identity, crate::clock::unix_seconds() + MEMBERSHIP.as_secs())
}

/// Checks that a ticket is for the mesh that the data directory belongs to.
///
/// # Errors
/// It is for another mesh.
pub(crate) fn same_mesh(held: &MeshCredentials, ticket: MeshId, data_dir: &Path) -> Result<(), AdmissionError> {
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
            assert_eq!(decide(far), Err(JoinRejection::NotApproved), "{far}");
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
        let claim = Claim::Secret(guests.numbers.lock()[&ticket.id()]);
        let ask = |guests: &Admission| {
            guests.decide(Identity::generate().peer_id(), "127.0.0.1".parse().unwrap(), claim).map(drop)
        };
        assert_eq!(ask(&guests), Ok(()));
        let void = guests.void_invites(crate::clock::unix_seconds()).unwrap();
        assert_eq!(void.iter().map(|invite| invite.uses_left).collect::<Vec<_>>(), [2]);
        assert_eq!(ask(&guests), Err(JoinRejection::Unknown));
        drop(guests);
        let again = Admission::new(me.clone(), found(&me), Arc::new(Store::open(dir.path()).unwrap()), vec![], false);
        assert_eq!(ask(&again), Err(JoinRejection::Unknown));
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
        assert!(guests.numbers.lock().contains_key(&ticket.id()));
        drop(guests);
        let as_json = serde_json::to_string(&ticket.secret).unwrap().into_bytes();
        for entry in std::fs::read_dir(dir.path().join("store")).unwrap().map(|entry| entry.unwrap().path()) {
            let bytes = if entry.is_file() { std::fs::read(&entry).unwrap() } else { continue };
            for secret in [ticket.secret.as_slice(), &as_json] {
                assert!(!bytes.windows(secret.len()).any(|part| part == secret), "{}", entry.display());
            }
        }
        let guests = open();
        let number = guests.numbers.lock()[&ticket.id()];
        assert_eq!(secret_of(&guests.secret_key, &number), ticket.secret);
        assert!(guests.book().invites().iter().any(|(issued, _)| *issued == number));
    }

    const FAR: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 9));

    fn peer() -> PeerId {
        Identity::generate().peer_id()
    }

    /// A ticket of this node, and the claim of a joiner that knows its secret.
    fn ticket(guests: &Admission, uses: u32) -> (Ticket, Claim) {
        let ticket: Ticket = guests.invite(Duration::from_secs(600), uses).unwrap().parse().unwrap();
        let claim = Claim::Secret(guests.numbers.lock()[&ticket.id()]);
        (ticket, claim)
    }

    #[test]
    fn a_ticket_admits_as_often_as_it_says_also_after_a_restart() {
        let (dir, me, guests) = guests(false);
        let (_, claim) = ticket(&guests, 3);
        assert!(guests.decide(peer(), FAR, claim).is_ok() && guests.decide(peer(), FAR, claim).is_ok());
        drop(guests);
        let again = Admission::new(me.clone(), found(&me), Arc::new(Store::open(dir.path()).unwrap()), vec![], false);
        assert!(again.decide(peer(), FAR, claim).is_ok(), "one use is left");
        assert_eq!(again.decide(peer(), FAR, claim), Err(JoinRejection::UsedUp));
    }

    #[test]
    fn an_invited_member_gets_a_valid_certificate_with_the_right_to_invite() {
        let (_dir, _, guests) = guests(false);
        let (_, claim) = ticket(&guests, 1);
        let (guest, now) = (peer(), crate::clock::unix_seconds());
        let chain = guests.decide(guest, FAR, claim).unwrap();
        assert_eq!(chain.verify(guests.credentials().mesh, guest, now).unwrap(), Roles::INVITER);
        assert!(chain.verify(guests.credentials().mesh, peer(), now).is_err(), "it is for that peer only");
        assert!((now + 1..=now + MEMBERSHIP.as_secs() + 60).contains(&chain.expiry()));
    }

    #[test]
    fn an_unknown_ticket_is_not_the_same_as_none() {
        let (_dir, _, guests) = guests(false);
        assert_eq!(guests.decide(peer(), FAR, Claim::UnknownSecret), Err(JoinRejection::Unknown));
        assert_eq!(guests.decide(peer(), FAR, Claim::Secret([9; 16])), Err(JoinRejection::Unknown));
        assert!(guests.waiting().is_empty(), "a wrong ticket is no request for approval");
        assert_eq!(guests.decide(peer(), FAR, Claim::Nothing), Err(JoinRejection::NotApproved));
        assert_eq!(guests.waiting().len(), 1);
    }

    #[test]
    fn a_waiting_peer_is_approved_by_a_part_of_its_id_once() {
        let (_dir, _, guests) = guests(false);
        let (first, second) = (peer(), peer());
        for waiting in [first, second] {
            assert_eq!(guests.decide(waiting, FAR, Claim::Nothing), Err(JoinRejection::NotApproved));
        }
        let name = first.to_string();
        guests.approve(&name[name.len() - 12..]).unwrap();
        assert_eq!(guests.waiting(), [second.to_string()]);
        assert!(guests.decide(first, FAR, Claim::Nothing).is_ok());
        assert_eq!(guests.decide(first, FAR, Claim::Nothing), Err(JoinRejection::NotApproved), "for one admission");
    }

    #[test]
    fn an_ambiguous_or_unknown_part_of_an_id_approves_no_peer() {
        let (_dir, _, guests) = guests(false);
        let error = |part: &str| guests.approve(part).unwrap_err().to_string();
        assert!(error("12D3").ends_with("waiting: none"), "{}", error("12D3"));
        let waiting = [peer(), peer()];
        for peer in waiting {
            guests.decide(peer, FAR, Claim::Nothing).unwrap_err();
        }
        assert!(error("12D3").contains("matches 2 waiting peers"), "{}", error("12D3"));
        for none in ["", "no such peer"] {
            assert!(error(none).contains(&waiting[0].to_string()), "it names those that wait: {}", error(none));
        }
        assert_eq!(guests.waiting().len(), 2);
    }

    #[test]
    fn a_peer_can_be_approved_before_it_asks() {
        let (_dir, _, guests) = guests(false);
        let expected = peer();
        guests.approve(&expected.to_string()).unwrap();
        assert!(guests.decide(expected, FAR, Claim::Nothing).is_ok());
    }

    #[test]
    fn the_ids_of_waiting_peers_are_bounded() {
        let (_dir, _, guests) = guests(false);
        for _ in 0..2 * node_core::admission::WAITING_MAX {
            let _ = guests.decide(peer(), FAR, Claim::Nothing);
        }
        assert_eq!(guests.waiting().len(), node_core::admission::WAITING_MAX);
        assert_eq!(guests.strangers.lock().len(), node_core::admission::WAITING_MAX);
    }

    #[test]
    fn a_member_of_an_open_mesh_does_not_invite() {
        let (dir, founder, member) = (tempfile::tempdir().unwrap(), Identity::generate(), Identity::generate());
        let root = found(&founder);
        let chain = root.issue(&founder, member.peer_id(), Roles::MEMBER, u64::MAX).unwrap();
        let held = MeshCredentials { chain, root_secret: None, ..root };
        let store = Arc::new(Store::open(dir.path()).unwrap());
        let guests = Admission::new(member, held, store.clone(), vec![], false);
        assert!(!guests.may_invite());
        let error = guests.invite(Duration::from_secs(60), 1).unwrap_err();
        assert!(matches!(&error, AdmissionError::Refused(why) if why.contains("meshnode invite")), "{error}");
        assert!(store.invites().is_empty());
    }

    #[test]
    fn a_ticket_has_the_mesh_the_inviter_and_a_few_addresses() {
        let (dir, me) = (tempfile::tempdir().unwrap(), Identity::generate());
        let addrs: Vec<SocketAddr> = (1..=9).map(|port| ([10, 0, 0, 1], port).into()).collect();
        let store = Arc::new(Store::open(dir.path()).unwrap());
        let guests = Admission::new(me.clone(), found(&me), store, addrs.clone(), false);
        let (ticket, _) = ticket(&guests, 1);
        assert_eq!((ticket.mesh, ticket.inviter), (guests.credentials().mesh, me.peer_id()));
        assert_eq!(ticket.addrs, addrs[..TICKET_ADDRS_MAX]);
        assert!(!ticket.is_expired(crate::clock::unix_seconds() + 500));
        assert!(ticket.is_expired(crate::clock::unix_seconds() + 700));
        assert_ne!(self::ticket(&guests, 1).0.secret, ticket.secret, "each ticket has its own secret");
    }

    #[test]
    fn tickets_made_after_a_ban_stay_valid() {
        let (_dir, _, guests) = guests(false);
        let (_, claim) = ticket(&guests, 1);
        assert!(guests.void_invites(crate::clock::unix_seconds() - 3600).unwrap().is_empty());
        assert!(guests.decide(peer(), FAR, claim).is_ok());
        assert!(guests.void_invites(crate::clock::unix_seconds()).unwrap().is_empty(), "it is used up");
        assert!(guests.numbers.lock().is_empty(), "the number of a void ticket is forgotten");
    }

    #[test]
    fn credentials_survive_a_restart_and_a_damaged_file_is_not_replaced() {
        let (dir, me) = (tempfile::tempdir().unwrap(), Identity::generate());
        assert!(load(dir.path()).unwrap().is_none());
        let held = found(&me);
        save(dir.path(), &held).unwrap();
        let again = load(dir.path()).unwrap().expect("saved");
        assert!(again.encode() == held.encode());
        std::fs::write(path(dir.path()), b"noise").unwrap();
        let error = load(dir.path()).expect_err("damaged").to_string();
        assert!(error.contains("damaged") && error.contains("membership"), "{error}");
        assert_eq!(std::fs::read(path(dir.path())).unwrap(), b"noise");
    }

    #[test]
    fn a_data_directory_does_not_change_its_mesh_silently() {
        let (held, other) = (found(&Identity::generate()), found(&Identity::generate()));
        let place = Path::new("/data");
        assert!(same_mesh(&held, held.mesh, place).is_ok());
        let error = same_mesh(&held, other.mesh, place).unwrap_err().to_string();
        assert!(error.contains("/data/membership") && error.contains("--data-dir"), "{error}");
    }

    #[test]
    fn the_name_of_a_mesh_is_the_beginning_of_its_id() {
        let (_dir, _, guests) = guests(false);
        let name = guests.mesh_name();
        assert_eq!(u32::from_str_radix(&name, 16).map(u32::to_be_bytes).unwrap(), guests.credentials().mesh.0[..4]);
        assert_eq!(name.len(), 8);
    }
}
