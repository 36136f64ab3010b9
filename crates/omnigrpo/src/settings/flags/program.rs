//! The program itself.

use super::*;
use Kind::{Bool, Choice, Path};

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row("config", Path, NOWHERE, SET)
        .help(
            "YAML file of settings with the same names; flags take precedence. Settings of other commands in it \
             are ignored, so one file can serve `data check` and `train`.",
        )
        .unset("")
        .command_line_only()
        .free(Verb::ALL),
    row("preset", Choice(crate::settings::presets::words), NOWHERE, SET)
        .help("Settings of a source system; `--config` and flags take precedence.")
        .unset("none")
        .free(Verb::ALL),
    row(
        "print_config",
        Bool,
        Place { field: "", set: |_, v| take::<bool>(v).map(drop), get: |_| Some(Value::Bool(false)) },
        SET,
    )
    .help(
        "Print every setting of this run and where it comes from, then stop. The output is a `--config` \
             file.",
    )
    .command_line_only()
    .free(Verb::ALL),
    row(
        "threads",
        int(1, 4096),
        at!(threads),
        &[Train, Sft, Generate, Score, Eval, DataCheck, RewardsRun, Export, Doctor, Demo, Bench],
    )
    .help("Threads for computing.")
    .unset("all cores")
    .free(Verb::ALL),
];
