//! Evaluation during training, and tables of `eval`.

use super::*;
use crate::Settings;
use Kind::{Bool, Choice, Text, Words};
use omnigrpo_rewards::{LabelSet, Labels};
use omnigrpo_train::EvalWhen;

/// Returns the choices of `--eval_strategy`.
fn evaluations() -> Vec<(&'static str, &'static str)> {
    vec![("no", "Never."), ("steps", "Every `eval_steps`."), ("epoch", "After each epoch.")]
}

/// Reads `--label_set`.
fn labels(words: &[String]) -> Result<Labels, Problem> {
    match words {
        [] => Ok(Labels::None),
        [word] if word == "auto" => Ok(Labels::OfGroundTruths),
        names => LabelSet::new(names)
            .map(Labels::Given)
            .map_err(|e| Problem::usage(e.to_string()).expected("`auto`, or the labels").at("--label_set")),
    }
}

fn in_training(s: &Settings, verb: Verb) -> Option<&'static str> {
    s.no_eval_rows().filter(|_| matches!(verb, Train | Sft))
}

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row(
        "eval_strategy",
        Choice(evaluations),
        Place {
            field: "run.eval.when",
            set: |s, v| {
                s.run.eval.when = match take::<String>(v)?.as_str() {
                    "no" => EvalWhen::Never,
                    "epoch" => EvalWhen::Epoch,
                    _ => EvalWhen::Steps(s.eval_steps()),
                };
                Ok(())
            },
            get: |_| None,
        },
        PERIODIC,
    )
    .help("When to evaluate during training.")
    .alias(&["evaluation_strategy"])
    .unset("steps with `eval_steps`, else epoch with evaluation data, else no")
    .free(LOOP)
    .idle(|s, _| s.no_eval_rows().filter(|_| s.run.eval.when != EvalWhen::Never)),
    row(
        "eval_steps",
        int(1, COUNT),
        Place {
            field: "",
            set: |s, v| {
                s.run.eval.when = EvalWhen::Steps(take(v)?);
                Ok(())
            },
            get: |_| None,
        },
        PERIODIC,
    )
    .help("Optimizer steps between evaluations.")
    .unset("from `eval_strategy`")
    .first()
    .free(LOOP)
    .idle(|s, _| {
        s.no_eval_rows()
            .or_else(|| (!matches!(s.run.eval.when, EvalWhen::Steps(_))).then_some("`eval_strategy` is not steps"))
    }),
    row("eval_on_start", Bool, at!(run.eval.on_start), PERIODIC)
        .help("Also evaluate before the first step, to compare before and after.")
        .free(LOOP)
        .idle(|s, _| s.no_eval_rows()),
    row("num_generations_eval", int(1, 4096), at!(eval.num_generations), PERIODIC)
        .help("Completions per prompt in evaluations during training; more than 1 are sampled.")
        .unset("1, greedy")
        .free(LOOP)
        .idle(|s, _| s.no_eval_rows()),
    row("metric_for_best_model", Text, at!(run.eval.best_metric), PERIODIC)
        .help("Evaluation metric that decides which checkpoint is best; higher is better.")
        .free(LOOP)
        .idle(|s, _| s.no_eval_rows()),
    row("category_column", Text, at!(eval.category), SUMS_UP)
        .help("Column by whose values accuracy is reported, one line per value.")
        .unset("no table")
        .free(LOOP)
        .idle(in_training),
    row("accuracy_threshold", float(0.0, 1.0), at!(eval.measures.accuracy_threshold), SUMS_UP)
        .help(
            "Share of the accuracy reward's largest value from which an answer counts as right, in accuracy and \
             pass@k; 0.5 for overlaps of boxes.",
        )
        .free(LOOP)
        .idle(in_training),
    row(
        "label_set",
        Words,
        Place {
            field: "eval.measures.labels",
            set: |s, v| {
                s.eval.measures.labels = labels(&take::<Vec<String>>(v)?)?;
                Ok(())
            },
            get: |s| (s.eval.measures.labels == Labels::None).then(|| Value::Texts(Vec::new())),
        },
        SUMS_UP,
    )
    .help(
        "Labels of a classification, for WAR, UAR and the confusion matrix; `auto` uses the ground truths.",
    )
    .free(LOOP)
    .idle(in_training),
];
