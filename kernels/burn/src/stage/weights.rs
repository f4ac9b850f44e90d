//! From the file to the device: pack, upload, and prove each matrix by a product that is read back.
use burn::tensor::{Tensor, TensorData};
use kernels::gpu::{Packed, packed_bytes};
use kernels::stage::StageError;
use kernels::weights::{ModelFile, TensorView};

use super::{input, read, upload};
use crate::backend::{Matrix, MeshBackend};

/// A matrix `[rows, cols]`, in parts of whole rows where it exceeds the largest buffer that a kernel can bind.
#[derive(Debug)]
pub(super) struct Linear<B: MeshBackend> {
    parts: Vec<Matrix<B>>,
}

impl<B: MeshBackend> Linear<B> {
    /// `x[n, cols] · weightᵀ`: `[n, rows]`.
    pub(super) fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        match &self.parts[..] {
            [whole] => B::product(x, whole),
            parts => Tensor::cat(parts.iter().map(|part| B::product(x.clone(), part)).collect(), 1),
        }
    }
}

/// Moves tensors to a device and counts their bytes.
pub(super) struct Loader<'a, B: MeshBackend> {
    file: &'a ModelFile,
    device: &'a B::Device,
    part_bytes_max: u64,
    bytes: u64,
    /// Proofs not yet read: what the first and last row of a part times ones must give, and the whole product.
    proofs: Vec<Proof<B>>,
}

struct Proof<B: MeshBackend> {
    name: String,
    first: f64,
    last: f64,
    /// Sum of the magnitudes added: what rounding is relative to.
    scale: f64,
    product: Tensor<B, 2>,
}

/// Products that wait to be read back: bounds what the proofs hold on the device.
const PROOFS_MAX: usize = 8;
/// Rounding of a row's f32 sum, relative to the sum of magnitudes, with room to spare.
const PROOF_TOLERANCE: f64 = 1e-4;

impl<'a, B: MeshBackend> Loader<'a, B> {
    pub(super) fn new(file: &'a ModelFile, device: &'a B::Device) -> Self {
        let part_bytes_max = B::buffer_bytes_max(device).unwrap_or(u64::MAX);
        Self { file, device, part_bytes_max, bytes: 0, proofs: Vec::new() }
    }

    /// A vector as floats.
    pub(super) fn vector(&mut self, name: &str) -> Result<Tensor<B, 1>, StageError> {
        let values = self.view(name)?.to_f32();
        self.bytes += size_of_val(&values[..]) as u64;
        let len = values.len();
        Ok(Tensor::from_data(TensorData::new(values, [len]), self.device))
    }

    /// A matrix as it is stored.
    pub(super) fn linear(&mut self, name: &str) -> Result<Linear<B>, StageError> {
        let view = self.view(name)?;
        let row_bytes = packed_bytes(view.quant, 1, view.cols);
        let rows_each = usize::try_from(self.part_bytes_max / row_bytes).unwrap_or(usize::MAX).clamp(1, view.rows);
        let stored = view.bytes.len() / view.rows;
        let mut parts = Vec::new();
        for bytes in view.bytes.chunks(rows_each * stored) {
            let rows = bytes.len() / stored;
            let packed = Packed::new(view.quant, rows, view.cols, bytes);
            let packed = packed.map_err(|error| input(format!("tensor {name:?}: {error}")))?;
            self.bytes += packed_bytes(view.quant, rows, view.cols);
            let matrix = Matrix::upload(packed, self.device);
            self.prove(name, &view, bytes, &matrix)?;
            parts.push(matrix);
        }
        Ok(Linear { parts })
    }

    /// Bytes moved, after the last proof.
    pub(super) fn finish(mut self) -> Result<u64, StageError> {
        self.check_proofs()?;
        Ok(self.bytes)
    }

    fn view(&self, name: &str) -> Result<TensorView<'a>, StageError> {
        self.file.tensor(name).ok_or_else(|| input(format!("the file lacks tensor {name:?}")))
    }

    fn prove(&mut self, name: &str, view: &TensorView<'_>, bytes: &[u8], matrix: &Matrix<B>) -> Result<(), StageError> {
        let stored = bytes.len() / matrix.rows;
        let mut row = vec![0f64; view.cols];
        let mut sum = |bytes: &[u8]| {
            view.quant.dequantize_f64(bytes, &mut row);
            (row.iter().sum::<f64>(), row.iter().map(|w| w.abs()).sum::<f64>())
        };
        let (first, first_scale) = sum(&bytes[..stored]);
        let (last, last_scale) = sum(&bytes[bytes.len() - stored..]);
        let product = B::product(upload(vec![1.0; view.cols], view.cols, self.device), matrix);
        let scale = first_scale.max(last_scale);
        self.proofs.push(Proof { name: name.to_owned(), first, last, scale, product });
        if self.proofs.len() >= PROOFS_MAX { self.check_proofs() } else { Ok(()) }
    }

    fn check_proofs(&mut self) -> Result<(), StageError> {
        for Proof { name, first, last, scale, product } in self.proofs.drain(..) {
            let found = read::<B>(product, self.device)?;
            for (found, exact) in [(found[0], first), (found[found.len() - 1], last)] {
                // Written so that NaN is a failure too.
                let close = (f64::from(found) - exact).abs() <= PROOF_TOLERANCE * scale;
                if !close {
                    return Err(StageError::Device(format!(
                        "tensor {name:?} did not arrive: a product gave {found}, expected {exact}; the device may be \
                         out of memory"
                    )));
                }
            }
        }
        Ok(())
    }
}
