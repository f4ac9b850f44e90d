//! Weights on their way from a file to a device: converted to tiles on all threads, and proven by a checksum that the device takes.
//!
//! Devices do not say when an allocation fails; they compute with whatever is there. So what was sent is summed up again.
use std::ops::Range;

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::quant::QuantType;
use kernels::stage::StageError;
use kernels::tile::{Layout, ROWS, convert};
use kernels::weights::ModelFile;
use rayon::prelude::*;

use crate::engine::failed;
use crate::product::Matrix;
use crate::{Platform, array};

/// Tensors of a file on their way to a device.
pub(crate) struct Loader<'a, R: Platform> {
    client: &'a ComputeClient<R>,
    file: &'a ModelFile,
    threads: &'a rayon::ThreadPool,
    /// Bytes sent.
    pub(crate) bytes: u64,
    /// Of what was sent and is not proven yet.
    proofs: Vec<Proof>,
}

/// Words that were sent: their sum on the host, and what the device sums up.
struct Proof {
    name: String,
    words: usize,
    sum: u32,
    found: Handle,
}

/// Rows of matrices that become one.
struct Joined<'n> {
    kind: QuantType,
    rows: usize,
    cols: usize,
    pieces: Vec<(&'n String, Range<usize>)>,
}

/// A matrix within a row of several: see [`crate::product::Target`].
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) matrix: Matrix,
    /// First element of an output row.
    pub(crate) offset: usize,
    /// Elements, without those that fill the last tile.
    pub(crate) width: usize,
}

/// Proofs on their way at once: buffers of [`CUBES`] words each.
const PROOFS_MAX: usize = 64;

impl<'a, R: Platform> Loader<'a, R> {
    pub(crate) fn new(client: &'a ComputeClient<R>, file: &'a ModelFile, threads: &'a rayon::ThreadPool) -> Self {
        Self { client, file, threads, bytes: 0, proofs: Vec::new() }
    }

    /// Matrices that read the same rows, side by side: those of one format are one, as far as a buffer holds them.
    pub(crate) fn matrices(&mut self, names: &[String]) -> Result<Vec<Part>, StageError> {
        let (mut parts, mut offset) = (Vec::new(), 0);
        for Joined { kind, rows, cols, pieces } in self.joined(names)? {
            let layout = Layout::of(kind);
            let mut tiles = vec![0; layout.matrix_bytes(rows, cols)];
            let mut rest = tiles.as_mut_slice();
            for (name, rows) in &pieces {
                let (out, behind) = rest.split_at_mut(layout.matrix_bytes(rows.len(), cols));
                self.convert(name, rows.clone(), out)?;
                self.file.release(name);
                rest = behind;
            }
            let tiles = self.send(pieces[0].0, tiles)?;
            parts.push(Part { matrix: Matrix { kind, rows, cols, tiles }, offset, width: rows });
            offset += rows;
        }
        Ok(parts)
    }

    /// What becomes one matrix each.
    fn joined<'n>(&self, names: &'n [String]) -> Result<Vec<Joined<'n>>, StageError> {
        let most = usize::try_from(self.client.properties().memory.max_page_size).unwrap_or(usize::MAX);
        let mut all: Vec<Joined<'n>> = Vec::new();
        for name in names {
            let tensor = self.file.tensor(name).ok_or_else(|| missing(name))?;
            let (kind, cols) = (tensor.quant, tensor.cols);
            let layout = Layout::of(kind);
            let rows_max = (most / layout.matrix_bytes(1, cols)).max(1) * ROWS;
            for first in (0..tensor.rows).step_by(rows_max) {
                let rows = first..tensor.rows.min(first + rows_max);
                match all.last_mut() {
                    // A matrix that does not fill its last tile ends there.
                    Some(last)
                        if (last.kind, last.cols) == (kind, cols)
                            && last.rows.is_multiple_of(ROWS)
                            && last.rows + rows.len() <= rows_max =>
                    {
                        last.rows += rows.len();
                        last.pieces.push((name, rows));
                    }
                    _ => all.push(Joined { kind, rows: rows.len(), cols, pieces: vec![(name, rows)] }),
                }
            }
        }
        Ok(all)
    }

    /// A vector as floats.
    pub(crate) fn vector(&mut self, name: &str) -> Result<Handle, StageError> {
        self.vectors(&[name.to_owned()])
    }

    /// Vectors one after the other, as floats.
    pub(crate) fn vectors(&mut self, names: &[String]) -> Result<Handle, StageError> {
        let mut all = Vec::new();
        for name in names {
            let vector = self.file.tensor(name).ok_or_else(|| missing(name))?.to_f32();
            if let Some(at) = vector.iter().position(|number| !number.is_finite()) {
                return Err(StageError::Input(format!(
                    "tensor {name:?}: element {at} is {}; the file is damaged",
                    vector[at]
                )));
            }
            all.extend(vector);
        }
        self.send(&names[0], bytemuck::cast_slice(&all).to_vec())
    }

    /// Rows of a matrix as tiles, of which the first begins a tile.
    fn convert(&self, name: &str, rows: Range<usize>, tiles: &mut [u8]) -> Result<(), StageError> {
        let tensor = self.file.tensor(name).ok_or_else(|| missing(name))?;
        let strip = Layout::of(tensor.quant).matrix_bytes(1, tensor.cols);
        let row = tensor.bytes.len() / tensor.rows.max(1);
        let stored = tensor.bytes[rows.start * row..rows.end * row].par_chunks(ROWS * row);
        let result = self.threads.install(|| {
            tiles.par_chunks_mut(strip).zip(stored).enumerate().try_for_each(|(i, (out, stored))| {
                let first = rows.start + i * ROWS;
                convert(tensor.quant, tensor.cols, first..first + stored.len() / row, stored, out)
            })
        });
        result.map_err(|error| StageError::Input(format!("tensor {name:?}, {error}")))
    }

    fn send(&mut self, name: &str, bytes: Vec<u8>) -> Result<Handle, StageError> {
        self.bytes += bytes.len() as u64;
        let words = bytes.len() / 4;
        let word = |word: &[u8]| u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        let part = |part: &[u8]| part.chunks_exact(4).map(word).fold(0, u32::wrapping_add);
        let sum = self.threads.install(|| bytes.par_chunks(1 << 16).map(part).reduce(|| 0, u32::wrapping_add));
        let handle = self.client.create(Bytes::from_bytes_vec(bytes));
        let found = checksum(self.client, &handle, words);
        self.proofs.push(Proof { name: name.to_owned(), words, sum, found });
        self.settle(PROOFS_MAX)?;
        Ok(handle)
    }

    /// Reads proofs back once there are `many`.
    fn settle(&mut self, many: usize) -> Result<(), StageError> {
        if self.proofs.len() < many {
            return Ok(());
        }
        self.client.flush().map_err(failed)?;
        for Proof { name, words, sum, found } in self.proofs.drain(..) {
            let found = sum_of(self.client, found)?;
            if found != sum {
                return Err(StageError::Device(format!(
                    "tensor {name:?} did not arrive: the sum of its {words} words is {found:#x}, expected {sum:#x}; the device \
                     may be out of memory"
                )));
            }
        }
        Ok(())
    }

    /// Bytes sent, after the last proof.
    pub(crate) fn finish(mut self) -> Result<u64, StageError> {
        self.settle(0)?;
        Ok(self.bytes)
    }
}

fn missing(name: &str) -> StageError {
    StageError::Input(format!("tensor {name:?} is missing"))
}

/// Cubes that take a checksum: enough to read at a device's full speed.
const CUBES: u32 = 512;
/// Units of each.
const UNITS: u32 = 256;

/// Sums of a buffer's words, one a cube.
pub(crate) fn checksum<R: Platform>(client: &ComputeClient<R>, buffer: &Handle, words: usize) -> Handle {
    let sums = client.empty(CUBES as usize * 4);
    // SAFETY: the kernel stays below `words`.
    unsafe {
        checksum_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(CUBES, 1, 1),
            CubeDim::new_1d(UNITS),
            array(buffer, words),
            array(&sums, CUBES as usize),
            words as u32,
        );
    }
    sums
}

/// The checksum of a buffer.
pub(crate) fn sum_of<R: Platform>(client: &ComputeClient<R>, sums: Handle) -> Result<u32, StageError> {
    let sums = client.read_one(sums).map_err(failed)?;
    Ok(bytemuck::pod_collect_to_vec::<u8, u32>(&sums).into_iter().fold(0, u32::wrapping_add))
}

#[cube(launch_unchecked)]
fn checksum_kernel(words: &Array<u32>, sums: &mut Array<u32>, len: u32) {
    let unit = UNIT_POS_X as usize;
    let mut sum = 0u32;
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        sum += words[i];
        i += comptime!((CUBES * UNITS) as usize);
    }
    let mut shared = SharedMemory::<u32>::new(comptime!(UNITS as usize));
    shared[unit] = sum;
    sync_cube();
    #[unroll]
    for step in 1..9u32 {
        let apart = comptime!((UNITS >> step) as usize);
        if unit < apart {
            let other = shared[unit + apart];
            shared[unit] += other;
        }
        sync_cube();
    }
    if unit == 0 {
        sums[CUBE_POS_X as usize] = shared[0];
    }
}

/// Fills a buffer with a word and proves that it is there.
pub(crate) fn fill<R: Platform>(client: &ComputeClient<R>, buffer: &Handle, words: usize) -> Result<(), StageError> {
    const WORD: u32 = 0x3c00_3c01;
    // SAFETY: the kernel stays below `words`.
    unsafe {
        fill_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(CUBES, 1, 1),
            CubeDim::new_1d(UNITS),
            array(buffer, words),
            WORD,
            words as u32,
        );
    }
    let found = sum_of(client, checksum(client, buffer, words))?;
    let expected = WORD.wrapping_mul(words as u32);
    if found == expected {
        return Ok(());
    }
    Err(StageError::Device(format!(
        "{} bytes of the device's memory do not hold what was written; it may be out of memory",
        4 * words
    )))
}

#[cube(launch_unchecked)]
fn fill_kernel(words: &mut Array<u32>, word: u32, len: u32) {
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        words[i] = word;
        i += comptime!((CUBES * UNITS) as usize);
    }
}
