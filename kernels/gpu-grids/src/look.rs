//! Sampling of GPU tiles for output and preview: the device downsamples rows and counts live cells, so transfers are
//! small.
use cubecl::prelude::*;
use kernels_grids::any_tile::{RowFn, blocks, count};
use kernels_grids::frame::Format;
use kernels_grids::{GridError, Region};

use crate::GpuTile;
use crate::memory::{Buffer, check, element, number, over};
use crate::place::Place;
use crate::state::CHUNK_BYTES;

impl<R: Runtime> GpuTile<R> {
    /// Rows of some fields, as [`kernels_grids::any_tile::Fields::rows`].
    pub(super) fn read_rows(
        &self,
        fields: &[usize],
        region: Region,
        every: usize,
        call: RowFn<'_>,
    ) -> Result<(), GridError> {
        self.own(fields.iter().copied().max().unwrap_or(0), region)?;
        let first: [usize; 2] = std::array::from_fn(|axis| region.start[axis].next_multiple_of(every));
        let [nx, ny] = std::array::from_fn(|axis| region.end[axis].saturating_sub(first[axis]).div_ceil(every));
        let rows = ny * (region.end[2] - region.start[2]);
        if nx * rows * fields.len() == 0 {
            // Empty rows are reported too.
            let nothing = vec![Vec::new(); fields.len()];
            (0..rows).for_each(|row| call([first[1] + row % ny * every, region.start[2] + row / ny], &nothing));
            return Ok(());
        }
        let names: Vec<u32> = fields.iter().map(|&field| field as u32).collect();
        let names = Buffer::from_elements(&self.client, &names)?;
        let owned = self.frame.owned.start;
        let mut cells = vec![Vec::new(); fields.len()];
        let at_once = (CHUNK_BYTES / (4 * nx * fields.len())).max(1);
        for begin in (0..rows).step_by(at_once) {
            let these = at_once.min(rows - begin);
            let from = Thin {
                first: [first[0] - owned[0], first[1] - owned[1], region.start[2] - owned[2]],
                every,
                nx,
                ny,
                begin,
                fields: fields.len(),
            };
            let values: Vec<f32> = self.thinned(&from, &names, these)?;
            for (row, values) in values.chunks_exact(nx * fields.len()).enumerate() {
                for (cells, values) in cells.iter_mut().zip(values.chunks_exact(nx)) {
                    cells.clear();
                    cells.extend_from_slice(values);
                }
                let row = begin + row;
                call([first[1] + row % ny * every, region.start[2] + row / ny], &cells);
            }
        }
        Ok(())
    }

    /// Downsampled rows, field by field within each.
    fn thinned(&self, from: &Thin, names: &Buffer, rows: usize) -> Result<Vec<f32>, GridError> {
        let len = rows * from.fields * from.nx;
        let to = Buffer { handle: self.client.empty(4 * len), len };
        let (cubes, dim) = over(len);
        let nothing = Buffer::from_elements(&self.client, &[0; 4])?;
        let (place, mask) = (self.memory.place(&self.frame.span(0)), self.hidden.as_ref().unwrap_or(&nothing));
        // SAFETY: the requested cells are owned, the mask has a bit per owned cell; threads past `len` do nothing.
        unsafe {
            pick::launch_unchecked::<R>(
                &self.client,
                cubes,
                dim,
                self.address(),
                self.state.arg(),
                mask.arg(),
                names.arg(),
                to.arg(),
                place,
                from.launched(),
                2 * (self.frame.size[0] as usize).div_ceil(64),
                self.frame.size[1] as usize,
                len,
                self.frame.format,
                self.hidden.is_some(),
            );
        }
        check(&self.client)?;
        to.read(&self.client, 0..len).map(|bytes| bytemuck::pod_collect_to_vec(&bytes))
    }

    /// Live cells per block, as [`kernels_grids::any_tile::Fields::living`].
    pub(super) fn read_living(&self, region: Region, stride: usize) -> Result<Vec<f32>, GridError> {
        self.own(0, region)?;
        if self.frame.format != Format::Bit {
            return count(&mut |row| self.read_rows(&[0], region, 1, row), region, stride);
        }
        let (owned, to) = (self.frame.owned.start, blocks(region, stride));
        let (len, [width, height, _]) = (to.cells(), to.size());
        let counts = Buffer { handle: self.client.empty(4 * len), len };
        let (cubes, dim) = over(len);
        let at: [u32; 3] = std::array::from_fn(|axis| (region.start[axis] - owned[axis]) as u32);
        let place = self.memory.place(&self.frame.span(0));
        // SAFETY: the region is owned; threads past `len` do nothing.
        unsafe {
            count_living::launch_unchecked::<R>(
                &self.client,
                cubes,
                dim,
                self.address(),
                self.state.arg(),
                counts.arg(),
                place,
                (region.end[0] - owned[0]) as u32,
                (region.end[1] - owned[1]) as u32,
                at[0],
                at[1],
                at[2],
                (region.start[0] % stride) as u32,
                (region.start[1] % stride) as u32,
                stride as u32,
                width,
                height,
                len,
            );
        }
        check(&self.client)?;
        let bytes = counts.read(&self.client, 0..len)?;
        Ok(bytemuck::pod_collect_to_vec::<u8, u32>(&bytes).into_iter().map(|count| count as f32).collect())
    }
}

/// A selection of rows of some fields, downsampled.
struct Thin {
    /// The first cell, relative to the first owned one.
    first: [usize; 3],
    every: usize,
    /// Cells per row, rows per layer.
    nx: usize,
    ny: usize,
    /// Index of the first row.
    begin: usize,
    fields: usize,
}

impl Thin {
    fn launched<R: Runtime>(&self) -> ThinnedLaunch<R> {
        let [x, y, z] = self.first.map(|at| at as u32);
        ThinnedLaunch::new(x, y, z, self.every as u32, self.nx, self.ny, self.begin, self.fields)
    }
}

/// [`AxisTooShort`] as a kernel argument.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Thinned {
    x: u32,
    y: u32,
    z: u32,
    every: u32,
    nx: usize,
    ny: usize,
    begin: usize,
    fields: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn pick(
    cells: &Array<u32>,
    hidden: &Array<u32>,
    names: &Array<u32>,
    to: &mut Array<f32>,
    place: &Place,
    thin: &Thinned,
    mask_row: usize,
    height: usize,
    len: usize,
    #[comptime] format: Format,
    #[comptime] masked: bool,
) {
    let i = element();
    if i < len {
        let (column, rest) = (i % thin.nx, i / thin.nx);
        let (row, name) = (thin.begin + rest / thin.fields, rest % thin.fields);
        let x = thin.x + u32::cast_from(column) * thin.every;
        let y = thin.y + u32::cast_from(row % thin.ny) * thin.every;
        let z = thin.z + u32::cast_from(row / thin.ny);
        let line = names[name] as usize * place.plane
            + (place.z + z) as usize * place.layer
            + (place.y + y) as usize * place.row
            + place.x as usize;
        let (word, bit) = ((x / 32u32) as usize, x % 32u32);
        if comptime!(format == Format::Bit) {
            to[i] = f32::cast_from((cells[line + word] >> bit) & 1u32);
        } else {
            let mut value = f32::reinterpret(number(cells, line + x as usize, comptime!(format == Format::Half)));
            if comptime!(masked) {
                let mask = hidden[(z as usize * height + y as usize) * mask_row + word];
                value = select(((mask >> bit) & 1u32) == 1u32, 0.0f32, value);
            }
            to[i] = value;
        }
    }
}

/// One thread per block. `x`, `y`, `z`: first cell of the region; `x_end`, `y_end`: its end; `x_in`, `y_in`: offset of
/// the first cell in its block.
#[cube(launch_unchecked, address_type = "dynamic")]
fn count_living(
    cells: &Array<u32>,
    to: &mut Array<u32>,
    place: &Place,
    x_end: u32,
    y_end: u32,
    x: u32,
    y: u32,
    z: u32,
    x_in: u32,
    y_in: u32,
    stride: u32,
    width: usize,
    height: usize,
    len: usize,
) {
    let i = element();
    if i < len {
        let (column, rest) = (u32::cast_from(i % width), i / width);
        let (row, layer) = (u32::cast_from(rest % height), u32::cast_from(rest / height));
        // Blocks are counted from the grid's origin, so the first one may begin before the region.
        let left = x + select(column == 0u32, 0u32, column * stride - x_in);
        let low = y + select(row == 0u32, 0u32, row * stride - y_in);
        let (right, high) = (x + (column + 1u32) * stride - x_in, y + (row + 1u32) * stride - y_in);
        let (right, high) = (select(right < x_end, right, x_end), select(high < y_end, high, y_end));
        let start = (place.z + z + layer) as usize * place.layer + place.x as usize;
        let (first, last) = (left / 32u32, (right - 1u32) / 32u32);
        let mut count = 0u32;
        let mut line = low;
        while line < high {
            let begin = start + (place.y + line) as usize * place.row;
            let mut at = first;
            while at <= last {
                let mut word = cells[begin + at as usize];
                if at == first {
                    word &= 0xffff_ffffu32 << (left % 32u32);
                }
                if at == last {
                    word &= 0xffff_ffffu32 >> (31u32 - (right - 1u32) % 32u32);
                }
                count += u32::count_ones(word);
                at += 1u32;
            }
            line += 1u32;
        }
        to[i] = count;
    }
}
