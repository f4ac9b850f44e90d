//! Tensors of a weights file: where they lie, and reading them.
use std::ops::Range;

use bytes::Bytes;
use kernels::quant::QuantType;
use kernels::tile::{self, Layout, Tiles};

use super::error::WeightsError;
use super::source::Source;

/// How a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Rows one after another, each a whole number of blocks.
    Rows,
    /// Tiles of 16 rows, as [`kernels::tile`] defines them: what engines keep in memory.
    Tiles,
}

/// Location of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Format of the weights.
    pub quant: QuantType,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Weights per row.
    pub cols: usize,
    /// How they are stored.
    pub stored: Stored,
    /// Byte range in the file.
    pub range: Range<u64>,
}

impl TensorInfo {
    /// Bytes per row in its format.
    ///
    /// # Panics
    /// If rows are not whole blocks; those of an opened file are.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.quant.row_bytes(self.cols).expect("rows are whole blocks, checked when the file was opened") as u64
    }

    /// Rows that are stored together, and their bytes: one row, or a row of tiles.
    #[must_use]
    pub fn unit(&self) -> (usize, u64) {
        match self.stored {
            Stored::Rows => (1, (self.range.end - self.range.start) / self.rows as u64),
            Stored::Tiles => (tile::ROWS, Layout::of(self.quant).matrix_bytes(1, self.cols) as u64),
        }
    }
}

/// Bytes of a tensor as it is stored; `None` if its rows are not whole blocks, are longer than `row_bytes_max`, or on overflow.
pub(super) fn stored_bytes(
    quant: QuantType,
    stored: Stored,
    [rows, cols]: [usize; 2],
    row_bytes_max: usize,
) -> Option<u64> {
    let row_bytes = quant.row_bytes(cols).filter(|bytes| *bytes <= row_bytes_max)?;
    let (units, bytes) = match stored {
        Stored::Rows => (rows, row_bytes),
        Stored::Tiles => (rows.div_ceil(tile::ROWS), Layout::of(quant).matrix_bytes(1, cols)),
    };
    (units as u64).checked_mul(bytes as u64)
}

/// A tensor of an opened file; shape `[rows, cols]`.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Format of the weights.
    pub quant: QuantType,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Weights per row.
    pub cols: usize,
    pub(super) stored: Stored,
    pub(super) source: &'a Source,
    pub(super) range: &'a Range<u64>,
}

/// Bytes read and converted at a time: few reads, and small compared to the result. A row of tiles may be larger.
const PIECE_BYTES: usize = 1 << 20;

impl TensorView<'_> {
    /// Bytes per row in its format.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.quant.row_bytes(self.cols).expect("rows are whole blocks, checked when the file was opened")
    }

    /// Reads rows in storage format, `rows.len() × quant.row_bytes(cols)` bytes.
    ///
    /// # Errors
    /// The rows do not exist or are stored as tiles, or the file was truncated or cannot be read.
    pub fn read(&self, rows: Range<usize>) -> Result<Bytes, WeightsError> {
        if self.stored == Stored::Tiles {
            return Err(WeightsError::Unsupported(format!("tensor {:?} is stored as tiles: expected rows", self.name)));
        }
        self.source.read(&self.place(&rows, 1, self.row_bytes())?)
    }

    /// Where rows are; `unit` rows of `bytes` bytes are stored together.
    fn place(&self, rows: &Range<usize>, unit: usize, bytes: usize) -> Result<Range<u64>, WeightsError> {
        let at = |units: usize| (units as u64).checked_mul(bytes as u64)?.checked_add(self.range.start);
        let range = Some(rows).filter(|rows| rows.start <= rows.end && rows.end <= self.rows);
        range.and_then(|rows| Some(at(rows.start / unit)?..at(rows.end.div_ceil(unit))?)).ok_or_else(|| {
            let (name, all) = (self.name, self.rows);
            WeightsError::Malformed(format!("tensor {name:?}: expected rows of 0..{all}, found {rows:?}"))
        })
    }

    /// Reads rows as tiles: copies them if they are stored so, else converts them. `rows` starts at a tile boundary; `out` holds
    /// whole rows of tiles.
    ///
    /// # Errors
    /// As [`Self::read`]; or a scale, a minimum or a weight is not finite, or tiles do not hold a scale.
    ///
    /// # Panics
    /// If `out` is not as long as the tiles of `rows`, or `rows` does not start at a tile boundary.
    pub fn read_tiles(&self, rows: Range<usize>, out: &mut [u8]) -> Result<(), WeightsError> {
        let layout = Layout::of(self.quant);
        assert!(rows.start.is_multiple_of(tile::ROWS), "{rows:?} begin in a tile");
        assert_eq!(out.len(), layout.matrix_bytes(rows.len(), self.cols), "size of the tiles of {rows:?}");
        let tile_row_bytes = layout.matrix_bytes(1, self.cols);
        let piece_bytes = match self.stored {
            Stored::Rows => tile::ROWS * self.row_bytes(),
            Stored::Tiles => tile_row_bytes,
        };
        let tile_rows = (PIECE_BYTES / piece_bytes).max(1);
        let pieces = out.chunks_mut(tile_rows * tile_row_bytes);
        for (out, first) in pieces.zip(rows.clone().step_by(tile_rows * tile::ROWS)) {
            let piece = first..rows.end.min(first + tile_rows * tile::ROWS);
            let read = match self.stored {
                Stored::Rows => tile::convert(self.quant, self.cols, piece.clone(), &self.read(piece)?, out),
                Stored::Tiles => {
                    let place = self.place(&piece, tile::ROWS, tile_row_bytes)?;
                    self.source.read_into(place.start, out)?;
                    tile::check(self.quant, self.cols, first, out)
                }
            };
            read.map_err(|what| WeightsError::BadWeights { tensor: self.name.to_owned(), what: what.to_string() })?;
        }
        Ok(())
    }

    /// Rows as f32, dequantised by the scalar reference.
    ///
    /// # Errors
    /// As [`Self::read_tiles`] if they are stored as tiles, else as [`Self::read`].
    pub fn rows_f32(&self, rows: Range<usize>) -> Result<Vec<f32>, WeightsError> {
        let mut out = vec![0.0; rows.len() * self.cols];
        match self.stored {
            Stored::Rows => self.quant.dequantize(&self.read(rows)?, &mut out),
            Stored::Tiles => {
                let first = rows.start / tile::ROWS * tile::ROWS;
                self.place(&rows, 1, self.row_bytes())?; // before memory is allocated for them
                let mut bytes = vec![0; Layout::of(self.quant).matrix_bytes(rows.end - first, self.cols)];
                self.read_tiles(first..rows.end, &mut bytes)?;
                let tiles = Tiles::new(self.quant, rows.end - first, self.cols, &bytes).expect("the size of a matrix");
                let rows = rows.start - first..rows.end - first;
                rows.zip(out.chunks_exact_mut(self.cols)).for_each(|(row, out)| tiles.write_row(row, out));
            }
        }
        Ok(out)
    }

    /// All weights as f32, dequantised by the scalar reference.
    ///
    /// # Errors
    /// As [`Self::rows_f32`].
    pub fn to_f32(&self) -> Result<Vec<f32>, WeightsError> {
        self.rows_f32(0..self.rows)
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
