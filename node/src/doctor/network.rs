//! Checks of ports, multicast and socket buffers.
use super::{Finding, Verdict};
use crate::client::{Client, Key};
use crate::config::UpOptions;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, UdpSocket};
use std::time::Duration;

/// The mDNS multicast group, used to discover peers on the local network.
const MDNS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 251);
/// Recommended socket buffers of the data plane: 20 ms at 3 Gbit/s.
const BUFFER_BYTES: u64 = 8 << 20;

pub(super) fn examine(options: &UpOptions, api: SocketAddr) -> Vec<Finding> {
    // Ports in use by a running node are not a problem.
    let running = Client::new(Some(&api.to_string()), Key::in_files(Vec::new())).listens();
    let mut findings = vec![api_port(api, running)];
    let on = |port| SocketAddr::new(options.listen, port);
    if options.port != 0 {
        if options.mdns {
            findings.push(port("discovery port", "TCP", on(options.port), running, |a| TcpListener::bind(a).map(drop)));
        }
        findings.push(port("gossip port", "UDP", on(options.port), running, |a| UdpSocket::bind(a).map(drop)));
        let data = on(options.port.saturating_add(1));
        findings.push(port("data port", "UDP", data, running, |a| UdpSocket::bind(a).map(drop)));
    }
    findings.push(multicast(options.mdns));
    findings.push(buffers());
    findings
}

fn api_port(api: SocketAddr, running: bool) -> Finding {
    if running {
        return Finding::ok("API", format!("a node is running on http://{api}"));
    }
    match TcpListener::bind(api) {
        Ok(_) => Finding::ok("API", format!("{api} is free")),
        Err(error) => Finding::fail(
            "API",
            format!("{api}: {error}"),
            "stop the program that listens there, or choose another address with --api",
        ),
    }
}

fn port(
    subject: &str,
    protocol: &str,
    address: SocketAddr,
    running: bool,
    bind: impl Fn(SocketAddr) -> io::Result<()>,
) -> Finding {
    match bind(address) {
        Ok(()) => Finding::ok(subject, format!("{protocol} {address} is free; allow it in your firewall")),
        Err(error) if running && error.kind() == io::ErrorKind::AddrInUse => {
            Finding::ok(subject, format!("{protocol} {address} is in use by the running node"))
        }
        Err(error) => {
            let advice = "stop the program that uses it, or choose another P with --port (TCP P, UDP P and UDP P+1 must be free)";
            Finding::fail(subject, format!("{protocol} {address}: {error}"), advice)
        }
    }
}

/// Sends one packet to a multicast group and checks that it arrives.
fn multicast(required: bool) -> Finding {
    let received = || -> io::Result<bool> {
        let socket = UdpSocket::bind(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0))?;
        socket.join_multicast_v4(&MDNS, &Ipv4Addr::UNSPECIFIED)?;
        socket.set_multicast_loop_v4(true)?;
        socket.set_read_timeout(Some(Duration::from_millis(500)))?;
        // Sent to our own port, not to mDNS's, so that no other program receives it.
        let port = socket.local_addr()?.port();
        socket.send_to(b"meshnode doctor", SocketAddrV4::new(MDNS, port))?;
        let mut buffer = [0; 64];
        Ok(socket.recv_from(&mut buffer).is_ok_and(|(n, _)| &buffer[..n] == b"meshnode doctor"))
    };
    let advice =
        "peers on the local network cannot be discovered automatically: join with a ticket, which needs no multicast";
    let finding = match received() {
        Ok(true) => {
            Finding::ok("multicast", "works on this machine; only a peer can show whether the network forwards it")
        }
        Ok(false) => Finding::warn("multicast", "a packet sent to 224.0.0.251 was not received", advice),
        Err(error) => Finding::warn("multicast", error.to_string(), advice),
    };
    match (required, finding.verdict) {
        (false, Verdict::Warn) => Finding::ok("multicast", format!("{}; not used (--no-mdns)", finding.seen)),
        (true, _) | (false, Verdict::Ok | Verdict::Fail) => finding,
    }
}

fn buffers() -> Finding {
    let limit = |name: &str| -> Option<u64> {
        std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?.trim().parse().ok()
    };
    match (limit("rmem_max"), limit("wmem_max")) {
        (Some(receive), Some(send)) if receive.min(send) >= BUFFER_BYTES => {
            Finding::ok("socket buffers", format!("limit of {} KiB", receive.min(send) >> 10))
        }
        (Some(receive), Some(send)) => {
            let advice =
                format!("for full speed: sysctl -w net.core.rmem_max={BUFFER_BYTES} net.core.wmem_max={BUFFER_BYTES}");
            Finding::warn("socket buffers", format!("limit of only {} KiB", receive.min(send) >> 10), advice)
        }
        (None, _) | (_, None) => Finding::ok("socket buffers", "this system does not report its limits"),
    }
}
