//! The `omnigrpo` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    omnigrpo::cli::main(std::env::args_os())
}
