//! Hostile simulations, as another node might send them: whatever opens can be asked everything without a panic.
//!
//! Inputs are read as packed jobs as they are, and as the text of a job without files, so that what lies behind the first
//! checks is reached.
#![no_main]
use kernels::grid::simulation::{Mosaic, Simulation};
use kernels::grid::tile::Tile;
use libfuzzer_sys::fuzz_target;

/// Cells of a grid that is worth computing here.
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
    simulation.load(&mut tile).expect("a processor does not fail");
    for output in simulation.outputs() {
        let shown = simulation.shown(output);
        let mut mosaic = Mosaic::new(&simulation, &output.quantity, shown).expect("a quantity of the simulation");
        for need in simulation.needs(&output.quantity) {
            let values = simulation.sample(&tile, need, shown.0, shown.1).expect("the tile owns all");
            mosaic.add(need, shown.0, &values).expect("as many values as blocks");
        }
        assert!(mosaic.is_whole());
        let _ = mosaic.finish();
    }
}
