//! Length, checkpoints, resuming.

use super::*;
use crate::Settings;
use crate::names::{HubStrategy, words};
use crate::values::Field as _;
use Kind::{Bool, Choice, Path, Text};
use omnigrpo_train::{ResumeFrom, SaveWhen};
use std::path::PathBuf;
use std::time::Duration;

/// Returns the choices of `--save_strategy`.
fn savings() -> Vec<(&'static str, &'static str)> {
    vec![
        ("no", "Only the model at the end."),
        ("steps", "Every `save_steps`."),
        ("epoch", "After each epoch."),
        ("best", "When the metric of the evaluation improves."),
    ]
}

// Reads `--resume_from_checkpoint`. Users of other trainers write `true` and `false`, which would otherwise be the paths of
// missing directories.
fn resume(text: &str) -> ResumeFrom {
    match text.to_ascii_lowercase().as_str() {
        "never" | "false" | "no" => ResumeFrom::Start,
        "auto" | "true" | "yes" => ResumeFrom::Newest,
        "must" => ResumeFrom::Must,
        _ => ResumeFrom::Path(PathBuf::from(text)),
    }
}

fn never_saves(s: &Settings) -> Option<&'static str> {
    (s.run.save.when == SaveWhen::Never && s.run.save.every.is_none()).then_some("`save_strategy` is no")
}

fn no_push(s: &Settings, verb: Verb) -> Option<&'static str> {
    (verb != Push && !s.push.enabled).then_some("`push_to_hub` is off")
}

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row("output_dir", Path, at!(io.output_dir), &[Train, Sft, Export, Demo])
        .help(
            "Run directory: metrics, rollouts, checkpoints and the final model. For `export`, the directory to \
             write, new or empty.",
        )
        .unset("")
        .per_verb(&[(Demo, "runs/demo")])
        .free(LOOP),
    row("dry_run", Bool, at!(io.dry_run), &[Train, Sft, Push])
        .help(
            "Check the rows, print the memory and the time of the run and the settings that lower its memory, and \
             stop before a weight is loaded. `omnigrpo plan` does this for `train`. For `push`, list the files and the card, and send \
             nothing.",
        )
        .command_line_only()
        .free(TUNES),
    row("exp_name", Text, at!(io.exp_name), &[Train, Sft])
        .help(
            "Name of the run instead of a directory: the run directory is `checkpoints/rl/NAME`, the log \
             `runs/NAME/log/log.txt`.",
        )
        .unset("")
        .free(LOOP),
    row("deepspeed", Path, at!(io.deepspeed), &[Train, Sft])
        .help(
            "Settings file of DeepSpeed, such as zero2.json. The run compares each field with its own settings \
             and explains it. Stages 1, 2 and 3 are `shard` optimizer, gradients and weights.",
        )
        .unset("")
        .free(LOOP)
        .per_rank(),
    row("num_train_epochs", float(0.0, 1e6), at!(run.num_epochs), &[Train, Sft, Demo])
        .help(
            "Passes over the training rows. A step may take rows from two passes; the last step takes the rows \
             that are left of the last pass.",
        )
        .free(LOOP)
        .overridden(|s, _| s.run.max_steps.map(|_| "`max_steps` overrides it")),
    row(
        "max_steps",
        int(-1, COUNT),
        Place {
            field: "run.max_steps",
            set: |s, v| {
                s.run.max_steps = u64::try_from(take::<i64>(v)?).ok();
                Ok(())
            },
            get: |s| Some(Value::Int(s.run.max_steps.map_or(-1, |steps| steps as i64))),
        },
        STEPS,
    )
    .help("Optimizer steps; overrides the number of epochs. -1 is off.")
    .free(LOOP),
    row(
        "seed",
        int(0, i64::MAX),
        Place {
            field: "algorithm.seed",
            set: |s, v| {
                s.seed(take(v)?);
                Ok(())
            },
            get: |s| s.algorithm.seed.value(),
        },
        RANDOM,
    )
    .help("Seed of all random numbers; the same seed gives the same run."),
    row(
        "data_seed",
        int(0, i64::MAX),
        Place {
            field: "run.rows.seed",
            set: |s, v| {
                s.data_seed(take(v)?);
                Ok(())
            },
            get: |s| s.run.rows.seed.value(),
        },
        &[Train, Sft, Demo],
    )
    .help("Seed of the order of rows and of the rows held out for evaluation.")
    .unset("`seed`"),
    row(
        "save_strategy",
        Choice(savings),
        Place {
            field: "run.save.when",
            set: |s, v| {
                s.run.save.when = match take::<String>(v)?.as_str() {
                    "no" => SaveWhen::Never,
                    "epoch" => SaveWhen::Epoch,
                    "best" => SaveWhen::Best,
                    _ => SaveWhen::Steps(1),
                };
                Ok(())
            },
            get: |_| text("steps"),
        },
        LOOP,
    )
    .help("When to write a checkpoint.")
    .free(LOOP),
    row(
        "save_steps",
        int(1, COUNT),
        Place {
            field: "",
            set: |s, v| {
                if let SaveWhen::Steps(steps) = &mut s.run.save.when {
                    *steps = take(v)?;
                }
                Ok(())
            },
            get: |s| match s.run.save.when {
                SaveWhen::Steps(steps) => steps.value(),
                _ => None,
            },
        },
        LOOP,
    )
    .help("Optimizer steps between checkpoints.")
    .free(LOOP)
    .idle(|s, _| (!matches!(s.run.save.when, SaveWhen::Steps(_))).then_some("`save_strategy` is not steps")),
    row(
        "save_minutes",
        float(0.01, 1e6),
        Place {
            field: "run.save.every",
            set: |s, v| {
                s.run.save.every = Some(Duration::from_secs_f64(60.0 * take::<f64>(v)?));
                Ok(())
            },
            get: |_| None,
        },
        LOOP,
    )
    .help(
        "Also write a checkpoint when the last one is this many minutes old; for runs with long steps.",
    )
    .unset("off")
    .free(LOOP),
    row("save_total_limit", int(1, COUNT), at!(run.save.limit), LOOP)
        .help("Checkpoints to keep. The oldest is removed first; the best one stays.")
        .unset("keep all")
        .free(LOOP)
        .idle(|s, _| never_saves(s)),
    row("save_only_model", Bool, at!(run.save.only_model), LOOP)
        .help(
            "Write checkpoints without the state of the optimizer: they are smaller and can start a run, but \
             not resume one. An interrupted run still writes the state.",
        )
        .free(LOOP)
        .idle(|s, _| never_saves(s)),
    row(
        "resume_from_checkpoint",
        Text,
        Place {
            field: "run.resume.from",
            set: |s, v| {
                s.run.resume.from = resume(&take::<String>(v)?);
                Ok(())
            },
            get: |_| text("auto"),
        },
        LOOP,
    )
    .help(
        "`auto` resumes from the newest checkpoint that loads, and starts from the beginning if there is none; settings \
             or inputs that differ from the checkpoint's are an error. `must` fails instead of starting; `never` starts; a \
             path resumes from that checkpoint. Files of an earlier run move to `superseded-N` and are never \
             removed.",
    )
    .free(LOOP),
    row("stop_on_collapse", Bool, at!(run.stop_on_collapse), &[Train, Demo])
        .help(
            "End the run, with a checkpoint, when its policy runs away or its entropy collapses (the \
             rules `ran_away` and `entropy_collapsed`). The message names the setting to change and \
             the last checkpoint before it; the exit code is 1.",
        )
        .free(LOOP),
    row("push_to_hub", Bool, at!(push.enabled), &[Train, Sft])
        .help(
            "Push the trained model and its card to a repository of the Hugging Face hub, which is created \
             before training begins. HF_TOKEN, or the token that `hf auth login` stored, names the account.",
        )
        .free(LOOP)
        .per_rank(),
    row("hub_model_id", Text, at!(push.model_id), &[Train, Sft, Push])
        .help("Repository, `ORG/NAME`; `NAME` alone belongs to the account of the token.")
        .unset("the name of the run directory")
        .free(LOOP)
        .idle(no_push)
        .per_rank(),
    row("hub_private_repo", Bool, at!(push.private), &[Train, Sft, Push])
        .help("Make a new repository private. An existing repository keeps its visibility; an existing public one \
             is an error.")
        .free(LOOP)
        .idle(no_push)
        .per_rank(),
    row("hub_strategy", Choice(words::<HubStrategy>), at!(push.strategy), &[Train, Sft])
        .help("When to push.")
        .free(LOOP)
        .idle(no_push)
        .per_rank(),
    row("allow_changed_settings", Bool, at!(run.resume.allow_changed), LOOP)
        .help(
            "Resume from a checkpoint although settings or inputs differ from those that it was written with, \
             for instance with a lower learning rate. The console names the differences.",
        )
        .free(LOOP)
        .idle(|s, _| (s.run.resume.from == ResumeFrom::Start).then_some("`resume_from_checkpoint` is never")),
];
