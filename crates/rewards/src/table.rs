//! The table of built-in rewards, and the conversion of a list of names to a [`RewardSet`].

use omnigrpo_guard::names::shown;

use crate::error::{ACCURACY_MODE, FORMAT_MODE, suggestion};
use crate::{
    AccuracyMode, Reward, RewardError, RewardOptions, RewardSet, accuracy, cider, external, format, length,
    overlong, random, redacted, repetition, think, zoomed,
};

/// One built-in reward.
#[derive(Debug)]
pub struct RewardRow {
    /// Name on the command line and in metrics.
    pub name: &'static str,
    /// One line of help.
    pub doc: fn() -> String,
    /// Source of the rule.
    pub source: &'static str,
    /// Function that creates the reward from the settings.
    pub make: fn(&RewardOptions) -> Result<Box<dyn Reward>, RewardError>,
}

/// Returns all built-in rewards. Help, documentation and the tests of all rewards use it.
pub fn table() -> &'static [RewardRow] {
    TABLE
}

static TABLE: &[RewardRow] = &[
    RewardRow {
        name: "accuracy",
        doc: || {
            format!(
                "correctness of the answer, by {ACCURACY_MODE} or the row's column; 0..1 (short_text 0..3)"
            )
        },
        source: "R1-V, qwen-vl-finetune, VLM-R1",
        make: accuracy::reward,
    },
    RewardRow {
        name: "format",
        doc: || format!("presence of the requested tags, by {FORMAT_MODE}; 0..1 (tags3 0..3)"),
        source: "R1-V, qwen-vl-finetune, ViVQA-X",
        make: format::reward,
    },
    RewardRow {
        name: "think_format",
        doc: || "one block of thinking at the start, whatever follows; 0 or 1".into(),
        source: "TRL",
        make: think::reward,
    },
    RewardRow {
        name: "random",
        doc: || "a seeded number in 0..1, as a baseline and for benchmarks".into(),
        source: "own",
        make: random::reward,
    },
    RewardRow {
        name: "label",
        doc: || "equal answer after normalisation; 0 or 1".into(),
        source: "R1-V",
        make: |options| accuracy::by_rule("label", AccuracyMode::Label, options),
    },
    RewardRow {
        name: "emotion",
        doc: || "correct emotion word, including synonyms; 0 or 1".into(),
        source: "R1-Omni",
        make: |options| accuracy::by_rule("emotion", AccuracyMode::Emotion, options),
    },
    RewardRow {
        name: "mcq",
        doc: || "multiple choice, all labels correct; 0 or 1".into(),
        source: "qwen-vl-finetune, VLM-R1",
        make: |options| accuracy::by_rule("mcq", AccuracyMode::McqExact, options),
    },
    RewardRow {
        name: "mcq_iou",
        doc: || "multiple choice, shared labels divided by all labels; 0..1".into(),
        source: "qwen-vl-finetune",
        make: |options| accuracy::by_rule("mcq_iou", AccuracyMode::McqIou, options),
    },
    RewardRow {
        name: "yes_no",
        doc: || "same yes or no as the ground truth, English and Vietnamese; 0 or 1".into(),
        source: "VLM-R1",
        make: |options| accuracy::by_rule("yes_no", AccuracyMode::YesNo, options),
    },
    RewardRow {
        name: "short_text",
        doc: || "3 equal, 1.5 half of the words, 0 else".into(),
        source: "ViVQA-X",
        make: |options| accuracy::by_rule("short_text", AccuracyMode::ShortText, options),
    },
    RewardRow {
        name: "math",
        doc: || "equal numbers or formulas; 0 or 1".into(),
        source: "R1-V, VLM-R1 (math-verify)",
        make: |options| accuracy::by_rule("math", AccuracyMode::Math, options),
    },
    RewardRow {
        name: "iou",
        doc: || "overlap of one box; 0..1".into(),
        source: "VLM-R1",
        make: |options| accuracy::by_rule("iou", AccuracyMode::Iou, options),
    },
    RewardRow {
        name: "temporal_iou",
        doc: || "overlap of one time interval, in seconds or mm:ss; 0..1".into(),
        source: "Time-R1",
        make: |options| accuracy::by_rule("temporal_iou", AccuracyMode::TemporalIou, options),
    },
    RewardRow {
        name: "od_ap",
        doc: || "COCO average precision of a list of boxes; 0..1".into(),
        source: "VLM-R1",
        make: |options| accuracy::by_rule("od_ap", AccuracyMode::OdAp, options),
    },
    RewardRow {
        name: "od_ap50",
        doc: || "od_ap at overlap 0.5; 0..1".into(),
        source: "VLM-R1",
        make: |options| accuracy::by_rule("od_ap50", AccuracyMode::OdAp50, options),
    },
    RewardRow {
        name: "odLength",
        doc: || "od_ap, reduced for surplus boxes; 0..1".into(),
        source: "VLM-R1",
        make: |options| accuracy::by_rule("odLength", AccuracyMode::OdLength, options),
    },
    RewardRow {
        name: "weighted_sum",
        doc: || "0.7 position + 0.3 completeness of matched boxes; 0..1".into(),
        source: "VLM-R1",
        make: |options| accuracy::by_rule("weighted_sum", AccuracyMode::WeightedSum, options),
    },
    RewardRow {
        name: "all_match",
        doc: || "equal cleaned texts; 0 or 1".into(),
        source: "VLM-R1",
        make: |options| accuracy::by_rule("all_match", AccuracyMode::AllMatch, options),
    },
    RewardRow {
        name: "fuzzy",
        doc: || "number, choice letter, otherwise similarity of texts; 0..1".into(),
        source: "VLM-R1",
        make: |options| accuracy::by_rule("fuzzy", AccuracyMode::Fuzzy, options),
    },
    RewardRow {
        name: "cider",
        doc: || "CIDEr-D of the <explain> text over 10, corpus idf, all references; 0..1".into(),
        source: "ViVQA-X (pycocoevalcap)",
        make: cider::reward,
    },
    RewardRow {
        name: "length",
        doc: || "correct answers earn 1..0.5 by length, wrong ones 0..-0.5".into(),
        source: "VLM-R1",
        make: length::length,
    },
    RewardRow {
        name: "cosine",
        doc: || "correct answers earn 1..0.5 by length, wrong ones -1..-0.5".into(),
        source: "TRL",
        make: length::cosine,
    },
    RewardRow {
        name: "overlong",
        doc: || "0, falling to -1 on the last tokens before the length limit".into(),
        source: "DAPO, TRL",
        make: overlong::reward,
    },
    RewardRow {
        name: "repetition",
        doc: || "negative share of repeated word 6-grams or boxes; -1..0".into(),
        source: "VLM-R1",
        make: repetition::words,
    },
    RewardRow {
        name: "repetition_tokens",
        doc: || "negative share of repeated token 3-grams; -1..0".into(),
        source: "TRL",
        make: repetition::tokens,
    },
    RewardRow {
        name: "zoomed",
        doc: || "1 for a correct answer after a tool has shown a picture, else 0".into(),
        source: "DeepEyes",
        make: zoomed::reward,
    },
];

/// Creates the rewards of a run. A spec is a name of the [`table`], `cmd:"program arguments"`, `FILE.py:FUNCTION`, `http://…`,
/// `https://…` or `judge:http(s)://…`. `name=spec` gives one of the last five another name.
///
/// # Errors
/// Returns an error if a name is unknown, a reward cannot use a setting, or the weights do not match the rewards.
pub fn build<S: AsRef<str>>(specs: &[S], options: &RewardOptions) -> Result<RewardSet, RewardError> {
    build_with(specs, options, Vec::new())
}

/// Creates rewards like [`build`], together with rewards that the caller has created, such as those that need models. A spec that
/// is the name of such a reward selects it.
pub fn build_with<S: AsRef<str>>(
    specs: &[S],
    options: &RewardOptions,
    mut made: Vec<Box<dyn Reward>>,
) -> Result<RewardSet, RewardError> {
    let mut rewards = Vec::with_capacity(specs.len());
    for spec in specs.iter().map(|spec| spec.as_ref().trim()) {
        rewards.push(match made.iter().position(|reward| reward.name() == spec) {
            Some(at) => made.swap_remove(at),
            None => one(spec, options)?,
        });
    }
    RewardSet::new(rewards, &options.weights)
}

fn one(spec: &str, options: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    if let Some(row) = TABLE.iter().find(|row| row.name == spec) {
        return (row.make)(options);
    }
    if let Some(external) = external::from_spec(spec, options) {
        return external;
    }
    let names = || TABLE.iter().map(|row| row.name);
    Err(RewardError::UnknownReward {
        name: shown(&redacted(spec)).into_owned(),
        hint: if spec.ends_with(".py") {
            format!(" (a reward is one function of a Python file: `{}:FUNCTION`)", shown(spec))
        } else {
            suggestion(spec, names())
        },
        known: names().collect::<Vec<_>>().join(", "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_get_a_suggestion() {
        let error = build(&["acuracy".to_owned()], &RewardOptions::default()).unwrap_err().to_string();
        assert!(error.contains("did you mean `accuracy`"), "{error}");
    }
}
