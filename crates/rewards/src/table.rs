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

/// Declares the rewards: name, source, help, and how to make one. `[Mode]` is the `accuracy` of this mode.
macro_rules! rewards {
    (@make $name:literal [$mode:ident]) => {
        |options| accuracy::by_rule($name, AccuracyMode::$mode, options)
    };
    (@make $name:literal ($make:path)) => {
        $make
    };
    ($($name:literal $source:literal $doc:literal $make:tt;)+) => {
        static TABLE: &[RewardRow] = &[$(RewardRow {
            name: $name,
            source: $source,
            doc: || format!($doc),
            make: rewards!(@make $name $make),
        }),+];
    };
}

rewards! {
    "accuracy" "R1-V, qwen-vl-finetune, VLM-R1"
        "correctness of the answer, by {ACCURACY_MODE} or the row's column; 0..1 (short_text 0..3)" (accuracy::reward);
    "format" "R1-V, qwen-vl-finetune, ViVQA-X"
        "presence of the requested tags, by {FORMAT_MODE}; 0..1 (tags3 0..3)" (format::reward);
    "think_format" "TRL"
        "one block of thinking at the start, whatever follows; 0 or 1" (think::reward);
    "random" "own"
        "a seeded number in 0..1, as a baseline and for benchmarks" (random::reward);
    "label" "R1-V"
        "equal answer after normalisation; 0 or 1" [Label];
    "emotion" "R1-Omni"
        "correct emotion word, including synonyms; 0 or 1" [Emotion];
    "mcq" "qwen-vl-finetune, VLM-R1"
        "multiple choice, all labels correct; 0 or 1" [McqExact];
    "mcq_iou" "qwen-vl-finetune"
        "multiple choice, shared labels divided by all labels; 0..1" [McqIou];
    "yes_no" "VLM-R1"
        "same yes or no as the ground truth, English and Vietnamese; 0 or 1" [YesNo];
    "short_text" "ViVQA-X"
        "3 equal, 1.5 half of the words, 0 else" [ShortText];
    "math" "R1-V, VLM-R1 (math-verify)"
        "equal numbers or formulas; 0 or 1" [Math];
    "iou" "VLM-R1"
        "overlap of one box; 0..1" [Iou];
    "temporal_iou" "Time-R1"
        "overlap of one time interval, in seconds or mm:ss; 0..1" [TemporalIou];
    "od_ap" "VLM-R1"
        "COCO average precision of a list of boxes; 0..1" [OdAp];
    "od_ap50" "VLM-R1"
        "od_ap at overlap 0.5; 0..1" [OdAp50];
    "odLength" "VLM-R1"
        "od_ap, reduced for surplus boxes; 0..1" [OdLength];
    "weighted_sum" "VLM-R1"
        "0.7 position + 0.3 completeness of matched boxes; 0..1" [WeightedSum];
    "all_match" "VLM-R1"
        "equal cleaned texts; 0 or 1" [AllMatch];
    "fuzzy" "VLM-R1"
        "number, choice letter, otherwise similarity of texts; 0..1" [Fuzzy];
    "cider" "ViVQA-X (pycocoevalcap)"
        "CIDEr-D of the <explain> text over 10, corpus idf, all references; 0..1" (cider::reward);
    "length" "VLM-R1"
        "correct answers earn 1..0.5 by length, wrong ones 0..-0.5" (length::length);
    "cosine" "TRL"
        "correct answers earn 1..0.5 by length, wrong ones -1..-0.5" (length::cosine);
    "overlong" "DAPO, TRL"
        "0, falling to -1 on the last tokens before the length limit" (overlong::reward);
    "repetition" "VLM-R1"
        "negative share of repeated word 6-grams or boxes; -1..0" (repetition::words);
    "repetition_tokens" "TRL"
        "negative share of repeated token 3-grams; -1..0" (repetition::tokens);
    "zoomed" "DeepEyes"
        "1 for a correct answer after a tool has shown a picture, else 0" (zoomed::reward);
}

/// Creates the rewards of a run. A spec is a name of the [`table`], `cmd:"program arguments"`, `FILE.py:FUNCTION`, `http://…`,
/// `https://…`, `judge:http(s)://…` or `rubric:FILE@http(s)://…`. `name=spec` gives one of the last six another name.
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
