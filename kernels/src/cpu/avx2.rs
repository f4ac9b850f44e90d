//! Vectors as pairs of AVX2 registers.
use std::arch::x86_64::*;

use super::avx512::sum4_quads;
use super::simd::Simd;

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Lanes or bytes 0 to 7 (31) and 8 to 15 (32 to 63).
type Pair<T> = [T; 2];

// SAFETY (whole file): the functions are called only where the instruction set was detected (`Isa::detect`), from code
// compiled for it; pointers are valid by the contract of `Simd`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx2 {
    type F = Pair<__m256>;
    type I = Pair<__m256i>;
    type U = Pair<__m256i>;

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
            let mask = |first: i32| _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes as i32 - first), index);
            [_mm256_maskload_ps(from, mask(0)), _mm256_maskload_ps(from.wrapping_add(8), mask(8))]
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Pair<__m256> {
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(from.cast())), _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast()))] }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Pair<__m256> {
        unsafe {
            let half = |from: *const u16| {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            };
            [half(from), half(from.add(8))]
        }
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
        unsafe {
            let half = |p, t| {
                let bits = _mm256_slli_epi32::<23>(_mm256_castps_si256(t));
                _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3f80_0000))))
            };
            [half(p[0], t[0]), half(p[1], t[1])]
        }
    }
    #[inline(always)]
    unsafe fn sum4(v: [Pair<__m256>; 4]) -> [f32; 4] {
        unsafe {
            let fold = |v: Pair<__m256>| {
                let e = _mm256_add_ps(v[0], v[1]);
                _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps::<1>(e))
            };
            sum4_quads([fold(v[0]), fold(v[1]), fold(v[2]), fold(v[3])])
        }
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
    unsafe fn spread<const QUARTER: i32>(v: Pair<__m256>) -> Pair<__m256> {
        unsafe {
            let half = v[QUARTER as usize / 2];
            let v = if QUARTER % 2 == 0 {
                _mm256_permute2f128_ps::<0x00>(half, half)
            } else {
                _mm256_permute2f128_ps::<0x11>(half, half)
            };
            [v, v]
        }
    }
    #[inline(always)]
    unsafe fn expand(from: *const f32) -> Pair<__m256> {
        unsafe {
            let quarter = |i: usize| _mm_set1_ps(from.add(i).read_unaligned());
            [_mm256_set_m128(quarter(1), quarter(0)), _mm256_set_m128(quarter(3), quarter(2))]
        }
    }
    #[inline(always)]
    unsafe fn expand_f16(four: u64) -> Pair<__m256> {
        unsafe { spread_lanes::<0, 1, 2, 3>(_mm256_castps128_ps256(_mm_cvtph_ps(_mm_cvtsi64_si128(four as i64)))) }
    }
    #[inline(always)]
    unsafe fn expand_u8(four: u32) -> Pair<__m256> {
        unsafe {
            let four = _mm256_castsi128_si256(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four as i32)));
            spread_quads(four)
        }
    }
    #[inline(always)]
    unsafe fn expand_i8<const ODD: bool>(eight: u64) -> Pair<__m256> {
        unsafe {
            let eight = _mm_cvtepi8_epi16(_mm_cvtsi64_si128(eight as i64));
            let wanted =
                if ODD { _mm_srai_epi32::<16>(eight) } else { _mm_srai_epi32::<16>(_mm_slli_epi32::<16>(eight)) };
            spread_quads(_mm256_castsi128_si256(wanted))
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
    unsafe fn store_i32(v: Pair<__m256i>, to: *mut i32) {
        unsafe {
            _mm256_storeu_si256(to.cast(), v[0]);
            _mm256_storeu_si256(to.add(8).cast(), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Pair<__m256i> {
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn load_quarters(from: [*const u8; 4]) -> Pair<__m256i> {
        unsafe {
            let (a, b) = (_mm_loadu_si128(from[0].cast()), _mm_loadu_si128(from[1].cast()));
            let (c, d) = (_mm_loadu_si128(from[2].cast()), _mm_loadu_si128(from[3].cast()));
            [_mm256_set_m128i(b, a), _mm256_set_m128i(d, c)]
        }
    }
    #[inline(always)]
    unsafe fn load_twice(from: *const u8) -> Pair<__m256i> {
        unsafe { [_mm256_loadu_si256(from.cast()); 2] }
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
    unsafe fn flip_sign(v: Pair<__m256i>) -> Pair<__m256i> {
        unsafe {
            let sign = _mm256_set1_epi8(-128);
            [_mm256_xor_si256(v[0], sign), _mm256_xor_si256(v[1], sign)]
        }
    }
    #[inline(always)]
    unsafe fn add16_where(v: Pair<__m256i>, bits: Pair<__m256i>, mask: Pair<__m256i>) -> Pair<__m256i> {
        unsafe {
            let half = |v, bits, mask| {
                let absent = _mm256_cmpeq_epi8(_mm256_and_si256(bits, mask), _mm256_setzero_si256());
                _mm256_add_epi8(v, _mm256_andnot_si256(absent, _mm256_set1_epi8(16)))
            };
            [half(v[0], bits[0], mask[0]), half(v[1], bits[1], mask[1])]
        }
    }
    #[inline(always)]
    unsafe fn join_two_bits<const SHIFT: u32>(low: Pair<__m256i>, bits: Pair<__m256i>) -> Pair<__m256i> {
        unsafe {
            let half = |low, bits, shift: i32| {
                let two = _mm256_and_si256(_mm256_srl_epi16(bits, _mm_cvtsi32_si128(shift)), _mm256_set1_epi8(3));
                _mm256_or_si256(low, _mm256_slli_epi16::<4>(two))
            };
            [half(low[0], bits[0], SHIFT as i32), half(low[1], bits[1], SHIFT as i32 + 2)]
        }
    }
    #[inline(always)]
    unsafe fn halves(a: u8, b: u8) -> Pair<__m256i> {
        unsafe { [_mm256_set1_epi8(a as i8), _mm256_set1_epi8(b as i8)] }
    }
    #[inline(always)]
    unsafe fn deal(a: Pair<__m256i>, b: Pair<__m256i>) -> (Pair<__m256i>, Pair<__m256i>) {
        unsafe {
            let even = |v: Pair<__m256i>| _mm256_permute2x128_si256::<0x20>(v[0], v[1]);
            let odd = |v: Pair<__m256i>| _mm256_permute2x128_si256::<0x31>(v[0], v[1]);
            ([even(a), even(b)], [odd(a), odd(b)])
        }
    }
    #[inline(always)]
    unsafe fn weave(a: Pair<__m256i>, b: Pair<__m256i>) -> (Pair<__m256i>, Pair<__m256i>) {
        unsafe {
            let even = |i: usize| _mm256_permute2x128_si256::<0x20>(a[i], b[i]);
            let odd = |i: usize| _mm256_permute2x128_si256::<0x31>(a[i], b[i]);
            ([even(0), even(1)], [odd(0), odd(1)])
        }
    }
    #[inline(always)]
    unsafe fn widen<const QUARTER: i32>(v: Pair<__m256i>) -> Pair<__m256> {
        unsafe {
            let half = v[QUARTER as usize / 2];
            let quarter =
                if QUARTER % 2 == 0 { _mm256_castsi256_si128(half) } else { _mm256_extracti128_si256::<1>(half) };
            let wide = |v| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v));
            [wide(quarter), wide(_mm_srli_si128::<8>(quarter))]
        }
    }
    #[inline(always)]
    unsafe fn dot<const OFFSET: i32>(
        w: (Pair<__m256i>, Pair<__m256i>),
        x: (Pair<__m256i>, Pair<__m256i>),
        neg_sums: *const i32,
    ) -> Pair<__m256i> {
        unsafe {
            if OFFSET == 128 {
                return [
                    _mm256_add_epi32(signed_pairs(w.0[0], x.0[0]), signed_pairs(w.1[0], x.1[0])),
                    _mm256_add_epi32(signed_pairs(w.0[1], x.0[1]), signed_pairs(w.1[1], x.1[1])),
                ];
            }
            // Four products of up to 63 · 127 still fit 16 bits.
            let four = |a, b| _mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(1));
            let low = four(_mm256_maddubs_epi16(w.0[0], x.0[0]), _mm256_maddubs_epi16(w.1[0], x.1[0]));
            let high = four(_mm256_maddubs_epi16(w.0[1], x.0[1]), _mm256_maddubs_epi16(w.1[1], x.1[1]));
            if OFFSET != 8 {
                return [low, high];
            }
            let (neg_low, neg_high) = (_mm256_loadu_si256(neg_sums.cast()), _mm256_loadu_si256(neg_sums.add(8).cast()));
            [
                _mm256_add_epi32(low, _mm256_slli_epi32::<3>(neg_low)),
                _mm256_add_epi32(high, _mm256_slli_epi32::<3>(neg_high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn dot_half<const OFFSET: i32>(w: Pair<__m256i>, x: Pair<__m256i>) -> Pair<__m256i> {
        unsafe {
            let offset = _mm256_set1_epi8(OFFSET as i8);
            [
                _mm256_sub_epi32(pairs(w[0], x[0]), pairs(offset, x[0])),
                _mm256_sub_epi32(pairs(w[1], x[1]), pairs(offset, x[1])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn half_scales(head: u16, eight: u64) -> (Pair<__m256>, Pair<__m256>) {
        unsafe {
            let eight = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(eight as i64)));
            let head = _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(head))));
            let products = _mm256_mul_ps(head, eight);
            (spread_lanes::<0, 2, 4, 6>(products), spread_lanes::<1, 3, 5, 7>(products))
        }
    }
    #[inline(always)]
    unsafe fn q4_1(from: *const u8, blocks: usize) -> (Pair<__m256i>, Pair<__m256i>, Pair<__m256>, Pair<__m256>) {
        unsafe {
            let q = Self::load_quarters([from.add(4), from.add(24), from.add(44), from.add(64)]);
            let head = |b: usize| from.add(20 * b).cast::<i32>().read_unaligned();
            let mut heads = _mm_setr_epi32(head(0), head(1), head(2), head(3));
            if blocks < 4 {
                let there = _mm_cmpgt_epi32(_mm_set1_epi32(blocks as i32), _mm_setr_epi32(0, 1, 2, 3));
                heads = _mm_and_si128(heads, there);
            }
            let heads = _mm256_cvtph_ps(heads); // scale and minimum of each block in turn
            let (scale, min) = (spread_lanes::<0, 2, 4, 6>(heads), spread_lanes::<1, 3, 5, 7>(heads));
            (Self::low_nibbles(q), Self::high_nibbles(q), scale, min)
        }
    }
}

/// Sums of four products each, w below 64: products of pairs stay within 16 bits.
#[inline(always)]
unsafe fn pairs(w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: AVX2 is there by the caller's contract.
    unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)) }
}

/// The same for any w, less 128.
#[inline(always)]
unsafe fn signed_pairs(w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: AVX2 is there by the caller's contract.
    unsafe {
        let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1))
    }
}

/// Four lanes, each filling a quarter.
#[inline(always)]
unsafe fn spread_lanes<const A: i32, const B: i32, const C: i32, const D: i32>(v: __m256) -> Pair<__m256> {
    // SAFETY: AVX2 is there by the caller's contract.
    unsafe {
        [
            _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(A, A, A, A, B, B, B, B)),
            _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(C, C, C, C, D, D, D, D)),
        ]
    }
}

/// Four integers to numbers, each filling a quarter.
#[inline(always)]
unsafe fn spread_quads(four: __m256i) -> Pair<__m256> {
    // SAFETY: AVX2 is there by the caller's contract.
    unsafe { spread_lanes::<0, 1, 2, 3>(_mm256_cvtepi32_ps(four)) }
}
