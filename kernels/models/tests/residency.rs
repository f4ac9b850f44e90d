//! A stage keeps its share of the weights in memory once, as tiles, without a copy of the file's bytes.
#![expect(clippy::print_stdout, reason = "human-readable figures")]
#![cfg(target_os = "linux")]
use kernels::threads::Threads;
use kernels_models::stage::{Activations, RequestedOutput, Rows, RowsIn, StageOptions};
use kernels_models::weights::ModelFile;
use kernels_models::weights::testing::real_model_path;

#[test]
fn a_stage_holds_its_own_weights_once() {
    let Some(path) = real_model_path() else { return };
    let file = ModelFile::open(&path).unwrap();
    let before = resident();
    let width = file.config().width;
    let options =
        StageOptions { layers: 10..20, sequences: 1, context: 64, activations: Activations::Int8, ram: 0, threads: 2 };
    let mut stage = kernels_models::load_cpu_stage(file.clone(), options).unwrap();
    let hidden = vec![0.25; 5 * width];
    stage
        .forward(
            &mut Threads::new(2).unwrap(),
            &[Rows { sequence: 0, position: 0, input: RowsIn::hidden(&hidden), output: RequestedOutput::Nothing }],
        )
        .unwrap();

    let reported = stage.resident_bytes();
    let share: u64 = file.costs(Activations::Int8).layers[10..20].iter().map(|layer| layer.weight_bytes).sum();
    assert_eq!(reported.weights, share);
    let grown = resident() - before;
    println!("share {share} B, the process grew by {grown} B");
    assert!((share * 9 / 10..share * 3 / 2).contains(&grown), "{grown} B for tiles of {share} B");
    assert!(reported.working < 4 << 20, "scratch and cache of five positions: {} B", reported.working);
}

/// Resident set size of this process in bytes, including mapped files, as the kernel reports it.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}
