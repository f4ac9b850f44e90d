//! Which files a path means: one file, the parts of a split GGUF file, or the weights in a model folder.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::error::WeightsError;
use super::safetensors::read_beside;

/// Weights of a model folder, in one file.
pub const FOLDER_WEIGHTS: &str = "model.safetensors";
/// Index of a model folder's weights in several files: which file has which tensor.
pub const FOLDER_INDEX: &str = "model.safetensors.index.json";
/// Maximum number of parts of a model; the largest published ones have about 200.
pub const PARTS_MAX: usize = 4096;

/// The files of a model.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Files {
    /// One file of any format.
    One(PathBuf),
    /// All parts of a split GGUF file, in order.
    Gguf(Vec<PathBuf>),
    /// Safetensors files in the order of their names, and what the index says of them.
    Folder {
        /// The index.
        index: PathBuf,
        parts: Vec<PathBuf>,
        /// File name of each tensor.
        tensors: BTreeMap<String, String>,
    },
}

impl Files {
    /// Resolves a path: of a file, of any part of a model, or of a model folder.
    ///
    /// # Errors
    /// A folder without weights, or an index that cannot be read.
    pub(super) fn of(path: &Path) -> Result<Self, WeightsError> {
        let metadata = std::fs::metadata(path).map_err(|source| WeightsError::Io { path: path.to_owned(), source })?;
        if metadata.is_dir() {
            return match weights_in(path) {
                Some(inner) => Self::of(&inner),
                None => Err(WeightsError::Unsupported(format!(
                    "{} is a folder without {FOLDER_WEIGHTS} or {FOLDER_INDEX}: expected one of them beside config.json and \
                     tokenizer.json, or the path of a .gguf file",
                    path.display()
                ))),
            };
        }
        if path.ends_with(FOLDER_INDEX) {
            return read_index(path);
        }
        if let Some(numbered) = Numbered::of(path) {
            let index = path.with_file_name(FOLDER_INDEX);
            if numbered.extension == "safetensors" && index.is_file() {
                return read_index(&index);
            }
            if numbered.extension == "gguf" && numbered.count > 1 {
                return Ok(Self::Gguf(numbered.paths(path)));
            }
        }
        Ok(Self::One(path.to_owned()))
    }
}

/// The file that describes the weights in a model folder, if there is one.
#[must_use]
pub fn weights_in(folder: &Path) -> Option<PathBuf> {
    [FOLDER_WEIGHTS, FOLDER_INDEX].map(|name| folder.join(name)).into_iter().find(|path| path.is_file())
}

/// Names of all parts of a model, given the name of one: `x-00002-of-00003.gguf` gives three names. `None` for a name without
/// numbers, or with impossible ones.
#[must_use]
pub fn part_names(name: &str) -> Option<Vec<String>> {
    let numbered = Numbered::of(Path::new(name))?;
    Some((1..=numbered.count).map(|number| numbered.name(number)).collect())
}

/// A file name with the number of a part: `STEM-00001-of-00003.gguf`.
struct Numbered<'a> {
    stem: &'a str,
    count: usize,
    extension: &'a str,
}

impl<'a> Numbered<'a> {
    fn of(path: &'a Path) -> Option<Self> {
        let (rest, extension) = path.file_name()?.to_str()?.rsplit_once('.')?;
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let parse = |digits: &str| {
            let all = digits.len() == 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
            all.then(|| digits.parse::<usize>().ok())?
        };
        let (number, count) = (parse(number)?, parse(count)?);
        ((1..=count).contains(&number) && count <= PARTS_MAX).then_some(Self { stem, count, extension })
    }

    fn name(&self, number: usize) -> String {
        format!("{}-{number:05}-of-{:05}.{}", self.stem, self.count, self.extension)
    }

    fn paths(&self, path: &Path) -> Vec<PathBuf> {
        (1..=self.count).map(|number| path.with_file_name(self.name(number))).collect()
    }
}

/// The name of the model whose part this is: `x` of `x-00002-of-00003.gguf`. `None` for other names.
#[must_use]
pub fn split_stem(path: &Path) -> Option<&str> {
    Numbered::of(path).map(|numbered| numbered.stem)
}

/// The part of an index that is read.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Names of the files in a folder's index, in order.
///
/// # Errors
/// The text is not an index, names a file outside the folder, or too many.
pub fn index_names(text: &[u8]) -> Result<Vec<String>, WeightsError> {
    Ok(parse_index(text)?.1)
}

fn parse_index(text: &[u8]) -> Result<(BTreeMap<String, String>, Vec<String>), WeightsError> {
    let wrong = |what: String| WeightsError::Malformed(format!("{FOLDER_INDEX}: {what}"));
    let index: Index = serde_json::from_slice(text).map_err(|error| wrong(error.to_string()))?;
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    if names.is_empty() || names.len() > PARTS_MAX {
        return Err(wrong(format!("expected 1 to {PARTS_MAX} files, found {}", names.len())));
    }
    let plain = |name: &str| name.ends_with(".safetensors") && !name.contains(['/', '\\']);
    if let Some(name) = names.iter().find(|name| !plain(name)) {
        return Err(wrong(format!("expected the names of .safetensors files beside it, found {name:?}")));
    }
    let names = names.into_iter().cloned().collect();
    Ok((index.weight_map, names))
}

fn read_index(path: &Path) -> Result<Files, WeightsError> {
    let missing = || WeightsError::Io { path: path.to_owned(), source: std::io::ErrorKind::NotFound.into() };
    let (tensors, names) = parse_index(read_beside(path)?.ok_or_else(missing)?.as_bytes())?;
    let parts = names.iter().map(|name| path.with_file_name(name)).collect();
    Ok(Files::Folder { index: path.to_owned(), parts, tensors })
}

#[cfg(test)]
mod tests;
