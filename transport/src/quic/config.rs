//! QUIC transport parameters for the kind of path: reference values, since quinn's defaults are tuned for 100 Mbit/s x
//! 100 ms and leave connection memory unbounded.
use super::tls;
use crate::identity::Identity;
use crate::version;
use quinn::{
    AckFrequencyConfig, ClientConfig, EndpointConfig, IdleTimeout, MtuDiscoveryConfig, ServerConfig, TransportConfig,
    VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

/// libp2p's placeholder server name: certificates are checked by key, not by name.
pub(super) const SERVER_NAME: &str = "l";
/// Maximum long-lived frame streams of all jobs between two nodes: 64 jobs x a few edges and epochs.
pub(super) const UNI_STREAMS: u32 = 1024;
/// Maximum concurrent requests and measurements.
pub(super) const BI_STREAMS: u32 = 64;
/// Unread bytes of one stream: a large prefill chunk.
const STREAM_WINDOW: u32 = 16 << 20;
/// Unread bytes of one connection.
pub(super) const CONNECTION_WINDOW: u32 = 64 << 20;
/// The same before the certificate check: one greeting.
const STRANGER_WINDOW: u32 = 64 << 10;
/// Unacknowledged bytes of one connection.
const SEND_WINDOW: u64 = 64 << 20;
/// Initial congestion window: a prefill chunk should not wait for slow start on a LAN.
const INITIAL_CWND: u64 = 256 << 10;
/// A dead path is detected within this time; leases of running jobs detect it in 300 ms.
const IDLE: Duration = Duration::from_secs(5);
const KEEP_ALIVE: Duration = Duration::from_secs(1);
/// Largest datagram accepted. The size of sent datagrams follows from probing the path.
const UDP_PAYLOAD_MAX: u16 = 65_527 - 55;

/// TLS settings of an endpoint, created once.
pub(super) struct Configs {
    client_tls: Arc<QuicClientConfig>,
    server_tls: Arc<QuicServerConfig>,
}

impl Configs {
    pub(super) fn new(identity: &Identity) -> Result<Self, String> {
        let (client, server) = tls::configs(identity, &version::offered())?;
        let client_tls = Arc::new(QuicClientConfig::try_from(client).map_err(|e| e.to_string())?);
        let server_tls = Arc::new(QuicServerConfig::try_from(server).map_err(|e| e.to_string())?);
        Ok(Self { client_tls, server_tls })
    }

    pub(super) fn client(&self, peer: SocketAddr) -> ClientConfig {
        let mut config = ClientConfig::new(self.client_tls.clone());
        config.transport_config(Arc::new(transport(Path::of(peer.ip()))));
        config
    }

    pub(super) fn server(&self, peer: Option<SocketAddr>) -> ServerConfig {
        let mut config = ServerConfig::with_crypto(self.server_tls.clone());
        config.transport_config(Arc::new(transport(peer.map_or(Path::Wide, |p| Path::of(p.ip())))));
        config
    }
}

pub(super) fn endpoint() -> EndpointConfig {
    let mut config = EndpointConfig::default();
    // The value is within the setter's bounds by construction, so it cannot fail.
    let _ = config.max_udp_payload_size(UDP_PAYLOAD_MAX);
    config
}

/// Kind of path to a peer, derived from its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// The same machine.
    Loopback,
    /// Private addresses: a LAN, a VPN.
    Local,
    /// Anything else.
    Wide,
}

impl Path {
    fn of(ip: IpAddr) -> Self {
        let ip = ip.to_canonical();
        let local = match ip {
            IpAddr::V4(ip) => ip.is_private() || ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unique_local() || ip.is_unicast_link_local(),
        };
        match (ip.is_loopback(), local) {
            (true, _) => Path::Loopback,
            (false, true) => Path::Local,
            (false, false) => Path::Wide,
        }
    }

    /// Largest datagram worth probing for: quinn sends at most 10 per system call, so larger ones mean fewer calls.
    fn mtu_max(self) -> u16 {
        match self {
            // Ten segments must stay below the 64 KiB limit of one segmented send.
            Path::Loopback => 6_400,
            // Jumbo frames carry up to 8,952 bytes, but the same limit applies.
            Path::Local => 6_400,
            Path::Wide => 1_452,
        }
    }

    /// Assumed until the first sample; with quinn's 333 ms the first loss timer would be 1 s.
    fn initial_rtt(self) -> Duration {
        match self {
            Path::Loopback => Duration::from_millis(5),
            Path::Local => Duration::from_millis(20),
            Path::Wide => Duration::from_millis(200),
        }
    }
}

fn transport(path: Path) -> TransportConfig {
    let mut mtu = MtuDiscoveryConfig::default();
    mtu.upper_bound(path.mtu_max());
    let mut cubic = quinn::congestion::CubicConfig::default();
    cubic.initial_window(INITIAL_CWND);
    let mut ack = AckFrequencyConfig::default();
    ack.ack_eliciting_threshold(VarInt::from_u32(10)).max_ack_delay(Some(Duration::from_millis(5)));
    let mut config = TransportConfig::default();
    config
        // An unauthenticated peer may open one stream, for its greeting; members get more once their certificate is
        // checked.
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .receive_window(VarInt::from_u32(STRANGER_WINDOW))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
        .send_window(SEND_WINDOW)
        .initial_rtt(path.initial_rtt())
        .mtu_discovery_config(Some(mtu))
        .congestion_controller_factory(Arc::new(cubic))
        .keep_alive_interval(Some(KEEP_ALIVE))
        .datagram_receive_buffer_size(None)
        .max_idle_timeout(IdleTimeout::try_from(IDLE).ok());
    if path != Path::Wide {
        config.ack_frequency_config(Some(ack));
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_path_follows_from_the_address() {
        let path = |ip: &str| Path::of(ip.parse().unwrap());
        assert_eq!(path("127.0.0.1"), Path::Loopback);
        assert_eq!(path("::ffff:127.0.0.1"), Path::Loopback);
        assert_eq!(path("192.168.1.2"), Path::Local);
        assert_eq!(path("fd00::1"), Path::Local);
        assert_eq!(path("8.8.8.8"), Path::Wide);
    }
}
