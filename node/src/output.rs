//! Output files of simulations: images, animations and fields, in standard formats.
//!
//! A [`Writer`] writes one `[[output]]` of a job. It gets whole frames step by step, and may get a step again: the last
//! frame replaces the earlier one. The files are complete at any moment; a failed write (no space, no permission)
//! changes nothing and can be retried. A run that resumes from a checkpoint opens its writers at the step of that
//! checkpoint.
//!
//! Next: `output/picture.rs`, `output/animation.rs`, `output/zarr.rs`, `output/vtk.rs`, `output/terminal.rs`.
use std::path::{Path, PathBuf};

use kernels_simulations::{Field, OutputKind, OutputSpec, Simulation};
use thiserror::Error;

pub(crate) use picture::Painter;
pub(crate) use terminal::render;

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
pub(crate) struct Writer {
    every: u64,
    steps: u64,
    /// The size of every frame.
    size: [usize; 3],
    format: Format,
}

enum Format {
    Png { painter: Painter, folder: PathBuf, quantity: String },
    Gif(animation::Animation),
    Zarr(zarr::Array),
    Vtk(vtk::Series),
}

/// Why something was not written. Existing files are unchanged.
#[derive(Debug, Error)]
pub(crate) enum OutputError {
    /// An error of the operating system.
    #[error("cannot write {}: {why}; {advice}", .path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The reason: the system's text, or a plainer one.
        why: String,
        /// What the user can do.
        advice: &'static str,
    },
    /// A frame that does not belong to this output.
    #[error("{what}")]
    Frame {
        /// What was expected and what was found.
        what: String,
    },
}

/// The existing files of an output in the run's folder `out`, relative to `out`: only those that its [`Writer`]
/// creates.
pub(crate) fn written(out: &Path, folder: &str, kind: OutputKind, quantity: &str) -> Vec<PathBuf> {
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
    /// Prepares the output's folder within `out`. `from` is the step at which the run starts or resumes; output of
    /// later steps, left by an earlier run, is removed.
    ///
    /// # Errors
    /// The folder cannot be created or written.
    pub(crate) fn new(simulation: &Simulation, spec: &OutputSpec, out: &Path, from: u64) -> Result<Self, OutputError> {
        let folder = out.join(&spec.folder);
        files::prepare(&folder)?;
        let (region, stride) = simulation.output_view(spec);
        let size = kernels_grids::any_tile::blocks(region, stride).size();
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

    /// Writes the frame of a step, or replaces it. In an animation this removes the frames of later steps, which are
    /// then written again.
    ///
    /// # Errors
    /// The frame does not belong to this output, or cannot be written; nothing is changed, and the call can be
    /// repeated.
    pub(crate) fn write(&mut self, step: u64, field: &Field) -> Result<(), OutputError> {
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

    /// Writes the index over all frames, if the format has one.
    ///
    /// # Errors
    /// The index cannot be written. The frames are complete.
    pub(crate) fn finish(&mut self) -> Result<(), OutputError> {
        match &self.format {
            Format::Vtk(series) => series.finish(),
            Format::Png { .. } | Format::Gif(_) | Format::Zarr(_) => Ok(()),
        }
    }
}
