//! Fluids by the lattice Boltzmann method: populations that move to a neighbour and collide there, in one pass.
//!
//! A cell holds what its last collision left, each population less its weight, so that small differences keep their
//! digits. A step pulls from the neighbours and collides. Walls, masks and open faces write what a cell is to pull into
//! the places beyond it before the step (`lbm/edges.rs`), so the pass itself knows nothing of them, and every cell's
//! arithmetic is the same. Next: `lbm/edges.rs`, `lbm/d2q9.rs`.
use super::rule::CellMap;
use super::{AXES, Face, Grid, GridError};

mod d2q9;
mod edges;

pub(crate) use d2q9::D2q9;

/// The nine directions in which populations move, rest first; `OPPOSITE` turns them round.
pub(crate) const C: [[i8; 3]; 9] =
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [-1, 0, 0], [0, -1, 0], [1, 1, 0], [-1, 1, 0], [-1, -1, 0], [1, -1, 0]];
pub(crate) const OPPOSITE: [usize; 9] = [0, 3, 4, 1, 2, 7, 8, 5, 6];
pub(crate) const W: [f64; 9] = {
    let (a, b, c) = (4.0 / 9.0, 1.0 / 9.0, 1.0 / 36.0);
    [a, b, b, b, b, c, c, c, c]
};

/// A fluid in two dimensions (D2Q9).
#[derive(Clone)]
pub struct Fluid {
    /// Relaxation time in steps, above 1/2: the viscosity is (tau - 1/2) / 3.
    pub tau: f64,
    /// How populations relax.
    pub collision: Collision,
    /// Relaxation rates (1 / tau) cell by cell instead of `tau`.
    pub omega: Option<CellMap<f32>>,
    /// Cells that are solid: the fluid rests half-way to them.
    pub solid: Option<CellMap<bool>>,
    /// Force on each cell: density times acceleration.
    pub force: [f32; 2],
}

/// How populations relax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Collision {
    /// All at one rate.
    Bgk,
    /// The odd parts at a rate of their own, such that (1/omega+ - 1/2)(1/omega- - 1/2) is `magic`: 3/16 puts walls exactly
    /// half-way whatever the viscosity.
    Trt {
        /// The product.
        magic: f64,
    },
}

impl std::fmt::Debug for Fluid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tau, collision, omega, solid, force } = self;
        write!(f, "Fluid {{ tau: {tau}, {collision:?}, force: {force:?}, omega by cell: {}", omega.is_some())?;
        write!(f, ", solid cells: {} }}", solid.is_some())
    }
}

impl Fluid {
    /// A fluid of that relaxation time, everything else plain.
    pub fn new(tau: f64) -> Self {
        Self { tau, collision: Collision::Bgk, omega: None, solid: None, force: [0.0; 2] }
    }

    /// The viscosity of `tau`, in cells² a step.
    pub fn viscosity(&self) -> f64 {
        (self.tau - 0.5) / 3.0
    }

    /// The fields of a cell with that density and velocity, in equilibrium but for the stress of a velocity gradient:
    /// `gradient[a][b]` is how component b changes along a.
    pub fn cell(&self, density: f64, velocity: [f64; 2], gradient: [[f64; 2]; 2]) -> [f32; 9] {
        let [u, v] = velocity;
        let divergence = gradient[0][0] + gradient[1][1];
        std::array::from_fn(|i| {
            let (x, y) = (f64::from(C[i][0]), f64::from(C[i][1]));
            let along = x * u + y * v;
            let equilibrium = density - 1.0 + density * (3.0 * along + 4.5 * along * along - 1.5 * (u * u + v * v));
            let strain = x * x * gradient[0][0] + y * y * gradient[1][1] + x * y * (gradient[0][1] + gradient[1][0]);
            let stress = -3.0 * density * self.tau * (strain - divergence / 3.0);
            // What a collision leaves of it. Half of the force is not in the populations before it, but is after it.
            let force = 1.5 * (x * f64::from(self.force[0]) + y * f64::from(self.force[1]));
            (W[i] * (equilibrium + (1.0 - 1.0 / self.tau) * stress + force)) as f32
        })
    }

    /// Density and velocity of a cell from its fields.
    pub fn moments(&self, fields: &[f32; 9]) -> (f64, [f64; 2]) {
        let f = fields.map(f64::from);
        let density = 1.0 + f.iter().sum::<f64>();
        let along = |axis: usize| (0..9).map(|i| f64::from(C[i][axis]) * f[i]).sum::<f64>();
        (density, std::array::from_fn(|axis| (along(axis) - 0.5 * f64::from(self.force[axis])) / density))
    }

    /// The rates of the even and of the odd parts for a relaxation time.
    pub(crate) fn rates(&self, tau: f64) -> [f64; 2] {
        match self.collision {
            Collision::Bgk => [1.0 / tau; 2],
            Collision::Trt { magic } => [1.0 / tau, 1.0 / (magic / (tau - 0.5) + 0.5)],
        }
    }

    pub(crate) fn warning(&self, grid: &Grid) -> Option<String> {
        let speeds = (0..2).flat_map(|axis| grid.faces(axis)).map(|face| match face {
            Face::Moving { velocity } | Face::Inlet { velocity, .. } => {
                velocity.iter().map(|v| v * v).sum::<f32>().sqrt()
            }
            Face::Periodic | Face::Wall | Face::Fixed(_) | Face::Outlet { .. } => 0.0,
        });
        let fastest = speeds.fold(0.0, f32::max);
        if fastest > SUBSONIC {
            return Some(format!("a velocity of {fastest} cells a step: above {SUBSONIC} errors grow fast, use less"));
        }
        let thin = self.tau < THIN;
        thin.then(|| {
            format!("tau = {}: below {THIN} a fluid is easily unstable, use more cells or less speed", self.tau)
        })
    }

    pub(crate) fn check(&self, grid: &Grid) -> Result<(), GridError> {
        let error = |what| Err(GridError::Parameter { rule: NAME, what });
        if grid.dimensions() != 2 {
            return error(format!("two dimensions, not {}", grid.dimensions()));
        }
        if !(self.tau > 0.5 && self.tau.is_finite()) {
            return error(format!("tau = {}: it must be above 1/2, the viscosity is (tau - 1/2) / 3", self.tau));
        }
        if let Collision::Trt { magic } = self.collision
            && !(magic > 0.0 && magic.is_finite())
        {
            return error(format!("magic = {magic}: it must be positive, 3/16 is usual"));
        }
        if !self.force.iter().all(|part| part.is_finite()) {
            return error(format!("force = {:?}: numbers are needed", self.force));
        }
        for axis in 0..2 {
            for face in grid.faces(axis) {
                let slow = |v: [f32; 3]| v.iter().all(|v| v.abs() < FAST);
                let fits = match face {
                    Face::Periodic | Face::Wall => true,
                    Face::Fixed(_) => false,
                    Face::Moving { velocity } => slow(velocity) && velocity[axis] == 0.0,
                    Face::Inlet { velocity, .. } => slow(velocity),
                    Face::Outlet { density } => density > 0.0 && density.is_finite(),
                };
                if !fits {
                    return Err(GridError::Face { rule: NAME, face, axis: AXES[axis], known: KNOWN });
                }
            }
        }
        Ok(())
    }
}

pub(crate) const NAME: &str = "d2q9";
const KNOWN: &str = "periodic, wall, moving (along itself), inlet (both below 0.577 cells a step) and outlet";
/// The speed of sound, which nothing may reach.
const FAST: f32 = 0.577;
/// Beyond this velocity the fluid is far from incompressible.
pub(crate) const SUBSONIC: f32 = 0.2;
/// Below this relaxation time hardly anything is smoothed.
const THIN: f64 = 0.505;
