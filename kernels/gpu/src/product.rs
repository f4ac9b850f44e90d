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
use panel::{GATHERERS, PANEL_ROWS, Share, gather_kernel, panel_kernel, panel_tokens, parts};
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
        let parts = target.parts.map(|scratch| (scratch, parts(matrix.rows, count, matrix.kind)));
        let parts = parts.filter(|(_, parts)| *parts > 1);
        let (y, y_len, stride, offset, panel_finish) = match parts {
            Some((scratch, _)) => {
                (scratch, CHUNKS * count * target.width, target.width, 0, Finish { bias: false, add: false })
            }
            None => (target.rows, count * target.stride, target.stride, target.offset, finish),
        };
        // SAFETY: tile rows past the last one read the last and write nothing, tokens past the last one do neither. Chunk sums fit into
        // `PARTS_WORDS`.
        unsafe {
            panel_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(
                    count.div_ceil(panel_tokens(matrix.kind)) as u32,
                    matrix.rows.div_ceil(PANEL_ROWS) as u32,
                    parts.map_or(1, |(_, parts)| parts) as u32,
                ),
                CubeDim::new_2d(32, 8),
                array(&matrix.tiles, matrix.words()),
                array(&matrix.tiles, matrix.words()),
                array(&x.codes, x.code_words(count)),
                array(&x.scales, x.scale_words(count)),
                array(bias, bias_len),
                array(&x.codes, 1),
                array(&x.codes, 1),
                array(y, y_len),
                NIBBLES,
                matrix.groups() as u32,
                strips as u32,
                0,
                0,
                1,
                count as u32,
                stride as u32,
                offset as u32,
                target.width as u32,
                if parts.is_some() { Share::Chunks } else { Share::Whole },
                matrix.kind,
                panel_finish,
                able,
            );
            if let Some((scratch, _)) = parts {
                gather_kernel::launch_unchecked::<R>(
                    client,
                    CubeCount::Static(target.width.div_ceil(GATHERERS) as u32, count as u32, 1),
                    CubeDim::new_1d(GATHERERS as u32),
                    array(scratch, y_len),
                    array(bias, bias_len),
                    array(target.rows, count * target.stride),
                    count as u32,
                    target.stride as u32,
                    target.offset as u32,
                    target.width as u32,
                    finish,
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
