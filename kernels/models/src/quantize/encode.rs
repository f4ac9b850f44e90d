//! Encodes rows of a tensor as they are written: copies of its tiles, tiles of another format, or numbers.
use std::ops::Range;

use kernels::cpu::Isa;
use kernels::quant::{self, QuantType, search};
use kernels::tile::{self, Layout, ROWS};
use rayon::prelude::*;

use crate::weights::{Stored, TensorInfo, TensorView, WeightsError};

/// Squared error of rows, and the sum of the squares of their weights.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Squares {
    pub(super) error: f64,
    pub(super) weights: f64,
}

impl Squares {
    pub(super) fn plus(self, other: Self) -> Self {
        Self { error: self.error + other.error, weights: self.weights + other.weights }
    }

    /// Squared error relative to the weights.
    pub(super) fn relative(self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.weights }
    }
}

/// Encodes rows of `source` for `target`, on all threads. The first row begins a row of tiles.
///
/// # Errors
/// The source cannot be read, or a weight is not finite.
pub(super) fn encode(
    source: &TensorView<'_>,
    target: &TensorInfo,
    rows: Range<usize>,
    out: &mut [u8],
) -> Result<Squares, WeightsError> {
    match target.stored {
        Stored::Rows => {
            let numbers = finite(source, rows)?;
            out.chunks_exact_mut(4).zip(numbers).for_each(|(out, number)| out.copy_from_slice(&number.to_le_bytes()));
            Ok(Squares::default())
        }
        Stored::Tiles => {
            let piece = Layout::of(target.quant).matrix_bytes(1, target.cols);
            let pieces = out.par_chunks_mut(piece).zip(rows.clone().into_par_iter().step_by(ROWS));
            let squares = pieces.map(|(out, first)| tile_row(source, target, first..rows.end.min(first + ROWS), out));
            squares.try_reduce(Squares::default, |a, b| Ok(a.plus(b)))
        }
    }
}

fn tile_row(
    source: &TensorView<'_>,
    target: &TensorInfo,
    rows: Range<usize>,
    out: &mut [u8],
) -> Result<Squares, WeightsError> {
    if target.quant == source.quant {
        return source.read_tiles(rows, out).map(|()| Squares::default());
    }
    let weights = finite(source, rows.clone())?;
    let blocks = blocks(target.quant, &weights);
    tile::convert(target.quant, target.cols, rows.clone(), &blocks, out).map_err(|bad| WeightsError::BadWeights {
        tensor: source.name.to_owned(),
        what: format!("row {}: a weight is too large for {}; choose more bits", bad.row, target.quant.name()),
    })?;
    Ok(squares(target.quant, &weights, &blocks))
}

/// Rows as f32, all of them finite.
pub(super) fn finite(source: &TensorView<'_>, rows: Range<usize>) -> Result<Vec<f32>, WeightsError> {
    let weights = source.rows_f32(rows.clone())?;
    let Some(at) = weights.iter().position(|weight| !weight.is_finite()) else { return Ok(weights) };
    let (row, column) = (rows.start + at / source.cols, at % source.cols);
    let what =
        format!("row {row}, column {column}: expected a finite weight, found {}; fetch the file again", weights[at]);
    Err(WeightsError::BadWeights { tensor: source.name.to_owned(), what })
}

/// Finite weights in a format that [`super::formats`] chooses, as rows of a file.
pub(super) fn blocks(kind: QuantType, weights: &[f32]) -> Vec<u8> {
    if kind == QuantType::Q4Z {
        return search::q4_z(Isa::detect(), weights);
    }
    quant::quantize(kind, weights).expect("only formats that can be written are chosen")
}

/// The error of blocks.
pub(super) fn squares(kind: QuantType, weights: &[f32], blocks: &[u8]) -> Squares {
    let mut back = vec![0.0f32; weights.len()];
    kind.dequantize(blocks, &mut back);
    let mut squares = Squares::default();
    for (weight, back) in weights.iter().zip(back) {
        squares.error += (f64::from(*weight) - f64::from(back)).powi(2);
        squares.weights += f64::from(*weight).powi(2);
    }
    squares
}
