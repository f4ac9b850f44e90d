//! Finding peers: a libp2p swarm on TCP P with mDNS, identify and ping. It finds, it proves nothing: whoever is found
//! still has to show a certificate on the data plane. The only user of libp2p's swarm.
use crate::identity::{Identity, NodeId, PeerId, node_id};
use crate::socket::BindError;
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
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::{sync::mpsc, task::JoinHandle, time};

pub use address::{AddressError, PeerAddress};

mod address;

/// Said in identify: only peers that say the same are told.
const PROTOCOL: &str = "/meshnode/1";
/// mDNS asks this often, so that a peer whose first answer was lost is found in seconds (stock: 5 minutes).
const MDNS_QUERY: Duration = Duration::from_secs(5);
/// mDNS records live this long without being repeated (stock: 6 minutes, during which a dead peer is still "found").
const MDNS_TTL: Duration = Duration::from_secs(60);
/// Peers that are still announced are told again this often, in case the first contact failed.
const REPEAT: Duration = Duration::from_secs(10);
/// After identify nothing more is said.
const IDLE: Duration = Duration::from_secs(10);
/// Peers remembered: strangers on the LAN can announce what they like.
const FOUND_MAX: usize = 1024;
/// Addresses told per peer.
const ADDRS_MAX: usize = 8;
/// Connections of strangers.
const CONNECTIONS_MAX: u32 = 256;

/// What discovery is made from.
pub struct DiscoveryOptions {
    /// The node's key.
    pub identity: Identity,
    /// TCP P.
    pub listen: SocketAddr,
    /// UDP P, told to peers.
    pub gossip_port: u16,
    /// UDP P + 1, told to peers.
    pub data_port: u16,
    /// Announce and listen on the LAN.
    pub mdns: bool,
}

/// What discovery tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiscoveryEvent {
    /// A meshnode, of whatever mesh. Told again from time to time while it is announced.
    PeerFound {
        /// Its key.
        peer_id: PeerId,
        /// Its short name.
        node: NodeId,
        /// Where its gossip may be reached.
        gossip: Vec<SocketAddr>,
        /// Where its data plane may be reached.
        data: Vec<SocketAddr>,
    },
    /// A meshnode of another protocol version.
    OtherVersion {
        /// Its key.
        peer_id: PeerId,
        /// What it speaks.
        found: String,
    },
    /// An address given by `dial` did not answer.
    Unreachable {
        /// The address.
        addr: String,
        /// Why.
        why: String,
    },
}

/// The running swarm. Dropping it stops discovery.
#[derive(Debug)]
pub struct Discovery {
    dial: mpsc::Sender<Multiaddr>,
    task: JoinHandle<()>,
    local_addr: SocketAddr,
}

impl Discovery {
    /// Listens on TCP P and starts looking around, on the tokio runtime that it is called on.
    ///
    /// # Errors
    /// The port is taken, or the address is not one of this machine.
    pub async fn spawn(
        options: DiscoveryOptions,
        told: impl Fn(DiscoveryEvent) + Send + Sync + 'static,
    ) -> Result<Self, BindError> {
        let listen = options.listen;
        let bind_error = |error: io::Error| BindError::new(listen, error);
        // libp2p shares ports between processes (SO_REUSEPORT); a second node must hear that this one is taken.
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
        let (dial, dials) = mpsc::channel(64);
        let finder = Finder { told: Arc::new(told), ips: BTreeMap::new(), found: BTreeMap::new(), asked: Vec::new() };
        let task = tokio::spawn(finder.run(swarm, dials));
        Ok(Self { dial, task, local_addr })
    }

    /// Looks at an address that a person gave; answered by an event.
    pub fn dial(&self, addr: &PeerAddress) {
        // Full only if 64 addresses are being dialed: a person gives them again.
        let _ = self.dial.try_send(addr.multiaddr());
    }

    /// TCP P as bound.
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
    let agent =
        format!("meshnode/{} gossip={} data={}", env!("CARGO_PKG_VERSION"), options.gossip_port, options.data_port);
    let mdns = options.mdns.then(|| {
        let config = mdns::Config { ttl: MDNS_TTL, query_interval: MDNS_QUERY, enable_ipv6: false };
        mdns::tokio::Behaviour::new(config, options.identity.peer_id())
            .inspect_err(|error| tracing::warn!(%error, "no mDNS: peers on the LAN will not be found by themselves"))
            .ok()
    });
    let limits = connection_limits::ConnectionLimits::default()
        .with_max_established(Some(CONNECTIONS_MAX))
        .with_max_pending_incoming(Some(64))
        .with_max_established_per_peer(Some(4));
    let swarm = SwarmBuilder::with_existing_identity(keypair)
        .with_tokio()
        .with_tcp(tcp::Config::default().nodelay(true), noise::Config::new, yamux::Config::default)
        .map_err(|e| e.to_string())?
        .with_behaviour(|key| Behaviour {
            limits: connection_limits::Behaviour::new(limits),
            identify: identify::Behaviour::new(
                identify::Config::new(PROTOCOL.into(), key.public()).with_agent_version(agent),
            ),
            ping: ping::Behaviour::default(),
            mdns: mdns.flatten().into(),
        })
        .map_err(|e| e.to_string())?
        .with_swarm_config(|config| config.with_idle_connection_timeout(IDLE))
        .build();
    Ok(swarm)
}

/// The task around the swarm.
struct Finder {
    told: Arc<dyn Fn(DiscoveryEvent) + Send + Sync>,
    /// Where each connection really goes.
    ips: BTreeMap<ConnectionId, IpAddr>,
    /// What was told, to be repeated.
    found: BTreeMap<PeerId, DiscoveryEvent>,
    /// Dials that a person asked for.
    asked: Vec<(ConnectionId, Multiaddr)>,
}

impl Finder {
    async fn run(mut self, mut swarm: Swarm<Behaviour>, mut dials: mpsc::Receiver<Multiaddr>) {
        let mut repeat = time::interval(REPEAT);
        loop {
            tokio::select! {
                event = swarm.select_next_some() => self.swarm_event(&mut swarm, event),
                Some(addr) = dials.recv() => self.dial(&mut swarm, addr),
                _ = repeat.tick() => self.found.values().for_each(|event| (self.told)(event.clone())),
            }
        }
    }

    fn dial(&mut self, swarm: &mut Swarm<Behaviour>, addr: Multiaddr) {
        let options = DialOpts::unknown_peer_id().address(addr.clone()).build();
        let id = options.connection_id();
        match swarm.dial(options) {
            Ok(()) => self.asked.push((id, addr)),
            Err(error) => (self.told)(DiscoveryEvent::Unreachable { addr: addr.to_string(), why: error.to_string() }),
        }
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "libp2p's event enums are non-exhaustive")]
    fn swarm_event(&mut self, swarm: &mut Swarm<Behaviour>, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::ConnectionEstablished { connection_id, endpoint, .. } => {
                if let Some(addr) = address::socket_addr(endpoint.get_remote_address()) {
                    self.ips.insert(connection_id, addr.ip());
                }
                self.asked.retain(|(id, _)| *id != connection_id);
            }
            SwarmEvent::ConnectionClosed { connection_id, .. } => {
                self.ips.remove(&connection_id);
            }
            SwarmEvent::OutgoingConnectionError { connection_id, error, .. } => {
                if let Some(at) = self.asked.iter().position(|(id, _)| *id == connection_id) {
                    let addr = self.asked.swap_remove(at).1.to_string();
                    (self.told)(DiscoveryEvent::Unreachable { addr, why: error.to_string() });
                }
            }
            SwarmEvent::Behaviour(BehaviourEvent::Identify(identify::Event::Received {
                connection_id,
                peer_id,
                info,
            })) => self.identified(connection_id, peer_id, &info),
            SwarmEvent::Behaviour(BehaviourEvent::Mdns(mdns::Event::Discovered(list))) => {
                for (peer, addr) in list {
                    // A dial that runs, or a connection that stands, will identify the peer.
                    let options = DialOpts::peer_id(peer)
                        .condition(PeerCondition::DisconnectedAndNotDialing)
                        .addresses(vec![addr])
                        .build();
                    let _ = swarm.dial(options);
                }
            }
            SwarmEvent::Behaviour(BehaviourEvent::Mdns(mdns::Event::Expired(list))) => {
                for (peer, _) in list {
                    self.found.remove(&peer);
                }
            }
            _ => {}
        }
    }

    fn identified(&mut self, connection: ConnectionId, peer_id: PeerId, info: &identify::Info) {
        if info.protocol_version != PROTOCOL {
            if info.protocol_version.starts_with("/meshnode/") {
                let found = printable(&info.protocol_version);
                (self.told)(DiscoveryEvent::OtherVersion { peer_id, found });
            }
            return;
        }
        let Some(remote) = self.ips.get(&connection).copied() else { return };
        let Some((gossip_port, data_port)) = ports(&info.agent_version) else { return };
        let listed = info.listen_addrs.iter().filter_map(address::socket_addr).map(|addr| addr.ip());
        // Its loopback is ours only if it is on this machine.
        let listed = listed.filter(|ip| !ip.is_unspecified() && (!ip.is_loopback() || remote.is_loopback()));
        let mut ips = vec![remote];
        for ip in listed {
            if !ips.contains(&ip) && ips.len() < ADDRS_MAX {
                ips.push(ip);
            }
        }
        let at = |port| ips.iter().map(|ip| SocketAddr::new(*ip, port)).collect::<Vec<_>>();
        let (gossip, data) = (at(gossip_port), at(data_port));
        let event = DiscoveryEvent::PeerFound { peer_id, node: node_id(&peer_id), gossip, data };
        if self.found.len() < FOUND_MAX || self.found.contains_key(&peer_id) {
            self.found.insert(peer_id, event.clone());
        }
        (self.told)(event);
    }
}

/// `gossip=` and `data=` of an agent string.
fn ports(agent: &str) -> Option<(u16, u16)> {
    let port = |key: &str| agent.split(' ').find_map(|word| word.strip_prefix(key))?.parse().ok();
    Some((port("gossip=")?, port("data=")?))
}

fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

fn multiaddr(addr: SocketAddr) -> Multiaddr {
    Multiaddr::from(addr.ip()).with(libp2p::multiaddr::Protocol::Tcp(addr.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn node(mdns: bool) -> (Discovery, Identity, mpsc::UnboundedReceiver<DiscoveryEvent>) {
        let identity = Identity::generate();
        let (tell, told) = mpsc::unbounded_channel();
        let listen = "127.0.0.1:0".parse().unwrap();
        let options = DiscoveryOptions { identity: identity.clone(), listen, gossip_port: 1111, data_port: 2222, mdns };
        let discovery = Discovery::spawn(options, move |event| drop(tell.send(event))).await.unwrap();
        (discovery, identity, told)
    }

    #[tokio::test]
    async fn a_dialed_address_tells_who_is_there_on_both_sides() {
        let (a, a_identity, mut a_told) = node(false).await;
        let (b, b_identity, mut b_told) = node(false).await;
        a.dial(&PeerAddress::parse(&b.local_addr().to_string()).unwrap());
        for (told, identity) in [(&mut a_told, &b_identity), (&mut b_told, &a_identity)] {
            match told.recv().await.unwrap() {
                DiscoveryEvent::PeerFound { peer_id, node, gossip, data } => {
                    assert_eq!((peer_id, node), (identity.peer_id(), identity.node_id()));
                    assert!(gossip.contains(&"127.0.0.1:1111".parse().unwrap()), "{gossip:?}");
                    assert!(data.contains(&"127.0.0.1:2222".parse().unwrap()), "{data:?}");
                }
                other @ (DiscoveryEvent::OtherVersion { .. } | DiscoveryEvent::Unreachable { .. }) => {
                    panic!("{other:?}")
                }
            }
        }
    }

    #[tokio::test]
    async fn nobody_there_is_told() {
        let (a, _, mut told) = node(false).await;
        let (b, _, _) = node(false).await;
        let nobody = b.local_addr();
        drop(b);
        time::sleep(Duration::from_millis(50)).await;
        a.dial(&PeerAddress::parse(&nobody.to_string()).unwrap());
        assert!(matches!(told.recv().await.unwrap(), DiscoveryEvent::Unreachable { .. }));
    }

    #[tokio::test]
    async fn a_taken_port_is_named_with_the_flag() {
        let (a, identity, _told) = node(false).await;
        let options = DiscoveryOptions { identity, listen: a.local_addr(), gossip_port: 1, data_port: 2, mdns: false };
        let error = Discovery::spawn(options, |_| {}).await.unwrap_err().to_string();
        assert!(error.contains("--port"), "{error}");
    }

    #[test]
    fn agents_tell_ports() {
        assert_eq!(ports("meshnode/0.1.0 gossip=4470 data=4471"), Some((4470, 4471)));
        assert_eq!(ports("meshnode/0.1.0 gossip=70000 data=1"), None);
        assert_eq!(ports("go-ipfs/1"), None);
    }
}
