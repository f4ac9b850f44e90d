//! Benchmarks a device with the kernels that stages run; a node advertises the rates to the mesh.
//!
//! Decode is measured like stages run it: as a replayed graph if the runtime has graphs, else launch by launch. Launch by launch,
//! the host runs ahead of the device, so matrix products hide the launch cost; in a graph each launch adds to the time. So the time
//! of small launches is subtracted from the memory time only for graphs.
use std::time::{Duration, Instant};

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::bench::{IDLE, Speed, lower_quartile_ns};
use kernels::order::POSITIONS;
use kernels::quant::{QuantType, random_blocks};
use kernels::tile::{Layout, ROWS, convert};
use kernels_gpu_grids::copy;

use crate::arithmetic::Features;
use crate::attention::{Heads, LayerHeads, Pages, Partials, Places, attend};
use crate::graph::Graphs;
use crate::load::fill;
use crate::platform::Platform;
use crate::product::operands::{Activations, Matrix, Target};
use crate::product::product;
use crate::rows::RowFormats;

/// Rows and columns of the matrices of a layer of an 8B model: QKV, output, gate with up, down.
const LAYER: [(usize, usize); 4] = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)];
/// Launches of a layer besides its matrices: two norms, KV cache writes, two of attention, and the gate if no product includes it.
const SMALL: usize = 6;
/// Layers measured: 240 MiB, so that no weight is still in a cache when it is read again.
const LAYERS: usize = 2;
/// The format of most models.
const KIND: QuantType = QuantType::Q4K;
/// Attention shape of models with 14 and 32 billion weights. In other models four to eight query heads share a key head; more sharing
/// means more arithmetic per byte of the KV cache. Five is in the middle.
const HEADS: Heads = Heads { heads: 40, kv_heads: 8, head_dim: 128, pairs: 64, halves: true, half_cells: true };
/// Pages of the sequence whose KV cache is read.
const BLOCKS: usize = 64;
/// Layers of its KV cache: 224 MiB, larger than any cache of a device.
const CACHED: usize = 7;
/// Bytes copied: far larger than any cache, and about the size of a grid tile.
const COPY_BYTES: usize = 100 << 20;
/// Copies per measurement.
const COPIES: usize = 12;
/// Passes over the layers per measurement, so that waiting for the device is negligible.
const PASSES: usize = 4;
/// Rows of the prefill products, tried in this order while they are fast.
const PREFILL_ROWS: [usize; 3] = [4, 32, 256];
/// After a product that took longer, the next larger one (eight times the rows) is not tried.
const PREFILL_SLOW: Duration = Duration::from_millis(5);
/// If the largest product is faster, [`PREFILL_PRODUCTS`] are measured together, so that waiting for the device is negligible.
const PREFILL_QUICK: Duration = Duration::from_millis(2);
/// Products per measurement in that case.
const PREFILL_PRODUCTS: usize = 8;
/// No repetition starts after this time once there are [`REPEATS_MIN`].
const MEASURE: Duration = Duration::from_millis(60);
/// Minimum repetitions of a measurement.
const REPEATS_MIN: usize = 3;
/// Maximum repetitions of a measurement; the median counts.
const REPEATS: usize = 7;
/// Idle devices run at low clocks and need some work to raise them.
const WARM_UP: Duration = Duration::from_millis(25);
/// Repetitions of the step without work.
const STEPS: usize = 12;

/// Measures layers without attention on device `number` of a runtime. Takes well under 0.5 s once kernels are compiled, and 280 MiB
/// of device memory. `small` devices (drivers that compute on the CPU) get matrices of 1/16 the size.
///
/// # Errors
/// The device failed.
pub(crate) fn speed<R: Platform>(client: &ComputeClient<R>, number: usize, small: bool) -> Result<Speed, String> {
    let able = Features::of(client).map_err(|error| error.to_string())?;
    let (divisor, passes) = if small { (4, 1) } else { (1, PASSES) };
    let shapes = LAYER.map(|(rows, cols)| (rows / divisor, cols / divisor));
    let matrices: Vec<Matrix> =
        (0..LAYERS).flat_map(|_| shapes.iter().map(|&(rows, cols)| repeated(client, rows, cols))).collect();
    let tiny = repeated(client, 2 * ROWS, shapes[0].1);
    let gate = &matrices[2];
    let y = client.empty(PREFILL_ROWS[2] * gate.rows * 4);
    let inputs: Vec<Activations> = matrices.iter().map(|matrix| Activations::new(client, 1, matrix.cols)).collect();
    let mut runner = Runner::new(client, able, number)?;

    let layers =
        |small| Layers { able, matrices: &matrices, inputs: &inputs, tiny: (&tiny, &inputs[0]), y: &y, passes, small };
    let products = runner.time(&layers(0))?.as_secs_f64();
    let whole = runner.time(&layers(SMALL))?.as_secs_f64();
    let count = (passes * LAYERS) as f64;
    let launch = (whole - products).max(0.0) / (count * SMALL as f64);
    let (replayed, launches) = if runner.replays() { (LAYER.len() as f64, LAYER.len() + SMALL) } else { (0.0, SMALL) };
    let bytes: usize = matrices.iter().map(|m| Layout::of(m.kind).matrix_bytes(m.rows, m.cols)).sum();
    // Bounds the effect of noise: the difference could be near 0 or negative.
    let reading = (products - count * replayed * launch).max(products / 4.0);

    let mut flops_s = 0.0;
    for rows in PREFILL_ROWS {
        let x = Activations::new(client, rows, gate.cols);
        let time =
            |products: usize| timed(client, || (0..products).for_each(|_| multiply(client, able, gate, &x, rows, &y)));
        let mut took = time(1)?;
        if took < PREFILL_QUICK && rows == PREFILL_ROWS[2] {
            took = time(PREFILL_PRODUCTS)? / PREFILL_PRODUCTS as u32;
        }
        flops_s = (2 * gate.rows * gate.cols * rows) as f64 / took.as_secs_f64();
        if took > PREFILL_SLOW {
            break;
        }
    }

    Ok(Speed {
        weight_bytes_s: ((bytes * passes) as f64 / reading) as u64,
        flops_s: flops_s as u64,
        step_ns: runner.step_ns(&tiny, &y)?,
        layer_ns: (launches as f64 * launch * 1e9) as u64,
    })
}

/// Bytes of the KV cache per second that attention of one row reads, in 8-bit arithmetic. Takes 0.1 s once kernels are compiled, and
/// 230 MiB of device memory. `small`: as in [`speed`].
///
/// # Errors
/// The device failed.
pub(crate) fn cache_speed<R: Platform>(client: &ComputeClient<R>, number: usize, small: bool) -> Result<u64, String> {
    let able = Features::of(client).map_err(|error| error.to_string())?;
    let (blocks, layers) = if small { (BLOCKS / 8, 2) } else { (BLOCKS, CACHED) };
    let bytes = blocks * HEADS.page_bytes();
    let pages: Vec<Pages> = (0..layers).map(|_| Pages { pages: client.empty(bytes), count: blocks }).collect();
    for pages in &pages {
        fill(client, &pages.pages, bytes / 4).map_err(|error| error.to_string())?;
    }
    let words = |words: Vec<u32>| client.create_from_slice(bytemuck::cast_slice(&words));
    let tables = words((0..blocks as u32).collect());
    let row_at = |position: usize| Places {
        count: 1,
        rows: words(vec![position as u32, 0]),
        tables: tables.clone(),
        tables_len: blocks,
        blocks: position / POSITIONS + 1,
    };
    let queries = client.create_from_slice(bytemuck::cast_slice(&[0.01f32; HEADS.queries()]));
    let floats = |numbers: usize| client.empty(numbers * 4);
    let partials =
        Partials { values: floats(blocks * HEADS.queries()), sums: floats(blocks * HEADS.heads * 2), room: blocks };
    let x = Activations::new(client, 1, HEADS.queries());
    let attends = |position: usize| Attends {
        able,
        pages: &pages,
        places: row_at(position),
        queries: &queries,
        partials: &partials,
        x: &x,
    };
    let mut runner = Runner::new(client, able, number)?;
    let all = runner.time(&attends(blocks * POSITIONS - 1))?.as_secs_f64();
    // Subtract attention over an empty cache: it is part of the fixed time per layer.
    let empty = if runner.replays() { runner.time(&attends(0))?.as_secs_f64() } else { 0.0 };
    Ok(((layers * bytes) as f64 / (all - empty).max(all / 4.0)) as u64)
}

/// Work that can be launched on any client, so that it can be recorded.
trait Recorded {
    fn launch<R: Platform>(&self, client: &ComputeClient<R>);
}

/// Layers without attention, for one row.
struct Layers<'a> {
    able: Features,
    /// [`LAYER`] for each layer.
    matrices: &'a [Matrix],
    inputs: &'a [Activations],
    /// A product that takes little more than its launch.
    tiny: (&'a Matrix, &'a Activations),
    y: &'a Handle,
    passes: usize,
    /// Launches of `tiny` per layer.
    small: usize,
}

impl Recorded for Layers<'_> {
    fn launch<R: Platform>(&self, client: &ComputeClient<R>) {
        for _ in 0..self.passes {
            for (matrices, inputs) in self.matrices.chunks(LAYER.len()).zip(self.inputs.chunks(LAYER.len())) {
                matrices.iter().zip(inputs).for_each(|(matrix, x)| multiply(client, self.able, matrix, x, 1, self.y));
                (0..self.small).for_each(|_| multiply(client, self.able, self.tiny.0, self.tiny.1, 1, self.y));
            }
        }
    }
}

/// Attention of one row, in each layer.
struct Attends<'a> {
    able: Features,
    pages: &'a [Pages],
    places: Places,
    queries: &'a Handle,
    partials: &'a Partials,
    x: &'a Activations,
}

impl Recorded for Attends<'_> {
    fn launch<R: Platform>(&self, client: &ComputeClient<R>) {
        let layer = LayerHeads {
            biases: None,
            norms: None,
            rotary: self.queries, // not read by `attend`
            positions: 1,
            window: None,
            cap: None,
            sinks: None,
            eps: 1e-5,
        };
        let wanted = RowFormats { floats: false, integers: true };
        for pages in self.pages {
            let (places, queries, partials) = (&self.places, self.queries, self.partials);
            attend(client, self.able, HEADS, &layer, places, queries, pages, partials, wanted, self.x);
        }
    }
}

/// Multiplies `rows` rows by a matrix, into the beginning of `y`.
fn multiply<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    matrix: &Matrix,
    x: &Activations,
    rows: usize,
    y: &Handle,
) {
    let target =
        Target { rows: y, stride: matrix.rows, offset: 0, width: matrix.rows, bias: None, add: false, parts: None };
    product(client, able, matrix, x, true, rows, &target);
}

/// Runs launches like stages do.
struct Runner<'a, R: Platform> {
    client: &'a ComputeClient<R>,
    able: Features,
    /// `None` if the runtime has no graphs.
    graphs: Option<Graphs>,
}

impl<'a, R: Platform> Runner<'a, R> {
    fn new(client: &'a ComputeClient<R>, able: Features, number: usize) -> Result<Self, String> {
        let graphs = if able.matrices { R::graphs(client, number) } else { Ok(None) };
        Ok(Self { client, able, graphs: graphs.map_err(|error| error.to_string())? })
    }

    fn replays(&self) -> bool {
        self.graphs.is_some()
    }

    /// The median total time of the launches.
    fn time(&mut self, launches: &impl Recorded) -> Result<Duration, String> {
        let Some(graphs) = &mut self.graphs else {
            return timed(self.client, || launches.launch(self.client));
        };
        let text = |error: kernels_models::stage::StageError| error.to_string();
        graphs.join().map_err(text)?; // CubeCL fills the buffers on another stream
        let graph = graphs.record(|recorder| launches.launch(recorder)).map_err(text)?;
        median(|| graphs.replay(&graph).map_err(text))
    }

    /// Latency in nanoseconds of a nearly empty step on an idle device: upload, launch, read back.
    fn step_ns(&mut self, tiny: &Matrix, y: &Handle) -> Result<u64, String> {
        let text = |error: kernels_models::stage::StageError| error.to_string();
        let mut steps = Vec::with_capacity(STEPS);
        let (client, able) = (self.client, self.able);
        let Some(graphs) = &mut self.graphs else {
            let read = y.clone().offset_end(y.size() - 4 * tiny.rows as u64);
            for _ in 0..STEPS {
                std::thread::sleep(IDLE);
                let start = Instant::now();
                let x = Activations::new(client, 1, tiny.cols);
                multiply(client, able, tiny, &x, 1, y);
                client.read_one(read.clone()).map_err(|error| format!("{error:?}"))?;
                steps.push(start.elapsed());
            }
            return Ok(lower_quartile_ns(steps));
        };
        let x = Activations::new(client, 1, tiny.cols);
        graphs.join().map_err(text)?;
        let graph = graphs.record(|recorder| multiply(recorder, able, tiny, &x, 1, y)).map_err(text)?;
        let (words, out) = (graphs.buffer(x.floats.clone()).map_err(text)?, graphs.buffer(y.clone()).map_err(text)?);
        let (mut sent, mut got) = (graphs.pinned(tiny.cols).map_err(text)?, graphs.pinned(tiny.rows).map_err(text)?);
        let mark = graphs.mark().map_err(text)?;
        for _ in 0..STEPS {
            std::thread::sleep(IDLE);
            let start = Instant::now();
            graphs.queue((sent.words(), &words, 0), &graph, (got.words(), &out, None), &mark).map_err(text)?;
            graphs.wait(&mark).map_err(text)?;
            steps.push(start.elapsed());
        }
        Ok(lower_quartile_ns(steps))
    }
}

/// A matrix that repeats 16 random rows: the values do not affect timings.
fn repeated<R: Platform>(client: &ComputeClient<R>, rows: usize, cols: usize) -> Matrix {
    let stored = random_blocks(KIND, ROWS * cols / KIND.block_len(), 1);
    let mut strip = vec![0; Layout::of(KIND).matrix_bytes(ROWS, cols)];
    convert(KIND, cols, 0..ROWS, &stored, &mut strip).expect("random blocks are finite");
    let tiles = client.create(Bytes::from_bytes_vec(strip.repeat(rows / ROWS)));
    Matrix { kind: KIND, rows, cols, tiles }
}

/// Bytes per second that a copy reads and writes in total.
///
/// # Errors
/// The device failed.
pub(crate) fn copy_speed<R: Platform>(client: &ComputeClient<R>, small: bool) -> Result<u64, String> {
    let len = COPY_BYTES / if small { 8 } else { 1 } / 4 / 512 * 512;
    let (from, to): (Handle, Handle) = (client.empty(len * 4), client.empty(len * 4));
    let took = timed(client, || (0..COPIES).for_each(|_| copy(client, &from, &to, len)))?;
    Ok(((COPIES * 8 * len) as f64 / took.as_secs_f64()) as u64)
}

/// The median time of `launch` until its kernels are complete, after runs that compile them and raise the device's clocks.
fn timed<R: Platform>(client: &ComputeClient<R>, mut launch: impl FnMut()) -> Result<Duration, String> {
    median(|| {
        launch();
        client.flush().map_err(|error| format!("{error:?}"))?;
        cubecl::future::block_on(client.sync()).map_err(|error| format!("{error:?}"))
    })
}

/// The median time of `run`, after one run to compile and [`WARM_UP`] to raise the device's clocks.
fn median(mut run: impl FnMut() -> Result<(), String>) -> Result<Duration, String> {
    let mut once = || -> Result<Duration, String> {
        let start = Instant::now();
        run()?;
        Ok(start.elapsed())
    };
    once()?;
    let compiled = Instant::now();
    while compiled.elapsed() < WARM_UP {
        once()?;
    }
    let (began, mut times) = (Instant::now(), Vec::with_capacity(REPEATS));
    while times.len() < REPEATS_MIN || (times.len() < REPEATS && began.elapsed() < MEASURE) {
        times.push(once()?);
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}
