//! Lattice Boltzmann fluids (D2Q9, D3Q19): streaming and collision fused in one pass, pull scheme.
//!
//! A cell stores its post-collision populations minus their weights, so that small deviations keep their precision. A
//! step pulls from the neighbours and collides. Before the step, boundary conditions (walls, masks, open faces) are
//! written into the ghost and solid cells that fluid cells pull from (`lbm/edges.rs`), so the kernel has no special
//! cases and every cell's arithmetic is the same. Next: `lbm/flow.rs`, `lbm/edges.rs`, `lbm/d2q9.rs`.
use crate::error::GridError;
use crate::frame::{Format, Frame};
use crate::grid::{Face, Grid};
use crate::number::Half;
use crate::region::{AXES, CellMap};
use crate::stepper::Stepper;

pub mod collision;
pub mod d2q9;
pub mod d3q19;
pub mod edges;
mod flow;

pub use flow::{Flow, Lattice};

/// The discrete velocities of a lattice, rest first.
pub struct Directions {
    /// Cells per step along x, y and z.
    pub c: &'static [[i8; 3]],
    /// Index of the opposite direction.
    pub opposite: &'static [usize],
    /// Weights.
    pub w: &'static [f64],
}

/// The two-dimensional lattice.
pub const D2Q9: Directions = Directions {
    c: &[[0, 0, 0], [1, 0, 0], [0, 1, 0], [-1, 0, 0], [0, -1, 0], [1, 1, 0], [-1, 1, 0], [-1, -1, 0], [1, -1, 0]],
    opposite: &[0, 3, 4, 1, 2, 7, 8, 5, 6],
    w: &{
        let (a, b, c) = (4.0 / 9.0, 1.0 / 9.0, 1.0 / 36.0);
        [a, b, b, b, b, c, c, c, c]
    },
};

/// The three-dimensional lattice; opposite directions are adjacent.
pub const D3Q19: Directions = Directions {
    c: &[
        [0, 0, 0],
        [1, 0, 0],
        [-1, 0, 0],
        [0, 1, 0],
        [0, -1, 0],
        [0, 0, 1],
        [0, 0, -1],
        [1, 1, 0],
        [-1, -1, 0],
        [1, 0, 1],
        [-1, 0, -1],
        [0, 1, 1],
        [0, -1, -1],
        [1, -1, 0],
        [-1, 1, 0],
        [1, 0, -1],
        [-1, 0, 1],
        [0, 1, -1],
        [0, -1, 1],
    ],
    opposite: &[0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15, 18, 17],
    w: &{
        let (a, b, c) = (1.0 / 3.0, 1.0 / 18.0, 1.0 / 36.0);
        [a, b, b, b, b, b, b, c, c, c, c, c, c, c, c, c, c, c, c]
    },
};

/// A fluid in `D` dimensions, two (D2Q9) or three (D3Q19).
#[derive(Clone)]
pub struct LatticeFluid<const D: usize> {
    /// Relaxation time in steps, above 1/2: the viscosity is (tau - 1/2) / 3.
    pub tau: f64,
    /// Collision operator.
    pub collision: Collision,
    /// Relaxation rates (1 / tau) per cell instead of `tau`.
    pub omega: Option<CellMap<f32>>,
    /// Solid cells: no slip half-way between them and the fluid cells.
    pub solid: Option<CellMap<bool>>,
    /// The solid cells whose force is measured; `None`: all.
    pub force_cells: Option<CellMap<bool>>,
    /// Body force per cell: density times acceleration.
    pub force: [f32; D],
    /// Storage format of populations between steps.
    pub storage: Storage,
}

/// Storage format of populations; collisions are always in single precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Storage {
    /// 32 bits.
    #[default]
    Single,
    /// 16 bits: half the memory and traffic, three digits of the deviation from rest. A flow driven by a force loses a
    /// ten-thousandth of its velocity per step to rounding.
    Half,
}

impl Storage {
    pub(crate) fn format(self) -> Format {
        match self {
            Self::Single => Format::Float,
            Self::Half => Format::Half,
        }
    }
}

/// Collision operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Collision {
    /// Single relaxation time (BGK).
    Bgk,
    /// Two relaxation times: the odd parts relax at their own rate, such that (1/omega+ - 1/2)(1/omega- - 1/2) is
    /// `magic`; 3/16 puts walls exactly half-way for any viscosity.
    Trt {
        /// The magic parameter.
        magic: f64,
    },
}

/// A fluid in two dimensions.
pub type Fluid = LatticeFluid<2>;
/// A fluid in three dimensions.
pub type Fluid3 = LatticeFluid<3>;

impl<const D: usize> std::fmt::Debug for LatticeFluid<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tau, collision, omega, solid, force_cells: _, force, storage } = self;
        write!(
            f,
            "Fluid in {D} dimensions {{ tau: {tau}, {collision:?}, force: {force:?}, {storage:?}, omega by cell: {}",
            omega.is_some()
        )?;
        write!(f, ", solid cells: {} }}", solid.is_some())
    }
}

impl Fluid {
    /// The fields of a cell with this density and velocity, in equilibrium except for the stress of a velocity
    /// gradient: `gradient[a][b]` is the derivative of component b along a.
    pub fn cell(&self, density: f64, velocity: [f64; 2], gradient: [[f64; 2]; 2]) -> [f32; 9] {
        std::array::from_fn(|i| self.population(D2Q9.c[i], D2Q9.w[i], density, velocity, gradient))
    }

    /// Density and velocity of a cell from its fields.
    pub fn moments(&self, fields: &[f32; 9]) -> (f64, [f64; 2]) {
        self.moments_of(&D2Q9, fields)
    }
}

impl Fluid3 {
    /// The fields of a cell with this density and velocity, in equilibrium except for the stress of a velocity
    /// gradient: `gradient[a][b]` is the derivative of component b along a.
    pub fn cell(&self, density: f64, velocity: [f64; 3], gradient: [[f64; 3]; 3]) -> [f32; 19] {
        std::array::from_fn(|i| self.population(D3Q19.c[i], D3Q19.w[i], density, velocity, gradient))
    }

    /// Density and velocity of a cell from its fields.
    pub fn moments(&self, fields: &[f32; 19]) -> (f64, [f64; 3]) {
        self.moments_of(&D3Q19, fields)
    }
}

impl<const D: usize> LatticeFluid<D> {
    /// A BGK fluid with this relaxation time: single precision, no masks, no force.
    pub fn new(tau: f64) -> Self {
        let (collision, storage) = (Collision::Bgk, Storage::Single);
        Self { tau, collision, omega: None, solid: None, force_cells: None, force: [0.0; D], storage }
    }

    /// The viscosity of `tau`, in cells² per step.
    pub fn viscosity(&self) -> f64 {
        (self.tau - 0.5) / 3.0
    }

    fn population(&self, c: [i8; 3], w: f64, density: f64, velocity: [f64; D], gradient: [[f64; D]; D]) -> f32 {
        let c: [f64; D] = std::array::from_fn(|axis| f64::from(c[axis]));
        let dot = |a: [f64; D], b: [f64; D]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (along, square) = (dot(c, velocity), dot(velocity, velocity));
        let equilibrium = density - 1.0 + density * (3.0 * along + 4.5 * along * along - 1.5 * square);
        let divergence: f64 = (0..D).map(|axis| gradient[axis][axis]).sum();
        let strain: f64 = (0..D).map(|axis| c[axis] * dot(c, gradient[axis])).sum();
        let stress = -3.0 * density * self.tau * (strain - divergence / 3.0);
        // Post-collision stress. Half of the force is missing in the populations before a collision and in excess after
        // it.
        let force = 1.5 * dot(c, self.force.map(f64::from));
        (w * (equilibrium + (1.0 - 1.0 / self.tau) * stress + force)) as f32
    }

    fn moments_of(&self, directions: &Directions, fields: &[f32]) -> (f64, [f64; D]) {
        let density = 1.0 + fields.iter().map(|f| f64::from(*f)).sum::<f64>();
        let part = |axis: usize| fields.iter().zip(directions.c).map(move |(f, c)| f64::from(c[axis]) * f64::from(*f));
        let velocity = |axis: usize| (part(axis).sum::<f64>() - 0.5 * f64::from(self.force[axis])) / density;
        (density, std::array::from_fn(velocity))
    }

    pub(crate) fn stepper(&self, frame: &Frame) -> Result<Box<dyn Stepper>, GridError>
    where
        Self: Lattice,
    {
        Ok(match self.storage {
            Storage::Single => Box::new(Flow::<D, f32>::new(self, frame)?),
            Storage::Half => Box::new(Flow::<D, Half>::new(self, frame)?),
        })
    }

    /// Relaxation rates of the even and the odd parts for a relaxation time.
    pub(crate) fn rates(&self, tau: f64) -> [f64; 2] {
        match self.collision {
            Collision::Bgk => [1.0 / tau; 2],
            Collision::Trt { magic } => [1.0 / tau, 1.0 / (magic / (tau - 0.5) + 0.5)],
        }
    }

    pub(crate) fn warning(&self, grid: &Grid) -> Option<String> {
        let speeds = (0..D).flat_map(|axis| grid.faces(axis)).map(|face| match face {
            Face::Moving { velocity } | Face::Inlet { velocity, .. } => {
                velocity.iter().map(|v| v * v).sum::<f32>().sqrt()
            }
            Face::Periodic | Face::Wall | Face::Fixed(_) | Face::Outlet { .. } => 0.0,
        });
        let fastest = speeds.fold(0.0, f32::max);
        if fastest > SUBSONIC {
            return Some(format!(
                "velocity of {fastest} cells per step: above {SUBSONIC} errors grow fast, use a lower one"
            ));
        }
        if self.tau < TAU_UNSTABLE {
            let what = "the fluid may become unstable, use more cells or a lower velocity";
            return Some(format!("tau = {}: below {TAU_UNSTABLE} {what}", self.tau));
        }
        let rounded = self.storage == Storage::Half && self.force.iter().any(|part| *part != 0.0);
        rounded.then(|| {
            "a force with 16-bit storage: rounding removes a ten-thousandth of the velocity per step, use storage = \
             \"f32\" unless the force adds a hundred times as much"
                .to_owned()
        })
    }

    pub(crate) fn check(&self, grid: &Grid) -> Result<(), GridError> {
        let rule = Self::NAME;
        let error = |what| Err(GridError::Parameter { rule, what });
        if grid.dimensions() != D {
            return error(format!("expected a grid of {D} dimensions, found {}", grid.dimensions()));
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
            return error(format!("force = {:?}: expected finite numbers", self.force));
        }
        let fast = |velocity: [f32; 3]| {
            let found = speed(velocity.map(f64::from));
            let what = "a velocity below the speed of sound, 0.577 cells a step";
            (!is_subsonic(found)).then(|| format!("{what}, found {found:.3}"))
        };
        for axis in 0..D {
            for (side, face) in grid.faces(axis).into_iter().enumerate() {
                let wrong = match face {
                    Face::Periodic | Face::Wall => None,
                    Face::Fixed(_) => Some(FACES.to_owned()),
                    Face::Moving { velocity } if velocity[axis] != 0.0 => {
                        Some(format!("a wall that moves along itself: the {} of its velocity is 0", AXES[axis]))
                    }
                    Face::Moving { velocity } | Face::Inlet { velocity, .. } => fast(velocity),
                    Face::Outlet { density } if density > 0.0 && density.is_finite() => None,
                    Face::Outlet { .. } => Some("a density above 0 (1 is that of the fluid at rest)".into()),
                };
                if let Some(expected) = wrong {
                    return Err(grid.bad_face(rule, axis, side, &expected));
                }
            }
        }
        Ok(())
    }
}

impl<const D: usize> LatticeFluid<D> {
    pub(crate) const NAME: &'static str = if D == 2 { "d2q9" } else { "d3q19" };
}

const FACES: &str = "\"periodic\", \"wall\", { moving = VELOCITY }, { inlet = VELOCITY } or { outlet = DENSITY }";
/// The speed of sound in cells per step; velocities must stay below it.
const SPEED_OF_SOUND: f64 = 0.577;

/// Magnitude of a velocity.
pub fn speed<const D: usize>(velocity: [f64; D]) -> f64 {
    velocity.iter().map(|part| part * part).sum::<f64>().sqrt()
}

/// Whether a speed is below the speed of sound, and not NaN.
pub fn is_subsonic(speed: f64) -> bool {
    speed < SPEED_OF_SOUND
}

/// Above this velocity, in cells per step, compressibility errors are large.
pub const SUBSONIC: f32 = 0.2;
/// Below this relaxation time viscosity damps almost nothing.
const TAU_UNSTABLE: f64 = 0.505;
