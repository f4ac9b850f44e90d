//! Where a node writes what it was asked to write: below folders of its own, and where the asker proves that it may write itself.
//!
//! Who administers a node may ask it to write outputs. Without a rule it could have any file of the node's user replaced. So a
//! node writes below `outputs/` of its data directory and below the folders that `--output-dir` names. For any other folder the
//! caller leaves a file there, a claim: one that belongs to the node's user in a folder of the node's user can only be that
//! user's (or root's), who needs no node to write there. `meshnode submit --out` does so.
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// What the name of a claim begins with; digits and letters follow, drawn for this one submission.
const CLAIM: &str = ".meshnode-claim-";
/// Longest name of a claim.
const CLAIM_BYTES_MAX: usize = 80;
/// A file that is written to see whether that is possible.
const PROBE: &str = ".meshnode-can-write";

/// The folders below which a node writes unasked.
#[derive(Clone, Debug, Default)]
pub struct Folders {
    /// `outputs/` of the data directory.
    own: Option<PathBuf>,
    others: Vec<PathBuf>,
}

/// Why a folder is not written to.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// `..` in it, or no folder at all.
    #[error("`{0}` must be the path of a folder without `..`")]
    Malformed(PathBuf),
    /// It is nowhere below the node's folders.
    #[error(
        "the node does not write into {out}: it writes below {allowed}, and with `meshnode submit` into folders of its own user. Name one \
         of these, run `submit` as the node's user, or start the node with --output-dir",
        out = .out.display()
    )]
    Elsewhere {
        /// What was asked for.
        out: PathBuf,
        /// Where it may write.
        allowed: String,
    },
    /// The claim is not what it must be.
    #[error("the node does not write into {out}: {why}", out = .out.display())]
    Unproven {
        /// What was asked for.
        out: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The system refused.
    #[error("cannot write into {out}: {source}; name a folder that can be written, with --out", out = .out.display())]
    System {
        /// Which.
        out: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Folders {
    /// `outputs/` of the data directory, and these.
    pub fn new(data_dir: &Path, others: Vec<PathBuf>) -> Self {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        Self { own: Some(absolute(data_dir.join("outputs"))), others: others.into_iter().map(absolute).collect() }
    }

    /// The folder to write to, made if it is not there: relative ones are below `outputs/`. A claim is taken away.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn admit(&self, out: &Path, claim: Option<&str>) -> Result<PathBuf, Refusal> {
        let plain = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::RootDir | Component::CurDir);
        if out.as_os_str().is_empty() || !out.components().all(plain) {
            return Err(Refusal::Malformed(out.to_owned()));
        }
        if let Some(claim) = claim {
            return claimed(out, claim);
        }
        let wanted = match (&self.own, out.is_relative()) {
            (Some(own), true) => own.join(out),
            (None, true) | (_, false) => out.to_owned(),
        };
        let system = |source| Refusal::System { out: wanted.clone(), source };
        for root in self.own.iter().chain(&self.others) {
            if Some(root) == self.own.as_ref() && wanted.starts_with(root) {
                fs::create_dir_all(root).map_err(system)?;
            }
            let Ok(root) = root.canonicalize() else { continue };
            if resolved(&wanted).is_some_and(|place| place.starts_with(&root) && place != root) {
                fs::create_dir_all(&wanted).map_err(system)?;
                // Again, now that all of it is there: no link leads out.
                let place = wanted.canonicalize().map_err(system)?;
                if place.starts_with(&root) {
                    return own_folder(place);
                }
            }
        }
        Err(Refusal::Elsewhere { out: out.to_owned(), allowed: self.names() })
    }

    fn names(&self) -> String {
        let all: Vec<String> = self.own.iter().chain(&self.others).map(|root| root.display().to_string()).collect();
        if all.is_empty() { "no folder".into() } else { all.join(", ") }
    }
}

/// Where a path leads: links of the part that is there are followed, the rest is to be made.
fn resolved(path: &Path) -> Option<PathBuf> {
    let there = path.ancestors().find(|part| part.symlink_metadata().is_ok())?;
    // A link to nowhere is there and cannot be followed.
    let place = there.canonicalize().ok()?;
    Some(place.join(path.strip_prefix(there).ok()?))
}

/// Only what belongs to the node's user: in a folder of another one, links could be laid at any time.
fn own_folder(place: PathBuf) -> Result<PathBuf, Refusal> {
    let meta = fs::metadata(&place).map_err(|source| Refusal::System { out: place.clone(), source })?;
    let user = rustix::process::geteuid().as_raw();
    if meta.is_dir() && meta.uid() == user {
        return Ok(place);
    }
    let why = format!("it belongs to the user with id {}, the node runs as {user}", meta.uid());
    Err(Refusal::Unproven { out: place, why })
}

/// Checks and removes the claim in a folder of the node's user.
fn claimed(out: &Path, claim: &str) -> Result<PathBuf, Refusal> {
    let unproven = |why: String| Refusal::Unproven { out: out.to_owned(), why };
    let digits = claim.strip_prefix(CLAIM).filter(|rest| rest.len() >= 32 && claim.len() <= CLAIM_BYTES_MAX);
    if !digits.is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_alphanumeric())) {
        return Err(unproven(format!("`claim` must be {CLAIM} with 32 or more letters and digits")));
    }
    if !out.is_absolute() || out.canonicalize().ok().as_deref() != Some(out) {
        return Err(unproven(
            "a claim is for the path of a folder on the node's machine, absolute and without links".into(),
        ));
    }
    let place = own_folder(out.to_owned())?;
    let system = |e: rustix::io::Errno| unproven(format!("the claim in it cannot be read: {e}"));
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(&place, flags, Mode::empty()).map_err(system)?;
    let found = rustix::fs::statat(&folder, claim, AtFlags::SYMLINK_NOFOLLOW).map_err(system)?;
    let user = rustix::process::geteuid().as_raw();
    let regular = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    if !regular || found.st_uid != user || found.st_nlink != 1 {
        return Err(unproven(format!(
            "the claim in it belongs to the user with id {}, the node runs as {user}: run `submit` as the node's user",
            found.st_uid
        )));
    }
    rustix::fs::unlinkat(&folder, claim, AtFlags::empty()).map_err(system)?;
    Ok(place)
}

/// A claim that was laid into a folder; it is removed when it is dropped, if the node has not done so.
#[derive(Debug)]
pub struct Claim {
    file: PathBuf,
}

impl Claim {
    /// Lays one into a folder.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn lay(folder: &Path) -> io::Result<Self> {
        let mut digits = [0; 16];
        getrandom::fill(&mut digits).map_err(|e| io::Error::other(e.to_string()))?;
        let file = folder.join(format!("{CLAIM}{}", data_encoding::HEXLOWER.encode(&digits)));
        File::options().write(true).create_new(true).open(&file)?;
        Ok(Self { file })
    }

    /// Its name, for the node.
    pub fn name(&self) -> String {
        self.file.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.file);
    }
}

/// A new file for writing. What has its name goes first: a link that lies there is not followed.
///
/// # Errors
/// The system's.
pub fn create_new(path: &Path) -> io::Result<File> {
    let create = || File::options().write(true).create_new(true).open(path);
    match create() {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => fs::remove_file(path).and_then(|()| create()),
        created => created,
    }
}

/// Sees whether a folder can be written to.
///
/// # Errors
/// The system's.
pub fn probe(folder: &Path) -> io::Result<()> {
    let path = folder.join(PROBE);
    create_new(&path).and_then(|_| fs::remove_file(&path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    struct Place {
        dir: tempfile::TempDir,
        folders: Folders,
    }

    fn place() -> Place {
        let dir = tempfile::tempdir().unwrap();
        for name in ["data", "results", "home"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let folders = Folders::new(&dir.path().join("data"), vec![dir.path().join("results")]);
        Place { dir, folders }
    }

    impl Place {
        fn at(&self, path: &str) -> PathBuf {
            self.dir.path().canonicalize().unwrap().join(path)
        }

        fn admit(&self, path: impl AsRef<Path>) -> Result<PathBuf, Refusal> {
            self.folders.admit(path.as_ref(), None)
        }
    }

    #[test]
    fn outputs_go_below_the_nodes_folders_only() {
        let p = place();
        assert_eq!(p.admit("run/1").unwrap(), p.at("data/outputs/run/1"));
        assert_eq!(p.admit(p.at("results/a/b")).unwrap(), p.at("results/a/b"));
        assert!(p.at("results/a/b").is_dir());
        for out in [p.at("home/x"), p.at("home"), p.at("resultsx/a"), p.at("results"), p.at("data/store/x"), "/".into()]
        {
            let error = p.admit(&out).unwrap_err();
            assert!(matches!(error, Refusal::Elsewhere { .. }), "{}: {error}", out.display());
            assert!(error.to_string().contains("--output-dir") && error.to_string().contains("results"), "{error}");
        }
        assert!(!p.at("home/x").exists() && !p.at("data/store").exists());
        for out in ["", "../home", "a/../../home"] {
            assert!(matches!(p.admit(out).unwrap_err(), Refusal::Malformed(_)), "{out}");
        }
        assert!(matches!(p.admit(p.at("results/../home")).unwrap_err(), Refusal::Malformed(_)));
        assert!(Folders::default().admit(Path::new("x"), None).is_err());
    }

    #[test]
    fn links_do_not_lead_out() {
        let p = place();
        symlink(p.at("home"), p.at("results/link")).unwrap();
        assert!(matches!(p.admit(p.at("results/link")).unwrap_err(), Refusal::Elsewhere { .. }));
        assert!(matches!(p.admit(p.at("results/link/deep")).unwrap_err(), Refusal::Elsewhere { .. }));
        symlink(p.at("home/none"), p.at("results/dangling")).unwrap();
        assert!(p.admit(p.at("results/dangling/deep")).is_err());
        assert_eq!(fs::read_dir(p.at("home")).unwrap().count(), 0, "nothing was made outside");
        // A claim is for the folder itself.
        let claim = Claim::lay(&p.at("home")).unwrap();
        assert!(p.folders.admit(&p.at("results/link"), Some(&claim.name())).is_err());
        assert!(p.at("home").join(claim.name()).exists());
    }

    #[test]
    fn a_claim_opens_the_folder_that_it_lies_in_once() {
        let p = place();
        let home = p.at("home");
        let claim = Claim::lay(&home).unwrap();
        assert_eq!(p.folders.admit(&home, Some(&claim.name())).unwrap(), home);
        assert_eq!(fs::read_dir(&home).unwrap().count(), 0, "the claim is gone");
        let again = p.folders.admit(&home, Some(&claim.name())).unwrap_err();
        assert!(matches!(again, Refusal::Unproven { .. }), "{again}");
        let elsewhere = Claim::lay(&p.at("results")).unwrap();
        assert!(p.folders.admit(&home, Some(&elsewhere.name())).is_err());
        drop(elsewhere);
        assert_eq!(fs::read_dir(p.at("results")).unwrap().count(), 0);
    }

    #[test]
    fn what_is_no_claim_opens_nothing() {
        let p = place();
        let home = p.at("home");
        let name = format!("{CLAIM}{}", "a".repeat(32));
        for claim in
            [".bashrc", "../x", CLAIM, &format!("{CLAIM}/{}", "a".repeat(32)), &format!("{CLAIM}{}", "a".repeat(99))]
        {
            assert!(p.folders.admit(&home, Some(claim)).is_err(), "{claim}");
        }
        assert!(p.folders.admit(&home, Some(&name)).is_err(), "there is none");
        fs::write(p.at("results/file"), b"").unwrap();
        symlink(p.at("results/file"), home.join(&name)).unwrap();
        assert!(p.folders.admit(&home, Some(&name)).is_err(), "a link");
        fs::remove_file(home.join(&name)).unwrap();
        fs::hard_link(p.at("results/file"), home.join(&name)).unwrap();
        assert!(p.folders.admit(&home, Some(&name)).is_err(), "a file with another name elsewhere");
        assert!(p.folders.admit(Path::new("home"), Some(&name)).is_err(), "relative");
    }

    #[test]
    fn a_probe_and_a_new_file_follow_no_link() {
        let p = place();
        let precious = p.at("home/precious");
        fs::write(&precious, b"mine").unwrap();
        symlink(&precious, p.at("results").join(PROBE)).unwrap();
        probe(&p.at("results")).unwrap();
        symlink(&precious, p.at("results/x.partial")).unwrap();
        drop(create_new(&p.at("results/x.partial")).unwrap());
        assert_eq!(fs::read(&precious).unwrap(), b"mine");
        assert!(p.at("results/x.partial").symlink_metadata().unwrap().is_file());
        assert!(probe(&p.at("nowhere")).is_err());
    }
}
