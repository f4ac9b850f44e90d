//! Vectors as AVX-512 registers, integer products by VNNI.
use std::arch::x86_64::*;

use super::simd::Simd;

/// AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// Lane indices 0 0 0 0 s s s s 2s 2s 2s 2s 3s 3s 3s 3s, each plus `first`.
const fn by_quarters(first: i32, step: i32) -> [i32; 16] {
    let mut lanes = [0; 16];
    let mut i = 0;
    while i < 16 {
        lanes[i] = first + step * (i as i32 / 4);
        i += 1;
    }
    lanes
}

static QUARTER_LANES: [i32; 16] = by_quarters(0, 1);
static EVEN_LANES: [i32; 16] = by_quarters(0, 2);
static ODD_LANES: [i32; 16] = by_quarters(1, 2);
/// Words 1 to 4 of each 5-word Q4_1 block; those of the fourth block from a load that began 4 words later.
static Q4_1_NIBBLES: [i32; 16] = [1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 28, 29, 30, 31];
static Q4_1_HEADS: [i32; 16] = [0, 5, 10, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

const fn byte_of_quarter(step: u8, place: usize) -> [u8; 64] {
    let mut bytes = [0x80; 64]; // no byte: zero
    let mut i = 0;
    while i < 16 {
        bytes[4 * i + place] = (i as u8 / 4) * step;
        i += 1;
    }
    bytes
}

static EXPAND_U8: [u8; 64] = byte_of_quarter(1, 0);
static EXPAND_I8: [u8; 64] = byte_of_quarter(2, 3);

// SAFETY (whole file): the functions are called only where the instruction set was detected (`Isa::detect`), from code
// compiled for it; pointers are valid by the contract of `Simd`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type U = __m512i;

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
        unsafe {
            let fold = |v: __m512| {
                let e = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
                _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps::<1>(e))
            };
            sum4_quads([fold(v[0]), fold(v[1]), fold(v[2]), fold(v[3])])
        }
    }
    #[inline(always)]
    unsafe fn max_lane(v: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(v) }
    }
    #[inline(always)]
    unsafe fn spread<const QUARTER: i32>(v: __m512) -> __m512 {
        unsafe {
            match QUARTER {
                0 => _mm512_shuffle_f32x4::<0b00_00_00_00>(v, v),
                1 => _mm512_shuffle_f32x4::<0b01_01_01_01>(v, v),
                2 => _mm512_shuffle_f32x4::<0b10_10_10_10>(v, v),
                _ => _mm512_shuffle_f32x4::<0b11_11_11_11>(v, v),
            }
        }
    }
    #[inline(always)]
    unsafe fn expand(from: *const f32) -> __m512 {
        unsafe { _mm512_permutexvar_ps(lanes(&QUARTER_LANES), _mm512_castps128_ps512(_mm_loadu_ps(from))) }
    }
    #[inline(always)]
    unsafe fn expand_f16(four: u64) -> __m512 {
        unsafe {
            let four = _mm_cvtph_ps(_mm_cvtsi64_si128(four as i64));
            _mm512_permutexvar_ps(lanes(&QUARTER_LANES), _mm512_castps128_ps512(four))
        }
    }
    #[inline(always)]
    unsafe fn expand_u8(four: u32) -> __m512 {
        unsafe {
            let v = _mm512_shuffle_epi8(_mm512_set1_epi32(four as i32), bytes(&EXPAND_U8));
            _mm512_cvtepi32_ps(v)
        }
    }
    #[inline(always)]
    unsafe fn expand_i8<const ODD: bool>(eight: u64) -> __m512 {
        unsafe {
            let eight = if ODD { eight >> 8 } else { eight };
            let v = _mm512_shuffle_epi8(_mm512_set1_epi64(eight as i64), bytes(&EXPAND_I8));
            _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(v))
        }
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
    unsafe fn store_i32(v: __m512i, to: *mut i32) {
        unsafe { _mm512_storeu_si512(to.cast(), v) }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_quarters(from: [*const u8; 4]) -> __m512i {
        unsafe {
            let (a, b) = (_mm_loadu_si128(from[0].cast()), _mm_loadu_si128(from[1].cast()));
            let (c, d) = (_mm_loadu_si128(from[2].cast()), _mm_loadu_si128(from[3].cast()));
            let low = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b);
            let high = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(c), d);
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }
    #[inline(always)]
    unsafe fn load_twice(from: *const u8) -> __m512i {
        unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(from.cast())) }
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
    unsafe fn flip_sign(v: __m512i) -> __m512i {
        unsafe { _mm512_xor_si512(v, _mm512_set1_epi8(-128)) }
    }
    #[inline(always)]
    unsafe fn add16_where(v: __m512i, bits: __m512i, mask: __m512i) -> __m512i {
        unsafe { _mm512_mask_add_epi8(v, _mm512_test_epi8_mask(bits, mask), v, _mm512_set1_epi8(16)) }
    }
    #[inline(always)]
    unsafe fn join_two_bits<const SHIFT: u32>(low: __m512i, bits: __m512i) -> __m512i {
        unsafe {
            let (near, far) = (_mm256_set1_epi16(SHIFT as i16), _mm256_set1_epi16(SHIFT as i16 + 2));
            let shift = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(near), far);
            let two = _mm512_and_si512(_mm512_srlv_epi16(bits, shift), _mm512_set1_epi8(3));
            _mm512_or_si512(low, _mm512_slli_epi16::<4>(two))
        }
    }
    #[inline(always)]
    unsafe fn halves(a: u8, b: u8) -> __m512i {
        unsafe {
            let (a, b) = (_mm256_set1_epi8(a as i8), _mm256_set1_epi8(b as i8));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
        }
    }
    #[inline(always)]
    unsafe fn deal(a: __m512i, b: __m512i) -> (__m512i, __m512i) {
        unsafe { (_mm512_shuffle_i32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b)) }
    }
    #[inline(always)]
    unsafe fn weave(a: __m512i, b: __m512i) -> (__m512i, __m512i) {
        unsafe {
            let even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
            let odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
            (_mm512_permutex2var_epi64(a, even, b), _mm512_permutex2var_epi64(a, odd, b))
        }
    }
    #[inline(always)]
    unsafe fn widen<const QUARTER: i32>(v: __m512i) -> __m512 {
        unsafe {
            let quarter = match QUARTER {
                0 => _mm512_castsi512_si128(v),
                1 => _mm512_extracti32x4_epi32::<1>(v),
                2 => _mm512_extracti32x4_epi32::<2>(v),
                _ => _mm512_extracti32x4_epi32::<3>(v),
            };
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(quarter))
        }
    }
    #[inline(always)]
    unsafe fn dot<const OFFSET: i32>(w: (__m512i, __m512i), x: (__m512i, __m512i), neg_sums: *const i32) -> __m512i {
        unsafe {
            let start = match OFFSET {
                0 => _mm512_setzero_si512(),
                8 => _mm512_slli_epi32::<3>(_mm512_loadu_si512(neg_sums.cast())),
                _ => _mm512_slli_epi32::<7>(_mm512_loadu_si512(neg_sums.cast())),
            };
            _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(start, w.0, x.0), w.1, x.1)
        }
    }
    #[inline(always)]
    unsafe fn dot_half<const OFFSET: i32>(w: __m512i, x: __m512i) -> __m512i {
        unsafe {
            let offset = _mm512_set1_epi8(OFFSET as i8);
            let zero = _mm512_setzero_si512();
            _mm512_sub_epi32(_mm512_dpbusd_epi32(zero, w, x), _mm512_dpbusd_epi32(zero, offset, x))
        }
    }
    #[inline(always)]
    unsafe fn q4_1(from: *const u8, blocks: usize) -> (__m512i, __m512i, __m512, __m512) {
        unsafe {
            // Four blocks are 20 words; both loads together see them all, and a mask hides what is not there.
            let there = (1u32 << (5 * blocks)) - 1;
            let a = _mm512_maskz_loadu_epi32(there as u16, from.cast());
            let b = _mm512_maskz_loadu_epi32((there >> 4) as u16, from.add(16).cast());
            let q = _mm512_permutex2var_epi32(a, lanes(&Q4_1_NIBBLES), b);
            let heads = _mm512_castsi512_si128(_mm512_permutexvar_epi32(lanes(&Q4_1_HEADS), a));
            let heads = _mm512_castps256_ps512(_mm256_cvtph_ps(heads));
            (
                Self::low_nibbles(q),
                Self::high_nibbles(q),
                _mm512_permutexvar_ps(lanes(&EVEN_LANES), heads),
                _mm512_permutexvar_ps(lanes(&ODD_LANES), heads),
            )
        }
    }
}

/// Ends the sums of four vectors whose lanes i, i+4, i+8 and i+12 are added already.
#[inline(always)]
pub(super) unsafe fn sum4_quads(q: [__m128; 4]) -> [f32; 4] {
    // SAFETY: SSE is part of x86-64; the result has the size of the array.
    unsafe {
        let pair = |a, b| _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
        let (ab, cd) = (pair(q[0], q[1]), pair(q[2], q[3]));
        let sums = _mm_add_ps(_mm_shuffle_ps::<0b10_00_10_00>(ab, cd), _mm_shuffle_ps::<0b11_01_11_01>(ab, cd));
        let mut out = [0.0; 4];
        _mm_storeu_ps(out.as_mut_ptr(), sums);
        out
    }
}

#[inline(always)]
unsafe fn lanes(table: &'static [i32; 16]) -> __m512i {
    // SAFETY: the table has 64 bytes; AVX-512 is there by the caller's contract.
    unsafe { _mm512_loadu_si512(table.as_ptr().cast()) }
}

#[inline(always)]
unsafe fn bytes(table: &'static [u8; 64]) -> __m512i {
    // SAFETY: the table has 64 bytes; AVX-512 is there by the caller's contract.
    unsafe { _mm512_loadu_si512(table.as_ptr().cast()) }
}
