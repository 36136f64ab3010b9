//! The `omnigrpo` program.

mod cli;
mod config;
mod explain;
mod flags;
mod presets;
mod rules;
mod settings;
mod values;

use std::io::Write;
use std::process::ExitCode;

use cli::Parsed;
use explain::Problem;
use values::Resolved;

fn main() -> ExitCode {
    let problem = match cli::parse(std::env::args_os(), |name| std::env::var(name).ok()) {
        Ok(Parsed::Print(text)) => {
            // A closed pipe (`| head`) is no failure of ours.
            let _ = write!(std::io::stdout().lock(), "{text}");
            return ExitCode::SUCCESS;
        }
        Ok(Parsed::Run(resolved)) => match run(&resolved) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => Problem::from_error(&error),
        },
        Err(problem) => problem,
    };
    let _ = writeln!(std::io::stderr().lock(), "{problem}");
    ExitCode::from(problem.exit_code())
}

/// Runs a verb.
fn run(resolved: &Resolved) -> anyhow::Result<()> {
    anyhow::bail!("`{}` is not available in this build", resolved.verb.name())
}
