//! A parsed job: its grid, rule, initial state and outputs.
use std::path::Path;

use kernels::threads::Threads;
use kernels_grids::any_tile::GridTile;
use kernels_grids::lbm::SUBSONIC;
use kernels_grids::rule::Rule;
use kernels_grids::tile::Tile;
use kernels_grids::{FieldCheck, Grid, GridError, Region, SIZE_MAX};
use toml::de::DeTable;

use crate::error::SimulationError;
use crate::expression::{self, Names};
use crate::files::{Files, SIMULATION_MAX};
use crate::force::{Force, ForceSpec};
use crate::initial::{self, Impossible, Initial};
use crate::keys::{self, Document, Item, Keys};
use crate::output::{self, OutputSpec};
use crate::physics::{self, Kind, Physics, spots};
use crate::sample;

/// Maximum cells of a grid: keeps cell and byte counts far from overflowing 64 bits.
const CELLS_MAX: u64 = 1 << 40;
/// Maximum steps: on the wire, the step of a halo plus its number of elements must fit in 32 bits.
const STEPS_MAX: u64 = 1 << 31;
/// Maximum characters of a job's name.
const NAME_MAX: usize = 64;
/// Maximum constants of a job.
const CONSTANTS_MAX: usize = 64;
/// Bounds of the default interval, in steps, between field checks (conservation and NaN). A check costs one to three
/// steps, so at most 1 % of the run.
const CHECK_EVERY: [u64; 2] = [300, 1000];
/// The default interval between field checks covers at least this many cell updates, within [`CHECK_EVERY`]: tenths of
/// a second on one core, far longer than the report takes to arrive.
const CHECK_CELLS: u64 = 1 << 26;
/// Maximum halo depth in steps per exchange.
const DEPTH_MAX: u64 = 64;

/// A parsed job: grid, rule, initial state and outputs. Immutable; needs no files once built.
pub struct Simulation {
    files: Files,
    name: String,
    pub(crate) grid: Grid,
    pub(crate) physics: Physics,
    pub(crate) initial: Initial,
    steps: u64,
    pub(crate) quantities: Vec<String>,
    outputs: Vec<OutputSpec>,
    checkpoint_every: Option<u64>,
    standby: StandbyTier,
    depth: Option<usize>,
    check_every: u64,
    warnings: Vec<String>,
    identity: [u8; 32],
}

/// Standby tier of the tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyTier {
    /// No standby: after a loss the run rolls back to its last checkpoint.
    None,
    /// A node holds the last snapshot and replays from there.
    Warm,
    /// A node computes the same tile in parallel.
    Hot,
}

impl Simulation {
    /// Reads a job file and the files it names, relative to its folder.
    ///
    /// # Errors
    /// A file cannot be read, or is invalid; with file, line and column.
    pub fn read(path: &Path) -> Result<Self, SimulationError> {
        Self::build(Files::open(path)?)
    }

    /// The job with all its files, packed for another node: at most [`SIMULATION_MAX`] bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.files.pack()
    }

    /// Passes the bytes of [`Self::to_bytes`] to `each` piece by piece, without copying, until it returns false.
    pub fn pack(&self, each: &mut dyn FnMut(&[u8]) -> bool) {
        self.files.pack_into(each);
    }

    /// Length of [`Self::to_bytes`] in bytes.
    pub fn packed_len(&self) -> usize {
        self.files.packed_len()
    }

    /// Unpacks the output of [`Self::to_bytes`].
    ///
    /// # Errors
    /// The bytes are not a packed simulation, have another version, are truncated, or contain an invalid job file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SimulationError> {
        Self::build(Files::unpack(bytes)?)
    }

    fn build(mut files: Files) -> Result<Self, SimulationError> {
        let (file, text) = (files.job.clone(), files.text.clone());
        let mut document = Document { file: &file, text: &text, names: Names::default() };
        let table = document.parse(&text)?;
        document.names = names(&Keys::root(&document, &table))?;
        let keys = Keys::root(&document, &table);
        let _ = (keys.has("seed"), keys.has("constants"));

        let name = name(&keys)?;
        let steps = keys.need("steps", "the number of steps")?.whole(1..=STEPS_MAX)?;
        let size = size(&keys)?;
        let boundary = keys.get("boundary");
        let grid = physics::grid(&size, boundary.clone())?;
        let rule = keys.need("rule", "a table with the update rule")?;
        let physics = physics::physics(&rule, keys.get("force").as_ref(), (&grid, boundary.as_ref()), &mut files)?;
        let item = keys.get("initial");
        let initial = Initial::read(item.as_ref(), &physics.kind, &grid, document.names.seed, &mut files)?;
        let fields: &[String] = if let Kind::Fields(names) = &physics.kind { names } else { &[] };
        if let Some(Impossible { key, what }) = initial.first_impossible(&grid, fields) {
            let source = item.as_ref().and_then(Item::as_table).and_then(|keys| keys.get(&key));
            return Err(source.or(item).map_or_else(|| keys.error(&what), |item| item.error(&what)));
        }
        for cell in spots(&grid) {
            if let Some(what) = initial.wrong(cell, physics.rule.fields()) {
                return Err(item.map_or_else(|| keys.error(&what), |item| item.error(&what)));
            }
        }
        let quantities = sample::quantities(&physics.kind);
        let outputs = output::outputs(keys.get("output"), &physics.kind, &quantities, &grid, steps)?;
        let number = |key, range| keys.get(key).map(|item| item.whole(range)).transpose();
        let checkpoint_every = number("checkpoint_every", 1..=STEPS_MAX)?;
        let depth = number("depth", 1..=DEPTH_MAX)?.map(|depth| depth as usize);
        let [least, most] = CHECK_EVERY;
        let usual = (CHECK_CELLS / grid.region().cells() as u64).clamp(least, most);
        let check_every = number("check_every", 1..=STEPS_MAX)?.unwrap_or(usual);
        let tiers = [("none", StandbyTier::None), ("warm", StandbyTier::Warm), ("hot", StandbyTier::Hot)];
        let standby = keys.get("standby").map(|item| item.word(&tiers)).transpose()?.unwrap_or(StandbyTier::None);
        keys.done()?;

        let mut warnings: Vec<String> = physics.rule.warning(&grid).into_iter().collect();
        warnings.extend(initial.warnings(&physics.rule));
        warnings.extend(outputs.iter().filter_map(|output| output.warning(steps)));
        let fastest = spots(&grid).map(|cell| initial.speed(cell)).fold(0.0, f64::max);
        if fastest > f64::from(SUBSONIC) {
            let what = "cells per step in the initial state: above 0.2 errors grow fast, use a lower one";
            warnings.push(format!("a velocity of {fastest:.3} {what}"));
        }
        let identity = identity(&physics, &table, &document.names, &files);
        let simulation = Self {
            files,
            name,
            grid,
            physics,
            initial,
            steps,
            quantities,
            outputs,
            checkpoint_every,
            standby,
            depth,
            check_every,
            warnings,
            identity,
        };
        let bytes = simulation.packed_len();
        if bytes > SIMULATION_MAX {
            let what = format!("expected at most {SIMULATION_MAX} bytes including the files it names, found {bytes}");
            return Err(SimulationError::File { path: file.into(), what });
        }
        Ok(simulation)
    }

    /// The job's human-readable name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The grid and its boundary conditions.
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// The rule and its parameters.
    pub fn rule(&self) -> &Rule {
        &self.physics.rule
    }

    /// The number of steps.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The outputs.
    pub fn outputs(&self) -> &[OutputSpec] {
        &self.outputs
    }

    /// Steps between checkpoints; `None`: no checkpoints.
    pub fn checkpoint_every(&self) -> Option<u64> {
        self.checkpoint_every
    }

    /// Standby tier of the tiles.
    pub fn standby(&self) -> StandbyTier {
        self.standby
    }

    /// Halo depth in steps per exchange, if the job sets it.
    pub fn depth(&self) -> Option<usize> {
        self.depth
    }

    /// Steps between field checks (conservation and NaN).
    pub fn check_every(&self) -> u64 {
        self.check_every
    }

    /// Hash of everything a checkpoint depends on: grid, rule, parameters, masks and initial state; not steps or
    /// outputs.
    pub fn identity(&self) -> [u8; 32] {
        self.identity
    }

    /// Warnings about settings that are valid but likely unstable or unintended.
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.clone()
    }

    /// Loads the initial state into a tile.
    ///
    /// # Errors
    /// The tile's device failed.
    pub fn load(&self, tile: &mut dyn GridTile) -> Result<(), GridError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        for part in self.initial_parts(tile.region()) {
            tile.restore(part, &self.initial(part, threads))?;
        }
        tile.resume(0);
        Ok(())
    }

    /// Splits a region into boxes of a few megabytes, each spanning the region along x.
    pub fn initial_parts(&self, region: Region) -> Vec<Region> {
        initial::parts(region, self.rule())
    }

    /// The initial state of a box, in the format of [`Tile::save`].
    pub fn initial(&self, region: Region, threads: usize) -> Vec<u8> {
        self.initial.cells(region, self.rule(), threads)
    }

    /// The quantities that can be sampled.
    pub fn quantities(&self) -> &[String] {
        &self.quantities
    }

    /// The quantity shown by default.
    pub fn default_quantity(&self) -> &str {
        sample::default_quantity(&self.physics.kind, &self.quantities)
    }

    /// Whether a cell is solid, so that its quantities have no meaning.
    pub fn is_solid(&self, at: [usize; 3]) -> bool {
        self.physics.kind.solid().is_some_and(|solid| solid(at))
    }

    /// Whether y points up in images; in Life it points down.
    pub fn is_upright(&self) -> bool {
        self.physics.kind.is_upright()
    }
}

impl Simulation {
    /// How the force on solid cells is reported, if it is.
    pub fn force(&self) -> Option<&ForceSpec> {
        self.physics.force.as_ref()
    }

    /// A tile's field check: the sum of each field and, if the job requests it, the force, in fixed-point units whose
    /// sum does not depend on the order; and the first cell that is NaN or infinite.
    ///
    /// # Errors
    /// A step is incomplete, or the tile's device failed.
    pub fn check_fields(&self, tile: &dyn GridTile, threads: &mut Threads) -> Result<FieldCheck, GridError> {
        let mut look = tile.field_check(threads)?;
        if self.physics.force.is_some() {
            look.totals.extend_from_slice(&tile.force()?[..self.grid.dimensions()]);
        }
        Ok(look)
    }

    /// The force from the totals summed over all tiles, if the job requests it.
    pub fn force_of(&self, totals: &[i128]) -> Option<Force> {
        let spec = self.physics.force.as_ref()?;
        let fields = self.rule().fields();
        let parts = totals.get(fields..fields + self.grid.dimensions())?;
        let force: Vec<f64> = parts.iter().map(|total| Tile::total_value(*total)).collect();
        let coefficients = spec.unit.map(|unit| force.iter().map(|part| part / unit).collect());
        Some(Force { force, coefficients })
    }
}

impl std::fmt::Debug for Simulation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, grid, physics, steps, .. } = self;
        write!(f, "Simulation {{ {name:?}: {:?} on {:?}, {steps} steps }}", physics.rule, grid.size())
    }
}

/// See [`Simulation::identity`]: hashes the parsed rule, and the text of the initial state with the seed, constants and
/// files it uses.
fn identity(physics: &Physics, table: &DeTable<'_>, names: &Names, files: &Files) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("meshnode 2026 what a grid's checkpoint is of, and how it began");
    hasher.update(blake3::hash(&physics.described).as_bytes());
    let Some((_, initial)) = table.iter().find(|(name, _)| name.get_ref() == "initial") else {
        return *hasher.finalize().as_bytes();
    };
    let mut written = String::new();
    keys::write(initial.get_ref(), &mut written);
    hasher.update(written.as_bytes()).update(&names.seed.to_le_bytes());
    for (name, value) in &names.constants {
        hasher.update(name.as_bytes()).update(&value.to_bits().to_le_bytes());
    }
    for (_, bytes) in files.all().filter(|(name, _)| written.contains(*name)) {
        hasher.update(blake3::hash(bytes).as_bytes());
    }
    *hasher.finalize().as_bytes()
}

fn name(keys: &Keys<'_>) -> Result<String, SimulationError> {
    let expected = format!("the job's name of 1 to {NAME_MAX} characters");
    let item = keys.need("name", &expected)?;
    let name = item.text(&expected)?.trim();
    let count = name.chars().count();
    if (1..=NAME_MAX).contains(&count) && !name.chars().any(char::is_control) {
        return Ok(name.into());
    }
    Err(item.error(format!("expected {expected} without control characters, found {count} characters")))
}

/// `[grid]`.
fn size(keys: &Keys<'_>) -> Result<Vec<usize>, SimulationError> {
    let expected = "a table with the cells along each axis: size = [512, 512]";
    let keys = keys.need("grid", expected)?.table(expected)?;
    let item = keys.need("size", "the cells along each axis, such as [512, 512]")?;
    let list = item.list("the cells along each axis, such as [512, 512] or [64, 64, 64]")?;
    if !(2..=3).contains(&list.len()) {
        return Err(item.expected("the cells along two or three axes, such as [512, 512]"));
    }
    let size = list.iter().map(|item| item.whole(1..=SIZE_MAX as u64)).collect::<Result<Vec<_>, _>>()?;
    let cells = size.iter().try_fold(1u64, |cells, size| cells.checked_mul(*size));
    if cells.is_none_or(|cells| cells > CELLS_MAX) {
        return Err(item.error(format!("expected at most {CELLS_MAX} cells in total, found more")));
    }
    keys.done()?;
    Ok(size.into_iter().map(|size| size as usize).collect())
}

/// The names that expressions can use: the grid's size, pi and the job's `[constants]`, which may depend on each other.
fn names(keys: &Keys<'_>) -> Result<Names, SimulationError> {
    let mut names = Names::default();
    if let Some(item) = keys.get("seed") {
        names.seed = item.whole(0..=u64::MAX)?;
    }
    let size = size(keys)?;
    for (axis, name) in ["nx", "ny", "nz"].into_iter().enumerate() {
        names.constants.push((name.into(), size.get(axis).copied().unwrap_or(1) as f64));
    }
    names.constants.push(("pi".into(), std::f64::consts::PI));
    let Some(item) = keys.get("constants") else { return Ok(names) };
    let all = item.table("a table of numbers: u0 = 0.05")?.all();
    if all.len() > CONSTANTS_MAX {
        return Err(item.error(format!("a job has at most {CONSTANTS_MAX} constants, this one {}", all.len())));
    }
    for (name, item) in &all {
        let letters = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let begins = name.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        if !letters || !begins || name.len() > NAME_MAX {
            return Err(item.error("expected a name of at most 64 letters, digits and _, not beginning with a digit"));
        }
        if expression::is_taken(name) || names.constants.iter().any(|(known, _)| known == name) {
            return Err(item.error("the name is already used: choose another"));
        }
    }
    let mut left = all;
    // Each round resolves the constants whose dependencies are known. A round without progress means an error or a
    // cycle.
    loop {
        let mut rest = Vec::new();
        let mut first = None;
        let before = left.len();
        for (name, item) in left {
            let found = match item.as_text() {
                None => item.number("a number, or an expression of constants"),
                Some(text) => item.parsed(text, &names).and_then(|expression| match expression.constant() {
                    Some(value) if value.is_finite() => Ok(value),
                    Some(value) => Err(item.error(format!("expected a finite number, found {value}"))),
                    None => Err(item.error("expected a constant, found an expression that differs between cells")),
                }),
            };
            match found {
                Ok(value) => names.constants.push((name.into(), value)),
                Err(error) => {
                    first.get_or_insert(error);
                    rest.push((name, item));
                }
            }
        }
        match first {
            None => return Ok(names),
            Some(error) if rest.len() == before => return Err(error),
            Some(_) => left = rest,
        }
    }
}
