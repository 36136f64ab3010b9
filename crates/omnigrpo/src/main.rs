//! The `omnigrpo` program.

mod cli;
mod config;
mod deepspeed;
mod explain;
mod flags;
mod heap;
mod presets;
mod rules;
mod settings;
mod values;
mod verbs;

use std::io::Write;
use std::process::ExitCode;

use cli::Parsed;
use explain::Problem;

fn main() -> ExitCode {
    heap::keep();
    show_warnings();
    let problem = match cli::parse(std::env::args_os(), |name| std::env::var(name).ok()) {
        Ok(Parsed::Print(text)) => {
            // A closed pipe (`| head`) is no failure of ours.
            let _ = write!(std::io::stdout().lock(), "{text}");
            return ExitCode::SUCCESS;
        }
        Ok(Parsed::Run(resolved)) => match verbs::run(&resolved) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => Problem::from_error(&error),
        },
        Err(problem) => problem,
    };
    let _ = writeln!(std::io::stderr().lock(), "{problem}");
    ExitCode::from(problem.exit_code())
}

/// Warnings of the libraries (a reward program that is asked again, say) go to standard error; `RUST_LOG` shows more.
/// Without those of `symphonia`'s probe: it calls the first four bytes of every MP4 and MOV file junk.
fn show_warnings() {
    use tracing_subscriber::EnvFilter;
    let shown = "warn,symphonia_core::formats::probe=error";
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(shown));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();
}
