//! What a device reaches: bytes of weights per second of the matrix-vector kernel beside a plain copy, in one run.
use std::time::{Duration, Instant};

use cubecl::prelude::*;

use super::{Matrix, Packed, copy, matvec, packed_bytes};
use crate::bench::{ASLEEP, Speed, usual_ns};
use crate::quant::{QuantType, random_blocks};

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Format of the matrix; `None` for the copy.
    pub quant: Option<QuantType>,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Median time of one operation.
    pub seconds: f64,
    /// Weight bytes read (the copy: read and written) per second.
    pub bytes_per_second: f64,
}

/// More than any cache holds: what is measured must come from memory.
const WORKING_BYTES: u64 = 512 << 20;
/// Measurements, of which the median counts.
const REPEATS: usize = 7;
/// Bytes of random blocks that a matrix repeats: values do not matter to the time.
const PATTERN_BYTES: usize = 1 << 20;

/// Copies `bytes` from one buffer to another.
///
/// # Errors
/// The device's.
pub fn copy_figure<R: Runtime>(client: &ComputeClient<R>, bytes: usize) -> Result<Figure, String> {
    let len = bytes / 4 / 512 * 512;
    let (from, to) = (client.empty(len * 4), client.empty(len * 4));
    let seconds = median(client, 4, || copy(client, &from, &to, len))?;
    Ok(Figure { quant: None, rows: 1, cols: len, seconds, bytes_per_second: 8.0 * len as f64 / seconds })
}

/// One row times a matrix `[rows, cols]`, over enough copies of it that none stays in a cache.
///
/// # Errors
/// The device's, and shapes without a packed form.
pub fn product_figure<R: Runtime>(
    client: &ComputeClient<R>,
    quant: QuantType,
    rows: usize,
    cols: usize,
) -> Result<Figure, String> {
    let bytes = packed_bytes(quant, rows, cols);
    let copies = (WORKING_BYTES / bytes).clamp(1, 64) as usize;
    let pattern = random_blocks(quant, PATTERN_BYTES / quant.block_bytes(), 1);
    let stored: Vec<u8> = pattern.into_iter().cycle().take(rows * quant.row_bytes(cols).unwrap_or(0)).collect();
    let packed = Packed::new(quant, rows, cols, &stored).map_err(|error| error.to_string())?;
    let plane = |words: &[i32]| (client.create_from_slice(bytemuck::cast_slice(words)), words.len());
    let matrices: Vec<Matrix> = (0..copies)
        .map(|_| Matrix { quant, rows, cols, quants: plane(&packed.quants), scales: plane(&packed.scales) })
        .collect();
    let x = client.create_from_slice(bytemuck::cast_slice(&vec![0.5f32; cols]));
    let mut next = 0;
    let seconds = median(client, copies.max(8), || {
        matvec(client, &matrices[next % copies], &x, 1);
        next += 1;
    })?;
    Ok(Figure { quant: Some(quant), rows, cols, seconds, bytes_per_second: bytes as f64 / seconds })
}

/// Rows and columns of a layer's matrices: query, keys, values, output, gate, up, down of an 8B model.
const LAYER: [(usize, usize); 7] =
    [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)];
/// Layers measured: 234 MiB, so that nothing is still in a cache when it is read again.
const LAYERS: usize = 2;
/// The format that most models are stored in.
const LAYER_QUANT: QuantType = QuantType::Q4K;
/// Rows of random blocks that a matrix repeats: values do not matter to the time.
const STRIPE: usize = 16;
/// Passes over the layers between two looks at the clock, so that waiting for the device hardly counts.
const PASSES: usize = 4;
/// Rows of a product in prefill: more and more while it is quick, up to what a stage takes in one pass.
const PREFILL_ROWS: [usize; 3] = [4, 32, 256];
/// A product of more rows, eight times as many, is not tried after one that took this long.
const PREFILL_SLOW: Duration = Duration::from_millis(5);
/// No further measurement of a kind begins after this, if there are [`REPEATS_MIN`].
const MEASURE: Duration = Duration::from_millis(100);
/// Measurements of a kind at least.
const REPEATS_MIN: usize = 3;
/// Idle devices run at low clocks, and take some work before they run at high ones.
const WARM_UP: Duration = Duration::from_millis(25);
/// Steps without work.
const STEPS: usize = 12;

/// How fast the products of a layer's matrices are on this device: in well under half a second once kernels are compiled, with
/// 240 MiB of its memory. `small` devices (drivers that compute on the processor) get matrices of a sixteenth.
///
/// # Errors
/// The device's.
pub fn speed<R: Runtime>(client: &ComputeClient<R>, small: bool) -> Result<Speed, String> {
    let (divisor, passes) = if small { (4, 1) } else { (1, PASSES) };
    let shapes = LAYER.map(|(rows, cols)| (rows / divisor, cols / divisor));
    let layer = || shapes.iter().map(|&(rows, cols)| repeated(client, rows, cols));
    let matrices = (0..LAYERS).flat_map(|_| layer()).collect::<Result<Vec<Matrix>, String>>()?;
    let most_cols = shapes.iter().map(|(_, cols)| *cols).max().unwrap_or(0);
    let x = |rows: usize, cols: usize| client.create_from_slice(bytemuck::cast_slice(&vec![0.5f32; rows * cols]));

    let row = x(1, most_cols);
    let decode = timed(client, || {
        for _ in 0..passes {
            matrices.iter().for_each(|matrix| drop(matvec(client, matrix, &row, 1)));
        }
    })?;
    let bytes: u64 = matrices.iter().map(|m| packed_bytes(m.quant, m.rows, m.cols)).sum();

    let gate = &matrices[4];
    let mut flops_s = 0.0;
    for rows in PREFILL_ROWS {
        let input = x(rows, gate.cols);
        let took = timed(client, || drop(matvec(client, gate, &input, rows)))?;
        flops_s = (2 * gate.rows * gate.cols * rows) as f64 / took.as_secs_f64();
        if took > PREFILL_SLOW {
            break;
        }
    }

    let tiny = repeated(client, 2 * STRIPE, shapes[0].1)?;
    let mut steps = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        std::thread::sleep(ASLEEP);
        let start = Instant::now();
        let y = matvec(client, &tiny, &x(1, tiny.cols), 1);
        client.read_one(y).map_err(|error| format!("{error:?}"))?;
        steps.push(start.elapsed());
    }
    Ok(Speed {
        weight_bytes_s: ((bytes * passes as u64) as f64 / decode.as_secs_f64()) as u64,
        flops_s: flops_s as u64,
        step_ns: usual_ns(steps),
    })
}

/// A matrix whose rows are a stripe of random ones over and over.
fn repeated<R: Runtime>(client: &ComputeClient<R>, rows: usize, cols: usize) -> Result<Matrix, String> {
    let quant = LAYER_QUANT;
    let stored = random_blocks(quant, STRIPE * cols / quant.block_len(), 1);
    let stripe = Packed::new(quant, STRIPE, cols, &stored).map_err(|error| error.to_string())?;
    // Its scales are in its blocks: the plane of scales is one word that no kernel reads.
    let (quants, scales) = (stripe.quants.repeat(rows / STRIPE), stripe.scales);
    let plane = |words: &[i32]| (client.create_from_slice(bytemuck::cast_slice(words)), words.len());
    Ok(Matrix { quant, rows, cols, quants: plane(&quants), scales: plane(&scales) })
}

/// The median time of `launch` with all it launches, after those that compile it and wake the device.
fn timed<R: Runtime>(client: &ComputeClient<R>, mut launch: impl FnMut()) -> Result<Duration, String> {
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

/// The median time of one of `burst` launches, after one burst that compiles.
fn median<R: Runtime>(client: &ComputeClient<R>, burst: usize, mut launch: impl FnMut()) -> Result<f64, String> {
    let mut times = Vec::with_capacity(REPEATS + 1);
    for _ in 0..=REPEATS {
        let start = Instant::now();
        (0..burst).for_each(|_| launch());
        client.flush().map_err(|error| format!("{error:?}"))?;
        cubecl::future::block_on(client.sync()).map_err(|error| format!("{error:?}"))?;
        times.push(start.elapsed().as_secs_f64() / burst as f64);
    }
    times.remove(0);
    times.sort_by(f64::total_cmp);
    Ok(times[REPEATS / 2])
}
