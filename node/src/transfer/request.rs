//! Requests for weights: what is asked, how it reaches a peer, how large a response may be, and the encoding of the
//! response to `Have`.
use node_core::id::NodeId;

/// A request about one content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightsRequest {
    /// Its shard index.
    Index,
    /// One chunk, by number.
    Chunk(u32),
    /// Which chunks are available: one bit per chunk, the first in the lowest bit of the first byte.
    Have,
}

/// Largest shard index accepted from a peer: at 40 bytes per chunk, enough for a terabyte of weights.
pub(crate) const INDEX_BYTES_MAX: usize = 64 << 20;
/// Largest chunk accepted from a peer, including the status byte.
pub(crate) const CHUNK_BYTES_MAX: usize = (1 << 20) + 1;

/// Sends requests to peers; implemented by the data plane.
pub(crate) trait Ask: Send + Sync + 'static {
    /// Sends a request and collects at most `max` bytes of response.
    fn ask(
        &self,
        node: NodeId,
        request: Vec<u8>,
        max: usize,
    ) -> impl std::future::Future<Output = Result<Vec<u8>, String>> + Send;

    /// Bytes per second that all responses together may take of this node's link now; `None`: unlimited.
    fn bytes_per_second(&self) -> Option<u64> {
        None
    }
}

/// Encodes the response to `Have`.
pub(super) fn encode_bitmap(bits: &[bool]) -> Vec<u8> {
    let byte = |bits: &[bool]| bits.iter().enumerate().fold(0, |byte, (i, bit)| byte | u8::from(*bit) << i);
    bits.chunks(8).map(byte).collect()
}

/// Decodes `count` bits; `None` if the length does not match.
pub(super) fn decode_bitmap(bytes: &[u8], count: usize) -> Option<Vec<bool>> {
    let fits = bytes.len() == count.div_ceil(8);
    fits.then(|| (0..count).map(|i| bytes[i / 8] >> (i % 8) & 1 == 1).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bitmap_round_trips() {
        let bits: Vec<bool> = (0..19).map(|i| i % 3 == 0).collect();
        assert_eq!(decode_bitmap(&encode_bitmap(&bits), 19), Some(bits));
        assert_eq!(decode_bitmap(&[0; 3], 25), None);
    }
}
