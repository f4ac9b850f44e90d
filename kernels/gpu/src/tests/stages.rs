//! Tests of stages on the machine's Vulkan device, or on its CUDA device if `MESHNODE_DEVICE` is `cuda`.
use std::sync::Arc;
use std::time::Instant;

use kernels::device::DeviceId;
use kernels::threads::Threads;
use kernels_models::ram::movable_bytes;
use kernels_models::sampler::{LogitChanges, SamplerSettings};
use kernels_models::stage::{
    Activations, Draw, Drawn, RequestedOutput, Rows, RowsIn, RowsOut, StageError, StageOptions, Submitted,
};
use kernels_models::weights::testing::{TinyModel, real_model_path};
use kernels_models::weights::{Architecture, ModelFile};

use super::device;
use crate::{Check, load_profiled, load_stage, measure_gpu, probe, selftest};

fn options(file: &ModelFile, context: usize) -> StageOptions {
    let layers = 0..file.config().layers;
    StageOptions { layers, sequences: 2, context, activations: Activations::Int8, ram: 0, threads: 2 }
}

/// The most likely token of a position.
fn draw(position: u32) -> RequestedOutput<'static> {
    let (settings, changes) = (SamplerSettings::greedy(), LogitChanges::default());
    RequestedOutput::Token(Draw { settings, position, changes, logprobs: None })
}

#[test]
fn a_device_gives_the_bits_of_the_reference() {
    let Some(device) = device() else { return };
    let start = Instant::now();
    let mut done = |check: &Check| eprintln!("{:?}: {}", start.elapsed(), check.name);
    let checks = selftest(device, &mut done).unwrap();
    let failed: Vec<_> = checks.iter().filter(|check| check.outcome.is_err()).collect();
    assert!(failed.is_empty(), "{} of {} checks failed: {failed:#?}", failed.len(), checks.len());
    assert!(checks.len() >= 30, "only {} checks ran", checks.len());
}

#[test]
fn the_cpu_gives_the_bits_of_the_reference() {
    let checks = selftest(DeviceId::Cpu, &mut |_| ()).unwrap();
    assert!(checks.iter().all(|check| check.outcome.is_ok()), "{checks:#?}");
}

/// Plausible rates, measured in bounded time even by a software driver on a busy CPU.
#[test]
fn measured_rates_of_a_gpu_are_plausible() {
    let Some(device) = device() else { return };
    let start = Instant::now();
    let shown = measure_gpu(device).expect("the device exists");
    let (products, copy_bytes_s) = (shown.products.expect("products"), shown.copy_bytes_s.expect("a copy"));
    let cache_bytes_s = shown.cache_bytes_s.expect("attention");
    let rates = format!("attention {cache_bytes_s} B/s, copies {copy_bytes_s} B/s");
    eprintln!("{products:?}, {rates}, in {:?} with compilation", start.elapsed());
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    // From a software driver on one busy core to more than any device reaches.
    assert!((0.001..50_000.0).contains(&gigabytes(products.weight_bytes_s)), "{products:?}");
    assert!((0.001..5_000_000.0).contains(&gigabytes(products.flops_s)), "{products:?}");
    assert!((1_000..5_000_000_000).contains(&products.step_ns), "{products:?}");
    assert!(products.layer_ns < 1_000_000_000, "{products:?}");
    assert!((0.001..50_000.0).contains(&gigabytes(cache_bytes_s)), "{rates}");
    assert!((0.01..50_000.0).contains(&gigabytes(copy_bytes_s)), "{rates}");
}

#[test]
fn the_cpu_is_listed_first_and_missing_devices_are_named() {
    assert_eq!(probe()[0].id, DeviceId::Cpu);
    for error in
        [measure_gpu(DeviceId::Vulkan(77)).unwrap_err(), selftest(DeviceId::Vulkan(77), &mut |_| ()).unwrap_err()]
    {
        assert!(error.contains("vulkan:77"), "{error}");
    }
}

/// Also checks that a rejected batch changes nothing.
#[test]
fn a_stage_rejects_invalid_batches() {
    let Some(device) = device() else { return };
    let file = TinyModel::default().open();
    let mut stage = load_stage(file.clone(), options(&file, 8), device).unwrap();
    let rows = |sequence, position, tokens| Rows {
        sequence,
        position,
        input: RowsIn::Tokens(tokens),
        output: RequestedOutput::Logits,
    };
    stage.forward(&mut Threads::new(2).unwrap(), &[rows(1, 0, &[1, 2, 3])]).unwrap();
    let hidden = [0f32; 256];
    let wrong = [
        rows(1, 4, &[1]),
        rows(1, 3, &[]),
        rows(1, 3, &[1, 2, 3, 4, 5, 6]),
        rows(1, 3, &[u32::MAX]),
        Rows { sequence: 1, position: 3, input: RowsIn::hidden(&hidden), output: RequestedOutput::Nothing },
    ];
    for wrong in wrong {
        let error = stage.forward(&mut Threads::new(2).unwrap(), &[rows(2, 0, &[1]), wrong]).unwrap_err();
        assert!(matches!(error, StageError::Input(_)), "{error}");
        assert_eq!((stage.cached_positions(1), stage.cached_positions(2)), (3, 0), "{error}");
    }
    // Two contexts of one page, and one page more.
    let crowd: Vec<Rows<'_>> = (2..5).map(|sequence| rows(sequence, 0, &[1])).collect();
    assert!(matches!(stage.forward(&mut Threads::new(2).unwrap(), &crowd), Err(StageError::Input(_))));
    stage.release(1);
    stage.forward(&mut Threads::new(2).unwrap(), &crowd).unwrap();
    let mut second = load_stage(file.clone(), StageOptions { layers: 1..3, ..options(&file, 8) }, device).unwrap();
    let ragged =
        Rows { sequence: 1, position: 0, input: RowsIn::hidden(&hidden[1..]), output: RequestedOutput::Nothing };
    let error = second.forward(&mut Threads::new(2).unwrap(), &[ragged]).unwrap_err();
    assert!(matches!(error, StageError::Input(_)), "{error}");
}

/// More conversations than the device has pages for, by turns: each continues with the bits of the CPU, whose cache has them all.
#[test]
fn conversations_move_to_ram_and_back() {
    let Some(device) = device() else { return };
    let file = TinyModel::default().open();
    let mut threads = Threads::new(1).unwrap();
    // Four pages and one for a challenge.
    let mut stage = load_stage(file.clone(), options(&file, 256), device).unwrap();
    let mut reference =
        load_stage(file.clone(), StageOptions { sequences: 8, ..options(&file, 256) }, DeviceId::Cpu).unwrap();
    let room = stage.use_ram(64 << 20);
    assert!(room >= 8 * 128, "room for {room} positions");
    let prompt = |sequence: u64| -> Vec<u32> { (0..140).map(|i| (i * 31 + 7 * sequence as u32) % 260).collect() };
    let mut position = 0;
    for turn in 0..4 {
        for sequence in 1..=5 {
            let tokens = if turn == 0 { prompt(sequence) } else { vec![turn * 9 + sequence as u32] };
            // Sampled steps are queued ahead of their requests, and run on a stream of their own.
            let last = position + tokens.len() as u32;
            let output = if turn % 2 == 0 { RequestedOutput::Logits } else { draw(last) };
            let batch = [Rows { sequence, position: position as usize, input: RowsIn::Tokens(&tokens), output }];
            let expected = reference.forward(&mut threads, &batch).unwrap();
            assert_eq!(stage.forward(&mut threads, &batch).unwrap(), expected, "turn {turn} of {sequence}");
        }
        position = 140 + turn;
    }
    // One that continues another shares its pages, wherever they are.
    for stage in [&mut stage, &mut reference] {
        stage.share(1, 6, 128).unwrap();
    }
    let tokens = [3; 5];
    let batch = [Rows { sequence: 6, position: 128, input: RowsIn::Tokens(&tokens), output: RequestedOutput::Logits }];
    assert_eq!(stage.forward(&mut threads, &batch).unwrap(), reference.forward(&mut threads, &batch).unwrap());
    (1..=6).for_each(|sequence| stage.release(sequence));
}

/// The same token again and again uses few experts: those of them in RAM move to the device, and no bit changes.
#[test]
fn experts_in_ram_that_are_used_move_to_the_device() {
    let Some(device) = device() else { return };
    for architecture in [Architecture::GptOss, Architecture::Qwen3Moe] {
        let file = TinyModel { experts: Some([8, 2]), layers: 2, ..TinyModel::of(architecture) }.open();
        let options = options(&file, 256);
        let ram = movable_bytes(&file, &options).unwrap();
        let mut stage = load_profiled(file.clone(), StageOptions { ram, ..options.clone() }, device).unwrap();
        let mut reference = load_stage(file.clone(), options.clone(), DeviceId::Cpu).unwrap();
        let mut threads = Threads::new(2).unwrap();
        let mut position = 0;
        // Passes of many rows may bring the experts to the device without counting uses, so single rows do.
        for rows in [70].into_iter().chain([1; 12]).chain([70, 1, 40, 1]) {
            let (tokens, output) = (vec![7; rows], RequestedOutput::Logits);
            let batch = [Rows { sequence: 1, position, input: RowsIn::Tokens(&tokens), output }];
            let expected = reference.forward(&mut threads, &batch).unwrap();
            assert_eq!(stage.forward(&mut threads, &batch).unwrap(), expected, "{architecture:?} at {position}");
            position += rows;
        }
        assert!(stage.experts_moved() > 0, "{architecture:?}: no expert moved");
        let too_much = StageOptions { ram: ram + 1, ..options };
        let error = load_stage(file, too_much, device).err().expect("fewer experts may lie in RAM").to_string();
        assert!(error.contains("MiB of experts were to lie in RAM"), "{error}");
    }
}

/// Prefill of two passes, then steps with and without sampling: the device holds queued batches of two stages, and a new batch
/// discards an unfinished one.
#[test]
fn batches_of_two_stages_are_queued_at_the_same_time() {
    let Some(device) = device() else { return };
    let file = TinyModel::default().open();
    let mut threads = Threads::new(1).unwrap();
    let mut stages = [0, 1].map(|_| load_stage(file.clone(), options(&file, 600), device).unwrap());
    let mut reference = load_stage(file.clone(), options(&file, 600), DeviceId::Cpu).unwrap();
    let prompt: Vec<u32> = (0..514).map(|i| i * 31 % 260).collect();
    let mut next = vec![7];
    for (position, want) in
        [(0, RequestedOutput::Logits), (514, draw(515)), (515, draw(516)), (516, RequestedOutput::Logits)]
    {
        let tokens = if position == 0 { &prompt[..] } else { &next };
        let batch = [Rows { sequence: 1, position, input: RowsIn::Tokens(tokens), output: want }];
        for stage in &mut stages {
            assert!(matches!(stage.submit(&mut threads, &batch), Ok(Submitted::Queued)));
        }
        assert!(matches!(stages[1].submit(&mut threads, &batch), Ok(Submitted::Queued)));
        let expected = reference.forward(&mut threads, &batch).unwrap();
        for stage in &mut stages {
            assert!(stage.finish(&mut threads, &batch).unwrap() == expected, "position {position}");
            assert!(stage.finish(&mut threads, &batch).is_err(), "nothing is queued");
        }
        if let [RowsOut::Token(Drawn { token, .. })] = expected[..] {
            next = vec![token];
        }
    }
}

/// Positions in the cache may be rewritten: the results are as if the new tokens had been there from the start.
#[test]
fn rewritten_positions_give_the_same_bits() {
    let Some(device) = device() else { return };
    let file = TinyModel::default().open();
    let mut stage = load_stage(file.clone(), options(&file, 16), device).unwrap();
    let mut run = |sequence, position, tokens: &[u32]| {
        let rows = Rows { sequence, position, input: RowsIn::Tokens(tokens), output: RequestedOutput::Logits };
        stage.forward(&mut Threads::new(2).unwrap(), &[rows]).unwrap()
    };
    run(1, 0, &[1, 2, 9, 9, 9]);
    assert_eq!(run(1, 2, &[3, 4]), run(2, 0, &[1, 2, 3, 4]));
    assert_eq!(stage.cached_positions(1), 4);
    let resident = stage.resident_bytes();
    assert!(resident.weights > 0 && resident.working > 0);
}

#[test]
fn a_model_larger_than_the_device_is_rejected_with_the_sizes() {
    let Some(device) = device() else { return };
    let file = TinyModel::default().open();
    let options = StageOptions { sequences: 1 << 20, context: 1 << 20, ..options(&file, 8) };
    let error = load_stage(file, options, device).err().expect("no machine holds this");
    assert!(matches!(&error, StageError::Input(text) if text.contains("MiB")), "{error}");
}

/// SmolLM2, teacher-forced with the tokens of an f32 oracle: 8-bit activations choose the same tokens wherever the margin is wide.
#[test]
fn smollm2_gives_the_oracles_tokens_and_the_cpus_bits() {
    let (Some(path), Some(device)) = (real_model_path(), device()) else { return };
    let file = ModelFile::open(&path).unwrap();
    let mut stage = load_stage(Arc::clone(&file), options(&file, 64), device).unwrap();
    let mut reference = load_stage(Arc::clone(&file), options(&file, 64), DeviceId::Cpu).unwrap();
    let oracle: serde_json::Value =
        serde_json::from_str(include_str!("../../../../tests/oracles/smollm2_greedy.json")).unwrap();
    let prompt = &oracle["prompts"][0];
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let mut tokens = ids(&prompt["ids"]);
    let greedy = ids(&prompt["numpy_f32"]["greedy_ids"]);
    let margins = &prompt["numpy_f32"]["margins"];
    let (mut position, mut agreed) = (0, 0);
    for (i, &next) in greedy[..6].iter().enumerate() {
        let rows = [Rows { sequence: 1, position, input: RowsIn::Tokens(&tokens), output: RequestedOutput::Logits }];
        let out = stage.forward(&mut Threads::new(2).unwrap(), &rows).unwrap();
        assert!(
            out == reference.forward(&mut Threads::new(2).unwrap(), &rows).unwrap(),
            "token {i}: other bits than on the CPU"
        );
        let RowsOut::Logits(logits) = &out[0] else { panic!("no logits") };
        if margins[i].as_f64().unwrap() > 1.0 {
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            assert_eq!(best as u32, next, "token {i}");
            agreed += 1;
        }
        position += tokens.len();
        tokens = vec![next];
    }
    assert!(agreed >= 2, "only {agreed} margins were wide enough to compare");
}
