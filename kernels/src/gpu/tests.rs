//! Every kernel on the machine's Vulkan device (Mesa's software one will do) against float64, and equal bits for equal rows.
use std::panic::catch_unwind;

use cubecl::wgpu::WgpuRuntime;

use super::*;
use crate::quant::{QUANT_TYPES, QuantType, random_blocks};
use crate::weights::RopeKind;

type Client = ComputeClient<WgpuRuntime>;

/// `None`, with a word about it, where no Vulkan driver is installed and none is required.
fn vulkan() -> Option<Client> {
    let client = catch_unwind(|| WgpuRuntime::client(&Default::default())).ok();
    if client.is_none() {
        let required = std::env::var("MESHNODE_REQUIRE").is_ok_and(|all| all.split(',').any(|one| one == "vulkan"));
        assert!(!required, "MESHNODE_REQUIRE names vulkan, but no Vulkan driver was found");
        eprintln!("SKIPPED: no Vulkan driver on this machine");
    }
    client
}

fn random(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as f32 / u32::MAX as f32 * 2.0 - 1.0
        })
        .collect()
}

fn upload(client: &Client, values: &[f32]) -> Handle {
    client.create_from_slice(bytemuck::cast_slice(values))
}

fn read(client: &Client, handle: Handle) -> Vec<f32> {
    client.flush().expect("a healthy device");
    bytemuck::pod_collect_to_vec(&client.read_one(handle).expect("a readable buffer"))
}

fn matrix(client: &Client, packed: &Packed) -> Matrix {
    let plane = |words: &[i32]| (client.create_from_slice(bytemuck::cast_slice(words)), words.len());
    let Packed { quant, rows, cols, quants, scales } = packed;
    Matrix { quant: *quant, rows: *rows, cols: *cols, quants: plane(quants), scales: plane(scales) }
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], exact: &[f64], tolerance: f64) {
    assert_eq!(found.len(), exact.len());
    let size = exact.iter().fold(0.0f64, |m, e| m.max(e.abs()));
    for (i, (f, e)) in found.iter().zip(exact).enumerate() {
        let error = (f64::from(*f) - e).abs() / size;
        assert!(error <= tolerance, "{what}: element {i} is {f}, exactly {e}");
    }
}

#[test]
fn products_of_every_format_are_right_and_the_same_in_any_batch() {
    let Some(client) = vulkan() else { return };
    for (quant, rows, cols) in QUANT_TYPES.into_iter().flat_map(|q| [(q, 33, 768), (q, 4099, 256)]) {
        let bytes = random_blocks(quant, rows * cols / quant.block_len(), 11);
        let mut weights = vec![0f64; rows * cols];
        quant.dequantize_f64(&bytes, &mut weights);
        let matrix = matrix(&client, &Packed::new(quant, rows, cols, &bytes).unwrap());
        let n = 6;
        let x = random(n * cols, 5);
        let exact: Vec<f64> = (0..n * rows)
            .map(|i| {
                let (w, x) = (&weights[i % rows * cols..][..cols], &x[i / rows * cols..][..cols]);
                w.iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum()
            })
            .collect();
        let batch = read(&client, matvec(&client, &matrix, &upload(&client, &x), n));
        assert_close(quant.name(), &batch, &exact, 1e-6);
        for i in 0..n {
            let alone = read(&client, matvec(&client, &matrix, &upload(&client, &x[i * cols..][..cols]), 1));
            assert!(alone == batch[i * rows..][..rows], "{}: row {i} differs alone", quant.name());
        }
    }
}

#[test]
fn halves_are_exact_down_to_the_smallest() {
    let Some(client) = vulkan() else { return };
    let halves: Vec<u16> = (0..=u16::MAX).filter(|bits| bits & 0x7c00 != 0x7c00).collect();
    let halves = &halves[..halves.len() / 32 * 32];
    let packed = Packed::new(QuantType::F16, halves.len() / 32, 32, bytemuck::cast_slice(halves)).unwrap();
    let matrix = matrix(&client, &packed);
    for column in [0, 1, 30, 31] {
        let mut x = [0f32; 32];
        x[column] = 1024.0; // so that a result is no subnormal float, which devices may flush
        let y = read(&client, matvec(&client, &matrix, &upload(&client, &x), 1));
        for (row, y) in y.iter().enumerate() {
            assert_eq!(*y, half::f16::from_bits(halves[row * 32 + column]).to_f32() * 1024.0, "row {row}");
        }
    }
}

#[test]
fn rms_norm_is_right() {
    let Some(client) = vulkan() else { return };
    let (n, width, eps) = (3, 576, 1e-5);
    let (x, weight) = (random(n * width, 1), random(width, 2));
    let exact: Vec<f64> = x
        .chunks(width)
        .flat_map(|row| {
            let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            row.iter().zip(&weight).map(move |(x, w)| f64::from(*x) * scale * f64::from(*w)).collect::<Vec<_>>()
        })
        .collect();
    let y = read(&client, rms_norm(&client, &upload(&client, &x), &upload(&client, &weight), n, width, eps));
    assert_close("rms_norm", &y, &exact, 1e-6);
}

#[test]
fn heads_turn_by_their_table() {
    let Some(client) = vulkan() else { return };
    let (n, heads, head_dim, dims) = (2, 3, 16, 12);
    let (x, table) = (random(n * heads * head_dim, 1), random(n * dims, 2));
    for kind in [RopeKind::Interleaved, RopeKind::Halves] {
        let mut exact: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for row in 0..n {
            for head in 0..heads {
                for i in 0..dims / 2 {
                    let base = (row * heads + head) * head_dim;
                    let (a, b) = match kind {
                        RopeKind::Interleaved => (base + 2 * i, base + 2 * i + 1),
                        RopeKind::Halves => (base + i, base + i + dims / 2),
                    };
                    let (cosine, sine) =
                        (f64::from(table[row * dims + i]), f64::from(table[row * dims + dims / 2 + i]));
                    (exact[a], exact[b]) = (exact[a] * cosine - exact[b] * sine, exact[a] * sine + exact[b] * cosine);
                }
            }
        }
        let rotation = Rotation { kind, dims, head_dim };
        let y = read(&client, rotate(&client, &upload(&client, &x), &upload(&client, &table), n, heads, rotation));
        assert_close("rotate", &y, &exact, 1e-6);
    }
}

#[test]
fn swiglu_add_append_and_copy_are_right() {
    let Some(client) = vulkan() else { return };
    let (n, width) = (3, 200);
    let (gate, up) = (random(n * width, 1), random(n * width, 2));
    let exact: Vec<f64> =
        gate.iter().zip(&up).map(|(g, u)| f64::from(*u) * f64::from(*g) / (1.0 + (-f64::from(*g)).exp())).collect();
    let y = read(&client, swiglu(&client, &upload(&client, &gate), &upload(&client, &up), n, width));
    assert_close("swiglu", &y, &exact, 1e-6);
    let exact: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| f64::from(*g) + f64::from(*u)).collect();
    let y = read(&client, add(&client, &upload(&client, &gate), &upload(&client, &up), n, width));
    assert_close("add", &y, &exact, 1e-7);
    let cache = upload(&client, &vec![7.0; 8 * width]);
    append(&client, &cache, 8, &upload(&client, &gate), n, width, 4);
    let mut expected = vec![7.0; 8 * width];
    expected[4 * width..7 * width].copy_from_slice(&gate);
    assert_eq!(read(&client, cache), expected);
    let (from, to) = (upload(&client, &random(1024, 3)), upload(&client, &[0.0; 1024]));
    copy(&client, &from, &to, 1024);
    assert_eq!(read(&client, to), read(&client, from));
}

#[test]
fn attention_is_right_and_the_same_in_any_chunk() {
    let Some(client) = vulkan() else { return };
    let sizes = Attention { heads: 6, kv_heads: 2, head_dim: 24, capacity: 100 };
    let (n, group) = (75, sizes.heads / sizes.kv_heads);
    let row = sizes.heads * sizes.head_dim;
    let (q, mut keys) = (random(n * row, 1), random(100 * 48, 2));
    keys.iter_mut().for_each(|k| *k *= 20.0);
    let values = random(100 * 48, 3);
    let mut exact = vec![0f64; n * row];
    for (i, out) in exact.chunks_mut(sizes.head_dim).enumerate() {
        let (position, head) = (i / sizes.heads, i % sizes.heads);
        let of = |cache: &[f32], p: usize, d: usize| {
            f64::from(cache[(p * sizes.kv_heads + head / group) * sizes.head_dim + d])
        };
        let scores: Vec<f64> = (0..=position)
            .map(|p| {
                let dot: f64 =
                    (0..sizes.head_dim).map(|d| f64::from(q[i * sizes.head_dim + d]) * of(&keys, p, d)).sum();
                (dot / (sizes.head_dim as f64).sqrt()).exp()
            })
            .collect();
        let total: f64 = scores.iter().sum();
        for (d, out) in out.iter_mut().enumerate() {
            *out = scores.iter().enumerate().map(|(p, s)| s / total * of(&values, p, d)).sum();
        }
    }
    let (k, v) = (upload(&client, &keys), upload(&client, &values));
    let whole = read(&client, attention(&client, &upload(&client, &q), &k, &v, n, 0, sizes));
    assert_close("attention", &whole, &exact, 2e-5);
    for chunk in [1, 7, 40] {
        for start in (0..n).step_by(chunk) {
            let end = n.min(start + chunk);
            let rows = upload(&client, &q[start * row..end * row]);
            let part = read(&client, attention(&client, &rows, &k, &v, end - start, start, sizes));
            assert!(part == whole[start * row..end * row], "rows {start}..{end} in chunks of {chunk}");
        }
    }
}
