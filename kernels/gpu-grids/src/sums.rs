//! Reduction of 128-bit integers: each cube of a launch leaves one partial sum, which the host adds.
use cubecl::prelude::*;
use kernels_grids::GridError;

use crate::memory::{Buffer, UNITS, check};

/// Maximum cubes per launch, enough to fill a large device; exceeded only if threads would overflow otherwise.
const CUBES_MAX: usize = 512;
/// Words per cube: its sum, and a flag for a number too large to count.
const WORDS: usize = 5;

/// Partial sums of a launch.
pub(super) struct Sums {
    buffer: Buffer,
    /// Cubes per sum.
    pub(super) cubes: usize,
    /// Threads per sum.
    pub(super) units: usize,
}

impl Sums {
    /// Buffer for `sums` sums of `elements` each; a thread adds at most `each` elements.
    pub(super) fn new<R: Runtime>(client: &ComputeClient<R>, sums: usize, elements: usize, each: usize) -> Self {
        let units = UNITS as usize;
        let cubes = elements.div_ceil(units).clamp(1, CUBES_MAX).max(elements.div_ceil(units * each));
        let len = sums * cubes * WORDS;
        Self { buffer: Buffer { handle: client.empty(4 * len), len }, cubes, units: cubes * units }
    }

    pub(super) fn arg<R: Runtime>(&self) -> ArrayArg<R> {
        self.buffer.arg()
    }

    /// Launch shape: the cubes of a sum along x, sums along y.
    pub(super) fn launch(&self) -> (CubeCount, CubeDim) {
        let sums = self.buffer.len / (self.cubes * WORDS);
        (CubeCount::Static(self.cubes as u32, sums as u32, 1), CubeDim::new_1d(UNITS))
    }

    /// The sums, wrapping; `None` if a number was too large.
    pub(super) fn read<R: Runtime>(&self, client: &ComputeClient<R>) -> Result<Vec<Option<u128>>, GridError> {
        check(client)?;
        let bytes = self.buffer.read(client, 0..self.buffer.len)?;
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&bytes);
        let of_cube = |entry: &[u32]| (0..4).fold(0u128, |sum, i| sum | u128::from(entry[i]) << (32 * i));
        Ok(words
            .chunks_exact(self.cubes * WORDS)
            .map(|sum| {
                let large = sum.chunks_exact(WORDS).any(|entry| entry[4] != 0);
                (!large).then(|| sum.chunks_exact(WORDS).map(of_cube).fold(0, u128::wrapping_add))
            })
            .collect())
    }
}

/// A 128-bit integer, lowest word first.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Wide {
    pub(super) a: u32,
    pub(super) b: u32,
    pub(super) c: u32,
    pub(super) d: u32,
}

#[cube]
pub(super) fn plus(one: Wide, other: Wide) -> Wide {
    let a = one.a + other.a;
    let (b, carry) = with_carry(one.b, other.b, select(a < one.a, 1u32, 0u32));
    let (c, carry) = with_carry(one.c, other.c, carry);
    let (d, _) = with_carry(one.d, other.d, carry);
    Wide { a, b, c, d }
}

/// Sum with a carry of 0 or 1, and the carry out.
#[cube]
fn with_carry(one: u32, other: u32, carry: u32) -> (u32, u32) {
    let sum = one + other;
    let all = sum + carry;
    (all, select(sum < one, 1u32, 0u32) + select(all < sum, 1u32, 0u32))
}

/// Adds the threads' sums within a cube and writes the result. All threads of the cube must call this. `large`: not 0
/// if the thread's sum is invalid.
#[cube]
pub(super) fn leave(sums: &mut Array<u32>, mine: Wide, large: u32) {
    let all = comptime!(UNITS as usize);
    let mut shared = SharedMemory::<u32>::new(comptime!(5 * UNITS as usize));
    let unit = UNIT_POS_X as usize;
    shared[unit] = mine.a;
    shared[all + unit] = mine.b;
    shared[2 * all + unit] = mine.c;
    shared[3 * all + unit] = mine.d;
    shared[4 * all + unit] = large;
    sync_cube();
    #[unroll]
    for k in 0..8usize {
        let half = comptime!(UNITS as usize >> (k + 1));
        if unit < half {
            let other = unit + half;
            let sum = plus(
                Wide { a: shared[unit], b: shared[all + unit], c: shared[2 * all + unit], d: shared[3 * all + unit] },
                Wide {
                    a: shared[other],
                    b: shared[all + other],
                    c: shared[2 * all + other],
                    d: shared[3 * all + other],
                },
            );
            shared[unit] = sum.a;
            shared[all + unit] = sum.b;
            shared[2 * all + unit] = sum.c;
            shared[3 * all + unit] = sum.d;
            shared[4 * all + unit] |= shared[4 * all + other];
        }
        sync_cube();
    }
    if unit < 5 {
        let cube = CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize;
        sums[cube * 5 + unit] = shared[unit * all];
    }
}
