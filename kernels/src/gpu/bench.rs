//! What a device reaches: bytes of weights per second of the matrix-vector kernel beside a plain copy, in one run.
use std::time::Instant;

use cubecl::prelude::*;

use super::{Matrix, Packed, copy, matvec, packed_bytes};
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
