//! `completions` and `man`: shell completion scripts and manual pages, from the flag table.

use std::path::Path;

use anyhow::Result;
use clap_complete::Shell;

use super::print;
use crate::cli::arguments;
use crate::settings::Settings;
use crate::settings::problem::Problem;

/// Prints a shell's completion script.
pub fn completions(settings: &Settings) -> Result<()> {
    let name = settings.io.shell.as_deref().unwrap_or_default();
    let shell: Shell = name.parse().map_err(|e| Problem::usage("unknown shell").got(e))?;
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut arguments::command(arguments::Shown::All), "omnigrpo", &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Writes a manual page for the program and each of its commands.
pub fn man(settings: &Settings) -> Result<()> {
    let directory = settings.io.directory.as_deref().unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(arguments::command(arguments::Shown::All), directory))
        .map_err(|e| {
            Problem::failure("the manual pages cannot be written")
                .at(directory.display().to_string())
                .got(e.to_string())
                .expected("a writable directory")
        })?;
    print(&format!("the manual pages are in {}; `man -l` shows one\n", directory.display()))
}
