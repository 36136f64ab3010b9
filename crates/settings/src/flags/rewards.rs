//! Scoring of completions.

use super::*;
use crate::Settings;
use crate::names::{Tracker, words};
use crate::values::Field as _;
use Kind::{Bool, Choice, Choices, Floats, Path, Specs, Text};
use omnigrpo_data::Think;
use omnigrpo_rewards::{AccuracyMode, AnswerPolicy, Compat, FormatMode};

/// Returns the choices of `--think`.
fn thinking() -> Vec<(&'static str, &'static str)> {
    vec![("auto", "Per dataset, by its name."), ("on", "Always."), ("off", "Never.")]
}

const THEN_SUM: &str = "normalize_then_sum";

/// Returns the choices of the order in which rewards are normalised and summed.
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

fn no_judge(s: &Settings, _: Verb) -> Option<&'static str> {
    let none = !s.rewards.funcs.iter().any(|spec| spec.contains("judge:http"));
    none.then_some("`reward_funcs` has no `judge:…`")
}

fn no_judge_or_rubric(s: &Settings, verb: Verb) -> Option<&'static str> {
    let asks = |spec: &String| spec.contains("rubric:") && spec.contains("://");
    no_judge(s, verb)
        .filter(|_| !s.rewards.funcs.iter().any(asks))
        .map(|_| "`reward_funcs` has no `judge:…` and no `rubric:…`")
}

fn no_other_process(s: &Settings, verb: Verb) -> Option<&'static str> {
    let outside = |spec: &String| ["cmd:", ".py:", "://"].iter().any(|mark| spec.contains(mark));
    if s.turns.environment.iter().any(outside) {
        return None;
    }
    let none = !s.rewards.funcs.iter().any(outside);
    none.then_some("`reward_funcs` and `environment` have no program, no function of a file and no address")
        .or_else(|| unscored(s, verb))
}

/// Returns the reason why no completion is scored in training: `sft`, and `train` with recorded rewards, score completions in
/// evaluations only.
fn unscored(s: &Settings, verb: Verb) -> Option<&'static str> {
    let only_evaluated = verb == Sft || verb == Train && s.data.replay.is_some();
    s.no_eval_rows()
        .filter(|_| only_evaluated)
        .map(|_| "completions are scored in evaluations only, and there is no evaluation data")
}

fn set_tried(s: &mut Settings, value: &crate::values::Value) -> Result<(), crate::Problem> {
    s.rewards.funcs = take(value)?;
    Ok(())
}

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row("reward_funcs", Specs, at!(rewards.funcs), NAMES_REWARDS)
        .help(
            "Rewards to add up: names (`rewards list`), a function of a Python file (`my_rewards.py:mine`), a \
             program (`cmd:python my_reward.py`), an address (`http://…`), or a reward model, given as the \
             directory or hub name (`ORG/MODEL`) of a text classifier with one output.",
        )
        .alias(&["rewards"])
        .idle(unscored),
    row(
        "reward",
        Specs,
        Place {
            field: "rewards.funcs",
            set: set_tried,
            // The rewards of other commands have a default, and these have none.
            get: |_| None,
        },
        &[RewardsTry],
    )
        .help("Rewards to try, as in `--reward_funcs`: names, `my_rewards.py:mine`, programs, addresses, reward models.")
        .unset("")
    .required(&[RewardsTry])
        .positional(),
    row("reward_weights", Floats, at!(rewards.options.weights), REWARDED)
        .help(
            "One weight per reward, in the order of `--reward_funcs`; 1 each by default. A preset's weights \
             follow its rewards if you reorder them.",
        )
        .idle(unscored),
    row("format_reward_weight", float(-BIG, BIG), NOWHERE, REWARDED)
        .help("Weight of the reward `format`, at any position in `--reward_funcs`.")
        .unset("its number in `reward_weights`")
        .idle(|s, _| s.lacks_reward("format").then_some(NO_FORMAT)),
    row("accuracy_reward_weight", float(-BIG, BIG), NOWHERE, REWARDED)
        .help("Weight of the reward `accuracy`, at any position in `--reward_funcs`.")
        .unset("its number in `reward_weights`")
        .idle(|s, _| s.lacks_reward("accuracy").then_some("`reward_funcs` has no accuracy")),
    row("format_mode", Choice(words::<FormatMode>), at!(rewards.options.format_mode), REWARDED)
        .help(
            "Rule of the `format` reward: exactly one pair of each tag (strict), a graded 0.3 + 0.3 + 0.4, \
             three tags (tags3), or the R1-V pattern (r1v).",
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
                    // With several rules, the rows of each training file have their own.
                    _ => AccuracyMode::Auto,
                };
                Ok(())
            },
            get: |s| s.rewards.accuracy_modes.value(),
        },
        ASKS_REWARDS,
    )
    .help(
        "Rule by which `accuracy` (and with it `length` and `cosine`) compares an answer; `auto` chooses by \
             the row. Several rules, separated by spaces, commas or colons, belong to the training files in \
             order. A row's own `accu_reward_method` takes precedence.",
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
    .help("Which answer tag counts when a completion has several.")
    .idle(unscored),
    row(
        "think",
        Choice(thinking),
        Place {
            field: "read.think",
            set: |s, v| {
                s.read.think = match take::<String>(v)?.as_str() {
                    "on" => Some(Think::On),
                    "off" => Some(Think::Off),
                    _ => None,
                };
                Ok(())
            },
            get: |s| text(s.read.think.map_or("auto", |think| if think == Think::On { "on" } else { "off" })),
        },
        REWARDED,
    )
    .help("Whether a completion has to think first; `auto` decides by the name of the dataset."),
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
    .help("Whether to normalise the weighted sum of rewards, or each reward before the sum."),
    row("temporal_order_bonus", Bool, at!(rewards.temporal_order_bonus), &[Train])
        .of_media()
        .help(
            "T-GRPO: correct answers earn 0.3 more if accuracy on ordered frames beats accuracy on shuffled frames. Costs \
             half as many extra completions.",
        )
        .idle(|s, _| s.not_sampled()),
    row("length_bonus", Bool, at!(algorithm.length_bonus), &[Train])
        .help(
            "Right answers of 320 to 512 tokens earn 0.2 more, if their group has at least two right answers (Video-R1).",
        )
        .idle(|s, _| s.not_sampled()),
    row("compat", Choices(words::<Compat>), at!(rewards.options.compat), ASKS_REWARDS)
        .help("Known defects of the source systems to reproduce, for comparisons only.")
        .idle(unscored),
    row("reward_timeout_secs", float(0.01, 86_400.0), at!(rewards.options.external.timeout), REWARDED)
        .help("Seconds that a program or an address may take to score a batch before it is asked again.")
        .free(Verb::ALL)
        .idle(no_other_process)
        .per_rank(),
    row("reward_workers", int(1, 256), at!(rewards.options.external.pool_size), REWARDED)
        .help("Processes of each reward program, or requests in flight to each address.")
        .free(Verb::ALL)
        .idle(no_other_process)
        .per_rank(),
    row("judge_model", Text, at!(rewards.options.external.judge_model), REWARDED)
        .help("Model that a `judge:http://…` or `rubric:…` reward asks for.")
        .unset("the server's")
        .idle(no_judge_or_rubric),
    row("judge_prompt", Path, at!(rewards.judge_prompt), REWARDED)
        .help(
            "File with the question that a `judge:` reward asks. `{prompt}`, `{solution}`, and `{answer}` or \
             `{completion}` are filled in; `{images}` sends the row's pictures.",
        )
        .unset("one that asks for a number from 0 to 1")
        .idle(no_judge),
    row("reward_python", Text, at!(rewards.options.external.python), REWARDED)
        .help(
            "Python interpreter for rewards and environments given as `FILE.py:NAME`, and for the packages of \
             `report_to wandb` and `trackio`.",
        )
        .free(LOOP)
        .idle(|s, _| {
            let mut named = s.rewards.funcs.iter().chain(&s.turns.environment);
            let none = !named.any(|spec| spec.contains(".py:"));
            let packages = s.reports_to(Tracker::Wandb) || s.reports_to(Tracker::Trackio);
            (none && !packages).then_some(
                "`reward_funcs` and `environment` have no `FILE.py:NAME`, and `report_to` has no wandb and no trackio",
            )
        })
        .per_rank(),
    row("clip_model", Text, at!(rewards.scorers.clip_model), REWARDED)
        .help(
            "CLIP of the `explanation` reward: a checkpoint directory, or a model of the hub or the local \
             cache. A preset's `cider` becomes `explanation` with it.",
        )
        .unset("openai/clip-vit-base-patch16")
        .idle(|s, verb| no_clip_score(s).or_else(|| unscored(s, verb))),
    row("clip_text_model", Text, at!(rewards.scorers.clip_text_model), REWARDED)
        .help(
            "Text tower for `--clip_model`, as sentence-transformers saves one, for texts in other languages \
             than English.",
        )
        .unset("the CLIP's own text tower")
        .idle(|s, _| {
            no_clip_score(s)
                .or_else(|| s.rewards.scorers.clip_model.is_none().then_some("there is no `clip_model`"))
        }),
    row("explanation_clip_weight", float(0.0, 1.0), at!(rewards.scorers.explanation_clip_weight), REWARDED)
        .help("Share of the CLIP score in `explanation`; the rest is CIDEr. 0 needs no CLIP.")
        .idle(|s, _| s.lacks_reward("explanation").then_some(NO_EXPLANATION)),
    row("bertscore_model", Text, at!(rewards.scorers.bertscore_model), REWARDED)
        .help(
            "Model of the `bertscore` reward (RoBERTa, XLM-RoBERTa, BERT, DistilBERT): a checkpoint directory, \
             or a model in the local cache.",
        )
        .unset("none")
        .idle(|s, verb| no_bertscore(s).or_else(|| unscored(s, verb))),
    row("bertscore_layer", int(0, 1024), at!(rewards.scorers.bertscore_layer), REWARDED)
        .help("Number of blocks after which `bertscore` compares embeddings.")
        .unset("the last")
        .idle(|s, _| no_bertscore(s)),
    row("bertscore_idf", Bool, at!(rewards.scorers.bertscore_idf), REWARDED)
        .help("Give tokens that few references contain a larger weight in `bertscore`.")
        .idle(|s, _| no_bertscore(s)),
    row("bertscore_baseline", Path, at!(rewards.scorers.bertscore_baseline), REWARDED)
        .help("File of `LAYER,P,R,F` lines, as in the bert_score package, to rescale `bertscore`.")
        .unset("not rescaled")
        .idle(|s, _| no_bertscore(s)),
];
