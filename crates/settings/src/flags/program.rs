//! The program itself.

use omnigrpo_train::{GradientSum, Shard};

use super::*;
use crate::Backend;
use crate::names::words;
use Kind::{Bool, Choice, Path, Text};

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row("config", Path, NOWHERE, SET)
        .help(
            "YAML file of settings with the same names; flags take precedence. Settings of other commands in it \
             are ignored, so one file can serve `data check` and `train`.",
        )
        .unset("")
        .command_line_only()
        .free(Verb::ALL)
        .per_rank(),
    row("preset", Choice(crate::presets::words), NOWHERE, SET)
        .help("Settings of a source system; `--config` and flags take precedence.")
        .unset("none")
        .free(Verb::ALL)
        .per_rank(),
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
    .free(Verb::ALL)
    .per_rank(),
    row(
        "threads",
        int(1, 4096),
        at!(threads),
        &[Train, Sft, Generate, Score, Eval, Serve, DataCheck, RewardsRun, RewardsTry, Export, Doctor, Demo, Bench],
    )
    .help("Threads for computing.")
    .unset("all cores, divided by the ranks of this machine")
    .free(Verb::ALL)
    .per_rank(),
    row("nproc_per_node", int(1, 4096), at!(ranks.nproc_per_node), DIVIDES)
        .help("Processes to start on this machine with `mpirun`. They divide each step, or the rows.")
        .unset("one process, or those of the launcher (`mpirun`, `srun`, `torchrun`)")
        .alias(&["num_processes"])
        .free(Verb::ALL)
        .per_rank(),
    row("nnodes", int(1, 4096), at!(ranks.nnodes), TUNES)
        .help("Machines of a planned run, each with `nproc_per_node` processes.")
        .unset("1")
        .idle(|s, _| (!s.io.dry_run).then_some("only `plan` and `--dry_run` read it; `mpirun --host` starts machines"))
        .free(Verb::ALL)
        .per_rank(),
    row("gradient_leaves", int(1, 65_536), at!(algorithm.split.leaves), TUNES)
        .help(
            "Parts of a step whose gradients are summed as a tree. A multiple of the number of processes. Runs with \
             equal numbers give equal bits on 1, 2, 4 … processes.",
        )
        .unset("as in the checkpoint to resume from, else one for each process")
        .free(Verb::ALL),
    row("gradient_sum", Choice(words::<GradientSum>), at!(algorithm.split.sum), TUNES)
        .help("Order in which the gradients of several processes are summed."),
    row("shard", Choice(words::<Shard>), at!(algorithm.split.shard), TUNES)
        .help(
            "State that is divided over the processes. Results are the same to the bit. Checkpoints are complete, and a \
             run can resume with another value.",
        )
        .free(Verb::ALL),
    row("shard_min_elements", int(0, 1 << 40), at!(algorithm.split.least_cut), TUNES)
        .help("Elements of the smallest weight that `shard` weights divides. Smaller weights stay complete.")
        .alias(&["stage3_param_persistence_threshold", "min_num_params"])
        .idle(|s, _| (s.algorithm.split.shard != Shard::Weights).then_some("`shard` is not weights"))
        .free(Verb::ALL),
    row("reduce_bucket_size", int(1, 1 << 30), at!(algorithm.split.bucket), TUNES)
        .help(
            "Elements of gradients and weights that the processes exchange at once. A process needs two buffers of this \
             many f32 numbers.",
        )
        .free(Verb::ALL),
    row("ddp_backend", Choice(words::<Backend>), at!(ranks.backend), TUNES)
        .help("Library that moves gradients between processes. MPI carries all other messages.")
        .free(Verb::ALL),
    row("rank_address", Text, at!(ranks.address), DIVIDES)
        .help("IP address of the first process for the processes on other machines.")
        .unset("that of the interface that leads to them")
        .free(Verb::ALL)
        .per_rank(),
    row("ddp_timeout", int(10, 1_000_000_000), at!(ranks.patience_secs), DIVIDES)
        .help(
            "Seconds without a sign of life after which a process counts as lost and the run ends. A busy process gives such \
             signs, and one that has ended is noticed immediately.",
        )
        .free(Verb::ALL)
        .per_rank(),
];
