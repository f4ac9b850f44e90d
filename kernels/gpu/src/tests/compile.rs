//! Generates every kernel as CUDA source and, if NVRTC and ptxas are installed, compiles it for common cards. Needs no GPU.
use std::path::{Path, PathBuf};
use std::process::Command;

use cubecl::ir::{DeviceProperties, HardwareProperties, MemoryDeviceProperties};
use cubecl::prelude::*;
use cubecl::profile::TimingMethod;
use cubecl::server::Handle;
use cubecl::stream_id::StreamId;
use kernels::boundary::Codec;
use kernels::order::Activation;
use kernels::order::experts::{Gating, Routing};
use kernels::quant::{QUANT_TYPES, QuantType};
use kernels_models::weights::Window;
use rayon::prelude::*;

use crate::arithmetic::Features;
use crate::attention::{Heads, LayerHeads, Pages, Partials, Places, attend, place};
use crate::boundary::RowEncoder;
use crate::compile::{Source, compile, ptx};
use crate::device::toolkit::{Toolkit, load_from};
use crate::draw::{DrawScratch, draw};
use crate::experts::{Choices, Scores, SharedOutput, combine, look_up, put_rows, route, scale_rows};
use crate::graph::Recorder;
use crate::product::operands::{Activations, Matrix, Target};
use crate::product::{
    ExpertMatrix, ExpertRows, Groups, Pairs, expert_product, gate_product, gates, group, is_chunked, product,
    router_chunks,
};
use crate::rows::{RowFormats, cap, embed, gated, norm, norm_add};

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

/// A label, and a function that launches the kernels to test.
type Launches = (String, Box<dyn FnOnce(&ComputeClient<Recorder>)>);

const ABLE: Features = Features { fused: true, halves: true, matrices: true };

fn handle() -> Handle {
    Handle::new(StreamId::current(), 1 << 30)
}

fn activations(cols: usize) -> Activations {
    Activations { floats: handle(), codes: handle(), scales: handle(), cols }
}

/// Products and embedding in one format.
fn products(client: &ComputeClient<Recorder>, kind: QuantType) {
    let (y, vector) = (handle(), handle());
    for cols in [3584usize, 18_944] {
        let cols = cols.next_multiple_of(kind.block_len());
        for (count, add, rows) in [
            (1, false, 32_768),
            (1, true, 4096),
            (8, false, 32_768),
            (8, true, 4096),
            (64, true, 4096),
            (64, true, 32_768),
        ] {
            let matrix = Matrix { kind, rows, cols, tiles: handle() };
            let parts = (rows == 4096).then_some(&y);
            let target = Target { rows: &y, stride: rows, offset: 0, width: rows, bias: None, add, parts };
            product(client, ABLE, &matrix, &activations(cols), true, count, &target);
        }
    }
    let table = Matrix { kind, rows: 4096, cols: 4096, tiles: handle() };
    for count in [1, 8] {
        if gates(&table, count, ABLE) {
            gate_product(client, ABLE, &table, &activations(4096), count, Activation::Silu, &activations(2048));
        }
    }
    embed(client, ABLE, &table, 0, &vector, 1, None, &y);
    let experts = ExpertMatrix { matrix: table, first: 0, matrices: 1, rows: 512, count: 8 };
    let sorted = Groups { order: handle(), blocks: [handle(), handle()] };
    for (integers, bias, groups) in [
        (true, None, None),
        (true, Some(&vector), None),
        (false, None, None),
        (true, None, Some(&sorted)),
        (true, Some(&vector), Some(&sorted)),
    ] {
        let pairs = Pairs { x: &activations(4096), experts: &vector, count: 8, each: 8, groups };
        let out = ExpertRows { rows: &y, stride: 512, offset: 0, bias };
        expert_product(client, ABLE, &experts, &pairs, integers, &out);
    }
}

/// The choice of experts, and the sum of their outputs.
fn mixtures(client: &ComputeClient<Recorder>) {
    let choices = Choices { experts: handle(), weights: handle(), used: 8 };
    let (gates, outputs) = (handle(), handle());
    let softmax = Routing { used: 8, gating: Gating::Softmax, normalised: true, scale: 1.0 };
    let sigmoid = Routing { gating: Gating::Sigmoid, ..softmax };
    let plain = Routing { normalised: false, ..softmax };
    for (count, routing, corrections) in [
        (8, softmax, None),
        (128, softmax, None),
        (512, plain, None),
        (128, sigmoid, Some(&gates)),
        (16, sigmoid, None),
    ] {
        let numbers = &handle();
        for (chunked, bias) in [(false, None), (true, None), (true, Some(&gates))] {
            let scores = Scores { numbers, chunked, bias };
            route(client, ABLE, &scores, corrections, count, routing, 1, &choices);
        }
        let groups = Groups { order: handle(), blocks: [handle(), handle()] };
        group(client, &choices.experts, count, 64, &groups);
    }
    let router = Matrix { kind: QuantType::F32, rows: 128, cols: 2048, tiles: handle() };
    for count in [1, 2, 8] {
        assert!(is_chunked(ABLE, &router, count));
        router_chunks(client, ABLE, &router, &handle(), count, &handle());
    }
    look_up(client, ABLE, &handle(), 128, &choices.experts, 8, &handle());
    put_rows(client, ABLE, &handle(), &handle(), 8, 2048, &handle(), 8);
    scale_rows(client, ABLE, &handle(), &handle(), 8, 2048);
    for (shared, weighted) in [(None, true), (Some(Some(&gates)), true), (Some(None), true), (Some(None), false)] {
        let shared = shared.map(|gates| SharedOutput { gates, outputs: &outputs });
        combine(client, ABLE, &handle(), &choices, weighted, shared.as_ref(), 1, 2048, &handle());
    }
}

/// Norms, gates, soft cap and sampling.
fn rows(client: &ComputeClient<Recorder>, wanted: RowFormats) {
    let (y, vector, x) = (handle(), handle(), activations(3584));
    norm(client, ABLE, &y, &vector, 1e-6, None, 1, wanted, &x);
    norm(client, ABLE, &y, &vector, 1e-6, Some(&vector), 1, wanted, &x);
    for activation in [Activation::Silu, Activation::Gelu, Activation::Clamped] {
        gated(client, ABLE, &y, activation, 1, wanted, &x);
    }
    norm_add(client, ABLE, &y, &vector, 1e-6, 1, 3584, &vector);
    cap(client, ABLE, &y, 4096, 30.0);
    draw(client, ABLE, &DrawScratch::of(handle, 4096), &y, &vector, 1, &handle(), &handle());
}

/// The encodings of hidden rows.
fn encodings(client: &ComputeClient<Recorder>) {
    for codec in [Codec::F16, Codec::Q8, Codec::Q4] {
        RowEncoder::of(handle, codec, 4096).encode(client, ABLE, &handle(), 2, &handle());
    }
}

/// Attention with all options, without any, and within chunks.
fn attention(client: &ComputeClient<Recorder>, (heads, kv_heads, head_dim): (usize, usize, usize), wanted: RowFormats) {
    let heads = Heads { heads, kv_heads, head_dim, pairs: head_dim / 2, halves: true, half_cells: wanted.integers };
    let (y, vector, rotary) = (handle(), handle(), handle());
    let full = LayerHeads {
        biases: Some(&vector),
        norms: Some(&vector),
        rotary: &rotary,
        positions: 4096,
        window: Some(Window::Sliding(512)),
        cap: Some(50.0),
        sinks: Some(&vector),
        eps: 1e-6,
    };
    let plain = LayerHeads { biases: None, norms: None, window: None, cap: None, sinks: None, ..full.clone() };
    let places = Places { count: 1, rows: handle(), tables: handle(), tables_len: 32, blocks: 8 };
    let pages = Pages { pages: handle(), count: 32 };
    let partials = Partials { values: handle(), sums: handle(), room: 64 };
    let x = activations(heads.queries());
    let chunks = LayerHeads { window: Some(Window::Chunk(8192)), ..plain.clone() };
    for layer in [full, plain, chunks] {
        place(client, ABLE, heads, &layer, &places, &y, &vector, &pages);
        attend(client, ABLE, heads, &layer, &places, &vector, &pages, &partials, wanted, &x);
    }
}

/// Every kernel in the variants that models use.
fn all_launches() -> Vec<Launches> {
    let mut all: Vec<Launches> = Vec::new();
    for kind in QUANT_TYPES {
        all.push((format!("{kind:?}"), Box::new(move |client| products(client, kind))));
    }
    all.push(("mixtures of experts".to_owned(), Box::new(mixtures)));
    all.push(("encodings".to_owned(), Box::new(encodings)));
    for (name, floats) in [("int8", false), ("f32", true)] {
        let wanted = RowFormats { floats, integers: !floats };
        all.push((format!("rows of {name}"), Box::new(move |client| rows(client, wanted))));
        for shape in [(28, 4, 128), (9, 3, 64), (8, 1, 256), (16, 16, 96)] {
            let label = format!("{name}, {} heads on {} of {}", shape.0, shape.1, shape.2);
            all.push((label, Box::new(move |client| attention(client, shape, wanted))));
        }
    }
    all
}

/// Common cards: Ampere (A100, RTX 30), Ada (RTX 40), Hopper, Blackwell (RTX 50).
const ARCHITECTURES: [u32; 5] = [80, 86, 89, 90, 120];
/// Shared memory that a cube may use on all of them.
const SHARED_BYTES: u32 = 99 << 10;

/// ptxas and NVRTC in the folder that `MESHNODE_CUDA` names: a toolkit, or Python packages such as `nvidia-cuda-nvcc-cu12`.
fn toolkit() -> Option<(PathBuf, Toolkit)> {
    let root = PathBuf::from(std::env::var_os("MESHNODE_CUDA")?);
    let ptxas = ["bin/ptxas", "cuda_nvcc/bin/ptxas", "nvidia/cuda_nvcc/bin/ptxas", "nvidia/cu13/bin/ptxas"];
    let ptxas = ptxas.into_iter().map(|path| root.join(path)).find(|path| path.exists());
    Some((ptxas.expect("ptxas in MESHNODE_CUDA"), load_from(&root).expect("NVRTC in MESHNODE_CUDA")))
}

/// Kernels, and the formats and the card (0: any), that may spill a few words.
///
/// - CubeCL lays out the shared memory of `choose_kernel` in a different order each time, and some orders make a card spill. It runs
///   once per token, with one cube per row.
/// - CUDA runs `plain_expert_kernel` only for unquantised weights and in strict arithmetic.
/// - Formats with a table, or scales per 16 columns, take more registers in `panel_kernel` and `gate_kernel`; on some cards they spill
///   up to five words. On sm_120 `panel_kernel` spills one to four words in some other formats, too.
/// - `plain_kernel` spills one or two words of half-precision weights on sm_120, and `router_kernel` two for some numbers of rows.
const MAY_SPILL: [(&str, &str, u32); 9] = [
    ("choose_kernel", "", 0),
    ("plain_expert_kernel", "", 0),
    ("panel_kernel", "Q3K", 0),
    ("panel_kernel", "", 120),
    ("panel_kernel", "Iq", 0),
    ("gate_kernel", "Iq2", 0),
    ("plain_kernel", "F16", 0),
    ("plain_kernel", "Bf16", 0),
    ("router_kernel", "", 0),
];

/// Compiles a kernel to machine code for one architecture.
///
/// # Errors
/// The kernel does not compile, or it spills registers.
fn assembled(
    label: &str,
    source: &Source,
    architecture: u32,
    (ptxas, toolkit): &(PathBuf, Toolkit),
    folder: &Path,
) -> Result<(), String> {
    let suffix = if architecture >= 90 { "a" } else { "" };
    let card = format!("sm_{architecture}{suffix}");
    let name = format!("{}, {label}, {card}", source.entry.name);
    let virtual_card = format!("compute_{architecture}{suffix}");
    let ptx = ptx(&source.text, &virtual_card, &toolkit.headers).map_err(|error| format!("{name}: {error}"))?;
    let stem = name.replace([' ', ','], "_");
    let path = |ending: &str| folder.join(format!("{stem}.{ending}"));
    std::fs::write(path("ptx"), ptx).expect("a file");
    std::fs::write(path("cu"), &source.text).expect("a file");
    let run = Command::new(ptxas).args(["-v", "-arch", &card]).arg(path("ptx")).arg("-o").arg(path("cubin")).output();
    let run = run.expect("ptxas runs");
    let said = String::from_utf8_lossy(&run.stderr);
    let wrong = |line: &&str| {
        let spills = line.contains("spill") && !line.contains("0 bytes spill stores, 0 bytes spill loads");
        let may = |(kernel, format, card): &(&str, &str, u32)| {
            let of_card = [0, architecture].contains(card);
            of_card && source.entry.name.starts_with(kernel) && label.starts_with(format)
        };
        let spills = spills && !MAY_SPILL.iter().any(may);
        spills || line.contains("error")
    };
    let wrong: String = said.lines().filter(wrong).collect();
    if run.status.success() && wrong.is_empty() { Ok(()) } else { Err(format!("{name}: {wrong}")) }
}

/// `MESHNODE_ONLY=few` compiles only the kernels whose name or format contains `few`, for sm_90 or `MESHNODE_CARD`;
/// `MESHNODE_KEEP=folder` keeps source and machine code.
#[test]
fn kernels_compile_for_every_card() {
    let only = std::env::var("MESHNODE_ONLY").unwrap_or_default();
    let mut sources = Vec::new();
    for (label, launches) in all_launches() {
        let found = Source::all(no_device(), launches).expect("the source of every kernel");
        sources.extend(found.into_iter().enumerate().map(|(i, source)| (format!("{label} {i}"), source)));
    }
    assert!(sources.len() > 100, "{} kernels", sources.len());
    for (label, source) in &sources {
        let bytes = source.entry.shared_bytes;
        assert!(bytes <= SHARED_BYTES, "{}, {label}: {bytes} bytes of shared memory", source.entry.name);
        let infinite = source.text.contains("(inf)") || source.text.contains("(-inf)");
        assert!(!infinite, "{}, {label}: CUDA has no such literal for infinity", source.entry.name);
    }
    let Some(toolkit) = toolkit() else {
        let required = std::env::var("MESHNODE_REQUIRE").is_ok_and(|all| all.split(',').any(|one| one == "nvrtc"));
        assert!(!required, "MESHNODE_REQUIRE names nvrtc, but MESHNODE_CUDA is not set to its folder");
        eprintln!("SKIPPED: MESHNODE_CUDA does not name a folder with NVRTC, its headers and ptxas");
        return;
    };
    let code = compile(&sources[0].1.text, "sm_90a", &toolkit.1.headers).expect("code for a driver");
    assert!(code.starts_with(b"\x7fELF"), "a cubin");
    let temporary = tempfile::tempdir().expect("a folder");
    let card = std::env::var("MESHNODE_CARD").map_or(90, |card| card.parse().expect("a number, such as 120"));
    let keep = std::env::var_os("MESHNODE_KEEP").map(PathBuf::from);
    let folder = keep.as_deref().unwrap_or(temporary.path());
    let work: Vec<(&str, &Source, u32)> = sources
        .iter()
        .filter(|(label, source)| source.entry.name.contains(&only) || label.contains(&only))
        .flat_map(|(label, source)| ARCHITECTURES.map(|architecture| (label.as_str(), source, architecture)))
        .filter(|(_, _, architecture)| only.is_empty() || *architecture == card)
        .collect();
    let wrong: Vec<String> = work
        .par_iter()
        .filter_map(|(label, source, architecture)| assembled(label, source, *architecture, &toolkit, folder).err())
        .collect();
    assert!(wrong.is_empty(), "{} of {}: {wrong:#?}", wrong.len(), work.len());
}
