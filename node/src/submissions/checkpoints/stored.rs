//! Reads a complete checkpoint: verifies it, and returns its cells in blocks, never as a whole.
use super::layout::{CheckpointPart, FOLDER, FORMAT, Layout, MANIFEST, Manifest, file_name, hex, step_folder};
use crate::regions::common;
use crate::submissions::files::io_error;
use bytes::Bytes;
use kernels_grids::Region;
use kernels_simulations::Simulation;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Largest manifest: one entry for each of 256 tiles.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;
/// Bytes read at a time, unless a row is longer: each of many owners that read at the same time takes a few of these.
const BLOCK_BYTES: usize = 256 << 10;

/// A complete checkpoint.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    /// The step after which it was saved.
    pub step: u32,
    folder: PathBuf,
    parts: Vec<(Region, CheckpointPart)>,
    layout: Layout,
}

impl Checkpoint {
    /// Reads the manifest.
    ///
    /// # Errors
    /// It is missing, belongs to another simulation, or does not cover the grid.
    pub(crate) fn open(out: &Path, step: u32, simulation: &Simulation) -> Result<Self, String> {
        let folder = step_folder(&out.join(FOLDER), step);
        let path = folder.join(MANIFEST);
        let mut text = String::new();
        let file = File::open(&path).map_err(|e| io_error(&path, &e))?;
        file.take(MANIFEST_BYTES_MAX).read_to_string(&mut text).map_err(|e| io_error(&path, &e))?;
        let manifest: Manifest = serde_json::from_str(&text)
            .map_err(|e| format!("{} is not a manifest of a checkpoint: {e}", path.display()))?;
        if manifest.format != FORMAT || manifest.step != step {
            return Err(format!("{} has format {:?}, expected {FORMAT:?}", path.display(), manifest.format));
        }
        let size = simulation.grid().size();
        if manifest.identity != hex(&simulation.identity()) || manifest.size != size {
            return Err(format!(
                "{} belongs to another simulation: grid, rule, parameters, masks and initial state must be equal; start over with --overwrite",
                path.display()
            ));
        }
        let parts: Vec<(Region, CheckpointPart)> =
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
        Ok(Self { step, folder, parts, layout: Layout::of(simulation) })
    }

    /// Checks all parts against their hashes.
    ///
    /// # Errors
    /// A file is missing, truncated or changed.
    pub(crate) fn verify(&self) -> Result<(), String> {
        for (region, part) in &self.parts {
            let mut file = self.part(*region, part)?;
            let path = self.folder.join(&part.file);
            let mut hasher = blake3::Hasher::new();
            let mut buffer = vec![0; BLOCK_BYTES];
            loop {
                match file.read(&mut buffer).map_err(|e| io_error(&path, &e))? {
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

    /// Opens the file of a part and checks its size.
    fn part(&self, region: Region, part: &CheckpointPart) -> Result<File, String> {
        let path = self.folder.join(&part.file);
        let file = File::open(&path).map_err(|e| io_error(&path, &e))?;
        let (expected, found) = (self.layout.bytes(region), file.metadata().map_err(|e| io_error(&path, &e))?.len());
        if expected != found {
            return Err(format!("{} has {found} bytes, expected {expected}", path.display()));
        }
        Ok(file)
    }

    /// Reads the cells of a box, in the layout of a saved state, block by block until `each` returns false.
    ///
    /// # Errors
    /// A disk error, or a box outside the grid.
    pub(crate) fn read(&self, region: Region, mut each: impl FnMut(Bytes) -> bool) -> Result<(), String> {
        let shared: Vec<(Region, Region, &CheckpointPart)> =
            self.parts.iter().filter_map(|(owned, part)| Some((*owned, common(owned, &region)?, part))).collect();
        if region.cells() == 0
            || shared.iter().map(|(_, both, _)| both.cells()).sum::<usize>() != region.cells()
            || !(self.layout.field_bits * region.start[0]).is_multiple_of(8)
        {
            return Err(format!("{region:?} is not in the checkpoint's grid"));
        }
        let open = |(owned, both, part): (Region, Region, &CheckpointPart)| {
            Ok(Source {
                layout: self.layout,
                owned,
                both,
                file: self.part(owned, part)?,
                path: self.folder.join(&part.file),
            })
        };
        let sources = shared.into_iter().map(open).collect::<Result<Vec<_>, String>>()?;
        let row = self.layout.row(region.size()[0]);
        let rows = (BLOCK_BYTES / row.max(1)).max(1);
        let mut block = Vec::with_capacity(BLOCK_BYTES.max(row));
        for field in 0..self.layout.fields {
            for z in region.start[2]..region.end[2] {
                for y in (region.start[1]..region.end[1]).step_by(rows) {
                    let end = (y + rows).min(region.end[1]);
                    let bytes = row * (end - y);
                    if block.len() + bytes > BLOCK_BYTES && !block.is_empty() {
                        let full = std::mem::replace(&mut block, Vec::with_capacity(BLOCK_BYTES.max(row)));
                        if !each(full.into()) {
                            return Ok(());
                        }
                    }
                    let from = block.len();
                    block.resize(from + bytes, 0);
                    for source in &sources {
                        source.read(&region, (field, z), (y, end), &mut block[from..])?;
                    }
                }
            }
        }
        if !block.is_empty() {
            each(block.into());
        }
        Ok(())
    }
}

/// A part's file, and the requested cells in it.
struct Source {
    layout: Layout,
    owned: Region,
    both: Region,
    file: File,
    path: PathBuf,
}

impl Source {
    /// Copies its share of some rows of a region into `rows`.
    fn read(
        &self,
        region: &Region,
        (field, z): (usize, usize),
        (from, to): (usize, usize),
        rows: &mut [u8],
    ) -> Result<(), String> {
        let both = &self.both;
        let (first, last) = (from.max(both.start[1]), to.min(both.end[1]));
        if !(both.start[2]..both.end[2]).contains(&z) || first >= last {
            return Ok(());
        }
        let [width, height, depth] = self.owned.size();
        let (own, requested) = (self.layout.row(width), self.layout.row(region.size()[0]));
        let count = self.layout.row(both.size()[0]);
        let skipped = self.layout.row(both.start[0] - self.owned.start[0]);
        let place = |y: usize| {
            let row = (field * depth + z - self.owned.start[2]) * height + y - self.owned.start[1];
            (row as u64) * own as u64 + skipped as u64
        };
        let io_error = |e: std::io::Error| io_error(&self.path, &e);
        if count == own && count == requested {
            // Both sides have whole rows, which are contiguous.
            let into = &mut rows[(first - from) * requested..(last - from) * requested];
            return self.file.read_exact_at(into, place(first)).map_err(io_error);
        }
        let shift = self.layout.row(both.start[0] - region.start[0]);
        for y in first..last {
            let at = (y - from) * requested + shift;
            self.file.read_exact_at(&mut rows[at..at + count], place(y)).map_err(io_error)?;
        }
        Ok(())
    }
}
