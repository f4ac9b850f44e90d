//! The vector vocabulary every CPU kernel is written in, so that one text gives the same bits on every instruction set.
//!
//! A vector is always 16 `f32`, 16 `i32` or 64 bytes wide, whatever the registers are: AVX-512 holds it in one register,
//! AVX2 in two, the portable version in an array. A kernel is written once over [`Simd`] and compiled once per
//! instruction set; the order of every sum is fixed by the 16 lanes and therefore the same everywhere.
//! Next: `avx512.rs`, `avx2.rs`, `portable.rs`.

use super::unpack::first_u16;
use super::words::Words;

/// A computation that can be compiled for each instruction set. `run` must be `#[inline(always)]`, and so must
/// everything it calls that touches vectors.
pub(crate) trait Kernel {
    /// What it gives.
    type Output;
    /// Runs with the vectors of `S`.
    ///
    /// # Safety
    /// The machine has the instruction set of `S`, and the kernel's own pointers are valid for what it does.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

/// Operations on vectors of 16 `f32` (`F`), 16 `i32` (`I`) and 64 bytes (`U`).
///
/// # Safety of all functions
/// The machine has the instruction set; pointers are valid for the lanes that are read or written. No alignment is
/// needed. Every floating-point function is the IEEE operation of its name, rounded to nearest even, lane by lane.
pub(crate) trait Simd: Words {
    /// 16 `f32`.
    type F: Copy;
    /// 16 `i32`.
    type I: Copy;
    /// 64 bytes: four 16-byte quarters.
    type U: Copy;

    /// All lanes `value`.
    unsafe fn splat(value: f32) -> Self::F;
    /// 16 lanes from memory.
    unsafe fn load(from: *const f32) -> Self::F;
    /// The first `lanes` (0 to 16) from memory, the rest zero; memory behind them is not touched.
    unsafe fn load_first(from: *const f32, lanes: usize) -> Self::F;
    /// 16 IEEE half-precision numbers.
    unsafe fn load_f16(from: *const u16) -> Self::F;
    /// 16 bfloat16 numbers.
    unsafe fn load_bf16(from: *const u16) -> Self::F;
    /// 16 lanes to memory.
    unsafe fn store(v: Self::F, to: *mut f32);
    /// The same past the caches where there is a way: `to` is a multiple of 64 bytes, and nobody else reads there before
    /// [`Self::fence`].
    #[inline(always)]
    unsafe fn stream(v: Self::F, to: *mut f32) {
        // SAFETY: the caller's contract.
        unsafe { Self::store(v, to) }
    }
    /// What was streamed is in order before what is stored after this.
    #[inline(always)]
    unsafe fn fence() {}
    /// 16 lanes to memory as half precision.
    unsafe fn store_f16(v: Self::F, to: *mut u16);
    /// a + b
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// a - b
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// a · b
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// a / b
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// a · b + c, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger of each lane; `b` where `a` is not a number.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The smaller of each lane; `b` where `a` is not a number.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// Magnitudes.
    unsafe fn abs(a: Self::F) -> Self::F;
    /// p · 2^n, where `n` are the low bits of the pattern of `t` (a sum with [`ROUND`]).
    unsafe fn scale_pow2(p: Self::F, t: Self::F) -> Self::F;
    /// Sums of four vectors, each in the tree order (i, i+8), (i, i+4), (i, i+2), (i, i+1).
    unsafe fn sum4(v: [Self::F; 4]) -> [f32; 4];
    /// Largest lane.
    unsafe fn max_lane(v: Self::F) -> f32;
    /// Lanes 4·quarter to 4·quarter+3 to each quarter of the result.
    unsafe fn spread<const QUARTER: i32>(v: Self::F) -> Self::F;
    /// Four `f32` from memory, each filling one quarter.
    unsafe fn expand(from: *const f32) -> Self::F;
    /// Four half-precision numbers (lowest 16 bits first), each filling one quarter.
    unsafe fn expand_f16(four: u64) -> Self::F;
    /// Four unsigned bytes (lowest first), each filling one quarter as a number.
    unsafe fn expand_u8(four: u32) -> Self::F;
    /// Of eight signed bytes (lowest first) those with an index of parity `ODD`, each filling one quarter.
    unsafe fn expand_i8<const ODD: bool>(eight: u64) -> Self::F;
    /// Numbers.
    unsafe fn to_f32(v: Self::I) -> Self::F;
    /// Rounded to nearest even, the low byte of each lane to memory: 16 bytes. Lanes are within -128 to 127.
    unsafe fn store_i8(v: Self::F, to: *mut i8);
    /// 16 lanes to memory.
    unsafe fn store_i32(v: Self::I, to: *mut i32);

    /// 64 bytes from memory.
    unsafe fn load_bytes(from: *const u8) -> Self::U;
    /// 16 bytes from each of four places.
    unsafe fn load_quarters(from: [*const u8; 4]) -> Self::U;
    /// 32 bytes twice.
    unsafe fn load_twice(from: *const u8) -> Self::U;
    /// Bits 0 to 3 of each byte.
    unsafe fn low_nibbles(v: Self::U) -> Self::U;
    /// Bits 4 to 7 of each byte.
    unsafe fn high_nibbles(v: Self::U) -> Self::U;
    /// Each byte with its highest bit flipped: signed to unsigned with offset 128.
    unsafe fn flip_sign(v: Self::U) -> Self::U;
    /// `v` plus 16 in each byte where `bits` has one of the bits of that byte of `mask`.
    unsafe fn add16_where(v: Self::U, bits: Self::U, mask: Self::U) -> Self::U;
    /// `low` plus the two bits of each byte of `bits` that start at `SHIFT` for the first 32 bytes and at `SHIFT + 2` for
    /// the others, as bits 4 and 5.
    unsafe fn join_two_bits<const SHIFT: u32>(low: Self::U, bits: Self::U) -> Self::U;
    /// Byte `a` 32 times, byte `b` 32 times.
    unsafe fn halves(a: u8, b: u8) -> Self::U;
    /// Quarters (a0, a2, b0, b2) and (a1, a3, b1, b3).
    unsafe fn deal(a: Self::U, b: Self::U) -> (Self::U, Self::U);
    /// Quarters (a0, b0, a2, b2) and (a1, b1, a3, b3).
    unsafe fn weave(a: Self::U, b: Self::U) -> (Self::U, Self::U);
    /// Quarter as 16 numbers.
    unsafe fn widen<const QUARTER: i32>(v: Self::U) -> Self::F;
    /// Lane i: the sum over the four bytes 4i to 4i+3 of both pairs of (w - `OFFSET`) · x, w unsigned and x signed within
    /// ±127. `neg_sums` lane i is minus the sum of the eight x. Exact for w up to 63, and up to 255 when `OFFSET` is 128.
    unsafe fn dot<const OFFSET: i32>(w: (Self::U, Self::U), x: (Self::U, Self::U), neg_sums: *const i32) -> Self::I;
    /// The same for one pair.
    unsafe fn dot_half<const OFFSET: i32>(w: Self::U, x: Self::U) -> Self::I;

    /// Hints that a line of memory is read soon. Any address will do.
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint; SSE is part of x86-64.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast())
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    /// A half-precision number times the even and the odd ones of eight signed bytes (lowest first), each product filling
    /// one quarter.
    #[inline(always)]
    unsafe fn half_scales(head: u16, eight: u64) -> (Self::F, Self::F) {
        // SAFETY: the caller's contract.
        unsafe {
            let d = Self::expand_f16(u64::from(head) * 0x0001_0001_0001_0001);
            (Self::mul(d, Self::expand_i8::<false>(eight)), Self::mul(d, Self::expand_i8::<true>(eight)))
        }
    }

    /// Four Q4_1 blocks (20 bytes each): nibbles by halves, scales, minima; both zero for the last `4 - blocks`.
    #[inline(always)]
    unsafe fn q4_1(from: *const u8, blocks: usize) -> (Self::U, Self::U, Self::F, Self::F) {
        // SAFETY: the caller's contract: 80 bytes can be read at `from`.
        unsafe {
            let q = Self::load_quarters([from.add(4), from.add(24), from.add(44), from.add(64)]);
            let head = |b: usize| from.add(20 * b).cast::<u32>().read_unaligned() as u64;
            let (a, b, c, d) = (head(0), head(1), head(2), head(3));
            let low = |v: u64| v & 0xffff;
            let scale = low(a) | low(b) << 16 | low(c) << 32 | low(d) << 48;
            let min = a >> 16 | (b >> 16) << 16 | (c >> 16) << 32 | (d >> 16) << 48;
            let (scale, min) = (Self::expand_f16(scale & first_u16(blocks)), Self::expand_f16(min & first_u16(blocks)));
            (Self::low_nibbles(q), Self::high_nibbles(q), scale, min)
        }
    }
}

/// Adding this to a number of small magnitude leaves its nearest integer in the low bits of the pattern.
pub(crate) const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
