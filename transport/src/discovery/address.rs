//! User-supplied addresses: a multiaddr or HOST:PORT of a node's TCP P. The ports of its other planes follow from it.
use crate::identity::PeerId;
use libp2p::{Multiaddr, multiaddr::Protocol};
use std::net::{SocketAddr, ToSocketAddrs};
use thiserror::Error;

/// Where a node is reachable, derived from its one `--port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerAddress {
    /// TCP P.
    pub discovery: SocketAddr,
    /// The expected key, if the address names one.
    pub peer_id: Option<PeerId>,
}

impl PeerAddress {
    /// Parses `/ip4/…/tcp/P`, `/dns/…/tcp/P` (either with `/p2p/PEER`), or `HOST:P`. Resolves host names.
    ///
    /// # Errors
    /// The text has none of these forms, or the name does not resolve.
    #[allow(clippy::wildcard_enum_match_arm, reason = "multiaddr knows dozens of protocols")]
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        let text = text.trim();
        if !text.starts_with('/') {
            return Ok(Self { discovery: look_up(text, text)?, peer_id: None });
        }
        let multiaddr: Multiaddr = text.parse().map_err(|_| AddressError::Malformed { text: text.into() })?;
        let peer_id = multiaddr.iter().find_map(|part| match part {
            Protocol::P2p(peer) => Some(peer),
            _ => None,
        });
        let discovery = match socket_addr(&multiaddr) {
            Some(addr) => addr,
            None => look_up(text, &host_and_port(&multiaddr).ok_or(AddressError::Malformed { text: text.into() })?)?,
        };
        Ok(Self { discovery, peer_id })
    }

    /// UDP P.
    pub fn gossip(&self) -> SocketAddr {
        self.discovery
    }

    /// UDP P + 1.
    pub fn data(&self) -> SocketAddr {
        SocketAddr::new(self.discovery.ip(), self.discovery.port().wrapping_add(1))
    }
}

fn look_up(text: &str, host: &str) -> Result<SocketAddr, AddressError> {
    if !host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|p| p > 0)) {
        return Err(AddressError::Malformed { text: text.into() });
    }
    let unknown = || AddressError::UnknownHost { text: text.into() };
    host.to_socket_addrs().map_err(|_| unknown())?.next().ok_or_else(unknown)
}

/// `HOST:PORT` of a multiaddr that begins with a host name.
#[allow(clippy::wildcard_enum_match_arm, reason = "multiaddr knows dozens of protocols")]
fn host_and_port(addr: &Multiaddr) -> Option<String> {
    let mut parts = addr.iter();
    let host = match parts.next()? {
        Protocol::Dns(host) | Protocol::Dns4(host) | Protocol::Dns6(host) => host.into_owned(),
        _ => return None,
    };
    match parts.next()? {
        Protocol::Tcp(port) => Some(format!("{host}:{port}")),
        _ => None,
    }
}

/// IP and TCP port of a multiaddr that begins with them.
#[allow(clippy::wildcard_enum_match_arm, reason = "multiaddr knows dozens of protocols")]
pub(super) fn socket_addr(addr: &Multiaddr) -> Option<SocketAddr> {
    let mut parts = addr.iter();
    let ip = match parts.next()? {
        Protocol::Ip4(ip) => ip.into(),
        Protocol::Ip6(ip) => ip.into(),
        _ => return None,
    };
    match parts.next()? {
        Protocol::Tcp(port) => Some(SocketAddr::new(ip, port)),
        _ => None,
    }
}

/// Why a text is not an address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AddressError {
    /// The text has none of the supported forms.
    #[error("\"{text}\" is not an address; give /ip4/IP/tcp/PORT, /dns4/HOST/tcp/PORT, or a ticket (mesh1…)")]
    Malformed {
        /// The input.
        text: String,
    },
    /// The host name does not resolve.
    #[error("the host of \"{text}\" does not resolve; check the spelling, or give its IP address")]
    UnknownHost {
        /// The input.
        text: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_address_forms_parse() {
        let parse = |text: &str| PeerAddress::parse(text).unwrap();
        assert_eq!(parse("10.0.0.5:4470").data(), "10.0.0.5:4471".parse().unwrap());
        assert_eq!(parse("[::1]:4470").gossip(), "[::1]:4470".parse().unwrap());
        assert_eq!(parse("/ip4/10.0.0.5/tcp/4470\n").discovery, "10.0.0.5:4470".parse().unwrap());
        assert_eq!(parse("/dns4/localhost/tcp/4470").discovery.port(), 4470);
        let peer = crate::Identity::generate().peer_id();
        let full = parse(&format!("/ip6/::1/tcp/4470/p2p/{peer}"));
        assert_eq!((full.discovery, full.peer_id), ("[::1]:4470".parse().unwrap(), Some(peer)));
    }

    #[test]
    fn malformed_addresses_are_rejected() {
        for text in ["", "hello", "10.0.0.5", "10.0.0.5:0", "10.0.0.5:99999", "/ip4/10.0.0.5", "/ip4/10.0.0.5/udp/1"] {
            let error = PeerAddress::parse(text).unwrap_err();
            assert!(matches!(error, AddressError::Malformed { .. }), "{text}: {error}");
        }
    }
}
