//! State hash computed on the device: keyed BLAKE3 of each run of cells, one thread per run, as defined in
//! `kernels/grids/src/hash.rs`.
#![expect(
    clippy::needless_range_loop,
    clippy::manual_div_ceil,
    reason = "kernels support only loops over integer ranges and plain division"
)]
use cubecl::prelude::*;

use super::GpuTile;
use super::memory::Buffer;
use super::place::Place;
use super::sums::{Sums, Wide, leave, plus};
use kernels_grids::frame::{Format, Span};
use kernels_grids::{GridError, RUN, hash};

/// Maximum runs per launch: kernels count runs in 32 bits from the launch's first.
const RUNS_MAX: usize = 1 << 31;
/// The first half of BLAKE3's initialization vector.
const IV: [u32; 4] = [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a];
/// BLAKE3's message permutation between rounds.
const PERMUTATION: [usize; 16] = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
const ROUNDS: usize = 7;
/// Block flags: first (chunk start), last (chunk end and root), keyed.
const FIRST: u32 = 1;
const LAST: u32 = 2 | 8;
const KEYED: u32 = 16;

impl<R: Runtime> GpuTile<R> {
    /// This tile's part of the grid's state hash, as [`kernels_grids::tile::Tile::state_hash`].
    ///
    /// # Errors
    /// A step is half computed, or the device failed.
    pub fn state_hash(&self) -> Result<u128, GridError> {
        self.whole()?;
        let key: Vec<u32> = bytemuck::pod_collect_to_vec(&hash::key());
        let key = Buffer::from_elements(&self.client, &key)?;
        let [width, height, depth] = self.frame.size;
        let [grid_runs, grid_rows] = [self.frame.grid.size()[0].div_ceil(RUN), self.frame.grid.size()[1]];
        let rows = (RUNS_MAX / grid_runs).min(height as usize);
        let layers = if rows < height as usize { 1 } else { (RUNS_MAX / (grid_runs * grid_rows)).max(1) };
        let mut total = 0u128;
        for z in (0..depth).step_by(layers) {
            for y in (0..height).step_by(rows) {
                let end = [depth.min(z + layers as isize), height.min(y + rows as isize)];
                let span = Span([0..width, y..end[1], z..end[0]]);
                total = total.wrapping_add(self.hash_of(&span, &key, [grid_runs, grid_rows])?);
            }
        }
        Ok(total)
    }

    fn hash_of(&self, span: &Span, key: &Buffer, [grid_runs, grid_rows]: [usize; 2]) -> Result<u128, GridError> {
        let at = self.frame.global([0, span.0[1].start, span.0[2].start]).expect("owned cells are in the grid");
        let first = (at[2] * grid_rows + at[1]) * grid_runs + at[0] / RUN;
        let runs = span.len(0).div_ceil(RUN);
        let count = self.fields * runs * span.len(1) * span.len(2);
        let sums = Sums::new(&self.client, 1, count, usize::MAX / 256);
        let (cubes, dim) = sums.launch();
        let nothing = Buffer::from_elements(&self.client, &[0; 4])?;
        // SAFETY: the span is in memory, and the mask has a bit per owned cell.
        unsafe {
            hash_runs::launch_unchecked::<R>(
                &self.client,
                cubes,
                dim,
                self.address(),
                self.state.arg(),
                self.hidden.as_ref().unwrap_or(&nothing).arg(),
                key.arg(),
                sums.arg(),
                self.memory.place(span),
                Runs::launch_of(span.len(0), runs, grid_runs, grid_rows, first),
                (span.0[2].start * self.frame.size[1] + span.0[1].start) as usize,
                2 * runs,
                count,
                sums.units,
                self.frame.format,
                self.hidden.is_some(),
            );
        }
        // Hash sums never overflow, so there is always a value.
        Ok(sums.read(&self.client)?.first().copied().flatten().unwrap_or(0))
    }
}

/// Numbering of a launch's runs in the grid.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Runs {
    /// Cells and runs per row of the tile.
    width: u32,
    runs: u32,
    /// Runs per row and rows per layer of the grid.
    grid_runs: u32,
    grid_rows: u32,
    /// Index of the first run, in two words.
    low: u32,
    high: u32,
}

impl Runs {
    fn launch_of<R: Runtime>(
        width: usize,
        runs: usize,
        grid_runs: usize,
        grid_rows: usize,
        first: usize,
    ) -> RunsLaunch<R> {
        let (low, high) = (first as u32, (first >> 32) as u32);
        RunsLaunch::new(width as u32, runs as u32, grid_runs as u32, grid_rows as u32, low, high)
    }
}

/// The sum of the hashes of `count` runs. `mask_first`: the row of the mask for the first row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn hash_runs(
    cells: &Array<u32>,
    hidden: &Array<u32>,
    key: &Array<u32>,
    sums: &mut Array<u32>,
    place: &Place,
    runs: &Runs,
    mask_first: usize,
    mask_row: usize,
    count: usize,
    units: usize,
    #[comptime] format: Format,
    #[comptime] masked: bool,
) {
    let mut a = 0u32;
    let mut b = 0u32;
    let mut c = 0u32;
    let mut d = 0u32;
    let mut i = CUBE_POS_X as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    let mut chain = Array::<u32>::new(8usize);
    let mut message = Array::<u32>::new(16usize);
    let mut state = Array::<u32>::new(16usize);
    while i < count {
        let (of_row, rest) = ((i % runs.runs as usize) as u32, i / runs.runs as usize);
        let (row, field) = (rest % place.rows as usize, rest / place.rows as usize);
        let (y, z) = ((row % place.ny as usize) as u32, (row / place.ny as usize) as u32);
        let number = (z * runs.grid_rows + y) * runs.grid_runs + of_row;
        let low = runs.low + number;
        let high = runs.high + select(low < number, 1u32, 0u32);
        let left = runs.width - of_row * 64u32;
        let width = select(left < 64u32, left, 64u32);
        let begin = field * place.plane
            + (place.z + z) as usize * place.layer
            + (place.y + y) as usize * place.row
            + place.x as usize;
        let mut hidden_low = 0u32;
        let mut hidden_high = 0u32;
        if comptime!(masked) {
            let at = (mask_first + row) * mask_row + 2 * of_row as usize;
            hidden_low = hidden[at];
            hidden_high = hidden[at + 1];
        }
        // Length in bytes after four words of field and run index; then whole words, rounded up, and blocks.
        let bytes = 16u32
            + match format {
                Format::Float => 4u32 * width,
                Format::Half => 2u32 * width,
                Format::Bit => 8u32.runtime(),
            };
        let (len, blocks) = ((bytes + 3u32) / 4u32, (bytes + 63u32) / 64u32);
        #[unroll]
        for k in 0..8usize {
            chain[k] = key[k];
        }
        let mut block = 0u32;
        while block < blocks {
            #[unroll]
            for k in 0..16u32 {
                let word = block * 16u32 + k;
                let mut value = 0u32;
                if word >= 4u32 && word < len {
                    let at = word - 4u32;
                    if comptime!(format == Format::Bit) {
                        let cut = select(width > 32u32 * at, width - 32u32 * at, 0u32);
                        let kept = select(cut >= 32u32, 0xffff_ffffu32, (1u32 << (cut & 31u32)) - 1u32);
                        value = cells[begin + (2u32 * of_row + at) as usize] & kept;
                    } else if comptime!(format == Format::Half) {
                        // A row begins at a word boundary, and so does each of its runs.
                        value = cells[begin / 2 + (32u32 * of_row + at) as usize];
                        let cell = 2u32 * at;
                        if cell + 1u32 == width {
                            value &= 0xffffu32;
                        }
                        if comptime!(masked) {
                            let mask = select(cell < 32u32, hidden_low, hidden_high) >> (cell & 31u32);
                            value = select((mask & 1u32) == 1u32, value & 0xffff_0000u32, value);
                            value = select((mask & 2u32) == 2u32, value & 0xffffu32, value);
                        }
                    } else {
                        value = cells[begin + (64u32 * of_row + at) as usize];
                        if comptime!(masked) {
                            let mask = select(at < 32u32, hidden_low, hidden_high);
                            value = select(((mask >> (at & 31u32)) & 1u32) == 1u32, 0u32, value);
                        }
                    }
                }
                message[comptime!(k as usize)] = value;
            }
            let last = block + 1u32 == blocks;
            let mut flags = comptime!(KEYED) + select(last, comptime!(LAST), 0u32);
            if block == 0u32 {
                message[0] = field as u32;
                message[1] = 0u32;
                message[2] = low;
                message[3] = high;
                flags += comptime!(FIRST);
            }
            let these = select(last, bytes - 64u32 * block, 64u32);
            compress(&mut chain, &message, &mut state, these, flags);
            block += 1u32;
        }
        let sum = plus(Wide { a, b, c, d }, Wide { a: chain[0], b: chain[1], c: chain[2], d: chain[3] });
        a = sum.a;
        b = sum.b;
        c = sum.c;
        d = sum.d;
        i += units;
    }
    leave(sums, Wide { a, b, c, d }, 0u32);
}

/// BLAKE3 compression of one block of a single-chunk message.
#[cube]
fn compress(chain: &mut Array<u32>, message: &Array<u32>, state: &mut Array<u32>, bytes: u32, flags: u32) {
    #[unroll]
    for k in 0..8usize {
        state[k] = chain[k];
    }
    #[unroll]
    for k in 0..4usize {
        state[comptime!(8 + k)] = comptime!(IV[k]);
    }
    state[12] = 0u32;
    state[13] = 0u32;
    state[14] = bytes;
    state[15] = flags;
    #[unroll]
    for round in 0..ROUNDS {
        // Columns, then diagonals.
        #[unroll]
        for k in 0..8usize {
            let (column, turn) = comptime!((k % 4, k / 4));
            let of =
                comptime!([column, 4 + (column + turn) % 4, 8 + (column + 2 * turn) % 4, 12 + (column + 3 * turn) % 4]);
            let (x, y) = comptime!((word(round, 2 * k), word(round, 2 * k + 1)));
            mix(state, of, message[x], message[y]);
        }
    }
    #[unroll]
    for k in 0..8usize {
        chain[k] = state[k] ^ state[comptime!(k + 8)];
    }
}

#[cube]
fn mix(state: &mut Array<u32>, #[comptime] of: [usize; 4], x: u32, y: u32) {
    let (i, j, k, l) = comptime!((of[0], of[1], of[2], of[3]));
    let a = state[i] + state[j] + x;
    let d = turned(state[l] ^ a, 16u32);
    let c = state[k] + d;
    let b = turned(state[j] ^ c, 12u32);
    let a = a + b + y;
    let d = turned(d ^ a, 8u32);
    let c = c + d;
    state[i] = a;
    state[j] = turned(b ^ c, 7u32);
    state[k] = c;
    state[l] = d;
}

#[cube]
fn turned(bits: u32, #[comptime] by: u32) -> u32 {
    (bits >> by) | (bits << comptime!(32 - by))
}

/// Index of the message word used at `place` in a round.
fn word(round: usize, place: usize) -> usize {
    (0..round).fold(place, |place, _| PERMUTATION[place])
}
