//! Writes all cells of all frames as one array, time first: Zarr version 3, with a chunk grid independent of the
//! tiling.
//!
//! The folder is a group of two arrays, the quantity and `time` (steps). Shapes are fixed before the first step; chunks
//! that are not written yet read as NaN (as 0 for Life). Floats are stored uncompressed (their low digits are noise),
//! the cells of Life as bytes with gzip, which shrinks them to a fiftieth.
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use kernels_grids::rule::Rule;
use kernels_simulations::{Field, OutputSpec, Simulation};
use serde_json::{Value, json};

use super::OutputError;
use super::files::{failed, replace};

/// Name of the array of steps; a quantity of this name takes precedence.
const TIME: &str = "time";
/// The metadata file of an array or a group.
const DESCRIPTION: &str = "zarr.json";
/// Time, z, y and x.
const AXES_MAX: usize = 4;
/// Cells per chunk along each axis: a chunk of floats is 1 MiB.
const CHUNK_2D: usize = 512;
const CHUNK_3D: usize = 64;

pub(super) struct Array {
    folder: PathBuf,
    every: u64,
    /// Cells along x, y and z.
    size: [usize; 3],
    chunk: [usize; 3],
    /// Whether z is an axis.
    three: bool,
    bytes: bool,
}

impl Array {
    pub(super) fn open(
        simulation: &Simulation,
        spec: &OutputSpec,
        out: PathBuf,
        from: u64,
    ) -> Result<Self, OutputError> {
        let grid = simulation.grid();
        let three = grid.dimensions() == 3;
        let longest = if three { CHUNK_3D } else { CHUNK_2D };
        let size = grid.size();
        let folder = out.join(&spec.quantity);
        let bytes = matches!(simulation.rule(), Rule::Life(_));
        let array = Self { folder, every: spec.every, size, chunk: size.map(|size| size.min(longest)), three, bytes };
        let frames = simulation.steps() / spec.every + 1;

        let group = json!({
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {
                "simulation": simulation.name(), "rule": simulation.rule().name(), "quantity": spec.quantity,
                "steps": simulation.steps(), "every": spec.every,
            },
        });
        write_json(&out, &group)?;
        if spec.quantity != TIME {
            array.write_times(&out.join(TIME), frames)?;
        }
        array.remove_after(from / spec.every)?;
        let axis = |name: &str| Value::from(name);
        let (mut shape, mut chunk, mut names) = (vec![frames], vec![1], vec![axis("time")]);
        for at in if three { vec![2, 1, 0] } else { vec![1, 0] } {
            shape.push(size[at] as u64);
            chunk.push(array.chunk[at] as u64);
            names.push(axis(["x", "y", "z"][at]));
        }
        let little = json!({ "name": "bytes", "configuration": { "endian": "little" } });
        let (kind, fill, codecs) = if bytes {
            let gzip = json!({ "name": "gzip", "configuration": { "level": 1 } });
            ("uint8", json!(0), json!([{ "name": "bytes" }, gzip]))
        } else {
            ("float32", json!("NaN"), json!([little]))
        };
        let about = json!({
            "long_name": spec.quantity, "units": units(simulation, &spec.quantity), "step_of_first_frame": 0,
            "steps_between_frames": spec.every, "_ARRAY_DIMENSIONS": names,
        });
        write_json(
            &array.folder,
            &metadata(&json!(shape), &json!(chunk), kind, &fill, &codecs, &json!(names), &about),
        )?;
        Ok(array)
    }

    pub(super) fn write(&self, step: u64, field: &Field) -> Result<(), OutputError> {
        let frame = self.folder.join("c").join((step / self.every).to_string());
        let counts: [usize; 3] = std::array::from_fn(|axis| self.size[axis].div_ceil(self.chunk[axis]));
        for z in 0..counts[2] {
            for y in 0..counts[1] {
                let row = if self.three { frame.join(z.to_string()) } else { frame.clone() }.join(y.to_string());
                fs::create_dir_all(&row).map_err(|error| failed(&row, &error))?;
                for x in 0..counts[0] {
                    replace(&row.join(x.to_string()), &[&self.encoded(field, [x, y, z])])?;
                }
            }
        }
        Ok(())
    }

    /// The bytes of a chunk; chunks at the far edges are padded to full size.
    fn encoded(&self, field: &Field, at: [usize; 3]) -> Vec<u8> {
        let start: [usize; 3] = std::array::from_fn(|axis| at[axis] * self.chunk[axis]);
        let inside: [usize; 3] = std::array::from_fn(|axis| self.chunk[axis].min(self.size[axis] - start[axis]));
        let mut values = vec![if self.bytes { 0.0 } else { f32::NAN }; self.chunk.iter().product()];
        for z in 0..inside[2] {
            for y in 0..inside[1] {
                let from = ((start[2] + z) * self.size[1] + start[1] + y) * self.size[0] + start[0];
                let to = (z * self.chunk[1] + y) * self.chunk[0];
                values[to..to + inside[0]].copy_from_slice(&field.values[from..from + inside[0]]);
            }
        }
        if self.bytes {
            let cells: Vec<u8> = values.iter().map(|value| *value as u8).collect();
            return gzip(&cells);
        }
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn write_times(&self, folder: &Path, frames: u64) -> Result<(), OutputError> {
        let codecs = json!([{ "name": "bytes", "configuration": { "endian": "little" } }]);
        let (shape, names) = (json!([frames]), json!(["time"]));
        let about = json!({ "long_name": "steps completed", "units": "steps", "_ARRAY_DIMENSIONS": names });
        write_json(folder, &metadata(&shape, &shape, "int64", &json!(0), &codecs, &names, &about))?;
        let times: Vec<u8> = (0..frames).flat_map(|frame| (frame * self.every).to_le_bytes()).collect();
        let chunks = folder.join("c");
        fs::create_dir_all(&chunks).map_err(|error| failed(&chunks, &error))?;
        replace(&chunks.join("0"), &[&times])
    }

    /// Removes frames after `last`, left by an earlier run.
    fn remove_after(&self, last: u64) -> Result<(), OutputError> {
        let chunks = self.folder.join("c");
        fs::create_dir_all(&chunks).map_err(|error| failed(&chunks, &error))?;
        for (frame, path) in numbers(&chunks) {
            if frame > last {
                for chunk in chunk_files(&path) {
                    fs::remove_file(&chunk).map_err(|error| failed(&chunk, &error))?;
                    // Remove folders that become empty.
                    for folder in chunk.ancestors().skip(1).take_while(|folder| **folder != chunks) {
                        if fs::remove_dir(folder).is_err() {
                            break;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Files of an array and of its steps in the output's folder: metadata and numbered chunks.
pub(super) fn files(out: &Path, quantity: &str) -> Vec<PathBuf> {
    let mut found = vec![out.join(DESCRIPTION)];
    let arrays: &[&str] = if quantity == TIME { &[TIME] } else { &[quantity, TIME] };
    for array in arrays {
        found.push(out.join(array).join(DESCRIPTION));
        found.extend(chunk_files(&out.join(array).join("c")));
    }
    found
}

/// Entries of a folder whose names are numbers, with these numbers.
fn numbers(folder: &Path) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let number = |entry: fs::DirEntry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path()));
    entries.filter_map(number).collect()
}

/// Files under a folder on numeric paths, at most [`AXES_MAX`] levels deep.
fn chunk_files(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut level) = (Vec::new(), vec![folder.to_path_buf()]);
    for _ in 0..AXES_MAX {
        let below = level.iter().flat_map(|folder| numbers(folder)).map(|(_, path)| path);
        let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) = below.partition(|path| path.is_dir());
        found.extend(files);
        level = folders;
    }
    found
}

/// The unit of a quantity: lattice units for fluids, dimensionless for other rules, whose units are unknown.
fn units(simulation: &Simulation, quantity: &str) -> &'static str {
    match simulation.rule() {
        Rule::D2q9(_) | Rule::D3q19(_) => match quantity {
            "vorticity" => "1/step",
            "density" => "density of the fluid at rest",
            _ => "cells/step",
        },
        Rule::Life(_) | Rule::Heat(_) | Rule::Wave(_) | Rule::GrayScott(_) | Rule::Text(_) => "1",
    }
}

fn metadata(
    shape: &Value,
    chunk: &Value,
    kind: &str,
    fill: &Value,
    codecs: &Value,
    names: &Value,
    about: &Value,
) -> Value {
    json!({
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": kind,
        "chunk_grid": { "name": "regular", "configuration": { "chunk_shape": chunk } },
        "chunk_key_encoding": { "name": "default", "configuration": { "separator": "/" } },
        "fill_value": fill,
        "codecs": codecs,
        "dimension_names": names,
        "attributes": about,
    })
}

fn write_json(folder: &Path, value: &Value) -> Result<(), OutputError> {
    fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    replace(&folder.join(DESCRIPTION), &[format!("{value:#}\n").as_bytes()])
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let written = encoder.write_all(bytes).and_then(|()| encoder.finish());
    written.expect("writing to memory")
}
