//! Fuzzes simulations from other nodes: no call on a simulation that opens may panic.
//!
//! An input is used twice: as a packed job, and as the text of a job without files, which reaches the code after the first checks.
#![no_main]
use kernels_grids::tile::Tile;
use kernels_simulations::{Mosaic, Simulation};
use libfuzzer_sys::fuzz_target;

/// Maximum cells of a grid that is computed here.
const CELLS_MAX: usize = 1 << 12;

fuzz_target!(|data: &[u8]| {
    open(data);
    let mut packed = b"meshsim\x01\x01\0\0\0a".to_vec();
    packed.extend_from_slice(&(data.len() as u32).to_le_bytes());
    packed.extend_from_slice(data);
    open(&packed);
});

fn open(bytes: &[u8]) {
    let Ok(simulation) = Simulation::from_bytes(bytes) else { return };
    assert_eq!(simulation.to_bytes(), bytes, "packing is canonical");
    let region = simulation.grid().region();
    let _ = (simulation.identity(), simulation.totals(), simulation.warnings());
    if region.cells() > CELLS_MAX {
        return;
    }
    let Ok(mut tile) = Tile::new(simulation.grid(), simulation.rule(), region, 1) else { return };
    simulation.load(&mut tile).expect("the CPU does not fail");
    for output in simulation.outputs() {
        let shown = simulation.shown(output);
        let mut mosaic = Mosaic::new(&simulation, &output.quantity, shown).expect("a quantity of the simulation");
        for need in simulation.needs(&output.quantity) {
            let values = simulation.sample(&tile, need, shown.0, shown.1).expect("the tile owns all");
            mosaic.add(need, shown.0, &values).expect("one value per block");
        }
        assert!(mosaic.is_whole());
        let _ = mosaic.finish();
    }
}
