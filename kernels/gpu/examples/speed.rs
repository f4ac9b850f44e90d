//! How fast the engine is on a shape of model: development's own measurement.
#![allow(clippy::print_stdout, reason = "prints its report")]
use std::time::Instant;

use kernels::quant::QuantType;
use kernels::stage::{Activations, Rows, RowsIn, RowsOut, Stage, StageOptions};
use kernels::weights::ModelFile;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args[1] == "selftest" {
        let device = args[2].parse::<kernels::device::DeviceChoice>().unwrap();
        let kernels::device::DeviceChoice::This(device) = device else { panic!("a device") };
        let start = Instant::now();
        let checks = kernels_gpu::selftest(device).unwrap();
        let wrong: Vec<_> = checks.iter().filter(|c| c.outcome.is_err()).collect();
        println!("{} checks, {} wrong, in {:?}: {wrong:?}", checks.len(), wrong.len(), start.elapsed());
        return;
    }
    let shape = kernels_gpu::Shape::named(&args[1]).expect("a shape");
    let path = std::path::PathBuf::from(format!("/tmp/{}.gguf", args[1]));
    let start = Instant::now();
    if !path.exists() {
        shape.write(&path, QuantType::Q4_0).unwrap();
    }
    println!("written in {:?}", start.elapsed());
    let file = ModelFile::open(&path).unwrap();
    let options = StageOptions {
        layers: 0..shape.layers,
        sequences: 8,
        context: 4608,
        activations: Activations::Int8,
        threads: 16,
    };
    if args.get(2).is_some_and(|d| d == "vulkan") {
        run::<cubecl::wgpu::WgpuRuntime>(&file, options);
    } else {
        run::<cubecl::cuda::CudaRuntime>(&file, options);
    }
}

fn run<R: kernels_gpu::Platform>(file: &ModelFile, options: StageOptions)
where
    R::Device: Default,
{
    let client = R::client(&R::Device::default());
    println!("{:?}", kernels_gpu::Abilities::of(&client).unwrap());
    let start = Instant::now();
    let mut stage = kernels_gpu::load::<R>(file, options, client.clone(), 0, None).unwrap();
    println!("loaded in {:?}: {:?}", start.elapsed(), stage.resident_bytes());
    let tokens = |n: usize| (0..n as u32).map(|i| (i * 37 + 11) % 1000).collect::<Vec<_>>();
    let forward = |stage: &mut dyn Stage, rows: &[(u64, usize, usize)], logits: bool| {
        let data: Vec<Vec<u32>> = rows.iter().map(|r| tokens(r.2)).collect();
        let batch: Vec<Rows<'_>> = rows
            .iter()
            .zip(&data)
            .map(|(r, t)| Rows { sequence: r.0, position: r.1, input: RowsIn::Tokens(t), logits })
            .collect();
        let out = stage.forward(&batch).unwrap();
        let sum: f32 = out.iter().map(|o| if let RowsOut::Logits(l) = o { l.iter().sum::<f32>() } else { 0.0 }).sum();
        assert!(sum.is_finite());
    };
    let sync = || cubecl::future::block_on(client.sync()).unwrap();
    let start = Instant::now();
    forward(&mut stage, &[(0, 0, 512)], true);
    forward(&mut stage, &[(0, 512, 1)], true);
    println!("first (compiles) {:?}", start.elapsed());
    for (n, at) in [(1, 512usize), (1, 4096), (8, 512), (512, 0)] {
        let times = stage.engine_mut().step_times(n, at).unwrap();
        let sum: f64 = times.iter().map(|t| t.1).sum();
        println!("{n} rows at {at}, us a layer: {:.1} of", sum * 1e6);
        times.iter().for_each(|(step, t)| print!("  {step:?} {:.1}", t * 1e6));
        println!();
    }
    let mut forward = |rows: &[(u64, usize, usize)], logits: bool| forward(&mut stage, rows, logits);
    for n in [32usize, 128, 512] {
        let mut times: Vec<f64> = (0..5)
            .map(|_| {
                let start = Instant::now();
                forward(&[(0, 0, n)], true);
                start.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("prefill {n}: {:.1} tok/s", n as f64 / times[2]);
    }
    for at in [512usize, 4096] {
        let mut p = 0;
        while p < at {
            forward(&[(0, p, 512)], false);
            p += 512;
        }
        sync();
        for logits in [false, true] {
            let start = Instant::now();
            for i in 0..128 {
                forward(&[(0, at + i, 1)], logits);
            }
            sync();
            let each = start.elapsed().as_secs_f64() / 128.0;
            println!("decode at {at}, logits {logits}: {:.3} ms = {:.1} tok/s", each * 1e3, 1.0 / each);
        }
    }
    for s in 1..8 {
        forward(&[(s, 0, 512)], false);
    }
    for many in [2u64, 4, 8] {
        let start = Instant::now();
        for i in 0..32 {
            let rows: Vec<_> = (0..many).map(|s| (s, 512 + i, 1)).collect();
            forward(&rows, true);
        }
        sync();
        let each = start.elapsed().as_secs_f64() / 32.0;
        println!("{many} sequences: {:.3} ms a step = {:.1} tok/s", each * 1e3, many as f64 / each);
    }
}
