//! Requests for weights, and the encoding of the response to `Have`.

/// A request about one content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightsRequest {
    /// Its shard index.
    Index,
    /// One chunk, by number.
    Chunk(u32),
    /// Which chunks are available: one bit per chunk, the first in the lowest bit of the first byte.
    Have,
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
