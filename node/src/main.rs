//! The program `meshnode`: all of it is in the library, so that tests can reach it.
use std::process::ExitCode;

fn main() -> ExitCode {
    give_memory_back();
    kernels_burn::answer_probe(); // a child that only looks for GPUs ends here
    meshnode::cli::main(std::env::args_os())
}

/// Strips, rows and frames are of some hundred kilobytes, made by one thread and dropped by another. Left to itself glibc
/// keeps such blocks in a pool for each thread, and the program grows for minutes: here large blocks go back to the system
/// when they are dropped, and there are few pools.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn give_memory_back() {
    const LARGE: libc::c_int = 256 << 10;
    const POOLS: libc::c_int = 4;
    // SAFETY: no other thread runs yet, and both are settings that glibc checks; a refusal changes nothing.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        libc::mallopt(libc::M_ARENA_MAX, POOLS);
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn give_memory_back() {}
