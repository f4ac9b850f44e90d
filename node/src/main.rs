//! The program `meshnode`: all of it is in the library, so that tests can reach it.
use std::process::ExitCode;

fn main() -> ExitCode {
    kernels_burn::answer_probe(); // a child that only looks for GPUs ends here
    meshnode::cli::main(std::env::args_os())
}
