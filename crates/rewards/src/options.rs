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

/// Rule of the `format` reward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FormatMode {
    /// Exactly one pair of each expected tag, no other text, and a non-empty answer.
    #[default]
    Strict,
    /// Partial scores for each pair and for their order.
    Graded,
    /// Three tags, each worth a third of the range, with penalties for repetition.
    Tags3,
    /// The regular expression of R1-V.
    R1v,
    /// `Strict`, and a box in the answer.
    Rec,
}

impl FormatMode {
    /// All values, as name, value and help. If a value has several names, the first is the canonical one.
    pub const ALL: &'static [(&'static str, Self, &'static str)] = &[
        (
            "strict",
            Self::Strict,
            "1 for exactly one think and one non-empty answer pair with nothing around them",
        ),
        ("graded", Self::Graded, "0.3 think pair + 0.3 answer pair + 0.4 order"),
        ("tags3", Self::Tags3, "0..3: one each for think, answer, explain, less 1/3 for each surplus tag"),
        ("r1v", Self::R1v, "1 if the whole completion, unstripped, matches R1-V's expression"),
        ("rec", Self::Rec, "strict, with a box [x1, y1, x2, y2] in the answer"),
    ];
}

/// Rule by which the `accuracy` reward compares an answer with the ground truth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AccuracyMode {
    /// Rule chosen by the form of the ground truth and the question.
    #[default]
    Auto,
    /// Equal texts after normalisation.
    Label,
    /// Emotion words with synonyms.
    Emotion,
    /// Multiple choice with all labels correct.
    McqExact,
    /// Multiple choice, scored by the overlap of label sets.
    McqIou,
    /// 3, 1.5 or 0 for short answers.
    ShortText,
    /// Numbers and simple formulas.
    Math,
    /// Yes or no.
    YesNo,
    /// Overlap of one box.
    Iou,
    /// Overlap of one time interval.
    TemporalIou,
    /// COCO average precision of a list of boxes.
    OdAp,
    /// Average precision at an overlap of 0.5.
    OdAp50,
    /// Average precision, reduced for surplus boxes.
    OdLength,
    /// Position and completeness of matched boxes.
    WeightedSum,
    /// Equal cleaned texts.
    AllMatch,
    /// VLM-R1's default: number, choice, otherwise similarity of texts.
    Fuzzy,
    /// R1-V: mathematics, otherwise the exact text of the first tag.
    R1v,
}

impl AccuracyMode {
    /// All values, as name, value and help. If a value has several names, the first is the canonical one.
    pub const ALL: &'static [(&'static str, Self, &'static str)] = &[
        (
            "auto",
            Self::Auto,
            "by the ground truth: box list, box, tuple, time interval, choice, yes/no, number, otherwise label",
        ),
        ("label", Self::Label, "equal after normalisation"),
        ("emotion", Self::Emotion, "emotion words, including synonyms"),
        ("mcq_exact", Self::McqExact, "multiple choice, all labels correct"),
        ("mcq_iou", Self::McqIou, "multiple choice, shared labels divided by all labels"),
        (
            "short_text",
            Self::ShortText,
            "3 equal, 1.5 half of the words, 0 else; yes/no words only when equal",
        ),
        ("math", Self::Math, "equal numbers or formulas"),
        ("yes_no", Self::YesNo, "yes or no, English and Vietnamese"),
        ("iou", Self::Iou, "overlap of one box"),
        ("temporal_iou", Self::TemporalIou, "overlap of one time interval"),
        ("od_ap", Self::OdAp, "COCO AP of a list of labelled boxes"),
        ("od_ap50", Self::OdAp50, "the same at overlap 0.5"),
        ("odLength", Self::OdLength, "od_ap, multiplied by gold boxes / boxes if there are too many"),
        ("weighted_sum", Self::WeightedSum, "0.7 position + 0.3 completeness of matched boxes"),
        ("all_match", Self::AllMatch, "equal cleaned texts"),
        ("fuzzy", Self::Fuzzy, "VLM-R1's default: number, choice letter, else similarity of texts"),
        ("r1v", Self::R1v, "R1-V: mathematics, else exact text of the first answer tag"),
        ("mcq", Self::McqExact, "VLM-R1's name of mcq_exact"),
        ("map", Self::OdAp, "VLM-R1's name of od_ap"),
        ("default", Self::Fuzzy, "VLM-R1's name of fuzzy"),
    ];
}

/// Choice among several `<answer>` tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub enum AnswerPolicy {
    /// The last well-formed tag.
    #[default]
    Last,
    /// The first tag, as in most of the source systems.
    First,
}

impl AnswerPolicy {
    /// All values, as name, value and help. If a value has several names, the first is the canonical one.
    pub const ALL: &'static [(&'static str, Self, &'static str)] =
        &[("last", Self::Last, "the last answer tag"), ("first", Self::First, "the first answer tag")];
}

/// A documented defect of a source system that can be reproduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Compat {
    /// `mcq_iou` scores 1 if neither side has an `(n)`.
    S2Accuracy,
    /// `mcq_exact` compares lists of `(n)`, otherwise complete answer texts.
    S3Accuracy,
    /// `format strict` is a regular expression, which accepts repeated and empty tags.
    S3Format,
    /// `short_text` does not treat yes and no separately, does not limit the length, and does not normalise Unicode.
    S4Accuracy,
    /// `format tags3` may be negative.
    S4Format,
    /// `explanation` counts words within the batch, and stretches its scores over the batch to 0..1.
    S4Explanation,
    /// `mcq` and `yes_no` search for letters and words as VLM-R1 does.
    VlmR1Choice,
    /// `iou` uses `x2 - 1`, and an overlap of one pixel counts 0.
    VlmR1Iou,
    /// `length` treats every answer as correct, and its curve rises again beyond the limit.
    VlmR1Length,
}

impl Compat {
    /// All values, as name, value and help. If a value has several names, the first is the canonical one.
    pub const ALL: &'static [(&'static str, Self, &'static str)] = &[
        ("s2_accuracy", Self::S2Accuracy, "mcq_iou: 1 if neither side has an (n)"),
        ("s3_accuracy", Self::S3Accuracy, "mcq_exact: lists of (n), otherwise complete answer texts"),
        (
            "s3_format",
            Self::S3Format,
            "format strict: regular expression that accepts repeated and empty tags",
        ),
        ("s4_accuracy", Self::S4Accuracy, "short_text: the source's rule without measures against hedging"),
        ("s4_format", Self::S4Format, "format tags3: may be negative"),
        (
            "s4_explanation",
            Self::S4Explanation,
            "explanation: words counted within the batch, scores stretched to 0..1",
        ),
        ("vlmr1_choice", Self::VlmR1Choice, "mcq, yes_no: VLM-R1's letter and word search"),
        ("vlmr1_iou", Self::VlmR1Iou, "iou: pixel convention (x2 - 1), an overlap of one pixel counts 0"),
        ("vlmr1_length", Self::VlmR1Length, "length: treats every answer as correct, rises beyond the limit"),
    ];
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

/// Implements the names of options with a list of values.
macro_rules! named {
    ($($type:ty: $option:literal),*) => {$(
        impl $type {
            /// Returns the name of the value.
            #[must_use]
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
    )*};
}
named!(FormatMode: "format_mode", AccuracyMode: "accuracy_mode", AnswerPolicy: "answer_policy", Compat: "compat");

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
