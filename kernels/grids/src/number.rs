//! Storage formats of field values: `f32`, or half precision for half the memory. Arithmetic is always in `f32`.
use bytemuck::{Pod, Zeroable};
use kernels::cpu::simd::Simd;

/// IEEE half precision of the value times 2^15. Stored values (populations minus their weights) are small; the scale
/// keeps them out of the subnormal range. Magnitudes up to 2 fit.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub struct Half(u16);

const SCALE: f32 = 32768.0;

/// Element types of value planes.
///
/// # Safety of the unsafe functions
/// The machine has the instruction set of `S`; the pointer is valid for 16 values.
#[allow(clippy::missing_safety_doc)] // above, for all of them
pub trait Number: Pod + Send + Sync {
    /// The number as `f32`, exactly.
    fn value(self) -> f32;
    /// The number nearest to an `f32`.
    fn of(value: f32) -> Self;

    /// Loads 16 values.
    unsafe fn load<S: Simd>(from: *const Self) -> S::F;

    /// Stores 16 values; `STREAM` uses non-temporal stores.
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
        // No non-temporal store: at half a cache line per store it is much slower.
        // SAFETY: the caller's contract.
        unsafe { S::store_f16(S::mul(v, S::splat(SCALE)), to.cast()) }
    }
}
