//! Finding the CUDA toolkit on typical machines, modelled as folders of empty files.
use super::*;

/// A machine with its root in a temporary folder.
struct Machine {
    folder: tempfile::TempDir,
    variables: Vec<(&'static str, PathBuf)>,
}

impl Machine {
    /// `INCLUDE` stands for an `include` folder with all headers.
    fn with(files: &[&str]) -> Self {
        let machine = Self { folder: tempfile::tempdir().unwrap(), variables: Vec::new() };
        let headers = |file: &&str| HEADERS.map(|header| file.replace("INCLUDE", &format!("include/{header}")));
        let (folders, files): (Vec<&str>, Vec<&str>) = files.iter().partition(|file| file.ends_with("INCLUDE"));
        for file in folders.iter().flat_map(headers).chain(files.into_iter().map(str::to_owned)) {
            let path = machine.path(&file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, b"").unwrap();
        }
        machine
    }

    fn set(mut self, variable: &'static str, path: &str) -> Self {
        self.variables.push((variable, self.path(path)));
        self
    }

    fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn toolkits(&self) -> Vec<Toolkit> {
        let variable = |name: &str| {
            self.variables.iter().find(|(known, _)| *known == name).map(|(_, path)| path.as_os_str().to_owned())
        };
        Search { root: self.folder.path(), variable: &variable, own: Some(&self.path("own")) }.toolkits()
    }

    fn toolkit(&self, library: &str, version: Version, headers: &[&str]) -> Toolkit {
        let headers = headers.iter().map(|path| self.path(path)).collect();
        let (library, (major, minor)) = (self.path(library), version);
        let builtins = Some(library.with_file_name(format!("libnvrtc-builtins.so.{major}.{minor}")));
        Toolkit { library, builtins, version: Some(version), headers }
    }
}

#[test]
fn nvidias_installer_with_several_versions() {
    let machine = Machine::with(&[
        "usr/local/cuda-12.4/lib64/libnvrtc.so.12",
        "usr/local/cuda-12.4/lib64/libnvrtc-builtins.so.12.4",
        "usr/local/cuda-12.4/lib64/libnvrtc-builtins.so.12.4.127",
        "usr/local/cuda-12.4/INCLUDE",
        "usr/local/cuda-13.0/lib64/libnvrtc.so.13",
        "usr/local/cuda-13.0/lib64/libnvrtc-builtins.so.13.0",
        "usr/local/cuda-13.0/INCLUDE",
        "usr/local/cuda-13.0/include/cccl/nv/target",
        "usr/local/cuda-9.2/lib64/libnvrtc.so.9.2",
    ]);
    std::os::unix::fs::symlink("cuda-12.4", machine.path("usr/local/cuda")).unwrap();
    let thirteen = ["usr/local/cuda-13.0/include", "usr/local/cuda-13.0/include/cccl"];
    let expected = [
        machine.toolkit("usr/local/cuda/lib64/libnvrtc.so.12", (12, 4), &["usr/local/cuda/include"]),
        machine.toolkit("usr/local/cuda-13.0/lib64/libnvrtc.so.13", (13, 0), &thirteen),
    ];
    assert_eq!(machine.toolkits(), expected, "each once, the linked one first");
    let named = machine.set("CUDA_HOME", "usr/local/cuda-13.0");
    assert_eq!(named.toolkits()[0].version, Some((13, 0)), "the one named by CUDA_HOME is first");
}

#[test]
fn pips_wheels_of_both_layouts_in_an_environment_and_for_a_user() {
    let machine = Machine::with(&[
        "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.8",
        "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc-builtins.alt.so.12.8",
        "venv/lib/python3.12/site-packages/nvidia/cuda_runtime/include/cuda_runtime.h",
        "venv/lib/python3.12/site-packages/nvidia/cuda_runtime/include/cuda_fp16.h",
        "venv/lib/python3.12/site-packages/nvidia/cuda_runtime/include/mma.h",
        "venv/lib/python3.12/site-packages/nvidia/cuda_cccl/include/nv/target",
        "venv/lib/python3.12/site-packages/nvidia/cuda_nvcc/include/crt/mma.h",
        "home/.local/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
        "home/.local/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
        "home/.local/lib/python3.11/site-packages/nvidia/cu13/INCLUDE",
        "usr/lib/python3/dist-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "own/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "own/nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.9",
        "own/nvidia/cuda_runtime/include/cuda_runtime.h",
        "own/nvidia/cuda_runtime/include/cuda_fp16.h",
        "own/nvidia/cuda_runtime/include/mma.h",
    ]);
    let machine = machine.set("HOME", "home").set("VIRTUAL_ENV", "venv");
    let (venv, home) =
        ("venv/lib/python3.12/site-packages/nvidia", "home/.local/lib/python3.11/site-packages/nvidia/cu13");
    let at = |folder: &str, path: &str| format!("{folder}/{path}");
    let parts = ["cuda_runtime", "cuda_cccl", "cuda_nvcc"].map(|part| at(venv, &format!("{part}/include")));
    let without = Toolkit {
        library: machine.path("usr/lib/python3/dist-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
        builtins: None,
        version: None,
        headers: Vec::new(),
    };
    let expected = [
        machine.toolkit("own/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", (12, 9), &[]),
        machine.toolkit(&at(venv, "cuda_nvrtc/lib/libnvrtc.so.12"), (12, 8), &parts.each_ref().map(String::as_str)),
        without,
        machine.toolkit(&at(home, "lib/libnvrtc.so.13"), (13, 0), &[&at(home, "include")]),
    ];
    assert_eq!(machine.toolkits(), expected);
}

#[test]
fn conda_distributions_and_the_loaders_path() {
    let arch = std::env::consts::ARCH;
    let target = if arch == "aarch64" { "sbsa-linux".to_owned() } else { format!("{arch}-linux") };
    let headers = format!("conda/targets/{target}/include");
    let library = format!("usr/lib/{arch}-linux-gnu/libnvrtc.so.12");
    let machine = Machine::with(&[
        "conda/lib/libnvrtc.so.12",
        "conda/lib/libnvrtc-builtins.so.12.6",
        &headers.replace("include", "INCLUDE"),
        &library,
        &format!("usr/lib/{arch}-linux-gnu/libnvrtc-builtins.so.12.0"),
        "usr/INCLUDE",
        "elsewhere/lib64/libnvrtc.so.12",
        "elsewhere/lib64/libnvrtc-builtins.so.12.2",
        "elsewhere/INCLUDE",
    ]);
    let machine = machine.set("CONDA_PREFIX", "conda").set("LD_LIBRARY_PATH", "elsewhere/lib64");
    let expected = [
        machine.toolkit("elsewhere/lib64/libnvrtc.so.12", (12, 2), &["elsewhere/include"]),
        machine.toolkit("conda/lib/libnvrtc.so.12", (12, 6), &[&headers]),
        machine.toolkit(&library, (12, 0), &["usr/include"]),
    ];
    assert_eq!(machine.toolkits(), expected);
}

#[test]
fn a_library_and_headers_in_separate_folders() {
    let machine = Machine::with(&["wheel/lib/libnvrtc.so.12", "wheel/lib/libnvrtc-builtins.so.12.9", "merged/INCLUDE"]);
    let machine = machine.set("LD_LIBRARY_PATH", "wheel/lib").set("CUDA_PATH", "merged");
    assert_eq!(machine.toolkits(), [machine.toolkit("wheel/lib/libnvrtc.so.12", (12, 9), &["merged/include"])]);
}

fn of_version(library: &str, version: Option<Version>) -> Toolkit {
    Toolkit { library: library.into(), builtins: None, version, headers: vec!["/include".into()] }
}

#[test]
fn the_first_toolkit_that_the_driver_supports_is_chosen() {
    let (new, old) = (of_version("/13", Some((13, 5))), of_version("/12", Some((12, 9))));
    let bare = Toolkit { headers: Vec::new(), ..of_version("/bare", Some((12, 0))) };
    let found = [bare.clone(), new.clone(), old.clone()];
    assert_eq!(choose(&found, (13, 5)), Ok(&new));
    assert_eq!(choose(&found, (13, 0)), Ok(&old));
    assert_eq!(choose(&found, (12, 8)), Err(Unusable::NoHeaders("/bare".into())));
    assert_eq!(choose(&found[1..], (12, 8)), Err(Unusable::TooNew("/13".into(), (13, 5))));
    assert_eq!(choose(&[], (12, 8)), Err(Unusable::None));
    let unknown = of_version("/unknown", None);
    assert_eq!(choose(std::slice::from_ref(&unknown), (12, 0)), Ok(&unknown));
}

#[test]
fn messages_name_the_missing_part_the_search_path_and_a_fitting_version() {
    let own = Path::new("/home/a/.cache/meshnode/cuda");
    let text = explain(&Unusable::None, (12, 4), own).to_string();
    for part in [
        "CUDA 12.4",
        "libnvrtc.so.12",
        "/usr/local/cuda*",
        "--upgrade --target /home/a/.cache/meshnode/cuda",
        "'nvidia-cuda-nvrtc-cu12<12.5'",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let text = explain(&Unusable::TooNew("/13".into(), (13, 5)), (13, 0), own).to_string();
    for part in ["(/13) generates code for 13.5", "CUDA 13.0", "'nvidia-cuda-nvrtc<13.1'", "'nvidia-cuda-crt<13.1'"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(explain(&Unusable::NoHeaders("/12".into()), (12, 4), own).seen.contains("cuda_runtime.h"));
    assert!(explain(&Unusable::None, (11, 8), own).advice.contains("update NVIDIA's driver"));
    let other = of_version("/opt/cuda/lib64/libnvrtc.so.12", Some((12, 8)));
    let fault = explain_loaders_own(&Unusable::TooNew("/usr/lib/libnvrtc.so.13".into(), (13, 5)), (13, 0), &other);
    assert_eq!(fault.advice, "set LD_LIBRARY_PATH=/opt/cuda/lib64");
}

#[test]
fn the_loaders_nvrtc_is_first_with_headers_of_its_version() {
    let machine = Machine::with(&[
        "a/lib64/libnvrtc.so.12",
        "a/lib64/libnvrtc-builtins.so.12.4",
        "a/INCLUDE",
        "b/lib/libnvrtc.so.12",
    ]);
    let machine = machine.set("CUDA_HOME", "a");
    let mut found = machine.toolkits();
    let beside = Toolkit {
        library: machine.path("a/lib64/libnvrtc.so.12"),
        headers: Vec::new(),
        ..of_version("", Some((12, 4)))
    };
    prefer(&mut found, &beside, &[]);
    assert_eq!(found, [machine.toolkit("a/lib64/libnvrtc.so.12", (12, 4), &["a/include"])]);
    let bare = Toolkit { library: machine.path("b/lib/libnvrtc.so.12"), ..beside };
    prefer(&mut found, &bare, &[]);
    assert_eq!(found[0], Toolkit { headers: vec![machine.path("a/include")], ..bare.clone() });
    let older = Toolkit { version: Some((12, 0)), ..bare };
    found.remove(0);
    prefer(&mut found, &older, &[]);
    assert!(found[0].headers.is_empty(), "headers of another version are not used");
    found.remove(0);
    prefer(&mut found, &older, &[machine.path("named")]);
    assert_eq!(found[0].headers, [machine.path("named")], "headers named by the environment are used");
}

#[test]
fn headers_of_several_folders_are_merged_and_follow_the_chosen_toolkit() {
    let machine =
        Machine::with(&["one/cuda_runtime.h", "one/same.h", "two/nv/target", "two/same.h", "three/cuda_runtime.h"]);
    let links = machine.path("kernels/headers/include");
    link_headers(&links, &[machine.path("one"), machine.path("two")]).unwrap();
    assert!(links.join("cuda_runtime.h").is_file() && links.join("nv/target").is_file());
    assert_eq!(std::fs::read_link(links.join("same.h")).unwrap(), machine.path("one/same.h"));
    link_headers(&links, &[machine.path("one"), machine.path("two")]).unwrap();
    link_headers(&links, &[machine.path("three")]).unwrap();
    assert!(links.join("cuda_runtime.h").is_file() && !links.join("nv").exists());
    let left: Vec<_> = files(&machine.path("kernels/headers")).map(|(name, _)| name).collect();
    assert_eq!(left, ["include"]);
    std::fs::write(machine.path("file"), b"").unwrap();
    assert!(link_headers(&machine.path("file/include"), &[machine.path("one")]).is_err());
}
