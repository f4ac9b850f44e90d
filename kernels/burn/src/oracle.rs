//! The model's operations in plain burn: slow, right on any backend, and what the fused kernels are compared with.
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Int, Tensor, TensorData};
use kernels::gpu::{Attention, Rotation};
use kernels::quant::QuantType;
use kernels::weights::RopeKind;

use crate::backend::Matrix;

/// See [`crate::MeshBackend::product`].
pub fn product<B: Backend>(x: Tensor<B, 2>, weight: &Matrix<B>) -> Tensor<B, 2> {
    x.matmul(dequantize(weight).transpose())
}

/// See [`crate::MeshBackend::rms_norm`].
pub fn rms_norm<B: Backend>(x: Tensor<B, 2>, weight: &Tensor<B, 1>, eps: f32) -> Tensor<B, 2> {
    let mean = (x.clone() * x.clone()).mean_dim(1);
    x / (mean + eps).sqrt() * weight.clone().unsqueeze()
}

/// See [`crate::MeshBackend::rotate`].
pub fn rotate<B: Backend>(x: Tensor<B, 2>, table: &Tensor<B, 2>, rotation: Rotation) -> Tensor<B, 2> {
    let Rotation { kind, dims, head_dim } = rotation;
    let [n, width] = x.dims();
    let (heads, pairs) = (width / head_dim, dims / 2);
    let x = x.reshape([n, heads, head_dim]);
    let still = (dims < head_dim).then(|| x.clone().slice([0..n, 0..heads, dims..head_dim]));
    let turning = x.slice([0..n, 0..heads, 0..dims]);
    let part = |from: usize| table.clone().slice([0..n, from..from + pairs]).reshape([n, 1, pairs]);
    let (cosine, sine) = (part(0), part(pairs));
    let (a, b): (Tensor<B, 3>, Tensor<B, 3>) = match kind {
        RopeKind::Interleaved => {
            let pair = turning.reshape([n, heads, pairs, 2]);
            let side = |i: usize| pair.clone().slice([0..n, 0..heads, 0..pairs, i..i + 1]).reshape([n, heads, pairs]);
            (side(0), side(1))
        }
        RopeKind::Halves => {
            let side = |from: usize| turning.clone().slice([0..n, 0..heads, from..from + pairs]);
            (side(0), side(pairs))
        }
    };
    let first = a.clone() * cosine.clone() - b.clone() * sine.clone();
    let second = a * sine + b * cosine;
    let turned = match kind {
        RopeKind::Interleaved => Tensor::stack::<4>(vec![first, second], 3).reshape([n, heads, dims]),
        RopeKind::Halves => Tensor::cat(vec![first, second], 2),
    };
    let whole = match still {
        Some(still) => Tensor::cat(vec![turned, still], 2),
        None => turned,
    };
    whole.reshape([n, width])
}

/// See [`crate::MeshBackend::append`].
pub fn append<B: Backend>(cache: Tensor<B, 2>, rows: Tensor<B, 2>, at: usize) -> Tensor<B, 2> {
    let [n, width] = rows.dims();
    cache.slice_assign([at..at + n, 0..width], rows)
}

/// See [`crate::MeshBackend::causal_attention`].
pub fn causal_attention<B: Backend>(
    q: Tensor<B, 2>,
    keys: &Tensor<B, 2>,
    values: &Tensor<B, 2>,
    position: usize,
    sizes: Attention,
) -> Tensor<B, 2> {
    let Attention { heads, kv_heads, head_dim, .. } = sizes;
    let [n, width] = q.dims();
    let (group, count) = (heads / kv_heads, position + n);
    let held = |cache: &Tensor<B, 2>| {
        let cache = cache.clone().slice([0..count, 0..kv_heads * head_dim]);
        cache.reshape([count, kv_heads, head_dim]).swap_dims(0, 1)
    };
    let q = q.reshape([n, kv_heads, group, head_dim]).permute([1, 2, 0, 3]).reshape([kv_heads, group * n, head_dim]);
    let scores = q.matmul(held(keys).transpose()) / (head_dim as f32).sqrt();
    let later: Vec<f32> = (0..group * n)
        .flat_map(|row| (0..count).map(move |p| if p > position + row % n { -1e30 } else { 0.0 }))
        .collect();
    let later = Tensor::<B, 3>::from_data(TensorData::new(later, [1, group * n, count]), &scores.device());
    let mixed = softmax(scores + later, 2).matmul(held(values));
    mixed.reshape([kv_heads, group, n, head_dim]).permute([2, 0, 1, 3]).reshape([n, width])
}

/// See [`crate::MeshBackend::swiglu`].
pub fn swiglu<B: Backend>(gate: Tensor<B, 2>, up: Tensor<B, 2>) -> Tensor<B, 2> {
    up * gate.clone() * sigmoid(gate)
}

/// The whole matrix as floats `[rows, cols]`.
pub fn dequantize<B: Backend>(matrix: &Matrix<B>) -> Tensor<B, 2> {
    let Matrix { quant, rows, cols, .. } = *matrix;
    let blocks = rows * cols / quant.block_len();
    let weights = match quant {
        QuantType::F32 => floats(words(matrix, 1), 8, 23),
        QuantType::F16 => floats(words(matrix, 2), 5, 10),
        QuantType::Bf16 => floats(words(matrix, 2), 8, 7),
        QuantType::Q4_0 => (nibbles(bytes(&matrix.quants, blocks, 16)) - 8.0) * halves(&matrix.scales, blocks, 1),
        QuantType::Q4_1 => {
            let scales = halves(&matrix.scales, blocks, 2);
            nibbles(bytes(&matrix.quants, blocks, 16)) * columns(&scales, 0, 1) + columns(&scales, 1, 1)
        }
        QuantType::Q5_0 => {
            let apart = bytes(&matrix.scales, blocks, 6);
            let codes = nibbles(bytes(&matrix.quants, blocks, 16)) + fifths(&columns(&apart, 2, 4));
            (codes - 16.0) * halves_of(columns(&apart, 0, 2))
        }
        QuantType::Q5_1 => {
            let apart = bytes(&matrix.scales, blocks, 8);
            let scales = halves_of(columns(&apart, 0, 4));
            let codes = nibbles(bytes(&matrix.quants, blocks, 16)) + fifths(&columns(&apart, 4, 4));
            codes * columns(&scales, 0, 1) + columns(&scales, 1, 1)
        }
        QuantType::Q8_0 => signed(bytes(&matrix.quants, blocks, 32)) * halves(&matrix.scales, blocks, 1),
        QuantType::Q4K => super_blocks(&bytes(&matrix.quants, blocks, 144), false),
        QuantType::Q5K => super_blocks(&bytes(&matrix.quants, blocks, 176), true),
        QuantType::Q6K => q6_k(&bytes(&matrix.quants, blocks, 192), &bytes(&matrix.scales, blocks, 20)),
    };
    weights.reshape([rows, cols])
}

/// Bits `at ..` of each integer, `bits` of them.
fn field<B: Backend, const D: usize>(x: Tensor<B, D, Int>, at: i32, bits: i32) -> Tensor<B, D, Int> {
    x.bitwise_right_shift_scalar(at.elem()).bitwise_and_scalar(((1 << bits) - 1).elem())
}

/// Words cut into `parts` fields each, the low one first: `[weights, 1]`.
fn words<B: Backend>(matrix: &Matrix<B>, parts: usize) -> Tensor<B, 2, Int> {
    let weights = matrix.rows * matrix.cols;
    let words = matrix.quants.clone();
    if parts == 1 {
        return words.slice([0..weights]).reshape([weights, 1]);
    }
    let [count] = words.dims();
    let parts: Vec<_> = [0, 16].map(|at| field(words.clone(), at, 16)).into();
    Tensor::stack::<2>(parts, 1).reshape([count * 2]).slice([0..weights]).reshape([weights, 1])
}

/// The bytes of blocks: `[blocks, each]`.
fn bytes<B: Backend>(words: &Tensor<B, 1, Int>, blocks: usize, each: usize) -> Tensor<B, 2, Int> {
    let [count] = words.dims();
    let parts: Vec<_> = [0, 8, 16, 24].map(|at| field(words.clone(), at, 8)).into();
    Tensor::stack::<2>(parts, 1).reshape([count * 4]).slice([0..blocks * each]).reshape([blocks, each])
}

/// IEEE-like numbers from their bits. Powers of two come from a table, exactly; one of them alone may be no f32.
fn floats<B: Backend, const D: usize>(bits: Tensor<B, D, Int>, exponent: i32, mantissa: i32) -> Tensor<B, D> {
    let shape = bits.dims();
    let (count, device) = (shape.iter().product::<usize>(), bits.device());
    let bits = bits.reshape([count]);
    let bias = (1 << (exponent - 1)) - 1 + mantissa;
    let powers: Vec<f32> = (0..1i32 << exponent).map(|e| 2f32.powi((e.max(1) - bias) / 2)).collect();
    let rest: Vec<f32> = (0..1i32 << exponent).map(|e| 2f32.powi((e.max(1) - bias) - (e.max(1) - bias) / 2)).collect();
    let implicit: Vec<f32> =
        (0..1i32 << exponent).map(|e| if e == 0 { 0.0 } else { (1i32 << mantissa) as f32 }).collect();
    let e = field(bits.clone(), mantissa, exponent);
    let table = |values: Vec<f32>| {
        let len = values.len();
        Tensor::<B, 1>::from_data(TensorData::new(values, [len]), &device).select(0, e.clone())
    };
    let sign = field(bits.clone(), mantissa + exponent, 1).float() * -2.0 + 1.0;
    ((field(bits, 0, mantissa).float() + table(implicit)) * table(powers) * table(rest) * sign).reshape(shape)
}

/// The halves of blocks: `[blocks, each]`.
fn halves<B: Backend>(words: &Tensor<B, 1, Int>, blocks: usize, each: usize) -> Tensor<B, 2> {
    halves_of(bytes(words, blocks, each * 2))
}

/// Bytes `[n, 2 m]` as halves `[n, m]`.
fn halves_of<B: Backend>(bytes: Tensor<B, 2, Int>) -> Tensor<B, 2> {
    let [n, m] = bytes.dims();
    let pairs = bytes.reshape([n * m / 2, 2]);
    let bits = columns(&pairs, 0, 1) + columns(&pairs, 1, 1) * 256;
    floats(bits, 5, 10).reshape([n, m / 2])
}

fn columns<B: Backend, K: burn::tensor::BasicOps<B>>(
    x: &Tensor<B, 2, K>,
    from: usize,
    count: usize,
) -> Tensor<B, 2, K> {
    let [n, _] = x.dims();
    x.clone().slice([0..n, from..from + count])
}

/// 16 bytes to 32 weights: the low nibbles, then the high ones.
fn nibbles<B: Backend>(bytes: Tensor<B, 2, Int>) -> Tensor<B, 2> {
    Tensor::cat(vec![field(bytes.clone(), 0, 4), field(bytes, 4, 4)], 1).float()
}

/// Four bytes to what the fifth bits of 32 weights add to their codes.
fn fifths<B: Backend>(bytes: &Tensor<B, 2, Int>) -> Tensor<B, 2> {
    let bits = (0..32).map(|i| field(columns(bytes, i / 8, 1), (i % 8) as i32, 1));
    Tensor::cat(bits.collect(), 1).float() * 16.0
}

fn signed<B: Backend>(bytes: Tensor<B, 2, Int>) -> Tensor<B, 2> {
    let sign = field(bytes.clone(), 7, 1);
    (bytes - sign * 256).float()
}

/// Q4_K and Q5_K: groups of 32 with 6-bit scales and minima.
fn super_blocks<B: Backend>(bytes: &Tensor<B, 2, Int>, fifth: bool) -> Tensor<B, 2> {
    let scales = halves_of(columns(bytes, 0, 4));
    let codes = columns(bytes, if fifth { 48 } else { 16 }, 128);
    let groups = (0..8).map(|g| {
        // The first four groups' scales are plain; the upper two bits of those bytes complete the other four.
        let byte = |at: usize| columns(bytes, 4 + at, 1);
        let (scale, minimum) = if g < 4 {
            (field(byte(g), 0, 6), field(byte(g + 4), 0, 6))
        } else {
            let low = field(byte(g + 4), 0, 4) + field(byte(g - 4), 6, 2) * 16;
            (low, field(byte(g + 4), 4, 4) + field(byte(g), 6, 2) * 16)
        };
        let mut code = field(columns(&codes, g / 2 * 32, 32), (g % 2 * 4) as i32, 4);
        if fifth {
            code = code + field(columns(bytes, 16, 32), g as i32, 1) * 16;
        }
        let (scale, minimum) = (scale.float() * columns(&scales, 0, 1), minimum.float() * columns(&scales, 1, 1));
        code.float() * scale - minimum
    });
    Tensor::cat(groups.collect(), 1)
}

/// Q6_K: sixteen groups of 16 with signed scales; low nibbles and upper two bits apart.
fn q6_k<B: Backend>(bytes: &Tensor<B, 2, Int>, scales: &Tensor<B, 2, Int>) -> Tensor<B, 2> {
    let scale = halves_of(columns(scales, 16, 2));
    let groups = (0..16).map(|g| {
        let (half, quarter, part) = (g / 8, g % 8 / 2, g % 2 * 16);
        let low = field(columns(bytes, half * 64 + quarter % 2 * 32 + part, 16), (quarter / 2 * 4) as i32, 4);
        let high = field(columns(bytes, 128 + half * 32 + part, 16), 2 * quarter as i32, 2);
        let group = signed(columns(scales, g, 1)) * scale.clone();
        ((low + high * 16).float() - 32.0) * group
    });
    Tensor::cat(groups.collect(), 1)
}
