//! Compares tokens sampled on a device with the CPU's from the same logits.
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::wgpu::WgpuRuntime;
use kernels::device::DeviceId;
use kernels_models::sampler::order::{POWERS, Scale};
use kernels_models::sampler::{LogitChanges, Sampler, SamplerSettings};

use super::device;
use crate::arithmetic::Features;
use crate::draw::{DECIDED, DRAWN_WORDS, DrawScratch, draw, draws, high_product, parameters, place, weight};
use crate::platform::{Platform, array};

/// CUDA only, like sampling on the device itself: Mesa's software driver computes wrong results in the last of the three kernels.
#[test]
fn a_device_draws_the_same_tokens_as_the_cpu() {
    if let Some(DeviceId::Cuda(_)) = device() {
        draws_on(&CudaRuntime::client(&Default::default()));
    }
}

/// Sums of four uniform random numbers, distributed like the logits of a language model.
fn some_logits(count: usize, mut state: u64, width: f32) -> Vec<f32> {
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| (uniform() + uniform() + uniform() + uniform()) * width).collect()
}

/// All combinations of settings with their own code path.
fn some_settings() -> Vec<SamplerSettings> {
    let mut all = vec![SamplerSettings::greedy()];
    for temperature in [0.05, 0.7, 1.0, 5.0] {
        for (top_k, top_p, min_p) in [
            (0, 1.0, 0.0),
            (0, 0.9, 0.0),
            (0, 1.0, 0.05),
            (0, 0.8, 0.02),
            (1, 1.0, 0.0),
            (40, 1.0, 0.0),
            (20, 0.8, 0.1),
        ] {
            let seed = (temperature * 1000.0) as u64 + u64::from(top_k) * 7;
            all.push(SamplerSettings { temperature, top_k, top_p, min_p, seed, ..SamplerSettings::greedy() });
        }
    }
    all
}

fn draws_on<R: Platform>(client: &ComputeClient<R>) {
    let able = Features::of(client).unwrap();
    let mut sampler = Sampler::new();
    let (mut decided, mut all) = (0, 0);
    for (vocab, width) in [(7, 3.0), (1000, 8.0), (49_152, 12.0), (151_936, 6.0)] {
        let scratch = DrawScratch::new(client, vocab);
        let mut rows: Vec<Vec<f32>> = (0..2).map(|seed| some_logits(vocab, seed + 11, width)).collect();
        // Ties, zeros of both signs, and a token that must not be drawn.
        rows[1][3] = 0.0;
        rows[1][5] = -0.0;
        rows[1][6] = f32::NEG_INFINITY;
        rows[1][1] = rows[1][2];
        let logits: Vec<f32> = rows.concat();
        let logits = client.create_from_slice(bytemuck::cast_slice(&logits));
        for (position, settings) in some_settings().into_iter().enumerate() {
            assert!(draws(&settings, vocab));
            let words: Vec<u32> = (0..2).flat_map(|row| parameters(&settings, position as u32 + row, vocab)).collect();
            let words = client.create_from_slice(bytemuck::cast_slice(&words));
            let (tokens, drawn) = (client.empty(8), client.empty(2 * 4 * DRAWN_WORDS));
            draw(client, able, &scratch, &logits, &words, 2, &tokens, &drawn);
            let drawn: Vec<u32> = bytemuck::pod_collect_to_vec(&client.read_one(drawn).unwrap());
            let tokens: Vec<u32> = bytemuck::pod_collect_to_vec(&client.read_one(tokens).unwrap());
            for (row, logits) in rows.iter().enumerate() {
                let expected =
                    sampler.sample(logits, &settings, position as u32 + row as u32, &LogitChanges::default()).unwrap();
                all += 1;
                if drawn[row * DRAWN_WORDS + 1] == DECIDED {
                    decided += 1;
                    assert_eq!(drawn[row * DRAWN_WORDS], expected, "{vocab} tokens, row {row}, {settings:?}");
                    assert_eq!(tokens[row], expected);
                }
            }
        }
    }
    assert!(decided * 20 >= all * 19, "only {decided} of {all} draws were decided");
}

#[cube(launch_unchecked)]
fn parts_kernel(
    logits: &Array<f32>,
    powers: &Array<u64>,
    factors: &Array<u64>,
    octaves: &Array<u64>,
    out: &mut Array<u64>,
) {
    if ABSOLUTE_POS < logits.len() {
        let at = place(logits[ABSOLUTE_POS], f64::cast_from(10.0f32), f64::reinterpret(octaves[0]));
        out[3 * ABSOLUTE_POS] = at;
        out[3 * ABSOLUTE_POS + 1] = weight(at, powers);
        out[3 * ABSOLUTE_POS + 2] = high_product(factors[2 * ABSOLUTE_POS], factors[2 * ABSOLUTE_POS + 1]);
    }
}

/// Places and weights of logits, and 64-bit products.
#[test]
fn weights_are_the_same_as_on_the_cpu() {
    fn on<R: Platform>(client: &ComputeClient<R>) {
        let logits: Vec<f32> = some_logits(4096, 5, 30.0).into_iter().map(|x| x.min(10.0)).collect();
        let factors: Vec<u64> = (0..2 * 4096).map(|i| kernels_models::sampler::random(7, i) >> (i % 23)).collect();
        let up = |bytes: &[u8]| client.create_from_slice(bytes);
        for temperature in [0.05f32, 0.7, 1.0, 5.0] {
            let octaves = std::f64::consts::LOG2_E / f64::from(temperature);
            let out = client.empty(3 * 4096 * 8);
            // SAFETY: there is one unit per element.
            unsafe {
                parts_kernel::launch_unchecked::<R>(
                    client,
                    CubeCount::Static(64, 1, 1),
                    CubeDim::new_1d(64),
                    array(&up(bytemuck::cast_slice(&logits)), 4096),
                    array(&up(bytemuck::cast_slice(&POWERS)), POWERS.len()),
                    array(&up(bytemuck::cast_slice(&factors)), 2 * 4096),
                    array(&up(&octaves.to_le_bytes()), 1),
                    array(&out, 3 * 4096),
                );
            }
            let out: Vec<u64> = bytemuck::pod_collect_to_vec(&client.read_one(out).unwrap());
            let scale = Scale::new(10.0, temperature);
            for (i, logit) in logits.iter().enumerate() {
                let product = (u128::from(factors[2 * i]) * u128::from(factors[2 * i + 1])) >> 64;
                assert_eq!(out[3 * i + 2], product as u64, "{} {}", factors[2 * i], factors[2 * i + 1]);
                assert_eq!(out[3 * i], scale.fixed_point_octaves(*logit), "{logit}");
                assert_eq!(out[3 * i + 1], scale.weight(*logit), "{logit}");
            }
        }
    }
    match device() {
        Some(DeviceId::Cuda(_)) => on(&CudaRuntime::client(&Default::default())),
        Some(_) => on(&WgpuRuntime::client(&Default::default())),
        None => {}
    }
}

/// The host samples if logits are not finite, or if more tokens are equally likely than a cube can order.
#[test]
fn a_device_leaves_rows_it_cannot_decide_to_the_host() {
    fn on<R: Platform>(client: &ComputeClient<R>) {
        const VOCAB: usize = 3000;
        let able = Features::of(client).unwrap();
        let scratch = DrawScratch::new(client, VOCAB);
        let settings = SamplerSettings { temperature: 1.0, ..SamplerSettings::greedy() };
        let mut unsound = some_logits(VOCAB, 3, 5.0);
        unsound[1234] = f32::NAN;
        let mut infinite = some_logits(VOCAB, 3, 5.0);
        infinite[17] = f32::INFINITY;
        for logits in [unsound, infinite, vec![f32::NEG_INFINITY; VOCAB], vec![1.0; VOCAB]] {
            let equal = logits[0] == 1.0;
            let handle = client.create_from_slice(bytemuck::cast_slice(&logits));
            for settings in [settings, SamplerSettings::greedy()] {
                let words = client.create_from_slice(bytemuck::cast_slice(&parameters(&settings, 5, VOCAB)));
                let (tokens, drawn) = (client.empty(4), client.empty(4 * DRAWN_WORDS));
                draw(client, able, &scratch, &handle, &words, 1, &tokens, &drawn);
                let drawn: Vec<u32> = bytemuck::pod_collect_to_vec(&client.read_one(drawn).unwrap());
                let decided = equal && settings.temperature == 0.0;
                assert_eq!(drawn[1] == DECIDED, decided, "{} {settings:?}", logits[0]);
                assert!((drawn[0] as usize) < VOCAB, "the next step reads an embedding of it");
            }
        }
    }
    match device() {
        Some(DeviceId::Cuda(_)) => on(&CudaRuntime::client(&Default::default())),
        Some(_) => on(&WgpuRuntime::client(&Default::default())),
        None => {}
    }
}
