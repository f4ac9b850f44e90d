//! UDP sockets with large kernel buffers, and bind errors that say what to do about a port in use.
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    io,
    net::{SocketAddr, UdpSocket},
};
use thiserror::Error;

/// Buffer size requested from the kernel: 8 MiB absorb a stall of 20 ms at 3 Gbit/s; the default 208 KiB hold under 100
/// packets.
const BUFFER_BYTES: usize = 8 << 20;

/// Kernel buffer sizes of a socket in bytes, as read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// Receive buffer.
    pub receive: usize,
    /// Send buffer.
    pub send: usize,
}

impl Buffers {
    /// The command to run if the kernel granted less than requested; `None` if it granted enough.
    pub fn advice(&self) -> Option<String> {
        let small = self.receive.min(self.send);
        (small < BUFFER_BYTES).then(|| {
            format!(
                "socket buffers are {} KiB, {} KiB were requested; for full speed run: sysctl -w net.core.rmem_max={BUFFER_BYTES} net.core.wmem_max={BUFFER_BYTES}",
                small >> 10,
                BUFFER_BYTES >> 10
            )
        })
    }
}

/// Binds a UDP socket and enlarges its buffers as far as the kernel allows.
pub(crate) fn bind_udp(addr: SocketAddr) -> Result<(UdpSocket, Buffers), BindError> {
    let domain = if addr.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    let open = || -> io::Result<(UdpSocket, Buffers)> {
        let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
        if addr.is_ipv6() {
            // One socket for both families where the system allows it.
            let _ = socket.set_only_v6(false);
        }
        socket.bind(&addr.into())?;
        // A rejected size is not an error: the kernel grants up to its limit, and the result is read back.
        let _ = socket.set_recv_buffer_size(BUFFER_BYTES);
        let _ = socket.set_send_buffer_size(BUFFER_BYTES);
        let buffers = Buffers { receive: socket.recv_buffer_size()?, send: socket.send_buffer_size()? };
        Ok((socket.into(), buffers))
    };
    open().map_err(|error| BindError::new(addr, error))
}

/// Why a port cannot be bound.
#[derive(Debug, Error)]
pub enum BindError {
    /// Another process uses the port.
    #[error("port {} is in use on {}: another meshnode may be running; choose another with --port (it and the next one must be free)", addr.port(), addr.ip())]
    PortInUse {
        /// The requested address.
        addr: SocketAddr,
    },
    /// The address is not one of this machine's.
    #[error("{} is not an address of this machine; choose one with --listen (0.0.0.0: all addresses)", addr.ip())]
    NoSuchAddress {
        /// The requested address.
        addr: SocketAddr,
    },
    /// A port below 1024 without the privilege for it.
    #[error("this user may not use port {}; choose one above 1023 with --port", addr.port())]
    Forbidden {
        /// The requested address.
        addr: SocketAddr,
    },
    /// Any other error.
    #[error("cannot listen on {addr}: {error}")]
    Io {
        /// The requested address.
        addr: SocketAddr,
        /// The system's error.
        error: io::Error,
    },
}

impl BindError {
    pub(crate) fn new(addr: SocketAddr, error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::AddrInUse {
            Self::PortInUse { addr }
        } else if error.kind() == io::ErrorKind::AddrNotAvailable {
            Self::NoSuchAddress { addr }
        } else if error.kind() == io::ErrorKind::PermissionDenied {
            Self::Forbidden { addr }
        } else {
            Self::Io { addr, error }
        }
    }
}
