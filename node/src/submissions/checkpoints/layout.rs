//! The layout of a checkpoint on disk: its folder, its manifest, its files, and the cells in them.
use kernels_grids::Region;
use kernels_simulations::Simulation;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The folder of checkpoints within a run's folder.
pub(crate) const FOLDER: &str = "checkpoints";
/// Format identifier of a manifest.
pub(super) const FORMAT: &str = "meshnode checkpoint 1";
/// The manifest in a step's folder; present once the checkpoint is complete.
pub(super) const MANIFEST: &str = "manifest.json";
/// Suffix of a tile's part.
pub(super) const PART: &str = "cells";

/// The manifest of a complete checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) format: String,
    pub(super) step: u32,
    pub(super) identity: String,
    pub(super) size: [usize; 3],
    pub(super) parts: Vec<CheckpointPart>,
}

/// A tile's part in the manifest.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CheckpointPart {
    pub(super) start: [usize; 3],
    pub(super) end: [usize; 3],
    pub(super) file: String,
    pub(super) blake3: String,
}

/// Layout of a box of cells in a saved state: by field, then z, then y; each row begins at a whole byte.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) fields: usize,
    /// Bits per field of a cell.
    pub(super) field_bits: usize,
}

impl Layout {
    pub(super) fn of(simulation: &Simulation) -> Self {
        let fields = simulation.rule().fields();
        Self { fields, field_bits: simulation.rule().costs().cell_bits as usize / fields }
    }

    /// Bytes of `cells` cells of a row.
    pub(super) fn row(&self, cells: usize) -> usize {
        (self.field_bits * cells).div_ceil(8)
    }

    pub(super) fn bytes(&self, region: Region) -> u64 {
        let [width, height, depth] = region.size();
        (self.row(width) * height * depth * self.fields) as u64
    }
}

/// The folder of a step's checkpoint.
pub(super) fn step_folder(folder: &Path, step: u32) -> PathBuf {
    folder.join(format!("step-{step}"))
}

/// A part's file is named after its cells, so that parts of different tilings do not collide.
pub(super) fn file_name(Region { start: [x, y, z], end: [right, top, up] }: Region) -> String {
    format!("x{x}-{right}_y{y}-{top}_z{z}-{up}.{PART}")
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
