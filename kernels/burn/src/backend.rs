//! The backend extension: what the model asks of a backend beyond burn's own operations.
//!
//! Every method's default is written in plain burn operations (`oracle.rs`) and works on any backend; a backend
//! overrides what it does better. The suite holds both against float64.
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use kernels::gpu::{Attention, Packed, Rotation};
use kernels::quant::QuantType;

use crate::oracle;

/// A packed matrix `[rows, cols]` on a device: quantised blocks, never expanded.
#[derive(Clone, Debug)]
pub struct Matrix<B: Backend> {
    /// Storage format.
    pub quant: QuantType,
    /// Elements of an output row.
    pub rows: usize,
    /// Elements of an input row.
    pub cols: usize,
    /// [`Packed::quants`].
    pub quants: Tensor<B, 1, Int>,
    /// [`Packed::scales`].
    pub scales: Tensor<B, 1, Int>,
}

impl<B: Backend> Matrix<B> {
    /// Moves a packed matrix to a device.
    pub fn upload(packed: Packed, device: &B::Device) -> Self {
        let Packed { quant, rows, cols, quants, scales } = packed;
        let plane = |words: Vec<i32>| {
            let len = words.len();
            Tensor::from_data(TensorData::new(words, [len]), device)
        };
        Self { quant, rows, cols, quants: plane(quants), scales: plane(scales) }
    }
}

/// A backend that the model runs on.
pub trait MeshBackend: Backend {
    /// `x[n, cols] · weightᵀ`: `[n, rows]`.
    fn product(x: Tensor<Self, 2>, weight: &Matrix<Self>) -> Tensor<Self, 2> {
        oracle::product(x, weight)
    }

    /// Rows of `x[n, width]` divided by their root mean square, times `weight[width]`.
    fn rms_norm(x: Tensor<Self, 2>, weight: &Tensor<Self, 1>, eps: f32) -> Tensor<Self, 2> {
        oracle::rms_norm(x, weight, eps)
    }

    /// Rotary embedding of `x[n, heads × head_dim]` by `table[n, dims]`: a row's cosines, then its sines.
    fn rotate(x: Tensor<Self, 2>, table: &Tensor<Self, 2>, rotation: Rotation) -> Tensor<Self, 2> {
        oracle::rotate(x, table, rotation)
    }

    /// The cache `[capacity, width]` with `rows[n, width]` written from row `at` on. Takes the cache's only handle, so
    /// that it may write in place.
    fn append(cache: Tensor<Self, 2>, rows: Tensor<Self, 2>, at: usize) -> Tensor<Self, 2> {
        oracle::append(cache, rows, at)
    }

    /// Causal attention of `q[n, heads × head_dim]`, at positions `position ..`, over keys and values
    /// `[capacity, kv_heads × head_dim]` that already hold the rows' own positions: as wide as `q`.
    fn causal_attention(
        q: Tensor<Self, 2>,
        keys: &Tensor<Self, 2>,
        values: &Tensor<Self, 2>,
        position: usize,
        sizes: Attention,
    ) -> Tensor<Self, 2> {
        oracle::causal_attention(q, keys, values, position, sizes)
    }

    /// `up × gate / (1 + e^-gate)`, elementwise.
    fn swiglu(gate: Tensor<Self, 2>, up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        oracle::swiglu(gate, up)
    }

    /// `x + y`.
    fn add(x: Tensor<Self, 2>, y: Tensor<Self, 2>) -> Tensor<Self, 2> {
        x + y
    }

    /// Hands everything queued to the device and says whether it is well. What is read after an error is not to be
    /// trusted: a device that could not allocate answers with old data.
    ///
    /// # Errors
    /// What the device reports.
    fn settle(device: &Self::Device) -> Result<(), String> {
        Self::sync(device).map_err(|error| error.to_string())
    }

    /// Bytes of the largest buffer that a kernel can bind; `None` without a bound.
    fn buffer_bytes_max(_device: &Self::Device) -> Option<u64> {
        None
    }

    /// Bytes that this process holds on the device; `None` where it is ordinary memory.
    fn bytes_reserved(_device: &Self::Device) -> Option<u64> {
        None
    }
}
