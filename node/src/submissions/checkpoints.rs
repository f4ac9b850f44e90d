//! Checkpoints on the submitter's disk: a folder for each step, a file for each tile, and a manifest that is written last.
use super::{Parts, folder};
use crate::tiles::common;
use kernels::grid::Region;
use kernels::grid::simulation::Simulation;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Checkpoints that stay: the last, and the one before.
const KEPT: usize = 2;
/// What a manifest begins with.
const FORMAT: &str = "meshnode checkpoint 1";
/// Largest manifest: one entry for each of 256 tiles.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// The checkpoints of a run as they are written.
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    identity: String,
    size: [usize; 3],
    /// Hashes of parts that are on disk, by step.
    parts: BTreeMap<u32, Parts>,
    /// Steps of whole ones that are this run's, in order.
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

impl Checkpoints {
    /// Those in a run's folder, which is made if it is not there.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn open(out: &Path, simulation: &Simulation) -> Result<Self, String> {
        folder(out)?;
        let probe = out.join(".meshnode-can-write");
        File::create(&probe).map_err(|e| told(&probe, &e))?;
        let _ = fs::remove_file(&probe);
        let identity = hex(&simulation.identity());
        let size = simulation.grid().size();
        Ok(Self { folder: out.join("checkpoints"), identity, size, parts: BTreeMap::new(), kept: Vec::new() })
    }

    /// Writes a tile's part.
    ///
    /// # Errors
    /// The disk; nothing of the part is left then.
    pub fn part(&mut self, step: u32, region: Region, bytes: &[u8]) -> Result<(), String> {
        let folder = self.step_folder(step);
        fs::create_dir_all(&folder).map_err(|e| told(&folder, &e))?;
        let name = file_name(region);
        whole_file(&folder.join(&name), bytes)?;
        self.parts.entry(step).or_default().insert(name, *blake3::hash(bytes).as_bytes());
        Ok(())
    }

    /// All parts of a step are there: it is the one to go back to from now on. Others go, but for the one before: older ones,
    /// those that were never whole, and those of an earlier run in this folder.
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
        let parts = regions.iter().map(part).collect::<Result<_, String>>()?;
        let manifest =
            Manifest { format: FORMAT.into(), step, identity: self.identity.clone(), size: self.size, parts };
        let text = serde_json::to_vec_pretty(&manifest).map_err(|e| e.to_string())?;
        whole_file(&self.step_folder(step).join("manifest.json"), &text)?;
        self.parts.retain(|of, _| *of > step);
        // A run that goes back makes some again.
        self.kept.retain(|kept| *kept < step);
        self.kept.push(step);
        self.kept.drain(..self.kept.len().saturating_sub(KEPT));
        for (old, _) in steps(&self.folder) {
            if !self.kept.contains(&old) && !self.parts.contains_key(&old) {
                let _ = fs::remove_dir_all(self.step_folder(old));
            }
        }
        Ok(())
    }

    /// The newest one that is whole, to go on from.
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
                "there is no checkpoint in {}: run without --resume; checkpoint_every in the job says how often one is made",
                self.folder.display()
            )
        }))
    }

    fn step_folder(&self, step: u32) -> PathBuf {
        self.folder.join(format!("step-{step}"))
    }
}

/// Steps of which there is something, in order, and whether there is a manifest.
fn steps(folder: &Path) -> Vec<(u32, bool)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let step = |entry: fs::DirEntry| {
        let step = entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()?;
        Some((step, entry.path().join("manifest.json").is_file()))
    };
    let mut steps: Vec<(u32, bool)> = entries.filter_map(step).collect();
    steps.sort_unstable();
    steps
}

/// A checkpoint that is whole.
#[derive(Debug)]
pub struct Checkpoint {
    /// Steps made by then.
    pub step: u32,
    folder: PathBuf,
    parts: Vec<(Region, Part)>,
    fields: usize,
    /// Bits of a field of a cell.
    field_bits: usize,
}

impl Checkpoint {
    /// Reads its manifest.
    ///
    /// # Errors
    /// It is not there, of another simulation, or does not cover the grid.
    pub fn open(out: &Path, step: u32, simulation: &Simulation) -> Result<Self, String> {
        let folder = out.join("checkpoints").join(format!("step-{step}"));
        let path = folder.join("manifest.json");
        let mut text = String::new();
        let file = File::open(&path).map_err(|e| told(&path, &e))?;
        file.take(MANIFEST_BYTES_MAX).read_to_string(&mut text).map_err(|e| told(&path, &e))?;
        let manifest: Manifest = serde_json::from_str(&text)
            .map_err(|e| format!("{} is no manifest of a checkpoint: {e}", path.display()))?;
        if manifest.format != FORMAT || manifest.step != step {
            return Err(format!("{} is of format {:?}, expected {FORMAT:?}", path.display(), manifest.format));
        }
        let size = simulation.grid().size();
        if manifest.identity != hex(&simulation.identity()) || manifest.size != size {
            return Err(format!(
                "{} is of another simulation: grid, rule, parameters, masks and the initial state must be the same; run without --resume to begin anew",
                path.display()
            ));
        }
        let parts: Vec<(Region, Part)> =
            manifest.parts.into_iter().map(|part| (Region { start: part.start, end: part.end }, part)).collect();
        let blocks: Vec<partitioner::tiles::Block> = parts
            .iter()
            .map(|(region, _)| partitioner::tiles::Block {
                from: region.start.map(|at| at as u64),
                to: region.end.map(|at| at as u64),
            })
            .collect();
        let named = parts.iter().all(|(region, part)| part.file == file_name(*region));
        if !named || !partitioner::tiles::covers(size.map(|cells| cells as u64), &blocks) {
            return Err(format!("{} does not cover the grid", path.display()));
        }
        let fields = simulation.rule().fields();
        let field_bits = simulation.rule().costs().cell_bits as usize / fields;
        Ok(Self { step, folder, parts, fields, field_bits })
    }

    /// Whether all its bytes are what they were.
    ///
    /// # Errors
    /// A file that is missing, cut short or changed.
    pub fn verify(&self) -> Result<(), String> {
        for (region, part) in &self.parts {
            let path = self.folder.join(&part.file);
            let file = File::open(&path).map_err(|e| told(&path, &e))?;
            let (expected, found) = (self.bytes(*region), file.metadata().map_err(|e| told(&path, &e))?.len());
            if expected != found {
                return Err(format!("{} has {found} bytes, expected {expected}: it is cut short", path.display()));
            }
            let mut hasher = blake3::Hasher::new();
            let mut reader = file;
            let mut buffer = vec![0; 1 << 20];
            loop {
                match reader.read(&mut buffer).map_err(|e| told(&path, &e))? {
                    0 => break,
                    count => hasher.update(&buffer[..count]),
                };
            }
            if hex(hasher.finalize().as_bytes()) != part.blake3 {
                return Err(format!("{} has changed since it was written", path.display()));
            }
        }
        Ok(())
    }

    fn row(&self, cells: usize) -> usize {
        (self.field_bits * cells).div_ceil(8)
    }

    fn bytes(&self, region: Region) -> u64 {
        let [width, height, depth] = region.size();
        (self.row(width) * height * depth * self.fields) as u64
    }

    /// The state of a box of cells, as a tile takes it.
    ///
    /// # Errors
    /// The disk; a box that is not in the grid.
    pub fn cells(&self, region: Region) -> Result<Vec<u8>, String> {
        let inside = self.parts.iter().filter_map(|(owned, _)| common(owned, &region)).map(|part| part.cells());
        if region.cells() == 0
            || inside.sum::<usize>() != region.cells()
            || !(self.field_bits * region.start[0]).is_multiple_of(8)
        {
            return Err(format!("{region:?} is not in the checkpoint's grid"));
        }
        let mut cells = vec![0; self.bytes(region) as usize];
        for (owned, part) in &self.parts {
            let Some(both) = common(owned, &region) else { continue };
            let path = self.folder.join(&part.file);
            let bytes = fs::read(&path).map_err(|e| told(&path, &e))?;
            if bytes.len() as u64 != self.bytes(*owned) {
                return Err(format!("{} has {} bytes, expected {}", path.display(), bytes.len(), self.bytes(*owned)));
            }
            let place = |within: &Region, field: usize, y: usize, z: usize| {
                let [width, height, depth] = within.size();
                let row = (field * depth + z - within.start[2]) * height + y - within.start[1];
                row * self.row(width) + self.row(both.start[0] - within.start[0])
            };
            let count = self.row(both.size()[0]);
            for field in 0..self.fields {
                for z in both.start[2]..both.end[2] {
                    for y in both.start[1]..both.end[1] {
                        let (from, to) = (place(owned, field, y, z), place(&region, field, y, z));
                        cells[to..to + count].copy_from_slice(&bytes[from..from + count]);
                    }
                }
            }
        }
        Ok(cells)
    }
}

/// Named after its cells: parts of another cut do not take its place.
fn file_name(Region { start: [x, y, z], end: [right, top, up] }: Region) -> String {
    format!("x{x}-{right}_y{y}-{top}_z{z}-{up}.cells")
}

/// Writes a file so that it is there whole or not at all.
pub fn whole_file(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let partial = path.with_extension("partial");
    let write = || {
        let mut file = File::create(&partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&partial, path)
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
