//! `bench lbm` and `bench life`: grid update speed of this machine's CPU.
use crate::views::count;
use kernels_grids::bench;
use kernels_grids::lbm::{Fluid, Fluid3};
use kernels_grids::life::Life;
use serde_json::{Value, json};

/// Rounds per measurement; results are medians.
const ROUNDS: usize = 15;
/// Most cells along an axis, so that a typing error cannot exhaust the memory.
const SIZE_MAX: u32 = 1 << 15;

#[derive(Debug, clap::Args)]
pub(super) struct LbmArgs {
    /// Lattice
    #[arg(long, value_enum, default_value = "d2q9")]
    lattice: Lattice,
    /// Cells along each axis; one measurement per size [default: 1024,2048,4096, or 64,128,192 in three dimensions]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(16..=i64::from(SIZE_MAX)))]
    size: Vec<u32>,
    /// Compute threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = crate::cli::compute::threads)]
    threads: usize,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Lattice {
    /// Two dimensions, 72 bytes per cell and step; up to 8 steps in one pass over the memory
    D2q9,
    /// Three dimensions, 152 bytes per cell and step
    D3q19,
}

#[derive(Debug, clap::Args)]
pub(super) struct LifeArgs {
    /// Rule in B/S notation
    #[arg(long, value_name = "B/S", default_value = "B3/S23")]
    rule: String,
    /// Cells along each axis; one measurement per size
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1024, 8192], value_parser = clap::value_parser!(u32).range(16..=i64::from(SIZE_MAX)))]
    size: Vec<u32>,
    /// Compute threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = crate::cli::compute::threads)]
    threads: usize,
}

/// Results by size; the top-level values are the lowest.
pub(super) fn lbm(args: &LbmArgs) -> Result<Value, String> {
    let usual: &[u32] = match args.lattice {
        Lattice::D2q9 => &[1024, 2048, 4096],
        Lattice::D3q19 => &[64, 128, 192],
    };
    let sizes = if args.size.is_empty() { usual } else { &args.size };
    let mut runs = Vec::new();
    for &size in sizes {
        let size = size as usize;
        let figures = match args.lattice {
            Lattice::D2q9 => bench::fluid(&Fluid::new(0.8), [size; 2], args.threads, ROUNDS),
            Lattice::D3q19 => bench::fluid3(&Fluid3::new(0.8), [size; 3], args.threads, ROUNDS),
        };
        runs.push(figures.map_err(|e| e.to_string())?);
    }
    let lowest = |of: fn(&bench::FluidFigures) -> f64| runs.iter().map(of).fold(f64::INFINITY, f64::min);
    Ok(json!({
        "threads": args.threads,
        "mlups": lowest(|run| run.mlups),
        "share_of_copy_bandwidth": lowest(|run| run.share_of_copy_bandwidth),
        "runs": runs,
    }))
}

/// Human-readable results of `lbm`.
pub(super) fn lbm_text(figures: &Value) -> String {
    let line = |run: &Value| {
        let number = |name: &str| run[name].as_f64().unwrap_or(0.0);
        format!(
            "{} {}, {} ({}): {:.0} MLUPS, {:.0} % of the copy bandwidth ({:.1} GB/s) at one pass per step\n",
            run["lattice"].as_str().unwrap_or("?"),
            size(run),
            count(run["threads"].as_u64().unwrap_or(0) as usize, "thread"),
            run["instruction_set"].as_str().unwrap_or("?"),
            number("mlups"),
            number("share_of_copy_bandwidth") * 100.0,
            number("copy_bandwidth") / 1e9,
        )
    };
    runs(figures).map(line).collect()
}

/// Results by size; the top-level value is the highest, usually that of a grid that fits the caches.
pub(super) fn life(args: &LifeArgs) -> Result<Value, String> {
    let rule = Life::parse(&args.rule).map_err(|e| e.to_string())?;
    let mut runs = Vec::new();
    for &size in &args.size {
        runs.push(bench::life(rule, [size as usize; 2], args.threads, ROUNDS).map_err(|e| e.to_string())?);
    }
    let highest = runs.iter().map(|run| run.cells_per_s).fold(0.0, f64::max);
    Ok(json!({"threads": args.threads, "cells_per_s": highest, "runs": runs}))
}

/// Human-readable results of `life`.
pub(super) fn life_text(figures: &Value) -> String {
    let line = |run: &Value| {
        format!(
            "{} {}, {} ({}): {:.2e} cells/s\n",
            run["rule"].as_str().unwrap_or("?"),
            size(run),
            count(run["threads"].as_u64().unwrap_or(0) as usize, "thread"),
            run["instruction_set"].as_str().unwrap_or("?"),
            run["cells_per_s"].as_f64().unwrap_or(0.0),
        )
    };
    runs(figures).map(line).collect()
}

fn runs(figures: &Value) -> impl Iterator<Item = &Value> {
    figures["runs"].as_array().into_iter().flatten()
}

fn size(run: &Value) -> String {
    let axes = run["size"].as_array().into_iter().flatten();
    axes.map(Value::to_string).collect::<Vec<_>>().join(" × ")
}
