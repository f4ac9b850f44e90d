//! Row kernels between matrix products: embedding, RMSNorm, gated activations, and quantisation to the integers of products.
//!
//! A cube has 256 units. Eight neighbouring units hold a block of 32 columns, four per unit. Next: `attention.rs`.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::{Activation, CHUNKS, GROUP, LANES, QUANTISE_MIN};
use kernels::quant::QuantType;
use kernels::tile::ROWS;

use crate::arithmetic::{Features, chunk_range, fused, gate, inverse_sqrt, opaque_float, reciprocal};
use crate::inline::{await_previous, release_next};
use crate::platform::{Platform, array};
use crate::product::operands::{Activations, Matrix};
use crate::tiles::{tile_words, weight};

/// Units per cube: one per lane of each chunk of a sum of squares.
pub(crate) const UNITS: u32 = (CHUNKS * LANES) as u32;
/// Columns that a cube processes at once.
const SEGMENT: usize = 4 * UNITS as usize;

/// Writes the embeddings of `tokens`, times `scale`, to `hidden[count, cols]`. `table` holds tokens from `first` on; rows of tokens
/// outside it are not written.
pub(crate) fn embed<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    table: &Matrix,
    first: usize,
    tokens: &Handle,
    count: usize,
    scale: Option<f32>,
    hidden: &Handle,
) {
    // SAFETY: the kernel skips tokens outside the table; units past the end of a row do nothing.
    unsafe {
        embed_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(table.cols.div_ceil(UNITS as usize) as u32, count as u32, 1),
            CubeDim::new_1d(UNITS),
            array(&table.tiles, table.words()),
            array(tokens, count),
            array(hidden, count * table.cols),
            table.cols as u32,
            first as u32,
            table.rows as u32,
            scale.unwrap_or(1.0),
            table.kind,
            scale.is_some(),
            able,
        );
    }
}

#[cube(launch_unchecked)]
fn embed_kernel(
    tiles: &Array<u32>,
    tokens: &Array<u32>,
    hidden: &mut Array<f32>,
    cols: u32,
    first: u32,
    known: u32,
    scale: f32,
    #[comptime] kind: QuantType,
    #[comptime] scaled: bool,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let column = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X) as usize;
    let (cols, row) = (cols as usize, CUBE_POS_Y as usize);
    let token = tokens[row];
    if column < cols && token >= first && token - first < known {
        let token = (token - first) as usize;
        let groups = cols.div_ceil(comptime!(GROUP));
        let tile = (token / comptime!(ROWS) * groups + column / comptime!(GROUP)) * comptime!(tile_words(kind));
        let x = weight(tiles, tile, token % comptime!(ROWS), column % comptime!(GROUP), kind, able);
        if comptime!(scaled) {
            hidden[row * cols + column] = x * scale;
        } else {
            hidden[row * cols + column] = x;
        }
    }
}

/// Formats in which activations are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowFormats {
    /// f32, for unquantised matrices and for strict arithmetic.
    pub(crate) floats: bool,
    /// 8-bit integers with their scales.
    pub(crate) integers: bool,
}

/// RMSNorm of rows `hidden[count, cols]` times `weight`, in the formats `wanted`. Output row i is row `rows[i]` if given, else row i.
pub(crate) fn norm<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    hidden: &Handle,
    weight: &Handle,
    eps: f32,
    rows: Option<&Handle>,
    count: usize,
    wanted: RowFormats,
    x: &Activations,
) {
    let cols = x.cols;
    // SAFETY: a cube stays within its row; the indices in `rows` are below the number of rows of `hidden`.
    unsafe {
        norm_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(count as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            array(hidden, count * cols),
            array(hidden, count * cols),
            array(weight, cols),
            array(weight, cols),
            array(rows.unwrap_or(weight), 1),
            array(&x.floats, count * cols),
            array(&x.codes, x.code_words(count)),
            array(&x.scales, x.scale_words(count)),
            cols as u32,
            1.0 / cols as f32,
            eps,
            rows.is_some(),
            held_of(cols),
            wanted,
            able,
        );
    }
}

/// What a unit keeps of a row in registers so that it reads the row only once: columns of its lane in its chunk, and vectors of
/// four. `None` if the row is too long.
fn held_of(cols: usize) -> Option<(usize, usize)> {
    const FOURS_MAX: usize = 8;
    let fours = cols.div_ceil(SEGMENT);
    let held = (cols.div_ceil(GROUP).div_ceil(CHUNKS) * GROUP / LANES, fours);
    (cols.is_multiple_of(4) && fours <= FOURS_MAX).then_some(held)
}

#[cube(launch_unchecked)]
fn norm_kernel(
    hidden: &Array<f32>,
    hidden_fours: &Array<Vector<f32, Const<4>>>,
    weight: &Array<f32>,
    weight_fours: &Array<Vector<f32, Const<4>>>,
    rows: &Array<u32>,
    floats: &mut Array<f32>,
    codes: &mut Array<u32>,
    scales: &mut Array<Vector<f32, Const<4>>>,
    cols: u32,
    inverse: f32,
    eps: f32,
    #[comptime] chosen: bool,
    #[comptime] held: Option<(usize, usize)>,
    #[comptime] wanted: RowFormats,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (cols, out) = (cols as usize, CUBE_POS_X as usize);
    let mut from = out;
    if comptime!(chosen) {
        from = rows[out] as usize;
    }
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * UNITS as usize));
    let mut values = Array::<f32>::new(4usize);
    if comptime!(held.is_some()) {
        let (lanes, fours) = comptime!(held.unwrap());
        let unit = UNIT_POS_X as usize;
        let mut x = Array::<Vector<f32, Const<4>>>::new(fours);
        let mut w = Array::<Vector<f32, Const<4>>>::new(fours);
        #[unroll]
        for i in 0..fours {
            // Past the end of the row the last vector is read and not used.
            let at = min(i * comptime!(UNITS as usize) + unit, cols / 4 - 1);
            x[i] = hidden_fours[from * (cols / 4) + at];
            w[i] = weight_fours[at];
        }
        let squares = held_square_sum(&hidden.slice(from * cols, (from + 1) * cols), &mut shared, lanes, able);
        let factor = inverse_sqrt(fused(squares, inverse, eps, able), able);
        #[unroll]
        for i in 0..fours {
            let column = i * SEGMENT + 4 * unit;
            #[unroll]
            for k in 0..4usize {
                values[k] = select(column < cols, x[i][k] * factor * w[i][k], 0.0f32);
            }
            put(&values, out, column, cols, &mut shared, floats, codes, scales, wanted, able);
        }
        terminate!();
    }
    let squares = square_sum(&hidden.slice(from * cols, (from + 1) * cols), &mut shared, able);
    let factor = inverse_sqrt(fused(squares, inverse, eps, able), able);
    let mut start = 0usize;
    while start < cols {
        let column = start + 4 * UNIT_POS_X as usize;
        #[unroll]
        for i in 0..4usize {
            values[i] = 0.0f32;
            if column + i < cols {
                values[i] = hidden[from * cols + column + i] * factor * weight[column + i];
            }
        }
        put(&values, out, column, cols, &mut shared, floats, codes, scales, wanted, able);
        start += SEGMENT;
    }
}

/// Columns of a unit, which is a lane of a chunk: its first column and the end of its chunk. Its columns are [`LANES`] apart.
#[cube]
fn lane_columns(cols: usize) -> (usize, usize) {
    let (chunk, lane) = (UNIT_POS_X as usize / comptime!(LANES), UNIT_POS_X as usize % comptime!(LANES));
    let (from, to) = chunk_range(cols.div_ceil(comptime!(GROUP)), chunk);
    (from * comptime!(GROUP) + lane, min(cols, to * comptime!(GROUP)))
}

/// The sum of the squares of a row. All 256 units must call it, and all get the result.
#[cube]
pub(crate) fn square_sum(x: &Slice<f32>, shared: &mut SharedMemory<f32>, #[comptime] able: Features) -> f32 {
    let (mut i, end) = lane_columns(x.len());
    let mut sum = 0.0f32;
    while i < end {
        sum = fused(x[i], x[i], sum, able);
        i += comptime!(LANES);
    }
    add_chunks(sum, shared, able)
}

/// Like [`square_sum`], for rows of at most `lanes` columns per unit, which are loaded in one batch.
#[cube]
fn held_square_sum(
    x: &Slice<f32>,
    shared: &mut SharedMemory<f32>,
    #[comptime] lanes: usize,
    #[comptime] able: Features,
) -> f32 {
    let (start, end) = lane_columns(x.len());
    let mut numbers = Array::<f32>::new(lanes);
    #[unroll]
    for i in 0..lanes {
        numbers[i] = x[min(start + i * comptime!(LANES), x.len() - 1)];
    }
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..lanes {
        if start + i * comptime!(LANES) < end {
            sum = fused(numbers[i], numbers[i], sum, able);
        }
    }
    add_chunks(sum, shared, able)
}

/// Adds lanes as a tree, then chunks in order.
#[cube]
fn add_chunks(sum: f32, shared: &mut SharedMemory<f32>, #[comptime] able: Features) -> f32 {
    let unit = UNIT_POS_X as usize;
    let lane = unit % comptime!(LANES);
    if comptime!(able.matrices) {
        let mut all = sum;
        #[unroll]
        for step in 0..5u32 {
            all += plane_shuffle_xor(all, comptime!((LANES as u32 / 2) >> step));
        }
        if lane == 0 {
            shared[unit] = all;
        }
        sync_cube();
    } else {
        shared[unit] = sum;
        sync_cube();
        #[unroll]
        for step in 0..5u32 {
            let apart = comptime!((LANES / 2) >> step);
            if lane < apart {
                let other = shared[unit + apart];
                shared[unit] += other;
            }
            sync_cube();
        }
    }
    let mut total = 0.0f32;
    #[unroll]
    for chunk in 0..CHUNKS {
        total += shared[comptime!(chunk * LANES)];
    }
    sync_cube();
    total
}

/// Bits of infinity and NaN.
const INFINITE: u32 = 0x7f80_0000;
const NAN: u32 = 0x7fc0_0000;

/// Writes four values per unit, from `column` on, to row `row` of activations in the formats `wanted`. All units must call it.
#[cube]
pub(crate) fn put(
    values: &Array<f32>,
    row: usize,
    column: usize,
    cols: usize,
    shared: &mut SharedMemory<f32>,
    floats: &mut Array<f32>,
    codes: &mut Array<u32>,
    scales: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] wanted: RowFormats,
    #[comptime] able: Features,
) {
    if comptime!(wanted.floats) {
        #[unroll]
        for i in 0..4usize {
            if column + i < cols {
                floats[row * cols + column + i] = values[i];
            }
        }
    }
    if comptime!(wanted.integers) {
        let unit = UNIT_POS_X as usize;
        // Bit patterns of magnitudes sort like the magnitudes; non-finite numbers are the largest.
        let mut size = 0u32;
        #[unroll]
        for i in 0..4usize {
            size = max(size, u32::reinterpret(values[i]) & 0x7fff_ffffu32);
        }
        if comptime!(able.matrices) {
            #[unroll]
            for step in 0..3u32 {
                size = max(size, plane_shuffle_xor(size, comptime!(1 << step)));
            }
        } else {
            shared[unit] = f32::reinterpret(size);
            sync_cube();
            let block = unit / 8 * 8;
            #[unroll]
            for i in 0..8usize {
                size = max(size, u32::reinterpret(shared[block + i]));
            }
        }
        let largest = f32::reinterpret(size);
        let mut inverse = 0.0f32;
        let mut scale = 0.0f32;
        if size >= INFINITE {
            let nan = RuntimeCell::<u32>::new(NAN.runtime()); // a literal cannot be reinterpreted
            scale = f32::reinterpret(nan.read());
        } else if largest > QUANTISE_MIN {
            inverse = 127.0f32 * reciprocal(largest, able);
            scale = largest * comptime!(1.0f32 / 127.0f32);
        }
        let mut word = 0u32;
        let mut sum = 0i32;
        #[unroll]
        for i in 0..4usize {
            let code = i32::cast_from(f32::round(values[i] * inverse));
            sum += code;
            word |= (u32::reinterpret(code) & 255u32) << comptime!(8 * i as u32);
        }
        let mut first = 0i32;
        let mut second = 0i32;
        if comptime!(able.matrices) {
            sum += plane_shuffle_xor(sum, 1u32);
            sum += plane_shuffle_xor(sum, 2u32);
            first = sum;
            second = plane_shuffle_xor(sum, 4u32);
        } else {
            let sums = comptime!(UNITS as usize);
            shared[sums + unit] = f32::cast_from(sum);
            sync_cube();
            let block = sums + unit / 8 * 8;
            #[unroll]
            for i in 0..4usize {
                first += i32::cast_from(shared[block + i]);
                second += i32::cast_from(shared[block + i + 4]);
            }
            sync_cube();
        }
        if column < cols {
            let (slot, block, groups) = (unit % 8, column / 32, cols.div_ceil(comptime!(GROUP)));
            let group = row * groups + block / 2;
            codes[group * 16 + slot % 4 * 4 + block % 2 * 2 + slot / 4] = word;
            if slot == 0 {
                let mut all = Vector::<f32, Const<4>>::empty();
                all[0] = scale;
                all[1] = scale * f32::cast_from(first + second);
                all[2] = f32::reinterpret(first + second);
                all[3] = f32::reinterpret(first);
                scales[group * 2 + block % 2] = all;
            }
        }
    }
}

/// activation(gate) · up of rows `[count, 2 · cols]` (gates, then ups), in the formats `wanted`.
pub(crate) fn gated<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    both: &Handle,
    activation: Activation,
    count: usize,
    wanted: RowFormats,
    x: &Activations,
) {
    let cols = x.cols;
    // SAFETY: units past the end of a row read and write nothing.
    unsafe {
        gated_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(cols.div_ceil(SEGMENT) as u32, count as u32, 1),
            CubeDim::new_1d(UNITS),
            array(both, 2 * count * cols),
            array(&x.floats, count * cols),
            array(&x.codes, x.code_words(count)),
            array(&x.scales, x.scale_words(count)),
            cols as u32,
            activation,
            wanted,
            able,
        );
    }
}

#[cube(launch_unchecked)]
fn gated_kernel(
    both: &Array<f32>,
    floats: &mut Array<f32>,
    codes: &mut Array<u32>,
    scales: &mut Array<Vector<f32, Const<4>>>,
    cols: u32,
    #[comptime] activation: Activation,
    #[comptime] wanted: RowFormats,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (cols, row) = (cols as usize, CUBE_POS_Y as usize);
    let column = (CUBE_POS_X * comptime!(SEGMENT as u32) + 4 * UNIT_POS_X) as usize;
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * UNITS as usize));
    let mut values = Array::<f32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        values[i] = 0.0f32;
        if column + i < cols {
            let at = 2 * row * cols + column + i;
            values[i] = gate(both[at], both[at + cols], activation, able);
        }
    }
    put(&values, row, column, cols, &mut shared, floats, codes, scales, wanted, able);
}

/// Adds the RMSNorm of `delta[count, cols]` times `weight` to `hidden`: for models that normalise the output of a block.
pub(crate) fn norm_add<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    delta: &Handle,
    weight: &Handle,
    eps: f32,
    count: usize,
    cols: usize,
    hidden: &Handle,
) {
    // SAFETY: a cube stays within its row.
    unsafe {
        norm_add_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(count as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            array(delta, count * cols),
            array(weight, cols),
            array(hidden, count * cols),
            cols as u32,
            1.0 / cols as f32,
            eps,
            able,
        );
    }
}

#[cube(launch_unchecked)]
fn norm_add_kernel(
    delta: &Array<f32>,
    weight: &Array<f32>,
    hidden: &mut Array<f32>,
    cols: u32,
    inverse: f32,
    eps: f32,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let cols = cols as usize;
    let from = CUBE_POS_X as usize * cols;
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    let squares = square_sum(&delta.slice(from, from + cols), &mut shared, able);
    let factor = inverse_sqrt(fused(squares, inverse, eps, able), able);
    let mut i = UNIT_POS_X as usize;
    while i < cols {
        hidden[from + i] += opaque_float(delta[from + i] * factor * weight[i]);
        i += comptime!(UNITS as usize);
    }
}

/// Soft cap of `len` numbers in place.
pub(crate) fn cap<R: Platform>(client: &ComputeClient<R>, able: Features, numbers: &Handle, len: usize, cap: f32) {
    // SAFETY: units past the end do nothing.
    unsafe {
        cap_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(len.div_ceil(UNITS as usize) as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            array(numbers, len),
            cap,
            len as u32,
            able,
        );
    }
}

#[cube(launch_unchecked)]
fn cap_kernel(numbers: &mut Array<f32>, cap: f32, len: u32, #[comptime] able: Features) {
    if ABSOLUTE_POS < len as usize {
        numbers[ABSOLUTE_POS] = crate::arithmetic::soft_cap(numbers[ABSOLUTE_POS], cap, able);
    }
}
