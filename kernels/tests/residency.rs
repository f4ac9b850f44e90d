//! A stage holds its share of the weights once: as tiles, and not in the file's mapping too.
#![expect(clippy::print_stdout, reason = "figures for people")]
#![cfg(target_os = "linux")]
use kernels::stage::{Activations, Rows, RowsIn, StageOptions};
use kernels::weights::ModelFile;
use kernels::weights::testing::real_model_path;

#[test]
fn a_stage_holds_its_own_weights_once() {
    let Some(path) = real_model_path() else { return };
    let header = ModelFile::open(&path).unwrap().header_range().end;
    // A copy, so that no other test of this process maps the same file.
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("residency.gguf");
    std::fs::copy(&path, &copy).unwrap();
    let file = ModelFile::open(&copy).unwrap();
    let width = file.config().width;
    let options =
        StageOptions { layers: 10..20, sequences: 1, context: 64, activations: Activations::Int8, threads: 2 };
    let mut stage = kernels::load_cpu_stage(file.clone(), options).unwrap();
    let hidden = vec![0.25; 5 * width];
    stage.forward(&[Rows { sequence: 0, position: 0, input: RowsIn::Hidden(&hidden), logits: false }]).unwrap();

    let said = stage.resident_bytes();
    let share: u64 = file.costs(Activations::Int8).layers[10..20].iter().map(|layer| layer.weight_bytes).sum();
    assert_eq!(said.weights, share);
    let found = resident(copy.file_name().unwrap().to_str().unwrap());
    println!("share {share} B, header {header} B, resident in the mapping {found} B");
    assert!(found <= share / 10 + header, "{found} B of the file beside tiles of {share} B and a header of {header} B");
    assert!(said.working < 4 << 20, "scratch and cache of five positions: {} B", said.working);
}

/// Bytes of a mapped file that this process holds, by the kernel's own account.
fn resident(name: &str) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    let mut sum = 0;
    for line in maps.lines() {
        if line.split_whitespace().next().is_some_and(|first| first.contains('-') && !first.ends_with(':')) {
            inside = line.ends_with(name);
        } else if inside && let Some(size) = line.strip_prefix("Rss:") {
            sum += size.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * 1024;
        }
    }
    sum
}
