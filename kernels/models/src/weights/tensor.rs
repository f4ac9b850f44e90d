//! Tensors of a weights file: where they lie, and reading them.
use std::ops::Range;

use bytes::Bytes;
use kernels::quant::QuantType;
use kernels::tile::{self, Layout};

use super::error::WeightsError;
use super::source::Source;

/// Location of a tensor. Rows are contiguous, each a whole number of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Storage format.
    pub quant: QuantType,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Weights per row.
    pub cols: usize,
    /// Byte range in the file.
    pub range: Range<u64>,
}

impl TensorInfo {
    /// Bytes per row.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        (self.range.end - self.range.start) / self.rows as u64
    }
}

/// A tensor of an opened file; shape `[rows, cols]`, row-major.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Storage format.
    pub quant: QuantType,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Weights per row.
    pub cols: usize,
    pub(super) source: &'a Source,
    pub(super) range: &'a Range<u64>,
}

/// Bytes read and converted at a time: few reads, and small compared to the result. A row of tiles may be larger.
const PIECE_BYTES: usize = 1 << 20;

impl TensorView<'_> {
    /// Bytes per row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        (self.range.end - self.range.start) as usize / self.rows
    }

    /// Reads rows in storage format, `rows.len() × quant.row_bytes(cols)` bytes.
    ///
    /// # Errors
    /// The rows do not exist, or the file was truncated or cannot be read.
    pub fn read(&self, rows: Range<usize>) -> Result<Bytes, WeightsError> {
        let place = |row: usize| (row as u64).checked_mul(self.row_bytes() as u64)?.checked_add(self.range.start);
        let range = Some(&rows).filter(|rows| rows.end <= self.rows).and_then(|r| Some(place(r.start)?..place(r.end)?));
        let range = range.ok_or_else(|| {
            WeightsError::Malformed(format!(
                "tensor {:?}: expected rows of 0..{}, found {rows:?}",
                self.name, self.rows
            ))
        })?;
        self.source.read(&range)
    }

    /// Reads rows and converts them to tiles. `rows` starts at a tile boundary; `out` holds whole rows of tiles.
    ///
    /// # Errors
    /// As [`Self::read`]; or a scale, a minimum or a weight is not finite, or tiles do not hold a scale.
    ///
    /// # Panics
    /// If `out` is not as long as the tiles of `rows`, or `rows` does not start at a tile boundary.
    pub fn read_tiles(&self, rows: Range<usize>, out: &mut [u8]) -> Result<(), WeightsError> {
        let layout = Layout::of(self.quant);
        assert_eq!(out.len(), layout.matrix_bytes(rows.len(), self.cols), "size of the tiles of {rows:?}");
        let tile_rows = (PIECE_BYTES / (tile::ROWS * self.row_bytes())).max(1);
        let pieces = out.chunks_mut(tile_rows * layout.matrix_bytes(1, self.cols));
        for (out, first) in pieces.zip(rows.clone().step_by(tile_rows * tile::ROWS)) {
            let piece = first..rows.end.min(first + tile_rows * tile::ROWS);
            let stored = self.read(piece.clone())?;
            let bad = |what: tile::BadBlock| WeightsError::BadWeights {
                tensor: self.name.to_owned(),
                what: what.to_string(),
            };
            tile::convert(self.quant, self.cols, piece, &stored, out).map_err(bad)?;
        }
        Ok(())
    }

    /// All weights as f32, dequantised by the scalar reference.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn to_f32(&self) -> Result<Vec<f32>, WeightsError> {
        let mut out = vec![0.0; self.rows * self.cols];
        self.quant.dequantize(&self.read(0..self.rows)?, &mut out);
        Ok(out)
    }

    /// As [`Self::to_f32`] for tensors that must be finite: norms and biases.
    ///
    /// # Errors
    /// As [`Self::read`]; or a weight is not finite.
    pub fn to_finite_f32(&self) -> Result<Vec<f32>, WeightsError> {
        let numbers = self.to_f32()?;
        match numbers.iter().position(|number| !number.is_finite()) {
            None => Ok(numbers),
            Some(at) => {
                let what = format!("element {at} is {}; the file is damaged, fetch it again", numbers[at]);
                Err(WeightsError::BadWeights { tensor: self.name.to_owned(), what })
            }
        }
    }
}
