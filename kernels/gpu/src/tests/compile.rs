//! Every kernel as CUDA text, compiled for the cards that people have where NVRTC and ptxas are installed: no GPU is needed.
use std::path::PathBuf;
use std::process::Command;

use cubecl::ir::{DeviceProperties, HardwareProperties, MemoryDeviceProperties};
use cubecl::prelude::*;
use cubecl::profile::TimingMethod;
use cubecl::server::Handle;
use cubecl::stream_id::StreamId;
use kernels::order::Activation;
use kernels::quant::QUANT_TYPES;

use crate::Platform;
use crate::arithmetic::Abilities;
use crate::attention::{Heads, LayerHeads, Pages, Partials, Places, attend, place};
use crate::graph::Source;
use crate::product::{Activations, Matrix, Target, product};
use crate::rows::{Wanted, cap, embed, gated, norm, norm_add};

fn no_device() -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 64,
        max_shared_memory_size: 99 << 10,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_cpu_cores: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        max_vector_size: 16,
    };
    let memory = MemoryDeviceProperties { max_page_size: 1 << 34, alignment: 512 };
    DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System)
}

/// Every kernel in the forms that models use.
fn launch_all<R: Platform>(client: &ComputeClient<R>) {
    let able = Abilities { fused: true, halves: true, matrices: true };
    let handle = || Handle::new(StreamId::current(), 1 << 30);
    let activations = |cols| Activations { floats: handle(), codes: handle(), scales: handle(), cols };
    let (y, vector) = (handle(), handle());
    for kind in QUANT_TYPES {
        for cols in [3584usize, 18_944] {
            let cols = cols.next_multiple_of(kind.block_len());
            let forms = [(1, false, 32_768), (1, true, 4096), (8, false, 32_768), (8, true, 4096), (64, true, 4096)];
            for (count, add, rows) in forms {
                let matrix = Matrix { kind, rows, cols, tiles: handle() };
                let target = Target { rows: &y, stride: rows, offset: 0, width: rows, bias: None, add };
                product(client, able, &matrix, &activations(cols), true, count, &target);
            }
        }
        let table = Matrix { kind, rows: 4096, cols: 4096, tiles: handle() };
        embed(client, able, &table, 0, &vector, 1, None, &y);
    }
    for (floats, integers) in [(false, true), (true, false)] {
        let wanted = Wanted { floats, integers };
        let x = activations(3584);
        norm(client, able, &y, &vector, 1e-6, None, 1, wanted, &x);
        norm(client, able, &y, &vector, 1e-6, Some(&vector), 1, wanted, &x);
        for activation in [Activation::Silu, Activation::Gelu] {
            gated(client, able, &y, activation, 1, wanted, &x);
        }
        for (heads, kv_heads, head_dim) in [(28, 4, 128), (9, 3, 64), (8, 1, 256), (16, 16, 96)] {
            {
                let (pairs, half_cells) = (head_dim / 2, integers);
                let heads = Heads { heads, kv_heads, head_dim, pairs, halves: true, half_cells };
                let rotary = handle();
                let layer = LayerHeads {
                    biases: Some(&vector),
                    norms: Some(&vector),
                    rotary: &rotary,
                    positions: 4096,
                    scale: 0.1,
                    window: Some(512),
                    cap: Some(50.0),
                    eps: 1e-6,
                };
                let places = Places { count: 1, rows: handle(), tables: handle(), tables_len: 32, blocks: 8 };
                let pages = Pages { pages: handle(), count: 32 };
                let partials = Partials { values: handle(), sums: handle(), room: 64 };
                place(client, able, heads, &layer, &places, &y, &vector, &pages);
                let x = activations(heads.queries());
                attend(client, able, heads, &layer, &places, &vector, &pages, &partials, wanted, &x);
                let plain = LayerHeads { biases: None, norms: None, window: None, cap: None, ..layer };
                place(client, able, heads, &plain, &places, &y, &vector, &pages);
                attend(client, able, heads, &plain, &places, &vector, &pages, &partials, wanted, &x);
            }
        }
    }
    norm_add(client, able, &y, &vector, 1e-6, 1, 3584, &vector);
    cap(client, able, &y, 4096, 30.0);
}

/// What people have: Ampere (A100, RTX 30), Ada (RTX 40), Hopper, Blackwell (RTX 50).
const ARCHITECTURES: [u32; 5] = [80, 86, 89, 90, 120];
/// Shared memory that a cube may have on all of them.
const SHARED_BYTES: u32 = 99 << 10;

/// Folders of CUDA's parts as pip installs them (`nvidia-cuda-nvcc-cu12` and the like), or a toolkit's.
fn toolkit() -> Option<(PathBuf, Vec<PathBuf>)> {
    let root = PathBuf::from(std::env::var_os("MESHNODE_CUDA")?);
    let parts = ["cuda_runtime", "cuda_cccl", "cuda_nvcc", "."].map(|part| root.join(part).join("include"));
    let ptxas = [root.join("cuda_nvcc/bin/ptxas"), root.join("bin/ptxas")].into_iter().find(|path| path.exists());
    Some((ptxas.expect("ptxas in MESHNODE_CUDA"), parts.into_iter().filter(|path| path.exists()).collect()))
}

#[test]
fn kernels_compile_for_every_card() {
    let sources = Source::all(no_device(), launch_all).expect("text of every kernel");
    assert!(sources.len() > 100, "{} kernels", sources.len());
    for source in &sources {
        assert!(source.shared_bytes <= SHARED_BYTES, "{}: {} bytes of shared memory", source.name, source.shared_bytes);
        assert!(
            !source.text.contains("(inf)") && !source.text.contains("(-inf)"),
            "{} has no literal for infinity",
            source.name
        );
    }
    let Some((ptxas, headers)) = toolkit() else {
        let required = std::env::var("MESHNODE_REQUIRE").is_ok_and(|all| all.split(',').any(|one| one == "nvrtc"));
        assert!(!required, "MESHNODE_REQUIRE names nvrtc, but MESHNODE_CUDA names no folder that holds it");
        eprintln!("SKIPPED: MESHNODE_CUDA names no folder with NVRTC, its headers and ptxas");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let keep = std::env::var_os("MESHNODE_KEEP").map(PathBuf::from);
    let mut wrong = Vec::new();
    let only = std::env::var("MESHNODE_ONLY").unwrap_or_default();
    for (number, source) in sources.iter().enumerate().filter(|(_, source)| source.name.contains(&only)) {
        for architecture in ARCHITECTURES {
            if !only.is_empty() && architecture != 90 {
                continue;
            }
            let suffix = if architecture >= 90 { "a" } else { "" };
            let name = format!("sm_{architecture}{suffix}");
            let ptx = crate::graph::compile(&source.text, &format!("--gpu-architecture={name}"), &headers);
            let ptx = ptx.unwrap_or_else(|error| panic!("{} for {name}: {error}", source.name));
            let ptx: Vec<u8> = ptx.into_iter().map(|byte| byte as u8).take_while(|byte| *byte != 0).collect();
            let stem = format!("{number:03}-{}-{name}", source.name);
            let folder = keep.as_deref().unwrap_or(folder.path());
            let (text, image) = (folder.join(format!("{stem}.ptx")), folder.join(format!("{stem}.cubin")));
            std::fs::write(&text, ptx).unwrap();
            if keep.is_some() {
                std::fs::write(folder.join(format!("{stem}.cu")), &source.text).unwrap();
            }
            let run = Command::new(&ptxas)
                .arg("-v")
                .arg(format!("-arch={name}"))
                .args([&text])
                .arg("-o")
                .arg(&image)
                .output();
            let run = run.expect("ptxas runs");
            let said = String::from_utf8_lossy(&run.stderr).into_owned();
            let spills = said
                .lines()
                .any(|line| line.contains("spill") && !line.contains("0 bytes spill stores, 0 bytes spill loads"));
            if !run.status.success() || spills {
                wrong.push(format!(
                    "{stem}: {}",
                    said.lines().filter(|l| l.contains("spill") || l.contains("error")).collect::<String>()
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {} kernels: {wrong:#?}", wrong.len(), sources.len());
}
