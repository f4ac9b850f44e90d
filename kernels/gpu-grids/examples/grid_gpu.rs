//! Checks and benchmarks of grids on GPUs, in one program that can be copied to a machine with a GPU.
//!
//! `grid_gpu cuda:0|vulkan:0 [check|bench] [NAME_PART] [SCALE]` prints JSON lines. With CUDA, all devices are used
//! where tiles are spread over several.
use cubecl::prelude::*;
use kernels_gpu_grids::bench::figures;
use kernels_gpu_grids::check::checks_named;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let word = |i: usize, usual: &'static str| arguments.get(i).map_or(usual, String::as_str).to_owned();
    let (device, mode, part) = (word(0, "cuda:0"), word(1, "check"), word(2, ""));
    let (kind, number) = device.split_once(':').unwrap_or((&device, "0"));
    let number: usize = number.parse().unwrap_or(0);
    let scale: f64 = word(3, "1").parse().unwrap_or(1.0);
    match kind {
        "cuda" => {
            let count = cudarc_count().max(number + 1);
            let numbers = std::iter::once(number).chain((0..count).filter(|other| *other != number));
            let clients: Vec<_> =
                numbers.map(|i| cubecl::cuda::CudaRuntime::client(&cubecl::cuda::CudaDevice::new(i))).collect();
            run(&clients, &mode, &part, scale);
        }
        "vulkan" => {
            let device = match number {
                0 => cubecl::wgpu::WgpuDevice::DefaultDevice,
                number => cubecl::wgpu::WgpuDevice::DiscreteGpu(number),
            };
            run(&[cubecl::wgpu::WgpuRuntime::client(&device)], &mode, &part, scale);
        }
        _ => eprintln!("expected a GPU such as cuda:0 or vulkan:0, found {device}"),
    }
}

/// Number of CUDA devices of this machine.
fn cudarc_count() -> usize {
    use cudarc::driver::result;
    result::init().and_then(|()| result::device::get_count()).map_or(0, |count| count as usize)
}

#[expect(clippy::print_stdout, reason = "a report")]
fn run<R: Runtime>(clients: &[ComputeClient<R>], mode: &str, part: &str, scale: f64) {
    if mode == "check" {
        let one = checks_named(&clients[..1], part).into_iter().map(|check| (1, check));
        let several = if clients.len() > 1 { checks_named(clients, part) } else { Vec::new() };
        for (devices, check) in one.chain(several.into_iter().map(|check| (clients.len(), check))) {
            let (ok, text) = match check.outcome {
                Ok(text) => (true, text),
                Err(text) => (false, text),
            };
            println!("{}", serde_json::json!({"check": check.name, "devices": devices, "ok": ok, "text": text}));
        }
        return;
    }
    let mut report = |figure: &_| println!("{}", serde_json::to_string(figure).unwrap_or_default());
    if let Err(error) = figures(clients, scale, part, &mut report) {
        eprintln!("{error}");
    }
}
