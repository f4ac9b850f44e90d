//! Layout of the tiles of each format: bits of codes, tables, and where scales are.
use super::ROWS;
use crate::order::{BLOCK, GROUP};
use crate::quant::{
    IQ2_SHIFT, IQ2_VALUES, IQ3_S_VALUES, IQ3_XXS_SHIFT, IQ3_XXS_VALUES, IQ4_VALUES, MXFP4_VALUES, QuantType,
};

/// Layout of a tile, for one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bits stored per code: 4, 5, 6 or 8; 0 for unquantised weights.
    pub bits: u32,
    /// The codes that stored nibbles stand for; `None` if the stored bits are the codes.
    pub table: Option<&'static [u8; 16]>,
    /// Subtracted from each code.
    pub offset: i32,
    /// How scales are stored.
    pub scales: Scales,
    /// Signed bytes of scales are divided by two to this power.
    pub shift: u32,
    /// Bytes of the codes (or unquantised weights) of one block.
    pub block_bytes: usize,
    /// Bytes per tile.
    pub tile_bytes: usize,
}

/// Layout of a tile's scales, which follow the codes of its two blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// None: unquantised weights.
    None,
    /// `[block][row]` f16.
    Half,
    /// `[block][row]` f16, then minima in the same form.
    HalfAndMinimum,
    /// `[block][row]` words of 16 bits: a scale and the code that stands for zero, as [`scale_and_zero`](crate::quant::scale_and_zero)
    /// has them.
    HalfAndZero,
    /// `[row]` f16 factors of scales and of minima, then `[block][row]` bytes of scales, then of minima (which are subtracted).
    Bytes,
    /// `[row]` f16 factors, then `[block][row]` signed bytes.
    SignedBytes,
    /// `[row]` f16 factors, then `[block][half][row]` signed bytes: one scale per 16 columns.
    Sixteens,
}

impl Scales {
    /// Whether the format has minima.
    #[must_use]
    pub const fn minimum(self) -> bool {
        matches!(self, Self::HalfAndMinimum | Self::HalfAndZero | Self::Bytes)
    }
}

impl Layout {
    /// The layout of a format.
    #[must_use]
    pub const fn of(kind: QuantType) -> Self {
        let (bits, table, offset, scales) = match kind {
            QuantType::F32 | QuantType::F16 | QuantType::Bf16 => (0, None, 0, Scales::None),
            QuantType::Q4_0 => (4, None, 8, Scales::Half),
            QuantType::Q4_1 => (4, None, 0, Scales::HalfAndMinimum),
            QuantType::Q5_0 => (5, None, 16, Scales::Half),
            QuantType::Q5_1 => (5, None, 0, Scales::HalfAndMinimum),
            QuantType::Q8_0 => (8, None, 128, Scales::Half),
            QuantType::Iq2Xxs => (4, Some(&IQ2_CODES), IQ2_OFFSET as i32, Scales::SignedBytes),
            QuantType::Iq2Xs | QuantType::Iq2S => (4, Some(&IQ2_CODES), IQ2_OFFSET as i32, Scales::Sixteens),
            QuantType::Iq3Xxs => (4, Some(&IQ3_XXS_CODES), IQ3_XXS_OFFSET as i32, Scales::SignedBytes),
            QuantType::Iq3S => (4, Some(&IQ3_S_CODES), IQ3_S_OFFSET as i32, Scales::SignedBytes),
            QuantType::Q3K => (4, None, 4, Scales::Sixteens),
            QuantType::Q4K => (4, None, 0, Scales::Bytes),
            QuantType::Q5K => (5, None, 0, Scales::Bytes),
            QuantType::Q6K => (6, None, 32, Scales::Sixteens),
            QuantType::Q4Z => (4, None, 0, Scales::HalfAndZero),
            QuantType::Iq4Nl => (4, Some(&IQ4_CODES), IQ4_OFFSET as i32, Scales::Half),
            QuantType::Iq4Xs => (4, Some(&IQ4_CODES), IQ4_OFFSET as i32, Scales::SignedBytes),
            QuantType::Mxfp4 => (4, Some(&MXFP4_CODES), MXFP4_OFFSET as i32, Scales::Half),
        };
        let block_bytes = match kind {
            QuantType::F32 => ROWS * BLOCK * 4,
            QuantType::F16 | QuantType::Bf16 => ROWS * BLOCK * 2,
            QuantType::Q4_0
            | QuantType::Q4_1
            | QuantType::Q5_0
            | QuantType::Q5_1
            | QuantType::Q8_0
            | QuantType::Iq2Xxs
            | QuantType::Iq2Xs
            | QuantType::Iq2S
            | QuantType::Iq3Xxs
            | QuantType::Iq3S
            | QuantType::Q3K
            | QuantType::Q4K
            | QuantType::Q5K
            | QuantType::Q6K
            | QuantType::Q4Z
            | QuantType::Iq4Nl
            | QuantType::Iq4Xs
            | QuantType::Mxfp4 => ROWS * BLOCK * bits as usize / 8,
        };
        let scale_bytes = match scales {
            Scales::None => 0,
            Scales::Half | Scales::HalfAndZero | Scales::SignedBytes => 4 * ROWS,
            Scales::HalfAndMinimum => 8 * ROWS,
            Scales::Bytes => 8 * ROWS,
            Scales::Sixteens => 6 * ROWS,
        };
        let shift = match kind {
            QuantType::Iq2Xxs | QuantType::Iq2Xs | QuantType::Iq2S => IQ2_SHIFT,
            QuantType::Iq3Xxs => IQ3_XXS_SHIFT,
            QuantType::F32
            | QuantType::F16
            | QuantType::Bf16
            | QuantType::Q4_0
            | QuantType::Q4_1
            | QuantType::Q5_0
            | QuantType::Q5_1
            | QuantType::Q8_0
            | QuantType::Iq3S
            | QuantType::Q3K
            | QuantType::Q4K
            | QuantType::Q5K
            | QuantType::Q6K
            | QuantType::Q4Z
            | QuantType::Iq4Nl
            | QuantType::Iq4Xs
            | QuantType::Mxfp4 => 0,
        };
        Self { bits, table, offset, scales, shift, block_bytes, tile_bytes: 2 * block_bytes + scale_bytes }
    }

    /// What signed bytes of scales are multiplied by.
    #[must_use]
    pub const fn unit(&self) -> f32 {
        1.0 / (1u32 << self.shift) as f32
    }

    /// Bytes of the tiles of a matrix.
    #[must_use]
    pub const fn matrix_bytes(&self, rows: usize, cols: usize) -> usize {
        rows.div_ceil(ROWS) * cols.div_ceil(GROUP) * self.tile_bytes
    }
}

/// Subtracted from the codes of [`IQ4_CODES`]. With 128, instruction sets that multiply signed bytes subtract it first.
const IQ4_OFFSET: u8 = 128;
const IQ4_CODES: [u8; 16] = codes_of(&IQ4_VALUES, IQ4_OFFSET);
/// As for IQ4: unsigned, these codes would be above 63, which is too many for sums of products in 16 bits.
const IQ2_OFFSET: u8 = 128;
const IQ2_CODES: [u8; 16] = codes_of(&IQ2_VALUES, IQ2_OFFSET);
const IQ3_XXS_OFFSET: u8 = 128;
const IQ3_XXS_CODES: [u8; 16] = codes_of(&IQ3_XXS_VALUES, IQ3_XXS_OFFSET);
/// The least that makes them unsigned.
const IQ3_S_OFFSET: u8 = 15;
const IQ3_S_CODES: [u8; 16] = codes_of(&IQ3_S_VALUES, IQ3_S_OFFSET);
/// Subtracted from the codes of [`MXFP4_CODES`], the least that makes them unsigned: products of small codes are faster.
const MXFP4_OFFSET: u8 = 12;
const MXFP4_CODES: [u8; 16] = codes_of(&MXFP4_VALUES, MXFP4_OFFSET);

const fn codes_of(values: &[i8; 16], offset: u8) -> [u8; 16] {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < codes.len() {
        codes[i] = values[i].cast_unsigned().wrapping_add(offset);
        i += 1;
    }
    codes
}
