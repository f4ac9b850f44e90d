//! Loads weights from a file to a device: converts them to tiles on all threads and verifies them by a checksum on the device.
//!
//! Devices do not report failed allocations; they compute with whatever the memory holds. Hence the checksum of every upload.
//! Next: `upload.rs`, the upload to CUDA devices.
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::time::Instant;

use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS, word_checksum};
use kernels_models::stage::StageError;
use kernels_models::weights::ModelFile;
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::engine::memory::{Memory, buffer_max};
use crate::error::failed;
use crate::platform::{Platform, array};
use crate::product::operands::Matrix;
use crate::shapes::is_router;
use crate::upload::Upload;

pub(crate) mod random;

use random::TileRow;

/// Where a stage's matrices come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weights {
    /// The model file.
    File,
    /// Generated on the device.
    Random,
}

/// Time of each phase of loading a stage, in seconds. Overlapped work counts only while the loading thread waits for it: a copy
/// hidden behind conversion counts nowhere.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadPhases {
    /// Opening the file and the device and creating the client.
    pub open_s: f64,
    /// Reading the file and converting blocks to tiles.
    pub convert_s: f64,
    /// Waiting for copies to the device, or passing data to the runtime if that does the copying.
    pub upload_s: f64,
    /// Verifying the uploads and the pages of the KV cache.
    pub proof_s: f64,
    /// Preparing kernels and graphs; not those that are compiled on first use.
    pub kernels_s: f64,
    /// The whole load, including time not listed above.
    pub total_s: f64,
}

impl fmt::Display for LoadPhases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { open_s, convert_s, upload_s, proof_s, kernels_s, total_s } = self;
        write!(
            f,
            "{total_s:.2} s: {open_s:.2} to open the device, {convert_s:.2} to read and convert, {upload_s:.2} to upload, \
             {proof_s:.2} to verify, {kernels_s:.2} to prepare kernels"
        )
    }
}

/// Uploads the tensors of a file to a device.
///
/// On CUDA the host holds two pinned slabs of at most [`SLAB_BYTES`], whatever the size of a matrix, plus the file rows that its
/// threads are converting. Other runtimes take a whole matrix and copy it: the host then holds up to three times the largest
/// matrix.
pub(crate) struct Loader<'a, R: Platform> {
    memory: &'a Memory<'a, R>,
    file: &'a ModelFile,
    threads: &'a ThreadPool,
    route: Route,
    /// Bytes sent.
    bytes: u64,
    pub(crate) phases: LoadPhases,
    /// Uploads without a device checksum yet, in the order of their copies.
    sent: Vec<Sent>,
    /// Device checksums that are being computed.
    proofs: Vec<Proof>,
}

/// How a matrix is uploaded.
enum Route {
    /// Converted into pinned slabs, which are copied.
    Slabs(Upload),
    /// Converted as a whole, and passed to the runtime.
    Whole,
    /// Generated on the device from 16 random rows of its format and columns.
    Random(BTreeMap<(QuantType, usize), TileRow>),
}

/// An upload and its checksum on the host.
struct Sent {
    name: String,
    words: usize,
    sum: u32,
    buffer: Handle,
    /// Number of the copy that completes it; 0 if CubeCL orders it before later launches.
    copy: u64,
}

/// A checksum on the host, and the same on the device, not read back yet.
struct Proof {
    name: String,
    words: usize,
    sum: u32,
    found: Handle,
}

/// Rows of several matrices that are stored as one matrix.
struct Joined<'n> {
    kind: QuantType,
    rows: usize,
    cols: usize,
    pieces: Vec<(&'n String, Range<usize>)>,
}

impl Joined<'_> {
    /// Bytes of its tiles.
    fn bytes(&self) -> usize {
        Layout::of(self.kind).matrix_bytes(self.rows, self.cols)
    }
}

/// A matrix whose outputs are a part of a wider output row: see [`crate::product::operands::Target`].
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) matrix: Matrix,
    /// Its first element in the output row.
    pub(crate) offset: usize,
    /// Elements, without the padding of the last tile.
    pub(crate) width: usize,
}

/// The first `taken` of `of` equal parts of a tensor's rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) taken: usize,
    pub(crate) of: usize,
}

impl Share {
    const ALL: Self = Self { taken: 1, of: 1 };

    fn part(self, rows: usize) -> usize {
        rows / self.of * self.taken
    }
}

/// Maximum bytes of a pinned slab. Copying one takes some milliseconds, so starting the copy (20 µs) is negligible; pinning two
/// takes some 50 ms. Small in tests, so that small models need several slabs.
const SLAB_BYTES: usize = if cfg!(test) { 16 << 10 } else { 64 << 20 };
/// Maximum pending device checksums: each takes a buffer of [`CUBES`] words.
const PROOFS_MAX: usize = 64;

impl<'a, R: Platform> Loader<'a, R> {
    /// # Errors
    /// The file has changed since it was opened, the host has no memory to pin, or the device failed.
    pub(crate) fn new(
        memory: &'a Memory<'a, R>,
        file: &'a ModelFile,
        weights: Weights,
        threads: &'a ThreadPool,
    ) -> Result<Self, StageError> {
        file.check_unchanged()?;
        let route = match weights {
            Weights::Random => Route::Random(BTreeMap::new()),
            Weights::File => match R::upload(memory.client, memory.number, slab_bytes(file))? {
                Some(upload) => Route::Slabs(upload),
                None => Route::Whole,
            },
        };
        let phases = LoadPhases::default();
        Ok(Self { memory, file, threads, route, bytes: 0, phases, sent: Vec::new(), proofs: Vec::new() })
    }

    /// Loads matrices with the same input rows, side by side. Those of one format are stored as one matrix, up to the buffer limit.
    pub(crate) fn matrices(&mut self, names: &[String]) -> Result<Vec<Part>, StageError> {
        self.matrices_of(names, Share::ALL)
    }

    /// As [`Self::matrices`], with a share of the rows of each.
    pub(crate) fn matrices_of(&mut self, names: &[String], share: Share) -> Result<Vec<Part>, StageError> {
        let (mut parts, mut offset) = (Vec::new(), 0);
        for joined in self.joined(names, share)? {
            let tiles = self.matrix(&joined)?;
            let Joined { kind, rows, cols, .. } = joined;
            parts.push(Part { matrix: Matrix { kind, rows, cols, tiles }, offset, width: rows });
            offset += rows;
        }
        Ok(parts)
    }

    /// Groups the rows of matrices into the matrices that are stored.
    fn joined<'n>(&self, names: &'n [String], share: Share) -> Result<Vec<Joined<'n>>, StageError> {
        let most = usize::try_from(buffer_max(self.memory.client)).unwrap_or(usize::MAX);
        let mut all: Vec<Joined<'n>> = Vec::new();
        for name in names {
            let tensor = self.file.tensor(name).ok_or_else(|| missing(name))?;
            let (kind, cols) = (tensor.quant, tensor.cols);
            let layout = Layout::of(kind);
            let rows_max = (most / layout.matrix_bytes(1, cols)).max(1) * ROWS;
            let end = share.part(tensor.rows);
            for first in (0..end).step_by(rows_max) {
                let rows = first..end.min(first + rows_max);
                match all.last_mut() {
                    // Nothing is appended to a matrix that does not fill its last tile.
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

    fn matrix(&mut self, joined: &Joined<'_>) -> Result<Handle, StageError> {
        let (file, threads, phases) = (self.file, self.threads, &mut self.phases);
        let name = joined.pieces[0].0;
        let (buffer, sum, copy) = match &mut self.route {
            Route::Slabs(upload) => {
                let buffer = self.memory.buffer(joined.bytes(), name)?;
                let (sum, copy) = by_slabs(upload, file, threads, joined, &buffer, phases)?;
                (buffer, sum, copy)
            }
            Route::Random(strips) if !is_router(name) => {
                let (buffer, sum) = random::matrix(self.memory, strips, joined)?;
                (buffer, sum, 0)
            }
            // A router is in the file even if other matrices are generated.
            Route::Whole | Route::Random(_) => {
                let (tiles, sum) = timed(&mut phases.convert_s, || whole(file, threads, joined))?;
                (timed(&mut phases.upload_s, || self.memory.created(tiles, name))?, sum, 0)
            }
        };
        self.sent(Sent { name: name.clone(), words: joined.bytes() / 4, sum, buffer: buffer.clone(), copy })?;
        Ok(buffer)
    }

    /// Loads a vector as f32.
    pub(crate) fn vector(&mut self, name: &str) -> Result<Handle, StageError> {
        self.vectors(&[name.to_owned()])
    }

    /// Loads vectors as f32, concatenated.
    pub(crate) fn vectors(&mut self, names: &[String]) -> Result<Handle, StageError> {
        self.vectors_of(names, Share::ALL)
    }

    /// As [`Self::vectors`], with a share of each.
    pub(crate) fn vectors_of(&mut self, names: &[String], share: Share) -> Result<Handle, StageError> {
        let mut all = Vec::new();
        for name in names {
            let vector = self.file.tensor(name).ok_or_else(|| missing(name))?.to_finite_f32()?;
            all.extend(&vector[..share.part(vector.len())]);
        }
        self.numbers(&names[0], &all)
    }

    /// A vector of ones: weights of a norm without weights.
    pub(crate) fn ones(&mut self, count: usize) -> Result<Handle, StageError> {
        self.numbers("ones", &vec![1.0; count])
    }

    fn numbers(&mut self, name: &str, all: &[f32]) -> Result<Handle, StageError> {
        self.words(name, bytemuck::cast_slice(all))
    }

    /// Loads words that are not in the file.
    pub(crate) fn words(&mut self, name: &str, all: &[u32]) -> Result<Handle, StageError> {
        let words = all.len();
        let bytes: Vec<u8> = bytemuck::cast_slice(all).to_vec();
        let sum = word_checksum(&bytes);
        let buffer = timed(&mut self.phases.upload_s, || self.memory.created(bytes, name))?;
        self.sent(Sent { name: name.to_owned(), words, sum, buffer: buffer.clone(), copy: 0 })?;
        Ok(buffer)
    }

    /// Records an upload, and starts device checksums of all completed uploads.
    fn sent(&mut self, sent: Sent) -> Result<(), StageError> {
        self.bytes += 4 * sent.words as u64;
        self.sent.push(sent);
        let done = match &self.route {
            Route::Slabs(upload) => upload.done(),
            Route::Whole | Route::Random(_) => 0,
        };
        self.sum_up(done);
        self.settle(PROOFS_MAX)
    }

    /// Starts device checksums of the uploads up to copy `done`. Checksums run on another stream than copies, so only completed
    /// copies may be summed.
    fn sum_up(&mut self, done: u64) {
        let (arrived, waiting): (Vec<Sent>, Vec<Sent>) = self.sent.drain(..).partition(|sent| sent.copy <= done);
        self.sent = waiting;
        let client = self.memory.client;
        self.proofs.extend(arrived.into_iter().map(|Sent { name, words, sum, buffer, .. }| {
            let found = checksum(client, &buffer, words);
            Proof { name, words, sum, found }
        }));
    }

    /// Reads back and compares the checksums if at least `many` are pending.
    fn settle(&mut self, many: usize) -> Result<(), StageError> {
        if self.proofs.len() < many {
            return Ok(());
        }
        let start = Instant::now();
        let client = self.memory.client;
        client.flush().map_err(failed)?;
        for Proof { name, words, sum, found } in self.proofs.drain(..) {
            let found = sum_of(client, found)?;
            if found != sum {
                return Err(StageError::Device(format!(
                    "the upload of tensor {name:?} is corrupt: the sum of its {words} words is {found:#x}, expected {sum:#x}; the \
                     device may be out of memory: give the stage fewer layers"
                )));
            }
        }
        self.phases.proof_s += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// Verifies all uploads. Returns the bytes sent and the phases.
    pub(crate) fn finish(mut self) -> Result<(u64, LoadPhases), StageError> {
        if let Route::Slabs(upload) = &mut self.route {
            timed(&mut self.phases.upload_s, || upload.finish())?;
        }
        self.sum_up(u64::MAX);
        self.settle(0)?;
        self.file.check_unchanged()?; // the header was valid for the whole read
        Ok((self.bytes, self.phases))
    }
}

/// Slab size for a file: its largest matrix, at most [`SLAB_BYTES`], and at least the 16 widest rows (18 MiB, because a row of a
/// file has at most 1 MiB).
fn slab_bytes(file: &ModelFile) -> usize {
    let matrices = || file.tensors().iter().filter(|tensor| tensor.rows > 1);
    let most = |rows: fn(usize) -> usize| {
        matrices().map(|t| Layout::of(t.quant).matrix_bytes(rows(t.rows), t.cols)).max().unwrap_or(0)
    };
    most(|rows| rows).min(SLAB_BYTES).max(most(|_| 1))
}

/// Converts a matrix slab by slab while the previous slab is copied to `buffer`. Returns the sum of its words and the number of
/// the last copy.
fn by_slabs(
    upload: &mut Upload,
    file: &ModelFile,
    threads: &ThreadPool,
    joined: &Joined<'_>,
    buffer: &Handle,
    phases: &mut LoadPhases,
) -> Result<(u32, u64), StageError> {
    let layout = Layout::of(joined.kind);
    let rows_max = (upload.slab_bytes() / layout.matrix_bytes(1, joined.cols)).max(1) * ROWS;
    let mut address = timed(&mut phases.upload_s, || upload.address(buffer))?;
    let (mut sum, mut copy) = (0u32, 0);
    for (name, rows) in &joined.pieces {
        for first in rows.clone().step_by(rows_max) {
            let rows = first..rows.end.min(first + rows_max);
            let len = layout.matrix_bytes(rows.len(), joined.cols);
            let slab = timed(&mut phases.upload_s, || upload.slab())?;
            let part = timed(&mut phases.convert_s, || converted(file, threads, name, rows, &mut slab[..len]))?;
            sum = sum.wrapping_add(part);
            copy = upload.copy(len, buffer, address)?;
            address += len as u64;
        }
    }
    Ok((sum, copy))
}

/// The tiles of a matrix, and the sum of their words.
fn whole(file: &ModelFile, threads: &ThreadPool, joined: &Joined<'_>) -> Result<(Vec<u8>, u32), StageError> {
    let (mut tiles, mut sum) = (vec![0; joined.bytes()], 0u32);
    let mut rest = tiles.as_mut_slice();
    for (name, rows) in &joined.pieces {
        let (out, behind) = rest.split_at_mut(Layout::of(joined.kind).matrix_bytes(rows.len(), joined.cols));
        sum = sum.wrapping_add(converted(file, threads, name, rows.clone(), out)?);
        rest = behind;
    }
    Ok((tiles, sum))
}

/// Reads and converts rows of a matrix on all threads; the first row must begin a tile. Returns the sum of the words, computed
/// while they are in the CPU cache.
fn converted(
    file: &ModelFile,
    threads: &ThreadPool,
    name: &str,
    rows: Range<usize>,
    tiles: &mut [u8],
) -> Result<u32, StageError> {
    /// What a thread reads and converts per call: more would leave the cache before the checksum, less would cost too many calls.
    const PIECE_BYTES: usize = 128 << 10;
    let tensor = file.tensor(name).ok_or_else(|| missing(name))?;
    let rows_each = (PIECE_BYTES / (ROWS * tensor.row_bytes())).max(1) * ROWS;
    let piece = Layout::of(tensor.quant).matrix_bytes(rows_each, tensor.cols);
    threads.install(|| {
        let sums = tiles.par_chunks_mut(piece).enumerate().map(|(i, out)| {
            let first = rows.start + i * rows_each;
            tensor.read_tiles(first..rows.end.min(first + rows_each), out)?;
            Ok(word_checksum(out))
        });
        sums.try_reduce(|| 0, |a, b| Ok(a.wrapping_add(b)))
    })
}

/// Runs `work` and adds its duration to `seconds`.
pub(crate) fn timed<T>(seconds: &mut f64, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = work();
    *seconds += start.elapsed().as_secs_f64();
    done
}

fn missing(name: &str) -> StageError {
    StageError::Input(format!("tensor {name:?} is missing"))
}

/// Cubes of a checksum: enough to read at the device's full bandwidth.
const CUBES: u32 = 512;
/// Units per cube.
const UNITS: u32 = 256;

/// Starts to sum a buffer's words: one partial sum per cube, for [`sum_of`].
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

/// Reads back the partial sums of [`checksum`] and adds them.
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

/// Fills a buffer with a word and verifies it, to check that the memory exists.
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
        "{} bytes of device memory do not hold what was written; the device may be out of memory",
        4 * words
    )))
}

/// Copies `words` words of a buffer to another, there from word `start` on.
pub(crate) fn write<R: Platform>(client: &ComputeClient<R>, from: &Handle, to: &Handle, start: usize, words: usize) {
    // SAFETY: the kernel stays below `words`, and the caller asks for words within both buffers.
    unsafe {
        write_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(CUBES, 1, 1),
            CubeDim::new_1d(UNITS),
            array(from, words),
            array(to, start + words),
            start as u32,
            words as u32,
        );
    }
}

#[cube(launch_unchecked)]
fn write_kernel(from: &Array<u32>, to: &mut Array<u32>, start: u32, len: u32) {
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        to[start as usize + i] = from[i];
        i += comptime!((CUBES * UNITS) as usize);
    }
}

#[cube(launch_unchecked)]
fn fill_kernel(words: &mut Array<u32>, word: u32, len: u32) {
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        words[i] = word;
        i += comptime!((CUBES * UNITS) as usize);
    }
}
