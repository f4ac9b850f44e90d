//! Matrix times vector, straight from quantised blocks: 32 lanes share a row, a lane takes 32 weights at a time.
//!
//! The order of accumulation of an output element: lane l sums its units l, l + 32, … one weight after the other with
//! fused multiply-adds, then the lanes are added as a tree. How many rows of the matrix (`rows_each`) and of the input
//! (`tile`) a line of lanes takes at once only saves loads.
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::pack::UNIT;
use super::{LANES, array};
use crate::quant::QuantType;

/// A packed matrix on a device (see [`super::Packed`]).
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Storage format.
    pub quant: QuantType,
    /// Elements of an output row.
    pub rows: usize,
    /// Elements of an input row.
    pub cols: usize,
    /// The plane of quants, and its words.
    pub quants: (Handle, usize),
    /// The plane of scales, and its words.
    pub scales: (Handle, usize),
}

/// Input rows that share the decoding of a weight. More would spill registers.
const TILE: usize = 4;
/// From this many rows on, a line of a plane's lanes takes four: below, the device is not full with fewer lines.
const ROWS_FOR_FOUR: usize = 4096;
/// Lines in a cube where lanes shuffle.
const LINES: u32 = 4;
/// Rows of a line where lanes meet in shared memory, whose barriers cost more than a row.
const ROWS_SHARED: usize = 8;

/// `y[n, rows] = x[n, cols] · weightᵀ`, the result in a new buffer.
pub fn matvec<R: Runtime>(client: &ComputeClient<R>, matrix: &Matrix, x: &Handle, n: usize) -> Handle {
    let y = client.empty(n * matrix.rows * size_of::<f32>());
    let whole = n - n % TILE;
    for (first, count, tile) in [(0, whole, TILE), (whole, n - whole, 1)] {
        if count > 0 {
            launch(client, matrix, x, &y, n, Tiles { first, count: count / tile, tile });
        }
    }
    y
}

/// Input rows `first ..`, in `count` tiles of `tile` rows.
struct Tiles {
    first: usize,
    count: usize,
    tile: usize,
}

fn launch<R: Runtime>(client: &ComputeClient<R>, matrix: &Matrix, x: &Handle, y: &Handle, n: usize, tiles: Tiles) {
    // Shuffles where a line of 32 lanes is certainly one plane; Vulkan devices may pick other plane sizes.
    let hardware = &client.properties().hardware;
    let shuffles = hardware.plane_size_min == LANES && hardware.plane_size_max == LANES;
    let (rows_each, lines) = match shuffles {
        true if matrix.rows >= ROWS_FOR_FOUR => (4, LINES),
        true => (1, LINES),
        false => (ROWS_SHARED, 1),
    };
    let cubes = matrix.rows.div_ceil(rows_each * lines as usize);
    // SAFETY: lanes beyond the last row read the last row and write nothing; units stay below a row's; tiles below n.
    unsafe {
        kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(cubes as u32, tiles.count as u32, 1),
            CubeDim::new_2d(LANES, lines),
            array(&matrix.quants.0, matrix.quants.1),
            array(&matrix.scales.0, matrix.scales.1),
            array(x, n * matrix.cols),
            array(y, n * matrix.rows),
            matrix.rows as u32,
            matrix.cols as u32,
            tiles.first as u32,
            matrix.quant,
            rows_each,
            tiles.tile,
            shuffles,
        );
    }
}

#[cube(launch_unchecked)]
fn kernel(
    quants: &Array<Vector<u32, Const<4>>>,
    scales: &Array<u32>,
    x: &Array<Vector<f32, Const<4>>>,
    y: &mut Array<f32>,
    rows: u32,
    cols: u32,
    first: u32,
    #[comptime] quant: QuantType,
    #[comptime] rows_each: usize,
    #[comptime] tile: usize,
    #[comptime] shuffles: bool,
) {
    let rows = rows as usize;
    let units = cols as usize / comptime!(UNIT);
    let lane = UNIT_POS_X as usize;
    let row = (CUBE_POS_X * CUBE_DIM_Y + UNIT_POS_Y) as usize * rows_each;
    let input = first as usize + CUBE_POS_Y as usize * tile;
    if comptime!(shuffles) {
        // All rows of the line at once: their loads overlap.
        let mut sums = Array::<f32>::new(comptime!(rows_each * tile));
        #[unroll]
        for i in 0..rows_each * tile {
            sums[i] = 0.0f32;
        }
        let mut unit = lane;
        while unit < units {
            #[unroll]
            for r in 0..rows_each {
                let at = min(row + r, rows - 1);
                add_unit(quants, scales, x, at, unit, units, input, &mut sums, comptime!(r * tile), quant, tile);
            }
            unit += comptime!(LANES as usize);
        }
        #[unroll]
        for i in 0..rows_each * tile {
            let mut sum = sums[i];
            #[unroll]
            for step in 0..5u32 {
                sum += plane_shuffle_xor(sum, comptime!((LANES / 2) >> step));
            }
            let (r, t) = comptime!((i / tile, i % tile));
            if lane == 0 && row + r < rows {
                y[(input + t) * rows + row + r] = sum;
            }
        }
    } else {
        // One row after the other, then one barrier for all of them, then a lane per result.
        let lanes = comptime!(LANES as usize);
        let mut shared = SharedMemory::<f32>::new(comptime!(rows_each * tile * LANES as usize));
        for r in 0..rows_each {
            let mut sums = Array::<f32>::new(tile);
            #[unroll]
            for t in 0..tile {
                sums[t] = 0.0f32;
            }
            let mut unit = lane;
            while unit < units {
                add_unit(quants, scales, x, min(row + r, rows - 1), unit, units, input, &mut sums, 0usize, quant, tile);
                unit += lanes;
            }
            #[unroll]
            for t in 0..tile {
                shared[(r * tile + t) * lanes + lane] = sums[t];
            }
        }
        sync_cube();
        if lane < comptime!(rows_each * tile) {
            let sum = add_lanes(&shared, lane * lanes);
            let (r, t) = (lane / tile, lane % tile);
            if row + r < rows {
                y[(input + t) * rows + row + r] = sum;
            }
        }
    }
}

/// Adds a lane's partial products of one unit to `sums[at ..]`, one per input row of the tile.
#[cube]
fn add_unit(
    quants: &Array<Vector<u32, Const<4>>>,
    scales: &Array<u32>,
    x: &Array<Vector<f32, Const<4>>>,
    row: usize,
    unit: usize,
    units: usize,
    input: usize,
    sums: &mut Array<f32>,
    #[comptime] at: usize,
    #[comptime] quant: QuantType,
    #[comptime] tile: usize,
) {
    let mut weights = Array::<f32>::new(comptime!(UNIT));
    decode(quants, scales, row, unit, units, &mut weights, quant);
    #[unroll]
    for t in 0..tile {
        let base = ((input + t) * units + unit) * 8;
        let mut sum = sums[comptime!(at + t)];
        #[unroll]
        for k in 0..8usize {
            let four = x[base + k];
            #[unroll]
            for j in 0..4usize {
                sum = fma(weights[k * 4 + j], four[j], sum);
            }
        }
        sums[comptime!(at + t)] = sum;
    }
}

/// The tree that shuffles make, by one lane: i and i + 16, then i and i + 8 and so on.
#[cube]
fn add_lanes(shared: &SharedMemory<f32>, base: usize) -> f32 {
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        sums[i] = shared[base + i] + shared[base + i + 16];
    }
    #[unroll]
    for step in 1..5u32 {
        let half = comptime!(16usize >> step);
        #[unroll]
        for i in 0..half {
            sums[i] = sums[i] + sums[i + half];
        }
    }
    sums[0]
}

/// The 32 weights of a unit, as `QuantType::dequantize` gives them.
#[cube]
fn decode(
    quants: &Array<Vector<u32, Const<4>>>,
    scales: &Array<u32>,
    row: usize,
    unit: usize,
    units: usize,
    weights: &mut Array<f32>,
    #[comptime] quant: QuantType,
) {
    let g = row * units + unit;
    match quant {
        QuantType::F32 =>
        {
            #[unroll]
            for k in 0..8usize {
                let four = quants[g * 8 + k];
                #[unroll]
                for j in 0..4usize {
                    weights[k * 4 + j] = f32::reinterpret(four[j]);
                }
            }
        }
        QuantType::F16 =>
        {
            #[unroll]
            for k in 0..4usize {
                let eight = quants[g * 4 + k];
                #[unroll]
                for j in 0..4usize {
                    weights[k * 8 + j * 2] = half(eight[j] & 0xffffu32);
                    weights[k * 8 + j * 2 + 1] = half(eight[j] >> 16u32);
                }
            }
        }
        QuantType::Bf16 =>
        {
            #[unroll]
            for k in 0..4usize {
                let eight = quants[g * 4 + k];
                #[unroll]
                for j in 0..4usize {
                    weights[k * 8 + j * 2] = f32::reinterpret(eight[j] << 16u32);
                    weights[k * 8 + j * 2 + 1] = f32::reinterpret(eight[j] & 0xffff_0000u32);
                }
            }
        }
        QuantType::Q4_0 => {
            let scale = half((scales[g / 2] >> (16 * (g % 2) as u32)) & 0xffffu32);
            nibbles(quants[g], scale, scale * -8.0f32, weights);
        }
        QuantType::Q4_1 => {
            let both = scales[g];
            nibbles(quants[g], half(both & 0xffffu32), half(both >> 16u32), weights);
        }
        QuantType::Q5_0 => {
            // A scale and 32 fifth bits: three halfwords.
            let scale = half(halfword(scales, 3 * g));
            let fifth = halfword(scales, 3 * g + 1) | (halfword(scales, 3 * g + 2) << 16u32);
            fives(quants[g], fifth, scale, -16.0f32 * scale, weights);
        }
        QuantType::Q5_1 => {
            let both = scales[2 * g];
            fives(quants[g], scales[2 * g + 1], half(both & 0xffffu32), half(both >> 16u32), weights);
        }
        QuantType::Q8_0 => {
            let scale = half((scales[g / 2] >> (16 * (g % 2) as u32)) & 0xffffu32);
            #[unroll]
            for k in 0..2usize {
                // The sign bit flipped makes a byte its value + 128.
                let bytes = quants[g * 2 + k];
                #[unroll]
                for j in 0..16usize {
                    let byte = ((bytes[j / 4] >> (8 * (j % 4) as u32)) & 255u32) ^ 128u32;
                    weights[k * 16 + j] = (small(byte) - 128.0f32) * scale;
                }
            }
        }
        QuantType::Q4K => super_block(quants, g, weights, false),
        QuantType::Q5K => super_block(quants, g, weights, true),
        QuantType::Q6K => q6_k(quants, scales, g, weights),
    }
}

/// 16 bytes: weight `j` is the low nibble of byte `j`, weight `16 + j` its high nibble.
#[cube]
fn nibbles(four: Vector<u32, Const<4>>, scale: f32, minimum: f32, weights: &mut Array<f32>) {
    #[unroll]
    for j in 0..16usize {
        let byte = four[j / 4] >> (8 * (j % 4) as u32);
        weights[j] = fma(small(byte & 15u32), scale, minimum);
        weights[16 + j] = fma(small((byte >> 4u32) & 15u32), scale, minimum);
    }
}

/// As [`nibbles`], with bit `i` of `fifth` as the fifth bit of weight `i`.
#[cube]
fn fives(four: Vector<u32, Const<4>>, fifth: u32, scale: f32, minimum: f32, weights: &mut Array<f32>) {
    #[unroll]
    for j in 0..16usize {
        let byte = four[j / 4] >> (8 * (j % 4) as u32);
        let bits = fifth >> (j as u32);
        let low = (byte & 15u32) | ((bits & 1u32) << 4u32);
        let high = ((byte >> 4u32) & 15u32) | (((bits >> 16u32) & 1u32) << 4u32);
        weights[j] = fma(small(low), scale, minimum);
        weights[16 + j] = fma(small(high), scale, minimum);
    }
}

#[cube]
fn halfword(words: &Array<u32>, index: usize) -> u32 {
    (words[index / 2] >> (16 * (index % 2) as u32)) & 0xffffu32
}

/// A group of 32 of a Q4_K or Q5_K block: scales in the first 16 bytes, then for Q5_K 32 bytes of fifth bits, then
/// nibbles, two groups to 32 bytes.
#[cube]
fn super_block(quants: &Array<Vector<u32, Const<4>>>, g: usize, weights: &mut Array<f32>, #[comptime] fifth: bool) {
    let base = (g / 8) * comptime!(if fifth { 11usize } else { 9usize });
    let group = (g % 8) as u32;
    let header = quants[base];
    let at = 8u32 * (group % 4u32);
    let (low, high, both) = (header[1] >> at, header[2] >> at, header[3] >> at);
    let later = group >= 4u32;
    let scale = select(later, (both & 15u32) | (((low >> 6u32) & 3u32) << 4u32), low & 63u32);
    let minimum = select(later, ((both >> 4u32) & 15u32) | (((high >> 6u32) & 3u32) << 4u32), high & 63u32);
    let scale = half(header[0] & 0xffffu32) * small(scale);
    let minimum = -(half(header[0] >> 16u32) * small(minimum));
    let nibbles = base + comptime!(if fifth { 3usize } else { 1usize }) + (g % 8) / 2 * 2;
    let shift = 4u32 * (group % 2u32);
    #[unroll]
    for k in 0..2usize {
        let four = quants[nibbles + k];
        #[unroll]
        for j in 0..16usize {
            let mut code = (four[j / 4] >> (8 * (j % 4) as u32 + shift)) & 15u32;
            if comptime!(fifth) {
                let bits = quants[base + 1 + k];
                code |= ((bits[j / 4] >> (8 * (j % 4) as u32 + group)) & 1u32) << 4u32;
            }
            weights[k * 16 + j] = fma(small(code), scale, minimum);
        }
    }
}

/// A quarter of 32 of one half of a Q6_K block.
#[cube]
fn q6_k(quants: &Array<Vector<u32, Const<4>>>, scales: &Array<u32>, g: usize, weights: &mut Array<f32>) {
    let (block, half_of, quarter) = (g / 8, g % 8 / 4, g % 4);
    let low = block * 12 + half_of * 4 + quarter % 2 * 2;
    let high = block * 12 + 8 + half_of * 2;
    let scale = half(scales[block * 5 + 4] & 0xffffu32);
    // Two of the block's 16 signed bytes, each for 16 weights.
    let pair = scales[block * 5 + half_of * 2 + quarter / 2] >> (16 * (quarter % 2) as u32);
    let nibble = 4 * (quarter / 2) as u32;
    let bits = 2 * quarter as u32;
    #[unroll]
    for k in 0..2usize {
        let group = scale * (small(((pair >> (8 * k as u32)) & 255u32) ^ 128u32) - 128.0f32);
        let (low, high) = (quants[low + k], quants[high + k]);
        #[unroll]
        for j in 0..16usize {
            let at = 8 * (j % 4) as u32;
            let code = ((low[j / 4] >> (at + nibble)) & 15u32) | (((high[j / 4] >> (at + bits)) & 3u32) << 4u32);
            weights[k * 16 + j] = (small(code) - 32.0f32) * group;
        }
    }
}

/// An integer below 2²³ as a float, without a conversion: conversions run at a quarter of the rate of additions.
#[cube]
fn small(n: u32) -> f32 {
    f32::reinterpret(n | 0x4b00_0000u32) - 8_388_608.0f32
}

/// A finite IEEE half, by integer operations: not every Vulkan device stores halves, and some flush small ones.
#[cube]
fn half(bits: u32) -> f32 {
    let magnitude = bits & 0x7fffu32;
    let normal = f32::reinterpret((magnitude << 13u32) + 0x3800_0000u32);
    let subnormal = small(magnitude) * 5.960_464_5e-8f32;
    let magnitude = select(magnitude < 0x400u32, subnormal, normal);
    f32::reinterpret(u32::reinterpret(magnitude) | ((bits & 0x8000u32) << 16u32))
}
