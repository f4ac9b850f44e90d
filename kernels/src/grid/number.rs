//! Numbers of a cell that take half the memory: arithmetic is done in `f32`, and rounded when it is stored.
use bytemuck::{Pod, Zeroable};

use crate::cpu::simd::Simd;

/// IEEE half precision of 2^15 times the number: what is left of a population less its weight is small, and would lose its
/// digits among numbers too small for the usual range. Up to ±2 fit.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct Half(u16);

const SCALE: f32 = 32768.0;

/// What planes of numbers are made of.
pub(crate) trait Number: Pod + Send + Sync {
    fn value(self) -> f32;
    fn of(value: f32) -> Self;

    /// 16 numbers.
    unsafe fn load<S: Simd>(from: *const Self) -> S::F;

    /// 16 numbers; `STREAM`: past the caches.
    unsafe fn put<S: Simd, const STREAM: bool>(v: S::F, to: *mut Self);
}

impl Number for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }

    #[inline(always)]
    fn of(value: f32) -> Self {
        value
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load(from) }
    }

    #[inline(always)]
    unsafe fn put<S: Simd, const STREAM: bool>(v: S::F, to: *mut Self) {
        // SAFETY: the caller's contract.
        unsafe { if STREAM { S::stream(v, to) } else { S::store(v, to) } }
    }
}

impl Number for Half {
    #[inline(always)]
    fn value(self) -> f32 {
        half::f16::from_bits(self.0).to_f32() * SCALE.recip()
    }

    #[inline(always)]
    fn of(value: f32) -> Self {
        Self(half::f16::from_f32(value * SCALE).to_bits())
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::mul(S::load_f16(from.cast()), S::splat(SCALE.recip())) }
    }

    #[inline(always)]
    unsafe fn put<S: Simd, const STREAM: bool>(v: S::F, to: *mut Self) {
        // Not past the caches: half a line at a time, that is slower by far.
        // SAFETY: the caller's contract.
        unsafe { S::store_f16(S::mul(v, S::splat(SCALE)), to.cast()) }
    }
}
