//! Weight tiles of 16 rows by 64 columns with their scales: the one layout that every kernel reads.
//!
//! A tile holds two blocks of 32 columns. The codes of a block are words of four columns (a slot), with 16 rows side by side:
//! word `slot · 16 + row`. This is a vector of 16 rows for a CPU and the fragment of an integer matrix instruction for a GPU.
//!
//! - Eight bits: slots 0 to 7, one word per row.
//! - Four bits: words t = 0 to 3, slot t in the low nibbles and slot t + 4 in the high ones. They are codes, or index a table of
//!   codes.
//! - A fifth bit: one more word per row; bit `8 · i + slot` belongs to column `4 · slot + i`.
//! - Two more bits: two more words per row, for slots 0 to 3 and 4 to 7; bits from `8 · i + 2 · (slot mod 4)`.
//!
//! The conversion is exact: [`Tiles::block`] returns the weights of the file. Padding rows and columns of a last tile have
//! scale zero. Unquantised weights (F32, F16, BF16) are tiles of `[column][row]`.
use std::ops::{Range, RangeInclusive};

use half::f16;

use crate::order::{BLOCK, GROUP, WeightBlock};
use crate::quant::{
    BookGroup, QuantType, iq2_s_group, iq2_xs_group, iq2_xxs_group, iq3_s_group, iq3_xxs_group, iq4_xs_scale,
    k_scale_min, mxfp4_exponent, q3_k_scale, scale_and_zero,
};

mod check;
mod layout;

pub use check::check;
pub use layout::{Layout, Scales};

/// Rows per tile.
pub const ROWS: usize = 16;

/// A block of weights that tiles do not hold.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("row {row}, columns from {column}: {reason}")]
pub struct BadBlock {
    /// Row of the matrix.
    pub row: usize,
    /// First column of the block.
    pub column: usize,
    /// What is wrong with it.
    pub reason: BadWeights,
}

/// Why tiles do not hold a block of weights.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadWeights {
    /// A weight, a scale or a minimum is NaN or infinite.
    #[error("a weight or its scale is NaN or infinite; the file is damaged, fetch it again")]
    NotFinite,
    /// Half the scale of a block of MXFP4 is no f16.
    #[error(
        "the scale is 2^{exponent}, expected 2^{} to 2^{}; convert the file: llama-quantize --allow-requantize IN OUT Q8_0",
        MXFP4_EXPONENTS.start(),
        MXFP4_EXPONENTS.end()
    )]
    Scale {
        /// Exponent of the scale.
        exponent: i32,
    },
}

/// Exponents of scales of MXFP4 that tiles hold: half of such a scale, 2^-24 to 2^15, is an f16. All weights
/// with a smaller scale are below 4e-7.
const MXFP4_EXPONENTS: RangeInclusive<i32> = -23..=16;

impl BadWeights {
    /// What is wrong with a block that was rejected.
    #[cold]
    fn of(kind: QuantType, stored: &[u8]) -> Self {
        if kind == QuantType::Mxfp4 && stored[0] != MXFP4_NAN {
            Self::Scale { exponent: mxfp4_exponent(stored) }
        } else {
            Self::NotFinite
        }
    }
}

/// The byte that is NaN as a scale of MXFP4 (OCP Microscaling Formats 1.0).
const MXFP4_NAN: u8 = 0xff;

/// Converts rows of a matrix from the storage format of a file. `rows` starts at a tile boundary; `out` holds whole rows of
/// tiles.
///
/// # Errors
/// A non-finite weight, scale or minimum, or a scale that tiles do not hold.
///
/// # Panics
/// If `out` is not as long as the tiles of `rows`, or `bytes` is not whole rows.
pub fn convert(kind: QuantType, cols: usize, rows: Range<usize>, bytes: &[u8], out: &mut [u8]) -> Result<(), BadBlock> {
    let layout = Layout::of(kind);
    let row_bytes = kind.row_bytes(cols).expect("rows are whole blocks, checked when the file was opened");
    assert!(
        rows.start.is_multiple_of(ROWS) && bytes.len() == rows.len() * row_bytes,
        "not whole rows from a tile boundary"
    );
    assert_eq!(out.len(), layout.matrix_bytes(rows.len(), cols), "size of the tiles of {rows:?}");
    let tile_row_bytes = layout.matrix_bytes(1, cols);
    for ((tile_row, rows_here), first) in
        out.chunks_exact_mut(tile_row_bytes).zip(bytes.chunks(ROWS * row_bytes)).zip(rows.step_by(ROWS))
    {
        if rows_here.len() < ROWS * row_bytes {
            tile_row.fill(0);
        }
        for (r, row) in rows_here.chunks_exact(row_bytes).enumerate() {
            let mut writer = RowWriter { layout, bytes: tile_row, row: r };
            let bad = |(column, reason)| BadBlock { row: first + r, column, reason };
            writer.put(kind, cols, row).map_err(bad)?;
        }
    }
    Ok(())
}

/// Sum of little-endian 32-bit words modulo 2^32: a checksum of tiles uploaded to a device.
#[must_use]
pub fn word_checksum(bytes: &[u8]) -> u32 {
    let word = |word: &[u8]| u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    bytes.chunks_exact(4).map(word).fold(0, u32::wrapping_add)
}

/// Writes one row into a row of tiles.
struct RowWriter<'a> {
    layout: Layout,
    bytes: &'a mut [u8],
    row: usize,
}

impl RowWriter<'_> {
    /// Writes a row of the file. The error is the first column of a rejected block, and why.
    fn put(&mut self, kind: QuantType, cols: usize, row: &[u8]) -> Result<(), (usize, BadWeights)> {
        // One loop per format: the block size is a constant inside it.
        match kind {
            QuantType::F32 | QuantType::F16 | QuantType::Bf16 => {
                each(kind, row, |column, number| self.number(kind, column, number))
            }
            QuantType::Q4_0 | QuantType::Iq4Nl => each(kind, row, |b, block| {
                self.codes(b, nibbles(&block[2..]), []);
                self.halves(b, &block[..2])
            }),
            QuantType::Q4Z => each(kind, row, |b, block| {
                self.codes(b, nibbles(&block[2..]), []);
                self.halves(b, &block[..2]);
                scale_and_zero(half(block)).0.is_finite()
            }),
            QuantType::Q4_1 => each(kind, row, |b, block| {
                self.codes(b, nibbles(&block[4..]), []);
                self.halves(b, &block[..4])
            }),
            QuantType::Q5_0 => each(kind, row, |b, block| {
                self.codes(b, nibbles(&block[6..]), [by_column(word(block, 2))]);
                self.halves(b, &block[..2])
            }),
            QuantType::Q5_1 => each(kind, row, |b, block| {
                self.codes(b, nibbles(&block[8..]), [by_column(word(block, 4))]);
                self.halves(b, &block[..4])
            }),
            QuantType::Q8_0 => each(kind, row, |b, block| self.q8_0(b, block)),
            QuantType::Iq2Xxs => each(kind, row, |b, block| self.book(b, block, iq2_xxs_group)),
            QuantType::Iq2Xs => each(kind, row, |b, block| self.book(b, block, iq2_xs_group)),
            QuantType::Iq2S => each(kind, row, |b, block| self.book(b, block, iq2_s_group)),
            QuantType::Iq3Xxs => each(kind, row, |b, block| self.book(b, block, iq3_xxs_group)),
            QuantType::Iq3S => each(kind, row, |b, block| self.book(b, block, iq3_s_group)),
            QuantType::Q3K => each(kind, row, |b, block| self.q3_k(b, block)),
            QuantType::Q4K => each(kind, row, |b, block| self.q4_k(b, block)),
            QuantType::Q5K => each(kind, row, |b, block| self.q5_k(b, block)),
            QuantType::Q6K => each(kind, row, |b, block| self.q6_k(b, block)),
            QuantType::Iq4Xs => each(kind, row, |b, block| self.iq4_xs(b, block)),
            QuantType::Mxfp4 => each(kind, row, |b, block| self.mxfp4(b, block)),
        }?;
        // Pad the last tile of the row with zeros.
        let blocks = cols.div_ceil(BLOCK);
        if !cols.is_multiple_of(GROUP) {
            self.clear(cols, blocks);
        }
        Ok(())
    }

    fn number(&mut self, kind: QuantType, column: usize, number: &[u8]) -> bool {
        let at = column / GROUP * self.layout.tile_bytes + (column % GROUP * ROWS + self.row) * number.len();
        self.bytes[at..at + number.len()].copy_from_slice(number);
        if kind == QuantType::F32 {
            f32::from_bits(word(number, 0)).is_finite()
        } else if kind == QuantType::F16 {
            half_finite(number, 0)
        } else {
            u16::from_le_bytes([number[0], number[1]]) & 0x7f80 != 0x7f80
        }
    }

    fn clear(&mut self, cols: usize, blocks: usize) {
        if self.layout.bits == 0 {
            let bytes = self.layout.block_bytes / ROWS / BLOCK;
            let tile = (cols / GROUP) * self.layout.tile_bytes;
            for column in cols % GROUP..GROUP {
                let at = tile + (column * ROWS + self.row) * bytes;
                self.bytes[at..at + bytes].fill(0);
            }
        } else if blocks % 2 == 1 {
            match self.layout.bits {
                8 => self.codes(blocks, [0; 8], []),
                6 => self.codes(blocks, [0; 4], [0; 2]),
                5 => self.codes(blocks, [0; 4], [0]),
                _ => self.codes(blocks, [0; 4], []),
            }
            match self.layout.scales {
                Scales::Half | Scales::HalfAndZero => _ = self.halves(blocks, &[0; 2]),
                Scales::HalfAndMinimum => _ = self.halves(blocks, &[0; 4]),
                // Super-blocks are whole groups, so they need no padding.
                Scales::None | Scales::Bytes | Scales::SignedBytes | Scales::Sixteens => {}
            }
        }
    }

    /// Scale and, if the format has one, minimum of a block.
    #[inline(always)]
    fn halves(&mut self, block: usize, halves: &[u8]) -> bool {
        let place = self.scales_at(block / 2) + (block % 2 * ROWS + self.row) * 2;
        for (i, half) in halves.chunks_exact(2).enumerate() {
            let at = place + i * 4 * ROWS;
            self.bytes[at..at + 2].copy_from_slice(half);
        }
        (0..halves.len()).step_by(2).all(|at| half_finite(halves, at))
    }

    fn q8_0(&mut self, block: usize, stored: &[u8]) -> bool {
        let words: [u32; 8] = std::array::from_fn(|slot| word(stored, 2 + 4 * slot) ^ 0x8080_8080);
        self.codes(block, words, []);
        self.halves(block, &stored[..2])
    }

    fn q3_k(&mut self, super_block: usize, stored: &[u8]) -> bool {
        for group in 0..8 {
            let (half, k) = (group / 4, group % 4);
            let low = |slot: usize| word(stored, 32 + half * 32 + 4 * slot) >> (2 * k) & 0x0303_0303;
            let third = |slot: usize| (word(stored, 4 * slot) >> group & 0x0101_0101) << 2;
            let code = |slot: usize| low(slot) | third(slot);
            let block = 8 * super_block + group;
            self.codes(block, std::array::from_fn::<u32, 4, _>(|t| code(t) | code(t + 4) << 4), []);
            self.sixteens(block, [0, 1].map(|half| q3_k_scale(&stored[96..108], 2 * group + half)), &stored[108..]);
        }
        half_finite(stored, 108)
    }

    fn q4_k(&mut self, super_block: usize, stored: &[u8]) -> bool {
        for group in 0..8 {
            self.codes(8 * super_block + group, k_nibbles(&stored[16..], group), []);
        }
        self.k_scales(super_block, stored)
    }

    fn q5_k(&mut self, super_block: usize, stored: &[u8]) -> bool {
        for group in 0..8 {
            let fifth = |slot: usize| (word(stored, 16 + 4 * slot) >> group & 0x0101_0101) << slot;
            let plane = (0..8).fold(0, |plane, slot| plane | fifth(slot));
            self.codes(8 * super_block + group, k_nibbles(&stored[48..], group), [plane]);
        }
        self.k_scales(super_block, stored)
    }

    /// Scales and minima of a super-block of Q4_K or Q5_K.
    fn k_scales(&mut self, super_block: usize, stored: &[u8]) -> bool {
        for group in 0..8 {
            let at = self.scales_at((8 * super_block + group) / 2);
            if group % 2 == 0 {
                self.bytes[at + 2 * self.row..][..2].copy_from_slice(&stored[..2]);
                self.bytes[at + 2 * (ROWS + self.row)..][..2].copy_from_slice(&stored[2..4]);
            }
            let (scale, minimum) = k_scale_min(&stored[4..16], group);
            self.bytes[at + 4 * ROWS + group % 2 * ROWS + self.row] = scale;
            self.bytes[at + 6 * ROWS + group % 2 * ROWS + self.row] = minimum;
        }
        half_finite(stored, 0) && half_finite(stored, 2)
    }

    fn q6_k(&mut self, super_block: usize, stored: &[u8]) -> bool {
        for group in 0..8 {
            let (half, k) = (group / 4, group % 4);
            let low = |slot: usize| word(stored, half * 64 + 32 * (k % 2) + 4 * slot) >> (4 * (k / 2)) & 0x0f0f_0f0f;
            let words: [u32; 4] = std::array::from_fn(|t| low(t) | low(t + 4) << 4);
            let high = |slot: usize| word(stored, 128 + half * 32 + 4 * slot) >> (2 * k) & 0x0303_0303;
            let plane = |first: usize| (0..4).fold(0, |plane, slot| plane | high(first + slot) << (2 * slot));
            let block = 8 * super_block + group;
            self.codes(block, words, [plane(0), plane(4)]);
            let scale = |half: usize| stored[192 + 2 * group + half].cast_signed();
            self.sixteens(block, [scale(0), scale(1)], &stored[208..]);
        }
        half_finite(stored, 208)
    }

    /// The scales of both halves of a block, and their factor, an f16.
    #[inline(always)]
    fn sixteens(&mut self, block: usize, scales: [i8; 2], factor: &[u8]) {
        let at = self.scales_at(block / 2);
        if block.is_multiple_of(2) {
            self.bytes[at + 2 * self.row..][..2].copy_from_slice(&factor[..2]);
        }
        for (half, scale) in scales.into_iter().enumerate() {
            self.bytes[at + (2 + block % 2 * 2 + half) * ROWS + self.row] = scale.cast_unsigned();
        }
    }

    /// The scale of a block, and its factor, an f16.
    #[inline(always)]
    fn signed_byte(&mut self, block: usize, scale: i8, factor: &[u8]) {
        let at = self.scales_at(block / 2);
        if block.is_multiple_of(2) {
            self.bytes[at + 2 * self.row..][..2].copy_from_slice(&factor[..2]);
        }
        self.bytes[at + (2 + block % 2) * ROWS + self.row] = scale.cast_unsigned();
    }

    fn iq4_xs(&mut self, super_block: usize, stored: &[u8]) -> bool {
        for group in 0..8 {
            let block = 8 * super_block + group;
            self.codes(block, nibbles(&stored[8 + 16 * group..]), []);
            self.signed_byte(block, iq4_xs_scale(&stored[2..8], group), stored);
        }
        half_finite(stored, 0)
    }

    /// IQ2 and IQ3. Both groups of a block have one scale where tiles hold one.
    #[inline(always)]
    fn book(&mut self, super_block: usize, stored: &[u8], group: impl Fn(&[u8], usize) -> BookGroup) -> bool {
        for b in 0..8 {
            let [first, second] = [0, 1].map(|half| group(stored, 2 * b + half));
            let codes: [u8; 16] = std::array::from_fn(|i| first.codes[i] | second.codes[i] << 4);
            let block = 8 * super_block + b;
            self.codes(block, nibbles(&codes), []);
            let scales = [first, second].map(|group| group.scale.cast_signed());
            if self.layout.scales == Scales::Sixteens {
                self.sixteens(block, scales, stored);
            } else {
                self.signed_byte(block, scales[0], stored);
            }
        }
        half_finite(stored, 0)
    }

    fn mxfp4(&mut self, block: usize, stored: &[u8]) -> bool {
        // Codes 0 and 8 are zero. A block of zeros may have any scale.
        let zeros = stored[1..].iter().all(|byte| byte & 0x77 == 0);
        let exponent = mxfp4_exponent(stored);
        let held = stored[0] != MXFP4_NAN && (zeros || MXFP4_EXPONENTS.contains(&exponent));
        let scale = if zeros || !held { 0.0 } else { 2f32.powi(exponent - 1) };
        self.codes(block, nibbles(&stored[1..]), []);
        self.halves(block, &f16::from_f32(scale).to_le_bytes());
        held
    }

    fn scales_at(&self, tile: usize) -> usize {
        tile * self.layout.tile_bytes + 2 * self.layout.block_bytes
    }

    /// The codes of this row in one block: words with 4 or 8 bits per code, and bit planes for the remaining bits.
    #[inline(always)]
    fn codes<const WORDS: usize, const PLANES: usize>(
        &mut self,
        block: usize,
        words: [u32; WORDS],
        planes: [u32; PLANES],
    ) {
        let at = block / 2 * self.layout.tile_bytes + block % 2 * self.layout.block_bytes;
        let out = &mut self.bytes[at..at + 4 * ROWS * (WORDS + PLANES)];
        for (slot, word) in out.chunks_exact_mut(4 * ROWS).zip(words.iter().chain(&planes)) {
            slot[4 * self.row..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Writes the blocks of a row up to the first that `put` rejects. The error is its first column, and why.
#[inline(always)]
fn each(kind: QuantType, row: &[u8], mut put: impl FnMut(usize, &[u8]) -> bool) -> Result<(), (usize, BadWeights)> {
    for (b, block) in row.chunks_exact(kind.block_bytes()).enumerate() {
        if !put(b, block) {
            return Err((b * kind.block_len(), BadWeights::of(kind, block)));
        }
    }
    Ok(())
}

/// 32 four-bit codes as Q4_0 stores them; a tile stores them in the same order.
#[inline(always)]
fn nibbles(stored: &[u8]) -> [u32; 4] {
    std::array::from_fn(|t| word(stored, 4 * t))
}

/// The low four bits of the codes of one group of 32 in a super-block of Q4_K or Q5_K.
#[inline(always)]
fn k_nibbles(stored: &[u8], group: usize) -> [u32; 4] {
    let at = |i: usize| word(stored, group / 2 * 32 + i) >> (4 * (group % 2)) & 0x0f0f_0f0f;
    std::array::from_fn(|t| at(4 * t) | at(16 + 4 * t) << 4)
}

#[inline(always)]
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn half(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

fn half_finite(bytes: &[u8], at: usize) -> bool {
    u16::from_le_bytes([bytes[at], bytes[at + 1]]) & 0x7c00 != 0x7c00
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Moves bit `4 · slot + i` to bit `8 · i + slot`.
fn by_column(bits: u32) -> u32 {
    (0..4).fold(0, |plane, i| {
        let mut slots = bits >> i & 0x1111_1111;
        slots = (slots | slots >> 3) & 0x0303_0303;
        slots = (slots | slots >> 6) & 0x000f_000f;
        slots = (slots | slots >> 12) & 0xff;
        plane | slots << (8 * i)
    })
}

/// The tiles of a matrix.
#[derive(Clone, Copy)]
pub struct Tiles<'a> {
    kind: QuantType,
    rows: usize,
    cols: usize,
    bytes: &'a [u8],
}

impl<'a> Tiles<'a> {
    /// `None` unless `bytes` are the tiles of `rows` rows and `cols` columns.
    #[must_use]
    pub fn new(kind: QuantType, rows: usize, cols: usize, bytes: &'a [u8]) -> Option<Self> {
        (Layout::of(kind).matrix_bytes(rows, cols) == bytes.len()).then_some(Self { kind, rows, cols, bytes })
    }

    /// A range of whole rows of tiles.
    ///
    /// # Panics
    /// If the rows do not exist, or do not begin and end at tile boundaries.
    #[must_use]
    pub fn part(&self, rows: Range<usize>) -> Self {
        let whole = |row: usize| row.is_multiple_of(ROWS) || row == self.rows;
        assert!(whole(rows.start) && whole(rows.end) && rows.end <= self.rows, "{rows:?} of {} rows", self.rows);
        let at = |row: usize| Layout::of(self.kind).matrix_bytes(row, self.cols);
        Self { rows: rows.len(), bytes: &self.bytes[at(rows.start)..at(rows.end)], ..*self }
    }

    /// Storage format before conversion.
    #[must_use]
    pub fn kind(&self) -> QuantType {
        self.kind
    }

    /// Rows of the matrix.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrix.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// All tiles, in row-major order of tiles.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The weights of a row in a block, for reference code and tests; `None` for unquantised weights.
    #[must_use]
    pub fn block(&self, row: usize, block: usize) -> Option<WeightBlock> {
        let layout = Layout::of(self.kind);
        let tile = &self.bytes[layout.matrix_bytes(ROWS * (row / ROWS), self.cols) + block / 2 * layout.tile_bytes..];
        let (codes, scales) = (&tile[block % 2 * layout.block_bytes..], &tile[2 * layout.block_bytes..]);
        let (r, b) = (row % ROWS, block % 2);
        let at = |index: usize| word(codes, 4 * (index * ROWS + r));
        let code = |column: usize| {
            let (slot, i) = (column / 4, column % 4);
            let nibble = || at(slot % 4) >> (8 * i + 4 * (slot / 4)) & 15;
            let code = match layout.bits {
                4 => nibble(),
                5 => nibble() | (at(4) >> (8 * i + slot) & 1) << 4,
                6 => nibble() | (at(4 + slot / 4) >> (8 * i + 2 * (slot % 4)) & 3) << 4,
                _ => at(slot) >> (8 * i) & 255,
            };
            layout.table.map_or(code as u8, |table| table[code as usize])
        };
        let half = |index: usize| half_at(scales, 2 * (index * ROWS + r));
        let byte = |from: usize| scales[from + r];
        let (pair, minimum) = match layout.scales {
            Scales::None => return None,
            Scales::Half => ([half(b); 2], None),
            Scales::HalfAndMinimum => ([half(b); 2], Some(half(2 + b))),
            Scales::HalfAndZero => {
                let (scale, zero) = scale_and_zero(self::half(&scales[2 * (b * ROWS + r)..]));
                ([scale.to_f32(); 2], Some(-(scale.to_f32() * zero)))
            }
            Scales::Bytes => {
                let scale = half(0) * f32::from(byte(4 * ROWS + b * ROWS));
                ([scale; 2], Some(-(half(1) * f32::from(byte(6 * ROWS + b * ROWS)))))
            }
            Scales::SignedBytes => {
                let byte = f32::from(byte((2 + b) * ROWS).cast_signed()) * layout.unit();
                ([half(0) * byte; 2], None)
            }
            Scales::Sixteens => {
                let byte = |h: usize| f32::from(byte(2 * ROWS + (2 * b + h) * ROWS).cast_signed()) * layout.unit();
                let scale = |h: usize| half(0) * byte(h);
                ([scale(0), scale(1)], None)
            }
        };
        let codes = std::array::from_fn(code);
        Some(WeightBlock {
            codes,
            offset: layout.offset,
            scales: pair,
            split: layout.scales == Scales::Sixteens,
            minimum,
        })
    }

    /// The weights of a row as f32.
    #[must_use]
    pub fn row(&self, row: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.cols];
        self.write_row(row, &mut out);
        out
    }

    /// As [`Self::row`], into `out`, which has one element per column.
    pub fn write_row(&self, row: usize, out: &mut [f32]) {
        let layout = Layout::of(self.kind);
        if layout.bits > 0 {
            let blocks = (0..out.len().div_ceil(BLOCK)).filter_map(|b| self.block(row, b));
            for (out, block) in out.chunks_mut(BLOCK).zip(blocks) {
                out.iter_mut().enumerate().for_each(|(i, weight)| *weight = block.weight(i));
            }
            return;
        }
        let bytes = layout.block_bytes / ROWS / BLOCK;
        for (column, number) in out.iter_mut().enumerate() {
            let tile = layout.matrix_bytes(ROWS * (row / ROWS), self.cols) + column / GROUP * layout.tile_bytes;
            let at = tile + (column % GROUP * ROWS + row % ROWS) * bytes;
            self.kind.dequantize(&self.bytes[at..at + bytes], std::slice::from_mut(number));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
