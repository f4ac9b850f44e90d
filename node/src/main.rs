//! The program `meshnode`: all of it is in the library, so that tests can reach it.
use std::process::ExitCode;

fn main() -> ExitCode {
    keep_memory_small();
    kernels_gpu::use_cache(&meshnode::config::cache_dir_default());
    kernels_gpu::answer_probe(); // a child that only looks for GPUs ends here
    meshnode::cli::main(std::env::args_os())
}

/// Strips, rows and frames are made by one thread and dropped by another. Left to itself glibc keeps what was dropped in a
/// pool for nearly each thread, and in holes between what lives longer, so that a node grows for minutes: here there are few
/// pools, and what is large goes back to the system at once. (Left to itself the bound for that rises to the largest block
/// that was ever given back.)
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn keep_memory_small() {
    const POOLS: libc::c_int = 4;
    /// Above the logits of small vocabularies, which come and go with each token; below the strips of grids that matter.
    const LARGE_BYTES: libc::c_int = 256 << 10;
    // SAFETY: no other thread runs yet, and glibc checks the settings; a refusal changes nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, POOLS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn keep_memory_small() {}
