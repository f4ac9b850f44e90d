//! Deterministic noise for decoder tests: random bytes, and valid bytes with random damage. Same seed, same bytes.

/// A small counter-based generator (splitmix64). Sufficient for damaging inputs; not used for anything else.
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % (n.max(1) as u64)).unwrap_or(0)
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }

    /// Pure noise in a quarter of the calls; otherwise `good` with a few bytes changed, cut or inserted.
    pub(crate) fn mangle(&mut self, good: &[u8]) -> Vec<u8> {
        if self.below(4) == 0 {
            let n = self.below(2 * good.len() + 2);
            return self.bytes(n);
        }
        let mut bytes = good.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len().max(1));
            match self.below(4) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at.min(bytes.len()), self.next() as u8),
                _ if bytes.is_empty() => {}
                2 => bytes[at] = self.next() as u8,
                _ => bytes[at] ^= 1 << self.below(8),
            }
        }
        bytes
    }
}
