//! Settings of the built-in rewards. They are fixed before training. A row may only choose its accuracy rule (columns
//! `accu_reward_method`, `reward_method`).

use std::collections::BTreeSet;
use std::str::FromStr;
use std::sync::Arc;

use omnigrpo_guard::names::shown;

use crate::RewardError;
use crate::cider::DocumentFrequencies;
use crate::error::suggestion;
use crate::external::ExternalOptions;

/// Declares an option: its values with their names and help, and more names of some values after a semicolon.
macro_rules! options {
    ($(#[$of_type:meta])* $type:ident: $option:literal
     $($(#[$attr:meta])* $value:ident = $name:literal $help:literal,)+ $(; $($other:ident = $alias:literal $more:literal,)+)?) => {
        $(#[$of_type])*
        pub enum $type { $($(#[$attr])* $value),+ }

        impl $type {
            /// All values, as name, value and help. If a value has several names, the first is the canonical one.
            pub const ALL: &'static [(&'static str, Self, &'static str)] =
                &[$(($name, Self::$value, $help),)+ $($(($alias, Self::$other, $more)),+)?];

            /// Returns the name of the value.
            pub fn name(self) -> &'static str {
                Self::ALL.iter().find(|row| row.1 == self).map_or("", |row| row.0)
            }
        }

        impl FromStr for $type {
            type Err = RewardError;
            fn from_str(name: &str) -> Result<Self, RewardError> {
                named(Self::ALL, $option, name)
            }
        }
    };
}

options! {
    /// Rule of the `format` reward.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    FormatMode: "format_mode"
    /// Exactly one pair of each expected tag, no other text, and a non-empty answer.
    #[default]
    Strict = "strict" "1 for exactly one think and one non-empty answer pair with nothing around them",
    /// Partial scores for each pair and for their order.
    Graded = "graded" "0.3 think pair + 0.3 answer pair + 0.4 order",
    /// Three tags, each worth a third of the range, with penalties for repetition.
    Tags3 = "tags3" "0..3: one each for think, answer, explain, less 1/3 for each surplus tag",
    /// The regular expression of R1-V.
    R1v = "r1v" "1 if the whole completion, unstripped, matches R1-V's expression",
    /// `Strict`, and a box in the answer.
    Rec = "rec" "strict, with a box [x1, y1, x2, y2] in the answer",
    /// `Strict`, after exactly one pair of context tags.
    Context = "context" "strict, after one context pair",
}

options! {
    /// Rule by which the `accuracy` reward compares an answer with the ground truth.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    AccuracyMode: "accuracy_mode"
    /// Rule chosen by the form of the ground truth and the question.
    #[default]
    Auto = "auto" "by the ground truth: box list, box, tuple, time interval, choice, yes/no, number, otherwise label",
    /// Equal texts after normalisation.
    Label = "label" "equal after normalisation",
    /// Emotion words with synonyms.
    Emotion = "emotion" "emotion words, including synonyms",
    /// Multiple choice with all labels correct.
    McqExact = "mcq_exact" "multiple choice, all labels correct",
    /// Multiple choice, scored by the overlap of label sets.
    McqIou = "mcq_iou" "multiple choice, shared labels divided by all labels",
    /// 3, 1.5 or 0 for short answers.
    ShortText = "short_text" "3 equal, 1.5 half of the words, 0 else; yes/no words only when equal",
    /// Numbers and simple formulas.
    Math = "math" "equal numbers or formulas",
    /// Yes or no.
    YesNo = "yes_no" "yes or no, English and Vietnamese",
    /// Overlap of one box.
    Iou = "iou" "overlap of one box",
    /// Overlap of one time interval.
    TemporalIou = "temporal_iou" "overlap of one time interval",
    /// COCO average precision of a list of boxes.
    OdAp = "od_ap" "COCO AP of a list of labelled boxes",
    /// Average precision at an overlap of 0.5.
    OdAp50 = "od_ap50" "the same at overlap 0.5",
    /// Average precision, reduced for surplus boxes.
    OdLength = "odLength" "od_ap, multiplied by gold boxes / boxes if there are too many",
    /// Position and completeness of matched boxes.
    WeightedSum = "weighted_sum" "0.7 position + 0.3 completeness of matched boxes",
    /// Equal cleaned texts.
    AllMatch = "all_match" "equal cleaned texts",
    /// VLM-R1's default: number, choice, otherwise similarity of texts.
    Fuzzy = "fuzzy" "VLM-R1's default: number, choice letter, else similarity of texts",
    /// R1-V: mathematics, otherwise the exact text of the first tag.
    R1v = "r1v" "R1-V: mathematics, else exact text of the first answer tag",
    ;
    McqExact = "mcq" "VLM-R1's name of mcq_exact",
    OdAp = "map" "VLM-R1's name of od_ap",
    Fuzzy = "default" "VLM-R1's name of fuzzy",
}

options! {
    /// Choice among several `<answer>` tags.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
    AnswerPolicy: "answer_policy"
    /// The last well-formed tag.
    #[default]
    Last = "last" "the last answer tag",
    /// The first tag, as in most of the source systems.
    First = "first" "the first answer tag",
}

options! {
    /// A documented defect of a source system that can be reproduced.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    Compat: "compat"
    /// `mcq_iou` scores 1 if neither side has an `(n)`.
    S2Accuracy = "s2_accuracy" "mcq_iou: 1 if neither side has an (n)",
    /// `mcq_exact` compares lists of `(n)`, otherwise complete answer texts.
    S3Accuracy = "s3_accuracy" "mcq_exact: lists of (n), otherwise complete answer texts",
    /// `format strict` is a regular expression, which accepts repeated and empty tags.
    S3Format = "s3_format" "format strict: regular expression that accepts repeated and empty tags",
    /// `short_text` does not treat yes and no separately, does not limit the length, and does not normalise Unicode.
    S4Accuracy = "s4_accuracy" "short_text: the source's rule without measures against hedging",
    /// `format tags3` may be negative.
    S4Format = "s4_format" "format tags3: may be negative",
    /// `explanation` counts words within the batch, and stretches its scores over the batch to 0..1.
    S4Explanation = "s4_explanation" "explanation: words counted within the batch, scores stretched to 0..1",
    /// `mcq` and `yes_no` search for letters and words as VLM-R1 does.
    VlmR1Choice = "vlmr1_choice" "mcq, yes_no: VLM-R1's letter and word search",
    /// `iou` uses `x2 - 1`, and an overlap of one pixel counts 0.
    VlmR1Iou = "vlmr1_iou" "iou: pixel convention (x2 - 1), an overlap of one pixel counts 0",
    /// `length` treats every answer as correct, and its curve rises again beyond the limit.
    VlmR1Length = "vlmr1_length" "length: treats every answer as correct, rises beyond the limit",
}

/// Returns the value of an option with this name.
fn named<T: Copy>(
    all: &[(&'static str, T, &str)],
    option: &'static str,
    name: &str,
) -> Result<T, RewardError> {
    let names = || all.iter().map(|row| row.0);
    all.iter().find(|row| row.0.eq_ignore_ascii_case(name)).map(|row| row.1).ok_or_else(|| {
        RewardError::UnknownValue {
            option,
            value: shown(name).into_owned(),
            hint: suggestion(name, names()),
            known: names().collect::<Vec<_>>().join(", "),
        }
    })
}

/// Settings of [`build`](crate::build).
#[derive(Debug, Clone)]
pub struct RewardOptions {
    /// Rule of `format`.
    pub format_mode: FormatMode,
    /// Text at the end of every prompt that a completion continues, such as `<think>\n` of a template that opens the tag. `format` reads
    /// it as the start of the completion.
    pub opened: String,
    /// Rule of `accuracy` for rows that do not choose one.
    pub accuracy_mode: AccuracyMode,
    /// Choice among several answer tags.
    pub answer_policy: AnswerPolicy,
    /// Defects to reproduce.
    pub compat: BTreeSet<Compat>,
    /// One weight per reward. If empty, each reward has weight 1.
    pub weights: Vec<f64>,
    /// `max_completion_length` of the run in tokens, which `overlong` and `cosine` need.
    pub max_completion_tokens: usize,
    /// Length in tokens of the ramp below the limit, over which `overlong` falls to -1.
    pub overlong_cache_tokens: usize,
    /// Length of the n-grams of `repetition`.
    pub repetition_ngram: usize,
    /// Document frequencies of the training references, which `cider` needs.
    pub cider: Option<Arc<DocumentFrequencies>>,
    /// Settings of programs and endpoints.
    pub external: ExternalOptions,
}

impl Default for RewardOptions {
    /// Returns the defaults: a length limit of 256 tokens, a ramp of a fifth of it, 6-grams as in VLM-R1.
    fn default() -> Self {
        Self {
            format_mode: FormatMode::default(),
            opened: String::new(),
            accuracy_mode: AccuracyMode::default(),
            answer_policy: AnswerPolicy::default(),
            compat: BTreeSet::new(),
            weights: Vec::new(),
            max_completion_tokens: 256,
            overlong_cache_tokens: 51,
            repetition_ngram: 6,
            cider: None,
            external: ExternalOptions::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_errors_list_them() {
        macro_rules! check {
            ($($type:ty),*) => {$(
                for (name, value, help) in <$type>::ALL {
                    assert_eq!(name.parse::<$type>().unwrap(), *value);
                    assert_eq!(value.name().parse::<$type>().unwrap(), *value);
                    assert!(!help.is_empty());
                }
            )*};
        }
        check!(FormatMode, AccuracyMode, AnswerPolicy, Compat);
        let error = "s2_acuracy".parse::<Compat>().unwrap_err().to_string();
        assert!(
            error.starts_with("compat: unknown value `s2_acuracy` (did you mean `s2_accuracy`?)"),
            "{error}"
        );
        assert!(error.contains("vlmr1_length"), "{error}");
    }
}
