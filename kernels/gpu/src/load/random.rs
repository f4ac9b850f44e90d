//! Matrices of random weights made on the device: 16 rows of each format and width are sent, and repeated there.
//!
//! What a step takes does not depend on the values of weights, so a model of any size can be measured without a file of it.
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::quant::{QuantType, random_blocks};
use kernels::stage::StageError;
use kernels::tile::{Layout, ROWS, convert};

use super::{CUBES, Joined, UNITS, sum_of_words};
use crate::engine::memory::Memory;
use crate::{Platform, array};

/// 16 random rows as tiles, on the device.
pub(super) struct Strip {
    words: usize,
    /// Of its words.
    sum: u32,
    tiles: Handle,
}

/// The rows of a file that a strip is made of.
pub(crate) fn rows(kind: QuantType, cols: usize) -> Vec<u8> {
    const SEED: u64 = 1;
    random_blocks(kind, ROWS * cols / kind.block_len(), SEED)
}

impl Strip {
    fn new<R: Platform>(memory: &Memory<'_, R>, kind: QuantType, cols: usize) -> Result<Self, StageError> {
        let mut tiles = vec![0; Layout::of(kind).matrix_bytes(ROWS, cols)];
        convert(kind, cols, 0..ROWS, &rows(kind, cols), &mut tiles)
            .map_err(|error| StageError::Device(format!("random weights: {error}")))?;
        let (words, sum) = (tiles.len() / 4, sum_of_words(&tiles));
        Ok(Self { words, sum, tiles: memory.created(tiles, "random weights")? })
    }
}

/// A matrix of the strip of its format and columns over and over, and the sum of its words.
pub(super) fn matrix<R: Platform>(
    memory: &Memory<'_, R>,
    strips: &mut BTreeMap<(QuantType, usize), Strip>,
    joined: &Joined<'_>,
) -> Result<(Handle, u32), StageError> {
    let strip = match strips.entry((joined.kind, joined.cols)) {
        Entry::Occupied(made) => made.into_mut(),
        Entry::Vacant(first) => first.insert(Strip::new(memory, joined.kind, joined.cols)?),
    };
    let many = joined.rows.div_ceil(ROWS);
    let buffer = memory.buffer(joined.bytes(), joined.pieces[0].0)?;
    // SAFETY: the matrix is `many` strips long, and the kernel stays below both lengths.
    unsafe {
        repeat_kernel::launch_unchecked::<R>(
            memory.client,
            CubeCount::Static(CUBES, 1, 1),
            CubeDim::new_1d(UNITS),
            array(&strip.tiles, strip.words),
            array(&buffer, many * strip.words),
            strip.words as u32,
            many as u32,
        );
    }
    Ok((buffer, strip.sum.wrapping_mul(many as u32)))
}

/// Each cube writes whole strips.
#[cube(launch_unchecked)]
fn repeat_kernel(strip: &Array<u32>, matrix: &mut Array<u32>, len: u32, many: u32) {
    let mut at = CUBE_POS_X as usize;
    while at < many as usize {
        let mut i = UNIT_POS_X as usize;
        while i < len as usize {
            matrix[at * len as usize + i] = strip[i];
            i += comptime!(UNITS as usize);
        }
        at += comptime!(CUBES as usize);
    }
}
