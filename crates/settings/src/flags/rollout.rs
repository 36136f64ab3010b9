//! Sampling of completions.

use super::*;
use crate::Settings;
use crate::values::Field as _;
use Kind::{Path, Text, Texts};

fn greedy(s: &Settings, verb: Verb) -> Option<&'static str> {
    // A request to `serve` may have another temperature.
    (verb != Serve && s.algorithm.sampling.temperature == 0.0)
        .then_some("`temperature` 0 takes the most likely token")
}

/// Verbs whose completions an environment may answer.
const ANSWERED: &[Verb] = &[Train, Generate, Eval];

fn alone(s: &Settings, _: Verb) -> Option<&'static str> {
    s.not_sampled().or(s.turns.environment.is_none().then_some("there is no `environment`"))
}

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row(
        "num_generations",
        int(1, 4096),
        at!(algorithm.num_generations),
        &[Train, Generate, Eval, Demo, Bench, RewardsTry],
    )
    .help(
        "Completions sampled per prompt (G). Training compares them with each other; a single one has no \
             advantage.",
    )
    .alias(&["grpo_sample_size", "num_samples", "g"])
    .per_verb(&[(Generate, "1"), (Eval, "1")]),
    row("max_resample_times", int(0, 64), at!(algorithm.max_resample_times), GRPO)
        .help(
            "Dynamic sampling (DAPO): how many times a group whose rewards are all equal is replaced \
             by another row; 0 keeps such groups.",
        ),
    row("temperature", float(0.0, 100.0), at!(algorithm.sampling.temperature), SAMPLES)
        .help("Sampling temperature, from 0.0001 to 100; 0 takes the most likely token.")
        .alias(&["generation_temperature"])
        .per_verb(&[(Eval, "0")]),
    row("top_p", float(1e-6, 1.0), at!(algorithm.sampling.top_p), SAMPLES)
        .help("Sample among the likeliest tokens that together have this probability; 1 is off.")
        .alias(&["generation_top_p"])
        .idle(|s, verb| greedy(s, verb).or_else(|| s.not_sampled())),
    row("top_k", int(0, COUNT), at!(algorithm.sampling.top_k), SAMPLES)
        .help(
            "Sample among this many likeliest tokens; 0 is off. The checkpoint's generation_config.json is \
             never used.",
        )
        .idle(|s, verb| greedy(s, verb).or_else(|| s.not_sampled())),
    row("min_p", float(0.0, 1.0), at!(algorithm.sampling.min_p), SAMPLES)
        .help("Drop tokens less likely than this share of the likeliest token's probability; 0 is off.")
        .idle(|s, verb| greedy(s, verb).or_else(|| s.not_sampled())),
    row("repetition_penalty", float(0.01, 100.0), at!(algorithm.sampling.repetition_penalty), SAMPLES)
        .help("Number by which scores of tokens that already occurred are divided; 1 is off.")
        .idle(|s, _| s.not_sampled()),
    row(
        "logprob_temperature",
        float(0.01, 100.0),
        at!(algorithm.sampling.logprob_temperature),
        &[Train, Generate, Score, Eval, Demo],
    )
    .help(
        "Temperature at which log-probabilities, entropy and KL are computed. TRL's value is `temperature`; the five source systems use 1. The \
             difference from the sampling distribution is logged as `sampling/distribution_logp_difference`, in \
             nats.",
    )
    .unset("`temperature`, or 1 when that is 0"),
    row(
        "max_completion_length",
        int(1, COUNT),
        Place { field: "algorithm.sampling.max_completion_length",
            set: |s, v| {
                s.limit_completions(take(v)?);
                Ok(())
            },
            get: |s| s.algorithm.sampling.max_completion_length.value(),
        },
        BOUNDED,
    )
    .help(
        "Maximum number of tokens of a completion. Rewards of length use this limit, and a prompt must leave room for it.",
    )
    .alias(&["generation_max_length"]),
    row("min_completion_length", int(0, COUNT), at!(algorithm.sampling.min_completion_length), SAMPLES)
        .help("Minimum number of tokens before a stop token is sampled; benchmarks set it to the maximum.")
        .idle(|s, _| s.not_sampled()),
    row("stop_strings", Texts, at!(prompts.stop_strings), SAMPLES)
        .help("Texts that end a completion, besides the model's stop tokens.")
        .alias(&["stop"])
        .idle(|s, _| s.not_sampled()),
    row("environment", Text, at!(turns.environment), ANSWERED)
        .help(
            "Environment that answers the model in the middle of a completion. `zoom` is a tool that returns a \
             part of the original picture, given by a box in pixels, and `zoom:1000` takes thousandths of its \
             sides. Others are a function or a class of Python, `FILE.py:NAME`, a program, \
             `cmd:\"program arguments\"`, or an address, `http://…`. The answer is read but not trained on, and counts \
             in `max_completion_length`.",
        )
        .unset("none")
        .idle(|s, _| s.not_sampled()),
    row("max_turns", int(1, 1024), at!(turns.max_turns), ANSWERED)
        .help("Maximum number of answers of the environment per completion.")
        .alias(&["max_tool_calling_iterations"])
        .idle(alone),
    row("max_tool_tokens", int(1, COUNT), at!(turns.max_tool_tokens), ANSWERED)
        .help("Maximum number of tokens of an answer of the environment. A longer one ends the completion instead.")
        .unset("the rest of `max_completion_length`")
        .idle(alone),
    row("max_tool_images", int(0, 1024), at!(turns.max_tool_images), ANSWERED)
        .help("Maximum number of media in one answer of the environment. An answer with more ends the completion.")
        .idle(alone),
    row("batch_size", int(1, 65_536), at!(eval.batch_rows), &[Generate, Score, Eval])
        .help("Prompts processed at a time; changes memory and speed, never the result.")
        .free(Verb::ALL)
        .idle(|s, verb| (verb == Generate && s.io.prompt.is_some()).then_some("`prompt` is one question")),
    row(
        "replay",
        Path,
        Place { field: "run.rows.replay",
            set: |s, v| {
                s.data.replay = Some(take(v)?);
                s.run.rows.replay = true;
                Ok(())
            },
            get: |_| None,
        },
        &[Train],
    )
    .help(
        "Take completions and rewards from these rows instead of sampling, to compare with another trainer \
             step by step.",
    )
    .unset("off")
    .per_rank(),
];
