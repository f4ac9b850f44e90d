//! Self-test of the encodings of hidden rows: ordinary rows, and those at the edges of what an encoding can express.
use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::prelude::*;
use kernels::boundary::Codec;

use super::Check;
use crate::arithmetic::Features;
use crate::boundary::RowEncoder;
use crate::engine::memory::Memory;
use crate::error::panic_text;
use crate::platform::Platform;

/// Each encoding, at a width with a partial block and at one of a common model.
pub(crate) fn checks<R: Platform>(client: &ComputeClient<R>) -> impl Iterator<Item = Check> {
    let check = move |codec: Codec| {
        let compared = || [100, 576].into_iter().try_fold(0, |sum, width| Ok(sum + compare(client, codec, width)?));
        let outcome = catch_unwind(AssertUnwindSafe(compared))
            .unwrap_or_else(|panic| Err(format!("panicked: {}", panic_text(panic.as_ref()))));
        let outcome = outcome.map(|bytes| format!("{bytes} bytes are those of the reference"));
        Check { name: format!("hidden rows in {}", codec.name()), outcome }
    };
    [Codec::F16, Codec::Q8, Codec::Q4].into_iter().map(check)
}

/// Compares rows of one width; returns the number of equal bytes.
pub(crate) fn compare<R: Platform>(client: &ComputeClient<R>, codec: Codec, width: usize) -> Result<usize, String> {
    let able = Features::of(client).map_err(|error| error.to_string())?;
    let rows = rows(width);
    let (count, numbers) = (rows.len(), rows.concat());
    let memory = Memory { client, number: 0 };
    let encoder = RowEncoder::new(&memory, codec, width, count).map_err(|error| error.to_string())?;
    let out = client.empty(4 * count * encoder.words());
    encoder.encode(client, able, &client.create_from_slice(bytemuck::cast_slice(&numbers)), count, &out);
    let found = client.read_one(out).map_err(|error| format!("{error:?}"))?;
    let (found, expected) = (encoder.bytes(&found), codec.encode(width, &numbers));
    let each = expected.len() / count;
    match (0..expected.len().max(found.len())).find(|&at| expected.get(at) != found.get(at)) {
        None => Ok(found.len()),
        Some(at) => Err(format!(
            "row {} of {width} elements: byte {} is {:?}, expected {:?}",
            at / each,
            at % each,
            found.get(at),
            expected.get(at)
        )),
    }
}

fn rows(width: usize) -> Vec<Vec<f32>> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    // Roughly Gaussian, with a few channels that are a hundred times larger, as in language models.
    let mut hidden = || -> Vec<f32> {
        let mut row: Vec<f32> = (0..width).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect();
        for (at, number) in [(3 % width, 150.0), (width / 2, -90.0), (width - 1, 40.0)] {
            row[at] = number;
        }
        row
    };
    let plain: Vec<Vec<f32>> = (0..4).map(|_| hidden()).collect();
    let times = |factor: f32| plain[0].iter().map(|x| x * factor).collect::<Vec<f32>>();
    let one = |number: f32| {
        let mut row = plain[1].clone();
        row[width / 3] = number;
        row
    };
    let equal = (0..width).map(|at| if at % 3 == 0 { -2.5 } else { 2.5 }).collect();
    let blocks = (0..width).map(|at| if at / 64 % 2 == 0 { 0.0 } else { plain[2][at] }).collect();
    let edges = [
        vec![0.0; width],
        equal,
        blocks,
        times(2f32.powi(80)),
        times(2f32.powi(-80)),
        one(f32::NAN),
        one(f32::NEG_INFINITY),
        one(3.4e38),
        vec![3e38; width],
    ];
    plain.iter().cloned().chain(edges).collect()
}
