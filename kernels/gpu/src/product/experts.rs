//! Products of rows with the matrices of the experts that were chosen for them. Of few pairs of a row and an expert, each is computed
//! by itself; of many, those of one expert share a pass over its weights.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::CHUNKS;
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS};

use super::few::{Shape, share_sums, strip_sums};
use super::groups::{BLOCK_PAIRS, Groups, blocks_max};
use super::operands::{Activations, Finish, Matrix};
use super::panel::{PANEL_ROWS, Share, panel_kernel, panel_tokens};
use super::plain::{chunk_sums, total_of};
use crate::arithmetic::Features;
use crate::inline::await_previous;
use crate::platform::{Platform, array};
use crate::tiles::NIBBLES;

/// One or two matrices of all experts, such as gate and up: in the rows of a matrix, the first of all experts, then the second.
#[derive(Clone, Debug)]
pub(crate) struct ExpertMatrix {
    pub(crate) matrix: Matrix,
    /// Row of the first expert; a multiple of the tile rows.
    pub(crate) first: usize,
    /// Number of matrices.
    pub(crate) matrices: usize,
    /// Rows of an expert; a multiple of the tile rows.
    pub(crate) rows: usize,
    /// Number of experts.
    pub(crate) count: usize,
}

/// Rows of activations, and the experts that compute each of them.
pub(crate) struct Pairs<'a> {
    pub(crate) x: &'a Activations,
    /// Expert of each pair.
    pub(crate) experts: &'a Handle,
    /// Number of pairs; pair i computes row `i / each`.
    pub(crate) count: usize,
    pub(crate) each: usize,
    /// The pairs by expert, if those of one expert are computed together.
    pub(crate) groups: Option<&'a Groups>,
}

/// Whether the pairs of one expert should be computed together: each expert has a few on average.
pub(crate) fn grouped(able: Features, integers: bool, pairs: usize, experts: usize) -> bool {
    able.matrices && integers && pairs >= GROUPED_PAIRS * experts
}

/// Pairs per expert from which on they are computed together.
const GROUPED_PAIRS: usize = 2;

/// Outputs of pairs: columns `offset ..` of rows of `stride` elements; those of the second matrix follow those of the first.
pub(crate) struct ExpertRows<'a> {
    /// `[pairs, stride]` f32.
    pub(crate) rows: &'a Handle,
    pub(crate) stride: usize,
    pub(crate) offset: usize,
    /// Added to the products, `[matrices, experts, rows of an expert]`.
    pub(crate) bias: Option<&'a Handle>,
}

/// Multiplies the row of each pair by its expert's matrix.
pub(crate) fn expert_product<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    experts: &ExpertMatrix,
    pairs: &Pairs<'_>,
    integers: bool,
    out: &ExpertRows<'_>,
) {
    let (matrix, x, rows) = (&experts.matrix, pairs.x, pairs.count / pairs.each);
    let ExpertRows { rows: y, stride, offset, bias } = *out;
    let (biased, bias) = (bias.is_some(), bias.unwrap_or(y));
    let all = experts.count * experts.rows;
    let bias_len = if biased { experts.matrices * all } else { 1 };
    let integers = integers && Layout::of(matrix.kind).bits > 0;
    let (strips, first) = (experts.rows / ROWS, experts.first / ROWS);
    if !(integers && able.matrices) {
        // SAFETY: the launch has one cube per tile row of an expert and pair; experts are below their number.
        unsafe {
            plain_expert_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(strips as u32, pairs.count as u32, experts.matrices as u32),
                CubeDim::new_2d(ROWS as u32, CHUNKS as u32),
                array(&matrix.tiles, matrix.words()),
                array(&x.floats, rows * x.cols),
                array(&x.codes, x.code_words(rows)),
                array(&x.scales, x.scale_words(rows)),
                array(pairs.experts, pairs.count),
                array(bias, bias_len),
                array(y, pairs.count * stride),
                matrix.cols as u32,
                first as u32,
                strips as u32,
                (all / ROWS) as u32,
                pairs.each as u32,
                stride as u32,
                offset as u32,
                matrix.kind,
                integers,
                biased,
                able,
            );
        }
        return;
    }
    if let Some(groups) = pairs.groups {
        let table = BLOCK_PAIRS.iter().position(|block| *block == panel_tokens(matrix.kind));
        let blocks = &groups.blocks[table.expect("a table for each number of rows of a cube")];
        let [order_len, small, large] = Groups::words(pairs.count, experts.count);
        let blocks_len = [small, large][table.unwrap_or_default()];
        // SAFETY: blocks and places are those of `group`; tile rows past the last one of the expert read the last and write nothing.
        unsafe {
            panel_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(
                    blocks_max(pairs.count, experts.count, panel_tokens(matrix.kind)) as u32,
                    experts.rows.div_ceil(PANEL_ROWS) as u32,
                    experts.matrices as u32,
                ),
                CubeDim::new_2d(32, 8),
                array(&matrix.tiles, matrix.words()),
                array(&matrix.tiles, matrix.words()),
                array(&x.codes, x.code_words(rows)),
                array(&x.scales, x.scale_words(rows)),
                array(bias, bias_len),
                array(&groups.order, order_len),
                array(blocks, blocks_len),
                array(y, pairs.count * stride),
                array(y, 1),
                NIBBLES,
                matrix.groups() as u32,
                strips as u32,
                first as u32,
                (all / ROWS) as u32,
                pairs.each as u32,
                0,
                1,
                pairs.count as u32,
                stride as u32,
                offset as u32,
                experts.rows as u32,
                Share::Expert,
                matrix.kind,
                Finish { bias: biased, add: false },
                able,
            );
        }
        return;
    }
    // SAFETY: as above; tile rows past the last one of the expert read the last and write nothing.
    unsafe {
        few_expert_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(strips.div_ceil(EACH) as u32, pairs.count as u32, experts.matrices as u32),
            CubeDim::new_2d(32, CHUNKS as u32),
            array(&matrix.tiles, matrix.words()),
            array(&matrix.tiles, matrix.words()),
            array(&x.codes, x.code_words(rows)),
            array(&x.scales, x.scale_words(rows)),
            array(pairs.experts, pairs.count),
            array(bias, bias_len),
            array(y, pairs.count * stride),
            NIBBLES,
            matrix.groups() as u32,
            first as u32,
            strips as u32,
            (all / ROWS) as u32,
            pairs.each as u32,
            stride as u32,
            offset as u32,
            Shape { kind: matrix.kind, each: EACH, halves: false, one: true },
            biased,
            able,
        );
    }
}

/// Tile rows per cube.
const EACH: usize = 2;

#[cube(launch_unchecked)]
fn plain_expert_kernel(
    tiles: &Array<u32>,
    floats: &Array<f32>,
    codes: &Array<u32>,
    scales: &Array<f32>,
    experts: &Array<u32>,
    bias: &Array<f32>,
    y: &mut Array<f32>,
    cols: u32,
    first: u32,
    strips: u32,
    all_strips: u32,
    each: u32,
    stride: u32,
    offset: u32,
    #[comptime] kind: QuantType,
    #[comptime] integers: bool,
    #[comptime] biased: bool,
    #[comptime] able: Features,
) {
    let (row, chunk) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (strip, pair) = (CUBE_POS_X as usize, CUBE_POS_Y as usize);
    // Tile rows from the first matrix's first expert to this one.
    let from = CUBE_POS_Z * all_strips + experts[pair] * strips;
    let of_matrix = (first + from) as usize + strip;
    let token = pair / each as usize;
    let mut sums = Array::<f32>::new(1usize);
    chunk_sums(
        tiles,
        floats,
        codes,
        scales,
        of_matrix,
        token,
        token,
        row,
        chunk,
        cols as usize,
        &mut sums,
        1usize,
        kind,
        integers,
        able,
    );
    let mut total = total_of(sums[0], row, chunk);
    if chunk == 0 {
        if comptime!(biased) {
            total += bias[(from as usize + strip) * comptime!(ROWS) + row];
        }
        let column = (CUBE_POS_Z * strips) as usize + strip;
        y[pair * stride as usize + offset as usize + column * comptime!(ROWS) + row] = total;
    }
}

#[cube(launch_unchecked, address_type = "u64")]
fn few_expert_kernel(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    experts: &Array<u32>,
    bias: &Array<f32>,
    y: &mut Array<f32>,
    nibbles: u32,
    groups: u32,
    first: u32,
    strips: u32,
    all_strips: u32,
    each: u32,
    stride: u32,
    offset: u32,
    #[comptime] shape: Shape,
    #[comptime] biased: bool,
    #[comptime] able: Features,
) {
    let strips_each = comptime!(shape.each);
    let (lane, chunk) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (strip, pair) = (CUBE_POS_X as usize * strips_each, CUBE_POS_Y as usize);
    // The address of the weights depends on the choice of the preceding kernel.
    await_previous(able);
    let from = CUBE_POS_Z * all_strips + experts[pair] * strips;
    let begin = (first + from) as usize;
    let mut sums = Array::<f32>::new(comptime!(4 * strips_each));
    #[unroll]
    for i in 0..comptime!(4 * strips_each) {
        sums[i] = 0.0f32;
    }
    strip_sums(
        pairs,
        singles,
        codes,
        scales,
        nibbles,
        begin + strip,
        begin + strips as usize - 1,
        0u32,
        chunk,
        groups as usize,
        pair as u32 / each,
        1u32,
        lane,
        &mut sums,
        shape,
        able,
    );
    let mut shared = SharedMemory::<f32>::new(comptime!(CHUNKS * strips_each * ROWS));
    #[unroll]
    for s in 0..strips_each {
        share_sums(&sums, &mut shared, lane, chunk, s, s, strips_each, 1usize);
    }
    sync_cube();
    let unit = chunk * 32 + lane;
    let element = strip * comptime!(ROWS) + unit;
    if unit < comptime!(strips_each * ROWS) && element < strips as usize * comptime!(ROWS) {
        let mut total = 0.0f32;
        #[unroll]
        for c in 0..CHUNKS {
            total += shared[comptime!(c * strips_each * ROWS) + unit];
        }
        if comptime!(biased) {
            total += bias[from as usize * comptime!(ROWS) + element];
        }
        let column = (CUBE_POS_Z * strips) as usize * comptime!(ROWS) + element;
        y[pair * stride as usize + offset as usize + column] = total;
    }
}
