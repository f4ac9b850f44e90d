//! Encoding of messages, adverts and datagrams: the only user of bincode, with a size limit on every decode.
//!
//! Every encoding begins with `PROTOCOL`, so that nodes of different versions reject each other explicitly instead of
//! misreading each other. Decoding never allocates more than the limit of its kind and never panics. Next: `membership.rs`.
use crate::id::{Generation, NodeId};
use crate::limits::{ADVERT_BYTES_MAX, DATAGRAM_BYTES_MAX, MESSAGE_BYTES_MAX};
use crate::message::{Advert, Heartbeat, Message, SignedAdvert};
use alloc::{string::ToString, vec::Vec};
use bincode::config::{Configuration, Limit, LittleEndian, NoLimit, Varint};
use bytes::{Buf, BufMut};
use serde::{Serialize, de::DeserializeOwned};

/// Version of every encoding in this file and of the protocol it serves. A change of meaning needs a new number, and a new
/// protocol name in `transport/src/version.rs`: connections with another name are rejected before a message is read.
pub const PROTOCOL: u8 = 20;

/// A decrypted datagram. Its second byte is its kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Datagram<'a> {
    /// A packet of the membership protocol, still encoded.
    Swim(&'a [u8]),
    /// The sender suspects the receiver, which should refute at once.
    Suspected {
        /// The receiver's generation.
        generation: u64,
        /// The suspected incarnation.
        incarnation: u16,
    },
    /// An advert of any node, forwarded by the sender.
    Advert(SignedAdvert),
    /// A heartbeat from a node that shares a job.
    Heartbeat(Heartbeat),
}

/// Why bytes were rejected; nothing of them has been used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// No bytes.
    #[error("expected a protocol version byte, found no bytes")]
    Empty,
    /// Another protocol version.
    #[error("expected protocol {PROTOCOL}, found {found}: update meshnode {side}", found = .0, side = older(*.0))]
    Version(u8),
    /// Longer than the limit of its kind.
    #[error("expected at most {max} bytes, found {found}")]
    TooLong {
        /// The bound.
        max: usize,
        /// The length.
        found: usize,
    },
    /// A datagram kind that this version does not have.
    #[error("expected a datagram kind of 0 to 3, found {0}")]
    Kind(u8),
    /// Not an encoding of the expected type.
    #[error("expected a well-formed {what}: {why}")]
    Malformed {
        /// The type.
        what: &'static str,
        /// bincode's message.
        why: alloc::string::String,
    },
    /// Bytes after the end.
    #[error("expected the {what} to end after {used} bytes, found {extra} more")]
    Trailing {
        /// The type.
        what: &'static str,
        /// Bytes it took.
        used: usize,
        /// Bytes left.
        extra: usize,
    },
}

/// Which side runs the older meshnode, in a message for this node's user.
fn older(found: u8) -> &'static str {
    if found < PROTOCOL { "there" } else { "here" }
}

/// Encodes a control message. Fails only when it is longer than any peer would accept.
pub fn encode_message(message: &Message) -> Result<Vec<u8>, CodecError> {
    let bytes = encode(&[PROTOCOL], message);
    within(bytes.len(), MESSAGE_BYTES_MAX)?;
    Ok(bytes)
}

/// Decodes a control message.
pub fn decode_message(bytes: &[u8]) -> Result<Message, CodecError> {
    within(bytes.len(), MESSAGE_BYTES_MAX)?;
    decode::<Message, MESSAGE_BYTES_MAX>("message", versioned(bytes)?)
}

/// Encodes an advert, for signing.
pub fn encode_advert(advert: &Advert) -> Result<Vec<u8>, CodecError> {
    let bytes = encode(&[PROTOCOL], advert);
    within(bytes.len(), ADVERT_BYTES_MAX)?;
    Ok(bytes)
}

/// Decodes an advert. The caller verifies the signature.
pub fn decode_advert(bytes: &[u8]) -> Result<Advert, CodecError> {
    within(bytes.len(), ADVERT_BYTES_MAX)?;
    decode::<Advert, ADVERT_DECODED_MAX>("advert", versioned(bytes)?)
}

/// The node, generation and version of an advert, from its first bytes; the rest may be malformed.
pub(crate) fn decode_advert_age(bytes: &[u8]) -> Result<(NodeId, Generation, u64), CodecError> {
    within(bytes.len(), ADVERT_BYTES_MAX)?;
    // In the order of `Advert`'s fields.
    let decoded = bincode::serde::decode_from_slice(versioned(bytes)?, limited::<SWIM_ITEM_BYTES_MAX>());
    decoded.map(|(age, _)| age).map_err(|e| CodecError::Malformed { what: "advert", why: e.to_string() })
}

/// Encodes a datagram.
pub fn encode_datagram(datagram: &Datagram<'_>) -> Vec<u8> {
    match datagram {
        Datagram::Swim(packet) => [&[PROTOCOL, 0][..], packet].concat(),
        Datagram::Suspected { generation, incarnation } => encode(&[PROTOCOL, 1], &(generation, incarnation)),
        Datagram::Advert(advert) => encode(&[PROTOCOL, 2], advert),
        Datagram::Heartbeat(heartbeat) => encode(&[PROTOCOL, 3], heartbeat),
    }
}

/// Decodes a datagram; a membership packet stays encoded.
pub fn decode_datagram(bytes: &[u8]) -> Result<Datagram<'_>, CodecError> {
    within(bytes.len(), DATAGRAM_BYTES_MAX)?;
    let Some((&kind, rest)) = versioned(bytes)?.split_first() else { return Err(CodecError::Empty) };
    match kind {
        0 => Ok(Datagram::Swim(rest)),
        1 => {
            let (generation, incarnation) = decode::<(u64, u16), DATAGRAM_BYTES_MAX>("suspicion", rest)?;
            Ok(Datagram::Suspected { generation, incarnation })
        }
        2 => Ok(Datagram::Advert(decode::<SignedAdvert, DATAGRAM_BYTES_MAX>("signed advert", rest)?)),
        3 => Ok(Datagram::Heartbeat(decode::<Heartbeat, DATAGRAM_BYTES_MAX>("heartbeat", rest)?)),
        other => Err(CodecError::Kind(other)),
    }
}

/// Encodes parts of the protocol that travel inside versioned envelopes (signed adverts, member lists).
pub(crate) fn encode_part<T: Serialize>(part: &T) -> Vec<u8> {
    encode(&[], part)
}

/// Decodes such a part of at most `LIMIT` bytes, and rejects trailing bytes.
pub(crate) fn decode_part<T: DeserializeOwned, const LIMIT: usize>(
    what: &'static str,
    bytes: &[u8],
) -> Result<T, CodecError> {
    within(bytes.len(), LIMIT)?;
    decode::<T, LIMIT>(what, bytes)
}

/// Encodes headers and members for foca, packed one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SwimCodec;

impl<T: Serialize + DeserializeOwned> foca::Codec<T> for SwimCodec {
    type Error = CodecError;
    fn encode_header(&mut self, header: &foca::Header<T>, buffer: impl BufMut) -> Result<(), CodecError> {
        put(header, buffer)
    }
    fn decode_header(&mut self, buffer: impl Buf) -> Result<foca::Header<T>, CodecError> {
        take("membership header", buffer)
    }
    fn encode_member(&mut self, member: &foca::Member<T>, buffer: impl BufMut) -> Result<(), CodecError> {
        put(member, buffer)
    }
    fn decode_member(&mut self, buffer: impl Buf) -> Result<foca::Member<T>, CodecError> {
        take("member", buffer)
    }
}

/// Writes to a bounded buffer; on failure the buffer is unchanged.
fn put<T: Serialize>(value: &T, mut buffer: impl BufMut) -> Result<(), CodecError> {
    // Encoded to the stack first: foca requires that an item that does not fit leaves the buffer unchanged.
    let mut aside = [0u8; SWIM_ITEM_BYTES_MAX];
    let length = bincode::serde::encode_into_slice(value, &mut aside, UNLIMITED)
        .map_err(|e| CodecError::Malformed { what: "membership item", why: e.to_string() })?;
    within(length, buffer.remaining_mut())?;
    buffer.put_slice(&aside[..length]);
    Ok(())
}

/// Reads one item and advances past it.
fn take<T: DeserializeOwned>(what: &'static str, mut buffer: impl Buf) -> Result<T, CodecError> {
    // foca guarantees a contiguous buffer, so `chunk` is all of it.
    let (value, used) = bincode::serde::decode_from_slice(buffer.chunk(), limited::<SWIM_ITEM_BYTES_MAX>())
        .map_err(|e| CodecError::Malformed { what, why: e.to_string() })?;
    buffer.advance(used);
    Ok(value)
}

fn encode<T: Serialize>(prefix: &[u8], value: &T) -> Vec<u8> {
    let mut bytes = prefix.to_vec();
    // Our types are plain structs, enums and sequences of known length: their encoding cannot fail.
    let body = bincode::serde::encode_to_vec(value, UNLIMITED).expect("types of the protocol can be encoded");
    bytes.extend_from_slice(&body);
    bytes
}

fn decode<T: DeserializeOwned, const LIMIT: usize>(what: &'static str, bytes: &[u8]) -> Result<T, CodecError> {
    let (value, used) = bincode::serde::decode_from_slice(bytes, limited::<LIMIT>())
        .map_err(|e| CodecError::Malformed { what, why: e.to_string() })?;
    match bytes.len() - used {
        0 => Ok(value),
        extra => Err(CodecError::Trailing { what, used, extra }),
    }
}

fn versioned(bytes: &[u8]) -> Result<&[u8], CodecError> {
    match bytes.split_first() {
        None => Err(CodecError::Empty),
        Some((&PROTOCOL, rest)) => Ok(rest),
        Some((&other, _)) => Err(CodecError::Version(other)),
    }
}

fn within(found: usize, max: usize) -> Result<(), CodecError> {
    if found > max { Err(CodecError::TooLong { max, found }) } else { Ok(()) }
}

type Bincode<L> = Configuration<LittleEndian, Varint, L>;

const UNLIMITED: Bincode<NoLimit> = bincode::config::standard();

const fn limited<const LIMIT: usize>() -> Bincode<Limit<LIMIT>> {
    bincode::config::standard().with_limit::<LIMIT>()
}

/// Bytes that an advert may claim while it is decoded: numbers claim their full size, of which they take a part, and the devices
/// of a large box are mostly numbers.
const ADVERT_DECODED_MAX: usize = 4 * ADVERT_BYTES_MAX;
/// More than any header or member takes (three identities of at most 46 bytes each), and small enough for a stack buffer.
const SWIM_ITEM_BYTES_MAX: usize = 256;

#[cfg(test)]
mod tests;
