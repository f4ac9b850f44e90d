//! UDP sockets with buffers that hold more than a few packets, and errors that say what to do about a taken port.
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    io,
    net::{SocketAddr, UdpSocket},
};
use thiserror::Error;

/// What we ask of the kernel: 8 MiB ride out a stall of 20 ms at 3 Gbit/s; the stock 208 KiB hold under 100 packets.
const BUFFER_BYTES: usize = 8 << 20;

/// Kernel buffers of a socket, bytes as read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// For receiving.
    pub receive: usize,
    /// For sending.
    pub send: usize,
}

impl Buffers {
    /// What to run when the kernel granted less than was asked; `None` if it did not.
    pub fn advice(&self) -> Option<String> {
        let small = self.receive.min(self.send);
        (small < BUFFER_BYTES).then(|| {
            format!(
                "socket buffers are {} KiB, {} KiB were asked; for full speed run: sysctl -w net.core.rmem_max={BUFFER_BYTES} net.core.wmem_max={BUFFER_BYTES}",
                small >> 10,
                BUFFER_BYTES >> 10
            )
        })
    }
}

/// Binds a UDP socket and enlarges its buffers as far as the kernel lets us.
pub(crate) fn bind_udp(addr: SocketAddr) -> Result<(UdpSocket, Buffers), BindError> {
    let domain = if addr.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    let open = || -> io::Result<(UdpSocket, Buffers)> {
        let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
        if addr.is_ipv6() {
            // One socket for both families where the system allows it.
            let _ = socket.set_only_v6(false);
        }
        socket.bind(&addr.into())?;
        // Refused sizes are no error: the kernel grants what its limit allows, and we read back what that was.
        let _ = socket.set_recv_buffer_size(BUFFER_BYTES);
        let _ = socket.set_send_buffer_size(BUFFER_BYTES);
        let buffers = Buffers { receive: socket.recv_buffer_size()?, send: socket.send_buffer_size()? };
        Ok((socket.into(), buffers))
    };
    open().map_err(|error| BindError::new(addr, error))
}

/// Why a port cannot be used.
#[derive(Debug, Error)]
pub enum BindError {
    /// Somebody else has it.
    #[error("port {} is in use on {}: another meshnode may be running; choose another with --port (it and the next one must be free)", addr.port(), addr.ip())]
    PortInUse {
        /// Asked for.
        addr: SocketAddr,
    },
    /// The address belongs to another machine.
    #[error("{} is no address of this machine; choose one with --listen (0.0.0.0 is all)", addr.ip())]
    NoSuchAddress {
        /// Asked for.
        addr: SocketAddr,
    },
    /// A port below 1024 without the right to it.
    #[error("this user may not use port {}; choose one above 1023 with --port", addr.port())]
    Forbidden {
        /// Asked for.
        addr: SocketAddr,
    },
    /// Anything else.
    #[error("cannot listen on {addr}: {error}")]
    Io {
        /// Asked for.
        addr: SocketAddr,
        /// What the system said.
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
