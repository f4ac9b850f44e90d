//! Self-test of large matrix products, which small models do not have: whole blocks on all multiprocessors, then divided ones.
use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::prelude::*;
use kernels::order::{BLOCK, WeightBlock, dot, quantise};
use kernels::quant::{QuantType, random_blocks};
use kernels::tile::{Layout, Tiles, convert};

use super::Check;
use crate::arithmetic::Features;
use crate::error::panic_text;
use crate::platform::Platform;
use crate::product::operands::{Activations, Matrix, Target};
use crate::product::{PARTS_WORDS, large_rows, product};
use crate::rows::{RowFormats, norm};

/// Columns of the matrix: no whole number of groups per chunk.
const COLS: usize = 768;
/// Rows of activations: two blocks, the second of them partial.
const COUNT: usize = 70;

/// Products with formats whose blocks have other numbers of tokens, scales and minima.
pub(crate) fn checks<R: Platform>(client: &ComputeClient<R>) -> impl Iterator<Item = Check> {
    let check = move |kind: QuantType| {
        let outcome = catch_unwind(AssertUnwindSafe(|| compare(client, kind)))
            .unwrap_or_else(|panic| Err(format!("panicked: {}", panic_text(panic.as_ref()))));
        Check { name: format!("large product in {}", kind.name()), outcome }
    };
    [QuantType::Q4_0, QuantType::Q4_1, QuantType::Q6K].into_iter().map(check)
}

fn compare<R: Platform>(client: &ComputeClient<R>, kind: QuantType) -> Result<String, String> {
    let able = Features::of(client).map_err(|error| error.to_string())?;
    let processors = client.properties().hardware.num_streaming_multiprocessors;
    let rows = if able.matrices { large_rows(kind, COUNT, processors) } else { 200 };
    let stored = random_blocks(kind, rows * COLS / kind.block_len(), 5);
    let mut tiles = vec![0; Layout::of(kind).matrix_bytes(rows, COLS)];
    convert(kind, COLS, 0..rows, &stored, &mut tiles).map_err(|error| format!("{error:?}"))?;
    let numbers = |count: usize, step: usize| -> Vec<f32> {
        (0..count).map(|i| (i * step % 1009) as f32 / 504.0 - 1.0).collect()
    };
    let up = |bytes: &[u8]| client.create_from_slice(bytes);
    let floats = |numbers: &[f32]| up(bytemuck::cast_slice(numbers));
    let read = |handle| -> Result<Vec<f32>, String> {
        Ok(bytemuck::pod_collect_to_vec(&client.read_one(handle).map_err(|error| format!("{error:?}"))?))
    };
    let x = Activations::new(client, COUNT, COLS);
    let wanted = RowFormats { floats: true, integers: true };
    let (hidden, ones) = (floats(&numbers(COUNT * COLS, 389)), floats(&[1.0; COLS]));
    norm(client, able, &hidden, &ones, 1e-5, None, COUNT, wanted, &x);
    let (bias, before) = (numbers(rows, 7), numbers(COUNT * rows, 11));
    let (y, scratch) = (floats(&before), client.empty(4 * PARTS_WORDS));
    let matrix = Matrix { kind, rows, cols: COLS, tiles: up(&tiles) };
    let target = Target {
        rows: &y,
        stride: rows,
        offset: 0,
        width: rows,
        bias: Some(&floats(&bias)),
        add: true,
        parts: Some(&scratch),
    };
    product(client, able, &matrix, &x, true, COUNT, &target);
    let (found, inputs) = (read(y)?, read(x.floats)?);
    let quantised: Vec<_> = inputs.chunks(COLS).map(quantise).collect();
    let tiles = Tiles::new(kind, rows, COLS, &tiles).ok_or("tiles of another length")?;
    for (row, bias) in bias.iter().enumerate() {
        let blocks: Vec<WeightBlock> = (0..COLS / BLOCK).filter_map(|block| tiles.block(row, block)).collect();
        for (token, x) in quantised.iter().enumerate() {
            let at = token * rows + row;
            let expected = dot(&blocks, x, COLS) + bias + before[at];
            if found[at].to_bits() != expected.to_bits() {
                return Err(format!("row {row} of token {token} is {}, expected {expected}", found[at]));
            }
        }
    }
    Ok(format!("{} numbers have the bits of the reference", COUNT * rows))
}
