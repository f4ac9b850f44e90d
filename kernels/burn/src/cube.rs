//! Overrides for burn's GPU backends, one impl for CUDA and Vulkan: the CubeCL kernels of `kernels::gpu` on its tensors.
use burn::tensor::{DType, Shape, Tensor, TensorPrimitive};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::client::ComputeClient;
use cubecl::server::Handle;
use kernels::gpu::{self, Attention, Rotation};

use crate::backend::{Matrix, MeshBackend};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> MeshBackend for CubeBackend<R, F, I, BT> {
    fn product(x: Tensor<Self, 2>, weight: &Matrix<Self>) -> Tensor<Self, 2> {
        let x = Rows::new(x);
        let plane = |tensor: &Tensor<Self, 1, burn::tensor::Int>| {
            let tensor = tensor.clone().into_primitive();
            let words = tensor.meta.shape()[0];
            (tensor.handle, words)
        };
        let (quants, scales) = (plane(&weight.quants), plane(&weight.scales));
        let matrix = gpu::Matrix { quant: weight.quant, rows: weight.rows, cols: weight.cols, quants, scales };
        let y = gpu::matvec(&x.client, &matrix, &x.handle, x.n);
        x.result(y, weight.rows)
    }

    fn rms_norm(x: Tensor<Self, 2>, weight: &Tensor<Self, 1>, eps: f32) -> Tensor<Self, 2> {
        let x = Rows::new(x);
        let weight = weight.clone().into_primitive().tensor();
        let y = gpu::rms_norm(&x.client, &x.handle, &weight.handle, x.n, x.width, eps);
        let width = x.width;
        x.result(y, width)
    }

    fn rotate(x: Tensor<Self, 2>, table: &Tensor<Self, 2>, rotation: Rotation) -> Tensor<Self, 2> {
        let (x, table) = (Rows::new(x), Rows::new(table.clone()));
        let y = gpu::rotate(&x.client, &x.handle, &table.handle, x.n, x.width / rotation.head_dim, rotation);
        let width = x.width;
        x.result(y, width)
    }

    fn append(cache: Tensor<Self, 2>, rows: Tensor<Self, 2>, at: usize) -> Tensor<Self, 2> {
        let (cache, rows) = (Rows::new(cache), Rows::new(rows));
        gpu::append(&rows.client, &cache.handle, cache.n, &rows.handle, rows.n, rows.width, at);
        let (handle, width) = (cache.handle.clone(), cache.width);
        cache.result(handle, width)
    }

    fn causal_attention(
        q: Tensor<Self, 2>,
        keys: &Tensor<Self, 2>,
        values: &Tensor<Self, 2>,
        position: usize,
        sizes: Attention,
    ) -> Tensor<Self, 2> {
        let (q, keys, values) = (Rows::new(q), Rows::new(keys.clone()), Rows::new(values.clone()));
        let y = gpu::attention(&q.client, &q.handle, &keys.handle, &values.handle, q.n, position, sizes);
        let width = q.width;
        q.result(y, width)
    }

    fn swiglu(gate: Tensor<Self, 2>, up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (gate, up) = (Rows::new(gate), Rows::new(up));
        let y = gpu::swiglu(&gate.client, &gate.handle, &up.handle, gate.n, gate.width);
        let width = gate.width;
        gate.result(y, width)
    }

    fn add(x: Tensor<Self, 2>, y: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (x, y) = (Rows::new(x), Rows::new(y));
        let sum = gpu::add(&x.client, &x.handle, &y.handle, x.n, x.width);
        let width = x.width;
        x.result(sum, width)
    }

    fn settle(device: &Self::Device) -> Result<(), String> {
        R::client(device).flush().map_err(|error| format!("{error:?}"))
    }

    fn buffer_bytes_max(device: &Self::Device) -> Option<u64> {
        Some(R::client(device).properties().memory.max_page_size)
    }

    fn bytes_reserved(device: &Self::Device) -> Option<u64> {
        R::client(device).memory_usage().ok().map(|usage| usage.bytes_reserved)
    }
}

/// Rows `[n, width]` that lie one after the other on a device.
struct Rows<R: CubeRuntime> {
    client: ComputeClient<R>,
    device: R::Device,
    handle: Handle,
    n: usize,
    width: usize,
}

impl<R: CubeRuntime> Rows<R> {
    fn new<F: FloatElement, I: IntElement, BT: BoolElement>(x: Tensor<CubeBackend<R, F, I, BT>, 2>) -> Self {
        let [n, width] = x.dims();
        let CubeTensor { client, device, handle, .. } = into_contiguous(x.into_primitive().tensor());
        Self { client, device, handle, n, width }
    }

    /// A kernel's result with as many rows.
    fn result<F: FloatElement, I: IntElement, BT: BoolElement>(
        self,
        handle: Handle,
        width: usize,
    ) -> Tensor<CubeBackend<R, F, I, BT>, 2> {
        let shape = Shape::new([self.n, width]);
        let tensor = CubeTensor::new_contiguous(self.client, self.device, shape, handle, DType::F32);
        Tensor::from_primitive(TensorPrimitive::Float(tensor))
    }
}
