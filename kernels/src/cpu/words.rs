//! The SIMD abstraction of bit-packed grids: vectors of eight 64-bit words on every instruction set.
//!
//! A supertrait of [`super::simd::Simd`], kept separate because matrix products need none of it.
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512};

/// Operations on vectors of `u64`.
///
/// # Safety of all functions
/// The machine has the instruction set; pointers are valid for `WORDS` words. No alignment is needed.
#[allow(clippy::missing_safety_doc)] // above, for all of them
pub trait Words: Copy {
    /// Words per vector: eight, except for [`One`].
    const WORDS: usize = 8;
    /// A vector of `WORDS` `u64`.
    type W: Copy;

    /// All words `value`.
    unsafe fn splat_word(value: u64) -> Self::W;
    /// Words from memory.
    unsafe fn load_words(from: *const u64) -> Self::W;
    /// Words to memory.
    unsafe fn store_words(v: Self::W, to: *mut u64);
    /// a & b
    unsafe fn and(a: Self::W, b: Self::W) -> Self::W;
    /// a | b
    unsafe fn or(a: Self::W, b: Self::W) -> Self::W;
    /// a ^ b
    unsafe fn xor(a: Self::W, b: Self::W) -> Self::W;
    /// Each word shifted towards its high end.
    unsafe fn left<const N: u32>(v: Self::W) -> Self::W;
    /// Each word shifted towards its low end.
    unsafe fn right<const N: u32>(v: Self::W) -> Self::W;
}

// SAFETY (whole file): the functions are called only where the instruction set was detected (`Isa::detect`), from code
// compiled for it; pointers are valid by the contract of `Words`.
#[cfg(target_arch = "x86_64")]
#[allow(clippy::undocumented_unsafe_blocks)]
impl Words for Avx512 {
    type W = __m512i;

    #[inline(always)]
    unsafe fn splat_word(value: u64) -> __m512i {
        unsafe { _mm512_set1_epi64(value as i64) }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u64) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store_words(v: __m512i, to: *mut u64) {
        unsafe { _mm512_storeu_si512(to.cast(), v) }
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn xor(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_xor_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn left<const N: u32>(v: __m512i) -> __m512i {
        unsafe { _mm512_slli_epi64::<N>(v) }
    }
    #[inline(always)]
    unsafe fn right<const N: u32>(v: __m512i) -> __m512i {
        unsafe { _mm512_srli_epi64::<N>(v) }
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(clippy::undocumented_unsafe_blocks)]
impl Words for Avx2 {
    type W = [__m256i; 2];

    #[inline(always)]
    unsafe fn splat_word(value: u64) -> [__m256i; 2] {
        unsafe { [_mm256_set1_epi64x(value as i64); 2] }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u64) -> [__m256i; 2] {
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(4).cast())] }
    }
    #[inline(always)]
    unsafe fn store_words(v: [__m256i; 2], to: *mut u64) {
        unsafe {
            _mm256_storeu_si256(to.cast(), v[0]);
            _mm256_storeu_si256(to.add(4).cast(), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn and(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        unsafe { [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn xor(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        unsafe { [_mm256_xor_si256(a[0], b[0]), _mm256_xor_si256(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn left<const N: u32>(v: [__m256i; 2]) -> [__m256i; 2] {
        unsafe {
            let count = _mm_cvtsi32_si128(N as i32);
            [_mm256_sll_epi64(v[0], count), _mm256_sll_epi64(v[1], count)]
        }
    }
    #[inline(always)]
    unsafe fn right<const N: u32>(v: [__m256i; 2]) -> [__m256i; 2] {
        unsafe {
            let count = _mm_cvtsi32_si128(N as i32);
            [_mm256_srl_epi64(v[0], count), _mm256_srl_epi64(v[1], count)]
        }
    }
}

// Not inlined on x86-64, for the reason given in `portable.rs`.
impl Words for Portable {
    type W = [u64; 8];

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn splat_word(value: u64) -> [u64; 8] {
        [value; 8]
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_words(from: *const u64) -> [u64; 8] {
        // SAFETY: eight words are readable by contract.
        unsafe { from.cast::<[u64; 8]>().read_unaligned() }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn store_words(v: [u64; 8], to: *mut u64) {
        // SAFETY: eight words are writable by contract.
        unsafe { to.cast::<[u64; 8]>().write_unaligned(v) }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn and(a: [u64; 8], b: [u64; 8]) -> [u64; 8] {
        std::array::from_fn(|i| a[i] & b[i])
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn or(a: [u64; 8], b: [u64; 8]) -> [u64; 8] {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn xor(a: [u64; 8], b: [u64; 8]) -> [u64; 8] {
        std::array::from_fn(|i| a[i] ^ b[i])
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn left<const N: u32>(v: [u64; 8]) -> [u64; 8] {
        v.map(|v| v << N)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn right<const N: u32>(v: [u64; 8]) -> [u64; 8] {
        v.map(|v| v >> N)
    }
}

/// A single word, for the remainder of a row.
#[derive(Clone, Copy)]
pub struct One;

impl Words for One {
    const WORDS: usize = 1;
    type W = u64;

    #[inline(always)]
    unsafe fn splat_word(value: u64) -> u64 {
        value
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u64) -> u64 {
        // SAFETY: a word is readable by contract.
        unsafe { from.read() }
    }
    #[inline(always)]
    unsafe fn store_words(v: u64, to: *mut u64) {
        // SAFETY: a word is writable by contract.
        unsafe { to.write(v) }
    }
    #[inline(always)]
    unsafe fn and(a: u64, b: u64) -> u64 {
        a & b
    }
    #[inline(always)]
    unsafe fn or(a: u64, b: u64) -> u64 {
        a | b
    }
    #[inline(always)]
    unsafe fn xor(a: u64, b: u64) -> u64 {
        a ^ b
    }
    #[inline(always)]
    unsafe fn left<const N: u32>(v: u64) -> u64 {
        v << N
    }
    #[inline(always)]
    unsafe fn right<const N: u32>(v: u64) -> u64 {
        v >> N
    }
}
