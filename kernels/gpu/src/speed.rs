//! How fast a device is with the kernels that stages run: what a node says of itself to the mesh.
use std::time::{Duration, Instant};

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::bench::{ASLEEP, Speed, usual_ns};
use kernels::gpu::copy;
use kernels::quant::{QuantType, random_blocks};
use kernels::tile::{Layout, ROWS, convert};

use crate::Platform;
use crate::arithmetic::Abilities;
use crate::product::{Activations, Matrix, Target, product};

/// Rows and columns of a layer's matrices: query, keys, values, output, gate, up, down of an 8B model.
const LAYER: [(usize, usize); 7] =
    [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)];
/// Layers measured: 240 MiB, so that nothing is still in a cache when it is read again.
const LAYERS: usize = 2;
/// The format that most models are stored in.
const KIND: QuantType = QuantType::Q4K;
/// Bytes copied: far beyond any cache, and what tiles of grids take.
const COPY_BYTES: usize = 100 << 20;
/// Passes over the layers between two looks at the clock, so that waiting for the device hardly counts.
const PASSES: usize = 4;
/// Rows of a product in prefill: more and more while it is quick.
const PREFILL_ROWS: [usize; 3] = [4, 32, 256];
/// A product of more rows, eight times as many, is not tried after one that took this long.
const PREFILL_SLOW: Duration = Duration::from_millis(5);
/// No further measurement of a kind begins after this, if there are [`REPEATS_MIN`].
const MEASURE: Duration = Duration::from_millis(100);
/// Measurements of a kind at least.
const REPEATS_MIN: usize = 3;
/// Measurements of a kind at most, of which the median counts.
const REPEATS: usize = 7;
/// Idle devices run at low clocks, and take some work before they run at high ones.
const WARM_UP: Duration = Duration::from_millis(25);
/// Steps without work.
const STEPS: usize = 12;

/// How fast the products of a layer's matrices are on this device: in well under half a second once kernels are compiled, with
/// 250 MiB of its memory. `small` devices (drivers that compute on the processor) get matrices of a sixteenth.
///
/// # Errors
/// The device's.
pub(crate) fn speed<R: Platform>(client: &ComputeClient<R>, small: bool) -> Result<Speed, String> {
    let able = Abilities::of(client).map_err(|error| error.to_string())?;
    let (divisor, passes) = if small { (4, 1) } else { (1, PASSES) };
    let shapes = LAYER.map(|(rows, cols)| (rows / divisor, cols / divisor));
    let matrices: Vec<Matrix> =
        (0..LAYERS).flat_map(|_| shapes.iter().map(|&(rows, cols)| repeated(client, rows, cols))).collect();
    let most = |of: fn(&(usize, usize)) -> usize| shapes.iter().map(of).max().unwrap_or(0);
    let y = client.empty(PREFILL_ROWS[2] * most(|shape| shape.0) * 4);
    let times = |matrix: &Matrix, x: &Activations, rows: usize| {
        let target = Target { rows: &y, stride: matrix.rows, offset: 0, width: matrix.rows, bias: None, add: false };
        product(client, able, matrix, x, true, rows, &target);
    };

    let inputs: Vec<Activations> = matrices.iter().map(|matrix| Activations::new(client, 1, matrix.cols)).collect();
    let decode = timed(client, || {
        for _ in 0..passes {
            matrices.iter().zip(&inputs).for_each(|(matrix, x)| times(matrix, x, 1));
        }
    })?;
    let bytes: usize = matrices.iter().map(|m| Layout::of(m.kind).matrix_bytes(m.rows, m.cols)).sum();

    let gate = &matrices[4];
    let mut flops_s = 0.0;
    for rows in PREFILL_ROWS {
        let x = Activations::new(client, rows, gate.cols);
        let took = timed(client, || times(gate, &x, rows))?;
        flops_s = (2 * gate.rows * gate.cols * rows) as f64 / took.as_secs_f64();
        if took > PREFILL_SLOW {
            break;
        }
    }

    let tiny = repeated(client, 2 * ROWS, shapes[0].1);
    let mut steps = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        std::thread::sleep(ASLEEP);
        let start = Instant::now();
        let x = Activations::new(client, 1, tiny.cols);
        times(&tiny, &x, 1);
        let rest = y.size() - 4 * tiny.rows as u64;
        client.read_one(y.clone().offset_end(rest)).map_err(|error| format!("{error:?}"))?;
        steps.push(start.elapsed());
    }
    Ok(Speed {
        weight_bytes_s: ((bytes * passes) as f64 / decode.as_secs_f64()) as u64,
        flops_s: flops_s as u64,
        step_ns: usual_ns(steps),
    })
}

/// A matrix whose rows are 16 random ones over and over: values do not matter to the time.
fn repeated<R: Platform>(client: &ComputeClient<R>, rows: usize, cols: usize) -> Matrix {
    let stored = random_blocks(KIND, ROWS * cols / KIND.block_len(), 1);
    let mut strip = vec![0; Layout::of(KIND).matrix_bytes(ROWS, cols)];
    convert(KIND, cols, 0..ROWS, &stored, &mut strip).expect("random blocks are finite");
    let tiles = client.create(Bytes::from_bytes_vec(strip.repeat(rows / ROWS)));
    Matrix { kind: KIND, rows, cols, tiles }
}

/// Bytes a second that a copy reads and writes.
///
/// # Errors
/// The device's.
pub(crate) fn copy_speed<R: Platform>(client: &ComputeClient<R>, small: bool) -> Result<u64, String> {
    let len = COPY_BYTES / if small { 8 } else { 1 } / 4 / 512 * 512;
    let (from, to): (Handle, Handle) = (client.empty(len * 4), client.empty(len * 4));
    let took = timed(client, || (0..PASSES).for_each(|_| copy(client, &from, &to, len)))?;
    Ok(((PASSES * 8 * len) as f64 / took.as_secs_f64()) as u64)
}

/// The median time of `launch` with all it launches, after those that compile it and wake the device.
fn timed<R: Platform>(client: &ComputeClient<R>, mut launch: impl FnMut()) -> Result<Duration, String> {
    let mut once = || -> Result<Duration, String> {
        let start = Instant::now();
        launch();
        client.flush().map_err(|error| format!("{error:?}"))?;
        cubecl::future::block_on(client.sync()).map_err(|error| format!("{error:?}"))?;
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
