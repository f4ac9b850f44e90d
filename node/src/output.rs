//! What a simulation leaves behind: pictures, films and fields, in formats that other programs read.
//!
//! A [`Writer`] stands for one `[[output]]` of a job. It is given whole frames, step by step, and may be given a step again:
//! the last one counts. What is on disk is complete at any moment; a write that fails (no space, no permission) changes
//! nothing and can be repeated when the cause is gone. A run that goes on from a checkpoint opens its writers at that step.
//! Next: `output/picture.rs`, `output/animation.rs`, `output/zarr.rs`, `output/vtk.rs`, `output/terminal.rs`.
use std::path::{Path, PathBuf};

use kernels::grid::simulation::{Field, OutputKind, OutputSpec, Simulation};
use thiserror::Error;

pub use picture::{Painter, Picture};
pub use terminal::render;

mod animation;
mod colours;
mod files;
mod picture;
mod terminal;
#[cfg(test)]
mod tests;
mod vtk;
mod zarr;

/// Writes one output of a simulation.
pub struct Writer {
    every: u64,
    steps: u64,
    /// What frames must have.
    size: [usize; 3],
    format: Format,
}

enum Format {
    Png { painter: Painter, folder: PathBuf, quantity: String },
    Gif(animation::Animation),
    Zarr(zarr::Array),
    Vtk(vtk::Series),
}

/// Why something is not on disk. What was there before still is.
#[derive(Debug, Error)]
pub enum OutputError {
    /// The operating system refuses.
    #[error("cannot write {}: {why}; {advice}", .path.display())]
    File {
        /// What was to be written.
        path: PathBuf,
        /// In its words, or plainer ones.
        why: String,
        /// What to do.
        advice: &'static str,
        /// Whether there is no space left: the run may wait for it.
        full: bool,
    },
    /// A frame that is none of this output.
    #[error("{what}")]
    Frame {
        /// What was expected and what was found.
        what: String,
    },
}

impl OutputError {
    /// Whether it is a matter of space, so that it is worth waiting.
    pub fn is_full(&self) -> bool {
        match self {
            Self::File { full, .. } => *full,
            Self::Frame { .. } => false,
        }
    }
}

/// Files of an output that are in a run's folder `out`, relative to that: those that a [`Writer`] of it makes, and no others.
pub fn written(out: &Path, folder: &str, kind: OutputKind, quantity: &str) -> Vec<PathBuf> {
    let place = out.join(folder);
    let numbered = |ending: &str| {
        let steps = files::steps(&place, quantity, ending).unwrap_or_default();
        steps.into_iter().map(|step| files::numbered(&place, quantity, step, ending)).collect::<Vec<_>>()
    };
    let mut found = match kind {
        OutputKind::Png => numbered(".png"),
        OutputKind::Gif => vec![place.join(format!("{quantity}.gif"))],
        OutputKind::Zarr => zarr::files(&place, quantity),
        OutputKind::Vtk => {
            let mut all = numbered(vtk::ENDING);
            all.push(place.join(format!("{quantity}{}", vtk::LIST_ENDING)));
            all
        }
    };
    found.retain(|file| file.is_file());
    found.iter().filter_map(|file| file.strip_prefix(out).ok().map(Path::to_path_buf)).collect()
}

impl Writer {
    /// Prepares the output's folder within `out`. `from`: the step that the run begins at or goes on from; what an earlier
    /// run wrote of later steps is removed.
    ///
    /// # Errors
    /// The folder cannot be made or written to.
    pub fn new(simulation: &Simulation, spec: &OutputSpec, out: &Path, from: u64) -> Result<Self, OutputError> {
        let folder = out.join(&spec.folder);
        files::prepare(&folder)?;
        let (region, stride) = simulation.shown(spec);
        let size = kernels::grid::simulation::blocks(region, stride).size();
        let painter = || Painter::new(simulation, spec.colours, spec.range, (region, stride), spec.size_max);
        let quantity = spec.quantity.clone();
        let format = match spec.kind {
            OutputKind::Png => {
                files::remove_after(&folder, &quantity, ".png", from)?;
                Format::Png { painter: painter(), folder, quantity }
            }
            OutputKind::Gif => {
                let path = folder.join(format!("{quantity}.gif"));
                Format::Gif(animation::Animation::open(path, painter(), spec, from)?)
            }
            OutputKind::Zarr => Format::Zarr(zarr::Array::open(simulation, spec, folder, from)?),
            OutputKind::Vtk => Format::Vtk(vtk::Series::open(folder, &quantity, from)?),
        };
        Ok(Self { every: spec.every, steps: simulation.steps(), size, format })
    }

    /// Writes the frame of a step, or replaces it. Of an animation, frames of later steps are gone then: they come again.
    ///
    /// # Errors
    /// It is no frame of this output, or cannot be written; then nothing is changed, and the call can be repeated.
    pub fn write(&mut self, step: u64, field: &Field) -> Result<(), OutputError> {
        if !step.is_multiple_of(self.every) || step > self.steps {
            let (every, steps) = (self.every, self.steps);
            let what = format!("expected a step that is a multiple of {every} and at most {steps}, found {step}");
            return Err(OutputError::Frame { what });
        }
        if field.size != self.size || field.values.len() != self.size.iter().product::<usize>() {
            let (size, found, values) = (self.size, field.size, field.values.len());
            let what = format!("expected a frame of {size:?}, found one of {found:?} with {values} values");
            return Err(OutputError::Frame { what });
        }
        match &mut self.format {
            Format::Png { painter, folder, quantity } => {
                let picture = painter.paint(field, None);
                files::replace(&files::numbered(folder, quantity, step, ".png"), &[&picture.png()])
            }
            Format::Gif(animation) => animation.write(step, field),
            Format::Zarr(array) => array.write(step, field),
            Format::Vtk(series) => series.write(step, field),
        }
    }

    /// Writes what needs all frames: an index of them.
    ///
    /// # Errors
    /// It cannot be written. The frames are all there.
    pub fn finish(&mut self) -> Result<(), OutputError> {
        match &self.format {
            Format::Vtk(series) => series.finish(),
            Format::Png { .. } | Format::Gif(_) | Format::Zarr(_) => Ok(()),
        }
    }
}
