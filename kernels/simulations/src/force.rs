//! `[force]`: drag and lift on solid cells, reported with every field check, and as coefficients if the job gives a
//! reference flow.
use kernels_grids::lbm::LatticeFluid;
use kernels_grids::{CellMap, Grid};

use crate::error::SimulationError;
use crate::files::Files;
use crate::keys::Item;
use crate::physics;

/// How the force is reported.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForceSpec {
    /// The force with coefficient 1: ½ · density · velocity² · length (area in 3D).
    pub(crate) unit: Option<f64>,
}

impl ForceSpec {
    /// Whether coefficients are reported with the force.
    pub fn has_coefficients(&self) -> bool {
        self.unit.is_some()
    }
}

/// The force on the solid cells, per axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Force {
    /// In density · cells^(D + 1) / step², where D is the dimension; the fluid at rest has density 1.
    pub force: Vec<f64>,
    /// Drag and lift coefficients, if the job gives a reference flow.
    pub coefficients: Option<Vec<f64>>,
}

const FORCE: &str = "a table: [force], with velocity and length (area in three dimensions) for coefficients";

/// Parses `[force]`, and sets the cells it covers in the fluid.
pub(super) fn force<const D: usize>(
    item: Option<&Item<'_>>,
    fluid: &mut LatticeFluid<D>,
    grid: &Grid,
    files: &mut Files,
) -> Result<Option<ForceSpec>, SimulationError> {
    let Some(item) = item else { return Ok(None) };
    let keys = item.table(FORCE)?;
    if fluid.solid.is_none() {
        return Err(item.error("expected solid cells, on which the force acts, found none: set `solid` in [rule]"));
    }
    // The choice of cells does not affect the computation, so it is not part of the checkpoint identity.
    let of: Option<CellMap<bool>> =
        keys.get("of").map(|item| physics::solid(&item, grid, files, &mut Vec::new())).transpose()?;
    fluid.force_cells = of;
    let positive = |key: &str| {
        let read = |item: Item<'_>| match item.number("a number above 0")? {
            number if number > 0.0 => Ok(number),
            _ => Err(item.expected("a number above 0")),
        };
        keys.get(key).map(read).transpose()
    };
    let across = if D == 2 { "length" } else { "area" };
    let (velocity, size, density) = (positive("velocity")?, positive(across)?, positive("density")?);
    let unit = match (velocity, size) {
        (None, None) if density.is_none() => None,
        (Some(velocity), Some(size)) => Some(0.5 * density.unwrap_or(1.0) * velocity * velocity * size),
        _ => return Err(item.error(format!("coefficients need both `velocity` and `{across}`"))),
    };
    keys.done()?;
    Ok(Some(ForceSpec { unit }))
}

/// Rejects `[force]` for rules that are not fluids.
pub(super) fn none(item: Option<&Item<'_>>) -> Result<Option<ForceSpec>, SimulationError> {
    item.map_or(Ok(None), |item| Err(item.error("only fluids have a [force]: use rule d2q9 or d3q19, or omit it")))
}
