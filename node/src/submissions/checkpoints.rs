//! Checkpoints on the coordinator's disk: a folder per step, a file per tile, and a manifest that is written last.
//!
//! A tile's part streams from its owner into a temporary file and is hashed on the way, so that a checkpoint takes the
//! same small amount of memory for any grid size. Only files that this module names are ever removed.
//!
//! Next: `checkpoints/layout.rs`, `checkpoints/stored.rs`.
use super::files::{PARTIAL, folder, io_error, whole_file};
use kernels_grids::Region;
use kernels_simulations::Simulation;
use layout::{CheckpointPart, FOLDER, FORMAT, Layout, MANIFEST, Manifest, PART, file_name, hex, step_folder};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use stored::Checkpoint;

pub(crate) mod layout;
pub(crate) mod stored;
#[cfg(test)]
mod tests;

/// Complete checkpoints retained: the last, and the one before.
const KEPT: usize = 2;

/// The checkpoints of a run in progress.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    folder: PathBuf,
    identity: String,
    size: [usize; 3],
    layout: Layout,
    /// Hashes of the parts on disk, by step and file name.
    parts: BTreeMap<u32, BTreeMap<String, [u8; 32]>>,
    /// Steps newer than the last complete checkpoint, of which parts were begun.
    begun: BTreeSet<u32>,
    /// Steps of this run's retained checkpoints, ascending.
    kept: Vec<u32>,
}

/// Bytes of a box of cells in a saved state.
pub(crate) fn bytes(simulation: &Simulation, region: Region) -> u64 {
    Layout::of(simulation).bytes(region)
}

/// A tile's part while it is written. Dropping it before `complete` removes the file.
#[derive(Debug)]
pub(crate) struct PartFile {
    step: u32,
    name: String,
    path: PathBuf,
    partial: PathBuf,
    file: File,
    hasher: blake3::Hasher,
    written: u64,
    expected: u64,
    complete: bool,
}

impl PartFile {
    fn create(folder: &Path, step: u32, region: Region, expected: u64) -> Result<Self, String> {
        // After a loss, a part may arrive twice at the same time: each copy has its own file until it is complete.
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(folder).map_err(|e| io_error(folder, &e))?;
        let name = file_name(region);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let (path, partial) = (folder.join(&name), folder.join(format!("{name}.{number}.{PARTIAL}")));
        let file = crate::folders::create_new(&partial).map_err(|e| io_error(&partial, &e))?;
        let hasher = blake3::Hasher::new();
        Ok(Self { step, name, path, partial, file, hasher, written: 0, expected, complete: false })
    }

    /// Total bytes of the part.
    #[cfg(test)]
    fn expected(&self) -> u64 {
        self.expected
    }

    /// Appends received bytes.
    ///
    /// # Errors
    /// A disk error, or more bytes than the part has.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.written += bytes.len() as u64;
        if self.written > self.expected {
            return Err(format!("{} has {} bytes, but its owner sends more", self.name, self.expected));
        }
        self.hasher.update(bytes);
        self.file.write_all(bytes).map_err(|e| io_error(&self.path, &e))
    }

    /// Syncs the complete part to disk and renames it to its final name.
    ///
    /// # Errors
    /// A disk error, or fewer bytes than the part has.
    pub(crate) fn complete(mut self) -> Result<WrittenPart, String> {
        if self.written != self.expected {
            return Err(format!("{} has {} bytes, but its owner sent {}", self.name, self.expected, self.written));
        }
        let kept = self.file.sync_all().and_then(|()| fs::rename(&self.partial, &self.path));
        kept.map_err(|e| io_error(&self.path, &e))?;
        self.complete = true;
        Ok(WrittenPart { step: self.step, name: self.name.clone(), hash: *self.hasher.finalize().as_bytes() })
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        if !self.complete {
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// A tile's part on disk.
#[derive(Debug)]
pub(crate) struct WrittenPart {
    step: u32,
    name: String,
    hash: [u8; 32],
}

impl Checkpoints {
    /// The checkpoints in a run's folder, which is created if needed.
    ///
    /// # Errors
    /// It cannot be created or written.
    pub(crate) fn open(out: &Path, simulation: &Simulation) -> Result<Self, String> {
        folder(out)?;
        crate::folders::probe(out).map_err(|e| io_error(out, &e))?;
        Ok(Self {
            folder: out.join(FOLDER),
            identity: hex(&simulation.identity()),
            size: simulation.grid().size(),
            layout: Layout::of(simulation),
            parts: BTreeMap::new(),
            begun: BTreeSet::new(),
            kept: Vec::new(),
        })
    }

    /// Creates the file of a tile's part, which is filled without borrowing this.
    ///
    /// # Errors
    /// A disk error.
    pub(crate) fn begin(&mut self, step: u32, region: Region) -> Result<PartFile, String> {
        self.begun.insert(step);
        PartFile::create(&step_folder(&self.folder, step), step, region, self.layout.bytes(region))
    }

    /// Records a complete part.
    pub(crate) fn add(&mut self, part: WrittenPart) {
        self.parts.entry(part.step).or_default().insert(part.name, part.hash);
    }

    /// Completes the checkpoint of a step, to which the run rolls back from now on. The previous checkpoint is
    /// retained; older and incomplete ones, and files of another tiling, are removed.
    ///
    /// # Errors
    /// A part is missing, or a disk error.
    pub(crate) fn complete(&mut self, step: u32, regions: &[Region]) -> Result<(), String> {
        let written = self.parts.get(&step).ok_or_else(|| format!("no part of step {step} is on disk"))?;
        let part = |region: &Region| {
            let file = file_name(*region);
            let hash = written.get(&file).ok_or_else(|| format!("{file} of step {step} is missing"))?;
            Ok(CheckpointPart { start: region.start, end: region.end, blake3: hex(hash), file })
        };
        let parts = regions.iter().map(part).collect::<Result<Vec<_>, String>>()?;
        let named: BTreeSet<String> = parts.iter().map(|part| part.file.clone()).collect();
        let manifest =
            Manifest { format: FORMAT.into(), step, identity: self.identity.clone(), size: self.size, parts };
        let text = serde_json::to_vec_pretty(&manifest).map_err(|e| e.to_string())?;
        let folder = step_folder(&self.folder, step);
        whole_file(&folder.join(MANIFEST), &text)?;
        for (name, path) in files(&folder) {
            if name != MANIFEST && !named.contains(&name) {
                let _ = fs::remove_file(path);
            }
        }
        self.parts.retain(|of, _| *of > step);
        self.begun.retain(|of| *of > step);
        // After a rollback, later checkpoints are written again.
        self.kept.retain(|kept| *kept < step);
        self.kept.push(step);
        self.kept.drain(..self.kept.len().saturating_sub(KEPT));
        for (old, _) in steps(&self.folder) {
            if !self.kept.contains(&old) && !self.begun.contains(&old) {
                remove_step(&step_folder(&self.folder, old));
            }
        }
        Ok(())
    }

    /// The newest complete checkpoint that is intact, to resume from.
    ///
    /// # Errors
    /// There is none; or what is wrong with the newest.
    pub(crate) fn newest(&mut self, simulation: &Simulation) -> Result<Checkpoint, String> {
        let mut wrong = None;
        for (step, _) in steps(&self.folder).into_iter().rev().filter(|(_, whole)| *whole) {
            let out = self.folder.parent().unwrap_or(Path::new("."));
            match Checkpoint::open(out, step, simulation)
                .and_then(|checkpoint| checkpoint.verify().map(|()| checkpoint))
            {
                Ok(checkpoint) => {
                    self.kept = vec![step];
                    return Ok(checkpoint);
                }
                Err(what) => {
                    tracing::warn!("{what}");
                    wrong = wrong.or(Some(what));
                }
            }
        }
        Err(wrong.unwrap_or_else(|| {
            format!(
                "there is no checkpoint in {}: start over with --overwrite; checkpoint_every in the job sets how often one is saved",
                self.folder.display()
            )
        }))
    }
}

/// The step of the newest complete checkpoint in a run's folder.
pub(crate) fn newest_step(out: &Path) -> Option<u32> {
    steps(&out.join(FOLDER)).into_iter().rev().find(|(_, whole)| *whole).map(|(step, _)| step)
}

/// Files of all checkpoints in a run's folder, complete or not, relative to that folder.
pub(crate) fn written(out: &Path) -> Vec<PathBuf> {
    let folder = out.join(FOLDER);
    let of_step = |(step, _): (u32, bool)| {
        let folder = step_folder(&folder, step);
        files(&folder).into_iter().map(|(_, path)| path)
    };
    let all = steps(&folder).into_iter().flat_map(of_step);
    all.filter_map(|path| path.strip_prefix(out).ok().map(Path::to_path_buf)).collect()
}

/// Steps with a folder, ascending, and whether each has a manifest.
fn steps(folder: &Path) -> Vec<(u32, bool)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let step = |entry: fs::DirEntry| {
        let step = entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()?;
        Some((step, entry.path().join(MANIFEST).is_file()))
    };
    let mut steps: Vec<(u32, bool)> = entries.filter_map(step).collect();
    steps.sort_unstable();
    steps
}

/// The files in a step's folder that have names of this module.
fn files(folder: &Path) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let ours = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        (is_file && is_ours(&name)).then(|| (name, entry.path()))
    };
    entries.filter_map(ours).collect()
}

/// Whether a name is that of a manifest, a part, or an incomplete one of either: `x0-64_y0-64_z0-1.cells.7.partial`.
fn is_ours(name: &str) -> bool {
    let Some((cells, ending)) = name.split_once('.') else { return false };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = ending.strip_prefix("cells.").and_then(|rest| rest.strip_suffix(".partial"));
    // An earlier version replaced the suffix by `.partial`.
    if !matches!(ending, PART | PARTIAL) && !number.is_some_and(digits) {
        return name == MANIFEST;
    }
    let range = |(text, axis): (&str, char)| {
        let range = text.strip_prefix(axis).and_then(|text| text.split_once('-'));
        range.is_some_and(|(from, to)| digits(from) && digits(to))
    };
    let axes: Vec<&str> = cells.split('_').collect();
    cells == "manifest" || axes.len() == 3 && axes.into_iter().zip(['x', 'y', 'z']).all(range)
}

/// Removes a checkpoint, manifest first, and its folder if that is then empty.
fn remove_step(folder: &Path) {
    let mut files = files(folder);
    files.sort_by_key(|(name, _)| name != MANIFEST);
    files.into_iter().for_each(|(_, path)| drop(fs::remove_file(path)));
    let _ = fs::remove_dir(folder);
}
