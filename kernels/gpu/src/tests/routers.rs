//! Compares the scores of a router that are computed in chunks, and the choice of experts from them, with the reference.
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::wgpu::WgpuRuntime;
use kernels::device::DeviceId;
use kernels::order::experts::{Gating, Routing, route as reference};
use kernels::order::{CHUNKS, dot_f32};
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS, convert};

use super::device;
use crate::arithmetic::Features;
use crate::experts::{Choices, Scores, route};
use crate::platform::Platform;
use crate::product::operands::Matrix;
use crate::product::{chunk_words, router_chunks};

#[test]
fn chunks_of_scores_have_the_bits_of_the_reference() {
    match device() {
        Some(DeviceId::Cuda(_)) => routers_on(&CudaRuntime::client(&Default::default())),
        Some(_) => routers_on(&WgpuRuntime::client(&Default::default())),
        None => {}
    }
}

/// Numbers between -1 and 1.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn routers_on<R: Platform>(client: &ComputeClient<R>) {
    let able = Features::of(client).unwrap();
    let routing = Routing { used: 4, gating: Gating::Softmax, normalised: true, scale: 1.0 };
    // Whole and partial tile rows, groups and batches of groups, and chunks without columns.
    for (experts, cols, count) in [(128, 2048, 1), (128, 2880, 8), (8, 416, 3), (40, 256, 2), (16, 4128, 5)] {
        let (weights, x, bias) = (numbers(experts * cols, 1), numbers(count * cols, 2), numbers(experts, 3));
        let mut tiles = vec![0; Layout::of(QuantType::F32).matrix_bytes(experts, cols)];
        convert(QuantType::F32, cols, 0..experts, bytemuck::cast_slice(&weights), &mut tiles).unwrap();
        let up = |bytes: &[u8]| client.create_from_slice(bytes);
        let router = Matrix { kind: QuantType::F32, rows: experts, cols, tiles: up(&tiles) };
        let chunks = client.empty(4 * chunk_words(experts));
        router_chunks(client, able, &router, &up(bytemuck::cast_slice(&x)), count, &chunks);
        let choices =
            Choices { experts: client.empty(4 * 4 * count), weights: client.empty(4 * 4 * count), used: routing.used };
        let bias_there = up(bytemuck::cast_slice(&bias));
        let scores = Scores { numbers: &chunks, chunked: true, bias: Some(&bias_there) };
        route(client, able, &scores, None, experts, routing, count, &choices);
        let read = |handle| -> Vec<f32> { bytemuck::pod_collect_to_vec(&client.read_one(handle).unwrap()) };
        let (found, factors) = (read(chunks), read(choices.weights));
        let chosen: Vec<u32> = read(choices.experts).into_iter().map(f32::to_bits).collect();
        for row in 0..count {
            let stride = experts.next_multiple_of(ROWS);
            let of = |chunk: usize, expert: usize| found[(row * CHUNKS + chunk) * stride + expert];
            let mut expected = Vec::with_capacity(experts);
            for expert in 0..experts {
                let score = dot_f32(&weights[expert * cols..][..cols], &x[row * cols..][..cols]);
                let sum = (0..CHUNKS).fold(0.0, |sum, chunk| sum + of(chunk, expert));
                assert_eq!(sum.to_bits(), score.to_bits(), "expert {expert} of row {row}: {sum} {score}");
                expected.push(score + bias[expert]);
            }
            for (place, choice) in reference(&expected, None, routing).iter().enumerate() {
                let at = row * routing.used + place;
                assert_eq!(chosen[at] as usize, choice.expert, "row {row}");
                assert_eq!(factors[at].to_bits(), choice.weight.to_bits(), "row {row}");
            }
        }
    }
}
