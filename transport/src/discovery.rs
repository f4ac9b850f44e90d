//! Peer discovery: a libp2p swarm on TCP port P with mDNS, identify and ping. Discovery authenticates nothing: a
//! discovered peer still has to present a certificate on the data plane. The only user of libp2p's swarm.
//!
//! Data of unauthenticated peers is not trusted. Of the identify message only the two ports are used, at the observed
//! address of the connection, and only from peers that present this mesh's hint.
use crate::certificate::MeshId;
use crate::identity::{Identity, NodeId, PeerId, node_id};
use crate::socket::BindError;
use crate::version::{Mismatch, PROTOCOL_NAME};
use crate::wire::printable;
use futures::StreamExt;
use libp2p::{
    Multiaddr, Swarm, SwarmBuilder, connection_limits, identify, mdns, noise, ping,
    swarm::{
        ConnectionId, NetworkBehaviour, SwarmEvent,
        behaviour::toggle::Toggle,
        dial_opts::{DialOpts, PeerCondition},
    },
    tcp, yamux,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::{task::JoinHandle, time};

pub use address::{AddressError, PeerAddress};

mod address;

/// mDNS query interval: a peer whose first answer was lost is found within seconds (default: 5 minutes).
const MDNS_QUERY: Duration = Duration::from_secs(5);
/// Lifetime of an mDNS record without renewal (default: 6 minutes, during which a dead peer is still "found").
const MDNS_TTL: Duration = Duration::from_secs(60);
/// Interval at which connected or announced peers are reported again, in case the first contact failed.
const REPEAT: Duration = Duration::from_secs(10);
/// Idle timeout of a connection: it is not needed after identify.
const IDLE: Duration = Duration::from_secs(10);
/// Maximum peers remembered: members of a large mesh on one LAN.
const FOUND_MAX: usize = 1024;
/// Maximum announcements remembered, a few addresses per peer. Any host on the LAN can announce anything.
const ANNOUNCED_MAX: usize = 4096;
/// Maximum connections with unauthenticated peers.
const CONNECTIONS_MAX: u32 = 256;
/// Maximum concurrent dials to announced addresses.
const DIALS_MAX: u32 = 64;
/// Hex digits of the hint in the agent string: few peers of other meshes match by chance.
const HINT_DIGITS: usize = 16;

/// Settings of [`Discovery`].
pub struct DiscoveryOptions {
    /// The node's key.
    pub identity: Identity,
    /// Only members of this mesh are reported.
    pub mesh: MeshId,
    /// TCP P, where discovery listens.
    pub listen: SocketAddr,
    /// UDP P, announced to peers.
    pub gossip_port: u16,
    /// UDP P + 1, announced to peers.
    pub data_port: u16,
    /// Whether to announce and listen on the LAN.
    pub mdns: bool,
}

/// Events that discovery reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiscoveryEvent {
    /// A meshnode peer with this mesh's hint. Reported again at intervals while it is connected or announced.
    PeerFound {
        /// Its public key.
        peer_id: PeerId,
        /// Its short name.
        node: NodeId,
        /// Address of its gossip socket.
        gossip: SocketAddr,
        /// Address of its data plane.
        data: SocketAddr,
    },
    /// A meshnode of another protocol version.
    OtherVersion {
        /// Its public key.
        peer_id: PeerId,
        /// The version it speaks, and which side to update.
        what: String,
    },
}

/// The running swarm. Dropping it stops discovery.
#[derive(Debug)]
pub struct Discovery {
    task: JoinHandle<()>,
    local_addr: SocketAddr,
}

impl Discovery {
    /// Listens on TCP P and starts discovery on the current tokio runtime. `sink` is called on a network task.
    ///
    /// # Errors
    /// The port is taken, or the address is not one of this machine.
    pub async fn spawn(
        options: DiscoveryOptions,
        sink: impl Fn(DiscoveryEvent) + Send + Sync + 'static,
    ) -> Result<Self, BindError> {
        let listen = options.listen;
        let bind_error = |error: io::Error| BindError::new(listen, error);
        // libp2p shares ports between processes (SO_REUSEPORT); a second node must get an error for a port in use.
        drop(std::net::TcpListener::bind(listen).map_err(bind_error)?);
        let mut swarm = build(&options).map_err(|e| bind_error(io::Error::other(e)))?;
        swarm.listen_on(multiaddr(listen)).map_err(|error| bind_error(io::Error::other(error.to_string())))?;
        let local_addr = loop {
            match swarm.next().await {
                Some(SwarmEvent::NewListenAddr { address, .. }) => {
                    if let Some(port) = address::socket_addr(&address).map(|a| a.port()) {
                        break SocketAddr::new(listen.ip(), port);
                    }
                }
                Some(SwarmEvent::ListenerClosed { reason: Err(error), .. }) => return Err(bind_error(error)),
                Some(_) => {}
                None => return Err(bind_error(io::Error::other("the swarm ended"))),
            }
        };
        let finder = Finder {
            mesh: options.mesh,
            sink: Arc::new(sink),
            ips: BTreeMap::new(),
            announced: BTreeSet::new(),
            found: BTreeMap::new(),
        };
        let task = tokio::spawn(finder.run(swarm));
        Ok(Self { task, local_addr })
    }

    /// The discovery task, for health checks.
    pub fn task(&self) -> tokio::task::AbortHandle {
        self.task.abort_handle()
    }

    /// TCP P, as bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }
}

impl Drop for Discovery {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(NetworkBehaviour)]
struct Behaviour {
    limits: connection_limits::Behaviour,
    identify: identify::Behaviour,
    ping: ping::Behaviour,
    mdns: Toggle<mdns::tokio::Behaviour>,
}

fn build(options: &DiscoveryOptions) -> Result<Swarm<Behaviour>, String> {
    let keypair = options.identity.keypair().clone();
    let agent = format!(
        "meshnode/{} gossip={} data={} mesh={}",
        env!("CARGO_PKG_VERSION"),
        options.gossip_port,
        options.data_port,
        hint(options.mesh, &options.identity.peer_id())
    );
    let mdns = options.mdns.then(|| {
        let config = mdns::Config { ttl: MDNS_TTL, query_interval: MDNS_QUERY, enable_ipv6: false };
        mdns::tokio::Behaviour::new(config, options.identity.peer_id())
            .inspect_err(|error| tracing::warn!(%error, "no LAN discovery (mDNS): join with a ticket or an address"))
            .ok()
    });
    let limits = connection_limits::ConnectionLimits::default()
        .with_max_established(Some(CONNECTIONS_MAX))
        .with_max_pending_incoming(Some(64))
        .with_max_pending_outgoing(Some(DIALS_MAX))
        .with_max_established_per_peer(Some(4));
    let swarm = SwarmBuilder::with_existing_identity(keypair)
        .with_tokio()
        .with_tcp(tcp::Config::default().nodelay(true), noise::Config::new, yamux::Config::default)
        .map_err(|e| e.to_string())?
        .with_behaviour(|key| Behaviour {
            limits: connection_limits::Behaviour::new(limits),
            identify: identify::Behaviour::new(
                identify::Config::new(protocol(), key.public()).with_agent_version(agent),
            ),
            ping: ping::Behaviour::default(),
            mdns: mdns.flatten().into(),
        })
        .map_err(|e| e.to_string())?
        .with_swarm_config(|config| config.with_idle_connection_timeout(IDLE))
        .build();
    Ok(swarm)
}

/// The task that drives the swarm.
struct Finder {
    mesh: MeshId,
    sink: Arc<dyn Fn(DiscoveryEvent) + Send + Sync>,
    /// Observed remote address of each connection.
    ips: BTreeMap<ConnectionId, IpAddr>,
    /// Current mDNS announcements.
    announced: BTreeSet<(PeerId, Multiaddr)>,
    /// Reported peers, to be reported again while they are connected or announced.
    found: BTreeMap<PeerId, FoundPeer>,
}

struct FoundPeer {
    event: DiscoveryEvent,
    connections: BTreeSet<ConnectionId>,
}

impl Finder {
    async fn run(mut self, mut swarm: Swarm<Behaviour>) {
        let mut repeat = time::interval(REPEAT);
        loop {
            tokio::select! {
                event = swarm.select_next_some() => self.swarm_event(&mut swarm, event),
                _ = repeat.tick() => self.found.values().for_each(|found| (self.sink)(found.event.clone())),
            }
        }
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "libp2p's event enums are non-exhaustive")]
    fn swarm_event(&mut self, swarm: &mut Swarm<Behaviour>, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::ConnectionEstablished { connection_id, endpoint, .. } => {
                if let Some(addr) = address::socket_addr(endpoint.get_remote_address()) {
                    self.ips.insert(connection_id, addr.ip());
                }
            }
            SwarmEvent::ConnectionClosed { connection_id, peer_id, .. } => {
                self.ips.remove(&connection_id);
                if let Some(found) = self.found.get_mut(&peer_id) {
                    found.connections.remove(&connection_id);
                }
                self.forget_if_gone(&peer_id);
            }
            SwarmEvent::Behaviour(BehaviourEvent::Identify(identify::Event::Received {
                connection_id,
                peer_id,
                info,
            })) => self.identified(connection_id, peer_id, &info),
            SwarmEvent::Behaviour(BehaviourEvent::Mdns(mdns::Event::Discovered(list))) => {
                for (peer, addr) in list {
                    if self.announced.len() < ANNOUNCED_MAX {
                        self.announced.insert((peer, addr.clone()));
                    }
                    // A dial in progress, or an established connection, will identify the peer anyway.
                    let options = DialOpts::peer_id(peer)
                        .condition(PeerCondition::DisconnectedAndNotDialing)
                        .addresses(vec![addr])
                        .build();
                    let _ = swarm.dial(options);
                }
            }
            SwarmEvent::Behaviour(BehaviourEvent::Mdns(mdns::Event::Expired(list))) => {
                for announced in list {
                    self.announced.remove(&announced);
                    self.forget_if_gone(&announced.0);
                }
            }
            _ => {}
        }
    }

    fn identified(&mut self, connection: ConnectionId, peer_id: PeerId, info: &identify::Info) {
        if info.protocol_version != protocol() {
            if let Some(name) = info.protocol_version.strip_prefix('/').filter(|name| name.starts_with("meshnode/")) {
                let what = Mismatch::with(&printable(name, 64)).here;
                (self.sink)(DiscoveryEvent::OtherVersion { peer_id, what });
            }
            return;
        }
        let Some(remote) = self.ips.get(&connection).copied() else { return };
        let Some(agent) = Agent::read(&info.agent_version) else { return };
        if agent.hint != hint(self.mesh, &peer_id) {
            return;
        }
        let at = |port| SocketAddr::new(remote, port);
        let (gossip, data) = (at(agent.gossip_port), at(agent.data_port));
        let event = DiscoveryEvent::PeerFound { peer_id, node: node_id(&peer_id), gossip, data };
        if self.found.len() < FOUND_MAX || self.found.contains_key(&peer_id) {
            let connections = self.found.remove(&peer_id).map(|found| found.connections).unwrap_or_default();
            let connections = connections.into_iter().chain([connection]).collect();
            self.found.insert(peer_id, FoundPeer { event: event.clone(), connections });
        }
        (self.sink)(event);
    }

    /// A peer that is neither connected nor announced is not reported again.
    fn forget_if_gone(&mut self, peer_id: &PeerId) {
        let connected = self.found.get(peer_id).is_some_and(|found| !found.connections.is_empty());
        if !connected && !self.announced.iter().any(|(announced, _)| announced == peer_id) {
            self.found.remove(peer_id);
        }
    }
}

/// Protocol version in identify: only peers with the same one are reported.
fn protocol() -> String {
    format!("/{PROTOCOL_NAME}")
}

/// The fields of identify's agent string.
struct Agent<'a> {
    gossip_port: u16,
    data_port: u16,
    hint: &'a str,
}

impl<'a> Agent<'a> {
    fn read(agent: &'a str) -> Option<Self> {
        let word = |key: &str| agent.split(' ').find_map(|word| word.strip_prefix(key));
        Some(Self {
            gossip_port: word("gossip=")?.parse().ok()?,
            data_port: word("data=")?.parse().ok()?,
            hint: word("mesh=")?,
        })
    }
}

/// Identifies members of one mesh without disclosing the mesh: only a holder of the mesh id can compute or check it,
/// and each peer has its own.
fn hint(mesh: MeshId, peer_id: &PeerId) -> String {
    let key = blake3::derive_key("meshnode v1 discovery hint", &mesh.0);
    blake3::keyed_hash(&key, &peer_id.to_bytes()).to_hex()[..HINT_DIGITS].to_owned()
}

fn multiaddr(addr: SocketAddr) -> Multiaddr {
    Multiaddr::from(addr.ip()).with(libp2p::multiaddr::Protocol::Tcp(addr.port()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc;

    const OURS: MeshId = MeshId([7; 32]);

    type Events = mpsc::UnboundedReceiver<DiscoveryEvent>;

    fn options(mesh: MeshId, gossip_port: u16) -> DiscoveryOptions {
        let listen = "127.0.0.1:0".parse().unwrap();
        DiscoveryOptions { identity: Identity::generate(), mesh, listen, gossip_port, data_port: 2222, mdns: false }
    }

    async fn node() -> (Discovery, Events) {
        let (sender, events) = mpsc::unbounded_channel();
        let discovery = Discovery::spawn(options(OURS, 1), move |event| drop(sender.send(event))).await.unwrap();
        (discovery, events)
    }

    /// A swarm that dials the node and identifies itself with these options; the connection lives as long as the task.
    fn caller(options: &DiscoveryOptions, node: &Discovery) -> JoinHandle<()> {
        let mut swarm = build(options).unwrap();
        swarm.add_external_address("/ip4/198.51.100.1/tcp/1".parse().unwrap());
        swarm.dial(multiaddr(node.local_addr())).unwrap();
        tokio::spawn(async move {
            loop {
                swarm.select_next_some().await;
            }
        })
    }

    /// Reports within a period that includes a repetition.
    async fn reports(events: &mut Events) -> usize {
        let mut count = 0;
        let end = time::Instant::now() + REPEAT + Duration::from_secs(2);
        while let Ok(Some(_)) = time::timeout_at(end, events.recv()).await {
            count += 1;
        }
        count
    }

    #[tokio::test]
    async fn a_peer_is_reported_at_its_observed_address_only() {
        let (node, mut events) = node().await;
        let peer = options(OURS, 1111);
        let calling = caller(&peer, &node);
        let expected = DiscoveryEvent::PeerFound {
            peer_id: peer.identity.peer_id(),
            node: peer.identity.node_id(),
            // Not the address that the peer claims.
            gossip: "127.0.0.1:1111".parse().unwrap(),
            data: "127.0.0.1:2222".parse().unwrap(),
        };
        assert_eq!(events.recv().await.unwrap(), expected);
        calling.abort();
    }

    #[tokio::test]
    async fn a_peer_outside_the_mesh_is_not_reported() {
        let (node, mut events) = node().await;
        let stranger = caller(&options(MeshId([8; 32]), 1111), &node);
        assert_ne!(
            hint(OURS, &Identity::generate().peer_id()),
            hint(OURS, &Identity::generate().peer_id()),
            "hints differ between peers"
        );
        time::sleep(Duration::from_millis(500)).await;
        let member = options(OURS, 3333);
        let member_calls = caller(&member, &node);
        match events.recv().await.unwrap() {
            DiscoveryEvent::PeerFound { peer_id, .. } => assert_eq!(peer_id, member.identity.peer_id()),
            other @ DiscoveryEvent::OtherVersion { .. } => panic!("{other:?}"),
        }
        assert_eq!(events.try_recv().ok(), None);
        [stranger, member_calls].iter().for_each(JoinHandle::abort);
    }

    #[tokio::test]
    async fn a_peer_is_not_reported_again_after_its_connection_closes() {
        let (node, mut events) = node().await;
        let calling = caller(&options(OURS, 1111), &node);
        events.recv().await.unwrap();
        calling.abort();
        assert!(reports(&mut events).await <= 1, "reported again although the peer is gone");
    }

    #[tokio::test]
    async fn a_port_in_use_is_reported_with_the_flag() {
        let (a, _told) = node().await;
        let options = DiscoveryOptions { listen: a.local_addr(), ..options(OURS, 1) };
        let error = Discovery::spawn(options, |_| {}).await.unwrap_err().to_string();
        assert!(error.contains("--port"), "{error}");
    }

    #[tokio::test]
    async fn a_peer_of_another_version_is_reported() {
        let (node, mut events) = node().await;
        let mut swarm = SwarmBuilder::with_new_identity()
            .with_tokio()
            .with_tcp(tcp::Config::default(), noise::Config::new, yamux::Config::default)
            .unwrap()
            .with_behaviour(|key| identify::Behaviour::new(identify::Config::new("/meshnode/1".into(), key.public())))
            .unwrap()
            .build();
        let peer = *swarm.local_peer_id();
        swarm.dial(multiaddr(node.local_addr())).unwrap();
        let calling = tokio::spawn(async move {
            loop {
                swarm.select_next_some().await;
            }
        });
        let what = "speaks meshnode/1, this node meshnode/3: update meshnode there".to_owned();
        assert_eq!(events.recv().await.unwrap(), DiscoveryEvent::OtherVersion { peer_id: peer, what });
        calling.abort();
    }

    #[test]
    fn the_agent_string_carries_ports_and_mesh() {
        let read = |agent| Agent::read(agent).map(|agent| (agent.gossip_port, agent.data_port, agent.hint));
        assert_eq!(read("meshnode/0.1.0 gossip=4470 data=4471 mesh=ab"), Some((4470, 4471, "ab")));
        assert_eq!(read("meshnode/0.1.0 gossip=4470 data=4471"), None);
        assert_eq!(read("meshnode/0.1.0 gossip=70000 data=1 mesh=ab"), None);
        assert_eq!(read("go-ipfs/1"), None);
    }
}
