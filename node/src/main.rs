//! The program `meshnode`: all of it is in the library, so that tests can reach it.
use std::process::ExitCode;

fn main() -> ExitCode {
    limit_pools();
    kernels_burn::answer_probe(); // a child that only looks for GPUs ends here
    meshnode::cli::main(std::env::args_os())
}

/// Strips, rows and frames are made by one thread and dropped by another. Left to itself glibc keeps what was dropped in a
/// pool for nearly each thread, and a node on many cores grows for minutes: here there are few pools.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn limit_pools() {
    const POOLS: libc::c_int = 4;
    // SAFETY: no other thread runs yet, and glibc checks the setting; a refusal changes nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, POOLS);
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn limit_pools() {}
