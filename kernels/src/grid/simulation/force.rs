//! `[force]`: drag and lift on solid cells, told with every look at a run, and as coefficients where a job says of which flow.
use super::files::Files;
use super::keys::Item;
use super::physics;
use super::{Simulation, SimulationError};
use crate::grid::any_tile::GridTile;
use crate::grid::lbm::LatticeFluid;
use crate::grid::rule::CellMap;
use crate::grid::tile::Tile;
use crate::grid::{Grid, GridError, Look};
use crate::threads::Threads;

/// What of the force is told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForceSpec {
    /// What a coefficient of 1 is: half the density times the velocity squared times the length, or the area in three
    /// dimensions.
    unit: Option<f64>,
}

impl ForceSpec {
    /// Whether coefficients are told beside the force.
    pub fn has_coefficients(&self) -> bool {
        self.unit.is_some()
    }
}

/// The force on the solid cells, along each axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Force {
    /// Density times cells^D a step, squared; 1 is the density of the fluid at rest.
    pub force: Vec<f64>,
    /// Drag and lift coefficients, where the job names the flow that they are of.
    pub coefficients: Option<Vec<f64>>,
}

const FORCE: &str = "a table: [force], with velocity and length (area in three dimensions) for coefficients";

/// What a job says of it. The fluid learns which cells are meant.
pub(super) fn force<const D: usize>(
    item: Option<&Item<'_>>,
    fluid: &mut LatticeFluid<D>,
    grid: &Grid,
    files: &mut Files,
) -> Result<Option<ForceSpec>, SimulationError> {
    let Some(item) = item else { return Ok(None) };
    let keys = item.table(FORCE)?;
    if fluid.solid.is_none() {
        return Err(
            item.error("there is nothing that the fluid could push: say with `solid` in [rule] where cells are solid")
        );
    }
    // Which cells are meant changes nothing of what is computed, so it is no part of what a checkpoint is of.
    let of: Option<CellMap<bool>> =
        keys.get("of").map(|item| physics::solid(&item, grid, files, &mut Vec::new())).transpose()?;
    fluid.pushed = of;
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

/// Of a rule that is no fluid.
pub(super) fn none(item: Option<&Item<'_>>) -> Result<Option<ForceSpec>, SimulationError> {
    item.map_or(Ok(None), |item| Err(item.error("only fluids push anything: rule d2q9 or d3q19")))
}

impl Simulation {
    /// Whether the force on solid cells is told, and how.
    pub fn force(&self) -> Option<&ForceSpec> {
        self.physics.force.as_ref()
    }

    /// A tile's part of what is looked at now and then: the sum of each field, and what the job wants beside these, in units
    /// that add up the same in any order; and the first cell that is no number.
    ///
    /// # Errors
    /// A step is half made, or the tile's device failed.
    pub fn look(&self, tile: &dyn GridTile, threads: &mut Threads) -> Result<Look, GridError> {
        let mut look = tile.look(threads)?;
        if self.physics.force.is_some() {
            look.totals.extend_from_slice(&tile.force()?[..self.grid.dimensions()]);
        }
        Ok(look)
    }

    /// The force from what all tiles together said, if it is wanted.
    pub fn force_of(&self, totals: &[i128]) -> Option<Force> {
        let spec = self.physics.force.as_ref()?;
        let fields = self.rule().fields();
        let parts = totals.get(fields..fields + self.grid.dimensions())?;
        let force: Vec<f64> = parts.iter().map(|total| Tile::total_value(*total)).collect();
        let coefficients = spec.unit.map(|unit| force.iter().map(|part| part / unit).collect());
        Some(Force { force, coefficients })
    }
}
