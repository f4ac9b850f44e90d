//! Vectors as AVX-512 registers, integer products by VNNI.
use std::arch::x86_64::*;

use super::simd::Simd;

/// AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

// SAFETY (whole file): the functions are called only where the instruction set was detected (`Isa::detect`), from code
// compiled for it; pointers are valid by the contract of `Simd`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type U = __m512i;
    const REGISTERS: usize = 32;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, lanes: usize) -> __m512 {
        unsafe { _mm512_maskz_loadu_ps(((1u32 << lanes) - 1) as u16, from) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_scales(from: *const u16) -> __m512 {
        unsafe {
            let halves = _mm256_srli_epi16::<1>(_mm256_loadu_si256(from.cast()));
            _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(0x7fc0)))
        }
    }
    #[inline(always)]
    unsafe fn load_zeros(from: *const u16) -> __m512 {
        unsafe {
            let zeros = _mm256_and_si256(_mm256_loadu_si256(from.cast()), _mm256_set1_epi16(0x7f));
            _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(zeros))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store(v: __m512, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn stream(v: __m512, to: *mut f32) {
        unsafe { _mm512_stream_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn fence() {
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn store_f16(v: __m512, to: *mut u16) {
        unsafe {
            _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v))
        }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn abs(a: __m512) -> __m512 {
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    unsafe fn scale_pow2(p: __m512, t: __m512) -> __m512 {
        unsafe {
            let bits = _mm512_slli_epi32::<23>(_mm512_castps_si512(t));
            _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3f80_0000))))
        }
    }
    #[inline(always)]
    unsafe fn sum4(v: [__m512; 4]) -> [f32; 4] {
        unsafe { sum4_quads([folded(v[0]), folded(v[1]), folded(v[2]), folded(v[3])]) }
    }
    #[inline(always)]
    unsafe fn max_lane(v: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(v) }
    }
    #[inline(always)]
    unsafe fn to_f32(v: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn store_i8(v: __m512, to: *mut i8) {
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v))) }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn low_nibbles(v: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(v, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn high_nibbles(v: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(v), _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], v: __m512i) -> __m512i {
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, v)
        }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn reflect(pattern: u32, v: __m512) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(pattern as i32), _mm512_castps_si512(v))) }
    }
    #[inline(always)]
    unsafe fn join_bit<const AT: u32>(low: __m512i, plane: __m512i) -> __m512i {
        unsafe {
            let there = to_bit_4::<AT>(plane);
            _mm512_or_si512(low, _mm512_and_si512(there, _mm512_set1_epi8(16)))
        }
    }
    #[inline(always)]
    unsafe fn join_two_bits<const AT: u32>(low: __m512i, plane: __m512i) -> __m512i {
        unsafe {
            let there = to_bit_4::<AT>(plane);
            _mm512_or_si512(low, _mm512_and_si512(there, _mm512_set1_epi8(48)))
        }
    }
    #[inline(always)]
    unsafe fn byte<const INDEX: u32>(v: __m512i) -> __m512 {
        unsafe {
            let shifted = match INDEX {
                0 => v,
                1 => _mm512_srli_epi32::<8>(v),
                2 => _mm512_srli_epi32::<16>(v),
                _ => _mm512_srli_epi32::<24>(v),
            };
            _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(255)))
        }
    }
    #[inline(always)]
    unsafe fn begin<const OFFSET: i32>(total: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(-OFFSET * total) }
    }
    #[inline(always)]
    unsafe fn dot<const OFFSET: i32>(sum: __m512i, w: (__m512i, __m512i), x: (i32, i32)) -> __m512i {
        unsafe {
            let sum = _mm512_dpbusd_epi32(sum, w.0, _mm512_set1_epi32(x.0));
            _mm512_dpbusd_epi32(sum, w.1, _mm512_set1_epi32(x.1))
        }
    }
}

/// Finishes the sums of four vectors whose lanes i, i+4, i+8 and i+12 are already added.
#[inline(always)]
pub(super) unsafe fn sum4_quads(q: [__m128; 4]) -> [f32; 4] {
    // SAFETY: SSE is part of x86-64; the result has the size of the array.
    unsafe {
        let ab = _mm_add_ps(_mm_movelh_ps(q[0], q[1]), _mm_movehl_ps(q[1], q[0]));
        let cd = _mm_add_ps(_mm_movelh_ps(q[2], q[3]), _mm_movehl_ps(q[3], q[2]));
        let sums = _mm_add_ps(_mm_shuffle_ps::<0b10_00_10_00>(ab, cd), _mm_shuffle_ps::<0b11_01_11_01>(ab, cd));
        let mut out = [0.0; 4];
        _mm_storeu_ps(out.as_mut_ptr(), sums);
        out
    }
}

/// Lane i plus lanes i + 4, i + 8 and i + 12, paired as in the summation tree.
#[inline(always)]
unsafe fn folded(v: __m512) -> __m128 {
    // SAFETY: AVX-512 is available by the caller's contract.
    unsafe {
        let e = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
        _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps::<1>(e))
    }
}

/// Shifts bit `AT` of each byte to bit 4; the other bits are not masked.
#[inline(always)]
unsafe fn to_bit_4<const AT: u32>(plane: __m512i) -> __m512i {
    // SAFETY: AVX-512 is available by the caller's contract.
    unsafe {
        match AT {
            0 => _mm512_slli_epi32::<4>(plane),
            1 => _mm512_slli_epi32::<3>(plane),
            2 => _mm512_slli_epi32::<2>(plane),
            3 => _mm512_slli_epi32::<1>(plane),
            4 => plane,
            5 => _mm512_srli_epi32::<1>(plane),
            6 => _mm512_srli_epi32::<2>(plane),
            _ => _mm512_srli_epi32::<3>(plane),
        }
    }
}
