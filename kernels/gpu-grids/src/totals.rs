//! Exact field sums on the device, in fixed point: units of 2^-40, the same as on the CPU.
//!
//! A thread adds its share of the cells as 64-bit integers, split into four 16-bit limbs so that 32-bit sums do not
//! overflow, and counts the negative ones, which two's complement makes 2^64 too high. Then it combines the limbs and
//! adds the result to the common sum.
use cubecl::prelude::*;
use kernels_grids::GridError;
use kernels_grids::frame::Format;
use kernels_grids::state::sum as sum_of;

use crate::GpuTile;
use crate::memory::{Buffer, check, element, number, over};
use crate::place::Place;
use crate::sums::{Sums, Wide, leave};

/// Maximum elements per thread: limbs overflow with more.
const EACH_MAX: usize = 1 << 16;
/// Elements per fetch.
const FETCHED_MAX: usize = 1 << 20;
/// Exponents from this one on (values of at least 2^23) do not fit.
const LARGE: u32 = 150;
/// Exponent of a float whose mantissa counts units of 2^-40.
const UNIT: u32 = 110;

impl<R: Runtime> GpuTile<R> {
    /// The sums of all fields over the owned cells; `None` if a value is too large for the device to count.
    pub(super) fn totals_on_device(&self) -> Result<Vec<Option<i128>>, GridError> {
        let span = self.frame.span(0);
        let elements = span.len(0).div_ceil(self.memory.cells) * span.len(1) * span.len(2);
        let sums = Sums::new(&self.client, self.fields, elements, EACH_MAX);
        let (cubes, dim) = sums.launch();
        let wide = self.address();
        let place = self.memory.place(&span);
        let nothing = Buffer::from_elements(&self.client, &[0; 4])?;
        // SAFETY: the span is in memory, and the mask has a bit per cell.
        unsafe {
            match self.frame.format {
                Format::Float | Format::Half => add_numbers::launch_unchecked::<R>(
                    &self.client,
                    cubes,
                    dim,
                    wide,
                    self.state.arg(),
                    self.hidden.as_ref().unwrap_or(&nothing).arg(),
                    sums.arg(),
                    place,
                    elements,
                    sums.units,
                    2 * span.len(0).div_ceil(64),
                    self.hidden.is_some(),
                    self.frame.format == Format::Half,
                ),
                Format::Bit => {
                    let valid = (self.frame.size[0] as u32 - 1) % 32 + 1;
                    let mask = u32::MAX >> (32 - valid);
                    let (from, to) = (self.state.arg(), sums.arg());
                    add_bits::launch_unchecked::<R>(
                        &self.client,
                        cubes,
                        dim,
                        wide,
                        from,
                        to,
                        place,
                        mask,
                        elements,
                        sums.units,
                    );
                }
            }
        }
        let sums = sums.read(&self.client)?;
        Ok(sums.into_iter().map(|sum| sum.map(|sum| sum as i128)).collect())
    }

    /// Drag and lift, as [`kernels_grids::tile::Tile::force`].
    ///
    /// # Errors
    /// The rule is no fluid, a step is half computed, or the device failed.
    pub fn force(&self) -> Result<[i128; 3], GridError> {
        self.whole()?;
        self.stepper.force(&mut |field, cells| self.sum_of(field, cells))?.ok_or(GridError::NoForce)
    }

    /// The sum of a field over some elements, added on the host: they are few, and the sum is rarely requested.
    fn sum_of(&self, field: usize, cells: &[usize]) -> Result<i128, GridError> {
        let mut sum = 0i128;
        for some in cells.chunks(FETCHED_MAX) {
            let places: Vec<u32> = some.iter().map(|&cell| cell as u32).collect();
            let list = Buffer::from_elements(&self.client, &places)?;
            let found = Buffer { handle: self.client.empty(4 * some.len()), len: some.len() };
            let (cubes, dim) = over(some.len());
            // SAFETY: the elements are in the field's plane; threads past the last one do nothing.
            unsafe {
                fetch::launch_unchecked::<R>(
                    &self.client,
                    cubes,
                    dim,
                    self.address(),
                    self.state.arg(),
                    list.arg(),
                    found.arg(),
                    field * self.memory.plane,
                    some.len(),
                    self.frame.format == Format::Half,
                );
            }
            check(&self.client)?;
            let bytes = found.read(&self.client, 0..some.len())?;
            sum = sum.wrapping_add(sum_of(&bytemuck::pod_collect_to_vec::<u8, f32>(&bytes)));
        }
        Ok(sum)
    }

    /// Bit mask of the owned cells that the rule hides, 32 per word, rows of whole words; `None` if it hides none.
    pub(super) fn hidden_bits(&self) -> Result<Option<Buffer>, GridError> {
        let [width, height, depth] = self.frame.size.map(|size| size as usize);
        if self.frame.format == Format::Bit {
            return Ok(None);
        }
        let mut words = Vec::new();
        for z in 0..depth as isize {
            for y in 0..height as isize {
                for x in (0..width as isize).step_by(64) {
                    let at = self.frame.global([x, y, z]).expect("owned cells are in the grid");
                    let hidden = self.stepper.hidden(at);
                    words.extend([hidden as u32, (hidden >> 32) as u32]);
                }
            }
        }
        if words.iter().all(|word| *word == 0) {
            return Ok(None);
        }
        Buffer::from_elements(&self.client, &words).map(Some)
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn fetch(
    cells: &Array<u32>,
    list: &Array<u32>,
    found: &mut Array<u32>,
    start: usize,
    count: usize,
    #[comptime] half: bool,
) {
    let i = element();
    if i < count {
        found[i] = number(cells, start + list[i] as usize, half);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_numbers(
    cells: &Array<u32>,
    hidden: &Array<u32>,
    sums: &mut Array<u32>,
    place: &Place,
    elements: usize,
    units: usize,
    mask_row: usize,
    #[comptime] masked: bool,
    #[comptime] half: bool,
) {
    let start = CUBE_POS_Y as usize * place.plane;
    let nx = place.nx as usize;
    let mut a = 0u32;
    let mut b = 0u32;
    let mut c = 0u32;
    let mut d = 0u32;
    let mut negative = 0u32;
    let mut large = 0u32;
    let mut i = CUBE_POS_X as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    while i < elements {
        let (row, x) = (i / nx, i % nx);
        let mut bits = number(cells, start + element_at(place, row, x), half);
        if comptime!(masked) {
            let word = hidden[row * mask_row + x / 32];
            bits = select(((word >> u32::cast_from(x % 32)) & 1u32) == 1u32, 0u32, bits);
        }
        let exponent = (bits >> 23u32) & 255u32;
        let mut mantissa = bits & 0x007f_ffffu32;
        // Infinity and NaN count as too large.
        large = select(exponent >= comptime!(LARGE), 1u32, large);
        mantissa = select(exponent > 0u32, mantissa | 0x0080_0000u32, mantissa);
        let mut low = 0u32;
        let mut high = 0u32;
        if exponent >= comptime!(UNIT) {
            let shift = exponent - comptime!(UNIT);
            if shift >= 32u32 {
                high = mantissa << (shift & 31u32);
            } else {
                low = mantissa << shift;
                if shift > 0u32 {
                    high = mantissa >> (32u32 - shift);
                }
            }
        } else {
            // Round to nearest, ties to even; less than 1/2 rounds to 0.
            let shift = comptime!(UNIT) - exponent;
            if shift < 25u32 {
                let rest = mantissa & ((1u32 << shift) - 1u32);
                let half = 1u32 << (shift - 1u32);
                low = mantissa >> shift;
                if rest > half || (rest == half && (low & 1u32) == 1u32) {
                    low += 1u32;
                }
            }
        }
        if (bits >> 31u32) == 1u32 && (low != 0u32 || high != 0u32) {
            low = !low + 1u32;
            high = !high + select(low == 0u32, 1u32, 0u32);
            negative += 1u32;
        }
        a += low & 0xffffu32;
        b += low >> 16u32;
        c += high & 0xffffu32;
        d += high >> 16u32;
        i += units;
    }
    // Limbs overlap by half; every negative number was counted 2^64 too high.
    let low = a + (b << 16u32);
    let middle = (b >> 16u32) + select(low < a, 1u32, 0u32);
    let second = c + middle;
    let both = second + (d << 16u32);
    let carry = select(second < c, 1u32, 0u32) + select(both < second, 1u32, 0u32);
    let third = (d >> 16u32) + carry;
    let sign = select(third < negative, 0xffff_ffffu32, 0u32);
    leave(sums, Wide { a: low, b: both, c: third - negative, d: sign }, large);
}

/// Element in its plane of element `x` in row `row` of a span; rows are numbered through all its layers.
#[cube]
fn element_at(place: &Place, row: usize, x: usize) -> usize {
    let ny = place.ny as usize;
    place.x as usize + x + (place.y as usize + row % ny) * place.row + (place.z as usize + row / ny) * place.layer
}

/// Counts live cells in units of 2^-40: 2^40 each.
#[cube(launch_unchecked, address_type = "dynamic")]
fn add_bits(cells: &Array<u32>, sums: &mut Array<u32>, place: &Place, mask: u32, elements: usize, units: usize) {
    let nx = place.nx as usize;
    let mut count = 0u32;
    let mut i = CUBE_POS_X as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    while i < elements {
        let (row, x) = (i / nx, i % nx);
        let word = cells[element_at(place, row, x)];
        let living = select(x == nx - 1, word & mask, word);
        count += u32::count_ones(living);
        i += units;
    }
    leave(sums, Wide { a: 0u32.runtime(), b: count << 8u32, c: count >> 24u32, d: 0u32.runtime() }, 0u32);
}
