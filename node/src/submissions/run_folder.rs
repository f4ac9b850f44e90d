//! The folder of a run's results. A manifest lists the files that belong to meshnode, so that results are replaced only
//! on request, and no file is ever removed unless a manifest there names it.
//!
//! A run that replaces another one first moves that one aside, complete, and removes it only when the new run has a
//! checkpoint or is done. A folder without a manifest (of an earlier version, or of another program) is never changed.
use super::checkpoints::{self, layout};
use super::files::{PARTIAL, folder, whole_file};
use super::forces::FORCES_FILE;
use crate::output;
use kernels_simulations::{OutputKind, OutputSpec, Simulation};
use node_core::id::JobId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The manifest. Names of output folders contain no dot, so they cannot collide with it.
pub(crate) const MANIFEST: &str = "meshnode-run.json";
/// The folder of a run that is being replaced.
const REPLACED: &str = "replaced.run";
/// Format identifier of a manifest.
const FORMAT: &str = "meshnode run 1";
/// Prefix of temporary files with which this program probes whether a folder is writable.
const OWN: &str = ".meshnode-";
/// Largest manifest: a few lines for each of 16 outputs, per job that was resumed here.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;
/// Most entries of a folder listed in an error text.
const NAMED: usize = 4;

/// What to do with a run that the folder already holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Existing {
    /// Reject it: the folder must be empty.
    #[default]
    Refuse,
    /// Resume from its last checkpoint.
    Resume,
    /// Move it aside, and remove it when the new run can replace it.
    Overwrite,
}

/// The outputs of a run, and its state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Manifest {
    format: String,
    name: String,
    job: String,
    state: RunStatus,
    /// Steps completed when it ended.
    step: u32,
    /// Steps requested.
    steps: u64,
    outputs: Vec<Written>,
    /// Its files are being moved to or from [`REPLACED`].
    #[serde(default)]
    moving: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RunStatus {
    Running,
    Done,
    Ended,
}

/// The files of one output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Written {
    folder: String,
    kind: WrittenKind,
    quantity: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum WrittenKind {
    Png,
    Gif,
    Zarr,
    Vtk,
}

impl From<&OutputSpec> for Written {
    fn from(output: &OutputSpec) -> Self {
        let kind = match output.kind {
            OutputKind::Png => WrittenKind::Png,
            OutputKind::Gif => WrittenKind::Gif,
            OutputKind::Zarr => WrittenKind::Zarr,
            OutputKind::Vtk => WrittenKind::Vtk,
        };
        Self { folder: output.folder.clone(), kind, quantity: output.quantity.clone() }
    }
}

impl Written {
    /// Its existing files in a run's folder, relative to that folder.
    fn files(&self, run: &Path) -> Vec<PathBuf> {
        let kind = match self.kind {
            WrittenKind::Png => OutputKind::Png,
            WrittenKind::Gif => OutputKind::Gif,
            WrittenKind::Zarr => OutputKind::Zarr,
            WrittenKind::Vtk => OutputKind::Vtk,
        };
        output::written(run, &self.folder, kind, &self.quantity)
    }
}

/// The contents of a folder.
enum Contents {
    Nothing,
    Run(Manifest),
    /// Names of entries that no manifest lists.
    Others(Vec<String>),
}

/// The folder of a run in progress. No other run writes into it while this is held.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    manifest: Manifest,
    _lock: Option<File>,
}

/// Checks whether a run may begin in a folder. Changes nothing.
///
/// # Errors
/// It holds files that must not be touched; the text names them and the flags that apply.
pub(crate) fn check(out: &Path, existing: Existing) -> Result<(), String> {
    let shown = out.display();
    match (contents(out)?, existing) {
        (Contents::Nothing, _) => Ok(()),
        (Contents::Run(_), Existing::Resume | Existing::Overwrite) => Ok(()),
        (Contents::Run(manifest), Existing::Refuse) => Err(format!(
            "{shown} holds {}: --resume continues from its last checkpoint, --overwrite replaces it, another --out keeps both",
            manifest.described(out)
        )),
        // Checkpoints only, copied from a folder of an earlier version.
        (Contents::Others(names), Existing::Resume) if names == [layout::FOLDER] => Ok(()),
        (Contents::Others(names), _) => {
            let more = names.len().saturating_sub(NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let names = names[..names.len().min(NAMED)].join(", ");
            let has = checkpoints::newest_step(out);
            let resume = has.map_or_else(String::new, |step| {
                format!("; to resume from the checkpoint of step {step}, copy `{}` into an empty folder and use that with --resume", layout::FOLDER)
            });
            Err(format!(
                "{shown} holds {names}{more}, which no run manifest lists (earlier versions wrote none), so neither --resume \
                 nor --overwrite touches it: name another --out{resume}"
            ))
        }
    }
}

fn contents(out: &Path) -> Result<Contents, String> {
    let path = out.join(MANIFEST);
    match File::open(&path) {
        Ok(file) => {
            let mut text = String::new();
            let read = file.take(MANIFEST_BYTES_MAX).read_to_string(&mut text).map_err(|e| e.to_string());
            let manifest = read.and_then(|_| serde_json::from_str::<Manifest>(&text).map_err(|e| e.to_string()));
            let manifest = manifest.and_then(|manifest| manifest.validated());
            let manifest =
                manifest.map_err(|e| format!("{} is not a run manifest ({e}): name another --out", path.display()))?;
            return Ok(Contents::Run(manifest));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(format!("{}: {error}", path.display())),
    }
    let entries = match fs::read_dir(out) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Contents::Nothing),
        Err(error) => {
            return Err(format!("cannot write into {}: {error}; name another folder with --out", out.display()));
        }
    };
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    // A manifest whose first write was interrupted belongs to meshnode.
    let torn = Path::new(MANIFEST).with_extension(PARTIAL);
    let is_foreign = |name: &String| !name.starts_with(OWN) && Path::new(name) != torn;
    let mut names: Vec<String> = names.filter(is_foreign).collect();
    names.sort();
    Ok(if names.is_empty() { Contents::Nothing } else { Contents::Others(names) })
}

impl Manifest {
    fn new(simulation: &Simulation, job: JobId) -> Self {
        Self {
            format: FORMAT.into(),
            name: simulation.name().into(),
            job: format!("{:016x}", job.0),
            state: RunStatus::Running,
            step: 0,
            steps: simulation.steps(),
            outputs: simulation.outputs().iter().map(Written::from).collect(),
            moving: false,
        }
    }

    /// Validates a manifest, which another program may have written: it must name nothing outside its folder.
    fn validated(self) -> Result<Self, String> {
        let plain = |name: &str| {
            let letters = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            !name.is_empty() && name.len() <= 64 && name.chars().all(letters)
        };
        if self.format != FORMAT {
            return Err(format!("expected format {FORMAT:?}, found {:?}", self.format));
        }
        match self.outputs.iter().find(|output| !plain(&output.folder) || !plain(&output.quantity)) {
            None => Ok(self),
            Some(output) => Err(format!("it names an output {:?} in {:?}", output.quantity, output.folder)),
        }
    }

    /// Describes the run in words, with its last checkpoint.
    fn described(&self, run: &Path) -> String {
        let Self { name, steps, step, .. } = self;
        let checkpoint = checkpoints::newest_step(run);
        let last = checkpoint
            .map_or_else(|| "without a checkpoint".into(), |step| format!("with a checkpoint of step {step}"));
        let found = match self.state {
            RunStatus::Done => format!("a finished run of {steps} steps ({name})"),
            RunStatus::Ended => format!("a run that ended at step {step} of {steps} ({name}), {last}"),
            RunStatus::Running => format!("an unfinished run of {steps} steps ({name}), {last}"),
        };
        match contents(&run.join(REPLACED)) {
            Ok(Contents::Run(before)) => {
                format!(
                    "{found}; and, in {REPLACED}, the run that it was to replace: {}",
                    before.described(&run.join(REPLACED))
                )
            }
            Ok(Contents::Nothing | Contents::Others(_)) | Err(_) => found,
        }
    }

    /// All files of the run except the manifest, relative to its folder.
    fn files(&self, run: &Path) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = self.outputs.iter().flat_map(|output| output.files(run)).collect();
        files.extend(checkpoints::written(run));
        files.push(FORCES_FILE.into());
        files.retain(|file| run.join(file).is_file());
        // Outputs of different jobs that were resumed here may share files.
        files.sort();
        files.dedup();
        files
    }

    fn write(&self, run: &Path) -> Result<(), String> {
        let text = serde_json::to_vec_pretty(self).map_err(|e| e.to_string())?;
        whole_file(&run.join(MANIFEST), &text)
    }
}

/// A folder in which a run may begin; nothing in it is changed yet.
#[derive(Debug)]
pub(crate) struct Opened {
    path: PathBuf,
    existing: Existing,
    before: Option<Manifest>,
    lock: Option<File>,
}

impl Opened {
    /// Opens and locks a folder for a run. With `Resume`, if an interrupted run has no checkpoint yet, the run that it
    /// was to replace is restored.
    ///
    /// # Errors
    /// As for [`check`]; another run writes into the folder (from `lock`); a disk error.
    pub(crate) fn new(
        out: &Path,
        existing: Existing,
        lock: impl FnOnce(&Path) -> Result<Option<File>, String>,
    ) -> Result<Self, String> {
        folder(out)?;
        let lock = lock(out)?;
        recover(out)?;
        // A finished run was interrupted while it removed the run that it replaced.
        if matches!(contents(out)?, Contents::Run(run) if run.state == RunStatus::Done) {
            remove_replaced(out);
        }
        check(out, existing)?;
        let before = match contents(out)? {
            Contents::Run(interrupted)
                if existing == Existing::Resume
                    && checkpoints::newest_step(out).is_none()
                    && out.join(REPLACED).join(MANIFEST).is_file() =>
            {
                Some(restore_replaced(out, &interrupted)?)
            }
            Contents::Run(before) => Some(before),
            Contents::Nothing | Contents::Others(_) => None,
        };
        Ok(Self { path: out.into(), existing, before, lock })
    }

    /// Begins the run. With `Overwrite`, the existing run is moved aside.
    ///
    /// # Errors
    /// An output would overwrite foreign files; a disk error.
    pub(crate) fn begin(self, simulation: &Simulation, job: JobId) -> Result<RunFolder, String> {
        let Self { path, existing, before, lock } = self;
        let mut manifest = Manifest::new(simulation, job);
        if let Some(before) = before {
            if existing == Existing::Overwrite {
                move_aside(&path, &before)?;
            } else {
                check_foreign_files(&path, &manifest, &before)?;
                let kept: Vec<Written> =
                    before.outputs.into_iter().filter(|output| !manifest.outputs.contains(output)).collect();
                manifest.outputs.extend(kept);
            }
        }
        manifest.write(&path)?;
        Ok(RunFolder { path, manifest, _lock: lock })
    }
}

impl RunFolder {
    /// The folder of a run that this node takes over, in its own data directory.
    ///
    /// # Errors
    /// A disk error.
    pub(crate) fn inherit(out: &Path, simulation: &Simulation, job: JobId) -> Result<Self, String> {
        folder(out)?;
        let manifest = Manifest::new(simulation, job);
        manifest.write(out)?;
        Ok(Self { path: out.into(), manifest, _lock: None })
    }

    /// This run has a checkpoint: removes the run that it replaces.
    pub(crate) fn has_checkpoint(&self) {
        remove_replaced(&self.path);
    }

    /// Ends the run. A run without any output (there was no placement for its grid, say) leaves the folder unchanged.
    pub(crate) fn finish(mut self, step: u32, done: bool) {
        let nothing = |file: &PathBuf| file.as_path() == Path::new(FORCES_FILE);
        if !done && step == 0 && self.manifest.files(&self.path).iter().all(nothing) {
            let undone = match self.path.join(REPLACED).join(MANIFEST).is_file() {
                true => restore_replaced(&self.path, &self.manifest).map(drop),
                false => remove(&self.path, &self.manifest).map(|()| drop(fs::remove_file(self.path.join(MANIFEST)))),
            };
            if let Err(error) = undone {
                tracing::warn!("{error}");
            }
            return;
        }
        self.manifest.state = if done { RunStatus::Done } else { RunStatus::Ended };
        self.manifest.step = step;
        if let Err(error) = self.manifest.write(&self.path) {
            tracing::warn!("{error}");
        }
        if done {
            remove_replaced(&self.path);
        }
    }
}

/// The run that `out` was to replace, in words, if the new run has no checkpoint to resume from.
pub(crate) fn replaced(out: &Path) -> Option<String> {
    match contents(&out.join(REPLACED)) {
        Ok(Contents::Run(before)) if checkpoints::newest_step(out).is_none() => {
            Some(before.described(&out.join(REPLACED)))
        }
        Ok(Contents::Run(_) | Contents::Nothing | Contents::Others(_)) | Err(_) => None,
    }
}

/// Checks that new outputs of a resumed run go to folders without foreign files.
fn check_foreign_files(out: &Path, manifest: &Manifest, before: &Manifest) -> Result<(), String> {
    let known: BTreeSet<PathBuf> = before.files(out).into_iter().collect();
    for output in manifest.outputs.iter().filter(|output| !before.outputs.contains(output)) {
        let entries = fs::read_dir(out.join(&output.folder)).into_iter().flatten().flatten();
        let files = entries.map(|entry| entry.path()).filter(|path| path.is_file());
        let strange = |path: &PathBuf| path.strip_prefix(out).is_ok_and(|path| !known.contains(path));
        if let Some(path) = files.into_iter().find(strange) {
            return Err(format!(
                "the output {:?} is new, but {} already exists: give the output another `folder`",
                output.folder,
                path.display()
            ));
        }
    }
    Ok(())
}

/// Moves a run's files aside. If that run was itself interrupted while it replaced another one, and has no checkpoint,
/// it cannot be resumed: it is removed, and the other one stays.
fn move_aside(out: &Path, before: &Manifest) -> Result<(), String> {
    let replaced = out.join(REPLACED);
    if replaced.join(MANIFEST).is_file() {
        if checkpoints::newest_step(out).is_none() {
            return remove(out, before);
        }
        remove_replaced(out);
    }
    // If this is interrupted, `recover` moves the files back.
    Manifest { moving: true, ..before.clone() }.write(out)?;
    folder(&replaced)?;
    before.write(&replaced)?;
    move_files(out, &replaced, &before.files(out))
}

/// Restores a run that was moved aside; removes the files of the run that was to replace it.
fn restore_replaced(out: &Path, interrupted: &Manifest) -> Result<Manifest, String> {
    let replaced = out.join(REPLACED);
    let Contents::Run(before) = contents(&replaced)? else {
        return Err(format!("{} is missing", replaced.display()));
    };
    remove(out, interrupted)?;
    Manifest { moving: true, ..before.clone() }.write(out)?;
    recover(out)?;
    Ok(before)
}

/// Moves the files of a replaced run back, if moving them in either direction was interrupted.
fn recover(out: &Path) -> Result<(), String> {
    let Contents::Run(manifest) = contents(out)? else { return Ok(()) };
    if !manifest.moving {
        return Ok(());
    }
    let replaced = out.join(REPLACED);
    move_files(&replaced, out, &manifest.files(&replaced))?;
    Manifest { moving: false, ..manifest }.write(out)?;
    let _ = fs::remove_file(replaced.join(MANIFEST));
    let _ = fs::remove_dir(replaced);
    Ok(())
}

fn remove_replaced(out: &Path) {
    let replaced = out.join(REPLACED);
    if let Ok(Contents::Run(before)) = contents(&replaced) {
        match remove(&replaced, &before) {
            Ok(()) => drop(fs::remove_file(replaced.join(MANIFEST))),
            Err(error) => tracing::warn!("{error}"),
        }
    }
    let _ = fs::remove_dir(&replaced);
}

/// Moves files, and removes folders that become empty.
fn move_files(from: &Path, to: &Path, files: &[PathBuf]) -> Result<(), String> {
    for file in files {
        let (old, new) = (from.join(file), to.join(file));
        let parent = new.parent().unwrap_or(to);
        let moved = fs::create_dir_all(parent).and_then(|()| fs::rename(&old, &new));
        moved.map_err(|e| format!("cannot move {} to {}: {e}", old.display(), new.display()))?;
    }
    remove_empty(from, files);
    Ok(())
}

/// Removes a run's files except the manifest, and folders that become empty.
fn remove(run: &Path, manifest: &Manifest) -> Result<(), String> {
    let files = manifest.files(run);
    for file in &files {
        let path = run.join(file);
        fs::remove_file(&path).map_err(|e| format!("cannot remove {}: {e}", path.display()))?;
    }
    remove_empty(run, &files);
    Ok(())
}

/// Removes the parent folders of `files` that are empty.
fn remove_empty(run: &Path, files: &[PathBuf]) {
    let parents = files.iter().flat_map(|file| file.ancestors().skip(1));
    let folders: BTreeSet<&Path> = parents.filter(|folder| !folder.as_os_str().is_empty()).collect();
    // Remove inner folders before outer ones.
    for folder in folders.into_iter().rev() {
        let _ = fs::remove_dir(run.join(folder));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A Life world with one output, and a checkpoint every 5 steps.
    fn simulation(steps: u64) -> Simulation {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.toml");
        let text = format!(
            "name = \"world\"\nsteps = {steps}\ncheckpoint_every = 5\n[grid]\nsize = [64, 8]\n[rule]\nname = \"life\"\n\
             [[output]]\nkind = \"png\"\nevery = 5\n"
        );
        fs::write(&path, text).unwrap();
        Simulation::read(&path).unwrap()
    }

    fn begin(out: &Path, existing: Existing) -> Result<RunFolder, String> {
        Opened::new(out, existing, |_| Ok(None))?.begin(&simulation(20), JobId(7))
    }

    /// A fake checkpoint: the manifest exists, the cells are not read.
    fn checkpoint(out: &Path, step: u32) {
        let folder = out.join(format!("checkpoints/step-{step}"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("x0-64_y0-8_z0-1.cells"), [0; 64]).unwrap();
        fs::write(folder.join("manifest.json"), "{}").unwrap();
    }

    /// A finished run.
    fn finished(out: &Path) {
        let run = begin(out, Existing::Refuse).unwrap();
        fs::create_dir_all(out.join("alive-png")).unwrap();
        fs::write(out.join("alive-png/alive_0000000020.png"), "picture").unwrap();
        checkpoint(out, 20);
        run.finish(20, true);
    }

    fn all(folder: &Path) -> BTreeSet<PathBuf> {
        let mut found = BTreeSet::new();
        let mut left = vec![folder.to_path_buf()];
        while let Some(folder) = left.pop() {
            for entry in fs::read_dir(folder).unwrap().flatten() {
                if entry.path().is_dir() {
                    left.push(entry.path())
                } else {
                    let _ = found.insert(entry.path());
                }
            }
        }
        found.into_iter().map(|path| path.strip_prefix(folder).unwrap().to_path_buf()).collect()
    }

    #[test]
    fn a_finished_run_is_not_replaced_unasked() {
        let out = tempfile::tempdir().unwrap();
        let out = out.path();
        finished(out);
        let before = all(out);
        let refused = begin(out, Existing::Refuse).unwrap_err();
        assert!(refused.contains("a finished run of 20 steps (world)"), "{refused}");
        assert!(refused.contains("--resume") && refused.contains("--overwrite"), "{refused}");
        assert_eq!(all(out), before);
        begin(out, Existing::Resume).unwrap();
        assert_eq!(all(out), before);
    }

    #[test]
    fn an_overwritten_run_stays_until_the_new_one_has_a_checkpoint() {
        let out = tempfile::tempdir().unwrap();
        let out = out.path();
        finished(out);
        fs::write(out.join("notes.txt"), "mine").unwrap();
        fs::write(out.join("alive-png/notes.txt"), "mine").unwrap();
        let before = all(out);
        // Ended before its first checkpoint: --resume restores the old run and removes what the new one wrote.
        let run = begin(out, Existing::Overwrite).unwrap();
        assert!(!out.join("alive-png/alive_0000000020.png").exists() && out.join("alive-png/notes.txt").exists());
        fs::write(out.join("alive-png/alive_0000000005.png"), "new").unwrap();
        run.finish(7, false);
        let text = replaced(out).unwrap();
        assert!(text.contains("a finished run of 20 steps (world)"), "{text}");
        let refused = begin(out, Existing::Refuse).unwrap_err();
        assert!(refused.contains("ended at step 7 of 20") && refused.contains("finished run of 20 steps"), "{refused}");
        begin(out, Existing::Resume).unwrap();
        assert_eq!(all(out), before);
        // Interrupted while it was moved aside: it is complete again.
        let Contents::Run(finished) = contents(out).unwrap() else { panic!("a run") };
        move_aside(out, &finished).unwrap();
        fs::create_dir_all(out.join("alive-png")).unwrap();
        fs::rename(out.join("replaced.run/alive-png/alive_0000000020.png"), out.join("alive-png/alive_0000000020.png"))
            .unwrap();
        begin(out, Existing::Resume).unwrap();
        assert_eq!(all(out), before);
        // Interrupted twice: the finished run can still be restored.
        drop((begin(out, Existing::Overwrite).unwrap(), begin(out, Existing::Overwrite).unwrap()));
        assert!(replaced(out).unwrap().contains("finished run of 20 steps"));
        let run = begin(out, Existing::Overwrite).unwrap();
        checkpoint(out, 5);
        run.has_checkpoint();
        assert_eq!(replaced(out), None);
        let left = all(out);
        assert!(left.contains(Path::new("notes.txt")) && left.contains(Path::new("alive-png/notes.txt")));
        assert!(
            !left.iter().any(|path| path.starts_with(REPLACED) || path.ends_with("alive_0000000020.png")),
            "{left:?}"
        );
        assert!(left.contains(Path::new("checkpoints/step-5/manifest.json")));
    }

    #[test]
    fn a_finished_run_survives_a_crash_while_it_removes_the_replaced_run() {
        let out = tempfile::tempdir().unwrap();
        let out = out.path();
        finished(out);
        let run = begin(out, Existing::Overwrite).unwrap();
        fs::create_dir_all(out.join("alive-png")).unwrap();
        fs::write(out.join("alive-png/alive_0000000010.png"), "new").unwrap();
        let mut manifest = run.manifest.clone();
        manifest.state = RunStatus::Done;
        manifest.write(out).unwrap();
        drop(run);
        assert!(replaced(out).is_some(), "the crash is before the removal");
        begin(out, Existing::Resume).unwrap();
        assert!(out.join("alive-png/alive_0000000010.png").exists(), "the finished run keeps its picture");
        assert_eq!(replaced(out), None);
    }

    #[test]
    fn a_torn_manifest_does_not_block_its_folder() {
        let out = tempfile::tempdir().unwrap();
        fs::write(out.path().join("meshnode-run.partial"), "{").unwrap();
        begin(out.path(), Existing::Refuse).unwrap();
    }

    #[test]
    fn a_run_without_output_leaves_the_folder_unchanged() {
        let out = tempfile::tempdir().unwrap();
        let out = out.path();
        begin(out, Existing::Refuse).unwrap().finish(0, false);
        assert_eq!(all(out), BTreeSet::new());
        finished(out);
        let before = all(out);
        begin(out, Existing::Overwrite).unwrap().finish(0, false);
        assert_eq!(all(out), before);
        assert!(check(out, Existing::Refuse).unwrap_err().contains("a finished run of 20 steps"));
    }

    #[test]
    fn files_that_no_manifest_names_are_kept() {
        let out = tempfile::tempdir().unwrap();
        let out = out.path();
        // A folder of an earlier version.
        checkpoint(out, 7);
        fs::create_dir_all(out.join("checkpoints/step-8/deep")).unwrap();
        fs::write(out.join("checkpoints/step-8/deep/file"), "mine").unwrap();
        fs::write(out.join("forces.csv"), "step\n").unwrap();
        let before = all(out);
        for existing in [Existing::Refuse, Existing::Resume, Existing::Overwrite] {
            let refused = begin(out, existing).unwrap_err();
            assert!(refused.contains("checkpoints, forces.csv") && refused.contains("step 7"), "{refused}");
        }
        assert_eq!(all(out), before);
        // Its checkpoints alone can be resumed.
        fs::remove_file(out.join("forces.csv")).unwrap();
        assert!(begin(out, Existing::Overwrite).is_err());
        begin(out, Existing::Resume).unwrap();
        // A manifest that points outside its folder is invalid.
        let text = fs::read_to_string(out.join(MANIFEST)).unwrap();
        fs::write(out.join(MANIFEST), text.replace("alive-png", "../alive-png")).unwrap();
        assert!(begin(out, Existing::Overwrite).unwrap_err().contains("not a run manifest"));
        assert!(out.join("checkpoints/step-8/deep/file").exists());
    }
}
