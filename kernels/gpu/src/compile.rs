//! Compiles CUDA source to machine code with NVRTC, and caches the code on disk per machine and program build.
//!
//! NVRTC takes a good part of a second per kernel, and a model has dozens. [`Compiler`] compiles the kernels of our graphs;
//! `compile/cubecl.rs` caches the kernels that CubeCL compiles itself.
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ::cubecl::prelude::KernelId;
use cudarc::driver::{result as driver, sys};
use cudarc::nvrtc::result as nvrtc;
use cudarc::nvrtc::sys::{nvrtcGetCUBIN, nvrtcGetCUBINSize, nvrtcProgram};
use kernels_models::stage::StageError;
use serde::{Deserialize, Serialize};

use crate::cache::{Key, Store};
use crate::device::{cuda, toolkit};
use crate::error::failed;

mod cubecl;

pub(crate) use cubecl::{is_started, keep, prepare};

/// The kernel cache; unset in programs that never call [`crate::use_cache`].
static STORE: OnceLock<Store> = OnceLock::new();

/// Caches compiled kernels in a folder from now on.
pub(crate) fn keep_in(dir: &Path) {
    // A second call changes nothing.
    let _ = STORE.set(Store::new(dir));
}

/// The kernel cache: its folder, the bytes in use and the limit. `None` before [`crate::use_cache`].
pub fn kernel_cache_usage() -> Option<(PathBuf, u64, u64)> {
    STORE.get().map(Store::usage).map(|(dir, used, limit)| (dir.to_path_buf(), used, limit))
}

/// A kernel as CUDA source.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub(crate) text: String,
    pub(crate) entry: EntryPoint,
}

/// The instruction that waits for the preceding kernel. Only kernels that contain it may be launched early.
pub(crate) const AWAITS: &str = "griddepcontrol.wait";

/// How a kernel is launched. A cache entry holds it in front of the code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EntryPoint {
    /// Its name in the code.
    pub(crate) name: String,
    /// Threads of a cube.
    pub(crate) units: (u32, u32, u32),
    /// Dynamic shared memory.
    pub(crate) shared_bytes: u32,
    /// The kernel itself waits for the preceding kernel, so it may be launched early.
    pub(crate) awaits: bool,
}

impl EntryPoint {
    /// The cache entry for this code: a line of JSON, then the code.
    fn with(&self, code: &[u8]) -> Result<Vec<u8>, StageError> {
        let mut kept = serde_json::to_vec(self).map_err(failed)?;
        kept.push(b'\n');
        kept.extend_from_slice(code);
        Ok(kept)
    }

    /// Parses a cache entry.
    fn split(kept: &[u8]) -> Result<(Self, &[u8]), StageError> {
        let line = kept.iter().position(|&byte| byte == b'\n').ok_or_else(|| failed("cache entry has no header"))?;
        Ok((serde_json::from_slice(&kept[..line]).map_err(failed)?, &kept[line + 1..]))
    }
}

/// Compiles kernels for one device.
pub(crate) struct Compiler {
    architecture: String,
    headers: Vec<PathBuf>,
    kept: Option<(&'static Store, Key)>,
}

impl Compiler {
    /// Loads NVRTC.
    ///
    /// # Errors
    /// NVRTC or its headers are missing, or the device does not respond.
    pub(crate) fn new(device: sys::CUdevice) -> Result<Self, StageError> {
        let toolkit = toolkit::ready().map_err(|fault| StageError::Device(fault.to_string()))?;
        let environment = Environment::of(device, &toolkit).map_err(failed)?;
        let architecture = environment.architecture.clone();
        let kept = STORE.get().and_then(|store| Some((store, environment.space("graphs")?)));
        Ok(Self { architecture, headers: toolkit.headers, kept })
    }

    /// Passes the entry point and code of a kernel to `load`, which loads it into the driver. Cached code that the driver rejects is
    /// recompiled. `source` is called only on a cache miss.
    ///
    /// # Errors
    /// `source` fails, the source does not compile, or `load` fails with freshly compiled code.
    pub(crate) fn load<T>(
        &self,
        kernel: &KernelId,
        source: impl FnOnce() -> Result<Source, StageError>,
        mut load: impl FnMut(&EntryPoint, &[u8]) -> Result<T, StageError>,
    ) -> Result<T, StageError> {
        let make = || {
            let Source { text, entry } = source()?;
            entry.with(&compile(&text, &self.architecture, &self.headers)?)
        };
        // Not by its source: CubeCL emits most kernels in a different order each time. The space includes the program's hash.
        let name = Key::of(&[kernel.stable_format().as_bytes()]);
        load_kept(self.kept, name, make, |kept| {
            let (entry, code) = EntryPoint::split(kept)?;
            load(&entry, code)
        })
    }
}

fn load_kept<T>(
    kept: Option<(&Store, Key)>,
    name: Key,
    make: impl FnOnce() -> Result<Vec<u8>, StageError>,
    mut load: impl FnMut(&[u8]) -> Result<T, StageError>,
) -> Result<T, StageError> {
    if let Some((store, space)) = kept
        && let Some(code) = store.get(space, name)
    {
        match load(&code) {
            Ok(loaded) => return Ok(loaded),
            Err(_) => store.remove(space, name),
        }
    }
    let code = make()?;
    let loaded = load(&code)?;
    if let Some((store, space)) = kept {
        store.put(space, name, &code);
    }
    Ok(loaded)
}

/// Compiles CUDA source to a cubin for an architecture such as `sm_90a`. A driver need not compile a cubin, and older drivers of
/// the same major version load it too.
///
/// # Errors
/// NVRTC's log if the source does not compile.
pub(crate) fn compile(text: &str, architecture: &str, headers: &[PathBuf]) -> Result<Vec<u8>, StageError> {
    compiled(text, architecture, headers, cubin)
}

/// Compiles CUDA source to PTX for an architecture such as `compute_90a`.
#[cfg(test)]
pub(crate) fn ptx(text: &str, architecture: &str, headers: &[PathBuf]) -> Result<Vec<u8>, StageError> {
    unsafe fn read(program: nvrtcProgram) -> Result<Vec<u8>, nvrtc::NvrtcError> {
        // SAFETY: guaranteed by the caller.
        let text = unsafe { nvrtc::get_ptx(program)? };
        Ok(text.into_iter().map(|byte| byte as u8).take_while(|&byte| byte != 0).collect())
    }
    compiled(text, architecture, headers, read)
}

fn compiled(
    text: &str,
    architecture: &str,
    headers: &[PathBuf],
    read: unsafe fn(nvrtcProgram) -> Result<Vec<u8>, nvrtc::NvrtcError>,
) -> Result<Vec<u8>, StageError> {
    let text = CString::new(text).map_err(failed)?;
    let headers = headers.iter().map(|path| format!("--include-path={}", path.display()));
    let options: Vec<String> = std::iter::once(format!("--gpu-architecture={architecture}")).chain(headers).collect();
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let program = nvrtc::create_program(text.as_c_str(), None).map_err(failed)?;
    // SAFETY: the program was just created, and is destroyed after its last use; its log is zero-terminated.
    unsafe {
        let code = match nvrtc::compile_program(program, &options) {
            Ok(()) => read(program).map_err(failed),
            Err(error) => Err(match nvrtc::get_program_log(program) {
                Ok(log) if !log.is_empty() => failed(CStr::from_ptr(log.as_ptr())),
                Ok(_) | Err(_) => failed(error),
            }),
        };
        let _ = nvrtc::destroy_program(program); // a failure only leaks memory
        code
    }
}

/// # Safety
/// The program was compiled and not destroyed.
unsafe fn cubin(program: nvrtcProgram) -> Result<Vec<u8>, nvrtc::NvrtcError> {
    let mut size = 0;
    // SAFETY: the first call writes one number, the second writes `size` bytes.
    unsafe {
        nvrtcGetCUBINSize(program, &raw mut size).result()?;
        let mut code = vec![0u8; size];
        nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result()?;
        Ok(code)
    }
}

/// What compiled code depends on besides its source.
#[derive(Clone, Debug)]
struct Environment {
    /// Hash of this program's file.
    build: Option<[u8; 32]>,
    /// As in `sm_90a`.
    architecture: String,
    /// Versions of the driver, which loads the code.
    driver: String,
    /// NVRTC and its headers, which generate the code.
    compiler: String,
}

impl Environment {
    fn of(device: sys::CUdevice, toolkit: &toolkit::Toolkit) -> Result<Self, driver::DriverError> {
        let capability = cuda::capability(device)?;
        let mut version = 0;
        // SAFETY: writes one number.
        unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
        // The driver's release, which distinguishes updates within one CUDA version; missing on WSL.
        let release = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
        let library = std::fs::metadata(&toolkit.library).ok();
        let changed = library.as_ref().and_then(|library| library.modified().ok());
        let bytes = library.map_or(0, |library| library.len());
        Ok(Self {
            build: build(),
            architecture: architecture(capability),
            driver: format!("{version} {}", release.trim()),
            compiler: format!("{toolkit:?} {bytes} {changed:?}"),
        })
    }

    /// The cache space of this environment. `None` if the program cannot be hashed.
    fn space(&self, of: &str) -> Option<Key> {
        let Self { build, architecture, driver, compiler } = self;
        Some(Key::of(&[of.as_bytes(), &(*build)?, architecture.as_bytes(), driver.as_bytes(), compiler.as_bytes()]))
    }
}

/// The NVRTC target. From Hopper on, instructions specific to one architecture need the suffix `a`.
fn architecture(capability: u32) -> String {
    format!("sm_{capability}{}", if capability >= 90 { "a" } else { "" })
}

/// The hash of this program's file, which changes with every kernel change. Computed once, on first use: 0.1 s.
fn build() -> Option<[u8; 32]> {
    static BUILD: OnceLock<Option<[u8; 32]>> = OnceLock::new();
    let hash = || {
        // An update may have removed the file; this path still opens it.
        let mut file = File::open("/proc/self/exe").or_else(|_| File::open(std::env::current_exe()?)).ok()?;
        let mut hasher = blake3::Hasher::new();
        let mut block = vec![0; 1 << 20];
        loop {
            match file.read(&mut block).ok()? {
                0 => return Some(hasher.finalize().into()),
                read => hasher.update(&block[..read]),
            };
        }
    };
    *BUILD.get_or_init(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment() -> Environment {
        Environment {
            build: build(),
            architecture: architecture(90),
            driver: "13000 580.95.05".into(),
            compiler: "NVRTC 12.9".into(),
        }
    }

    /// Loads the kernel: the loaded code, and whether it was compiled.
    fn load(store: &Store, environment: &Environment, accept: impl Fn(&[u8]) -> bool) -> (Option<Vec<u8>>, bool) {
        let mut compiled = false;
        let compile = || {
            compiled = true;
            Ok(b"code".to_vec())
        };
        let load =
            |code: &[u8]| if accept(code) { Ok(code.to_vec()) } else { Err(StageError::Device("rejected".into())) };
        let space = environment.space("graphs").expect("a build");
        let loaded = load_kept(Some((store, space)), Key::of(&[b"kernel"]), compile, load).ok();
        (loaded, compiled)
    }

    #[test]
    fn a_kernel_is_compiled_once_per_build_device_driver_and_compiler() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let code = Some(b"code".to_vec());
        assert_eq!(load(&store, &environment(), |_| true), (code.clone(), true));
        assert_eq!(load(&store, &environment(), |_| true), (code.clone(), false));
        let others = [
            Environment { build: Some([7; 32]), ..environment() },
            Environment { architecture: architecture(89), ..environment() },
            Environment { driver: "13000 580.105.08".into(), ..environment() },
            Environment { compiler: "NVRTC 13.0".into(), ..environment() },
        ];
        for other in &others {
            assert_eq!(load(&store, other, |_| true), (code.clone(), true), "{other:?}");
        }
        assert_eq!(load(&store, &environment(), |_| true), (code, false));
    }

    #[test]
    fn code_that_the_driver_rejects_is_recompiled() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let (space, name) = (environment().space("graphs").unwrap(), Key::of(&[b"kernel"]));
        store.put(space, name, b"code of a bug");
        assert_eq!(load(&store, &environment(), |code| code == b"code"), (Some(b"code".to_vec()), true));
        assert_eq!(store.get(space, name).as_deref(), Some(&b"code"[..]));
        store.remove(space, name);
        assert_eq!(load(&store, &environment(), |_| false), (None, true));
        assert_eq!(store.get(space, name), None, "code that the driver rejects is not cached");
    }

    #[test]
    fn an_entry_round_trips_with_its_code() {
        let entry = EntryPoint { name: "k".into(), units: (32, 2, 1), shared_bytes: 4096, awaits: true };
        let kept = entry.with(b"\n\0code\n").unwrap();
        assert_eq!(EntryPoint::split(&kept).unwrap(), (entry, &b"\n\0code\n"[..]));
        for damaged in [&b""[..], b"code", b"{}\ncode", &kept[1..]] {
            assert!(EntryPoint::split(damaged).is_err(), "{damaged:?}");
        }
    }

    #[test]
    fn a_build_is_identified_by_its_file() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(build(), Some(*blake3::hash(&file).as_bytes()));
    }
}
