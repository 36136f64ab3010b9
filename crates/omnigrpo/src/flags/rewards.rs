//! How completions are scored.

use super::*;
use crate::names::{Tracker, words};
use crate::settings::Settings;
use crate::values::Field as _;
use Kind::{Bool, Choice, Choices, Floats, Path, Specs, Text};
use omnigrpo_data::ThinkMode;
use omnigrpo_rewards::{AccuracyMode, AnswerPolicy, Compat, FormatMode};

/// Whether a completion must think first.
fn thinking() -> Vec<(&'static str, &'static str)> {
    vec![("auto", "Per dataset, by its name."), ("on", "Always."), ("off", "Never.")]
}

const THEN_SUM: &str = "normalize_then_sum";

/// Order of normalising and summing rewards.
fn objectives() -> Vec<(&'static str, &'static str)> {
    vec![("sum_then_normalize", "Normalise the weighted sum."), (THEN_SUM, "Normalise each reward first.")]
}

const NO_FORMAT: &str = "`reward_funcs` has no format";
const NO_EXPLANATION: &str = "`reward_funcs` has no explanation";

fn no_clip_score(s: &Settings) -> Option<&'static str> {
    let none = s.lacks_reward("explanation").then_some(NO_EXPLANATION);
    none.or_else(|| {
        (s.rewards.scorers.explanation_clip_weight == 0.0).then_some("`explanation_clip_weight` is 0")
    })
}

fn no_bertscore(s: &Settings) -> Option<&'static str> {
    s.lacks_reward("bertscore").then_some("`reward_funcs` has no bertscore")
}

/// `sft`, and `train` with recorded rewards, score completions in evaluations only.
fn unscored(s: &Settings, verb: Verb) -> Option<&'static str> {
    let only_evaluated = verb == Sft || verb == Train && s.data.replay.is_some();
    s.no_eval_rows()
        .filter(|_| only_evaluated)
        .map(|_| "completions are scored in evaluations only, and there is no evaluation data")
}

/// The settings.
pub const FLAGS: &[Flag] = &[
    row("reward_funcs", Specs, at!(rewards.funcs), ASKS_REWARDS)
        .help(
            "Rewards to add up, by name (`rewards list`), as a function of a Python file \
             (`my_rewards.py:mine`), as a program (`cmd:python my_reward.py`), as an address \
             (`http://…`), or as a reward model: the directory or hub name (`ORG/MODEL`) of a \
             text classifier with one output.",
        )
        .alias(&["rewards"])
        .idle(unscored),
    row("reward_weights", Floats, at!(rewards.options.weights), REWARDED)
        .help(
            "One weight per reward, in the order of `--reward_funcs`; none given means 1 each. A \
             preset's weights go with its rewards by name.",
        )
        .idle(unscored),
    row("format_reward_weight", float(-BIG, BIG), NOWHERE, REWARDED)
        .help("Weight of the reward `format`, wherever it stands in `--reward_funcs`.")
        .unset("its number in `reward_weights`")
        .idle(|s, _| s.lacks_reward("format").then_some(NO_FORMAT)),
    row("accuracy_reward_weight", float(-BIG, BIG), NOWHERE, REWARDED)
        .help("Weight of the reward `accuracy`, wherever it stands in `--reward_funcs`.")
        .unset("its number in `reward_weights`")
        .idle(|s, _| s.lacks_reward("accuracy").then_some("`reward_funcs` has no accuracy")),
    row("format_mode", Choice(words::<FormatMode>), at!(rewards.options.format_mode), REWARDED)
        .help(
            "What the `format` reward wants: exactly one pair of each tag (strict), a graded 0.3 + \
             0.3 + 0.4, three tags (tags3), or the R1-V pattern (r1v).",
        )
        .idle(|s, verb| s.lacks_reward("format").then_some(NO_FORMAT).or_else(|| unscored(s, verb))),
    row(
        "accuracy_mode",
        Choices(words::<AccuracyMode>),
        Place {
            field: "rewards.options.accuracy_mode",
            set: |s, v| {
                s.rewards.accuracy_modes = take(v)?;
                s.rewards.options.accuracy_mode = match s.rewards.accuracy_modes[..] {
                    [mode] => mode,
                    // Rows of the training files carry theirs.
                    _ => AccuracyMode::Auto,
                };
                Ok(())
            },
            get: |s| s.rewards.accuracy_modes.value(),
        },
        ASKS_REWARDS,
    )
    .help(
        "How `accuracy` (and with it `length` and `cosine`) compares an answer; `auto` looks at \
             the row. Several, also joined by colons, are those of the training files in order. A \
             row's `accu_reward_method` wins.",
    )
    .alias(&["reward_method", "accu_reward_method"])
    .idle(|s, verb| {
        let none = ["accuracy", "length", "cosine"].iter().all(|name| s.lacks_reward(name));
        none.then_some("`reward_funcs` has no accuracy, and no length or cosine, which go by it")
            .or_else(|| unscored(s, verb))
    }),
    row(
        "answer_policy",
        Choice(words::<AnswerPolicy>),
        Place {
            field: "rewards.options.answer_policy",
            set: |s, v| {
                s.rewards.options.answer_policy = take(v)?;
                s.eval.measures.answer_policy = s.rewards.options.answer_policy;
                Ok(())
            },
            get: |s| s.rewards.options.answer_policy.value(),
        },
        ASKS_REWARDS,
    )
    .help("Which answer tag counts if there are several.")
    .idle(unscored),
    row(
        "think",
        Choice(thinking),
        Place {
            field: "read.think",
            set: |s, v| {
                s.read.think = match take::<String>(v)?.as_str() {
                    "on" => Some(ThinkMode::On),
                    "off" => Some(ThinkMode::Off),
                    _ => None,
                };
                Ok(())
            },
            get: |_| text("auto"),
        },
        REWARDED,
    )
    .help("Whether a completion must think first; `auto` decides per dataset by its name."),
    row(
        "multi_objective_aggregation",
        Choice(objectives),
        Place {
            field: "algorithm.normalize_then_sum",
            set: |s, v| {
                s.algorithm.normalize_then_sum = take::<String>(v)? == THEN_SUM;
                Ok(())
            },
            get: |s| text(if s.algorithm.normalize_then_sum { THEN_SUM } else { "sum_then_normalize" }),
        },
        GRPO,
    )
    .help("Normalise the weighted sum, or each reward before the sum."),
    row("temporal_order_bonus", Bool, at!(rewards.temporal_order_bonus), &[Train])
        .help(
            "Sample half as many completions again on shuffled frames of videos; right answers that \
             do better with the frames in order earn 0.3 more (T-GRPO).",
        )
        .idle(|s, _| s.not_sampled()),
    row("compat", Choices(words::<Compat>), at!(rewards.options.compat), ASKS_REWARDS)
        .help("Known defects of the source systems to reproduce, for comparisons only.")
        .idle(unscored),
    row("reward_timeout_secs", float(0.01, 86_400.0), at!(rewards.options.external.timeout), REWARDED)
        .help("Seconds an external reward may take for a batch before it is restarted.")
        .free(Verb::ALL)
        .idle(unscored),
    row("reward_workers", int(1, 256), at!(rewards.options.external.pool_size), REWARDED)
        .help("Processes of each external reward program, or requests in flight to an address.")
        .free(Verb::ALL)
        .idle(unscored),
    row("judge_model", Text, at!(rewards.options.external.judge_model), REWARDED)
        .help("Model that a `judge:http://…` reward asks.")
        .unset("the server's")
        .idle(unscored),
    row("judge_prompt", Path, at!(rewards.judge_prompt), REWARDED)
        .help(
            "File with what a `judge:` reward is asked, with `{prompt}`, `{answer}` or \
             `{completion}`, and `{solution}` in their places; where `{images}` stands the row's \
             pictures are sent.",
        )
        .unset("one that asks for a number from 0 to 1")
        .idle(|s, _| {
            let none = !s.rewards.funcs.iter().any(|spec| spec.contains("judge:http"));
            none.then_some("`reward_funcs` has no `judge:…`")
        }),
    row("reward_python", Text, at!(rewards.options.external.python), REWARDED)
        .help(
            "Python that runs rewards given as `FILE.py:FUNCTION`, and the package of `report_to \
             wandb`.",
        )
        .free(LOOP)
        .idle(|s, _| {
            let none = !s.rewards.funcs.iter().any(|spec| spec.contains(".py:"));
            (none && !s.reports_to(Tracker::Wandb))
                .then_some("`reward_funcs` has no `FILE.py:FUNCTION`, and `report_to` no wandb")
        }),
    row("clip_model", Text, at!(rewards.scorers.clip_model), REWARDED)
        .help(
            "CLIP of the `explanation` reward: a checkpoint directory, or a model of the hub or of its local \
             cache. A preset's `cider` becomes `explanation` with it.",
        )
        .unset("openai/clip-vit-base-patch16")
        .idle(|s, verb| no_clip_score(s).or_else(|| unscored(s, verb))),
    row("clip_text_model", Text, at!(rewards.scorers.clip_text_model), REWARDED)
        .help(
            "Text tower for `--clip_model`, as sentence-transformers saves one, for texts that are \
             not English.",
        )
        .unset("the CLIP's own text tower")
        .idle(|s, _| {
            no_clip_score(s)
                .or_else(|| s.rewards.scorers.clip_model.is_none().then_some("there is no `clip_model`"))
        }),
    row("explanation_clip_weight", float(0.0, 1.0), at!(rewards.scorers.explanation_clip_weight), REWARDED)
        .help("Share of the CLIP score in `explanation`; CIDEr has the rest. 0 needs no CLIP.")
        .idle(|s, _| s.lacks_reward("explanation").then_some(NO_EXPLANATION)),
    row("bertscore_model", Text, at!(rewards.scorers.bertscore_model), REWARDED)
        .help(
            "Model of the `bertscore` reward (RoBERTa, XLM-RoBERTa, BERT, DistilBERT): a checkpoint \
             directory, or a model in the local cache.",
        )
        .unset("none")
        .idle(|s, verb| no_bertscore(s).or_else(|| unscored(s, verb))),
    row("bertscore_layer", int(0, 1024), at!(rewards.scorers.bertscore_layer), REWARDED)
        .help("Blocks after which `bertscore` compares embeddings.")
        .unset("the last")
        .idle(|s, _| no_bertscore(s)),
    row("bertscore_idf", Bool, at!(rewards.scorers.bertscore_idf), REWARDED)
        .help("Weigh tokens in `bertscore` by how few of the rows' references have them.")
        .idle(|s, _| no_bertscore(s)),
    row("bertscore_baseline", Path, at!(rewards.scorers.bertscore_baseline), REWARDED)
        .help("File of `LAYER,P,R,F` lines, as the bert_score package has, to rescale `bertscore` by.")
        .unset("not rescaled")
        .idle(|s, _| no_bertscore(s)),
];
