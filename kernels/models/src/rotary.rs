//! Cosines and sines of the rotary embedding (RoPE), bit-identical on every machine because libm is not used.
use std::ops::Range;

use crate::recipe::Recipe;
use crate::stage::StageError;
use crate::weights::{ModelFile, Rope, RotaryFrequencies};

/// The tables of a stage's layers, one per distinct rotary embedding.
#[derive(Debug)]
pub struct RotaryTables {
    tables: Vec<RotaryTable>,
    /// Table of each layer of the stage.
    layers: Vec<usize>,
}

impl RotaryTables {
    /// Builds the tables that a range of layers needs.
    ///
    /// # Errors
    /// Invalid frequencies in the file.
    pub fn load(file: &ModelFile, recipe: &Recipe, layers: Range<usize>) -> Result<Self, StageError> {
        let mut known: Vec<&Rope> = Vec::new();
        let mut tables = Self { tables: Vec::new(), layers: Vec::new() };
        for layer in &recipe.layers[layers] {
            let table = known.iter().position(|rope| **rope == layer.rope);
            if table.is_none() {
                known.push(&layer.rope);
                tables.tables.push(RotaryTable::of(file, &layer.rope)?);
            }
            tables.layers.push(table.unwrap_or(known.len() - 1));
        }
        Ok(tables)
    }

    /// Extends all tables to cover the positions below `positions`.
    pub fn grow(&mut self, positions: usize) {
        self.tables.iter_mut().for_each(|table| table.grow(positions));
    }

    /// The distinct tables.
    pub fn tables(&self) -> &[RotaryTable] {
        &self.tables
    }

    /// Index into [`Self::tables`] for the stage's `layer`-th layer.
    #[must_use]
    pub fn table_of(&self, layer: usize) -> usize {
        self.layers[layer]
    }

    /// Bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.tables.iter().map(RotaryTable::bytes).sum()
    }
}

/// Cosines and sines of all positions up to the highest one needed so far.
#[derive(Debug)]
pub struct RotaryTable {
    frequencies: RotaryFrequencies,
    /// `[positions, pairs]`
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Positions are added in multiples of this, so that memory follows use.
const STEP: usize = 64;

impl RotaryTable {
    /// Builds the table of one rotary embedding.
    ///
    /// # Errors
    /// Invalid frequencies in the file.
    fn of(file: &ModelFile, rope: &Rope) -> Result<Self, StageError> {
        let frequencies = file.rotary_frequencies(rope);
        frequencies.map(Self::new).map_err(|e| StageError::Input(format!("the weights cannot be used: {e}")))
    }

    fn new(frequencies: RotaryFrequencies) -> Self {
        Self { frequencies, cos: Vec::new(), sin: Vec::new() }
    }

    /// Extends the table to cover the positions below `positions`.
    fn grow(&mut self, positions: usize) {
        let pairs = self.frequencies.inverse.len();
        let known = self.cos.len() / pairs.max(1);
        if positions <= known {
            return;
        }
        for position in known..positions.next_multiple_of(STEP) {
            for inverse in &self.frequencies.inverse {
                let (sin, cos) = sin_cos(position as f64 * inverse);
                self.cos.push(cos as f32 * self.frequencies.magnitude);
                self.sin.push(sin as f32 * self.frequencies.magnitude);
            }
        }
    }

    /// Cosines and sines of a position that the table covers.
    #[must_use]
    pub fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let pairs = self.frequencies.inverse.len();
        (&self.cos[position * pairs..][..pairs], &self.sin[position * pairs..][..pairs])
    }

    /// Rotary pairs per head.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.frequencies.inverse.len()
    }

    fn bytes(&self) -> usize {
        (self.cos.capacity() + self.sin.capacity()) * size_of::<f32>()
    }
}

/// Sine and cosine of an angle of at most a few million, within 1e-15: Cody-Waite reduction and the polynomials of fdlibm,
/// in a fixed order of additions and multiplications.
fn sin_cos(angle: f64) -> (f64, f64) {
    const HALF_PI: f64 = 1.570_796_326_734_125_6; // its first 33 bits: products with a quadrant number are exact
    const HALF_PI_REST: f64 = 6.077_100_506_506_192e-11;
    let quadrant = (angle * std::f64::consts::FRAC_2_PI).round_ties_even();
    let r = (angle - quadrant * HALF_PI) - quadrant * HALF_PI_REST;
    let z = r * r;
    let polynomial = |coefficients: &[f64]| coefficients.iter().rev().fold(0.0, |sum, c| sum * z + c);
    let sin = r + r * z * polynomial(&SIN);
    let cos = 1.0 - 0.5 * z + z * z * polynomial(&COS);
    match (quadrant as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

const SIN: [f64; 6] = [
    -1.666_666_666_666_663_2e-1,
    8.333_333_333_322_49e-3,
    -1.984_126_982_985_795e-4,
    2.755_731_370_707_007e-6,
    -2.505_076_025_340_686e-8,
    1.589_690_995_211_55e-10,
];
const COS: [f64; 6] = [
    4.166_666_666_666_66e-2,
    -1.388_888_888_887_411e-3,
    2.480_158_728_947_673e-5,
    -2.755_731_435_139_066_3e-7,
    2.087_572_321_298_175e-9,
    -1.135_964_755_778_819_5e-11,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_libm() {
        for i in 0..200_000 {
            let angle = f64::from(i) * 0.737 + f64::from(i % 17) * 1e-3;
            let (sin, cos) = sin_cos(angle);
            assert!((sin - angle.sin()).abs() < 1e-14 && (cos - angle.cos()).abs() < 1e-14, "{angle}: {sin} {cos}");
        }
    }
}
