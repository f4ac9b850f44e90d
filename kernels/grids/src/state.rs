//! Whole-tile operations on the owned cells: save and restore, conservation sums, and the NaN check.
use parking_lot::Mutex;

use kernels::cpu::Isa;
use kernels::cpu::simd::{Kernel, Simd};
use kernels::threads::Threads;

use crate::any_tile::{Fields, read};
use crate::error::GridError;
use crate::frame::Format;
use crate::halo;
use crate::number::{Half, Number};
use crate::region::Region;
use crate::tile::Tile;

/// Totals are fixed-point sums in units of 2^-40, so that they do not depend on the order of addition.
const TOTAL_BITS: u32 = 40;

/// Converts to units of 2^-40.
fn units(number: f32) -> i128 {
    (f64::from(number) * (1u64 << TOTAL_BITS) as f64).round_ties_even() as i128
}

/// Sums in units of 2^-40. Numbers of magnitude below 2048 are rounded by adding a large constant (Dekker's trick) and
/// summed in 64 bits: same result, many times faster.
pub fn sum(numbers: &[f32]) -> i128 {
    sum_and_largest(numbers).0
}

/// The sum, and the largest bit pattern without the sign bit, as an integer: NaN and infinity compare above every
/// finite number.
#[inline(always)]
fn sum_and_largest(numbers: &[f32]) -> (i128, i32) {
    /// 2^52 + 2^51: adding it rounds to an integer, which the low bits of the result then hold.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let (mut total, mut largest) = (0i128, 0);
    // Loops, not closures: closures would not be compiled for the instruction set.
    for some in numbers.chunks(2048) {
        let mut top = 0;
        for number in some {
            top = top.max(number.to_bits() as i32 & i32::MAX);
        }
        largest = largest.max(top);
        if top < 2048f32.to_bits() as i32 {
            let mut sum = 0i64;
            for &number in some {
                let rounded = f64::from(number) * (1u64 << TOTAL_BITS) as f64 + ROUND;
                sum += rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i64;
            }
            total = total.wrapping_add(sum.into());
        } else {
            for &number in some {
                total = total.wrapping_add(units(number));
            }
        }
    }
    (total, largest)
}

/// [`sum_and_largest`] compiled for the detected instruction set.
struct Sum<'a>(&'a [f32]);

impl Kernel for Sum<'_> {
    type Output = (i128, i32);

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> (i128, i32) {
        sum_and_largest(self.0)
    }
}

impl Tile {
    /// Length in bytes of [`Self::save`] for a region.
    pub fn saved_len(&self, region: Region) -> usize {
        let [width, height, depth] = region.size();
        let row = match self.frame.format {
            Format::Float | Format::Half => self.frame.format.bytes() * width,
            Format::Bit => width.div_ceil(8),
        };
        row * height * depth * self.fields()
    }

    /// Serializes a region of owned cells, field by field, rows along x, in their memory format; rows of bits are
    /// padded to whole bytes. Halos are not included: exchange them after restoring, and the results are bit-identical.
    ///
    /// # Errors
    /// The tile does not own the region, or a step is half computed.
    pub fn save(&self, region: Region) -> Result<Vec<u8>, GridError> {
        self.whole()?;
        self.own(region)?;
        let mut bytes = Vec::with_capacity(self.saved_len(region));
        let span = self.frame.within(region);
        (0..self.fields()).for_each(|field| halo::read(&self.frame, &self.state, field, &span, &mut bytes));
        Ok(bytes)
    }

    /// Restores a region from the bytes of [`Self::save`] of any tile. After the last region call [`Self::resume`].
    ///
    /// # Errors
    /// The tile does not own the region, the length is wrong, or a step is half computed. The tile is then unchanged.
    pub fn restore(&mut self, region: Region, bytes: &[u8]) -> Result<(), GridError> {
        self.whole()?;
        self.own(region)?;
        let expected = self.saved_len(region);
        if bytes.len() != expected {
            return Err(GridError::SavedLength { expected, found: bytes.len() });
        }
        let span = self.frame.within(region);
        let fields = 0..self.fields();
        fields.fold(bytes, |rest, field| halo::write(&self.frame, &mut self.state, field, &span, rest));
        self.await_halo();
        Ok(())
    }

    /// The sum of a field over the owned cells, in units of 2^-40. The sum of all tiles' totals does not depend on the
    /// partition. NaN counts as 0; values out of range saturate.
    ///
    /// # Errors
    /// No such field, or a step is half computed.
    pub fn total(&self, field: usize) -> Result<i128, GridError> {
        let mut total = 0i128;
        self.each_row(field, &mut |_, row| {
            total = total.wrapping_add(sum(row));
            true
        })?;
        Ok(total)
    }

    /// Drag and lift: the momentum per step (density times cells per step, in units of 2^-40) that fluid cells owned by
    /// this tile transfer to adjacent solid cells of the mask, those that are `force_cells`; walls at the faces of the grid
    /// do not count. Pressure is relative to fluid at rest with density 1. The sum of all tiles' forces does not depend
    /// on the partition; [`Self::total_value`] converts it.
    ///
    /// # Errors
    /// The rule is no fluid, or a step is half computed.
    pub fn force(&self) -> Result<[i128; 3], GridError> {
        self.whole()?;
        let state = &self.state;
        let force = self.stepper.force(&mut |field, cells| {
            let add = |sum: i128, number| sum.wrapping_add(units(number));
            Ok(match self.frame.format {
                Format::Float => cells.iter().fold(0, |sum, &cell| add(sum, state.plane::<f32>(field)[cell])),
                Format::Half => cells.iter().fold(0, |sum, &cell| add(sum, state.plane::<Half>(field)[cell].value())),
                Format::Bit => 0,
            })
        })?;
        force.ok_or(GridError::NoForce)
    }

    /// The periodic field check on all threads: much faster than [`Self::total`] of each field and
    /// [`Self::first_not_finite`].
    ///
    /// # Errors
    /// A step is half computed.
    pub fn look(&self, threads: &mut Threads) -> Result<FieldCheck, GridError> {
        self.whole()?;
        let region = self.region();
        let [width, height, depth] = region.size();
        let grain = (CHECK_GRAIN / (width * self.fields())).max(1);
        let isa = Isa::detect();
        let all = Mutex::new((vec![0i128; self.fields()], true));
        threads.pool().run(height * depth, grain, &|_, rows| {
            let (mut totals, mut finite, mut cells) = (vec![0i128; self.fields()], true, Vec::new());
            for (field, total) in totals.iter_mut().enumerate() {
                for row in rows.clone() {
                    let at = [region.start[1] + row % height, region.start[2] + row / height];
                    if self.frame.format == Format::Bit {
                        *total += i128::from(self.living_of(at)) << TOTAL_BITS;
                        continue;
                    }
                    read(self, field, region, at, &mut cells);
                    // SAFETY: the instruction set was detected; the kernel has no other requirement.
                    let (sum, largest) = unsafe { isa.run(Sum(&cells)) };
                    *total = total.wrapping_add(sum);
                    finite &= largest < f32::INFINITY.to_bits() as i32;
                }
            }
            let mut all = all.lock();
            all.0.iter_mut().zip(&totals).for_each(|(all, total)| *all = all.wrapping_add(*total));
            all.1 &= finite;
        });
        let (totals, finite) = all.into_inner();
        let not_finite = if finite { None } else { self.first_not_finite()? };
        Ok(FieldCheck { totals, not_finite })
    }

    /// Number of live cells in an owned row of bits.
    fn living_of(&self, [y, z]: [usize; 2]) -> u64 {
        let first = self.frame.at(self.frame.local([self.region().start[0], y, z]));
        let width = self.region().size()[0];
        let words = &self.state.plane::<u64>(0)[first..first + width.div_ceil(64)];
        let beyond = (words.len() * 64 - width) as u32;
        let whole: u64 = words.iter().map(|word| u64::from(word.count_ones())).sum();
        // A row begins at a word boundary, and may end within a word.
        whole - words.last().map_or(0, |last| u64::from(last.checked_shr(64 - beyond).unwrap_or(0).count_ones()))
    }

    /// Converts a total from units of 2^-40.
    pub fn total_value(total: i128) -> f64 {
        total as f64 / (1u64 << TOTAL_BITS) as f64
    }

    /// The first owned cell, in z, y, x order, with a NaN or infinite field, and that field.
    ///
    /// # Errors
    /// A step is half computed.
    pub fn first_not_finite(&self) -> Result<Option<([usize; 3], usize)>, GridError> {
        first_not_finite(self.fields(), &mut |field, call| self.each_row(field, call))
    }

    /// Calls with the position and the cells of each row, until `call` returns false.
    fn each_row(&self, field: usize, call: &mut dyn FnMut([usize; 3], &[f32]) -> bool) -> Result<(), GridError> {
        let region = self.region();
        let mut more = true;
        self.rows(&[field], region, 1, &mut |[y, z], rows| {
            more = more && call([region.start[0], y, z], &rows[0]);
        })?;
        Ok(())
    }
}

/// The result of a field check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldCheck {
    /// The sum of each field, as [`Tile::total`] computes it.
    pub totals: Vec<i128>,
    /// The result of [`Tile::first_not_finite`].
    pub not_finite: Option<([usize; 3], usize)>,
}

/// Values per work item of a field check: tens of microseconds of work.
const CHECK_GRAIN: usize = 1 << 16;

/// Receives the position and the cells of a row, in order; returns false to stop.
pub type Row<'a> = dyn FnMut([usize; 3], &[f32]) -> bool + 'a;

/// The first cell, in z, y, x order, with a NaN or infinite field, and that field. `each_row` iterates over the rows of
/// a field.
///
/// # Errors
/// Those of `each_row`.
pub fn first_not_finite(
    fields: usize,
    each_row: &mut dyn FnMut(usize, &mut Row<'_>) -> Result<(), GridError>,
) -> Result<Option<([usize; 3], usize)>, GridError> {
    let order = |([x, y, z], field): ([usize; 3], usize)| [z, y, x, field];
    let mut first: Option<([usize; 3], usize)> = None;
    for field in 0..fields {
        each_row(field, &mut |[x, y, z], row| {
            let largest = row.iter().fold(0, |largest, cell| (cell.to_bits() as i32 & i32::MAX).max(largest));
            if largest < f32::INFINITY.to_bits() as i32 {
                return true;
            }
            let Some(there) = row.iter().position(|cell| !cell.is_finite()) else { return true };
            let found = ([x + there, y, z], field);
            first = Some(first.map_or(found, |first| if order(found) < order(first) { found } else { first }));
            // Later rows of this field are later in the order too.
            false
        })?;
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quick_sum_is_the_sum_of_units() {
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state
        };
        for case in 0..40 {
            let mut numbers: Vec<f32> = (0..5000)
                .map(|_| (next() as f32 / u32::MAX as f32 - 0.5) * [1e-13, 1e-7, 1.0, 4000.0][case % 4])
                .collect();
            numbers.extend([
                0.0,
                -0.0,
                0.5f32.powi(41),
                -(0.5f32.powi(41)),
                1.5 * 0.5f32.powi(40),
                2047.999,
                -2047.999,
            ]);
            if case % 8 == 7 {
                numbers.extend([f32::NAN, f32::INFINITY, -1e30]);
            }
            let slow = numbers.iter().fold(0i128, |sum, &number| sum.wrapping_add(units(number)));
            assert_eq!(sum(&numbers), slow, "case {case}");
        }
    }
}
