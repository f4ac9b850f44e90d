//! Cosines and sines of the rotary embedding (RoPE), bit-identical on every machine because libm is not used.
use std::ops::Range;

use crate::recipe::Recipe;
use crate::stage::StageError;
use crate::weights::{ModelFile, Rope, RotaryFrequencies, Temperature};

/// The tables of a stage's layers, one per distinct rotary embedding and factor of queries.
#[derive(Debug)]
pub struct RotaryTables {
    tables: Vec<RotaryTable>,
    /// Table of each layer of the stage.
    layers: Vec<usize>,
}

impl RotaryTables {
    /// Builds the tables that a range of layers needs for a context.
    ///
    /// # Errors
    /// Invalid frequencies in the file.
    pub fn load(file: &ModelFile, recipe: &Recipe, layers: Range<usize>, context: usize) -> Result<Self, StageError> {
        let mut known: Vec<(&Rope, QueryFactor)> = Vec::new();
        let mut tables = Self { tables: Vec::new(), layers: Vec::new() };
        for layer in &recipe.layers[layers] {
            let queries = QueryFactor { scale: layer.scale, temperature: layer.temperature };
            let table = known.iter().position(|table| *table == (&layer.rope, queries));
            if table.is_none() {
                known.push((&layer.rope, queries));
                tables.tables.push(RotaryTable::of(file, &layer.rope, queries, context)?);
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

/// What queries are multiplied by after the rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
struct QueryFactor {
    scale: f32,
    temperature: Option<Temperature>,
}

impl QueryFactor {
    fn at(self, position: usize) -> f32 {
        let Some(Temperature { scale, every, offset }) = self.temperature else { return self.scale };
        self.scale * (1.0 + scale * ln(1 + (position + offset) / every)) as f32
    }
}

/// Cosines and sines of all positions up to the highest one needed so far, and the factors of their queries.
#[derive(Debug)]
pub struct RotaryTable {
    frequencies: RotaryFrequencies,
    queries: QueryFactor,
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
    fn of(file: &ModelFile, rope: &Rope, queries: QueryFactor, context: usize) -> Result<Self, StageError> {
        let frequencies = file.rotary_frequencies(rope, context);
        let frequencies = frequencies.map_err(|e| StageError::Input(format!("the weights cannot be used: {e}")))?;
        Ok(Self { frequencies, queries, cos: Vec::new(), sin: Vec::new() })
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

    /// Factor of the queries of a position, after the rotation.
    #[must_use]
    pub fn query_factor(&self, position: usize) -> f32 {
        self.queries.at(position)
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

/// Natural logarithm of a number from 1 to 2^32, within 1e-15, by additions, multiplications and divisions in a fixed order: 2^e · m
/// with m near 1, and 2 artanh((m - 1) / (m + 1)) for ln m.
fn ln(n: usize) -> f64 {
    const TERMS: u32 = 12; // with (m - 1) / (m + 1) of at most 0.172, the next one is below 1e-20
    let mut exponent = n.max(1).ilog2();
    let mut m = n.max(1) as f64 / (1u64 << exponent) as f64;
    if m > std::f64::consts::SQRT_2 {
        (m, exponent) = (m / 2.0, exponent + 1);
    }
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let series = (0..TERMS).rev().fold(0.0, |sum, k| sum * z + 1.0 / f64::from(2 * k + 1));
    f64::from(exponent) * std::f64::consts::LN_2 + 2.0 * s * series
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

    #[test]
    fn logarithms_agree_with_libm() {
        for n in (1..5000).chain((5000..1 << 24).step_by(4999)) {
            let exact = (n as f64).ln();
            assert!((ln(n) - exact).abs() <= 2e-15 * exact.max(0.5), "{n}: {} {exact}", ln(n));
        }
    }

    #[test]
    fn a_temperature_grows_with_the_position() {
        let temperature = Some(Temperature { scale: 0.1, every: 8192, offset: 1 });
        let queries = QueryFactor { scale: 0.125, temperature };
        for (position, floor) in [(0, 0), (8190, 0), (8191, 1), (16_382, 1), (16_383, 2), (1 << 20, 128)] {
            let exact = 0.125 * (1.0 + 0.1 * f64::from(floor + 1).ln());
            assert!((f64::from(queries.at(position)) - exact).abs() < 1e-8, "{position}");
        }
        assert_eq!(QueryFactor { temperature: None, ..queries }.at(1 << 20), 0.125);
    }
}
