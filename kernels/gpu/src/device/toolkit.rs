//! Where the parts of CUDA are that a driver does not bring: NVRTC, which compiles kernels, and the headers that they include.
//!
//! People have them from NVIDIA's installer, their distribution, conda or pip, rarely where the loader looks. A library that was
//! loaded by its path is found again by its name (its `SONAME`), which is how cudarc asks for it: so nobody has to set
//! `LD_LIBRARY_PATH`. CubeCL reads headers below `CUDA_PATH` only; [`use_cache`] names a folder of ours there, which
//! [`ready`] fills with links to the headers that belong to the NVRTC that was chosen.
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use cubecl::cuda::install;
use cudarc::driver::sys as driver_sys;

use super::{Fault, Kind};
use crate::cache::{Key, create_private};

/// A version of CUDA: major, minor.
pub(crate) type Version = (u32, u32);

/// NVRTC and its headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Toolkit {
    /// NVRTC's library.
    pub(crate) library: PathBuf,
    /// The library that NVRTC loads when it compiles, by its name. That of CUDA 13.0 does not look beside itself.
    builtins: Option<PathBuf>,
    /// `None` where file names do not show it.
    pub(crate) version: Option<Version>,
    /// Folders of headers in the order in which they are searched; empty where none belong to the library.
    pub(crate) headers: Vec<PathBuf>,
}

/// What is looked for and where, as messages say it.
const LOOKED_IN: &str = "looked in MESHNODE_CUDA, CUDA_PATH, CUDA_HOME, LD_LIBRARY_PATH, the folder named below, VIRTUAL_ENV, \
                         CONDA_PREFIX, /usr/local/cuda*, /opt/cuda, /usr, and nvidia/* in the Python packages of /usr, \
                         /usr/local, ~/.local and ~/miniconda3 and its kin";

/// Variables by which people name a toolkit.
const NAMED: [&str; 3] = ["MESHNODE_CUDA", "CUDA_PATH", "CUDA_HOME"];
/// Folders below which conda keeps its base environment, beside `/opt/conda`.
const CONDA_HOMES: [&str; 4] = ["miniconda3", "miniforge3", "mambaforge", "anaconda3"];
/// Where drivers are whose packages do not tell the loader: WSL, NixOS, containers of some clouds.
const DRIVER_FOLDERS: [&str; 4] =
    ["/usr/lib/wsl/lib", "/run/opengl-driver/lib", "/usr/local/nvidia/lib64", "/usr/lib64/nvidia"];

/// Folders below the one that keeps what GPUs need.
struct Folders {
    /// Where CUDA's compiler may be.
    cuda: PathBuf,
    kernels: PathBuf,
    /// Where CubeCL looks for headers, if that is ours.
    headers: Option<PathBuf>,
}

static FOLDERS: OnceLock<Folders> = OnceLock::new();
/// What this process uses, once it was loaded.
static READY: Mutex<Option<Toolkit>> = Mutex::new(None);

/// Looks for CUDA below `dir/cuda` too, and keeps links to headers in `dir/kernels`. Sets `CUDA_PATH` where CubeCL would look in the
/// wrong place, if this is the process's only thread: call it first in `main`.
pub(super) fn use_cache(dir: &Path) {
    let (cuda, kernels) = (dir.join("cuda"), dir.join("kernels"));
    let variable = |name: &str| variable(name, Some(&kernels));
    let found = Search { root: Path::new("/"), variable: &variable, own: Some(&cuda) }.toolkits();
    let canonical = |path: &Path| path.canonicalize().ok();
    let default = install::cuda_path().and_then(|path| canonical(&path.join("include")));
    let elsewhere = found.iter().any(|t| t.headers.first().and_then(|first| canonical(first)) != default);
    let mut headers = None;
    if elsewhere && is_only_thread() {
        let all: Vec<&[u8]> = found.iter().flat_map(|t| &t.headers).map(|path| path.as_os_str().as_bytes()).collect();
        let folder = kernels.join(format!("headers-{}", Key::of(&all).hex(16)));
        // SAFETY: no other thread reads the environment, for there is none.
        unsafe {
            if let (None, Some(named)) = (variable("MESHNODE_CUDA"), variable("CUDA_PATH")) {
                std::env::set_var("MESHNODE_CUDA", named); // still the first place to look at, also for child processes
            }
            std::env::set_var("CUDA_PATH", &folder);
        }
        headers = Some(folder);
    }
    // A second call changes nothing.
    let _ = FOLDERS.set(Folders { cuda, kernels, headers });
}

/// A variable of the environment, unless it is `CUDA_PATH` as this program or one that started it set it.
fn variable(name: &str, kernels: Option<&Path>) -> Option<OsString> {
    let ours = |value: &OsString| name == "CUDA_PATH" && kernels.is_some_and(|dir| Path::new(value).starts_with(dir));
    std::env::var_os(name).filter(|value| !ours(value))
}

/// Loads the driver and the NVRTC that is used with it, and shows CubeCL its headers. Touches no device.
///
/// # Errors
/// What is missing, where it was looked for, and the command that installs it.
pub(crate) fn ready() -> Result<Toolkit, Fault> {
    let mut ready = READY.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(toolkit) = &*ready {
        return Ok(toolkit.clone());
    }
    let fault = |seen: String, advice: String| Kind::Cuda.fault(seen, advice);
    let driver = driver_version().map_err(|why| fault(why, "install NVIDIA's driver".into()))?;
    let folders = FOLDERS.get();
    let variable = |name: &str| variable(name, folders.map(|f| f.kernels.as_path()));
    let search = Search { root: Path::new("/"), variable: &variable, own: folders.map(|f| f.cuda.as_path()) };
    let mut found = search.toolkits();
    let loaders = loaders_own();
    if let Some(own) = &loaders {
        prefer(&mut found, own, &search.named_headers());
    }
    let cuda = folders.map_or_else(|| PathBuf::from("CUDA"), |f| f.cuda.clone());
    let chosen = match (choose(&found[..found.len().min(1)], driver), choose(&found, driver)) {
        (Err(what), Ok(other)) if loaders.is_some() => return Err(explain_loaders_own(&what, driver, other)),
        (_, chosen) => chosen.map_err(|what| explain(&what, driver, &cuda))?.clone(),
    };
    if loaders.is_none() {
        chosen.load().map_err(|why| fault(why, "install CUDA again".into()))?;
    }
    let name_it = || format!("set CUDA_PATH to the folder above {}", chosen.headers[0].display());
    if let Some(folder) = folders.and_then(|f| f.headers.as_deref()) {
        let failed = |error| fault(format!("cannot link CUDA's headers in {}: {error}", folder.display()), name_it());
        link_headers(&folder.join("include"), &chosen.headers).map_err(failed)?;
    }
    match install::cuda_path().map(|path| path.join("include")) {
        Some(path) if path.join(HEADER).is_file() => {}
        Some(path) => return Err(fault(format!("no {HEADER} in {}", path.display()), name_it())),
        None => return Err(fault("CUDA_PATH is not set".into(), name_it())),
    }
    Ok(ready.insert(chosen).clone())
}

/// Loads the driver, and gives the version of CUDA whose code it runs.
///
/// # Errors
/// There is no driver, or it is none.
pub(super) fn driver_version() -> Result<Version, String> {
    // SAFETY: opens a library; the driver's own code runs, which is why devices are looked for in a child process.
    let there = unsafe { driver_sys::is_culib_present() };
    if !there {
        let library = |folder: &&str| Path::new(folder).join(DRIVER);
        match DRIVER_FOLDERS.iter().map(library).find(|path| path.is_file()) {
            Some(path) => open(&path)?,
            None => return Err(open(Path::new(DRIVER)).err().unwrap_or_default()),
        }
    }
    let mut version: c_int = 0;
    // SAFETY: the library is there; the call writes one number and needs no initialised driver.
    let answer = unsafe { driver_sys::cuDriverGetVersion(&mut version) };
    let version = u32::try_from(version).ok().filter(|version| answer.result().is_ok() && *version >= 1000);
    version
        .map(|version| (version / 1000, version % 1000 / 10))
        .ok_or_else(|| format!("{DRIVER} does not say its version"))
}

/// The driver's library, as every installation names it.
pub(super) const DRIVER: &str = "libcuda.so.1";
const HEADER: &str = "cuda_runtime.h";
/// Headers that kernels include, directly or not.
const HEADERS: [&str; 4] = [HEADER, "cuda_fp16.h", "mma.h", "crt/mma.h"];

impl Toolkit {
    fn with_headers(self, folders: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { headers: complete(folders), ..self }
    }

    fn load(&self) -> Result<(), String> {
        self.builtins.as_deref().map_or(Ok(()), open)?;
        open(&self.library)
    }
}

/// Those of the folders that there are, if they hold all headers that kernels include.
fn complete(folders: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    let folders: Vec<PathBuf> = folders.into_iter().filter(|folder| folder.is_dir()).collect();
    let has = |header: &&str| folders.iter().any(|folder| folder.join(header).is_file());
    let complete = HEADERS.iter().all(has) && folders[0].join(HEADER).is_file();
    if complete { folders } else { Vec::new() }
}

/// What the search depends on, so that tests can search folders of their own.
struct Search<'a> {
    root: &'a Path,
    variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// The folder that messages tell people to fill.
    own: Option<&'a Path>,
}

impl Search<'_> {
    /// Every NVRTC that is found, the one that was asked for first.
    fn toolkits(&self) -> Vec<Toolkit> {
        let mut known = BTreeSet::new();
        let mut found: Vec<Toolkit> = self.folders().iter().flat_map(|folder| toolkits_in(folder)).collect();
        found
            .retain(|toolkit| known.insert(toolkit.library.canonicalize().unwrap_or_else(|_| toolkit.library.clone())));
        let named = self.named_headers();
        for toolkit in found.iter_mut().filter(|toolkit| toolkit.headers.is_empty()) {
            toolkit.headers.clone_from(&named);
        }
        found
    }

    /// Headers that somebody named without a library beside them.
    fn named_headers(&self) -> Vec<PathBuf> {
        let folders = NAMED.into_iter().filter_map(self.variable).map(|folder| Path::new(&folder).join("include"));
        folders
            .map(|folder| complete([folder.clone(), folder.join("cccl")]))
            .find(|found| !found.is_empty())
            .unwrap_or_default()
    }

    fn folders(&self) -> Vec<PathBuf> {
        let variable = |name: &str| (self.variable)(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let mut folders: Vec<PathBuf> = NAMED.into_iter().filter_map(variable).collect();
        let libraries = (self.variable)("LD_LIBRARY_PATH").unwrap_or_default();
        for library in std::env::split_paths(&libraries).filter(|path| path.is_absolute()) {
            folders.extend(library.ancestors().skip(1).take(2).map(Path::to_path_buf));
        }
        folders.extend(self.own.map(Path::to_path_buf));
        folders.extend(["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable));
        folders.push(self.root.join("usr/local/cuda"));
        folders.extend(latest_first(&self.root.join("usr/local"), "cuda-").into_iter().map(|(_, path)| path));
        folders.extend(["opt/cuda", "usr", "usr/local", "opt/conda"].map(|folder| self.root.join(folder)));
        if let Some(home) = variable("HOME") {
            folders.push(home.join(".local"));
            folders.extend(CONDA_HOMES.map(|conda| home.join(conda)));
        }
        folders
    }
}

/// What a folder holds as a toolkit, as a folder of Python packages, or as the prefix of a Python.
fn toolkits_in(folder: &Path) -> Vec<Toolkit> {
    let mut found: Vec<Toolkit> = toolkit_at(folder).into_iter().collect();
    let mut wheels = vec![folder.to_path_buf(), folder.join("nvidia")];
    for (_, python) in
        ["lib", "lib64"].iter().flat_map(|lib| files(&folder.join(lib))).filter(|(n, _)| n.starts_with("python3"))
    {
        wheels.extend(["site-packages", "dist-packages"].map(|packages| python.join(packages).join("nvidia")));
    }
    for nvidia in wheels {
        // From CUDA 13 on a wheel's files are below one folder for each major version; before, each wheel has a folder.
        found.extend(latest_first(&nvidia, "cu").iter().filter_map(|(_, path)| toolkit_at(path)));
        if let Some(toolkit) = library_in(&nvidia.join("cuda_nvrtc/lib")) {
            let parts = ["cuda_runtime", "cuda_cccl", "cuda_nvcc"];
            found.push(toolkit.with_headers(parts.map(|part| nvidia.join(part).join("include"))));
        }
    }
    found
}

/// A folder with libraries and headers below it.
fn toolkit_at(folder: &Path) -> Option<Toolkit> {
    let arch = std::env::consts::ARCH;
    let target = if arch == "aarch64" { "targets/sbsa-linux".to_owned() } else { format!("targets/{arch}-linux") };
    let libraries = ["lib64".into(), "lib".into(), format!("{target}/lib"), format!("lib/{arch}-linux-gnu")];
    let toolkit = libraries.iter().find_map(|part| library_in(&folder.join(part)))?;
    let includes = ["include".into(), format!("{target}/include")].map(|part| folder.join(part));
    let headers = includes.into_iter().find(|path| path.join(HEADER).is_file());
    Some(toolkit.with_headers(headers.into_iter().flat_map(|path| [path.clone(), path.join("cccl")])))
}

/// NVRTC in a folder, under a name that cudarc looks for. Its version is in the name of the library beside it.
fn library_in(folder: &Path) -> Option<Toolkit> {
    let library = names().into_iter().map(|name| folder.join(name)).find(|path| path.is_file())?;
    let major: u32 = library.extension()?.to_str()?.parse().ok()?;
    let beside = latest_first(folder, "libnvrtc-builtins.so.").into_iter().find(|((of, _), _)| *of == major);
    let (version, builtins) = beside.unzip();
    Some(Toolkit { library, builtins, version, headers: Vec::new() })
}

/// File names with a major version, as cudarc asks the loader for them.
fn names() -> Vec<String> {
    let all = cudarc::get_lib_name_candidates("nvrtc");
    let has_major = |name: &String| {
        name.strip_prefix("libnvrtc.so.").is_some_and(|major| major.parse::<u32>().is_ok_and(|m| m >= 12))
    };
    let mut names: Vec<String> = all.into_iter().filter(has_major).collect();
    names.dedup();
    names
}

/// What is in a folder under a prefix and a version, such as `cuda-12.4`.
fn latest_first(folder: &Path, prefix: &str) -> Vec<(Version, PathBuf)> {
    let versioned = |(name, path): (String, PathBuf)| Some((version(name.strip_prefix(prefix)?)?, path));
    let mut all: Vec<(Version, PathBuf)> = files(folder).filter_map(versioned).collect();
    all.sort_by(|a, b| (b.0, &a.1).cmp(&(a.0, &b.1)));
    all
}

fn files(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> + use<> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
}

/// `12.4.127` is 12.4; `13` is 13.0.
fn version(text: &str) -> Option<Version> {
    let mut parts = text.split('.');
    let major = parts.next()?.parse().ok()?;
    Some((major, parts.next().map_or(Some(0), |minor| minor.parse().ok())?))
}

/// Why no NVRTC can be used.
#[derive(Debug, PartialEq, Eq)]
enum Unusable {
    None,
    NoHeaders(PathBuf),
    TooNew(PathBuf, Version),
}

/// The first that is complete and not newer than the driver, which runs the code of its own version of CUDA and of older ones. If there
/// is none, what keeps the first from being used.
fn choose(found: &[Toolkit], driver: Version) -> Result<&Toolkit, Unusable> {
    let fits = |toolkit: &Toolkit| match toolkit.version {
        _ if toolkit.headers.is_empty() => Err(Unusable::NoHeaders(toolkit.library.clone())),
        Some(version) if version > driver => Err(Unusable::TooNew(toolkit.library.clone(), version)),
        Some(_) | None => Ok(()),
    };
    let first = found.first().map_or(Err(Unusable::None), fits).err().unwrap_or(Unusable::None);
    found.iter().find(|toolkit| fits(toolkit).is_ok()).ok_or(first)
}

fn explain(what: &Unusable, (major, minor): Version, own: &Path) -> Fault {
    if major < 12 {
        let seen = format!("the driver is of CUDA {major}.{minor}, kernels need 12.0");
        return Kind::Cuda.fault(seen, "update NVIDIA's driver to 525 or later; until then use vulkan");
    }
    let suffix = if major == 12 { "-cu12" } else { "" };
    let below = format!("{major}.{}", minor + 1);
    let parts = ["nvrtc", "runtime", "cccl", if major == 12 { "nvcc" } else { "crt" }];
    let wheels: Vec<String> = parts.iter().map(|part| format!("'nvidia-cuda-{part}{suffix}<{below}'")).collect();
    let (own, wheels) = (own.display(), wheels.join(" "));
    let install = format!("python3 -m pip install --upgrade --target {own} {wheels}");
    Kind::Cuda
        .fault(what.seen((major, minor)), format!("{install}, or install CUDA {major}.{minor}; until then use vulkan"))
}

/// The loader's own, which cannot be passed over from inside a process, is in the way of another one.
fn explain_loaders_own(what: &Unusable, driver: Version, other: &Toolkit) -> Fault {
    let folder = other.library.parent().unwrap_or(Path::new("/")).display();
    let seen = format!("{}, and the loader finds it first", what.seen(driver));
    Kind::Cuda.fault(seen, format!("set LD_LIBRARY_PATH={folder}"))
}

impl Unusable {
    fn seen(&self, (major, minor): Version) -> String {
        match self {
            Self::None => {
                let libraries = names().join(" or ");
                format!(
                    "a driver (CUDA {major}.{minor}) is here, NVRTC ({libraries}), which compiles kernels, is not; {LOOKED_IN}"
                )
            }
            Self::NoHeaders(library) => {
                let (library, headers) = (library.display(), HEADERS.join(", "));
                format!("NVRTC is here ({library}), headers of its version ({headers}) are not; {LOOKED_IN}")
            }
            Self::TooNew(library, (newer, minor_newer)) => {
                let library = library.display();
                format!(
                    "the driver runs code of CUDA {major}.{minor} and older, NVRTC ({library}) makes code of {newer}.{minor_newer}"
                )
            }
        }
    }
}

/// The NVRTC that the loader finds by itself, which stays loaded.
fn loaders_own() -> Option<Toolkit> {
    for name in cudarc::get_lib_name_candidates("nvrtc") {
        let name = CString::new(name).ok()?;
        // SAFETY: opens a library that is meant to be opened, and never closes it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            continue;
        }
        // SAFETY: the handle is open.
        let entry = unsafe { libc::dlsym(handle, c"nvrtcVersion".as_ptr()) };
        let (library, version) = (path_of(entry)?, version_of(entry));
        return Some(Toolkit { library, builtins: None, version, headers: Vec::new() });
    }
    None
}

/// The file that a function was loaded from.
fn path_of(function: *const c_void) -> Option<PathBuf> {
    // SAFETY: plain data, filled by the call.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked about; the name belongs to a library that stays loaded.
    unsafe {
        if function.is_null() || libc::dladdr(function, &mut found) == 0 || found.dli_fname.is_null() {
            return None;
        }
        Some(PathBuf::from(std::ffi::OsStr::from_bytes(CStr::from_ptr(found.dli_fname).to_bytes())))
    }
}

fn version_of(entry: *mut c_void) -> Option<Version> {
    type NvrtcVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    if entry.is_null() {
        return None;
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the function of this name has this type in every version of NVRTC, and writes two numbers.
    let answer = unsafe { std::mem::transmute::<*mut c_void, NvrtcVersion>(entry)(&mut major, &mut minor) };
    (answer == 0).then_some(()).and_then(|()| Some((u32::try_from(major).ok()?, u32::try_from(minor).ok()?)))
}

/// Puts the loader's own first: cudarc will take it. Its headers are those beside it, else those of a toolkit of its version, else
/// those that were named.
fn prefer(found: &mut Vec<Toolkit>, own: &Toolkit, named: &[PathBuf]) {
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let library = canonical(&own.library);
    let same = found.iter().position(|t| canonical(&t.library) == library);
    let beside = library.ancestors().skip(2).take(3).flat_map(toolkits_in).find(|t| canonical(&t.library) == library);
    let mut first = same.map(|i| found.remove(i)).or(beside).unwrap_or_else(|| own.clone());
    if first.headers.is_empty() {
        let of_its_version = found.iter().find(|t| t.version == own.version && !t.headers.is_empty());
        first.headers = of_its_version.map_or_else(|| named.to_vec(), |t| t.headers.clone());
    }
    found.insert(0, Toolkit { version: own.version, ..first });
}

/// Loads a library by its path or name, for the life of the process.
fn open(path: &Path) -> Result<(), String> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: opens a library that is meant to be opened, and never closes it; the text of an error is copied at once.
    unsafe {
        if libc::dlopen(name.as_ptr(), libc::RTLD_NOW).is_null() {
            let why: *const c_char = libc::dlerror();
            let why = if why.is_null() {
                "no reason given".into()
            } else {
                CStr::from_ptr(why).to_string_lossy().into_owned()
            };
            return Err(format!("{} cannot be loaded ({why})", path.display()));
        }
    }
    Ok(())
}

/// Makes a folder of links to all that is in `headers`; where two have a name, the first one's counts. Processes that do the same at
/// the same time do not disturb each other.
fn link_headers(folder: &Path, headers: &[PathBuf]) -> std::io::Result<()> {
    let first = headers[0].join(HEADER);
    if std::fs::read_link(folder.join(HEADER)).is_ok_and(|target| target == first) && folder.join(HEADER).is_file() {
        return Ok(());
    }
    let parent = folder.parent().unwrap_or(folder);
    create_private(parent)?;
    let process = std::process::id();
    let (new, old) = (parent.join(format!("new-{process}")), parent.join(format!("old-{process}")));
    for left in [&new, &old].into_iter().filter(|path| path.exists()) {
        std::fs::remove_dir_all(left)?; // of a process of the same number that was killed
    }
    std::fs::create_dir(&new)?;
    for (name, path) in headers.iter().flat_map(|folder| files(folder)) {
        match std::os::unix::fs::symlink(path, new.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
            Err(_) | Ok(()) => {}
        }
    }
    // What was there belongs to another choice: it stays until the new one is in its place.
    let moved = std::fs::rename(folder, &old).is_ok();
    let done = std::fs::rename(&new, folder);
    if moved {
        std::fs::remove_dir_all(&old)?;
    }
    if done.is_err() {
        std::fs::remove_dir_all(&new)?; // another process was first
    }
    if folder.join(HEADER).is_file() { Ok(()) } else { done }
}

/// Whether the process has one thread, as far as that can be seen.
fn is_only_thread() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}

/// Loads NVRTC out of a folder.
#[cfg(test)]
pub(crate) fn load_from(folder: &Path) -> Result<Toolkit, String> {
    let found = toolkits_in(folder).into_iter().find(|toolkit| !toolkit.headers.is_empty());
    let toolkit = found.ok_or_else(|| format!("no NVRTC with headers in {}", folder.display()))?;
    toolkit.load().map(|()| toolkit)
}

#[cfg(test)]
mod tests;
