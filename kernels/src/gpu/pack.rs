//! Quantised blocks rearranged for a device: what is read 16 bytes at a time apart from the scales, no byte added but
//! alignment.
//!
//! GGUF blocks of 18, 34 or 210 bytes put their quants at odd addresses. A packed matrix has two planes, each in the
//! order of rows and blocks: the quants of every block, and its scales where they are not part of an aligned block.
use crate::quant::QuantType;

/// Weights of a row that a lane takes at once. Rows are whole units: every format's block is a multiple or a divisor.
pub(super) const UNIT: usize = 32;

/// A matrix's two planes, as 32-bit words of little-endian bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Storage format.
    pub quant: QuantType,
    /// Rows.
    pub rows: usize,
    /// Weights per row, a multiple of 32.
    pub cols: usize,
    /// Quants of all blocks; a multiple of 4 words.
    pub quants: Vec<i32>,
    /// Scales of all blocks; at least one word, since a device binds no empty buffer.
    pub scales: Vec<i32>,
}

/// Why a matrix cannot be packed.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The shape has no packed form.
    #[error("expected {rows} rows of {cols} weights ({quant}) in whole units of 32, found {found} bytes")]
    Shape {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
        /// Format.
        quant: &'static str,
        /// Bytes given.
        found: usize,
    },
    /// A scale is infinite or not a number.
    #[error("row {row} has a scale that is not finite: the file is damaged; pull it again")]
    NotFinite {
        /// Where.
        row: usize,
    },
}

/// Where a block's bytes go.
struct BlockLayout {
    bytes: usize,
    quants: std::ops::Range<usize>,
    scales: std::ops::Range<usize>,
    /// Bytes of a block in the plane of scales, with padding.
    scale_stride: usize,
    /// Halves that must be finite.
    halves: &'static [usize],
}

fn layout(quant: QuantType) -> BlockLayout {
    let whole = |bytes, halves| BlockLayout { bytes, quants: 0..bytes, scales: 0..0, scale_stride: 0, halves };
    match quant {
        QuantType::F32 => whole(4, &[]),
        QuantType::F16 => whole(2, &[0]),
        QuantType::Bf16 => whole(2, &[]),
        QuantType::Q4_0 => BlockLayout { bytes: 18, quants: 2..18, scales: 0..2, scale_stride: 2, halves: &[0] },
        QuantType::Q4_1 => BlockLayout { bytes: 20, quants: 4..20, scales: 0..4, scale_stride: 4, halves: &[0, 2] },
        QuantType::Q5_0 => BlockLayout { bytes: 22, quants: 6..22, scales: 0..6, scale_stride: 6, halves: &[0] },
        QuantType::Q5_1 => BlockLayout { bytes: 24, quants: 8..24, scales: 0..8, scale_stride: 8, halves: &[0, 2] },
        QuantType::Q8_0 => BlockLayout { bytes: 34, quants: 2..34, scales: 0..2, scale_stride: 2, halves: &[0] },
        QuantType::Q4K => whole(144, &[0, 2]),
        QuantType::Q5K => whole(176, &[0, 2]),
        QuantType::Q6K => {
            BlockLayout { bytes: 210, quants: 0..192, scales: 192..210, scale_stride: 20, halves: &[208] }
        }
    }
}

/// Bytes that a matrix takes on a device.
#[must_use]
pub fn packed_bytes(quant: QuantType, rows: usize, cols: usize) -> u64 {
    let layout = layout(quant);
    let blocks = (rows * cols / quant.block_len()) as u64;
    let scales = (blocks * layout.scale_stride as u64).next_multiple_of(4).max(4);
    (blocks * layout.quants.len() as u64).next_multiple_of(16) + scales
}

impl Packed {
    /// Packs `rows` rows of `cols` weights.
    ///
    /// # Errors
    /// Bytes that are not the shape's, rows that are not whole units of 32 weights, scales that are not finite.
    pub fn new(quant: QuantType, rows: usize, cols: usize, bytes: &[u8]) -> Result<Self, PackError> {
        let layout = layout(quant);
        let shape = || PackError::Shape { rows, cols, quant: quant.name(), found: bytes.len() };
        let row_bytes = quant.row_bytes(cols).filter(|_| cols.is_multiple_of(UNIT) && cols > 0).ok_or_else(shape)?;
        if rows.checked_mul(row_bytes) != Some(bytes.len()) {
            return Err(shape());
        }
        let blocks = bytes.len() / layout.bytes;
        let mut quants = vec![0i32; (blocks * layout.quants.len()).div_ceil(16) * 4];
        let mut scales = vec![0i32; (blocks * layout.scale_stride).div_ceil(4).max(1)];
        let (quant_bytes, scale_bytes) =
            (bytemuck::cast_slice_mut::<i32, u8>(&mut quants), bytemuck::cast_slice_mut(&mut scales));
        for (i, block) in bytes.chunks_exact(layout.bytes).enumerate() {
            let infinite = |at: &usize| block[at + 1] & 0x7c == 0x7c;
            if layout.halves.iter().any(infinite) {
                return Err(PackError::NotFinite { row: i * layout.bytes / row_bytes });
            }
            quant_bytes[i * layout.quants.len()..][..layout.quants.len()]
                .copy_from_slice(&block[layout.quants.clone()]);
            scale_bytes[i * layout.scale_stride..][..layout.scales.len()]
                .copy_from_slice(&block[layout.scales.clone()]);
        }
        Ok(Self { quant, rows, cols, quants, scales })
    }

    /// A row as the file has it.
    ///
    /// # Panics
    /// If `row` is beyond the matrix.
    #[must_use]
    pub fn row(&self, row: usize) -> Vec<u8> {
        unpack_row(self.quant, self.cols, &self.quants, &self.scales, row)
    }
}

/// The bytes of one row as the file has them, from the two planes.
///
/// # Panics
/// If `row` is beyond the planes.
#[must_use]
pub fn unpack_row(quant: QuantType, cols: usize, quants: &[i32], scales: &[i32], row: usize) -> Vec<u8> {
    let layout = layout(quant);
    let (quants, scales): (&[u8], &[u8]) = (bytemuck::cast_slice(quants), bytemuck::cast_slice(scales));
    let blocks = cols / quant.block_len();
    let mut bytes = vec![0u8; blocks * layout.bytes];
    for (i, block) in bytes.chunks_exact_mut(layout.bytes).enumerate() {
        let i = row * blocks + i;
        block[layout.quants.clone()].copy_from_slice(&quants[i * layout.quants.len()..][..layout.quants.len()]);
        block[layout.scales.clone()].copy_from_slice(&scales[i * layout.scale_stride..][..layout.scales.len()]);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{QUANT_TYPES, random_blocks};

    #[test]
    fn packing_loses_nothing_and_grows_by_less_than_a_hundredth() {
        for quant in QUANT_TYPES {
            let (rows, cols) = (33, 768);
            let bytes = random_blocks(quant, rows * cols / quant.block_len(), 7);
            let packed = Packed::new(quant, rows, cols, &bytes).unwrap();
            let back: Vec<u8> = (0..rows).flat_map(|row| packed.row(row)).collect();
            assert_eq!(back, bytes, "{}", quant.name());
            let size = 4 * (packed.quants.len() + packed.scales.len());
            assert_eq!(size as u64, packed_bytes(quant, rows, cols), "{}", quant.name());
            assert!(size * 100 <= bytes.len() * 101 + 1600, "{}: {size} bytes of {}", quant.name(), bytes.len());
        }
    }

    #[test]
    fn refuses_other_shapes_and_infinite_scales() {
        let mut bytes = random_blocks(QuantType::Q4_1, 4, 7);
        assert!(Packed::new(QuantType::Q4_1, 2, 96, &bytes).is_err());
        assert!(Packed::new(QuantType::Q4_1, 2, 65, &bytes).is_err());
        assert!(Packed::new(QuantType::F32, 1, 20, &bytes).is_err());
        assert!(Packed::new(QuantType::Q4_1, 2, 64, &bytes).is_ok());
        bytes[61] = 0x7c;
        let error = Packed::new(QuantType::Q4_1, 2, 64, &bytes).unwrap_err();
        assert!(matches!(error, PackError::NotFinite { row: 1 }), "{error}");
    }
}
