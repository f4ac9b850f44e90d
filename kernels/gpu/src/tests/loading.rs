//! Loading weights onto a device: random weights without a file, damaged weights, too little memory, and freeing.
use std::sync::Arc;

use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::wgpu::WgpuRuntime;
use kernels::device::DeviceId;
use kernels::quant::QuantType;
use kernels::threads::Threads;
use kernels::tile::{Layout, ROWS};
use kernels_models::stage::{Activations, RequestedOutput, Rows, RowsIn, RowsOut, Stage, StageError, StageOptions};
use kernels_models::weights::testing::TinyModel;
use kernels_models::weights::{Architecture, ModelFile};

use super::device;
use crate::device::wgpu_device;
use crate::engine::memory::{Memory, buffer_max};
use crate::load::random;
use crate::shapes::is_router;
use crate::{Platform, Shape, load, load_profiled, load_random, load_stage};

const SHAPE: Shape = Shape {
    name: "tiny",
    family: Architecture::Qwen2,
    layers: 3,
    width: 256,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    ffn: 512,
    experts: None,
    vocab: 272,
    tied: false,
};

fn options(layers: usize) -> StageOptions {
    StageOptions { layers: 0..layers, sequences: 2, context: 300, activations: Activations::Int8, ram: 0, threads: 2 }
}

/// Runs a prompt and a decode step.
fn logits(stage: &mut dyn Stage) -> Vec<RowsOut> {
    let rows = |position, tokens| Rows {
        sequence: 1,
        position,
        input: RowsIn::Tokens(tokens),
        output: RequestedOutput::Logits,
    };
    let mut all = stage.forward(&mut Threads::new(2).unwrap(), &[rows(0, &[5, 77, 260, 3, 3])]).unwrap();
    all.extend(stage.forward(&mut Threads::new(2).unwrap(), &[rows(5, &[9])]).unwrap());
    all
}

fn all(file: &ModelFile) -> Vec<u8> {
    file.read(&(0..file.file_len())).unwrap().to_vec()
}

/// The same model as a [`Shape::sketch`], with all random matrices in the file.
fn whole(shape: &Shape, quant: QuantType) -> Arc<ModelFile> {
    let sketch = shape.sketch(quant).unwrap();
    let mut bytes = all(&sketch);
    for tensor in sketch.tensors().iter().filter(|tensor| tensor.rows > 1 && !is_router(&tensor.name)) {
        let strip = random::rows(tensor.quant, tensor.cols);
        let (block_bytes, block_len) = (tensor.quant.block_bytes(), tensor.quant.block_len());
        let in_row = tensor.cols / block_len;
        // Bytes of a block with the low four bits of its codes, and a mask of their lowest bits: two codes per byte, or one.
        let places = [
            (QuantType::F32, 0..0, 0),
            (QuantType::Q4_0, 2..18, 0x11),
            (QuantType::Q8_0, 2..34, 1),
            (QuantType::Q6K, 0..128, 0x11),
        ];
        let (_, codes, both) =
            places.into_iter().find(|(kind, ..)| *kind == tensor.quant).expect("a format in `places`");
        // The device stores these matrices as one.
        let before: &[&str] = match tensor.name.rsplit_once('.').and_then(|(name, _)| name.rsplit_once('.')) {
            Some((_, "attn_k")) => &["attn_q"],
            Some((_, "attn_v")) => &["attn_q", "attn_k"],
            Some((_, "ffn_up")) => &["ffn_gate"],
            Some((_, "ffn_up_exps")) => &["ffn_gate_exps"],
            _ => &[],
        };
        let block_name = tensor.name.rsplitn(3, '.').last().unwrap();
        let rows_of = |name: &&str| sketch.tensor(&format!("{block_name}.{name}.weight")).unwrap().rows;
        let first_row: usize = before.iter().map(rows_of).sum();
        let file = &mut bytes[tensor.range.start as usize..tensor.range.end as usize];
        for (i, block) in file.chunks_exact_mut(block_bytes).enumerate() {
            let (row, column) = (first_row + i / in_row, i % in_row * block_len);
            let from = i % (ROWS * in_row) * block_bytes;
            block.copy_from_slice(&strip[from..from + block_bytes]);
            let flips = random::flips(row / ROWS, column / 256) as u8 * both;
            block[codes.clone()].iter_mut().for_each(|byte| *byte ^= flips);
        }
    }
    ModelFile::from_bytes(bytes.into()).unwrap()
}

#[test]
fn random_weights_compute_like_the_same_weights_from_a_file() {
    let Some(device) = device() else { return };
    let models = [
        (Shape { family: Architecture::Llama, tied: true, ..SHAPE }, QuantType::Q8_0),
        (SHAPE, QuantType::Q4_0),
        (Shape { family: Architecture::Qwen3, vocab: 281, ..SHAPE }, QuantType::Q6K),
        (Shape { family: Architecture::Qwen3Moe, experts: Some([6, 2]), ..SHAPE }, QuantType::Q4_0),
    ];
    for (shape, quant) in models {
        let mut made = load_random(&shape, quant, &|_| options(3), device).unwrap();
        let mut loaded = load_stage(whole(&shape, quant), options(3), device).unwrap();
        assert!(logits(&mut *made) == logits(&mut *loaded), "{shape:?} in {}", quant.name());
        assert_eq!(made.resident_bytes(), loaded.resident_bytes());
    }
}

#[test]
fn an_invalid_shape_is_rejected() {
    let Some(device) = device() else { return };
    let narrow = Shape { width: 64, heads: 1, kv_heads: 1, ..SHAPE };
    for (shape, quant, why) in [
        (narrow, QuantType::Q4K, "whole blocks"),
        (Shape { family: Architecture::Gemma3, ..SHAPE }, QuantType::Q4_0, "gemma3"),
    ] {
        let error = load_random(&shape, quant, &|_| options(3), device).err().expect("no model");
        assert!(matches!(&error, StageError::Input(text) if text.contains(why)), "{error}");
    }
    let error = load_random(&SHAPE, QuantType::Q4_0, &|_| options(3), DeviceId::Cpu).err().expect("no GPU");
    assert!(error.to_string().contains("cpu"), "{error}");
}

/// The header file is unlinked once it is open.
#[test]
fn a_sketch_leaves_no_file_behind() {
    let shape = Shape { name: "left-behind", ..SHAPE };
    let sketch = shape.sketch(QuantType::Q4_0).unwrap();
    assert!(sketch.path().is_some_and(|path| !path.exists()));
    let norm = sketch.tensor("output_norm.weight").unwrap().to_f32().unwrap();
    assert!(norm.iter().all(|number| *number == 1.0), "{norm:?}");
}

#[test]
fn a_profile_counts_launches_and_bytes() {
    let Some(device) = device() else { return };
    let load = |layers| load_random(&Shape { layers, ..SHAPE }, QuantType::Q4_0, &|_| options(layers), device).unwrap();
    let (mut two, three) = (load(2), load(3));
    let (few, many) = (two.launches(), three.launches());
    assert_eq!(few.per_layer, many.per_layer);
    assert_eq!(many.per_step - few.per_step, many.per_layer, "{few:?}, {many:?}");
    assert!(few.per_layer >= 9 && few.per_step > 2 * few.per_layer, "{few:?}");

    let matrix = |rows, cols| Layout::of(QuantType::Q4_0).matrix_bytes(rows, cols) as u64;
    let layer = matrix(256 + 2 * 128, 256) + matrix(256, 256) + matrix(2 * 512, 256) + matrix(256, 512);
    assert_eq!(three.bytes_per_token() - two.bytes_per_token(), layer);
    assert_eq!(two.bytes_per_token(), 2 * layer + matrix(272, 256));

    let phases = two.load_phases();
    let parts = [phases.open_s, phases.convert_s, phases.upload_s, phases.proof_s, phases.kernels_s];
    assert!(parts.iter().all(|part| *part >= 0.0) && parts.iter().sum::<f64>() <= phases.total_s, "{phases:?}");
    assert!(phases.open_s > 0.0 && phases.proof_s > 0.0, "{phases:?}");
    let times = two.step_times(1, 130).unwrap();
    assert!(times.len() == 9 && times.iter().all(|(_, seconds)| *seconds > 0.0), "{times:?}");
}

/// Also after the first slab of a matrix, and in a matrix that is stored joined with another.
#[test]
fn a_damaged_weight_is_named() {
    let Some(device) = device() else { return };
    let model = TinyModel { quant: QuantType::Q8_0, ..TinyModel::default() };
    let sound = model.open();
    for (name, row, column) in [("blk.1.ffn_up.weight", 509, 64), ("token_embd.weight", 3, 0)] {
        let tensor = sound.tensors().iter().find(|tensor| tensor.name == name).unwrap();
        let at = tensor.range.start + row * tensor.row_bytes() + column / 32 * QuantType::Q8_0.block_bytes() as u64;
        let mut bytes = all(&sound);
        bytes[at as usize..][..2].copy_from_slice(&[0, 0x7c]); // an infinite scale
        let file = ModelFile::from_bytes(bytes.into()).unwrap();
        let error = load_profiled(file, options(3), device).err().expect("damaged").to_string();
        let place = format!("tensor {name:?}, row {row}, columns from {column}");
        assert!(error.contains(&place), "{error}");
    }
}

#[test]
fn an_allocation_that_is_too_large_is_an_error_and_harms_nothing() {
    match device() {
        Some(DeviceId::Cuda(_)) => no_room_on(&CudaRuntime::client(&Default::default())),
        Some(_) => no_room_on(&WgpuRuntime::client(&wgpu_device(0).unwrap())),
        None => {}
    }
}

fn no_room_on<R: Platform>(client: &ComputeClient<R>) {
    let memory = Memory { client, number: 0 };
    let error = memory.buffer(buffer_max(client) as usize + 4, "weights").unwrap_err();
    assert!(matches!(&error, StageError::Device(text) if text.contains("MiB of weights")), "{error}");
    // Like a failed allocation on CubeCL's thread: the handle exists, its memory does not.
    let never = cubecl::server::Handle::new(cubecl::stream_id::StreamId::current(), 64);
    assert!(memory.check(&never, "scratch").is_err());
    let words = [7u32; 16];
    let buffer = memory.created(bytemuck::cast_slice(&words).to_vec(), "words").unwrap();
    assert_eq!(bytemuck::pod_collect_to_vec::<u8, u32>(&client.read_one(buffer).unwrap()), words);
}

#[test]
fn a_dropped_stage_frees_its_memory() {
    match device() {
        Some(DeviceId::Cuda(_)) => frees_memory_on(&CudaRuntime::client(&Default::default())),
        Some(_) => frees_memory_on(&WgpuRuntime::client(&wgpu_device(0).unwrap())),
        None => {}
    }
}

fn frees_memory_on<R: Platform>(client: &ComputeClient<R>) {
    let reserved = || client.memory_usage().unwrap().bytes_reserved;
    let file = TinyModel::default().open();
    let mut stage = load::<R>(&file, options(3), client.clone(), 0, None).unwrap();
    logits(&mut stage);
    let (loaded, resident) = (reserved(), stage.resident_bytes());
    assert!(loaded >= resident.weights, "{loaded} bytes of {resident:?}");
    // Other threads than the loading one drop stages.
    std::thread::spawn(move || drop(stage)).join().unwrap();
    let left = reserved();
    assert!(left + resident.weights <= loaded, "{left} of {loaded} bytes are left of {resident:?}");
    // A load that fails half-way frees its memory too.
    let mut bytes = all(&file);
    let damaged = file.tensors().iter().find(|tensor| tensor.name == "blk.2.ffn_down.weight").unwrap();
    bytes[damaged.range.start as usize + ROWS * damaged.row_bytes() as usize..][..2].copy_from_slice(&[0, 0x7c]);
    let damaged = ModelFile::from_bytes(bytes.into()).unwrap();
    assert!(load::<R>(&damaged, options(3), client.clone(), 0, None).is_err());
    assert_eq!(reserved(), left);
}
