//! The files that a job names: read from its folder, then packed with the job for other nodes.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::SimulationError;
use crate::keys::Item;

/// Maximum bytes of a job with all its files: every node that computes it fetches and stores them.
pub const SIMULATION_MAX: usize = 64 << 20;
/// Maximum bytes of the job file itself: its parsed form takes many times the memory.
pub const JOB_TEXT_MAX: usize = 2 << 20;
/// Maximum files: a few patterns, a mask and a rule, with room to spare.
const FILES_MAX: usize = 64;
/// Maximum bytes of a file's name.
const NAME_MAX: usize = 255;
/// The first bytes of a packed job; the last of them is the version.
const MAGIC: [u8; 8] = *b"meshsim\x01";

/// The job file and the files it names, keyed by the name in the job.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Files {
    /// Where files not loaded yet are read from; `None`: the job was unpacked, and has all its files.
    folder: Option<PathBuf>,
    pub(super) job: String,
    pub(super) text: String,
    known: BTreeMap<String, Arc<[u8]>>,
}

impl Files {
    /// Reads a job file.
    pub(super) fn open(path: &Path) -> Result<Self, SimulationError> {
        let bytes = read(path)?;
        if bytes.len() > JOB_TEXT_MAX {
            let what = format!(
                "expected a job file of at most {JOB_TEXT_MAX} bytes, found {}: move data to files it names",
                bytes.len()
            );
            return Err(SimulationError::File { path: path.into(), what });
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let what = format!("not UTF-8 text at byte {}: is it a job file?", error.utf8_error().valid_up_to());
            SimulationError::File { path: path.into(), what }
        })?;
        let job = path.file_name().unwrap_or_default().to_string_lossy();
        let job = job.chars().take(NAME_MAX / 4).collect();
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        Ok(Self { folder: Some(folder), job, text, known: BTreeMap::new() })
    }

    /// The bytes of the file `name`; errors are located at `item`.
    pub(super) fn load(&mut self, name: &str, item: &Item<'_>) -> Result<Arc<[u8]>, SimulationError> {
        if let Some(bytes) = self.known.get(name) {
            return Ok(Arc::clone(bytes));
        }
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(item.error(format!("expected a file name of 1 to {NAME_MAX} bytes, found {}", name.len())));
        }
        if self.known.len() >= FILES_MAX {
            return Err(item.error(format!("expected at most {FILES_MAX} files in a job, found more")));
        }
        let Some(folder) = &self.folder else {
            return Err(item.error(format!("the file {name} is missing from the packed job")));
        };
        let bytes: Arc<[u8]> = read(&folder.join(name)).map_err(|error| item.error(error.to_string()))?.into();
        self.known.insert(name.into(), Arc::clone(&bytes));
        if self.packed_len() > SIMULATION_MAX {
            return Err(item.error(format!("with {name} the job exceeds {SIMULATION_MAX} bytes: use smaller files")));
        }
        Ok(bytes)
    }

    /// Loads a UTF-8 text file.
    pub(super) fn load_text(&mut self, name: &str, item: &Item<'_>) -> Result<String, SimulationError> {
        let bytes = self.load(name, item)?;
        let text = std::str::from_utf8(&bytes);
        text.map(str::to_owned)
            .map_err(|error| item.error(format!("{name}: not UTF-8 text at byte {}", error.valid_up_to())))
    }

    /// Names and bytes of all files.
    pub(super) fn all(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.known.iter().map(|(name, bytes)| (name.as_str(), &**bytes))
    }

    pub(super) fn packed_len(&self) -> usize {
        let files = self.known.iter().map(|(name, bytes)| 8 + name.len() + bytes.len());
        MAGIC.len() + 8 + self.job.len() + self.text.len() + files.sum::<usize>()
    }

    pub(super) fn pack(&self) -> Vec<u8> {
        let mut packed = Vec::with_capacity(self.packed_len());
        self.pack_into(&mut |part| {
            packed.extend_from_slice(part);
            true
        });
        packed
    }

    pub(super) fn pack_into(&self, each: &mut dyn FnMut(&[u8]) -> bool) {
        if !each(&MAGIC) {
            return;
        }
        let mut put = |bytes: &[u8]| each(&(bytes.len() as u32).to_le_bytes()) && each(bytes);
        let header = put(self.job.as_bytes()) && put(self.text.as_bytes());
        let _ = header && self.known.iter().all(|(name, bytes)| put(name.as_bytes()) && put(bytes));
    }

    pub(super) fn unpack(bytes: &[u8]) -> Result<Self, SimulationError> {
        let wrong = |what: &str| SimulationError::Packed { what: what.into() };
        if bytes.len() > SIMULATION_MAX {
            return Err(wrong("it exceeds the size limit"));
        }
        let Some(mut rest) = bytes.strip_prefix(&MAGIC[..]) else {
            let version = bytes.len() >= MAGIC.len() && bytes[..MAGIC.len() - 1] == MAGIC[..MAGIC.len() - 1];
            return Err(wrong(if version {
                "it has another format version: update both nodes"
            } else {
                "wrong magic number"
            }));
        };
        let mut take = || -> Option<&[u8]> {
            let (len, after) = rest.split_first_chunk::<4>()?;
            let (part, after) = after.split_at_checked(u32::from_le_bytes(*len) as usize)?;
            rest = after;
            Some(part)
        };
        let (Some(job), Some(text)) = (take(), take()) else { return Err(wrong("it is truncated")) };
        let (Ok(job), Ok(text)) = (std::str::from_utf8(job), std::str::from_utf8(text)) else {
            return Err(wrong("the job file is not UTF-8 text"));
        };
        if text.len() > JOB_TEXT_MAX {
            return Err(wrong("the job file exceeds the size limit"));
        }
        let mut known = BTreeMap::new();
        while let Some(name) = take() {
            let name = std::str::from_utf8(name).map_err(|_| wrong("a file name is not UTF-8 text"))?;
            let file = take().ok_or_else(|| wrong("it is truncated"))?;
            // Canonical order: equal jobs have equal bytes.
            let sorted = known.last_key_value().is_none_or(|(last, _): (&String, _)| last.as_str() < name);
            known.insert(name.to_owned(), Arc::from(file));
            if !sorted || known.len() > FILES_MAX || name.len() > NAME_MAX || job.len() > NAME_MAX {
                return Err(wrong("its files are unsorted, too many, or have too long names"));
            }
        }
        if rest.is_empty() {
            Ok(Self { folder: None, job: job.into(), text: text.into(), known })
        } else {
            Err(wrong("it is truncated"))
        }
    }
}

/// Reads a whole file of at most [`SIMULATION_MAX`] bytes.
fn read(path: &Path) -> Result<Vec<u8>, SimulationError> {
    let error = |what: String| SimulationError::File { path: path.into(), what };
    let unreadable = |why: std::io::Error| error(format!("cannot read the file: {why}"));
    let about = std::fs::metadata(path).map_err(unreadable)?;
    if !about.is_file() {
        return Err(error("expected a regular file, found a folder or a device".into()));
    }
    if about.len() > SIMULATION_MAX as u64 {
        return Err(error(format!(
            "expected at most {SIMULATION_MAX} bytes for a job with its files, found {}",
            about.len()
        )));
    }
    std::fs::read(path).map_err(unreadable)
}
