//! The binary `meshnode`. The code is in the library, so that tests can use it.
use std::process::ExitCode;

fn main() -> ExitCode {
    keep_memory_small();
    kernels_gpu::use_cache(&meshnode::config::cache_dir_default());
    kernels_gpu::answer_probe(); // a child process that only probes for GPUs ends here
    meshnode::cli::main(std::env::args_os())
}

/// Configures glibc's allocator. Halo strips, rows and frames are allocated by one thread and freed by another. By
/// default glibc keeps freed memory in an arena per thread and in gaps between longer-lived blocks, so that a node
/// grows for minutes. This sets a small number of arenas, and returns large blocks to the system immediately. (By
/// default glibc raises that threshold to the largest block ever freed.)
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn keep_memory_small() {
    const POOLS: libc::c_int = 4;
    /// Above the logits of small vocabularies, allocated for each token; below the halo strips of large grids.
    const LARGE_BYTES: libc::c_int = 256 << 10;
    // SAFETY: no other thread runs yet, and glibc validates the settings; a rejected setting changes nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, POOLS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn keep_memory_small() {}
