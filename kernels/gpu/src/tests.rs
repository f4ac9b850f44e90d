//! Tests of every function and kernel on the machine's Vulkan or CUDA device, bit by bit against the plain reference.
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::wgpu::WgpuRuntime;
use kernels::device::DeviceId;
use kernels::order::{self, Activation};

use crate::arithmetic::*;
use crate::platform::{Platform, array};

mod compile;
mod draws;
mod encodings;
mod loading;
mod routers;
mod stages;

/// The device under test: the first CUDA device if `MESHNODE_DEVICE` is `cuda`, else the first Vulkan device. `None`, after printing
/// SKIPPED, if there is no Vulkan device and `MESHNODE_REQUIRE` does not require one.
fn device() -> Option<DeviceId> {
    if std::env::var("MESHNODE_DEVICE").is_ok_and(|device| device == "cuda") {
        return Some(DeviceId::Cuda(0));
    }
    let device = DeviceId::Vulkan(0);
    if crate::probe().iter().any(|found| found.id == device) {
        return Some(device);
    }
    let required = std::env::var("MESHNODE_REQUIRE").is_ok_and(|all| all.split(',').any(|one| one == "vulkan"));
    let notes = crate::probe_report().notes.join("; ");
    assert!(!required, "MESHNODE_REQUIRE names vulkan: {notes}");
    eprintln!("SKIPPED: {notes}");
    None
}

#[cube(launch_unchecked)]
fn functions(
    a: &Array<f32>,
    b: &Array<f32>,
    c: &Array<f32>,
    y: &mut Array<f32>,
    words: &mut Array<u32>,
    #[comptime] able: Features,
) {
    if ABSOLUTE_POS < a.len() {
        let (p, q, r) = (a[ABSOLUTE_POS], b[ABSOLUTE_POS], c[ABSOLUTE_POS]);
        let at = ABSOLUTE_POS * 8;
        y[at] = fused(p, q, r, able);
        y[at + 1] = exp(p, able);
        y[at + 2] = reciprocal(q, able);
        y[at + 3] = inverse_sqrt(f32::abs(q), able);
        y[at + 4] = gate(p, q, Activation::Silu, able);
        y[at + 5] = gate(p, q, Activation::Gelu, able);
        y[at + 6] = soft_cap(p, 30.0f32, able);
        y[at + 7] = from_half(to_half(r), able);
        words[ABSOLUTE_POS] = to_half(r);
    }
}

fn random(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    (0..len)
        .map(|_| {
            let s = next();
            (s as f32 / u32::MAX as f32 * 2.0 - 1.0) * 2f32.powi((next() % 40) as i32 - 30)
        })
        .collect()
}

#[test]
fn functions_have_the_bits_of_the_reference() {
    match device() {
        Some(DeviceId::Cuda(_)) => functions_on(&CudaRuntime::client(&Default::default())),
        Some(_) => functions_on(&WgpuRuntime::client(&Default::default())),
        None => {}
    }
}

fn functions_on<R: Platform>(client: &ComputeClient<R>) {
    let able = Features::of(client).unwrap();
    let n = 1 << 15;
    let (a, b, mut c) = (random(n, 1), random(n, 2), random(n, 3));
    for i in (0..n).step_by(3) {
        c[i] = -(a[i] * b[i]); // the sum is the rounding error of the product
    }
    let up = |v: &[f32]| client.create_from_slice(bytemuck::cast_slice(v));
    let (y, words) = (client.empty(n * 8 * 4), client.empty(n * 4));
    // SAFETY: there is one unit per element of `a`, `b` and `c`; it writes one of `words` and its own eight of `y`.
    unsafe {
        functions::launch_unchecked::<R>(
            client,
            CubeCount::Static((n / 64) as u32, 1, 1),
            CubeDim::new_1d(64),
            array(&up(&a), n),
            array(&up(&b), n),
            array(&up(&c), n),
            array(&y, n * 8),
            array(&words, n),
            able,
        );
    }
    let y: Vec<f32> = bytemuck::pod_collect_to_vec(&client.read_one(y).unwrap());
    let words: Vec<u32> = bytemuck::pod_collect_to_vec(&client.read_one(words).unwrap());
    for i in 0..n {
        let (p, q, r) = (a[i], b[i], c[i]);
        let half = ::half::f16::from_f32_const(r);
        assert_eq!(words[i], u32::from(half.to_bits()), "{r}");
        let expected = [
            p.mul_add(q, r),
            order::exp(p),
            order::reciprocal(q),
            order::inverse_sqrt(q.abs()),
            Activation::Silu.gate(p, q),
            Activation::Gelu.gate(p, q),
            order::soft_cap(p, 30.0),
            half.to_f32(),
        ];
        for (k, e) in expected.into_iter().enumerate() {
            assert_eq!(y[i * 8 + k].to_bits(), e.to_bits(), "function {k} of {p} {q} {r}: {} {e}", y[i * 8 + k]);
        }
    }
}
