//! The SIMD abstraction that every CPU kernel is written in, so that one source gives the same bits on every
//! instruction set.
//!
//! A vector is always 16 `f32`, 16 `i32` or 64 bytes wide, whatever the register size: AVX-512 holds it in one
//! register, AVX2 in two, the portable version in an array. A kernel is written once over [`Simd`] and compiled once
//! per instruction set; the 16 lanes fix the order of every sum.
//! Next: `avx512.rs`, `avx2.rs`, `portable.rs`.

use super::words::Words;

/// A computation that can be compiled for each instruction set. `run` must be `#[inline(always)]`, and so must
/// everything it calls that touches vectors.
pub trait Kernel {
    /// The result.
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
#[allow(clippy::missing_safety_doc)] // above, for all of them
pub trait Simd: Words {
    /// 16 `f32`.
    type F: Copy;
    /// 16 `i32`.
    type I: Copy;
    /// 64 bytes.
    type U: Copy;
    /// Vectors of 16 `f32` that the registers hold.
    const REGISTERS: usize;

    /// All lanes `value`.
    unsafe fn splat(value: f32) -> Self::F;
    /// 16 lanes from memory.
    unsafe fn load(from: *const f32) -> Self::F;
    /// The first `lanes` (0 to 16) from memory, the rest zero; memory beyond them is not accessed.
    unsafe fn load_first(from: *const f32, lanes: usize) -> Self::F;
    /// 16 IEEE half-precision numbers.
    unsafe fn load_f16(from: *const u16) -> Self::F;
    /// The scales of 16 words, as [`scale_and_zero`](crate::quant::scale_and_zero) has them.
    unsafe fn load_scales(from: *const u16) -> Self::F;
    /// The zeros of 16 such words, in eighths.
    unsafe fn load_zeros(from: *const u16) -> Self::F;
    /// 16 bfloat16 numbers.
    unsafe fn load_bf16(from: *const u16) -> Self::F;
    /// 16 unsigned bytes as `f32`.
    unsafe fn load_u8(from: *const u8) -> Self::F;
    /// 16 signed bytes as `f32`.
    unsafe fn load_i8(from: *const u8) -> Self::F;
    /// 16 lanes to memory.
    unsafe fn store(v: Self::F, to: *mut f32);
    /// Non-temporal store of 16 lanes, if supported: `to` is aligned to 64 bytes, and no other thread reads there
    /// before [`Self::fence`].
    #[inline(always)]
    unsafe fn stream(v: Self::F, to: *mut f32) {
        // SAFETY: the caller's contract.
        unsafe { Self::store(v, to) }
    }
    /// Store fence: orders earlier streaming stores before later stores.
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
    /// The larger of each lane; `b` if either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The smaller of each lane; `b` if either is NaN.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// Magnitudes.
    unsafe fn abs(a: Self::F) -> Self::F;
    /// p · 2^n, where `n` is in the low bits of `t` (a sum with [`ROUND`](crate::order::ROUND)).
    unsafe fn scale_pow2(p: Self::F, t: Self::F) -> Self::F;
    /// The number with bits `pattern` - bits of the lane: an initial guess for reciprocals.
    unsafe fn reflect(pattern: u32, v: Self::F) -> Self::F;
    /// Sums of four vectors, each in the tree order (i, i+8), (i, i+4), (i, i+2), (i, i+1).
    unsafe fn sum4(v: [Self::F; 4]) -> [f32; 4];
    /// Largest lane.
    unsafe fn max_lane(v: Self::F) -> f32;
    /// Lanes converted to `f32`.
    unsafe fn to_f32(v: Self::I) -> Self::F;
    /// Rounds each lane to nearest even and stores 16 bytes. Lanes must be within -128 to 127.
    unsafe fn store_i8(v: Self::F, to: *mut i8);

    /// 64 bytes from memory.
    unsafe fn load_bytes(from: *const u8) -> Self::U;
    /// Bits 0 to 3 of each byte.
    unsafe fn low_nibbles(v: Self::U) -> Self::U;
    /// Bits 4 to 7 of each byte.
    unsafe fn high_nibbles(v: Self::U) -> Self::U;
    /// The entry of `table` that each byte indexes. Bytes must be below 16.
    unsafe fn look_up(table: &[u8; 16], v: Self::U) -> Self::U;

    /// `low` with bit `AT` of each byte of `plane` as bit 4.
    unsafe fn join_bit<const AT: u32>(low: Self::U, plane: Self::U) -> Self::U;
    /// `low` with bits `AT` and `AT + 1` of each byte of `plane` as bits 4 and 5.
    unsafe fn join_two_bits<const AT: u32>(low: Self::U, plane: Self::U) -> Self::U;
    /// Byte `INDEX` of each group of four as `f32`.
    unsafe fn byte<const INDEX: u32>(v: Self::U) -> Self::F;
    /// Initial sums of a block, which make [`Self::dot`] count codes minus `OFFSET`; `total`: the sum of all `x`.
    unsafe fn begin<const OFFSET: i32>(total: i32) -> Self::I;
    /// Lane i: `sum` plus Σ w · x over the bytes 4 i to 4 i + 3 of both pairs. Each `x` is four signed bytes within
    /// ±127, `w` is unsigned: up to 63, or up to 255 if `OFFSET` is 128. Exact.
    unsafe fn dot<const OFFSET: i32>(sum: Self::I, w: (Self::U, Self::U), x: (i32, i32)) -> Self::I;

    /// Prefetches a cache line. Any address is allowed.
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
}
