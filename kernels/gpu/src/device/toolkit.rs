//! Finds the parts of the CUDA toolkit that a driver does not include: NVRTC, which compiles kernels, and the CUDA headers.
//!
//! They come from NVIDIA's installer, the distribution, conda or pip, and are rarely in the loader's search path. We load NVRTC by
//! its path; cudarc then finds it by its name (`SONAME`), so `LD_LIBRARY_PATH` need not be set. CubeCL reads headers only below
//! `CUDA_PATH`: [`use_cache`] points it to a folder of ours, and [`ready`] fills that with links to the headers of the chosen
//! NVRTC.
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cubecl::cuda::install;
use cudarc::driver::sys as driver_sys;

use super::report::{Fault, Kind};
use crate::cache::{Key, create_private};

/// A version of CUDA: major, minor.
pub(crate) type Version = (u32, u32);

/// NVRTC and its headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Toolkit {
    /// NVRTC's library.
    pub(crate) library: PathBuf,
    /// The library that NVRTC loads by name when it compiles. NVRTC of CUDA 13.0 does not search its own folder.
    builtins: Option<PathBuf>,
    /// `None` if file names do not show it.
    pub(crate) version: Option<Version>,
    /// Header folders in search order; empty if none belong to the library.
    pub(crate) headers: Vec<PathBuf>,
}

/// The search path, as messages describe it.
const LOOKED_IN: &str = "searched MESHNODE_CUDA, CUDA_PATH, CUDA_HOME, LD_LIBRARY_PATH, the folder named below, VIRTUAL_ENV, \
                         CONDA_PREFIX, /usr/local/cuda*, /opt/cuda, /usr, and nvidia/* in the Python packages of /usr, \
                         /usr/local, ~/.local and ~/miniconda3 and similar";

/// Environment variables that name a toolkit.
const NAMED: [&str; 3] = ["MESHNODE_CUDA", "CUDA_PATH", "CUDA_HOME"];
/// Folders in `$HOME` for conda's base environment, in addition to `/opt/conda`.
const CONDA_HOMES: [&str; 4] = ["miniconda3", "miniforge3", "mambaforge", "anaconda3"];
/// Driver folders that are not in the loader's search path: WSL, NixOS, containers of some clouds.
const DRIVER_FOLDERS: [&str; 4] =
    ["/usr/lib/wsl/lib", "/run/opengl-driver/lib", "/usr/local/nvidia/lib64", "/usr/lib64/nvidia"];

/// Subfolders of the cache folder.
struct Folders {
    /// May hold the CUDA compiler.
    cuda: PathBuf,
    kernels: PathBuf,
    /// CubeCL's header folder, if it is ours.
    headers: Option<PathBuf>,
}

static FOLDERS: OnceLock<Folders> = OnceLock::new();
/// The toolkit that this process has loaded.
static READY: Mutex<Option<Toolkit>> = Mutex::new(None);

/// Adds `dir/cuda` to the search path for CUDA, and keeps links to headers in `dir/kernels`. Sets `CUDA_PATH` if CubeCL might
/// find the wrong headers, but only in a process with one thread: call it first in `main`.
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
        // SAFETY: no other thread reads the environment, because there is none.
        unsafe {
            if let (None, Some(named)) = (variable("MESHNODE_CUDA"), variable("CUDA_PATH")) {
                std::env::set_var("MESHNODE_CUDA", named); // still searched first, also by child processes
            }
            std::env::set_var("CUDA_PATH", &folder);
        }
        headers = Some(folder);
    }
    // A second call changes nothing.
    let _ = FOLDERS.set(Folders { cuda, kernels, headers });
}

/// An environment variable; `None` for a `CUDA_PATH` that this process or its parent has set to our headers.
fn variable(name: &str, kernels: Option<&Path>) -> Option<OsString> {
    let ours = |value: &OsString| name == "CUDA_PATH" && kernels.is_some_and(|dir| Path::new(value).starts_with(dir));
    std::env::var_os(name).filter(|value| !ours(value))
}

/// Loads the driver and a matching NVRTC, and gives CubeCL the headers. Uses no device.
///
/// # Errors
/// What is missing, where it was searched for, and the command that installs it.
pub(crate) fn ready() -> Result<Toolkit, Fault> {
    let mut ready = READY.lock();
    if let Some(toolkit) = &*ready {
        return Ok(toolkit.clone());
    }
    let fault = |seen: String, advice: String| Kind::Cuda.fault(seen, advice);
    let driver = driver_version().map_err(|why| fault(why, "install the NVIDIA driver".into()))?;
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
        chosen.load().map_err(|why| fault(why, "reinstall CUDA".into()))?;
    }
    let name_it = || format!("set CUDA_PATH to the parent folder of {}", chosen.headers[0].display());
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

/// Loads the driver and returns the CUDA version that it supports.
///
/// # Errors
/// There is no driver, or the library is not a driver.
pub(super) fn driver_version() -> Result<Version, String> {
    // SAFETY: opens a library; this runs driver code, which is why a child process probes devices.
    let there = unsafe { driver_sys::is_culib_present() };
    if !there {
        let library = |folder: &&str| Path::new(folder).join(DRIVER);
        match DRIVER_FOLDERS.iter().map(library).find(|path| path.is_file()) {
            Some(path) => open(&path)?,
            None => return Err(open(Path::new(DRIVER)).err().unwrap_or_default()),
        }
    }
    let mut version: c_int = 0;
    // SAFETY: the library is loaded; the call writes one number and needs no initialised driver.
    let answer = unsafe { driver_sys::cuDriverGetVersion(&mut version) };
    let version = u32::try_from(version).ok().filter(|version| answer.result().is_ok() && *version >= 1000);
    version
        .map(|version| (version / 1000, version % 1000 / 10))
        .ok_or_else(|| format!("{DRIVER} does not report its version"))
}

/// The driver library's name in every installation.
pub(super) const DRIVER: &str = "libcuda.so.1";
const HEADER: &str = "cuda_runtime.h";
/// Headers that kernels include, directly or indirectly.
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

/// The folders that exist, if together they hold all [`HEADERS`]; else none.
fn complete(folders: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    let folders: Vec<PathBuf> = folders.into_iter().filter(|folder| folder.is_dir()).collect();
    let has = |header: &&str| folders.iter().any(|folder| folder.join(header).is_file());
    let complete = HEADERS.iter().all(has) && folders[0].join(HEADER).is_file();
    if complete { folders } else { Vec::new() }
}

/// Inputs of the search, so that tests can search their own folders.
struct Search<'a> {
    root: &'a Path,
    variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// The folder that messages recommend to install into.
    own: Option<&'a Path>,
}

impl Search<'_> {
    /// Every NVRTC found, those named by environment variables first.
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

    /// Headers in a folder that an environment variable names, even without a library.
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

/// The toolkits in a folder: it may be a toolkit, a folder of Python packages, or the prefix of a Python installation.
fn toolkits_in(folder: &Path) -> Vec<Toolkit> {
    let mut found: Vec<Toolkit> = toolkit_at(folder).into_iter().collect();
    let mut wheels = vec![folder.to_path_buf(), folder.join("nvidia")];
    for (_, python) in
        ["lib", "lib64"].iter().flat_map(|lib| files(&folder.join(lib))).filter(|(n, _)| n.starts_with("python3"))
    {
        wheels.extend(["site-packages", "dist-packages"].map(|packages| python.join(packages).join("nvidia")));
    }
    for nvidia in wheels {
        // From CUDA 13 on, all wheels of a major version share one folder; before, each wheel has its own.
        found.extend(latest_first(&nvidia, "cu").iter().filter_map(|(_, path)| toolkit_at(path)));
        if let Some(toolkit) = library_in(&nvidia.join("cuda_nvrtc/lib")) {
            let parts = ["cuda_runtime", "cuda_cccl", "cuda_nvcc"];
            found.push(toolkit.with_headers(parts.map(|part| nvidia.join(part).join("include"))));
        }
    }
    found
}

/// A toolkit folder, with library and header folders below it.
fn toolkit_at(folder: &Path) -> Option<Toolkit> {
    let arch = std::env::consts::ARCH;
    let target = if arch == "aarch64" { "targets/sbsa-linux".to_owned() } else { format!("targets/{arch}-linux") };
    let libraries = ["lib64".into(), "lib".into(), format!("{target}/lib"), format!("lib/{arch}-linux-gnu")];
    let toolkit = libraries.iter().find_map(|part| library_in(&folder.join(part)))?;
    let includes = ["include".into(), format!("{target}/include")].map(|part| folder.join(part));
    let headers = includes.into_iter().find(|path| path.join(HEADER).is_file());
    Some(toolkit.with_headers(headers.into_iter().flat_map(|path| [path.clone(), path.join("cccl")])))
}

/// NVRTC in a folder, under a name that cudarc looks for. The name of its builtins library shows the version.
fn library_in(folder: &Path) -> Option<Toolkit> {
    let library = names().into_iter().map(|name| folder.join(name)).find(|path| path.is_file())?;
    let major: u32 = library.extension()?.to_str()?.parse().ok()?;
    let beside = latest_first(folder, "libnvrtc-builtins.so.").into_iter().find(|((of, _), _)| *of == major);
    let (version, builtins) = beside.unzip();
    Some(Toolkit { library, builtins, version, headers: Vec::new() })
}

/// The versioned file names that cudarc asks the loader for, from major version 12 on.
fn names() -> Vec<String> {
    let all = cudarc::get_lib_name_candidates("nvrtc");
    let has_major = |name: &String| {
        name.strip_prefix("libnvrtc.so.").is_some_and(|major| major.parse::<u32>().is_ok_and(|m| m >= 12))
    };
    let mut names: Vec<String> = all.into_iter().filter(has_major).collect();
    names.dedup();
    names
}

/// Entries of a folder named by a prefix and a version, such as `cuda-12.4`, the latest version first.
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

/// Why no usable NVRTC was found.
#[derive(Debug, PartialEq, Eq)]
enum Unusable {
    None,
    NoHeaders(PathBuf),
    TooNew(PathBuf, Version),
}

/// The first toolkit that is complete and not newer than the driver: a driver runs code for its own CUDA version and older ones.
///
/// # Errors
/// Why the first toolkit cannot be used.
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
        let seen = format!("the driver supports CUDA {major}.{minor}, but kernels need 12.0 or later");
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

/// The NVRTC in the loader's search path is unusable but hides a usable one; a process cannot override that for itself.
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
                    "found a driver (CUDA {major}.{minor}) but not NVRTC ({libraries}), which compiles kernels; {LOOKED_IN}"
                )
            }
            Self::NoHeaders(library) => {
                let (library, headers) = (library.display(), HEADERS.join(", "));
                format!("found NVRTC ({library}) but not the headers of its version ({headers}); {LOOKED_IN}")
            }
            Self::TooNew(library, (newer, minor_newer)) => {
                let library = library.display();
                format!(
                    "the driver supports CUDA {major}.{minor} and older, but NVRTC ({library}) generates code for {newer}.{minor_newer}"
                )
            }
        }
    }
}

/// The NVRTC in the loader's search path. It stays loaded.
fn loaders_own() -> Option<Toolkit> {
    for name in cudarc::get_lib_name_candidates("nvrtc") {
        let name = CString::new(name).ok()?;
        // SAFETY: opens a library that is made to be opened this way, and never closes it.
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
    // SAFETY: `dladdr` accepts any address; the name belongs to a library that stays loaded.
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
    // SAFETY: `nvrtcVersion` has this type in every version of NVRTC, and writes two numbers.
    let answer = unsafe { std::mem::transmute::<*mut c_void, NvrtcVersion>(entry)(&mut major, &mut minor) };
    (answer == 0).then_some(()).and_then(|()| Some((u32::try_from(major).ok()?, u32::try_from(minor).ok()?)))
}

/// Moves the NVRTC in the loader's search path to the front, because cudarc will use it. Its headers are those beside it, else
/// those of a toolkit of the same version, else the ones named by an environment variable.
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
    // SAFETY: opens a library that is made to be opened this way, and never closes it; the error text is copied immediately.
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

/// Fills `folder` with links to everything in `headers`; for equal names the first folder wins. Safe against other processes
/// that do the same at the same time.
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
        std::fs::remove_dir_all(left)?; // left by a killed process with the same id
    }
    std::fs::create_dir(&new)?;
    for (name, path) in headers.iter().flat_map(|folder| files(folder)) {
        match std::os::unix::fs::symlink(path, new.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
            Err(_) | Ok(()) => {}
        }
    }
    // The old folder belongs to another toolkit: it is removed once the new one is in place.
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

/// Whether the process has one thread; `false` if `/proc` does not show it.
fn is_only_thread() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}

/// Loads NVRTC from a folder.
#[cfg(test)]
pub(crate) fn load_from(folder: &Path) -> Result<Toolkit, String> {
    let found = toolkits_in(folder).into_iter().find(|toolkit| !toolkit.headers.is_empty());
    let toolkit = found.ok_or_else(|| format!("no NVRTC with headers in {}", folder.display()))?;
    toolkit.load().map(|()| toolkit)
}

#[cfg(test)]
mod tests;
