//! Matrix products of activation rows with tiled weights, in the order of `kernels::order::dot`; picks the kernel for the device.
//!
//! One plane computes a chunk of columns, or one unit per matrix row does; chunk sums are added in shared memory. A tile row
//! (`strip` in the code) is the tiles of 16 matrix rows. Next: `rows.rs`.
use cubecl::prelude::*;
use kernels::order::CHUNKS;
use kernels::tile::{Layout, ROWS, Scales};

use crate::arithmetic::Features;
use crate::platform::{Platform, array};
use crate::tiles::NIBBLES;

mod experts;
mod few;
mod gates;
mod groups;
mod matrices;
pub(crate) mod operands;
mod panel;
mod plain;
mod router;

pub(crate) use experts::{ExpertMatrix, ExpertRows, Pairs, expert_product, grouped};
use few::{FEW, Shape, few_kernel};
pub(crate) use gates::{gate_product, gates};
pub(crate) use groups::{Groups, group};
use operands::{Activations, Finish, Matrix, Target};
pub(crate) use panel::PARTS_WORDS;
pub(crate) use panel::large_rows;
use panel::{Division, PANEL_ROWS, Share, gather_kernel, panel_kernel, panel_tokens};
use plain::{plain_kernel, plain_tokens};
pub(crate) use router::{chunk_words, is_chunked, router_chunks};

/// Matrices with at least this number of tile rows let a plane compute two of them.
const TWO_STRIPS: usize = 1024;
/// From this number of activation rows on, the panel kernel is used.
const PANEL_FROM: usize = 17;

/// Multiplies `count` rows of `x` by a matrix. `integers`: uses 8-bit activations if the matrix is quantised.
pub(crate) fn product<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
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
        let tokens = plain_tokens(matrix.kind, count);
        // SAFETY: the launch has cubes for all tile rows and activation rows; rows past the last one read it and write nothing.
        unsafe {
            plain_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(strips as u32, count.div_ceil(tokens) as u32, 1),
                CubeDim::new_2d(ROWS as u32, CHUNKS as u32),
                array(&matrix.tiles, matrix.words()),
                array(&x.floats, count * x.cols),
                array(&x.codes, x.code_words(count)),
                array(&x.scales, x.scale_words(count)),
                array(bias, bias_len),
                array(target.rows, count * target.stride),
                matrix.cols as u32,
                count as u32,
                target.stride as u32,
                target.offset as u32,
                target.width as u32,
                tokens,
                matrix.kind,
                integers,
                finish,
                able,
            );
        }
        return;
    }
    if count >= PANEL_FROM {
        let tokens = panel_tokens(matrix.kind);
        let grid = (count.div_ceil(tokens), matrix.rows.div_ceil(PANEL_ROWS));
        let processors = client.properties().hardware.num_streaming_multiprocessors;
        let division = target.parts.map(|scratch| (scratch, Division::of(grid.0 * grid.1, processors)));
        let division = division.filter(|(_, division)| division.divided > 0);
        let (scratch, scratch_len, whole, parts) = match division {
            Some((scratch, division)) => (scratch, PARTS_WORDS, division.whole, division.parts),
            None => (target.rows, 1, 0, 1),
        };
        let cubes = match division {
            Some((_, division)) => CubeCount::Static((division.whole + division.divided * division.parts) as u32, 1, 1),
            None => CubeCount::Static(grid.0 as u32, grid.1 as u32, 1),
        };
        // SAFETY: tile rows past the last one read the last and write nothing, tokens past the last one do neither. Chunk sums fit into
        // `PARTS_WORDS`.
        unsafe {
            panel_kernel::launch_unchecked::<R>(
                client,
                cubes,
                CubeDim::new_2d(32, 8),
                array(&matrix.tiles, matrix.words()),
                array(&matrix.tiles, matrix.words()),
                array(&x.codes, x.code_words(count)),
                array(&x.scales, x.scale_words(count)),
                array(bias, bias_len),
                array(&x.codes, 1),
                array(&x.codes, 1),
                array(target.rows, count * target.stride),
                array(scratch, scratch_len),
                NIBBLES,
                matrix.groups() as u32,
                strips as u32,
                0,
                0,
                1,
                whole as u32,
                parts as u32,
                count as u32,
                target.stride as u32,
                target.offset as u32,
                target.width as u32,
                if division.is_some() { Share::Divided } else { Share::Whole },
                matrix.kind,
                finish,
                able,
            );
            if let Some((scratch, division)) = division {
                gather_kernel::launch_unchecked::<R>(
                    client,
                    CubeCount::Static(count.min(tokens) as u32, division.divided as u32, 1),
                    CubeDim::new_1d(PANEL_ROWS as u32),
                    array(scratch, PARTS_WORDS),
                    array(bias, bias_len),
                    array(target.rows, count * target.stride),
                    division.whole as u32,
                    count as u32,
                    target.stride as u32,
                    target.offset as u32,
                    target.width as u32,
                    tokens,
                    finish,
                    able,
                );
            }
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
