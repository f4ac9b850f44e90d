//! Checkpoints on the coordinator's disk: a folder for each step, a file for each tile, and a manifest that is written last.
//!
//! A part streams from its owner into a file beside its place and is hashed on the way, so that a checkpoint takes the same
//! small amount of memory whatever the size of the grid. Only files that this module names are ever removed.
//! Next: `checkpoints/stored.rs`.
use super::run_folder::folder;
use kernels::grid::Region;
use kernels::grid::simulation::Simulation;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

pub use stored::Checkpoint;

mod stored;
#[cfg(test)]
mod tests;

/// Where they are in a run's folder.
pub const FOLDER: &str = "checkpoints";
/// Checkpoints that stay: the last, and the one before.
const KEPT: usize = 2;
/// What a manifest begins with.
const FORMAT: &str = "meshnode checkpoint 1";
/// In a step's folder once all parts are there.
const MANIFEST: &str = "manifest.json";
/// Ending of a tile's part.
const PART: &str = "cells";
/// Ending of a file until it is complete.
pub(super) const PARTIAL: &str = "partial";

/// The checkpoints of a run as they are written.
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    identity: String,
    size: [usize; 3],
    layout: Layout,
    /// Hashes of parts that are on disk, by step and file name.
    parts: BTreeMap<u32, BTreeMap<String, [u8; 32]>>,
    /// Steps of which parts have been written since the last complete one.
    begun: BTreeSet<u32>,
    /// Steps of complete ones that are this run's, in order.
    kept: Vec<u32>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: String,
    step: u32,
    identity: String,
    size: [usize; 3],
    parts: Vec<Part>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Part {
    start: [usize; 3],
    end: [usize; 3],
    file: String,
    blake3: String,
}

/// How the cells of a box lie in a saved state: field after field, then layers, then rows, each from a whole byte on.
#[derive(Clone, Copy, Debug)]
struct Layout {
    fields: usize,
    /// Bits of a field of a cell.
    field_bits: usize,
}

impl Layout {
    fn of(simulation: &Simulation) -> Self {
        let fields = simulation.rule().fields();
        Self { fields, field_bits: simulation.rule().costs().cell_bits as usize / fields }
    }

    /// Bytes of `cells` cells of a row.
    fn row(&self, cells: usize) -> usize {
        (self.field_bits * cells).div_ceil(8)
    }

    fn bytes(&self, region: Region) -> u64 {
        let [width, height, depth] = region.size();
        (self.row(width) * height * depth * self.fields) as u64
    }
}

/// Bytes of a box's cells as they are saved.
pub fn bytes(simulation: &Simulation, region: Region) -> u64 {
    Layout::of(simulation).bytes(region)
}

/// A tile's part on its way to the disk. Dropped before it is complete, it leaves nothing behind.
#[derive(Debug)]
pub struct PartFile {
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
        // Two of one part may come at once, after a loss: each has a file of its own until it is complete.
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(folder).map_err(|e| told(folder, &e))?;
        let name = file_name(region);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let (path, partial) = (folder.join(&name), folder.join(format!("{name}.{number}.{PARTIAL}")));
        let file = crate::folders::create_new(&partial).map_err(|e| told(&partial, &e))?;
        let hasher = blake3::Hasher::new();
        Ok(Self { step, name, path, partial, file, hasher, written: 0, expected, complete: false })
    }

    /// Bytes that the part has in all.
    pub fn expected(&self) -> u64 {
        self.expected
    }

    /// Appends what came.
    ///
    /// # Errors
    /// The disk; more than the part has.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.written += bytes.len() as u64;
        if self.written > self.expected {
            return Err(format!("{} has {} bytes, its owner sends more", self.name, self.expected));
        }
        self.hasher.update(bytes);
        self.file.write_all(bytes).map_err(|e| told(&self.path, &e))
    }

    /// All of it came: it is forced to the disk and takes its place.
    ///
    /// # Errors
    /// The disk; fewer bytes than the part has.
    pub fn complete(mut self) -> Result<WrittenPart, String> {
        if self.written != self.expected {
            return Err(format!("{} has {} bytes, its owner sent {}", self.name, self.expected, self.written));
        }
        let kept = self.file.sync_all().and_then(|()| fs::rename(&self.partial, &self.path));
        kept.map_err(|e| told(&self.path, &e))?;
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

/// A tile's part that is on the disk.
#[derive(Debug)]
pub struct WrittenPart {
    step: u32,
    name: String,
    hash: [u8; 32],
}

impl Checkpoints {
    /// Those in a run's folder, which is made if it is not there.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(out: &Path, simulation: &Simulation) -> Result<Self, String> {
        folder(out)?;
        crate::folders::probe(out).map_err(|e| told(out, &e))?;
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

    /// A file for a tile's part, to be filled without holding this.
    ///
    /// # Errors
    /// The disk.
    pub fn begin(&mut self, step: u32, region: Region) -> Result<PartFile, String> {
        self.begun.insert(step);
        PartFile::create(&step_folder(&self.folder, step), step, region, self.layout.bytes(region))
    }

    /// A part is complete.
    pub fn add(&mut self, part: WrittenPart) {
        self.parts.entry(part.step).or_default().insert(part.name, part.hash);
    }

    /// All parts of a step are there: it is the one to go back to from now on. The one before stays; older ones, incomplete ones
    /// and files of another cut are removed.
    ///
    /// # Errors
    /// A part is missing, or the disk.
    pub fn keep(&mut self, step: u32, regions: &[Region]) -> Result<(), String> {
        let written = self.parts.get(&step).ok_or_else(|| format!("no part of step {step} is on disk"))?;
        let part = |region: &Region| {
            let file = file_name(*region);
            let hash = written.get(&file).ok_or_else(|| format!("{file} of step {step} is missing"))?;
            Ok(Part { start: region.start, end: region.end, blake3: hex(hash), file })
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
        // A run that goes back makes some again.
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

    /// The newest one that is complete, to go on from.
    ///
    /// # Errors
    /// There is none; what is wrong with the last.
    pub fn newest(&mut self, simulation: &Simulation) -> Result<Checkpoint, String> {
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
                "there is no checkpoint in {}: --overwrite begins again; checkpoint_every in the job says how often one is made",
                self.folder.display()
            )
        }))
    }
}

/// The step of the newest complete checkpoint in a run's folder.
pub fn newest_step(out: &Path) -> Option<u32> {
    steps(&out.join(FOLDER)).into_iter().rev().find(|(_, whole)| *whole).map(|(step, _)| step)
}

/// Files of all checkpoints in a run's folder, complete or not, relative to it.
pub fn written(out: &Path) -> Vec<PathBuf> {
    let folder = out.join(FOLDER);
    let of_step = |(step, _): (u32, bool)| {
        let folder = step_folder(&folder, step);
        files(&folder).into_iter().map(|(_, path)| path)
    };
    let all = steps(&folder).into_iter().flat_map(of_step);
    all.filter_map(|path| path.strip_prefix(out).ok().map(Path::to_path_buf)).collect()
}

fn step_folder(folder: &Path, step: u32) -> PathBuf {
    folder.join(format!("step-{step}"))
}

/// Steps of which there is something, in order, and whether there is a manifest.
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

/// The files in a step's folder whose names are given here; others are not ours.
fn files(folder: &Path) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let ours = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        (is_file && is_ours(&name)).then(|| (name, entry.path()))
    };
    entries.filter_map(ours).collect()
}

/// The manifest, a part, or one of them that is not complete: `x0-64_y0-64_z0-1.cells.7.partial`.
fn is_ours(name: &str) -> bool {
    let Some((cells, ending)) = name.split_once('.') else { return false };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = ending.strip_prefix("cells.").and_then(|rest| rest.strip_suffix(".partial"));
    // An earlier version put `.partial` in place of the ending.
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

/// Removes a checkpoint, its manifest first, and its folder where nothing else is in it.
fn remove_step(folder: &Path) {
    let mut files = files(folder);
    files.sort_by_key(|(name, _)| name != MANIFEST);
    files.into_iter().for_each(|(_, path)| drop(fs::remove_file(path)));
    let _ = fs::remove_dir(folder);
}

/// Named after its cells: parts of another cut do not take its place.
fn file_name(Region { start: [x, y, z], end: [right, top, up] }: Region) -> String {
    format!("x{x}-{right}_y{y}-{top}_z{z}-{up}.{PART}")
}

/// Writes a file so that it is there whole or not at all, also after a power cut.
///
/// # Errors
/// The disk; nothing is changed then.
pub fn whole_file(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let partial = path.with_extension(PARTIAL);
    let write = || {
        let mut file = crate::folders::create_new(&partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&partial, path)?;
        // The name is on the disk when its folder is. Some file systems cannot be asked for that.
        if let Some(folder) = path.parent() {
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Ok(())
    };
    write().map_err(|e| {
        let _ = fs::remove_file(&partial);
        told(path, &e)
    })
}

fn told(path: &Path, error: &std::io::Error) -> String {
    let next = if error.kind() == std::io::ErrorKind::StorageFull {
        "; the disk is full: free some space, and it goes on by itself"
    } else {
        ""
    };
    format!("{}: {error}{next}", path.display())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
