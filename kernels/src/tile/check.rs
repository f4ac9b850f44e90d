//! Checks tiles that were stored as tiles: what conversion guarantees of other files, that all weights are finite.
use half::{bf16, f16};

use super::{BadBlock, BadWeights, Layout, ROWS, Scales};
use crate::order::{BLOCK, GROUP};
use crate::quant::QuantType;

/// Checks whole rows of tiles, padding included: zeros times infinity are not zero.
///
/// # Errors
/// The first number, scale or minimum that is not finite. `first` is the row at which `bytes` begin.
pub fn check(kind: QuantType, cols: usize, first: usize, bytes: &[u8]) -> Result<(), BadBlock> {
    let layout = Layout::of(kind);
    let in_row = cols.div_ceil(GROUP);
    for (number, tile) in bytes.chunks_exact(layout.tile_bytes).enumerate() {
        let Some((row, column)) = not_finite(kind, &layout, tile) else { continue };
        let (row, column) = (first + number / in_row * ROWS + row, number % in_row * GROUP + column);
        return Err(BadBlock { row, column, reason: BadWeights::NotFinite });
    }
    Ok(())
}

/// Row in the tile, and column of the number or of its block.
fn not_finite(kind: QuantType, layout: &Layout, tile: &[u8]) -> Option<(usize, usize)> {
    let by_column = |index: usize| (index % ROWS, index / ROWS);
    match kind {
        QuantType::F32 => {
            let mut words = tile.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            return words.position(|number| !number.is_finite()).map(by_column);
        }
        QuantType::F16 => return position(tile, f16::INFINITY.to_bits()).map(by_column),
        QuantType::Bf16 => return position(tile, bf16::INFINITY.to_bits()).map(by_column),
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
        | QuantType::Mxfp4 => {}
    }
    // Halves before the scales that are bytes, and the blocks that they belong to.
    let (halves, blocks) = match layout.scales {
        Scales::None => (0, 1),
        Scales::Half | Scales::HalfAndZero => (2, 2),
        Scales::HalfAndMinimum => (4, 2),
        Scales::Bytes => (2, 1),
        Scales::SignedBytes | Scales::Sixteens => (1, 1),
    };
    let scales = &tile[2 * layout.block_bytes..][..2 * ROWS * halves];
    // The scale is in the upper nine bits of such a word.
    let above = u32::from(layout.scales == Scales::HalfAndZero);
    position(scales, f16::INFINITY.to_bits() << above).map(|index| (index % ROWS, index / ROWS % blocks * BLOCK))
}

/// Index of the first 16-bit number whose exponent, the bits of infinity, is all ones.
fn position(bytes: &[u8], exponent: u16) -> Option<usize> {
    let is_finite = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]) & exponent != exponent;
    bytes.chunks_exact(2).position(|number| !is_finite(number))
}
