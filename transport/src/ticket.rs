//! An invitation as one word that users can paste: the mesh, the inviter and its addresses, a secret, and an expiry.
use crate::certificate::MeshId;
use crate::identity::PeerId;
use crate::wire::{Reader, put_short};
use data_encoding::BASE32_NOPAD_NOCASE;
use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
};
use thiserror::Error;

/// Maximum addresses in a ticket: a machine has few interfaces, and each address makes the word longer.
pub const ADDRS_MAX: usize = 4;

/// An invitation into a mesh for one or a few uses.
#[derive(Clone, PartialEq, Eq)]
pub struct Ticket {
    /// The mesh; the joiner checks its certificate against it.
    pub mesh: MeshId,
    /// The inviter; the joiner checks this key before it sends anything.
    pub inviter: PeerId,
    /// The inviter's data plane (UDP P + 1), at most [`ADDRS_MAX`].
    pub addrs: Vec<SocketAddr>,
    /// Known to the inviter and to every holder of the ticket.
    pub secret: [u8; 16],
    /// Unix seconds.
    pub expiry_unix: u64,
}

impl Ticket {
    /// Public id of the ticket, by which the inviter looks up the secret.
    pub fn id(&self) -> [u8; 16] {
        ticket_id(&self.secret)
    }

    /// Whether the ticket has expired. The inviter's clock decides; this check only avoids a futile connection.
    pub fn is_expired(&self, now_unix: u64) -> bool {
        now_unix > self.expiry_unix
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend_from_slice(&self.mesh.0);
        put_short(&mut out, &self.inviter.to_bytes());
        let addrs = &self.addrs[..self.addrs.len().min(ADDRS_MAX)];
        out.push(addrs.len() as u8);
        for addr in addrs {
            match addr.ip() {
                IpAddr::V4(ip) => put_short(&mut out, &ip.octets()),
                IpAddr::V6(ip) => put_short(&mut out, &ip.octets()),
            }
            out.extend_from_slice(&addr.port().to_le_bytes());
        }
        out.extend_from_slice(&self.secret);
        out.extend_from_slice(&self.expiry_unix.to_le_bytes());
        let checksum = crc32fast::hash(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Result<Self, TicketError> {
        let (body, checksum) = bytes.split_last_chunk::<4>().ok_or(TicketError::Damaged)?;
        if crc32fast::hash(body) != u32::from_le_bytes(*checksum) {
            return Err(TicketError::Damaged);
        }
        let mut r = Reader::new(body);
        match r.u8() {
            Some(VERSION) => {}
            Some(found) => return Err(TicketError::Version { found }),
            None => return Err(TicketError::Damaged),
        }
        Self::read(&mut r).filter(|_| r.end().is_some()).ok_or(TicketError::Malformed)
    }

    fn read(r: &mut Reader<'_>) -> Option<Self> {
        let mesh = MeshId(r.array()?);
        let inviter = PeerId::from_bytes(r.short(PEER_BYTES_MAX)?).ok()?;
        let count = usize::from(r.u8()?);
        if count > ADDRS_MAX {
            return None;
        }
        let addrs = (0..count).map(|_| read_addr(r)).collect::<Option<_>>()?;
        Some(Self { mesh, inviter, addrs, secret: r.array()?, expiry_unix: r.u64()? })
    }
}

fn read_addr(r: &mut Reader<'_>) -> Option<SocketAddr> {
    let ip = match r.short(16)? {
        bytes if bytes.len() == 4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        bytes => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
    };
    Some(SocketAddr::new(ip, r.u16()?))
}

/// Public id of a ticket secret.
pub fn ticket_id(secret: &[u8; 16]) -> [u8; 16] {
    let hash = blake3::derive_key("meshnode v1 ticket id", secret);
    let mut id = [0; 16];
    id.copy_from_slice(&hash[..16]);
    id
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", BASE32_NOPAD_NOCASE.encode(&self.encode()).to_ascii_lowercase())
    }
}

impl FromStr for Ticket {
    type Err = TicketError;

    fn from_str(text: &str) -> Result<Self, TicketError> {
        let text = text.trim();
        // Longest possible ticket, with some slack; longer input is not a ticket.
        if text.len() > TEXT_MAX {
            return Err(TicketError::Malformed);
        }
        let body = text
            .get(..PREFIX.len())
            .filter(|head| head.eq_ignore_ascii_case(PREFIX))
            .map(|_| &text[PREFIX.len()..])
            .ok_or(TicketError::Prefix)?;
        let bytes = BASE32_NOPAD_NOCASE.decode(body.as_bytes()).map_err(|_| TicketError::Damaged)?;
        Self::decode(&bytes)
    }
}

impl fmt::Debug for Ticket {
    /// All fields but the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({} by {} at {:?}, until {})", self.mesh, self.inviter, self.addrs, self.expiry_unix)
    }
}

/// Every ticket begins with this prefix, which shows kind and version to the user.
const PREFIX: &str = "mesh1";
/// Version of the encoding.
const VERSION: u8 = 1;
const PEER_BYTES_MAX: usize = 64;
const TEXT_MAX: usize = 512;

/// Why a text is not a ticket.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TicketError {
    /// The prefix is missing.
    #[error(
        "expected a ticket, which begins with \"{PREFIX}\", or an address such as /ip4/192.168.1.5/tcp/9471; get a ticket with `meshnode invite` on a member"
    )]
    Prefix,
    /// Characters are missing, added or mistyped.
    #[error("the ticket's checksum is wrong: part of it is missing or mistyped; copy it again, whole")]
    Damaged,
    /// The ticket was issued by a newer meshnode.
    #[error("the ticket has format {found}, this meshnode reads format {VERSION}; update meshnode here or there")]
    Version {
        /// Format version found.
        found: u8,
    },
    /// The checksum is valid, but the content is not.
    #[error("this is not a meshnode ticket; get one with `meshnode invite` on a member")]
    Malformed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::Noise;
    use crate::identity::Identity;

    fn ticket() -> Ticket {
        Ticket {
            mesh: MeshId([7; 32]),
            inviter: Identity::generate().peer_id(),
            addrs: vec!["192.168.1.7:4471".parse().unwrap(), "[fe80::1]:4471".parse().unwrap()],
            secret: [9; 16],
            expiry_unix: 1_800_000_000,
        }
    }

    #[test]
    fn a_ticket_survives_copy_and_paste() {
        let ticket = ticket();
        let text = ticket.to_string();
        assert!(text.starts_with("mesh1") && text.chars().all(|c| c.is_ascii_alphanumeric()), "{text}");
        assert!(text.len() < TEXT_MAX / 2, "{}", text.len());
        assert_eq!(text.parse::<Ticket>().unwrap(), ticket);
        assert_eq!(format!("  {}\n", text.to_uppercase()).parse::<Ticket>().unwrap(), ticket);
        assert!(!format!("{ticket:?}").contains("9, 9"));
    }

    #[test]
    fn each_mistake_has_its_own_error() {
        let text = ticket().to_string();
        assert_eq!("hello".parse::<Ticket>(), Err(TicketError::Prefix));
        assert_eq!("".parse::<Ticket>(), Err(TicketError::Prefix));
        assert_eq!("mesh1".parse::<Ticket>(), Err(TicketError::Damaged));
        assert_eq!(text[..text.len() - 3].parse::<Ticket>(), Err(TicketError::Damaged));
        assert_eq!(format!("mesh1{}", "a".repeat(1000)).parse::<Ticket>(), Err(TicketError::Malformed));
        let mut newer = ticket().encode();
        newer[0] = 2;
        let end = newer.len() - 4;
        let checksum = crc32fast::hash(&newer[..end]).to_le_bytes();
        newer[end..].copy_from_slice(&checksum);
        assert_eq!(Ticket::decode(&newer), Err(TicketError::Version { found: 2 }));
    }

    #[test]
    fn every_mistyped_character_is_detected() {
        let ticket = ticket();
        let text = ticket.to_string();
        for at in 5..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'a' { b'b' } else { b'a' };
            let typed = String::from_utf8(bytes).unwrap();
            assert_ne!(typed.parse::<Ticket>(), Ok(ticket.clone()), "character {at}");
        }
    }

    #[test]
    fn noise_never_panics() {
        let good = ticket();
        let mut noise = Noise::new(2);
        for _ in 0..20_000 {
            if let Ok(text) = String::from_utf8(noise.mangle(good.to_string().as_bytes())) {
                let _ = text.parse::<Ticket>();
            }
            let mut body = noise.mangle(&good.encode());
            let checksum = crc32fast::hash(&body).to_le_bytes();
            body.extend_from_slice(&checksum);
            if let Ok(ticket) = Ticket::decode(&body) {
                assert_eq!(ticket.encode(), body);
            }
        }
    }
}
