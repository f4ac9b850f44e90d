//! Which format each tensor of a file gets.
//!
//! Bits per weight are those of tiles, as the file stores them: 4.5 for Q4_Z, 8.5 for Q8_0. A tensor never gets more bits than it
//! has. Vectors are F32, and the routers of mixtures stay as they are: they are small, and choose what is computed.
use std::collections::BTreeMap;

use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS};

use super::encode::{blocks, finite, squares};
use super::{Bits, QuantizeError};
use crate::weights::mesh::Planned;
use crate::weights::{ModelFile, Stored, TensorInfo, TensorView, config};

/// The format of each tensor, by its index in the source.
pub(super) struct Formats(Vec<QuantType>);

/// Whether a tensor is stored as numbers.
pub(super) fn is_vector(tensor: &TensorInfo) -> bool {
    config::is_vector(&tensor.name, tensor.rows)
}

/// Whether a tensor keeps its format in any case.
fn is_fixed(tensor: &TensorInfo) -> bool {
    is_vector(tensor) || tensor.name.contains(".ffn_gate_inp")
}

/// Bytes of a matrix in a format, as tiles.
fn bytes(tensor: &TensorInfo, kind: QuantType) -> u64 {
    Layout::of(kind).matrix_bytes(tensor.rows, tensor.cols) as u64
}

impl Formats {
    /// Formats of the same number of bits for all matrices.
    ///
    /// # Errors
    /// The source cannot be read, or a weight is not finite.
    pub(super) fn fixed(file: &ModelFile, bits: Bits) -> Result<Self, QuantizeError> {
        let format = |tensor: &TensorInfo| -> Result<QuantType, QuantizeError> {
            let wanted = match bits {
                _ if is_vector(tensor) => return Ok(QuantType::F32),
                _ if is_fixed(tensor) => return Ok(tensor.quant),
                Bits::Keep => return Ok(tensor.quant),
                Bits::Four | Bits::Eight => {
                    let wanted = if bits == Bits::Four { QuantType::Q4Z } else { QuantType::Q8_0 };
                    ladder(tensor).into_iter().find(|kind| *kind == wanted)
                }
                Bits::Sixteen => None,
                Bits::Auto { .. } => unreachable!("formats of a measurement"),
            };
            match wanted {
                Some(kind) => Ok(kind),
                // Only numbers of 32 bits get sixteen.
                None if tensor.quant == QuantType::F32 => sixteen(file, tensor),
                None => Ok(tensor.quant),
            }
        };
        file.tensors().iter().map(format).collect::<Result<_, _>>().map(Self)
    }

    /// The formats that give the least error within `target` bits per weight: every matrix begins with the fewest bits; then the
    /// step that reduces the error most per byte is taken, as long as one fits.
    ///
    /// `sensitivities`: see [`super::sensitivity`]; the errors of more bits follow from those of the weights.
    ///
    /// # Errors
    /// The target is below the fewest bits; the source cannot be read, or a weight is not finite.
    pub(super) fn within(
        file: &ModelFile,
        sensitivities: &BTreeMap<String, f64>,
        target: f64,
    ) -> Result<Self, QuantizeError> {
        let mut chosen = Self::fixed(file, Bits::Keep)?;
        let mut steps = Vec::new();
        for (number, tensor) in file.tensors().iter().enumerate().filter(|(_, tensor)| !is_vector(tensor)) {
            let levels = levels(file, tensor, sensitivities.get(&tensor.name).copied())?;
            chosen.0[number] = levels[0].kind;
            steps.push((number, levels, 0));
        }
        let mut room = check_target(file, target)?;
        loop {
            // The best step to any of the higher levels: (gain per byte, matrix, level, bytes).
            let mut best: Option<(f64, usize, usize, u64)> = None;
            for (at, (_, levels, now)) in steps.iter().enumerate() {
                for (level, next) in levels.iter().enumerate().skip(now + 1) {
                    let more = next.bytes.saturating_sub(levels[*now].bytes);
                    let gain = (levels[*now].error - next.error) / more.max(1) as f64;
                    if more as f64 <= room && gain > 0.0 && best.is_none_or(|best| gain > best.0) {
                        best = Some((gain, at, level, more));
                    }
                }
            }
            let Some((_, at, level, more)) = best else { return Ok(chosen) };
            room -= more as f64;
            let (number, levels, now) = &mut steps[at];
            *now = level;
            chosen.0[*number] = levels[level].kind;
        }
    }

    /// A tensor as it is written.
    pub(super) fn planned(&self, file: &ModelFile, number: usize) -> Planned {
        let (tensor, quant) = (&file.tensors()[number], self.0[number]);
        let stored = if is_vector(tensor) { Stored::Rows } else { Stored::Tiles };
        Planned { name: tensor.name.clone(), quant, stored, rows: tensor.rows, cols: tensor.cols }
    }
}

/// The format with the fewest bits of each matrix that [`super::sensitivity`] measures; `None` if it has no choice.
pub(super) fn fewest(tensor: &TensorInfo) -> Option<QuantType> {
    (!is_fixed(tensor)).then(|| ladder(tensor).into_iter().next())?
}

/// Formats of four and eight bits that a matrix may get: its rows are whole blocks, and it has more bits now. Ascending.
fn ladder(tensor: &TensorInfo) -> Vec<QuantType> {
    let now = bytes(tensor, tensor.quant);
    let mut kinds = vec![QuantType::Q4Z, QuantType::Q8_0];
    kinds.retain(|kind| kind.row_bytes(tensor.cols).is_some() && bytes(tensor, *kind) < now);
    kinds
}

/// F16, or BF16 if a weight is beyond it.
fn sixteen(file: &ModelFile, tensor: &TensorInfo) -> Result<QuantType, QuantizeError> {
    let view = view(file, tensor);
    for first in (0..tensor.rows).step_by(SCAN_ROWS) {
        let weights = finite(&view, first..tensor.rows.min(first + SCAN_ROWS))?;
        if weights.iter().any(|weight| weight.abs() >= F16_BEYOND) {
            return Ok(QuantType::Bf16);
        }
    }
    Ok(QuantType::F16)
}

/// The least number that F16 rounds to infinity.
const F16_BEYOND: f32 = 65_520.0;

/// Rows that are scanned at a time: some MiB of the widest models.
const SCAN_ROWS: usize = 4 * ROWS;

fn view<'a>(file: &'a ModelFile, tensor: &TensorInfo) -> TensorView<'a> {
    file.tensor(&tensor.name).expect("a tensor of the file")
}

/// A format that a matrix may get.
struct Level {
    kind: QuantType,
    bytes: u64,
    /// Relative squared error of the output of its layer.
    error: f64,
}

/// Rows whose error stands for that of the matrix.
const SAMPLE_ROWS: usize = 16 * ROWS;

/// The formats that a matrix may get, ascending; at least one.
fn levels(file: &ModelFile, tensor: &TensorInfo, sensitivity: Option<f64>) -> Result<Vec<Level>, QuantizeError> {
    let level = |kind, error| Level { kind, bytes: bytes(tensor, kind), error };
    let exact = level(tensor.quant, 0.0);
    if is_fixed(tensor) {
        return Ok(vec![exact]);
    }
    let view = view(file, tensor);
    let step = (tensor.rows / SAMPLE_ROWS).max(1);
    let mut sample = Vec::new();
    for row in (0..tensor.rows).step_by(step) {
        sample.extend(finite(&view, row..row + 1)?);
    }
    let weight_error = |kind| squares(kind, &sample, &blocks(kind, &sample)).relative();
    let mut kinds = ladder(tensor);
    if tensor.quant == QuantType::F32 {
        kinds.push(sixteen(file, tensor)?);
    }
    let errors: Vec<f64> = kinds.iter().map(|kind| weight_error(*kind)).collect();
    // In proportion to the squared error of the weights.
    let first = errors.first().copied().unwrap_or(1.0).max(f64::MIN_POSITIVE);
    let scale = sensitivity.map_or(1.0, |sensitivity| sensitivity / first);
    let mut levels: Vec<Level> =
        kinds.into_iter().zip(errors).map(|(kind, error)| level(kind, scale * error)).collect();
    levels.push(exact);
    Ok(levels)
}

/// Bytes of all matrices within the target, beyond the fewest.
///
/// # Errors
/// The target is below the fewest bits.
pub(super) fn check_target(file: &ModelFile, target: f64) -> Result<f64, QuantizeError> {
    let (mut weights, mut least) = (0.0, 0.0);
    for tensor in file.tensors().iter().filter(|tensor| !is_vector(tensor)) {
        weights += tensor.rows as f64 * tensor.cols as f64;
        let sixteen = if tensor.quant == QuantType::F32 { QuantType::F16 } else { tensor.quant };
        let unchanged = if is_fixed(tensor) { tensor.quant } else { sixteen };
        least += bytes(tensor, fewest(tensor).unwrap_or(unchanged)) as f64;
    }
    let room = target * weights / 8.0 - least;
    // A byte of rounding.
    if room >= -1.0 {
        return Ok(room.max(0.0));
    }
    Err(QuantizeError::Target { least: 8.0 * least / weights.max(1.0), target })
}
