//! Whole-tile operations on the owned cells of a GPU tile: load, read, save, restore and sum, in chunks of rows.
use std::ops::Range;

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use kernels_grids::frame::Format;
use kernels_grids::halo::{bits, set_bits};
use kernels_grids::number::{Half, Number};
use kernels_grids::state::{first_not_finite, sum};
use kernels_grids::{GridError, Region};

use crate::GpuTile;
use crate::memory::{Buffer, check, element, over};
use crate::place::Memory;

/// Bytes of rows per transfer.
pub(super) const CHUNK_BYTES: usize = 16 << 20;

/// Whole rows of one field and layer in memory format.
enum Rows {
    Float(Vec<f32>),
    Half(Vec<Half>),
    Bit(Vec<u64>),
}

impl<R: Runtime> GpuTile<R> {
    /// Sets all owned cells; `cell` receives global coordinates and writes the fields. Invalidates the halo.
    ///
    /// # Errors
    /// The device failed.
    pub fn load(&mut self, cell: &mut dyn FnMut([usize; 3], &mut [f32])) -> Result<(), GridError> {
        let mut values = vec![0.0; self.fields];
        for (z, rows) in self.chunks(self.region()) {
            let mut chunks: Vec<Rows> = (0..self.fields).map(|_| self.empty(rows.len())).collect();
            for y in rows.clone() {
                for x in 0..self.frame.size[0] {
                    values.fill(0.0);
                    cell(self.frame.global([x, y, z]).expect("owned cells are in the grid"), &mut values);
                    let (row, x) = ((y - rows.start) as usize, x as usize);
                    for (chunk, &value) in chunks.iter_mut().zip(&values) {
                        match chunk {
                            Rows::Float(cells) => cells[self.start(row) + x] = value,
                            Rows::Half(cells) => cells[self.start(row) + x] = Half::of(value),
                            Rows::Bit(words) => {
                                words[self.start(row) + x / 64] |= u64::from(value != 0.0) << (x % 64);
                            }
                        }
                    }
                }
            }
            for (field, chunk) in chunks.iter().enumerate() {
                self.upload(field, z, rows.start, chunk);
            }
            check(&self.client)?;
        }
        (self.step, self.half) = (0, false);
        self.await_halo();
        Ok(())
    }

    /// One field of a region of owned cells, x innermost. Bits read as 0 and 1, cells hidden by the rule as 0.
    ///
    /// # Errors
    /// The tile does not own the region, the rule has no such field, a step is half computed, or the device failed.
    pub fn read(&self, field: usize, region: Region) -> Result<Vec<f32>, GridError> {
        self.own(field, region)?;
        let mut values = Vec::with_capacity(region.cells());
        let from = region.start[0] - self.frame.owned.start[0];
        for (z, rows) in self.chunks(region) {
            let chunk = self.download(field, z, rows.clone())?;
            for (row, y) in rows.enumerate() {
                let [_, y, z] = self.frame.global([0, y, z]).expect("owned cells are in the grid");
                for x in region.start[0]..region.end[0] {
                    let local = from + (x - region.start[0]);
                    let value = match &chunk {
                        Rows::Float(cells) => cells[self.start(row) + local],
                        Rows::Half(cells) => cells[self.start(row) + local].value(),
                        Rows::Bit(words) => (words[self.start(row) + local / 64] >> (local % 64) & 1) as f32,
                    };
                    let hidden = self.stepper.hidden([x / 64 * 64, y, z]) >> (x % 64) & 1 == 1;
                    values.push(if hidden { 0.0 } else { value });
                }
            }
        }
        Ok(values)
    }

    /// Length in bytes of [`Self::save`] for a region.
    pub fn saved_len(&self, region: Region) -> usize {
        let [width, height, depth] = region.size();
        self.saved_row(width) * height * depth * self.fields
    }

    /// Serializes a region of owned cells, to the same bytes as [`kernels_grids::tile::Tile::save`].
    ///
    /// # Errors
    /// The tile does not own the region, a step is half computed, or the device failed.
    pub fn save(&self, region: Region) -> Result<Vec<u8>, GridError> {
        self.own(0, region)?;
        let mut bytes = Vec::with_capacity(self.saved_len(region));
        let (from, width) = (region.start[0] - self.frame.owned.start[0], region.size()[0]);
        let each = self.frame.format.bytes();
        for field in 0..self.fields {
            for (z, rows) in self.chunks(region) {
                let chunk = self.raw(field, z, &rows)?;
                let words = self.bit_words(&chunk);
                for row in 0..rows.len() {
                    match &words {
                        None => bytes.extend_from_slice(&chunk[each * (self.start(row) + from)..][..each * width]),
                        Some(words) => {
                            for done in (0..width).step_by(64) {
                                let count = (width - done).min(64);
                                let word = bits(&words[self.start(row)..], from + done, count);
                                bytes.extend_from_slice(&word.to_le_bytes()[..count.div_ceil(8)]);
                            }
                        }
                    }
                }
            }
        }
        Ok(bytes)
    }

    /// Restores a region from the bytes of `save` of any tile. After the last region call [`Self::resume`].
    ///
    /// # Errors
    /// The tile does not own the region, the length is wrong, or a step is half computed (the tile is then unchanged),
    /// or the device failed.
    pub fn restore(&mut self, region: Region, bytes: &[u8]) -> Result<(), GridError> {
        self.own(0, region)?;
        let expected = self.saved_len(region);
        if bytes.len() != expected {
            return Err(GridError::SavedLength { expected, found: bytes.len() });
        }
        let (from, width) = (region.start[0] - self.frame.owned.start[0], region.size()[0]);
        let whole = width == self.frame.size[0] as usize;
        let mut saved = bytes.chunks_exact(self.saved_row(width));
        for field in 0..self.fields {
            for (z, rows) in self.chunks(region) {
                // Whole rows are overwritten entirely: their halo cells are invalid now anyway.
                let mut chunk = if whole { self.empty(rows.len()) } else { self.download(field, z, rows.clone())? };
                for (row, saved) in (0..rows.len()).zip(&mut saved) {
                    let start = self.start(row);
                    match &mut chunk {
                        Rows::Float(cells) => {
                            let cells = bytemuck::cast_slice_mut(&mut cells[start + from..][..width]);
                            cells.copy_from_slice(saved);
                        }
                        Rows::Half(cells) => {
                            let cells = bytemuck::cast_slice_mut(&mut cells[start + from..][..width]);
                            cells.copy_from_slice(saved);
                        }
                        Rows::Bit(words) => {
                            for (i, part) in saved.chunks(8).enumerate() {
                                let mut word = [0; 8];
                                word[..part.len()].copy_from_slice(part);
                                let count = (width - 64 * i).min(64);
                                set_bits(&mut words[start..], from + 64 * i, count, u64::from_le_bytes(word));
                            }
                        }
                    }
                }
                self.upload(field, z, rows.start, &chunk);
            }
            check(&self.client)?;
        }
        self.await_halo();
        Ok(())
    }

    /// Sets the step of the cells, after they were loaded or restored.
    pub fn resume(&mut self, step: u64) {
        self.step = step;
    }

    /// The sum of a field over the owned cells, as [`kernels_grids::tile::Tile::total`].
    ///
    /// # Errors
    /// No such field, a step is half computed, or the device failed.
    pub fn total(&self, field: usize) -> Result<i128, GridError> {
        self.own(field, self.region())?;
        self.totals().map(|totals| totals[field])
    }

    /// The sums of all fields.
    ///
    /// # Errors
    /// A step is half computed, or the device failed.
    pub fn totals(&self) -> Result<Vec<i128>, GridError> {
        self.whole()?;
        let found = self.totals_on_device()?;
        found.into_iter().enumerate().map(|(field, total)| total.map_or_else(|| self.read_total(field), Ok)).collect()
    }

    fn read_total(&self, field: usize) -> Result<i128, GridError> {
        let mut total = 0i128;
        self.each_row(field, &mut |_, row| {
            total = total.wrapping_add(sum(row));
            true
        })?;
        Ok(total)
    }

    /// The first owned cell, in z, y, x order, with a NaN or infinite field, and that field. Fast if there is none,
    /// because the device checks first.
    ///
    /// # Errors
    /// A step is half computed, or the device failed.
    pub fn first_not_finite(&self) -> Result<Option<([usize; 3], usize)>, GridError> {
        self.whole()?;
        if self.frame.format == Format::Bit || !self.any_not_finite()? {
            return Ok(None);
        }
        first_not_finite(self.fields, &mut |field, call| self.each_row(field, call))
    }

    /// Whether the state's memory holds NaN or infinity anywhere, halo and ghost cells included.
    pub(super) fn any_not_finite(&self) -> Result<bool, GridError> {
        let found = Buffer::from_elements(&self.client, &[0])?;
        let (cubes, dim) = over(self.state.len);
        // SAFETY: threads past the last element do nothing.
        unsafe {
            not_finite::launch_unchecked::<R>(
                &self.client,
                cubes,
                dim,
                self.address(),
                self.state.arg(),
                found.arg(),
                self.state.len,
                self.frame.format == Format::Half,
            );
        }
        check(&self.client)?;
        Ok(found.read(&self.client, 0..1)?[..] != [0; 4])
    }

    /// Calls with the position and the cells of each row, until `call` returns false.
    fn each_row(&self, field: usize, call: &mut dyn FnMut([usize; 3], &[f32]) -> bool) -> Result<(), GridError> {
        let Region { start, end } = self.region();
        let [x, width] = [start[0], end[0] - start[0]];
        for (z, rows) in self.chunks(self.region()) {
            let (y, z) = (start[1] + rows.start as usize, start[2] + z as usize);
            let region = Region { start: [x, y, z], end: [end[0], y + rows.len(), z + 1] };
            let cells = self.read(field, region)?;
            for (row, cells) in cells.chunks(width).enumerate() {
                if !call([x, y + row, z], cells) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    pub(super) fn own(&self, field: usize, region: Region) -> Result<(), GridError> {
        self.whole()?;
        if field >= self.fields {
            return Err(GridError::Field { field, fields: self.fields });
        }
        let tile = self.frame.owned;
        let empty = region.cells() == 0;
        if empty || !tile.contains(&region) { Err(GridError::Region { region, tile }) } else { Ok(()) }
    }

    fn saved_row(&self, width: usize) -> usize {
        match self.frame.format {
            Format::Float | Format::Half => self.frame.format.bytes() * width,
            Format::Bit => width.div_ceil(8),
        }
    }

    /// Splits a region of owned cells into chunks of rows, layer by layer.
    fn chunks(&self, region: Region) -> Vec<(isize, Range<isize>)> {
        let [_, y, z] = self.frame.within(region).0;
        let count = (CHUNK_BYTES / (4 * self.memory.row)).max(1);
        let of_layer = |z| y.clone().step_by(count).map(move |first| (z, first));
        let all = z.flat_map(of_layer);
        all.map(|(z, first)| (z, first..y.end.min(first + count as isize))).collect()
    }

    fn start(&self, row: usize) -> usize {
        start(&self.memory, self.frame.format, row)
    }

    fn empty(&self, rows: usize) -> Rows {
        match self.frame.format {
            Format::Float => Rows::Float(vec![0.0; rows * self.memory.row]),
            Format::Half => Rows::Half(vec![Half::of(0.0); rows * self.memory.row]),
            Format::Bit => Rows::Bit(vec![0; rows * self.memory.row / 2]),
        }
    }

    /// The word with which a row begins, padding included.
    fn first(&self, field: usize, y: isize, z: isize) -> usize {
        (field * self.memory.plane + self.memory.at([0, y, z]) - self.memory.left) / self.memory.of_word
    }

    fn download(&self, field: usize, z: isize, rows: Range<isize>) -> Result<Rows, GridError> {
        let bytes = self.raw(field, z, &rows)?;
        Ok(match self.frame.format {
            Format::Float => Rows::Float(bytemuck::pod_collect_to_vec(&bytes)),
            Format::Half => Rows::Half(bytemuck::pod_collect_to_vec(&bytes)),
            Format::Bit => Rows::Bit(bytemuck::pod_collect_to_vec(&bytes)),
        })
    }

    fn raw(&self, field: usize, z: isize, rows: &Range<isize>) -> Result<Bytes, GridError> {
        let first = self.first(field, rows.start, z);
        self.state.read(&self.client, first..first + rows.len() * self.memory.row / self.memory.of_word)
    }

    fn bit_words(&self, bytes: &[u8]) -> Option<Vec<u64>> {
        (self.frame.format == Format::Bit).then(|| bytemuck::pod_collect_to_vec(bytes))
    }

    fn upload(&self, field: usize, z: isize, y: isize, rows: &Rows) {
        let bytes: &[u8] = match rows {
            Rows::Float(cells) => bytemuck::cast_slice(cells),
            Rows::Half(cells) => bytemuck::cast_slice(cells),
            Rows::Bit(words) => bytemuck::cast_slice(words),
        };
        self.state.write(&self.client, self.first(field, y, z), bytes);
    }
}

/// Index of the first owned cell of a row in a chunk.
fn start(memory: &Memory, format: Format, row: usize) -> usize {
    let words = if format == Format::Bit { 2 } else { 1 };
    (row * memory.row + memory.left) / words
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn not_finite(cells: &Array<u32>, found: &mut Array<u32>, len: usize, #[comptime] half: bool) {
    let i = element();
    if i < len {
        // Tests the exponent bits: compilers that assume finite arithmetic cannot optimise this away.
        if comptime!(half) {
            if (cells[i] & 0x7c00u32) == 0x7c00u32 || (cells[i] & 0x7c00_0000u32) == 0x7c00_0000u32 {
                found[0] = 1u32;
            }
        } else if (cells[i] & 0x7f80_0000u32) == 0x7f80_0000u32 {
            found[0] = 1u32;
        }
    }
}
