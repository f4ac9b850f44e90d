//! The functions of [`kernels::order`] on a device: the same additions, multiplications and fused multiply-adds in the same order.
//!
//! Kernel compilers fuse `a * b + c` and rearrange sums with constants, so this file contains neither form.
use cubecl::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind, IntKind, StorageType, UIntKind};
use cubecl::prelude::*;
use half::f16;
use kernels::order::{
    Activation, CHUNKS, CLAMPED, EXP, EXP_MAX, GELU, INVERSE_SQRT_GUESS, LN_2, RECIPROCAL_GUESS, ROUND,
};
use kernels_models::stage::StageError;

use crate::error::failed;
use crate::platform::{Platform, array};

/// Device features that kernels may use. Results do not depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Features {
    /// The device's fused multiply-add rounds once. Mesa's software driver rounds twice; there it is emulated with f64.
    pub fused: bool,
    /// The device converts f16.
    pub halves: bool,
    /// Planes have 32 lanes with shuffles, and the device multiplies 8-bit matrices of 16 x 32 by 32 x 8.
    pub matrices: bool,
}

impl Features {
    /// Queries and tests a device.
    ///
    /// # Errors
    /// The device has neither a fused multiply-add nor f64 to emulate one, or it failed.
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
        // Devices with matrix instructions convert subnormal f16 correctly; not every Vulkan device does.
        let able = Self { fused: rounds_once(client)?, halves: matrices, matrices };
        let doubles = [ElemType::Float(FloatKind::F64), ElemType::UInt(UIntKind::U64)];
        let has = |kind: &ElemType| features.types.storage.contains_key(&StorageType::Scalar(*kind));
        if able.fused || doubles.iter().all(has) {
            return Ok(able);
        }
        Err(StageError::Input(
            "this device has neither a fused multiply-add nor f64, so its results would differ from those of other devices; use \
             the CPU (--device cpu)"
                .into(),
        ))
    }
}

/// Whether the device's fused multiply-add rounds once: tests sums that consist only of the rounding error of a product.
fn rounds_once<R: Platform>(client: &ComputeClient<R>) -> Result<bool, StageError> {
    let x: Vec<f32> = (0..64).map(|i| 1.0 + 2f32.powi(-23) * (2 * i + 1) as f32).collect();
    let (numbers, sums) = (client.create_from_slice(bytemuck::cast_slice(&x)), client.empty(4 * x.len()));
    // SAFETY: there is one unit per element.
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

/// The bits of [`ROUND`].
const ROUND_BITS: u32 = 0x4b40_0000;

/// a · b + c, rounded once.
#[cube]
pub(crate) fn fused(a: f32, b: f32, c: f32, #[comptime] able: Features) -> f32 {
    if comptime!(able.fused) { fma(a, b, c) } else { by_doubles(a, b, c) }
}

/// [`fused`] with f64. The product of two f32 is exact in f64. The sum is rounded to odd, so that the second rounding, to f32, is
/// correct (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
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

/// Returns `x` and hides from the compiler how it was computed. The `min` changes no number: only a NaN has a larger bit pattern.
#[cube]
pub(crate) fn opaque(x: f64) -> f64 {
    f64::reinterpret(min(u64::reinterpret(x), 0xffff_ffff_ffff_fffeu64))
}

/// [`opaque`] for f32: keeps a product from being fused into the sum that uses it.
#[cube]
pub(crate) fn opaque_float(x: f32) -> f32 {
    f32::reinterpret(min(u32::reinterpret(x), 0xffff_fffeu32))
}

/// See [`kernels::order::reciprocal`].
#[cube]
pub(crate) fn reciprocal(x: f32, #[comptime] able: Features) -> f32 {
    let mut y = f32::reinterpret(RECIPROCAL_GUESS - u32::reinterpret(x));
    #[unroll]
    for _ in 0..4u32 {
        y = fused(y, fused(-x, y, 1.0f32, able), y, able);
    }
    y
}

/// See [`kernels::order::inverse_sqrt`].
#[cube]
pub(crate) fn inverse_sqrt(x: f32, #[comptime] able: Features) -> f32 {
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
pub(crate) fn exp(x: f32, #[comptime] able: Features) -> f32 {
    let x = select(x < -EXP_MAX, -EXP_MAX, x); // this order of operands keeps NaN
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
pub(crate) fn sigmoid(x: f32, #[comptime] able: Features) -> f32 {
    reciprocal(1.0f32 + exp(-x, able), able)
}

/// See [`kernels::order::soft_cap`].
#[cube]
pub(crate) fn soft_cap(x: f32, cap: f32, #[comptime] able: Features) -> f32 {
    fused(sigmoid(x * (2.0f32 / cap), able), 2.0f32 * cap, -cap, able)
}

/// See [`Activation::gate`].
#[cube]
pub(crate) fn gate(gate: f32, up: f32, #[comptime] activation: Activation, #[comptime] able: Features) -> f32 {
    let mut argument = gate;
    let mut gate = gate;
    let mut up = up;
    if comptime!(activation == Activation::Clamped) {
        // These operand orders keep NaN.
        gate = select(gate > comptime!(CLAMPED[1]), comptime!(CLAMPED[1]).runtime(), gate);
        up = select(up < comptime!(-CLAMPED[1]), comptime!(-CLAMPED[1]).runtime(), up);
        up = select(up > comptime!(CLAMPED[1]), comptime!(CLAMPED[1]).runtime(), up) + 1.0f32;
        argument = gate * comptime!(CLAMPED[0]);
    }
    if comptime!(activation == Activation::Gelu) {
        argument = gate * fused(gate * gate, comptime!(GELU[1]), comptime!(GELU[0]), able);
    }
    gate * sigmoid(argument, able) * up
}

/// The groups of columns of a chunk as (start, end): see [`kernels::order::chunk`].
#[cube]
pub(crate) fn chunk_range(groups: usize, chunk: usize) -> (usize, usize) {
    (chunk * groups / comptime!(CHUNKS), (chunk + 1) * groups / comptime!(CHUNKS))
}

/// The f16 in the low 16 bits of a word, as f32.
#[cube]
pub(crate) fn from_half(bits: u32, #[comptime] able: Features) -> f32 {
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

/// Both f16 of a word as f32, the low one first.
#[cube]
pub(crate) fn both_halves(word: u32, #[comptime] able: Features) -> (f32, f32) {
    if comptime!(able.halves) {
        let both = Vector::<f32, Const<2>>::cast_from(Vector::<f16, Const<2>>::reinterpret(word));
        (both[0], both[1])
    } else {
        (from_half(word & 0xffffu32, able), from_half(word >> 16u32, able))
    }
}

/// The bits of a number as f16, rounded to nearest even.
#[cube]
pub(crate) fn to_half(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let magnitude = bits & 0x7fff_ffffu32;
    let rounded = (magnitude + 0xfffu32 + ((magnitude >> 13u32) & 1u32) - 0x3800_0000u32) >> 13u32;
    // Below the smallest normal f16: a multiple of 2^-24. Multiplying by a power of two is exact.
    let subnormal = u32::cast_from(f32::round(f32::reinterpret(magnitude) * 16_777_216.0f32));
    let number = select(magnitude < 0x3880_0000u32, subnormal, rounded);
    let infinite = select(magnitude > 0x7f80_0000u32, 0x7e00u32, 0x7c00u32);
    select(magnitude < 0x477f_f000u32, number, infinite) | ((bits >> 16u32) & 0x8000u32)
}

/// Initial value for an integer accumulator that starts at `n`, so that [`from_biased`] needs no conversion instruction.
#[cube]
pub(crate) fn biased(n: i32) -> i32 {
    n + 0x4b40_0000i32
}

/// The float of an integer sum of magnitude below 2²² that was accumulated on [`biased`]`(0)`.
#[cube]
pub(crate) fn from_biased(n: i32) -> f32 {
    f32::reinterpret(n) - ROUND
}
