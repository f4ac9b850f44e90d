//! What one node asks another about weights, and how it is written: a tag, the content, a number.
use crate::tags;
use node_core::id::ContentId;

/// A question about one content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Its shard index.
    Index,
    /// One chunk, by number.
    Chunk(u32),
    /// Which chunks there are: a bit each, the first in the lowest bit of the first byte.
    Have,
}

impl Request {
    pub(super) fn encode(self, content: ContentId) -> Vec<u8> {
        let (tag, number) = match self {
            Request::Index => (tags::INDEX, 0),
            Request::Chunk(number) => (tags::CHUNK, number),
            Request::Have => (tags::HAVE, 0),
        };
        [&[tag], content.0.as_slice(), &number.to_le_bytes()].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<(ContentId, Request)> {
        let bytes: &[u8; 37] = bytes.try_into().ok()?;
        let content = ContentId(bytes[1..33].try_into().ok()?);
        let number = u32::from_le_bytes(bytes[33..].try_into().ok()?);
        match bytes[0] {
            tags::INDEX => Some((content, Request::Index)),
            tags::CHUNK => Some((content, Request::Chunk(number))),
            tags::HAVE => Some((content, Request::Have)),
            _ => None,
        }
    }
}

/// Bits as `Have` is answered.
pub(super) fn encode_bitmap(bits: &[bool]) -> Vec<u8> {
    let byte = |bits: &[bool]| bits.iter().enumerate().fold(0, |byte, (i, bit)| byte | u8::from(*bit) << i);
    bits.chunks(8).map(byte).collect()
}

/// `count` bits, if the answer has as many bytes as they take.
pub(super) fn decode_bitmap(bytes: &[u8], count: usize) -> Option<Vec<bool>> {
    let fits = bytes.len() == count.div_ceil(8);
    fits.then(|| (0..count).map(|i| bytes[i / 8] >> (i % 8) & 1 == 1).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_what_is_understood() {
        let content = ContentId([7; 32]);
        for request in [Request::Index, Request::Chunk(70_000), Request::Have] {
            assert_eq!(Request::decode(&request.encode(content)), Some((content, request)));
            assert!(!crate::renewal::is_request(&request.encode(content)), "{request:?}");
        }
        assert_eq!(Request::decode(&[9; 37]), None);
        assert_eq!(Request::decode(&[1; 36]), None);
        let bits: Vec<bool> = (0..19).map(|i| i % 3 == 0).collect();
        assert_eq!(decode_bitmap(&encode_bitmap(&bits), 19), Some(bits));
        assert_eq!(decode_bitmap(&[0; 3], 25), None);
    }
}
