//! One suite for every backend: each operation, fused and plain, against float64, and small models end to end.
//!
//! `meshnode selftest` runs it on a person's own device; the tests run it on the CPU and on software Vulkan.
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Tensor, TensorData};
use kernels::gpu::{Attention, Packed, Rotation};
use kernels::quant::{QUANT_TYPES, QuantType, random_blocks};
use kernels::stage::{Activations, Rows, RowsIn, RowsOut, Stage, StageError, StageOptions};
use kernels::weights::testing::TinyModel;
use kernels::weights::{Architecture, ModelFile, RopeKind};

use crate::backend::{Matrix, MeshBackend};
use crate::stage::BurnStage;
use crate::{oracle, reference};

/// What one check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// What was measured, or what is wrong.
    pub outcome: Result<String, String>,
}

impl Check {
    /// Runs a check; a panic is a failure like any other.
    pub fn run(name: impl Into<String>, check: impl FnOnce() -> Result<String, String>) -> Self {
        let outcome = catch_unwind(AssertUnwindSafe(check)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Err(format!("panicked: {}", text.unwrap_or("no message")))
        });
        Self { name: name.into(), outcome }
    }
}

/// Largest error of one f32 operation, relative to its largest result.
const OPERATION_TOLERANCE: f64 = 2e-6;
/// The same for exponentials and long sums.
const ATTENTION_TOLERANCE: f64 = 2e-5;
/// Largest error of a small model's logits, relative to the largest logit.
const MODEL_TOLERANCE: f64 = 1e-3;

/// The operations under test: a backend's own, or plain burn.
///
/// A trait, so that a backend's suite does not compile the plain ones: on a GPU they bring burn's matrix products and
/// reductions along, minutes of compilation for each backend.
pub trait Operations<B: MeshBackend> {
    /// Said after each check's name.
    const SUFFIX: &'static str;
    /// The same bits for a row alone and in a batch are promised.
    const SAME_BITS: bool;
    /// See [`MeshBackend::product`].
    fn product(x: Tensor<B, 2>, weight: &Matrix<B>) -> Tensor<B, 2>;
    /// See [`MeshBackend::rms_norm`].
    fn rms_norm(x: Tensor<B, 2>, weight: &Tensor<B, 1>, eps: f32) -> Tensor<B, 2>;
    /// See [`MeshBackend::rotate`].
    fn rotate(x: Tensor<B, 2>, table: &Tensor<B, 2>, rotation: Rotation) -> Tensor<B, 2>;
    /// See [`MeshBackend::append`].
    fn append(cache: Tensor<B, 2>, rows: Tensor<B, 2>, at: usize) -> Tensor<B, 2>;
    /// See [`MeshBackend::causal_attention`].
    fn causal_attention(
        q: Tensor<B, 2>,
        keys: &Tensor<B, 2>,
        values: &Tensor<B, 2>,
        position: usize,
        sizes: Attention,
    ) -> Tensor<B, 2>;
    /// See [`MeshBackend::swiglu`].
    fn swiglu(gate: Tensor<B, 2>, up: Tensor<B, 2>) -> Tensor<B, 2>;
}

macro_rules! operations {
    ($(#[$doc:meta])* $name:ident, $suffix:literal, $same_bits:literal, $($source:tt)*) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name;

        impl<B: MeshBackend> Operations<B> for $name {
            const SUFFIX: &'static str = $suffix;
            const SAME_BITS: bool = $same_bits;
            fn product(x: Tensor<B, 2>, weight: &Matrix<B>) -> Tensor<B, 2> {
                $($source)*::product(x, weight)
            }
            fn rms_norm(x: Tensor<B, 2>, weight: &Tensor<B, 1>, eps: f32) -> Tensor<B, 2> {
                $($source)*::rms_norm(x, weight, eps)
            }
            fn rotate(x: Tensor<B, 2>, table: &Tensor<B, 2>, rotation: Rotation) -> Tensor<B, 2> {
                $($source)*::rotate(x, table, rotation)
            }
            fn append(cache: Tensor<B, 2>, rows: Tensor<B, 2>, at: usize) -> Tensor<B, 2> {
                $($source)*::append(cache, rows, at)
            }
            fn causal_attention(
                q: Tensor<B, 2>,
                keys: &Tensor<B, 2>,
                values: &Tensor<B, 2>,
                position: usize,
                sizes: Attention,
            ) -> Tensor<B, 2> {
                $($source)*::causal_attention(q, keys, values, position, sizes)
            }
            fn swiglu(gate: Tensor<B, 2>, up: Tensor<B, 2>) -> Tensor<B, 2> {
                $($source)*::swiglu(gate, up)
            }
        }
    };
}

operations!(
    /// What the backend has, overridden or not.
    Own, "", true, <B as MeshBackend>
);
operations!(
    /// Plain burn, whatever the backend overrides.
    Plain, ", plain burn", false, oracle
);

/// Every operation against float64.
pub fn operations<B: MeshBackend, O: Operations<B>>(device: &B::Device) -> Vec<Check> {
    let mut checks: Vec<Check> = QUANT_TYPES.into_iter().flat_map(|quant| products::<B, O>(quant, device)).collect();
    checks.push(norms::<B, O>(device));
    checks.extend([RopeKind::Interleaved, RopeKind::Halves].map(|kind| rotations::<B, O>(kind, device)));
    checks.push(attentions::<B, O>(device));
    checks.extend(elementwise::<B, O>(device));
    checks
}

fn products<B: MeshBackend, O: Operations<B>>(quant: QuantType, device: &B::Device) -> Vec<Check> {
    let (rows, cols, n) = (40, 512, 5);
    let bytes = random_blocks(quant, rows * cols / quant.block_len(), 3);
    let mut weights = vec![0f64; rows * cols];
    quant.dequantize_f64(&bytes, &mut weights);
    let x = random(n * cols, 4);
    let exact: Vec<f64> = x
        .chunks(cols)
        .flat_map(|x| weights.chunks(cols).map(move |w| w.iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum()))
        .collect();
    let matrix = || {
        let packed = Packed::new(quant, rows, cols, &bytes).map_err(|error| error.to_string())?;
        Ok::<_, String>(Matrix::<B>::upload(packed, device))
    };
    let name = quant.name();
    let right = Check::run(format!("product of {name}{}", O::SUFFIX), || {
        compare::<B>(O::product(tensor(&x, cols, device), &matrix()?), &exact, OPERATION_TOLERANCE, device)
    });
    if !O::SAME_BITS {
        return vec![right];
    }
    let bits = Check::run(format!("product of {name}, the same bits alone and in a batch"), || {
        let matrix = matrix()?;
        let batch = values::<B>(O::product(tensor(&x, cols, device), &matrix), device)?;
        for (i, x) in x.chunks(cols).enumerate() {
            let alone = values::<B>(O::product(tensor(x, cols, device), &matrix), device)?;
            if alone != batch[i * rows..(i + 1) * rows] {
                return Err(format!("row {i} differs"));
            }
        }
        Ok("equal".into())
    });
    vec![right, bits]
}

fn norms<B: MeshBackend, O: Operations<B>>(device: &B::Device) -> Check {
    let (n, width, eps) = (3, 576, 1e-5f32);
    let (x, weight) = (random(n * width, 1), random(width, 2));
    let exact: Vec<f64> = x
        .chunks(width)
        .flat_map(|row| {
            let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            row.iter().zip(&weight).map(move |(x, w)| f64::from(*x) * scale * f64::from(*w))
        })
        .collect();
    let weight = Tensor::from_data(TensorData::new(weight.clone(), [width]), device);
    Check::run(format!("RMSNorm{}", O::SUFFIX), || {
        compare::<B>(O::rms_norm(tensor(&x, width, device), &weight, eps), &exact, OPERATION_TOLERANCE, device)
    })
}

fn rotations<B: MeshBackend, O: Operations<B>>(kind: RopeKind, device: &B::Device) -> Check {
    let (n, heads, head_dim, dims) = (3, 2, 16, 12);
    let width = heads * head_dim;
    let (x, table) = (random(n * width, 1), random(n * dims, 2));
    let mut exact: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    for (head, exact) in exact.chunks_mut(head_dim).enumerate() {
        let row = &table[head / heads * dims..][..dims];
        for i in 0..dims / 2 {
            let (a, b) = match kind {
                RopeKind::Interleaved => (2 * i, 2 * i + 1),
                RopeKind::Halves => (i, i + dims / 2),
            };
            let (cosine, sine) = (f64::from(row[i]), f64::from(row[i + dims / 2]));
            (exact[a], exact[b]) = (exact[a] * cosine - exact[b] * sine, exact[a] * sine + exact[b] * cosine);
        }
    }
    let rotation = Rotation { kind, dims, head_dim };
    Check::run(format!("rotary embedding, {kind:?}{}", O::SUFFIX), || {
        let (x, table) = (tensor::<B>(&x, width, device), tensor::<B>(&table, dims, device));
        compare::<B>(O::rotate(x, &table, rotation), &exact, OPERATION_TOLERANCE, device)
    })
}

fn attentions<B: MeshBackend, O: Operations<B>>(device: &B::Device) -> Check {
    let sizes = Attention { heads: 6, kv_heads: 2, head_dim: 32, capacity: 80 };
    let (n, position) = (40, 30);
    let (width, kv_width) = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim);
    let (q, values) = (random(n * width, 1), random(sizes.capacity * kv_width, 3));
    let keys: Vec<f32> = random(sizes.capacity * kv_width, 2).iter().map(|k| k * 10.0).collect();
    let wide = |row: &[f32]| row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let rows = |cache: &[f32]| cache.chunks(kv_width).map(wide).collect::<Vec<_>>();
    let (exact_keys, exact_values) = (rows(&keys), rows(&values));
    let exact: Vec<f64> = q
        .chunks(sizes.head_dim)
        .enumerate()
        .flat_map(|(i, query)| {
            let (held, of) = (position + i / sizes.heads + 1, i % sizes.heads / 3 * sizes.head_dim);
            reference::attend(&wide(query), &exact_keys[..held], &exact_values[..held], of..of + sizes.head_dim)
        })
        .collect();
    Check::run(format!("attention{}", O::SUFFIX), || {
        let (keys, values) = (tensor::<B>(&keys, kv_width, device), tensor::<B>(&values, kv_width, device));
        let mixed = O::causal_attention(tensor(&q, width, device), &keys, &values, position, sizes);
        compare::<B>(mixed, &exact, ATTENTION_TOLERANCE, device)
    })
}

fn elementwise<B: MeshBackend, O: Operations<B>>(device: &B::Device) -> Vec<Check> {
    let (n, width) = (3, 200);
    let (gate, up) = (random(n * width, 1), random(n * width, 2));
    let exact: Vec<f64> =
        gate.iter().zip(&up).map(|(g, u)| f64::from(*u) * f64::from(*g) / (1.0 + f64::from(-g).exp())).collect();
    let sums: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| f64::from(*g) + f64::from(*u)).collect();
    let mut written = vec![7f64; 8 * width];
    written[4 * width..][..n * width].iter_mut().zip(&gate).for_each(|(w, g)| *w = f64::from(*g));
    let (gate, up) = (|| tensor::<B>(&gate, width, device), || tensor::<B>(&up, width, device));
    let cache = || Tensor::<B, 2>::full([8, width], 7.0, device);
    vec![
        Check::run(format!("SwiGLU{}", O::SUFFIX), || {
            compare::<B>(O::swiglu(gate(), up()), &exact, OPERATION_TOLERANCE, device)
        }),
        Check::run(format!("residual{}", O::SUFFIX), || {
            compare::<B>(B::add(gate(), up()), &sums, OPERATION_TOLERANCE, device)
        }),
        Check::run(format!("cache append{}", O::SUFFIX), || {
            compare::<B>(O::append(cache(), gate(), 4), &written, 0.0, device)
        }),
    ]
}

/// Small random models of each architecture: logits against float64, and the same bits in any chunks, batch and cut.
pub fn models<B: MeshBackend>(device: &B::Device) -> Vec<Check>
where
    B::Device: Send,
{
    let models = [
        (Architecture::Llama, QuantType::Q4_1, true, false),
        (Architecture::Llama, QuantType::Q4_0, false, true),
        (Architecture::Qwen2, QuantType::Q4K, false, false),
        (Architecture::Qwen3, QuantType::Q8_0, true, true),
    ];
    let checks = models.into_iter().flat_map(|(architecture, quant, tied, biases)| {
        let file = TinyModel { architecture, quant, tied, biases, layers: 2, ..TinyModel::default() }.open();
        let biased = if biases { " with biases" } else { "" };
        let name = format!("a small {} in {}{biased}", architecture.name(), quant.name());
        let whole = forward_chunks::<B>(&file, device, &TOKENS, TOKENS.len());
        let right = Check::run(name.clone(), || {
            let exact = reference::logits(&file, &TOKENS);
            let found: Vec<f32> = whole.as_ref().map_err(ToString::to_string)?.concat();
            // One chunk gives the last row's logits only.
            errors(&found, &exact[TOKENS.len() - 1], MODEL_TOLERANCE)
        });
        let chunks = Check::run(format!("{name}, the same bits in chunks, batches and cuts"), || {
            let whole = whole.as_ref().map_err(ToString::to_string)?.last().ok_or("no logits")?;
            for chunk in [1, 5] {
                let rows = forward_chunks::<B>(&file, device, &TOKENS, chunk).map_err(|e| e.to_string())?;
                if rows.last() != Some(whole) {
                    return Err(format!("chunks of {chunk} differ from one chunk"));
                }
            }
            if batch_and_cut::<B>(&file, device).map_err(|e| e.to_string())?.iter().any(|logits| logits != whole) {
                return Err("a batch of two on two stages differs from one sequence on one".into());
            }
            Ok("equal".into())
        });
        [right, chunks]
    });
    checks.collect()
}

/// Any tokens of the small vocabulary.
const TOKENS: [u32; 11] = [1, 77, 30, 200, 5, 5, 266, 131, 12, 99, 254];

fn options(layers: std::ops::Range<usize>) -> StageOptions {
    StageOptions { layers, sequences: 2, context: 64, activations: Activations::F32, threads: 1 }
}

/// The logits after each chunk.
fn forward_chunks<B: MeshBackend>(
    file: &std::sync::Arc<ModelFile>,
    device: &B::Device,
    tokens: &[u32],
    chunk: usize,
) -> Result<Vec<Vec<f32>>, StageError>
where
    B::Device: Send,
{
    let layers = 0..file.config().layers;
    let mut stage = BurnStage::<B>::load(file.clone(), options(layers), device.clone(), "test".into(), None)?;
    let mut all = Vec::new();
    for (i, tokens) in tokens.chunks(chunk).enumerate() {
        let rows = Rows { sequence: 1, position: i * chunk, input: RowsIn::Tokens(tokens), logits: true };
        for out in stage.forward(&[rows])? {
            match out {
                RowsOut::Logits(logits) => all.push(logits),
                RowsOut::Hidden(_) | RowsOut::Nothing => {}
            }
        }
    }
    Ok(all)
}

/// The final logits of two equal sequences in one batch through two stages.
fn batch_and_cut<B: MeshBackend>(
    file: &std::sync::Arc<ModelFile>,
    device: &B::Device,
) -> Result<Vec<Vec<f32>>, StageError>
where
    B::Device: Send,
{
    let load = |layers| BurnStage::<B>::load(file.clone(), options(layers), device.clone(), "test".into(), None);
    let (mut first, mut second) = (load(0..1)?, load(1..file.config().layers)?);
    let rows = |sequence, input| Rows { sequence, position: 0, input, logits: true };
    let tokens = RowsIn::Tokens(&TOKENS);
    let hidden = first.forward(&[rows(1, tokens), rows(2, tokens)])?;
    let batch: Vec<Rows<'_>> = hidden
        .iter()
        .zip(1..)
        .filter_map(|(out, sequence)| match out {
            RowsOut::Hidden(hidden) => Some(rows(sequence, RowsIn::Hidden(hidden))),
            RowsOut::Logits(_) | RowsOut::Nothing => None,
        })
        .collect();
    let out = second.forward(&batch)?;
    Ok(out
        .into_iter()
        .map(|out| match out {
            RowsOut::Logits(logits) => logits,
            RowsOut::Hidden(_) | RowsOut::Nothing => Vec::new(),
        })
        .collect())
}

fn random(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn tensor<B: MeshBackend>(values: &[f32], width: usize, device: &B::Device) -> Tensor<B, 2> {
    crate::stage::upload(values.to_vec(), width, device)
}

fn values<B: MeshBackend>(rows: Tensor<B, 2>, device: &B::Device) -> Result<Vec<f32>, String> {
    crate::stage::read::<B>(rows, device).map_err(|error| error.to_string())
}

fn compare<B: MeshBackend>(
    y: Tensor<B, 2>,
    exact: &[f64],
    tolerance: f64,
    device: &B::Device,
) -> Result<String, String> {
    errors(&values::<B>(y, device)?, exact, tolerance)
}

/// The largest error relative to the largest exact value.
fn errors(found: &[f32], exact: &[f64], tolerance: f64) -> Result<String, String> {
    if found.len() != exact.len() {
        return Err(format!("{} results, expected {}", found.len(), exact.len()));
    }
    let size = exact.iter().fold(f64::MIN_POSITIVE, |m, e| m.max(e.abs()));
    let mut worst = 0f64;
    for (i, (f, e)) in found.iter().zip(exact).enumerate() {
        let error = (f64::from(*f) - e).abs() / size;
        // Written so that NaN is a failure too.
        let close = error <= tolerance;
        if !close {
            return Err(format!("element {i} is {f}, exactly {e}: error {error:.1e}, at most {tolerance:.0e}"));
        }
        worst = worst.max(error);
    }
    Ok(format!("error {worst:.1e}"))
}
