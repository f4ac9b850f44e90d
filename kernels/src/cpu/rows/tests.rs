//! Row kernels are bit-identical to the scalar reference on every instruction set.
use super::*;
use crate::cpu::Isa;
use crate::cpu::activations::ZERO;
use crate::order;
use crate::order::experts::{Gating, Routing, route, weigh};

fn noise(count: usize, seed: u32) -> Vec<f32> {
    (0..count as u32)
        .map(|i| (i.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0)
        .collect()
}

struct Exp<'a>(&'a mut [f32]);

impl Kernel for Exp<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for v in self.0.chunks_exact_mut(16) {
            // SAFETY: whole vectors.
            unsafe { S::store(exp::<S>(S::load(v.as_ptr())), v.as_mut_ptr()) }
        }
    }
}

fn on_all(mut compute: impl FnMut(Isa) -> Vec<f32>) -> Vec<f32> {
    let expected = compute(Isa::detect());
    for isa in Isa::all() {
        let (found, expected): (Vec<_>, Vec<_>) =
            compute(isa).iter().zip(&expected).map(|(f, e)| (f.to_bits(), e.to_bits())).unzip();
        assert_eq!(found, expected, "{isa:?}");
    }
    expected
}

#[test]
fn exp_matches_the_reference_bit_for_bit() {
    let x: Vec<f32> = (0..160_000).map(|i| (i as f32 - 80_000.0) * 90.0 / 80_000.0).collect();
    let y = on_all(|isa| {
        let mut y = x.clone();
        // SAFETY: the instruction set was detected.
        unsafe { isa.run(Exp(&mut y)) };
        y
    });
    for (x, y) in x.iter().zip(y) {
        assert_eq!(y.to_bits(), order::exp(*x).to_bits(), "e^{x}");
    }
}

#[test]
fn nan_and_overflow_propagate() {
    for isa in Isa::all() {
        let mut y = vec![f32::NAN; 16];
        // SAFETY: the instruction set was detected.
        unsafe { isa.run(Exp(&mut y)) };
        assert!(y.iter().all(|y| y.is_nan()), "{isa:?}");
        for (gate, up) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::MAX, f32::MAX), (f32::MIN, 2.0)] {
            for activation in [Activation::Silu, Activation::Gelu, Activation::Clamped] {
                let (mut x, mut blocks) = (vec![0.0; 64], vec![ZERO; 2]);
                let (gate, up) = (vec![gate; 40], vec![up; 40]);
                let row = GateRow { activation, gate: &gate, up: &up, x: &mut x, blocks: &mut blocks };
                // SAFETY: the instruction set was detected.
                unsafe { isa.run(row) };
                for (block, x) in blocks.iter().zip([x[0], x[39]]) {
                    assert!(block.scale.is_nan() != x.is_finite(), "{isa:?} {activation:?}: {x} has {}", block.scale);
                }
            }
        }
    }
}

#[test]
fn norm_adds_then_scales() {
    for width in [1, 15, 16, 17, 33, 64, 100, 576, 3584] {
        let (before, delta, weight) = (noise(width, 1), noise(width, 2), noise(width, 3));
        let x = on_all(|isa| {
            let (mut hidden, mut x) = (before.clone(), vec![0.0; width]);
            let row =
                NormRow { hidden: &mut hidden, delta: &delta, weight: &weight, eps: 1e-5, x: &mut x, blocks: &mut [] };
            // SAFETY: the instruction set was detected.
            unsafe { isa.run(row) };
            assert!(hidden.iter().zip(&before).zip(&delta).all(|((h, b), d)| *h == b + d));
            x
        });
        let sums: Vec<f32> = before.iter().zip(&delta).map(|(b, d)| b + d).collect();
        assert_eq!(x, order::rms_norm(&sums, &weight, 1e-5));
    }
}

#[test]
fn gates_match_the_reference_bit_for_bit() {
    for (width, activation) in [1, 16, 30, 512]
        .into_iter()
        .flat_map(|w| [Activation::Silu, Activation::Gelu, Activation::Clamped].map(|a| (w, a)))
    {
        let gate: Vec<f32> = noise(width, 4).iter().map(|g| g * 30.0).collect();
        let up = noise(width, 5);
        let x = on_all(|isa| {
            let mut x = vec![0.0; width.next_multiple_of(16)];
            // SAFETY: the instruction set was detected.
            unsafe { isa.run(GateRow { activation, gate: &gate, up: &up, x: &mut x, blocks: &mut [] }) };
            assert!(x[width..].iter().all(|pad| *pad == 0.0), "padding stays zero");
            x
        });
        for ((x, g), u) in x.iter().zip(&gate).zip(&up) {
            assert_eq!(x.to_bits(), activation.gate(*g, *u).to_bits(), "{activation:?} {g} {u}");
        }
    }
}

#[test]
fn rotation_changes_only_the_rotary_pairs() {
    let (size, pairs) = (40, 12);
    let row = noise(3 * size, 6);
    let angles: Vec<f64> = (0..pairs).map(|i| f64::from(i) * 0.37).collect();
    let cos: Vec<f32> = angles.iter().map(|a| a.cos() as f32).collect();
    let sin: Vec<f32> = angles.iter().map(|a| a.sin() as f32).collect();
    for halves in [false, true] {
        let turned = on_all(|isa| {
            let mut row = row.clone();
            let kernel = RotateHeads { row: &mut row, head_dim: size, halves, cos: &cos, sin: &sin, scale: 0.5 };
            // SAFETY: the instruction set was detected.
            unsafe { isa.run(kernel) };
            row
        });
        for head in 0..3 {
            let at = |v: &[f32], i: usize| f64::from(v[head * size + i]);
            for (i, angle) in angles.iter().enumerate() {
                let (a, b) = if halves { (i, i + pairs as usize) } else { (2 * i, 2 * i + 1) };
                let (x, y) = (at(&row, a), at(&row, b));
                assert!((at(&turned, a) - 0.5 * (x * angle.cos() - y * angle.sin())).abs() < 1e-6);
                assert!((at(&turned, b) - 0.5 * (x * angle.sin() + y * angle.cos())).abs() < 1e-6);
            }
            for i in 2 * pairs as usize..size {
                assert_eq!(at(&turned, i), 0.5 * at(&row, i));
            }
        }
    }
}

#[test]
fn shares_and_sums_of_experts_match_the_reference() {
    for count in [1, 7, 16, 33, 60, 128, 500] {
        let scores: Vec<f32> = noise(count, 5).iter().map(|score| score * 9.0).collect();
        let mut total = 0.0;
        let shares = on_all(|isa| {
            let mut shares = scores.clone();
            // SAFETY: the instruction set was detected.
            total = unsafe { isa.run(Shares { scores: &mut shares }) };
            shares
        });
        let sigmoids = on_all(|isa| {
            let mut numbers = scores.clone();
            // SAFETY: the instruction set was detected.
            unsafe { isa.run(Sigmoids { numbers: &mut numbers }) };
            numbers
        });
        for normalised in [false, true] {
            let routing = |gating| Routing { used: count.min(8), gating, normalised, scale: 1.5 };
            let mut found = Vec::new();
            weigh(&scores, &shares, order::reciprocal(total), routing(Gating::Softmax), &mut found);
            assert_eq!(found, route(&scores, None, routing(Gating::Softmax)), "{count}");
            found.clear();
            weigh(&scores, &sigmoids, 1.0, routing(Gating::Sigmoid), &mut found);
            assert_eq!(found, route(&scores, None, routing(Gating::Sigmoid)), "{count}");
        }
    }
    let rows = [noise(100, 1), noise(100, 2), noise(100, 3)];
    let parts: Vec<(f32, &[f32])> = rows.iter().zip([0.3f32, 0.5, 0.2]).map(|(row, f)| (f, &row[..])).collect();
    let sum = on_all(|isa| {
        let mut out = vec![7.0; 100];
        // SAFETY: the instruction set was detected.
        unsafe { isa.run(Combine { parts: &parts, out: &mut out }) };
        out
    });
    assert_eq!(sum, order::experts::combine(&parts, 100));
}
