//! State hash of a grid: one number, independent of the partition.
//!
//! The wrapping sum, over all fields and all runs of 64 cells along x, of the first 128 bits of a keyed hash of (field,
//! index of the run in the grid, its cells in memory format). Each tile sums its runs; the grid's hash is the sum of
//! the tiles' sums. Cuts across x fall between runs, so the partition does not matter.
use parking_lot::Mutex;

use kernels::threads::Threads;

use crate::error::GridError;
use crate::frame::{Format, Frame};
use crate::halo::bits;
use crate::number::Half;
use crate::region::RUN;
use crate::tile::Tile;

/// Context string from which the hash key is derived.
const CONTEXT: &str = "meshnode 2026 state of a grid";

impl Tile {
    /// This tile's part of the grid's state hash; the wrapping sum over all tiles is the hash.
    ///
    /// # Errors
    /// A step is half computed.
    pub fn state_hash(&self, threads: &mut Threads) -> Result<u128, GridError> {
        self.whole()?;
        let key = key();
        let height = self.frame.size[1] as usize;
        let total = Mutex::new(0u128);
        threads.pool().run(height * self.frame.size[2] as usize, 1, &|_, rows| {
            let mut sum = 0u128;
            for row in rows {
                let (y, z) = ((row % height) as isize, (row / height) as isize);
                sum = (0..self.fields()).fold(sum, |sum, field| sum.wrapping_add(self.row_hash(&key, field, y, z)));
            }
            let mut total = total.lock();
            *total = total.wrapping_add(sum);
        });
        Ok(total.into_inner())
    }

    fn row_hash(&self, key: &[u8; 32], field: usize, y: isize, z: isize) -> u128 {
        let at = self.frame.at([0, y, z]);
        let cells = match self.frame.format {
            Format::Float => Cells::Float(&self.state.plane::<f32>(field)[at..]),
            Format::Half => Cells::Half(&self.state.plane::<Half>(field)[at..]),
            Format::Bit => Cells::Bit(&self.state.plane::<u64>(field)[at..]),
        };
        of_row(key, &self.frame, &|at| self.stepper.hidden(at), field, [y, z], cells)
    }
}

/// Cells of a row in memory format, beginning with the first owned cell.
#[derive(Clone, Copy)]
pub(crate) enum Cells<'a> {
    Float(&'a [f32]),
    Half(&'a [Half]),
    Bit(&'a [u64]),
}

/// The key of the state hash.
pub fn key() -> [u8; 32] {
    blake3::derive_key(CONTEXT, &[])
}

/// The part of one field of one owned row at local `[y, z]`. `hidden`: as [`Stepper::hidden`](crate::stepper::Stepper).
pub(crate) fn of_row(
    key: &[u8; 32],
    frame: &Frame,
    hidden: &dyn Fn([usize; 3]) -> u64,
    field: usize,
    [y, z]: [isize; 2],
    row: Cells<'_>,
) -> u128 {
    let [_, global_y, global_z] = frame.global([0, y, z]).expect("owned cells are in the grid");
    let [width, rows, _] = frame.grid.size();
    let runs_before = (global_z * rows + global_y) * width.div_ceil(RUN);
    let mut sum = 0u128;
    // Field, run index, cells.
    let mut text = [0; 16 + 4 * RUN];
    text[..8].copy_from_slice(&(field as u64).to_le_bytes());
    for x in (0..frame.size[0] as usize).step_by(RUN) {
        let global_x = frame.owned.start[0] + x;
        let count = (frame.size[0] as usize - x).min(RUN);
        text[8..16].copy_from_slice(&((runs_before + global_x / RUN) as u64).to_le_bytes());
        let hidden = hidden([global_x, global_y, global_z]);
        let len = match row {
            Cells::Float(cells) => {
                for (i, (cell, bytes)) in cells[x..x + count].iter().zip(text[16..].chunks_exact_mut(4)).enumerate() {
                    let cell = if hidden >> i & 1 == 1 { 0.0 } else { *cell };
                    bytes.copy_from_slice(&cell.to_le_bytes());
                }
                4 * count
            }
            Cells::Half(cells) => {
                let cells: &[u16] = bytemuck::cast_slice(&cells[x..x + count]);
                for (i, (cell, bytes)) in cells.iter().zip(text[16..].chunks_exact_mut(2)).enumerate() {
                    let cell = if hidden >> i & 1 == 1 { 0 } else { *cell };
                    bytes.copy_from_slice(&cell.to_le_bytes());
                }
                2 * count
            }
            Cells::Bit(cells) => {
                text[16..24].copy_from_slice(&(bits(&cells[x / 64..], 0, count) & !hidden).to_le_bytes());
                8
            }
        };
        let hash = blake3::keyed_hash(key, &text[..16 + len]);
        let first = hash.as_bytes()[..16].try_into().expect("16 of 32 bytes");
        sum = sum.wrapping_add(u128::from_le_bytes(first));
    }
    sum
}
