//! What one node asks another about weights, and how the answer to `Have` is written.

/// A question about one content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightsRequest {
    /// Its shard index.
    Index,
    /// One chunk, by number.
    Chunk(u32),
    /// Which chunks there are: a bit each, the first in the lowest bit of the first byte.
    Have,
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
    fn bits_are_read_as_they_were_written() {
        let bits: Vec<bool> = (0..19).map(|i| i % 3 == 0).collect();
        assert_eq!(decode_bitmap(&encode_bitmap(&bits), 19), Some(bits));
        assert_eq!(decode_bitmap(&[0; 3], 25), None);
    }
}
