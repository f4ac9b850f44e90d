//! Operands of matrix products on a device: tiled weights, activation rows, and the output with its epilogue.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::GROUP;
use kernels::quant::QuantType;
use kernels::tile::Layout;

use crate::platform::Platform;

/// A matrix of tiles on a device.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    /// Quantisation format of the tiles.
    pub(crate) kind: QuantType,
    /// Elements of an output row; the tiles are padded to multiples of 16.
    pub(crate) rows: usize,
    /// Elements of an input row.
    pub(crate) cols: usize,
    /// [`kernels::tile::Tiles::bytes`].
    pub(crate) tiles: Handle,
}

impl Matrix {
    /// Words of all tiles.
    pub(crate) fn words(&self) -> usize {
        Layout::of(self.kind).matrix_bytes(self.rows, self.cols) / 4
    }

    pub(super) fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }
}

/// Activations of `count` rows on a device.
#[derive(Clone, Debug)]
pub(crate) struct Activations {
    /// `[count, cols]` f32; used with unquantised matrices, and with all matrices in strict arithmetic.
    pub(crate) floats: Handle,
    /// 8-bit integers, `[count, groups, 16]` words: word `4 · (slot mod 4) + 2 · block + slot / 4` of a group holds the four columns
    /// of a slot of one of its two blocks. A lane reads four words at a time.
    pub(crate) codes: Handle,
    /// `[count, blocks, 4]`: scale; scale times the sum of the codes; as integers, the sum of all codes and of the first 16.
    pub(crate) scales: Handle,
    /// Elements of a row.
    pub(crate) cols: usize,
}

impl Activations {
    /// Allocates room for rows. Codes and scales are zeroed, because the padding of the last group is never written.
    pub(crate) fn new<R: Platform>(client: &ComputeClient<R>, rows: usize, cols: usize) -> Self {
        let zeros = |bytes: usize| client.create(cubecl::bytes::Bytes::from_bytes_vec(vec![0u8; bytes]));
        let groups = cols.div_ceil(GROUP);
        Self {
            floats: client.empty(rows * cols * 4),
            codes: zeros(rows * groups * GROUP),
            scales: zeros(rows * groups * 2 * 16),
            cols,
        }
    }

    pub(crate) fn code_words(&self, rows: usize) -> usize {
        rows * self.cols.div_ceil(GROUP) * 16
    }

    pub(crate) fn scale_words(&self, rows: usize) -> usize {
        rows * self.cols.div_ceil(GROUP) * 8
    }
}

/// Output of a product: columns `offset ..` of rows of `stride` elements.
#[derive(Clone, Debug)]
pub(crate) struct Target<'a> {
    /// `[count, stride]` f32.
    pub(crate) rows: &'a Handle,
    /// Elements of a row.
    pub(crate) stride: usize,
    /// First column of the product.
    pub(crate) offset: usize,
    /// Rows of the matrix, without the padding of the last tile.
    pub(crate) width: usize,
    /// Added to the product.
    pub(crate) bias: Option<&'a Handle>,
    /// Adds the product to the existing values instead of overwriting them.
    pub(crate) add: bool,
    /// Scratch of [`PARTS_WORDS`] for products that several cubes share, if there is any.
    pub(crate) parts: Option<&'a Handle>,
}

/// Epilogue of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Finish {
    pub(super) bias: bool,
    pub(super) add: bool,
}

/// Writes an element of the output: the sum over all chunks, with the epilogue.
#[cube]
pub(super) fn finish_element(
    y: &mut Array<f32>,
    at: usize,
    sum: f32,
    bias: &Array<f32>,
    row: usize,
    #[comptime] finish: Finish,
) {
    let mut value = sum;
    if comptime!(finish.bias) {
        value += bias[row];
    }
    if comptime!(finish.add) {
        value += y[at];
    }
    y[at] = value;
}
