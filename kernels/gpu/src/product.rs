//! Matrix products of activation rows with tiled weights, in the order of `kernels::order::dot`; picks the kernel for the device.
//!
//! One plane computes a chunk of columns, or one unit per matrix row does; chunk sums are added in shared memory. A tile row
//! (`strip` in the code) is the tiles of 16 matrix rows. Next: `rows.rs`.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::{CHUNKS, GROUP};
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS, Scales};

use crate::arithmetic::Abilities;
use crate::tiles::NIBBLES;
use crate::{Platform, array};

mod few;
mod gates;
mod matrices;
mod panel;
mod plain;

use few::{Shape, few_kernel};
pub(crate) use gates::{gate_product, gates};
use panel::{PANEL_ROWS, panel_kernel, panel_tokens};
use plain::plain_kernel;

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

    fn groups(&self) -> usize {
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
}

/// Epilogue of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Finish {
    bias: bool,
    add: bool,
}

/// Activation rows per pass over the weights with matrix instructions.
const FEW: usize = 8;
/// Matrices with at least this number of tile rows let a plane compute two of them.
const TWO_STRIPS: usize = 1024;
/// From this number of activation rows on, the panel kernel is used.
const PANEL_FROM: usize = 17;

/// Multiplies `count` rows of `x` by a matrix. `integers`: uses 8-bit activations if the matrix is quantised.
pub(crate) fn product<R: Platform>(
    client: &ComputeClient<R>,
    able: Abilities,
    matrix: &Matrix,
    x: &Activations,
    integers: bool,
    count: usize,
    target: &Target<'_>,
) {
    let integers = integers && Layout::of(matrix.kind).bits > 0;
    let (strips, finish) = (matrix.rows.div_ceil(ROWS), Finish { bias: target.bias.is_some(), add: target.add });
    let bias = target.bias.unwrap_or(&x.scales);
    let bias_len = if finish.bias { target.width } else { 4 };
    if !(integers && able.matrices) {
        // SAFETY: the launch has one cube per tile row and activation row; units stay within them.
        unsafe {
            plain_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(strips as u32, count as u32, 1),
                CubeDim::new_2d(ROWS as u32, CHUNKS as u32),
                array(&matrix.tiles, matrix.words()),
                array(&x.floats, count * x.cols),
                array(&x.codes, x.code_words(count)),
                array(&x.scales, x.scale_words(count)),
                array(bias, bias_len),
                array(target.rows, count * target.stride),
                matrix.cols as u32,
                target.stride as u32,
                target.offset as u32,
                target.width as u32,
                matrix.kind,
                integers,
                finish,
                able,
            );
        }
        return;
    }
    if count >= PANEL_FROM {
        // SAFETY: tokens and tile rows past the last one read the last and write nothing.
        unsafe {
            panel_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(
                    count.div_ceil(panel_tokens(matrix.kind)) as u32,
                    matrix.rows.div_ceil(PANEL_ROWS) as u32,
                    1,
                ),
                CubeDim::new_2d(32, 8),
                array(&matrix.tiles, matrix.words()),
                array(&matrix.tiles, matrix.words()),
                array(&x.codes, x.code_words(count)),
                array(&x.scales, x.scale_words(count)),
                array(bias, bias_len),
                array(target.rows, count * target.stride),
                NIBBLES,
                matrix.groups() as u32,
                strips as u32,
                count as u32,
                target.stride as u32,
                target.offset as u32,
                target.width as u32,
                matrix.kind,
                finish,
                able,
            );
        }
        return;
    }
    let mut first = 0;
    while first < count {
        let rows = (count - first).min(FEW);
        // Two tile rows share the loaded activations, if enough cubes remain to fill the device and the registers suffice.
        let registers = rows == 1 || Layout::of(matrix.kind).scales != Scales::Sixteens;
        let each = if strips >= TWO_STRIPS && registers { 2 } else { 1 };
        // SAFETY: activation rows and tile rows past the last one read existing ones and write nothing.
        unsafe {
            few_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(strips.div_ceil(each) as u32, 1, 1),
                CubeDim::new_2d(32, CHUNKS as u32),
                array(&matrix.tiles, matrix.words()),
                array(&matrix.tiles, matrix.words()),
                array(&x.codes, x.code_words(count)),
                array(&x.scales, x.scale_words(count)),
                array(bias, bias_len),
                array(target.rows, count * target.stride),
                NIBBLES,
                matrix.groups() as u32,
                strips as u32,
                first as u32,
                rows as u32,
                target.stride as u32,
                target.offset as u32,
                target.width as u32,
                Shape { kind: matrix.kind, each, halves: false, one: rows == 1 },
                finish,
                able,
            );
        }
        first += rows;
    }
}

/// The groups of columns of a chunk as (start, end): see [`kernels::order::chunk`].
#[cube]
pub(crate) fn chunk_range(groups: usize, chunk: usize) -> (usize, usize) {
    (chunk * groups / comptime!(CHUNKS), (chunk + 1) * groups / comptime!(CHUNKS))
}

#[cube]
fn finish_element(y: &mut Array<f32>, at: usize, sum: f32, bias: &Array<f32>, row: usize, #[comptime] finish: Finish) {
    let mut value = sum;
    if comptime!(finish.bias) {
        value += bias[row];
    }
    if comptime!(finish.add) {
        value += y[at];
    }
    y[at] = value;
}
