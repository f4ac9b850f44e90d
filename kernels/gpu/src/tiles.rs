//! Reads weight tiles in kernels: unpacks codes into the bytes of a word, and scales into floats.
//!
//! [`kernels::tile`] defines the layout of a tile. Next: `product.rs`.
use cubecl::prelude::*;
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS, Scales};

use crate::arithmetic::{Features, both_halves, from_half, fused};
use crate::inline::look_up_nibbles;

pub(crate) const NIBBLES: u32 = 0x0f0f_0f0f;

/// Words of a tile's codes, which precede its scales.
pub(crate) const fn code_words(kind: QuantType) -> usize {
    2 * Layout::of(kind).block_bytes / 4
}

/// Words of a tile.
pub(crate) const fn tile_words(kind: QuantType) -> usize {
    Layout::of(kind).tile_bytes / 4
}

/// Words of a tile's scales.
pub(crate) const fn scale_words(kind: QuantType) -> usize {
    tile_words(kind) - code_words(kind)
}

/// The format's table as words of four entries; zeros if it has none.
fn table_words(kind: QuantType) -> [u32; 4] {
    let table = Layout::of(kind).table.copied().unwrap_or_default();
    std::array::from_fn(|i| u32::from_le_bytes([table[4 * i], table[4 * i + 1], table[4 * i + 2], table[4 * i + 3]]))
}

/// The codes that four nibbles stand for in the format's table, one per byte: each bit of the nibbles selects half of the entries
/// that are left.
#[cube]
fn look_up(nibbles: u32, #[comptime] kind: QuantType) -> u32 {
    let mut entries = Array::<u32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        entries[i] = comptime!((table_words(kind)[i / 4] >> (8 * (i % 4)) & 255) * 0x0101_0101).runtime();
    }
    #[unroll]
    for bit in 0..4usize {
        let odd = ((nibbles >> comptime!(bit as u32)) & 0x0101_0101u32) * 255u32;
        #[unroll]
        for i in 0..comptime!(8usize >> bit) {
            let even = entries[comptime!(2 * i)];
            entries[i] = even ^ (odd & (even ^ entries[comptime!(2 * i + 1)]));
        }
    }
    entries[0]
}

/// The codes of a row in a slot of four columns, one byte per code. `block` is the first word of the block's codes.
#[cube]
pub(crate) fn slot_codes(
    tiles: &Array<u32>,
    block: usize,
    row: usize,
    #[comptime] slot: usize,
    #[comptime] kind: QuantType,
) -> u32 {
    let bits = slot_bits(tiles, block, row, slot, kind);
    if comptime!(Layout::of(kind).table.is_some()) { look_up(bits, kind) } else { bits }
}

/// As [`slot_codes`], before nibbles are looked up in a table.
#[cube]
fn slot_bits(
    tiles: &Array<u32>,
    block: usize,
    row: usize,
    #[comptime] slot: usize,
    #[comptime] kind: QuantType,
) -> u32 {
    let rows = comptime!(ROWS);
    let bits = comptime!(Layout::of(kind).bits);
    if comptime!(bits == 8) {
        tiles[block + slot * rows + row]
    } else {
        let mut codes = (tiles[block + comptime!(slot % 4 * ROWS) + row] >> comptime!(4 * (slot / 4) as u32)) & NIBBLES;
        if comptime!(bits == 5) {
            let fifth = tiles[block + 4 * rows + row];
            codes |= ((fifth >> comptime!(slot as u32)) & 0x0101_0101u32) << 4u32;
        }
        if comptime!(bits == 6) {
            let two = tiles[block + comptime!((4 + slot / 4) * ROWS) + row];
            codes |= ((two >> comptime!(2 * (slot % 4) as u32)) & 0x0303_0303u32) << 4u32;
        }
        codes
    }
}

/// A row's f16 in a word that holds one for each of two rows, as f32.
#[cube]
fn half_of_row(word: u32, row: usize, #[comptime] able: Features) -> f32 {
    from_half((word >> (16 * (row % 2) as u32)) & 0xffffu32, able)
}

/// A row's byte in a word that holds one for each of four rows.
#[cube]
fn byte_of_row(word: u32, row: usize) -> u32 {
    (word >> (8 * (row % 4) as u32)) & 255u32
}

/// The scales of both halves of a row's block, and its minimum (0 if the format has none). `scales` is the first word of the
/// tile's scales.
#[cube]
pub(crate) fn row_scales(
    tiles: &Array<u32>,
    scales: usize,
    #[comptime] block: usize,
    row: usize,
    #[comptime] kind: QuantType,
    #[comptime] able: Features,
) -> (f32, f32, f32) {
    let form = comptime!(Layout::of(kind).scales);
    if comptime!(form == Scales::Half || form == Scales::HalfAndMinimum) {
        let scale = half_of_row(tiles[scales + 8 * block + row / 2], row, able);
        let mut minimum = 0.0f32;
        if comptime!(form == Scales::HalfAndMinimum) {
            minimum = half_of_row(tiles[scales + comptime!(16 + 8 * block) + row / 2], row, able);
        }
        (scale, scale, minimum)
    } else if comptime!(form == Scales::HalfAndZero) {
        let word = tiles[scales + 8 * block + row / 2] >> (16 * (row % 2) as u32);
        let scale = from_half((word >> 1u32) & 0x7fc0u32, able);
        (scale, scale, -(scale * zero_of(word)))
    } else if comptime!(form == Scales::Bytes) {
        let scale = byte_of_row(tiles[scales + comptime!(16 + 4 * block) + row / 4], row);
        let least = byte_of_row(tiles[scales + comptime!(24 + 4 * block) + row / 4], row);
        let scale = half_of_row(tiles[scales + row / 2], row, able) * f32::cast_from(scale);
        let minimum = -(half_of_row(tiles[scales + 8 + row / 2], row, able) * f32::cast_from(least));
        (scale, scale, minimum)
    } else if comptime!(form == Scales::SignedBytes) {
        let scale = byte_of_row(tiles[scales + comptime!(8 + 4 * block) + row / 4], row);
        let scale = half_of_row(tiles[scales + row / 2], row, able) * signed_byte(scale, kind);
        (scale, scale, 0.0f32)
    } else {
        let factor = half_of_row(tiles[scales + row / 2], row, able);
        let first = byte_of_row(tiles[scales + comptime!(8 + 8 * block) + row / 4], row);
        let second = byte_of_row(tiles[scales + comptime!(12 + 8 * block) + row / 4], row);
        (factor * signed_byte(first, kind), factor * signed_byte(second, kind), 0.0f32)
    }
}

/// The zero in the lower half of a word, see [`kernels::quant::scale_and_zero`].
#[cube]
fn zero_of(word: u32) -> f32 {
    f32::cast_from(word & 0x7fu32) * 0.125f32
}

/// A byte as a signed integer in units of the format, as f32.
#[cube]
fn signed_byte(byte: u32, #[comptime] kind: QuantType) -> f32 {
    let number = f32::cast_from(i32::cast_from(byte ^ 128u32) - 128i32);
    if comptime!(Layout::of(kind).shift == 0) { number } else { number * comptime!(Layout::of(kind).unit()) }
}

/// Pairs of code words that a lane of a plane reads per tile. A pair is for rows 2 g and 2 g + 1 with g = lane / 4.
pub(crate) const fn lane_vectors(kind: QuantType) -> usize {
    match Layout::of(kind).bits {
        4 => 2,
        6 => 6,
        _ => 4,
    }
}

/// Scale words that a lane reads per tile.
pub(crate) const fn lane_scales(kind: QuantType) -> usize {
    match Layout::of(kind).scales {
        Scales::None => 0,
        Scales::Half | Scales::HalfAndZero => 2,
        Scales::HalfAndMinimum => 4,
        Scales::Bytes => 6,
        Scales::SignedBytes => 3,
        Scales::Sixteens => 5,
    }
}

/// Base indices from which a lane reads a tile. All offsets added to them are compile-time constants.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LaneTile {
    /// Pair of words with the codes of the lane's slot and rows.
    codes: usize,
    /// Pair of words with the fifth and sixth code bits of the lane's rows.
    planes: usize,
    /// Word with the scales of the lane's rows.
    scales: usize,
    /// Word with the scales of the lane's rows if the scales are bytes.
    bytes: usize,
}

#[cube]
impl LaneTile {
    /// For a tile whose codes begin at `pair`, and whose scales begin at `word` of another array.
    pub(crate) fn new(pair: usize, word: usize, lane: usize) -> Self {
        let (g, t) = (lane / 4, lane % 4);
        let mut codes = pair;
        let mut planes = pair;
        let mut words = word;
        let mut bytes = word;
        codes += t * 8 + g;
        planes += g;
        words += g;
        bytes += g / 2;
        LaneTile { codes, planes, scales: words, bytes }
    }
}

/// Reads a lane's part of a tile: codes to `codes[at · lane_vectors ..]`, scales to `scales[at · lane_scales ..]`.
#[cube]
pub(crate) fn read_lane<P: List<Vector<u32, Const<2>>>, S: List<u32>>(
    pairs: &P,
    singles: &S,
    tile: LaneTile,
    codes: &mut Array<Vector<u32, Const<2>>>,
    scales: &mut Array<u32>,
    #[comptime] at: usize,
    #[comptime] kind: QuantType,
) {
    let layout = comptime!(Layout::of(kind));
    let each = comptime!(lane_vectors(kind) / 2);
    #[unroll]
    for b in 0..2usize {
        let block = comptime!(b * layout.block_bytes / 8);
        let to = comptime!(at * 2 * each + b * each);
        codes[to] = pairs.read(tile.codes + block);
        if comptime!(layout.bits == 8) {
            codes[to + 1] = pairs.read(tile.codes + comptime!(block + 32));
        }
        if comptime!(layout.bits == 5 || layout.bits == 6) {
            codes[to + 1] = pairs.read(tile.planes + comptime!(block + 32));
        }
        if comptime!(layout.bits == 6) {
            codes[to + 2] = pairs.read(tile.planes + comptime!(block + 40));
        }
    }
    let from = tile.scales;
    let to = comptime!(at * lane_scales(kind));
    if comptime!(matches!(layout.scales, Scales::Half | Scales::HalfAndMinimum | Scales::HalfAndZero)) {
        #[unroll]
        for i in 0..comptime!(lane_scales(kind)) {
            scales[to + i] = singles.read(from + 8 * i);
        }
    }
    if comptime!(layout.scales == Scales::Bytes) {
        scales[to] = singles.read(from);
        scales[to + 1] = singles.read(from + 8);
        #[unroll]
        for i in 0..4usize {
            scales[to + 2 + i] = singles.read(tile.bytes + comptime!(16 + 4 * i));
        }
    }
    if comptime!(layout.scales == Scales::SignedBytes || layout.scales == Scales::Sixteens) {
        scales[to] = singles.read(from);
        #[unroll]
        for i in 0..comptime!(lane_scales(kind) - 1) {
            scales[to + 1 + i] = singles.read(tile.bytes + comptime!(8 + 4 * i));
        }
    }
}

/// The codes of a lane in one block as an m16n8k32 fragment: rows 2 g and 2 g + 1 in slot t, then both in slot t + 4.
/// `nibbles` is [`NIBBLES`], passed at run time: if it were a constant, the compiler would compute the fragment byte by byte.
#[cube]
pub(crate) fn fragment(
    codes: &Array<Vector<u32, Const<2>>>,
    nibbles: u32,
    lane: usize,
    #[comptime] at: usize,
    #[comptime] block: usize,
    #[comptime] kind: QuantType,
    fragment: &mut Array<Vector<u8, Const<4>>>,
) {
    let bits = comptime!(Layout::of(kind).bits);
    let each = comptime!(lane_vectors(kind) / 2);
    let from = comptime!(at * 2 * each + block * each);
    let words = codes[from];
    if comptime!(bits == 8) {
        let high = codes[from + 1];
        #[unroll]
        for i in 0..2usize {
            fragment[i] = Vector::<u8, Const<4>>::reinterpret(words[i]);
            fragment[2 + i] = Vector::<u8, Const<4>>::reinterpret(high[i]);
        }
    } else if comptime!(Layout::of(kind).table.is_some()) {
        #[unroll]
        for i in 0..2usize {
            let mut bytes = Array::<u32>::new(2usize);
            look_up_nibbles(words[i], &mut bytes, comptime!(table_words(kind)));
            fragment[i] = Vector::<u8, Const<4>>::reinterpret(bytes[0]);
            fragment[2 + i] = Vector::<u8, Const<4>>::reinterpret(bytes[1]);
        }
    } else {
        let t = (lane % 4) as u32;
        #[unroll]
        for i in 0..2usize {
            let mut low = words[i] & nibbles;
            let mut high = (words[i] >> 4u32) & nibbles;
            if comptime!(bits == 5) {
                let fifth = codes[from + 1][i] >> t;
                low |= (fifth & 0x0101_0101u32) << 4u32;
                high |= ((fifth >> 4u32) & 0x0101_0101u32) << 4u32;
            }
            if comptime!(bits == 6) {
                low |= ((codes[from + 1][i] >> (2u32 * t)) & 0x0303_0303u32) << 4u32;
                high |= ((codes[from + 2][i] >> (2u32 * t)) & 0x0303_0303u32) << 4u32;
            }
            fragment[i] = Vector::<u8, Const<4>>::reinterpret(low);
            fragment[2 + i] = Vector::<u8, Const<4>>::reinterpret(high);
        }
    }
}

/// Writes the scales of a lane's two rows in one block to `out`: `[half][row]`, then the minima of both rows.
#[cube]
pub(crate) fn lane_block_scales(
    scales: &Array<u32>,
    lane: usize,
    #[comptime] at: usize,
    #[comptime] block: usize,
    #[comptime] kind: QuantType,
    #[comptime] able: Features,
    out: &mut Array<f32>,
) {
    let form = comptime!(Layout::of(kind).scales);
    let from = comptime!(at * lane_scales(kind));
    if comptime!(form == Scales::Half || form == Scales::HalfAndMinimum) {
        let (a, b) = both_halves(scales[from + block], able);
        out[0] = a;
        out[1] = b;
        if comptime!(form == Scales::HalfAndMinimum) {
            let (a, b) = both_halves(scales[comptime!(from + 2 + block)], able);
            out[4] = a;
            out[5] = b;
        }
    }
    if comptime!(form == Scales::HalfAndZero) {
        let word = scales[from + block];
        let (a, b) = both_halves((word >> 1u32) & 0x7fc0_7fc0u32, able);
        out[0] = a;
        out[1] = b;
        out[4] = -(a * zero_of(word));
        out[5] = -(b * zero_of(word >> 16u32));
    }
    let shift = (16 * (lane / 4 % 2)) as u32;
    if comptime!(form == Scales::Bytes) {
        let (a, b) = both_halves(scales[from], able);
        let bytes = scales[comptime!(from + 2 + block)] >> shift;
        out[0] = a * f32::cast_from(bytes & 255u32);
        out[1] = b * f32::cast_from((bytes >> 8u32) & 255u32);
        let (a, b) = both_halves(scales[comptime!(from + 1)], able);
        let bytes = scales[comptime!(from + 4 + block)] >> shift;
        out[4] = -(a * f32::cast_from(bytes & 255u32));
        out[5] = -(b * f32::cast_from((bytes >> 8u32) & 255u32));
    }
    if comptime!(form == Scales::SignedBytes) {
        let (a, b) = both_halves(scales[from], able);
        let bytes = scales[comptime!(from + 1 + block)] >> shift;
        out[0] = a * signed_byte(bytes & 255u32, kind);
        out[1] = b * signed_byte((bytes >> 8u32) & 255u32, kind);
    }
    if comptime!(form == Scales::Sixteens) {
        let (a, b) = both_halves(scales[from], able);
        #[unroll]
        for h in 0..2usize {
            let bytes = scales[comptime!(from + 1 + 2 * block + h)] >> shift;
            out[2 * h] = a * signed_byte(bytes & 255u32, kind);
            out[2 * h + 1] = b * signed_byte((bytes >> 8u32) & 255u32, kind);
        }
    }
}

/// One weight as a float. `tile` is the first word of its tile.
#[cube]
pub(crate) fn weight(
    tiles: &Array<u32>,
    tile: usize,
    row: usize,
    column: usize,
    #[comptime] kind: QuantType,
    #[comptime] able: Features,
) -> f32 {
    let layout = comptime!(Layout::of(kind));
    let at = column * comptime!(ROWS) + row;
    if comptime!(kind == QuantType::F32) {
        f32::reinterpret(tiles[tile + at])
    } else if comptime!(kind == QuantType::F16) {
        half_of_row(tiles[tile + at / 2], row, able)
    } else if comptime!(kind == QuantType::Bf16) {
        f32::reinterpret((tiles[tile + at / 2] >> (16 * (row % 2) as u32)) << 16u32)
    } else {
        let (block, column) = (column / 32, column % 32);
        let codes = tile + block * comptime!(layout.block_bytes / 4);
        let mut four = 0u32;
        #[unroll]
        for slot in 0..8usize {
            if column / 4 == slot {
                four = slot_bits(tiles, codes, row, slot, kind);
            }
        }
        if comptime!(layout.table.is_some()) {
            four = look_up(four, kind);
        }
        let code = i32::cast_from((four >> (8 * (column % 4) as u32)) & 255u32) - comptime!(layout.offset);
        let (mut first, mut second, mut minimum) =
            row_scales(tiles, tile + comptime!(code_words(kind)), 0usize, row, kind, able);
        if block == 1 {
            let (a, b, c) = row_scales(tiles, tile + comptime!(code_words(kind)), 1usize, row, kind, able);
            first = a;
            second = b;
            minimum = c;
        }
        fused(f32::cast_from(code), select(column < 16, first, second), minimum, able)
    }
}
