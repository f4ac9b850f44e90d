//! Vectors as pairs of AVX2 registers.
//!
//! Helpers are always-inlined functions, not closures: a closure may be compiled out of line, without AVX2, where each
//! intrinsic becomes a call.
use std::arch::x86_64::*;

use super::avx512::sum4_quads;
use super::simd::Simd;

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Lanes 0 to 7 and 8 to 15, or bytes 0 to 31 and 32 to 63.
type Pair<T> = [T; 2];

// SAFETY (whole file): the functions are called only where the instruction set was detected (`Isa::detect`), from code
// compiled for it; pointers are valid by the contract of `Simd`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx2 {
    type F = Pair<__m256>;
    type I = Pair<__m256i>;
    type U = Pair<__m256i>;
    const REGISTERS: usize = 8; // two registers each

    #[inline(always)]
    unsafe fn splat(value: f32) -> Pair<__m256> {
        unsafe { [_mm256_set1_ps(value); 2] }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Pair<__m256> {
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, lanes: usize) -> Pair<__m256> {
        unsafe {
            let index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let low = _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes as i32), index);
            let high = _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes as i32 - 8), index);
            [_mm256_maskload_ps(from, low), _mm256_maskload_ps(from.wrapping_add(8), high)]
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Pair<__m256> {
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(from.cast())), _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast()))] }
    }
    #[inline(always)]
    unsafe fn load_scales(from: *const u16) -> Pair<__m256> {
        unsafe {
            let halves = _mm256_srli_epi16::<1>(_mm256_loadu_si256(from.cast()));
            let halves = _mm256_and_si256(halves, _mm256_set1_epi16(0x7fc0));
            let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
            [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_zeros(from: *const u16) -> Pair<__m256> {
        unsafe {
            let zeros = _mm256_and_si256(_mm256_loadu_si256(from.cast()), _mm256_set1_epi16(0x7f));
            let (low, high) = (_mm256_castsi256_si128(zeros), _mm256_extracti128_si256::<1>(zeros));
            [_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(high))]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Pair<__m256> {
        unsafe { [wide_bf16(from), wide_bf16(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(v: Pair<__m256>, to: *mut f32) {
        unsafe {
            _mm256_storeu_ps(to, v[0]);
            _mm256_storeu_ps(to.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn stream(v: Pair<__m256>, to: *mut f32) {
        unsafe {
            _mm256_stream_ps(to, v[0]);
            _mm256_stream_ps(to.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn fence() {
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn store_f16(v: Pair<__m256>, to: *mut u16) {
        unsafe {
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(to.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]));
        }
    }
    #[inline(always)]
    unsafe fn add(a: Pair<__m256>, b: Pair<__m256>) -> Pair<__m256> {
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn sub(a: Pair<__m256>, b: Pair<__m256>) -> Pair<__m256> {
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn mul(a: Pair<__m256>, b: Pair<__m256>) -> Pair<__m256> {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn div(a: Pair<__m256>, b: Pair<__m256>) -> Pair<__m256> {
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn fma(a: Pair<__m256>, b: Pair<__m256>, c: Pair<__m256>) -> Pair<__m256> {
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn max(a: Pair<__m256>, b: Pair<__m256>) -> Pair<__m256> {
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn min(a: Pair<__m256>, b: Pair<__m256>) -> Pair<__m256> {
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn abs(a: Pair<__m256>) -> Pair<__m256> {
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
        }
    }
    #[inline(always)]
    unsafe fn scale_pow2(p: Pair<__m256>, t: Pair<__m256>) -> Pair<__m256> {
        unsafe { [times_pow2(p[0], t[0]), times_pow2(p[1], t[1])] }
    }
    #[inline(always)]
    unsafe fn sum4(v: [Pair<__m256>; 4]) -> [f32; 4] {
        unsafe { sum4_quads([folded(v[0]), folded(v[1]), folded(v[2]), folded(v[3])]) }
    }
    #[inline(always)]
    unsafe fn max_lane(v: Pair<__m256>) -> f32 {
        unsafe {
            let e = _mm256_max_ps(v[0], v[1]);
            let q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps::<1>(e));
            let q = _mm_max_ps(q, _mm_movehl_ps(q, q));
            _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps::<1>(q, q)))
        }
    }
    #[inline(always)]
    unsafe fn to_f32(v: Pair<__m256i>) -> Pair<__m256> {
        unsafe { [_mm256_cvtepi32_ps(v[0]), _mm256_cvtepi32_ps(v[1])] }
    }
    #[inline(always)]
    unsafe fn store_i8(v: Pair<__m256>, to: *mut i8) {
        unsafe {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.cast(), _mm_packs_epi16(low, high));
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Pair<__m256i> {
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn low_nibbles(v: Pair<__m256i>) -> Pair<__m256i> {
        unsafe {
            let mask = _mm256_set1_epi8(15);
            [_mm256_and_si256(v[0], mask), _mm256_and_si256(v[1], mask)]
        }
    }
    #[inline(always)]
    unsafe fn high_nibbles(v: Pair<__m256i>) -> Pair<__m256i> {
        unsafe {
            let mask = _mm256_set1_epi8(15);
            [_mm256_and_si256(_mm256_srli_epi16::<4>(v[0]), mask), _mm256_and_si256(_mm256_srli_epi16::<4>(v[1]), mask)]
        }
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], v: Pair<__m256i>) -> Pair<__m256i> {
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, v[0]), _mm256_shuffle_epi8(table, v[1])]
        }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Pair<__m256> {
        unsafe {
            let (low, high) = (_mm_loadl_epi64(from.cast()), _mm_loadl_epi64(from.add(8).cast()));
            [_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high))]
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Pair<__m256> {
        unsafe {
            let (low, high) = (_mm_loadl_epi64(from.cast()), _mm_loadl_epi64(from.add(8).cast()));
            [_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))]
        }
    }
    #[inline(always)]
    unsafe fn reflect(pattern: u32, v: Pair<__m256>) -> Pair<__m256> {
        unsafe {
            let pattern = _mm256_set1_epi32(pattern as i32);
            let low = _mm256_sub_epi32(pattern, _mm256_castps_si256(v[0]));
            let high = _mm256_sub_epi32(pattern, _mm256_castps_si256(v[1]));
            [_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn join_bit<const AT: u32>(low: Pair<__m256i>, plane: Pair<__m256i>) -> Pair<__m256i> {
        unsafe {
            let mask = _mm256_set1_epi8(16);
            let bits = [to_bit_4::<AT>(plane[0]), to_bit_4::<AT>(plane[1])];
            let bits = [_mm256_and_si256(bits[0], mask), _mm256_and_si256(bits[1], mask)];
            [_mm256_or_si256(low[0], bits[0]), _mm256_or_si256(low[1], bits[1])]
        }
    }
    #[inline(always)]
    unsafe fn join_two_bits<const AT: u32>(low: Pair<__m256i>, plane: Pair<__m256i>) -> Pair<__m256i> {
        unsafe {
            let mask = _mm256_set1_epi8(48);
            let bits = [to_bit_4::<AT>(plane[0]), to_bit_4::<AT>(plane[1])];
            let bits = [_mm256_and_si256(bits[0], mask), _mm256_and_si256(bits[1], mask)];
            [_mm256_or_si256(low[0], bits[0]), _mm256_or_si256(low[1], bits[1])]
        }
    }
    #[inline(always)]
    unsafe fn byte<const INDEX: u32>(v: Pair<__m256i>) -> Pair<__m256> {
        unsafe { [wide_byte::<INDEX>(v[0]), wide_byte::<INDEX>(v[1])] }
    }
    #[inline(always)]
    unsafe fn begin<const OFFSET: i32>(total: i32) -> Pair<__m256i> {
        unsafe {
            // Products of codes up to 255 would overflow 16 bits: with offset 128, `signed_pairs` subtracts it from the
            // codes.
            let start = _mm256_set1_epi32(if OFFSET == 128 { 0 } else { -OFFSET * total });
            [start, start]
        }
    }
    #[inline(always)]
    unsafe fn dot<const OFFSET: i32>(
        sum: Pair<__m256i>,
        w: (Pair<__m256i>, Pair<__m256i>),
        x: (i32, i32),
    ) -> Pair<__m256i> {
        unsafe {
            let x = (_mm256_set1_epi32(x.0), _mm256_set1_epi32(x.1));
            [add_products::<OFFSET>(sum[0], w.0[0], w.1[0], x), add_products::<OFFSET>(sum[1], w.0[1], w.1[1], x)]
        }
    }
}

/// Eight bf16 numbers.
#[inline(always)]
unsafe fn wide_bf16(from: *const u16) -> __m256 {
    // SAFETY: AVX2 is available and eight numbers are readable by the caller's contract.
    unsafe {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }
}

/// p · 2ⁿ, where `t` has n in its low bits.
#[inline(always)]
unsafe fn times_pow2(p: __m256, t: __m256) -> __m256 {
    // SAFETY: AVX2 is available by the caller's contract.
    unsafe {
        let bits = _mm256_slli_epi32::<23>(_mm256_castps_si256(t));
        _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3f80_0000))))
    }
}

/// Lane i plus lanes i + 4, i + 8 and i + 12, paired as in the summation tree.
#[inline(always)]
unsafe fn folded(v: Pair<__m256>) -> __m128 {
    // SAFETY: AVX2 is available by the caller's contract.
    unsafe {
        let e = _mm256_add_ps(v[0], v[1]);
        _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps::<1>(e))
    }
}

/// Byte `INDEX` of each 32-bit word as f32.
#[inline(always)]
unsafe fn wide_byte<const INDEX: u32>(v: __m256i) -> __m256 {
    // SAFETY: AVX2 is available by the caller's contract.
    unsafe {
        let shifted = match INDEX {
            0 => v,
            1 => _mm256_srli_epi32::<8>(v),
            2 => _mm256_srli_epi32::<16>(v),
            _ => _mm256_srli_epi32::<24>(v),
        };
        _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(255)))
    }
}

/// Adds the products of two slots' codes with their activations, four per slot and lane.
#[inline(always)]
unsafe fn add_products<const OFFSET: i32>(sum: __m256i, a: __m256i, b: __m256i, x: (__m256i, __m256i)) -> __m256i {
    // SAFETY: AVX2 is available by the caller's contract.
    unsafe {
        if OFFSET == 128 {
            return _mm256_add_epi32(sum, _mm256_add_epi32(signed_pairs(a, x.0), signed_pairs(b, x.1)));
        }
        // The sum of four products of up to 63 · 127 fits 16 bits.
        let four = _mm256_add_epi16(_mm256_maddubs_epi16(a, x.0), _mm256_maddubs_epi16(b, x.1));
        _mm256_add_epi32(sum, _mm256_madd_epi16(four, _mm256_set1_epi16(1)))
    }
}

/// Shifts bit `AT` of each byte to bit 4; the other bits are not masked.
#[inline(always)]
unsafe fn to_bit_4<const AT: u32>(plane: __m256i) -> __m256i {
    // SAFETY: AVX2 is available by the caller's contract.
    unsafe {
        match AT {
            0 => _mm256_slli_epi32::<4>(plane),
            1 => _mm256_slli_epi32::<3>(plane),
            2 => _mm256_slli_epi32::<2>(plane),
            3 => _mm256_slli_epi32::<1>(plane),
            4 => plane,
            5 => _mm256_srli_epi32::<1>(plane),
            6 => _mm256_srli_epi32::<2>(plane),
            _ => _mm256_srli_epi32::<3>(plane),
        }
    }
}

/// Sums of four products per lane, of codes up to 255 minus 128.
#[inline(always)]
unsafe fn signed_pairs(w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: AVX2 is available by the caller's contract.
    unsafe {
        let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1))
    }
}
