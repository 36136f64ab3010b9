//! Length, checkpoints, resuming.

use super::*;
use crate::names::{HubStrategy, words};
use crate::settings::Settings;
use crate::values::Field as _;
use Kind::{Bool, Choice, Path, Text};
use omnigrpo_train::{ResumeFrom, SaveWhen};
use std::path::PathBuf;
use std::time::Duration;
use verb::Verb::Push;

/// When to write a checkpoint.
fn savings() -> Vec<(&'static str, &'static str)> {
    vec![
        ("no", "Only the model at the end."),
        ("steps", "Every `save_steps`."),
        ("epoch", "After each epoch."),
        ("best", "When the metric of the evaluation improves."),
    ]
}

// `true` and `false` are what users of other trainers pass; taken as paths they would name a missing folder.
fn resume(text: &str) -> ResumeFrom {
    match text.to_ascii_lowercase().as_str() {
        "never" | "false" | "no" => ResumeFrom::Start,
        "auto" | "true" | "yes" => ResumeFrom::Newest,
        "must" => ResumeFrom::Must,
        _ => ResumeFrom::Path(PathBuf::from(text)),
    }
}

fn never_saves(s: &Settings) -> Option<&'static str> {
    (s.run.save == SaveWhen::Never && s.run.save_every.is_none()).then_some("`save_strategy` is no")
}

fn no_push(s: &Settings, verb: Verb) -> Option<&'static str> {
    (verb != Push && !s.push.enabled).then_some("there is no `push_to_hub`")
}

/// The settings.
pub const FLAGS: &[Flag] = &[
    row("output_dir", Path, at!(io.output_dir), &[Train, Sft, Export, Demo])
        .help(
            "Run directory: metrics, rollouts, checkpoints, and at the end the model. For `export` \
             the directory to write, new or empty.",
        )
        .unset("")
        .per_verb(&[(Demo, "runs/demo")])
        .free(LOOP),
    row("dry_run", Bool, at!(io.dry_run), TUNES)
        .help(
            "Check the rows and print what memory the run takes and what else would fit, before a \
             weight is loaded; then stop. `omnigrpo plan` is `train --dry_run`.",
        )
        .command_line_only()
        .free(TUNES),
    row("exp_name", Text, at!(io.exp_name), &[Train, Sft])
        .help(
            "Name instead of a directory: the run directory is `checkpoints/rl/NAME`, the log \
             `runs/NAME/log/log.txt`.",
        )
        .unset("")
        .free(LOOP),
    row("deepspeed", Path, at!(io.deepspeed), &[Train, Sft])
        .help(
            "A settings file of DeepSpeed, such as zero2.json: each field is compared with this run's \
             settings and explained; nothing is sharded in one process.",
        )
        .unset("")
        .free(LOOP),
    row("num_train_epochs", float(0.0, 1e6), at!(run.num_epochs), &[Train, Sft, Demo])
        .help(
            "Passes over the training rows. A step takes rows across the end of a pass; the last step \
             takes what is left of the last one.",
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
    .help("Optimizer steps, instead of epochs, which it overrides; -1 is off.")
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
    .help("Seed of everything random; the same seed gives the same run."),
    row(
        "data_seed",
        int(0, i64::MAX),
        Place {
            field: "run.data_seed",
            set: |s, v| {
                s.data_seed(take(v)?);
                Ok(())
            },
            get: |_| None,
        },
        &[Train, Sft, Demo],
    )
    .help("Seed of the order of rows and of the held-out share.")
    .unset("`seed`"),
    row(
        "save_strategy",
        Choice(savings),
        Place {
            field: "run.save",
            set: |s, v| {
                s.run.save = match take::<String>(v)?.as_str() {
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
                if let SaveWhen::Steps(steps) = &mut s.run.save {
                    *steps = take(v)?;
                }
                Ok(())
            },
            get: |s| match s.run.save {
                SaveWhen::Steps(steps) => steps.value(),
                _ => None,
            },
        },
        LOOP,
    )
    .help("Optimizer steps between checkpoints.")
    .free(LOOP)
    .idle(|s, _| (!matches!(s.run.save, SaveWhen::Steps(_))).then_some("`save_strategy` is not steps")),
    row(
        "save_minutes",
        float(0.01, 1e6),
        Place {
            field: "run.save_every",
            set: |s, v| {
                s.run.save_every = Some(Duration::from_secs_f64(60.0 * take::<f64>(v)?));
                Ok(())
            },
            get: |_| None,
        },
        LOOP,
    )
    .help(
        "Also write a checkpoint when this many minutes have gone by since the last one; for runs \
             whose steps take long.",
    )
    .unset("off")
    .free(LOOP),
    row("save_total_limit", int(1, COUNT), at!(run.save_limit), LOOP)
        .help("Checkpoints to keep; the oldest goes first, the best stays.")
        .unset("keep all")
        .free(LOOP)
        .idle(|s, _| never_saves(s)),
    row("save_only_model", Bool, at!(run.save_only_model), LOOP)
        .help(
            "Write checkpoints without optimizer state: smaller, but they can only start a run. The \
             one of an interruption has it.",
        )
        .free(LOOP)
        .idle(|s, _| never_saves(s)),
    row(
        "resume_from_checkpoint",
        Text,
        Place {
            field: "run.resume",
            set: |s, v| {
                s.run.resume = resume(&take::<String>(v)?);
                Ok(())
            },
            get: |_| text("auto"),
        },
        LOOP,
    )
    .help(
        "`auto` resumes the newest checkpoint that can be loaded if its settings and inputs are \
             those of this run, else starts anew; `must` is an error instead of starting anew; \
             `never` starts anew; a path resumes exactly that one. What an earlier run left is moved \
             to `superseded-N`, never removed.",
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
            "Push the trained model with its card to a repository of the Hugging Face hub, which is \
             made before training begins. HF_TOKEN, or what `hf auth login` keeps, says whose.",
        )
        .free(LOOP),
    row("hub_model_id", Text, at!(push.model_id), &[Train, Sft, Push])
        .help("Repository, `ORG/NAME`, or `NAME` for one of the token's account.")
        .unset("the name of the run directory")
        .free(LOOP)
        .idle(no_push),
    row("hub_private_repo", Bool, at!(push.private), &[Train, Sft, Push])
        .help("Make the repository private. One that is there stays as it is; a public one is then an error.")
        .free(LOOP)
        .idle(no_push),
    row("hub_strategy", Choice(words::<HubStrategy>), at!(push.strategy), &[Train, Sft])
        .help("When to push.")
        .free(LOOP)
        .idle(no_push),
    row("allow_changed_settings", Bool, at!(run.allow_changed), LOOP)
        .help(
            "Go on from a checkpoint although settings or inputs differ from those it was written \
             with, for instance with a lower learning rate. The console names them.",
        )
        .free(LOOP)
        .idle(|s, _| (s.run.resume == ResumeFrom::Start).then_some("`resume_from_checkpoint` is never")),
];
