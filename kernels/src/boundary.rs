//! Encodings of hidden rows that pass from one stage of a model to the next: how few bytes a row takes on the way.
//!
//! Each row is encoded alone, by f32 additions, multiplications and comparisons in a fixed order. So the bytes of a row are a
//! function of its bits, and the same however rows are grouped, resent or computed again; and what one machine encodes, any
//! other decodes to the same bits. All numbers are little-endian.
//!
//! A row with a non-finite element decodes to a row of NaN: it reaches the logits, and the sampler rejects them, as without
//! encoding. Next: `boundary/trellis.rs`.
use std::sync::OnceLock;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use thiserror::Error;

use crate::cpu::Isa;
use crate::cpu::simd::{Kernel, Simd};
use crate::order::{BLOCK, QUANTISE_MIN, reciprocal};
use crate::threads::Threads;

mod trellis;

pub use trellis::{LEVELS, ROTATED, SIXTEENTHS, STATES, TRIED, ZEROS, level, sigma};

/// Largest width: outliers are named by 16 bits.
pub const WIDTH_MAX: usize = 1 << 16;

/// An encoding of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// f32, four bytes per element.
    Lossless,
    /// An exponent `e` (i16), then each element times 2^-e as f16. The largest magnitude is then in [2^14, 2^15), so that
    /// neither large nor small rows leave the range of f16; elements below 2^-28 of it lose bits. `e` = -32768: NaN.
    F16,
    /// [`EXACT`] outliers (fewer in rows narrower than 64 elements each): the elements of the largest magnitude, of equal ones
    /// the first, each as its index (u16) and its value (f32), by ascending index. Then per 32 elements, the last block padded
    /// with zeros, a scale (bf16) and 32 codes (i8): an element is code · scale, outliers aside, whose codes are 0. The scale is
    /// the largest magnitude of the block without outliers / 127, rounded up to a bf16, NaN in a row of NaN.
    Q8,
    /// Four bits per element, and six outliers at a width of 576: see `boundary/trellis.rs`.
    Q4,
}

/// Most outliers of a row in [`Codec::Q8`].
const EXACT: usize = 4;
/// Bytes of one of them.
const EXACT_BYTES: usize = 6;
/// Exponent of a row of NaN.
pub const NAN_ROW: i16 = i16::MIN;
/// Exponents of finite rows are within these: those of f32, subnormals included, less 15 at most.
const EXPONENTS: core::ops::RangeInclusive<i16> = -164..=128;

impl Codec {
    /// All of them, the most precise first.
    pub const ALL: [Codec; 4] = [Codec::Lossless, Codec::F16, Codec::Q8, Codec::Q4];

    /// Its name in options, files and answers.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Codec::Lossless => "lossless",
            Codec::F16 => "f16",
            Codec::Q8 => "q8",
            Codec::Q4 => "q4",
        }
    }

    /// The codec of a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.name() == name)
    }

    /// Bytes of an encoded row; `None` for a width that is 0 or above [`WIDTH_MAX`].
    #[must_use]
    pub fn row_bytes(self, width: usize) -> Option<usize> {
        (1..=WIDTH_MAX).contains(&width).then(|| match self {
            Codec::Lossless => 4 * width,
            Codec::F16 => 2 + 2 * width,
            Codec::Q8 => EXACT_BYTES * exact(width) + (2 + BLOCK) * width.div_ceil(BLOCK),
            Codec::Q4 => trellis::row_bytes(width),
        })
    }

    /// Elements of a row that are kept apart from the others.
    #[must_use]
    pub fn outliers(self, width: usize) -> usize {
        match self {
            Codec::Lossless | Codec::F16 => 0,
            Codec::Q8 => exact(width),
            Codec::Q4 => trellis::kept(width),
        }
    }

    /// Encodes whole rows of a width from 1 to [`WIDTH_MAX`].
    ///
    /// # Panics
    /// If the width is not, or the rows are not whole.
    #[must_use]
    pub fn encode(self, width: usize, rows: &[f32]) -> Vec<u8> {
        let bytes = self.row_bytes(width).expect("a width that stages have");
        assert!(rows.len().is_multiple_of(width), "{} elements are no whole rows of {width}", rows.len());
        let mut out = Vec::with_capacity(rows.len() / width * bytes);
        // SAFETY: the instruction set was detected.
        unsafe { Isa::detect().run(Encode { codec: self, width, rows, out: &mut out }) };
        out
    }

    /// [`Self::encode`] on all threads: in four bits, a row of 4,096 elements takes a tenth of a millisecond.
    ///
    /// # Panics
    /// As [`Self::encode`].
    #[must_use]
    pub fn encode_on(self, threads: &mut Threads, width: usize, rows: &[f32]) -> Vec<u8> {
        /// Rows that a thread encodes at a time.
        const EACH: usize = 4;
        let count = rows.len().checked_div(width).unwrap_or(0);
        if count <= EACH {
            return self.encode(width, rows);
        }
        let pieces: Vec<OnceLock<Vec<u8>>> = (0..count.div_ceil(EACH)).map(|_| OnceLock::new()).collect();
        let piece = |at: usize| self.encode(width, &rows[at * EACH * width..((at + 1) * EACH).min(count) * width]);
        threads.pool().run(pieces.len(), 1, &|_, range| {
            for at in range {
                pieces[at].get_or_init(|| piece(at));
            }
        });
        let encoded = pieces.into_iter().enumerate();
        encoded.flat_map(|(at, encoded)| encoded.into_inner().unwrap_or_else(|| piece(at))).collect()
    }

    /// Decodes whole rows. Never reads or allocates more than the rows of these bytes.
    ///
    /// # Errors
    /// Bytes that [`Self::encode`] never writes for this width. (Not all of them: some are rows of other numbers.)
    pub fn decode(self, width: usize, bytes: &[u8]) -> Result<Vec<f32>, BoundaryError> {
        let row_bytes = self.row_bytes(width).ok_or(BoundaryError::Width { width })?;
        if !bytes.len().is_multiple_of(row_bytes) {
            return Err(BoundaryError::Length { codec: self.name(), width, row_bytes, found: bytes.len() });
        }
        let mut out = vec![0.0; bytes.len() / row_bytes * width];
        // SAFETY: the instruction set was detected.
        unsafe { Isa::detect().run(Decode { codec: self, width, row_bytes, bytes, rows: &mut out }) }?;
        Ok(out)
    }
}

/// Encodes rows with the vectors that the machine has: the same operations, and so the same bytes, whatever they are.
struct Encode<'a> {
    codec: Codec,
    width: usize,
    rows: &'a [f32],
    out: &'a mut Vec<u8>,
}

impl Kernel for Encode<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for row in self.rows.chunks_exact(self.width) {
            match self.codec {
                Codec::Lossless => row.iter().for_each(|x| self.out.extend(x.to_le_bytes())),
                Codec::F16 => encode_f16(row, self.out),
                Codec::Q8 => encode_q8(row, self.out),
                Codec::Q4 => trellis::encode(row, self.out),
            }
        }
    }
}

/// Decodes rows, likewise.
struct Decode<'a> {
    codec: Codec,
    width: usize,
    row_bytes: usize,
    bytes: &'a [u8],
    rows: &'a mut [f32],
}

impl Kernel for Decode<'_> {
    type Output = Result<(), BoundaryError>;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Result<(), BoundaryError> {
        for (row, bytes) in self.rows.chunks_exact_mut(self.width).zip(self.bytes.chunks_exact(self.row_bytes)) {
            match self.codec {
                Codec::Lossless => {
                    row.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
                }
                Codec::F16 => decode_f16(bytes, row)?,
                Codec::Q8 => decode_q8(bytes, row)?,
                Codec::Q4 => trellis::decode(bytes, row)?,
            }
        }
        Ok(())
    }
}

/// Why bytes are no encoded rows.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BoundaryError {
    /// A width that no encoding has.
    #[error("rows of {width} elements, expected 1 to {WIDTH_MAX}: the sender serves another model")]
    Width {
        /// Elements per row.
        width: usize,
    },
    /// Not whole rows.
    #[error(
        "{found} bytes, expected a multiple of {row_bytes} for {codec} rows of {width} elements: the sender is faulty"
    )]
    Length {
        /// The codec.
        codec: &'static str,
        /// Elements per row.
        width: usize,
        /// Bytes per row.
        row_bytes: usize,
        /// Bytes found.
        found: usize,
    },
    /// Outliers beyond the row, or not in order.
    #[error("an outlier at element {found}, expected {least} to {most}: the sender is faulty")]
    Outlier {
        /// Element found.
        found: usize,
        /// Least element possible there.
        least: usize,
        /// Last element of the row.
        most: usize,
    },
    /// An exponent that no finite row has.
    #[error(
        "a row with exponent {found}, expected {least} to {most}: the sender is faulty",
        least = EXPONENTS.start(),
        most = EXPONENTS.end()
    )]
    Exponent {
        /// Exponent found.
        found: i16,
    },
}

/// Number of outliers of a row in [`Codec::Q8`].
fn exact(width: usize) -> usize {
    EXACT.min(width / 64)
}

/// The `count` elements of the largest magnitude, of equal ones the first, by ascending index. All elements are finite.
#[inline(always)]
fn outliers(row: &[f32], count: usize) -> Vec<usize> {
    /// Elements whose largest is found with few comparisons.
    const PIECE: usize = 16;
    let pieces: Vec<f32> = row.chunks(PIECE).map(largest).collect();
    let mut greatest = pieces.clone();
    // Each of `count` pieces has an element of at least this, so no smaller one is an outlier.
    let least = match count.checked_sub(1) {
        None => return Vec::new(),
        Some(at) if at < greatest.len() => *greatest.select_nth_unstable_by(at, |a, b| b.total_cmp(a)).1,
        Some(_) => 0.0,
    };
    let mut indices = Vec::with_capacity(2 * count);
    for (number, piece) in row.chunks(PIECE).enumerate().filter(|(number, _)| pieces[*number] >= least) {
        indices.extend((0..piece.len()).filter(|at| piece[*at].abs() >= least).map(|at| number * PIECE + at));
    }
    if count < indices.len() {
        let rank = |at: &usize| (core::cmp::Reverse(row[*at].abs().to_bits()), *at);
        indices.select_nth_unstable_by_key(count, rank);
        indices.truncate(count);
    }
    indices.sort_unstable();
    indices
}

/// Checks the index of the next outlier, given the one before.
fn outlier(found: u16, before: Option<usize>, width: usize) -> Result<usize, BoundaryError> {
    let (found, least) = (usize::from(found), before.map_or(0, |before| before + 1));
    if (least..width).contains(&found) {
        Ok(found)
    } else {
        Err(BoundaryError::Outlier { found, least, most: width - 1 })
    }
}

/// `x` · 2^`power`, exact unless the result is subnormal or overflows.
#[inline(always)]
fn scaled(x: f32, power: i32) -> f32 {
    let two = |power: i32| f32::from_bits(((127 + power.clamp(-126, 127)) as u32) << 23);
    let half = power / 2;
    x * two(half) * two(power - half)
}

/// The least `e` for which 2^e is greater than `x`, which is finite and not negative; 0 for 0.
fn exponent(x: f32) -> i32 {
    let bits = x.to_bits();
    match (bits >> 23, bits & 0x7f_ffff) {
        (0, 0) => 0,
        (0, fraction) => fraction.ilog2() as i32 - 148,
        (biased, _) => biased as i32 - 126,
    }
}

/// The largest magnitude of finite elements; not finite if one of them is not.
#[inline(always)]
fn largest(row: &[f32]) -> f32 {
    // The bits are in the order of the magnitudes, and a comparison of integers needs no care for NaN.
    f32::from_bits(row.iter().fold(0, |largest, x| largest.max(x.abs().to_bits())))
}

#[inline(always)]
fn is_finite(row: &[f32]) -> bool {
    largest(row).is_finite()
}

/// The exponent of an encoded row; `None` if it is a row of NaN.
fn read_exponent(found: i16) -> Result<Option<i32>, BoundaryError> {
    match found {
        NAN_ROW => Ok(None),
        found if EXPONENTS.contains(&found) => Ok(Some(found.into())),
        found => Err(BoundaryError::Exponent { found }),
    }
}

/// Elements that are converted to or from f16 together.
const CONVERTED: usize = 64;

#[inline(always)]
fn encode_f16(row: &[f32], out: &mut Vec<u8>) {
    if !is_finite(row) {
        out.extend(NAN_ROW.to_le_bytes());
        out.resize(out.len() + 2 * row.len(), 0);
        return;
    }
    let power = exponent(largest(row)) - 15;
    out.extend((power as i16).to_le_bytes());
    for piece in row.chunks(CONVERTED) {
        let (mut numbers, mut halves) = ([0.0; CONVERTED], [f16::ZERO; CONVERTED]);
        numbers.iter_mut().zip(piece).for_each(|(number, x)| *number = scaled(*x, -power));
        halves.convert_from_f32_slice(&numbers);
        out.extend_from_slice(halves.map(f16::to_le_bytes)[..piece.len()].as_flattened());
    }
}

#[inline(always)]
fn decode_f16(bytes: &[u8], row: &mut [f32]) -> Result<(), BoundaryError> {
    let words = bytes.as_chunks::<2>().0;
    let Some(power) = read_exponent(i16::from_le_bytes(words[0]))? else {
        row.fill(f32::NAN);
        return Ok(());
    };
    for (piece, words) in row.chunks_mut(CONVERTED).zip(words[1..].chunks(CONVERTED)) {
        let mut halves = [f16::ZERO; CONVERTED];
        halves.iter_mut().zip(words).for_each(|(half, word)| *half = f16::from_le_bytes(*word));
        halves[..piece.len()].convert_to_f32_slice(piece);
        piece.iter_mut().for_each(|x| *x = scaled(*x, power));
    }
    Ok(())
}

#[inline(always)]
fn encode_q8(row: &[f32], out: &mut Vec<u8>) {
    let finite = is_finite(row);
    let indices = if finite { outliers(row, exact(row.len())) } else { (0..exact(row.len())).collect() };
    let mut rest = vec![[0.0; BLOCK]; row.len().div_ceil(BLOCK)];
    if finite {
        rest.as_flattened_mut()[..row.len()].copy_from_slice(row);
    }
    for at in indices {
        let value = &mut rest.as_flattened_mut()[at];
        out.extend((at as u16).to_le_bytes());
        out.extend(value.to_le_bytes());
        *value = 0.0;
    }
    for block in &rest {
        let largest = largest(block);
        let scale = if largest > QUANTISE_MIN { rounded_up(largest * (1.0 / 127.0)) } else { bf16::ZERO };
        out.extend(if finite { scale } else { bf16::NAN }.to_le_bytes());
        let inverse = if scale == bf16::ZERO { 0.0 } else { reciprocal(scale.to_f32()) };
        out.extend(block.map(|x| rounded((x * inverse).clamp(-127.0, 127.0))));
    }
}

/// The integer nearest to `x`, which is within ±2^22, the even one of two; its lowest eight bits.
#[inline(always)]
fn rounded(x: f32) -> u8 {
    // From 2^23 on, f32 has integers only, and their lowest bits are those of the number.
    (x + 12_582_912.0).to_bits() as u8
}

#[inline(always)]
fn decode_q8(bytes: &[u8], row: &mut [f32]) -> Result<(), BoundaryError> {
    let (exact, blocks) = bytes.split_at(EXACT_BYTES * exact(row.len()));
    for (block, bytes) in row.chunks_mut(BLOCK).zip(blocks.chunks_exact(2 + BLOCK)) {
        let scale = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        block.iter_mut().zip(&bytes[2..]).for_each(|(x, code)| *x = f32::from(*code as i8) * scale);
    }
    let mut before = None;
    for [low, high, value @ ..] in exact.as_chunks::<EXACT_BYTES>().0 {
        let at = outlier(u16::from_le_bytes([*low, *high]), before, row.len())?;
        // In a row of NaN the outliers are NaN as all others.
        row[at] = if row[at].is_nan() { f32::NAN } else { f32::from_le_bytes(*value) };
        before = Some(at);
    }
    Ok(())
}

/// The least bf16 that is not below `x`, which is positive and far from infinity.
fn rounded_up(x: f32) -> bf16 {
    let bits = x.to_bits();
    bf16::from_bits((bits >> 16) as u16 + u16::from(bits & 0xffff != 0))
}

#[cfg(test)]
mod tests;
