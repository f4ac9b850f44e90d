//! `[[output]]`: which quantity is written, how often and in which format.
use std::collections::BTreeSet;

use kernels_grids::{AXES, Grid};

use crate::error::SimulationError;
use crate::keys::{Item, Keys};
use crate::physics::Kind;

/// Maximum outputs: each is gathered from all tiles.
pub const OUTPUTS_MAX: usize = 16;
/// Maximum frames of an output: files of a folder, rows of an index.
pub const FRAMES_MAX: u64 = 100_000;
/// Maximum frames of an animation: a browser keeps all of them in memory.
pub const ANIMATION_FRAMES_MAX: u64 = 2_000;
/// Maximum pixels along the longer side of a frame.
pub const FRAME_SIZE_MAX: usize = 8192;
/// Default maximum of pixels along the longer side.
const FRAME_SIZE: usize = 1024;
/// Default for animations, whose file holds all frames.
const ANIMATION_SIZE: usize = 512;
/// Default and maximum frames per second of an animation. A GIF counts in hundredths of a second, and many programs
/// show a delay of one hundredth as ten.
const FPS: [u16; 2] = [25, 50];

/// One output of a job, written at a fixed interval.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputSpec {
    /// File format.
    pub kind: OutputKind,
    /// One of [`Simulation::quantities`](crate::Simulation::quantities).
    pub quantity: String,
    /// Steps between frames; the initial state is the first frame.
    pub every: u64,
    /// Name of the folder within the run's folder.
    pub folder: String,
    /// Values of the first and last colour; `None`: each frame's minimum and maximum.
    pub range: Option<[f32; 2]>,
    /// Colour map.
    pub colours: Colours,
    /// Maximum pixels along the longer side of a frame; larger grids are downsampled.
    pub size_max: usize,
    /// The z layer shown in images of 3D grids.
    pub layer: usize,
    /// Frames per second of an animation.
    pub fps: u16,
}

/// File format of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputKind {
    /// One PNG image per frame.
    Png,
    /// One animated GIF.
    Gif,
    /// A Zarr array of all cells, time first.
    Zarr,
    /// One VTK image (`.vti`) of all cells per frame.
    Vtk,
}

impl OutputSpec {
    /// A warning if the interval exceeds the run.
    pub(super) fn warning(&self, steps: u64) -> Option<String> {
        let Self { folder, every, .. } = self;
        (*every > steps).then(|| {
            format!("the output {folder:?} is written every {every} steps and the job has {steps}: only the initial state is shown")
        })
    }
}

impl OutputKind {
    /// Whether it is an image of one layer, downsampled as needed, rather than all cells.
    pub fn is_picture(self) -> bool {
        match self {
            Self::Png | Self::Gif => true,
            Self::Zarr | Self::Vtk => false,
        }
    }
}

/// A colour map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colours {
    /// Black to white.
    Grey,
    /// Dark blue, green, yellow: perceptually uniform.
    Viridis,
    /// Black, red, yellow, white.
    Fire,
    /// Blue, white, red: for signed values.
    Diverging,
}

/// The checkpoint folder, next to those of the outputs.
const CHECKPOINTS: &str = "checkpoints";

const COLOURS: [(&str, Colours); 4] = [
    ("grey", Colours::Grey),
    ("viridis", Colours::Viridis),
    ("fire", Colours::Fire),
    ("diverging", Colours::Diverging),
];
const KINDS: [(&str, OutputKind); 4] =
    [("png", OutputKind::Png), ("gif", OutputKind::Gif), ("zarr", OutputKind::Zarr), ("vtk", OutputKind::Vtk)];

impl Colours {
    /// The default colour map of a quantity.
    pub fn of(quantity: &str) -> Self {
        match quantity {
            "alive" => Self::Grey,
            "vorticity" | "ux" | "uy" | "uz" | "height" => Self::Diverging,
            "temperature" => Self::Fire,
            _ => Self::Viridis,
        }
    }
}

/// Parses all outputs.
pub(super) fn outputs(
    item: Option<Item<'_>>,
    kind: &Kind,
    quantities: &[String],
    grid: &Grid,
    steps: u64,
) -> Result<Vec<OutputSpec>, SimulationError> {
    let Some(item) = item else { return Ok(Vec::new()) };
    let list = item.list("tables: [[output]]")?;
    if list.len() > OUTPUTS_MAX {
        return Err(list[OUTPUTS_MAX].error(format!("a job has at most {OUTPUTS_MAX} outputs")));
    }
    let mut folders = BTreeSet::new();
    let mut outputs = Vec::with_capacity(list.len());
    for item in &list {
        let keys = item.table("a table: [[output]]")?;
        let output = output(&keys, kind, quantities, grid, steps)?;
        if !folders.insert(output.folder.to_ascii_lowercase()) {
            let what = format!("two outputs have the folder {:?}: set another with `folder`", output.folder);
            return Err(keys.error(what));
        }
        keys.done()?;
        outputs.push(output);
    }
    Ok(outputs)
}

fn output(
    keys: &Keys<'_>,
    what: &Kind,
    quantities: &[String],
    grid: &Grid,
    steps: u64,
) -> Result<OutputSpec, SimulationError> {
    let kind_item = keys.need("kind", "\"png\", \"gif\", \"zarr\" or \"vtk\"")?;
    let kind = kind_item.word(&KINDS)?;
    let (kind_name, _) = KINDS.into_iter().find(|(_, known)| *known == kind).unwrap_or(("", kind));
    let quantity = match keys.get("quantity") {
        None => crate::sample::default_quantity(what, quantities),
        Some(item) => {
            let words: Vec<(&str, usize)> = quantities.iter().zip(0..).map(|(name, at)| (name.as_str(), at)).collect();
            quantities[item.word(&words)?].as_str()
        }
    };
    let every = keys.need("every", "the number of steps between frames")?;
    let (item, every) = (every.clone(), every.whole(1..=u64::MAX)?);
    let frames_max = if kind == OutputKind::Gif { ANIMATION_FRAMES_MAX } else { FRAMES_MAX };
    if steps / every >= frames_max {
        let least = steps / frames_max + 1;
        let frames = steps / every + 1;
        return Err(
            item.error(format!("expected at most {frames_max} frames, found {frames}: set it to at least {least}"))
        );
    }
    let folder = match keys.get("folder") {
        None => format!("{quantity}-{kind_name}"),
        Some(item) => folder(&item)?,
    };
    let range = keys.get("range").map(|item| range(&item)).transpose()?;
    let range = range.or(matches!(what, Kind::Life).then_some([0.0, 1.0]));
    let colours = keys.get("colours").map(|item| item.word(&COLOURS)).transpose()?;
    let usual = if kind == OutputKind::Gif { ANIMATION_SIZE } else { FRAME_SIZE };
    let (mut size_max, mut layer, mut fps) = (usual, grid.size()[2] / 2, FPS[0]);
    if kind == OutputKind::Gif
        && let Some(item) = keys.get("fps")
    {
        fps = item.whole(1..=FPS[1].into())? as u16;
    }
    if kind.is_picture() {
        if let Some(item) = keys.get("size_max") {
            size_max = item.whole(16..=FRAME_SIZE_MAX as u64)? as usize;
        }
        if grid.dimensions() == 3
            && let Some(item) = keys.get("layer")
        {
            layer = item.whole(0..=grid.size()[AXES.len() - 1] as u64 - 1)? as usize;
        }
    }
    let colours = colours.unwrap_or_else(|| Colours::of(quantity));
    Ok(OutputSpec { kind, quantity: quantity.into(), every, folder, range, colours, size_max, layer, fps })
}

fn folder(item: &Item<'_>) -> Result<String, SimulationError> {
    let expected = "the name of a folder: letters, digits, - and _, at most 64";
    let name = item.text(expected)?;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    // Device names that some systems reserve (such as `con`) pass; default folder names have a dash and never collide.
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        return Err(item.expected(expected));
    }
    if name.eq_ignore_ascii_case(CHECKPOINTS) {
        return Err(item.error(format!("the folder {CHECKPOINTS:?} is reserved for checkpoints: choose another name")));
    }
    Ok(name.into())
}

fn range(item: &Item<'_>) -> Result<[f32; 2], SimulationError> {
    let expected = "the values of the first and of the last colour, [low, high]";
    let list = item.list(expected)?;
    let [low, high] = &list[..] else { return Err(item.expected(expected)) };
    let (low, high) = (low.number("a number")? as f32, high.number("a number")? as f32);
    if low < high { Ok([low, high]) } else { Err(item.error(format!("expected {expected}, found [{low}, {high}]"))) }
}
