//! The functions of [`kernels::order`] for a device: additions, multiplications and fused multiply-adds in the same order.
//!
//! Compilers of kernels fuse `a * b + c` and rearrange sums with constants where they see them, so neither is written here.
use cubecl::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind, IntKind, StorageType, UIntKind};
use cubecl::prelude::*;
use half::f16;
use kernels::order::{Activation, EXP, EXP_MAX, GELU, INVERSE_SQRT_GUESS, LN_2, RECIPROCAL_GUESS, ROUND};
use kernels::stage::StageError;

use crate::engine::failed;
use crate::{Platform, array};

/// What the kernels may use of a device. Results do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Abilities {
    /// A fused multiply-add rounds once. Mesa's software driver computes a product and a sum instead; there it is made of doubles.
    pub fused: bool,
    /// Halves are converted by the device.
    pub halves: bool,
    /// Planes are 32 lanes that shuffle, and multiply 8-bit matrices of 16 x 32 by 32 x 8.
    pub matrices: bool,
}

impl Abilities {
    /// What a device can do.
    ///
    /// # Errors
    /// It has neither a fused multiply-add nor doubles to make one of, or fails.
    pub fn of<R: Platform>(client: &ComputeClient<R>) -> Result<Self, StageError> {
        let (hardware, features) = (&client.properties().hardware, client.features());
        let integer = |kind| StorageType::Scalar(ElemType::Int(kind));
        let config = MmaConfig {
            a_type: StorageType::Scalar(ElemType::UInt(UIntKind::U8)),
            b_type: integer(IntKind::I8),
            cd_type: integer(IntKind::I32),
            m: 16,
            n: 8,
            k: 32,
        };
        let planes = hardware.plane_size_min == 32 && hardware.plane_size_max == 32;
        let matrices = planes && features.matmul.mma.contains(&config);
        // Where there are matrix instructions there are halves with all their subnormal numbers: not so on every Vulkan device.
        let able = Self { fused: rounds_once(client)?, halves: matrices, matrices };
        let doubles = [ElemType::Float(FloatKind::F64), ElemType::UInt(UIntKind::U64)];
        let has = |kind: &ElemType| features.types.storage.contains_key(&StorageType::Scalar(*kind));
        if able.fused || doubles.iter().all(has) {
            return Ok(able);
        }
        Err(StageError::Input(
            "this device has no fused multiply-add and no doubles, so its results would differ from other devices'; use the \
             processor (--device cpu)"
                .into(),
        ))
    }
}

/// Whether the device's own fused multiply-add rounds once: products whose rounding errors are all that is left.
fn rounds_once<R: Platform>(client: &ComputeClient<R>) -> Result<bool, StageError> {
    let x: Vec<f32> = (0..64).map(|i| 1.0 + 2f32.powi(-23) * (2 * i + 1) as f32).collect();
    let (numbers, sums) = (client.create_from_slice(bytemuck::cast_slice(&x)), client.empty(4 * x.len()));
    // SAFETY: as many units as numbers.
    unsafe {
        rounds_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(64),
            array(&numbers, x.len()),
            array(&sums, x.len()),
        );
    }
    let sums = client.read_one(sums).map_err(failed)?;
    Ok(bytemuck::pod_collect_to_vec::<u8, f32>(&sums) == x.iter().map(|x| x.mul_add(*x, -(x * x))).collect::<Vec<_>>())
}

#[cube(launch_unchecked)]
fn rounds_kernel(x: &Array<f32>, sums: &mut Array<f32>) {
    let x = x[ABSOLUTE_POS];
    sums[ABSOLUTE_POS] = fma(x, x, -(x * x));
}

/// The pattern of [`ROUND`].
const ROUND_BITS: u32 = 0x4b40_0000;

/// a · b + c, rounded once.
#[cube]
pub(crate) fn fused(a: f32, b: f32, c: f32, #[comptime] able: Abilities) -> f32 {
    if comptime!(able.fused) { fma(a, b, c) } else { by_doubles(a, b, c) }
}

/// The product of two floats is exact as a double. The sum is rounded to odd, so that rounding it once more to a float is right
/// (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
#[cube]
fn by_doubles(a: f32, b: f32, c: f32) -> f32 {
    let product = f64::cast_from(a) * f64::cast_from(b);
    let addend = f64::cast_from(c);
    let sum = opaque(product + addend);
    let other = opaque(sum - product);
    let back = opaque(sum - other);
    let rest = (product - back) + (addend - other);
    let bits = u64::reinterpret(sum);
    let toward_zero = select((rest < 0.0f64) != (sum < 0.0f64), bits - 1u64, bits);
    let odd = select(rest == 0.0f64, bits, toward_zero | 1u64);
    f32::cast_from(f64::reinterpret(odd))
}

/// The same number, of which the compiler does not know how it was computed: no pattern of a number is larger than this.
#[cube]
pub(crate) fn opaque(x: f64) -> f64 {
    f64::reinterpret(min(u64::reinterpret(x), 0xffff_ffff_ffff_fffeu64))
}

/// As [`opaque`]: a product that passes through it is not fused with the sum that it goes into.
#[cube]
pub(crate) fn opaque_float(x: f32) -> f32 {
    f32::reinterpret(min(u32::reinterpret(x), 0xffff_fffeu32))
}

/// See [`kernels::order::reciprocal`].
#[cube]
pub(crate) fn reciprocal(x: f32, #[comptime] able: Abilities) -> f32 {
    let mut y = f32::reinterpret(RECIPROCAL_GUESS - u32::reinterpret(x));
    #[unroll]
    for _ in 0..4u32 {
        y = fused(y, fused(-x, y, 1.0f32, able), y, able);
    }
    y
}

/// See [`kernels::order::inverse_sqrt`].
#[cube]
pub(crate) fn inverse_sqrt(x: f32, #[comptime] able: Abilities) -> f32 {
    let half = 0.5f32 * x;
    let mut y = f32::reinterpret(INVERSE_SQRT_GUESS - (u32::reinterpret(x) >> 1u32));
    #[unroll]
    for _ in 0..4u32 {
        y *= fused(-(half * y), y, 1.5f32, able);
    }
    y
}

/// See [`kernels::order::exp`].
#[allow(clippy::needless_range_loop, reason = "loops of kernels are unrolled over numbers")]
#[cube]
pub(crate) fn exp(x: f32, #[comptime] able: Abilities) -> f32 {
    let x = select(x < -EXP_MAX, -EXP_MAX, x); // in this order NaN stays
    let x = select(x > EXP_MAX, EXP_MAX, x);
    let t = u32::reinterpret(fused(x, comptime!(std::f32::consts::LOG2_E), ROUND, able));
    let n = f32::cast_from(i32::cast_from(t - ROUND_BITS));
    let r = fused(n, comptime!(LN_2[1]), fused(n, comptime!(LN_2[0]), x, able), able);
    let mut p = comptime!(EXP[0]).runtime();
    #[unroll]
    for i in 1..8usize {
        p = fused(p, r, comptime!(EXP[i]), able);
    }
    p * f32::reinterpret((t << 23u32) + 0x3f80_0000u32)
}

/// See [`kernels::order::sigmoid`].
#[cube]
fn sigmoid(x: f32, #[comptime] able: Abilities) -> f32 {
    reciprocal(1.0f32 + exp(-x, able), able)
}

/// See [`kernels::order::soft_cap`].
#[cube]
pub(crate) fn soft_cap(x: f32, cap: f32, #[comptime] able: Abilities) -> f32 {
    fused(sigmoid(x * (2.0f32 / cap), able), 2.0f32 * cap, -cap, able)
}

/// See [`Activation::gate`].
#[cube]
pub(crate) fn gate(gate: f32, up: f32, #[comptime] activation: Activation, #[comptime] able: Abilities) -> f32 {
    let mut argument = gate;
    if comptime!(activation == Activation::Gelu) {
        argument = gate * fused(gate * gate, comptime!(GELU[1]), comptime!(GELU[0]), able);
    }
    gate * sigmoid(argument, able) * up
}

/// The half in the low 16 bits of a word.
#[cube]
pub(crate) fn from_half(bits: u32, #[comptime] able: Abilities) -> f32 {
    if comptime!(able.halves) {
        f32::cast_from(Vector::<f16, Const<2>>::reinterpret(bits)[0])
    } else {
        let magnitude = bits & 0x7fffu32;
        let normal = f32::reinterpret((magnitude << 13u32) + 0x3800_0000u32);
        let subnormal = f32::cast_from(magnitude) * 5.960_464_5e-8f32; // 2^-24
        let number = select(magnitude < 0x400u32, subnormal, normal);
        let number = select(magnitude < 0x7c00u32, number, f32::reinterpret(0x7f80_0000u32));
        f32::reinterpret(u32::reinterpret(number) | ((bits & 0x8000u32) << 16u32))
    }
}

/// Both halves of a word, the low one first.
#[cube]
pub(crate) fn both_halves(word: u32, #[comptime] able: Abilities) -> (f32, f32) {
    if comptime!(able.halves) {
        let both = Vector::<f32, Const<2>>::cast_from(Vector::<f16, Const<2>>::reinterpret(word));
        (both[0], both[1])
    } else {
        (from_half(word & 0xffffu32, able), from_half(word >> 16u32, able))
    }
}

/// A number as a half, rounded to nearest even.
#[cube]
pub(crate) fn to_half(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let magnitude = bits & 0x7fff_ffffu32;
    let rounded = (magnitude + 0xfffu32 + ((magnitude >> 13u32) & 1u32) - 0x3800_0000u32) >> 13u32;
    // Below the smallest normal half: a multiple of 2^-24. Multiplying by a power of two is exact.
    let subnormal = u32::cast_from(f32::round(f32::reinterpret(magnitude) * 16_777_216.0f32));
    let number = select(magnitude < 0x3880_0000u32, subnormal, rounded);
    let infinite = select(magnitude > 0x7f80_0000u32, 0x7e00u32, 0x7c00u32);
    select(magnitude < 0x477f_f000u32, number, infinite) | ((bits >> 16u32) & 0x8000u32)
}

/// A small integer as the pattern that an accumulator begins with, so that adding to it needs no conversion: see [`from_biased`].
#[cube]
pub(crate) fn biased(n: i32) -> i32 {
    n + 0x4b40_0000i32
}

/// The float of an integer of magnitude below 2²² that was added to [`biased`]`(0)`.
#[cube]
pub(crate) fn from_biased(n: i32) -> f32 {
    f32::reinterpret(n) - ROUND
}
