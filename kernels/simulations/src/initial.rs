//! `[initial]`: the initial state, where each cell's fields are a function of its coordinates alone. Next:
//! `initial/rows.rs`.
use kernels_grids::lbm::{self, LatticeFluid};
use kernels_grids::life::{Life, Pattern, RUNS_MAX, Run};
use kernels_grids::rule::Rule;
use kernels_grids::{CellMap, Face, Grid};

use crate::error::SimulationError;
use crate::evaluate::{Slope, noise};
use crate::expression::Expression;
use crate::files::Files;
use crate::image::{Image, Mask};
use crate::keys::{Item, Keys};
use crate::physics::{Kind, image, masked};

mod rows;

pub(super) use rows::{Impossible, parts};

/// Maximum patterns: each is text to parse.
const PATTERNS_MAX: usize = 256;

/// The source of the initial fields.
pub(super) enum Initial {
    Life(Living),
    Fluid(Flow<2>),
    Fluid3(Flow<3>),
    Fields(Vec<Source>),
}

/// A fluid's initial density and velocity.
pub(super) struct Flow<const D: usize> {
    /// The fluid's parameters without per-cell maps.
    fluid: LatticeFluid<D>,
    /// Relaxation rate per cell.
    omega: Option<CellMap<f32>>,
    /// Solid cells, which have no fluid.
    solid: Option<CellMap<bool>>,
    density: Expression,
    velocity: [Expression; D],
    /// Whether the populations include the viscous stress of the velocity gradient.
    stress: bool,
}

/// The source of one field.
#[derive(Clone)]
pub(super) enum Source {
    Expression(Expression),
    /// An image, whose black and white map to these values, and grey linearly in between.
    Image(Image, [f64; 2]),
}

/// Which cells are alive: the union of all sources.
#[derive(Default)]
pub(super) struct Living {
    /// Probability that a cell is alive at random.
    share: f64,
    seed: u64,
    expression: Option<Expression>,
    mask: Option<Mask>,
    /// Live runs of the patterns, sorted and disjoint. A run takes constant memory, whatever its length.
    runs: Vec<Run>,
    /// Names of patterns, with the rules they are made for.
    made_for: Vec<(String, Life)>,
}

impl Initial {
    pub(super) fn read(
        item: Option<&Item<'_>>,
        kind: &Kind,
        grid: &Grid,
        seed: u64,
        files: &mut Files,
    ) -> Result<Self, SimulationError> {
        let keys = item.map(|item| item.table("a table: the initial state")).transpose()?;
        let initial = match kind {
            Kind::Life => Self::Life(Living::read(keys.as_ref(), grid, seed, files)?),
            Kind::Fluid(fluid) => Self::Fluid(Flow::read(keys.as_ref(), fluid)?),
            Kind::Fluid3(fluid) => Self::Fluid3(Flow::read(keys.as_ref(), fluid)?),
            Kind::Fields(names) => fields(keys.as_ref(), names, grid, files)?,
        };
        if let Some(keys) = keys {
            keys.done()?;
        }
        Ok(initial)
    }

    /// Sets the fields of a cell.
    pub(super) fn set(&self, at: [usize; 3], cell: &mut [f32]) {
        match self {
            Self::Life(living) => cell[0] = if living.lives(at) { 1.0 } else { 0.0 },
            Self::Fluid(flow) => {
                let (fluid, density, velocity, gradient) = flow.at(at);
                cell.copy_from_slice(&fluid.cell(density, velocity, gradient));
            }
            Self::Fluid3(flow) => {
                let (fluid, density, velocity, gradient) = flow.at(at);
                cell.copy_from_slice(&fluid.cell(density, velocity, gradient));
            }
            Self::Fields(sources) => {
                for (value, source) in cell.iter_mut().zip(sources) {
                    *value = source.at(at) as f32;
                }
            }
        }
    }

    /// Why a cell's fields are invalid, if they are.
    pub(super) fn wrong(&self, at: [usize; 3], fields: usize) -> Option<String> {
        let solid = match self {
            Self::Fluid(flow) => flow.is_solid(at),
            Self::Fluid3(flow) => flow.is_solid(at),
            Self::Life(_) | Self::Fields(_) => false,
        };
        let mut cell = vec![0.0; fields];
        self.set(at, &mut cell);
        let bad = !solid && cell.iter().any(|value| !value.is_finite());
        bad.then(|| format!("expected finite fields at cell {at:?}, found {cell:?}"))
    }

    /// Warnings about patterns made for another rule.
    pub(super) fn warnings(&self, rule: &Rule) -> Vec<String> {
        let (Self::Life(living), Rule::Life(life)) = (self, rule) else { return Vec::new() };
        let others = living.made_for.iter().filter(|(_, made_for)| made_for != life);
        let mut warnings: Vec<String> = others
            .map(|(name, made_for)| {
                let meant = format!("to use its rule, set notation = \"{made_for}\" in [rule]");
                format!("{name} is a pattern of {made_for} and the job's rule is {life}: {meant}")
            })
            .collect();
        warnings.sort_unstable();
        warnings.dedup();
        warnings
    }

    /// The speed of a fluid at a cell, in cells per step.
    pub(super) fn speed(&self, at: [usize; 3]) -> f64 {
        match self {
            Self::Fluid(flow) => flow.speed(at),
            Self::Fluid3(flow) => flow.speed(at),
            Self::Life(_) | Self::Fields(_) => 0.0,
        }
    }
}

impl Source {
    fn at(&self, at: [usize; 3]) -> f64 {
        match self {
            Self::Expression(expression) => expression.at(at),
            Self::Image(image, [low, high]) => low + (high - low) * f64::from(image.at(at)) / 65535.0,
        }
    }
}

/// A fluid with the cell's relaxation time, its density, velocity, and velocity gradient: `gradient[axis][component]`.
type State<const D: usize> = (LatticeFluid<D>, f64, [f64; D], [[f64; D]; D]);

impl<const D: usize> Flow<D> {
    fn read(keys: Option<&Keys<'_>>, fluid: &LatticeFluid<D>) -> Result<Self, SimulationError> {
        let get = |key| keys.and_then(|keys| keys.get(key));
        let mut density = Expression::number(1.0);
        if let Some(item) = get("density") {
            density = item.expression()?;
            let wrong = density.constant().and_then(wrong_density);
            wrong.map_or(Ok(()), |what| Err(item.error(what)))?;
        }
        let mut velocity = std::array::from_fn(|_| Expression::number(0.0));
        if let Some(item) = get("velocity") {
            let expected = format!("a list of {D} numbers or expressions, one per axis");
            let list = item.list(&expected)?;
            if list.len() != D {
                return Err(item.expected(&expected));
            }
            for (part, item) in velocity.iter_mut().zip(&list) {
                *part = item.expression()?;
            }
            let wrong =
                (velocity.iter().map(Expression::constant).collect::<Option<Vec<_>>>()).and_then(wrong_velocity);
            wrong.map_or(Ok(()), |what| Err(item.error(what)))?;
        }
        let stress = get("stress").map(|item| item.flag()).transpose()?.unwrap_or(true);
        let plain = LatticeFluid { omega: None, solid: None, ..fluid.clone() };
        Ok(Self { fluid: plain, omega: fluid.omega.clone(), solid: fluid.solid.clone(), density, velocity, stress })
    }

    fn at(&self, at: [usize; 3]) -> State<D> {
        let tau = self.omega.as_ref().map_or(self.fluid.tau, |omega| 1.0 / f64::from(omega(at)));
        let fluid = LatticeFluid { tau, ..self.fluid.clone() };
        let density = self.density.at(at);
        if !self.stress {
            return (fluid, density, std::array::from_fn(|axis| self.velocity[axis].at(at)), [[0.0; D]; D]);
        }
        let slopes: [Slope; D] = std::array::from_fn(|axis| self.velocity[axis].of(at));
        let gradient = std::array::from_fn(|along| slopes.map(|slope| slope.along[along]));
        (fluid, density, slopes.map(|slope| slope.value), gradient)
    }

    fn speed(&self, at: [usize; 3]) -> f64 {
        if self.is_solid(at) {
            return 0.0;
        }
        lbm::speed(std::array::from_fn::<_, D, _>(|axis| self.velocity[axis].at(at)))
    }

    fn is_solid(&self, at: [usize; 3]) -> bool {
        self.solid.as_ref().is_some_and(|solid| solid(at))
    }
}

/// Why a density is invalid, if it is.
fn wrong_density(density: f64) -> Option<String> {
    let fits = density as f32 > 0.0 && (density as f32).is_finite();
    (!fits).then(|| format!("expected a density above 0 (1 is the fluid at rest), found {density}"))
}

/// Why a velocity is invalid, if it is.
fn wrong_velocity(velocity: Vec<f64>) -> Option<String> {
    let speed = lbm::speed::<3>(std::array::from_fn(|axis| velocity.get(axis).copied().unwrap_or(0.0)));
    let what = "expected a velocity below the speed of sound, 0.577 cells per step";
    (!lbm::is_subsonic(speed)).then(|| format!("{what}, found {speed:.3}"))
}

fn fields(
    keys: Option<&Keys<'_>>,
    names: &[String],
    grid: &Grid,
    files: &mut Files,
) -> Result<Initial, SimulationError> {
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let item = keys.and_then(|keys| keys.get(name));
        found.push(item.map(|item| source(&item, grid, files)).transpose()?);
    }
    // A wave at rest: the previous height equals the current one.
    if names == ["height", "before"] && found[1].is_none() {
        found[1] = found[0].clone();
    }
    let zero = || Source::Expression(Expression::number(0.0));
    Ok(Initial::Fields(found.into_iter().map(|source| source.unwrap_or_else(zero)).collect()))
}

fn source(item: &Item<'_>, grid: &Grid, files: &mut Files) -> Result<Source, SimulationError> {
    let Some(keys) = item.as_table() else { return item.expression().map(Source::Expression) };
    let picture = image(&keys, grid, files, true)?;
    let value = |key, usual| keys.get(key).map_or(Ok(usual), |item| item.number("the value of a pixel"));
    let (black, white) = (value("black", 0.0)?, value("white", 1.0)?);
    keys.done()?;
    Ok(Source::Image(picture, [black, white]))
}

impl Living {
    fn read(keys: Option<&Keys<'_>>, grid: &Grid, seed: u64, files: &mut Files) -> Result<Self, SimulationError> {
        let mut living = Self { seed, ..Self::default() };
        let Some(keys) = keys else { return Ok(living) };
        if let Some(item) = keys.get("noise") {
            let expected = "the share of live cells, from 0 to 1";
            living.share = item.number(expected)?;
            if !(0.0..=1.0).contains(&living.share) {
                return Err(item.expected(expected));
            }
        }
        if let Some(item) = keys.get("alive") {
            match item.as_table() {
                None => living.expression = Some(item.expression()?),
                Some(keys) => {
                    living.mask = Some(masked(&keys, grid, files, false)?);
                    keys.done()?;
                }
            }
        }
        if let Some(item) = keys.get("pattern") {
            let all =
                if item.as_table().is_some() { vec![item] } else { item.list("a pattern or a list of patterns")? };
            if all.len() > PATTERNS_MAX {
                return Err(all[PATTERNS_MAX].error(format!("a job has at most {PATTERNS_MAX} patterns")));
            }
            for item in &all {
                living.place(item, grid, files)?;
            }
            living.runs.sort_unstable();
            living.runs.dedup_by(|run, before| {
                let joined = run.y == before.y && run.start <= before.end;
                if joined {
                    before.end = before.end.max(run.end);
                }
                joined
            });
        }
        Ok(living)
    }

    /// `{ file = "gun.rle", at = [10, 10] }` or `{ text = "x = 3, y = 1\n3o!", at = [10, 10] }`.
    fn place(&mut self, item: &Item<'_>, grid: &Grid, files: &mut Files) -> Result<(), SimulationError> {
        let keys = item.table("a table such as { file = \"gun.rle\", at = [10, 10] }")?;
        let (name, pattern, of) = match (keys.get("file"), keys.get("text")) {
            (Some(item), None) => {
                let name = item.text("the name of an RLE file")?;
                let text = files.load_text(name, &item)?;
                (name, Pattern::parse(&text).map_err(|wrong| format!("{name}: {wrong}")), item)
            }
            (None, Some(item)) => {
                let text = item.text("a pattern as run-length encoded text")?;
                ("the pattern in `text`", Pattern::parse(text).map_err(|wrong| wrong.to_string()), item)
            }
            (Some(_), Some(_)) | (None, None) => {
                let what = "expected either `file`, the name of an RLE file, or `text`, the pattern itself";
                return Err(keys.missing(&["file", "text"], what));
            }
        };
        let pattern = pattern.map_err(|what| of.error(what))?;
        self.made_for.extend(pattern.rule.map(|rule| (name.to_owned(), rule)));
        let mut corner = [0; 2];
        if let Some(item) = keys.get("at") {
            let list = item.list("the pattern's upper left corner, [x, y]")?;
            let [x, y] = &list[..] else { return Err(item.expected("its upper left corner, [x, y]")) };
            for ((place, item), axis) in corner.iter_mut().zip([x, y]).zip(0..2) {
                *place = item.whole(0..=grid.size()[axis] as u64 - 1)? as usize;
            }
        }
        keys.done()?;
        // Each run may become two by wrapping around a periodic axis.
        if self.runs.len() + 2 * pattern.runs.len() > 2 * RUNS_MAX {
            return Err(item.error(format!("the patterns have more than {RUNS_MAX} runs of live cells: use an image")));
        }
        let [nx, ny, _] = grid.size();
        let beyond = |name: &str, at: usize, size: usize| {
            item.error(format!("the pattern reaches {name} = {at}, the grid has {size} cells"))
        };
        for run in &pattern.runs {
            let y = run.y as usize + corner[1];
            let (start, end) = (run.start as usize + corner[0], run.end as usize + corner[0]);
            if end > nx && grid.faces(0)[0] != Face::Periodic {
                return Err(beyond("x", start.max(nx), nx));
            }
            if y >= ny && grid.faces(1)[0] != Face::Periodic {
                return Err(beyond("y", y, ny));
            }
            let (y, length) = (y % ny, (end - start).min(nx));
            let start = start % nx;
            let mut put = |start: usize, end: usize| {
                self.runs.push(Run { y: y as u32, start: start as u32, end: end as u32 });
            };
            put(start, (start + length).min(nx));
            if start + length > nx {
                put(0, start + length - nx);
            }
        }
        Ok(())
    }

    /// Number of live runs of the patterns.
    #[cfg(test)]
    pub(super) fn runs(&self) -> usize {
        self.runs.len()
    }

    fn lives(&self, at: [usize; 3]) -> bool {
        noise(self.seed, 0, at) < self.share
            || self.expression.as_ref().is_some_and(|expression| expression.is_true(at))
            || self.mask.as_ref().is_some_and(|mask| mask.at(at))
            || self.near(at[1]).iter().any(|run| (run.start as usize..run.end as usize).contains(&at[0]))
    }

    /// The live runs of a row.
    fn near(&self, y: usize) -> &[Run] {
        let start = self.runs.partition_point(|run| (run.y as usize) < y);
        let row = &self.runs[start..];
        &row[..row.partition_point(|run| run.y as usize == y)]
    }
}
