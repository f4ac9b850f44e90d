//! Products of rows with a matrix of tiles: the order of `kernels::order::dot`, by whatever the device has.
//!
//! A chunk of columns is computed by one plane, or by one unit for each row of a tile; the chunk sums meet in shared memory.
//! Next: `rows.rs`.
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::{CHUNKS, GROUP};
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS, Scales};

use crate::arithmetic::{Abilities, biased, from_biased, fused};
use crate::tiles::{
    LaneTile, NIBBLES, code_words, fragment, lane_block_scales, lane_scales, lane_vectors, read_lane, row_scales,
    slot_codes, tile_words, weight,
};
use crate::{Platform, array};

/// A matrix of tiles on a device.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    /// The format that the tiles were made from.
    pub(crate) kind: QuantType,
    /// Elements of an output row, padded to whole tiles.
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

/// Rows of activations on a device, `count` of them.
#[derive(Clone, Debug)]
pub(crate) struct Activations {
    /// `[count, cols]` f32; read by matrices of numbers, and by all in strict arithmetic.
    pub(crate) floats: Handle,
    /// Integers, `[count, groups, 16]` words: word `4 · (slot mod 4) + 2 · block + slot / 4` of a group holds the four columns of a
    /// slot of one of its two blocks. A lane of a plane reads four words at once.
    pub(crate) codes: Handle,
    /// `[count, blocks, 4]`: scale; scale times the sum of the codes; as integers the sum of all codes, and of the first 16.
    pub(crate) scales: Handle,
    /// Elements of a row.
    pub(crate) cols: usize,
}

impl Activations {
    /// Room for rows on a device, zeroed: what fills a last group is never written.
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

/// Where a product goes: columns `offset ..` of rows of `stride` numbers.
#[derive(Clone, Debug)]
pub(crate) struct Target<'a> {
    /// `[count, stride]` f32.
    pub(crate) rows: &'a Handle,
    /// Numbers of a row.
    pub(crate) stride: usize,
    /// Where the product begins.
    pub(crate) offset: usize,
    /// Rows of the matrix that are wanted: those that fill a last tile are not.
    pub(crate) width: usize,
    /// Added to the product.
    pub(crate) bias: Option<&'a Handle>,
    /// The product is added to what is there.
    pub(crate) add: bool,
}

/// How a kernel finishes an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Finish {
    bias: bool,
    add: bool,
}

/// Rows that one pass over the weights takes on matrix instructions.
const FEW: usize = 8;
/// From this many strips of 16 rows on, a plane takes two.
const TWO_STRIPS: usize = 1024;
/// From this many rows on a panel reads each weight once for all of them.
const PANEL_FROM: usize = 17;
/// Tokens of a panel.
const PANEL_TOKENS: usize = 128;
/// Matrix rows of a panel.
const PANEL_ROWS: usize = 64;

/// `count` rows of `x` times a matrix. `integers`: the activations' integers are used where the matrix has codes.
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
        // SAFETY: units stay within the tiles of their strip and the rows of the grid.
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
        // SAFETY: tokens beyond the last read the last and write nothing; strips beyond the last likewise.
        unsafe {
            panel_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(count.div_ceil(PANEL_TOKENS) as u32, matrix.rows.div_ceil(PANEL_ROWS) as u32, 1),
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
        // Two strips share what is read of the activations, where there are enough of them for all of the device.
        let each = if strips >= TWO_STRIPS { 2 } else { 1 };
        // SAFETY: rows beyond the last read the last and write nothing; strips are those of the grid.
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
                matrix.kind,
                each,
                if rows == 1 { Some(matrix.groups().div_ceil(CHUNKS)) } else { None },
                finish,
                able,
            );
        }
        first += rows;
    }
}

/// Groups of columns before those of a chunk.
#[cube]
fn chunk_start(groups: usize, chunk: usize) -> usize {
    chunk * groups / comptime!(CHUNKS)
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

/// Any device, any format: a unit computes one chunk of one row of the matrix.
#[cube(launch_unchecked)]
fn plain_kernel(
    tiles: &Array<u32>,
    floats: &Array<f32>,
    codes: &Array<u32>,
    scales: &Array<f32>,
    bias: &Array<f32>,
    y: &mut Array<f32>,
    cols: u32,
    stride: u32,
    offset: u32,
    width: u32,
    #[comptime] kind: QuantType,
    #[comptime] integers: bool,
    #[comptime] finish: Finish,
    #[comptime] able: Abilities,
) {
    let (row, chunk) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (strip, token) = (CUBE_POS_X as usize, CUBE_POS_Y as usize);
    let cols = cols as usize;
    let groups = cols.div_ceil(comptime!(GROUP));
    let (from, to) = (chunk_start(groups, chunk), chunk_start(groups, chunk + 1));
    let mut sum = 0.0f32;
    for group in from..to {
        let tile = (strip * groups + group) * comptime!(tile_words(kind));
        if comptime!(integers) {
            #[unroll]
            for block in 0..2usize {
                sum = plain_block(tiles, tile, codes, scales, token * groups + group, block, row, sum, kind, able);
            }
        } else {
            let end = min(comptime!(GROUP), cols - group * comptime!(GROUP));
            for column in 0..end {
                let x = floats[token * cols + group * comptime!(GROUP) + column];
                sum = fused(weight(tiles, tile, row, column, kind, able), x, sum, able);
            }
        }
    }
    let mut sums = SharedMemory::<f32>::new(comptime!(ROWS * CHUNKS));
    sums[chunk * comptime!(ROWS) + row] = sum;
    sync_cube();
    let element = strip * comptime!(ROWS) + row;
    if chunk == 0 && element < width as usize {
        let mut total = 0.0f32;
        #[unroll]
        for c in 0..CHUNKS {
            total += sums[comptime!(c * ROWS) + row];
        }
        let at = token * stride as usize + offset as usize + element;
        finish_element(y, at, total, bias, element, finish);
    }
}

/// One block of integers of one row of the matrix: see `kernels::order::block_dot`.
#[cube]
fn plain_block(
    tiles: &Array<u32>,
    tile: usize,
    codes: &Array<u32>,
    scales: &Array<f32>,
    group: usize,
    #[comptime] block: usize,
    row: usize,
    sum: f32,
    #[comptime] kind: QuantType,
    #[comptime] able: Abilities,
) -> f32 {
    let layout = comptime!(Layout::of(kind));
    let words = tile + comptime!(block * layout.block_bytes / 4);
    let (first, second, minimum) = row_scales(tiles, tile + comptime!(code_words(kind)), block, row, kind, able);
    let x = (2 * group + block) * 4;
    let scale = scales[x];
    let mut dots = Array::<i32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let mut dot = 0i32;
        #[unroll]
        for i in 0..4usize {
            let slot = comptime!(4 * half + i);
            let w = slot_codes(tiles, words, row, slot, kind);
            let v = codes[group * 16 + comptime!(4 * i + 2 * block + half)];
            #[unroll]
            for j in 0..4u32 {
                let a = i32::cast_from((w >> comptime!(8 * j)) & 255u32);
                let b = i32::cast_from(((v >> comptime!(8 * j)) & 255u32) ^ 128u32) - 128i32;
                dot += a * b;
            }
        }
        let first = i32::reinterpret(scales[x + 3]);
        let sum = if comptime!(half == 0) { first } else { i32::reinterpret(scales[x + 2]) - first };
        dots[half] = dot - comptime!(layout.offset) * sum;
    }
    let mut out = sum;
    if comptime!(layout.scales == Scales::Sixteens) {
        out = fused(f32::cast_from(dots[0]), first * scale, out, able);
        out = fused(f32::cast_from(dots[1]), second * scale, out, able);
    } else {
        out = fused(f32::cast_from(dots[0] + dots[1]), first * scale, out, able);
    }
    if comptime!(layout.scales.minimum()) {
        out = fused(minimum, scales[x + 1], out, able);
    }
    out
}

/// Tiles that a plane has asked for before it uses the first of them.
const fn ahead(kind: QuantType) -> usize {
    match Layout::of(kind).bits {
        4 => 6,
        5 | 6 => 4,
        _ => 3,
    }
}

/// The sum of a block's codes, or of one half of them.
#[cube]
fn code_sum(scales: Vector<f32, Const<4>>, #[comptime] half: usize, #[comptime] split: bool) -> i32 {
    let (total, first) = (i32::reinterpret(scales[2]), i32::reinterpret(scales[3]));
    if comptime!(!split) {
        total
    } else if comptime!(half == 0) {
        first
    } else {
        total - first
    }
}

/// Adds a tile's two blocks to the sums of a lane: rows 2 g and 2 g + 1 of the tile, columns 2 t and 2 t + 1 of the activations.
#[cube]
fn multiply(
    codes: &Array<Vector<u32, Const<2>>>,
    scales: &Array<u32>,
    x: Vector<u32, Const<4>>,
    x_scales: &Array<Vector<f32, Const<4>>>,
    nibbles: u32,
    lane: usize,
    sums: &mut Array<f32>,
    #[comptime] at: usize,
    #[comptime] sums_at: usize,
    #[comptime] one: bool,
    #[comptime] kind: QuantType,
    #[comptime] able: Abilities,
) {
    let layout = comptime!(Layout::of(kind));
    let split = comptime!(layout.scales == Scales::Sixteens);
    let definition = MmaDefinition::<u8, i8, i32>::new(16usize, 8usize, 32usize);
    let mut a = Array::<Vector<u8, Const<4>>>::new(4usize);
    let mut b = Array::<Vector<i8, Const<4>>>::new(2usize);
    let mut s = Array::<f32>::new(6usize);
    #[unroll]
    for block in 0..2usize {
        fragment(codes, nibbles, lane, at, block, kind, &mut a);
        lane_block_scales(scales, lane, at, block, kind, able, &mut s);
        b[0] = Vector::<i8, Const<4>>::reinterpret(x[comptime!(2 * block)]);
        b[1] = Vector::<i8, Const<4>>::reinterpret(x[comptime!(2 * block + 1)]);
        let (left, right) = (x_scales[comptime!(2 * block)], x_scales[comptime!(2 * block + 1)]);
        #[unroll]
        for half in 0..comptime!(if split { 2usize } else { 1usize }) {
            let mut start = Array::<Vector<i32, Const<2>>>::new(2usize);
            let mut begin = Vector::<i32, Const<2>>::empty();
            let mut bias = biased(0i32);
            if comptime!(layout.offset > 0) {
                bias = biased(-(comptime!(layout.offset) * code_sum(left, half, split)));
            }
            // One column needs no numbers in four registers before the instruction.
            begin[0] = if comptime!(one) { 0i32.runtime() } else { bias };
            begin[1] = begin[0];
            if comptime!(!one && layout.offset > 0) {
                begin[1] = biased(-(comptime!(layout.offset) * code_sum(right, half, split)));
            }
            start[0] = begin;
            start[1] = begin;
            let mut part = Array::<Vector<u8, Const<4>>>::new(4usize);
            let zero = RuntimeCell::<u32>::new(0u32); // a literal cannot be reinterpreted
            #[unroll]
            for i in 0..4usize {
                if comptime!(split && i / 2 != half) {
                    part[i] = Vector::<u8, Const<4>>::reinterpret(zero.read());
                } else {
                    part[i] = a[i];
                }
            }
            let dots = definition.execute(&part, &b, &start);
            #[unroll]
            for row in 0..2usize {
                let (to, weight) = (comptime!(sums_at + 2 * row), s[comptime!(2 * half + row)]);
                let dot = if comptime!(one) { dots[row][0] + bias } else { dots[row][0] };
                sums[to] = fused(from_biased(dot), weight * left[0], sums[to], able);
                if comptime!(!one) {
                    sums[to + 1] = fused(from_biased(dots[row][1]), weight * right[0], sums[to + 1], able);
                }
            }
        }
        if comptime!(layout.scales.minimum()) {
            #[unroll]
            for row in 0..2usize {
                let to = comptime!(sums_at + 2 * row);
                sums[to] = fused(s[comptime!(4 + row)], left[1], sums[to], able);
                if comptime!(!one) {
                    sums[to + 1] = fused(s[comptime!(4 + row)], right[1], sums[to + 1], able);
                }
            }
        }
    }
}

/// Up to eight rows on matrix instructions: a plane computes one chunk of a strip of 16 rows of the matrix.
#[cube(launch_unchecked, address_type = "u64")]
fn few_kernel(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    bias: &Array<f32>,
    y: &mut Array<f32>,
    nibbles: u32,
    groups: u32,
    strips: u32,
    first: u32,
    count: u32,
    stride: u32,
    offset: u32,
    width: u32,
    #[comptime] kind: QuantType,
    #[comptime] each: usize,
    #[comptime] one: Option<usize>,
    #[comptime] finish: Finish,
    #[comptime] able: Abilities,
) {
    let columns = comptime!(if one.is_some() { 1usize } else { FEW });
    let (lane, chunk) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (groups, strip) = (groups as usize, CUBE_POS_X as usize * each);
    let mut sums = Array::<f32>::new(comptime!(4 * each));
    #[unroll]
    for i in 0..comptime!(4 * each) {
        sums[i] = 0.0f32;
    }
    let last = strips as usize - 1;
    strip_sums(
        pairs,
        singles,
        codes,
        scales,
        nibbles,
        strip,
        last,
        chunk,
        groups,
        first as usize,
        count as usize,
        lane,
        &mut sums,
        each,
        one,
        kind,
        able,
    );
    let mut shared = SharedMemory::<f32>::new(comptime!(CHUNKS * each * ROWS * columns));
    #[unroll]
    for s in 0..each {
        share_sums(&sums, &mut shared, lane, chunk, s, each, columns);
    }
    sync_cube();
    let mut unit = chunk * 32 + lane;
    while unit < comptime!(each * ROWS * columns) {
        let (row, column) = (unit % comptime!(each * ROWS), unit / comptime!(each * ROWS));
        let element = strip * comptime!(ROWS) + row;
        if column < count as usize && element < width as usize {
            let mut total = 0.0f32;
            #[unroll]
            for c in 0..CHUNKS {
                total += shared[(comptime!(c * columns) + column) * comptime!(each * ROWS) + row];
            }
            let at = (first as usize + column) * stride as usize + offset as usize + element;
            finish_element(y, at, total, bias, element, finish);
        }
        unit += comptime!(32 * CHUNKS);
    }
}

/// Puts a lane's sums of its `s`-th strip where all chunks meet: `[chunk][column][strip][row]`.
#[cube]
fn share_sums(
    sums: &Array<f32>,
    shared: &mut SharedMemory<f32>,
    lane: usize,
    chunk: usize,
    #[comptime] s: usize,
    #[comptime] each: usize,
    #[comptime] columns: usize,
) {
    let (g, t) = (lane / 4, lane % 4);
    #[unroll]
    for row in 0..2usize {
        let to = comptime!(s * ROWS) + 2 * g + row;
        if comptime!(columns == 1) {
            if t == 0 {
                shared[chunk * comptime!(each * ROWS) + to] = sums[comptime!(4 * s + 2 * row)];
            }
        } else {
            #[unroll]
            for right in 0..2usize {
                let column = chunk * columns + 2 * t + right;
                shared[column * comptime!(each * ROWS) + to] = sums[comptime!(4 * s + 2 * row + right)];
            }
        }
    }
}

/// One chunk of `each` strips, by one plane. Sums are `[strip][row][column]` of the lane. `one`: there is one row of activations, which goes
/// through shared memory; so many groups are in a chunk at most.
#[cube]
fn strip_sums(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    nibbles: u32,
    strip: usize,
    last_strip: usize,
    chunk: usize,
    groups: usize,
    first: usize,
    count: usize,
    lane: usize,
    sums: &mut Array<f32>,
    #[comptime] each: usize,
    #[comptime] one: Option<usize>,
    #[comptime] kind: QuantType,
    #[comptime] able: Abilities,
) {
    let depth = comptime!(ahead(kind) / each);
    let (g, t) = (lane / 4, lane % 4);
    let (from, to) = (chunk_start(groups, chunk), chunk_start(groups, chunk + 1));
    // Tiles from one strip to the next: none where there is no next one, whose sums nobody wants then.
    let apart = select(strip < last_strip, groups, 0usize);
    let last = count - 1;
    let x = (first + min(g, last)) * groups * 4 + from * 4 + t;
    let left = (first + min(2 * t, last)) * groups * 2 + from * 2;
    let right = (first + min(2 * t + 1, last)) * groups * 2 + from * 2;
    let mut raw = Array::<Vector<u32, Const<2>>>::new(comptime!(depth * each * lane_vectors(kind)));
    let mut raw_scales = Array::<u32>::new(comptime!(depth * each * lane_scales(kind)));
    let mut x_scales = Array::<Vector<f32, Const<4>>>::new(4usize);
    let steps = u32::cast_from(to - from);
    let mut next = LaneTile::new((strip * groups + from) * comptime!(tile_words(kind)), lane, kind);
    #[unroll]
    for i in 0..depth {
        if comptime!(i as u32) < steps {
            #[unroll]
            for s in 0..each {
                let tile = next.after(s * apart, kind);
                read_lane(pairs, singles, tile, &mut raw, &mut raw_scales, comptime!(i * each + s), kind);
            }
        }
        next.advance(kind);
    }
    let room = comptime!(one.unwrap_or(1));
    let mut one_codes = SharedMemory::<Vector<u32, Const<4>>>::new(comptime!(CHUNKS * room * 4));
    let mut one_scales = SharedMemory::<Vector<f32, Const<4>>>::new(comptime!(CHUNKS * room * 2));
    let mine = chunk * room;
    if comptime!(one.is_some()) {
        let mut i = lane;
        while i < 4 * (to - from) {
            one_codes[4 * mine + i] = codes[(first * groups + from) * 4 + i];
            i += 32;
        }
        let mut i = lane;
        while i < 2 * (to - from) {
            one_scales[2 * mine + i] = scales[left + i];
            i += 32;
        }
        sync_cube();
    }
    let mut step = 0u32;
    while step < steps {
        #[unroll]
        for i in 0..depth {
            if step + comptime!(i as u32) < steps {
                let now = step as usize + i;
                #[unroll]
                for block in 0..2usize {
                    if comptime!(one.is_some()) {
                        x_scales[comptime!(2 * block)] = one_scales[2 * (mine + now) + block];
                        x_scales[comptime!(2 * block + 1)] = x_scales[comptime!(2 * block)];
                    } else {
                        x_scales[comptime!(2 * block)] = scales[left + 2 * now + block];
                        x_scales[comptime!(2 * block + 1)] = scales[right + 2 * now + block];
                    }
                }
                let x_codes =
                    if comptime!(one.is_some()) { one_codes[4 * (mine + now) + t] } else { codes[x + 4 * now] };
                let alone = comptime!(one.is_some());
                #[unroll]
                for s in 0..each {
                    let (at, to) = comptime!((i * each + s, 4 * s));
                    multiply(&raw, &raw_scales, x_codes, &x_scales, nibbles, lane, sums, at, to, alone, kind, able);
                }
                if step + comptime!((i + depth) as u32) < steps {
                    #[unroll]
                    for s in 0..each {
                        let tile = next.after(s * apart, kind);
                        read_lane(pairs, singles, tile, &mut raw, &mut raw_scales, comptime!(i * each + s), kind);
                    }
                }
                next.advance(kind);
            }
        }
        step += comptime!(depth as u32);
    }
}

/// Tiles of 16 rows that a plane of a panel computes.
const PANEL_STRIPS: usize = 2;
/// Times eight tokens that a plane of a panel computes.
const PANEL_EIGHTS: usize = 4;

/// Many rows on matrix instructions: a plane computes 32 rows of the matrix for 32 tokens, chunk after chunk.
#[cube(launch_unchecked, address_type = "u64")]
fn panel_kernel(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    bias: &Array<f32>,
    y: &mut Array<f32>,
    nibbles: u32,
    groups: u32,
    strips: u32,
    count: u32,
    stride: u32,
    offset: u32,
    width: u32,
    #[comptime] kind: QuantType,
    #[comptime] finish: Finish,
    #[comptime] able: Abilities,
) {
    let lane = UNIT_POS_X as usize;
    let (plane, groups, count) = (UNIT_POS_Y as usize, groups as usize, count as usize);
    let (g, t) = (lane / 4, lane % 4);
    let strip = CUBE_POS_Y as usize * comptime!(PANEL_ROWS / ROWS) + plane / 4 * PANEL_STRIPS;
    let token = CUBE_POS_X as usize * comptime!(PANEL_TOKENS) + plane % 4 * comptime!(8 * PANEL_EIGHTS);
    let elements = comptime!(PANEL_STRIPS * PANEL_EIGHTS * 4);
    let mut sums = Array::<f32>::new(elements);
    let mut totals = Array::<f32>::new(elements);
    #[unroll]
    for i in 0..elements {
        sums[i] = 0.0f32;
        totals[i] = 0.0f32;
    }
    if token < count && strip < strips as usize {
        let mut raw = Array::<Vector<u32, Const<2>>>::new(comptime!(PANEL_STRIPS * lane_vectors(kind)));
        let mut raw_scales = Array::<u32>::new(comptime!(PANEL_STRIPS * lane_scales(kind)));
        let mut x_scales = Array::<Vector<f32, Const<4>>>::new(4usize);
        for chunk in 0..CHUNKS {
            for group in chunk_start(groups, chunk)..chunk_start(groups, chunk + 1) {
                #[unroll]
                for i in 0..PANEL_STRIPS {
                    let tile = (min(strip + i, strips as usize - 1) * groups + group) * comptime!(tile_words(kind));
                    let tile = LaneTile::new(tile, lane, kind);
                    read_lane(pairs, singles, tile, &mut raw, &mut raw_scales, i, kind);
                }
                #[unroll]
                for n in 0..PANEL_EIGHTS {
                    let eight = token + comptime!(8 * n);
                    let last = count - 1;
                    let x = codes[(min(eight + g, last) * groups + group) * 4 + t];
                    let left = (min(eight + 2 * t, last) * groups + group) * 2;
                    let right = (min(eight + 2 * t + 1, last) * groups + group) * 2;
                    #[unroll]
                    for block in 0..2usize {
                        x_scales[comptime!(2 * block)] = scales[left + block];
                        x_scales[comptime!(2 * block + 1)] = scales[right + block];
                    }
                    #[unroll]
                    for i in 0..PANEL_STRIPS {
                        let at = comptime!((i * PANEL_EIGHTS + n) * 4);
                        multiply(&raw, &raw_scales, x, &x_scales, nibbles, lane, &mut sums, i, at, false, kind, able);
                    }
                }
            }
            #[unroll]
            for i in 0..elements {
                totals[i] += sums[i];
                sums[i] = 0.0f32;
            }
        }
        #[unroll]
        for i in 0..PANEL_STRIPS {
            #[unroll]
            for n in 0..PANEL_EIGHTS {
                #[unroll]
                for element in 0..4usize {
                    let row = (strip + i) * comptime!(ROWS) + 2 * g + comptime!(element / 2);
                    let to = token + comptime!(8 * n) + 2 * t + comptime!(element % 2);
                    if to < count && row < width as usize {
                        let at = to * stride as usize + offset as usize + row;
                        finish_element(
                            y,
                            at,
                            totals[comptime!((i * PANEL_EIGHTS + n) * 4 + element)],
                            bias,
                            row,
                            finish,
                        );
                    }
                }
            }
        }
    }
}
