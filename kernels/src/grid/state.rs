//! A tile's own cells as a whole: saved and restored, summed, and looked through for what is no number.
use std::sync::{Mutex, PoisonError};

use super::any_tile::{Fields, read};
use super::frame::Format;
use super::halo;
use super::number::{Half, Number};
use super::tile::Tile;
use super::{GridError, Region};
use crate::cpu::Isa;
use crate::cpu::simd::{Kernel, Simd};
use crate::threads::Threads;

/// Totals are counted in units of 2^-40, so that no order of adding matters.
const TOTAL_BITS: u32 = 40;

/// A number in units of 2^-40.
fn units(number: f32) -> i128 {
    (f64::from(number) * (1u64 << TOTAL_BITS) as f64).round_ties_even() as i128
}

/// The sum of numbers in units of 2^-40. Those below 2048 in amount are rounded by what adding a number so large does
/// (Dekker's trick) and summed in 64 bits, which is the same and many times faster.
pub(crate) fn sum(numbers: &[f32]) -> i128 {
    sum_and_largest(numbers).0
}

/// The sum, and the largest of the numbers as integers without their signs: what is no number, or infinite, is above every
/// number.
#[inline(always)]
fn sum_and_largest(numbers: &[f32]) -> (i128, i32) {
    /// 2^52 + 2^51: a sum with it has no bits below 1, and its lowest bits are the other number's.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let (mut total, mut largest) = (0i128, 0);
    // Loops and no closures: those would not be compiled for the instruction set.
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

/// [`sum_and_largest`] with the widest registers there are.
struct Sum<'a>(&'a [f32]);

impl Kernel for Sum<'_> {
    type Output = (i128, i32);

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> (i128, i32) {
        sum_and_largest(self.0)
    }
}

impl Tile {
    /// Bytes of [`Self::save`] for a region.
    pub fn saved_len(&self, region: Region) -> usize {
        let [width, height, depth] = region.size();
        let row = match self.frame.format {
            Format::Float | Format::Half => self.frame.format.bytes() * width,
            Format::Bit => width.div_ceil(8),
        };
        row * height * depth * self.fields()
    }

    /// The state of a region of owned cells, field by field, rows along x, as in memory; bits begin a byte with each row.
    /// Halos are not in it: who restores exchanges them before the next step, and gets the same bits.
    ///
    /// # Errors
    /// The tile does not own the region, or a step is half made.
    pub fn save(&self, region: Region) -> Result<Vec<u8>, GridError> {
        self.whole()?;
        self.own(region)?;
        let mut bytes = Vec::with_capacity(self.saved_len(region));
        let span = self.frame.within(region);
        (0..self.fields()).for_each(|field| halo::read(&self.frame, &self.state, field, &span, &mut bytes));
        Ok(bytes)
    }

    /// Puts a region back as it was saved, by whatever tile. When all is back, [`Self::resume`] says at which step.
    ///
    /// # Errors
    /// The tile does not own the region, the bytes are of another length, or a step is half made. Nothing is changed then.
    pub fn restore(&mut self, region: Region, bytes: &[u8]) -> Result<(), GridError> {
        self.whole()?;
        self.own(region)?;
        let expected = self.saved_len(region);
        if bytes.len() != expected {
            return Err(GridError::Saved { expected, found: bytes.len() });
        }
        let span = self.frame.within(region);
        let fields = 0..self.fields();
        fields.fold(bytes, |rest, field| halo::write(&self.frame, &mut self.state, field, &span, rest));
        self.await_halo();
        Ok(())
    }

    /// The sum of a field over the owned cells, in units of 2^-40 of what the field is counted in: the same whatever the
    /// cuts, when the tiles' totals are added. What is no number, or too large for it, counts nothing.
    ///
    /// # Errors
    /// No such field, or a step is half made.
    pub fn total(&self, field: usize) -> Result<i128, GridError> {
        let mut total = 0i128;
        self.each_row(field, &mut |_, row| {
            total = total.wrapping_add(sum(row));
            true
        })?;
        Ok(total)
    }

    /// Drag and lift: the momentum that the fluid gives the solid cells of its mask (those that are `pushed`) in a step, seen
    /// from the fluid beside them that this tile owns, in units of 2^-40 (density times cells a step); faces of the grid are no mask. The pressure of the
    /// fluid at rest with density 1 counts nothing. The same whatever the cuts, when the tiles' forces are added;
    /// [`Self::total_value`] makes numbers of them.
    ///
    /// # Errors
    /// The rule is no fluid, or a step is half made.
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

    /// What is asked now and then, all at once, by all threads: much quicker than [`Self::total`] of each field and
    /// [`Self::first_not_finite`].
    ///
    /// # Errors
    /// A step is half made.
    pub fn look(&self, threads: &mut Threads) -> Result<Look, GridError> {
        self.whole()?;
        let region = self.region();
        let [width, height, depth] = region.size();
        let grain = (LOOKED_AT / (width * self.fields())).max(1);
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
                    // SAFETY: the instruction set was detected, and nothing else is asked for.
                    let (sum, largest) = unsafe { isa.run(Sum(&cells)) };
                    *total = total.wrapping_add(sum);
                    finite &= largest < f32::INFINITY.to_bits() as i32;
                }
            }
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            all.0.iter_mut().zip(&totals).for_each(|(all, total)| *all = all.wrapping_add(*total));
            all.1 &= finite;
        });
        let (totals, finite) = all.into_inner().unwrap_or_else(PoisonError::into_inner);
        let not_finite = if finite { None } else { self.first_not_finite()? };
        Ok(Look { totals, not_finite })
    }

    /// How many cells of an owned row live, each one bit.
    fn living_of(&self, [y, z]: [usize; 2]) -> u64 {
        let first = self.frame.at(self.frame.local([self.region().start[0], y, z]));
        let width = self.region().size()[0];
        let words = &self.state.plane::<u64>(0)[first..first + width.div_ceil(64)];
        let beyond = (words.len() * 64 - width) as u32;
        let whole: u64 = words.iter().map(|word| u64::from(word.count_ones())).sum();
        // A row begins a word, and may end within one.
        whole - words.last().map_or(0, |last| u64::from(last.checked_shr(64 - beyond).unwrap_or(0).count_ones()))
    }

    /// A total as a number.
    pub fn total_value(total: i128) -> f64 {
        total as f64 / (1u64 << TOTAL_BITS) as f64
    }

    /// The first owned cell, in the order of z, y, x, one of whose fields is infinite or no number, and that field.
    ///
    /// # Errors
    /// A step is half made.
    pub fn first_not_finite(&self) -> Result<Option<([usize; 3], usize)>, GridError> {
        first_not_finite(self.fields(), &mut |field, call| self.each_row(field, call))
    }

    /// Calls with where a row begins and its cells, until that says no.
    fn each_row(&self, field: usize, call: &mut dyn FnMut([usize; 3], &[f32]) -> bool) -> Result<(), GridError> {
        let region = self.region();
        let mut more = true;
        self.rows(&[field], region, 1, &mut |[y, z], rows| {
            more = more && call([region.start[0], y, z], &rows[0]);
        })?;
        Ok(())
    }
}

/// What is asked of a tile now and then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// The sum of each field, as [`Tile::total`] counts it.
    pub totals: Vec<i128>,
    /// What [`Tile::first_not_finite`] finds.
    pub not_finite: Option<([usize; 3], usize)>,
}

/// Numbers that a thread looks at together: tens of microseconds of work.
const LOOKED_AT: usize = 1 << 16;

/// Called with where a row begins and its cells, in order; says whether more are wanted.
pub(crate) type Row<'a> = dyn FnMut([usize; 3], &[f32]) -> bool + 'a;

/// The first cell, in the order of z, y, x, one of whose fields is infinite or no number, and that field. `each_row` goes
/// through the rows of a field.
pub(crate) fn first_not_finite(
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
            // Later rows of this field come later anyway.
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
