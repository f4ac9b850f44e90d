//! Overrides for burn's CPU backend: what its tensors show as slices needs no tensor operations.
use burn::backend::flex::{Flex, FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Shape, Tensor, TensorPrimitive};
use kernels::gpu::{Attention, unpack_row};

use crate::backend::{Matrix, MeshBackend};

impl MeshBackend for Flex {
    fn product(x: Tensor<Self, 2>, weight: &Matrix<Self>) -> Tensor<Self, 2> {
        let [n, cols] = x.dims();
        let rows = weight.rows;
        let x = x.into_primitive().tensor().to_contiguous();
        let (quants, scales) = (weight.quants.clone().into_primitive(), weight.scales.clone().into_primitive());
        let (x, quants, scales) = (slice::<f32>(&x), slice::<i32>(&quants), slice::<i32>(&scales));
        let mut y = vec![0f32; n * rows];
        let mut decoded = vec![0f32; cols];
        for row in 0..rows {
            weight.quant.dequantize(&unpack_row(weight.quant, cols, quants, scales, row), &mut decoded);
            for (i, x) in x.chunks_exact(cols).enumerate() {
                y[i * rows + row] = dot(&decoded, x);
            }
        }
        tensor(y, [n, rows])
    }

    fn rms_norm(x: Tensor<Self, 2>, weight: &Tensor<Self, 1>, eps: f32) -> Tensor<Self, 2> {
        let [n, width] = x.dims();
        let (x, weight) = (x.into_primitive().tensor().to_contiguous(), weight.clone().into_primitive().tensor());
        let (x, weight) = (slice::<f32>(&x), slice::<f32>(&weight));
        let mut y = Vec::with_capacity(n * width);
        for row in x.chunks_exact(width) {
            let scale = 1.0 / (dot(row, row) / width as f32 + eps).sqrt();
            y.extend(row.iter().zip(weight).map(|(x, w)| x * scale * w));
        }
        tensor(y, [n, width])
    }

    // Plain burn's products sum in an order that depends on how many rows there are.
    fn causal_attention(
        q: Tensor<Self, 2>,
        keys: &Tensor<Self, 2>,
        values: &Tensor<Self, 2>,
        position: usize,
        sizes: Attention,
    ) -> Tensor<Self, 2> {
        let Attention { heads, kv_heads, head_dim, .. } = sizes;
        let [n, width] = q.dims();
        let kv_width = kv_heads * head_dim;
        let q = q.into_primitive().tensor().to_contiguous();
        let (keys, values) = (keys.clone().into_primitive().tensor(), values.clone().into_primitive().tensor());
        let (q, keys, values) = (slice::<f32>(&q), slice::<f32>(&keys), slice::<f32>(&values));
        let mut y = vec![0f32; n * width];
        for (i, (query, out)) in q.chunks_exact(head_dim).zip(y.chunks_exact_mut(head_dim)).enumerate() {
            let (held, of) = (position + i / heads + 1, i % heads / (heads / kv_heads) * head_dim);
            let row = |p: usize| p * kv_width + of..p * kv_width + of + head_dim;
            let scale = 1.0 / (head_dim as f32).sqrt();
            let scores: Vec<f32> = (0..held).map(|p| dot(query, &keys[row(p)]) * scale).collect();
            let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut total = 0.0;
            for (p, score) in scores.iter().enumerate() {
                let weight = (score - top).exp();
                total += weight;
                out.iter_mut().zip(&values[row(p)]).for_each(|(out, value)| *out += weight * value);
            }
            out.iter_mut().for_each(|out| *out /= total);
        }
        tensor(y, [n, width])
    }
}

/// Sums in 16 lanes, whose order does not depend on the machine's vector width.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; 16];
    let (a, b) = (a.chunks_exact(16), b.chunks_exact(16));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for i in 0..16 {
            lanes[i] += a[i] * b[i];
        }
    }
    lanes.iter().sum::<f32>() + rest
}

fn slice<E: burn::tensor::Element + bytemuck::Pod>(tensor: &FlexTensor) -> &[E] {
    tensor.as_slice().expect("contiguous tensors of the backend's own element type")
}

fn tensor(values: Vec<f32>, shape: [usize; 2]) -> Tensor<Flex, 2> {
    let tensor = FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(Shape::new(shape)), DType::F32);
    Tensor::from_primitive(TensorPrimitive::Float(tensor))
}
