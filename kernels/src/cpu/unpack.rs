//! Quantised blocks as the file stores them, unpacked in registers four blocks of 32 at a time.
//!
//! A group is 128 weights of one row: the first halves (16) of four blocks in `low`, their second halves in `high`,
//! which is the order in which activations are kept, so that one multiplication serves every format.
use super::simd::Simd;

/// Weights in a group.
pub(crate) const GROUP: usize = 128;

/// Bytes of the largest group of those formats whose rows need not be whole groups.
pub(crate) const GROUP_BYTES_MAX: usize = Q8_0::GROUP_BYTES;

/// A group: weight = scale · (q - OFFSET) + min, each scale and minimum filling the quarter of its block.
pub(crate) struct Unpacked<S: Simd> {
    pub(crate) low: S::U,
    pub(crate) high: S::U,
    pub(crate) scale: S::F,
    /// Scale of the second halves: equal to `scale` unless the format is `SPLIT`.
    pub(crate) scale_high: S::F,
    /// Meaningful if the format has `MIN`.
    pub(crate) min: S::F,
}

/// One way of storing a row.
pub(crate) trait Format {
    /// Bytes of a group.
    const GROUP_BYTES: usize;
    /// Taken from each stored number.
    const OFFSET: i32;
    /// Whether blocks have a minimum.
    const MIN: bool = false;
    /// Whether each half block has its own scale.
    const SPLIT: bool = false;
    /// Whether rows may end within a group.
    const SHORT: bool = false;

    /// Group `index` of the row at `row`. Only its first `blocks` (1 to 4) blocks are the row's: the others get a scale
    /// and a minimum of zero.
    ///
    /// # Safety
    /// The machine has `S`; all bytes of the group can be read.
    unsafe fn group<S: Simd>(row: *const u8, index: usize, blocks: usize) -> Unpacked<S>;
}

pub(crate) struct Q4_0;
pub(crate) struct Q4_1;
pub(crate) struct Q8_0;
pub(crate) struct Q4K;
pub(crate) struct Q5K;
pub(crate) struct Q6K;

// SAFETY (whole file): offsets stay within the blocks that the caller vouches for; see each block's layout.

impl Format for Q4_0 {
    const GROUP_BYTES: usize = 72;
    const OFFSET: i32 = 8;
    const SHORT: bool = true;

    #[inline(always)]
    unsafe fn group<S: Simd>(row: *const u8, index: usize, blocks: usize) -> Unpacked<S> {
        // 18 bytes: f16 scale, 16 bytes of nibbles.
        unsafe {
            let from = row.add(72 * index);
            let q = S::load_quarters([from.add(2), from.add(20), from.add(38), from.add(56)]);
            let scale = S::expand_f16(four_u16(from, 18) & first_u16(blocks));
            Unpacked { low: S::low_nibbles(q), high: S::high_nibbles(q), scale, scale_high: scale, min: scale }
        }
    }
}

impl Format for Q4_1 {
    const GROUP_BYTES: usize = 80;
    const OFFSET: i32 = 0;
    const MIN: bool = true;
    const SHORT: bool = true;

    #[inline(always)]
    unsafe fn group<S: Simd>(row: *const u8, index: usize, blocks: usize) -> Unpacked<S> {
        // 20 bytes: f16 scale, f16 minimum, 16 bytes of nibbles.
        unsafe {
            let (low, high, scale, min) = S::q4_1(row.add(80 * index), blocks);
            Unpacked { low, high, scale, scale_high: scale, min }
        }
    }
}

impl Format for Q8_0 {
    const GROUP_BYTES: usize = 136;
    const OFFSET: i32 = 128;
    const SHORT: bool = true;

    #[inline(always)]
    unsafe fn group<S: Simd>(row: *const u8, index: usize, blocks: usize) -> Unpacked<S> {
        // 34 bytes: f16 scale, 32 signed bytes.
        unsafe {
            let from = row.add(136 * index);
            let first = S::load_quarters([from.add(2), from.add(18), from.add(36), from.add(52)]);
            let second = S::load_quarters([from.add(70), from.add(86), from.add(104), from.add(120)]);
            let (low, high) = S::deal(first, second);
            let scale = S::expand_f16(four_u16(from, 34) & first_u16(blocks));
            Unpacked { low: S::flip_sign(low), high: S::flip_sign(high), scale, scale_high: scale, min: scale }
        }
    }
}

impl Format for Q4K {
    const GROUP_BYTES: usize = 72;
    const OFFSET: i32 = 0;
    const MIN: bool = true;

    #[inline(always)]
    unsafe fn group<S: Simd>(row: *const u8, index: usize, _blocks: usize) -> Unpacked<S> {
        // 144 bytes for two groups: f16 scale, f16 minimum, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles.
        unsafe {
            let block = row.add(144 * (index / 2));
            let q = S::load_bytes(block.add(16 + 64 * (index % 2)));
            let (low, high) = S::weave(S::low_nibbles(q), S::high_nibbles(q));
            let (scale, min) = k_scales::<S>(block, index % 2);
            Unpacked { low, high, scale, scale_high: scale, min }
        }
    }
}

impl Format for Q5K {
    const GROUP_BYTES: usize = 88;
    const OFFSET: i32 = 0;
    const MIN: bool = true;

    #[inline(always)]
    unsafe fn group<S: Simd>(row: *const u8, index: usize, _blocks: usize) -> Unpacked<S> {
        // 176 bytes for two groups: as Q4_K, with 32 bytes of fifth bits (bit i: block i) before the nibbles.
        unsafe {
            let (block, half) = (row.add(176 * (index / 2)), index % 2);
            let q = S::load_bytes(block.add(48 + 64 * half));
            let fifth = S::load_twice(block.add(16));
            let bit = 1u8 << (4 * half);
            let low = S::add16_where(S::low_nibbles(q), fifth, S::halves(bit, bit << 2));
            let high = S::add16_where(S::high_nibbles(q), fifth, S::halves(bit << 1, bit << 3));
            let (low, high) = S::weave(low, high);
            let (scale, min) = k_scales::<S>(block, half);
            Unpacked { low, high, scale, scale_high: scale, min }
        }
    }
}

impl Format for Q6K {
    const GROUP_BYTES: usize = 105;
    const OFFSET: i32 = 32;
    const SPLIT: bool = true;

    #[inline(always)]
    unsafe fn group<S: Simd>(row: *const u8, index: usize, _blocks: usize) -> Unpacked<S> {
        // 210 bytes for two groups: 128 bytes of nibbles, 64 bytes of upper bit pairs, 16 scales, f16 scale.
        unsafe {
            let (block, half) = (row.add(210 * (index / 2)), index % 2);
            let q = S::load_bytes(block.add(64 * half));
            let pairs = S::load_twice(block.add(128 + 32 * half));
            let near = S::join_two_bits::<0>(S::low_nibbles(q), pairs);
            let far = S::join_two_bits::<4>(S::high_nibbles(q), pairs);
            let (low, high) = S::deal(near, far);
            let scales = block.add(192 + 8 * half).cast::<u64>().read_unaligned();
            let (scale, scale_high) = S::half_scales(block.add(208).cast::<u16>().read_unaligned(), scales);
            Unpacked { low, high, scale, scale_high, min: scale }
        }
    }
}

/// Scales and (negated) minima of four blocks of a K super-block: `half` 0 or 1.
#[inline(always)]
unsafe fn k_scales<S: Simd>(block: *const u8, half: usize) -> (S::F, S::F) {
    unsafe {
        let word = |i: usize| block.add(4 + 4 * i).cast::<u32>().read_unaligned();
        let (scales, mins) = if half == 0 {
            (word(0) & 0x3f3f_3f3f, word(1) & 0x3f3f_3f3f)
        } else {
            (
                (word(2) & 0x0f0f_0f0f) | ((word(0) >> 2) & 0x3030_3030),
                ((word(2) >> 4) & 0x0f0f_0f0f) | ((word(1) >> 2) & 0x3030_3030),
            )
        };
        let scale = S::mul(S::expand_f16(same_u16(block)), S::expand_u8(scales));
        // The sign of the f16 is flipped: the stored minimum is subtracted.
        let min = S::mul(S::expand_f16(same_u16(block.add(2)) ^ 0x8000_8000_8000_8000), S::expand_u8(mins));
        (scale, min)
    }
}

/// Ones in the first `blocks` (1 to 4) of four numbers of 16 bits.
#[inline(always)]
pub(crate) fn first_u16(blocks: usize) -> u64 {
    u64::MAX >> (64 - 16 * blocks)
}

/// The first 16 bits of four blocks.
#[inline(always)]
unsafe fn four_u16(from: *const u8, block_bytes: usize) -> u64 {
    let at = |b: usize| u64::from(unsafe { from.add(b * block_bytes).cast::<u16>().read_unaligned() });
    at(0) | at(1) << 16 | at(2) << 32 | at(3) << 48
}

/// 16 bits, four times.
#[inline(always)]
unsafe fn same_u16(from: *const u8) -> u64 {
    u64::from(unsafe { from.cast::<u16>().read_unaligned() }) * 0x0001_0001_0001_0001
}
