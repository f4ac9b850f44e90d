//! Vectors as arrays: runs on any CPU, and is the reference that the other instruction sets match bit for bit.
//!
//! On x86-64, where few machines need it, its functions are not inlined: unrolled arrays of 16 take a minute to
//! compile.
use super::simd::Simd;

/// Assumes no instruction set.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn map(a: [f32; 16], f: impl Fn(f32) -> f32) -> [f32; 16] {
    std::array::from_fn(|i| f(a[i]))
}

#[inline(always)]
fn zip(a: [f32; 16], b: [f32; 16], f: impl Fn(f32, f32) -> f32) -> [f32; 16] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

// SAFETY (whole file): pointers are valid by the contract of `Simd`; nothing else is unsafe here.
impl Simd for Portable {
    type F = [f32; 16];
    type I = [i32; 16];
    type U = [u8; 64];
    const REGISTERS: usize = if cfg!(target_arch = "aarch64") { 8 } else { 4 }; // of NEON, of SSE2

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn splat(value: f32) -> [f32; 16] {
        [value; 16]
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load(from: *const f32) -> [f32; 16] {
        // SAFETY: 16 lanes are readable by contract.
        unsafe { from.cast::<[f32; 16]>().read_unaligned() }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_first(from: *const f32, lanes: usize) -> [f32; 16] {
        // SAFETY: `lanes` lanes are readable by contract.
        std::array::from_fn(|i| if i < lanes { unsafe { from.add(i).read_unaligned() } } else { 0.0 })
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_f16(from: *const u16) -> [f32; 16] {
        // SAFETY: 16 lanes are readable by contract.
        std::array::from_fn(|i| f16_to_f32(unsafe { from.add(i).read_unaligned() }))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_scales(from: *const u16) -> [f32; 16] {
        // SAFETY: 16 lanes are readable by contract.
        std::array::from_fn(|i| f16_to_f32(unsafe { from.add(i).read_unaligned() } >> 1 & 0x7fc0))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_zeros(from: *const u16) -> [f32; 16] {
        // SAFETY: 16 lanes are readable by contract.
        std::array::from_fn(|i| f32::from(unsafe { from.add(i).read_unaligned() } & 0x7f))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_bf16(from: *const u16) -> [f32; 16] {
        // SAFETY: 16 lanes are readable by contract.
        std::array::from_fn(|i| f32::from_bits(u32::from(unsafe { from.add(i).read_unaligned() }) << 16))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn store(v: [f32; 16], to: *mut f32) {
        // SAFETY: 16 lanes are writable by contract.
        unsafe { to.cast::<[f32; 16]>().write_unaligned(v) }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn store_f16(v: [f32; 16], to: *mut u16) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: 16 lanes are writable by contract.
            unsafe { to.add(i).write_unaligned(f32_to_f16(v)) }
        }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn add(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a + b)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn sub(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a - b)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a * b)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn div(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a / b)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn fma(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn max(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn min(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn abs(a: [f32; 16]) -> [f32; 16] {
        map(a, f32::abs)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn scale_pow2(p: [f32; 16], t: [f32; 16]) -> [f32; 16] {
        zip(p, t, |p, t| p * f32::from_bits((t.to_bits() << 23).wrapping_add(0x3f80_0000)))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn sum4(v: [[f32; 16]; 4]) -> [f32; 4] {
        v.map(|v| {
            let e: [f32; 8] = std::array::from_fn(|i| v[i] + v[i + 8]);
            let q: [f32; 4] = std::array::from_fn(|i| e[i] + e[i + 4]);
            (q[0] + q[2]) + (q[1] + q[3])
        })
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn max_lane(v: [f32; 16]) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn to_f32(v: [i32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| v[i] as f32)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn store_i8(v: [f32; 16], to: *mut i8) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: 16 bytes are writable by contract.
            unsafe { to.add(i).write(v.round_ties_even() as i32 as i8) }
        }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_bytes(from: *const u8) -> [u8; 64] {
        // SAFETY: 64 bytes are readable by contract.
        unsafe { from.cast::<[u8; 64]>().read_unaligned() }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn low_nibbles(v: [u8; 64]) -> [u8; 64] {
        v.map(|v| v & 15)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn high_nibbles(v: [u8; 64]) -> [u8; 64] {
        v.map(|v| v >> 4)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn look_up(table: &[u8; 16], v: [u8; 64]) -> [u8; 64] {
        v.map(|v| table[usize::from(v & 15)])
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_u8(from: *const u8) -> [f32; 16] {
        // SAFETY: 16 bytes are readable by contract.
        std::array::from_fn(|i| f32::from(unsafe { from.add(i).read() }))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_i8(from: *const u8) -> [f32; 16] {
        // SAFETY: 16 bytes are readable by contract.
        std::array::from_fn(|i| f32::from(unsafe { from.add(i).read() }.cast_signed()))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn reflect(pattern: u32, v: [f32; 16]) -> [f32; 16] {
        map(v, |v| f32::from_bits(pattern.wrapping_sub(v.to_bits())))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn join_bit<const AT: u32>(low: [u8; 64], plane: [u8; 64]) -> [u8; 64] {
        std::array::from_fn(|i| low[i] | (plane[i] >> AT & 1) << 4)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn join_two_bits<const AT: u32>(low: [u8; 64], plane: [u8; 64]) -> [u8; 64] {
        std::array::from_fn(|i| low[i] | (plane[i] >> AT & 3) << 4)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn byte<const INDEX: u32>(v: [u8; 64]) -> [f32; 16] {
        std::array::from_fn(|i| f32::from(v[4 * i + INDEX as usize]))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn begin<const OFFSET: i32>(total: i32) -> [i32; 16] {
        [-OFFSET * total; 16]
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn dot<const OFFSET: i32>(sum: [i32; 16], w: ([u8; 64], [u8; 64]), x: (i32, i32)) -> [i32; 16] {
        let four = |w: &[u8; 64], x: i32, lane: usize| -> i32 {
            let x = x.to_le_bytes();
            (0..4).map(|i| i32::from(w[4 * lane + i]) * i32::from(x[i].cast_signed())).sum()
        };
        std::array::from_fn(|lane| sum[lane] + four(&w.0, x.0, lane) + four(&w.1, x.1, lane))
    }
}

/// IEEE half precision to single, exactly.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let (sign, magnitude) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff));
    // A multiplication rebiases the exponent and normalises subnormals; infinities and NaN get the maximum exponent.
    let value = if magnitude >= 0x7c00 {
        f32::from_bits(0x7f80_0000 | (magnitude & 0x3ff) << 13)
    } else {
        f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000) // 2^112
    };
    f32::from_bits(value.to_bits() | sign)
}

/// Single precision to half, rounded to nearest even.
#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    half::f16::from_f32_const(value).to_bits()
}
