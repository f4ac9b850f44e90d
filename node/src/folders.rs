//! Restricts where submitted jobs may write: below the node's own folders, or into folders to which the caller proves
//! access.
//!
//! Without this rule, a caller with the API key could replace any file of the node's user. A node writes below
//! `outputs/` of its data directory and below the folders of `--output-dir`. For any other folder the caller creates a
//! file there, a claim: if the claim and its folder belong to the node's user, only that user (or root) can have
//! created it, who needs no node to write there. `meshnode submit --out` creates claims.
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Prefix of the file name of a claim; random letters and digits follow, new for each submission.
const CLAIM: &str = ".meshnode-claim-";
/// Longest file name of a claim.
const CLAIM_BYTES_MAX: usize = 80;
/// Name of the file that [`probe`] writes.
const PROBE: &str = ".meshnode-can-write";

/// The folders below which a node writes without a claim.
#[derive(Clone, Debug, Default)]
pub(crate) struct Folders {
    /// `outputs/` of the data directory.
    own: Option<PathBuf>,
    others: Vec<PathBuf>,
}

/// Why an output folder is rejected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    /// The path is empty or contains `..`.
    #[error("`{0}` must be the path of a folder without `..`")]
    Malformed(PathBuf),
    /// The path is not below the node's folders.
    #[error(
        "the node may not write to {out}: it writes below {allowed}, and with `meshnode submit` to folders of its own user. Choose one \
         of those folders, run `submit` as the node's user, or start the node with --output-dir",
        out = .out.display()
    )]
    Elsewhere {
        /// The requested folder.
        out: PathBuf,
        /// The folders below which the node writes.
        allowed: String,
    },
    /// The claim, or the folder, does not belong to the node's user or is malformed.
    #[error("the node may not write to {out}: {why}", out = .out.display())]
    Unproven {
        /// The requested folder.
        out: PathBuf,
        /// The reason.
        why: String,
    },
    /// A system call failed.
    #[error("cannot write to {out}: {source}; choose a writable folder with --out", out = .out.display())]
    System {
        /// The requested folder.
        out: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Folders {
    /// `outputs/` of the data directory, and `others`.
    pub(crate) fn new(data_dir: &Path, others: Vec<PathBuf>) -> Self {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        Self { own: Some(absolute(data_dir.join("outputs"))), others: others.into_iter().map(absolute).collect() }
    }

    /// Checks and creates the folder to write to. A relative path is below `outputs/`. Removes the claim.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(crate) fn admit(&self, out: &Path, claim: Option<&str>) -> Result<PathBuf, Refusal> {
        let plain = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::RootDir | Component::CurDir);
        if out.as_os_str().is_empty() || !out.components().all(plain) {
            return Err(Refusal::Malformed(out.to_owned()));
        }
        if let Some(claim) = claim {
            return claimed(out, claim);
        }
        let target = match (&self.own, out.is_relative()) {
            (Some(own), true) => own.join(out),
            (None, true) | (_, false) => out.to_owned(),
        };
        let system = |source| Refusal::System { out: target.clone(), source };
        for root in self.own.iter().chain(&self.others) {
            if Some(root) == self.own.as_ref() && target.starts_with(root) {
                fs::create_dir_all(root).map_err(system)?;
            }
            let Ok(root) = root.canonicalize() else { continue };
            if resolved(&target).is_some_and(|place| place.starts_with(&root) && place != root) {
                fs::create_dir_all(&target).map_err(system)?;
                // Check the complete path again, so that no symbolic link leads out of the root.
                let place = target.canonicalize().map_err(system)?;
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

/// Resolves a path: follows the symbolic links of the existing part and appends the rest.
fn resolved(path: &Path) -> Option<PathBuf> {
    let there = path.ancestors().find(|part| part.symlink_metadata().is_ok())?;
    // Fails for a dangling link, which exists but cannot be followed.
    let place = there.canonicalize().ok()?;
    Some(place.join(path.strip_prefix(there).ok()?))
}

/// Accepts only a folder of the node's user: in another user's folder, that user could create symbolic links at any
/// time.
fn own_folder(place: PathBuf) -> Result<PathBuf, Refusal> {
    let meta = fs::metadata(&place).map_err(|source| Refusal::System { out: place.clone(), source })?;
    let user = rustix::process::geteuid().as_raw();
    if meta.is_dir() && meta.uid() == user {
        return Ok(place);
    }
    let why = format!("expected a folder of the node's user (id {user}), found one of the user with id {}", meta.uid());
    Err(Refusal::Unproven { out: place, why })
}

/// Checks and removes the claim in a folder of the node's user.
fn claimed(out: &Path, claim: &str) -> Result<PathBuf, Refusal> {
    let unproven = |why: String| Refusal::Unproven { out: out.to_owned(), why };
    let digits = claim.strip_prefix(CLAIM).filter(|rest| rest.len() >= 32 && claim.len() <= CLAIM_BYTES_MAX);
    if !digits.is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_alphanumeric())) {
        return Err(unproven(format!("`claim` must be {CLAIM} followed by 32 or more letters and digits")));
    }
    if !out.is_absolute() || out.canonicalize().ok().as_deref() != Some(out) {
        return Err(unproven(
            "a claim requires the absolute path of a folder on the node's machine, without symbolic links".into(),
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
            "expected a regular claim file of the node's user (id {user}), found one of the user with id {}: run `submit` as the \
             node's user",
            found.st_uid
        )));
    }
    rustix::fs::unlinkat(&folder, claim, AtFlags::empty()).map_err(system)?;
    Ok(place)
}

/// A claim file in a folder. Removed on drop, if the node has not removed it.
#[derive(Debug)]
pub(crate) struct Claim {
    file: PathBuf,
}

impl Claim {
    /// Creates a claim in a folder.
    ///
    /// # Errors
    /// The folder is not writable.
    pub(crate) fn create(folder: &Path) -> io::Result<Self> {
        let mut digits = [0; 16];
        getrandom::fill(&mut digits).map_err(|e| io::Error::other(e.to_string()))?;
        let file = folder.join(format!("{CLAIM}{}", data_encoding::HEXLOWER.encode(&digits)));
        File::options().write(true).create_new(true).open(&file)?;
        Ok(Self { file })
    }

    /// The file name, for the request to the node.
    pub(crate) fn name(&self) -> String {
        self.file.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.file);
    }
}

/// Creates a new file for writing. Removes an existing file of that name first, so that a symbolic link is not
/// followed.
///
/// # Errors
/// The system's error.
pub(crate) fn create_new(path: &Path) -> io::Result<File> {
    let create = || File::options().write(true).create_new(true).open(path);
    match create() {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => fs::remove_file(path).and_then(|()| create()),
        created => created,
    }
}

/// Checks that a folder is writable.
///
/// # Errors
/// The system's error.
pub(crate) fn probe(folder: &Path) -> io::Result<()> {
    let path = folder.join(PROBE);
    create_new(&path).and_then(|_| fs::remove_file(&path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    struct Fixture {
        dir: tempfile::TempDir,
        folders: Folders,
    }

    fn fixture() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        for name in ["data", "results", "home"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let folders = Folders::new(&dir.path().join("data"), vec![dir.path().join("results")]);
        Fixture { dir, folders }
    }

    impl Fixture {
        fn at(&self, path: &str) -> PathBuf {
            self.dir.path().canonicalize().unwrap().join(path)
        }

        fn admit(&self, path: impl AsRef<Path>) -> Result<PathBuf, Refusal> {
            self.folders.admit(path.as_ref(), None)
        }
    }

    #[test]
    fn outputs_are_written_below_the_nodes_folders_only() {
        let p = fixture();
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
    fn symbolic_links_cannot_lead_out_of_the_folders() {
        let p = fixture();
        symlink(p.at("home"), p.at("results/link")).unwrap();
        assert!(matches!(p.admit(p.at("results/link")).unwrap_err(), Refusal::Elsewhere { .. }));
        assert!(matches!(p.admit(p.at("results/link/deep")).unwrap_err(), Refusal::Elsewhere { .. }));
        symlink(p.at("home/none"), p.at("results/dangling")).unwrap();
        assert!(p.admit(p.at("results/dangling/deep")).is_err());
        assert_eq!(fs::read_dir(p.at("home")).unwrap().count(), 0, "nothing was created outside");
        // A claim applies to its folder itself, not to a link to it.
        let claim = Claim::create(&p.at("home")).unwrap();
        assert!(p.folders.admit(&p.at("results/link"), Some(&claim.name())).is_err());
        assert!(p.at("home").join(claim.name()).exists());
    }

    #[test]
    fn a_claim_admits_its_own_folder_once() {
        let p = fixture();
        let home = p.at("home");
        let claim = Claim::create(&home).unwrap();
        assert_eq!(p.folders.admit(&home, Some(&claim.name())).unwrap(), home);
        assert_eq!(fs::read_dir(&home).unwrap().count(), 0, "the claim was removed");
        let again = p.folders.admit(&home, Some(&claim.name())).unwrap_err();
        assert!(matches!(again, Refusal::Unproven { .. }), "{again}");
        let elsewhere = Claim::create(&p.at("results")).unwrap();
        assert!(p.folders.admit(&home, Some(&elsewhere.name())).is_err());
        drop(elsewhere);
        assert_eq!(fs::read_dir(p.at("results")).unwrap().count(), 0);
    }

    #[test]
    fn invalid_claims_are_rejected() {
        let p = fixture();
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
        assert!(p.folders.admit(&home, Some(&name)).is_err(), "a hard link");
        assert!(p.folders.admit(Path::new("home"), Some(&name)).is_err(), "relative");
    }

    #[test]
    fn probe_and_create_new_follow_no_symbolic_link() {
        let p = fixture();
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
