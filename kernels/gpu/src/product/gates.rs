//! Fused gate and up products of up to eight rows: writes activation(gate) · up as the 8-bit integers that the down product reads.
use cubecl::prelude::*;
use kernels::order::{Activation, CHUNKS};
use kernels::tile::{Layout, ROWS};

use super::few::{FEW, Shape, share_sums, strip_sums};
use super::operands::{Activations, Matrix};
use crate::arithmetic::{Features, gate};
use crate::platform::{Platform, array};
use crate::rows::{RowFormats, put};
use crate::tiles::NIBBLES;

/// Tile rows per cube: two of the gate and two of up, for one block of 32 output columns.
const STRIPS: usize = 4;
/// Output columns per cube.
const COLUMNS: usize = STRIPS / 2 * ROWS;

/// Whether [`gate_product`] supports `count` rows of a matrix that holds gate, then up.
pub(crate) fn gates(matrix: &Matrix, count: usize, able: Features) -> bool {
    able.matrices && Layout::of(matrix.kind).bits > 0 && count <= FEW && matrix.rows.is_multiple_of(2 * COLUMNS)
}

/// Multiplies `count` rows of `x` by a matrix that holds gate, then up; writes activation(gate) · up to the integers of `gated`.
pub(crate) fn gate_product<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    matrix: &Matrix,
    x: &Activations,
    count: usize,
    activation: Activation,
    gated: &Activations,
) {
    let cols = matrix.rows / 2;
    // SAFETY: a cube stays within its tile rows, and the activations have `count` rows.
    unsafe {
        gate_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static((cols / COLUMNS) as u32, 1, 1),
            CubeDim::new_2d(32, CHUNKS as u32),
            array(&matrix.tiles, matrix.words()),
            array(&matrix.tiles, matrix.words()),
            array(&x.codes, x.code_words(count)),
            array(&x.scales, x.scale_words(count)),
            array(&gated.floats, count * cols),
            array(&gated.codes, gated.code_words(count)),
            array(&gated.scales, gated.scale_words(count)),
            NIBBLES,
            matrix.groups() as u32,
            cols as u32,
            count as u32,
            Shape { kind: matrix.kind, each: STRIPS, halves: true, one: count == 1 },
            activation,
            able,
        );
    }
}

#[cube(launch_unchecked, address_type = "u64")]
fn gate_kernel(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    out_floats: &mut Array<f32>,
    out_codes: &mut Array<u32>,
    out_scales: &mut Array<Vector<f32, Const<4>>>,
    nibbles: u32,
    groups: u32,
    cols: u32,
    count: u32,
    #[comptime] shape: Shape,
    #[comptime] activation: Activation,
    #[comptime] able: Features,
) {
    let columns = comptime!(shape.columns());
    let (lane, plane) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (groups, cols) = (groups as usize, cols as usize);
    let strip = CUBE_POS_X as usize * comptime!(STRIPS / 2);
    // Offset from gate to up, in tiles.
    let far = u32::cast_from(cols / comptime!(ROWS) * groups);
    let end = cols / comptime!(ROWS);
    let mut shared = SharedMemory::<f32>::new(comptime!(CHUNKS * STRIPS * ROWS * columns));
    let mut sums = Array::<f32>::new(comptime!(4 * STRIPS));
    #[unroll]
    for i in 0..comptime!(4 * STRIPS) {
        sums[i] = 0.0f32;
    }
    strip_sums(
        pairs,
        singles,
        codes,
        scales,
        nibbles,
        strip,
        end + end,
        far,
        plane,
        groups,
        0u32,
        count,
        lane,
        &mut sums,
        shape,
        able,
    );
    #[unroll]
    for s in 0..STRIPS {
        share_sums(&sums, &mut shared, lane, plane, s, s, STRIPS, columns);
    }
    sync_cube();
    // A plane finishes one activation row; eight of its units handle four columns each.
    if plane < count as usize && plane < columns {
        let mut values = Array::<f32>::new(4usize);
        let first = lane % 8 * 4;
        #[unroll]
        for i in 0..4usize {
            let mut both = Array::<f32>::new(2usize);
            #[unroll]
            for half in 0..2usize {
                let mut total = 0.0f32;
                #[unroll]
                for c in 0..CHUNKS {
                    let row = (comptime!(c * columns) + plane) * comptime!(STRIPS * ROWS);
                    total += shared[row + comptime!(half * COLUMNS + i) + first];
                }
                both[half] = total;
            }
            values[i] = gate(both[0], both[1], activation, able);
        }
        let column = CUBE_POS_X as usize * COLUMNS + first;
        let column = select(lane < 8, column, cols);
        let mut unused = SharedMemory::<f32>::new(1usize);
        let wanted = comptime!(RowFormats { floats: false, integers: true });
        put(&values, plane, column, cols, &mut unused, out_floats, out_codes, out_scales, wanted, able);
    }
}
