//! Tests of the block formats against ggml's definition, element by element.
use half::f16;

use super::{
    IQ2_VALUES, IQ3_S_VALUES, IQ3_XXS_VALUES, IQ4_VALUES, MXFP4_VALUES, QUANT_TYPES, QuantType, grids, quantize,
    random_blocks,
};

/// The magnitudes of an entry of a code book, as ggml's grids store them: bytes.
fn entry(grid: &[u16], index: usize, values: &[i8; 16]) -> Vec<f32> {
    let bits = if values[2] == IQ2_VALUES[2] { 2 } else { 4 };
    (0..16 / bits).map(|i| f32::from(values[usize::from(grid[index] >> (i * bits)) % (1 << bits)])).collect()
}

/// ggml's scalar code, transcribed with its own pointer arithmetic and f32 arithmetic: independent of the formulas it checks.
fn ggml(kind: QuantType, block: &[u8]) -> Vec<f32> {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    let scale_min = |j: usize, q: &[u8]| {
        if j < 4 {
            (q[j] & 63, q[j + 4] & 63)
        } else {
            ((q[j + 4] & 0xF) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4))
        }
    };
    let mut y = Vec::new();
    match kind {
        QuantType::F32 => y.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
        QuantType::F16 => y.push(half(0)),
        QuantType::Bf16 => y.push(f32::from_bits(u32::from(u16::from_le_bytes([block[0], block[1]])) << 16)),
        QuantType::Q4_0 => {
            y = vec![0.0; 32];
            for j in 0..16 {
                y[j] = (i32::from(block[2 + j] & 0xF) - 8) as f32 * half(0);
                y[j + 16] = (i32::from(block[2 + j] >> 4) - 8) as f32 * half(0);
            }
        }
        QuantType::Q4_1 => {
            y = vec![0.0; 32];
            for j in 0..16 {
                y[j] = f32::from(block[4 + j] & 0xF) * half(0) + half(2);
                y[j + 16] = f32::from(block[4 + j] >> 4) * half(0) + half(2);
            }
        }
        QuantType::Q5_0 | QuantType::Q5_1 => {
            let one = kind == QuantType::Q5_1;
            let at = if one { 4 } else { 2 };
            let qh = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
            y = vec![0.0; 32];
            for j in 0..16 {
                let xh_0 = (((qh >> j) << 4) & 0x10) as u8;
                let xh_1 = ((qh >> (j + 12)) & 0x10) as u8;
                let (x0, x1) = ((block[at + 4 + j] & 0xF) | xh_0, (block[at + 4 + j] >> 4) | xh_1);
                if one {
                    y[j] = f32::from(x0) * half(0) + half(2);
                    y[j + 16] = f32::from(x1) * half(0) + half(2);
                } else {
                    y[j] = (i32::from(x0) - 16) as f32 * half(0);
                    y[j + 16] = (i32::from(x1) - 16) as f32 * half(0);
                }
            }
        }
        QuantType::Q8_0 => y.extend(block[2..].iter().map(|&q| f32::from(q as i8) * half(0))),
        QuantType::Iq2Xxs | QuantType::Iq3Xxs => {
            let three = kind == QuantType::Iq3Xxs;
            for ib32 in 0..8 {
                let (gas, qs) = if three { (66 + 4 * ib32, 2 + 8 * ib32) } else { (6 + 8 * ib32, 2 + 8 * ib32) };
                let aux32 = u32::from_le_bytes(block[gas..gas + 4].try_into().unwrap());
                let db = half(0) * (0.5 + (aux32 >> 28) as f32) * if three { 0.5 } else { 0.25 };
                for l in 0..4 {
                    let seven = (aux32 >> (7 * l)) & 127;
                    let signs = seven | (seven.count_ones() % 2) << 7;
                    let grid = if three {
                        let first = entry(&grids::IQ3_XXS, usize::from(block[qs + 2 * l]), &IQ3_XXS_VALUES);
                        [first, entry(&grids::IQ3_XXS, usize::from(block[qs + 2 * l + 1]), &IQ3_XXS_VALUES)].concat()
                    } else {
                        entry(&grids::IQ2_XXS, usize::from(block[qs + l]), &IQ2_VALUES)
                    };
                    y.extend((0..8).map(|j| db * grid[j] * if signs & (1 << j) == 0 { 1.0 } else { -1.0 }));
                }
            }
        }
        QuantType::Iq2Xs | QuantType::Iq2S => {
            let s = kind == QuantType::Iq2S;
            for ib32 in 0..8 {
                let scales = block[if s { 74 } else { 66 } + ib32];
                let db = [scales & 0xf, scales >> 4].map(|scale| half(0) * (0.5 + f32::from(scale)) * 0.25);
                for l in 0..4 {
                    let (grid, signs) = if s {
                        let high = (usize::from(block[66 + ib32]) << (8 - 2 * l)) & 0x300;
                        let index = usize::from(block[2 + 4 * ib32 + l]) | high;
                        (entry(&grids::IQ2_S, index, &IQ2_VALUES), u32::from(block[34 + 4 * ib32 + l]))
                    } else {
                        let at = 2 + 8 * ib32 + 2 * l;
                        let q = u32::from(u16::from_le_bytes([block[at], block[at + 1]]));
                        let signs = (q >> 9) | ((q >> 9).count_ones() % 2) << 7;
                        (entry(&grids::IQ2_XS, (q & 511) as usize, &IQ2_VALUES), signs)
                    };
                    y.extend((0..8).map(|j| db[l / 2] * grid[j] * if signs & (1 << j) == 0 { 1.0 } else { -1.0 }));
                }
            }
        }
        QuantType::Iq3S => {
            for ib32 in 0..8 {
                let scale = block[106 + ib32 / 2] >> (4 * (ib32 % 2)) & 0xf;
                let db = half(0) * f32::from(1 + 2 * scale);
                for l in 0..4 {
                    for (k, at) in [2 * l, 2 * l + 1].into_iter().enumerate() {
                        let ninth = (usize::from(block[66 + ib32]) << (8 - at)) & 256;
                        let index = usize::from(block[2 + 8 * ib32 + at]) | ninth;
                        let signs = block[74 + 4 * ib32 + l] >> (4 * k);
                        let grid = entry(&grids::IQ3_S, index, &IQ3_S_VALUES);
                        y.extend((0..4).map(|j| db * grid[j] * if signs & (1 << j) == 0 { 1.0 } else { -1.0 }));
                    }
                }
            }
        }
        QuantType::Q3K => {
            let (m1, m2) = (0x0303_0303u32, 0x0f0f_0f0fu32);
            let a: [u32; 3] = std::array::from_fn(|i| u32::from_le_bytes(block[96 + 4 * i..][..4].try_into().unwrap()));
            let aux = [
                (a[0] & m2) | ((a[2] & m1) << 4),
                (a[1] & m2) | (((a[2] >> 2) & m1) << 4),
                ((a[0] >> 4) & m2) | (((a[2] >> 4) & m1) << 4),
                ((a[1] >> 4) & m2) | (((a[2] >> 6) & m1) << 4),
            ];
            let scales = aux.map(u32::to_le_bytes).concat();
            let (mut q, mut m, mut is) = (32, 1u8, 0);
            for _ in (0..256).step_by(128) {
                for shift in (0..8).step_by(2) {
                    for l in 0..32 {
                        let dl = half(108) * (f32::from(scales[is + l / 16]) - 32.0);
                        let off = if block[l] & m == 0 { 4 } else { 0 };
                        y.push(dl * f32::from(((block[q + l] >> shift) & 3) as i8 - off));
                    }
                    is += 2;
                    m = m.wrapping_shl(1);
                }
                q += 32;
            }
        }
        QuantType::Iq4Nl | QuantType::Mxfp4 => {
            let four = kind == QuantType::Mxfp4;
            let d = if four { f32::from_bits((u32::from(block[0]) - 1) << 23) } else { half(0) };
            let (at, values) = if four { (1, MXFP4_VALUES) } else { (2, IQ4_VALUES) };
            y = vec![0.0; 32];
            for j in 0..16 {
                y[j] = d * f32::from(values[usize::from(block[at + j] & 0xf)]);
                y[j + 16] = d * f32::from(values[usize::from(block[at + j] >> 4)]);
            }
        }
        QuantType::Q4Z => {
            let word = u16::from_le_bytes([block[0], block[1]]);
            let (mantissa, exponent) = (f32::from(word >> 7 & 15), i32::from(word >> 11));
            let scale =
                if exponent == 0 { mantissa } else { (16.0 + mantissa) * 2f32.powi(exponent - 1) } * 2f32.powi(-18);
            let weight = |code: u8| (8.0 * f32::from(code) - f32::from(word & 127)) / 8.0 * scale;
            y = block[2..].iter().map(|b| b & 15).chain(block[2..].iter().map(|b| b >> 4)).map(weight).collect();
        }
        QuantType::Iq4Xs => {
            let scales_h = u16::from_le_bytes([block[2], block[3]]);
            let mut qs = 8;
            for ib in 0..8 {
                let low = u16::from((block[4 + ib / 2] >> (4 * (ib % 2))) & 0xf);
                let ls = i32::from(low | (((scales_h >> (2 * ib)) & 3) << 4));
                let dl = half(0) * (ls - 32) as f32;
                y.extend((0..16).map(|j| dl * f32::from(IQ4_VALUES[usize::from(block[qs + j] & 0xf)])));
                y.extend((0..16).map(|j| dl * f32::from(IQ4_VALUES[usize::from(block[qs + j] >> 4)])));
                qs += 16;
            }
        }
        QuantType::Q4K | QuantType::Q5K => {
            let five = kind == QuantType::Q5K;
            let (mut q, qh) = if five { (48, &block[16..48]) } else { (16, &block[..0]) };
            let (mut is, mut u1, mut u2) = (0, 1u8, 2u8);
            for _ in (0..256).step_by(64) {
                let (sc, m) = scale_min(is, &block[4..16]);
                let (d1, m1) = (half(0) * f32::from(sc), half(2) * f32::from(m));
                let (sc, m) = scale_min(is + 1, &block[4..16]);
                let (d2, m2) = (half(0) * f32::from(sc), half(2) * f32::from(m));
                for l in 0..32 {
                    let high = if five && qh[l] & u1 != 0 { 16 } else { 0 };
                    y.push(d1 * f32::from((block[q + l] & 0xF) + high) - m1);
                }
                for l in 0..32 {
                    let high = if five && qh[l] & u2 != 0 { 16 } else { 0 };
                    y.push(d2 * f32::from((block[q + l] >> 4) + high) - m2);
                }
                q += 32;
                is += 2;
                (u1, u2) = (u1 << 2, u2 << 2);
            }
        }
        QuantType::Q6K => {
            y = vec![0.0; 256];
            let d = half(208);
            let (mut ql, mut qh, mut sc, mut at) = (0, 128, 192, 0);
            for _ in (0..256).step_by(128) {
                for l in 0..32 {
                    let is = l / 16;
                    let q1 = ((block[ql + l] & 0xF) | ((block[qh + l] & 3) << 4)) as i8 - 32;
                    let q2 = ((block[ql + l + 32] & 0xF) | (((block[qh + l] >> 2) & 3) << 4)) as i8 - 32;
                    let q3 = ((block[ql + l] >> 4) | (((block[qh + l] >> 4) & 3) << 4)) as i8 - 32;
                    let q4 = ((block[ql + l + 32] >> 4) | (((block[qh + l] >> 6) & 3) << 4)) as i8 - 32;
                    let s = |k: usize| f32::from(block[sc + is + k] as i8);
                    y[at + l] = d * s(0) * f32::from(q1);
                    y[at + l + 32] = d * s(2) * f32::from(q2);
                    y[at + l + 64] = d * s(4) * f32::from(q3);
                    y[at + l + 96] = d * s(6) * f32::from(q4);
                }
                (at, ql, qh, sc) = (at + 128, ql + 64, qh + 32, sc + 8);
            }
        }
    }
    y
}

#[test]
fn every_format_dequantises_as_ggml_does() {
    for kind in QUANT_TYPES {
        let bytes = random_blocks(kind, 200, 7);
        let len = 200 * kind.block_len();
        let (mut single, mut double) = (vec![0f32; len], vec![0f64; len]);
        kind.dequantize(&bytes, &mut single);
        kind.dequantize_f64(&bytes, &mut double);
        let expected: Vec<f32> = bytes.chunks_exact(kind.block_bytes()).flat_map(|b| ggml(kind, b)).collect();
        // 0.0 == -0.0, so zeros of either sign compare equal.
        assert_eq!(single, expected, "{}", kind.name());
        for (s, d) in single.iter().zip(&double) {
            assert!((f64::from(*s) - d).abs() <= d.abs() * 6e-8, "{}: {s} for {d}", kind.name());
            assert!(d.abs() <= 2.5, "{}: {d} from a random block", kind.name());
        }
    }
}

/// Blocks of random bytes with the weights that ggml's Python package computes from them.
#[test]
fn formats_dequantise_as_the_gguf_package_does() {
    let text = include_str!("../../../tests/oracles/gguf_blocks.txt");
    let mut formats = 0;
    for format in text.split("\n\n").skip(1) {
        let mut lines = format.lines();
        let name = lines.next().expect("a name");
        let kind = QUANT_TYPES.into_iter().find(|kind| kind.name() == name).expect("a format");
        let [bytes, expected] = ["bytes", "weights"].map(|what| {
            let digits = lines.next().and_then(|line| line.strip_prefix(what)).expect(what).trim();
            digits
                .as_bytes()
                .chunks(2)
                .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
                .collect::<Vec<u8>>()
        });
        let mut weights = vec![0f32; expected.len() / 4];
        kind.dequantize(&bytes, &mut weights);
        for (i, (weight, expected)) in weights.iter().zip(expected.chunks_exact(4)).enumerate() {
            let expected = f32::from_le_bytes(expected.try_into().unwrap());
            assert_eq!(*weight, expected, "{name}: weight {i}"); // zeros of either sign compare equal
        }
        formats += 1;
    }
    assert_eq!(formats, 9);
}

#[test]
fn type_numbers_and_block_sizes_match_ggml() {
    let table = [
        (QuantType::F32, 0, 1, 4),
        (QuantType::F16, 1, 1, 2),
        (QuantType::Q4_0, 2, 32, 18),
        (QuantType::Q4_1, 3, 32, 20),
        (QuantType::Q5_0, 6, 32, 22),
        (QuantType::Q5_1, 7, 32, 24),
        (QuantType::Q8_0, 8, 32, 34),
        (QuantType::Q3K, 11, 256, 110),
        (QuantType::Q4K, 12, 256, 144),
        (QuantType::Q5K, 13, 256, 176),
        (QuantType::Q6K, 14, 256, 210),
        (QuantType::Iq2Xxs, 16, 256, 66),
        (QuantType::Iq2Xs, 17, 256, 74),
        (QuantType::Iq3Xxs, 18, 256, 98),
        (QuantType::Iq3S, 21, 256, 110),
        (QuantType::Iq2S, 22, 256, 82),
        (QuantType::Iq4Nl, 20, 32, 18),
        (QuantType::Iq4Xs, 23, 256, 136),
        (QuantType::Bf16, 30, 1, 2),
        (QuantType::Mxfp4, 39, 32, 17),
        (QuantType::Q4Z, 1000, 32, 18),
    ];
    for (kind, id, len, bytes) in table {
        assert_eq!((kind.ggml_id(), kind.block_len(), kind.block_bytes()), (id, len, bytes));
        assert_eq!(QuantType::from_ggml(id), Some(kind));
        assert_eq!(kind.row_bytes(3 * len), Some(3 * bytes));
        assert_eq!(kind.row_bytes(3 * len + len / 2), if len == 1 { Some(3 * bytes) } else { None });
    }
    assert_eq!(QuantType::from_ggml(10), None);
}

/// The error of a quantised weight is at most half a step (plus the rounding of the scale).
#[test]
fn quantisers_keep_weights_within_half_a_step() {
    let mut weights = vec![0f32; 32 * 64];
    QuantType::F32.dequantize(&random_blocks(QuantType::F32, weights.len(), 3), &mut weights);
    weights[..32].fill(0.0);
    weights[32..64].fill(-0.75);
    for (kind, steps) in [
        (QuantType::Q8_0, 127.0),
        (QuantType::Q4_0, 8.0),
        (QuantType::Q4_1, 7.5),
        (QuantType::F16, 2048.0),
        (QuantType::Bf16, 256.0),
        (QuantType::F32, f32::INFINITY),
    ] {
        let bytes = quantize(kind, &weights).expect("has a quantiser");
        let mut back = vec![0f32; weights.len()];
        kind.dequantize(&bytes, &mut back);
        for (w, b) in weights.iter().zip(&back) {
            // Q4_0 has only 7 steps on one side: the outermost weight there is off by a whole step.
            let bound = if kind == QuantType::Q4_0 { 1.01 } else { 0.51 } / steps + 1e-3;
            assert!((w - b).abs() <= bound, "{}: {w} came back as {b}", kind.name());
        }
    }
    assert_eq!(quantize(QuantType::Q4K, &[0.0; 256]), None);
}
