//! `[rule]` and `[boundary]`: the update rule with its parameters, and the boundary conditions.
use std::sync::Arc;

use kernels_grids::lbm::{Collision, Fluid, Fluid3, LatticeFluid, Storage};
use kernels_grids::life::Life;
use kernels_grids::rule::Rule;
use kernels_grids::rule_file::{FIELDS_MAX, TextRule};
use kernels_grids::scalar::{GrayScott, Heat, Wave};
use kernels_grids::{AXES, CellMap, Face, Grid, GridError};

use crate::error::SimulationError;
use crate::files::Files;
use crate::force::{self, ForceSpec};
use crate::image::Image;
use crate::keys::{Item, Keys};

/// A rule with the metadata that the rest of the job needs.
pub(super) struct Physics {
    pub(super) rule: Rule,
    pub(super) kind: Kind,
    /// How the force on solid cells is reported.
    pub(super) force: Option<ForceSpec>,
    /// Canonical bytes of grid, rule, parameters and masks: equal exactly if the computation is the same.
    pub(super) described: Vec<u8>,
}

/// How the fields of a cell are interpreted.
pub(super) enum Kind {
    /// Dead or alive.
    Life,
    /// Populations in 2D.
    Fluid(Fluid),
    /// Populations in 3D.
    Fluid3(Fluid3),
    /// Plain fields, by name.
    Fields(Vec<String>),
}

impl Kind {
    /// The mask of solid cells.
    pub(super) fn solid(&self) -> Option<&CellMap<bool>> {
        match self {
            Self::Fluid(fluid) => fluid.solid.as_ref(),
            Self::Fluid3(fluid) => fluid.solid.as_ref(),
            Self::Life | Self::Fields(_) => None,
        }
    }

    /// Whether y points up in images; in Life it points down.
    pub(super) fn is_upright(&self) -> bool {
        !matches!(self, Self::Life)
    }
}

/// The grid with its boundary conditions; faces that `[boundary]` omits are periodic.
pub(super) fn grid(size: &[usize], boundary: Option<Item<'_>>) -> Result<Grid, SimulationError> {
    let mut faces = vec![[Face::Periodic; 2]; size.len()];
    let Some(item) = boundary else {
        return Grid::new(size, &faces).map_err(SimulationError::Grid);
    };
    let keys = item.table("a table of faces such as x = \"periodic\" or y_high = { moving = [0.1, 0] }")?;
    for (axis, faces) in faces.iter_mut().enumerate() {
        if let Some(item) = keys.get(BOTH_ENDS[axis]) {
            *faces = [face(&item, size.len())?; 2];
        }
        for (side, key) in ENDS[axis].into_iter().enumerate() {
            if let Some(item) = keys.get(key) {
                faces[side] = face(&item, size.len())?;
            }
        }
    }
    let grid = Grid::new(size, &faces).map_err(|wrong| {
        let axis = AXES.into_iter().position(|axis| wrong == GridError::HalfPeriodic { axis });
        let source = axis.and_then(|axis| item_of(&keys, axis, 0).or_else(|| item_of(&keys, axis, 1)));
        source.map_or_else(|| keys.error(wrong.to_string()), |item| item.error(wrong.to_string()))
    });
    keys.done()?;
    grid
}

const BOTH_ENDS: [&str; 3] = ["x", "y", "z"];
const ENDS: [[&str; 2]; 3] = [["x_low", "x_high"], ["y_low", "y_high"], ["z_low", "z_high"]];

/// The item of `[boundary]` that sets a face.
fn item_of<'a>(boundary: &Keys<'a>, axis: usize, side: usize) -> Option<Item<'a>> {
    boundary.get(ENDS[axis][side]).or_else(|| boundary.get(BOTH_ENDS[axis]))
}

const FACES: &str = "\"periodic\", \"wall\", { fixed = VALUE }, { moving = VELOCITY }, { inlet = VELOCITY, profile = \
                     \"flat\" or \"parabola\" } or { outlet = DENSITY }";

fn face(item: &Item<'_>, dimensions: usize) -> Result<Face, SimulationError> {
    if let Some(keys) = item.as_table() {
        let (fixed, moving, inlet) = (keys.get("fixed"), keys.get("moving"), keys.get("inlet"));
        let face = match (fixed, moving, inlet, keys.get("outlet")) {
            (Some(item), None, None, None) => Face::Fixed(fixed_values(&item)?),
            (None, Some(item), None, None) => Face::Moving { velocity: vector(&item, dimensions)? },
            (None, None, Some(item), None) => {
                let profile = keys.get("profile").map(|item| item.word(&[("flat", false), ("parabola", true)]));
                Face::Inlet { velocity: vector(&item, dimensions)?, parabola: profile.transpose()?.unwrap_or(false) }
            }
            (None, None, None, Some(item)) => Face::Outlet { density: item.number("a density such as 1.0")? as f32 },
            _ => {
                let what = format!("expected exactly one kind of face: {FACES}");
                return Err(keys.missing(&["fixed", "moving", "inlet", "outlet"], what));
            }
        };
        keys.done()?;
        return Ok(face);
    }
    match item.as_text() {
        Some("periodic") => Ok(Face::Periodic),
        Some("wall") => Ok(Face::Wall),
        Some(_) | None => Err(item.expected(FACES)),
    }
}

fn fixed_values(item: &Item<'_>) -> Result<[f32; FIELDS_MAX], SimulationError> {
    let expected = format!("a value, or a list with one value per field, at most {FIELDS_MAX}");
    let Ok(list) = item.list(&expected) else {
        return Ok([item.number(&expected)? as f32; FIELDS_MAX]);
    };
    let mut values = [0.0; FIELDS_MAX];
    match &list[..] {
        [] => return Err(item.expected(&expected)),
        [one] => values = [one.number(&expected)? as f32; FIELDS_MAX],
        several if several.len() <= FIELDS_MAX => {
            for (value, item) in values.iter_mut().zip(several) {
                *value = item.number(&expected)? as f32;
            }
        }
        _ => return Err(item.expected(&expected)),
    }
    Ok(values)
}

/// A list with one number per dimension.
pub(super) fn vector(item: &Item<'_>, dimensions: usize) -> Result<[f32; 3], SimulationError> {
    let expected = format!("a list of {dimensions} numbers, one per axis");
    let list = item.list(&expected)?;
    if list.len() != dimensions {
        return Err(item.expected(&expected));
    }
    let mut vector = [0.0; 3];
    for (part, item) in vector.iter_mut().zip(&list) {
        *part = item.number("a number")? as f32;
    }
    Ok(vector)
}

const RULES: &str =
    "the rule: name = \"life\", \"d2q9\", \"d3q19\", \"heat\", \"wave\" or \"gray-scott\", or file = \"x.rule\"";

/// Parses `[rule]`, and `[force]` on its solid cells.
pub(super) fn physics(
    item: &Item<'_>,
    pushed: Option<&Item<'_>>,
    (grid, boundary): (&Grid, Option<&Item<'_>>),
    files: &mut Files,
) -> Result<Physics, SimulationError> {
    let keys = item.table(RULES)?;
    let mut described = Vec::new();
    describe_grid(grid, &mut described);
    if let Some(item) = keys.get("file") {
        let (rule, kind) = from_text(&keys, &item, files, &mut described)?;
        return checked(keys, (rule, kind, force::none(pushed)?), (grid, boundary), described);
    }
    let name = keys.need("name", RULES)?;
    let (rule, kind, force) = match name.text(RULES)? {
        "life" => (life(&keys, &mut described)?, Kind::Life, force::none(pushed)?),
        "d2q9" => {
            let mut fluid = fluid(&keys, grid, files, &mut described)?;
            let force = force::force(pushed, &mut fluid, grid, files)?;
            (Rule::D2q9(fluid.clone()), Kind::Fluid(fluid), force)
        }
        "d3q19" => {
            let mut fluid = fluid(&keys, grid, files, &mut described)?;
            let force = force::force(pushed, &mut fluid, grid, files)?;
            (Rule::D3q19(fluid.clone()), Kind::Fluid3(fluid), force)
        }
        "heat" => {
            let rate = parameter(&keys, "rate", "the diffusivity in cells² per step", &mut described)?;
            (Rule::Heat(Heat { rate }), named(&["temperature"]), force::none(pushed)?)
        }
        "wave" => {
            let speed = parameter(&keys, "speed", "the wave speed in cells per step", &mut described)?;
            (Rule::Wave(Wave { speed }), named(&["height", "before"]), force::none(pushed)?)
        }
        "gray-scott" => {
            let mut number = |key, what| parameter(&keys, key, what, &mut described);
            let diffusion = [
                number("du", "the diffusivity of u in cells² per step")?,
                number("dv", "the diffusivity of v in cells² per step")?,
            ];
            let (feed, kill) = (number("feed", "the feed rate of u")?, number("kill", "the kill rate of v")?);
            (Rule::GrayScott(GrayScott { diffusion, feed, kill }), named(&["u", "v"]), force::none(pushed)?)
        }
        _ => return Err(name.expected(RULES)),
    };
    checked(keys, (rule, kind, force), (grid, boundary), described)
}

/// Checks the rule against the grid and its boundary conditions.
fn checked(
    keys: Keys<'_>,
    (rule, kind, force): (Rule, Kind, Option<ForceSpec>),
    (grid, boundary): (&Grid, Option<&Item<'_>>),
    mut described: Vec<u8>,
) -> Result<Physics, SimulationError> {
    described.extend_from_slice(rule.name().as_bytes());
    rule.check(grid).map_err(|wrong| {
        let boundary = boundary.and_then(Item::as_table);
        let face = if let GridError::Face { axis, side, .. } = wrong { Some((axis, side)) } else { None };
        let source = boundary.zip(face).and_then(|(boundary, (axis, side))| item_of(&boundary, axis, side));
        source.map_or_else(|| keys.error(wrong.to_string()), |item| item.error(wrong.to_string()))
    })?;
    keys.done()?;
    Ok(Physics { rule, kind, force, described })
}

/// A rule file, `file = "x.rule"`, with optional parameter values: `parameters = { feed = 0.04 }`.
fn from_text(
    keys: &Keys<'_>,
    item: &Item<'_>,
    files: &mut Files,
    described: &mut Vec<u8>,
) -> Result<(Rule, Kind), SimulationError> {
    let file = item.text("the name of a rule file")?;
    let text = files.load_text(file, item)?;
    let mut rule = TextRule::parse(&text).map_err(|wrong| item.error(format!("{file}, {wrong}")))?;
    if let Some(item) = keys.get("parameters") {
        for (name, item) in item.table("a table with values of the rule's parameters")?.all() {
            let value = item.number("a number")? as f32;
            rule.set(name, value).map_err(|wrong| item.error(wrong.to_string()))?;
        }
    }
    rule.check_numbers().map_err(|wrong| item.error(format!("{file}, {wrong}")))?;
    let program = rule.program();
    if let Some(long) = program.fields().iter().find(|field| field.len() > FIELD_NAME_MAX) {
        let long = kernels_grids::expression::shortened(long);
        return Err(
            item.error(format!("{file}: the field name {long} has more than {FIELD_NAME_MAX} letters: shorten it"))
        );
    }
    let (operations, next) = (program.operations(), program.next());
    described.extend_from_slice(format!("{:?} {operations:?} {next:?}", program.fields()).as_bytes());
    described.extend(rule.parameters().iter().flat_map(|value| value.to_bits().to_le_bytes()));
    let kind = Kind::Fields(program.fields().to_vec());
    Ok((Rule::Text(rule), kind))
}

/// Maximum letters of a field's name: output folders are named after it.
const FIELD_NAME_MAX: usize = 64;

fn named(fields: &[&str]) -> Kind {
    Kind::Fields(fields.iter().map(|field| (*field).into()).collect())
}

fn parameter(keys: &Keys<'_>, key: &str, what: &str, described: &mut Vec<u8>) -> Result<f32, SimulationError> {
    let number = keys.need(key, what)?.number("a number")? as f32;
    described.extend_from_slice(&number.to_bits().to_le_bytes());
    Ok(number)
}

fn life(keys: &Keys<'_>, described: &mut Vec<u8>) -> Result<Rule, SimulationError> {
    let life = match keys.get("notation") {
        None => Life::CONWAY,
        Some(item) => {
            let text = item.text("a birth/survival rule such as \"B3/S23\"")?;
            Life::parse(text).map_err(|wrong| item.error(wrong.to_string()))?
        }
    };
    described.extend_from_slice(life.to_string().as_bytes());
    Ok(Rule::Life(life))
}

/// Default magic parameter of TRT, 3/16: bounce-back walls lie exactly half-way between cells.
const MAGIC: f64 = 3.0 / 16.0;

fn fluid<const D: usize>(
    keys: &Keys<'_>,
    grid: &Grid,
    files: &mut Files,
    described: &mut Vec<u8>,
) -> Result<LatticeFluid<D>, SimulationError> {
    let (tau, viscosity, by_cell) = (keys.get("tau"), keys.get("viscosity"), keys.get("omega"));
    let mut omega: Option<CellMap<f32>> = None;
    let tau = match (tau, viscosity, by_cell) {
        (Some(tau), None, None) => tau.number("the relaxation time in steps, above 0.5")?,
        (None, Some(viscosity), None) => 0.5 + 3.0 * viscosity.number("the viscosity in cells² per step")?,
        (None, None, Some(item)) => {
            let expression = item.expression()?;
            let mut fastest = 0.0f64;
            for cell in spots(grid) {
                let rate = f64::from(expression.at(cell) as f32);
                if !(rate > 0.0 && rate < 2.0) {
                    return Err(item.error(format!("expected omega between 0 and 2, found {rate} at cell {cell:?}")));
                }
                fastest = fastest.max(rate);
            }
            described.push(1);
            expression.describe(described);
            omega = Some(Arc::new(move |cell| expression.at(cell) as f32));
            1.0 / fastest
        }
        _ => {
            let what = "expected one of tau (relaxation time in steps), viscosity (cells² per step) and omega (rate, an \
                        expression of x, y and z)";
            return Err(keys.missing(&["viscosity", "omega", "tau"], what));
        }
    };
    if omega.is_none() && tau.partial_cmp(&0.5) != Some(std::cmp::Ordering::Greater) {
        return Err(keys
            .error(format!("expected tau above 0.5, so that the viscosity (tau - 0.5) / 3 is positive, found {tau}")));
    }
    let magic = keys.get("magic").map(|item| item.number("a number above 0")).transpose()?;
    let collision = keys.get("collision").map(|item| item.word(&[("bgk", false), ("trt", true)])).transpose()?;
    let collision = match (collision, magic) {
        (Some(false), Some(_)) => return Err(keys.error("`magic` belongs to collision = \"trt\": set that or omit it")),
        (Some(false), None) => Collision::Bgk,
        (Some(true) | None, magic) => Collision::Trt { magic: magic.unwrap_or(MAGIC) },
    };
    let force = keys.get("force").map(|item| vector(&item, grid.dimensions())).transpose()?.unwrap_or_default();
    described.extend_from_slice(format!("{:x} {collision:?} {:?}", tau.to_bits(), force.map(f32::to_bits)).as_bytes());
    let solid = keys.get("solid").map(|item| solid(&item, grid, files, described)).transpose()?;
    let words = [("f32", Storage::Single), ("f16", Storage::Half)];
    let storage = keys.get("storage").map(|item| item.word(&words)).transpose()?.unwrap_or_default();
    if storage == Storage::Half {
        // Single precision adds nothing: checkpoints written before `storage` existed keep their identity.
        described.extend_from_slice(b"f16");
    }
    let force = std::array::from_fn(|axis| force[axis]);
    Ok(LatticeFluid { tau, collision, omega, solid, force_cells: None, force, storage })
}

/// The mask of solid cells: where an expression is not 0, or the dark pixels of an image.
pub(super) fn solid(
    item: &Item<'_>,
    grid: &Grid,
    files: &mut Files,
    described: &mut Vec<u8>,
) -> Result<CellMap<bool>, SimulationError> {
    let Some(keys) = item.as_table() else {
        let expression = item.expression()?;
        described.push(2);
        expression.describe(described);
        return Ok(Arc::new(move |cell| expression.is_true(cell)));
    };
    let mask = masked(&keys, grid, files, true)?;
    keys.done()?;
    described.push(3);
    mask.describe(described);
    Ok(Arc::new(move |cell| mask.at(cell)))
}

/// `{ image = "FILE.png", threshold = 0.5, bright = false }`.
pub(super) fn masked(
    keys: &Keys<'_>,
    grid: &Grid,
    files: &mut Files,
    upright: bool,
) -> Result<crate::image::Mask, SimulationError> {
    let (item, name, bytes) = png_file(keys, files)?;
    let threshold = match keys.get("threshold") {
        None => 0.5,
        Some(item) => {
            let number = item.number("a number from 0 (black) to 1 (white)")?;
            if !(0.0..=1.0).contains(&number) {
                return Err(item.expected("a number from 0 (black) to 1 (white)"));
            }
            number
        }
    };
    let bright = keys.get("bright").map(|item| item.flag()).transpose()?.unwrap_or(false);
    crate::image::Mask::read(&bytes, grid, upright, threshold, bright)
        .map_err(|what| item.error(format!("{name}: {what}")))
}

/// `image = "FILE.png"`.
pub(super) fn image(keys: &Keys<'_>, grid: &Grid, files: &mut Files, upright: bool) -> Result<Image, SimulationError> {
    let (item, name, bytes) = png_file(keys, files)?;
    Image::read(&bytes, grid, upright).map_err(|what| item.error(format!("{name}: {what}")))
}

/// The key that names a PNG file, its name and its bytes.
fn png_file<'a>(keys: &Keys<'a>, files: &mut Files) -> Result<(Item<'a>, String, Arc<[u8]>), SimulationError> {
    let item = keys.need("image", "the name of a PNG file")?;
    let name = item.text("the name of a PNG file")?.to_owned();
    let bytes = files.load(&name, &item)?;
    Ok((item, name, bytes))
}

fn describe_grid(grid: &Grid, to: &mut Vec<u8>) {
    to.extend_from_slice(format!("{} {:?}", grid.dimensions(), grid.size()).as_bytes());
    for axis in 0..AXES.len() {
        for face in grid.faces(axis) {
            // Floats print as the shortest text that parses back to the same bits.
            to.extend_from_slice(format!("{face:?}").as_bytes());
        }
    }
}

/// Sample cells of a grid, evenly spread and including both ends of each axis, for checks of the whole grid.
pub(super) fn spots(grid: &Grid) -> impl Iterator<Item = [usize; 3]> {
    const ALONG: usize = 9;
    let along = |size: usize| {
        let mut all: Vec<usize> = (0..ALONG).map(|part| (size - 1) * part / (ALONG - 1)).collect();
        all.dedup();
        all
    };
    let [x, y, z] = grid.size().map(along);
    let mut all = Vec::with_capacity(x.len() * y.len() * z.len());
    for z in z {
        for &y in &y {
            all.extend(x.iter().map(|&x| [x, y, z]));
        }
    }
    all.into_iter()
}
