//! Encodes hidden rows on the device, to the bytes of [`kernels::boundary`]: the host then reads and sends what the device wrote.
//!
//! `survey` finds the outliers and scales of a row, a cube per row. For four bits, `boundary/trellis.rs` then finds the codes. `pack`
//! writes the bytes. On devices that treat subnormal numbers as zeros, rows with no element above 2^-98 may get other bytes.
//!
//! Kernel compilers fuse products and sums, so each product that enters a sum passes through [`opaque_float`]. Next:
//! `boundary/trellis.rs`.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::boundary::{Codec, LEVELS, NAN_ROW, ROTATED, SIXTEENTHS, TRIED, ZEROS, level, sigma};
use kernels::order::{BLOCK, QUANTISE_MIN};
use kernels_models::stage::StageError;

use crate::arithmetic::{Features, opaque_float, reciprocal, to_half};
use crate::engine::memory::Memory;
use crate::inline::{await_previous, release_next};
use crate::platform::{Platform, array};

mod trellis;

use trellis::{Found, find_codes};

/// Units per cube.
const UNITS: usize = 256;
/// Planes of a cube, on devices with planes of 32.
const PLANES: usize = UNITS / 32;
/// Bits of infinity: those of all finite magnitudes are below.
const INFINITE: u32 = 0x7f80_0000;
/// 1.5 · 2^23: adding that number rounds another to an integer and leaves it in the low bits.
const ROUND: f32 = 12_582_912.0;
/// Where the levels start in the tables, after σ of each scale.
const LEVELS_AT: usize = 256;
/// Where the scales tried start.
const TRIED_AT: usize = LEVELS_AT + 2 * LEVELS.len();
/// Numbers of the tables.
const TABLES: usize = TRIED_AT + TRIED.len();

/// Device memory to encode rows of one width.
#[derive(Clone, Debug)]
pub(crate) struct RowEncoder {
    pub(crate) codec: Codec,
    width: usize,
    /// `[rows, 1 + outliers]`: the exponent of a row, then its outliers: index, and in four bits the value as bf16 in the upper half.
    heads: Handle,
    /// `[rows, blocks]`: the scale of each block, as in the encoding.
    scales: Handle,
    /// σ of each scale, the levels, and the scales tried.
    tables: Handle,
    found: Found,
}

impl RowEncoder {
    /// For up to `rows` rows of `width` elements at a time.
    ///
    /// # Errors
    /// The device has no room for it.
    pub(crate) fn new<R: Platform>(
        memory: &Memory<'_, R>,
        codec: Codec,
        width: usize,
        rows: usize,
    ) -> Result<Self, StageError> {
        let words = |each: usize| memory.buffer(4 * (rows * each).max(1), "encoded rows");
        let tables = memory.created(bytemuck::cast_slice(&tables()).to_vec(), "tables of encodings")?;
        let (heads, scales) = (words(1 + codec.outliers(width))?, words(blocks(codec, width))?);
        Ok(Self { codec, width, heads, scales, tables, found: Found::new(codec, width, words)? })
    }

    /// For tests without a device.
    #[cfg(test)]
    pub(crate) fn of(buffer: fn() -> Handle, codec: Codec, width: usize) -> Self {
        let found = Found::of(buffer);
        Self { codec, width, heads: buffer(), scales: buffer(), tables: buffer(), found }
    }

    /// Words of an encoded row, whose last one may be partly used.
    pub(crate) fn words(&self) -> usize {
        self.codec.row_bytes(self.width).unwrap_or(0).div_ceil(4)
    }

    /// Rows without the rest of their last words.
    pub(crate) fn bytes(&self, words: &[u8]) -> Vec<u8> {
        let bytes = self.codec.row_bytes(self.width).unwrap_or(0);
        if bytes.is_multiple_of(4) {
            return words.to_vec();
        }
        words.chunks_exact(4 * self.words()).flat_map(|row| &row[..bytes]).copied().collect()
    }

    /// Encodes `hidden[count, width]` to `out[count, words]`.
    pub(crate) fn encode<R: Platform>(
        &self,
        client: &ComputeClient<R>,
        able: Features,
        hidden: &Handle,
        count: usize,
        out: &Handle,
    ) {
        let Self { codec, width, heads, scales, tables, found } = self;
        let (apart, blocks, words) = (codec.outliers(*width), blocks(*codec, *width), self.words());
        let numbers = count * found.numbers_of_row(*width);
        // SAFETY: a cube stays within its row, and the scratch has room for all rows.
        unsafe {
            survey_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(count as u32, 1, 1),
                CubeDim::new_1d(UNITS as u32),
                array(hidden, count * width),
                array(tables, TABLES),
                array(heads, count * (1 + apart)),
                array(scales, (count * blocks).max(1)),
                array(&found.numbers, numbers),
                *width as u32,
                apart as u32,
                *codec,
                able,
            );
        }
        if *codec == Codec::Q4 {
            find_codes(client, able, found, tables, scales, blocks, count);
        }
        // SAFETY: units past the end of a row do nothing.
        unsafe {
            pack_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(words.div_ceil(UNITS) as u32, count as u32, 1),
                CubeDim::new_1d(UNITS as u32),
                array(hidden, count * width),
                array(tables, TABLES),
                array(heads, count * (1 + apart)),
                array(scales, (count * blocks).max(1)),
                array(&found.numbers, numbers),
                array(&found.transitions, found.transitions_of(count, *width)),
                array(out, count * words),
                *width as u32,
                apart as u32,
                *codec,
                able,
            );
        }
    }
}

fn tables() -> Vec<f32> {
    let sigmas = (0..=u8::MAX).map(sigma);
    let levels = (0..2 * LEVELS.len()).map(level);
    sigmas.chain(levels).chain(TRIED.map(|more| more as f32)).collect()
}

/// Blocks of a row that have a scale.
fn blocks(codec: Codec, width: usize) -> usize {
    match codec {
        Codec::Lossless | Codec::F16 => 0,
        Codec::Q8 => width.div_ceil(BLOCK),
        Codec::Q4 => width.div_ceil(ROTATED),
    }
}

#[cube]
fn magnitude(x: f32) -> u32 {
    u32::reinterpret(x) & 0x7fff_ffffu32
}

/// The least `e` for which 2^e is greater than a finite magnitude, from its bits; 0 for 0.
#[cube]
fn exponent(bits: u32) -> i32 {
    let subnormal = -117i32 - i32::cast_from((bits | 1u32).leading_zeros());
    let normal = i32::cast_from(bits >> 23u32) - 126i32;
    select(bits == 0u32, 0i32, select(bits < 0x80_0000u32, subnormal, normal))
}

#[cube]
fn power_of_two(power: i32) -> f32 {
    let power = max(min(power, 127i32), -126i32);
    f32::reinterpret(u32::cast_from(power + 127i32) << 23u32)
}

/// x · 2^`power`, as on the host: in two steps.
#[cube]
fn scaled(x: f32, power: i32) -> f32 {
    let half = power / 2i32;
    x * power_of_two(half) * power_of_two(power - half)
}

/// The largest of one number per unit, for all units.
#[cube]
fn largest_of(number: u32, shared: &mut SharedMemory<u32>) -> u32 {
    let unit = UNIT_POS_X as usize;
    shared[unit] = number;
    sync_cube();
    #[unroll]
    for step in 0..comptime!(UNITS.trailing_zeros()) {
        let apart = comptime!((UNITS / 2) >> step);
        if unit < apart {
            shared[unit] = max(shared[unit], shared[unit + apart]);
        }
        sync_cube();
    }
    let largest = shared[0];
    sync_cube();
    largest
}

/// The sum of one number per unit, for all units.
#[cube]
fn sum_of(number: u32, shared: &mut SharedMemory<u32>, #[comptime] able: Features) -> u32 {
    let unit = UNIT_POS_X as usize;
    let mut sum = 0u32;
    if comptime!(able.matrices) {
        let of_plane = plane_sum(number);
        if unit.is_multiple_of(32) {
            shared[unit / 32] = of_plane;
        }
        sync_cube();
        #[unroll]
        for plane in 0..PLANES {
            sum += shared[plane];
        }
    } else {
        shared[unit] = number;
        sync_cube();
        #[unroll]
        for step in 0..comptime!(UNITS.trailing_zeros()) {
            let apart = comptime!((UNITS / 2) >> step);
            if unit < apart {
                let other = shared[unit + apart];
                shared[unit] += other;
            }
            sync_cube();
        }
        sum += shared[0];
    }
    sync_cube();
    sum
}

/// The number of elements of a row whose magnitude is at least `least`.
#[cube]
fn count_from(
    hidden: &Array<f32>,
    start: usize,
    cols: usize,
    least: u32,
    shared: &mut SharedMemory<u32>,
    #[comptime] able: Features,
) -> u32 {
    let mut count = 0u32;
    let mut i = UNIT_POS_X as usize;
    while i < cols {
        if magnitude(hidden[start + i]) >= least {
            count += 1u32;
        }
        i += comptime!(UNITS);
    }
    sum_of(count, shared, able)
}

/// Pieces of [`ROTATED`] columns that a unit visits, as (first, end): consecutive ones, so that it finds outliers in their order.
#[cube]
fn pieces_of(cols: usize) -> (usize, usize) {
    let pieces = cols.div_ceil(comptime!(ROTATED));
    let each = pieces.div_ceil(comptime!(UNITS));
    (min(UNIT_POS_X as usize * each, pieces), min((UNIT_POS_X as usize + 1) * each, pieces))
}

/// The number of an element among the outliers of its row, from 1 on, in the order of columns; 0 if it is none. Outliers are the
/// elements above `least`, and of those equal to it the first `wanted`. `above`, `equal`: how many of each are before this element.
#[cube]
fn outlier_place(found: u32, least: u32, wanted: u32, above: u32, equal: u32) -> u32 {
    let is_outlier = found > least || (found == least && equal < wanted);
    select(is_outlier, 1u32 + above + min(equal, wanted), 0u32)
}

/// Finds the exponent of a row, its outliers and the scales of its blocks. For four bits it also writes the rotated and scaled
/// elements to `numbers`, and as scales those nearest to the root mean square.
#[cube(launch_unchecked)]
fn survey_kernel(
    hidden: &Array<f32>,
    tables: &Array<f32>,
    heads: &mut Array<u32>,
    scales: &mut Array<u32>,
    numbers: &mut Array<f32>,
    cols: u32,
    apart: u32,
    #[comptime] codec: Codec,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (row, unit) = (CUBE_POS_X as usize, UNIT_POS_X as usize);
    let (cols, outliers) = (cols as usize, apart as usize);
    let start = row * cols;
    let head = row * (1 + outliers);
    let mut shared = SharedMemory::<u32>::new(comptime!(UNITS));
    let mut largest = 0u32;
    let mut i = UNIT_POS_X as usize;
    while i < cols {
        largest = max(largest, magnitude(hidden[start + i]));
        i += comptime!(UNITS);
    }
    let largest = largest_of(largest, &mut shared);
    let mut finite = largest < INFINITE;
    // See `outlier_place`.
    let mut least = 0x7fff_ffffu32.runtime();
    let mut wanted = 0u32;
    if apart > 0u32 && finite {
        // The greatest bound that enough magnitudes reach, bit by bit.
        least = 0u32;
        let mut bit = 0x4000_0000u32.runtime();
        while bit > 0u32 {
            if count_from(hidden, start, cols, least | bit, &mut shared, able) >= apart {
                least |= bit;
            }
            bit >>= 1u32;
        }
        wanted = apart - count_from(hidden, start, cols, least + 1u32, &mut shared, able);
    }
    // How many of the units before this one are above the bound, and equal to it.
    let mut above = 0u32;
    let mut equal = 0u32;
    let (first, end) = pieces_of(cols);
    let mut i = first * comptime!(ROTATED);
    while i < min(end * comptime!(ROTATED), cols) {
        let size = magnitude(hidden[start + i]);
        above += u32::cast_from(size > least);
        equal += u32::cast_from(size == least);
        i += 1;
    }
    let mut equals = SharedMemory::<u32>::new(comptime!(UNITS));
    shared[unit] = above;
    equals[unit] = equal;
    sync_cube();
    above = 0u32;
    equal = 0u32;
    let mut before = 0usize;
    while before < unit {
        above += shared[before];
        equal += equals[before];
        before += 1;
    }
    sync_cube();
    if comptime!(codec == Codec::Q8) {
        let blocks = cols.div_ceil(comptime!(BLOCK));
        let (first, end) = pieces_of(cols);
        let mut block = 2 * first;
        while block < min(2 * end, blocks) {
            let mut size = 0u32;
            let mut i = block * comptime!(BLOCK);
            while i < min((block + 1) * comptime!(BLOCK), cols) {
                let found = magnitude(hidden[start + i]);
                let place = outlier_place(found, least, wanted, above, equal);
                if place > 0u32 {
                    heads[head + place as usize] = i as u32;
                } else {
                    size = max(size, found);
                }
                above += u32::cast_from(found > least);
                equal += u32::cast_from(found == least);
                i += 1;
            }
            let number = f32::reinterpret(size);
            let product = u32::reinterpret(number * comptime!(1.0f32 / 127.0f32));
            let rounded = (product >> 16u32) + u32::cast_from((product & 0xffffu32) != 0u32);
            let scale = select(number > QUANTISE_MIN, rounded, 0u32);
            scales[row * blocks + block] = select(finite, scale, 0x7fc0u32);
            block += 1;
        }
    }
    let mut power = 0i32;
    if comptime!(codec == Codec::F16) {
        power = exponent(largest) - 15i32;
    }
    if comptime!(codec == Codec::Q4) {
        let blocks = cols.div_ceil(comptime!(ROTATED));
        let mut size = 0u32;
        let (mut block, end) = pieces_of(cols);
        while block < end {
            let mut x = Array::<f32>::new(comptime!(ROTATED));
            #[unroll]
            for k in 0..ROTATED {
                let column = block * comptime!(ROTATED) + k;
                x[k] = 0.0f32;
                if column < cols {
                    let number = hidden[start + column];
                    let found = magnitude(number);
                    let place = outlier_place(found, least, wanted, above, equal);
                    if place > 0u32 {
                        let bits = u32::reinterpret(number);
                        let short = (bits + 0x7fffu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
                        heads[head + place as usize] = column as u32 | (short << 16u32);
                        // A number near the greatest f32 overflows in bf16.
                        if (short & 0x7fffu32) >= 0x7f80u32 {
                            size = comptime!(INFINITE).runtime();
                        }
                    } else {
                        x[k] = number;
                    }
                    above += u32::cast_from(found > least);
                    equal += u32::cast_from(found == least);
                }
            }
            rotate(&mut x);
            #[unroll]
            for k in 0..ROTATED {
                size = max(size, magnitude(x[k]));
                numbers[(row * blocks + block) * comptime!(ROTATED) + k] = x[k];
            }
            block += 1;
        }
        let all = largest_of(size, &mut shared);
        finite = finite && all < INFINITE;
        power = exponent(all);
        let (mut block, end) = pieces_of(cols);
        while block < end {
            let mut squares = 0.0f32;
            #[unroll]
            for k in 0..ROTATED {
                let at = (row * blocks + block) * comptime!(ROTATED) + k;
                // A row of NaN has no codes.
                let x = select(finite, scaled(numbers[at], -power), 0.0f32);
                numbers[at] = x;
                squares += opaque_float(x * x);
            }
            scales[row * blocks + block] = root(squares * comptime!(1.0f32 / ROTATED as f32), tables);
            block += 1;
        }
    }
    if unit == 0 {
        heads[head] = u32::reinterpret(select(finite, power, comptime!(NAN_ROW as i32).runtime()));
    }
}

/// The Hadamard transform: see `rotate` in `kernels::boundary`.
#[cube]
fn rotate(x: &mut Array<f32>) {
    #[unroll]
    for step in 0..comptime!(ROTATED.trailing_zeros()) {
        #[unroll]
        for pair in 0..comptime!(ROTATED / 2) {
            let distance = comptime!(1usize << step);
            let low = comptime!(pair / distance * 2 * distance + pair % distance);
            let (a, b) = (x[low], x[comptime!(low + distance)]);
            x[low] = a + b;
            x[comptime!(low + distance)] = a - b;
        }
    }
    #[unroll]
    for k in 0..ROTATED {
        x[k] = x[k] * 0.125f32;
    }
}

/// The scale nearest to the root of a mean square: see `root` in `kernels::boundary`.
#[cube]
fn root(mean_square: f32, tables: &Array<f32>) -> u32 {
    let first = max(-8i32 * exponent(u32::reinterpret(mean_square)) - 3i32, 0i32);
    let mut found = comptime!(ZEROS as u32).runtime();
    let mut scale = u32::cast_from(first);
    while scale < comptime!(ZEROS as u32) {
        let sigma = tables[scale as usize];
        if mean_square >= sigma * sigma * comptime!(SIXTEENTHS[1]) {
            found = min(found, scale);
            scale = comptime!(ZEROS as u32).runtime();
        } else {
            scale += 1u32;
        }
    }
    found
}

/// Writes the bytes of rows, a word per unit.
#[cube(launch_unchecked)]
fn pack_kernel(
    hidden: &Array<f32>,
    tables: &Array<f32>,
    heads: &Array<u32>,
    scales: &Array<u32>,
    numbers: &Array<f32>,
    transitions: &Array<u32>,
    out: &mut Array<u32>,
    cols: u32,
    apart: u32,
    #[comptime] codec: Codec,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (row, cols, outliers) = (CUBE_POS_Y as usize, cols as usize, apart as usize);
    let at = CUBE_POS_X as usize * comptime!(UNITS) + UNIT_POS_X as usize;
    let head = row * (1 + outliers);
    let power = i32::reinterpret(heads[head]);
    let finite = power != comptime!(NAN_ROW as i32);
    let mut word = 0u32;
    if comptime!(codec == Codec::F16) {
        let words = (cols + 1).div_ceil(2usize);
        if at < words {
            #[unroll]
            for part in 0..2usize {
                let half = 2 * at + part;
                let mut bits = u32::reinterpret(power) & 0xffffu32;
                if half > 0 {
                    bits = 0u32;
                    if finite && half <= cols {
                        bits = to_half(scaled(hidden[row * cols + half - 1], -power));
                    }
                }
                word |= bits << comptime!(16 * part as u32);
            }
            out[row * words + at] = word;
        }
    } else if comptime!(codec == Codec::Q8) {
        let blocks = cols.div_ceil(comptime!(BLOCK));
        let halves = 3 * outliers + blocks * comptime!(1 + BLOCK / 2);
        let words = halves.div_ceil(2usize);
        if at < words {
            #[unroll]
            for part in 0..2usize {
                let half = 2 * at + part;
                let mut bits = 0u32;
                if half < 3 * outliers {
                    // Outliers are in order in every row.
                    let index = select(finite, heads[head + 1 + half / 3], (half / 3) as u32);
                    let value = select(finite, u32::reinterpret(hidden[row * cols + index as usize]), 0u32);
                    let upper = select(half % 3 == 2, value >> 16u32, value & 0xffffu32);
                    bits = select(half.is_multiple_of(3), index, upper);
                } else if half < halves {
                    let (block, slot) = (
                        (half - 3 * outliers) / comptime!(1 + BLOCK / 2),
                        (half - 3 * outliers) % comptime!(1 + BLOCK / 2),
                    );
                    let scale = scales[row * blocks + block];
                    bits = scale;
                    if slot > 0 {
                        bits = 0u32;
                        let column = block * comptime!(BLOCK) + 2 * (slot - 1);
                        if finite && scale > 0u32 {
                            let inverse = reciprocal(f32::reinterpret(scale << 16u32), able);
                            #[unroll]
                            for k in 0..2usize {
                                let mut code = 0u32;
                                if column + k < cols {
                                    let x = hidden[row * cols + column + k] * inverse;
                                    let x = max(min(x, 127.0f32), -127.0f32) + ROUND;
                                    code = u32::reinterpret(x) & 255u32;
                                }
                                let mut i = 0usize;
                                while i < outliers {
                                    if heads[head + 1 + i] == (column + k) as u32 {
                                        code = 0u32;
                                    }
                                    i += 1;
                                }
                                bits |= code << comptime!(8 * k as u32);
                            }
                        }
                    }
                }
                word |= bits << comptime!(16 * part as u32);
            }
            out[row * words + at] = word;
        }
    } else {
        let blocks = cols.div_ceil(comptime!(ROTATED));
        let scales_at = 2 + 4 * outliers;
        let codes_at = scales_at + blocks;
        let bytes = codes_at + blocks * comptime!(ROTATED / 2);
        let words = bytes.div_ceil(4usize);
        if at < words {
            #[unroll]
            for part in 0..4usize {
                let byte = 4 * at + part;
                let mut bits = 0u32;
                if byte < 2 {
                    bits = u32::reinterpret(power) >> (8u32 * byte as u32);
                } else if byte < scales_at {
                    let outlier = select(finite, heads[head + 1 + (byte - 2) / 4], ((byte - 2) / 4) as u32);
                    bits = outlier >> (8u32 * ((byte - 2) % 4) as u32);
                } else if finite && byte < codes_at {
                    bits = scales[row * blocks + byte - scales_at];
                } else if finite && byte < bytes {
                    let element = 2 * (byte - codes_at);
                    let block = row * blocks + element / comptime!(ROTATED);
                    let sigma = tables[scales[block] as usize];
                    let steps = transitions[block * comptime!(ROTATED / 8) + element % comptime!(ROTATED) / 8];
                    #[unroll]
                    for k in 0..2usize {
                        let step = (steps >> (4u32 * ((element + k) % 8) as u32)) & 15u32;
                        let x = numbers[row * blocks * comptime!(ROTATED) + element + k];
                        bits |= code_of(x, sigma, step, tables) << comptime!(4 * k as u32);
                    }
                }
                word |= (bits & 255u32) << comptime!(8 * part as u32);
            }
            out[row * words + at] = word;
        }
    }
}

/// The code of an element after a transition of the trellis: the nearest level of its subset, of equally near ones the first.
#[cube]
fn code_of(x: f32, sigma: f32, transition: u32, tables: &Array<f32>) -> u32 {
    let parity = (transition ^ (transition >> 1u32) ^ (transition >> 3u32)) & 1u32;
    let subset = (2u32 * parity + ((transition >> 2u32) & 1u32)) as usize;
    let mut best = 0u32;
    let mut least = 0.0f32;
    #[unroll]
    for number in 0..8usize {
        let apart = x - opaque_float(sigma * tables[comptime!(LEVELS_AT + 4 * number) + subset]);
        let error = apart * apart;
        if comptime!(number == 0) {
            least = error;
        } else if error < least {
            least = error;
            best = comptime!(number as u32).runtime();
        }
    }
    (8u32 * (transition & 1u32)) | best
}
